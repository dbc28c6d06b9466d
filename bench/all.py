"""All benchmarks that this machine allows, and pictures of them: ``python bench/all.py``.

Each writes its raw numbers into bench/results/, as JSON and CSV; what was written is drawn into docs/pictures/.
``--draw`` measures nothing and draws the committed numbers, or the files that it is given.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from _pictures import FOLDER, committed, draw
from _report import RESULTS, write_csv

BENCH = Path(__file__).resolve().parent
ON_CPU = ("cpu.py", "cpu.py --sizes", "train.py --device cpu", "memory.py", "host_overhead.py")
ON_GPU = (
    "gpu.py",
    "gpu.py --sweep",
    "gpu.py --epilogue",
    "train.py --device cuda",
    "host_overhead.py --device cuda",
    "kernelbench/run.py",
)

console = Console()


def run(command: str, progress: Progress) -> int:
    """The benchmark's exit status; what it prints goes above the bar."""
    script, *options = command.split()
    child = subprocess.Popen(
        [sys.executable, str(BENCH / script), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    for line in child.stdout:
        progress.console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
    return child.wait()


def measure(commands: tuple[str, ...]) -> list[str]:
    """Runs them one after the other; returns those that failed, or missed a limit of theirs."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(commands))
        for command in commands:
            progress.update(task, description=command)
            if run(command, progress):
                failed.append(command)
            progress.advance(task)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--draw", type=Path, nargs="*", metavar="RESULTS", help="draw only, the committed numbers by default"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the pictures")
    options = parser.parse_args()
    failed: list[str] = []
    if options.draw is None:
        began = time.time()
        failed = measure(ON_CPU + ON_GPU * torch.cuda.is_available())
        files = sorted(path for path in RESULTS.glob("*.json") if path.stat().st_mtime >= began)
    else:
        files = options.draw or committed()
    for path in RESULTS.glob("*.json"):
        write_csv(path)
    for name in draw(files, options.folder):
        console.print(f"{options.folder / name}.png, .svg", highlight=False, soft_wrap=True)
    for command in failed:
        console.print(f"failed, or a limit does not hold: {command}", markup=False)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
