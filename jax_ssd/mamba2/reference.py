"""The definition of the operator: one token after another, in plain JAX.

Slow on purpose and differentiated by JAX itself, forward and reverse, to any order; everything else in this package is
checked against it. Arrays are in canonical form (see ops.py); the arithmetic is float32, or float64 for float64 inputs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ssd import manual_axes, segments


class Operands(NamedTuple):
    """Canonical arrays; r is 1 or batch, the row axis of per-head parameters."""

    x: jax.Array  # [batch, seq, heads, head_dim]
    dt: jax.Array  # [batch, seq, heads]
    A: jax.Array  # [r, heads]
    B: jax.Array  # [batch, seq, groups, state]
    C: jax.Array  # [batch, seq, groups, state]
    D: jax.Array | None = None  # [r, heads, head_dim]
    z: jax.Array | None = None  # [batch, seq, heads, head_dim]
    dt_bias: jax.Array | None = None  # [r, heads]
    initial_state: jax.Array | None = None  # [batch, heads, head_dim, state]
    runs: jax.Array | None = None  # [batch, seq] int32, see segments.py


class StepOperands(NamedTuple):
    """Canonical arrays of one token."""

    state: jax.Array  # [batch, heads, head_dim, state]
    x: jax.Array  # [batch, heads, head_dim]
    dt: jax.Array  # [batch, heads]
    A: jax.Array  # [r, heads]
    B: jax.Array  # [batch, groups, state]
    C: jax.Array  # [batch, groups, state]
    D: jax.Array | None = None  # [r, heads, head_dim]
    z: jax.Array | None = None  # [batch, heads, head_dim]
    dt_bias: jax.Array | None = None  # [r, heads]


def accumulator(dtype) -> jnp.dtype:
    """The type sums are kept in: float32, or float64 when the inputs are float64."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def without_padding(operands: Operands) -> Operands:
    """The operands with zeros for the tokens that are padding, which may hold NaN: no value and no gradient passes."""
    if operands.runs is None:
        return operands
    real = operands.runs >= 0

    def selected(array):
        mask = real.reshape(*real.shape, *(1,) * (array.ndim - 2))
        return jnp.where(mask, array, jnp.zeros((), array.dtype))

    tokens = {name: getattr(operands, name) for name in ("x", "dt", "B", "C", "z")}
    return operands._replace(**{name: selected(array) for name, array in tokens.items() if array is not None})


def step_size(dt: jax.Array, dt_bias: jax.Array | None, softplus: bool, limit: tuple[float, float], dtype) -> jax.Array:
    """dt as the recurrence uses it: bias, then softplus, then clamp, in that order.

    Args:
      dt: [batch, seq, heads], raw.
      dt_bias: [r, heads] or None.
      softplus: apply log(1 + exp(v)).
      limit: inclusive bounds (lo, hi). The gradient is 1 on lo <= v <= hi and 0 outside; NaN passes.
      dtype: type of the result.
    """
    value = dt.astype(dtype)
    if dt_bias is not None:
        value = value + dt_bias[:, None].astype(dtype)
    if softplus:
        value = jax.nn.softplus(value)
    low, high = (jnp.asarray(bound, dtype) for bound in limit)
    return jnp.where(value < low, low, jnp.where(value > high, high, value))


def scan(operands: Operands, softplus: bool, limit: tuple[float, float]) -> tuple[jax.Array, jax.Array]:
    """The recurrence over all tokens: y [batch, seq, heads, head_dim], final state [batch, heads, head_dim, state]."""
    x, dt, A, B, C, D, z, dt_bias, state, runs = without_padding(operands)
    batch, seq, heads, head_dim = x.shape
    dtype = accumulator(x.dtype)
    step = step_size(dt, dt_bias, softplus, limit, dtype)
    if state is None:
        state = jnp.zeros((batch, heads, head_dim, B.shape[-1]), dtype)
    # A scan's carry keeps its type, so it varies over the manual axes of the tokens from the beginning.
    state, _ = manual_axes.unified((state, x))
    tokens: list[jax.Array] = [x.astype(dtype), step, B.astype(dtype), C.astype(dtype)]
    if runs is not None:
        run, real = segments.split_runs(runs)
        fresh = jnp.pad(run[:, 1:] != run[:, :-1], ((0, 0), (min(seq, 1), 0)))
        tokens += [fresh, real]

    def token(state, arrays):
        x, step, B, C, *packing = arrays
        decay = jnp.exp(A.astype(dtype) * step)[:, :, None, None]
        update = (step[:, :, None] * x)[..., None] * _per_head(B, heads)[:, :, None, :]
        if packing:
            fresh, real = (flag[:, None, None, None] for flag in packing)
            kept = jnp.where(fresh, 0, state)
            state = jnp.where(real, decay * kept + update, state)
        else:
            state = decay * state + update
        y = jnp.einsum("bhpn,bhn->bhp", state, _per_head(C, heads), precision="highest")
        if packing:
            y = jnp.where(packing[1][:, None, None], y, 0)
        return state, y

    time_first = [jnp.moveaxis(array, 1, 0) for array in tokens]
    state, y = jax.lax.scan(token, state.astype(dtype), time_first)
    y = jnp.moveaxis(y, 0, 1)
    return epilogue(y, x, D, z, runs), state


def epilogue(y: jax.Array, x: jax.Array, D: jax.Array | None, z: jax.Array | None, runs: jax.Array | None) -> jax.Array:
    """Skip, gate and padding, then the cast to x's type; y [batch, seq, heads, head_dim] in the accumulator's type."""
    if D is not None:
        y = y + D[:, None].astype(y.dtype) * x.astype(y.dtype)
    if z is not None:
        y = y * jax.nn.silu(z.astype(y.dtype))
    if runs is not None:
        y = jnp.where((runs >= 0)[:, :, None, None], y, 0)
    return y.astype(x.dtype)


def step(operands: StepOperands, softplus: bool, limit: tuple[float, float]) -> tuple[jax.Array, jax.Array]:
    """One token: the new state, in the given state's type, and y [batch, heads, head_dim] in x's type."""
    state, x, dt, A, B, C, D, z, dt_bias = operands
    heads, dtype = x.shape[1], accumulator(x.dtype)
    size = step_size(dt[:, None], dt_bias, softplus, limit, dtype)[:, 0]
    decay = jnp.exp(A.astype(dtype) * size)[:, :, None, None]
    update = (size[:, :, None] * x.astype(dtype))[..., None] * _per_head(B.astype(dtype), heads)[:, :, None, :]
    new_state = decay * state.astype(dtype) + update
    y = jnp.einsum("bhpn,bhn->bhp", new_state, _per_head(C.astype(dtype), heads), precision="highest")
    y = epilogue(y[:, None], x[:, None], D, None if z is None else z[:, None], None)[:, 0]
    return new_state.astype(state.dtype), y


def _per_head(group: jax.Array, heads: int) -> jax.Array:
    """[batch, groups, state] -> [batch, heads, state]: each group serves neighbouring heads."""
    return jnp.repeat(group, heads // max(group.shape[1], 1), axis=1)
