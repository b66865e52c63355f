"""Which kernels run the backward of a Mamba-3 scan, on which grid, with which scratch.

States before each chunk and adjoints of the states after it are recomputed by walks over the chunks; one kernel makes
everything that a chunk gives, from both; the rest are sums over chunks, groups and time in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax_ssd import compile
from jax_ssd.mamba3.problem import Problem
from jax_ssd.plans import MAX_SHARED_MEMORY, MULTIPROCESSORS, Argument, ArrayArg, Buffer, Launch, Plan, ScalarArg
from jax_ssd.specs import CudaKernel

FILE = "mamba3_backward.cu"
# By warpgroups, of sm_90.
WALK_FILE, CHUNK_FILE, TIME_FILE = "mamba3_backward_walk.cu", "mamba3_backward_chunk.cu", "mamba3_backward_time.cu"
WARPGROUP_RANKS, WARPGROUP_STATE, WARPGROUP_HEAD_DIM = (1, 2, 4), 128, 64
WALK_TEAM, CHUNK_TEAMS, STARTS_THREADS, CLUSTER_THREADS = 256, 512, 256, 256
TIME_BLOCKS = 8  # of a cluster that takes a head along time
SHORTEST_SEGMENT, MOST_SEGMENTS = 8, 64  # chunks; a segment costs one more pass over its rows
ROWS = 64  # of a tile: tokens x ranks of a chunk
LARGEST_STATE = 128
LARGEST_HEAD_DIM = 128
WIDTH = 8  # head_dim and state are multiples of it: 16 bytes
WALK_COLUMNS = (64, 128)  # of the state, of one block
CHUNK_THREADS, NORMALIZE_THREADS, TIME_THREADS, SUM_THREADS = 256, 256, 1024, 256
MOST_PARTS = 8
SUMS_OF_A_ROUND = 1_500_000  # numbers of q and k whose sums are written and read while blocks take a head
GRID_ROWS = 65_535
PARAMETERS = ("q_bias", "k_bias", "mimo_v", "mimo_o", "mimo_z", "D", "norm_weight")
CALL_OPTIONS = ("mimo_v", "z", "D", "state_ssm", "d_state_ssm")  # of BackwardCall, in its order
STATE = ("state_angle", "state_ssm", "state_k", "state_v")


@dataclass(frozen=True)
class BackwardConfig:
    """What changes a backward's speed and memory, but not its result beyond rounding.

    tokens: of a chunk; with the rank rounded up to a power of two, at most 64 rows. parts: so many blocks share the
    heads of a group in a chunk, each with sums of its own for the gradients of q and k. walk_columns: of the state,
    that a block of a walk takes; 64 make more blocks, 128 prepare values for all columns at once. warpgroups: walks
    and chunks by sm_90's wgmma, for the usual sizes; walk_columns is of no meaning then. segments: into how many pieces
    such walks cut each row. slices: of the batch, that follow each other in the same scratch.
    """

    tokens: int
    parts: int = 1
    walk_columns: int = 64
    warpgroups: bool = False
    segments: int = 1
    slices: int = 1

    def __post_init__(self):
        if min(self.tokens, self.parts, self.segments, self.slices) < 1:
            raise ValueError(f"tokens, parts, segments and slices must be at least 1, got {self}.")
        if self.walk_columns not in WALK_COLUMNS:
            raise ValueError(f"walk_columns must be one of {WALK_COLUMNS}, got {self}.")


def heuristic(problem: Problem, archs: Sequence[str] | None = None) -> BackwardConfig:
    """Whole tiles, and enough blocks for the last round of them to be full as well, if sums of parts cost less.

    archs: those to be compiled for; None for the ones of the settings or of the GPUs here.
    """
    p = problem
    warpgroups = serves_warpgroups(p) and set(compile.target_archs() if archs is None else archs) == {"sm_90"}
    tokens = ROWS // p.rank if warpgroups else min(p.chunk_size or ROWS, ROWS // ranks(p), p.seq)
    chunks, group_heads, walks = math.ceil(p.seq / tokens), p.heads // p.groups, 2 * p.batch * p.heads

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
    return BackwardConfig(tokens, parts, 128 if p.state > 64 and fills else 64)


def serves_warpgroups(problem: Problem) -> bool:
    """Whether the kernels of sm_90 take the problem: the sizes of models, without a norm ahead of the gate."""
    p = problem
    return (
        p.rank in WARPGROUP_RANKS
        and (p.state, p.head_dim) == (WARPGROUP_STATE, WARPGROUP_HEAD_DIM)
        and p.pairs % 4 == 0
        and not p.keeps_rank
        and "norm_weight" not in p.given
        and (p.chunk_size is None or p.chunk_size * p.rank >= ROWS)
        and warpgroup_chunk_shared(p) <= MAX_SHARED_MEMORY["sm_90"]
    )


def warpgroup_walk_shared(problem: Problem) -> int:
    """`WalkMemory` of mamba3_backward_walk.cu: rows and states twice, parameters."""
    p = problem
    weights = 2 * p.rank * p.head_dim if "mimo_v" in p.given else 0
    return 10 * 8192 + 4 * (p.rank * p.state + weights)


def warpgroup_chunk_shared(problem: Problem) -> int:
    """`ChunkMemory` of mamba3_backward_chunk.cu: inputs twice, states, products of rows with rows, tables, sums."""
    p, weighted = problem, "mimo_v" in problem.given
    tokens, turn, wide, bias = ROWS // p.rank, p.pairs + 4, p.head_dim + 8, p.state + 8
    kinds = 3 if weighted else 2 if "z" in p.given else 0
    weights = 3 * p.rank * wide * 4 if weighted else 0
    table = tokens * turn * 4 + kinds * tokens * wide * 2 + weights + (14 * ROWS + 8) * 4
    sums = 2 * tokens * (p.pairs + (4 if p.pairs % 32 else 0)) * 4 + 8 * p.rank * bias * 4 + 4 * weights
    return 18 * 8192 + 2 * table + sums + 96


def ranks(problem: Problem) -> int:
    """Rows of a tile per token: a power of two."""
    return 1 << (problem.rank - 1).bit_length()


def check_supported(problem: Problem) -> None:
    """Raises NotImplementedError for what these kernels do not do, naming the limit and the figure."""
    p = problem
    cure = "use implementation='xla'"
    if p.dtype != "bfloat16":
        raise NotImplementedError(f"the backward kernels of Mamba-3 take bfloat16, got {p.dtype}; {cure}")
    if "cu_seqlens" in p.given:
        raise NotImplementedError(f"the backward kernels of Mamba-3 take no packed sequences (cu_seqlens); {cure}")
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
        if config.tokens * ranks(p) > ROWS:
            raise NotImplementedError(f"{config.tokens} tokens of {ranks(p)} rows, a tile has {ROWS}")
        self.norm = "norm_weight" in p.given
        self.chunks = math.ceil(p.seq / config.tokens)
        self.segment_chunks = math.ceil(self.chunks / min(config.segments, self.chunks))
        self.segments = math.ceil(self.chunks / self.segment_chunks) if config.warpgroups else 1
        self.summed_parts = config.parts > 1 or not config.warpgroups  # else chunks write the gradients of q and k
        self.wide_state, self.wide_head_dim = _multiple(p.state, 64), _multiple(p.head_dim, 32)
        self.record = p.rank * (2 * p.state + 3 * p.head_dim) + p.head_dim + 4
        moving = [b for b in p.operands if b.name not in ("dy", "cu_seqlens") and not b.name.startswith("d_")]
        self.results = tuple(
            Buffer(f"grad_{b.name}", (p.batch, *b.shape[1:]) if b.name in PARAMETERS else b.shape, b.dtype)
            for b in moving
        )
        heads, states = (p.batch, p.heads, p.seq), (p.batch, p.heads, self.chunks, p.state, p.head_dim)
        self.scratch = (
            *(Buffer(name, heads, "float32") for name in ("gamma", "f", "decay", "d_f", "d_gamma")),
            Buffer("states", states, "bfloat16"),
            Buffer("adjoints", states, "bfloat16"),
            *(
                Buffer(name, (config.parts, *p.given["q"].shape), "float32")
                for name in (("q_sums", "k_sums") if self.summed_parts else ())
            ),
            *([Buffer("normed", (*heads, p.rank, p.head_dim), "bfloat16")] if self.norm else []),
            *(
                [Buffer("ends", (2, p.batch, p.heads, self.segments, p.head_dim, p.state), "float32")]
                if self.segments > 1
                else []
            ),
            Buffer(
                "records", (p.batch, self.chunks, p.heads, self.record), "bfloat16" if config.warpgroups else "float32"
            ),
        )
        self.present = {b.name for b in (*p.operands, *self.results, *self.scratch)}

    def plan(self) -> Plan:
        p = self.problem
        rows = p.batch * p.heads
        steps = ("dt", "trap")
        schedule = ("angles", "adt", *steps, "state_angle", "gamma", "f", "decay", "grad_angles")
        arrays, weights = ("q", "k", "v", "z", "dy"), ("q_bias", "k_bias", "mimo_v", "mimo_o", "mimo_z")
        inputs = (*arrays, "normed", *weights)
        walk = (*inputs, "f", "decay", "grad_angles", *steps, *STATE[1:], "d_state_ssm", "states", "adjoints")
        chunk = (*inputs, "D", "gamma", "f", "decay", "states", "adjoints", "d_state_angle", "d_state_k", "d_state_v")
        chunk += ("grad_angles", "grad_adt", "d_f", "d_gamma", "grad_v", "grad_z", "q_sums", "k_sums", "records")
        normalize = ("D", "norm_weight", "gamma", "f", "decay", "grad_angles", "states", "normed", "grad_z", "records")
        parameters = ("q_bias", "k_bias", "mimo_v", "mimo_o", "mimo_z", "norm_weight", "D")
        time = ("angles", *steps, "d_f", "d_gamma", "grad_angles", "grad_dt", "grad_trap", "grad_state_angle")
        blocks = p.batch * self.chunks * p.groups * self.config.parts
        grid_sums = (math.ceil(p.given["q"].size / WIDTH / SUM_THREADS), 2, 1)
        group_sums = self.launch("group_sums", grid_sums, SUM_THREADS, ("q_sums", "k_sums", "grad_q", "grad_k"))
        launches = [
            *(
                self.warpgroup_launches(schedule, walk, chunk)
                if self.config.warpgroups
                else [
                    self.launch("schedule", (rows, 1, 1), TIME_THREADS, schedule),
                    *self.walks((*walk, "grad_state_ssm"), (*arrays, *weights, *normalize)),
                    self.launch("chunk", (blocks, 1, 1), CHUNK_THREADS, chunk, self.chunk_shared()),
                ]
            ),
            *([group_sums] if self.summed_parts else []),
            self.launch(
                "parameter_sums",
                (math.ceil(p.heads * self.record / 2 / SUM_THREADS), p.batch, 1),
                SUM_THREADS,
                ("records", *(f"grad_{name}" for name in parameters)),
                template=(", __nv_bfloat16" if self.config.warpgroups else ", float"),
            ),
            self.warpgroup_launch(TIME_FILE, "time", (TIME_BLOCKS, rows, 1), CLUSTER_THREADS, time, clustered=True)
            if self.config.warpgroups
            else self.launch("time_gradients", (rows, 1, 1), TIME_THREADS, time),
        ]
        if "state_ssm" in p.given:
            state = (*steps, "mimo_v", "state_k", "state_v", "grad_state_ssm", "grad_state_k", "grad_state_v")
            state += ("grad_mimo_v", "grad_dt", "grad_trap")
            launches.append(self.launch("state_gradients", (rows, 1, 1), SUM_THREADS, state))
        return Plan("mamba3_backward", p.operands, self.results, self.scratch, tuple(launches))

    def walks(self, walk: tuple[str, ...], normalize: tuple[str, ...]) -> list[Launch]:
        """Both directions at once, unless a norm needs the states for the adjoints of what it was given."""
        p = self.problem
        columns = self.config.walk_columns
        grid = (math.ceil(p.state / columns), p.batch * p.heads)

        def directions(first: int, count: int) -> Launch:
            scalar = (ScalarArg(first, "int32"),)
            return self.launch("walk", (*grid, count), 4 * columns, walk, self.walk_shared(), scalar)

        if not self.norm:
            return [directions(0, 2)]
        grid_normalize, shared = (self.chunks, p.batch * p.heads, 1), self.normalize_shared()
        ahead = self.launch("normalize", grid_normalize, NORMALIZE_THREADS, normalize, shared)
        return [directions(0, 1), ahead, directions(1, 1)]

    def warpgroup_launches(
        self, schedule: tuple[str, ...], walk: tuple[str, ...], chunk: tuple[str, ...]
    ) -> list[Launch]:
        """Walks, first to the ends of segments if there are more than one, and chunks, by the kernels of sm_90."""
        p, rows, launch = self.problem, self.problem.batch * self.problem.heads, self.warpgroup_launch
        segments = (self.segments, self.segment_chunks)
        walk = (*(name for name in walk if name != "normed"), "grad_state_ssm", "ends")
        starts = ("decay", "mimo_v", "dt", "trap", *STATE[1:], "d_state_ssm", "ends")

        def walks(ends_only: str) -> Launch:
            grid, shared = (rows, self.segments, 2), warpgroup_walk_shared(p)
            return launch(WALK_FILE, f"walk{ends_only}", grid, WALK_TEAM, walk, shared, segments)

        launches = [walks(", false")]
        if self.segments > 1:
            grid = (p.state * p.head_dim // STARTS_THREADS, rows, 2)
            between = launch(WALK_FILE, "starts", grid, STARTS_THREADS, starts, 0, segments)
            launches = [walks(", true"), between, *launches]
        blocks = p.batch * self.chunks * p.groups * self.config.parts
        chunk = tuple(name for name in chunk if name != "normed")
        chunk = (*chunk[: chunk.index("q_sums")], "grad_q", "grad_k", *chunk[chunk.index("q_sums") :])
        shared, parts = warpgroup_chunk_shared(p), (self.config.parts,)
        return [
            launch(TIME_FILE, "schedule", (TIME_BLOCKS, rows, 1), CLUSTER_THREADS, schedule, clustered=True),
            *launches,
            launch(CHUNK_FILE, "chunk", (blocks, 1, 1), CHUNK_TEAMS, chunk, shared, parts),
        ]

    def warpgroup_launch(
        self, file: str, name: str, grid: tuple[int, int, int], threads: int, arrays: tuple[str, ...], shared: int = 0,
        numbers: tuple[int, ...] = (), clustered: bool = False
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
        cluster = (TIME_BLOCKS, 1, 1) if clustered else None
        source = CudaKernel(file, expression, arch_specific=True, archs=("sm_90",))
        pdl = name != "schedule"
        return Launch(source, grid, (*arguments, *scalars), (threads, 1, 1), shared, cluster, pdl)

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, arrays: tuple[str, ...], shared: int = 0,
        scalars: tuple[ScalarArg, ...] = (), template: str = ""
    ) -> Launch:  # fmt: skip
        """Absent arrays are never touched; any other stands in for them."""
        arguments = tuple(ArrayArg(array if array in self.present else "dt") for array in arrays)
        kernel = CudaKernel(FILE, f"mamba3_{name}<{threads}{template}>", self.options())
        pdl = self.config.warpgroups
        return Launch(kernel, grid, (*arguments, *scalars), (threads, 1, 1), shared, pdl=pdl)

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
            "TOKENS": self.config.tokens,
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
            "WALK_COLUMNS": self.config.walk_columns,
            "CHUNK_SHARED": self.chunk_shared(),
            "WALK_SHARED": self.walk_shared(),
            "NORMALIZE_SHARED": self.normalize_shared(),
        }
        return (*(f"-D{name}={int(value)}" for name, value in sizes.items()), f"-DNORM_EPS={p.norm_eps!r}f")

    def walk_shared(self) -> int:
        """Two buffers of a chunk's rows, and the parameters of all ranks."""
        columns = self.config.walk_columns
        rows = 2 * ROWS * (columns + 8 + self.wide_head_dim + 8) * 2
        return rows + ranks(self.problem) * (2 * columns + 3 * self.wide_head_dim) * 4

    def chunk_shared(self) -> int:
        """Rows of q, k, v and dO, both states, both products of rows with rows, phases, and slots of sums."""
        state, head_dim = self.wide_state, self.wide_head_dim
        tiles = 2 * ROWS * (state + 8 + head_dim + 8) + 2 * state * (head_dim + 8) + 2 * ROWS * (ROWS + 8)
        tables = 4 * self.config.tokens * self.problem.pairs
        slots = 32 * ROWS + 24 + (6 * ranks(self.problem) * head_dim if "mimo_v" in self.problem.given else 0)
        return 2 * tiles + 4 * (tables + slots)

    def normalize_shared(self) -> int:
        """Rows of q, k and v, a state, products of rows with rows, phases, and slots of sums."""
        state, head_dim = self.wide_state, self.wide_head_dim
        tiles = ROWS * (2 * (state + 8) + head_dim + 8) + state * (head_dim + 8) + ROWS * (ROWS + 8)
        sums = 11 * ROWS + 2 * (2 * ranks(self.problem) + 1) * head_dim
        return 2 * tiles + 8 * self.config.tokens * self.problem.pairs + 4 * sums


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of
