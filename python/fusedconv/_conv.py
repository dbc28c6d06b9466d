"""The conv where PyTorch runs it, at the precision asked for. PyTorch's global flags stay untouched.

Some of oneDNN's kernels crash, write beyond their memory or are wrong for some geometries, and which ones depends on the
machine. So PyTorch's conv gets on the CPU only what is right everywhere, as far as one knows. Else the padding becomes
part of the input first or, where that would be much larger, the conv is computed tap by tap: for each tap of the kernel
one matrix product, of the pixels that it meets.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import get_float32_precision

# Where the conv's arguments stand among an operator's: its tensors first, then the chain's own, then its geometry.
TENSORS, OWN, GEOMETRY = slice(3), slice(3, -4), slice(-4, None)

_aten = torch.ops.aten


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    precision: str | None,
) -> Tensor:
    """``torch.conv2d``; ``"ieee"`` and ``"tf32"`` decide about precision instead of PyTorch's flags."""
    precision = precision or get_float32_precision()
    geometry = stride, padding, dilation, groups
    how, dtype = _how(input, weight, geometry, precision, _Sought.OUTPUT)
    input, weight, given = input.to(dtype), weight.to(dtype), input.dtype
    bias = None if bias is None else bias.to(dtype)
    if how == _Way.TAPS:
        return _by_taps(input, weight, bias, geometry).to(given)
    if how == _Way.PADDED_FIRST:
        input, padding = _padded(input, padding), (0, 0)
        geometry = stride, padding, dilation, groups
    if precision == "default":
        return torch.conv2d(input, weight, bias, *geometry).to(given)
    cudnn = torch.backends.cudnn
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    output: Tensor = _aten._convolution.default(
        input, weight, bias, stride, padding, dilation, False, [0, 0], groups,
        cudnn.benchmark, deterministic, cudnn.enabled, precision == "tf32",
    )  # fmt: skip
    return output.to(given)


def prepared_convolution(example: Sequence[Any], precision: str | None) -> Callable[[Sequence[Any]], Tensor]:
    """`convolution` for an operator's arguments of the forms that the ``example`` has, on the CPU. What follows from the
    forms, and from no flag, is worked out once."""
    stride, padding, dilation, groups = example[GEOMETRY]

    def run(args: Sequence[Any]) -> Tensor:
        input, weight, bias = args[TENSORS]
        return convolution(input, weight, bias, stride, padding, dilation, groups, precision=precision)

    def run_as_it_is(args: Sequence[Any]) -> Tensor:
        if (precision or get_float32_precision()) != "default":  # then flags count
            return run(args)
        input, weight, bias = args[TENSORS]
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)

    input, weight = example[:2]
    how = _how(input, weight, (stride, padding, dilation, groups), "default", _Sought.OUTPUT)
    return run_as_it_is if how == (_Way.PYTORCH, input.dtype) else run


