"""ggml-compiler: the PyTorch module, exported by torch.export and compiled to a program for ggml's CPU backend."""

import tempfile

import common


def open_model(request):
    torch_model = common.sibling("torch_model")
    import ggml_compiler
    import torch

    clock = common.Clock()
    module, tensors, outputs = torch_model.convert(request, torch.float32, torch.contiguous_format)
    for node in module.graph.nodes:
        if node.target is torch.nn.functional.interpolate:
            node.target = enlarged
    module.recompile()
    loaded = clock.lap()
    # The program with its weights; it stays until the adapter ends.
    folder = open_model.folder = tempfile.TemporaryDirectory()
    names = [f"in{index}" for index in range(len(tensors))]
    program = ggml_compiler.compile(
        module,
        tuple(tensors),
        folder.name,
        input_names=names,
        emit=("gguf",),
        opt="O2" if request.low else "O1",
        dtype_policy={"float": "f16"} if request.low else None,
    )
    built = clock.lap()
    session = ggml_compiler.Session(program.gguf, backend="cpu", n_threads=request.threads)
    inputs = {name: tensor.numpy() for name, tensor in zip(names, tensors)}
    return common.Peer(
        system="ggml-compiler",
        version=common.version("ggml-compiler"),
        precision="fp16" if request.low else "fp32",
        settings=f"{'O2, weights in fp16' if request.low else 'O1'}, CPU backend, {request.threads} threads",
        build_seconds=built,
        load_seconds=loaded + clock.lap(),
        run=lambda: session.run(**inputs),
        arrays=lambda results: dict(zip(outputs, results.values())),
    )


def enlarged(x, size, mode):
    """Nearest-neighbour interpolation, which it has no lowering for, from operations that it knows."""
    if mode != "nearest":
        raise common.Unsupported("ggml-compiler has no lowering of bilinear interpolation")
    batch, channels, height, width = x.shape
    x = x.reshape(batch * channels, height, 1, width).expand(-1, -1, size[0] // height, -1)
    x = x.reshape(batch * channels * size[0], width, 1).expand(-1, -1, size[1] // width)
    return x.reshape(batch, channels, *size)


common.main(open_model)
