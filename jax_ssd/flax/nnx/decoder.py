"""Layers laid out for decoding.

A layer's `step` takes the weights as training keeps them, apart by role. A token is so little work that its time goes
into the number of operations: here, once for many tokens, the input projections become one matrix, the convolutions of
Mamba-2 one filter with one window, and whatever depends on weights alone is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jax_ssd.conv import causal_conv1d_step
from jax_ssd.flax.nnx.mamba2 import Mamba2, Mamba2Carry
from jax_ssd.flax.nnx.mamba3 import ROLES, Mamba3
from jax_ssd.flax.nnx.parameters import require_features
from jax_ssd.mamba2.api import mamba2_step
from jax_ssd.mamba3.api import Mamba3State, mamba3_step

PackedCarry = tuple[jax.Array, jax.Array]
"""The window ``[..., conv_width - 1, x | B | C channels]`` of the convolution, and the state of the recurrence."""


class Mamba2Decoder:
    """What ``layer.step`` computes, in fewer operations and without copies of the weights.

    To be made inside the compiled function that decodes, outside of its loop: it holds copies of the projections in an
    order of their own, about the size of the layer::

        decoder = Mamba2Decoder(layer)
        carry, y = jax.lax.scan(decoder.step, decoder.pack(carry), u_time_major)
        carry = decoder.unpack(carry)

    Projections sum in float32 where the layer computes in 16 bits, otherwise the arithmetic is the layer's.

    Args:
      layer: the layer; its ``implementation`` is that of the recurrence.
      recurrence: called with the arguments of ``jax_ssd.mamba2_step``, which it is by default.
    """

    def __init__(self, layer: Mamba2, recurrence: Callable[..., tuple[jax.Array, jax.Array]] = mamba2_step):
        self.layer = layer
        self.recurrence = recurrence
        projections = (layer.z_proj, layer.x_proj, layer.B_proj, layer.C_proj, layer.dt_proj)
        # Output-major: a product with one token then reads whole rows.
        self.in_kernel = _cast(layer, jnp.concatenate([one.kernel[...].T for one in projections]))
        self.in_bias = _joined([one.bias for one in projections])
        self.out_kernel = _cast(layer, layer.out_proj.kernel[...].T)
        self.out_bias = None if layer.out_proj.bias is None else layer.out_proj.bias[...]
        convs = (layer.x_conv, layer.B_conv, layer.C_conv)
        self.conv_kernel = jnp.concatenate([one.kernel[...] for one in convs])
        self.conv_bias = _joined([one.bias for one in convs])
        self.A = -jnp.exp(layer.A_log[...].astype(jnp.float32))
        self.dt_bias = layer.dt_bias[...]
        D = layer.D[...]
        self.D = jnp.broadcast_to(D if D.ndim == 2 else D[:, None], (layer.heads, layer.head_dim))

    def pack(self, carry: Mamba2Carry) -> PackedCarry:
        """The layer's carry as ``step`` takes it."""
        return jnp.concatenate([carry.conv_x, carry.conv_B, carry.conv_C], axis=-1), carry.ssm

    def unpack(self, carry: PackedCarry) -> Mamba2Carry:
        """What ``step`` gave as the layer's carry."""
        window, ssm = carry
        return Mamba2Carry(*self._split(window), ssm=ssm)

    def step(self, carry: PackedCarry, x: jax.Array) -> tuple[PackedCarry, jax.Array]:
        """Runs the layer on one token ``x [..., in_features]``."""
        layer = self.layer
        require_features(x, layer.in_features)
        window, ssm = carry
        inner = layer.heads * layer.head_dim
        dtype = _compute_dtype(layer, x)
        projected = _project(x.astype(dtype), self.in_kernel, self.in_bias, layer.precision)
        z = projected[..., :inner].astype(dtype)
        filtered = projected[..., inner : -layer.heads].astype(dtype)
        window, filtered = causal_conv1d_step(window, filtered, self.conv_kernel, self.conv_bias, activation="silu")
        values, B, C = self._split(filtered)
        ssm, y = self.recurrence(
            ssm,
            x=values.reshape(*x.shape[:-1], layer.heads, layer.head_dim),
            dt=projected[..., -layer.heads :],
            A=self.A,
            B=B.reshape(*x.shape[:-1], layer.num_groups, layer.state_dim),
            C=C.reshape(*x.shape[:-1], layer.num_groups, layer.state_dim),
            D=self.D,
            z=z.reshape(*x.shape[:-1], layer.heads, layer.head_dim) if layer.norm is None else None,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_limit=layer.dt_limit,
            implementation=layer.implementation,
        )
        y = y.reshape(z.shape)
        if layer.norm is not None:
            y = layer.norm(y, z)
        return (window, ssm), _project(y, self.out_kernel, self.out_bias, layer.precision).astype(dtype)

    def _split(self, channels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """``[..., x | B | C]`` by role."""
        grouped = self.layer.num_groups * self.layer.state_dim
        return channels[..., : -2 * grouped], channels[..., -2 * grouped : -grouped], channels[..., -grouped:]


class Mamba3Decoder:
    """As ``Mamba2Decoder``, of a Mamba-3 layer.

    Args:
      layer: the layer; its ``implementation`` is that of the recurrence.
      recurrence: called with the arguments of ``jax_ssd.mamba3_step``, which it is by default.
    """

    def __init__(self, layer: Mamba3, recurrence: Callable[..., tuple[Mamba3State, jax.Array]] = mamba3_step):
        self.layer = layer
        self.recurrence = recurrence
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

    def step(self, carry: Mamba3State, x: jax.Array) -> tuple[Mamba3State, jax.Array]:
        """Runs the layer on one token ``x [..., in_features]``."""
        layer = self.layer
        require_features(x, layer.in_features)
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


def _project(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, precision: Any) -> jax.Array:
    """``x [..., inputs]``, ``kernel [outputs, inputs]`` -> ``[..., outputs]``, float32 for 16-bit operands."""
    dtype = jnp.float32 if x.dtype.itemsize == 2 else x.dtype
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    y = lax.dot_general(x, kernel.astype(x.dtype), contract, precision=precision, preferred_element_type=dtype)
    return y if bias is None else y + bias.astype(dtype).reshape((1,) * (y.ndim - 1) + bias.shape)
