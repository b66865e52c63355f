"""Which kernels run the backward of a Mamba-2 scan, with which tiles, in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jax_ssd.mamba2.plan import (
    ITEM_SIZE,
    PROGRAMS,
    SMALLEST_CHUNK,
    SMALLEST_STATE_TILE,
    SMALLEST_TILE,
    STATE_TILE,
    check_supported,
    factor_type,
    passes,
    power_of_two,
    prepare,
    prepare_heads,
    scan_operands,
)
from jax_ssd.mamba2.problem import Problem
from jax_ssd.plans import ArrayArg, Buffer, ConstantArg, Launch, Plan, ScalarArg
from jax_ssd.specs import CuTileKernel, row_major

LARGEST_HEAD_DIM = 256
LARGEST_STATE_TILE = 2 * STATE_TILE  # of the [state, head_dim] adjoint in the registers of one program
LARGEST_CHUNK = 64
MOST_SEGMENTS = 64
HEAD_AXIS = {
    **dict.fromkeys(("x", "dy", "z", "dx", "dz", "B", "C", "step_gradient", "decay_gradient"), 2),
    **dict.fromkeys(("D", "initial_state", "dfinal", "dinitial_state", "step", "decay", "D_partial"), 1),
    **dict.fromkeys(("dB", "dC"), 2),
    **dict.fromkeys(("B_partial", "C_partial"), 3),
}
GROUPED = ("B", "C", "dB", "dC", "B_partial", "C_partial")  # theirs is an axis of groups
JOIN_ELEMENTS = 1024  # of a tile that one program takes across all segments
DT_TOKENS, DT_HEADS = 256, 16  # tile of the kernels that cross between [seq, heads] and [heads, seq]


@dataclass(frozen=True)
class BackwardConfig:
    """Everything about a backward that changes its speed and memory, but not its result beyond rounding.

    chunk: tokens per chunk, a power of two. segments: pieces of a row that are walked at the same time.
    head_slices: the heads are taken in so many turns, which share the memory for chunk states; a slice is a part of a
      group or some whole groups. head_blocks: so many programs share the heads of a group and slice.
    p_blocks, n_blocks: a program's tiles have this part of head_dim or of state, both rounded up to powers of two.
    """

    chunk: int = 64
    segments: int = 1
    head_slices: int = 1
    head_blocks: int = 1
    p_blocks: int = 1
    n_blocks: int = 1
    states_occupancy: int | None = 2
    tokens_occupancy: int | None = 2
    groups_occupancy: int | None = 2
    latency: int = 2

    def __post_init__(self):
        for name in ("chunk", "p_blocks", "n_blocks"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} is not a power of two.")
        for name in ("segments", "head_slices", "head_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is less than 1.")


def heuristic(problem: Problem) -> BackwardConfig:
    """A configuration without measuring: enough programs to fill a large GPU, in as little memory as that allows."""
    chunk = min(problem.chunk_size or LARGEST_CHUNK, LARGEST_CHUNK, power_of_two(problem.seq, SMALLEST_CHUNK))
    if factor_type(problem) == "float32":
        chunk = min(chunk, 32)  # with more, tileiras 13.4 spills, and on sm_80 to sm_89 fails
    width, state = power_of_two(problem.head_dim, SMALLEST_TILE), power_of_two(problem.state, SMALLEST_STATE_TILE)
    p_blocks = min(max(1, width * state // STATE_TILE), width // SMALLEST_TILE)
    n_blocks = max(1, state // 128)
    chunks = math.ceil(problem.seq / chunk)
    slices = _head_slices(problem, chunks)
    programs = problem.batch * problem.heads // slices * p_blocks
    segments = max(1, min(PROGRAMS // programs, chunks // 4, MOST_SEGMENTS))
    return BackwardConfig(chunk, segments, slices, 1, p_blocks, n_blocks)


def _head_slices(problem: Problem, chunks: int) -> int:
    """The fewest slices whose chunk states stay below half of what the backward reads and writes anyway."""
    if chunks == 1:
        return 1
    tokens = problem.batch * problem.seq
    size = ITEM_SIZE[problem.dtype]
    states = 2 * problem.batch * chunks * problem.state * problem.head_dim
    per_head = states * ITEM_SIZE[factor_type(problem)]
    arrays = (5 if problem.has_z else 3) * problem.heads * problem.head_dim + 4 * problem.groups * problem.state
    budget = tokens * arrays * size // 2
    allowed = [n for n in range(1, problem.heads + 1) if _slice_heads(problem, n)]
    return next((n for n in allowed if per_head * (problem.heads // n) <= budget), allowed[-1])


def _slice_heads(problem: Problem, slices: int) -> int:
    """Heads per slice, 0 if so many slices would neither split groups evenly nor keep them whole."""
    heads, per_group = problem.heads // slices, problem.heads // problem.groups
    whole = problem.heads % slices == 0 and (heads % per_group == 0 or per_group % heads == 0)
    return heads if whole else 0


def backward(problem: Problem, config: BackwardConfig | None = None) -> Plan:
    """The plan of the backward: gradients of every operand but runs, in the operands' order.

    Raises NotImplementedError for what the kernels do not do, ValueError for a configuration that does not fit.
    """
    check_supported(problem)
    if problem.head_dim > LARGEST_HEAD_DIM:
        raise NotImplementedError(
            f"the cuTile kernels of the backward take a head_dim up to {LARGEST_HEAD_DIM}, got {problem.head_dim}; "
            "use implementation='xla'"
        )
    return _Backward(problem, config or heuristic(problem)).plan()


class _Backward:
    """The sizes of one backward, and its launches."""

    def __init__(self, problem: Problem, config: BackwardConfig):
        self.problem, self.config = problem, config
        self.Q, self.chunks = config.chunk, math.ceil(problem.seq / config.chunk)
        self.width = power_of_two(problem.head_dim, SMALLEST_TILE)
        self.P, self.N = self.width // config.p_blocks, power_of_two(problem.state, SMALLEST_STATE_TILE)
        self.p_blocks = math.ceil(problem.head_dim / self.P)
        self.segment_chunks = math.ceil(self.chunks / config.segments)
        self.segments = math.ceil(self.chunks / self.segment_chunks)
        self.heads_per_group = problem.heads // problem.groups
        self.slice_heads = _slice_heads(problem, config.head_slices)
        self.group_heads = min(self.slice_heads, self.heads_per_group)
        self.padded = self.chunks * self.Q
        self.has_state = self.chunks > 1 or problem.has_initial_state
        self.has_adjoint = self.chunks > 1 or problem.has_dfinal
        self.passes = passes(problem)
        self.turns = max(1, self.heads_per_group // self.slice_heads) if self.slice_heads else 1
        self.tiles = math.ceil(problem.seq / DT_TOKENS)
        self.partial = config.head_blocks > 1 or self.turns > 1
        self._check()

    def _check(self):
        problem, config = self.problem, self.config
        if not self.slice_heads:
            raise ValueError(
                f"head_slices={config.head_slices} does not cut {problem.heads} heads in {problem.groups} groups into "
                f"parts of a group or whole groups."
            )
        if self.group_heads % config.head_blocks:
            raise ValueError(f"head_blocks={config.head_blocks} does not divide {self.group_heads} heads.")
        if min(self.Q, self.P, self.N // config.n_blocks) < SMALLEST_TILE:
            raise ValueError(
                f"{config.chunk=}, {config.p_blocks=} or {config.n_blocks=} leaves tiles below {SMALLEST_TILE}."
            )
        if self.N * self.P > LARGEST_STATE_TILE:
            raise NotImplementedError(
                f"a program of the backward keeps a tile of up to {LARGEST_STATE_TILE} elements of state x head_dim in "
                f"registers, got {self.N} x {self.P} = {self.N * self.P}"
            )

    def operands(self) -> tuple[Buffer, ...]:
        p = self.problem
        state = (p.batch, p.heads, p.head_dim, p.state)
        cotangents = [Buffer("dy", (p.batch, p.seq, p.heads, p.head_dim), p.dtype)]
        if p.has_dfinal:
            cotangents.append(Buffer("dfinal", state, "float32"))
        return (*scan_operands(p), *cotangents)

    def results(self) -> tuple[Buffer, ...]:
        p = self.problem
        per_row = ("A", "D", "dt_bias")
        return tuple(
            Buffer("d" + b.name, (p.batch, *b.shape[1:]) if b.name in per_row else b.shape, b.dtype)
            for b in scan_operands(p)
            if b.name != "runs"
        )

    def scratch(self) -> tuple[Buffer, ...]:
        p, f32 = self.problem, "float32"
        rows = (p.batch, p.heads, self.padded)
        chunk_states = (p.batch, self.slice_heads, self.chunks, p.state, p.head_dim)
        segment_states = (p.batch, self.slice_heads, self.segments - 1, p.state, p.head_dim)
        boundaries = (p.batch, self.slice_heads, self.segments, p.state, p.head_dim)
        groups = (self.config.head_blocks, p.batch, p.seq, p.groups, p.state)
        several, blocks = self.segments > 1, self.p_blocks
        buffers = [
            (True, Buffer("step", rows, f32)),
            (True, Buffer("decay", rows, f32)),
            (several, Buffer("segment_ends", segment_states, f32)),
            (several, Buffer("segment_adjoints", segment_states, f32)),
            (several, Buffer("starts", boundaries, f32)),
            (several, Buffer("stops", boundaries, f32)),
            (several, Buffer("end_totals", segment_states[:3], f32)),
            (several, Buffer("adjoint_totals", segment_states[:3], f32)),
            (self.has_state, Buffer("states", chunk_states, factor_type(p))),
            (self.has_adjoint, Buffer("adjoints", chunk_states, factor_type(p))),
            (True, Buffer("step_gradient", (blocks, *rows), f32)),
            (True, Buffer("decay_gradient", (blocks, *rows), f32)),
            (p.has_D, Buffer("D_partial", (p.batch, p.heads, self.chunks, p.head_dim), f32)),
            (True, Buffer("A_partial", (p.batch, self.tiles, p.heads), f32)),
            (p.has_dt_bias, Buffer("bias_partial", (p.batch, self.tiles, p.heads), f32)),
            (self.partial, Buffer("B_partial", groups, f32)),
            (self.partial, Buffer("C_partial", groups, f32)),
        ]
        return tuple(buffer for present, buffer in buffers if present)

    def plan(self) -> Plan:
        self.buffers = {b.name: b for b in (*self.operands(), *self.results(), *self.scratch())}
        launches = [prepare(self.problem, self.Q, prepare_heads(self.problem))]
        for turn in range(self.config.head_slices):
            launches += self.slice_launches(turn)
        launches += self.sums()
        return Plan("mamba2_backward", self.operands(), self.results(), self.scratch(), tuple(launches), {})

    def launch(self, module: str, function: str, blocks: int, arguments: list, occupancy: int | None = None) -> Launch:
        """arguments: a name is a whole buffer, a plain value a constant."""
        encoded = []
        for argument in arguments:
            if isinstance(argument, str):
                argument = self.view(argument, 0, 1)
            elif isinstance(argument, (int, float)):
                argument = ConstantArg(argument)
            encoded.append(argument)
        return Launch(CuTileKernel(module, function, occupancy=occupancy), (blocks, 1, 1), tuple(encoded))

    def view(self, name: str, turn: int, turns: int) -> ArrayArg:
        """One of so many equal slices of a buffer along its head or group axis; all of it if it has none.

        An operand that is absent is stood in for by x: the kernel's flags keep it from being read.
        """
        buffer = self.buffers.get(name, self.buffers["x"])
        axis = HEAD_AXIS.get(buffer.name)
        if axis is None or turns == 1:
            return ArrayArg(buffer.name)
        shape, strides = list(buffer.shape), row_major(buffer.shape)
        if buffer.name in GROUPED:
            part, first = max(1, shape[axis] // turns), turn * shape[axis] // turns
        else:
            part, first = shape[axis] // turns, turn * (shape[axis] // turns)
        shape[axis] = part
        return ArrayArg(buffer.name, tuple(shape), strides, first * strides[axis])

    def dt_tile(self) -> tuple[int, int]:
        """Heads per tile of the kernels that read dt, and how many such tiles cover all heads."""
        heads = min(DT_HEADS, power_of_two(self.problem.heads))
        return heads, math.ceil(self.problem.heads / heads)

    def slice_launches(self, turn: int) -> Iterator[Launch]:
        """The launches that take one slice of heads from segment passes to dB and dC."""
        p, config = self.problem, self.config

        def views(*names: str) -> list[ArrayArg]:
            return [self.view(name, turn, config.head_slices) for name in names]

        rows = p.batch * self.slice_heads * self.p_blocks
        tiles, heads = [self.Q, self.P, self.N], self.slice_heads
        sizes = [*tiles, self.p_blocks, heads, self.chunks, self.segments, self.segment_chunks, self.group_heads]
        hints = [p.has_runs, self.passes, config.latency]
        if self.segments > 1:
            blocks = (self.segments - 1) * rows
            theirs = [*tiles, heads, self.group_heads, self.p_blocks, self.chunks, self.segment_chunks, p.seq]
            arrays = views("x", "B", "step", "decay", "runs", "segment_ends", "end_totals")
            arguments = [*arrays, *theirs, *hints, False]  # products are not swapped
            yield self.launch("segments", "segment_state", blocks, arguments, config.states_occupancy)
            arrays = views("dy", "z", "C", "decay", "runs", "segment_adjoints", "adjoint_totals")
            arguments = [*arrays, *sizes, p.has_z, *hints]
            yield self.launch("adjoint", "segment_adjoint", blocks, arguments, config.states_occupancy)
            yield self.join_launch(views)
        several = self.segments > 1
        if self.has_state:
            arrays = views("x", "B", "step", "decay", "runs", "starts" if several else "initial_state", "states")
            arguments = [*arrays, *sizes, several or p.has_initial_state, *hints]
            yield self.launch("adjoint", "chunk_states", self.segments * rows, arguments, config.states_occupancy)
        inputs = views("x", "dy", "z", "B", "C", "step", "decay", "D", "runs")
        inputs += views("stops" if several else "dfinal", "states")
        outputs = views("adjoints", "dx", "dz", "step_gradient", "decay_gradient")
        flags = [p.param_rows == 1, p.has_D, p.has_z, self.has_state, self.has_adjoint, several or p.has_dfinal]
        flags += [p.has_initial_state]
        arguments = [*inputs, *outputs, *views("dinitial_state"), *sizes, *flags, *hints]
        yield self.launch("adjoint", "token_gradients", self.segments * rows, arguments, config.tokens_occupancy)
        yield from self.group_launches(turn, views)

    def join_launch(self, views: Callable[..., list[ArrayArg]]) -> Launch:
        """From segments walked alone to the states and adjoints between them."""
        p = self.problem
        arrays = views("segment_ends", "end_totals", "initial_state", "starts")
        arrays += views("segment_adjoints", "adjoint_totals", "dfinal", "stops")
        width = self.width
        height = min(self.N, max(1, JOIN_ELEMENTS // width))
        blocks = math.ceil(p.state / height)
        sizes = [width, height, blocks, self.slice_heads, self.segments]
        arguments = [*arrays, *sizes, p.has_initial_state, p.has_dfinal, p.has_runs]
        return self.launch("adjoint", "join_segments", 2 * blocks * p.batch * self.slice_heads, arguments)

    def group_launches(self, turn: int, views: Callable[..., list[ArrayArg]]) -> Iterator[Launch]:
        """dB and dC: into the results when the last heads of a group are added, into partial sums before."""
        p, config = self.problem, self.config
        groups, part = self.slice_heads // self.group_heads, turn % self.turns
        complete = config.head_blocks == 1 and part == self.turns - 1
        height = self.N // config.n_blocks
        n_blocks = math.ceil(p.state / height)
        blocks = n_blocks * config.head_blocks * groups * self.chunks * p.batch
        sizes = [self.Q, self.width, height, n_blocks, self.chunks]
        sizes += [self.group_heads, config.head_blocks, groups]
        # Not a constant: the compiler would unroll the loop over heads, which takes it minutes for some targets.
        block_heads = ScalarArg(self.group_heads // config.head_blocks, "int32")
        for function, name, other, states, present in (
            ("source_gradient", "B", "C", "adjoints", self.has_adjoint),
            ("target_gradient", "C", "B", "states", self.has_state),
        ):
            partial = views(f"{name}_partial")
            output = [self.one_block(view) for view in views(f"d{name}")] if complete else partial
            arrays = views("x", "dy", "z", other, "step", "decay", "runs", states)
            arrays += [*(partial if part else views("step")), *output]
            flags = [p.has_z, present, p.has_runs, part > 0, self.passes, config.latency]
            if name == "C":
                arrays, flags = [*arrays, *views("D_partial")], [p.has_D, *flags]
            yield self.launch(
                "gradients", function, blocks, [*arrays, block_heads, *sizes, *flags], config.groups_occupancy
            )

    def one_block(self, view: ArrayArg) -> ArrayArg:
        """dB or dC with a leading axis of one head block."""
        shape = tuple(view.shape or self.buffers[view.buffer].shape)
        strides = tuple(view.strides or row_major(shape))
        return ArrayArg(view.buffer, (1, *shape), (shape[0] * strides[0], *strides), view.offset)

    def sums(self) -> Iterator[Launch]:
        """What is left when every slice is done: sums over head blocks, dt and the parameters."""
        p = self.problem
        if self.config.head_blocks > 1:
            size = p.batch * p.seq * p.groups * p.state
            for name in ("B", "C"):
                partial = ArrayArg(f"{name}_partial", (self.config.head_blocks, size))
                arguments = [partial, ArrayArg(f"d{name}", (size,)), self.config.head_blocks, 1024]
                yield self.launch("gradients", "sum_head_blocks", math.ceil(size / 1024), arguments)
        heads, blocks = self.dt_tile()
        low, high = map(float, p.dt_limit)
        bias, blocks_p = p.has_dt_bias, self.p_blocks
        arguments = ["dt", "A", "dt_bias", "runs", "step", "step_gradient", "decay_gradient", "ddt", "A_partial"]
        arguments += ["bias_partial", DT_TOKENS, heads, blocks, self.tiles, blocks_p, p.param_rows == 1, p.dt_softplus]
        arguments += [low, high, bias, p.has_runs]
        yield self.launch("gradients", "step_gradients", p.batch * self.tiles * blocks, arguments)
        arguments = ["A_partial", "bias_partial", "D_partial", "dA", "ddt_bias", "dD", self.width]
        arguments += [p.heads, self.tiles, self.chunks, bias, p.has_D]
        yield self.launch("gradients", "parameter_gradients", p.batch * p.heads, arguments)
