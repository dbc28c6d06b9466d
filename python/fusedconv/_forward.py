"""What torch is told about ``<operator>``, and about ``_<operator>_with_statistics``, which training calls where there is
a norm. See ``_dispatch.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._backward import Backward
from ._conv import prepared_convolution
from ._dispatch import (
    Inner,
    as_tuple,
    below_autograd,
    define,
    has_tangent,
    implement,
    needs_gradient,
    recorder,
    unmapped,
    without_autocast,
)
from ._launch import Launcher, Run
from ._operator import OPTIONS, Operator, Prepared, Signature
from ._reference import Reference
from ._sharding import Shards, shards_of_forward
from .config import get_float32_precision, is_traced, is_traced_above_autograd


class Kernels:
    """What runs an operator on the CPU and on CUDA, prepared once for each signature."""

    def __init__(self, operator: Operator, launcher: Launcher) -> None:
        self.operator = operator
        self.launcher = launcher
        self.prepared = Prepared()

    def run_for_cpu(self, given: Sequence[Any], options: Mapping[str, Any]) -> Run:
        signature = self.operator.signature(given, options)
        run: Run | None = self.prepared.get(signature)
        return run or self._prepare(signature, self.launcher.prepare_cpu, given, options)

    def run_for_cuda(self, given: Sequence[Any], options: Mapping[str, Any]) -> Run | None:
        """None where no kernel of this build can run."""
        # -1 where only another argument is on CUDA: the checks will say so
        device = -1 if given[0] is None else given[0].get_device()
        if device < 0 or not self.launcher.has_cuda(device):
            return None
        devices = [a.device for a in given if isinstance(a, Tensor)]
        signature = (*self.operator.signature(given, options), *devices)
        run: Run | None = self.prepared.get(signature)
        return run or self._prepare(signature, self.launcher.prepare_cuda, given, options)

    def _prepare(
        self,
        signature: Signature,
        prepare: Callable[..., Run],
        given: Sequence[Any],
        options: Mapping[str, Any],
    ) -> Run:
        args = self.operator.complete(given)
        output = self.operator.example(args, **options)
        precision = options.get("precision")
        by_pytorch = prepared_convolution(args, precision) if self.operator.has_conv else None
        run = prepare(args, output, by_pytorch, precision)
        self.prepared.remember(signature, run)
        return run


class Forward:
    """``<operator>``."""

    def __init__(
        self,
        kernels: Kernels,
        reference: Reference,
        with_statistics: WithStatistics | None,
        backward: Backward,
    ) -> None:
        self.operator = operator = kernels.operator
        self.kernels = kernels
        self.reference = reference
        self.with_statistics = with_statistics
        self.backward = backward
        self.op = define(f"{operator.name}({operator.arguments}, {OPTIONS}) -> Tensor")
        implement(operator.name, self)

    def autocast(self, device: str, *given: Any, **options: Any) -> Tensor:
        """Casts what the conv takes, and nothing else.

        The output has the unfused chain's dtype: on the CPU the cast arguments give it anyway; on CUDA
        autocast runs group_norm in float32, and no chain casts back.
        """
        args = list(given)
        for i in self.operator.conv_tensors[: len(args)]:
            if _autocasts(args[i]):
                args[i] = args[i].to(torch.get_autocast_dtype(device))
        if device == "cuda" and self.operator.chain.has_norm and _autocasts(args[0]):
            options.setdefault("output_dtype", torch.float32)
        with without_autocast(device):
            output: Tensor = self.op(*args, **options)
        return output

    def vmap(self, batch_size: int, in_dims: Sequence[int | None], *given: Any, **options: Any) -> Tensor:
        """Samples do not see each other: a mapped input is a larger batch. Mapped parameters take calls."""
        tensors = self.operator.places[len(given)]
        if in_dims[0] is None or any(in_dims[i] is not None for i in tensors[1:]):
            calls = unmapped(batch_size, in_dims, given)
            return torch.stack([self.op(*args, **options) for args in calls])
        mapped = given[0].movedim(in_dims[0], 0)
        sample = mapped.new_empty(()).expand(mapped.shape[1:])
        self.operator.example((sample, *given[1:]), **options)  # checks the sizes that the caller sees
        output: Tensor = self.op(mapped.flatten(0, 1), *given[1:], **options)
        return output.view(*mapped.shape[:2], *output.shape[1:])

    def autograd(self, keyset: Any, *given: Any, **options: Any) -> Tensor:
        tensors = [given[i] for i in self.operator.places[len(given)]]
        tangent = has_tangent(tensors)
        if not tangent and not needs_gradient(tensors):
            output: Tensor = below_autograd(self, keyset, given, options)
            return output
        if tangent or torch._C._are_functorch_transforms_active():
            return self.plain(*given, differentiable=True, **options)
        recorded, _ = _recorded(self, keyset, given, options, tensors)
        return recorded

    def for_training(
        self, keyset: Any, given: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the statistics that backward wants, if any. Stands below autograd."""
        input = given[0]
        # the checks will say what None is
        has_kernels = input is not None and (input.is_cpu or input.is_cuda)
        if self.with_statistics is None or not has_kernels:
            return below_autograd(self, keyset, given, options), None
        return self.with_statistics.for_training(keyset, given, options)

    def cpu(self, *given: Any, **options: Any) -> Tensor:
        return self.kernels.run_for_cpu(given, options)(given, None)

    def cuda(self, *given: Any, **options: Any) -> Tensor:
        run = self.kernels.run_for_cuda(given, options)
        return self.plain(*given, **options) if run is None else run(given, None)

    def fake(self, *given: Any, **options: Any) -> Tensor:
        return self.operator.empty(given, **options)

    def plain(self, *given: Any, **options: Any) -> Tensor:
        return self.reference.output(given, **options)

    def shards(self, *given: Any, **options: Any) -> Shards:
        return shards_of_forward(self.operator, given)


