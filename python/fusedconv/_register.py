"""The operators, each with its rules for torch's dispatcher: see ``_dispatch.py``.

Every record of ``chains.CHAINS`` gives two operators, ``<chain>`` and ``conv2d_<chain>``, and each operator a
private ``_<operator>_backward``; those with a norm have ``_<operator>_with_statistics``, which is what training calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._conv import GEOMETRY, OWN, TENSORS, convolution, prepared_convolution
from ._dispatch import (
    Function,
    Inner,
    as_tuple,
    below_autograd,
    define,
    has_tangent,
    implement,
    needs_gradient,
    open_library,
    recorder,
    remember,
    unmapped,
    without_autocast,
)
from ._launch import Launcher, Run
from ._register_backward import Backward
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
from .config import check_precision, get_float32_precision, is_traced, is_traced_above_autograd

_CONV = "SymInt[2] stride=1, SymInt[2] padding=0, SymInt[2] dilation=1, SymInt groups=1"
# output_dtype is for our autocast rule alone: float32 where the unfused chain's own would be a half precision
_OPTIONS = "*, str? precision=None, ScalarType? output_dtype=None"

Look = tuple[Shape, torch.dtype, torch.memory_format]  # what an output looks like


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
        self.op = define(f"{self.name}({schema}, {_OPTIONS}) -> Tensor")

        arguments = [a for a in self.op._schema.arguments if not a.kwarg_only]
        names = [a.name for a in arguments]
        self.defaults = tuple(a.default_value for a in arguments)
        self.tensors = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
        self.named = [(i, names[i], "Optional" in str(arguments[i].type)) for i in self.tensors]
        self.places = [[i for i in self.tensors if i < count] for count in range(len(arguments) + 1)]
        self.conv_tensors = self.tensors[TENSORS] if has_conv else []
        self.own = OWN if has_conv else slice(1, None)
        self.checks = [(i, name, CHECKS[name]) for i, name in enumerate(names) if name in CHECKS]
        self.promoting = [names.index(name) for name in chain.promoting]
        self.pool = names.index("pool_size") if chain.pools else None
        self.pairs = [i for i, a in enumerate(arguments) if "List" in str(a.type)]
        self.launcher = Launcher(chain, names, has_conv)
        self.prepared: dict[tuple[Any, ...], Run] = {}
        self.with_statistics = WithStatistics(self, schema, names) if chain.has_norm else None
        self.backward = Backward(self, schema)
        implement(self.name, self)

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
        with without_autocast(device):
            output: Tensor = self.op(*args, **options)
        return output

    def vmap(self, batch_size: int, in_dims: Sequence[int | None], *given: Any, **options: Any) -> Tensor:
        """Samples do not see each other: a mapped input is a larger batch. Mapped parameters take calls."""
        if in_dims[0] is None or any(in_dims[i] is not None for i in self.tensors[1:] if i < len(given)):
            calls = unmapped(batch_size, in_dims, given)
            return torch.stack([self.op(*args, **options) for args in calls])
        mapped = given[0].movedim(in_dims[0], 0)
        sample = mapped.new_empty(()).expand(mapped.shape[1:])
        self.look(self.complete((sample, *given[1:])), **options)  # checks the sizes that the caller sees
        output: Tensor = self.op(mapped.flatten(0, 1), *given[1:], **options)
        return output.view(*mapped.shape[:2], *output.shape[1:])

    def autograd(self, keyset: Any, *given: Any, **options: Any) -> Tensor:
        tensors = [given[i] for i in self.places[len(given)]]
        tangent = has_tangent(tensors)
        if not tangent and not needs_gradient(tensors):
            output: Tensor = below_autograd(self, keyset, given, options)
            return output
        if tangent or torch._C._are_functorch_transforms_active():
            return self.plain(*given, differentiable=True, **options)
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

    def forward_with_statistics(
        self, keyset: Any, given: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        input = given[0]
        # the checks will say what None is
        has_kernels = input is not None and (input.is_cpu or input.is_cuda)
        if self.with_statistics is None or not has_kernels:
            return below_autograd(self, keyset, given, options), None
        output, statistics = below_autograd(self.with_statistics, keyset, given, options)
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
        by_pytorch = prepared_convolution(args, precision) if self.has_conv else None
        run: Run = make_run(args, output, by_pytorch, precision)
        remember(self.prepared, signature, run)
        return run

    def example(self, args: Sequence[Any], **options: Any) -> Tensor:
        """An output without memory."""
        return _empty(self.look(args, **options), torch.device("meta"))

    def fake(self, *given: Any, **options: Any) -> Tensor:
        args = self.complete(given)
        return _empty(self.look(args, **options), args[0].device)

    def plain(self, *given: Any, differentiable: bool = False, **options: Any) -> Tensor:
        """The chain in PyTorch's own operators. ``differentiable``: by autograd."""
        args = self.complete(given)
        _, dtype, memory_format = self.look(args, **options)
        output = self.after_conv(self.source(args, options.get("precision"), differentiable), args, dtype)
        if torch._C._are_functorch_transforms_active():  # vmap knows no memory formats
            return output
        return output.contiguous(memory_format=memory_format)

    def source(self, args: Sequence[Any], precision: str | None, differentiable: bool = False) -> Tensor:
        """The conv's output, by PyTorch. ``differentiable``: see `convolution`."""
        if not self.has_conv:
            source: Tensor = args[0]
            return source
        return convolution(
            *args[TENSORS], *args[GEOMETRY], precision=precision, differentiable=differentiable
        )

    def after_conv(self, v: Tensor, args: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """The reference, computed in float32 or wider and rounded once, like the kernels."""
        compute = compute_dtype(v.dtype)
        own = [a.to(compute) if isinstance(a, Tensor) else a for a in args[self.own]]
        return self.chain.reference(v.to(compute), *own).to(dtype)

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


class WithStatistics(Inner):
    """``_<operator>_with_statistics(<the operator's arguments>)``: the output, and the statistics of its norm.

    They are float64 ``[N, num_groups, 2]``: of each group the mean and ``1 / sqrt(variance + eps)``. Kernels write
    them, and kernels alone read them, in backward: where PyTorch computes forward it computes backward too, and
    they are zeros. It has all of an operator's rules, for graphs hold it where they were traced for training.
    """

    def __init__(self, operator: Operator, schema: str, names: Sequence[str]) -> None:
        self.operator = operator
        self.num_groups = names.index("num_groups")
        name = f"_{operator.name}_with_statistics"
        self.op = define(f"{name}({schema}, {_OPTIONS}) -> (Tensor, Tensor)")
        implement(name, self)

    def autograd(self, keyset: Any, *given: Any, **options: Any) -> Any:
        """Training meets it below autograd; but graphs that were traced there may be differentiated again."""
        tensors = [given[i] for i in self.operator.places[len(given)]]
        tangent = has_tangent(tensors)
        if not tangent and not needs_gradient(tensors):
            # under torch.func too: the graph's backward runs, and wants the statistics
            return below_autograd(self, keyset, given, options)
        if tangent or torch._C._are_functorch_transforms_active():
            return self.plain(*given, differentiable=True, **options)
        return self.operator.record(keyset, given, options, tensors)

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
        output, statistics = operator.forward_with_statistics(keyset, given, options)
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
        # a tracer above autograd did not see them: they would be constants of its graph
        if statistics is not None and is_traced_above_autograd():
            _, statistics = operator.with_statistics.op(*args, precision=ctx.precision)
        mask = [*needed, *[False] * (len(operator.tensors) - len(needed))]
        found = as_tuple(operator.backward.op(grad, *args, statistics, mask, precision=ctx.precision))
        gradients = [gradient if needs else None for gradient, needs in zip(found, needed, strict=False)]
        return (None, None, None, None, *gradients)


_record = recorder(_Gradient)


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


def _autocasts(tensor: Any) -> bool:
    """Whether autocast touches it: of the floating-point tensors, all but float64."""
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64


open_library()
OPERATORS = {
    operator.name: operator
    for chain in CHAINS
    for operator in [
        Operator(chain, has_conv) for has_conv in ((False, True) if chain.has_conv else (False,))
    ]
}
