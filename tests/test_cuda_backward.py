"""Backward of a conv with its chain on CUDA: numerics, bits, what runs, streams, graphs, autocast, compilers.

What holds on the CPU too, of the chain alone: test_backward.py. Gradients of every order: test_autograd.py.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedconv
from chains_table import BY_NAME, CONV_ROWS, ROWS, Row, draw_own, generator, module_input, modules, randn
from chains_table import reference_models as models_of_reference
from cuda_conv import (
    IEEE,
    LAYOUTS,
    MODES,
    SAME,
    TF32,
    VALUES,
    Call,
    Case,
    Mode,
    Runner,
    cases,
    complaint,
    draw,
    forget,
    in_double,
)  # fmt: skip
from gradients import (
    CONV_BOUNDS,
    as_tf32_takes_it,
    check_conv_gradients,
    check_gradients,
    conv_gradients,
    gradients,
    hold_gradients,
    named,
    plain_gradients,
    smooth_direction,
)
from helpers import GRADIENT_BOUNDS, new_process, on, profile, relative_error, same_bits

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("source")]
all_rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
conv_rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
modes = pytest.mark.parametrize("mode", MODES, ids=str)
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
direct_only = pytest.mark.usefixtures("direct_path")
# Of the conv's output: backward in packed rows, and in strips.
widths = pytest.mark.parametrize("width", [39, 70])

SIDES = (3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70)
GRADIENT_VALUES: dict[str, Sequence[Any]] = VALUES | {
    "batch": (1, 2, 3, 4, 5),
    "c_in": (1, 3, 8, 9, 16),
    "c_out": (4, 16, 17, 32, 64, 72),
    "height": SIDES,
    "width": (*SIDES, 126),
    "kernel": ((1, 1), (3, 3), (3, 3), (5, 5), (2, 2), (4, 4), (7, 7), (1, 7), (3, 5), (5, 2)),
    "padding": ((0, 0), (1, 1), (2, 2), (0, 3), (3, 1), SAME),
    "dilation": ((1, 1),),
}

# Where a strip ends, and the next one's columns; of rows, where a segment does.
STRIP_VALUES = GRADIENT_VALUES | {
    "batch": (1, 2, 3),
    "c_in": (1, 2, 3, 5, 7, 8),
    "c_out": (4, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64),
    "height": (1, 2, 3, 4, 5, 15, 16, 17, 18, 31, 33, 64, 130),
    "width": (64, 65, 95, 126, 127, 128, 129, 130, 131, 200, 253, 254, 255, 256, 257, 300),
    "kernel": ((3, 3),),
}


def in_groups_of_several(case: Case) -> Case:
    """In groups of one channel a norm takes away what the conv's bias adds: of its gradient only rounding is left."""
    c_out = case.channels[1]
    return replace(case, groups=max(g for g in range(1, c_out) if c_out % g == 0 and g <= case.groups))


def check_all(
    row: Row, mode: Mode, layout: torch.memory_format, which: Sequence[Case], device: str = "cuda"
) -> None:
    """Each of the calls, and then an error that names all that went wrong. References are computed on ``device``."""
    said = []
    for case in map(in_groups_of_several, which):
        call = draw(row, case, mode.dtype, device)
        said.append(complaint(partial(check_conv_gradients, row, call, mode, layout=layout, what=case)))  # type: ignore[arg-type]
    wrong = [text for text in said if text]
    assert not wrong, f"{len(wrong)} of {len(said)} calls are wrong\n" + "\n".join(wrong)


# ---- numerics ------------------------------------------------------------------------------------


@layouts
@modes
@conv_rows
def test_random_calls(row: Row, mode: Mode, layout: torch.memory_format) -> None:
    """Tails of channels and of both sides, kernels, padding, windows, groups."""
    check_all(row, mode, layout, [*cases(row, mode, layout, "gradients", count=18, values=GRADIENT_VALUES)])


@layouts
@modes
@conv_rows
def test_strips(row: Row, mode: Mode, layout: torch.memory_format) -> None:
    check_all(row, mode, layout, [*cases(row, mode, layout, "strips", count=16, values=STRIP_VALUES)])


