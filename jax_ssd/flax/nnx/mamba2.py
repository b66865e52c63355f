"""Mamba-2 as a Flax NNX layer.

The input projection is stored split by role (z, x, B, C, dt), as are the convolutions: a fused kernel would mix rows
that follow the heads with rows shared by all heads of a group, and could not be sharded over heads. Every array whose
name says x, z, dt or out is laid out head-major, so one mesh axis can cut them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ssd import shapes
from jax_ssd.conv import causal_conv1d, causal_conv1d_step
from jax_ssd.flax.nnx.norm import GatedRMSNorm
from jax_ssd.flax.nnx.parameters import (
    NO_METADATA,
    Initializer,
    Metadata,
    batch_of_token,
    float_type,
    head_count,
    initial_dt_bias,
    numbers,
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
from jax_ssd.mamba2.api import mamba2, mamba2_step


def _uniform_width(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Uniform in +-1/sqrt(width) for a depthwise kernel of shape (channels, width)."""
    bound = 1 / math.sqrt(shape[-1])
    return jax.random.uniform(key, tuple(shape), dtype, -bound, bound)


@partial(jax.tree_util.register_dataclass, data_fields=("conv_x", "conv_B", "conv_C", "ssm"), meta_fields=())
@dataclass(frozen=True)
class Mamba2Carry:
    """What a Mamba-2 layer remembers between tokens; ``...`` are the batch axes.

    Attributes:
      conv_x: ``[..., conv_width - 1, heads * head_dim]``, the latest tokens in front of x's convolution, oldest first.
      conv_B, conv_C: ``[..., conv_width - 1, groups * state_dim]``, likewise for B and C.
      ssm: ``[..., heads, head_dim, state_dim]``, the state of the recurrence.
    """

    conv_x: jax.Array
    conv_B: jax.Array
    conv_C: jax.Array
    ssm: jax.Array


