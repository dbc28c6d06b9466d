"""Speed on the CPU: ``python bench/cpu.py`` prints the table and writes the raw numbers into bench/results/.

Contestants run in turns in one process, in random order, with caches flushed and freed memory given back before each
run; a time is the median of the rounds.
They are the fused module, eager PyTorch, torch.compile (default and max-autotune) and, where they are installed,
ONNX Runtime (with onnx and onnxscript) and OpenVINO, each of PyTorch's in NCHW and in channels_last. Every
contestant's output is checked against float64. ``--sizes`` compares with eager over batches and the small sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from _contestants import (
    Contest,
    Contestant,
    best,
    bind,
    both_layouts,
    chosen,
    compiled,
    headline,
    medians,
    reference,
)
from _report import CPU, coloured, grid, holds, save, stdout
from fusedconv._measure import product_rate
from fusedconv.workloads import OTHER_WORKLOADS, SMALL_WORKLOADS, WORKLOADS

REQUIRED = {57: (6.0, 1.1), 21: (5.0, 3.0), 85: (7.0, 2.5), 92: (4.5, 3.0)}  # over eager, over torch.compile
AIM = {57: 1.3, 21: 2.0, 85: 3.0, 92: 4.0}  # over the best of all
ERROR_BOUND = 1e-6
BATCHES = (1, 2, 4, 8, 16, 32)

stderr = Console(stderr=True)


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


def contestants(
    fused: nn.Module, plain: nn.Module, input: Tensor, options: argparse.Namespace
) -> dict[str, Contestant]:
    calls = both_layouts("fused", fused, input) | both_layouts("eager", plain, input)
    for mode in ("default", "max-autotune") if options.compile else ():
        calls |= compiled(mode, ("NCHW", "channels_last"), plain, input)
    for name, (make, packages) in PEERS.items():
        if options.peers and all(importlib.util.find_spec(package) for package in packages):
            calls[f"{name}, NCHW"] = make(plain, input, options.threads)
    return calls


def speed_table(options: argparse.Namespace) -> dict[str, Any]:
    gflops, origin = (
        (options.fma_gflops, "given")
        if options.fma_gflops
        else (product_rate(CPU, torch.float32, options.threads) / 1e9, "torch.mm, 2048^3")
    )
    stdout.print(f"FMA rate for the floor: {gflops:.0f} GFLOP/s ({origin})")
    raw: dict[str, Any] = {"fma_gflops": gflops, "fma_gflops_from": origin, "workloads": {}}
    summary = grid(
        f"batch {options.batch}, float32, {options.threads} threads",
        "model",
        "fused, ms",
        "over eager",
        "over eager, channels_last",
        "over torch.compile",
        "over the best of all",
        "error",
        "floor",
    )
    for workload in track(
        chosen(options, (*WORKLOADS, *OTHER_WORKLOADS)),
        description="workloads",
        console=stderr,
        transient=True,
    ):
        torch._dynamo.reset()
        fused, input = workload.build(), workload.input(options.batch)
        plain = workload.plain(fused)
        contest = Contest(reference(plain, input), CPU, options.cold_memory)
        contest.enter(contestants(fused, plain, input, options))
        result = contest.run(options.rounds)
        floor_ms = workload.operations(options.batch) / gflops / 1e6
        raw["workloads"][workload.id] = {"model": workload.name, "floor_ms": floor_ms, "contestants": result}

        detail = grid(
            f"{workload.id} {workload.name}",
            "contestant",
            "median, ms",
            "fastest, ms",
            "fused is faster by",
            "error",
            left=("contestant",),
        )
        ours = result["fused, NCHW"]
        failed = {name: r["failed"] for name, r in result.items() if "failed" in r}
        for name, r in sorted(result.items(), key=lambda item: item[1].get("ms", 0)):
            if name not in failed:
                numbers = (r["ms"], r["min_ms"], r["ms"] / ours["ms"])
                detail.add_row(name, *(f"{number:.2f}" for number in numbers), f"{r['error']:.1e}")
        stdout.print(detail)
        for name, why in failed.items():
            stdout.print(f"{name} failed: {headline(why)}", markup=False)

        over_eager, over_compile = REQUIRED.get(workload.id, (None, None))
        peers = ("eager", "compile", *PEERS)
        summary.add_row(
            str(workload.id),
            f"{ours['ms']:.2f}",
            holds(best(result, "eager, NCHW") / ours["ms"], over_eager),
            f"{best(result, 'eager, channels_last') / ours['ms']:.2f}",
            holds(best(result, "compile") / ours["ms"], over_compile),
            holds(best(result, *peers) / ours["ms"], AIM.get(workload.id)),
            coloured(f"{ours['error']:.1e}", ours["error"] <= ERROR_BOUND),
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
    columns = (f"batch {batch}" for batch in BATCHES)
    table = grid(
        f"eager's time over ours, float32, {options.threads} threads",
        "model and input",
        *columns,
        left=("model and input",),
    )
    raw: dict[str, Any] = {}
    workloads = chosen(options, (*WORKLOADS, *OTHER_WORKLOADS, *SMALL_WORKLOADS))
    for workload in track(workloads, description="sizes", console=stderr, transient=True):
        shape = f"{workload.channels[0]}->{workload.channels[1]}, {workload.size}x{workload.size}"
        cells = []
        for batch in BATCHES:
            fused, input = workload.build(), workload.input(batch)
            calls = {"fused": bind(fused, input), **both_layouts("eager", workload.plain(fused), input)}
            result = medians(calls, options.rounds, CPU, options.cold_memory)
            ratio = best(result, "eager") / result["fused"]["ms"]
            raw[f"{workload.id}, {shape}, batch {batch}"] = {"ratio": ratio, "contestants": result}
            cells.append(coloured(f"{ratio:.2f}", ratio >= 1))
        table.add_row(f"{workload.id}, {shape}", *cells)
    stdout.print(table)
    return {"sizes": raw}


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
