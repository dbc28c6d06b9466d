"""The modules are the plain models: checkpoints, seeds, copies, moves, changes of their parts (row 30)."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import fusedconv
from chains_table import (
    CONV_ROWS,
    OF_STAGES,
    Plain,
    Row,
    fused_keywords,
    generator,
    module_arguments,
    module_input,
    modules,
    randn,
    to_channels_last,
)
from helpers import failure, new_process

rows = pytest.mark.parametrize("row", CONV_ROWS, ids=lambda row: row.chain)


def agree(fused: nn.Module, plain: nn.Module, x: Tensor | None = None, tolerance: float = 2e-5) -> None:
    """The same output and the same gradients of every parameter."""
    x = module_input() if x is None else x
    results = []
    for model in (fused, plain):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        direction = randn(generator("direction"), *y.shape).to(y.dtype)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        found = torch.autograd.grad(y, [leaf, *(p for _, p in named)], direction)
        results.append(
            {"output": y.detach(), "input": found[0]}
            | dict(zip((n for n, _ in named), found[1:], strict=True))
        )
    ours, theirs = results
    assert ours.keys() == theirs.keys()
    largest = max(float(value.abs().max()) for value in theirs.values())
    for name, value in ours.items():
        scale = max(1.0, float(theirs[name].abs().max()), largest / 10)
        error = float((value - theirs[name]).abs().max()) / scale
        assert error <= tolerance, f"{name} differs by {error:.1e}"


@rows
def test_row_30_same_seed_same_weights_and_checkpoints_load(row: Row) -> None:
    """The same names in the same order, so that a checkpoint of the plain model loads with strict=True."""
    own = module_arguments(row, 8)
    torch.manual_seed(7)
    fused = getattr(fusedconv, cast(str, row.module))(3, 8, 3, **fused_keywords(row, 8, own))
    after_fused = torch.rand(1)
    torch.manual_seed(7)
    plain = Plain(row, 3, 8, 3, **own)
    assert torch.equal(after_fused, torch.rand(1)), "the random stream moved differently"
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in fused.named_children()] == [n for n, _ in plain.named_children()]
    for name, value in plain.state_dict().items():
        assert torch.equal(value, fused.state_dict()[name]), name
        assert value.shape == fused.state_dict()[name].shape
    plain = modules(row, seed=3)[1]
    assert fused.load_state_dict(plain.state_dict(), strict=True).missing_keys == []
    agree(fused, plain)


@rows
def test_positional_arguments_of_kernelbench(row: Row) -> None:
    """The constructors take KernelBench's arguments by position."""
    own = module_arguments(row, 8)
    if row.chain == "group_norm_silu":  # no problem of KernelBench, and takes eps by its name only
        del own["eps"]
    keywords = fused_keywords(row, 8, own)
    order = (
        "num_groups",
        "groups",
        "bias_shape",
        "scale_shape",
        "maxpool_kernel_size",
        "clamp_min",
        "clamp_max",
        "eps",
    )
    values = [keywords[name] for name in order if name in keywords]
    fused = getattr(fusedconv, cast(str, row.module))(3, 8, 3, *values)
    assert fused(module_input()).shape == Plain(row, 3, 8, 3, **own)(module_input()).shape


@pytest.mark.parametrize(
    "conv",
    [
        {"padding": 1, "stride": 2},
        {"padding": "same"},
        {"padding": "same", "kernel_size": (2, 4)},
        {"padding": "valid", "dilation": 2},
        {"bias": False, "kernel_size": (1, 3), "padding": (2, 0)},
        {"padding": 1, "padding_mode": "reflect"},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": "same", "padding_mode": "replicate"},
        {"conv_groups": 2, "in_channels": 4},
        {"conv_groups": 4, "in_channels": 4, "padding": "same"},
        {"dtype": torch.float64},
    ],
    ids=str,
)
@rows
def test_every_keyword_of_conv2d(row: Row, conv: dict[str, Any]) -> None:
    conv = {"kernel_size": 3, "in_channels": 3, **conv}
    fused, plain = modules(row, **conv)
    agree(fused, plain, module_input(channels=conv["in_channels"]).to(conv.get("dtype", torch.float32)))


