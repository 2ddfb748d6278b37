"""PyTorch on the CPU, compiled by Inductor."""

import common


def open_model(request):
    return common.sibling("torch_model").compiled(request)


common.main(open_model)
