"""Converts an ONNX file to a torch.fx GraphModule that calls what a PyTorch user would call.

Shapes are fixed by the inputs: shape arithmetic and everything else that depends on constants alone is computed here. Patterns that
exporters write for attention, group normalisation, SiLU and GELU become the torch functions again. Weights stay in the file, mapped
into memory, until something needs them in another type or layout.
"""

import math
import operator
import pathlib

import numpy
import onnx
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map


def convert(path, inputs, dtype=torch.float32):
    """The module for `inputs`, arrays by name, and the names of its outputs.

    It takes the inputs in their order here. Matrix products, convolutions and attention compute in `dtype`; what comes before the
    first of them, such as the embedding of a timestep, stays in float32.
    """
    return Converter(path, inputs, dtype).module()


class Converter:
    def __init__(self, path, inputs, dtype):
        model = onnx.load(path, load_external_data=False)
        self.folder = pathlib.Path(path).parent
        self.onnx = model.graph
        self.dtype = dtype
        self.root = torch.nn.Module()
        self.graph = torch.fx.Graph()
        self.producers = {name: node for node in self.onnx.node for name in node.output}
        # Tensors are constants, graph nodes are not; "" stands for an input that was left out.
        self.values = {"": None}
        # What a constant is called in the module, by tensor and type.
        self.names = {}
        for tensor in self.onnx.initializer:
            self.values[tensor.name] = self.tensor(tensor)
        for name, array in inputs.items():
            node = self.graph.placeholder("in_" + "".join(c if c.isalnum() else "_" for c in name))
            node.meta["val"] = torch.empty(array.shape, dtype=real(torch.from_numpy(array)).dtype, device="meta")
            self.values[name] = node

    def module(self):
        for node in self.onnx.node:
            handler = OPERATORS.get(node.op_type)
            if handler is None:
                raise NotImplementedError(f"the converter to PyTorch has no ONNX operator {node.op_type}")
            results = handler(Call(self, node))
            self.values.update(zip(node.output, results if isinstance(results, tuple) else (results,)))
        names = [output.name for output in self.onnx.output]
        self.graph.output(tuple(self.argument(self.values[name], None) for name in names))
        self.graph.eliminate_dead_code()
        # Constants that only a replaced pattern used are no part of the module.
        used = {node.target for node in self.graph.nodes if node.op == "get_attr"}
        for name in [name for name, _ in self.root.named_buffers() if name not in used]:
            delattr(self.root, name)
        return torch.fx.GraphModule(self.root, self.graph), names

    def tensor(self, proto):
        """A tensor of the file: half precision is widened, doubles are narrowed."""
        if proto.data_location != onnx.TensorProto.EXTERNAL:
            return real(torch.from_numpy(onnx.numpy_helper.to_array(proto).copy()))
        place = {entry.key: entry.value for entry in proto.external_data}
        array = numpy.memmap(
            self.folder / place["location"],
            dtype=onnx.helper.tensor_dtype_to_np_dtype(proto.data_type),
            # Copy on write, since torch knows no read-only tensors.
            mode="c",
            offset=int(place.get("offset", 0)),
            shape=tuple(proto.dims) or (1,),
        )
        return real(torch.from_numpy(array).reshape(tuple(proto.dims)))

    def emit(self, function, *args, **kwargs):
        """The result itself if all arguments are constant, else a node that calls `function`."""
        nodes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.fx.Node)]
        if not nodes:
            return function(*args, **kwargs)
        dtype = next((node.meta["val"].dtype for node in nodes if node.meta["val"].is_floating_point()), self.dtype)
        args, kwargs = tree_map(lambda value: self.argument(value, dtype), (args, kwargs))
        node = self.graph.call_function(function, args, kwargs)
        args, kwargs = tree_map(lambda value: value.meta["val"] if isinstance(value, torch.fx.Node) else value, (args, kwargs))
        node.meta["val"] = function(*args, **kwargs)
        return node

    def argument(self, value, dtype):
        """A constant becomes a number or a buffer, of the type that it meets in the graph."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0 and dtype is not None:
            return value.item()
        if not value.is_floating_point() or dtype is None:
            dtype = value.dtype
        key = (id(value), dtype)
        if key not in self.names:
            name = f"constant_{len(self.names)}"
            # The tensor itself is kept too, so that no other gets its id.
            self.names[key] = (name, value)
            self.root.register_buffer(name, value.to(dtype))
        name = self.names[key][0]
        node = self.graph.get_attr(name)
        node.meta["val"] = torch.empty_like(getattr(self.root, name), device="meta")
        return node

    def cast(self, value):
        """`value` in the type that products compute in."""
        if isinstance(value, torch.fx.Node) and value.meta["val"].dtype != self.dtype:
            return self.emit(torch.Tensor.to, value, self.dtype)
        return value

    def transposed(self, weight):
        """A matrix the other way round, as torch stores those of its linear layers; the same one for the same weight."""
        key = (id(weight), "transposed")
        if key not in self.names:
            self.names[key] = (weight.t(), weight)
        return self.names[key][0]


def real(tensor):
    return tensor.float() if tensor.is_floating_point() else tensor


class Call:
    """One ONNX node while it is converted."""

    def __init__(self, converter, node):
        self.converter = converter
        self.node = node
        self.emit = converter.emit
        self.attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}

    def __getitem__(self, index):
        """Value of an input; None if it was left out."""
        return self.converter.values[self.node.input[index]] if index < len(self.node.input) else None

    def all(self):
        return [self[index] for index in range(len(self.node.input))]

    def get(self, name, default=None):
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def ints(self, index, name):
        """A list that newer operator sets have as an input and older ones as an attribute; None if there is none."""
        value = self[index]
        return self.get(name) if value is None else value.reshape(-1).tolist()

    def shape(self, value):
        return tuple(value.meta["val"].shape if isinstance(value, torch.fx.Node) else value.shape)

    def number(self, name):
        """The value called `name` if it is one constant number."""
        value = self.converter.values[name]
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else None

    def made_by(self, name, *operators):
        """The node whose output is called `name`, if it is one of these operators. Casts between real types are looked through."""
        node = self.converter.producers.get(name)
        while node is not None and node.op_type == "Cast" and self.floating(node.output[0]) and self.floating(node.input[0]):
            node = self.converter.producers.get(node.input[0])
        return node if node is not None and node.op_type in operators else None

    def with_number(self, node):
        """The names of the other input and the number, of a node that combines a value with one number."""
        if node is not None:
            for value, number in (node.input, node.input[::-1]):
                if self.number(number) is not None and (node.op_type != "Div" or number == node.input[1]):
                    return value, self.number(number)
        return None, None

    def unscaled(self, name):
        """What is scaled by constant numbers to give `name`, and the product of these numbers."""
        scale = 1.0
        while (node := self.made_by(name, "Mul", "Div")) is not None:
            value, number = self.with_number(node)
            if value is None:
                break
            scale = scale * number if node.op_type == "Mul" else scale / number
            name = value
        return name, scale

    def floating(self, name):
        value = self.converter.values[name]
        return (value.meta["val"] if isinstance(value, torch.fx.Node) else value).is_floating_point()


def close(number, expected):
    return number is not None and math.isclose(number, expected, rel_tol=1e-3)


# Patterns. Each looks back from the node that ends it and returns None if it is something else. What it replaces has no further use
# and is removed as dead code.


def silu(call):
    a, b = call.node.input
    for value, gate in ((a, b), (b, a)):
        sigmoid = call.made_by(gate, "Sigmoid")
        if sigmoid is not None and sigmoid.input[0] == value:
            return call.emit(F.silu, call.converter.values[value])
    return None


def gelu(call):
    """0.5 * x * (1 + erf(x / sqrt(2))), or with the tanh that approximates erf, in the orders that exporters write."""
    factors, half = [], 1.0
    names = list(call.node.input)
    while names:
        name = names.pop()
        product = call.made_by(name, "Mul")
        if call.number(name) is not None:
            half *= call.number(name)
        elif product is not None and len(factors) + len(names) < 2:
            names.extend(product.input)
        else:
            factors.append(name)
    if not close(half, 0.5) or len(factors) != 2:
        return None
    for value, gate in (factors, factors[::-1]):
        curve, one = call.with_number(call.made_by(gate, "Add"))
        curve = call.made_by(curve, "Erf", "Tanh") if one == 1 else None
        if curve is None:
            continue
        inner, scale = call.unscaled(curve.input[0])
        if curve.op_type == "Erf" and inner == value and close(scale, math.sqrt(0.5)):
            return call.emit(F.gelu, call.converter.values[value])
        if curve.op_type == "Tanh" and value in getattr(call.made_by(inner, "Add"), "input", ()) and close(scale, math.sqrt(2 / math.pi)):
            return call.emit(F.gelu, call.converter.values[value], approximate="tanh")
    return None


def group_norm(call):
    """Reshape to groups, InstanceNormalization, Reshape back, Mul by the weight, Add of the bias."""
    for scaled, bias in (call.node.input, call.node.input[::-1]):
        product = call.made_by(scaled, "Mul")
        if product is None or not isinstance(call.converter.values[bias], torch.Tensor):
            continue
        for normal, weight in (product.input, product.input[::-1]):
            back = call.made_by(normal, "Reshape")
            norm = call.made_by(back.input[0], "InstanceNormalization") if back is not None else None
            groups = call.made_by(norm.input[0], "Reshape") if norm is not None else None
            if groups is None or not isinstance(call.converter.values[weight], torch.Tensor):
                continue
            values = call.converter.values
            if (values[norm.input[1]] != 1).any() or (values[norm.input[2]] != 0).any():
                continue
            count = call.shape(values[norm.input[0]])[1]
            weight, bias = values[weight].reshape(-1), values[bias].reshape(-1)
            eps = Call(call.converter, norm).get("epsilon", 1e-5)
            return call.emit(F.group_norm, values[groups.input[0]], count, weight, bias, eps)
    return None


def attention(call):
    """Softmax(scale * Q K^T + mask) V, where Q and K may be scaled one by one."""
    softmax = call.made_by(call.unscaled(call.node.input[0])[0], "Softmax")
    if softmax is None:
        return None
    values = call.converter.values
    rank = len(call.shape(values[softmax.input[0]]))
    if rank < 3 or Call(call.converter, softmax).get("axis", -1) % rank != rank - 1:
        return None
    scores, scale = call.unscaled(softmax.input[0])
    mask = None
    added = call.made_by(scores, "Add")
    if added is not None and scale == 1:
        for product, other in (added.input, added.input[::-1]):
            inner, factor = call.unscaled(product)
            if call.made_by(inner, "MatMul") is not None:
                scores, scale, mask = inner, factor, values[other]
                break
    product = call.made_by(scores, "MatMul")
    if product is None:
        return None
    query, query_scale = call.unscaled(product.input[0])
    key, key_scale = call.unscaled(product.input[1])
    return sdpa(call, values[query], call.emit(torch.transpose, values[key], -1, -2), call[1], mask, scale * query_scale * key_scale)


def sdpa(call, query, key, value, mask, scale, causal=False):
    query, key, value = (call.converter.cast(x) for x in (query, key, value))
    if isinstance(mask, torch.fx.Node) and mask.meta["val"].is_floating_point():
        mask = call.converter.cast(mask)
    return call.emit(F.scaled_dot_product_attention, query, key, value, attn_mask=mask, is_causal=causal, scale=scale)


def linear(call):
    """MatMul by a constant matrix, then Add of a constant vector."""
    for product, bias in (call.node.input, call.node.input[::-1]):
        product, bias = call.made_by(product, "MatMul"), call.converter.values[bias]
        if product is None or not isinstance(bias, torch.Tensor) or bias.dim() != 1:
            continue
        value, weight = (call.converter.values[name] for name in product.input)
        if isinstance(value, torch.fx.Node) and isinstance(weight, torch.Tensor) and weight.shape[1:] == bias.shape:
            return call.emit(F.linear, call.converter.cast(value), call.converter.transposed(weight), bias)
    return None


# Operators.


def matmul(call):
    result = attention(call)
    if result is not None:
        return result
    a, b = (call.converter.cast(value) for value in call.all())
    if isinstance(b, torch.Tensor) and b.dim() == 2 and isinstance(a, torch.fx.Node):
        return call.emit(F.linear, a, call.converter.transposed(b))
    return call.emit(torch.matmul, a, b)


def gemm(call):
    a, b, c = call.converter.cast(call[0]), call[1], call[2]
    if call.get("alpha", 1.0) != 1 or call.get("beta", 1.0) != 1 or call.get("transA", 0) or (c is not None and c.dim() != 1):
        raise NotImplementedError("the converter to PyTorch knows Gemm only as a linear layer")
    return call.emit(F.linear, a, b if call.get("transB", 0) else call.converter.transposed(b), c)


def windows(call, rank):
    """Strides, dilations and padding of each spatial dimension; padding as (before, after)."""
    if call.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise NotImplementedError("the converter to PyTorch knows no automatic padding")
    pads = call.get("pads", [0] * 2 * rank)
    return call.get("strides", [1] * rank), call.get("dilations", [1] * rank), list(zip(pads[:rank], pads[rank:]))


def conv(call):
    value, weight = call.converter.cast(call[0]), call[1]
    rank = len(call.shape(weight)) - 2
    strides, dilations, pads = windows(call, rank)
    if any(before != after for before, after in pads):
        value = call.emit(F.pad, value, [side for pad in reversed(pads) for side in pad])
        pads = [(0, 0)] * rank
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]
    return call.emit(function, value, weight, call[2], strides, [before for before, _ in pads], dilations, call.get("group", 1))


def resize(call):
    mode, where = call.get("mode", "nearest"), call.get("coordinate_transformation_mode", "half_pixel")
    scales = call[2] if call[2] is not None and call[2].numel() else None
    shape = call.shape(call[0])
    sizes = [math.floor(n * s) for n, s in zip(shape, scales.tolist())] if scales is not None else call[3].tolist()
    nearest = mode == "nearest" and (
        (where == "asymmetric" and call.get("nearest_mode") == "floor") or all(size % n == 0 for size, n in zip(sizes, shape))
    )
    if sizes[:2] != list(shape[:2]) or not (nearest or (mode == "linear" and where in ("half_pixel", "pytorch_half_pixel"))):
        raise NotImplementedError(f"the converter to PyTorch does not know this Resize ({mode}, {where})")
    return call.emit(F.interpolate, call[0], size=sizes[2:], mode="nearest" if nearest else "bilinear")


def slice_(call):
    value = call[0]
    starts, ends = call.ints(1, "starts"), call.ints(2, "ends")
    axes = call.ints(3, "axes") or range(len(starts))
    steps = call.ints(4, "steps") or [1] * len(starts)
    window = [slice(None)] * len(call.shape(value))
    for start, end, axis, step in zip(starts, ends, axes, steps):
        if step < 0:
            raise NotImplementedError("the converter to PyTorch knows no Slice that runs backwards")
        window[axis] = slice(start, end, step)
    return call.emit(operator.getitem, value, tuple(window))


def gather(call):
    value, index, axis = call[0], call[1], call.get("axis", 0)
    size = call.shape(value)[axis]
    if isinstance(index, torch.Tensor):
        index = torch.where(index < 0, index + size, index)
        if index.dim() == 0:
            return call.emit(torch.select, value, axis, int(index))
    if axis == 0 and len(call.shape(value)) == 2:
        return call.emit(F.embedding, index, value)
    shape = call.shape(value)
    picked = call.emit(torch.index_select, value, axis, call.emit(torch.reshape, index, (-1,)))
    axis %= len(shape)
    return call.emit(torch.reshape, picked, shape[:axis] + call.shape(index) + shape[axis + 1 :])


def reshape(call):
    target, shape = call[1].tolist(), call.shape(call[0])
    if not call.get("allowzero", 0):
        target = [shape[axis] if size == 0 else size for axis, size in enumerate(target)]
    return call.emit(torch.reshape, call[0], target)


def unsqueeze(call):
    value, axes = call[0], call.ints(1, "axes")
    rank = len(call.shape(value)) + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        value = call.emit(torch.unsqueeze, value, axis)
    return value


def squeeze(call):
    shape = call.shape(call[0])
    axes = call.ints(1, "axes") or [axis for axis, size in enumerate(shape) if size == 1]
    return call.emit(torch.squeeze, call[0], tuple(axes))


def split(call):
    axis, shape = call.get("axis", 0), call.shape(call[0])
    count = len(call.node.output)
    sizes = call.ints(1, "split") or [-(-shape[axis] // count)] * count
    sizes[-1] = shape[axis] - sum(sizes[:-1])
    starts = [sum(sizes[:part]) for part in range(count)]
    return tuple(call.emit(torch.narrow, call[0], axis, start, size) for start, size in zip(starts, sizes))


def flatten(call):
    shape, axis = call.shape(call[0]), call.get("axis", 1)
    return call.emit(torch.reshape, call[0], (math.prod(shape[:axis]), -1))


def shape_of(call):
    shape = torch.tensor(call.shape(call[0]), dtype=torch.int64)
    return shape[call.get("start", 0) : call.get("end", len(shape))]


def cast(call):
    wanted = real(torch.from_numpy(numpy.empty(0, onnx.helper.tensor_dtype_to_np_dtype(call.get("to")))))
    value = call[0]
    # All real types are one: the module's own.
    if wanted.is_floating_point() and call.floating(call.node.input[0]):
        return value
    return call.emit(torch.Tensor.to, value, wanted.dtype)


def constant(call):
    (name, value), *_ = call.attributes.items()
    if name == "value":
        return call.converter.tensor(value)
    return torch.tensor(value)


def constant_of_shape(call):
    value = call.get("value")
    value = call.converter.tensor(value).reshape(()) if value is not None else torch.tensor(0.0)
    return value.expand(call[0].tolist()).clone()


def reduce(function):
    def handler(call):
        axes = call.ints(1, "axes")
        axes = list(range(len(call.shape(call[0])))) if axes is None else list(axes)
        return call.emit(function, call[0], axes, bool(call.get("keepdims", 1)))

    return handler


def clip(call):
    # T5 computes its bounds from its input.
    bounds = [bound.item() if isinstance(bound, torch.Tensor) else bound for bound in (call[1], call[2])]
    if bounds == [0, 6]:
        return call.emit(F.relu6, call[0])
    return call.emit(torch.clamp, call[0], *bounds)


def divide(call):
    a, b = call[0], call[1]
    if call.floating(call.node.input[0]):
        return call.emit(torch.div, a, b)
    return call.emit(torch.div, a, b, rounding_mode="trunc")


def pad(call):
    pads, rank = call.ints(1, "pads"), len(call.shape(call[0]))
    axes = call.ints(3, "axes") or list(range(rank))
    sides = {axis % rank: (pads[i], pads[i + len(axes)]) for i, axis in enumerate(axes)}
    flat = [side for axis in reversed(range(rank)) for side in sides.get(axis, (0, 0))]
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate"}[call.get("mode", "constant")]
    if mode != "constant":
        return call.emit(F.pad, call[0], flat[: 2 * (rank - 2)], mode)
    return call.emit(F.pad, call[0], flat, mode, 0.0 if call[2] is None else call[2].item())


def layer_norm(call):
    axis = call.get("axis", -1)
    shape = call.shape(call[0])
    return call.emit(F.layer_norm, call[0], shape[axis % len(shape) :], call[1], call[2], call.get("epsilon", 1e-5))


def attention_node(call):
    """Attention of operator set 23: three or four dimensions, grouped heads are not supported."""
    query, key, value, mask = (call[index] for index in range(4))
    shape = call.shape(query)
    if len(shape) == 3:
        heads = call.get("q_num_heads"), call.get("kv_num_heads"), call.get("kv_num_heads")
        query, key, value = (
            call.emit(torch.transpose, call.emit(torch.reshape, x, (*call.shape(x)[:2], count, -1)), 1, 2)
            for x, count in zip((query, key, value), heads)
        )
    if call.shape(query)[1] != call.shape(key)[1] or len(call.node.output) > 1 or call.get("softcap", 0.0):
        raise NotImplementedError("the converter to PyTorch knows only the plain form of Attention")
    result = sdpa(call, query, key, value, mask, call.get("scale"), bool(call.get("is_causal", 0)))
    if len(shape) == 3:
        result = call.emit(torch.reshape, call.emit(torch.transpose, result, 1, 2), (*shape[:2], -1))
    return result


def either(*patterns, otherwise):
    def handler(call):
        for pattern in patterns:
            result = pattern(call)
            if result is not None:
                return result
        return call.emit(otherwise, call[0], call[1])

    return handler


def plain(function):
    """The same function in torch, all inputs in the same order."""
    return lambda call: call.emit(function, *call.all())


def group_norm_node(call):
    return call.emit(F.group_norm, call[0], call.get("num_groups"), call[1], call[2], call.get("epsilon", 1e-5))


def argmax(call):
    return call.emit(torch.argmax, call[0], call.get("axis", 0), bool(call.get("keepdims", 1)))


OPERATORS = {
    "Add": either(group_norm, linear, otherwise=torch.add),
    "Mul": either(silu, gelu, otherwise=torch.mul),
    "MatMul": matmul,
    "Gemm": gemm,
    "Conv": conv,
    "Resize": resize,
    "Slice": slice_,
    "Gather": gather,
    "Reshape": reshape,
    "Unsqueeze": unsqueeze,
    "Squeeze": squeeze,
    "Split": split,
    "Flatten": flatten,
    "Shape": shape_of,
    "Cast": cast,
    "Constant": constant,
    "ConstantOfShape": constant_of_shape,
    "Clip": clip,
    "Div": divide,
    "Pad": pad,
    "LayerNormalization": layer_norm,
    "GroupNormalization": group_norm_node,
    "InstanceNormalization": lambda call: call.emit(
        F.instance_norm, call[0], None, None, call[1], call[2], True, 0.0, call.get("epsilon", 1e-5)
    ),
    "Attention": attention_node,
    "ArgMax": argmax,
    "ReduceMean": reduce(torch.mean),
    "ReduceSum": reduce(torch.sum),
    "ReduceMax": reduce(torch.amax),
    "GlobalAveragePool": lambda call: call.emit(torch.mean, call[0], list(range(2, len(call.shape(call[0])))), True),
    "Softmax": lambda call: call.emit(torch.softmax, call[0], call.get("axis", -1)),
    "Transpose": lambda call: call.emit(torch.permute, call[0], call.get("perm", range(len(call.shape(call[0])))[::-1])),
    "Concat": lambda call: call.emit(torch.cat, call.all(), call.get("axis")),
    "Expand": lambda call: call.emit(torch.broadcast_to, call[0], torch.broadcast_shapes(call.shape(call[0]), tuple(call[1].tolist()))),
    "Tile": lambda call: call.emit(torch.tile, call[0], call[1].tolist()),
    "Range": lambda call: torch.arange(*(value.item() for value in call.all())),
    "Einsum": lambda call: call.emit(torch.einsum, call.get("equation"), *map(call.converter.cast, call.all())),
    "Mod": plain(torch.remainder),
    "LeakyRelu": lambda call: call.emit(F.leaky_relu, call[0], call.get("alpha", 0.01)),
    "Identity": lambda call: call[0],
    "Where": plain(torch.where),
    "Sub": plain(torch.sub),
    "Pow": plain(torch.pow),
    "Min": plain(torch.minimum),
    "Max": plain(torch.maximum),
    "Equal": plain(torch.eq),
    "Less": plain(torch.lt),
    "Greater": plain(torch.gt),
    "And": plain(torch.logical_and),
    "Or": plain(torch.logical_or),
    "Not": plain(torch.logical_not),
    "IsInf": plain(torch.isinf),
    "IsNaN": plain(torch.isnan),
    "Abs": plain(torch.abs),
    "Ceil": plain(torch.ceil),
    "Cos": plain(torch.cos),
    "Erf": plain(torch.erf),
    "Exp": plain(torch.exp),
    "Floor": plain(torch.floor),
    "Log": plain(torch.log),
    "Neg": plain(torch.neg),
    "Reciprocal": plain(torch.reciprocal),
    "Relu": plain(torch.relu),
    "Sigmoid": plain(torch.sigmoid),
    "Sin": plain(torch.sin),
    "Sqrt": plain(torch.sqrt),
    "Tanh": plain(torch.tanh),
}
