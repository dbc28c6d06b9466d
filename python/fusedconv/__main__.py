"""``python -m fusedconv``: runs the four reference models here, checks each against float64, and prints a table."""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import fusedconv

from ._measure import device_name, interleaved, peak_memory, relative_error
from .workloads import WORKLOADS, Workload

ERROR_BOUND = 1e-6
ROUNDS = 15
WARMUP = 2
SECONDS_A_MODEL = 8.0  # a slow machine makes fewer rounds
STEPS_A_MODEL = 3 + ROUNDS  # check, two memories, rounds
LARGEST_BATCH = 2**31 - 1  # no size overflows

HOW = (
    "error: ||y - reference|| / ||reference||, the reference is plain PyTorch in float64. eager: the plain PyTorch model "
    "in float32 on the same contiguous input. times: {times}, medians of up to {rounds} rounds in which both take turns, "
    "caches flushed before each run. memory: {memory} at its peak during one warm call, the output included."
)
TIMES = {"cpu": "from call to return", "cuda": "the device's, without the host's"}
MEMORY = {
    "cpu": "growth of the process's resident set (Linux only)",
    "cuda": "bytes taken from PyTorch's CUDA allocator",
}


@dataclass(frozen=True)
class Result:
    """One row of the table. Times are in seconds, memory in bytes."""

    id: int
    model: str
    input: tuple[int, ...]
    output: tuple[int, ...]
    error: float
    eager_error: float
    time: float
    eager_time: float
    speedup: float
    memory: int | None
    eager_memory: int | None


def measure(workload: Workload, batch: int, device: torch.device) -> Iterator[Result | None]:
    """Yields None after each step of the work (STEPS_A_MODEL at most), and the result at the end."""
    module = workload.build().to(device)
    plain = workload.plain(module)
    input = workload.input(batch).to(device)

    output, eager = module(input), plain(input)
    reference = copy.deepcopy(plain).double()(input.double())
    error, eager_error = relative_error(output, reference), relative_error(eager, reference)
    shape = tuple(output.shape)
    del output, eager, reference
    yield None

    memory = peak_memory(lambda: module(input), device)
    yield None
    eager_memory = peak_memory(lambda: plain(input), device)
    yield None

    times, eager_times = [], []
    deadline = time.monotonic() + SECONDS_A_MODEL
    calls = {"fused": lambda: module(input), "eager": lambda: plain(input)}
    for seconds in interleaved(calls, ROUNDS, WARMUP, device):
        times.append(seconds["fused"])
        eager_times.append(seconds["eager"])
        yield None
        if len(times) >= 3 and time.monotonic() > deadline:
            break
    fused_time, eager_time = statistics.median(times), statistics.median(eager_times)
    yield Result(
        id=workload.id,
        model=workload.name,
        input=tuple(input.shape),
        output=shape,
        error=error,
        eager_error=eager_error,
        time=fused_time,
        eager_time=eager_time,
        speedup=eager_time / fused_time,
        memory=memory,
        eager_memory=eager_memory,
    )


def run(batch: int, device: torch.device) -> list[Result]:
    """Measures every workload, with a progress bar on stderr."""
    results = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(WORKLOADS) * STEPS_A_MODEL)
        for index, workload in enumerate(WORKLOADS):
            progress.update(task, description=workload.name, completed=index * STEPS_A_MODEL)
            for result in measure(workload, batch, device):
                if result is None:
                    progress.advance(task)
                else:
                    results.append(result)
    return results


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.1f}"


def _dimensions(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def table(results: list[Result], title: str) -> Table:
    """At most 80 columns wide."""
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    grid.add_column("model\ninput -> output", no_wrap=True)
    for column in ("error\n", "time\nms", "eager\nms", "speed\nup", "memory\nMB", "eager\nMB"):
        grid.add_column(column, justify="right", no_wrap=True)
    for r in results:
        grid.add_row(
            f"{r.model}\n{_dimensions(r.input)} -> {_dimensions(r.output)}",
            f"[{'green' if r.error <= ERROR_BOUND else 'red'}]{r.error:.1e}[/]",
            f"{r.time * 1e3:.2f}",
            f"{r.eager_time * 1e3:.2f}",
            f"{r.speedup:.2f}",
            _megabytes(r.memory),
            _megabytes(r.eager_memory),
        )
    return grid


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in MEMORY or (
        device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    ):
        raise argparse.ArgumentTypeError(f"there is no device {text!r} here that is a CPU or CUDA")
    return device


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fusedconv", description=__doc__)
    parser.add_argument("--batch", type=int, help="samples in a batch (128 on a GPU, 8 on a CPU)")
    parser.add_argument("--device", type=_device, help="cpu, cuda or cuda:N (a GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    options = parser.parse_args(arguments)
    if options.device is None:
        options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.batch is None:
        options.batch = 128 if options.device.type == "cuda" else 8
    if not 1 <= options.batch <= LARGEST_BATCH:
        parser.error(f"--batch must be from 1 to {LARGEST_BATCH}, but is {options.batch}")
    return options


def _is_out_of_memory(error: Exception) -> bool:
    """On a CPU PyTorch and our kernels say so only in words."""
    is_cpus = any(words in str(error) for words in ("DefaultCPUAllocator", "fusedconv: cannot allocate"))
    return is_cpus or isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, 1 if an error is larger than ERROR_BOUND, or 2 if memory does not suffice."""
    options = parse(arguments)
    device: torch.device = options.device
    try:
        with torch.inference_mode(), fusedconv.float32_precision("ieee"):
            results = run(options.batch, device)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        print(f"not enough memory on {device} for --batch {options.batch}", file=sys.stderr)
        return 2
    environment = {
        "fusedconv": fusedconv.__version__,
        "torch": torch.__version__,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "batch": options.batch,
        "precision": "float32, ieee",
    }
    if options.json:
        print(json.dumps({**environment, "results": [asdict(result) for result in results]}, indent=2))
    else:
        console = Console()
        console.print(table(results, ", ".join(f"{name} {value}" for name, value in environment.items())))
        how = HOW.format(times=TIMES[device.type], rounds=ROUNDS, memory=MEMORY[device.type])
        console.print(how, style="dim", highlight=False)
    wrong = [result.model for result in results if not result.error <= ERROR_BOUND]
    if wrong:
        print(f"error above {ERROR_BOUND:.0e}: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _main_to_pipe() -> int:
    """For a reader that closes the pipe, such as ``head``."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python flushes when it ends
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(_main_to_pipe())
