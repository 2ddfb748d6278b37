"""Runs a stripped model with its synthetic weights in onnxruntime: prints the scale of every layer's output and the
distance between outputs for different inputs. Synthetic weights are useful only if both stay in the order of one.

    python3 tools/export/check.py core/weights/models/NAME.map.json.xz INPUT=LOW,HIGH,SHAPE [TAG]     INPUT=0,1,4x3x224x224: a picture in [0, 1]
    python3 tools/export/check.py core/weights/models/NAME.map.json.xz INPUT=SHAPE [TAG]              unit-variance noise"""

import json
import lzma
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime

import stripped
import synth


def main(map_file, source, tag=None):
    weight_map = json.loads(lzma.open(map_file).read())
    graph = pathlib.Path(map_file).with_name(weight_map["graph"] + ".xz")
    model = onnx.load_from_string(stripped.filled(onnx.load_from_string(lzma.open(graph).read()), weight_map, tag))
    name, how = source.split("=")
    shape = [int(d) for d in how.split(",")[-1].split("x")]
    if "," in how:
        low, high = (float(bound) for bound in how.split(",")[:2])
        x = synth.picture(weight_map["tag"], name, shape, low, high)
    else:
        x = synth.inputs(weight_map["tag"], name, shape)

    outputs = [output.name for output in model.graph.output]
    layers = [n.output[0] for n in model.graph.node if n.op_type in ("Conv", "Gemm", "Clip", "Relu", "Add")]
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in layers if n not in outputs)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    values = dict(zip(names, session.run(names, {name: x})))
    for layer in layers + [n for n in outputs if n not in layers]:
        y = values[layer]
        assert np.isfinite(y).all(), layer
        apart = [np.linalg.norm(y[0] - other) / np.linalg.norm(y[0]) for other in y[1:]]
        print(f"{layer:60} std {y.std():6.3f}  |max| {np.abs(y).max():7.3f}  apart {np.round(apart, 3)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
