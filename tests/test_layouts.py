"""Memory not laid out plainly: slices, transposes, expanded tensors, odd strides, batch 0, guarded pages."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chains_table import (
    CONV_ROWS,
    ROWS,
    Row,
    draw_own,
    generator,
    map_tensors,
    modules,
    randn,
    to_channels_last,
)
from fusedconv import _C, _conv
from fusedconv._conv import convolution, convolution_backward
from helpers import check_chain, check_conv, new_process, same_bits

all_rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
conv_rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)


def sliced(t: Tensor) -> Tensor:
    """Every other column of a wider tensor."""
    wide = t.new_full((*t.shape[:3], 2 * t.shape[3] + 1), float("nan"))
    wide[..., 1::2] = t
    return wide[..., 1::2]


def of_more_channels(t: Tensor) -> Tensor:
    """Some channels of a larger tensor: the planes are whole, the samples are not."""
    big = t.new_full((t.shape[0], t.shape[1] + 3, *t.shape[2:]), float("nan"))
    big[:, 2:-1] = t
    return big[:, 2:-1]


def of_more_channels_last(t: Tensor) -> Tensor:
    big = t.new_full((t.shape[0], t.shape[1] + 3, *t.shape[2:]), float("nan")).contiguous(
        memory_format=torch.channels_last
    )
    big[:, 2:-1] = t
    return big[:, 2:-1]


def transposed(t: Tensor) -> Tensor:
    return t.transpose(2, 3).contiguous().transpose(2, 3)


def batch_inside(t: Tensor) -> Tensor:
    return t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)


def with_offset(t: Tensor) -> Tensor:
    """An odd storage offset: no vector load is aligned."""
    flat = t.new_full((t.numel() + 3,), float("nan"))
    flat[3:] = t.flatten()
    return flat[3:].view(t.shape)


def cropped(t: Tensor) -> Tensor:
    big = t.new_full((*t.shape[:2], t.shape[2] + 4, t.shape[3] + 5), float("nan"))
    big[..., 1:-3, 2:-3] = t
    return big[..., 1:-3, 2:-3]


def flipped(t: Tensor) -> Tensor:
    return t.flip(3).contiguous().flip(3)


VIEWS = (
    sliced, of_more_channels, of_more_channels_last, transposed, batch_inside, with_offset, cropped, flipped,
)  # fmt: skip


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
@all_rows
def test_row_2_views_give_what_a_contiguous_copy_gives(row: Row, view: Callable[[Tensor], Tensor]) -> None:
    gen = generator(row.chain, view.__name__)
    for dtype in (torch.float32, torch.bfloat16):
        own = draw_own(row, 12, gen, dtype=dtype)
        v = randn(gen, 2, 12, 7, 11, dtype=dtype)
        assert same_bits(view(v), v)
        check_chain(row, view(v), own)
    if row.module:
        own = draw_own(row, 12, gen)
        x, weight = randn(gen, 2, 4, 9, 13), randn(gen, 12, 4, 3, 3) / 6
        check_conv(row, view(x), weight, randn(gen, 12), own, padding=1)
        check_conv(row, view(x), view(weight), randn(gen, 24)[::2], own)


@all_rows
def test_row_2_expanded_tensors(row: Row) -> None:
    """Stride 0 in the batch, the channels or the columns."""
    gen = generator(row.chain, "expanded")
    own = draw_own(row, 8, gen)
    for shape in ((1, 8, 6, 9), (2, 1, 6, 9), (2, 8, 6, 1), (1, 1, 1, 9)):
        v = randn(gen, *shape).expand(2, 8, 6, 9)
        check_chain(row, v, own)
        if row.module:
            check_conv(row, v, randn(gen, 8, 8, 3, 3) / 8, randn(gen, 1).expand(8), own)


@all_rows
def test_row_2_parameters_that_are_views(row: Row) -> None:
    """Parameters with a step, and expanded ones."""
    gen = generator(row.chain, "parameters")
    own = draw_own(row, 6, gen)
    stepped = map_tensors(own, lambda t: torch.stack([t, t.new_full(t.shape, float("nan"))], -1)[..., 0])
    v = randn(gen, 2, 6, 7, 9)
    assert same_bits(row.chain_op(v, stepped), row.chain_op(v, own))
    expanded = map_tensors(own, lambda t: t.flatten()[:1].view([1] * t.dim()).expand(t.shape))
    check_chain(row, v, expanded)


@all_rows
def test_row_2_tensors_with_the_negative_bit(row: Row) -> None:
    """The imaginary part of a conjugate: its memory holds the opposite sign."""
    gen = generator(row.chain, "negative")
    v = torch.complex(randn(gen, 2, 8, 6, 9), randn(gen, 2, 8, 6, 9)).conj().imag
    assert v.is_neg()
    own = draw_own(row, 8, gen)
    check_chain(row, v, own)
    if row.module:
        check_conv(row, v, randn(gen, 8, 8, 3, 3) / 8, None, own)


@conv_rows
def test_row_2_ambiguous_strides(row: Row) -> None:
    """Dimensions of size one, whose strides mean nothing: one channel, one row, one column, one sample."""
    gen = generator(row.chain, "ambiguous")
    for batch, c_in, c_out, height, width in (
        (1, 1, 4, 9, 9),
        (2, 1, 1, 5, 1),
        (1, 3, 6, 1, 8),
        (3, 1, 6, 4, 4),
    ):
        own = draw_own(row, c_out, gen, pool_size=1)
        weight = randn(gen, c_out, c_in, 1, 1)
        for layout in (torch.contiguous_format, torch.channels_last):
            x = randn(gen, batch, c_in, height, width).contiguous(memory_format=layout)
            check_conv(row, x, weight, None, own)
            odd = [99 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
            check_conv(row, x.as_strided(x.shape, odd), weight, None, own)


@conv_rows
def test_row_3_batch_of_zero(row: Row) -> None:
    """An empty output of the right shape, and zero gradients for parameters."""
    gen = generator(row.chain, "empty")
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.empty(0, 3, 9, 10).contiguous(memory_format=layout).requires_grad_()
        weight, bias = randn(gen, 8, 3, 3, 3).requires_grad_(), randn(gen, 8).requires_grad_()
        own = map_tensors(draw_own(row, 8, gen), Tensor.requires_grad_)
        y = row.conv_op(x, weight, bias, own)
        assert y.shape == row.plain_conv(x, weight, bias, own).shape
        assert (
            row.conv_op(x.detach(), weight.detach(), None, map_tensors(own, Tensor.detach)).shape == y.shape
        )
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        for parameter in (weight, bias, *(t for t in own.values() if isinstance(t, Tensor))):
            assert parameter.grad is not None
            assert not parameter.grad.any()


@all_rows
def test_row_3_batch_of_zero_without_conv(row: Row) -> None:
    own = draw_own(row, 8, generator(row.chain))
    v = torch.empty(0, 8, 9, 10)
    assert row.chain_op(v, own).shape == row.plain_chain(v, own).shape


@pytest.mark.slow
@conv_rows
def test_row_4_batch_beyond_65535(row: Row) -> None:
    gen = generator(row.chain, "batch")
    x, weight = torch.rand(70_001, 1, 3, 3, generator=gen), randn(gen, 4, 1, 2, 2)
    check_conv(row, x, weight, None, draw_own(row, 4, gen, pool_size=2))


@pytest.mark.slow
def test_row_4_offsets_beyond_two_to_the_31st() -> None:
    """Two samples that lie 2^31 elements apart: the second one must be right."""
    gen = generator("far")
    stride = 2**31 + 77
    store = torch.empty(stride + 8 * 9 * 10, dtype=torch.bfloat16)  # untouched pages cost nothing
    v = store.as_strided((2, 8, 9, 10), (stride, 90, 10, 1))
    v.copy_(randn(gen, 2, 8, 9, 10))
    for row in ROWS:
        own = draw_own(row, 8, gen, dtype=torch.bfloat16)
        assert same_bits(row.chain_op(v, own), row.chain_op(v.contiguous(), own))


@conv_rows
def test_memory_format_goes_through_the_module(row: Row) -> None:
    """A module moved to channels_last, with input of either format."""
    fused, plain = modules(row)
    fused = to_channels_last(fused)
    x = randn(generator("format"), 2, 3, 12, 13)
    with torch.no_grad():
        for layout in (torch.contiguous_format, torch.channels_last):
            y = fused(x.contiguous(memory_format=layout))
            torch.testing.assert_close(y, plain(x), rtol=1e-5, atol=1e-5)
            assert y.is_contiguous(memory_format=layout)


GUARDED = """
import ctypes, mmap, os, sys
from itertools import product
import torch
from chains_table import BY_NAME, draw_own, generator, map_tensors, randn
from fusedconv import _C, _conv

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
keep = []

