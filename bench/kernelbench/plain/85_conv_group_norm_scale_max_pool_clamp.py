"""Problem 85 of KernelBench's level 2: conv, GroupNorm, scale, max pool, clamp in plain PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Model(nn.Module):
    """``clamp(max_pool2d(group_norm(conv(x)) * scale, k), low, high)``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        num_groups: int,
        scale_shape: tuple[int, ...],
        maxpool_kernel_size: int,
        clamp_min: float,
        clamp_max: float,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(num_groups, out_channels)
        self.scale = nn.Parameter(torch.ones(scale_shape))
        self.maxpool_kernel_size = maxpool_kernel_size
        self.clamp_min, self.clamp_max = clamp_min, clamp_max

    def forward(self, x: Tensor) -> Tensor:
        v = self.group_norm(self.conv(x)) * self.scale
        return torch.clamp(F.max_pool2d(v, self.maxpool_kernel_size), self.clamp_min, self.clamp_max)


def get_inputs() -> list[Tensor]:
    return [torch.rand(128, 8, 128, 128)]


def get_init_inputs() -> list[Any]:
    return [8, 64, 3, 16, (64, 1, 1), 4, 0.0, 1.0]
