"""Conv2d and everything after it, as one operator."""

from . import _C, functional
from ._explain import Explanation, explain
from .config import float32_precision, get_float32_precision, set_float32_precision, show_config
from .nn import (
    ConvBiasScaleSigmoidGroupNorm,
    ConvGroupNormScaleMaxPoolClamp,
    ConvGroupNormSiLU,
    ConvGroupNormTanhHardswishLogSumExp,
    ConvReLUHardswish,
)

__version__ = _C.build_info()["version"]

__all__ = [
    "ConvBiasScaleSigmoidGroupNorm",
    "ConvGroupNormScaleMaxPoolClamp",
    "ConvGroupNormSiLU",
    "ConvGroupNormTanhHardswishLogSumExp",
    "ConvReLUHardswish",
    "Explanation",
    "__version__",
    "explain",
    "float32_precision",
    "functional",
    "get_float32_precision",
    "set_float32_precision",
    "show_config",
]
