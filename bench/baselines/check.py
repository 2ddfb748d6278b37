"""Opens one adapter on one model, runs it three times and compares its outputs with a reference. Prints one line.

Usage: check.py ADAPTER MODEL.onnx INPUTS.safetensors REFERENCE.safetensors [--precision low] [--threads 2] [--name sd15/unet]
                [--python VENV/bin/python] [--runs 3]
A REFERENCE that does not exist is written instead: start with the adapter `onnxruntime`. Exits with 1 if outputs are too far apart.
"""

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile

import numpy
from safetensors.numpy import load_file, save_file

LIMITS = {"fp32": 1e-3, "low": 5e-2}


def main():
    parser = argparse.ArgumentParser()
    for name in ("adapter", "model", "inputs", "reference"):
        parser.add_argument(name)
    parser.add_argument("--precision", choices=LIMITS, default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()

    script = pathlib.Path(__file__).with_name(options.adapter + ".py")
    with subprocess.Popen([options.python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(request):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                sys.exit(f"{options.adapter}: it ended with exit status {process.wait()}")
            answer = json.loads(line)
            if "error" in answer:
                process.stdin.close()
                sys.exit(f"{options.adapter}: {answer['error']}")
            return answer

        model, inputs = (str(pathlib.Path(path).resolve()) for path in (options.model, options.inputs))
        request = {"model": model, "name": options.name, "precision": options.precision, "threads": options.threads, "inputs": inputs}
        opened = ask({"open": request})["opened"]
        times = ask({"run": options.runs})["seconds"]
        with tempfile.TemporaryDirectory() as folder:
            outputs = folder + "/outputs.safetensors"
            ask({"outputs": outputs})
            outputs = load_file(outputs)
        process.stdin.close()

    if pathlib.Path(options.reference).exists():
        apart = distance(outputs, load_file(options.reference))
    else:
        save_file(outputs, options.reference)
        apart = 0.0
    print(
        f"{options.adapter} {opened['version']} {opened['precision']}: build {opened['build_seconds']:.1f} s,"
        f" load {opened['load_seconds']:.1f} s, median {1e3 * statistics.median(times):.1f} ms"
        f" of {', '.join(f'{1e3 * t:.1f}' for t in times)}, apart {apart:.1e} ({opened['settings']})"
    )
    return apart < LIMITS[options.precision]


def distance(outputs, reference):
    """Largest difference, relative to the largest value of that output. Not-a-numbers are infinitely far."""
    assert outputs.keys() == reference.keys(), f"outputs {sorted(outputs)}, expected {sorted(reference)}"
    worst = 0.0
    for name, expected in reference.items():
        assert outputs[name].shape == expected.shape, f"{name} is {outputs[name].shape}, expected {expected.shape}"
        apart = float(numpy.abs(outputs[name] - expected).max() / numpy.abs(expected).max())
        worst = float("inf") if math.isnan(apart) else max(worst, apart)
    return worst


if __name__ == "__main__":
    sys.exit(not main())
