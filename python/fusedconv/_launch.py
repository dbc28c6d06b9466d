"""From checked arguments to the kernels of ``_C``: pointers, sizes, strides, threads and streams."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _C
from ._conv import GEOMETRY
from .chains import Chain

_CODES = {
    torch.float32: _C.FLOAT32,
    torch.float64: _C.FLOAT64,
    torch.bfloat16: _C.BFLOAT16,
    torch.float16: _C.FLOAT16,
}

_CUDA_CHAINS = frozenset(_C.cuda_chains())

# What the kernels take from a chain's arguments, in the order of _C.Arguments, and what stands for none.
_VECTORS = ("bias", "scale", "norm_weight", "norm_bias")
_SCALARS: dict[str, Any] = {
    "num_groups": 0,
    "eps": 0.0,
    "pool_size": (1, 1),
    "clamp_min": -math.inf,
    "clamp_max": math.inf,
}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a chain computes in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _form(tensor: Tensor) -> tuple[int, Sequence[int], Sequence[int]]:
    return _CODES[tensor.dtype], tensor.shape, tensor.stride()


# Products for one value of a conv's output. Up to so many our own conv is the faster one with its chain; beyond, the conv
# takes nearly all of the time, and oneDNN's, which blocks over many channels, takes less of it.
_MOST_PRODUCTS = 512


def _runs_directly(input: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether our own conv runs on the CPU. oneDNN has no float64, and our own no groups and no half precision."""
    if groups != 1 or input.dtype not in (torch.float32, torch.float64):
        return False
    return input.dtype is torch.float64 or math.prod(weight.shape[1:]) <= _MOST_PRODUCTS


def _freed(name: str) -> NoReturn:
    """No pointer to a tensor that has elements. To a kernel 0 would mean that the argument is absent."""
    raise RuntimeError(f"{name} has no memory: its storage was freed")


Run = Callable[[Sequence[Any]], Tensor]  # takes an operator's arguments, launches, gives the output
Launch = Callable[[Sequence[Any], Tensor], None]  # the same, into an output that is there


class Launcher:
    """Prepares the launches of one operator, whose arguments are called ``names``.

    What follows from the arguments' forms (sizes, strides, dtypes) and numbers is worked out once, by an
    example of them and of the output. The ``Run`` that comes out serves every call of the same signature; it
    looks at pointers only. ``source`` gives the conv's output by PyTorch.
    """

    def __init__(self, chain: Chain, names: Sequence[str], has_conv: bool) -> None:
        self._chain = chain.name
        self._has_conv = has_conv
        self._place = {name: i for i, name in enumerate(names)}

    def prepare_cpu(self, args: Sequence[Any], output: Tensor, source: Run) -> Run:
        """Our own conv, or PyTorch's and then the chain."""
        if self._has_conv and _runs_directly(args[0], args[1], groups=args[-1]):
            return self._with_output(args, output, self._cpu_conv(args, output), "conv_bias", *_VECTORS)

        def kernel(v: _C.Tensor, arguments: _C.Arguments, output: _C.Tensor) -> None:
            _C.cpu_chain(self._chain, v, arguments, output, torch.get_num_threads())

        return self._two_steps(args, output, source, kernel)

    def prepare_cuda(self, args: Sequence[Any], output: Tensor, source: Run) -> Run:
        """PyTorch's conv, then the chain."""
        device = args[0].get_device()

        def kernel(v: _C.Tensor, arguments: _C.Arguments, output: _C.Tensor) -> None:
            stream = torch._C._cuda_getCurrentRawStream(device)
            _C.cuda_chain(self._chain, v, arguments, output, device, stream)

        return self._two_steps(args, output, source, kernel)

    def _cpu_conv(self, args: Sequence[Any], output: Tensor) -> Launch:
        chain, arguments, has_bias = self._chain, self._arguments(args), args[2] is not None
        input_form, weight_form, output_form = _form(args[0]), _form(args[1]), _form(output)
        stride, padding, dilation = map(tuple, args[GEOMETRY][:-1])

        def launch(args: Sequence[Any], output: Tensor) -> None:
            _C.cpu_conv2d(
                chain, (args[0].data_ptr() or _freed("input"), *input_form),
                (args[1].data_ptr() or _freed("weight"), *weight_form),
                (args[2].data_ptr() or _freed("conv_bias")) if has_bias else 0,
                stride, padding, dilation, arguments(args), (output.data_ptr(), *output_form), torch.get_num_threads(),
            )  # fmt: skip

        return launch

    def _two_steps(
        self, args: Sequence[Any], output: Tensor, source: Run, kernel: Callable[..., None]
    ) -> Run:
        arguments, form = self._arguments(args), _form(output)

        def launch(args: Sequence[Any], output: Tensor) -> None:
            v = source(args)  # lives until the kernel has run
            kernel((v.data_ptr() or _freed("input"), *_form(v)), arguments(args), (output.data_ptr(), *form))

        return self._with_output(args, output, launch, *_VECTORS)

    def _arguments(self, args: Sequence[Any]) -> Callable[[Sequence[Any]], _C.Arguments]:
        """How to make _C.Arguments."""
        given = {name: args[i] for name, i in self._place.items() if args[i] is not None}
        vectors = [(slot, self._place[name], name) for slot, name in enumerate(_VECTORS) if name in given]
        num_groups, eps, pool, low, high = (given.get(name, absent) for name, absent in _SCALARS.items())
        scalars = num_groups, eps, pool[0], pool[1], low, high

        def arguments(args: Sequence[Any]) -> _C.Arguments:
            pointers: Any = [0, 0, 0, 0]
            for slot, place, name in vectors:
                pointers[slot] = args[place].data_ptr() or _freed(name)
            return (*pointers, *scalars)

        return arguments

    def _with_output(self, args: Sequence[Any], output: Tensor, launch: Launch, *vectors: str) -> Run:
        """Around a launch: an output, and vectors made one contiguous value a channel of the compute type."""
        size, stride, dtype, is_empty = output.shape, output.stride(), output.dtype, output.numel() == 0
        device = args[0].device
        channels = args[1].shape[0] if self._has_conv else args[0].shape[1]
        compute = compute_dtype(args[0].dtype)

        def is_ready(vector: Tensor) -> bool:
            return vector.dtype is compute and vector.numel() == channels and vector.is_contiguous()

        places = [(self._place[name], name) for name in vectors if name in self._place]
        unready = [(i, name) for i, name in places if args[i] is not None and not is_ready(args[i])]

        def run(args: Sequence[Any]) -> Tensor:
            output = torch.empty_strided(size, stride, dtype=dtype, device=device)
            if unready:
                args = list(args)
                for place, name in unready:
                    args[place].data_ptr() or _freed(name)
                    args[place] = args[place].to(compute).reshape(-1).expand(channels).contiguous()
            if not is_empty:
                launch(args, output)
            return output

        return run

    def has_cuda(self, device: int) -> bool:
        """Whether a kernel of this build can run on this device. Warns once if the build is why not."""
        return _cuda_is_usable(device) and self._chain in _CUDA_CHAINS


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
