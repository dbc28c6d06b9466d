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


WIDE_ROWS = """
import sys
import torch
from chains_table import BY_NAME, draw_own, generator, randn
from fusedconv import _C
from helpers import check_chain

assert _C.cpu_isa() == sys.argv[1], _C.cpu_isa()
row, gen = BY_NAME["group_norm_scale_max_pool_clamp"], generator("wide")
one, four = 100 + 0.01 * randn(gen, 1, 1, 1, 2**22), randn(gen, 1, 4, 1, 2**20)
for v, groups in ((one, 1), (four, 1), (four, 4), (four.contiguous(memory_format=torch.channels_last), 1)):
    own = draw_own(
        row, v.shape[1], gen, groups=groups, norm_weight=None, norm_bias=None, pool_size=1,
        scale=torch.ones(1), clamp_min=None, clamp_max=None,
    )
    check_chain(row, v, own)
print("right")
"""


@pytest.mark.parametrize("level", _C.cpu_isas())
def test_row_8_moments_of_one_very_wide_row(level: str) -> None:
    """Millions of elements in one row: however wide the vectors, their sums must not lose digits."""
    assert "right" in new_process(WIDE_ROWS, level, environment={"FUSEDCONV_CPU_ISA": level})


LARGE = """
import sys
import torch
from fusedconv import _C

assert _C.cpu_isa() == sys.argv[1], _C.cpu_isa()
largest = {torch.float32: 3.4e38, torch.float64: 1.7e308, torch.bfloat16: 3.3e38, torch.float16: 65504.0}
for dtype, most in largest.items():
    for value in (1e4, min(1e38, most), most):
        v = torch.full((1, 3, 5, 37), value, dtype=dtype)
        torch.testing.assert_close(torch.ops.fusedconv.relu_hardswish(v), v, rtol=1e-15, atol=0)
print("right")
"""


@pytest.mark.parametrize("level", _C.cpu_isas())
def test_hardswish_of_huge_values_does_not_overflow(level: str) -> None:
    assert "right" in new_process(LARGE, level, environment={"FUSEDCONV_CPU_ISA": level})


def test_levels_of_this_machine() -> None:
    """x86-64 has a baseline below AVX2; the last one is used unless the variable says otherwise."""
    levels = _C.cpu_isas()
    assert levels[0] == "baseline"
    code = "import os; os.environ.pop('FUSEDCONV_CPU_ISA', 0); from fusedconv import _C; print(_C.cpu_isa())"
    assert new_process(code).strip() == levels[-1]
    if platform.machine() == "x86_64":
        flags = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
        assert ("avx2" in levels) == (" avx2" in flags and " fma" in flags)


NOT_HERE = [level for level in ("avx2", "avx512") if level not in _C.cpu_isas()]


@pytest.mark.parametrize("level", ["avx9000", " ", *NOT_HERE])
def test_a_level_that_does_not_exist_here_is_an_error(level: str) -> None:
    """At the import, in words: neither another level in silence nor an illegal instruction. It can be mended."""
    code = """
        import os
        try:
            import fusedconv
        except ValueError as error:
            print(error)
        os.environ["FUSEDCONV_CPU_ISA"] = "baseline"
        import fusedconv
        assert fusedconv._C.cpu_isa() == "baseline"
    """
    (line,) = new_process(code, environment={"FUSEDCONV_CPU_ISA": level}).splitlines()
    assert all(word in line for word in ("FUSEDCONV_CPU_ISA", f"'{level}'", *_C.cpu_isas()))


@pytest.mark.parametrize(("name", "level"), [("", _C.cpu_isas()[-1]), ("BaseLine", "baseline")])
def test_an_empty_level_is_none_and_case_does_not_matter(name: str, level: str) -> None:
    code = "import fusedconv; print(fusedconv._C.cpu_isa())"
    assert new_process(code, environment={"FUSEDCONV_CPU_ISA": name}).strip() == level
