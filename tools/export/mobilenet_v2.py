"""Writes mobilenet_v2.graph.onnx.xz and its map: MobileNet v2 (Sandler et al. 2018, arXiv:1801.04381) at width 1.0, built as
torchvision builds it, with every BatchNorm folded into its convolution as exported files have it. Weights are named after
torchvision's modules.

    python3 tools/export/mobilenet_v2.py OUTDIR"""

import math
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper

import stripped

NAME, TAG, OPSET = "mobilenet_v2", "mobilenet_v2/A", 17
# Expansion, channels, repeats, stride of the first block (table 2 of the paper).
STAGES = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
# ReLU halves the second moment of its input; this factor on the weights after it keeps the scale (He et al. 2015).
AFTER_RELU = math.sqrt(2)
# Residual branches are damped: without that, 17 random blocks make all inputs look alike.
RESIDUAL = 0.25 * AFTER_RELU


class Builder:
    """Collects nodes and parameters; values and nodes are named by module path, as TorchScript exports name them."""

    def __init__(self):
        self.nodes = []
        self.gains = {}
        self.initializers = [
            helper.make_tensor("relu6_min", TensorProto.FLOAT, [], [0.0]),
            helper.make_tensor("relu6_max", TensorProto.FLOAT, [], [6.0]),
        ]

    def parameter(self, name, shape, gain=1.0):
        zeros = bytes(4 * math.prod(shape))
        self.initializers.append(helper.make_tensor(name, TensorProto.FLOAT, shape, zeros, raw=True))
        self.gains[name] = float(np.float32(gain))
        return name

    def node(self, op, path, inputs, output=None, **attributes):
        name = f"{path}/{op}"
        output = output or f"{name}_output_0"
        self.nodes.append(helper.make_node(op, inputs, [output], name, **attributes))
        return output

    def conv(self, x, path, channels, out, kernel=1, stride=1, groups=1, relu6=True, gain=1.0):
        """Convolution `path` (dotted module path) with bias, and ReLU6 after it."""
        weight = self.parameter(f"{path}.weight", [out, channels // groups, kernel, kernel], gain)
        bias = self.parameter(f"{path}.bias", [out])
        scope = "/" + path.replace(".", "/")
        x = self.node(
            "Conv", scope, [x, weight, bias],
            dilations=[1, 1], group=groups, kernel_shape=[kernel] * 2, pads=[kernel // 2] * 4, strides=[stride] * 2,
        )  # fmt: skip
        return self.node("Clip", scope, [x, "relu6_min", "relu6_max"]) if relu6 else x

    def block(self, x, path, channels, out, expansion, stride):
        """Inverted residual: expand (1x1), depthwise (3x3), project (1x1, linear)."""
        hidden, y, part = channels * expansion, x, 0
        residual = stride == 1 and channels == out
        if expansion != 1:
            y = self.conv(y, f"{path}.conv.0.0", channels, hidden)
            part = 1
        y = self.conv(y, f"{path}.conv.{part}.0", hidden, hidden, 3, stride, groups=hidden, gain=AFTER_RELU)
        gain = RESIDUAL if residual else AFTER_RELU
        y = self.conv(y, f"{path}.conv.{part + 1}", hidden, out, relu6=False, gain=gain)
        return self.node("Add", "/" + path.replace(".", "/"), [x, y]) if residual else y


def build():
    """The model with zeros for weights, and the gain of each weight."""
    b = Builder()
    x = b.conv("input", "features.0.0", 3, 32, kernel=3, stride=2)
    channels, block = 32, 1
    for expansion, out, repeats, first_stride in STAGES:
        for repeat in range(repeats):
            stride = first_stride if repeat == 0 else 1
            x = b.block(x, f"features.{block}", channels, out, expansion, stride)
            channels, block = out, block + 1
    x = b.conv(x, f"features.{block}.0", channels, 1280)
    x = b.node("GlobalAveragePool", "", [x])
    x = b.node("Flatten", "", [x], axis=1)
    weight = b.parameter("classifier.1.weight", [1000, 1280], AFTER_RELU)
    bias = b.parameter("classifier.1.bias", [1000])
    b.node("Gemm", "/classifier/1", [x, weight, bias], "output", transB=1)
    graph = helper.make_graph(
        b.nodes,
        NAME,
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3, 224, 224])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 1000])],
        b.initializers,
    )
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name=f"{NAME}.py"), b.gains


if __name__ == "__main__":
    model, gains = build()
    onnx.checker.check_model(model, full_check=True)
    weight_map = stripped.strip(model, NAME, TAG, gains)
    stripped.write(model, weight_map, sys.argv[1])
    print(f"{NAME}: {len(gains)} weights, {weight_map['weights_bytes']} bytes")
