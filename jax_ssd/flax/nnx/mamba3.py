"""Mamba-3 as a Flax NNX layer, SISO and MIMO.

The input projection is stored split by role, as in Mamba-2: z, x, dt, A and trap follow the heads, B, C and the angles
are shared by all heads of a group, and one mesh axis can cut everything that is head-major.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ssd import shapes
from jax_ssd.flax.nnx.norm import GatedRMSNorm
from jax_ssd.flax.nnx.parameters import (
    NO_METADATA,
    Initializer,
    Metadata,
    batch_of_token,
    float_type,
    head_count,
    initial_dt_bias,
    positive,
    preferences,
    require_callables,
    require_carry,
    require_features,
    require_mappings,
    require_rngs,
    require_sequence,
    sums_of_small_projections,
    uniform_fan_in,
    window_dtype,
)
from jax_ssd.mamba3.api import MAX_RANK, Mamba3Schedule, Mamba3State, Rotary, mamba3, mamba3_schedule, mamba3_step

ROLES = ("z", "x", "B", "C", "dt", "A", "trap", "angle")
"""What is made of a token by projections of their own, in the order in which the original model stores them."""


class Mamba3(nnx.Module):
    """The Mamba-3 layer: projections, norms of B and C, the scan with its gate, output projection.

    With ``inner = expand * in_features`` split into ``heads = inner / head_dim`` and R ranks (1 for SISO)::

        z, x, B, C, dt, A, trap, angles = in_proj(u)
        q, k = rms_norm(C), rms_norm(B)                   over state_dim, before the bias of each head
        dt = softplus(dt + dt_bias)                       adt = min(-act(A), -A_floor) dt
        y = mamba3(q, k, x, C_bias, B_bias, mimo_x, mimo_o, angles, adt, dt, trap, z=z, mimo_z=mimo_z, D=D)
        out = out_proj(y)

    Shapes: ``u [..., seq, in_features]`` -> ``[..., seq, in_features]``. There is no convolution. Projections compute
    in ``dtype`` (None: that of inputs and parameters, promoted); biases, rank weights, ``dt_bias``, ``D`` and the
    norms' scales are float32 parameters, and step sizes, angles, decays and the state are float32 inside.

    A token at a time, as the body of a scan::

        carry, y = jax.lax.scan(layer.step, layer.initialize_carry((batch, in_features)), u_time_major)

    Args:
      in_features: features of input and output.
      state_dim, head_dim, expand, num_groups: the sizes N (even), P, inner / in_features, G (a divisor of the heads).
      mimo_rank: R from 1 to 8 of a MIMO layer; None is SISO, which has no rank weights.
      rope_fraction: of state_dim that rotates, in [0, 1]; rounded down to whole pairs.
      rotary: ``"pairwise"`` or ``"half"``, as in ``jax_ssd.mamba3``; None: pairwise for SISO, half for MIMO, as the
        original layers have it.
      A_map, A_floor: act and the floor of ``jax_ssd.mamba3_schedule``; "softplus" is that of all released checkpoints.
      chunk_size: tokens per chunk of the scan, None lets the implementation choose; results do not depend on it.
      dt_init: ``(min, max, floor)``; softplus(dt_bias) starts log-uniform in [min, max], at least floor.
      use_norm: normalise each head's output by its root mean square, before the gate and rank by rank.
      norm_epsilon: of that norm and those of B and C.
      dtype, param_dtype: compute and storage dtype of the projections.
      key_dtype: dtype in which the carry keeps the last key; its angle and matrix are float32, its value as computed.
      precision: of the projections and, where an implementation has a choice, of the scan.
      kernel_init, out_kernel_init: initialisers; the defaults are the original model's.
      kernel_metadata: for the z, x, dt, A and trap kernels ``[in_features, head-major]``, e.g.
        ``{"out_sharding": (None, "heads")}``.
      group_kernel_metadata: for the B and C kernels ``[in_features, ranks * groups * state_dim]`` and that of the
        angles ``[in_features, pairs]``.
      out_kernel_metadata: for the output kernel ``[head-major, in_features]``.
      head_metadata: for parameters whose first axis is head-major: dt_bias, D, B_bias and C_bias, the rank weights, the
        output norm's scale.
      implementation: of ``jax_ssd.mamba3`` and its step; None picks the fastest that accepts.
      rngs: random keys; stream ``params``.

    Raises:
      ValueError: sizes that are not positive or do not divide each other, or an option out of range.
      TypeError: a size that is no integer, or an option of another type.
    """

    def __init__(
        self,
        in_features: int,
        *,
        state_dim: int = 128,
        head_dim: int = 64,
        expand: int = 2,
        num_groups: int = 1,
        mimo_rank: int | None = None,
        rope_fraction: float = 0.5,
        rotary: Rotary | None = None,
        A_map: Literal["softplus", "heavy_tailed"] = "softplus",
        A_floor: float = 1e-4,
        chunk_size: int | None = None,
        dt_init: tuple[float, float, float] = (1e-3, 1e-1, 1e-4),
        use_norm: bool = False,
        norm_epsilon: float = 1e-5,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        key_dtype: Any = jnp.float32,
        precision: Literal["default", "highest"] | None = None,
        kernel_init: Initializer = uniform_fan_in,
        out_kernel_init: Initializer = uniform_fan_in,
        kernel_metadata: Metadata = NO_METADATA,
        group_kernel_metadata: Metadata = NO_METADATA,
        out_kernel_metadata: Metadata = NO_METADATA,
        head_metadata: Metadata = NO_METADATA,
        implementation: str | Sequence[str] | None = None,
        rngs: nnx.Rngs,
    ):
        positive("Mamba3", state_dim=state_dim)
        shapes.flag("Mamba3", "use_norm", use_norm)
        require_rngs("Mamba3", rngs)
        require_callables("Mamba3", kernel_init=kernel_init, out_kernel_init=out_kernel_init)
        require_mappings(
            "Mamba3",
            kernel_metadata=kernel_metadata,
            group_kernel_metadata=group_kernel_metadata,
            out_kernel_metadata=out_kernel_metadata,
            head_metadata=head_metadata,
        )
        self.in_features = in_features
        self.heads = head_count("Mamba3", in_features, expand, head_dim, num_groups)
        inner = self.heads * head_dim
        self.head_dim = head_dim
        self.num_groups = num_groups
        self.state_dim = state_dim
        self.mimo_rank = mimo_rank
        self.pairs = _pairs(state_dim, rope_fraction)
        chosen = ("pairwise" if mimo_rank is None else "half") if rotary is None else rotary
        self.rotary: Any = shapes.require_choice("Mamba3", "rotary", chosen, ("pairwise", "half"))
        self.A_map: Any = shapes.require_choice("Mamba3", "A_map", A_map, ("softplus", "heavy_tailed"))
        self.A_floor = shapes.number("Mamba3", "A_floor", A_floor)
        self.chunk_size = shapes.chunk("Mamba3", chunk_size)
        self.norm_epsilon = shapes.number("Mamba3", "norm_epsilon", norm_epsilon)
        if dtype is not None:
            float_type("Mamba3", "dtype", dtype)
        self.dtype = dtype
        float_type("Mamba3", "param_dtype", param_dtype)
        self.param_dtype = param_dtype
        self.key_dtype = float_type("Mamba3", "key_dtype", key_dtype)
        self.precision = precision
        shapes.precision("Mamba3", precision)
        self.implementation = preferences(implementation)
        ranks = self._ranks = _ranks(mimo_rank)

        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, precision=precision)
        project = partial(linear, in_features, kernel_init=kernel_init, rngs=rngs)
        # A handful of columns that are exponentiated or summed up over the sequence.
        small = partial(project, preferred_element_type=sums_of_small_projections(dtype))
        grouped = (mimo_rank or 1) * num_groups * state_dim
        self.z_proj = project(inner, kernel_metadata=kernel_metadata)
        self.x_proj = project(inner, kernel_metadata=kernel_metadata)
        self.B_proj = project(grouped, kernel_metadata=group_kernel_metadata)
        self.C_proj = project(grouped, kernel_metadata=group_kernel_metadata)
        self.dt_proj = small(self.heads, kernel_metadata=kernel_metadata)
        self.A_proj = small(self.heads, kernel_metadata=kernel_metadata)
        self.trap_proj = small(self.heads, kernel_metadata=kernel_metadata)
        # An empty kernel has no initial values, for which JAX 0.10 would divide by zero.
        angle_init = kernel_init if self.pairs else nnx.initializers.zeros_init()
        self.angle_proj = small(self.pairs, kernel_init=angle_init, kernel_metadata=group_kernel_metadata)

        def filled(value: float, *shape: int) -> nnx.Param:
            return nnx.Param(jnp.full((self.heads, *shape), value, jnp.float32), **head_metadata)

        self.dt_bias = nnx.Param(initial_dt_bias("Mamba3", rngs.params(), self.heads, dt_init), **head_metadata)
        self.D = filled(1)
        self.B_bias = filled(1, *ranks, state_dim)
        self.C_bias = filled(1, *ranks, state_dim)
        self.B_norm = GatedRMSNorm(state_dim, epsilon=norm_epsilon)
        self.C_norm = GatedRMSNorm(state_dim, epsilon=norm_epsilon)
        self.mimo_x: nnx.Param | None = nnx.data(None)
        self.mimo_z: nnx.Param | None = nnx.data(None)
        self.mimo_o: nnx.Param | None = nnx.data(None)
        if mimo_rank is not None:
            self.mimo_x = filled(1 / mimo_rank, *ranks, head_dim)
            self.mimo_z = filled(1, *ranks, head_dim)
            self.mimo_o = filled(1 / mimo_rank, *ranks, head_dim)
        self.norm: GatedRMSNorm | None = nnx.data(None)
        if use_norm:  # runs inside the scan, which takes its scale
            self.norm = GatedRMSNorm(
                inner,
                group_size=head_dim,
                norm_before_gate=True,
                epsilon=norm_epsilon,
                scale_metadata=head_metadata,
            )
        self.out_proj = linear(
            inner, in_features, kernel_init=out_kernel_init, kernel_metadata=out_kernel_metadata, rngs=rngs
        )

    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        cu_seqlens: jax.Array | None = None,
        initial_carry: Mamba3State | None = None,
        return_carry: Literal[False] = False,
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        cu_seqlens: jax.Array | None = None,
        initial_carry: Mamba3State | None = None,
        return_carry: Literal[True],
    ) -> tuple[jax.Array, Mamba3State]: ...

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        cu_seqlens: jax.Array | None = None,
        initial_carry: Mamba3State | None = None,
        return_carry: bool = False,
    ) -> jax.Array | tuple[jax.Array, Mamba3State]:
        """Runs the layer over a sequence.

        Args:
          x: ``[..., seq, in_features]``.
          segment_ids: ``[..., seq]`` integer labels of packed sequences; the state restarts where they change. Negative
            ids mark padding (on either side, or between): its output is 0 and it changes nothing. Ids of an unsigned
            type have none, which saves time.
          cu_seqlens: ``[..., sequences + 1]`` integers, the other way to pack: where each sequence of a row begins, and
            seq, as in ``jax_ssd.mamba3``; carries then have the axes of ``cu_seqlens[..., 1:]`` in front.
          initial_carry: what earlier tokens left; None starts from zeros.
          return_carry: also return the carry after the last token, for the next piece or for ``step``.

        Returns:
          ``[..., seq, in_features]``, or that and the carry.
        """
        x = require_sequence("Mamba3", x, self.in_features)
        return_carry = shapes.flag("Mamba3", "return_carry", return_carry)
        if initial_carry is not None:  # with cu_seqlens, one of each sequence, which mamba3 compares
            self.check_carry("initial_carry", initial_carry, x.shape[:-2] if cu_seqlens is None else None)
        if segment_ids is not None:  # what padding holds must not reach the weights' gradients either
            sizes = {"...": x.shape[:-2], "seq": x.shape[-2]}
            segment_ids = shapes.labels("Mamba3", "segment_ids", segment_ids, ("...", "seq"), sizes)
            x = jnp.where((segment_ids >= 0)[..., None], x, jnp.zeros((), x.dtype))
        y, state = mamba3(
            **self.scan_operands(x),
            initial_state=initial_carry,
            segment_ids=segment_ids,
            cu_seqlens=cu_seqlens,
            return_final_state=True,
            chunk_size=self.chunk_size,
            precision=self.precision,
            implementation=self.implementation,
        )
        out = self._emit(y)
        return (out, state._replace(k=state.k.astype(self.key_dtype))) if return_carry else out

    def scan_operands(self, x: jax.Array) -> dict[str, Any]:
        """The arguments of ``jax_ssd.mamba3`` when the layer reads ``x [..., seq, in_features]``.

        ``mamba3(**layer.scan_operands(x))`` is the scan alone: to time it, or to hold implementations against each
        other on what a trained layer really feeds it.
        """
        projected = self._project(require_sequence("Mamba3", x, self.in_features))
        return self._operands(projected, self._schedule(projected))

    def step(self, carry: Mamba3State, x: jax.Array) -> tuple[Mamba3State, jax.Array]:
        """Runs the layer on one token ``x [..., in_features]``; equals a sequence of one token."""
        x = require_features("Mamba3", x, self.in_features)
        self.check_carry("carry", carry, x.shape[:-1])
        carry, y = mamba3_step(carry, **self.step_operands(self._project(x)), implementation=self.implementation)
        return carry, self._emit(y)

    def step_operands(self, projected: Mapping[str, jax.Array]) -> dict[str, Any]:
        """The arguments of ``jax_ssd.mamba3_step``, but the state, from a token's projections by role.

        Roles are z, x, B, C, dt, A, trap and angle, the names of the layer's projections; arrays ``[..., features]``.
        """
        angles, *rest = self._schedule({role: array[..., None, :] for role, array in projected.items()})
        return self._operands(projected, Mamba3Schedule(angles[..., 0, :, :], *(a[..., 0] for a in rest)))

    def initialize_carry(self, input_shape: Sequence[int], rngs: nnx.Rngs | None = None) -> Mamba3State:
        """The carry before the first token, all zeros.

        Args:
          input_shape: shape of one token, ``(..., in_features)``.
          rngs: not used; taken so that the layer can stand where a Flax recurrent cell does.
        """
        del rngs
        sizes = self._carry_shapes(batch_of_token("Mamba3", input_shape, self.in_features))
        types = {"k": self.key_dtype, "v": window_dtype(self.dtype, self.param_dtype)}
        return Mamba3State(**{name: jnp.zeros(shape, types.get(name, "float32")) for name, shape in sizes.items()})

    def check_carry(self, name: str, carry: Any, batch: tuple[int, ...] | None) -> None:
        """Raises TypeError or ValueError, in which the carry has this name, unless it is one of these batch axes."""
        require_carry("Mamba3", name, carry, Mamba3State, None if batch is None else self._carry_shapes(batch))

    def _carry_shapes(self, batch: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {
            "angle": (*batch, self.heads, self.pairs),
            "ssm": (*batch, self.heads, self.head_dim, self.state_dim),
            "k": (*batch, self.heads, *self._ranks, self.state_dim),
            "v": (*batch, self.heads, self.head_dim),
        }

    def _project(self, x: jax.Array) -> dict[str, jax.Array]:
        return {role: getattr(self, f"{role}_proj")(x) for role in ROLES}

    def _schedule(self, projected: Mapping[str, jax.Array]) -> Mamba3Schedule:
        return mamba3_schedule(
            projected["dt"],
            projected["A"],
            projected["trap"],
            projected["angle"],
            self.dt_bias[...],
            A_floor=self.A_floor,
            A_map=self.A_map,
        )

    def _operands(self, projected: Mapping[str, jax.Array], schedule: Mamba3Schedule) -> dict[str, Any]:
        """What sequence and step have in common; arrays ``[..., features]`` are split into heads, ranks and groups."""
        lead = projected["x"].shape[:-1]
        per_group = (*lead, *self._ranks, self.num_groups, self.state_dim)
        per_head = (*lead, self.heads, self.head_dim)
        return {
            "q": self.C_norm(projected["C"].reshape(per_group)),
            "k": self.B_norm(projected["B"].reshape(per_group)),
            "v": projected["x"].reshape(per_head),
            "q_bias": self.C_bias[...],
            "k_bias": self.B_bias[...],
            "mimo_v": _value(self.mimo_x),
            "mimo_o": _value(self.mimo_o),
            **schedule._asdict(),
            "z": projected["z"].reshape(per_head),
            "mimo_z": _value(self.mimo_z),
            "D": self.D[...],
            "norm_weight": None if self.norm is None else self.norm.scale[...],
            "norm_eps": self.norm_epsilon,
            "rotary": self.rotary,
        }

    def _emit(self, y: jax.Array) -> jax.Array:
        return self.out_proj(y.reshape((*y.shape[:-2], self.heads * self.head_dim)))


def _value(parameter: nnx.Param | None) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def _ranks(mimo_rank: int | None) -> tuple[int, ...]:
    """The rank axis of a layer's arrays: SISO has none."""
    if mimo_rank is None:
        return ()
    positive("Mamba3", mimo_rank=mimo_rank)
    if mimo_rank > MAX_RANK:
        raise ValueError(
            f"Mamba3: mimo_rank: expected a rank from 1 to {MAX_RANK}, got {mimo_rank}; pass None for SISO."
        )
    return (mimo_rank,)


def _pairs(state_dim: int, rope_fraction: float) -> int:
    if state_dim % 2:
        raise ValueError(
            f"Mamba3: state_dim: expected an even number, as its coordinates rotate in pairs, got {state_dim}; add one."
        )
    if shapes.number("Mamba3", "rope_fraction", rope_fraction) > 1:
        raise ValueError(
            f"Mamba3: rope_fraction: expected a fraction from 0 to 1, got {rope_fraction}; pass for instance 0.5."
        )
    return int(state_dim * rope_fraction) // 2
