"""A conv without what meets nothing: windows that lie in the padding, and taps that never leave it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from .chains import Geometry, output_size

# Times input and output of a sample; beyond, only pieces are bounded in memory. Of few values it may be more.
_MOST_PADDED = 4
_FEW_PADDED = 2**16


@dataclass(frozen=True)
class _CutSide:
    """Of one side, from the first to the last window that may meet the map, and of these from the first to the last tap
    that does. They meet the map from ``begin`` on, which is negative where it starts with padding, up to ``end``."""

    first: int
    last: int
    windows: int  # that there were
    first_tap: int
    last_tap: int
    taps: int
    begin: int
    end: int
    size: int  # the map's
    stride: int
    dilation: int

    @staticmethod
    def of(size: int, kernel: int, step: int, before: int, gap: int) -> _CutSide:
        windows = output_size(size, kernel, step, before, gap)
        first = max(0, -((gap * (kernel - 1) - before) // step))
        last = min(windows - 1, (size - 1 + before) // step)
        first_tap = max(0, -((last * step - before) // gap))
        last_tap = min(kernel - 1, (size - 1 + before - first * step) // gap)
        begin = first * step - before + first_tap * gap
        end = last * step - before + last_tap * gap + 1
        return _CutSide(
            first, last, windows, first_tap, last_tap, kernel, begin, end, size,
            step if last > first else 1, gap if last_tap > first_tap else 1,
        )  # fmt: skip

    @property
    def has_windows(self) -> bool:
        return self.first <= self.last and self.first_tap <= self.last_tap


@dataclass(frozen=True)
class Cut:
    """A conv without what meets nothing, and without padding: it lies in the input. All that is cut off is zero."""

    rows: _CutSide
    columns: _CutSide
    groups: int

    @staticmethod
    def of(input: Tensor, weight: Tensor, geometry: Geometry) -> Cut:
        *steps, groups = geometry
        rows, columns = map(_CutSide.of, input.shape[2:], weight.shape[2:], *steps)
        return Cut(rows, columns, groups)

    @property
    def has_windows(self) -> bool:
        return self.rows.has_windows and self.columns.has_windows

    def is_small(self, input: Tensor, weight: Tensor) -> bool:
        channels, *sides = input.shape[1:]
        pixels = math.prod(side.end - side.begin for side in (self.rows, self.columns))
        values = channels * math.prod(sides) + weight.shape[0] * self.rows.windows * self.columns.windows
        return channels * pixels <= max(_MOST_PADDED * values, _FEW_PADDED)

    @property
    def geometry(self) -> Geometry:
        rows, columns = self.rows, self.columns
        return (rows.stride, columns.stride), (0, 0), (rows.dilation, columns.dilation), self.groups

    def input(self, input: Tensor) -> Tensor:
        rows, columns = self.rows, self.columns
        return F.pad(input, (-columns.begin, columns.end - columns.size, -rows.begin, rows.end - rows.size))

    def of_input(self, gradient: Tensor) -> Tensor:
        rows, columns = self.rows, self.columns
        return F.pad(gradient, (columns.begin, columns.size - columns.end, rows.begin, rows.size - rows.end))

    def weight(self, weight: Tensor) -> Tensor:
        rows, columns = self.rows, self.columns
        return weight[..., rows.first_tap : rows.last_tap + 1, columns.first_tap : columns.last_tap + 1]

    def of_weight(self, gradient: Tensor) -> Tensor:
        rows, columns = self.rows, self.columns
        right, below = columns.taps - 1 - columns.last_tap, rows.taps - 1 - rows.last_tap
        return F.pad(gradient, (columns.first_tap, right, rows.first_tap, below))

    def grad(self, grad: Tensor) -> Tensor:
        rows, columns = self.rows, self.columns
        return grad[..., rows.first : rows.last + 1, columns.first : columns.last + 1]

    def widened(self, output: Tensor) -> Tensor:
        rows, columns = self.rows, self.columns
        right, below = columns.windows - 1 - columns.last, rows.windows - 1 - rows.last
        return F.pad(output, (columns.first, right, rows.first, below))
