"""Causal depthwise convolution along the sequence: the short filter in front of the scan, with a window to hand over.

The convolution is written as a sum over its few taps, which XLA fuses into one pass over the tokens; gradients are
JAX's own.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jax_ssd import segments, shapes

Activation = Literal["silu"] | None


@overload
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_final_state: Literal[False] = False,
) -> jax.Array: ...


@overload
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_final_state: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_final_state: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Filters every channel with its own ``width`` taps, looking only backwards.

    ``y[t, c] = activation(bias[c] + sum_k weight[c, k] * x[t - (width - 1) + k, c])``: the last tap multiplies the
    current token, and tokens before the first are those of ``initial_state``. Sums are formed in float32 (float64 for
    float64 ``x``) and the result is cast to ``x``'s dtype.

    Args:
      x: ``[..., seq, channels]``, any float dtype, any number of leading axes, ``seq`` may be 0.
      weight: ``[channels, width]``, any float dtype.
      bias: ``[channels]``, any float dtype; None means zero.
      activation: ``"silu"`` or None for the identity.
      initial_state: ``[..., width - 1, channels]``, the last ``width - 1`` tokens seen before ``x``, oldest first;
        None means zeros.
      segment_ids: ``[..., seq]`` integer labels of packed sequences. The window is emptied between two neighbours with
        different ids; the first segment of a row starts from ``initial_state``. A negative id marks padding: its output
        is exactly 0, it never enters a window, takes no gradient, and is no boundary by itself.
      return_final_state: also return the window after the last token, ``[..., width - 1, channels]`` in
        ``initial_state``'s dtype (``x``'s if that is None). Passing it as the next call's ``initial_state`` continues
        the last segment exactly, wherever the sequence was cut.

    Returns:
      ``y`` with the shape and dtype of ``x``, or ``(y, final_state)``.

    Raises:
      ValueError: a shape does not fit, or ``activation`` is unknown.
      TypeError: an argument is no array, or of a type that does not fit.
    """
    name = "causal_conv1d"
    x, weight, bias = _arrays(name, x, weight, bias)
    if initial_state is not None:
        initial_state = shapes.as_array(name, "initial_state", initial_state)
    if segment_ids is not None:
        segment_ids = shapes.as_array(name, "segment_ids", segment_ids)
    return_final_state = shapes.flag(name, "return_final_state", return_final_state)
    more = {"initial_state": initial_state, "segment_ids": segment_ids}
    _check(name, x, weight, bias, activation, token_axes=("...", "seq"), **more)
    width = weight.shape[1]
    state = _empty_window(x, width) if initial_state is None else initial_state
    if segment_ids is None:
        tokens = _extend(state, x)
        y = _activate(_filter(tokens, weight, bias, x.shape[-2]), activation).astype(x.dtype)
        final_state = tokens[..., x.shape[-2] :, :]
    else:
        y, final_state = _packed(x, weight, bias, activation, state, segment_ids)
    return (y, final_state.astype(state.dtype)) if return_final_state else y


def causal_conv1d_step(
    state: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation = None,
) -> tuple[jax.Array, jax.Array]:
    """Filters one token; the body of a ``lax.scan``.

    Equals ``causal_conv1d`` on a sequence of one token.

    Args:
      state: ``[..., width - 1, channels]``, the tokens before this one, oldest first.
      x: ``[..., channels]``, the token.
      weight, bias, activation: as for ``causal_conv1d``.

    Returns:
      ``(state, y)``: the window with ``x`` as its newest token, in ``state``'s dtype, and the output in ``x``'s shape
      and dtype.

    Raises:
      ValueError: a shape does not fit, or ``activation`` is unknown.
      TypeError: an argument is no array, or of a type that does not fit.
    """
    name = "causal_conv1d_step"
    x, weight, bias = _arrays(name, x, weight, bias)
    state = shapes.as_array(name, "state", state)
    _check(name, x, weight, bias, activation, token_axes=("...",), state=state)
    tokens = _extend(state, x[..., None, :])
    y = _activate(_filter(tokens, weight, bias, 1), activation)
    return tokens[..., 1:, :].astype(state.dtype), y[..., 0, :].astype(x.dtype)


def _empty_window(x: jax.Array, width: int) -> jax.Array:
    """Zeros, made from ``x`` so that they are sharded as it is."""
    return _behind_zeros(x[..., :0, :], width - 1, axis=-2)


def _behind_zeros(array: jax.Array, count: int, axis: int) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (count, 0)
    return jnp.pad(array, widths)


def _extend(state: jax.Array, x: jax.Array) -> jax.Array:
    """The window followed by the sequence, in a dtype that holds both exactly."""
    dtype = _common(state.dtype, x.dtype)
    return jnp.concatenate([state.astype(dtype), x.astype(dtype)], axis=-2)


