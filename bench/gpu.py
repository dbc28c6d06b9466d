"""Speed on a GPU: ``python bench/gpu.py`` prints the tables and writes the raw numbers into bench/results/.

The fused module against eager PyTorch and torch.compile (default and max-autotune), each in NCHW and channels_last, at
PyTorch's default flags. Contestants run in turns in one process, in random order, with the L2 flushed before each run; a
time is the median of the rounds, and the device's: it is busy until the host has queued the whole call. Every output is
checked against float64. The floor is what the card needs at least, by its own rates in this run: the larger of the time
to read the input and write the output, and the time of the conv's products (three for exact float32) in float16.

``--sweep`` compares convs as they occur in networks with eager, ``--epilogue`` the steps behind a conv with
torch.compile. Raw numbers are written after each line, so that a run that is stopped keeps what it has.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _contestants import (
    Contest,
    Contestant,
    Result,
    best,
    bind,
    both_layouts,
    channels_last,
    chosen,
    compiled,
    describe,
    fastest,
    headline,
    medians,
    reference,
)
from _report import coloured, grid, holds, save, stdout
from _shapes import CONVS, MAPS, Conv, Map
from fusedconv.chains import CHAINS, Chain
from fusedconv.workloads import OTHER_WORKLOADS, WORKLOADS, Workload

CUDA = torch.device("cuda")
say = partial(stdout.print, highlight=False, soft_wrap=True)
Save = Callable[[dict[str, Any]], object]  # keeps the raw numbers up to now


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``work`` gives, or why it failed, and the seconds that it took."""
    began = time.perf_counter()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    try:
        result = work()
    except Exception as error:
        result = {"failed": describe(error)}
    return {**result, "seconds": round(time.perf_counter() - began, 2)}


# ---- the reference workloads ----


@dataclass(frozen=True)
class Arithmetic:
    """How a fused module's conv multiplies."""

    precision: str
    products: int
    bound: float  # on the error


ARITHMETIC = {
    "ieee": Arithmetic("ieee", products=3, bound=1e-6),
    "tf32": Arithmetic("tf32", products=1, bound=6e-4),
    "bfloat16": Arithmetic("default", products=1, bound=4e-3),
}


@dataclass(frozen=True)
class Section:
    batch: int
    dtype: torch.dtype = torch.float32
    autotune_both_layouts: bool = True  # else only the one in which torch.compile's default is faster


SECTIONS = {
    "float32": Section(128),
    "bfloat16": Section(128, torch.bfloat16),
    "batch-1": Section(1, autotune_both_layouts=False),
    "batch-16": Section(16, autotune_both_layouts=False),
}


def label(section: str, arithmetic: str) -> str:
    return section if section == arithmetic else f"{section} {arithmetic}"


@dataclass(frozen=True)
class Claim:
    """The fused module is at least so many times as fast as the best of its peers, by the model's id."""

    section: str
    arithmetic: str
    peers: tuple[str, ...]
    least: Mapping[int, float]

    def __str__(self) -> str:
        return f"{label(self.section, self.arithmetic)} over {', '.join(self.peers)}"


ALL_IDS = tuple(workload.id for workload in WORKLOADS)
CLAIMS = (
    Claim("float32", "ieee", ("compile",), {57: 3.2, 21: 4.3, 85: 7, 92: 6}),
    Claim("float32", "ieee", ("eager, NCHW",), {57: 12, 21: 12, 85: 15, 92: 18}),
    Claim("float32", "tf32", ("compile",), {57: 3.8, 21: 4.8, 85: 9, 92: 8}),
    Claim("bfloat16", "bfloat16", ("compile",), {57: 4, 21: 6, 85: 8, 92: 9}),
    Claim("batch-1", "ieee", ("eager", "compile"), dict.fromkeys(ALL_IDS, 1.5)),
    Claim("batch-16", "ieee", ("eager", "compile"), dict.fromkeys(ALL_IDS, 2.5)),
)


def arithmetics(section: str) -> list[str]:
    """What the claims of a section are about."""
    return list(dict.fromkeys(claim.arithmetic for claim in CLAIMS if claim.section == section))


