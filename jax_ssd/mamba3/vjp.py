"""Reverse-mode differentiation of the Mamba-3 ops.

The scan keeps its inputs and nothing else; its backward is one op that recomputes the states. The derivative of a step
is plain JAX. Forward mode and second derivatives are refused in words: "reference" has them.
"""

import dataclasses
import functools

import jax

from jax_ssd import op
from jax_ssd.derivatives import FORWARD_MODE, gathered, present
from jax_ssd.mamba3 import ops, reference


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scan(spec: ops.Spec, operands: reference.Operands) -> tuple[jax.Array, ...]:
    """(y,) or (y, angle, ssm, k, v) of canonical operands; absent operands are None and not in spec.operands."""
    return tuple(ops.forward(spec, *present(spec, operands)))


def _scan_forward(spec, operands):
    return scan(spec, operands), operands


def _scan_backward(spec, operands, cotangents):
    names = (*spec.operands, *ops.COTANGENTS[: len(cotangents)])
    spec_backward = dataclasses.replace(spec, operands=names)
    arrays = [*present(spec, operands), *cotangents]
    op.require_possible(ops.BACKWARD, spec_backward, arrays)
    gradients: tuple[jax.Array, ...] = _first_order(spec_backward, *arrays)
    by_name = dict(zip(spec_backward.gradients, gradients, strict=True))
    return (gathered(operands, by_name),)


scan.defvjp(_scan_forward, _scan_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _first_order(spec: ops.Spec, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(ops.backward(spec, *operands))


def _refuse(spec, *operands):
    raise NotImplementedError(FORWARD_MODE.format(name="mamba3"))


_first_order.defvjp(_refuse, _refuse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def step(spec: ops.Spec, operands: reference.StepOperands) -> tuple[jax.Array, ...]:
    """(angle, ssm, k, v, y) of canonical operands."""
    return tuple(ops.step(spec, *present(spec, operands)))


def _step_forward(spec, operands):
    return step(spec, operands), operands


def _step_backward(spec, operands, cotangents):
    def function(operands):
        return reference.step(operands, spec.rotary, spec.norm_eps)

    return jax.vjp(function, operands)[1](cotangents)


step.defvjp(_step_forward, _step_backward)
