"""A case is a named size and what it is called with: see jax_ssd/sizes.py, which the library's tools use too."""

from jax_ssd.sizes import SIZES, Size, find

Case, CASES = Size, SIZES

__all__ = ["CASES", "Case", "find"]
