"""Compiles the kernels of a plan for an architecture, where the compiler is installed."""

import pytest

from jax_ssd import compile, cutile, launch, nvrtc
from jax_ssd.compile import Cubin
from jax_ssd.plans import Plan
from jax_ssd.specs import CuTileKernel


def compile_plan(plan: Plan, arch: str) -> list[Cubin]:
    """One cubin a launch; that they fit the architecture and take the plan's parameters is checked."""
    for language in {type(one.kernel) for one in plan.launches}:
        missing = cutile.missing() if language is CuTileKernel else nvrtc.missing()
        if missing is not None:
            pytest.skip(missing)
    plan.check(arch)
    cubins = compile.compile_launches([(one.kernel, plan.compile_arguments(one)) for one in plan.launches], arch)
    launch.encode(plan, cubins)  # which compares parameters and shared memory
    return cubins
