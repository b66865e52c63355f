"""The norm of both layers as a module."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ssd import shapes
from jax_ssd.flax.nnx.parameters import NO_METADATA, Metadata, positive
from jax_ssd.norm import rms_norm_gated


class GatedRMSNorm(nnx.Module):
    """``rms_norm_gated`` with its ``scale [features]``, kept in float32; without z it is a plain norm."""

    def __init__(
        self,
        features: int,
        *,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        epsilon: float = 1e-5,
        scale_metadata: Metadata = NO_METADATA,
    ):
        positive("GatedRMSNorm", features=features)
        if group_size is not None and features % shapes.integer("GatedRMSNorm", "group_size", group_size, least=1):
            raise ValueError(
                f"GatedRMSNorm: group_size: expected a divisor of the {features} features, got {group_size}; None "
                "takes all of them."
            )
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32), **scale_metadata)
        self.group_size = group_size
        self.norm_before_gate = shapes.flag("GatedRMSNorm", "norm_before_gate", norm_before_gate)
        self.epsilon = shapes.number("GatedRMSNorm", "epsilon", epsilon)

    def __call__(self, x: jax.Array, z: jax.Array | None = None) -> jax.Array:
        return rms_norm_gated(
            x,
            z,
            self.scale[...],
            eps=self.epsilon,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
        )
