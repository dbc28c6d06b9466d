"""What the tests of the conv on CUDA share: modes, random calls, references, and calls whose path is looked at.

The direct path runs wherever it serves, whether it is the faster one or not. All tests also serve with
FUSEDCONV_CUDA_SOURCE set, to "sm_80" or to "none"; with "none" the two-step path must run.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from chains_table import Own, Row, draw_own, generator, map_tensors
from fusedconv._register import OPERATORS
from helpers import BOUNDS, assert_close, on

T = TypeVar("T")
Pair = tuple[int, int]
SOURCE = os.environ.get("FUSEDCONV_CUDA_SOURCE", "best")


@dataclass(frozen=True)
class Mode:
    name: str
    dtype: torch.dtype
    precision: str | None
    bound: float
    in_kernel: str  # how a kernel's name says it

    def __str__(self) -> str:
        return self.name


IEEE = Mode("ieee", torch.float32, "ieee", BOUNDS[torch.float32], "SplitHalves")
TF32 = Mode("tf32", torch.float32, "tf32", 6e-4, r"(?<!Split)Halves")
BF16 = Mode("bf16", torch.bfloat16, None, BOUNDS[torch.bfloat16], "BFloat16s")
FP16 = Mode("fp16", torch.float16, None, BOUNDS[torch.float16], r"(?<!Split)Halves")
MODES = (IEEE, TF32, BF16, FP16)
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


def expected_path() -> str:
    """Of the calls that the direct path covers."""
    serves = SOURCE != "none" and torch.cuda.get_device_capability() >= (8, 0)
    return "direct" if serves else "two-step"


# ---- random calls --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call but for its mode and layout; what an error shows."""

    batch: int
    channels: Pair
    size: Pair  # of the input
    kernel: Pair = (3, 3)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    pool: Pair = (2, 2)
    has_bias: bool = True

    @property
    def geometry(self) -> dict[str, Pair]:
        return {"padding": self.padding, "dilation": self.dilation}


SIDES = (1, 7, 31, 62, 126, 127, 128, 129, 254, 255, 256, 257, 300)  # of the conv's output
SAME = (-1, -1)
VALUES: dict[str, Sequence[Any]] = {
    "batch": (1, 2, 3),
    "c_in": (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64),
    "c_out": (1, 7, 8, 16, 17, 32, 33, 64, 65, 128, 200),
    "height": (1, 2, 3, 5, *SIDES),
    "width": SIDES,
    "kernel": ((1, 1), (2, 2), (3, 3), (3, 3), (5, 5), (7, 7), (3, 5), (5, 2), (1, 7), (7, 1)),
    "padding": ((0, 0), (1, 1), (2, 2), (3, 3), (0, 3), (2, 1), SAME, SAME),
    "dilation": ((1, 1), (1, 1), (2, 2), (3, 3), (1, 3), (2, 1)),
    "pool": ((2, 2), (3, 3), (4, 4), (5, 5), (8, 8), (2, 3), (5, 2)),
    "has_bias": (True, True, False),
}
# A group's elements, at least: of a few, the deviation may be next to nothing, and their norm has no right digits.
GROUP_ELEMENTS = 32


def deck(rng: random.Random, values: Sequence[T]) -> Iterator[T]:
    """Each of the values once, in random order, then each of them again."""
    while True:
        yield from rng.sample(values, len(values))


