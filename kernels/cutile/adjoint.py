"""Backward of the Mamba-2 scan along the sequence: segment adjoints, chunk-start states, and the gradients per token.

Notation, for one batch row and head: g is the inclusive running sum of log2 decays inside a chunk (and run), w_ij =
exp2(g_i - g_j) for kept pairs (i >= j, same run), s the step sizes, e_j = exp2(g_last - g_j), S the state at a chunk's
start and T the adjoint of the state at its end, both stored [state, head_dim]. dy' is dy * silu(z), zero at padding.

Pair tiles are [j, i] (source token first), so that what multiplies dy' is the product's own accumulator and the sum
over i stays inside a row. A grid is one-dimensional; the heads of one row and segment are neighbours, because they read
the same B and C. A launch may cover a slice of the heads: its arrays are then views, and `heads` below counts those.
"""

import cuda.tile as ct

from .decay import INF, ZERO, param_row, run_numbers
from .precision import dot, factor
from .segments import advance, advance_in_runs, chunks_of, last_of, load_chunk, load_real, load_scalars, run_before

Const = ct.Constant
MASKED = -1e30  # an exponent whose exp2 is exactly zero


def load_state(array, row, head, n_block, N, P, p_block):
    """Tile [N, P] of [batch, heads, head_dim, state]."""
    return ct.load(
        array, index=(row, head, n_block, p_block), shape=(1, 1, N, P), order=(0, 1, 3, 2), padding_mode=ZERO
    ).reshape((N, P))


def gate(z):
    """silu(z) and its derivative, float32."""
    value = z.astype(ct.float32)
    sigmoid = 1.0 / (1.0 + ct.exp(-value))
    return value * sigmoid, sigmoid * (1.0 + value * (1.0 - sigmoid))


def gated(dy, z, real, row, chunk, head, p_block, Q, P, HAS_Z, HAS_RUNS, PASSES, LATENCY):
    """dy' [Q, P], an operand of products; real [Q] is read with HAS_RUNS."""
    tile = load_chunk(dy, row, chunk, head, p_block, Q, P, LATENCY)
    if HAS_Z:
        silu, _ = gate(load_chunk(z, row, chunk, head, p_block, Q, P, LATENCY))
        tile = factor(tile.astype(ct.float32) * silu, dy.dtype, PASSES)
    if HAS_RUNS:
        tile = ct.where(real[:, None], tile, 0.0).astype(tile.dtype)
    return tile


def decayed(state, decay, carries, HAS_RUNS):
    """exp2(decay) * state, or zero (not zero times state) where the state does not carry."""
    state = ct.exp2(decay) * state
    if HAS_RUNS:
        state = ct.where(carries, state, 0.0)
    return state


def this_block(HEADS, SEGMENTS, P_BLOCKS):
    """This block's (row, segment, head, P-block)."""
    block = ct.bid(0)
    p_block = block % P_BLOCKS
    head = block // P_BLOCKS % HEADS
    segment = block // (P_BLOCKS * HEADS) % SEGMENTS
    return block // (P_BLOCKS * HEADS * SEGMENTS), segment, head, p_block


