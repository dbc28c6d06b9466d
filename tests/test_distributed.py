"""Two processes with half of the batch each train what one process trains: DDP, FSDP and DTensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ranks
from helpers import new_process

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)
backends = pytest.mark.parametrize(
    "backend",
    [
        "gloo",
        pytest.param(
            "nccl",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs"),
            ],
        ),
    ],
)


@backends
def test_ddp(backend: str, tmp_path: Path) -> None:
    ranks.on_two_ranks(ranks.ddp, backend, tmp_path)


@backends
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6), reason="torch 2.5 has no public fully_shard"
)
def test_fsdp(backend: str, tmp_path: Path) -> None:
    ranks.on_two_ranks(ranks.fsdp, backend, tmp_path)


@backends
def test_dtensor(backend: str, tmp_path: Path) -> None:
    ranks.on_two_ranks(ranks.dtensor, backend, tmp_path)


@backends
def test_dtensor_of_other_calls(backend: str, tmp_path: Path) -> None:
    ranks.on_two_ranks(ranks.dtensor_of_other_calls, backend, tmp_path)


@backends
def test_dtensor_of_modules(backend: str, tmp_path: Path) -> None:
    ranks.on_two_ranks(ranks.dtensor_of_modules, backend, tmp_path)


def test_a_failure_on_one_rank_is_reported(tmp_path: Path) -> None:
    """At once, though the other waits for it."""
    with pytest.raises(Exception, match="this rank fails"):
        ranks.on_two_ranks(ranks.failing, "gloo", tmp_path)


IMPORTS = """
import sys
if sys.argv[1] == "before":
    import torch.distributed.tensor
import importlib.util
import fusedconv
assert importlib.util.find_spec("torch.distributed.tensor")
assert ("torch.distributed.tensor" in sys.modules) == (sys.argv[1] == "before")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
x = distribute_tensor(torch.randn(2, 3, 4, 5), init_device_mesh("cpu", (1,)), [Shard(0)])
with torch.inference_mode():
    y = torch.ops.fusedconv.relu_hardswish(x)
assert y.placements == (Shard(0),)
dist.destroy_process_group()
print("sharded")
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_rules_are_there_in_either_order_of_imports(order: str, tmp_path: Path) -> None:
    """DTensor takes half a second to import, which `import fusedconv` does not spend."""
    assert "sharded" in new_process(IMPORTS, order, tmp_path / "store")
