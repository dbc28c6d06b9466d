"""The chains: one record each, and what their arguments must be.

A chain is what follows a Conv2d. Its record names its arguments, says what else has to be known of it, and gives the
plain-PyTorch reference; everything else (schemas, checks, shapes, gradients, autocast, vmap, launch) follows.

References: PyTorch's documentation of ``relu``, ``hardswish``, ``sigmoid``, ``tanh``, ``group_norm``,
``max_pool2d``, ``clamp`` and ``logsumexp``; ids 57, 21, 85 and 92 of KernelBench, level 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = tuple[int, int, int, int]
Pair = int | Sequence[int]  # what nn.Conv2d takes for a height and a width

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the values of a dtype are computed in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass(frozen=True)
class Chain:
    """The steps after a conv.

    ``reference(v, *arguments)`` is the definition: ``v`` is the conv's output ``[N, C, H, W]``, and all
    tensors are float32, or all are float64. It must be differentiable twice.
    """

    name: str
    # Schema text of the chain's own arguments; their names decide how they are checked and passed on.
    arguments: str
    reference: Callable[..., Tensor]
    _: KW_ONLY
    has_conv: bool = True  # there is an operator conv2d_<name> too
    has_norm: bool = False  # over num_groups
    pools: bool = False  # in windows of pool_size
    reduces_channels: bool = False  # the output has one channel
    treats_values_alike: bool = False  # wherever they stand: tensors of the same strides need no order
    promoting: tuple[str, ...] = ()  # arguments whose dtype promotes the output's, as in PyTorch's arithmetic

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the chain's own arguments, in order."""
        return tuple(a.split()[1].split("=")[0] for a in self.arguments.split(", ") if a)

    @property
    def stores(self) -> bool:
        """Whether the output has a value for each of v's."""
        return not self.pools and not self.reduces_channels


def _group_norm(
    v: Tensor, num_groups: int, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float
) -> Tensor:
    if norm_weight is None and norm_bias is not None:  # PyTorch's backward fails where a bias stands alone
        norm_weight = torch.ones_like(norm_bias)
    if v.is_cpu:
        # It loses digits where strides look like channels_last, as one channel's may in spite of `contiguous`.
        v = v.reshape(-1).view(v.shape)
    return torch.group_norm(v, num_groups, norm_weight, norm_bias, eps)


def _relu_hardswish(v: Tensor) -> Tensor:
    v = F.relu(v)
    return v * torch.clamp((v + 3) / 6, 0, 1)


def _bias_scale_sigmoid(v: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    return torch.sigmoid((v + bias) * scale)


def _bias_scale_sigmoid_group_norm(
    v: Tensor,
    bias: Tensor,
    scale: Tensor,
    num_groups: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
) -> Tensor:
    return _group_norm(_bias_scale_sigmoid(v, bias, scale), num_groups, norm_weight, norm_bias, eps)


def _group_norm_scale_max_pool_clamp(
    v: Tensor,
    num_groups: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    scale: Tensor,
    pool_size: list[int],
    clamp_min: float | None,
    clamp_max: float | None,
) -> Tensor:
    pooled = F.max_pool2d(_group_norm(v, num_groups, norm_weight, norm_bias, eps) * scale, pool_size)
    return pooled if clamp_min is None and clamp_max is None else torch.clamp(pooled, clamp_min, clamp_max)


def _group_norm_silu(
    v: Tensor, num_groups: int, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float
) -> Tensor:
    return F.silu(_group_norm(v, num_groups, norm_weight, norm_bias, eps))


def _group_norm_tanh_hardswish_logsumexp(
    v: Tensor, num_groups: int, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float
) -> Tensor:
    normed = _group_norm(v, num_groups, norm_weight, norm_bias, eps)
    return torch.logsumexp(v + _hardswish(torch.tanh(normed)), dim=1, keepdim=True)


def _hardswish(v: Tensor) -> Tensor:
    """F.hardswish on CUDA has a sixth in float32 only, also for float64."""
    return v * torch.clamp((v + 3) / 6, 0, 1) if v.dtype is torch.float64 else F.hardswish(v)


_NORM = "SymInt num_groups, Tensor? norm_weight=None, Tensor? norm_bias=None, float eps=1e-5"

CHAINS = (
    Chain("relu_hardswish", "", _relu_hardswish, treats_values_alike=True),
    Chain(
        "bias_scale_sigmoid",
        "Tensor bias, Tensor scale",
        _bias_scale_sigmoid,
        has_conv=False,
        promoting=("bias", "scale"),
    ),
    Chain(
        "bias_scale_sigmoid_group_norm",
        f"Tensor bias, Tensor scale, {_NORM}",
        _bias_scale_sigmoid_group_norm,
        has_norm=True,
        promoting=("bias", "scale"),
    ),
    Chain(
        "group_norm_scale_max_pool_clamp",
        "SymInt num_groups, Tensor? norm_weight, Tensor? norm_bias, float eps, Tensor scale, "
        "SymInt[2] pool_size, float? clamp_min=None, float? clamp_max=None",
        _group_norm_scale_max_pool_clamp,
        has_norm=True,
        pools=True,
        promoting=("scale",),
    ),
    Chain("group_norm_silu", _NORM, _group_norm_silu, has_norm=True),
    Chain(
        "group_norm_tanh_hardswish_logsumexp",
        _NORM,
        _group_norm_tanh_hardswish_logsumexp,
        has_norm=True,
        reduces_channels=True,
    ),
)


IDENTITY = Chain("identity", "", lambda v: v, treats_values_alike=True)
"""A conv by itself. It gives no operator: backward computes v again by it."""


def as_pair(size: Pair) -> tuple[int, ...]:
    """An int, or a sequence of one, stands for both. The checks refuse other lengths than two."""
    if type(size) is tuple and len(size) == 2:  # the usual case, in every call of a module
        return size
    if not isinstance(size, Sequence):
        return size, size
    return (*size, *size) if len(size) == 1 else tuple(size)


# ---- checks ----
#
# Real and fake operators run these same functions, so their errors are the same. As in PyTorch's conv the
# errors are RuntimeErrors; two are ValueErrors, an unknown precision and F.group_norm's "more than 1 value
# per channel". Sizes may be symbolic: no check may tie the batch, the height or the width to a number.
# Every eager call pays for them: conditions stand in line, and what it takes to word an error stands apart.


def _must(condition: bool, message: str) -> None:
    """Raises unless the condition holds; a condition on unknown sizes becomes a run-time check."""
    torch._check(condition, lambda: message)  # type: ignore[no-untyped-call]


def _wrong_kin(name: str, tensor: Tensor, input: Tensor, or_float32: bool) -> RuntimeError:
    """A tensor that goes with ``input`` must have its device, and its dtype or, where allowed, float32."""
    allowed = (input.dtype, torch.float32) if or_float32 else (input.dtype,)
    if tensor.dtype not in allowed:
        words = " or ".join(str(dtype) for dtype in dict.fromkeys(allowed))
        return RuntimeError(f"{name} must be {words} to go with input, but is {tensor.dtype}")
    return RuntimeError(
        f"{name} is on {tensor.device}, but input is on {input.device}; they must be on one device"
    )


def _wrong_pair(name: str, pair: Sequence[int], least: int) -> RuntimeError:
    return RuntimeError(f"{name} must have two values, each at least {least}, but is {list(pair)}")


Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], int]  # stride, padding, dilation, groups


