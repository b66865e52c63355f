"""Mamba-2 (SSD) and Mamba-3 for JAX: GPU kernels behind one FFI handler, pure JAX everywhere else."""

from importlib.metadata import PackageNotFoundError, version

from jax_ssd.conv import causal_conv1d, causal_conv1d_step
from jax_ssd.ffi_targets import EXPORT_DISABLED_CHECKS, LOOP_AS_GRAPH
from jax_ssd.mamba2.api import mamba2, mamba2_step
from jax_ssd.mamba3.api import Mamba3Schedule, Mamba3State, mamba3, mamba3_schedule, mamba3_step
from jax_ssd.norm import rms_norm_gated
from jax_ssd.paths import Path, dispatch_paths
from jax_ssd.search import Tuned, autotune

try:
    __version__ = version("jax_ssd")
except PackageNotFoundError:  # a source checkout on the path
    __version__ = "0+unknown"

__all__ = [
    "EXPORT_DISABLED_CHECKS",
    "LOOP_AS_GRAPH",
    "Mamba3Schedule",
    "Mamba3State",
    "Path",
    "Tuned",
    "__version__",
    "autotune",
    "causal_conv1d",
    "causal_conv1d_step",
    "dispatch_paths",
    "mamba2",
    "mamba2_step",
    "mamba3",
    "mamba3_schedule",
    "mamba3_step",
    "rms_norm_gated",
]
