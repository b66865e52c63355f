"""The CUDA C++ step on a GPU: equal to one token of the float64 scan for all options, in place, repeatable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssd import launch
from jax_ssd.mamba2 import plan_cuda_step
from jax_ssd.mamba2.plan_cuda_step import StepBlocks
from jax_ssd.mamba2.problem import Problem
from tests import scan_float64
from tests.scan_float64 import error, random_operands
from tests.test_kernels_step import EVERY, split, step_problem

BOUNDS = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}


def step(p: Problem, operands: dict[str, np.ndarray], blocks: StepBlocks | None = None) -> dict[str, np.ndarray]:
    """The kernel's results on host arrays."""
    made = plan_cuda_step.step(p, blocks)
    results = launch.call(made, None, *(jnp.asarray(operands[b.name]) for b in made.operands))
    return {b.name: np.asarray(a) for b, a in zip(made.results, results, strict=True)}


def check(p: Problem, blocks: StepBlocks | None = None, seed: int = 0) -> None:
    operands = random_operands(p, seed)
    given = split(p, operands)
    got = step(p, given, blocks)
    expected = scan_float64.scan(p, {**operands, "initial_state": given["state"].astype(np.float64)})
    assert error(got["y"], expected["y"][:, 0]) < BOUNDS[p.dtype]
    assert error(got["new_state"], expected["final_state"]) < BOUNDS[p.state_dtype]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        EVERY,
        {**EVERY, "param_rows": 2, "dt_limit": (0.1, 0.9)},
        {"dt_limit": (-1.0, 0.2)},
        {**EVERY, "dtype": "bfloat16", "dt_dtype": "bfloat16"},
        {**EVERY, "dtype": "float16", "dt_dtype": "float32", "state_dtype": "float16"},
        {**EVERY, "dtype": "float32", "dt_dtype": "float32", "state_dtype": "bfloat16"},
        {**EVERY, "batch": 1, "heads": 80, "head_dim": 64, "groups": 1, "state": 128, "dtype": "bfloat16"},
        {**EVERY, "batch": 37, "heads": 24, "head_dim": 64, "groups": 8, "state": 128, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_equals_one_token_of_the_scan(changes):
    check(step_problem(**changes))


# (heads, groups, head_dim, state): rows that are no multiple of 16 bytes, heads that no number of rows divides.
ODD = [(1, 1, 1, 1), (3, 3, 5, 2), (2, 1, 8, 17), (7, 7, 3, 96), (6, 2, 24, 100), (4, 4, 33, 6), (2, 2, 16, 1000)]


@pytest.mark.parametrize("sizes", ODD, ids=str)
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")], ids=str)
def test_odd_sizes(sizes, dtypes):
    heads, groups, head_dim, state = sizes
    changes = {"heads": heads, "groups": groups, "head_dim": head_dim, "state": state}
    p = step_problem(**EVERY, **changes, batch=3, dtype=dtypes[0], dt_dtype=dtypes[0], state_dtype=dtypes[1])
    check(p)
    check(p, StepBlocks(8, 256), seed=1)


def test_results_do_not_depend_on_the_blocks_or_the_batch():
    changes = {**EVERY, "heads": 6, "head_dim": 24, "state": 128, "dtype": "bfloat16"}
    many = step_problem(**changes, batch=5)
    operands = split(many, random_operands(many))
    first = step(many, operands)
    for blocks in (StepBlocks(1, 64), StepBlocks(4, 128), StepBlocks(8, 512)):
        for name, array in step(many, operands, blocks).items():
            np.testing.assert_array_equal(array, first[name])
    shared = ("A", "D", "dt_bias")
    one = step(step_problem(**changes, batch=1), {n: a if n in shared else a[4:] for n, a in operands.items()})
    for name, array in one.items():
        np.testing.assert_array_equal(array[0], first[name][4])


def test_fifty_calls_give_the_same_bits():
    p = step_problem(**EVERY, batch=16, heads=24, head_dim=64, groups=1, state=128, dtype="bfloat16")
    made = plan_cuda_step.step(p)
    operands = [jnp.asarray(split(p, random_operands(p))[b.name]) for b in made.operands]
    run = jax.jit(lambda *operands: launch.call(made, None, *operands))
    first = [np.asarray(a) for a in run(*operands)]
    for _ in range(49):
        for got, wanted in zip(run(*operands), first, strict=True):
            np.testing.assert_array_equal(np.asarray(got), wanted)


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "z", "state"])
def test_a_nan_stays_in_its_row_and_head(name):
    p = step_problem(**EVERY, batch=3, heads=4, groups=2, head_dim=16, state=64, dt_limit=(0.01, 2.0))
    operands = random_operands(p)
    source = "initial_state" if name == "state" else name
    operands[source][(1, *(() if name == "state" else (0,)), 0)] = np.nan
    given = split(p, operands)
    got, expected = step(p, given), scan_float64.scan(p, operands)
    assert error(got["y"], expected["y"][:, 0]) < 1e-6  # error() compares where values are finite, too
    assert error(got["new_state"], expected["final_state"]) < 1e-6
    assert np.isnan(expected["y"]).any()


def test_a_softplus_of_extremes():
    raw = np.array([-100, -30, -16, -5, -1e-3, 0, 1e-3, 1, 5, 19.9, 20.1, 50], np.float32)
    p = step_problem(batch=1, heads=len(raw), groups=1, head_dim=1, state=1, dt_softplus=True)
    ones: dict[str, Any] = {name: np.ones_like(a) for name, a in split(p, random_operands(p)).items()}
    ones |= {"dt": raw[None], "A": np.zeros((1, len(raw)), np.float32), "state": np.zeros_like(ones["state"])}
    np.testing.assert_allclose(
        step(p, ones)["y"].ravel(), np.logaddexp(0, raw.astype(np.float64)), rtol=4e-7, atol=2e-45
    )


def test_more_than_two_to_the_31_elements_of_state():
    one = step_problem(batch=1, heads=128, head_dim=64, groups=1, state=128, dtype="bfloat16", state_dtype="bfloat16")
    operands = split(one, random_operands(one))
    expected = step(one, operands)
    made = plan_cuda_step.step(replace(one, batch=2050))
    large = [jnp.zeros(b.shape, b.dtype).at[-1].set(operands[b.name][0]) for b in made.operands]
    assert large[0].size > 2**31
    last = jax.jit(lambda *operands: [a[-1:] for a in launch.call(made, None, *operands)])(*large)
    for buffer, array in zip(made.results, last, strict=True):
        np.testing.assert_array_equal(np.asarray(array), expected[buffer.name])
