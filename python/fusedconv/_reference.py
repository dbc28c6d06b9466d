"""An operator in PyTorch's own operators: its definition, and what other devices run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._conv import GEOMETRY, TENSORS, convolution
from ._operator import Operator
from .chains import compute_dtype


class Reference:
    """``differentiable``: by autograd; see `convolution`."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    def output(self, given: Sequence[Any], differentiable: bool = False, **options: Any) -> Tensor:
        args = self._operator.complete(given)
        _, dtype, memory_format = self._operator.look(args, **options)
        output = self.after_conv(self.v(args, options.get("precision"), differentiable), args, dtype)
        if torch._C._are_functorch_transforms_active():  # vmap knows no memory formats
            return output
        return output.contiguous(memory_format=memory_format)

    def v(self, args: Sequence[Any], precision: str | None, differentiable: bool = False) -> Tensor:
        """What the chain takes: the conv's output, or the first argument."""
        if not self._operator.has_conv:
            v: Tensor = args[0]
            return v
        return convolution(
            *args[TENSORS], *args[GEOMETRY], precision=precision, differentiable=differentiable
        )

    def after_conv(self, v: Tensor, args: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """The chain, computed in float32 or wider and rounded once, like the kernels."""
        compute = compute_dtype(v.dtype)
        own = [a.to(compute) if isinstance(a, Tensor) else a for a in args[self._operator.own]]
        return self._operator.chain.reference(v.to(compute), *own).to(dtype)
