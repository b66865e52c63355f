"""The public functions of Mamba-3: arguments are checked here, put in canonical form and handed to the ops."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from jax_ssd import config, dispatch, manual_axes, op, shapes
from jax_ssd.derivatives import guarded, in_words, present
from jax_ssd.mamba2.api import Implementation
from jax_ssd.mamba2.reference import accumulator
from jax_ssd.mamba3 import ops, packing, reference, vjp
from jax_ssd.mamba3.reference import Operands, StepOperands

Rotary = Literal["pairwise", "half"]
MAX_RANK = 8


class Mamba3State(NamedTuple):
    """What the next token of a sequence needs of those before. All zeros is the start of a sequence.

    `ssm` holds what the last token has added with its own weight; what it will add once the next token's step size is
    known is not in it, hence k and v.
    """

    angle: jax.Array  # [..., heads, pairs] float32: phase of the last token in radians, modulo 2 pi
    ssm: jax.Array  # [..., heads, head_dim, state] float32
    k: jax.Array  # [..., heads, rank, state], [..., heads, state] for SISO: last key, biased and rotated
    v: jax.Array  # [..., heads, head_dim]: last value, before rank expansion


@overload
def mamba3(
    q,
    k,
    v,
    q_bias,
    k_bias,
    mimo_v,
    mimo_o,
    angles,
    adt,
    dt,
    trap,
    *,
    z=None,
    mimo_z=None,
    D=None,
    norm_weight=None,
    norm_eps: float = 1e-5,
    rotary: Rotary = "pairwise",
    initial_state: Mamba3State | None = None,
    segment_ids=None,
    cu_seqlens=None,
    return_final_state: Literal[False] = False,
    chunk_size: int | None = None,
    precision: Any = None,
    implementation: Implementation = None,
) -> jax.Array: ...


@overload
def mamba3(
    q,
    k,
    v,
    q_bias,
    k_bias,
    mimo_v,
    mimo_o,
    angles,
    adt,
    dt,
    trap,
    *,
    z=None,
    mimo_z=None,
    D=None,
    norm_weight=None,
    norm_eps: float = 1e-5,
    rotary: Rotary = "pairwise",
    initial_state: Mamba3State | None = None,
    segment_ids=None,
    cu_seqlens=None,
    return_final_state: Literal[True],
    chunk_size: int | None = None,
    precision: Any = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, Mamba3State]: ...


def mamba3(
    q,
    k,
    v,
    q_bias,
    k_bias,
    mimo_v,
    mimo_o,
    angles,
    adt,
    dt,
    trap,
    *,
    z=None,
    mimo_z=None,
    D=None,
    norm_weight=None,
    norm_eps=1e-5,
    rotary="pairwise",
    initial_state=None,
    segment_ids=None,
    cu_seqlens=None,
    return_final_state=False,
    chunk_size=None,
    precision=None,
    implementation=None,
):
    r"""The Mamba-3 scan over a sequence, SISO or MIMO.

    Per head, with a state S of shape [head_dim, state] that all ranks r share:

        phi_t = phi_{t-1} + pi tanh(angles_t) dt_t        lambda_t = sigmoid(trap_t)       alpha_t = exp(adt_t)
        q~, k~ = rotations by phi_t of q_t + q_bias, k_t + k_bias                          v_{t,r} = mimo_v_r * v_t
        S_t = alpha_t S_{t-1} + alpha_t (1 - lambda_t) dt_t sum_r v_{t-1,r} k~_{t-1,r}^T
              + lambda_t dt_t sum_r v_{t,r} k~_{t,r}^T
        o_r = S_t q~_r + D v_{t,r};  o_r = o_r / sqrt(mean(o_r^2) + norm_eps) * norm_weight  (if norm_weight is given)
        y_t = sum_r mimo_o_r * o_r * silu(mimo_z_r * z_t)

    Head i reads group i // (heads / groups) of q and k. Sums, decays, phases and states are float32 (float64 for
    float64 inputs) whatever the inputs are; y is cast to v's type. In float32 the phase is summed exactly, in integers,
    so its error does not grow with the length. Reverse-mode derivatives reach every floating argument.

    Args:
      q: [..., seq, rank, groups, state], bfloat16, float16, float32 or (x64) float64. state is even, rank at most 8,
        seq any length, zero included. SISO (mimo_v is None): [..., seq, groups, state].
      k: as q, in q's type.
      v: [..., seq, heads, head_dim], q's type; groups divides heads.
      q_bias: [heads, rank, state], SISO [heads, state], any float type; added before the rotation.
      k_bias: as q_bias.
      mimo_v: [heads, rank, head_dim], any float type: elementwise expansion of v to ranks. None: SISO.
      mimo_o: [heads, rank, head_dim], any float type: folds the ranks. None: y keeps its rank axis.
      angles: [..., seq, heads, pairs], pairs at most state / 2: raw rates of rotation. Any float type, best
        float32.
      adt: [..., heads, seq], at most 0: natural log of the decay, A dt. Note the order of axes. Any float type.
      dt: [..., heads, seq], positive: the step size. Any float type.
      trap: [..., heads, seq]: the logit of lambda. Any float type.
      z: [..., seq, heads, head_dim], q's type; the gate. None: no gate.
      mimo_z: [heads, rank, head_dim]: expansion of z. Given if z and mimo_v are, and only then.
      D: [heads], any float type; the skip. None: no skip.
      norm_weight: [heads, head_dim] or [heads * head_dim]: an RMS norm over head_dim before the gate. None: no norm.
      norm_eps: inside the root, on the mean. With segment_ids that may be padding, at least 1e-20.
      rotary: "pairwise": pair i is (2i, 2i + 1). "half": pair i is (i, i + state / 2).
      initial_state: Mamba3State with the leading axes of v, any float types. None: zeros. With cu_seqlens, those of
        cu_seqlens and then the sequences.
      segment_ids: [..., seq] integers, labels of packed sequences as in `mamba2`. The state is set to zero between
        neighbours with different ids; the first segment starts from initial_state, and the final state is that of the
        last. A negative id marks padding: y is 0 there, the state stays, no gradient flows, and it is no boundary by
        itself. Any number of segments, on the kernels of one sequence per row. With ids of an unsigned type there is no
        padding, or it is one more segment, and no time is lost; padding costs copies of the arrays. Phases go on from
        segment to segment, so the final state's angle counts from the row's first token. What is not finite in a
        segment may reach the row's later tokens of that head, and gradients of the row. None: one segment.
      cu_seqlens: [..., sequences + 1] integers, the other way to pack: sequences with a state each, which nothing of
        the others reaches. Leading axes are those of v, or none where v is [1, seq, heads, head_dim]. Sequence j is
        tokens cu_seqlens[j] to cu_seqlens[j + 1] - 1; from 0 to seq, never decreasing. An empty sequence passes its
        state through. The boundaries are data: other ones do not compile again. Where they are traced nobody can refuse
        them: then the first is taken as 0, the last as seq, and the others as the largest up to there, within 0 to seq.
        Not together with segment_ids. None: one sequence per row.
      return_final_state: also return the state after the last token (of each sequence of cu_seqlens).
      chunk_size: tokens worked on at a time; changes speed and rounding only. None: 64 / rank.
      precision: of float32 matrix products: "default" allows TF32 on GPUs, "highest" is full float32; also
        jax.lax.Precision. None: follows jax_default_matmul_precision as in `mamba2`. JAX_SSD_MAMBA3_SCAN=fma keeps
        them off tensor cores altogether, to compare with.
      implementation: "cuda" (kernels on NVIDIA GPUs), "xla" (chunked, any platform), "reference" (token by token,
        differentiable to any order), a sequence of names in order of preference, or None: the fastest that accepts the
        call. A single name is an order. There are no cuTile kernels of Mamba-3.

    The results carry the checkpoint names "mamba3_y" and "mamba3_final_state" for policies of jax.checkpoint, as those
    of `mamba2` do.

    Returns:
      y [..., seq, heads, head_dim] in v's type, or [..., seq, rank, heads, head_dim] for mimo_v without mimo_o; with
      return_final_state also a Mamba3State: in the types of initial_state, else float32 (float64 for float64 inputs)
      and, for its v, v's type.

    Raises:
      ValueError: shapes disagree, an option is out of range, or an adt that is no tracer has positive entries (at
        padding it may). The message names argument, expected, received, cure.
      TypeError: a type is not among those listed.
      NotImplementedError: the implementation asked for cannot serve this call, with the reason.

    References:
      Lahoti et al. 2026, "Mamba-3", arXiv:2603.15569; state-spaces/mamba.

    Example:
      >>> weights = (q_bias, k_bias, mimo_v, mimo_o)
      >>> y, state = mamba3(q, k, v, *weights, angles, adt, dt, trap, return_final_state=True)
      >>> state, y = mamba3_step(state, q1, k1, v1, *weights, angles1, adt1, dt1, trap1)
    """
    name = "mamba3"
    arrays = _arrays(
        name,
        "initial_state",
        initial_state,
        *(q, k, v, q_bias, k_bias, mimo_v, mimo_o, angles, adt, dt, trap, z, mimo_z, D, norm_weight),
    )
    v = arrays["v"]
    shapes.require_rank(name, "v", v, 3, "(..., seq, heads, head_dim)")
    sizes = _sizes(name, arrays, lead=v.shape[:-3], seq=v.shape[-3])
    sizes["states"] = sizes["..."]
    bounds = None if cu_seqlens is None else _boundaries(name, cu_seqlens, sizes)
    origins = shapes.origin("v", v, ("...", "seq"))
    ids = None
    if segment_ids is not None:
        ids = shapes.labels(name, "segment_ids", segment_ids, ("...", "seq"), sizes, origins)
    if bounds is not None and ids is not None:
        raise ValueError(
            f"{name}: segment_ids: expected None beside cu_seqlens, got an array; each of them says alone where packed "
            "sequences begin."
        )
    _check(name, arrays, sizes, ("...", "seq"), "initial_state", ids)
    canonical = _canonical(arrays, sizes, "initial_state", sequences=sizes.get("sequences", 1))
    operands = Operands(**canonical, cu_seqlens=bounds)
    if ids is not None:
        ids = ids.reshape(operands.v.shape[:2])
        operands = packing.separated(operands, ids)
    spec = _spec(
        name,
        operands,
        rotary,
        norm_eps,
        return_final_state=shapes.flag(name, "return_final_state", return_final_state),
        chunk_size=shapes.chunk(name, chunk_size),
        precision=_precision(name, precision, v),
        implementation=dispatch.preferences(implementation),
    )
    if ids is not None and packing.may_pad(ids):
        spec = dataclasses.replace(spec, norm_eps=max(spec.norm_eps, packing.LEAST_NORM_EPS))
    operands = manual_axes.unified(operands)
    results: tuple[jax.Array, ...]
    if spec.implementation[0] == "reference":
        results = _reference(ops.FORWARD, spec, operands, _reference_scan)
    else:
        op.require_possible(ops.FORWARD, spec, [a for a in operands if a is not None])
        with in_words(name):
            results = vjp.scan(spec, guarded(operands, name))
    lead, y = sizes["..."], results[0]
    if ids is not None:
        y = packing.without_padding(y, ids)
    y = checkpoint_name(y.reshape(*lead, *y.shape[1:]), "mamba3_y")
    if not spec.return_final_state:
        return y
    end = reference.State(*results[1:])
    if ids is not None:
        end = packing.final_state(operands, ids, end, spec.rotary)
    types = _state_types(v, initial_state)
    state = (a.reshape(*sizes["states"], *a.shape[2:]).astype(t) for a, t in zip(end, types, strict=True))
    state = _public(Mamba3State(*state), "mimo_v" in arrays)
    return y, Mamba3State(*(checkpoint_name(a, "mamba3_final_state") for a in state))


def mamba3_step(
    state: Mamba3State,
    q,
    k,
    v,
    q_bias,
    k_bias,
    mimo_v,
    mimo_o,
    angles,
    adt,
    dt,
    trap,
    *,
    z=None,
    mimo_z=None,
    D=None,
    norm_weight=None,
    norm_eps: float = 1e-5,
    rotary: Rotary = "pairwise",
    implementation: Implementation = None,
) -> tuple[Mamba3State, jax.Array]:
    """One token of the Mamba-3 scan, or a few: the body of a `jax.lax.scan` that decodes.

    The same recurrence as `mamba3`, whose final state it takes and whose options mean the same here.

    Where v has an axis more than the state's v, it is that of several tokens known at the same time, such as drafted
    ones or a piece of a prompt; so the state must have the batch axes of its tokens. q, k, v, z, angles, adt, dt and
    trap have then the seq axis that `mamba3` gives them, v [..., seq, heads, head_dim] and dt [..., heads, seq], and so
    has y. A state that lacks the batch axis is refused, but not beside as many sequences as heads: that has, in every
    array, the shape of so many tokens of one sequence.

    The state is the one after the last token; where drafted tokens are refused, step again from the state before with
    the accepted ones. "cuda" reads and writes the state once in such a call, and gives the bits that a call for each
    token gives. For tens of tokens `mamba3` with an initial state is faster.

    Args:
      state: Mamba3State with the leading axes of v. angle should be float32, which "cuda" insists on; the new state
        keeps all types.
      q: [..., rank, groups, state]; SISO (mimo_v is None): [..., groups, state].
      k: as q.
      v: [..., heads, head_dim].
      q_bias: [heads, rank, state]; SISO [heads, state].
      k_bias: as q_bias.
      mimo_v: [heads, rank, head_dim]. None: SISO.
      mimo_o: [heads, rank, head_dim]. None: y keeps its rank axis.
      angles: [..., heads, pairs].
      adt: [..., heads], at most 0.
      dt: [..., heads].
      trap: [..., heads], the logit of lambda.
      z: [..., heads, head_dim]. None: no gate.
      mimo_z: [heads, rank, head_dim].
      D: [heads]. None: no skip.
      norm_weight: [heads, head_dim] or [heads * head_dim]. None: no norm.
      norm_eps: as in `mamba3`.
      rotary: as in `mamba3`.
      implementation: as in `mamba3`.

    Returns:
      (new state, y [..., heads, head_dim], or [..., rank, heads, head_dim] for mimo_v without mimo_o, in v's type;
      with the seq axis of v, if it has one, before these).

    Raises:
      ValueError, TypeError, NotImplementedError: as in `mamba3`.

    Example:
      >>> def token(state, t):
      ...     return mamba3_step(state, t.q, t.k, t.v, *weights, t.angles, t.adt, t.dt, t.trap)
      >>> state, y = jax.lax.scan(token, state, tokens)
    """
    name = "mamba3_step"
    arrays = _arrays(
        name,
        "state",
        state,
        *(q, k, v, q_bias, k_bias, mimo_v, mimo_o, angles, adt, dt, trap, z, mimo_z, D, norm_weight),
    )
    v = arrays["v"]
    several = _several(name, arrays)
    token_axes = ("...", "seq") if several else ("...",)
    shapes.require_rank(name, "v", v, 2 + several, f"({', '.join(token_axes)}, heads, head_dim)")
    sizes = _sizes(name, arrays, lead=v.shape[: -2 - several], seq=v.shape[-3] if several else None)
    sizes["states"] = sizes["..."]
    _check(name, arrays, sizes, token_axes, "state")
    operands = StepOperands(**_canonical(arrays, sizes, "state", sequences=None))
    spec = _spec(
        name,
        operands,
        rotary,
        norm_eps,
        return_final_state=True,
        chunk_size=None,
        precision="default",
        implementation=dispatch.preferences(implementation),
    )
    operands = manual_axes.unified(operands)
    results: tuple[jax.Array, ...]
    if spec.implementation[0] == "reference":
        results = _reference(ops.STEP, spec, operands, _reference_step)
    else:
        op.require_possible(ops.STEP, spec, [a for a in operands if a is not None])
        with in_words(name):
            results = vjp.step(spec, guarded(operands, name))
    *new, y = results
    y = y if several else jnp.squeeze(y, 1)
    lead = sizes["..."]
    new_state = Mamba3State(*(a.reshape(*lead, *a.shape[1:]) for a in new))
    return _public(new_state, "mimo_v" in arrays), y.reshape(*lead, *y.shape[1:])


class Mamba3Schedule(NamedTuple):
    """What `mamba3` takes of a layer's projections; all in the order and type that it takes them."""

    angles: jax.Array  # [..., seq, heads, pairs]
    adt: jax.Array  # [..., heads, seq]
    dt: jax.Array  # [..., heads, seq]
    trap: jax.Array  # [..., heads, seq]


