"""PyTorch on the CPU, eager."""

import common


def open_model(request):
    import torch_model

    return torch_model.peer(request, "PyTorch")


common.main(open_model)
