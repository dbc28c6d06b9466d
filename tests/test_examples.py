"""The examples run, and show what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from chains_table import CONV_ROWS
from helpers import new_process

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

TRAIN_DIGITS = """
import sys
import pytest
sys.path.insert(0, sys.argv[1])
import train_digits

runs = train_digits.main(["--steps", "4", "--output", sys.argv[2]])
for fused, plain in runs.values():
    assert len(fused.losses) == 4
    assert fused.losses == pytest.approx(plain.losses, rel=1e-4)
    assert fused.losses[0] != fused.losses[1]
    assert abs(fused.accuracy - plain.accuracy) < 0.01
print("trained", *runs)
"""


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the repository is not here")
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("sklearn", "matplotlib")),
    reason="scikit-learn or matplotlib is not installed: pip install '.[examples]'",
)
def test_train_digits(tmp_path: Path) -> None:
    """A few steps of it: the losses of each module are the plain model's."""
    picture = tmp_path / "digits.png"
    printed = new_process(TRAIN_DIGITS, EXAMPLES, picture)
    assert all(str(row.module) in printed.split("trained")[-1] for row in CONV_ROWS)
    assert picture.read_bytes().startswith(b"\x89PNG")
