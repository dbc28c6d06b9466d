"""The operators as functions. ``torch.ops.fusedconv`` has the same names and arguments.

Common to all: ``input`` is ``[N, C, H, W]`` in float32, float64, bfloat16 or float16, of any strides; the
output has its memory format. ``weight`` (``[C_out, C_in / groups, KH, KW]``) and ``conv_bias``
(``[C_out]``) have the input's dtype; all other parameters have that or float32. ``bias`` and ``scale`` have
one value, or one a channel as ``[C, 1, 1]``; ``norm_weight`` and ``norm_bias`` have shape ``[C]``. The
output has the unfused chain's dtype: the input's, but float32 for a half precision with a float32 ``bias`` or
``scale`` that has dimensions. ``stride``, ``padding``, ``dilation`` and ``groups`` are the conv's, in numbers:
the ``padding`` strings ``"same"`` and ``"valid"`` are for the modules. ``num_groups`` is always the group
norm's. ``precision`` is ``"default"``, ``"ieee"`` or ``"tf32"``; without it
:func:`fusedconv.set_float32_precision` counts.

The operators have one more argument, ``output_dtype``, which is autocast's own: it asks for float32 where the
unfused chain under autocast gives that. Nothing else needs it.

The functions named ``conv2d_...`` run the conv and the chain; those without run the chain on a conv's output.

Raises:
    TypeError: for a ``padding`` in words.
    RuntimeError: for an argument of wrong shape, dtype, device or range; the message names it.
    ValueError: for an unknown ``precision``, or, as ``F.group_norm``, where a whole group is a single value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _register  # noqa: F401  (defines torch.ops.fusedconv)
from .chains import Pair, as_pair
from .config import precision_to_record

__all__ = [
    "bias_scale_sigmoid",
    "bias_scale_sigmoid_group_norm",
    "conv2d_bias_scale_sigmoid_group_norm",
    "conv2d_group_norm_scale_max_pool_clamp",
    "conv2d_group_norm_silu",
    "conv2d_group_norm_tanh_hardswish_logsumexp",
    "conv2d_relu_hardswish",
    "group_norm_scale_max_pool_clamp",
    "group_norm_silu",
    "group_norm_tanh_hardswish_logsumexp",
    "relu_hardswish",
]

_ops = torch.ops.fusedconv


def _geometry(stride: Pair, padding: Pair | str, dilation: Pair, groups: int) -> tuple[Pair, ...]:
    """The conv's last arguments; none where all are defaults, which a call then need not carry."""
    if stride == dilation == groups == 1 and padding == 0:
        return ()
    if isinstance(padding, str):
        raise TypeError(f"padding must be numbers here, but is {padding!r}; strings are for the modules")
    return as_pair(stride), as_pair(padding), as_pair(dilation), groups


def _or_setting(precision: str | None) -> str | None:
    return precision_to_record() if precision is None else precision


def conv2d_relu_hardswish(
    input: Tensor,
    weight: Tensor,
    conv_bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    *,
    precision: str | None = None,
) -> Tensor:
    """With ``v`` the conv, ``r = relu(v)``: ``y = r * clamp((r + 3) / 6, 0, 1)``, of the shape of ``v``."""
    output: Tensor = _ops.conv2d_relu_hardswish(
        input,
        weight,
        conv_bias,
        *_geometry(stride, padding, dilation, groups),
        precision=_or_setting(precision),
    )
    return output


def conv2d_bias_scale_sigmoid_group_norm(
    input: Tensor,
    weight: Tensor,
    conv_bias: Tensor | None,
    bias: Tensor,
    scale: Tensor,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    *,
    precision: str | None = None,
) -> Tensor:
    """With ``v`` the conv: ``y = group_norm(sigmoid((v + bias) * scale))``. Output: the shape of ``v``."""
    output: Tensor = _ops.conv2d_bias_scale_sigmoid_group_norm(
        input,
        weight,
        conv_bias,
        bias,
        scale,
        num_groups,
        norm_weight,
        norm_bias,
        eps,
        *_geometry(stride, padding, dilation, groups),
        precision=_or_setting(precision),
    )
    return output


def conv2d_group_norm_scale_max_pool_clamp(
    input: Tensor,
    weight: Tensor,
    conv_bias: Tensor | None,
    num_groups: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    scale: Tensor,
    pool_size: Pair,
    clamp_min: float | None = None,
    clamp_max: float | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    *,
    precision: str | None = None,
) -> Tensor:
    """With ``v`` the conv: ``y = clamp(max_pool2d(group_norm(v) * scale, pool_size), clamp_min, clamp_max)``.

    Output ``[N, C, H // pool_h, W // pool_w]`` with ``H, W`` the map of ``v``. None is no bound.
    """
    output: Tensor = _ops.conv2d_group_norm_scale_max_pool_clamp(
        input,
        weight,
        conv_bias,
        num_groups,
        norm_weight,
        norm_bias,
        eps,
        scale,
        as_pair(pool_size),
        clamp_min,
        clamp_max,
        *_geometry(stride, padding, dilation, groups),
        precision=_or_setting(precision),
    )
    return output


