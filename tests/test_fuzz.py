"""Hypothesis: calls of any kind, right and wrong, end in a result like eager's, or in an error that names an argument.

The real and the fake operator agree on which, and so do the function, the operator and the one that records a gradient.
Cases that may crash run in a child. `HYPOTHESIS_PROFILE=fuzz` draws 30,000 cases, 20,000 of them there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import event, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedconv.functional
from chains_table import (
    CONV_ROWS,
    Own,
    Plain,
    Row,
    as_pairs,
    conv2d,
    fused_keywords,
    generator,
    map_tensors,
    module_arguments,
    randn,
)
from child import Child
from extremes import ConvCase, ExtremeGeometry, FlushedDenormals, LargeMean, check
from helpers import (
    Failure,
    assert_close,
    bound_of,
    double,
    exact_eager,
    look,
    outcome,
    relative_error,
    same_bits,
)
from strategies import chain_calls, conv_calls, extreme_geometries, flushed_denormals, large_means

Change = Callable[[Tensor], Tensor]

SHARE = settings().max_examples  # of the profile; a thirtieth of all the cases


@dataclass(frozen=True)
class Call:
    row: Row
    has_conv: bool
    arguments: Own  # all of the operator's, by name
    spoiled: str = ""  # the argument that is no longer what it was

    @property
    def name(self) -> str:
        return self.row.conv if self.has_conv else self.row.chain

    def op(self, arguments: Own) -> Tensor:
        y: Tensor = getattr(torch.ops.fusedconv, self.name)(**as_pairs(arguments))
        return y

    def function(self, arguments: Own) -> Tensor:
        y: Tensor = getattr(fusedconv.functional, self.name)(**arguments)
        return y

    def plain(self, change: Change) -> Tensor:
        """The unfused chain, all of whose tensors are changed so first."""
        given = map_tensors(self.arguments, change)
        own = {name: given[name] for name in self.row.arguments}
        if not self.has_conv:
            return self.row.plain_chain(given["input"], own)
        conv = {name: given[name] for name in GEOMETRY}
        return self.row.plain_conv(given["input"], given["weight"], given["conv_bias"], own, **conv)

    def __repr__(self) -> str:
        def show(value: Any) -> Any:
            if isinstance(value, Tensor) and value.layout is torch.strided:
                return tuple(value.shape), value.stride(), value.dtype
            return value

        shown = {name: show(value) for name, value in self.arguments.items()}
        return f"{self.name} {shown} spoiled: {self.spoiled or 'nothing'}"


GEOMETRY = ("stride", "padding", "dilation", "groups")
PRECISIONS = st.sampled_from([None, None, None, "default", "ieee", "tf32"])


@st.composite
def good_calls(draw: st.DrawFn) -> Call:
    precision = {"precision": draw(PRECISIONS)}
    if draw(st.booleans()):
        drawn = draw(conv_calls(least_batch=0))
        tensors = {"input": drawn["x"], "weight": drawn["weight"], "conv_bias": drawn["bias"]}
        return Call(drawn["row"], True, {**tensors, **drawn["own"], **drawn["conv"], **precision})
    row, v, own = draw(chain_calls(least_batch=0))
    return Call(row, False, {"input": v, **own, **precision})


# ---- spoiling an argument ----

ODD_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64,
)  # fmt: skip
ODD_NUMBERS = (-(2**63), -(2**31), -3, -1, 0, 1, 2, 3, 5, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 1.5, "2")
ODD_FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 10.0, 1e300, 3, None, "1")
ODD_VALUES = (0.0, math.nan, math.inf, -math.inf, 1e30, 1e4, -1e4, 1e-30)


@st.composite
def odd_tensors(draw: st.DrawFn, name: str, t: Tensor) -> Any:
    """A tensor of another dtype, shape, place or content; or none."""
    dim = draw(st.integers(0, max(t.dim() - 1, 0)))
    dtype, value = draw(st.sampled_from(ODD_DTYPES)), draw(st.sampled_from(ODD_VALUES))
    if name in ("norm_weight", "scale") and math.isinf(value):
        value = math.nan  # where an infinite factor meets the mean is a backend's own affair

    def with_value(t: Tensor) -> Tensor:
        place = draw(st.integers(0, max(t.numel() - 1, 0)))
        return torch.where(torch.arange(t.numel()).view(t.shape) == place, torch.tensor(value).to(t.dtype), t)

    changes: list[Callable[[Tensor], Any]] = [
        with_value, with_value, lambda t: torch.tensor(value).to(t.dtype).expand(t.shape),
        lambda t: t.to(dtype), lambda t: t.to(dtype), lambda t: t.to("meta"), lambda t: t.to_sparse(),
        lambda t: t[None], lambda t: t.sum(), lambda t: None, lambda t: t.tolist(),
    ]  # fmt: skip
    if t.dim():
        changes += [
            lambda t: t.select(dim, 0) if t.shape[dim] else t,
            lambda t: t.narrow(dim, 0, 0),
            lambda t: t.narrow(dim, 0, max(t.shape[dim] - 1, 0)),
            lambda t: torch.cat([t, t], dim),
            lambda t: t.transpose(dim, 0),
        ]
    return draw(st.sampled_from(changes))(t)


def odd(name: str, value: Any) -> st.SearchStrategy[Any]:
    """What may stand in the place of an argument's value."""
    if isinstance(value, Tensor):
        return odd_tensors(name, value)
    if name in ("conv_bias", "norm_weight", "norm_bias"):
        return st.sampled_from([torch.ones(3), torch.ones(()), 1.0])
    if name == "precision":
        return st.sampled_from(["", "tf64", "IEEE", 3])
    if name == "eps":
        return st.sampled_from(ODD_FLOATS)
    if name in (
        "clamp_min",
        "clamp_max",
    ):  # what a single bound of NaN does has changed between PyTorch's releases
        return st.sampled_from([value for value in ODD_FLOATS if value is not ODD_FLOATS[0]])
    number = st.sampled_from(ODD_NUMBERS)
    if name in ("num_groups", "groups"):
        return number
    return st.one_of(number, st.lists(number, max_size=3), st.tuples(st.just(value[0]), number))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    call = draw(good_calls())
    if draw(st.booleans()):
        return call
    name = draw(st.sampled_from(sorted(call.arguments)))
    value = draw(odd(name, call.arguments[name]))
    return Call(call.row, call.has_conv, {**call.arguments, name: value}, spoiled=name)


