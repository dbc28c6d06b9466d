"""What a call of a conv's operator on CUDA launches and allocates; streams, graphs, threads, sizes and errors."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import gc
import re
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor

import fusedconv
from chains_table import CONV_ROWS, Row, reference_models
from cuda_conv import (
    BF16,
    IEEE,
    LAYOUTS,
    MODES,
    SOURCE,
    Call,
    Case,
    Mode,
    Runner,
    call_again,
    draw,
    forget,
    hold,
    poisoned,
)
from fusedconv import _C
from helpers import assert_close, new_process, profile, same_bits

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("source")]
conv_rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
modes = pytest.mark.parametrize("mode", MODES, ids=str)
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
direct_only = pytest.mark.usefixtures("direct_path")
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def stages(row: Row) -> list[str]:
    """Words that the names of the row's kernels hold."""
    return row.chain.replace("group_norm", "groupnorm").replace("max_pool", "maxpool").split("_")


# ---- launches and memory of the reference workloads ----------------------------------------------


@direct_only
@layouts
@modes
@conv_rows
def test_reference_workloads_run_few_kernels_of_ours(
    run: Runner, row: Row, mode: Mode, layout: torch.memory_format
) -> None:
    """No operator of PyTorch but allocation. Names tell what runs."""
    forget()
    fused, _, x = reference_models(row)
    fused = fused.to("cuda", mode.dtype)
    x = torch.cat([x, x]).to("cuda", mode.dtype).contiguous(memory_format=layout)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), precision_of(mode):
            fused(x)
            ran = profile(lambda: fused(x))
        assert any("fusedconv::" in name for name in ran.operators), ran
        assert ran.computing == []
        # Packed operands, and one pass of the conv. A pooled chain has its statistics and its end behind it; elsewhere a
        # norm takes a first pass and the statistics, unless samples stay on chip.
        passes_once = not row.has_norm or (torch.cuda.get_device_capability() == (9, 0) and SOURCE != "sm_80")
        assert len(ran.kernels) == (2 if passes_once and not row.has_pool else 4), ran.kernels
        assert all("fusedconv" in name for name in ran.kernels), ran.kernels
    run.look(row, "direct")
    names = " ".join(ran.kernels)
    assert re.search(r"sm_?(80|90a)", names, re.IGNORECASE), names
    assert re.search(mode.in_kernel, names), names
    for word in stages(row):
        assert word in names.lower(), f"{word} in {names}"


def precision_of(mode: Mode) -> fusedconv.float32_precision | nullcontext[None]:
    return fusedconv.float32_precision(mode.precision) if mode.precision else nullcontext()


@direct_only
@layouts
@conv_rows
def test_memory_of_the_reference_workloads(run: Runner, row: Row, layout: torch.memory_format) -> None:
    """Beside the output, the packed input and under a tenth of what the conv's output would take; nothing stays."""
    fused, _, one = reference_models(row)
    fused = fused.cuda()
    x = torch.rand(128, *one.shape[1:], device="cuda").contiguous(memory_format=layout)
    with torch.no_grad():
        y = fused(x)
        run.look(row, "direct")
        del y
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = fused(x)
    extra = torch.cuda.max_memory_allocated() - before - y.numel() * y.element_size()
    packed = 1.4 * x.numel() * x.element_size()  # with the rows that panels share
    conv = 128 * row.reference["out_channels"] * (row.reference["size"] - 2) ** 2 * 4
    assert extra < packed + 0.1 * conv, f"{extra / 1e6:.1f} MB, the conv's output has {conv / 1e6:.0f}"
    del y
    assert torch.cuda.memory_allocated() == before


# ---- sizes ---------------------------------------------------------------------------------------


@direct_only
@pytest.mark.parametrize(
    ("padding", "dilation", "side", "reason"),
    [
        (2**31 - 1, 2**31 - 1, 5, "dilation"),
        (2**30, 2**30, 5, "dilation"),
        (2**28, 1, 2**29 + 3, "padding"),
    ],
)
def test_no_plan_overflows(padding: int, dilation: int, side: int, reason: str) -> None:
    """A tile is planned in 32 bits; what could exceed them is left to PyTorch, whatever it makes of it."""
    numbers = (0, 1e-5, (1, 1), 0.0, 1.0)
    input = (_C.FLOAT32, [1, 8, 5, 5], [200, 25, 5, 1])
    weight = (_C.FLOAT32, [8, 8, 3, 3], [72, 9, 3, 1])
    output = (_C.FLOAT32, [1, 8, side, side], [8 * side**2, side**2, side, 1])
    conv = (weight, (1, 1), 2 * (padding,), 2 * (dilation,), 1, False)
    tensors = [("input", _C.FLOAT32), ("weight", _C.FLOAT32)]
    launch = _C.Launch("relu_hardswish", tensors, input, conv, numbers, output)
    assert str(launch.prepare_cuda(torch.cuda.current_device())) == f"two-step, {reason}"


