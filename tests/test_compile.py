"""opcheck, torch.compile, torch.export and TorchScript saved and loaded in new processes (rows 26, 27)."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import fusedconv
from chains_table import (
    CONV_ROWS,
    ROWS,
    Own,
    Row,
    draw_own,
    fused_keywords,
    generator,
    map_tensors,
    module_arguments,
    module_input,
    modules,
    randn,
)  # fmt: skip
from helpers import new_process

rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
scriptable = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="torch.jit is deprecated from Python 3.14 on"
)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


since_2_9 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9), reason="what an older torch gives differs"
)


class All(nn.Module):
    """One model with every fused module, so that one compilation serves them all."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.models = nn.ModuleList([modules(row, 3, 8, padding=1)[0 if fused else 1] for row in CONV_ROWS])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [model(x) for model in self.models]


def close(got: Any, right: Any) -> None:
    torch.testing.assert_close(list(got), list(right), rtol=2e-5, atol=2e-5)


def test_modules_compiled_one_by_one() -> None:
    """torch.compile counts recompilations by a function's code, and after some runs the rest eagerly: each class of
    ours has code of its own."""
    counter = torch._dynamo.testing.CompileCounter()
    compiled = [torch.compile(modules(row, 3, 8, padding=1)[0], backend=counter) for row in CONV_ROWS]
    for size in (10, 14):
        for trains in (True, False):
            with torch.set_grad_enabled(trains):
                for module in compiled:
                    module(torch.ones(2, 3, size, 12))
    assert counter.frame_count == 4 * len(CONV_ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
def test_opcheck_of_the_chain(row: Row) -> None:
    gen = generator(row.chain, "opcheck")
    for shape, layout in (((2, 8, 5, 6), torch.contiguous_format), ((1, 8, 4, 9), torch.channels_last)):
        own = draw_own(row, 8, gen)
        v = randn(gen, *shape).contiguous(memory_format=layout)
        torch.library.opcheck(getattr(torch.ops.fusedconv, row.chain).default, (v,), own)
        wants = map_tensors(own, lambda t: t.requires_grad_())
        torch.library.opcheck(getattr(torch.ops.fusedconv, row.chain).default, (v.requires_grad_(),), wants)


@rows
def test_opcheck_of_the_conv(row: Row) -> None:
    gen = generator(row.chain, "opcheck")
    op = getattr(torch.ops.fusedconv, row.conv).default
    for layout in (torch.contiguous_format, torch.channels_last):
        own = draw_own(row, 8, gen)
        x = randn(gen, 2, 3, 6, 7).contiguous(memory_format=layout)
        values = (x, randn(gen, 8, 3, 3, 3), randn(gen, 8))
        torch.library.opcheck(op, values, own | {"padding": [1, 2]})
        torch.library.opcheck(
            op, tuple(t.requires_grad_() for t in values), map_tensors(own, Tensor.requires_grad_)
        )


@rows
def test_row_26_compile_without_breaks_or_recompiles(row: Row) -> None:
    """One compilation for all batches, a second for a map of dynamic size; forward and backward."""
    fused, plain = modules(row, padding=1)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fused, backend=counter, fullgraph=True)
    for batch in (2, 3, 5, 4, 9):
        x = module_input(batch)
        torch._dynamo.mark_dynamic(x, 0)
        close([compiled(x)], [plain(x)])
    assert counter.frame_count == 1
    for size in (11, 12, 15, 21):
        x = module_input(3, size=size).requires_grad_()
        y = compiled(x)
        close([y], [plain(x)])
        found = torch.autograd.grad(y.square().sum(), [x, *fused.parameters()])
        right = torch.autograd.grad(
            plain(x).square().sum(), [x, *(plain.get_parameter(n) for n, _ in fused.named_parameters())]
        )
        for a, b in zip(found, right, strict=True):
            scale = max(1.0, float(b.abs().max()))
            torch.testing.assert_close(a / scale, b / scale, rtol=2e-5, atol=2e-5)
    assert counter.frame_count <= 3


@rows
def test_row_26_batch_becomes_dynamic_by_itself(row: Row) -> None:
    """Without marks: a second compilation at the second batch size, none after it."""
    fused = modules(row)[0]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fused, backend=counter, fullgraph=True)
    with torch.no_grad():
        for batch in (2, 3, 5, 4, 9):
            close([compiled(module_input(batch))], [fused(module_input(batch))])
    assert counter.frame_count == 2


@rows
def test_row_26_the_compiled_graph_holds_the_operator(row: Row) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compile(modules(row)[0], backend=backend, fullgraph=True)(module_input())
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any(row.conv in target for target in targets), targets