def mamba3_schedule(
    dd_dt,
    dd_A,
    trap,
    angles,
    dt_bias,
    *,
    A_floor: float = 1e-4,
    A_map: Literal["softplus", "heavy_tailed"] = "softplus",
) -> Mamba3Schedule:
    """Step sizes and decays from a layer's projections, as state-spaces/mamba's layer makes them.

        dt = softplus(dd_dt + dt_bias)        A = min(-act(dd_A), -A_floor)        adt = A dt

    in float32 (float64 for float64 projections), with act(x) = log(1 + exp(x)) ("softplus"), or 1 + x for x >= 0 and
    1 / (1 - x) for x < 0 ("heavy_tailed").

    Args:
      dd_dt: [..., seq, heads], any float type.
      dd_A: [..., seq, heads].
      trap: [..., seq, heads], the logit of lambda; passed on.
      angles: [..., seq, pairs], one set for all heads, or [..., seq, heads, pairs]; passed on, once per head.
      dt_bias: [heads].
      A_floor: least rate of decay per unit of dt, not negative.
      A_map: "softplus" for checkpoints of every released version up to 2.3.2; "heavy_tailed" for the source since June
        2026. They are different layers.

    Returns:
      Mamba3Schedule(angles [..., seq, heads, pairs], adt, dt, trap [..., heads, seq]).

    Raises:
      ValueError: shapes disagree, or an option is out of range.
      TypeError: an argument is no array of a floating type.

    Example:
      >>> angles, adt, dt, trap = mamba3_schedule(dd_dt, dd_A, trap, angles, dt_bias)
    """
    name = "mamba3_schedule"
    given = {"dd_dt": dd_dt, "dd_A": dd_A, "trap": trap, "angles": angles, "dt_bias": dt_bias}
    arrays = {key: shapes.as_array(name, key, value) for key, value in given.items()}
    shapes.require_rank(name, "dd_dt", arrays["dd_dt"], 2, "(..., seq, heads)")
    shapes.require_rank(name, "angles", arrays["angles"], 2, "(..., seq, pairs)")
    *lead, seq, heads = arrays["dd_dt"].shape
    sizes = {"...": tuple(lead), "seq": seq, "heads": heads, "pairs": arrays["angles"].shape[-1]}
    shared = arrays["angles"].ndim == arrays["dd_dt"].ndim
    expected = dict.fromkeys(("dd_dt", "dd_A", "trap"), ("...", "seq", "heads"))
    expected |= {
        "dt_bias": ("heads",),
        "angles": ("...", "seq", "pairs") if shared else ("...", "seq", "heads", "pairs"),
    }
    origins = shapes.origin("dd_dt", arrays["dd_dt"], ("...", "seq", "heads"))
    for key, array in arrays.items():
        shapes.require_float(name, key, array)
        shapes.require_shape(name, key, array, expected[key], sizes, origins)
    shapes.require_choice(name, "A_map", A_map, ("softplus", "heavy_tailed"))
    floor = shapes.number(name, "A_floor", A_floor)
    dtype = accumulator(arrays["dd_dt"].dtype)
    raw_dt, raw_A, logit, turns, bias = (arrays[key].astype(dtype) for key in given)
    dt = jax.nn.softplus(raw_dt + jnp.broadcast_to(bias, raw_dt.shape))
    if A_map == "softplus":
        rate = jax.nn.softplus(raw_A)
    else:  # the other branch's argument is kept where it is finite, for the derivative
        rate = jnp.where(raw_A >= 0, 1 + raw_A, 1 / (1 - jnp.minimum(raw_A, 0)))
    adt = jnp.minimum(-rate, -floor) * dt
    if shared:
        turns = jnp.broadcast_to(turns[..., None, :], (*lead, seq, heads, turns.shape[-1]))
    return Mamba3Schedule(turns, *(jnp.swapaxes(a, -1, -2) for a in (adt, dt, logit)))


