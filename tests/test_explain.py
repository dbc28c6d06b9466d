"""``explain`` says what the debug log and the profiler show of the call itself; ``FUSEDCONV_LOG`` shows the log."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedconv
import fusedconv.functional as FF
from chains_table import (
    BY_NAME,
    CONV_ROWS,
    ROWS,
    Own,
    Row,
    as_pairs,
    draw_own,
    generator,
    module_input,
    modules,
    randn,
)
from cuda_conv import forget
from fusedconv import _C, Explanation
from fusedconv._explain import _explain_operator
from fusedconv._measure import copy_rate, interleaved, product_rate
from fusedconv._register import OPERATORS
from fusedconv.workloads import OTHER_WORKLOADS, WORKLOADS
from helpers import Planned, failure, new_process, profile

conv_rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
CONVOLUTION = ("aten::convolution",)


@dataclass(frozen=True)
class Case:
    """A conv of 3x3, and the path that it takes on the CPU."""

    words: str  # of path and reason
    dtype: torch.dtype = torch.float32
    channels: int = 3
    groups: int = 1
    stride: int = 1

    def __str__(self) -> str:
        return self.words

    def arguments(self, row: Row) -> tuple[tuple[Tensor, ...], Own]:
        """Tensors of the conv, and the rest by name."""
        gen = generator(row.chain, self.words)
        own = draw_own(row, 8, gen, dtype=self.dtype)
        x = randn(gen, 2, self.channels, 9, 11, dtype=self.dtype)
        weight = randn(gen, 8, self.channels // self.groups, 3, 3, dtype=self.dtype)
        geometry = as_pairs({"stride": self.stride, "groups": self.groups})
        return (x, weight, randn(gen, 8, dtype=self.dtype)), {**own, **geometry}


CASES = (
    Case(f"direct, {_C.cpu_isa()}, 27 products for a value"),
    Case(f"direct, {_C.cpu_isa()}, 18 products for a value", channels=2, stride=2),
    Case(f"direct, {_C.cpu_isa()}, 4104 products for a value", torch.float64, channels=456),
    Case("two-step, 4104 products for a value", channels=456),
    Case("two-step, bfloat16", torch.bfloat16),
    Case("two-step, float16", torch.float16),
    Case("two-step, groups", channels=4, groups=2),
)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="fusedconv")
    forget()
    return caplog


@pytest.mark.parametrize("case", CASES, ids=str)
@conv_rows
def test_a_conv_is_explained_as_it_runs(row: Row, case: Case, log: pytest.LogCaptureFixture) -> None:
    tensors, rest = case.arguments(row)
    op = getattr(torch.ops.fusedconv, row.conv)
    explanation = fusedconv.explain(op, *tensors, **rest)
    assert log.messages == []  # nothing was prepared
    ran = profile(lambda: op(*tensors, **rest))

    dtype = str(case.dtype).removeprefix("torch.")
    assert log.messages == [f"{row.conv} {list(tensors[0].shape)} {dtype}: {case.words}"]
    assert f"{explanation.path}, {explanation.reason}" == case.words
    assert explanation.operator == row.conv
    assert explanation.kernels == _C.cpu_isa()
    assert explanation.workspace_bytes is None
    if explanation.path == "direct":
        assert (explanation.pytorch, ran.computing) == ((), [])
    else:
        assert explanation.pytorch == CONVOLUTION
        assert ran.operators.count("aten::convolution") == 1
    assert explanation == fusedconv.explain(getattr(FF, row.conv), *tensors, **rest)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
def test_a_chain_is_explained_as_it_runs(row: Row, log: pytest.LogCaptureFixture) -> None:
    gen = generator(row.chain, "explain")
    v, own = randn(gen, 2, 8, 9, 11), draw_own(row, 8, gen)
    op = getattr(torch.ops.fusedconv, row.chain)
    explanation = fusedconv.explain(op, v, **own)
    assert profile(lambda: op(v, **own)).computing == []
    assert log.messages == []
    assert (explanation.operator, explanation.path) == (row.chain, "chain")
    assert (explanation.kernels, explanation.pytorch) == (_C.cpu_isa(), ())
    assert explanation.operations == 0


@pytest.mark.parametrize("workload", [*WORKLOADS, *OTHER_WORKLOADS], ids=lambda w: w.name)
def test_operations_and_bytes(workload: Any) -> None:
    module, input = workload.build(), workload.input(2)
    read = [input, *module.parameters()]
    output = module(input)
    explanation = fusedconv.explain(module, input)
    assert explanation.path == "direct"
    assert explanation.operations == workload.operations(2)
    assert explanation.moved_bytes == sum(4 * t.numel() for t in (*read, output))

    half = fusedconv.explain(module.bfloat16(), input.bfloat16())
    v = module.conv(input.bfloat16())
    assert half.path == "two-step"
    assert half.operations == workload.operations(2)
    assert half.moved_bytes == sum(2 * t.numel() for t in (*read, output, v, v))


def test_bytes_of_a_workload_by_hand() -> None:
    """57 at batch 1: an input of 128 x 128, an output of 126 x 126, and the conv's parameters."""
    module = fusedconv.ConvReLUHardswish(8, 64, 3)
    explanation = fusedconv.explain(module, torch.rand(1, 8, 128, 128))
    assert explanation.moved_bytes == 524_288 + 18_432 + 256 + 4_064_256
    assert explanation.operations == 146_313_216


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 2), (torch.float32, 1), (torch.bfloat16, 1)])
def test_parameters_that_a_run_copies(dtype: torch.dtype, step: int) -> None:
    """One value for all channels, and one that is stepped over, become a vector each; the rest is read as it is."""
    x, weight, bias = (torch.rand(shape, dtype=dtype) for shape in ((1, 3, 9, 9), (8, 3, 3, 3), (8 * step,)))
    scale, vector = torch.rand(1, dtype=dtype), torch.rand(8, 1, 1, dtype=dtype)
    arguments = x, weight, bias[::step], vector, scale, 4
    op = torch.ops.fusedconv.conv2d_bias_scale_sigmoid_group_norm
    explanation = fusedconv.explain(op, *arguments)
    ran = profile(lambda: op(*arguments))
    assert explanation.pytorch.count("aten::clone") == step
    of_conv = 0
    if explanation.path == "two-step":  # PyTorch's conv copies too, on a CPU with AMX
        of_conv = profile(lambda: F.conv2d(x, weight)).operators.count("aten::clone")
    assert ran.operators.count("aten::clone") == step + of_conv


