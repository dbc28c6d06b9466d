"""What torch is told about an operator: the only module that uses ``torch.library``; and what its rules share.

A call meets these dispatch keys from top to bottom:

    FuncTorchBatched                                         torch.func.vmap
    Autocast        casts what PyTorch's autocast would cast; keeps the output dtype of the unfused chain
    Autograd        records the gradient where one is needed
    CPU, CUDA       kernels
    Meta            shapes, for fake tensors too
    other devices   the plain reference (CompositeExplicitAutograd)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from . import _sharding

LIBRARY: Any = None

# The output's memory format follows the input's strides: a compiler must not change them behind our back.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_AUTOCAST = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_BATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
_BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset
_BELOW = _BELOW_AUTOGRAD.raw_repr()  # sets of keys as bits, which are quicker to compare
_NESTED = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensor).raw_repr()
_CPU_ONLY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU).raw_repr()

_FAKE = torch._C._TorchDispatchModeKey.FAKE

_graphs_open_levels = False  # whether a tracer met a tangent

Function = Callable[..., Any]


class Rules(Protocol):
    """An operator's, one for each of the keys above, and one for DTensor."""

    op: Any

    def vmap(self, *args: Any, **options: Any) -> Any: ...
    def autocast(self, *args: Any, **options: Any) -> Any: ...
    def autograd(self, *args: Any, **options: Any) -> Any: ...
    def cpu(self, *args: Any, **options: Any) -> Any: ...
    def cuda(self, *args: Any, **options: Any) -> Any: ...
    def fake(self, *args: Any, **options: Any) -> Any: ...
    def plain(self, *args: Any, **options: Any) -> Any: ...
    def shards(self, *args: Any, **options: Any) -> _sharding.Shards: ...


def open_library() -> None:
    """For all operators together: what an import that was interrupted had registered goes."""
    global LIBRARY
    if LIBRARY is not None:
        LIBRARY._destroy()
    LIBRARY = torch.library.Library("fusedconv", "DEF")  # type: ignore[no-untyped-call]
    _sharding.RULES.clear()


def define(schema: str) -> Any:
    LIBRARY.define(schema, tags=_TAGS)
    return getattr(torch.ops.fusedconv, schema.partition("(")[0]).default


def implement(name: str, rules: Rules) -> None:
    LIBRARY.impl(name, partial(_batched, rules.vmap), "FuncTorchBatched")
    LIBRARY.impl(name, partial(rules.autocast, "cpu"), "AutocastCPU")
    LIBRARY.impl(name, partial(rules.autocast, "cuda"), "AutocastCUDA")
    LIBRARY.impl(name, rules.autograd, "Autograd", with_keyset=True)
    LIBRARY.impl(name, rules.cpu, "CPU")
    LIBRARY.impl(name, rules.cuda, "CUDA")
    for key in ("NestedTensorCPU", "NestedTensorCUDA"):
        LIBRARY.impl(name, rules.fake, key)  # says that no argument may be nested
    torch.library.register_fake(f"fusedconv::{name}", partial(_fake, rules.fake), lib=LIBRARY)
    LIBRARY.impl(name, rules.plain, "CompositeExplicitAutograd")
    _sharding.RULES[rules.op] = rules.shards


def _fake(rule: Function, *args: Any, **options: Any) -> Any:
    _sharding.register_if_imported()
    return rule(*args, **options)


# ---- gradients ----


def below_autograd(rules: Rules, keyset: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    keys = keyset.raw_repr()
    if keys & _BELOW == _CPU_ONLY:
        return rules.cpu(*args, **options)  # the dispatcher would convert all arguments there and back
    if keys & _NESTED:
        return rules.fake(*args, **options)  # says what is wrong; the jagged layout's own rule would not
    with torch._C._AutoDispatchBelowAutograd():
        return rules.op.redispatch(keyset & _BELOW_AUTOGRAD, *args, **options)


def needs_gradient(tensors: Sequence[Tensor | None]) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def has_tangent(tensors: Sequence[Tensor | None]) -> bool:
    """Whether one of the tensors takes part in forward-mode differentiation.

    They know themselves, but asking takes long: it is done where a level may be open. Python's count of levels misses
    those that a traced graph opens. It does so under torch.func, or was seen to when it was traced.
    """
    global _graphs_open_levels
    level = forward_ad._current_level >= 0
    active = torch._C._are_functorch_transforms_active()
    if not (level or active or _graphs_open_levels):
        return False
    if not any(map(_is_dual, tensors)):
        return False
    _graphs_open_levels |= level and not active and torch._C._get_dispatch_mode(_FAKE) is not None
    return True


def _is_dual(tensor: Tensor | None) -> bool:
    if tensor is None or tensor.layout is not torch.strided or tensor.is_nested:
        return False  # none, or one that the checks will refuse
    return torch._VF._unpack_dual(tensor, level=0).tangent is not None


def recorder(function: type[torch.autograd.Function]) -> Any:
    """Its ``apply``, which would bind arguments by `inspect` and look for functorch, which has been dealt with: 30 us."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


# ---- autocast and vmap ----


def without_autocast(device: str) -> Any:
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


def unmapped(batch_size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> Iterator[list[Any]]:
    """The arguments of each of the calls that torch.func.vmap stands for."""
    for i in range(batch_size):
        yield [a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims, strict=True)]


class Inner:
    """The rules of an operator that other operators call: they have dealt with autocast and with vmap."""

    op: Any

    def autocast(self, device: str, *given: Any, **options: Any) -> Any:
        with without_autocast(device):
            return self.op(*given, **options)

    def vmap(self, batch_size: int, in_dims: Sequence[int | None], *given: Any, **options: Any) -> Any:
        """A call for each entry of the mapped dimension."""
        calls = [as_tuple(self.op(*args, **options)) for args in unmapped(batch_size, in_dims, given)]
        return returns([torch.stack(samples) for samples in zip(*calls, strict=True)])


# ---- results ----


def returns(results: Sequence[Any]) -> Any:
    """As the dispatcher wants the results of a schema: a tuple, or a single one by itself."""
    return tuple(results) if len(results) > 1 else results[0]


def as_tuple(results: Any) -> tuple[Any, ...]:
    """The reverse."""
    return results if isinstance(results, tuple) else (results,)
