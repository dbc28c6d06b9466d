"""Draws docs/memory_traffic.svg: the bytes that each step of the four models moves, unfused and fused.

Counted from the plain models at batch 128 on PyTorch's meta device: every operator reads its inputs once and writes its
output once, which is the least that it can do (GroupNorm really reads its input twice). The fused model reads its
input and writes its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedconv.workloads import WORKLOADS, Workload

BATCH = 128
VIEWS = ("view", "expand", "unsqueeze", "squeeze", "detach", "empty")
POINTWISE = "#e3b96b"
COLOURS = {
    "convolution": "#6d9dc5",
    "native_group_norm": "#d08b6f",
    "max_pool2d_with_indices": "#8fb573",
    "logsumexp": "#8fb573",
}
LABELS = {
    "convolution": "conv",
    "native_group_norm": "group norm",
    "max_pool2d_with_indices": "max\npool",
    "logsumexp": "logsum\nexp",
}
LEAST_LABELLED = 0.3  # GB


def tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors(value)


def size(values: Any) -> int:
    """In bytes, of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors(values))


class Traffic(TorchDispatchMode):
    """Notes the bytes that each operator reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if name not in VIEWS:
            self.steps.append((name, size(args), size(output)))
        return output


def traffic(workload: Workload) -> tuple[list[tuple[str, int, int]], int, int]:
    """The plain model's steps with the bytes that each reads and writes, and those of the model's input and output."""
    plain = workload.plain(workload.build()).to("meta")
    input = workload.input(1).to("meta").expand(BATCH, -1, -1, -1).contiguous()
    with torch.no_grad(), Traffic() as counter:
        output = plain(input)
    return counter.steps, size(input), size(output)


def main() -> None:
    plt.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "fusedconv", "font.size": 9})
    figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained", facecolor="white")
    ticks: dict[float, str] = {}
    for row, workload in enumerate(WORKLOADS):
        operators, read, written = traffic(workload)
        steps, fused = [(name, sum(moved)) for name, *moved in operators], read + written
        above, below, left = 2.6 * row, 2.6 * row + 0.9, 0.0
        for name, moved in steps:
            width = moved / 1e9
            axes.barh(above, width, left=left, color=COLOURS.get(name, POINTWISE), edgecolor="white")
            if width > LEAST_LABELLED:
                axes.text(
                    left + width / 2, above, LABELS.get(name, name), va="center", ha="center", fontsize=7
                )
            left += width
        axes.barh(below, fused / 1e9, color="#303030")
        axes.text(left + 0.08, above, f"{left:.1f} GB", va="center")
        axes.text(fused / 1e9 + 0.08, below, f"{fused / 1e9:.2f} GB", va="center")
        ticks |= {above: f"{workload.id}  PyTorch", below: "fused"}
        print(f"{workload.id} {workload.name}: {left:.2f} GB unfused, {fused / 1e9:.2f} GB fused")
        for name, moved in steps:
            print(f"    {name:24} {moved / 1e9:.2f} GB")
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.invert_yaxis()
    axes.set_xlabel(f"memory read and written, GB (batch {BATCH}, float32)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, 10.6)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
