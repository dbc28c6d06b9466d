"""Where and when something was measured, and the file that keeps it."""

from __future__ import annotations

import datetime
import json
import platform
import re
from pathlib import Path
from typing import Any

import torch

import fusedconv
from fusedconv._measure import cpu_name

RESULTS = Path(__file__).parent / "results"


def save(kind: str, raw: dict[str, Any], output: Path | None = None) -> Path:
    """Writes ``raw`` and the environment into ``output``, or bench/results/<kind>-<CPU>.json; returns the path."""
    slug = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    path = output or RESULTS / f"{kind}-{slug}.json"
    environment = {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
        "fusedconv": fusedconv.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment, **raw}, indent=1) + "\n")
    return path
