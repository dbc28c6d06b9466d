"""Trains a small net on scikit-learn's digits with each module of fusedconv, and with its plain model of the same seed.

    pip install ".[examples]"
    python examples/train_digits.py                 # draws examples/train_digits.png

Both see the same batches. Their losses differ by rounding only, so their curves lie on each other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from fusedconv.workloads import OTHER_WORKLOADS, WORKLOADS, Plain, Workload

MODELS = (*WORKLOADS, *OTHER_WORKLOADS)
SEED = 0
SIZE = 16  # the digits are 8 x 8
BATCH = 64
RATE = 3e-3
INK, FUSED, UNFUSED = "#808080", "#4c8fd0", "#e0803c"  # to be read on white and on black


@dataclass(frozen=True)
class Digits:
    """Images ``[N, 1, SIZE, SIZE]`` in float32, and their labels ``[N]``."""

    images: Tensor
    labels: Tensor

    @staticmethod
    def load() -> tuple[Digits, Digits]:
        """For training, and for testing."""
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / digits.images.max()
        images = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear")
        labels = torch.from_numpy(digits.target)
        train, test = train_test_split(torch.arange(len(labels)), test_size=0.2, random_state=SEED)
        return Digits(images[train], labels[train]), Digits(images[test], labels[test])

    def batches(self, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole batches, shuffled anew in each epoch; the same in every call."""
        generator = torch.Generator().manual_seed(SEED)
        for _ in range(epochs):
            order = torch.randperm(len(self.labels), generator=generator)
            for places in order.split(BATCH)[: len(order) // BATCH]:
                yield self.images[places], self.labels[places]


@dataclass(frozen=True)
class Run:
    """What a training gave: the loss of each step, and the share of the test's digits that it gets right."""

    losses: list[float]
    accuracy: float


def build(workload: Workload, fused: bool) -> nn.Module:
    """A module of fusedconv or its plain model, and a linear layer. The seed decides about all weights."""
    torch.manual_seed(SEED)
    module = workload.module(1, workload.channels[1], 3, padding=1, **workload.arguments)
    features = module(torch.zeros(1, 1, SIZE, SIZE)).numel()
    body = module if fused else Plain(module, workload.steps)
    return nn.Sequential(body, nn.Flatten(), nn.Linear(features, 10))


def train(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], test: Digits, tick: Callable[[], None]
) -> Run:
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    losses = []
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tick()
    with torch.no_grad():
        right = model(test.images).argmax(1) == test.labels
    return Run(losses, right.float().mean().item())


def draw(runs: dict[str, tuple[Run, Run]], path: Path) -> None:
    """One panel a model, the curve of the plain model dashed upon the fused one's."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    plt.rcParams.update({"font.size": 9, **dict.fromkeys(inked, INK)})
    figure, grid = plt.subplots(2, 3, figsize=(9, 4.6), sharex=True, sharey=True, layout="constrained")
    *axes, spare = grid.flat
    for axis, (name, (fused, plain)) in zip(axes, runs.items(), strict=True):
        axis.plot(fused.losses, color=FUSED, linewidth=2.5, label="fusedconv")
        axis.plot(plain.losses, color=UNFUSED, linewidth=1, linestyle=(0, (4, 4)), label="plain PyTorch")
        axis.set_title(name, fontsize=8)
        axis.set(xlabel="step", ylabel="training loss", yscale="log")
        axis.label_outer()
        axis.spines[["top", "right"]].set_visible(False)
    axes[2].tick_params(labelbottom=True)  # nothing stands below it
    axes[2].set_xlabel("step")
    spare.axis("off")
    spare.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="center")
    figure.savefig(path, dpi=120, transparent=True)
    plt.close(figure)


def table(runs: dict[str, tuple[Run, Run]]) -> Table:
    result = Table("model", "last loss", "plain", "largest difference", "right", "plain")
    for name, (fused, plain) in runs.items():
        difference = max(abs(a - b) for a, b in zip(fused.losses, plain.losses, strict=True))
        result.add_row(
            name, f"{fused.losses[-1]:.4f}", f"{plain.losses[-1]:.4f}", f"{difference:.1e}",
            f"{fused.accuracy:.1%}", f"{plain.accuracy:.1%}",
        )  # fmt: skip
    return result


def main(arguments: Sequence[str] | None = None) -> dict[str, tuple[Run, Run]]:
    """Gives, for each model, what the fused and the plain one did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="stop after so many, however many epochs are left")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".png"))
    options = parser.parse_args(arguments)

    train_set, test_set = Digits.load()
    batches = list(train_set.batches(options.epochs))[: options.steps]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    runs = {}
    with Progress(*columns) as progress:
        task = progress.add_task("", total=2 * len(MODELS) * len(batches))
        for workload in MODELS:
            progress.update(task, description=workload.name)
            fused, plain = (
                train(build(workload, fused), batches, test_set, lambda: progress.advance(task))
                for fused in (True, False)
            )
            runs[workload.name] = fused, plain
    Console().print(table(runs))
    draw(runs, options.output)
    return runs


if __name__ == "__main__":
    main()
