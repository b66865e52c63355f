"""One token: the state is read and written once, in place."""

import cuda.tile as ct

from .decay import ZERO, log2_decay, param_row, step_size
from .forward import silu

Const = ct.Constant


def load_group(array, row, heads, HEAD_BLOCK, HEADS_PER_GROUP, N):
    """B or C [batch, groups, state] of a block of heads, float32: [1, 1, N] if they share a group or [heads, 1, N]."""
    if HEADS_PER_GROUP == 1:
        tile = ct.load(array, index=(row, heads, 0), shape=(1, HEAD_BLOCK, N), padding_mode=ZERO)
        tile = tile.reshape((HEAD_BLOCK, 1, N))
    else:
        group = heads * HEAD_BLOCK // HEADS_PER_GROUP
        tile = ct.load(array, index=(row, group, 0), shape=(1, 1, N), padding_mode=ZERO)
    return tile.astype(ct.float32)


@ct.kernel
def step(
    state,
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    y,
    HEAD_BLOCK: Const[int],
    P: Const[int],
    N: Const[int],
    HEAD_BLOCKS: Const[int],
    BLOCKS: Const[int],
    HEADS_PER_GROUP: Const[int],
    SHARED_PARAMS: Const[bool],
    HAS_D: Const[bool],
    HAS_Z: Const[bool],
    HAS_BIAS: Const[bool],
    SOFTPLUS: Const[bool],
    LOW: Const[float],
    HIGH: Const[float],
):
    """One program per (row, block of heads, block of head_dim); a block of heads lies in one group, or each is one.

    state [batch, heads, head_dim, state] is replaced by its successor; x, z, y [batch, heads, head_dim];
    dt [batch, heads]; B, C [batch, groups, state]; A, dt_bias [rows, heads]; D [rows, heads, head_dim].
    """
    pid = ct.bid(0)
    block = pid % BLOCKS
    heads = pid // BLOCKS % HEAD_BLOCKS
    row = pid // (BLOCKS * HEAD_BLOCKS)
    shared = param_row(row, SHARED_PARAMS)
    old = ct.load(state, index=(row, heads, block, 0), shape=(1, HEAD_BLOCK, P, N), padding_mode=ZERO)
    old = old.reshape((HEAD_BLOCK, P, N)).astype(ct.float32)
    xt = ct.load(x, index=(row, heads, block), shape=(1, HEAD_BLOCK, P), padding_mode=ZERO)
    xt = xt.reshape((HEAD_BLOCK, P)).astype(ct.float32)
    raw = ct.load(dt, index=(row, heads), shape=(1, HEAD_BLOCK), padding_mode=ZERO).reshape((HEAD_BLOCK,))
    raw = raw.astype(ct.float32)
    if HAS_BIAS:
        bias = ct.load(dt_bias, index=(shared, heads), shape=(1, HEAD_BLOCK), padding_mode=ZERO)
        raw = raw + bias.reshape((HEAD_BLOCK,))
    a = ct.load(A, index=(shared, heads), shape=(1, HEAD_BLOCK), padding_mode=ZERO).reshape((HEAD_BLOCK,))
    size = step_size(raw, SOFTPLUS, LOW, HIGH)
    keep = ct.exp2(log2_decay(size, a))
    enters = (size[:, None] * xt)[:, :, None] * load_group(B, row, heads, HEAD_BLOCK, HEADS_PER_GROUP, N)
    new = keep[:, None, None] * old + enters
    ct.store(state, index=(row, heads, block, 0), tile=new.astype(state.dtype).reshape((1, HEAD_BLOCK, P, N)))
    out = ct.sum(new * load_group(C, row, heads, HEAD_BLOCK, HEADS_PER_GROUP, N), axis=2)
    if HAS_D:
        skip = ct.load(D, index=(shared, heads, block), shape=(1, HEAD_BLOCK, P), padding_mode=ZERO)
        out = out + skip.reshape((HEAD_BLOCK, P)) * xt
    if HAS_Z:
        gate = ct.load(z, index=(row, heads, block), shape=(1, HEAD_BLOCK, P), padding_mode=ZERO)
        out = out * silu(gate.reshape((HEAD_BLOCK, P)).astype(ct.float32))
    ct.store(y, index=(row, heads, block), tile=out.astype(y.dtype).reshape((1, HEAD_BLOCK, P)))
