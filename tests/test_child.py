"""What becomes of a child is told of the case that it ran, and the next case has a new one."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from child import IS_SANITIZED, MOST_BYTES, Child, peak_bytes


def misbehave(how: str) -> None:
    if how == "crash":
        ctypes.string_at(8)
    elif how == "hang":
        time.sleep(3600)
    elif how == "leave":
        os._exit(0)
    elif how == "eat":
        bytes(2 * MOST_BYTES)
    else:
        assert how == "behave", f"fails by {how}"


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(misbehave)
    yield child
    child.close()


WORDS = {"crash": "SEGV.*string_at", "leave": "died: exit status 0", "raise": "fails by raise"}


@pytest.mark.parametrize("how", WORDS)
def test_a_case_that_ends_the_child_or_fails(child: Child, how: str) -> None:
    child.run("behave")
    with pytest.raises(AssertionError, match=f"(?s){WORDS[how]}.*in {how!r}"):
        child.run(how)
    child.run("behave")


class Deadly:
    """Whoever unpickles it dies."""

    def __reduce__(self) -> tuple[Callable[[int], NoReturn], tuple[int]]:
        return os._exit, (3,)


def test_a_child_that_dies_at_its_start() -> None:
    child = Child(Deadly())  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(AssertionError, match="died at its start: exit status 3"):
            child.run("behave")


def test_a_child_that_dies_between_cases(child: Child) -> None:
    child.run("behave")
    assert child.process is not None
    child.process.kill()
    child.process.join()
    with pytest.raises(AssertionError, match=r"died before it got a case: SIGKILL(?s:.*)in 'behave'"):
        child.run("behave")
    child.run("behave")


def test_a_case_that_hangs() -> None:
    child = Child(misbehave)
    child.run("behave")
    child.timeout = 0.1
    with pytest.raises(AssertionError, match=r"more than 0\.1 s: SIGKILL(?s:.*)in 'hang'"):
        child.run("hang")


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or IS_SANITIZED, reason="the memory is bounded on Linux only"
)
def test_a_case_that_takes_all_memory(child: Child) -> None:
    with pytest.raises(AssertionError, match="MemoryError"):
        child.run("eat")
    assert 9 * 10**7 < peak_bytes(lambda: bytearray(b"1") * 10**8) < 2 * 10**8
