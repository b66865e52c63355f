"""Backward of the Mamba-2 scan across heads: dB and dC of a group, then the gradients of dt and of the parameters.

Notation as in adjoint.py. Every sum is taken in a fixed order: over the heads of a group in a loop, over head blocks,
P-blocks, segments and token tiles in kernels of their own; nothing is added atomically.
"""

import cuda.tile as ct

from .adjoint import MASKED, gated
from .decay import FLOOR, LOG2E, ZERO, param_row, run_numbers, softplus
from .precision import dot, factor
from .segments import last_of, load_chunk, load_real, load_scalars, run_before

Const = ct.Constant


def group_block(N_BLOCKS, HEAD_BLOCKS, GROUPS, CHUNKS):
    """This block's (row, chunk, group, head block, N-block)."""
    block = ct.bid(0)
    n_block, block = block % N_BLOCKS, block // N_BLOCKS
    head_block, block = block % HEAD_BLOCKS, block // HEAD_BLOCKS
    group, block = block % GROUPS, block // GROUPS
    return block // CHUNKS, block % CHUNKS, group, head_block, n_block


@ct.kernel
def source_gradient(
    x,
    dy,
    z,
    c,
    step,
    decay,
    runs,
    adjoints,
    earlier,
    db,
    block_heads,
    Q: Const[int],
    P: Const[int],
    N: Const[int],
    N_BLOCKS: Const[int],
    CHUNKS: Const[int],
    GROUP_HEADS: Const[int],
    HEAD_BLOCKS: Const[int],
    GROUPS: Const[int],
    HAS_Z: Const[bool],
    HAS_ADJOINT: Const[bool],
    HAS_RUNS: Const[bool],
    ACCUMULATE: Const[bool],
    PASSES: Const[int],
    LATENCY: Const[int],
):
    """dB of one chunk, group and block of N state columns, summed over a block of heads.

    adjoints [batch, heads, chunks, state, head_dim]: T of every chunk. db [head_blocks, batch, seq, groups, state]:
    float32 partial sums or, with one head block and nothing to come, the gradient itself; with ACCUMULATE on top of
    what an earlier slice of the same group left in `earlier`. The arrays are of GROUPS groups, GROUP_HEADS heads each.
    Grid N_BLOCKS * HEAD_BLOCKS * GROUPS * CHUNKS * batch.
    """
    row, chunk, group, head_block, n_block = group_block(N_BLOCKS, HEAD_BLOCKS, GROUPS, CHUNKS)
    token = ct.arange(Q, dtype=ct.int32)
    kept = token[:, None] <= token[None, :]  # [j, i]
    if HAS_RUNS:
        run, real, final = run_numbers(runs, row, chunk, Q, x.shape[1])
        kept = kept & (run[:, None] == run[None, :]) & real[:, None]
    else:
        real = kept
    c_tile = load_real(c, row, chunk, group, n_block, real, Q, N, HAS_RUNS, LATENCY)
    total = ct.full((Q, N), 0.0, dtype=ct.float32)
    for k in range(block_heads):
        head = group * GROUP_HEADS + head_block * block_heads + k
        s, g = load_scalars(step, row, head, chunk, Q), load_scalars(decay, row, head, chunk, Q)
        x_tile = load_chunk(x, row, chunk, head, 0, Q, P, LATENCY)
        dy_tile = gated(dy, z, real, row, chunk, head, 0, Q, P, HAS_Z, HAS_RUNS, PASSES, LATENCY)
        w = ct.exp2(ct.where(kept, g[None, :] - g[:, None], MASKED)) * s[:, None]
        pairs = dot(x_tile, ct.transpose(dy_tile), ct.full((Q, Q), 0.0, dtype=ct.float32), PASSES) * w
        if HAS_RUNS:
            pairs = ct.where(kept, pairs, 0.0)
        total = dot(factor(pairs, x.dtype, PASSES), c_tile, total, PASSES)
        if HAS_ADJOINT:
            leave = s * ct.exp2(last_of(g, Q) - g)
            if HAS_RUNS:
                leave = ct.where(run == final, leave, 0.0)
            T = load_chunk_state(adjoints, row, head, chunk, N, P, n_block, LATENCY)
            scaled = x_tile.astype(ct.float32) * leave[:, None]
            if HAS_RUNS:
                scaled = ct.where(real[:, None], scaled, 0.0)  # what padding holds may be NaN
            scaled = factor(scaled, x.dtype, PASSES)
            total = dot(scaled, ct.transpose(T), total, PASSES)
    store_group(db, earlier, row, chunk, group, head_block, n_block, total, Q, N, ACCUMULATE)


