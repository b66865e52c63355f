"""The public functions of Mamba-2: arguments are checked here, put in canonical form and handed to the ops."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ssd import dispatch, manual_axes, op, segments, shapes
from jax_ssd.derivatives import guarded, in_words, present
from jax_ssd.mamba2 import ops, reference, vjp
from jax_ssd.mamba2.reference import Operands, StepOperands, accumulator

Implementation = str | Sequence[str] | None
Limit = tuple[float, float]


@overload
def mamba2(
    x,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    *,
    dt_bias=None,
    dt_softplus: bool = False,
    dt_limit: Limit = (0.0, float("inf")),
    initial_state=None,
    segment_ids=None,
    return_final_state: Literal[False] = False,
    chunk_size: int | None = None,
    precision: Any = None,
    implementation: Implementation = None,
) -> jax.Array: ...


@overload
def mamba2(
    x,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    *,
    dt_bias=None,
    dt_softplus: bool = False,
    dt_limit: Limit = (0.0, float("inf")),
    initial_state=None,
    segment_ids=None,
    return_final_state: Literal[True],
    chunk_size: int | None = None,
    precision: Any = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]: ...


def mamba2(
    x,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    *,
    dt_bias=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    initial_state=None,
    segment_ids=None,
    return_final_state=False,
    chunk_size=None,
    precision=None,
    implementation=None,
):
    r"""The Mamba-2 (SSD) scan over a sequence.

    Per head, with a state h of shape [head_dim, state] and s_t = clip(softplus?(dt_t + dt_bias), \*dt_limit):

        h_t = exp(A s_t) h_{t-1} + s_t x_t B_t^T
        y_t = (h_t C_t + D x_t) * silu(z_t)

    Head i reads group i // (heads / groups) of B and C. Sums, decays and states are float32 (float64 for float64
    inputs) whatever the inputs are; y is cast to x's type. Arrays are in the order and layout of mamba_ssm's
    `mamba_chunk_scan_combined`. Reverse-mode derivatives reach every floating argument. Results are bitwise repeatable,
    in another process too but for gradients of parameters, whose sums over rows are XLA's.

    Args:
      x: [..., seq, heads, head_dim], bfloat16, float16, float32 or (x64, not on kernels) float64. Any number of leading
        batch axes, and any length of any axis, zero included.
      dt: [..., seq, heads], time step before bias, softplus and clamp; x's type, or float32 unless x is float64.
      A: [heads], any float type; log decay per unit of dt, normally negative. exp(A s) multiplies the state.
      B: [..., seq, groups, state], x's type; groups divides heads.
      C: [..., seq, groups, state], x's type.
      D: [heads] or [heads, head_dim], any float type; the skip. None: no skip.
      z: [..., seq, heads, head_dim], x's type; the gate. None: no gate.
      dt_bias: [heads], any float type, added to dt first. None: no bias.
      dt_softplus: apply log(1 + exp(.)) after the bias.
      dt_limit: (low, high), both inclusive, applied last. The derivative is one inside and at both ends, zero outside.
      initial_state: [..., heads, head_dim, state], any float type. None: zeros.
      segment_ids: [..., seq] integers. The state is set to zero between neighbours with different ids; ids are labels.
        The first segment starts from initial_state. A negative id marks padding: y is 0 there, the state stays, no
        gradient flows, and it is no boundary by itself. None: one segment. What is not finite in a segment stays there,
        but in the kernels' gradients, where it may reach the tokens of its row and head.
      return_final_state: also return the state after the last token, float32.
      chunk_size: tokens worked on at a time; changes speed and rounding only. None: the implementation chooses.
        "cutile" takes powers of two from 16 to 128, and its derivative may take a smaller one; "cuda" takes 64, and its
        derivative 128.
      precision: of float32 matrix products: "default" allows TF32 on GPUs, "highest" is full float32; also
        jax.lax.Precision. None: follows jax_default_matmul_precision, whose algorithm presets are "highest" where they
        keep more than TF32 ("F32_F32_F32", "..._X3" and the like), else "default". No effect on 16-bit inputs.
      implementation: "cutile" or "cuda" (GPU kernels: every size, and those of published models), "xla" (chunked, any
        platform), "reference" (token by token, differentiable to any order), a sequence of names in order of
        preference, or None: the first of "cuda", "cutile" and "xla" that accepts the call on each platform it is
        compiled for, or what tuning found the faster. A single name is an order.

    The results carry the checkpoint names "mamba2_y" and "mamba2_final_state", for policies of jax.checkpoint that keep
    them rather than run the scan once more in the backward, which keeps nothing but the arguments:

        jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names("mamba2_y", "mamba2_final_state"))

    On a mesh, batch and heads may be sharded. Of several leading axes, and of an axis mapped by vmap with the batch
    behind it, that is the first, with the next if both are; other layouts give the same numbers but are gathered first.

    Programs with kernels in them are exported with jax.export.export(..., disabled_checks=EXPORT_DISABLED_CHECKS); the
    process that loads one calls jax_ssd.ffi_targets.register() before it runs it.

    Returns:
      y [..., seq, heads, head_dim] in x's type; with return_final_state also the state [..., heads, head_dim, state].

    Raises:
      ValueError: shapes disagree or an option is out of range. The message names argument, expected, received, cure.
      TypeError: a type is not among those listed.
      NotImplementedError: the implementation asked for cannot serve this call, with the reason.

    References:
      Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060; state-spaces/mamba.

    Example:
      >>> y, state = mamba2(x[:, :512], dt[:, :512], A, B[:, :512], C[:, :512], return_final_state=True)
      >>> rest = mamba2(x[:, 512:], dt[:, 512:], A, B[:, 512:], C[:, 512:], initial_state=state)
    """
    name = "mamba2"
    arrays = _arrays(name, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_state=initial_state)
    x = arrays["x"]
    shapes.require_rank(name, "x", x, 3, "(..., seq, heads, head_dim)")
    shapes.require_rank(name, "B", arrays["B"], 3, "(..., seq, groups, state)")
    sizes = _sizes(x, arrays["B"], lead=x.shape[:-3], seq=x.shape[-3])
    _check(name, arrays, sizes, token_axes=("...", "seq"), state="initial_state")
    if segment_ids is not None:
        origins = shapes.origin("x", x, ("...", "seq"))
        segment_ids = shapes.labels(name, "segment_ids", segment_ids, ("...", "seq"), sizes, origins)

    lead, batch = sizes["..."], math.prod(sizes["..."])
    per_head = _per_head_rows(arrays, accumulator(x.dtype), sizes)
    operands = Operands(
        **{
            key: arrays[key].reshape(batch, *arrays[key].shape[len(lead) :])
            for key in ("x", "dt", "B", "C", "z")
            if key in arrays
        },
        **per_head,
    )
    if "initial_state" in arrays:
        state = arrays["initial_state"].astype(accumulator(x.dtype))
        operands = operands._replace(initial_state=state.reshape(batch, *state.shape[len(lead) :]))
    if segment_ids is not None:
        operands = operands._replace(runs=segments.runs_from_segment_ids(segment_ids.reshape(batch, sizes["seq"])))
    spec = ops.Spec(
        operands=tuple(key for key in Operands._fields if getattr(operands, key) is not None),
        dt_softplus=shapes.flag(name, "dt_softplus", dt_softplus),
        dt_limit=shapes.limits(name, dt_limit),
        return_final_state=shapes.flag(name, "return_final_state", return_final_state),
        chunk_size=shapes.chunk(name, chunk_size),
        precision=shapes.precision(name, precision),
        implementation=dispatch.preferences(implementation),
    )
    operands = manual_axes.unified(operands)
    if spec.implementation[0] == "reference":
        results = _reference(ops.FORWARD, spec, operands, _reference_scan)
    else:
        op.require_possible(ops.FORWARD, spec, [a for a in operands if a is not None])
        with in_words(name):
            results = vjp.scan(spec, guarded(operands, name))
    y = checkpoint_name(results[0].reshape(*lead, *results[0].shape[1:]), "mamba2_y")
    if not spec.return_final_state:
        return y
    return y, checkpoint_name(results[1].reshape(*lead, *results[1].shape[1:]), "mamba2_final_state")


def mamba2_step(
    state,
    x,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    *,
    dt_bias=None,
    dt_softplus: bool = False,
    dt_limit: Limit = (0.0, float("inf")),
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    r"""One token of the Mamba-2 scan: the body of a `jax.lax.scan` that decodes.

    Per head, with the state h of shape [head_dim, state] and s = clip(softplus?(dt + dt_bias), \*dt_limit):

        h <- exp(A s) h + s x B^T
        y  = (h C + D x) * silu(z)

    This is `mamba2` on a sequence of one token, in the same order of bias, softplus, clamp, skip and gate. Head i reads
    group i // (heads / groups) of B and C. The arithmetic is float32 (float64 for float64 inputs) whatever the inputs
    are. Reverse-mode derivatives reach every argument; "reference" has the others. On GPUs the new state overwrites the
    old one in place where the caller no longer needs it, as in a scan's carry; otherwise arguments stay as they are.

    Args:
      state: [..., heads, head_dim, state], float32 (recommended) or another float type, which the new state keeps. A
        16-bit state loses small additions. `jnp.zeros` of this shape before the first token.
      x: [..., heads, head_dim], bfloat16, float16, float32 or (x64, not on kernels) float64. Any number of leading
        batch axes, and any length of any axis, zero included.
      dt: [..., heads], time step before bias, softplus and clamp; x's type, or float32 unless x is float64.
      A: [heads], any float type; log decay per unit of dt, normally negative.
      B: [..., groups, state], x's type; groups divides heads.
      C: [..., groups, state], x's type.
      D: [heads] or [heads, head_dim], any float type; the skip. None: no skip.
      z: [..., heads, head_dim], x's type; the gate. None: no gate.
      dt_bias: [heads], any float type, added to dt first. None: no bias.
      dt_softplus: apply log(1 + exp(.)) after the bias.
      dt_limit: (low, high), both inclusive, applied last.
      implementation: as in `mamba2`: a name, names in order of preference, or None for the best that accepts the call.

    Returns:
      (new state in the given state's type, y [..., heads, head_dim] in x's type).

    Raises:
      ValueError: shapes disagree or an option is out of range. The message names argument, expected, received, cure.
      TypeError: a type is not among those listed.
      NotImplementedError: the implementation asked for cannot serve this call, with the reason.

    References:
      Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060; state-spaces/mamba, `selective_state_update`.

    Example:
      >>> def token(state, inputs):
      ...     return mamba2_step(state, inputs.x, inputs.dt, A, inputs.B, inputs.C)
      >>> state, y = jax.lax.scan(token, state, inputs)
    """
    name = "mamba2_step"
    arrays = _arrays(name, state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    x = arrays["x"]
    shapes.require_rank(name, "x", x, 2, "(..., heads, head_dim)")
    shapes.require_rank(name, "B", arrays["B"], 2, "(..., groups, state)")
    sizes = _sizes(x, arrays["B"], lead=x.shape[:-2], seq=1)
    _check(name, arrays, sizes, token_axes=("...",), state="state")
    lead, batch = sizes["..."], math.prod(sizes["..."])
    operands = StepOperands(
        **{
            key: arrays[key].reshape(batch, *arrays[key].shape[len(lead) :])
            for key in ("state", "x", "dt", "B", "C", "z")
            if key in arrays
        },
        **_per_head_rows(arrays, accumulator(x.dtype), sizes),
    )
    spec = ops.Spec(
        operands=tuple(key for key in StepOperands._fields if getattr(operands, key) is not None),
        dt_softplus=shapes.flag(name, "dt_softplus", dt_softplus),
        dt_limit=shapes.limits(name, dt_limit),
        return_final_state=True,
        chunk_size=None,
        precision="default",
        implementation=dispatch.preferences(implementation),
    )
    operands = manual_axes.unified(operands)
    if spec.implementation[0] == "reference":
        new_state, y = _reference(ops.STEP, spec, operands, _reference_step)
    else:
        op.require_possible(ops.STEP, spec, [a for a in operands if a is not None])
        with in_words(name):
            new_state, y = vjp.step(spec, guarded(operands, name))
    return new_state.reshape(*lead, *new_state.shape[1:]), y.reshape(*lead, *y.shape[1:])


# Named jits, so that dispatch_paths can see them in a traced program.
def _mamba2_reference(operands, softplus, limit):
    return reference.scan(operands, softplus, limit)


def _mamba2_step_reference(operands, softplus, limit):
    return reference.step(operands, softplus, limit)


_reference_scan = jax.jit(_mamba2_reference, static_argnums=(1, 2))
_reference_step = jax.jit(_mamba2_step_reference, static_argnums=(1, 2))


def _reference(definition: op.Definition, spec: ops.Spec, operands, run) -> tuple[jax.Array, ...]:
    def function(*arrays):
        given = type(operands)(**dict(zip(spec.operands, arrays, strict=True)))
        return run(given, spec.dt_softplus, spec.dt_limit)

    whole = dataclasses.replace(spec, return_final_state=True)
    return op.over_explicit_axes(definition.letters(whole), function)(*present(spec, operands))


_OPTIONAL = ("D", "z", "dt_bias", "initial_state")


def _arrays(name: str, **arguments) -> dict[str, jax.Array]:
    """The arguments that are given; those that must be are refused as None."""
    given = {key: value for key, value in arguments.items() if value is not None or key not in _OPTIONAL}
    return {key: shapes.as_array(name, key, value) for key, value in given.items()}


def _sizes(x, B, lead, seq) -> dict[str, Any]:
    return {
        "...": lead,
        "seq": seq,
        "heads": x.shape[-2],
        "head_dim": x.shape[-1],
        "groups": B.shape[-2],
        "state": B.shape[-1],
    }


def _check(name: str, arrays: dict[str, jax.Array], sizes, token_axes: tuple[str, ...], state: str) -> None:
    """Shapes and types of every array but segment_ids, from one table."""
    shapes.require_divides(name, sizes["heads"], sizes["groups"])
    per_token = {
        "x": ("heads", "head_dim"),
        "dt": ("heads",),
        "B": ("groups", "state"),
        "C": ("groups", "state"),
        "z": ("heads", "head_dim"),
    }
    expected = {key: (*token_axes, *axes) for key, axes in per_token.items()}
    expected |= {"A": ("heads",), "dt_bias": ("heads",), state: ("...", "heads", "head_dim", "state")}
    if "D" in arrays:
        expected["D"] = ("heads", "head_dim") if arrays["D"].ndim == 2 else ("heads",)
    origins = shapes.origin("x", arrays["x"], (*token_axes, "heads", "head_dim"))
    origins |= shapes.origin("B", arrays["B"], ("groups", "state"))
    x_dtype = arrays["x"].dtype.name
    for key, array in arrays.items():
        shapes.require_float(name, key, array)
        shapes.require_shape(name, key, array, expected[key], sizes, origins)
        if key in ("B", "C", "z"):
            shapes.require_dtype(name, key, array, (x_dtype,), "the type of x")
        if key == "dt":
            shapes.require_dtype(
                name, key, array, (x_dtype, accumulator(x_dtype).name), "the type of x, or its accumulator's"
            )


def _per_head_rows(arrays, dtype, sizes) -> dict[str, jax.Array]:
    """A, D and dt_bias in the accumulator's type with a leading row axis; D per channel."""
    rows = {key: arrays[key].astype(dtype)[None] for key in ("A", "dt_bias") if key in arrays}
    if "D" in arrays:
        D = arrays["D"].astype(dtype)
        D = D if D.ndim == 2 else D[:, None]
        rows["D"] = jnp.broadcast_to(D, (sizes["heads"], sizes["head_dim"]))[None]
    return rows