def card_rates() -> dict[str, float]:
    """Bytes a second to and from memory, and float16 operations a second in a large ``torch.mm``."""
    size, n = 1 << 28, 8192
    source, target = torch.ones(size, device=CUDA), torch.empty(size, device=CUDA)
    a, b = torch.rand(2, n, n, device=CUDA, dtype=torch.float16)
    out = torch.empty_like(a)
    bytes_or_operations: dict[str, tuple[float, Contestant]] = {
        "copy": (2 * source.nbytes, lambda: target.copy_(source)),
        "read": (source.nbytes, source.sum),
        "write": (target.nbytes, lambda: target.fill_(2.0)),
        "fp16": (2 * n**3, lambda: torch.mm(a, b, out=out)),
    }
    times = medians({name: call for name, (_, call) in bytes_or_operations.items()}, 10, CUDA)
    return {name: work / times[name]["min_ms"] * 1e3 for name, (work, _) in bytes_or_operations.items()}


def floor_ms(
    rates: Mapping[str, float], read: int, written: int, operations: int, products: int
) -> dict[str, float]:
    return {
        "memory": 1e3 * (read / rates["read"] + written / rates["write"]),
        "products": 1e3 * products * operations / rates["fp16"],
    }


def compete(
    workload: Workload, section: str, rates: Mapping[str, float], options: argparse.Namespace
) -> dict[str, Any]:
    batch, dtype = SECTIONS[section].batch, SECTIONS[section].dtype
    fused = workload.build().to(CUDA, dtype)
    plain, input = workload.plain(fused), workload.input(batch).to(CUDA, dtype)
    expected = reference(plain, input)
    contest = Contest(expected, CUDA)
    names = [name for name in arithmetics(section) if name in options.precision]
    for name in names:
        contest.enter(both_layouts(f"fused {name}", fused, input, ARITHMETIC[name].precision))
    contest.enter(both_layouts("eager", plain, input))
    layouts = ["NCHW", "channels_last"]
    if options.compile:
        contest.enter(compiled("default", layouts, plain, input))
    if options.compile and options.max_autotune:
        if not SECTIONS[section].autotune_both_layouts:
            quickest = fastest(contest.run(rounds=5), "compile")
            layouts = [layout for layout in layouts if quickest is None or quickest.endswith(layout)]
        contest.enter(compiled("max-autotune", layouts, plain, input))
    read = sum(tensor.nbytes for tensor in (input, *fused.parameters()))
    written = expected.numel() * dtype.itemsize
    operations = workload.operations(batch)
    return {
        "model": workload.name,
        "floors": {
            name: floor_ms(rates, read, written, operations, ARITHMETIC[name].products) for name in names
        },
        "contestants": contest.run(options.rounds),
    }


def cell(result: Result | None, bound: float | None = None) -> tuple[str, str]:
    """Time and error, which should be within the bound."""
    if result is None:
        return "-", "-"
    if "ms" not in result:
        return "[red]failed[/]", "-"
    error = result.get("error", math.nan)
    text = f"{error:.1e}" if "error" in result else "-"
    return f"{result['ms']:.3f}", text if bound is None else coloured(text, error <= bound)


def line(section: str, id: int, entry: dict[str, Any]) -> str:
    if "failed" in entry:
        return f"{section} {id} failed: {headline(entry['failed'])}"
    results: dict[str, Result] = entry["contestants"]
    kinds = dict.fromkeys(name.split(",")[0] for name in results)
    parts = [f"{name} {results[name]['ms']:.3f}" for kind in kinds if (name := fastest(results, kind))]
    failed = [f"{name} failed: {headline(r['failed'])}" for name, r in results.items() if "failed" in r]
    return "\n  ".join([f"{section} {id}, {entry['seconds']:.0f} s: {'; '.join(parts)}", *failed])


def speed(options: argparse.Namespace, write: Save) -> dict[str, Any]:
    rates = card_rates()
    say(", ".join(f"{name} {rate / 1e12:.2f} T/s" for name, rate in rates.items()))
    sections: dict[str, dict[int, Any]] = {}
    raw = {"rates": rates, "sections": sections}
    for section in options.sections:
        if not set(arithmetics(section)) & set(options.precision):
            continue
        entries = sections[section] = {}
        for workload in chosen(options, WORKLOADS):
            entry = attempt(partial(compete, workload, section, rates, options))
            entries[workload.id] = entry
            say(line(section, workload.id, entry), markup=False)
            write(raw)
    print_floors(sections)
    print_claims(sections)
    return raw


