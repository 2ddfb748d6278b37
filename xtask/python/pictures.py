"""Draws pictures of SD 1.5 with other programs, and measures time and memory. Prints JSON.

Usage: pictures.py prepare CHECKPOINT FOLDER     writes the checkpoint as a diffusers folder and as OpenVINO's models into FOLDER
       pictures.py diffusers FOLDER fp32|bf16 STEPS THREADS
       pictures.py genai FOLDER fp32|bf16 STEPS THREADS
       pictures.py watch COMMAND [ARGUMENT…]     runs a command

Needs torch, diffusers, transformers below version 5, sentencepiece, optimum-intel[openvino] and openvino-genai.
"""

import json
import lzma
import os
import statistics
import subprocess
import sys
import threading
import time

PROMPT, NEGATIVE, SCALE, SIDE = "a lighthouse in the fog", "blurry", 7.0, 512


class Watch:
    """The most memory of a process, without pages of files that the system can drop. Linux only."""

    def __init__(self, pid):
        self.path, self.peak, self.ended = f"/proc/{pid}/status", 0, threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.ended.wait(0.005):
            try:
                with open(self.path) as file:
                    fields = dict(line.split(":", 1) for line in file)
                kib = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
            except (OSError, KeyError):
                continue  # the process has ended
            self.peak = max(self.peak, kib * 1024)

    def end(self):
        self.ended.set()
        self.thread.join()
        return self.peak


def prepare(checkpoint, folder):
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../tools/diffusion"))
    import sd15
    import text
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    merges = os.path.join(os.path.dirname(__file__), "../../core/diffusion/src/text/tokenizer/clip_merges.txt.xz")
    with lzma.open(merges, "rt", encoding="utf-8") as file:
        tokenizer = text.clip_tokenizer(file.read())
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1, timestep_spacing="leading"
    )
    parts = {
        "vae": AutoencoderKL.from_config(sd15.VAE),
        "text_encoder": CLIPTextModel(CLIPTextConfig(**sd15.TEXT)),
        "tokenizer": tokenizer,
        "unet": UNet2DConditionModel.from_config(sd15.UNET),
        "scheduler": scheduler,
    }
    bare = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    path = os.path.join(folder, "diffusers")
    StableDiffusionPipeline(**parts, **bare).save_pretrained(path)
    StableDiffusionPipeline.from_single_file(checkpoint, config=path, local_files_only=True, **bare).save_pretrained(path)
    export = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--task", "text-to-image"]
    export += ["--weight-format", "fp16", "-m", path, os.path.join(folder, "openvino")]
    subprocess.run(export, check=True, stdout=sys.stderr)


def drawn(load, draw):
    """Loads and draws in this process. `draw` gets the pipeline and a function to call after each step."""
    watch = Watch("self")
    started = time.perf_counter()
    pipeline = load()
    loaded = time.perf_counter()
    times = [loaded]
    draw(pipeline, lambda: times.append(time.perf_counter()))
    end = time.perf_counter()
    # Text encoding counts to the first interval.
    steps = [after - before for before, after in zip(times[1:], times[2:])]
    return {"seconds": end - started, "load_s": loaded - started, "step_s": statistics.median(steps), "peak_bytes": watch.end()}


def diffusers(folder, precision, steps, threads):
    import diffusers
    import torch

    torch.set_num_threads(threads)
    options = {"torch_dtype": {"fp32": torch.float32, "bf16": torch.bfloat16}[precision], "safety_checker": None}

    def load():
        pipeline = diffusers.StableDiffusionPipeline.from_pretrained(os.path.join(folder, "diffusers"), **options)
        for network in (pipeline.unet, pipeline.vae):
            network.to(memory_format=torch.channels_last)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def draw(pipeline, stepped):
        def callback(pipeline, step, time, values):
            stepped()
            return values

        options = {"width": SIDE, "height": SIDE, "num_inference_steps": steps, "guidance_scale": SCALE}
        pipeline(PROMPT, negative_prompt=NEGATIVE, callback_on_step_end=callback, **options)

    return {**drawn(load, draw), "version": f"diffusers {diffusers.__version__}, torch {torch.__version__}"}


def genai(folder, precision, steps, threads):
    import openvino_genai

    options = {"INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16"}[precision], "INFERENCE_NUM_THREADS": threads}

    def load():
        return openvino_genai.Text2ImagePipeline(os.path.join(folder, "openvino"), "CPU", **options)

    def draw(pipeline, stepped):
        def callback(step, steps, latent):
            stepped()
            return False

        options = {"width": SIDE, "height": SIDE, "num_inference_steps": steps, "guidance_scale": SCALE}
        pipeline.generate(PROMPT, negative_prompt=NEGATIVE, callback=callback, rng_seed=1, **options)

    return {**drawn(load, draw), "version": f"openvino-genai {openvino_genai.__version__}"}


def watch(*command):
    started = time.perf_counter()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    memory = Watch(child.pid)
    words, _ = child.communicate()
    seconds = time.perf_counter() - started
    if child.returncode:
        sys.exit(f"{command[0]} failed ({child.returncode}): {words[-2000:]}")
    return {"seconds": seconds, "peak_bytes": memory.end(), "words": words}


def main(what, *arguments):
    if what == "prepare":
        return prepare(*arguments)
    if what == "watch":
        measured = watch(*arguments)
    else:
        folder, precision, steps, threads = arguments
        measured = {"diffusers": diffusers, "genai": genai}[what](folder, precision, int(steps), int(threads))
    print(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
