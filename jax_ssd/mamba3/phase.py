"""The rotary phase of Mamba-3: a sum over the whole sequence, counted in turns.

phi_t = phi_{t-1} + pi tanh(angles_t) dt_t grows without bound, so a float32 running sum loses absolute precision and
its rounding depends on the order of summation. In float32 each increment is therefore rounded to an integer multiple of
2^-32 turns and summed in int32, which wraps where the phase does: the sum is exact and the same for any order, chunk or
split. Beside it runs the real-valued sum: its value is not used, its derivative is that of the phase. In float64 the
real-valued sum is the phase.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ssd import manual_axes

_TURN = 4294967296.0  # 2^32 units
_PER_UNIT = 2 * math.pi / _TURN
# (tanh(x) / x - 1) / x^2 up to 0.6 by powers of x^2, fitted at Chebyshev points; right to 1.2e-9.
_TANH = (-0.33333334, 0.1333331, -0.05396097, 0.021783095, -0.0083913896, 0.0023477534)


class Phase(NamedTuple):
    """A phase; both arrays have the same shape."""

    turns: jax.Array  # int32, units of 2^-32 turns; zeros in float64
    real: jax.Array  # radians, float32 or float64


def start(angle: jax.Array) -> Phase:
    """The phase of an angle in radians, any multiple of 2 pi included."""
    return Phase(_fixed_point(angle * (0.5 / math.pi)), angle)


def increment(angles: jax.Array, dt: jax.Array) -> Phase:
    """pi tanh(angles) dt; dt broadcasts against angles."""
    return Phase(_fixed_point(0.5 * _tanh(angles) * dt), math.pi * jnp.tanh(angles) * dt)


def _tanh(x: jax.Array) -> jax.Array:
    """Without a systematic error, which a sum would show: XLA's is too small by 2e-8 of its value, near 0 by 9e-8."""
    square, series = x * x, jnp.zeros((), x.dtype)
    for coefficient in reversed(_TANH):
        series = series * square + coefficient
    far = jnp.sign(x) * (1 - 2 / (1 + jnp.exp(2 * jnp.abs(x))))
    return jnp.where(jnp.abs(x) < 0.6, x + x * (square * series), far)


def advance(phase: Phase, step: Phase) -> Phase:
    """The phase after one increment."""
    return Phase(phase.turns + step.turns, phase.real + step.real)


def advance_all(phase: Phase, steps: Phase, axis: int) -> Phase:
    """The phases after each of the increments along `axis`, from a phase without that axis."""
    return Phase(
        jnp.expand_dims(phase.turns, axis) + jnp.cumsum(steps.turns, axis=axis, dtype=jnp.int32),
        jnp.expand_dims(phase.real, axis) + jnp.cumsum(steps.real, axis=axis),
    )


def radians(phase: Phase) -> jax.Array:
    """The phase in [-pi, pi] (float32) or unreduced (float64); NaN where an increment was not a finite number."""
    if phase.real.dtype == jnp.float64:
        return phase.real
    # A zero with the derivative of the real-valued sum. A custom_jvp would say it more plainly, but JAX drops its rule
    # in the second derivative of a scan.
    slope = phase.real - jax.lax.stop_gradient(phase.real)
    return phase.turns.astype(phase.real.dtype) * _PER_UNIT + slope


def _fixed_point(turns: jax.Array) -> jax.Array:
    if turns.dtype == jnp.float64:
        return manual_axes.unified((jnp.zeros(turns.shape, jnp.int32), turns))[0]
    turns = jax.lax.stop_gradient(turns)
    part = turns - jnp.round(turns)
    part = jnp.where(part >= 0.5, part - 1.0, part)  # half a turn is -2^31, since 2^31 is no int32
    return jnp.round(part * _TURN).astype(jnp.int32)


def rotate(x: jax.Array, angle: jax.Array, rotary: str) -> jax.Array:
    """Rotate pairs of the last axis: (a, b) -> (a cos - b sin, a sin + b cos).

    Args:
      x: [..., n], n even.
      angle: [..., na], na <= n / 2, its other axes broadcast against those of x. Coordinates in no pair stay.
      rotary: "pairwise": pair i is (2i, 2i + 1). "half": pair i is (i, i + n / 2).
    """
    width, pairs = x.shape[-1], angle.shape[-1]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if rotary == "pairwise":
        first, second = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        turned = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=-1)
        return jnp.concatenate([turned.reshape(*x.shape[:-1], 2 * pairs), x[..., 2 * pairs :]], axis=-1)
    half = width // 2
    first, second = x[..., :pairs], x[..., half : half + pairs]
    parts = [first * cos - second * sin, x[..., pairs:half], first * sin + second * cos, x[..., half + pairs :]]
    return jnp.concatenate(parts, axis=-1)
