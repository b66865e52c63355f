"""The CUDA C++ kernel of a layer's token between its projections: what it takes, and how a block's rows are chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_ssd.mamba2 import plan
from jax_ssd.mamba2.plan_cuda_step import CUDA_TYPES, FILLED_LANES, LANES, LOAD_BYTES, MOST_LOADS
from jax_ssd.plans import ArrayArg, Buffer, Launch, Plan, ScalarArg
from jax_ssd.specs import CudaKernel

MOST_TAPS = 8
MOST_BLOCKS = 2**31 - 1
CARRIED = ("state", "window_x", "window_bc")
THREADS = 256


@dataclass(frozen=True)
class MixerProblem:
    """One call: its sizes, those of one device's shard, and its operands in order. all_heads: of the whole layer."""

    batch: int
    heads: int
    all_heads: int
    head_dim: int
    groups: int
    state: int
    width: int
    dtype: str  # of y
    param_rows: int
    dt_limit: tuple[float, float]
    gates: bool
    norm: tuple[float, float]
    operands: tuple[Buffer, ...]

    @property
    def given(self) -> dict[str, Buffer]:
        return {buffer.name: buffer for buffer in self.operands}


def fits(width: int, state: int, dtype: str) -> bool:
    """Whether the kernel takes windows of that many tokens and states of that size and type."""
    return width <= MOST_TAPS and _loads(state, dtype) <= MOST_LOADS


def lanes(problem: MixerProblem) -> int:
    """Threads that share a row of the state."""
    return _lanes(problem.state, problem.given["state"].dtype)


def _pieces(state: int, dtype: str) -> int:
    """Loads that a row of the state takes."""
    return state // math.gcd(state, LOAD_BYTES // plan.ITEM_SIZE.get(dtype, 8))


def _lanes(state: int, dtype: str) -> int:
    return min(LANES, plan.power_of_two(_pieces(state, dtype)))


def _loads(state: int, dtype: str) -> int:
    """A thread's part of them."""
    return math.ceil(_pieces(state, dtype) / _lanes(state, dtype))


def rows(problem: MixerProblem) -> int:
    """The heuristic: as many rows per unit of lanes as a thread holds, as long as they fill the GPU."""
    p = problem
    chosen = max(1, MOST_LOADS // _loads(p.state, p.given["state"].dtype))
    while chosen > 1 and (
        THREADS // lanes(p) * chosen >= 2 * p.head_dim
        or p.batch * p.heads * p.head_dim * lanes(p) < FILLED_LANES * chosen
    ):
        chosen //= 2
    return chosen


def step(problem: MixerProblem, unit_rows: int | None = None) -> Plan:
    """One token: the new state and windows, in the memory of the old ones, and y."""
    p = problem
    kinds = {"y": p.dtype} | {name: p.given[name].dtype for name in CARRIED}
    for what, dtype in kinds.items():
        if dtype not in CUDA_TYPES:
            raise NotImplementedError(
                f"the kernel takes {what} in {', '.join(CUDA_TYPES)}, got {dtype}; use implementation='xla'"
            )
    if kinds["window_x"] != kinds["window_bc"]:
        raise NotImplementedError(
            f"the kernel takes window_x and window_bc of one type, got {kinds['window_x']} and {kinds['window_bc']}; "
            "use implementation='xla'"
        )
    if _loads(p.state, kinds["state"]) > MOST_LOADS:
        raise NotImplementedError(
            f"the kernel takes states of up to {MOST_LOADS * LANES} loads of {LOAD_BYTES} bytes or of what divides a "
            f"row, got a size of {p.state} in {kinds['state']}, {_pieces(p.state, kinds['state'])} loads; "
            "use implementation='xla'"
        )
    if p.width > MOST_TAPS:
        raise NotImplementedError(
            f"the kernel takes convolutions of up to {MOST_TAPS} taps, got {p.width}; use implementation='xla'"
        )
    count = unit_rows or rows(p)
    blocks = p.batch * p.heads * math.ceil(p.head_dim / (THREADS // lanes(p) * count))
    if blocks > MOST_BLOCKS:
        raise NotImplementedError(
            f"the kernel takes up to {MOST_BLOCKS:,} blocks, got {blocks:,}; use implementation='xla'"
        )
    new = {name: Buffer(f"new_{name}", p.given[name].shape, p.given[name].dtype) for name in CARRIED}
    y = Buffer("y", (p.batch, p.heads, p.head_dim), p.dtype)
    arrays = (
        "projected",
        "position",
        "head",
        "filter_x",
        "filter_bc",
        "bias_x",
        "bias_bc",
        "A",
        "D",
        "dt_bias",
        "squares",
    )
    template = (
        *(CUDA_TYPES[kinds[name]] for name in ("y", "window_x", "state")),
        *(p.heads, p.all_heads, p.groups, p.head_dim, p.state, p.width),
        *(p.param_rows == 1, "bias_x" in p.given, p.gates, "squares" in p.given),
        *(count, THREADS),
    )
    literals = (str(value).lower() if isinstance(value, bool) else str(value) for value in template)
    launch = Launch(
        CudaKernel("mamba2_mixer_step.cu", f"mamba2_mixer_step<{', '.join(literals)}>"),
        grid=(blocks, 1, 1),
        arguments=(
            *(ArrayArg(buffer.name) for buffer in new.values()),
            *(ArrayArg(name if name in p.given else "A") for name in arrays),
            ArrayArg("y"),
            *(ScalarArg(float(bound), "float32") for bound in (*p.dt_limit, *p.norm)),
        ),
        block=(THREADS, 1, 1),
    )
    aliases = {name: buffer.name for name, buffer in new.items()}
    return Plan("mamba2_mixer_step", p.operands, (*new.values(), y), (), (launch,), aliases)
