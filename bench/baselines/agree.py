"""Compares an adapter's times with those of the peer's own tool, in turns. Prints both medians and their ratio.

Usage: agree.py openvino|iree|pytorch MODEL.onnx INPUTS.safetensors --python VENV/bin/python [--threads 2] [--rounds 21] [--seconds 1.5]

The tools are `benchmark_app`, `iree-benchmark-module` and `torch.utils.benchmark.Timer`. The model's shapes have to be fixed. The 95 %
interval of the ratio comes from drawing the rounds again, as in `sdrun bench`. Exits with 1 if it lies outside 0.97 to 1.03.
"""

import argparse
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
MOST = 0.03


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("adapter", choices=TOOLS)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("inputs", type=pathlib.Path)
    parser.add_argument("--python", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=1.5)
    options = parser.parse_args()
    options.model, options.inputs = options.model.resolve(), options.inputs.resolve()

    # The adapter's own files lie in this folder.
    with tempfile.TemporaryDirectory() as folder:
        options.folder = pathlib.Path(folder)
        environment = {**os.environ, "TMPDIR": folder}
        command = [options.python, str(HERE / f"{options.adapter}.py")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:

            def ask(request):
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                answer = json.loads(process.stdout.readline())
                if "error" in answer:
                    sys.exit(f"{options.adapter}: {answer['error']}")
                return answer

            request = {"model": str(options.model), "name": None, "precision": "fp32", "threads": options.threads, "inputs": str(options.inputs)}
            ask({"open": request})
            tool = TOOLS[options.adapter](options)
            latest = ask({"run": 3})["seconds"][-1]
            ours, theirs = [], []
            for _ in range(1 + options.rounds):
                count = max(3, round(options.seconds / latest))
                # The tools warm up before they measure.
                times = ask({"run": count + 1})["seconds"][1:]
                latest = statistics.median(times)
                ours.append(latest)
                theirs.append(tool(count))
            process.stdin.close()
    # Both are warm after the first round.
    rounds = list(zip(ours, theirs))[1:]
    again = random.Random(0)
    drawn = sorted(ratio(again.choices(rounds, k=len(rounds))) for _ in range(2000))
    low, high = drawn[50], drawn[1950]
    adapter, own = (1e3 * statistics.median(times) for times in zip(*rounds))
    print(
        f"{options.adapter}, {options.model.stem}: adapter {adapter:.2f} ms, its own tool {own:.2f} ms,"
        f" ratio {ratio(rounds):.3f} ({low:.3f} to {high:.3f})"
    )
    return low <= 1 + MOST and high >= 1 - MOST


def ratio(rounds):
    """The adapter's time relative to the tool's. Pairs see the same disturbances."""
    return statistics.median(ours / theirs for ours, theirs in rounds)


def beside(options, name):
    """A program in the environment."""
    return str(pathlib.Path(options.python).with_name(name))


def output(*command):
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command[0]}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def benchmark_app(options):
    def run(count):
        settings = ["-d", "CPU", "-api", "sync", "-hint", "none", "-nstreams", "1", "-nthreads", str(options.threads)]
        text = output(beside(options, "benchmark_app"), "-m", str(options.model), *settings, "-niter", str(count), "-infer_precision", "f32")
        return float(re.search(r"Median:\s+([\d.]+) ms", text)[1]) / 1e3

    return run


def iree_benchmark_module(options):
    program, weights, text = (next(options.folder.glob(f"*/model.{kind}")) for kind in ("vmfb", "irpa", "mlir"))
    # Without a name, the tool takes only functions without inputs.
    function = re.search(r"func\.func @(\w+)", text.read_text())[1]
    # Values do not matter for its time; it fills the inputs.
    script = (
        "import sys; from safetensors.numpy import load_file; import onnx\n"
        "graph = onnx.load(sys.argv[1], load_external_data=False).graph\n"
        "weights = {tensor.name for tensor in graph.initializer}; arrays = load_file(sys.argv[2])\n"
        "kinds = {'float32': 'f32', 'float16': 'f16', 'int64': 'i64', 'int32': 'i32'}\n"
        "for value in graph.input:\n"
        "    if value.name not in weights:\n"
        "        array = arrays[value.name]; print('x'.join([*map(str, array.shape), kinds[array.dtype.name]]) + '=1')\n"
    )
    inputs = output(options.python, "-c", script, str(options.model), str(options.inputs)).split()

    def run(count):
        text = output(
            beside(options, "iree-benchmark-module"),
            f"--module={program}",
            f"--parameters=model={weights}",
            f"--function={function}",
            "--device=local-task",
            f"--task_topology_group_count={options.threads}",
            *(f"--input={value}" for value in inputs),
            f"--benchmark_min_time={count}x",
            "--benchmark_format=json",
        )
        found = json.loads(text[text.index("{") :])["benchmarks"][0]
        return found["real_time"] * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}[found["time_unit"]]

    return run


def torch_timer(options):
    # The same module and inputs in another process.
    script = f"""
import json, sys
sys.path.insert(0, {str(HERE)!r})
import common
request = common.Request({str(options.model)!r}, None, "fp32", {options.threads}, {str(options.inputs)!r})
import torch
from torch.utils.benchmark import Timer
module, tensors, _ = common.sibling("torch_model").load(request)
for line in sys.stdin:
    timer = Timer("module(*tensors)", globals=dict(module=module, tensors=tensors), num_threads={options.threads})
    timer.timeit(1)
    times = [timer.timeit(1).median for _ in range(int(line))]
    print(json.dumps(sorted(times)[len(times) // 2]), flush=True)
"""
    process = subprocess.Popen([options.python, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(count):
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    return run


TOOLS = {"openvino": benchmark_app, "iree": iree_benchmark_module, "pytorch": torch_timer}

if __name__ == "__main__":
    sys.exit(not main())
