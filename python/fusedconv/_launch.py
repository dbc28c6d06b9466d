"""From checked arguments to the kernels of ``_C``: pointers, sizes, strides, threads and streams."""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _C
from ._conv import GEOMETRY, TENSORS
from .chains import Chain, output_sides
from .config import get_float32_precision

_log = logging.getLogger("fusedconv")

_CODES = {
    torch.float32: _C.FLOAT32,
    torch.float64: _C.FLOAT64,
    torch.bfloat16: _C.BFLOAT16,
    torch.float16: _C.FLOAT16,
}

_CUDA_CHAINS = frozenset(_C.cuda_chains())

# What the kernels take, by the names of an operator's arguments.
_OF_CONV = ("weight", "conv_bias")
VECTORS = ("conv_bias", "bias", "scale", "norm_weight", "norm_bias")  # a value a channel
_TENSORS = ("input", "weight", *VECTORS)
_NUMBERS: dict[str, Any] = {  # in the order of _C.Numbers, with what stands for none
    "num_groups": 0,
    "eps": 0.0,
    "pool_size": (1, 1),
    "clamp_min": -math.inf,
    "clamp_max": math.inf,
}


def code(tensor: Tensor) -> int:
    return _CODES[tensor.dtype]


def form(tensor: Tensor) -> _C.Form:
    return code(tensor), tensor.shape, tensor.stride()


# Products for one value of a conv's output. Up to so many our own conv is the faster one with its chain; beyond, the conv
# takes nearly all of the time, and oneDNN's, which blocks over many channels, takes less of it.
_MOST_PRODUCTS = 512
# Of input channels; each is a plane of its own to our conv.
_MOST_INPUT_CHANNELS = 64
# So few output channels leave most of oneDNN's blocks empty: there, in NCHW and of filters larger than a pixel, ours is
# the faster one for more products, of any number of input channels.
_FEW_OUTPUTS = 16
_MOST_PRODUCTS_OF_FEW = 4096
_MOST_CHANNEL_PAIRS = 8192  # input times output channels
# In channels_last ours moves each value to a plane and back, which oneDNN's does not. That pays where a call's own cost
# is most of it: for so many values of a sample's input and output. AVX-512 has the registers to do it quickly; elsewhere
# it pays for large maps too where filters are larger than a pixel and few channels leave oneDNN's blocks empty.
_FEW_VALUES = 2**14
_FEW_VALUES_OF_AVX512 = 2**17
_MOST_OF_FEWER_CHANNELS = 12
_MOST_OF_MORE_CHANNELS = 64
# Our conv computes a tile's output as one run of pixels, rows with all that the filter reaches beyond them, in whole
# vectors, and packs the input of each tile with its padding (csrc/cpu/conv_source.h, plan.h). So many times the output
# it may compute, and so many times input and output it may pack: beyond, work and memory would follow from padding and
# dilation.
_MOST_COMPUTED = 2
_MOST_PACKED = 4
_VECTOR = 16  # lanes of the widest, on all machines
# Of maps of few pixels it leaves lanes idle. There oneDNN's conv is the faster one, unless all is so little that a call's
# own cost is most of it: so many products, less of many channels, whose weights it packs; and values to pack.
_FEW_PIXELS = 32
_FEW_IDLE = 1.5
_FEW_PRODUCTS = 2**22
_FEW_PRODUCTS_OF_WIDE = 2**20
_FEW_WEIGHTS_OF_A_PIXEL = 2**14  # of 1x1 filters: oneDNN's other ones cost more than to pack weights
_FEW_PACKED = 2**16


