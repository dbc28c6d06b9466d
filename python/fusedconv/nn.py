"""Modules that run a Conv2d and everything behind it as one operator.

Each holds the same submodules and parameters, under the same names and created in the same order, as the plain
PyTorch model: its checkpoints load with ``strict=True``, and the same seed gives the same weights. Each looks at
its parts in every call: where a part is not a stock ``nn.Conv2d`` or ``nn.GroupNorm`` (LoRA, pruning, hooks,
parametrisations, ``fully_shard``, an overridden forward, a patched class), that part is called, and the rest stays
fused as far as it can be.

Input and parameters are float32, float64, bfloat16 or float16; the conv's parameters share the input's dtype, the
others have that or float32. A call raises what :mod:`fusedconv.functional` raises, a constructor what ``nn.Conv2d``
and ``nn.GroupNorm`` raise.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import Conv2d
from torch.nn.modules.normalization import GroupNorm

from . import _register  # noqa: F401  (defines torch.ops.fusedconv)
from ._stock import is_stock_conv, is_stock_norm
from .chains import as_pair
from .config import precision_to_record

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = [
    "ConvBiasScaleSigmoidGroupNorm",
    "ConvGroupNormScaleMaxPoolClamp",
    "ConvGroupNormSiLU",
    "ConvGroupNormTanhHardswishLogSumExp",
    "ConvOptions",
    "ConvReLUHardswish",
]


_log = logging.getLogger("fusedconv")

Arguments = ParamSpec("Arguments")
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class ConvOptions(TypedDict, total=False):
    """Keywords of ``nn.Conv2d``, with its defaults; ``conv_groups`` is its ``groups``."""

    stride: int | tuple[int, int]
    padding: str | int | tuple[int, int]
    dilation: int | tuple[int, int]
    conv_groups: int
    bias: bool
    padding_mode: PaddingMode
    device: torch.device | str | int | None
    dtype: torch.dtype | None


class _FactoryKwargs(TypedDict):
    device: torch.device | str | int | None
    dtype: torch.dtype | None


def _factory_kwargs(options: ConvOptions) -> _FactoryKwargs:
    return {"device": options.get("device"), "dtype": options.get("dtype")}


def _conv2d(
    in_channels: int,
    out_channels: int,
    kernel_size: int | tuple[int, int],
    *,
    stride: int | tuple[int, int] = 1,
    padding: str | int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    conv_groups: int = 1,
    bias: bool = True,
    padding_mode: PaddingMode = "zeros",
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Conv2d:
    return nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, padding, dilation, conv_groups, bias, padding_mode, device, dtype
    )  # fmt: skip


def _signature(init: Callable[..., None]) -> inspect.Signature:
    """With the conv's keywords in place of ``**options``."""
    own = inspect.signature(init)
    keywords = [p for p in inspect.signature(_conv2d).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return own.replace(parameters=[*list(own.parameters.values())[:-1], *keywords])


def _constructor(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Shows all keywords to who asks (``skip_init``, ``help``), and in the error where the arguments are wrong."""
    signature = _signature(init)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()][1:]
    takes = inspect.Signature(parameters)

    @functools.wraps(init)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{type(args[0]).__name__}: {error}; it takes {takes}") from None
        init(*args, **kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


def _parameter(name: str, tensor: Tensor) -> nn.Parameter:
    """A parameter as it is; any other tensor as a parameter that is trained if the tensor was."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, but is of type {type(tensor).__name__}")
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, tensor.requires_grad)


_OTHER_CONVS = (nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose3d)


def _check_part(name: str, part: Any, stock: type[nn.Module], *unfit: type[nn.Module]) -> None:
    """Any module may stand in for a stock part (LoRA, quantisation), but for those that cannot be meant."""
    if not isinstance(part, nn.Module) or isinstance(part, unfit):
        raise TypeError(
            f"{name} must be an nn.{stock.__name__} or a module in its place, but is of type {type(part).__name__}"
        )


def _precision() -> str | None:
    """What an operator gets as ``precision``. A scripted module leaves it open until it runs."""
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        return None
    else:  # noqa: RET505 - TorchScript would compile what stands behind
        return precision_to_record()