def guarded(t, at_end):
    '''A copy of a tensor that ends, or begins, at a page that nobody may touch.'''
    t = t.detach()
    bytes_, size = t.numel() * t.element_size(), t.element_size()
    pages = (bytes_ + PAGE - 1) // PAGE
    region = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    offset = PAGE + (pages * PAGE - bytes_ if at_end else 0)
    channels_last = t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
    dense = t.permute(0, 2, 3, 1) if channels_last else t
    flat = torch.frombuffer(region, dtype=t.dtype, count=t.numel(), offset=offset)
    flat.copy_(dense.reshape(-1))
    for page in (start, start + (pages + 1) * PAGE):
        assert libc.mprotect(page, PAGE, 0) == 0
    keep.append(region)
    y = flat.view(dense.shape)
    return y.permute(0, 3, 1, 2) if channels_last else y

row = BY_NAME[sys.argv[1]]
assert _C.cpu_isa() == sys.argv[2]
LAYOUTS = (torch.contiguous_format, torch.channels_last)
SIZES = ((3, 8, 5, 17, 2), (1, 1, 3, 4, 1), (9, 17, 7, 9, 3), (8, 16, 6, 34, 2))
for at_end, layout, dtype in product((True, False), LAYOUTS, (torch.float32, torch.float64, torch.bfloat16)):
    for c_in, c_out, height, width, pool in SIZES:
        gen = generator(at_end, c_in, dtype)

        def make(*shape):
            t = randn(gen, *shape, dtype=dtype)
            return guarded(t.contiguous(memory_format=layout) if len(shape) == 4 else t, at_end)

        own = draw_own(row, c_out, gen, dtype=dtype, pool_size=pool)
        own = map_tensors(own, lambda t: guarded(t, at_end))
        row.chain_op(make(2, c_out, height, width), own)
        if row.module and dtype != torch.bfloat16:
            x, bias = make(2, c_in, height, width), make(c_out)
            for k, padding in ((1, 0), (3, 0), (3, 1), (3, 2)):
                row.conv_op(x, make(c_out, c_in, k, k), bias, own, padding=padding)