def print_floors(sections: Mapping[str, Mapping[int, Any]]) -> None:
    columns = (
        "fused, ms",
        "error",
        "floor, ms",
        "of the floor",
        "compile, ms",
        "error",
        "eager, ms",
        "error",
    )
    table = grid("fused and eager in NCHW, the best of torch.compile", "model", *columns)
    for section, entries in sections.items():
        for id, entry in entries.items():
            for arithmetic, floors in entry.get("floors", {}).items():
                results = entry["contestants"]
                ours = results[f"fused {arithmetic}, NCHW"]
                floor = max(floors.values())
                compile = fastest(results, "compile")
                table.add_row(
                    f"{label(section, arithmetic)} {id}",
                    *cell(ours, ARITHMETIC[arithmetic].bound),
                    f"{floor:.3f} {max(floors, key=lambda name: floors[name])}",
                    f"{floor / ours.get('ms', math.nan):.0%}",
                    *cell(results[compile] if compile else None),
                    *cell(results["eager, NCHW"]),
                )
    stdout.print(table)


def print_claims(sections: Mapping[str, Mapping[int, Any]]) -> None:
    table = grid("times as fast as", "claim", *map(str, ALL_IDS), left=("claim",))
    for claim in CLAIMS:
        cells = []
        for id, least in claim.least.items():
            results = sections.get(claim.section, {}).get(id, {}).get("contestants", {})
            ours = best(results, f"fused {claim.arithmetic}, NCHW")
            cells.append(holds(best(results, *claim.peers) / ours, least))
        table.add_row(str(claim), *cells)
    stdout.print(table)


# ---- one fused contestant against one peer ----


def compare(results: dict[str, Result], peer: str, least: float | None, bound: float) -> dict[str, Any]:
    """How many times as fast ``fused`` is as ``peer``; right: as exact as ``bound``, or as twice eager's error."""
    ours, eager = results["fused"], results["eager"]
    bound = max(bound, 2 * eager.get("error", 0.0))
    ratio = best(results, peer) / best(results, "fused")
    return {
        "ratio": None if math.isnan(ratio) else ratio,
        "least": least,
        "right": ours["error"] <= bound if "error" in ours else None,
        "contestants": results,
    }


def print_comparison(entry: dict[str, Any], peer: str) -> None:
    results: dict[str, Result] = entry.get("contestants", {})
    for name, result in {"all": entry, **results}.items():
        if "failed" in result:
            say(f"{entry['name']} {name} failed: {headline(result['failed'])}", markup=False)
    if entry.get("ratio"):
        ours, error = cell(results["fused"])
        theirs, _ = cell(results[peer])
        error = error if entry["right"] is None else coloured(error, entry["right"])
        ratio = holds(entry["ratio"], entry["least"])
        say(f"{entry['name']} {ratio}: {ours}, {peer} {theirs} ms, error {error}")


def print_summary(entries: list[dict[str, Any]], peer: str) -> None:
    bounded = [e for e in entries if e.get("ratio") and e["least"]]
    if bounded:
        worst = min(bounded, key=lambda e: float(e["ratio"]))
        held = sum(e["ratio"] >= e["least"] for e in bounded)
        say(f"{held} of {len(bounded)} hold; least over {peer}: {worst['ratio']:.3f}, {worst['name']}")
    wrong = sum(e.get("right") is False for e in entries)
    failed = sum(e.get("ratio") is None for e in entries)
    say(f"{len(entries)} in all, {wrong} with too large an error, {failed} without a ratio")


# ---- convs as they occur in networks, against eager ----

LEAST_OVER_EAGER = 0.971  # at most 3% slower
MOST_TO_CHECK = 60e9  # operations of a conv that float64 repeats


