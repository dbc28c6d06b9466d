"""The conv with its chain on CUDA: numerics, the same bits, and values that are not finite."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedconv
from chains_table import CONV_ROWS, ROWS, Row, draw_own, generator, map_tensors, randn, reference_models
from cuda_conv import (
    BF16,
    FP16,
    IEEE,
    LAYOUTS,
    MODES,
    SOURCE,
    TF32,
    Call,
    Case,
    Mode,
    Runner,
    as_pytorch,
    call_again,
    cases,
    check,
    check_all,
    draw,
    exact_in,
    hold,
    in_double,
    plain,
    poisoned,
)
from fusedconv import _C
from fusedconv._conv import convolution, convolution_backward
from helpers import BOUNDS, assert_close, new_process, on, profile, same_bits

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("source")]
INF, NAN = math.inf, math.nan
conv_rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
modes = pytest.mark.parametrize("mode", MODES, ids=str)
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
direct_only = pytest.mark.usefixtures("direct_path")
RELU_HARDSWISH = CONV_ROWS[0]
POOL = next(row for row in CONV_ROWS if row.has_pool)


def test_this_build_runs_on_this_card() -> None:
    """Else every test here would look at PyTorch."""
    assert _C.cuda_status(torch.cuda.current_device()) == ""
    assert set(_C.cuda_chains()) == {"identity", *[row.chain for row in ROWS]}


def test_new_memory_is_poisoned() -> None:
    """Else a value that no kernel writes might be right."""
    with poisoned():
        assert torch.empty(0, device="cuda").new_empty_strided((2, 3), (3, 1)).isnan().all()
        assert torch.empty(64, dtype=torch.uint8, device="cuda").view(torch.float32).isnan().all()


# ---- numerics ------------------------------------------------------------------------------------


@layouts
@modes
@conv_rows
def test_random_calls(run: Runner, row: Row, mode: Mode, layout: torch.memory_format) -> None:
    """Tails of channels and of both sides, kernels, padding, dilation, windows, groups."""
    check_all(run, row, mode, layout, cases(row, mode, layout, count=16))


@pytest.mark.sanitizer
@layouts
@modes
@conv_rows
def test_random_small_calls(run: Runner, row: Row, mode: Mode, layout: torch.memory_format) -> None:
    check_all(run, row, mode, layout, cases(row, mode, layout, "small", count=4, most=2**14), device="cpu")


@layouts
@modes
@conv_rows
def test_large_maps(run: Runner, row: Row, mode: Mode, layout: torch.memory_format) -> None:
    check(run, row, Case(2, (8, 64), (300, 259), padding=(1, 1), groups=16, pool=(4, 4)), mode, layout)
    check(run, row, Case(1, (64, 256), (90, 131), groups=32, pool=(3, 3)), mode, layout)


@layouts
@modes
@conv_rows
def test_large_kernels_and_wide_dilations(
    run: Runner, row: Row, mode: Mode, layout: torch.memory_format
) -> None:
    """They do not fit into shared memory at once: a stage has some of the taps, or a tile few windows."""
    for case in (
        Case(2, (40, 70), (31, 45), (7, 7), padding=(3, 3), groups=10, pool=(3, 3)),
        Case(1, (3, 16), (40, 128), (7, 7), padding=(3, 3), groups=4, pool=(8, 5)),
        Case(2, (16, 24), (40, 63), (7, 7), padding=(24, 25), dilation=(8, 8), groups=4, pool=(7, 2)),
        Case(1, (64, 200), (9, 14), (7, 7), padding=(24, 25), dilation=(8, 8), groups=5, pool=(6, 7)),
        Case(1, (9, 33), (5, 300), (3, 7), padding=(4, 0), dilation=(3, 40), pool=(7, 7)),
        Case(1, (5, 8), (70, 40), (6, 5), padding=(30, 290), dilation=(20, 150), pool=(2, 3)),
        Case(1, (8, 64), (21, 256), padding=(1, 1), groups=16, pool=(8, 2)),
    ):
        check(run, row, case, mode, layout)


@direct_only
@layouts
@modes
@pytest.mark.parametrize(
    "row", [r for r in CONV_ROWS if r.has_norm and not r.has_pool], ids=lambda row: row.chain
)
def test_samples_that_stay_on_chip(run: Runner, row: Row, mode: Mode, layout: torch.memory_format) -> None:
    """Each value of the conv is computed once, where all blocks together have room for a sample's tiles.

    Groups of one channel and of all; few tiles, and one for each group of threads; many samples for each; and a sample
    that is too large by one tile.
    """
    most = (
        2 * torch.cuda.get_device_properties().multi_processor_count
    )  # a tile of the last two cases is a row
    cases = (
        Case(3, (8, 64), (128, 130), groups=64),
        Case(5, (3, 48), (70, 33), groups=1),
        Case(9, (8, 48), (30, 17), groups=3),
        Case(7, (8, 9), (61, 120), padding=(1, 1), groups=3),
        Case(600, (3, 64), (4, 6), groups=2),
        Case(40, (8, 32), (200, 256), groups=8),
        Case(3, (8, 64), (most + 2, 258), groups=16),
        Case(3, (8, 64), (most + 3, 258), groups=16),
    )
    can_stay = torch.cuda.get_device_capability() == (9, 0) and SOURCE != "sm_80"
    for case in cases:
        check(run, row, case, mode, layout)
        stays = [text.endswith("samples stay there") for text in run.said()]
        assert stays == len(stays) * [can_stay and case is not cases[-1]], run.said()


@modes
@conv_rows
def test_a_sample_that_is_not_finite_leaves_the_others_alone(run: Runner, row: Row, mode: Mode) -> None:
    """Among so many that each group of threads has some of them."""
    call = draw(row, Case(300, (8, 64), (12, 20), groups=16), mode.dtype)
    right = run(row, call, mode)
    call.x[150, 3, 5, 7] = NAN
    y = run(row, call, mode)
    others = [i for i in range(300) if i != 150]
    assert same_bits(y[others], right[others])
    as_pytorch(y[150:151], in_double(row, call)[150:151], mode)


@conv_rows
def test_a_channel_far_from_the_others_of_its_group(run: Runner, row: Row) -> None:
    for groups in (1, 4):
        call = draw(row, Case(3, (8, 64), (40, 71), groups=groups), IEEE.dtype)
        assert call.bias is not None
        call.bias[0] = 100
        hold(run(row, call, IEEE), row, call, IEEE, f"{groups} groups")


@pytest.mark.parametrize("shape", [(2, 1024, 14, 14), (2, 2048, 7, 7), (2, 40, 70, 70)])
def test_a_group_that_fits_into_shared_memory_takes_one_kernel(shape: tuple[int, ...]) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("without clusters of blocks these groups do not fit")
    row = next(r for r in ROWS if r.chain == "group_norm_silu")
    gen = generator(row.chain, shape)
    v, own = randn(gen, *shape).cuda(), on(draw_own(row, shape[1], gen, dtype=torch.float32, groups=1))
    row.chain_op(v, own)
    assert len(profile(lambda: row.chain_op(v, own)).kernels) == 1
    reference = row.plain_chain(v.double(), map_tensors(own, torch.Tensor.double))
    assert_close(row.chain_op(v, own), reference, row.plain_chain(v, own), IEEE.bound, str(shape))


@conv_rows
def test_row_8_a_group_of_4_million_elements(run: Runner, row: Row) -> None:
    check(run, row, Case(1, (2, 4), (1026, 1027), groups=1, pool=(8, 8)), IEEE, torch.contiguous_format)


@modes
@conv_rows
def test_scale_of_the_values(run: Runner, row: Row, mode: Mode) -> None:
    """A float32 norm has to square its values, and the exponential of 1e4 is no float."""
    factors = [3.0, 0.01, -1.0]
    if mode is not FP16:
        factors += [1e-20, 1e16 if row.has_norm else 1e30]
    if mode is not FP16 and "logsumexp" in row.chain:
        factors += [1e4]
    for c_in, c_out in ((8, 32), (3, 20)):
        call = draw(row, Case(2, (c_in, c_out), (40, 71), groups=4), mode.dtype)
        assert call.bias is not None
        for factor in factors:
            scaled = Call(call.x * factor, call.weight, call.bias * factor, call.own, call.geometry)
            hold(run(row, scaled, mode), row, scaled, mode, f"times {factor}")


# Of a value of the conv: 72, the 504, and as many as our conv is the faster one for.
MANY_PRODUCTS = (((8, 32), (3, 3)), ((56, 16), (3, 3)), ((24, 64), (5, 5)))


@pytest.mark.parametrize("mode", [IEEE, BF16, FP16], ids=str)
@conv_rows
def test_row_8_large_means_and_small_deviations(run: Runner, row: Row, mode: Mode) -> None:
    """Of each channel of the input, and of what the norm gets: its groups are channels."""
    for c_in, c_out in ((8, 32), (3, 20)):
        call = draw(row, Case(2, (c_in, c_out), (40, 71), groups=c_out), mode.dtype)
        mean = 100 * (1 + torch.arange(c_in, device="cuda") / c_in).view(-1, 1, 1)
        x = (mean + 0.01 * call.x.float()).to(mode.dtype)
        call = Call(x, call.weight, call.bias, call.own, call.geometry)
        hold(run(row, call, mode), row, call, mode, "mean 100")


@modes
@conv_rows
def test_row_8_a_bias_much_larger_than_the_products(run: Runner, row: Row, mode: Mode) -> None:
    """It is added to sums that are complete: in between, each product would be rounded to the bias' last place."""
    for channels, kernel in MANY_PRODUCTS:
        c_out = channels[1]
        call = draw(row, Case(2, channels, (24, 71), kernel, groups=c_out), mode.dtype)
        for size in (1, 30):
            assert call.bias is not None
            x, bias = (0.01 * call.x).to(mode.dtype), (2 * size * call.bias).to(mode.dtype)
            biased = Call(x, call.weight, bias, call.own, call.geometry)
            hold(run(row, biased, mode), row, biased, mode, f"{kernel}, a bias of {size}")


