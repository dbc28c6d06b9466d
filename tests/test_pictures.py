"""The pictures in docs/pictures/ and the CSV files show the committed results."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import new_process

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
RESULTS = BENCH / "results"
PICTURES = sorted((ROOT / "docs" / "pictures").iterdir())

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="matplotlib is not installed: pip install '.[bench]'",
)


def named_source(picture: Path) -> tuple[str, str]:
    """The file of results that the picture's metadata names, and its digest."""
    found = re.search(rb"([\w-]+\.json) sha256:([0-9a-f]{64})", picture.read_bytes())
    assert found, f"{picture.name} does not name its results"
    return found[1].decode(), found[2].decode()


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_no_picture_is_older_than_its_results(picture: Path) -> None:
    name, digest = named_source(picture)
    now = hashlib.sha256((RESULTS / name).read_bytes()).hexdigest()
    assert digest == now, f"{name} has changed: python bench/all.py --draw"


def test_every_picture_of_the_readme_is_there() -> None:
    used = re.findall(r"\]\(docs/pictures/([^)]+)\)", (ROOT / "README.md").read_text())
    assert used
    assert set(used) <= {path.name for path in PICTURES}


def test_csv_files_hold_what_the_results_do(tmp_path: Path) -> None:
    code = """
        import pathlib, shutil, sys
        bench, folder = map(pathlib.Path, sys.argv[1:])
        sys.path.append(str(bench))
        from _report import write_csv
        for path in sorted((bench / "results").glob("*.json")):
            shutil.copy(path, folder)
            made = write_csv(folder / path.name)
            assert made.read_text() == path.with_suffix(".csv").read_text(), f"{made.name}: bench/all.py --draw"
        print("same")
    """
    assert "same" in new_process(code, BENCH, tmp_path)


@needs_matplotlib
def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    """Sections of a GPU that were not run; training without torch.compile, with a contestant that failed."""
    gpu, train = (json.loads((RESULTS / f"{stem}-nvidia-h200.json").read_text()) for stem in ("gpu", "train"))
    del gpu["sections"]["bfloat16"], gpu["sections"]["batch-1"]
    for workload in train["workloads"].values():
        contestants = workload["contestants"]
        for name in [name for name in contestants if "compile" in name]:
            del contestants[name]
    contestants["eager, NCHW"] = contestants["eager, channels_last"] = {"failed": "out of memory"}
    for stem, raw in (("gpu-parts", gpu), ("train-parts", train)):
        (tmp_path / f"{stem}.json").write_text(json.dumps(raw))
    code = """
        import pathlib, sys
        sys.path.append(sys.argv[1])
        from _pictures import draw
        folder = pathlib.Path(sys.argv[2])
        print(*draw(sorted(folder.glob("*.json")), folder / "pictures"))
    """
    said = new_process(code, BENCH, tmp_path)
    assert said.split() == ["gpu-parts-speed", "train-parts-times", "train-parts-memory"]


@needs_matplotlib
@pytest.mark.slow
def test_the_committed_results_are_drawn(tmp_path: Path) -> None:
    """Anew: as many pictures as there are, of the same results."""
    done = subprocess.run(
        [sys.executable, str(BENCH / "all.py"), "--draw", "--folder", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    drawn = sorted(tmp_path.iterdir())
    assert [path.name for path in drawn] == [path.name for path in PICTURES]
    for path in drawn:
        assert path.stat().st_size > 10_000
        assert named_source(path) == named_source(ROOT / "docs" / "pictures" / path.name)