def convolution_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    precision: str | None,
    mask: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of input, weight and bias; None where ``mask`` says that nobody asks for it.

    ``aten::convolution_backward`` takes no ``allow_tf32``. Where PyTorch's flags would round against ``"ieee"``, it runs
    in float64: products of TF32 parts would be exact too, but not their sums, which the tensor cores cut off.
    ``"tf32"`` allows TF32 and does not force it.
    """
    precision = precision or get_float32_precision()
    geometry = stride, padding, dilation, groups

    def gradients(by: tuple[_Way, torch.dtype], mask: Sequence[bool]) -> list[Tensor | None]:
        how, dtype = by
        g, x, w = grad.to(dtype), input.to(dtype), weight.to(dtype)
        found: Sequence[Tensor | None]
        if how == _Way.TAPS:
            found = _gradients_by_taps(g, x, w, geometry, mask)
        else:
            pads = how == _Way.PADDED_FIRST
            found = _aten.convolution_backward.default(
                g, _padded(x, padding) if pads else x, w, [weight.shape[0]], stride, (0, 0) if pads else padding,
                dilation, False, [0, 0], groups, mask,
            )  # fmt: skip
            if pads and found[0] is not None:
                found = [_unpadded(found[0], x, padding), *found[1:]]
        return [None if gradient is None else gradient.to(grad.dtype) for gradient in found]

    of_input, of_weight = (
        _how(input, weight, geometry, precision, sought) for sought in (_Sought.OF_INPUT, _Sought.OF_WEIGHT)
    )
    if not any(mask[1:]):
        return gradients(of_input, mask)
    if not mask[0] or of_input == of_weight:  # oneDNN finds the bias's with the weight's
        return gradients(of_weight, mask)
    return [*gradients(of_input, [True, False, False])[:1], *gradients(of_weight, [False, *mask[1:]])[1:]]


# ---- who computes it, and in which dtype ----

_Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], int]


class _Sought(Enum):
    OUTPUT = auto()
    OF_INPUT = auto()  # gradients
    OF_WEIGHT = auto()


class _Way(Enum):
    PYTORCH = auto()
    PADDED_FIRST = auto()
    TAPS = auto()


# Times input and output of a sample; beyond, only taps are bounded in memory. Of few values it may be more.
_MOST_PADDED = 4
_FEW_PADDED = 2**12

# oneDNN's own switch, read by it once. PyTorch's are behind its flags.
_FPMATH = os.environ.get("ONEDNN_DEFAULT_FPMATH_MODE") or os.environ.get("DNNL_DEFAULT_FPMATH_MODE") or ""


def _how(
    input: Tensor, weight: Tensor, geometry: _Geometry, precision: str, sought: _Sought
) -> tuple[_Way, torch.dtype]:
    """By whom, and in which dtype.

    On the CPU a weight's gradient in half precision is found in float32: oneDNN's reads beyond its tensors for some
    geometries, depthwise ones and maps of two columns among them. No flag may round what we widened.
    """
    dtype = input.dtype
    if not input.is_cpu:
        exact = precision == "ieee" and dtype is torch.float32 and input.is_cuda
        rounds = exact and _rounds_on_cuda(input, weight, geometry, sought)
        return _Way.PYTORCH, torch.float64 if rounds else dtype
    *steps, groups = geometry
    of_weight = sought is _Sought.OF_WEIGHT
    if dtype.itemsize == 2 and (of_weight or fails_in_half(input, weight, *steps)):
        dtype = torch.float32
    fails = _fails(input, weight, *steps)
    exact = precision == "ieee" or input.dtype is not dtype
    if exact and dtype is torch.float32 and _rounds_on_cpu(input, weight, geometry):
        takes_long = groups > 1  # PyTorch's conv of float64 does for each group
        return _Way.TAPS if fails or takes_long else _Way.PYTORCH, torch.float64
    if of_weight and _is_narrow(input, weight, *steps):
        return _Way.TAPS, dtype
    if not fails:
        return _Way.PYTORCH, dtype
    return _Way.PADDED_FIRST if _may_be_padded(input, weight, *steps) else _Way.TAPS, dtype


def fails_in_half(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Whether oneDNN's conv of bfloat16 or float16 may crash or be wrong: where ``_fails`` says so, and with AMX or FP16
    instructions it takes what stands in memory for values where a side of a map has one pixel."""
    if not input.is_cpu or input.dtype not in (torch.bfloat16, torch.float16):
        return False
    sides = zip(input.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    has_one_pixel = any(side[0] == 1 or output_size(*side) == 1 for side in sides)
    return has_one_pixel or _fails(input, weight, stride, padding, dilation)


def _fails(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Whether a window or a tap meets nothing but padding. There oneDNN's kernels of torch 2.13, in float32 too, read
    beyond their tables, write beyond their memory, or count in 32 bits what does not fit."""
    if not input.is_cpu:
        return False
    for size, kernel, step, before, gap in zip(
        input.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
    ):
        reach, last = gap * (kernel - 1), step * (output_size(size, kernel, step, before, gap) - 1)
        has_idle_window = before > reach or gap > size
        has_idle_tap = reach - before >= size or before > last or step > size
        if has_idle_window or has_idle_tap:
            return True
    return False


def _may_be_padded(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Whether a conv that fails does not where its padding is part of the input, which may be so much larger."""
    channels, *sides = input.shape[1:]
    padded = [size + 2 * before for size, before in zip(sides, padding, strict=True)]
    if any(gap > size or step > size for size, gap, step in zip(padded, dilation, stride, strict=True)):
        return False
    windows = [
        output_size(*side) for side in zip(sides, weight.shape[2:], stride, padding, dilation, strict=True)
    ]
    values = channels * math.prod(sides) + weight.shape[0] * math.prod(windows)
    return channels * math.prod(padded) <= max(_MOST_PADDED * values, _FEW_PADDED)


def _padded(input: Tensor, padding: Sequence[int]) -> Tensor:
    return F.pad(input, (padding[1], padding[1], padding[0], padding[0]))


def _unpadded(padded: Tensor, input: Tensor, padding: Sequence[int]) -> Tensor:
    height, width = input.shape[2:]
    return padded[..., padding[0] : padding[0] + height, padding[1] : padding[1] + width]


_BLOCK = 16  # channels; 8 with AVX2


def _is_narrow(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Whether oneDNN's gradient of a 1x1 weight writes beyond its memory: with strides, it packs the pixels of less
    channels than a block as if there were a block of them (oneDNN 3.12, its issue 6035)."""
    return input.shape[1] < _BLOCK and tuple(weight.shape[2:]) == (1, 1) and max(stride) > 1


def output_size(size: int, kernel: int, step: int, before: int, gap: int) -> int:
    """Pixels of a side of the output."""
    return (size + 2 * before - gap * (kernel - 1) - 1) // step + 1


def _rounds_on_cpu(input: Tensor, weight: Tensor, geometry: _Geometry) -> bool:
    """Whether products in float32 may be rounded on machines that are faster then."""
    if _FPMATH.lower() not in ("", "strict"):
        return True
    conv, matmul = _may_round("mkldnn", "conv"), _may_round("mkldnn", "matmul")
    if conv == matmul:
        return conv
    *steps, groups = geometry
    backend = torch._C._select_conv_backend(
        _like_in_float32(input), _like_in_float32(weight), None, *steps, False, [0, 0], groups
    )
    return conv if backend.name.startswith("Mkldnn") else matmul


def _like_in_float32(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, dtype=torch.float32)


def _rounds_on_cuda(input: Tensor, weight: Tensor, geometry: _Geometry, sought: _Sought) -> bool:
    """Whether products of float32 are rounded in spite of ``allow_tf32=False``, which only cuDNN's forward is told."""
    conv, matmul = _may_round("cuda", "conv") and sought is not _Sought.OUTPUT, _may_round("cuda", "matmul")
    if conv == matmul:
        return conv
    *steps, groups = geometry
    backend = torch._C._select_conv_backend(input, weight, None, *steps, False, [0, 0], groups)
    return matmul if backend.name.startswith("Slow") else conv


def _may_round(backend: str, op: str) -> bool:
    """What PyTorch's flags say. Those of old raise where one of torch 2.9's was set."""
    if hasattr(torch.backends, "fp32_precision"):
        flags: Any = getattr(torch.backends, "cudnn" if (backend, op) == ("cuda", "conv") else backend)
        return getattr(flags, op).fp32_precision in ("tf32", "bf16")
    if op == "matmul":
        return torch.get_float32_matmul_precision() != "highest"
    return backend == "cuda" and torch.backends.cudnn.allow_tf32


# ---- tap by tap ----


def _by_taps(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry) -> Tensor:
    *steps, groups = geometry
    x, w = _grouped(input, 1, groups), _grouped(weight, 0, groups)
    sides = zip(input.shape[2:], weight.shape[2:], *steps, strict=True)
    height, width = [output_size(*side) for side in sides]
    y = x.new_zeros(x.shape[0], *w.shape[:2], height, width)
    for tap, of_input, (_, rows, columns) in _taps(input, weight, *steps):
        products = torch.einsum("goi,ngihw->ngohw", w[tap], x[of_input])
        # not in place: torch.func.vmap may map the weight alone
        y = y + F.pad(products, (columns.start, width - columns.stop, rows.start, height - rows.stop))
    y = y.flatten(1, 2)
    return y if bias is None else y + bias.view(-1, 1, 1)


def _gradients_by_taps(
    grad: Tensor, input: Tensor, weight: Tensor, geometry: _Geometry, mask: Sequence[bool]
) -> list[Tensor | None]:
    *steps, groups = geometry
    x, w = _grouped(input, 1, groups), _grouped(weight, 0, groups)
    g = _grouped(grad, 1, groups)
    of_x = x.new_zeros(x.shape) if mask[0] else None
    of_w = w.new_zeros(w.shape) if mask[1] else None
    for tap, of_input, of_output in _taps(input, weight, *steps):
        if of_x is not None:
            of_x[of_input] += torch.einsum("goi,ngohw->ngihw", w[tap], g[of_output])
        if of_w is not None:
            of_w[tap] = torch.einsum("ngohw,ngihw->goi", g[of_output], x[of_input])
    return [
        None if of_x is None else of_x.flatten(1, 2),
        None if of_w is None else of_w.flatten(0, 1),
        grad.sum((0, 2, 3)) if mask[2] else None,
    ]


def _grouped(tensor: Tensor, dim: int, groups: int) -> Tensor:
    """Its channels, which stand at ``dim``, as groups and the channels of a group."""
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])


_Index = tuple[Any, ...]


def _taps(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Iterator[tuple[_Index, _Index, _Index]]:
    """Those that meet the map: where they stand in the kernel, what they meet, and the pixels of the output for which."""
    rows, columns = (
        _taps_of_side(*side)
        for side in zip(input.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    )
    for i, h, to_h in rows:
        for j, w, to_w in columns:
            yield (..., i, j), (..., h, w), (..., to_h, to_w)


def _taps_of_side(size: int, kernel: int, step: int, before: int, gap: int) -> list[tuple[int, slice, slice]]:
    taps = []
    windows = output_size(size, kernel, step, before, gap)
    for tap in range(kernel):
        place = tap * gap - before  # of the tap in the first window
        first = max(0, -(place // step))
        last = min(windows - 1, (size - 1 - place) // step)
        if first <= last:
            met = slice(place + first * step, place + last * step + 1, step)
            taps.append((tap, met, slice(first, last + 1)))
    return taps
