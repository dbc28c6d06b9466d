"""The modules of the package, and what each may import: what stands above it in this list, also inside a function or for
types alone. So there is no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fusedconv

PACKAGE = Path(fusedconv.__file__).parent
# From the records to what users call. Modules of one line know nothing of each other.
FLOORS = (
    ("_C", "chains", "_measure", "_stock"),  # kernels; records and references of the chains
    ("config", "_conv_cut", "_conv_pieces"),
    ("_conv",),  # PyTorch's conv
    ("_operator", "_launch"),  # what an operator is; arguments to pointers
    ("_reference", "_launch_backward", "_sharding"),
    ("_dispatch",),  # what torch is told
    ("_backward",),
    ("_forward",),
    ("_register",),  # all operators
    ("functional", "nn"),
    ("_explain", "workloads"),
    ("__init__",),
    ("__main__",),
)
FLOOR_OF = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
MODULES = sorted(file.stem for file in PACKAGE.glob("*.py"))


def nodes(module: str) -> Iterator[ast.AST]:
    return ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text()))


def imported(module: str) -> Iterator[str]:
    """Of the package, by whatever form of import; a name that is no module is the package's own."""
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names = [
                alias.name.partition(".")[2]
                for alias in node.names
                if alias.name.split(".")[0] == PACKAGE.name
            ]
        elif isinstance(node, ast.ImportFrom):
            source = f"{PACKAGE.name}.{node.module or ''}" if node.level else node.module or ""
            package, _, name = source.partition(".")
            names = [name] if name else [alias.name for alias in node.names]
            names = names if package == PACKAGE.name else []
        else:
            continue
        yield from (name if name in FLOOR_OF else "__init__" for name in names)


def uses_torch_library(module: str) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.library")
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.library"))
        or (isinstance(node, ast.ImportFrom) and node.module == "torch" and "library" in {a.name for a in node.names})
        or (isinstance(node, ast.Import) and any(a.name.startswith("torch.library") for a in node.names))
        for node in nodes(module)
    )  # fmt: skip


def test_each_module_has_its_floor() -> None:
    assert {*MODULES, "_C"} == set(FLOOR_OF)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    for other in imported(module):
        assert FLOOR_OF[other] < FLOOR_OF[module], f"{module} imports {other}"


@pytest.mark.parametrize(
    "line",
    [
        "from ._register import OPERATORS",
        "from . import _register",
        "import fusedconv._register",
        "from fusedconv._register import OPERATORS",
        "from fusedconv import _register",
    ],
)
def test_each_form_of_import_is_seen(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "nodes", lambda module: ast.walk(ast.parse(f"import torch\n{line}")))
    assert [*imported("_operator")] == ["_register"]


def test_one_module_uses_torch_library() -> None:
    assert [module for module in MODULES if uses_torch_library(module)] == ["_dispatch"]
