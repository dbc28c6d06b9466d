"""The fused module and its peers: what each gives, how far it is off, how long it takes.

A contestant's name is its kind, a comma, and its variant: ``compile, max-autotune, NCHW``.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fusedconv
from fusedconv._measure import FLUSH_BYTES, Call, interleaved, relative_error
from fusedconv.workloads import Workload

Contestant = Callable[[], Any]  # gives a tensor, or the gradients of a step of training
Result = dict[str, Any]  # of a contestant: error, ms, min_ms, all_ms, or failed: why


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def headline(why: str) -> str:
    return why.partition("\n")[0][:200]


def channels_last(module: nn.Module, input: Tensor) -> tuple[nn.Module, Tensor]:
    module = copy.deepcopy(module)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module, input.contiguous(memory_format=torch.channels_last)


def bind(module: Callable[[Tensor], Tensor], input: Tensor, precision: str | None = None) -> Contestant:
    """The call, under a float32 precision of fusedconv's if one is given."""
    if precision is None:
        return lambda: module(input)

    def call() -> Tensor:
        with fusedconv.float32_precision(precision):
            return module(input)

    return call


def both_layouts(
    kind: str, module: nn.Module, input: Tensor, precision: str | None = None
) -> dict[str, Contestant]:
    return {
        f"{kind}, NCHW": bind(module, input, precision),
        f"{kind}, channels_last": bind(*channels_last(module, input), precision),
    }


def compiled(mode: str, layouts: Iterable[str], module: nn.Module, input: Tensor) -> dict[str, Contestant]:
    calls = {}
    for layout in layouts:
        model, x = (module, input) if layout == "NCHW" else channels_last(module, input)
        calls[f"compile, {mode}, {layout}"] = bind(torch.compile(model, mode=mode, dynamic=False), x)
    return calls


def reference(plain: nn.Module, input: Tensor) -> Tensor:
    output: Tensor = copy.deepcopy(plain).double()(input.double())
    return output


def medians(
    calls: Mapping[str, Contestant],
    rounds: int,
    device: torch.device,
    cold_memory: bool = True,
    flush_bytes: int = FLUSH_BYTES,
) -> dict[str, Result]:
    """Median, fastest and all times in milliseconds, by contestant."""
    untyped: dict[str, Call] = dict(calls)
    runs = list(interleaved(untyped, rounds, 3, device, cold_memory, flush_bytes))
    times = {name: [round(1e3 * run[name], 5) for run in runs] for name in calls}
    return {
        name: {"ms": statistics.median(all_ms), "min_ms": min(all_ms), "all_ms": all_ms}
        for name, all_ms in times.items()
    }


class Contest:
    """Contestants that should all give ``expected``, if it is known. One that fails drops out."""

    def __init__(
        self,
        expected: Any,
        device: torch.device,
        cold_memory: bool = True,
        error: Callable[[Any, Any], float] = relative_error,
    ) -> None:
        self.results: dict[str, Result] = {}
        self._error = error
        self._calls: dict[str, Contestant] = {}
        self._expected, self._device, self._cold_memory = expected, device, cold_memory

    def enter(self, calls: Mapping[str, Contestant]) -> None:
        for name, call in calls.items():
            began = time.perf_counter()
            result: Result = {}
            self.results[name] = result
            try:
                for _ in range(2):  # what the first calls compile and record, later ones run
                    call()
                output = call()
                if self._expected is not None:
                    result["error"] = self._error(output, self._expected)
                del output
                self._calls[name] = call
            except Exception as error:
                result["failed"] = describe(error)
            result["first_calls_s"] = round(time.perf_counter() - began, 2)

    def run(self, rounds: int) -> dict[str, Result]:
        for name, times in medians(self._calls, rounds, self._device, self._cold_memory).items():
            self.results[name].update(times)
        return self.results


def fastest(results: Mapping[str, Result], *kinds: str) -> str | None:
    """The contestant with the smallest median among those of these kinds or names."""
    names = [
        name for name, r in results.items() if "ms" in r and (name in kinds or name.split(",")[0] in kinds)
    ]
    return min(names, key=lambda name: results[name]["ms"], default=None)


def best(results: Mapping[str, Result], *kinds: str) -> float:
    """The smallest median among the contestants of these kinds or names; NaN if there is none."""
    name = fastest(results, *kinds)
    return math.nan if name is None else float(results[name]["ms"])


def chosen(options: argparse.Namespace, workloads: Iterable[Workload]) -> list[Workload]:
    return [workload for workload in workloads if not options.only or workload.id in options.only]
