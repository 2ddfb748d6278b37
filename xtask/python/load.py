"""Loads a model the way a Python program would. Prints the seconds from the file to a model that is ready to run.

Usage: python load.py openvino|onnxruntime MODEL.onnx THREADS NAME=DIMS…
"""

import sys
import time


def openvino(model, threads, shapes):
    from openvino import Core

    core = Core()
    config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    core.get_property("CPU", "FULL_DEVICE_NAME")  # loads the device's plugin
    started = time.perf_counter()
    graph = core.read_model(model)
    graph.reshape(shapes)
    core.compile_model(graph, "CPU", config).create_infer_request()
    return time.perf_counter() - started


def onnxruntime(model, threads, _shapes):
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = threads
    started = time.perf_counter()
    InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return time.perf_counter() - started


if __name__ == "__main__":
    runtime, model, threads, *pairs = sys.argv[1:]
    shapes = {name: [int(d) for d in dims.split(",")] for name, dims in (pair.split("=") for pair in pairs)}
    print({"openvino": openvino, "onnxruntime": onnxruntime}[runtime](model, int(threads), shapes))
