"""Problem 21 of KernelBench's level 2: conv, bias, scale, sigmoid, GroupNorm in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """``group_norm(sigmoid((conv(x) + bias) * scale))``; ``bias`` comes on top of the conv's own."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        num_groups: int,
        bias_shape: tuple[int, ...],
        scale_shape: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.group_norm(torch.sigmoid((self.conv(x) + self.bias) * self.scale))


def get_inputs() -> list[Tensor]:
    return [torch.rand(128, 8, 256, 256)]


def get_init_inputs() -> list[Any]:
    return [8, 32, 3, 8, (32, 1, 1), (32, 1, 1)]
