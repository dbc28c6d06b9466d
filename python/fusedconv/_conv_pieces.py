"""A conv and its gradients in matrix products of PyTorch's: for each tap of the kernel one, of the pixels that it meets,
or for each window. Memory and work follow from input, weight and output, however far the kernel reaches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .chains import Geometry, output_size


def by_pieces(input: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    *steps, groups = geometry
    x, w = _grouped(input, 1, groups), _grouped(weight, 0, groups)
    height, width = map(output_size, input.shape[2:], weight.shape[2:], *steps)
    pieces = _Pieces.of(input, weight, *steps)
    y = x.new_zeros(x.shape[0], *w.shape[:2], height, width)
    for piece in pieces.all:
        products = torch.einsum(pieces.formula("wx->y"), w[piece.of_kernel], x[piece.of_input])
        # not in place: torch.func.vmap may map the weight alone
        y = y + pieces.widened(products, piece, height, width)
    return y.flatten(1, 2)


def gradients_by_pieces(
    grad: Tensor, input: Tensor, weight: Tensor, geometry: Geometry, mask: Sequence[bool]
) -> list[Tensor | None]:
    """Of the input and the weight."""
    *steps, groups = geometry
    x, w = _grouped(input, 1, groups), _grouped(weight, 0, groups)
    g = _grouped(grad, 1, groups)
    of_x = x.new_zeros(x.shape) if mask[0] else None
    of_w = w.new_zeros(w.shape) if mask[1] else None
    pieces = _Pieces.of(input, weight, *steps)
    for piece in pieces.all:
        of_y = g[piece.of_output]
        if of_x is not None:
            of_x[piece.of_input] += torch.einsum(pieces.formula("wy->x"), w[piece.of_kernel], of_y)
        if of_w is not None:
            of_w[piece.of_kernel] += torch.einsum(pieces.formula("xy->w"), x[piece.of_input], of_y)
    return [
        None if of_x is None else of_x.flatten(1, 2),
        None if of_w is None else of_w.flatten(0, 1),
    ]


def _grouped(tensor: Tensor, dim: int, groups: int) -> Tensor:
    """Its channels, which stand at ``dim``, as groups and the channels of a group."""
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])


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


@dataclass(frozen=True)
class _Pieces:
    """All that meet the map; of each side those that are fewer, taps or windows."""

    rows: Sequence[_PieceOfSide]
    columns: Sequence[_PieceOfSide]

    @staticmethod
    def of(
        input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
    ) -> _Pieces:
        return _Pieces(*map(_pieces_of_side, input.shape[2:], weight.shape[2:], stride, padding, dilation))

    @property
    def all(self) -> Iterator[_Piece]:
        return (_Piece(row, column) for row in self.rows for column in self.columns)

    def formula(self, what: str) -> str:
        """An einsum of w, x and y: a side's letter is missing where a piece has one tap, or one window, of it."""
        sides = [(side[0], letter) for side, letter in ((self.rows, "h"), (self.columns, "v")) if side]
        of_window = "".join(letter for piece, letter in sides if isinstance(piece.of_output, int))
        of_tap = "".join(letter for piece, letter in sides if isinstance(piece.of_kernel, int))
        names = {"w": "goi" + of_window, "x": "ngihv", "y": "ngo" + of_tap}
        first, second, result = what[0], what[1], what[-1]
        return f"{names[first]},{names[second]}->{names[result]}"

    def widened(self, products: Tensor, piece: _Piece, height: int, width: int) -> Tensor:
        """With zeros for all other windows."""
        pads: list[int] = []
        for dim, size, found in ((-1, width, piece.columns.of_output), (-2, height, piece.rows.of_output)):
            if isinstance(found, int):
                products = products.unsqueeze(dim)
                found = slice(found, found + 1)
            pads += [found.start, size - found.stop]
        return F.pad(products, pads)


def _pieces_of_side(size: int, kernel: int, step: int, before: int, gap: int) -> list[_PieceOfSide]:
    windows = output_size(size, kernel, step, before, gap)
    if windows < kernel:
        return [
            _PieceOfSide(slice(first, last + 1), met, window)
            for window in range(windows)
            for first, last, met in _meetings(size, kernel, gap, window * step - before)
        ]
    return [
        _PieceOfSide(tap, met, slice(first, last + 1))
        for tap in range(kernel)
        for first, last, met in _meetings(size, windows, step, tap * gap - before)
    ]


def _meetings(size: int, count: int, step: int, place: int) -> Iterator[tuple[int, int, slice]]:
    """Of so many points, a step apart from ``place`` on, the first and the last on the map, and where these lie; nothing
    where none does."""
    first = max(0, -(place // step))
    last = min(count - 1, (size - 1 - place) // step)
    if first <= last:
        yield first, last, slice(place + first * step, place + last * step + 1, step)