class Told(logging.Handler):
    """Keeps what fusedconv tells about the launches that it prepares."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []
        logger = logging.getLogger("fusedconv")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def path(self) -> str:
        paths = [path for path in ("direct", "two-step") if any(f": {path}" in m for m in self.messages)]
        return " and ".join(paths) or "not told"


def sweep(options: argparse.Namespace, write: Save) -> dict[str, Any]:
    told = Told()
    workloads = chosen(options, (*WORKLOADS, *OTHER_WORKLOADS))
    entries: list[dict[str, Any]] = []
    for conv, next_one in zip(CONVS, itertools.cycle(workloads), strict=False):
        for workload in workloads if options.every_chain else (next_one,):
            told.messages.clear()
            entry = attempt(partial(against_eager, workload, conv, options.rounds))
            entry["name"] = f"{workload.id:2} {conv!s:48} {told.path():8}"
            entry["told"] = list(told.messages)
            entries.append(entry)
            print_comparison(entry, "eager")
            write({"sweep": entries})
    print_summary(entries, "eager")
    return {"sweep": entries}


def against_eager(workload: Workload, conv: Conv, rounds: int) -> dict[str, Any]:
    workload = conv.before(workload)
    fused, input = workload.build().to(CUDA), workload.input(conv.batch).to(CUDA)
    if conv.channels_last:
        fused, input = channels_last(fused, input)
    plain = workload.plain(fused)
    contest = Contest(reference(plain, input) if conv.operations() <= MOST_TO_CHECK else None, CUDA)
    contest.enter({"fused": bind(fused, input), "eager": bind(plain, input)})
    return compare(contest.run(rounds), "eager", LEAST_OVER_EAGER, ARITHMETIC["ieee"].bound)


# ---- the steps behind a conv, against torch.compile ----

LEAST_OVER_COMPILE = 1.3  # for chains with a norm; the others are bound by the same memory traffic


def own_arguments(chain: Chain, channels: int, dtype: torch.dtype) -> list[Any]:
    normal = partial(torch.randn, device=CUDA, dtype=dtype)
    values = {
        "bias": normal(channels, 1, 1),
        "scale": normal(channels, 1, 1),
        "num_groups": 16,
        "norm_weight": normal(channels),
        "norm_bias": normal(channels),
        "eps": 1e-5,
        "pool_size": [2, 2],
        "clamp_min": 0.0,
        "clamp_max": 1.0,
    }
    return [values[name] for name in chain.names]


def behind_conv(chain: Chain, map: Map, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    format = torch.channels_last if map.channels_last else torch.contiguous_format
    shape = map.batch, map.channels, map.size, map.size
    v = torch.randn(shape, device=CUDA, dtype=dtype).contiguous(memory_format=format)
    own = own_arguments(chain, map.channels, dtype)
    exact = (a.double() if isinstance(a, Tensor) else a for a in (v, *own))
    contest = Contest(chain.reference(*exact), CUDA)
    contest.enter({"fused": partial(getattr(torch.ops.fusedconv, chain.name), v, *own)})
    contest.enter({"eager": partial(chain.reference, v, *own)})
    if options.compile:
        contest.enter({"compile": partial(torch.compile(chain.reference, dynamic=False), v, *own)})
    least = LEAST_OVER_COMPILE if chain.has_norm else None
    bound = ARITHMETIC["ieee" if dtype is torch.float32 else "bfloat16"].bound
    return compare(contest.run(options.rounds), "compile", least, bound)


def epilogue(options: argparse.Namespace, write: Save) -> dict[str, Any]:
    torch.manual_seed(0)
    entries: list[dict[str, Any]] = []
    for dtype, chain, map_ in itertools.product((torch.float32, torch.bfloat16), CHAINS, MAPS):
        entry = attempt(partial(behind_conv, chain, map_, dtype, options))
        entry["name"] = f"{chain.name:35} {str(dtype).removeprefix('torch.'):8} {map_!s:27}"
        entries.append(entry)
        print_comparison(entry, "compile")
        write({"epilogue": entries})
    print_summary(entries, "compile")
    return {"epilogue": entries}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--sweep", action="store_true", help="convs of networks against eager")
    kind.add_argument("--epilogue", action="store_true", help="the steps behind a conv against torch.compile")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--precision", nargs="+", choices=ARITHMETIC, default=list(ARITHMETIC))
    parser.add_argument("--only", type=int, nargs="+", metavar="ID", help="57, 21, 85, 92; 0 in the sweep")
    parser.add_argument("--rounds", type=int, default=25, help="timed runs of each, after 3 for warm-up")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    parser.add_argument(
        "--no-max-autotune", dest="max_autotune", action="store_false", help="torch.compile's default only"
    )
    parser.add_argument("--every-chain", action="store_true", help="--sweep: every chain behind every conv")
    parser.add_argument("--output", type=Path, help="file for the raw numbers, in place of bench/results/...")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU that PyTorch can use")
    if options.compile:
        torch._inductor.config.autotune_num_choices_displayed = 0
    name, run = "gpu", speed
    if options.sweep:
        name, run = "gpu-sweep", sweep
    elif options.epilogue:
        name, run = "gpu-epilogue", epilogue

    def write(raw: dict[str, Any]) -> Path:
        return save(name, {"rounds": options.rounds, **raw}, options.output, CUDA)

    with torch.no_grad():
        raw = run(options, write)
    say(f"raw numbers: {write(raw)}")


if __name__ == "__main__":
    main()
