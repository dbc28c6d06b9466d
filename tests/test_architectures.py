"""For which architectures a build compiles its CUDA code: csrc/cuda/architectures.cmake, with a card and a compiler that
only pretend."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "csrc" / "cuda" / "architectures.cmake"
CMAKE = shutil.which("cmake")
KNOWN = "sm_75 sm_80 sm_86 sm_89 sm_90 sm_90a sm_100 sm_120"
USUAL = "80;90a-real"

pytestmark = [
    pytest.mark.skipif(CMAKE is None, reason="no cmake"),
    pytest.mark.skipif(not SCRIPT.is_file(), reason="the sources are not here"),
]


def program(path: Path, *lines: str, status: int = 0) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *[f"echo '{line}'" for line in lines], f"exit {status}", ""]))
    path.chmod(0o755)
    return path


def choose(folder: Path, asked: str) -> subprocess.CompletedProcess[str]:
    """On a machine whose programs are those of `folder`."""
    nvcc = program(folder / "nvcc", *KNOWN.split())
    script = folder / "choose.cmake"
    lines = (
        "cmake_minimum_required(VERSION 3.20)",
        f'include("{SCRIPT}")',
        f'choose_architectures("{asked}" "{nvcc}" result)',
        'message("[${result}]")',
    )
    script.write_text("\n".join(lines))
    return subprocess.run(
        [str(CMAKE), "-P", script], env={"PATH": str(folder)}, capture_output=True, text=True
    )


def chosen(folder: Path, asked: str = "") -> str:
    """The list."""
    found = choose(folder, asked)
    assert found.returncode == 0, found.stderr
    return found.stderr.partition("[")[2].partition("]")[0]


@pytest.mark.parametrize(
    ("cards", "architectures"),
    [
        (["9.0"], "90a-real"),
        (["8.6", "8.6"], "86-real"),
        (["9.0", "8.0"], "90a-real;80-real"),
        (["12.0"], "120-real"),
        (["7.0"], USUAL),  # too old for our kernels
        (["7.0", "7.5"], "75-real"),
        (["13.7"], USUAL),  # newer than the compiler, which may still compile PTX that the driver takes
        (["[N/A]"], USUAL),
        ([], USUAL),
    ],
)
def test_those_of_the_cards(tmp_path: Path, cards: list[str], architectures: str) -> None:
    program(tmp_path / "nvidia-smi", *cards)
    assert chosen(tmp_path) == architectures


def test_a_machine_without_cards(tmp_path: Path) -> None:
    assert chosen(tmp_path) == USUAL
    program(
        tmp_path / "nvidia-smi", "NVIDIA-SMI has failed because it could not talk to the driver", status=9
    )
    assert chosen(tmp_path) == USUAL


def test_what_is_asked_for(tmp_path: Path) -> None:
    program(tmp_path / "nvidia-smi", "8.6")
    assert chosen(tmp_path, "90;90a") == "90;90a"
    release = chosen(tmp_path, "release").split(";")
    assert {"80-real", "90a-real", "120-real"} <= set(release)
    assert [architecture for architecture in release if "-real" not in architecture] == ["100"]  # with PTX


@pytest.mark.parametrize("asked", ["70", "80;native", "all", "sm_80", "80 90a"])
def test_what_is_no_architecture_of_ours(tmp_path: Path, asked: str) -> None:
    found = choose(tmp_path, asked)
    assert found.returncode != 0
    assert "which is no architecture from 75 on" in " ".join(found.stderr.split())