# ---- modules -------------------------------------------------------------------------------------


@conv_rows
def test_a_stock_module_is_its_operator(row: Row) -> None:
    module = modules(row)[0]
    explanation = fusedconv.explain(module, module_input())
    assert (explanation.operator, explanation.path, explanation.pytorch) == (row.conv, "direct", ())
    assert fusedconv.explain(nn.Sequential(module), module_input()) == explanation


def hook(module: Any) -> None:
    module.conv.register_forward_hook(lambda *_: None)


def pad_by_reflection(module: Any) -> None:
    module.conv.padding_mode, module.conv.padding = "reflect", (1, 1)
    module.conv._reversed_padding_repeated_twice = [1, 1, 1, 1]


@pytest.mark.parametrize("change", [hook, pad_by_reflection])
@conv_rows
def test_a_conv_that_is_called(row: Row, change: Callable[[Any], None]) -> None:
    module = modules(row)[0]
    change(module)
    explanation = fusedconv.explain(module, module_input())
    ran = profile(lambda: module(module_input()))
    assert (explanation.operator, explanation.path) == (row.chain, "step by step")
    assert explanation.reason.startswith("conv is ")
    assert "group_norm" not in explanation.reason
    assert f"fusedconv::{row.chain}" in ran.operators
    assert explanation.pytorch[-1:] == CONVOLUTION
    assert set(explanation.pytorch) <= set(ran.operators)


