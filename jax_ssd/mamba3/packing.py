"""Segment ids of Mamba-3, told to the scan by its operands, so that every kernel takes them.

A decay of nothing in front of a segment's first token forgets the state, and with it what the token before would still
have added. The phase runs on, which turns keys and queries alike. Padding is a token without effect; see `separated`.
"""

import math

import jax
import jax.numpy as jnp

from jax_ssd import op, segments
from jax_ssd.mamba3.reference import Operands, State, initial_state, last_key_and_value

LEAST_NORM_EPS = 1e-20  # beside padding, whose output may be zero and is normalized too; its power of -3/2 is finite


def may_pad(segment_ids: jax.Array) -> bool:
    """Whether there can be padding, as its type says: no unsigned id is negative."""
    return not jnp.issubdtype(segment_ids.dtype, jnp.unsignedinteger)


def separated(o: Operands, segment_ids: jax.Array) -> Operands:
    """The operands of one sequence per row that computes each segment as if it were alone.

    Padding has a value of zero, no rotation and no decay, and nothing that it holds is used. What the token before it
    still has to add is added by the first padding behind it, whose step size and trap are therefore those of the next
    real token. Behind the last real token the step size is zero, since nothing is to be added there yet.
    """
    seq = o.v.shape[1]
    if seq == 0:
        return o
    number, real = segments.split_runs(segments.runs_from_segment_ids(segment_ids))
    fresh = jnp.concatenate([jnp.zeros_like(real[:, :1]), number[:, 1:] != number[:, :-1]], axis=1)[:, None]
    nothing = 2 * math.log(jnp.finfo(o.adt.dtype).tiny)  # the log of what is zero in this type
    if not may_pad(segment_ids):
        return o._replace(adt=jnp.where(fresh, nothing, o.adt))
    next_real = jax.lax.cummin(jnp.where(real, _positions(real), seq), axis=1, reverse=True)
    index, followed = jnp.minimum(next_real, seq - 1)[:, None], (next_real < seq)[:, None]

    def ahead(a):  # a padding's is that of the next real token
        return jnp.where(followed, jnp.where(real[:, None], a, jnp.take_along_axis(a, index, axis=2)), 0)

    return o._replace(
        **{name: _where_real(real, getattr(o, name)) for name in ("q", "k", "v", "angles")},
        z=None if o.z is None else _where_real(real, o.z),
        adt=jnp.where(fresh, nothing, jnp.where(real[:, None], o.adt, 0)),
        dt=ahead(o.dt),
        trap=ahead(o.trap),
    )


def without_padding(y: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """y [batch, seq, ...], zero at padding."""
    return _where_real(segment_ids >= 0, y) if may_pad(segment_ids) else y


def final_state(o: Operands, segment_ids: jax.Array, end: State, rotary: str) -> State:
    """The state behind each row's last real token, from that of `separated` operands, which may end in padding."""
    if o.v.shape[1] == 0 or not may_pad(segment_ids):
        return end

    def look_up(segment_ids, *arrays):
        last = jnp.where(segment_ids >= 0, _positions(segment_ids), -1).max(axis=1)[:, None]
        return last_key_and_value(last, last < 0, *arrays, rotary=rotary)

    start = initial_state(o)
    letters = (("bt", "btmgn", "rhmn", "bthp", "bsha", "bshmn", "bshp"), ("bshmn", "bshp"))
    k, v = op.over_explicit_axes(letters, look_up)(segment_ids, o.k, o.k_bias, o.v, end.angle, start.k, start.v)
    return end._replace(k=k, v=v)


def _positions(tokens: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)


def _where_real(real: jax.Array, array: jax.Array) -> jax.Array:
    """The array [batch, seq, ...], zero at padding."""
    return jnp.where(real.reshape(*real.shape, *(1,) * (array.ndim - 2)), array, jnp.zeros((), array.dtype))