@modes
@conv_rows
def test_row_8_a_large_mean_of_many_products(run: Runner, row: Row, mode: Mode) -> None:
    for channels, kernel in MANY_PRODUCTS:
        case = Case(2, channels, (24, 71), kernel, groups=channels[1], has_bias=False)
        call = draw(row, case, mode.dtype)
        x = (1000 + call.x.float()).to(mode.dtype)
        call = Call(x, call.weight, None, call.own, call.geometry)
        hold(run(row, call, mode), row, call, mode, f"{kernel}, a mean of 1000")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode is not FP16], ids=str)
@conv_rows
def test_samples_of_very_different_size(run: Runner, row: Row, mode: Mode) -> None:
    """Each sample is as exact as it is alone."""
    call = draw(row, Case(9, (8, 32), (20, 71), groups=4, has_bias=False), mode.dtype)
    most = 16 if row.has_norm else 30
    sizes = torch.logspace(-most, most, 9, device="cuda").view(-1, 1, 1, 1)
    call = Call((call.x * sizes).to(mode.dtype), call.weight, None, call.own, call.geometry)
    y, reference, exact = run(row, call, mode), in_double(row, call), exact_in(mode, row, call, mode.dtype)
    for i, size in enumerate(sizes.flatten().tolist()):
        what = f"{row.conv} {mode}: the sample of size {size:.0e}"
        assert_close(y[i], reference[i], exact[i], mode.bound, what)


