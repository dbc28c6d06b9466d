"""All operators, by their names. To import this defines them in ``torch.ops.fusedconv``: of each record of
``chains.CHAINS`` ``<chain>`` and ``conv2d_<chain>``, and of each of these a private ``_<operator>_backward`` and, where
there is a norm, ``_<operator>_with_statistics``.
"""

from __future__ import annotations

from ._backward import Backward
from ._dispatch import open_library
from ._forward import Forward, Kernels, WithStatistics
from ._launch import Launcher
from ._operator import Operator
from ._reference import Reference
from .chains import CHAINS, Chain


def _register(chain: Chain, has_conv: bool) -> Forward:
    operator = Operator(chain, has_conv)
    launcher, reference = Launcher(chain, operator.names, has_conv), Reference(operator)
    kernels, backward = Kernels(operator, launcher), Backward(operator, launcher, reference)
    with_statistics = WithStatistics(kernels, reference, backward) if chain.has_norm else None
    return Forward(kernels, reference, with_statistics, backward)


open_library()
OPERATORS = {
    rules.operator.name: rules
    for chain in CHAINS
    for rules in [_register(chain, has_conv) for has_conv in (False, True) if chain.has_conv or not has_conv]
}