def _filter(
    tokens: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    seq: int,
    runs: jax.Array | None = None,
) -> jax.Array:
    """Sums the taps over ``tokens [..., width - 1 + seq, channels]``; ``runs`` cuts the window where runs change."""
    width = weight.shape[1]
    accumulator = _common(tokens.dtype, jnp.float32)
    total = None if bias is None else _per_channel(bias, tokens.ndim, accumulator)
    for tap in range(width):
        seen = tokens[..., tap : tap + seq, :].astype(accumulator)
        if runs is not None:
            same_run = runs[..., tap : tap + seq] == runs[..., width - 1 :]
            seen = jnp.where(same_run[..., None], seen, jnp.zeros_like(seen))
        term = seen * _per_channel(weight[:, tap], tokens.ndim, accumulator)
        total = term if total is None else total + term
    assert total is not None  # the width is at least 1
    return total


def _packed(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    activation: Activation,
    state: jax.Array,
    segment_ids: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The convolution of a row of packed segments with padding anywhere: padding is moved behind the real tokens."""
    history = weight.shape[1] - 1
    real = segment_ids >= 0
    # Zeroed first, so that neither a NaN in the padding nor its gradient reaches the weights.
    x = jnp.where(real[..., None], x, jnp.zeros_like(x))
    order = jnp.argsort(~real, axis=-1, stable=True)
    tokens = _extend(state, jnp.take_along_axis(x, order[..., None], axis=-2))
    runs = jnp.take_along_axis(segments.runs_from_segment_ids(segment_ids), order, axis=-1)
    runs = _behind_zeros(runs, history, axis=-1)

    y = _activate(_filter(tokens, weight, bias, x.shape[-2], runs), activation).astype(x.dtype)
    y = jnp.take_along_axis(y, jnp.argsort(order, axis=-1)[..., None], axis=-2)
    y = jnp.where(real[..., None], y, jnp.zeros_like(y))

    count = jnp.sum(real, axis=-1, keepdims=True, dtype=runs.dtype)
    newest = count + jnp.arange(history, dtype=runs.dtype).reshape((1,) * (count.ndim - 1) + (history,))
    window = jnp.take_along_axis(tokens, newest[..., None], axis=-2)
    window_runs = jnp.take_along_axis(runs, newest, axis=-1)
    in_last_run = window_runs == window_runs[..., -1:]
    return y, jnp.where(in_last_run[..., None], window, jnp.zeros_like(window))


def _activate(y: jax.Array, activation: Activation) -> jax.Array:
    return y if activation is None else jax.nn.silu(y)


def _per_channel(values: jax.Array, ndim: int, dtype: Any) -> jax.Array:
    return values.astype(dtype).reshape((1,) * (ndim - 1) + values.shape)


def _common(one: Any, other: Any) -> Any:
    """The smallest type that holds both, also where the caller forbids implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(one, other)


def _arrays(op: str, x: Any, weight: Any, bias: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    given = shapes.as_array(op, "x", x), shapes.as_array(op, "weight", weight)
    return (*given, None if bias is None else shapes.as_array(op, "bias", bias))


def _check(
    op: str,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    activation: Activation,
    *,
    token_axes: tuple[str, ...],
    **more: jax.Array | None,
) -> None:
    """Shapes, types and options of both functions; ``more`` holds their state and segment ids."""
    if activation not in (None, "silu"):
        raise ValueError(
            f"{op}: activation: expected None or 'silu', got {activation!r}; apply another function to the result."
        )
    shapes.require_rank(op, "x", x, len(token_axes), f"({', '.join((*token_axes, 'channels'))})")
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{op}: weight: expected shape (channels, width) with the {x.shape[-1]} channels of x, got {weight.shape}; "
            "transpose it, or leave out an axis of size 1 between these two."
        )
    if weight.shape[1] == 0:
        raise ValueError(f"{op}: weight: expected at least one tap, got shape {weight.shape}; the last is the current.")
    sizes: dict[str, int | tuple[int, ...]] = {
        "...": x.shape[: -len(token_axes)],
        "seq": x.shape[-2] if "seq" in token_axes else 1,
        "channels": x.shape[-1],
        "width": weight.shape[1],
        "width - 1": weight.shape[1] - 1,
    }
    window = ("...", "width - 1", "channels")
    expected = {"x": (*token_axes, "channels"), "weight": ("channels", "width"), "bias": ("channels",)}
    expected |= {"state": window, "initial_state": window, "segment_ids": token_axes}
    origins = shapes.origin("x", x, (*token_axes, "channels")) | shapes.origin("weight", weight, ("width - 1",))
    for name, array in {"x": x, "weight": weight, "bias": bias, **more}.items():
        if array is None:
            continue
        if name != "segment_ids":
            shapes.require_float(op, name, array)
        elif not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{op}: {name}: expected an integer type, got {array.dtype.name}; convert it to int32.")
        shapes.require_shape(op, name, array, expected[name], sizes, origins)
