"""Peak memory of one call, fused and eager: ``python bench/memory.py``.

Every measurement runs in a new process: one call on a small input to load everything, then the growth of the
process's resident set to its high-water mark during one call, the output included. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from _report import save
from fusedconv._measure import peak_memory
from fusedconv.workloads import WORKLOADS

LARGEST_SHARE = {85: 0.10, 92: 0.10}  # of eager's


def measure(id: int, kind: str, batch: int) -> int | None:
    """In the child process: bytes."""
    workload = next(w for w in WORKLOADS if w.id == id)
    fused = workload.build()
    model = fused if kind == "fused" else workload.plain(fused)
    input = workload.input(batch)
    with torch.inference_mode():
        model(input[:1, :, :16, :16].contiguous())
        return peak_memory(lambda: model(input), torch.device("cpu"))


def in_new_process(id: int, kind: str, options: argparse.Namespace) -> int:
    sizes = "--batch", str(options.batch), "--threads", str(options.threads)
    command = [sys.executable, __file__, "--child", str(id), kind, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip().isdecimal():
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return int(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="file for the raw numbers, in place of bench/results/...")
    parser.add_argument("--child", nargs=2, metavar=("ID", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        print(measure(int(options.child[0]), options.child[1], options.batch))
        return 0

    title = f"peak memory of one call, batch {options.batch}, float32, {options.threads} threads"
    table = Table(title=title, title_justify="left")
    for column in ("model", "output, MB", "fused, MB", "eager, MB", "share"):
        table.add_column(column, justify="left" if column == "model" else "right")
    failed, raw = False, {}
    for workload in WORKLOADS:
        fused, eager = (in_new_process(workload.id, kind, options) for kind in ("fused", "eager"))
        with torch.device("meta"):
            meta = workload.plain(workload.build().to("meta"))(workload.input(options.batch).to("meta"))
        limit = LARGEST_SHARE.get(workload.id)
        share = f"{fused / eager:.1%}"
        if limit is not None:
            held = fused < limit * eager
            failed |= not held
            share = (
                f"[{'green' if held else 'red'}]{share} ({'under' if held else 'not under'} {limit:.0%})[/]"
            )
        sizes = (meta.numel() * meta.element_size(), fused, eager)
        raw[workload.id] = {"model": workload.name, "output": sizes[0], "fused": fused, "eager": eager}
        table.add_row(str(workload.id), *(f"{size / 1e6:.1f}" for size in sizes), share)
    Console().print(table)
    print(
        f"raw numbers, in bytes: {save('memory', {'batch': options.batch, 'workloads': raw}, options.output)}"
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