@pytest.mark.parametrize("row", [row for row in CONV_ROWS if row.has_norm], ids=lambda row: row.chain)
def test_a_norm_that_is_called(row: Row) -> None:
    """The counter and the statistics of a batch norm in its place stay as they are."""
    module: Any = modules(row)[0]
    module.group_norm = nn.BatchNorm2d(8)
    before = copy.deepcopy(module.state_dict())
    explanation = fusedconv.explain(module, module_input())
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    ran = profile(lambda: module(module_input()))
    ours = [name.removeprefix("fusedconv::") for name in ran.operators if "fusedconv" in name]
    assert explanation.operator == next(iter(ours), None)
    assert (explanation.kernels is None) == (not ours)
    assert explanation.path == "step by step"
    assert explanation.reason.startswith("group_norm is ")
    assert explanation.pytorch[:2] == ("aten::convolution", "aten::add_")
    assert set(explanation.pytorch) <= set(ran.operators)


def test_spectral_norm_is_not_advanced() -> None:
    module: Any = modules(BY_NAME["group_norm_silu"])[0]
    torch.nn.utils.parametrizations.spectral_norm(module.conv)
    before = copy.deepcopy(module.state_dict())
    assert fusedconv.explain(module, module_input()).path == "step by step"
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_autocast_and_gradients() -> None:
    module = modules(BY_NAME["relu_hardswish"])[0]
    x = module_input().requires_grad_()
    assert fusedconv.explain(module, x).path == "direct"
    with torch.autocast("cpu", torch.bfloat16):
        explanation = fusedconv.explain(module, x)
    assert (explanation.path, explanation.reason) == ("two-step", "bfloat16")
    assert explanation.pytorch == ("aten::_to_copy",) * 3 + CONVOLUTION


# ---- the floor -----------------------------------------------------------------------------------


@dataclass
class Rates:
    """In place of measured ones; notes what was asked for."""

    copy: float = 1e3
    products: float = 1e6

    def __post_init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def copy_rate(self, *of: Any) -> float:
        self.asked.append(of)
        return self.copy

    def product_rate(self, *of: Any) -> float:
        self.asked.append(of)
        return self.products


