"""Implementation "xla": the scan chunk by chunk, matrix products inside a chunk, in plain JAX.

The second half of a token's weight, delta of the next token, is moved to the token that owns the key, so that a chunk
is a plain SSD sum with f_t = gamma_t + delta_{t+1}, but for the token itself, which has gamma_t. Linear in the length:
only phase and state cross from chunk to chunk, and the body is rematerialised in the backward. Packed sequences are
laid out in slots of one chunk each, none of which straddles a boundary, so boundaries are data. Reference: Lahoti et
al. 2026, arXiv:2603.15569.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ssd.mamba2.reference import accumulator
from jax_ssd.mamba3 import phase
from jax_ssd.mamba3.reference import (
    Operands,
    State,
    epilogue,
    expand,
    initial_state,
    last_key_and_value,
    per_head,
    weights,
)

ROWS = 64  # tokens x ranks of a chunk, by default


class _Carry(NamedTuple):
    phase: phase.Phase  # [batch, heads, pairs]
    ssm: jax.Array  # [batch, heads, head_dim, state], with the half step pending at the chunk's border


class _Chunk(NamedTuple):
    """The tokens of one chunk; the schedule is zero at padding."""

    q: jax.Array  # [batch, c, rank, groups, state]
    k: jax.Array
    v: jax.Array  # [batch, c, heads, head_dim]
    angles: jax.Array  # [batch, c, heads, pairs]
    dt: jax.Array  # [batch, c, heads]
    adt: jax.Array
    gamma: jax.Array
    f: jax.Array
    z: jax.Array | None
    fresh: jax.Array | None  # [batch], the chunk begins a sequence
    begin: _Carry | None  # what that sequence begins with; None: zeros


class _Slots(NamedTuple):
    """Where packed tokens lie in chunks: slot i holds up to c tokens of one sequence."""

    token: jax.Array  # [batch, slots, c], index of the token, clipped to the sequence
    real: jax.Array  # [batch, slots, c], False at padding
    sequence: jax.Array  # [batch, slots]
    fresh: jax.Array  # [batch, slots], the first slot of its sequence
    first: jax.Array  # [batch, sequences], first slot
    last: jax.Array  # [batch, sequences], last slot, padding or not
    place: jax.Array  # [batch, seq], where the token lies in the flattened slots


def scan(
    operands: Operands, rotary: str, norm_eps: float, chunk_size: int | None, precision: str, return_state: bool = True
) -> tuple[jax.Array, State | None]:
    """The operator: y and the final state, as the reference's; None for the state if it is not asked for."""
    o = operands
    batch, seq, heads, head_dim = o.v.shape
    dtype = accumulator(o.v.dtype)
    chunk = min(chunk_size or max(ROWS // max(o.q.shape[2], 1), 1), max(seq, 1))
    slots = None if o.cu_seqlens is None else _slots(o.cu_seqlens, seq, chunk)
    cut = functools.partial(_cut, chunk=chunk, slots=slots)  # [batch, seq, ...] -> [batch, chunks, c, ...]
    adt, dt, trap = (cut(jnp.moveaxis(a.astype(dtype), 1, 2)) for a in (o.adt, o.dt, o.trap))
    gamma, delta = weights(dt, trap)
    start = initial_state(o)
    begin, pending = _begin(start, delta, o.mimo_v, slots)
    tokens = _Chunk(
        cut(o.q),
        cut(o.k),
        cut(o.v),
        cut(o.angles.astype(dtype)),
        dt,
        adt,
        gamma,
        gamma + _of_next(delta, slots),
        None if o.z is None else cut(o.z),
        None if slots is None else slots.fresh,
        None if slots is None or o.state_ssm is None else jax.tree.map(lambda a: _rows(a, slots.sequence), pending),
    )
    body = jax.checkpoint(
        functools.partial(_chunk, o=o, rotary=rotary, norm_eps=norm_eps, precision=precision, emit=slots is not None)
    )
    last, (y, ends) = jax.lax.scan(body, begin, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), tokens))
    y = jnp.moveaxis(y, 0, 1)
    y = y.reshape(batch, y.shape[1] * chunk, *y.shape[3:])
    y = (y[:, :seq] if slots is None else _rows(y, slots.place)).astype(o.v.dtype)
    if not return_state:
        return y, None
    if slots is None:
        end = jax.tree.map(lambda a: a[:, None], last)
    else:
        end = jax.tree.map(lambda a: _rows(jnp.moveaxis(a, 0, 1), slots.last), ends)
    return y, _final_state(o, start, end, rotary)


