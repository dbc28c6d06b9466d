"""Pictures of what the benchmarks measured, from the raw numbers in bench/results/ and from nothing else.

A picture shows one file of results. It names the file and its digest in its metadata, so that a test can tell whether
it is older than the numbers. Grey text and no background: they are read on light and on dark pages.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

from _contestants import best
from _report import RESULTS
from fusedconv.workloads import OTHER_WORKLOADS, WORKLOADS, Workload

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
COMMITTED = (
    "gpu-nvidia-h200",
    "cpu-all-peers-amd-epyc",
    "cpu-amd-epyc",
    "cpu-intel-xeon",
    "cpu-sizes-amd-epyc",
    "train-nvidia-h200",
    "train-own-gradients-amd-epyc",
    "memory-amd-epyc",
)
BY_ID = {workload.id: workload for workload in (*WORKLOADS, *OTHER_WORKLOADS)}

GREY = "#7a7a7a"  # as far from white as from black
STYLE: dict[str, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "fusedconv",
    "font.size": 10,
    "savefig.dpi": 160,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), GREY
    ),
}
WIDTH = 8.5  # inches, about a README's width
CAPTION = 122  # characters a line


@dataclass(frozen=True)
class Kind:
    """Contestants whose names begin alike; of several the fastest is shown."""

    label: str
    names: tuple[str, ...]
    colour: str
    faint: bool = False

    def ms(self, contestants: Mapping[str, Any]) -> float:
        """NaN where none was measured."""
        return best({n: r for n, r in contestants.items() if n.startswith(self.names)}, *contestants)


BLUE, ORANGE, GREEN, RED, PURPLE = "#3d8fd1", "#d98e32", "#4c9f5a", "#c9605f", "#9673c9"
FUSED = Kind("fused", ("fused",), BLUE)
EAGER = Kind("eager", ("eager",), ORANGE)
COMPILE = Kind("torch.compile", ("compile",), GREEN)
EAGER_NCHW = Kind("eager, NCHW", ("eager, NCHW",), ORANGE)
EAGER_LAST = Kind("eager, channels_last", ("eager, channels_last",), ORANGE, faint=True)
PEERS = (
    EAGER_NCHW,
    EAGER_LAST,
    Kind("torch.compile", ("compile, default", "compile, NCHW", "compile, channels_last"), GREEN),
    Kind("torch.compile, max-autotune", ("compile, max-autotune",), GREEN, faint=True),
    Kind("ONNX Runtime", ("onnxruntime",), RED),
    Kind("OpenVINO", ("openvino",), PURPLE),
)
TRAINERS = (
    Kind("fused, NCHW", ("fused, NCHW", "fused ieee, NCHW"), BLUE),
    Kind("fused, channels_last", ("fused, channels_last", "fused ieee, channels_last"), BLUE, faint=True),
    EAGER_NCHW,
    EAGER_LAST,
    *[
        Kind(
            f"torch.compile, {layout}",
            tuple(f"compile, {mode}{layout}" for mode in ("", "default, ", "max-autotune, ")),
            GREEN,
            faint=layout == "channels_last",
        )
        for layout in ("NCHW", "channels_last")
    ],
)


class Source:
    """A file of raw numbers."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.stem = path.stem
        self._bytes = path.read_bytes()

    @cached_property
    def raw(self) -> dict[str, Any]:
        raw: dict[str, Any] = json.loads(self._bytes)
        return raw

    def digest(self) -> str:
        return f"{self.name} sha256:{hashlib.sha256(self._bytes).hexdigest()}"

    def where(self) -> str:
        """The card or CPU, versions and the date."""
        raw = self.raw
        parts = [raw["card"] if "card" in raw else f"{raw['cpu']}, {raw['threads']} threads"]
        named = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "cuda": "CUDA", "cudnn": "cuDNN"}
        named |= {"torch": "torch", "fusedconv": "fusedconv", "python": "Python"}
        parts += [f"{name} {str(raw[key]).partition('-')[0]}" for key, name in named.items() if key in raw]
        return ", ".join([*parts, raw["date"]])


@dataclass(frozen=True)
class Picture:
    name: str
    figure: Figure

    def save(self, folder: Path, source: Source) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for format, extra in {"png": {"Software": None}, "svg": {"Date": None}}.items():
            metadata = {"Source": source.digest(), **extra}
            self.figure.savefig(folder / f"{self.name}.{format}", transparent=True, metadata=metadata)
        plt.close(self.figure)


