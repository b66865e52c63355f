"""What the layers' constructors share: initial values, sizes, and the types of small projections."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ssd import dispatch, shapes

Initializer = Callable[..., jax.Array]
Metadata = Mapping[str, Any]
NO_METADATA: Metadata = MappingProxyType({})

uniform_fan_in: Initializer = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""Uniform in +-1/sqrt(fan_in), what the original models start their projections from."""


def initial_dt_bias(key: jax.Array, heads: int, init: tuple[float, float, float]) -> jax.Array:
    """The inverse softplus of a dt drawn log-uniformly; init is (min, max, floor).

    Raises ValueError or TypeError for anything but three numbers with 0 < min <= max and 0 <= floor.
    """
    low, high, floor = numbers("dt_init", init, ("min", "max", "floor"))
    if not 0 < low <= high:
        raise ValueError(f"dt_init: expected 0 < min <= max, got {init!r}; pass for instance (1e-3, 1e-1, 1e-4).")
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


def positive(**sizes: Any) -> None:
    """Raises TypeError unless all are integers, ValueError unless they are at least 1."""
    for name, size in sizes.items():
        shapes.integer("layer", name, size, least=1)


def numbers(name: str, values: Any, words: Sequence[str]) -> tuple[float, ...]:
    """Finite numbers that are not negative, one for each of the words that say what they are."""
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(words):
        raise TypeError(f"layer: {name}: expected ({', '.join(words)}), got {values!r}.")
    return tuple(shapes.number("layer", f"{name}, {word}", one) for word, one in zip(words, values, strict=True))


def window_dtype(dtype: Any, param_dtype: Any) -> Any:
    """What holds the projected tokens of a layer exactly, whichever 16- or 32-bit type the inputs are of."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(dtype) if dtype is not None else jnp.promote_types(param_dtype, jnp.float32)


def float_type(name: str, dtype: Any) -> jnp.dtype:
    """Raises TypeError for a type that is no float."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"layer: {name}: expected a floating type, got {dtype!r}; pass for instance jnp.float32.")
    return jnp.dtype(dtype)


def head_count(in_features: int, inner: int, head_dim: int, num_groups: int) -> int:
    """inner / head_dim. Raises ValueError for sizes that are not positive or do not divide each other."""
    positive(in_features=in_features, inner=inner, head_dim=head_dim, num_groups=num_groups)
    if inner % head_dim:
        raise ValueError(
            f"head_dim must divide expand * in_features = {inner}, got head_dim = {head_dim} for {in_features=}; "
            "change one of them."
        )
    if (inner // head_dim) % num_groups:
        raise ValueError(
            f"num_groups must divide the {inner // head_dim} heads, got {num_groups}; each group serves as many heads."
        )
    return inner // head_dim


def require_features(x: Any, in_features: int) -> jax.Array:
    """x as an array. Raises TypeError if it is none, ValueError unless it ends in the layer's features."""
    x = shapes.as_array("layer", "x", x)
    if x.ndim < 1 or x.shape[-1] != in_features:
        raise ValueError(
            f"x must end in in_features = {in_features} features, got shape {x.shape}; transpose it, or make the layer "
            "for as many."
        )
    return x


def batch_of_token(input_shape: Sequence[int], in_features: int) -> tuple[int, ...]:
    """The batch axes of the shape of one token. Raises ValueError unless it ends in the layer's features."""
    if not input_shape or input_shape[-1] != in_features:
        raise ValueError(
            f"input_shape must be that of one token, (..., in_features) = (..., {in_features}), "
            f"got {tuple(input_shape)}; pass the shape of x without its sequence axis."
        )
    return tuple(input_shape[:-1])
