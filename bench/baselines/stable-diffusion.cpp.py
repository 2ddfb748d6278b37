"""stable-diffusion.cpp. It has no interface for one network; `cargo xtask bench` compares whole pictures."""

import common


def open_model(request):
    raise common.Unsupported("stable-diffusion.cpp draws whole pictures from a checkpoint; it has no call that runs one network")


common.main(open_model)
