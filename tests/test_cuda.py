"""CUDA: every chain's results on CUDA tensors, and the rules of streams, graphs, devices and autocast."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedconv
from chains_table import CONV_ROWS, ROWS, Row, draw_own, generator, module_input, modules, randn
from fusedconv import _C
from helpers import BOUNDS, SIZES, assert_close, double, new_process, on, profile, same_bits

pytestmark = pytest.mark.cuda
all_rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.chain)
conv_rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
RELU_HARDSWISH = ROWS[0]


def _runs_our_kernels(row: Row) -> bool:
    return row.chain in _C.cuda_chains() and not _C.cuda_status(torch.cuda.current_device())


def check(row: Row, v: Tensor, own: dict[str, Any]) -> Tensor:
    """The chain on a CUDA tensor against float64 and exact eager on the same device."""
    with torch.no_grad():
        y = row.chain_op(v, own)
        reference, eager = row.plain_chain(v.double(), double(own)), row.plain_chain(v.contiguous(), own)
    assert y.dtype == eager.dtype
    assert y.device == v.device
    assert_close(y, reference, eager, BOUNDS[v.dtype], f"{row.chain} on {tuple(v.shape)} {v.dtype}")
    return y


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", DTYPES)
@all_rows
def test_chain_in_each_dtype_layout_and_tail(
    row: Row, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    gen = generator(row.chain, dtype)
    for i, channels in enumerate(SIZES):
        width = SIZES[(i * 7 + 5) % len(SIZES)]
        own = on(draw_own(row, channels, gen, dtype=dtype, pool_size=min(2, width)))
        v = randn(gen, 2, channels, 5, width).to("cuda", dtype).contiguous(memory_format=layout)
        assert check(row, v, own).is_contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", DTYPES)
@conv_rows
def test_conv_in_each_dtype_and_layout(row: Row, dtype: torch.dtype, layout: torch.memory_format) -> None:
    gen = generator(row.chain, dtype)
    for c_in, c_out, size in ((3, 16, (9, 13)), (8, 33, (20, 21))):
        own = on(draw_own(row, c_out, gen, dtype=dtype))
        x = randn(gen, 2, c_in, *size).to("cuda", dtype).contiguous(memory_format=layout)
        weight = (randn(gen, c_out, c_in, 3, 3) / (9 * c_in) ** 0.5).to("cuda", dtype)
        bias = randn(gen, c_out).to("cuda", dtype)
        with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
            y = row.conv_op(x, weight, bias, own, precision="ieee")
            reference = row.plain_conv(x.double(), weight.double(), bias.double(), double(own))
            eager = row.plain_conv(x.contiguous(), weight, bias, own)
        assert y.dtype == eager.dtype
        assert_close(y, reference, eager, BOUNDS[dtype], row.conv)


def test_the_kernel_runs_where_it_should() -> None:
    """relu_hardswish on a CUDA tensor is one kernel of ours, if this build can run here."""
    if not _runs_our_kernels(RELU_HARDSWISH):
        pytest.skip("this build has no CUDA kernels for this device")
    v = torch.randn(2, 8, 16, 16, device="cuda")
    torch.ops.fusedconv.relu_hardswish(v)
    ran = profile(lambda: torch.ops.fusedconv.relu_hardswish(v))
    kernels = [name for name in ran.kernels if "Memset" not in name]
    assert len(kernels) == 1, kernels


@all_rows
def test_row_2_views(row: Row) -> None:
    gen = generator(row.chain, "views")
    own = on(draw_own(row, 8, gen))
    base = randn(gen, 2, 8, 12, 14).cuda()
    for v in (
        base[..., ::2],
        base[:, :, 1:-2, 3:],
        base.transpose(2, 3),
        base[:, :, :1].expand(-1, -1, 12, -1),
    ):
        assert torch.allclose(check(row, v, own), row.chain_op(v.contiguous(), own), rtol=1e-5, atol=1e-6)


@all_rows
def test_row_3_batch_of_zero(row: Row) -> None:
    own = on(draw_own(row, 8, generator(row.chain)))
    v = torch.empty(0, 8, 9, 10, device="cuda")
    assert row.chain_op(v, own).shape == row.plain_chain(v, own).shape
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_below_the_least_normal_one(dtype: torch.dtype) -> None:
    """They are no zeros, nor are such gradients: in half precision 2e-5 is one of them."""
    info = torch.finfo(dtype)
    step = info.smallest_normal * info.eps
    least = torch.linspace(-0.5, 1, 1000, dtype=torch.float64, device="cuda") * 2 * info.smallest_normal
    v = least.to(dtype).view(1, 1, 10, 100)
    op = torch.ops.fusedconv.relu_hardswish
    reference = RELU_HARDSWISH.plain_chain(v.double(), {})
    assert float((op(v).double() - reference).abs().max()) <= step
    ones = torch.ones_like(v, requires_grad=True)
    (found,) = torch.autograd.grad(op(ones), ones, v)
    assert float((found.double() - v.double() * (5 / 6)).abs().max()) <= step


@all_rows
def test_a_chain_on_values_below_the_least_normal_one(row: Row) -> None:
    gen = generator("subnormal", row.chain)
    own = on(draw_own(row, 8, gen, dtype=torch.float16))
    check(row, (2e-5 * randn(gen, 2, 8, 20, 24)).cuda().half(), own)


@pytest.mark.slow
def test_row_4_batch_beyond_65535_and_more_than_two_to_the_31st_elements() -> None:
    v = torch.randn(70_000, 1, 2, 3, device="cuda")
    check(RELU_HARDSWISH, v, {})
    if torch.cuda.mem_get_info()[0] < 14e9:
        pytest.skip("needs 14 GB of free memory")
    v = torch.empty(1, 1, 2**16 + 1, 2**15 + 3, device="cuda", dtype=torch.bfloat16).normal_()
    y = torch.ops.fusedconv.relu_hardswish(v)
    for part in (slice(0, 5), slice(-5, None)):
        assert torch.allclose(
            y[:, :, part], RELU_HARDSWISH.plain_chain(v[:, :, part], {}), rtol=1e-2, atol=1e-2
        )


@all_rows
def test_row_10_nan_and_infinity(row: Row) -> None:
    gen = generator(row.chain, "nan")
    own = on(draw_own(row, 8, gen))
    for value in (float("nan"), float("inf"), -float("inf")):
        v = randn(gen, 3, 8, 7, 9).cuda()
        v[1, 2, 3, 4] = value
        torch.testing.assert_close(
            row.chain_op(v, own), row.plain_chain(v, own), rtol=1e-5, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@conv_rows
def test_row_19_autocast(row: Row, dtype: torch.dtype) -> None:
    """Output dtype and tolerance of the unfused chain under autocast; gradients of the parameters' dtype."""
    fused, plain = (m.cuda() for m in modules(row, 3, 16))
    x = module_input(4).cuda()
    results = []
    for model in (fused, plain):
        with torch.autocast("cuda", dtype):
            y = model(x)
        found = torch.autograd.grad(y.float().square().sum(), list(model.parameters()))
        assert {g.dtype for g in found} == {torch.float32}
        results.append(y.detach())
    assert results[0].dtype == results[1].dtype
    conv: Any = plain.get_submodule("conv")
    with torch.no_grad():
        exact: Any = modules(row, 3, 16)[1].double().cuda()
        exact.conv.weight.copy_(conv.weight.to(dtype).double())
        exact.conv.bias.copy_(conv.bias.to(dtype).double())
        reference = exact(x.to(dtype).double())
    assert_close(results[0], reference, results[1], BOUNDS[dtype], row.conv)


