"""What the layers' constructors share: initial values, sizes, and the types of small projections."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_ssd import dispatch, shapes

Initializer = Callable[..., jax.Array]
Metadata = Mapping[str, Any]
NO_METADATA: Metadata = MappingProxyType({})

uniform_fan_in: Initializer = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""Uniform in +-1/sqrt(fan_in), what the original models start their projections from."""


def initial_dt_bias(layer: str, key: jax.Array, heads: int, init: tuple[float, float, float]) -> jax.Array:
    """The inverse softplus of a dt drawn log-uniformly; init is (min, max, floor).

    Raises ValueError or TypeError for anything but three numbers with 0 < min <= max and 0 <= floor.
    """
    low, high, floor = numbers(layer, "dt_init", init, ("min", "max", "floor"))
    if not 0 < low <= high:
        raise ValueError(
            f"{layer}: dt_init: expected 0 < min <= max, got {init!r}; pass for instance (1e-3, 1e-1, 1e-4)."
        )
    dt = jnp.exp(jax.random.uniform(key, (heads,), jnp.float32, math.log(low), math.log(high)))
    dt = jnp.maximum(dt, jnp.float32(floor))
    return dt + jnp.log(-jnp.expm1(-dt))


def sums_of_small_projections(dtype: Any) -> Any:
    """preferred_element_type of a few columns that are exponentiated later: worth float32 sums in a 16-bit layer."""
    return jnp.float32 if dtype is not None and jnp.dtype(dtype).itemsize == 2 else None


def preferences(implementation: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """An `implementation` argument as a value that can be hashed; refused as in the functions that take it."""
    dispatch.preferences(implementation)
    return implementation if implementation is None or isinstance(implementation, str) else tuple(implementation)


def positive(layer: str, **sizes: Any) -> None:
    """Raises TypeError unless all are integers, ValueError unless they are at least 1."""
    for name, size in sizes.items():
        shapes.integer(layer, name, size, least=1)


def numbers(layer: str, name: str, values: Any, words: Sequence[str]) -> tuple[float, ...]:
    """Finite numbers that are not negative, one for each of the words that say what they are."""
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(words):
        raise TypeError(
            f"{layer}: {name}: expected ({', '.join(words)}), got {values!r}; pass a tuple of {len(words)} numbers."
        )
    return tuple(shapes.number(layer, f"{name}, {word}", one) for word, one in zip(words, values, strict=True))


def require_rngs(layer: str, rngs: Any) -> None:
    """Raises TypeError for anything but nnx.Rngs, a key or a seed for instance."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"{layer}: rngs: expected flax.nnx.Rngs, got {type(rngs).__name__}; pass for instance Rngs(0).")


def require_callables(layer: str, **initialisers: Any) -> None:
    """Raises TypeError for an initialiser that cannot be called."""
    for name, one in initialisers.items():
        if not callable(one):
            raise TypeError(
                f"{layer}: {name}: expected an initialiser, got {one!r}; pass for instance nnx.initializers."
                "lecun_normal()."
            )


def require_mappings(layer: str, **metadata: Any) -> None:
    """Raises TypeError for metadata of parameters that is no mapping."""
    for name, one in metadata.items():
        if not isinstance(one, Mapping):
            raise TypeError(
                f"{layer}: {name}: expected a mapping, got {one!r}; leave it out, or pass for instance "
                "{'out_sharding': (None, 'heads')}."
            )


def window_dtype(dtype: Any, param_dtype: Any) -> Any:
    """What holds the projected tokens of a layer exactly, whichever 16- or 32-bit type the inputs are of."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(dtype) if dtype is not None else jnp.promote_types(param_dtype, jnp.float32)


def float_type(layer: str, name: str, dtype: Any) -> jnp.dtype:
    """Raises TypeError for a type that is no float."""
    try:
        known = None if dtype is None else jnp.dtype(dtype)
    except TypeError:  # no type at all
        known = None
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise TypeError(f"{layer}: {name}: expected a floating type, got {dtype!r}; pass for instance jnp.float32.")
    return known


def head_count(layer: str, in_features: int, expand: int, head_dim: int, num_groups: int) -> int:
    """expand * in_features / head_dim.

    Raises ValueError for sizes that are not positive or do not divide each other, TypeError for others than integers.
    """
    positive(layer, in_features=in_features, expand=expand, head_dim=head_dim, num_groups=num_groups)
    inner = expand * in_features
    if inner % head_dim:
        raise ValueError(
            f"{layer}: head_dim: expected a divisor of expand * in_features = {expand} * {in_features} = {inner}, got "
            f"{head_dim}; change one of them."
        )
    if (inner // head_dim) % num_groups:
        raise ValueError(
            f"{layer}: num_groups: expected a divisor of the {inner // head_dim} heads, got {num_groups}; each group "
            "serves as many heads."
        )
    return inner // head_dim


def require_features(layer: str, x: Any, in_features: int) -> jax.Array:
    """x as an array. Raises TypeError if it is none, ValueError unless it ends in the layer's features."""
    x = shapes.as_array(layer, "x", x)
    if x.ndim < 1 or x.shape[-1] != in_features:
        raise ValueError(
            f"{layer}: x: expected a last axis of in_features = {in_features}, got shape {x.shape}; transpose it, or "
            "make the layer for as many."
        )
    return x


def require_sequence(layer: str, x: Any, in_features: int) -> jax.Array:
    """``require_features`` of what has a sequence axis too."""
    x = require_features(layer, x, in_features)
    shapes.require_rank(layer, "x", x, 2, "(..., seq, in_features)")
    return x


def require_carry(
    layer: str, name: str, carry: Any, kind: type, expected: Mapping[str, tuple[int, ...]] | None
) -> None:
    """Raises TypeError for anything but a carry of the layer, ValueError for one of another shape.

    expected: the shapes of its arrays; None does not compare them.
    """
    if not isinstance(carry, kind):
        raise TypeError(
            f"{layer}: {name}: expected a {kind.__name__}, got {type(carry).__name__}; pass what initialize_carry, "
            "return_carry=True or step gave."
        )
    for field, shape in (expected or {}).items():
        array = shapes.as_array(layer, f"{name}.{field}", getattr(carry, field))
        shapes.require_float(layer, f"{name}.{field}", array)
        if array.shape != shape:
            raise ValueError(
                f"{layer}: {name}.{field}: expected shape {shape}, got {array.shape}; give the carry the sizes of "
                "the layer and the batch axes of x, which is [..., in_features] in a step, else [..., seq, "
                "in_features]."
            )


def batch_axes(layer: str, name: str, shape: Any) -> tuple[int, ...]:
    """Axes of a shape as integers. Raises TypeError unless it is a sequence of these, ValueError if one is negative."""
    if not isinstance(shape, (Sequence, np.ndarray)) or isinstance(shape, (str, bytes)):
        raise TypeError(f"{layer}: {name}: expected a tuple of sizes, got {shape!r}; pass for instance (2,).")
    return tuple(shapes.integer(layer, name, size, least=0) for size in shape)


def batch_of_token(layer: str, input_shape: Sequence[int], in_features: int) -> tuple[int, ...]:
    """The batch axes of the shape of one token. Raises ValueError unless it ends in the layer's features."""
    axes = batch_axes(layer, "input_shape", input_shape)
    if not axes or axes[-1] != in_features:
        raise ValueError(
            f"{layer}: input_shape: expected that of one token, (..., in_features) = (..., {in_features}), got {axes}; "
            "pass the shape of x without its sequence axis."
        )
    return axes[:-1]
