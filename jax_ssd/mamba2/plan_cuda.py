"""The forward scan of Mamba-2 as CUDA C++ kernels for sm_90: kernels/cuda/mamba2_forward.cu.

`forward` turns a Problem into a launch plan and refuses with NotImplementedError what those kernels do not do, or what
the cuTile kernels do faster.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jax_ssd.mamba2 import plan
from jax_ssd.mamba2.problem import Problem
from jax_ssd.plans import MULTIPROCESSORS, Argument, ArrayArg, Buffer, Launch, Plan, ScalarArg, TensorMapArg
from jax_ssd.specs import CudaKernel

ARCHS = ("sm_90",)
FILE = "mamba2_forward.cu"
CPP_TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float"}
CHUNK = 64  # tokens
BLOCK = 64  # channels of one head whose states a warpgroup holds together
TILE = CHUNK * BLOCK * 2  # bytes
STATE_SCALARS = 2 * CHUNK * 4  # bytes of the decays of one chunk of one block, where only its end state is wanted
SCALARS = 2 * STATE_SCALARS + (16 + 32 + 48) * 4  # where y is
WARPGROUP = 128  # threads
MOST_WARPGROUPS = 2  # that compute; with a third there are too few registers
MOST_BLOCKS = 4  # of a thread block: each of the four providing warps prepares the scalars of one
STATE_STEP, MOST_STATE = 64, 512
PART_STATE = 256  # most of a state that one warpgroup keeps
MOST_STATE_ELEMENTS = 2 * BLOCK * 128  # of one warpgroup, half of its registers
SHARED_MEMORY = 232_448  # bytes, all that one thread block can get
MOST_STAGES = 4
SHORTEST_ROOM = 16  # tokens of a chunk that a batch row gets which shares it
SHORTEST_SEQ = 48  # shorter rows leave most of a chunk empty: smaller tiles are faster
# With so many the cuTile kernels took 13 to 27 % longer, fewer were not timed; of segments without starts of their own.
FEWEST_THREAD_BLOCKS = 32
# How long a chunk takes a thread block of so many warpgroups that compute, of so many blocks each.
CHUNK_COSTS = {(2, 2): 1.0, (2, 1): 0.62, (1, 2): 0.85, (1, 1): 0.5}
# Of the walk of a segment that computes y: what the walk that finds its end state costs, and what else segments cost.
STATE_COST, SEGMENT_COST = 0.5, 1.5
# Where thread blocks find their start states themselves, a segment is shorter than the first by so many hundredths of
# the chunks before it.
LEAD_PERCENT = 25
# Of a chunk whose y is computed: what one of those before costs, of which the state alone is; and what else that costs.
LEAD_COST, LEADS_COST = 0.35, 2.0
# The costs above are those of states up to 128. Of larger ones segments that pass states on took this much of theirs.
# Starts of their own were timed with those only, in calls that leave half of the multiprocessors without work or more.
LARGE_STATE, PASSED = 256, 0.82
CARRY_THREADS = 128


@dataclass(frozen=True)
class Split:
    """How the work is divided. warpgroups: of a thread block, those that compute; blocks: of 64 channels, of each.

    A state of more than 256 is kept by two warpgroups.

    segments: of each row, chunks_per_segment long. With one, rows are lined up and cut into equal ranges.

    own_starts: whether the thread block of a segment finds the state at its start itself, by a walk from the start of
    the row. Then chunks_per_segment is the length of the first segment, and later ones are shorter.
    """

    warpgroups: int
    blocks: int
    segments: int
    chunks_per_segment: int
    own_starts: bool = False

    def __post_init__(self):
        for name in ("warpgroups", "blocks", "segments", "chunks_per_segment"):
            if getattr(self, name) < 1:
                raise ValueError(f"Split.{name} must be at least 1, got {getattr(self, name)}.")
        if self.warpgroups > MOST_WARPGROUPS:  # they would wait for each other's registers forever
            raise ValueError(
                f"Split.warpgroups={self.warpgroups}: a multiprocessor has registers for {MOST_WARPGROUPS}."
            )
        if self.warpgroups * self.blocks > MOST_BLOCKS:
            raise ValueError(
                f"Split.blocks={self.blocks} with {self.warpgroups} warpgroups: at most {MOST_BLOCKS} in all."
            )


def check_supported(problem: Problem) -> None:
    """Raises NotImplementedError for what these kernels do not do, naming the limit and the figure."""
    p = problem
    if p.dtype != "bfloat16":  # products of x with steps, and states, would leave the range of float16
        raise NotImplementedError(f"the CUDA C++ kernels take bfloat16, got {p.dtype}")
    if p.dt_dtype not in CPP_TYPES:
        raise NotImplementedError(f"the CUDA C++ kernels take dt in {', '.join(CPP_TYPES)}, got {p.dt_dtype}")
    if p.head_dim % BLOCK:
        raise NotImplementedError(
            f"the CUDA C++ kernels take a head_dim that is a multiple of {BLOCK}, got {p.head_dim}"
        )
    if p.state % STATE_STEP or p.state > MOST_STATE:
        raise NotImplementedError(
            f"the CUDA C++ kernels take a state size that is a multiple of {STATE_STEP}, at most {MOST_STATE}, got "
            f"{p.state}"
        )
    if p.seq < SHORTEST_SEQ and not stateless(p) and p.state <= plan.LARGEST_STATE:
        raise NotImplementedError(
            f"the CUDA C++ kernels take rows of {SHORTEST_SEQ} tokens or more, got {p.seq}: shorter ones with a state "
            f"are faster in smaller tiles"
        )
    if p.dt_limit[0] < 0 and not p.dt_softplus:
        raise NotImplementedError(
            f"the CUDA C++ kernels take steps >= 0: dt_limit from 0 on, or dt_softplus, got dt_limit={p.dt_limit}"
        )
    if p.chunk_size not in (None, CHUNK):
        raise NotImplementedError(f"the CUDA C++ kernels take a chunk_size of {CHUNK}, got {p.chunk_size}")
    if p.has_runs:
        raise NotImplementedError("the CUDA C++ kernels take no segment_ids")


def group_blocks(problem: Problem) -> int:
    """Blocks of 64 channels that share B and C."""
    return problem.heads // problem.groups * (problem.head_dim // BLOCK)


def parts(problem: Problem) -> int:
    """Warpgroups that share the state of a block."""
    return math.ceil(problem.state / PART_STATE)


def padded_state(problem: Problem) -> int:
    """The state with the zeros that fill its parts."""
    return parts(problem) * 64 * math.ceil(problem.state / (64 * parts(problem)))


def stateless(problem: Problem) -> bool:
    """Whether rows start from nothing, end in their first chunk, and nobody asks for their state."""
    p = problem
    wanted = p.has_initial_state or p.return_final_state
    return p.seq <= CHUNK and not wanted and p.param_rows == 1 and parts(p) == 1


def together(problem: Problem) -> int:
    """Batch rows that share a chunk."""
    return CHUNK // max(SHORTEST_ROOM, 1 << (problem.seq - 1).bit_length()) if stateless(problem) else 1


def shortest_piece(problem: Problem) -> int:
    """Tokens of a row's piece in whose y its start state finds room."""
    return 2 * padded_state(problem)


