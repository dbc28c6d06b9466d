"""The conv where PyTorch runs it, at the precision asked for. PyTorch's global flags stay untouched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    ``aten::convolution_backward`` takes no ``allow_tf32``. Where PyTorch's flag would have it use TF32
    against ``"ieee"``, each factor is split in two, and three products of TF32 precision give the exact
    one. ``"tf32"`` allows TF32 and does not force it.
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
        return _three_products(product, grad, input, weight, mask)
    return product(grad, input, weight, mask)


Product = Callable[[Tensor, Tensor, Tensor, Sequence[bool]], list[Tensor | None]]


def _three_products(
    product: Product, grad: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
) -> list[Tensor | None]:
    """high * high + low * high + high * low; the smallest, low * low, is under float32's rounding."""
    (grad, grad_low), (input, input_low), (weight, weight_low) = map(_split, (grad, input, weight))
    parts = (
        product(grad_low, input, weight, mask),
        product(grad, input_low, weight_low, (*mask[:2], False)),  # the bias has one factor only
        product(grad, input, weight, mask),
    )
    sums: list[Tensor | None] = []
    for terms in zip(*parts, strict=True):
        present = [term for term in terms if term is not None]
        sums.append(sum(present[1:], present[0]) if present else None)
    return sums


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = high + low, both exact in TF32's 10 bits of mantissa, but for the last bits of low."""
    with torch.no_grad():
        high = (x.detach().view(torch.int32) & -(1 << 13)).view(torch.float32)
        low = (x - high).nan_to_num(0.0)  # inf - inf
    return x - low, low
