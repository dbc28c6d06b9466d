"""Cases that may crash, or take all time and memory: convs of extreme geometry, large means and biases, subnormal values.

Each is plain data, which checks itself in whatever process it is sent to: see `child.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from chains_table import BY_NAME, Row, conv2d, draw_own, generator, randn
from child import IS_SANITIZED, peak_bytes
from cuda_conv import Call
from gradients import away_from_kinks, hold_gradients, with_leaves
from helpers import (
    GRADIENT_BOUNDS,
    assert_close,
    bound_of,
    double,
    exact_eager,
    flushing_denormals,
    look,
    outcome,
    relative_error,
    same_bits,
)

Pair = tuple[int, int]
Run = Callable[[Row, Call], Tensor]  # of a whole chain
Conv = Callable[[Call], Tensor]  # of the conv alone
WAYS = 12  # of so many errors the largest is hardly a lucky one
HALVES = (torch.float16, torch.bfloat16)
IN_DOUBLE = 2.0**-28  # of an error in float32, with a place to spare
# By so much a conv's output may differ from float64's, in the unit of its largest value.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def scaled(run: dict[str, Tensor], reference: dict[str, Tensor], digits: float) -> dict[str, Tensor]:
    """A run whose error is so many times as large."""
    return {name: right + (run[name].double() - right) * digits for name, right in reference.items()}


def norm_by_deviations(
    v: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """`F.group_norm`, rounded elsewhere."""
    groups = v.reshape(len(v), num_groups, -1, *v.shape[2:])
    deviations = groups - groups.mean((2, 3, 4), keepdim=True)
    variance = deviations.square().mean((2, 3, 4), keepdim=True)
    y: Tensor = (deviations / (variance + eps).sqrt()).flatten(1, 2)
    y = y if weight is None else y * weight[:, None, None]
    return y if bias is None else y + bias[:, None, None]


def check(case: ConvCase) -> None:
    case.check()


@dataclass(frozen=True, kw_only=True)
class ConvCase:
    chain: str
    dtype: torch.dtype
    size: Pair
    kernel: Pair
    batch: int = 1
    channels: Pair = (1, 1)  # of input and output
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    num_groups: int = 1
    pool: Pair = (1, 1)
    eps: float = 0.1
    has_bias: bool = True
    layout: torch.memory_format = torch.contiguous_format
    threads: int = 1
    seed: int = 0

    def check(self) -> None:
        raise NotImplementedError

    @property
    def row(self) -> Row:
        return BY_NAME[self.chain]

    def values(self, gen: torch.Generator, *shape: int) -> Tensor:
        """Of the input."""
        return randn(gen, *shape, dtype=torch.float64)

    def call(self) -> Call:
        gen = generator(self.seed)
        c_in, c_out = self.channels
        x = self.values(gen, self.batch, c_in, *self.size)
        fan_in = c_in // self.groups * math.prod(self.kernel)
        weight = randn(gen, c_out, c_in // self.groups, *self.kernel, dtype=torch.float64) / math.sqrt(fan_in)
        bias = randn(gen, c_out, dtype=torch.float64) if self.has_bias else None
        own = draw_own(
            self.row, c_out, gen, dtype=self.dtype, groups=self.num_groups, pool_size=self.pool, eps=self.eps
        )
        geometry = {n: getattr(self, n) for n in ("stride", "padding", "dilation", "groups")}
        call = Call(x, weight, bias, own, geometry).map(lambda t: t.to(self.dtype))
        return Call(call.x.contiguous(memory_format=self.layout), call.weight, call.bias, call.own, geometry)


def run(row: Row, call: Call) -> Tensor:
    return row.conv_op(call.x, call.weight, call.bias, call.own, **call.geometry)


# ---- extreme geometry ----


def conv_by_gather(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """A conv whose work is that of its outputs' taps, whatever the geometry: each tap gathers the values it meets."""
    places = []  # of an axis, [tap][output]
    for size, kernel, step, before, gap in zip(
        x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
    ):
        spare = size + 2 * before - gap * (kernel - 1) - 1
        if spare < 0:
            raise RuntimeError("the kernel is larger than the padded input")
        places.append(torch.arange(kernel)[:, None] * gap + torch.arange(spare // step + 1) * step - before)
    (rows, cols), (height, width) = places, x.shape[2:]
    exists = ((rows >= 0) & (rows < height))[..., None, None] & (cols >= 0) & (cols < width)
    met = x[:, :, rows.clamp(0, height - 1)][..., cols.clamp(0, width - 1)]  # [N, C, KH, OH, KW, OW]
    met = (
        torch.where(exists, met, 0)
        .transpose(3, 4)
        .flatten(4)
        .reshape(len(x), groups, -1, exists[0, :, 0].numel())
    )
    v = weight.reshape(groups, len(weight) // groups, -1) @ met
    v = v.reshape(len(x), len(weight), rows.shape[1], cols.shape[1])
    return v if bias is None else v + bias[:, None, None]


def v_by_gather(call: Call) -> Tensor:
    """In half precision it is computed in float32 and rounded once."""
    wide = call.map(Tensor.float) if call.x.dtype in HALVES else call
    geometry: dict[str, Any] = wide.geometry
    return conv_by_gather(wide.x, wide.weight, wide.bias, **geometry).to(call.x.dtype)


def v_by_eager(call: Call) -> Tensor:
    return conv2d(call.x, call.weight, call.bias, **call.geometry)


def bounded(what: str, call: Call, outputs: int, compute: Callable[[], Any]) -> Any:
    """What ``compute`` gives. Its memory and time are bounded by its tensors', however far a kernel reaches."""
    result: Any = None
    seconds = 0.0

    def measured() -> None:
        nonlocal result, seconds
        start = time.process_time()
        result = compute()
        seconds = time.process_time() - start

    peak = peak_bytes(measured)
    tensors = (call.x.numel() + call.weight.numel() + outputs) * call.x.element_size()
    assert peak <= 2**26 + 16 * tensors, f"{what} takes {peak} bytes, its tensors have {tensors}"
    assert seconds <= 2 or IS_SANITIZED, f"{what} takes {seconds:.1f} s"
    return result


def gradients(run: Run, row: Row, call: Call, direction: Tensor) -> dict[str, Tensor]:
    call, leaves = with_leaves(call, None)
    y = run(row, call)
    of_input, *others = torch.autograd.grad(y, list(leaves.values()), direction.to(y.dtype))
    # Those of parameters are sums whose terms may cancel: of a conv's bias, or of the only weight of a channel, a norm
    # leaves nothing but rounding. So they are held together, over the norm of all.
    return {"input": of_input, "parameters": torch.cat([gradient.flatten() for gradient in others])}


def smooth_direction(row: Row, call: Call, v: Tensor) -> Tensor:
    """A random gradient of the output, with zeros where a rounded ``v`` may fall on another side of a kink."""
    keep = away_from_kinks(row, v, double(call.own), ROUNDING[call.x.dtype] * max(1.0, float(v.abs().max())))
    return torch.where(keep, randn(generator("direction"), *keep.shape), 0).to(call.x.dtype)


@dataclass(frozen=True)
class Standard:
    """The unfused chain behind ``conv``, against which ours is held. ``direction``: of the output's gradient, if there is
    one; else the result is held."""

    row: Row
    call: Call
    conv: Conv
    direction: Tensor | None = None

    def of(self, conv: Conv, call: Call) -> dict[str, Tensor]:
        def plain(row: Row, call: Call) -> Tensor:
            return row.plain_chain(conv(call), call.own)

        if self.direction is None:
            return {"y": plain(self.row, call)}
        return gradients(plain, self.row, call, self.direction)

    def hold(self, ours: dict[str, Tensor]) -> None:
        """Behind a norm of few values, or of values that lie close together, eager's own error is one of chance: there it
        is the worst of what eager has were each error of its conv another pixel's, or v's gradient rounded one way."""
        # as eager's group norm loses digits otherwise
        in_double = self.call.map(lambda t: t.double().contiguous())
        reference = self.of(self.conv, in_double)
        eager = self.call.map(exact_eager)
        others = [self.of(self.conv, eager)]
        if self.is_double:  # the reference has an error of its own: eager's shows from its error in float32
            others = [scaled(run, reference, IN_DOUBLE) for run in others]
        try:
            self.compare(ours, reference, others)
        except AssertionError:
            # Behind such a conv an exact chain and eager's. Float64's is exact; float32's would saturate earlier.
            chains = [in_double] if self.is_double else [in_double, eager]
            others += [self.of(self.other_luck(way), chain) for way in range(WAYS) for chain in chains]
            if self.is_double:
                with patch("torch.nn.functional.group_norm", norm_by_deviations):
                    others.append(self.of(self.conv, in_double))
            if self.direction is not None and self.row.has_norm:
                others.append(self.rounded_one_way(in_double, reference))
            self.compare(ours, reference, others)

    @property
    def is_double(self) -> bool:
        return self.call.x.dtype is torch.float64

    @property
    def half_place(self) -> float:
        """By so much of itself a value is rounded at the most."""
        return torch.finfo(self.call.x.dtype).eps / 2

    def other_luck(self, way: int) -> Conv:
        """The conv with eager's errors, as they are (way 0), or each another pixel's, up or down; and its gradient, each
        value up or down by half of its last place."""
        gen = generator(way)
        with torch.no_grad():
            right = self.conv(self.call.map(Tensor.double))
            errors = self.conv(self.call.map(exact_eager)).double() - right
            if way > 0:
                of_channels = errors.transpose(0, 1)
                order = torch.randperm(of_channels[0].numel(), generator=gen)
                errors = of_channels.flatten(1)[:, order].view_as(of_channels).transpose(0, 1)
                errors = errors * (1 - 2 * torch.randint(2, errors.shape, generator=gen))
            other = right + errors * (IN_DOUBLE if self.is_double else 1.0)
            turns = self.half_place * (1 - 2 * torch.randint(2, errors.shape, generator=gen))

        def conv(call: Call) -> Tensor:
            v = self.conv(call)
            if v.requires_grad:
                v.register_hook(lambda gradient: (gradient * (1 + turns)).to(v.dtype))  # type: ignore[no-untyped-call]
            return v + (other.to(v.dtype) - v).detach()

        return conv

    def rounded_one_way(self, in_double: Call, reference: dict[str, Tensor]) -> dict[str, Tensor]:
        """The reference, were each value of v's gradient rounded by half of its last place, and its products with weights
        and input all to the same side: where a norm's gradient is mostly one value, all of it is rounded alike. So
        are the terms of a parameter's sum, as large as where the output's gradient has one sign."""
        of_v: list[Tensor] = []

        def conv(call: Call) -> Tensor:
            v = self.conv(call)
            v.register_hook(of_v.append)  # type: ignore[no-untyped-call]
            return v

        self.of(conv, in_double)
        call, leaves = with_leaves(in_double.map(Tensor.abs), None)
        of_input, *others = torch.autograd.grad(
            self.conv(call), list(leaves.values()), self.half_place * of_v[0].abs(), materialize_grads=True
        )
        assert self.direction is not None
        of_one_sign = replace(self, direction=self.direction.abs()).of(self.conv, in_double)["parameters"]
        of_parameters = (
            torch.cat([gradient.flatten() for gradient in others]) + self.half_place * of_one_sign.abs()
        )
        return {
            "input": reference["input"] + of_input,
            "parameters": reference["parameters"] + of_parameters,
        }

    def compare(
        self, ours: dict[str, Tensor], reference: dict[str, Tensor], others: list[dict[str, Tensor]]
    ) -> None:
        dtype = self.call.x.dtype
        if self.direction is not None:
            hold_gradients(ours, reference, others, GRADIENT_BOUNDS[dtype], "input")
            return
        y = reference["y"]
        worst = max((some["y"] for some in others), key=lambda t: relative_error(t, y))
        # A reference in float64 is off itself by as much as eager in float64 is.
        own = relative_error(worst, y) if dtype is torch.float64 else 0.0
        assert_close(ours["y"], y, worst, max(bound_of(dtype), 3 * own))


@dataclass(frozen=True, kw_only=True)
class ExtremeGeometry(ConvCase):
    """Right, or an error where eager has one; in time and memory that follow from the tensors."""

    wants_gradients: bool = False

    def check(self) -> None:
        torch.set_num_threads(self.threads)
        row, call = self.row, self.call()
        in_double = call.map(Tensor.double)
        v = outcome(lambda: v_by_gather(in_double))
        reference = outcome(lambda: row.plain_chain(v, in_double.own)) if isinstance(v, Tensor) else v
        outputs = v.numel() if isinstance(v, Tensor) else 0
        y = bounded("the call", call, outputs, lambda: outcome(lambda: run(row, call)))
        with FakeTensorMode() as mode:
            fake = outcome(lambda: run(row, call.map(mode.from_tensor)))
        assert look(fake) == look(y), f"the fake operator gives {fake}, the real one {y}"
        if not isinstance(y, Tensor):
            assert not isinstance(reference, Tensor), f"what eager takes is refused: {y}"
            return
        assert isinstance(v, Tensor), f"what eager refuses is taken: {v}"
        assert isinstance(reference, Tensor), f"what eager refuses is taken: {reference}"
        Standard(row, call, v_by_gather).hold({"y": y})
        if self.wants_gradients:
            direction = smooth_direction(row, call, v)
            found = bounded("backward", call, outputs, lambda: gradients(run, row, call, direction))
            Standard(row, call, v_by_gather, direction).hold(found)


# ---- large means and biases ----


@dataclass(frozen=True, kw_only=True)
class LargeMean(ConvCase):
    """As exact as eager, whatever the values lie around."""

    mean: float = 0.0
    deviation: float = 1.0
    factor: float = 1.0  # of the input
    bias_factor: float = 1.0
    wants_gradients: bool = False

    def values(self, gen: torch.Generator, *shape: int) -> Tensor:
        return self.factor * (self.mean + self.deviation * super().values(gen, *shape))

    def check(self) -> None:
        torch.set_num_threads(self.threads)
        row, call = self.row, self.call()
        bias = None if call.bias is None else self.bias_factor * call.bias
        call = Call(call.x, call.weight, bias, call.own, call.geometry)
        Standard(row, call, v_by_eager).hold({"y": run(row, call)})
        if self.wants_gradients:
            direction = smooth_direction(row, call, v_by_eager(call.map(Tensor.double)))
            Standard(row, call, v_by_eager, direction).hold(gradients(run, row, call, direction))


# ---- subnormal values ----


@dataclass(frozen=True, kw_only=True)
class FlushedDenormals(ConvCase):
    """`torch.set_flush_denormal(True)` changes what it changes for eager, whoever computes."""

    has_conv: bool = True
    exponents: Pair = (0, 0)  # decimal, from and to

    def values(self, gen: torch.Generator, *shape: int) -> Tensor:
        low, high = self.exponents
        exponent = low + (high - low) * torch.rand(shape, generator=gen, dtype=torch.float64)
        return super().values(gen, *shape) * 10.0**exponent

    def check(self) -> None:
        row, call = self.row, self.call()
        runs: list[Callable[[], Tensor]]
        if self.has_conv:
            ordered = call.map(Tensor.contiguous)  # as our call may hand it to PyTorch's conv
            runs = [
                lambda: run(row, call),
                lambda: row.plain_chain(v_by_eager(call), call.own),
                lambda: row.plain_chain(v_by_eager(ordered), call.own),
            ]
        else:
            v = self.values(generator(self.seed), self.batch, self.channels[1], *self.size).to(self.dtype)
            runs = [lambda: row.chain_op(v, call.own), lambda: row.plain_chain(v, call.own)]
        found = []
        for flushes, threads in ((False, 1), (True, 1), (True, 2)):
            torch.set_num_threads(threads)
            with flushing_denormals(flushes):
                found.append([each() for each in runs])
        (quiet, eager_quiet, *_), (flushed, eager_flushed, *_), _ = found
        # PyTorch's own threads do not have the caller's mode
        (are_same, *eager_are_same) = [same_bits(one, two) for one, two in zip(*found[1:], strict=True)]
        assert are_same or not all(eager_are_same), "bits differ between threads"
        unchanged = eager_flushed == eager_quiet
        info = torch.finfo(torch.float16 if self.dtype is torch.float16 else torch.float32)
        least = info.smallest_normal * (info.eps if self.dtype is torch.float16 else 1.0)
        allowed = 4 * (torch.finfo(self.dtype).eps * quiet.double().abs() + least)
        error = torch.where(unchanged, (flushed.double() - quiet.double()).abs() - allowed, 0.0)
        place = int(error.argmax())
        assert error.max() <= 0, f"{quiet.flatten()[place]} becomes {flushed.flatten()[place]}, eager's stays"