# Named jits, so that dispatch_paths can see them in a traced program.
def _mamba3_reference(operands, rotary, norm_eps):
    y, state = reference.scan(operands, rotary, norm_eps)
    return (y, *state)


def _mamba3_step_reference(operands, rotary, norm_eps):
    return reference.step(operands, rotary, norm_eps)


_reference_scan = jax.jit(_mamba3_reference, static_argnums=(1, 2))
_reference_step = jax.jit(_mamba3_step_reference, static_argnums=(1, 2))


def _reference(definition: op.Definition, spec: ops.Spec, operands, run) -> tuple[jax.Array, ...]:
    def function(*arrays):
        given = type(operands)(**dict(zip(spec.operands, arrays, strict=True)))
        return run(given, spec.rotary, spec.norm_eps)

    whole = dataclasses.replace(spec, return_final_state=True)
    return op.over_explicit_axes(definition.letters(whole), function)(*present(spec, operands))


_ARGUMENTS = (
    *("q", "k", "v", "q_bias", "k_bias", "mimo_v", "mimo_o", "angles", "adt", "dt", "trap"),
    *("z", "mimo_z", "D", "norm_weight"),
)
_OPTIONAL = ("mimo_v", "mimo_o", "z", "mimo_z", "D", "norm_weight")
_BIASES = ("q_bias", "k_bias")
_RANKED = ("mimo_v", "mimo_o", "mimo_z")


