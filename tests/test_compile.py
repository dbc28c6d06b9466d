"""opcheck, torch.compile, torch.export and TorchScript saved and loaded in new processes (rows 26, 27)."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
from torch import Tensor, nn

import fusedconv
from chains_table import (
    CONV_ROWS,
    ROWS,
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


class All(nn.Module):
    """One model with every fused module, so that one compilation serves them all."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.models = nn.ModuleList([modules(row, 3, 8, padding=1)[0 if fused else 1] for row in CONV_ROWS])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [model(x) for model in self.models]


def close(got: Any, right: Any) -> None:
    torch.testing.assert_close(list(got), list(right), rtol=2e-5, atol=2e-5)


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
    from torch.fx.experimental.proxy_tensor import make_fx

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
