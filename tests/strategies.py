"""Hypothesis: strategies that draw calls of the operators, in every form that the plain chain accepts."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from chains_table import CONV_ROWS, ROWS, Own, Row, generator, randn

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
def conv_calls(draw: st.DrawFn, least_batch: int = 1) -> dict[str, Any]:
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
    x = lay_out(
        randn(gen, draw(st.integers(least_batch, 3)), c_in, draw(SIDES), draw(SIDES)).to(dtype), draw(LAYOUTS)
    )
    fan_in = c_in // conv_groups * kernel[0] * kernel[1]
    weight = (randn(gen, c_out, c_in // conv_groups, *kernel) / fan_in**0.5).to(dtype)
    bias = randn(gen, c_out).to(dtype) if draw(st.booleans()) else None
    own = draw(own_arguments(row, c_out, dtype))
    return {"row": row, "x": x, "weight": weight, "bias": bias, "own": own, "conv": conv}


@st.composite
def chain_calls(draw: st.DrawFn, least_batch: int = 1) -> tuple[Row, Tensor, Own]:
    """A chain, a conv's output and the chain's own arguments."""
    row, dtype, channels = draw(st.sampled_from(ROWS)), draw(DTYPES), draw(CHANNELS)
    gen = generator(draw(st.integers(0, 10**6)))
    shape = (draw(st.integers(least_batch, 3)), channels, draw(SIDES), draw(SIDES))
    v = lay_out(randn(gen, *shape).to(dtype), draw(LAYOUTS))
    return row, v, draw(own_arguments(row, channels, dtype))
