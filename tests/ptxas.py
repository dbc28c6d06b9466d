"""Reads what `nvcc -Xptxas -v` says of each function: its stack frame, its spilled registers, and complaints.

python tests/ptxas.py BUILD_LOG ARCHITECTURE...    e.g. build.log sm_80 sm_90a
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Of an architecture: each costs build time and room in the wheel.
MOST_KERNELS = 130
# Parts of the names of kernels that still spill some bytes a thread, and the most that they may: a debt.
KNOWN_SPILLS = {"conv_kernel": 32, "PoolPass": 96, "strip_kernel": 384}
STACK_IS_MEANT: tuple[str, ...] = ()  # parts of the names of functions that may have a stack frame

_KERNEL = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<architecture>[^']+)'")
_FUNCTION = re.compile(r"Function properties for (?P<name>\S+)")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_COMPLAINT = "Potential Performance Loss"  # such as wgmmas that wait for one another


@dataclass(frozen=True)
class Function:
    architecture: str
    name: str
    is_kernel: bool
    stack: int
    spill_stores: int
    spill_loads: int

    @property
    def fault(self) -> str:
        """What must not be; empty if nothing."""
        known = max((most for part, most in KNOWN_SPILLS.items() if part in self.name), default=0)
        if 0 < max(self.spill_stores, self.spill_loads) <= known:
            return ""
        if self.spill_stores or self.spill_loads:
            return f"spills: {self.spill_stores} bytes stored, {self.spill_loads} loaded"
        if self.stack and not any(part in self.name for part in STACK_IS_MEANT):
            return f"has a stack frame of {self.stack} bytes"
        return ""


def functions(lines: Iterable[str]) -> list[Function]:
    """Kernels, and the functions that they call."""
    found = []
    kernel = architecture = name = ""
    for line in lines:
        if match := _KERNEL.search(line):
            kernel, architecture = match["name"], match["architecture"]
        elif match := _FUNCTION.search(line):
            name = match["name"]
        elif match := _MEMORY.search(line):
            found.append(Function(architecture, name, name == kernel, *map(int, match.groups())))
    return found


def faults(lines: Sequence[str], architectures: Iterable[str]) -> list[str]:
    """All that is wrong with a build, of which each architecture must have kernels."""
    of_build = functions(lines)
    wrong = [f"{f.architecture}: {f.name} {f.fault}" for f in of_build if f.fault]
    wrong += [line.strip() for line in lines if _COMPLAINT in line]
    kernels = count_kernels(of_build)
    wrong += [f"{a}: no kernels" for a in architectures if a not in kernels]
    wrong += [
        f"{a}: {n} kernels, the most are {MOST_KERNELS}" for a, n in kernels.items() if n > MOST_KERNELS
    ]
    return wrong


def count_kernels(of_build: Iterable[Function]) -> Counter[str]:
    return Counter(f.architecture for f in of_build if f.is_kernel)


if __name__ == "__main__":
    log, *asked = sys.argv[1:]
    lines = Path(log).read_text(errors="replace").splitlines()
    for architecture, count in count_kernels(functions(lines)).items():
        print(f"{architecture}: {count} kernels")
    wrong = faults(lines, asked)
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)
