"""The CUDA C++ kernels of the backward of a Mamba-2 scan: what they take, in which pieces, in which order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jax_ssd.mamba2 import plan, plan_backward
from jax_ssd.mamba2.plan import scan_operands
from jax_ssd.mamba2.problem import Problem
from jax_ssd.plans import (
    MAX_CLUSTER,
    MULTIPROCESSORS,
    Argument,
    ArrayArg,
    Buffer,
    Launch,
    Plan,
    ScalarArg,
    TensorMapArg,
)
from jax_ssd.specs import CudaKernel

CUDA_TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half"}
DT_TYPES = {**CUDA_TYPES, "float32": "float"}
LARGEST_STATE = 512
FILE = "mamba2_backward.cu"
CHUNK_FILE = "mamba2_chunk_gradients.cu"
LARGE_FILE = "mamba2_large_states.cu"

# As in the kernels.
CHUNK = 128
STRIP = 16  # tokens of a warp
WIDTH = 64  # channels of a piece of a head
TILE = 8192  # bytes of a copied tile
STAGES = 3
MOST_STAGES = 6  # of a walk that has a multiprocessor for itself
PAIR_TILES = 36
PAIR_THREADS = 320
STATE_THREADS = 640
MOST_COLUMNS = 128  # of a state, in one block
HEAD_TILE = 32
THREADS = 256
PAIR_MEMORY = 8 * TILE + PAIR_TILES * (1024 + 512) + (6 * CHUNK + 2 * WIDTH + 8 * WIDTH) * 4

FEWEST_THREAD_BLOCKS = MULTIPROCESSORS // 2  # calls with fewer are left to the cuTile kernels, if those take them
SHORTEST_SEQ = 64  # shorter rows leave more than half of a chunk empty, which takes as long as a full one
SHORT_ROWS = (16, 32, 64)  # tokens of rows that can share a chunk
SHORTEST_SEGMENT = 4  # chunks
MOST_SEGMENTS = 64
SCRATCH_SHARE = 0.48  # of the arrays of a training step, y among them: so much memory the backward may take besides
SMALL_SCRATCH = 64 << 20  # bytes
MOST_TURNS = 16

# As measured on an H200 with a state size of 128, in us.
HEAD_TIME = 5.0  # of a chunk of a head
HEAD_OVERHEAD = 2  # a block's first and last steps take about as long as so many heads
WALK_STEP = 2.0  # of a chunk of a walk, if the memory does not limit it
WALK_BYTES = 3.3e6  # that all walks together move in one
LAUNCH_TIME = 3.0  # of each kernel, besides
# Blocks that run at the same time, by the size of their clusters: 32 clusters of four took two turns.
TOGETHER = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS, 3: 126, 4: 120, 5: 110, 6: 120, 7: 112, 8: 112}


@dataclass(frozen=True)
class BackwardBlocks:
    """The choices behind a plan that change its speed and memory, but not its result beyond rounding.

    segments: pieces of a row that are walked at the same time. row_slices: the rows are taken in so many turns, which
    share the memory for chunk states. head_blocks: so many blocks, a cluster, share the heads of a group.
    """

    segments: int = 1
    row_slices: int = 1
    head_blocks: int = 1

    def __post_init__(self):
        for name in ("segments", "row_slices", "head_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"BackwardBlocks.{name} must be at least 1, got {getattr(self, name)}.")
        if self.segments > MOST_SEGMENTS:
            raise ValueError(f"BackwardBlocks.segments must be at most {MOST_SEGMENTS}, got {self.segments}.")


def backward_blocks(problem: Problem) -> BackwardBlocks:
    """The heuristic: blocks that leave the least of the GPU idle, of those whose scratch is within its share."""
    p = problem
    one = _Backward(p, BackwardBlocks())
    arrays, y = (sum(b.nbytes for b in some) for some in ((*one.operands(), *one.results()), one.operands()[:1]))
    allowed = SCRATCH_SHARE * (arrays + y)
    # What is little more comes where y was: few programs still need it then.
    allowed = max(allowed, min(allowed + y, SMALL_SCRATCH))
    most = most_pieces(p)
    segments = range(1, max(1, min(most["segments"] // SHORTEST_SEGMENT, MOST_SEGMENTS)) + 1)
    candidates = []
    for turns in range(1, min(most["row_slices"], MOST_TURNS) + 1):
        slices = math.ceil(most["row_slices"] / math.ceil(most["row_slices"] / turns))
        parts = [_Backward(p, BackwardBlocks(1, slices, n)) for n in range(1, most["head_blocks"] + 1)]
        best = min(parts, key=_Backward.time).config
        candidates += [_Backward(p, replace(best, segments=n)) for n in segments]
    return min(candidates, key=lambda it: (max(it.scratch_bytes(), allowed), it.time(), it.config.row_slices)).config


def _walk_heads(problem: Problem, walks: int) -> int:
    """Units that walk together because they read the same B and C, where there are so many walks in all.

    A multiprocessor has registers for four walks, or for five of one block.
    """
    units = problem.heads * problem.head_dim // WIDTH // problem.groups
    if units % 5 == 0 and math.ceil(walks / (5 * MULTIPROCESSORS)) < math.ceil(walks / (4 * MULTIPROCESSORS)):
        return 5
    return 1 if units % 2 else 2


def _columns(problem: Problem) -> int:
    """Columns of the state that a block walks, or whose dB and dC it has in registers."""
    return MOST_COLUMNS if problem.state % MOST_COLUMNS == 0 else MOST_COLUMNS // 2


def cutile_takes(problem: Problem) -> bool:
    """Whether small calls have other kernels to go to."""
    return problem.state <= plan.LARGEST_STATE and problem.head_dim <= plan_backward.LARGEST_HEAD_DIM


def shared_row(problem: Problem) -> int:
    """Tokens of the rows that share a chunk, if they begin with no state and nobody asks for one; else a chunk's."""
    p = problem
    alone = p.has_initial_state or p.has_dfinal or p.param_rows > 1 or p.state > MOST_COLUMNS
    return p.seq if p.seq in SHORT_ROWS and not alone else CHUNK


