"""NaN, infinities, zeros, ties, kinks and bounds: as the installed PyTorch on the same input."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from chains_table import CONV_ROWS, ROWS, Row, draw_own, generator, map_tensors, randn
from fusedconv import _C
from helpers import check_chain, check_conv, denormals, failure, flushing_denormals

INF, NAN = math.inf, math.nan
all_rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
conv_rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
norm_rows = pytest.mark.parametrize("row", [row for row in ROWS if row.has_norm], ids=lambda row: row.chain)
formats = pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"]
)
POOL = next(row for row in ROWS if row.has_pool)
LOGSUMEXP = next(row for row in ROWS if "logsumexp" in row.chain)


def as_pytorch(y: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """The same values, infinities and NaN at the same places."""
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@formats
@all_rows
def test_row_10_nan_and_infinity_in_one_sample_of_the_chain(
    row: Row, layout: torch.memory_format, value: float
) -> None:
    gen = generator(row.chain, "nan")
    own = draw_own(row, 12, gen, groups=4)
    for place in ((1, 4, 2, 3), (0, 0, 0, 0), (2, 11, 6, 8)):
        v = randn(gen, 3, 12, 7, 9).contiguous(memory_format=layout)
        v[place] = value
        as_pytorch(row.chain_op(v, own), row.plain_chain(v.contiguous(), own))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@formats
@conv_rows
def test_row_10_nan_and_infinity_in_one_sample_of_the_conv(
    row: Row, layout: torch.memory_format, value: float
) -> None:
    """Padded taps and channel tails must not touch the value: 0 * inf would be NaN elsewhere."""
    gen = generator(row.chain, "nan")
    own = draw_own(row, 12, gen, groups=4)
    weight, bias = randn(gen, 12, 3, 3, 3) / 5, randn(gen, 12)
    for place in ((1, 1, 4, 5), (0, 0, 0, 0), (2, 2, 8, 18)):
        x = randn(gen, 3, 3, 9, 19).contiguous(memory_format=layout)
        x[place] = value
        expected = row.plain_conv(x.contiguous(), weight, bias, own, padding=1)
        as_pytorch(row.conv_op(x, weight, bias, own, padding=1), expected, 1e-5)


@all_rows
def test_row_10_nan_in_a_parameter(row: Row) -> None:
    gen = generator(row.chain, "nan parameter")
    v, own = randn(gen, 2, 8, 6, 10), draw_own(row, 8, gen, groups=2)
    for name in (name for name, value in own.items() if isinstance(value, Tensor)):
        bad = map_tensors(own, torch.clone)
        bad[name].view(-1)[3] = NAN
        as_pytorch(row.chain_op(v, bad), row.plain_chain(v, bad))


@all_rows
def test_extreme_values_of_the_pointwise_functions(row: Row) -> None:
    """Values around each kink, tiny, huge and denormal ones, both signs of zero."""
    values = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 3.0, -3.0, 2.9999998, -2.9999998, 3.0000002, -3.0000002, 0.5]
    values += [9.0, -9.0, 20.0, -20.0, 88.0, -88.0, 89.0, -104.0, 1e4, -1e4, 1e30, -1e30, 3e38, -3e38]
    v = torch.tensor(values * 4).view(1, 1, 4, len(values)).expand(2, 4, -1, -1).contiguous()
    own = draw_own(
        row, 4, generator(row.chain, "extreme"), groups=1, scale=torch.ones(4, 1, 1), bias=torch.zeros(1)
    )
    for part in (v, v[..., :12].contiguous(), v[..., 12:22].contiguous()):
        as_pytorch(row.chain_op(part, own), row.plain_chain(part, own))


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """By the kernels: the chain without a step."""
    codes = {torch.float32: _C.FLOAT32, torch.bfloat16: _C.BFLOAT16, torch.float16: _C.FLOAT16}
    y = torch.empty_like(x, dtype=dtype)
    forms = [(codes[t.dtype], tuple(t.shape), t.stride()) for t in (x, y)]
    numbers = (0, 0.0, (1, 1), -INF, INF)
    launch = _C.Launch("identity", [("input", codes[x.dtype])], forms[0], None, numbers, forms[1])
    launch.on_cpu([x.data_ptr()], y.data_ptr(), 0, 1)
    return y


def bits(t: Tensor) -> Tensor:
    """All NaN are one."""
    return t.masked_fill(t.isnan(), NAN).view({2: torch.int16, 4: torch.int32}[t.element_size()])


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@formats
def test_every_half_value_is_converted_exactly(
    layout: torch.memory_format, half: torch.dtype, flushes: bool
) -> None:
    """All 65,536 of them, there and back, whether this thread flushes denormals or not."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(half).view(2, 32, 32, 32)
    every = every.contiguous(memory_format=layout)
    wide = every.float()
    with flushing_denormals(flushes):
        widened, narrowed = converted(every, torch.float32), converted(wide, half)
    assert torch.equal(bits(widened), bits(wide))
    assert torch.equal(bits(narrowed), bits(every))
    all_ones = torch.full((1, 8, 3, 5), -1, dtype=torch.int32).view(torch.float32)
    assert converted(all_ones, half).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@all_rows