class WithStatistics(Inner):
    """``_<operator>_with_statistics(<the operator's arguments>)``: the output, and the statistics of its norm.

    They are float64 ``[N, num_groups, 2]``: of each group the mean and ``1 / sqrt(variance + eps)``. Kernels write
    them, and kernels alone read them, in backward: where PyTorch computes forward it computes backward too, and
    they are zeros. It has all of an operator's rules, for graphs hold it where they were traced for training.
    """

    def __init__(self, kernels: Kernels, reference: Reference, backward: Backward) -> None:
        self.operator = operator = kernels.operator
        self.kernels = kernels
        self.reference = reference
        self.with_statistics = self
        self.backward = backward
        name = f"_{operator.name}_with_statistics"
        self.op = define(f"{name}({operator.arguments}, {OPTIONS}) -> (Tensor, Tensor)")
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
        return _recorded(self, keyset, given, options, tensors)

    def for_training(
        self, keyset: Any, given: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        output, statistics = below_autograd(self, keyset, given, options)
        return output, statistics

    def cpu(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        run = self.kernels.run_for_cpu(given, options)
        statistics = self.operator.empty_statistics(given)
        return run(given, statistics), statistics

    def cuda(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        run = self.kernels.run_for_cuda(given, options)
        if run is None:
            return self.plain(*given, **options)
        statistics = self.operator.empty_statistics(given)
        return run(given, statistics), statistics

    def fake(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return self.operator.empty(given, **options), self.operator.empty_statistics(given)

    def plain(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return self.reference.output(given, **options), self.operator.empty_statistics(given).zero_()

    def shards(self, *given: Any, **options: Any) -> Shards:
        return [([output, output], places) for [output], places in shards_of_forward(self.operator, given)]


def _recorded(
    rules: Forward | WithStatistics,
    keyset: Any,
    given: Sequence[Any],
    options: dict[str, Any],
    tensors: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """The output, which autograd can differentiate, and the statistics that backward wants, if any."""
    if options.get("precision") is None and not is_traced():
        options["precision"] = get_float32_precision()  # backward uses what forward used
    output, statistics = _record(rules, keyset, options, given, *tensors)
    return output, statistics


class _Gradient(torch.autograd.Function):
    """Keeps the arguments and the norm's statistics, not the conv's output; backward computes that again.

    ``given`` holds the ``tensors`` too: autograd wants them by themselves, and the operator in their places.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rules: Forward | WithStatistics,
        keyset: Any,
        options: Any,
        given: Sequence[Any],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        output, statistics = rules.for_training(keyset, given, options)
        ctx.save_for_backward(*tensors, statistics)
        if statistics is not None:
            ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)  # zeros for the statistics would be a kernel of their own
        ctx.rules, ctx.precision = rules, options.get("precision")
        ctx.rest = rest = list(given)
        for i in rules.operator.places[len(rest)]:
            rest[i] = None
        return output, statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        rules, needed = ctx.rules, ctx.needs_input_grad[4:]
        operator = rules.operator
        if grad is None:  # what took the output has no gradient for it
            return (None,) * len(ctx.needs_input_grad)
        args = list(operator.complete(ctx.rest))
        *tensors, statistics = ctx.saved_tensors
        for i, tensor in zip(operator.tensors, tensors, strict=False):
            args[i] = tensor
        # a tracer above autograd did not see them: they would be constants of its graph
        if statistics is not None and is_traced_above_autograd():
            _, statistics = rules.with_statistics.op(*args, precision=ctx.precision)
        mask = [*needed, *[False] * (len(operator.tensors) - len(needed))]
        found = as_tuple(rules.backward.op(grad, *args, statistics, mask, precision=ctx.precision))
        gradients = [gradient if needs else None for gradient, needs in zip(found, needed, strict=False)]
        return (None, None, None, None, *gradients)


_record = recorder(_Gradient)


def _autocasts(tensor: Any) -> bool:
    """Whether autocast touches it: of the floating-point tensors, all but float64."""
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64