@pytest.mark.parametrize("exponent", [1, 3, 8, 25])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode is not FP16], ids=str)
@conv_rows
def test_channels_of_very_different_size(run: Runner, row: Row, mode: Mode, exponent: int) -> None:
    """The weights are so much smaller where the input is larger that each channel counts as much as another."""
    for c_in in (3, 8, 33):
        call = draw(row, Case(2, (c_in, 32), (20, 71), groups=4), mode.dtype)
        sizes = torch.logspace(-exponent, exponent, c_in, device="cuda").view(-1, 1, 1)
        x, weight = (call.x * sizes).to(mode.dtype), (call.weight / sizes).to(mode.dtype)
        call = Call(x, weight, call.bias, call.own, call.geometry)
        hold(run(row, call, mode), row, call, mode, f"channels from 1e-{exponent} to 1e{exponent}")


@direct_only
@modes
def test_values_below_the_least_normal_one(run: Runner, mode: Mode) -> None:
    """They are no zeros: in half precision 2e-5 is one of them."""
    info = torch.finfo(mode.dtype)
    step = info.smallest_normal * info.eps
    least = torch.linspace(-0.5, 1, 300, dtype=torch.float64, device="cuda") * 2 * info.smallest_normal
    x = least.to(mode.dtype).expand(1, 1, 8, 300).contiguous()
    call = Call(x, torch.ones(8, 1, 1, 1, dtype=mode.dtype, device="cuda"), None, {}, {})
    y, reference = run(RELU_HARDSWISH, call, mode), in_double(RELU_HARDSWISH, call)
    assert int((reference > 8 * step).sum()) > 1000
    assert float((y.double() - reference).abs().max()) <= step + mode.bound * 2 * info.smallest_normal


@conv_rows
def test_pixels_and_filters_of_very_different_size(run: Runner, row: Row) -> None:
    """Columns of the map from 0.01 to 100, and filters from 1e-15 to 1e15, each held by itself."""
    call = draw(row, Case(2, (8, 32), (20, 71), groups=32, has_bias=False), IEEE.dtype)
    filters = torch.logspace(-15, 15, 32, device="cuda").view(-1, 1, 1, 1)
    of_filters = Call(call.x, call.weight * filters, None, call.own, call.geometry)
    columns = torch.logspace(-2, 2, 71, device="cuda")
    of_columns = Call(call.x * columns, call.weight, None, call.own, call.geometry)
    for sized, dim in ((of_filters, 1), (of_columns, 3)):
        if row.has_pool or "logsumexp" in row.chain:
            dim = 0  # the output has not all of them
        y, reference = run(row, sized, IEEE), in_double(row, sized)
        exact = exact_in(IEEE, row, sized, IEEE.dtype)
        for i in range(y.shape[dim]):
            one, right, eager = (t.select(dim, i) for t in (y, reference, exact))
            assert_close(one, right, eager, IEEE.bound, f"{row.conv}: {i} of dimension {dim}")


