"""The CUDA C++ backward on a GPU: every gradient against float64, odd sizes, edge cases, the same bits every time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssd import launch
from jax_ssd.mamba2 import plan_cuda_backward
from jax_ssd.mamba2.problem import Problem
from tests.gradients_float64 import gradients
from tests.scan_float64 import error
from tests.test_kernels_backward import operands_of
from tests.test_plan_cuda_backward import EVERY, model

BOUND = 8e-3
ALONE = {"heads": 4, "groups": 2, "has_D": True, "has_dt_bias": True, "dt_softplus": True}  # rows may share a chunk
SUM_BOUND = 2e-2  # those of A and dt_bias are few numbers, long sums in which much cancels


def backward(p: Problem, operands: dict[str, np.ndarray], **blocks: Any) -> dict[str, np.ndarray]:
    """The kernels' results on host arrays."""
    made = plan_cuda_backward.backward(p, replace(plan_cuda_backward.backward_blocks(p), **blocks))
    results = launch.call(made, None, *(jnp.asarray(operands[b.name]) for b in made.operands))
    return {b.name: np.asarray(a) for b, a in zip(made.results, results, strict=True)}


def check(p: Problem, operands: dict[str, np.ndarray] | None = None, **blocks: Any) -> dict[str, np.ndarray]:
    operands = operands_of(p) if operands is None else operands
    got, expected = backward(p, operands, **blocks), gradients(p, operands)
    assert list(got) == list(expected)
    for name, value in got.items():
        assert error(value, expected[name]) < (SUM_BOUND if name in ("dA", "ddt_bias") else BOUND), name
    return got


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({"batch": 1, "seq": 128, "heads": 1, "groups": 1}, {}),
        ({"seq": 256}, {}),
        ({**EVERY, "seq": 300}, {}),
        ({**EVERY, "seq": 300, "state": 64}, {"segments": 3}),
        ({**EVERY, "batch": 3, "seq": 900, "groups": 1}, {"segments": 4, "row_slices": 2, "head_blocks": 2}),
        ({**EVERY, "seq": 200, "heads": 3, "groups": 3, "head_dim": 128, "param_rows": 2}, {"segments": 2}),
        ({**EVERY, "batch": 1, "seq": 77, "heads": 3, "groups": 1}, {"head_blocks": 2}),
        ({**EVERY, "seq": 64, "heads": 2, "groups": 1, "dt_dtype": "bfloat16"}, {}),
        ({**EVERY, "seq": 129, "heads": 5, "groups": 1, "dt_limit": (0.1, 0.9), "dt_dtype": "bfloat16"}, {}),
        ({"seq": 150, "heads": 24, "groups": 8, "has_initial_state": True}, {}),
        ({"seq": 150, "heads": 40, "groups": 1, "has_dfinal": True, "has_dt_bias": True}, {"head_blocks": 1}),
        ({"seq": 130, "heads": 2, "groups": 1, "head_dim": 192, "has_D": True, "param_rows": 2}, {}),
        ({**EVERY, "seq": 300, "state": 256}, {"segments": 3}),
        ({**EVERY, "batch": 3, "seq": 300, "heads": 3, "state": 512, "groups": 1}, {"row_slices": 2, "head_blocks": 2}),
        ({"seq": 140, "heads": 4, "groups": 2, "head_dim": 128, "state": 192}, {}),
        ({**ALONE, "batch": 19, "seq": 16}, {"head_blocks": 2}),
        ({**ALONE, "batch": 7, "seq": 32, "state": 64, "head_dim": 128}, {}),
        ({**ALONE, "batch": 3, "seq": 64, "groups": 1}, {"head_blocks": 1}),
    ],
    ids=str,
)
def test_equals_the_gradients_in_float64(changes, blocks):
    check(model(**changes), **blocks)


