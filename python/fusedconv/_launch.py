"""From checked arguments to the kernels of ``_C``: pointers, sizes, strides, threads and streams."""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _C
from ._conv import GEOMETRY, TENSORS
from .chains import Chain
from .config import get_float32_precision

_log = logging.getLogger("fusedconv")

CODES = {
    torch.float32: _C.FLOAT32,
    torch.float64: _C.FLOAT64,
    torch.bfloat16: _C.BFLOAT16,
    torch.float16: _C.FLOAT16,
}

_CUDA_CHAINS = frozenset(_C.cuda_chains())

# What the kernels take, by the names of an operator's arguments.
_OF_CONV = ("weight", "conv_bias")
VECTORS = _C.CHANNEL_PARAMETERS  # a value a channel
_TENSORS = ("input", "weight", *VECTORS)
_NUMBERS: dict[str, Any] = {  # in the order of _C.Numbers, with what stands for none
    "num_groups": 0,
    "eps": 0.0,
    "pool_size": (1, 1),
    "clamp_min": -math.inf,
    "clamp_max": math.inf,
}


def code(tensor: Tensor) -> int:
    return CODES[tensor.dtype]


def form(tensor: Tensor) -> _C.Form:
    return code(tensor), tensor.shape, tensor.stride()


def channels_of(args: Sequence[Any], with_conv: bool) -> int:
    """Of the conv's output. ``with_conv``: whether the arguments have its input, or else that output."""
    return int(args[1].shape[0] if with_conv else args[0].shape[1])


def _by_setting(runs: Mapping[str, Run]) -> Run:
    """The setting counts when the call is made."""
    return lambda args, statistics: runs[get_float32_precision()](args, statistics)


def as_vector(parameter: Tensor, channels: int) -> Tensor:
    """A value a channel, contiguous."""
    return parameter.reshape(-1).expand(channels).contiguous()


def check_memory(name: str, tensor: Tensor) -> None:
    """For PyTorch's conv, which may read it all the same. A pointer would make a copy of a lazy clone."""
    if tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0:
        fail_as_freed(name)


def fail_as_freed(name: str) -> NoReturn:
    """No pointer to a tensor that has elements."""
    raise RuntimeError(f"{name} has no memory: its storage was freed")


# Takes an operator's arguments, and memory for the statistics of its norm or None; launches, gives the output.
Run = Callable[[Sequence[Any], Tensor | None], Tensor]
ConvRun = Callable[[Sequence[Any]], Tensor]  # takes an operator's arguments, gives the conv's output
Start = Callable[..., None]  # takes pointers, in the order of the launch's ``on_cpu`` and ``on_cuda``


def start_on_cpu(launch: _C.Launch | _C.Backward) -> Start:
    run: Start = launch.on_cpu
    return lambda *pointers: run(*pointers, torch.get_num_threads())


def start_on_cuda(launch: _C.Launch | _C.Backward, device: int, workspace_bytes: int) -> Start:
    run: Start = launch.on_cuda
    current_stream = torch._C._cuda_getCurrentRawStream
    if not workspace_bytes:
        return lambda *pointers: run(*pointers, 0, current_stream(device))
    empty = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")

    def start(*pointers: Any) -> None:
        # Freed on return: only later work of this stream gets it.
        workspace = empty.new_empty(workspace_bytes)
        run(*pointers, workspace.data_ptr(), current_stream(device))

    return start