def _arrays(name: str, state_name: str, state, *arguments) -> dict[str, jax.Array]:
    """The arguments that are given, by their names; the state's pieces as "initial_state.angle" and so on."""
    named = zip(_ARGUMENTS, arguments, strict=True)
    given = {key: value for key, value in named if value is not None or key not in _OPTIONAL}
    if state is not None or state_name == "state":  # a step's, which has none to leave out
        if not isinstance(state, (tuple, list)) or len(state) != len(Mamba3State._fields):
            count = f" of {len(state)}" if isinstance(state, (tuple, list)) else ""
            raise TypeError(
                f"{name}: {state_name}: expected a Mamba3State of four arrays, got {type(state).__name__}{count}; pass "
                "Mamba3State(angle, ssm, k, v): the one that mamba3 with return_final_state=True or the last step "
                "returned, or zeros before the first token, jnp.zeros([..., heads, pairs]), [..., heads, head_dim, "
                "state], [..., heads, rank, state] (SISO: without rank) and [..., heads, head_dim]."
            )
        given |= {f"{state_name}.{key}": value for key, value in zip(Mamba3State._fields, state, strict=True)}
    return {key: shapes.as_array(name, key, value) for key, value in given.items()}


def _several(name: str, arrays: dict[str, jax.Array]) -> bool:
    """Whether the arrays of a step have an axis of tokens: v has one axis more than the state's v then."""
    shapes.require_rank(name, "state.v", arrays["state.v"], 2, "(..., heads, head_dim)")
    lead = arrays["state.v"].ndim - 2
    words = f"beside state.v of {arrays['state.v'].shape}"
    axes = {"v": arrays["v"].ndim - 2 - lead, "q": arrays["q"].ndim - 2 - ("mimo_v" in arrays) - lead}
    if axes["v"] not in (0, 1):
        raise ValueError(
            f"{name}: v: expected (..., heads, head_dim) or, for several tokens, (..., seq, heads, head_dim) {words}, "
            f"got {arrays['v'].shape}; pass a state with the leading axes of v."
        )
    if sorted(axes.values()) == [0, 1]:
        raise ValueError(
            f"{name}: q: expected {'a' if axes['v'] else 'no'} seq axis, as v of {arrays['v'].shape} {words} has, got "
            f"{arrays['q'].shape}; give every array of tokens that axis, or none."
        )
    if axes["v"] == 1:
        *lead, seq, heads, _ = arrays["v"].shape
        if seq != heads and all(arrays[key].shape == (*lead, seq, heads) for key in ("adt", "dt", "trap")):
            raise ValueError(
                f"{name}: state.v: expected the shape {arrays['v'].shape} of v, as adt, dt and trap of "
                f"{arrays['adt'].shape} are those of one token, got {arrays['state.v'].shape}; give the state the "
                "batch axes of its tokens or, for several tokens of a sequence, swap the last axes of adt, dt and trap."
            )
    return axes["v"] == 1


