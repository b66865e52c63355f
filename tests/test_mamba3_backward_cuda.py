"""The CUDA C++ backward of Mamba-3: its own source, run on the CPU by an emulator, against float64.

A compilation takes seconds, so there are few cases; tests/gpu/test_mamba3_backward.py has more.
"""

import dataclasses

import jax
import numpy as np
import pytest

from jax_ssd import config as settings
from jax_ssd.mamba3.plan_backward import backward, heuristic
from jax_ssd.tools.check import relative_error
from tests import cuda_emulator, emulation
from tests.mamba3_gradients import BAR, CASES, KERNELS, arguments, bar, exact_gradients, flat, gradients
from tests.test_mamba3_plan_backward import problem

pytestmark = pytest.mark.skipif(cuda_emulator.missing() is not None, reason=str(cuda_emulator.missing()))
# SISO, ranks 2 to 5, both rotary modes, states, norm; for "model..." walks and chunks are by warpgroups.
EMULATED = {
    "siso_states": {"seq": 80},
    "group_per_head": {},
    "ranks_kept_norm": {},
    "states": {"heads": 1},
    "odd_sizes": {},
    "siso_model": {"heads": 1},
    "model_states": {"heads": 2},
    "model_segments": {},
    "packed": {"heads": 1},
    "packed_siso_float32": {"seq": 150, "cu_seqlens": (0, 64, 65, 150), "heads": 2, "groups": 1},
    "norm_float32": {"heads": 1},
    "packed_model_tf32": {"seq": 70, "cu_seqlens": (0, 50, 70), "heads": 1, "groups": 1},
    "model_one_rank": {},
    "model_pairs": {"heads": 1},
    "siso_model_pairs": {"heads": 1},
    "model_bare_pairs": {"heads": 1},
    "siso_model_odd_pairs": {"heads": 1},
    "siso_model_most_pairs": {"heads": 1},
    "model_odd_pairs": {"heads": 1},
    "model_half": {"heads": 1},
    "siso_model_half": {"heads": 1},
}
SLOW = (
    "model_one_rank",
    "packed_siso_float32",
    "norm_float32",
    "packed_model_tf32",
    "model_pairs",
    "siso_model_pairs",
    "model_bare_pairs",
    "siso_model_most_pairs",
    "model_odd_pairs",
    "model_half",
    "siso_model_half",
)


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulation.emulate(monkeypatch)
    with settings.override(target_arch="sm_90"):
        yield


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in EMULATED])
def test_gradients_agree_with_float64(name):
    changes = {**CASES[name], "batch": 1, **EMULATED[name]}
    arrays, cotangents, options = arguments(**changes)
    options = tuple(options.items())
    actual = flat(gradients(arrays, cotangents, implementation=KERNELS, options=options))
    for gradient, expected in exact_gradients(arrays, cotangents, options).items():
        assert relative_error(actual[gradient], expected) <= bar(changes), gradient


def test_tiles_of_fewer_rows_give_what_larger_ones_do():
    p = problem(
        batch=1, seq=50, heads=1, rank=3, state=64, head_dim=32, pairs=8, norm=True, sequences=2, dtype="float32"
    )
    config = heuristic(p, ["sm_90"])
    assert (config.rows, config.tokens) == (64, 16)
    rng = np.random.default_rng(0)
    arrays = {b.name: rng.standard_normal(b.shape).astype(b.dtype) for b in p.operands}
    arrays["adt"], arrays["dt"] = -abs(arrays["adt"]) / 8, abs(arrays["dt"]) / 8
    arrays["cu_seqlens"] = np.asarray([[0, 18, 50]], np.int32)
    large, small = (
        cuda_emulator.run(backward(p, c), arrays)
        for c in (config, dataclasses.replace(config, rows=32, tokens=8, walk_columns=128))
    )
    for name in small:
        if name.startswith("grad_"):
            assert relative_error(small[name], large[name]) <= bar({"dtype": "float32"}), name


@pytest.mark.parametrize(("rank", "gate"), [(None, True), (None, False), (2, True)])
@pytest.mark.slow
def test_heads_of_one_block_give_what_heads_of_their_own_blocks_give(rank, gate):
    p = problem(batch=1, seq=40, heads=5, rank=rank, gate=gate, initial=True, final=True)
    config = heuristic(p, ["sm_90"])
    assert config.warpgroups
    rng = np.random.default_rng(0)
    arrays = {b.name: rng.standard_normal(b.shape).astype(jax.numpy.dtype(b.dtype)) for b in p.operands}
    arrays["adt"], arrays["dt"] = -abs(arrays["adt"]) / 8, abs(arrays["dt"]) / 8
    apart, together = (
        cuda_emulator.run(backward(p, dataclasses.replace(config, parts=parts)), arrays, seed=parts) for parts in (5, 1)
    )
    for name in together:
        if name.startswith("grad_") and name not in ("grad_q", "grad_k"):  # whose sums have another order
            np.testing.assert_array_equal(together[name], apart[name], err_msg=name)
        if name in ("grad_q", "grad_k"):
            assert relative_error(together[name], apart[name]) <= BAR / 10, name


@pytest.mark.parametrize("bounds", [(3, 20, 10, 90), (0, 40, 7, 20), (0, -3, 50, 40)])
def test_bounds_out_of_order_end(bounds):
    p = problem(batch=1, seq=40, heads=1, rank=2, state=16, head_dim=8, pairs=3, sequences=3, initial=True, final=True)
    rng = np.random.default_rng(0)
    arrays = {b.name: rng.standard_normal(b.shape).astype(jax.numpy.dtype(b.dtype)) for b in p.operands}
    found = cuda_emulator.run(backward(p), {**arrays, "cu_seqlens": np.asarray([bounds], np.int32)})
    assert found["grad_v"].shape == (1, 40, 1, 8)


@pytest.mark.slow
def test_slices_of_the_batch_give_what_all_of_it_gives():
    p = problem(batch=2, seq=40, heads=1, rank=None, initial=True, final=True)
    config = heuristic(p, ["sm_90"])
    rng = np.random.default_rng(0)
    arrays = {b.name: rng.standard_normal(b.shape).astype(jax.numpy.dtype(b.dtype)) for b in p.operands}
    arrays["adt"], arrays["dt"] = -abs(arrays["adt"]) / 8, abs(arrays["dt"]) / 8
    whole, sliced = (
        cuda_emulator.run(backward(p, dataclasses.replace(config, slices=slices)), arrays) for slices in (1, 2)
    )
    for name in whole:
        if name.startswith("grad_"):
            np.testing.assert_array_equal(sliced[name], whole[name], err_msg=name)


def test_a_nan_in_one_row_leaves_the_others_alone():
    arrays, cotangents, options = arguments(**CASES["group_per_head"])
    options = tuple(options.items())
    clean = gradients(arrays, cotangents, implementation=KERNELS, options=options)
    arrays["v"] = arrays["v"].copy()
    arrays["v"][1, 20] = np.nan
    dirty = gradients(arrays, cotangents, implementation=KERNELS, options=options)
    for name in ("q", "k", "v", "z", "angles", "adt", "dt", "trap"):
        np.testing.assert_array_equal(dirty[name][0], clean[name][0], err_msg=name)
    assert np.isnan(np.asarray(dirty["q"][1, 20:], np.float32)).all()
