"""Row 19: the output dtype and the tolerance of the unfused chain under autocast on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chains_table import CONV_ROWS, ROWS, Own, Row, draw_own, generator, map_tensors, modules, randn
from helpers import BOUNDS, assert_close, double, relative_error

all_rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
conv_rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
halves = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
formats = pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"]
)


def inputs(row: Row, seed: object) -> tuple[Tensor, Tensor, Tensor, Own]:
    gen = generator(row.chain, seed)
    own = draw_own(row, 12, gen)
    return randn(gen, 2, 5, 12, 13), randn(gen, 12, 5, 3, 3) / 7, randn(gen, 12), own


@halves
@formats
@conv_rows
def test_row_19_conv_under_autocast(row: Row, layout: torch.memory_format, half: torch.dtype) -> None:
    """Apples with apples: float64 on the values that autocast rounds (input, weight, conv bias)."""
    x, weight, bias, own = inputs(row, half)
    x = x.contiguous(memory_format=layout)
    with torch.no_grad(), torch.autocast("cpu", half):
        y = row.conv_op(x, weight, bias, own)
        eager = row.plain_conv(x.contiguous(), weight, bias, own)
    assert y.dtype == eager.dtype
    x, weight, bias = (t.to(half).double() for t in (x.contiguous(), weight, bias))
    reference = row.plain_conv(x, weight, bias, double(own))
    assert_close(y, reference, eager, BOUNDS[half], row.conv)


@halves
@all_rows
def test_row_19_chain_under_autocast(row: Row, half: torch.dtype) -> None:
    """A chain on a given tensor: float32, and half precision as a conv under autocast leaves it."""
    gen = generator(row.chain, half)
    own = draw_own(row, 12, gen)
    for v in (randn(gen, 2, 12, 9, 8), randn(gen, 2, 12, 9, 8, dtype=half)):
        with torch.no_grad(), torch.autocast("cpu", half):
            y, eager = row.chain_op(v, own), row.plain_chain(v, own)
        assert y.dtype == eager.dtype
        assert_close(y, row.plain_chain(v.double(), double(own)), eager, BOUNDS[v.dtype], row.chain)


@conv_rows
def test_row_19_modules_and_gradients_under_autocast(row: Row) -> None:
    """Parameters stay float32 and so do their gradients, no worse than the plain model's."""
    fused, plain = modules(row, 3, 16)
    exact = modules(row, 3, 16)[1].double()
    x = randn(generator("autocast"), 4, 3, 12, 12)

    def gradients(model: torch.nn.Module, autocast: bool) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = x.to(next(model.parameters()).dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(inputs)
        named = dict(model.named_parameters())
        found = torch.autograd.grad(y.double().square().sum(), list(named.values()))
        return y, dict(zip(named, found, strict=True))

    (y, ours), (eager, theirs), (_, right) = (
        gradients(fused, True),
        gradients(plain, True),
        gradients(exact, False),
    )
    assert y.dtype == eager.dtype
    for name, gradient in ours.items():
        assert gradient.dtype == torch.float32
        scale = max(float(right[name].norm()), 1e-3 * max(float(g.norm()) for g in right.values()))
        allowed = max(2e-2, 2 * float((theirs[name].double() - right[name]).norm()) / scale)
        assert float((gradient.double() - right[name]).norm()) / scale <= allowed, name


@conv_rows
def test_autocast_disabled_and_float64(row: Row) -> None:
    """A disabled region casts nothing; float64 input is treated as the unfused chain treats it."""
    x, weight, bias, own = inputs(row, "disabled")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert row.conv_op(x, weight, bias, own).dtype == torch.float32
    x, weight, bias = x.double(), weight.double(), bias.double()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = row.plain_conv(x, weight, bias, double(own))
        y = row.conv_op(x, weight, bias, double(own))
    assert y.dtype == expected.dtype
    assert relative_error(y, expected.double()) <= BOUNDS[expected.dtype]


OTHERS = [
    pytest.param(row, name, id=f"{row.chain}-{name}")
    for row in CONV_ROWS
    for name, value in draw_own(row, 12, generator()).items()
    if isinstance(value, Tensor)
]


@halves
@pytest.mark.parametrize(("row", "name"), OTHERS)
def test_autocast_leaves_the_other_arguments_alone(row: Row, name: str, half: torch.dtype) -> None:
    """Scale, bias and the norm's affine stay float32: a step that half precision rounds away must count."""
    gen = generator(row.chain, name)
    own = map_tensors(draw_own(row, 12, gen), lambda t: t.to(half).float())
    step = torch.finfo(half).eps / 8
    fine = own | {name: own[name] * (1 + step)}
    assert torch.equal(fine[name].to(half).float(), own[name])
    assert not torch.equal(fine[name], own[name])
    # Where the output is in half precision, a few of many values are rounded to the other side.
    x, weight, bias = randn(gen, 2, 5, 60, 60), randn(gen, 12, 5, 3, 3) / 7, randn(gen, 12)
    with torch.no_grad(), torch.autocast("cpu", half):
        assert not torch.equal(row.conv_op(x, weight, bias, own), row.conv_op(x, weight, bias, fine))