# ---- what comes of a call ----


def wants_gradient(value: Any) -> Any:
    is_leaf = isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided
    return value.clone().requires_grad_() if is_leaf else value


def with_one_affine_dtype(call: Call) -> Call:
    """PyTorch's group norm wants its weight and its bias alike."""
    affine = {n: v.float() for n, v in call.arguments.items() if n.startswith("norm_") and v is not None}
    return Call(call.row, call.has_conv, {**call.arguments, **affine}, call.spoiled)


def eager_result(call: Call) -> Tensor:
    """Eager's own, or, where it has a limit that we have not, the nearest that it takes."""
    results = [
        outcome(lambda: call.plain(exact_eager)),
        outcome(lambda: with_one_affine_dtype(call).plain(exact_eager)),
        outcome(lambda: call.plain(lambda t: t.double().contiguous())),
    ]
    for result in results:
        if isinstance(result, Tensor):
            return result
        limit = re.search("mixed dtype|expected scalar type|without overflow", result[1])
        assert limit, f"eager refuses what we take: {result}"
    raise AssertionError("eager refuses it in any dtype")


def on_rounded_v(call: Call) -> list[Tensor]:
    """Where PyTorch's conv rounds its output to half precision: the exact chain of that, which no two steps can better.
    Of few values eager's own error may be smaller by chance."""
    if not call.has_conv or call.arguments["input"].dtype not in (torch.float16, torch.bfloat16):
        return []
    given = map_tensors(call.arguments, torch.Tensor.contiguous)
    geometry = {name: given[name] for name in GEOMETRY}
    v = conv2d(given["input"], given["weight"], given["conv_bias"], **geometry)
    own = {name: given[name] for name in call.row.arguments}
    return [call.row.plain_chain(v.double(), double(own))]