@rows
def test_bad_keywords(row: Row) -> None:
    assert "padding" in failure(lambda: modules(row, padding="sane"))[1]
    failure(lambda: modules(row, padding_mode="mirror"))
    failure(lambda: modules(row, padding="same", stride=2))
    if row.has_norm:
        assert "group" in failure(lambda: modules(row, groups=5))[1]


@rows
def test_a_signature_shows_every_keyword(row: Row) -> None:
    """And so ``skip_init`` serves, and an error tells what there is."""
    kind, own = getattr(fusedconv, cast(str, row.module)), fused_keywords(row, 8, module_arguments(row, 8))
    shown = inspect.signature(kind).parameters
    assert shown.keys() >= {*own, *fusedconv.nn.ConvOptions.__annotations__}
    assert [p.kind for p in shown.values()][-8:] == [inspect.Parameter.KEYWORD_ONLY] * 8
    defaults = inspect.signature(nn.Conv2d).parameters
    for name in fusedconv.nn.ConvOptions.__annotations__:
        assert shown[name].default == defaults[name.removeprefix("conv_")].default, name
    skipped = nn.utils.skip_init(kind, 3, 8, 3, **own, padding=1)
    fused = modules(row, padding=1)[0]
    skipped.load_state_dict(fused.state_dict(), strict=True)
    assert torch.equal(skipped(module_input()), fused(module_input()))

    positional = [name for name, p in shown.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    for wrong in (
        lambda: kind(3, 8, 3, **own, sride=2),
        lambda: kind(3),
        lambda: kind(*range(1, len(positional) + 2)),
        lambda: kind(3, 8, 3, **(own | {"num_groups": 1, "groups": 2})),
    ):
        error, text = failure(wrong)
        assert error is TypeError
        assert all(name in text for name in (kind.__name__, "conv_groups", *shown)), text


def test_a_stray_positional_argument_is_not_the_norms_eps() -> None:
    assert failure(lambda: fusedconv.ConvGroupNormSiLU(8, 16, 3, 1, 1))[0] is TypeError  # type: ignore[call-arg]


@rows
def test_row_30_copies_pickles_and_state_dicts(row: Row) -> None:
    fused, plain = modules(row)
    buffer = io.BytesIO()
    torch.save(fused, buffer)
    buffer.seek(0)
    copies: list[Any] = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))]
    for other in (*copies, torch.load(buffer, weights_only=False)):
        agree(other, plain)
        other.conv.weight.data.zero_()  # a copy shares nothing
    agree(fused, plain)
    fresh = modules(row, seed=5)[0]
    fresh.load_state_dict(fused.state_dict(), strict=True)
    agree(fresh, plain)
    fused.train()
    fused.eval()
    agree(fused, plain)
    assert str(row.module) in repr(fused)


@rows
def test_row_30_moves_to_dtypes_formats_and_devices(row: Row) -> None:
    fused, plain = modules(row)
    agree(fused.double(), plain.double(), module_input().double(), 1e-10)
    agree(fused.float(), plain.float())
    agree(to_channels_last(fused), plain)
    x = module_input().bfloat16()
    assert fused.bfloat16()(x).dtype == plain.bfloat16()(x).dtype
    assert fused.to("meta")(x.to("meta")).shape == plain(x).shape
    with torch.device("meta"):
        own = module_arguments(row, 8)
        meta = getattr(fusedconv, cast(str, row.module))(3, 8, 3, **fused_keywords(row, 8, own))
    assert meta.conv.weight.is_meta
    assert meta(x.float().to("meta")).is_meta
    real = meta.to_empty(device="cpu")
    real.load_state_dict(modules(row)[1].state_dict())
    agree(real, modules(row)[1])