def finish(figure: Figure, axes: Axes, source: Source, title: str, caption: str) -> None:
    """Title and legend above, caption below; the legend carries the title, for beside each other they overlap."""
    handles, labels = axes.get_legend_handles_labels()
    above = figure.legend(
        handles, labels, loc="outside upper left", ncols=4 if len(labels) < 5 else 3, fontsize=9.5,
        title=title, title_fontsize=12, alignment="left", borderaxespad=0.2,
    )  # fmt: skip
    above.get_title().set_color(GREY)
    text = "\n".join(textwrap.fill(part, CAPTION) for part in (caption, f"{source.where()}. {source.name}"))
    figure.supxlabel(text, fontsize=8.5, x=0.01, ha="left")


Models = dict[int, dict[str, Any]]  # contestants and their results, by the model's id


def by_id(entries: Mapping[str, Any]) -> Models:
    """The contestants of each model, but of those that failed as a whole."""
    return {int(id): entry["contestants"] for id, entry in entries.items() if "contestants" in entry}


def label(id: int) -> str:
    chain = str(BY_ID[id].module._chain).replace("_", " ")  # type: ignore[attr-defined]
    return f"{id}: " * bool(id) + f"conv {chain}"  # 0 is no problem's number


def digits(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def bars(axes: Axes, ids: Sequence[int], heights: Mapping[Kind, Sequence[float]]) -> None:
    """Groups of bars, one for each model; a kind that was not measured has none."""
    width = 0.86 / len(heights)
    for index, (kind, values) in enumerate(heights.items()):
        left = [group + (index - (len(heights) - 1) / 2) * width for group in range(len(ids))]
        drawn = axes.bar(
            left, values, 0.92 * width, color=kind.colour, alpha=0.55 if kind.faint else 1, label=kind.label
        )
        texts = ["" if math.isnan(value) else digits(value) for value in values]
        axes.bar_label(drawn, texts, padding=1.5, fontsize=8)
    axes.set_xticks(range(len(ids)), [textwrap.fill(label(id), 20) for id in ids], fontsize=9)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", alpha=0.3)
    axes.margins(x=0.01, y=0.12)


def measured(
    kinds: Sequence[Kind],
    entries: Models,
    value_of: Callable[[Kind, Mapping[str, Any]], float] = Kind.ms,
) -> dict[Kind, list[float]]:
    """The times of each kind, or what else is asked for, by model; a kind without any is left out."""
    values = {kind: [value_of(kind, contestants) for contestants in entries.values()] for kind in kinds}
    return {kind: of_kind for kind, of_kind in values.items() if not all(map(math.isnan, of_kind))}


def absent(ids: Sequence[int], kinds: Sequence[Kind] = ()) -> str:
    """What was not measured, in words."""
    names = [BY_ID[id].name for id in BY_ID if id not in ids] + [kind.label for kind in kinds]
    return f" Not measured: {', '.join(names)}." if names else ""


# ---- how many times as fast ----


SPEED = "How many times as fast as its peers the fused op is"


def speedups(axes: Axes, ours: str, entries: Models) -> None:
    fused = [best(contestants, ours) for contestants in entries.values()]
    times = measured(PEERS, entries)
    ratios = {kind: [ms / our for ms, our in zip(times[kind], fused, strict=True)] for kind in times}
    bars(axes, list(entries), ratios)
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set_ylabel("peer's time / ours")


GPU_SPEED = {
    "float32, exact": ("float32", "fused ieee, NCHW"),
    "float32, fused in TF32": ("float32", "fused tf32, NCHW"),
    "bfloat16": ("bfloat16", "fused bfloat16, NCHW"),
}


def gpu_speed(source: Source) -> Picture:
    sections = {name: by_id(entries) for name, entries in source.raw["sections"].items()}
    panels = {title: panel for title, panel in GPU_SPEED.items() if panel[0] in sections}
    figure, axes = plt.subplots(
        len(panels),
        figsize=(WIDTH, 1.75 * len(panels) + 1.6),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, (title, (section, ours)) in zip(axes.flat, panels.items(), strict=True):
        speedups(ax, ours, sections[section])
        ax.set_title(title, loc="left")
    tf32 = "may be TF32" if source.raw["cudnn_allow_tf32"] else "are exact"
    caption = (
        "Batch 128. The fused op in NCHW, of torch.compile the better layout; the peers are the same in both panels of "
        f"float32, where their convs {tf32}."
    )
    finish(figure, axes[0, 0], source, SPEED, caption + absent(list(sections["float32"])))
    return Picture(f"{source.stem}-speed", figure)


def cpu_speed(source: Source) -> Picture:
    raw = source.raw
    models = by_id(raw["workloads"])
    figure, axes = plt.subplots(figsize=(WIDTH, 4.4), layout="constrained")
    speedups(axes, "fused, NCHW", models)
    memory = "from cold memory" if raw["cold_memory"] else "from memory that the C library kept"
    caption = (
        f"Batch {raw['batch']}, float32, {memory}. The fused op in NCHW, of torch.compile the better layout."
    )
    times = measured(PEERS, models)
    caption += absent(list(models), [kind for kind in PEERS if kind not in times])
    finish(figure, axes, source, SPEED, caption)
    return Picture(f"{source.stem}-speed", figure)


# ---- the roofline ----


@dataclass(frozen=True)
class Roof:
    """One panel: a section of bench/gpu.py, and how many products its exact convs take for one."""

    section: str
    batch: int
    dtype: torch.dtype
    products: int = 1


ROOFS = {
    "float32, batch 128": Roof("float32", 128, torch.float32, products=3),
    "bfloat16, batch 128": Roof("bfloat16", 128, torch.bfloat16),
    "float32, batch 16": Roof("batch-16", 16, torch.float32, products=3),
    "float32, batch 1": Roof("batch-1", 1, torch.float32, products=3),
}
MARKED = {
    Kind("fused", ("fused ieee", "fused bfloat16"), BLUE): "o",
    Kind("fused, TF32", ("fused tf32",), PURPLE): "D",
    COMPILE: "s",
    EAGER: "^",
}
INTENSITY = (16.0, 900.0)  # operations a byte


def least_bytes(workload: Workload, batch: int, dtype: torch.dtype) -> int:
    """To read the input and the parameters and to write the output, once each."""
    with torch.device("meta"):
        module = workload.build().to("meta", dtype)
        input = workload.input(1).to("meta", dtype)
        output: Tensor = workload.plain(module)(input)
    return batch * (input.nbytes + output.nbytes) + sum(tensor.nbytes for tensor in module.parameters())


def roof_lines(axes: Axes, rates: Mapping[str, float], products: int) -> None:
    """The bandwidth's slope, and the rate of float16 products for each number of them."""
    first, last = INTENSITY
    for count in {1, products}:
        top = rates["fp16"] / count
        ridge = top / rates["copy"]
        heights = [first * rates["copy"] / 1e12, top / 1e12, top / 1e12]
        axes.plot([first, ridge, last], heights, color=GREY, linewidth=1.2)
        text = f"{top / 1e12:.0f} Tflop/s" + f", {count} products for one" * (count > 1)
        axes.text(last, 1.2 * top / 1e12, text, ha="right", fontsize=8.5)
    axes.text(first, 3.2 * first * rates["copy"] / 1e12, f" {rates['copy'] / 1e12:.2f} TB/s", fontsize=8.5)


def roof_points(axes: Axes, roof: Roof, entries: Models) -> None:
    operations = {id: BY_ID[id].operations(roof.batch) for id in entries}
    intensities = [operations[id] / least_bytes(BY_ID[id], roof.batch, roof.dtype) for id in entries]
    for kind, marker in MARKED.items():
        rates = [operations[id] / kind.ms(contestants) / 1e9 for id, contestants in entries.items()]
        size = 44 if kind.label == "fused" else 20  # seen behind another one at the same place
        axes.scatter(intensities, rates, size, color=kind.colour, marker=marker, label=kind.label, zorder=3)
    bottom = axes.get_ylim()[0]
    for id, intensity in zip(entries, intensities, strict=True):
        axes.text(
            intensity, bottom, f" {id} ", ha="right" if id in (21, 85) else "left", va="bottom", fontsize=8.5
        )


def roofline(source: Source) -> Picture:
    raw = source.raw
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 7), sharex=True, sharey=True, layout="constrained")
    for ax, (title, roof) in zip(axes.flat, ROOFS.items(), strict=True):
        ax.set(xscale="log", yscale="log", xlim=INTENSITY, ylim=(0.5, 2000))
        ax.set_xticks([20, 50, 100, 200, 500])
        ax.minorticks_off()
        ax.xaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_title(title, loc="left")
        ax.grid(alpha=0.2)
        roof_lines(ax, raw["rates"], roof.products)
        roof_points(ax, roof, by_id(raw["sections"][roof.section]))
    for ax in axes[:, 0]:
        ax.set_ylabel("the conv's Tflop/s")
    for ax in axes[1]:
        ax.set_xlabel("flop / byte")
    caption = (
        "Operations are the conv's, bytes those of input, parameters and output: what a model needs at least. The roofs "
        "are the rates of a copy and of a large float16 torch.mm, measured in the same run; exact float32 takes three "
        "float16 products for one. Below the points: the models' numbers. Of each contestant the better layout and mode; "
        "convs of eager and torch.compile in float32 may be TF32."
    )
    caption += absent(list(by_id(raw["sections"]["float32"])))
    finish(figure, axes[0, 0], source, "Roofline", caption)
    return Picture(f"{source.stem}-roofline", figure)


