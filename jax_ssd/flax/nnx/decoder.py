"""Layers laid out for decoding.

A layer's `step` takes the weights as training keeps them, apart by role. A token is so little work that its time goes
into the number of operations: here, once for many tokens, the input projections become one matrix, the convolutions of
Mamba-2 one filter with one window, and whatever depends on weights alone is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jax_ssd import dispatch
from jax_ssd.conv import causal_conv1d_step
from jax_ssd.flax.nnx.mamba2 import Mamba2, Mamba2Carry
from jax_ssd.flax.nnx.mamba3 import ROLES, Mamba3
from jax_ssd.flax.nnx.norm import GatedRMSNorm
from jax_ssd.flax.nnx.parameters import require_features
from jax_ssd.mamba2 import mixer
from jax_ssd.mamba2.api import mamba2_step
from jax_ssd.mamba2.reference import accumulator
from jax_ssd.mamba3.api import Mamba3State, mamba3_step

PackedCarry = tuple[jax.Array, tuple[jax.Array, ...]]
"""The number of the next token, int32, and the layer's carry as its decoder arranges it."""


class Mamba2Decoder:
    """What ``layer.step`` computes, in fewer operations and without copies of the weights.

    To be made inside the compiled function that decodes, outside of its loop: it holds copies of the projections in an
    order of their own, about the size of the layer::

        decoder = Mamba2Decoder(layer)
        carry, y = jax.lax.scan(decoder.step, decoder.pack(carry), u_time_major)
        carry = decoder.unpack(carry)

    Where the layer's implementation prefers "cuda" and the kernel takes its sizes, what is between the projections is
    one op, on a GPU one kernel. Projections sum in float32 where the layer computes in 16 bits. A norm in front of a
    projection becomes a factor behind it: its weights go into the projection's, so that nothing waits for its sum.

    Args:
      layer: the layer; its ``implementation`` is that of the op between the projections, or of the recurrence alone.
      recurrence: called with the arguments of ``jax_ssd.mamba2_step``, after a convolution in plain JAX.
      norm: of the layer's inputs, which ``step`` then takes as they are before it.
    """

    def __init__(
        self,
        layer: Mamba2,
        recurrence: Callable[..., tuple[jax.Array, jax.Array]] | None = None,
        norm: nnx.RMSNorm | None = None,
    ):
        self.layer = layer
        self.norm = norm
        projections = (layer.z_proj, layer.x_proj, layer.B_proj, layer.C_proj, layer.dt_proj)
        self.in_bias = _joined([one.bias for one in projections])
        self.out_bias = None if layer.out_proj.bias is None else layer.out_proj.bias[...]
        # float16 might not hold what is not normalised.
        late = layer.dtype is not None and jnp.dtype(layer.dtype) != jnp.float16
        self.late_norm = late and norm is not None and self.in_bias is None
        self.late_gated_norm = (
            late and layer.norm is not None and not layer.norm.norm_before_gate and layer.num_groups == 1
        )
        # Output-major: a product with one token then reads whole rows.
        in_kernel = jnp.concatenate([one.kernel[...].T for one in projections])
        self.in_kernel = _cast(layer, _weighted(in_kernel, norm if self.late_norm else None))
        self.out_kernel = _cast(
            layer, _weighted(layer.out_proj.kernel[...].T, layer.norm if self.late_gated_norm else None)
        )
        one_op = recurrence is None and dispatch.preferences(layer.implementation)[0] == "cuda"
        one_op = one_op and mixer.fits(layer.conv_width, layer.state_dim, jnp.dtype(layer.state_dtype).name)
        self.between = _OneOp(layer) if one_op else _ByItself(layer, recurrence or mamba2_step)

    def pack(self, carry: Mamba2Carry) -> PackedCarry:
        """The layer's carry as ``step`` takes it."""
        return jnp.zeros((), jnp.int32), self.arranged(carry)

    def unpack(self, carry: PackedCarry) -> Mamba2Carry:
        """What ``step`` gave as the layer's carry."""
        return self.restored(*carry)

    def step(self, carry: PackedCarry, x: jax.Array) -> tuple[PackedCarry, jax.Array]:
        """Runs the layer on one token ``x [..., in_features]``."""
        position, arranged = carry
        arranged, y = self.token(position, arranged, x)
        return (position + 1, arranged), y

    def arranged(self, carry: Mamba2Carry) -> tuple[jax.Array, ...]:
        """The layer's carry as ``token`` takes it, where the next token is number 0."""
        return self.between.arranged(carry)

    def restored(self, position: jax.Array, arranged: tuple[jax.Array, ...]) -> Mamba2Carry:
        """What ``token`` gave as the layer's carry; ``position``: the number of the next token."""
        return self.between.restored(position, arranged)

    def token(
        self, position: jax.Array, arranged: tuple[jax.Array, ...], x: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """``step`` for a caller that counts the tokens."""
        layer, norm, late = self.layer, self.norm, None
        x = require_features("Mamba2", x, layer.in_features)
        if norm is not None and self.late_norm:
            late = _Late(_squares(x), 1 / layer.in_features, float(norm.epsilon))
        elif norm is not None:
            x = norm(x)
        dtype = _compute_dtype(layer, x)
        projected = _project(x.astype(dtype), self.in_kernel, self.in_bias, layer.precision)
        arranged, y, z = self.between.token(position, arranged, projected, late, dtype)
        late = None
        if layer.norm is not None and self.late_gated_norm:
            if z is not None:
                y = (y.astype(accumulator(dtype)) * jax.nn.silu(z.astype(accumulator(dtype)))).astype(dtype)
            late = _Late(_squares(y), 1 / y.shape[-1], layer.norm.epsilon)
        elif layer.norm is not None:
            y = layer.norm(y, z)
        out = _project(y, self.out_kernel, None, layer.precision)
        return arranged, _biased(out if late is None else late.applied(out), self.out_bias).astype(dtype)


class _Late(NamedTuple):
    """What is left of a norm whose weights are in a projection's."""

    squares: jax.Array  # of what was projected, summed: all its axes but the last
    share: float  # 1 / features
    epsilon: float

    def applied(self, projected: jax.Array) -> jax.Array:
        mean_square = jnp.asarray(self.share, projected.dtype) * self.squares.astype(projected.dtype)
        return projected * lax.rsqrt(mean_square + jnp.asarray(self.epsilon, projected.dtype))[..., None]


class _ByItself:
    """What is between a layer's projections with the recurrence as an op of its own.

    Arranged, a carry is the window ``[..., conv_width - 1, x | B | C channels]`` and the state.
    """

    def __init__(self, layer: Mamba2, recurrence: Callable[..., tuple[jax.Array, jax.Array]]):
        self.layer = layer
        self.recurrence = recurrence
        convs = (layer.x_conv, layer.B_conv, layer.C_conv)
        self.conv_kernel = jnp.concatenate([one.kernel[...] for one in convs])
        self.conv_bias = _joined([one.bias for one in convs])
        self.parameters = _per_head(layer)

    def arranged(self, carry: Mamba2Carry) -> tuple[jax.Array, ...]:
        return jnp.concatenate([carry.conv_x, carry.conv_B, carry.conv_C], axis=-1), carry.ssm

    def restored(self, position: jax.Array, arranged: tuple[jax.Array, ...]) -> Mamba2Carry:
        del position
        window, ssm = arranged
        return Mamba2Carry(*self._split(window), ssm=ssm)

    def token(
        self,
        position: jax.Array,
        arranged: tuple[jax.Array, ...],
        projected: jax.Array,
        late: _Late | None,
        dtype: Any,
    ) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array | None]:
        """The carry, y, and the gate if y is not gated yet."""
        del position
        projected = projected if late is None else late.applied(projected)
        layer, (window, ssm) = self.layer, arranged
        inner, lead = layer.heads * layer.head_dim, projected.shape[:-1]
        filtered = projected[..., inner : -layer.heads].astype(dtype)
        window, filtered = causal_conv1d_step(window, filtered, self.conv_kernel, self.conv_bias, activation="silu")
        values, B, C = self._split(filtered)
        gates = layer.norm is None
        z = projected[..., :inner].astype(dtype).reshape(*lead, layer.heads, layer.head_dim)
        ssm, y = self.recurrence(
            ssm,
            x=values.reshape(z.shape),
            dt=projected[..., -layer.heads :],
            B=B.reshape(*lead, layer.num_groups, layer.state_dim),
            C=C.reshape(*lead, layer.num_groups, layer.state_dim),
            z=z if gates else None,
            dt_softplus=True,
            dt_limit=layer.dt_limit,
            implementation=layer.implementation,
            **self.parameters,
        )
        return (window, ssm), y.reshape(*lead, inner), None if gates else z.reshape(*lead, inner)

    def _split(self, channels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """``[..., x | B | C]`` by role."""
        grouped = self.layer.num_groups * self.layer.state_dim
        return channels[..., : -2 * grouped], channels[..., -2 * grouped : -grouped], channels[..., -grouped:]


class _OneOp:
    """What is between a layer's projections as one op, ``jax_ssd.mamba2.mixer``.

    Arranged, a carry is the last tokens of x, those of B and C, each where its number modulo the convolution's width
    says, and the state.
    """

    def __init__(self, layer: Mamba2):
        self.layer = layer
        heads, head_dim = layer.heads, layer.head_dim
        given = _per_head(layer) | {
            "head": jnp.arange(heads, dtype=jnp.int32),
            "filter_x": layer.x_conv.kernel[...].T.reshape(layer.conv_width, heads, head_dim),
            "filter_bc": jnp.concatenate([layer.B_conv.kernel[...], layer.C_conv.kernel[...]]).T,
        }
        bias = _joined([layer.B_conv.bias, layer.C_conv.bias])
        if layer.x_conv.bias is not None and bias is not None:
            given |= {"bias_x": layer.x_conv.bias[...].reshape(heads, head_dim), "bias_bc": bias}
        # 16-bit parameters are converted once for many tokens.
        self.parameters = {
            name: (array if array.dtype.itemsize >= 4 else array.astype(jnp.float32))[None]
            for name, array in given.items()
        }

    def arranged(self, carry: Mamba2Carry) -> tuple[jax.Array, ...]:
        windows = carry.conv_x, jnp.concatenate([carry.conv_B, carry.conv_C], axis=-1)
        x, bc = (jnp.pad(one, [*[(0, 0)] * (one.ndim - 2), (1, 0), (0, 0)]) for one in windows)
        return x.reshape(*x.shape[:-1], self.layer.heads, self.layer.head_dim), bc, carry.ssm

    def restored(self, position: jax.Array, arranged: tuple[jax.Array, ...]) -> Mamba2Carry:
        x, bc, ssm = arranged
        width = self.layer.conv_width
        order = lax.rem(position + jnp.arange(1, width, dtype=position.dtype), jnp.asarray(width, position.dtype))
        x, bc = (jnp.take(one, order, axis=ssm.ndim - 3) for one in (x, bc))
        return Mamba2Carry(x.reshape(*x.shape[:-2], math.prod(x.shape[-2:])), *jnp.split(bc, 2, axis=-1), ssm=ssm)

    def token(
        self,
        position: jax.Array,
        arranged: tuple[jax.Array, ...],
        projected: jax.Array,
        late: _Late | None,
        dtype: Any,
    ) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array | None]:
        """The carry, y, and the gate if y is not gated yet."""
        layer, lead = self.layer, projected.shape[:-1]
        given = dict(zip(("window_x", "window_bc", "state"), arranged, strict=True)) | {"projected": projected}
        given |= {} if late is None else {"squares": late.squares.astype(projected.dtype)}
        wide = accumulator(dtype)
        operands = mixer.Operands(
            position=position[None],
            **{name: array.reshape(math.prod(lead), *array.shape[len(lead) :]) for name, array in given.items()},
            **{name: array if name == "head" else array.astype(wide) for name, array in self.parameters.items()},
        )
        # A norm behind the gate takes up what float16 might not hold.
        later = layer.norm is not None and (layer.norm.norm_before_gate or jnp.dtype(dtype) == jnp.float16)
        gates = not later
        spec = mixer.Spec(
            operands=tuple(name for name in mixer.Operands._fields if getattr(operands, name) is not None),
            all_heads=layer.heads,
            groups=layer.num_groups,
            dt_limit=layer.dt_limit,
            gates=gates,
            dtype=jnp.dtype(dtype).name,
            implementation=dispatch.preferences(layer.implementation),
            **({} if late is None else {"norm": (late.share, late.epsilon)}),
        )
        state, window_x, window_bc, y = mixer.step(spec, operands)
        new = tuple(array.reshape(*lead, *array.shape[1:]) for array in (window_x, window_bc, state))
        inner = layer.heads * layer.head_dim
        y, z = y.reshape(*lead, inner), projected[..., :inner]
        return new, y, None if gates else (z if late is None else late.applied(z)).astype(dtype)


