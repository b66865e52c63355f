"""The causal convolution against its definition: taps, hand-over of the window, packing, padding, types, errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ssd

CHANNELS = 5
STATIC = ("activation", "return_final_state")
causal_conv1d = jax.jit(jax_ssd.causal_conv1d, static_argnames=STATIC)
causal_conv1d_step = jax.jit(jax_ssd.causal_conv1d_step, static_argnames="activation")


def make(seed: int, *shape: int, dtype=np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def silu(v: np.ndarray) -> np.ndarray:
    return v / (1 + np.exp(-v))


def definition(x, weight, bias, state, ids=None):
    """Token by token in float64, for one row: a list of past tokens that a new segment empties."""
    x, weight, bias, state = (np.asarray(a, np.float64) for a in (x, weight, bias, state))
    width = weight.shape[1]
    window, label, out = list(state), None, []
    for t, token in enumerate(x):
        if ids is not None and ids[t] < 0:
            out.append(np.zeros_like(token))
            continue
        if ids is not None and label is not None and ids[t] != label:
            window = [np.zeros_like(token)] * (width - 1)
        label = None if ids is None else ids[t]
        window.append(token)
        out.append(silu(bias + sum(weight[:, k] * window[k] for k in range(width))))
        window = window[1:]
    return np.array(out).reshape(x.shape), np.array(window).reshape(width - 1, x.shape[1])


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("seq", [0, 1, 2, 9])
def test_equals_the_definition(width, seq):
    x, w, b, s = make(0, seq, CHANNELS), make(1, CHANNELS, width), make(2, CHANNELS), make(3, width - 1, CHANNELS)
    y, final = causal_conv1d(x, w, b, activation="silu", initial_state=s, return_final_state=True)
    want, window = definition(x, w, b, s)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(final, window)


def test_last_tap_multiplies_the_current_token():
    x = jnp.arange(1.0, 5.0)[:, None]
    y = causal_conv1d(x, jnp.asarray([[100.0, 10.0, 1.0]]))
    np.testing.assert_array_equal(y[:, 0], [1.0, 12.0, 123.0, 234.0])


@given(
    ids=st.lists(st.integers(-2, 2), min_size=10, max_size=10),
    width=st.sampled_from([1, 2, 4]),
)
def test_packed_rows_equal_the_definition(ids, width):
    seq = len(ids)
    x, w, b, s = make(0, seq, CHANNELS), make(1, CHANNELS, width), make(2, CHANNELS), make(3, width - 1, CHANNELS)
    y, final = causal_conv1d(
        x,
        w,
        b,
        activation="silu",
        initial_state=s,
        segment_ids=np.asarray(ids, np.int32),
        return_final_state=True,
    )
    want, window = definition(x, w, b, s, ids)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(final, window)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 2, 5, 9])
def test_pieces_equal_the_whole_bit_for_bit(cut, packed):
    width = 4
    x, w, b, s = make(0, 2, 9, CHANNELS), make(1, CHANNELS, width), make(2, CHANNELS), make(3, 2, width - 1, CHANNELS)
    ids = jnp.asarray([[0] * 9, [-1, 3, -1, 3, 3, 3, -1, -1, 3]], jnp.int32) if packed else None
    run = lambda part, ids, state: causal_conv1d(  # noqa: E731
        part, w, b, activation="silu", initial_state=state, segment_ids=ids, return_final_state=True
    )
    whole, final = run(x, ids, s)
    first, middle = run(x[:, :cut], None if ids is None else ids[:, :cut], s)
    second, last = run(x[:, cut:], None if ids is None else ids[:, cut:], middle)
    np.testing.assert_array_equal(jnp.concatenate([first, second], axis=1), whole)
    np.testing.assert_array_equal(last, final)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_steps_equal_the_sequence(dtype):
    x, w, b = make(0, 2, 7, CHANNELS, dtype=dtype), make(1, CHANNELS, 4), make(2, CHANNELS)
    want, final = causal_conv1d(x, w, b, activation="silu", return_final_state=True)
    state = jnp.zeros((2, 3, CHANNELS), dtype)
    step = lambda state, token: causal_conv1d_step(state, token, w, b, activation="silu")  # noqa: E731
    state, y = jax.lax.scan(step, state, jnp.moveaxis(x, 1, 0))
    np.testing.assert_array_equal(state, final)
    # One rounding of the result apart at most: the compiler may contract multiply and add differently.
    np.testing.assert_allclose(
        jnp.moveaxis(y, 0, 1).astype(jnp.float32),
        want.astype(jnp.float32),
        rtol=2 * float(jnp.finfo(dtype).eps),
        atol=1e-6,
    )


def test_packed_segments_equal_separate_runs_with_gradients():
    x, w, b = make(0, 10, CHANNELS), make(1, CHANNELS, 4), make(2, CHANNELS)
    ids = jnp.asarray([7, 7, 2, 2, 2, 2, 2, 7, 7, 7])

    def packed(x, w, b):
        return causal_conv1d(x, w, b, activation="silu", segment_ids=ids)

    def separate(x, w, b):
        parts = [causal_conv1d(part, w, b, activation="silu") for part in (x[:2], x[2:7], x[7:])]
        return jnp.concatenate(parts)

    cotangent = make(4, 10, CHANNELS)
    for got, want in zip(
        (packed(x, w, b), *jax.vjp(packed, x, w, b)[1](cotangent)),
        (separate(x, w, b), *jax.vjp(separate, x, w, b)[1](cotangent)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("optimized")
def test_nan_in_padding_reaches_nothing():
    x, w, b = make(0, 6, CHANNELS), make(1, CHANNELS, 3), make(2, CHANNELS)
    ids = jnp.asarray([-1, 0, 0, -1, 0, -1])
    dirty = jnp.where((ids < 0)[:, None], jnp.nan, x)

    def run(x, w, b):
        return causal_conv1d(x, w, b, activation="silu", segment_ids=ids)

    y, pullback = jax.vjp(run, dirty, w, b)
    np.testing.assert_array_equal(y[np.asarray(ids) < 0], 0.0)
    np.testing.assert_array_equal(y, run(x, w, b))
    dx, dw, db = pullback(jnp.ones_like(y))
    np.testing.assert_array_equal(dx[np.asarray(ids) < 0], 0.0)
    assert np.isfinite(dx).all() and np.isfinite(dw).all() and np.isfinite(db).all()


def test_the_future_does_not_move_the_past():
    x, w = make(0, 8, CHANNELS), make(1, CHANNELS, 4)
    moved = x.at[5].set(jnp.nan)
    np.testing.assert_array_equal(causal_conv1d(x, w)[:5], causal_conv1d(moved, w)[:5])
    assert np.isnan(causal_conv1d(moved, w)[5:]).all()


def test_any_leading_axes_and_vmap():
    x, w = make(0, 2, 3, 6, CHANNELS), make(1, CHANNELS, 4)
    want = jnp.stack([jnp.stack([causal_conv1d(row, w) for row in rows]) for rows in x])
    np.testing.assert_allclose(causal_conv1d(x, w), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(causal_conv1d, (0, None))(x, w), want, rtol=1e-6, atol=1e-6)


def test_types():
    x, w = make(0, 6, CHANNELS, dtype=jnp.bfloat16), make(1, CHANNELS, 4)
    y, state = causal_conv1d(x, w, return_final_state=True)
    assert y.dtype == state.dtype == jnp.bfloat16
    y, state = causal_conv1d(x, w, initial_state=make(2, 3, CHANNELS), return_final_state=True)
    assert y.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    # Sums in float32: one rounding of the exact result.
    want = causal_conv1d(x.astype(jnp.float32), w)
    np.testing.assert_array_equal(causal_conv1d(x, w), want.astype(jnp.bfloat16))


def test_float64(x64):
    x, w = make(0, 6, CHANNELS, dtype=jnp.float64), make(1, CHANNELS, 4, dtype=jnp.float64)
    zero = np.zeros(CHANNELS)
    want, _ = definition(x, w, zero, np.zeros((3, CHANNELS)))
    np.testing.assert_allclose(causal_conv1d(x, w, activation="silu"), want, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (ValueError, "weight.*channels", {"weight": np.zeros((4, CHANNELS), np.float32)}),
        (
            ValueError,
            "weight: expected .*, width. with the 5 channels of x, got .5, 1, 4.; transpose it, or leave out",
            {"weight": np.zeros((CHANNELS, 1, 4), np.float32)},
        ),
        (ValueError, "weight: expected an array, got a nested list whose rows differ", {"weight": [[1.0, 2.0], [1.0]]}),
        (ValueError, "weight.*tap", {"weight": np.zeros((CHANNELS, 0), np.float32)}),
        (ValueError, "bias", {"bias": np.zeros(4, np.float32)}),
        (ValueError, "initial_state.*width - 1", {"initial_state": np.zeros((4, CHANNELS), np.float32)}),
        (ValueError, "segment_ids", {"segment_ids": np.zeros(5, np.int32)}),
        (TypeError, "segment_ids", {"segment_ids": np.zeros(6, np.float32)}),
        (TypeError, "x: ", {"x": np.zeros((6, CHANNELS), np.int32)}),
        (ValueError, "activation.*relu", {"activation": "relu"}),
        (ValueError, "x: ", {"x": np.zeros(CHANNELS, np.float32)}),
    ],
)
def test_mistakes_are_named(error, words, arguments):
    good = {"x": np.zeros((6, CHANNELS), np.float32), "weight": np.zeros((CHANNELS, 4), np.float32)}
    with pytest.raises(error, match=words):
        causal_conv1d(**{**good, **arguments})


def test_step_names_a_cache_that_is_too_wide():
    with pytest.raises(ValueError, match=r"state.*width - 1.*\(3, 5\)"):
        causal_conv1d_step(jnp.zeros((4, CHANNELS)), jnp.zeros(CHANNELS), jnp.zeros((CHANNELS, 4)))


X, W = np.ones((2, 5, 3), np.float32), np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", None),
        ("x", "text"),
        ("weight", None),
        ("bias", "text"),
        ("segment_ids", {}),
    ],
)
def test_what_is_no_array_is_named(name, value):
    with pytest.raises(TypeError, match=f"causal_conv1d: {name}: expected an array"):
        jax_ssd.causal_conv1d(**({"x": X, "weight": W} | {name: value}))


def test_lists_are_arrays():
    as_lists: dict[str, Any] = {"x": X.tolist(), "weight": W.tolist()}
    expected = jax_ssd.causal_conv1d(jnp.asarray(X), jnp.asarray(W))
    np.testing.assert_array_equal(jax_ssd.causal_conv1d(**as_lists), expected)


def test_a_flag_that_is_none():
    with pytest.raises(TypeError, match="return_final_state: expected True or False, got 'no'"):
        jax_ssd.causal_conv1d(X, W, return_final_state="no")  # type: ignore[call-overload]


def test_a_step_without_a_state():
    with pytest.raises(TypeError, match="causal_conv1d_step: state: expected an array, got NoneType"):
        jax_ssd.causal_conv1d_step(None, X[:, 0], W)  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
def test_on_a_mesh_with_explicit_axes(packed):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    rng = np.random.default_rng(0)
    x, weight = jnp.asarray(rng.standard_normal((8, 12, 6)), jnp.float32), jnp.ones((6, 4), jnp.float32)
    arrays = {"segment_ids": jnp.asarray(np.repeat([[0] * 5 + [1] * 7], 8, axis=0), jnp.int32)} if packed else {}
    expected = causal_conv1d(x, weight, **arrays)
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        placed = jax.device_put({"x": x, **arrays}, sharding)
        y = jax.jit(lambda arrays: causal_conv1d(weight=weight, **arrays))(placed)
    assert y.sharding.spec[0] == "data"
    np.testing.assert_array_equal(y, expected)
