"""Convs of real networks with a chain, ours against eager: ``python bench/conv_shapes.py SHAPES.csv``.

The file has a row a conv: batch, in_channels, height, width, out_channels, kernel_h, kernel_w, stride_h, stride_w,
padding_h, padding_w, dilation_h, dilation_w, groups. Each runs on the CPU, forward, one thread, in NCHW and
channels_last, with two chains behind it: relu and hardswish, GroupNorm and SiLU. Calls take turns in samples of about
2 ms; a time is the median of the samples' process time, so that other processes count as little as they can. Convs over
``--most`` of eager's milliseconds are left out. Memory is what the allocator keeps: run it with glibc's tunables, as
NOTES.md says.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

import fusedconv.functional as FF
from _report import save, stdout
from fusedconv._measure import relative_error

LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
SAMPLE_SECONDS = 2e-3
SAMPLES = 15
Call = Callable[[], Tensor]


def groups_of(channels: int) -> int:
    return next(g for g in (8, 4, 2, 1) if channels % g == 0 and (channels > g or g == 1))


def drawn(
    shape: dict[str, int], layout: torch.memory_format
) -> tuple[tuple[Tensor, ...], dict[str, Any], int]:
    """Input, weight, bias, and a norm's weight and bias; the conv's geometry; groups of a norm."""
    channels = shape["out_channels"]
    x = torch.randn(shape["batch"], shape["in_channels"], shape["height"], shape["width"])
    weight = torch.randn(
        channels, shape["in_channels"] // shape["groups"], shape["kernel_h"], shape["kernel_w"]
    )
    x, weight = x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
    bias, gamma, beta = torch.randn(3, channels).unbind()
    conv: dict[str, Any] = {
        name: (shape[f"{name}_h"], shape[f"{name}_w"]) for name in ("stride", "padding", "dilation")
    }
    conv["groups"] = shape["groups"]
    return (x, weight, bias, gamma, beta), conv, groups_of(channels)


def calls(shape: dict[str, int], layout: torch.memory_format) -> Iterator[tuple[str, Call, Call, Call]]:
    """Of each chain: its name, ours, eager, and eager in float64."""
    tensors, conv, groups = drawn(shape, layout)
    x, weight, bias, gamma, beta = tensors
    wide = [tensor.double().contiguous() for tensor in tensors]

    def relu_hardswish(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
        v = F.relu(F.conv2d(x, weight, bias, **conv))
        return v * torch.clamp((v + 3) / 6, 0, 1)

    def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return F.silu(F.group_norm(F.conv2d(x, weight, bias, **conv), groups, gamma, beta))

    yield (
        "relu_hardswish",
        lambda: FF.conv2d_relu_hardswish(x, weight, bias, **conv),
        lambda: relu_hardswish(*tensors),
        lambda: relu_hardswish(*wide),
    )
    yield (
        "group_norm_silu",
        lambda: FF.conv2d_group_norm_silu(x, weight, bias, groups, gamma, beta, **conv),
        lambda: group_norm_silu(*tensors),
        lambda: group_norm_silu(*wide),
    )


def seconds(call: Call, repeats: int = 1) -> float:
    began = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - began) / repeats


def compare(
    ours: Call, eager: Call, reference: Call, most: float, order: random.Random
) -> dict[str, float] | None:
    """Times in milliseconds; None where eager takes too long."""
    eager()
    once = seconds(eager)
    if once > most:
        return None
    right = reference()
    if right.norm() > 0:  # relu may leave nothing
        error, allowed = relative_error(ours(), right), max(1e-6, 2 * relative_error(eager(), right))
        assert error <= allowed, f"error {error:.1e}, allowed {allowed:.1e}"
    repeats = max(1, int(SAMPLE_SECONDS / max(once, 1e-6)))
    times: dict[Call, list[float]] = {ours: [], eager: []}
    for _ in range(SAMPLES):
        for call in order.sample([ours, eager], 2):
            times[call].append(seconds(call, repeats))
    medians = {
        name: 1e3 * statistics.median(times[call]) for name, call in (("ours", ours), ("eager", eager))
    }
    return {**medians, "over_eager": medians["eager"] / medians["ours"]}


def begin(description: str | None) -> tuple[argparse.Namespace, list[dict[str, int]]]:
    """The command line, and the shapes that it asks for. One thread from here on, and the same numbers each time."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("shapes", type=Path)
    parser.add_argument("--most", type=float, default=5.0, help="of eager's milliseconds")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th shape from the K-th on")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    first, step = map(int, given.part.split("/"))
    with given.shapes.open() as file:
        table = [{k: int(v) for k, v in row.items() if k != "model"} for row in csv.DictReader(file)]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return given, table[first::step]


def main() -> None:
    given, table = begin(__doc__)
    order = random.Random(0)
    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for shape in track(table, "convs"):
            for layout, memory_format in LAYOUTS.items():
                for chain, ours, eager, reference in calls(shape, memory_format):
                    times = compare(ours, eager, reference, given.most / 1e3, order)
                    if times is not None:
                        found.append({**shape, "chain": chain, "layout": layout, **times})
    for chain in ("relu_hardswish", "group_norm_silu"):
        for layout in LAYOUTS:
            ratios = [f["over_eager"] for f in found if (f["chain"], f["layout"]) == (chain, layout)]
            if ratios:
                slow = sum(ratio < 0.9 for ratio in ratios)
                stdout.print(
                    f"{chain} {layout}: {len(ratios)} convs, median {statistics.median(ratios):.2f} times as fast as "
                    f"eager, least {min(ratios):.2f}; {slow} under 0.9"
                )
    save("conv-shapes", {"convs": found}, given.output)


if __name__ == "__main__":
    main()
