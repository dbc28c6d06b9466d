"""Tables, where and when something was measured, and the file that keeps it."""

from __future__ import annotations

import datetime
import json
import math
import platform
import re
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fusedconv
from fusedconv._measure import cpu_name, device_name

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")

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
    """Writes ``raw`` and the environment into ``output``, or bench/results/<kind>-<device>.json; returns the path."""
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
    return path
