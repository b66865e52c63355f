"""The CUDA C++ kernel of a Mamba-3 step: what it takes, and how a head's matrix is cut among the threads of a block."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_ssd.mamba3.problem import Problem
from jax_ssd.plans import ArrayArg, Buffer, Launch, Plan, ScalarArg
from jax_ssd.specs import CudaKernel

CUDA_TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float"}
ITEM_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
STATE = ("state_angle", "state_ssm", "state_k", "state_v")
LANES = 32
FEWER_LANES = 8  # of a row for several tokens, as in the kernel
TILE = 32  # floats of S in the registers of one thread, at most
WHOLE_TILE = 64  # the same for several tokens, which have all of a head's there
MOST_ROWS = 4  # by preference: registers decide how many blocks a multiprocessor runs at once
STREAMED_ROWS = 8  # 74 us against 78 at 134 MB, one run whose spread was as large
MOST_SHARED_BYTES = 48 * 1024  # of static shared memory
MOST_BLOCKS = 2**31 - 1  # one for each head of each row
MOST_EACH = 4  # cells of [rank, head_dim] or pairs of coordinates of [rank, state] that one thread prepares
# Matrices that a large L2 cache keeps from one token to the next are not to pass it by. Beyond, passing it by was 5 %
# faster on an H200 at 134 MB and 5 % slower at 537 MB.
STREAMED_BYTES = range(24 << 20, 256 << 20)


@dataclass(frozen=True)
class StepBlocks:
    """The choices behind a step that change its speed; rows and threads are powers of two.

    rows: of a head's matrix, that a unit of lanes takes at a time. threads: per block, that is per head. streaming:
    pass the matrices by the caches.
    """

    rows: int
    threads: int
    streaming: bool = False

    def __post_init__(self):
        for name, least, most in (("rows", 1, 64), ("threads", LANES, 1024)):
            value = getattr(self, name)
            if not least <= value <= most or value & (value - 1):
                raise ValueError(f"StepBlocks.{name} must be a power of two from {least} to {most}, got {value}.")


def step_blocks(problem: Problem) -> StepBlocks:
    """The heuristic: a few rows under way in each thread, and no more threads than there are rows.

    Several tokens have a head's whole matrix in registers, in as few threads as hold it.
    """
    p = problem
    nbytes = ITEM_SIZE[p.given["state_ssm"].dtype] * p.batch * p.heads * p.head_dim * p.state
    streaming = nbytes in STREAMED_BYTES
    rows, threads, each = STREAMED_ROWS if streaming else MOST_ROWS, 256, MOST_EACH
    if p.seq > 1:
        rows, threads, each = STREAMED_ROWS, 128, MOST_EACH // 2
    while rows > 1 and rows * row_floats(p) > tile_floats(p):
        rows //= 2
    while threads < 1024 and p.rank * max(p.state // 2, p.head_dim) > each * threads:
        threads *= 2
    while p.seq > 1 and threads < 1024 and rows * units(p, threads) < p.head_dim:
        threads *= 2
    while rows > 1 and rows // 2 * units(p, threads) >= p.head_dim:
        rows //= 2
    while threads > 64 and units(p, threads // 2) * rows >= p.head_dim:
        threads //= 2
    return StepBlocks(rows, threads, streaming)


def units(problem: Problem, threads: int) -> int:
    """Groups of lanes in a block that take rows of their own."""
    return threads // _lanes(problem)


def tile_floats(problem: Problem) -> int:
    """Floats of S in the registers of one thread, at most."""
    return WHOLE_TILE if problem.seq > 1 else TILE


def row_floats(problem: Problem) -> int:
    """Floats that one row takes in each lane."""
    return _width(problem) * math.ceil(problem.state // _width(problem) / _lanes(problem))


def _lanes(problem: Problem) -> int:
    """One per load of a row, of 16 bytes, or less where a row is no multiple of that."""
    most = FEWER_LANES if problem.seq > 1 else LANES
    return min(most, 1 << (problem.state // _width(problem) - 1).bit_length())


def _width(problem: Problem) -> int:
    return math.gcd(problem.state, 16 // ITEM_SIZE[problem.given["state_ssm"].dtype])


def shared_bytes(problem: Problem, rows: int) -> int:
    """What a block needs of shared memory."""
    p = problem
    padded = math.ceil(p.head_dim / rows) * rows
    return 4 * p.rank * (1 + 3 * p.state + 2 * padded + 3 * p.head_dim)


def step(problem: Problem, config: StepBlocks | None = None) -> Plan:
    """Tokens one after the other: the new state, in the memory of the old one, and y of each."""
    p = problem
    _check_supported(p)
    c = config or step_blocks(p)
    if p.seq > 1 and c.rows * units(p, c.threads) < p.head_dim:
        raise NotImplementedError(
            f"the step kernel takes several tokens with up to {c.rows * units(p, c.threads)} rows of a state of "
            f"{p.state}, got a head_dim of {p.head_dim}; give it one token a call, or use implementation='xla'"
        )
    need = shared_bytes(p, c.rows)
    if need > MOST_SHARED_BYTES:
        raise NotImplementedError(
            f"the step kernel needs {need:,} bytes of shared memory for rank {p.rank}, state size {p.state} and "
            f"head_dim {p.head_dim}, {MOST_SHARED_BYTES:,} are possible; use implementation='xla'"
        )
    new = {name: Buffer(f"new_{name}", p.given[name].shape, p.given[name].dtype) for name in STATE}
    tokens = ("q", "k", "v", "q_bias", "k_bias", "angles", "adt", "dt", "trap")
    arrays = (*tokens, "mimo_v", "mimo_o", "z", "mimo_z", "D", "norm_weight")
    template = (
        *(CUDA_TYPES[dtype] for dtype in (p.dtype, *(p.given[f"state_{part}"].dtype for part in ("ssm", "k", "v")))),
        *(p.heads, p.groups, p.rank, p.head_dim, p.state, p.pairs),
        *(p.rotary == "half", p.param_rows == 1),
        *(name in p.given for name in ("mimo_v", "mimo_o", "z", "D", "norm_weight")),
        *(p.seq > 1, c.rows, c.threads, c.streaming),
    )
    launch = Launch(
        CudaKernel("mamba3_step.cu", f"mamba3_step<{', '.join(map(_literal, template))}>"),
        grid=(p.batch * p.heads, 1, 1),
        arguments=(
            *(ArrayArg(buffer.name) for buffer in new.values()),
            *(ArrayArg(name if name in p.given else "v") for name in arrays),
            ArrayArg("y"),
            ScalarArg(p.norm_eps, "float32"),
            ScalarArg(p.seq, "int32"),
        ),
        block=(c.threads, 1, 1),
    )
    aliases = {name: buffer.name for name, buffer in new.items()}
    return Plan("mamba3_step", p.operands, (*new.values(), p.y), (), (launch,), aliases)


def _check_supported(p: Problem) -> None:
    """Raises NotImplementedError for what the kernel does not do, naming the limit and the figure."""
    parts = [(f"state.{part}", p.given[f"state_{part}"].dtype) for part in ("ssm", "k", "v")]
    for what, dtype in (("q", p.dtype), *parts):
        if dtype not in CUDA_TYPES:
            raise NotImplementedError(
                f"the step kernel takes {what} in {', '.join(CUDA_TYPES)}, got {dtype}; use implementation='xla'"
            )
    if p.given["state_angle"].dtype != "float32":
        raise NotImplementedError(
            f"the step kernel takes state.angle in float32, got {p.given['state_angle'].dtype}; use "
            "implementation='xla'"
        )
    if p.pairs < 1:
        raise NotImplementedError("the step kernel takes at least one rotated pair, got none; use implementation='xla'")
    if p.batch * p.heads > MOST_BLOCKS:
        raise NotImplementedError(
            f"the step kernel takes up to {MOST_BLOCKS:,} heads in a batch, got {p.batch * p.heads:,}; use "
            "implementation='xla'"
        )
    if row_floats(p) > tile_floats(p):
        most = tile_floats(p) * (FEWER_LANES if p.seq > 1 else LANES)
        raise NotImplementedError(
            f"the step kernel takes a state size up to {most}{' with several tokens' if p.seq > 1 else ''}, got "
            f"{p.state}; use implementation='xla'"
        )


def _literal(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
