"""The backward kernels: every gradient in the tile emulator against float64, and their compilation for every GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssd import config
from jax_ssd.mamba2 import plan_backward, reference
from jax_ssd.mamba2.plan_backward import BackwardConfig
from jax_ssd.mamba2.problem import Problem
from tests import scan_float64, tile_emulator
from tests.compilation import compile_plan
from tests.gradients_float64 import gradients
from tests.scan_float64 import problem, random_operands

EVERY = {
    **dict.fromkeys(("has_D", "has_z", "has_dt_bias", "has_initial_state", "has_dfinal", "dt_softplus"), True),
    "seq": 65,
    "state": 24,
}
# ||got - float64|| / ||float64||. Operands are rounded to the input's own bits, ten in TF32; three passes keep 22.
TOLERANCE = {"float32 highest": 3e-6, "float32 default": 1.2e-3, "float16": 1e-3, "bfloat16": 8e-3}


def operands_of(p: Problem) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    operands = random_operands(p)
    operands["dy"] = rng.standard_normal(operands["x"].shape).astype(operands["x"].dtype)
    if p.has_dfinal:
        operands["dfinal"] = rng.standard_normal((p.batch, p.heads, p.head_dim, p.state)).astype(np.float32)
    return operands


def backward(p: Problem, operands: dict[str, np.ndarray], **changes: Any) -> dict[str, np.ndarray]:
    made = plan_backward.backward(p, replace(plan_backward.heuristic(p), **changes))
    made.check("sm_90")
    return tile_emulator.run(made, operands, seed=1)


def check(p: Problem, operands: dict[str, np.ndarray] | None = None, tolerance: float | None = None, **changes: Any):
    operands = operands_of(p) if operands is None else operands
    got, expected = backward(p, operands, **changes), gradients(p, operands)
    assert list(got) == ["d" + name for name in operands if name not in ("runs", "dy", "dfinal")]
    kind = f"float32 {p.precision}" if p.dtype == "float32" else p.dtype
    for name, value in got.items():
        assert value.dtype == operands[name[1:]].dtype
        assert scan_float64.error(value, expected[name]) < (tolerance or TOLERANCE[kind]), name
    return got, expected


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({}, {"segments": 3}),
        ({"groups": 1}, {"segments": 2, "head_blocks": 2}),
        ({"groups": 1}, {"head_slices": 2, "head_blocks": 2}),
        ({"groups": 1}, {"segments": 5, "head_slices": 4}),
        ({"groups": 4}, {"segments": 2, "head_slices": 2}),
        ({"groups": 2}, {"segments": 2, "head_slices": 4}),
        ({"heads": 3, "groups": 1, "head_dim": 20, "state": 17}, {"segments": 2}),
        ({"head_dim": 48, "state": 40}, {"segments": 2, "p_blocks": 2, "n_blocks": 2}),
        ({"head_dim": 48, "state": 40, "groups": 1}, {"p_blocks": 4, "n_blocks": 4, "head_slices": 2}),
        ({"head_dim": 1, "state": 1}, {"segments": 2}),
        ({"param_rows": 2}, {"segments": 2}),
        ({"chunk_size": 32}, {"segments": 2}),
        ({"dt_limit": (0.3, 0.9)}, {"segments": 2}),
        ({"dt_softplus": False, "dt_limit": (0.1, 0.2)}, {}),
        ({"has_z": False}, {"segments": 2}),
        ({"has_D": False}, {"segments": 2}),
        ({"has_dt_bias": False, "dt_softplus": False}, {"segments": 2}),
        ({"has_initial_state": False}, {"segments": 3}),
        ({"has_dfinal": False}, {"segments": 3}),
        ({"has_runs": True}, {"segments": 3}),
        ({"has_runs": True, "seq": 200, "groups": 1, "chunk_size": 32}, {"segments": 4, "head_slices": 2}),
        ({"has_runs": True, "has_z": False, "has_initial_state": False, "has_dfinal": False}, {"segments": 2}),
        ({"seq": 1}, {}),
        ({"seq": 10, "has_initial_state": False, "has_dfinal": False}, {}),
        ({"seq": 10, "has_initial_state": False}, {}),
        ({"seq": 10, "has_dfinal": False}, {}),
        ({"seq": 300, "heads": 2}, {"segments": 4}),
        ({"precision": "default"}, {"segments": 2}),
        ({"dtype": "bfloat16"}, {"segments": 2}),
        ({"dtype": "bfloat16", "dt_dtype": "bfloat16", "groups": 1}, {"segments": 2, "head_slices": 2}),
        ({"dtype": "float16", "has_runs": True}, {"segments": 2}),
    ],
    ids=str,
)
def test_equals_the_gradients_of_the_sequential_scan(options, changes):
    p = problem(**{**EVERY, **options})
    tolerance = 1e-2 if p.dt_dtype == "bfloat16" else None
    check(p, tolerance=tolerance, **changes)


@pytest.mark.parametrize("options", [{}, {"has_runs": True, "dt_limit": (0.3, 0.9)}], ids=str)
@pytest.mark.usefixtures("x64")
def test_the_expected_gradients_are_those_of_autodiff(options):
    p = problem(**{**EVERY, **options})
    operands = operands_of(p)
    fixed = {"runs": jnp.asarray(operands["runs"])} if p.has_runs else {}
    given = {k: jnp.asarray(v.astype(np.float64)) for k, v in operands.items() if k != "runs"}
    cotangents = given.pop("dy"), given.pop("dfinal")
    for name in ("A", "D", "dt_bias"):
        given[name] = jnp.broadcast_to(given[name], (p.batch, *given[name].shape[1:]))

    @jax.jit
    def autodiff(given):
        def scan(given):
            return reference.scan(reference.Operands(**given, **fixed), p.dt_softplus, p.dt_limit)

        return jax.vjp(scan, given)[1](cotangents)[0]

    for name, value in autodiff(given).items():
        assert scan_float64.error(np.asarray(value), gradients(p, operands)["d" + name]) < 1e-12, name


def test_extreme_decays_in_one_chunk():
    p = problem(seq=48, heads=2, groups=1, has_initial_state=True, has_dfinal=True)
    operands = operands_of(p)
    operands["A"] = np.array([[-1.0, -0.5]], np.float32)
    operands["dt"][:, ::5] = np.array([1.0, 10.0, 1e2, 1e3, 1e4] * 2, np.float32)[None, :, None]
    # A decay after one of -1e3 is the difference of two sums near 160: about 1e-5 relative.
    check(p, operands, tolerance=1e-4, segments=2)


def test_a_decay_to_nothing():
    p = problem(seq=48, has_D=True, has_initial_state=True, has_dfinal=True)
    operands = operands_of(p)
    operands["dt"][:] = 1.0
    operands["A"][:] = -1e4
    got, _ = check(p, operands, segments=2)
    assert not got["dA"].any()
    assert not got["dinitial_state"].any()


def test_steps_of_zero():
    p = problem(seq=48, has_D=True, has_initial_state=True, has_dfinal=True)
    operands = operands_of(p)
    operands["dt"][:] = 0.0
    got, _ = check(p, operands, segments=2)
    assert not got["dA"].any()
    assert not got["dB"].any()
    assert got["ddt"].any()


def test_growth():
    p = problem(seq=64, has_initial_state=True, has_dfinal=True)
    operands = operands_of(p)
    operands["A"] = np.full_like(operands["A"], 0.1)
    check(p, operands, segments=2)


def test_a_step_at_a_limit_has_a_gradient_and_one_beyond_has_none():
    p = problem(seq=48, dt_limit=(0.125, 0.25), has_dt_bias=True)
    operands = operands_of(p)
    operands["dt_bias"][:] = 0.5
    raw = np.array([0.1, 0.125, 0.1875, 0.25, 0.3], np.float32) - np.float32(0.5)
    operands["dt"] = np.resize(raw, operands["dt"].shape)
    got = backward(p, operands)["ddt"].reshape(-1)
    expected = gradients(p, operands)["ddt"].reshape(-1)
    assert not got[0::5].any()
    assert not got[4::5].any()
    assert np.linalg.norm(got - expected) < 2e-6 * np.linalg.norm(expected)
    assert all(got[i::5].all() for i in (1, 2, 3))


def test_padding_has_no_gradient():
    p = problem(**EVERY, has_runs=True)
    operands = operands_of(p)
    padding = operands["runs"] < 0
    assert padding.any()
    got = backward(p, operands, segments=2)
    for name in ("dx", "ddt", "dB", "dC", "dz"):
        assert not got[name][padding].any(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_padding_holds_has_no_gradient(dtype):
    p = problem(**{**EVERY, "seq": 48, "has_runs": True, "dtype": dtype})
    operands = operands_of(p)
    padding = operands["runs"] < 0
    expected = backward(p, operands, segments=2)
    for name in ("x", "dt", "B", "C", "z", "dy"):
        operands[name][padding] = np.nan
    got = backward(p, operands, segments=2)
    kind = "float32 highest" if dtype == "float32" else dtype
    for name, value in got.items():
        assert scan_float64.error(value, expected[name].astype(np.float64)) < TOLERANCE[kind], name


def test_float16_keeps_small_steps_and_large_states():
    """Steps below 6e-8 and states beyond 65504, which are no float16."""
    changes = {"dt_softplus": False, "dt_limit": (0.0, float("inf")), "has_dt_bias": False, "has_z": False}
    p = problem(**{**EVERY, **changes, "seq": 48, "dtype": "float16", "dt_dtype": "float32"})
    operands = operands_of(p)
    operands["dt"] = np.full_like(operands["dt"], 1e-8)
    operands["initial_state"] = operands["initial_state"] * np.float32(1e5)
    operands["dy"] = operands["dy"] * np.float16(1e-2)
    got, expected = backward(p, operands, segments=2), gradients(p, operands)
    for name in ("ddt", "dA", "dC", "dinitial_state"):  # dB is about the step
        assert scan_float64.error(got[name], expected[name]) < TOLERANCE["float16"], name


@pytest.mark.parametrize("name", ["x", "dy", "dt", "B"])
def test_nan_stays_in_its_row_and_head(name):
    p = problem(**EVERY)
    operands = operands_of(p)
    index = (0, 20, 1)
    clean = backward(p, operands, segments=2)
    operands[name][index] = np.nan
    got = backward(p, operands, segments=2)
    for result, value in got.items():
        np.testing.assert_array_equal(value[1], clean[result][1])  # the other row
        if name != "B" and result not in ("dB", "dC"):
            others = [h for h in range(p.heads) if h != 1]
            axis = {"dA": 0, "ddt_bias": 0, "dD": 0, "dinitial_state": 0}.get(result, 1)
            np.testing.assert_array_equal(value[0].take(others, axis), clean[result][0].take(others, axis))
        if name == "B" or result in ("dB", "dC"):
            group = 1 if name == "B" else 0
            axis = {"dA": 0, "ddt_bias": 0, "dD": 0, "dinitial_state": 0}.get(result, 1)
            others = [1 - group] if result in ("dB", "dC") else [h for h in range(p.heads) if h // 2 != group]
            np.testing.assert_array_equal(value[0].take(others, axis), clean[result][0].take(others, axis))


def test_scratch_stays_below_half_of_what_is_read_and_written():
    p = problem(batch=4, seq=16384, heads=8, groups=1, head_dim=64, state=128, dtype="bfloat16", chunk_size=None)
    made = plan_backward.backward(p)
    states = sum(b.nbytes for b in made.scratch if b.name in ("states", "adjoints"))
    assert states <= sum(b.nbytes for b in (*made.operands, *made.results)) / 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"state": 600}, "256.*600"),
        ({"head_dim": 300}, "256.*300"),
    ],
)
def test_refusals_name_the_limit_and_the_figure(options, said):
    with pytest.raises(NotImplementedError, match=said):
        plan_backward.backward(problem(**options))


def test_a_configuration_that_does_not_fit():
    p = problem(heads=6, groups=2)
    with pytest.raises(ValueError, match="head_slices=4"):
        plan_backward.backward(p, BackwardConfig(16, head_slices=4))
    with pytest.raises(ValueError, match="head_blocks=2"):
        plan_backward.backward(p, BackwardConfig(16, head_blocks=2))
    with pytest.raises(ValueError, match="chunk=24"):
        BackwardConfig(24)


MODEL = {"seq": 4096, "heads": 8, "head_dim": 64, "groups": 1, "state": 128, "chunk_size": None, "dtype": "bfloat16"}
COMPILED = {
    "plain": problem(**MODEL),
    "every option": problem(**{**EVERY, **MODEL, "head_dim": 80, "state": 24}, has_runs=True),
    "TF32": problem(**{**MODEL, "dtype": "float32", "precision": "default"}),
    "highest": problem(**{**MODEL, "dtype": "float32", "state": 64}, has_D=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch"),
    [("plain", arch) for arch in config.SUPPORTED_ARCHS]
    + [(name, arch) for name in ("every option", "TF32") for arch in ("sm_80", "sm_90")]  # an old and a new generation
    + [("highest", "sm_90")],
)
def test_compiles(name, arch):
    compile_plan(plan_backward.backward(COMPILED[name]), arch)
