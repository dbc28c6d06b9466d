"""Threads, forks, and the same bits however many of them run (rows 23, 24, 25 and 29)."""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from chains_table import CONV_ROWS, ROWS, Row, draw_own, generator, module_input, modules, randn
from forks import CASES
from helpers import denormals, flushing_denormals, new_process, same_bits

rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
fork_exists = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
def test_row_25_any_number_of_threads_gives_the_same_bits(row: Row) -> None:
    gen = generator(row.chain, "threads")
    for channels, size, batch in ((16, 33, 3), (33, 20, 1), (8, 64, 2)):
        own = draw_own(row, channels, gen)
        v, x, weight = (
            randn(gen, batch, channels, size, size),
            randn(gen, batch, 3, size, size),
            randn(gen, channels, 3, 3, 3),
        )
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append([row.chain_op(v, own)])
            if row.module:
                results[-1].append(row.conv_op(x, weight, None, own))
        for result in results[1:]:
            assert all(same_bits(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
def test_row_25_all_threads_flush_denormals_as_the_caller_does(row: Row, dtype: torch.dtype) -> None:
    """PyTorch sets the mode of the calling thread alone. Gradients in float32: those of others are PyTorch's work."""
    gen = generator(row.chain, "flush", dtype)
    own = draw_own(row, 16, gen, dtype=dtype)
    v = denormals(randn(gen, 2, 16, 64, 64), dtype)
    x, weight = denormals(randn(gen, 2, 3, 64, 64), torch.float32), randn(gen, 16, 3, 3, 3)

    def run(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        if dtype is not torch.float32:
            return [row.chain_op(v, own)]
        leaves = [v.requires_grad_(), x.requires_grad_()]
        values = [row.chain_op(v, own)]
        if row.module:
            values.append(row.conv_op(x, weight, None, own))
        gradients = [torch.autograd.grad(y.sum(), leaf)[0] for y, leaf in zip(values, leaves, strict=False)]
        return [*(y.detach() for y in values), *gradients]

    run(2)  # a thread starts with the mode of the one that starts it
    with flushing_denormals():
        alone, *others = [run(threads) for threads in (1, *[2] * 10)]
    for result in others:
        assert all(same_bits(a, b) for a, b in zip(result, alone, strict=True))


RESPECTED = """
import os
import torch
from chains_table import CONV_ROWS, draw_own, generator, randn

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(1)  # first of all: drawing the input would start PyTorch's own threads
gen = generator("respected")
x, weight = randn(gen, 4, 16, 96, 96), randn(gen, 64, 16, 3, 3)
for number in (1, 2):
    torch.set_num_threads(number)
    before = threads()  # torch 2.5 starts one by itself here
    for row in CONV_ROWS:
        own = draw_own(row, 64, gen)
        row.conv_op(x, weight, None, own)
        row.chain_op(x, draw_own(row, 16, gen))
    print(threads() - before)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")
def test_row_25_one_thread_is_one_thread() -> None:
    """With `torch.set_num_threads(1)` no second thread is even started; with 2 one is."""
    assert new_process(RESPECTED).split() == ["0", "1"]


@rows
def test_row_23_many_python_threads_at_once(row: Row) -> None:
    """Eight threads call with different inputs; each gets the bits that it gets alone."""
    fused, _ = modules(row, padding=1)
    inputs = [module_input(2, size=40, seed=seed) for seed in range(8)]
    with torch.inference_mode():
        alone = [fused(x).clone() for x in inputs]
    start = threading.Barrier(8)

    def work(i: int) -> bool:
        start.wait()
        with torch.inference_mode():
            return all(same_bits(fused(inputs[i]), alone[i]) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@rows
def test_row_23_training_in_many_python_threads(row: Row) -> None:
    fused, _ = modules(row)
    inputs = [module_input(2, seed=seed) for seed in range(4)]
    parameters = list(fused.parameters())

    def gradients(i: int) -> list[torch.Tensor]:
        return list(torch.autograd.grad(fused(inputs[i]).square().sum(), parameters))

    alone = [gradients(i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(gradients, range(4)))
    for a, b in zip(alone, together, strict=True):
        for one, other in zip(a, b, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_row_23_the_gil_is_released() -> None:
    """While a long call runs in one thread, another one goes on executing Python."""
    gen = generator("gil")
    x, weight = torch.rand(16, 32, 128, 128, generator=gen), randn(gen, 64, 32, 3, 3)
    torch.set_num_threads(1)
    row = CONV_ROWS[0]
    inside = threading.Event()
    ended: list[float] = []

    def call() -> None:
        inside.set()
        row.conv_op(x, weight, None, {})
        ended.append(time.perf_counter())

    worker = threading.Thread(target=call)
    began = time.perf_counter()
    worker.start()
    inside.wait()
    ticks = []
    while worker.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.002)
    took = ended[0] - began
    assert took > 0.05, "the call is too short to show anything"
    during = [t for t in ticks if t < ended[0]]
    assert len(during) > took / 0.002 / 10, f"only {len(during)} steps of Python in {took:.2f} s"
    assert max(b - a for a, b in itertools.pairwise(during)) < took / 2


FORK = """
import os
import torch
from torch.utils.data import DataLoader, Dataset
from chains_table import CONV_ROWS, module_input, modules

assert not torch.cuda.is_initialized()
models = [modules(row, padding=1)[0] for row in CONV_ROWS]
x = module_input(4, size=48)

def run():
    # As bytes: PyTorch's own operators on large tensors hang in a forked child whose parent used OpenMP.
    with torch.no_grad():
        return [m(x).numpy().tobytes() for m in models]

torch.set_num_threads(2)
expected = run()  # parallel work before the fork

class Data(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        torch.set_num_threads(1 + i % 2)
        return run() == expected

for _ in range(2):
    loader = DataLoader(Data(), None, num_workers=2, multiprocessing_context="fork")
    assert list(loader) == [True] * 6
    assert run() == expected

child = os.fork()
if child == 0:
    torch.set_num_threads(2)
    os._exit(0 if run() == expected else 1)
assert os.waitpid(child, 0)[1] == 0
print("children are right")
"""


@fork_exists
def test_row_24_children_after_parallel_work() -> None:
    """DataLoader workers and a plain fork after the parent used its threads: no hang, the same bits."""
    assert "children are right" in new_process(FORK, timeout=120)


@fork_exists
def test_row_24_import_then_fork() -> None:
    """Nothing was run before the fork."""
    code = """
        import os, torch
        from chains_table import CONV_ROWS, module_input, modules
        child = os.fork()
        with torch.no_grad():
            results = [hash(modules(row)[0](module_input()).numpy().tobytes()) for row in CONV_ROWS]
        os.write(1, f"{results}\\n".encode())
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    lines = new_process(code, timeout=120).split("\n")
    assert lines[0] == lines[1] != ""


@fork_exists
@pytest.mark.parametrize("case", CASES)
def test_row_24_children_use_threads(case: str) -> None:
    """Whatever ran before the fork, and in whichever thread: no hang, one thread's bits, and work for two."""
    code = "import forks, sys; print(forks.CASES[sys.argv[1]]())"
    numpys_threads = 2 if "numpy" in case else 1  # with one, a process that ran nothing has a single thread
    environment = {"OPENBLAS_NUM_THREADS": str(numpys_threads)}
    same, share = new_process(code, case, environment=environment, timeout=120).split()
    assert same == "True"
    assert float(share) > 0.1, "other threads did no work"


EXIT = """
import threading, torch
from chains_table import CONV_ROWS, module_input, modules
model = modules(CONV_ROWS[0])[0]
x = module_input(4, size=64)
threads = [threading.Thread(target=lambda: [model(x) for _ in range(5)]) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print("done")
"""


def test_row_23_threads_that_end_and_a_process_that_ends() -> None:
    """Threads that used the kernels may end, and so may the process, without a crash."""
    assert "done" in new_process(EXIT, timeout=120)


@rows
def test_row_29_deterministic_algorithms(row: Row) -> None:
    """Works, and gives the same bits with and without, gradients included."""
    fused, _ = modules(row, padding=1)
    x = module_input(3)
    runs = []
    for deterministic in (False, True, False):
        torch.use_deterministic_algorithms(deterministic)
        leaf = x.clone().requires_grad_()
        y = fused(leaf)
        runs.append([y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *fused.parameters()])])
    for run in runs[1:]:
        assert all(same_bits(a, b) for a, b in zip(runs[0], run, strict=True))
