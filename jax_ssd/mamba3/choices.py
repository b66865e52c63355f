"""What of the kernels' plans can be tuned: each plan function with its heuristic and the values worth trying."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ssd.mamba3 import plan, plan_step
from jax_ssd.mamba3.problem import Problem
from jax_ssd.plans import Plan
from jax_ssd.tune import Tunable


def _forward_values(p: Problem) -> Mapping[str, Sequence[Any]]:
    start = plan.tiles(p)
    most = max(1, math.ceil(p.seq / start.tokens) // plan.SHORTEST_SEGMENT)
    some = {1, start.segments // 2, start.segments - 1, start.segments + 1, start.segments * 3 // 2, start.segments * 2}
    return {
        "segments": sorted(n for n in some if 1 <= n <= most),
        "blocks": () if start.pipeline else (1, 2, 3),
        "teams": (4, 5) if start.pipeline and p.dtype == "bfloat16" else (),
        "pieces": (1, 2, 4) if start.pipeline and start.segments > 1 else (),
    }


def _step_values(p: Problem) -> Mapping[str, Sequence[Any]]:
    most = max(1, plan_step.TILE // plan_step.row_floats(p))
    return {
        "rows": [n for n in (1, 2, 4, 8) if n <= most],
        "threads": (64, 128, 256, 512),
        "streaming": (False, True),
    }


FORWARD = Tunable("mamba3_forward", "cuda", plan.forward, plan.tiles, _forward_values, local=("segments",))
STEP = Tunable(
    "mamba3_step",
    "cuda",
    plan_step.step,
    plan_step.step_blocks,
    _step_values,
    local=("rows", "threads", "streaming"),
)


def step(p: Problem) -> Plan:
    """The plan of a step. Several tokens leave little to choose, and nothing that was measured for one."""
    return STEP(p) if p.seq == 1 else plan_step.step(p)
