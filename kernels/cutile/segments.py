"""Sequences cut into segments, so that one long row fills the GPU: states across chunks and across segments.

A segment's end state from a zero start, and its total log2 decay, suffice to start every later segment:
state(s + 1) = exp2(total(s)) * state(s) + end(s). Inside kernels a state is [state, head_dim], the transpose of the
public one: it is the layout in which B^T X accumulates it and C reads it. Shapes are those without SWAP, which
transposes every matrix, see `precision`.
"""

import cuda.tile as ct

from .decay import INF, ZERO, exp2, run_numbers, source_exponent
from .precision import column, dot, factor, sides

Const = ct.Constant


def chunk_window(row, chunk, head, block, Q, WIDTH, TRANSPOSED):
    """Where a chunk lies in [batch, seq, heads or groups, width]: index, shape and order of axes."""
    if TRANSPOSED:
        window = (row, block, head, chunk), (1, WIDTH, 1, Q), (0, 3, 2, 1)
    else:
        window = (row, chunk, head, block), (1, Q, 1, WIDTH), (0, 1, 2, 3)
    return window


def load_chunk(array, row, chunk, head, block, Q, WIDTH, LATENCY, TRANSPOSED=False):
    """A chunk as [Q, WIDTH], or [WIDTH, Q]; zero past the end."""
    index, shape, order = chunk_window(row, chunk, head, block, Q, WIDTH, TRANSPOSED)
    tile = ct.load(array, index=index, shape=shape, order=order, padding_mode=ZERO, latency=LATENCY)
    return tile.reshape(sides(Q, WIDTH, TRANSPOSED))


def store_chunk(array, row, chunk, head, block, tile, Q, WIDTH, LATENCY, TRANSPOSED):
    """The tile to where `load_chunk` finds it; a LATENCY of 0 is the compiler's choice."""
    index, shape, order = chunk_window(row, chunk, head, block, Q, WIDTH, TRANSPOSED)
    ct.store(array, index=index, tile=tile.reshape(shape), order=order, latency=LATENCY if LATENCY > 0 else None)


def load_real(array, row, chunk, head, block, real, Q, WIDTH, HAS_RUNS, LATENCY):
    """The same with zeros for padding tokens, which may hold NaN; real [Q] is read with HAS_RUNS."""
    tile = load_chunk(array, row, chunk, head, block, Q, WIDTH, LATENCY)
    if HAS_RUNS:
        tile = ct.where(real[:, None], tile, 0.0).astype(array.dtype)
    return tile


def load_scalars(array, row, head, chunk, Q):
    """A chunk of step or decay [batch, heads, padded seq]: [Q]."""
    return ct.load(array, index=(row, head, chunk), shape=(1, 1, Q)).reshape((Q,))


def last_of(decay, Q):
    """The running decay at the chunk's end: [1]."""
    return ct.extract(decay, index=(Q - 1,), shape=(1,))


def run_before(runs, row, chunk, Q):
    """The run in which the token before a chunk lies, [1]; run 0 at the start of the row."""
    position = max(chunk * Q - 1, 0)
    run = ct.load(runs, index=(row, position), shape=(1, 1)).reshape((1,))
    return ct.where(chunk > 0, ct.where(run < 0, -1 - run, run), 0)


def chunks_of(segment, CHUNKS_PER_SEGMENT, CHUNKS):
    """How many chunks a segment has: the last one may be short."""
    return min(CHUNKS_PER_SEGMENT, CHUNKS - segment * CHUNKS_PER_SEGMENT)


def is_finite(state):
    """Whether a tile holds neither infinities nor NaN: a 0-d boolean."""
    return ct.max(ct.where(ct.abs(state) < INF, 0, 1)) == 0


def leaving_weights(step, decay, last, PASSES):
    """What of each token's x (outer) B is left at the chunk's end: step * exp2(last - decay), [Q]."""
    if PASSES < 3:
        weights = exp2(last - source_exponent(step, decay))
    else:
        weights = step * exp2(last - decay)
    return weights


def advance(state, b, x, step, decay, last, PASSES, SWAP=False):
    """The state [N, P] after a chunk: b [N, Q], x [Q, P], step, decay [Q], last [1]."""
    # x rather than b is scaled: it is the smaller tile.
    scaled = x.astype(ct.float32) * column(leaving_weights(step, decay, last, PASSES), SWAP)
    scaled = factor(scaled, x.dtype, PASSES)
    return dot(b, scaled, exp2(last) * state, PASSES, SWAP)


def advance_in_runs(state, b, x, step, decay, last, number, end, before, PASSES, SWAP=False):
    """The same in packed sequences: only the tokens of the last run enter, and the old state if it is of that run.

    What does not enter is multiplied by zero, so a NaN among it shows in the result: see `advance_token`.
    """
    into = ct.where(number == end, leaving_weights(step, decay, last, PASSES), 0.0)
    scaled = factor(x.astype(ct.float32) * column(into, SWAP), x.dtype, PASSES)
    return dot(b, scaled, ct.where(end == before, exp2(last), 0.0) * state, PASSES, SWAP)


def load_token(array, row, t, head, block, WIDTH):
    """One token of [batch, seq, heads or groups, width], float32: [1, WIDTH]."""
    tile = ct.load(array, index=(row, t, head, block), shape=(1, 1, 1, WIDTH), padding_mode=ZERO, latency=1)
    return tile.reshape((1, WIDTH)).astype(ct.float32)