print("untouched")
sys.stdout.flush()
os._exit(0)  # the guarded pages cannot be unmapped in order
"""


@pytest.mark.parametrize("isa", _C.cpu_isas())
@all_rows
def test_nothing_is_read_outside_the_tensors(row: Row, isa: str) -> None:
    """Each tensor ends, then begins, at a page without access: one element read too far kills the process."""
    assert "untouched" in new_process(GUARDED, row.chain, isa, environment={"FUSEDCONV_CPU_ISA": isa})


# Of the input and the weight the sizes, groups, stride, padding, dilation.
HALF_CONVS: dict[str, tuple[Any, ...]] = {
    "windows of padding": ((1, 3, 31, 2), (24, 3, 5, 1), 1, (1, 2), (2, 4), (1, 3)),
    "windows around a row": ((2, 3, 2, 9), (4, 3, 2, 3), 1, (1, 1), (2, 1), (3, 1)),
    "columns of one pixel": ((3, 6, 31, 7), (3, 2, 4, 5), 3, (2, 3), (3, 1), (3, 2)),
    "a row of one pixel": ((2, 3, 1, 20), (4, 3, 3, 3), 1, (1, 1), (2, 1), (1, 1)),
    "two columns": ((2, 3, 20, 2), (16, 3, 5, 5), 1, (4, 4), (1, 4), (1, 1)),
    "depthwise": ((2, 8, 31, 31), (8, 1, 3, 3), 8, (1, 1), (2, 2), (2, 2)),
    "taps of padding": ((2, 3, 12, 9), (8, 3, 29, 1), 1, (1, 1), (14, 0), (1, 1)),
    "narrow pixels with a stride": ((3, 4, 16, 16), (8, 4, 1, 1), 1, (2, 2), (0, 0), (1, 1)),
    "one tap that meets the map": ((2, 3, 33, 33), (16, 3, 3, 3), 1, (2, 2), (40, 40), (40, 40)),
    "windows and taps that are far apart": ((3, 2, 16, 3), (9, 2, 2, 1), 1, (4097, 1), (40968, 1), (4097, 1)),
}
HALF_CONV = """
import ast, sys, torch, fusedconv
torch.manual_seed(0)
dtype = getattr(torch, sys.argv[1])
size, kernel, groups, *geometry = ast.literal_eval(sys.argv[2])
for _ in range(100):
    x = torch.randn(size).to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = (torch.randn(kernel) / 6).to(dtype).requires_grad_()
    bias = torch.randn(kernel[0]).to(dtype).requires_grad_()
    leaves = x, weight, bias
    y = torch.ops.fusedconv.conv2d_group_norm_silu(*leaves, 1, None, None, 1e-5, *geometry, groups)
    assert y.is_contiguous(memory_format=torch.channels_last)
    v = torch.conv2d(*[t.double() for t in leaves], *geometry, groups)
    expected = torch.nn.functional.silu(torch.nn.functional.group_norm(v, 1))
    assert (y.double() - expected).norm() < 8e-3 * expected.norm()
    grad = torch.randn_like(y)
    found, right = torch.autograd.grad(y, leaves, grad), torch.autograd.grad(expected, leaves, grad.double())
    for ours, exact in zip(found, right):
        assert (ours.double() - exact.double()).norm() <= 5e-2 * exact.double().norm()
    del y, found  # what they leave in memory is what a wrong conv would read
