"""Apache TVM on the CPU: Relax's ONNX front end and the default pipeline for LLVM, without tuning."""

import os

import common


def open_model(request):
    if request.low:
        raise common.Unsupported("TVM's ONNX front end and CPU pipeline compute an fp32 model in fp32 only")
    os.environ["TVM_NUM_THREADS"] = str(request.threads)
    import onnx
    import tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    clock = common.Clock()
    arrays = request.inputs()
    names, outputs = request.names()
    shapes = {name: list(arrays[name].shape) for name in names}
    types = {name: str(arrays[name].dtype) for name in names}
    module = from_onnx(onnx.load(request.model), shapes, types, sanitize_input_names=False, keep_params_in_input=True)
    module, weights = relax.frontend.detach_params(module)
    loaded = clock.lap()
    target = tvm.target.Target.from_device(tvm.cpu())
    with tvm.transform.PassContext(opt_level=3):
        machine = relax.VirtualMachine(relax.build(module, target), tvm.cpu())
    built = clock.lap()
    inputs = [tvm.runtime.tensor(arrays[name]) for name in names] + weights["main"]
    return common.Peer(
        system="TVM",
        version=tvm.__version__,
        precision="fp32",
        settings=f"Relax, default CPU pipeline, not tuned, LLVM for {target.attrs.get('mcpu', 'generic')}, {request.threads} threads",
        build_seconds=built,
        load_seconds=loaded + clock.lap(),
        run=lambda: machine["main"](*inputs),
        arrays=lambda results: {
            name: result.numpy() for name, result in zip(outputs, [results] if isinstance(results, tvm.runtime.Tensor) else results)
        },
    )


common.main(open_model)
