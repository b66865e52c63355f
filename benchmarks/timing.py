"""How long one call takes on the device: see jax_ssd/timing.py, which the library's tuner uses too."""

from jax_ssd.timing import COLD_BYTES, GPU_OPTIONS, Effort, Timing, alone, calls_per_program, compile_program, measure

__all__ = ["COLD_BYTES", "GPU_OPTIONS", "Effort", "Timing", "alone", "calls_per_program", "compile_program", "measure"]