WHY_CALLED = {
    "conv": "conv is replaced, patched, hooked, parametrised or sharded, or pads as no operator does",
    "group_norm": "group_norm is replaced, patched, hooked, parametrised or sharded",
}


@functools.cache
def _tell_once(message: str, warns: bool) -> None:
    _log.info(message)
    if warns:
        warnings.warn(message, stacklevel=5)  # at the caller of from_modules


_Geometry = tuple[()] | tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def _shortest(
    stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> _Geometry:
    """Nothing where all are an operator's defaults: a call takes 2 us less without them."""
    if groups == 1 and stride == dilation == (1, 1) and padding == (0, 0):
        return ()
    return stride, padding, dilation, groups


def _forward_of(chain: str, name: str) -> Callable[[Any, Tensor], Tensor]:
    """Of the module of a chain. TorchScript finds operators in a closure, but none that a class holds."""
    behind_conv, with_conv = (getattr(torch.ops.fusedconv, name) for name in (chain, f"conv2d_{chain}"))

    def forward(self: Any, input: Tensor) -> Tensor:
        geometry = self._geometry
        if not self._stock_norm:
            output: Tensor = self._step_by_step(self.conv(input))
        elif geometry is None:
            output = behind_conv(self.conv(input), *self._arguments(), precision=_precision())
        else:
            output = with_conv(
                input, *self._conv_parameters(), *self._arguments(), *geometry, precision=_precision()
            )
        return output

    # Each class has code of its own: torch.compile counts recompilations, and gives up after some, by that.
    forward.__code__ = forward.__code__.replace()
    forward.__qualname__ = name
    return forward


class _ConvChain(nn.Module):
    """What the modules share. Each says which chain it is, and what that takes.

    TorchScript reads the properties once, when it scripts, and compiles only the branch that they choose. What it
    compiles has ``else`` even after a ``return``, because it would compile what stands behind that.
    """

    __constants__: tuple[str, ...] = ("_geometry", "_stock_norm")
    __jit_unused_properties__: tuple[str, ...] = ("_geometry", "_operator", "_stock_norm")

    _chain: str  # the operator without its conv
    _stock_norm: bool = True  # whether an operator does what the norm does, if there is one

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "_chain" in vars(cls) and "forward" not in vars(cls):
            cls.forward = _forward_of(cls._chain, f"{cls.__qualname__}.forward")

    def _take(self, conv: nn.Conv2d) -> None:
        _check_part("conv", conv, nn.Conv2d, *_OTHER_CONVS, nn.GroupNorm)
        super().__init__()
        self.conv = conv
        self.training = conv.training

    @classmethod
    def _of(cls, *parts: Any) -> Self:
        module = cls.__new__(cls)
        module._take(*parts)
        module._tell_what_is_called()
        return module

    def _arguments(self) -> Any:
        """The chain's own, as its operators take them."""
        raise NotImplementedError

    def _step_by_step(self, v: Tensor) -> Tensor:
        """The chain where its norm is called by itself."""
        raise NotImplementedError

    @property
    def _geometry(self) -> _Geometry | None:
        """The conv's last arguments, in numbers; None if no operator would do what the conv does."""
        conv = cast(nn.Conv2d, self._modules["conv"])  # self.conv would take ten times as long
        if not is_stock_conv(conv) or conv.padding_mode != "zeros":
            return None
        stride, dilation = as_pair(conv.stride), as_pair(conv.dilation)
        if not isinstance(conv.padding, str):
            return _shortest(stride, as_pair(conv.padding), dilation, conv.groups)
        if conv.padding == "valid":
            return _shortest(stride, (0, 0), dilation, conv.groups)
        if conv.padding != "same" or stride != (1, 1):  # the conv says what is wrong
            return None
        kernel = cast(Tensor, conv._parameters["weight"]).shape[2:]
        # jit.trace has tensors
        total = [d * (int(size) - 1) for d, size in zip(dilation, kernel, strict=False)]
        if any(pixels % 2 for pixels in total):  # more on one side than on the other
            return None
        return _shortest(stride, tuple(pixels // 2 for pixels in total), dilation, conv.groups)

    def _conv_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a stock conv; its attributes would take ten times as long."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return self.conv.weight, self.conv.bias
        else:  # noqa: RET505
            conv: Any = self._modules["conv"]
            return conv._parameters["weight"], conv._parameters["bias"]

    @property
    def _operator(self) -> str | None:
        """The operator that a call runs; None if it goes step by step."""
        return self._chain if self._geometry is None else f"conv2d_{self._chain}"

    def _called_parts(self) -> tuple[str, ...]:
        """The parts that a call runs by themselves, for an operator would not do what they do."""
        return ("conv",) if self._geometry is None else ()

    def _tell_what_is_called(self) -> None:
        """Once for each cause. A part with a stock one in it (LoRA) is meant to be called; another may be a mistake."""
        for name in self._called_parts():
            part = cast(nn.Module, self._modules[name])
            fused = f"{self._operator} is" if self._operator else "nothing is"
            is_meant = any(isinstance(module, Conv2d | GroupNorm) for module in part.modules())
            _tell_once(
                f"{type(self).__name__}: {WHY_CALLED[name]} (it is of type {type(part).__name__}), so it is called by "
                f"itself, and {fused} fused",
                warns=not self._operator and not is_meant,
            )

    def extra_repr(self) -> str:
        return f"operator={self._operator}"


class _ConvNormChain(_ConvChain):
    """The same with a GroupNorm."""

    # The operator for the steps between the conv and a norm that is not stock.
    _before_norm: str | None = None

    def _take(self, conv: nn.Conv2d, group_norm: nn.GroupNorm) -> None:  # type: ignore[override]
        super()._take(conv)
        _check_part("group_norm", group_norm, nn.GroupNorm, *_OTHER_CONVS, nn.Conv2d)
        self.group_norm = group_norm

    @property
    def _stock_norm(self) -> bool:  # type: ignore[override]
        return is_stock_norm(cast(nn.Module, self._modules["group_norm"]))

    def _norm_arguments(self) -> tuple[int, Tensor | None, Tensor | None, float]:
        """What a stock norm is to an operator."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return (
                self.group_norm.num_groups,
                self.group_norm.weight,
                self.group_norm.bias,
                self.group_norm.eps,
            )
        else:  # noqa: RET505
            norm: Any = self._modules["group_norm"]
            return norm.num_groups, norm._parameters["weight"], norm._parameters["bias"], norm.eps

    @property
    def _operator(self) -> str | None:
        return super()._operator if self._stock_norm else self._before_norm

    def _called_parts(self) -> tuple[str, ...]:
        return super()._called_parts() if self._stock_norm else (*super()._called_parts(), "group_norm")


class ConvReLUHardswish(_ConvChain):
    """Conv2d, ReLU, hardswish: with ``r = relu(conv(x))``, ``r * clamp((r + 3) / 6, 0, 1)``.

    The keywords are those of ``nn.Conv2d`` (:class:`ConvOptions`). Input ``[N, in_channels, H, W]``; output
    ``[N, out_channels, H', W']``, the conv's own shape. The dtype is the one that the plain model gives.
    """

    _chain = "relu_hardswish"

    @_constructor
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        **options: Unpack[ConvOptions],
    ) -> None:
        self._take(_conv2d(in_channels, out_channels, kernel_size, **options))

    @classmethod
    def from_modules(cls, conv: nn.Conv2d) -> Self:
        """Takes over a trained conv. It is shared, not copied.

        Raises:
            TypeError: for a part that cannot stand for an ``nn.Conv2d``.
        """
        return cls._of(conv)

    def _arguments(self) -> tuple[()]:
        return ()


class ConvBiasScaleSigmoidGroupNorm(_ConvNormChain):
    """Conv2d, bias, scale, sigmoid, GroupNorm: ``group_norm(sigmoid((conv(x) + bias) * scale))``.

    ``bias`` and ``scale`` have one value, or one a channel as ``(out_channels, 1, 1)``, and start as ``randn``. This
    ``bias`` comes on top of the conv's own, which the keyword ``bias=False`` leaves out. The keywords are those of
    ``nn.Conv2d`` (:class:`ConvOptions`). Input ``[N, in_channels, H, W]``; output ``[N, out_channels, H', W']``, the
    conv's own shape. The dtype is the one that the plain model gives.
    """

    _chain = "bias_scale_sigmoid_group_norm"
    _before_norm = "bias_scale_sigmoid"

    @_constructor
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        num_groups: int,
        bias_shape: Sequence[int],
        scale_shape: Sequence[int],
        **options: Unpack[ConvOptions],
    ) -> None:
        factory_kwargs = _factory_kwargs(options)
        self._take(
            _conv2d(in_channels, out_channels, kernel_size, **options),
            nn.Parameter(torch.randn(bias_shape, **factory_kwargs)),
            nn.Parameter(torch.randn(scale_shape, **factory_kwargs)),
            nn.GroupNorm(num_groups, out_channels, **factory_kwargs),
        )

    def _take(  # type: ignore[override]
        self, conv: nn.Conv2d, bias: Tensor, scale: Tensor, group_norm: nn.GroupNorm
    ) -> None:
        super()._take(conv, group_norm)
        self.bias = _parameter("bias", bias)
        self.scale = _parameter("scale", scale)

    @classmethod
    def from_modules(cls, conv: nn.Conv2d, bias: Tensor, scale: Tensor, group_norm: nn.GroupNorm) -> Self:
        """Takes over trained parts. They are shared, not copied.

        Raises:
            TypeError: for a part that cannot stand for an ``nn.Conv2d`` or an ``nn.GroupNorm``, or a ``bias`` or
                ``scale`` that is no tensor.
        """
        return cls._of(conv, bias, scale, group_norm)

    def _arguments(self) -> tuple[Tensor, Tensor, int, Tensor | None, Tensor | None, float]:
        groups, weight, bias, eps = self._norm_arguments()
        return self.bias, self.scale, groups, weight, bias, eps

    def _step_by_step(self, v: Tensor) -> Tensor:
        v = torch.ops.fusedconv.bias_scale_sigmoid(v, self.bias, self.scale, precision=_precision())
        output: Tensor = self.group_norm(v)
        return output

    def extra_repr(self) -> str:
        return f"bias_shape={tuple(self.bias.shape)}, scale_shape={tuple(self.scale.shape)}, {super().extra_repr()}"


class ConvGroupNormScaleMaxPoolClamp(_ConvNormChain):
    """Conv2d, GroupNorm, scale, max pool, clamp: ``clamp(max_pool2d(group_norm(conv(x)) * scale, k), low, high)``.

    ``scale`` has one value, or one a channel as ``(out_channels, 1, 1)``, and starts as ones. Either bound of the
    clamp may be None. The keywords are those of ``nn.Conv2d`` (:class:`ConvOptions`). Input
    ``[N, in_channels, H, W]``; output ``[N, out_channels, H' // k, W' // k]`` with ``H', W'`` the conv's map and ``k``
    the ``maxpool_kernel_size``. The dtype is the one that the plain model gives.
    """

    _chain = "group_norm_scale_max_pool_clamp"
    __constants__ = (*_ConvChain.__constants__, "maxpool_kernel_size", "clamp_min", "clamp_max")

    @_constructor
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        num_groups: int,
        scale_shape: Sequence[int],
        maxpool_kernel_size: int | tuple[int, int],
        clamp_min: float | None,
        clamp_max: float | None,
        **options: Unpack[ConvOptions],
    ) -> None:
        factory_kwargs = _factory_kwargs(options)
        self._take(
            _conv2d(in_channels, out_channels, kernel_size, **options),
            nn.GroupNorm(num_groups, out_channels, **factory_kwargs),
            nn.Parameter(torch.ones(scale_shape, **factory_kwargs)),
            maxpool_kernel_size,
            clamp_min,
            clamp_max,
        )

    def _take(  # type: ignore[override]
        self,
        conv: nn.Conv2d,
        group_norm: nn.GroupNorm,
        scale: Tensor,
        maxpool_kernel_size: int | tuple[int, int],
        clamp_min: float | None,
        clamp_max: float | None,
    ) -> None:
        super()._take(conv, group_norm)
        self.scale = _parameter("scale", scale)
        self.maxpool_kernel_size = as_pair(maxpool_kernel_size)
        # TorchScript takes no int for a float
        self.clamp_min = None if clamp_min is None else float(clamp_min)
        self.clamp_max = None if clamp_max is None else float(clamp_max)

    @classmethod
    def from_modules(
        cls,
        conv: nn.Conv2d,
        group_norm: nn.GroupNorm,
        scale: Tensor,
        maxpool_kernel_size: int | tuple[int, int],
        clamp_min: float | None,
        clamp_max: float | None,
    ) -> Self:
        """Takes over trained parts. They are shared, not copied.

        Raises:
            TypeError: for a part that cannot stand for an ``nn.Conv2d`` or an ``nn.GroupNorm``, or a ``scale`` that is
                no tensor.
        """
        return cls._of(conv, group_norm, scale, maxpool_kernel_size, clamp_min, clamp_max)

    def _arguments(
        self,
    ) -> tuple[int, Tensor | None, Tensor | None, float, Tensor, tuple[int, int], float | None, float | None]:
        groups, weight, bias, eps = self._norm_arguments()
        pool = self.maxpool_kernel_size
        return groups, weight, bias, eps, self.scale, pool, self.clamp_min, self.clamp_max  # type: ignore[return-value]

    def _step_by_step(self, v: Tensor) -> Tensor:
        output = F.max_pool2d(self.group_norm(v) * self.scale, self.maxpool_kernel_size)
        if self.clamp_min is not None or self.clamp_max is not None:
            output = torch.clamp(output, self.clamp_min, self.clamp_max)
        return output

    def extra_repr(self) -> str:
        return (
            f"scale_shape={tuple(self.scale.shape)}, maxpool_kernel_size={self.maxpool_kernel_size}, "
            f"clamp_min={self.clamp_min}, clamp_max={self.clamp_max}, {super().extra_repr()}"
        )


class _ConvThenNorm(_ConvNormChain):
    """The same without further parameters."""

    @classmethod
    def from_modules(cls, conv: nn.Conv2d, group_norm: nn.GroupNorm) -> Self:
        """Takes over trained parts. They are shared, not copied.

        Raises:
            TypeError: for a part that cannot stand for an ``nn.Conv2d`` or an ``nn.GroupNorm``.
        """
        return cls._of(conv, group_norm)

    def _arguments(self) -> tuple[int, Tensor | None, Tensor | None, float]:
        return self._norm_arguments()


class ConvGroupNormSiLU(_ConvThenNorm):
    """Conv2d, GroupNorm, SiLU: ``silu(group_norm(conv(x)))``.

    ``num_groups`` are the norm's; the conv's are the keyword ``conv_groups``, and the other keywords are those of
    ``nn.Conv2d`` (:class:`ConvOptions`). Input ``[N, in_channels, H, W]``; output ``[N, out_channels, H', W']``, the
    conv's own shape. The dtype is the one that the plain model gives.
    """

    _chain = "group_norm_silu"

    @_constructor
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        num_groups: int,
        *,
        eps: float = 1e-5,
        **options: Unpack[ConvOptions],
    ) -> None:
        self._take(
            _conv2d(in_channels, out_channels, kernel_size, **options),
            nn.GroupNorm(num_groups, out_channels, float(eps), **_factory_kwargs(options)),
        )

    def _step_by_step(self, v: Tensor) -> Tensor:
        return F.silu(self.group_norm(v))


class ConvGroupNormTanhHardswishLogSumExp(_ConvThenNorm):
    """Conv2d, GroupNorm, tanh, hardswish, residual, logsumexp over the channels.

    With ``v = conv(x)``: ``logsumexp(v + hardswish(tanh(group_norm(v))), dim=1, keepdim=True)``. ``groups`` are the
    norm's; the conv's are the keyword ``conv_groups``, and the other keywords are those of ``nn.Conv2d``
    (:class:`ConvOptions`). Input ``[N, in_channels, H, W]``; output ``[N, 1, H', W']`` with the conv's map. The dtype
    is the one that the plain model gives.
    """

    _chain = "group_norm_tanh_hardswish_logsumexp"

    @_constructor
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        groups: int,
        eps: float = 1e-5,
        **options: Unpack[ConvOptions],
    ) -> None:
        self._take(
            _conv2d(in_channels, out_channels, kernel_size, **options),
            nn.GroupNorm(groups, out_channels, float(eps), **_factory_kwargs(options)),
        )

    def _step_by_step(self, v: Tensor) -> Tensor:
        h = F.hardswish(torch.tanh(self.group_norm(v)))
        return torch.logsumexp(v + h, dim=1, keepdim=True)
