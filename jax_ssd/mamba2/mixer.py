"""One token of what a Mamba-2 layer does between its projections, as one op: convolution, recurrence and gate.

The windows of the convolution are rings of `width` tokens: token number `position` takes place `position % width`, so
that nothing is moved and a window can be replaced where it is. Heads may be sharded: every shard is given the whole
projection, which heads are its own, and the whole window of B and C.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ssd import manual_axes, op
from jax_ssd.derivatives import guarded, in_words, present
from jax_ssd.mamba2 import plan_cuda_mixer, reference
from jax_ssd.mamba2.plan_cuda_mixer import CARRIED, MixerProblem, fits
from jax_ssd.plans import Buffer

__all__ = ["Operands", "Spec", "fits", "step"]


class Operands(NamedTuple):
    """Canonical arrays; r is 1, or batch after vmap over parameters."""

    state: jax.Array  # [batch, heads, head_dim, state]
    window_x: jax.Array  # [batch, width, heads, head_dim]
    window_bc: jax.Array  # [batch, width, B | C channels]
    projected: jax.Array  # [batch, z | x | B | C | dt], float32 or float64
    position: jax.Array  # [r] int32, not negative
    head: jax.Array  # [r, heads] int32: each one's number in the projection
    filter_x: jax.Array  # [r, width, heads, head_dim], oldest token first
    filter_bc: jax.Array  # [r, width, B | C channels]
    A: jax.Array  # [r, heads]
    D: jax.Array  # [r, heads, head_dim]
    dt_bias: jax.Array  # [r, heads]
    bias_x: jax.Array | None = None  # [r, heads, head_dim]
    bias_bc: jax.Array | None = None  # [r, B | C channels]
    squares: jax.Array | None = None  # [batch]: what the projection read was not normalised, its sum of squares


LETTERS = dict(
    zip(
        Operands._fields,
        ("bhpn", "bthp", "btc", "bs", "r", "rh", "rthp", "rtc", "rh", "rhp", "rh", "rhp", "rc", "b"),
        strict=True,
    )
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about a call but its sizes and types.

    dtype: of y. gates: y is multiplied by silu(z). norm: (1 / features, epsilon) of the norm that is to be made up for
    with `squares`.
    """

    operands: tuple[str, ...]
    all_heads: int
    groups: int
    dt_limit: tuple[float, float]
    gates: bool
    dtype: str
    implementation: tuple[str, ...]
    norm: tuple[float, float] = (0.0, 1.0)


