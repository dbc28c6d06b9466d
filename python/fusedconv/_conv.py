"""The conv where PyTorch runs it, at the precision asked for. PyTorch's global flags stay untouched.

Some of oneDNN's kernels crash, write beyond their memory or are wrong for some geometries, and which ones depends on the
machine. So PyTorch's conv gets on the CPU only what is right everywhere, as far as one knows. Else windows and taps that
meet nothing are cut off, and the padding that is left becomes part of the input. Where that would be much larger, the
conv is computed piece by piece: for each tap of the kernel one matrix product, of the pixels that it meets, or for each
window one, where there are fewer windows.

Whether the conv is ours or PyTorch's, csrc/plan decides; here it is PyTorch's. What is chosen here is how to ask for it,
by what only PyTorch knows: its flags, which conv of its own it would take, the sizes that its backends fail at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ._conv_cut import Cut
from ._conv_pieces import ByPieces, gradient_of_bias, plus_bias
from .chains import Geometry, output_sides
from .config import get_float32_precision

# Where the conv's arguments stand among an operator's: its tensors first, then the chain's own, then its geometry.
TENSORS, OWN, GEOMETRY = slice(3), slice(3, -4), slice(-4, None)

_aten = torch.ops.aten


class Conv(Protocol):
    """A way to compute a conv of tensors of known sizes, and its gradients: of the input, the weight and the bias, None
    where ``mask`` says that nobody asks."""

    def output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def gradients(
        self, grad: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> Sequence[Tensor | None]: ...


Chosen = tuple[Conv, torch.dtype]  # who computes a conv, and in which dtype


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
    differentiable: bool = False,
) -> Tensor:
    """``torch.conv2d``; ``"ieee"`` and ``"tf32"`` decide about precision instead of PyTorch's flags. ``differentiable``:
    autograd finds gradients of it by itself, not by `convolution_backward`."""
    precision = precision or get_float32_precision()
    sought = Sought.DIFFERENTIABLE if differentiable else Sought.OUTPUT
    conv, dtype = choose(input, weight, (stride, padding, dilation, groups), precision, sought)
    bias = None if bias is None else bias.to(dtype)
    return conv.output(input.to(dtype), weight.to(dtype), bias).to(input.dtype)


def prepared_convolution(example: Sequence[Any], precision: str | None) -> Callable[[Sequence[Any]], Tensor]:
    """`convolution` for an operator's arguments of the forms that the ``example`` has. What follows from the forms, and
    from no flag, is worked out once."""
    (input, weight), geometry = example[:2], _geometry(example)
    by_default = choose(input, weight, geometry, "default")

    def run(args: Sequence[Any]) -> Tensor:
        input, weight, bias = (*args, None)[TENSORS]  # a default may be left out
        if _follows_from_forms(by_default, input, precision):
            return by_default[0].output(input, weight, bias)
        return convolution(input, weight, bias, *geometry, precision=precision)

    return run


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
    differentiable: bool = False,
) -> list[Tensor | None]:
    """Gradients of input, weight and bias; None where ``mask`` says that nobody asks for it. ``differentiable``: as for
    `convolution`.

    ``aten::convolution_backward`` takes no ``allow_tf32``. Where PyTorch's flags would round against ``"ieee"``, it runs
    in float64: products of TF32 parts would be exact too, but not their sums, which the tensor cores cut off.
    ``"tf32"`` allows TF32 and does not force it.
    """
    sought = [Sought.DIFFERENTIABLE] * 2 if differentiable else [Sought.OF_INPUT, Sought.OF_WEIGHT]
    precision, geometry = precision or get_float32_precision(), (stride, padding, dilation, groups)
    of_input, of_weight = (choose(input, weight, geometry, precision, each) for each in sought)
    return _gradients(of_input, of_weight, grad, input, weight, mask)


def prepared_convolution_backward(
    example: Sequence[Any], precision: str | None
) -> Callable[[Tensor, Sequence[Any], Sequence[bool]], list[Tensor | None]]:
    """`convolution_backward` in the same way: from v's gradient, the arguments and the mask."""
    (input, weight), geometry = example[:2], _geometry(example)
    of_input, of_weight = (
        choose(input, weight, geometry, "default", sought) for sought in (Sought.OF_INPUT, Sought.OF_WEIGHT)
    )

    def run(grad: Tensor, args: Sequence[Any], mask: Sequence[bool]) -> list[Tensor | None]:
        input, weight = args[:2]
        if all(_follows_from_forms(by, input, precision) for by in (of_input, of_weight)):
            return _gradients(of_input, of_weight, grad, input, weight, mask)
        return convolution_backward(grad, input, weight, *geometry, precision=precision, mask=mask)

    return run


