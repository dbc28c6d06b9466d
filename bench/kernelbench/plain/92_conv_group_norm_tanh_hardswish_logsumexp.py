"""Problem 92 of KernelBench's level 2: conv, GroupNorm, tanh, hardswish, + conv, logsumexp in plain PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Model(nn.Module):
    """``logsumexp(v + hardswish(tanh(group_norm(v))), dim=1, keepdim=True)`` with ``v = conv(x)``."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, groups: int, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels, eps)

    def forward(self, x: Tensor) -> Tensor:
        v = self.conv(x)
        h = F.hardswish(torch.tanh(self.group_norm(v)))
        return torch.logsumexp(v + h, dim=1, keepdim=True)


def get_inputs() -> list[Tensor]:
    return [torch.rand(128, 8, 128, 128)]


def get_init_inputs() -> list[Any]:
    return [8, 64, 3, 16]
