"""Checks of what callers pass, from tables: one place that knows how an argument is wrong and how to say so.

Every message names the argument, what was expected, what was received and the cure.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("bfloat16", "float16", "float32", "float64")
Sizes = Mapping[str, int | tuple[int, ...]]
NOWHERE: Mapping[str, str] = MappingProxyType({})


def as_array(op: str, name: str, value) -> jax.Array:
    """The argument as an array. Raises TypeError or ValueError, naming it, for what is none."""
    try:
        if value is None:  # which some releases of JAX take for NaN
            raise TypeError("a required argument is missing")
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as cause:
        raise _no_array(op, name, value) from cause
    if jnp.issubdtype(array.dtype, jnp.integer):
        held = np.iinfo(array.dtype)  # without jax_enable_x64 at most 32 bits, into which others would be wrapped
        for row in _leaves(value):
            wide = isinstance(row, np.ndarray) and row.size and row.dtype.kind in "iu"
            if wide and (row.min() < held.min or row.max() > held.max):
                raise ValueError(
                    f"{op}: {name}: expected integers that {array.dtype.name} holds, got {row.min()} to {row.max()}; "
                    "number them anew, or set jax_enable_x64."
                )
    return array


def _no_array(op: str, name: str, value) -> Exception:
    """What keeps a value from being an array, in words."""
    if isinstance(value, np.ndarray):
        return TypeError(
            f"{op}: {name}: expected an array of a type that JAX has, got a numpy array of {value.dtype}; convert it "
            "with .astype."
        )
    nested = isinstance(value, (list, tuple))
    leaves = _leaves(value)
    for leaf in leaves:
        number = isinstance(leaf, (bool, int, float, complex, jax.Array))
        if isinstance(leaf, (np.generic, np.ndarray)):  # not text, objects, dates, long doubles
            number = leaf.dtype.char not in "USOMmgG"
        if not number:
            got = f"a {type(value).__name__} that holds {type(leaf).__name__}" if nested else type(leaf).__name__
            return TypeError(f"{op}: {name}: expected an array, got {got}; pass a jax or numpy array.")
    held = jnp.zeros((), int).dtype.name
    bits = max((int(leaf).bit_length() for leaf in leaves if isinstance(leaf, (int, np.integer))), default=0)
    if bits >= jnp.iinfo(held).bits:
        return ValueError(
            f"{op}: {name}: expected integers that {held} holds, got one of {bits} bits; pass floats if it is no "
            "label, number labels anew, or set jax_enable_x64."
        )
    return ValueError(
        f"{op}: {name}: expected an array, got a nested {type(value).__name__} whose rows differ in shape; pad them to "
        "one length."
    )


def _leaves(value) -> list[Any]:
    """What a nested list holds; anything else is one leaf."""
    return jax.tree.leaves(value, is_leaf=lambda part: not isinstance(part, (list, tuple)))


def require_float(op: str, name: str, array: jax.Array) -> None:
    if array.dtype.name not in FLOATS:
        raise TypeError(
            f"{op}: {name}: expected a floating type out of {FLOATS}, got {array.dtype.name}; convert it with .astype."
        )


def labels(
    op: str, name: str, value, letters: Sequence[str], sizes: Sizes, origins: Mapping[str, str] = NOWHERE
) -> jax.Array:
    """The argument as an array of integers of exactly this shape."""
    array = as_array(op, name, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{op}: {name}: expected an integer type, got {array.dtype.name}; convert it to int32.")
    require_shape(op, name, array, letters, sizes, origins)
    return array


def require_dtype(op: str, name: str, array: jax.Array, allowed: Sequence[str], why: str) -> None:
    if array.dtype.name not in allowed:
        expected = " or ".join(dict.fromkeys(allowed))
        raise TypeError(
            f"{op}: {name}: expected {expected} ({why}), got {array.dtype.name}; "
            f"convert it with .astype('{allowed[0]}')."
        )


def require_shape(
    op: str,
    name: str,
    array: jax.Array,
    letters: Sequence[str],
    sizes: Sizes,
    origins: Mapping[str, str] = NOWHERE,
) -> None:
    """Shape must be exactly the named sizes: nothing is broadcast silently.

    Args:
      letters: axis names; the name "..." stands for sizes["..."], a tuple.
      origins: by axis name, the argument that its size was taken from, with its shape (`origin`): it may be the one
        that is wrong.
    """
    expected = expand(letters, sizes)
    if array.shape != expected:
        words = f"({', '.join(letters)}) = {expected}"
        others = dict.fromkeys(origins[letter] for letter in letters if letter in origins)
        beside = " and ".join(other for other in others if not other.startswith(f"{name} of "))
        raise ValueError(
            f"{op}: {name}: expected shape {words}, got {array.shape}{beside and f' beside {beside}'}; "
            f"reshape, broadcast or transpose {name} so that its axes are these, in this order."
        )


def origin(name: str, array: jax.Array, letters: Sequence[str]) -> dict[str, str]:
    """For require_shape: the sizes of these axes were taken from this argument."""
    return dict.fromkeys(letters, f"{name} of {array.shape}")


def expand(letters: Sequence[str], sizes: Sizes) -> tuple[int, ...]:
    shape: list[int] = []
    for letter in letters:
        size = sizes[letter]
        shape.extend(size if isinstance(size, tuple) else (size,))
    return tuple(shape)


def require_rank(op: str, name: str, array: jax.Array, least: int, words: str) -> None:
    if array.ndim < least:
        raise ValueError(
            f"{op}: {name}: expected at least {least} {'axis' if least == 1 else 'axes'} {words}, got shape "
            f"{array.shape}; add the missing axes."
        )


def require_divides(op: str, heads: int, groups: int, names: tuple[str, str, str] = ("B", "x", "B and C")) -> None:
    """names: what has the groups, what has the heads, and all that have the groups."""
    grouped, headed, all_grouped = names
    if (groups == 0 and heads) or (groups and heads % groups):
        raise ValueError(
            f"{op}: {grouped}: expected a number of groups that divides the {heads} heads of {headed}, got {groups} "
            f"groups; each group of {all_grouped} serves heads / groups neighbouring heads."
        )


def require_choice(op: str, name: str, value, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{op}: {name}: expected one of {tuple(choices)}, got {value!r}; pass one of these words.")
    return value


def number(op: str, name: str, value) -> float:
    """A finite number that is not negative, as a float; text is none."""
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError(f"{type(value).__name__} is no number")
        result = float(value)
    except (TypeError, ValueError, OverflowError) as cause:
        raise TypeError(
            f"{op}: {name}: expected a number, got {value!r}; it is static, so pass a Python float."
        ) from cause
    if not 0.0 <= result < math.inf:
        raise ValueError(
            f"{op}: {name}: expected a finite number of at least 0, got {value!r}; pass for instance 1e-5."
        )
    return result


def limits(op: str, dt_limit) -> tuple[float, float]:
    """dt_limit as a checked pair of floats."""
    try:
        if not isinstance(dt_limit, (Sequence, np.ndarray, jax.Array)) or isinstance(dt_limit, (str, bytes)):
            raise TypeError("not a pair")
        if any(isinstance(bound, (str, bytes, bool)) for bound in dt_limit):
            raise TypeError("not numbers")
        low, high = (float(bound) for bound in dt_limit)
    except (TypeError, ValueError, OverflowError) as cause:
        raise TypeError(
            f"{op}: dt_limit: expected two numbers (low, high), got {dt_limit!r}; "
            "pass for instance (0.0, float('inf'))."
        ) from cause
    # The first also refuses NaN, the others what is no step at all, also once it is a float32.
    if not low <= high or low > _LARGEST or high < -_LARGEST:
        raise ValueError(
            f"{op}: dt_limit: expected low <= high with a step size between them, got ({low}, {high}); "
            "pass for instance (0.0, float('inf'))."
        )
    return low, high


def flag(op: str, name: str, value) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{op}: {name}: expected True or False, got {value!r}; it is static, so pass a Python bool.")
    return bool(value)


def integer(op: str, name: str, value, least: int) -> int:
    """A static integer that is not too small."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{op}: {name}: expected an integer, got {value!r}; it is static, so pass a Python int.")
    if value < least:
        raise ValueError(f"{op}: {name}: expected at least {least}, got {value}; pass for instance {max(least, 1)}.")
    return int(value)


