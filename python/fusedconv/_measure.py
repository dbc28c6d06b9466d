"""Errors, times and peak memory, as ``python -m fusedconv`` and the benchmarks measure them."""

from __future__ import annotations

import ctypes
import gc
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

Call = Callable[[], object]

FLUSH_BYTES = 128 << 20  # more than the last-level cache of common CPUs and GPUs


def relative_error(output: Tensor, reference: Tensor) -> float:
    """``||output - reference|| / ||reference||`` in float64."""
    reference = reference.double()
    return float(torch.linalg.vector_norm(output.double() - reference) / torch.linalg.vector_norm(reference))


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def _cpu_seconds(call: Call, device: torch.device, flush: Call) -> float:
    flush()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# For about 1 ms the device is kept busy while the host queues a call; where that was too short, for 17.
_BUSY_CYCLES = 1 << 21, 1 << 25


def _cuda_seconds(call: Call, device: torch.device, flush: Call) -> float:
    """The device's own time: it starts only when the host has queued all of the call, unless the call itself waits."""
    with torch.cuda.device(device):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for cycles in _BUSY_CYCLES:
            flush()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            start.record()
            call()
            end.record()
            waited_for_host = start.query()  # type: ignore[no-untyped-call]
            end.synchronize()
            if not waited_for_host:
                break
    return float(start.elapsed_time(end)) / 1e3


def _give_back_memory() -> bool:
    """What earlier calls freed goes from glibc's heap back to the system; False where there is no glibc."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return False
    return True


def _flush(buffer: Tensor, index: int) -> None:
    if buffer.device.type == "cpu":  # by one thread: a pool's idle threads would spin on into the next call
        ctypes.memset(buffer.data_ptr(), index % 256, buffer.numel())
    else:
        buffer.fill_(index % 256)


def interleaved(
    calls: Mapping[str, Call],
    rounds: int,
    warmup: int,
    device: torch.device,
    cold_memory: bool = True,
    flush_bytes: int = FLUSH_BYTES,
) -> Iterator[dict[str, float]]:
    """Yields one dictionary of seconds a round, in which every call runs once; warm-up rounds yield nothing.

    The calls take turns, in another random order each round, so that a change of the machine's speed meets all of
    them, and none always follows one whose threads are still awake. A buffer of ``flush_bytes`` is written before each
    call, so that none finds its data in a cache. With ``cold_memory`` none finds, by chance, pages that another one
    left in the C library's heap: large tensors cost several times as much without such pages as with them. On CUDA a
    time is the device's, without the host's.
    """
    seconds = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    buffer = torch.empty(flush_bytes, dtype=torch.uint8, device=device)
    order = random.Random(0)
    for index in range(warmup + rounds):
        times = {}
        for name in order.sample(list(calls), len(calls)):
            if cold_memory and device.type == "cpu":
                _give_back_memory()
            times[name] = seconds(calls[name], device, partial(_flush, buffer, index))
        if index >= warmup:
            yield times


def _fastest_seconds(call: Call, device: torch.device) -> float:
    return min(times["call"] for times in interleaved({"call": call}, rounds=5, warmup=2, device=device))


@cache
def copy_rate(device: torch.device, threads: int) -> float:
    """Bytes a second that a large copy reads and writes. ``threads`` tells results apart: those that PyTorch has now."""
    source = torch.ones(1 << 26, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest_seconds(lambda: target.copy_(source), device)


_MOST_SECONDS = 0.3  # of one product


@cache
def product_rate(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """Operations a second, two a product, in a large ``torch.mm``; ``threads`` as in ``copy_rate``.

    A CPU without instructions for a half precision is faster in float32, which its convs may use, and ``torch.mm`` takes
    minutes for a large product: a smaller one tells.
    """
    if device.type != "cpu":
        return _rate_of_mm(8192 if dtype != torch.float64 else 2048, device, dtype)
    n = 1024
    if dtype.itemsize > 2:
        return _rate_of_mm(n, device, dtype)
    rate = _rate_of_mm(128, device, dtype)
    if 2 * n**3 < _MOST_SECONDS * rate:
        rate = max(rate, _rate_of_mm(n, device, dtype))
    return max(rate, product_rate(device, torch.float32, threads))


def _rate_of_mm(n: int, device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator(device)  # the program's own random numbers stay what they are
    a, b = torch.rand(2, n, n, device=device, dtype=dtype, generator=generator)
    out = torch.empty_like(a)
    return 2 * n**3 / _fastest_seconds(lambda: torch.mm(a, b, out=out), device)


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Bytes by which the memory in use grows at most during ``call``, its result included.

    On CUDA they are those of PyTorch's allocator. On the CPU they are the growth of the process's resident set to its
    high-water mark, so that memory counts no matter who allocated it. Linux only; elsewhere None. Run the
    call once before: one-time allocations are not meant.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not _give_back_memory():  # reusing it would not show
        return None
    try:
        Path("/proc/self/clear_refs").write_text("5")  # set the high-water mark to what is resident now
        before = _resident_high_water()
        result = call()
        peak = _resident_high_water()
        del result
    except OSError:
        return None
    return peak - before


def _resident_high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