def output_size(size: int, kernel: int, step: int, before: int, gap: int) -> int:
    """Pixels of a side of the output."""
    return (size + 2 * before - gap * (kernel - 1) - 1) // step + 1


def output_sides(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, int]:
    """Rows and columns of the output."""
    rows, columns = map(output_size, input.shape[2:], weight.shape[2:], stride, padding, dilation)
    return rows, columns


# Of a stride, a padding or a dilation: beyond, sizes and places might not fit in 64 bits, ours or oneDNN's.
_MOST_STEP = 2**31 - 1


def check_tensor(name: str, tensor: Tensor | None, optional: bool) -> None:
    """What each tensor argument must be. The dispatcher lets None pass for any of them."""
    if tensor is None:
        if not optional:
            raise RuntimeError(f"{name} must be a tensor, but is None")
    elif tensor.is_nested:
        raise RuntimeError(f"{name} must be a dense tensor, but is nested")
    elif tensor.layout is not torch.strided:
        raise RuntimeError(f"{name} must be a dense tensor, but its layout is {tensor.layout}")


def check_image(input: Tensor) -> Shape:
    """The input: a tensor [N, C, H, W] of a dtype that we compute in. Gives its shape."""
    shape = input.shape
    if len(shape) != 4:
        raise RuntimeError(f"input must have 4 dimensions [N, C, H, W], but has shape {list(shape)}")
    if input.dtype not in DTYPES:
        raise RuntimeError(f"input must be float32, float64, bfloat16 or float16, but is {input.dtype}")
    if shape[1] == 0:
        raise RuntimeError(f"input must have at least one channel, but has shape {list(shape)}")
    return shape


