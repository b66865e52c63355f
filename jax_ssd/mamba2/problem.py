"""The static description of one Mamba-2 call: sizes, types and which options are present.

Everything a plan, an abstract evaluation or a refusal depends on, and nothing else: two calls with equal problems run
the same kernels. Sizes are those of one device's shard, since problems are made after partitioning.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One call of the scan, its backward, or a step (there seq is 1)."""

    batch: int  # product of all leading axes
    seq: int
    heads: int
    head_dim: int
    groups: int
    state: int
    dtype: str  # of x, B, C, z and y: "bfloat16", "float16", "float32", or "float64" (XLA only)
    dt_dtype: str
    param_rows: int  # leading axis of A, D and dt_bias: 1, or batch after vmap over parameters
    dt_softplus: bool
    dt_limit: tuple[float, float]
    has_D: bool
    has_z: bool
    has_dt_bias: bool
    has_initial_state: bool
    has_runs: bool
    return_final_state: bool
    chunk_size: int | None  # None: the implementation chooses
    precision: str  # "default" (TF32 for float32) or "highest" (full float32); no effect on 16-bit inputs
    has_dfinal: bool = False  # backward: a cotangent of the final state is given
    state_dtype: str = "float32"  # step: type of the carried state
