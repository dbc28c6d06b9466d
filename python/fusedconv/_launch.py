"""From checked arguments to the kernels of ``_C``: pointers, sizes, strides, threads and streams."""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._conv import convolution
from .chains import Chain

_CODES = {
    torch.float32: _C.FLOAT32,
    torch.float64: _C.FLOAT64,
    torch.bfloat16: _C.BFLOAT16,
    torch.float16: _C.FLOAT16,
}

# What the kernels take from a chain's arguments, in the order of _C.Arguments, and the value where a chain has none.
_SLOTS: dict[str, Any] = {
    "bias": None,
    "scale": None,
    "norm_weight": None,
    "norm_bias": None,
    "num_groups": 0,
    "eps": 0.0,
    "pool_size": (1, 1),
    "clamp_min": None,
    "clamp_max": None,
}
_ABSENT = tuple(_SLOTS.values())


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a chain computes in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _tensor(tensor: Tensor) -> _C.Tensor:
    return tensor.data_ptr(), _CODES[tensor.dtype], tensor.shape, tensor.stride()


def _vector(tensor: Tensor | None, channels: int, dtype: torch.dtype) -> Tensor | None:
    """One contiguous value a channel."""
    if tensor is None or (tensor.dtype is dtype and tensor.numel() == channels and tensor.is_contiguous()):
        return tensor
    return tensor.to(dtype).reshape(-1).expand(channels).contiguous()


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Launcher:
    """Runs the kernels of one operator, whose arguments are called ``names``."""

    def __init__(self, chain: Chain, names: Sequence[str], has_conv: bool) -> None:
        self._chain = chain.name
        self._has_conv = has_conv
        # One C call then picks all slots out of (*arguments, *_ABSENT).
        given = {name: place for place, name in enumerate(names)}
        self._pick = operator.itemgetter(*(given.get(slot, len(names) + i) for i, slot in enumerate(_SLOTS)))

    def _arguments(
        self, args: Sequence[Any], channels: int, dtype: torch.dtype
    ) -> tuple[_C.Arguments, list[Tensor | None]]:
        """The chain's arguments as the kernels take them, and the tensors that must outlive the launch."""
        *vectors, num_groups, eps, pool, low, high = self._pick((*args, *_ABSENT))
        compute = compute_dtype(dtype)
        vectors = [_vector(vector, channels, compute) for vector in vectors]
        bias, scale, norm_weight, norm_bias = map(_pointer, vectors)
        return (
            (bias, scale, norm_weight, norm_bias, num_groups, eps, pool[0], pool[1],
             -math.inf if low is None else low, math.inf if high is None else high),
            vectors,
        )  # fmt: skip

    def _source(self, args: Sequence[Any], precision: str | None) -> Tensor:
        """The conv's output, computed by PyTorch: the first of the two steps."""
        return convolution(*args[:3], *args[-4:], precision) if self._has_conv else args[0]

    def cpu(self, args: Sequence[Any], precision: str | None, output: Tensor) -> None:
        input, threads = args[0], torch.get_num_threads()
        if self._has_conv and args[-1] == 1 and (input.dtype is torch.float32 or input.dtype is torch.float64):
            weight, conv_bias = args[1], _vector(args[2], args[1].shape[0], input.dtype)
            arguments, alive = self._arguments(args, weight.shape[0], input.dtype)
            stride, padding, dilation = args[-4:-1]
            _C.cpu_conv2d(
                self._chain, _tensor(input), _tensor(weight), _pointer(conv_bias), stride, padding, dilation,
                arguments, _tensor(output), threads,
            )  # fmt: skip
        else:
            v = self._source(args, precision)
            arguments, alive = self._arguments(args, v.shape[1], v.dtype)
            _C.cpu_chain(self._chain, _tensor(v), arguments, _tensor(output), threads)
        del alive

    def has_cuda(self, device: int) -> bool:
        """Whether a kernel of this build can run on this device. Warns once if the build is why not."""
        return _cuda_is_usable(device) and self._chain in _C.cuda_chains()

    def cuda(self, args: Sequence[Any], precision: str | None, output: Tensor) -> None:
        v, device = self._source(args, precision), output.get_device()
        arguments, alive = self._arguments(args, v.shape[1], v.dtype)
        stream = torch._C._cuda_getCurrentRawStream(device)
        _C.cuda_chain(self._chain, _tensor(v), arguments, _tensor(output), device, stream)
        del alive


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
        f"fusedconv runs plain PyTorch on CUDA: {problem}. Build it with CUDA: with nvcc in PATH, "
        "FUSEDCONV_CUDA=ON pip install --no-binary fusedconv fusedconv",
        stacklevel=2,
    )
