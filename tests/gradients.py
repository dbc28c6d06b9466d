"""Gradients against float64: of a chain on a given tensor, and of a conv with its chain. On any device."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import math
import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chains_table import Own, Row, generator, map_tensors, randn
from cuda_conv import BF16, FP16, IEEE, TF32, Call, Mode, plain, poisoned, to_tf32
from fusedconv import _C
from helpers import GRADIENT_BOUNDS, double, exact_eager

Run = Callable[[Tensor, Own], Tensor]

# One product of TF32 precision rounds both factors to 11 bits, by up to 2.4e-4 each: the conv's output and then the
# conv's gradient have it.
CONV_BOUNDS = {
    IEEE: GRADIENT_BOUNDS[torch.float32],
    TF32: 1e-3,
    BF16: GRADIENT_BOUNDS[torch.bfloat16],
    FP16: GRADIENT_BOUNDS[torch.float16],
}
# By so much a conv's output may differ from float64's, in its own unit of about one.
ROUNDING = {IEEE: 1e-5, TF32: 1e-2, BF16: 5e-2, FP16: 1e-2}


def gradients(run: Run, v: Tensor, own: Own, direction: Tensor) -> dict[str, Tensor]:
    """Gradients of v and of all parameters, by name."""
    leaf = v.detach().requires_grad_()
    own = map_tensors(own, lambda t: t.detach().requires_grad_())
    leaves = {"v": leaf} | {name: t for name, t in own.items() if isinstance(t, Tensor)}
    y = run(leaf, own)
    found = torch.autograd.grad(y, list(leaves.values()), direction.to(y.device, y.dtype))
    return dict(zip(leaves, found, strict=True))


def hold_gradients(
    ours: dict[str, Tensor],
    reference: dict[str, Tensor],
    eager: Sequence[dict[str, Tensor]],
    bound: float,
    image: str,
    what: object = "",
    times: float = 2,
) -> None:
    """Each within the bound or, if that is larger, so many ``times`` eager's own error, the largest of its runs'.
    All are over the gradient's norm or, if that is larger, 1e-3 of the largest parameter gradient's. ``image``: the
    one that is no parameter's."""
    largest = max([float(g.norm()) for name, g in reference.items() if name != image], default=0.0)
    for name, got in ours.items():
        right = reference[name]
        assert got.shape == right.shape
        size = max(float(right.norm()), 1e-3 * largest, 1e-300)

        def error_of(gradient: Tensor, right: Tensor = right, size: float = size) -> float:
            return float((gradient.to(right.device).double() - right).norm()) / size

        allowed = max([bound, *[times * error_of(run[name]) for run in eager]])
        error = error_of(got)
        assert error <= allowed, f"gradient of {name}: {error:.2e}, allowed {allowed:.2e} {what}"


def check_gradients(
    row: Row, v: Tensor, own: Own, seed: object = 0, *, as_eager: bool = True
) -> dict[str, Tensor]:
    """Holds the chain's gradients against float64; ``as_eager``: or twice eager's own error, if that is larger."""
    with torch.no_grad():
        shape = row.plain_chain(v, own).shape
    direction = randn(generator(seed), *shape, dtype=v.dtype).double()  # the same one for all
    ours = gradients(row.chain_op, v, own, direction)
    values = v.detach().contiguous()
    reference = gradients(row.plain_chain, values.double(), double(own), direction)
    eager = gradients(row.plain_chain, exact_eager(values), map_tensors(own, exact_eager), direction)
    if v.dtype == torch.float64:  # the reference has its own error: eager's shows from that in float32
        eager = {name: right + (eager[name] - right) * 2.0**-28 for name, right in reference.items()}
    hold_gradients(
        ours, reference, [eager] if as_eager else [], GRADIENT_BOUNDS[v.dtype], "v", f"{row.chain} {v.shape}"
    )
    for name, gradient in ours.items():
        assert gradient.dtype == (v if name == "v" else own[name]).dtype
    assert ours["v"].stride() == torch.empty_like(v).stride()
    return ours


# ---- with the conv -------------------------------------------------------------------------------