def test_flushing_denormals_changes_no_more_than_in_eager(row: Row, dtype: torch.dtype) -> None:
    """Forward, and the gradient of v. PyTorch flushes bfloat16's denormals, which are float32's, and not float16's."""
    torch.set_num_threads(1)  # PyTorch's own threads do not flush
    gen = generator(row.chain, "flush", dtype)
    own = draw_own(row, 16, gen, dtype=dtype)
    v = denormals(randn(gen, 2, 16, 32, 32), dtype).requires_grad_()

    def run(flushes: bool) -> list[Tensor]:
        with flushing_denormals(flushes):
            values = [chain(v, own) for chain in (row.plain_chain, row.chain_op)]
            return [bits(t) for y in values for t in (y.detach(), *torch.autograd.grad(y.float().sum(), v))]

    plain, plain_grad, ours, ours_grad = (a == b for a, b in zip(run(False), run(True), strict=True))
    assert (ours | ~plain).all()
    assert (ours_grad | ~plain_grad).all()
    if dtype is torch.float16:
        assert plain.all()


@formats
def test_row_11_negative_and_zero_gamma_times_scale(layout: torch.memory_format) -> None:
    """Where it is negative the maximum comes from the smallest value; where it is zero all tie."""
    gen = generator("negative")
    gamma = torch.tensor([1.5, -1.5, 1.5, -1.5, 0.0, -0.0, 1.0, 0.0])
    scale = torch.tensor([1.0, 1.0, -2.0, -2.0, 3.0, 3.0, 0.0, -0.0]).view(8, 1, 1)
    for low, high in ((None, None), (-0.5, 0.7)):
        own = draw_own(POOL, 8, gen, groups=2, norm_weight=gamma, scale=scale, clamp_min=low, clamp_max=high)
        v = randn(gen, 2, 8, 9, 10).contiguous(memory_format=layout)
        as_pytorch(POOL.chain_op(v, own), POOL.plain_chain(v.contiguous(), own))
        x, weight = randn(gen, 2, 3, 9, 10).contiguous(memory_format=layout), randn(gen, 8, 3, 3, 3) / 5
        expected = POOL.plain_conv(x.contiguous(), weight, None, own)
        as_pytorch(POOL.conv_op(x, weight, None, own), expected)


def test_row_12_ties_in_a_pool_window() -> None:
    """Ties of equal values, and ties made by the affine: the first index gets the gradient."""
    gen = generator("ties")
    v = torch.randint(0, 3, (2, 6, 8, 9), generator=gen).float()
    for gamma in (torch.ones(6), -torch.ones(6), torch.zeros(6)):
        own = draw_own(POOL, 6, gen, groups=3, norm_weight=gamma, norm_bias=None, scale=torch.ones(6, 1, 1))
        own["pool_size"] = 3
        ours, plain = v.clone().requires_grad_(), v.clone().requires_grad_()
        y, expected = POOL.chain_op(ours, own), POOL.plain_chain(plain, own)
        as_pytorch(y, expected)
        direction = randn(gen, *y.shape)
        y.backward(direction)
        expected.backward(direction)
        assert ours.grad is not None
        assert plain.grad is not None
        as_pytorch(ours.grad, plain.grad, 1e-5)


def test_row_12_window_larger_than_the_map() -> None:
    gen = generator("window")
    own = draw_own(POOL, 6, gen, pool_size=5)
    assert "pool" in failure(lambda: POOL.chain_op(randn(gen, 2, 6, 4, 9), own))[1]
    assert "pool" in failure(lambda: POOL.chain_op(randn(gen, 2, 6, 9, 4), own))[1]
    assert (
        "pool" in failure(lambda: POOL.conv_op(randn(gen, 2, 3, 6, 9), randn(gen, 6, 3, 3, 3), None, own))[1]
    )


@formats
def test_row_13_logsumexp_of_large_and_infinite_channels(layout: torch.memory_format) -> None:
    gen = generator("logsumexp")
    own = draw_own(LOGSUMEXP, 8, gen, groups=2)
    far_apart = randn(gen, 1, 8, 5, 9)
    far_apart[:, ::3] -= 1000
    one_infinity = randn(gen, 1, 8, 5, 9)
    one_infinity[0, 2, 1, 1] = INF
    constant = torch.full((1, 8, 5, 9), 3.0)
    for v in (1e4 + randn(gen, 1, 8, 5, 9), -1e4 + randn(gen, 1, 8, 5, 9), far_apart, one_infinity, constant):
        v = v.contiguous(memory_format=layout)
        as_pytorch(LOGSUMEXP.chain_op(v, own), LOGSUMEXP.plain_chain(v.contiguous(), own))