@direct_only
@pytest.mark.parametrize("mode", [BF16, FP16], ids=str)
@conv_rows
def test_half_precision_with_float32_parameters(run: Runner, row: Row, mode: Mode) -> None:
    """The output has the dtype that the unfused chain gives, also under autocast."""
    call = draw(row, Case(2, (5, 24), (21, 40), groups=4), mode.dtype)
    own = map_tensors(call.own, torch.Tensor.float)
    call = Call(call.x, call.weight, call.bias, own, call.geometry)
    y = run(row, call, mode)
    scaled = "scale" in row.arguments
    assert y.dtype == (torch.float32 if scaled else mode.dtype)
    hold(y, row, call, mode, "float32 parameters")
    with torch.autocast("cuda", mode.dtype):
        y = run(row, call.map(torch.Tensor.float), mode)
    assert y.dtype == (torch.float32 if row.has_norm else mode.dtype)
    hold(y, row, call, mode, "autocast")


@conv_rows
def test_row_6_one_element_per_group(run: Runner, row: Row) -> None:
    """The deviation is zero: what remains is the shift, in either layout."""
    size = (4, 4) if row.has_pool else (3, 3)
    for groups in (1, 4):
        call = draw(row, Case(2, (2, 4), size, groups=groups), IEEE.dtype)
        for layout in LAYOUTS.values():
            torch.testing.assert_close(
                run(row, call, IEEE, layout=layout), plain(row, call), rtol=1e-4, atol=1e-4
            )


@layouts
@modes
def test_row_11_negative_and_zero_gamma_times_scale(
    run: Runner, mode: Mode, layout: torch.memory_format
) -> None:
    """Where it is negative the maximum comes from the smallest value; where it is zero all tie."""
    gamma = torch.tensor([1.5, -1.5, 1.5, -1.5, 0.0, -0.0, 1.0, 0.0], dtype=mode.dtype)
    scale = torch.tensor([1.0, 1.0, -2.0, -2.0, 3.0, 3.0, 0.0, -0.0], dtype=mode.dtype).view(8, 1, 1)
    for pool in ((2, 2), (4, 4), (3, 5)):
        case = Case(2, (3, 8), (30, 44), groups=2, pool=pool)
        call = draw(POOL, case, mode.dtype, norm_weight=gamma, scale=scale, clamp_min=None, clamp_max=None)
        hold(run(POOL, call, mode, layout=layout), POOL, call, mode, case)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.5, -0.5), (None, 0.3), (-0.3, None), (NAN, 0.5), (-0.5, NAN), (-INF, INF), (0.2, 0.2)],
)
def test_row_15_clamp_bounds(run: Runner, low: float | None, high: float | None) -> None:
    call = draw(POOL, Case(2, (3, 8), (20, 31), groups=2), IEEE.dtype, clamp_min=low, clamp_max=high)
    as_pytorch(run(POOL, call, IEEE), in_double(POOL, call), IEEE)


@pytest.mark.sanitizer
@modes
@conv_rows
def test_row_2_views_and_addresses(run: Runner, row: Row, mode: Mode) -> None:
    """Steps, transposed and expanded dimensions, and addresses that no vector is aligned to, of each argument."""
    call = draw(row, Case(2, (8, 24), (12, 34), groups=4), mode.dtype, "cpu").map(lambda t: t.to("cuda"))
    aligned = run(row, call, mode)

    def shifted(t: Tensor) -> Tensor:
        memory = torch.full((t.numel() + 9,), NAN, dtype=t.dtype, device="cuda")
        memory[1 : 1 + t.numel()] = t.flatten()
        return memory[1 : 1 + t.numel()].view(t.shape)

    def stepped(t: Tensor) -> Tensor:
        return torch.stack([t, torch.full_like(t, NAN)], -1).flatten(-2)[..., ::2]

    def transposed(t: Tensor) -> Tensor:
        return t.transpose(0, -1).contiguous().transpose(0, -1)

    def cut(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, [1] * 2 * t.dim(), value=NAN)[(slice(1, -1),) * t.dim()]

    def of_conv(change: Any) -> Call:
        return Call(change(call.x), change(call.weight), call.bias, call.own, call.geometry)

    calls = {change.__name__: call.map(change) for change in (shifted, stepped, transposed, cut)}
    channels_last = of_conv(lambda t: t.contiguous(memory_format=torch.channels_last))
    calls |= {"channels_last": channels_last, "shifted channels_last": of_conv(shifted_channels_last)}
    for name, other in calls.items():
        with poisoned():
            y = call_again(row, other, mode)
        assert y.shape == aligned.shape
        as_pytorch(y, aligned.double(), mode)
        assert name != "shifted" or same_bits(y, aligned), "an address changes the result"


def shifted_channels_last(t: Tensor) -> Tensor:
    """In channels_last, from an address that no vector is aligned to."""
    memory = torch.full((t.numel() + 9,), NAN, dtype=t.dtype, device="cuda")
    n, c, h, w = t.shape
    view = memory[1 : 1 + t.numel()].view(n, h, w, c).permute(0, 3, 1, 2)
    return view.copy_(t)


