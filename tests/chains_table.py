"""One row per chain: everything that the tests know about it.

A row is written in stock PyTorch and independently of `fusedconv.chains`. A further chain costs one more
`Row` in `ROWS` and gets every test. Everything else here is keyed by the argument's NAME: how it is drawn,
which part of a module holds it, which keyword of the constructor it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedconv

Own = dict[str, Any]  # a chain's own arguments, by name


def as_pairs(own: Own) -> Own:
    """`torch.ops` takes lists only where the modules and functions also take one number for both sides."""
    sizes = ("pool_size", "stride", "padding", "dilation")
    return {name: [v, v] if name in sizes and isinstance(v, int) else v for name, v in own.items()}


@dataclass(frozen=True)
class Row:
    chain: str  # name of the operator without a conv
    arguments: tuple[str, ...]  # the chain's own arguments, in the order of the schema
    steps: Callable[
        [Tensor, Any], Tensor
    ]  # what follows the conv; the second argument holds parameters and `group_norm`
    module: str | None = None  # name of the fused module; None if the chain has no conv operator
    parts: tuple[str, ...] = ("conv",)  # submodules and parameters of the module in order of creation
    initial_ones: tuple[str, ...] = ()  # parameters that start as ones; the others start as randn
    keywords: Mapping[str, str | None] = field(
        default_factory=dict
    )  # argument -> constructor's keyword, where unusual
    reference: Mapping[str, Any] = field(default_factory=dict)  # the reference workload, but for batch 128

    @property
    def conv(self) -> str:
        """Name of the operator with a conv."""
        return "conv2d_" + self.chain

    @property
    def has_norm(self) -> bool:
        return "num_groups" in self.arguments

    @property
    def has_pool(self) -> bool:
        return "pool_size" in self.arguments

    def chain_op(self, v: Tensor, own: Own, **more: Any) -> Tensor:
        return cast(Tensor, getattr(torch.ops.fusedconv, self.chain)(v, **as_pairs(own), **more))

    def conv_op(self, x: Tensor, weight: Tensor, conv_bias: Tensor | None, own: Own, **more: Any) -> Tensor:
        op = getattr(torch.ops.fusedconv, self.conv)
        return cast(Tensor, op(x, weight, conv_bias, **as_pairs(own), **as_pairs(more)))

    def plain_chain(self, v: Tensor, own: Own) -> Tensor:
        """The unfused chain on a given tensor."""
        values = SimpleNamespace(**own)
        values.group_norm = lambda t: F.group_norm(
            t, own["num_groups"], own.get("norm_weight"), own.get("norm_bias"), own.get("eps", 1e-5)
        )
        return self.steps(v, values)

    def plain_conv(
        self, x: Tensor, weight: Tensor, conv_bias: Tensor | None, own: Own, **conv: Any
    ) -> Tensor:
        """The unfused chain with its conv."""
        return self.plain_chain(conv2d(x, weight, conv_bias, **conv), own)


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, **geometry: Any) -> Tensor:
    """PyTorch's. In half precision on the CPU it is wrong or crashes for some sizes of maps (oneDNN): in float32 there,
    rounded to what it would give."""
    tensors = [t for t in (x, weight, bias) if t is not None]
    half = x.dtype if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) else None
    if not half or not all(isinstance(t, Tensor) and t.is_cpu and t.dtype is half for t in tensors):
        return F.conv2d(x, weight, bias, **geometry)
    return F.conv2d(x.float(), weight.float(), None if bias is None else bias.float(), **geometry).to(half)


def clamp(v: Tensor, low: float | None, high: float | None) -> Tensor:
    return v if low is None and high is None else torch.clamp(v, low, high)


def hardswish(v: Tensor) -> Tensor:
    """F.hardswish multiplies float64 by a sixth in float32 on CUDA."""
    return v * torch.clamp(v + 3, 0, 6) / 6


ROWS = (
    Row(
        chain="relu_hardswish",
        arguments=(),
        steps=lambda v, m: F.relu(v) * torch.clamp((F.relu(v) + 3) / 6, 0, 1),
        module="ConvReLUHardswish",
        reference={"in_channels": 8, "out_channels": 64, "size": 128},
    ),
    Row(
        chain="bias_scale_sigmoid",
        arguments=("bias", "scale"),
        steps=lambda v, m: torch.sigmoid((v + m.bias) * m.scale),
    ),
    Row(
        chain="bias_scale_sigmoid_group_norm",
        arguments=("bias", "scale", "num_groups", "norm_weight", "norm_bias", "eps"),
        steps=lambda v, m: m.group_norm(torch.sigmoid((v + m.bias) * m.scale)),
        module="ConvBiasScaleSigmoidGroupNorm",
        parts=("conv", "bias", "scale", "group_norm"),
        keywords={"eps": None},
        reference={"in_channels": 8, "out_channels": 32, "size": 256, "num_groups": 8},
    ),
    Row(
        chain="group_norm_scale_max_pool_clamp",
        arguments=(
            "num_groups", "norm_weight", "norm_bias", "eps", "scale", "pool_size", "clamp_min", "clamp_max",
        ),
        steps=lambda v, m: clamp(
            F.max_pool2d(m.group_norm(v) * m.scale, m.pool_size), m.clamp_min, m.clamp_max
        ),
        module="ConvGroupNormScaleMaxPoolClamp",
        parts=("conv", "group_norm", "scale"),
        initial_ones=("scale",),
        keywords={"eps": None},
        reference={
            "in_channels": 8, "out_channels": 64, "size": 128, "num_groups": 16,
            "pool_size": 4, "clamp_min": 0.0, "clamp_max": 1.0,
        },
    ),
    Row(
        chain="group_norm_silu",
        arguments=("num_groups", "norm_weight", "norm_bias", "eps"),
        steps=lambda v, m: F.silu(m.group_norm(v)),
        module="ConvGroupNormSiLU",
        parts=("conv", "group_norm"),
        reference={"in_channels": 8, "out_channels": 64, "size": 128, "num_groups": 16},
    ),
    Row(
        chain="group_norm_tanh_hardswish_logsumexp",
        arguments=("num_groups", "norm_weight", "norm_bias", "eps"),
        steps=lambda v, m: torch.logsumexp(v + hardswish(torch.tanh(m.group_norm(v))), 1, keepdim=True),
        module="ConvGroupNormTanhHardswishLogSumExp",
        parts=("conv", "group_norm"),
        keywords={"num_groups": "groups"},
        reference={"in_channels": 8, "out_channels": 64, "size": 128, "num_groups": 16},
    ),
)  # fmt: skip

CONV_ROWS = tuple(row for row in ROWS if row.module is not None)
BY_NAME = {row.chain: row for row in ROWS}


# ---- drawing arguments, by name ------------------------------------------------------------------

OF_STAGES = ("bias", "scale")  # parameters that have a value a channel as [C, 1, 1], or one for all
OF_NORM = ("norm_weight", "norm_bias")  # as [C]


def generator(*seed: object) -> torch.Generator:
    """A generator whose stream depends on all of `seed`, the same in every process."""
    state = 0
    for byte in repr(seed).encode():
        state = (state * 131 + byte) % (2**31 - 1)
    return torch.Generator().manual_seed(state)


def randn(gen: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


def draw_own(
    row: Row,
    channels: int,
    gen: torch.Generator,
    *,
    dtype: torch.dtype = torch.float32,
    groups: int | None = None,
    **fixed: Any,
) -> Own:
    """Random values of the chain's own arguments: gammas and scales of either sign; `fixed` values win."""
    if groups is None:
        groups = next(g for g in (4, 3, 2, 7, 11, 1) if channels % g == 0)

    def draw(name: str) -> Any:
        if name in fixed:
            return fixed[name]
        if name in OF_STAGES:
            return randn(gen, channels, 1, 1, dtype=dtype)
        if name in OF_NORM:
            return randn(gen, channels, dtype=dtype)
        return {"num_groups": groups, "eps": 1e-5, "pool_size": 2, "clamp_min": -0.7, "clamp_max": 0.9}[name]

    return as_pairs({name: draw(name) for name in row.arguments})


