"""Identities of Mamba-3 that take another form on the CUDA C++ kernels than in test_mamba3.py, in the emulator.

The kernels need a rotated pair, and their sums are rounded where those of "xla" are zeros.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import jax_ssd
from tests.emulation import kernels
from tests.test_mamba3 import EIGHTS, case, loss_gradients

pytestmark = pytest.mark.slow  # each kernel takes seconds to compile


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch):
    with kernels(monkeypatch):
        yield


def test_without_a_second_half_and_without_turns_it_is_mamba2():
    arrays: dict[str, Any] = case(rank=None, norm=False, groups=2, heads=4, **EIGHTS)
    arrays["trap"] = np.full_like(arrays["trap"], 200.0)  # lambda = 1
    for name in ("q_bias", "k_bias", "angles"):
        arrays[name] = np.zeros_like(arrays[name])
    A = -np.arange(1, 5, dtype=np.float32)
    arrays["adt"] = A[:, None] * arrays["dt"]
    expected = jax_ssd.mamba2(
        *(arrays["v"], np.moveaxis(arrays["dt"], 1, 2), A, arrays["k"], arrays["q"], arrays["D"], arrays["z"]),
        implementation="reference",
    )
    np.testing.assert_allclose(
        jax_ssd.mamba3(**arrays, implementation="cuda", precision="highest"), expected, rtol=1e-5, atol=2e-6
    )


def test_the_first_token_has_no_decay_and_no_phase():
    gradients = loss_gradients(case(seq=40, **EIGHTS), "cuda")
    assert np.abs(gradients["adt"][:, :, 0]).max() < 1e-6 * np.abs(gradients["adt"]).max()
    assert np.abs(gradients["angles"][:, 0]).max() < 1e-5 * np.abs(gradients["angles"]).max()


def test_a_turn_of_all_phases_changes_nothing():
    arrays: dict[str, Any] = case(initial=True, **EIGHTS)
    zeros = jax.tree.map(np.zeros_like, arrays["initial_state"])
    arrays["initial_state"] = zeros._replace(angle=arrays["initial_state"].angle)
    gradients = loss_gradients(arrays, "cuda")
    assert np.abs(gradients["initial_state"].angle).max() < 1e-5 * np.abs(gradients["angles"]).max()
