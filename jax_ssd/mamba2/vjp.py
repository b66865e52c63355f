"""Reverse-mode differentiation of the Mamba-2 ops.

The scan keeps its inputs and nothing else; its backward is one op that recomputes the states. The derivative of a step
is plain JAX. Forward mode and second derivatives are refused in words: "reference" has them.
"""

import dataclasses

import jax

from jax_ssd import op
from jax_ssd.derivatives import FORWARD_MODE, gathered, present
from jax_ssd.mamba2 import ops, reference


def _scan(spec: ops.Spec, operands: reference.Operands) -> tuple[jax.Array, ...]:
    """(y,) or (y, final state) of canonical operands; absent operands are None and not in spec.operands."""
    return tuple(ops.forward(spec, *present(spec, operands)))


def _scan_forward(spec, operands):
    return scan(spec, operands), operands


def _scan_backward(spec, operands, cotangents):
    names = (*spec.operands, "dy", "dfinal")[: len(spec.operands) + len(cotangents)]
    spec_backward = dataclasses.replace(spec, operands=names)
    arrays = [*present(spec, operands), *cotangents]
    op.require_possible(ops.BACKWARD, spec_backward, arrays)
    gradients = _first_order(spec_backward, *arrays)
    by_name = dict(zip(spec.gradients, gradients, strict=True))
    return (gathered(operands, by_name),)


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
    new_state, y = ops.step(spec, *present(spec, operands))
    return new_state, y


def _step_forward(spec, operands):
    return step(spec, operands), operands


def _step_backward(spec, operands, cotangents):
    def function(operands):
        return reference.step(operands, spec.dt_softplus, spec.dt_limit)

    return jax.vjp(function, operands)[1](cotangents)


step = jax.custom_vjp(_step, nondiff_argnums=(0,))
step.defvjp(_step_forward, _step_backward)
