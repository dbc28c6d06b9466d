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
from .chains import Chain

_CODES = {
    torch.float32: _C.FLOAT32,
    torch.float64: _C.FLOAT64,
    torch.bfloat16: _C.BFLOAT16,
    torch.float16: _C.FLOAT16,
}

# What the kernels take from a chain's arguments, in the order of _C.Arguments, and what stands for none.
_VECTORS = ("bias", "scale", "norm_weight", "norm_bias")
_SCALARS = {"num_groups": 0, "eps": 0.0, "pool_size": (1, 1), "clamp_min": None, "clamp_max": None}
_NO_SCALARS = tuple(_SCALARS.values())


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a chain computes in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _tensor(tensor: Tensor) -> _C.Tensor:
    return tensor.data_ptr(), _CODES[tensor.dtype], tensor.shape, tensor.stride()


class Launcher:
    """Runs the kernels of one operator, whose arguments are called ``names``."""

    def __init__(self, chain: Chain, names: Sequence[str], has_conv: bool) -> None:
        self._chain = chain.name
        self._has_conv = has_conv
        self._vectors = [(slot, names.index(name)) for slot, name in enumerate(_VECTORS) if name in names]
        # One call picks the scalars out of (*arguments, *defaults).
        places = (names.index(name) if name in names else len(names) + i for i, name in enumerate(_SCALARS))
        self._pick_scalars = operator.itemgetter(*places)

    def _arguments(
        self, args: Sequence[Any], channels: int, compute: torch.dtype, alive: list[Tensor]
    ) -> _C.Arguments:
        """The chain's arguments for the kernels. Copies go to ``alive``, which must outlive the launch."""
        pointers: Any = [0, 0, 0, 0]
        for slot, place in self._vectors:
            vector = args[place]
            if vector is not None:
                if vector.dtype is not compute or vector.numel() != channels or not vector.is_contiguous():
                    vector = vector.to(compute).reshape(-1).expand(channels).contiguous()
                    alive.append(vector)
                pointers[slot] = vector.data_ptr()
        num_groups, eps, pool, low, high = self._pick_scalars((*args, *_NO_SCALARS))
        low = -math.inf if low is None else low
        high = math.inf if high is None else high
        return (*pointers, num_groups, eps, pool[0], pool[1], low, high)

    def is_direct(self, args: Sequence[Any]) -> bool:
        """Whether our own conv kernel runs this call; else PyTorch's conv, and the chain on what it gives."""
        dtype = args[0].dtype
        return self._has_conv and args[-1] == 1 and (dtype is torch.float32 or dtype is torch.float64)

    def cpu_conv(self, args: Sequence[Any], output: Tensor) -> None:
        input, weight, conv_bias = args[:3]
        stride, padding, dilation = args[-4:-1]
        if conv_bias is not None:
            conv_bias = conv_bias.contiguous()
        alive: list[Tensor] = []
        arguments = self._arguments(args, weight.shape[0], input.dtype, alive)
        _C.cpu_conv2d(
            self._chain, _tensor(input), _tensor(weight), 0 if conv_bias is None else conv_bias.data_ptr(),
            stride, padding, dilation, arguments, _tensor(output), torch.get_num_threads(),
        )  # fmt: skip

    def cpu_chain(self, v: Tensor, args: Sequence[Any], output: Tensor) -> None:
        alive: list[Tensor] = []
        arguments = self._arguments(args, v.shape[1], compute_dtype(v.dtype), alive)
        _C.cpu_chain(self._chain, _tensor(v), arguments, _tensor(output), torch.get_num_threads())

    def cuda_chain(self, v: Tensor, args: Sequence[Any], output: Tensor) -> None:
        alive: list[Tensor] = []
        arguments = self._arguments(args, v.shape[1], compute_dtype(v.dtype), alive)
        device = v.get_device()
        stream = torch._C._cuda_getCurrentRawStream(device)
        _C.cuda_chain(self._chain, _tensor(v), arguments, _tensor(output), device, stream)

    def has_cuda(self, device: int) -> bool:
        """Whether a kernel of this build can run on this device. Warns once if the build is why not."""
        return _cuda_is_usable(device) and self._chain in _C.cuda_chains()


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
