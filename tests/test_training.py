"""Steps of training as users write them: each gives what the plain model gives, and computes no more than it must."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch._inductor.config
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from chains_table import CONV_ROWS, Plain, Row, module_input, modules, to_channels_last

rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])

RATE = 1e-2


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def models(row: Row, dtype: torch.dtype, device: str = "cpu") -> tuple[nn.Module, Plain]:
    fused, plain = modules(row, padding=1)
    return fused.to(device, dtype), plain.to(device, dtype)


def batch(step: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """With maps that are large enough for the kernels of backward."""
    return module_input(3, size=20, seed=step).to(device, dtype)


class Seen(TorchDispatchMode):
    """Which of our operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedconv":
            self.ours.append(str(func))
        return func(*args, **(kwargs or {}))


def forward_of(row: Row) -> Any:
    """The operator that training calls."""
    name = f"_{row.conv}_with_statistics" if row.has_norm else row.conv
    return getattr(torch.ops.fusedconv, name).default


def loss_of(y: Tensor) -> Tensor:
    return (y - 0.3).square().mean()


def same_parameters(fused: nn.Module, plain: nn.Module, tolerance: float) -> None:
    for name, right in plain.named_parameters():
        got = fused.get_parameter(name).detach()
        torch.testing.assert_close(got, right.detach(), rtol=tolerance, atol=tolerance)


def same_gradients(fused: nn.Module, plain: nn.Module) -> None:
    """In float64."""
    for name, parameter in plain.named_parameters():
        got, right = fused.get_parameter(name).grad, parameter.grad
        assert (got is None) == (right is None), name
        if got is not None:
            torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-11)


# ---- mixed precision ----


@devices
@rows
def test_autocast_and_grad_scaler(row: Row, device: str) -> None:
    """Three steps in float16; then one whose gradients overflow, which the scaler must see and skip."""
    results = []
    for model in models(row, torch.float32, device):
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        scaler = torch.amp.GradScaler(device, init_scale=128.0)

        def step(
            x: Tensor,
            model: nn.Module = model,
            optimizer: torch.optim.SGD = optimizer,
            scaler: torch.amp.GradScaler = scaler,
        ) -> float:
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16):
                loss = loss_of(model(x).float())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return float(loss.detach())

        losses = [step(batch(i, torch.float32, device)) for i in range(3)]
        assert scaler.get_scale() == 128.0
        trained = copy.deepcopy(model)
        step(torch.full_like(batch(3, torch.float32, device), torch.inf))
        assert scaler.get_scale() == 64.0
        same_parameters(model, trained, 0.0)
        results.append((model, losses))
    (fused, ours), (plain, theirs) = results
    assert ours == pytest.approx(theirs, rel=5e-3)
    same_parameters(fused, plain, 5e-3)


# ---- layouts, frozen parts, checkpoints ----


@devices
@rows
def test_channels_last_training(row: Row, device: str) -> None:
    """Model and input in channels_last: so are the output, and the gradient of the conv's weight."""
    fused, plain = models(row, torch.float64, device)
    to_channels_last(fused)
    optimizers = [torch.optim.SGD(m.parameters(), RATE, momentum=0.9) for m in (fused, plain)]
    for i in range(3):
        x = batch(i, torch.float64, device)
        ours, theirs = fused(x.contiguous(memory_format=torch.channels_last)), plain(x)
        if ours.shape[1] > 1:  # a map of one channel has no format of its own
            assert ours.is_contiguous(memory_format=torch.channels_last)
        for optimizer, y in zip(optimizers, (ours, theirs), strict=True):
            optimizer.zero_grad()
            loss_of(y).backward()
            optimizer.step()
        same_gradients(fused, plain)
    gradient = fused.get_parameter("conv.weight").grad
    assert gradient is not None
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    same_parameters(fused, plain, 1e-9)


@pytest.mark.parametrize("frozen", ["conv", "all but conv", "norm"])
@rows
def test_frozen_parts(row: Row, frozen: str) -> None:
    """They get no gradient and stay as they are, also under torch.compile; the others get what they would get anyway."""
    is_frozen: Callable[[str], bool] = {
        "conv": lambda name: name.startswith("conv."),
        "all but conv": lambda name: not name.startswith("conv."),
        "norm": lambda name: name.startswith("group_norm."),
    }[frozen]
    fused, plain = models(row, torch.float64)
    trained = [n for n, _ in fused.named_parameters() if not is_frozen(n)]
    for model in (fused, plain):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_frozen(name))
    x = batch(0, torch.float64)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    if trained:
        loss_of(plain(x)).backward()
    for run in (fused, compiled):
        y = run(x)
        assert y.requires_grad == bool(trained)
        if trained:
            fused.zero_grad()
            loss_of(y).backward()
            assert [n for n, p in fused.named_parameters() if p.grad is not None] == trained
            same_gradients(fused, plain)


@pytest.mark.parametrize("use_reentrant", [False, True])
@rows
def test_gradient_checkpointing(row: Row, use_reentrant: bool) -> None:
    """Around the module, whose forward runs a second time in backward."""
    fused, plain = models(row, torch.float64)
    x, right = (batch(0, torch.float64).requires_grad_() for _ in range(2))
    calls: list[None] = []

    def run(x: Tensor) -> Tensor:
        calls.append(None)
        return cast(Tensor, fused(x))

    y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=use_reentrant)
    assert len(calls) == 1
    loss_of(y).backward()
    assert len(calls) == 2
    loss_of(plain(right)).backward()
    torch.testing.assert_close(x.grad, right.grad, rtol=1e-9, atol=1e-11)
    same_gradients(fused, plain)


