"""Exports the diffusers- and transformers-based graphs of core/weights/models/ (README.md beside this file).

    python3 tools/export/export.py NAME... [--out models/] [--check]
    python3 tools/export/export.py --list

NAME is a built-in model, for example sd15/unet-inpainting; architectures.py holds the table. The script writes
NAME.graph.onnx.xz and NAME.map.json.xz (core/weights/models/README.md describes the formats).

An architecture that fits into memory is filled with its synthetic weights and exported whole, with constant folding, by
PyTorch's TorchScript exporter, as most published files are. The value of an initializer then tells its state-dict tensor. A
larger one is exported hollow: all parameters share one piece of memory, the weights are inputs of the exported graph and
become initializers here, and transposed matrices are folded as the exporter would.

--check gives the graph the weights of the map, runs it in onnxruntime at the traced size and at another, and compares with
PyTorch in float32. A hollow architecture is checked with few layers, exported by the same code."""

import argparse
import contextlib
import gc
import hashlib
import math
import pathlib
import tempfile
import time

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

import stripped
import synth
from architectures import ARCHITECTURES, size, values

OPSET = 17
# Largest accepted difference, relative to the largest value. Half precision alone costs up to 4e-3.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2}
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


# Changes to PyTorch and diffusers that the exporter needs to write the graph, or to write it for more than one size


def rms_norm(self, x):
    """RMSNorm written out: the exporter knows no aten::rms_norm."""
    wide = x.float()
    eps = self.eps if self.eps is not None else torch.finfo(x.dtype).eps
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * self.weight


def rotary_embedding(x, freqs_cis, use_real=True, use_real_unbind_dim=-1, sequence_dim=2):
    """Rotation of neighbouring pairs, without the reshape of diffusers, which is exported with the traced sizes."""
    expand = (None, None) if sequence_dim == 2 else (None, slice(None), None)
    cos, sin = (table[expand] for table in freqs_cis)
    turned = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(3)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def rotary_table(self, ids):
    """Flux's table of cosines and sines. Only the frequencies are float64, as in diffusers: runtimes lack float64 arithmetic
    for the rest."""
    cosines, sines = [], []
    for axis, width in enumerate(self.axes_dim):
        frequencies = 1.0 / self.theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = ids[:, axis, None].float() * frequencies.float()[None]
        cosines.append(angles.cos().repeat_interleave(2, dim=1))
        sines.append(angles.sin().repeat_interleave(2, dim=1))
    return torch.cat(cosines, dim=-1), torch.cat(sines, dim=-1)


def chroma_modulation_input(self, timestep):
    """Chroma's input of the modulation network. diffusers keeps the embedding of the layer numbers as a table and the batch
    size as a number; both would become constants of the graph."""
    from diffusers.models.embeddings import get_timestep_embedding

    layers, channels = self.mod_proj.shape
    numbers = torch.arange(layers, dtype=torch.float32) * 1000
    dtype = self.mod_proj.dtype
    embedded = get_timestep_embedding(numbers, channels, flip_sin_to_cos=True, downscale_freq_shift=0).to(dtype)
    step = self.time_proj(timestep).to(dtype)
    guidance = self.guidance_proj(timestep * 0).to(dtype)
    condition = torch.cat([step, guidance], dim=1)[:, None]
    # Adding to zeros instead of repeating keeps the batch size open.
    condition = condition + torch.zeros(layers, 1, dtype=condition.dtype)
    embedded = embedded[None] + torch.zeros_like(condition[:, :, :1])
    return torch.cat([condition, embedded], dim=-1)


