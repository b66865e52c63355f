"""Which CUDA kernels run a Mamba-3 scan, with which tiles, in which grid.

`forward` turns a Problem into a launch plan, or refuses with NotImplementedError what the kernels do not do. How fast a
plan is depends on a `Tiles` that may be given; None takes the heuristic. What a plan computes does not depend on it,
beyond rounding: the last bits follow the order of the sums, hence tokens and segments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax_ssd import compile
from jax_ssd.mamba3.problem import Problem
from jax_ssd.plans import MAX_SHARED_MEMORY, MULTIPROCESSORS, ArrayArg, Buffer, Launch, Plan, ScalarArg
from jax_ssd.specs import CudaKernel

FILE, PIPELINE, TF32 = "mamba3_forward.cu", "mamba3_pipeline.cu", "mamba3_tf32.cu"
VALUE = {"bfloat16": "__nv_bfloat16", "float32": "float"}
LARGEST_HEAD_DIM = 128  # a row tile of 16 columns for each of eight warps
LARGEST_STATE = 256  # what the registers of eight warps hold of such a head's state
PIPELINE_STATES = (64, 128)
PIPELINE_ROWS, PIPELINE_RANK = 64, 16
TF32_STATE, TF32_RANK = 128, 4
TURNS_AROUND = 3  # chunks that a block of the pipeline is under way before the first and after the last
ENDS_COST = 0.5  # of a segment's walk to its end, where a whole walk is 1
BLOCK_BYTES = 1024  # of shared memory that each block takes beside its own
SHORTEST_SEGMENT = 8  # chunks; a segment costs one more pass over its keys
MOST_SEGMENTS = 64  # a block sums up all the segments before its own, or their pieces
SUM_COST = 1.0  # of that for one of them, in chunks


@dataclass(frozen=True)
class Tiles:
    """The choices behind a forward plan that change its speed.

    rows: tokens x ranks of a chunk's matrices, 16, 32 or 64. tokens: of a chunk. segments: into how many each row is
    cut. blocks: per multiprocessor, which bounds the registers. teams: of four warps in a block. pipeline: by
    mamba3_pipeline.cu for sm_90, with 64 rows, one block per multiprocessor and four or five teams, or for float32 by
    mamba3_tf32.cu with four; else by mamba3_forward.cu, with one or two teams. pieces: of a segment, whose ends are
    walked to by blocks of their own.
    """

    rows: int
    tokens: int
    segments: int
    blocks: int
    teams: int
    pipeline: bool
    pieces: int = 1

    def __post_init__(self):
        if self.rows not in (16, 32, 64):
            raise ValueError(f"Tiles.rows must be 16, 32 or 64, got {self.rows}.")
        if not 1 <= self.tokens <= self.rows or self.segments < 1 or self.blocks < 1:
            raise ValueError(f"Tiles.tokens must be 1 to rows, segments and blocks at least 1, got {self}.")
        if self.pieces < 1 or (self.pieces > 1 and not self.pipeline):
            raise ValueError(f"Tiles.pieces must be at least 1, and 1 without the pipeline, got {self}.")
        if self.pipeline and not (self.rows == PIPELINE_ROWS and self.blocks == 1 and self.teams in (4, 5)):
            raise ValueError(f"The pipeline takes {PIPELINE_ROWS} rows, one block and 4 or 5 teams, got {self}.")
        if not self.pipeline and self.teams not in (1, 2):
            raise ValueError(f"Tiles.teams must be 1 or 2, got {self}.")


def forward(problem: Problem, config: Tiles | None = None, archs: Sequence[str] | None = None) -> Plan:
    """The scan: y, and the final state if it is asked for.

    archs: those to be compiled for; None for the ones of the settings or of the GPUs here.

    Raises:
      NotImplementedError: the kernels do not serve the problem, or need more than one of the architectures has; with
        the limit and the figure.
    """
    check_supported(problem)
    archs = compile.target_archs() if archs is None else archs
    return _Forward(problem, config or tiles(problem, archs)).plan()


def check_supported(problem: Problem) -> None:
    """Raises NotImplementedError for what the CUDA kernels do not do, naming the limit and the figure."""
    p = problem
    if p.dtype not in VALUE:
        raise NotImplementedError(
            f"the CUDA kernels of Mamba-3 take {' and '.join(VALUE)}, got {p.dtype}; use implementation='xla'"
        )
    if p.pairs < 1:
        raise NotImplementedError(
            "the CUDA kernels of Mamba-3 take at least one rotated pair, got none; use implementation='xla'"
        )
    for name, size, most in (("head_dim", p.head_dim, LARGEST_HEAD_DIM), ("state", p.state, LARGEST_STATE)):
        if size % 8 or size > most:
            raise NotImplementedError(
                f"the CUDA kernels of Mamba-3 take a {name} that is a multiple of 8, up to {most}, got {size}; use "
                "implementation='xla'"
            )


def tiles(problem: Problem, archs: Sequence[str] | None = None) -> Tiles:
    """The heuristic. archs: as in `forward`.

    Raises:
      NotImplementedError: no tile fits the shared memory of every architecture.
    """
    p = problem
    archs = compile.target_archs() if archs is None else archs
    most = min(MAX_SHARED_MEMORY[arch] for arch in archs)
    possible = [rows for rows in (64, 32, 16) if rows >= p.rank and forward_memory(p, rows, _tokens(p, rows)) <= most]
    if not possible:
        least = forward_memory(p, 16, _tokens(p, 16))
        raise NotImplementedError(
            f"head_dim {p.head_dim} and state {p.state} in {p.dtype} need {least:,} bytes of shared memory, at most "
            f"{most:,} are possible on {' and '.join(archs)}; use implementation='xla'"
        )
    rows = possible[0]
    tokens = _tokens(p, rows)
    if set(archs) == {"sm_90"} and _fits_pipeline(p):
        segments, pieces = _pipeline_segments(p, tokens)
        return Tiles(rows, tokens, segments, 1, _teams(p), True, pieces)
    light = p.dtype == "bfloat16" and p.state <= 128 and p.head_dim <= 64  # 168 registers are enough
    teams = 1 if light or p.head_dim <= 32 else 2
    blocks = 3 if light and 3 * (forward_memory(p, rows, tokens) + BLOCK_BYTES) <= most + BLOCK_BYTES else 2 // teams
    programs, chunks = p.batch * p.heads, math.ceil(p.seq / tokens)
    segments = max(1, min(MULTIPROCESSORS * blocks // programs, chunks // SHORTEST_SEGMENT, MOST_SEGMENTS))
    return Tiles(rows, tokens, segments, blocks, teams, False)


def _fits_pipeline(problem: Problem) -> bool:
    """Of the problem's type: mamba3_pipeline.cu or mamba3_tf32.cu."""
    p = problem
    tokens = _tokens(p, PIPELINE_ROWS)
    if p.dtype == "float32":
        return (
            p.precision == "default"
            and (p.state, p.rank) == (TF32_STATE, TF32_RANK)
            and p.head_dim <= 64
            and tokens * p.rank == PIPELINE_ROWS
            and tf32_memory(p, False) <= MAX_SHARED_MEMORY["sm_90"]
        )
    return (
        p.dtype == "bfloat16"
        and p.state in PIPELINE_STATES
        and 32 < p.head_dim <= 64
        and tokens * p.rank == PIPELINE_ROWS
        and p.rank <= PIPELINE_RANK
        and pipeline_memory(p, tokens, _teams(p), False) <= MAX_SHARED_MEMORY["sm_90"]
    )


