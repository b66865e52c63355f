"""Flax layers. This package, and no other part of jax_ssd below `models`, needs flax."""

from jax_ssd import config

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(f"jax_ssd.flax needs flax, which is not installed: {config.install('flax')}") from error
