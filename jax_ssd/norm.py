"""Root-mean-square normalisation with a SiLU gate, as it follows the scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssd import shapes


def rms_norm_gated(
    x: jax.Array,
    z: jax.Array | None,
    weight: jax.Array | None,
    *,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
) -> jax.Array:
    """Normalises groups of neighbouring features by their root mean square and gates them with ``silu(z)``.

    With ``rms(v) = sqrt(mean(v^2) + eps)`` over each group of ``group_size`` features,
    ``u = x * silu(z); y = u / rms(u) * weight``, or ``y = x / rms(x) * weight * silu(z)`` when ``norm_before_gate``.
    Inputs are upcast to float32 (float64 stays), the result is cast to ``x``'s dtype.

    Args:
      x: ``[..., features]``, any float dtype.
      z: the gate before its SiLU, in ``x``'s shape; None leaves the gate out.
      weight: ``[features]``, any float dtype; None means ones.
      eps: added to the mean square; finite, at least 0.
      group_size: features normalised together, a divisor of ``features``; None means all of them. Mamba-2 uses
        ``features / groups``.
      norm_before_gate: gate the normalised values rather than normalise the gated ones.

    Returns:
      ``[..., features]`` in ``x``'s dtype.

    Raises:
      ValueError: a shape does not fit, ``eps`` is out of range, or ``group_size`` does not divide the features.
      TypeError: an argument is no array, no number or no flag, or a dtype is not a float.
    """
    op = "rms_norm_gated"
    x = shapes.as_array(op, "x", x)
    z = None if z is None else shapes.as_array(op, "z", z)
    weight = None if weight is None else shapes.as_array(op, "weight", weight)
    eps = shapes.number(op, "eps", eps)
    norm_before_gate = shapes.flag(op, "norm_before_gate", norm_before_gate)
    if group_size is not None:
        group_size = shapes.integer(op, "group_size", group_size, least=1)
    _check(x, z, weight, group_size)
    dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    value = x.astype(dtype)
    gate = None if z is None else jax.nn.silu(z.astype(dtype))
    if gate is not None and not norm_before_gate:
        value = value * gate
    value = _normalise(value, x.shape[-1] if group_size is None else group_size, eps)
    if weight is not None:
        value = value * weight.astype(dtype).reshape((1,) * (x.ndim - 1) + weight.shape)
    if gate is not None and norm_before_gate:
        value = value * gate
    return value.astype(x.dtype)


def _normalise(value: jax.Array, group_size: int, eps: float) -> jax.Array:
    groups = value.reshape((*value.shape[:-1], value.shape[-1] // max(group_size, 1), group_size))
    mean_square = jnp.mean(jnp.square(groups), axis=-1, keepdims=True)
    return (groups * lax.rsqrt(mean_square + jnp.asarray(eps, value.dtype))).reshape(value.shape)


def _check(x: jax.Array, z: jax.Array | None, weight: jax.Array | None, group_size: int | None) -> None:
    op = "rms_norm_gated"
    shapes.require_rank(op, "x", x, 1, "(..., features)")
    sizes: dict[str, int | tuple[int, ...]] = {"...": x.shape[:-1], "features": x.shape[-1]}
    axes = {"x": ("...", "features"), "z": ("...", "features"), "weight": ("features",)}
    for name, array in (("x", x), ("z", z), ("weight", weight)):
        if array is not None:
            shapes.require_float(op, name, array)
            shapes.require_shape(op, name, array, axes[name], sizes, shapes.origin("x", x, ("...", "features")))
    if group_size is not None and x.shape[-1] % group_size:
        raise ValueError(
            f"{op}: group_size: expected a divisor of the {x.shape[-1]} features of x, got {group_size}; "
            "Mamba-2 uses features / groups."
        )
