"""What each process of the distributed tests does, and what starts the processes.

Every function here runs on all ranks; an assertion that fails on one of them fails the test, with its traceback.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from chains_table import (
    CONV_ROWS,
    ROWS,
    Own,
    Row,
    draw_own,
    generator,
    map_tensors,
    module_input,
    modules,
    randn,
)

WORLD = 2
Body = Callable[[int, str], None]  # takes the rank and the type of its device


def on_two_ranks(body: Body, backend: str, folder: Path, timeout: float = 150) -> None:
    """Runs ``body`` in two processes; raises what one of them raises, and leaves neither behind."""
    context = spawn(_rank, (body, backend, str(folder / "store")), nprocs=WORLD, join=False)
    deadline = time.monotonic() + timeout
    try:
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"{body.__name__} on {backend} took more than {timeout} s"
    finally:
        for process in context.processes:
            process.kill()


def _rank(rank: int, body: Body, backend: str, store: str) -> None:
    torch.set_num_threads(1)
    device = "cuda" if backend == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    body(rank, device)
    dist.destroy_process_group()
    # Threads of gloo may let go of a tensor while Python ends, which aborts the process: so Python does not end.
    os._exit(0)


# ---- models ----


def samples(seed: int, device: str, dtype: torch.dtype) -> Tensor:
    """A batch for both ranks; the maps are large enough for the kernels of backward."""
    return module_input(4, size=20, seed=seed).to(device, dtype)


def models(row: Row, device: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Two of the same weights: one to be distributed, one that stays whole."""
    fused = modules(row, padding=1)[0].to(device, dtype)
    return fused, copy.deepcopy(fused)


def loss_of(y: Tensor) -> Tensor:
    return (y - 0.3).square().mean()


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
    return {name: g for (name, _), g in zip(model.named_parameters(), found, strict=True)}


def whole(tensor: Any) -> Tensor:
    result: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result


def close(got: Tensor, right: Tensor) -> None:
    """In float64: the sums of two halves differ from those of the whole batch in their last bits."""
    torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-13)


def check_training(
    distribute: Callable[[nn.Module], nn.Module], rank: int, device: str, *, same_bits: bool
) -> None:
    """A rank with half of the batch trains the model that one process trains with all of it.

    ``same_bits``: our conv runs, and backward does the same in every process.
    """
    for row in CONV_ROWS:
        # Of two addends the order does not matter and a half is exact, so the mean has the bits of its halves.
        model, single = models(row, device, torch.float32)
        halves = samples(0, device, torch.float32).chunk(WORLD)
        distributed = distribute(model)
        y = distributed(halves[rank])
        with torch.no_grad():
            expected = single(torch.cat(halves)).chunk(WORLD)[rank]
        assert not same_bits or torch.equal(y, expected), row.chain
        torch.testing.assert_close(y.detach(), expected, rtol=2e-5, atol=2e-5)
        loss_of(y).backward()
        first, second = (gradients(single, half) for half in halves)
        for name, parameter in model.named_parameters():
            got, right = whole(parameter.grad), (first[name] + second[name]) / 2
            assert not same_bits or torch.equal(got, right), f"{row.chain}: {name}"
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)

        model, single = models(row, device, torch.float64)
        distributed = distribute(model)
        optimizers = [torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9) for m in (model, single)]
        for step in range(3):
            x = samples(step, device, torch.float64)
            losses = loss_of(distributed(x.chunk(WORLD)[rank])), loss_of(single(x))
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            mean = losses[0].detach() / WORLD
            dist.all_reduce(mean)
            close(mean, losses[1].detach())
        trained = dict(single.named_parameters())
        for name, parameter in model.named_parameters():
            close(whole(parameter.detach()), trained[name].detach())


def ddp(rank: int, device: str) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, device_ids=[rank] if device == "cuda" else None)

    check_training(wrap, rank, device, same_bits=device == "cpu")
    for row in CONV_ROWS:  # nobody waits for the gradient of what is not trained
        model, single = models(row, device, torch.float64)
        for m in (model, single):
            m.get_parameter("conv.weight").requires_grad_(False)
        distributed, x = wrap(model), samples(0, device, torch.float64)
        loss_of(distributed(x.chunk(WORLD)[rank])).backward()
        loss_of(single(x)).backward()
        for name, parameter in model.named_parameters():
            right = single.get_parameter(name).grad
            assert (parameter.grad is None) == (right is None) == (name == "conv.weight")
            if parameter.grad is not None and right is not None:
                close(parameter.grad, right)


