"""Problem 57 of KernelBench's level 2: conv, relu, hardswish in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """``hardswish(relu(conv(x)))``."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        v = torch.relu(self.conv(x))
        return v * torch.clamp((v + 3) / 6, 0, 1)


def get_inputs() -> list[Tensor]:
    return [torch.rand(128, 8, 128, 128)]


def get_init_inputs() -> list[Any]:
    return [8, 64, 3]
