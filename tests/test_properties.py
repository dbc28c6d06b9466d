"""Hypothesis: any input that the plain chain accepts gives its result and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from chains_table import Own, Row, generator, map_tensors, randn
from helpers import check, double, exact_eager
from strategies import chain_calls, conv_calls, same_dtype_of_affine

Change = Callable[[Tensor], Tensor]


def hold_against_plain(
    ours: Callable[[], Tensor], plain: Callable[[Change], Tensor], dtype: torch.dtype, what: str
) -> None:
    """If the plain chain refuses the input, so must we; otherwise the results agree."""
    with torch.no_grad():
        try:
            plain(lambda t: t.contiguous())
        except (RuntimeError, ValueError) as error:
            if "mixed dtype" not in str(error):  # a mixture that PyTorch's group norm lacks may work here
                with pytest.raises((RuntimeError, ValueError, TypeError)):
                    ours()
            return
        if torch.isfinite(plain(torch.Tensor.double)).all() and torch.isfinite(plain(exact_eager)).all():
            check(ours(), plain, what, dtype)
        else:
            ours()


@given(call=conv_calls())
def test_conv_on_any_input(call: dict[str, Any]) -> None:
    row: Row = call["row"]
    own, conv = call["own"], call["conv"]
    if not same_dtype_of_affine(own):
        own = own | {"norm_bias": None}

    def plain(change: Change) -> Tensor:
        bias = None if call["bias"] is None else change(call["bias"])
        return row.plain_conv(
            change(call["x"]), change(call["weight"]), bias, map_tensors(own, change), **conv
        )

    shapes = {
        n: (tuple(v.shape), v.stride(), v.dtype) if isinstance(v, Tensor) else v for n, v in call.items()
    }
    hold_against_plain(
        lambda: row.conv_op(call["x"], call["weight"], call["bias"], own, **conv),
        plain,
        call["x"].dtype,
        f"{row.conv} {shapes}",
    )


@given(call=chain_calls())
def test_chain_on_any_input(call: tuple[Row, Tensor, Own]) -> None:
    row, v, own = call
    if not same_dtype_of_affine(own):
        own["norm_bias"] = None
    hold_against_plain(
        lambda: row.chain_op(v, own),
        lambda change: row.plain_chain(change(v), map_tensors(own, change)),
        v.dtype,
        f"{row.chain} {tuple(v.shape)} {v.stride()} {own}",
    )


@given(call=conv_calls())
def test_gradients_on_any_input(call: dict[str, Any]) -> None:
    """In float64, where agreement to ten digits leaves no room for a wrong term."""
    row: Row = call["row"]
    own, conv = double(call["own"]), call["conv"]
    names = [name for name, value in own.items() if isinstance(value, Tensor)]
    tensors = [call["x"].double(), call["weight"].double(), *(own[name] for name in names)]

    def gradients(run: Any) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        values = own | dict(zip(names, leaves[2:], strict=True))
        y = run(leaves[0], leaves[1], None, values, **conv)
        return list(torch.autograd.grad(y, leaves, randn(generator("g"), *y.shape).double()))

    try:
        right = gradients(row.plain_conv)
    except (RuntimeError, ValueError):
        return
    largest = max(float(g.abs().max()) for g in right if g.numel())
    for got, expected in zip(gradients(row.conv_op), right, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9 * max(1.0, largest))