def check_result(y: Tensor, call: Call) -> None:
    """Where eager and float64 agree that a value is NaN or infinite, it is; the finite ones are near."""
    with torch.no_grad():
        reference, eager = call.plain(lambda t: t.double().contiguous()), eager_result(call)
    assert y.shape == reference.shape
    unfused = outcome(lambda: call.plain(torch.Tensor.contiguous))
    assert not isinstance(unfused, Tensor) or y.dtype == unfused.dtype
    if y.is_meta:
        return
    finite = torch.isfinite(reference) & torch.isfinite(eager)
    odd = ~torch.isfinite(reference) & eager.double().isclose(reference, equal_nan=True)
    assert same_bits(y.double()[odd], reference[odd]), "NaN or infinity at another place than eager's"
    y, *eagers, reference = (t.where(finite, 0.0) for t in (y, eager, *on_rounded_v(call), reference))
    eager = max(eagers, key=lambda t: relative_error(t, reference))
    assert_close(y, reference, eager, bound_of(call.arguments["input"].dtype), repr(call))


def check_failure(failure: Failure, call: Call) -> None:
    """It names an argument, and nobody would have taken the call."""
    kind, text = failure
    assert issubclass(kind, (RuntimeError, ValueError, TypeError))
    assert any(re.search(rf"\b{name}\b", text) for name in call.arguments), (
        f"{kind} names no argument: {text}"
    )
    if not call.spoiled:
        refused = outcome(lambda: call.plain(lambda t: t.float().contiguous()))
        assert not isinstance(refused, Tensor), f"eager takes what we refuse: {text}"


@settings(max_examples=7 * SHARE)
@given(call=calls())
def test_any_call(call: Call) -> None:
    note(repr(call))
    result = outcome(lambda: call.op(call.arguments))
    with FakeTensorMode() as mode:
        fake = outcome(lambda: call.op(map_tensors(call.arguments, mode.from_tensor)))
    assert look(fake) == look(result), "the fake operator differs"
    recorded = outcome(lambda: call.op({name: wants_gradient(v) for name, v in call.arguments.items()}))
    assert look(recorded) == look(result), "differs where a gradient is needed"
    of_function = outcome(lambda: call.function(call.arguments))
    if isinstance(result, Tensor):
        event("a result")
        assert look(of_function) == look(result), "the function differs"
        assert result.is_meta or same_bits(cast(Tensor, of_function), result), "the function differs"
    else:
        event("an error")
        check_failure(result, call)
    if isinstance(of_function, Tensor):  # which also takes a size in a list by itself
        check_result(of_function, call)
    else:
        check_failure(of_function, call)


# ---- gradients ----


@settings(max_examples=2 * SHARE)
@given(call=good_calls(), data=st.data())
def test_any_gradient(call: Call, data: st.DataObject) -> None:
    """Of any of the tensors, in float64, where agreement to eight digits leaves no room for a wrong term."""
    note(repr(call))
    arguments = map_tensors(call.arguments, torch.Tensor.double)
    tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    wanted = data.draw(st.lists(st.sampled_from(tensors), min_size=1, unique=True))
    gradient_is_expanded = data.draw(st.booleans())

    def plain(call: Call) -> Tensor:
        """PyTorch's group norm fails in backward where a bias stands alone, and crashes where channels come last."""
        lone = call.arguments.get("norm_weight") is None and call.arguments.get("norm_bias") is not None
        ones = {"norm_weight": torch.ones_like(call.arguments["norm_bias"].detach())} if lone else {}
        return Call(call.row, call.has_conv, {**call.arguments, **ones}).plain(torch.Tensor.contiguous)

    def gradients(run: Callable[[Call], Tensor]) -> list[Tensor] | Failure:
        leaves = {name: arguments[name].clone().requires_grad_() for name in wanted}
        try:
            y = run(Call(call.row, call.has_conv, {**arguments, **leaves}))
            weights = torch.ones(()) if gradient_is_expanded else torch.arange(y.numel()).view(y.shape).cos()
            return list(torch.autograd.grad(y, list(leaves.values()), weights.to(y).expand(y.shape)))
        except (RuntimeError, ValueError) as error:
            return type(error), str(error)

    right, ours = (
        gradients(plain),
        gradients(lambda call: call.op(call.arguments)),
    )
    assert isinstance(right, list) == isinstance(ours, list), f"eager: {right}, ours: {ours}"
    if not isinstance(right, list) or not isinstance(ours, list):
        return
    largest = max((float(g.abs().max()) for g in right if g.numel()), default=0.0)
    for name, got, expected in zip(wanted, ours, right, strict=True):
        atol = 1e-9 * max(1.0, largest)
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=atol, msg=f"the gradient of {name} differs")


