"""Writes core/graph/testdata/reference.json: single nodes, their inputs, and ONNX Runtime's outputs.

    python tools/reference/operators.py

Needs numpy, onnx and onnxruntime. The inputs are the same in every run.
"""

import json
import pathlib

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

ort.set_default_logger_severity(4)
rng = np.random.default_rng(7)
cases = []


def noise(*shape):
    return rng.uniform(-1, 1, shape).round(3).astype(np.float32)


def integers(dtype, *shape):
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape, dtype=dtype)


def listed(array):
    if array is None:
        return None
    flat = array.reshape(-1).tolist()
    if array.dtype == np.float32:
        # JSON has no NaN and no infinity.
        flat = [float(str(v)) if np.isfinite(v) else str(v) for v in array.reshape(-1)]
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": flat}


def case(name, op, inputs, outputs=1, domain="", opset=14, **attributes):
    names = [f"i{i}" if v is not None else "" for i, v in enumerate(inputs)]
    outs = [f"o{i}" for i in range(outputs)]
    node = helper.make_node(op, names, outs, domain=domain, **attributes)
    inputs = [None if v is None else np.asarray(v) for v in inputs]
    values = {n: v for n, v in zip(names, inputs) if n}
    # For some operators, quantised weights and their parameters must be initializers.
    fixed = {n for n in values if domain and n != names[0]}
    info = lambda n, v: helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
    graph = helper.make_graph(
        [node],
        "g",
        [info(n, v) for n, v in values.items() if n not in fixed],
        [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in outs],
        [onnx.numpy_helper.from_array(values[n], n) for n in fixed],
    )
    for out in graph.output:
        out.ClearField("type")
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results = session.run(outs, {n: v for n, v in values.items() if n not in fixed})
    cases.append(
        {
            "name": name,
            "op": op,
            "domain": domain,
            "opset": opset,
            "attributes": attributes,
            "inputs": [listed(v) for v in inputs],
            "outputs": [listed(v) for v in results],
        }
    )


def recurrent(name, op, gates, steps=4, batch=2, size=3, hidden=5, directions=1, weights=None, **kw):
    parts = {
        "x": noise(steps, batch, size),
        "w": noise(directions, gates * hidden, size),
        "r": noise(directions, gates * hidden, hidden),
        "b": noise(directions, 2 * gates * hidden) if kw.pop("bias", True) else None,
        "lengths": np.array(kw["lengths"], np.int32) if kw.pop("lengths_given", "lengths" in kw) else None,
        "h": noise(directions, batch, hidden) if kw.get("initial") else None,
        "c": noise(directions, batch, hidden) if kw.get("initial") and op == "LSTM" else None,
        "p": noise(directions, 3 * hidden) if kw.get("peepholes") else None,
    }
    for key in ("lengths", "initial", "peepholes"):
        kw.pop(key, None)
    inputs = list(parts.values())
    while inputs[-1] is None:
        inputs.pop()
    case(name, op, inputs, 3 if op == "LSTM" else 2, hidden_size=hidden, **kw)


def quantized_lstm(name, steps=3, batch=2, size=6, hidden=5, directions=1, columns=False, signed=True):
    rows = 4 * hidden
    dtype = np.int8 if signed else np.uint8
    matrix = lambda depth: integers(dtype, directions, depth, rows)
    scale_shape = (directions, rows) if columns else (directions,)
    scale = lambda: np.abs(noise(*scale_shape)) / 128 + np.float32(0.001)
    zero = lambda: np.zeros(scale_shape, dtype) if columns or signed else np.full(scale_shape, 128, dtype)
    states = [noise(directions, batch, hidden) for _ in range(2)]
    inputs = [noise(steps, batch, size), matrix(size), matrix(hidden), noise(directions, 2 * rows), None, *states]
    inputs += [None, scale(), zero(), scale(), zero()]
    direction = "bidirectional" if directions == 2 else "forward"
    kw = {"direction": direction, "hidden_size": hidden}
    case(name, "DynamicQuantizeLSTM", inputs, 3, domain="com.microsoft", **kw)