@ct.kernel
def segment_adjoint(
    dy,
    z,
    c,
    decay,
    runs,
    starts,
    totals,
    Q: Const[int],
    P: Const[int],
    N: Const[int],
    P_BLOCKS: Const[int],
    HEADS: Const[int],
    CHUNKS: Const[int],
    SEGMENTS: Const[int],
    SEGMENT_CHUNKS: Const[int],
    HEADS_PER_GROUP: Const[int],
    HAS_Z: Const[bool],
    HAS_RUNS: Const[bool],
    PASSES: Const[int],
    LATENCY: Const[int],
):
    """Each segment's contribution to the adjoint of its start state, and its total decay.

    starts [batch, heads, segments - 1, state, head_dim] float32 is sum_i exp2(decay from the segment's start to i)
    dy'_i (x) C_i over the tokens that the start state reaches; totals [batch, heads, segments - 1] float32 is log2 of
    the factor between the two ends, -INF when nothing carries. Segment 0 is not needed: index 0 is segment 1.
    Grid (segments - 1) * batch * heads * P_BLOCKS.
    """
    row, before_segment, head, p_block = this_block(HEADS, SEGMENTS - 1, P_BLOCKS)
    segment = before_segment + 1
    group = head // HEADS_PER_GROUP
    first = segment * SEGMENT_CHUNKS
    count = chunks_of(segment, SEGMENT_CHUNKS, CHUNKS)
    result, sum_decay = ct.full((N, P), 0.0, dtype=ct.float32), ct.full((1,), 0.0, dtype=ct.float32)
    carried = ct.full((1,), True, dtype=ct.bool_)
    for k in range(count):
        chunk = first + count - 1 - k
        g = load_scalars(decay, row, head, chunk, Q)
        last = last_of(g, Q)
        weight = ct.exp2(g)
        carries, real = True, weight
        if HAS_RUNS:
            run, real, final = run_numbers(runs, row, chunk, Q, dy.shape[1])
            before = run_before(runs, row, chunk, Q)
            weight = ct.where(run == before, weight, 0.0)
            carries = before == final
            carried = carried & carries
        c_tile = load_real(c, row, chunk, group, 0, real, Q, N, HAS_RUNS, LATENCY)
        dy_tile = gated(dy, z, real, row, chunk, head, p_block, Q, P, HAS_Z, HAS_RUNS, PASSES, LATENCY)
        scaled = factor(dy_tile.astype(ct.float32) * weight[:, None], c.dtype, PASSES)
        result = dot(ct.transpose(c_tile), scaled, decayed(result, last, carries, HAS_RUNS), PASSES)
        sum_decay = sum_decay + last
    if HAS_RUNS:
        sum_decay = ct.where(carried, sum_decay, -INF)
    ct.store(starts, index=(row, head, before_segment, 0, p_block), tile=result.reshape((1, 1, 1, N, P)))
    if p_block == 0:
        ct.store(totals, index=(row, head, before_segment), tile=sum_decay.reshape((1, 1, 1)))


def load_boundary(array, row, head, segment, N, P, block, SEGMENTS, PRESENT):
    """Tile [N, P] of the state or adjoint at one end of a segment: see chunk_states."""
    if not PRESENT:
        tile = ct.full((N, P), 0.0, dtype=ct.float32)
    elif SEGMENTS > 1:
        tile = load_segment(array, row, head, segment, 0, N, P, block)
    else:
        tile = load_state(array, row, head, 0, N, P, block)
    return tile


def load_segment(array, row, head, segment, n_block, N, P, p_block):
    """Tile [N, P] of [batch, heads, segments, state, head_dim]."""
    return ct.load(
        array, index=(row, head, segment, n_block, p_block), shape=(1, 1, 1, N, P), padding_mode=ZERO
    ).reshape((N, P))


def store_segment(array, row, head, segment, n_block, tile, N, P, p_block):
    ct.store(array, index=(row, head, segment, n_block, p_block), tile=tile.reshape((1, 1, 1, N, P)))


@ct.kernel
def join_segments(
    ends,
    end_totals,
    initial,
    starts,
    adjoints,
    adjoint_totals,
    dfinal,
    stops,
    P: Const[int],
    N: Const[int],
    N_BLOCKS: Const[int],
    HEADS: Const[int],
    SEGMENTS: Const[int],
    HAS_INITIAL: Const[bool],
    HAS_DFINAL: Const[bool],
    HAS_RUNS: Const[bool],
):
    """The state at every segment's start and its adjoint at every segment's end, from what the segments give alone.

    ends, end_totals from segment_state; adjoints, adjoint_totals from segment_adjoint; starts, stops [batch, heads,
    SEGMENTS, state, head_dim] float32. Grid 2 * N_BLOCKS * batch * heads: one direction each, a block of the state.
    """
    block = ct.bid(0)
    backwards, block = block % 2, block // 2
    n_block, head, row = block % N_BLOCKS, block // N_BLOCKS % HEADS, block // (N_BLOCKS * HEADS)
    tile = ct.full((N, P), 0.0, dtype=ct.float32)
    if backwards == 0:
        if HAS_INITIAL:
            tile = load_state(initial, row, head, n_block, N, P, 0)
        store_segment(starts, row, head, 0, n_block, tile, N, P, 0)
        for k in range(SEGMENTS - 1):
            tile = joined(tile, ends, end_totals, row, head, k, n_block, N, P, HAS_RUNS)
            store_segment(starts, row, head, k + 1, n_block, tile, N, P, 0)
    else:
        if HAS_DFINAL:
            tile = load_state(dfinal, row, head, n_block, N, P, 0)
        store_segment(stops, row, head, SEGMENTS - 1, n_block, tile, N, P, 0)
        for k in range(SEGMENTS - 1):
            index = SEGMENTS - 2 - k
            tile = joined(tile, adjoints, adjoint_totals, row, head, index, n_block, N, P, HAS_RUNS)
            store_segment(stops, row, head, index, n_block, tile, N, P, 0)


