"""Errors against float64, their bounds, and running code in a new process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chains_table import Own, Row, map_tensors

Failure = tuple[type[BaseException], str]

TESTS = Path(__file__).resolve().parent

# Bounds on ||y - reference|| / ||reference|| by the dtype of the input.
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
ALLOCATION = (
    "aten::empty",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::detach",
    "aten::alias",
)
GRADIENT_BOUNDS = {torch.float64: 3e-14, torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SIZES = (
    1,
    2,
    3,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    33,
)  # no tail, tail of one, tail of all but one, for vectors of 4, 8 and 16


@dataclass(frozen=True)
class Planned:
    """In place of the extension's plan, where a launch is emulated."""

    path: str
    words: str = ""
    instructions: str = ""
    workspace_bytes: int = 0
    terms: int = 1

    @property
    def is_ours(self) -> bool:
        return self.path in ("direct", "chain")

    def __str__(self) -> str:
        return f"{self.path}, {self.words}"


def relative_error(y: Tensor, reference: Tensor) -> float:
    if y.numel() == 0:
        return 0.0
    difference = torch.linalg.vector_norm(y.double() - reference.double())
    norm = torch.linalg.vector_norm(reference.double())
    return float(difference) if norm == 0 else float(difference / norm)


def assert_close(y: Tensor, reference: Tensor, eager: Tensor, bound: float, what: str = "") -> None:
    """`y` is as near to the float64 reference as the table says, or as twice exact eager's own error.

    The norm would forgive one wrong element among many, so each element is held too, to a looser bound.
    """
    assert y.shape == reference.shape, f"{what}: shape {tuple(y.shape)}, not {tuple(reference.shape)}"
    if y.numel() == 0:
        return
    assert torch.isfinite(y).all(), f"{what}: {int((~torch.isfinite(y)).sum())} values are not finite"
    assert torch.isfinite(reference).all()
    # The reference has float64's own error, so eager's in float64 shows from its error in float32.
    digits = 2.0**-28 if y.dtype == torch.float64 and eager.dtype == torch.float32 else 1.0
    eager_error = relative_error(eager, reference) * digits
    allowed = max(bound, 2 * eager_error)
    error = relative_error(y, reference)
    assert error <= allowed, f"{what}: error {error:.2e}, bound {bound:.0e}, eager's own {eager_error:.2e}"
    worst = (y.double() - reference.double()).abs()
    size = reference.double().abs() + reference.double().square().mean().sqrt() + 1e-300
    eager_worst = (eager.double() - reference.double()).abs() / size * digits
    allowed = max(32 * bound, 4 * float(eager_worst.max()))
    ratio = float((worst / size).max())
    assert ratio <= allowed, f"{what}: one element is off by {ratio:.2e} of its size, allowed {allowed:.2e}"


def bound_of(*dtypes: torch.dtype, table: Mapping[torch.dtype, float] = BOUNDS) -> float:
    return max(table[dtype] for dtype in dtypes)


def double(own: Own) -> Own:
    return map_tensors(own, torch.Tensor.double)


def on(own: Own, device: str = "cuda") -> Own:
    return map_tensors(own, lambda t: t.to(device))


def exact_eager(t: Tensor) -> Tensor:
    """What eager runs on: contiguous, as its channels_last GroupNorm loses digits that we must not lose."""
    t = t.detach().contiguous()
    return t.float() if t.dtype == torch.float64 else t


def check_conv(
    row: Row, x: Tensor, weight: Tensor, conv_bias: Tensor | None, own: Own, **conv: Any
) -> Tensor:
    """Runs the conv operator, holds it against float64 and exact eager, and returns what it gave."""

    def plain(change: Callable[[Tensor], Tensor]) -> Tensor:
        changed = map_tensors({"x": x, "weight": weight, "conv_bias": conv_bias}, change)
        return row.plain_conv(**changed, own=map_tensors(own, change), **conv)

    y = row.conv_op(x, weight, conv_bias, own, **conv)
    check(y, plain, f"{row.conv} on {tuple(x.shape)} {x.dtype}", x.dtype)
    return y


def check_chain(row: Row, v: Tensor, own: Own) -> Tensor:
    """The same for the operator without a conv."""
    y = row.chain_op(v, own)
    check(
        y,
        lambda change: row.plain_chain(change(v), map_tensors(own, change)),
        f"{row.chain} on {tuple(v.shape)} {v.dtype}",
        v.dtype,
    )
    return y


def check(
    y: Tensor, plain: Callable[[Callable[[Tensor], Tensor]], Tensor], what: str, dtype: torch.dtype
) -> None:
    """Holds `y` against the plain chain: a function of what is done to its tensors before it runs."""
    with torch.no_grad():
        eager = plain(exact_eager)
        reference = plain(lambda t: t.detach().double().contiguous())
    expected = torch.float64 if dtype == torch.float64 else eager.dtype
    assert y.dtype == expected, f"{what}: {y.dtype}, not {expected} as the unfused chain"
    assert_close(y, reference, eager, bound_of(dtype), what)


@dataclass(frozen=True)
class Ran:
    operators: list[str]  # in the order of their calls
    kernels: list[str]  # on a GPU

    @property
    def computing(self) -> list[str]:
        """The operators of others that do more than allocate."""
        return [name for name in self.operators if "fusedconv" not in name and name not in ALLOCATION]


def profile(call: Callable[[], object]) -> Ran:
    """What the profiler sees of a call; of CUDA, where the process uses it."""
    has_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    activities = [torch.profiler.ProfilerActivity.CPU]
    if has_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        call()
        if has_cuda:
            torch.cuda.synchronize()
    events = profile.events()
    assert events is not None
    on_gpu = torch._C._autograd.DeviceType.CUDA
    return Ran(
        [e.name for e in events if e.device_type != on_gpu and "::" in e.name],
        [e.name for e in events if e.device_type == on_gpu],
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN included."""
    return (
        a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)))
    )


@contextmanager
def flushing_denormals(mode: bool = True) -> Iterator[None]:
    """This thread takes denormals for zero, and makes none."""
    torch.set_flush_denormal(mode)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def denormals(normal: Tensor, dtype: torch.dtype) -> Tensor:
    """Every other row is moved to where ``dtype`` has denormals, and the others near to it."""
    least = torch.finfo(dtype).smallest_normal
    scales = torch.tensor([0.25, 256.0]).repeat(normal.shape[2] // 2).view(-1, 1)
    return (normal * least * scales).to(dtype)


def outcome(run: Callable[[], Tensor]) -> Tensor | Failure:
    """What comes of a call, be it an error."""
    try:
        return run()
    except (RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        return type(error), str(error)


def look(result: Tensor | Failure) -> object:
    """All that a fake tensor has of a result."""
    if isinstance(result, Tensor):
        return result.shape, result.dtype, result.stride(), result.device
    return result


def failure(call: Callable[[], object]) -> tuple[type[BaseException], str]:
    """The type and the text of what `call` raises."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError, ZeroDivisionError) as error:
        return type(error), str(error)
    raise AssertionError("no error was raised")


def new_process(
    code: str, *arguments: object, environment: Mapping[str, str] | None = None, timeout: float = 240
) -> str:
    """Runs `code` in a new Python process that can import the tests' modules, and returns what it printed."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its own children end with it
    )
    try:
        printed, complaint = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, f"exit status {process.returncode}\n{printed}\n{complaint}"
    return printed
