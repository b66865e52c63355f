"""Flax NNX layers: Mamba-2, Mamba-3, and what the first is built of."""

from jax_ssd.flax.nnx.mamba2 import CausalConv1d, Mamba2, Mamba2Carry
from jax_ssd.flax.nnx.mamba3 import Mamba3, Mamba3State
from jax_ssd.flax.nnx.norm import GatedRMSNorm
from jax_ssd.flax.nnx.parameters import Initializer, uniform_fan_in

__all__ = [
    "CausalConv1d",
    "GatedRMSNorm",
    "Initializer",
    "Mamba2",
    "Mamba2Carry",
    "Mamba3",
    "Mamba3State",
    "uniform_fan_in",
]