def advance_token(state, xt, bt, step, decay, row, head, t, restarts):
    """The state [N, P] after one token, as the recurrence says; xt [1, P], bt [N, 1], restarts: decay does so at t."""
    size = ct.load(step, index=(row, head, t), shape=(1, 1, 1), latency=1).reshape((1, 1))
    total = ct.load(decay, index=(row, head, t), shape=(1, 1, 1), latency=1).reshape((1, 1))
    earlier = ct.load(decay, index=(row, head, max(t - 1, 0)), shape=(1, 1, 1), latency=1).reshape((1, 1))
    return exp2(ct.where(restarts, total, total - earlier)) * state + bt * (size * xt)


def run_of_token(runs, row, t):
    """The run of a token and whether it is real: both [1, 1]."""
    run = ct.load(runs, index=(row, t), shape=(1, 1), latency=1)
    return ct.where(run < 0, -1 - run, run), run >= 0


def start_state(initial, ends, totals, row, head, block, segment, SEGMENTS, N, P, HAS_INITIAL, HAS_RUNS, SWAP):
    """The state [N, P] in which a segment starts: initial [b, h, p, n], ends and totals from `segment_state`."""
    shape, index = sides(N, P, SWAP), sides(0, block, SWAP)
    if HAS_INITIAL:
        order = (0, 1, *sides(3, 2, SWAP))
        state = ct.load(
            initial, index=(row, head, *index), shape=(1, 1, *shape), order=order, padding_mode=ZERO
        ).reshape(shape)
    else:
        state = ct.full(shape, 0.0, dtype=ct.float32)
    if SEGMENTS > 1:
        for s in range(segment):
            total = ct.load(totals, index=(row, head, s), shape=(1, 1, 1)).reshape((1, 1))
            end = ct.load(ends, index=(row, head, s, *index), shape=(1, 1, 1, *shape), padding_mode=ZERO).reshape(shape)
            state = exp2(total) * state
            if HAS_RUNS:
                state = ct.where(total == -INF, 0.0, state)  # a run starts inside: whatever came before it is gone
            state = state + end
    return state


@ct.kernel
def segment_state(
    x,
    B,
    step,
    decay,
    runs,
    ends,
    totals,
    Q: Const[int],
    P: Const[int],
    N: Const[int],
    HEADS: Const[int],
    HEADS_PER_GROUP: Const[int],
    BLOCKS: Const[int],
    CHUNKS: Const[int],
    CHUNKS_PER_SEGMENT: Const[int],
    SEQ: Const[int],
    HAS_RUNS: Const[bool],
    PASSES: Const[int],
    LATENCY: Const[int],
    SWAP: Const[bool],
):
    """Each segment's end state from a zero start, and its total log2 decay: -inf if a run starts inside.

    ends [batch, heads, segments - 1, state, head_dim] (with SWAP head_dim, state), totals [batch, heads, segments - 1],
    float32: the last segment's is never needed. One program per (row, segment, head, head_dim block); neighbours share
    B.
    """
    pid = ct.bid(0)
    block = pid % BLOCKS
    head = pid // BLOCKS % HEADS
    segment = pid // (BLOCKS * HEADS) % ends.shape[2]
    row = pid // (BLOCKS * HEADS) // ends.shape[2]
    group = head // HEADS_PER_GROUP
    first = segment * CHUNKS_PER_SEGMENT
    state = ct.full(sides(N, P, SWAP), 0.0, dtype=ct.float32)
    total = ct.full((1,), 0.0, dtype=ct.float32)
    if HAS_RUNS:
        entered = run_before(runs, row, first, Q)
        before = entered
    for i in range(CHUNKS_PER_SEGMENT):
        chunk = first + i
        xt = load_chunk(x, row, chunk, head, block, Q, P, LATENCY, SWAP)
        bt = load_chunk(B, row, chunk, group, 0, Q, N, LATENCY, not SWAP)
        steps, decays = load_scalars(step, row, head, chunk, Q), load_scalars(decay, row, head, chunk, Q)
        last = last_of(decays, Q)
        total = total + last
        if HAS_RUNS:
            number, _, end = run_numbers(runs, row, chunk, Q, SEQ)
            state = advance_in_runs(state, bt, xt, steps, decays, last, number, end, before, PASSES, SWAP)
            before = end
        else:
            state = advance(state, bt, xt, steps, decays, last, PASSES, SWAP)
    if HAS_RUNS:
        total = ct.where(before == entered, total, -INF)
        if not is_finite(state):
            state = ct.full(sides(N, P, SWAP), 0.0, dtype=ct.float32)
            before = entered.reshape((1, 1))
            for t in range(first * Q, (first + CHUNKS_PER_SEGMENT) * Q):
                number, real = run_of_token(runs, row, t)
                starts = number != before
                state = ct.where(starts, 0.0, state)
                xt = load_token(x, row, t, head, block, P).reshape(sides(1, P, SWAP))
                bt = load_token(B, row, t, group, 0, N).reshape(sides(N, 1, SWAP))
                restarts = starts | (ct.full((1, 1), t % Q, dtype=ct.int32) == 0)
                state = ct.where(real, advance_token(state, xt, bt, step, decay, row, head, t, restarts), state)
                before = number
    tile = state.reshape((1, 1, 1, *sides(N, P, SWAP)))
    ct.store(ends, index=(row, head, segment, *sides(0, block, SWAP)), tile=tile)
    if block == 0:
        ct.store(totals, index=(row, head, segment), tile=total.reshape((1, 1, 1)))
