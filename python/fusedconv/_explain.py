"""``explain``: what a call would do. The call is made on fake tensors, and nothing is launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from . import _C
from ._conv import GEOMETRY, TENSORS, choose, prepared_convolution
from ._forward import Forward
from ._measure import copy_rate, product_rate
from ._register import OPERATORS
from .chains import check_conv
from .config import get_float32_precision
from .nn import WHY_CALLED, _ConvChain


@dataclass(frozen=True)
class Explanation:
    """What a call would do; ``print`` shows it.

    Attributes:
        operator: the operator of ``torch.ops.fusedconv`` that it calls; None where a module calls all of its parts.
        path: ``"direct"``: our conv with the chain in it. ``"two-step"``: PyTorch's conv, then the chain. ``"chain"``:
            the chain on a given tensor. ``"plain"``: PyTorch's operators only. ``"step by step"``: a module calls
            some of its parts by themselves, and the operator, if any, for the rest.
        reason: why, in words; for our conv also how it runs.
        kernels: whose instructions our kernels use: the CPU's (``"avx512"``), for our conv on CUDA ``"sm_90a"`` or
            ``"sm_80"``, for a chain there ``"CUDA"``. None where none of them runs.
        pytorch: the operators that PyTorch runs beside them in order, but for views and allocation.
        moved_bytes: what must move at least: each tensor that the operator reads or writes once, and the output of a
            conv that PyTorch runs twice. None where none of our kernels runs.
        operations: floating-point operations of the operator's conv, two a product. None without an operator.
        workspace_bytes: memory that our kernels want beside their output. CUDA only; None elsewhere.
        device: where it runs. None without an operator.
        product_dtype: whose rate of products bounds the conv: on CUDA float16's, which no other but float64 exceeds. None
            where none of our kernels runs, and without a conv.
        products: how many of these a product of the conv takes: three where ours is exact in float32 on tensor cores.
    """

    operator: str | None
    path: str
    reason: str
    kernels: str | None = None
    pytorch: tuple[str, ...] = ()
    moved_bytes: int | None = None
    operations: int | None = None
    workspace_bytes: int | None = None
    device: torch.device | None = None
    product_dtype: torch.dtype | None = None
    products: int = 1

    def floor_seconds(self) -> float | None:
        """An estimate of the least time that the call can take on this machine, from cold memory.

        The larger of ``moved_bytes`` at the rate of a large copy, and ``products * operations`` at that of a large
        ``torch.mm`` of ``product_dtype``. The first call for a device, a dtype and, on a CPU, PyTorch's number of threads
        measures these rates, which takes up to a few seconds and about 1 GB. None where ``moved_bytes`` is.
        """
        if self.moved_bytes is None or self.device is None:
            return None
        threads = torch.get_num_threads() if self.device.type == "cpu" else 0
        # In a mode, such as that of fake tensors, or under torch.func there is nothing to measure.
        with _disable_current_modes(), torch._C._DisableFuncTorch():
            floor = self.moved_bytes / copy_rate(self.device, threads)
            if self.operations and self.product_dtype is not None:
                rate = product_rate(self.device, self.product_dtype, threads)
                floor = max(floor, self.products * self.operations / rate)
        return floor

    def __str__(self) -> str:
        facts = {
            "path": f"{self.path}: {self.reason}",
            "kernels": self.kernels,
            "PyTorch runs": ", ".join(self.pytorch) or "nothing",
            "bytes moved": self.moved_bytes,
            "operations": self.operations,
            "workspace bytes": self.workspace_bytes,
        }
        known = {name: f"{fact:,}" if isinstance(fact, int) else fact for name, fact in facts.items()}
        lines = [f"  {name:<15}  {fact}" for name, fact in known.items() if fact is not None]
        return "\n".join([self.operator or "no operator of fusedconv", *lines])


def explain(module_or_operator: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Explanation:
    """What ``module_or_operator(*inputs, **kwargs)`` would do, without running it.

    Takes a module of fusedconv, a function of :mod:`fusedconv.functional`, an operator of ``torch.ops.fusedconv``, or
    whatever else calls one of these once. No tensor is read or written. Parts that a module calls by themselves, and
    their hooks, see fake tensors: shapes and dtypes without values.

    Raises:
        TypeError: for what does not call one operator of fusedconv.
        RuntimeError, ValueError: what the call itself raises for wrong arguments.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    seen = _Recorder(fake)
    with torch.no_grad(), fake:
        with seen:
            module_or_operator(*inputs, **kwargs)
        explanations = [_explain_operator(fake, *call) for call in seen.calls]
    called = module_or_operator._called_parts() if isinstance(module_or_operator, _ConvChain) else ()
    if not explanations and called:
        explanations = [Explanation(None, "", "")]
    if len(explanations) != 1:
        raise TypeError(
            f"module_or_operator must call one operator of fusedconv, but calls {len(explanations)}: "
            f"{module_or_operator}"
        )
    explanation = replace(explanations[0], pytorch=(*seen.pytorch, *explanations[0].pytorch))
    if called:
        reason = "; ".join(WHY_CALLED[part] for part in called)
        explanation = replace(explanation, path="step by step", reason=reason)
    return explanation


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operators are called, ours with their arguments."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Forward, Sequence[Any], Mapping[str, Any]]] = []
        self.pytorch: list[str] = []
        self._fake = fake

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # The mode by itself lets an operator in place change a real tensor, such as a norm's counter.
        args, options = tree_map_only(Tensor, self._fake.from_tensor, (args, kwargs or {}))
        name = func._schema.name
        if func.namespace == "fusedconv":
            self.calls.append((_operator_of(name.partition("::")[2]), args, options))
        elif func.namespace == "aten" and not _is_view_or_empty(func):
            self.pytorch.append(name)
        if func is torch.ops.aten._convolution.default:  # for which torch 2.5's fake tensors want a device
            return torch.ops.aten.convolution.default(*args[:9])
        return func(*args, **options)