def _sizes(name: str, arrays: dict[str, jax.Array], lead: tuple[int, ...], seq: int | None) -> dict[str, Any]:
    """Sizes by axis name, the ranges of those that are limited checked."""
    q, mimo = arrays["q"], "mimo_v" in arrays
    words = f"({'..., seq, ' if seq is not None else '..., '}{'rank, ' if mimo else ''}groups, state)"
    axes = len(lead) + (seq is not None) + (3 if mimo else 2)
    if q.ndim != axes:
        cure = (
            "give q and k a rank axis before the groups, or pass mimo_v=None for SISO"
            if mimo
            else "pass mimo_v if q and k have a rank axis; without it (SISO) they have none"
        )
        raise ValueError(
            f"{name}: q: expected {axes} axes {words} beside v of {arrays['v'].shape}, got {q.shape}; {cure}."
        )
    shapes.require_rank(name, "angles", arrays["angles"], 1, "(..., heads, pairs)")
    heads, head_dim = arrays["v"].shape[-2:]
    groups, state = q.shape[-2:]
    rank, pairs = q.shape[-3] if mimo else 1, arrays["angles"].shape[-1]
    shapes.require_divides(name, heads, groups, names=("q", "v", "q and k"))
    if state % 2:
        raise ValueError(
            f"{name}: q: expected an even state size, as coordinates rotate in pairs, got {state} in shape {q.shape}; "
            "pad q, k and their biases with a zero."
        )
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(
            f"{name}: q: expected a rank from 1 to {MAX_RANK}, got {rank} in shape {q.shape}; "
            f"the axes are {words}, in this order."
        )
    if pairs > state // 2:
        raise ValueError(
            f"{name}: angles: expected at most state / 2 = {state // 2} rotated pairs, got {pairs} in shape "
            f"{arrays['angles'].shape}; pass one angle per pair of coordinates."
        )
    sizes = {"...": lead, "heads": heads, "head_dim": head_dim, "groups": groups, "state": state}
    sizes |= {"rank": rank, "pairs": pairs, "heads * head_dim": heads * head_dim}
    return sizes if seq is None else sizes | {"seq": seq}


