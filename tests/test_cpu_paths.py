"""Where our own conv runs on the CPU, and where PyTorch's does: work and memory follow from input, weight and output."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusedconv
import fusedconv.functional as FF
from chains_table import BY_NAME, ROWS, Row
from child import Child
from cuda_conv import Call
from extremes import bounded, run
from fusedconv import _C
from helpers import failure, new_process

# Input, weight, stride, padding, dilation: strides and paddings whose products wrap, or that cost much more than input
# and output.
EXTREMES: dict[str, tuple[Any, ...]] = {
    "products of sizes wrap": ((1, 1, 1, 1), (1, 1, 4, 4), 2**30, 3 * 2**29, 2**30),
    "strides as long as the padding": ((1, 1, 3, 3), (1, 1, 2, 2), 20000, 10000, 20000),
    "many of such strides": ((1, 1, 3, 3), (1, 1, 2, 2), 1000, 4000, 1000),
    "mostly padding": ((1, 1, 8, 8), (1, 1, 3, 3), 1, 6000, 6000),
    "a few columns of long rows": ((4, 8, 128, 128), (32, 8, 3, 3), 1, 0, 60),
    "the largest steps": ((1, 2, 5, 5), (2, 2, 2, 2), 2**31 - 1, 2**31 - 1, 2**31 - 1),
}

# Each lost to eager by several times while our own conv ran it: few pixels a sample, many channels.
STALLS: dict[str, tuple[Any, ...]] = {
    "one pixel, 512 channels": ((64, 512, 1, 1), (512, 512, 1, 1), 1, 0, 1),
    "one pixel, a 3x3 kernel": ((4096, 8, 3, 3), (16, 8, 3, 3), 1, 0, 1),
    "one pixel, a few samples of 512 channels": ((2, 512, 1, 1), (128, 512, 1, 1), 1, 0, 1),
    "few pixels, 512 channels": ((8, 512, 5, 5), (128, 512, 1, 1), 1, 0, 1),
    "a stride as wide as the map": ((512, 16, 14, 14), (128, 16, 1, 1), 14, 0, 1),
}

# What our own conv is for.
DIRECT: dict[str, tuple[Any, ...]] = {
    "a reference workload": ((2, 8, 128, 128), (64, 8, 3, 3), 1, 0, 1),
    "a stem": ((1, 3, 224, 224), (64, 3, 7, 7), 2, 3, 1),
    "a small map": ((2, 8, 7, 7), (16, 8, 3, 3), 1, 1, 1),
    "a filter that reaches far": ((1, 4, 300, 300), (8, 4, 3, 3), 1, 100, 100),
    "a dilated map": ((1, 8, 64, 64), (8, 8, 3, 3), 1, 8, 8),
    "a wide row": ((1, 8, 1, 4096), (8, 8, 1, 3), 1, (0, 1), 1),
    "one pixel": ((1, 16, 1, 1), (16, 16, 3, 3), 1, 1, 1),
    "one pixel, 128 channels": ((1, 128, 1, 1), (16, 128, 3, 3), 1, 1, 1),
}

ISAS = ("baseline", "avx2", "avx512")
# Input, weight and the layout, of stride 1, and where PyTorch's conv is the faster one.
WIDTHS: dict[str, tuple[Any, ...]] = {
    "64 to 64 channels": ((1, 64, 28, 28), (64, 64, 1, 1), torch.contiguous_format, ()),
    "64 to 128 channels": ((1, 64, 28, 28), (128, 64, 1, 1), torch.contiguous_format, ISAS),
    "128 to 20 channels": ((1, 128, 28, 28), (20, 128, 1, 1), torch.contiguous_format, ISAS),
    "128 to 12 channels": ((1, 128, 28, 28), (12, 128, 1, 1), torch.contiguous_format, ISAS),
    "128 to 12 channels, 3x3": ((1, 128, 28, 28), (12, 128, 3, 3), torch.contiguous_format, ()),
    "128 to 12 channels, channels_last": ((1, 128, 8, 8), (12, 128, 3, 3), torch.channels_last, ISAS),
    "512 to 12 channels": ((1, 512, 28, 28), (12, 512, 3, 3), torch.contiguous_format, ISAS),
    "channels_last": ((1, 32, 56, 56), (32, 32, 3, 3), torch.channels_last, ISAS),
    "channels_last, 1x1": ((1, 12, 56, 56), (48, 12, 1, 1), torch.channels_last, ISAS),
    "channels_last, a smaller map": ((1, 16, 40, 40), (32, 16, 3, 3), torch.channels_last, ISAS[:2]),
    "channels_last, few values": ((1, 32, 14, 14), (32, 32, 3, 3), torch.channels_last, ()),
    "channels_last, few channels": ((1, 8, 56, 56), (32, 8, 3, 3), torch.channels_last, ()),
    "channels_last, few of many pixels": ((1, 8, 128, 128), (32, 8, 3, 3), torch.channels_last, ISAS[2:]),
    "one channel, in either layout": ((1, 1, 64, 64), (96, 1, 5, 5), torch.channels_last, ()),
}


def explained(
    call: tuple[Any, ...], dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format
) -> str:
    input, weight, stride, padding, dilation = call
    x, w = (torch.empty(size, dtype=dtype, memory_format=layout) for size in (input, weight))
    geometry = {"stride": stride, "padding": padding, "dilation": dilation}
    return fusedconv.explain(FF.conv2d_relu_hardswish, x, w, **geometry).path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("call", EXTREMES.values(), ids=EXTREMES)
def test_pytorch_runs_convs_of_extreme_geometry(call: tuple[Any, ...], dtype: torch.dtype) -> None:
    assert explained(call, dtype) == "two-step"


@pytest.mark.parametrize("call", STALLS.values(), ids=STALLS)
def test_pytorch_runs_convs_that_it_runs_faster(call: tuple[Any, ...]) -> None:
    assert explained(call, torch.float32) == "two-step"


@pytest.mark.parametrize("call", DIRECT.values(), ids=DIRECT)
def test_our_conv_runs_the_others(call: tuple[Any, ...]) -> None:
    assert explained(call, torch.float32) == "direct"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("call", WIDTHS.values(), ids=WIDTHS)
def test_width_decides(call: tuple[Any, ...], isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "cpu_isa", lambda: isa)
    (_, *sample), weight, layout, by_pytorch = call
    for batch in (1, 64):  # or a sample's bits would depend on it
        path = explained(((batch, *sample), weight, 1, 0, 1), torch.float32, layout)
        assert path == ("two-step" if isa in by_pytorch else "direct")


def test_few_pixels_of_many_samples_are_left_to_pytorch() -> None:
    """And of few samples are not: there the cost of a call is most of it."""
    for batch, path in ((1, "direct"), (512, "two-step")):
        assert explained(((batch, 16, 7, 7), (32, 16, 3, 3), 2, 1, 1), torch.float32) == path


def check_bounds(what: str) -> None:
    size, weight_size, stride, padding, dilation = EXTREMES[what]
    x, weight = torch.rand(size), torch.rand(weight_size)
    call = Call(x, weight, None, {}, {"stride": stride, "padding": padding, "dilation": dilation})
    row = BY_NAME["relu_hardswish"]
    expected = row.plain_conv(x, weight, None, {}, **call.geometry)
    ours = bounded(what, call, expected.numel(), lambda: run(row, call))
    torch.testing.assert_close(ours, expected)


def test_extreme_geometry_costs_no_more_than_its_sizes() -> None:
    """In a process of its own: it crashed, or took seconds and gigabytes."""
    child = Child(check_bounds)
    for what in EXTREMES:
        child.run(what)
    child.close()


def test_memory_that_cannot_be_had_is_an_error_that_says_how_much() -> None:
    size = (1, 2**43, 4, 4)  # without memory: its strides are 0
    x, weight = torch.zeros(1, dtype=torch.float64).expand(size), torch.zeros(1, dtype=torch.float64)
    kind, text = failure(lambda: FF.conv2d_relu_hardswish(x, weight.expand(1, 2**43, 1, 1)))
    assert kind is RuntimeError
    assert text == f"fusedconv: cannot allocate {2**43 * 4 * 8} bytes of working memory"


# Maps without memory, and a pool as large as its map.
TOO_LARGE = """
import torch
import fusedconv.functional as FF