def test_walks_of_five_heads(monkeypatch):  # the heuristic takes them only where there are hundreds
    monkeypatch.setattr(plan_cuda_backward, "_walk_heads", lambda *_: 5)
    check(model(**EVERY, batch=1, seq=300, heads=10, groups=2), segments=2)


def test_twenty_calls_give_the_same_bits():
    p = model(**EVERY, batch=3, seq=1500, heads=8, groups=2)
    operands = operands_of(p)
    first = backward(p, operands, segments=3, row_slices=2, head_blocks=2)
    for _ in range(19):
        again = backward(p, operands, segments=3, row_slices=2, head_blocks=2)
        for name in first:
            np.testing.assert_array_equal(again[name], first[name], err_msg=name)


def test_steps_of_zero():
    p = model(seq=200, has_initial_state=True, has_dfinal=True)
    operands = operands_of(p)
    operands["dt"][:] = 0
    got = check(p, operands, segments=2)
    assert not got["dA"].any() and not got["dB"].any() and not got["dx"].any()


def test_total_decay():
    p = model(seq=200, has_initial_state=True, has_dfinal=True)
    operands = operands_of(p)
    operands["dt"][:], operands["A"][:] = 1.0, -1e4
    got = backward(p, operands, segments=2)
    assert all(np.isfinite(value.astype(np.float64)).all() for value in got.values())
    assert not got["dA"].any() and not got["dinitial_state"].any()


def test_extreme_decays_in_one_chunk():
    p = model(seq=250, has_initial_state=True)
    operands = operands_of(p)
    operands["dt"][:, ::5] = np.resize(np.array([1.0, 10.0, 1e2, 1e3, 1e4], np.float32), 50)[None, :, None]
    got = backward(p, operands, segments=2)
    expected = gradients(p, operands)
    for name in got:
        assert error(got[name], expected[name]) < 1e-2, name


def test_growth():
    p = model(seq=64, has_initial_state=True)
    operands = operands_of(p)
    operands["A"][:] = 0.1
    check(p, operands)


def test_ends_of_the_limits_keep_the_gradient():
    p = model(seq=130, dt_limit=(0.125, 0.25))
    operands = operands_of(p)
    operands["dt"][:] = np.resize(np.array([0.125, 0.25, 0.1249, 0.2501, 0.2], np.float32), 130)[None, :, None]
    got = check(p, operands)
    outside = (operands["dt"] < 0.125) | (operands["dt"] > 0.25)
    assert not got["ddt"][outside].any() and got["ddt"][~outside].all()


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "dy", "initial_state", "dfinal"])
def test_a_nan_stays_in_its_row(name):
    p = model(**EVERY, batch=3, seq=300)
    operands = operands_of(p)
    clean = backward(p, operands, segments=2)
    operands[name][1] = np.nan
    got = backward(p, operands, segments=2)
    for gradient in got:
        np.testing.assert_array_equal(got[gradient][[0, 2]], clean[gradient][[0, 2]], err_msg=gradient)


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "dy"])
def test_a_nan_stays_in_its_row_of_a_shared_chunk(name):
    p = model(**ALONE, batch=9, seq=16)
    operands = operands_of(p)
    clean = backward(p, operands)
    operands[name][1] = np.nan
    got = backward(p, operands)
    others = np.arange(9) != 1
    for gradient in got:
        np.testing.assert_array_equal(got[gradient][others], clean[gradient][others], err_msg=gradient)


@pytest.mark.parametrize("state", [64, 128, 256])
def test_a_nan_in_a_target_reaches_no_later_token(state):
    p = model(**EVERY, batch=1, seq=300, state=state)
    operands = operands_of(p)
    clean = backward(p, operands)
    operands["C"][0, 137] = np.nan
    got = backward(p, operands)
    for name in ("dx", "ddt"):
        np.testing.assert_array_equal(got[name][:, 138:], clean[name][:, 138:], err_msg=name)
        assert np.isnan(got[name][:, :138].astype(np.float32)).any()
