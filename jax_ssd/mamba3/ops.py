"""The ops of Mamba-3 on canonical arrays: forward, backward and step, each one primitive with its rules.

Canonical arrays: one batch axis; parameters with a leading row axis r that is 1, or the batch after vmap over
parameters; q and k always with a rank axis; states with an axis of packed sequences, of size 1 without packing. Which
arrays are present is part of the spec.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ssd import op
from jax_ssd.mamba3 import choices, chunked, plan_backward, problem, reference
from jax_ssd.plans import Plan

# Axis letters of every array that an op of this model can take or give; see partition.py. m rank, a rotated pairs,
# s packed sequences, c their boundaries.
_PARAMETERS = {
    "q_bias": "rhmn",
    "k_bias": "rhmn",
    "mimo_v": "rhmp",
    "mimo_o": "rhmp",
    "mimo_z": "rhmp",
    "D": "rh",
    "norm_weight": "rhp",
}
_STATE = {"state_angle": "bsha", "state_ssm": "bshpn", "state_k": "bshmn", "state_v": "bshp"}
LETTERS = {
    "q": "btmgn",
    "k": "btmgn",
    "v": "bthp",
    "angles": "btha",
    "adt": "bht",
    "dt": "bht",
    "trap": "bht",
    "z": "bthp",
    "cu_seqlens": "bc",
    **_PARAMETERS,
    **_STATE,
    **{f"d_{name}": letters for name, letters in _STATE.items()},
}
STEP_LETTERS = LETTERS | {name: letters.replace("s", "") for name, letters in _STATE.items()}
COTANGENTS = ("dy", *(f"d_{name}" for name in _STATE))


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about a call but its sizes and types.

    Attributes:
      operands: names of the arrays given, in the order they are passed.
      precision: "default" or "highest", or "fma": highest, and without tensor cores.
      implementation: allowed names, most wanted first.
    """

    operands: tuple[str, ...]
    rotary: str
    norm_eps: float
    return_final_state: bool
    chunk_size: int | None
    precision: str
    implementation: tuple[str, ...]

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the operands that the backward differentiates."""
        return tuple(name for name in self.operands if name != "cu_seqlens" and name not in COTANGENTS)

    @property
    def keeps_rank(self) -> bool:
        """Whether y has a rank axis."""
        return "mimo_v" in self.operands and "mimo_o" not in self.operands


def _scan(spec: Spec, name: str):
    """The scan of a pure JAX implementation: Operands -> (y,) or (y, four arrays of state)."""

    def run(operands: reference.Operands) -> tuple[jax.Array, ...]:
        if name == "reference":
            y, state = reference.scan(operands, spec.rotary, spec.norm_eps)
        else:
            precision = "highest" if spec.precision == "fma" else spec.precision
            y, state = chunked.scan(
                operands, spec.rotary, spec.norm_eps, spec.chunk_size, precision, spec.return_final_state
            )
        return (y, *state) if spec.return_final_state and state is not None else (y,)

    return run


def _y_letters(spec: Spec) -> str:
    return "btmhp" if spec.keeps_rank else "bthp"


def _letters(spec: Spec) -> tuple[str, ...]:
    return tuple(_y_letters(spec) if name == "dy" else LETTERS[name] for name in spec.operands)


def _forward_letters(spec: Spec):
    states = tuple(_STATE.values()) if spec.return_final_state else ()
    return _letters(spec), (_y_letters(spec), *states)


def _forward_abstract(spec: Spec, avals):
    by_name = dict(zip(spec.operands, avals, strict=True))
    v, q = by_name["v"], by_name["q"]
    batch, _, heads, head_dim = v.shape
    rank, width = q.shape[2], q.shape[4]
    results = [_y_abstract(spec, by_name)]
    if spec.return_final_state:
        sequences = by_name["cu_seqlens"].shape[1] - 1 if "cu_seqlens" in by_name else 1
        shapes = ((by_name["angles"].shape[-1],), (head_dim, width), (rank, width), (head_dim,))
        dtype = reference.accumulator(v.dtype)
        results += [v.update(shape=(batch, sequences, heads, *s), dtype=dtype, weak_type=False) for s in shapes]
    return results


def _y_abstract(spec: Spec, by_name):
    v, rank = by_name["v"], by_name["q"].shape[2]
    shape = (*v.shape[:2], rank, *v.shape[2:]) if spec.keeps_rank else v.shape
    return v.update(shape=shape, weak_type=False)


def _forward_plain(spec: Spec, name: str) -> op.Function:
    scan = _scan(spec, name)
    return lambda *operands: scan(reference.Operands(**dict(zip(spec.operands, operands, strict=True))))


def _per_row(name: str) -> bool:
    """Gradients of parameters come one row per batch entry and are summed outside, where data parallelism reduces."""
    return name in _PARAMETERS


def _backward_letters(spec: Spec):
    results = tuple(LETTERS[name].replace("r", "b") for name in spec.gradients)
    return _letters(spec), results


def _backward_abstract(spec: Spec, avals):
    by_name = dict(zip(spec.operands, avals, strict=True))
    batch = by_name["v"].shape[0]

    def gradient(name):
        aval = by_name[name]
        return aval.update(shape=(batch, *aval.shape[1:])) if _per_row(name) else aval.update()

    return [gradient(name) for name in spec.gradients]


def _backward_plain(spec: Spec, name: str) -> op.Function:
    scan = _scan(spec, name)

    def backward(*operands):
        given = dict(zip(spec.operands, operands, strict=True))
        batch = given["v"].shape[0]
        rows = {k: jnp.broadcast_to(v, (batch, *v.shape[1:])) if _per_row(k) else v for k, v in given.items()}
        fixed = {"cu_seqlens": rows["cu_seqlens"]} if "cu_seqlens" in rows else {}

        def function(*moving):
            return scan(reference.Operands(**dict(zip(spec.gradients, moving, strict=True)), **fixed))

        results, pullback = jax.vjp(function, *(rows[name] for name in spec.gradients))
        return pullback(tuple(given[name] for name in COTANGENTS[: len(results)]))

    return backward


def _step_letters(spec: Spec):
    state = tuple(STEP_LETTERS[name] for name in _STATE)
    return tuple(STEP_LETTERS[name] for name in spec.operands), (*state, _y_letters(spec))


def _step_abstract(spec: Spec, avals):
    by_name = dict(zip(spec.operands, avals, strict=True))
    return [*(by_name[name].update() for name in _STATE), _y_abstract(spec, by_name)]


def _step_plain(spec: Spec, name: str) -> op.Function:
    del name  # token by token in both
    return lambda *operands: reference.step(
        reference.StepOperands(**dict(zip(spec.operands, operands, strict=True))), spec.rotary, spec.norm_eps
    )


# The launch plans of each op's kernels, by implementation: from (spec, operand avals).
FORWARD_PLANS: dict[str, Callable[..., Plan]] = {
    "cuda": lambda spec, avals: choices.FORWARD(_planned_scan(spec, avals))
}
BACKWARD_PLANS: dict[str, Callable[..., Plan]] = {
    "cuda": lambda spec, avals: plan_backward.backward(_planned_scan(spec, avals))
}
STEP_PLANS: dict[str, Callable[..., Plan]] = {"cuda": lambda spec, avals: choices.step(problem.of_call(spec, avals))}


def _planned_scan(spec: Spec, avals) -> problem.Problem:
    """What the kernels of a scan are planned from."""
    if spec.precision == "fma":
        raise NotImplementedError(
            "its float32 products run on tensor cores, which JAX_SSD_MAMBA3_SCAN=fma keeps them off; unset it, or use "
            "implementation='xla'"
        )
    return problem.of_call(spec, avals)


def _planned(plans):
    return lambda spec, name, avals: op.kernels_of(name, plans)(spec, avals)


FORWARD = op.Definition(
    "mamba3_forward", _forward_letters, _forward_abstract, _forward_plain, _planned(FORWARD_PLANS), optional="a"
)
BACKWARD = op.Definition(
    "mamba3_backward", _backward_letters, _backward_abstract, _backward_plain, _planned(BACKWARD_PLANS), optional="a"
)
STEP = op.Definition("mamba3_step", _step_letters, _step_abstract, _step_plain, _planned(STEP_PLANS), optional="a")

forward = op.define(FORWARD)
backward = op.define(BACKWARD)
step = op.define(STEP)
