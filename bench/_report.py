"""Tables, where and when something was measured, and the file that keeps it."""

from __future__ import annotations

import csv
import datetime
import json
import math
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fusedconv
from fusedconv._measure import cpu_name, device_name

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
EMPTY: Mapping[str, Any] = {}

stdout = Console(width=120)


def grid(title: str, *columns: str, left: tuple[str, ...] = ("model",)) -> Table:
    """An empty table; all but the columns in ``left`` are numbers."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def coloured(text: str, good: bool) -> str:
    return f"[{'green' if good else 'red'}]{text}[/]"


def holds(ratio: float, least: float | None) -> str:
    if math.isnan(ratio):
        return "-"
    if least is None:
        return f"{ratio:.2f}"
    return coloured(f"{ratio:.2f} ({'>=' if ratio >= least else 'under'} {least:g})", ratio >= least)


def save(kind: str, raw: dict[str, Any], output: Path | None = None, device: torch.device = CPU) -> Path:
    """Writes ``raw`` and the environment into ``output``, or bench/results/<kind>-<device>.json.

    A CSV file goes beside it. Returns the path.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    path = output or RESULTS / f"{kind}-{slug}.json"
    environment: dict[str, Any] = {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
        "fusedconv": fusedconv.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        environment |= {
            "card": device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment, **raw}, indent=1) + "\n")
    write_csv(path)
    return path


def rows(raw: Any, path: tuple[str, ...] = (), above: Mapping[str, Any] = EMPTY) -> Iterator[dict[str, Any]]:
    """One for each innermost dictionary, with what stands above it but the environment; without single runs' times."""
    if isinstance(raw, list):
        raw = {str(index): value for index, value in enumerate(raw)}
    parts = {key: value for key, value in raw.items() if is_table(value)}
    own = {key: value for key, value in raw.items() if not isinstance(value, (dict, list))}
    values = {**above, **own} if path else above
    for key, value in parts.items():
        yield from rows(value, (*path, key), values)
    if path and not parts:
        yield {"what": " / ".join(path), **values}


def is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def write_csv(path: Path) -> Path:
    """The numbers of a file of results, beside it; the environment and the single runs stand in the JSON only."""
    table = list(rows(json.loads(path.read_text())))
    target = path.with_suffix(".csv")
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, list(dict.fromkeys(k for row in table for k in row)), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(table)
    return target