def _reason_for_pytorch(args: Sequence[Any]) -> str | None:
    """Why PyTorch runs the conv on the CPU; None where our own does. oneDNN has no float64, and our own conv no groups
    and no half precision. A sample's size decides, so that its bits are the same in any batch; but for maps of few
    pixels."""
    input, weight = args[:2]
    if args[-1] != 1:
        return "groups"
    if input.dtype not in (torch.float32, torch.float64):
        return _name(input.dtype)
    pixels, computed, packed = _pixels_on_cpu(args)
    packed *= weight.shape[1]
    if input.dtype is torch.float32:
        samples, reason = len(input), _reason_of_width(args)
        if pixels < _FEW_PIXELS:
            products = samples * weight.numel() * computed
            few = products <= (_FEW_PRODUCTS_OF_WIDE if reason else _FEW_PRODUCTS)
            packs_little = _taps(args) > 1 or weight.numel() <= _FEW_WEIGHTS_OF_A_PIXEL
            if few and packs_little and samples * packed <= _FEW_PACKED:
                return None
            if computed > _FEW_IDLE * pixels:
                return f"{samples} samples, {computed} pixels to compute for {pixels}"
        if reason:
            return reason
    if computed > _MOST_COMPUTED * pixels:
        return f"{computed} pixels to compute for {pixels}"
    values = math.prod(input.shape[1:]) + weight.shape[0] * pixels
    if packed > _MOST_PACKED * values:
        return f"{packed} values to pack for {values}"
    return None


def _reason_of_width(args: Sequence[Any]) -> str | None:
    """Why oneDNN's conv is the faster one for so many channels."""
    channels_out, channels_in = args[1].shape[:2]
    products, lies_in_pixels = _products(args), _lies_in_pixels(args[0])
    has_few = channels_out <= _FEW_OUTPUTS and _taps(args) > 1 and not lies_in_pixels
    if products > (_MOST_PRODUCTS_OF_FEW if has_few else _MOST_PRODUCTS):
        return f"{products} products for a value"
    if channels_in > _MOST_INPUT_CHANNELS and not has_few:
        return f"{channels_in} input channels"
    if channels_in * channels_out >= _MOST_CHANNEL_PAIRS:
        return f"{channels_in} to {channels_out} channels"
    if lies_in_pixels and _is_wide_for_pixels(args):
        return f"{channels_in} to {channels_out} channels in channels_last"
    return None


def _products(args: Sequence[Any]) -> int:
    """For one value of the conv's output."""
    return math.prod(args[1].shape[1:])


def _taps(args: Sequence[Any]) -> int:
    return math.prod(args[1].shape[2:])


def _lies_in_pixels(input: Tensor) -> bool:
    return input.stride(1) == 1 and input.shape[1] > 1


def _is_wide_for_pixels(args: Sequence[Any]) -> bool:
    input, weight = args[:2]
    values = math.prod(input.shape[1:]) + weight.shape[0] * math.prod(_sides(args))
    if _C.cpu_isa() == "avx512":
        return bool(values > _FEW_VALUES_OF_AVX512)
    fewer, more = sorted(weight.shape[:2])
    if fewer <= _MOST_OF_FEWER_CHANNELS and more <= _MOST_OF_MORE_CHANNELS and _taps(args) > 1:
        return False
    return bool(values > _FEW_VALUES)


def _sides(args: Sequence[Any]) -> tuple[int, int]:
    """Of the conv's output."""
    stride, padding, dilation, _ = args[GEOMETRY]
    return output_sides(args[0], args[1], stride, padding, dilation)