# ---- modules ----

PAIRS = st.one_of(st.integers(1, 3), st.tuples(st.integers(1, 3), st.integers(1, 3)))
ODD_PAIRS = st.one_of(
    st.integers(-1, 9), st.tuples(st.integers(-1, 9), st.integers(1, 2)), st.just((1, 1, 1))
)

GOOD_IN_MODULES: dict[str, st.SearchStrategy[Any]] = {
    "num_groups": st.sampled_from([1, 2, 4]),
    "eps": st.sampled_from([1e-5, 0.1]),
    "pool_size": PAIRS,
    "clamp_min": st.sampled_from([None, -0.5, 1]),
    "clamp_max": st.sampled_from([None, 0.5, 0]),
    "in_channels": st.sampled_from([4, 8]),
    "out_channels": st.sampled_from([4, 8, 12]),
    "kernel_size": PAIRS,
    "stride": PAIRS,
    "padding": st.one_of(st.sampled_from(["same", "valid"]), PAIRS),
    "dilation": PAIRS,
    "conv_groups": st.sampled_from([1, 1, 2, 4]),
    "bias": st.booleans(),
    "padding_mode": st.sampled_from(["zeros", "zeros", "reflect", "circular", "replicate"]),
    "dtype": st.sampled_from([None, None, torch.float64, torch.bfloat16]),
}
ODD_IN_MODULES: dict[str, st.SearchStrategy[Any]] = {
    "num_groups": st.integers(-1, 9),
    "pool_size": ODD_PAIRS,
    "in_channels": st.integers(-1, 9),
    "out_channels": st.integers(-1, 9),
    "kernel_size": ODD_PAIRS,
    "stride": ODD_PAIRS,
    "padding": st.one_of(st.just("none"), ODD_PAIRS),
    "dilation": st.sampled_from(
        [-1, 9, (1, -1), (1, 9), (1, 1, 1)]
    ),  # for eager, 0 is now an error and now not
    "conv_groups": st.integers(-1, 9),
    "padding_mode": st.just("none"),
}


@st.composite
def module_calls(draw: st.DrawFn) -> tuple[Row, Own, Own, Tensor]:
    """A chain, a constructor's arguments for it and for the conv, one of which may be wrong, and an input."""
    row = draw(st.sampled_from(CONV_ROWS))
    given = {name: draw(values) for name, values in GOOD_IN_MODULES.items()}
    shape = (
        draw(st.integers(0, 2)),
        given["in_channels"],
        draw(st.integers(1, 12)),
        draw(st.integers(1, 12)),
    )
    x = randn(generator(draw(st.integers(0, 99))), *shape, dtype=given["dtype"] or torch.float32)
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(ODD_IN_MODULES)))
        given[name] = draw(ODD_IN_MODULES[name])
    if row.keywords.get("eps", "eps") is None:  # the constructor has none
        del given["eps"]
    own = {name: given.pop(name) for name in module_arguments(row, 4) if name in given}
    conv = {name: value for name, value in given.items() if name not in OF_CHAINS}
    return row, own, conv, x


OF_CHAINS = ("num_groups", "eps", "pool_size", "clamp_min", "clamp_max")