print("right")
"""


half_convs = pytest.mark.parametrize("case", HALF_CONVS)


@half_convs
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_conv_in_half_precision(dtype: str, case: str) -> None:
    """Where PyTorch's own crashes or is wrong, as what stands in memory will have it: so in a process of its own."""
    assert new_process(HALF_CONV, dtype, repr(HALF_CONVS[case])).strip() == "right"


class _ConvDtypes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in func.__name__:
            self.seen.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


# What PyTorch's conv is asked in, forward and for the input's gradient, and for the others': None where it is not asked.
ASKED: dict[str, Sequence[torch.dtype | None]] = {
    "windows of padding": (torch.float32, torch.float32),
    "windows around a row": (torch.float32, torch.float32),
    "columns of one pixel": (torch.float32, torch.float32),
    "a row of one pixel": (torch.float32, torch.float32),
    "two columns": (torch.float32, torch.float32),
    "depthwise": (torch.half, torch.float32),
    "taps of padding": (torch.float32, torch.float32),
    "narrow pixels with a stride": (torch.half, None),
    "one tap that meets the map": (torch.float32, None),
    "windows and taps that are far apart": (None, None),
}


@half_convs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_pytorch_fails_in_is_not_asked_of_it(dtype: torch.dtype, case: str) -> None:
    """Not every machine's oneDNN fails, so what is asked of PyTorch is looked at too."""
    size, kernel, groups, stride, padding, dilation = HALF_CONVS[case]
    geometry = stride, padding, dilation, groups
    x, weight = torch.randn(size).to(dtype), torch.randn(kernel).to(dtype)
    usual, of_weight = ([] if d is None else [dtype if d is torch.half else d] for d in ASKED[case])
    with _ConvDtypes() as forward:
        y = convolution(x, weight, None, *geometry, precision=None)
    assert forward.seen == usual
    for mask, expected in {
        (True, False, False): usual,
        (False, True, True): of_weight,
        (True, True, True): usual if usual == of_weight else [*usual, *of_weight],
    }.items():
        with _ConvDtypes() as backward:
            grads = convolution_backward(y, x, weight, *geometry, precision=None, mask=mask)
        assert backward.seen == expected
        assert [None if g is None else g.dtype for g in (y, *grads)] == [
            dtype,
            *[dtype if asked else None for asked in mask],
        ]