def check_supported(problem: Problem) -> None:
    """Raises NotImplementedError for what the kernels do not do, naming the limit and the figure."""
    p = problem
    refusals = (
        # Products of x with steps, and states, would leave the range of float16.
        (p.dtype != "bfloat16", f"x in bfloat16, got {p.dtype}"),
        (p.dt_dtype not in DT_TYPES, f"dt in {', '.join(DT_TYPES)}, got {p.dt_dtype}"),
        (p.head_dim % WIDTH, f"a head_dim that is a multiple of {WIDTH}, got {p.head_dim}"),
        (
            p.state % WIDTH or p.state > LARGEST_STATE,
            f"a state size that is a multiple of {WIDTH} up to {LARGEST_STATE}, got {p.state}",
        ),
        (
            p.seq < SHORTEST_SEQ and shared_row(p) == CHUNK and cutile_takes(p),
            f"rows of {SHORTEST_SEQ} tokens or more, or of {', '.join(map(str, SHORT_ROWS))} without states, got "
            f"{p.seq}: others need smaller chunks",
        ),
        (p.chunk_size not in (None, CHUNK), f"a chunk_size of {CHUNK}, got {p.chunk_size}; leave it out"),
        (p.has_z, "no z: use implementation='cutile', or gate outside"),
        (p.has_runs, "no segment_ids: use implementation='cutile'"),
    )
    for refused, words in refusals:
        if refused:
            raise NotImplementedError(f"the CUDA C++ backward takes {words}")


def backward(problem: Problem, config: BackwardBlocks | None = None) -> Plan:
    """The plan of the backward: gradients of every operand, in the operands' order; of parameters per batch row.

    Raises NotImplementedError for what the kernels do not do, and, unless a `config` is given, for calls too small to
    fill the GPU; ValueError for a `config` of more pieces than this problem has.
    """
    check_supported(problem)
    if config is not None:
        for name, most in most_pieces(problem).items():
            if getattr(config, name) > most:
                raise ValueError(f"BackwardBlocks.{name} must be at most {most} here, got {getattr(config, name)}.")
        return _Backward(problem, config).plan()
    chosen = _Backward(problem, backward_blocks(problem))
    in_all = chosen.thread_blocks // chosen.rows * chosen.line.batch
    if in_all < FEWEST_THREAD_BLOCKS and cutile_takes(problem):
        raise NotImplementedError(
            f"the CUDA C++ backward takes calls that fill {FEWEST_THREAD_BLOCKS} thread blocks or more, got "
            f"{in_all}: smaller ones are divided finer by implementation='cutile'"
        )
    return chosen.plan()


