"""Which kernels run the backward of a Mamba-3 scan, on which grid, with which scratch.

States before each chunk and adjoints of the states after it are recomputed by walks over the chunks; one kernel makes
everything that a chunk gives, from both; the rest are sums over chunks, groups and time in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from jax_ssd import compile
from jax_ssd.mamba3.problem import Problem
from jax_ssd.plans import MAX_SHARED_MEMORY, MULTIPROCESSORS, Argument, ArrayArg, Buffer, Launch, Plan, ScalarArg
from jax_ssd.specs import CudaKernel

FILE = "mamba3_backward.cu"
# By warpgroups, of sm_90.
WALK_FILE, CHUNK_FILE, TIME_FILE = "mamba3_backward_walk.cu", "mamba3_backward_chunk.cu", "mamba3_backward_time.cu"
WARPGROUP_RANKS, WARPGROUP_STATE, WARPGROUP_HEAD_DIM = (1, 2, 4), 128, 64
# Of a row: from a head's states to the next one's is a step of 32 bits.
WARPGROUP_CHUNKS = (2**31 - 1) // (WARPGROUP_STATE * WARPGROUP_HEAD_DIM)
WALK_TEAM, CHUNK_TEAMS, CLUSTER_THREADS = 256, 512, 256
SCHEDULE_LANES, SCHEDULE_DEPTH = 8, 2
TIME_BLOCKS = 8  # at most of a cluster that takes columns along time
SHORTEST_SEGMENT, MOST_SEGMENTS = 8, 64  # chunks; a segment costs one more pass over its rows
VALUE = {"bfloat16": "__nv_bfloat16", "float32": "float"}
ROWS = 64  # of a tile: tokens x ranks of a chunk
SMALL_ROWS = 32  # where memory is scarce
# Tokens over which the gradients of phases are summed: where a span ends, states are read again, and within it the
# rounding errors of its chunks' states add up. 16-bit states of all chunks by the general kernels.
SPAN, SPAN_CHUNKS, SPAN_THREADS = {"bfloat16": 1, "float32": 128}, 8, 256
LARGEST_STATE = 256
LARGEST_HEAD_DIM = 128
LARGE_ROWS_STATE = 128  # up to which registers hold the gradients of so many rows of q or k
WIDTH = 8  # head_dim and state are multiples of it: 16 bytes
WALK_COLUMNS = (64, 128)  # of the state, of one block
CHUNK_THREADS, SCHEDULE_THREADS, TIME_THREADS, SUM_THREADS = 256, 1024, 128, 256
MOST_PARTS = 8
SUMS_OF_A_ROUND = 1_500_000  # numbers of q and k whose sums are written and read while blocks take a head
GRID_ROWS = 65_535  # heads in a batch, and twice the packed sequences of a row
PARAMETERS = ("q_bias", "k_bias", "mimo_v", "mimo_o", "mimo_z", "D", "norm_weight")
CALL_OPTIONS = ("mimo_v", "z", "D", "state_ssm", "d_state_ssm")  # of BackwardCall, in its order
STATE = ("state_angle", "state_ssm", "state_k", "state_v")


@dataclass(frozen=True)
class BackwardConfig:
    """What changes a backward's speed and memory, but not its result beyond rounding.

    tokens: of a chunk. rows: of its tiles, 32 or 64, for its tokens times the rank rounded up to a power of two. parts:
    so many blocks share the heads of a group in a chunk, each with sums of its own for the gradients of q and k.
    walk_columns: of the state, that a block of a walk takes; 64 make more blocks, 128 prepare values for all columns at
    once. warpgroups: walks and chunks by sm_90's wgmma, for the usual sizes; rows are 64 and walk_columns is of no
    meaning then. segments: into how many pieces such walks cut each row. slices: of the batch, that
    follow each other in the same scratch.
    """

    tokens: int
    parts: int = 1
    walk_columns: int = 64
    warpgroups: bool = False
    segments: int = 1
    slices: int = 1
    rows: int = ROWS

    def __post_init__(self):
        if min(self.tokens, self.parts, self.segments, self.slices) < 1:
            raise ValueError(f"tokens, parts, segments and slices must be at least 1, got {self}.")
        if self.walk_columns not in WALK_COLUMNS:
            raise ValueError(f"walk_columns must be one of {WALK_COLUMNS}, got {self}.")
        if self.rows not in (SMALL_ROWS, ROWS):
            raise ValueError(f"rows must be {SMALL_ROWS} or {ROWS}, got {self}.")


def heuristic(problem: Problem, archs: Sequence[str] | None = None) -> BackwardConfig:
    """Whole tiles, and enough blocks for the last round of them to be full as well, if sums of parts cost less.

    archs: those to be compiled for; None for the ones of the settings or of the GPUs here.
    """
    p = problem
    archs = compile.target_archs() if archs is None else archs
    warpgroups = serves_warpgroups(p) and set(archs) == {"sm_90"}
    rows, tokens = (ROWS, ROWS // p.rank) if warpgroups else _tile(p, min(MAX_SHARED_MEMORY[arch] for arch in archs))
    chunks, group_heads, walks = pieces(p, tokens), p.heads // p.groups, 2 * p.batch * p.heads

    def rounds(parts: int, slices: int) -> float:
        blocks = p.batch // slices * chunks * p.groups
        of_chunks = slices * math.ceil(blocks * parts / MULTIPROCESSORS) * math.ceil(group_heads / parts)
        return of_chunks + (parts * p.given["q"].size / SUMS_OF_A_ROUND if parts > 1 else 0)

    def waves(slices: int) -> int:
        return slices * math.ceil(walks // slices / (2 * MULTIPROCESSORS))

    # Slices save scratch, of which there is much if chunks are short. Each must fill the multiprocessors as all do, and
    # even then two took 5 % more time than one in SISO, which has none.
    sliced = warpgroups and p.rank > 1
    divisors = (n for n in range(1, p.batch + 1) if sliced and p.batch % n == 0 and waves(n) <= waves(1))
    slices = max(divisors, default=1)
    parts = min(range(1, min(group_heads, MOST_PARTS) + 1), key=lambda n: (rounds(n, slices), n))
    if warpgroups:
        segments = max(1, min(2 * MULTIPROCESSORS // walks, chunks // SHORTEST_SEGMENT, MOST_SEGMENTS))
        return BackwardConfig(tokens, parts, warpgroups=True, segments=segments, slices=slices)
    fills = 2 * p.batch * p.heads >= MULTIPROCESSORS
    return BackwardConfig(tokens, parts, 128 if p.state > 64 and fills else 64, rows=rows)


def _tile(problem: Problem, memory: int) -> tuple[int, int]:
    """Rows and tokens of a chunk: the most that so much shared memory holds, or the least that there are."""
    p = problem
    sizes = [(ROWS, ROWS // ranks(p))] if p.state <= LARGE_ROWS_STATE else []
    sizes += [(SMALL_ROWS, SMALL_ROWS // ranks(p) // part) for part in (1, 2)]
    sizes = [(rows, min(p.chunk_size or tokens, tokens, p.seq)) for rows, tokens in sizes]
    fitting = (size for size in sizes if _chunk_shared(p, *size) <= memory)
    return next(fitting, sizes[-1])


def pieces(problem: Problem, tokens: int) -> int:
    """Pieces of so many tokens that hold a row, each within one sequence. With packing some of them are empty."""
    p = problem
    return p.seq // tokens + p.sequences if "cu_seqlens" in p.given else math.ceil(p.seq / tokens)


def serves_warpgroups(problem: Problem) -> bool:
    """Whether the kernels of sm_90 take the problem: the sizes of models, without a norm ahead of the gate."""
    p = problem
    return (
        p.dtype == "bfloat16"
        and "cu_seqlens" not in p.given
        and p.rank in WARPGROUP_RANKS
        and (p.state, p.head_dim) == (WARPGROUP_STATE, WARPGROUP_HEAD_DIM)
        and p.pairs % (8 if p.rank == 4 else 4) == 0  # which lanes share evenly
        and not p.keeps_rank
        and "norm_weight" not in p.given
        and (p.chunk_size is None or p.chunk_size * p.rank >= ROWS)
        and warpgroup_chunk_shared(p) <= MAX_SHARED_MEMORY["sm_90"]
        and p.seq * p.rank <= ROWS * WARPGROUP_CHUNKS
    )


def warpgroup_walk_shared(problem: Problem) -> int:
    """`WalkMemory` of mamba3_backward_walk.cu: rows and states twice, parameters."""
    p = problem
    weights = 2 * p.rank * p.head_dim if "mimo_v" in p.given else 0
    return 10 * 8192 + 4 * (p.rank * p.state + weights)


def warpgroup_chunk_shared(problem: Problem) -> int:
    """`ChunkMemory` of mamba3_backward_chunk.cu: inputs twice, states, products of rows with rows, tables, sums."""
    p, weighted = problem, "mimo_v" in problem.given
    tokens, turn, wide, bias = ROWS // p.rank, p.pairs + 4, p.head_dim + 8, p.state // 2 + 4
    turned = tokens * (p.pairs + (4 if p.pairs % 32 else 0)) * 4
    apart = turned <= 8192  # both sides have room for what phases get
    panels = (22 if p.rank == 4 else 18) if weighted else (20 if "z" in p.given else 18) + apart
    weights = 3 * p.rank * wide * 4 if weighted else 0
    numbers = (22 if weighted else 16) * tokens + 16
    table = tokens * turn * 4 + 3 * weighted * tokens * wide * 2 + weights + numbers * 4
    sums = (2 if apart else 1) * turned + 8 * p.rank * bias * 4
    return panels * 8192 + 2 * table + sums + 80


def schedule_shared(problem: Problem) -> int:
    """`ScheduleShare::Memory` of mamba3_backward_time.cu: angles and steps of rounds, sums of warps and blocks."""
    units, lanes = problem.pairs // 4, SCHEDULE_LANES
    even = lanes % units == 0 or units % lanes == 0
    heads = (lanes + (1 if even else 2) * (units - 1)) // units
    rounds = SCHEDULE_DEPTH * (CLUSTER_THREADS * 8 * 16 + CLUSTER_THREADS // lanes * heads * 8 * 4)
    return rounds + (CLUSTER_THREADS // 32 + 2 * TIME_BLOCKS) * lanes * 16 + 16


def time_shared(problem: Problem, span: int) -> int:
    """`SpanShare::Memory` of mamba3_backward_time.cu: angles, a state and its adjoint, sums, steps and so on."""
    p, lanes = problem, _lanes(problem)
    states = 16 if "d_state_ssm" in p.given else 4 * p.head_dim * lanes * 8
    return span * (lanes * 16 + lanes * lanes // 8 + 5 * 4) + states


def ranks(problem: Problem) -> int:
    """Rows of a tile per token: a power of two."""
    return 1 << (problem.rank - 1).bit_length()


def check_supported(problem: Problem) -> None:
    """Raises NotImplementedError for what these kernels do not do, naming the limit and the figure."""
    p = problem
    cure = "use implementation='xla'"
    if p.dtype not in VALUE:
        raise NotImplementedError(f"the backward kernels of Mamba-3 take {' and '.join(VALUE)}, got {p.dtype}; {cure}")
    for name, size, most in (("state", p.state, LARGEST_STATE), ("head_dim", p.head_dim, LARGEST_HEAD_DIM)):
        if size % WIDTH or size > most:
            raise NotImplementedError(
                f"the backward kernels of Mamba-3 take multiples of {WIDTH} up to {most} as {name}, got {size}; {cure}"
            )
    if min(p.pairs, p.seq, p.batch) < 1:
        raise NotImplementedError(
            f"the backward kernels of Mamba-3 take at least one rotated pair, token and row, got {p.pairs}, {p.seq} "
            f"and {p.batch}; {cure}"
        )
    if p.batch * p.heads > GRID_ROWS:
        raise NotImplementedError(
            f"the backward kernels of Mamba-3 take up to {GRID_ROWS:,} heads in a batch, got {p.batch * p.heads:,}; "
            f"{cure}"
        )
    if 2 * p.sequences > GRID_ROWS:
        raise NotImplementedError(
            f"the backward kernels of Mamba-3 take up to {GRID_ROWS // 2:,} packed sequences, got {p.sequences:,}; "
            f"{cure}"
        )


def backward(problem: Problem, config: BackwardConfig | None = None, archs: Sequence[str] | None = None) -> Plan:
    """All gradients of one call, of parameters one row per entry of the batch.

    archs: those to be compiled for; None for the ones of the settings or of the GPUs here.

    Raises:
      NotImplementedError: the kernels do not serve the problem, with the limit and the figure.
      ValueError: a `config` that does not divide this problem.
    """
    check_supported(problem)
    if config is not None:
        _check_config(problem, config)
    config = config or heuristic(problem, archs)
    plan = _Builder(_slice(problem, config.slices), config).plan()
    return plan if config.slices == 1 else _of_slices(problem, plan, config.slices)


def _slice(problem: Problem, slices: int) -> Problem:
    """The part of a call that has an equal part of the batch."""
    p, batch = problem, problem.batch // slices
    operands = (replace(b, shape=(batch, *b.shape[1:])) if b.shape[0] == p.batch else b for b in p.operands)
    return replace(p, batch=batch, param_rows=min(p.param_rows, batch), operands=tuple(operands))


def _of_slices(problem: Problem, plan: Plan, slices: int) -> Plan:
    """The plan of a slice for one after the other, from the same scratch."""
    whole = {b.name: b for b in problem.operands}
    whole |= {b.name: replace(b, shape=(problem.batch, *b.shape[1:])) for b in plan.results}

    def of_slice(argument: Argument, index: int) -> Argument:
        if not isinstance(argument, ArrayArg) or argument.buffer not in whole:
            return argument
        own = plan.buffers[argument.buffer]
        offset = 0 if whole[own.name].shape == own.shape else index * own.size
        return replace(argument, shape=own.shape, offset=offset)

    launches = (
        replace(launch, arguments=tuple(of_slice(argument, index) for argument in launch.arguments))
        for index in range(slices)
        for launch in plan.launches
    )
    results = tuple(whole[b.name] for b in plan.results)
    return replace(plan, operands=problem.operands, results=results, launches=tuple(launches))


def _check_config(problem: Problem, config: BackwardConfig) -> None:
    p = problem
    group_heads = p.heads // p.groups
    if config.parts > group_heads or math.ceil(group_heads / config.parts) * (config.parts - 1) >= group_heads:
        raise ValueError(
            f"BackwardConfig.parts must leave heads to each part, got {config.parts} of {group_heads} heads in a group."
        )
    if p.batch % config.slices:
        raise ValueError(f"BackwardConfig.slices must divide the batch, got {config.slices} of {p.batch}.")
    if config.warpgroups and not (serves_warpgroups(p) and config.tokens * p.rank == ROWS):
        raise ValueError(
            f"BackwardConfig.warpgroups takes a state of {WARPGROUP_STATE}, a head_dim of {WARPGROUP_HEAD_DIM} and "
            f"{ROWS} rows a chunk (see serves_warpgroups), got {p.state}, {p.head_dim} and {config.tokens * p.rank}."
        )


class _Builder:
    """Sizes, buffers and launches of one backward."""

    def __init__(self, problem: Problem, config: BackwardConfig):
        p, self.problem, self.config = problem, problem, config
        if config.rows > SMALL_ROWS and p.state > LARGE_ROWS_STATE:
            raise NotImplementedError(
                f"tiles of {config.rows} rows take a state up to {LARGE_ROWS_STATE}, got {p.state}"
            )
        if config.tokens * ranks(p) > config.rows:
            raise NotImplementedError(f"{config.tokens} tokens of {ranks(p)} rows, a tile has {config.rows}")
        self.norm = "norm_weight" in p.given
        self.chunks = pieces(p, config.tokens)
        self.segment_chunks = math.ceil(self.chunks / min(config.segments, self.chunks))
        self.segments = math.ceil(self.chunks / self.segment_chunks) if config.warpgroups else 1
        self.span = max(1, SPAN[p.dtype] // config.tokens) * config.tokens
        if config.warpgroups:  # of one block, whose threads take eight tokens each
            self.span = min(SPAN_CHUNKS * config.tokens, SPAN_THREADS // _lanes(p) * 8)
        self.summed_parts = config.parts > 1 or not config.warpgroups  # else chunks write the gradients of q and k
        self.wide_state, self.wide_head_dim = _wide(p)
        self.record = p.rank * (2 * p.state + 3 * p.head_dim) + p.head_dim + 4
        moving = [b for b in p.operands if b.name not in ("dy", "cu_seqlens") and not b.name.startswith("d_")]
        self.results = tuple(
            Buffer(f"grad_{b.name}", (p.batch, *b.shape[1:]) if b.name in PARAMETERS else b.shape, b.dtype)
            for b in moving
        )
        heads, states = (p.batch, p.heads, p.seq), (p.batch, p.heads, self.chunks, p.state, p.head_dim)
        floats: dict[str, tuple[int, ...]] = {}
        floats |= dict.fromkeys(("gamma", "f", "decay", "d_f", "d_gamma"), heads)
        self.moments = not config.warpgroups or "d_state_ssm" in p.given  # else made where they are needed
        if self.moments:
            floats["moments"] = (p.batch, p.heads, pieces(p, self.span), p.pairs)
        if p.dtype == "float32":
            floats["rest"] = heads
        if self.summed_parts:
            floats |= dict.fromkeys(("q_sums", "k_sums"), (config.parts, *p.given["q"].shape))
        if self.segments > 1:
            totals = (2, p.batch, p.heads, self.segments)
            floats |= {"totals": totals, "ends": (*totals, p.head_dim, p.state)}
        if "state_ssm" in p.given:
            floats["d_delta"] = (p.batch, p.sequences, p.heads)
            if "mimo_v" in p.given:
                floats["mimo_of_states"] = (p.batch, p.sequences, p.heads, p.rank, p.head_dim)
        values = {"states": states, "adjoints": states}
        if self.norm:
            values["normed"] = (*heads, p.rank, p.head_dim)
        self.scratch = (
            *(Buffer(name, shape, "float32") for name, shape in floats.items()),
            *(Buffer(name, shape, p.dtype) for name, shape in values.items()),
            *([Buffer("phases", (*heads, p.pairs), "uint16")] if config.warpgroups else []),
            Buffer(
                "records", (p.batch, self.chunks, p.heads, self.record), "bfloat16" if config.warpgroups else "float32"
            ),
        )
        self.present = {b.name for b in (*p.operands, *self.results, *self.scratch)}

    def plan(self) -> Plan:
        p = self.problem
        rows = p.batch * p.heads
        steps, final = ("dt", "trap"), ("d_state_angle", "d_state_k", "d_state_v")
        schedule = ("angles", "adt", *steps, "state_angle", "cu_seqlens", "gamma", "f", "decay", "rest", "grad_angles")
        arrays, weights = ("q", "k", "v", "z", "dy"), ("q_bias", "k_bias", "mimo_v", "mimo_o", "mimo_z")
        inputs = (*arrays, "normed", *weights)
        walk = (*inputs, "f", "decay", "rest", "grad_angles", *steps, *STATE[1:], "d_state_ssm", "cu_seqlens")
        walked = ("states", "adjoints")
        walk += (*walked, "grad_state_ssm")
        chunk = (*inputs, "D", "gamma", "f", "decay", "rest", *walked, *final, "cu_seqlens")
        chunk += ("grad_angles", "grad_adt", "d_f", "d_gamma", "grad_v", "grad_z", "q_sums", "k_sums", "records")
        normalize = (*arrays, *weights, "D", "norm_weight", "gamma", "f", "decay", "rest", "grad_angles", "states")
        normalize += ("cu_seqlens", "normed", "grad_z", "records")
        state = (*steps, "mimo_v", "state_k", "state_v", "grad_state_ssm", *final, "cu_seqlens", "grad_state_angle")
        state += ("grad_state_k", "grad_state_v", "mimo_of_states", "d_delta")
        parameters = ("q_bias", "k_bias", "mimo_v", "mimo_o", "mimo_z", "norm_weight", "D")
        parameter_gradients = tuple(f"grad_{name}" for name in parameters)
        time = ("angles", *steps, "d_f", "d_gamma", *(walked if self.config.warpgroups else ()), "moments", "d_delta")
        time += ("cu_seqlens", "grad_angles", "grad_dt", "grad_trap", "grad_state_angle")
        blocks = p.batch * self.chunks * p.groups * self.config.parts
        spans = rows * pieces(p, self.span)
        return Plan(
            "mamba3_backward",
            p.operands,
            self.results,
            self.scratch,
            (
                *(
                    self.warpgroup_launches(schedule, walk, chunk)
                    if self.config.warpgroups
                    else [
                        self.launch("schedule", (rows * p.sequences, 1, 1), SCHEDULE_THREADS, schedule),
                        *self.walks(walk, normalize),
                        self.launch(
                            "chunk",
                            (blocks, 1, 1),
                            CHUNK_THREADS,
                            chunk,
                            _chunk_shared(p, self.config.rows, self.config.tokens),
                        ),
                    ]
                ),
                *(
                    [self.sums("group_sums", (p.given["q"].size // WIDTH, 2), ("q_sums", "k_sums", "grad_q", "grad_k"))]
                    if self.summed_parts
                    else []
                ),
                *(
                    [self.launch("state_gradients", (rows * p.sequences, 1, 1), SUM_THREADS, state)]
                    if "state_ssm" in p.given
                    else []
                ),
                *(
                    [self.sums("moments", (spans * p.pairs, 1), (*walked, "grad_angles", "cu_seqlens", "moments"))]
                    if self.moments
                    else []
                ),
                *(
                    [self.warpgroup_time((*time, "records", "mimo_of_states", *parameter_gradients))]
                    if self.config.warpgroups
                    else [
                        self.sums(
                            "parameter_sums",
                            (p.heads * self.record // 2, p.batch),
                            ("records", *parameter_gradients, "mimo_of_states"),
                        ),
                        self.launch(
                            "time_gradients", (math.ceil(spans / (TIME_THREADS // 32)), 1, 1), TIME_THREADS, time
                        ),
                    ]
                ),
            ),
        )

    def walks(self, walk: tuple[str, ...], normalize: tuple[str, ...]) -> list[Launch]:
        """Both directions at once, unless a norm needs the states for the adjoints of what it was given."""
        p = self.problem
        columns = self.config.walk_columns
        grid = (math.ceil(p.state / columns), p.batch * p.heads)

        def directions(first: int, count: int) -> Launch:
            scalar = (ScalarArg(first, "int32"),)
            return self.launch(
                "walk", (*grid, count * p.sequences), 4 * columns, walk, self.walk_shared(), scalars=scalar
            )

        if not self.norm:
            return [directions(0, 2)]
        grid_normalize, shared = (self.chunks, p.batch * p.heads, 1), self.normalize_shared()
        ahead = self.launch("normalize", grid_normalize, 4 * self.config.rows, normalize, shared)
        return [directions(0, 1), ahead, directions(1, 1)]

    def warpgroup_launches(
        self, schedule: tuple[str, ...], walk: tuple[str, ...], chunk: tuple[str, ...]
    ) -> list[Launch]:
        """Walks, first to the ends of segments if there are more than one, and chunks, by the kernels of sm_90."""
        p, rows, launch = self.problem, self.problem.batch * self.problem.heads, self.warpgroup_launch
        segments = (self.segments, self.segment_chunks)

        def own(names: tuple[str, ...], *without: str) -> tuple[str, ...]:
            """Instead of rests, of which they have none, they take phases from an array of their own."""
            without = ("normed", "cu_seqlens", *without)
            return tuple("phases" if name == "rest" else name for name in names if name not in without)

        schedule, walk, chunk = own(schedule, "grad_angles"), own(walk, "grad_angles"), own(chunk)
        walk += ("ends", "totals")

        def walks(ends_only: str) -> Launch:
            grid, shared = (rows, self.segments, 2), warpgroup_walk_shared(p)
            return launch(WALK_FILE, f"walk{ends_only}", grid, WALK_TEAM, walk, shared, segments)

        launches = [walks(", true")] * (self.segments > 1) + [walks(", false")]
        blocks = p.batch * self.chunks * p.groups * self.config.parts
        chunk = (*chunk[: chunk.index("q_sums")], "grad_q", "grad_k", *chunk[chunk.index("q_sums") :])
        shared, parts = warpgroup_chunk_shared(p), (self.config.parts,)
        return [
            self.warpgroup_schedule(schedule),
            *launches,
            launch(CHUNK_FILE, "chunk", (blocks, 1, 1), CHUNK_TEAMS, chunk, shared, parts),
        ]

    def warpgroup_schedule(self, arrays: tuple[str, ...]) -> Launch:
        """Clusters take columns of a row of the batch, four of each lane. The largest that fit at once, two blocks on a
        multiprocessor; eight only where each block has one for itself, since of large clusters fewer fit than slots."""
        p, slots = self.problem, 2 * MULTIPROCESSORS
        groups = p.batch * math.ceil(p.heads * p.pairs / (4 * SCHEDULE_LANES))
        most = {TIME_BLOCKS: slots // 2, 4: slots, 2: slots}  # blocks at once, by the size of their clusters
        blocks = next((size for size, fit in most.items() if size * groups <= fit), 1)
        rounds = math.ceil(groups / (slots // blocks))
        grid, shared = (blocks, math.ceil(groups / rounds), 1), schedule_shared(p)
        name = f"schedule, {SCHEDULE_LANES}"
        return self.warpgroup_launch(TIME_FILE, name, grid, CLUSTER_THREADS, arrays, shared, cluster=blocks)

    def warpgroup_time(self, time: tuple[str, ...]) -> Launch:
        """A block a span of a head, after those that sum up parameters."""
        p, threads = self.problem, self.span // 8 * _lanes(self.problem)
        sums = p.batch * math.ceil(p.heads * self.record // 2 / threads)
        grid = (sums + p.batch * p.heads * math.ceil(p.seq / self.span), 1, 1)
        arrays = tuple(name for name in time if name not in ("cu_seqlens", "grad_norm_weight"))
        return self.warpgroup_launch(TIME_FILE, f"time, {self.span}", grid, threads, arrays, time_shared(p, self.span))

    def warpgroup_launch(
        self, file: str, name: str, grid: tuple[int, int, int], threads: int, arrays: tuple[str, ...], shared: int = 0,
        numbers: tuple[int, ...] = (), cluster: int = 0
    ) -> Launch:  # fmt: skip
        """name: the kernel's, with what follows the call among its template arguments. Absent arrays are never touched;
        any other stands in for them."""
        p, given = self.problem, self.problem.given
        options = (p.rotary == "half", p.param_rows == 1, *(option in given for option in CALL_OPTIONS))
        call = ", ".join([*map(str, (p.heads, p.groups, p.rank, p.pairs)), *(str(o).lower() for o in options)])
        kernel, _, more = name.partition(",")
        expression = (
            f"jax_ssd::mamba3_backward_{kernel}<jax_ssd::BackwardCall<{call}>{', ' * bool(more)}{more.strip()}>"
        )
        arguments = (ArrayArg(array if array in self.present else "dt") for array in arrays)
        scalars = (ScalarArg(number, "int32") for number in (p.batch, p.seq, *numbers))
        source = CudaKernel(file, expression, arch_specific=True, archs=("sm_90",))
        clusters = (cluster, 1, 1) if cluster else None
        return Launch(source, grid, (*arguments, *scalars), (threads, 1, 1), shared, clusters, pdl=not cluster)

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, arrays: tuple[str, ...], shared: int = 0,
        scalars: tuple[ScalarArg, ...] = ()
    ) -> Launch:  # fmt: skip
        """Absent arrays are never touched; any other stands in for them."""
        arguments = tuple(ArrayArg(array if array in self.present else "dt") for array in arrays)
        kernel = CudaKernel(FILE, f"mamba3_{name}<{threads}>", self.options())
        pdl = self.config.warpgroups
        return Launch(kernel, grid, (*arguments, *scalars), (threads, 1, 1), shared, pdl=pdl)

    def sums(self, name: str, count: tuple[int, int], arrays: tuple[str, ...]) -> Launch:
        """A thread for each of so many sums, in rows of blocks."""
        grid = (math.ceil(count[0] / SUM_THREADS), count[1], 1)
        return self.launch(name, grid, SUM_THREADS, arrays)

    def options(self) -> tuple[str, ...]:
        p, given = self.problem, self.problem.given
        sizes = {
            "BATCH": p.batch,
            "SEQ": p.seq,
            "HEADS": p.heads,
            "GROUPS": p.groups,
            "RANK": p.rank,
            "RANKS": ranks(p),
            "STATE": p.state,
            "HEAD_DIM": p.head_dim,
            "PAIRS": p.pairs,
            "ROWS": self.config.rows,
            "TOKENS": self.config.tokens,
            "SPAN": self.span,
            "SEQUENCES": p.sequences,
            "PACKED": "cu_seqlens" in given,
            "PARTS": self.config.parts,
            "SHARED_PARAMS": p.param_rows == 1,
            "HALF_ROTARY": p.rotary == "half",
            "SISO": "mimo_v" not in given,
            "KEEPS_RANK": p.keeps_rank,
            "HAS_GATE": "z" in given,
            "HAS_SKIP": "D" in given,
            "HAS_NORM": "norm_weight" in given,
            "HAS_STATE": "state_ssm" in given,
            "HAS_FINAL": "d_state_ssm" in given,
            "PANELS": self.config.warpgroups,
            "PASSES": 3 if p.dtype == "float32" and p.precision == "highest" else 1,
            "WALK_COLUMNS": self.config.walk_columns,
            "CHUNK_SHARED": _chunk_shared(p, self.config.rows, self.config.tokens),
            "WALK_SHARED": self.walk_shared(),
            "NORMALIZE_SHARED": self.normalize_shared(),
        }
        more = (f"-DVALUE={VALUE[p.dtype]}", f"-DNORM_EPS={p.norm_eps!r}f")
        return (*(f"-D{name}={int(value)}" for name, value in sizes.items()), *more)

    def walk_shared(self) -> int:
        """Two buffers of a chunk's rows, and the parameters of all ranks."""
        columns, size = self.config.walk_columns, jnp.dtype(self.problem.dtype).itemsize
        rows = 2 * self.config.rows * (columns + 8 + self.wide_head_dim + 8) * size
        return rows + ranks(self.problem) * (2 * columns + 3 * self.wide_head_dim) * 4

    def normalize_shared(self) -> int:
        """Rows of q, k and v, a state, products of rows with rows, phases, and slots of sums."""
        p, rows = self.problem, self.config.rows
        state, head_dim, product = (_pitch(p, size) for size in (self.wide_state, self.wide_head_dim, rows))
        tiles = rows * (2 * state + head_dim + product) + self.wide_state * head_dim
        sums = 12 * rows + rows // SMALL_ROWS * (2 * ranks(p) + 1) * self.wide_head_dim
        return tiles + 8 * self.config.tokens * p.pairs + 4 * sums