def map_tensors(own: Own, change: Callable[[Tensor], Tensor]) -> Own:
    return {name: change(value) if isinstance(value, Tensor) else value for name, value in own.items()}


# ---- modules -------------------------------------------------------------------------------------


class Plain(nn.Module):
    """The unfused model of a row: stock modules and parameters, then the row's steps."""

    def __init__(
        self,
        row: Row,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        *,
        num_groups: int = 1,
        eps: float = 1e-5,
        pool_size: int | tuple[int, int] = 2,
        clamp_min: float | None = None,
        clamp_max: float | None = None,
        conv_groups: int = 1,
        **conv: Any,
    ) -> None:
        super().__init__()
        self.steps = row.steps
        self.pool_size, self.clamp_min, self.clamp_max = pool_size, clamp_min, clamp_max
        place = {name: conv[name] for name in ("device", "dtype") if name in conv}
        for part in row.parts:
            if part == "conv":
                self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, groups=conv_groups, **conv)
            elif part == "group_norm":
                self.group_norm = nn.GroupNorm(num_groups, out_channels, eps=eps, **place)
            else:
                make = torch.ones if part in row.initial_ones else torch.randn
                setattr(self, part, nn.Parameter(make(out_channels, 1, 1, **place)))

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(self.conv(x), self)


