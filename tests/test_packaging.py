"""The built package: dependencies and symbols of the extension, its stub, and what an import does."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import platform
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import elf
import fusedconv
from chains_table import CONV_ROWS, ROWS
from fusedconv import _C
from helpers import new_process

PACKAGE = Path(fusedconv.__file__).parent
EXTENSION = Path(_C.__file__)
linux = pytest.mark.skipif(platform.system() != "Linux", reason="reads ELF files")


@linux
def test_dynamic_dependencies_of_the_extension() -> None:
    """Nothing but the C and C++ run-time libraries: no torch, no CUDA, no OpenMP."""
    needed = elf.needed(EXTENSION)
    allowed = r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so(\.\d+)*|ld-linux[-\w]*\.so(\.\d+)*"
    assert needed, "no dependency was read"
    assert [name for name in needed if not re.fullmatch(allowed, name)] == []


@linux
def test_undefined_symbols_of_the_extension() -> None:
    """No symbol of torch, CUDA or OpenMP is expected from whoever loads the extension."""
    undefined = [s.name for s in elf.dynamic_symbols(EXTENSION) if not s.defined]
    assert len(undefined) > 10
    foreign = re.compile(r"c10|torch|^at[A-Z_:]|_ZN2at|^cu[A-Z]|^cuda|^GOMP_|^omp_|^__kmpc")
    assert [name for name in undefined if foreign.search(name)] == []


@linux
def test_weak_symbols_of_the_instruction_set_units() -> None:
    """A weak function compiled for AVX-512 could be the copy that every machine runs.

    A linked extension shows only what it exports, so it must export nothing of ours but the module's entry.
    """
    exported = [s for s in elf.dynamic_symbols(EXTENSION) if s.defined]
    assert [s.name for s in exported if "fusedconv" in s.name and "PyInit" not in s.name] == []
    assert [s.name for s in exported if s.weak and ("avx" in s.name or "baseline" in s.name)] == []
    assert any(s.name == "PyInit__C" for s in exported)


def test_import_does_not_initialise_cuda_or_change_torch() -> None:
    """Row 24: an import costs no CUDA context, starts no thread, and moves no global of torch."""
    code = """
        import threading, torch
        before = (torch.get_num_threads(), torch.get_default_dtype(), torch.backends.cuda.matmul.allow_tf32,
                  torch.backends.cudnn.allow_tf32, torch.initial_seed(), threading.active_count())
        import fusedconv
        after = (torch.get_num_threads(), torch.get_default_dtype(), torch.backends.cuda.matmul.allow_tf32,
                 torch.backends.cudnn.allow_tf32, torch.initial_seed(), threading.active_count())
        assert before == after
        assert not torch.cuda.is_initialized()
        from fusedconv import _C
        _C.build_info(), _C.cpu_isa(), _C.cpu_isas(), _C.cuda_chains()
        assert not torch.cuda.is_initialized()
        print("untouched")
    """
    assert "untouched" in new_process(code)


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_a_python_without_gil_stays_so() -> None:
    """An extension that does not say that it may run without turns it on, with a warning."""
    code = """
        import sys, torch
        before = sys._is_gil_enabled()
        import fusedconv
        assert sys._is_gil_enabled() == before
        print("off")
    """
    assert "off" in new_process(code)


def test_import_is_quick_and_quiet() -> None:
    """The import prints nothing and, with torch already there, takes a moment, not seconds."""
    code = """
        import time, torch
        t = time.perf_counter()
        import fusedconv
        print(time.perf_counter() - t)
    """
    assert float(new_process(code)) < 2.0


def test_py_typed_and_version() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert fusedconv.__version__ == importlib.metadata.version("fusedconv")
    assert _C.build_info()["version"] == fusedconv.__version__


def stub() -> ast.Module:
    return ast.parse((PACKAGE / "_C.pyi").read_text())


def check_functions(owner: Any, body: list[ast.stmt]) -> set[str]:
    """The functions in this part of the stub, each with as many arguments as the real one; and properties, which are
    the real one's too."""
    functions = {node.name: node.args for node in body if isinstance(node, ast.FunctionDef)}
    for name, said in functions.items():
        if isinstance(getattr(owner, name), property):
            assert [arg.arg for arg in said.posonlyargs or said.args] == ["self"], name
            continue
        documented = getattr(owner, name).__doc__.split("\n")[0]
        signature = re.fullmatch(rf"{name}\((.*)\) -> .+", documented)
        assert signature, f"{name} has no signature in {documented!r}"
        expected = ["self"] if isinstance(owner, type) else []
        actual = re.findall(r"(\w+): ", signature[1])
        expected += [f"arg{i}" for i in range(len(actual) - len(expected))]
        assert actual == expected, f"{name} has named arguments: so must the stub"
        assert len(said.posonlyargs) == len(actual), name
        assert not any((said.args, said.kwonlyargs, said.vararg, said.kwarg, said.defaults)), name
    return set(functions)