def cases(
    row: Row,
    *seed: object,
    count: int,
    most: int = 2**22,
    values: dict[str, Sequence[Any]] = VALUES,
) -> Iterator[Case]:
    """Random calls that the direct path covers; each of the values comes in `count / len(values)` of them.

    Neither the input nor the conv's output has many more elements than `most`.
    """
    rng = random.Random(repr((row.chain, *map(str, seed))))
    decks = {name: deck(rng, some) for name, some in values.items()}
    for _ in range(count):
        d = {name: next(cards) for name, cards in decks.items()}
        kernel, dilation, c_out = d["kernel"], d["dilation"], d["c_out"]
        reach = [a * (k - 1) for a, k in zip(dilation, kernel, strict=True)]
        padding = (reach[0] // 2, reach[1] // 2) if d["padding"] == SAME else d["padding"]
        least = d["pool"] if row.has_pool else (1, 1)
        width = max(d["width"], least[1])
        height = min(d["height"], most // (d["batch"] * max(d["c_in"], c_out) * width))
        height = max(height, least[0], math.ceil(GROUP_ELEMENTS / (c_out * width)))
        sides = zip((height, width), reach, padding, strict=True)
        size = [max(1, out + r - 2 * p) for out, r, p in sides]
        area = math.prod(s + 2 * p - r for s, r, p in zip(size, reach, padding, strict=True))
        groups = [g for g in range(1, c_out + 1) if c_out % g == 0 and c_out // g * area >= GROUP_ELEMENTS]
        yield Case(
            d["batch"], (d["c_in"], c_out), (size[0], size[1]), kernel, padding, dilation,
            rng.choice(groups), d["pool"], d["has_bias"],
        )  # fmt: skip


@dataclass(frozen=True)
class Call:
    """The arguments of a call. Its tensors are contiguous."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    own: Own
    geometry: dict[str, Pair]

    def map(self, change: Callable[[Tensor], Tensor]) -> Call:
        bias = None if self.bias is None else change(self.bias)
        return Call(change(self.x), change(self.weight), bias, map_tensors(self.own, change), self.geometry)


def draw(row: Row, case: Case, dtype: torch.dtype, device: str = "cuda", **fixed: Any) -> Call:
    """Random arguments, which keep the conv's output near one; `fixed` are the chain's own that are not drawn."""
    gen = torch.Generator(device).manual_seed(generator(row.chain, case).initial_seed())

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device)

    c_in, c_out = case.channels
    x = randn(case.batch, c_in, *case.size)
    weight = randn(c_out, c_in, *case.kernel) / math.sqrt(c_in * math.prod(case.kernel))
    bias = randn(c_out) / 2 if case.has_bias else None
    fixed = {"pool_size": case.pool, **fixed}
    own = draw_own(row, c_out, generator(row.chain, case), dtype=dtype, groups=case.groups, **fixed)
    call = Call(x, weight, bias, {}, case.geometry).map(lambda t: t.to(dtype))
    return Call(call.x, call.weight, call.bias, on(own, device), call.geometry)


# ---- references ----------------------------------------------------------------------------------


def plain(row: Row, call: Call) -> Tensor:
    """The unfused chain. PyTorch's own conv is exact on any device, quick to start, and multiplies what is padded too."""
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=False):
        return row.plain_conv(call.x, call.weight, call.bias, call.own, **call.geometry)


def in_double(row: Row, call: Call) -> Tensor:
    return plain(row, call.map(torch.Tensor.double))


def to_tf32(t: Tensor) -> Tensor:
    """Rounded to TF32's ten bits of mantissa."""
    return ((t.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


def exact_in(mode: Mode, row: Row, call: Call, dtype: torch.dtype) -> Tensor:
    """What exact arithmetic gives in a mode: twice its error is allowed where that is more than the table's bound.

    One product of TF32 precision has the error of its rounded factors. The direct path computes half precision in
    float32 and rounds once; the two-step path rounds where eager does.
    """
    if mode is TF32:
        return plain(row, Call(to_tf32(call.x), to_tf32(call.weight), call.bias, call.own, call.geometry))
    if mode is IEEE or expected_path() == "two-step":
        return plain(row, call).to(dtype)
    return plain(row, call.map(torch.Tensor.float)).to(dtype)


def hold(y: Tensor, row: Row, call: Call, mode: Mode, what: object = "") -> None:
    """Holds a result against float64, on the device where the call's arguments are."""
    y = y.to(call.x.device)
    what = f"{row.conv} {mode} {tuple(call.x.shape)} {what}"
    assert_close(y, in_double(row, call), exact_in(mode, row, call, y.dtype), mode.bound, what)


def as_pytorch(y: Tensor, reference: Tensor, mode: Mode) -> None:
    """NaN and infinities where the float64 reference has them, and values near its own elsewhere."""
    tolerance = 32 * mode.bound
    torch.testing.assert_close(
        y.to(reference.device).double(), reference, rtol=tolerance, atol=tolerance, equal_nan=True
    )


# ---- calls ---------------------------------------------------------------------------------------


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory, outputs and workspaces alike, is full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def forget() -> None:
    """Launches are prepared again, and say so in the log."""
    for rules in OPERATORS.values():
        rules.kernels.prepared.clear()
        rules.backward.kernels.prepared.clear()


class Runner:
    """Calls operators, each time as a new signature and in poisoned memory, and looks which path runs."""

    def __init__(self, log: pytest.LogCaptureFixture) -> None:
        self._log = log

    def __call__(
        self,
        row: Row,
        call: Call,
        mode: Mode,
        *,
        layout: torch.memory_format = torch.contiguous_format,
        path: str | None = None,
        **more: Any,
    ) -> Tensor:
        call = call.map(lambda t: t.to("cuda"))
        x = call.x.contiguous(memory_format=layout)
        geometry = {**call.geometry, **more}
        forget()
        self._log.clear()
        with torch.no_grad(), poisoned():
            y = row.conv_op(x, call.weight, call.bias, call.own, precision=mode.precision, **geometry)
        self.look(row, expected_path() if path is None else path)
        return y

    def said(self) -> list[str]:
        """Of each launch that was prepared since the last call."""
        return [r.getMessage() for r in self._log.records if r.name.startswith("fusedconv")]

    def look(self, row: Row, path: str) -> None:
        """The log of what was prepared since the last call says so."""
        assert self.said(), f"the log says nothing of {row.conv}"
        for text in self.said():
            assert row.conv in text
            assert f": {path}" in text, f"{path} was expected: {text}"
            source = "sm_" if SOURCE == "best" else SOURCE
            assert path != "direct" or source in text, f"{SOURCE} was asked for: {text}"


def call_again(row: Row, call: Call, mode: Mode = IEEE) -> Tensor:
    """A call that may be prepared already, on whatever path."""
    with torch.no_grad():
        return row.conv_op(
            call.x, call.weight, call.bias, call.own, precision=mode.precision, **call.geometry
        )


def check(
    run: Runner, row: Row, case: Case, mode: Mode, layout: torch.memory_format, device: str = "cuda"
) -> None:
    """One random call; its references are computed on `device`."""
    call = draw(row, case, mode.dtype, device)
    try:
        y = run(row, call, mode, layout=layout)
    except RuntimeError as error:
        raise AssertionError(f"{row.conv} {mode} {layout} {case}: {error}") from error
    assert y.dtype == mode.dtype
    has_layout = case.channels[0] > 1 and case.size != (1, 1)  # elsewhere the weight's decides
    assert not has_layout or y.is_contiguous(memory_format=layout), f"{case}: the output is not {layout}"
    hold(y, row, call, mode, case)


def complaint(call: Callable[[], None]) -> str:
    """What an assertion in a call says; nothing if none fails."""
    try:
        call()
    except AssertionError as error:
        return str(error)
    return ""


def check_all(
    run: Runner,
    row: Row,
    mode: Mode,
    layout: torch.memory_format,
    which: Iterator[Case],
    device: str = "cuda",
) -> None:
    """Each of the calls, and then an error that names all that went wrong."""
    said = [complaint(partial(check, run, row, case, mode, layout, device)) for case in which]
    wrong = [text for text in said if text]
    assert not wrong, f"{len(wrong)} of {len(said)} calls are wrong\n" + "\n".join(wrong)
