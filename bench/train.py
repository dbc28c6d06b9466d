"""Speed of training: ``python bench/train.py`` prints the tables and writes the raw numbers into bench/results/.

A run is forward and backward: the gradients of the input and of all parameters, from a given gradient of the output.
On a GPU if there is one, else on the CPU, or as ``--device`` says. Contestants, turns and times are as in
``bench/gpu.py`` and ``bench/cpu.py``. Every contestant's gradients are checked against float64, those under autocast
too. The error is the largest of theirs, each over the gradient's norm or, if that is larger, 1e-3 of the largest
parameter gradient's. On a GPU the peak memory of a step is taken as well, with the gradients and without what stands
before it.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import fusedconv
from _contestants import Contest, Contestant, Result, best, channels_last, chosen, fastest, headline
from _report import coloured, grid, holds, save, stdout
from fusedconv._measure import peak_memory
from fusedconv.workloads import OTHER_WORKLOADS, WORKLOADS, Workload

ERROR_BOUND = 3e-6
LARGEST_SHARE = 0.35  # of eager's peak memory
CHUNK = 16  # samples whose gradients in float64 are computed at once

stderr = Console(stderr=True)


@dataclass(frozen=True)
class Required:
    """So many times as fast as eager, and as torch.compile, by the model's id."""

    eager: float
    compile: Mapping[int, float]
    autocast: float | None = None  # over torch.compile's, both under autocast


REQUIRED = {
    "cpu": Required(3.0, dict.fromkeys((57, 21, 85, 92, 0), 1.5)),
    "cuda": Required(5.0, {57: 3.0, 21: 4.0, 85: 3.0, 92: 3.0}, autocast=3.0),
}
# Kinds of contestants on each device: what they are called, and in which modes they are compiled.
KINDS = {
    "cpu": ("fused", "eager", "compile default"),
    "cuda": (
        "fused ieee", "fused tf32", "fused default", "eager", "compile default", "compile max-autotune",
        "autocast fused", "autocast compile default",
    ),
}  # fmt: skip
LAYOUTS = ("NCHW", "channels_last")


# ---- contestants ----


def step(
    module: nn.Module, input: Tensor, direction: Tensor, autocast: bool = False, precision: str = "default"
) -> Contestant:
    input = input.detach().requires_grad_()
    leaves = [input, *module.parameters()]

    def run() -> Sequence[Tensor]:
        with (
            torch.autocast(input.device.type, torch.bfloat16, enabled=autocast),
            fusedconv.float32_precision(precision),
        ):
            output = module(input)
        return torch.autograd.grad(output, leaves, direction.to(output.dtype))

    return run


def contestant(
    kind: str, layout: str, fused: nn.Module, plain: nn.Module, input: Tensor, direction: Tensor
) -> Contestant:
    """Of one of the ``KINDS``."""
    words = kind.split()
    autocast = words[0] == "autocast"
    who, *rest = words[autocast:]
    module, x = fused if who == "fused" else plain, input
    if layout == "channels_last":
        module, x = channels_last(module, input)
    if who == "compile":
        module = torch.compile(module, mode=rest[0], dynamic=False)  # type: ignore[assignment]
    precision = rest[0] if who == "fused" and rest else "default"
    return step(module, x, direction, autocast, precision)


def named(kind: str, layout: str) -> str:
    """As ``_contestants`` calls it: a kind, then its variant."""
    who, _, rest = kind.partition(" ")
    return f"compile, {rest}, {layout}" if who == "compile" else f"{kind}, {layout}"


def contestants(
    kinds: Iterable[str], fused: nn.Module, plain: nn.Module, input: Tensor, direction: Tensor
) -> dict[str, Contestant]:
    return {
        named(kind, layout): contestant(kind, layout, fused, plain, input, direction)
        for kind in kinds
        for layout in LAYOUTS
    }


# ---- errors and memory ----


def in_double(module: nn.Module, input: Tensor, direction: Tensor) -> list[Tensor]:
    """The gradients in float64, of a few samples at a time: the parameters' add up."""
    module = copy.deepcopy(module).double()
    # PyTorch's own conv needs a GPU's memory for one sample only; cuDNN has no such limit.
    with torch.backends.cudnn.flags(enabled=False):
        parts = [
            step(module, x.double(), d.double())()
            for x, d in zip(input.split(CHUNK), direction.split(CHUNK), strict=True)
        ]
    inputs, *parameters = zip(*parts, strict=True)
    return [torch.cat(inputs), *[torch.stack(part).sum(0) for part in parameters]]


