"""KernelBench's protocol on problems 57, 21, 85 and 92 of its level 2: ``python bench/kernelbench/run.py``.

The files in fused/ are what KernelBench's evaluator loads, those in plain/ the problems. Both are loaded as there: their
text is executed in a fresh namespace. Correctness: for each of five seeds, which the weights and the inputs come from,
``ModelNew`` gives what ``Model`` gives, within 1e-4 absolute and relative, both in float32 without TF32. Speed: 256 MB
are written before each run, CUDA events measure it, mean and median of 100; the device is busy until the host has
queued the whole call, so that a time is the device's.

The harder cases go beyond the protocol: inputs scaled by 1, 3, 0.01 and -1, and a norm whose weight and bias are
negative. Without a GPU only the correctness runs, on the CPU and with a smaller batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

import fusedconv  # noqa: E402
from _contestants import Result, bind, medians  # noqa: E402
from _report import CPU, coloured, grid, save, stdout  # noqa: E402

SEEDS = range(5)
SCALES = (1.0, 3.0, 0.01, -1.0)
TOLERANCE = 1e-4  # absolute and relative
FLUSH_BYTES = 256 << 20
BATCH = 128  # of the problems
CPU_BATCH = 4

Namespace = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One comparison with the plain model."""

    name: str
    right: bool
    largest_difference: float


def load(path: Path) -> Namespace:
    """As KernelBench's evaluator does it."""
    namespace: Namespace = {}
    exec(compile(path.read_text(), "<string>", "exec"), namespace)
    return namespace


class Problem:
    """A plain model and the fused one in its place."""

    def __init__(self, name: str, batch: int, device: torch.device) -> None:
        self.name = name
        self._plain, self._fused = (load(HERE / kind / f"{name}.py") for kind in ("plain", "fused"))
        self._batch, self._device = batch, device

    def models(self, seed: int) -> tuple[nn.Module, nn.Module]:
        """Plain and fused, each made under the seed."""
        arguments = self._plain["get_init_inputs"]()

        def make(kind: Callable[..., nn.Module]) -> nn.Module:
            torch.manual_seed(seed)
            return kind(*arguments).to(self._device)

        return make(self._plain["Model"]), make(self._fused["ModelNew"])

    def input(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        inputs: list[Tensor] = self._plain["get_inputs"]()
        return inputs[0][: self._batch].to(self._device)


def compare(name: str, plain: nn.Module, fused: nn.Module, input: Tensor) -> Case:
    expected, actual = plain(input), fused(input)
    if actual.shape != expected.shape:  # allclose would broadcast
        return Case(f"{name}: shape {tuple(actual.shape)}", False, float("inf"))
    right = torch.allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)
    return Case(name, right, float((actual - expected).abs().max()))


def protocol(problem: Problem) -> Iterator[Case]:
    for seed in SEEDS:
        yield compare(f"seed {seed}", *problem.models(seed), problem.input(seed))


def harder(problem: Problem) -> Iterator[Case]:
    plain, fused = problem.models(SEEDS[0])
    input = problem.input(SEEDS[0])
    for scale in SCALES:
        yield compare(f"input times {scale:g}", plain, fused, scale * input)
    # Of the norm only: a negative scale behind a negative weight would be a positive one again.
    affine = [p for name, p in plain.named_parameters() if name.startswith("group_norm.")]
    if not affine:
        return
    for parameter in affine:
        parameter.normal_().abs_().neg_()
    fused.load_state_dict(plain.state_dict())
    for scale in SCALES:
        yield compare(f"input times {scale:g}, negative affine parameters", plain, fused, scale * input)


def speed(problem: Problem, device: torch.device, runs: int) -> dict[str, Result]:
    plain, fused = problem.models(SEEDS[0])
    input = problem.input(SEEDS[0])
    calls = {"fused": bind(fused, input), "eager": bind(plain, input)}
    results = medians(calls, runs, device, flush_bytes=FLUSH_BYTES)
    for result in results.values():
        result["mean_ms"] = statistics.mean(result["all_ms"])
    return results


def cell(cases: list[Case]) -> str:
    right = sum(case.right for case in cases)
    worst = max(case.largest_difference for case in cases)
    return coloured(f"{right} of {len(cases)}, {worst:.1e}", right == len(cases))


def times(results: dict[str, Result]) -> list[str]:
    """Mean and median of both, and eager's over ours."""
    fused, eager = results["fused"], results["eager"]
    cells = [f"{r['mean_ms']:.3f}, {r['ms']:.3f}" for r in (fused, eager)]
    return [*cells, f"{eager['mean_ms'] / fused['mean_ms']:.2f}, {eager['ms'] / fused['ms']:.2f}"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batch", type=int, help=f"in place of the problems' {BATCH}, or of {CPU_BATCH} on a CPU"
    )
    parser.add_argument("--runs", type=int, default=100, help="timed runs, after 3 for warm-up")
    parser.add_argument("--output", type=Path, help="file for the raw numbers, in place of bench/results/...")
    options = parser.parse_args()
    options.device = torch.device("cuda") if torch.cuda.is_available() else CPU
    if options.batch is None:
        options.batch = CPU_BATCH if options.device == CPU else BATCH
    if not 1 <= options.batch <= BATCH:
        parser.error(f"--batch must be from 1 to {BATCH}")
    return options


def main() -> int:
    """Returns 0, or 1 if an output is wrong."""
    options = parse()
    timed: tuple[str, ...] = ("fused, ms", "eager, ms", "speed-up")
    if options.device == CPU:
        timed = ()
        stdout.print(f"No GPU: correctness only, on the CPU, with a batch of {options.batch}.")
    title = f"KernelBench level 2, batch {options.batch}, float32, ieee"
    table = grid(title, "problem", "right, largest difference", "harder cases", *timed, left=("problem",))
    raw: dict[str, Any] = {}
    wrong: list[str] = []
    for path in sorted((HERE / "fused").glob("*.py")):
        problem = Problem(path.stem, options.batch, options.device)
        seeds, hard = list(protocol(problem)), list(harder(problem))
        results = speed(problem, options.device, options.runs) if timed else {}
        number = problem.name.partition("_")[0]
        table.add_row(number, cell(seeds), cell(hard), *(times(results) if timed else ()))
        wrong += [f"{problem.name}, {case.name}" for case in (*seeds, *hard) if not case.right]
        cases = {"seeds": [asdict(case) for case in seeds], "harder": [asdict(case) for case in hard]}
        raw[problem.name] = {**cases, "contestants": results}
    stdout.print(table)
    if timed:
        stdout.print("times and speed-ups: of the means, of the medians")
    for name in wrong:
        stdout.print(f"wrong: {name}", markup=False)
    what = {"batch": options.batch, "tolerance": TOLERANCE, "problems": raw}
    stdout.print(f"raw numbers: {save('kernelbench', what, options.output, options.device)}", soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # eager too
    with torch.no_grad(), fusedconv.float32_precision("ieee"), exact:
        sys.exit(main())
