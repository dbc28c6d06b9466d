"""Speed of training on the CPU: ``python bench/train.py`` prints the table, and the raw numbers go into bench/results/.

A run is forward and backward: the gradients of the input and of all parameters, from a given gradient of the output.
Contestants, turns and times are as in ``bench/cpu.py``. Every contestant's gradients are checked against float64.
The error is the largest of theirs, each over the gradient's norm or, if that is larger, 1e-3 of the largest parameter
gradient's.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from _contestants import Contest, Contestant, Result, best, channels_last, chosen, headline
from _report import CPU, coloured, grid, holds, save, stdout
from fusedconv.workloads import OTHER_WORKLOADS, WORKLOADS, Workload

REQUIRED = (3.0, 1.5)  # over eager, over torch.compile
ERROR_BOUND = 3e-6

stderr = Console(stderr=True)


def step(module: nn.Module, input: Tensor, direction: Tensor) -> Contestant:
    input = input.detach().requires_grad_()
    leaves = [input, *module.parameters()]
    return lambda: torch.autograd.grad(module(input), leaves, direction)


def in_double(module: nn.Module, input: Tensor, direction: Tensor) -> Contestant:
    return step(copy.deepcopy(module).double(), input.double(), direction.double())


def gradient_error(gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    largest = max(float(right.norm()) for right in expected[1:])
    return max(
        float((gradient.double() - right).norm()) / max(float(right.norm()), 1e-3 * largest)
        for gradient, right in zip(gradients, expected, strict=True)
    )


def contestants(
    fused: nn.Module, plain: nn.Module, input: Tensor, direction: Tensor, compiles: bool
) -> dict[str, Contestant]:
    calls = {}
    for kind, module in {"fused": fused, "eager": plain, "compile": plain}.items():
        for layout, (model, x) in {
            "NCHW": (module, input),
            "channels_last": channels_last(module, input),
        }.items():
            if kind != "compile":
                calls[f"{kind}, {layout}"] = step(model, x, direction)
            elif compiles:
                calls[f"{kind}, {layout}"] = step(torch.compile(model, dynamic=False), x, direction)
    return calls


def print_detail(workload: Workload, result: dict[str, Result]) -> None:
    detail = grid(
        f"{workload.id} {workload.name}",
        "contestant",
        "median, ms",
        "fastest, ms",
        "error",
        left=("contestant",),
    )
    for name, r in sorted(result.items(), key=lambda item: item[1].get("ms", 0)):
        if "failed" in r:
            stdout.print(f"{name} failed: {headline(r['failed'])}", markup=False)
        else:
            detail.add_row(name, f"{r['ms']:.1f}", f"{r['min_ms']:.1f}", f"{r['error']:.1e}")
    stdout.print(detail)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21, help="timed runs of each, after 3 for warm-up")
    parser.add_argument("--only", type=int, nargs="+", metavar="ID", help="only 57, 21, 85, 92, or 0")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    parser.add_argument("--output", type=Path, help="file for the raw numbers, in place of bench/results/...")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    raw: dict[str, Any] = {}
    summary = grid(
        f"forward and backward, batch {options.batch}, float32, {options.threads} threads",
        "model",
        "fused, ms",
        "over eager",
        "over eager, channels_last",
        "over torch.compile",
        "fused, channels_last, ms",
        "error",
        "eager's error",
    )
    workloads = chosen(options, (*WORKLOADS, *OTHER_WORKLOADS))
    for workload in track(workloads, description="workloads", console=stderr, transient=True):
        torch._dynamo.reset()
        fused, input = workload.build(), workload.input(options.batch)
        plain = workload.plain(fused)
        with torch.no_grad():
            direction = torch.randn_like(fused(input))
        expected = in_double(plain, input, direction)()
        contest = Contest(expected, CPU, error=gradient_error)
        contest.enter(contestants(fused, plain, input, direction, options.compile))
        result = contest.run(options.rounds)
        raw[str(workload.id)] = {"model": workload.name, "contestants": result}
        print_detail(workload, result)
        ours = result["fused, NCHW"]
        over_eager, over_compile = REQUIRED
        summary.add_row(
            str(workload.id),
            f"{ours['ms']:.1f}",
            holds(best(result, "eager, NCHW") / ours["ms"], over_eager),
            f"{best(result, 'eager, channels_last') / ours['ms']:.2f}",
            holds(best(result, "compile") / ours["ms"], over_compile),
            f"{best(result, 'fused, channels_last'):.1f}",
            coloured(f"{ours['error']:.1e}", ours["error"] <= ERROR_BOUND),
            f"{result['eager, NCHW']['error']:.1e}",
        )
    stdout.print(summary)
    stdout.print(
        "medians; of torch.compile (default) the better layout; required ratios in brackets; errors in NCHW"
    )
    raw = {"batch": options.batch, "rounds": options.rounds, "workloads": raw}
    stdout.print(f"raw numbers: {save('train', raw, options.output)}")


if __name__ == "__main__":
    main()