def _per_head(layer: Mamba2) -> dict[str, jax.Array]:
    """The recurrence's parameters, by the names that it has for them."""
    D = layer.D[...]
    return {
        "A": -jnp.exp(layer.A_log[...].astype(jnp.float32)),
        "D": jnp.broadcast_to(D if D.ndim == 2 else D[:, None], (layer.heads, layer.head_dim)),
        "dt_bias": layer.dt_bias[...],
    }


class Mamba3Decoder:
    """As ``Mamba2Decoder``, of a Mamba-3 layer.

    Args:
      layer: the layer; its ``implementation`` is that of the recurrence.
      recurrence: called with the arguments of ``jax_ssd.mamba3_step``, which it is by default.
      norm: of the layer's inputs, which ``step`` then takes as they are before it.
    """

    def __init__(
        self,
        layer: Mamba3,
        recurrence: Callable[..., tuple[Mamba3State, jax.Array]] | None = None,
        norm: nnx.RMSNorm | None = None,
    ):
        self.layer = layer
        self.norm = norm
        self.recurrence = mamba3_step if recurrence is None else recurrence
        kernels = [getattr(layer, f"{role}_proj").kernel[...].T for role in ROLES]
        self.ends = np.cumsum([kernel.shape[0] for kernel in kernels])[:-1].tolist()
        self.in_kernel = _cast(layer, jnp.concatenate(kernels))
        self.out_kernel = _cast(layer, layer.out_proj.kernel[...].T)

    def pack(self, carry: Mamba3State) -> Mamba3State:
        """The carry itself: there are no windows to join."""
        return carry

    def unpack(self, carry: Mamba3State) -> Mamba3State:
        """The carry itself."""
        return carry

    def arranged(self, carry: Mamba3State) -> Mamba3State:
        """The carry itself."""
        return carry

    def restored(self, position: jax.Array, carry: Mamba3State) -> Mamba3State:
        """The carry itself."""
        del position
        return carry

    def token(self, position: jax.Array, carry: Mamba3State, x: jax.Array) -> tuple[Mamba3State, jax.Array]:
        """``step``, whatever number the token has."""
        del position
        return self.step(carry, x)

    def step(self, carry: Mamba3State, x: jax.Array) -> tuple[Mamba3State, jax.Array]:
        """Runs the layer on one token ``x [..., in_features]``."""
        layer = self.layer
        x = require_features("Mamba3", x, layer.in_features)
        x = x if self.norm is None else self.norm(x)
        dtype = _compute_dtype(layer, x)
        joined = _project(x.astype(dtype), self.in_kernel, None, layer.precision)
        projected: dict[str, jax.Array] = dict(zip(ROLES, jnp.split(joined, self.ends, axis=-1), strict=True))
        projected |= {role: projected[role].astype(dtype) for role in ("z", "x", "B", "C")}
        carry, y = self.recurrence(carry, **layer.step_operands(projected), implementation=layer.implementation)
        y = y.reshape(projected["z"].shape)
        return carry, _project(y, self.out_kernel, None, layer.precision).astype(dtype)


