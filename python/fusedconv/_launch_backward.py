"""The same for backward: from its arguments to the kernels of ``_C``, prepared once for each signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._conv import GEOMETRY, TENSORS
from ._launch import (
    CODES,
    VECTORS,
    ConvRun,
    Launcher,
    Start,
    as_vector,
    channels_of,
    code,
    fail_as_freed,
    form,
    start_on_cpu,
    start_on_cuda,
)
from .chains import IDENTITY, compute_dtype

Gradients = dict[int, Tensor]  # by the places of what they belong to among the operator's arguments
# Arguments are an operator's, and the statistics of its norm after them; None where it has no norm.
# From v, the output's gradient and the arguments: gradients of the chain's own parameters, and of v.
ChainBackward = Callable[[Tensor, Tensor, Sequence[Any]], tuple[Gradients, Tensor]]
# From the output's gradient and the arguments: all gradients that are wanted.
FindGradients = Callable[[Tensor, Sequence[Any]], Gradients]


def _of_conv(args: Sequence[Any]) -> Sequence[Any]:
    """The conv's among an operator's arguments."""
    return *args[TENSORS], *args[GEOMETRY]


def _of_gradient(grad: Tensor, args: Sequence[Any]) -> tuple[int | None, bool]:
    """What plans must know: the dtype of the output's gradient, and whether a bound of a clamp is infinite."""
    return CODES.get(grad.dtype), any(isinstance(a, float) and isinf(a) for a in args)


