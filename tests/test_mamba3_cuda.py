"""The Mamba-3 forward kernels' own source, run on the CPU by an emulator, against float64."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

import jax_ssd
from jax_ssd import config
from jax_ssd.mamba3 import plan
from jax_ssd.plans import Buffer
from tests import cuda_emulator, emulation
from tests.mamba3_calls import CALLS, POISONED, Call, errors

pytestmark = pytest.mark.skipif(cuda_emulator.missing() is not None, reason=str(cuda_emulator.missing()))
# One of each kind: a compilation takes seconds. tests/gpu/test_mamba3.py runs them all.
EMULATED = (
    *("half, odd pairs", "wgmma", "siso", "rank 2, small", "packed, segments", "float32"),
    *("tf32", "tf32, half, ranks kept", "tf32, head_dim 40", "tf32, packed"),
)


def planned(call: Call):
    problem = call.problem()
    tiles = plan.tiles(problem, ["sm_90", "sm_80"] if call.portable else ["sm_90"])
    return plan.forward(problem, dataclasses.replace(tiles, segments=call.segments or 1, pieces=call.pieces), ["sm_90"])


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


@pytest.mark.parametrize("name", ["packed, segments", "float32", "tf32, packed"])
def test_the_order_of_threads_and_blocks_moves_no_bit(name):
    (call,) = (dataclasses.replace(call, batch=1, heads=2, groups=1) for call in CALLS if call.name == name)
    made, operands = planned(call), call.operands()
    first, other = (cuda_emulator.run(made, operands, seed=seed) for seed in (1, 2))
    for buffer in made.results:
        np.testing.assert_array_equal(first[buffer.name].view(np.uint8), other[buffer.name].view(np.uint8))


@pytest.mark.parametrize("name", ["k", "k, tf32", "v, tf32", "angles, tf32", "q, tf32"])
def test_a_nan_stays_with_its_head_and_the_tokens_after_it(name):
    (call,) = (dataclasses.replace(call, heads=2) for call in POISONED if call.name == name)
    y = emulated(call)[0]
    np.testing.assert_array_equal(np.isnan(np.asarray(y, np.float32)), np.isnan(call.truth()[0]))


@pytest.mark.parametrize("token", [5, 6])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_nan_decay_does_not_reach_earlier_tokens(dtype, token):
    call = Call("siso", batch=1, seq=40, heads=2, groups=1, rank=1, options="D", dtype=dtype)
    call = dataclasses.replace(call, poison=("adt", (0, 1, token)))
    y = np.isnan(np.asarray(emulated(call)[0], np.float32))
    assert not y[:, :, 0].any() and not y[0, :token, 1].any() and y[0, token:, 1].all()


@pytest.mark.parametrize(
    ("sound", "given"),
    [((0, 10, 40), (0, 10, 30)), ((0, 10, 40), (3, 10, 90)), ((0, 0, 40), (-7, -9, 0)), ((0, 10, 10, 40), (10,) * 4)],
)
def test_only_bounds_between_sequences_are_read(sound, given):
    call = Call("packed", batch=1, seq=40, heads=2, groups=1, cu_seqlens=sound)
    made = planned(call)
    operands = call.operands()
    expected = cuda_emulator.run(made, operands)
    found = cuda_emulator.run(made, {**operands, "cu_seqlens": np.asarray([given], np.int32)})
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name], np.float32), np.asarray(array, np.float32), name)


@pytest.mark.parametrize("bounds", [(0, 200, 100, 150, 300), (0, 290, 7, 7, 20), (0, 128, -3, 900, 300)])
def test_bounds_out_of_order_end(bounds):
    call = Call("packed", batch=1, seq=300, heads=2, groups=1, segments=3, cu_seqlens=(0, 100, 150, 200, 300))
    operands = {**call.operands(), "cu_seqlens": np.asarray([bounds], np.int32)}
    assert cuda_emulator.run(planned(call), operands)["y"].shape == (1, 300, 2, 16)


@pytest.mark.slow
def test_traced_boundaries_that_are_not_sound(monkeypatch):
    arrays: dict[str, Any] = Call(
        "packed", batch=1, seq=40, heads=2, groups=1, rank=1, dtype="float32", options=""
    ).operands()
    given = arrays | {name: arrays[name][:, :, 0] for name in ("q", "k")}
    given |= {name: arrays[name][0, :, 0] for name in ("q_bias", "k_bias")} | {"mimo_v": None, "mimo_o": None}
    emulation.emulate(monkeypatch)

    def scan(implementation, bounds):
        options: dict[str, Any] = {"implementation": implementation, "precision": "highest"}
        return jax_ssd.mamba3(**given, cu_seqlens=bounds, return_final_state=True, **options)

    by_kernels, by_xla = (jax.jit(functools.partial(scan, name)) for name in ("cuda", "xla"))
    with config.override(target_arch="sm_90"):
        for bounds in ((0, 10, 25, 30), (0, 30, 10, 60), (4, -3, 50, 0)):
            results, expected = (jax.tree.leaves(call(np.array(bounds))) for call in (by_kernels, by_xla))
            for got, want in zip(results, expected, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("segments", [1, 3])
def test_rows_have_boundaries_of_their_own(segments):
    """What jax.vmap makes of packs."""
    one = Call("packs", batch=1, seq=300, heads=2, groups=1, segments=segments, cu_seqlens=(0, 40, 40, 300))
    operands = dataclasses.replace(one, batch=2).operands()
    operands["cu_seqlens"] = np.array([[0, 40, 40, 300], [0, 7, 211, 300]], np.int32)
    buffers = tuple(Buffer(name, array.shape, array.dtype.name) for name, array in operands.items())
    both = dataclasses.replace(one.problem(), batch=2, operands=buffers)
    made = plan.forward(both, dataclasses.replace(plan.tiles(both, ["sm_90"]), segments=segments), ["sm_90"])
    together = cuda_emulator.run(made, operands)
    for row in range(2):
        alone = {name: a[row : row + 1] if a.shape[0] == 2 else a for name, a in operands.items()}
        for name, array in cuda_emulator.run(planned(one), alone).items():
            if not name.startswith(("ends", "decays", "phases")):
                np.testing.assert_array_equal(np.float32(together[name][row : row + 1]), np.float32(array), name)


@pytest.mark.parametrize(
    ("name", "where", "segments"),
    [("angles", (0, 20, 1, 2), 1), ("angles", (0, 20, 1, 2), 3), ("state_angle", (0, 0, 1, 2), 1)],
)
def test_a_lost_phase_is_nan_in_the_state(name, where, segments):
    call = Call("lost", batch=1, seq=70, heads=2, groups=1, rank=1, options="Ds", segments=segments)
    call = dataclasses.replace(call, poison=(name, where), dtype="float32")
    y, angle, ssm, k, _ = (np.isnan(np.asarray(array)) for array in emulated(call))
    truth = call.truth()
    np.testing.assert_array_equal(y, np.isnan(truth[0]))
    np.testing.assert_array_equal(angle, np.isnan(truth[1]))
    np.testing.assert_array_equal(k, np.isnan(truth[3]))
    assert ssm[:, :, 1].all() and not ssm[:, :, 0].any()
