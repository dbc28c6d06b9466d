"""Wrong arguments: a clear error that names the argument.

The same from the real, meta and fake operator, with and without gradients, from the function and from the module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import fusedconv.functional
from chains_table import CONV_ROWS, ROWS, Row, draw_own, generator, map_tensors, modules, randn
from fusedconv import _C
from fusedconv.chains import CHAINS, CHECKS
from helpers import failure

Call = dict[str, Any]


@dataclass(frozen=True)
class Bad:
    """One way to spoil a good call; the error must name each argument in `names`."""

    what: str
    spoil: Callable[[Call], None]
    names: tuple[str, ...]
    needs: str = "input"  # the argument that the operator must have for this to apply


def put(name: str, value: Any) -> Callable[[Call], None]:
    def spoil(call: Call) -> None:
        call[name] = value(call[name]) if callable(value) else value

    return spoil


def several(**values: Any) -> Callable[[Call], None]:
    def spoil(call: Call) -> None:
        for name, value in values.items():
            put(name, value)(call)

    return spoil


NORM_WEIGHT, NORM_BIAS, KERNEL = "norm_weight", "norm_bias", ("weight", "input")

COMMON = (
    Bad("7: groups that do not divide the channels", put("num_groups", 5), ("num_groups",), "num_groups"),
    Bad("7: zero groups", put("num_groups", 0), ("num_groups",), "num_groups"),
    Bad("7: negative groups", put("num_groups", -4), ("num_groups",), "num_groups"),
    Bad("7: more groups than channels", put("num_groups", 16), ("num_groups",), "num_groups"),
    Bad("17: integer input", put("input", lambda t: t.int()), ("input",)),
    Bad("17: complex input", put("input", lambda t: t.to(torch.complex64)), ("input",)),
    Bad("17: bool input", put("input", lambda t: t > 0), ("input",)),
    Bad("17: 3-D input", put("input", lambda t: t[0]), ("input",)),
    Bad("17: 5-D input", put("input", lambda t: t[None]), ("input",)),
    Bad("17: 0-D input", put("input", lambda t: t.sum()), ("input",)),
    Bad("17: norm_weight in half", put(NORM_WEIGHT, lambda t: t.half()), (NORM_WEIGHT,), NORM_WEIGHT),
    Bad("17: norm_bias in half precision", put(NORM_BIAS, lambda t: t.bfloat16()), (NORM_BIAS,), NORM_BIAS),
    Bad("17: norm_weight of wrong length", put(NORM_WEIGHT, lambda t: t[:-1]), (NORM_WEIGHT,), NORM_WEIGHT),
    Bad("17: norm_bias of wrong length", put(NORM_BIAS, lambda t: t.repeat(2)), (NORM_BIAS,), NORM_BIAS),
    Bad("17: norm_weight 2-D", put(NORM_WEIGHT, lambda t: t[None]), (NORM_WEIGHT,), NORM_WEIGHT),
    Bad("17: scale of wrong length", put("scale", lambda t: t[:-1]), ("scale",), "scale"),
    Bad("17: bias of wrong length", put("bias", lambda t: torch.cat([t, t])), ("bias",), "bias"),
    Bad("17: bias per column", put("bias", lambda t: t.view(1, 1, -1)), ("bias",), "bias"),
    Bad("17: integer scale", put("scale", lambda t: t.long()), ("scale",), "scale"),
    Bad("17: scale on another device", put("scale", lambda t: t.to("meta")), ("scale",), "scale"),
    Bad("17: norm_bias on another device", put(NORM_BIAS, lambda t: t.to("meta")), (NORM_BIAS,), NORM_BIAS),
    Bad("17: sparse input", put("input", lambda t: t.to_sparse()), ("input",)),
    Bad("17: sparse norm_weight", put(NORM_WEIGHT, lambda t: t.to_sparse()), (NORM_WEIGHT,), NORM_WEIGHT),
    Bad("17: no input", put("input", None), ("input",)),
    Bad("17: no scale", put("scale", None), ("scale",), "scale"),
    Bad("17: no bias", put("bias", None), ("bias",), "bias"),
    Bad("12: pool window larger than the map", put("pool_size", [50, 2]), ("pool_size",), "pool_size"),
    Bad("12: pool of zero", put("pool_size", [0, 2]), ("pool_size",), "pool_size"),
    Bad("12: negative pool", put("pool_size", [2, -2]), ("pool_size",), "pool_size"),
    Bad("a precision that does not exist", put("precision", "tf64"), ("precision",)),
)  # fmt: skip

CONV = (
    Bad("17: float32 input, bfloat16 weight", put("weight", lambda t: t.bfloat16()), ("weight",)),
    Bad("17: float32 input, float64 weight", put("weight", lambda t: t.double()), ("weight",)),
    Bad("17: bfloat16 input, float32 weight", put("input", lambda t: t.bfloat16()), ("weight", "input")),
    Bad("17: conv_bias of another dtype", put("conv_bias", lambda t: t.double()), ("conv_bias",)),
    Bad("17: conv_bias of wrong length", put("conv_bias", lambda t: t[:-1]), ("conv_bias",)),
    Bad("17: conv_bias 2-D", put("conv_bias", lambda t: t[None]), ("conv_bias",)),
    Bad("17: weight with wrong input channels", put("weight", lambda t: t[:, :-1]), ("weight",)),
    Bad("17: no weight", put("weight", None), ("weight",)),
    Bad("17: sparse weight", put("weight", lambda t: t.to_sparse()), ("weight",)),
    Bad("17: 3-D weight", put("weight", lambda t: t[..., 0]), ("weight",)),
    Bad("17: weight on another device", put("weight", lambda t: t.to("meta")), ("weight",)),
    Bad("17: conv_bias on another device", put("conv_bias", lambda t: t.to("meta")), ("conv_bias",)),
    Bad("18: stride 0", put("stride", [0, 1]), ("stride",)),
    Bad("18: negative stride", put("stride", [1, -1]), ("stride",)),
    Bad("18: dilation 0", put("dilation", [1, 0]), ("dilation",)),
    Bad("18: negative dilation", put("dilation", [-1, 1]), ("dilation",)),
    Bad("18: conv groups 0", put("groups", 0), ("groups",)),
    Bad("18: negative conv groups", put("groups", -1), ("groups",)),
    Bad("18: conv groups that do not divide the channels", put("groups", 3), ("groups",)),
    Bad("18: negative padding", put("padding", [-1, 0]), ("padding",)),
    Bad("18: stride beyond 32 bits", put("stride", [1, 2**31]), ("stride",)),
    Bad("18: padding beyond 32 bits", put("padding", [2**31, 0]), ("padding",)),
    Bad("18: dilation beyond 32 bits", put("dilation", [2**62, 1]), ("dilation",)),
    Bad("18: kernel larger than the input", put("input", lambda t: t[:, :, :2]), KERNEL),
    Bad("18: kernel larger than the map", several(input=lambda t: t[..., :1], padding=[0, 0]), KERNEL),
    Bad("18: dilated kernel larger than the input", put("dilation", [9, 1]), KERNEL),
    Bad("18: kernel of no size", put("weight", lambda t: t[..., :0]), ("weight",)),
    Bad("18: no input channels", several(input=lambda t: t[:, :0], weight=lambda t: t[:, :0]), ("input",)),
    Bad("18: no output channels", several(weight=lambda t: t[:0], conv_bias=lambda t: t[:0]), ("weight",)),
    Bad("18: empty map", put("input", lambda t: t[:, :, :0]), KERNEL),
)  # fmt: skip


def good_call(row: Row, conv: bool) -> Call:
    gen = generator(row.chain, "errors")
    own = draw_own(row, 8, gen, groups=4)
    if not conv:
        return {"input": randn(gen, 2, 8, 9, 10), **own, "precision": None}
    tensors = {"input": randn(gen, 2, 4, 9, 10), "weight": randn(gen, 8, 4, 3, 3), "conv_bias": randn(gen, 8)}
    geometry = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
    return {**tensors, **own, **geometry, "precision": None}


def applicable(rows: Sequence[Row], bads: Sequence[Bad], conv: bool) -> list[Any]:
    """Each row with what can be wrong with its arguments."""
    return [
        pytest.param(row, bad, id=f"{row.chain}-{bad.what}")
        for row in rows
        for bad in bads
        if bad.needs in good_call(row, conv)
    ]


def spoils_input_only(row: Row, bad: Bad) -> bool:
    good = good_call(row, conv=True)
    call = dict(good)
    bad.spoil(call)
    return [name for name in call if call[name] is not good[name]] == ["input"]


def check_failures(name: str, call: Call, bad: Bad) -> None:
    op, function = getattr(torch.ops.fusedconv, name), getattr(fusedconv.functional, name)
    op(**call), function(**call)  # as it stands, the call is good
    bad.spoil(call)
    kind, text = failure(lambda: op(**call))
    for argument in bad.names:
        assert re.search(rf"\b{argument}\b", text), f"{text!r} does not name {argument}"
    assert failure(lambda: function(**call)) == (kind, text), "the function differs"
    if "another device" not in bad.what:
        assert failure(lambda: op(**map_tensors(call, lambda t: t.to("meta")))) == (kind, text), (
            "meta differs"
        )
        with FakeTensorMode() as mode:
            assert failure(lambda: op(**map_tensors(call, mode.from_tensor))) == (kind, text), "fake differs"
    wants = {
        k: v.clone().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in call.items()
    }
    assert failure(lambda: op(**wants)) == (kind, text), "differs where a gradient is needed"


@pytest.mark.parametrize(("row", "bad"), applicable(ROWS, COMMON, conv=False))
def test_rows_7_12_17_wrong_arguments_of_the_chain(row: Row, bad: Bad) -> None:
    check_failures(row.chain, good_call(row, conv=False), bad)


@pytest.mark.parametrize(("row", "bad"), applicable(CONV_ROWS, COMMON + CONV, conv=True))
def test_rows_7_12_17_18_wrong_arguments_of_the_conv(row: Row, bad: Bad) -> None:
    check_failures(row.conv, good_call(row, conv=True), bad)


def test_each_tensor_of_a_chain_is_known() -> None:
    """Kernels leave out a tensor whose name they do not know, and read one that is not checked, whatever its size."""
    for chain in CHAINS:
        tensors = {a.split()[1].split("=")[0] for a in chain.arguments.split(", ") if a.startswith("Tensor")}
        assert tensors <= {*_C.CHANNEL_PARAMETERS} & {*CHECKS}, chain.name


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
def test_row_17_nested_tensors(row: Row, layout: torch.layout) -> None:
    """The error names the argument, not the private operator that training calls."""
    for conv, name in ((False, row.chain), (True, row.conv)):
        for argument in ("input", "weight", "conv_bias") if conv else ("input",):
            for wants in (False, True):
                call = good_call(row, conv)
                parts = [call[argument], call[argument]]
                call[argument] = torch.nested.nested_tensor(parts, layout=layout, requires_grad=wants)
                expected = RuntimeError, f"{argument} must be a dense tensor, but is nested"
                op = partial(getattr(torch.ops.fusedconv, name), **call)
                assert failure(op) == expected
                with forward_ad.dual_level():
                    assert failure(op) == expected


@pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
def test_row_17_sparse_gradient_of_the_output(row: Row) -> None:
    for conv, name in ((False, row.chain), (True, row.conv)):
        call = good_call(row, conv)
        call["input"].requires_grad_()
        y = getattr(torch.ops.fusedconv, name)(**call)
        text = f"{name}: grad must be a dense tensor, but its layout is torch.sparse_coo"
        assert failure(partial(y.backward, torch.ones_like(y).to_sparse())) == (RuntimeError, text)


@pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
def test_rows_17_18_wrong_input_of_the_module(row: Row) -> None:
    """The operator's own error, for all that can be wrong with the input alone."""
    module = modules(row, 4, 8, 3, groups=4)[0]
    module(good_call(row, conv=True)["input"])
    bads = [
        bad for bad in COMMON + CONV if bad.needs in good_call(row, conv=True) and spoils_input_only(row, bad)
    ]
    assert len(bads) > 6
    for bad in bads:
        call = good_call(row, conv=True)
        bad.spoil(call)
        expected = failure(lambda call=call: getattr(torch.ops.fusedconv, row.conv)(**call))  # type: ignore[misc]
        assert failure(lambda call=call: module(call["input"])) == expected, bad.what  # type: ignore[misc]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
