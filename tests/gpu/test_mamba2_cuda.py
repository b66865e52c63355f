"""The CUDA C++ forward of Mamba-2 on a GPU of sm_90: accuracy, odd sizes, divisions, repeatability, NaN."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import jax_ssd
from jax_ssd import compile as kernels
from jax_ssd import launch
from jax_ssd.mamba2 import plan_cuda
from jax_ssd.mamba2.plan_cuda import Split
from jax_ssd.mamba2.problem import Problem
from tests.scan_float64 import error, problem, random_operands, scan

EVERY = dict.fromkeys(("has_D", "has_z", "has_dt_bias", "has_initial_state", "dt_softplus"), True)
SHORT = {name: True for name in EVERY if name != "has_initial_state"}
BAR = 3e-3  # ||got - float64|| / ||float64|| of y and of the final state


@pytest.fixture(autouse=True)
def _hopper():
    if kernels.target_arch() not in plan_cuda.ARCHS:
        pytest.skip(f"written for {plan_cuda.ARCHS}, this is {kernels.target_arch()}")


def model(**changes: Any) -> Problem:
    sizes = {"dtype": "bfloat16", "seq": 200, "groups": 1, "head_dim": 64, "state": 128, "chunk_size": None}
    return problem(**{**sizes, **changes})


def run(p: Problem, operands: dict[str, np.ndarray], split: Split | None = None) -> dict[str, np.ndarray]:
    made = plan_cuda.forward(p, split or plan_cuda.split(p))
    results = jax.jit(lambda *given: launch.call(made, None, *given))(*(operands[b.name] for b in made.operands))
    return {buffer.name: np.asarray(value) for buffer, value in zip(made.results, results, strict=True)}


@pytest.mark.parametrize(
    ("changes", "split"),
    [
        ({"batch": 1, "seq": 64}, None),
        ({"seq": 48}, None),
        ({"seq": 63, **EVERY}, None),
        ({"seq": 65, **EVERY}, None),
        ({"seq": 321, **EVERY, "dt_dtype": "bfloat16"}, None),
        ({"seq": 900, **EVERY}, Split(2, 2, 3, 5)),
        ({"seq": 520, "state": 64, **EVERY}, Split(2, 2, 3, 3)),
        ({"seq": 900, **EVERY}, Split(2, 2, 3, 7, own_starts=True)),
        ({"seq": 1001, "state": 512, "heads": 2, **EVERY}, Split(2, 1, 4, 6, own_starts=True)),
        ({"seq": 1000, "state": 192, "heads": 6, "groups": 3, "param_rows": 2}, Split(1, 1, 2, 10, own_starts=True)),
        ({"seq": 2000}, None),
        ({"seq": 200, "batch": 45, "heads": 12, "state": 64}, None),  # 135 rows of four chunks in 132 equal ranges
        ({"seq": 330, "batch": 34, "heads": 16, "has_initial_state": True}, Split(2, 2, 1, 6)),
        ({"heads": 8, "groups": 2, "has_z": True}, None),
        ({"heads": 4, "groups": 2, "has_D": True}, None),
        ({"heads": 2, "groups": 1, "head_dim": 128, "has_D": True}, None),
        ({"state": 64, "has_z": True}, None),
        ({"state": 256, **EVERY}, None),
        ({"state": 256, "head_dim": 128, "seq": 1700}, Split(2, 1, 3, 9)),
        ({"state": 192, "heads": 6, **EVERY}, None),
        ({"state": 320, "seq": 150, **EVERY}, None),
        ({"state": 512, "seq": 321, "heads": 2, **EVERY}, None),
        ({"state": 512, "head_dim": 128, "seq": 2200, **EVERY}, Split(2, 1, 2, 18)),
        ({"heads": 3, "groups": 3, **EVERY}, None),  # one block a group
        ({"seq": 16, "batch": 13, "return_final_state": False, **SHORT}, None),  # four rows a chunk
        ({"seq": 25, "batch": 3, "return_final_state": False, "state": 256, **SHORT}, None),
        ({"seq": 64, "return_final_state": False}, None),
        ({"seq": 700, **EVERY}, Split(1, 1, 1, 11)),
        ({"param_rows": 2, **EVERY}, None),
        ({"dt_limit": (0.02, 0.9), "dt_softplus": True}, None),
        ({"dt_dtype": "float16", "state": 64}, None),
    ],
    ids=str,
)
def test_equals_the_sequential_scan(changes, split):
    p = model(**changes)
    operands = random_operands(p)
    got, expected = run(p, operands, split), scan(p, operands)
    for name, value in got.items():
        assert error(value, expected[name]) <= BAR, name


def test_every_division_gives_the_same_to_rounding():
    p = model(seq=1280, has_initial_state=True, has_D=True)
    operands = random_operands(p)
    whole = run(p, operands, Split(2, 2, 1, 20))
    for blocks, segments, chunks, own in ((2, 2, 10, False), (1, 2, 10, False), (2, 5, 4, False), (2, 3, 10, True)):
        parts = run(p, operands, Split(2, blocks, segments, chunks, own))
        for name, value in parts.items():
            assert error(value, whole[name].astype(np.float64)) <= 2e-3, (segments, name)


def test_without_a_final_state_y_is_the_same():
    p = model(seq=300)
    operands = random_operands(p)
    (y,) = run(model(seq=300, return_final_state=False), operands).values()
    np.testing.assert_array_equal(y, run(p, operands)["y"])


@pytest.mark.parametrize("sizes", [{"seq": 1500}, {"seq": 400, "batch": 34, "heads": 16}], ids=str)
def test_twenty_calls_give_the_same_bits(sizes):
    p = model(**sizes, **EVERY)
    operands = random_operands(p)
    made = plan_cuda.forward(p, plan_cuda.split(p))
    call = jax.jit(lambda *given: launch.call(made, None, *given))
    given = [jax.device_put(operands[b.name]) for b in made.operands]
    first = jax.tree.map(np.asarray, call(*given))
    for _ in range(19):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, call(*given)), first)


@pytest.mark.parametrize("split", [Split(2, 2, 1, 6), Split(2, 2, 2, 3), Split(2, 2, 4, 2, own_starts=True)], ids=str)
@pytest.mark.parametrize("name", ["x", "dt", "B", "C"])
@pytest.mark.parametrize("has_z", [False, True])
def test_a_nan_shows_at_its_token_and_after(name, split, has_z):
    p = model(seq=330, heads=8, groups=2, state=64, has_D=True, has_z=has_z)
    operands = random_operands(p)
    clean = run(p, operands, split)
    token = 85
    at = {"x": (1, token, 2, 5), "dt": (1, token, 2), "B": (1, token, 0, 3), "C": (1, token, 0, 3)}[name]
    operands[name][at] = np.nan
    got, expected = run(p, operands, split), scan(p, operands)
    for result, value in got.items():
        np.testing.assert_array_equal(np.isnan(value.astype(np.float32)), np.isnan(expected[result]), err_msg=result)
    np.testing.assert_array_equal(got["y"][0], clean["y"][0])
    np.testing.assert_array_equal(got["y"][1, :64], clean["y"][1, :64])


@pytest.mark.parametrize("name", ["x", "dt", "B", "C"])
def test_a_nan_stays_in_its_row_where_rows_share_a_chunk(name):
    p = model(seq=16, batch=6, has_D=True, return_final_state=False)
    operands = random_operands(p)
    operands[name][2, 9] = np.nan
    got, expected = run(p, operands), scan(p, operands)
    np.testing.assert_array_equal(np.isnan(got["y"].astype(np.float32)), np.isnan(expected["y"]))


def test_an_infinity_leaves_earlier_tokens_alone():
    p = model(seq=130)
    operands = random_operands(p)
    clean = run(p, operands)["y"].astype(np.float32)
    operands["x"][0, 100, 1, 7] = np.inf
    got = run(p, operands)["y"].astype(np.float32)
    np.testing.assert_allclose(got[0, :100], clean[0, :100], atol=1e-6)
    assert not np.isfinite(got[0, 100:, 1, 7]).any()
    assert np.isfinite(np.delete(got[0, :, 1], 7, axis=-1)).all()


def test_extreme_decays_in_one_chunk():
    p = model(seq=128, has_initial_state=True)
    operands = random_operands(p)
    operands["A"] = np.linspace(-1.0, -0.25, p.heads, dtype=np.float32)[None]
    operands["dt"][:, ::5] = np.resize(np.array([1.0, 10.0, 1e2, 1e3, 1e4], np.float32), (26, 1))
    got, expected = run(p, operands), scan(p, operands)
    for name, value in got.items():
        assert error(value, expected[name]) <= 4e-3, name


def test_is_what_none_chooses():
    p = model(batch=4, seq=4096, heads=16, has_D=True)
    operands = random_operands(p)
    operands = {"A": operands["A"][0], "D": operands["D"][0]} | {n: operands[n] for n in ("x", "dt", "B", "C")}
    (path,) = jax_ssd.dispatch_paths(lambda given: jax_ssd.mamba2(**given), operands, platform="cuda")
    assert path.implementation == "cuda"


def test_more_than_two_to_the_31_elements():
    """The last tokens of a long row against a run restarted from the state before them."""
    batch, seq, heads, head_dim, state = 1, 262_144 + 64, 128, 64, 64
    key = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(key[0], (batch, seq, heads, head_dim), "bfloat16")
    dt = jax.numpy.full((batch, seq, heads), 0.05, "bfloat16")
    B, C = (jax.random.normal(k, (batch, seq, 1, state), "bfloat16") for k in key[1:3])
    A = -jax.numpy.linspace(0.5, 2.0, heads)
    forward = jax.jit(
        lambda x, dt, B, C, state: jax_ssd.mamba2(
            x, dt, A, B, C, initial_state=state, return_final_state=True, implementation=("cuda", "cutile")
        )
    )
    zero = jax.numpy.zeros((batch, heads, head_dim, state))
    assert x.size > 2**31
    y, final = forward(x, dt, B, C, zero)
    cut = seq - 256
    _, before = forward(x[:, :cut], dt[:, :cut], B[:, :cut], C[:, :cut], zero)
    rest, last = forward(x[:, cut:], dt[:, cut:], B[:, cut:], C[:, cut:], before)
    assert error(np.asarray(y[:, cut:]), np.asarray(rest, np.float64)) < 2e-3
    assert error(np.asarray(final), np.asarray(last, np.float64)) < 1e-3