@pytest.mark.parametrize(
    ("products", "seconds"),
    [(1, 5.0), (3, 9.0)],  # 5,000 bytes at 1e3 a second, and 3e6 operations at 1e6
)
def test_the_floor_is_the_longer_of_both(
    products: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Rates()
    monkeypatch.setattr("fusedconv._explain.copy_rate", rates.copy_rate)
    monkeypatch.setattr("fusedconv._explain.product_rate", rates.product_rate)
    cpu, threads = torch.device("cpu"), torch.get_num_threads()
    explanation = Explanation(
        "conv2d_x", "direct", "", moved_bytes=5000, operations=3_000_000,
        device=cpu, product_dtype=torch.float32, products=products,
    )  # fmt: skip
    assert explanation.floor_seconds() == seconds
    assert rates.asked == [(cpu, threads), (cpu, torch.float32, threads)]
    assert replace(explanation, operations=0).floor_seconds() == 5.0
    assert replace(explanation, moved_bytes=None).floor_seconds() is None


def test_the_rates_are_of_what_moves_and_of_two_operations_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedconv._measure._fastest_seconds", lambda call, device: 2.0**-12)
    cpu = torch.device("cpu")
    assert copy_rate.__wrapped__(cpu, 1) == 2.0 ** (29 + 12)  # 2^26 values of 4 bytes, there and back
    assert product_rate.__wrapped__(cpu, torch.float32, 1) == 2.0 ** (31 + 12)  # 2^10 to the third, twice


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_the_floor_is_found_under_a_transform(transform: Any) -> None:
    copy_rate.cache_clear()
    product_rate.cache_clear()
    conv, image = torch.nn.Conv2d(3, 8, 3), torch.rand(1, 3, 9, 9)
    floors = []

    def call(x: torch.Tensor) -> torch.Tensor:
        explanation = fusedconv.explain(FF.conv2d_relu_hardswish, image, conv.weight, conv.bias)
        floors.append(explanation.floor_seconds())
        return x.sum()

    transform(call)(torch.rand(2))
    assert floors[0] is not None
    assert 0 < floors[0] < 1


def test_rates_of_slow_products_are_those_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision a CPU may take minutes for a large one; its convs are run in float32 then."""
    monkeypatch.setattr("fusedconv._measure._fastest_seconds", lambda call, device: 1.0)
    cpu, rate = torch.device("cpu"), product_rate.__wrapped__
    assert rate(cpu, torch.float32, 1) == 2**31  # 2^10 to the third, twice
    for in_float32, expected in ((1.0, 2**22), (2.0**30, 2**30)):
        monkeypatch.setattr("fusedconv._measure.product_rate", lambda *_, found=in_float32: found)
        assert rate(cpu, torch.bfloat16, 1) == expected


def test_the_rate_is_of_the_dtype_that_the_conv_has() -> None:
    """A map of one row is left to float32 in bfloat16 (test_layouts.py)."""
    conv = torch.nn.Conv2d(16, 32, 3, padding=1, dtype=torch.bfloat16)
    for rows, dtype in ((9, torch.bfloat16), (1, torch.float32)):
        x = torch.rand(1, 16, rows, 9, dtype=torch.bfloat16)
        explanation = fusedconv.explain(FF.conv2d_relu_hardswish, x, conv.weight, conv.bias, padding=1)
        assert explanation.product_dtype == dtype


def test_the_rate_is_of_the_dtype_that_exactness_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch's flags would round, a conv of float32 is computed in float64 (test_numerics.py)."""
    monkeypatch.setattr("fusedconv._conv._rounds_on_cpu", lambda *_: True)
    conv = torch.nn.Conv2d(16, 32, 3, groups=2)
    call = functools.partial(
        fusedconv.explain, FF.conv2d_relu_hardswish, torch.rand(1, 16, 9, 9), conv.weight, groups=2
    )
    assert call(precision="ieee").product_dtype == torch.float64
    assert call(precision="default").product_dtype == torch.float32


def test_the_floor_leaves_the_program_alone() -> None:
    """Neither fake tensors around it nor its random numbers are touched, nor in the way."""
    explanation = fusedconv.explain(fusedconv.ConvReLUHardswish(3, 8, 3), torch.rand(1, 3, 9, 9))
    copy_rate.cache_clear()
    product_rate.cache_clear()
    state = torch.get_rng_state()
    with FakeTensorMode():
        floor = explanation.floor_seconds()
    assert floor is not None
    assert 0 < floor < 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_no_call_is_faster_than_its_floor(dtype: torch.dtype) -> None:
    """By this machine's own rates, measured again where other programs ran beside them."""
    module = fusedconv.ConvReLUHardswish(16, 64, 3, dtype=dtype)
    x = torch.rand(4, 16, 64, 64, dtype=dtype)
    explanation = fusedconv.explain(module, x)
    with torch.no_grad():
        calls = interleaved({"call": lambda: module(x)}, rounds=5, warmup=1, device=x.device)
        fastest = min(times["call"] for times in calls)
    floors: list[float] = []
    while not floors or (floors[-1] > 2 * fastest and len(floors) < 4):
        product_rate.cache_clear()
        copy_rate.cache_clear()
        floors.append(cast(float, explanation.floor_seconds()))
    assert floors[-1] < 2 * fastest, floors


# ---- what is not run, not known, not right -------------------------------------------------------


def test_nothing_runs() -> None:
    """The input's memory is gone, which the call itself complains of."""
    module = fusedconv.ConvReLUHardswish(3, 8, 3)
    x = module_input()
    x.untyped_storage().resize_(0)
    assert fusedconv.explain(module, x).path == "direct"
    assert "input has no memory" in failure(lambda: module(x))[1]


def test_other_devices_run_plain_pytorch() -> None:
    x, weight = torch.rand(1, 3, 9, 9, device="meta"), torch.rand(8, 3, 3, 3, device="meta")
    explanation = fusedconv.explain(FF.conv2d_relu_hardswish, x, weight)
    assert explanation.path == "plain"
    assert "meta" in explanation.reason
    assert explanation.pytorch[:2] == (*CONVOLUTION, "aten::relu")
    assert explanation.kernels is None
    assert explanation.moved_bytes is None


@pytest.mark.parametrize("options", [{"precision": "high"}, {"stride": 0}, {}])
def test_errors_are_those_of_the_call(options: dict[str, Any]) -> None:
    x, weight = torch.rand(1, 3, 9, 9), torch.rand(8, 3 if options else 2, 3, 3)
    expected = failure(lambda: FF.conv2d_relu_hardswish(x, weight, **options))
    assert failure(lambda: fusedconv.explain(FF.conv2d_relu_hardswish, x, weight, **options)) == expected


def test_it_takes_what_calls_one_operator() -> None:
    x = torch.rand(1, 3, 9, 9)
    kind, text = failure(lambda: fusedconv.explain(torch.relu, x))
    assert kind is TypeError
    assert "calls 0" in text
    kind, text = failure(lambda: fusedconv.explain(lambda x: FF.relu_hardswish(FF.relu_hardswish(x)), x))
    assert kind is TypeError
    assert "calls 2" in text


def test_allocations_are_not_told() -> None:
    x = torch.rand(2, 1, 3, 9, 9)
    assert fusedconv.explain(torch.vmap(fusedconv.ConvReLUHardswish(3, 8, 3)), x).pytorch == ()


def test_its_text() -> None:
    explanation = Explanation(
        "conv2d_x", "two-step", "groups", "avx2", ("aten::convolution",), 12345, 6789012, None
    )
    assert str(explanation).splitlines() == [
        "conv2d_x",
        "  path             two-step: groups",
        "  kernels          avx2",
        "  PyTorch runs     aten::convolution",
        "  bytes moved      12,345",
        "  operations       6,789,012",
    ]
    text = str(replace(explanation, operator=None, pytorch=(), workspace_bytes=256))
    assert text.startswith("no operator of fusedconv\n")
    assert "  PyTorch runs     nothing\n" in text
    assert text.endswith("\n  workspace bytes  256")


# ---- CUDA, as far as a CPU can tell ----------------------------------------------------------------


class Launch:
    """In place of the extension's, for a card that runs the conv of a float32 input with few channels."""

    def __init__(self, chain: str, tensors: Any, input: Any, conv: Any, numbers: Any, output: Any) -> None:
        self._conv, self._channels = conv, input[1][1]

    def prepare_cuda(self, device: int) -> Planned:
        if self._conv is None:
            return Planned("chain", workspace_bytes=512)
        *_, groups, tf32 = self._conv
        if groups > 1 or self._channels > 64:
            return Planned("two-step", "groups" if groups > 1 else "many channels")
        return Planned(
            "direct", "sm_90a, tiles" + (" of tf32" if tf32 else ""), "sm_90a", 1024, 1 if tf32 else 3
        )

    def on_cuda(self, *args: Any) -> None:
        raise AssertionError("nothing is run here")


@pytest.mark.parametrize(
    ("channels", "groups", "precision", "words", "kernels", "workspace"),
    [
        (8, 1, "ieee", "direct, sm_90a, tiles", "sm_90a", 1024),
        (8, 1, "tf32", "direct, sm_90a, tiles of tf32", "sm_90a", 1024),
        (65, 1, "ieee", "two-step, many channels", "CUDA", 512),
        (8, 2, "ieee", "two-step, groups", "CUDA", 512),
    ],
)
@conv_rows
def test_on_cuda_it_asks_the_launchs_own_plan(
    row: Row,
    channels: int,
    groups: int,
    precision: str,
    words: str,
    kernels: str,
    workspace: int,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_C, "Launch", Launch)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    rules = OPERATORS[row.conv]
    launcher = rules.kernels.launcher
    monkeypatch.setattr(launcher, "has_cuda", lambda device: True)
    with FakeTensorMode() as fake:
        own = draw_own(row, 8, generator(row.chain))
        own = {n: torch.empty_like(a, device="cuda") if isinstance(a, Tensor) else a for n, a in own.items()}
        x = torch.empty(2, channels, 9, 11, device="cuda")
        weight = torch.empty(8, channels // groups, 3, 3, device="cuda")
        args = x, weight, None, *own.values(), (1, 1), (0, 0), (1, 1), groups
        explanation = _explain_operator(fake, rules, args, {"precision": precision})
        with fusedconv.float32_precision(precision):
            assert _explain_operator(fake, rules, args, {}) == replace(
                explanation, pytorch=explanation.pytorch and ("aten::_convolution",)
            )
        launcher.prepare_cuda(args, rules.operator.example(args), lambda args: x, precision)
    assert log.messages == [f"{row.conv} {[2, channels, 9, 11]} float32 {precision}: {words}"]
    assert f"{explanation.path}, {explanation.reason}" == words
    assert (explanation.kernels, explanation.workspace_bytes) == (kernels, workspace)
    assert explanation.product_dtype == torch.float16
    assert explanation.products == (3 if (explanation.path, precision) == ("direct", "ieee") else 1)
    assert bool(explanation.pytorch) == (explanation.path == "two-step")


# ---- settings of a process -----------------------------------------------------------------------

CALL = """
import torch, fusedconv, fusedconv.functional as FF
arguments = torch.rand(1, 3, 9, 9), torch.rand(8, 3, 3, 3)
print(fusedconv.explain(FF.conv2d_relu_hardswish, *arguments).kernels)
FF.conv2d_relu_hardswish(*arguments)
"""


def printed_by(code: str, **environment: str) -> list[str]:
    """The lines of both stdout and stderr."""
    return new_process("import sys; sys.stderr = sys.stdout\n" + code, environment=environment).splitlines()


@pytest.mark.parametrize("level", ["debug", "DEBUG"])
def test_the_log_on_stderr(level: str) -> None:
    said = "fusedconv: conv2d_relu_hardswish [1, 3, 9, 9] float32: direct, baseline, 27 products for a value"
    printed = printed_by(CALL, FUSEDCONV_LOG=level, FUSEDCONV_CPU_ISA="baseline")
    assert printed == ["baseline", said]


@pytest.mark.parametrize("level", ["", "info"])
def test_a_quieter_log(level: str) -> None:
    assert printed_by(CALL, FUSEDCONV_LOG=level, FUSEDCONV_CPU_ISA="baseline") == ["baseline"]


def test_a_program_that_logs_shows_a_message_once() -> None:
    set_up = "import logging; logging.basicConfig(format='mine: %(message)s')\n"
    printed = printed_by(set_up + CALL, FUSEDCONV_LOG="debug")
    assert len(printed) == 2
    assert printed[1].startswith("mine: conv2d_relu_hardswish")


def test_an_unknown_level() -> None:
    code = """
        try:
            import fusedconv
        except ValueError as error:
            print(error)
    """
    text = new_process(code, environment={"FUSEDCONV_LOG": "loud"})
    assert text.strip() == "FUSEDCONV_LOG must be one of debug, info, warning, error, critical, but is 'loud'"