def gemma_norm(self, x):
    """Gemma's RMSNorm, which stays in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight.float())


def gemma_mask(config, input_embeds, **_):
    """Hides later tokens. transformers would compute it in a way that the exporter does not know."""
    places = torch.arange(input_embeds.shape[1])
    later = places[None, :] > places[:, None]
    return torch.zeros_like(later, dtype=torch.float32).masked_fill(later, -1e9)[None, None]


def gemma_rotary_table(self, x, position_ids):
    """Gemma's table of cosines and sines in float32. transformers keeps the frequencies as a buffer, whose type would be the model's."""
    width = self.config.head_dim
    frequencies = 1.0 / self.config.rope_theta ** (torch.arange(0, width, 2).float() / width)
    angles = position_ids[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def gemma_rotary_embedding(query, key, cosines, sines, *_):
    """Rotation of the first half with the second."""

    def turned(x):
        first, second = x.float().chunk(2, dim=-1)
        around = torch.cat([-second, first], dim=-1)
        return (x.float() * cosines[:, None] + around * sines[:, None]).to(x.dtype)

    return turned(query), turned(key)


def gemma_attention(module, query, key, value, mask, scaling, softcap, **_):
    """Attention whose queries share keys: those of one key are rows of one matrix, so nothing is repeated."""
    batch, heads, _, width = query.shape
    groups, tokens = module.config.num_key_value_heads, key.shape[2]
    scores = torch.matmul(query.reshape(batch, groups, -1, width), key.transpose(2, 3)).float() * scaling
    scores = (torch.tanh(scores / softcap) * softcap).reshape(batch, heads, -1, tokens) + mask
    shares = scores.softmax(dim=-1).to(value.dtype).reshape(batch, groups, -1, tokens)
    return torch.matmul(shares, value).reshape(batch, heads, -1, width).transpose(1, 2), None


REPEAT = torch.Tensor.repeat_interleave


def repeat_channels(x, repeats, dim=None, output_size=None):
    """`repeat_interleave`, of a picture's channels in no more than its four dimensions."""
    if x.dim() != 4 or dim != 1:
        return REPEAT(x, repeats, dim=dim, output_size=output_size)
    batch, channels, height, width = x.shape
    return torch.cat([x.reshape(batch, channels, 1, -1)] * repeats, dim=2).reshape(batch, channels * repeats, height, width)


def move_dimension(x, source, destination):
    """`movedim`, of which the exporter writes negative numbers as they are."""
    order = [axis for axis in range(x.dim()) if axis != source % x.dim()]
    order.insert(destination % x.dim(), source % x.dim())
    return x.permute(order)


