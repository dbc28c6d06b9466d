"""Builds of fusedconv, side by side: ``python bench/builds.py BEFORE AFTER...`` says where later ones are slower.

Each is a folder that ``pip install --no-deps --target FOLDER`` filled, and which comes first on its path. A child process
for each makes the same calls; they take turns on the same device, some rounds each, and each one's time of a call is
the median of all its rounds, taken as ``bench/gpu.py`` and ``bench/cpu.py`` take theirs. Calls
are the fused modules' in inference and training, in either layout, and chains on a given tensor.

Where a process has its code and tensors in memory moves calls of less than 0.03 ms by up to 3%, the same for all of its
rounds: ``--processes 4`` for these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

Call = Callable[[], object]

DTYPES = {
    "ieee": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
GIVEN = ((16, 64, 128, 128), (128, 32, 254, 254), (64, 512, 7, 7), (8, 128, 56, 56), (2, 16, 600, 600))
BATCHES = {"cuda": (128, 16, 1), "cpu": (8, 1)}
TURNS, ROUNDS = 3, 10
MOST_SLOWER = 0.03


# ---- in a child: the calls of one build ----


def forward(module: nn.Module, input: Tensor) -> Call:
    def call() -> object:
        with torch.no_grad():
            return module(input)

    return call


def step(module: nn.Module, input: Tensor) -> Call:
    """Forward and backward: the gradients of the input and of all parameters."""
    input = input.detach().requires_grad_()
    leaves = [input, *module.parameters()]
    direction = torch.randn_like(module(input))
    return lambda: torch.autograd.grad(module(input), leaves, direction)


def in_precision(precision: str, call: Call) -> Call:
    import fusedconv

    def run() -> object:
        with fusedconv.float32_precision(precision):
            return call()

    return run


def modules(device: torch.device) -> Iterator[tuple[str, Callable[[], Call]]]:
    from fusedconv.workloads import OTHER_WORKLOADS, WORKLOADS

    def make(workload: Any, dtype: str, batch: int, layout: str, direction: Callable[..., Call]) -> Call:
        memory = torch.channels_last if layout == "channels_last" else torch.contiguous_format
        module = workload.build().to(device, DTYPES[dtype], memory_format=memory)
        input = workload.input(batch).to(device, DTYPES[dtype], memory_format=memory)
        precision = dtype if dtype in ("ieee", "tf32") else "default"
        return in_precision(precision, direction(module, input))

    for workload in (*WORKLOADS, *OTHER_WORKLOADS):
        for name, direction in (("forward", forward), ("step", step)):
            for dtype in DTYPES if device.type == "cuda" else ("ieee",):
                for batch in BATCHES[device.type] if dtype == "ieee" else BATCHES[device.type][:1]:
                    for layout in ("NCHW", "channels_last"):
                        cell = f"{workload.id} {name} {dtype} batch {batch} {layout}"
                        yield cell, partial(make, workload, dtype, batch, layout, direction)


def chains(device: torch.device) -> Iterator[tuple[str, Callable[[], Call]]]:
    ops = torch.ops.fusedconv
    chains: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "relu_hardswish": lambda v, p: ops.relu_hardswish(v),
        "bias_scale_sigmoid": lambda v, p: ops.bias_scale_sigmoid(v, p, p),
        "bias_scale_sigmoid_group_norm": lambda v, p: ops.bias_scale_sigmoid_group_norm(v, p, p, 8),
        "group_norm_scale_max_pool_clamp": lambda v, p: ops.group_norm_scale_max_pool_clamp(
            v, 8, None, None, 1e-5, p, [2, 2], 0.0, 1.0
        ),
        "group_norm_silu": lambda v, p: ops.group_norm_silu(v, 8),
        "group_norm_tanh_hardswish_logsumexp": lambda v, p: ops.group_norm_tanh_hardswish_logsumexp(v, 8),
    }

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str, trains: bool) -> Call:
        memory = torch.channels_last if layout == "channels_last" else torch.contiguous_format
        v = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=memory)
        p = torch.randn(shape[1], 1, 1, device=device, dtype=dtype)
        if not trains:
            return lambda: chains[name](v, p)
        v.requires_grad_()
        direction = torch.randn_like(chains[name](v, p))
        return lambda: torch.autograd.grad(chains[name](v, p), v, direction)

    for name in chains:
        for shape in GIVEN if device.type == "cuda" else GIVEN[3:]:
            for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
                for layout in ("NCHW", "channels_last"):
                    for trains in (False, True):
                        way = "step" if trains else "forward"
                        cell = f"{name} {way} {str(dtype)[6:]} {shape} {layout}"
                        yield cell, partial(make, name, shape, dtype, layout, trains)


def serve(folder: Path, device: torch.device, words: str) -> None:
    """Lists the calls; then for each line of the input, the name of one, writes a line of times in ms."""
    import fusedconv
    from fusedconv._measure import interleaved

    if folder not in Path(fusedconv.__file__).resolve().parents:  # an editable install comes before any path
        sys.exit(
            f"fusedconv is {fusedconv.__file__}, not that of {folder}: run this without an editable install"
        )
    torch.manual_seed(0)
    makers = {cell: make for cell, make in (*modules(device), *chains(device)) if words in cell}
    print(json.dumps(list(makers)), flush=True)
    cell, call = "", None
    for line in sys.stdin:
        if line.strip() != cell:
            call = None  # its memory goes first
            cell, call = line.strip(), makers[line.strip()]()
        assert call is not None
        times = [1e3 * run[cell] for run in interleaved({cell: call}, ROUNDS, 2, device)]
        print(json.dumps(times), flush=True)


# ---- the comparison ----


class Child:
    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        arguments = [folder, "--serve", "--device", options.device, "--only", options.only]
        self.folder = folder
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.child = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.cells: list[str] = self.read()

    def read(self) -> Any:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            sys.exit(f"the calls of {self.folder} ended with status {self.child.wait()}")
        return json.loads(line)

    def times(self, cell: str) -> list[float]:
        assert self.child.stdin is not None
        print(cell, file=self.child.stdin, flush=True)
        times: list[float] = self.read()
        return times


def compare(builds: Sequence[Sequence[Child]], cell: str) -> list[float]:
    """The medians, in ms, of the builds, each of which has some children: one after the other has its turns."""
    times: list[list[float]] = [[] for _ in builds]
    for children in zip(*builds, strict=True):
        for _ in range(TURNS):
            for of_build, child in zip(times, children, strict=True):
                of_build += child.times(cell)
    return [statistics.median(ms) for ms in times]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("builds", nargs="*", metavar="FOLDER", help="before, after, ...")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="calls whose names have this part")
    parser.add_argument("--processes", type=int, default=1, help="of each build")
    parser.add_argument("--output", type=Path, help="a JSON file for the medians")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Path(options.builds[0]).resolve(), torch.device(options.device), options.only)
        return 0
    builds = [[Child(folder, options) for _ in range(options.processes)] for folder in options.builds]
    say = partial(Console(width=120).print, highlight=False, soft_wrap=True)
    found: dict[str, list[float]] = {}
    for cell in builds[0][0].cells:
        before, *later = found[cell] = compare(builds, cell)
        if options.output:
            options.output.write_text(json.dumps(found, indent=1))
        if any(abs(ms / before - 1) > MOST_SLOWER for ms in later):
            say(f"{before:.4f} ms  {'  '.join(f'{ms / before:.3f}' for ms in later)}  {cell}")
    slower = 0
    for i, folder in enumerate(options.builds[1:], 1):
        ratios = [medians[i] / medians[0] for medians in found.values()]
        by_much = sum(ratio > 1 + MOST_SLOWER for ratio in ratios)
        slower += by_much
        say(
            f"{folder}: {len(ratios)} calls, median ratio {statistics.median(ratios):.3f}, {by_much} slower by over 3%"
        )
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
