"""XLA on the CPU through JAX: the PyTorch module's graph, each function replaced by JAX's."""

import operator
import os

import common


def open_model(request):
    # XLA's thread pools take their size from it.
    os.environ["NPROC"] = str(request.threads)
    import jax
    import jax.numpy as jnp
    import torch

    torch_model = common.sibling("torch_model")
    dtype = torch.bfloat16 if request.low else torch.float32
    clock = common.Clock()
    module, tensors, names = torch_model.convert(request, dtype, torch.contiguous_format)

    def moved(tensor):
        return jnp.asarray(tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy(), str(tensor.dtype).split(".")[1])

    # XLA convolves with kernels in this order of dimensions; weights in another would be transposed in every run.
    convolutions = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)
    kernels = {node.args[1].target for node in module.graph.nodes if node.target in convolutions}
    weights = {name: moved(tensor.movedim((0, 1), (-1, -2)) if name in kernels else tensor) for name, tensor in module.named_buffers()}
    inputs = [moved(tensor) for tensor in tensors]
    graph, table = module.graph, functions()
    loaded = clock.lap()

    def forward(weights, inputs):
        values, inputs = {}, iter(inputs)
        for node in graph.nodes:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = weights[node.target]
            elif node.op == "output":
                return [value.astype(jnp.float32) for value in args[0]]
            elif node.target in table:
                values[node] = table[node.target](*args, **kwargs)
            else:
                raise NotImplementedError(f"the converter to JAX has no function {node.target.__name__}")

    compiled = jax.jit(forward).lower(weights, inputs).compile()
    return common.Peer(
        system="JAX",
        version=jax.__version__,
        precision="bf16" if request.low else "fp32",
        settings=f"XLA, jit, {request.threads} threads",
        build_seconds=clock.lap(),
        load_seconds=loaded,
        run=lambda: jax.block_until_ready(compiled(weights, inputs)),
        arrays=lambda outputs: dict(zip(names, outputs)),
    )


def functions():
    """JAX's counterparts of the functions that onnx_torch.py calls."""
    import jax
    import jax.numpy as jnp
    import torch
    import torch.nn.functional as F
    from jax import lax

    def conv(x, weight, bias, strides, pads, dilations, groups):
        space = "DHW"[-len(pads) :]
        y = lax.conv_general_dilated(
            x,
            weight,
            strides,
            [(pad, pad) for pad in pads],
            rhs_dilation=dilations,
            dimension_numbers=("NC" + space, space + "IO", "NC" + space),
            feature_group_count=groups,
        )
        return y if bias is None else y + bias.reshape(-1, *[1] * len(pads))

    def linear(x, weight, bias=None):
        y = x @ weight.T
        return y if bias is None else y + bias

    def normal(x, axes, eps):
        mean = x.mean(axes, keepdims=True)
        return (x - mean) * lax.rsqrt(x.var(axes, keepdims=True) + eps)

    def group_norm(x, groups, weight, bias, eps):
        y = normal(x.astype(jnp.float32).reshape(x.shape[0], groups, -1), (2,), eps).reshape(x.shape)
        shape = (-1, *[1] * (x.ndim - 2))
        return (y * weight.reshape(shape) + bias.reshape(shape)).astype(x.dtype)

    def layer_norm(x, shape, weight, bias, eps):
        y = normal(x.astype(jnp.float32), tuple(range(-len(shape), 0)), eps)
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).astype(x.dtype)

    def instance_norm(x, mean, variance, weight, bias, use_input_stats, momentum, eps):
        return group_norm(x, x.shape[1], weight, bias, eps)

    def attention(query, key, value, attn_mask, is_causal, scale):
        query, key, value = (x.swapaxes(-3, -2) for x in (query, key, value))
        mask = {} if attn_mask is None else {"mask" if attn_mask.dtype == bool else "bias": attn_mask}
        return jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=is_causal, **mask).swapaxes(-3, -2)

    def pad(x, sides, mode="constant", value=0.0):
        pairs = list(zip(sides[::2], sides[1::2]))[::-1]
        pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
        if mode == "constant":
            return jnp.pad(x, pairs, constant_values=value)
        return jnp.pad(x, pairs, {"reflect": "reflect", "replicate": "edge"}[mode])

    def interpolate(x, size, mode):
        if mode == "nearest" and all(new % old == 0 for new, old in zip(size, x.shape[2:])):
            for axis, new in enumerate(size, 2):
                x = x.repeat(new // x.shape[axis], axis)
            return x
        return jax.image.resize(x, (*x.shape[:2], *size), mode)

    def divide(a, b, rounding_mode=None):
        return a / b if rounding_mode is None else lax.div(*jnp.broadcast_arrays(a, b))

    table = {
        F.conv1d: conv,
        F.conv2d: conv,
        F.conv3d: conv,
        F.linear: linear,
        F.group_norm: group_norm,
        F.layer_norm: layer_norm,
        F.instance_norm: instance_norm,
        F.scaled_dot_product_attention: attention,
        F.pad: pad,
        F.interpolate: interpolate,
        F.silu: jax.nn.silu,
        F.gelu: lambda x, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
        F.relu6: jax.nn.relu6,
        F.leaky_relu: jax.nn.leaky_relu,
        F.embedding: lambda ids, rows: rows[ids],
        operator.getitem: operator.getitem,
        torch.Tensor.to: lambda x, dtype: x.astype(str(dtype).split(".")[1]),
        torch.select: lambda x, axis, index: jnp.take(x, index, axis),
        torch.index_select: lambda x, axis, index: jnp.take(x, index, axis),
        torch.narrow: lambda x, axis, start, size: lax.slice_in_dim(x, start, start + size, axis=axis),
        torch.unsqueeze: jnp.expand_dims,
        torch.squeeze: jnp.squeeze,
        torch.permute: jnp.transpose,
        torch.transpose: jnp.swapaxes,
        torch.cat: jnp.concatenate,
        torch.softmax: jax.nn.softmax,
        torch.sigmoid: jax.nn.sigmoid,
        torch.relu: jax.nn.relu,
        torch.erf: jax.scipy.special.erf,
        torch.mean: lambda x, axes, keep: x.mean(tuple(axes), keepdims=keep),
        torch.sum: lambda x, axes, keep: x.sum(tuple(axes), keepdims=keep),
        torch.amax: lambda x, axes, keep: x.max(tuple(axes), keepdims=keep),
        torch.argmax: lambda x, axis, keep: jnp.argmax(x, axis, keepdims=keep),
        torch.clamp: jnp.clip,
        torch.div: divide,
        torch.add: jnp.add,
        torch.sub: jnp.subtract,
        torch.mul: jnp.multiply,
        torch.neg: jnp.negative,
        torch.pow: jnp.power,
        torch.eq: jnp.equal,
        torch.lt: jnp.less,
        torch.gt: jnp.greater,
    }
    same = "matmul reshape broadcast_to tile einsum where minimum maximum remainder logical_and logical_or logical_not isinf isnan abs"
    same += " ceil cos exp floor log reciprocal sin sqrt tanh"
    return table | {getattr(torch, name): getattr(jnp, name) for name in same.split()}


common.main(open_model)