def most_pieces(problem: Problem) -> dict[str, int]:
    """Into how many pieces BackwardBlocks can divide the chunks of a row, the rows, and the heads of a group."""
    line = _line(problem)
    units = line.heads * line.head_dim // WIDTH // line.groups
    segments = 1 if shared_row(problem) < CHUNK else math.ceil(line.seq / CHUNK)
    return {"segments": segments, "row_slices": line.batch, "head_blocks": min(units, MAX_CLUSTER)}


def _line(problem: Problem) -> Problem:
    """The call as the kernels take it: rows that share chunks are one row."""
    p = problem
    return replace(p, batch=1, seq=p.batch * p.seq) if shared_row(p) < CHUNK else p


class _Backward:
    """The sizes of one backward, and its launches."""

    def __init__(self, problem: Problem, config: BackwardBlocks):
        self.problem, self.config, self.row = problem, config, shared_row(problem)
        p = self.line = _line(problem)
        self.shares = self.row < CHUNK  # there are no states then
        self.chunks = math.ceil(p.seq / CHUNK)
        # A row's first state and last adjoint are kept only if they are not zero: what a copy finds outside of an
        # array is zero.
        self.kept_states = max(1, self.chunks - (not p.has_initial_state))
        self.kept_adjoints = max(1, self.chunks - (not p.has_dfinal))
        self.pieces = p.head_dim // WIDTH
        self.units = p.heads * self.pieces
        self.segment_chunks = math.ceil(self.chunks / config.segments)
        self.segments = math.ceil(self.chunks / self.segment_chunks)
        self.rows = math.ceil(p.batch / config.row_slices)
        self.block_units = math.ceil(self.units // p.groups / config.head_blocks)
        self.head_blocks = math.ceil(self.units // p.groups / self.block_units)
        self.columns = _columns(p)
        self.column_blocks = p.state // self.columns
        self.walks = 0 if self.shares else 2 * self.rows * self.column_blocks * self.units
        self.walk_heads = _walk_heads(p, self.walks * self.segments)
        # One of the pairs, and one of what enters a chunk in each block of columns, unless one kernel does it all.
        self.decay_parts = 1 + self.column_blocks if self.column_blocks > 1 else 1
        self.thread_blocks = self.head_blocks * p.groups * self.chunks * self.rows

    def time(self) -> float:
        """An estimate in us, to compare choices of this problem."""
        waves = math.ceil(self.thread_blocks / TOGETHER[self.head_blocks])
        heads = waves * (self.block_units + HEAD_OVERHEAD + (self.head_blocks > 1))
        launches = 2 + 2 * (self.segments > 1) + (self.column_blocks > 1)
        of_rows = HEAD_TIME * heads + self.walk_time() + LAUNCH_TIME * launches
        return math.ceil(self.line.batch / self.rows) * of_rows

    def walk_time(self) -> float:
        """Of the walks of some rows."""
        together = MULTIPROCESSORS * (5 if self.walk_heads == 5 else 4)
        tokens = CHUNK * WIDTH * 2

        def walked(walks: int, moved: int) -> float:
            full, rest = divmod(walks, together)
            of_chunk = (max(WALK_STEP, some * moved / WALK_BYTES) for some in [together] * full + [rest] * (rest > 0))
            return self.segment_chunks * sum(of_chunk)

        time = walked(self.walks * self.segments, tokens + WIDTH * self.columns * 2)
        if self.segments > 1:
            time += walked(self.walks * (self.segments - 1), tokens)
        return time

    def scratch_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.scratch())

    def operands(self) -> tuple[Buffer, ...]:
        p = self.problem
        cotangents = [Buffer("dy", (p.batch, p.seq, p.heads, p.head_dim), p.dtype)]
        if p.has_dfinal:
            cotangents.append(Buffer("dfinal", (p.batch, p.heads, p.head_dim, p.state), "float32"))
        return (*scan_operands(p), *cotangents)

    def results(self) -> tuple[Buffer, ...]:
        batch, per_row = self.problem.batch, ("A", "D", "dt_bias")
        return tuple(
            Buffer("d" + b.name, (batch, *b.shape[1:]) if b.name in per_row else b.shape, b.dtype)
            for b in scan_operands(self.problem)
        )

    def scratch(self) -> tuple[Buffer, ...]:
        p, f32 = self.line, "float32"
        per_head, per_unit = (p.batch, p.heads), (p.batch, self.units)
        state, tokens = (WIDTH, p.state), self.chunks * CHUNK
        boundaries = (self.rows, self.units, self.segments, *state)
        blocks = (self.rows, self.chunks, p.groups, self.head_blocks)
        buffers = (
            (True, Buffer("step", (*per_head, tokens), f32)),
            (True, Buffer("decay", (*per_head, tokens), f32)),
            (self.segments > 1, Buffer("starts", boundaries, f32)),
            (self.segments > 1, Buffer("stops", boundaries, f32)),
            (not self.shares, Buffer("states", (self.rows, self.units, self.kept_states, *state), p.dtype)),
            (not self.shares, Buffer("adjoints", (self.rows, self.units, self.kept_adjoints, *state), p.dtype)),
            (True, Buffer("step_gradient", (*per_unit, tokens), f32)),
            (True, Buffer("decay_gradient", (self.decay_parts, *per_unit, tokens), f32)),
            (self.column_blocks > 1, Buffer("pair_gradient", (*blocks, PAIR_TILES, 32, 8), p.dtype)),
            (not self.shares, Buffer("A_part", (*per_head, self.chunks), f32)),
            (not self.shares and p.has_dt_bias, Buffer("bias_part", (*per_head, self.chunks), f32)),
            (not self.shares and p.has_D, Buffer("D_part", (*per_unit, self.chunks, WIDTH), f32)),
        )
        return tuple(buffer for present, buffer in buffers if present)

    def plan(self) -> Plan:
        operands, results, scratch = self.operands(), self.results(), self.scratch()
        self.buffers = {b.name: b for b in (*operands, *results, *scratch)}
        launches = [self.step_sizes()]
        for first_row in range(0, self.line.batch, self.rows):
            launches += self.slice_launches(first_row)
        launches += self.sums()
        return Plan("mamba2_backward", operands, results, scratch, tuple(launches), {})

    def array(self, name: str, first_row: int = 0) -> Argument:
        """The buffer of that name from a row on, or null if the call has none."""
        if name not in self.buffers:
            return ScalarArg(0, "int64")
        buffer = self.buffers[name]
        offset = first_row * math.prod(buffer.shape[1:])
        return ArrayArg(name, (buffer.size - offset,), None, offset) if offset else ArrayArg(name)

    def arrays(self, *names: str) -> list[Argument]:
        return [self.array(name) for name in names]

    def part(self, name: str) -> Argument:
        """A chunk's part of the gradient of a parameter; of rows that share chunks nothing is left to add up."""
        return self.array({"A": "dA", "bias": "ddt_bias", "D": "dD"}[name] if self.shares else f"{name}_part")

    def tokens_map(self, name: str, tokens: int = CHUNK // 2) -> TensorMapArg:
        p = self.line
        return TensorMapArg(name, (1, tokens, 1, WIDTH), (p.batch, p.seq, self.units, WIDTH), swizzle=128)

    def group_map(self, name: str) -> TensorMapArg:
        p = self.line
        return TensorMapArg(name, (1, CHUNK // 2, 1, WIDTH), (p.batch, p.seq, p.groups, p.state), swizzle=128)

    def states_map(self, name: str) -> TensorMapArg:
        kept = self.kept_states if name == "states" else self.kept_adjoints
        shape = (self.rows * self.units, kept, WIDTH, self.problem.state)
        return TensorMapArg(name, (1, 1, WIDTH, WIDTH), shape, swizzle=128)

    def step_sizes(self) -> Launch:
        p = self.line
        template = (DT_TYPES[p.dt_dtype], self.row, p.param_rows == 1, p.has_dt_bias, p.dt_softplus)
        arrays = self.arrays("dt", "dt_bias", "A", "step", "decay")
        sizes = (*_ints(p.seq, p.heads, self.chunks), *self.limits())
        return _launch("step_sizes", template, self.head_tiles(), (*arrays, *sizes))

    def head_tiles(self) -> int:
        return self.line.batch * self.chunks * math.ceil(self.line.heads / HEAD_TILE)

    def limits(self) -> list[ScalarArg]:
        return [ScalarArg(float(limit), "float32") for limit in self.line.dt_limit]

    def slice_launches(self, first_row: int) -> Iterator[Launch]:
        """From the states of some rows to everything that their chunks give."""
        p = self.line
        rows = min(self.rows, p.batch - first_row)
        if self.segments > 1:
            yield self.walk(first_row, rows, stores=False)
            arrays = [self.array("decay"), self.array("initial_state", first_row), self.array("dfinal", first_row)]
            arrays += self.arrays("starts", "stops")
            sizes = (p.heads, self.pieces, self.chunks, self.segments, self.segment_chunks, first_row)
            blocks = 2 * (WIDTH * p.state // 1024) * self.units * rows
            yield _launch("join", (p.state,), blocks, (*arrays, *_ints(*sizes)))
        if not self.shares:
            yield self.walk(first_row, rows, stores=True)
        if self.column_blocks == 1:
            yield self.chunk_gradients(first_row, rows)
        else:
            yield self.pair_gradients(first_row, rows)
            yield self.state_gradients(first_row, rows)

    def walk(self, first_row: int, rows: int, stores: bool) -> Launch:
        p, heads, tiles = self.line, self.walk_heads, self.columns // WIDTH
        maps = (self.tokens_map("x"), self.tokens_map("dy"), self.group_map("B"), self.group_map("C"))
        arrays = self.arrays("step", "decay")
        if self.segments > 1:
            arrays += self.arrays("starts", "stops")
        else:  # a row is one segment, and begins and ends as the call says
            arrays += [self.array("initial_state", first_row), self.array("dfinal", first_row)]
        arrays += self.arrays("states", "adjoints", "dinitial_state")
        sizes = (p.seq, p.heads, p.groups, self.pieces, self.chunks, self.kept_states, self.kept_adjoints)
        sizes = (*sizes, self.segments, self.segment_chunks, first_row)
        segments = self.segments if stores else self.segments - 1
        blocks = 2 * self.column_blocks * (self.units // heads) * segments * rows
        stages = MOST_STAGES if blocks <= MULTIPROCESSORS and heads <= 2 else STAGES
        lines = 2 * (stages // 2 + 1) + 2
        memory = stages * (heads + tiles) * TILE + lines * heads * CHUNK * 4 + 2 * stages * 8 + 1024
        return _launch(
            "walk",
            (CUDA_TYPES[p.dtype], p.state, self.columns, heads, stages, stores),
            blocks,
            (*maps, *arrays, *_ints(*sizes)),
            threads=128 * heads,
            shared_memory=memory,
        )

    def chunk_gradients(self, first_row: int, rows: int) -> Launch:
        p, tiles = self.line, self.line.state // WIDTH
        maps = [self.tokens_map("x"), self.tokens_map("dy"), self.group_map("B"), self.group_map("C")]
        # Where rows share chunks a stand-in, never touched.
        maps += maps[:2] if self.shares else [self.states_map("states"), self.states_map("adjoints")]
        maps.append(self.tokens_map("dx", STRIP))
        arrays = self.arrays("step", "decay", "D", "dB", "dC", "step_gradient", "decay_gradient")
        arrays.append(self.part("D"))
        sizes = (p.seq, p.heads, p.groups, self.pieces, self.chunks, self.kept_states)
        sizes = (*sizes, self.head_blocks, self.block_units, first_row)
        memory = 6 * tiles * TILE + PAIR_MEMORY + 2 * PAIR_TILES * 64 + 3 * 256 + 16 * 4 + 11 * 8 + 1024
        return _launch(
            "chunk_gradients",
            (CUDA_TYPES[p.dtype], p.state, self.row, p.has_D, p.param_rows == 1, self.head_blocks > 1),
            self.thread_blocks // self.rows * rows,
            (*maps, *arrays, *_ints(*sizes)),
            cluster=self.head_blocks,
            shared_memory=memory,
            file=CHUNK_FILE,
        )

    def pair_gradients(self, first_row: int, rows: int) -> Launch:
        p = self.line
        maps = [self.tokens_map("x"), self.tokens_map("dy"), self.group_map("B"), self.group_map("C")]
        arrays = self.arrays("step", "decay", "D", "dx", "pair_gradient", "step_gradient", "decay_gradient", "D_part")
        sizes = (p.seq, p.heads, p.groups, self.pieces, self.chunks, p.state)
        return _launch(
            "pair_gradients",
            (CUDA_TYPES[p.dtype], p.has_D, p.param_rows == 1),
            self.thread_blocks // self.rows * rows,
            (
                *maps,
                self.states_map("adjoints"),
                *arrays,
                *_ints(*sizes, self.head_blocks, self.block_units, first_row),
            ),
            threads=PAIR_THREADS,
            shared_memory=STAGES * 4 * TILE + PAIR_MEMORY + 9 * CHUNK * 4 + (2 * STAGES + 6) * 8 + 1024,
            file=LARGE_FILE,
        )

    def state_gradients(self, first_row: int, rows: int) -> Launch:
        p, tiles = self.line, self.columns // WIDTH
        maps = [self.tokens_map("x"), self.tokens_map("dy"), self.group_map("B"), self.group_map("C")]
        maps += [self.states_map("states"), self.states_map("adjoints")]
        arrays = self.arrays("step", "decay", "pair_gradient", "dB", "dC")
        of_columns = p.batch * self.units * self.chunks * CHUNK
        arrays.append(ArrayArg("decay_gradient", (self.column_blocks * of_columns,), None, of_columns))
        sizes = (p.seq, p.heads, p.groups, self.pieces, self.chunks, self.kept_states, p.state, p.batch)
        return _launch(
            "state_gradients",
            (CUDA_TYPES[p.dtype], self.columns, self.head_blocks > 1),
            self.column_blocks * self.thread_blocks // self.rows * rows,
            (*maps, *arrays, *_ints(*sizes, self.head_blocks, self.block_units, first_row)),
            threads=STATE_THREADS,
            cluster=self.head_blocks,
            shared_memory=(8 * tiles + 8) * TILE + 6 * CHUNK * 4 + 16 * 4 + 5 * 8 + 1024,
            file=LARGE_FILE,
        )

    def sums(self) -> Iterator[Launch]:
        """What is left when every chunk is done: dt and the parameters."""
        p = self.line
        arrays = self.arrays("dt", "dt_bias", "A", "step", "step_gradient", "decay_gradient")
        arrays += [self.array("ddt"), self.part("A"), self.part("bias")]
        template = (DT_TYPES[p.dt_dtype], self.row, p.param_rows == 1, p.has_dt_bias, p.dt_softplus)
        sizes = (*_ints(p.seq, p.heads, self.pieces, self.chunks, self.decay_parts, p.batch), *self.limits())
        yield _launch("step_gradients", template, self.head_tiles(), (*arrays, *sizes))
        if self.shares:
            return
        arrays = self.arrays("A_part", "bias_part", "D_part", "dA", "ddt_bias", "dD")
        arguments = (*arrays, *_ints(self.pieces, self.chunks))
        yield _launch(
            "parameter_gradients", (p.has_dt_bias, p.has_D), p.batch * self.units, arguments, threads=2 * WIDTH
        )


def _launch(
    function: str,
    template: tuple[str | int | bool, ...],
    blocks: int,
    arguments: tuple[Argument, ...],
    threads: int = THREADS,
    shared_memory: int = 0,
    cluster: int = 1,
    file: str = FILE,
) -> Launch:
    constants = ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in template)
    kernel = CudaKernel(file, f"{function}<{constants}>", arch_specific=True, archs=("sm_90",))
    pdl = function != "step_sizes"  # the plan's first, which does not wait for earlier kernels itself
    together = (cluster, 1, 1) if cluster > 1 else None
    return Launch(kernel, (blocks, 1, 1), arguments, (threads, 1, 1), shared_memory, together, pdl)


def _ints(*values: int) -> list[ScalarArg]:
    return [ScalarArg(value, "int32") for value in values]
