"""Flax layers. This package, and no other part of jax_ssd below `models`, needs flax."""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("jax_ssd.flax needs flax, which is not installed: pip install jax_ssd[flax]") from error