@rows
def test_selective_checkpointing(row: Row) -> None:
    """A policy that names what training calls saves its output: backward does not run forward again."""
    fused, plain = models(row, torch.float64)
    contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [forward_of(row)])
    x = batch(0, torch.float64)
    y = torch.utils.checkpoint.checkpoint(fused, x, use_reentrant=False, context_fn=contexts)
    with Seen() as seen:
        loss_of(y).backward()
    assert seen.ours == [f"fusedconv._{row.conv}_backward.default"]
    loss_of(plain(x)).backward()
    same_gradients(fused, plain)


@rows
def test_a_graph_of_training_is_differentiable(row: Row) -> None:
    """make_fx on leaves sees what is below autograd."""
    fused, plain = models(row, torch.float64)
    x = batch(0, torch.float64)
    traced = make_fx(fused)(x)
    assert any(node.target is forward_of(row) for node in traced.graph.nodes)
    loss_of(traced(x)).backward()
    loss_of(plain(x)).backward()
    leaf = x.clone().requires_grad_()
    right = torch.autograd.grad(loss_of(fused(leaf)), leaf)
    assert torch.equal(torch.autograd.grad(loss_of(traced(leaf)), leaf)[0], right[0])


@rows
def test_a_graph_with_its_backward_under_torch_func(row: Row) -> None:
    """Where a transform is not of the graph's arguments its kernels run; where it is, an error says so."""
    fused, _ = models(row, torch.float64)
    fused.requires_grad_(False)  # or the graph's backward would be differentiated
    x = batch(0, torch.float64).requires_grad_()

    def gradient(x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(loss_of(fused(x)), x)
        return found

    traced = make_fx(gradient)(x)
    direction = batch(1, torch.float64)  # the sum of a norm's gradients would be nothing
    right = (gradient(x) * direction).sum()
    constant, s = x.detach(), torch.tensor(2.0, dtype=torch.float64)

    def scaled(s: Tensor) -> Tensor:
        return cast(Tensor, (traced(constant) * direction * s).sum())

    torch.testing.assert_close(torch.func.grad(scaled)(s), right)
    torch.testing.assert_close(torch.func.jvp(scaled, (s,), (s,))[1], 2 * right)
    with pytest.raises(NotImplementedError, match=rf"{row.conv}: a traced graph .* by torch\.func"):
        torch.func.grad(lambda x: traced(x).sum())(constant)


# ---- torch.compile, torch.func ----


@rows
def test_compiled_loss_and_its_backward(row: Row) -> None:
    """Both graphs hold the operators whole: neither forward nor backward falls into PyTorch's chain."""
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return make_boxed_func(graph.forward)

    fused, plain = models(row, torch.float64)

    def loss(x: Tensor) -> Tensor:
        return loss_of(fused(x))

    x = batch(0, torch.float64)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch.compile(loss, fullgraph=True, backend=backend)(x).backward()
    loss_of(plain(x)).backward()
    same_gradients(fused, plain)
    ours = [[name for name in graph if name.startswith("fusedconv.")] for graph in graphs]
    assert ours == [[str(forward_of(row))], [f"fusedconv._{row.conv}_backward.default"]]
    others = " ".join(name for graph in graphs for name in graph if not name.startswith("fusedconv."))
    assert not any(
        word in others for word in ("convolution", "group_norm", "sigmoid", "relu", "max_pool", "tanh")
    )


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"),
    reason="this torch compiles no gradients in a graph",
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_whole_step_compiles(backend: str) -> None:
    """Forward, loss, backward and the update of every model in one graph."""
    pairs = [models(row, torch.float64) for row in CONV_ROWS]
    fused, plain = (nn.ModuleList(side) for side in zip(*pairs, strict=True))

    def step(all_models: nn.ModuleList, x: Tensor) -> Tensor:
        loss = torch.stack([loss_of(model(x)) for model in all_models]).sum()
        parameters = list(all_models.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=RATE)
        return loss.detach()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    # What another version of this package compiled does not count.
    no_caches = torch._inductor.config.patch(force_disable_caches=True)
    with torch._dynamo.config.patch(trace_autograd_ops=True), no_caches:
        for i in range(3):
            x = batch(i, torch.float64)
            torch.testing.assert_close(compiled(fused, x), step(plain, x), rtol=1e-9, atol=1e-9)
    same_parameters(fused, plain, 1e-9)


@rows
def test_functional_call_with_grad(row: Row) -> None:
    """torch.func's way of a step, eager and compiled."""
    fused, plain = models(row, torch.float64)
    x = batch(0, torch.float64)

    def step(model: nn.Module) -> Callable[[dict[str, Tensor]], tuple[dict[str, Tensor], Tensor]]:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return loss_of(torch.func.functional_call(model, parameters, (x,)))

        return torch.func.grad_and_value(loss)

    parameters = {name: p.detach() for name, p in plain.named_parameters()}
    right, loss = step(plain)(parameters)
    for run in (step(fused), torch.compile(step(fused), backend="aot_eager", fullgraph=True)):
        got, ours = run(parameters)
        torch.testing.assert_close(ours, loss, rtol=1e-9, atol=1e-9)
        for name, gradient in right.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-9)
