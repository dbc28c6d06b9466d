"""Speed on the CPU: ``python bench/cpu.py`` prints the table and writes the raw numbers into bench/results/.

Contestants run in turns in one process, in random order, with caches flushed and freed memory given back before each
run; a time is the median of the rounds.
They are the fused module, eager PyTorch, torch.compile (default and max-autotune) and, where they are installed,
ONNX Runtime (with onnx and onnxscript) and OpenVINO, each of PyTorch's in NCHW and in channels_last. Every
contestant's output is checked against float64. ``--sizes`` compares with eager over batches and the small sizes.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import logging
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from _report import save
from fusedconv._measure import Call, interleaved, relative_error
from fusedconv.workloads import OTHER_WORKLOADS, SMALL_WORKLOADS, WORKLOADS, Workload

CPU = torch.device("cpu")
REQUIRED = {57: (6.0, 1.1), 21: (5.0, 3.0), 85: (7.0, 2.5), 92: (4.5, 3.0)}  # over eager, over torch.compile
AIM = {57: 1.3, 21: 2.0, 85: 3.0, 92: 4.0}  # over the best of all
ERROR_BOUND = 1e-6
BATCHES = (1, 2, 4, 8, 16, 32)

stdout = Console(width=120)
stderr = Console(stderr=True)
Contestant = Callable[[], Tensor]


def channels_last(module: nn.Module, input: Tensor) -> tuple[nn.Module, Tensor]:
    module = copy.deepcopy(module)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module, input.contiguous(memory_format=torch.channels_last)


def bind(module: Callable[[Tensor], Tensor], input: Tensor) -> Contestant:
    return lambda: module(input)


def onnxruntime(module: nn.Module, input: Tensor, threads: int) -> Contestant:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = str(Path(folder, "model.onnx"))
        torch.onnx.export(module, (input,), path, input_names=["input"], dynamo=True, verbose=False)
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"input": input.numpy()}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def openvino(module: nn.Module, input: Tensor, threads: int) -> Contestant:
    import openvino as ov

    config = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = ov.convert_model(module, example_input=input, input=[tuple(input.shape)])
    request = ov.Core().compile_model(model, "CPU", config).create_infer_request()
    feed = {0: input.numpy()}
    return lambda: torch.from_numpy(request.infer(feed, share_inputs=True)[0])


PEERS = {
    "onnxruntime": (onnxruntime, ("onnxruntime", "onnx", "onnxscript")),
    "openvino": (openvino, ("openvino",)),
}


def contestants(workload: Workload, batch: int, options: argparse.Namespace) -> dict[str, Contestant]:
    """By name; the part of the name before the comma is its kind."""
    fused, input = workload.build(), workload.input(batch)
    plain = workload.plain(fused)
    calls = {
        "fused, NCHW": bind(fused, input),
        "fused, channels_last": bind(*channels_last(fused, input)),
    }
    formats = {"NCHW": (plain, input), "channels_last": channels_last(plain, input)}
    for format, (module, x) in formats.items():
        calls[f"eager, {format}"] = bind(module, x)
        for mode in ("default", "max-autotune") if options.compile else ():
            calls[f"compile, {mode}, {format}"] = bind(torch.compile(module, mode=mode, dynamic=False), x)
    for name, (make, packages) in PEERS.items():
        if options.peers and all(importlib.util.find_spec(package) for package in packages):
            calls[f"{name}, NCHW"] = make(plain, input, options.threads)
    return calls


def reference(workload: Workload, batch: int) -> Tensor:
    output: Tensor = workload.plain(workload.build()).double()(workload.input(batch).double())
    return output


def medians(calls: dict[str, Contestant], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Median, fastest and all times in milliseconds, by contestant."""
    untyped: dict[str, Call] = dict(calls)
    runs = list(interleaved(untyped, options.rounds, 3, CPU, cold_memory=options.cold_memory))
    times = {name: [round(1e3 * run[name], 4) for run in runs] for name in calls}
    return {
        name: {"ms": statistics.median(all_ms), "min_ms": min(all_ms), "all_ms": all_ms}
        for name, all_ms in times.items()
    }


def mm_gflops() -> float:
    """The rate of a large float32 ``torch.mm``: what this machine's FMA units reach in practice."""
    n = 2048
    a, b = torch.rand(n, n), torch.rand(n, n)
    out = torch.empty(n, n)
    runs = list(interleaved({"mm": lambda: torch.mm(a, b, out=out)}, rounds=7, warmup=2, device=CPU))
    return 2 * n**3 / min(run["mm"] for run in runs) / 1e9


def best(result: dict[str, dict[str, Any]], *kinds: str) -> float:
    """The smallest median among the contestants of these kinds; NaN if there is none."""
    return min((r["ms"] for name, r in result.items() if name.split(",")[0] in kinds), default=math.nan)


def holds(ratio: float, least: float | None) -> str:
    if math.isnan(ratio):
        return "-"
    if least is None:
        return f"{ratio:.2f}"
    colour = "green" if ratio >= least else "red"
    return f"[{colour}]{ratio:.2f} ({'>=' if ratio >= least else 'under'} {least:g})[/]"


