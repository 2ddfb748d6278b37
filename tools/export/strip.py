"""Strips an ONNX file of its weights: writes NAME.graph.onnx.xz and NAME.map.json.xz (models/README.md) with every weight named
after its initializer.

    python3 tools/export/strip.py FILE.onnx[.gz] NAME TAG OUTDIR

A weight is a floating-point initializer of at least one dimension and more than one element that no operator needs to know the
shape of its output."""

import gzip
import math
import sys

import onnx
from onnx import TensorProto

import stripped

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
# Inputs whose values decide a shape: roi and scales of Resize, scales of Upsample.
SHAPING = {"Resize": (1, 2), "Upsample": (1,)}


def weights_of(graph):
    shaping = {
        node.input[i] for node in graph.node for i in SHAPING.get(node.op_type, ()) if i < len(node.input)
    }
    for tensor in graph.initializer:
        if tensor.data_type in FLOATS and tensor.dims and math.prod(tensor.dims) > 1 and tensor.name not in shaping:
            yield tensor.name


def main(source, name, tag, folder):
    data = open(source, "rb").read()
    model = onnx.load_from_string(gzip.decompress(data) if source.endswith(".gz") else data)
    weight_map = stripped.strip(model, name, tag, {weight: 1.0 for weight in weights_of(model.graph)})
    stripped.write(model, weight_map, folder)
    print(f"{name}: {len(weight_map['tensors'])} weights, {weight_map['weights_bytes']} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
