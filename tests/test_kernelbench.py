"""The files that KernelBench's evaluator loads, and the script that applies its protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusedconv.workloads import WORKLOADS, Workload
from helpers import new_process

KERNELBENCH = Path(__file__).resolve().parent.parent / "bench" / "kernelbench"
RUN = KERNELBENCH / "run.py"
NAMES = sorted(path.stem for path in (KERNELBENCH / "plain").glob("*.py"))
problems = pytest.mark.parametrize("name", NAMES)


def load(kind: str, name: str) -> dict[str, Any]:
    """The source text executed in a fresh namespace, as the evaluator does it."""
    namespace: dict[str, Any] = {}
    exec(compile((KERNELBENCH / kind / f"{name}.py").read_text(), "<string>", "exec"), namespace)
    return namespace


def make(namespace: dict[str, Any], kind: str) -> nn.Module:
    torch.manual_seed(42)
    model: nn.Module = namespace[kind](*namespace["get_init_inputs"]())
    return model


def workload(name: str) -> Workload:
    return next(w for w in WORKLOADS if w.id == int(name.partition("_")[0]))


def test_each_problem_has_both_files() -> None:
    assert sorted(workload(name).id for name in NAMES) == sorted(w.id for w in WORKLOADS)
    assert sorted(path.stem for path in (KERNELBENCH / "fused").glob("*.py")) == NAMES


@problems
def test_sizes_are_those_of_the_workload(name: str) -> None:
    w = workload(name)
    for namespace in (load("plain", name), load("fused", name)):
        assert namespace["get_init_inputs"]() == [*w.channels, w.kernel_size, *w.arguments.values()]
        with torch.device("meta"):
            (input,) = namespace["get_inputs"]()
        assert input.shape == (128, w.channels[0], w.size, w.size)


@problems
def test_weights_are_those_of_the_plain_model(name: str) -> None:
    plain, fused = make(load("plain", name), "Model"), make(load("fused", name), "ModelNew")
    expected, actual = plain.state_dict(), fused.state_dict()
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


@problems
def test_the_plain_model_is_the_workloads(name: str) -> None:
    """Both are written by hand: the problem's file, and the steps that the benchmarks compare with."""
    plain = make(load("plain", name), "Model")
    input = torch.rand(1, workload(name).channels[0], 20, 24)
    parts = workload(name).build()
    parts.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(input), workload(name).plain(parts)(input))


@pytest.mark.slow
def test_the_protocol_on_the_cpu(tmp_path: Path) -> None:
    """Each seed and each harder case, on one sample. Its process sees no GPU."""
    code = """
        import runpy, sys, torch
        torch.cuda.is_available = lambda: False
        sys.argv = sys.argv[1:]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert end.code == 0
    """
    output = tmp_path / "kernelbench.json"
    printed = new_process(code, RUN, "--batch", 1, "--output", output)
    assert "on the CPU, with a batch of 1" in printed
    found = json.loads(output.read_text())["problems"]
    assert sorted(found) == NAMES
    for name, problem in found.items():
        has_norm = workload(name).id != 57
        assert len(problem["seeds"]) == 5
        assert len(problem["harder"]) == (8 if has_norm else 4)
        for case in (*problem["seeds"], *problem["harder"]):
            assert case["right"], case
            assert case["largest_difference"] < 1e-4, case


def test_a_wrong_output_is_told() -> None:
    """The comparison fails where a model is wrong in one value, in its shape, or gives NaN."""
    code = """
        import runpy, sys, torch
        compare = runpy.run_path(sys.argv[1])["compare"]
        x = torch.ones(1, 2, 3, 3)
        def off(value):
            y = x.clone()
            y[0, 1, 2, 2] += value
            return y
        for wrong in (off(3e-4), x[:, :1], off(float("nan"))):
            assert not compare("", lambda x: x, lambda x: wrong, x).right
        assert compare("", lambda x: x, lambda x: off(1e-4), x).right
        print("told")
    """
    assert "told" in new_process(code, RUN)


def test_times_of_both_models() -> None:
    """What a GPU adds, on the CPU's clock."""
    code = """
        import runpy, statistics, sys, torch
        run = runpy.run_path(sys.argv[1])
        cpu = torch.device("cpu")
        with torch.no_grad():
            results = run["speed"](run["Problem"]("57_conv_relu_hardswish", 1, cpu), cpu, 3)
        assert set(results) == {"fused", "eager"}
        for result in results.values():
            assert len(result["all_ms"]) == 3 and min(result["all_ms"]) > 0
            assert result["mean_ms"] == statistics.mean(result["all_ms"])
            assert result["ms"] == statistics.median(result["all_ms"])
        results = {"fused": {"mean_ms": 2.0, "ms": 1.0}, "eager": {"mean_ms": 3.0, "ms": 4.0}}
        print(run["times"](results))
    """
    assert new_process(code, RUN).strip() == "['2.000, 1.000', '3.000, 4.000', '1.50, 4.00']"