@all_rows
def test_row_19_chain_under_autocast(row: Row) -> None:
    gen = generator(row.chain, "autocast")
    own = on(draw_own(row, 8, gen))
    for dtype in (torch.bfloat16, torch.float16):
        for v in (randn(gen, 2, 8, 6, 7).cuda(), randn(gen, 2, 8, 6, 7).to("cuda", dtype)):
            with torch.no_grad(), torch.autocast("cuda", dtype):
                assert row.chain_op(v, own).dtype == row.plain_chain(v, own).dtype


def test_a_child_that_was_forked_gets_an_error() -> None:
    """CUDA serves no child of a process that used it: PyTorch says so or, of a new signature, we; nothing hangs."""
    code = """
        import os, torch
        import fusedconv.functional as FF
        v, weight = torch.randn(2, 8, 40, 40, device="cuda"), torch.randn(16, 8, 3, 3, device="cuda")
        v_of_one = v[:1]
        for call in FF.relu_hardswish, lambda x: FF.conv2d_group_norm_silu(x, weight, None, 2):
            call(v)
            torch.cuda.synchronize()
            for x in v, v_of_one:
                child = os.fork()
                if child == 0:
                    try:
                        call(x)
                    except RuntimeError as error:
                        print(error, flush=True)
                        os._exit(7)
                    os._exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            call(v)
        torch.cuda.synchronize()
    """
    assert new_process(code, timeout=120).count("forked from one that had used CUDA") == 2, "one error each"


