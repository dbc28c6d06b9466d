"""Host cost of one eager call on a small tensor: ``python bench/host_overhead.py [--device cuda]``.

The input is 1x3x6x6 on the CPU, so that nearly all of the time is Python, dispatch and checks, and 1x3x32x32 on a GPU,
where nothing waits for the kernels: before each loop the device has finished, and a loop's launches fit in its queue.
One thread. Each number is the fastest of several loops' means, in microseconds; operator, module and eager take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import timeit
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from _report import coloured, grid, save, stdout
from fusedconv.workloads import SMALL_WORKLOADS

Mode = tuple[Callable[[], contextlib.AbstractContextManager[object]], bool, float]
MODES: dict[str, dict[str, Mode]] = {
    # name: context, whether the parameters need gradients, the most that an operator may cost in microseconds
    "cpu": {
        "grad mode, gradients": (torch.enable_grad, True, 30.0),
        "grad mode, frozen": (torch.enable_grad, False, 30.0),
        "no_grad": (torch.no_grad, True, 30.0),
        "inference_mode": (torch.inference_mode, True, 15.0),
    },
    "cuda": {
        "no_grad": (torch.no_grad, True, 30.0),
        "inference_mode": (torch.inference_mode, True, 30.0),
    },
}
LOOPS = {"cpu": (7, 1000), "cuda": (50, 50)}  # and the calls in one
LARGEST_SHARE = 0.5  # of eager's


def operator(module: nn.Module, input: Tensor) -> Callable[[], Tensor]:
    """The same call as the module makes, without the module and what it leaves to the default."""
    captured = {}

    class Capture(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "fusedconv" in str(function):
                given = {name: value for name, value in (kwargs or {}).items() if value is not None}
                captured["call"] = function, args, given
            return function(*args, **(kwargs or {}))

    with Capture():
        module(input)
    function, args, kwargs = captured["call"]
    return lambda: function(*args, **kwargs)


def microseconds(
    calls: dict[str, Callable[[], Tensor]], loops: int, number: int, device: torch.device
) -> dict[str, float]:
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(loops):
        for name, call in calls.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best[name] = min(best[name], timeit.timeit(call, number=number) / number * 1e6)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=MODES, default="cpu")
    parser.add_argument("--loops", type=int, help="7 on the CPU, 50 on a GPU")
    parser.add_argument("--number", type=int, help="calls in a loop; 1000 on the CPU, 50 on a GPU")
    parser.add_argument("--output", type=Path, help="file for the raw numbers, in place of bench/results/...")
    options = parser.parse_args()
    torch.set_num_threads(1)

    device = torch.device(options.device)
    loops, number = LOOPS[device.type]
    columns = ("model", "mode", "operator", "limit", "module", "eager", "share")
    table = grid("host cost of one call, us", *columns, left=("model", "mode"))
    failed, raw = False, []
    for workload in SMALL_WORKLOADS:
        if device.type == "cpu":
            workload = replace(workload, size=6)
        module = workload.build().to(device)
        plain, input = workload.plain(module), workload.input(1).to(device)
        for mode, (context, needs_grad, limit) in MODES[device.type].items():
            module.requires_grad_(needs_grad)
            with context():
                calls: dict[str, Callable[[], Tensor]] = {
                    "operator": operator(module, input),
                    "module": partial(module, input),
                    "eager": partial(plain, input),
                }
                cost = microseconds(calls, options.loops or loops, options.number or number, device)
            share = cost["operator"] / cost["eager"]
            held = cost["operator"] < limit and share < LARGEST_SHARE
            failed |= not held
            numbers = (cost["operator"], limit, cost["module"], cost["eager"])
            cells = (f"{number:.1f}" for number in numbers)
            raw.append({"id": workload.id, "mode": mode, "us": cost})
            table.add_row(f"{workload.id}", mode, *cells, coloured(f"{share:.0%}", held))
    stdout.print(table)
    print("limit: of the operator's time; share: operator over eager, at most 50%")
    print(f"raw numbers: {save('host-overhead', {'costs': raw}, options.output, device)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
