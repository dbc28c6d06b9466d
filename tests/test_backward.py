"""The kernels of backward: gradients of each chain against float64, kinks, ties, bits, and what is computed."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusedconv
from chains_table import (
    BY_NAME,
    CONV_ROWS,
    OF_STAGES,
    ROWS,
    Own,
    Row,
    draw_own,
    generator,
    map_tensors,
    modules,
    randn,
)
from cuda_conv import forget
from fusedconv import _C, _backward, _conv, _register
from gradients import check_gradients, gradients
from helpers import GRADIENT_BOUNDS, SIZES, Planned, failure, new_process, on, profile, same_bits

all_rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
conv_rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
norm_rows = pytest.mark.parametrize("row", [row for row in ROWS if row.has_norm], ids=lambda row: row.chain)
formats = pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"]
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
WIDTHS = sorted({*SIZES, *range(1, 10), 32, 63, 64, 65})
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
# On the CPU half precision is the reference's.
dtypes_of_devices = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.float64),
        *[
            pytest.param("cuda", dtype, marks=pytest.mark.cuda)
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        ],
    ],
)


@pytest.fixture(autouse=True)
def _kernels_on_small_maps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FUSEDCONV_CPU_PATH", "direct")
    forget()
    yield
    forget()


@dtypes_of_devices
@formats
@all_rows
def test_gradients_of_odd_sizes(
    row: Row, layout: torch.memory_format, device: str, dtype: torch.dtype
) -> None:
    """No tail, a tail of one, of all but one; gammas, scales and inputs of either sign."""
    gen = generator(row.chain, "sizes", dtype)
    for size in WIDTHS:
        own = on(draw_own(row, 6, gen, dtype=dtype, pool_size=min(2, size)), device)
        v = randn(gen, 2, 6, 5, size).to(device, dtype).contiguous(memory_format=layout)
        check_gradients(row, v, own, seed=size)


@devices
@norm_rows
def test_gradients_of_groups_of_one_channel(row: Row, device: str) -> None:
    """Only v's: those of bias and scale are nearly zero, with nothing but rounding left."""
    gen = generator(row.chain, "groups")
    for channels in SIZES:
        own = on(draw_own(row, channels, gen, groups=channels), device)
        v = randn(gen, 2, channels, 9, 11).to(device)
        direction = randn(gen, *row.plain_chain(v, own).shape)
        ours = gradients(row.chain_op, v, own, direction)["v"].double()
        right = gradients(row.plain_chain, v.double(), map_tensors(own, Tensor.double), direction)["v"]
        assert float((ours - right).norm()) <= GRADIENT_BOUNDS[v.dtype] * float(right.norm())


@devices
@pytest.mark.parametrize("factor", [1, 3, 0.01, -1])
@all_rows
def test_gradients_of_scaled_inputs(row: Row, factor: float, device: str) -> None:
    """Several runs of the sums of a plane, of 2,048 pixels at the most, and several blocks of logsumexp."""
    gen = generator(row.chain, "scaled")
    own = on(draw_own(row, 12, gen), device)
    check_gradients(row, factor * randn(gen, 3, 12, 57, 79).to(device), own)


@devices
@norm_rows
def test_gradients_survive_a_large_mean(row: Row, device: str) -> None:
    """The two sums of each group are of normed values: mean 100 and deviation 0.01 cost no digits, as they do eager."""
    gen = generator(row.chain, "mean")
    v = (100 + 0.01 * randn(gen, 2, 8, 40, 51)).to(device)
    own = on(draw_own(row, 8, gen, groups=4), device)
    if "bias" in own:  # otherwise the sigmoid is one everywhere
        own |= {"bias": torch.full((8, 1, 1), -100.0, device=device), "scale": 100 * own["scale"]}
    # A logsumexp adds values of 100, whose own digits are few.
    check_gradients(row, v, own, as_eager="logsumexp" in row.chain)


@devices
@norm_rows
def test_gradients_without_affine_parameters(row: Row, device: str) -> None:
    gen = generator(row.chain, "none")
    own = on(draw_own(row, 6, gen, norm_weight=None, norm_bias=None), device)
    check_gradients(row, randn(gen, 2, 6, 9, 11).to(device), own)