def gradient_error(gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    largest = max(float(right.norm()) for right in expected[1:])
    return max(
        float((gradient.double() - right).norm()) / max(float(right.norm()), 1e-3 * largest)
        for gradient, right in zip(gradients, expected, strict=True)
    )


def measure_memory(
    results: Mapping[str, Result], calls: Mapping[str, Contestant], device: torch.device
) -> None:
    """Peak bytes of a step, on a GPU: elsewhere the process's other memory would be in it.

    Not of max-autotune, whose CUDA graphs keep their memory between steps, where no counter of a step sees it.
    """
    if device.type != "cuda":
        return
    for name, call in calls.items():
        if "failed" not in results[name] and "max-autotune" not in name:
            results[name]["peak_bytes"] = peak_memory(call, device)


# ---- a workload, and tables ----


def compete(workload: Workload, device: torch.device, options: argparse.Namespace) -> dict[str, Result]:
    torch._dynamo.reset()
    gc.collect()
    fused = workload.build().to(device)
    plain, input = workload.plain(fused), workload.input(options.batch).to(device)
    generator = torch.Generator().manual_seed(workload.id)
    with torch.no_grad():
        shape = fused(input).shape
    direction = torch.randn(shape, generator=generator).to(device)
    contest = Contest(in_double(plain, input, direction), device, error=gradient_error)
    calls = contestants(options.kinds, fused, plain, input, direction)
    contest.enter(calls)
    results = contest.run(options.rounds)
    measure_memory(results, calls, device)
    return results


def print_detail(workload: Workload, results: Mapping[str, Result]) -> None:
    columns = "median, ms", "fastest, ms", "error", "peak, MB"
    detail = grid(f"{workload.id} {workload.name}", "contestant", *columns, left=("contestant",))
    for name, r in sorted(results.items(), key=lambda item: item[1].get("ms", 0)):
        if "failed" in r:
            stdout.print(f"{name} failed: {headline(r['failed'])}", markup=False)
        else:
            peak = f"{r['peak_bytes'] / 1e6:.0f}" if r.get("peak_bytes") else "-"
            detail.add_row(name, f"{r['ms']:.2f}", f"{r['min_ms']:.2f}", f"{r['error']:.1e}", peak)
    stdout.print(detail)


def fused_kind(results: Mapping[str, Result]) -> str:
    """The fused contestant that the summary is about: exact on a GPU too."""
    return "fused ieee" if "fused ieee, NCHW" in results else "fused"


def share_of_memory(results: Mapping[str, Result]) -> str:
    """Fused over eager."""
    ours, eager = (
        results.get(f"{kind}, NCHW", {}).get("peak_bytes") for kind in (fused_kind(results), "eager")
    )
    if not ours or not eager:
        return "-"
    share = ours / eager
    return coloured(f"{share:.0%} (<= {LARGEST_SHARE:.0%})", share <= LARGEST_SHARE)


def summary_row(id: int, results: Mapping[str, Result], required: Required) -> list[str]:
    kind = fused_kind(results)
    ours = results.get(f"{kind}, NCHW", {})
    ms = best(results, f"{kind}, NCHW")
    error = ours.get("error")
    autocast = best(results, "autocast compile default") / best(results, "autocast fused")
    return [
        str(id),
        f"{ms:.2f}",
        holds(best(results, "eager, NCHW") / ms, required.eager),
        f"{best(results, 'eager, channels_last') / ms:.2f}",
        holds(best(results, "compile") / ms, required.compile.get(id)),
        f"{best(results, f'{kind}, channels_last'):.2f}",
        holds(autocast, required.autocast),
        share_of_memory(results),
        "-" if error is None else coloured(f"{error:.1e}", error <= ERROR_BOUND),
        f"{results[name]['error']:.1e}" if (name := fastest(results, "eager, NCHW")) else "-",
    ]


COLUMNS = (
    "fused, ms", "over eager", "over eager, NHWC", "over compile", "fused, NHWC, ms", "autocast, over compile",
    "memory, of eager's", "error", "eager's error",
)  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=KINDS, default="cuda" if has_gpu else "cpu")
    parser.add_argument("--batch", type=int, help="128 on a GPU, 8 on a CPU")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21, help="timed runs of each, after 3 for warm-up")
    parser.add_argument("--only", type=int, nargs="+", metavar="ID", help="only 57, 21, 85, 92, or 0")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="only these contestants; in quotes")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    parser.add_argument("--output", type=Path, help="file for the raw numbers, in place of bench/results/...")
    options = parser.parse_args()
    if options.device == "cuda" and not has_gpu:
        parser.error("--device cuda needs a GPU that PyTorch can use")
    known = KINDS[options.device]
    options.kinds = options.kinds or known
    if unknown := set(options.kinds) - set(known):
        parser.error(f"--kinds has {', '.join(sorted(unknown))}; on this device there are {', '.join(known)}")
    if not options.compile:
        options.kinds = [kind for kind in options.kinds if "compile" not in kind]
    options.batch = options.batch or (128 if options.device == "cuda" else 8)
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch._inductor.config.autotune_num_choices_displayed = 0
    device = torch.device(options.device)
    where = f"{options.threads} threads" if options.device == "cpu" else torch.cuda.get_device_name()
    summary = grid(f"forward and backward, batch {options.batch}, float32, {where}", "model", *COLUMNS)
    entries: dict[str, Any] = {}
    raw = {"batch": options.batch, "rounds": options.rounds, "workloads": entries}
    write = partial(save, "train", raw, options.output, device)
    workloads = chosen(options, (*WORKLOADS, *OTHER_WORKLOADS))
    for workload in track(workloads, description="workloads", console=stderr, transient=True):
        results = compete(workload, device, options)
        entries[str(workload.id)] = {"model": workload.name, "contestants": results}
        print_detail(workload, results)
        summary.add_row(*summary_row(workload.id, results, REQUIRED[options.device]))
        write()  # so that a run that is stopped keeps what it has
    stdout.print(summary)
    stdout.print(
        "medians; of torch.compile the best mode and layout; NHWC: channels_last; required in brackets; errors in NCHW"
    )
    stdout.print(f"raw numbers: {write()}")


if __name__ == "__main__":
    main()
