"""The step kernels: cuTile in the tile emulator, equal to one token of the float64 scan; the plans of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_ssd import config
from jax_ssd.mamba2 import plan, plan_cuda_step
from jax_ssd.mamba2.problem import Problem
from tests import scan_float64, tile_emulator
from tests.compilation import compile_plan
from tests.scan_float64 import error, problem, random_operands

EVERY = {"has_D": True, "has_z": True, "has_dt_bias": True, "dt_softplus": True}


def step_problem(**changes: Any) -> Problem:
    return problem(**{"seq": 1, "has_initial_state": True, "chunk_size": None, **changes})


def split(p: Problem, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The operands of a scan over one token as those of a step."""
    made = {name: a[:, 0] if name in ("x", "dt", "B", "C", "z") else a for name, a in operands.items()}
    return {"state": made.pop("initial_state").astype(scan_float64.dtype_of(p.state_dtype)), **made}


@pytest.mark.parametrize(
    ("changes", "tiles"),
    [
        ({}, None),
        (EVERY, None),
        ({**EVERY, "param_rows": 2, "dt_limit": (0.1, 0.9)}, None),
        ({**EVERY, "heads": 6, "groups": 1, "head_dim": 24, "state": 17}, plan.StepTiles(2, 16)),
        ({**EVERY, "heads": 5, "groups": 5, "head_dim": 3, "state": 8}, plan.StepTiles(4, 2)),
        ({**EVERY, "heads": 12, "groups": 4, "dtype": "bfloat16", "dt_dtype": "bfloat16"}, None),
        ({**EVERY, "state_dtype": "bfloat16", "dtype": "bfloat16"}, None),
        ({**EVERY, "dtype": "float16", "head_dim": 1, "state": 1}, None),
    ],
    ids=str,
)
def test_equals_one_token_of_the_scan(changes, tiles):
    p = step_problem(**changes)
    operands = random_operands(p)
    given = split(p, operands)
    before = {name: a.copy() for name, a in given.items()}
    got = tile_emulator.run(plan.step(p, tiles), given, seed=1)
    expected = scan_float64.scan(p, {**operands, "initial_state": given["state"].astype(np.float64)})
    bound = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}
    assert error(got["y"], expected["y"][:, 0]) < bound[p.dtype]
    assert error(got["new_state"], expected["final_state"]) < bound[p.state_dtype]
    for name, array in given.items():
        np.testing.assert_array_equal(array, before[name])


def test_a_large_softplus_step():
    p = step_problem(batch=1, heads=1, groups=1, head_dim=1, state=1, dt_softplus=True)
    one = {name: np.ones_like(a) for name, a in split(p, random_operands(p)).items()}
    one |= {"dt": np.full((1, 1), 25, np.float32), "A": np.full((1, 1), -0.01, np.float32)}
    assert tile_emulator.run(plan.step(p), one)["y"].item() == pytest.approx(25.7788008, rel=3e-7)


@pytest.mark.parametrize("planned", [plan.step, plan_cuda_step.step])
def test_one_launch_reads_and_writes_the_state_once(planned):
    made = planned(step_problem(batch=64, heads=80, head_dim=64, state=128, dtype="bfloat16", groups=1))
    assert len(made.launches) == 1
    assert made.aliases == {"state": "new_state"}
    assert made.scratch == ()


def test_tiles_fit_and_fill():
    def tiles(**changes: Any) -> plan.StepTiles:
        return plan.step_tiles(step_problem(**{"heads": 80, "head_dim": 64, "groups": 1, "state": 128, **changes}))

    assert tiles(batch=64) == plan.StepTiles(1, 64)
    assert tiles(batch=1).head_dim_block < 64
    assert tiles(batch=512, head_dim=16, state=16).head_block == 16


MODEL = {"batch": 8, "heads": 24, "head_dim": 64, "groups": 1, "state": 128, "dtype": "bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", config.SUPPORTED_ARCHS)
def test_compiles(arch):
    compile_plan(plan.step(step_problem(**MODEL, **EVERY)), arch)
    compile_plan(plan.step(replace(step_problem(**MODEL), groups=24, state=24, state_dtype="bfloat16")), arch)


@pytest.mark.parametrize("arch", config.SUPPORTED_ARCHS)
def test_cuda_compiles(arch):
    odd = {"groups": 24, "state": 24, "head_dim": 7, "param_rows": 8}
    for changes in (EVERY, {**odd, "state_dtype": "bfloat16"}, {**EVERY, **odd, "state": 17, "dtype": "float16"}):
        compile_plan(plan_cuda_step.step(step_problem(**{**MODEL, **changes})), arch)


def test_cuda_plan_says_what_runs():
    made = plan_cuda_step.step(step_problem(**{**MODEL, "batch": 128, "heads": 80, "has_D": True}))
    text = made.describe()
    assert "launch mamba2_step<__nv_bfloat16, float, float, 80, 1, 64, 128, true, true, false," in text
    assert "on grid 10240 x 1 x 1, block 256 x 1 x 1" in text
    assert "result new_state is written in place of operand state" in text


def test_cuda_blocks_fit_and_fill():
    def blocks(**changes: Any) -> plan_cuda_step.StepBlocks:
        return plan_cuda_step.step_blocks(step_problem(**{**MODEL, **changes}))

    assert blocks(batch=512).rows == 8
    assert blocks(batch=512, state=256).rows == 4
    assert blocks(batch=512, head_dim=12).rows == 4
    assert blocks(batch=512, state=1000).rows == 1
    assert blocks(batch=1).rows < 8
    assert blocks(batch=1).threads < 256


@pytest.mark.parametrize("name", ["rows", "threads"])
def test_cuda_blocks_are_powers_of_two(name):
    with pytest.raises(ValueError, match=f"StepBlocks.{name} must be a power of two, got 96"):
        plan_cuda_step.StepBlocks(**{"rows": 4, "threads": 128, name: 96})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float64"}, "takes x in bfloat16, float16, float32, got float64"),
        ({"dt_dtype": "float64"}, "takes dt in .*, got float64"),
        ({"state_dtype": "float64"}, "takes a state in .*, got float64"),
        ({"batch": 2**31, "heads": 8, "head_dim": 1, "state": 1}, "up to 2,147,483,647 .* got 17,179,869,184"),
    ],
)
def test_cuda_refusals_name_the_limit_and_the_figure(changes, said):
    with pytest.raises(NotImplementedError, match=said):
        plan_cuda_step.step(step_problem(**changes))
