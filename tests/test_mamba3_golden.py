"""The golden numbers of test_mamba3.py from steps, and from the CUDA C++ kernels in the emulator.

The forward kernels take multiples of 8 only, so coordinates and columns of zeros are added, which change nothing but
the norm's mean; its weight and its eps make up for that.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import Mamba3State
from tests.emulation import kernels
from tests.test_mamba3 import GOLDEN_GRADIENTS, GOLDEN_LOSS, GOLDEN_Y, fill, golden_arrays, token

STATE, HEAD_DIM, PADDED = 4, 3, 8
# Where the coordinates go: a pair stays one.
PLACES = {"pairwise": np.arange(STATE), "half": np.array([0, 1, 4, 5])}
SQUARES = {"pairwise": 5.973900446712, "half": 6.036969671268}  # of the final ssm


def padded(rotary: str, norm: bool) -> dict[str, Any]:
    """Arguments in float32 at sizes that the forward kernels take."""
    arrays, wide = golden_arrays(norm), {}
    for name, array in arrays.items():
        if name in ("q", "k", "q_bias", "k_bias"):
            wide[name] = np.zeros((*array.shape[:-1], PADDED))
            wide[name][..., PLACES[rotary]] = array
        elif name in ("v", "z", "mimo_v", "mimo_o", "mimo_z", "norm_weight"):
            wide[name] = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, PADDED - HEAD_DIM)])
        else:
            wide[name] = array
    options: dict[str, Any] = {"rotary": rotary}
    if norm:
        wide["norm_weight"] *= np.sqrt(HEAD_DIM / PADDED)
        options["norm_eps"] = 1e-5 * HEAD_DIM / PADDED
    return {name: jnp.asarray(array, jnp.float32) for name, array in wide.items()} | options


def check_y(y, rotary: str, norm: bool, rtol: float) -> None:
    y = np.asarray(y, np.float64)
    found = (y.sum(), (y**2).sum(), y[0, 0, 1, 2], y[0, 1, 1, 2], y[0, 4, 0, 0], y[0, 4, 1, 2])
    np.testing.assert_allclose(found, GOLDEN_Y[rotary, norm], rtol=rtol)


def check_state(state: Mamba3State, rotary: str, rtol: float) -> None:
    turns = (np.asarray(state.angle[0, :, 0], np.float64) - [3.296612939066, 1.688662719330]) / (2 * np.pi)
    np.testing.assert_allclose(turns, np.round(turns), atol=1e-6)
    np.testing.assert_allclose((np.asarray(state.ssm, np.float64) ** 2).sum(), SQUARES[rotary], rtol=rtol)
    if rotary == "pairwise":
        ssm = [-0.024720842549, 0.014844703251, 0.023857783165, 0.018270276746]
        np.testing.assert_allclose(state.ssm[0, 1, 2], ssm, rtol=rtol)
        k = [-0.751836254460, 0.294006623044, 1.082688302043, 1.442138588645]
        np.testing.assert_allclose(state.k[0, 1, 0], k, rtol=rtol)


@pytest.mark.parametrize("rotary, norm", GOLDEN_Y)
@pytest.mark.slow
def test_the_forward_kernels(rotary, norm, monkeypatch):
    with kernels(monkeypatch):
        y, state = jax_ssd.mamba3(
            **padded(rotary, norm), precision="highest", return_final_state=True, implementation="cuda"
        )
    assert not np.asarray(y[..., HEAD_DIM:]).any()
    check_y(y[..., :HEAD_DIM], rotary, norm, 2e-5)
    places = PLACES[rotary]
    small = state._replace(ssm=state.ssm[:, :, :HEAD_DIM, places], k=state.k[..., places])
    check_state(small, rotary, 2e-5)


@pytest.mark.slow
def test_the_gradients_of_the_kernels(monkeypatch):
    given = padded("pairwise", True)
    options = {name: given.pop(name) for name in ("rotary", "norm_eps")}
    weight = np.pad(fill(1.6, (1, 5, 2, HEAD_DIM)), [(0, 0)] * 3 + [(0, PADDED - HEAD_DIM)]).astype(np.float32)

    def loss(arrays):
        return (jax_ssd.mamba3(**arrays, **options, precision="highest", implementation="cuda") * weight).sum()

    with kernels(monkeypatch):
        value, found = jax.value_and_grad(loss)(given)
    np.testing.assert_allclose(value, GOLDEN_LOSS, rtol=1e-5)
    for name, expected in GOLDEN_GRADIENTS.items():
        gradient = np.asarray(found[name], np.float64)
        if name in ("q", "k", "q_bias", "k_bias"):
            gradient = gradient[..., PLACES["pairwise"]]
        elif name in ("v", "z", "mimo_v", "mimo_o", "mimo_z", "norm_weight"):
            gradient = gradient[..., :HEAD_DIM]
        if name == "norm_weight":  # which was scaled
            gradient = gradient * np.sqrt(HEAD_DIM / PADDED)
        sums = (gradient.sum(), gradient.ravel()[0], (gradient**2).sum())
        np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=3e-6, err_msg=name)


def test_the_forward_kernels_on_packed_sequences(monkeypatch):
    bounds = np.array([0, 2, 2, 5])
    with kernels(monkeypatch):
        y = jax_ssd.mamba3(**padded("pairwise", False), cu_seqlens=bounds, precision="highest", implementation="cuda")
    np.testing.assert_allclose(np.asarray(y, np.float64).sum(), 27.974497363135, rtol=2e-6)


def by_steps(arrays: dict[str, Any], rotary: Any, implementation: str) -> tuple[jax.Array, Mamba3State]:
    """The whole sequence, a token at a time from a state of zeros."""
    dtype = arrays["adt"].dtype
    shapes = ((1,), (HEAD_DIM, STATE), (2, STATE), (HEAD_DIM,))
    state, ys = Mamba3State(*(jnp.zeros((1, 2, *shape), dtype) for shape in shapes)), []
    for t in range(5):
        state, y = jax_ssd.mamba3_step(state, **token(arrays, t), rotary=rotary, implementation=implementation)
        ys.append(y)
    return jnp.stack(ys, 1), state


@pytest.mark.parametrize("rotary, norm", GOLDEN_Y)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_steps(rotary, norm, implementation, x64):
    arrays: dict[str, Any] = {name: jnp.asarray(array) for name, array in golden_arrays(norm).items()}
    y, state = by_steps(arrays, rotary, implementation)
    check_y(y, rotary, norm, 1e-9)
    check_state(state, rotary, 1e-9)


@pytest.mark.parametrize(
    "rotary, norm",
    [
        ("pairwise", False),
        ("half", True),
        pytest.param("pairwise", True, marks=pytest.mark.slow),
        pytest.param("half", False, marks=pytest.mark.slow),
    ],
)
def test_the_step_kernel(rotary, norm, monkeypatch):
    arrays = {name: jnp.asarray(array, jnp.float32) for name, array in golden_arrays(norm).items()}
    with kernels(monkeypatch):
        y, state = by_steps(arrays, rotary, "cuda")
    check_y(y, rotary, norm, 2e-5)
    check_state(state, rotary, 2e-5)
