"""Hypothesis: any input that the plain chain accepts gives its result and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from chains_table import CONV_ROWS, ROWS, Own, Row, generator, map_tensors, randn
from helpers import check, double, exact_eager

Change = Callable[[Tensor], Tensor]
SIDES = st.one_of(st.integers(1, 9), st.sampled_from([15, 16, 17, 31, 33, 40]))
CHANNELS = st.one_of(st.integers(1, 9), st.sampled_from([15, 16, 17, 24, 31, 32, 33, 65]))
DTYPES = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
LAYOUTS = st.sampled_from(["contiguous", "channels_last", "sliced", "transposed", "expanded"])


def lay_out(t: Tensor, layout: str) -> Tensor:
    if layout == "channels_last":
        return t.contiguous(memory_format=torch.channels_last)
    if layout == "sliced":
        return torch.stack([t, t.new_full(t.shape, float("nan"))], -1).flatten(3)[..., ::2]
    if layout == "transposed":
        return t.transpose(1, 3).contiguous().transpose(1, 3)
    if layout == "expanded":
        return t[:, :, :1].expand(t.shape)
    return t


@st.composite
def own_arguments(draw: st.DrawFn, row: Row, channels: int, dtype: torch.dtype) -> Own:
    """The chain's arguments by name, with every form that each may have."""
    gen = generator(draw(st.integers(0, 10**6)))
    divisors = [g for g in range(1, channels + 1) if channels % g == 0]
    parameter = st.sampled_from(
        [dtype] if dtype == torch.float64 else sorted({dtype, torch.float32}, key=str)
    )

    def vector(*shape: int) -> Tensor:
        factor = draw(st.sampled_from([1.0, -1.0, 0.1, 3.0, 0.0]))
        return (factor * randn(gen, *shape)).to(draw(parameter))

    def value(name: str) -> Any:
        if name in ("bias", "scale"):
            return vector(*draw(st.sampled_from([(channels, 1, 1), (1, channels, 1, 1), (1, 1, 1)])))
        if name in ("norm_weight", "norm_bias"):
            return vector(channels) if draw(st.booleans()) else None
        if name == "num_groups":
            return draw(st.sampled_from(divisors))
        if name == "eps":
            return draw(st.sampled_from([1e-5, 1e-3, 0.1]))
        if name == "pool_size":
            return draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
        return draw(st.one_of(st.none(), st.floats(-2, 2)))

    return {name: value(name) for name in row.arguments}


def same_dtype_of_affine(own: Own) -> bool:
    """PyTorch's group norm wants its weight and bias in one dtype."""
    found = {own[n].dtype for n in ("norm_weight", "norm_bias") if own.get(n) is not None}
    return len(found) < 2


@st.composite
def conv_calls(draw: st.DrawFn) -> dict[str, Any]:
    row = draw(st.sampled_from(CONV_ROWS))
    dtype, conv_groups = draw(DTYPES), draw(st.sampled_from([1, 1, 1, 2, 3]))
    c_in, c_out = draw(CHANNELS) * conv_groups, draw(CHANNELS) * conv_groups
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    conv = {
        "stride": draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        "padding": draw(st.tuples(st.integers(0, 5), st.integers(0, 5))),
        "dilation": draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        "groups": conv_groups,
    }
    gen = generator(draw(st.integers(0, 10**6)))
    x = lay_out(randn(gen, draw(st.integers(1, 3)), c_in, draw(SIDES), draw(SIDES)).to(dtype), draw(LAYOUTS))
    fan_in = c_in // conv_groups * kernel[0] * kernel[1]
    weight = (randn(gen, c_out, c_in // conv_groups, *kernel) / fan_in**0.5).to(dtype)
    bias = randn(gen, c_out).to(dtype) if draw(st.booleans()) else None
    own = draw(own_arguments(row, c_out, dtype))
    return {"row": row, "x": x, "weight": weight, "bias": bias, "own": own, "conv": conv}


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


@given(data=st.data())
def test_chain_on_any_input(data: st.DataObject) -> None:
    row, dtype, channels = data.draw(st.sampled_from(ROWS)), data.draw(DTYPES), data.draw(CHANNELS)
    gen = generator(data.draw(st.integers(0, 10**6)))
    shape = (data.draw(st.integers(1, 3)), channels, data.draw(SIDES), data.draw(SIDES))
    v = lay_out(randn(gen, *shape).to(dtype), data.draw(LAYOUTS))
    own = data.draw(own_arguments(row, channels, dtype))
    if not same_dtype_of_affine(own):
        own["norm_bias"] = None
    hold_against_plain(
        lambda: row.chain_op(v, own),
        lambda change: row.plain_chain(change(v), map_tensors(own, change)),
        dtype,
        f"{row.chain} {shape} {v.stride()} {own}",
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
