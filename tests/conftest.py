from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from cuda_conv import SOURCE, Runner, expected_path, forget
from fusedconv import _dispatch

# Of the processes that tests start: idle threads that spin take the cores of whoever works beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The profile of CI draws the same examples each time; `HYPOTHESIS_PROFILE=search` looks for new ones.
hypothesis.settings.register_profile("ci", max_examples=40, derandomize=True, deadline=None, database=None)
# `fuzz` draws 30,000 cases in test_fuzz.py, the same ones each time.
hypothesis.settings.register_profile(
    "fuzz", max_examples=1000, derandomize=True, deadline=None, database=None
)
hypothesis.settings.register_profile("search", max_examples=1000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="torch.cuda.is_available() is false"))


@pytest.fixture(autouse=True)
def _unchanged_state() -> Iterator[None]:
    """Each test starts from, and leaves, the same seed, thread count and global flags."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    _dispatch._graphs_open_levels = (
        False  # or each call of the tests that follow would ask all tensors for tangents
    )
    torch.use_deterministic_algorithms(False)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


@pytest.fixture
def run(caplog: pytest.LogCaptureFixture) -> Iterator[Runner]:
    """Calls of operators on CUDA, with a look at the path that they take."""
    caplog.set_level(logging.DEBUG, logger="fusedconv")
    yield Runner(caplog)
    forget()


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our conv runs wherever it serves, whether it is the faster one or not, if nothing else was asked for."""
    monkeypatch.setenv("FUSEDCONV_CUDA_SOURCE", SOURCE)


@pytest.fixture
def direct_path() -> None:
    """For what holds there only: PyTorch's conv promises less."""
    if expected_path() != "direct":
        pytest.skip("the two-step path runs on this card, or was asked for")
