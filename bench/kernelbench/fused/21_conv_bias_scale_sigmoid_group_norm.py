"""Problem 21 of KernelBench's level 2 by fusedconv; the plain model is in ../plain, under the same name."""

from typing import Any

import torch
from torch import Tensor

import fusedconv


class ModelNew(fusedconv.ConvBiasScaleSigmoidGroupNorm):
    """Takes what the plain model takes, and has its weights under the same seed."""


def get_inputs() -> list[Tensor]:
    return [torch.rand(128, 8, 256, 256)]


def get_init_inputs() -> list[Any]:
    return [8, 32, 3, 8, (32, 1, 1), (32, 1, 1)]
