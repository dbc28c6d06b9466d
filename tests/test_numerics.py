"""Every chain against float64: dtypes, layouts, tails, conv geometry, scales and means, unwritten memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from chains_table import CONV_ROWS, OF_STAGES, ROWS, Row, draw_own, generator, map_tensors, randn
from helpers import BOUNDS, SIZES, assert_close, check_chain, check_conv, double, new_process, same_bits

all_rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
conv_rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
formats = pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"]
)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=lambda d: str(d).split(".")[1]
)


def conv_inputs(
    gen: torch.Generator,
    batch: int,
    channels: tuple[int, int],
    size: tuple[int, int],
    kernel: tuple[int, int] = (3, 3),
    *,
    dtype: torch.dtype = torch.float32,
    layout: torch.memory_format = torch.contiguous_format,
    conv_groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """A fresh random input, weight and conv bias. The weight keeps the conv's output near one."""
    x = randn(gen, batch, channels[0], *size).to(dtype=dtype, memory_format=layout)
    fan_in = channels[0] // conv_groups * kernel[0] * kernel[1]
    weight = (randn(gen, channels[1], channels[0] // conv_groups, *kernel) / fan_in**0.5).to(dtype)
    return x, weight, (randn(gen, channels[1]) / 2).to(dtype)


@dtypes
@formats
@conv_rows
def test_row_1_conv_in_each_dtype_and_layout(
    row: Row, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    """The output comes in the input's layout."""
    gen = generator(row.chain, layout, dtype)
    for size in ((11, 37), (18, 18)):
        x, weight, bias = conv_inputs(gen, 2, (5, 24), size, dtype=dtype, layout=layout)
        y = check_conv(row, x, weight, bias, draw_own(row, 24, gen, dtype=dtype))
        assert y.is_contiguous(memory_format=layout)


@dtypes
@formats
@all_rows
def test_row_1_chain_in_each_dtype_and_layout(
    row: Row, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    gen = generator(row.chain, layout, dtype)
    for channels, height, width in ((24, 7, 21), (6, 16, 16)):
        v = randn(gen, 3, channels, height, width).to(dtype=dtype, memory_format=layout)
        y = check_chain(row, v, draw_own(row, channels, gen, dtype=dtype))
        assert y.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@all_rows
def test_half_precision_input_with_float32_parameters(row: Row, dtype: torch.dtype) -> None:
    gen = generator(row.chain, dtype, "mixed")
    own = draw_own(row, 12, gen, dtype=torch.float32)
    check_chain(row, randn(gen, 2, 12, 9, 10).to(dtype), own)
    if row.module:
        check_conv(row, *conv_inputs(gen, 2, (5, 12), (9, 10), dtype=dtype), own)


@formats
@conv_rows
def test_row_5_channel_and_width_tails_of_the_conv(row: Row, layout: torch.memory_format) -> None:
    """Every size meets every role (input channels, output channels, width of the output) and two others."""
    gen = generator(row.chain, layout, "tails")
    for i, size in enumerate(SIZES):
        inner, outer = SIZES[(i * 5 + 3) % len(SIZES)], SIZES[(i * 7 + 5) % len(SIZES)]
        for dtype in (torch.float32, torch.float64):
            for c_in, c_out, width in ((size, inner, outer), (outer, size, inner), (inner, outer, size)):
                pool = min(2, width)
                x, weight, bias = conv_inputs(
                    gen, 2, (c_in, c_out), (6, width + 2), dtype=dtype, layout=layout
                )
                check_conv(row, x, weight, bias, draw_own(row, c_out, gen, dtype=dtype, pool_size=pool))


@formats
@all_rows
def test_row_5_channel_and_width_tails_of_the_chain(row: Row, layout: torch.memory_format) -> None:
    gen = generator(row.chain, layout, "tails")
    for channels in SIZES:
        for i, width in enumerate(SIZES):
            dtype = (torch.float32, torch.float64, torch.bfloat16, torch.float16)[i % 4]
            v = randn(gen, 2, channels, 5, width).to(dtype=dtype, memory_format=layout)
            check_chain(row, v, draw_own(row, channels, gen, dtype=dtype, pool_size=min(3, width)))


GEOMETRIES: tuple[tuple[tuple[int, int], dict[str, Any]], ...] = (
    ((1, 1), {}),
    ((1, 1), {"stride": 2}),
    ((2, 3), {"stride": (1, 2), "padding": (1, 0)}),
    ((3, 1), {"padding": (2, 3), "dilation": (2, 1)}),
    ((3, 3), {"padding": 1}),
    ((3, 3), {"padding": 3, "dilation": 3}),
    ((3, 3), {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)}),
    ((3, 3), {"stride": 5, "padding": 4}),
    ((5, 4), {"stride": 3, "padding": (4, 1)}),
    ((7, 7), {"stride": 2, "padding": 3}),
    ((1, 9), {"padding": (0, 4)}),
)


@pytest.mark.parametrize(("kernel", "conv"), GEOMETRIES, ids=str)
@conv_rows
def test_conv_geometry(row: Row, kernel: tuple[int, int], conv: dict[str, Any]) -> None:
    gen = generator(row.chain, kernel, conv)
    for layout in (torch.contiguous_format, torch.channels_last):
        for dtype in (torch.float32, torch.float64):
            x, weight, bias = conv_inputs(gen, 2, (3, 10), (13, 22), kernel, dtype=dtype, layout=layout)
            check_conv(row, x, weight, bias, draw_own(row, 10, gen, dtype=dtype), **conv)


@pytest.mark.parametrize("conv_groups", [2, 6])
@conv_rows
def test_conv_groups(row: Row, conv_groups: int) -> None:
    """`groups` are the conv's and `num_groups` the norm's."""
    gen = generator(row.chain, conv_groups)
    x, weight, bias = conv_inputs(gen, 2, (6, 12), (9, 10), conv_groups=conv_groups)
    check_conv(row, x, weight, bias, draw_own(row, 12, gen, groups=3), groups=conv_groups, padding=1)


@conv_rows
def test_larger_maps_with_many_channels(row: Row) -> None:
    """More rows, channels and input channels than any tile holds, and several samples for each thread."""
    gen = generator(row.chain, "large")
    shapes = ((65, 72, (19, 67)), (8, 64, (71, 130)), (200, 33, (10, 12)), (1030, 1026, (6, 7)))
    for c_in, c_out, size in shapes:
        x, weight, bias = conv_inputs(gen, 3, (c_in, c_out), size)
        check_conv(row, x, weight, bias, draw_own(row, c_out, gen, pool_size=4))


@pytest.mark.parametrize("factor", [1.0, 3.0, 0.01, -1.0])
@conv_rows
def test_scaled_inputs(row: Row, factor: float) -> None:
    """Fresh inputs and parameters each time: no constant folded into a kernel would survive."""
    for seed in range(3):
        gen = generator(row.chain, factor, seed)
        x, weight, bias = conv_inputs(gen, 2, (8, 16), (20, 21))
        check_conv(row, x * factor, weight, bias, draw_own(row, 16, gen))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("row", [row for row in ROWS if row.has_norm], ids=lambda row: row.chain)
def test_row_8_large_mean_and_small_deviation(row: Row, layout: torch.memory_format) -> None:
    """`E[x^2] - E[x]^2` in float32 has no right digit here."""
    gen = generator(row.chain, "mean")
    v = 100 + 0.01 * randn(gen, 2, 8, 40, 50)
    if row.chain.startswith(
        "bias_scale_sigmoid"
    ):  # the sigmoid comes first: a mean large against its deviation
        v = 6 + 0.01 * randn(gen, 2, 8, 40, 50)
        own = draw_own(row, 8, gen, groups=4, bias=torch.zeros(8, 1, 1), scale=torch.ones(8, 1, 1))
    else:
        own = draw_own(row, 8, gen, groups=8)
    with torch.no_grad():
        y = row.chain_op(v.contiguous(memory_format=layout), own)
        reference, eager = row.plain_chain(v.double(), double(own)), row.plain_chain(v, own)
    assert_close(y, reference, eager, BOUNDS[torch.float32], row.chain)


@pytest.mark.parametrize("row", [row for row in ROWS if row.has_norm], ids=lambda row: row.chain)
def test_row_8_first_rows_unlike_the_rest(row: Row) -> None:
    """The statistics take a shift from the first rows: they may lie anywhere."""
    gen = generator(row.chain, "first rows")
    far = torch.zeros(40, 1)
    far[:3] = 1
    gradient = torch.linspace(-1, 1, 40).view(40, 1)
    for size in (1e-2, 1.0, 30.0):
        for shape in (far, 1 - far, gradient):
            v = 0.1 * randn(gen, 2, 8, 40, 50) + size * shape
            check_chain(row, v, draw_own(row, 8, gen, groups=4))


def test_row_8_deviation_after_a_group_norm_of_mean_100() -> None:
    """Mean 100 and deviation 0.01 must give 0.95. A pool of one and no clamp show the norm itself."""
    v = 100 + 0.01 * randn(generator("0.95"), 2, 4, 64, 64)
    ones, zeros = torch.ones(4), torch.zeros(4)
    y = torch.ops.fusedconv.group_norm_scale_max_pool_clamp(
        v, 4, ones, zeros, 1e-5, ones.view(4, 1, 1), [1, 1]
    )
    assert abs(float(y.std()) - 0.953) < 0.01
    assert abs(float(y.mean())) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.has_norm], ids=lambda row: row.chain)
def test_row_8_group_of_four_million_elements(row: Row) -> None:
    gen = generator(row.chain, "4M")
    v = torch.rand(1, 4, 1024, 1024, generator=gen) + 2
    check_chain(row, v, draw_own(row, 4, gen, groups=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@all_rows
def test_row_9_sums_and_squares_beyond_half(row: Row, dtype: torch.dtype) -> None:
    """Values of 300: a square leaves float16's range, and so does a sum of a few hundred of them."""
    gen = generator(row.chain, dtype, "overflow")
    v = (300 + 40 * randn(gen, 2, 8, 24, 24)).to(dtype)
    own = draw_own(row, 8, gen, dtype=dtype)
    if "scale" in own and row.chain.startswith("bias"):
        own["scale"] = own["scale"] / 100  # where the sigmoid is not saturated
    check_chain(row, v, own)


@all_rows
def test_large_outputs_in_fresh_and_in_used_memory(row: Row) -> None:
    """From 16 MiB on the output is written another way where its pages have been used before.

    That is so from the second or third call on: the allocator keeps blocks of this size.
    """
    gen = generator(row.chain, "large")
    v = randn(gen, 1, 6, 847, 1021)
    own = draw_own(row, 6, gen) | ({"pool_size": [1, 1]} if "pool_size" in draw_own(row, 6, gen) else {})
    for _ in range(4):
        check_chain(row, v, own)


@formats
@all_rows
def test_every_element_is_written(row: Row, layout: torch.memory_format) -> None:
    """In deterministic mode `torch.empty` hands out NaN: an element that no kernel writes shows."""
    gen = generator(row.chain, "poison")
    torch.use_deterministic_algorithms(True)
    for channels, height, width in ((1, 1, 2), (7, 5, 9), (16, 8, 8), (33, 3, 17)):
        v = randn(gen, 2, channels, height, width).contiguous(memory_format=layout)
        own = draw_own(row, channels, gen, pool_size=min(2, height))
        assert torch.isfinite(row.chain_op(v, own)).all()
        if row.module:
            weight = randn(gen, channels, channels, 3, 3)
            assert torch.isfinite(row.conv_op(v, weight, None, own, padding=1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@formats
@conv_rows
def test_a_sample_does_not_depend_on_its_batch(
    row: Row, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    """Bit for bit the same alone, in any batch and at any place in it, and the same in a second run."""
    gen = generator(row.chain, "batch", layout)
    for c_in, c_out, size in ((3, 16, (19, 23)), (8, 33, (12, 40))):
        x, weight, bias = conv_inputs(gen, 5, (c_in, c_out), size, dtype=dtype, layout=layout)
        own = draw_own(row, c_out, gen, dtype=dtype)
        y = row.conv_op(x, weight, bias, own)
        assert same_bits(y, row.conv_op(x, weight, bias, own))
        for i in (0, 2, 4):
            assert same_bits(y[i : i + 1], row.conv_op(x[i : i + 1], weight, bias, own))
        order = torch.tensor([3, 1, 4, 0, 2, 2, 1])
        assert same_bits(y[order], row.conv_op(x[order].contiguous(memory_format=layout), weight, bias, own))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@all_rows
def test_a_sample_of_the_chain_does_not_depend_on_its_batch(row: Row, dtype: torch.dtype) -> None:
    gen = generator(row.chain, "batch")
    v, own = randn(gen, 5, 12, 9, 11).to(dtype), draw_own(row, 12, gen, dtype=dtype)
    y = row.chain_op(v, own)
    assert same_bits(y, row.chain_op(v, own))
    for i in range(5):
        assert same_bits(y[i : i + 1], row.chain_op(v[i : i + 1], own))


@all_rows
def test_what_was_prepared_for_one_call_serves_no_other(row: Row) -> None:
    """Calls that differ in one number, layout or dtype only, twice over: nothing of one may serve another."""
    gen = generator(row.chain, "prepared")
    v, x = randn(gen, 2, 12, 8, 8), randn(gen, 2, 12, 9, 9)
    weight, bias = randn(gen, 12, 12, 2, 2) / 7, randn(gen, 12)
    base = draw_own(row, 12, gen)
    changes: list[dict[str, Any]] = [
        {},
        {"eps": 0.5},
        {"num_groups": 2},
        {"pool_size": [1, 4]},
        {"clamp_min": None},
    ]
    changes += [{"clamp_max": 0.1}, {"norm_weight": None}, {"norm_bias": None}, {"scale": randn(gen, 1)}]
    changes += [
        {name: randn(gen, 24)[::2].view(t.shape)} for name, t in base.items() if isinstance(t, Tensor)
    ]
    for change in [change for change in changes if change.keys() <= base.keys()] * 2:
        own = base | change
        for layout in (torch.contiguous_format, torch.channels_last):
            check_chain(row, v.contiguous(memory_format=layout), own)
            check_chain(row, v.bfloat16().contiguous(memory_format=layout), own)
            check_chain(row, v.transpose(2, 3), own)
            if row.module:
                check_conv(row, x.contiguous(memory_format=layout), weight, bias, own)
                check_conv(row, x, weight.contiguous(memory_format=layout), None, own, dilation=2)
                check_conv(row, x, weight.transpose(2, 3), randn(gen, 24)[::2], own, stride=(2, 1))


@all_rows
def test_nothing_is_kept_alive(row: Row) -> None:
    """Inputs, parameters and outputs are freed when the caller lets go of them."""
    gen = generator(row.chain, "alive")
    own = draw_own(row, 8, gen)
    tensors = [randn(gen, 2, 8, 6, 6), *(t for t in own.values() if isinstance(t, Tensor))]
    y = row.chain_op(tensors[0], own)
    if row.module:
        tensors.append(randn(gen, 8, 8, 3, 3))
        tensors.append(row.conv_op(tensors[0], tensors[-1], None, own))
    watched = [weakref.ref(t) for t in (*tensors, y)]
    del tensors, own, y
    gc.collect()
    assert [t() for t in watched if t() is not None] == []


@conv_rows
def test_conv_without_bias_and_norm_without_affine(row: Row) -> None:
    gen = generator(row.chain, "none")
    x, weight, _ = conv_inputs(gen, 2, (4, 12), (10, 9))
    check_conv(row, x, weight, None, draw_own(row, 12, gen))
    own = draw_own(row, 12, gen, norm_weight=None, norm_bias=None)
    check_conv(row, x, weight, None, own)
    own = draw_own(row, 12, gen, norm_bias=None)
    check_conv(row, x, weight, None, own)


@pytest.mark.parametrize("row", [row for row in ROWS if row.has_pool], ids=lambda row: row.chain)
def test_pool_sizes(row: Row) -> None:
    """Row 12: windows that do not divide the map, not square ones, one, and the whole map."""
    gen = generator(row.chain, "pool")
    for pool in (1, 2, 3, 4, 5, 7, (1, 3), (4, 1), (2, 5), (11, 13)):
        for layout in (torch.contiguous_format, torch.channels_last):
            v = randn(gen, 2, 9, 11, 13).contiguous(memory_format=layout)
            size = list(pool) if isinstance(pool, tuple) else [pool, pool]
            check_chain(row, v, draw_own(row, 9, gen, pool_size=size))
            x, weight, bias = conv_inputs(gen, 2, (2, 9), (11, 13), layout=layout)
            check_conv(row, x, weight, bias, draw_own(row, 9, gen, pool_size=size), padding=1)


@pytest.mark.parametrize("row", [row for row in ROWS if row.has_pool], ids=lambda row: row.chain)
def test_pool_windows_as_large_as_the_map(row: Row) -> None:
    """Larger than any tile; and a window that leaves a part of the map over in one direction only."""
    gen = generator(row.chain, "whole")
    for size in ((1, 1), (9, 2), (64, 65), (1, 3001), (700, 3)):
        for layout in (torch.contiguous_format, torch.channels_last):
            v = randn(gen, 2, 6, *size).contiguous(memory_format=layout)
            x, weight, bias = conv_inputs(gen, 2, (3, 6), size, layout=layout)
            for pool in (size, (size[0], 1), (size[0] // 2 + 1, size[1])):
                own = draw_own(row, 6, gen, groups=3, pool_size=list(pool), clamp_min=None, clamp_max=None)
                check_chain(row, v, own)
                check_conv(row, x, weight, bias, own, padding=1)


@all_rows
def test_output_dtype(row: Row) -> None:
    """It may be the unfused chain's own dtype, which changes nothing, or float32, which rounds less."""
    gen = generator(row.chain, "output")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        v, own = randn(gen, 2, 8, 9, 10, dtype=dtype), draw_own(row, 8, gen, dtype=dtype)
        y = row.chain_op(v, own)
        assert same_bits(row.chain_op(v, own, output_dtype=dtype), y)
        for wrong in {torch.bfloat16, torch.float16, torch.int32, torch.complex64} - {dtype}:
            with pytest.raises(RuntimeError, match="output_dtype"):
                row.chain_op(v, own, output_dtype=wrong)
        if dtype == torch.float64:
            continue
        with pytest.raises(RuntimeError, match="output_dtype"):
            row.chain_op(v, own, output_dtype=torch.float64)
        wide = row.chain_op(v, own, output_dtype=torch.float32)
        assert wide.dtype == torch.float32
        assert same_bits(wide.to(dtype), y)
        reference = row.plain_chain(v.double(), double(own))
        eager = row.plain_chain(v.float(), map_tensors(own, torch.Tensor.float))
        assert_close(wide, reference, eager, BOUNDS[torch.float32], f"{row.chain} {dtype}")
        assert row.chain_op(v.to("meta"), map_tensors(own, lambda t: t.to("meta")),
                            output_dtype=torch.float32).dtype == torch.float32  # fmt: skip
        leaf = v.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(row.chain_op(leaf, own, output_dtype=torch.float32).sum(), leaf)
        assert gradient.dtype == dtype


@pytest.mark.parametrize("row", [row for row in ROWS if "scale" in row.arguments], ids=lambda row: row.chain)
def test_scale_and_bias_of_one_element(row: Row) -> None:
    """KernelBench's shapes [C, 1, 1], and what broadcasts like them: one value, [1, C, 1, 1], [1]."""
    gen = generator(row.chain, "broadcast")
    v = randn(gen, 2, 6, 8, 9)
    for shape in ((1, 1, 1), (1,), (), (6, 1, 1), (1, 6, 1, 1)):
        own = draw_own(row, 6, gen)
        own |= {name: randn(gen, *shape) for name in OF_STAGES if name in own}
        check_chain(row, v, own)


# ---- PyTorch's own switches ----------------------------------------------------------------------

SWITCHES = """
import sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from fusedconv._conv import convolution, convolution_backward


class Asked(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "convolution" in func.__name__ or "bmm" in func.__name__:
            seen.append((func.__name__.partition(".")[0], args[0].dtype))
        return func(*args, **(kwargs or {}))


def turn(on):
    if switch != "none":
        backend, _, op = switch.partition(".")
        torch._C._set_fp32_precision_setter(backend, op, "bf16" if on else "none")


switch = sys.argv[1]
if switch == "legacy":
    torch.set_float32_matmul_precision("medium")
else:
    turn(on=True)
reaches = switch not in ("legacy", "mkldnn.matmul")  # oneDNN's convs
for groups in (1, 2):
    x, weight, bias = torch.randn(2, 6, 9, 9), torch.randn(8, 6 // groups, 3, 3), torch.randn(8)
    geometry = [1, 1], [1, 1], [1, 1], groups
    exact = torch.conv2d(x.double(), weight.double(), bias.double(), *geometry)
    for precision in ("ieee", "default", None):
        for dtype in (torch.float32, torch.float64, torch.float16):
            seen = []
            with Asked():
                leaves = x.to(dtype), weight.to(dtype)
                y = convolution(*leaves, bias.to(dtype), *geometry, precision=precision)
                grads = convolution_backward(y, *leaves, *geometry, precision=precision, mask=[True, True, True])
            asked = {d for name, d in seen}
            if precision == "ieee" and dtype is torch.float32 and reaches:
                assert asked == {torch.float64}, seen
                assert (y - exact).norm() < 1e-7 * exact.norm()
            elif dtype is torch.float16:  # what we widen is nobody's to round
                assert not reaches or torch.float32 not in asked, seen
            else:
                assert asked == {dtype} and all("convolution" in name for name, _ in seen), seen
print("right")
"""
SWITCH_NAMES = ("legacy", "none", "generic.all", "mkldnn.all", "mkldnn.conv", "mkldnn.matmul")


@pytest.mark.parametrize("switch", SWITCH_NAMES)
def test_no_switch_of_pytorch_reaches_an_exact_conv(switch: str) -> None:
    """Not every machine rounds when it is told to, so what is asked of PyTorch is looked at."""
    if switch not in ("legacy", "none") and not hasattr(torch._C, "_set_fp32_precision_setter"):
        pytest.skip("torch 2.9 brought this switch")
    environment = {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"} if switch == "none" else None
    assert new_process(SWITCHES, switch, environment=environment).strip() == "right"
