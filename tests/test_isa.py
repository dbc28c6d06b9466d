"""The instruction-set levels of the CPU kernels: each one that runs here is right; the variable caps it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from fusedconv import _C
from helpers import new_process

LEVELS = """
import sys
import torch
from chains_table import BY_NAME, draw_own, generator, randn
from fusedconv import _C
from helpers import SIZES, check_chain, check_conv

assert _C.cpu_isa() == sys.argv[1], _C.cpu_isa()
for row in BY_NAME.values():
    gen = generator(row.chain, "isa")
    for layout in (torch.contiguous_format, torch.channels_last):
        for i, size in enumerate(SIZES):
            other = SIZES[(i * 7 + 5) % len(SIZES)]
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                own = draw_own(row, size, gen, dtype=dtype, pool_size=min(2, other))
                v = randn(gen, 2, size, 5, other).to(dtype=dtype, memory_format=layout)
                check_chain(row, v, own)
                if row.module and dtype in (torch.float32, torch.float64):
                    x = randn(gen, 2, 3, 5, other + 2).to(dtype=dtype, memory_format=layout)
                    weight = randn(gen, size, 3, 3, 3).to(dtype) / 5
                    check_conv(row, x, weight, randn(gen, size).to(dtype), own)
                    x = randn(gen, 1, other, 9, 9).to(dtype=dtype, memory_format=layout)
                    weight = randn(gen, size, other, 2, 3).to(dtype) / (6 * other) ** 0.5
                    own = draw_own(row, size, gen, dtype=dtype, pool_size=1)
                    check_conv(row, x, weight, None, own, stride=(2, 1), padding=(1, 2), dilation=(1, 2))
print("right")
"""


@pytest.mark.parametrize("level", _C.cpu_isas())
def test_each_level_is_right(level: str) -> None:
    assert "right" in new_process(LEVELS, level, environment={"FUSEDCONV_CPU_ISA": level})


def test_levels_of_this_machine() -> None:
    """x86-64 has a baseline below AVX2; the last one is used unless the variable says otherwise."""
    levels = _C.cpu_isas()
    assert levels[0] == "baseline"
    code = "from fusedconv import _C; print(_C.cpu_isa())"
    assert new_process(code, environment={"FUSEDCONV_CPU_ISA": ""}).strip() == levels[-1]
    if platform.machine() == "x86_64":
        flags = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
        assert ("avx2" in levels) == (" avx2" in flags and " fma" in flags)


def test_a_level_that_the_machine_lacks_is_not_used() -> None:
    """The variable is a cap: above the machine's best, the best runs, and no illegal instruction."""
    code = "from fusedconv import _C; print(_C.cpu_isa())"
    assert new_process(code, environment={"FUSEDCONV_CPU_ISA": "avx512"}).strip() == _C.cpu_isas()[-1]


def test_an_unknown_level_is_said_to_be_unknown() -> None:
    """A misspelt level must not silently run something else."""
    code = """
        import torch
        try:
            import fusedconv
            from fusedconv import _C
            _C.cpu_isa()
            torch.ops.fusedconv.relu_hardswish(torch.ones(1, 1, 1, 1))
        except Exception as error:
            assert "FUSEDCONV_CPU_ISA" in str(error)
            print("said")
    """
    import os
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", "\n".join(line[8:] for line in code.split("\n"))],
        env={**os.environ, "FUSEDCONV_CPU_ISA": "avx9000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "FUSEDCONV_CPU_ISA" in done.stdout + done.stderr or "said" in done.stdout