@pytest.mark.parametrize("size", [(3, 2, 8195, 1), (3, 2, 1, 8195)])
def test_long_columns_in_strides_are_not_asked_of_it_with_avx512(
    size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = ((5, 1), (0, 0), (1, 1), 1) if size[3] == 1 else ((1, 5), (0, 0), (1, 1), 1)
    x, weight = torch.randn(size), torch.randn(9, 2, 2, 1)
    weight = weight if size[3] == 1 else weight.mT
    expected = torch.conv2d(x.double(), weight.double(), None, *geometry)
    for has_avx512 in [True] if _conv._HAS_AVX512 else [False, True]:  # without the guard it would fail
        monkeypatch.setattr("fusedconv._conv._HAS_AVX512", has_avx512)
        with _ConvDtypes() as asked:
            y = convolution(x, weight, None, *geometry, precision=None)
            convolution_backward(y, x, weight, *geometry, precision=None, mask=[True, True, True])
        torch.testing.assert_close(y, expected.float())
        assert bool(asked.seen) != has_avx512


@half_convs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nor_where_autograd_differentiates_it(dtype: torch.dtype, case: str) -> None:
    """Under torch.func, and in double backward, autograd finds gradients of the conv by itself."""
    size, kernel, groups, *geometry = HALF_CONVS[case]
    x, weight = torch.randn(size).to(dtype), torch.randn(kernel).to(dtype)
    allowed = set(ASKED[case][1:]) - {None}

    def total(weight: Tensor) -> Tensor:
        call = torch.ops.fusedconv.conv2d_relu_hardswish
        y: Tensor = call(x, weight, None, *geometry, groups)
        return y.square().sum()

    with _ConvDtypes() as asked:
        torch.func.grad(total)(weight)
    assert set(asked.seen) == allowed

    weight.requires_grad_()
    (grad,) = torch.autograd.grad(total(weight), weight, create_graph=True)
    with _ConvDtypes() as asked:
        grad.square().sum().backward()
    assert set(asked.seen) == allowed


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
def test_gradients_of_groups_in_float64_of_any_strides(order: tuple[int, int, int]) -> None:
    """PyTorch's are wrong for some of them. ``order``: of channels, rows and columns in memory."""
    sizes = 4, 9, 3
    x = torch.randn([sizes[i] for i in order], dtype=torch.float64)
    x = x.permute([order.index(i) for i in range(3)])[None]
    weight = torch.randn(4, 2, 3, 3, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    for geometry in (((1, 1), (1, 1), (1, 1)), ((10, 1), (9, 0), (9, 1))):
        y = convolution(x, weight, None, *geometry, 2, precision=None)
        grad = torch.randn_like(y)
        found = convolution_backward(grad, x, weight, *geometry, 2, precision=None, mask=[True, True, True])
        for half in range(2):
            of = slice(2 * half, 2 * half + 2)
            parts = [t.contiguous().requires_grad_() for t in (x[:, of], weight[of])]
            expected = torch.conv2d(parts[0], parts[1], None, *geometry)
            torch.testing.assert_close(y[:, of], expected, rtol=1e-12, atol=1e-12)
            right = torch.autograd.grad(expected, parts, grad[:, of].contiguous())
            of_x, of_weight, _ = cast(list[Tensor], found)
            for ours, exact in zip((of_x[:, of], of_weight[of]), right, strict=True):
                torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
