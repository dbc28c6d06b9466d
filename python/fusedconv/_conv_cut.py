"""A conv without what meets nothing: windows that lie in the padding, and taps that never leave it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .chains import Geometry, output_size

# Times input and output of a sample; beyond, only pieces are bounded in memory. Of few values it may be more.
_MOST_PADDED = 4
_FEW_PADDED = 2**16
_TALL = 1024

_Ends = tuple[int, int]


class _Side(NamedTuple):
    """From the first to the last window that may meet the map, and of these from the first to the last tap that does.
    Ends are what is cut off before and after."""

    of_input: _Ends  # less than nothing where padding is left, which becomes part of it
    of_kernel: _Ends
    of_output: _Ends
    input: int  # what is left
    kernel: int
    output: int
    stride: int
    dilation: int

    @staticmethod
    def of(size: int, kernel: int, step: int, before: int, gap: int) -> _Side:
        windows = output_size(size, kernel, step, before, gap)
        first = max(0, -((gap * (kernel - 1) - before) // step))
        last = min(windows - 1, (size - 1 + before) // step)
        first_tap = max(0, -((last * step - before) // gap))
        last_tap = min(kernel - 1, (size - 1 + before - first * step) // gap)
        begin = first * step - before + first_tap * gap
        end = last * step - before + last_tap * gap + 1
        return _Side(
            of_input=(begin, size - end),
            of_kernel=(first_tap, kernel - 1 - last_tap),
            of_output=(first, windows - 1 - last),
            input=end - begin,
            kernel=last_tap - first_tap + 1,
            output=last - first + 1,
            stride=step if last > first else 1,
            dilation=gap if last_tap > first_tap else 1,
        )


@dataclass(frozen=True)
class Cut:
    """What is cut off the input meets no window, what is cut off the output is zero, and so are the gradients of what is
    cut off the input and the kernel. No padding is left: it lies in the input."""

    rows: _Side
    columns: _Side
    groups: int

    @staticmethod
    def of(input: Tensor, weight: Tensor, geometry: Geometry) -> Cut:
        *steps, groups = geometry
        rows, columns = map(_Side.of, input.shape[2:], weight.shape[2:], *steps)
        return Cut(rows, columns, groups)

    @property
    def is_whole(self) -> bool:
        """Whether no window and no tap was cut off."""
        ends = (*self.rows.of_kernel, *self.rows.of_output, *self.columns.of_kernel, *self.columns.of_output)
        return not any(ends)

    @property
    def has_windows(self) -> bool:
        return all(side.output > 0 and side.kernel > 0 for side in (self.rows, self.columns))

    @property
    def is_tall(self) -> bool:
        """Whether a long row of pixels, or column, is gone over in strides."""
        sides = (self.rows, self.columns), (self.columns, self.rows)
        return any(one.input == 1 and long.input > _TALL and long.stride > 1 for one, long in sides)

    def is_small(self, input: Tensor, weight: Tensor) -> bool:
        """Whether the input is not much larger for its padding, and no side of it is long that was not."""
        channels, *sides = input.shape[1:]
        rows_and_columns = zip((self.rows, self.columns), sides, strict=True)
        if any(side.input > max(_TALL, 2 * size) for side, size in rows_and_columns):
            return False
        outputs = math.prod(side.output + sum(side.of_output) for side in (self.rows, self.columns))
        values = channels * math.prod(sides) + weight.shape[0] * outputs
        return channels * self.rows.input * self.columns.input <= max(_MOST_PADDED * values, _FEW_PADDED)

    @property
    def kernel(self) -> tuple[int, int]:
        return self.rows.kernel, self.columns.kernel

    @property
    def geometry(self) -> Geometry:
        rows, columns = self.rows, self.columns
        return (rows.stride, columns.stride), (0, 0), (rows.dilation, columns.dilation), self.groups

    @property
    def keeps_windows(self) -> bool:
        return not any((*self.rows.of_output, *self.columns.of_output))

    def input(self, input: Tensor) -> Tensor:
        return _cut(input, self.rows.of_input, self.columns.of_input)

    def of_input(self, gradient: Tensor) -> Tensor:
        return _uncut(gradient, self.rows.of_input, self.columns.of_input)

    def weight(self, weight: Tensor) -> Tensor:
        if self.kernel == weight.shape[2:]:
            return weight
        # A slice of short rows would be copied by PyTorch's conv, in up to ten times as long.
        return weight.flatten(2).index_select(2, self._taps).view(*weight.shape[:2], *self.kernel)

    @cached_property
    def _taps(self) -> Tensor:
        """Those that are left, by their places in a filter."""
        rows, columns = (side.kernel + sum(side.of_kernel) for side in (self.rows, self.columns))
        taps = torch.arange(rows * columns).view(rows, columns)
        return _cut(taps, self.rows.of_kernel, self.columns.of_kernel).flatten()

    def of_weight(self, gradient: Tensor) -> Tensor:
        return _uncut(gradient, self.rows.of_kernel, self.columns.of_kernel)

    def output(self, output: Tensor) -> Tensor:
        return _cut(output, self.rows.of_output, self.columns.of_output)

    def of_output(self, output: Tensor) -> Tensor:
        return _uncut(output, self.rows.of_output, self.columns.of_output)


def _cut(tensor: Tensor, rows: _Ends, columns: _Ends) -> Tensor:
    ends = (*columns, *rows)
    return F.pad(tensor, [-end for end in ends]) if any(ends) else tensor


def _uncut(tensor: Tensor, rows: _Ends, columns: _Ends) -> Tensor:
    ends = (*columns, *rows)
    return F.pad(tensor, ends) if any(ends) else tensor
