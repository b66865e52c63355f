"""The definition of the operator: one token after another, in plain JAX.

Slow on purpose and differentiated by JAX itself, forward and reverse, to any order; everything else is checked against
it. Arrays are in canonical form (see ops.py); the arithmetic is float32, or float64 for float64 inputs. Reference:
Lahoti et al. 2026, "Mamba-3", arXiv:2603.15569; state-spaces/mamba.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ssd import manual_axes
from jax_ssd.mamba2.reference import accumulator
from jax_ssd.mamba3 import phase


class Operands(NamedTuple):
    """Canonical arrays. r is 1 or batch, the row axis of parameters; rank is 1 where mimo_v is absent (SISO)."""

    q: jax.Array  # [batch, seq, rank, groups, state]
    k: jax.Array  # [batch, seq, rank, groups, state]
    v: jax.Array  # [batch, seq, heads, head_dim]
    q_bias: jax.Array  # [r, heads, rank, state]
    k_bias: jax.Array  # [r, heads, rank, state]
    angles: jax.Array  # [batch, seq, heads, pairs]
    adt: jax.Array  # [batch, heads, seq]
    dt: jax.Array  # [batch, heads, seq]
    trap: jax.Array  # [batch, heads, seq]
    mimo_v: jax.Array | None = None  # [r, heads, rank, head_dim]
    mimo_o: jax.Array | None = None  # [r, heads, rank, head_dim]
    z: jax.Array | None = None  # [batch, seq, heads, head_dim]
    mimo_z: jax.Array | None = None  # [r, heads, rank, head_dim]
    D: jax.Array | None = None  # [r, heads]
    norm_weight: jax.Array | None = None  # [r, heads, head_dim]
    state_angle: jax.Array | None = None  # [batch, sequences, heads, pairs]
    state_ssm: jax.Array | None = None  # [batch, sequences, heads, head_dim, state]
    state_k: jax.Array | None = None  # [batch, sequences, heads, rank, state]
    state_v: jax.Array | None = None  # [batch, sequences, heads, head_dim]
    cu_seqlens: jax.Array | None = None  # [batch, sequences + 1] int32


class StepOperands(NamedTuple):
    """Canonical arrays of a step: as Operands, but for states, which have no sequences axis and keep their types."""

    q: jax.Array  # [batch, seq, rank, groups, state]
    k: jax.Array
    v: jax.Array
    q_bias: jax.Array
    k_bias: jax.Array
    angles: jax.Array
    adt: jax.Array
    dt: jax.Array
    trap: jax.Array
    state_angle: jax.Array  # [batch, heads, pairs]
    state_ssm: jax.Array  # [batch, heads, head_dim, state]
    state_k: jax.Array  # [batch, heads, rank, state]
    state_v: jax.Array  # [batch, heads, head_dim]
    mimo_v: jax.Array | None = None
    mimo_o: jax.Array | None = None
    z: jax.Array | None = None
    mimo_z: jax.Array | None = None
    D: jax.Array | None = None
    norm_weight: jax.Array | None = None


class State(NamedTuple):
    """What the next token needs: canonical arrays in the accumulator's type."""

    angle: jax.Array
    ssm: jax.Array
    k: jax.Array
    v: jax.Array


class _Carry(NamedTuple):
    phase: phase.Phase  # [batch, heads, pairs]
    ssm: jax.Array  # [batch, heads, head_dim, state]
    k: jax.Array  # [batch, heads, rank, state], rotated by its own phase
    v: jax.Array  # [batch, heads, head_dim], before rank expansion


def scan(operands: Operands, rotary: str, norm_eps: float) -> tuple[jax.Array, State]:
    """The recurrence over all tokens.

    Returns:
      y [batch, seq, heads, head_dim], or [batch, seq, rank, heads, head_dim] for mimo_v without mimo_o; and the state
      after the last token of each sequence.
    """
    o = operands
    dtype = accumulator(o.v.dtype)
    first = initial_state(o)
    starts = _Carry(phase.start(first.angle), first.ssm, first.k, first.v)  # per sequence
    tokens = _by_token(o)
    bounds = o.cu_seqlens
    if bounds is not None:
        sequence = sequence_of_token(bounds, o.v.shape[1])
        fresh = jnp.take_along_axis(bounds, sequence, axis=1) == jnp.arange(o.v.shape[1], dtype=jnp.int32)[None]
        tokens |= {"sequence": sequence.T, "fresh": fresh.T}

    def body(carry, token):
        if bounds is not None:
            begin = jax.tree.map(lambda a: _pick(a, token["sequence"]), starts)
            carry = jax.tree.map(lambda a, b: jnp.where(_like(token["fresh"], a), a, b), begin, carry)
        carry, y = _token(carry, o, token, rotary, norm_eps)
        return carry, (y, None if bounds is None else carry)

    last, (y, all_states) = jax.lax.scan(body, jax.tree.map(lambda a: a[:, 0], starts), tokens)
    y = jnp.moveaxis(y, 0, 1).astype(o.v.dtype)
    if bounds is None:
        ends = jax.tree.map(lambda a: a[:, None], last)
    elif o.v.shape[1] == 0:
        ends = starts
    else:
        end, empty = bounds[:, 1:], bounds[:, 1:] == bounds[:, :-1]

        def at_end(states, begin):
            chosen = jax.vmap(lambda a, i: a[i], (1, 0))(states, jnp.maximum(end - 1, 0))
            return jnp.where(_like(empty, begin), begin, chosen)

        ends = jax.tree.map(at_end, all_states, starts)
    return y, State(phase.radians(ends.phase).astype(dtype), ends.ssm, ends.k, ends.v)


