"""OpenVINO on the CPU."""

import common


def open_model(request):
    import openvino

    core = openvino.Core()
    able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    low = next((kind for kind in ("FP16", "BF16") if kind in able), None)
    if request.low and low is None:
        raise common.Unsupported(f"OpenVINO computes in nothing below fp32 on this processor; it names {', '.join(able)}")
    precision = low.lower() if request.low else "fp32"
    clock = common.Clock()
    model = core.read_model(request.model)
    loaded = clock.lap()
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": request.threads,
        "INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}[precision],
    }
    compiled = core.compile_model(model, "CPU", settings)
    built = clock.lap()
    call = compiled.create_infer_request()
    for name, array in request.inputs().items():
        call.set_tensor(name, openvino.Tensor(array))
    return common.Peer(
        system="OpenVINO",
        version=openvino.__version__.split("-")[0],
        precision=precision,
        settings=f"CPU plugin, latency hint, 1 stream, {request.threads} threads",
        build_seconds=built,
        load_seconds=loaded + clock.lap(),
        run=call.infer,
        arrays=lambda outputs: {port.any_name: array for port, array in outputs.items()},
    )


common.main(open_model)