def speed_table(options: argparse.Namespace) -> dict[str, Any]:
    gflops, origin = (
        (options.fma_gflops, "given") if options.fma_gflops else (mm_gflops(), "torch.mm, 2048^3")
    )
    stdout.print(f"FMA rate for the floor: {gflops:.0f} GFLOP/s ({origin})")
    raw: dict[str, Any] = {"fma_gflops": gflops, "fma_gflops_from": origin, "workloads": {}}
    summary = Table(title=f"batch {options.batch}, float32, {options.threads} threads", title_justify="left")
    for column in (
        "model",
        "fused, ms",
        "over eager",
        "over eager, channels_last",
        "over torch.compile",
        "over the best of all",
        "error",
        "floor",
    ):
        summary.add_column(column, justify="left" if column == "model" else "right")
    for workload in track(
        chosen(options, (*WORKLOADS, *OTHER_WORKLOADS)),
        description="workloads",
        console=stderr,
        transient=True,
    ):
        torch._dynamo.reset()
        expected = reference(workload, options.batch)
        calls = contestants(workload, options.batch, options)
        errors = {name: relative_error(call(), expected) for name, call in calls.items()}
        del expected
        result = medians(calls, options)
        floor_ms = workload.operations(options.batch) / gflops / 1e6
        for name, error in errors.items():
            result[name]["error"] = error
        raw["workloads"][workload.id] = {"model": workload.name, "floor_ms": floor_ms, "contestants": result}

        detail = Table(title=f"{workload.id} {workload.name}", title_justify="left")
        for column in ("contestant", "median, ms", "fastest, ms", "fused is faster by", "error"):
            detail.add_column(column, justify="left" if column == "contestant" else "right")
        ours = result["fused, NCHW"]
        for name, r in sorted(result.items(), key=lambda item: item[1]["ms"]):
            numbers = (r["ms"], r["min_ms"], r["ms"] / ours["ms"])
            detail.add_row(name, *(f"{number:.2f}" for number in numbers), f"{r['error']:.1e}")
        stdout.print(detail)

        over_eager, over_compile = REQUIRED.get(workload.id, (None, None))
        peers = ("eager", "compile", *PEERS)
        summary.add_row(
            str(workload.id),
            f"{ours['ms']:.2f}",
            holds(result["eager, NCHW"]["ms"] / ours["ms"], over_eager),
            f"{result['eager, channels_last']['ms'] / ours['ms']:.2f}",
            holds(best(result, "compile") / ours["ms"], over_compile),
            holds(best(result, *peers) / ours["ms"], AIM.get(workload.id)),
            f"[{'green' if ours['error'] <= ERROR_BOUND else 'red'}]{ours['error']:.1e}[/]",
            f"{floor_ms:.2f} ms, {floor_ms / ours['ms']:.0%}",
        )
    stdout.print(summary)
    stdout.print(
        "eager in NCHW, as the workload is given, and in channels_last; of torch.compile and of all the best mode and "
        "layout; required ratios in brackets, for the best of all: the aim"
    )
    return raw


def size_table(options: argparse.Namespace) -> dict[str, Any]:
    """The fused module against eager, which must never be faster."""
    table = Table(title=f"eager's time over ours, float32, {options.threads} threads", title_justify="left")
    table.add_column("model and input")
    for batch in BATCHES:
        table.add_column(f"batch {batch}", justify="right")
    raw: dict[str, Any] = {}
    workloads = chosen(options, (*WORKLOADS, *OTHER_WORKLOADS, *SMALL_WORKLOADS))
    for workload in track(workloads, description="sizes", console=stderr, transient=True):
        shape = f"{workload.channels[0]}->{workload.channels[1]}, {workload.size}x{workload.size}"
        cells = []
        for batch in BATCHES:
            fused, input = workload.build(), workload.input(batch)
            plain = workload.plain(fused)
            calls = {"fused": bind(fused, input), "eager": bind(plain, input)}
            calls["eager, channels_last"] = bind(*channels_last(plain, input))
            result = medians(calls, options)
            ratio = best(result, "eager") / result["fused"]["ms"]
            raw[f"{workload.id}, {shape}, batch {batch}"] = {"ratio": ratio, "contestants": result}
            cells.append(f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}[/]")
        table.add_row(f"{workload.id}, {shape}", *cells)
    stdout.print(table)
    return {"sizes": raw}


def chosen(options: argparse.Namespace, workloads: Iterable[Workload]) -> list[Workload]:
    return [workload for workload in workloads if not options.only or workload.id in options.only]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", action="store_true", help="batches 1 to 32 and the small sizes against eager"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=51, help="timed runs of each contestant, after 3 for warm-up"
    )
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        metavar="ID",
        help="only 57, 21, 85, 92, or 0: ConvGroupNormSiLU",
    )
    parser.add_argument("--fma-gflops", type=float, help="the machine's FMA rate, instead of torch.mm's")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    parser.add_argument(
        "--no-peers", dest="peers", action="store_false", help="without ONNX Runtime and OpenVINO"
    )
    parser.add_argument(
        "--keep-memory",
        dest="cold_memory",
        action="store_false",
        help="let calls find pages that others freed",
    )
    parser.add_argument("--output", type=Path, help="file for the raw numbers, in place of bench/results/...")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.no_grad():
        raw = size_table(options) if options.sizes else speed_table(options)
    peers = {name: sys.modules[name].__version__ for name in PEERS if name in sys.modules}
    raw = {
        "batch": options.batch,
        "rounds": options.rounds,
        "cold_memory": options.cold_memory,
        **peers,
        **raw,
    }
    stdout.print(f"raw numbers: {save('cpu-sizes' if options.sizes else 'cpu', raw, options.output)}")


if __name__ == "__main__":
    main()
