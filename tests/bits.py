"""Records what a build computes, bit for bit, and tells records apart: so one sees that a change of code changes nothing.

    python tests/bits.py write A.json                     all cases, on CUDA; again with the other build, B.json
    python tests/bits.py write A.json --keep A            the tensors too, as A/tensors.pt
    python tests/bits.py compare A.json B.json            exit status 1 if anything differs
    python tests/bits.py compare A.json B.json --tensors A B    and by how much

``--device cpu`` records the CPU's kernels, ``--only WORDS`` the cases whose names hold these. Our conv runs wherever it
serves; FUSEDCONV_CUDA_SOURCE says which one. What PyTorch's conv has a part in is called two-step.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from chains_table import CONV_ROWS, ROWS, Row, draw_own, generator, randn
from cuda_conv import IEEE, MODES, SOURCE, TF32, Call, Case, Mode, draw, forget, poisoned
from fusedconv import _C
from gradients import named
from helpers import BOUNDS, relative_error

Tensors = dict[str, Tensor]
Change = Callable[[Tensor, Call], Call]  # of an input in float32, and its call
Run = tuple[Callable[[Tensors], Tensor], Tensors]  # an operator, and its tensors by name
Record = dict[str, dict[str, Any]]  # "header"; by case "plans", and "cases": hashes by the tensors' names

# ---- cases ---------------------------------------------------------------------------------------


def offset(x: Tensor, call: Call) -> Call:
    return replace(call, x=(0.3 + 1.5 * x).to(call.x.dtype))


def large_mean(x: Tensor, call: Call) -> Call:
    return replace(call, x=1000 + x, bias=None)


def not_finite(x: Tensor, call: Call) -> Call:
    """A sample with an infinity, one with NaN, one with neither."""
    x = x.clone()
    x[0, 1, 2, 3], x[1, -1, -1, -1] = math.inf, math.nan
    return replace(call, x=x)


def rows_of_all_sizes(x: Tensor, call: Call) -> Call:
    return replace(call, x=x * torch.logspace(-8, 8, x.shape[2]).view(-1, 1))


def channels_of_all_sizes(x: Tensor, call: Call) -> Call:
    """Weights are as much smaller as the input is larger: one scale for all of it would lose digits."""
    sizes = torch.logspace(-8, 8, x.shape[1]).view(-1, 1, 1)
    return replace(call, x=x * sizes, weight=call.weight / sizes)


def reference(row: Row) -> Case:
    r = row.reference
    pool, size = 2 * (r.get("pool_size", 2),), 2 * (r["size"],)
    return Case(4, (r["in_channels"], r["out_channels"]), size, groups=r.get("num_groups", 1), pool=pool)


# In names "nhwc" and "view" are layouts. On CUDA backward runs in strips from 3x3 taps, 8 input channels or fewer and 64
# columns; else in packed rows. With dilation, and of large kernels in half precision, PyTorch has the conv's gradients.
CONVS = {
    "3-16": Case(3, (3, 16), (32, 32), padding=(1, 1), groups=4),
    "1-64 strips": Case(3, (1, 64), (37, 132), padding=(1, 1), groups=16, pool=(4, 4)),
    "8-64 strips nhwc": Case(2, (8, 64), (45, 130), padding=(1, 1), groups=16, pool=(4, 4)),
    "8-32 wide": Case(1, (8, 32), (20, 300), groups=8, pool=(4, 4)),
    "5-7 k5 view": Case(1, (5, 7), (31, 33), (5, 5), (2, 2), pool=(2, 3)),
    "16-16 k1": Case(2, (16, 16), (40, 52), (1, 1), groups=4, pool=(3, 3)),
    "4-24 k7": Case(2, (4, 24), (29, 41), (7, 7), (3, 3), groups=8),
    "4-24 k7 dilation": Case(1, (4, 24), (45, 61), (7, 7), (3, 3), (2, 3), groups=6, pool=(4, 4)),
    "16-16 nhwc": Case(2, (16, 16), (23, 72), padding=(1, 1), groups=4, pool=(3, 3)),
    "33-65 nhwc": Case(2, (33, 65), (17, 29), groups=5),
    "64-128": Case(1, (64, 128), (24, 24), padding=(1, 1), groups=8, pool=(4, 4)),
    "9-200": Case(1, (9, 200), (13, 40), groups=10, pool=(3, 3), has_bias=False),
}
STRIPS = Case(3, (8, 32), (20, 78), groups=4, pool=(3, 3))
PACKED = Case(3, (8, 32), (21, 40), groups=8)
SPECIAL: dict[str, tuple[Case, Change]] = {  # in float32, whose values are scaled
    "mean of 1000": (STRIPS, large_mean),
    "not finite": (STRIPS, not_finite),
    "not finite packed": (PACKED, not_finite),
    "sizes of channels": (STRIPS, channels_of_all_sizes),
    "sizes of rows": (PACKED, rows_of_all_sizes),
}
# Of a given v: samples that stay on chip, in one block or several, and such that do not.
GIVEN = (
    ((3, 4, 5, 6), "nchw"), ((2, 64, 64, 64), "nchw"), ((1, 3, 1000, 1000), "nchw"), ((4, 32, 33, 31), "view"),
    ((2, 512, 7, 7), "nhwc"), ((4, 32, 33, 31), "nhwc"), ((1, 8, 320, 512), "nhwc"),
)  # fmt: skip


def conv_run(row: Row, case: Case, change: Change, mode: Mode) -> Run:
    call = draw(row, case, mode.dtype, "cpu")
    call = change(call.x.float(), call)

    def operator(t: Tensors) -> Tensor:
        own = {name: t.get(name, value) for name, value in call.own.items()}
        more: dict[str, Any] = {"precision": mode.precision, **call.geometry}
        return row.conv_op(t["input"], t["weight"], t.get("conv_bias"), own, **more)

    return operator, named(call)


def given_run(row: Row, shape: tuple[int, ...], dtype: torch.dtype) -> Run:
    gen = generator(row.chain, shape, dtype)
    own = draw_own(row, shape[1], gen, dtype=dtype)
    v = (0.3 + 1.5 * randn(gen, *shape, dtype=torch.float64)).to(dtype)
    tensors = {"input": v} | {name: t for name, t in own.items() if isinstance(t, Tensor)}
    return lambda t: row.chain_op(t["input"], {n: t.get(n, value) for n, value in own.items()}), tensors


def all_runs() -> Iterator[tuple[str, Callable[[], Run]]]:
    """By name, each drawn when it is called."""
    for row in CONV_ROWS:
        usual = {name: (case, offset) for name, case in {"reference": reference(row), **CONVS}.items()}
        for name, (case, change) in {**usual, **SPECIAL}.items():
            for mode in (IEEE, TF32) if name in SPECIAL else MODES:
                yield f"{row.conv} {name} {mode}", partial(conv_run, row, case, change, mode)
    for row in ROWS:
        for shape, layout in GIVEN:
            for dtype in BOUNDS:
                name = f"{row.chain} {'x'.join(map(str, shape))} {layout} {dtype}"
                yield name, partial(given_run, row, shape, dtype)


# ---- records -------------------------------------------------------------------------------------


def laid_out(image: Tensor, name: str) -> Tensor:
    if "view" in name:  # unaligned, and with gaps
        return F.pad(image, (1, 2))[..., 1:-2]
    return image.contiguous(memory_format=torch.channels_last) if "nhwc" in name else image


def results(name: str, run: Run, device: str) -> Tensors:
    """Without gradients, and in training, where other launches run. New memory is full of NaN."""
    operator, tensors = run[0], {key: t.to(device) for key, t in run[1].items()}
    tensors["input"] = laid_out(tensors["input"], name)
    with poisoned():
        with torch.no_grad():
            inference = operator(tensors)
        leaves = {key: t.detach().requires_grad_() for key, t in tensors.items()}
        y = operator(leaves)
        direction = torch.randn(y.shape, generator=generator(name)).to(device, y.dtype)
        found = torch.autograd.grad(y, list(leaves.values()), laid_out(direction, name))
    gradients = {f"grad_{key}": gradient for key, gradient in zip(leaves, found, strict=True)}
    return {key: t.detach().cpu() for key, t in {"inference": inference, "output": y, **gradients}.items()}


def marked(found: Tensors, plan: list[str], device: str) -> Tensors:
    """Under names that say, by the log of a conv's call, what is not all ours."""
    forward = [text for text in plan if " backward" not in text]
    backward = [text for text in plan if text not in forward]
    ours = "with the conv's gradients" if device == "cpu" else ": direct"
    is_ours = {False: any(": direct" in text for text in forward)}  # by whether it is a gradient
    is_ours[True] = is_ours[False] and any(ours in text for text in backward)
    return {key if is_ours[key.startswith("grad_")] else f"two-step {key}": t for key, t in found.items()}


