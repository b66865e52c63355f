"""Which kernels run a Mamba-2 call, with which tiles, in which grid.

`forward` and `step` turn a Problem into a launch plan. They refuse with NotImplementedError what the kernels do not do.
How fast a plan is depends on a `Tiles` that may be given; None takes the heuristic. What a plan computes does not
depend on it, beyond rounding: the last bits follow the order of the sums, hence chunk and segments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from jax_ssd.mamba2.problem import Problem
from jax_ssd.plans import ArrayArg, Buffer, ConstantArg, Launch, Plan, ScalarArg
from jax_ssd.specs import CuTileKernel

ITEM_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
SMALLEST_TILE = 16  # the least side of a tile that the tensor cores take
# On sm_90 the forward in three-pass TF32 never ends with a state tile of 16 (compiled by tileiras 13.4; the same source
# ends with 32, and in bfloat16). The cause is not known, so no kernel is given a state tile of 16.
SMALLEST_STATE_TILE = 32
SMALLEST_CHUNK = 32  # of a short row: smaller ones were run in float32 only
CHUNKS = (16, 32, 64, 128)
LARGEST_STATE = 256
STATE_TILE = 8192  # float32 elements of a state, or its adjoint, in the registers of one program, by preference
CHUNK_BYTES = 65536  # of one chunk's B and C, counted once per pass: what the heuristic allows
LARGEST_CHUNK_BYTES = 262144  # what a caller's chunk_size may need: beyond, the compiler spills for minutes
PROGRAMS = 264  # two on each of the 132 multiprocessors of an H100 or H200
SHORTEST_SEGMENT = 8  # chunks; a segment costs one more read of its x and B
STEP_TILE = 8192  # elements of the state that one program of a step holds, at most
SMALLEST_STEP_TILE = 1024


@dataclass(frozen=True)
class Tiles:
    """The choices behind a forward plan that change its speed.

    chunk: tokens per chunk. head_dim_block: how much of a head's head_dim one program takes. segments: into how many
    pieces each row is cut. head_block: heads per program of the preparing kernel. latency: 1 to 10, how far ahead the
    compiler loads. occupancy, segment_occupancy: programs per multiprocessor of the two kernels that walk chunks;
    worker_warps: their warps, None for the compiler's choice. store_latency: the same hint as latency for the stores of
    y, 0 for the compiler's choice. swap: products are computed transposed, with their operands exchanged.
    """

    chunk: int
    head_dim_block: int
    segments: int
    head_block: int = 8
    latency: int = 2
    occupancy: int | None = 2
    segment_occupancy: int | None = 2
    worker_warps: int | None = None
    store_latency: int = 0
    swap: bool = False

    def __post_init__(self):
        for name in ("chunk", "head_dim_block", "head_block"):
            value = getattr(self, name)
            if value != power_of_two(value):
                raise ValueError(f"Tiles.{name} must be a power of two, got {value}.")
        if min(self.chunk, self.head_dim_block) < SMALLEST_TILE:
            raise ValueError(f"Tiles.chunk and Tiles.head_dim_block must be at least {SMALLEST_TILE}, got {self}.")
        if self.segments < 1:
            raise ValueError(f"Tiles.segments must be at least 1, got {self.segments}.")


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two >= n, and >= least."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def passes(problem: Problem) -> int:
    """How often a matrix product runs on the tensor cores: see kernels/cutile/precision.py."""
    if problem.dtype == "bfloat16":
        return 0
    return 3 if problem.dtype == "float32" and problem.precision == "highest" else 1


def factor_type(problem: Problem) -> str:
    """What operands of products are kept in, and chunk states for the next kernel: see kernels/cutile/precision.py."""
    return "bfloat16" if passes(problem) == 0 else "float32"


def check_supported(problem: Problem) -> None:
    """Raises NotImplementedError for what the cuTile kernels do not do, naming the limit and the figure."""
    if problem.dtype not in ITEM_SIZE:
        raise NotImplementedError(
            f"the cuTile kernels take {', '.join(ITEM_SIZE)}, got {problem.dtype}; use implementation='xla'"
        )
    if problem.state > LARGEST_STATE:
        raise NotImplementedError(
            f"the cuTile kernels take a state size up to {LARGEST_STATE}, got {problem.state}; use implementation='xla'"
        )
    if problem.dt_limit[0] < 0 and not problem.dt_softplus:
        raise NotImplementedError(
            f"the cuTile kernels take steps >= 0: dt_limit from 0 on, or dt_softplus, got "
            f"dt_limit={problem.dt_limit}; use implementation='xla'"
        )
    if problem.chunk_size is not None and problem.chunk_size not in CHUNKS:
        raise NotImplementedError(
            f"the cuTile kernels take a chunk_size of {', '.join(map(str, CHUNKS))} (tiles are powers of two), got "
            f"{problem.chunk_size}; leave it out, or use implementation='xla'"
        )
    if problem.chunk_size is not None and problem.chunk_size * row_bytes(problem) > LARGEST_CHUNK_BYTES:
        raise NotImplementedError(
            f"a chunk_size of {problem.chunk_size} with state size {problem.state} in {problem.dtype} "
            f"(precision={problem.precision!r}) needs {problem.chunk_size * row_bytes(problem)} bytes of tiles, the "
            f"cuTile kernels take {LARGEST_CHUNK_BYTES}; leave chunk_size out"
        )


def row_bytes(problem: Problem) -> int:
    """Of one token's B and C in shared memory, counted once per pass."""
    return (
        2 * power_of_two(problem.state, SMALLEST_STATE_TILE) * ITEM_SIZE[factor_type(problem)] * max(1, passes(problem))
    )


