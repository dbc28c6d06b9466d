"""Gradients of every order, torch.func, vmap, and what is computed at all (rows 14, 16 and 28)."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from chains_table import CONV_ROWS, ROWS, Own, Row, draw_own, generator, module_input, modules, randn
from helpers import GRADIENT_BOUNDS, double, failure, same_bits

all_rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
conv_rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
formats = pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"]
)


def tensors_of(own: Own) -> dict[str, Tensor]:
    return {name: value for name, value in own.items() if isinstance(value, Tensor)}


def conv_function(row: Row, own: Own, **conv: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The conv operator and the plain chain as functions of (input, weight, conv_bias, tensors of `own`)."""
    names = list(tensors_of(own))

    def of(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, weight: Tensor, conv_bias: Tensor, *values: Tensor) -> Tensor:
            return run(x, weight, conv_bias, own | dict(zip(names, values, strict=True)), **conv)

        return call

    return of(row.conv_op), of(row.plain_conv)


def conv_values(row: Row, seed: object, dtype: torch.dtype = torch.float64) -> tuple[Own, list[Tensor]]:
    """A small case: the chain's own arguments, and all tensors in order."""
    gen = generator(row.chain, seed)
    own = draw_own(row, 4, gen, dtype=dtype, groups=2)
    x, weight, bias = randn(gen, 2, 3, 5, 6), randn(gen, 4, 3, 3, 2) / 4, randn(gen, 4)
    return own, [t.to(dtype) for t in (x, weight, bias)] + list(tensors_of(own).values())


@devices
@formats
@conv_rows
def test_row_28_gradcheck_of_the_conv(row: Row, layout: torch.memory_format, device: str) -> None:
    """Both orders, against finite differences in float64."""
    own, values = conv_values(row, "gradcheck")
    values[0] = values[0].contiguous(memory_format=layout)
    ours, _ = conv_function(row, own, padding=(1, 0), stride=(1, 2))
    leaves = [t.to(device, copy=True).requires_grad_() for t in values]
    with torch.backends.cudnn.flags(deterministic=True):  # in float64 the conv's backward is PyTorch's
        assert torch.autograd.gradcheck(ours, leaves, fast_mode=False)
        assert torch.autograd.gradgradcheck(ours, leaves, fast_mode=True)