def chunk(op: str, chunk_size) -> int | None:
    if chunk_size is None:
        return None
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, np.integer)):
        raise TypeError(f"{op}: chunk_size: expected an integer or None, got {chunk_size!r}; pass for instance 64.")
    if chunk_size < 1:
        raise ValueError(
            f"{op}: chunk_size: expected at least 1 token, got {chunk_size}; pass for instance 64, or None."
        )
    return int(chunk_size)


_LARGEST = float(np.finfo(np.float32).max)
_PRECISIONS = {
    "default": "default",
    "bfloat16": "default",
    "fastest": "default",
    "tensorfloat32": "default",
    "TF32_TF32_F32": "default",
    "high": "highest",
    "bfloat16_3x": "highest",
    "highest": "highest",
    "float32": "highest",
}
# Algorithm presets that jax_default_matmul_precision may hold and that keep more than TF32; the others keep no more.
_FULL_PRESETS = (
    "BF16_BF16_F32_X3",
    "BF16_BF16_F32_X6",
    "BF16_BF16_F32_X9",
    "TF32_TF32_F32_X3",
    "F32_F32_F32",
    "F64_F64_F64",
)


def precision(op: str, value) -> str:
    """ "default" or "highest"; None follows jax_default_matmul_precision, whatever JAX takes for it."""
    if value is None:
        # JAX adds its flags to the configuration at run time, where a type checker does not see them.
        word = jax.config.jax_default_matmul_precision or "default"  # pyright: ignore[reportAttributeAccessIssue]
        return _PRECISIONS.get(word, "highest" if word in _FULL_PRESETS else "default")
    word = value.name.lower() if isinstance(value, jax.lax.Precision) else value
    if not isinstance(word, str) or word not in _PRECISIONS:
        raise ValueError(
            f"{op}: precision: expected one of {tuple(_PRECISIONS)}, a jax.lax.Precision or None, got {value!r}; "
            "pass 'highest' for full float32 products."
        )
    return _PRECISIONS[word]