def tiles(problem: Problem) -> Tiles:
    """The heuristic."""
    state = power_of_two(problem.state, SMALLEST_STATE_TILE)
    block = min(power_of_two(problem.head_dim, SMALLEST_TILE), 64, STATE_TILE // state)
    chunk = problem.chunk_size or min(64, power_of_two(problem.seq, SMALLEST_CHUNK))
    if problem.chunk_size is None:
        while chunk > SMALLEST_TILE and chunk * row_bytes(problem) > CHUNK_BYTES:
            chunk //= 2
    chunks = math.ceil(problem.seq / chunk)
    programs = problem.batch * problem.heads * math.ceil(problem.head_dim / block)
    segments = max(1, min(PROGRAMS // programs, chunks // SHORTEST_SEGMENT))
    # Swapped, a block of head_dim is the rows of the tensor cores, which 64 fill: with 32 it was slower. So it was in
    # one pass of TF32.
    swap = block >= 64 and passes(problem) != 1
    return Tiles(chunk, max(SMALLEST_TILE, block), segments, prepare_heads(problem), swap=swap)


def prepare_heads(problem: Problem) -> int:
    """Heads per program of the preparing kernel, whose tile is [heads, chunk, chunk] if there are runs."""
    return 1 if problem.has_runs else min(32, power_of_two(problem.heads))


def forward(problem: Problem, config: Tiles | None = None) -> Plan:
    """The scan: y, and the final state if it is asked for."""
    check_supported(problem)
    return _Forward(problem, config or tiles(problem)).plan()


class _Forward:
    """What the launches of a forward plan have in common."""

    def __init__(self, problem: Problem, config: Tiles):
        p = self.problem = problem
        self.chunks = math.ceil(p.seq / config.chunk)
        self.chunks_per_segment = math.ceil(self.chunks / min(config.segments, self.chunks))
        self.segments = math.ceil(self.chunks / self.chunks_per_segment)
        self.config = replace(config, segments=self.segments)
        self.blocks = math.ceil(p.head_dim / config.head_dim_block)
        self.operands = scan_operands(p)
        final = Buffer("final_state", (p.batch, p.heads, p.head_dim, p.state), "float32")
        y = Buffer("y", (p.batch, p.seq, p.heads, p.head_dim), p.dtype)
        self.results = (y, final) if p.return_final_state else (y,)
        padded = (p.batch, p.heads, self.chunks * config.chunk)
        self.scratch = [Buffer("step", padded, "float32"), Buffer("decay", padded, "float32")]
        if self.segments > 1:
            ends = (p.batch, p.heads, self.segments - 1)
            state = (p.head_dim, p.state) if config.swap else (p.state, p.head_dim)
            self.scratch += [Buffer("ends", (*ends, *state), "float32"), Buffer("totals", ends, "float32")]

    def plan(self) -> Plan:
        launches = [prepare(self.problem, self.config.chunk, self.config.head_block)]
        if self.segments > 1:
            launches.append(self.segment_state())
        launches.append(self.forward())
        return Plan("mamba2_forward", self.operands, self.results, tuple(self.scratch), tuple(launches), {})

    def arrays(self, *names: str) -> list[Any]:
        present = {b.name for b in (*self.operands, *self.results, *self.scratch)}
        return [ArrayArg(name if name in present else "x") for name in names]  # the kernel never touches a stand-in

    def sizes(self) -> list[int]:
        p, c = self.problem, self.config
        state = power_of_two(p.state, SMALLEST_STATE_TILE)
        return [c.chunk, c.head_dim_block, state, p.heads, p.heads // p.groups, self.blocks, self.chunks]

    def kernel(self, module: str, function: str, occupancy: int | None) -> CuTileKernel:
        return CuTileKernel(module, function, occupancy=occupancy, num_worker_warps=self.config.worker_warps)

    def segment_state(self) -> Launch:
        p, c = self.problem, self.config
        arrays = self.arrays("x", "B", "step", "decay", "runs", "ends", "totals")
        constants = [*self.sizes(), self.chunks_per_segment, p.seq, p.has_runs, passes(p), c.latency, c.swap]
        programs = p.batch * (self.segments - 1) * p.heads * self.blocks
        return launch(self.kernel("segments", "segment_state", c.segment_occupancy), programs, arrays, constants)

    def forward(self) -> Launch:
        p, c = self.problem, self.config
        arrays = self.arrays(
            "x", "B", "C", "step", "decay", "D", "z", "runs", "initial_state", "ends", "totals", "y", "final_state"
        )
        arrays.append(ScalarArg(p.seq, "int32"))
        options = [p.param_rows == 1, p.has_D, p.has_z, p.has_runs, p.has_initial_state, p.return_final_state]
        hints = [c.latency, c.store_latency, c.swap]
        constants = [*self.sizes(), self.segments, self.chunks_per_segment, p.seq, *options, passes(p), *hints]
        programs = p.batch * self.segments * p.heads * self.blocks
        return launch(self.kernel("forward", "forward", c.occupancy), programs, arrays, constants)


def launch(kernel: CuTileKernel, programs: int, arrays: list[Any], constants: list[Any]) -> Launch:
    """One launch of so many programs: what is passed first, then what is compiled in."""
    return Launch(kernel, (programs, 1, 1), (*arrays, *map(ConstantArg, constants)))


def scan_operands(p: Problem) -> tuple[Buffer, ...]:
    """The operands of the scan in their canonical order, absent ones left out."""
    tokens, group = (p.batch, p.seq, p.heads, p.head_dim), (p.batch, p.seq, p.groups, p.state)
    per_head = (p.param_rows, p.heads)
    every = (
        (Buffer("x", tokens, p.dtype), True),
        (Buffer("dt", (p.batch, p.seq, p.heads), p.dt_dtype), True),
        (Buffer("A", per_head, "float32"), True),
        (Buffer("B", group, p.dtype), True),
        (Buffer("C", group, p.dtype), True),
        (Buffer("D", (*per_head, p.head_dim), "float32"), p.has_D),
        (Buffer("z", tokens, p.dtype), p.has_z),
        (Buffer("dt_bias", per_head, "float32"), p.has_dt_bias),
        (Buffer("initial_state", (p.batch, p.heads, p.head_dim, p.state), "float32"), p.has_initial_state),
        (Buffer("runs", (p.batch, p.seq), "int32"), p.has_runs),
    )
    return tuple(buffer for buffer, present in every if present)


def prepare(problem: Problem, chunk: int, head_block: int) -> Launch:
    """dt, dt_bias, A -> scratch "step" and "decay" [batch, heads, chunks * chunk] float32. The backward runs it too."""
    p = problem
    arrays = [ArrayArg("dt"), ArrayArg("dt_bias" if p.has_dt_bias else "A"), ArrayArg("A")]
    arrays += [ArrayArg("runs" if p.has_runs else "A"), ArrayArg("step"), ArrayArg("decay")]
    blocks, chunks = math.ceil(p.heads / head_block), math.ceil(p.seq / chunk)
    low, high = map(float, p.dt_limit)
    options = [p.param_rows == 1, p.has_dt_bias, p.dt_softplus, low, high, p.has_runs]
    constants = [chunk, head_block, blocks, chunks, p.seq, *options]
    return launch(CuTileKernel("decay", "prepare"), p.batch * chunks * blocks, arrays, constants)


@dataclass(frozen=True)
class StepTiles:
    """How much of a state one program of a step takes: heads (all of one group, or each its own) times head_dim."""

    head_block: int
    head_dim_block: int


def step_tiles(problem: Problem) -> StepTiles:
    """The heuristic: tiles of up to STEP_TILE elements, smaller while there are too few to fill the GPU."""
    p = problem
    state, per_group = power_of_two(p.state), p.heads // p.groups
    block, heads = power_of_two(p.head_dim), 1
    most = power_of_two(p.heads) if per_group == 1 else per_group & -per_group  # the power of two that divides it
    while block > 1 and block * state > STEP_TILE:
        block //= 2
    while heads < most and 2 * heads * block * state <= STEP_TILE:
        heads *= 2
    while (
        p.batch * math.ceil(p.heads / heads) * math.ceil(p.head_dim / block) < 2 * PROGRAMS
        and heads * block * state > SMALLEST_STEP_TILE
    ):
        if heads > 1:
            heads //= 2
        elif block > 1:
            block //= 2
        else:
            break
    return StepTiles(heads, block)


def step(problem: Problem, config: StepTiles | None = None) -> Plan:
    """One token: the new state, in the memory of the old one, and y."""
    check_supported(replace(problem, chunk_size=None))
    p, c = problem, config or step_tiles(problem)
    operands, results = step_buffers(p)
    present = {b.name for b in (*operands, *results)}
    names = ("new_state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "y")
    arrays = [ArrayArg(name if name in present else "x") for name in names]
    head_blocks, blocks = math.ceil(p.heads / c.head_block), math.ceil(p.head_dim / c.head_dim_block)
    low, high = map(float, p.dt_limit)
    constants = [
        c.head_block,
        c.head_dim_block,
        power_of_two(p.state),
        head_blocks,
        blocks,
        p.heads // p.groups,
        p.param_rows == 1,
        p.has_D,
        p.has_z,
        p.has_dt_bias,
        p.dt_softplus,
        low,
        high,
    ]
    launches = (launch(CuTileKernel("step", "step"), p.batch * head_blocks * blocks, arrays, constants),)
    return Plan("mamba2_step", operands, results, (), launches, {"state": "new_state"})


def step_buffers(p: Problem) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...]]:
    """The operands of a step in their canonical order, absent ones left out, and its results."""
    per_head, group = (p.param_rows, p.heads), (p.batch, p.groups, p.state)
    shape = (p.batch, p.heads, p.head_dim, p.state)
    every = (
        (Buffer("state", shape, p.state_dtype), True),
        (Buffer("x", shape[:3], p.dtype), True),
        (Buffer("dt", shape[:2], p.dt_dtype), True),
        (Buffer("A", per_head, "float32"), True),
        (Buffer("B", group, p.dtype), True),
        (Buffer("C", group, p.dtype), True),
        (Buffer("D", (*per_head, p.head_dim), "float32"), p.has_D),
        (Buffer("z", shape[:3], p.dtype), p.has_z),
        (Buffer("dt_bias", per_head, "float32"), p.has_dt_bias),
    )
    operands = tuple(buffer for buffer, present in every if present)
    return operands, (Buffer("new_state", shape, p.state_dtype), Buffer("y", shape[:3], p.dtype))
