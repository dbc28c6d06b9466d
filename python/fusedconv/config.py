"""Settings, and what this build and machine have."""

from __future__ import annotations

import logging
import os
import platform
from types import TracebackType

import torch

from . import _C

_precision = "default"
_PROXY = torch._C._TorchDispatchModeKey.PROXY

_LEVELS = ("debug", "info", "warning", "error", "critical")


def _show_log(level: str) -> None:
    """Messages of the logger ``fusedconv`` from this level on go to stderr; without a level all stays as it is."""
    logger = logging.getLogger("fusedconv")
    if not level or any(handler.name == "FUSEDCONV_LOG" for handler in logger.handlers):
        return
    if level.lower() not in _LEVELS:
        raise ValueError(f"FUSEDCONV_LOG must be one of {', '.join(_LEVELS)}, but is {level!r}")
    handler = logging.StreamHandler()
    handler.name = "FUSEDCONV_LOG"
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    # Where the program has set up logging, its own handlers show them.
    handler.addFilter(lambda record: not logging.root.handlers)
    logger.setLevel(level.upper())
    logger.addHandler(handler)


_show_log(os.environ.get("FUSEDCONV_LOG", ""))
_C.cpu_isa()  # raises ValueError where FUSEDCONV_CPU_ISA asks for what this machine does not have


def check_precision(precision: str | None) -> None:
    """Raises ``ValueError`` unless it is one of the three, or None for "as set when run"."""
    if precision not in (None, "default", "ieee", "tf32"):
        raise ValueError(f'precision must be "default", "ieee" or "tf32", but is {precision!r}')


def set_float32_precision(precision: str) -> None:
    """How the convs of float32 inputs multiply, for the whole process.

    - ``"default"``: our own conv kernels are exact; a conv that PyTorch runs follows PyTorch's own TF32
      flags.
    - ``"ieee"``: exact, whoever runs the conv.
    - ``"tf32"``: one product of TF32 precision (where the machine has it), whoever runs the conv.

    PyTorch's flags are never changed.

    Raises:
        ValueError: for any other value.
    """
    global _precision
    if precision is None:
        raise ValueError('precision must be "default", "ieee" or "tf32", but is None')
    check_precision(precision)
    _precision = precision


def get_float32_precision() -> str:
    """The present setting: ``"default"``, ``"ieee"`` or ``"tf32"``."""
    return _precision


def is_traced() -> bool:
    """Whether a tracer stands below autograd, or above it, and records the operators that it meets."""
    return torch._C._get_dispatch_mode(_PROXY) is not None or is_traced_above_autograd()


def is_traced_above_autograd() -> bool:
    """Whether the tracer is one "pre-dispatch"."""
    return torch._ops._get_dispatch_mode_pre_dispatch(_PROXY) is not None  # type: ignore[no-untyped-call]


def precision_to_record() -> str | None:
    """What a function or a module passes to its operator: while a compiler records the call, the setting, on which the
    graph is guarded then. None otherwise: the operator reads the setting in less time than passing it takes."""
    return _precision if torch.compiler.is_compiling() or is_traced() else None


class float32_precision:  # noqa: N801 (used like a function)
    """Context manager that sets the precision inside the block, and restores it after.

    The setting is the process's: other threads see it too while the block runs. One manager may be entered
    again, inside its own block also.

    Raises:
        ValueError: for an unknown precision.
    """

    def __init__(self, precision: str) -> None:
        self._precision = precision
        self._before: list[str] = []

    def __enter__(self) -> None:
        before = get_float32_precision()
        set_float32_precision(self._precision)
        self._before.append(before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_float32_precision(self._before.pop())


def _cuda_devices() -> str:
    """The GPUs and whether the kernels of this build run on them."""
    if not torch.cuda.is_available():
        return "none"
    return "; ".join(
        f"{torch.cuda.get_device_name(i)} ({_C.cuda_status(i) or 'usable'})"
        for i in range(torch.cuda.device_count())
    )


def show_config() -> str:
    """The build and the machine, one fact a line. Initialises CUDA where there is a GPU."""
    build = _C.build_info()
    facts = {
        "fusedconv": build.pop("version"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name.replace("_", " "): value for name, value in build.items()},
        "CPU instruction set": f"{_C.cpu_isa()} (this machine can run {', '.join(_C.cpu_isas())})",
        "CPU threads": str(torch.get_num_threads()),
        "CUDA devices": _cuda_devices(),
        "float32 precision": get_float32_precision(),
    }
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())
