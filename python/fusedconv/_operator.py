"""What an operator is, whoever runs it: its arguments, what they must be, how its output looks, and what a call of it is
remembered by. Every record of ``chains.CHAINS`` gives ``<chain>`` and, where it has a conv, ``conv2d_<chain>``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

import torch
from torch import Tensor

from ._conv import GEOMETRY, OWN, TENSORS
from .chains import CHECKS, Chain, Shape, check_conv, check_image, check_output_dtype, check_tensor
from .config import check_precision

_CONV = "SymInt[2] stride=1, SymInt[2] padding=0, SymInt[2] dilation=1, SymInt groups=1"
# output_dtype is for our autocast rule alone: float32 where the unfused chain's own would be a half precision
OPTIONS = "*, str? precision=None, ScalarType? output_dtype=None"

Look = tuple[Shape, torch.dtype, torch.memory_format]  # what an output looks like
Signature = tuple[Any, ...]


class Operator:
    """One operator.

    ``args`` are all of its positional arguments in the schema's order, ``given`` those that the dispatcher
    hands over (it leaves out defaults at the end), ``options`` its keywords.
    """

    def __init__(self, chain: Chain, has_conv: bool) -> None:
        self.chain = chain
        self.has_conv = has_conv
        self.name = f"conv2d_{chain.name}" if has_conv else chain.name
        self.arguments = _arguments(chain.arguments, has_conv)  # schema text

        arguments = torch._C.parse_schema(f"{self.name}({self.arguments}) -> Tensor").arguments
        self.names = names = [a.name for a in arguments]
        self.defaults = tuple(a.default_value for a in arguments)
        self.tensors = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
        self.named = [(i, names[i], "Optional" in str(arguments[i].type)) for i in self.tensors]
        self.places = [[i for i in self.tensors if i < count] for count in range(len(arguments) + 1)]
        self.pairs = [i for i, a in enumerate(arguments) if "List" in str(a.type)]
        self.conv_tensors = self.tensors[TENSORS] if has_conv else []
        self.own = OWN if has_conv else slice(1, None)
        self._checks = [(i, name, CHECKS[name]) for i, name in enumerate(names) if name in CHECKS]
        self._promoting = [names.index(name) for name in chain.promoting]
        self._num_groups = names.index("num_groups") if chain.has_norm else None
        self._pool = names.index("pool_size") if chain.pools else None

    def complete(self, given: Sequence[Any]) -> Sequence[Any]:
        return given if len(given) == len(self.defaults) else (*given, *self.defaults[len(given) :])

    def signature(self, given: Sequence[Any], options: Mapping[str, Any]) -> Signature:
        """All that the checks and the launch depend on, but for devices: a CPU kernel meets no others."""
        key = list(given)
        count = len(key)
        for i in self.places[count]:
            if (tensor := key[i]) is not None:
                key[i] = tensor.shape, tensor.stride(), tensor.dtype
        for i in self.pairs:
            if i < count:
                key[i] = tuple(key[i])
        return (*key, *options.items())

    def look(
        self, args: Sequence[Any], precision: str | None = None, output_dtype: torch.dtype | None = None
    ) -> Look:
        """Raises where an argument is wrong; else says how the output looks. All kernels ask."""
        if precision is not None:
            check_precision(precision)
        for i, name, optional in self.named:
            check_tensor(name, args[i], optional)
        input = args[0]
        shape = check_conv(*args[TENSORS], *args[GEOMETRY]) if self.has_conv else check_image(input)
        for i, name, check in self._checks:
            check(name, args[i], shape, input)

        dtype = input.dtype
        for i in self._promoting:
            if args[i].dtype is not dtype and args[i].dim():
                dtype = torch.promote_types(dtype, args[i].dtype)
        if output_dtype is not None:
            check_output_dtype(output_dtype, dtype)
            dtype = output_dtype

        channels_last = _is_channels_last(input, args[1] if self.has_conv else None)
        if self._pool is not None:
            pool = args[self._pool]
            shape = (shape[0], shape[1], shape[2] // pool[0], shape[3] // pool[1])
        if self.chain.reduces_channels:
            shape = (shape[0], 1, shape[2], shape[3])
        return shape, dtype, torch.channels_last if channels_last else torch.contiguous_format

    def empty(self, given: Sequence[Any], device: torch.device | str | None = None, **options: Any) -> Tensor:
        """Memory for the output, on the input's device if no other is said; the arguments are checked."""
        args = self.complete(given)
        shape, dtype, memory_format = self.look(args, **options)
        return torch.empty(shape, dtype=dtype, device=device or args[0].device, memory_format=memory_format)

    def example(self, given: Sequence[Any], **options: Any) -> Tensor:
        """An output without memory."""
        return self.empty(given, "meta", **options)

    def example_of_v(self, args: Sequence[Any]) -> Tensor:
        """What the chain takes, the conv's output where there is a conv: contiguous, without memory."""
        shape = check_conv(*args[TENSORS], *args[GEOMETRY]) if self.has_conv else args[0].shape
        return torch.empty(shape, dtype=args[0].dtype, device="meta")

    def empty_statistics(self, given: Sequence[Any]) -> Tensor:
        """Memory for those of the norm, see `WithStatistics`; the arguments have been checked."""
        assert self._num_groups is not None
        input: Tensor = given[0]
        return input.new_empty((input.shape[0], given[self._num_groups], 2), dtype=torch.float64)


def _arguments(own: str, has_conv: bool) -> str:
    """The conv's arguments around the chain's own."""
    if not has_conv:
        return f"Tensor input, {own}".rstrip(", ")
    required = bool(own) and "=" not in own.split(", ")[0]  # no default may stand before it
    conv_bias = "Tensor? conv_bias" if required else "Tensor? conv_bias=None"
    return ", ".join(filter(None, ("Tensor input, Tensor weight", conv_bias, own, _CONV)))


def _is_channels_last(input: Tensor, weight: Tensor | None) -> bool:
    """What ATen's ``suggest_memory_format`` says: strides grow from channel over width and height to batch.

    A map of one channel or one pixel has no format of its own; the weight's decides, as in PyTorch's conv.
    """
    over_batch, over_channels, over_height, over_width = input.stride()
    if over_width < over_channels:  # the usual NCHW; the rest is seldom worth its time
        return False
    _, channels, height, width = input.shape
    if weight is not None and (channels == 1 or (height == 1 and width == 1)):
        return _is_channels_last(weight, None)
    return bool(
        0 < over_channels * channels <= over_width
        and over_width * width <= over_height
        and over_height * height <= over_batch
        and over_height * height != over_channels  # all alike: NCHW, as in ATen
    )


_MOST_PREPARED = 1024


class Prepared(dict[Signature, Any]):
    """What was worked out for the calls of a signature."""

    def remember(self, signature: Signature, run: Any) -> None:
        if any(isinstance(a, float) and isnan(a) for a in signature):  # NaN would never be found again
            return
        if len(self) >= _MOST_PREPARED:
            self.clear()
        self[signature] = run
