"""Who runs a conv and how kernels cut it, or a tensor, checked without a GPU: plans are plain C++.

Programs that make them are compiled with checks of undefined behaviour: a size that wraps ends one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedconv import _C
from fusedconv.chains import output_size

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
HERE = Path(__file__).parent
CSRC = HERE.parent / "csrc"
CPU, PLAN = CSRC / "cpu", CSRC / "plan"
CHECKS = ("-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all")

compiles = pytest.mark.skipif(
    COMPILER is None or not CSRC.is_dir(), reason="no C++ compiler, or the sources are not here"
)


def run(folder: Path, *sources: Path, calls: int = 0) -> str:
    """Compiles a program, has it plan random calls, and gives what it prints."""
    program = folder / "plan"
    options = ["-std=c++17", "-O1", "-g1", *CHECKS, f"-I{CSRC}", "-DFUSEDCONV_TARGET=baseline"]
    subprocess.run([str(COMPILER), *options, "-o", program, *sources], check=True)
    found = subprocess.run([program, str(calls)], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@compiles
def test_arithmetic_on_sizes(tmp_path: Path) -> None:
    run(tmp_path, HERE / "checked.cpp")


@compiles
def test_plans_of_given_tensors(tmp_path: Path) -> None:
    """Each value is read once, and what a block keeps fits; sizes whose products do not fit in 64 bits included."""
    run(tmp_path, HERE / "given_plan.cpp", calls=100_000)


@compiles
def test_plans_of_convs(tmp_path: Path) -> None:
    """Nothing wraps for any stride, padding, dilation or size; memory is bounded by input and output."""
    printed = run(tmp_path, HERE / "conv_plan.cpp", *PLAN.glob("*.cpp"), calls=300_000)
    ours, two_step, _ = map(int, printed.split())
    assert ours > 10_000
    assert two_step > 10_000


@compiles
def test_plans_of_gradients(tmp_path: Path) -> None:
    """Slabs and strips cover the map, each with something of its own; no channel is left out."""
    run(tmp_path, HERE / "gradient_plan.cpp", calls=100_000)


@compiles
def test_plans_of_backward(tmp_path: Path) -> None:
    """Slices, rows and strips cover a sample, fit into shared memory, and do not depend on the batch."""
    printed = run(tmp_path, HERE / "backward_plan.cpp", *PLAN.glob("*.cpp"), calls=500_000)
    times = dict(line.rsplit(": ", 1) for line in printed.splitlines())
    assert all(int(times[path]) > 1_000 for path in ("chain", "direct", "direct strips", "two-step"))


@compiles
def test_tiles_on_the_cpu(tmp_path: Path) -> None:
    """A filter that reaches far has tiles of as many rows, or each would pack what it reaches again."""
    run(tmp_path, HERE / "cpu_tiling.cpp", CPU / "conv_source.cpp", CPU / "memory.cpp", calls=100_000)


# ---- the CPU's thresholds, each at its edge -------------------------------------------------------

ISAS = ("baseline", "avx2", "avx512")
SSE_AVX2 = ISAS[:2]

_Plan = Callable[["_C.Form", "_C.Conv", str], _C.Plan]


def form(size: Sequence[int], layout: str = "nchw", dtype: int = _C.FLOAT32) -> _C.Form:
    format = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    return dtype, size, torch.empty(size, device="meta").contiguous(memory_format=format).stride()


def planned(
    input: Sequence[int],
    weight: Sequence[int],
    isa: str = "avx2",
    *,
    layout: str = "nchw",
    dtype: int = _C.FLOAT32,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    plan: _Plan = _C.plan_conv_on_cpu,
) -> _C.Plan:
    conv = form(weight, dtype=dtype), (stride, stride), padding, dilation, groups, False
    return plan(form(input, layout, dtype), conv, isa)


def backward(input: _C.Form, conv: _C.Conv, isa: str) -> _C.Plan:
    """Of a chain whose output's gradient has the input's dtype."""
    dtype, size, _ = input
    (_, weight, _), stride, padding, dilation, *_ = conv
    sides = map(output_size, size[2:], weight[2:], stride, padding, dilation)
    v = form((size[0], weight[0], *sides), dtype=dtype)
    return _C.plan_backward_on_cpu(v, dtype, False, (input, conv), isa)


# Input, weight, the rest; the reason against our conv, or None; and for which instruction sets: the others run ours.
CONVS: dict[str, tuple[Sequence[int], Sequence[int], dict[str, Any], str | None, Sequence[str]]] = {
    "512 products": ((1, 64, 40, 40), (17, 64, 2, 4), {}, None, ISAS),
    "513 products": ((1, 57, 40, 40), (17, 57, 3, 3), {}, "products", ISAS),
    "513 products, 16 outputs": ((1, 57, 40, 40), (16, 57, 3, 3), {}, None, ISAS),
    "513 products, 16 outputs, nhwc": ((1, 57, 9, 9), (16, 57, 3, 3), {"layout": "nhwc"}, "products", ISAS),
    "513 products of one tap": ((1, 513, 40, 40), (15, 513, 1, 1), {}, "products", ISAS),
    "4096 products of few": ((1, 1024, 40, 40), (7, 1024, 2, 2), {}, None, ISAS),
    "4100 products of few": ((1, 1025, 40, 40), (7, 1025, 2, 2), {}, "products", ISAS),
    "64 input channels": ((1, 64, 40, 40), (17, 64, 1, 1), {}, None, ISAS),
    "65 input channels": ((1, 65, 40, 40), (17, 65, 1, 1), {}, "input_channels", ISAS),
    "8128 pairs of channels": ((1, 64, 40, 40), (127, 64, 1, 1), {}, None, ISAS),
    "8192 pairs of channels": ((1, 64, 40, 40), (128, 64, 1, 1), {}, "channels", ISAS),
    "2^14 values, nhwc": ((1, 16, 16, 32), (16, 16, 1, 1), {"layout": "nhwc"}, None, ISAS),
    "more than 2^14": ((1, 16, 16, 33), (16, 16, 1, 1), {"layout": "nhwc"}, "channels_last", SSE_AVX2),
    "2^17 values, nhwc": ((1, 16, 64, 64), (16, 16, 1, 1), {"layout": "nhwc"}, "channels_last", SSE_AVX2),
    "more than 2^17": ((1, 16, 64, 65), (16, 16, 1, 1), {"layout": "nhwc"}, "channels_last", ISAS),
    "12 to 64 channels, nhwc": (
        (1, 12, 64, 64),
        (64, 12, 3, 3),
        {"layout": "nhwc"},
        "channels_last",
        ISAS[2:],
    ),
    "13 to 64 channels, nhwc": ((1, 13, 64, 64), (64, 13, 3, 3), {"layout": "nhwc"}, "channels_last", ISAS),
    "12 to 65 channels, nhwc": ((1, 12, 64, 64), (65, 12, 3, 3), {"layout": "nhwc"}, "channels_last", ISAS),
    "twice the pixels": ((1, 4, 16, 32), (8, 4, 1, 3), {"dilation": (1, 8)}, None, ISAS),
    "more than twice": ((1, 4, 16, 33), (8, 4, 1, 2), {"dilation": (1, 17)}, "computed", ISAS),
    "four times the values": (
        (1, 8, 12, 16),
        (1, 8, 2, 1),
        {"padding": (26, 0), "dilation": (32, 1)},
        None,
        ISAS,
    ),
    "more than four times": (
        (1, 8, 10, 16),
        (1, 8, 2, 1),
        {"padding": (27, 0), "dilation": (32, 1)},
        "packed",
        ISAS,
    ),
    "few pixels, 2^22 products": ((256, 8, 4, 5), (32, 8, 1, 2), {}, None, ISAS),
    "few pixels, more products": ((257, 8, 4, 5), (32, 8, 1, 2), {}, "idle_lanes", ISAS),
    "few pixels, 65440 values": ((409, 8, 4, 5), (4, 8, 1, 2), {}, None, ISAS),
    "few pixels, 65600 values": ((410, 8, 4, 5), (4, 8, 1, 2), {}, "idle_lanes", ISAS),
    "few pixels, 4096 products for a value": ((1, 4, 33, 33), (3, 4, 32, 32), {}, None, ISAS),
    "few pixels, more products for a value": ((1, 4, 34, 33), (3, 4, 33, 32), {}, "idle_lanes", ISAS),
    "few pixels, wide, 2^20 products": ((14, 65, 4, 5), (17, 65, 1, 2), {}, None, ISAS),
    "few pixels, wide, more products": ((15, 65, 4, 5), (17, 65, 1, 2), {}, "idle_lanes", ISAS),
    "a pixel, 2^14 weights": ((1, 128, 1, 1), (128, 128, 1, 1), {}, None, ISAS),
    "a pixel, more weights": ((1, 128, 1, 1), (129, 128, 1, 1), {}, "idle_lanes", ISAS),
    "30 pixels of many samples": ((4096, 8, 6, 6), (32, 8, 1, 2), {}, "idle_lanes", ISAS),
    "32 pixels of many samples": ((4096, 8, 8, 5), (32, 8, 1, 2), {}, None, ISAS),
    "float64": ((1, 456, 9, 9), (64, 456, 3, 3), {"dtype": _C.FLOAT64}, None, ISAS),
    "float16": ((1, 4, 9, 9), (8, 4, 3, 3), {"dtype": _C.FLOAT16}, "float16", ISAS),
    "bfloat16": ((1, 4, 9, 9), (8, 4, 3, 3), {"dtype": _C.BFLOAT16}, "bfloat16", ISAS),
    "groups": ((1, 4, 9, 9), (8, 2, 3, 3), {"groups": 2}, "groups", ISAS),
    "sizes that 63 bits do not count": (
        (1, 2, 5, 5),
        (2, 2, 2, 2),
        {"dtype": _C.FLOAT64, "stride": 2**31 - 1, "padding": 2 * (2**31 - 1,), "dilation": 2 * (2**31 - 1,)},
        "computed",
        ISAS,
    ),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("input", "weight", "more", "reason", "isas"), CONVS.values(), ids=CONVS)
def test_who_runs_a_conv_on_the_cpu(
    input: Sequence[int], weight: Sequence[int], more: Any, reason: str | None, isas: Sequence[str], isa: str
) -> None:
    plan = planned(input, weight, isa, **more)
    if reason is None or isa not in isas:
        assert (plan.path, plan.instructions, plan.reason) == ("direct", isa, "products")
        assert plan.numbers == {"products": weight[1] * weight[2] * weight[3]}
    else:
        assert (plan.path, plan.instructions, plan.reason) == ("two-step", "", reason)
    assert plan.is_ours == (plan.path == "direct")


# The same for the conv's gradients, where its output is ours.
GRADIENTS: dict[str, tuple[Sequence[int], Sequence[int], dict[str, Any], str | None]] = {
    "12 channels": ((2, 12, 40, 30), (64, 12, 3, 3), {}, None),
    "13 channels": ((2, 13, 40, 30), (16, 13, 3, 3), {}, "blocks"),
    "12 channels of 27 columns": ((2, 12, 40, 29), (64, 12, 3, 3), {}, "blocks"),
    "4 channels of 27 columns": ((2, 4, 40, 29), (64, 4, 3, 3), {}, None),
    "513 products of few": ((2, 57, 40, 40), (4, 57, 3, 3), {}, "width"),
    "65 input channels of few": ((2, 65, 40, 40), (4, 65, 1, 2), {}, "width"),
    "stride": ((2, 4, 40, 40), (8, 4, 3, 3), {"stride": 2}, "stride"),
    "float64": ((2, 4, 40, 40), (8, 4, 3, 3), {"dtype": _C.FLOAT64}, "float64"),
    "a conv of PyTorch's": ((2, 4, 40, 40), (8, 2, 3, 3), {"groups": 2}, "groups"),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("input", "weight", "more", "reason"), GRADIENTS.values(), ids=GRADIENTS)
def test_who_computes_a_convs_gradients_on_the_cpu(
    input: Sequence[int], weight: Sequence[int], more: Any, reason: str | None, isa: str
) -> None:
    plan = planned(input, weight, isa, plan=backward, **more)
    if reason in (None, "blocks") and isa == "baseline":
        reason = "instructions"
    assert (plan.path, plan.reason) == (("direct", "products") if reason is None else ("two-step", reason))
    assert plan.words.endswith("with the conv's gradients") == plan.is_ours


@pytest.mark.parametrize(
    ("size", "dtype", "reason"),
    [
        ((1, 2, 4, 8), _C.FLOAT32, ""),
        ((1, 2, 4, 8), _C.FLOAT64, ""),
        ((1, 2, 4, 8), _C.FLOAT16, "float16"),
        ((1, 2, 31, 1), _C.FLOAT32, "few_pixels"),
        ((1, 2, 2**24 - 1, 1), _C.FLOAT32, ""),
        ((1, 2, 2**24, 1), _C.FLOAT32, "large_side"),
        ((1, 2, 1, 2**24), _C.FLOAT32, "large_side"),
    ],
)
def test_who_computes_a_chains_gradients_on_the_cpu(size: Sequence[int], dtype: int, reason: str) -> None:
    plan = _C.plan_backward_on_cpu(form(size, dtype=dtype), dtype, False, None, "avx2")
    assert (plan.path, plan.reason) == ("plain" if reason else "chain", reason)


@pytest.mark.parametrize(
    ("v", "grad", "has_infinite_bounds", "reason", "on_cpu"),
    [
        (_C.FLOAT32, _C.FLOAT32, False, "", ""),
        (_C.BFLOAT16, _C.BFLOAT16, False, "", "bfloat16"),
        (_C.FLOAT16, _C.FLOAT32, False, "", "float16"),  # as autocast widens it
        (_C.FLOAT32, _C.FLOAT64, False, "grad_dtype", "grad_dtype"),
        (_C.FLOAT64, _C.FLOAT32, False, "grad_dtype", "grad_dtype"),
        (_C.FLOAT16, _C.BFLOAT16, False, "grad_dtype", "float16"),
        (_C.FLOAT32, None, False, "grad_dtype", "grad_dtype"),
        (_C.FLOAT32, _C.FLOAT32, True, "infinite_bounds", "infinite_bounds"),
    ],
)
def test_which_gradients_kernels_take(
    v: int, grad: int | None, has_infinite_bounds: bool, reason: str, on_cpu: str
) -> None:
    plan = _C.plan_chain_backward(v, grad, has_infinite_bounds)
    assert (plan.path, plan.reason) == ("plain" if reason else "chain", reason)
    conv = form((2, 4, 40, 40), dtype=v), (form((8, 4, 3, 3), dtype=v), (1, 1), (1, 1), (1, 1), 1, False)
    for given in (None, conv):
        plan = _C.plan_backward_on_cpu(
            form((2, 8, 40, 40), dtype=v), grad, has_infinite_bounds, given, "avx2"
        )
        assert plan.reason == (on_cpu or ("products" if given else ""))
        assert plan.path == ("plain" if on_cpu else "direct" if given else "chain")


def test_who_computes_v_again_on_the_cpu() -> None:
    """The conv that forward has, but before a reduction."""
    for weight, path in (((8, 4, 3, 3), "direct"), ((8, 2, 3, 3), "two-step")):
        call = form((2, 4, 40, 40)), (form(weight), (1, 1), (0, 0), (1, 1), 4 // weight[1], False)
        again, reduced = (_C.plan_v_on_cpu(*call, stores, "avx2") for stores in (True, False))
        assert again == _C.plan_conv_on_cpu(*call, "avx2")
        assert again.path == path
        assert (reduced.path, reduced.reason) == ("two-step", "reduction")


def test_the_path_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a choice."""
    wide = (1, 512, 40, 40), (512, 512, 3, 3)
    half = (1, 4, 9, 9), (8, 4, 3, 3)
    assert planned(*wide).path == "two-step"
    monkeypatch.setenv("FUSEDCONV_CPU_PATH", "DIRECT")
    assert planned(*wide).path == "direct"
    assert planned(*wide, "baseline", plan=backward).path == "direct"
    assert planned(*half, dtype=_C.FLOAT16).reason == "float16"
    assert _C.plan_backward_on_cpu(form((1, 1, 1, 1)), _C.FLOAT32, False, None, "avx2").is_ours
    monkeypatch.setenv("FUSEDCONV_CPU_PATH", "two-step")
    assert planned((1, 4, 40, 40), (8, 4, 3, 3)).reason == "asked"
    monkeypatch.setenv("FUSEDCONV_CPU_PATH", "one-step")
    with pytest.raises(ValueError, match="FUSEDCONV_CPU_PATH is 'one-step', not one of direct, two-step"):
        planned((1, 4, 40, 40), (8, 4, 3, 3))