def _chunk_shared(problem: Problem, rows: int, tokens: int) -> int:
    """Rows of q, k, v and dO, both states, both products of rows with rows, phases, and slots of sums."""
    p = problem
    wide_state, wide_head_dim = _wide(p)
    state, head_dim, product = (_pitch(p, size) for size in (wide_state, wide_head_dim, rows))
    tiles = 2 * rows * (state + head_dim + product) + 2 * wide_state * head_dim
    phases = 8 * tokens * p.pairs
    # In float32 what the phases get lies where the products were, if it fits there.
    tables = phases if p.dtype == "float32" and phases <= 2 * rows * product else 2 * phases
    slots = 34 * rows + 24 + (3 * rows // SMALL_ROWS * ranks(p) * wide_head_dim if "mimo_v" in p.given else 0)
    return tiles + tables + 4 * slots


def _lanes(problem: Problem) -> int:
    """Lanes of a warp that share a token's pairs along time, four pairs each."""
    return 8 if problem.pairs <= 32 else 16


def _wide(problem: Problem) -> tuple[int, int]:
    """State and head_dim of tiles."""
    return _multiple(problem.state, 64), _multiple(problem.head_dim, 32)


def _pitch(problem: Problem, columns: int) -> int:
    """Bytes from one row of a tile to the next."""
    return columns * jnp.dtype(problem.dtype).itemsize + 16


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of