def pooled(dtype, *size):
    x = torch.ones((), dtype=dtype).expand(1, 1, *size)
    FF.group_norm_scale_max_pool_clamp(x, 1, None, None, 1e-5, torch.ones(()), size)
    weight = torch.ones(1, 1, 1, 1, dtype=dtype)
    FF.conv2d_group_norm_scale_max_pool_clamp(x, weight, None, 1, None, None, 1e-5, torch.ones(()), size)


def summed(*size):
    FF.group_norm_tanh_hardswish_logsumexp(torch.ones(()).expand(1, *size), 1)


for call, *arguments in (
    (pooled, torch.float32, 2**32, 2**30),
    (pooled, torch.float32, 2**61, 1),
    (pooled, torch.float32, 1, 2**62),
    (pooled, torch.float64, 2**31, 2**30),
    (pooled, torch.float64, 2**61, 1),
    (summed, 2**62, 1, 1),
    (summed, 2**58, 1, 8),
):
    try:
        call(*arguments)
    except RuntimeError as error:
        assert "fusedconv: a size is too large: " in str(error), error
    else:
        raise AssertionError(arguments)
"""


def test_sizes_whose_products_no_number_holds() -> None:
    """In a process of its own: a product wrapped to zero, and dividing by it ended the process."""
    new_process(TOO_LARGE)


MANY_THREADS = """
import torch
import fusedconv.functional as FF