def _slots(cu_seqlens: jax.Array, seq: int, chunk: int) -> _Slots:
    """Slots of sequence j begin at cu_seqlens[j] // chunk + j, and there is at least one, be it empty."""
    sequences = cu_seqlens.shape[1] - 1
    count = seq // chunk + sequences
    base = cu_seqlens // chunk + jnp.arange(sequences + 1, dtype=jnp.int32)[None]
    slot = jnp.arange(count, dtype=jnp.int32)
    search = jax.vmap(functools.partial(jnp.searchsorted, side="right"), (0, None))
    sequence = search(base[:, 1:-1], slot).astype(jnp.int32)
    first = _rows(base, sequence)
    offset = ((slot[None] - first) * chunk)[..., None] + jnp.arange(chunk, dtype=jnp.int32)[None, None]
    token = _rows(cu_seqlens, sequence)[..., None] + offset
    real = token < _rows(cu_seqlens, sequence + 1)[..., None]
    position = jnp.arange(seq, dtype=jnp.int32)
    owner = search(cu_seqlens[:, 1:-1], position).astype(jnp.int32)
    place = _rows(base, owner) * chunk + position[None] - _rows(cu_seqlens, owner)
    return _Slots(jnp.where(real, token, 0), real, sequence, slot[None] == first, base[:, :-1], base[:, 1:] - 1, place)


def _rows(array: jax.Array, index: jax.Array) -> jax.Array:
    """array[b, index[b]] for every b."""
    return jax.vmap(lambda a, i: jnp.take(a, i, axis=0, mode="clip"))(array, index)


