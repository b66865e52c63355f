"""The plan of the Mamba-3 step kernel: what it launches, for every architecture, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import config
from jax_ssd.mamba3 import choices, plan_step
from jax_ssd.mamba3.plan_step import StepBlocks
from jax_ssd.mamba3.problem import Problem
from jax_ssd.plans import Buffer
from tests import cuda_emulator
from tests.compilation import compile_plan
from tests.mamba3_steps import CHANGES, MODEL, SHAPES, check, check_nan, one_by_one, random_operands, step_problem


def test_one_launch_replaces_the_state():
    made = plan_step.step(step_problem(**MODEL, batch=64, rank=4))
    assert len(made.launches) == 1 and made.scratch == ()
    assert made.aliases == {f"state_{part}": f"new_state_{part}" for part in ("angle", "ssm", "k", "v")}
    assert [b.name for b in made.results] == [*made.aliases.values(), "y"]
    text = made.describe()
    assert "launch mamba3_step<__nv_bfloat16, float, float, __nv_bfloat16, 64, 1, 4, 64, 128, 32, true, true," in text
    assert "on grid 4096 x 1 x 1, block 256 x 1 x 1" in text


def test_ranks_that_are_kept_have_an_axis():
    made = plan_step.step(step_problem(rank=3, fold=False))
    assert made.results[-1] == Buffer("y", (2, 1, 3, 4, 16), "float32")


# One of each kind: a compilation takes seconds. tests/gpu/test_mamba3_step.py runs them all.
EMULATED = ("siso with everything", "ranks kept", "rows of parameters", "pairwise", "turns", "coarse matrix")
emulated = pytest.mark.skipif(cuda_emulator.missing() is not None, reason=str(cuda_emulator.missing()))


def emulate(p: Problem, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    made = plan_step.step(p)
    return cuda_emulator.run(made, operands)


@emulated
@pytest.mark.parametrize("changes", EMULATED)
def test_the_kernel_equals_one_token_in_float64(changes):
    p = step_problem(**CHANGES[changes])
    operands = random_operands(p)
    check(p, operands, emulate(p, operands))


@emulated
@pytest.mark.parametrize("changes", ["siso with everything", "rows of parameters", "coarse matrix"])
def test_several_tokens_have_the_bits_of_a_call_each(changes):
    p = step_problem(**CHANGES[changes], seq=3)
    operands = random_operands(p)
    got = emulate(p, operands)
    check(p, operands, got)
    for name, array in one_by_one(p, operands, emulate).items():
        np.testing.assert_array_equal(got[name].view(np.uint8), array.view(np.uint8), name)


@emulated
@pytest.mark.parametrize("name", ["q", "dt", "trap", "z", "state_ssm", "state_angle"])
def test_a_nan_stays_in_its_row_and_head(name):
    check_nan(emulate, name)


@pytest.mark.parametrize("arch", config.SUPPORTED_ARCHS)
def test_compiles(arch):
    for changes in (*SHAPES.values(), {**SHAPES["mimo"], "seq": 4}):
        p = step_problem(**changes)
        made = plan_step.step(p)
        (cubin,) = compile_plan(made, arch)
        # What is not used is not there; what is there is aligned, and sm_90 keeps 1 KiB of its own.
        assert cubin.shared_memory <= plan_step.shared_bytes(p, plan_step.step_blocks(p).rows) + 1024 + 64
        assert cubin.registers * made.launches[0].block[0] <= 65536


def test_the_public_step_is_planned_on_a_gpu():
    given: dict[str, Any] = {b.name: jax.ShapeDtypeStruct(b.shape, b.dtype) for b in step_problem(rank=2).operands}
    one_row = ("q_bias", "k_bias", "mimo_v", "mimo_o", "mimo_z", "D", "norm_weight")
    given = {n: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) if n in one_row else a for n, a in given.items()}
    state = jax_ssd.Mamba3State(*(given.pop(f"state_{part}") for part in ("angle", "ssm", "k", "v")))

    def call(state, given):
        return jax_ssd.mamba3_step(state, **given)

    with config.override(target_arch="sm_90"):
        (path,) = jax_ssd.dispatch_paths(call, state, given, platform="cuda")
        assert path.implementation == "cuda" and "launch mamba3_step<" in str(path)
        coarse = {part: jax.ShapeDtypeStruct(getattr(state, part).shape, jnp.bfloat16) for part in ("ssm", "angle")}
        (path,) = jax_ssd.dispatch_paths(call, state._replace(ssm=coarse["ssm"]), given, platform="cuda")
        assert path.implementation == "cuda"
        (path,) = jax_ssd.dispatch_paths(call, state._replace(angle=coarse["angle"]), given, platform="cuda")
        assert path.implementation == "xla"
        assert "takes state.angle in float32, got bfloat16" in path.refusals["cuda"]


def test_blocks_fit_the_head():
    def blocks(**changes: Any) -> StepBlocks:
        return plan_step.step_blocks(step_problem(**{**MODEL, "rank": 4, **changes}))

    for changes in (
        {},
        {"state": 256},
        {"state": 1024, "rank": 1},
        {"state": 290},
        {"state": 6, "pairs": 3},
        {"head_dim": 8},
    ):
        p = step_problem(**{**MODEL, "rank": 4, **changes})
        c = plan_step.step_blocks(p)
        assert c.rows * plan_step.row_floats(p) <= plan_step.TILE
        assert c.threads == 64 or plan_step.units(p, c.threads // 2) * c.rows < p.head_dim
    assert blocks(head_dim=16).rows < blocks().rows
    assert [blocks(batch=batch).streaming for batch in (1, 64, 256)] == [False, True, False]
    assert blocks(rank=8, head_dim=128, state=256).threads <= 1024
    for changes in ({}, {"state": 256}, {"head_dim": 8}, {"head_dim": 128}):
        p = step_problem(**{**MODEL, "rank": 4, "seq": 2, **changes})
        c = plan_step.step_blocks(p)
        assert c.rows * plan_step.units(p, c.threads) >= p.head_dim


def test_every_choice_that_would_be_tried_is_a_plan():
    p = step_problem(**{**MODEL, "rank": 4, "state": 256})
    values = choices.STEP.values(p)
    assert max(values["rows"]) * plan_step.row_floats(p) == plan_step.TILE
    for choice in itertools.product(*values.values()):
        choices.STEP.make(p, StepBlocks(**dict(zip(values, choice, strict=True)))).check("sm_80")
    assert choices.STEP(p) == plan_step.step(p)  # nothing measured


@pytest.mark.parametrize(("name", "value"), [("rows", 3), ("rows", 0), ("threads", 16), ("threads", 96)])
def test_blocks_are_powers_of_two(name, value):
    with pytest.raises(ValueError, match=f"StepBlocks.{name} must be a power of two from .*, got {value}"):
        StepBlocks(**{"rows": 4, "threads": 128, name: value})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float64"}, "takes q in bfloat16, float16, float32, got float64"),
        ({"k": "float64"}, "takes state.k in .*, got float64"),
        ({"v": "float64"}, "takes state.v in .*, got float64"),
        ({"angle": "bfloat16"}, "takes state.angle in float32, got bfloat16"),
        ({"ssm": "float64"}, "takes state.ssm in .*, got float64"),
        ({"state": 1026, "rank": 1}, "a state size up to 1024, got 1026"),
        ({"seq": 2, "state": 514, "rank": 1}, "a state size up to 512 with several tokens, got 514"),
        ({"seq": 2, "state": 128, "head_dim": 1024}, "with up to 512 rows of a state of 128, got a head_dim of 1024"),
        ({"pairs": 0}, "at least one rotated pair, got none"),
        ({"batch": 2**29, "heads": 4}, "up to 2,147,483,647 heads in a batch, got 2,147,483,648"),
        ({"rank": 8, "state": 512}, "needs [0-9,]+ bytes of shared memory .*, 49,152 are possible"),
    ],
)
def test_refusals_name_the_limit_and_the_figure(changes, said):
    with pytest.raises(NotImplementedError, match=said):
        plan_step.step(step_problem(**changes))