def _boundaries(name: str, cu_seqlens, sizes: dict[str, Any]) -> jax.Array:
    """cu_seqlens as [batch, sequences + 1] int32; the number of sequences and the axes of states join the sizes."""
    bounds = shapes.as_array(name, "cu_seqlens", cu_seqlens)
    if not jnp.issubdtype(bounds.dtype, jnp.integer):
        raise TypeError(f"{name}: cu_seqlens: expected an integer type, got {bounds.dtype.name}; convert it to int32.")
    *lead, count = bounds.shape or (0,)
    if count < 2:
        raise ValueError(
            f"{name}: cu_seqlens: expected shape (..., sequences + 1) with at least one sequence, got {bounds.shape}; "
            "pass the first token of each sequence and then seq."
        )
    if tuple(lead) != sizes["..."] and (lead or sizes["..."] != (1,)):
        raise ValueError(
            f"{name}: cu_seqlens: expected the leading axes {sizes['...']} of v and then sequences + 1, got shape "
            f"{bounds.shape}; pass boundaries for each row, with empty sequences where a row has fewer, or segment_ids."
        )
    seq, values = sizes["seq"], _concrete(bounds)
    if values is not None:
        values = values.astype(np.int64)  # differences of unsigned numbers are never negative
        ends = (values[..., 0] != 0) | (values[..., -1] != seq)
        if (ends | (np.diff(values) < 0).any(-1)).any():
            raise ValueError(
                f"{name}: cu_seqlens: expected values from 0 to seq = {seq} that never decrease, got "
                f"{values.tolist()}; pass np.cumsum of the lengths with a 0 before it."
            )
    sizes |= {"sequences": count - 1, "states": (*lead, count - 1)}
    if values is None:  # in their own type, of which int32 might not hold all
        bounds = jnp.clip(bounds, 0, min(seq, jnp.iinfo(bounds.dtype).max))
    bounds = bounds.astype(jnp.int32).reshape(math.prod(sizes["..."]), count)
    if values is None:  # nobody can say then whether they are sound: every implementation makes the same of them
        inner = jax.lax.cummax(bounds[:, 1:-1], axis=1)
        first, last = jnp.zeros_like(bounds[:, :1]), jnp.full_like(bounds[:, :1], seq)
        bounds = jnp.concatenate([first, inner, last], axis=1)
    return bounds