def _like_parameter(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A parameter's gradient from the kernels' own, which has a value a channel and the compute type."""
    if parameter.numel() < gradient.numel():
        gradient = gradient.sum()
    return gradient.to(parameter.dtype).view(parameter.shape)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Wanted:
    """Places of the tensors whose gradients are asked for."""

    through_v: Sequence[int]  # those that follow from v's gradient, or v itself
    own: Sequence[int]  # the chain's own parameters

    @property
    def all(self) -> Sequence[int]:
        """What a launch finds that has the conv too, in its order."""
        return *self.through_v, *self.own


@dataclass(frozen=True)
class _Prepared:
    """A launch for tensors of known forms. Its first argument is v, or a conv's input."""

    names: Sequence[str]
    places: Sequence[int]  # of what it reads, but the output's gradient
    has_norm: bool
    treats_values_alike: bool
    unready: Sequence[int]
    channels: int
    found: Sequence[tuple[int, Tensor, Sequence[int]]]  # place, an empty tensor, size of each gradient
    start: Start

    def ready(self, args: Sequence[Any], grad: Tensor) -> tuple[list[Any], Tensor]:
        """All as the kernels take it: images contiguous, and parameters with a value a channel."""
        args = list(args)
        for i in self.places:
            args[i].data_ptr() or fail_as_freed(self.names[i])
        grad.data_ptr() or fail_as_freed("grad")
        for i in self.unready:
            args[i] = as_vector(args[i], self.channels)
        if self.treats_values_alike and args[0].stride() == grad.stride() and _is_dense(grad):
            return args, grad  # in whatever order, as all values are treated alike
        args[0] = args[0].contiguous()
        if self.has_norm:
            args[self.places[-1]] = args[self.places[-1]].contiguous()
        return args, grad.contiguous()

    def run(self, ready: Sequence[Any], grad: Tensor, grad_v: Tensor | None) -> Gradients:
        found = {i: empty.new_empty(size) for i, empty, size in self.found}
        self.start(
            [*[ready[i].data_ptr() for i in self.places], grad.data_ptr()],
            [gradient.data_ptr() for gradient in found.values()],
            0 if grad_v is None else grad_v.data_ptr(),
        )
        return found


class BackwardLauncher:
    """Prepares the launches of one operator's backward. ``v`` is an example of the conv's output, without memory."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        names = [*launcher.names[TENSORS], *launcher.names[GEOMETRY]]
        self._conv_launcher = Launcher(IDENTITY, names, has_conv=True)

    def plan_cpu(self, v: Tensor, grad: Tensor, args: Sequence[Any]) -> _C.Plan:
        """Who finds the gradients: all of them one launch, or the chain's part a kernel, or PyTorch."""
        launcher = self._launcher
        conv = (form(args[0]), launcher.conv_form(args)) if launcher.has_conv else None
        plan = _C.plan_backward_on_cpu(form(v), *_of_gradient(grad, args), conv, _C.cpu_isa())
        launcher.tell(f"{launcher.operator} backward", args, plan)
        return plan

    def plan_chain_on_cuda(self, v: Tensor, grad: Tensor, args: Sequence[Any], precision: str) -> _C.Plan:
        """Whether a kernel may serve."""
        plan = _C.plan_chain_backward(code(v), *_of_gradient(grad, args))
        if not plan.is_ours:
            self._launcher.tell(f"{self._launcher.operator} backward", args, plan, precision)
        return plan

    def conv_on_cpu(self, args: Sequence[Any], v: Tensor) -> ConvRun | None:
        """Computes v again; None where PyTorch's conv does."""
        launcher = self._launcher
        plan = _C.plan_v_on_cpu(form(args[0]), launcher.conv_form(args), launcher.stores, _C.cpu_isa())
        launcher.tell(f"v of {launcher.operator} backward", args, plan)
        if not plan.is_ours:
            return None
        launch = self._conv_launcher.conv_launch(_of_conv(args), v)
        return self._conv_run(args, v, launch, start_on_cpu(launch))

    def conv_on_cuda(self, args: Sequence[Any], v: Tensor, precision: str) -> ConvRun | None:
        """The same, where the conv's gradients are PyTorch's."""
        device = args[0].get_device()
        launch = self._conv_launcher.conv_launch(_of_conv(args), v, tf32=precision == "tf32")
        plan = launch.prepare_cuda(device)
        if not plan.is_ours:
            return None
        return self._conv_run(args, v, launch, start_on_cuda(launch, device, plan.workspace_bytes))

    def _conv_run(self, args: Sequence[Any], v: Tensor, launch: _C.Launch, start: Start) -> ConvRun:
        run = self._conv_launcher.prepare(launch, _of_conv(args), v, start)
        return lambda args: run(_of_conv(args), None)

    def chain_on_cpu(self, v: Tensor, grad: Tensor, args: Sequence[Any], wanted: Wanted) -> ChainBackward:
        """The chain's part, in float32 or float64."""
        launch = self._launch(v, grad, args, wanted)
        return self._chain(launch, v, grad, args, wanted, start_on_cpu(launch))

    def chain_on_cuda(
        self, v: Tensor, grad: Tensor, args: Sequence[Any], wanted: Wanted
    ) -> ChainBackward | None:
        """The chain's part; None where no kernel serves."""
        device = grad.get_device()
        launch = self._launch(v, grad, args, wanted)
        plan = launch.prepare_cuda(device)
        if not plan.is_ours:
            return None
        return self._chain(launch, v, grad, args, wanted, start_on_cuda(launch, device, plan.workspace_bytes))

    def all_on_cpu(self, v: Tensor, grad: Tensor, args: Sequence[Any], wanted: Wanted) -> FindGradients:
        """The chain's part and the conv's, in float32."""
        launch = self._whole_launch(v, grad, args, wanted, tf32=False)
        return self._whole(grad, args, wanted, start_on_cpu(launch))

    def all_on_cuda(
        self, v: Tensor, grad: Tensor, args: Sequence[Any], wanted: Wanted, precision: str
    ) -> FindGradients | None:
        """The chain's part and the conv's; None where the conv is left to PyTorch."""
        device = grad.get_device()
        in_compute_dtype = v.to(compute_dtype(v.dtype))
        launch = self._whole_launch(in_compute_dtype, grad, args, wanted, tf32=precision == "tf32")
        plan = launch.prepare_cuda(device)
        self._launcher.tell(f"{self._launcher.operator} backward", args, plan, precision)
        if not plan.is_ours:
            return None
        return self._whole(grad, args, wanted, start_on_cuda(launch, device, plan.workspace_bytes))

    def _whole_launch(
        self, v: Tensor, grad: Tensor, args: Sequence[Any], wanted: Wanted, tf32: bool
    ) -> _C.Backward:
        input = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")  # as if contiguous
        return self._launch(v, grad, args, wanted, (form(input), self._launcher.conv_form(args, tf32)))

    def _whole(self, grad: Tensor, args: Sequence[Any], wanted: Wanted, start: Start) -> FindGradients:
        prepared = self._prepare(grad, args, wanted.all, start, with_conv=True)

        def run(grad: Tensor, args: Sequence[Any]) -> Gradients:
            found = prepared.run(*prepared.ready(args, grad), None)
            return {i: _like_parameter(g, args[i]) if i else g for i, g in found.items()}

        return run

    def _launch(
        self,
        v: Tensor,
        grad: Tensor,
        args: Sequence[Any],
        wanted: Wanted,
        conv: tuple[_C.Form, _C.Conv] | None = None,
    ) -> _C.Backward:
        launcher = self._launcher
        tensors = [(name, code(args[i])) for name, i in launcher.places(args, conv is not None).items()]
        if launcher.has_norm:
            tensors.append(("statistics", _C.FLOAT64))
        gradients = [launcher.names[i] for i in (wanted.all if conv else wanted.own)]
        return _C.Backward(
            launcher.chain, [*tensors, ("grad", code(grad))], form(v), conv, launcher.numbers(args),
            code(args[0]), gradients, bool(wanted.through_v),
        )  # fmt: skip

    def _chain(
        self, launch: _C.Backward, v: Tensor, grad: Tensor, args: Sequence[Any], wanted: Wanted, start: Start
    ) -> ChainBackward:
        prepared = self._prepare(grad, (v, *args[1:]), wanted.own, start, with_conv=False)
        # A conv's output is ours: without a reduction its gradient takes its place, which saves fresh memory.
        dtype = args[0].dtype
        in_place = self._launcher.has_conv and self._launcher.stores and v.dtype is dtype
        # The CPU keeps in it what it needs between its steps.
        needs_grad_v = not grad.is_cuda or bool(wanted.through_v)

        def run(v: Tensor, grad: Tensor, args: Sequence[Any]) -> tuple[Gradients, Tensor]:
            ready, grad = prepared.ready((v, *args[1:]), grad)
            v = ready[0]
            grad_v = v if in_place or not needs_grad_v else torch.empty_like(v, dtype=dtype)
            found = prepared.run(ready, grad, grad_v if needs_grad_v else None)
            return {i: _like_parameter(g, args[i]) for i, g in found.items()}, grad_v

        return run

    def _prepare(
        self, grad: Tensor, args: Sequence[Any], wanted: Sequence[int], start: Start, with_conv: bool
    ) -> _Prepared:
        """``with_conv``: whether the launch has one."""
        launcher, channels = self._launcher, channels_of(args, with_conv)
        dtype = args[0].dtype
        of_input, of_others = (
            torch.empty(0, dtype=d, device=grad.device) for d in (dtype, compute_dtype(dtype))
        )
        found = [
            (i, of_others if i else of_input, (channels,) if launcher.names[i] in VECTORS else args[i].shape)
            for i in wanted
        ]
        places = list(launcher.places(args, with_conv).values())
        if launcher.has_norm:
            places.append(len(launcher.names))
        return _Prepared(
            [*launcher.names, "statistics"],
            places,
            launcher.has_norm,
            launcher.treats_values_alike and not with_conv and not grad.is_cuda,
            launcher.unready(args, with_conv),
            channels,
            found,
            start,
        )