@pytest.mark.slow
def test_row_26_inductor_and_reduce_overhead() -> None:
    """The default mode with a dynamic batch and gradients, then reduce-overhead."""
    # What another version of this package compiled does not count.
    with torch._inductor.config.patch(force_disable_caches=True):
        fused, plain = All(), All(fused=False)
        compiled = torch.compile(fused, fullgraph=True, dynamic=True)
        for batch in (2, 3):
            x = module_input(batch)
            got, right = compiled(x), plain(x)
            close(got, right)
            loss = torch.stack([y.square().sum() for y in got]).sum()
            found = torch.autograd.grad(loss, list(fused.parameters()))
            assert all(torch.isfinite(g).all() for g in found)
        overhead = torch.compile(fused, fullgraph=True, mode="reduce-overhead")
        with torch.no_grad():
            for seed in range(3):
                x = module_input(seed=seed)
                close(overhead(x), plain(x))


def test_row_26_compiled_under_autocast() -> None:
    fused, plain = All(), All(fused=False)
    x = module_input()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, right = torch.compile(fused, backend="aot_eager", fullgraph=True)(x), plain(x)
    for a, b in zip(got, right, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=5e-2, atol=5e-2)


LOAD = """
import sys
import torch
import fusedconv

folder = sys.argv[1]
x, expected = torch.load(folder + "/data.pt")
for kind in sys.argv[2:]:
    if kind == "export":
        model = torch.export.load(folder + "/export.pt2").module()
    else:
        model = torch.jit.load(folder + f"/{kind}.pt")
    with torch.no_grad():
        torch.testing.assert_close(list(model(x)), list(expected), rtol=2e-5, atol=2e-5)
        more = torch.cat([x, x, x])
        assert [y.shape[0] for y in model(more)] == [3 * x.shape[0]] * len(expected)
    print(kind, "is right")
"""


def save_data(folder: Path) -> Tensor:
    x = module_input(3)
    with torch.no_grad():
        torch.save((x, All(fused=False)(x)), folder / "data.pt")
    return x


def test_row_27_export_saved_and_loaded_in_a_new_process(tmp_path: Path) -> None:
    """With a dynamic batch; the program holds the operators, whole."""
    x = save_data(tmp_path)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(All(), (x,), dynamic_shapes={"x": {0: batch}})
    targets = " ".join(str(node.target) for node in program.graph.nodes)
    assert all(row.conv in targets for row in CONV_ROWS)
    torch.export.save(program, tmp_path / "export.pt2")
    assert "export is right" in new_process(LOAD, tmp_path, "export")


@scriptable
def test_row_27_script_and_trace_saved_and_loaded_in_a_new_process(tmp_path: Path) -> None:
    x = save_data(tmp_path)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        scripted = [torch.jit.script(modules(row, 3, 8, padding=1)[0]) for row in CONV_ROWS]
        close([m(x) for m in scripted], All(fused=False)(x))
        for name, make in (("script", torch.jit.script), ("trace", lambda m: torch.jit.trace(m, x))):
            torch.jit.save(make(All()), str(tmp_path / f"{name}.pt"))
    printed = new_process(LOAD, tmp_path, "script", "trace")
    assert "script is right" in printed
    assert "trace is right" in printed


@scriptable
def test_row_27_script_with_whole_numbers_where_floats_are_meant() -> None:
    """KernelBench writes clamp bounds as 0 and 1 at times; TorchScript tells them from floats."""
    row = next(row for row in CONV_ROWS if row.has_pool)
    own = module_arguments(row, 8) | {"clamp_min": 0, "clamp_max": 1}
    fused = getattr(fusedconv, str(row.module))(3, 8, 3, **fused_keywords(row, 8, own))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        close([torch.jit.script(fused)(module_input())], [fused(module_input())])


@scriptable
@rows
def test_row_27_scripted_modules_train_and_freeze(row: Row) -> None:
    """A scripted module has gradients, and `torch.jit.freeze` and `optimize_for_inference` keep it right."""
    fused, plain = modules(row)
    x = module_input()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(fused)
        for _ in range(3):  # the profiling executor changes its plan after the first runs
            leaf = x.clone().requires_grad_()
            found = torch.autograd.grad(scripted(leaf).square().sum(), leaf)[0]
        other = x.clone().requires_grad_()
        right = torch.autograd.grad(plain(other).square().sum(), other)[0]
        scale = max(1.0, float(right.abs().max()))
        torch.testing.assert_close(found / scale, right / scale, rtol=2e-5, atol=2e-5)
        with torch.no_grad():
            close([torch.jit.freeze(scripted.eval())(x)], [plain(x)])