def check_conv(
    input: Tensor,
    weight: Tensor,
    conv_bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Shape:
    """The conv's arguments. Gives the shape of its output."""
    n, channels, *_ = check_image(input)
    _check_weight(weight, input, channels, groups)
    if conv_bias is not None:
        _check_conv_bias(conv_bias, input, weight.shape[0])
    for name, pair, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if len(pair) != 2 or pair[0] < least or pair[1] < least:
            raise _wrong_pair(name, pair, least)
        if pair[0] > _MOST_STEP or pair[1] > _MOST_STEP:
            raise RuntimeError(f"{name} must be at most {_MOST_STEP}, but is {list(pair)}")
    _check_sides(input, weight, padding, dilation)
    return n, weight.shape[0], *output_sides(input, weight, stride, padding, dilation)


def _check_weight(weight: Tensor, input: Tensor, channels: int, groups: int) -> None:
    if weight.dtype is not input.dtype or weight.device != input.device:
        raise _wrong_kin("weight", weight, input, or_float32=False)
    shape = weight.shape
    if len(shape) != 4:
        raise RuntimeError(
            f"weight must have 4 dimensions [C_out, C_in / groups, KH, KW], but has shape {list(shape)}"
        )
    out_channels, in_channels, kernel_h, kernel_w = shape
    if out_channels < 1 or kernel_h < 1 or kernel_w < 1:
        raise RuntimeError(
            f"weight must have an output channel and a kernel of 1 x 1 or more, but has shape {list(shape)}"
        )
    if groups < 1 or out_channels % groups:
        raise RuntimeError(
            f"groups must be at least 1 and divide weight's {out_channels} output channels, but is {groups}"
        )
    if channels != in_channels * groups:
        raise RuntimeError(
            f"weight of shape {list(shape)} with groups={groups} takes {in_channels * groups} input channels,"
            f" but input has shape {list(input.shape)}"
        )


def _check_conv_bias(conv_bias: Tensor, input: Tensor, out_channels: int) -> None:
    if conv_bias.dtype is not input.dtype or conv_bias.device != input.device:
        raise _wrong_kin("conv_bias", conv_bias, input, or_float32=False)
    if conv_bias.shape != (out_channels,):
        raise RuntimeError(
            f"conv_bias must have shape [{out_channels}], but has shape {list(conv_bias.shape)}"
        )


def _check_sides(input: Tensor, weight: Tensor, padding: Sequence[int], dilation: Sequence[int]) -> None:
    """A kernel fits into the padded input, and the input has pixels."""
    _, _, height, width = input.shape
    _, _, kernel_h, kernel_w = shape = weight.shape
    spare_h = height + 2 * padding[0] - dilation[0] * (kernel_h - 1) - 1
    spare_w = width + 2 * padding[1] - dilation[1] * (kernel_w - 1) - 1
    for fits in (spare_h >= 0, spare_w >= 0):
        if fits is not True:
            _must(
                fits,
                f"weight of shape {list(shape)} with dilation {list(dilation)} is a kernel larger than the "
                f"padded input: input has shape {list(input.shape)}, padding is {list(padding)}",
            )
    for some in (height > 0, width > 0):
        if some is not True:
            _must(
                some, f"input must have a height and a width of at least 1, but has shape {list(input.shape)}"
            )


# A chain's own arguments, by name: check(name, value, shape of the conv's output, input).
Check = Callable[[str, Any, Shape, Tensor], None]


def _check_per_channel(name: str, vector: Tensor | None, shape: Shape, input: Tensor) -> None:
    if vector is None:
        return
    if vector.dtype not in (input.dtype, torch.float32) or vector.device != input.device:
        raise _wrong_kin(name, vector, input, or_float32=True)
    if vector.shape != (shape[1],):
        raise RuntimeError(f"{name} must have shape [{shape[1]}], but has shape {list(vector.shape)}")


def _check_broadcast(name: str, tensor: Tensor, shape: Shape, input: Tensor) -> None:
    if tensor.dtype not in (input.dtype, torch.float32) or tensor.device != input.device:
        raise _wrong_kin(name, tensor, input, or_float32=True)
    channels, given = shape[1], tensor.shape
    if (
        given != (channels, 1, 1)
        and given != (1, channels, 1, 1)
        and (tensor.numel() != 1 or tensor.dim() > 4)
    ):
        raise RuntimeError(
            f"{name} must have one value, or one a channel as shape [{channels}, 1, 1], but has shape "
            f"{list(given)}"
        )


def _check_num_groups(name: str, groups: int, shape: Shape, input: Tensor) -> None:
    n, channels, height, width = shape
    if groups < 1 or channels % groups:
        raise RuntimeError(f"{name} must divide the {channels} channels, but is {groups}")
    # The order matters: a symbolic size is not looked at where the sizes before it settle the question.
    if channels == groups and height == 1 and width == 1 and n == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{[n, channels, height, width]}: with {name}={groups} each group has one element"
        )


def _check_pool_size(name: str, pool: Sequence[int], shape: Shape, input: Tensor) -> None:
    if len(pool) != 2 or pool[0] < 1 or pool[1] < 1:
        raise _wrong_pair(name, pool, 1)
    for window, size in zip(pool, shape[2:], strict=True):
        if (fits := window <= size) is not True:
            _must(fits, f"{name} must be at most the map's {shape[2]} x {shape[3]}, but is {list(pool)}")


CHECKS: dict[str, Check] = {
    "bias": _check_broadcast,
    "scale": _check_broadcast,
    "norm_weight": _check_per_channel,
    "norm_bias": _check_per_channel,
    "num_groups": _check_num_groups,
    "pool_size": _check_pool_size,
}
"""Arguments that are not named here (eps, clamp_min, clamp_max) may have any value that the schema admits."""


def check_output_dtype(asked: torch.dtype, natural: torch.dtype) -> None:
    """``output_dtype`` is the unfused chain's own or, unless that is float64, float32, as under autocast."""
    if asked is not natural and (asked is not torch.float32 or natural is torch.float64):
        words = "" if natural in (torch.float32, torch.float64) else " or torch.float32"
        raise RuntimeError(f"output_dtype must be {natural}{words} for these arguments, but is {asked}")
