"""Our own gradients of the conv on the CPU, with its chain's: against float64, bits, tails, and where they run."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from chains_table import BY_NAME, CONV_ROWS, Row, generator, randn
from cuda_conv import IEEE, SAME, Call, Case, cases, draw, forget
from fusedconv import _C
from fusedconv._register import OPERATORS
from gradients import check_conv_gradients, conv_gradients, named, plain_gradients, smooth_direction
from helpers import new_process, profile, same_bits

conv_rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
formats = pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"]
)
WIDTHS = tuple(range(1, 34))  # of v: up to twice the widest vector and one more
VALUES: dict[str, Sequence[Any]] = {
    "batch": (1, 2, 3, 5),
    "c_in": (1, 2, 3, 4, 5, 7, 8, 9, 12, 17),
    "c_out": (2, 3, 4, 5, 6, 8, 12, 15, 16, 20, 33),
    "height": (3, 5, 9, 17, 33, 70),
    "width": WIDTHS,
    "kernel": ((1, 1), (2, 2), (3, 3), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7), (3, 5), (1, 7), (7, 1)),
    "padding": ((0, 0), (1, 1), (2, 2), (3, 3), (0, 3), (2, 1), SAME, SAME),
    "dilation": ((1, 1), (1, 1), (1, 1), (2, 2), (1, 3), (2, 1)),
    "pool": ((2, 2), (3, 3), (4, 4), (2, 3), (5, 2), (1, 1), (7, 1)),
    "has_bias": (True, True, False),
}


@pytest.fixture(autouse=True)
def _wherever_they_serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our gradients run also where they are not the faster ones."""
    monkeypatch.setenv("FUSEDCONV_CPU_PATH", "direct")
    forget()
    yield
    forget()


def is_ours(row: Row, call: Call) -> bool:
    """Whether PyTorch's conv keeps out of backward."""
    leaf = call.x.detach().requires_grad_()
    y = row.conv_op(leaf, call.weight, call.bias, call.own, **call.geometry)
    grad = torch.ones_like(y)
    ran = profile(lambda: torch.autograd.grad(y, leaf, grad))
    return not any("conv" in name for name in ran.computing if name.startswith("aten"))


