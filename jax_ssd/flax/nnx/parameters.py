"""What the layers' constructors share: initial values, sizes, and the types of small projections."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Initializer = Callable[..., jax.Array]
Metadata = Mapping[str, Any]
NO_METADATA: Metadata = MappingProxyType({})

uniform_fan_in: Initializer = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""Uniform in +-1/sqrt(fan_in), what the original models start their projections from."""


def initial_dt_bias(key: jax.Array, heads: int, init: tuple[float, float, float]) -> jax.Array:
    """The inverse softplus of a dt drawn log-uniformly; init is (min, max, floor)."""
    low, high, floor = init
    dt = jnp.exp(jax.random.uniform(key, (heads,), jnp.float32, math.log(low), math.log(high)))
    dt = jnp.maximum(dt, jnp.float32(floor))
    return dt + jnp.log(-jnp.expm1(-dt))


def sums_of_small_projections(dtype: Any) -> Any:
    """preferred_element_type of a few columns that are exponentiated later: worth float32 sums in a 16-bit layer."""
    return jnp.float32 if dtype is not None and jnp.dtype(dtype).itemsize == 2 else None


def preferences(implementation: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """An `implementation` argument as a value that can be hashed."""
    return implementation if implementation is None or isinstance(implementation, str) else tuple(implementation)


def head_count(in_features: int, inner: int, head_dim: int, num_groups: int) -> int:
    """inner / head_dim. Raises ValueError for sizes that do not divide each other."""
    if inner % head_dim:
        raise ValueError(
            f"head_dim must divide expand * in_features = {inner}, got head_dim = {head_dim} for {in_features=}."
        )
    if (inner // head_dim) % num_groups:
        raise ValueError(f"num_groups must divide the {inner // head_dim} heads, got {num_groups}.")
    return inner // head_dim


def require_features(x: jax.Array, in_features: int) -> None:
    """Raises ValueError unless x ends in the layer's features."""
    if x.ndim < 1 or x.shape[-1] != in_features:
        raise ValueError(f"x must end in in_features = {in_features} features, got shape {x.shape}.")


def batch_of_token(input_shape: Sequence[int], in_features: int) -> tuple[int, ...]:
    """The batch axes of the shape of one token. Raises ValueError unless it ends in the layer's features."""
    if not input_shape or input_shape[-1] != in_features:
        raise ValueError(
            f"input_shape must be that of one token, (..., in_features) = (..., {in_features}), "
            f"got {tuple(input_shape)}."
        )
    return tuple(input_shape[:-1])
