"""What DTensor is told about the operators. Samples do not see each other, so shards of the batch need no communication.

They are registered when they are first needed: to import DTensor takes half a second, which a process without it need not
spend.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ._operator import Operator

_log = logging.getLogger("fusedconv")

_is_registered = False

# Of the outputs, and of the arguments: None for what is no tensor.
Placements = list[Any]
Shards = Sequence[tuple[Placements, Placements]]

RULES: dict[Any, Callable[..., Shards]] = {}  # an operator's, as torch calls it: from its arguments


def _place(operator: Operator, args: Sequence[Any], batch: Any) -> Placements:
    """The operator's arguments: the batch as said, and every parameter whole on each device."""
    from torch.distributed.tensor import Replicate

    placements: Placements = [None] * len(args)
    for i in operator.places[len(args)]:
        if args[i] is not None:
            placements[i] = Replicate() if i else batch
    return placements


def shards_of_forward(operator: Operator, given: Sequence[Any]) -> Shards:
    from torch.distributed.tensor import Replicate, Shard

    return [([batch], _place(operator, given, batch)) for batch in (Shard(0), Replicate())]


def shards_of_backward(operator: Operator, args: Sequence[Any]) -> Shards:
    """Each device has its samples' share of a parameter's gradient."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    # Without the mask: what it does not ask for has no elements, wherever they are.
    _, *given, statistics, _ = args
    return [
        (
            [share if i else batch for i in operator.tensors],
            [batch, *_place(operator, given, batch), None if statistics is None else batch, None],
        )
        for batch, share in ((Shard(0), Partial()), (Replicate(), Replicate()))
    ]


def register_if_imported() -> None:
    """For every fake kernel: DTensor asks one how an output looks, and only then looks for a rule."""
    global _is_registered
    if not _is_registered and "torch.distributed.tensor" in sys.modules:
        _register()
        _is_registered = True


def _register() -> None:
    try:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
        from torch.distributed.tensor.experimental import register_sharding

        schemas: dict[Any, Any] = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    except (ImportError, AttributeError) as error:  # DTensor itself then says what it has no rule for
        _log.info("no rules for DTensor of this torch: %s", error)
        return
    for op, rule in RULES.items():
        register_sharding(op)(rule)
        # DTensor remembers the output's shape by the arguments it is told to look at. register_sharding tells
        # it to pass over those before the first int: stride and padding.
        options = [a.name for a in op._schema.arguments if a.kwarg_only]
        schemas[op] = RuntimeSchemaInfo(static_argnum=0, static_kwargkey=options, needs_pytree=True)