@contextlib.contextmanager
def exportable():
    from diffusers.models.transformers import transformer_chroma, transformer_flux
    from transformers.models.gemma2 import modeling_gemma2 as gemma

    changes = [
        (gemma.Gemma2RMSNorm, "forward", gemma_norm),
        (gemma, "create_causal_mask", gemma_mask),
        # Its window has more tokens than prompts do.
        (gemma, "create_sliding_window_causal_mask", gemma_mask),
        (gemma.Gemma2RotaryEmbedding, "forward", gemma_rotary_table),
        (gemma, "apply_rotary_pos_emb", gemma_rotary_embedding),
        (gemma, "eager_attention_forward", gemma_attention),
        (torch.Tensor, "repeat_interleave", repeat_channels),
        (torch.Tensor, "movedim", move_dimension),
        (torch.nn.RMSNorm, "forward", rms_norm),
        (transformer_flux, "apply_rotary_emb", rotary_embedding),
        (transformer_flux.FluxPosEmbed, "forward", rotary_table),
        (transformer_chroma.ChromaCombinedTimestepTextProjEmbeddings, "forward", chroma_modulation_input),
        # Another module's class of the same name.
        (transformer_chroma.FluxPosEmbed, "forward", rotary_table),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, new in changes:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, old in before:
            setattr(owner, name, old)


# Modules


def parameters(module):
    """Names and parameters in the order of the state dict; tied tensors once, under their first name."""
    done = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in done:
            done.add(id(parameter))
            yield name, parameter


def build(arch, fill, **overrides):
    """The module in evaluation mode; `fill(index, name, shape, dtype)` makes each parameter and persistent floating-point
    buffer. Only what `fill` returns takes memory."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        module = arch.build(**overrides).eval()
    owners = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for index, (name, parameter) in enumerate(list(parameters(module))):
        made = fill(index, name, tuple(parameter.shape), parameter_type(module, arch, name))
        made = torch.nn.Parameter(made, requires_grad=False)
        for place in owners[id(parameter)]:
            path, _, leaf = place.rpartition(".")
            setattr(module.get_submodule(path), leaf, made)
    kept = module.state_dict().keys()
    for name, buffer in list(module.named_buffers()):
        if buffer.is_floating_point():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            new = fill(len(owners), name, tuple(buffer.shape), arch.dtype) if name in kept else buffer
            owner._buffers[leaf] = new.to(getattr(torch, arch.dtype))
    forward = module.forward
    # The exporter names paths from this module on; a wrapper module would be part of every name.
    module.forward = lambda *inputs: arch.call(forward, *inputs)
    return module


def parameter_type(module, arch, name):
    """float32 where the class says so (transformers does this when it loads a model in half precision), else the model's."""
    kept = getattr(module, "_keep_in_fp32_modules", None) or []
    return "float32" if any(part in kept for part in name.split(".")) else arch.dtype


def filled(arch, **overrides):
    def fill(_, name, shape, dtype):
        return torch.from_numpy(np.ascontiguousarray(synth.weight(arch.tag, name, list(shape)).astype(dtype)))

    return build(arch, fill, **overrides)


def hollow(arch, **overrides):
    """All tensors are windows of one buffer for each type. Each has its own place, since the exporter merges equal ones."""
    step = 32  # keeps every window aligned to 64 bytes in half precision
    with torch.device("meta"):
        shapes = [tensor.shape for tensor in arch.build(**overrides).state_dict().values()]
    length = max(map(math.prod, shapes)) + step * (len(shapes) + 1)
    values = torch.from_numpy(synth.uniform("hollow", length) * np.float32(0.02))
    buffers = {dtype: values.to(getattr(torch, dtype)) for dtype in ("float32", arch.dtype)}

    def fill(index, _, shape, dtype):
        return buffers[dtype][step * index : step * index + math.prod(shape)].view(shape)

    return build(arch, fill, **overrides)


# Export


def trace(module, arch, path, **options):
    sizes = with_aliases(arch.sizes[0])
    given = {name: values(arch.tag, name, spec, sizes, arch.dtype) for name, spec in arch.inputs.items()}
    axes = {name: open_axes(spec.dims) for name, spec in arch.inputs.items()}
    axes |= {name: open_axes(dims) for name, dims in arch.outputs.items() if dims}
    with torch.no_grad():
        torch.onnx.export(
            module, tuple(given.values()), path, input_names=list(given), output_names=list(arch.outputs),
            dynamic_axes={name: dims for name, dims in axes.items() if dims}, opset_version=OPSET, dynamo=False, **options,
        )  # fmt: skip


def open_axes(dims):
    return {axis: dim for axis, dim in enumerate(dims) if isinstance(dim, str)}


def with_aliases(sizes):
    """The timestep may have the batch's size or 1."""
    return {**sizes, "batch_t": sizes["batch"]}


def tensor_values(tensor, folder):
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if tensor.data_location != TensorProto.EXTERNAL:
        return onnx.numpy_helper.to_array(tensor)
    info = {entry.key: entry.value for entry in tensor.external_data}
    offset = int(info.get("offset", 0))
    return np.memmap(folder / info["location"], dtype, "r", offset, tuple(tensor.dims))


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).data).digest()


def export_whole(module, arch, folder):
    """The model, and the state-dict tensor of each weight, found by value."""
    path = folder / "model.onnx"
    trace(module, arch, str(path))
    model = onnx.load(path, load_external_data=False)
    by_value = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not tensor.is_floating_point():
            continue
        array = tensor.detach().numpy()
        by_value.setdefault(digest(array), (name, "identity", list(array.shape)))
        if array.ndim == 2:
            by_value.setdefault(digest(array.T), (name, "transpose", list(array.shape)))
    sources = {}
    for tensor in model.graph.initializer:
        if tensor.data_type not in FLOATS or not tensor.dims or math.prod(tensor.dims) == 1:
            continue
        found = by_value.get(digest(tensor_values(tensor, folder)))
        assert found, f"initializer {tensor.name} {list(tensor.dims)} is no tensor of the state dict"
        name, op, shape = found
        sources[tensor.name] = (name, "reshape" if op == "identity" and shape != list(tensor.dims) else op, shape)
    return model, sources