def step(operands: StepOperands, rotary: str, norm_eps: float) -> tuple[jax.Array, ...]:
    """The new state's four arrays, each in its given type, and y [batch, seq, (rank,) heads, head_dim].

    Several tokens are the same numbers in one call as in one call each: between two the state takes its given types.
    """
    o = operands
    dtype = accumulator(o.v.dtype)

    def body(old, token):
        angle, *rest = (a.astype(dtype) for a in old)
        carry, y = _token(_Carry(phase.start(angle), *rest), o, token, rotary, norm_eps)
        new = State(phase.radians(carry.phase), carry.ssm, carry.k, carry.v)
        return State(*(a.astype(b.dtype) for a, b in zip(new, old, strict=True))), y.astype(o.v.dtype)

    state, tokens = State(o.state_angle, o.state_ssm, o.state_k, o.state_v), _by_token(o)
    if o.v.shape[1] == 1:  # not a loop of one turn, which XLA would see as a loop
        state, y = body(state, {name: a[0] for name, a in tokens.items()})
        return (*state, y[:, None])
    state, y = jax.lax.scan(body, state, tokens)
    return (*state, jnp.moveaxis(y, 0, 1))


def _by_token(o: Operands | StepOperands) -> dict[str, jax.Array]:
    """The arrays that change from token to token, seq first."""
    tokens = {name: jnp.moveaxis(getattr(o, name), 1, 0) for name in ("q", "k", "v", "angles")}
    tokens |= {name: jnp.moveaxis(getattr(o, name), 2, 0) for name in ("adt", "dt", "trap")}
    return tokens if o.z is None else tokens | {"z": jnp.moveaxis(o.z, 1, 0)}


def _token(carry: _Carry, o: Operands | StepOperands, token, rotary: str, norm_eps: float) -> tuple[_Carry, jax.Array]:
    """The recurrence of one token; `o` gives the parameters, `token` arrays without a seq axis."""
    dtype, heads = carry.ssm.dtype, carry.ssm.shape[1]
    q, k, v, angles, adt, dt, trap = (
        token[name].astype(dtype) for name in ("q", "k", "v", "angles", "adt", "dt", "trap")
    )
    now = phase.advance(carry.phase, phase.increment(angles, dt[..., None]))
    angle = phase.radians(now)[:, :, None]
    q = phase.rotate(per_head(q, heads) + o.q_bias.astype(dtype), angle, rotary)
    k = phase.rotate(per_head(k, heads) + o.k_bias.astype(dtype), angle, rotary)
    gamma, delta = weights(dt, trap)
    expanded = expand(v, o.mimo_v)
    pending = _outer(expand(carry.v, o.mimo_v), carry.k)
    decay = jnp.exp(adt)[..., None, None]
    ssm = decay * (carry.ssm + delta[..., None, None] * pending) + gamma[..., None, None] * _outer(expanded, k)
    out = jnp.einsum("bhpn,bhrn->bhrp", ssm, q, precision="highest")
    z = token["z"][:, None] if "z" in token else None
    return _Carry(now, ssm, k, v), epilogue(out[:, :, None], expanded[:, :, None], z, o, norm_eps)[:, 0]


