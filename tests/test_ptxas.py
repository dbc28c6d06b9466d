"""The reader of nvcc's report sees spills, stack frames, complaints, and too many or no kernels."""

from __future__ import annotations

import pytest

from ptxas import MOST_KERNELS, Function, faults, functions


def report(name: str, architecture: str = "sm_90a", stack: int = 0, stores: int = 0, loads: int = 0) -> str:
    return f"""
  ptxas info    : 0 bytes gmem
  ptxas info    : Compiling entry function '{name}' for '{architecture}'
  ptxas info    : Function properties for {name}
      {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
  ptxas info    : Used 32 registers, used 1 barriers, 8 bytes cumulative stack size, 360 bytes cmem[0]
  ptxas info    : Compile time = 9.544 ms
"""


CALLED = """
  ptxas info    : Function properties for _Z6calledf
      8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_kernels_and_the_functions_that_they_call() -> None:
    text = report("_Z1av", "sm_80", 16, 4, 8) + CALLED + report("_Z1bv")
    assert functions(text.splitlines()) == [
        Function("sm_80", "_Z1av", True, 16, 4, 8),
        Function("sm_80", "_Z6calledf", False, 8, 0, 0),
        Function("sm_90a", "_Z1bv", True, 0, 0, 0),
    ]


def test_a_clean_build() -> None:
    text = report("_Z1av", "sm_80") + report("_Z1av")
    assert faults(text.splitlines(), ["sm_80", "sm_90a"]) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (report("_Z1av", stores=4), "sm_90a: _Z1av spills: 4 bytes stored"),
        (report("_Z1av", loads=8), "8 loaded"),
        (report("_Z1av", stack=24), "stack frame of 24 bytes"),
        (report("_Z1av") + CALLED, "_Z6calledf has a stack frame"),
        (report("_Z1av", "sm_80"), "sm_90a: no kernels"),
        ("", "sm_90a: no kernels"),
        ("".join(report(f"_Z{i}av") for i in range(MOST_KERNELS + 1)), f"{MOST_KERNELS + 1} kernels"),
        (
            report("_Z1av")
            + "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
            "serialized due to insufficient register resources for the wgmma pipeline in the function '_Z1av'",
            "are serialized",
        ),
    ],
)
def test_each_fault_is_found(text: str, fault: str) -> None:
    (found,) = faults(text.splitlines(), ["sm_90a"])
    assert fault in found