torch.set_num_threads(8)
x = torch.zeros(2**16, dtype=torch.float64).expand(2, 2**15, 2**30, 2**16)
weight = torch.zeros(1, dtype=torch.float64).expand(128, 2**15, 2, 1)
try:
    FF.conv2d_relu_hardswish(x, weight, dilation=(2**30 - 1, 1))
except RuntimeError as error:
    assert "fusedconv: a size is too large: 8 * " in str(error), error
"""


def test_memory_of_many_threads_that_no_number_holds() -> None:
    """In a process of its own: it crashed."""
    new_process(MANY_THREADS)


# malloc fills its memory with 3.4e38 here (glibc's `perturb`): a lane that computes with it overflows, and a flag tells.
OLD_MEMORY = """
import ctypes, sys
import torch
from chains_table import BY_NAME, draw_own, generator
from fusedconv import _C

torch.set_num_threads(1)
libm = ctypes.CDLL("libm.so.6")
OVERFLOW = 8  # x86's
row = BY_NAME[sys.argv[1]]
gen = generator(0)


def check(what, call):
    for _ in range(2):
        libm.feclearexcept(OVERFLOW)
        call()
        assert not libm.fetestexcept(OVERFLOW), what


def check_with_gradients(what, op, x):
    with torch.no_grad():
        check(what, lambda: op(x))
    y = op(x.requires_grad_())
    grad = torch.randn(y.shape, generator=gen).to(y.dtype)
    check(f"backward of {what}", lambda: torch.autograd.grad(op(x), x, grad))


