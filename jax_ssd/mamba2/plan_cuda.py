"""The forward scan of Mamba-2 as CUDA C++ kernels for sm_90: kernels/cuda/mamba2_forward.cu.

`forward` turns a Problem into a launch plan and refuses with NotImplementedError what those kernels do not do, or what
the cuTile kernels do faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
SCALARS = 4 * CHUNK * 4  # bytes of the decays of one chunk of one block
WARPGROUP = 128  # threads
REGISTERS = 65_536  # of a multiprocessor
COPY_REGISTERS, COMPUTE_REGISTERS = 24, 240  # of a thread that copies, and of one that computes
MOST_BLOCKS = 4  # of a thread block: each of the four copying warps prepares the scalars of one
STATES = (64, 128, 256)  # those that were run
MOST_STATE_ELEMENTS = 2 * BLOCK * 128  # of one warpgroup, half of its registers
SHARED_MEMORY = 232_448  # bytes, all that one thread block can get
MOST_STAGES = 4
SHORTEST_SEQ = 48  # shorter rows leave most of a chunk empty: smaller tiles are faster
SHORTEST_SEGMENT = 4  # chunks
FEWEST_THREAD_BLOCKS = MULTIPROCESSORS // 2  # with fewer the cuTile kernels, which divide the heads finer, are faster
# Of the walk of a segment that computes y: what the walk that finds its end state costs, and what else segments cost.
STATE_COST, SEGMENT_COST = 0.5, 4
CARRY_THREADS = 128


@dataclass(frozen=True)
class Split:
    """How the work is divided. warpgroups: of a thread block, those that compute; blocks: of 64 channels, of each.

    segments: of each row, chunks_per_segment long. With one, rows are lined up and cut into equal ranges.
    """

    warpgroups: int
    blocks: int
    segments: int
    chunks_per_segment: int

    def __post_init__(self):
        for name in ("warpgroups", "blocks", "segments", "chunks_per_segment"):
            if getattr(self, name) < 1:
                raise ValueError(f"Split.{name} must be at least 1, got {getattr(self, name)}.")
        wanted = WARPGROUP * (COPY_REGISTERS + self.warpgroups * COMPUTE_REGISTERS)
        if wanted > REGISTERS:  # they would wait for each other's registers forever
            raise ValueError(
                f"Split.warpgroups={self.warpgroups} wants {wanted} registers, a multiprocessor has {REGISTERS}."
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
    if p.state not in STATES:
        raise NotImplementedError(
            f"the CUDA C++ kernels take a state size of {', '.join(map(str, STATES))}, got {p.state}"
        )
    if group_blocks(p) % 2:
        raise NotImplementedError(
            f"the CUDA C++ kernels take an even number of {BLOCK}-channel blocks per group, got {group_blocks(p)}"
        )
    if p.seq < SHORTEST_SEQ:
        raise NotImplementedError(
            f"the CUDA C++ kernels take rows of {SHORTEST_SEQ} tokens or more, got {p.seq}: shorter ones are faster in "
            f"smaller tiles"
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


def split(problem: Problem) -> Split:
    """The heuristic."""
    p = problem
    blocks = 2 if 2 * BLOCK * p.state <= MOST_STATE_ELEMENTS and group_blocks(p) % 4 == 0 else 1
    rows = p.batch * p.heads * (p.head_dim // BLOCK) // (2 * blocks)
    chunks = math.ceil(p.seq / CHUNK)
    segments = max(1, min(MULTIPROCESSORS // rows, chunks // SHORTEST_SEGMENT))
    per_segment = math.ceil(chunks / segments)
    if per_segment * (1 + STATE_COST) + SEGMENT_COST >= chunks:
        per_segment = chunks
    return Split(2, blocks, math.ceil(chunks / per_segment), per_segment)


def forward(problem: Problem, config: Split | None = None) -> Plan:
    """The scan: y, and the final state if it is asked for.

    Raises NotImplementedError for what the kernels do not do, and, unless a `config` is given, for calls too small to
    fill the GPU; ValueError for a `config` that does not divide this problem.
    """
    check_supported(problem)
    if config is not None:
        _check_split(problem, config)
        return _Forward(problem, config).plan()
    chosen = _Forward(problem, split(problem))
    if chosen.thread_blocks < FEWEST_THREAD_BLOCKS:
        raise NotImplementedError(
            f"the CUDA C++ kernels take calls that fill {FEWEST_THREAD_BLOCKS} thread blocks or more, got "
            f"{chosen.thread_blocks}: smaller ones are faster in smaller pieces"
        )
    return chosen.plan()


def _check_split(problem: Problem, config: Split) -> None:
    """Raises ValueError for work left out, done twice or waited for in vain."""
    p, c = problem, config
    chunks = math.ceil(p.seq / CHUNK)
    if not (c.segments - 1) * c.chunks_per_segment < chunks <= c.segments * c.chunks_per_segment:
        raise ValueError(f"{c} does not divide the {chunks} chunks of a row: a segment is empty or tokens are left")
    if group_blocks(p) % (c.warpgroups * c.blocks):
        raise ValueError(f"{c} does not divide {group_blocks(p)} blocks of a group")
    if c.blocks * BLOCK * p.state > MOST_STATE_ELEMENTS:
        raise ValueError(
            f"{c} gives a warpgroup {c.blocks * BLOCK * p.state} elements of state, {MOST_STATE_ELEMENTS} fit its "
            f"registers"
        )


class _Forward:
    """What the launches of a forward plan have in common."""

    def __init__(self, problem: Problem, config: Split):
        p, c = problem, config
        self.problem, self.config = problem, config
        self.all_blocks = p.heads * (p.head_dim // BLOCK)
        self.blocks_here = c.warpgroups * c.blocks
        self.rows = p.batch * self.all_blocks // self.blocks_here
        self.thread_blocks = self.rows * c.segments if c.segments > 1 else min(self.rows, MULTIPROCESSORS)
        self.operands = plan.scan_operands(p)
        y = Buffer("y", (p.batch, p.seq, p.heads, p.head_dim), p.dtype)
        final = Buffer("final_state", (p.batch, p.heads, p.head_dim, p.state), "float32")
        self.results = (y, final) if p.return_final_state else (y,)
        slots = (self.rows * (c.segments - 1) if c.segments > 1 else self.thread_blocks, self.blocks_here)
        self.scratch = (
            Buffer("states", (*slots, BLOCK * p.state), "float32"),
            Buffer("totals", slots, "float32"),
            Buffer("flags", (self.thread_blocks, c.warpgroups), "int32"),
        )

    def plan(self) -> Plan:
        if self.config.segments > 1:
            segmented = self.rows * (self.config.segments - 1)
            launches = (self.walk(segmented, True), self.carry(), self.walk(self.thread_blocks, False))
        else:
            launches = (self.clear(), self.walk(self.thread_blocks, False))
        return Plan("mamba2_forward", self.operands, self.results, self.scratch, launches, {})

    def walk(self, thread_blocks: int, state_only: bool) -> Launch:
        """Over the chunks of a row or segment: y, or only the state at its end."""
        p, c = self.problem, self.config
        tiles = p.state // 64
        stage = TILE * (tiles * (1 if state_only else 2) + self.blocks_here) + SCALARS * self.blocks_here
        kept = 8 * self.blocks_here + (0 if state_only else 2 * TILE * self.blocks_here)
        stages = min(MOST_STAGES, (SHARED_MEMORY - kept) // (stage + 16))
        sizes = f"Sizes<{p.batch}, {p.seq}, {p.heads}, {p.groups}, {p.head_dim}, {p.state}>"
        division = f"Split<{c.warpgroups}, {c.blocks}, {c.segments}, {c.chunks_per_segment}, {stages}>"
        flags = (p.param_rows == 1, p.dt_softplus, p.has_dt_bias, p.has_D, p.has_z, p.has_initial_state)
        chosen = ", ".join(str(flag).lower() for flag in (state_only, *flags, p.return_final_state))
        types = f"{CPP_TYPES[p.dtype]}, {CPP_TYPES[p.dt_dtype]}"
        return Launch(
            self.kernel(f"forward<{types}, {sizes}, {division}, Options<{chosen}>>"),
            (thread_blocks, 1, 1),
            (
                self.channels_map("x"),
                self.group_map("B"),
                self.group_map("C"),
                self.channels_map("z" if p.has_z else "x"),
                self.channels_map("y"),
                *self.arrays("dt", "dt_bias", "A", "D", "initial_state", "states", "totals", "flags", "final_state"),
                *(ScalarArg(limit, "float32") for limit in p.dt_limit),
            ),
            block=(WARPGROUP * (1 + c.warpgroups), 1, 1),
            shared_memory=stages * (stage + 16) + kept,
            pdl=not state_only,  # copies start at once, so the first kernel of the plan must come after all others
        )

    def carry(self) -> Launch:
        """End states of segments to start states of those that follow."""
        slots, size = self.config.segments - 1, BLOCK * self.problem.state
        return Launch(
            self.kernel(f"carry_states<{slots}, {self.blocks_here}, {size}>"),
            (self.rows * self.blocks_here * size // 4 // CARRY_THREADS, 1, 1),
            (ArrayArg("states"), ArrayArg("totals")),
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
        return TensorMapArg(buffer, (1, CHUNK, 1, BLOCK), shape=shape, swizzle=128, l2_promotion=128)

    def group_map(self, buffer: str) -> TensorMapArg:
        """B or C: a chunk of one group is a tile for every 64 of the state."""
        return TensorMapArg(buffer, (1, CHUNK, 1, 64), swizzle=128, l2_promotion=128)