def _outer(v: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bhrp,bhrn->bhpn", v, k, precision="highest")


def weights(dt: jax.Array, trap: jax.Array) -> tuple[jax.Array, jax.Array]:
    """gamma = sigmoid(trap) dt, of the present token, and delta = (1 - sigmoid(trap)) dt, of the one before."""
    return jax.nn.sigmoid(trap) * dt, jax.nn.sigmoid(-trap) * dt


def expand(v: jax.Array, weight: jax.Array | None) -> jax.Array:
    """[batch, heads, head_dim] -> [batch, heads, rank, head_dim], elementwise by [r, heads, rank, head_dim]."""
    return v[:, :, None] if weight is None else v[:, :, None] * weight.astype(v.dtype)


def per_head(group: jax.Array, heads: int) -> jax.Array:
    """[batch, rank, groups, state] -> [batch, heads, rank, state]: a group serves neighbouring heads."""
    return jnp.repeat(jnp.moveaxis(group, 2, 1), heads // max(group.shape[2], 1), axis=1)


def epilogue(
    out: jax.Array, v: jax.Array, z: jax.Array | None, o: Operands | StepOperands, norm_eps: float
) -> jax.Array:
    """Skip, norm, gate and fold, in this order.

    Args:
      out: [batch, heads, c, rank, head_dim], what c tokens read out, in the accumulator's type.
      v: the same shape, values after rank expansion.
      z: [batch, c, heads, head_dim] or None.
      o: for D, norm_weight, mimo_z, mimo_o.
      norm_eps: added to the mean square.

    Returns:
      [batch, c, heads, head_dim], or [batch, c, rank, heads, head_dim] where the ranks are not folded.
    """
    dtype = out.dtype
    if o.D is not None:
        out = out + o.D.astype(dtype)[:, :, None, None, None] * v
    if o.norm_weight is not None:
        mean_square = jnp.mean(jnp.square(out), axis=-1, keepdims=True)
        out = out * jax.lax.rsqrt(mean_square + norm_eps) * o.norm_weight.astype(dtype)[:, :, None, None]
    if z is not None:
        gate = jnp.moveaxis(z.astype(dtype), 1, 2)[:, :, :, None]
        out = out * jax.nn.silu(gate if o.mimo_z is None else gate * o.mimo_z.astype(dtype)[:, :, None])
    if o.mimo_v is None:
        return jnp.moveaxis(out[:, :, :, 0], 1, 2)
    if o.mimo_o is None:
        return jnp.moveaxis(out, 1, 3)
    return jnp.moveaxis((out * o.mimo_o.astype(dtype)[:, :, None]).sum(3), 1, 2)


def initial_state(o: Operands) -> State:
    """The state each sequence starts from, zeros where none is given; arrays [batch, sequences, heads, ...]."""
    dtype = accumulator(o.v.dtype)
    if o.state_ssm is not None:
        return State(*(a.astype(dtype) for a in (o.state_angle, o.state_ssm, o.state_k, o.state_v) if a is not None))
    batch, _, heads, head_dim = o.v.shape
    rank, width = o.q_bias.shape[2:]
    sequences = 1 if o.cu_seqlens is None else o.cu_seqlens.shape[1] - 1
    shapes = ((o.angles.shape[-1],), (head_dim, width), (rank, width), (head_dim,))
    zeros = (jnp.zeros((batch, sequences, heads, *shape), dtype) for shape in shapes)
    # Zeros that vary over the manual axes of the tokens, as the state will: a scan's carry keeps its type.
    return State(*manual_axes.unified((*zeros, o.v))[:4])


def last_key_and_value(last, empty, k, k_bias, v, angle, start_k, start_v, rotary: str) -> tuple[jax.Array, jax.Array]:
    """The k and v of the states of each row's sequences, looked up in the tokens.

    Args:
      last: [batch, sequences], each sequence's last token.
      empty: [batch, sequences], where there is none: then start_k and start_v are passed through.
      k: the operand, of at least one token.
      k_bias: the operand.
      v: the operand.
      angle: [batch, sequences, heads, pairs], the phase of the last token.
      start_k: k of the state before.
      start_v: v of the state before.
      rotary: how pairs lie.
    """
    dtype, heads = start_k.dtype, v.shape[2]
    rows = jax.vmap(lambda a, i: jnp.take(a, i, axis=0, mode="clip"))
    k = jax.vmap(lambda a: per_head(a, heads), 1, 1)(rows(k, last).astype(dtype))
    k = phase.rotate(k + k_bias.astype(dtype)[:, None], angle[:, :, :, None], rotary)
    empty = empty[..., None, None]
    return jnp.where(empty[..., None], start_k, k), jnp.where(empty, start_v, rows(v, last).astype(dtype))


def sequence_of_token(cu_seqlens: jax.Array, seq: int) -> jax.Array:
    """[batch, seq] int32: which sequence each token belongs to."""
    inner = cu_seqlens[:, 1:-1]
    return jax.vmap(lambda ends: jnp.searchsorted(ends, jnp.arange(seq, dtype=ends.dtype), side="right"))(inner).astype(
        jnp.int32
    )


def _pick(array: jax.Array, index: jax.Array) -> jax.Array:
    """array[b, index[b]] for every b."""
    return jax.vmap(lambda a, i: a[i])(array, index)


def _like(flag: jax.Array, array: jax.Array) -> jax.Array:
    """`flag`, whose axes are the first of the array's, with the others as axes of size 1."""
    return flag.reshape(*flag.shape, *(1,) * (array.ndim - flag.ndim))