def _check(name: str, arrays, sizes, token_axes: tuple[str, ...], state: str, ids: jax.Array | None = None) -> None:
    """Shapes, types and signs of every array but segment_ids (`ids`) and cu_seqlens, from one table."""
    rank = ("rank",) if "mimo_v" in arrays else ()
    schedule = ("...", "heads", *token_axes[1:])
    states: tuple[str, ...] = ("...",)
    if "sequences" in sizes:  # boundaries without batch axes serve a batch of one
        states = ("...", "sequences") if len(sizes["states"]) > len(sizes["..."]) else ("sequences",)
    expected: dict[str, tuple[str, ...]] = {
        **dict.fromkeys(("q", "k"), (*token_axes, *rank, "groups", "state")),
        **dict.fromkeys(("v", "z"), (*token_axes, "heads", "head_dim")),
        **dict.fromkeys(("adt", "dt", "trap"), schedule),
        **dict.fromkeys(_BIASES, ("heads", *rank, "state")),
        **dict.fromkeys(_RANKED, ("heads", "rank", "head_dim")),
        "angles": (*token_axes, "heads", "pairs"),
        "D": ("heads",),
        "norm_weight": ("heads", "head_dim"),
        f"{state}.angle": (*states, "heads", "pairs"),
        f"{state}.ssm": (*states, "heads", "head_dim", "state"),
        f"{state}.k": (*states, "heads", *rank, "state"),
        f"{state}.v": (*states, "heads", "head_dim"),
    }
    if "norm_weight" in arrays and arrays["norm_weight"].ndim == 1:
        expected["norm_weight"] = ("heads * head_dim",)
    origins = shapes.origin("v", arrays["v"], (*token_axes, "heads", "head_dim", "heads * head_dim"))
    origins |= shapes.origin("q", arrays["q"], ("rank", "groups", "state"))
    origins |= shapes.origin("angles", arrays["angles"], ("pairs",))
    _check_presence(name, arrays)
    for key, array in arrays.items():
        shapes.require_float(name, key, array)
        shapes.require_shape(name, key, array, expected[key], sizes, origins)
        if key in ("k", "v", "z"):
            shapes.require_dtype(name, key, array, (arrays["q"].dtype.name,), "the type of q")
    adt, labels = _concrete(arrays["adt"]), None if ids is None else _concrete(ids)
    if adt is not None and ids is not None:  # what padding holds does not matter
        adt = None if labels is None else np.where(labels[..., None, :] < 0, 0, adt)
    if adt is not None and (adt > 0).any():
        raise ValueError(
            f"{name}: adt: expected the log of a decay, at most 0, got values up to {adt.max():.6g}; "
            "pass A * dt with a negative A."
        )


