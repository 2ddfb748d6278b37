"""ESRGAN's generator, after the papers: Wang et al., ESRGAN (arXiv:1809.00219, section 3.1, figure 4) and Real-ESRGAN
(arXiv:2107.10833, section 3.3, for scales below 4). Modules have the names of the files published with Real-ESRGAN."""

import torch
from torch import nn
from torch.nn import functional

# Weight of a branch in its residual sum.
RESIDUAL = 0.2


def activation(x):
    return functional.leaky_relu(x, 0.2)


def convolution(inputs, outputs):
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def larger(x):
    return functional.interpolate(x, scale_factor=2, mode="nearest")


class DenseBlock(nn.Module):
    """Five convolutions; each sees the block's input and all results before it."""

    def __init__(self, features, growth):
        super().__init__()
        for index in range(5):
            outputs = features if index == 4 else growth
            setattr(self, f"conv{index + 1}", convolution(features + index * growth, outputs))

    def forward(self, x):
        seen = x
        for index in range(4):
            seen = torch.cat([seen, activation(getattr(self, f"conv{index + 1}")(seen))], dim=1)
        return x + RESIDUAL * self.conv5(seen)


class Block(nn.Module):
    """Residual in residual dense block."""

    def __init__(self, features, growth):
        super().__init__()
        for index in range(3):
            setattr(self, f"rdb{index + 1}", DenseBlock(features, growth))

    def forward(self, x):
        return x + RESIDUAL * self.rdb3(self.rdb2(self.rdb1(x)))


class RRDBNet(nn.Module):
    """Enlarges pictures by 4, or by 2 or 1 after folding squares of 2 or 4 pixels into channels."""

    def __init__(self, scale, blocks, features=64, growth=32):
        super().__init__()
        self.fold = 4 // scale
        self.conv_first = convolution(3 * self.fold**2, features)
        self.body = nn.ModuleList(Block(features, growth) for _ in range(blocks))
        self.conv_body = convolution(features, features)
        self.conv_up1 = convolution(features, features)
        self.conv_up2 = convolution(features, features)
        self.conv_hr = convolution(features, features)
        self.conv_last = convolution(features, 3)

    def forward(self, x):
        x = self.conv_first(functional.pixel_unshuffle(x, self.fold) if self.fold > 1 else x)
        y = x
        for block in self.body:
            y = block(y)
        x = x + self.conv_body(y)
        x = activation(self.conv_up1(larger(x)))
        x = activation(self.conv_up2(larger(x)))
        return self.conv_last(activation(self.conv_hr(x)))
