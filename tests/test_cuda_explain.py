"""``explain`` on CUDA says what the debug log, the profiler and the allocator show of the call itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedconv
from chains_table import CONV_ROWS, ROWS, Row, draw_own, generator
from cuda_conv import BF16, FP16, IEEE, MODES, TF32, Call, Case, Mode, Runner, draw, expected_path, forget
from fusedconv import Explanation
from fusedconv._measure import interleaved
from helpers import on, profile

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("source")]
conv_rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)

CASE = Case(2, (8, 64), (40, 45), groups=8, pool=(2, 2))


def explained(row: Row, call: Call, mode: Mode, **more: Any) -> tuple[Explanation, Callable[[], Any]]:
    """Of a conv, and the call itself."""
    op = getattr(torch.ops.fusedconv, row.conv)
    names = [argument.name for argument in op.default._schema.arguments]
    conv = {"input": call.x, "weight": call.weight, "conv_bias": call.bias}
    options = {**conv, **call.own, **call.geometry, **more, "precision": mode.precision}
    assert set(options) <= set(names)
    return fusedconv.explain(op, **options), lambda: op(**options)


def requested_bytes(run: Callable[[], Any]) -> int:
    """What a call asks the allocator for."""

    def total() -> int:
        return int(torch.cuda.memory_stats()["requested_bytes.all.allocated"])

    before = total()
    run()
    return total() - before


def check_log(run: Runner, explanation: Explanation) -> None:
    assert [text.rpartition(": ")[2] for text in run.said()] == [f"{explanation.path}, {explanation.reason}"]


@pytest.mark.parametrize("mode", MODES, ids=str)
@conv_rows
def test_a_conv_of_ours(run: Runner, row: Row, mode: Mode) -> None:
    explanation, call = explained(row, draw(row, CASE, mode.dtype), mode)
    assert run.said() == []  # nothing was prepared
    output = call()
    check_log(run, explanation)
    assert explanation.path == expected_path()
    if explanation.path != "direct":
        return
    ran = profile(call)
    assert explanation.kernels in ("sm_80", "sm_90a")
    passes = [name for name in ran.kernels if "conv_kernel" in name]
    assert passes
    assert all(explanation.kernels.replace("sm_", "cuda_sm") in name for name in passes), passes
    assert ran.computing == [*explanation.pytorch] == []
    assert requested_bytes(call) == output.nbytes + explanation.workspace_bytes
    assert explanation.products == (3 if mode is IEEE else 1)


@pytest.mark.parametrize(
    ("reason", "mode", "more"),
    [
        ("groups", TF32, {"groups": 2}),
        ("stride", BF16, {"stride": (2, 1)}),
        ("stride", FP16, {"stride": (1, 2)}),
    ],
)
@conv_rows
def test_a_conv_of_pytorch(run: Runner, row: Row, reason: str, mode: Mode, more: dict[str, Any]) -> None:
    call = draw(row, CASE, mode.dtype)
    if "groups" in more:
        call = Call(call.x, call.weight[:, :4].contiguous(), call.bias, call.own, call.geometry)
    explanation, run_it = explained(row, call, mode, **more)
    run_it()
    check_log(run, explanation)
    assert (explanation.path, explanation.kernels) == ("two-step", "CUDA")
    assert reason in explanation.reason
    ran = profile(run_it)
    assert [name for name in ran.operators if name in explanation.pytorch] == [*explanation.pytorch]
    assert any("conv" in name for name in explanation.pytorch)
    assert not any("conv_kernel" in name and "fusedconv" in name for name in ran.kernels)
    assert any("fusedconv" in name for name in ran.kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
def test_a_chain(row: Row, dtype: torch.dtype) -> None:
    forget()
    gen = generator(row.chain, "explain")
    v = torch.randn(2, 8, 9, 11, generator=gen).to("cuda", dtype)
    own = on(draw_own(row, 8, gen, dtype=dtype), "cuda")
    op = getattr(torch.ops.fusedconv, row.chain)
    explanation = fusedconv.explain(op, v, **own)
    output = op(v, **own)
    ran = profile(lambda: op(v, **own))
    assert (explanation.path, explanation.kernels, explanation.pytorch) == ("chain", "CUDA", ())
    assert ran.computing == []
    assert all("fusedconv" in name for name in ran.kernels), ran.kernels
    assert requested_bytes(lambda: op(v, **own)) == output.nbytes + explanation.workspace_bytes


@conv_rows
def test_no_call_is_faster_than_its_floor(row: Row) -> None:
    """By the card's own rates, where the call is large enough to fill it."""
    call = draw(row, Case(64, (8, 64), (128, 128), groups=8, pool=(4, 4)), torch.float32)
    explanation, run_it = explained(row, call, IEEE)
    floor = explanation.floor_seconds()
    assert floor is not None
    times = interleaved({"call": run_it}, rounds=5, warmup=2, device=call.x.device)
    assert 0.8 * floor < min(time["call"] for time in times) < 20 * floor
