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


SHARDED = """
import contextlib
import sys
if sys.argv[1] == "before":
    import torch.distributed.tensor
finders = list(sys.meta_path)
import fusedconv
assert sys.meta_path == finders
assert ("torch.distributed.tensor" in sys.modules) == (sys.argv[1] == "before")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.randn(2, 3, 6, 7), mesh, [Shard(0)])
weight = distribute_tensor(torch.randn(4, 3, 3, 3), mesh, [Replicate()])
if sys.argv[3] == "training":
    weight.requires_grad_()
with torch.inference_mode() if sys.argv[3] == "inference_mode" else contextlib.nullcontext():
    for padding in (0, 1, 0, 2):  # the first call finds no rules yet, and must not be remembered for the others
        y = torch.ops.fusedconv.conv2d_relu_hardswish(x, weight, None, padding=[padding, padding])
        assert y.placements == (Shard(0),)
        assert y.shape == y.to_local().shape == (2, 4, 4 + 2 * padding, 5 + 2 * padding)
    for dtype in (torch.float32, None, torch.float32):
        y = torch.ops.fusedconv.group_norm_silu(x.bfloat16(), 3, output_dtype=dtype)
        assert y.dtype == y.to_local().dtype == (dtype or torch.bfloat16)
dist.destroy_process_group()
print("sharded")
"""


@pytest.mark.parametrize("mode", ["no_grad", "training", "inference_mode"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_rules_are_there_in_either_order_of_imports(order: str, mode: str, tmp_path: Path) -> None:
    """DTensor takes half a second to import, which `import fusedconv` does not spend; nor does it watch imports."""
    assert "sharded" in new_process(SHARDED, order, tmp_path / "store", mode)


OLD_FINDER = """
import importlib
import sys

class OldFinder:  # without find_spec
    def find_module(self, name, path=None):
        return None

sys.meta_path.insert(0, OldFinder())
import torch
import fusedconv
parameter = torch.nn.Parameter(torch.ones(1))
parameter.grad = torch.ones(1)
torch.optim.Adam([parameter]).step()
importlib.reload(fusedconv)
import torch.distributed.tensor
print("imported")
"""


def test_imports_of_others_are_left_alone() -> None:
    assert "imported" in new_process(OLD_FINDER)
