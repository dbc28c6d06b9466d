from collections.abc import Sequence
from typing import ClassVar

# Pointers are ints (data_ptr()). Names are checked here, and that there is a pointer for each; nothing else is:
# _launch.py passes only what the operator's checks have accepted.

Form = tuple[int, Sequence[int], Sequence[int]]
"""dtype code, sizes (N, C, H, W), strides in elements."""

Conv = tuple[Form, Sequence[int], Sequence[int], Sequence[int], int, bool]
"""weight, stride, padding, dilation, groups, and whether float32 products of TF32 precision will do."""

Numbers = tuple[int, float, Sequence[int], float, float]
"""num_groups (0: no norm), eps, pool_size (1, 1: no pool), clamp_min (-inf: none), clamp_max (inf: none)."""

FLOAT32: int
FLOAT64: int
BFLOAT16: int
FLOAT16: int

CHANNEL_PARAMETERS: tuple[str, ...]
"""Names of the tensors with a value a channel: csrc/core/channel_parameters.h."""

class Plan:
    """Who runs a call, and why. ``str`` gives the path and the words. Plans are equal if all that they say is."""

    __hash__: ClassVar[None]  # type: ignore[assignment]

    @property
    def path(self) -> str:
        """ "direct", "two-step", "chain" or "plain", as `Explanation.path` has it."""

    @property
    def instructions(self) -> str:
        """That our conv is made of: "baseline", "avx2", "avx512", "sm_80", "sm_90a"; else empty."""

    @property
    def reason(self) -> str:
        """By name: csrc/plan/reason.h. Empty where the chain runs on a given tensor."""

    @property
    def numbers(self) -> dict[str, int]:
        """Those in the words, by name."""

    @property
    def words(self) -> str:
        """Instructions, reason, and how our conv runs."""

    @property
    def workspace_bytes(self) -> int:
        """Memory that each run wants on a CUDA device."""

    @property
    def terms(self) -> int:
        """Products of the machine's that add up to one of our conv's: three where tensor cores multiply split float32."""

    @property
    def is_ours(self) -> bool:
        """Whether a kernel runs all that was asked about."""

class Launch:
    """A chain on tensors of known forms, prepared once. Runs take pointers, and the GIL is released."""

    def __init__(
        self,
        chain: str,
        tensors: Sequence[tuple[str, int]],
        input: Form,
        conv: Conv | None,
        numbers: Numbers,
        output: Form,
        /,
    ) -> None:
        """``tensors``: names and dtype codes of those whose pointers the runs bring, in their order. The parameters among
        them have C contiguous elements."""

    def on_cpu(self, pointers: Sequence[int], output: int, statistics: int, threads: int, /) -> None:
        """``statistics``: memory for those of the norm, contiguous float64 (N, num_groups, 2), the mean and
        1 / sqrt(variance + eps) of each group; or 0."""

    def prepare_cuda(self, device: int, /) -> Plan:
        """Plans the launch for a device."""

    def on_cuda(
        self, pointers: Sequence[int], output: int, statistics: int, workspace: int, stream: int, /
    ) -> None:
        """On the device that it was prepared for. ``workspace``: memory at a multiple of 256, or 0 if it wants none."""

class Backward:
    """A chain's backward, prepared once in the same way. v, the chain's input, is contiguous, and so is the gradient of
    the output. None of v's sizes is 0."""

    def __init__(
        self,
        chain: str,
        tensors: Sequence[tuple[str, int]],
        v: Form,
        conv: tuple[Form, Conv] | None,
        numbers: Numbers,
        grad_v: int,
        gradients: Sequence[str],
        wants_v: bool,
        /,
    ) -> None:
        """``tensors``: as for a launch; "grad" is the gradient of the output, "input" is v, and "statistics" are what
        a launch gave, which every chain with a norm takes.

        ``conv``: the form of "input", contiguous, and the conv; then v has no memory, but is computed again. ``grad_v``:
        the dtype code of v's gradient. ``gradients``: names of the tensors whose gradients are wanted. A parameter's has
        C elements; it is in float64 where v is, else in float32, and so is the weight's."""

    def on_cpu(self, pointers: Sequence[int], gradients: Sequence[int], grad_v: int, threads: int, /) -> None:
        """For float32 or float64, which all of v and the gradients have; with a conv for float32 and stride 1.
        ``gradients``: pointers, in the order of the names. ``grad_v`` is overwritten whether v's gradient is wanted or
        not; where nothing is reduced it may be v; where there is a conv it is 0."""

    def prepare_cuda(self, device: int, /) -> Plan:
        """As a launch's. Where it is not ours and has a conv, the chain's part may be, on a v that is given."""

    def on_cuda(
        self,
        pointers: Sequence[int],
        gradients: Sequence[int],
        grad_v: int,
        workspace: int,
        stream: int,
        /,
    ) -> None:
        """As ``on_cpu``; ``grad_v`` is 0 where there is a conv."""

# Plans raise ValueError for what no conv has, such as a stride of 0.

def plan_conv_on_cpu(input: Form, conv: Conv, instructions: str, /) -> Plan:
    """Of a chain with its conv."""

def plan_backward_on_cpu(
    v: Form,
    grad: int | None,
    has_infinite_bounds: bool,
    conv: tuple[Form, Conv] | None,
    instructions: str,
    /,
) -> Plan:
    """Of a chain's backward. "direct": all of it, with the conv's gradients; "two-step": these are PyTorch's, the chain's
    part is ours; "chain": so it is, and there is no conv; "plain": it is PyTorch's.

    ``grad``: the dtype code of the output's gradient, None for one without. ``has_infinite_bounds``: of a clamp.
    ``conv``: the input and the conv; None where v is given."""

def plan_v_on_cpu(input: Form, conv: Conv, stores: bool, instructions: str, /) -> Plan:
    """Of v, which backward computes again where it is not direct. ``stores``: the output has a value for each of v's."""

def plan_chain_backward(v: int, grad: int | None, has_infinite_bounds: bool, /) -> Plan:
    """Of the chain's part of backward, on any device: "plain" where no kernel serves. ``v``: its dtype code."""

def plan_for_card(
    input: Form,
    conv: Conv,
    output: Form,
    pool: Sequence[int] | None,
    waits_for_norms: bool,
    card: tuple[int, int, int],
    /,
) -> Plan:
    """As a launch's, but for the workspace, for a card that need not be here: its compute capability (90 for 9.0), its
    multiprocessors, and the bytes of shared memory that a block may have. ``waits_for_norms``: the chain has a norm
    and no pool."""

def cuda_chains() -> tuple[str, ...]: ...
def cuda_status(device: int, /) -> str: ...
def build_info() -> dict[str, str]: ...
def cpu_isa() -> str: ...
def cpu_isas() -> tuple[str, ...]: ...
