"""MIGraphX."""

import common


def open_model(request):
    raise common.Unsupported(
        "MIGraphX needs an AMD GPU with ROCm, and this adapter cannot measure one yet; `migraphx-driver perf --onnx MODEL` is its own tool"
    )


common.main(open_model)
