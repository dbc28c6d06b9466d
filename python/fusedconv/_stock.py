"""Whether a call of a module's part does what PyTorch's ``nn.Conv2d`` or ``nn.GroupNorm`` does, and nothing more.

A part may have been replaced, hooked or parametrised, and its class, or the functions that it calls, may have been
patched, before this import or after it. Every call of a module asks.
"""

from __future__ import annotations

import logging
from types import BuiltinFunctionType, WrapperDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.modules.module as _every_module
from torch import Tensor, nn
from torch.nn.modules.conv import Conv2d
from torch.nn.modules.normalization import GroupNorm
from torch.nn.parameter import Parameter

_log = logging.getLogger("fusedconv")

Code = tuple[Any, ...]

# What a call of either runs, and the names that PyTorch gave it.
_MODULE_NAMES = (
    "Module._wrapped_call_impl",
    "Module._call_impl",
    "Module.__getattr__",
    "object.__getattribute__",
)
_CONV_NAMES = (*_MODULE_NAMES, "Conv2d.forward", "Conv2d._conv_forward", "_VariableFunctionsClass.conv2d")
_NORM_NAMES = (*_MODULE_NAMES, "GroupNorm.forward", "group_norm", "_VariableFunctionsClass.group_norm")
_HOMES = (
    "torch.nn.modules.module",
    "torch.nn.modules.conv",
    "torch.nn.modules.normalization",
    "torch.nn.functional",
)
_FX = "torch.fx._symbolic_trace"


def _conv_code() -> Code:
    return (
        Conv2d.__call__, Conv2d._call_impl, Conv2d.__getattr__, Conv2d.__getattribute__,
        Conv2d.forward, Conv2d._conv_forward, F.conv2d,
    )  # fmt: skip


def _norm_code() -> Code:
    return (
        GroupNorm.__call__, GroupNorm._call_impl, GroupNorm.__getattr__, GroupNorm.__getattribute__,
        GroupNorm.forward, F.group_norm, torch.group_norm,
    )  # fmt: skip


def _home(function: Any) -> Any:
    """The module that defined it; not ``__module__``, which ``functools.wraps`` copies."""
    return getattr(function, "__globals__", {}).get("__name__")


def _is_pytorchs(function: Any, name: str) -> bool:
    if _home(function) == _FX:  # a tracer patches nn.Module for itself, and goes on to what it has wrapped
        function = function.__wrapped__
    is_builtin = isinstance(function, BuiltinFunctionType | WrapperDescriptorType)
    return (is_builtin or _home(function) in _HOMES) and function.__qualname__ == name


def _all_pytorchs(code: Code, names: tuple[str, ...]) -> bool:
    return all(map(_is_pytorchs, code, names))


def _known(what: str, code: Code, names: tuple[str, ...]) -> Code | None:
    """None, which no code equals, where something was patched before this import."""
    foreign = [name for function, name in zip(code, names, strict=True) if not _is_pytorchs(function, name)]
    if foreign:
        _log.warning("%s is called, not fused: %s of this torch is not the function known", what, foreign[0])
    return None if foreign else code


_KNOWN_CONV_CODE = _known("nn.Conv2d", _conv_code(), _CONV_NAMES)
_KNOWN_NORM_CODE = _known("nn.GroupNorm", _norm_code(), _NORM_NAMES)


def _is_unpatched(code: Code, known: Code | None, names: tuple[str, ...]) -> bool:
    # What differs is fx's, or older than this import and undone since. Dynamo does not meet the first, and fuses nothing
    # after the second.
    return code == known or (not torch.compiler.is_dynamo_compiling() and _all_pytorchs(code, names))


def is_stock_conv(module: nn.Module) -> bool:
    return _is_untouched(module, Conv2d) and _is_unpatched(_conv_code(), _KNOWN_CONV_CODE, _CONV_NAMES)


def is_stock_norm(module: nn.Module) -> bool:
    return _is_untouched(module, GroupNorm) and _is_unpatched(_norm_code(), _KNOWN_NORM_CODE, _NORM_NAMES)


def _is_untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of exactly this kind, and nothing was done to it."""
    if type(module) is not kind:
        return False
    own = module.__dict__  # nn.Module's attributes take several times as long
    parameters = own["_parameters"]
    weight, bias = parameters.get("weight", _ABSENT), parameters.get("bias", _ABSENT)
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or "_conv_forward" in own
        or "_call_impl" in own
        or "_compiled_call_impl" in own
        or _every_module._global_forward_hooks
        or _every_module._global_forward_pre_hooks
        or _every_module._global_backward_hooks
        or _every_module._global_backward_pre_hooks
        or (type(weight) is not Parameter and not _is_ordinary(weight))
        or (type(bias) is not Parameter and not _is_ordinary(bias))
    )


_ABSENT = object()  # a parametrised or pruned parameter, or a tensor in its place


def _is_ordinary(tensor: Any) -> bool:
    """Whether the tensor's type leaves it to PyTorch what a conv or a norm does with it. A quantised one may not."""
    kind = type(tensor)
    return tensor is None or (
        isinstance(tensor, Tensor)
        and (kind is Tensor or kind.__torch_function__ is torch._C._disabled_torch_function_impl)
    )