def step(spec: Spec, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The new state and windows, of the shapes and types of the old ones, and y [batch, heads, head_dim].

    With u the token's projection, normalised if there are squares, and c the windows with it in:

        z, x, BC, dt = u;  x, B, C = silu(sum_k filter_k c_k + bias)
        dt = clip(softplus(dt + dt_bias), dt_limit);  state = exp(dt A) state + dt x B'
        y = state C + D x, times silu(z) where spec.gates

    Raises NotImplementedError for what no implementation in ``spec`` takes. Source: upstream's Mamba2.step.
    """
    operands = manual_axes.unified(operands)
    op.require_possible(STEP, spec, present(spec, operands))
    with in_words("mamba2_step"):
        state, window_x, window_bc, y = _differentiable(spec, guarded(operands, "mamba2_step"))
    return state, window_x, window_bc, y


def _plain(spec: Spec, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The op in plain JAX."""
    o, wide = operands, reference.accumulator(spec.dtype)
    batch, width, heads, head_dim = o.window_x.shape
    inner, grouped = spec.all_heads * head_dim, o.window_bc.shape[-1]
    projected = o.projected
    if o.squares is not None:
        share, epsilon = spec.norm
        projected = projected * jax.lax.rsqrt(share * o.squares + epsilon)[:, None]
    z, x, bc, dt = jnp.split(projected, [inner, 2 * inner, 2 * inner + grouped], axis=-1)
    head = jnp.broadcast_to(o.head, (batch, heads))

    def own(array, of=head):
        return array if heads == spec.all_heads else jnp.take_along_axis(array, of[:, :, None], axis=1)

    z, x = (own(array.reshape(batch, spec.all_heads, head_dim)) for array in (z, x))
    place = jax.lax.rem(o.position, jnp.asarray(width, o.position.dtype))
    windows, filtered = {}, {}
    for name, token in (("x", x.astype(spec.dtype)), ("bc", bc.astype(spec.dtype))):
        window, taps = getattr(o, f"window_{name}"), getattr(o, f"filter_{name}").astype(wide)
        newest = (place[:, None] == jnp.arange(width, dtype=place.dtype)[None]).reshape(
            -1, width, *(1,) * (window.ndim - 2)
        )
        windows[name] = jnp.where(newest, token[:, None].astype(window.dtype), window)
        tokens = jnp.where(newest, token[:, None].astype(wide), window.astype(wide))  # the newest as it is, not as kept
        total = jnp.sum(tokens * jax.vmap(_turned)(taps, place), axis=1)
        bias = getattr(o, f"bias_{name}")
        filtered[name] = jax.nn.silu(total if bias is None else total + bias.astype(wide))
    B, C = jnp.split(filtered["bc"].reshape(batch, 2 * spec.groups, o.state.shape[-1]), 2, axis=1)
    group = head // (spec.all_heads // spec.groups)  # where only some heads are here, B and C are taken for each
    given = reference.StepOperands(
        state=o.state,
        x=filtered["x"],
        dt=own(dt[:, :, None])[..., 0],
        A=o.A,
        B=own(B, group),
        C=own(C, group),
        D=o.D,
        z=z if spec.gates else None,
        dt_bias=o.dt_bias,
    )
    state, y = reference.step(given, True, spec.dt_limit)
    return state, windows["x"], windows["bc"], y.astype(spec.dtype)


def _turned(taps: jax.Array, place: jax.Array) -> jax.Array:
    """``taps [width, ...]``, the newest token's last, as the ring has the tokens when the newest is at ``place``."""
    width = taps.shape[0]
    return jax.lax.dynamic_slice_in_dim(jnp.concatenate([taps, taps]), width - 1 - place, width)


def _definition_plain(spec: Spec, name: str) -> op.Function:
    del name  # one token is the same in both
    return lambda *operands: _plain(spec, Operands(**dict(zip(spec.operands, operands, strict=True))))


def _letters(spec: Spec):
    return tuple(LETTERS[name] for name in spec.operands), (*(LETTERS[name] for name in CARRIED), "bhp")


def _abstract(spec: Spec, avals):
    by_name = dict(zip(spec.operands, avals, strict=True))
    state = by_name["state"]
    y = state.update(shape=state.shape[:3], dtype=jnp.dtype(spec.dtype), weak_type=False)
    return [*(by_name[name].update() for name in CARRIED), y]


def _plan(spec: Spec, name: str, avals):
    return op.kernels_of(name, {"cuda": plan_cuda_mixer.step})(problem(spec, avals))


def problem(spec: Spec, avals) -> MixerProblem:
    by_name = dict(zip(spec.operands, avals, strict=True))
    batch, heads, head_dim, state = by_name["state"].shape
    return MixerProblem(
        batch=batch,
        heads=heads,
        all_heads=spec.all_heads,
        head_dim=head_dim,
        groups=spec.groups,
        state=state,
        width=by_name["window_x"].shape[1],
        dtype=spec.dtype,
        param_rows=by_name["A"].shape[0],
        dt_limit=spec.dt_limit,
        gates=spec.gates,
        norm=spec.norm,
        operands=tuple(Buffer(name, aval.shape, aval.dtype.name) for name, aval in by_name.items()),
    )


STEP = op.Definition("mamba2_mixer_step", _letters, _abstract, _definition_plain, _plan)
_bound = op.define(STEP)


def _step(spec: Spec, operands: Operands) -> tuple[jax.Array, ...]:
    return tuple(_bound(spec, *present(spec, operands)))


def _step_forward(spec, operands):
    return _differentiable(spec, operands), operands


def _step_backward(spec, operands, cotangents):
    return jax.vjp(lambda operands: _plain(spec, operands), operands)[1](cotangents)


_differentiable = jax.custom_vjp(_step, nondiff_argnums=(0,))
_differentiable.defvjp(_step_forward, _step_backward)
