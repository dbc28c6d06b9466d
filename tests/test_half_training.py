"""Training steps on the CPU over random geometries: what PyTorch's conv crashes in, corrupts memory by or gets wrong."""

from __future__ import annotations

from hypothesis import settings

from helpers import new_process

# In a process of its own, which prints each case before it runs it: the last one is that which killed it.
STEPS = """
import random, sys
import torch
from torch import Tensor
import fusedconv

BOUNDS = {torch.bfloat16: (8e-3, 3e-2), torch.float16: (1e-3, 4e-3), torch.float32: (1e-5, 1e-5)}
CHANNELS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 24, 32)


def draw(r: random.Random):
    kernel = [r.choice((1, 1, 2, 3, 3, 4, 5, 7, 29)) for _ in range(2)]
    dilation = [r.choice((1, 1, 1, 2, 3, 6)) for _ in range(2)]
    padding = [r.choice((0, 1, k // 2, k - 1, k, d * (k - 1) // 2)) for k, d in zip(kernel, dilation)]
    stride = [r.choice((1, 1, 1, 2, 3, 5)) for _ in range(2)]
    reach = [d * (k - 1) for k, d in zip(kernel, dilation)]
    size = [max(n - 2 * p + 1, 1) + r.choice((0, 0, 1, 2, 4, 7, 11, 20)) for n, p in zip(reach, padding)]
    if r.random() < 0.2:
        kernel, padding, dilation = [1, 1], [0, 0], [1, 1]
    groups = r.choice((1, 1, 1, 2, 3))
    inner, outer = r.choice(CHANNELS), r.choice(CHANNELS)
    if r.random() < 0.2:
        groups, inner, outer = inner, 1, r.choice((1, 2))
    batch = r.choice((1, 2, 3, 17))
    return [batch, inner * groups, *size], [outer * groups, inner, *kernel], stride, padding, dilation, groups


def close(name: str, ours: Tensor, right: Tensor, scale: Tensor, bound: float) -> None:
    assert ours.shape == right.shape, name
    error = (ours.double() - right).norm()
    assert error <= bound * (right.norm() + scale.norm() / 50), f"{name}: {error / right.norm()}"


def step(r: random.Random) -> None:
    size, kernel, *geometry = draw(r)
    dtype, layout = r.choice(list(BOUNDS)), r.choice((torch.contiguous_format, torch.channels_last))
    print(size, kernel, *geometry, dtype, layout, flush=True)
    fan_in = kernel[1] * kernel[2] * kernel[3]
    x = torch.randn(size).to(dtype).contiguous(memory_format=layout)
    weight = (torch.randn(kernel) * 0.2 / fan_in**0.5).to(dtype).contiguous(memory_format=layout)
    bias = torch.full(kernel[:1], 1.5).to(dtype)  # keeps v away from hardswish's kinks
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = torch.ops.fusedconv.conv2d_relu_hardswish(*leaves, *geometry)
    grad = torch.randn(y.shape).to(dtype)
    found = torch.autograd.grad(y, leaves, grad)

    exact = [t.detach().double().contiguous().requires_grad_() for t in leaves]
    v = torch.conv2d(*exact, *geometry)
    expected = torch.nn.functional.hardswish(v.relu())
    right = torch.autograd.grad(expected, exact, grad.double())
    by_output, by_gradient = BOUNDS[dtype]
    close("output", y, expected, expected, by_output)
    scales = torch.autograd.grad(torch.conv2d(*[t.abs() for t in exact], *geometry), exact, grad.double().abs())
    for name, *pair, s in zip(("input", "weight", "bias"), found, right, scales):
        close(name, *pair, s, by_gradient)


for seed in range(int(sys.argv[1])):
    torch.manual_seed(seed)
    torch.set_num_threads(1 + seed % 2)
    step(random.Random(seed))
print("right")
"""
# Freed memory is NaN: what was read beyond a tensor shows.
ENVIRONMENT = {"MALLOC_PERTURB_": "255", "OMP_WAIT_POLICY": "passive"}


def test_training_over_random_geometries() -> None:
    """`HYPOTHESIS_PROFILE=fuzz` draws 2,000 of them."""
    count = 2 * settings().max_examples
    assert new_process(STEPS, count, environment=ENVIRONMENT, timeout=3600).endswith("right\n")