def _joined(biases: Sequence[nnx.Param[jax.Array] | None]) -> jax.Array | None:
    """One bias for all, or None where there are none."""
    present = [bias[...] for bias in biases if bias is not None]
    return jnp.concatenate(present) if present else None


def _compute_dtype(layer: Mamba2 | Mamba3, x: jax.Array) -> Any:
    """What projections of x come in, as in the layer."""
    if layer.dtype is not None:
        return layer.dtype
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(x.dtype, layer.x_proj.kernel[...].dtype)


def _cast(layer: Mamba2 | Mamba3, kernel: jax.Array) -> jax.Array:
    return kernel if layer.dtype is None else kernel.astype(layer.dtype)


def _biased(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + bias.shape)


def _squares(x: jax.Array) -> jax.Array:
    """The sum over the features."""
    return jnp.sum(jnp.square(x.astype(accumulator(x.dtype))), axis=-1)


def _weighted(kernel: jax.Array, norm: nnx.RMSNorm | GatedRMSNorm | None) -> jax.Array:
    """``kernel [outputs, inputs]`` times the weights of the norm in front of it."""
    scale = None if norm is None or norm.scale is None else norm.scale[...]
    return kernel if scale is None else kernel.astype(scale.dtype) * scale[None]


def _project(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, precision: Any) -> jax.Array:
    """``x [..., inputs]``, ``kernel [outputs, inputs]`` -> ``[..., outputs]``, float32 for 16-bit operands."""
    dtype = jnp.float32 if x.dtype.itemsize == 2 else x.dtype
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    y = lax.dot_general(x, kernel.astype(x.dtype), contract, precision=precision, preferred_element_type=dtype)
    return _biased(y, bias)
