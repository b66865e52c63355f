"""The forward scan: walks chunks with the state in registers and emits y."""

import cuda.tile as ct

from .decay import LOG2E, ZERO, exp2, param_row, run_numbers, source_exponent
from .precision import column, dot, factor, sides
from .segments import (
    advance,
    advance_in_runs,
    advance_token,
    chunks_of,
    is_finite,
    last_of,
    load_chunk,
    load_scalars,
    load_token,
    run_before,
    run_of_token,
    start_state,
    store_chunk,
)

Const = ct.Constant


def silu(z):
    """z * sigmoid(z), float32."""
    return z / (1.0 + exp2(z * -LOG2E))


def pair_weights(cb, step, decay, kept, PASSES, SWAP):
    """[Q, Q]: cb * exp2(decay_i - decay_j) * step_j for kept pairs, else 0.

    Selecting last also drops what a masked pair's exponent, which may be hugely positive, or its NaN would give.
    """
    if PASSES < 3:
        weights = cb * exp2(column(decay, SWAP) - column(source_exponent(step, decay), not SWAP))
    else:
        weights = cb * exp2(column(decay, SWAP) - column(decay, not SWAP)) * column(step, not SWAP)
    return ct.where(kept, weights, 0.0)


@ct.kernel(occupancy=2)
def forward(
    x,
    B,
    C,
    step,
    decay,
    D,
    z,
    runs,
    initial,
    ends,
    totals,
    y,
    final,
    tokens,
    Q: Const[int],
    P: Const[int],
    N: Const[int],
    HEADS: Const[int],
    HEADS_PER_GROUP: Const[int],
    BLOCKS: Const[int],
    CHUNKS: Const[int],
    SEGMENTS: Const[int],
    CHUNKS_PER_SEGMENT: Const[int],
    SEQ: Const[int],
    SHARED_PARAMS: Const[bool],
    HAS_D: Const[bool],
    HAS_Z: Const[bool],
    HAS_RUNS: Const[bool],
    HAS_INITIAL: Const[bool],
    HAS_FINAL: Const[bool],
    PASSES: Const[int],
    LATENCY: Const[int],
    STORE_LATENCY: Const[int],
    SWAP: Const[bool],
):
    """One program per (row, segment, head, head_dim block), neighbours share B and C.

    x, z, y [batch, seq, heads, head_dim]; B, C [batch, seq, groups, state]; step, decay [batch, heads, padded seq];
    D [rows, heads, head_dim]; runs [batch, seq]; initial, final [batch, heads, head_dim, state]; ends, totals from
    `segment_state`. tokens is seq once more, at run time: the compiler takes minutes over a loop of so many steps if it
    knows their number.

    The first walk multiplies what must not enter by zero, which is fast and exact for finite numbers. A NaN or infinity
    in x, B, dt or a state is still there in the last state; then, and only then, a second walk goes token by token: a
    NaN shows at its own token and after, within its run, and nowhere else.
    """
    pid = ct.bid(0)
    block = pid % BLOCKS
    head = pid // BLOCKS % HEADS
    segment = pid // (BLOCKS * HEADS) % SEGMENTS
    row = pid // (BLOCKS * HEADS * SEGMENTS)
    group = head // HEADS_PER_GROUP
    first = segment * CHUNKS_PER_SEGMENT
    count = chunks_of(segment, CHUNKS_PER_SEGMENT, CHUNKS)
    token = ct.arange(Q, dtype=ct.int32)
    causal = column(token, SWAP) >= column(token, not SWAP)
    if HAS_D:
        skip = ct.load(
            D, index=(param_row(row, SHARED_PARAMS), head, block), shape=(1, 1, P), padding_mode=ZERO
        ).reshape((1, P))
    if HAS_RUNS:
        before = run_before(runs, row, first, Q)
    state = start_state(initial, ends, totals, row, head, block, segment, SEGMENTS, N, P, HAS_INITIAL, HAS_RUNS, SWAP)
    for i in range(count):
        chunk = first + i
        ctile = load_chunk(C, row, chunk, group, 0, Q, N, LATENCY, SWAP)
        bt = load_chunk(B, row, chunk, group, 0, Q, N, LATENCY, not SWAP)
        xt = load_chunk(x, row, chunk, head, block, Q, P, LATENCY, SWAP)
        steps, decays = load_scalars(step, row, head, chunk, Q), load_scalars(decay, row, head, chunk, Q)
        last = last_of(decays, Q)
        cb = dot(ctile, bt, ct.full((Q, Q), 0.0, dtype=ct.float32), PASSES, SWAP)
        carried = ct.full(sides(Q, P, SWAP), 0.0, dtype=ct.float32)
        carried = dot(ctile, factor(state, C.dtype, PASSES), carried, PASSES, SWAP)
        if HAS_RUNS:
            number, real, end = run_numbers(runs, row, chunk, Q, SEQ)
            carried = carried * column(ct.where(number == before, exp2(decays), 0.0), SWAP)
            weights = pair_weights(cb, steps, decays, causal & (number[:, None] == number[None, :]), PASSES, SWAP)
        else:
            carried = carried * column(exp2(decays), SWAP)
            weights = pair_weights(cb, steps, decays, causal, PASSES, SWAP)
        out = dot(factor(weights, x.dtype, PASSES), xt, carried, PASSES, SWAP)
        if HAS_D:
            out = out + skip.reshape(sides(1, P, SWAP)) * xt.astype(ct.float32)
        if HAS_Z:
            out = out * silu(load_chunk(z, row, chunk, head, block, Q, P, LATENCY, SWAP).astype(ct.float32))
        if HAS_RUNS:
            out = ct.where(column(real, SWAP), out, 0.0)
        store_chunk(y, row, chunk, head, block, out.astype(y.dtype), Q, P, STORE_LATENCY, SWAP)
        if HAS_RUNS:
            state = advance_in_runs(state, bt, xt, steps, decays, last, number, end, before, PASSES, SWAP)
            before = end
        else:
            state = advance(state, bt, xt, steps, decays, last, PASSES, SWAP)
    if not is_finite(state):
        state = start_state(
            initial, ends, totals, row, head, block, segment, SEGMENTS, N, P, HAS_INITIAL, HAS_RUNS, SWAP
        )
        if HAS_RUNS:
            run = run_before(runs, row, first, Q).reshape((1, 1))
        for t in range(first * Q, min((first + count) * Q, tokens)):
            restarts = ct.full((1, 1), t % Q, dtype=ct.int32) == 0
            if HAS_RUNS:
                number, real = run_of_token(runs, row, t)
                starts = number != run
                restarts = restarts | starts
                state = ct.where(starts, 0.0, state)
                run = number
            x_row = load_token(x, row, t, head, block, P)
            b_column = load_token(B, row, t, group, 0, N).reshape(sides(N, 1, SWAP))
            c_column = load_token(C, row, t, group, 0, N).reshape(sides(N, 1, SWAP))
            x_across = x_row.reshape(sides(1, P, SWAP))
            after = advance_token(state, x_across, b_column, step, decay, row, head, t, restarts)
            out = ct.sum(after * c_column, axis=1 if SWAP else 0, keepdims=True).reshape((1, P))
            if HAS_D:
                out = out + skip * x_row
            if HAS_Z:
                out = out * silu(load_token(z, row, t, head, block, P))
            if HAS_RUNS:
                out, state = ct.where(real, out, 0.0), ct.where(real, after, state)
            else:
                state = after
            ct.store(y, index=(row, t, head, block), tile=out.astype(y.dtype).reshape((1, 1, 1, P)))
    if HAS_FINAL and segment == SEGMENTS - 1:
        tile, order = state.reshape((1, 1, *sides(N, P, SWAP))), (0, 1, *sides(3, 2, SWAP))
        ct.store(final, index=(row, head, *sides(0, block, SWAP)), tile=tile, order=order)