@modes
@conv_rows
def test_large_means_and_biases(row: Row, mode: Mode) -> None:
    """Of the input and of the conv, in packed rows and in strips: sums over pixels and products keep their digits."""
    for channels in ((8, 32), (24, 16)):
        case = Case(2, channels, (20, 78), groups=channels[1] // 2)
        call = draw(row, case, mode.dtype)
        assert call.bias is not None
        large_bias = replace(call, x=(0.01 * call.x).to(mode.dtype), bias=4 * call.bias)
        check_conv_gradients(row, large_bias, mode, what=f"{case}, a large bias")
        if mode is IEEE:  # elsewhere rounded gradients, times the mean, leave no digit of the weight's
            large_mean = replace(call, x=1000 + call.x, bias=None)
            # five times eager's error (docs/numerics.md): tensor cores cut off sums, and halves have 22 bits
            check_conv_gradients(row, large_mean, mode, what=f"{case}, a mean of 1000", times=2.5)


@pytest.mark.sanitizer
@modes
@conv_rows
def test_small_strips(row: Row, mode: Mode) -> None:
    values = STRIP_VALUES | {"c_out": (4, 17, 33, 64), "height": (1, 2, 5, 18)}
    which = cases(row, mode, "small strips", count=3, most=2**15, values=values)
    check_all(row, mode, torch.contiguous_format, [*which], device="cpu")


@pytest.mark.sanitizer
@layouts
@modes
@conv_rows
def test_random_small_calls(row: Row, mode: Mode, layout: torch.memory_format) -> None:
    which = cases(row, mode, layout, "small gradients", count=2, most=2**13, values=GRADIENT_VALUES)
    check_all(row, mode, layout, [*which], device="cpu")


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@all_rows
def test_small_chains(row: Row, dtype: torch.dtype) -> None:
    """Samples of each schedule: few pixels of many channels, many pixels, groups of one channel. Odd starts too."""
    gen = generator(row.chain, dtype, "small chains")
    for channels, groups, height, width in ((24, 3, 5, 5), (4, 4, 33, 35), (6, 2, 64, 65)):
        own = on(draw_own(row, channels, gen, dtype=dtype, groups=groups))
        check_gradients(row, randn(gen, 2, channels, height, width).to("cuda", dtype), own)


@widths
@pytest.mark.parametrize("factor", [1, 3, 0.01, -1])
@modes
@conv_rows
def test_scaled_inputs(row: Row, mode: Mode, factor: float, width: int) -> None:
    call = draw(row, Case(2, (8, 32), (37, width), padding=(1, 1), groups=8), mode.dtype)
    scaled = Call(call.x * factor, call.weight, call.bias, call.own, call.geometry)
    check_conv_gradients(row, scaled, mode)


@widths
@conv_rows
def test_a_large_mean(row: Row, width: int) -> None:
    call = draw(row, Case(2, (8, 32), (37, width), groups=8), IEEE.dtype)
    check_conv_gradients(row, Call(call.x + 100, call.weight, call.bias, call.own, call.geometry), IEEE)


@widths
@modes
@conv_rows
def test_one_gradient_at_a_time(row: Row, mode: Mode, width: int) -> None:
    """Each alone, and all but one, as where a weight is frozen."""
    call = draw(row, Case(3, (8, 32), (21, width), padding=(1, 1), groups=8), mode.dtype)
    names = [*named(call)]
    for wanted in [*[{name} for name in names], *[{*names} - {name} for name in names]]:
        assert check_conv_gradients(row, call, mode, wanted=wanted, what=wanted).keys() == wanted


@widths
@modes
@conv_rows
def test_without_conv_bias_and_affine_parameters(row: Row, mode: Mode, width: int) -> None:
    nothing: dict[str, Any] = dict.fromkeys(("norm_weight", "norm_bias")) if not row.has_pool else {}
    case = Case(2, (3, 16), (20, width), groups=4, has_bias=False)
    check_conv_gradients(row, draw(row, case, mode.dtype, **nothing), mode)


@widths
@pytest.mark.parametrize(
    "row", [r for r in CONV_ROWS if r.arguments[:1] == ("num_groups",)], ids=lambda row: row.chain
)
def test_groups_of_one_channel(row: Row, width: int) -> None:
    """The conv's bias has no effect, but in a logsumexp of the conv's output itself."""
    call = draw(row, Case(3, (8, 16), (21, width), groups=16), IEEE.dtype)
    others = {*named(call)} - {"conv_bias"}
    check_conv_gradients(row, call, IEEE, wanted=others)
    direction = smooth_direction(row, call, IEEE)
    found = conv_gradients(row, call, IEEE, direction, {"conv_bias"})["conv_bias"].double()
    exact = call.map(Tensor.double)
    with torch.backends.cudnn.flags(enabled=False):
        v = F.conv2d(exact.x, exact.weight, exact.bias)
    grad_v = gradients(row.plain_chain, v, exact.own, direction)["v"]
    error = (found - grad_v.sum((0, 2, 3))).abs()
    assert (error <= GRADIENT_BOUNDS[torch.float32] * grad_v.abs().sum((0, 2, 3))).all()


@modes
@layouts
@conv_rows
def test_shapes_of_the_reference_workloads(row: Row, layout: torch.memory_format, mode: Mode) -> None:
    r = row.reference
    pool = 2 * (r.get("pool_size", 2),)
    channels = (r["in_channels"], r["out_channels"])
    case = Case(2, channels, 2 * (r["size"],), groups=r.get("num_groups", 1), pool=pool)
    check_conv_gradients(row, draw(row, case, mode.dtype), mode, layout=layout)


@conv_rows
def test_float64_and_groups_and_strides(row: Row) -> None:
    """What our conv does not serve is PyTorch's, before our kernels of the chain."""
    call = draw(row, Case(2, (4, 8), (17, 19), groups=4), torch.float64)
    options: Sequence[dict[str, Any]] = ({"groups": 2}, {"stride": (2, 1)}, {})
    for more in options:
        weight = call.weight[:, :2].contiguous() if "groups" in more else call.weight
        x, weight = call.x.clone().requires_grad_(), weight.clone().requires_grad_()
        results = [run(x, weight, call.bias, call.own, **more) for run in (row.conv_op, row.plain_conv)]
        grad = torch.randn_like(results[0])
        ours, right = (torch.autograd.grad(y, (x, weight), grad) for y in results)
        for a, b in zip(ours, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@widths
@conv_rows
def test_a_mean_over_an_expanded_gradient(row: Row, width: int) -> None:
    """Of stride 0, as that of a sum is."""
    call = draw(row, Case(2, (8, 32), (21, width), groups=8), IEEE.dtype)
    x = call.x.requires_grad_()
    y = row.conv_op(x, call.weight, call.bias, call.own, precision="ieee")
    (ours,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (right,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert same_bits(ours, right)


@conv_rows
def test_batch_of_zero(row: Row) -> None:
    call = draw(row, Case(0, (3, 8), (9, 10), groups=4), IEEE.dtype)
    for name, gradient in conv_gradients(row, call, IEEE, plain_like(row, call)).items():
        assert gradient.shape == named(call)[name].shape
        assert not gradient.any()


def plain_like(row: Row, call: Call) -> Tensor:
    with torch.no_grad():
        return torch.ones_like(row.plain_conv(call.x, call.weight, call.bias, call.own, **call.geometry))


# ---- bits ----------------------------------------------------------------------------------------


@modes
@conv_rows
def test_same_bits_in_each_run(row: Row, mode: Mode) -> None:
    call = draw(row, Case(5, (8, 64), (70, 126), padding=(1, 1), groups=16, pool=(4, 4)), mode.dtype)
    direction = torch.randn_like(plain_like(row, call))
    first = conv_gradients(row, call, mode, direction)
    for _ in range(9):
        again = conv_gradients(row, call, mode, direction)
        assert all(same_bits(again[name], first[name]) for name in first)


@direct_only
@modes
@conv_rows
def test_a_sample_has_the_same_bits_in_any_batch(row: Row, mode: Mode) -> None:
    call = draw(row, Case(5, (8, 64), (40, 65), padding=(1, 1), groups=16), mode.dtype)
    direction = torch.randn_like(plain_like(row, call))
    together = conv_gradients(row, call, mode, direction)["input"]
    for i in range(5):
        alone = Call(call.x[i : i + 1].clone(), call.weight, call.bias, call.own, call.geometry)
        found = conv_gradients(row, alone, mode, direction[i : i + 1])
        assert same_bits(found["input"][0], together[i]), i


# ---- what runs -----------------------------------------------------------------------------------

COMPUTES = (
    "conv",
    "group_norm",
    "sigmoid",
    "tanh",
    "relu",
    "swish",
    "clamp",
    "pool",
    "logsumexp",
    "mul",
    "sum",
)


@direct_only
@conv_rows
@pytest.mark.parametrize("width", [130, 7300])
def test_wide_maps_run_in_strips(run: Runner, row: Row, width: int) -> None:
    """Also those of which a row of all channels would not fit into a block's shared memory."""
    forget()
    call = draw(row, Case(2, (8, 32), (20, width), groups=16, pool=(4, 4)), IEEE.dtype)
    check_conv_gradients(row, call, IEEE)
    said = [text for text in run.said() if f"{row.conv} backward" in text]
    assert said
    assert all("strips" in text for text in said), said


@direct_only
@layouts
@modes
@conv_rows
def test_reference_workloads_run_our_kernels_only(
    run: Runner, row: Row, mode: Mode, layout: torch.memory_format
) -> None:
    """No operator of PyTorch computes anything. The debug log says so too."""
    forget()
    fused, _, x = models_of_reference(row)
    fused = fused.to("cuda", mode.dtype)
    x = torch.cat([x, x]).to("cuda", mode.dtype).contiguous(memory_format=layout).requires_grad_()
    leaves = [x, *fused.parameters()]
    with fusedconv.float32_precision(mode.precision or "default"):
        y = fused(x)
    grad = torch.randn_like(y)

    def backward() -> None:
        torch.autograd.grad(y, leaves, grad, retain_graph=True)

    backward()
    ran = profile(backward)
    computing = [name for name in ran.computing if name.startswith("aten::")]
    assert not [name for name in computing if any(word in name for word in COMPUTES)], computing
    assert any("fusedconv" in name for name in ran.kernels), ran.kernels
    foreign = [name for name in ran.kernels if "fusedconv" not in name and "Mem" not in name]
    copies = (
        layout is torch.channels_last or mode.dtype is not torch.float32
    )  # to and from layouts and dtypes
    assert copies or not foreign, foreign
    assert any(f"{row.conv} backward" in text and ": direct" in text for text in run.said()), run.said()


@direct_only
@conv_rows
def test_memory_of_the_reference_workloads(row: Row) -> None:
    """Backward never has the conv's output in memory, nor half as much. Nothing stays."""
    fused, _, one = models_of_reference(row)
    fused = fused.cuda()

    def workspace(batch: int) -> int:
        x = torch.rand(batch, *one.shape[1:], device="cuda", requires_grad=True)
        y = fused(x)
        leaves, grad = [x, *fused.parameters()], torch.randn_like(y)
        torch.autograd.grad(y, leaves, grad, retain_graph=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        extra = torch.cuda.max_memory_allocated() - before - x.nbytes
        del found
        assert torch.cuda.memory_allocated() == before
        return extra

    batch, (height, width) = 128, (size - 2 for size in one.shape[2:])
    v_bytes = batch * row.reference["out_channels"] * height * width * 4
    taken = workspace(batch)
    assert taken < 0.45 * v_bytes, f"{taken / 1e6:.1f} MB, the conv's output has {v_bytes / 1e6:.1f}"


# ---- streams, graphs, threads --------------------------------------------------------------------


@widths
@conv_rows
def test_side_stream_and_memory_taken_again(row: Row, width: int) -> None:
    """What backward frees on a busy side stream is overwritten at once."""
    call = draw(row, Case(4, (8, 32), (64, width), groups=8), IEEE.dtype)
    direction = torch.randn_like(plain_like(row, call))
    right = conv_gradients(row, call, IEEE, direction)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    results = []
    with torch.cuda.stream(stream):
        for _ in range(5):
            torch.cuda._sleep(2_000_000)
            results.append(conv_gradients(row, call, IEEE, direction))
            for size in (2**k for k in range(9, 25)):
                torch.full((size,), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for found in results:
        assert all(same_bits(found[name], right[name]) for name in right)


@widths
@conv_rows
def test_graph_of_forward_and_backward(row: Row, width: int) -> None:
    call = draw(row, Case(2, (8, 32), (20, width), groups=8), IEEE.dtype)
    direction = torch.randn_like(plain_like(row, call))
    leaves = {name: t.detach().requires_grad_() for name, t in named(call).items()}
    own = {name: leaves.get(name, value) for name, value in call.own.items()}

    def step() -> tuple[Tensor, ...]:
        y = row.conv_op(leaves["input"], leaves["weight"], leaves["conv_bias"], own, precision="ieee")
        return torch.autograd.grad(y, list(leaves.values()), direction)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for factor in (1, -2, 3):
        with torch.no_grad():
            leaves["input"].normal_().mul_(factor)
            direction.normal_()
        graph.replay()
        for got, right in zip(captured, step(), strict=True):
            assert same_bits(got, right)


CAPTURE = """
import torch
from chains_table import CONV_ROWS
from cuda_conv import IEEE, Case, draw
from gradients import conv_gradients

for row in CONV_ROWS:
    call = draw(row, Case(2, (8, 32), (20, 35), groups=8), IEEE.dtype)
    x = call.x.requires_grad_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = row.conv_op(x, call.weight, call.bias, call.own, precision="ieee")
        (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    graph.replay()
    again = row.conv_op(x, call.weight, call.bias, call.own, precision="ieee")
    assert torch.equal(torch.autograd.grad(again, x, torch.ones_like(again))[0], found)
    print("captured")
"""


@direct_only
def test_capture_without_a_warm_up() -> None:
    """The first step of each operator is captured: backward's kernels are loaded with forward's."""
    assert new_process(CAPTURE).count("captured") == len(CONV_ROWS)


@widths
@conv_rows
def test_no_synchronising_call(row: Row, width: int) -> None:
    call = draw(row, Case(2, (8, 32), (20, width), groups=8), IEEE.dtype)
    x = call.x.requires_grad_()
    y = row.conv_op(x, call.weight, call.bias, call.own, precision="ieee")
    grad = torch.ones_like(y)
    backward = partial(torch.autograd.grad, y, x, grad, retain_graph=True)
    backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@widths
@pytest.mark.parametrize("ratio", [2.0**10, 2.0**-20, 2.0**24])
@pytest.mark.parametrize("chain", ["group_norm_scale_max_pool_clamp", "group_norm_silu"])
def test_weights_of_uneven_size(chain: str, ratio: float, width: int) -> None:
    """A norm gives channels of small weights large gradients: their products, not they, are of one size."""
    row = BY_NAME[chain]
    call = draw(row, Case(2, (8, 32), (37, width), padding=(1, 1), groups=8), IEEE.dtype)
    weight = call.weight.clone()
    weight[: weight.shape[0] // 2] *= ratio
    check_conv_gradients(row, Call(call.x, weight, None, call.own, call.geometry), IEEE)


@widths
@pytest.mark.parametrize("ratio", [2.0**10, 2.0**-20])
def test_small_weights_have_exact_gradients(ratio: float, width: int) -> None:
    """Without a norm gradients know nothing of the weights' size: those of each half are held by themselves."""
    row = BY_NAME["relu_hardswish"]
    call = draw(row, Case(2, (8, 32), (37, width), padding=(1, 1)), IEEE.dtype)
    weight, half = call.weight.clone(), call.weight.shape[0] // 2
    weight[:half] *= ratio
    uneven = Call(call.x, weight, call.bias, call.own, call.geometry)
    direction = smooth_direction(row, uneven, IEEE)
    ours = conv_gradients(row, uneven, IEEE, direction)["weight"].double()
    right = plain_gradients(row, uneven.map(Tensor.double), direction)["weight"]
    for of in (slice(None, half), slice(half, None)):
        assert float((ours[of] - right[of]).norm()) <= GRADIENT_BOUNDS[torch.float32] * float(
            right[of].norm()
        )


@pytest.mark.parametrize("factor", [1.0, 2.0**20])
@widths
@conv_rows
def test_weights_of_uneven_size_within_a_channel(row: Row, width: int, factor: float) -> None:
    """One scale would cost digits where the pixels of the small weights are large: there plain arithmetic serves."""
    call = draw(row, Case(2, (8, 32), (20, width), groups=8), IEEE.dtype)
    call.weight[:3, 5] *= 2.0**-20
    call.weight[3] = 0
    call.weight[3, 5] = 2.0**-20
    call.x[:, 5] *= factor
    check_conv_gradients(row, call, IEEE)


@widths
def test_an_input_near_the_largest_float(width: int) -> None:
    """v is finite, but not times the scale of the weights."""
    row = BY_NAME["relu_hardswish"]
    call = draw(row, Case(2, (8, 64), (20, width)), IEEE.dtype)
    call = Call(call.x * 1e34, call.weight / 8, None, call.own, call.geometry)
    direction = torch.randn_like(plain_like(row, call))
    found = conv_gradients(row, call, IEEE, direction, {"input"})["input"].double()
    right = plain_gradients(row, call.map(Tensor.double), direction, {"input"})["input"]
    assert float((found - right).norm()) <= 1e-5 * float(right.norm())


@pytest.mark.parametrize("width", [69, 70])
@conv_rows
def test_a_gradient_that_starts_anywhere(row: Row, width: int) -> None:
    call = draw(row, Case(2, (8, 32), (20, width), groups=8), IEEE.dtype)
    direction = torch.randn_like(plain_like(row, call))
    right = conv_gradients(row, call, IEEE, direction)
    moved = torch.empty(direction.numel() + 1, device="cuda")[1:].view_as(direction).copy_(direction)
    found = conv_gradients(row, call, IEEE, moved)
    assert all(same_bits(found[name], right[name]) for name in right)


@pytest.mark.parametrize("row", [r for r in CONV_ROWS if r.has_norm], ids=lambda row: row.chain)
def test_more_samples_than_a_step_takes(row: Row) -> None:
    """What has to be known of the conv before strips is found 128 MB at a time."""
    call = draw(row, Case(70, (8, 8), (258, 258), groups=2, pool=(4, 4)), IEEE.dtype)
    direction = torch.randn_like(plain_like(row, call))
    together = conv_gradients(row, call, IEEE, direction, {"input"})["input"]
    for i in (0, 69):
        alone = Call(call.x[i : i + 1].clone(), call.weight, call.bias, call.own, call.geometry)
        found = conv_gradients(row, alone, IEEE, direction[i : i + 1], {"input"})["input"]
        assert same_bits(found[0], together[i]), i


# ---- values that are not finite, freed tensors ---------------------------------------------------


@widths
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@conv_rows
def test_special_values_stay_in_their_sample(row: Row, value: float, width: int) -> None:
    call = draw(row, Case(3, (8, 32), (20, width), groups=8), IEEE.dtype)
    direction = torch.randn_like(plain_like(row, call))
    right = conv_gradients(row, call, IEEE, direction)["input"]
    call.x[1, 2, 3, 4] = value
    found = conv_gradients(row, call, IEEE, direction)["input"]
    assert same_bits(found[0], right[0])
    assert same_bits(found[2], right[2])


@widths
def test_an_infinite_input_has_a_gradient(width: int) -> None:
    """relu and hardswish are lines there: v must be infinite, and not NaN as the tensor cores would make it."""
    row = BY_NAME["relu_hardswish"]
    call = draw(row, Case(2, (8, 64), (20, width)), IEEE.dtype)
    call.x[1, 2, 3, 4] = float("inf")
    direction = torch.randn_like(plain_like(row, call))
    found = conv_gradients(row, call, IEEE, direction)["input"]
    right = plain_gradients(row, call.map(Tensor.double), direction)["input"]
    assert right.isfinite().all()
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))


@widths
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_nan_in_a_gradient_goes_where_the_kernel_reaches(kernel: int, width: int) -> None:
    """And nowhere else, also where windows of taps reach further."""
    row = BY_NAME["relu_hardswish"]
    call = draw(row, Case(1, (8, 32), (20, width), kernel=(kernel, kernel), padding=(0, 0)), IEEE.dtype)
    direction = torch.ones_like(plain_like(row, call))
    direction[0, 3, 9, 17] = float("nan")
    found = conv_gradients(row, call, IEEE, direction)["input"]
    right = plain_gradients(row, call, direction)["input"]
    assert torch.equal(found.isfinite(), right.isfinite())


@all_rows
def test_a_freed_tensor_is_an_error(row: Row) -> None:
    own = on(draw_own(row, 4, generator(row.chain, "freed"), groups=2))
    v = torch.zeros(1, 4, 16, 16, device="cuda", requires_grad=True) * 1
    y = row.chain_op(v, own)
    v.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="input has no memory"):
        y.sum().backward()


# ---- precisions, autocast, modules ---------------------------------------------------------------


@conv_rows
def test_backward_uses_the_precision_of_forward(row: Row) -> None:
    """Whatever is set between."""
    call = draw(row, Case(2, (8, 32), (40, 65), groups=8), IEEE.dtype)
    x = call.x.requires_grad_()
    grad = torch.randn_like(plain_like(row, call))
    for mode, other in ((IEEE, TF32), (TF32, IEEE)):
        right = conv_gradients(row, call, mode, grad, {"input"})["input"]
        with fusedconv.float32_precision(mode.name):
            y = row.conv_op(x, call.weight, call.bias, call.own)
        with fusedconv.float32_precision(other.name):
            (found,) = torch.autograd.grad(y, x, grad)
        assert same_bits(found, right), mode


@direct_only
@pytest.mark.parametrize(
    "row", [row for row in CONV_ROWS if row.has_norm and not row.has_pool], ids=lambda row: row.chain
)
def test_forward_in_two_steps_by_default(row: Row, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its v, and with it the statistics, is TF32's where PyTorch's flags allow that; backward's is exact."""
    monkeypatch.delenv("FUSEDCONV_CUDA_SOURCE")
    call = draw(row, Case(2, (48, 32), (37, 70), padding=(1, 1), groups=8), TF32.dtype)
    by_default = replace(TF32, precision="default")
    direction = smooth_direction(row, call, TF32)
    layout = torch.channels_last  # cuDNN has exact kernels that it takes for NCHW
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        y = run(row, call, by_default, layout=layout, path="two-step")
        there = replace(call, x=call.x.contiguous(memory_format=layout))
        ours = conv_gradients(row, there, by_default, direction)
    assert relative_error(y, in_double(row, call)) > 1e-5
    assert any("backward" in text and ": direct" in text for text in run.said()), run.said()
    reference = plain_gradients(row, call.map(Tensor.double), direction)
    eager = [plain_gradients(row, as_tf32_takes_it(call), direction)]
    hold_gradients(ours, reference, eager, CONV_BOUNDS[TF32], "input")


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients of the input and of all parameters from a loss."""
    leaf = x.detach().requires_grad_()
    names = ["input", *[name for name, _ in model.named_parameters()]]
    loss = model(leaf).float().square().mean()
    return dict(zip(names, torch.autograd.grad(loss, [leaf, *model.parameters()]), strict=True))


def error_of(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    largest = max(float(g.norm()) for name, g in right.items() if name != "input")
    return max(
        float((found[name].double() - g).norm()) / max(float(g.norm()), 1e-3 * largest)
        for name, g in right.items()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@conv_rows
def test_a_step_under_autocast(row: Row, dtype: torch.dtype) -> None:
    """As near to float64 as eager under autocast, twice over; gradients have the parameters' dtype."""
    fused, plain = (model.cuda() for model in modules(row, 8, 32, padding=1))
    x = module_input(4, 8, 37).cuda()
    with torch.autocast("cuda", dtype):
        ours, eager = step(fused, x), step(plain, x)
    assert {g.dtype for g in ours.values()} == {torch.float32}
    right = step(plain.double(), x.double())
    assert error_of(ours, right) <= max(GRADIENT_BOUNDS[dtype], 2 * error_of(eager, right))


@pytest.mark.slow
@conv_rows
def test_a_compiled_step(row: Row) -> None:
    """Without a graph break, with the bits of the step that is not compiled."""
    fused, _ = modules(row, 8, 32, padding=1)
    fused = fused.cuda()
    compiled = torch.compile(fused, fullgraph=True)
    for seed in range(2):
        x = module_input(4, 8, 37, seed=seed).cuda()
        y, again = fused(x), compiled(x)
        grad = randn(generator(seed), *y.shape).cuda()
        ours, right = (torch.autograd.grad(t, list(fused.parameters()), grad) for t in (again, y))
        assert all(same_bits(a, b) for a, b in zip(ours, right, strict=True))
    torch._dynamo.reset()


@direct_only
@conv_rows
def test_signatures_that_differ_in_one_thing(row: Row) -> None:
    """What is prepared for one call serves no other: precision, layout, dtype, mask, gradient's dtype."""
    forget()
    call = draw(row, Case(2, (8, 32), (21, 35), groups=8), IEEE.dtype)
    for mode, wanted, layout in itertools.product(MODES, (None, {"weight"}), LAYOUTS.values()):
        some = call.map(lambda t, dtype=mode.dtype: t.to(dtype))  # type: ignore[misc]
        check_conv_gradients(row, some, mode, wanted=wanted, layout=layout)


def test_two_gradients_of_one_graph() -> None:
    """Nothing that backward reads is overwritten by it: the same again from the retained graph."""
    row = BY_NAME["relu_hardswish"]
    v = randn(generator("twice"), 2, 8, 33, 35).cuda()
    run: Callable[..., Tensor] = row.chain_op
    kept = v.clone()
    first = gradients(run, v, {}, torch.ones_like(v))["v"]
    assert same_bits(gradients(run, v, {}, torch.ones_like(v))["v"], first)
    assert same_bits(v, kept)
