"""What torch is told about the operators, and all of it: the only module that uses ``torch.library``.

Every record of ``chains.CHAINS`` gives two operators, ``<chain>`` and ``conv2d_<chain>``, and each operator a
private ``_<operator>_backward``; those with a norm have ``_<operator>_with_statistics``, which is what training calls.
A call meets these dispatch keys from top to bottom, and so does the reader:

    FuncTorchBatched                                         torch.func.vmap
    Autocast        casts what PyTorch's autocast would cast; keeps the output dtype of the unfused chain
    Autograd        records the gradient where one is needed
    CPU, CUDA       kernels
    Meta            shapes, for fake tensors too
    other devices   the plain reference (CompositeExplicitAutograd)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import isinf, isnan
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from ._conv import GEOMETRY, OWN, TENSORS, convolution, convolution_backward
from ._launch import Launcher, Run
from ._launch_backward import BackwardLauncher, ChainBackward, Gradients, Wanted
from .chains import (
    CHAINS,
    CHECKS,
    Chain,
    Shape,
    check_conv,
    check_image,
    check_output_dtype,
    check_tensor,
    compute_dtype,
)
from .config import check_precision, get_float32_precision, is_traced

LIBRARY: Any = torch.library.Library("fusedconv", "DEF")  # type: ignore[no-untyped-call]

# The output's memory format follows the input's strides: a compiler must not change them behind our back.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_CONV = "SymInt[2] stride=1, SymInt[2] padding=0, SymInt[2] dilation=1, SymInt groups=1"
# output_dtype is for our autocast rule alone: float32 where the unfused chain's own would be a half precision
_OPTIONS = "*, str? precision=None, ScalarType? output_dtype=None"

_AUTOCAST = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_BATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
_BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset
_BELOW = _BELOW_AUTOGRAD.raw_repr()  # sets of keys as bits, which are quicker to compare
_CPU_ONLY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU).raw_repr()

_MOST_PREPARED = 1024  # signatures that an operator remembers

Function = Callable[..., Any]
Look = tuple[Shape, torch.dtype, torch.memory_format]  # what an output looks like
# Gradients of a function's leaves, from the one of its result.
Pullback = Callable[[Function, Sequence[Tensor], Tensor], Sequence[Tensor]]
# Computes v: from the arguments, and the precision.
Source = Callable[[Sequence[Any], str | None], Tensor]
# Backward's gradients: from the output's gradient, the arguments, and the precision.
Find = Callable[[Tensor, Sequence[Any], str | None], Gradients]


def _define(schema: str) -> Any:
    LIBRARY.define(schema, tags=_TAGS)
    return getattr(torch.ops.fusedconv, schema.partition("(")[0]).default


def _implement(name: str, rules: Operator | WithStatistics | Backward) -> None:
    """One rule for each of the keys above."""
    LIBRARY.impl(name, partial(_batched, rules.vmap), "FuncTorchBatched")
    LIBRARY.impl(name, partial(rules.autocast, "cpu"), "AutocastCPU")
    LIBRARY.impl(name, partial(rules.autocast, "cuda"), "AutocastCUDA")
    LIBRARY.impl(name, rules.autograd, "Autograd", with_keyset=True)
    LIBRARY.impl(name, rules.cpu, "CPU")
    LIBRARY.impl(name, rules.cuda, "CUDA")
    torch.library.register_fake(f"fusedconv::{name}", rules.fake, lib=LIBRARY)
    LIBRARY.impl(name, rules.plain, "CompositeExplicitAutograd")


class Operator:
    """One operator.

    ``args`` are all of its positional arguments in the schema's order, ``given`` those that the dispatcher
    hands over (it leaves out defaults at the end), ``options`` its keywords.
    """

    def __init__(self, chain: Chain, has_conv: bool) -> None:
        self.chain = chain
        self.has_conv = has_conv
        self.name = f"conv2d_{chain.name}" if has_conv else chain.name
        schema = _arguments(chain.arguments, has_conv)
        self.op = _define(f"{self.name}({schema}, {_OPTIONS}) -> Tensor")

        arguments = [a for a in self.op._schema.arguments if not a.kwarg_only]
        names = [a.name for a in arguments]
        self.defaults = tuple(a.default_value for a in arguments)
        self.tensors = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
        self.named = [(i, names[i], "Optional" in str(arguments[i].type)) for i in self.tensors]
        self.places = [[i for i in self.tensors if i < count] for count in range(len(arguments) + 1)]
        self.conv_tensors = self.tensors[TENSORS] if has_conv else []
        self.own = OWN if has_conv else slice(1, None)
        self.checks = [(i, name, CHECKS[name]) for i, name in enumerate(names) if name in CHECKS]
        self.promoting = [i for i, name in enumerate(names) if name in ("bias", "scale")]
        self.pool = names.index("pool_size") if "pool_size" in names else None
        self.pairs = [i for i, a in enumerate(arguments) if "List" in str(a.type)]
        self.launcher = Launcher(chain, names, has_conv)
        self.prepared: dict[tuple[Any, ...], Run] = {}
        self.with_statistics = WithStatistics(self, schema, names) if chain.has_norm else None
        self.backward = Backward(self, schema)
        _implement(self.name, self)

    def autocast(self, device: str, *given: Any, **options: Any) -> Tensor:
        """Casts what the conv takes, and nothing else.

        The output has the unfused chain's dtype: on the CPU the cast arguments give it anyway; on CUDA
        autocast runs group_norm in float32, and no chain casts back.
        """
        args = list(given)
        for i in self.conv_tensors[: len(args)]:
            if _autocasts(args[i]):
                args[i] = args[i].to(torch.get_autocast_dtype(device))
        if device == "cuda" and self.chain.has_norm and _autocasts(args[0]):
            options.setdefault("output_dtype", torch.float32)
        with _without_autocast(device):
            output: Tensor = self.op(*args, **options)
        return output

    def vmap(self, batch_size: int, in_dims: Sequence[int | None], *given: Any, **options: Any) -> Tensor:
        """Samples do not see each other: a mapped input is a larger batch. Mapped parameters take calls."""
        if in_dims[0] is None or any(in_dims[i] is not None for i in self.tensors[1:] if i < len(given)):
            calls = _unmapped(batch_size, in_dims, given)
            return torch.stack([self.op(*args, **options) for args in calls])
        mapped = given[0].movedim(in_dims[0], 0)
        sample = mapped.new_empty(()).expand(mapped.shape[1:])
        self.look(self.complete((sample, *given[1:])), **options)  # checks the sizes that the caller sees
        output: Tensor = self.op(mapped.flatten(0, 1), *given[1:], **options)
        return output.view(*mapped.shape[:2], *output.shape[1:])

    def autograd(self, keyset: Any, *given: Any, **options: Any) -> Tensor:
        tensors = [given[i] for i in self.places[len(given)]]
        tangent = _has_tangent(tensors)
        if not tangent and not _needs_gradient(tensors):
            output: Tensor = _below_autograd(self.op, self.cpu, keyset, given, options)
            return output
        if tangent or torch._C._are_functorch_transforms_active():
            return self.plain(*given, **options)
        recorded, _ = self.record(keyset, given, options, tensors)
        return recorded

    def record(
        self, keyset: Any, given: Sequence[Any], options: dict[str, Any], tensors: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """The output, which autograd can differentiate, and the statistics that backward wants, if any."""
        if options.get("precision") is None and not is_traced():
            options["precision"] = get_float32_precision()  # backward uses what forward used
        output, statistics = _record(self, keyset, options, given, *tensors)
        return output, statistics

    def below_autograd(
        self, keyset: Any, given: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        if self.with_statistics is None or not (given[0].is_cpu or given[0].is_cuda):
            return _below_autograd(self.op, self.cpu, keyset, given, options), None
        op, cpu = self.with_statistics.op, self.with_statistics.cpu
        output, statistics = _below_autograd(op, cpu, keyset, given, options)
        return output, statistics

    def cpu(self, *given: Any, **options: Any) -> Tensor:
        return self.run_on_cpu(given, options)(given, None)

    def cuda(self, *given: Any, **options: Any) -> Tensor:
        run = self.run_on_cuda(given, options)
        return self.plain(*given, **options) if run is None else run(given, None)

    def run_on_cpu(self, given: Sequence[Any], options: Mapping[str, Any]) -> Run:
        signature = self.signature(given, options)
        run = self.prepared.get(signature)
        if run is None:
            run = self.prepare(signature, self.launcher.prepare_cpu, given, **options)
        return run

    def run_on_cuda(self, given: Sequence[Any], options: Mapping[str, Any]) -> Run | None:
        """None where no kernel of this build can run."""
        # -1 where only another argument is on CUDA: the checks will say so
        device = -1 if given[0] is None else given[0].get_device()
        if device < 0 or not self.launcher.has_cuda(device):
            return None
        signature = (*self.signature(given, options), *[a.device for a in given if isinstance(a, Tensor)])
        run = self.prepared.get(signature)
        if run is None:
            run = self.prepare(signature, self.launcher.prepare_cuda, given, **options)
        return run

    def signature(self, given: Sequence[Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
        """All that the checks and the launch depend on, but for devices: a CPU kernel meets no others."""
        key = list(given)
        count = len(key)
        for i in self.places[count]:
            if (tensor := key[i]) is not None:
                key[i] = tensor.shape, tensor.stride(), tensor.dtype
        for i in self.pairs:
            if i < count:
                key[i] = tuple(key[i])
        return (*key, *options.items())

    def prepare(self, signature: Any, make_run: Function, given: Sequence[Any], **options: Any) -> Run:
        args = self.complete(given)
        output = self.example(args, **options)
        precision = options.get("precision")
        run: Run = make_run(args, output, lambda args: self.source(self.complete(args), precision), precision)
        _remember(self.prepared, signature, run)
        return run

    def example(self, args: Sequence[Any], **options: Any) -> Tensor:
        """An output without memory."""
        return _empty(self.look(args, **options), torch.device("meta"))

    def fake(self, *given: Any, **options: Any) -> Tensor:
        args = self.complete(given)
        return _empty(self.look(args, **options), args[0].device)

    def plain(self, *given: Any, **options: Any) -> Tensor:
        """The chain in PyTorch's own operators; differentiable."""
        args = self.complete(given)
        _, dtype, memory_format = self.look(args, **options)
        output = self.after_conv(self.source(args, options.get("precision")), args, dtype)
        if torch._C._are_functorch_transforms_active():  # vmap knows no memory formats
            return output
        return output.contiguous(memory_format=memory_format)

    def source(self, args: Sequence[Any], precision: str | None) -> Tensor:
        """The conv's output, by PyTorch."""
        if not self.has_conv:
            source: Tensor = args[0]
            return source
        return convolution(*args[TENSORS], *args[GEOMETRY], precision=precision)

    def after_conv(self, v: Tensor, args: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """The reference, computed in float32 or wider and rounded once, like the kernels."""
        compute = compute_dtype(v.dtype)
        own = [a.to(compute) if isinstance(a, Tensor) else a for a in args[self.own]]
        v = v.to(compute)
        if v.is_cpu:
            v = v.contiguous()  # PyTorch's channels_last group_norm loses digits here
        return self.chain.reference(v, *own).to(dtype)

    def complete(self, given: Sequence[Any]) -> Sequence[Any]:
        return given if len(given) == len(self.defaults) else (*given, *self.defaults[len(given) :])

    def look(
        self, args: Sequence[Any], precision: str | None = None, output_dtype: torch.dtype | None = None
    ) -> Look:
        """Raises where an argument is wrong; else says how the output looks. All kernels ask."""
        if precision is not None:
            check_precision(precision)
        for i, name, optional in self.named:
            check_tensor(name, args[i], optional)
        input = args[0]
        shape = check_conv(*args[TENSORS], *args[GEOMETRY]) if self.has_conv else check_image(input)
        for i, name, check in self.checks:
            check(name, args[i], shape, input)

        dtype = input.dtype
        for i in self.promoting:
            if args[i].dtype is not dtype and args[i].dim():
                dtype = torch.promote_types(dtype, args[i].dtype)
        if output_dtype is not None:
            check_output_dtype(output_dtype, dtype)
            dtype = output_dtype

        channels_last = _is_channels_last(input, args[1] if self.has_conv else None)
        if self.pool is not None:
            pool = args[self.pool]
            shape = (shape[0], shape[1], shape[2] // pool[0], shape[3] // pool[1])
        if self.chain.reduces_channels:
            shape = (shape[0], 1, shape[2], shape[3])
        return shape, dtype, torch.channels_last if channels_last else torch.contiguous_format


class WithStatistics:
    """``_<operator>_with_statistics(<the operator's arguments>)``: the output, and the statistics of its norm.

    They are float64 ``[N, num_groups, 2]``: of each group the mean and ``1 / sqrt(variance + eps)``. Kernels write
    them, and kernels alone read them, in backward: where PyTorch computes forward it computes backward too, and
    they are zeros. It has all of an operator's rules, for graphs hold it where they were traced for training.
    """

    def __init__(self, operator: Operator, schema: str, names: Sequence[str]) -> None:
        self.operator = operator
        self.num_groups = names.index("num_groups")
        name = f"_{operator.name}_with_statistics"
        self.op = _define(f"{name}({schema}, {_OPTIONS}) -> (Tensor, Tensor)")
        _implement(name, self)

    def autocast(self, device: str, *given: Any, **options: Any) -> Any:
        with _without_autocast(device):
            return self.op(*given, **options)

    def vmap(self, batch_size: int, in_dims: Sequence[int | None], *given: Any, **options: Any) -> Any:
        return _mapped(self.op, batch_size, in_dims, given, options)

    def autograd(self, keyset: Any, *given: Any, **options: Any) -> Any:
        """Training meets it below autograd; but graphs that were traced there may be differentiated again."""
        tensors = [given[i] for i in self.operator.places[len(given)]]
        if _has_tangent(tensors) or torch._C._are_functorch_transforms_active():
            return self.plain(*given, **options)
        if _needs_gradient(tensors):
            return self.operator.record(keyset, given, options, tensors)
        return _below_autograd(self.op, self.cpu, keyset, given, options)

    def cpu(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        run = self.operator.run_on_cpu(given, options)
        statistics = self.empty(given)
        return run(given, statistics), statistics

    def cuda(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        run = self.operator.run_on_cuda(given, options)
        if run is None:
            return self.plain(*given, **options)
        statistics = self.empty(given)
        return run(given, statistics), statistics

    def fake(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return self.operator.fake(*given, **options), self.empty(given)

    def plain(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return self.operator.plain(*given, **options), self.empty(given).zero_()

    def empty(self, given: Sequence[Any]) -> Tensor:
        """Memory for the statistics; the arguments have been checked."""
        input = given[0]
        statistics: Tensor = input.new_empty((input.shape[0], given[self.num_groups], 2), dtype=torch.float64)
        return statistics


class _Gradient(torch.autograd.Function):
    """Keeps the arguments and the norm's statistics, not the conv's output; backward computes that again.

    ``given`` holds the ``tensors`` too: autograd wants them by themselves, and the operator in their places.
    """

    @staticmethod
    def forward(
        ctx: Any, operator: Operator, keyset: Any, options: Any, given: Sequence[Any], *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        output, statistics = operator.below_autograd(keyset, given, options)
        ctx.save_for_backward(*tensors, statistics)
        if statistics is not None:
            ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)  # zeros for the statistics would be a kernel of their own
        ctx.operator, ctx.precision = operator, options.get("precision")
        ctx.rest = rest = list(given)
        for i in operator.places[len(rest)]:
            rest[i] = None
        return output, statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        operator, needed = ctx.operator, ctx.needs_input_grad[4:]
        if grad is None:  # what took the output has no gradient for it
            return (None,) * len(ctx.needs_input_grad)
        args = list(operator.complete(ctx.rest))
        *tensors, statistics = ctx.saved_tensors
        for i, tensor in zip(operator.tensors, tensors, strict=False):
            args[i] = tensor
        mask = [*needed, *[False] * (len(operator.tensors) - len(needed))]
        found = _tuple(operator.backward.op(grad, *args, statistics, mask, precision=ctx.precision))
        gradients = [gradient if needs else None for gradient, needs in zip(found, needed, strict=False)]
        return (None, None, None, None, *gradients)


# Function.apply binds its arguments by `inspect` and looks for functorch, which has been dealt with: 30 us.
_record: Any = super(torch.autograd.Function, _Gradient).apply


def _recorded_pullback(function: Function, leaves: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
    """By autograd. Backward stands below it; the recomputation is recorded all the same."""
    with torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False), torch.enable_grad():
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        return torch.autograd.grad(function(*leaves), leaves, grad)


# What a plane costs by itself is as much as some hundred pixels.
_LEAST_PIXELS = 256
_MOST_ROWS = 2**24  # a pool counts a window's rows in float32


def _has_kernels(v: Tensor, grad: Tensor, args: Sequence[Any]) -> bool:
    """Whether kernels serve. They take infinite bounds of a clamp for none, and know no dtype but the output's."""
    widened = grad.dtype is torch.float32 and v.dtype is not torch.float64
    return (grad.dtype is v.dtype or widened) and not any(isinstance(a, float) and isinf(a) for a in args)


def _has_kernels_on_cpu(v: Tensor, grad: Tensor, args: Sequence[Any]) -> bool:
    """Whether they serve on the CPU too, and are the faster way."""
    if grad.dtype is not v.dtype or v.dtype not in (torch.float32, torch.float64):
        return False
    pixels = v.shape[2] * v.shape[3]
    return _has_kernels(v, grad, args) and pixels >= _LEAST_PIXELS and v.shape[2] < _MOST_ROWS


class Backward:
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
        returns = ", ".join(["Tensor"] * len(operator.tensors))
        self.op = _define(
            f"{name}(Tensor grad, {required}, Tensor? statistics, bool[] output_mask, *, str? precision=None) "
            f"-> ({returns})"
        )
        _implement(name, self)

    def autocast(self, device: str, *args: Any, **options: Any) -> Any:
        with _without_autocast(device):
            return self.op(*args, **options)

    def vmap(self, batch_size: int, in_dims: Sequence[int | None], *args: Any, **options: Any) -> Any:
        return _mapped(self.op, batch_size, in_dims, args, options)

    def autograd(self, keyset: Any, *args: Any, **options: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if _needs_gradient(tensors) or _has_tangent(tensors):
            if any(map(_is_dtensor, tensors)):  # what DTensor gives for a conv's second gradient is wrong
                raise NotImplementedError(
                    f"{self.operator.name}: gradients of a DTensor cannot be differentiated again "
                    "(create_graph=True); use local tensors"
                )
            return self.again(*args, **options)
        return _below_autograd(self.op, self.cpu, keyset, args, options)

    def again(self, grad: Tensor, *args: Any, precision: str | None = None) -> Any:
        """Differentiable: torch.func.vjp leaves the arguments' own history in place, for double backward."""

        def pullback(function: Function, leaves: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
            gradients: Sequence[Tensor] = torch.func.vjp(function, *leaves)[1](grad)
            return gradients

        chain_backward = self.by_reference(pullback, grad.dtype, self.wanted(args[-1]))
        found = self.step_by_step(self.operator.source, chain_backward, grad, args, precision)
        return _returns([found[i] if i in found else grad.new_empty(0) for i in self.operator.tensors])

    def cpu(self, grad: Tensor, *args: Any, precision: str | None = None) -> Any:
        return self.run(partial(self.by_kernels, self.prepare_cpu), grad, args, precision)

    def cuda(self, grad: Tensor, *args: Any, precision: str | None = None) -> Any:
        device = grad.get_device()  # -1 where only another argument is on CUDA
        if device < 0 or not self.operator.launcher.has_cuda(device):
            return self.plain(grad, *args, precision=precision)
        precision = precision or get_float32_precision()
        return self.run(partial(self.by_kernels, self.prepare_cuda), grad, args, precision)

    def plain(self, grad: Tensor, *args: Any, precision: str | None = None) -> Any:
        chain_backward = self.by_reference(_recorded_pullback, grad.dtype, self.wanted(args[-1]))
        find = partial(self.step_by_step, self.operator.source, chain_backward)
        return self.run(find, grad, args, precision)

    def run(self, find: Find, grad: Tensor, args: Sequence[Any], precision: str | None) -> Any:
        asked = self.asked(args)
        if grad.numel() == 0:
            return _returns([grad.new_empty(0) if a is None else torch.zeros_like(a) for a in asked])
        found = find(grad, args, precision) if any(args[-1]) else {}
        taken = {grad.data_ptr()}
        return _returns(
            [
                grad.new_empty(0) if a is None else _result(a, found[i], taken)
                for i, a in zip(self.operator.tensors, asked, strict=True)
            ]
        )

    def fake(self, grad: Tensor, *args: Any, precision: str | None = None) -> Any:
        for a in args:
            if isinstance(a, Tensor) and a.device != grad.device:
                raise RuntimeError(f"an argument is on {a.device}, but grad is on {grad.device}")
        return _returns([grad.new_empty(0) if a is None else torch.empty_like(a) for a in self.asked(args)])

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
            _remember(self.prepared, signature, find)
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
    ) -> Gradients:
        """v, then the chain's vector-Jacobian product, then the conv's by PyTorch."""
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
            grad_v, *args[TENSORS][:2], *args[GEOMETRY], precision=precision, mask=conv_mask
        )
        return {**gradients, **{i: g for i, g in enumerate(of_conv) if g is not None}}


# ---- helpers ----


def _arguments(own: str, has_conv: bool) -> str:
    """The schema: the conv's arguments around the chain's own."""
    if not has_conv:
        return f"Tensor input, {own}".rstrip(", ")
    required = bool(own) and "=" not in own.split(", ")[0]  # no default may stand before it
    conv_bias = "Tensor? conv_bias" if required else "Tensor? conv_bias=None"
    return ", ".join(filter(None, ("Tensor input, Tensor weight", conv_bias, own, _CONV)))


def _empty(look: Look, device: torch.device) -> Tensor:
    shape, dtype, memory_format = look
    return torch.empty(shape, dtype=dtype, device=device, memory_format=memory_format)


def _is_channels_last(input: Tensor, weight: Tensor | None) -> bool:
    """What ATen's ``suggest_memory_format`` says: strides grow from channel over width and height to batch.

    A map of one channel or one pixel has no format of its own; the weight's decides, as in PyTorch's conv.
    """
    over_batch, over_channels, over_height, over_width = input.stride()
    if over_width < over_channels:  # the usual NCHW; the rest is seldom worth its time
        return False
    _, channels, height, width = input.shape
    if weight is not None and (channels == 1 or (height == 1 and width == 1)):
        return _is_channels_last(weight, None)
    return bool(
        0 < over_channels * channels <= over_width
        and over_width * width <= over_height
        and over_height * height <= over_batch
        and over_height * height != over_channels  # all alike: NCHW, as in ATen
    )


def _below_autograd(
    op: Any, cpu: Function, keyset: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    if keyset.raw_repr() & _BELOW == _CPU_ONLY:
        return cpu(*args, **options)  # the dispatcher would convert all arguments there and back
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & _BELOW_AUTOGRAD, *args, **options)


def _result(argument: Tensor, gradient: Tensor, taken: set[int]) -> Tensor:
    """The gradient laid out as the fake operator says, in memory of its own."""
    if gradient.stride() != argument.stride() or gradient.data_ptr() in taken:
        gradient = torch.empty_like(argument).copy_(gradient)
    taken.add(gradient.data_ptr())
    return gradient


def _remember(prepared: dict[tuple[Any, ...], Any], signature: tuple[Any, ...], run: Function) -> None:
    if any(isinstance(a, float) and isnan(a) for a in signature):  # NaN would never be found again
        return
    if len(prepared) >= _MOST_PREPARED:
        prepared.clear()
    prepared[signature] = run


def _whatever_precision(call: Function) -> Function:
    """The last argument is dropped: what was prepared knows its precision, or has but one."""
    return lambda *args: call(*args[:-1])


def _returns(results: Sequence[Any]) -> Any:
    """As the dispatcher wants the results of a schema: a tuple, or a single one by itself."""
    return tuple(results) if len(results) > 1 else results[0]


def _tuple(results: Any) -> tuple[Any, ...]:
    """The reverse."""
    return results if isinstance(results, tuple) else (results,)


def _needs_gradient(tensors: Sequence[Tensor | None]) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _has_tangent(tensors: Sequence[Tensor | None]) -> bool:
    """Whether forward-mode differentiation is on and one of the tensors takes part in it."""
    return forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
        for tensor in tensors
    )


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # without it there is none
    return module is not None and isinstance(tensor, module.DTensor)


def _autocasts(tensor: Any) -> bool:
    """Whether autocast touches it: of the floating-point tensors, all but float64."""
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64


def _without_autocast(device: str) -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST[device]))


def _batched(rule: Function, *given: Any, **options: Any) -> Any:
    """Calls a rule that takes mapped tensors as they are and gives results with the mapped dimension first.

    torch.library.register_vmap would do, but in torch 2.5 it fails where one vmap stands in another.
    """
    interpreter: Any = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    args: list[Any] = []
    in_dims: list[int | None] = []
    for a in given:
        a, dim = torch._C._functorch._unwrap_batched(a, level) if isinstance(a, Tensor) else (a, None)
        args.append(a)
        in_dims.append(dim)
    with torch._C._ExcludeDispatchKeyGuard(_BATCHED):
        result = rule(interpreter.batch_size(), in_dims, *args, **options)
    return tree_map(lambda tensor: torch._C._functorch._add_batch_dim(tensor, 0, level), result)


def _mapped(
    op: Any, batch_size: int, in_dims: Sequence[int | None], args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """A call for each entry of the mapped dimension."""
    calls = [_tuple(op(*sample, **options)) for sample in _unmapped(batch_size, in_dims, args)]
    return _returns([torch.stack(samples) for samples in zip(*calls, strict=True)])


def _unmapped(batch_size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> Iterator[list[Any]]:
    """The arguments of each of the calls that torch.func.vmap stands for."""
    for i in range(batch_size):
        yield [a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims, strict=True)]


OPERATORS = {
    operator.name: operator
    for chain in CHAINS
    for operator in [
        Operator(chain, has_conv) for has_conv in ((False, True) if chain.has_conv else (False,))
    ]
}