@rows
def test_make_fx_with_symbolic_shapes(row: Row) -> None:
    """The shape function gives expressions of the sizes, not the numbers of the example."""
    gen = generator(row.chain, "symbolic")
    own, weight = draw_own(row, 8, gen), randn(gen, 8, 3, 3, 3)
    x = randn(gen, 2, 3, 12, 14)
    names = [name for name, value in own.items() if isinstance(value, Tensor)]

    def call(x: Tensor, weight: Tensor, *values: Tensor) -> Tensor:
        return row.conv_op(x, weight, None, own | dict(zip(names, values, strict=True)))

    values = [own[name] for name in names]
    traced = make_fx(call, tracing_mode="symbolic")(x, weight, *values)
    for shape in ((4, 3, 12, 14), (1, 3, 9, 30)):
        x = randn(gen, *shape)
        close([traced(x, weight, *values)], [row.conv_op(x, weight, None, own)])


# ---- forward mode in graphs ----

Function = Callable[[Tensor], Tensor]
Transformed = Callable[[Tensor, Tensor], Any]


def sum_with_x(f: Function) -> Transformed:
    """Its value is wrong, not None, where the operator loses the tangent."""
    return lambda x, t: jvp(lambda u: u.sum() + f(u), (x,), (t,))[1]


def square_sum(f: Function) -> Function:
    return lambda x: f(x).square().sum()


def in_a_level_of_its_own(f: Function) -> Transformed:
    def call(x: Tensor, t: Tensor) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent

    return call


TRANSFORMS: dict[str, Callable[[Function], Transformed]] = {
    "jvp": sum_with_x,
    "dual_level": in_a_level_of_its_own,
    "jvp of jvp": lambda f: lambda x, t: jvp(lambda u: jvp(f, (u,), (t,))[1], (x,), (t,))[1],
    "jvp of grad": lambda f: lambda x, t: jvp(grad(square_sum(f)), (x,), (t,))[1],
    "grad of jvp": lambda f: lambda x, t: grad(lambda u: jvp(f, (u,), (t,))[1].square().sum())(x),
    "vmap of jvp": lambda f: lambda x, t: vmap(lambda d: jvp(f, (x,), (d,))[1])(torch.stack([t, -t])),
    "jvp of vmap": lambda f: lambda x, t: jvp(lambda u: vmap(f)(torch.stack([u, -u])), (x,), (t,))[1],
    "jacfwd": lambda f: lambda x, t: torch.func.jacfwd(lambda s: f(x * s))(t[0, 0, 0]),
    "linearize": lambda f: lambda x, t: torch.func.linearize(f, x)[1](t),
}
OPERATORS = [(row, False) for row in ROWS] + [(row, True) for row in CONV_ROWS]


def functions(row: Row, has_conv: bool) -> tuple[Function, Function, Tensor]:
    """The operator and the plain chain as functions of their input, and an input. PyTorch's group norm with parameters
    has no forward mode where Dynamo runs it on fake tensors."""
    gen = generator(row.chain, "forward mode")
    affine = {"norm_weight": None, "norm_bias": None} if row.has_norm else {}
    own = draw_own(row, 4, gen, dtype=torch.float64, groups=2, **affine)
    x, weight = (randn(gen, 2, 4, 5, 6, dtype=torch.float64), randn(gen, 4, 4, 3, 3, dtype=torch.float64) / 6)
    if not has_conv:
        return lambda v: row.chain_op(v, own), lambda v: row.plain_chain(v, own), x
    return (
        lambda v: row.conv_op(v, weight, None, own, padding=1),
        lambda v: row.plain_conv(v, weight, None, own, padding=1),
        x,
    )


def check_forward_mode(row: Row, has_conv: bool, transform: str, backend: str) -> None:
    ours, plain, x = functions(row, has_conv)
    direction = randn(generator("direction"), *x.shape, dtype=torch.float64)
    right = TRANSFORMS[transform](plain)(x, direction)
    got = torch.compile(TRANSFORMS[transform](ours), backend=backend)(x, direction)
    torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)


@since_2_9
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("transform", ["jvp", "dual_level"])
@pytest.mark.parametrize(
    ("row", "has_conv"), OPERATORS, ids=lambda value: value.chain if isinstance(value, Row) else str(value)
)
def test_forward_mode_in_a_compiled_graph(row: Row, has_conv: bool, transform: str, backend: str) -> None:
    """A graph does not set Python's count of levels."""
    check_forward_mode(row, has_conv, transform, backend)


@since_2_9
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_each_transform_in_a_compiled_graph(transform: str, backend: str) -> None:
    row = ROWS[0]  # PyTorch's own sigmoid fails in some, as its norm does
    check_forward_mode(row, False, transform, backend)
    if (transform, backend) != (
        "jvp of jvp",
        "inductor",
    ):  # what Inductor makes of PyTorch's conv crashes there
        check_forward_mode(row, True, transform, backend)


# ---- graphs of training ----