@pytest.mark.skipif(SOURCE != "best", reason="a source is asked for")
@pytest.mark.parametrize(
    ("chain", "channels", "kernel", "size", "tf32", "path"),
    [
        ("relu_hardswish", (64, 32), (3, 3), (64, 64), False, "direct"),
        ("relu_hardswish", (65, 32), (1, 1), (64, 64), False, "two-step"),
        ("relu_hardswish", (16, 32), (7, 7), (64, 64), False, "two-step"),
        ("relu_hardswish", (16, 32), (7, 7), (64, 64), True, "direct"),
        ("relu_hardswish", (1, 8), (7, 1), (4096, 1), False, "two-step, memory"),
        ("group_norm_scale_max_pool_clamp", (3, 16), (3, 3), (32, 32), False, "two-step, a small map"),
        ("group_norm_scale_max_pool_clamp", (8, 32), (3, 3), (64, 64), False, "direct"),
        ("bias_scale_sigmoid_group_norm", (32, 32), (3, 3), (64, 64), False, "direct"),
        ("bias_scale_sigmoid_group_norm", (33, 32), (1, 1), (64, 64), False, "two-step"),
        ("bias_scale_sigmoid_group_norm", (64, 32), (3, 3), (64, 64), True, "direct"),
    ],
)
def test_the_faster_path(
    chain: str,
    channels: tuple[int, int],
    kernel: tuple[int, int],
    size: tuple[int, int],
    tf32: bool,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the channels, the products of a value, the passes and the memory, unless a source is asked for."""

    def contiguous(*shape: int) -> tuple[int, list[int], list[int]]:
        return _C.FLOAT32, list(shape), list(torch.empty(shape, device="meta").stride())

    def reason() -> str:
        numbers = (4, 1e-5, (1, 1), 0.0, 1.0)
        padding = (kernel[0] // 2, kernel[1] // 2)
        c_in, c_out = channels
        conv = (contiguous(c_out, c_in, *kernel), (1, 1), padding, (1, 1), 1, tf32)
        own = [name for name in ("bias", "scale") if name in chain]
        tensors = [(name, _C.FLOAT32) for name in ("input", "weight", *own)]
        launch = _C.Launch(
            chain, tensors, contiguous(1, c_in, *size), conv, numbers, contiguous(1, c_out, *size)
        )
        return str(launch.prepare_cuda(torch.cuda.current_device()))

    assert reason().startswith("direct")
    monkeypatch.delenv("FUSEDCONV_CUDA_SOURCE")
    assert reason().startswith(path)


def test_an_unknown_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCONV_CUDA_SOURCE", "sm90")
    forget()
    x, weight = torch.rand(1, 3, 5, 5, device="cuda"), torch.rand(4, 3, 3, 3, device="cuda")
    with pytest.raises(
        ValueError, match="FUSEDCONV_CUDA_SOURCE is 'sm90', not one of best, sm_90a, sm_80, none"
    ):
        torch.ops.fusedconv.conv2d_relu_hardswish(x, weight, None)


@conv_rows
def test_row_3_batch_of_zero(run: Runner, row: Row) -> None:
    for layout in LAYOUTS.values():
        call = draw(row, Case(0, (3, 8), (9, 10), groups=4), IEEE.dtype)
        x = call.x.contiguous(memory_format=layout)
        call = Call(x, call.weight, call.bias, call.own, call.geometry)
        shape = row.plain_conv(call.x, call.weight, call.bias, call.own).shape
        assert call_again(row, call).shape == shape
        assert profile(partial(call_again, row, call)).kernels == []


@layouts
@conv_rows
def test_row_4_batch_beyond_65535(run: Runner, row: Row, layout: torch.memory_format) -> None:
    call = draw(row, Case(70_000, (3, 8), (4, 3), padding=(1, 1), groups=2, pool=(2, 2)), IEEE.dtype)
    y = run(row, call, IEEE, layout=layout)
    for part in (slice(0, 100), slice(65_500, 65_600), slice(-100, None)):
        some = Call(call.x[part], call.weight, call.bias, call.own, call.geometry)
        hold(y[part], row, some, IEEE, part)


@pytest.mark.slow
@direct_only
@layouts
@conv_rows
def test_row_4_more_than_two_to_the_31st_elements(run: Runner, row: Row, layout: torch.memory_format) -> None:
    """In input and conv's output: samples at both ends and in the middle have the bits that they have alone."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free memory")
    batch = 270_000
    call = draw(row, Case(1, (8, 8), (33, 33), (2, 2), groups=4), BF16.dtype)
    x = torch.empty(batch, *call.x.shape[1:], device="cuda", dtype=BF16.dtype, memory_format=layout).normal_()
    assert batch * 8 * 32 * 32 > 2**31
    y = run(row, Call(x, call.weight, call.bias, call.own, call.geometry), BF16, layout=layout)
    for first in (0, batch // 2, batch - 3):
        part = slice(first, first + 3)
        some = Call(x[part].clone(), call.weight, call.bias, call.own, call.geometry)
        assert same_bits(run(row, some, BF16, layout=layout), y[part])
        hold(y[part], row, some, BF16, part)


@pytest.mark.slow
def test_row_4_a_sample_of_more_than_two_to_the_31st_elements(run: Runner) -> None:
    """Whichever path serves."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of free memory")
    row = CONV_ROWS[0]
    call = draw(row, Case(1, (1, 8), (16, 16), has_bias=False), BF16.dtype)
    x = torch.empty(1, 1, 16_400, 16_500, device="cuda", dtype=BF16.dtype).normal_()
    with torch.no_grad():
        y = row.conv_op(x, call.weight, None, {})
    assert y.numel() > 2**31
    for kept, rows in ((slice(0, 20), slice(0, 18)), (slice(-20, None), slice(-18, None))):
        reference = row.plain_conv(x[:, :, kept].double(), call.weight.double(), None, {})
        assert_close(y[:, :, rows], reference, reference.to(BF16.dtype), 9e-3, f"rows {rows}")


# ---- streams, threads, graphs, devices -----------------------------------------------------------


@conv_rows
def test_row_21_side_stream_and_memory_taken_again(run: Runner, row: Row) -> None:
    """The input and the workspaces are freed on a busy side stream, and their memory is overwritten at once."""
    call = draw(row, Case(4, (8, 32), (64, 65), groups=8), IEEE.dtype)
    right = run(row, call, IEEE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    sizes = [2**k for k in range(9, 25)]
    with torch.cuda.stream(stream):
        results = []
        for _ in range(5):
            torch.cuda._sleep(2_000_000)
            x = call.x.clone()
            results.append(call_again(row, Call(x, call.weight, call.bias, call.own, call.geometry)))
            del x
            for size in sizes:
                torch.full((size,), 255, dtype=torch.uint8, device="cuda")
            with torch.cuda.stream(torch.cuda.default_stream()):  # which waits for nothing
                for size in sizes:
                    torch.full((size,), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for y in results:
        assert same_bits(y, right)


@conv_rows
def test_one_launch_on_two_streams_at_a_time(run: Runner, row: Row) -> None:
    """No workspace is shared by calls that may overlap. Each fills the card: blocks that wait for one another have to be
    on it together."""
    calls = [draw(row, Case(48, (8, 32), (64, 65), groups=8), IEEE.dtype)]
    calls += [
        Call(-2 * calls[0].x + 1, *[getattr(calls[0], n) for n in ("weight", "bias", "own", "geometry")])
    ]
    right = [run(row, call, IEEE) for call in calls]
    torch.cuda.synchronize()
    gate, *streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(20):
        with torch.cuda.stream(gate):
            torch.cuda._sleep(500_000)
        results = []
        for stream, call in zip(streams, calls, strict=True):
            stream.wait_stream(gate)  # so that both start at once
            with torch.cuda.stream(stream):
                results.append(call_again(row, call))
        torch.cuda.synchronize()
        for y, expected in zip(results, right, strict=True):
            assert same_bits(y, expected)


@direct_only
@conv_rows
def test_a_graph_of_two_branches(run: Runner, row: Row) -> None:
    """Two calls at a time, each of which fills the card."""
    calls = [draw(row, Case(batch, (8, 32), (64, 65), groups=8), IEEE.dtype) for batch in (48, 50)]
    right = [run(row, call, IEEE) for call in calls]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there = call_again(row, calls[0])
        here = call_again(row, calls[1])
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(10):
        graph.replay()
    assert same_bits(there, right[0])
    assert same_bits(here, right[1])


@conv_rows
def test_row_23_several_threads(run: Runner, row: Row) -> None:
    """Four threads, each with a stream and an input of its own, call one operator that was never prepared."""
    call = draw(row, Case(4, (8, 32), (40, 65), groups=8), IEEE.dtype)
    calls = [call.map(partial(torch.mul, other=factor)) for factor in (1, -1, 2, 3)]
    right = [run(row, call, IEEE) for call in calls]
    torch.cuda.synchronize()
    forget()
    wrong: list[object] = []
    together = threading.Barrier(len(calls))

    def work(call: Call, expected: Tensor) -> None:
        try:
            stream = torch.cuda.Stream()
            together.wait()
            with torch.cuda.stream(stream):
                for i in range(20):
                    y = call_again(row, call)
                    stream.synchronize()
                    if not same_bits(y, expected):
                        wrong.append(f"call {i}")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, right, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


CAPTURE = """
import logging, sys
import torch
from chains_table import CONV_ROWS
from cuda_conv import IEEE, Call, Case, draw, hold

log = logging.getLogger("fusedconv")
log.setLevel(logging.DEBUG)
log.addHandler(logging.StreamHandler(sys.stdout))
for row in CONV_ROWS:
    call = draw(row, Case(2, (8, 32), (20, 35), groups=8), IEEE.dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = row.conv_op(call.x, call.weight, call.bias, call.own, precision="ieee")
    for factor in (1, -2, 3):
        call.x.normal_()
        call.weight.mul_(factor)
        graph.replay()
        hold(y, row, call, IEEE, "replayed")
    print("captured")
"""


@direct_only
def test_row_22_capture_without_a_warm_up() -> None:
    """The first call of each operator is captured: kernels are loaded before, and no call waits for the device.

    Replays read the input and the weights anew.
    """
    printed = new_process(CAPTURE)
    assert printed.count("captured") == len(CONV_ROWS)
    assert printed.count(": direct") == len(CONV_ROWS)


@conv_rows
def test_row_22_no_synchronising_call(run: Runner, row: Row) -> None:
    call = draw(row, Case(2, (8, 32), (20, 35), groups=8), IEEE.dtype)
    call_again(row, call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call_again(row, call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    done = torch.cuda.Event()
    call_again(row, call)
    done.record()
    assert not done.query(), "the call waited for the device"
    torch.cuda.synchronize()


@two_devices
@conv_rows
def test_row_20_the_tensors_device_is_used_and_the_current_one_kept(run: Runner, row: Row) -> None:
    call = draw(row, Case(2, (8, 32), (20, 35), groups=8), IEEE.dtype)
    right = run(row, call, IEEE)
    torch.cuda.set_device(0)
    there = call.map(lambda t: t.to("cuda:1"))
    with poisoned():
        y = call_again(row, there)
    assert y.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert same_bits(y.cpu(), right.cpu()) or (torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1))
    hold(y, row, there, IEEE, "the second device")


# ---- errors --------------------------------------------------------------------------------------

BROKEN_CONTEXT = """
import os
import torch
from chains_table import BY_NAME
from cuda_conv import IEEE, Case, draw, forget

row = BY_NAME["{chain}"]
call = draw(row, Case(2, (8, 32), (20, 35), groups=8), IEEE.dtype)
v = torch.randn(2, 32, 18, 33, device="cuda")
calls = (
    lambda: row.conv_op(call.x, call.weight, call.bias, call.own, precision="ieee"),
    lambda: row.chain_op(v, call.own),
)
with torch.no_grad():
    for run in calls:
        run()
        run()
    torch.cuda.synchronize()
    try:
        torch.arange(3, device="cuda")[torch.tensor([7], device="cuda")]  # a device-side assertion fails
        torch.cuda.synchronize()
    except RuntimeError:
        pass
    for _ in range(2):  # prepared before, and prepared here
        for run in calls:
            try:
                run()
            except RuntimeError as error:
                print("error:", str(error).splitlines()[0])
        forget()
os._exit(0)  # nothing can be torn down in this context
"""


@direct_only
@pytest.mark.parametrize("chain", ["relu_hardswish", "group_norm_tanh_hardswish_logsumexp"])
def test_an_error_of_a_launch_names_the_operator_and_says_what_cuda_says(chain: str) -> None:
    """In a context that a failed assertion has broken no launch succeeds."""
    printed = new_process(BROKEN_CONTEXT.replace("{chain}", chain))
    errors = [line for line in printed.splitlines() if line.startswith("error:")]
    assert len(errors) == 4, printed
    for text, operator in zip(errors, 2 * [f"conv2d_{chain}", chain], strict=True):
        assert f"fusedconv: {operator}:" in text, text
        assert "cudaErrorAssert" in text, text
        assert "device-side assert" in text, text


def test_an_unusable_device_is_an_error_that_says_so() -> None:
    assert "invalid device ordinal" in _C.cuda_status(torch.cuda.device_count())
