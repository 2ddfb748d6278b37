"""PyTorch on the CPU, eager."""

import common


def open_model(request):
    return common.sibling("torch_model").eager(request)


common.main(open_model)
