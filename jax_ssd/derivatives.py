"""What the derivative rules of every model share: refusals in words, and operands between tuples and flat lists."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jax_ssd import op

FORWARD_MODE = (
    "{name} has a reverse-mode derivative of first order only (grad, vjp), not jvp, jacfwd, linearize or second "
    "derivatives; implementation='reference' supports them all."
)


def guarded(operands, name: str):
    """The operands with forward-mode differentiation refused in words."""
    message = FORWARD_MODE.format(name=name)

    def guard(array):
        return op.reverse_mode_only(array, message) if jnp.issubdtype(array.dtype, jnp.inexact) else array

    return jax.tree.map(guard, operands)


@contextlib.contextmanager
def in_words(name: str) -> Iterator[None]:
    """Our refusal for JAX's own, which comes first where tangents are both batched and traced (jit of jacfwd)."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise NotImplementedError(FORWARD_MODE.format(name=name)) from error


def present(spec, operands) -> list[jax.Array]:
    """The arrays that are given, in the order of spec.operands."""
    return [array for name, array in zip(operands._fields, operands, strict=True) if name in spec.operands]


def gathered(operands, by_name):
    """Cotangents in the operands' structure; rows of parameters that serve the whole batch are added up."""

    def one(name, operand):
        gradient = by_name.get(name)
        if gradient is not None and gradient.shape != operand.shape:
            gradient = gradient.sum(axis=0, keepdims=True)
        return gradient

    return type(operands)(*(one(name, operand) for name, operand in zip(operands._fields, operands, strict=True)))