@rows
def test_row_30_tied_and_frozen_weights(row: Row) -> None:
    first, plain_first = modules(row, 8, 8, padding=1)
    second, plain_second = modules(row, 8, 8, padding=1, seed=1)
    cast(Any, second).conv.weight = cast(Any, first).conv.weight
    plain_second.conv.weight = plain_first.conv.weight
    x = module_input(channels=8)
    for a, b in ((first, second), (plain_first, plain_second)):
        (a(x).square().mean() + b(x).square().mean()).backward()
    for name, p in plain_first.named_parameters():
        torch.testing.assert_close(first.get_parameter(name).grad, p.grad, rtol=1e-4, atol=1e-4)
    for model in (first, plain_first):
        model.zero_grad()
        cast(Any, model).conv.requires_grad_(False)
    agree(first, plain_first, x)


# ---- what was done to the parts ------------------------------------------------------------------


class LoRA(nn.Module):
    """A low-rank addition in the conv's place."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.base = conv
        self.down = nn.Conv2d(conv.in_channels, 2, 1, bias=False)
        self.up = nn.Conv2d(2, conv.out_channels, (3, 3), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.base(x) + self.up(self.down(x)))


class Doubled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class HalfNorm(nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


class TimesThree(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 3 * weight


class ScaledTensor(Tensor):
    """A tensor subclass that changes what a conv does with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.conv2d:
            with torch._C.DisableTorchFunctionSubclass():
                return 2 * func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def lora(m: Any) -> None:
    torch.manual_seed(4)
    m.conv = LoRA(m.conv)


def subclass(m: Any) -> None:
    new = Doubled(3, 8, 3)
    new.load_state_dict(m.conv.state_dict())
    m.conv = new


def sequential(m: Any) -> None:
    m.conv = nn.Sequential(m.conv, nn.Dropout(0.0), nn.Tanh())


def pruned(m: Any) -> None:
    prune.l1_unstructured(m.conv, "weight", amount=0.5)
    m.conv.weight_orig.data *= 2  # `weight` is recomputed by a pre-hook


def pruned_permanently(m: Any) -> None:
    prune.l1_unstructured(m.conv, "weight", amount=0.5)
    prune.remove(m.conv, "weight")


def old_spectral_norm(m: Any) -> None:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.spectral_norm(m.conv)


def new_spectral_norm(m: Any) -> None:
    torch.manual_seed(1)
    parametrizations.spectral_norm(m.conv)


def weight_norm(m: Any) -> None:
    parametrizations.weight_norm(m.conv)


def parametrized(m: Any) -> None:
    parametrize.register_parametrization(m.conv, "weight", TimesThree())


def parametrized_bias(m: Any) -> None:
    parametrize.register_parametrization(m.conv, "bias", TimesThree())


def forward_hook(m: Any) -> None:
    m.conv.register_forward_hook(lambda module, inputs, output: output * 2)


def forward_pre_hook(m: Any) -> None:
    m.conv.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


def backward_hook(m: Any) -> None:
    m.conv.register_full_backward_hook(
        lambda module, grad_in, grad_out: (None if grad_in[0] is None else 3 * grad_in[0],)
    )


def backward_pre_hook(m: Any) -> None:
    m.conv.register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] * 3,))


def instance_forward(m: Any) -> None:
    plain = m.conv.forward
    m.conv.forward = lambda x: plain(x) * 2


def compiled_conv(m: Any) -> None:
    """As ``m.conv.compile()`` with a backend that changes something."""
    plain = m.conv.forward
    m.conv._compiled_call_impl = lambda x: plain(x).sin()


def instance_call_impl(m: Any) -> None:
    plain = m.conv._call_impl
    m.conv._call_impl = lambda x: plain(x).sin()


def replaced_weight(m: Any) -> None:
    m.conv.weight = nn.Parameter(m.conv.weight.detach() * 2)


def weight_is_a_plain_tensor(m: Any) -> None:
    weight = m.conv.weight.detach() * 2
    del m.conv.weight
    m.conv.weight = weight