@conv_rows
def test_expanded_input(run: Runner, row: Row) -> None:
    """Stride 0 over the batch, over the channels and over the rows."""
    call = draw(row, Case(3, (8, 24), (12, 34), groups=4), IEEE.dtype)
    for x in (
        call.x[:1].expand(3, -1, -1, -1),
        call.x[:, :1].expand(-1, 8, -1, -1),
        call.x[:, :, :1].expand(-1, -1, 12, -1),
    ):
        expanded = Call(x, call.weight, call.bias, call.own, call.geometry)
        with poisoned():
            y = call_again(row, expanded)
        hold(y, row, expanded, IEEE, tuple(x.stride()))


@pytest.mark.sanitizer
@modes
@conv_rows
def test_weights_are_read_at_each_call(run: Runner, row: Row, mode: Mode) -> None:
    """A weight that changes in place, as an optimiser changes it, is no weight of the last call."""
    call = draw(row, Case(2, (5, 24), (12, 34), groups=4), mode.dtype, "cpu").map(lambda t: t.to("cuda"))
    run(row, call, mode)
    call.weight.mul_(-3)
    again = call_again(row, call, mode)
    assert same_bits(again, run(row, call, mode))
    hold(again.cpu(), row, call.map(torch.Tensor.cpu), mode, "the weights have changed")


@direct_only
@conv_rows
def test_the_default_is_exact(run: Runner, row: Row) -> None:
    """On the direct path; elsewhere it follows PyTorch's flags."""
    default = Mode("default", torch.float32, "default", IEEE.bound, IEEE.in_kernel)
    call = draw(row, Case(2, (40, 24), (21, 40), groups=4), IEEE.dtype)
    assert torch.backends.cudnn.allow_tf32
    assert same_bits(run(row, call, default), run(row, call, IEEE))


@direct_only
@conv_rows
def test_the_setting_is_read_when_run(run: Runner, row: Row) -> None:
    """A launch that was prepared under one setting is not run under another."""
    call = draw(row, Case(2, (8, 24), (21, 40), groups=4), IEEE.dtype)
    right = {mode.precision: run(row, call, mode) for mode in (IEEE, TF32)}
    for precision in ("ieee", "tf32", "ieee"):
        with torch.no_grad(), fusedconv.float32_precision(precision):
            y = row.conv_op(call.x, call.weight, call.bias, call.own)
        assert same_bits(y, right[precision])
    assert not same_bits(right["ieee"], right["tf32"])


