"""Reverse-mode differentiation of the Mamba-2 ops.

The scan keeps its inputs and nothing else; its backward is one op that recomputes the states. The derivative of a step
is plain JAX. Forward mode and second derivatives are refused in words: "reference" has them.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jax_ssd import op
from jax_ssd.mamba2 import ops, reference

FORWARD_MODE = (
    "{name} has a reverse-mode derivative of first order only (grad, vjp), not jvp, jacfwd, linearize or second "
    "derivatives; implementation='reference' supports them all."
)


def _scan(spec: ops.Spec, operands: reference.Operands) -> tuple[jax.Array, ...]:
    """(y,) or (y, final state) of canonical operands; absent operands are None and not in spec.operands."""
    return tuple(ops.forward(spec, *_present(spec, operands)))


def _scan_forward(spec, operands):
    return scan(spec, operands), operands


def _scan_backward(spec, operands, cotangents):
    names = (*spec.operands, "dy", "dfinal")[: len(spec.operands) + len(cotangents)]
    spec_backward = dataclasses.replace(spec, operands=names)
    arrays = [*_present(spec, operands), *cotangents]
    op.require_possible(ops.BACKWARD, spec_backward, arrays)
    gradients = _first_order(spec_backward, *arrays)
    by_name = dict(zip(spec.gradients, gradients, strict=True))
    return (_gathered(operands, by_name),)


# Called, not a decorator, so that type checkers see what it returns.
scan = jax.custom_vjp(_scan, nondiff_argnums=(0,))
scan.defvjp(_scan_forward, _scan_backward)


def _backward(spec: ops.Spec, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(ops.backward(spec, *operands))


def _refuse(spec, *operands):
    raise NotImplementedError(FORWARD_MODE.format(name="mamba2"))


_first_order = jax.custom_vjp(_backward, nondiff_argnums=(0,))
_first_order.defvjp(_refuse, _refuse)


def _step(spec: ops.Spec, operands: reference.StepOperands) -> tuple[jax.Array, jax.Array]:
    """(new state, y) of one token."""
    new_state, y = ops.step(spec, *_present(spec, operands))
    return new_state, y


def _step_forward(spec, operands):
    return step(spec, operands), operands


def _step_backward(spec, operands, cotangents):
    def function(operands):
        return reference.step(operands, spec.dt_softplus, spec.dt_limit)

    return jax.vjp(function, operands)[1](cotangents)


step = jax.custom_vjp(_step, nondiff_argnums=(0,))
step.defvjp(_step_forward, _step_backward)


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


def _present(spec, operands) -> list[jax.Array]:
    return [array for name, array in zip(operands._fields, operands, strict=True) if name in spec.operands]


def _gathered(operands, by_name):
    """Cotangents in the operands' structure; rows of parameters that serve the whole batch are added up."""

    def one(name, operand):
        gradient = by_name.get(name)
        if gradient is not None and gradient.shape != operand.shape:
            gradient = gradient.sum(axis=0, keepdims=True)
        return gradient

    return type(operands)(*(one(name, operand) for name, operand in zip(operands._fields, operands, strict=True)))