def fsdp(rank: int, device: str) -> None:
    """Sharded as a whole the model is gathered before its own forward, which then runs the operator with the conv."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (WORLD,))

    def shard(model: Any) -> nn.Module:
        fully_shard(model, mesh=mesh)
        return cast(nn.Module, model)

    def shard_whole(model: Any) -> nn.Module:
        sharded: Any = shard(model)
        assert sharded._operator.startswith("conv2d_")
        return cast(nn.Module, sharded)

    def shard_parts(model: Any) -> nn.Module:
        """The conv by itself: it must be called, for its hooks gather its weight."""
        shard(model.conv)
        return shard(model)

    check_training(shard_whole, rank, device, same_bits=device == "cpu")
    check_training(shard_parts, rank, device, same_bits=False)


# ---- DTensor ----


def conv_arguments(row: Row, device: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], Own]:
    gen = generator(row.chain, "dtensor")
    conv = {"x": randn(gen, 4, 3, 20, 21), "weight": randn(gen, 8, 3, 3, 3) / 5, "conv_bias": randn(gen, 8)}
    conv = {name: t.to(device, dtype) for name, t in conv.items()}
    return conv, map_tensors(draw_own(row, 8, gen), lambda t: t.to(device, dtype))


class Mesh:
    """Places tensors on both ranks."""

    def __init__(self, device: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

        mesh = init_device_mesh(device, (WORLD,))
        self.shard: Callable[..., Any] = lambda t, dim=0: distribute_tensor(t, mesh, [Shard(dim)])
        self.replicate: Callable[..., Any] = lambda t: distribute_tensor(t, mesh, [Replicate()])
        self.replicate_module: Callable[..., Any] = lambda module: distribute_module(module, mesh)


def dtensor(rank: int, device: str) -> None:
    """Forward and backward on shards of the batch communicate nothing, and give what one process gives."""
    from torch.distributed.tensor import Partial, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = Mesh(device)
    for row in CONV_ROWS:
        for dtype, padding in ((torch.float32, 0), (torch.float32, 1), (torch.float64, 1)):
            conv, own = conv_arguments(row, device, dtype)
            tensors = [*conv, *[name for name, value in own.items() if isinstance(value, Tensor)]]

            def run(values: Own, own: Own = own, padding: int = padding, row: Row = row) -> Tensor:
                given = {name: values.get(name, value) for name, value in own.items()}
                x, weight, conv_bias = (values[name] for name in ("x", "weight", "conv_bias"))
                return row.conv_op(x, weight, conv_bias, given, padding=padding)

            values = {name: (conv | own)[name] for name in tensors}
            placed = {n: mesh.shard(t) if n == "x" else mesh.replicate(t) for n, t in values.items()}
            leaves = [t.requires_grad_() for t in placed.values()]
            with CommDebugMode() as communication:
                y: Any = run(placed)
                found: Any = torch.autograd.grad(y.square().sum(), leaves)
            assert communication.get_total_counts() == 0
            assert y.placements == (Shard(0),)
            assert [g.placements for g in found] == [(Shard(0),), *[(Partial(),)] * (len(tensors) - 1)]

            halves = []
            for half in conv["x"].chunk(WORLD):
                leaves = [t.detach().clone().requires_grad_() for t in (values | {"x": half}).values()]
                part = run(dict(zip(tensors, leaves, strict=True)))
                halves.append((part, *torch.autograd.grad(part.square().sum(), leaves)))
            expected = run(values)
            assert y.shape == expected.shape
            assert torch.equal(y.full_tensor(), expected)
            for name, got, one, other in zip(tensors, found, *[h[1:] for h in halves], strict=True):
                right = torch.cat([one, other]) if name == "x" else one + other
                torch.testing.assert_close(got.full_tensor(), right, rtol=1e-5, atol=1e-4)
                assert device == "cuda" or torch.equal(got.full_tensor(), right), f"{row.chain}: {name}"
            if dtype == torch.float64:
                leaves = [t.detach().clone().requires_grad_() for t in values.values()]
                right_all = torch.autograd.grad(
                    run(dict(zip(tensors, leaves, strict=True))).square().sum(), leaves
                )
                for got, right in zip(found, right_all, strict=True):
                    torch.testing.assert_close(got.full_tensor(), right, rtol=1e-10, atol=1e-10)


def dtensor_of_other_calls(rank: int, device: str) -> None:
    """What is not asked for; other placements; batches that do not divide; no gradient of a gradient."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = Mesh(device)
    for row in ROWS:
        gen = generator(row.chain, "chain")
        v = randn(gen, 4, 8, 18, 19).to(device)
        own = map_tensors(draw_own(row, 8, gen), lambda t: t.to(device))
        placed = map_tensors(own, mesh.replicate)
        with torch.inference_mode():
            y: Any = row.chain_op(mesh.shard(v), placed)
            assert torch.equal(y.to_local(), row.chain_op(v, own).chunk(WORLD)[rank])
        assert y.placements == (Shard(0),)
        half = mesh.shard(v.bfloat16())
        for dtype in (None, torch.float32, None):  # DTensor remembers what the output looks like
            y = row.chain_op(half, placed, output_dtype=dtype)
            right = row.chain_op(v.bfloat16(), own, output_dtype=dtype)
            assert y._spec.tensor_meta.dtype == y.to_local().dtype == right.dtype
        for name in (name for name, value in own.items() if isinstance(value, Tensor)):
            leaf = placed[name].detach().requires_grad_()
            row.chain_op(mesh.shard(v), placed | {name: leaf}).sum().backward()
            assert leaf.grad.placements == (Partial(),)
            single = own[name].clone().requires_grad_()
            row.chain_op(v, own | {name: single}).sum().backward()
            torch.testing.assert_close(leaf.grad.full_tensor(), single.grad, rtol=1e-4, atol=1e-3)

    for row in CONV_ROWS:
        conv, own = conv_arguments(row, device, torch.float32)
        x, weight = conv["x"], conv["weight"]
        placed = map_tensors(own, mesh.replicate)
        placed_weight = mesh.replicate(weight)
        for batch, dim, placement in ((4, 3, Replicate()), (3, 0, Shard(0)), (1, 0, Replicate())):
            y = row.conv_op(mesh.shard(x[:batch], dim), placed_weight, None, placed)
            assert y.placements == (placement,)
            assert torch.equal(y.full_tensor(), row.conv_op(x[:batch], weight, None, own))
        leaf = mesh.shard(x).requires_grad_()
        y = row.conv_op(leaf, placed_weight, None, placed)
        (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
            torch.autograd.grad(first.square().sum(), leaf)


def dtensor_of_modules(rank: int, device: str) -> None:
    """A module whose parameters are DTensors runs the operator with the conv, under autocast too."""
    mesh = Mesh(device)
    for row in CONV_ROWS:
        model, single = models(row, device, torch.float32)
        model = mesh.replicate_module(model)
        x = samples(0, device, torch.float32)
        for autocast in (False, True):
            results: list[Any] = []
            for m, given in ((model, mesh.shard(x)), (single, x)):
                m.zero_grad()
                with torch.autocast(device, torch.bfloat16, enabled=autocast):
                    assert cast(Any, m)._operator.startswith("conv2d_")
                    y = m(given)
                y.float().square().sum().backward()
                results.append(y.detach())
            y, expected = whole(results[0]), results[1]
            assert y.dtype == expected.dtype
            if autocast:  # PyTorch's conv, whose rounding may depend on the batch
                torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
                continue
            assert torch.equal(y, expected)
            largest = max(float(p.grad.norm()) for p in single.parameters() if p.grad is not None)
            for name, parameter in model.named_parameters():
                gradient = single.get_parameter(name).grad
                assert gradient is not None
                difference = float((whole(parameter.grad) - gradient).norm())
                assert difference <= 1e-5 * max(float(gradient.norm()), 1e-3 * largest), name


def failing(rank: int, device: str) -> None:
    if rank == 1:
        raise RuntimeError("this rank fails")
    dist.barrier()
