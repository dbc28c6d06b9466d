"""Draws docs/figures/<chain>.svg: the tensors that each chain moves through memory, by PyTorch and by the CUDA kernels.

PyTorch's operators and their bytes are counted as in memory_traffic.py. The kernels are those that
csrc/cuda/passes/conv_chain.cuh queues; the packed input is counted with the input's size, and moments, which are a few
numbers for a tile and channel, with none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fusedconv.workloads import OTHER_WORKLOADS, WORKLOADS, Workload
from memory_traffic import BATCH, COLOURS, LABELS, POINTWISE, plt, traffic

FOLDER = Path(__file__).parent / "figures"
CONV, NORM = COLOURS["convolution"], COLOURS["native_group_norm"]
PACK = "#b5b5b5"
MEMORY = "#d9d9d9"
INK = "#303030"
COLUMNS = 6  # the most that a chain has in PyTorch
ROW = 2.0
WIDEST = 0.3  # an arrow for the largest of a figure's tensors
THINNEST = 0.02  # one for a few numbers


@dataclass(frozen=True)
class Kernel:
    """What one launch reads and writes, in bytes; 0 for a few numbers, None for nothing."""

    label: str
    colour: str
    read: int | None
    written: int | None


Schedules = dict[str, list[Kernel]]


def unfused(operators: list[tuple[str, int, int]]) -> list[Kernel]:
    return [
        Kernel(LABELS.get(name, name), COLOURS.get(name, POINTWISE), read, written)
        for name, read, written in operators
    ]


def pack(x: int) -> Kernel:
    return Kernel("pack", PACK, x, x)


def one_pass(x: int, y: int, steps: str) -> Schedules:
    return {"fused": [pack(x), Kernel(f"conv\n{steps}", CONV, x, y)]}


def with_norm(x: int, y: int, before: str, after: str) -> Schedules:
    """A norm needs all of a sample's values: they stay on the chip, or the conv is computed again."""
    return {
        "fused, a sample\nfits on the chip": [
            pack(x),
            Kernel(f"conv{before}\nmoments, wait\n{after}", CONV, x, y),
        ],
        "fused,\ntwo passes": [
            pack(x),
            Kernel(f"conv{before}\nmoments", CONV, x, 0),
            Kernel("statistics", NORM, 0, 0),
            Kernel(f"conv{before}\n{after}", CONV, x, y),
        ],
    }


def pooled(x: int, y: int) -> Schedules:
    """The pool comes before the norm: it takes the smallest values where the norm turns a channel's sign."""
    return {
        "fused": [
            pack(x),
            Kernel("conv\nmoments\nmax or min pool", CONV, x, y),
            Kernel("statistics", NORM, 0, 0),
            Kernel("norm\nscale\nclamp", POINTWISE, y, y),
        ]
    }


FUSED = {
    "ConvReLUHardswish": lambda x, y: one_pass(x, y, "relu\nhardswish"),
    "ConvBiasScaleSigmoidGroupNorm": lambda x, y: with_norm(x, y, ", + bias\n* scale, sigmoid", "norm"),
    "ConvGroupNormScaleMaxPoolClamp": pooled,
    "ConvGroupNormSiLU": lambda x, y: with_norm(x, y, "", "norm, silu"),
    "ConvGroupNormTanhHardswishLogSumExp": lambda x, y: with_norm(
        x, y, "", "norm, tanh\nhardswish, + conv\nlogsumexp"
    ),
}


def arrow(axes: plt.Axes, x: float, start: float, end: float, moved: int, largest: int) -> None:
    """From start to end, as wide as there are bytes."""
    width = max(WIDEST * moved / largest, THINNEST)
    axes.arrow(
        x, start, 0, end - start, width=width, head_width=width + 0.07, head_length=0.09,
        length_includes_head=True, color=INK, linewidth=0,
    )  # fmt: skip
    if moved:
        axes.text(x, min(start, end) - 0.03, f"{moved / 1e9:.2f}", ha="center", va="top", fontsize=6.5)


def draw_schedule(axes: plt.Axes, top: float, name: str, kernels: list[Kernel], largest: int) -> None:
    """Kernels side by side, and below them the memory that they read from and write to."""
    below, memory = top - 0.85, top - 1.3
    axes.text(-0.62, top - 0.42, name, ha="right", va="center", fontsize=8.5)
    for column, kernel in enumerate(kernels):
        axes.add_patch(plt.Rectangle((column - 0.46, below), 0.92, 0.85, color=kernel.colour, linewidth=0))
        axes.text(column, top - 0.425, kernel.label, ha="center", va="center", fontsize=6.5)
        if kernel.read is not None:
            arrow(axes, column - 0.24, memory, below, kernel.read, largest)
        if kernel.written is not None:
            arrow(axes, column + 0.24, below, memory, kernel.written, largest)
    axes.add_patch(plt.Rectangle((-0.5, memory - 0.22), COLUMNS, 0.22, color=MEMORY, linewidth=0))
    axes.text(-0.62, memory - 0.11, "memory, GB", ha="right", va="center", fontsize=6.5)
    total = sum((kernel.read or 0) + (kernel.written or 0) for kernel in kernels)
    axes.text(COLUMNS - 0.4, memory - 0.11, f"{total / 1e9:.2f} GB", va="center", fontsize=8.5)


def draw(workload: Workload) -> None:
    operators, x, y = traffic(workload)
    schedules = {"PyTorch": unfused(operators)} | FUSED[workload.name](x, y)
    largest = max(moved for _, *both in operators for moved in both)
    figure, axes = plt.subplots(figsize=(9, 1.35 * len(schedules)), layout="constrained", facecolor="white")
    for row, (name, kernels) in enumerate(schedules.items()):
        draw_schedule(axes, -ROW * row, name, kernels, largest)
    axes.set_xlim(-1.9, COLUMNS + 0.2)
    axes.set_ylim(0.1 - ROW * len(schedules) + 0.35, 0.1)
    axes.set_axis_off()
    chain = workload.module._chain
    figure.savefig(FOLDER / f"{chain}.svg", metadata={"Date": None})
    plt.close(figure)
    print(f"{chain}: batch {BATCH}, {x / 1e9:.2f} GB in, {y / 1e9:.2f} GB out")


def main() -> None:
    plt.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "fusedconv"})
    FOLDER.mkdir(exist_ok=True)
    for workload in (*WORKLOADS, *OTHER_WORKLOADS):
        draw(workload)


if __name__ == "__main__":
    main()
