"""The folders of csrc/, and what each may include: what stands above it in this list, never sideways or down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"
# From the algebra to the entries. Folders of one line know nothing of each other.
FLOORS = (
    ("core",),  # the algebra of chains
    ("plan",),  # what runs where and why, on the host, without CUDA
    ("cpu", "cuda/device"),
    ("cuda/conv", "cuda/given"),  # where v comes from
    ("cuda/passes",),  # what becomes of v
    ("cuda/gradients",),  # of a conv
    ("cuda/backward",),  # of a chain, with its conv or without
    ("cuda/host",),  # entries, and the chains' registry
    ("cuda/host/chains",),
    (".",),  # bindings.cpp
)
FLOOR_OF = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)

pytestmark = pytest.mark.skipif(not CSRC.is_dir(), reason="the sources are not here")


def sources() -> list[Path]:
    return sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"})


def folder_of(file: Path) -> str:
    return file.parent.relative_to(CSRC).as_posix()


def included(file: Path) -> list[Path]:
    """A name without a folder is a file beside it; others are said from csrc/ on."""
    names = INCLUDE.findall(file.read_text())
    return [(CSRC if "/" in name else file.parent) / name for name in names]


def may_include(mine: str, its: str) -> bool:
    backends = {folder.split("/")[0] for folder in (mine, its)} & {"cpu", "cuda"}
    return mine == its or (FLOOR_OF[its] < FLOOR_OF[mine] and len(backends) < 2)


def test_each_folder_has_its_floor() -> None:
    assert {folder_of(file) for file in sources()} == set(FLOOR_OF)


@pytest.mark.parametrize("file", sources(), ids=lambda file: file.relative_to(CSRC).as_posix())
def test_includes_go_one_way(file: Path) -> None:
    for other in included(file):
        assert other.is_file(), f"{file} includes {other}, which is not there"
        mine, its = folder_of(file), folder_of(other)
        assert may_include(mine, its), f"{mine}/{file.name} includes {its}/{other.name}"


def test_plans_and_the_algebra_need_no_cuda() -> None:
    """They serve hosts without a CUDA toolkit."""
    for file in (p for p in sources() if folder_of(p) in {"core", "plan"}):
        assert not re.search(r"#\s*include\s*<cu", file.read_text()), file