def test_the_stub_is_true() -> None:
    """`_C.pyi` names what `_C` has, no more and no less, with as many arguments. The bindings name none of them."""
    classes = {node.name: node.body for node in stub().body if isinstance(node, ast.ClassDef)}
    annotated = [node for node in stub().body if isinstance(node, ast.AnnAssign)]
    constants = {ast.unparse(node.target): node.annotation for node in annotated}
    constants = {name: annotation for name, annotation in constants.items() if name.isupper()}
    real = {name for name in dir(_C) if not name.startswith("_")}
    functions = check_functions(_C, stub().body)
    assert functions | classes.keys() | constants.keys() == real
    for name, body in classes.items():
        methods = check_functions(getattr(_C, name), body)
        assert methods - {"__init__"} == {method for method in dir(getattr(_C, name)) if method[0] != "_"}
    for name, annotation in constants.items():
        kind = annotation.value if isinstance(annotation, ast.Subscript) else annotation  # tuple[str, ...]
        assert type(getattr(_C, name)).__name__ == ast.unparse(kind), name


def test_public_names() -> None:
    """Each chain's module, function and operator exist under the name of the table, and `__all__` is true."""
    import torch

    import fusedconv.functional as functional

    for row in CONV_ROWS:
        assert row.module
        assert row.module in fusedconv.__all__
        assert callable(getattr(functional, row.conv))
        assert hasattr(torch.ops.fusedconv, row.conv)
    for row in ROWS:
        assert callable(getattr(functional, row.chain))
        assert hasattr(torch.ops.fusedconv, row.chain)
    for name in fusedconv.__all__:
        assert getattr(fusedconv, name).__doc__ or not callable(getattr(fusedconv, name)), name


def test_schemas() -> None:
    """The order and the names of the arguments, as the design fixes them."""
    import torch

    for row in ROWS:
        schema = getattr(torch.ops.fusedconv, row.chain).default._schema
        names = ["input", *row.arguments, "precision"]  # further arguments may follow, keywords only
        assert [a.name for a in schema.arguments][: len(names)] == names
        assert all(a.kwarg_only for a in schema.arguments[len(names) - 1 :])
        if row.module:
            schema = getattr(torch.ops.fusedconv, row.conv).default._schema
            geometry = ["stride", "padding", "dilation", "groups"]
            names = ["input", "weight", "conv_bias", *row.arguments, *geometry, "precision"]
            assert [a.name for a in schema.arguments][: len(names)] == names
            assert inspect.signature(getattr(fusedconv.functional, row.conv)).parameters.keys() >= set(
                names[:-1]
            )


def test_unknown_chain_name_of_the_extension() -> None:
    """The extension's own guard: a name that no chain has is an error, not a crash."""
    numbers = (0, 1e-5, (1, 1), 0.0, 1.0)
    form = (_C.FLOAT32, [1, 1, 1, 1], [1, 1, 1, 1])
    with pytest.raises(ValueError, match="no_such_chain"):
        _C.Launch("no_such_chain", [("input", _C.FLOAT32)], form, None, numbers, form)


def test_wrong_pointers_for_the_extension() -> None:
    """As many as the names, and for tensors that a kernel knows."""
    numbers = (0, 1e-5, (1, 1), 0.0, 1.0)
    form = (_C.FLOAT32, [1, 1, 1, 1], [1, 1, 1, 1])
    with pytest.raises(ValueError, match="no_such_tensor"):
        _C.Launch("relu_hardswish", [("no_such_tensor", _C.FLOAT32)], form, None, numbers, form)
    launch = _C.Launch("relu_hardswish", [("input", _C.FLOAT32)], form, None, numbers, form)
    for pointers in ([], [0, 0]):
        with pytest.raises(ValueError, match="pointers"):
            launch.on_cpu(pointers, 0, 0, 1)