@ct.kernel
def target_gradient(
    x,
    dy,
    z,
    b,
    step,
    decay,
    runs,
    states,
    earlier,
    dc,
    dskip,
    block_heads,
    Q: Const[int],
    P: Const[int],
    N: Const[int],
    N_BLOCKS: Const[int],
    CHUNKS: Const[int],
    GROUP_HEADS: Const[int],
    HEAD_BLOCKS: Const[int],
    GROUPS: Const[int],
    HAS_D: Const[bool],
    HAS_Z: Const[bool],
    HAS_STATE: Const[bool],
    HAS_RUNS: Const[bool],
    ACCUMULATE: Const[bool],
    PASSES: Const[int],
    LATENCY: Const[int],
):
    """dC in the same way, from states [batch, heads, chunks, state, head_dim], S of every chunk.

    Also each chunk's part of dD, dskip [batch, heads, chunks, head_dim] float32: registers are free here.
    """
    row, chunk, group, head_block, n_block = group_block(N_BLOCKS, HEAD_BLOCKS, GROUPS, CHUNKS)
    token = ct.arange(Q, dtype=ct.int32)
    kept = token[:, None] >= token[None, :]  # [i, j]
    if HAS_RUNS:
        run, real, final = run_numbers(runs, row, chunk, Q, x.shape[1])
        before = run_before(runs, row, chunk, Q)
        kept = kept & (run[:, None] == run[None, :]) & real[None, :]
    else:
        real = kept
    b_tile = load_real(b, row, chunk, group, n_block, real, Q, N, HAS_RUNS, LATENCY)
    total = ct.full((Q, N), 0.0, dtype=ct.float32)
    for k in range(block_heads):
        head = group * GROUP_HEADS + head_block * block_heads + k
        s, g = load_scalars(step, row, head, chunk, Q), load_scalars(decay, row, head, chunk, Q)
        x_tile = load_chunk(x, row, chunk, head, 0, Q, P, LATENCY)
        dy_tile = gated(dy, z, real, row, chunk, head, 0, Q, P, HAS_Z, HAS_RUNS, PASSES, LATENCY)
        w = ct.exp2(ct.where(kept, g[:, None] - g[None, :], MASKED)) * s[None, :]
        pairs = dot(dy_tile, ct.transpose(x_tile), ct.full((Q, Q), 0.0, dtype=ct.float32), PASSES) * w
        if HAS_RUNS:
            pairs = ct.where(kept, pairs, 0.0)
        total = dot(factor(pairs, x.dtype, PASSES), b_tile, total, PASSES)
        if HAS_STATE:
            enter = ct.exp2(g)
            if HAS_RUNS:
                enter = ct.where(run == before, enter, 0.0)
            S = load_chunk_state(states, row, head, chunk, N, P, n_block, LATENCY)
            scaled = factor(dy_tile.astype(ct.float32) * enter[:, None], x.dtype, PASSES)
            total = dot(scaled, ct.transpose(S), total, PASSES)
        if HAS_D:
            part = dy_tile.astype(ct.float32) * x_tile.astype(ct.float32)
            if HAS_RUNS:
                part = ct.where(real[:, None], part, 0.0)
            part = ct.sum(part, axis=0)
            if n_block == 0:
                ct.store(dskip, index=(row, head, chunk, 0), tile=part.reshape((1, 1, 1, P)))
    store_group(dc, earlier, row, chunk, group, head_block, n_block, total, Q, N, ACCUMULATE)


def store_group(array, earlier, row, chunk, group, head_block, n_block, tile, Q, N, ACCUMULATE):
    """Stores a tile [Q, N] into [head_blocks, batch, seq, groups, state], rounded to the array's dtype."""
    index = (head_block, row, chunk, group, n_block)
    tile = tile.reshape((1, 1, Q, 1, N))
    if ACCUMULATE:
        tile = tile + ct.load(earlier, index=index, shape=(1, 1, Q, 1, N), padding_mode=ZERO)
    ct.store(array, index=index, tile=tile.astype(array.dtype))


def load_chunk_state(array, row, head, chunk, N, P, n_block, LATENCY):
    """Tile [N, P] of [batch, heads, chunks, state, head_dim]."""
    return ct.load(
        array, index=(row, head, chunk, n_block, 0), shape=(1, 1, 1, N, P), padding_mode=ZERO, latency=LATENCY
    ).reshape((N, P))


@ct.kernel
def sum_head_blocks(partial, result, BLOCKS: Const[int], TILE: Const[int]):
    """result [size] = the sum over partial [BLOCKS, size] float32, in order; grid size / TILE rounded up."""
    block = ct.bid(0)
    total = ct.full((1, TILE), 0.0, dtype=ct.float32)
    for k in range(BLOCKS):
        total = total + ct.load(partial, index=(k, block), shape=(1, TILE), padding_mode=ZERO)
    ct.store(result, index=(block,), tile=total.reshape((TILE,)).astype(result.dtype))


