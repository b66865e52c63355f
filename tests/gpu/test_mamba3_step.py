"""The Mamba-3 step kernel on a GPU: the float64 recurrence token by token, in place, and its place after a prefill."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import launch
from jax_ssd.mamba3 import plan_step
from jax_ssd.mamba3.plan_step import StepBlocks
from jax_ssd.mamba3.problem import Problem
from tests import mamba3_float64 as oracle
from tests.mamba3_steps import CHANGES, MODEL, check, check_nan, error, one_by_one, random_operands, step_problem
from tests.test_mamba3 import case, state_error, token


def step(p: Problem, operands: dict[str, np.ndarray], blocks: StepBlocks | None = None) -> dict[str, np.ndarray]:
    """The kernel's results on host arrays."""
    made = plan_step.step(p, blocks)
    results = launch.call(made, None, *(jnp.asarray(operands[b.name]) for b in made.operands))
    return {b.name: np.asarray(a) for b, a in zip(made.results, results, strict=True)}


@pytest.mark.parametrize("changes", CHANGES)
def test_equals_one_token_in_float64(changes):
    p = step_problem(**CHANGES[changes])
    operands = random_operands(p)
    check(p, operands, step(p, operands))


@pytest.mark.parametrize("blocks", [(1, 64), (2, 1024), (4, 128), (8, 32)], ids=str)
def test_blocks_change_rounding_only(blocks):
    p = step_problem(heads=3, groups=1, head_dim=24, state=128, rank=4, pairs=40)
    operands = random_operands(p)
    check(p, operands, step(p, operands, StepBlocks(*blocks)))


@pytest.mark.parametrize("name", ["q", "k", "v", "z", "adt", "dt", "trap", "angles", "state_ssm", "state_angle"])
def test_a_nan_stays_in_its_row_and_head(name):
    check_nan(step, name)


@pytest.mark.parametrize("changes", [*CHANGES, "mimo, 16 tokens"])
def test_several_tokens_have_the_bits_of_a_call_each(changes):
    p = step_problem(**CHANGES[changes], seq=3) if changes in CHANGES else step_problem(**MODEL, rank=4, seq=16)
    operands = random_operands(p)
    got = step(p, operands)
    check(p, operands, got)
    for name, array in one_by_one(p, operands, step).items():
        np.testing.assert_array_equal(got[name].view(np.uint8), array.view(np.uint8), name)


def test_fifty_calls_give_the_same_bits():
    p = step_problem(**MODEL, batch=16, rank=4)
    made, given = plan_step.step(p), random_operands(p)
    operands = [jnp.asarray(given[b.name]) for b in made.operands]
    run = jax.jit(lambda *operands: launch.call(made, None, *operands))
    first = [np.asarray(a) for a in run(*operands)]
    for _ in range(49):
        for got, wanted in zip(run(*operands), first, strict=True):
            np.testing.assert_array_equal(np.asarray(got), wanted)
    for b, array in zip(made.operands, operands, strict=True):
        np.testing.assert_array_equal(np.asarray(array), given[b.name])  # not donated, so untouched


# A scan of steps.

SIZES: dict[str, Any] = {"heads": 8, "groups": 2, "state": 128, "head_dim": 64, "pairs": 32}
SCANNED: dict[str, Any] = {"batch": 3, "seq": 24, "rank": 4, "initial": True, **SIZES}


def decode(arrays, options=None, implementation="cuda", rotary: Any = "half"):
    """A compiled scan of steps: (state, tokens) -> (state, y)."""
    fixed = {n: a for n, a in arrays.items() if n in ("q_bias", "k_bias", "mimo_v", "mimo_o", "mimo_z", "D")}

    def one(state, moving):
        return jax_ssd.mamba3_step(
            state, **fixed, **moving, norm_weight=arrays["norm_weight"], rotary=rotary, implementation=implementation
        )

    return jax.jit(lambda state, moving: jax.lax.scan(one, state, moving), compiler_options=options)


def by_token(arrays):
    """The arrays that change from token to token, time first."""
    last = ("adt", "dt", "trap")
    moving = ("q", "k", "v", "z", "angles", *last)
    return {n: jnp.moveaxis(jnp.asarray(arrays[n]), 2 if n in last else 1, 0) for n in moving if arrays[n] is not None}


@pytest.mark.parametrize("changes", [{}, {"rank": None}])
def test_captured_steps_equal_uncaptured_ones_and_the_sequence(changes):
    arrays = case(**{**SCANNED, **changes})
    state = jax.tree.map(jnp.asarray, arrays.pop("initial_state"))
    kept = jax.tree.map(np.asarray, state)
    last, y = decode(arrays)(state, by_token(arrays))
    captured = decode(arrays, jax_ssd.LOOP_AS_GRAPH)(state, by_token(arrays))
    jax.tree.map(np.testing.assert_array_equal, captured, (last, y))
    jax.tree.map(np.testing.assert_array_equal, state, kept)
    wide: dict[str, Any] = {n: np.asarray(a, np.float64) for n, a in arrays.items() if a is not None}
    if changes:
        wide["mimo_z"] = np.ones((8, 1, 64))
    expected, final = oracle.run(**wide, initial_state=tuple(np.asarray(a, np.float64) for a in kept), rotary="half")
    assert error(np.moveaxis(np.asarray(y), 0, 1), expected) < 1e-5
    assert state_error(last, final) < 1e-5


def test_a_prefill_hands_over_to_steps():
    """In the same fixed point: the phase after prefill and steps is that of the whole, to its last place."""
    arrays = case(**{**SCANNED, "seq": 40, "initial": False})
    arrays["dt"] = arrays["dt"] * 20  # far: hundreds of turns

    def part(low, high):
        cut = {n: arrays[n][:, low:high] for n in ("q", "k", "v", "z", "angles")}
        return {**arrays, **cut, **{n: arrays[n][:, :, low:high] for n in ("adt", "dt", "trap")}}

    options: dict[str, Any] = {"rotary": "half", "return_final_state": True, "precision": "highest"}
    y, final = jax_ssd.mamba3(**arrays, **options)
    _, middle = jax_ssd.mamba3(**part(0, 30), **options)
    last, steps = decode(arrays)(middle, by_token(part(30, 40)))
    assert error(np.moveaxis(np.asarray(steps), 0, 1), np.asarray(y, np.float64)[:, 30:]) < 5e-6
    assert state_error(last, jax.tree.map(lambda a: np.asarray(a, np.float64), final)) < 2e-6


def test_the_decode_loop_does_not_copy_the_state():
    arrays = case(**{**SCANNED, "batch": 4})
    state = jax.tree.map(jnp.asarray, arrays.pop("initial_state"))
    text = decode(arrays).lower(state, by_token(arrays)).compile().as_text() or ""
    computations = [part for part in text.split("\n\n") if "ENTRY" not in part]
    assert any("jax_ssd.launch" in part for part in computations), "the step runs in the loop's body"
    for shape in ("f32[4,8,64,128]", "f32[4,8,4,128]"):
        copies = [row for part in computations for row in part.splitlines() if f"= {shape}" in row and "copy" in row]
        assert not copies, copies


def test_one_token_agrees_with_xla():
    arrays = case(**SCANNED)
    state = arrays.pop("initial_state")
    results = [jax_ssd.mamba3_step(state, **token(arrays, 0), implementation=name) for name in ("cuda", "xla")]
    for got, wanted in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        assert error(np.asarray(got), np.asarray(wanted, np.float64)) < 2e-6
