from collections.abc import Sequence

# Pointers are ints (data_ptr()); 0 where the tensor is absent. Nothing is checked here: _launch.py passes only what
# the operator's checks have accepted.

Tensor = tuple[int, int, Sequence[int], Sequence[int]]
"""data_ptr, dtype code, sizes (N, C, H, W), strides in elements."""

Arguments = tuple[int, int, int, int, int, float, int, int, float, float]
"""bias, scale, norm_weight, norm_bias (pointers to C contiguous elements of the compute type), num_groups (0: no norm),
eps, pool_h, pool_w (1, 1: no pool), clamp_min (-inf: none), clamp_max (inf: none)."""

FLOAT32: int
FLOAT64: int
BFLOAT16: int
FLOAT16: int

def cpu_conv2d(
    chain: str,
    input: Tensor,
    weight: Tensor,
    conv_bias: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    arguments: Arguments,
    output: Tensor,
    threads: int,
    /,
) -> None: ...
def cpu_chain(chain: str, input: Tensor, arguments: Arguments, output: Tensor, threads: int, /) -> None: ...
def cuda_chain(
    chain: str, input: Tensor, arguments: Arguments, output: Tensor, device: int, stream: int, /
) -> None: ...
def cuda_chains() -> tuple[str, ...]: ...
def cuda_status(device: int, /) -> str: ...
def build_info() -> dict[str, str]: ...
def cpu_isa() -> str: ...
def cpu_isas() -> tuple[str, ...]: ...