@devices
@all_rows
def test_row_28_gradcheck_of_the_chain(row: Row, device: str) -> None:
    gen = generator(row.chain, "gradcheck")
    own = draw_own(row, 4, gen, dtype=torch.float64, groups=2)
    names = list(tensors_of(own))

    def ours(v: Tensor, *values: Tensor) -> Tensor:
        return row.chain_op(v, own | dict(zip(names, values, strict=True)))

    leaves = [randn(gen, 2, 4, 3, 4, dtype=torch.float64), *tensors_of(own).values()]
    leaves = [t.to(device, copy=True).requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(ours, leaves, fast_mode=False)
    assert torch.autograd.gradgradcheck(ours, leaves, fast_mode=True)


@conv_rows
def test_row_28_second_gradients_are_not_detached(row: Row) -> None:
    """A missing rule detaches silently: the second gradient must exist and equal the plain chain's."""
    own, values = conv_values(row, "second")
    results = []
    for function in conv_function(row, own):
        leaves = [t.clone().requires_grad_() for t in values]
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        assert all(g.requires_grad for g in first)
        penalty = torch.stack([g.square().sum() for g in first]).sum()
        results.append(torch.autograd.grad(penalty, leaves))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@formats
@conv_rows
def test_gradients_against_float64(row: Row, layout: torch.memory_format, dtype: torch.dtype) -> None:
    """Error over the larger of the gradient's own norm and 1e-3 of the largest parameter gradient's."""
    gen = generator(row.chain, "float64", dtype)
    own = draw_own(row, 12, gen, dtype=dtype)
    x = randn(gen, 2, 5, 40, 53).to(dtype=dtype, memory_format=layout)  # large enough to lose digits
    values = [x, (randn(gen, 12, 5, 3, 3) / 7).to(dtype), randn(gen, 12).to(dtype), *tensors_of(own).values()]
    ours, plain = conv_function(row, own, padding=1)
    direction = randn(gen, *plain(*values).shape, dtype=torch.float64)

    def gradients(function: Callable[..., Tensor], values: list[Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in values]
        y = function(*leaves)
        return [g.double() for g in torch.autograd.grad(y, leaves, direction.to(y.dtype))]

    reference = gradients(conv_function(row, double(own), padding=1)[1], [t.double() for t in values])
    exact = gradients(plain, [t.contiguous() for t in values])
    largest = max(float(g.norm()) for g in reference)
    for name, got, right, eager in zip(
        ("input", "weight", "conv_bias", *tensors_of(own)),
        gradients(ours, values),
        reference,
        exact,
        strict=True,
    ):
        size = max(float(right.norm()), 1e-3 * largest)
        allowed = max(GRADIENT_BOUNDS[dtype], 2 * float((eager - right).norm()) / size)
        error = float((got - right).norm()) / size
        assert error <= allowed, f"gradient of {name}: {error:.2e}, allowed {allowed:.2e}"


@conv_rows
def test_gradients_have_the_same_bits_in_each_run(row: Row) -> None:
    own, values = conv_values(row, "bits", torch.float32)
    ours, _ = conv_function(row, own)
    runs = []
    for _ in range(4):
        leaves = [t.clone().requires_grad_() for t in values]
        runs.append(torch.autograd.grad(ours(*leaves).square().sum(), leaves))
    for run in runs[1:]:
        assert all(same_bits(a, b) for a, b in zip(runs[0], run, strict=True))


@conv_rows
def test_forward_is_the_same_with_and_without_autograd(row: Row) -> None:
    own, values = conv_values(row, "modes", torch.float32)
    ours, _ = conv_function(row, own)
    with torch.no_grad():
        expected = ours(*values)
    with torch.inference_mode():
        assert same_bits(ours(*values).clone(), expected)
    leaves = [t.clone().requires_grad_() for t in values]
    y = ours(*leaves)
    assert y.requires_grad
    assert same_bits(y.detach(), expected)
    assert not ours(*values).requires_grad


@conv_rows
def test_row_16_each_subset_of_what_needs_a_gradient(row: Row) -> None:
    """What needs no gradient gets None; the others get what they get together."""
    own, values = conv_values(row, "subset")
    ours, plain = conv_function(row, own)
    every = [t.clone().requires_grad_() for t in values]
    expected = torch.autograd.grad(plain(*every).square().sum(), every)
    single = [{i} for i in range(len(values))] + [set(range(len(values))) - {i} for i in range(len(values))]
    for chosen in single:
        leaves = [t.clone().requires_grad_(i in chosen) for i, t in enumerate(values)]
        ours(*leaves).square().sum().backward()
        for i, leaf in enumerate(leaves):
            assert (leaf.grad is not None) == (i in chosen)
            if leaf.grad is not None:
                torch.testing.assert_close(leaf.grad, expected[i], rtol=1e-9, atol=1e-9)


class Masks(TorchDispatchMode):
    """Notes which gradients the private backward operators are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        if "output_mask" in names and "fusedconv" in func.name():
            self.seen.append(list(args[names.index("output_mask")]))
        return func(*args, **(kwargs or {}))


@conv_rows
def test_row_16_only_what_is_needed_is_computed(row: Row) -> None:
    own, values = conv_values(row, "mask")
    ours, _ = conv_function(row, own)
    for chosen in range(len(values)):
        leaves = [t.clone().requires_grad_(i == chosen) for i, t in enumerate(values)]
        y = ours(*leaves).sum()
        with Masks() as masks:
            y.backward()
        assert masks.seen == [[i == chosen for i in range(len(values))]]


class EndsHere(torch.autograd.Function):
    """Has no gradient for what it takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@conv_rows
def test_row_16_an_output_without_a_gradient(row: Row) -> None:
    own, values = conv_values(row, "ends")
    for run in conv_function(row, own):
        leaves = [t.clone().requires_grad_() for t in values]
        y = run(*leaves)
        assert torch.autograd.grad(EndsHere.apply(y).sum(), leaves, allow_unused=True) == (None,) * len(
            leaves
        )


@conv_rows
def test_row_16_gradients_without_conv_bias_and_affine(row: Row) -> None:
    own, values = conv_values(row, "none")
    own = {name: None if name.startswith("norm_") else value for name, value in own.items()}
    results = []
    for run in (row.conv_op, row.plain_conv):
        x, weight = (t.clone().requires_grad_() for t in values[:2])
        run(x, weight, None, own).square().sum().backward()
        results.append((x.grad, weight.grad))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [4, 20], ids=["reference", "kernel"])
@pytest.mark.parametrize("row", [row for row in ROWS if row.has_norm], ids=lambda row: row.chain)
def test_row_16_gradients_of_a_norm_bias_alone(row: Row, size: int) -> None:
    """PyTorch's own group norm fails in backward there; it is as with a weight of ones."""
    gen = generator(row.chain, "bias alone")
    own = double(draw_own(row, 8, gen, norm_weight=None))
    v = randn(gen, 2, 8, size, size, dtype=torch.float64).requires_grad_()
    bias = own["norm_bias"].requires_grad_()
    grads = [
        torch.autograd.grad(run(v, own | weight).sum(), (v, bias))
        for run, weight in ((row.chain_op, {}), (row.plain_chain, {"norm_weight": torch.ones_like(bias)}))
    ]
    torch.testing.assert_close(*grads)


@conv_rows
def test_gradients_through_views_and_expanded_gradients(row: Row) -> None:
    """A sliced input, and an output gradient of stride 0 (what `sum` sends) or of another layout."""
    own, values = conv_values(row, "views")
    ours, plain = conv_function(row, own)
    gen = generator("direction")
    wide = randn(gen, 2, 3, 5, 12, dtype=torch.float64)
    for weigh in (
        lambda y: y.sum(),
        lambda y: (y * randn(generator("w"), *y.shape[::-1], dtype=torch.float64).permute(3, 2, 1, 0)).sum(),
    ):
        gradients = []
        for function in (ours, plain):
            leaf = wide.clone().requires_grad_()
            weigh(function(leaf[..., ::2], *values[1:])).backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-9)