# ---- cards that need not be here ------------------------------------------------------------------

# Compute capability, multiprocessors, bytes of shared memory of a block.
T4, A100, H100 = (75, 40, 65536), (80, 108, 166912), (90, 132, 232448)
CARDS: dict[str, tuple[Any, ...]] = {
    # channels, kernel, side, tf32, pool, whether it waits for norms; then the reason for each of the cards
    "store": ((64, 32), 3, 64, False, None, False, "no_kernels", "tiles", "tiles"),
    "65 channels": ((65, 32), 1, 64, False, None, False, *["many_products"] * 3),
    "exact, 600 products": ((24, 32), 5, 100, False, None, False, "no_kernels", "tiles", "tiles"),
    "exact, 601 or more": ((25, 32), 5, 100, False, None, False, *["many_products"] * 3),
    "tf32, 1200 products": ((48, 32), 5, 64, True, None, False, "no_kernels", "tiles", "tiles"),
    "tf32, 1225 products": ((49, 32), 5, 64, True, None, False, *["many_products"] * 3),
    "norm, 32 channels": ((32, 32), 3, 64, False, None, True, "no_kernels", "tiles", "tiles"),
    "norm, 33 channels": ((33, 32), 1, 64, False, None, True, *["many_products"] * 3),
    "norm, taps in chunks": ((6, 64), 7, 64, False, None, True, "no_kernels", "tiles", "taps_in_chunks"),
    "pool, a small map": ((3, 16), 3, 48, False, (2, 2), False, "no_kernels", "tiles", "small_map"),
    "pool": ((8, 32), 3, 64, False, (2, 2), False, "no_kernels", "tiles", "tiles"),
    "float64": ((8, 32), 3, 64, None, None, False, *["float64"] * 3),
}


