"""The plan of the Mamba-3 step kernel: what it launches, for every architecture, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import compile as kernels
from jax_ssd import config, nvrtc
from jax_ssd.mamba3 import choices, plan_step
from jax_ssd.mamba3.plan_step import StepBlocks
from jax_ssd.mamba3.problem import Problem
from jax_ssd.plans import Buffer, Plan


def step_problem(
    *, batch=2, heads=4, head_dim=16, groups=2, state=32, rank: int | None = 2, pairs=8, dtype="float32",
    param_rows=1, rotary="half", fold=True, gate=True, skip=True, norm=True, **types: str
) -> Problem:  # fmt: skip
    """A step with every option, unless told otherwise. rank None is SISO; types: of parts of the state."""
    R, lead = rank or 1, (batch, heads)
    parts = {"angle": (pairs,), "ssm": (head_dim, state), "k": (R, state), "v": (head_dim,)}
    defaults = {"angle": "float32", "ssm": "float32", "k": "float32", "v": dtype}
    per_rank = (param_rows, heads, R, head_dim)
    arrays: list[tuple[str, tuple[int, ...], str, bool]] = [
        ("q", (batch, R, groups, state), dtype, True),
        ("k", (batch, R, groups, state), dtype, True),
        ("v", (*lead, head_dim), dtype, True),
        ("q_bias", (param_rows, heads, R, state), "float32", True),
        ("k_bias", (param_rows, heads, R, state), "float32", True),
        ("angles", (*lead, pairs), "float32", True),
        *((name, lead, "float32", True) for name in ("adt", "dt", "trap")),
        *((f"state_{part}", (*lead, *shape), types.get(part, defaults[part]), True) for part, shape in parts.items()),
        ("mimo_v", per_rank, "float32", rank is not None),
        ("mimo_o", per_rank, "float32", rank is not None and fold),
        ("z", (*lead, head_dim), dtype, gate),
        ("mimo_z", per_rank, "float32", rank is not None and gate),
        ("D", (param_rows, heads), "float32", skip),
        ("norm_weight", (param_rows, heads, head_dim), "float32", norm),
    ]
    return Problem(
        batch=batch,
        seq=1,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state=state,
        rank=R,
        pairs=pairs,
        dtype=dtype,
        param_rows=param_rows,
        rotary=rotary,
        norm_eps=1e-5,
        return_final_state=True,
        chunk_size=None,
        precision="default",
        operands=tuple(Buffer(name, shape, type_) for name, shape, type_, given in arrays if given),
    )


def random_operands(p: Problem, seed: int = 0) -> dict[str, np.ndarray]:
    """Operands of a step by name, over a wide range of trap and angles; rounded to their types."""
    rng = np.random.default_rng(seed)
    made = {b.name: rng.standard_normal(b.shape) for b in p.operands}
    made["adt"] = -np.exp(made["adt"] - 2)
    made["dt"] = np.exp(0.7 * made["dt"] - 1.5)
    made |= {"angles": 2 * made["angles"], "trap": 3 * made["trap"], "state_angle": 4 * made["state_angle"]}
    types = {b.name: jnp.dtype(b.dtype) for b in p.operands}
    return {name: array.astype(np.float32).astype(types[name]) for name, array in made.items()}


MODEL: dict[str, Any] = {"heads": 64, "head_dim": 64, "groups": 1, "state": 128, "pairs": 32, "dtype": "bfloat16"}


def test_one_launch_replaces_the_state():
    made = plan_step.step(step_problem(**MODEL, batch=64, rank=4))
    assert len(made.launches) == 1 and made.scratch == ()
    assert made.aliases == {f"state_{part}": f"new_state_{part}" for part in ("angle", "ssm", "k", "v")}
    assert [b.name for b in made.results] == [*made.aliases.values(), "y"]
    text = made.describe()
    assert "launch mamba3_step<__nv_bfloat16, float, __nv_bfloat16, 64, 1, 4, 64, 128, 32, true, true, true," in text
    assert "on grid 4096 x 1 x 1, block 256 x 1 x 1" in text


def test_ranks_that_are_kept_have_an_axis():
    made = plan_step.step(step_problem(rank=3, fold=False))
    assert made.results[-1] == Buffer("y", (2, 3, 4, 16), "float32")


SHAPES: dict[str, dict[str, Any]] = {
    "mimo": {**MODEL, "rank": 4},
    "siso": {**MODEL, "rank": None, "rotary": "pairwise", "pairs": 64, "norm": False, "skip": False, "gate": False},
    "rank 8": {**MODEL, "rank": 8, "dtype": "float16", "k": "bfloat16", "fold": False},
    "odd": {"heads": 3, "groups": 3, "head_dim": 5, "state": 6, "pairs": 2, "rank": 3, "param_rows": 2},
    "wide": {**MODEL, "state": 256, "head_dim": 128, "rank": 8, "dtype": "float32"},
}


def compile_plan(made: Plan, arch: str) -> kernels.Cubin:
    if nvrtc.missing():
        pytest.skip(f"no CUDA C++ compiler: {nvrtc.missing()}")
    made.check(arch)
    (cubin,) = kernels.compile_launches([(made.launches[0].kernel, ())], arch)
    assert [size for _, size in cubin.parameters] == made.parameter_sizes(made.launches[0])
    return cubin


@pytest.mark.parametrize("arch", config.SUPPORTED_ARCHS)
def test_compiles(arch):
    for changes in SHAPES.values():
        p = step_problem(**changes)
        made = plan_step.step(p)
        cubin = compile_plan(made, arch)
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
        coarse: Any = jax.ShapeDtypeStruct(state.ssm.shape, jnp.bfloat16)
        half = state._replace(ssm=coarse)
        (path,) = jax_ssd.dispatch_paths(call, half, given, platform="cuda")
        assert path.implementation == "xla"
        assert "takes state.ssm in float32, got bfloat16" in path.refusals["cuda"]


def test_blocks_fit_the_head():
    def blocks(**changes: Any) -> StepBlocks:
        return plan_step.step_blocks(step_problem(**{**MODEL, "rank": 4, **changes}))

    for changes in ({}, {"state": 256}, {"state": 1024, "rank": 1}, {"state": 6, "pairs": 3}, {"head_dim": 8}):
        p = step_problem(**{**MODEL, "rank": 4, **changes})
        c = plan_step.step_blocks(p)
        assert c.rows * plan_step.row_floats(p) <= plan_step.TILE
        assert c.threads == 64 or plan_step.units(p, c.threads // 2) * c.rows < p.head_dim
    assert blocks(head_dim=16).rows < blocks().rows
    assert blocks(rank=8, head_dim=128, state=256).threads <= 1024


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
        ({"ssm": "bfloat16"}, "takes state.ssm in float32, got bfloat16"),
        ({"state": 1026, "rank": 1}, "a state size up to 1024, got 1026"),
        ({"rank": 8, "state": 512}, "needs [0-9,]+ bytes of shared memory .*, 49,152 are possible"),
    ],
)
def test_refusals_name_the_limit_and_the_figure(changes, said):
    with pytest.raises(NotImplementedError, match=said):
        plan_step.step(step_problem(**changes))


def test_too_many_heads_are_refused():
    made = plan_step.step(step_problem(batch=2**30, heads=4, head_dim=1, state=2, pairs=1))
    with pytest.raises(NotImplementedError, match="grid axis x: 4,294,967,296 blocks, at most 2,147,483,647"):
        made.check("sm_90")
