"""Processes that fork, and what their children do: see test_row_24_children_use_threads."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from chains_table import CONV_ROWS, module_input, modules


@cache
def drawn() -> tuple[list[nn.Module], Tensor]:
    return [modules(row, padding=1)[0] for row in CONV_ROWS], module_input(4, size=256)


def run() -> list[bytes]:
    models, x = drawn()
    # As bytes: PyTorch's own operators on large tensors hang in a child of a thread that had run some in parallel.
    with torch.no_grad():
        return [model(x).numpy().tobytes() for model in models]


def work() -> str:
    """Whether two threads give one's bits, and the share of the time that threads other than this one worked."""
    torch.set_num_threads(1)  # drawing with more would start PyTorch's own
    alone = run()
    torch.set_num_threads(2)
    all_threads, this_one = time.process_time(), time.thread_time()
    same = all(run() == alone for _ in range(5))
    all_threads, this_one = time.process_time() - all_threads, time.thread_time() - this_one
    return f"{same} {1 - this_one / all_threads:.2f}"


def in_child(call: Callable[[], str]) -> str:
    """What ``call`` returns in a forked child."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, call().encode())
        os._exit(0)
    os.close(writes)
    told = os.read(reads, 1000).decode()
    assert os.waitpid(child, 0)[1] == 0
    return told


def in_thread(call: Callable[[], str]) -> str:
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(call()))
    thread.start()
    thread.join()
    return told[0]


def after(*calls: Callable[[], object]) -> str:
    """What the last one returns."""
    *first, last = calls
    for call in first:
        call()
    return str(last())


def use_pytorchs_threads() -> None:
    torch.set_num_threads(2)
    torch.ones(1 << 20).mul_(2)


def use_numpys_threads() -> None:
    np.ones((512, 512)) @ np.ones((512, 512))


def beside_a_thread(call: Callable[[], str]) -> str:
    """Another thread, which has an OpenMP team of its own, is there meanwhile."""
    is_there, may_end = threading.Event(), threading.Event()

    def stay() -> None:
        use_pytorchs_threads()
        is_there.set()
        may_end.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    is_there.wait()
    try:
        return call()
    finally:
        may_end.set()
        thread.join()


def of_multiprocessing(method: str) -> str:
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.apply(work)


def child() -> str:
    return in_child(work)


CASES: dict[str, Callable[[], str]] = {
    "nothing ran": child,
    "ours ran": lambda: after(work, child),
    "PyTorch's ran": lambda: after(use_pytorchs_threads, child),
    "numpy's ran": lambda: after(use_numpys_threads, child),
    "another thread forks": lambda: after(work, lambda: in_thread(child)),
    "another thread works and forks": lambda: after(work, lambda: in_thread(lambda: after(work, child))),
    "beside a thread": lambda: beside_a_thread(child),
    "a child's thread": lambda: after(work, lambda: in_child(lambda: in_thread(work))),
    "a child's child": lambda: after(work, lambda: in_child(child)),
    "a child that worked forks": lambda: in_child(lambda: after(work, child)),
    "multiprocessing by fork": lambda: after(work, lambda: of_multiprocessing("fork")),
    "multiprocessing by forkserver": lambda: after(work, lambda: of_multiprocessing("forkserver")),
    "multiprocessing by spawn": lambda: after(work, lambda: of_multiprocessing("spawn")),
}
