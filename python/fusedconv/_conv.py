"""The conv where PyTorch runs it, at the precision asked for. PyTorch's global flags stay untouched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    if input.is_cpu and _has_windows_of_padding(input, weight, padding, dilation):
        input, padding = pad(input, (padding[1], padding[1], padding[0], padding[0])), (0, 0)
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


def _has_windows_of_padding(
    input: Tensor, weight: Tensor, padding: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Whether a bfloat16 conv has windows that lie in the padding as a whole. For some of them oneDNN's reads beyond its
    tables and crashes (torch 2.13, AVX-512); an input that was padded before has no such windows."""
    if input.dtype is not torch.bfloat16:
        return False
    sides = zip(padding, dilation, weight.shape[2:], strict=True)
    return any(p > d * (k - 1) for p, d, k in sides)


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
    ``"tf32"`` allows TF32 and does not force it.
    """

    def product(grad: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]) -> list[Tensor | None]:
        gradients: Sequence[Tensor | None] = _aten.convolution_backward.default(
            grad, input, weight, [weight.shape[0]], stride, padding, dilation, False, [0, 0], groups, mask
        )
        return list(gradients)

    if precision is None:
        precision = get_float32_precision()
    rounds = grad.is_cuda and grad.dtype is torch.float32 and torch.backends.cudnn.allow_tf32
    if precision == "ieee" and rounds:
        exact = product(grad.double(), input.double(), weight.double(), mask)
        return [None if gradient is None else gradient.to(grad.dtype) for gradient in exact]
    return product(grad, input, weight, mask)