def away_from_kinks(row: Row, v: Tensor, own: Own, distance: float) -> Tensor:
    """Where the output's gradient goes the same way for any v that is as near: neither a kink, nor a bound, nor another
    winner of a window lies between. There, and only there, can a rounded v be held against float64."""
    if "relu" in row.chain:
        return (v.abs() > distance) & ((v - 3).abs() > distance)
    if not row.has_pool:
        with torch.no_grad():
            return torch.ones_like(row.plain_chain(v, own), dtype=torch.bool)
    window = own["pool_size"]
    normed = own["scale"] * F.group_norm(
        v, own["num_groups"], own["norm_weight"], own["norm_bias"], own["eps"]
    )
    slope = normed.std((2, 3)) / v.std((2, 3)).clamp_min(1e-12)
    n, c, height, width = normed.shape
    windows = F.unfold(normed.reshape(n * c, 1, height, width), window, stride=window)
    best = windows.topk(min(2, windows.shape[1]), dim=1).values
    near = distance * slope.nan_to_num(0.0).reshape(n * c, 1)
    keep = best[:, 0] - best[:, -1] > near if best.shape[1] > 1 else torch.ones_like(best[:, 0]) > 0
    for bound in (own["clamp_min"], own["clamp_max"]):
        if bound is not None:
            keep &= (best[:, 0] - bound).abs() > near
    return keep.reshape(n, c, height // window[0], width // window[1])


def named(call: Call) -> dict[str, Tensor]:
    """The tensors of a call by name."""
    bias = {} if call.bias is None else {"conv_bias": call.bias}
    own = {name: t for name, t in call.own.items() if isinstance(t, Tensor)}
    return {"input": call.x, "weight": call.weight, **bias, **own}


def with_leaves(call: Call, wanted: Collection[str] | None) -> tuple[Call, dict[str, Tensor]]:
    """The call on leaves; those that are ``wanted``, or all, by name."""
    leaves = {name: t.detach().clone(memory_format=torch.preserve_format) for name, t in named(call).items()}
    chosen = {name: t.requires_grad_() for name, t in leaves.items() if wanted is None or name in wanted}
    own = {name: leaves.get(name, value) for name, value in call.own.items()}
    return Call(leaves["input"], leaves["weight"], leaves.get("conv_bias"), own, call.geometry), chosen


def conv_gradients(
    row: Row, call: Call, mode: Mode, direction: Tensor, wanted: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Ours, in poisoned memory."""
    call, leaves = with_leaves(call, wanted)
    with poisoned():
        y = row.conv_op(call.x, call.weight, call.bias, call.own, precision=mode.precision, **call.geometry)
        found = torch.autograd.grad(y, list(leaves.values()), direction.to(y.device, y.dtype))
    return dict(zip(leaves, found, strict=True))


def plain_gradients(
    row: Row, call: Call, direction: Tensor, wanted: Collection[str] | None = None
) -> dict[str, Tensor]:
    """The unfused chain's, by PyTorch's own conv, which is exact on any device."""
    call, leaves = with_leaves(call, wanted)
    with torch.backends.cudnn.flags(enabled=False):
        y = row.plain_conv(call.x, call.weight, call.bias, call.own, **call.geometry)
        found = torch.autograd.grad(y, list(leaves.values()), direction.to(y.dtype))
    return dict(zip(leaves, found, strict=True))


def on_cpu_in_every_order(
    row: Row, call: Call, direction: Tensor, wanted: Collection[str] | None
) -> list[dict[str, Tensor]]:
    """Eager's gradients by both convs that PyTorch has on the CPU, the input's channels in order and the other way round:
    v is rounded in as many ways, and behind a norm of values that lie close together that is most of the error."""
    runs = []
    reversed_call = replace(call, x=call.x.flip(1), weight=call.weight.flip(1))
    for has_onednn in (True, False):
        with torch.backends.mkldnn.flags(enabled=has_onednn):
            runs.append(plain_gradients(row, call, direction, wanted))
            found = plain_gradients(row, reversed_call, direction, wanted)
        runs.append({name: g.flip(1) if name in ("input", "weight") else g for name, g in found.items()})
    return runs


def smooth_direction(row: Row, call: Call, mode: Mode, seed: object = 0) -> Tensor:
    """A random gradient of the output, with zeros near kinks."""
    exact = call.map(Tensor.double)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=False):
        geometry: dict[str, Any] = exact.geometry
        v = F.conv2d(exact.x, exact.weight, exact.bias, **geometry)
        keep = away_from_kinks(row, v, exact.own, ROUNDING[mode] * max(1.0, float(v.std())))
        shape = plain(row, exact).shape
    direction = randn(generator(seed, "direction"), *shape, dtype=mode.dtype).to(call.x.device)
    return torch.where(keep, direction, 0).double()


def as_tf32_takes_it(call: Call) -> Call:
    return replace(call, x=to_tf32(call.x), weight=to_tf32(call.weight))


def times_of_eagers(device: str) -> float:
    """How much larger than eager's our error may be. An x86 CPU without FMA, where only tests run our gradients of the
    conv, rounds each product too: twice the roundings, which add up as their root. Eager has FMA if the machine does."""
    without_fma = _C.cpu_isa() == "baseline" and platform.machine() in ("x86_64", "AMD64")
    return 2 * math.sqrt(2) if device == "cpu" and without_fma else 2


def check_conv_gradients(
    row: Row,
    call: Call,
    mode: Mode,
    *,
    layout: torch.memory_format = torch.contiguous_format,
    wanted: Collection[str] | None = None,
    device: str = "cuda",
    what: object = "",
    times: float = 1,
) -> dict[str, Tensor]:
    """Holds gradients on ``device`` against float64, which is computed where the call's tensors are. ``times`` the
    usual share of eager's error is allowed."""
    direction = smooth_direction(row, call, mode)
    there = call.map(lambda t: t.to(device))
    x = there.x.contiguous(memory_format=layout)
    there = Call(x, there.weight, there.bias, there.own, there.geometry)
    ours = conv_gradients(row, there, mode, direction, wanted)
    reference = plain_gradients(row, call.map(Tensor.double), direction, wanted)
    rounded = as_tf32_takes_it(call) if mode is TF32 else call
    if rounded.x.is_cuda:
        eager = [plain_gradients(row, rounded, direction, wanted)]
    else:
        eager = on_cpu_in_every_order(row, rounded, direction, wanted)
    what = f"{row.conv} {mode} {tuple(call.x.shape)} {what}"
    hold_gradients(ours, reference, eager, CONV_BOUNDS[mode], "input", what, times * times_of_eagers(device))
    for name, gradient in ours.items():
        argument = named(there)[name]
        assert gradient.dtype == argument.dtype
        assert gradient.stride() == torch.empty_like(argument).stride(), name
        assert math.isfinite(float(gradient.double().norm()))
    return ours