def _geometry(args: Sequence[Any]) -> Geometry:
    stride, padding, dilation, groups = args[GEOMETRY]
    return stride, padding, dilation, groups


def _follows_from_forms(by_default: Chosen, input: Tensor, precision: str | None) -> bool:
    """Whether no flag has a say in what was chosen."""
    return by_default[1] is input.dtype and (precision or get_float32_precision()) == "default"


def _gradients(
    of_input: Chosen, of_weight: Chosen, grad: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
) -> list[Tensor | None]:
    def gradients(by: Chosen, mask: Sequence[bool]) -> list[Tensor | None]:
        conv, dtype = by
        found = conv.gradients(grad.to(dtype), input.to(dtype), weight.to(dtype), mask)
        return [None if gradient is None else gradient.to(grad.dtype) for gradient in found]

    if not any(mask[1:]):
        return gradients(of_input, mask)
    if not mask[0] or of_input == of_weight:  # oneDNN finds the bias's with the weight's
        return gradients(of_weight, mask)
    return [*gradients(of_input, [True, False, False])[:1], *gradients(of_weight, [False, *mask[1:]])[1:]]


# ---- by whom ----


@dataclass(frozen=True)
class _ByPyTorch:
    geometry: Geometry
    precision: str

    def output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, weight = self._ordered(input, weight)
        if self.precision == "default":
            return torch.conv2d(input, weight, bias, *self.geometry)
        cudnn = torch.backends.cudnn
        deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        *steps, groups = self.geometry
        output: Tensor = _aten._convolution.default(
            input, weight, bias, *steps, False, [0, 0], groups,
            cudnn.benchmark, deterministic, cudnn.enabled, self.precision == "tf32",
        )  # fmt: skip
        return output

    def gradients(
        self, grad: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        *steps, groups = self.geometry
        grad, input, weight = self._ordered(grad, input, weight)
        found: Sequence[Tensor | None] = _aten.convolution_backward.default(
            grad, input, weight, [weight.shape[0]], *steps, False, [0, 0], groups, mask
        )
        return found

    def _ordered(self, *tensors: Tensor) -> Sequence[Tensor]:
        """On the CPU, where it is not oneDNN's, PyTorch's gradient of a weight of groups is wrong for strides that look
        like channels_last."""
        first, groups = tensors[0], self.geometry[3]
        is_onednn = first.dtype is not torch.float64 and torch._C._get_mkldnn_enabled()
        if groups == 1 or is_onednn or not first.is_cpu:
            return tensors
        return [tensor.contiguous() for tensor in tensors]


@dataclass(frozen=True)
class _OfACut:
    """PyTorch's conv of what is left."""

    cut: Cut
    conv: _ByPyTorch

    def output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        cut = self.cut
        input, weight = cut.input(input), cut.weight(weight)
        if cut.keeps_windows:
            return self.conv.output(input, weight, bias)
        return plus_bias(cut.of_output(self.conv.output(input, weight, None)), bias)

    def gradients(
        self, grad: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        cut = self.cut
        of_input, of_weight, _ = self.conv.gradients(
            cut.output(grad), cut.input(input), cut.weight(weight), [*mask[:2], False]
        )
        return [
            None if of_input is None else cut.of_input(of_input),
            None if of_weight is None else cut.of_weight(of_weight),
            gradient_of_bias(grad, mask[2]),
        ]


class Sought(Enum):
    OUTPUT = auto()
    OF_INPUT = auto()  # gradients
    OF_WEIGHT = auto()
    # Any of these, of which autograd finds gradients by itself: all that holds for a weight's.
    DIFFERENTIABLE = auto()


# oneDNN's own switch, read by it once. PyTorch's are behind its flags.
_FPMATH = os.environ.get("ONEDNN_DEFAULT_FPMATH_MODE") or os.environ.get("DNNL_DEFAULT_FPMATH_MODE") or ""
_BLOCK = 16  # channels; 8 with AVX2
# With AVX-512, oneDNN's conv of torch 2.11 writes beyond its memory where a column of some 5,000 pixels is gone over in
# strides; with AVX2 it does not.
_HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


def choose(
    input: Tensor, weight: Tensor, geometry: Geometry, precision: str, sought: Sought = Sought.OUTPUT
) -> Chosen:
    """Who computes it, and in which dtype.

    On the CPU a weight's gradient in half precision is found in float32: oneDNN's reads beyond its tensors for some
    geometries, depthwise ones and maps of two columns among them. No flag may round what we widened.
    """
    conv: Conv = _ByPyTorch(geometry, precision)
    dtype = input.dtype
    if not input.is_cpu:
        exact = precision == "ieee" and dtype is torch.float32 and input.is_cuda
        rounds = exact and _rounds_on_cuda(input, weight, geometry, sought)
        return conv, torch.float64 if rounds else dtype

    cut, of_weight = Cut.of(input, weight, geometry), sought in (Sought.OF_WEIGHT, Sought.DIFFERENTIABLE)
    is_tall = _HAS_AVX512 and cut.is_tall
    fails = is_tall or _fails(cut, input, geometry)
    if dtype.itemsize == 2 and (of_weight or fails or _fails_in_half(input, weight, geometry)):
        dtype = torch.float32
    by_pieces = partial(ByPieces.of, input, weight, geometry)
    if of_weight and dtype is torch.float32 and _is_narrow(cut, input, weight, geometry):
        conv = by_pieces()
    elif fails:
        cuts = cut.has_windows and not is_tall and cut.is_small(input, weight)
        conv = _OfACut(cut, _ByPyTorch(cut.geometry, precision)) if cuts else by_pieces()
    exact = precision == "ieee" or input.dtype is not dtype
    if exact and dtype is torch.float32 and _rounds_on_cpu(conv, input, weight, geometry):
        takes_long = geometry[3] > 1  # PyTorch's conv of float64 does for each group
        if fails or takes_long:
            conv = by_pieces()
        dtype = torch.float64
    return conv, dtype


def _fails(cut: Cut, input: Tensor, geometry: Geometry) -> bool:
    """Whether a window or a tap meets nothing but padding. There oneDNN's kernels of torch 2.13, in float32 too, read
    beyond their tables, write beyond their memory, or count in 32 bits what does not fit."""
    stride, _, dilation, _ = geometry
    sides = zip(input.shape[2:], stride, dilation, strict=True)
    return not cut.is_whole or any(step > size or gap > size for size, step, gap in sides)


def _fails_in_half(input: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Whether oneDNN's conv of bfloat16 or float16 may be wrong where float32's is right: with AMX or FP16 instructions
    it takes what stands in memory for values where a side of a map has one pixel."""
    return 1 in (*input.shape[2:], *output_sides(input, weight, *geometry[:3]))


def _is_narrow(cut: Cut, input: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Whether oneDNN's gradient of a 1x1 weight writes beyond its memory: with strides, it packs the pixels of less
    channels than a block as if there were a block of them (oneDNN 3.12, its issue 6035). Also where a cut leaves one
    tap."""
    convs = (weight.shape[2:], geometry[0]), (cut.kernel, cut.geometry[0])
    return input.shape[1] < _BLOCK and any(tuple(k) == (1, 1) and max(stride) > 1 for k, stride in convs)


def _rounds_on_cpu(conv: Conv, input: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Whether products in float32 may be rounded on machines that are faster then."""
    if _FPMATH.lower() not in ("", "strict"):
        return True
    of_convs, of_products = _may_round("mkldnn", "conv"), _may_round("mkldnn", "matmul")
    if isinstance(conv, ByPieces) or of_convs == of_products:
        return of_products
    if torch._C._are_functorch_transforms_active():  # of vmap's batch nothing is known
        return True
    if isinstance(conv, _OfACut):
        input, weight, geometry = conv.cut.input(input), conv.cut.weight(weight), conv.cut.geometry
    *steps, groups = geometry
    backend = torch._C._select_conv_backend(
        _like_in_float32(input), _like_in_float32(weight), None, *steps, False, [0, 0], groups
    )
    return of_convs if backend.name.startswith("Mkldnn") else of_products


def _like_in_float32(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, dtype=torch.float32)


def _rounds_on_cuda(input: Tensor, weight: Tensor, geometry: Geometry, sought: Sought) -> bool:
    """Whether products of float32 are rounded in spite of ``allow_tf32=False``, which only cuDNN's forward is told."""
    conv, matmul = _may_round("cuda", "conv") and sought is not Sought.OUTPUT, _may_round("cuda", "matmul")
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
