"""Packed sequences: from the caller's segment ids to run numbers, the form the kernels read.

A run is a maximal stretch of tokens that share one state. Run numbers of a row start at 0, never decrease and grow by
one at each boundary, so "same run" is one integer comparison and labels that come back later are told apart.
"""

import jax
import jax.numpy as jnp


def runs_from_segment_ids(segment_ids: jax.Array) -> jax.Array:
    """Number the runs of each row.

    Args:
      segment_ids: [..., seq] integers. Equal neighbours belong together; a negative id marks padding, which is no
        boundary by itself: the tokens before and after it are compared with each other.

    Returns:
      [..., seq] int32: the run number v >= 0 of a token, or -v - 1 (bitwise ~v) for padding lying in run v.
    """
    axis = segment_ids.ndim - 1
    real = segment_ids >= 0
    position = jax.lax.broadcasted_iota(jnp.int32, segment_ids.shape, axis)
    last_real = jax.lax.cummax(jnp.where(real, position, -1), axis=axis)
    filled = jnp.take_along_axis(segment_ids, jnp.maximum(last_real, 0), axis=axis)
    changed = real[..., 1:] & (last_real[..., :-1] >= 0) & (segment_ids[..., 1:] != filled[..., :-1])
    first = jnp.zeros_like(real[..., :1])
    run = jnp.cumsum(jnp.concatenate([first, changed], axis), axis, dtype=jnp.int32)
    return jnp.where(real, run, ~run)


def split_runs(runs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The run number of every token, padding included, and whether it is a real token."""
    return jnp.where(runs < 0, ~runs, runs), runs >= 0
