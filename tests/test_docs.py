"""The documentation builds without a warning, its examples run, and it knows every message and every chain."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chains_table import CONV_ROWS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

needs_sphinx = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("sphinx", "furo", "myst_parser")),
    reason="Sphinx, furo or MyST is not installed: pip install '.[docs]'",
)


def sphinx(builder: str, folder: Path) -> None:
    options = ["-q", "-W", "--keep-going", "-b", builder, str(DOCS), str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options],
        cwd=folder, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@needs_sphinx
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    sphinx("html", tmp_path)
    for row in CONV_ROWS:
        assert f"fusedconv.nn.{row.module}" in (tmp_path / "api.html").read_text()
        assert (tmp_path / "_images" / f"{row.chain}.svg").is_file(), f"{row.chain} has no figure"


@needs_sphinx
@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit is deprecated from Python 3.14 on")
def test_the_examples_give_what_they_show(tmp_path: Path) -> None:
    sphinx("doctest", tmp_path)
    assert re.search(r"[1-9]\d* passed and 0 failed", (tmp_path / "output.txt").read_text())


def messages_of_python(path: Path) -> Iterator[list[str]]:
    """Of each error and warning the parts that stand fast."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name.endswith("Error") or name in ("_must", "warn", "error"):
                yield [part for argument in node.args for part in constants(argument)]


def constants(node: ast.expr) -> list[str]:
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in constants(value)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def messages_of_cpp(path: Path) -> Iterator[list[str]]:
    for thrown in re.findall(r"throw std::\w+\((.*?)\);", path.read_text(), re.DOTALL):
        yield re.findall(r'"([^"]*)"', thrown)


def test_every_message_is_explained() -> None:
    """By its longest part."""
    page = (DOCS / "troubleshooting.md").read_text()
    messages = [m for path in (ROOT / "python" / "fusedconv").glob("*.py") for m in messages_of_python(path)]
    assert len(messages) > 25
    of_python = len(messages)
    messages += [m for path in (ROOT / "csrc").rglob("*/*.*") for m in messages_of_cpp(path)]
    messages += messages_of_cpp(ROOT / "csrc" / "bindings.cpp")
    assert len(messages) > of_python + 5
    for parts in messages:
        longest = max(parts, key=len, default="").removeprefix("fusedconv:").strip(" ,.:;'[")
        assert longest in page, f"troubleshooting.md does not explain {longest!r}"