@formats
@conv_rows
def test_gradients_of_random_calls(
    row: Row, layout: torch.memory_format, caplog: pytest.LogCaptureFixture
) -> None:
    """Odd sizes, kernels, paddings and dilations; channels that fill no block; in poisoned memory."""
    caplog.set_level("DEBUG", logger="fusedconv")
    for case in cases(row, "cpu backward", layout, count=3 * len(WIDTHS), most=2**17, values=VALUES):
        caplog.clear()
        # Before a norm the bias's gradient is nearly zero, and so is each of a small group: little but rounding.
        channels = case.channels[1]
        case = replace(case, groups=1 if channels % 2 else channels // 2, has_bias=not row.has_norm)
        call = draw(row, case, torch.float32, "cpu")
        check_conv_gradients(row, call, IEEE, layout=layout, device="cpu", what=case)
        (told,) = [text for text in caplog.messages if "backward" in text] or ["an earlier call's launch"]
        assert "with the conv's gradients" in told or "earlier" in told


@conv_rows
def test_gradients_of_bands_strips_and_steps(row: Row) -> None:
    """Samples of several strips, whose first rows need those above them, and more samples than one step takes."""
    for case in (
        Case(3, (3, 64), (150, 61), groups=16, padding=(1, 1), pool=(4, 4)),
        Case(2, (2, 8), (300, 20), (7, 3), groups=4, pool=(3, 2)),
        Case(2, (2, 6), (130, 15), (5, 2), (1, 1), (7, 3), groups=3, pool=(5, 5)),
        Case(97, (2, 4), (19, 18), groups=2),
        Case(1, (1, 4), (40, 1100), groups=2),  # a row is longer than what is summed in float32
        Case(2, (4, 40), (37, 260), (3, 3), (1, 1), groups=8, pool=(9, 4)),
    ):
        call = draw(row, case, torch.float32, "cpu")
        assert is_ours(row, call)
        check_conv_gradients(row, call, IEEE, device="cpu", what=case)


@pytest.mark.parametrize("factor", [1, 3, 0.01, -1])
@conv_rows
def test_gradients_of_scaled_inputs(row: Row, factor: float) -> None:
    call = draw(row, Case(3, (5, 12), (45, 53), groups=4, padding=(1, 1)), torch.float32, "cpu")
    check_conv_gradients(
        row, Call(factor * call.x, call.weight, call.bias, call.own, call.geometry), IEEE, device="cpu"
    )


@pytest.mark.parametrize("row", [row for row in CONV_ROWS if row.has_norm], ids=lambda row: row.chain)
def test_gradients_survive_a_large_mean(row: Row) -> None:
    call = draw(row, Case(2, (5, 12), (45, 53), groups=4), torch.float32, "cpu")
    own, weight = call.own, call.weight + 0.2  # so that v's mean is 9 and its deviation one
    if "bias" in own:  # otherwise the sigmoid is one everywhere
        own = own | {"bias": torch.full((12, 1, 1), -9.0)}
    x = 1 + call.x / 3
    call = Call(x, weight, None, own, call.geometry)
    check_conv_gradients(row, call, IEEE, device="cpu")


@conv_rows
def test_gradients_by_themselves_have_the_same_bits(row: Row) -> None:
    """Whatever else is asked for."""
    call = draw(row, Case(3, (3, 10), (41, 29), groups=5, padding=(1, 0)), torch.float32, "cpu")
    direction = smooth_direction(row, call, IEEE)
    together = conv_gradients(row, call, IEEE, direction)
    for name in named(call):
        (alone,) = conv_gradients(row, call, IEEE, direction, {name}).values()
        assert same_bits(alone, together[name]), name


@conv_rows
def test_same_bits_for_any_number_of_threads_and_in_each_run(row: Row) -> None:
    call = draw(row, Case(5, (3, 12), (101, 67), groups=4, padding=(1, 1)), torch.float32, "cpu")
    direction = smooth_direction(row, call, IEEE)
    runs = []
    for threads in (1, 2, 3, *[2] * 10, 16):
        torch.set_num_threads(threads)
        runs.append(conv_gradients(row, call, IEEE, direction))
    for run in runs[1:]:
        assert all(same_bits(run[name], runs[0][name]) for name in run)


@conv_rows
def test_layouts_of_what_comes_in(row: Row) -> None:
    """An input and a weight with steps in them, and an output gradient of stride 0."""
    call = draw(row, Case(2, (3, 8), (21, 34), groups=4, padding=(1, 1)), torch.float32, "cpu")
    one = torch.ones(())
    direction = one.expand(row.plain_conv(call.x, call.weight, call.bias, call.own, padding=1).shape)
    expected = conv_gradients(row, call, IEEE, direction.contiguous())
    x = torch.empty(2, 3, 21, 68)[..., ::2].copy_(call.x).requires_grad_()
    weight = torch.empty(3, 3, 3, 8).permute(3, 0, 2, 1).copy_(call.weight).requires_grad_()
    y = row.conv_op(x, weight, call.bias, call.own, **call.geometry)
    found = torch.autograd.grad(y, [x, weight], direction)
    for name, gradient in zip(("input", "weight"), found, strict=True):
        assert same_bits(gradient, expected[name])


def test_long_sums_of_the_weight_gradient_hold() -> None:
    """A million products of one sign: float32 alone would lose digits."""
    row = BY_NAME["relu_hardswish"]
    x, weight = torch.full((4, 1, 514, 514), 0.1), torch.full((1, 1, 3, 3), 5.0)
    call = Call(x, weight, None, {}, {"padding": (0, 0), "dilation": (1, 1)})
    ours = conv_gradients(row, call, IEEE, torch.full((4, 1, 512, 512), 0.3))["weight"]
    expected = 4 * 512 * 512 * float(torch.tensor(0.1)) * float(torch.tensor(0.3))
    torch.testing.assert_close(ours, torch.full_like(ours, expected), rtol=1e-6, atol=0)


@conv_rows
def test_an_empty_batch(row: Row) -> None:
    call = draw(row, Case(1, (3, 8), (21, 34), groups=4), torch.float32, "cpu")
    call = Call(call.x[:0], call.weight, call.bias, call.own, call.geometry)
    y = row.plain_conv(call.x, call.weight, call.bias, call.own)
    for name, gradient in conv_gradients(row, call, IEEE, torch.empty(y.shape)).items():
        assert gradient.shape == named(call)[name].shape
        assert not gradient.any()


# ---- values that are not finite ------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_nan_in_a_gradient_goes_where_the_kernel_reaches(kernel: int) -> None:
    """And nowhere else: neither around a row's end nor to other taps."""
    row = BY_NAME["relu_hardswish"]
    call = draw(row, Case(2, (3, 5), (20, 21 + kernel), (kernel, kernel)), torch.float32, "cpu")
    shape = row.plain_conv(call.x, call.weight, call.bias, call.own).shape
    for place in ((0, 3, 9, 17), (1, 0, 0, 0), (0, 4, 20 - kernel, 21)):
        direction = torch.ones(shape)
        direction[place] = math.nan
        found = conv_gradients(row, call, IEEE, direction)
        right = plain_gradients(row, call, direction)
        for name in found:
            assert torch.equal(found[name].isfinite(), right[name].isfinite()), name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@conv_rows
def test_special_values_stay_in_their_sample(row: Row, value: float) -> None:
    call = draw(row, Case(3, (3, 8), (20, 35), groups=4), torch.float32, "cpu")
    direction = randn(generator("direction"), *row.plain_conv(call.x, call.weight, None, call.own).shape)
    right = conv_gradients(row, call, IEEE, direction)["input"]
    call.x[1, 2, 3, 4] = value
    found = conv_gradients(row, call, IEEE, direction)["input"]
    assert same_bits(found[0], right[0])
    assert same_bits(found[2], right[2])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_special_values_that_no_tap_meets_are_not_summed(value: float) -> None:
    """At the end of a row, where the last vector reaches past v's columns. The gradient of v is zero beside them."""
    row = BY_NAME["relu_hardswish"]
    for width in (15, 16, 17, 33):
        call = draw(row, Case(2, (2, 3), (9, width + 2), has_bias=False), torch.float32, "cpu")
        call.x[:, :, :, -1] = value  # met by the last column of taps only
        shape = row.plain_conv(call.x, call.weight, None, {}).shape
        weight = conv_gradients(row, call, IEEE, torch.ones(shape))["weight"]
        right = plain_gradients(row, call, torch.ones(shape))["weight"]
        torch.testing.assert_close(weight[..., 0], right[..., 0], rtol=1e-5, atol=1e-5, equal_nan=True)


# ---- where they run ------------------------------------------------------------------------------


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log of what is chosen where nothing is asked for, with AVX2."""
    monkeypatch.delenv("FUSEDCONV_CPU_PATH")
    monkeypatch.setattr(_C, "cpu_isa", lambda: "avx2")
    caplog.set_level("DEBUG", logger="fusedconv")
    forget()
    return caplog


def told_of_backward(log: pytest.LogCaptureFixture, row: Row, call: Call, **more: Any) -> list[str]:
    log.clear()
    leaf = call.x.detach().requires_grad_()
    geometry = {**call.geometry, **more}
    row.conv_op(leaf, call.weight, call.bias, call.own, **geometry).sum().backward()
    return [text.partition(": ")[2] for text in log.messages if "backward" in text]


@conv_rows
def test_where_our_gradients_run(
    row: Row, monkeypatch: pytest.MonkeyPatch, choices: pytest.LogCaptureFixture
) -> None:
    """Otherwise PyTorch's conv backward does."""

    def ours(case: Case, dtype: torch.dtype = torch.float32, **more: Any) -> bool:
        call = draw(row, case, dtype, "cpu")
        return any(
            "with the conv's gradients" in text for text in told_of_backward(choices, row, call, **more)
        )

    assert ours(Case(2, (8, 64), (40, 40), groups=8))
    assert ours(Case(2, (64, 12), (40, 40), (1, 1), groups=4))
    assert ours(Case(2, (4, 64), (20, 20), groups=8))
    assert ours(Case(2, (3, 16), (40, 40), (7, 7), (3, 3), (2, 1), groups=8))
    assert not ours(Case(2, (13, 16), (40, 40), groups=8))  # oneDNN's blocks
    assert not ours(Case(2, (8, 64), (20, 20), groups=8))  # narrow
    assert not ours(Case(2, (8, 64), (10, 10), groups=8))  # few pixels
    assert not ours(Case(2, (8, 64), (40, 40), groups=8), dtype=torch.float64)
    assert not ours(Case(2, (8, 64), (40, 40), groups=8), stride=2)
    monkeypatch.setattr(_C, "cpu_isa", lambda: "baseline")
    assert not ours(Case(2, (8, 64), (41, 41), groups=8))  # another call: the first one's launch is prepared


@conv_rows
def test_backward_tells_who_finds_its_gradients(row: Row, choices: pytest.LogCaptureFixture) -> None:
    """And, where these are not all ours, who computes v again."""
    stores = OPERATORS[row.conv].operator.chain.stores
    wide, float32 = Case(2, (8, 64), (40, 40), groups=8), torch.float32
    for case, dtype, stride, told, of_v in (
        (wide, float32, 1, "direct, avx2, 72 products for a value, with the conv's gradients", ""),
        (wide, float32, 2, "two-step, stride", "direct, avx2, 72 products for a value"),
        (wide, torch.bfloat16, 1, "plain, bfloat16", "two-step, bfloat16"),
        (
            Case(2, (13, 16), (40, 40), groups=8),
            float32,
            1,
            "two-step, 13 channels, 38 columns",
            "direct, avx2, 117 products for a value",
        ),
        (
            Case(2, (8, 64), (7, 7), groups=8),
            float32,
            1,
            "plain, 25 pixels",
            "direct, avx2, 72 products for a value",
        ),
    ):
        messages = told_of_backward(choices, row, draw(row, case, dtype, "cpu"), stride=(stride, stride))
        assert messages == [told, *([of_v if stores else "two-step, a reduction"] if of_v else [])]


# ---- instruction sets ----------------------------------------------------------------------------

LEVELS = """
import sys
import torch
from chains_table import CONV_ROWS
from cuda_conv import IEEE, Case, draw
from fusedconv import _C
from fusedconv._register import OPERATORS
from gradients import check_conv_gradients

assert _C.cpu_isa() == sys.argv[1], _C.cpu_isa()
for row in CONV_ROWS:
    for case in (
        Case(2, (3, 5), (18, 19), groups=1, padding=(1, 1)),
        Case(1, (1, 8), (9, 36), (2, 4), groups=4),
        Case(3, (9, 6), (50, 11), (5, 3), groups=2, pool=(3, 3)),
    ):
        check_conv_gradients(row, draw(row, case, torch.float32, "cpu"), IEEE, device="cpu", what=case)
print("right")
"""


@pytest.mark.parametrize("level", _C.cpu_isas())
def test_each_instruction_set_is_right(level: str) -> None:
    environment = {"FUSEDCONV_CPU_ISA": level, "FUSEDCONV_CPU_PATH": "direct"}
    assert "right" in new_process(LEVELS, level, environment=environment)