def module_arguments(row: Row, channels: int, groups: int | None = None) -> Own:
    """What the constructors take apart from the conv's own keywords, under the names of `Plain`."""
    own = draw_own(row, channels, generator(row.chain), groups=groups)
    own |= {"pool_size": tuple(own["pool_size"])} if row.has_pool else {}
    return {n: v for n, v in own.items() if n in ("num_groups", "eps", "pool_size", "clamp_min", "clamp_max")}


def fused_keywords(row: Row, channels: int, own: Own) -> Own:
    """The same under the names of the fused module's constructor."""
    names = {"pool_size": "maxpool_kernel_size", **row.keywords}
    keywords = {names.get(name, name): value for name, value in own.items()}
    keywords |= {f"{part}_shape": (channels, 1, 1) for part in row.parts if part in OF_STAGES}
    return {keyword: value for keyword, value in keywords.items() if keyword is not None}


def modules(
    row: Row,
    in_channels: int = 3,
    out_channels: int = 8,
    kernel_size: int | tuple[int, int] = 3,
    *,
    groups: int | None = None,
    seed: int = 0,
    **conv: Any,
) -> tuple[nn.Module, Plain]:
    """A fused module and the plain model of the same weights, with affine parameters of either sign."""
    own = module_arguments(row, out_channels, groups)
    assert row.module is not None
    torch.manual_seed(seed)
    kind = getattr(fusedconv, row.module)
    fused: nn.Module = kind(
        in_channels, out_channels, kernel_size, **fused_keywords(row, out_channels, own), **conv
    )
    torch.manual_seed(seed)
    plain = Plain(row, in_channels, out_channels, kernel_size, **own, **conv)
    with torch.no_grad():
        gen = generator(seed, row.chain)
        for name, parameter in plain.named_parameters():
            if not name.startswith("conv."):
                parameter.copy_(randn(gen, *parameter.shape))
    fused.load_state_dict(plain.state_dict(), strict=True)
    return fused, plain


def reference_models(row: Row) -> tuple[nn.Module, Plain, Tensor]:
    """The reference workload's fused and plain model, and one sample."""
    arguments = dict(row.reference)
    c_in, c_out, size = (arguments.pop(name) for name in ("in_channels", "out_channels", "size"))
    assert row.module
    fused = getattr(fusedconv, row.module)(c_in, c_out, 3, **fused_keywords(row, c_out, arguments))
    plain = Plain(row, c_in, c_out, 3, **arguments)
    plain.load_state_dict(fused.state_dict())
    return fused, plain, torch.rand(1, c_in, size, size)


def to_channels_last(module: nn.Module) -> nn.Module:
    return cast(nn.Module, cast(Any, module).to(memory_format=torch.channels_last))


def module_input(batch: int = 2, channels: int = 3, size: int = 11, seed: int = 0, **how: Any) -> Tensor:
    return randn(generator("input", seed), batch, channels, size, size + 2).to(**how)