@two_devices
@all_rows
def test_row_20_the_tensors_device_is_used_and_the_current_one_kept(row: Row) -> None:
    gen = generator(row.chain, "devices")
    own = on(draw_own(row, 8, gen), "cuda:1")
    v = randn(gen, 2, 8, 9, 9).to("cuda:1")
    torch.cuda.set_device(0)
    with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        y = check(row, v, own)
    assert y.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0


@two_devices
def test_row_17_tensors_on_two_devices() -> None:
    row = next(row for row in ROWS if "scale" in row.arguments)
    own = draw_own(row, 8, generator("two"))
    with pytest.raises((RuntimeError, ValueError), match=r"bias|scale"):
        row.chain_op(torch.ones(1, 8, 4, 4, device="cuda:0"), on(own, "cuda:1"))


def test_row_17_a_parameter_on_the_cpu() -> None:
    row = next(row for row in ROWS if "scale" in row.arguments)
    own = draw_own(row, 8, generator("cpu"))
    with pytest.raises((RuntimeError, ValueError), match=r"bias|scale"):
        row.chain_op(torch.ones(1, 8, 4, 4, device="cuda"), own)


@all_rows
def test_row_21_side_stream_and_input_freed_right_after(row: Row) -> None:
    """The input is made, used and freed on a busy side stream, and its memory is taken again at once."""
    gen = generator(row.chain, "stream")
    own = on(draw_own(row, 8, gen))
    kept = randn(gen, 4, 8, 64, 64).cuda()
    right = row.plain_chain(kept, own)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results = []
        for _ in range(5):
            torch.cuda._sleep(2_000_000)
            v = kept.clone()
            results.append(row.chain_op(v, own))
            del v
            torch.empty_like(kept).fill_(float("nan"))
    torch.cuda.current_stream().wait_stream(stream)
    for y in results:
        torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-5)