# ---- time over batch size ----

Lines = dict[Kind, dict[int, float]]  # milliseconds by batch


def lines(axes: Axes, times: Lines) -> None:
    for (kind, by_batch), marker in zip(times.items(), "os^D", strict=False):
        batches = sorted(by_batch)
        axes.plot(
            batches,
            [by_batch[b] for b in batches],
            color=kind.colour,
            marker=marker,
            markersize=5,
            label=kind.label,
        )
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25)


def batch_picture(source: Source, panels: Mapping[str, Lines], caption: str) -> Picture:
    rows = math.ceil(len(panels) / 3 if len(panels) > 4 else len(panels) / 2)
    columns = math.ceil(len(panels) / rows)
    shape = WIDTH, 2.2 * rows + 1.5
    figure, axes = plt.subplots(rows, columns, figsize=shape, squeeze=False, layout="constrained")
    for ax, (title, times) in zip(axes.flat, panels.items(), strict=False):
        lines(ax, times)
        model, _, size = title.partition("\n")
        ax.set_title(
            "\n".join([*textwrap.wrap(model, 96 // columns), *size.splitlines()]), loc="left", fontsize=9
        )
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    for ax in axes[:, 0]:
        ax.set_ylabel("ms")
    for ax in axes[-1]:
        ax.set_xlabel("batch")
    finish(figure, axes[0, 0], source, "Time over batch size", caption)
    return Picture(f"{source.stem}-batches", figure)


def gpu_batches(source: Source) -> Picture:
    sections = {name: by_id(entries) for name, entries in source.raw["sections"].items()}
    batches = {roof.batch: roof.section for roof in ROOFS.values() if roof.dtype is torch.float32}
    ids = list(sections["float32"])

    def over_batches(kind: Kind, id: int) -> dict[int, float]:
        return {batch: kind.ms(sections[section].get(id, {})) for batch, section in batches.items()}

    exact = Kind("fused, exact", ("fused ieee",), BLUE)
    panels = {label(id): {kind: over_batches(kind, id) for kind in (exact, COMPILE, EAGER)} for id in ids}
    caption = (
        "float32; convs of eager and torch.compile may be TF32. Of each contestant the better layout, of torch.compile "
        "the better mode too."
    )
    return batch_picture(source, panels, caption + absent(ids))


def cpu_batches(source: Source) -> Picture:
    panels: dict[str, Lines] = {}
    for name, entry in source.raw["sizes"].items():
        id, channels, size, batch = re.findall(r"[^ ,]+", name.replace("batch ", ""))
        title = f"{label(int(id))}\n{channels} channels, {size}"
        for kind in (FUSED, EAGER):
            panels.setdefault(title, {}).setdefault(kind, {})[int(batch)] = kind.ms(entry["contestants"])
    memory = "from cold memory" if source.raw["cold_memory"] else "from memory that the C library kept"
    caption = (
        f"float32, {memory}. Of eager the better layout. Not measured: torch.compile, ONNX Runtime, OpenVINO."
    )
    return batch_picture(source, panels, caption)


# ---- training, memory ----


IN_DEFAULT_MODE = " torch.compile is in its default mode."


def compile_modes(models: Models) -> str:
    tuned = any("max-autotune" in name for contestants in models.values() for name in contestants)
    return " Of torch.compile the faster mode." if tuned else IN_DEFAULT_MODE


def training(source: Source) -> Picture:
    raw = source.raw
    figure, axes = plt.subplots(figsize=(WIDTH, 4.4), layout="constrained")
    models = by_id(raw["workloads"])
    times = measured(TRAINERS, models)
    bars(axes, list(models), times)
    axes.set_ylabel("ms a step")
    missing = [] if times.keys() & set(TRAINERS[-2:]) else [COMPILE]
    caption = f"Batch {raw['batch']}, float32, the fused op exact. How busy the machine was: bench/NOTES.md."
    caption += compile_modes(models) + absent(list(models), missing)
    finish(figure, axes, source, "Time of a training step: forward and backward", caption)
    return Picture(f"{source.stem}-times", figure)


def training_memory(source: Source) -> Picture:
    """Of each contestant the better layout."""
    raw = source.raw
    figure, axes = plt.subplots(figsize=(WIDTH, 3.8), layout="constrained")
    models = by_id(raw["workloads"])

    def peak(kind: Kind, contestants: Mapping[str, Any]) -> float:
        of_kind = [r for name, r in contestants.items() if name.startswith(kind.names)]
        return min((r["peak_bytes"] for r in of_kind if "peak_bytes" in r), default=math.nan) / 1e6

    exact = Kind("fused, exact", ("fused ieee",), BLUE)
    compiled = Kind("torch.compile", ("compile, default",), GREEN)
    bars(axes, list(models), measured((exact, EAGER, compiled), models, peak))
    axes.set_ylabel("peak of a step, MB")
    caption = f"Batch {raw['batch']}, float32. Gradients included, and without what stands before the step."
    caption += " Of each contestant the better layout." + IN_DEFAULT_MODE
    finish(figure, axes, source, "Peak memory of a training step", caption + absent(list(models)))
    return Picture(f"{source.stem}-memory", figure)


def memory(source: Source) -> Picture:
    raw = source.raw
    figure, axes = plt.subplots(figsize=(WIDTH, 3.8), layout="constrained")
    sizes = {
        kind: [entry[kind.label] / 1e6 for entry in raw["workloads"].values()] for kind in (FUSED, EAGER)
    }
    ids = [int(id) for id in raw["workloads"]]
    bars(axes, ids, sizes)
    axes.set_ylabel("peak of one call, MB")
    unmeasured = [Kind("training", (), GREY), COMPILE]
    caption = f"Forward, batch {raw['batch']}, float32, output included." + absent(ids, unmeasured)
    finish(figure, axes, source, "Peak memory of one call", caption)
    return Picture(f"{source.stem}", figure)


def of_a_gpu(raw: Mapping[str, Any]) -> tuple[Callable[[Source], Picture], ...]:
    """A file may hold some sections only (``--sections``)."""
    if "rates" not in raw or "float32" not in raw["sections"]:
        return ()
    has_all = all(roof.section in raw["sections"] for roof in ROOFS.values())
    return (gpu_speed, roofline, gpu_batches) if has_all else (gpu_speed,)


def pictures(source: Source) -> Iterator[Picture]:
    """By the form of the numbers; nothing for a form that has no picture."""
    forms: dict[str, tuple[Callable[[Source], Picture], ...]] = {
        "gpu": of_a_gpu(source.raw),
        "cpu": (cpu_batches,) if "sizes" in source.raw else (cpu_speed,),
        "train": (training, training_memory) if "card" in source.raw else (training,),
        "memory": (memory,),
    }
    for draw in forms.get(source.stem.partition("-")[0], ()):
        yield draw(source)


def draw(paths: Sequence[Path], folder: Path) -> list[str]:
    """Draws what the files of results hold; returns the pictures' names."""
    plt.style.use(STYLE)
    names = []
    for source in map(Source, paths):
        for picture in pictures(source):
            picture.save(folder, source)
            names.append(picture.name)
    return names


def committed() -> list[Path]:
    return [RESULTS / f"{stem}.json" for stem in COMMITTED]
