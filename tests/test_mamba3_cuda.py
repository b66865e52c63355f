"""The Mamba-3 forward kernels' own source, run on the CPU by an emulator, against float64."""

import dataclasses

import numpy as np
import pytest

from jax_ssd.mamba3 import plan
from tests import cuda_emulator
from tests.mamba3_calls import CALLS, POISONED, Call, errors

pytestmark = pytest.mark.skipif(cuda_emulator.missing() is not None, reason=str(cuda_emulator.missing()))
# One of each kind: a compilation takes seconds. tests/gpu/test_mamba3.py runs them all.
EMULATED = ("half, odd pairs", "wgmma", "siso", "rank 2, small", "packed, segments", "float32")


def planned(call: Call):
    problem = call.problem()
    tiles = plan.tiles(problem, ["sm_90"])
    tiles = dataclasses.replace(tiles, segments=call.segments or 1, warpgroup=tiles.warpgroup and not call.portable)
    return plan.forward(problem, tiles, ["sm_90"])


def emulated(call: Call) -> list[np.ndarray]:
    plan = planned(call)
    results = cuda_emulator.run(plan, call.operands())
    return [results[buffer.name] for buffer in plan.results]


@pytest.mark.parametrize("call", [call for call in CALLS if call.name in EMULATED], ids=lambda call: call.name)
def test_agrees_with_float64(call):
    call = dataclasses.replace(call, batch=1, heads=2, groups=1)
    found = errors(emulated(call), call.truth())
    assert found["y"] <= call.bar
    assert found["ssm"] <= 2 * call.bar
    assert max(found["angle"], found["k"], found["v"]) <= 1e-5


def test_a_nan_stays_with_its_head_and_the_tokens_after_it():
    call = dataclasses.replace(POISONED[0], heads=2)
    y = emulated(call)[0]
    np.testing.assert_array_equal(np.isnan(np.asarray(y, np.float32)), np.isnan(call.truth()[0]))


@pytest.mark.parametrize("token", [5, 6])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_nan_decay_does_not_reach_earlier_tokens(dtype, token):
    call = Call("siso", batch=1, seq=40, heads=2, groups=1, rank=1, options="D", dtype=dtype)
    call = dataclasses.replace(call, poison=("adt", (0, 1, token)))
    y = np.isnan(np.asarray(emulated(call)[0], np.float32))
    assert not y[:, :, 0].any() and not y[0, :token, 1].any() and y[0, token:, 1].all()
