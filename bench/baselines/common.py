"""What all adapters share: the protocol, the measuring of time, inputs and outputs. README.md describes the protocol.

Peers print to file descriptor 1. The protocol therefore moves to a copy of it, and 1 becomes stderr.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
import time

FOLDER = os.path.dirname(os.path.abspath(__file__))


class Peer:
    """A model that another system has opened.

    `run` computes all outputs once and returns them when they are complete. `arrays` turns what `run` returned into numpy arrays
    by output name. `precision` is the one that the peer really computes in.
    """

    def __init__(self, system, version, precision, settings, build_seconds, load_seconds, run, arrays):
        self.run = run
        self.arrays = arrays
        self.opened = {
            "system": system,
            "version": version,
            "precision": precision,
            "settings": settings,
            "build_seconds": build_seconds,
            "load_seconds": load_seconds,
        }


def sibling(name):
    """The module `name` of this folder, which is not on the path while an adapter works."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(FOLDER, name + ".py"))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def version(package):
    return importlib.metadata.version(package)


class Clock:
    """Seconds since it was made, or since the last lap."""

    def __init__(self):
        self.started = time.perf_counter()

    def lap(self):
        now = time.perf_counter()
        seconds, self.started = now - self.started, now
        return seconds


class Request:
    """What the host asks an adapter to open."""

    def __init__(self, model, name, precision, threads, inputs=None, picture=None):
        self.model = model
        self.picture = picture
        self.name = name
        self.low = precision == "low"
        self.threads = threads
        self.inputs_file = inputs

    def inputs(self):
        """Numpy arrays by input name."""
        from safetensors.numpy import load_file

        return load_file(self.inputs_file)

    def names(self):
        """Names of the model's inputs and outputs, in its order."""
        import onnx

        graph = onnx.load(self.model, load_external_data=False).graph
        weights = {tensor.name for tensor in graph.initializer}
        return [value.name for value in graph.input if value.name not in weights], [value.name for value in graph.output]


def main(open_model):
    """Answers the host until its requests end. `open_model` turns a Request into a Peer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # Adapters are named after their peers: `import iree` must not find the adapter.
    sys.path.pop(0)
    peer = None
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if "open" in request:
                request = Request(**request["open"])
                # OpenMP reads it when a peer is imported, which therefore happens inside `open_model`.
                os.environ["OMP_NUM_THREADS"] = str(request.threads)
                peer = open_model(request)
                answer = {"opened": peer.opened}
            elif "run" in request:
                answer = {"seconds": [seconds(peer.run) for _ in range(request["run"])]}
            else:
                save(request["outputs"], peer.arrays(peer.run()))
                answer = {"saved": True}
        except Exception as error:
            answer = {"error": sentence(error)}
        answers.write(json.dumps(answer) + "\n")


def seconds(run):
    clock = Clock()
    # Keep the outputs until the clock has stopped: freeing them is not part of the run.
    outputs = run()
    taken = clock.lap()
    del outputs
    return taken


def save(path, arrays):
    import numpy
    from safetensors.numpy import save_file

    save_file({name: numpy.ascontiguousarray(array, dtype=numpy.float32) for name, array in arrays.items()}, path)


def sentence(error):
    """The error on one line, short enough for a table."""
    text = " ".join(str(error).split())
    text = text if type(error) is Unsupported else f"{type(error).__name__}: {text}"
    return text if len(text) <= 500 else text[:499] + "…"


class Unsupported(Exception):
    """The peer cannot do what was asked; the text says so in a sentence."""
