"""Who should run a conv on the CPU, ours or PyTorch's, each with our chain: ``python bench/conv_paths.py SHAPES.csv``.

Shapes, layouts, chains and times are those of conv_shapes.py, but the two run beside each other without an operator's
dispatch, which is the same for both. Convs that our own could not run within a few times eager's time, as it would
compute or pack a multiple of their output, are left out: there is no choice.
"""

from __future__ import annotations

import os
import random
import statistics
from functools import partial
from typing import Any

import torch
from rich.progress import track

from _report import save
from conv_shapes import LAYOUTS, SAMPLE_SECONDS, SAMPLES, Call, begin, drawn, seconds
from fusedconv import _C
from fusedconv._conv import prepared_convolution
from fusedconv._register import OPERATORS

_MOST_COMPUTED = 20  # times the output; packed as many times input and output


def runs(chain: str, args: list[Any]) -> dict[str, Call]:
    """The same call, with our own conv and with PyTorch's."""
    rules = OPERATORS[f"conv2d_{chain}"]
    output, source = rules.operator.example(args), prepared_convolution(args, None)
    found: dict[str, Call] = {}
    for name, path in (("own", "direct"), ("pytorch", "two-step")):
        os.environ["FUSEDCONV_CPU_PATH"] = path
        found[name] = partial(rules.kernels.launcher.prepare_cpu(args, output, source, None), args, None)
    del os.environ["FUSEDCONV_CPU_PATH"]
    return found


def costs_a_multiple(plan: _C.Plan) -> bool:
    numbers = {"computed": 0, "pixels": 0, "packed": 0, "values": 0} | plan.numbers
    return (
        numbers["computed"] > _MOST_COMPUTED * numbers["pixels"]
        or numbers["packed"] > _MOST_COMPUTED * numbers["values"]
    )


def compare(calls: dict[str, Call], order: random.Random) -> dict[str, float]:
    """Milliseconds."""
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, int(SAMPLE_SECONDS / max(seconds(call), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(SAMPLES):
        for name in order.sample(list(calls), len(calls)):
            times[name].append(seconds(calls[name], repeats[name]))
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def main() -> None:
    given, table = begin(__doc__)
    order = random.Random(0)
    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for shape in track(table, "convs"):
            if shape["groups"] != 1:
                continue
            for layout, memory_format in LAYOUTS.items():
                (x, weight, bias, gamma, beta), conv, groups = drawn(shape, memory_format)
                geometry = [conv[name] for name in ("stride", "padding", "dilation", "groups")]
                eager = partial(torch.conv2d, x, weight, bias, *geometry)
                eager()
                # The same for each chain.
                plan = OPERATORS["conv2d_relu_hardswish"].kernels.launcher.plan_cpu(
                    [x, weight, bias, *geometry]
                )
                if seconds(eager) > given.most / 1e3 or costs_a_multiple(plan):
                    continue
                for chain, own in {
                    "relu_hardswish": [],
                    "group_norm_silu": [groups, gamma, beta, 1e-5],
                }.items():
                    args = [x, weight, bias, *own, *geometry]
                    times = compare(runs(chain, args), order)
                    chosen = {"chosen": "own" if plan.is_ours else "pytorch"}
                    found.append({**shape, "chain": chain, "layout": layout, **chosen, **times})
    save("conv-paths", {"convs": found}, given.output)


if __name__ == "__main__":
    main()
