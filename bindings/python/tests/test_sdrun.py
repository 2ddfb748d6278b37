"""The installed package, without a network and without vendor runtimes: the provider ggml."""

import os
import signal
import subprocess
import threading
import time

import numpy
import pytest
import sdrun
from PIL import Image, ImageDraw


@pytest.fixture(scope="module")
def pipeline():
    return sdrun.Pipeline(provider="ggml")


def test_providers_have_devices():
    ggml = next(provider for provider in sdrun.providers() if provider.id == "ggml")
    assert ggml.why_not is None
    assert ggml.devices[0].id == "cpu" and ggml.devices[0].absent is None


def test_a_seed_is_a_picture(pipeline):
    steps = []
    draw = lambda seed: pipeline.generate("three green stars", seed=seed, steps=4)[0]
    first, again, other = draw(1), draw(1), draw(2)
    assert first.size == (64, 64) and first.tobytes() == again.tobytes() != other.tobytes()
    assert first.info["seed"] == 1 and "Steps: 4" in first.info["parameters"]
    pipeline.generate("x", seed=1, steps=3, progress=lambda *step: steps.append(step))
    assert [step for step in steps if step[0] == "step"] == [("step", i, 3) for i in (1, 2, 3)]


def test_count_and_start(pipeline):
    pictures = pipeline.generate("a red circle", seed=7, steps=3, count=2)
    assert [picture.info["seed"] for picture in pictures] == [7, 8]
    changed = pipeline.generate("a red circle", seed=7, steps=3, image=pictures[1], strength=0.5)[0]
    assert changed.size == (64, 64) and changed.tobytes() != pictures[1].tobytes()


def test_a_mask_keeps_every_other_pixel(pipeline):
    before = pipeline.generate("a red circle", seed=3, steps=4)[0]
    mask = Image.new("L", before.size)
    mask.paste(255, (32, 0, 64, 64))
    options = dict(image=before, mask=mask, mask_blur=0, mask_content="noise", strength=1.0, seed=4, steps=4)
    after = pipeline.generate("a blue square", **options)[0]
    left = lambda picture: picture.crop((0, 0, 32, 64)).tobytes()
    assert left(after) == left(before) and after.tobytes() != before.tobytes()
    with pytest.raises(sdrun.Error, match="mask needs the image"):
        pipeline.generate("x", mask=mask)
    with pytest.raises(sdrun.Error, match="surroundings"):
        pipeline.generate("x", **{**options, "mask_content": "surrounding"})


def test_a_control_net_and_a_second_pass():
    pipeline = sdrun.Pipeline(control_nets=["demo/canny"], provider="ggml")
    edges = Image.new("RGB", (128, 128), "black")
    ImageDraw.Draw(edges).ellipse((30, 30, 90, 90), fill="white")
    draw = lambda *controls, **more: pipeline.generate("a red circle", seed=1, steps=4, controls=controls, **more)[0]
    follows = draw(sdrun.Control(edges, "canny"))
    assert follows.tobytes() != draw(sdrun.Control(edges, "canny", strength=0.0)).tobytes()
    assert draw(edges, hires=1.5).size == draw(edges, hires=sdrun.Hires(1.5, steps=2)).size == (96, 96)
    with pytest.raises(sdrun.Error, match="at most 8"):
        draw(edges, hires=9)
    with pytest.raises(sdrun.Error, match="ControlNet"):
        draw()


def test_previews_and_warnings(pipeline):
    seen = []
    pipeline.generate("a red circle", seed=1, steps=3, preview=seen.append)
    assert seen and all(picture.size == (64, 64) for picture in seen)
    with pytest.warns(UserWarning, match="zebra"):
        pipeline.generate("a zebra", seed=1, steps=1)


def test_progress_is_a_bar_of_tqdm(pipeline, capfd):
    pipeline.generate("a red circle", seed=1, steps=3, progress=True)
    assert "3/3" in capfd.readouterr().err


def test_the_same_picture_as_the_command_line(pipeline, tmp_path):
    program = os.environ.get("SDRUN_CLI")
    if not program:
        pytest.skip("SDRUN_CLI does not name the command line")
    file = tmp_path / "picture.png"
    options = ["--provider=ggml", "--seed=5", "--steps=4", "--output", str(file)]
    subprocess.run([program, "generate", "a blue square", *options], check=True, capture_output=True)
    assert Image.open(file).convert("RGB").tobytes() == pipeline.generate("a blue square", seed=5, steps=4)[0].tobytes()


def test_errors_have_a_code_and_a_hint(pipeline):
    with pytest.raises(sdrun.Error, match="no sampler") as error:
        pipeline.generate("x", sampler="magic")
    assert error.value.code == "InvalidArgument"
    with pytest.raises(sdrun.Error) as error:
        sdrun.Pipeline("/does/not/exist.safetensors")
    assert error.value.code == "NotFound"
    with pytest.raises(sdrun.Error) as error:
        sdrun.Session("mobilenet-v3")
    assert "mobilenet-v2" in str(error.value) + str(error.value.hint)
    with pytest.raises(TypeError):
        sdrun.Session("mobilenet-v2", loras="one.safetensors")


def test_an_exception_in_progress_stops_the_work(pipeline):
    def stop(what, step, steps):
        if what == "step":
            raise KeyError("enough")

    with pytest.raises(KeyError):
        pipeline.generate("x", steps=1000, progress=stop)
    assert pipeline.generate("x", steps=2)


def test_ctrl_c_stops_the_work(pipeline):
    # A shell that starts this in the background has it ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pipeline.generate("x", steps=1000)
    assert pipeline.generate("x", steps=2)


def test_other_threads_go_on(pipeline):
    ticks = []
    ended = threading.Event()

    def tick():
        while not ended.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    pipeline.generate("x", steps=20)
    ended.set()
    thread.join()
    assert len(ticks) > 10


def test_a_session_runs_and_refits(tmp_path):
    session = sdrun.Session("taesd/decoder", provider="ggml", shapes={"latent_sample": (1, 4, 8, 8)})
    (given,), (result,) = session.inputs, session.outputs
    assert given.dtype == "f32" and session.provider == "ggml" and session.device == "cpu"
    x = numpy.random.default_rng(0).standard_normal((1, 4, 8, 8), dtype=numpy.float32)
    y = session.run({given.name: x})[result.name]
    assert y.dtype == numpy.float32 and y.shape == (1, 3, 64, 64) and numpy.isfinite(y).all()
    # Not contiguous in memory, but the same values.
    again = session.run({given.name: numpy.asfortranarray(x)})[result.name]
    assert (again == y).all()
    with pytest.raises(sdrun.Error, match="float64"):
        session.run({given.name: x.astype(numpy.float64)})
    with pytest.raises(sdrun.Error):
        session.run({"other": x})
    # The model's own weights again.
    assert session.refit() >= 0
    assert (session.run({given.name: x})[result.name] == y).all()
