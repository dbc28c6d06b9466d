"""What torch is told about ``_<operator>_backward``: the operators' gradients. See ``_dispatch.py``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._conv import (
    GEOMETRY,
    TENSORS,
    convolution_backward,
    prepared_convolution,
    prepared_convolution_backward,
)
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
    returns,
)
from ._launch import ConvRun, Launcher, check_memory
from ._launch_backward import BackwardLauncher, ChainBackward, FindGradients, Gradients, Wanted
from ._operator import Operator, Prepared
from ._reference import Reference
from ._sharding import Shards, shards_of_backward
from .chains import check_tensor
from .config import get_float32_precision

# Gradients of a function's leaves, from the one of its result.
Pullback = Callable[[Function, Sequence[Tensor], Tensor], Sequence[Tensor]]
# The conv's gradients, from v's, the operator's arguments, and which of them are asked for.
ConvBackward = Callable[[Tensor, Sequence[Any], Sequence[bool]], Sequence[Tensor | None]]


def _wanted(operator: Operator, mask: Sequence[bool]) -> Wanted:
    places = [i for i, wants in zip(operator.tensors, mask, strict=True) if wants]
    first_own = len(operator.conv_tensors) or 1
    return Wanted([i for i in places if i < first_own], [i for i in places if i >= first_own])


@dataclass(frozen=True)
class Steps:
    """v, then the chain's vector-Jacobian product, then the conv's."""

    wanted: Wanted
    v: ConvRun
    chain_backward: ChainBackward
    conv_backward: ConvBackward | None  # None where there is no conv

    def __call__(self, grad: Tensor, args: Sequence[Any]) -> Gradients:
        given, through_v = args[:-1], self.wanted.through_v
        v = self.v(given)
        gradients, grad_v = self.chain_backward(v, grad, args)
        del v  # the conv's backward needs its memory
        if not through_v:
            return gradients
        if self.conv_backward is None:
            return {0: grad_v, **gradients}
        of_conv = self.conv_backward(grad_v, given, [i in through_v for i in range(3)])
        return {**gradients, **{i: g for i, g in enumerate(of_conv) if g is not None}}


class ByReference:
    """Backward in PyTorch's own operators. ``pullback`` is how to differentiate them."""

    def __init__(self, operator: Operator, reference: Reference) -> None:
        self._operator = operator
        self._reference = reference

    def steps(
        self,
        pullback: Pullback,
        dtype: torch.dtype,
        mask: Sequence[bool],
        precision: str | None,
        differentiable: bool = False,
    ) -> Steps:
        """``dtype``: the output's. ``differentiable``: by autograd."""
        how: dict[str, Any] = {"precision": precision, "differentiable": differentiable}

        def conv_backward(grad_v: Tensor, args: Sequence[Any], mask: Sequence[bool]) -> list[Tensor | None]:
            return convolution_backward(grad_v, *args[TENSORS][:2], *args[GEOMETRY], mask=mask, **how)

        wanted = _wanted(self._operator, mask)
        return Steps(
            wanted,
            partial(self._reference.v, **how),
            self.chain(pullback, dtype, wanted),
            conv_backward if self._operator.has_conv else None,
        )

    def chain(self, pullback: Pullback, dtype: torch.dtype, wanted: Wanted) -> ChainBackward:
        """The chain's part."""

        def chain_backward(v: Tensor, grad: Tensor, args: Sequence[Any]) -> tuple[Gradients, Tensor]:
            def chain(*leaves: Tensor) -> Tensor:
                values = list(args[:-1])
                for i, leaf in zip(wanted.own, leaves, strict=False):
                    values[i] = leaf
                return self._reference.after_conv(leaves[-1] if wanted.through_v else v, values, dtype)

            found = pullback(chain, [args[i] for i in wanted.own] + ([v] if wanted.through_v else []), grad)
            return dict(zip(wanted.own, found, strict=False)), found[-1]

        return chain_backward


