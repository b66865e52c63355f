"""The CUDA C++ kernels of Mamba-2: their own source, run on the CPU by an emulator, against float64.

A compilation takes seconds, so there is one case of each kind; tests/gpu has more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_ssd.mamba2 import plan_cuda, plan_cuda_backward, plan_cuda_step
from jax_ssd.mamba2.plan_cuda import Split
from jax_ssd.mamba2.problem import Problem
from tests import cuda_emulator, scan_float64, test_kernels_step
from tests.gradients_float64 import gradients
from tests.scan_float64 import error, problem, random_operands
from tests.test_kernels_backward import operands_of

pytestmark = pytest.mark.skipif(cuda_emulator.missing() is not None, reason=str(cuda_emulator.missing()))
# ||got - float64|| / ||float64||
FORWARD = 3e-3
BACKWARD, BACKWARD_SUMS = 8e-3, 2e-2  # of A and dt_bias: few numbers, long sums in which much cancels
STEP = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}
SCAN = dict.fromkeys(("has_D", "has_z", "has_dt_bias", "has_initial_state", "dt_softplus"), True)
GRADIENTS = dict.fromkeys(("has_D", "has_dt_bias", "has_initial_state", "has_dfinal", "dt_softplus"), True)
SMALL = {**SCAN, "seq": 130, "heads": 4, "groups": 2}


def model(**changes: Any) -> Problem:
    """A problem that the kernels take."""
    sizes = {"batch": 2, "dtype": "bfloat16", "heads": 4, "groups": 1, "head_dim": 64, "state": 64, "chunk_size": None}
    return problem(**{**sizes, **changes})


def forward(p: Problem, operands: dict[str, np.ndarray], split: Split | None = None) -> dict[str, np.ndarray]:
    return cuda_emulator.run(plan_cuda.forward(p, split or plan_cuda.split(p)), operands)


@pytest.mark.parametrize(
    ("changes", "split", "multiprocessors"),
    [
        (SMALL, None, 132),
        ({"seq": 64, "return_final_state": False, "state": 128}, None, 132),
        ({**SCAN, "seq": 520, "batch": 1}, Split(2, 2, 3, 3), 132),
        # Segments that find their start states themselves.
        ({**SCAN, "seq": 450, "batch": 1}, Split(2, 2, 3, 4, own_starts=True), 132),
        ({"seq": 321, "heads": 2, "groups": 2, "state": 320, "param_rows": 2}, Split(2, 1, 4, 2, own_starts=True), 132),
        # 4 rows of 4 chunks in 3 ranges: rows that are cut pass their state on.
        ({"seq": 200, "has_initial_state": True, "groups": 2}, Split(2, 1, 1, 4), 3),
        ({"seq": 48, "batch": 1, "heads": 2, "head_dim": 128, "has_D": True}, None, 132),
        ({**SCAN, "seq": 65, "heads": 2, "state": 256, "param_rows": 2, "dt_dtype": "bfloat16"}, None, 132),
        ({**SCAN, "seq": 130, "batch": 1, "heads": 1, "state": 320}, None, 132),  # a state in two parts
        ({**SCAN, "seq": 20, "batch": 1, "heads": 1, "state": 320}, None, 132),
        (
            {"seq": 16, "batch": 6, "has_D": True, "has_z": True, "return_final_state": False},
            None,
            2,
        ),  # rows in a chunk
    ],
    ids=str,
)
def test_the_forward_equals_the_sequential_scan(changes, split, multiprocessors, monkeypatch):
    monkeypatch.setattr(plan_cuda, "MULTIPROCESSORS", multiprocessors)
    p = model(**changes)
    operands = random_operands(p)
    got, expected = forward(p, operands, split), scan_float64.scan(p, operands)
    for name, value in got.items():
        assert error(value, expected[name]) <= FORWARD, name


@pytest.mark.parametrize(
    ("name", "value", "split"),
    [
        ("x", np.nan, None),
        ("x", np.inf, None),
        ("dt", np.nan, None),
        ("B", np.nan, None),
        ("B", np.inf, None),
        ("C", np.nan, None),
        ("x", np.nan, Split(1, 1, 2, 2, own_starts=True)),
        ("dt", np.nan, Split(1, 1, 2, 2, own_starts=True)),
        ("B", np.inf, Split(1, 1, 2, 2, own_starts=True)),
    ],
    ids=str,
)
def test_what_is_not_finite_shows_at_its_token_and_after(name, value, split):
    p = model(**SMALL)
    operands = random_operands(p)
    clean = forward(p, operands, split)
    at = {"x": (1, 85, 2, 5), "dt": (1, 85, 2), "B": (1, 85, 0, 3), "C": (1, 85, 0, 3)}[name]
    operands[name][at] = value
    got, expected = forward(p, operands, split), scan_float64.scan(p, operands)
    for result, array in got.items():
        finite = np.isfinite(array.astype(np.float32))
        np.testing.assert_array_equal(finite, np.isfinite(expected[result]), err_msg=result)
    np.testing.assert_array_equal(got["y"][0], clean["y"][0])
    np.testing.assert_array_equal(got["y"][1, :64], clean["y"][1, :64])


def test_another_order_of_threads_gives_the_same_bits():
    p = model(**SMALL)
    operands, made = random_operands(p), plan_cuda.forward(p, plan_cuda.split(p))
    first = cuda_emulator.run(made, operands)
    for seed in (1, 2):
        for name, again in cuda_emulator.run(made, operands, seed=seed).items():
            np.testing.assert_array_equal(again, first[name], err_msg=name)


def backward(p: Problem, operands: dict[str, np.ndarray], **blocks: Any) -> dict[str, np.ndarray]:
    made = plan_cuda_backward.backward(p, replace(plan_cuda_backward.backward_blocks(p), **blocks))
    return cuda_emulator.run(made, {b.name: operands[b.name] for b in made.operands})


def check_backward(p: Problem, operands: dict[str, np.ndarray], **blocks: Any) -> dict[str, np.ndarray]:
    got, expected = backward(p, operands, **blocks), gradients(p, operands)
    assert list(got) == list(expected)
    for name, value in got.items():
        assert error(value, expected[name]) < (BACKWARD_SUMS if name in ("dA", "ddt_bias") else BACKWARD), name
    return got


CUT = {**GRADIENTS, "seq": 300, "groups": 1, "heads": 3}


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        (CUT, {"segments": 2, "head_blocks": 2}),
        ({"batch": 1, "seq": 257, "state": 128, "groups": 2, "dt_dtype": "bfloat16"}, {}),
        ({**GRADIENTS, "seq": 64, "heads": 2, "groups": 2, "head_dim": 128, "param_rows": 2, "dt_limit": (0.1, 0.9)},
         {"row_slices": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_the_backward_equals_the_gradients_in_float64(changes, blocks):
    p = model(**changes)
    check_backward(p, operands_of(p), **blocks)


def test_the_gradients_of_steps_of_zero():
    p = model(**{**CUT, "dt_softplus": False, "has_dt_bias": False})
    operands = operands_of(p)
    operands["dt"][:] = 0
    got = check_backward(p, operands, segments=2, head_blocks=2)
    assert not got["dA"].any() and not got["dB"].any()


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "dy", "initial_state", "dfinal"])
def test_a_nan_stays_in_its_row_of_the_gradients(name):
    p = model(**CUT)
    operands = operands_of(p)
    clean = backward(p, operands, segments=2, head_blocks=2)
    operands[name][1] = np.nan
    got = backward(p, operands, segments=2, head_blocks=2)
    for gradient in got:
        np.testing.assert_array_equal(got[gradient][0], clean[gradient][0], err_msg=gradient)


@pytest.mark.parametrize(
    "changes",
    [
        {**test_kernels_step.EVERY, "dtype": "bfloat16", "dt_dtype": "bfloat16", "head_dim": 64, "state": 128},
        {**test_kernels_step.EVERY, "heads": 3, "groups": 3, "head_dim": 5, "state": 18, "param_rows": 2},
        {"dtype": "float16", "state_dtype": "bfloat16", "heads": 6, "groups": 2, "head_dim": 24, "state": 100},
    ],
    ids=str,
)
def test_the_step_equals_one_token_of_the_scan(changes):
    p = test_kernels_step.step_problem(**changes)
    operands = random_operands(p)
    given = test_kernels_step.split(p, operands)
    got = cuda_emulator.run(plan_cuda_step.step(p), given)
    expected = scan_float64.scan(p, {**operands, "initial_state": given["state"].astype(np.float64)})
    assert error(got["y"], expected["y"][:, 0]) < STEP[p.dtype]
    assert error(got["new_state"], expected["final_state"]) < STEP[p.state_dtype]