def bits_of(tensor: Tensor) -> str:
    """NaNs are all alike, as in `helpers.same_bits`."""
    values = tensor.masked_fill(tensor.isnan(), math.nan).contiguous().flatten()
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
    digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@contextmanager
def our_conv_wherever_it_serves() -> Iterator[BufferingHandler]:
    """Also where PyTorch's is the faster one. Gives the log of what is prepared."""
    log, said = logging.getLogger("fusedconv"), BufferingHandler(sys.maxsize)
    level = log.level
    with patch.dict(os.environ, FUSEDCONV_CUDA_SOURCE=SOURCE, FUSEDCONV_CPU_PATH="direct"):
        log.addHandler(said)
        log.setLevel(logging.DEBUG)
        try:
            yield said
        finally:
            log.removeHandler(said)
            log.setLevel(level)
            forget()


def record(device: str, only: str = "", kept: Tensors | None = None) -> Record:
    """``kept`` gets the tensors, by case and name."""
    name_of_device = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {_C.cpu_isa()}"
    header = {"device": name_of_device, "torch": torch.__version__, "FUSEDCONV_CUDA_SOURCE": SOURCE}
    made: Record = {"header": header, "plans": {}, "cases": {}}
    with our_conv_wherever_it_serves() as said:
        for name, make in all_runs():
            if only not in name:
                continue
            forget()  # all is prepared again, and the log says how
            said.flush()
            found = results(name, make(), device)
            plan = [*dict.fromkeys(entry.getMessage() for entry in said.buffer)]
            found = marked(found, plan, device) if name.startswith("conv2d") else found
            made["plans"][name] = plan
            made["cases"][name] = {key: bits_of(t) for key, t in found.items()}
            if kept is not None:
                kept.update({f"{name}: {key}": t for key, t in found.items()})
    return made


