"""Implementation "xla": the scan chunk by chunk, matrix products inside a chunk, in plain JAX.

Linear in the sequence length: decay sums restart in every chunk and run, only the state crosses from one chunk to the
next, groups are never expanded to heads, and the body is rematerialised in the backward, which keeps one state per
chunk. Reference: Dao and Gu 2024, arXiv:2405.21060, section 6.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ssd import manual_axes, segments
from jax_ssd.mamba2.reference import Operands, accumulator, epilogue, step_size, without_padding

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
    x, dt, A, B, C, D, z, dt_bias, state, runs = without_padding(operands)
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
    first_run = None if run is None else jnp.zeros((batch,), jnp.int32)
    # A scan's carry keeps its type, so it varies over the manual axes of the tokens from the beginning.
    state, first_run, _ = manual_axes.unified((state, first_run, x))
    carry = (state, first_run)

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
    y = jnp.concatenate(parts, axis=1) if parts else jnp.zeros_like(x, dtype)
    return epilogue(y, x, D, z, runs), carry[0].reshape(batch, heads, head_dim, width)


def _cut(array: jax.Array, chunks: int) -> jax.Array:
    """[batch, seq, ...] -> [chunks, batch, seq / chunks, ...]."""
    return jnp.moveaxis(array.reshape(array.shape[0], chunks, array.shape[1] // chunks, *array.shape[2:]), 1, 0)


def _chunk(carry, tokens: _Chunk, *, precision: str):
    """One chunk: the state [batch, groups, rep, head_dim, state] before it goes in, after it comes out, with y.

    What one run must not see of another is selected away on both sides of a product, since 0 * NaN and 0 * inf are NaN,
    in the forward as in the derivative. In the products over pairs of tokens that is not possible, so x, B and C enter
    without what is not finite, and the weights of the pairs that they belong to carry it instead.
    """
    state, run_before = carry
    x, step, decay, B, C, run = tokens
    dtype = state.dtype
    # float16 reaches from 6e-8 to 65504 only: neither steps times x nor states fit.
    factor = jnp.dtype(jnp.float32) if x.dtype == jnp.float16 else x.dtype
    dot = functools.partial(
        jnp.einsum, precision="default" if x.dtype.itemsize == 2 else precision, preferred_element_type=dtype
    )
    kept = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))[None]  # [1, i, j]
    if run is None:
        kept, reads, writes, survives = kept[..., None, None], None, None, None
        sums = jnp.cumsum(decay, axis=1)
    else:
        kept = (kept & (run[:, :, None] == run[:, None, :]))[..., None, None]
        reads, writes = (run == run_before[:, None])[..., None, None], (run == run[:, -1:])[..., None, None]
        survives = (run[:, -1] == run_before)[:, None, None]
        sums = jnp.where(kept, decay[:, None], 0).sum(2)
        run_before = run[:, -1]

    # What tokens read of the state.
    carried = _only(reads, dot("bign,bgrpn->bigrp", _only(reads, C).astype(factor), state.astype(factor)))
    carried = carried * jnp.exp(_only(reads, sums))[..., None]

    # The state that goes on.
    into = jnp.exp(_only(writes, sums[:, -1:] - sums)) * _only(writes, step)
    scaled = into[..., None] * _only(writes, x).astype(dtype)
    update = dot("bjgn,bjgrp->bgrpn", _only(writes, B).astype(factor), _only(writes, scaled).astype(factor))
    decayed = jnp.exp(_only(survives, sums[:, -1]))[..., None, None] * _only(survives, state)
    state = _only(survives, decayed) + update

    # Pairs of tokens. Exponents are formed for kept ones only: a masked one may be hugely positive.
    x, finite = _finite(x)
    weight = jnp.where(finite, step, jnp.nan)[:, None]
    if run is not None:
        (B, finite_B), (C, finite_C) = _finite(B), _finite(C)
        weight = jnp.where(finite_C[:, :, None, :, None] & finite_B[:, None, :, :, None], weight, jnp.nan)
    weight = jnp.where(kept, jnp.exp(jnp.where(kept, sums[:, :, None] - sums[:, None], 0)) * weight, 0)
    mixed = jnp.where(kept, dot("bign,bjgn->bijg", C, B)[..., None] * weight, 0)  # [batch, i, j, groups, rep]
    y = dot("bijgr,bjgrp->bigrp", mixed.astype(factor), x.astype(factor)) + carried
    return (state, run_before), y if run is None else _sealed(y, step)


def _only(mask: jax.Array | None, array: jax.Array) -> jax.Array:
    """The array where a mask of its first axes says so, else zero; all of it without a mask."""
    if mask is None:
        return array
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (array.ndim - mask.ndim)), array, jnp.zeros((), array.dtype))


def _finite(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The array with zeros for what is not finite, and whether all of its last axis is."""
    finite = jnp.isfinite(array)
    return jnp.where(finite, array, jnp.zeros((), array.dtype)), finite.all(-1)


@jax.custom_vjp
def _sealed(y: jax.Array, step: jax.Array) -> jax.Array:
    """y itself; where it or its cotangent is not finite, its step's gradient is NaN, and no product is."""
    del step
    return y


def _sealed_forward(y, step):
    del step
    return y, jnp.isfinite(y)


def _sealed_backward(finite, cotangent):
    finite = finite & jnp.isfinite(cotangent)
    return jnp.where(finite, cotangent, 0), jnp.where(finite.all(-1), 0, jnp.asarray(jnp.nan, cotangent.dtype))


_sealed.defvjp(_sealed_forward, _sealed_backward)