@all_rows
def test_row_22_graph_capture_and_replay(row: Row) -> None:
    gen = generator(row.chain, "graph")
    own = on(draw_own(row, 8, gen))
    v = randn(gen, 2, 8, 16, 17).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        row.chain_op(v, own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = row.chain_op(v, own)
    for _ in range(3):
        v.copy_(randn(gen, *v.shape))
        graph.replay()
        torch.testing.assert_close(y, row.plain_chain(v, own), rtol=1e-5, atol=1e-5)


def test_row_22_capture_without_a_warm_up() -> None:
    """The very first call of the process is captured: kernels are loaded before, not within, the capture."""
    code = """
        import torch, fusedconv
        v = torch.randn(2, 8, 9, 9, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.ops.fusedconv.relu_hardswish(v)
        v.fill_(2.0)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(y, torch.full_like(y, 2 * 5 / 6))
        print("captured")
    """
    assert "captured" in new_process(code)


def test_row_22_no_synchronising_call() -> None:
    v = torch.randn(2, 8, 16, 16, device="cuda")
    torch.ops.fusedconv.relu_hardswish(v)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ops.fusedconv.relu_hardswish(v)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    done = torch.cuda.Event()
    torch.ops.fusedconv.relu_hardswish(v)
    done.record()
    assert not done.query(), "the call waited for the device"


@conv_rows
def test_row_26_reduce_overhead_on_cuda(row: Row) -> None:
    fused, plain = (m.cuda() for m in modules(row))
    compiled = torch.compile(fused, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for seed in range(4):
            x = module_input(seed=seed).cuda()
            torch.testing.assert_close(compiled(x), plain(x), rtol=2e-4, atol=2e-4)
    torch._dynamo.reset()


@conv_rows
def test_gradients_on_cuda(row: Row) -> None:
    fused, plain = (m.cuda().double() for m in modules(row))
    x = module_input().cuda().double()
    found = []
    for model in (fused, plain):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(model(leaf).square().sum(), [leaf, *model.parameters()]))
    named = [n for n, _ in fused.named_parameters()]
    assert named == [n for n, _ in plain.named_parameters()]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_29_same_bits_in_each_run_batch_and_mode(dtype: torch.dtype) -> None:
    gen = generator("bits", dtype)
    for row in ROWS:
        own = on(draw_own(row, 8, gen, dtype=dtype))
        v = randn(gen, 4, 8, 33, 35).to("cuda", dtype)
        y = row.chain_op(v, own)
        torch.use_deterministic_algorithms(True)
        assert same_bits(y, row.chain_op(v, own))
        torch.use_deterministic_algorithms(False)
        if _runs_our_kernels(row):
            assert same_bits(y[2:3], row.chain_op(v[2:3].clone(), own))


# Channels, height and width of samples that are kept on chip by one block, by a cluster of blocks, or not at all.
# The last are not whole vectors: samples start anywhere in them.
SCHEDULES = (
    *((16, 8, 8), (32, 64, 64), (8, 126, 126), (24, 14, 14), (520, 7, 7), (16, 640, 512)),
    *((3, 5, 6), (12, 5, 5), (3, 50, 51)),
)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", DTYPES)
@all_rows
def test_every_schedule(row: Row, dtype: torch.dtype, layout: torch.memory_format) -> None:
    """Right, and the same bits wherever in whatever batch a sample stands."""
    gen = generator("schedules", row.chain, dtype)
    for channels, height, width in SCHEDULES:
        own = on(draw_own(row, channels, gen, dtype=dtype))
        v = randn(gen, 3, channels, height, width).to("cuda", dtype).contiguous(memory_format=layout)
        y = check(row, v, own)
        if _runs_our_kernels(row):
            assert same_bits(y[1:], row.chain_op(v[1:], own)), (channels, height, width)
            last = v[2:].clone(memory_format=layout)
            assert same_bits(y[2:], row.chain_op(last, own)), (channels, height, width)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("size", [64, 1024])
@all_rows
def test_a_mean_much_larger_than_the_deviation(row: Row, size: int, layout: torch.memory_format) -> None:
    gen = generator("mean", row.chain)
    own = on(draw_own(row, 4, gen))
    v = (randn(gen, 2, 4, size, size) * 0.01 + 100).cuda().contiguous(memory_format=layout)
    check(row, v, own)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("size", [16, 56, 225, 512])
@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("rows", [0, 1])
def test_few_values_far_from_all_others(
    rows: int, noise: float, size: int, layout: torch.memory_format
) -> None:
    """The first ones, about which deviations might be taken, cost the others no digits."""
    gen = generator("far", size)
    v = (noise * randn(gen, 2, 8, size, size) + 0.37).cuda()
    far = torch.zeros(size, size, dtype=torch.bool)
    far[: max(rows, 1), : size if rows else 1] = True
    v[:, :, far] = size * 3.0
    v = v.contiguous(memory_format=layout)
    y = torch.ops.fusedconv.group_norm_silu(v, 2, None, None, 1e-5)
    reference = torch.nn.functional.silu(torch.nn.functional.group_norm(v.double(), 2))
    others = reference[:, :, ~far]
    assert (y.double()[:, :, ~far] - others).abs().max() < 2e-6 * others.abs().max()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", DTYPES)
@all_rows
def test_many_channels_of_few_pixels(row: Row, dtype: torch.dtype, layout: torch.memory_format) -> None:
    gen = generator("many channels", row.chain, dtype)
    for channels, groups, height, width in ((12288, 1, 1, 1), (3072, 1, 2, 2), (752, 47, 1049, 1)):
        if "pool_size" in row.arguments and min(height, width) < 2:
            continue
        own = on(draw_own(row, channels, gen, dtype=dtype))
        own.update({n: x for n, x in (("num_groups", groups), ("pool_size", [2, 2])) if n in own})
        v = randn(gen, 3, channels, height, width).to("cuda", dtype).contiguous(memory_format=layout)
        check(row, v, own)
        check(row, torch.cat([v.flatten(), v.flatten()[:1]])[1:].view(v.shape), own)  # where no vector starts


def test_errors_name_the_operator() -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError), match="input"):
        torch.ops.fusedconv.relu_hardswish(torch.ones(1, 8, 4, 4, device="cuda", dtype=torch.int32))


def test_row_31_build_and_device_are_told() -> None:
    assert torch.cuda.get_device_name() in fusedconv.show_config()
    assert isinstance(_C.cuda_status(torch.cuda.current_device()), str)


def test_row_24_import_leaves_cuda_alone_and_a_fork_may_use_it() -> None:
    code = """
        import os, torch, fusedconv
        torch.ops.fusedconv.relu_hardswish(torch.ones(1, 1, 2, 2))
        assert not torch.cuda.is_initialized()
        child = os.fork()
        y = torch.ops.fusedconv.relu_hardswish(torch.ones(1, 1, 2, 2, device="cuda")).cpu()
        assert abs(float(y[0, 0, 0, 0]) - 4 / 6) < 1e-6
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print("right")
    """
    assert "right" in new_process(code)


def test_memory_of_a_call_is_its_output() -> None:
    v = torch.randn(4, 16, 64, 64, device="cuda")
    torch.ops.fusedconv.relu_hardswish(v)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = torch.ops.fusedconv.relu_hardswish(v)
    if _runs_our_kernels(RELU_HARDSWISH):
        assert torch.cuda.max_memory_allocated() - before <= y.numel() * y.element_size() + 512