# ---- comparison ----------------------------------------------------------------------------------


def distance(a: Tensor, b: Tensor) -> float:
    """``||a - b|| / ||a||``; infinite where not the same values are finite."""
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    return relative_error(*(t.nan_to_num(0.0, 0.0, 0.0) for t in (b, a)))


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [key for key in a | b if a.get(key) != b.get(key)]


def compare(a: Record, b: Record, tensors: Sequence[Tensors] = ()) -> int:
    """Prints what differs, and of given tensors by how much; 1 if results do, or if there are none. Headers and
    plans may."""
    for key in differing(a["header"], b["header"]):
        print(f"{key}: {a['header'].get(key)}, {b['header'].get(key)}")
    largest = 0.0
    for name in differing(a["cases"], b["cases"]):
        keys = differing(a["cases"].get(name, {}), b["cases"].get(name, {}))
        print(f"{name}: {', '.join(keys)}")
        for place in [f"{name}: {key}" for key in keys] if tensors else ():
            far = distance(*(of[place] for of in tensors)) if all(place in of for of in tensors) else math.inf
            largest = max(largest, far)
            print(f"  {place}: {far:.1e}")
    if tensors:
        print(f"the largest |a - b| / |a|: {largest:.1e}")
    for what in ("plans", "cases"):
        count, wrong = len(a[what] | b[what]), differing(a[what], b[what])
        print(f"{count - len(wrong)} of {count} {what} equal" + "; differ: " * bool(wrong) + ", ".join(wrong))
    return 1 if wrong or not a["cases"] else 0


def main(words: list[str]) -> int:
    how: Any = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    commands = argparse.ArgumentParser(**how)
    of = commands.add_subparsers(dest="command", required=True)
    write, two = of.add_parser("write"), of.add_parser("compare")
    write.add_argument("file", type=Path)
    write.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    write.add_argument("--only", default="", metavar="WORDS")
    write.add_argument("--keep", type=Path, metavar="DIR")
    two.add_argument("files", type=Path, nargs=2)
    two.add_argument("--tensors", type=Path, nargs=2, metavar="DIR")
    given = commands.parse_args(words)
    if given.command == "compare":
        a, b = (json.loads(file.read_text()) for file in given.files)
        kept = [torch.load(folder / "tensors.pt", mmap=True) for folder in given.tensors or ()]
        return compare(a, b, kept)
    tensors: Tensors | None = None if given.keep is None else {}
    made = record(given.device, given.only, tensors)
    given.file.write_text(json.dumps(made, indent=1) + "\n")
    if tensors is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
        torch.save(tensors, given.keep / "tensors.pt")
    print(f"{len(made['cases'])} cases on {made['header']['device']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