class BackwardKernels:
    """What finds an operator's gradients on the CPU and on CUDA, prepared once for each signature.

    All of it is ours where the conv's kernels serve. Elsewhere PyTorch has the conv's part, and a kernel the chain's: on
    the CPU in float32 and float64. What is left is the reference's.
    """

    def __init__(self, operator: Operator, launcher: Launcher, by_reference: ByReference) -> None:
        self.launcher = BackwardLauncher(launcher)
        self.prepared = Prepared()
        self._operator = operator
        self._has_cuda = launcher.has_cuda
        self._by_reference = by_reference

    def has_cuda(self, grad: Tensor) -> bool:
        """Whether a kernel of this build can run."""
        device = grad.get_device()  # -1 where only another argument is on CUDA
        return device >= 0 and self._has_cuda(device)

    def find_on_cpu(self, grad: Tensor, args: Sequence[Any], precision: str | None) -> Gradients:
        return self._find(self.prepare_cpu, grad, args, precision)

    def find_on_cuda(self, grad: Tensor, args: Sequence[Any], precision: str) -> Gradients:
        return self._find(self.prepare_cuda, grad, args, precision)

    def _find(self, prepare: Function, grad: Tensor, args: Sequence[Any], precision: str | None) -> Gradients:
        *given, statistics, mask = args
        signature = (
            *self._operator.signature(given, {"precision": precision}), *mask, grad.shape, grad.dtype, grad.device,
            *[a.device for a in (*given, statistics) if isinstance(a, Tensor)],
            *(() if statistics is None else (statistics.shape, statistics.dtype)),
        )  # fmt: skip
        find: FindGradients | None = self.prepared.get(signature)
        if find is None:
            shape, *_ = self._operator.look(given)
            if grad.shape != shape or grad.device != given[0].device:
                raise RuntimeError(f"grad must have shape {list(shape)}, but has shape {list(grad.shape)}")
            self._check_statistics(statistics, given)
            find = prepare(grad, given, mask, precision)
            self.prepared.remember(signature, find)
        return find(grad, args[:-1])

    def _check_statistics(self, statistics: Tensor | None, args: Sequence[Any]) -> None:
        if not self._operator.chain.has_norm:
            return
        like = self._operator.empty_statistics(args)
        if statistics is None:
            raise RuntimeError("statistics must be a tensor, but is None")
        if (statistics.shape, statistics.dtype, statistics.device) != (like.shape, like.dtype, like.device):
            raise RuntimeError(
                f"statistics must be {like.dtype} of shape {list(like.shape)} on {like.device}, but is "
                f"{statistics.dtype} of shape {list(statistics.shape)} on {statistics.device}"
            )

    def prepare_cpu(
        self, grad: Tensor, args: Sequence[Any], mask: Sequence[bool], precision: str | None
    ) -> FindGradients:
        v, wanted = self._operator.example_of_v(args), _wanted(self._operator, mask)
        path = self.launcher.plan_cpu(v, grad, args).path
        if path == "direct":
            return self.launcher.all_on_cpu(v, grad, args, wanted)
        conv = self.launcher.conv_on_cpu(args, v) if self._operator.has_conv else None
        chain = None if path == "plain" else self.launcher.chain_on_cpu(v, grad, args, wanted)
        return self._steps(grad, args, wanted, precision, conv, chain)

    def prepare_cuda(
        self, grad: Tensor, args: Sequence[Any], mask: Sequence[bool], precision: str
    ) -> FindGradients:
        v, wanted = self._operator.example_of_v(args), _wanted(self._operator, mask)
        conv = chain = None
        if self.launcher.plan_chain_on_cuda(v, grad, args, precision).is_ours:
            if self._operator.has_conv:
                whole = self.launcher.all_on_cuda(v, grad, args, wanted, precision)
                if whole is not None:
                    return whole
                in_float32 = v.to(torch.float32)
                conv = self.launcher.conv_on_cuda(args, in_float32, precision)
                v = v if conv is None else in_float32
            chain = self.launcher.chain_on_cuda(v, grad, args, wanted)
        return self._steps(grad, args, wanted, precision, conv if chain else None, chain)

    def _steps(
        self,
        grad: Tensor,
        args: Sequence[Any],
        wanted: Wanted,
        precision: str | None,
        conv: ConvRun | None,
        chain: ChainBackward | None,
    ) -> FindGradients:
        """``conv`` and ``chain``: v and the chain's part by kernels; None where PyTorch computes them."""
        has_conv, v = self._operator.has_conv, conv
        if v is None:
            v = prepared_convolution(args, precision) if has_conv else _first
        steps = Steps(
            wanted,
            v,
            chain or self._by_reference.chain(_recorded_pullback, grad.dtype, wanted),
            prepared_convolution_backward(args, precision) if has_conv else None,
        )
        if chain is not None and (conv is not None or not has_conv):
            return steps  # kernels look at all pointers
        return partial(_check_and_find, self._operator, steps)