@pytest.mark.parametrize("case", CARDS.values(), ids=CARDS)
def test_who_runs_a_conv_on_a_card(case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSEDCONV_CUDA_SOURCE", raising=False)
    (c_in, c_out), kernel, side, tf32, pool, waits, *reasons = case
    dtype = _C.FLOAT64 if tf32 is None else _C.FLOAT32
    conv = form((c_out, c_in, kernel, kernel), dtype=dtype), (1, 1), 2 * (kernel // 2,), (1, 1), 1, bool(tf32)
    out = side // (pool[0] if pool else 1)
    forms = form((2, c_in, side, side), dtype=dtype), conv, form((2, c_out, out, out), dtype=dtype)
    plans = [_C.plan_for_card(*forms, pool, waits, card) for card in (T4, A100, H100)]
    assert [plan.reason for plan in plans] == reasons
    for plan, card, instructions in zip(plans[1:], (A100, H100), ("sm_80", "sm_90a"), strict=True):
        if plan.is_ours:
            assert plan.instructions == instructions
            assert plan.words.startswith(
                f"{instructions}, tiles of {plan.numbers['rows']} x {plan.numbers['cols']} "
            )
            assert 0 < plan.numbers["shared_bytes"] <= card[2]


def test_terms_of_a_product() -> None:
    """Exact float32 multiplies halves of its operands."""
    for tf32, expected in ((False, 3), (True, 1)):
        conv = form((16, 8, 3, 3)), (1, 1), (1, 1), (1, 1), 1, tf32
        assert _C.plan_conv_on_cpu(form((2, 8, 64, 64)), conv, "avx2").terms == 1
        for card, terms in ((T4, 1), (A100, expected), (H100, expected)):
            forms = form((2, 8, 64, 64)), conv, form((2, 16, 64, 64))
            assert _C.plan_for_card(*forms, None, True, card).terms == terms


def test_samples_stay_on_hopper_alone() -> None:
    conv = form((16, 8, 3, 3)), (1, 1), (1, 1), (1, 1), 1, False
    forms = form((2, 8, 64, 64)), conv, form((2, 16, 64, 64))
    words = [_C.plan_for_card(*forms, None, True, card).words for card in (A100, H100)]
    assert [text.endswith(", samples stay there") for text in words] == [False, True]


# ---- what a plan is -------------------------------------------------------------------------------


def test_text_of_plans() -> None:
    given = _C.plan_chain_backward(_C.FLOAT32, _C.FLOAT32, False)
    assert (str(given), repr(given)) == ("chain", "<fusedconv._C.Plan: chain>")
    direct = planned((1, 4, 40, 40), (8, 4, 3, 3))
    assert str(direct) == "direct, avx2, 36 products for a value"
    assert repr(direct) == f"<fusedconv._C.Plan: {direct}>"


def test_plans_are_equal_if_all_that_they_say_is() -> None:
    plan = planned((1, 4, 40, 40), (8, 4, 3, 3))
    assert plan == planned((2, 4, 41, 41), (16, 4, 3, 3))
    assert plan != planned((1, 5, 40, 40), (8, 5, 3, 3))
    assert plan != planned((1, 4, 40, 40), (8, 4, 3, 3), "avx512")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stride", (0, 1)),
        ("padding", (0, -1)),
        ("dilation", (1, 0)),
        ("groups", 0),
        ("weight", (8, 4, 3, 0)),
        ("weight", (0, 4, 3, 3)),
        ("input", (2, 4, -1, 9)),
    ],
)
def test_plans_refuse_what_no_conv_has(name: str, value: Any) -> None:
    """They divide by it, which ended the process."""
    call: dict[str, Any] = {
        "input": (2, 4, 9, 9),
        "weight": (8, 4, 3, 3),
        "stride": (1, 1),
        "padding": (0, 0),
    }
    call |= {"dilation": (1, 1), "groups": 1, name: value}
    forms = [(_C.FLOAT32, call[key], (1, 1, 1, 1)) for key in ("input", "weight")]
    conv = forms[1], call["stride"], call["padding"], call["dilation"], call["groups"], False
    v = form((2, 8, 7, 7))
    plans: Sequence[Callable[[], _C.Plan]] = (
        lambda: _C.plan_conv_on_cpu(forms[0], conv, "avx2"),
        lambda: _C.plan_v_on_cpu(forms[0], conv, True, "avx2"),
        lambda: _C.plan_backward_on_cpu(v, _C.FLOAT32, False, (forms[0], conv), "avx2"),
        lambda: _C.plan_for_card(forms[0], conv, v, None, True, H100),
    )
    for plan in plans:
        with pytest.raises(
            ValueError, match=rf"^fusedconv: (a size of )?{name} must be [01] or more in a plan"
        ):
            plan()


@pytest.mark.parametrize(
    ("pool", "card", "kernel", "name"),
    [
        ((2, 0), H100, 3, "pool"),
        (None, (90, 0, 232448), 3, "card"),
        (None, (90, 132, 0), 3, "card"),
        (None, H100, 10, "a side of the conv's output"),
        ((2**31, 1), H100, 3, "a side of the pooled output"),
    ],
)
def test_plans_for_cards_refuse_what_no_card_has(pool: Any, card: Any, kernel: int, name: str) -> None:
    conv = form((8, 4, kernel, kernel)), (1, 1), (0, 0), (1, 1), 1, False
    with pytest.raises(ValueError, match=f"^fusedconv: {name} must be 1 or more in a plan, but is 0"):
        _C.plan_for_card(form((2, 4, 9, 9)), conv, form((2, 8, 7, 7)), pool, False, card)
