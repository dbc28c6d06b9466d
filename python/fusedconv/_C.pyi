from collections.abc import Sequence

# Pointers are ints (data_ptr()). Names are checked here, and that there is a pointer for each; nothing else is:
# _launch.py passes only what the operator's checks have accepted.

Form = tuple[int, Sequence[int], Sequence[int]]
"""dtype code, sizes (N, C, H, W), strides in elements."""

Conv = tuple[Form, Sequence[int], Sequence[int], Sequence[int], bool]
"""weight, stride, padding, dilation, and whether float32 products of TF32 precision will do."""

Numbers = tuple[int, float, Sequence[int], float, float]
"""num_groups (0: no norm), eps, pool_size (1, 1: no pool), clamp_min (-inf: none), clamp_max (inf: none)."""

FLOAT32: int
FLOAT64: int
BFLOAT16: int
FLOAT16: int

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

    def on_cpu(self, pointers: Sequence[int], output: int, threads: int, /) -> None: ...
    def prepare_cuda(self, device: int, /) -> tuple[int, str]:
        """Plans the launch for a device. Gives the bytes of memory that each run wants, -1 where the conv is left to
        PyTorch, and the plan of a conv in words."""

    def on_cuda(self, pointers: Sequence[int], output: int, workspace: int, stream: int, /) -> None:
        """On the device that it was prepared for. ``workspace``: memory at a multiple of 256, or 0 if it wants none."""

def backward_on_cpu(
    chain: str,
    v_form: Form,
    v: int,
    grad: int,
    numbers: Numbers,
    parameters: Sequence[tuple[str, int, int, int]],
    grad_v: int,
    wants_v: bool,
    threads: int,
    /,
) -> None:
    """Gradients of a chain on ``v``, none of whose sizes is 0. All tensors are contiguous. ``grad``, ``grad_v`` and the
    gradients of the parameters, of C elements each, have ``v``'s dtype: float32 or float64. ``grad_v`` is overwritten
    whether it is wanted or not; where nothing is reduced it may be ``v``. ``parameters``: names, dtype codes, pointers,
    and pointers to the gradients, 0 where they are not wanted."""

def cuda_chains() -> tuple[str, ...]: ...
def cuda_status(device: int, /) -> str: ...
def build_info() -> dict[str, str]: ...
def cpu_isa() -> str: ...
def cpu_isas() -> tuple[str, ...]: ...
