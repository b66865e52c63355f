"""The ops of Mamba-2 on canonical arrays: forward, backward and step, each one primitive with its rules.

Canonical arrays: one batch axis; per-head parameters in float32 with a leading row axis r that is 1, or the batch after
vmap over parameters; packed sequences as run numbers (segments.py). Which arrays are present is part of the spec.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jax_ssd import op
from jax_ssd.mamba2 import choices, chunked, reference
from jax_ssd.mamba2.problem import Problem

# Axis letters of every array that an op of this model can take or give; see partition.py.
LETTERS = {
    "x": "bthp",
    "dt": "bth",
    "A": "rh",
    "B": "btgn",
    "C": "btgn",
    "D": "rhp",
    "z": "bthp",
    "dt_bias": "rh",
    "initial_state": "bhpn",
    "runs": "bt",
    "dy": "bthp",
    "dfinal": "bhpn",
}
STEP_LETTERS = {
    "state": "bhpn",
    "x": "bhp",
    "dt": "bh",
    "A": "rh",
    "B": "bgn",
    "C": "bgn",
    "D": "rhp",
    "z": "bhp",
    "dt_bias": "rh",
}
# Gradients of per-head parameters come one row per batch entry and are summed outside, so that data parallel training
# reduces them like any other array.
_PER_ROW = {"A": "bh", "D": "bhp", "dt_bias": "bh"}


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about a call but its sizes and types.

    Attributes:
      operands: names of the arrays given, in the order they are passed.
      implementation: allowed names, most wanted first.
    """

    operands: tuple[str, ...]
    dt_softplus: bool
    dt_limit: tuple[float, float]
    return_final_state: bool
    chunk_size: int | None
    precision: str
    implementation: tuple[str, ...]

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the operands that the backward differentiates."""
        return tuple(name for name in self.operands if name not in ("runs", "dy", "dfinal"))


def problem(spec: Spec, avals: Sequence[ShapedArray]) -> Problem:
    """The sizes and types of a call of forward or backward."""
    by_name = dict(zip(spec.operands, avals, strict=True))
    batch, seq, heads, head_dim = by_name["x"].shape
    return _problem(spec, by_name, batch, seq, heads, head_dim)


def _step_problem(spec: Spec, avals) -> Problem:
    by_name = dict(zip(spec.operands, avals, strict=True))
    batch, heads, head_dim = by_name["x"].shape
    return _problem(spec, by_name, batch, 1, heads, head_dim)


def _problem(spec, by_name, batch, seq, heads, head_dim) -> Problem:
    groups, state = by_name["B"].shape[-2:]
    return Problem(
        batch=batch,
        seq=seq,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state=state,
        dtype=by_name["x"].dtype.name,
        dt_dtype=by_name["dt"].dtype.name,
        param_rows=by_name["A"].shape[0],
        dt_softplus=spec.dt_softplus,
        dt_limit=spec.dt_limit,
        has_D="D" in by_name,
        has_z="z" in by_name,
        has_dt_bias="dt_bias" in by_name,
        has_initial_state="initial_state" in by_name,
        has_runs="runs" in by_name,
        return_final_state=spec.return_final_state,
        chunk_size=spec.chunk_size,
        precision=spec.precision,
        has_dfinal="dfinal" in by_name,
        state_dtype=by_name["state"].dtype.name if "state" in by_name else "float32",
    )


def _scan(spec: Spec, name: str):
    """The scan of a pure JAX implementation: Operands -> (y, final state)."""
    if name == "reference":
        return lambda operands: reference.scan(operands, spec.dt_softplus, spec.dt_limit)
    return lambda operands: chunked.scan(operands, spec.dt_softplus, spec.dt_limit, spec.chunk_size, spec.precision)


def _forward_letters(spec: Spec):
    results = ("bthp", "bhpn") if spec.return_final_state else ("bthp",)
    return tuple(LETTERS[name] for name in spec.operands), results


def _forward_abstract(spec: Spec, avals):
    sizes, x = problem(spec, avals), avals[0]
    state_shape = (sizes.batch, sizes.heads, sizes.head_dim, sizes.state)
    results = [x.update()]
    if spec.return_final_state:
        results.append(x.update(shape=state_shape, dtype=reference.accumulator(x.dtype), weak_type=False))
    return results


def _forward_plain(spec: Spec, name: str) -> op.Function:
    scan = _scan(spec, name)

    def forward(*operands):
        results = scan(reference.Operands(**dict(zip(spec.operands, operands, strict=True))))
        return results if spec.return_final_state else results[:1]

    return forward


def _backward_letters(spec: Spec):
    results = tuple(_PER_ROW.get(name, LETTERS[name]) for name in spec.gradients)
    return tuple(LETTERS[name] for name in spec.operands), results


def _backward_abstract(spec: Spec, avals):
    by_name = dict(zip(spec.operands, avals, strict=True))
    batch = by_name["x"].shape[0]

    def gradient(name):
        aval = by_name[name]
        return aval.update(shape=(batch, *aval.shape[1:])) if name in _PER_ROW else aval.update()

    return [gradient(name) for name in spec.gradients]


def _backward_plain(spec: Spec, name: str) -> op.Function:
    scan = _scan(spec, name)

    def backward(*operands):
        given = dict(zip(spec.operands, operands, strict=True))
        batch = given["x"].shape[0]
        rows = {k: jnp.broadcast_to(v, (batch, *v.shape[1:])) if k in _PER_ROW else v for k, v in given.items()}
        fixed = {"runs": rows["runs"]} if "runs" in rows else {}

        def function(*moving):
            return scan(reference.Operands(**dict(zip(spec.gradients, moving, strict=True)), **fixed))

        (y, final), pullback = jax.vjp(function, *(rows[name] for name in spec.gradients))
        return pullback((given["dy"], given.get("dfinal", jnp.zeros_like(final))))

    return backward


def _step_letters(spec: Spec):
    return tuple(STEP_LETTERS[name] for name in spec.operands), ("bhpn", "bhp")


def _step_abstract(spec: Spec, avals):
    by_name = dict(zip(spec.operands, avals, strict=True))
    return [by_name["state"].update(), by_name["x"].update()]


def _step_plain(spec: Spec, name: str) -> op.Function:
    del name  # one token is the same in both
    return lambda *operands: reference.step(
        reference.StepOperands(**dict(zip(spec.operands, operands, strict=True))), spec.dt_softplus, spec.dt_limit
    )


def _planned(describe, **plans):
    """plans: by implementation, from the sizes of a call to its launch plan."""

    def plan_of(spec: Spec, name: str, avals):
        return op.kernels_of(name, plans)(describe(spec, avals))

    return plan_of


def _padding(spec: Spec, _: str, avals):
    """Rows of whole 16 bytes, the least that bulk copies take: for others the cuTile compiler's code has hung."""
    sizes = problem(spec, avals)
    whole = 16 // avals[0].dtype.itemsize
    return {"p": -(-sizes.head_dim // whole) * whole, "n": -(-sizes.state // whole) * whole}


FORWARD = op.Definition(
    "mamba2_forward",
    _forward_letters,
    _forward_abstract,
    _forward_plain,
    _planned(problem, cutile=choices.FORWARD, cuda=choices.CUDA_FORWARD),
    _padding,
)
BACKWARD = op.Definition(
    "mamba2_backward",
    _backward_letters,
    _backward_abstract,
    _backward_plain,
    _planned(problem, cutile=choices.BACKWARD, cuda=choices.CUDA_BACKWARD),
    _padding,
)
STEP = op.Definition(
    "mamba2_step",
    _step_letters,
    _step_abstract,
    _step_plain,
    _planned(_step_problem, cutile=choices.STEP, cuda=choices.CUDA_STEP),
)

forward = op.define(FORWARD)
backward = op.define(BACKWARD)
step = op.define(STEP)
