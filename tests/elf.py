"""A small reader of 64-bit little-endian ELF files: needed libraries and symbols."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECTION = "<IIQQQQIIQQ"  # name, type, flags, address, offset, size, link, info, alignment, entry size
SYMTAB, STRTAB, DYNAMIC, DYNSYM = 2, 3, 6, 11
WEAK, UNIQUE = 2, 10


@dataclass(frozen=True)
class Symbol:
    name: str
    defined: bool
    weak: bool  # or GNU unique: one copy for the whole process either way


def _sections(data: bytes) -> list[tuple[int, ...]]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    return [struct.unpack_from(SECTION, data, offset + i * size) for i in range(count)]


def _text(data: bytes, strings: tuple[int, ...], at: int) -> str:
    start = strings[4] + at
    return data[start : data.index(b"\0", start)].decode()


def needed(path: Path) -> list[str]:
    """The libraries that the dynamic linker must find (DT_NEEDED)."""
    data = path.read_bytes()
    sections = _sections(data)
    names = []
    for section in (s for s in sections if s[1] == DYNAMIC):
        for at in range(section[4], section[4] + section[5], 16):
            tag, value = struct.unpack_from("<qQ", data, at)
            if tag == 1:
                names.append(_text(data, sections[section[6]], value))
    return names


def _symbols(path: Path, kind: int) -> Iterator[Symbol]:
    data = path.read_bytes()
    sections = _sections(data)
    for section in (s for s in sections if s[1] == kind):
        for at in range(section[4], section[4] + section[5], 24):
            name, info, _, index = struct.unpack_from("<IBBH", data, at)
            if name:
                yield Symbol(_text(data, sections[section[6]], name), index != 0, info >> 4 in (WEAK, UNIQUE))


def dynamic_symbols(path: Path) -> list[Symbol]:
    return list(_symbols(path, DYNSYM))


def object_symbols(path: Path) -> list[Symbol]:
    """The symbols of an object file, before the linker has chosen among weak copies."""
    return list(_symbols(path, SYMTAB))


def stray_weak_symbols(path: Path) -> list[str]:
    """Weak definitions in the object file of an instruction-set unit that other units may share.

    What lives in the unit's own namespace carries its name, and differs between units. Anything else, the
    standard library's inline functions included, the linker may merge with the copy of another unit.
    """
    unit = next((name for name in ("avx512", "avx2", "baseline") if name in str(path)), None)
    # DW.ref.* are pointers to the exception handler of the language, no code.
    weak = [s.name for s in object_symbols(path) if s.defined and s.weak and not s.name.startswith("DW.ref.")]
    return [name for name in weak if unit is None or unit not in name]


if (
    __name__ == "__main__"
):  # python tests/elf.py OBJECT...: fails if a unit has weak symbols that it may share
    stray = {path: stray_weak_symbols(Path(path)) for path in sys.argv[1:]}
    for path, names in stray.items():
        for name in names:
            print(f"{path}: weak symbol {name}")
    print(f"{len(stray)} object files, {sum(map(len, stray.values()))} stray weak symbols")
    sys.exit(1 if any(stray.values()) or not stray else 0)