def _pixels_on_cpu(args: Sequence[Any]) -> tuple[int, int, int]:
    """Of a sample: pixels of the output; those that our conv computes for them; those that it packs of a channel, once. A
    tile has as many rows as the filter reaches beyond it, if not more."""
    stride, _, dilation, _ = args[GEOMETRY]
    rows, columns = _sides(args)
    (reach_rows, row_phases), (reach_columns, column_phases) = [
        (gap * (kernel - 1) // step, min(step, gap * (kernel - 1) + 1))
        for kernel, step, gap in zip(args[1].shape[2:], stride, dilation, strict=True)
    ]
    pitch = columns + reach_columns
    tile_rows = max(1, min(rows, reach_rows))
    packed_rows = -(-rows // tile_rows) * (tile_rows + reach_rows) * row_phases
    computed = -(-rows * pitch // _VECTOR) * _VECTOR
    return rows * columns, computed, packed_rows * pitch * column_phases


# Of input and output channels the fewer. Up to so many our own gradients of the conv are the faster ones; oneDNN's work
# on whole blocks of 16. Rows of few pixels leave lanes of our vectors idle.
_MOST_CHANNELS = 12
_MOST_CHANNELS_OF_NARROW = 4
_NARROW = 28
# With SSE2 oneDNN's are faster on small maps; on Arm nobody has measured.
_GRADIENTS_ON = ("avx2", "avx512")


def words_on_cpu(args: Sequence[Any], reason: str | None) -> str:
    """Who runs the conv; ``reason`` is why PyTorch does."""
    return (
        f"two-step, {reason}" if reason else f"direct, {_C.cpu_isa()}, {_products(args)} products for a value"
    )


def reason_for_pytorchs_gradients(args: Sequence[Any], columns: int) -> str | None:
    """Why PyTorch computes the conv's gradients on the CPU; None where we do. Ours are in float32 and of stride 1: there
    the input's gradient is a conv of v's gradient, in the layout that it has. ``columns`` are v's."""
    reason = _reason_for_pytorch(args)
    if reason is not None:
        return reason
    (input, weight), stride = args[:2], args[GEOMETRY][0]
    if input.dtype is not torch.float32:
        return _name(input.dtype)
    if _products(args) > _MOST_PRODUCTS or weight.shape[1] > _MOST_INPUT_CHANNELS:
        return f"{weight.shape[1]} input channels, {_products(args)} products for a value"
    if tuple(stride) != (1, 1):
        return f"stride {list(stride)}"
    if _C.cpu_isa() not in _GRADIENTS_ON:
        return str(_C.cpu_isa())
    channels = min(weight.shape[:2])
    if channels > (_MOST_CHANNELS_OF_NARROW if columns < _NARROW else _MOST_CHANNELS):
        return f"{channels} channels, {columns} columns"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def channels_of(args: Sequence[Any], conv: bool) -> int:
    """Of the conv's output. ``conv``: whether the arguments have its input, or else that output."""
    return int(args[1].shape[0] if conv else args[0].shape[1])


def _by_setting(runs: Mapping[str, Run]) -> Run:
    """The setting counts when the call is made."""
    return lambda args, statistics: runs[get_float32_precision()](args, statistics)


def as_vector(parameter: Tensor, channels: int) -> Tensor:
    """A value a channel, contiguous."""
    return parameter.reshape(-1).expand(channels).contiguous()


def check_memory(name: str, tensor: Tensor) -> None:
    """For PyTorch's conv, which may read it all the same. A pointer would make a copy of a lazy clone."""
    if tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0:
        fail_as_freed(name)


def fail_as_freed(name: str) -> NoReturn:
    """No pointer to a tensor that has elements."""
    raise RuntimeError(f"{name} has no memory: its storage was freed")


# Takes an operator's arguments, and memory for the statistics of its norm or None; launches, gives the output.
Run = Callable[[Sequence[Any], Tensor | None], Tensor]
ConvRun = Callable[[Sequence[Any]], Tensor]  # takes an operator's arguments, gives the conv's output
Start = Callable[..., None]  # takes pointers, in the order of the launch's ``on_cpu`` and ``on_cuda``


@dataclass(frozen=True)
class ConvPlan:
    """Who runs the conv of a call."""

    words: str  # "direct, ", whose instructions, and more; or "two-step, " and why, as the debug log tells it
    launch: _C.Launch | None  # of our own conv with the chain in it; None where the conv is left to PyTorch
    workspace_bytes: int = 0


def on_cpu(launch: _C.Launch | _C.Backward) -> Start:
    run: Start = launch.on_cpu
    return lambda *pointers: run(*pointers, torch.get_num_threads())


def on_cuda(launch: _C.Launch | _C.Backward, device: int, workspace_bytes: int) -> Start:
    run: Start = launch.on_cuda
    current_stream = torch._C._cuda_getCurrentRawStream
    if not workspace_bytes:
        return lambda *pointers: run(*pointers, 0, current_stream(device))
    empty = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")

    def start(*pointers: Any) -> None:
        # Freed on return: only later work of this stream gets it.
        workspace = empty.new_empty(workspace_bytes)
        run(*pointers, workspace.data_ptr(), current_stream(device))

    return start


class Launcher:
    """Prepares the launches of one operator, whose arguments are called ``names``.

    What follows from the arguments' forms (sizes, strides, dtypes) and numbers is worked out once, by an
    example of them and of the output. The ``Run`` that comes out serves every call of the same signature; it
    looks at pointers only. ``source`` gives the conv's output by PyTorch; it is None where there is no conv.
    """

    def __init__(self, chain: Chain, names: Sequence[str], has_conv: bool) -> None:
        self.chain = chain.name
        self.has_conv = has_conv
        self.names = names
        self.stores = chain.stores
        self.has_norm = chain.has_norm
        self.treats_values_alike = chain.treats_values_alike

    def prepare_cpu(
        self, args: Sequence[Any], output: Tensor, source: ConvRun | None, precision: str | None
    ) -> Run:
        """Our own conv, or PyTorch's and then the chain."""
        if self.has_conv:
            plan = self.plan_cpu(args, output)
            self.tell(args, plan.words)
            if plan.launch is not None:
                return self.prepare(plan.launch, args, output, on_cpu(plan.launch))
        return self._two_steps(args, output, source, on_cpu)

    def prepare_cuda(
        self, args: Sequence[Any], output: Tensor, source: ConvRun | None, precision: str | None
    ) -> Run:
        """Our own conv, or PyTorch's and then the chain."""
        device = args[0].get_device()

        def on_device(launch: _C.Launch) -> Start:
            return on_cuda(launch, device, launch.prepare_cuda(device)[0])

        def prepare(precision: str) -> Run:
            if self.has_conv:
                plan = self.plan_cuda(args, output, device, precision)
                self.tell(args, plan.words, precision)
                if plan.launch is not None:
                    start = on_cuda(plan.launch, device, plan.workspace_bytes)
                    return self.prepare(plan.launch, args, output, start)
            return self._two_steps(args, output, source, on_device)

        if not self.has_conv or args[0].dtype is not torch.float32 or precision is not None:
            return prepare(precision or "default")
        return _by_setting({name: prepare(name) for name in ("default", "ieee", "tf32")})

    def plan_cpu(self, args: Sequence[Any], output: Tensor) -> ConvPlan:
        reason = _reason_for_pytorch(args)
        words = words_on_cpu(args, reason)
        if reason is not None:
            return ConvPlan(words, None)
        return ConvPlan(words, self._launch(args, output, self.numbers(args), self.conv(args, tf32=False)))

    def plan_cuda(self, args: Sequence[Any], output: Tensor, device: int, precision: str) -> ConvPlan:
        if args[-1] != 1:
            return ConvPlan("two-step, groups", None)
        launch = self._launch(args, output, self.numbers(args), self.conv(args, tf32=precision == "tf32"))
        workspace_bytes, words = launch.prepare_cuda(device)
        return ConvPlan(words, launch, workspace_bytes) if workspace_bytes >= 0 else ConvPlan(words, None)

    def chain_workspace(self, args: Sequence[Any], output: Tensor, device: int) -> int:
        """Bytes that a run of the chain on ``args[0]``, the conv's output, wants on a CUDA device."""
        return self._launch(args, output, self.numbers(args)).prepare_cuda(device)[0]

    def tell(self, args: Sequence[Any], words: str, *precision: str, backward: bool = False) -> None:
        """Who runs the conv, in the debug log."""
        name = f"conv2d_{self.chain} backward" if backward else f"conv2d_{self.chain}"
        call = " ".join([name, str(list(args[0].shape)), _name(args[0].dtype), *precision])
        _log.debug("%s: %s", call, words)

    def _two_steps(
        self,
        args: Sequence[Any],
        output: Tensor,
        source: ConvRun | None,
        on_device: Callable[[_C.Launch], Start],
    ) -> Run:
        numbers = self.numbers(args)

        def prepare(args: Sequence[Any]) -> Run:
            launch = self._launch(args, output, numbers)
            return self.prepare(launch, args, output, on_device(launch), conv=False)

        if source is None:
            return prepare(args)
        prepared: dict[tuple[int, ...], Run] = {}
        names = [(i, self.names[i]) for i, a in enumerate(args[TENSORS]) if a is not None]

        def run(args: Sequence[Any], statistics: Tensor | None) -> Tensor:
            for i, name in names:
                check_memory(name, args[i])
            v = source(args)
            args = (v, *args[1:])
            stride = v.stride()  # PyTorch's choice: not all that it depends on is in the signature
            if stride not in prepared:
                prepared[stride] = prepare(args)
            return prepared[stride](args, statistics)

        return run

    def conv(self, args: Sequence[Any], tf32: bool) -> _C.Conv:
        stride, padding, dilation, _ = args[GEOMETRY]
        return form(args[1]), stride, padding, dilation, tf32

    def numbers(self, args: Sequence[Any]) -> _C.Numbers:
        given = {name: a for name, a in zip(self.names, args, strict=True) if a is not None}
        num_groups, eps, pool, low, high = (given.get(name, absent) for name, absent in _NUMBERS.items())
        return num_groups, eps, tuple(pool), low, high

    def places(self, args: Sequence[Any], conv: bool) -> dict[str, int]:
        """Where the tensors that a launch reads stand among the arguments."""
        place = {name: i for i, (name, a) in enumerate(zip(self.names, args, strict=False)) if a is not None}
        return {name: place[name] for name in _TENSORS if name in place and (conv or name not in _OF_CONV)}

    def unready(self, args: Sequence[Any], conv: bool) -> list[int]:
        """Where the vectors stand that each run copies first: kernels take a contiguous value a channel."""
        channels = channels_of(args, conv)

        def is_ready(vector: Tensor) -> bool:
            return vector.numel() == channels and vector.is_contiguous()

        places = self.places(args, conv)
        return [i for name, i in places.items() if name in VECTORS and not is_ready(args[i])]

    def _launch(
        self, args: Sequence[Any], output: Tensor, numbers: _C.Numbers, conv: _C.Conv | None = None
    ) -> _C.Launch:
        """Without ``conv`` the first argument is the conv's output."""
        places = self.places(args, conv is not None)
        tensors = [(name, code(args[i])) for name, i in places.items()]
        return _C.Launch(self.chain, tensors, form(args[0]), conv, numbers, form(output))

    def prepare(
        self, launch: _C.Launch, args: Sequence[Any], output: Tensor, start: Start, conv: bool = True
    ) -> Run:
        """One launch and its output. ``conv``: whether the launch has one."""
        place = self.places(args, conv)
        names, places = list(place), list(place.values())
        size, stride, has_elements = output.shape, output.stride(), output.numel() > 0
        # A new one like this is quicker than one of a named dtype and device.
        empty = torch.empty(0, dtype=output.dtype, device=args[0].device)

        def run(args: Sequence[Any], statistics: Tensor | None) -> Tensor:
            output = empty.new_empty_strided(size, stride)
            if has_elements:
                pointers = [args[i].data_ptr() for i in places]
                if not all(pointers):  # to a kernel 0 would mean that the argument is absent
                    fail_as_freed(names[pointers.index(0)])
                start(pointers, output.data_ptr(), 0 if statistics is None else statistics.data_ptr())
            return output

        unready, channels = self.unready(args, conv), channels_of(args, conv)

        def make_ready_and_run(args: Sequence[Any], statistics: Tensor | None) -> Tensor:
            args = list(args)
            for i in unready:
                args[i].data_ptr() or fail_as_freed(self.names[i])
                args[i] = as_vector(args[i], channels)
            return run(args, statistics)

        return make_ready_and_run if unready else run

    def has_cuda(self, device: int) -> bool:
        """Whether a kernel of this build can run on this device. Warns once if the build is why not."""
        return _cuda_is_usable(device) and self.chain in _CUDA_CHAINS


@functools.cache
def _cuda_is_usable(device: int) -> bool:
    if torch.version.cuda is None:  # ROCm calls its tensors CUDA's; our kernels are not for it
        return False
    problem = _C.cuda_status(device)
    if problem:
        _warn_no_cuda(problem)
    return not problem


@functools.cache
def _warn_no_cuda(problem: str) -> None:
    warnings.warn(
        f"fusedconv runs plain PyTorch on CUDA: {problem}. To build it for this machine, put nvcc on PATH and, in "
        "fusedconv's source, run: pip install . --config-settings=cmake.define.FUSEDCONV_CUDA=ON",
        stacklevel=2,
    )
