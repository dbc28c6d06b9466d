"""What torch is told about the operators, and all of it: the only module that uses ``torch.library``.

Every record of ``chains.CHAINS`` gives two operators, ``<chain>`` and ``conv2d_<chain>``, and each operator a private
``_<operator>_backward``. A call passes these dispatch keys, top to bottom, and so does this file:

    Autocast   casts what PyTorch's autocast would cast, and says which dtype the unfused chain would give
    Batched    torch.func.vmap
    Autograd   records the gradient where one is needed
    CPU, CUDA  kernels;  Meta: shapes;  other devices (CompositeExplicitAutograd): the plain reference
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._conv import convolution, convolution_backward
from ._launch import Launcher, compute_dtype
from .chains import CHAINS, CHECKS, Chain, Shape, check_conv, check_image, check_output_dtype
from .config import check_precision, get_float32_precision

LIBRARY = torch.library.Library("fusedconv", "DEF")

# The output's memory format follows the input's strides: a compiler must not change them behind our back.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_AUTOCAST = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}

Function = Callable[..., Any]

# Gives the gradients of the leaves of a function of them.
Pullback = Callable[[Callable[..., Tensor], Sequence[Tensor]], Sequence[Tensor]]

_CONV = "SymInt[2] stride=1, SymInt[2] padding=0, SymInt[2] dilation=1, SymInt groups=1"
_OPTIONS = "*, str? precision=None, ScalarType? output_dtype=None"



def _define(schema: str) -> Any:
    LIBRARY.define(schema, tags=_TAGS)
    return getattr(torch.ops.fusedconv, schema.partition("(")[0]).default


def _implement(name: str, *, fake: Function, vmap: Function, autograd: Function, **kernels: Function) -> None:
    torch.library.register_fake(f"fusedconv::{name}", fake, lib=LIBRARY)
    torch.library.register_vmap(f"fusedconv::{name}", vmap, lib=LIBRARY)
    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    for key, kernel in kernels.items():
        LIBRARY.impl(name, kernel, key)


def _without_autocast(device: str) -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST[device]))




def _without_autocast(device: str) -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST[device]))


class Output(NamedTuple):
    """What the checks find out: how the output looks, without its values."""

    shape: Shape
    dtype: torch.dtype
    memory_format: torch.memory_format

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=self.memory_format)


def _is_channels_last(tensor: Tensor) -> bool:
    """What ATen's ``suggest_memory_format`` says: strides grow from channels over width and height to the batch.

    Where sizes of 1 leave it open, strides that fit both formats count as NCHW, as in ATen.
    """
    _, channels, height, width = tensor.shape
    over_batch, over_channels, over_height, over_width = tensor.stride()
    if over_width < over_channels:  # the usual NCHW; the rest is seldom worth its time
        return False
    return bool(
        0 < over_channels * channels <= over_width
        and over_width * width <= over_height
        and over_height * height <= over_batch
        and over_height * height != over_channels
    )


def _conv_schema(own: str) -> str:
    """The conv's arguments around the chain's own. conv_bias has a default unless a required argument follows."""
    required = bool(own) and "=" not in own.split(", ")[0]
    bias = "Tensor? conv_bias" if required else "Tensor? conv_bias=None"
    return ", ".join(filter(None, ("Tensor input, Tensor weight", bias, own, _CONV)))


class Operator:
    """One operator. ``args`` are its positional arguments, all of them, in the schema's order."""

    def __init__(self, chain: Chain, has_conv: bool) -> None:
        self.chain = chain
        self.has_conv = has_conv
        self.name = f"conv2d_{chain.name}" if has_conv else chain.name
        schema = _conv_schema(chain.arguments) if has_conv else ", ".join(filter(None, ("Tensor input", chain.arguments)))
        self.op = _define(f"{self.name}({schema}, {_OPTIONS}) -> Tensor")

        arguments = [a for a in self.op._schema.arguments if not a.kwarg_only]
        names = [a.name for a in arguments]
        self.defaults = tuple(a.default_value for a in arguments)
        self.tensors = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
        self.conv_tensors = self.tensors[:3] if has_conv else []
        self.own = slice(3, -4) if has_conv else slice(1, None)
        self.checks = [(i, name, CHECKS[name]) for i, name in enumerate(names) if name in CHECKS]
        self.promoting = [i for i, name in enumerate(names) if name in ("bias", "scale")]
        self.pool = names.index("pool_size") if "pool_size" in names else None
        self.launcher = Launcher(chain, names, has_conv)

        self.backward_op = Backward(self, schema).op
        _implement(
            self.name,
            AutocastCPU=partial(self.autocast, "cpu"),
            AutocastCUDA=partial(self.autocast, "cuda"),
            vmap=self.vmap,
            autograd=self.autograd,
            CPU=self.cpu,
            CUDA=self.cuda,
            fake=self.fake,
            CompositeExplicitAutograd=self.plain,
        )

    # ---- autocast ----

    def autocast(self, device: str, *given: Any, output_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        """Casts what the conv takes, as PyTorch does, and nothing else.

        The output has the unfused chain's dtype. On the CPU that is what the cast arguments give anyway; on CUDA
        autocast computes group_norm in float32, and no chain casts back.
        """

        def casts(tensor: Any) -> bool:
            return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64

        args = list(given)
        for i in self.conv_tensors[: len(args)]:
            if casts(args[i]):
                args[i] = args[i].to(torch.get_autocast_dtype(device))
        if output_dtype is None and device == "cuda" and self.chain.has_norm and casts(args[0]):
            output_dtype = torch.float32
        with _without_autocast(device):
            output: Tensor = self.op(*args, output_dtype=output_dtype, **options)
        return output

    # ---- torch.func.vmap ----

    def vmap(self, info: Any, in_dims: Any, *given: Any, **options: Any) -> tuple[Tensor, int]:
        """Samples do not see each other, so a mapped input is a larger batch; mapped parameters take a call each."""
        if in_dims[0] is None or any(in_dims[i] is not None for i in self.tensors[1:] if i < len(given)):
            calls = _unmapped(info.batch_size, in_dims, given)
            return torch.stack([self.op(*args, **options) for args in calls]), 0
        mapped = given[0].movedim(in_dims[0], 0)
        sample = mapped.new_empty(mapped.shape[1:])
        self.fake(sample, *given[1:], **options)  # the checks, on the sizes that the caller sees
        output = self.op(mapped.flatten(0, 1), *given[1:], **options)
        return output.unflatten(0, mapped.shape[:2]), 0

    # ---- gradients ----

    def autograd(self, keyset: Any, *given: Any, precision: str | None = None, **options: Any) -> Tensor:
        tangents = _has_tangent(given)
        if not tangents and not _needs_gradient(given):
            return self.below_autograd(keyset, *given, precision=precision, **options)
        if tangents or torch._C._are_functorch_transforms_active():
            return self.plain(*given, precision=precision, **options)
        precision = precision or get_float32_precision()  # backward uses what forward used
        output: Tensor = _Gradient.apply(self, keyset, {"precision": precision, **options}, *self.complete(given))
        return output

    def below_autograd(self, keyset: Any, *args: Any, **options: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            output: Tensor = self.op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **options)
        return output

    # ---- kernels ----

    def cpu(self, *given: Any, precision: str | None = None, output_dtype: torch.dtype | None = None) -> Tensor:
        args = self.complete(given)
        output = self.check(args, precision, output_dtype).empty(args[0].device)
        if output.numel():
            self.launcher.cpu(args, precision, output)
        return output

    def cuda(self, *given: Any, precision: str | None = None, output_dtype: torch.dtype | None = None) -> Tensor:
        args = self.complete(given)
        if not self.launcher.has_cuda(args[0].get_device()):
            return self.plain(*args, precision=precision, output_dtype=output_dtype)
        output = self.check(args, precision, output_dtype).empty(args[0].device)
        if output.numel():
            self.launcher.cuda(args, precision, output)
        return output

    def fake(self, *given: Any, precision: str | None = None, output_dtype: torch.dtype | None = None) -> Tensor:
        args = self.complete(given)
        return self.check(args, precision, output_dtype).empty(args[0].device)

    def plain(self, *given: Any, precision: str | None = None, output_dtype: torch.dtype | None = None) -> Tensor:
        """The chain in PyTorch's own operators; differentiable."""
        args = self.complete(given)
        result = self.check(args, precision, output_dtype)
        v = self.source(args, precision)
        return self.after_conv(v, args, result.dtype).contiguous(memory_format=result.memory_format)

    def source(self, args: Sequence[Any], precision: str | None) -> Tensor:
        """The conv's output, by PyTorch."""
        return convolution(*args[:3], *args[-4:], precision) if self.has_conv else args[0]

    def after_conv(self, v: Tensor, args: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """The reference, computed in float32 or wider and rounded once, like the kernels."""
        compute = compute_dtype(v.dtype)
        own = (a.to(compute) if isinstance(a, Tensor) else a for a in args[self.own])
        return self.chain.reference(v.to(compute), *own).to(dtype)

    # ---- arguments ----

    def complete(self, given: Sequence[Any]) -> Sequence[Any]:
        """The dispatcher leaves out trailing arguments that have their default."""
        return given if len(given) == len(self.defaults) else (*given, *self.defaults[len(given) :])

    def check(self, args: Sequence[Any], precision: str | None, output_dtype: torch.dtype | None) -> Output:
        """Raises where an argument is wrong; else says how the output looks. All kernels and the fake one use it."""
        check_precision(precision)
        input = args[0]
        if self.has_conv:
            shape = check_conv(*args[:3], *args[-4:])
            channels_last = _is_channels_last(input) or _is_channels_last(args[1])  # as PyTorch's conv
        else:
            check_image("input", input)
            shape = input.shape
            channels_last = _is_channels_last(input)
        for i, name, check in self.checks:
            check(name, args[i], shape, input)

        dtype = input.dtype
        for i in self.promoting:
            if args[i].dtype is not dtype and args[i].dim():
                dtype = torch.promote_types(dtype, args[i].dtype)
        if output_dtype is not None:
            check_output_dtype(output_dtype, dtype)
            dtype = output_dtype

        n, channels, height, width = shape
        if self.pool is not None:
            pool = args[self.pool]
            height, width = height // pool[0], width // pool[1]
        if self.chain.reduces_channels:
            channels = 1
        return Output(
            (n, channels, height, width),
            dtype,
            torch.channels_last if channels_last else torch.contiguous_format,
        )


class _Gradient(torch.autograd.Function):
    """Keeps the arguments, not the conv's output; backward computes that again."""

    @staticmethod
    def forward(operator: Operator, keyset: Any, options: dict[str, Any], *args: Any) -> Tensor:
        return operator.below_autograd(keyset, *args, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.operator, _, ctx.options, *args = inputs
        ctx.save_for_backward(*(args[i] for i in ctx.operator.tensors))
        for i in ctx.operator.tensors:
            args[i] = None
        ctx.args = args

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        places = ctx.operator.tensors
        args = list(ctx.args)
        for i, tensor in zip(places, ctx.saved_tensors):
            args[i] = tensor
        mask = [ctx.needs_input_grad[3 + i] for i in places]
        gradients = iter(ctx.operator.backward_op(grad, *args, mask, **ctx.options))
        result: list[Tensor | None] = [None] * (3 + len(args))
        for i, wanted in zip(places, mask):
            result[3 + i] = next(gradients) if wanted else None
        return tuple(result)


class Backward:
    """``_<operator>_backward(grad, <the operator's arguments>, output_mask) -> Tensor[]``.

    The mask has one entry for each tensor argument. The result holds the gradients that it asks for, each like
    ``torch.empty_like(argument)``. Everything is recomputed from the reference.
    """

    def __init__(self, operator: Operator, arguments: str) -> None:
        self.operator = operator
        self.first_own = len(operator.conv_tensors) or 1
        without_defaults = re.sub("=[^,]*", "", arguments)
        name = f"_{operator.name}_backward"
        self.op = _define(
            f"{name}(Tensor grad, {without_defaults}, bool[] output_mask, *, str? precision=None) -> Tensor[]"
        )
        _implement(
            name,
            AutocastCPU=partial(self.autocast, "cpu"),
            AutocastCUDA=partial(self.autocast, "cuda"),
            vmap=self.vmap,
            autograd=self.autograd,
            fake=self.fake,
            CompositeExplicitAutograd=self.kernel,
        )

    def autocast(self, device: str, *args: Any, **options: Any) -> list[Tensor]:
        with _without_autocast(device):
            result: list[Tensor] = self.op(*args, **options)
        return result

    def vmap(self, info: Any, in_dims: Any, *args: Any, **options: Any) -> tuple[list[Tensor], list[int]]:
        calls = [self.op(*sample, **options) for sample in _unmapped(info.batch_size, in_dims, args)]
        return [torch.stack(gradients) for gradients in zip(*calls)], [0] * len(calls[0])

    def autograd(self, keyset: Any, *args: Any, **options: Any) -> list[Tensor]:
        if _needs_gradient(args) or _has_tangent(args):
            return self.again(*args, **options)
        with torch._C._AutoDispatchBelowAutograd():
            result: list[Tensor] = self.op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **options)
        return result

    def again(self, grad: Tensor, *args: Any, precision: str | None = None) -> list[Tensor]:
        """Differentiable: torch.func.vjp leaves the arguments' own history in place, for double backward."""
        return self.gradients(lambda f, leaves: torch.func.vjp(f, *leaves)[1](grad), grad, args, precision)

    def kernel(self, grad: Tensor, *args: Any, precision: str | None = None) -> list[Tensor]:
        def pullback(function: Callable[..., Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor]:
            # We stand below autograd; the recomputation records all the same.
            with torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False), torch.enable_grad():
                leaves = [leaf.detach().requires_grad_() for leaf in leaves]
                return torch.autograd.grad(function(*leaves), leaves, grad)

        wanted = self.wanted(args)
        if grad.numel() == 0:
            return [torch.zeros_like(argument) for argument in wanted]
        gradients = self.gradients(pullback, grad, args, precision)
        return [_laid_out_like(argument, gradient) for argument, gradient in zip(wanted, gradients)]

    def fake(self, grad: Tensor, *args: Any, precision: str | None = None) -> list[Tensor]:
        return [torch.empty_like(argument) for argument in self.wanted(args)]

    def wanted(self, args: Sequence[Any]) -> list[Tensor]:
        return [args[i] for i, wants in zip(self.operator.tensors, args[-1]) if wants]

    def gradients(
        self, pullback: Pullback, grad: Tensor, args: Sequence[Any], precision: str | None
    ) -> list[Tensor]:
        """The chain's vector-Jacobian product, then the conv's."""
        operator = self.operator
        *args, mask = args
        wanted = [i for i, wants in zip(operator.tensors, mask) if wants]
        own = [i for i in wanted if i >= self.first_own]
        through_v = len(own) < len(wanted)  # v is the conv's output
        v = operator.source(args, precision)

        def chain(*leaves: Tensor) -> Tensor:
            values = list(args)
            for i, leaf in zip(reversed(own), reversed(leaves)):
                values[i] = leaf
            return operator.after_conv(leaves[0] if through_v else v, values, grad.dtype)

        leaves = [v] * through_v + [args[i] for i in own]
        found = list(pullback(chain, leaves))
        by_place = dict(zip(reversed(own), reversed(found)))
        if through_v and operator.has_conv:
            conv_mask = [i in wanted for i in range(3)]
            through_conv = convolution_backward(found[0], args[0], args[1], *args[-4:], precision, conv_mask)
            by_place |= dict(enumerate(through_conv))
        elif through_v:
            by_place[0] = found[0]
        return [by_place[i] for i in wanted]


# ---- helpers -----------------------------------------------------------------------------------------------------


def _needs_gradient(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)


def _has_tangent(args: Sequence[Any]) -> bool:
    """Whether forward-mode differentiation is on and one of the tensors takes part in it."""
    return forward_ad._current_level >= 0 and any(
        isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args
    )


def _unmapped(batch_size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Iterator[list[Any]]:
    """The arguments of each of the calls that torch.func.vmap stands for."""
    for sample in range(batch_size):
        yield [a.select(dim, sample) if isinstance(dim, int) else a for a, dim in zip(args, in_dims)]


def _laid_out_like(argument: Tensor, gradient: Tensor) -> Tensor:
    if gradient.stride() == argument.stride():
        return gradient
    return torch.empty_like(argument).copy_(gradient)


OPERATORS = {
    operator.name: operator
    for chain in CHAINS
    for operator in [Operator(chain, has_conv=False), *([Operator(chain, has_conv=True)] if chain.has_conv else [])]
}