class Launcher:
    """Prepares the launches of one operator, whose arguments are called ``names``.

    What follows from the arguments' forms (sizes, strides, dtypes) and numbers is worked out once, by an
    example of them and of the output. The ``Run`` that comes out serves every call of the same signature; it
    looks at pointers only. ``source`` gives the conv's output by PyTorch; it is None where there is no conv.
    """

    def __init__(self, chain: Chain, names: Sequence[str], has_conv: bool) -> None:
        self.chain = chain.name
        self.operator = f"conv2d_{chain.name}" if has_conv else chain.name
        self.has_conv = has_conv
        self.names = names
        self.stores = chain.stores
        self.has_norm = chain.has_norm
        self.treats_values_alike = chain.treats_values_alike

    def prepare_cpu(
        self, args: Sequence[Any], output: Tensor, source: ConvRun | None, precision: str | None
    ) -> Run:
        """Our own conv, or PyTorch's and then the chain."""
        if self.has_conv:
            plan = self.plan_cpu(args)
            self.tell(self.operator, args, plan)
            if plan.is_ours:
                launch = self.conv_launch(args, output)
                return self.prepare(launch, args, output, start_on_cpu(launch))
        return self._two_steps(args, output, source, start_on_cpu)

    def prepare_cuda(
        self, args: Sequence[Any], output: Tensor, source: ConvRun | None, precision: str | None
    ) -> Run:
        """Our own conv, or PyTorch's and then the chain."""
        device = args[0].get_device()

        def on_device(launch: _C.Launch) -> Start:
            return start_on_cuda(launch, device, launch.prepare_cuda(device).workspace_bytes)

        def prepare(precision: str) -> Run:
            if self.has_conv:
                launch = self.conv_launch(args, output, tf32=precision == "tf32")
                plan = launch.prepare_cuda(device)
                self.tell(self.operator, args, plan, precision)
                if plan.is_ours:
                    start = start_on_cuda(launch, device, plan.workspace_bytes)
                    return self.prepare(launch, args, output, start)
            return self._two_steps(args, output, source, on_device)

        if not self.has_conv or args[0].dtype is not torch.float32 or precision is not None:
            return prepare(precision or "default")
        return _by_setting({name: prepare(name) for name in ("default", "ieee", "tf32")})

    def plan_cpu(self, args: Sequence[Any]) -> _C.Plan:
        """Who runs the conv."""
        return _C.plan_conv_on_cpu(form(args[0]), self.conv_form(args), _C.cpu_isa())

    def plan_conv(self, args: Sequence[Any], output: Tensor, precision: str) -> _C.Plan:
        """Who runs it, on the arguments' device."""
        if not args[0].is_cuda:
            return self.plan_cpu(args)
        launch = self.conv_launch(args, output, tf32=precision == "tf32")
        return launch.prepare_cuda(args[0].get_device())

    def chain_workspace(self, args: Sequence[Any], output: Tensor, device: int) -> int:
        """Bytes that a run of the chain on ``args[0]``, the conv's output, wants on a CUDA device."""
        return self._launch(args, output, self.numbers(args)).prepare_cuda(device).workspace_bytes

    @staticmethod
    def tell(what: str, args: Sequence[Any], plan: _C.Plan, *precision: str) -> None:
        """Who runs it, in the debug log."""
        dtype = str(args[0].dtype).removeprefix("torch.")
        _log.debug("%s: %s", " ".join([what, str(list(args[0].shape)), dtype, *precision]), plan)

    def _two_steps(
        self,
        args: Sequence[Any],
        output: Tensor,
        source: ConvRun | None,
        on_device: Callable[[_C.Launch], Start],
    ) -> Run:
        numbers = self.numbers(args)  # a call may leave out defaults

        def prepare(args: Sequence[Any]) -> Run:
            launch = self._launch(args, output, numbers)
            return self.prepare(launch, args, output, on_device(launch), with_conv=False)

        if source is None:
            return prepare(args)
        prepared: dict[tuple[int, ...], Run] = {}
        names = [(i, self.names[i]) for i, a in enumerate(args[TENSORS]) if a is not None]

        def run(args: Sequence[Any], statistics: Tensor | None) -> Tensor:
            for i, name in names:
                check_memory(name, args[i])
            v = source(args)
            args = (v, *args[1:])
            stride = v.stride()  # PyTorch's choice: not all that it depends on is in the signature
            if stride not in prepared:
                prepared[stride] = prepare(args)
            return prepared[stride](args, statistics)

        return run

    def conv_form(self, args: Sequence[Any], tf32: bool = False) -> _C.Conv:
        return form(args[1]), *args[GEOMETRY], tf32

    def numbers(self, args: Sequence[Any]) -> _C.Numbers:
        given = {name: a for name, a in zip(self.names, args, strict=True) if a is not None}
        num_groups, eps, pool, low, high = (given.get(name, absent) for name, absent in _NUMBERS.items())
        return num_groups, eps, tuple(pool), low, high

    def places(self, args: Sequence[Any], with_conv: bool) -> dict[str, int]:
        """Where the tensors that a launch reads stand among the arguments."""
        given = {name: i for i, (name, a) in enumerate(zip(self.names, args, strict=False)) if a is not None}
        taken = [name for name in _TENSORS if with_conv or name not in _OF_CONV]
        return {name: given[name] for name in taken if name in given}

    def unready(self, args: Sequence[Any], with_conv: bool) -> list[int]:
        """Where the vectors stand that each run copies first: kernels take a contiguous value a channel."""
        channels = channels_of(args, with_conv)

        def is_ready(vector: Tensor) -> bool:
            return vector.numel() == channels and vector.is_contiguous()

        places = self.places(args, with_conv)
        return [i for name, i in places.items() if name in VECTORS and not is_ready(args[i])]

    def conv_launch(self, args: Sequence[Any], output: Tensor, tf32: bool = False) -> _C.Launch:
        return self._launch(args, output, self.numbers(args), self.conv_form(args, tf32))

    def _launch(
        self, args: Sequence[Any], output: Tensor, numbers: _C.Numbers, conv: _C.Conv | None = None
    ) -> _C.Launch:
        """Without ``conv`` the first argument is the conv's output."""
        places = self.places(args, conv is not None)
        tensors = [(name, code(args[i])) for name, i in places.items()]
        return _C.Launch(self.chain, tensors, form(args[0]), conv, numbers, form(output))

    def prepare(
        self, launch: _C.Launch, args: Sequence[Any], output: Tensor, start: Start, with_conv: bool = True
    ) -> Run:
        """One launch and its output. ``with_conv``: whether the launch has one."""
        by_name = self.places(args, with_conv)
        names, places = list(by_name), list(by_name.values())
        size, stride, has_elements = output.shape, output.stride(), output.numel() > 0
        # A new one like this is quicker than one of a named dtype and device.
        empty = torch.empty(0, dtype=output.dtype, device=args[0].device)

        def run(args: Sequence[Any], statistics: Tensor | None) -> Tensor:
            output = empty.new_empty_strided(size, stride)
            if has_elements:
                pointers = [args[i].data_ptr() for i in places]
                if not all(pointers):  # to a kernel 0 would mean that the argument is absent
                    fail_as_freed(names[pointers.index(0)])
                start(pointers, output.data_ptr(), 0 if statistics is None else statistics.data_ptr())
            return output

        unready, channels = self.unready(args, with_conv), channels_of(args, with_conv)

        def make_ready_and_run(args: Sequence[Any], statistics: Tensor | None) -> Tensor:
            args = list(args)
            for i in unready:
                args[i].data_ptr() or fail_as_freed(self.names[i])
                args[i] = as_vector(args[i], channels)
            return run(args, statistics)

        return make_ready_and_run if unready else run

    def has_cuda(self, device: int) -> bool:
        """Whether a kernel of this build can run on this device. Warns once if the build is why not."""
        return _cuda_is_usable(device) and self.chain in _CUDA_CHAINS


@functools.cache
def _cuda_is_usable(device: int) -> bool:
    if torch.version.cuda is None:  # ROCm calls its tensors CUDA's; our kernels are not for it
        return False
    problem = _C.cuda_status(device)
    if problem:
        _warn_no_cuda(problem)
    return not problem


@functools.cache
def _warn_no_cuda(problem: str) -> None:
    warnings.warn(
        f"fusedconv runs plain PyTorch on CUDA: {problem}. To build it for this machine, put nvcc on PATH and, in "
        "fusedconv's source, run: pip install . --config-settings=cmake.define.FUSEDCONV_CUDA=ON",
        stacklevel=2,
    )
