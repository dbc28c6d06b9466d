"""Breaks the code on purpose, one place at a time, and looks whether a test notices.

    python tests/mutations.py             all mutations; writes tests/MUTATIONS.md
    python tests/mutations.py 8 relu      only those of row 8 and those whose description holds "relu"; the other lines stay

Works on a copy of the checkout in a temporary folder; fusedconv must not be installed in editable mode. Needs what
a build without isolation needs: scikit-build-core, pybind11, cmake and ninja.
"""

# ruff: noqa: E501  code that is to be replaced is quoted as it stands

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "MUTATIONS.md"
CPU, CORE, PLAN, CUDA, PYTHON = "csrc/cpu/", "csrc/core/", "csrc/plan/", "csrc/cuda/", "python/fusedconv/"


@dataclass(frozen=True)
class Mutation:
    rows: str  # of the table of cases, or a word for what is not in it
    what: str
    file: str
    old: str
    new: str
    tests: str  # arguments of pytest; at least one test must fail


MUTATIONS = (
    Mutation("1", "the output is always NCHW", PYTHON + "_operator.py",
             "if over_width < over_channels:", "if True:", "tests/test_numerics.py -k row_1_"),
    Mutation("2", "strides of a contiguous tensor are passed on", PYTHON + "_launch.py",
             "tensor.stride()", "tensor.contiguous().stride()", "tests/test_layouts.py -k row_2"),
    Mutation("2", "expanded and stepped parameters are passed as they are", PYTHON + "_launch.py",
             " and vector.is_contiguous()", "", "tests/test_layouts.py -k row_2_param"),
    Mutation("3", "an empty gradient for parameters at batch 0", PYTHON + "_backward.py",
             "torch.zeros_like(a) for a in asked", "torch.ones_like(a) for a in asked", "tests/test_layouts.py -k row_3"),
    Mutation("4", "32-bit offset of a sample", CPU + "tensor_source.h",
             "place.sample * v_.stride[0]", "int32_t(place.sample * v_.stride[0])", "tests/test_layouts.py -k row_4"),
    Mutation("5", "a tail counts one column too many in the statistics", CPU + "statistics.h",
             "(cols - whole);", "(cols - whole + 1);", "tests/test_numerics.py -k row_5"),
    Mutation("5", "the last column of a tail is not stored", CPU + "convert.h",
             "for (int64_t w = 0; w < pixels; ++w) to_row[w] = Narrow",
             "for (int64_t w = 0; w < pixels - (pixels % 4 == 1); ++w) to_row[w] = Narrow", "tests/test_numerics.py -k 'row_5 or written'"),
    Mutation("5", "where a row ends in a vector, the next row starts one column late", CPU + "store_tile.h",
             "load(row + pitch - left)", "load(row + pitch - left + 1)", "tests/test_numerics.py -k row_5"),
    Mutation("5", "the last pixels of a run are not stored", CPU + "store_tile.h",
             "pitch + cols - left)), left);", "pitch + cols - left)), left - (left > 0));", "tests/test_numerics.py -k row_5"),
    Mutation("5", "large outputs are streamed as they were before the chain", CPU + "store_tile.h",
             "stream(aligned, stage(x));", "stream(aligned, x);", "tests/test_numerics.py -k large_outputs"),
    Mutation("6", "no error for one element per group", PYTHON + "chains.py",
             "if channels == groups and height == 1", "if False and height == 1", "tests/test_special_values.py -k row_6"),
    Mutation("7", "groups that do not divide the channels are let through", PYTHON + "chains.py",
             "if groups < 1 or channels % groups:", "if groups < 1:", "tests/test_errors.py -k '7 and divide'"),
    Mutation("8", "statistics by E[x^2] - E[x]^2 in float32", CPU + "statistics.h",
             "const T shift = T(sum_of_lanes(total<T>(sum)) / (double(some_rows) * double(cols)));", "const T shift = T(0);", "tests/test_numerics.py -k row_8"),
    Mutation("8", "sums of any number of pixels in the compute type", CPU + "statistics.h",
             "kLanePixels = 128", "kLanePixels = int64_t(1) << 40", "tests/test_isa.py -k wide_row"),
    Mutation("9", "a sum of squares saturates where half does", CPU + "statistics.h",
             "all.m2 / all.count", "(all.m2 > 65504.0 ? 65504.0 : all.m2) / all.count", "tests/test_numerics.py -k row_9"),
    Mutation("9", "hardswish overflows before its division", CORE + "pointwise.h",
             "return x * hardsigmoid<T>(x);",
             "return x * (hardsigmoid<T>(x) * T(6)) * T(1.0 / 6.0);", "tests/test_isa.py -k huge"),
    Mutation("10", "relu loses NaN", CORE + "vector_math.h",
             "return select(x < T(0), X{}, x);", "return select(x > T(0), x, X{});", "tests/test_special_values.py -k row_10"),
    Mutation("10", "the clamp loses NaN", CORE + "pointwise.h",
             "select(x != x || low != low, x + low, clamped)", "select(low != low, x + low, clamped)",
             "tests/test_special_values.py -k row_10"),
    Mutation("10", "logsumexp loses NaN", CPU + "reduce_tile.h",
             "select(sum != sum, sum, select(infinite, most, shift + log(sum)))",
             "select(infinite, most, shift + log(select(sum != sum, Vector<T>{} + T(1), sum)))",
             "tests/test_special_values.py -k row_10"),
    Mutation("10", "padding is multiplied with garbage", CPU + "conv_source.cpp",
             "clear_columns(packed, end, this->pitch);", "", "tests/test_special_values.py -k row_10"),
    Mutation("11", "the norm's scale loses its sign", CORE + "chain.h",
             "channel.norm_scale = static_cast<T>(scale);", "channel.norm_scale = static_cast<T>(__builtin_fabs(scale));",
             "tests/test_special_values.py -k row_11"),
    Mutation("12", "the last of tied values gets the gradient", PYTHON + "chains.py",
             "F.max_pool2d(_group_norm(v, num_groups, norm_weight, norm_bias, eps) * scale, pool_size)",
             "F.max_pool2d((_group_norm(v, num_groups, norm_weight, norm_bias, eps) * scale).flip(3), pool_size).flip(3)", "tests/test_special_values.py -k row_12_ties"),
    Mutation("12", "a pool window larger than the map is let through", PYTHON + "chains.py",
             "(fits := window <= size) is not True", "False", "tests/test_special_values.py -k row_12"),
    Mutation("13", "logsumexp without the maximum", CPU + "reduce_tile.h",
             "select(infinite, Vector<T>{}, most);", "Vector<T>{};", "tests/test_special_values.py -k row_13"),
    Mutation("14", "the gradient of relu at 0 is a half", PYTHON + "chains.py",
             "    v = F.relu(v)\n", "    v = torch.maximum(v, torch.zeros_like(v))\n", "tests/test_special_values.py -k row_14"),
    Mutation("15", "the lower clamp bound wins where the bounds cross", CORE + "pointwise.h",
             "const X raised = select(x >= low, x, low);\n    const X clamped = select(raised <= high, raised, high);",
             "const X raised = select(x <= high, x, high);\n    const X clamped = select(raised >= low, raised, low);",
             "tests/test_special_values.py -k row_15"),
    Mutation("15", "a NaN bound is ignored", CORE + "pointwise.h",
             "x != x || low != low", "x != x", "tests/test_special_values.py -k row_15"),
    Mutation("16", "every gradient is computed", PYTHON + "_forward.py",
             "mask = [*needed, ", "mask = [*[tensor is not None for tensor in tensors], ",
             "tests/test_autograd.py -k row_16"),
    Mutation("17", "the weight's dtype is not looked at", PYTHON + "chains.py",
             "if weight.dtype is not input.dtype or weight.device != input.device:", "if weight.device != input.device:",
             "tests/test_errors.py -k '17 and weight'"),
    Mutation("17", "devices are not looked at", PYTHON + "chains.py",
             "or tensor.device != input.device:", "or False:", "tests/test_errors.py -k device"),
    Mutation("18", "stride 0 is let through", PYTHON + "chains.py",
             '(("stride", stride, 1)', '(("stride", stride, 0)', "tests/test_errors.py -k 'stride'"),
    Mutation("18", "a kernel larger than the input is let through", PYTHON + "chains.py",
             "for fits in (spare_h >= 0, spare_w >= 0):", "for fits in (True, spare_w >= 0):", "tests/test_errors.py -k kernel"),
    Mutation("19", "autocast does not cast", PYTHON + "_forward.py",
             "if _autocasts(args[i]):", "if False:", "tests/test_autocast.py -k row_19"),
    Mutation("19", "autocast casts all arguments", PYTHON + "_forward.py",
             "for i in self.operator.conv_tensors[: len(args)]:", "for i in self.operator.tensors[: len(args)]:", "tests/test_autocast.py"),
    Mutation("23", "the GIL is kept in a long call", "csrc/bindings.cpp",
             "(pointer(statistics));\n\n    const py::gil_scoped_release release;\n",
             "(pointer(statistics));\n", "tests/test_threads.py -k row_23_the_gil"),
    Mutation("23", "all calls share one scratch memory", CPU + "schedule.h",
             "const Buffer<T> memory(Checked(scratch_elements_) + tile_elements_, tiling_.threads);",
             "static const Buffer<T> memory(100'000'000);", "tests/test_threads.py -k row_23_many"),
    Mutation("24", "a forked child uses the parent's threads", CPU + "threads.cpp",
             " || may_have_lost_its_team) return false;", ") return false;", "tests/test_threads.py -k row_24_children_after"),
    Mutation("24", "a forked child has one thread", CPU + "threads.cpp",
             "if (threads <= 1) {", "if (threads <= 1 || may_have_lost_its_team) {", "tests/test_threads.py -k row_24_children_use"),
    Mutation("25", "each thread flushes denormals as it did before", CPU + "threads.cpp",
             "    callers_mode.set();\n", "", "tests/test_threads.py -k row_25_all_threads"),
    Mutation("flush", "half's denormals go through float's", CORE + "parameter.h",
             "2.0f * normal - 0x1p-14f;", "bit_cast<float>(magnitude) * 0x1p112f;", "tests/test_special_values.py -k half_value"),
    Mutation("25", "the number of threads is the machine's", PYTHON + "_launch.py",
             "*pointers, torch.get_num_threads()", "*pointers, 2", "tests/test_threads.py -k row_25_one"),
    Mutation("25", "tiles, and so sums, depend on the number of threads", CPU + "tiling.h",
             "Chain::Reduce::kPools ? arguments.pool[0] : 1);", "(Chain::Reduce::kPools ? arguments.pool[0] : 1) * threads);", "tests/test_threads.py -k row_25_any"),
    Mutation("bits", "tiles, and so sums, depend on the batch", CPU + "tiling.h",
             "kTilePixels / source.pitch)", "kTilePixels / source.pitch / source.samples / 8 + 1)",
             "tests/test_numerics.py -k depend"),
    Mutation("26", "the batch is tied to the example's", PYTHON + "chains.py",
             "    return shape\n\n\ndef check_conv", "    return tuple(int(s) for s in shape)\n\n\ndef check_conv",
             "tests/test_compile.py -k row_26_compile"),
    Mutation("26", "a graph break in the module", PYTHON + "config.py",
             "    return _precision\n", "    print(end='')\n    torch._dynamo.graph_break()\n    return _precision\n",
             "tests/test_compile.py -k row_26_compile"),
    Mutation("27", "the bounds of the clamp stay whole numbers", PYTHON + "nn.py",
             "None if clamp_min is None else float(clamp_min)", "clamp_min", "tests/test_compile.py -k row_27_script"),
    Mutation("27", "the fake operator gives another memory format", PYTHON + "_forward.py",
             "-> Tensor:\n        return self.operator.empty(given, **options)",
             "-> Tensor:\n        return self.operator.empty(given, **options).contiguous(memory_format=torch.channels_last)",
             "tests/test_compile.py tests/test_errors.py -k 'opcheck or fake_output'"),
    Mutation("cache", "what was prepared forgets the strides", PYTHON + "_operator.py",
             "tensor.shape, tensor.stride(), tensor.dtype", "tensor.shape, tensor.dtype", "tests/test_numerics.py -k prepared"),
    Mutation("cache", "what was prepared forgets the numbers", PYTHON + "_operator.py",
             "return (*key, *options.items())",
             "return (*(k for k in key if not isinstance(k, float)), *options.items())", "tests/test_numerics.py -k prepared"),
    Mutation("28", "no rule for the second gradient", PYTHON + "_backward.py",
             "if not tangent and not needs_gradient(tensors):", "if True:", "tests/test_autograd.py -k 'gradcheck or second'"),
    Mutation("graphs", "backward is expanded where gradients are on", PYTHON + "_backward.py",
             "        if tangent:\n            self.refuse", "        if True:\n            self.refuse", "tests/test_compile.py -k joint_graphs"),
    Mutation("graphs", "the statistics are constants of a graph traced above autograd", PYTHON + "_forward.py",
             "if statistics is not None and is_traced_above_autograd():", "if False:", "tests/test_compile.py -k training_step"),
    Mutation("graphs", "forward mode asks for Python's count of levels alone", PYTHON + "_dispatch.py",
             "if not (level or active or _graphs_open_levels):", "if not level:", "tests/test_compile.py -k forward_mode"),
    Mutation("graphs", "a level that a graph opens is not remembered", PYTHON + "_dispatch.py",
             "    _graphs_open_levels |= level", "    _graphs_open_levels |= False and level", "tests/test_compile.py -k forward_mode"),
    Mutation("17", "a nested tensor meets its own rules", PYTHON + "_dispatch.py",
             "if keys & _NESTED:", "if False:", "tests/test_errors.py -k nested"),
    Mutation("28", "torch.func sees no gradient", PYTHON + "_forward.py",
             "if tangent or torch._C._are_functorch_transforms_active():\n            return self.plain(*given, differentiable=True, **options)\n        recorded",
             "if tangent:\n            return self.plain(*given, differentiable=True, **options)\n        recorded",
             "tests/test_autograd.py -k 'func_grad or jacobian'"),
    Mutation("16", "zeros are made for the gradient of the statistics", PYTHON + "_forward.py",
             "ctx.set_materialize_grads(False)", "ctx.set_materialize_grads(True)", "tests/test_statistics.py -k no_gradient_for_them"),
    Mutation("16", "an absent gradient of the output is not looked for", PYTHON + "_forward.py",
             "if grad is None:", "if False:", "tests/test_autograd.py -k without_a_gradient"),
    Mutation("28", "tensors for backward are saved without their versions", PYTHON + "_forward.py",
             "ctx.save_for_backward(*tensors, statistics)",
             "ctx.save_for_backward(*[None if tensor is None else tensor.data for tensor in tensors], statistics)",
             "tests/test_autograd.py -k in_place"),
    Mutation("28", "vmap takes the first dimension for the mapped one", PYTHON + "_forward.py",
             "given[0].movedim(in_dims[0], 0)", "given[0]", "tests/test_autograd.py -k row_28_vmap"),
    Mutation("28", "forward mode is silently zero", PYTHON + "_dispatch.py",
             "if not any(map(_is_dual, tensors)):", "if True:",
             "tests/test_autograd.py -k forward_mode"),
    Mutation("29", "refuses deterministic mode", PYTHON + "_forward.py",
             "    def cpu(self, *given: Any, **options: Any) -> Tensor:\n",
             "    def cpu(self, *given: Any, **options: Any) -> Tensor:\n"
             "        assert not torch.are_deterministic_algorithms_enabled()\n", "tests/test_threads.py -k row_29"),
    Mutation("30", "hooks of the conv are bypassed", PYTHON + "_stock.py",
             'own["_forward_hooks"]\n        or ', "", "tests/test_modules.py -k 'row_30_what and conv'"),
    Mutation("30", "pre-hooks of the conv are bypassed", PYTHON + "_stock.py",
             '        or own["_forward_pre_hooks"]\n', "", "tests/test_modules.py -k row_30"),
    Mutation("30", "backward hooks are bypassed", PYTHON + "_stock.py",
             '        or own["_backward_hooks"]\n', "", "tests/test_modules.py -k row_30"),
    Mutation("30", "a subclass in the conv's place is bypassed", PYTHON + "_stock.py",
             "if type(module) is not kind:", "if not isinstance(module, kind):",
             "tests/test_modules.py -k 'row_30_what'"),
    Mutation("30", "a forward put on the instance is bypassed", PYTHON + "_stock.py",
             '        or "forward" in own\n', "", "tests/test_modules.py -k row_30_what"),
    Mutation("30", "a weight that is no plain parameter is bypassed", PYTHON + "_stock.py",
             "        or (type(weight) is not Parameter and not _is_ordinary(weight))\n", "",
             "tests/test_modules.py -k row_30"),
    Mutation("30", "global hooks are bypassed", PYTHON + "_stock.py",
             "        or _every_module._global_forward_hooks\n", "", "tests/test_modules.py -k row_30_global"),
    Mutation("30", "a patch of the conv's class is bypassed", PYTHON + "_stock.py",
             "return code == known or", "return True or",
             "tests/test_modules.py -k 'classes and Conv2d'"),
    Mutation("30", "what was patched before the import is taken for PyTorch's", PYTHON + "_stock.py",
             "return None if foreign else code", "return code",
             "tests/test_modules.py -k before_the_import"),
    Mutation("30", "padding_mode is ignored", PYTHON + "nn.py",
             ' or conv.padding_mode != "zeros"', "", "tests/test_modules.py -k keyword"),
    Mutation("30", "padding 'same' that is not the same on both sides is halved", PYTHON + "nn.py",
             "if any(pixels % 2 for pixels in total):", "if False:", "tests/test_modules.py -k keyword"),
    Mutation("30", "scale starts as randn", PYTHON + "nn.py",
             "torch.ones(", "torch.randn(", "tests/test_modules.py -k same_seed"),
    Mutation("31", "a machine without CUDA is said to be usable", "csrc/cuda/host/entry_absent.cpp",
             'return "fusedconv was built without CUDA";', 'return "";', "tests/test_packaging.py -k row_31"),
    Mutation("profiler", "the two-step path everywhere", PLAN + "cpu_policy.cpp",
             "if (conv_.groups != 1) return", "return", "tests/test_memory.py -k no_operator"),
    Mutation("memory", "the conv's output is allocated", PLAN + "cpu_policy.cpp",
             "if (conv_.groups != 1) return", "return", "tests/test_memory.py -k tenth"),
    Mutation("memory", "each thread keeps the tiles of a unit", CPU + "schedule.h",
             "kAllKeepBytes = 64 * 1024 * 1024", "kAllKeepBytes = int64_t(1) << 40", "tests/test_memory.py -k many_threads"),
    Mutation("32", "our conv packs however much it takes", PLAN + "cpu_policy.cpp",
             "if (divide_up(Checked(packed()), kMostPacked) > values())", "if (false)", "tests/test_cpu_paths.py -k extreme"),
    Mutation("32", "our conv computes however many pixels it takes", PLAN + "cpu_policy.cpp",
             "if (divide_up(Checked(computed()), kMostComputed) > pixels())", "if (false)", "tests/test_cpu_paths.py -k extreme"),
    Mutation("37", "all products are one sum", CPU + "conv_block.h",
             "kSumTaps = 64", "kSumTaps = int64_t(1) << 40", "tests/test_cpu_paths.py -k large_mean"),
    Mutation("backward", "forward keeps the statistics of each unit's groups in the first ones' place", CPU + "schedule.h",
             "first + unit.channel / tiling_.group_channels + g", "first + g", "tests/test_statistics.py -k of_the_chain"),
    Mutation("backward", "a strip does not see the rows above it", CPU + "conv_backward.h",
             "if (strip.begin > 0 && wants_input()) {", "if (false && wants_input()) {",
             "tests/test_cpu_conv_backward.py -k bands"),
    Mutation("backward", "the rows above a strip count twice in the parameters' sums", CPU + "conv_backward.h",
             "differentiate(strip, halo, to.data, nullptr, worker);",
             "differentiate(strip, halo, to.data, sums_.data() + strip.index * channel_count_, worker);",
             "tests/test_cpu_conv_backward.py -k bands"),
    Mutation("backward", "a band's last rows do not reach the next one", CPU + "conv_backward.h",
             "      gradients_.advance(to, band_rows_);\n", "", "tests/test_cpu_conv_backward.py -k bands"),
    Mutation("backward", "rows that v lacks keep what stood there", CPU + "conv_backward.h",
             "      clear_rows(to, where.rows);\n", "", "tests/test_cpu_conv_backward.py -k bands"),
    Mutation("backward", "the weight's sums of a sample's first strip only", CPU + "conv_backward.h",
             "for (int64_t i = c * taps; i < (c + 1) * taps; ++i) weight_total_[i]",
             "for (int64_t i = c * taps; i < (c + 1) * taps && s % strips_ == 0; ++i) weight_total_[i]",
             "tests/test_cpu_conv_backward.py -k bands"),
    Mutation("backward", "the input's gradient with the kernel not turned around", CPU + "conv_gradients.cpp",
             "c * plane_ - kh * conv.dilation[0] * pitch_ - kw * conv.dilation[1]",
             "c * plane_ - (conv.weight.size[2] - 1 - kh) * conv.dilation[0] * pitch_ - kw * conv.dilation[1]",
             "tests/test_cpu_conv_backward.py -k random"),
    Mutation("backward", "the padding has a gradient", CPU + "conv_gradients.cpp",
             "(r - row) * pitch_ + padding[1],", "(r - row) * pitch_,", "tests/test_cpu_conv_backward.py -k random"),
    Mutation("backward", "a half-precision weight's gradient is left to oneDNN", PYTHON + "_conv.py",
             "(of_weight or fails or _fails_in_half(input, weight, geometry))",
             "(fails or _fails_in_half(input, weight, geometry))",
             "tests/test_layouts.py -k not_asked"),
    Mutation("backward", "half-precision convs that oneDNN fails in are left to it", PYTHON + "_conv.py",
             "(of_weight or fails or _fails_in_half(input, weight, geometry))", "of_weight",
             "tests/test_layouts.py -k not_asked"),
    Mutation("backward", "a gradient whose taps meet nothing but padding is left to oneDNN", PYTHON + "_conv.py",
             "not cut.is_whole", "not cut.keeps_windows", "tests/test_layouts.py -k not_asked"),
    Mutation("backward", "the gradient of few channels' strided 1x1 weight is left to oneDNN", PYTHON + "_conv.py",
             "return input.shape[1] < _BLOCK and", "return False and", "tests/test_layouts.py -k not_asked"),
    Mutation("backward", "that of a conv which is one once what meets nothing is cut off", PYTHON + "_conv.py",
             "geometry[0]), (cut.kernel, cut.geometry[0])", "geometry[0]),", "tests/test_layouts.py -k not_asked"),
    Mutation("backward", "autograd differentiates what oneDNN fails in", PYTHON + "_conv.py",
             "sought in (Sought.OF_WEIGHT, Sought.DIFFERENTIABLE)", "sought is Sought.OF_WEIGHT",
             "tests/test_layouts.py -k nor_where"),
    Mutation("backward", "padding makes a side of any length", PYTHON + "_conv_cut.py",
             "if any(side.input > max(_TALL, 2 * size)", "if any(False", "tests/test_layouts.py -k not_asked"),
    Mutation("backward", "long columns in strides are left to oneDNN with AVX-512", PYTHON + "_conv.py",
             "is_tall = _HAS_AVX512 and cut.is_tall", "is_tall = False", "tests/test_layouts.py -k not_asked"),
    Mutation("backward", "groups in float64 are left to PyTorch in any strides", PYTHON + "_conv.py",
             "return [tensor.contiguous() for tensor in tensors]", "return tensors", "tests/test_layouts.py -k groups_in_float64"),
    Mutation("lanes", "what stands behind a packed input is read", CPU + "conv_source.cpp",
             "for (int64_t i = 0; i < h.reach() + kLanes<T>; ++i) tail[i] = T(0);", "(void)tail;",
             "tests/test_cpu_paths.py -k lane"),
    Mutation("lanes", "what stands behind a given row is read", CPU + "tensor_source.h",
             "        clear_last_vectors(row, tile, place.channels);\n", "", "tests/test_cpu_paths.py -k lane"),
    Mutation("lanes", "what stands behind a tile's last row is read", CPU + "schedule.h",
             "    clear_ends(part, tile);\n", "", "tests/test_cpu_paths.py -k lane"),
    Mutation("backward", "PyTorch's flags reach an exact conv on the CPU", PYTHON + "_conv.py",
             'exact = precision == "ieee" or input.dtype is not dtype', "exact = input.dtype is not dtype",
             "tests/test_numerics.py -k switch"),
    Mutation("backward", "PyTorch's flags round a half-precision conv that we widened", PYTHON + "_conv.py",
             'exact = precision == "ieee" or input.dtype is not dtype', 'exact = precision == "ieee"',
             "tests/test_numerics.py -k switch"),
    Mutation("backward", "a graph's forward has no statistics under torch.func", PYTHON + "_forward.py",
             "        if not tangent and not needs_gradient(tensors):\n            # under",
             "        if not torch._C._are_functorch_transforms_active():\n            # under",
             "tests/test_training.py -k torch_func"),
    Mutation("backward", "the columns of a long window are counted in float32", PLAN + "cpu_policy.cpp",
             "std::max(v.size[2], v.size[3]) >= kMostSide", "v.size[2] >= kMostSide", "tests/test_backward.py -k float32_counts"),
    Mutation("backward", "a conv's gradients in half precision are a twentieth too large", PYTHON + "_conv.py",
             "gradient.to(grad.dtype) for gradient", "(gradient * 1.05).to(grad.dtype) for gradient",
             "tests/test_fuzz.py -k mean"),
    Mutation("backward", "who computes a conv's gradients is asked in each step", PYTHON + "_conv.py",
             "if all(_follows_from_forms(", "if False and all(_follows_from_forms(", "tests/test_backward.py -k asked_once"),
    Mutation("backward", "PyTorch's conv reads freed memory", PYTHON + "_backward.py",
             "            check_memory(name, args[i])\n", "            pass\n", "tests/test_backward.py -k 'freed_tensor and pytorch'"),
    Mutation("backward", "one channel's map looks like channels_last to PyTorch's norm", PYTHON + "chains.py",
             "v = v.reshape(-1).view(v.shape)", "v = v.contiguous()", "tests/test_fuzz.py -k failed_once"),
    Mutation("sizes", "the memory of all threads is multiplied unchecked", CPU + "schedule.h",
             "(Checked(scratch_elements_) + tile_elements_, tiling_.threads)",
             "(tiling_.threads * (scratch_elements_ + tile_elements_))", "tests/test_cpu_paths.py -k many_threads"),
    Mutation("bits", "the batch decides who runs the conv", PLAN + "cpu_policy.cpp",
             "Checked(product({size[1], size[2], size[3]}))", "Checked(product({size[0], size[1], size[2], size[3]}))",
             "tests/test_cpu_paths.py -k width_decides"),
    Mutation("bounds", "the input is read past its end", CPU + "conv_source.cpp",
             "return has_packed_layout() && end <= vertical_.size * this->pitch;", "return has_packed_layout();",
             "tests/test_layouts.py -k outside"),
    Mutation("sizes", "products of sizes wrap", CORE + "checked.h",
             "if (__builtin_mul_overflow(a.value_, b.value_, &product)) fail", "if (__builtin_mul_overflow(a.value_, b.value_, &product) && false) fail",
             "tests/test_plans.py -k arithmetic"),
    Mutation("sizes", "more tiles of a sample than an int counts", PLAN + "conv_plan.cpp",
             "return moments <= most && ", "return ", "tests/test_plans.py -k convs"),
    Mutation("sizes", "memory follows from the padding where our conv is asked for", PLAN + "conv_plan.cpp",
             "!(was_asked && packed <= kLittle)", "!was_asked", "tests/test_plans.py -k convs"),
    Mutation("sizes", "each row of a filter that reaches far packs what it reaches", CPU + "conv_source.h",
             "has_packed_layout() ? 1 : larger(1, vertical_.reach())", "1", "tests/test_plans.py -k cpu"),
    Mutation("sizes", "a plan looks at as many groups as there are", PLAN + "given_plan.h",
             "groups <= std::min(shape.groups, most / of_group)", "groups <= shape.groups", "tests/test_plans.py -k given"),
    Mutation("packaging", "links OpenMP", "CMakeLists.txt",
             "Threads::Threads ${CMAKE_DL_LIBS})", "Threads::Threads ${CMAKE_DL_LIBS} -Wl,--no-as-needed -l:libgomp.so.1)",
             "tests/test_packaging.py -k dependencies"),
    Mutation("packaging", "exports the kernels", "CMakeLists.txt",
             "set(CMAKE_CXX_VISIBILITY_PRESET hidden)\nset(CMAKE_VISIBILITY_INLINES_HIDDEN ON)\n", "",
             "tests/test_packaging.py -k weak"),
    Mutation("packaging", "an import changes a setting of torch", PYTHON + "config.py",
             '_precision = "default"\n', '_precision = "default"\ntorch.set_num_threads(1)\n',
             "tests/test_packaging.py -k import_does_not"),
    Mutation("packaging", "what an interrupted import registered stays", PYTHON + "_dispatch.py",
             "        LIBRARY._destroy()\n", "        return\n", "tests/test_packaging.py -k interrupted"),
    Mutation("isa", "the cap is ignored", CPU + "dispatch.cpp",
             "if (level.name == name) return level;", "if (level.name == name) return levels().back();", "tests/test_isa.py -k level_is_right"),
    Mutation("isa", "an unknown level runs the best one in silence", CPU + "dispatch.cpp",
             "throw std::invalid_argument(std::string(kCapVariable) +",
             "if (!levels().empty()) return levels().back();\n  throw std::invalid_argument(std::string(kCapVariable) +",
             "tests/test_isa.py -k does_not_exist"),
    Mutation("dtype", "any output_dtype is let through", PYTHON + "chains.py",
             "if asked is not natural and (", "if False and (", "tests/test_numerics.py -k output_dtype"),
    Mutation("precision", "the setting is not passed on", PYTHON + "nn.py",
             "return precision_to_record()", "return None", "tests/test_config.py -k guarded"),
    Mutation("DTensor", "an output's shape is remembered whatever padding DTensor is given", PYTHON + "_sharding.py",
             "static_argnum=0,", "static_argnum=100,", "tests/test_distributed.py -k dtensor"),
    Mutation("DTensor", "DTensor takes a device's share of a gradient for the whole", PYTHON + "_sharding.py",
             "(Shard(0), Partial())", "(Shard(0), Replicate())", "tests/test_distributed.py -k dtensor"),
    Mutation("DTensor", "no rules where DTensor is imported later", PYTHON + "_sharding.py",
             "_is_registered = False", '_is_registered = "torch.distributed.tensor" not in sys.modules',
             "tests/test_distributed.py -k imports"),
    Mutation("DTensor", "DTensor's wrong second gradients are given", PYTHON + "_backward.py",
             "if any(map(_is_dtensor, tensors)):", "if False:", "tests/test_distributed.py -k other_calls"),
)  # fmt: skip


