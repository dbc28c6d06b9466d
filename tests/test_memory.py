"""The reference workloads: no operator of PyTorch runs, and no conv output is allocated."""

from __future__ import annotations

import json
import platform

import pytest
import torch

from chains_table import CONV_ROWS, ROWS, Row, draw_own, generator, randn, reference_models
from helpers import BOUNDS, check_chain, new_process, profile

rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@rows
def test_no_operator_of_pytorch_computes(row: Row, layout: torch.memory_format) -> None:
    """In the profiler: our operator and allocation, nothing else, with and without autograd."""
    fused, _, x = reference_models(row)
    x = torch.cat([x, x]).contiguous(memory_format=layout)
    fused(x)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            ran = profile(lambda: fused(x))
        assert any("fusedconv::" in name for name in ran.operators), ran
        assert ran.computing == []


@pytest.mark.parametrize("parameters", [None, torch.float32], ids=["own dtype", "float32"])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
def test_parameters_are_read_in_the_dtype_that_they_have(
    row: Row, dtype: torch.dtype, parameters: torch.dtype | None
) -> None:
    """No operator of PyTorch casts them first."""
    gen = generator(row.chain, dtype)
    own = draw_own(row, 8, gen, dtype=parameters or dtype)
    v = randn(gen, 2, 8, 5, 9).to(dtype)
    check_chain(row, v, own)
    assert profile(lambda: row.chain_op(v, own)).computing == []


@rows
def test_reference_workload_is_exact_and_within_1e_6(row: Row) -> None:
    fused, plain, x = reference_models(row)
    with torch.no_grad():
        y = fused(x)
        right = plain.double()(x.double())
    assert float((y.double() - right).norm() / right.norm()) < 1e-6


MEMORY = """
import gc, json, sys, threading, time
import torch
from chains_table import BY_NAME, reference_models

# The resident set's high-water mark, set back before each call.
def resident(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024

def extra(call):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = resident("VmRSS")
    y = call()
    peak = resident("VmHWM")
    return peak - before - y.numel() * y.element_size()

torch.set_num_threads(2)  # each thread has its tiles
row = BY_NAME[sys.argv[1]]
fused, plain, x = reference_models(row)
with torch.no_grad():
    fused(x), plain(x)
    x = x.expand(32, -1, -1, -1).contiguous()
    fused(x)
    ours = max(extra(lambda: fused(x)) for _ in range(3))
    theirs = min(extra(lambda: plain(x)) for _ in range(2))
print(json.dumps([ours, theirs]))
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc/self")
@pytest.mark.parametrize(
    "row", [row for row in CONV_ROWS if row.has_pool or "logsumexp" in row.chain], ids=lambda row: row.chain
)
def test_extra_memory_is_under_a_tenth_of_eagers(row: Row) -> None:
    """Batch 32 of the reference workload, by the resident set's high-water mark."""
    ours, theirs = json.loads(new_process(MEMORY, row.chain).splitlines()[-1])
    assert theirs > 2 * 32 * 64 * 126 * 126 * 4 * 0.9, (
        f"eager took only {theirs / 1e6:.0f} MB: the measure is wrong"
    )
    assert ours < 0.1 * theirs, f"{ours / 1e6:.1f} MB, eager {theirs / 1e6:.1f} MB"


MANY_THREADS = """
import torch
import fusedconv

def resident(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024

torch.set_num_threads(16)
model = fusedconv.ConvGroupNormTanhHardswishLogSumExp(8, 64, 3, groups=16)
with torch.no_grad():
    model(torch.rand(16, 8, 20, 20))  # the threads are there
    x = torch.rand(16, 8, 240, 240)
    open("/proc/self/clear_refs", "w").write("5")
    before = resident("VmRSS")
    model(x)
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc/self")
def test_memory_is_bounded_with_many_threads() -> None:
    """What is kept of a sample is 14 MB here, and of all samples 232 MB: not each of 16 threads may keep one."""
    assert int(new_process(MANY_THREADS)) < 80e6


LEAK = """
import torch
from chains_table import CONV_ROWS, module_input, modules

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) * 1024

models = [modules(row, padding=1)[0] for row in CONV_ROWS]
x = module_input(8, size=40)

def work(times):
    for _ in range(times):
        for model in models:
            with torch.no_grad():
                model(x)
            model(x).sum().backward()
            try:
                model(x[:, :2])
            except Exception:
                pass

work(15)
before = resident()
work(60)
print(resident() - before)
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc/self")
def test_nothing_leaks() -> None:
    """Hundreds of calls, gradients and errors leave the resident set where it was, but for noise."""
    assert int(new_process(LEAK)) < 8e6
