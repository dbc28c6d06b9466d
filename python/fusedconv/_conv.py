"""The conv where PyTorch runs it, at the precision asked for. PyTorch's global flags stay untouched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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
    """``torch.conv2d``; ``"ieee"`` and ``"tf32"`` decide about TF32 instead of PyTorch's flag."""
    if fails_in_half(input, weight, stride, padding, dilation):
        bias = None if bias is None else bias.float()
        wide = torch.conv2d(input.float(), weight.float(), bias, stride, padding, dilation, groups)
        return wide.to(input.dtype)
    if precision is None:
        precision = get_float32_precision()
    if precision == "default":
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    cudnn = torch.backends.cudnn
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    output: Tensor = _aten._convolution.default(
        input, weight, bias, stride, padding, dilation, False, [0, 0], groups,
        cudnn.benchmark, deterministic, cudnn.enabled, precision == "tf32",
    )  # fmt: skip
    return output


def fails_in_half(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Whether oneDNN's conv of bfloat16 or float16 may crash or be wrong: with torch 2.13 and AVX-512 it reads beyond its
    tables where a window meets nothing but padding, and with AMX or FP16 instructions takes what stands in memory for
    values where a side of a map has one pixel."""
    if not _is_half_on_cpu(input):
        return False
    sizes = zip(input.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    for size, kernel, step, before, gap in sizes:
        reach = gap * (kernel - 1)
        if size == 1 or size + 2 * before - reach <= step or before > reach or gap > size:
            return True
    return False


def _is_half_on_cpu(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype in (torch.bfloat16, torch.float16)


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

    ``aten::convolution_backward`` takes no ``allow_tf32``. Where PyTorch's flag would use TF32 against ``"ieee"``,
    it runs in float64: products of TF32 parts would be exact too, but not their sums, which the tensor cores cut off.
    ``"tf32"`` allows TF32 and does not force it. On the CPU a weight's gradient in half precision is found in float32:
    oneDNN's reads beyond its tensors for some geometries, depthwise ones and maps of two columns among them.
    """

    def gradients(dtype: torch.dtype, mask: Sequence[bool]) -> list[Tensor | None]:
        found: Sequence[Tensor | None] = _aten.convolution_backward.default(
            grad.to(dtype), input.to(dtype), weight.to(dtype),
            [weight.shape[0]], stride, padding, dilation, False, [0, 0], groups, mask,
        )  # fmt: skip
        return [None if gradient is None else gradient.to(grad.dtype) for gradient in found]

    if precision is None:
        precision = get_float32_precision()
    rounds = grad.is_cuda and grad.dtype is torch.float32 and torch.backends.cudnn.allow_tf32
    if precision == "ieee" and rounds:
        return gradients(torch.float64, mask)
    if fails_in_half(input, weight, stride, padding, dilation):
        return gradients(torch.float32, mask)
    if mask[1] and _is_half_on_cpu(input):
        of_input = gradients(grad.dtype, [True, False, False])[:1] if mask[0] else [None]
        return [*of_input, *gradients(torch.float32, [False, *mask[1:]])[1:]]
    return gradients(grad.dtype, mask)