@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        (torch.float64, {}),
        (torch.float32, {"stride": 2}),
        (torch.bfloat16, {"stride": (1, 2)}),
        (torch.float16, {"groups": 2}),
        (torch.float32, {"groups": 4, "stride": 2}),
    ],
)
@conv_rows
def test_two_steps_serve_the_rest(run: Runner, row: Row, dtype: torch.dtype, more: dict[str, Any]) -> None:
    call = draw(row, Case(2, (8, 24), (21, 40), padding=(1, 1), groups=4), dtype)
    weight = call.weight[:, : 8 // more.get("groups", 1)].contiguous()
    call = Call(call.x, weight, call.bias, call.own, call.geometry)
    mode = Mode("two-step", dtype, "ieee", BOUNDS[dtype], "")
    for layout in LAYOUTS.values():
        y = run(row, call, mode, layout=layout, path="two-step", **more)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            eager = row.plain_conv(call.x, weight, call.bias, call.own, **call.geometry, **more)
            exact = call.map(torch.Tensor.double)
            reference = row.plain_conv(exact.x, exact.weight, exact.bias, exact.own, **call.geometry, **more)
        assert_close(y, reference, eager, mode.bound, f"{row.conv} {dtype} {more}")


# ---- extreme sizes -------------------------------------------------------------------------------

# Kernels that lie far outside of their input: what is padded is many times as large as input and output.
FAR_OUTSIDE: tuple[tuple[int, int, dict[str, int]], ...] = (
    (3, 2, {"stride": 20000, "padding": 10000, "dilation": 20000}),
    (3, 2, {"padding": 10000, "dilation": 20000}),
    (8, 3, {"padding": 6000, "dilation": 6000}),
    (8, 3, {"stride": 3, "padding": 6000, "dilation": 6000}),
)


def by_cudnn(row: Row, call: Call) -> Tensor:
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return row.plain_conv(call.x, call.weight, call.bias, call.own, **call.geometry)


def peak_bytes(call: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """What a call gives, and the most memory that it took."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return call(), torch.cuda.max_memory_allocated() - before


@conv_rows
def test_memory_follows_from_input_and_output(run: Runner, row: Row) -> None:
    """And not from the padding: where that would be much, PyTorch's conv runs, and takes what it takes."""
    for size, kernel, far in FAR_OUTSIDE:
        case = Case(2, (3, 8), (size, size), (kernel, kernel), groups=2, pool=(1, 1))
        call = replace(draw(row, case, IEEE.dtype), geometry={name: (s, s) for name, s in far.items()})
        eager, most = peak_bytes(partial(by_cudnn, row, call))
        y, taken = peak_bytes(partial(run, row, call, IEEE, path=""))
        assert taken <= 2 * most + 2**24, f"{far}: {taken} bytes, eager {most}"
        assert_close(y, in_double(row, call), eager, IEEE.bound, f"{row.conv} {far}")


SIZES_THAT_WRAP = """
import torch
import fusedconv.functional as FF
from chains_table import ROWS

def said(call):
    try:
        return call().sum().item()
    except RuntimeError as error:
        return type(error).__name__

for in_size, kernel, right, geometry in (
    (1, 4, 0, {"stride": 2**30, "padding": 3 * 2**29, "dilation": 2**30}),
    (1, 2, 0, {"padding": 2**30, "dilation": 2**31 - 1}),
    (3, 1, 2 / 3, {"stride": 2**31 - 1, "padding": 2**31 - 1}),
):
    x = torch.ones(1, 1, in_size, in_size, device="cuda")
    weight = torch.ones(1, 1, kernel, kernel, device="cuda")
    ours = said(lambda: FF.conv2d_relu_hardswish(x, weight, **geometry))
    print(geometry, "ours:", ours, flush=True)
    eager = said(lambda: ROWS[0].plain_conv(x, weight, None, {}, **geometry))
    print("eager:", eager, flush=True)
    assert ours == eager or abs(ours - right) < 1e-6
print("passed")
"""


def test_sizes_that_wrap() -> None:
    """Strides, paddings and dilations up to 2^31 - 1: what is right, or what eager gives, an error perhaps."""
    printed = new_process(SIZES_THAT_WRAP, timeout=120)
    print(printed)
    assert "passed" in printed


def test_tensors_beyond_any_memory() -> None:
    """An expanded tensor may be as large as it likes: what it would take is said, or that it cannot be counted."""
    one = torch.ones(1, 1, 1, 1, device="cuda")
    for size in ((2**20, 2**10, 2**10, 2**10), (2**20, 2**20, 2**10, 2**12), (2, 2**31 - 1, 2**16, 2**14)):
        with pytest.raises(RuntimeError, match=r"Tried to allocate|too large"):
            torch.ops.fusedconv.group_norm_tanh_hardswish_logsumexp(one.expand(size), 1)


@pytest.fixture
def flags_of_old() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    if SET_PRECISION is not None:
        for key in (("generic", "all"), ("cuda", "all"), ("cuda", "matmul")):
            SET_PRECISION(*key, "none")
        for op in ("conv", "rnn"):
            SET_PRECISION("cuda", op, "tf32")


SET_PRECISION: Any = getattr(torch._C, "_set_fp32_precision_setter", None)


@pytest.mark.skipif(SET_PRECISION is None, reason="torch 2.9 brought these switches")
@pytest.mark.parametrize("with_cudnn", [True, False])
@pytest.mark.parametrize(
    "switch", [("cuda", "conv"), ("cuda", "matmul"), ("cuda", "all"), ("generic", "all")]
)
def test_no_switch_of_pytorch_reaches_an_exact_conv(
    switch: tuple[str, str], with_cudnn: bool, flags_of_old: None
) -> None:
    """Forward and backward, also where the switches of old cannot be read any more."""
    SET_PRECISION("cuda", "conv", "none")
    SET_PRECISION(*switch, "tf32")
    x, weight = torch.randn(4, 64, 33, 33, device="cuda"), torch.randn(64, 32, 3, 3, device="cuda")
    geometry = [1, 1], [1, 1], [1, 1], 2
    torch.backends.cudnn.enabled = with_cudnn
    try:
        y = convolution(x, weight, None, *geometry, precision="ieee")
        grads = convolution_backward(y, x, weight, *geometry, precision="ieee", mask=[True, True, False])
    finally:
        torch.backends.cudnn.enabled = True
    exact_x, exact_weight = (t.double().requires_grad_() for t in (x, weight))
    expected = torch.conv2d(exact_x, exact_weight, None, *geometry)
    right = torch.autograd.grad(expected, [exact_x, exact_weight], y.double())
    for ours, theirs in zip((y, *grads[:2]), (expected, *right), strict=True):
        assert ours is not None
        assert (ours.double() - theirs).norm() <= 3e-6 * theirs.norm()


# ---- the same bits -------------------------------------------------------------------------------

BIT_CASES = (
    Case(64, (8, 64), (128, 128), groups=16, pool=(4, 4)),
    Case(64, (3, 16), (37, 33), padding=(1, 1), groups=8),
    Case(64, (33, 70), (20, 75), (5, 3), (2, 1), groups=7, pool=(3, 3)),
)


@direct_only
@layouts
@modes
@conv_rows
def test_bits_for_any_run_batch_size_and_position(
    run: Runner, row: Row, mode: Mode, layout: torch.memory_format
) -> None:
    for case in BIT_CASES:
        call = draw(row, case, mode.dtype)
        y = run(row, call, mode, layout=layout)
        assert same_bits(run(row, call, mode, layout=layout), y), f"{case}: two runs differ"
        for batch in (1, 2, 5):
            for first in (0, 1, 31, 64 - batch):
                part = slice(first, first + batch)
                some = Call(call.x[part].clone(), call.weight, call.bias, call.own, call.geometry)
                assert same_bits(run(row, some, mode, layout=layout), y[part]), f"{case}: {part} differs"


@direct_only
@modes
@conv_rows
def test_bits_for_any_strides_and_address(run: Runner, row: Row, mode: Mode) -> None:
    """How pixels are read follows from strides; what is computed, and in which order, does not."""
    call = draw(row, Case(2, (8, 24), (12, 36), padding=(1, 1), groups=4), mode.dtype)
    right = run(row, call, mode)
    memory = torch.full((call.x.numel() + 1,), NAN, dtype=mode.dtype, device="cuda")
    unaligned = memory[1:].view(call.x.shape).copy_(call.x)
    cropped = torch.nn.functional.pad(call.x, [0, 1], value=NAN)[..., :-1]
    for x in (unaligned, cropped, call.x.contiguous(memory_format=torch.channels_last)):
        y = call_again(row, Call(x, call.weight, call.bias, call.own, call.geometry), mode)
        assert same_bits(y, right), x.stride()


@direct_only
@modes
@conv_rows
def test_bits_on_a_busy_card(run: Runner, row: Row, mode: Mode) -> None:
    """Blocks come in another order where other kernels hold some of the multiprocessors."""
    call = draw(row, BIT_CASES[0], mode.dtype)
    right = run(row, call, mode)
    other, a = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(other):
            for _ in range(10):
                a @ a
        assert same_bits(run(row, call, mode), right)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@layouts
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
def test_bits_of_the_chain_alone(row: Row, layout: torch.memory_format, dtype: torch.dtype) -> None:
    """The epilogue of the two-step path, for given tensors."""
    for channels, height, width in ((64, 30, 62), (12, 7, 9), (33, 65, 128)):
        own = on(draw_own(row, channels, generator(row.chain, "bits"), dtype=dtype))
        v = torch.randn(64, channels, height, width, device="cuda").to(dtype=dtype, memory_format=layout)
        with torch.no_grad(), poisoned():
            y = row.chain_op(v, own)
            assert same_bits(row.chain_op(v, own), y)
            for batch in (1, 2, 5):
                for first in (0, 1, 31, 64 - batch):
                    part = slice(first, first + batch)
                    assert same_bits(row.chain_op(v[part].clone(), own), y[part]), (channels, part)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@layouts
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
def test_small_calls_of_the_chain_alone(row: Row, layout: torch.memory_format, dtype: torch.dtype) -> None:
    """Against float64 on the CPU, for compute-sanitizer. The last two: clusters of blocks, and too large for them."""
    gen = generator(row.chain, layout, dtype)
    sizes = ((1, 9, 33), (24, 5, 17), (33, 12, 8), (200, 3, 31), (8, 72, 100), (2, 800, 640))
    for channels, height, width in sizes:
        own = draw_own(row, channels, gen, dtype=dtype)
        v = randn(gen, 2, channels, height, width).to(dtype=dtype, memory_format=layout)
        with torch.no_grad(), poisoned():
            y = row.chain_op(v.cuda(), on(own)).cpu()
        assert y.is_contiguous(memory_format=layout)
        # With channels last, PyTorch's norm on the CPU loses digits on large maps.
        reference = row.plain_chain(v.contiguous().double(), map_tensors(own, torch.Tensor.double))
        eager = row.plain_chain(v.contiguous(), own)
        assert_close(y, reference, eager, BOUNDS[dtype], f"{row.chain} {tuple(v.shape)}")


# ---- NaN and infinities --------------------------------------------------------------------------


def places(shape: torch.Size) -> list[tuple[int, ...]]:
    """In the middle sample: its centre, its corners, and the last column."""
    _, c, h, w = shape
    return [(1, c // 2, h // 2, w // 2), (1, 0, 0, 0), (1, c - 1, h - 1, w - 1), (1, 0, h // 2, w - 1)]


NOT_FINITE_CASES = (
    Case(3, (5, 12), (13, 140), padding=(1, 1), groups=4),
    Case(3, (8, 64), (30, 64), groups=16, pool=(4, 4)),
    Case(3, (1, 9), (14, 35), (5, 4), (2, 3), (2, 1), groups=3, pool=(3, 3)),
    Case(3, (17, 33), (9, 20), (2, 7), groups=11),
)


@direct_only
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@modes
@conv_rows
def test_row_10_one_value_of_the_input(run: Runner, row: Row, mode: Mode, value: float) -> None:
    """It spreads to its pixels, its group or its sample, as in PyTorch, and no tail or padding multiplies it."""
    for case in NOT_FINITE_CASES:
        call = draw(row, case, mode.dtype)
        for place in places(call.x.shape):
            x = call.x.clone()
            x[place] = value
            bad = Call(x, call.weight, call.bias, call.own, call.geometry)
            reference = in_double(row, bad)
            assert torch.isfinite(reference[::2]).all()
            for layout in LAYOUTS.values():
                as_pytorch(run(row, bad, mode, layout=layout), reference, mode)


@direct_only
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@modes
@conv_rows
def test_row_10_one_value_of_the_weight(run: Runner, row: Row, mode: Mode, value: float) -> None:
    """Without padding, whose product with infinity is NaN in one of PyTorch's convs and nothing in another."""
    for channels, kernel in (((5, 12), (3, 3)), ((8, 64), (3, 3)), ((1, 8), (5, 4)), ((17, 32), (2, 7))):
        call = draw(row, Case(2, channels, (13, 40), kernel, groups=4), mode.dtype)
        c_out, c_in, *sides = call.weight.shape
        for place in ((0, 0, 0, 0), (c_out - 1, c_in - 1, sides[0] - 1, sides[1] - 1), (c_out // 2, 0, 1, 2)):
            weight = call.weight.clone()
            weight[place] = value
            bad = Call(call.x, weight, call.bias, call.own, call.geometry)
            as_pytorch(run(row, bad, mode), in_double(row, bad), mode)


@direct_only
@modes
@conv_rows
def test_row_10_one_value_of_a_parameter(run: Runner, row: Row, mode: Mode) -> None:
    call = draw(row, Case(2, (5, 12), (13, 40), groups=4), mode.dtype)
    for value in (NAN, INF, -INF):
        assert call.bias is not None
        bias = call.bias.clone()
        bias[3] = value
        bad = Call(call.x, call.weight, bias, call.own, call.geometry)
        as_pytorch(run(row, bad, mode), in_double(row, bad), mode)
    for name in (name for name, own in call.own.items() if isinstance(own, Tensor)):
        own = map_tensors(call.own, torch.clone)
        own[name].view(-1)[3] = NAN
        bad = Call(call.x, call.weight, call.bias, own, call.geometry)
        as_pytorch(run(row, bad, mode), in_double(row, bad), mode)


def test_values_near_the_largest(run: Runner) -> None:
    """The scale of what stands near the largest float does not overflow."""
    call = draw(RELU_HARDSWISH, Case(2, (8, 32), (13, 40), has_bias=False), IEEE.dtype)
    large = Call(call.x.clamp(-3.4, 3.4) * 1e38, call.weight / 10, None, call.own, call.geometry)
    hold(run(RELU_HARDSWISH, large, IEEE), RELU_HARDSWISH, large, IEEE, "up to 3.4e38")


# ---- KernelBench's criterion ---------------------------------------------------------------------


@conv_rows
def test_kernel_bench(run: Runner, row: Row) -> None:
    """The reference workloads: five seeds, absolute and relative tolerance 1e-4 against exact eager."""
    for seed in range(5):
        torch.manual_seed(seed)
        fused, eager, one = reference_models(row)
        x = torch.rand(128, *one.shape[1:], device="cuda")
        with (
            torch.no_grad(),
            fusedconv.float32_precision("ieee"),
            torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        ):
            y, right = fused.cuda()(x), eager.cuda()(x)
        worst = float(((y - right).abs() - 1e-4 * right.abs()).max())
        assert torch.allclose(y, right, rtol=1e-4, atol=1e-4), f"seed {seed}: {worst:.1e} over the tolerance"


# ---- the other sources ---------------------------------------------------------------------------


def test_the_source_is_asked_for_by_name() -> None:
    """In capitals too; an empty name is none; a wrong one is reported at import."""
    assert new_process("import fusedconv; print('imported')", environment={"FUSEDCONV_CUDA_SOURCE": ""})
    code = """
        import logging, sys, torch
        import fusedconv.functional as FF
        logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
        x, weight = torch.ones(2, 8, 40, 40, device="cuda"), torch.ones(16, 8, 3, 3, device="cuda")
        FF.conv2d_relu_hardswish(x, weight)
    """
    assert "direct, sm_80" in new_process(code, environment={"FUSEDCONV_CUDA_SOURCE": "SM_80"})
    with pytest.raises(AssertionError, match=r"FUSEDCONV_CUDA_SOURCE is 'sm_81', not one of best"):
        new_process("import fusedconv", environment={"FUSEDCONV_CUDA_SOURCE": "sm_81"})


SOME_OF_THESE_TESTS = """
import sys
import pytest
chosen = "test_random_small_calls or test_row_10_one_value_of_the_input or test_bits_for_any_run"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1], "-k", chosen]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", ["sm_80", "none"])
def test_other_sources_in_a_new_process(source: str) -> None:
    """The source for older cards, and no source at all, on this card."""
    environment = {"FUSEDCONV_CUDA_SOURCE": source}
    printed = new_process(SOME_OF_THESE_TESTS, __file__, environment=environment, timeout=600)
    assert " passed" in printed