def test_fake_output_is_the_real_output(row: Row) -> None:
    """Shape, dtype, strides and device, over dtypes and layouts; also as a meta tensor."""
    gen = generator(row.chain, "fake")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for own_dtype in {dtype, dtype if dtype == torch.float64 else torch.float32}:
            for layout in (torch.contiguous_format, torch.channels_last):
                for shape in ((2, 8, 9, 10), (1, 8, 4, 4), (0, 8, 5, 6), (2, 8, 1, 7)):
                    own = draw_own(row, 8, gen, dtype=own_dtype, pool_size=min(2, shape[2]))
                    calls: list[tuple[str, Call]] = []
                    v = randn(gen, *shape).to(dtype=dtype, memory_format=layout)
                    calls.append((row.chain, {"input": v, **own}))
                    if row.module:
                        weight, bias = randn(gen, 8, 8, 1, 1, dtype=dtype), randn(gen, 8, dtype=dtype)
                        calls.append((row.conv, {"input": v, "weight": weight, "conv_bias": bias, **own}))
                    for name, call in calls:
                        op = getattr(torch.ops.fusedconv, name)
                        real = op(**call)
                        with FakeTensorMode() as mode:
                            fake = op(**map_tensors(call, mode.from_tensor))
                        meta = op(**map_tensors(call, lambda t: t.to("meta")))
                        for other in (fake, meta):
                            assert (other.shape, other.dtype, other.stride()) == (
                                real.shape,
                                real.dtype,
                                real.stride(),
                            )
                        assert meta.device.type == "meta"
                        assert fake.device == real.device