ONE_FOR_ALL = [(row, name) for row in ROWS for name in OF_STAGES if name in row.arguments]


@devices
@pytest.mark.parametrize(
    ("row", "name"), ONE_FOR_ALL, ids=[f"{row.chain}-{name}" for row, name in ONE_FOR_ALL]
)
def test_gradient_of_one_value_for_all_channels(row: Row, name: str, device: str) -> None:
    """It gets the sum of what the channels' own values get."""
    gen = generator(row.chain, "one")
    v, value = randn(gen, 2, 6, 9, 11).to(device), randn(gen, 1).to(device)
    own = on(draw_own(row, 6, gen), device) | {name: value.expand(6).reshape(6, 1, 1)}
    direction = randn(gen, *row.plain_chain(v, own).shape)
    expected = gradients(row.chain_op, v, own, direction)
    for shape in ((), (1,), (1, 1, 1)):
        ours = gradients(row.chain_op, v, own | {name: value.reshape(shape)}, direction)
        assert torch.equal(ours[name], expected[name].sum().reshape(shape))
        assert all(same_bits(ours[other], expected[other]) for other in ours if other != name)


@devices
@all_rows
def test_gradients_of_views(row: Row, device: str) -> None:
    """A v with steps in it, and an output gradient of stride 0."""
    gen = generator(row.chain, "views")
    own = on(draw_own(row, 6, gen), device)
    v = randn(gen, 11, 6, 9, 4).to(device).permute(3, 1, 2, 0)[..., ::2]
    check_gradients(row, v, own)
    direction = torch.ones(()).expand(row.plain_chain(v, own).shape)
    ours = gradients(row.chain_op, v, own, direction)
    plain = gradients(row.plain_chain, v.contiguous(), own, direction)
    for name, right in plain.items():
        torch.testing.assert_close(ours[name], right, rtol=1e-4, atol=1e-4)


# ---- kinks, ties, special values ----


def assert_same(ours: dict[str, Tensor], plain: dict[str, Tensor], rtol: float = 1e-6) -> None:
    for name, right in plain.items():
        torch.testing.assert_close(ours[name], right, rtol=rtol, atol=1e-6, equal_nan=True)


@devices
@dtypes
def test_kinks_of_relu_and_hardswish(dtype: torch.dtype, device: str) -> None:
    """As PyTorch at 0, at 3 and beside them; NaN and infinity too."""
    three = torch.tensor(3.0, dtype=dtype)
    beside = [float(torch.nextafter(three, torch.tensor(way, dtype=dtype))) for way in (0.0, 6.0)]
    values = [0.0, -0.0, 1e-30, -1e-30, 3.0, *beside, -3.0, -4.0, 1.0, 1e30, math.inf, -math.inf, math.nan]
    v = torch.tensor(values, dtype=dtype, device=device).reshape(1, 1, 2, 7)
    row = BY_NAME["relu_hardswish"]
    for direction in (torch.ones_like(v), -2 * torch.ones_like(v), torch.zeros_like(v)):
        ours = gradients(row.chain_op, v, {}, direction)
        assert_same(ours, gradients(row.plain_chain, v, {}, direction))
    assert gradients(row.chain_op, v, {}, torch.ones_like(v))["v"].flatten()[4] == 1.5


@devices
@dtypes
@pytest.mark.parametrize(
    "bounds",
    [(-1.0, 1.0), (-1.0, None), (None, 1.0), (None, None), (1.0, -1.0), (1.0, 1.0), (math.nan, 1.0)],
)
def test_kinks_of_clamp(bounds: tuple[float | None, float | None], dtype: torch.dtype, device: str) -> None:
    """A weight of 0 leaves the norm's bias, which stands on the bounds, beside them and on NaN."""
    row = BY_NAME["group_norm_scale_max_pool_clamp"]
    ends = [-1.0, 1.0, 0.0, math.nextafter(1.0, 2), math.nextafter(-1.0, -2), 1.5, -1.5, math.inf, math.nan]
    norm_bias = torch.tensor(ends, dtype=dtype, device=device)
    own: Own = {
        "num_groups": 3,
        "norm_weight": torch.zeros(9, dtype=dtype, device=device),
        "norm_bias": norm_bias,
        "eps": 1e-5,
        "scale": torch.ones(9, 1, 1, dtype=dtype, device=device),
        "pool_size": [2, 2],
        "clamp_min": bounds[0],
        "clamp_max": bounds[1],
    }
    v = randn(generator("clamp"), 2, 9, 4, 6, dtype=dtype).to(device)
    direction = randn(generator("direction"), 2, 9, 2, 3, dtype=dtype)
    ours = gradients(row.chain_op, v, own, direction)
    assert_same(ours, gradients(row.plain_chain, v, own, direction), rtol=1e-5)


