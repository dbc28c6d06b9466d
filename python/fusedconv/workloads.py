"""The workloads: the modules at the sizes they are measured at, and their plain PyTorch models.

The four of reference are the problems 57, 21, 85 and 92 of KernelBench's level 2, whose batch is 128.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import nn as fused

__all__ = ["OTHER_WORKLOADS", "SMALL_WORKLOADS", "WORKLOADS", "Plain", "Workload"]

Steps = Callable[[Any, Tensor], Tensor]  # the parts of a model and the conv's output to the model's output


class Plain(nn.Module):
    """The plain PyTorch model of a fused module; it shares the module's parts."""

    def __init__(self, parts: Any, steps: Steps) -> None:
        super().__init__()
        self.parts = parts
        self.steps = steps

    def forward(self, input: Tensor) -> Tensor:
        return self.steps(self.parts, self.parts.conv(input))


@dataclass(frozen=True)
class Workload:
    """A module, its constructor's arguments, and the size of its square input."""

    id: int
    module: type[nn.Module]
    steps: Steps
    size: int
    channels: tuple[int, int] = (8, 64)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    kernel_size: int = 3

    @property
    def name(self) -> str:
        return self.module.__name__

    def build(self) -> nn.Module:
        """The fused module. The norm's parameters and the scale take either sign, which is harder than ones."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self.id)
            module = self.module(*self.channels, self.kernel_size, **self.arguments)
            for name, parameter in module.named_parameters():
                if not name.startswith("conv."):
                    parameter.normal_()
        return module.eval()

    def plain(self, module: nn.Module) -> Plain:
        """The plain model with the parts of ``module``."""
        return Plain(module, self.steps).eval()

    def input(self, batch: int) -> Tensor:
        """Uniform in [0, 1), as ``[batch, channels, size, size]`` in float32."""
        generator = torch.Generator().manual_seed(self.id)
        return torch.rand(batch, self.channels[0], self.size, self.size, generator=generator)

    def operations(self, batch: int) -> int:
        """Floating-point operations of the conv: two a product."""
        pixels = (self.size - self.kernel_size + 1) ** 2
        return 2 * batch * pixels * self.channels[0] * self.channels[1] * self.kernel_size**2


def _relu_hardswish(m: Any, v: Tensor) -> Tensor:
    v = torch.relu(v)
    return v * torch.clamp((v + 3) / 6, 0, 1)


def _bias_scale_sigmoid_group_norm(m: Any, v: Tensor) -> Tensor:
    return m.group_norm(torch.sigmoid((v + m.bias) * m.scale))  # type: ignore[no-any-return]


def _group_norm_scale_max_pool_clamp(m: Any, v: Tensor) -> Tensor:
    return torch.clamp(
        F.max_pool2d(m.group_norm(v) * m.scale, m.maxpool_kernel_size), m.clamp_min, m.clamp_max
    )


def _group_norm_silu(m: Any, v: Tensor) -> Tensor:
    return F.silu(m.group_norm(v))


def _group_norm_tanh_hardswish_logsumexp(m: Any, v: Tensor) -> Tensor:
    return torch.logsumexp(v + F.hardswish(torch.tanh(m.group_norm(v))), dim=1, keepdim=True)


WORKLOADS = (
    Workload(57, fused.ConvReLUHardswish, _relu_hardswish, size=128),
    Workload(
        21,
        fused.ConvBiasScaleSigmoidGroupNorm,
        _bias_scale_sigmoid_group_norm,
        size=256,
        channels=(8, 32),
        arguments={"num_groups": 8, "bias_shape": (32, 1, 1), "scale_shape": (32, 1, 1)},
    ),
    Workload(
        85,
        fused.ConvGroupNormScaleMaxPoolClamp,
        _group_norm_scale_max_pool_clamp,
        size=128,
        arguments={
            "num_groups": 16,
            "scale_shape": (64, 1, 1),
            "maxpool_kernel_size": 4,
            "clamp_min": 0.0,
            "clamp_max": 1.0,
        },
    ),
    Workload(
        92,
        fused.ConvGroupNormTanhHardswishLogSumExp,
        _group_norm_tanh_hardswish_logsumexp,
        size=128,
        arguments={"groups": 16},
    ),
)

# No problem of KernelBench, so that the number is ours.
OTHER_WORKLOADS = (
    Workload(0, fused.ConvGroupNormSiLU, _group_norm_silu, size=128, arguments={"num_groups": 16}),
)

_SMALL_ARGUMENTS: Mapping[int, Mapping[str, Any]] = {
    57: {},
    21: {"bias_shape": (16, 1, 1), "scale_shape": (16, 1, 1)},
    85: {"num_groups": 8, "scale_shape": (16, 1, 1), "maxpool_kernel_size": 2},
    92: {"groups": 8},
}

# The same models at 3 to 16 channels and 32x32, where the host's time counts.
SMALL_WORKLOADS = tuple(
    replace(w, channels=(3, 16), size=32, arguments={**w.arguments, **_SMALL_ARGUMENTS[w.id]})
    for w in WORKLOADS
)
