"""What must not touch anything else: padding, whatever it holds, and one packed segment from another."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd.cases import Case
from tests import emulation

TOKENS = ("x", "dt", "B", "C", "z")
SEQ = 40
CASE = Case("", batch=2, seq=SEQ, head_dim=4, state=8, dt_limit=(0.0, 2.0))


@pytest.fixture(params=["reference", "xla", "cutile"])
def implementation(request, monkeypatch):
    if request.param == "cutile" and jax.default_backend() != "gpu":
        emulation.emulate(monkeypatch)
    return request.param


def evaluate(arrays, ids, implementation):
    """y, the final state and every gradient; y at padding carries weight as well."""
    (_, (y, final)), gradients = compiled(implementation)(arrays, jnp.asarray(ids))
    return {"y": y, "final_state": final, **gradients}


@functools.cache
def compiled(implementation):
    weight = jnp.asarray(np.random.default_rng(3).standard_normal(CASE.inputs()["x"].shape), jnp.float32)

    def objective(arrays, ids):
        y, final = jax_ssd.mamba2(
            **arrays,
            segment_ids=ids,
            dt_softplus=True,
            dt_limit=CASE.dt_limit,
            chunk_size=16,
            precision="highest",
            return_final_state=True,
            implementation=implementation,
        )
        return (y * weight).sum() + final.sum(), (y, final)

    return jax.jit(jax.value_and_grad(objective, has_aux=True))


PADDED = np.where(np.isin(np.arange(SEQ), [0, 1, 2, 17, 30, 39]), -3, np.repeat([4, 9], [25, 15]))[None].repeat(2, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_padding_holds_reaches_nothing(value, implementation):
    arrays = CASE.inputs()
    dirty: dict[str, Any] = {n: a.at[:, PADDED[0] < 0].set(value) if n in TOKENS else a for n, a in arrays.items()}
    got, expected = (evaluate(one, PADDED, implementation) for one in (dirty, arrays))
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=2e-5, atol=2e-5, err_msg=name)
    for name in ("y", *TOKENS):
        np.testing.assert_array_equal(got[name][PADDED < 0], 0, err_msg=name)


SEGMENTS = np.repeat([3, 1, 4], [13, 17, 10])[None].repeat(2, 0)


@pytest.mark.parametrize("name", TOKENS)
def test_a_nan_stays_in_its_segment(name, implementation):
    """In values and, but for the kernels, in gradients of tokens; segments begin and end inside chunks."""
    arrays = CASE.inputs()
    at = (0, 20, 1)
    dirty = {**arrays, name: arrays[name].at[at].set(jnp.nan)}
    got, expected = (evaluate(one, SEGMENTS, implementation) for one in (dirty, arrays))
    others = SEGMENTS != 1
    others[1] = True
    # The backward kernels multiply by masked zeros, which are NaN where the other factor is: row and head are kept.
    for key in ("y",) if implementation == "cutile" else ("y", *TOKENS):
        np.testing.assert_allclose(got[key][others], expected[key][others], rtol=1e-5, atol=1e-5, err_msg=key)
    np.testing.assert_allclose(got["final_state"], expected["final_state"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["initial_state"], expected["initial_state"], rtol=1e-5, atol=1e-5)
    assert np.isnan(got["y"][0, 20]).any()
    assert not np.isnan(got["y"][0, 13:20]).any()
    assert name == "C" or np.isnan(got["y"][0, 20:30]).any((-2, -1)).all() or name == "z"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_in_one_segment_shows_in_the_gradients_of_its_parameters(value):
    arrays = CASE.inputs()
    dirty = {**arrays, "x": arrays["x"].at[0, 20, 1].set(value)}
    assert np.isnan(evaluate(dirty, SEGMENTS, "xla")["A"][1])


MAMBA3 = {"q": (0, 10), "k": (0, 10), "v": (0, 10), "angles": (0, 10, 1), "adt": (0, 1, 10), "dt": (0, 1, 10)}


@pytest.mark.parametrize("name", MAMBA3)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_nan_stays_in_its_sequence_of_mamba3(name, implementation):
    arrays = mamba3_arrays()
    run = mamba3_gradients(implementation)
    expected, (y_expected, state_expected) = run(arrays)
    gradients, (y, state) = run({**arrays, name: arrays[name].at[MAMBA3[name]].set(jnp.nan)})
    others = np.r_[0:7, 18:23]
    assert np.isnan(y[0, 10]).any()
    np.testing.assert_allclose(y[:, others], y_expected[:, others], rtol=1e-5, atol=1e-5)
    for got, want in zip(state, state_expected, strict=True):
        np.testing.assert_allclose(got[np.array([0, 2])], want[np.array([0, 2])], rtol=1e-5, atol=1e-5)
    for key in MAMBA3:
        axis = 2 if key in ("adt", "dt") else 1
        got, want = (np.take(np.asarray(one[key]), others, axis) for one in (gradients, expected))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=key)


def mamba3_arrays() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"q": (1, 23, 1, 8), "k": (1, 23, 1, 8), "v": (1, 23, 2, 4), "q_bias": (2, 8), "k_bias": (2, 8)}
    shapes |= {"angles": (1, 23, 2, 2), "adt": (1, 2, 23), "dt": (1, 2, 23), "trap": (1, 2, 23)}
    arrays = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    return {**arrays, "adt": -jnp.abs(arrays["adt"]), "dt": jnp.abs(arrays["dt"])}


@functools.cache
def mamba3_gradients(implementation):
    def objective(arrays):
        bounds = np.array([0, 7, 18, 23])
        y, state = jax_ssd.mamba3(
            **arrays,
            mimo_v=None,
            mimo_o=None,
            cu_seqlens=bounds,
            return_final_state=True,
            chunk_size=5,
            implementation=implementation,
        )
        return (y**2).sum() + sum((a[np.array([0, 2])] ** 2).sum() for a in state), (y, state)

    return jax.jit(jax.grad(objective, has_aux=True))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_growth_restarts_with_every_segment(implementation):
    """e^16 in each run of 8, e^128, which is no float32, over a chunk of 64."""
    one = Case("", batch=1, seq=64, head_dim=4, state=8, gate=False, bias=False, softplus=False, initial_state=False)
    arrays = {**one.inputs(), "A": jnp.ones(4)}
    arrays["dt"] = jnp.full_like(arrays["dt"], 2.0)
    ids = jnp.asarray(np.repeat(np.arange(8), 8)[None])

    def total(arrays, ids):
        y = jax_ssd.mamba2(**arrays, segment_ids=ids, chunk_size=64, precision="highest", implementation=implementation)
        return (y**2).sum(), y

    run = jax.jit(jax.grad(total, has_aux=True))
    gradients, y = run(arrays, ids)
    apart = {n: a.reshape(8, 8, *a.shape[2:]) if n in TOKENS else a for n, a in arrays.items()}
    expected, alone = run(apart, jnp.zeros((8, 8), jnp.int32))
    np.testing.assert_allclose(y.reshape(alone.shape), alone, rtol=1e-5)
    for name, gradient in gradients.items():
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(gradient.reshape(expected[name].shape) / scale, expected[name] / scale, atol=1e-5)