def _check_presence(name: str, arrays) -> None:
    """Which optional arrays go together."""
    for key in ("mimo_o", "mimo_z"):
        if key in arrays and "mimo_v" not in arrays:
            raise ValueError(f"{name}: {key}: expected None without mimo_v (SISO), got an array; pass mimo_v, or None.")
    if "mimo_z" in arrays and "z" not in arrays:
        raise ValueError(f"{name}: mimo_z: expected None without z, got an array; pass z, or None.")
    if {"z", "mimo_v"} <= arrays.keys() and "mimo_z" not in arrays:
        raise ValueError(
            f"{name}: mimo_z: expected an array beside z and mimo_v, got None; pass ones for a shared gate."
        )


def _concrete(array: jax.Array) -> np.ndarray | None:
    """The values, if they are known here and now."""
    if isinstance(array, Tracer) or not array.is_fully_addressable:
        return None
    return np.asarray(array)


def _canonical(arrays, sizes, state: str, sequences: int | None) -> dict[str, jax.Array]:
    """One batch axis, a seq axis, a rank axis everywhere, a row axis before parameters, float32 where sums are made.

    sequences: of which states have an axis. None for a step: none, and the state keeps its types.
    """
    lead, batch = sizes["..."], math.prod(sizes["..."])
    dtype, mimo = accumulator(arrays["v"].dtype), "mimo_v" in arrays
    result = {}
    for key, array in arrays.items():
        if key in (*_BIASES, *_RANKED, "D", "norm_weight"):
            if key in _BIASES and not mimo:
                array = array[:, None]
            if key == "norm_weight":
                array = array.reshape(sizes["heads"], sizes["head_dim"])
            result[key] = array.astype(dtype)[None]
        elif key.startswith(f"{state}."):
            piece = key.removeprefix(f"{state}.")
            own = array[..., None, :] if piece == "k" and not mimo else array
            axes = own.shape[len(sizes["states"]) :]
            shape = (batch, *axes) if sequences is None else (batch, sequences, *axes)
            result[f"state_{piece}"] = own.reshape(shape).astype(own.dtype if sequences is None else dtype)
        else:
            own = array[..., None, :, :] if key in ("q", "k") and not mimo else array
            own = own.astype(dtype) if key in ("angles", "adt", "dt", "trap") else own
            if "seq" not in sizes:
                own = jnp.expand_dims(own, -1 if key in ("adt", "dt", "trap") else len(lead))
            result[key] = own.reshape(batch, *own.shape[len(lead) :])
    return result


def _spec(name: str, operands, rotary, norm_eps, **options) -> ops.Spec:
    return ops.Spec(
        operands=tuple(key for key in operands._fields if getattr(operands, key) is not None),
        rotary=shapes.require_choice(name, "rotary", rotary, ("pairwise", "half")),
        norm_eps=shapes.number(name, "norm_eps", norm_eps),
        **options,
    )


def _precision(name: str, precision, v: jax.Array) -> str:
    asked = shapes.precision(name, precision)
    return "fma" if v.dtype == jnp.float32 and config.settings().mamba3_scan == "fma" else asked


def _state_types(v: jax.Array, initial_state) -> tuple[jnp.dtype, ...]:
    if initial_state is not None:
        return tuple(jnp.asarray(a).dtype for a in initial_state)
    dtype = accumulator(v.dtype)
    return (dtype, dtype, dtype, v.dtype)


def _public(state: Mamba3State, mimo: bool) -> Mamba3State:
    return state if mimo else state._replace(k=state.k[..., 0, :])
