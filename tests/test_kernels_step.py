"""The step kernel in the tile emulator: equal to one token of the float64 scan, in place, for all options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_ssd import config
from jax_ssd.mamba2 import plan
from jax_ssd.mamba2.problem import Problem
from tests import scan_float64, tile_emulator
from tests.scan_float64 import error, problem, random_operands
from tests.test_kernels_forward import compile_plan

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


def test_one_launch_reads_and_writes_the_state_once():
    made = plan.step(step_problem(batch=64, heads=80, head_dim=64, state=128, dtype="bfloat16", groups=1))
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
