"""The conv where PyTorch runs it, at the precision asked for. PyTorch's global flags stay untouched.

Some of oneDNN's kernels crash, write beyond their memory or are wrong for some geometries, and which ones depends on the
machine. So PyTorch's conv gets on the CPU only what is right everywhere, as far as one knows. Else windows and taps that
meet nothing are cut off, and the padding that is left becomes part of the input. Where that would be much larger, the
conv is computed piece by piece: for each tap of the kernel one matrix product, of the pixels that it meets, or for each
window one, where there are fewer windows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from ._conv_cut import Cut
from ._conv_pieces import by_pieces, gradients_by_pieces
from .chains import Geometry, output_size
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
    if how is _Way.PYTORCH:
        return _by_pytorch(input, weight, bias, geometry, precision).to(given)
    if how is _Way.PIECES:
        output = by_pieces(input, weight, geometry)
    else:
        cut = Cut.of(input, weight, geometry)
        output = cut.widened(_by_pytorch(cut.input(input), cut.weight(weight), None, cut.geometry, precision))
    return (output if bias is None else output + bias.view(-1, 1, 1)).to(given)


def _by_pytorch(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, precision: str
) -> Tensor:
    if precision == "default":
        return torch.conv2d(input, weight, bias, *geometry)
    cudnn = torch.backends.cudnn
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    *steps, groups = geometry
    output: Tensor = _aten._convolution.default(
        input, weight, bias, *steps, False, [0, 0], groups,
        cudnn.benchmark, deterministic, cudnn.enabled, precision == "tf32",
    )  # fmt: skip
    return output


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
        if how is _Way.PYTORCH:
            found = _gradients_by_pytorch(g, x, w, geometry, mask)
        elif how is _Way.PIECES:
            found = [*gradients_by_pieces(g, x, w, geometry, mask), _of_bias(g, mask)]
        else:
            cut = Cut.of(x, w, geometry)
            of_input, of_weight, _ = _gradients_by_pytorch(
                cut.grad(g), cut.input(x), cut.weight(w), cut.geometry, [*mask[:2], False]
            )
            found = [
                None if of_input is None else cut.of_input(of_input),
                None if of_weight is None else cut.of_weight(of_weight),
                _of_bias(g, mask),
            ]
        return [None if gradient is None else gradient.to(grad.dtype) for gradient in found]

    of_input, of_weight = (
        _how(input, weight, geometry, precision, sought) for sought in (_Sought.OF_INPUT, _Sought.OF_WEIGHT)
    )
    if not any(mask[1:]):
        return gradients(of_input, mask)
    if not mask[0] or of_input == of_weight:  # oneDNN finds the bias's with the weight's
        return gradients(of_weight, mask)
    return [*gradients(of_input, [True, False, False])[:1], *gradients(of_weight, [False, *mask[1:]])[1:]]


def _gradients_by_pytorch(
    grad: Tensor, input: Tensor, weight: Tensor, geometry: Geometry, mask: Sequence[bool]
) -> Sequence[Tensor | None]:
    *steps, groups = geometry
    found: Sequence[Tensor | None] = _aten.convolution_backward.default(
        grad, input, weight, [weight.shape[0]], *steps, False, [0, 0], groups, mask
    )
    return found


def _of_bias(grad: Tensor, mask: Sequence[bool]) -> Tensor | None:
    return grad.sum((0, 2, 3)) if mask[2] else None


# ---- who computes it, and in which dtype ----


class _Sought(Enum):
    OUTPUT = auto()
    OF_INPUT = auto()  # gradients
    OF_WEIGHT = auto()


class _Way(Enum):
    PYTORCH = auto()
    CUT = auto()
    PIECES = auto()


# oneDNN's own switch, read by it once. PyTorch's are behind its flags.
_FPMATH = os.environ.get("ONEDNN_DEFAULT_FPMATH_MODE") or os.environ.get("DNNL_DEFAULT_FPMATH_MODE") or ""


def _how(
    input: Tensor, weight: Tensor, geometry: Geometry, precision: str, sought: _Sought
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
        return _Way.PIECES if fails or takes_long else _Way.PYTORCH, torch.float64
    if of_weight and _is_narrow(input, weight, *steps):
        return _Way.PIECES, dtype
    if not fails:
        return _Way.PYTORCH, dtype
    cut = Cut.of(input, weight, geometry)
    return _Way.CUT if cut.has_windows and cut.is_small(input, weight) else _Way.PIECES, dtype


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


_BLOCK = 16  # channels; 8 with AVX2


def _is_narrow(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Whether oneDNN's gradient of a 1x1 weight writes beyond its memory: with strides, it packs the pixels of less
    channels than a block as if there were a block of them (oneDNN 3.12, its issue 6035)."""
    return input.shape[1] < _BLOCK and tuple(weight.shape[2:]) == (1, 1) and max(stride) > 1


def _rounds_on_cpu(input: Tensor, weight: Tensor, geometry: Geometry) -> bool:
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


def _rounds_on_cuda(input: Tensor, weight: Tensor, geometry: Geometry, sought: _Sought) -> bool:
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
