"""Writes models/mobilenet_v2.*: MobileNet v2 (Sandler et al. 2018, arXiv 1801.04381), width 1.0, as torchvision builds it, BatchNorm
folded into the convolutions as exported files have it. Weight names are torchvision's module paths.

    python3 tools/export/mobilenet_v2.py [--check]

--check also runs it in onnxruntime and prints the scale of every layer and how far two inputs lie apart."""

import pathlib
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper

import stripped
import synth

OPSET = 17
# expansion, channels, repeats, stride of the first (table 2 of the paper)
STAGES = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
G = dict(stem=1.0, expand=1.0, dw=1.0, proj=1.0, res=1.0, head=1.0, fc=1.0,b=1.0)
SRC={}


class Builder:
    def __init__(self):
        self.nodes, self.initializers, self.gains = [], [], {}
        for name, value in (("relu6_min", 0.0), ("relu6_max", 6.0)):
            self.initializers.append(helper.make_tensor(name, TensorProto.FLOAT, [], [value]))

    def parameter(self, name, shape, gain=1.0):
        self.initializers.append(
            helper.make_tensor(name, TensorProto.FLOAT, shape, bytes(4 * int(np.prod(shape))), raw=True)
        )
        self.gains[name] = gain
        return name

    def node(self, op, path, inputs, **attributes):
        name = f"/{path.replace('.', '/')}/{op}"
        self.nodes.append(helper.make_node(op, inputs, [f"{name}_output_0"], name, **attributes))
        return f"{name}_output_0"

    def conv(self, x, path, channels, out, kernel=1, stride=1, groups=1, relu6=True, gain=1.0):
        weight = self.parameter(f"{path}.weight", [out, channels // groups, kernel, kernel], gain)
        bias = self.parameter(f"{path}.bias", [out], G["b"] if relu6 else 1.0)
        if relu6: SRC[f"{path}.bias"]=f"{path[:-1]}1.weight"
        x = self.node("Conv", path, [x, weight, bias], dilations=[1, 1], group=groups, kernel_shape=[kernel, kernel],
                      pads=[kernel // 2] * 4, strides=[stride, stride])
        return self.node("Clip", path, [x, "relu6_min", "relu6_max"]) if relu6 else x


def build():
    b = Builder()
    x = b.conv("input", "features.0.0", 3, 32, kernel=3, stride=2, gain=G["stem"])
    channels, block = 32, 1
    for expansion, out, repeats, first_stride in STAGES:
        for repeat in range(repeats):
            stride = first_stride if repeat == 0 else 1
            path, hidden, y, part = f"features.{block}.conv", channels * expansion, x, 0
            residual = stride == 1 and channels == out
            if expansion != 1:
                y = b.conv(y, f"{path}.0.0", channels, hidden, gain=G["expand"])
                part = 1
            y = b.conv(y, f"{path}.{part}.0", hidden, hidden, kernel=3, stride=stride, groups=hidden, gain=G["dw"])
            y = b.conv(y, f"{path}.{part + 1}", hidden, out, relu6=False, gain=G["res"] if residual else G["proj"])
            x = b.node("Add", f"features.{block}", [x, y]) if residual else y
            channels, block = out, block + 1
    x = b.conv(x, f"features.{block}.0", channels, 1280, gain=G["head"])
    x = b.node("GlobalAveragePool", "pool", [x])
    x = b.node("Flatten", "flatten", [x], axis=1)
    weight = b.parameter("classifier.1.weight", [1000, 1280], G["fc"])
    bias = b.parameter("classifier.1.bias", [1000])
    b.nodes.append(helper.make_node("Gemm", [x, weight, bias], ["output"], "/classifier/classifier.1/Gemm", transB=1))
    graph = helper.make_graph(
        b.nodes,
        "mobilenet_v2",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3, 224, 224])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 1000])],
        b.initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8, producer_name="mobilenet_v2.py")
    onnx.checker.check_model(model)
    return model, b.gains


def check(model, weight_map, x=None, verbose=True):
    import onnxruntime

    probe = onnx.load_from_string(stripped.filled(model, weight_map))
    names = [n.output[0] for n in probe.graph.node]
    for n in names[:-1]: probe.graph.output.append(helper.make_tensor_value_info(n, TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    if x is None: x = synth.inputs("mobilenet_v2", "input", (4, 3, 224, 224))
    res=dict(zip(names[-1:]+names[:-1], session.run(None, {"input": x})))
    for n in names:
        v=res[n]
        if not ("Add" in n or "Clip" in n and verbose or "Conv" in n and verbose or n=="output" or "Pool" in n): continue
        if n=="output": print(v[0,:6],v[1,:6])
        d=v[0]-v[1]
        print(f"{n:45s} mean {v.mean():7.3f} std {v.std():7.3f} max {v.max():7.2f} at6 {np.mean(v>=6):.3f}  ||a-b||/||a|| {np.linalg.norm(d)/np.linalg.norm(v[0]):.3f}")
    return res["output"]


if __name__ == "__main__":
    for a in sys.argv[1:]:
        if "=" in a: G[a.split("=")[0]]=float(a.split("=")[1])
    model, gains = build()
    weights = set(gains)
    weight_map = stripped.strip(model, "mobilenet_v2", "mobilenet_v2/A", weights, gains)
    for e in weight_map["tensors"]: e["src"]=SRC.get(e["init"],e["src"])
    if "--check" in sys.argv:
        check(model, weight_map, verbose="-v" in sys.argv)
