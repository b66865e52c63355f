"""Implementation "xla": the scan chunk by chunk, matrix products inside a chunk, in plain JAX.

Linear in the sequence length: decay sums restart in every chunk, only the state crosses from one to the next, groups
are never expanded to heads, and the body is rematerialised in the backward, which keeps one state per chunk. Reference:
Dao and Gu 2024, arXiv:2405.21060, section 6.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ssd import segments
from jax_ssd.mamba2.reference import Operands, accumulator, epilogue, step_size

DEFAULT_CHUNK = 64


class _Chunk(NamedTuple):
    """The tokens of one chunk; heads are [groups, rep], rep = heads of a group."""

    x: jax.Array  # [batch, q, groups, rep, head_dim]
    step: jax.Array  # [batch, q, groups, rep]
    decay: jax.Array  # [batch, q, groups, rep]: A * step, natural log
    B: jax.Array  # [batch, q, groups, state]
    C: jax.Array
    run: jax.Array | None  # [batch, q]


def scan(
    operands: Operands, softplus: bool, limit: tuple[float, float], chunk_size: int | None, precision: str
) -> tuple[jax.Array, jax.Array]:
    """The operator: y [batch, seq, heads, head_dim] and the final state [batch, heads, head_dim, state]."""
    x, dt, A, B, C, D, z, dt_bias, state, runs = operands
    batch, seq, heads, head_dim = x.shape
    groups, width = B.shape[2:]
    dtype = accumulator(x.dtype)
    step = step_size(dt, dt_bias, softplus, limit, dtype)
    run = None
    if runs is not None:
        run, real = segments.split_runs(runs)
        step = jnp.where(real[:, :, None], step, 0)  # after the clamp: padding must not decay the state
    # Below this a step's decay is zero in the accumulator's type; clamping keeps the chunk's running sum small, so the
    # small decays beside it keep their digits, and changes no result (Q huge decays would otherwise swamp the sum).
    floor = -111.0 if dtype == jnp.float32 else -760.0
    decay = jnp.where(A[:, None].astype(dtype) * step < floor, floor, A[:, None].astype(dtype) * step)

    def grouped(array):
        return array.reshape(batch, seq, groups, heads // max(groups, 1), *array.shape[3:])

    tokens = _Chunk(grouped(x), grouped(step), grouped(decay), B, C, run)
    if state is None:
        state = jnp.zeros((batch, heads, head_dim, width), dtype)
    state = state.astype(dtype).reshape(batch, groups, heads // max(groups, 1), head_dim, width)
    carry = (state, None if run is None else jnp.zeros((batch,), jnp.int32))

    chunk = min(chunk_size or DEFAULT_CHUNK, max(seq, 1))
    whole = seq // chunk
    body = functools.partial(_chunk, precision=precision)
    parts = []
    if whole:
        chunks = jax.tree.map(lambda a: _cut(a[:, : whole * chunk], whole), tokens)
        carry, y = jax.lax.scan(jax.checkpoint(body), carry, chunks)
        parts.append(jnp.moveaxis(y, 0, 1).reshape(batch, whole * chunk, heads, head_dim))
    if seq % chunk:
        carry, y = body(carry, jax.tree.map(lambda a: a[:, whole * chunk :], tokens))
        parts.append(y.reshape(batch, seq % chunk, heads, head_dim))
    y = jnp.concatenate(parts, axis=1) if parts else jnp.zeros(x.shape, dtype)
    return epilogue(y, x, D, z, runs), carry[0].reshape(batch, heads, head_dim, width)


def _cut(array: jax.Array, chunks: int) -> jax.Array:
    """[batch, seq, ...] -> [chunks, batch, seq / chunks, ...]."""
    return jnp.moveaxis(array.reshape(array.shape[0], chunks, array.shape[1] // chunks, *array.shape[2:]), 1, 0)


def _chunk(carry, tokens: _Chunk, *, precision: str):
    """One chunk: the state [batch, groups, rep, head_dim, state] before it goes in, after it comes out, with y."""
    state, run_before = carry
    x, step, decay, B, C, run = tokens
    dtype = state.dtype
    dot = functools.partial(
        jnp.einsum, precision="highest" if precision == "highest" else None, preferred_element_type=dtype
    )
    sums = jnp.cumsum(decay, axis=1)
    last = sums[:, -1:]
    length = x.shape[1]
    causal = (jnp.arange(length)[:, None] >= jnp.arange(length)[None, :])[None]  # [1, i, j]
    if run is None:
        kept = causal[..., None, None]
        reads_state, writes_state = None, None
    else:
        kept = (causal & (run[:, :, None] == run[:, None, :]))[..., None, None]
        reads_state = (run == run_before[:, None])[:, :, None, None, None]
        writes_state = (run == run[:, -1:])[:, :, None, None]

    # Exponents are formed for kept pairs only: a masked one may be hugely positive, and inf * 0 is NaN in the backward.
    # A product with a masked zero would spread a NaN of x to earlier tokens, so x enters without it and its token's
    # weight carries it instead, to the kept pairs alone.
    finite = jnp.isfinite(x)
    weight_step = jnp.where(finite.all(-1), step, jnp.nan)
    clean = jnp.where(finite, x, jnp.zeros((), x.dtype))
    pair = jnp.where(kept, sums[:, :, None] - sums[:, None, :], -jnp.inf)
    products = dot("bign,bjgn->bijg", C, B)[..., None] * (jnp.exp(pair) * weight_step[:, None])
    mixed = jnp.where(kept, products, 0).astype(x.dtype)  # [batch, i, j, groups, rep]
    y = dot("bijgr,bjgrp->bigrp", mixed, clean)
    carried = dot("bign,bgrpn->bigrp", C, state.astype(x.dtype)) * jnp.exp(sums)[..., None]
    y = y + (carried if reads_state is None else jnp.where(reads_state, carried, 0))

    into_state = jnp.exp(last - sums) * step
    if writes_state is not None:
        into_state = jnp.where(writes_state, jnp.exp(jnp.where(writes_state, last - sums, 0)) * step, 0)
    scaled = into_state[..., None] * x.astype(dtype)
    if writes_state is not None:
        scaled = jnp.where(writes_state[..., None], scaled, 0)
    update = dot("bjgn,bjgrp->bgrpn", B, scaled.astype(x.dtype))
    decayed = jnp.exp(last[:, 0])[..., None, None] * state
    if run is not None:
        survives = (run[:, -1] == run_before)[:, None, None, None, None]
        decayed = jnp.where(survives, decayed, 0)
        run_before = run[:, -1]
    return (decayed + update, run_before), y