@devices
@dtypes
@pytest.mark.parametrize("pool", [(2, 2), (3, 2), (2, 5), (4, 4), (1, 3), (9, 11)])
def test_ties_in_pools_go_to_the_first(pool: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Of few different values nearly every window has equal maxima, or equal minima where the factor is negative."""
    row = BY_NAME["group_norm_scale_max_pool_clamp"]
    gen = generator("ties", pool)
    v = torch.randint(0, 3, (2, 8, 9, 11), generator=gen).to(device, dtype)
    own = on(draw_own(row, 8, gen, dtype=dtype, pool_size=pool, clamp_min=None, clamp_max=None), device)
    check_gradients(row, v, own)


@pytest.mark.parametrize("size", [(2**24 + 4, 1), (1, 2**24 + 4)])
def test_a_window_with_more_rows_or_columns_than_float32_counts(size: tuple[int, int]) -> None:
    row = BY_NAME["group_norm_scale_max_pool_clamp"]
    own = draw_own(row, 1, generator("long"), groups=1, pool_size=size, clamp_min=None, clamp_max=None)
    own["norm_weight"], own["scale"] = torch.ones(1), torch.ones(())
    v = torch.zeros(1, 1, *size)
    v.view(-1)[2**24 + 1] = 1.0
    v.requires_grad_()
    (gradient,) = torch.autograd.grad(row.chain_op(v, own).sum(), v)
    assert int(gradient.abs().argmax()) == 2**24 + 1


@devices
def test_gradients_are_laid_out_like_empty_like(device: str) -> None:
    """Channels of a wider tensor: a gradient of its own has no gaps, and is not copied for them. The input may be."""
    row = BY_NAME["group_norm_silu"]
    v = randn(generator("gaps"), 2, 9, 20, 20).to(device)[:, :6].requires_grad_()
    own = on(draw_own(row, 6, generator("gaps own"), groups=2), device)
    y = row.chain_op(v, own)
    grad = torch.ones_like(y)
    assert torch.autograd.grad(y, v, grad, retain_graph=True)[0].stride() == torch.empty_like(v).stride()
    ran = profile(lambda: torch.autograd.grad(y, v, grad))
    assert ran.operators.count("aten::copy_") <= 1


@devices
def test_the_last_nan_of_a_window_gets_the_gradient(device: str) -> None:
    """As in PyTorch. Only the gradients of weight and scale tell: all else is NaN."""
    row = BY_NAME["group_norm_scale_max_pool_clamp"]
    gen = generator("nan")
    own = on(draw_own(row, 8, gen, pool_size=(3, 4), clamp_min=None, clamp_max=None), device)
    own["norm_bias"][::2] = math.nan
    v = randn(gen, 2, 8, 9, 13).to(device)
    direction = randn(gen, 2, 8, 3, 3)
    ours = gradients(row.chain_op, v, own, direction)
    plain = gradients(row.plain_chain, v, own, direction)
    assert torch.isfinite(plain["norm_weight"]).all()
    assert_same(ours, plain, rtol=1e-5)


@devices
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@all_rows
def test_special_values_stay_in_their_group(row: Row, value: float, device: str) -> None:
    """NaN where PyTorch has NaN, and nowhere else."""
    gen = generator(row.chain, "special")
    own = on(draw_own(row, 6, gen, groups=3), device)
    v = randn(gen, 3, 6, 5, 7).to(device)
    v[1, 2, 3, 4] = value
    direction = randn(gen, *row.plain_chain(v, own).shape)
    ours = gradients(row.chain_op, v, own, direction)
    plain = gradients(row.plain_chain, v, own, direction)
    assert_same(ours, plain, rtol=1e-4)
    assert torch.isfinite(ours["v"][0]).all()


@devices
def test_logsumexp_weighs_values_far_apart(device: str) -> None:
    """1e4 apart: the weights are 1 and 0, without overflow."""
    row = BY_NAME["group_norm_tanh_hardswish_logsumexp"]
    gen = generator("apart")
    v = (1e4 * randn(gen, 2, 6, 5, 7)).to(device)
    check_gradients(row, v, on(draw_own(row, 6, gen), device))


# ---- bits ----


@all_rows
def test_same_bits_for_any_number_of_threads_and_in_each_run(row: Row) -> None:
    gen = generator(row.chain, "threads")
    own = draw_own(row, 12, gen)
    v = randn(gen, 3, 12, 61, 83)
    direction = randn(gen, *row.plain_chain(v, own).shape)
    runs = []
    for threads in (1, 2, 3, *[2] * 10):
        torch.set_num_threads(threads)
        runs.append(gradients(row.chain_op, v, own, direction))
    for run in runs[1:]:
        assert all(same_bits(run[name], runs[0][name]) for name in run)


@devices
@all_rows
def test_a_sample_has_the_same_bits_in_any_batch(row: Row, device: str) -> None:
    gen = generator(row.chain, "batch")
    own = on(draw_own(row, 12, gen), device)
    v = randn(gen, 5, 12, 61, 83).to(device)
    direction = randn(gen, *row.plain_chain(v, own).shape)
    together = gradients(row.chain_op, v, own, direction)["v"]
    for i in range(5):
        alone = gradients(row.chain_op, v[i : i + 1], own, direction[i : i + 1])["v"]
        assert same_bits(alone[0], together[i])


LEVELS = """
import sys
import torch
from chains_table import ROWS, draw_own, generator, randn
from fusedconv import _C
from helpers import SIZES
from gradients import check_gradients

assert _C.cpu_isa() == sys.argv[1], _C.cpu_isa()
for row in ROWS:
    gen = generator(row.chain, "isa")
    for size in SIZES:
        for dtype in (torch.float32, torch.float64):
            own = draw_own(row, 6, gen, dtype=dtype, pool_size=min(2, size))
            check_gradients(row, randn(gen, 2, 6, 7, size, dtype=dtype), own, seed=size)
print("right")
"""


@pytest.mark.parametrize("level", _C.cpu_isas())
def test_each_instruction_set_is_right(level: str) -> None:
    assert "right" in new_process(LEVELS, level, environment={"FUSEDCONV_CPU_ISA": level})


# ---- what is computed ----


class Calls:
    """Notes what the kernel and the conv's backward are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chain: list[set[str]] = []
        self.conv: list[list[bool]] = []
        prepared_convolution_backward, chain = _conv.prepared_convolution_backward, self.chain

        class Backward(_C.Backward):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                *_, gradients, wants_v = args
                self.asked = {*gradients, "v"} if wants_v else {*gradients}

            def on_cpu(self, *args: Any) -> None:
                chain.append(self.asked)
                super().on_cpu(*args)

        def prepare_conv(*example: Any) -> Any:
            conv_backward = prepared_convolution_backward(*example)

            def run_conv(grad: Tensor, args: Any, mask: Any) -> Any:
                self.conv.append(list(mask))
                return conv_backward(grad, args, mask)

            return run_conv

        monkeypatch.setattr(_C, "Backward", Backward)
        monkeypatch.setattr(_backward, "prepared_convolution_backward", prepare_conv)
        forget()


@dtypes
@conv_rows
def test_only_the_gradients_that_are_asked_for_are_computed(
    row: Row, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By our kernel alone in float32; in float64 PyTorch's gradients of the conv follow."""
    gen = generator(row.chain, "asked")
    own = draw_own(row, 4, gen, dtype=dtype, groups=2)
    conv = {"input": randn(gen, 2, 3, 7, 8), "weight": randn(gen, 4, 3, 3, 3), "conv_bias": randn(gen, 4)}
    conv = {name: t.to(dtype) for name, t in conv.items()}
    tensors = [*conv, *[name for name, value in own.items() if isinstance(value, Tensor)]]
    calls = Calls(monkeypatch)
    for chosen in tensors:
        values = map_tensors(conv | own, torch.clone)
        values[chosen].requires_grad_()
        x, weight, conv_bias = (values[name] for name in conv)
        y = row.conv_op(x, weight, conv_bias, {name: values[name] for name in own})
        y.sum().backward()
        by_pytorch = chosen in conv and dtype is torch.float64
        through_v = {"v"} if chosen in conv else set()
        assert calls.chain.pop() == through_v | (set() if by_pytorch else {chosen})
        assert calls.conv == ([[name == chosen for name in conv]] if by_pytorch else [])
        calls.conv.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@all_rows
def test_the_kernel_runs_where_it_serves(
    row: Row, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without PyTorch's chain; in bfloat16 the reference runs."""
    gen = generator(row.chain, "serves")
    own = draw_own(row, 4, gen, dtype=dtype, groups=2)
    v = randn(gen, 2, 4, 6, 8).to(dtype).requires_grad_()
    y = row.chain_op(v, own)
    grad = torch.ones_like(y)
    calls = Calls(monkeypatch)
    ran = profile(lambda: torch.autograd.grad(y, v, grad))
    served = dtype != torch.bfloat16
    assert calls.chain == ([{"v"}] if served else [])
    assert served != any(
        "group_norm" in name or "sigmoid" in name or "relu" in name for name in ran.computing
    )


@conv_rows
def test_channels_last_training_matches_nchw(row: Row) -> None:
    fused, _ = modules(row, padding=1)
    x = randn(generator("layout"), 2, 3, 17, 19)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        leaf = x.contiguous(memory_format=layout).requires_grad_()
        found = torch.autograd.grad(fused(leaf).square().sum(), [leaf, *fused.parameters()])
        assert found[0].is_contiguous(memory_format=layout)
        results.append(found)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@all_rows
def test_a_freed_tensor_is_an_error_in_backward_too(row: Row) -> None:
    """A null pointer would mean that the argument is absent, or end the process."""
    own = draw_own(row, 4, generator(row.chain, "freed"), groups=2)
    for name in ("input", *[name for name, value in own.items() if isinstance(value, Tensor)]):
        values = map_tensors(own, torch.clone)
        v = torch.zeros(1, 4, 4, 4, requires_grad=True) * 1
        y = row.chain_op(v, values)
        (v if name == "input" else values[name]).untyped_storage().resize_(0)
        kind, text = failure(y.sum().backward)
        assert kind is RuntimeError
        assert f"{name} has no memory" in text


@conv_rows
def test_a_freed_tensor_is_an_error_where_pytorch_runs_the_conv(row: Row) -> None:
    """It would read what is not there."""
    gen = generator(row.chain, "freed for PyTorch")
    own = draw_own(row, 4, gen, groups=2)
    x, weight, bias = torch.zeros(1, 2, 9, 9), torch.zeros(4, 1, 3, 3), torch.zeros(4)
    tensors = {"input": x, "weight": weight, "conv_bias": bias, **own}
    for name in (name for name, value in tensors.items() if isinstance(value, Tensor)):
        values = map_tensors(tensors, torch.clone)
        leaf = values["input"].requires_grad_()
        mine = {n: values[n] for n in own}
        y = row.conv_op(leaf, values["weight"], values["conv_bias"], mine, groups=2)
        values[name].data.untyped_storage().resize_(0)
        kind, text = failure(y.sum().backward)
        assert kind is RuntimeError
        assert f"{name} has no memory" in text


@conv_rows
def test_who_computes_a_conv_is_asked_once(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a signature, in either direction, where no flag has a say."""
    choose, asked = _conv.choose, []

    def counted(*args: Any) -> Any:
        asked.append(args[4:])
        return choose(*args)

    monkeypatch.setattr(_conv, "choose", counted)
    forget()
    gen = generator(row.chain, "asked once")
    own = draw_own(row, 4, gen, groups=2)
    x, weight = randn(gen, 1, 2, 9, 9).requires_grad_(), randn(gen, 4, 1, 3, 3).requires_grad_()
    for _ in range(2):
        torch.autograd.grad(row.conv_op(x, weight, None, own, groups=2).sum(), [x, weight])
        assert len(asked) == 4  # v's twice, then the gradients'
    with fusedconv.float32_precision("ieee"):
        torch.autograd.grad(row.conv_op(x, weight, None, own, groups=2).sum(), [x, weight])
    assert len(asked) > 8
    forget()


def test_what_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps of few pixels, and bounds that the kernel takes for none: NaN passes them in one way and not in the other."""
    calls = Calls(monkeypatch).chain
    monkeypatch.delenv("FUSEDCONV_CPU_PATH")
    row = BY_NAME["group_norm_scale_max_pool_clamp"]
    for size, bounds, expected in (
        (6, (None, 0.5), 1),
        (5, (None, 0.5), 0),
        (6, (-math.inf, math.inf), 0),
    ):
        calls.clear()
        own = draw_own(row, 4, generator(size), pool_size=2, clamp_min=bounds[0], clamp_max=bounds[1])
        own["norm_bias"][0] = math.nan if expected == 0 else 0.0
        v = randn(generator(size, "v"), 1, 4, size, size, dtype=torch.float32)
        direction = torch.ones(row.plain_chain(v, own).shape)
        ours, plain = (gradients(run, v, own, direction) for run in (row.chain_op, row.plain_chain))
        assert len(calls) == expected
        for name, right in plain.items():
            torch.testing.assert_close(ours[name], right, equal_nan=True)


# ---- CUDA, as far as a CPU can tell --------------------------------------------------------------


def statistics_of(name: str, args: Sequence[Any]) -> Tensor | None:
    """What forward would keep of a call."""
    recorded = _register.OPERATORS[name].with_statistics
    return None if recorded is None else recorded.op(*args)[1]


def tensor_at(address: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """The contiguous tensor that a kernel would find there."""
    count = math.prod(shape)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


class OnCuda(_C.Backward):
    """In place of the extension's: the chain by its CPU kernel, all of it by autograd on what the pointers show."""

    row: ClassVar[Row]
    serves: ClassVar[bool]
    own: ClassVar[Own]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _, self.tensors, self.v, self.conv, _, _, self.gradients, self.wants_v = args

    def prepare_cuda(self, device: int) -> Any:
        return Planned("direct" if self.conv is None or self.serves else "two-step", "emulated")

    def on_cuda(self, pointers: Any, gradients: Any, grad_v: int, workspace: int, stream: int) -> None:
        if self.conv is None:
            self.on_cpu(pointers, gradients, grad_v, 2)
            return
        assert grad_v == 0
        (_, size, _), (weight, stride, padding, dilation, *_) = self.conv
        channels = self.v[1][1]
        at = dict(zip([name for name, _ in self.tensors], pointers, strict=True))
        shapes = {"input": size, "weight": weight[1]}
        values = {
            name: tensor_at(address, torch.float32, *shapes.get(name, (channels,)))
            for name, address in at.items()
            if name not in ("grad", "statistics")
        }
        flat = values["weight"].flatten()
        values["weight"] = flat.as_strided(weight[1], weight[2])  # in any layout, as in forward
        values = {name: value.clone().requires_grad_() for name, value in values.items()}
        own = dict(self.own)
        for name in own:
            if name in values:
                shape = (channels, 1, 1) if name in OF_STAGES else (channels,)
                own[name] = values[name].view(shape)
        geometry: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
        bias = values.get("conv_bias")
        # PyTorch's channels_last backward of group_norm ends the process where only its parameters' gradients are wanted.
        v = F.conv2d(values["input"], values["weight"], bias, **geometry).contiguous()
        y = self.row.plain_chain(v, own)
        grad = tensor_at(at["grad"], torch.float32, *y.shape)
        found = torch.autograd.grad(y, [values[name] for name in self.gradients], grad)
        for name, address, right in zip(self.gradients, gradients, found, strict=True):
            tensor_at(address, torch.float32, *values[name].shape).copy_(right)


def without_mask(find: Any, grad: Tensor, args: Sequence[Any], precision: str) -> Any:
    return find(grad, args[:-1])


@pytest.mark.parametrize("serves", [True, False], ids=["whole", "two-step"])
@formats
@conv_rows
def test_what_cuda_is_asked_for(
    row: Row,
    layout: torch.memory_format,
    serves: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Pointers, names and forms belong together, whatever is wanted, and results have the arguments' look."""
    caplog.set_level("DEBUG", logger="fusedconv")
    gen = generator(row.chain, "emulated")
    own = draw_own(row, 4, gen, groups=2)
    x, weight = randn(gen, 2, 3, 7, 8).contiguous(memory_format=layout), randn(gen, 4, 3, 3, 3) / 5
    values = {"x": x, "weight": weight.contiguous(memory_format=layout), "conv_bias": randn(gen, 4)}
    names = [*values, *[name for name, value in own.items() if isinstance(value, Tensor)]]
    monkeypatch.setattr(
        _C, "Backward", type("Emulated", (OnCuda,), {"row": row, "serves": serves, "own": own})
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    backward = _register.OPERATORS[row.conv].backward
    monkeypatch.setattr(backward.kernels.launcher, "conv_on_cuda", lambda *args: None)  # so v is PyTorch's
    pairs: dict[str, Any] = {"stride": (1, 1), "padding": (1, 0), "dilation": (1, 1)}
    given = *values.values(), *own.values(), *pairs.values(), 1
    args = *given, statistics_of(row.conv, given)
    leaves = [(values | own)[name].double().requires_grad_() for name in names]
    named = dict(zip(names, leaves, strict=True))
    y = row.plain_conv(
        named["x"], named["weight"], named["conv_bias"], own | {n: named[n] for n in names[3:]}, **pairs
    )
    grad = randn(gen, *y.shape)
    expected = [right.float() for right in torch.autograd.grad(y, leaves, grad.double())]
    masks = [[True] * len(names), *[[i == j for j in range(len(names))] for i in range(len(names))]]
    for mask in masks:
        caplog.clear()
        find = backward.kernels.prepare_cuda(grad, given, mask, "tf32")
        path = "direct" if serves else "two-step"
        assert caplog.messages == [f"{row.conv} backward [2, 3, 7, 8] float32 tf32: {path}, emulated"]
        for _ in range(2):
            found = backward.run(partial(without_mask, find), grad, (*args, mask), "tf32")
            for wants, got, right, leaf in zip(mask, found, expected, leaves, strict=True):
                if wants:
                    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
                    assert got.stride() == torch.empty_like(leaf).stride()
                else:
                    assert got.numel() == 0


@conv_rows
def test_cuda_tells_where_no_kernel_serves(row: Row, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="fusedconv")
    own = draw_own(row, 4, generator(row.chain, "told"), groups=2)
    x, weight = torch.ones(2, 3, 7, 8), torch.ones(4, 3, 3, 3)
    given = x, weight, None, *own.values(), (1, 1), (0, 0), (1, 1), 1
    backward = _register.OPERATORS[row.conv].backward
    grad = torch.ones(row.plain_conv(x, weight, None, own).shape, dtype=torch.float64)
    backward.kernels.prepare_cuda(grad, given, [True] * len(backward.operator.tensors), "ieee")
    words = f"{row.conv} backward [2, 3, 7, 8] float32 ieee: plain, a gradient of another dtype"
    assert caplog.messages == [words]


@all_rows
def test_the_cpu_tells_who_finds_a_given_tensors_gradients(
    row: Row, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("FUSEDCONV_CPU_PATH")
    caplog.set_level("DEBUG", logger="fusedconv")
    for size, words in ((6, "chain"), (5, "plain, 25 pixels")):
        caplog.clear()
        v = randn(generator(size), 1, 4, size, size).requires_grad_()
        row.chain_op(v, draw_own(row, 4, generator(size), groups=2)).sum().backward()
        assert caplog.messages == [f"{row.chain} backward [1, 4, {size}, {size}] float32: {words}"]


@all_rows
def test_a_gradient_of_another_shape_is_an_error(row: Row) -> None:
    """The kernels trust its size."""
    own = draw_own(row, 4, generator(row.chain, "shape"), groups=2)
    backward = _register.OPERATORS[row.chain].backward
    v = torch.zeros(1, 4, 4, 4)
    mask = [True] * len(backward.operator.tensors)
    statistics = statistics_of(row.chain, (v, *own.values()))
    kind, text = failure(lambda: backward.op(torch.ones(1, 1, 1, 1), v, *own.values(), statistics, mask))
    assert kind is RuntimeError
    assert "grad must have shape" in text
