"""The operators' gradients: ``_<operator>_backward``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import isinf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._conv import GEOMETRY, TENSORS, convolution_backward
from ._dispatch import (
    AUTOGRAD,
    Function,
    Inner,
    as_tuple,
    below_autograd,
    define,
    has_tangent,
    implement,
    needs_gradient,
    recorder,
    remember,
    returns,
)
from ._launch import check_memory
from ._launch_backward import BackwardLauncher, ChainBackward, Gradients, Wanted
from .chains import check_conv, check_tensor
from .config import get_float32_precision

if TYPE_CHECKING:
    from ._register import Operator

# Gradients of a function's leaves, from the one of its result.
Pullback = Callable[[Function, Sequence[Tensor], Tensor], Sequence[Tensor]]
# Computes v: from the arguments, and the precision.
Source = Callable[[Sequence[Any], str | None], Tensor]
# Backward's gradients: from the output's gradient, the arguments, and the precision.
Find = Callable[[Tensor, Sequence[Any], str | None], Gradients]

# What a plane costs by itself is as much as some pixels.
_LEAST_PIXELS = 32
_MOST_SIDE = 2**24  # a pool counts a window's rows and columns in float32


class Backward(Inner):
    """``_<operator>_backward(grad, <arguments>, statistics, output_mask)``: a gradient for each tensor.

    After the arguments stand the statistics of the norm, None where there is none or on devices without kernels.
    A gradient is like ``torch.empty_like(argument)``, or has no elements where the mask, with an entry for each, does
    not ask for it: Inductor takes no undefined tensors, ``is_grads_batched`` no list of those wanted.
    v is computed again. All of it is ours where the conv's kernels serve. Elsewhere PyTorch has the conv's part, and
    a kernel the chain's: on the CPU in float32 and float64. On other devices, and for double backward, the
    chain's part is the reference's.
    """

    def __init__(self, operator: Operator, schema: str) -> None:
        self.operator = operator
        self.first_own = len(operator.conv_tensors) or 1
        self.launcher = BackwardLauncher(operator.launcher)
        self.prepared: dict[tuple[Any, ...], Find] = {}
        name = f"_{operator.name}_backward"
        required = re.sub("=[^,]*", "", schema)
        results = ", ".join(["Tensor"] * len(operator.tensors))
        self.op = define(
            f"{name}(Tensor grad, {required}, Tensor? statistics, bool[] output_mask, *, str? precision=None) "
            f"-> ({results})"
        )
        implement(name, self)

    def autograd(self, keyset: Any, *args: Any, **options: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        tangent = has_tangent(tensors)
        if not tangent and not needs_gradient(tensors):
            return below_autograd(self, keyset, args, options)
        if torch._C._are_functorch_transforms_active():  # where torch.func.vjp is not to be had
            raise NotImplementedError(
                f"{self.operator.name}: a traced graph that holds its backward cannot be differentiated by "
                "torch.func; use torch.autograd, or transform the function and trace that"
            )
        if tangent:
            self.refuse_dtensors(tensors)
            return self.again(*args, **options)
        return _record(self, keyset, options, args, *tensors)

    def refuse_dtensors(self, tensors: Sequence[Tensor]) -> None:
        """What DTensor gives for a conv's second gradient is wrong."""
        if any(map(_is_dtensor, tensors)):
            raise NotImplementedError(
                f"{self.operator.name}: gradients of a DTensor cannot be differentiated again "
                "(create_graph=True); use local tensors"
            )

    def again(self, grad: Tensor, *args: Any, precision: str | None = None) -> Any:
        """Differentiable: torch.func.vjp leaves the arguments' own history in place."""

        def pullback(function: Function, leaves: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
            gradients: Sequence[Tensor] = torch.func.vjp(function, *leaves)[1](grad)
            return gradients

        chain_backward = self.by_reference(pullback, grad.dtype, self.wanted(args[-1]))
        source = partial(self.operator.source, differentiable=True)
        found = self.step_by_step(source, chain_backward, grad, args, precision, differentiable=True)
        return returns([found[i] if i in found else grad.new_empty(0) for i in self.operator.tensors])

    def cpu(self, grad: Tensor, *args: Any, precision: str | None = None) -> Any:
        return self.run(partial(self.by_kernels, self.prepare_cpu), grad, args, precision)

    def cuda(self, grad: Tensor, *args: Any, precision: str | None = None) -> Any:
        device = grad.get_device()  # -1 where only another argument is on CUDA
        if device < 0 or not self.operator.launcher.has_cuda(device):
            return self.plain(grad, *args, precision=precision)
        precision = precision or get_float32_precision()
        return self.run(partial(self.by_kernels, self.prepare_cuda), grad, args, precision)

    def plain(self, grad: Tensor, *args: Any, precision: str | None = None) -> Any:
        self.check_grad(grad)
        chain_backward = self.by_reference(_recorded_pullback, grad.dtype, self.wanted(args[-1]))
        find = partial(self.step_by_step, self.operator.source, chain_backward)
        return self.run(find, grad, args, precision)

    def run(self, find: Find, grad: Tensor, args: Sequence[Any], precision: str | None) -> Any:
        asked = self.asked(args)
        if grad.numel() == 0:
            return returns([grad.new_empty(0) if a is None else torch.zeros_like(a) for a in asked])
        found = find(grad, args, precision) if any(args[-1]) else {}
        taken = {grad.data_ptr()}
        return returns(
            [
                grad.new_empty(0) if a is None else _result(a, found[i], taken)
                for i, a in zip(self.operator.tensors, asked, strict=True)
            ]
        )

    def fake(self, grad: Tensor, *args: Any, precision: str | None = None) -> Any:
        self.check_grad(grad)
        for i, name, optional in self.operator.named:
            check_tensor(name, args[i], optional)
        for a in args:
            if isinstance(a, Tensor) and a.device != grad.device:
                raise RuntimeError(f"an argument is on {a.device}, but grad is on {grad.device}")
        return returns([grad.new_empty(0) if a is None else torch.empty_like(a) for a in self.asked(args)])

    def check_grad(self, grad: Tensor) -> None:
        check_tensor(f"{self.operator.name}: grad", grad, False)

    def asked(self, args: Sequence[Any]) -> list[Tensor | None]:
        """The tensor arguments, None where the mask does not ask for the gradient."""
        return [args[i] if wants else None for i, wants in zip(self.operator.tensors, args[-1], strict=True)]

    def wanted(self, mask: Sequence[bool]) -> Wanted:
        places = [i for i, wants in zip(self.operator.tensors, mask, strict=True) if wants]
        return Wanted([i for i in places if i < self.first_own], [i for i in places if i >= self.first_own])

    def by_kernels(
        self, prepare: Function, grad: Tensor, args: Sequence[Any], precision: str | None
    ) -> Gradients:
        *given, statistics, mask = args
        signature = (
            *self.operator.signature(given, {"precision": precision}), *mask, grad.shape, grad.dtype, grad.device,
            *[a.device for a in (*given, statistics) if isinstance(a, Tensor)],
            *(() if statistics is None else (statistics.shape, statistics.dtype)),
        )  # fmt: skip
        find = self.prepared.get(signature)
        if find is None:
            shape, *_ = self.operator.look(given)
            if grad.shape != shape or grad.device != given[0].device:
                raise RuntimeError(f"grad must have shape {list(shape)}, but has shape {list(grad.shape)}")
            self.check_statistics(statistics, given)
            find = prepare(grad, given, self.wanted(mask), precision)
            remember(self.prepared, signature, find)
        for i, name, _ in self.operator.named:
            if given[i] is not None:
                check_memory(name, given[i])
        return find(grad, args, precision)

    def check_statistics(self, statistics: Tensor | None, args: Sequence[Any]) -> None:
        if self.operator.with_statistics is None:
            return
        like = self.operator.with_statistics.empty(args)
        if statistics is None:
            raise RuntimeError("statistics must be a tensor, but is None")
        if (statistics.shape, statistics.dtype, statistics.device) != (like.shape, like.dtype, like.device):
            raise RuntimeError(
                f"statistics must be {like.dtype} of shape {list(like.shape)} on {like.device}, but is "
                f"{statistics.dtype} of shape {list(statistics.shape)} on {statistics.device}"
            )

    def prepare_cpu(self, grad: Tensor, args: Sequence[Any], wanted: Wanted, precision: str | None) -> Find:
        v = self.example(args)
        has_kernels = _has_kernels_on_cpu(v, grad, args)
        if self.operator.has_conv and has_kernels:
            whole = self.launcher.all_on_cpu(v, grad, args, wanted)
            if whole is not None:
                return _whatever_precision(whole)
        conv = self.launcher.conv_on_cpu(args, v) if self.operator.has_conv else None
        source = self.operator.source if conv is None else _whatever_precision(conv)
        if has_kernels:
            return partial(self.step_by_step, source, self.launcher.chain_on_cpu(v, grad, args, wanted))
        return partial(self.step_by_step, source, self.by_reference(_recorded_pullback, grad.dtype, wanted))

    def prepare_cuda(self, grad: Tensor, args: Sequence[Any], wanted: Wanted, precision: str) -> Find:
        v = self.example(args)
        reference = partial(
            self.step_by_step,
            self.operator.source,
            self.by_reference(_recorded_pullback, grad.dtype, wanted),
        )
        if not _has_kernels(v, grad, args):
            return reference
        source: Source = self.operator.source
        if self.operator.has_conv:
            whole = self.launcher.all_on_cuda(v, grad, args, wanted, precision)
            if whole is not None:
                return _whatever_precision(whole)
            in_float32 = v.to(torch.float32)
            conv = self.launcher.conv_on_cuda(args, in_float32, precision)
            if conv is not None:
                source, v = _whatever_precision(conv), in_float32
        chain_backward = self.launcher.chain_on_cuda(v, grad, args, wanted)
        return reference if chain_backward is None else partial(self.step_by_step, source, chain_backward)

    def example(self, args: Sequence[Any]) -> Tensor:
        """v without memory, contiguous."""
        shape = check_conv(*args[TENSORS], *args[GEOMETRY]) if self.operator.has_conv else args[0].shape
        return torch.empty(shape, dtype=args[0].dtype, device="meta")

    def by_reference(self, pullback: Pullback, dtype: torch.dtype, wanted: Wanted) -> ChainBackward:
        """The chain's vector-Jacobian product, in PyTorch's own operators."""

        def chain_backward(v: Tensor, grad: Tensor, args: Sequence[Any]) -> tuple[Gradients, Tensor]:
            def chain(*leaves: Tensor) -> Tensor:
                values = list(args[:-1])
                for i, leaf in zip(wanted.own, leaves, strict=False):
                    values[i] = leaf
                return self.operator.after_conv(leaves[-1] if wanted.through_v else v, values, dtype)

            found = pullback(chain, [args[i] for i in wanted.own] + ([v] if wanted.through_v else []), grad)
            return dict(zip(wanted.own, found, strict=False)), found[-1]

        return chain_backward

    def step_by_step(
        self,
        source: Source,
        chain_backward: ChainBackward,
        grad: Tensor,
        args: Sequence[Any],
        precision: str | None,
        differentiable: bool = False,
    ) -> Gradients:
        """v, then the chain's vector-Jacobian product, then the conv's by PyTorch. ``differentiable``: by autograd."""
        *args, statistics, mask = args
        wanted = self.wanted(mask)
        if not wanted.all:
            return {}
        v = source(args, precision)
        gradients, grad_v = chain_backward(v, grad, (*args, statistics))
        del v  # the conv's backward needs its memory
        if not wanted.through_v:
            return gradients
        if not self.operator.has_conv:
            return {0: grad_v, **gradients}
        conv_mask = [i in wanted.through_v for i in self.operator.conv_tensors]
        of_conv = convolution_backward(
            grad_v, *args[TENSORS][:2], *args[GEOMETRY],
            precision=precision, mask=conv_mask, differentiable=differentiable,
        )  # fmt: skip
        return {**gradients, **{i: g for i, g in enumerate(of_conv) if g is not None}}


class _SecondGradient(torch.autograd.Function):
    """Differentiates backward by the reference, but not before somebody asks for that: a graph that was traced for
    training, and is traced again with gradients on, goes on to hold the operator."""

    @staticmethod
    def forward(
        ctx: Any, backward: Backward, keyset: Any, options: Any, args: Sequence[Any], *tensors: Tensor
    ) -> Any:
        found = below_autograd(backward, keyset, args, options)
        ctx.save_for_backward(*tensors)
        unasked = [g for g, wants in zip(as_tuple(found), args[-1], strict=True) if not wants]
        ctx.mark_non_differentiable(*unasked)
        ctx.set_materialize_grads(False)
        ctx.backward, ctx.options = backward, options
        ctx.rest = [None if isinstance(a, Tensor) else a for a in args]
        ctx.places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.backward.refuse_dtensors(ctx.saved_tensors)
        needed = ctx.needs_input_grad[4:]
        tensors = dict(zip(ctx.places, ctx.saved_tensors, strict=True))
        leaves = [i for i, needs in zip(ctx.places, needed, strict=True) if needs]
        mask = [grad is not None for grad in grads]
        if not any(mask):
            return (None,) * len(ctx.needs_input_grad)

        def backward(*values: Tensor) -> list[Tensor]:
            given = tensors | dict(zip(leaves, values, strict=True))
            args = [given.get(i, a) for i, a in enumerate(ctx.rest[:-1])]
            found = as_tuple(ctx.backward.again(*args, mask, **ctx.options))
            return [g for g, wants in zip(found, mask, strict=True) if wants]

        pullback = torch.func.vjp(backward, *[tensors[i] for i in leaves])[1]
        found = iter(pullback([grad for grad in grads if grad is not None]))
        return (None, None, None, None, *[next(found) if needs else None for needs in needed])


_record = recorder(_SecondGradient)


# ---- helpers ----


def _has_kernels(v: Tensor, grad: Tensor, args: Sequence[Any]) -> bool:
    """Whether kernels serve. They take infinite bounds of a clamp for none, and know no dtype but the output's."""
    widened = grad.dtype is torch.float32 and v.dtype is not torch.float64
    return (grad.dtype is v.dtype or widened) and not any(isinstance(a, float) and isinf(a) for a in args)


def _has_kernels_on_cpu(v: Tensor, grad: Tensor, args: Sequence[Any]) -> bool:
    """Whether they serve on the CPU too, and are the faster way."""
    if grad.dtype is not v.dtype or v.dtype not in (torch.float32, torch.float64):
        return False
    height, width = v.shape[2:]
    return _has_kernels(v, grad, args) and height * width >= _LEAST_PIXELS and max(height, width) < _MOST_SIDE


def _recorded_pullback(function: Function, leaves: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
    """By autograd. Backward stands below it; the recomputation is recorded all the same."""
    with torch._C._SetExcludeDispatchKeyGuard(AUTOGRAD, False), torch.enable_grad():
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        return torch.autograd.grad(function(*leaves), leaves, grad)


def _result(argument: Tensor, gradient: Tensor, taken: set[int]) -> Tensor:
    """The gradient laid out as the fake operator says, in memory of its own."""
    like = argument if argument.is_contiguous() else torch.empty_like(argument, device="meta")
    if gradient.stride() != like.stride() or gradient.data_ptr() in taken:
        gradient = torch.empty_like(argument).copy_(gradient)
    taken.add(gradient.data_ptr())
    return gradient


def _whatever_precision(call: Function) -> Function:
    """The last argument is dropped: what was prepared knows its precision, or has but one."""
    return lambda *args: call(*args[:-1])


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # without it there is none
    return module is not None and isinstance(tensor, module.DTensor)
