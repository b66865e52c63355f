"""The CUDA C++ kernel of a step: which rows of the state a thread block takes, and how many blocks there are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_ssd.mamba2 import plan
from jax_ssd.mamba2.problem import Problem
from jax_ssd.plans import ArrayArg, Launch, Plan, ScalarArg
from jax_ssd.specs import CudaKernel

CUDA_TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float"}
LOAD_BYTES = 16
LANES = 32
MOST_UNITS = 2**31 - 1
MOST_LOADS = 8  # of the state, that one thread has under way
FILLED_LANES = 132 * 1024  # half of what the 132 multiprocessors of an H100 or H200 run at once


@dataclass(frozen=True)
class StepBlocks:
    """The choices behind a step that change its speed and no bit of its results; rows and threads are powers of two.

    rows: of the state, channels of one head, that a unit of lanes takes. threads: per block.
    """

    rows: int
    threads: int

    def __post_init__(self):
        for name in ("rows", "threads"):
            value = getattr(self, name)
            if value != plan.power_of_two(value):
                raise ValueError(f"StepBlocks.{name} must be a power of two, got {value}.")
        if not LANES <= self.threads <= 1024:
            raise ValueError(f"StepBlocks.threads must be from {LANES} to 1024, got {self.threads}.")


def step_blocks(problem: Problem) -> StepBlocks:
    """The heuristic: as many rows per unit as still fill the GPU, and small blocks where there is little to do."""
    p = problem
    lanes = unit_lanes(p)
    loads = math.ceil(p.state // vector_width(p) / lanes)  # of one row, per thread
    rows = max(1, MOST_LOADS // loads)
    while rows > 1 and (p.head_dim % rows or units(p, rows) * lanes < FILLED_LANES):
        rows //= 2
    threads = 256
    while threads > 64 and units(p, rows) * lanes < FILLED_LANES // 512 * threads:
        threads //= 2
    return StepBlocks(rows, threads)


def vector_width(problem: Problem) -> int:
    """Elements of a state that one load moves: 16 bytes, or less where a row is no multiple of that."""
    return math.gcd(problem.state, LOAD_BYTES // plan.ITEM_SIZE[problem.state_dtype])


def unit_lanes(problem: Problem) -> int:
    """Lanes that share a row."""
    return min(LANES, plan.power_of_two(problem.state // vector_width(problem)))


def units(problem: Problem, rows: int) -> int:
    return problem.batch * problem.heads * math.ceil(problem.head_dim / rows)


def step(problem: Problem, config: StepBlocks | None = None) -> Plan:
    """One token: the new state, in the memory of the old one, and y."""
    p = problem
    for what, dtype in (("x", p.dtype), ("dt", p.dt_dtype), ("a state", p.state_dtype)):
        if dtype not in CUDA_TYPES:
            raise NotImplementedError(
                f"the CUDA C++ step takes {what} in {', '.join(CUDA_TYPES)}, got {dtype}; use implementation='xla'"
            )
    c = config or step_blocks(p)
    count = units(p, c.rows)
    if count > MOST_UNITS:
        raise NotImplementedError(
            f"the CUDA C++ step takes up to {MOST_UNITS:,} blocks of {c.rows} rows of the state, got {count:,}; use "
            "implementation='xla'"
        )
    operands, results = plan.step_buffers(p)
    present = {b.name for b in (*operands, *results)}
    names = ("new_state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "y")
    low, high = map(float, p.dt_limit)
    scalars = (ScalarArg(count, "uint32"), ScalarArg(low, "float32"), ScalarArg(high, "float32"))
    template = (
        CUDA_TYPES[p.dtype],
        CUDA_TYPES[p.dt_dtype],
        CUDA_TYPES[p.state_dtype],
        *(p.heads, p.groups, p.head_dim, p.state),
        *(p.param_rows == 1, p.has_D, p.has_z, p.has_dt_bias, p.dt_softplus),
        *(c.rows, c.threads),
    )
    launch = Launch(
        CudaKernel("mamba2_step.cu", f"mamba2_step<{', '.join(map(_literal, template))}>"),
        grid=(math.ceil(count * unit_lanes(p) / c.threads), 1, 1),
        arguments=(*(ArrayArg(name if name in present else "x") for name in names), *scalars),
        block=(c.threads, 1, 1),
    )
    return Plan("mamba2_step", operands, results, (), (launch,), {"state": "new_state"})


def _literal(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
