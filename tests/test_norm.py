"""The gated norm against float64, in both orders, grouped or not."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssd import rms_norm_gated


def make(seed: int, *shape: int, dtype=np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def definition(x, z, weight, eps, group_size, norm_before_gate):
    x, z, weight = (np.asarray(a, np.float64) for a in (x, z, weight))
    gate = z / (1 + np.exp(-z))
    value = x if norm_before_gate else x * gate
    size = group_size or value.shape[-1]
    groups = value.reshape(*value.shape[:-1], value.shape[-1] // size, size)
    value = (groups / np.sqrt((groups**2).mean(-1, keepdims=True) + eps)).reshape(value.shape) * weight
    return value * gate if norm_before_gate else value


@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("group_size", [None, 12, 4, 1])
@pytest.mark.parametrize("shape", [(12,), (3, 12), (2, 0, 12), (2, 3, 12)])
def test_equals_the_definition(shape, group_size, norm_before_gate):
    x, z, w = make(0, *shape), make(1, *shape), make(2, 12)
    options = {"eps": 1e-3, "group_size": group_size, "norm_before_gate": norm_before_gate}
    got = jax.jit(partial(rms_norm_gated, **options))(x, z, w)
    want = definition(x, z, w, 1e-3, group_size, norm_before_gate)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_gate_and_weight_may_be_left_out():
    x = make(0, 3, 8)
    np.testing.assert_allclose(
        rms_norm_gated(x, None, None), x / np.sqrt((np.asarray(x) ** 2).mean(-1, keepdims=True) + 1e-5), rtol=1e-6
    )


def test_sums_are_float32_and_the_result_has_x_type():
    x, z, w = make(0, 4, 512, dtype=jnp.bfloat16), make(1, 4, 512, dtype=jnp.bfloat16), make(2, 512)
    want = rms_norm_gated(x.astype(jnp.float32), z.astype(jnp.float32), w)
    got = rms_norm_gated(x, z, w)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


def test_gradients_are_finite_at_zero():
    gradients = jax.jit(jax.grad(lambda *a: rms_norm_gated(*a).sum(), argnums=(0, 1, 2)))
    grads = gradients(jnp.zeros(8), jnp.zeros(8), jnp.ones(8))
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (ValueError, "z: ", {"z": np.zeros((3, 4), np.float32)}),
        (ValueError, "weight: ", {"weight": np.zeros(4, np.float32)}),
        (ValueError, "group_size.*divisor.*5", {"group_size": 5}),
        (ValueError, "group_size", {"group_size": 0}),
        (TypeError, "x: ", {"x": np.zeros((3, 8), np.int32)}),
    ],
)
def test_mistakes_are_named(error, words, arguments):
    good = {"x": np.zeros((3, 8), np.float32), "z": np.zeros((3, 8), np.float32), "weight": np.ones(8, np.float32)}
    with pytest.raises(error, match=words):
        rms_norm_gated(**{**good, **arguments})


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"x": None}, TypeError, "x: expected an array, got NoneType"),
        ({"z": "text"}, TypeError, "z: expected an array, got str"),
        ({"eps": -1e-5}, ValueError, "eps: expected a finite number of at least 0, got -1e-05"),
        ({"eps": "1e-5"}, TypeError, "eps: expected a number, got '1e-5'"),
        ({"eps": float("nan")}, ValueError, "eps: expected a finite number"),
        ({"group_size": 2.0}, TypeError, "group_size: expected an integer, got 2.0"),
        ({"group_size": 0}, ValueError, "group_size: expected at least 1, got 0"),
        ({"norm_before_gate": "no"}, TypeError, "norm_before_gate: expected True or False, got 'no'"),
    ],
)
def test_slips_are_named(changes, error, said):
    with pytest.raises(error, match=f"rms_norm_gated: {said}"):
        rms_norm_gated(**({"x": np.ones((2, 4), np.float32), "z": None, "weight": None} | changes))