def _teams(problem: Problem) -> int:
    """Warpgroups of a block of the pipeline."""
    return 5 if problem.rank == 1 else 4


def _pipeline_segments(problem: Problem, tokens: int) -> tuple[int, int]:
    """Segments and their pieces, as many as make the walk of a multiprocessor shortest."""
    programs, chunks = problem.batch * problem.heads, math.ceil(problem.seq / tokens)

    def length(cut: tuple[int, int]) -> float:
        segments, pieces = cut
        before = pieces * (segments - 1)
        piece = math.ceil(chunks / (segments * pieces))
        waves = math.ceil(programs * segments / MULTIPROCESSORS) * (piece * pieces + TURNS_AROUND + SUM_COST * before)
        ends = math.ceil(programs * before / MULTIPROCESSORS) * (piece + TURNS_AROUND)
        return waves + ENDS_COST * ends

    most = max(1, min(chunks // SHORTEST_SEGMENT, MOST_SEGMENTS))
    cuts = [(segments, pieces) for segments in range(1, most + 1) for pieces in range(1, most // segments + 1)]
    return min((cut for cut in cuts if cut[0] > 1 or cut[1] == 1), key=length)


def _tokens(problem: Problem, rows: int) -> int:
    most = rows // problem.rank
    return min(problem.chunk_size or most, most)


def _columns(problem: Problem) -> int:
    """Columns of the head as the kernels pad them."""
    return next(columns for columns in (16, 32, 64, 128) if columns >= problem.head_dim)


def _up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _matrix(problem: Problem, rows: int, columns: int) -> int:
    """Bytes of a `Matrix` of mamba3_products.cuh, with what follows it up to the next one."""
    if problem.dtype == "bfloat16":
        return _up(math.ceil(columns / 64) * rows * 128, 1024)
    return _up(rows * (_up(columns, 32) + 8) * 4, 1024)


def _chunk_words(problem: Problem, tokens: int) -> tuple[int, int, int]:
    """Words of a chunk's rotations, of its schedule as it is used and as it is given."""
    return 2 * tokens * (_up(problem.pairs, 4) + 4), 6 * tokens, 3 * tokens + 2


def _common(problem: Problem, tokens: int, parameters: int) -> int:
    """Bytes of the rotations, the schedule as it is used and as it is given, parameters, phases and marks."""
    p = problem
    words = (*_chunk_words(p, tokens), parameters * p.head_dim, p.pairs, tokens)
    return sum(_up(4 * count, 16) for count in words)


def _walk_memory(problem: Problem, tokens: int, ends: bool, parameters: int) -> int:
    """Bytes of `WalkLayout` of mamba3_walk.cuh without a kernel's own. parameters: words of what multiplies values."""
    p = problem
    table, weights, given = _chunk_words(p, tokens)
    norms = 4 * PIPELINE_ROWS if "norm_weight" in p.given and not ends else 0
    words = (table, table, norms, *[weights] * 4, given, given, parameters, p.pairs, *[tokens + 1] * 4)
    return sum(_up(4 * count, 16) for count in words) + 16


def ends_memory(problem: Problem, rows: int, tokens: int) -> int:
    """Bytes of shared memory of `mamba3_segment_ends`: `EndsMemory` there."""
    p = problem
    keys, values = _matrix(p, rows, _up(p.state, 16)), _matrix(p, rows, _columns(p))
    return keys + values + _common(p, tokens, p.rank)


def forward_memory(problem: Problem, rows: int, tokens: int) -> int:
    """Bytes of shared memory of `mamba3_forward`: `ForwardMemory` there."""
    p = problem
    columns, state = _columns(p), _up(p.state, 16)
    states = max(_matrix(p, columns, state), _up(rows * columns * 4, 1024))
    pairs = tokens * (rows // p.rank) if p.rank > 1 else 0
    rest = _common(p, tokens, 3 * p.rank + 1) + 2 * rows * 4 + _up(4 * pairs, 16)
    return 2 * _matrix(p, rows, state) + _matrix(p, rows, columns) + states + rest


def pipeline_memory(problem: Problem, tokens: int, teams: int, ends: bool) -> int:
    """Bytes of shared memory of `mamba3_pipeline`: `PipelineShape` there. Five teams have copies of the state in it."""
    p = problem
    rows, values = _matrix(p, PIPELINE_ROWS, p.state), _matrix(p, PIPELINE_ROWS, 64)
    tiles = 2 * (rows + values)
    if not ends:
        tiles += 2 * (rows + values) + _matrix(p, PIPELINE_ROWS, PIPELINE_ROWS)
        tiles += 2 * _matrix(p, 64, p.state) if teams == 5 else 0
    return tiles + _walk_memory(p, tokens, ends, p.rank * p.head_dim + 64)


def tf32_memory(problem: Problem, ends: bool) -> int:
    """Bytes of shared memory of `mamba3_tf32`: `Tf32Shape` there."""
    p = problem
    tokens = PIPELINE_ROWS // p.rank
    rows, across, values = 4 * PIPELINE_ROWS * p.state, p.state // 8 * (128 * tokens + 32), 4 * tokens * 64
    tiles = 2 * (across + values) + (0 if ends else 3 * rows + 4 * PIPELINE_ROWS**2 + 8 * p.rank * 64)
    return tiles + _walk_memory(p, tokens, ends, p.rank * p.head_dim)


class _Forward:
    """What the launches of a forward plan have in common."""

    def __init__(self, problem: Problem, config: Tiles):
        p = self.problem = problem
        self.config = config
        if config.pipeline and (not _fits_pipeline(p) or (p.dtype == "float32" and config.teams != 4)):
            raise ValueError("Tiles.pipeline: the pipeline does not serve these sizes.")
        if config.tokens * p.rank > config.rows:
            raise ValueError(f"Tiles: {config.tokens} tokens of rank {p.rank} are more than {config.rows} rows.")
        chunks = math.ceil(p.seq / config.tokens)
        self.piece_tokens = math.ceil(chunks / min(config.segments * config.pieces, chunks)) * config.tokens
        self.segment_tokens = self.piece_tokens * config.pieces
        self.segments = math.ceil(p.seq / self.segment_tokens)
        self.pieces = config.pieces * (self.segments - 1)
        lead = (p.batch, p.sequences, p.heads)
        self.results = (p.y,)
        if p.return_final_state:
            sizes = {"angle": (p.pairs,), "ssm": (p.head_dim, p.state), "k": (p.rank, p.state), "v": (p.head_dim,)}
            self.results += tuple(Buffer(f"final_{name}", (*lead, *size), "float32") for name, size in sizes.items())
        self.scratch: tuple[Buffer, ...] = ()
        if self.segments > 1:
            ends = (p.batch, p.heads, self.pieces)
            self.scratch = (
                Buffer("ends", (*ends, p.head_dim, p.state), "float32"),
                Buffer("decays", ends, "float32"),
                Buffer("phases", (*ends, 2, p.pairs), "uint32"),
            )
        self.present = {buffer.name for buffer in (*p.operands, *self.results, *self.scratch)}

    def plan(self) -> Plan:
        launches = [self.forward()]
        if self.segments > 1:
            launches.insert(0, self.segment_ends())
        return Plan("mamba3_forward", self.problem.operands, self.results, self.scratch, tuple(launches))

    def segment_ends(self) -> Launch:
        p, c = self.problem, self.config
        programs = p.batch * p.heads * self.pieces
        if c.pipeline:
            return self.pipeline(programs, ends=True)
        names = (
            *("k", "v", "k_bias", "mimo_v", "angles", "adt", "dt", "trap"),
            *("state_angle", "state_ssm", "state_k", "state_v", "cu_seqlens", "ends", "decays", "phases"),
        )
        return self.launch("mamba3_segment_ends", programs, names, ends_memory(p, c.rows, c.tokens))

    def forward(self) -> Launch:
        p, c = self.problem, self.config
        programs = p.batch * p.heads * self.segments
        if c.pipeline:
            return self.pipeline(programs, ends=False)
        memory = forward_memory(p, c.rows, c.tokens)
        return self.launch("mamba3_forward", programs, FORWARD_NAMES, memory, ScalarArg(p.norm_eps, "float32"))

    def launch(self, function: str, programs: int, names: Sequence[str], memory: int, *more: ScalarArg) -> Launch:
        p, c = self.problem, self.config
        passes = 3 if p.precision == "highest" else 1
        name = (
            f"jax_ssd::{function}<{self.sizes()}, jax_ssd::Tiling<{c.rows}, {c.tokens}, {c.blocks}, {passes}, "
            f"{c.teams}>, {self.options()}>"
        )
        block = (128 * c.teams, 1, 1)
        numbers = (p.seq, self.segments, self.segment_tokens, p.sequences)
        arguments = self.arguments(names, numbers, *more)
        return Launch(CudaKernel(FILE, name), (programs, 1, 1), arguments, block, memory)

    def pipeline(self, programs: int, ends: bool) -> Launch:
        p, c = self.problem, self.config
        teams = 4 if ends else c.teams
        if p.dtype == "float32":
            file, name = TF32, f"jax_ssd::mamba3_tf32<{self.sizes()}, {self.options()}, {_bool(ends)}>"
            memory = tf32_memory(p, ends)
        else:
            file = PIPELINE
            name = f"jax_ssd::mamba3_pipeline<{self.sizes()}, {c.tokens}, {teams}, {self.options()}, {_bool(ends)}>"
            memory = pipeline_memory(p, c.tokens, teams, ends)
        kernel = CudaKernel(file, name, arch_specific=True, archs=("sm_90",))
        numbers = (p.seq, self.segments, self.segment_tokens, self.pieces, self.piece_tokens, p.sequences)
        arguments = self.arguments(FORWARD_NAMES, numbers, ScalarArg(p.norm_eps, "float32"))
        return Launch(kernel, (programs, 1, 1), arguments, (128 * teams, 1, 1), memory)

    def sizes(self) -> str:
        """The C++ type of the same name."""
        p = self.problem
        numbers = (p.heads, p.groups, p.rank, p.head_dim, p.state, p.pairs)
        return f"jax_ssd::Sizes<{', '.join((VALUE[p.dtype], *map(str, numbers)))}, {_bool(p.rotary == 'half')}>"

    def options(self) -> str:
        p, given = self.problem, self.problem.given
        options = (
            p.param_rows == 1,
            "mimo_v" in given,
            "mimo_o" in given,
            "z" in given,
            "D" in given,
            "norm_weight" in given,
            "state_ssm" in given,
            "cu_seqlens" in given,
            p.return_final_state,
        )
        return f"jax_ssd::Options<{', '.join(map(_bool, options))}>"

    def arguments(
        self, names: Sequence[str], numbers: Sequence[int], *more: ScalarArg
    ) -> tuple[ArrayArg | ScalarArg, ...]:
        return (
            *(ArrayArg(name if name in self.present else "q") for name in names),  # a stand-in is never touched
            *(ScalarArg(number, "int32") for number in numbers),
            *more,
        )


FORWARD_NAMES = (
    *("q", "k", "v", "q_bias", "k_bias", "angles", "adt", "dt", "trap", "mimo_v", "mimo_o", "z", "mimo_z"),
    *("D", "norm_weight", "state_angle", "state_ssm", "state_k", "state_v", "cu_seqlens"),
    *("ends", "decays", "phases", "y", "final_angle", "final_ssm", "final_k", "final_v"),
)


def _bool(value: bool) -> str:
    return "true" if value else "false"