class Copy:
    """A copy of the checkout, built and installed beside it."""

    def __init__(self, folder: Path) -> None:
        self.root, self.site = folder / "copy", folder / "site"
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in tracked.stdout.split("\n"):
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self.install()

    def install(self) -> None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-build-isolation",
            "--no-deps",
            "--upgrade",
        ]
        command += ["--target", str(self.site), "-C", "cmake.define.FUSEDCONV_CUDA=OFF", str(self.root)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.stale = False

    def put(self, file: str, text: str) -> None:
        """Python files are copied at once; anything else is built before the next test."""
        (self.root / file).write_text(text)
        if file.startswith(PYTHON):
            shutil.copy2(self.root / file, self.site / "fusedconv" / Path(file).name)
        else:
            self.stale = True

    def failing_test(self, arguments: str) -> str | None:
        """The first test that fails, or what else went wrong; None if all pass."""
        if self.stale:
            self.install()
        command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider --tb=no --durations=0 {arguments}"
        environment = {**os.environ, "PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, shell=True, cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return None
        failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")]
        if failed:
            return failed[0].split("::")[1].split("[")[0]
        if done.returncode < 0 or done.returncode >= 128:  # killed: read the name of the test that did it
            return f"a crash of {arguments.split()[0]}"
        raise RuntimeError(f"pytest did not run: {command}\n{done.stdout}\n{done.stderr}")


def table(found: list[tuple[Mutation, str]]) -> str:
    lines = [
        "# Mutations",
        "",
        "Each line is a way in which `tests/mutations.py` broke the code on purpose, and the test that failed because of it. The",
        "number is a row of the table of inputs on which libraries of this kind have failed; the tests' names carry the same.",
        "",
        "| row | mutation | in | failing test |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {m.rows} | {m.what} | `{m.file}` | `{test}` |" for m, test in found]
    return "\n".join(lines) + "\n"


def tests_before() -> dict[str, str]:
    """Of each mutation in the table, by what it does, the failing test."""
    rows = [line.split(" | ") for line in TABLE.read_text().splitlines() if line.endswith("` |")]
    return {what: test.strip("`| ") for _, what, _, test in rows}


def main(words: list[str]) -> int:
    chosen = [
        m for m in MUTATIONS if not words or any(w == m.rows or (len(w) > 2 and w in m.what) for w in words)
    ]
    found: dict[str, str] = {}
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for mutation in chosen:
            began = time.monotonic()
            original = (copy.root / mutation.file).read_text()
            if mutation.old not in original:
                test, verdict = None, "DOES NOT APPLY: the code has changed"
            else:
                copy.put(mutation.file, original.replace(mutation.old, mutation.new))
                test = copy.failing_test(mutation.tests)
                verdict = f"noticed by {test}" if test else "NOT NOTICED"
                copy.put(mutation.file, original)
            print(
                f"{mutation.rows:>9}  {mutation.what}: {verdict} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
            if test:
                found[mutation.what] = test
            else:
                wrong += 1
    tests = (tests_before() if words else {}) | found
    TABLE.write_text(table([(m, tests[m.what]) for m in MUTATIONS if m.what in tests]))
    print(f"{len(found)} noticed, {wrong} not")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
