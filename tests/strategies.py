"""Hypothesis: strategies that draw calls of the operators, in every form that the plain chain accepts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from chains_table import CONV_ROWS, OF_NORM, OF_STAGES, ROWS, Own, Row, generator, randn
from extremes import ExtremeGeometry, FlushedDenormals, LargeMean

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
        if name in OF_STAGES:
            return vector(*draw(st.sampled_from([(channels, 1, 1), (1, channels, 1, 1), (1, 1, 1)])))
        if name in OF_NORM:
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
    found = {own[n].dtype for n in OF_NORM if own.get(n) is not None}
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


# ---- extremes: plain data, for a child ----

LARGEST = 2**31 - 1  # that the operators take, of a stride, a padding or a dilation
POWERS = [2**k + d for k in range(2, 32) for d in (-1, 0, 1) if 2**k + d <= LARGEST]
LAYOUTS_OF_INPUT = st.sampled_from([torch.contiguous_format, torch.channels_last])
MOST_OUTPUTS = 64  # of an axis
MOST_PIXELS = 2**13  # of a map
MOST_PRODUCTS = 2**14  # of one channel: what makes a case slow is the reference


@dataclass(frozen=True)
class Axis:
    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    outputs: int


@st.composite
def extreme_axes(draw: st.DrawFn, most_products: int, most_size: int) -> Axis:
    """An axis of a conv with few outputs: where its reach is large, the padding makes up for it."""
    size = min(most_size, draw(st.one_of(st.integers(1, 40), st.sampled_from([1, 1, 2, 64, 257, 1000]))))
    kernel = draw(st.one_of(st.integers(1, 5), st.integers(1, 40)))
    near = st.sampled_from(
        sorted({max(1, a * n + d) for n in (size, kernel) for a in (1, 2) for d in (-1, 0, 1)})
    )
    steps = st.one_of(st.integers(1, 4), near, st.sampled_from(POWERS), st.integers(1, LARGEST))
    most_outputs = max(1, min(MOST_OUTPUTS, most_products // kernel))
    dilation = min(draw(steps), (2 * LARGEST + size - 1) // max(1, kernel - 1))
    reach = dilation * (kernel - 1)
    stride = max(draw(steps), math.ceil((size - reach) / most_outputs))
    least = max(0, (reach - size + 2) // 2)  # padding, for one output
    most = min(LARGEST, max(least, (most_outputs * stride + reach - size) // 2))
    if least > 0 and draw(st.integers(0, 49)) == 49:
        return Axis(size, kernel, stride, draw(st.integers(0, least - 1)), dilation, 0)
    tap, output = draw(st.integers(0, kernel - 1)), draw(st.integers(0, most_outputs - 1))
    meeting = (
        tap * dilation + output * stride - draw(st.integers(0, size - 1))
    )  # there this tap meets a value
    some = st.sampled_from(
        [least, meeting, meeting, meeting, reach // 2, reach, 0, draw(st.sampled_from(POWERS))]
    )
    padding = min(most, max(least, draw(st.one_of(some, some, st.integers(least, most)))))
    return Axis(size, kernel, stride, padding, dilation, (size + 2 * padding - reach - 1) // stride + 1)


@st.composite
def common_of_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Of cases of any kind."""
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    channels = (groups * draw(st.integers(1, 4)), groups * draw(st.sampled_from([1, 2, 3, 4, 8, 9])))
    return {
        "chain": draw(st.sampled_from([row.chain for row in CONV_ROWS])),
        "dtype": draw(DTYPES),
        "batch": draw(st.sampled_from([1, 1, 2, 3])),
        "channels": channels,
        "groups": groups,
        "num_groups": draw(st.sampled_from([g for g in range(1, channels[1] + 1) if channels[1] % g == 0])),
        "has_bias": draw(st.booleans()),
        "layout": draw(LAYOUTS_OF_INPUT),
        "threads": draw(st.sampled_from([1, 2])),
        "seed": draw(st.integers(0, 10**6)),
    }


@st.composite
def extreme_geometries(draw: st.DrawFn) -> ExtremeGeometry:
    one = draw(extreme_axes(MOST_PRODUCTS, MOST_PIXELS))
    axes = [
        one,
        draw(extreme_axes(MOST_PRODUCTS // max(1, one.kernel * one.outputs), MOST_PIXELS // one.size)),
    ]
    if draw(st.booleans()):
        axes.reverse()
    h, w = axes
    pool = tuple(draw(st.integers(1, max(1, min(3, axis.outputs)))) for axis in axes)
    return ExtremeGeometry(
        **draw(common_of_cases()),
        size=(h.size, w.size), kernel=(h.kernel, w.kernel), stride=(h.stride, w.stride),
        padding=(h.padding, w.padding), dilation=(h.dilation, w.dilation), pool=(pool[0], pool[1]),
        wants_gradients=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def ordinary_geometries(draw: st.DrawFn) -> dict[str, Any]:
    """Groups of the norm have digits, being of some 32 elements or more, and each window meets the map: where one meets
    nothing but padding, PyTorch's own conv may crash in float32."""

    def pair(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    kernel, dilation, outputs = pair(1, 7), pair(1, 2), pair(6, 20)
    padding = tuple(min(p, d * (k - 1)) for p, d, k in zip(pair(0, 3), dilation, kernel, strict=True))
    size = tuple(
        max(1, o + d * (k - 1) - 2 * p) for o, d, k, p in zip(outputs, dilation, kernel, padding, strict=True)
    )
    return {
        **draw(common_of_cases()),
        "size": (size[0], size[1]), "kernel": kernel, "dilation": dilation, "padding": (padding[0], padding[1]),
        "stride": draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (1, 2)])), "pool": pair(1, 3), "eps": 1e-5,
    }  # fmt: skip


@st.composite
def large_means(draw: st.DrawFn) -> LargeMean:
    """So large that eager has digits left of what lies around them, as a norm takes the mean away. Float64's error shows
    from that in float32: it has no larger ones."""
    given = draw(ordinary_geometries())
    deviation = draw(st.sampled_from([1e-2, 1.0]))
    factor = draw(st.sampled_from([1.0, 3.0, 0.01, -1.0]))
    dtype = torch.float32 if given["dtype"] is torch.float64 else given["dtype"]
    largest = abs(factor) * deviation / torch.finfo(dtype).eps / 64

    def size(among: list[float], unit: float) -> float:
        return draw(st.sampled_from([value for value in among if value * unit <= largest] or among[:1]))

    return LargeMean(
        **given,
        mean=size([0.0, 1.0, 100.0, 1000.0], abs(factor)), deviation=deviation, factor=factor,
        bias_factor=size([0.01, 1.0, 100.0, 1e4], 1.0), wants_gradients=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def flushed_denormals(draw: st.DrawFn) -> FlushedDenormals:
    given = draw(ordinary_geometries())
    least = -8 if given["dtype"] is torch.float16 else -44
    low = draw(st.integers(least, 0))
    high = draw(st.integers(low, 0))
    given["pool"] = tuple(map(min, given["pool"], given["size"]))  # where there is no conv
    return FlushedDenormals(**given, has_conv=draw(st.booleans()), exponents=(low, high))
