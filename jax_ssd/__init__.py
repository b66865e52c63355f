"""Mamba-2 (SSD) for JAX: GPU kernels behind one FFI handler, pure JAX everywhere else."""

from jax_ssd.conv import causal_conv1d, causal_conv1d_step
from jax_ssd.mamba2.api import mamba2, mamba2_step
from jax_ssd.norm import rms_norm_gated

__all__ = ["causal_conv1d", "causal_conv1d_step", "mamba2", "mamba2_step", "rms_norm_gated"]
