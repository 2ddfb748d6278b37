"""TensorRT."""

import common


def open_model(request):
    raise common.Unsupported(
        "TensorRT needs an NVIDIA GPU, and this adapter cannot measure one yet; `trtexec --onnx=MODEL` is its own tool"
    )


common.main(open_model)