@settings(max_examples=SHARE)
@given(call=module_calls())
def test_any_module(call: tuple[Row, Own, Own, Tensor]) -> None:
    """Built of the same seed and called: both modules raise, or neither, and then their results agree."""
    row, own, conv, x = call

    def made(kind: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        module = kind()
        if row.has_norm:  # else groups of one value are all rounding
            cast(nn.GroupNorm, module.group_norm).bias.fill_(0.5)
        return module

    def plain() -> nn.Module:
        return made(lambda: Plain(row, **conv, **own))

    def fused() -> nn.Module:
        fused_class = getattr(fusedconv, str(row.module))
        return made(lambda: fused_class(**conv, **fused_keywords(row, conv["out_channels"], own)))

    with torch.no_grad():
        eager, y = outcome(lambda: cast(Tensor, plain()(x))), outcome(lambda: cast(Tensor, fused()(x)))
        event("a result" if isinstance(y, Tensor) else "an error")
        assert isinstance(eager, Tensor) == isinstance(y, Tensor), f"eager: {eager}, ours: {y}"
        if isinstance(eager, Tensor) and isinstance(y, Tensor):
            assert y.dtype == eager.dtype
            if x.dtype is torch.float64:
                eager = plain().float()(exact_eager(x))
            reference = plain().double()(x.double())
            if torch.isfinite(reference).all():
                assert_close(y, reference, eager, bound_of(x.dtype))


# ---- in a child ----


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child(check)
    yield child
    child.close()


@settings(max_examples=10 * SHARE)
@given(case=extreme_geometries())
def test_any_geometry(child: Child, case: ExtremeGeometry) -> None:
    child.run(case)


@settings(max_examples=6 * SHARE)
@given(case=large_means())
def test_any_mean_and_bias(child: Child, case: LargeMean) -> None:
    child.run(case)


# What these drew: ours was wrong (the first), or held against too few of eager's errors.
FAILED_ONCE = [
    LargeMean(
        chain="group_norm_silu", dtype=torch.float64, size=(8, 14), kernel=(2, 6), batch=2, channels=(3, 1),
        stride=(2, 2), padding=(0, 1), dilation=(2, 2), eps=1e-5, layout=torch.channels_last, seed=3,
        mean=100.0, deviation=0.01, factor=-1.0, bias_factor=100.0, wants_gradients=True,
    ),
    LargeMean(
        chain="group_norm_tanh_hardswish_logsumexp", dtype=torch.float32, size=(19, 16), kernel=(4, 1), channels=(2, 3),
        stride=(1, 2), dilation=(2, 1), num_groups=3, eps=1e-5, layout=torch.channels_last, seed=15039,
        mean=100.0, deviation=0.01, bias_factor=0.01, wants_gradients=True,
    ),
    LargeMean(
        chain="group_norm_silu", dtype=torch.float32, size=(6, 9), kernel=(7, 3), batch=2, padding=(3, 2), eps=1e-5,
        seed=156388, deviation=0.01, factor=3.0, bias_factor=100.0, wants_gradients=True,
    ),
    LargeMean(
        chain="relu_hardswish", dtype=torch.float32, size=(10, 6), kernel=(4, 1), batch=3, channels=(2, 2),
        padding=(1, 0), dilation=(2, 1), has_bias=False, seed=2, mean=1000.0, factor=-1.0, wants_gradients=True,
    ),
    LargeMean(
        chain="group_norm_scale_max_pool_clamp", dtype=torch.bfloat16, size=(16, 9), kernel=(2, 2), batch=2,
        channels=(1, 8), padding=(1, 0), num_groups=4, pool=(1, 2), eps=1e-5, seed=1254, deviation=0.01, factor=3.0,
        bias_factor=0.01, wants_gradients=True,
    ),
    LargeMean(
        chain="bias_scale_sigmoid_group_norm", dtype=torch.float64, size=(9, 9), kernel=(2, 4), batch=2,
        channels=(2, 3), stride=(2, 2), padding=(0, 3), num_groups=3, eps=1e-5, has_bias=False, seed=0, mean=100.0,
        deviation=0.01, factor=3.0, bias_factor=0.01,
    ),
    ExtremeGeometry(
        chain="group_norm_silu", dtype=torch.bfloat16, size=(2, 2), kernel=(5, 5), channels=(1, 3), stride=(4, 4),
        padding=(49, 49), num_groups=3, seed=29221, wants_gradients=True,
    ),
    ExtremeGeometry(
        chain="group_norm_tanh_hardswish_logsumexp", dtype=torch.float32, size=(2, 7), kernel=(2, 1), channels=(4, 1),
        stride=(2, 7), padding=(26887, 0), dilation=(53704, 1), has_bias=False, seed=302, wants_gradients=True,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", FAILED_ONCE, ids=lambda case: f"{case.chain}-{case.seed}")
def test_what_failed_once(child: Child, case: ConvCase) -> None:
    child.run(case)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU has no such mode")
@settings(max_examples=4 * SHARE)
@given(case=flushed_denormals())
def test_any_value_where_denormals_are_flushed(child: Child, case: FlushedDenormals) -> None:
    child.run(case)
