"""ExecuTorch on the CPU: the model exported by torch.export, lowered to XNNPACK and run by ExecuTorch's runtime."""

import os
import tempfile

import common


def open_model(request):
    if request.low:
        raise common.Unsupported(
            "ExecuTorch quantises to int8 only with calibration by the user; XNNPACK has no other precision below fp32 here"
        )
    torch_model = common.sibling("torch_model")
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
    from executorch.runtime import Runtime

    clock = common.Clock()
    module, tensors, names = torch_model.convert(request, torch.float32, torch.contiguous_format)
    loaded = clock.lap()
    lowered = to_edge_transform_and_lower(torch.export.export(module, tuple(tensors)), partitioner=[XnnpackPartitioner()])
    program = lowered.to_executorch()
    # The weights are in the program, which is mapped; it stays until the adapter ends.
    folder = open_model.folder = tempfile.TemporaryDirectory()
    path = os.path.join(folder.name, "model.pte")
    with open(path, "wb") as file:
        program.write_to_file(file)
    built = clock.lap()
    # "Unsafe" while a method runs, which none does yet. Without it, the pool is as large as the processor.
    _unsafe_reset_threadpool(request.threads)
    method = Runtime.get().load_program(path).load_method("forward")
    return common.Peer(
        system="ExecuTorch",
        version=common.version("executorch"),
        precision="fp32",
        settings=f"XNNPACK, {request.threads} threads",
        build_seconds=built,
        load_seconds=loaded + clock.lap(),
        run=lambda: method.execute(tensors),
        arrays=torch_model.arrays(names),
    )


common.main(open_model)