def bias_is_a_plain_tensor(m: Any) -> None:
    bias = m.conv.bias.detach() * 2
    del m.conv.bias
    m.conv.bias = bias


def changed_geometry(m: Any) -> None:
    """Attributes of the conv that were changed after it was built."""
    m.conv.padding, m.conv.stride, m.conv.dilation = (2, 1), (2, 2), (1, 2)


def padding_becomes_same(m: Any) -> None:
    m.conv.padding = "same"


def padding_becomes_valid(m: Any) -> None:
    m.conv.padding = "valid"


def no_bias_any_more(m: Any) -> None:
    m.conv.bias = None


CHANGES = (
    lora, subclass, sequential, pruned, pruned_permanently, old_spectral_norm, new_spectral_norm, weight_norm,
    parametrized, parametrized_bias, forward_hook, forward_pre_hook, backward_hook, backward_pre_hook,
    instance_forward, compiled_conv, instance_call_impl, replaced_weight, weight_is_a_plain_tensor,
    bias_is_a_plain_tensor, changed_geometry, padding_becomes_same, padding_becomes_valid, no_bias_any_more,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@rows
def test_row_30_what_was_done_to_the_conv(row: Row, change: Callable[[nn.Module], None]) -> None:
    fused, plain = modules(row)
    change(fused)
    change(plain)
    for mode in (True, False):  # the old spectral norm moves its vectors in training only
        agree(fused.train(mode), plain.train(mode))


PARTS = (nn.Conv2d, nn.GroupNorm)


def bent(function: Callable[..., Any]) -> Callable[..., Any]:
    """A patch: the sine, which no norm takes back, of what a conv or a norm gives."""

    @functools.wraps(function)
    def patched(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        is_other = isinstance(args[0], nn.Module) and not isinstance(args[0], PARTS)
        return result if is_other else result.sin()

    return patched


def bent_weight(function: Callable[..., Any]) -> Callable[..., Any]:
    """A patch of attribute access."""

    @functools.wraps(function)
    def patched(self: nn.Module, name: str) -> Any:
        result = function(self, name)
        return (8 * result).sin() if name == "weight" and isinstance(self, PARTS) else result

    return patched


def bent_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def patched(self: nn.Module, name: str) -> Any:
        result = function(self, name)
        is_part = name == "forward" and isinstance(self, PARTS)
        return (lambda x: result(x).sin()) if is_part else result

    return patched


PATCHES: list[tuple[Any, str, Callable[..., Any]]] = [
    *[(nn.Conv2d, name, bent) for name in ("forward", "_conv_forward", "__call__", "_call_impl")],
    *[(nn.GroupNorm, name, bent) for name in ("forward", "__call__", "_call_impl")],
    *[(nn.Module, name, bent) for name in ("__call__", "_call_impl")],
    *[(F, name, bent) for name in ("conv2d", "group_norm")],
    (torch, "group_norm", bent),
    (nn.Module, "__getattr__", bent_weight),
    (nn.Conv2d, "__getattr__", bent_weight),
    (nn.GroupNorm, "__getattribute__", bent_forward),
    (nn.Module, "__getattribute__", bent_forward),
]


def patch_part(
    monkeypatch: pytest.MonkeyPatch, row: Row, owner: Any, name: str, patch: Callable[..., Any]
) -> tuple[nn.Module, nn.Module]:
    """The models of a row, whose parts the patch concerns."""
    if not row.has_norm and (owner is nn.GroupNorm or name == "group_norm"):
        pytest.skip("the model has no norm")
    fused, plain = modules(row)
    before = plain(module_input())
    monkeypatch.setattr(owner, name, patch(getattr(owner, name)))
    assert not torch.allclose(plain(module_input()), before, atol=0.1), "the patch changes nothing"
    return fused, plain


@pytest.mark.parametrize(
    ("owner", "name", "patch"), PATCHES, ids=[f"{owner.__name__}.{name}" for owner, name, _ in PATCHES]
)
@rows
def test_row_30_what_was_done_to_the_classes(
    row: Row, owner: Any, name: str, patch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extensions patch the class of the conv, or what it calls; gone, the operator with the conv is back."""
    fused, plain = patch_part(monkeypatch, row, owner, name, patch)
    agree(fused, plain)
    monkeypatch.undo()
    assert cast(Any, fused)._operator == row.conv
    agree(fused, plain)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn.Conv2d, "forward"),
        (nn.Module, "_call_impl"),
        (F, "conv2d"),
        (nn.GroupNorm, "forward"),
        (F, "group_norm"),
    ],
)
def test_row_30_a_patched_class_is_compiled_and_exported(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the plain model is."""
    row = next(row for row in CONV_ROWS if row.chain == "group_norm_silu")
    models = patch_part(monkeypatch, row, owner, name, bent)
    x = module_input()
    torch._dynamo.reset()
    torch.testing.assert_close(
        *[torch.compile(model, backend="eager", fullgraph=True)(x) for model in models], rtol=2e-5, atol=2e-5
    )
    torch._dynamo.reset()
    torch.testing.assert_close(
        *[torch.export.export(model, (x,), strict=False).module()(x) for model in models],
        rtol=2e-5,
        atol=2e-5,
    )


PATCHED_BEFORE = """
import functools
import torch
from torch import nn

original = {}
for kind, name in ((nn.Conv2d, "forward"), (nn.GroupNorm, "forward"), (nn.functional, "conv2d")):
    def patch(function):
        @functools.wraps(function)
        def patched(*args, **kwargs):
            return function(*args, **kwargs).sin()
        return patched
    original[kind, name] = getattr(kind, name)
    setattr(kind, name, patch(getattr(kind, name)))

from chains_table import CONV_ROWS, module_input, modules

for row in CONV_ROWS:
    fused, plain = modules(row)
    assert fused._operator != row.conv
    torch.testing.assert_close(fused(module_input()), plain(module_input()), rtol=2e-5, atol=2e-5)
for (kind, name), function in original.items():
    setattr(kind, name, function)
for row in CONV_ROWS:
    fused, plain = modules(row)
    assert fused._operator == row.conv
    torch.testing.assert_close(fused(module_input()), plain(module_input()), rtol=2e-5, atol=2e-5)
print("right")
"""


def test_row_30_a_class_that_was_patched_before_the_import() -> None:
    assert "right" in new_process(PATCHED_BEFORE)


def test_an_import_after_a_patch_tells_of_it() -> None:
    code = """
from torch import nn

own = nn.Conv2d.forward
nn.Conv2d.forward = lambda self, x: own(self, x)
import logging
heard = []
logging.lastResort.emit = lambda record: heard.append(record.getMessage())
import fusedconv
print(*heard, sep="\\n")
"""
    assert new_process(code).splitlines() == [
        "nn.Conv2d is called, not fused: Conv2d.forward of this torch is not the function known"
    ]


def norm_hook(m: Any) -> None:
    m.group_norm.register_forward_hook(lambda module, inputs, output: output / 2)


def norm_subclass(m: Any) -> None:
    new = HalfNorm(m.group_norm.num_groups, m.group_norm.num_channels)
    new.load_state_dict(m.group_norm.state_dict())
    m.group_norm = new


def another_norm(m: Any) -> None:
    m.group_norm = nn.InstanceNorm2d(8, affine=True)


def identity_norm(m: Any) -> None:
    m.group_norm = nn.Identity()


def norm_parametrized(m: Any) -> None:
    parametrize.register_parametrization(m.group_norm, "weight", TimesThree())


def norm_without_affine(m: Any) -> None:
    m.group_norm = nn.GroupNorm(2, 8, affine=False)


def norm_changed(m: Any) -> None:
    m.group_norm.eps, m.group_norm.num_groups = 0.1, 1


def norm_backward_hook(m: Any) -> None:
    m.group_norm.register_full_backward_hook(lambda module, grad_in, grad_out: (3 * grad_in[0],))


NORM_CHANGES = (
    norm_hook, norm_subclass, another_norm, identity_norm, norm_parametrized, norm_without_affine,
    norm_changed, norm_backward_hook,
)  # fmt: skip


@pytest.mark.parametrize("change", NORM_CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("row", [row for row in CONV_ROWS if row.has_norm], ids=lambda row: row.chain)
def test_row_30_what_was_done_to_the_norm(row: Row, change: Callable[[nn.Module], None]) -> None:
    fused, plain = modules(row)
    change(fused)
    change(plain)
    agree(fused, plain)


@rows
def test_row_30_parametrized_own_parameters(row: Row) -> None:
    """`bias` and `scale` that are computed from something else."""
    fused, plain = modules(row)
    for part in row.parts:
        if part in OF_STAGES:
            for model in (fused, plain):
                parametrize.register_parametrization(model, part, TimesThree())
    agree(fused, plain)


@rows
def test_row_30_hooks_that_only_look(row: Row) -> None:
    """A hook sees the conv's own output, as in the plain model; without it the fused path is back."""
    fused, plain = modules(row)
    seen: list[Tensor] = []
    x = module_input()
    for model in (fused, plain):
        handle = cast(Any, model).conv.register_forward_hook(
            lambda module, inputs, output: seen.append(output.detach())
        )
        model(x)
        handle.remove()
    torch.testing.assert_close(seen[0], seen[1])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
        fused(x)
    assert not [e.key for e in profile.key_averages() if "aten::conv" in e.key]


@rows
def test_row_30_global_hooks_see_the_parts(row: Row) -> None:
    """A hook on all modules (profilers, debuggers) is called for `conv`, as in the plain model."""
    fused, plain = modules(row)
    called: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: called.append(type(m).__name__))
    try:
        fused(module_input())
        plain(module_input())
    finally:
        handle.remove()
    assert called.count("Conv2d") == 2


@rows
def test_row_30_a_weight_of_a_tensor_subclass(row: Row) -> None:
    fused, plain = modules(row)
    for model in (fused, plain):
        conv = cast(Any, model).conv
        weight = conv.weight.detach().as_subclass(ScaledTensor)
        del conv.weight
        conv.weight = weight
    with torch.no_grad():
        x = module_input()
        torch.testing.assert_close(
            fused(x).as_subclass(Tensor), plain(x).as_subclass(Tensor), rtol=2e-5, atol=2e-5
        )


@rows
def test_default_dtype_and_inference_mode(row: Row) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        fused, plain = modules(row)
        x = module_input().double()
        with torch.inference_mode():
            y = fused(x)
        assert y.dtype == torch.float64
        torch.testing.assert_close(y.clone(), plain(x).detach(), rtol=1e-10, atol=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)


FULLY_SHARD = """
import sys
import torch
import torch.distributed as dist
from chains_table import CONV_ROWS, module_input, modules
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
for row in CONV_ROWS:
    fused, plain = modules(row)
    fully_shard(fused.conv, mesh=mesh)
    fully_shard(fused, mesh=mesh)
    x = module_input()
    y, right = fused(x), plain(x)
    torch.testing.assert_close(y, right, rtol=2e-5, atol=2e-5)
    y.square().sum().backward()
    right.square().sum().backward()
    for name, parameter in plain.named_parameters():
        got = fused.get_parameter(name).grad.full_tensor()
        scale = max(1.0, float(parameter.grad.abs().max()))
        torch.testing.assert_close(got / scale, parameter.grad / scale, rtol=1e-4, atol=1e-4)
print("sharded")
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6), reason="FSDP of torch 2.5 runs on CUDA only"
)
def test_row_30_fully_shard_of_the_conv(tmp_path: Path) -> None:
    """The sharded weight is gathered in the conv's own hooks, so the conv itself must be called."""
    assert "sharded" in new_process(FULLY_SHARD, tmp_path / "store")


@rows
def test_from_modules(row: Row) -> None:
    """Takes over trained parts themselves, not copies of them."""
    fused, plain = modules(row, padding=1)
    kind = getattr(fusedconv, cast(str, row.module))
    parts = {name: getattr(plain, name) for name in row.parts}
    names = {"pool_size": "maxpool_kernel_size", "clamp_min": "clamp_min", "clamp_max": "clamp_max"}
    rest = {names[n]: v for n, v in module_arguments(row, 8).items() if n in names}
    taken = kind.from_modules(**parts, **rest)
    assert taken.conv is plain.conv
    for part in row.parts:
        assert getattr(taken, part) is getattr(plain, part)
    agree(taken, plain)
    assert list(taken.state_dict()) == list(fused.state_dict())


class NormInside(nn.Module):
    """Something around the norm, as LoRA is around a conv."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.norm(x))


def test_from_modules_warns_once_where_nothing_is_fused(caplog: pytest.LogCaptureFixture) -> None:
    """What is called by itself is logged; a norm that has nothing of a GroupNorm may be a mistake."""
    caplog.set_level("INFO", logger="fusedconv")
    fusedconv.nn._tell_once.cache_clear()
    conv, silu = nn.Conv2d(8, 16, 3), fusedconv.ConvGroupNormSiLU
    for norm in (nn.BatchNorm2d(16), nn.Linear(9, 9)):
        with pytest.warns(UserWarning, match="nothing is fused") as caught:
            assert [silu.from_modules(conv, cast(Any, norm)) for _ in range(2)]
        (warning,) = caught
        assert warning.filename == __file__
        assert type(norm).__name__ in str(warning.message)
        assert str(warning.message) == caplog.messages[-1]
    assert len(caplog.messages) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        silu.from_modules(conv, nn.GroupNorm(2, 16, affine=False))
        assert len(caplog.messages) == 2
        silu.from_modules(conv, cast(Any, NormInside()))
        silu.from_modules(cast(Any, LoRA(conv)), nn.GroupNorm(2, 16))
        one = torch.ones(1)
        fusedconv.ConvBiasScaleSigmoidGroupNorm.from_modules(conv, one, one, cast(Any, nn.BatchNorm2d(16)))
    called = [(message.split()[1], message.split()[-3]) for message in caplog.messages[2:]]
    assert called == [
        ("group_norm", "nothing"),
        ("conv", "group_norm_silu"),
        ("group_norm", "bias_scale_sigmoid"),
    ]


@rows
def test_training_follows_the_plain_model(row: Row) -> None:
    """Ten steps of SGD from the same seed give the same losses."""
    fused, plain = modules(row)
    losses = []
    for model in (fused, plain):
        gen = generator("training")
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(10):
            y = model(randn(gen, 2, 3, 9, 9))
            loss = (y - 0.3).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    torch.testing.assert_close(torch.tensor(losses[:10]), torch.tensor(losses[10:]), rtol=1e-4, atol=1e-5)


@rows
def test_functional_and_operator_and_module_give_the_same_bits(row: Row) -> None:
    import fusedconv.functional

    fused = cast(Any, modules(row)[0])
    own = module_arguments(row, 8)
    values = {
        "norm_weight": "group_norm.weight",
        "norm_bias": "group_norm.bias",
        "bias": "bias",
        "scale": "scale",
    }
    named = dict(fused.named_parameters())
    own = {name: own[name] if name in own else named[values[name]] for name in row.arguments}
    x = module_input()
    with torch.no_grad():
        y = fused(x)
        operator = row.conv_op(x, fused.conv.weight, fused.conv.bias, own)
        functional = getattr(fusedconv.functional, row.conv)(x, fused.conv.weight, fused.conv.bias, **own)
        chain = getattr(fusedconv.functional, row.chain)(fused.conv(x), **own)
    assert torch.equal(y, operator)
    assert torch.equal(y, functional)
    torch.testing.assert_close(y, chain, rtol=2e-5, atol=2e-5)
    for name in (row.conv, row.chain):
        assert getattr(fusedconv.functional, name).__doc__