def conv2d_group_norm_silu(
    input: Tensor,
    weight: Tensor,
    conv_bias: Tensor | None,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    *,
    precision: str | None = None,
) -> Tensor:
    """With ``v`` the conv: ``y = silu(group_norm(v))``. Output: the shape of ``v``."""
    output: Tensor = _ops.conv2d_group_norm_silu(
        input,
        weight,
        conv_bias,
        num_groups,
        norm_weight,
        norm_bias,
        eps,
        *_geometry(stride, padding, dilation, groups),
        precision=_or_setting(precision),
    )
    return output


def conv2d_group_norm_tanh_hardswish_logsumexp(
    input: Tensor,
    weight: Tensor,
    conv_bias: Tensor | None,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    *,
    precision: str | None = None,
) -> Tensor:
    """With ``v`` the conv: ``y = logsumexp(v + hardswish(tanh(group_norm(v))), dim=1, keepdim=True)``.

    Output ``[N, 1, H, W]`` with ``H, W`` the map of ``v``.
    """
    output: Tensor = _ops.conv2d_group_norm_tanh_hardswish_logsumexp(
        input,
        weight,
        conv_bias,
        num_groups,
        norm_weight,
        norm_bias,
        eps,
        *_geometry(stride, padding, dilation, groups),
        precision=_or_setting(precision),
    )
    return output


def relu_hardswish(
    input: Tensor,
    *,
    precision: str | None = None,
) -> Tensor:
    """``y = r * clamp((r + 3) / 6, 0, 1)`` with ``r = relu(input)``. Output: the shape of ``input``."""
    output: Tensor = _ops.relu_hardswish(input, precision=_or_setting(precision))
    return output


def bias_scale_sigmoid(
    input: Tensor,
    bias: Tensor,
    scale: Tensor,
    *,
    precision: str | None = None,
) -> Tensor:
    """``y = sigmoid((input + bias) * scale)``. Output: the shape of ``input``."""
    output: Tensor = _ops.bias_scale_sigmoid(input, bias, scale, precision=_or_setting(precision))
    return output


def bias_scale_sigmoid_group_norm(
    input: Tensor,
    bias: Tensor,
    scale: Tensor,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    precision: str | None = None,
) -> Tensor:
    """``y = group_norm(sigmoid((input + bias) * scale))``. Output: the shape of ``input``."""
    output: Tensor = _ops.bias_scale_sigmoid_group_norm(
        input, bias, scale, num_groups, norm_weight, norm_bias, eps, precision=_or_setting(precision)
    )
    return output


def group_norm_scale_max_pool_clamp(
    input: Tensor,
    num_groups: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    scale: Tensor,
    pool_size: Pair,
    clamp_min: float | None = None,
    clamp_max: float | None = None,
    *,
    precision: str | None = None,
) -> Tensor:
    """``y = clamp(max_pool2d(group_norm(input) * scale, pool_size), clamp_min, clamp_max)``.

    Output ``[N, C, H // pool_h, W // pool_w]`` with ``H, W`` the map of ``input``. None is no bound.
    """
    output: Tensor = _ops.group_norm_scale_max_pool_clamp(
        input,
        num_groups,
        norm_weight,
        norm_bias,
        eps,
        scale,
        as_pair(pool_size),
        clamp_min,
        clamp_max,
        precision=_or_setting(precision),
    )
    return output


def group_norm_silu(
    input: Tensor,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    precision: str | None = None,
) -> Tensor:
    """``y = silu(group_norm(input))``. Output: the shape of ``input``."""
    output: Tensor = _ops.group_norm_silu(
        input, num_groups, norm_weight, norm_bias, eps, precision=_or_setting(precision)
    )
    return output


def group_norm_tanh_hardswish_logsumexp(
    input: Tensor,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    precision: str | None = None,
) -> Tensor:
    """``y = logsumexp(input + hardswish(tanh(group_norm(input))), dim=1, keepdim=True)``.

    Output ``[N, 1, H, W]``.
    """
    output: Tensor = _ops.group_norm_tanh_hardswish_logsumexp(
        input, num_groups, norm_weight, norm_bias, eps, precision=_or_setting(precision)
    )
    return output