@conv_rows
def test_row_28_func_grad_and_per_sample_gradients(row: Row) -> None:
    own, values = conv_values(row, "func")
    ours, plain = conv_function(row, own)

    def loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, *rest: function(x.unsqueeze(0), *rest).square().sum()

    everything = tuple(range(len(values)))
    got = torch.func.grad(lambda *t: ours(*t).square().sum(), argnums=everything)(*values)
    right = torch.func.grad(lambda *t: plain(*t).square().sum(), argnums=everything)(*values)
    per_sample = (0, *[None] * (len(values) - 1))
    got += torch.func.vmap(torch.func.grad(loss(ours), everything), per_sample)(*values)
    right += torch.func.vmap(torch.func.grad(loss(plain), everything), per_sample)(*values)
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@conv_rows
def test_row_28_jacobian_and_hessian(row: Row) -> None:
    own, values = conv_values(row, "hessian")
    ours, plain = conv_function(row, own)
    bias = values[2]

    def of(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda b: function(*values[:2], b, *values[3:]).square().sum()

    for transform in (torch.func.jacrev, lambda f: torch.func.jacrev(torch.func.grad(f))):
        torch.testing.assert_close(
            transform(of(ours))(bias), transform(of(plain))(bias), rtol=1e-8, atol=1e-8
        )


@conv_rows
def test_row_28_vmap(row: Row) -> None:
    """Over the input, at any dimension; over the parameters (an ensemble); over both; and nested."""
    own, values = conv_values(row, "vmap")
    ours, plain = conv_function(row, own)
    gen = generator("vmap")
    x = randn(gen, 3, *values[0].shape, dtype=torch.float64)
    several = [torch.stack([t, -t, t / 2]) for t in values]
    rest = [None] * (len(values) - 1)
    cases = [
        ((0, *rest), [x, *values[1:]]),
        ((2, *rest), [x.movedim(0, 2), *values[1:]]),
        ((None, *[0] * len(rest)), [values[0], *several[1:]]),
        (tuple([0] * len(values)), several),
    ]
    for dims, arguments in cases:
        got = torch.func.vmap(ours, dims)(*arguments)
        right = torch.func.vmap(plain, dims)(*arguments)
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)
    nested = torch.stack([x, 2 * x])
    twice = torch.func.vmap(torch.func.vmap(ours, (0, *rest)), (0, *rest))
    for i, j in itertools.product(range(2), range(3)):
        torch.testing.assert_close(twice(nested, *values[1:])[i, j], plain(nested[i, j], *values[1:]))