@ct.kernel
def step_gradients(
    dt,
    a,
    bias,
    runs,
    step,
    dstep,
    ddecay,
    ddt,
    da_partial,
    dbias_partial,
    TOKENS: Const[int],
    HEADS: Const[int],
    HEAD_BLOCKS: Const[int],
    TILES: Const[int],
    P_BLOCKS: Const[int],
    SHARED_PARAMS: Const[bool],
    SOFTPLUS: Const[bool],
    LOW: Const[float],
    HIGH: Const[float],
    HAS_BIAS: Const[bool],
    HAS_RUNS: Const[bool],
):
    """ddt [batch, seq, heads] from the gradients of s and of its log decay, and each tile's part of dA and d dt_bias.

    dstep, ddecay [P_BLOCKS, batch, heads, padded seq], da_partial, dbias_partial [batch, TILES, heads]: float32.
    Grid HEAD_BLOCKS * TILES * batch, tiles of TOKENS x HEADS.
    """
    block = ct.bid(0)
    head_block, block = block % HEAD_BLOCKS, block // HEAD_BLOCKS
    tile, row = block % TILES, block // TILES
    shared = param_row(row, SHARED_PARAMS)
    direct = head_tile(dstep, 0, row, head_block, tile, HEADS, TOKENS)
    da = head_tile(ddecay, 0, row, head_block, tile, HEADS, TOKENS)
    for k in range(1, P_BLOCKS):
        direct = direct + head_tile(dstep, k, row, head_block, tile, HEADS, TOKENS)
        da = da + head_tile(ddecay, k, row, head_block, tile, HEADS, TOKENS)
    s = ct.load(step, index=(row, head_block, tile), shape=(1, HEADS, TOKENS), padding_mode=ZERO)
    s = s.reshape((HEADS, TOKENS))
    rate = ct.load(a, index=(shared, head_block), shape=(1, HEADS), padding_mode=ZERO).reshape((HEADS, 1))
    raw = ct.load(dt, index=(row, tile, head_block), shape=(1, TOKENS, HEADS), padding_mode=ZERO)
    value = ct.transpose(raw.reshape((TOKENS, HEADS)).astype(ct.float32))
    if HAS_BIAS:
        value = value + ct.load(bias, index=(shared, head_block), shape=(1, HEADS), padding_mode=ZERO).reshape(
            (HEADS, 1)
        )
    real = tile * TOKENS + ct.arange(TOKENS, dtype=ct.int32) < dt.shape[1]
    if HAS_RUNS:
        run = ct.load(runs, index=(row, tile), shape=(1, TOKENS), padding_mode=ZERO).reshape((TOKENS,))
        real = real & (run >= 0)
    da = ct.where(s * (rate * LOG2E) < FLOOR, 0.0, da)  # cut: constant
    gradient = direct + rate * da
    if SOFTPLUS:
        gradient = gradient / (1.0 + ct.exp(-value))
        value = softplus(value)
    gradient = ct.where((value < LOW) | (value > HIGH), 0.0, gradient)
    gradient = ct.where(real[None, :], gradient, 0.0)
    ct.store(
        ddt, index=(row, tile, head_block), tile=ct.transpose(gradient).astype(ddt.dtype).reshape((1, TOKENS, HEADS))
    )
    da = ct.where(real[None, :], s * da, 0.0)
    ct.store(da_partial, index=(row, tile, head_block), tile=ct.sum(da, axis=1).reshape((1, 1, HEADS)))
    if HAS_BIAS:
        ct.store(dbias_partial, index=(row, tile, head_block), tile=ct.sum(gradient, axis=1).reshape((1, 1, HEADS)))


def head_tile(array, block, row, head_block, tile, HEADS, TOKENS):
    """Tile [HEADS, TOKENS] of [blocks, batch, heads, padded seq]."""
    return ct.load(array, index=(block, row, head_block, tile), shape=(1, 1, HEADS, TOKENS), padding_mode=ZERO).reshape(
        (HEADS, TOKENS)
    )


@ct.kernel
def parameter_gradients(
    da_partial,
    dbias_partial,
    dskip_partial,
    da,
    dbias,
    dskip,
    P: Const[int],
    HEADS: Const[int],
    TILES: Const[int],
    CHUNKS: Const[int],
    HAS_BIAS: Const[bool],
    HAS_D: Const[bool],
):
    """dA, d dt_bias [batch, heads] and dD [batch, heads, head_dim] from their parts, one row and head per block.

    da_partial, dbias_partial: [batch, TILES, heads]; dskip_partial: [batch, heads, CHUNKS, head_dim]; all float32.
    """
    row, head = ct.bid(0) // HEADS, ct.bid(0) % HEADS
    ct.store(da, index=(row, head), tile=column_sum(da_partial, row, head, TILES))
    if HAS_BIAS:
        ct.store(dbias, index=(row, head), tile=column_sum(dbias_partial, row, head, TILES))
    if HAS_D:
        total = ct.full((32, P), 0.0, dtype=ct.float32)
        for k in range(ct.cdiv(CHUNKS, 32)):
            total = total + ct.load(
                dskip_partial, index=(row, head, k, 0), shape=(1, 1, 32, P), padding_mode=ZERO
            ).reshape((32, P))
        ct.store(dskip, index=(row, head, 0), tile=ct.sum(total, axis=0).reshape((1, 1, P)))


def column_sum(partial, row, head, TILES):
    """Sum over axis 1 of [batch, TILES, heads], 128 tiles at a time."""
    total = ct.full((128,), 0.0, dtype=ct.float32)
    for k in range(ct.cdiv(TILES, 128)):
        total = total + ct.load(partial, index=(row, k, head), shape=(1, 128, 1), padding_mode=ZERO).reshape((128,))
    return ct.sum(total, axis=0, keepdims=True).reshape((1, 1))