def export_hollow(module, arch, folder):
    """The same for a module without values: its weights become inputs under their names."""
    from torch.onnx._internal.torchscript_exporter import utils

    compare = utils._C._jit_pass_onnx_deduplicate_initializers
    # This pass compares all tensors of one shape pairwise: hours for 12 billion values that are not even there.
    utils._C._jit_pass_onnx_deduplicate_initializers = lambda graph, tensors, training: tensors
    try:
        path = folder / "model.onnx"
        trace(module, arch, str(path), export_params=False, do_constant_folding=False)
    finally:
        utils._C._jit_pass_onnx_deduplicate_initializers = compare
    model = onnx.load(path)
    graph = model.graph
    weights = [value for value in graph.input if value.name not in arch.inputs]
    given = [value for value in graph.input if value.name in arch.inputs]
    del graph.input[:]
    graph.input.extend(given)
    users = {}
    for node in graph.node:
        for slot, name in enumerate(node.input):
            users.setdefault(name, []).append((node, slot))
    sources, turned = {}, set()
    for value in weights:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        name, op = value.name, "identity"
        using = [node for node, _ in users.get(name, [])]
        if using and all(node.op_type == "Transpose" and list(node.attribute[0].ints) == [1, 0] for node in using):
            name, op = f"onnx::MatMul_{9001 + len(turned)}", "transpose"
            for node in using:
                turned.add(node.output[0])
                for user, slot in users[node.output[0]]:
                    user.input[slot] = name
        sources[name] = (value.name, op, shape)
        tensor = graph.initializer.add(name=name, data_type=value.type.tensor_type.elem_type)
        tensor.dims.extend(shape[::-1] if op == "transpose" else shape)
    kept = [node for node in graph.node if node.op_type != "Transpose" or node.output[0] not in turned]
    del graph.node[:]
    graph.node.extend(kept)
    return model, sources


def state_tables(model):
    """Marks large tables that the program computes as constants. The graph reader takes a large Constant node for a weight
    unless all elements are equal (core/graph/src/onnx_in/roles.rs), but an initializer can carry a role."""
    kept = []
    for node in model.graph.node:
        table = node.attribute[0].t if node.op_type == "Constant" and node.attribute[0].name == "value" else None
        large = table is not None and table.data_type in FLOATS and math.prod(table.dims) >= 1024
        if not large or np.ptp(onnx.numpy_helper.to_array(table)) == 0:
            kept.append(node)
            continue
        tensor = model.graph.initializer.add()
        tensor.CopyFrom(table)
        tensor.name = node.output[0]
        tensor.metadata_props.add(key="sdrun.role", value="constant")
    del model.graph.node[:]
    model.graph.node.extend(kept)