def _operator_of(name: str) -> Forward:
    if name.endswith("_backward"):
        raise TypeError("module_or_operator must call forward only, but calls backward")
    return OPERATORS[name.removeprefix("_").removesuffix("_with_statistics")]


def _is_view_or_empty(func: OpOverload) -> bool:
    returns = [returned.alias_info for returned in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returns)
    return is_view or func._schema.name.startswith(("aten::empty", "aten::new_empty"))


def _explain_operator(
    fake: FakeTensorMode, rules: Forward, given: Sequence[Any], options: Mapping[str, Any]
) -> Explanation:
    """A call below autograd and autocast. Runs in the mode ``fake``."""
    operator = rules.operator
    args = operator.complete(given)
    operations = _operations(args) if operator.has_conv else 0
    device = args[0].device
    on_cuda = device.type == "cuda" and rules.kernels.launcher.has_cuda(device.index)
    if on_cuda or device.type == "cpu":
        return replace(_explain_kernels(_Recorder(fake), rules, args, options), operations=operations)
    with _Recorder(fake) as seen:
        rules.plain(*args, **options)
    reason = f"no kernels of fusedconv run on {device}"
    return Explanation(
        operator.name, "plain", reason, pytorch=tuple(seen.pytorch), operations=operations, device=device
    )


def _explain_kernels(
    seen: _Recorder, rules: Forward, args: Sequence[Any], options: Mapping[str, Any]
) -> Explanation:
    """A call that a kernel of ours takes part in."""
    operator, launcher = rules.operator, rules.kernels.launcher
    output = operator.example(args, **options)
    device, precision = args[0].device, options.get("precision") or get_float32_precision()
    on_cuda = device.type == "cuda"
    moved_bytes = sum(a.nbytes for a in (*args, output) if isinstance(a, Tensor))
    plan = launcher.plan_conv(args, output, precision) if operator.has_conv else None
    path, reason = ("chain", "of a given conv's output") if plan is None else (plan.path, plan.words)
    is_direct = path == "direct"
    kernels, workspace_bytes = "CUDA" if on_cuda else _C.cpu_isa(), 0
    if plan is not None and plan.is_ours:
        kernels, workspace_bytes = plan.instructions, plan.workspace_bytes
    product_dtype = _product_dtype(args, precision, is_direct) if operator.has_conv else None
    if path == "two-step":
        source = prepared_convolution(args, precision)
        source(args)  # makes what all calls share
        with seen:
            v = source(args)
        args = (v, *args[1:])
        moved_bytes += 2 * v.nbytes
    if on_cuda and not is_direct:
        workspace_bytes = launcher.chain_workspace(args, output, device.index)
    return Explanation(
        operator.name,
        path,
        reason,
        kernels=kernels,
        pytorch=(*seen.pytorch, *["aten::clone" for _ in launcher.unready(args, with_conv=is_direct)]),
        moved_bytes=moved_bytes,
        workspace_bytes=workspace_bytes if on_cuda else None,
        device=device,
        product_dtype=product_dtype,
        products=1 if plan is None else plan.terms,
    )


def _product_dtype(args: Sequence[Any], precision: str, is_direct: bool) -> torch.dtype:
    """On a GPU float16 stands for all that its tensor cores multiply at that rate or a lower one: bfloat16, TF32. On most
    CPUs float32 does for float16, which they only convert."""
    input, weight, _ = args[TENSORS]
    dtype: torch.dtype = input.dtype
    if not is_direct:
        _, dtype = choose(input, weight, tuple(args[GEOMETRY]), precision)
    if dtype == torch.float64:
        return dtype
    if input.is_cuda:
        return torch.float16
    return torch.float32 if dtype == torch.float16 else dtype


def _operations(args: Sequence[Any]) -> int:
    """Of the conv."""
    weight: Tensor = args[1]
    return 2 * math.prod(check_conv(*args[TENSORS], *args[GEOMETRY])) * math.prod(weight.shape[1:])
