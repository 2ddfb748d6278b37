"""What the adapters of PyTorch share."""

import common
import torch

import onnx_torch


def load(request):
    """The model as a module in the layout that is fastest on CPUs, its inputs in order, and the names of its outputs."""
    torch.set_num_threads(request.threads)
    torch.set_grad_enabled(False)
    inputs = request.inputs()
    module, names = onnx_torch.convert(request.model, inputs, torch.bfloat16 if request.low else torch.float32)
    module = module.eval().to(memory_format=torch.channels_last)
    tensors = [onnx_torch.real(torch.from_numpy(array)) for array in inputs.values()]
    tensors = [tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor for tensor in tensors]
    return module, tensors, names


def arrays(names):
    return lambda outputs: {name: tensor.float().numpy() for name, tensor in zip(names, outputs)}


def peer(request, system):
    clock = common.Clock()
    module, tensors, names = load(request)
    return common.Peer(
        system=system,
        version=torch.__version__,
        precision="bf16" if request.low else "fp32",
        settings=f"eager, channels_last, scaled_dot_product_attention, {request.threads} threads",
        build_seconds=0.0,
        load_seconds=clock.lap(),
        run=lambda: module(*tensors),
        arrays=arrays(names),
    )