for layout in (torch.contiguous_format, torch.channels_last):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for size, channels, kernel, geometry in (
            ((1, 28, 1, 1), 112, 1, {}),
            ((1, 4, 4, 4), 8, 3, {"padding": 1}),
            ((1, 16, 7, 7), 32, 3, {"padding": 1, "stride": 2}),
            ((2, 4, 33, 17), 8, 3, {}),
            ((2, 4, 33, 17), 8, 3, {"padding": 1}),
            ((1, 8, 64, 64), 16, 3, {"padding": 1}),
        ):
            x = torch.randn(size, generator=gen).to(dtype).contiguous(memory_format=layout)
            pool = {"pool_size": (1, 1) if size[2] == 1 else (2, 2)}
            own = draw_own(row, size[1], gen, dtype=dtype, **pool)
            what = f"{layout} {dtype} {size}"
            chain = lambda x: row.chain_op(x, own)
            if dtype is torch.bfloat16 or size[2] < 7:  # PyTorch's idle lanes, in backward and its conv, are its own
                check(what, lambda: chain(x))
            else:
                check_with_gradients(what, chain, x.clone())
            if not row.module or dtype is torch.bfloat16:
                continue
            weight = torch.randn(channels, size[1], kernel, kernel, generator=gen).to(dtype) / 8
            own = draw_own(row, channels, gen, dtype=dtype, **pool)
            op = lambda x: row.conv_op(x, weight, None, own, **geometry)
            if dtype is torch.float32 and size[1] == 4 and size[2] > 4 and _C.cpu_isa() != "baseline":
                check_with_gradients(f"{what} -> {channels}", op, x.clone())  # the conv's too are ours
            else:
                check(f"{what} -> {channels}", lambda: op(x))
print("untouched")
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64", reason="glibc on x86"
)
@pytest.mark.parametrize("isa", _C.cpu_isas())
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
def test_no_lane_computes_with_what_stood_in_memory(row: Row, isa: str) -> None:
    """Idle lanes hurt nobody's values, but those of integers and pointers are denormal numbers: a stall by chance."""
    environment = {
        "GLIBC_TUNABLES": "glibc.malloc.perturb=128:glibc.malloc.tcache_count=0",
        "FUSEDCONV_CPU_ISA": isa,
    }
    assert "untouched" in new_process(OLD_MEMORY, row.chain, environment=environment)


# ---- sums of large terms ----


def error(y: Tensor, reference: Tensor) -> float:
    return float(torch.linalg.vector_norm(y.double() - reference) / torch.linalg.vector_norm(reference))


def silu_of_norm(v: Tensor) -> Tensor:
    """A group a channel: the norm shows what of a channel's values is not their mean."""
    return F.silu(F.group_norm(v, v.shape[1]))


@pytest.mark.parametrize(("channels", "kernel"), [(56, 3), (14, 6), (8, 3), (20, 5)])
def test_a_large_bias_costs_no_digits(channels: int, kernel: int) -> None:
    """No more than rounding v does, once: products are not rounded to the bias's last place one by one."""
    x = 0.01 * torch.randn(2, channels, 40, 40)
    weight = torch.randn(16, channels, kernel, kernel) / (channels * kernel * kernel) ** 0.5
    bias = torch.randn(16)
    v = F.conv2d(x.double(), weight.double(), bias.double())
    reference = silu_of_norm(v)
    rounded = error(silu_of_norm(v.float().double()), reference)
    assert error(FF.conv2d_group_norm_silu(x, weight, bias, 16), reference) < 1.5 * rounded


@pytest.mark.parametrize(("channels", "kernel"), [(56, 3), (14, 6), (20, 5)])
def test_a_large_mean_costs_fewer_digits_than_one_long_sum(channels: int, kernel: int) -> None:
    """Each product is rounded to the last place of what the sum has become: sums of few are added up."""
    x = 1000 + torch.randn(2, channels, 40, 40)
    weight = torch.randn(16, channels, kernel, kernel) / (channels * kernel * kernel) ** 0.5
    reference = silu_of_norm(F.conv2d(x.double(), weight.double()))
    one_by_one = torch.zeros(())
    for products in (F.unfold(x, kernel).unsqueeze(1) * weight.flatten(1).unsqueeze(-1)).unbind(2):
        one_by_one = one_by_one + products
    side = 41 - kernel
    allowed = error(silu_of_norm(one_by_one.view(2, 16, side, side)), reference)
    ours = error(FF.conv2d_group_norm_silu(x, weight, None, 16), reference)
    eager = error(silu_of_norm(F.conv2d(x, weight)), reference)
    assert ours < min(0.7 * allowed, 2 * eager)