def export(arch, file, reduced=False):
    """The stripped model and its map."""
    overrides = (arch.reduced or arch.check_reduced) if reduced else {}
    with tempfile.TemporaryDirectory() as folder, exportable():
        started = time.time()
        module = (hollow if arch.hollow else filled)(arch, **overrides)
        count = sum(parameter.numel() for _, parameter in parameters(module))
        names = {name for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
        model, sources = (export_hollow if arch.hollow else export_whole)(module, arch, pathlib.Path(folder))
        absent = names - {source for source, _, _ in sources.values()}
        print(f"{file}: {count / 1e6:.0f} million parameters, traced in {time.time() - started:.0f} s", flush=True)
        if absent:
            print(f"  {len(absent)} tensors of the state dict are not in the graph: {sorted(absent)[:4]}")
        del module
        gc.collect()
        state_tables(model)
        weight_map = stripped.strip(model, file, arch.tag, dict.fromkeys(sources, 1.0))
        for entry in weight_map["tensors"]:
            entry["src"], entry["op"], entry["src_shape"] = sources[entry["init"]]
        # Scalar initializers may still be in the exporter's folder.
        for tensor in model.graph.initializer:
            if tensor.name not in sources and tensor.data_location == TensorProto.EXTERNAL:
                array = np.array(tensor_values(tensor, pathlib.Path(folder)))
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.checker.check_model(without_values(model))
    return model, weight_map


def without_values(model):
    """A copy with the weights as inputs, which the checker accepts without the file of the weights."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    inside = [tensor for tensor in copy.graph.initializer if tensor.data_location != TensorProto.EXTERNAL]
    for tensor in copy.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            copy.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    inside = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in inside]
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(inside)
    return copy


# Check


def write_weights(weight_map, path):
    with open(path, "wb") as out:
        for entry in weight_map["tensors"]:
            array = synth.weight(weight_map["tag"], entry["src"], entry["src_shape"])
            if entry["op"] == "transpose":
                array = array.T
            out.seek(entry["offset"])
            out.write(np.ascontiguousarray(array).astype(entry["dtype"]).data)


def check(arch, model, weight_map, reduced):
    """Runs the graph at every size. Returns whether all outputs are within tolerance of PyTorch's."""
    import onnxruntime

    given, expected = [], []
    module = filled(arch, **((arch.reduced or arch.check_reduced) if reduced else {})).float()
    for sizes in arch.sizes:
        inputs = {name: values(arch.tag, name, spec, with_aliases(sizes), arch.dtype) for name, spec in arch.inputs.items()}
        wide = [value.float() if value.is_floating_point() else value for value in inputs.values()]
        with torch.no_grad():
            outputs = module(*wide)
        expected.append([y.numpy() for y in (outputs if isinstance(outputs, tuple) else (outputs,))])
        given.append({name: value.numpy() for name, value in inputs.items()})
    # The module refers to itself through its forward function.
    del module
    gc.collect()
    good = True
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        write_weights(weight_map, folder / weight_map["weights_file"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
        for sizes, inputs, outputs in zip(arch.sizes, given, expected):
            found = session.run(None, inputs)
            assert [y.shape for y in found] == [y.shape for y in outputs], [y.shape for y in found]
            error = max(float(np.abs(a.astype(np.float32) - b).max() / np.abs(b).max()) for a, b in zip(found, outputs))
            spread = [float(y.std()) for y in outputs]
            good &= error <= TOLERANCE[arch.dtype] and all(np.isfinite(y).all() for y in found)
            print(f"  {sizes}: {error:.1e} of the largest value, std {min(spread):.2f} to {max(spread):.2f}", flush=True)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--out", type=pathlib.Path, help="folder for graph and map; nothing is written without it")
    parser.add_argument("--check", action="store_true", help="run in onnxruntime and compare with PyTorch")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.list:
        print("\n".join(ARCHITECTURES))
    unknown = [name for name in args.names if name not in ARCHITECTURES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)} (see --list)")
    torch.set_num_threads(args.threads)
    good = True
    for name in args.names:
        arch = ARCHITECTURES[name]
        model = None
        if args.out or not (arch.hollow or arch.check_reduced):
            model, weight_map = export(arch, arch.file)
            total = weight_map["weights_bytes"]
            print(f"  {len(weight_map['tensors'])} weights, {total / 1e9:.2f} GB, {len(model.graph.node)} nodes")
        if args.out:
            stripped.write(model, weight_map, args.out)
        if args.check:
            reduced = bool(arch.hollow or arch.check_reduced)
            if reduced:
                model, weight_map = export(arch, f"{arch.file}_reduced", reduced=True)
            good &= check(arch, model, weight_map, reduced)
    raise SystemExit(0 if good else "some outputs differ too much")


if __name__ == "__main__":
    main()