def _cut(array: jax.Array, *, chunk: int, slots: _Slots | None) -> jax.Array:
    """[batch, seq, ...] -> [batch, chunks, chunk, ...], at least one chunk, padded with zeros."""
    batch, seq = array.shape[:2]
    rest = array.shape[2:]
    if slots is None or seq == 0:
        chunks = max(-(-seq // chunk), 1) if slots is None else slots.sequence.shape[1]
        padded = jnp.pad(array, ((0, 0), (0, chunks * chunk - seq), *((0, 0),) * len(rest)))
        return padded.reshape(batch, chunks, chunk, *rest)
    taken = _rows(array, slots.token)
    return jnp.where(slots.real.reshape(*slots.real.shape, *(1,) * len(rest)), taken, jnp.zeros((), array.dtype))


def _of_next(delta: jax.Array, slots: _Slots | None) -> jax.Array:
    """delta of the next token, zero at the end of a sequence; [batch, chunks, c, heads]."""
    after = jnp.pad(delta[:, 1:, 0], ((0, 0), (0, 1), (0, 0)))  # of the next chunk's first token
    if slots is not None:
        crosses = jnp.pad(slots.fresh[:, 1:], ((0, 0), (0, 1)), constant_values=True)
        after = jnp.where(crosses[..., None], 0, after)
    return jnp.concatenate([delta[:, :, 1:], after[:, :, None]], axis=2)


def _begin(start: State, delta: jax.Array, mimo_v: jax.Array | None, slots: _Slots | None) -> tuple[_Carry, _Carry]:
    """The scan's first carry, and what each sequence begins with: its state and the pending half step."""
    first = delta[:, :1, 0] if slots is None else _rows(delta[:, :, 0], slots.first)  # [batch, sequences, heads]
    values = jax.vmap(lambda v: expand(v, mimo_v), 1, 1)(start.v)
    pending = jnp.einsum("bsh,bshrp,bshrn->bshpn", first, values, start.k, precision="highest")
    begin = _Carry(phase.start(start.angle), start.ssm + pending)
    return jax.tree.map(lambda a: a[:, 0], begin), begin


def _chunk(carry: _Carry, tokens: _Chunk, *, o: Operands, rotary: str, norm_eps: float, precision: str, emit: bool):
    """One chunk: the carry after it, its y, and the carry once more where `emit`."""
    dtype, heads = carry.ssm.dtype, carry.ssm.shape[1]
    if tokens.fresh is not None:
        fresh, begin = tokens.fresh, jax.tree.map(jnp.zeros_like, carry) if tokens.begin is None else tokens.begin
        carry = jax.tree.map(lambda a, b: jnp.where(fresh.reshape(-1, *(1,) * (b.ndim - 1)), a, b), begin, carry)
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=dtype)
    dt, adt, gamma, f = (jnp.moveaxis(a, 1, 2) for a in (tokens.dt, tokens.adt, tokens.gamma, tokens.f))
    steps = phase.increment(jnp.moveaxis(tokens.angles, 1, 2), dt[..., None])
    phases = phase.advance_all(carry.phase, steps, axis=2)
    angle = phase.radians(phases)[:, :, :, None]  # [batch, heads, c, 1, pairs]

    def turned(group, bias):
        wide = jax.vmap(lambda a: per_head(a, heads), 1, 2)(group.astype(dtype))
        return phase.rotate(wide + bias.astype(dtype)[:, :, None], angle, rotary)

    q, k = turned(tokens.q, o.q_bias), turned(tokens.k, o.k_bias)  # [batch, heads, c, rank, state]
    v = jax.vmap(lambda a: expand(a, o.mimo_v), 1, 2)(tokens.v.astype(dtype))

    # Decay sums of every pair, summed from the later token on, not as differences of two sums: these lose digits where
    # large decays came before. Exponents of masked pairs are never formed.
    length = adt.shape[2]
    later = (jnp.arange(length)[:, None] >= jnp.arange(length)[None])[None, None]
    strictly = (jnp.arange(length)[:, None] > jnp.arange(length)[None])[None, None]
    sums = jnp.cumsum(jnp.where(strictly, adt[..., None], 0), axis=2)
    decay = jnp.exp(jnp.where(later, sums, -jnp.inf))  # [batch, heads, i, j]
    # A product with a masked zero would spread a NaN to earlier tokens, so keys and values enter without it and their
    # token's weight carries it instead, to the kept pairs alone.
    finite = jnp.isfinite(k).all((-2, -1)) & jnp.isfinite(v).all((-2, -1))  # [batch, heads, c]
    clean_k, clean_v = (jnp.where(finite[..., None, None], a, 0) for a in (k, v))
    weight = decay * jnp.where(finite[:, :, None], jnp.where(strictly, f[:, :, None], gamma[:, :, None]), jnp.nan)
    from_start = jnp.exp(jnp.cumsum(adt, axis=2))  # [batch, heads, c]

    mixed = dot("bhirn,bhjsn->bhirjs", q, clean_k) * weight[:, :, :, None, :, None]
    mixed = jnp.where(later[:, :, :, None, :, None], mixed, 0)
    out = dot("bhirjs,bhjsp->bhirp", mixed, clean_v)
    out = out + from_start[..., None, None] * dot("bhirn,bhpn->bhirp", q, carry.ssm)
    kept = (decay[:, :, -1] * f)[..., None, None] * v
    ssm = from_start[:, :, -1, None, None] * carry.ssm + dot("bhjsp,bhjsn->bhpn", kept, k)
    after = _Carry(jax.tree.map(lambda a: a[:, :, -1], phases), ssm)
    return after, (epilogue(out, v, tokens.z, o, norm_eps), after if emit else None)


def _final_state(o: Operands, start: State, end: _Carry, rotary: str) -> State:
    """The state after each sequence's last token; k and v are looked up there, or passed through by an empty one."""
    batch, seq = o.v.shape[:2]
    angle = phase.radians(end.phase)
    if seq == 0:
        return State(angle, end.ssm, start.k, start.v)
    bounds = o.cu_seqlens
    if bounds is None:
        bounds = jnp.broadcast_to(jnp.array([0, seq], jnp.int32), (batch, 2))
    last, empty = bounds[:, 1:] - 1, bounds[:, 1:] == bounds[:, :-1]
    return State(angle, end.ssm, *last_key_and_value(last, empty, o.k, o.k_bias, o.v, angle, start.k, start.v, rotary))
