"""How the CUDA kernels cut a tensor, checked without a GPU: the plan is plain C++."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
HERE = Path(__file__).parent


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(not (HERE.parent / "csrc").is_dir(), reason="the sources are not here")
def test_plans_of_random_shapes(tmp_path: Path) -> None:
    program = tmp_path / "plan"
    source = HERE / "tensor_plan.cpp"
    subprocess.run([str(COMPILER), "-std=c++17", "-O2", "-o", program, source], check=True)
    found = subprocess.run([program, "100000"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