def split(problem: Problem) -> Split:
    """The heuristic: the division in which the busiest thread block is done first."""
    passing = _passing(problem)
    if padded_state(problem) < LARGE_STATE or _Forward(problem, passing).thread_blocks > MULTIPROCESSORS // 2:
        return passing
    cost = _cost(problem, passing) * (PASSED if passing.segments > 1 else 1)
    own = min(_own_splits(problem), key=lambda division: _cost(problem, division), default=passing)
    return own if _cost(problem, own) < cost else passing


def _passing(problem: Problem) -> Split:
    """The best division of those whose thread blocks find no start states themselves."""
    return min(_splits(problem), key=lambda division: _cost(problem, division))


def _splits(problem: Problem) -> Iterator[Split]:
    """Divisions worth trying, the one with the most blocks to a thread block first."""
    p = problem
    chunks = math.ceil(p.seq / CHUNK)
    for warpgroups, blocks in CHUNK_COSTS:
        if not _fits(p, warpgroups, blocks):
            continue
        rows = _rows(p, warpgroups, blocks)
        yield Split(warpgroups, blocks, 1, chunks)
        for wanted in range(2, min(MULTIPROCESSORS // rows, p.seq // shortest_piece(p)) + 1):
            per_segment = math.ceil(chunks / wanted)
            segments = math.ceil(chunks / per_segment)
            if _shortest_segment(p, segments, per_segment) >= shortest_piece(p):
                yield Split(warpgroups, blocks, segments, per_segment)


def _own_splits(problem: Problem) -> Iterator[Split]:
    """Divisions worth trying whose thread blocks find their start states themselves."""
    chunks = math.ceil(problem.seq / CHUNK)
    for warpgroups, blocks in CHUNK_COSTS:
        length = shortest_first(problem, warpgroups, blocks)
        if length < chunks:
            yield Split(warpgroups, blocks, len(own_starts(chunks, length)), length, own_starts=True)


def own_starts(chunks: int, length: int) -> list[int]:
    """The first chunk of each segment where their thread blocks find the state there themselves: `Pieces`."""
    starts, end = [], 0
    while end < chunks:
        starts.append(end)
        end += max(1, length - end * LEAD_PERCENT // 100)
    return starts


def shortest_first(problem: Problem, warpgroups: int, blocks: int) -> int:
    """The least chunks of a first segment if all thread blocks, which find their start states themselves, run at once.

    All of a row's, if those of two segments do not. Were they less than the last segment's walk to its start takes, it
    would not be done earlier.
    """
    chunks = math.ceil(problem.seq / CHUNK)
    if not _fits(problem, warpgroups, blocks):
        return chunks
    most = MULTIPROCESSORS // _rows(problem, warpgroups, blocks)
    lengths = range(math.ceil(chunks * LEAD_PERCENT / 100), chunks)
    at = bisect.bisect_left(lengths, -most, key=lambda length: -len(own_starts(chunks, length)))
    return lengths[at] if at < len(lengths) else chunks


def _fits(problem: Problem, warpgroups: int, blocks: int) -> bool:
    """Whether blocks are shared out without a rest, and a warpgroup has registers for its states."""
    p = problem
    whole = warpgroups % parts(p) == 0 and group_blocks(p) % (warpgroups // parts(p) * blocks) == 0
    return whole and blocks * BLOCK * padded_state(p) // parts(p) <= MOST_STATE_ELEMENTS


def _rows(problem: Problem, warpgroups: int, blocks: int) -> int:
    p = problem
    return math.ceil(p.batch / together(p)) * p.heads * (p.head_dim // BLOCK) // (warpgroups // parts(p) * blocks)


def _shortest_segment(problem: Problem, segments: int, per_segment: int) -> int:
    """In tokens."""
    return min(per_segment * CHUNK, problem.seq - (segments - 1) * per_segment * CHUNK)


def _cost(problem: Problem, division: Split) -> float:
    """How long the busiest thread block takes."""
    d = division
    rows = _rows(problem, d.warpgroups, d.blocks)
    chunk = CHUNK_COSTS[d.warpgroups, d.blocks]
    if d.own_starts:
        starts = [*own_starts(math.ceil(problem.seq / CHUNK), d.chunks_per_segment), math.ceil(problem.seq / CHUNK)]
        longest = max(end - start + LEAD_COST * start for start, end in itertools.pairwise(starts))
        return chunk * longest + LEADS_COST
    if d.segments == 1:
        return chunk * d.chunks_per_segment * max(1.0, rows / MULTIPROCESSORS)
    return chunk * d.chunks_per_segment * (1 + STATE_COST) + SEGMENT_COST


def forward(problem: Problem, config: Split | None = None) -> Plan:
    """The scan: y, and the final state if it is asked for.

    Raises NotImplementedError for what the kernels do not do, and, unless a `config` is given, for calls too small to
    fill the GPU; ValueError for a `config` that does not divide this problem.
    """
    check_supported(problem)
    if config is not None:
        _check_split(problem, config)
        return _Forward(problem, config).plan()
    # Counted without the thread blocks that walk the same chunks again: such small calls were not timed.
    filled = _Forward(problem, _passing(problem)).thread_blocks
    if filled < FEWEST_THREAD_BLOCKS and problem.state <= plan.LARGEST_STATE:
        raise NotImplementedError(
            f"the CUDA C++ kernels take calls that fill {FEWEST_THREAD_BLOCKS} thread blocks or more, got {filled}: "
            f"smaller ones are left to the cuTile kernels"
        )
    return _Forward(problem, split(problem)).plan()


def _check_split(problem: Problem, config: Split) -> None:
    """Raises ValueError for work left out, done twice or waited for in vain."""
    p, c = problem, config
    chunks = math.ceil(p.seq / CHUNK)
    if c.own_starts and c.segments == 1:
        raise ValueError(f"{c} has a single segment: it starts with the row")
    if c.own_starts:
        whole = c.segments == len(own_starts(chunks, c.chunks_per_segment))
    else:
        whole = (c.segments - 1) * c.chunks_per_segment < chunks <= c.segments * c.chunks_per_segment
    if not whole:
        raise ValueError(f"{c} does not divide the {chunks} chunks of a row: a segment is empty or tokens are left")
    if not _fits(p, c.warpgroups, c.blocks):
        raise ValueError(
            f"{c} does not divide {group_blocks(p)} blocks of a group, with a state in {parts(p)} parts, or its "
            f"warpgroups keep more than {MOST_STATE_ELEMENTS} elements of state"
        )
    shortest = _shortest_segment(p, c.segments, c.chunks_per_segment)
    if c.segments > 1 and not c.own_starts and shortest < shortest_piece(p):
        raise ValueError(
            f"{c} has a segment of {shortest} tokens: its start state takes the room of {shortest_piece(p)} in y"
        )


class _Forward:
    """What the launches of a forward plan have in common."""

    def __init__(self, problem: Problem, config: Split):
        p, c = problem, config
        self.problem, self.config = problem, config
        self.all_blocks = p.heads * (p.head_dim // BLOCK)
        self.blocks_here = c.warpgroups // parts(p) * c.blocks
        self.rows = _rows(p, c.warpgroups, c.blocks)
        self.thread_blocks = self.rows * c.segments if c.segments > 1 else min(self.rows, MULTIPROCESSORS)
        self.operands = plan.scan_operands(p)
        y = Buffer("y", (p.batch, p.seq, p.heads, p.head_dim), p.dtype)
        final = Buffer("final_state", (p.batch, p.heads, p.head_dim, p.state), "float32")
        self.results = (y, final) if p.return_final_state else (y,)
        totals = Buffer("totals", (self.rows, c.segments - 1, self.blocks_here), "float32")
        flags = Buffer("flags", (self.thread_blocks, c.warpgroups), "int32")
        self.passes_states = c.segments > 1 and not c.own_starts
        self.scratch = (totals,) if self.passes_states else (flags,) if self.cuts_rows() else ()

    def plan(self) -> Plan:
        whole = self.walk(self.thread_blocks, False)
        if self.passes_states:
            launches = (self.walk(self.rows * (self.config.segments - 1), True), self.carry(), whole)
        else:
            launches = (self.clear(), whole) if self.cuts_rows() else (whole,)
        # Copies of a walk start at once, so the first kernel of the plan must come after all others.
        launches = (replace(launches[0], pdl=False), *launches[1:])
        return Plan("mamba2_forward", self.operands, self.results, self.scratch, launches, {})

    def cuts_rows(self) -> bool:
        """Whether a row of the line of chunks is divided among thread blocks: kernels' `Pieces::cut`."""
        if self.config.segments > 1:
            return False
        chunks = math.ceil(self.problem.seq / CHUNK)
        cuts = (self.rows * chunks * i // self.thread_blocks % chunks for i in range(self.thread_blocks))
        return any(cut and self.problem.seq - cut * CHUNK >= shortest_piece(self.problem) for cut in cuts)

    def types(self) -> str:
        p = self.problem
        return f"Sizes<{p.batch}, {p.seq}, {p.heads}, {p.groups}, {p.head_dim}, {p.state}, {together(p)}>"

    def division(self, slots: int, stages: int) -> str:
        c = self.config
        lead = LEAD_PERCENT if c.own_starts else 0
        sizes = (c.warpgroups, c.blocks, parts(self.problem), c.segments, c.chunks_per_segment, slots, stages, lead)
        return f"Split<{', '.join(map(str, sizes))}>"

    def walk(self, thread_blocks: int, state_only: bool) -> Launch:
        """Over the chunks of a row or segment: y, or only the state at its end."""
        p, c = self.problem, self.config
        slots, stages, shared_memory = self.shared_memory(state_only)
        flags = (stateless(p), p.param_rows == 1, p.dt_softplus, p.has_dt_bias, p.has_D, p.has_z, p.has_initial_state)
        chosen = ", ".join(str(flag).lower() for flag in (state_only, *flags, p.return_final_state))
        types = f"{CPP_TYPES[p.dtype]}, {CPP_TYPES[p.dt_dtype]}, {self.types()}, {self.division(slots, stages)}"
        return Launch(
            self.kernel(f"forward<{types}, Options<{chosen}>>"),
            (thread_blocks, 1, 1),
            (
                self.channels_map("x"),
                self.group_map("B"),
                self.group_map("C"),
                self.channels_map("z" if p.has_z else "x"),
                self.channels_map("y"),
                *self.arrays("dt", "dt_bias", "A", "D", "initial_state", "y", "totals", "flags", "final_state"),
                *(ScalarArg(limit, "float32") for limit in p.dt_limit),
            ),
            block=(WARPGROUP * (1 + c.warpgroups), 1, 1),
            shared_memory=shared_memory,
            pdl=True,
        )

    def shared_memory(self, state_only: bool) -> tuple[int, int, int]:
        """Tiles of B and C (slots) and chunks of x (stages) that are there at a time, and bytes in all."""
        slot, stage = TILE * padded_state(self.problem) // 64, TILE * self.blocks_here

        def bytes_of(slots: int, stages: int) -> int:
            barriers = 2 * (slots + stages + 1) + self.blocks_here
            tiles = slots * slot + stages * stage + (0 if state_only else 2 * stage)  # the last: S and y
            scalars = stages * self.blocks_here * (STATE_SCALARS if state_only else SCALARS)
            return tiles + scalars + 8 * barriers

        if state_only:
            slots = stages = max(n for n in range(1, MOST_STAGES + 1) if bytes_of(n, n) <= SHARED_MEMORY)
        else:
            slots, stages = max(n for n in (3, 4) if bytes_of(n, 2) <= SHARED_MEMORY), 2
        return slots, stages, bytes_of(slots, stages)

    def carry(self) -> Launch:
        """End states of segments to start states of those that follow."""
        pieces = self.rows * self.blocks_here * BLOCK * padded_state(self.problem) // 4
        return Launch(
            self.kernel(f"carry_states<{self.types()}, {self.division(1, 1)}>"),
            (pieces // CARRY_THREADS, 1, 1),
            (ArrayArg("y"), ArrayArg("totals")),
            block=(CARRY_THREADS, 1, 1),
            pdl=True,
        )

    def clear(self) -> Launch:
        """No state was passed on yet."""
        count = self.thread_blocks * self.config.warpgroups
        return Launch(
            self.kernel("clear_flags"),
            (math.ceil(count / CARRY_THREADS), 1, 1),
            (ArrayArg("flags"), ScalarArg(count, "int32")),
            block=(CARRY_THREADS, 1, 1),
        )

    def kernel(self, expression: str) -> CudaKernel:
        return CudaKernel(FILE, expression, arch_specific=True, archs=ARCHS)

    def arrays(self, *names: str) -> list[Argument]:
        present = {b.name for b in (*self.operands, *self.results, *self.scratch)}
        return [ArrayArg(name if name in present else "A") for name in names]  # the kernel never touches a stand-in

    def channels_map(self, buffer: str) -> TensorMapArg:
        """x, z or y as [batch, seq, blocks, 64]: a chunk of one block is a tile, and a tail past seq reads as zero."""
        shape = (self.problem.batch, self.problem.seq, self.all_blocks, BLOCK)
        return TensorMapArg(buffer, (*self.chunk(), 1, BLOCK), shape=shape, swizzle=128, l2_promotion=128)

    def group_map(self, buffer: str) -> TensorMapArg:
        """B or C: a chunk of one group is a tile for every 64 of the state."""
        return TensorMapArg(buffer, (*self.chunk(), 1, 64), swizzle=128, l2_promotion=128)

    def chunk(self) -> tuple[int, int]:
        """Batch rows and tokens of each."""
        return together(self.problem), CHUNK // together(self.problem)
