"""Problem 57 of KernelBench's level 2 by fusedconv; the plain model is in ../plain, under the same name."""

from typing import Any

import torch
from torch import Tensor

import fusedconv


class ModelNew(fusedconv.ConvReLUHardswish):
    """Takes what the plain model takes, and has its weights under the same seed."""


def get_inputs() -> list[Tensor]:
    return [torch.rand(128, 8, 128, 128)]


def get_init_inputs() -> list[Any]:
    return [8, 64, 3]