def joined(carry, alone, totals, row, head, segment, n_block, N, P, HAS_RUNS):
    """What a segment makes of a state or adjoint that enters it: that decayed, and what it gives alone."""
    total = ct.load(totals, index=(row, head, segment), shape=(1, 1, 1)).reshape((1, 1))
    return decayed(carry, total, total > -INF, HAS_RUNS) + load_segment(alone, row, head, segment, n_block, N, P, 0)


@ct.kernel
def chunk_states(
    x,
    b,
    step,
    decay,
    runs,
    starts,
    states,
    Q: Const[int],
    P: Const[int],
    N: Const[int],
    P_BLOCKS: Const[int],
    HEADS: Const[int],
    CHUNKS: Const[int],
    SEGMENTS: Const[int],
    SEGMENT_CHUNKS: Const[int],
    HEADS_PER_GROUP: Const[int],
    HAS_START: Const[bool],
    HAS_RUNS: Const[bool],
    PASSES: Const[int],
    LATENCY: Const[int],
):
    """Stores the state at every chunk's start: states [batch, heads, chunks, state, head_dim], bfloat16 or float32.

    Grid SEGMENTS * batch * heads * P_BLOCKS. starts: of each segment [batch, heads, SEGMENTS, state, head_dim] float32,
    or with one segment the initial state [batch, heads, head_dim, state]; without HAS_START it is zero.
    """
    row, segment, head, p_block = this_block(HEADS, SEGMENTS, P_BLOCKS)
    group = head // HEADS_PER_GROUP
    state = load_boundary(starts, row, head, segment, N, P, p_block, SEGMENTS, HAS_START)
    first = segment * SEGMENT_CHUNKS
    store_chunk_state(states, row, head, first, p_block, state, N, P)
    for chunk in range(first, first + chunks_of(segment, SEGMENT_CHUNKS, CHUNKS) - 1):
        s, g = load_scalars(step, row, head, chunk, Q), load_scalars(decay, row, head, chunk, Q)
        real = s
        if HAS_RUNS:
            run, real, final = run_numbers(runs, row, chunk, Q, x.shape[1])
            before = run_before(runs, row, chunk, Q)
        x_tile = load_real(x, row, chunk, head, p_block, real, Q, P, HAS_RUNS, LATENCY)
        b_tile = ct.transpose(load_real(b, row, chunk, group, 0, real, Q, N, HAS_RUNS, LATENCY))
        if HAS_RUNS:
            state = advance_in_runs(state, b_tile, x_tile, s, g, last_of(g, Q), run, final, before, PASSES)
        else:
            state = advance(state, b_tile, x_tile, s, g, last_of(g, Q), PASSES)
        store_chunk_state(states, row, head, chunk + 1, p_block, state, N, P)


def store_chunk_state(states, row, head, chunk, p_block, state, N, P):
    ct.store(states, index=(row, head, chunk, 0, p_block), tile=state.astype(states.dtype).reshape((1, 1, 1, N, P)))


