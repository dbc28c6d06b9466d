"""A conv and its gradients in matrix products of PyTorch's: for each tap of the kernel one, of the pixels that it meets,
or for each window. Memory and work follow from input, weight and output, however far the kernel reaches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .chains import Geometry, output_sides, output_size


@dataclass(frozen=True)
class ByPieces:
    """All pieces that meet the map; of each side those that are fewer, taps or windows."""

    rows: Sequence[_PieceOfSide]
    columns: Sequence[_PieceOfSide]
    sides: Sequence[int]  # of the output
    groups: int

    @staticmethod
    def of(input: Tensor, weight: Tensor, geometry: Geometry) -> ByPieces:
        stride, padding, dilation, groups = geometry
        rows, columns = map(_pieces_of_side, input.shape[2:], weight.shape[2:], stride, padding, dilation)
        return ByPieces(rows, columns, output_sides(input, weight, stride, padding, dilation), groups)

    def output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, w = _grouped(input, 1, self.groups), _grouped(weight, 0, self.groups)
        y = _zeros((x.shape[0], *w.shape[:2], *self.sides), x, w)
        for piece in self.pieces:
            y[piece.of_output] += torch.einsum(self.formula("wx->y"), w[piece.of_kernel], x[piece.of_input])
        return plus_bias(y.flatten(1, 2), bias)

    def gradients(
        self, grad: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        x, w = _grouped(input, 1, self.groups), _grouped(weight, 0, self.groups)
        g = _grouped(grad, 1, self.groups)
        of_x = _zeros(x.shape, g, w) if mask[0] else None
        of_w = _zeros(w.shape, g, x) if mask[1] else None
        for piece in self.pieces:
            of_y = g[piece.of_output]
            if of_x is not None:
                of_x[piece.of_input] += torch.einsum(self.formula("wy->x"), w[piece.of_kernel], of_y)
            if of_w is not None:
                of_w[piece.of_kernel] += torch.einsum(self.formula("xy->w"), x[piece.of_input], of_y)
        return [
            None if of_x is None else of_x.flatten(1, 2),
            None if of_w is None else of_w.flatten(0, 1),
            gradient_of_bias(grad, mask[2]),
        ]

    @property
    def pieces(self) -> Iterator[_Piece]:
        return (_Piece(row, column) for row in self.rows for column in self.columns)

    def formula(self, what: str) -> str:
        """An einsum of w, x and y: a side's letter is missing where a piece has one tap, or one window, of it."""
        sides = [(side[0], letter) for side, letter in ((self.rows, "h"), (self.columns, "v")) if side]
        of_window = "".join(letter for piece, letter in sides if isinstance(piece.of_output, int))
        of_tap = "".join(letter for piece, letter in sides if isinstance(piece.of_kernel, int))
        names = {"w": "goi" + of_window, "x": "ngihv", "y": "ngo" + of_tap}
        first, second, result = what[0], what[1], what[-1]
        return f"{names[first]},{names[second]}->{names[result]}"


def plus_bias(output: Tensor, bias: Tensor | None) -> Tensor:
    return output if bias is None else output + bias.view(-1, 1, 1)


def gradient_of_bias(grad: Tensor, wanted: bool) -> Tensor | None:
    return grad.sum((0, 2, 3)) if wanted else None


def _grouped(tensor: Tensor, dim: int, groups: int) -> Tensor:
    """Its channels, which stand at ``dim``, as groups and the channels of a group."""
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])


def _zeros(shape: Sequence[int], *sources: Tensor) -> Tensor:
    """For what is computed of the sources: torch.func maps or follows it if it does one of them."""
    nothing = torch.stack([source.narrow(0, 0, 0).sum() for source in sources]).sum()
    return nothing.new_zeros(shape)


_Index = tuple[Any, ...]


@dataclass(frozen=True)
class _PieceOfSide:
    """One tap and the windows in which it meets the map, or one window and the taps of it that do."""

    of_kernel: int | slice
    of_input: slice
    of_output: int | slice


@dataclass(frozen=True)
class _Piece:
    rows: _PieceOfSide
    columns: _PieceOfSide

    @property
    def of_kernel(self) -> _Index:
        return ..., self.rows.of_kernel, self.columns.of_kernel

    @property
    def of_input(self) -> _Index:
        return ..., self.rows.of_input, self.columns.of_input

    @property
    def of_output(self) -> _Index:
        return ..., self.rows.of_output, self.columns.of_output


def _pieces_of_side(size: int, kernel: int, step: int, before: int, gap: int) -> list[_PieceOfSide]:
    windows = output_size(size, kernel, step, before, gap)
    of_windows = windows < kernel
    count, apart = (kernel, gap) if of_windows else (windows, step)
    places = (
        [window * step - before for window in range(windows)]
        if of_windows
        else [tap * gap - before for tap in range(kernel)]
    )
    pieces = []
    # Of so many points, a step apart from each place on, which ones lie on the map?
    for one, place in enumerate(places):
        first, last = max(0, -(place // apart)), min(count - 1, (size - 1 - place) // apart)
        if first <= last:
            several = slice(first, last + 1)
            met = slice(place + first * apart, place + last * apart + 1, apart)
            pieces.append(_PieceOfSide(several, met, one) if of_windows else _PieceOfSide(one, met, several))
    return pieces
