"""Convs and maps as they occur in networks, for the comparisons of ``bench/gpu.py``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from fusedconv.workloads import Workload

_PER_CHANNEL = ("bias_shape", "scale_shape")
_GROUPS = ("num_groups", "groups")


@dataclass(frozen=True)
class Conv:
    """A conv over square maps, padded by half its kernel."""

    batch: int
    channels_in: int
    size: int
    channels_out: int
    kernel: int
    stride: int = 1
    channels_last: bool = False

    def __str__(self) -> str:
        layout = ", channels_last" if self.channels_last else ""
        return (
            f"{self.batch}x{self.channels_in}x{self.size}x{self.size} -> {self.channels_out}, "
            f"{self.kernel}x{self.kernel} / {self.stride}{layout}"
        )

    def operations(self) -> int:
        pixels = ((self.size - 1) // self.stride + 1) ** 2
        return 2 * self.batch * pixels * self.channels_in * self.channels_out * self.kernel**2

    def before(self, workload: Workload) -> Workload:
        """``workload``'s chain behind this conv."""
        arguments = dict(workload.arguments)
        for name, value in workload.arguments.items():
            if name in _PER_CHANNEL:
                arguments[name] = (self.channels_out, 1, 1)
            elif name in _GROUPS:
                arguments[name] = gcd(value, self.channels_out)
        return replace(
            workload,
            size=self.size,
            channels=(self.channels_in, self.channels_out),
            kernel_size=self.kernel,
            arguments={**arguments, "stride": self.stride, "padding": self.kernel // 2},
        )


RESNET = (
    Conv(32, 3, 224, 64, 7, stride=2),
    Conv(64, 64, 56, 64, 1),
    Conv(64, 64, 56, 64, 3),
    Conv(64, 64, 56, 256, 1),
    Conv(64, 256, 56, 64, 1),
    Conv(64, 64, 56, 128, 1, stride=2),
    Conv(64, 128, 56, 128, 3, stride=2),
    Conv(64, 128, 28, 128, 3),
    Conv(64, 256, 28, 256, 3, stride=2),
    Conv(64, 256, 14, 256, 3),
    Conv(128, 256, 14, 512, 1),
    Conv(64, 512, 14, 512, 3, stride=2),
    Conv(64, 512, 7, 512, 3),
    Conv(128, 512, 7, 512, 1),
)
VGG = (
    Conv(16, 3, 224, 64, 3),
    Conv(16, 64, 224, 64, 3),
    Conv(16, 64, 112, 128, 3),
    Conv(16, 128, 112, 128, 3),
    Conv(16, 128, 56, 256, 3),
    Conv(16, 256, 28, 512, 3),
    Conv(16, 512, 14, 512, 3),
)
EFFICIENTNET = (
    Conv(32, 3, 224, 32, 3, stride=2),
    Conv(32, 32, 112, 16, 1),
    Conv(32, 16, 112, 96, 1),
    Conv(32, 24, 56, 144, 1),
    Conv(32, 40, 28, 240, 1),
    Conv(32, 80, 14, 480, 1),
    Conv(32, 112, 14, 192, 5, stride=2),
    Conv(32, 192, 7, 320, 1),
)
UNET = (
    Conv(4, 3, 256, 64, 3),
    Conv(4, 64, 256, 64, 3),
    Conv(8, 64, 128, 128, 3),
    Conv(8, 128, 64, 256, 3),
    Conv(8, 256, 32, 512, 3),
    Conv(8, 512, 16, 512, 3),
    Conv(8, 256, 64, 128, 3),
    Conv(2, 32, 256, 32, 3, stride=2),
    Conv(2, 32, 256, 16, 1),
)
SMALL_IMAGES = (
    Conv(128, 3, 32, 16, 3),
    Conv(128, 3, 32, 64, 3),
    Conv(128, 16, 32, 16, 3),
    Conv(128, 64, 32, 64, 3),
    Conv(128, 64, 32, 128, 3, stride=2),
    Conv(128, 128, 16, 128, 3),
    Conv(128, 256, 8, 256, 3),
    Conv(64, 3, 28, 32, 5),
    Conv(64, 32, 14, 64, 5),
    Conv(16, 3, 32, 32, 3, stride=2),
)
FEW_CHANNELS = (  # on large maps and with large kernels, as in the reference workloads
    Conv(128, 8, 128, 64, 3),
    Conv(32, 8, 256, 32, 3),
    Conv(8, 16, 256, 16, 5),
    Conv(8, 8, 256, 16, 7),
    Conv(32, 16, 128, 64, 5, stride=2),
    Conv(16, 32, 64, 64, 7),
    Conv(16, 48, 96, 96, 3),
    Conv(64, 64, 27, 192, 5),
)
ONE_SAMPLE = (
    Conv(1, 3, 224, 64, 7, stride=2),
    Conv(1, 3, 32, 16, 3),
    Conv(1, 64, 56, 64, 3),
    Conv(1, 128, 28, 128, 3),
    Conv(1, 256, 14, 256, 3),
    Conv(1, 512, 7, 512, 3),
    Conv(1, 64, 56, 256, 1),
    Conv(1, 16, 256, 32, 5),
)
CHANNELS_LAST = tuple(
    replace(conv, channels_last=True)
    for conv in (RESNET[2], RESNET[7], RESNET[11], VGG[4], EFFICIENTNET[2], SMALL_IMAGES[3], FEW_CHANNELS[0])
)
CONVS = (
    *RESNET, *VGG, *EFFICIENTNET, *UNET, *SMALL_IMAGES, *FEW_CHANNELS, *ONE_SAMPLE, *CHANNELS_LAST
)  # fmt: skip


@dataclass(frozen=True)
class Map:
    """What a conv hands to the steps behind it."""

    batch: int
    channels: int
    size: int
    channels_last: bool = False

    def __str__(self) -> str:
        layout = ", channels_last" if self.channels_last else ""
        return f"{self.batch}x{self.channels}x{self.size}x{self.size}{layout}"


MAPS = (
    Map(1, 16, 8),
    Map(32, 64, 32),
    Map(16, 256, 14),
    Map(8, 32, 224),
    Map(32, 128, 56),
    Map(64, 512, 64),
    Map(32, 128, 56, channels_last=True),
)