@ct.kernel
def token_gradients(
    x,
    dy,
    z,
    b,
    c,
    step,
    decay,
    skip,
    runs,
    stops,
    states,
    adjoints,
    dx,
    dz,
    dstep,
    ddecay,
    dinitial,
    Q: Const[int],
    P: Const[int],
    N: Const[int],
    P_BLOCKS: Const[int],
    HEADS: Const[int],
    CHUNKS: Const[int],
    SEGMENTS: Const[int],
    SEGMENT_CHUNKS: Const[int],
    HEADS_PER_GROUP: Const[int],
    SHARED_PARAMS: Const[bool],
    HAS_D: Const[bool],
    HAS_Z: Const[bool],
    HAS_STATE: Const[bool],
    HAS_ADJOINT: Const[bool],
    HAS_STOP: Const[bool],
    HAS_INITIAL: Const[bool],
    HAS_RUNS: Const[bool],
    PASSES: Const[int],
    LATENCY: Const[int],
):
    """Walks the chunks of a segment backwards with T in registers; everything that belongs to one token of one head.

    Writes dx, dz; dstep and ddecay [P_BLOCKS, batch, heads, padded seq] float32, the gradients of s (direct) and of a
    step's log decay, a sum over the P-blocks still to take;
    adjoints [batch, heads, chunks, state, head_dim] (bfloat16 or float32), every chunk's T; dinitial at the row's
    first chunk.
    stops: the adjoint of each segment's end state, in the forms of chunk_states' starts, zero without HAS_STOP.
    HAS_STATE: states hold something. HAS_ADJOINT: some chunk's end matters (more than one chunk, or dfinal is given).
    Grid SEGMENTS * batch * heads * P_BLOCKS.
    """
    row, segment, head, p_block = this_block(HEADS, SEGMENTS, P_BLOCKS)
    group = head // HEADS_PER_GROUP
    first = segment * SEGMENT_CHUNKS
    count = chunks_of(segment, SEGMENT_CHUNKS, CHUNKS)
    token = ct.arange(Q, dtype=ct.int32)
    strict = token[:, None] < token[None, :]
    zero_pairs, zero_tokens = ct.full((Q, Q), 0.0, dtype=ct.float32), ct.full((Q, P), 0.0, dtype=ct.float32)
    T = load_boundary(stops, row, head, segment, N, P, p_block, SEGMENTS, HAS_STOP)
    if HAS_D:
        d = ct.load(
            skip, index=(param_row(row, SHARED_PARAMS), head, p_block), shape=(1, 1, P), padding_mode=ZERO
        ).reshape((1, P))

    for k in range(count):
        chunk = first + count - 1 - k
        s, g = load_scalars(step, row, head, chunk, Q), load_scalars(decay, row, head, chunk, Q)
        last = last_of(g, Q)
        enter, leave = ct.exp2(g), ct.exp2(last - g)  # factors from the chunk's start and to its end
        kept = token[:, None] <= token[None, :]
        carries, real = True, s
        if HAS_RUNS:
            run, real, final = run_numbers(runs, row, chunk, Q, dy.shape[1])
            before = run_before(runs, row, chunk, Q)
            kept = kept & (run[:, None] == run[None, :])
            enter = ct.where(run == before, enter, 0.0)
            leave = ct.where(run == final, leave, 0.0)
            carries = before == final
        x_tile = load_real(x, row, chunk, head, p_block, real, Q, P, HAS_RUNS, LATENCY)
        dy_tile = load_real(dy, row, chunk, head, p_block, real, Q, P, HAS_RUNS, LATENCY)
        b_tile = load_real(b, row, chunk, group, 0, real, Q, N, HAS_RUNS, LATENCY)
        c_tile = load_real(c, row, chunk, group, 0, real, Q, N, HAS_RUNS, LATENCY)
        dyf = dy_tile.astype(ct.float32)
        if HAS_Z:
            silu, slope = gate(load_chunk(z, row, chunk, head, p_block, Q, P, LATENCY))
            slope = slope * dyf
            dyf = dyf * silu
            if HAS_RUNS:
                dyf, slope = ct.where(real[:, None], dyf, 0.0), ct.where(real[:, None], slope, 0.0)
            dy_tile = factor(dyf, x.dtype, PASSES)
        xf = x_tile.astype(ct.float32)

        # pairs [j, i]: w_ij C_i.B_j; joint: times x_j.dy'_i, that is every pair's part in <y, dy>, without s_j
        w = ct.exp2(ct.where(kept, g[None, :] - g[:, None], MASKED))
        pairs = dot(b_tile, ct.transpose(c_tile), zero_pairs, PASSES) * w
        if HAS_RUNS:
            pairs = ct.where(kept, pairs, 0.0)
        joint = dot(x_tile, ct.transpose(dy_tile), zero_pairs, PASSES) * pairs
        ds = ct.sum(joint, axis=1)
        joint = ct.where(strict, joint, 0.0)  # w_jj is constant: no gradient of the decay
        dg = ct.sum(joint * s[:, None], axis=0) - s * ct.sum(joint, axis=1)
        pairs = factor(pairs * s[:, None], x.dtype, PASSES)
        dx_tile = zero_tokens
        if HAS_ADJOINT:
            T_cast = factor(T, x.dtype, PASSES)
            store_chunk_state(adjoints, row, head, chunk, p_block, T_cast, N, P)
            from_end = dot(b_tile, T_cast, zero_tokens, PASSES)
            leaving = leave * ct.sum(from_end * xf, axis=1)
            ds = ds + leaving
            leaving = s * leaving
            dg = dg - leaving
            dg_last = ct.sum(leaving, axis=0, keepdims=True)
            dx_tile = from_end * (leave * s)[:, None]
        if HAS_D:
            dx_tile = dx_tile + d * dyf
        dx_tile = dot(pairs, dy_tile, dx_tile, PASSES)
        store_tokens(dx, row, chunk, head, p_block, dx_tile, Q, P)
        scaled = dyf * enter[:, None]
        if HAS_STATE:
            S = ct.load(
                states, index=(row, head, chunk, 0, p_block), shape=(1, 1, 1, N, P), padding_mode=ZERO, latency=LATENCY
            ).reshape((N, P))
            from_state = dot(c_tile, S, zero_tokens, PASSES)
            dg = dg + ct.sum(from_state * scaled, axis=1)
            if HAS_ADJOINT:
                dg_last = dg_last + decayed(ct.sum(T * S.astype(ct.float32)), last, carries, HAS_RUNS)
        if HAS_ADJOINT:
            dg = dg + ct.where(token == Q - 1, dg_last, 0.0)
        if HAS_Z:
            y = dot(ct.transpose(pairs), x_tile, zero_tokens, PASSES)
            if HAS_STATE:
                y = y + from_state * enter[:, None]
            if HAS_D:
                y = y + d * xf
            store_tokens(dz, row, chunk, head, p_block, y * slope, Q, P)
        if HAS_RUNS:
            da = ct.sum(ct.where(kept, dg[None, :], 0.0), axis=1)  # running sums restart with each run
        else:
            da = ct.cumsum(dg, axis=0, reverse=True)
        ct.store(dstep, index=(p_block, row, head, chunk), tile=ds.reshape((1, 1, 1, Q)))
        ct.store(ddecay, index=(p_block, row, head, chunk), tile=da.reshape((1, 1, 1, Q)))
        if HAS_ADJOINT or HAS_INITIAL:
            T = dot(ct.transpose(c_tile), factor(scaled, c.dtype, PASSES), decayed(T, last, carries, HAS_RUNS), PASSES)

    if HAS_INITIAL:  # noqa: SIM102  (one is decided when compiling, the other when running)
        if segment == 0:
            ct.store(dinitial, index=(row, head, 0, p_block), tile=T.reshape((1, 1, N, P)), order=(0, 1, 3, 2))


def store_tokens(array, row, chunk, head, block, tile, Q, WIDTH):
    """Stores a tile [Q, WIDTH] where load_chunk reads one, rounded to the array's dtype."""
    ct.store(array, index=(row, chunk, head, block), tile=tile.astype(array.dtype).reshape((1, Q, 1, WIDTH)))
