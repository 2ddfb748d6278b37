"""What the adapters that need PyTorch share."""

import os
import tempfile

import common
import torch

onnx_torch = common.sibling("onnx_torch")


def load(request):
    if request.low and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise common.Unsupported("PyTorch's oneDNN has no bfloat16 kernels for this processor; without them bfloat16 is slower than fp32")
    return convert(request, torch.bfloat16 if request.low else torch.float32, torch.channels_last)


def convert(request, dtype, layout):
    """The model as a module, its inputs in order, and the names of its outputs. `layout` is that of pictures and convolutions."""
    torch.set_num_threads(request.threads)
    torch.set_grad_enabled(False)
    inputs = request.inputs()
    module, names = onnx_torch.convert(request.model, inputs, dtype)
    module = module.eval().to(memory_format=layout)
    tensors = [onnx_torch.real(torch.from_numpy(array)) for array in inputs.values()]
    return module, [tensor.contiguous(memory_format=layout) if tensor.dim() == 4 else tensor for tensor in tensors], names


def arrays(names):
    return lambda outputs: {name: tensor.float().numpy() for name, tensor in zip(names, outputs)}


def eager(request):
    clock = common.Clock()
    module, tensors, names = load(request)
    return peer(request, "eager", 0.0, clock.lap(), lambda: module(*tensors), names)


def compiled(request):
    import torch._inductor.config

    # A cache of its own, so that the build is measured whatever was compiled before.
    compiled.cache = tempfile.TemporaryDirectory()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled.cache.name
    # Weights are constants, which Inductor may then store in another layout.
    torch._inductor.config.freezing = True
    clock = common.Clock()
    module, tensors, names = load(request)
    loaded = clock.lap()
    module = torch.compile(module, mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)
    # It compiles when it runs for the first time.
    module(*tensors)
    return peer(request, "Inductor, max-autotune, freezing", clock.lap(), loaded, lambda: module(*tensors), names)


def peer(request, mode, built, loaded, run, names):
    return common.Peer(
        system="PyTorch",
        version=torch.__version__.split("+")[0],
        precision="bf16" if request.low else "fp32",
        settings=f"{mode}, channels_last, scaled_dot_product_attention, {request.threads} threads",
        build_seconds=built,
        load_seconds=loaded,
        run=run,
        arrays=arrays(names),
    )