@all_rows
def test_row_28_vmap_of_the_chain(row: Row) -> None:
    gen = generator(row.chain, "vmap")
    own = draw_own(row, 4, gen, dtype=torch.float64)
    v = randn(gen, 3, 2, 4, 5, 6, dtype=torch.float64)
    got = torch.func.vmap(lambda t: row.chain_op(t, own))(v)
    for i in range(3):
        torch.testing.assert_close(got[i], row.plain_chain(v[i], own))


def tangent_or_refusal(call: Callable[[], Tensor]) -> Tensor | None:
    """The tangent, or None where the call says in words that it has no forward mode."""
    try:
        return call()
    except (RuntimeError, NotImplementedError) as error:
        if "forward" not in str(error).lower():
            raise
        return None


@conv_rows
def test_forward_mode_works_or_says_that_it_does_not(row: Row) -> None:
    """Never a silent zero."""
    own, values = conv_values(row, "jvp")
    ours, plain = conv_function(row, own)
    ones = tuple(torch.ones_like(t) for t in values)

    def by_func(function: Callable[..., Tensor]) -> Tensor:
        return cast(Tensor, torch.func.jvp(function, tuple(values), ones)[1])

    def by_dual(function: Callable[..., Tensor]) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(values[0], ones[0])
            return cast(Tensor, forward_ad.unpack_dual(function(dual, *values[1:])).tangent)

    for way in (by_func, by_dual):
        got = tangent_or_refusal(partial(way, ours))
        assert got is None or torch.allclose(got, way(plain))


@conv_rows
def test_changing_a_saved_tensor_in_place_is_noticed(row: Row) -> None:
    """As PyTorch documents it for what backward needs: backward computes with each of the tensors again."""
    own, values = conv_values(row, "in place")
    ours, _ = conv_function(row, own)
    for place, name in enumerate(("input", "weight", "conv_bias", *tensors_of(own))):
        given = [t.clone().requires_grad_() * 1 for t in values]
        ours(*given).sum().backward()
        y = ours(*given)
        with torch.no_grad():
            given[place].mul_(2)
        kind, text = failure(y.sum().backward)
        assert kind is RuntimeError, name
        assert "modified by an inplace operation" in text, name


@conv_rows
def test_row_28_checkpoint_and_functional_call(row: Row) -> None:
    fused, plain = modules(row)
    x = module_input()
    expected = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    y = torch.utils.checkpoint.checkpoint(fused, x, use_reentrant=False)
    names = [name for name, _ in plain.named_parameters()]
    got = torch.autograd.grad(y.square().sum(), [fused.get_parameter(name) for name in names])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    doubled = {name: 2 * p.detach() for name, p in plain.named_parameters()}
    torch.testing.assert_close(
        torch.func.functional_call(fused, doubled, (x,)),
        torch.func.functional_call(plain, doubled, (x,)),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip


@conv_rows
def test_saved_tensors_do_not_include_the_conv_output(row: Row) -> None:
    """What autograd keeps is the input, the parameters and small statistics."""
    own, values = conv_values(row, "saved", torch.float32)
    x = randn(generator("saved"), 2, 3, 40, 41).requires_grad_()
    leaves = [t.clone().requires_grad_() for t in values[1:]]
    kept: list[int] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        conv_function(row, own)[0](x, *leaves)
    assert max(kept) <= x.numel()
