"""What forward keeps for backward: mean and deviation of each group of a norm, whatever kernel runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chains_table import CONV_ROWS, ROWS, Own, Row, draw_own, generator, map_tensors, randn
from cuda_conv import forget
from fusedconv import _register
from helpers import failure, on, profile, same_bits

norm_rows = pytest.mark.parametrize("row", [row for row in ROWS if row.has_norm], ids=lambda row: row.chain)
conv_rows = pytest.mark.parametrize(
    "row", [row for row in CONV_ROWS if row.has_norm], ids=lambda row: row.chain
)
formats = pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"]
)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])

# Groups that share a block or a thread, groups that are cut, and more than are kept at a time.
MAPS = [(2, 6, 5, 7), (1, 4, 160, 200), (2, 72, 9, 11), (2, 150, 33, 32), (3, 8, 300, 301)]
# Input channels, a map, and output channels: samples that stay on chip, that do not, and several blocks of channels.
CONVS = [(3, 2, 9, 11, 6), (8, 3, 66, 70, 64), (8, 1, 258, 258, 32), (16, 2, 40, 41, 80)]


def expected_statistics(row: Row, v: Tensor, own: Own) -> Tensor:
    """By float64, of what the unfused chain gives to its norm. On the CPU: compute-sanitizer finds fault with PyTorch's
    own reductions on CUDA."""
    seen: list[Tensor] = []

    def group_norm(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    row.steps(v.double(), SimpleNamespace(**map_tensors(own, Tensor.double), group_norm=group_norm))
    groups = seen[0].reshape(v.shape[0], own["num_groups"], -1)
    deviation = (groups.var(2, correction=0) + own["eps"]).sqrt()
    return torch.stack([groups.mean(2), 1 / deviation], 2)


def check_statistics(ours: Tensor, expected: Tensor) -> None:
    """A mean to float32's digits beside the deviation, which a mean near zero is much smaller than."""
    assert ours.dtype is torch.float64
    assert ours.shape == expected.shape
    mean, inverse_deviation = expected.unbind(2)
    assert float(((ours[..., 0] - mean) * inverse_deviation).abs().max()) <= 1e-5
    torch.testing.assert_close(ours[..., 1], inverse_deviation, rtol=1e-5, atol=0)


@devices
@pytest.mark.sanitizer
@formats
@norm_rows
def test_statistics_of_the_chain(row: Row, layout: torch.memory_format, device: str) -> None:
    gen = generator(row.chain, "statistics")
    op = getattr(torch.ops.fusedconv, f"_{row.chain}_with_statistics")
    for shape in MAPS:
        v = (3 * randn(gen, *shape) + 1).to(device).contiguous(memory_format=layout)
        own = on(draw_own(row, shape[1], gen), device)
        y, statistics = op(v, *own.values())
        check_statistics(statistics.cpu(), expected_statistics(row, v.cpu(), on(own, "cpu")))
        assert same_bits(y, row.chain_op(v, own))


@devices
@formats
@conv_rows
@pytest.mark.usefixtures("source")
def test_statistics_of_the_conv(row: Row, layout: torch.memory_format, device: str) -> None:
    gen = generator(row.chain, "conv statistics")
    op = getattr(torch.ops.fusedconv, f"_{row.conv}_with_statistics")
    for in_channels, n, height, width, out_channels in CONVS:
        x = randn(gen, n, in_channels, height, width).to(device).contiguous(memory_format=layout)
        weight, bias = randn(gen, out_channels, in_channels, 3, 3).to(device) / 9, randn(gen, out_channels)
        bias = bias.to(device)
        own = on(draw_own(row, out_channels, gen), device)
        y, statistics = op(x, weight, bias, *own.values(), precision="ieee")
        v = F.conv2d(x.cpu().double(), weight.cpu().double(), bias.cpu().double())
        check_statistics(statistics.cpu(), expected_statistics(row, v, on(own, "cpu")))
        assert same_bits(y, row.conv_op(x, weight, bias, own, precision="ieee"))


@norm_rows
def test_backward_makes_no_gradient_for_them(row: Row) -> None:
    """Not even zeros, which on a GPU would be one more kernel."""
    gen = generator(row.chain, "zeros")
    v, own = randn(gen, 2, 8, 24, 24).requires_grad_(), draw_own(row, 8, gen)
    y = row.chain_op(v, own)
    ran = profile(lambda: torch.autograd.grad(y, v, torch.ones_like(y)))
    assert f"fusedconv::_{row.chain}_backward" in ran.operators
    assert not {"aten::zeros", "aten::zero_"} & set(ran.operators)


@norm_rows
@pytest.mark.parametrize("given", [None, torch.zeros(1, 2, 2), torch.zeros(1, 4, 2, dtype=torch.float64)])
def test_backward_takes_no_others(row: Row, given: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels trust dtype and size."""
    monkeypatch.setenv("FUSEDCONV_CPU_PATH", "direct")
    forget()
    own = draw_own(row, 4, generator(row.chain, "shape"), groups=2)
    v = torch.zeros(1, 4, 4, 4)
    grad = torch.ones_like(row.chain_op(v, own))
    backward = _register.OPERATORS[row.chain].backward
    mask = [True] * len(backward.operator.tensors)
    kind, text = failure(lambda: backward.op(grad, v, *own.values(), given, mask))
    assert kind is RuntimeError
    assert "statistics must be" in text
    forget()
