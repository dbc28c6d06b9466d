"""The precision setting, `show_config`, `python -m fusedconv`, and the host's cost of a call."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fusedconv
from chains_table import CONV_ROWS, Row, draw_own, generator, module_input, modules, randn
from fusedconv.__main__ import main
from helpers import failure, same_bits

rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)


@pytest.fixture(autouse=True)
def _default_precision() -> Iterator[None]:
    yield
    fusedconv.set_float32_precision("default")


def test_setting_and_context_manager() -> None:
    assert fusedconv.get_float32_precision() == "default"
    for value in ("ieee", "tf32", "default"):
        fusedconv.set_float32_precision(value)
        assert fusedconv.get_float32_precision() == value
    with fusedconv.float32_precision("ieee"):
        assert fusedconv.get_float32_precision() == "ieee"
        with fusedconv.float32_precision("tf32"):
            assert fusedconv.get_float32_precision() == "tf32"
        assert fusedconv.get_float32_precision() == "ieee"
    assert fusedconv.get_float32_precision() == "default"
    with pytest.raises(KeyError), fusedconv.float32_precision("tf32"):
        raise KeyError
    assert fusedconv.get_float32_precision() == "default"


def test_bad_setting() -> None:
    kind, text = failure(lambda: fusedconv.set_float32_precision("high"))
    assert kind is ValueError
    assert all(word in text for word in ("high", "default", "ieee", "tf32"))
    assert fusedconv.get_float32_precision() == "default"


@rows
def test_each_precision_is_exact_on_the_cpu(row: Row) -> None:
    """The CPU has no TF32: each setting and argument gives the same bits, forward and backward."""
    gen = generator(row.chain, "precision")
    own = draw_own(row, 8, gen)
    x, weight = randn(gen, 2, 3, 9, 9), randn(gen, 8, 3, 3, 3).requires_grad_()
    y = row.conv_op(x, weight, None, own)
    gradient = torch.autograd.grad(y.sum(), weight)[0]
    for precision in (None, "default", "ieee", "tf32"):
        other = row.conv_op(x, weight, None, own, precision=precision)
        assert same_bits(y, other)
        assert same_bits(torch.autograd.grad(other.sum(), weight)[0], gradient)
    with fusedconv.float32_precision("tf32"):
        assert same_bits(y, row.conv_op(x, weight, None, own))


@rows
def test_torch_flags_are_never_touched(row: Row) -> None:
    def flags() -> tuple[Any, ...]:
        return (
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
            torch.get_num_threads(),
        )

    before = flags()
    fused = modules(row)[0]
    for precision in ("ieee", "tf32", "default"):
        with fusedconv.float32_precision(precision):
            assert flags() == before
            fused(module_input()).sum().backward()
            assert flags() == before


@rows
def test_a_compiled_graph_is_guarded_on_the_setting(row: Row) -> None:
    """The graph carries the precision: a change of the setting makes a new graph, not a wrong one."""
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if row.chain in str(node.target)]
        seen.extend(node.kwargs.get("precision", node.args[-1] if node.args else None) for node in nodes)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(modules(row)[0], backend=backend, fullgraph=True)
    x = module_input()
    for precision in ("default", "ieee", "tf32", "ieee"):
        fusedconv.set_float32_precision(precision)
        compiled(x)
    torch._dynamo.reset()
    assert "ieee" in seen
    assert "tf32" in seen
    assert len(seen) == 3


@pytest.mark.parametrize("pre_dispatch", [False, True])
@rows
def test_a_graph_of_a_lower_tracer_holds_the_setting(row: Row, pre_dispatch: bool) -> None:
    """make_fx records what the dispatcher sees; its backward, too, must use what forward used."""
    with fusedconv.float32_precision("ieee"):
        graph = make_fx(modules(row)[0], pre_dispatch=pre_dispatch)(module_input()).graph
    found = [node.kwargs.get("precision") for node in graph.nodes if row.chain in str(node.target)]
    assert found == ["ieee"]


def test_show_config() -> None:
    text = fusedconv.show_config()
    for word in (fusedconv.__version__, torch.__version__, fusedconv._C.cpu_isa(), "CUDA"):
        assert word in text, f"{word} is missing in\n{text}"


def run_main(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fusedconv", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_main_prints_json() -> None:
    done = run_main("--json", "--batch", "1", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    text = json.dumps(json.loads(done.stdout))
    errors = [float(e) for e in re.findall(r'"error": ([-\d.e]+)', text)]
    assert len(errors) >= 4
    assert max(errors) < 1e-6


def test_main_prints_a_table_and_says_what_is_wrong() -> None:
    done = run_main("--batch", "0")
    assert done.returncode != 0
    assert "batch" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    done = run_main("--device", "nonsense")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "--batch" in run_main("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch", "99999999999"), ("--batch", "99999999999", str(2**31 - 1))),
        (("--batch", str(2**31 - 1)), ("not enough memory on cpu", "--batch")),
        (("--batch", "-1"), ("--batch", "-1")),
        (("--batch", "1e3"), ("--batch", "1e3")),
        (("--device", "cuda:999999999999"), ("cuda:999999999999",)),
        (("--device", "cuda:-1"), ("cuda:-1",)),
        (("--device", "cuda:100"), ("cuda:100",)),
        (("--device", "meta"), ("meta",)),
        (("--device", ""), ("''",)),
    ],
)
def test_main_says_what_is_wrong_in_one_line(
    arguments: tuple[str, str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = main(["--device", "cpu", *arguments])
    except SystemExit as exit:  # of argparse
        status = exit.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert all(word in printed.err.splitlines()[-1] for word in words), printed.err


@pytest.mark.parametrize("format", [[], ["--json"]])
def test_main_ends_in_silence_where_nobody_reads_on(format: list[str]) -> None:
    command = [sys.executable, "-m", "fusedconv", "--batch", "1", "--device", "cpu", *format]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        complaint = process.stderr.read()
    assert "Error" not in complaint
    assert "Traceback" not in complaint


def microseconds(call: Callable[[], object], number: int = 30) -> float:
    began = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - began) / number * 1e6


# The median of our cost over eager's is two thirds of this on an idle machine; twice as much would be over it.
MOST_OF_EAGERS = {
    "relu_hardswish": 1.0,
    "bias_scale_sigmoid_group_norm": 1.6,
    "group_norm_scale_max_pool_clamp": 1.4,
    "group_norm_tanh_hardswish_logsumexp": 0.75,
}


@rows
def test_host_cost_of_a_call(row: Row) -> None:
    """On a tensor too small to matter: beside eager, and with room for a busy machine in microseconds."""
    gen = generator(row.chain, "host")
    own = draw_own(row, 16, gen, groups=4)
    op = getattr(torch.ops.fusedconv, row.conv)
    tensors = randn(gen, 1, 3, 6, 6), randn(gen, 16, 3, 3, 3), randn(gen, 16)
    arguments = *tensors, *own.values()
    torch.set_num_threads(1)
    for mode, most in ((torch.enable_grad, 60), (torch.inference_mode, 45)):
        with mode():
            pairs = [
                (microseconds(lambda: op(*arguments)), microseconds(lambda: row.plain_conv(*tensors, own)))
                for _ in range(41)
            ][1:]
        ours = min(pair[0] for pair in pairs)
        assert ours < most, f"{ours:.1f} us with {mode.__name__}"
        ratio = statistics.median(ours / eager for ours, eager in pairs)
        assert ratio < MOST_OF_EAGERS.get(row.chain, 1.6), f"{ratio:.2f} of eager's with {mode.__name__}"


def test_the_setting_is_seen_by_other_threads() -> None:
    """It is a setting of the process, as PyTorch's own."""
    fusedconv.set_float32_precision("ieee")
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(fusedconv.get_float32_precision()))
    thread.start()
    thread.join()
    assert seen == ["ieee"]