both = dict(directions=2, direction="bidirectional")
recurrent("lstm", "LSTM", 4)
recurrent("lstm reverse", "LSTM", 4, direction="reverse", initial=True)
recurrent("lstm both", "LSTM", 4, lengths=[4, 2], initial=True, **both)
recurrent("lstm zero length", "LSTM", 4, lengths=[0, 3], initial=True)
recurrent("lstm peepholes", "LSTM", 4, peepholes=True, initial=True)
recurrent("lstm clip", "LSTM", 4, clip=0.3, initial=True, peepholes=True)
recurrent("lstm input forget", "LSTM", 4, input_forget=1, initial=True)
recurrent("lstm no bias", "LSTM", 4, bias=False)
recurrent(
    "lstm activations",
    "LSTM",
    4,
    initial=True,
    activations=["HardSigmoid", "ScaledTanh", "Affine", "Sigmoid", "LeakyRelu", "Softsign"],
    activation_alpha=[0.3, 0.9, 0.7, 0.2],
    activation_beta=[0.4, 0.8, 0.1],
    **both,
)
for linear in (0, 1):
    recurrent(f"gru {linear}", "GRU", 3, linear_before_reset=linear, initial=True, lengths=[3, 4], **both)
    recurrent(f"gru clip {linear}", "GRU", 3, linear_before_reset=linear, clip=0.25)
recurrent("gru reverse", "GRU", 3, direction="reverse", activations=["HardSigmoid", "Relu"])
recurrent("rnn", "RNN", 1, initial=True, lengths=[4, 1], **both)
for f in ("Relu", "Elu", "Softplus", "ThresholdedRelu", "Affine", "LeakyRelu", "HardSigmoid"):
    recurrent(f"rnn {f}", "RNN", 1, activations=[f], activation_alpha=[0.4], activation_beta=[0.3])
quantized_lstm("quantized lstm")
quantized_lstm("quantized lstm columns", columns=True, directions=2)
quantized_lstm("quantized lstm unsigned", signed=False, hidden=40)



def products():
    u8, i8 = np.uint8, np.int8
    for a, b in ((u8, i8), (i8, i8), (u8, u8)):
        if a == i8 and b != i8:
            continue
        name = f"{np.dtype(a)} {np.dtype(b)}"
        zeros = [integers(a), integers(b)]
        case(f"integer matmul {name}", "MatMulInteger", [integers(a, 5, 7), integers(b, 7, 37), *zeros], opset=10)
        x, w = integers(a, 1, 5, 6, 7), integers(b, 3, 5, 3, 2)
        if a == u8:
            kw = dict(pads=[1, 0, 1, 1], strides=[1, 2], dilations=[2, 1])
            case(f"integer conv {name}", "ConvInteger", [x, w, *zeros], opset=10, **kw)
        scale = lambda *shape: np.abs(noise(*shape)) / 50 + np.float32(0.001)
        out = [np.array(np.float32(0.7)), integers(a)]
        inputs = [integers(a, 4, 6), scale(), zeros[0], integers(b, 6, 33), scale(), zeros[1], *out]
        case(f"quantized matmul {name}", "QLinearMatMul", inputs, opset=10)
        bias = rng.integers(-1000, 1000, 3, dtype=np.int32)
        fixed = np.zeros((), b) if b == i8 else zeros[1]
        inputs = [x, scale(), zeros[0], w, scale(3), np.full(3, fixed, b), *out, bias]
        case(f"quantized conv {name}", "QLinearConv", inputs, opset=10, pads=[1, 1, 0, 1])
    case("batched integer matmul", "MatMulInteger", [integers(u8, 2, 1, 3, 5), integers(u8, 4, 5, 6)], opset=10)
    case("grouped quantized conv", "QLinearConv", [
        integers(u8, 2, 6, 9), np.float32(0.02), integers(u8), integers(i8, 4, 3, 3), np.float32(0.03), np.int8(0),
        np.float32(0.5), integers(u8)], opset=10, group=2, strides=[2])
    matrix, columns = integers(i8, 6, 5), (np.abs(noise(5)) / 64 + np.float32(0.001)).astype(np.float32)
    ms = dict(domain="com.microsoft")
    case("dynamic matmul", "DynamicQuantizeMatMul", [noise(2, 3, 6), matrix, columns, None, noise(5)], **ms)
    case("matmul to float", "MatMulIntegerToFloat", [
        integers(u8, 3, 6), matrix, np.float32([0.02]), columns, np.uint8([7]), np.zeros(5, i8), noise(5)], **ms)


products()
path = pathlib.Path(__file__).parents[2] / "core/graph/testdata/reference.json"
path.write_text("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")
print(f"{len(cases)} cases, {path.stat().st_size} bytes")