class CausalConv1d(nnx.Module):
    """Depthwise causal convolution with SiLU; ``kernel [channels, width]``, ``bias [channels]``."""

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        use_bias: bool = True,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = _uniform_width,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
        rngs: nnx.Rngs,
    ):
        positive("CausalConv1d", channels=channels, width=width)
        float_type("CausalConv1d", "param_dtype", param_dtype)
        require_rngs("CausalConv1d", rngs)
        require_callables("CausalConv1d", kernel_init=kernel_init)
        shapes.flag("CausalConv1d", "use_bias", use_bias)
        self.kernel = nnx.Param(kernel_init(rngs.params(), (channels, width), param_dtype), **kernel_metadata)
        self.bias: nnx.Param[jax.Array] | None = nnx.data(None)
        if use_bias:
            bound = 1 / math.sqrt(width)
            bias = jax.random.uniform(rngs.params(), (channels,), param_dtype, -bound, bound)
            self.bias = nnx.Param(bias, **bias_metadata)

    def __call__(
        self, x: jax.Array, *, initial_state: jax.Array | None, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """``x [..., seq, channels]`` -> ``(y, window after the last token)``."""
        return causal_conv1d(
            x,
            self.kernel[...],
            self._bias(),
            activation="silu",
            initial_state=initial_state,
            segment_ids=segment_ids,
            return_final_state=True,
        )

    def step(self, state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``state [..., width - 1, channels]``, ``x [..., channels]`` -> ``(state, y)``."""
        return causal_conv1d_step(state, x, self.kernel[...], self._bias(), activation="silu")

    def _bias(self) -> jax.Array | None:
        return None if self.bias is None else self.bias[...]


class Mamba2(nnx.Module):
    """The Mamba-2 layer: projections, causal convolution, SSD, gated norm, output projection.

    With ``inner = expand * in_features`` split into ``heads = inner / head_dim``::

        z, x, B, C, dt = in_proj(u)                       x, B, C = silu(causal_conv(x)), ...
        y = mamba2(x, dt, -exp(A_log), B, C, D, dt_bias=dt_bias, dt_softplus=True)
        out = out_proj(rms_norm(y * silu(z)))

    Shapes: ``u [..., seq, in_features]`` -> ``[..., seq, in_features]``. Projections and convolutions compute in
    ``dtype`` (None: that of inputs and parameters, promoted); ``A_log``, ``dt_bias``, ``D`` and the norm's scale are
    float32 parameters, and sums, decays and the state are float32 inside.

    A token at a time, as the body of a scan::

        carry, y = jax.lax.scan(layer.step, layer.initialize_carry((batch, in_features)), u_time_major)

    Args:
      in_features: features of input and output.
      state_dim, head_dim, expand, num_groups, conv_width: the sizes N, P, inner / in_features, G (a divisor of the
        heads) and the taps of the convolution.
      chunk_size: tokens per chunk of the scan, None lets the implementation choose; results do not depend on it.
      dt_limit: clamp of dt after bias and softplus, as in ``jax_ssd.mamba2``.
      dt_init: ``(min, max, floor)``; softplus(dt_bias) starts log-uniform in [min, max], at least floor.
      A_init_range: -A starts uniform in this range; 0 < low <= high.
      per_channel_D: ``D [heads, head_dim]`` rather than ``[heads]``.
      use_norm: gate and normalise after the scan; without it z gates inside the scan.
      norm_before_gate, norm_epsilon: as in ``jax_ssd.rms_norm_gated``; each group is normalised by itself.
      use_bias, use_conv_bias: biases of the projections (dt has ``dt_bias`` of its own) and of the convolutions.
      dtype, param_dtype: compute and storage dtype of projections and convolutions.
      state_dtype: dtype in which the carry keeps the state of the recurrence between calls.
      precision: of the projections and, where an implementation has a choice, of the scan.
      kernel_init, conv_kernel_init, out_kernel_init: initialisers; the defaults are the original model's.
      kernel_metadata: for the z, x and dt kernels ``[in_features, head-major]``, e.g.
        ``{"out_sharding": (None, "heads")}``.
      group_kernel_metadata: for the B and C kernels ``[in_features, groups * state_dim]``.
      conv_metadata: for x's convolution kernel ``[head-major, width]``.
      out_kernel_metadata: for the output kernel ``[head-major, in_features]``.
      head_metadata: for the head-major vectors: A_log, dt_bias, D, the norm's scale, x's convolution bias.
      implementation: of ``jax_ssd.mamba2`` and its step; None picks the fastest that accepts.
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
        conv_width: int = 4,
        chunk_size: int | None = None,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        dt_init: tuple[float, float, float] = (1e-3, 1e-1, 1e-4),
        A_init_range: tuple[float, float] = (1.0, 16.0),
        per_channel_D: bool = False,
        use_norm: bool = True,
        norm_before_gate: bool = False,
        norm_epsilon: float = 1e-5,
        use_bias: bool = False,
        use_conv_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        state_dtype: Any = jnp.float32,
        precision: Literal["default", "highest"] | None = None,
        kernel_init: Initializer = uniform_fan_in,
        conv_kernel_init: Initializer = _uniform_width,
        out_kernel_init: Initializer = uniform_fan_in,
        kernel_metadata: Metadata = NO_METADATA,
        group_kernel_metadata: Metadata = NO_METADATA,
        conv_metadata: Metadata = NO_METADATA,
        out_kernel_metadata: Metadata = NO_METADATA,
        head_metadata: Metadata = NO_METADATA,
        implementation: str | Sequence[str] | None = None,
        rngs: nnx.Rngs,
    ):
        positive("Mamba2", state_dim=state_dim, conv_width=conv_width)
        flags = {"per_channel_D": per_channel_D, "use_norm": use_norm, "norm_before_gate": norm_before_gate}
        for name, value in {**flags, "use_bias": use_bias, "use_conv_bias": use_conv_bias}.items():
            shapes.flag("Mamba2", name, value)
        require_rngs("Mamba2", rngs)
        require_callables(
            "Mamba2", kernel_init=kernel_init, conv_kernel_init=conv_kernel_init, out_kernel_init=out_kernel_init
        )
        require_mappings(
            "Mamba2",
            kernel_metadata=kernel_metadata,
            group_kernel_metadata=group_kernel_metadata,
            conv_metadata=conv_metadata,
            out_kernel_metadata=out_kernel_metadata,
            head_metadata=head_metadata,
        )
        self.in_features = in_features
        self.heads = head_count("Mamba2", in_features, expand, head_dim, num_groups)
        inner = self.heads * head_dim
        self.head_dim = head_dim
        self.num_groups = num_groups
        self.state_dim = state_dim
        self.conv_width = conv_width
        self.chunk_size = shapes.chunk("Mamba2", chunk_size)
        self.dt_limit = shapes.limits("Mamba2", dt_limit)
        if dtype is not None:
            float_type("Mamba2", "dtype", dtype)
        self.dtype = dtype
        float_type("Mamba2", "param_dtype", param_dtype)
        self.param_dtype = param_dtype
        self.state_dtype = float_type("Mamba2", "state_dtype", state_dtype)
        self.precision = precision
        shapes.precision("Mamba2", precision)
        self.implementation = preferences(implementation)

        linear = partial(nnx.Linear, dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs)
        project = partial(linear, in_features, use_bias=use_bias, kernel_init=kernel_init)
        grouped = num_groups * state_dim
        self.z_proj = project(inner, kernel_metadata=kernel_metadata, bias_metadata=head_metadata)
        self.x_proj = project(inner, kernel_metadata=kernel_metadata, bias_metadata=head_metadata)
        self.B_proj = project(grouped, kernel_metadata=group_kernel_metadata)
        self.C_proj = project(grouped, kernel_metadata=group_kernel_metadata)
        self.dt_proj = project(
            self.heads,
            kernel_metadata=kernel_metadata,
            bias_metadata=head_metadata,
            preferred_element_type=sums_of_small_projections(dtype),
        )

        conv = partial(
            CausalConv1d,
            width=conv_width,
            use_bias=use_conv_bias,
            param_dtype=param_dtype,
            kernel_init=conv_kernel_init,
            rngs=rngs,
        )
        self.x_conv = conv(inner, kernel_metadata=conv_metadata, bias_metadata=head_metadata)
        self.B_conv = conv(grouped)
        self.C_conv = conv(grouped)

        self.A_log = nnx.Param(_init_A_log(rngs.params(), self.heads, A_init_range), **head_metadata)
        self.dt_bias = nnx.Param(initial_dt_bias("Mamba2", rngs.params(), self.heads, dt_init), **head_metadata)
        D_shape = (self.heads, head_dim) if per_channel_D else (self.heads,)
        self.D = nnx.Param(jnp.ones(D_shape, jnp.float32), **head_metadata)

        self.norm: GatedRMSNorm | None = nnx.data(None)
        if use_norm:
            self.norm = GatedRMSNorm(
                inner,
                group_size=inner // num_groups,
                norm_before_gate=norm_before_gate,
                epsilon=shapes.number("Mamba2", "norm_epsilon", norm_epsilon),
                scale_metadata=head_metadata,
            )
        self.out_proj = linear(
            inner, in_features, use_bias=use_bias, kernel_init=out_kernel_init, kernel_metadata=out_kernel_metadata
        )

    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        initial_carry: Mamba2Carry | None = None,
        return_carry: Literal[False] = False,
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        initial_carry: Mamba2Carry | None = None,
        return_carry: Literal[True],
    ) -> tuple[jax.Array, Mamba2Carry]: ...

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        initial_carry: Mamba2Carry | None = None,
        return_carry: bool = False,
    ) -> jax.Array | tuple[jax.Array, Mamba2Carry]:
        """Runs the layer over a sequence.

        Args:
          x: ``[..., seq, in_features]``.
          segment_ids: ``[..., seq]`` integer labels of packed sequences; convolution and state restart where they
            change. Negative ids mark padding (on either side, or between): its output is 0 and it changes nothing.
          initial_carry: what earlier tokens left; None starts from zeros.
          return_carry: also return the carry after the last token, for the next piece or for ``step``.

        Returns:
          ``[..., seq, in_features]``, or that and the carry.

        Raises:
          ValueError, TypeError: an argument of another shape or type.
        """
        x = require_sequence("Mamba2", x, self.in_features)
        return_carry = shapes.flag("Mamba2", "return_carry", return_carry)
        if initial_carry is not None:
            self.check_carry("initial_carry", initial_carry, x.shape[:-2])
        if segment_ids is not None:  # what padding holds must not reach the weights' gradients either
            sizes = {"...": x.shape[:-2], "seq": x.shape[-2]}
            segment_ids = shapes.labels("Mamba2", "segment_ids", segment_ids, ("...", "seq"), sizes)
            x = jnp.where((segment_ids >= 0)[..., None], x, jnp.zeros((), x.dtype))
        operands, z, windows = self._scan_operands(x, segment_ids, initial_carry)
        y, ssm = mamba2(
            **operands,
            segment_ids=segment_ids,
            return_final_state=True,
            chunk_size=self.chunk_size,
            precision=self.precision,
            implementation=self.implementation,
        )
        out = self._emit(y, z)
        if segment_ids is not None:
            out = jnp.where((segment_ids >= 0)[..., None], out, jnp.zeros_like(out))  # a bias would show in padding
        if not return_carry:
            return out
        return out, Mamba2Carry(*windows, ssm.astype(self.state_dtype))

    def scan_operands(self, x: jax.Array) -> dict[str, Any]:
        """The arguments of ``jax_ssd.mamba2`` when the layer reads ``x [..., seq, in_features]`` from the start.

        ``mamba2(**layer.scan_operands(x))`` is the scan alone: to time it, or to hold implementations against each
        other on what a trained layer really feeds it.
        """
        return self._scan_operands(require_sequence("Mamba2", x, self.in_features), None, None)[0]

    def step(self, carry: Mamba2Carry, x: jax.Array) -> tuple[Mamba2Carry, jax.Array]:
        """Runs the layer on one token ``x [..., in_features]``; equals a sequence of one token."""
        x = require_features("Mamba2", x, self.in_features)
        self.check_carry("carry", carry, x.shape[:-1])
        z, values, B, C, dt = self._project(x)
        conv_x, values = self.x_conv.step(carry.conv_x, values)
        conv_B, B = self.B_conv.step(carry.conv_B, B)
        conv_C, C = self.C_conv.step(carry.conv_C, C)
        ssm, y = mamba2_step(carry.ssm, **self._operands(values, dt, B, C, z), implementation=self.implementation)
        return Mamba2Carry(conv_x, conv_B, conv_C, ssm), self._emit(y, z)

    def initialize_carry(self, input_shape: Sequence[int], rngs: nnx.Rngs | None = None) -> Mamba2Carry:
        """The carry before the first token, all zeros; windows in ``dtype``, without one in what holds any input.

        Args:
          input_shape: shape of one token, ``(..., in_features)``.
          rngs: not used; taken so that the layer can stand where a Flax recurrent cell does.
        """
        del rngs
        sizes = self._carry_shapes(batch_of_token("Mamba2", input_shape, self.in_features))
        dtype = window_dtype(self.dtype, self.param_dtype)
        return Mamba2Carry(
            **{name: jnp.zeros(shape, self.state_dtype if name == "ssm" else dtype) for name, shape in sizes.items()}
        )

    def check_carry(self, name: str, carry: Any, batch: tuple[int, ...]) -> None:
        """Raises TypeError or ValueError, in which the carry has this name, unless it is one of these batch axes."""
        require_carry("Mamba2", name, carry, Mamba2Carry, self._carry_shapes(batch))

    def _carry_shapes(self, batch: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        history, grouped = self.conv_width - 1, self.num_groups * self.state_dim
        return {
            "conv_x": (*batch, history, self.heads * self.head_dim),
            "conv_B": (*batch, history, grouped),
            "conv_C": (*batch, history, grouped),
            "ssm": (*batch, self.heads, self.head_dim, self.state_dim),
        }

    def _scan_operands(
        self, x: jax.Array, segment_ids: jax.Array | None, carry: Mamba2Carry | None
    ) -> tuple[dict[str, Any], jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        """Projections and convolutions: the scan's operands, the gate, the convolutions' last windows."""
        z, values, B, C, dt = self._project(x)
        values, conv_x = self.x_conv(values, initial_state=carry and carry.conv_x, segment_ids=segment_ids)
        B, conv_B = self.B_conv(B, initial_state=carry and carry.conv_B, segment_ids=segment_ids)
        C, conv_C = self.C_conv(C, initial_state=carry and carry.conv_C, segment_ids=segment_ids)
        operands = self._operands(values, dt, B, C, z)
        if carry is not None:
            operands["initial_state"] = carry.ssm
        return operands, z, (conv_x, conv_B, conv_C)

    def _operands(self, x: jax.Array, dt: jax.Array, B: jax.Array, C: jax.Array, z: jax.Array) -> dict[str, Any]:
        """What sequence and step have in common; arrays ``[..., features]`` are split into heads and groups."""
        return {
            "x": self._per_head(x),
            "dt": dt,
            "A": -jnp.exp(self.A_log[...].astype(jnp.float32)),
            "B": self._per_group(B),
            "C": self._per_group(C),
            "D": self.D[...],
            "z": self._per_head(z) if self.norm is None else None,
            "dt_bias": self.dt_bias[...],
            "dt_softplus": True,
            "dt_limit": self.dt_limit,
        }

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        return self.z_proj(x), self.x_proj(x), self.B_proj(x), self.C_proj(x), self.dt_proj(x)

    def _emit(self, y: jax.Array, z: jax.Array) -> jax.Array:
        y = y.reshape(z.shape)
        return self.out_proj(y if self.norm is None else self.norm(y, z))

    def _per_head(self, x: jax.Array) -> jax.Array:
        return x.reshape((*x.shape[:-1], self.heads, self.head_dim))

    def _per_group(self, x: jax.Array) -> jax.Array:
        return x.reshape((*x.shape[:-1], self.num_groups, self.state_dim))


def _init_A_log(key: jax.Array, heads: int, bounds: tuple[float, float]) -> jax.Array:
    low, high = numbers("Mamba2", "A_init_range", bounds, ("low", "high"))
    if not 0 < low <= high:
        raise ValueError(
            f"Mamba2: A_init_range: expected 0 < low <= high, got {bounds!r}; pass for instance (1.0, 16.0)."
        )
    return jnp.log(jax.random.uniform(key, (heads,), jnp.float32, low, high))
