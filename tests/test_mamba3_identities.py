"""Identities of Mamba-3, and what tiny numbers make visible, on the CUDA C++ kernels in the emulator.

test_mamba3.py has the same for the other implementations; the kernels take sizes that are multiples of 8.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import jax_ssd
from tests import mamba3_float64 as oracle
from tests.test_mamba3 import case, error, loss_gradients, part, state_error, wide
from tests.test_mamba3_golden import kernels

SIZES: dict[str, Any] = {"state": 16, "head_dim": 8, "pairs": 4}
mamba3 = functools.partial(jax_ssd.mamba3, implementation="cuda", precision="highest")

pytestmark = pytest.mark.slow  # each kernel takes seconds to compile


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch):
    with kernels(monkeypatch):
        yield


def test_split_is_whole_and_whole_turns_of_the_state_change_nothing():
    arrays: dict[str, Any] = case(initial=True, **SIZES)
    run = functools.partial(mamba3, return_final_state=True)
    whole, end = run(**arrays)
    for cut in (1, 13):
        first, state = run(**part(arrays, 0, cut))
        rest: dict[str, Any] = part(arrays, cut, None) | {"initial_state": state}
        second, end_again = run(**rest)
        np.testing.assert_allclose(np.concatenate([first, second], 1), whole, rtol=1e-5, atol=2e-6)
        assert state_error(end_again, end) < 2e-6
    turned = arrays["initial_state"]._replace(angle=(arrays["initial_state"].angle + 6 * np.pi).astype(np.float32))
    y, _ = run(**{**arrays, "initial_state": turned})
    np.testing.assert_allclose(y, whole, rtol=1e-4, atol=3e-5)  # float32 of an angle near 20


def test_half_is_permuted_pairwise():
    arrays: dict[str, Any] = case(**SIZES)
    order = np.arange(16).reshape(2, 8).T.ravel()
    permuted: dict[str, Any] = {
        n: a[..., order] if n in ("q", "k", "q_bias", "k_bias") else a for n, a in arrays.items()
    }
    np.testing.assert_allclose(mamba3(**arrays, rotary="half"), mamba3(**permuted), rtol=1e-5, atol=2e-6)


def test_without_a_second_half_and_without_turns_it_is_mamba2():
    arrays: dict[str, Any] = case(rank=None, norm=False, groups=2, heads=4, **SIZES)
    arrays["trap"] = np.full_like(arrays["trap"], 200.0)  # lambda = 1
    for name in ("q_bias", "k_bias", "angles"):
        arrays[name] = np.zeros_like(arrays[name])
    A = -np.arange(1, 5, dtype=np.float32)
    arrays["adt"] = A[:, None] * arrays["dt"]
    expected = jax_ssd.mamba2(
        *(arrays["v"], np.moveaxis(arrays["dt"], 1, 2), A, arrays["k"], arrays["q"], arrays["D"], arrays["z"]),
        implementation="reference",
    )
    np.testing.assert_allclose(mamba3(**arrays), expected, rtol=1e-5, atol=2e-6)


def test_equal_ranks_are_one_rank():
    rank, arrays = 4, case(rank=1, norm=False, gate=False, **SIZES)
    many: dict[str, Any] = {n: np.repeat(a, rank, 2) if n in ("q", "k") else a for n, a in arrays.items()}
    for n in ("q_bias", "k_bias", "mimo_v", "mimo_o"):
        many[n] = np.repeat(many[n], rank, 1) / (rank if n in ("mimo_v", "mimo_o") else 1)
    arrays["D"] = arrays["D"] / rank
    np.testing.assert_allclose(mamba3(**many), mamba3(**arrays), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("scale", [1e-2, 1e-4])
def test_the_norm_of_tiny_outputs(scale):
    arrays: dict[str, Any] = case(skip=False, **SIZES)
    arrays["v"] = arrays["v"] * np.float32(scale)
    expected, _ = oracle.run(**wide(arrays))
    plain, _ = oracle.run(**wide(arrays), norm_eps=1e-30)
    assert error(plain, expected) > 1e-3
    assert error(mamba3(**arrays), expected) < 2.2e-6


def test_a_token_whose_own_weight_is_next_to_nothing():
    arrays: dict[str, Any] = case(seq=40, skip=False, **SIZES)
    arrays["trap"] = np.where(np.arange(40) % 3 == 0, -14, arrays["trap"]).astype(np.float32)
    arrays["adt"] = np.where(np.arange(40) % 3 == 0, -30, arrays["adt"]).astype(np.float32)
    expected, _ = oracle.run(**wide(arrays))
    assert error(mamba3(**arrays), expected) < 2.2e-6


def test_the_first_token_has_no_decay_and_no_phase():
    gradients = loss_gradients(case(seq=40, **SIZES), "cuda")
    assert np.abs(gradients["adt"][:, :, 0]).max() < 1e-6 * np.abs(gradients["adt"]).max()
    assert np.abs(gradients["angles"][:, 0]).max() < 1e-5 * np.abs(gradients["angles"]).max()


def test_a_turn_of_all_phases_changes_nothing():
    arrays: dict[str, Any] = case(initial=True, **SIZES)
    zeros = jax.tree.map(np.zeros_like, arrays["initial_state"])
    arrays["initial_state"] = zeros._replace(angle=arrays["initial_state"].angle)
    gradients = loss_gradients(arrays, "cuda")
    assert np.abs(gradients["initial_state"].angle).max() < 1e-5 * np.abs(gradients["angles"]).max()
