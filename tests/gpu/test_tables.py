"""Every choice that the shipped table of this GPU can select, run at a small size against float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssd import compile as kernels
from jax_ssd import launch
from tests import test_tables


@pytest.mark.parametrize(("record", "result", "implementation"), test_tables.distinct())
def test_every_choice_is_right(record, result, implementation):
    arch = record["arch"]
    if arch != kernels.target_arch():
        pytest.skip(f"this GPU is {kernels.target_arch()}")
    tunable = test_tables.TUNABLES[record["op"], implementation]
    p, choice = test_tables.small(tunable, record, result)
    operands = test_tables.operands_for(p, record["op"])
    made = tunable.make(p, choice)
    results = launch.call(made, arch, *(jnp.asarray(operands[buffer.name]) for buffer in made.operands))
    names = [buffer.name for buffer in made.results]
    test_tables.check(p, record["op"], operands, dict(zip(names, map(np.asarray, results), strict=True)))