@pytest.mark.parametrize("value", [INF, -INF])
def test_row_13_logsumexp_of_channels_that_are_all_infinite(value: float) -> None:
    """One pixel of infinities in all channels, and a whole tensor of them."""
    gen = generator("all infinite")
    v = randn(gen, 2, 8, 5, 9)
    own = draw_own(LOGSUMEXP, 8, gen, groups=2)
    v[0, :, 2, 3] = value
    expected = LOGSUMEXP.plain_chain(v, own)
    as_pytorch(LOGSUMEXP.chain_op(v, own), expected)
    as_pytorch(
        LOGSUMEXP.chain_op(torch.full_like(v, value), own),
        LOGSUMEXP.plain_chain(torch.full_like(v, value), own),
    )


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0.5, -0.5),
        (None, 0.3),
        (-0.3, None),
        (None, None),
        (NAN, 0.5),
        (-0.5, NAN),
        (-INF, INF),
        (0.2, 0.2),
        (INF, INF),
    ],
)
def test_row_15_clamp_bounds(low: float | None, high: float | None) -> None:
    gen = generator("clamp", low, high)
    own = draw_own(POOL, 6, gen, clamp_min=low, clamp_max=high)
    v = randn(gen, 2, 6, 9, 8)
    as_pytorch(POOL.chain_op(v, own), POOL.plain_chain(v, own))
    x, weight = randn(gen, 2, 3, 9, 8), randn(gen, 6, 3, 3, 3) / 5
    as_pytorch(POOL.conv_op(x, weight, None, own), POOL.plain_conv(x, weight, None, own))


@norm_rows
def test_row_6_one_group_and_as_many_groups_as_channels(row: Row) -> None:
    gen = generator(row.chain, "groups")
    for channels in (1, 5, 12):
        for groups in {1, channels}:
            v, own = randn(gen, 2, channels, 6, 7), draw_own(row, channels, gen, groups=groups)
            as_pytorch(row.chain_op(v, own), row.plain_chain(v, own), 5e-6)


@norm_rows
def test_row_6_one_element_per_group(row: Row) -> None:
    """PyTorch raises at batch 1 and accepts batch 2."""
    gen = generator(row.chain, "one element")
    own = draw_own(row, 4, gen, groups=4, pool_size=1)
    v = randn(gen, 2, 4, 1, 1)
    check_chain(row, v, own)
    expected = failure(lambda: row.plain_chain(v[:1], own))
    assert failure(lambda: row.chain_op(v[:1], own))[0] is expected[0]
    weight = randn(gen, 4, 2, 3, 3)
    x = randn(gen, 2, 2, 3, 3)
    check_conv(row, x, weight, None, own)
    assert failure(lambda: row.conv_op(x[:1], weight, None, own))[0] is expected[0]


@norm_rows
def test_constant_input_and_eps(row: Row) -> None:
    """The variance is zero: eps alone decides."""
    gen = generator(row.chain, "constant")
    for eps in (1e-5, 1e-2, 1.0):
        own = draw_own(row, 6, gen, groups=2, eps=eps)
        v = torch.full((2, 6, 5, 7), 0.375)
        as_pytorch(row.chain_op(v, own), row.plain_chain(v, own), 1e-5)
        v = v + 0.01 * randn(gen, *v.shape)
        as_pytorch(row.chain_op(v, own), row.plain_chain(v, own), 2e-5)


@all_rows
def test_row_14_gradients_at_kinks(row: Row) -> None:
    """relu at 0, hardswish at -3 and 3, clamp exactly at its bounds, as PyTorch here."""
    v = torch.tensor([0.0, -0.0, 3.0, -3.0, 1.0, -1.0, 0.5, 6.0] * 3).view(1, 2, 3, 4).expand(2, -1, -1, -1)
    v = v.contiguous()
    own = draw_own(
        row, 2, generator("kinks"), groups=1, norm_weight=None, norm_bias=None, pool_size=1,
        scale=torch.ones(2, 1, 1), bias=torch.zeros(2, 1, 1),
    )  # fmt: skip
    if row.has_pool:  # bounds at values that occur exactly
        inner = own | {"clamp_min": None, "clamp_max": None}
        values = row.plain_chain(v, inner).unique()
        own |= {"clamp_min": float(values[1]), "clamp_max": float(values[-2])}
    ours, plain = v.clone().requires_grad_(), v.clone().requires_grad_()
    row.chain_op(ours, own).sum().backward()
    row.plain_chain(plain, own).sum().backward()
    assert ours.grad is not None
    assert plain.grad is not None
    as_pytorch(ours.grad, plain.grad)
