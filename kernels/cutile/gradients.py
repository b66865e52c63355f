"""Backward of the Mamba-2 scan across heads: dB and dC of a group, then the gradients of dt and of the parameters.

Notation as in adjoint.py. Every sum is taken in a fixed order: over the heads of a group in a loop, over head blocks,
P-blocks, segments and token tiles in kernels of their own; nothing is added atomically.
"""
import cuda.tile as ct

from .adjoint import MASKED, gate
from .decay import FLOOR, LOG2E, ZERO, param_row, run_numbers, softplus
from .precision import dot
from .segments import last_of, load_chunk, load_scalars, run_before

Const = ct.Constant


@ct.kernel
def group_gradients(x, dy, z, b, c, step, decay, runs, states, adjoints, earlier_db, earlier_dc, db, dc,
                    Q: Const[int], P: Const[int], N: Const[int], N_BLOCKS: Const[int], CHUNKS: Const[int],
                    GROUP_HEADS: Const[int], BLOCK_HEADS: Const[int], GROUPS: Const[int], HAS_Z: Const[bool],
                    HAS_STATE: Const[bool], HAS_ADJOINT: Const[bool], HAS_RUNS: Const[bool], ACCUMULATE: Const[bool],
                    PASSES: Const[int], LATENCY: Const[int]):
    """dB and dC of one chunk, group and block of N state columns, summed over a block of heads.

    states, adjoints: [batch, heads, chunks, state, head_dim], S and T of every chunk. db, dc: [head_blocks, batch, seq,
    groups, state], float32 partial sums or, with one head block and nothing to come, the gradients themselves; with
    ACCUMULATE on top of what an earlier slice of the same group left in earlier_db and earlier_dc. The arrays are of
    GROUPS groups with GROUP_HEADS heads each. Grid N_BLOCKS * (GROUP_HEADS / BLOCK_HEADS) * GROUPS * CHUNKS * batch.
    """
    HEAD_BLOCKS = GROUP_HEADS // BLOCK_HEADS
    block = ct.bid(0)
    n_block, block = block % N_BLOCKS, block // N_BLOCKS
    head_block, block = block % HEAD_BLOCKS, block // HEAD_BLOCKS
    group, block = block % GROUPS, block // GROUPS
    chunk, row = block % CHUNKS, block // CHUNKS
    first = group * GROUP_HEADS + head_block * BLOCK_HEADS
    token = ct.arange(Q, dtype=ct.int32)
    kept = token[:, None] <= token[None, :]
    if HAS_RUNS:
        run, real, final = run_numbers(runs, row, chunk, Q, x.shape[1])
        before = run_before(runs, row, chunk, Q)
        kept = kept & (run[:, None] == run[None, :])
    b_tile = load_chunk(b, row, chunk, group, n_block, Q, N, LATENCY)
    c_tile = load_chunk(c, row, chunk, group, n_block, Q, N, LATENCY)
    zero_pairs = ct.full((Q, Q), 0.0, dtype=ct.float32)
    db_sum, dc_sum = ct.full((Q, N), 0.0, dtype=ct.float32), ct.full((Q, N), 0.0, dtype=ct.float32)
    for k in range(BLOCK_HEADS):
        head = first + k
        s, g = load_scalars(step, row, head, chunk, Q), load_scalars(decay, row, head, chunk, Q)
        x_tile = load_chunk(x, row, chunk, head, 0, Q, P, LATENCY)
        dy_tile = load_chunk(dy, row, chunk, head, 0, Q, P, LATENCY)
        if HAS_RUNS:
            dy_tile = ct.where(real[:, None], dy_tile, 0.0).astype(dy.dtype)
        dyf = dy_tile.astype(ct.float32)
        if HAS_Z:
            dyf = dyf * gate(load_chunk(z, row, chunk, head, 0, Q, P, LATENCY))[0]
            if HAS_RUNS:
                dyf = ct.where(real[:, None], dyf, 0.0)
            dy_tile = dyf.astype(x.dtype)
        w = ct.exp2(ct.where(kept, g[None, :] - g[:, None], MASKED)) * s[:, None]
        pairs = dot(x_tile, ct.transpose(dy_tile), zero_pairs, PASSES) * w
        if HAS_RUNS:
            pairs = ct.where(kept, pairs, 0.0)
        pairs = pairs.astype(x.dtype)
        db_sum = dot(pairs, c_tile, db_sum, PASSES)
        dc_sum = dot(ct.transpose(pairs), b_tile, dc_sum, PASSES)
        if HAS_STATE:
            S = load_chunk_state(states, row, head, chunk, N, P, n_block, LATENCY)
            enter = ct.exp2(g)
            if HAS_RUNS:
                enter = ct.where(run == before, enter, 0.0)
            dc_sum = dot((dyf * enter[:, None]).astype(x.dtype), ct.transpose(S), dc_sum, PASSES)
        if HAS_ADJOINT:
            T = load_chunk_state(adjoints, row, head, chunk, N, P, n_block, LATENCY)
            leave = s * ct.exp2(last_of(g, Q) - g)
            if HAS_RUNS:
                leave = ct.where(run == final, leave, 0.0)
            db_sum = dot((x_tile.astype(ct.float32) * leave[:, None]).astype(x.dtype), ct.transpose(T), db_sum,
                         PASSES)
    index = (head_block, row, chunk, group, n_block)
    if ACCUMULATE:
        db_sum = db_sum + load_group(earlier_db, index, Q, N)
        dc_sum = dc_sum + load_group(earlier_dc, index, Q, N)
    ct.store(db, index=index, tile=db_sum.astype(db.dtype).reshape((1, 1, Q, 1, N)))
    ct.store(dc, index=index, tile=dc_sum.astype(dc.dtype).reshape((1, 1, Q, 1, N)))


