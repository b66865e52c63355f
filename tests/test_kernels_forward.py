"""The forward kernels: their arithmetic in the tile emulator against float64, and their compilation for every GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_ssd import config
from jax_ssd.mamba2 import plan, plan_backward
from jax_ssd.mamba2.problem import Problem
from tests import scan_float64, tile_emulator
from tests.compilation import compile_plan
from tests.scan_float64 import error, problem, random_operands

EVERY = {"has_D": True, "has_z": True, "has_dt_bias": True, "has_initial_state": True, "dt_softplus": True}
# ||got - float64|| / ||float64||. Operands are rounded to the input's own bits, ten in TF32; three passes keep 22.
TOLERANCE = {"float32 highest": 1e-6, "float32 default": 1e-3, "float16": 1e-3, "bfloat16": 6e-3}


def forward(p: Problem, operands: dict[str, np.ndarray], **tiles: Any) -> dict[str, np.ndarray]:
    return tile_emulator.run(plan.forward(p, replace(plan.tiles(p), **tiles)), operands, seed=1)


def check(p: Problem, operands: dict[str, np.ndarray] | None = None, **tiles: Any) -> None:
    operands = random_operands(p) if operands is None else operands
    got, expected = forward(p, operands, **tiles), scan_float64.scan(p, operands)
    kind = f"float32 {p.precision}" if p.dtype == "float32" else p.dtype
    for name, value in got.items():
        assert value.dtype == scan_float64.dtype_of(p.dtype if name == "y" else "float32")
        assert error(value, expected[name]) < TOLERANCE[kind], name


@pytest.mark.parametrize(
    ("changes", "tiles"),
    [
        ({}, {}),
        ({"seq": 1}, {}),
        ({"seq": 15, "return_final_state": False}, {}),
        ({"seq": 16}, {}),
        ({"seq": 200}, {"segments": 5}),
        ({"seq": 200, "chunk_size": 32}, {"segments": 2}),
        ({"seq": 65, "groups": 1, "heads": 3}, {}),
        ({"seq": 65, "groups": 4}, {"segments": 3}),
        ({"seq": 65, "head_dim": 80, "state": 24}, {"head_dim_block": 32, "head_block": 2}),
        ({"seq": 65, "head_dim": 1, "state": 17}, {"segments": 2}),
        ({"seq": 65, "param_rows": 2}, {}),
        ({"seq": 65, "has_runs": True}, {}),
        ({"seq": 200, "has_runs": True}, {"segments": 4}),
        ({"seq": 65, "has_runs": True, "has_initial_state": False, "has_D": False, "has_z": False}, {"segments": 2}),
        ({"seq": 65, "dt_limit": (0.02, 0.9)}, {"segments": 2}),
        ({"seq": 65, "has_dt_bias": False, "dt_softplus": False, "has_initial_state": False}, {"segments": 2}),
        ({"seq": 65, "precision": "default"}, {"segments": 2}),
        ({"seq": 65, "dtype": "bfloat16", "dt_dtype": "bfloat16"}, {"segments": 2}),
        ({"seq": 65, "dtype": "float16", "has_runs": True}, {"segments": 2}),
        ({"seq": 200, "has_initial_state": False}, {"segments": 4, "store_latency": 4}),
        ({"seq": 1}, {"swap": True}),
        ({"seq": 65}, {"swap": True, "store_latency": 1}),
        ({"seq": 200, "groups": 1, "heads": 3}, {"swap": True, "segments": 5}),
        ({"seq": 65, "head_dim": 80, "state": 24}, {"swap": True, "segments": 3, "head_dim_block": 32}),
        ({"seq": 65, "head_dim": 1, "state": 17, "param_rows": 2}, {"swap": True, "segments": 2}),
        ({"seq": 200, "has_runs": True}, {"swap": True, "segments": 4}),
        ({"seq": 65, "has_initial_state": False, "has_D": False, "has_z": False}, {"swap": True, "segments": 2}),
        ({"seq": 65, "precision": "default"}, {"swap": True, "segments": 2}),
        ({"seq": 65, "dtype": "bfloat16", "has_runs": True}, {"swap": True, "segments": 2}),
        ({"seq": 65, "dtype": "float16", "return_final_state": False}, {"swap": True}),
    ],
    ids=str,
)
def test_equals_the_sequential_scan(changes, tiles):
    check(problem(**{**EVERY, **changes}), **tiles)


def test_extreme_decays_in_one_chunk():
    p = problem(seq=48, heads=2, groups=1, has_initial_state=True)
    operands = random_operands(p)
    operands["A"] = np.array([[-1.0, -0.5]], np.float32)
    operands["dt"][:, ::5] = np.array([1.0, 10.0, 1e2, 1e3, 1e4] * 2, np.float32)[None, :, None]
    got, expected = forward(p, operands, segments=2), scan_float64.scan(p, operands)
    # A decay after one of -1e3 is the difference of two sums near 160: about 1e-5 relative.
    assert max(error(got[name], expected[name]) for name in got) < 1e-4


def test_float16_keeps_small_steps_and_large_states():
    """Steps below 6e-8 and states beyond 65504, which are no float16, while all inputs and results are."""
    p = problem(seq=48, dtype="float16", dt_dtype="float32", has_initial_state=True)
    operands = random_operands(p)
    operands["dt"] = operands["dt"] * np.float32(1e-7)
    operands["initial_state"] = operands["initial_state"] * 0
    got, expected = forward(p, operands, segments=2), scan_float64.scan(p, operands)
    assert error(got["final_state"], expected["final_state"]) < TOLERANCE["float16"]
    operands["initial_state"] = operands["initial_state"] + np.float32(1e6)
    operands["C"] = operands["C"] * np.float16(1e-2)
    check(p, operands, segments=2)


def test_growth():
    p = problem(seq=64, has_initial_state=True)
    operands = random_operands(p)
    operands["A"] = np.full_like(operands["A"], 0.1)
    check(p, operands, segments=2)


def test_lower_limit_leaves_the_padded_tail_alone():
    check(problem(seq=17, dt_limit=(0.5, float("inf")), has_initial_state=True))


def test_softplus_of_extremes():
    p = problem(batch=1, seq=16, heads=1, groups=1, dt_softplus=True)
    operands = random_operands(p)
    raw = np.array([-100, -30, -20, -16, -5, -1e-3, 0, 1e-3, 1, 5, 19.9, 20.1, 50, 100, np.inf, np.nan], np.float32)
    operands["dt"] = raw.reshape(operands["dt"].shape)
    made = plan.forward(p)
    prepare = replace(made, results=made.scratch, scratch=(), launches=made.launches[:1])
    got = tile_emulator.run(prepare, operands)["step"].reshape(-1)
    with np.errstate(invalid="ignore"):
        expected = np.logaddexp(0, raw.astype(np.float64))
    np.testing.assert_allclose(got, expected, rtol=4e-7, atol=1e-44)


NAN_PLACES = [("x", 21), ("dt", 21), ("B", 21), ("C", 21), ("z", 21), ("initial_state", None)]


@pytest.mark.parametrize("has_runs", [False, True])
@pytest.mark.parametrize(("name", "token"), NAN_PLACES)
@pytest.mark.parametrize(("segments", "swap"), [(1, False), (3, False), (3, True)])
def test_a_nan_shows_at_its_token_and_after_within_its_run(name, token, segments, swap, has_runs):
    p = problem(seq=48, heads=2, **EVERY, has_runs=has_runs)
    operands = random_operands(p, seed=3)
    if has_runs:
        number = np.repeat(np.array([0, 1, 2, 3], np.int32), [18, 11, 9, 10])
        operands["runs"] = np.where(np.arange(48) % 7 == 6, ~number, number)[None].repeat(2, axis=0)
        operands["runs"][:, 21] = 1
    where = (0, slice(None) if name == "initial_state" else token)
    operands[name][(*where, 0)] = np.nan
    check(p, operands, segments=segments, swap=swap)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_padding_never_leaks(value):
    p = problem(seq=48, **EVERY, has_runs=True, dtype="bfloat16")
    operands = random_operands(p, seed=5)
    padding = operands["runs"] < 0
    expected = scan_float64.scan(p, operands)
    for name in ("x", "B", "C", "dt", "z"):
        operands[name][padding] = value
    got = forward(p, operands, segments=2)
    for name in got:
        assert error(got[name], expected[name]) < TOLERANCE["bfloat16"]
    assert not got["y"][padding].any()


def test_halves_with_a_carried_state_are_bitwise_the_whole():
    p = problem(seq=64, has_D=True)
    operands = random_operands(p)
    half = {name: a[:, :32] if name in ("x", "dt", "B", "C") else a for name, a in operands.items()}
    rest = {name: a[:, 32:] if name in ("x", "dt", "B", "C") else a for name, a in operands.items()}
    whole, first = forward(p, operands), forward(replace(p, seq=32), half)
    second = forward(replace(p, seq=32, has_initial_state=True), {**rest, "initial_state": first["final_state"]})
    np.testing.assert_array_equal(whole["y"], np.concatenate([first["y"], second["y"]], axis=1))
    np.testing.assert_array_equal(whole["final_state"], second["final_state"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chunk_size": 40}, "chunk_size of 16, 32, 64, 128 .* got 40"),
        ({"chunk_size": 256}, "got 256"),
        ({"state": 257}, "up to 256, got 257"),
        ({"dtype": "float64"}, "got float64"),
        ({"dt_limit": (-1.0, 1.0)}, "steps >= 0"),
        ({"chunk_size": 128, "state": 128}, "needs 393216 bytes .* take 262144"),
    ],
)
def test_refusals_name_the_limit_and_the_figure(changes, said):
    with pytest.raises(NotImplementedError, match=said):
        plan.forward(problem(**changes))


@pytest.mark.parametrize("state", [8, 16, 17, 32, 64, 96, 128, 256])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 48, 64, 80, 96, 128])
def test_sizes_that_models_have_are_planned(head_dim, state):
    """Forward, backward and step, on the oldest architecture, the newest, and between."""
    layouts = ((1, 1), (2, 1), (3, 3), (5, 1), (6, 2), (7, 7), (12, 4), (24, 8))
    for number in range(head_dim // 8 % 3, len(layouts), 3):
        (heads, groups), dtype = layouts[number], ("bfloat16", "float32")[number % 2]
        sizes = {"head_dim": head_dim, "state": state, "heads": heads, "groups": groups, "dtype": dtype}
        p = problem(**{**EVERY, **sizes, "seq": 200, "chunk_size": None, "has_runs": True})
        step = replace(p, seq=1, has_runs=False)
        for made in (plan.forward(p), plan_backward.backward(replace(p, has_dfinal=True)), plan.step(step)):
            for arch in ("sm_80", "sm_90", "sm_120"):
                made.check(arch)


def test_segments_fill_the_gpu_and_no_more():
    def segments(**changes: Any) -> int:
        p = problem(dtype="bfloat16", head_dim=64, state=128, heads=8, groups=1, chunk_size=None, **changes)
        return plan.tiles(p).segments

    assert segments(batch=4, seq=16384) == 8
    assert segments(batch=64, seq=4096) == 1
    assert segments(batch=1, seq=256) == 1


def test_operands_are_swapped_where_head_dim_fills_the_tensor_cores():
    def swapped(**changes: Any) -> bool:
        sizes = {"dtype": "bfloat16", "head_dim": 64, "state": 128, "chunk_size": None}
        return plan.tiles(problem(**{**sizes, **changes})).swap

    assert swapped() and swapped(head_dim=48) and swapped(state=16) and swapped(dtype="float32")
    assert not swapped(head_dim=32) and not swapped(state=256)
    assert not swapped(dtype="float16") and not swapped(dtype="float32", precision="default")


MODEL = {"batch": 2, "seq": 4096, "heads": 8, "head_dim": 64, "groups": 1, "state": 128, "chunk_size": None}
OPTIONS = {
    "plain": {"dtype": "bfloat16"},
    "every option": {"dtype": "bfloat16", "head_dim": 80, "state": 24, "has_runs": True, **EVERY},
    "TF32": {"state": 256, "precision": "default"},
    "highest": {"has_D": True},
    "one segment": {"dtype": "bfloat16", "seq": 256, "return_final_state": False},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch"),
    [("plain", arch) for arch in config.SUPPORTED_ARCHS] + [(name, "sm_90") for name in OPTIONS if name != "plain"],
)
def test_compiles(name, arch):
    compile_plan(plan.forward(problem(**{**MODEL, **OPTIONS[name]})), arch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch"), [("plain", arch) for arch in ("sm_80", "sm_100")] + [(name, "sm_90") for name in OPTIONS]
)
def test_compiles_with_operands_the_other_way(name, arch):
    p = problem(**{**MODEL, **OPTIONS[name]})
    start = plan.tiles(p)
    compile_plan(plan.forward(p, replace(start, swap=not start.swap, store_latency=2)), arch)