class Backward(Inner):
    """``_<operator>_backward(grad, <arguments>, statistics, output_mask)``: a gradient for each tensor.

    After the arguments stand the statistics of the norm, None where there is none or on devices without kernels.
    A gradient is like ``torch.empty_like(argument)``, or has no elements where the mask, with an entry for each, does
    not ask for it: Inductor takes no undefined tensors, ``is_grads_batched`` no list of those wanted.
    v is computed again. On devices without kernels, and for double backward, the reference is differentiated.
    """

    def __init__(self, operator: Operator, launcher: Launcher, reference: Reference) -> None:
        self.operator = operator
        self.by_reference = ByReference(operator, reference)
        self.kernels = BackwardKernels(operator, launcher, self.by_reference)
        name = f"_{operator.name}_backward"
        required = re.sub("=[^,]*", "", operator.arguments)
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

        *values, mask = args
        steps = self.by_reference.steps(pullback, grad.dtype, mask, precision, differentiable=True)
        found = steps(grad, values) if any(mask) else {}
        return returns([found[i] if i in found else grad.new_empty(0) for i in self.operator.tensors])

    def cpu(self, grad: Tensor, *args: Any, precision: str | None = None) -> Any:
        return self.run(self.kernels.find_on_cpu, grad, args, precision)

    def cuda(self, grad: Tensor, *args: Any, precision: str | None = None) -> Any:
        if not self.kernels.has_cuda(grad):
            return self.plain(grad, *args, precision=precision)
        return self.run(self.kernels.find_on_cuda, grad, args, precision or get_float32_precision())

    def plain(self, grad: Tensor, *args: Any, precision: str | None = None) -> Any:
        def find(grad: Tensor, args: Sequence[Any], precision: str | None) -> Gradients:
            *values, mask = args
            return self.by_reference.steps(_recorded_pullback, grad.dtype, mask, precision)(grad, values)

        self.check_grad(grad)
        return self.run(find, grad, args, precision)

    def run(self, find: Function, grad: Tensor, args: Sequence[Any], precision: str | None) -> Any:
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

    def shards(self, *args: Any, **options: Any) -> Shards:
        return shards_of_backward(self.operator, args)

    def check_grad(self, grad: Tensor) -> None:
        check_tensor(f"{self.operator.name}: grad", grad, False)

    def asked(self, args: Sequence[Any]) -> list[Tensor | None]:
        """The tensor arguments, None where the mask does not ask for the gradient."""
        return [args[i] if wants else None for i, wants in zip(self.operator.tensors, args[-1], strict=True)]


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


def _first(args: Sequence[Any]) -> Tensor:
    v: Tensor = args[0]
    return v


def _check_and_find(operator: Operator, find: FindGradients, grad: Tensor, args: Sequence[Any]) -> Gradients:
    """Where PyTorch reads some of the arguments."""
    for i, name, _ in operator.named:
        if args[i] is not None:
            check_memory(name, args[i])
    return find(grad, args)


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # without it there is none
    return module is not None and isinstance(tensor, module.DTensor)
