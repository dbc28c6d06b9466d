"""How the kernels cut a tensor or a conv, checked without a GPU: the plans are plain C++.

They are compiled with checks of undefined behaviour: a size that wraps ends the program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
HERE = Path(__file__).parent
CSRC = HERE.parent / "csrc"
CPU, PLAN = CSRC / "cpu", CSRC / "plan"
CHECKS = ("-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all")

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(not CSRC.is_dir(), reason="the sources are not here"),
]


def run(folder: Path, *sources: Path, calls: int = 0) -> str:
    """Compiles a program, has it plan random calls, and gives what it prints."""
    program = folder / "plan"
    options = ["-std=c++17", "-O1", "-g1", *CHECKS, f"-I{CSRC}", "-DFUSEDCONV_TARGET=baseline"]
    subprocess.run([str(COMPILER), *options, "-o", program, *sources], check=True)
    found = subprocess.run([program, str(calls)], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_arithmetic_on_sizes(tmp_path: Path) -> None:
    run(tmp_path, HERE / "checked.cpp")


def test_plans_of_given_tensors(tmp_path: Path) -> None:
    """Each value is read once, and what a block keeps fits; sizes whose products do not fit in 64 bits included."""
    run(tmp_path, HERE / "given_plan.cpp", calls=100_000)


def test_plans_of_convs(tmp_path: Path) -> None:
    """Nothing wraps for any stride, padding, dilation or size; memory is bounded by input and output."""
    sources = (HERE / "conv_plan.cpp", PLAN / "conv_plan.cpp", PLAN / "conv_cut.cpp")
    printed = run(tmp_path, *sources, calls=300_000)
    ours, two_step, _ = map(int, printed.split())
    assert ours > 10_000
    assert two_step > 10_000


def test_plans_of_gradients(tmp_path: Path) -> None:
    """Slabs and strips cover the map, each with something of its own; no channel is left out."""
    run(tmp_path, HERE / "gradient_plan.cpp", calls=100_000)


def test_tiles_on_the_cpu(tmp_path: Path) -> None:
    """A filter that reaches far has tiles of as many rows, or each would pack what it reaches again."""
    run(tmp_path, HERE / "cpu_plan.cpp", CPU / "conv_source.cpp", CPU / "memory.cpp", calls=100_000)