def targets(module: Any) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def assert_opaque(module: Any, row: Row) -> None:
    """Forward and backward are one node each, and what stands around them changes no tensor."""
    found = targets(module)
    ours = [str(target) for target in found if "fusedconv" in str(target)]
    forward = f"_{row.conv}_with_statistics" if row.has_norm else row.conv
    assert ours == [f"fusedconv.{forward}.default", f"fusedconv._{row.conv}_backward.default"]
    assert not any("conv" in str(target) for target in found if "fusedconv" not in str(target))
    assert not any(t._schema.is_mutable for t in found if isinstance(t, torch._ops.OpOverload))


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.model(x).square().sum(),)


@rows
def test_joint_graphs_hold_backward_whole(row: Row) -> None:
    """They are traced twice, the second time with gradients on."""
    from torch._functorch.aot_autograd import aot_export_module

    loss, x = Loss(modules(row)[0]), module_input()
    graph, _ = aot_export_module(loss, [x], trace_joint=True, output_loss_index=0)
    assert_opaque(graph, row)
    parameters = list(loss.parameters())
    expected = torch.autograd.grad(loss(x)[0], parameters)
    _, *found = graph(*parameters, x)
    torch.testing.assert_close(found[: len(parameters)], list(expected), rtol=1e-5, atol=1e-5)


@since_2_9
@rows
def test_export_of_forward_and_backward(row: Row) -> None:
    from torch.export.experimental import _export_forward_backward

    program = torch.export.export(Loss(modules(row)[0]), (module_input(),))
    assert_opaque(_export_forward_backward(program), row)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="scan of torch 2.11 gives wrong gradients, of PyTorch's own operators too",
)
@rows
def test_scan_in_training(row: Row) -> None:
    from torch._higher_order_ops.scan import scan

    gen = generator(row.chain, "scan")
    own = draw_own(row, 4, gen, groups=2)
    weight = (randn(gen, 4, 4, 3, 3) / 6).requires_grad_()
    first, several = randn(gen, 2, 4, 6, 7), randn(gen, 3, 2, 4, 6, 7)

    def step(carried: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = row.conv_op(carried + x, weight, None, own, padding=1)
        return carried + y.mean(), y.clone()

    last, _ = scan(step, first, several)
    (found,) = torch.autograd.grad(last.sum(), weight)
    carried = first
    for x in several:
        carried = carried + row.plain_conv(carried + x, weight, None, own, padding=1).mean()
    (right,) = torch.autograd.grad(carried.sum(), weight)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def training_step(own: Own, conv: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Any]:
    def step(x: Tensor, weight: Tensor) -> Any:
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        return torch.autograd.grad(conv(*leaves, None, own).square().sum(), leaves)

    return step


@pytest.mark.parametrize("tracing_mode", ["real", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
@rows
def test_make_fx_of_a_training_step(row: Row, pre_dispatch: bool, tracing_mode: Any) -> None:
    """Its graph is right for other values too: what forward leaves for backward is no constant in it."""
    gen = generator(row.chain, "step")
    own = draw_own(row, 8, gen)
    step = training_step(own, row.conv_op)
    values, others = ((randn(gen, 2, 3, 12, 14), randn(gen, 8, 3, 3, 3)) for _ in range(2))
    graph = make_fx(step, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch, _allow_non_fake_inputs=True)(
        *values
    )
    again = make_fx(graph)(*(t.clone().requires_grad_() for t in values))
    if not pre_dispatch:
        assert_opaque(again, row)
    for traced in (graph, again):
        torch.testing.assert_close(traced(*others), step(*others), rtol=1e-4, atol=1e-4)


@rows
def test_joint_graph_of_a_gradient_penalty(row: Row) -> None:
    """The second gradient is the reference's, in operators that change no tensor."""
    from torch._functorch.aot_autograd import aot_export_module

    class Penalty(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model.double()

        def forward(self, x: Tensor) -> tuple[Tensor]:
            leaf = x.detach().requires_grad_()
            (first,) = torch.autograd.grad(self.model(leaf).square().sum(), leaf, create_graph=True)
            return (first.square().sum(),)

    fused, plain = (Penalty(model) for model in modules(row))
    x = module_input().double()
    graph, _ = aot_export_module(fused, [x], trace_joint=True, output_loss_index=0)
    found = targets(graph)
    assert any(f"_{row.conv}_backward" in str(target) for target in found)
    assert not any(t._schema.is_mutable for t in found if isinstance(t, torch._ops.OpOverload))
    parameters = dict(fused.named_parameters())
    right = torch.autograd.grad(plain(x)[0], [plain.get_parameter(name) for name in parameters])
    _, *gradients = graph(*parameters.values(), x)
    torch.testing.assert_close(gradients[: len(parameters)], list(right), rtol=1e-7, atol=1e-7)
