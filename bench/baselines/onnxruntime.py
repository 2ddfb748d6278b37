"""ONNX Runtime on the CPU."""

import os
import platform

import common

# It reports to its makers when it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def open_model(request):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = request.threads
    if request.low:
        # The only precision below fp32 that the CPU provider computes an fp32 model in.
        if platform.machine() not in ("aarch64", "arm64"):
            raise common.Unsupported("ONNX Runtime computes fp32 models in fp32 on x86; its bfloat16 mode is for arm64 only")
        options.add_session_config_entry("mlas.enable_gemm_fastmath_arm64_bfloat16", "1")
    clock = common.Clock()
    session = onnxruntime.InferenceSession(request.model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    inputs = request.inputs()
    return common.Peer(
        system="ONNX Runtime",
        version=onnxruntime.__version__,
        precision="bf16" if request.low else "fp32",
        settings=f"CPU provider, all graph optimisations, {request.threads} threads",
        build_seconds=0.0,
        load_seconds=clock.lap(),
        run=lambda: session.run(names, inputs),
        arrays=lambda outputs: dict(zip(names, outputs)),
    )


common.main(open_model)