def test_an_error_of_cuda_names_the_chain() -> None:
    """On any machine and in any build there is no 1000th device."""
    numbers = (0, 1e-5, (1, 1), 0.0, 1.0)
    form = (_C.FLOAT32, [1, 1, 1, 1], [1, 1, 1, 1])
    launch = _C.Launch("relu_hardswish", [("input", _C.FLOAT32)], form, None, numbers, form)
    with pytest.raises((RuntimeError, ValueError), match=r"fusedconv: .*relu_hardswish.*(cudaError|CUDA)"):
        launch.prepare_cuda(1000)


@pytest.mark.parametrize("chain", ["relu_hardswish", "group_norm_silu"])
def test_empty_launch_of_the_extension(chain: str) -> None:
    numbers = (1, 1e-5, (1, 1), 0.0, 1.0)
    form = (_C.FLOAT32, [0, 1, 1, 1], [1, 1, 1, 1])
    _C.Launch(chain, [("input", _C.FLOAT32)], form, None, numbers, form).on_cpu([1], 1, 0, 2)


def test_row_31_a_machine_without_a_gpu_is_told_in_words() -> None:
    """With or without CUDA code in the build: a reason and no crash, and the CPU works."""
    code = """
        import torch, fusedconv
        from fusedconv import _C
        reason = _C.cuda_status(0)
        assert len(reason) > 10, reason
        info = _C.build_info()
        assert (info["cuda"] == "not built") == (_C.cuda_chains() == ()), info
        assert "CUDA" in fusedconv.show_config()
        assert torch.ops.fusedconv.relu_hardswish(torch.full((1, 1, 1, 1), 4.0)).item() == 4.0
        print("told")
    """
    assert "told" in new_process(code, environment={"CUDA_VISIBLE_DEVICES": ""})


def test_row_31_the_extension_stands_alone() -> None:
    """It loads without torch: so no torch release can break it."""
    code = f"""
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("_C", {str(EXTENSION)!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.cpu_isas()[0] == "baseline"
        assert "torch" not in sys.modules
        print("alone")
    """
    assert "alone" in new_process(code)


INTERRUPTED = """
import importlib
import logging
from importlib.machinery import SourceFileLoader
import torch

interrupted = set()
execute, define = SourceFileLoader.exec_module, torch.library.Library.define

def interrupt_once(*place):
    if place not in interrupted:
        interrupted.add(place)
        raise KeyboardInterrupt(place)

def interrupted_execute(self, module):
    is_ours = module.__name__.startswith("fusedconv")
    if is_ours:
        interrupt_once("before", module.__name__)
    execute(self, module)
    if is_ours:
        interrupt_once("after", module.__name__)

def interrupted_define(self, schema, *args, **options):
    if self.ns == "fusedconv" and "backward" in schema:
        interrupt_once("at", schema)
    return define(self, schema, *args, **options)

SourceFileLoader.exec_module, torch.library.Library.define = interrupted_execute, interrupted_define
while True:
    try:
        import fusedconv
        break
    except KeyboardInterrupt:
        pass
assert interrupted >= {("before", "fusedconv._register"), ("after", "fusedconv._register")}, interrupted
assert len([place for place, _ in interrupted if place == "at"]) > 5, interrupted
SourceFileLoader.exec_module = execute
for _ in range(2):
    assert len(logging.getLogger("fusedconv").handlers) == 1
    model = fusedconv.ConvGroupNormSiLU(3, 8, 3, num_groups=2)
    model(torch.rand(1, 3, 30, 30)).sum().backward()
    assert fusedconv.explain(model, torch.rand(1, 3, 30, 30)).path == "direct"
    importlib.reload(fusedconv)
print("imported")
"""


def test_an_import_that_was_interrupted_can_be_tried_again() -> None:
    """Once before and once after each of our modules, and in the middle of the operators; a reload is no matter."""
    assert "imported" in new_process(INTERRUPTED, environment={"FUSEDCONV_LOG": "info"})


def test_no_metadata_is_needed() -> None:
    """Programs that are packed into one file, and layers of containers, leave it out."""
    code = """
        import importlib.metadata

        def absent(name):
            raise importlib.metadata.PackageNotFoundError(name)

        importlib.metadata.distribution = absent
        import fusedconv
        print(fusedconv.__version__, fusedconv.show_config().split()[1])
    """
    assert new_process(code).split() == [fusedconv.__version__] * 2