def load_chunk_state(array, row, head, chunk, N, P, n_block, LATENCY):
    """Tile [N, P] of [batch, heads, chunks, state, head_dim]."""
    return ct.load(array, index=(row, head, chunk, n_block, 0), shape=(1, 1, 1, N, P), padding_mode=ZERO,
                   latency=LATENCY).reshape((N, P))


def load_group(array, index, Q, N):
    """Tile [Q, N] of [head_blocks, batch, seq, groups, state]."""
    return ct.load(array, index=index, shape=(1, 1, Q, 1, N), padding_mode=ZERO).reshape((Q, N))


@ct.kernel
def sum_head_blocks(partial, result, BLOCKS: Const[int], TILE: Const[int]):
    """result [size] = the sum over partial [BLOCKS, size] float32, in order; grid size / TILE rounded up."""
    block = ct.bid(0)
    total = ct.full((1, TILE), 0.0, dtype=ct.float32)
    for k in range(BLOCKS):
        total = total + ct.load(partial, index=(k, block), shape=(1, TILE), padding_mode=ZERO)
    ct.store(result, index=(block,), tile=total.reshape((TILE,)).astype(result.dtype))


@ct.kernel
def step_gradients(dt, a, bias, runs, step, dstep, ddecay, ddt, da_partial, dbias_partial, TOKENS: Const[int],
                   HEADS: Const[int], HEAD_BLOCKS: Const[int], TILES: Const[int], P_BLOCKS: Const[int],
                   SHARED_PARAMS: Const[bool], SOFTPLUS: Const[bool], LOW: Const[float], HIGH: Const[float],
                   HAS_BIAS: Const[bool], HAS_RUNS: Const[bool]):
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
        value = value + ct.load(bias, index=(shared, head_block), shape=(1, HEADS),
                                padding_mode=ZERO).reshape((HEADS, 1))
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
    ct.store(ddt, index=(row, tile, head_block),
             tile=ct.transpose(gradient).astype(ddt.dtype).reshape((1, TOKENS, HEADS)))
    da = ct.where(real[None, :], s * da, 0.0)
    ct.store(da_partial, index=(row, tile, head_block), tile=ct.sum(da, axis=1).reshape((1, 1, HEADS)))
    if HAS_BIAS:
        ct.store(dbias_partial, index=(row, tile, head_block), tile=ct.sum(gradient, axis=1).reshape((1, 1, HEADS)))


def head_tile(array, block, row, head_block, tile, HEADS, TOKENS):
    """Tile [HEADS, TOKENS] of [blocks, batch, heads, padded seq]."""
    return ct.load(array, index=(block, row, head_block, tile), shape=(1, 1, HEADS, TOKENS),
                   padding_mode=ZERO).reshape((HEADS, TOKENS))


@ct.kernel
def parameter_gradients(da_partial, dbias_partial, dskip_partial, da, dbias, dskip, P: Const[int], P_BLOCKS: Const[int],
                        HEADS: Const[int], TILES: Const[int], SEGMENTS: Const[int], HAS_BIAS: Const[bool],
                        HAS_D: Const[bool]):
    """dA, d dt_bias [batch, heads] and dD [batch, heads, head_dim] from their parts, one row and head per block.

    da_partial, dbias_partial: [batch, TILES, heads]; dskip_partial: [batch, heads, SEGMENTS, head_dim]; all float32.
    """
    row, head = ct.bid(0) // HEADS, ct.bid(0) % HEADS
    ct.store(da, index=(row, head), tile=column_sum(da_partial, row, head, TILES))
    if HAS_BIAS:
        ct.store(dbias, index=(row, head), tile=column_sum(dbias_partial, row, head, TILES))
    if HAS_D:
        for block in range(P_BLOCKS):
            total = ct.full((1, 1, 1, P), 0.0, dtype=ct.float32)
            for segment in range(SEGMENTS):
                total = total + ct.load(dskip_partial, index=(row, head, segment, block), shape=(1, 1, 1, P),
                                        padding_mode=ZERO)
            ct.store(dskip, index=(row, head, block), tile=total.reshape((1, 1, P)))


def column_sum(partial, row, head, TILES):
    """Sum over axis 1 of [batch, TILES, heads], 128 tiles at a time."""
    total = ct.full((128,), 0.0, dtype=ct.float32)
    for k in range(ct.cdiv(TILES, 128)):
        total = total + ct.load(partial, index=(row, k, head), shape=(1, 128, 1), padding_mode=ZERO).reshape((128,))
    return ct.sum(total, axis=0, keepdims=True).reshape((1, 1))
