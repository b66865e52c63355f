"""The operator's contract, the same for every implementation.

"cutile" runs its kernels: on the GPU where there is one, else in the tile emulator.
"""

import functools
import math
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd.cases import BY_NAME, TABLE, Case, differentiable
from jax_ssd.tools import check
from tests import emulation

INFINITY = float("inf")


def gpu_here() -> bool:
    return jax.default_backend() == "gpu"


@pytest.fixture(params=["reference", "xla", "cutile"])
def implementation(request, monkeypatch):
    if request.param == "cutile" and not gpu_here():
        emulation.emulate(monkeypatch)
    return request.param


@pytest.fixture
def mamba2(implementation):
    return functools.partial(jax_ssd.mamba2, implementation=implementation, precision="highest")


against_the_reference = pytest.mark.parametrize("implementation", ["xla", "cutile"], indirect=True)


@functools.cache
def truth(name: str) -> dict[str, np.ndarray]:
    return check.evaluate(BY_NAME[name], "reference", wide=True)


@pytest.mark.parametrize("name", [case.name for case in TABLE])
def test_agrees_with_float64(name, implementation):
    for result in check.compare(BY_NAME[name], check.evaluate(BY_NAME[name], implementation), truth(name)):
        assert result.passed, result


# Closed forms.


def test_scalar_recurrence_has_known_values(mamba2):
    one = jnp.ones((1, 40, 1, 1))
    y = mamba2(one, jnp.full((1, 40, 1), 0.5), -jnp.ones(1), one, one, chunk_size=16)[0, :, 0, 0]
    np.testing.assert_allclose(y[:2], [0.5, 0.8032653], rtol=2e-6)
    np.testing.assert_allclose(y[-1], 1.2707470, rtol=2e-6)


def test_one_step_through_softplus_has_known_values_and_gradients(mamba2):
    one = jnp.ones((1, 1, 1, 1))

    def y(dt, A):
        return mamba2(one, dt, A, one, one, dt_softplus=True, initial_state=jnp.ones((1, 1, 1, 1))).sum()

    value, (ddt, dA) = jax.value_and_grad(y, (0, 1))(jnp.full((1, 1, 1), 25.0), jnp.full(1, -0.01))
    np.testing.assert_allclose([value, ddt[0, 0, 0], dA[0]], [25.7788008, 0.9922120, 19.4700196], rtol=3e-6)


@pytest.mark.parametrize("raw, expected", [(-20.0, 2.06115e-9), (-16.0, 1.12535e-7), (100.0, 100.0)])
def test_softplus_is_stable(raw, expected, mamba2):
    one = jnp.ones((1, 1, 1, 1))
    y = mamba2(one, jnp.full((1, 1, 1), raw), -jnp.ones(1), one, one, dt_softplus=True)
    np.testing.assert_allclose(y[0, 0, 0, 0], expected, rtol=1e-5)


def base_arrays(seed=0, **changes) -> dict[str, Any]:
    """x, dt, A, B, C, D and initial_state with three chunks and a tail at chunk_size 16."""
    plain = {"gate": False, "bias": False, "softplus": False}
    arrays = Case("", **{**plain, "seq": 53, "state": 16, "head_dim": 8, **changes}).inputs(seed)
    arrays["dt"] = arrays["dt"] * 0.3
    return arrays


def test_zero_dt_reads_the_initial_state_only(mamba2):
    arrays = base_arrays(seq=40)
    arrays["dt"] = jnp.zeros_like(arrays["dt"])
    weight = jnp.asarray(np.random.default_rng(1).standard_normal(arrays["x"].shape), jnp.float32)

    def objective(arrays):
        y, final = mamba2(**arrays, chunk_size=16, return_final_state=True)
        return (y * weight).sum() + final.sum(), (y, final)

    (_, (y, final)), gradients = jax.value_and_grad(objective, has_aux=True)(arrays)
    C = np.repeat(arrays["C"], 2, axis=2)
    expected = np.einsum("bhpn,bthn->bthp", arrays["initial_state"], C) + np.asarray(arrays["D"]) * np.asarray(
        arrays["x"]
    )
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(final, arrays["initial_state"])
    np.testing.assert_allclose(gradients["x"], np.asarray(arrays["D"]) * np.asarray(weight), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(gradients["A"], 0)
    np.testing.assert_array_equal(gradients["B"], 0)
    # ddt_t = <S_t, A h0 + x_t B_t^T> with S_t the sum of later cotangents of the state, which is not zero.
    terms = np.einsum("bthp,bthn->bthpn", weight, C)
    adjoint = 1.0 + np.cumsum(terms[:, ::-1], axis=1)[:, ::-1]
    B = np.repeat(arrays["B"], 2, axis=2)
    moved = (
        np.einsum("bthp,bthn->bthpn", arrays["x"], B)
        + np.asarray(arrays["A"])[:, None, None] * np.asarray(arrays["initial_state"])[:, None]
    )
    np.testing.assert_allclose(gradients["dt"], (adjoint * moved).sum((-2, -1)), rtol=2e-4, atol=2e-3)


def test_total_decay_leaves_the_token_itself(mamba2):
    arrays = base_arrays()
    arrays["dt"] = jnp.ones_like(arrays["dt"])
    arrays["A"] = jnp.full(4, -1e4)

    def objective(arrays):
        y = mamba2(**arrays, chunk_size=16)
        return (y * y).sum(), y

    (_, y), gradients = jax.value_and_grad(objective, has_aux=True)(arrays)
    B, C = (np.repeat(arrays[name], 2, axis=2) for name in "BC")
    expected = (B * C).sum(-1)[..., None] * arrays["x"] + np.asarray(arrays["D"]) * np.asarray(arrays["x"])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(gradients["A"], 0)
    np.testing.assert_array_equal(gradients["initial_state"], 0)
    assert all(np.isfinite(g).all() for g in gradients.values())


@against_the_reference
def test_growth_agrees_with_the_recurrence(mamba2):
    arrays = {**base_arrays(seq=64), "A": jnp.full(4, 0.1)}
    expected = jax_ssd.mamba2(**arrays, implementation="reference")
    assert check.relative_error(np.asarray(mamba2(**arrays, chunk_size=16)), np.asarray(expected)) < 1e-5


@pytest.mark.parametrize("size, bar", [(-1e3, 1e-3), (-1e5, 1e-2)])
def test_small_decays_keep_their_digits_after_a_huge_one(size, bar, mamba2):
    arrays = base_arrays(heads=1, groups=1, batch=1, seq=96, skip=None)
    steps = np.full((1, 96, 1), 1e-3, np.float32)
    steps[0, 3::32] = -size  # in the state's chunk and in those that follow
    arrays |= {"dt": jnp.asarray(steps), "A": -jnp.ones(1)}
    with jax.enable_x64(True):
        wide: dict[str, Any] = {name: jnp.asarray(np.asarray(a), jnp.float64) for name, a in arrays.items()}
        expected = np.asarray(jax_ssd.mamba2(**wide, implementation="reference"))
    y = np.asarray(mamba2(**arrays, chunk_size=32))
    # Beside x there, which is as large as the step, what the small steps add would not show.
    small = np.ones(96, bool)
    small[3::32] = False
    assert check.relative_error(y[:, small], expected[:, small]) < bar
    for chunk in range(3):  # the tokens after the huge step alone
        after = slice(32 * chunk + 4, 32 * chunk + 32)
        assert check.relative_error(y[:, after], expected[:, after]) < bar


def decays_of_all_sizes(implementation, dtype=jnp.float32):
    """y, the final state and every gradient with dt * A from -1 to -1e4 beside each other in a chunk."""
    arrays = base_arrays(heads=2, groups=1)
    steps = np.full((2, 53, 2), 5e-6, np.float32)
    steps[:, ::3] = np.resize([1e-4, 1e-3, 1e-2, 0.1, 1.0], 18)[None, :, None]
    arrays |= {"dt": steps, "A": np.array([-1e4, -5e3], np.float32)}
    weight = np.random.default_rng(1).standard_normal(arrays["x"].shape)

    def objective(arrays):
        y, final = jax_ssd.mamba2(
            **arrays, chunk_size=16, precision="highest", return_final_state=True, implementation=implementation
        )
        return (y * jnp.asarray(weight, y.dtype)).sum() + final.sum(), {"y": y, "final_state": final}

    given = {name: jnp.asarray(np.asarray(a), dtype) for name, a in arrays.items()}
    (_, results), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(given)
    return jax.tree.map(np.asarray, {**results, **gradients})


@functools.cache
def decays_of_all_sizes_in_float64():
    with jax.enable_x64(True):
        return decays_of_all_sizes("reference", jnp.float64)


def test_decays_of_all_sizes_in_one_chunk(implementation):
    got = decays_of_all_sizes(implementation)
    for name, expected in decays_of_all_sizes_in_float64().items():
        assert np.isfinite(got[name]).all(), name
        # A decay after one of -1e3 is the difference of two sums near 160: about 1e-5 relative.
        assert check.relative_error(got[name], expected) < 1e-4, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_keeps_small_additions(dtype, mamba2, implementation):
    ones = jnp.ones((1, 1000, 1, 1), dtype)
    dt = jnp.full((1, 1000, 1), 0.001)
    _, final = mamba2(ones, dt, jnp.zeros(1), ones, ones, initial_state=jnp.ones((1, 1, 1, 1)), return_final_state=True)
    # For products of bfloat16 factors 0.001 * x is rounded to one, by at most 2^-9 of itself; the sum never is.
    exact = dtype == "float32" or implementation == "reference"
    np.testing.assert_allclose(final[0, 0, 0, 0], 2.0, atol=5e-5 if exact else 2e-3)


@pytest.mark.parametrize("raw", [19.9, 20.1])
def test_gradients_are_continuous_where_others_switch_softplus_off(raw, mamba2):
    arrays = base_arrays(batch=1)
    arrays["dt"] = jnp.full_like(arrays["dt"], raw)

    def y(dt):
        return mamba2(**{**arrays, "dt": dt, "A": arrays["A"] * 1e-3}, dt_softplus=True, chunk_size=16).sum()

    gradient = jax.grad(y)(arrays["dt"])
    shifted = jax.grad(y)(jnp.full_like(arrays["dt"], 20.0))
    assert check.relative_error(np.asarray(gradient), np.asarray(shifted)) < 0.02


def test_gradient_at_the_clamp(mamba2):
    arrays = base_arrays(batch=1, seq=40, heads=2, groups=1)
    values = np.tile(np.array([0.05, 0.1, 0.3, 0.5, 0.7], np.float32), 8)
    arrays["dt"] = jnp.asarray(np.stack([values, values[::-1]], -1)[None])

    def y(dt, limit):
        return mamba2(**{**arrays, "dt": dt}, dt_limit=limit, chunk_size=16).sum()

    clamped = jnp.clip(arrays["dt"], 0.1, 0.5)
    free = jax.grad(y)(clamped, (0.0, INFINITY))
    inside = (arrays["dt"] >= np.float32(0.1)) & (arrays["dt"] <= np.float32(0.5))
    np.testing.assert_allclose(jax.grad(y)(arrays["dt"], (0.1, 0.5)), jnp.where(inside, free, 0), rtol=1e-4, atol=1e-5)


# Lengths, splits, packing.


@against_the_reference
@pytest.mark.parametrize("seq", [0, 1, 16, 17])
def test_any_length(seq, mamba2):
    arrays = base_arrays(seq=seq)
    y, final = mamba2(**arrays, chunk_size=16, return_final_state=True)
    expected_y, expected = jax_ssd.mamba2(**arrays, return_final_state=True, implementation="reference")
    np.testing.assert_allclose(y, expected_y, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(final, expected, rtol=2e-5, atol=2e-5)
    if seq == 0:
        np.testing.assert_array_equal(final, arrays["initial_state"])


@pytest.mark.parametrize("axis", ["batch", "seq", "heads", "head_dim", "state"])
def test_zero_sized_axes_give_empty_results_and_zero_gradients(axis, mamba2):
    sizes: dict[str, Any] = {"batch": 1, "seq": 5, "heads": 2, "groups": 1, "head_dim": 4, "state": 8} | {axis: 0}
    if axis == "heads":
        sizes["groups"] = 0
    arrays = Case("", **sizes, gate=True, bias=True).inputs()

    def total(moving):
        y, final = mamba2(**moving, return_final_state=True)
        return y.sum() + final.sum()

    gradients = jax.grad(total)(arrays)
    # Without tokens the state is handed through; without a state y is D x, gated.
    kept = {"seq": ("initial_state",), "state": ("x", "D", "z")}.get(axis, ())
    for name, array in arrays.items():
        assert gradients[name].shape == array.shape
        if name not in kept:
            np.testing.assert_array_equal(gradients[name], 0, err_msg=name)
    y, final = mamba2(**arrays, return_final_state=True)
    assert (y.shape, final.shape) == (arrays["x"].shape, arrays["initial_state"].shape)
    if axis == "seq":
        np.testing.assert_array_equal(gradients["initial_state"], 1)
        np.testing.assert_array_equal(final, arrays["initial_state"])
    if axis == "state":
        gate = jax.nn.silu(arrays["z"])
        np.testing.assert_allclose(y, arrays["D"][None, None] * arrays["x"] * gate, rtol=1e-6)
        np.testing.assert_allclose(gradients["x"], arrays["D"][None, None] * gate, rtol=1e-6)


@against_the_reference
def test_lower_dt_limit_does_not_decay_the_state_in_padding(mamba2):
    arrays = base_arrays(seq=36)
    options = {"dt_limit": (0.5, 1.0), "return_final_state": True}
    _, final = mamba2(**arrays, **options, chunk_size=16)
    _, expected = jax_ssd.mamba2(**arrays, **options, implementation="reference")
    np.testing.assert_allclose(final, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("split", [1, 16, 40])
def test_two_halves_equal_the_whole(split, mamba2, implementation):
    arrays = base_arrays()
    whole = mamba2(**arrays, chunk_size=16, return_final_state=True)
    time = {name: a for name, a in arrays.items() if name in ("x", "dt", "B", "C")}
    rest = {name: a for name, a in arrays.items() if name in ("A", "D")}
    first, state = mamba2(
        **{n: a[:, :split] for n, a in time.items()},
        **rest,
        initial_state=arrays["initial_state"],
        chunk_size=16,
        return_final_state=True,
    )
    second, final = mamba2(
        **{n: a[:, split:] for n, a in time.items()},
        **rest,
        initial_state=state,
        chunk_size=16,
        return_final_state=True,
    )
    pieces = (jnp.concatenate([first, second], axis=1), final)
    for got, expected in zip(pieces, whole, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
        # At a chunk's edge the two do the very same sums; XLA though compiles a loop of one chunk in its own way.
        if split % 16 == 0 and implementation != "xla":
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_of_several_chunks_are_bitwise_the_whole_in_xla(dtype):
    cut = 128  # a piece of one chunk is no loop to XLA, which then compiles it in its own way
    arrays = Case("", batch=1, seq=256, head_dim=8, state=16, dtype=dtype, gate=False).inputs()
    run = jax.jit(
        functools.partial(
            jax_ssd.mamba2, dt_softplus=True, chunk_size=64, return_final_state=True, implementation="xla"
        )
    )
    time = ("x", "dt", "B", "C")
    y, final = run(**arrays)
    first, state = run(**{n: a[:, :cut] if n in time else a for n, a in arrays.items()})
    rest = {n: a[:, cut:] if n in time else a for n, a in arrays.items()}
    second, last = run(**{**rest, "initial_state": state})
    np.testing.assert_array_equal(jnp.concatenate([first, second], 1), y)
    np.testing.assert_array_equal(last, final)


def packed_arrays(lengths, seed=0):
    arrays = base_arrays(seed, batch=1, seq=sum(lengths), initial_state=False)
    return arrays, np.concatenate([[0], np.cumsum(lengths)])


@pytest.mark.parametrize(
    "lengths, chunk_size", [((5, 201, 56), 64), ((5, 201, 56), 16), ((1, 1, 40), 16), ((16, 16, 16), 16)]
)
def test_packed_segments_equal_separate_runs(lengths, chunk_size, mamba2):
    arrays, edges = packed_arrays(lengths)
    ids = np.repeat([7, 2, 7], lengths)[None]
    state = jnp.asarray(np.random.default_rng(2).standard_normal((1, 4, 8, 16)), jnp.float32)
    packed, final = mamba2(
        **arrays, segment_ids=jnp.asarray(ids), initial_state=state, chunk_size=chunk_size, return_final_state=True
    )
    np.testing.assert_array_equal(
        packed, mamba2(**arrays, segment_ids=jnp.asarray(ids + 1000), initial_state=state, chunk_size=chunk_size)
    )
    for number, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
        piece = {n: a[:, start:stop] if n in ("x", "dt", "B", "C") else a for n, a in arrays.items()}
        first: dict[str, Any] = {"initial_state": state} if number == 0 else {}
        alone, last = jax_ssd.mamba2(**piece, **first, return_final_state=True, implementation="reference")
        np.testing.assert_allclose(packed[:, start:stop], alone, rtol=5e-5, atol=5e-5)
    np.testing.assert_allclose(final, last, rtol=5e-5, atol=5e-5)


def padded_rows(side):
    """Arrays of three rows, and which tokens of theirs are real."""
    real = [np.arange(201) < n if side == "right" else np.arange(201) >= 201 - n for n in (5, 201, 56)]
    return base_arrays(batch=3, seq=201), np.stack(real)


@functools.cache
def rows_alone(side):
    arrays, real = padded_rows(side)
    results = []
    for row in range(3):
        alone = {n: a[row][real[row]] if n in ("x", "dt", "B", "C") else a for n, a in arrays.items()}
        alone["initial_state"] = arrays["initial_state"][row]
        results.append(jax_ssd.mamba2(**alone, return_final_state=True, implementation="reference"))
    return results


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_their_own_lengths_and_states(side, mamba2):
    """Rows of 5, 201 and 56 tokens, padded to the longest, equal runs alone from their own states."""
    arrays, real = padded_rows(side)
    y, final = mamba2(**arrays, segment_ids=jnp.asarray(np.where(real, 0, -1)), chunk_size=64, return_final_state=True)
    np.testing.assert_array_equal(np.asarray(y)[~real], 0)
    for row, expected in enumerate(rows_alone(side)):
        np.testing.assert_allclose(y[row][real[row]], expected[0], rtol=5e-5, atol=5e-5)
        np.testing.assert_allclose(final[row], expected[1], rtol=5e-5, atol=5e-5)


def test_padding_tokens_are_invisible(mamba2):
    arrays = base_arrays(seq=40)
    real = np.ones(40, bool)
    real[[0, 1, 2, 17, 30, 39]] = False  # at the start, inside, at the end; id 4 goes on across position 17
    ids = np.where(real, np.repeat([4, 9], [25, 15]), -3)
    weight = jnp.asarray(np.random.default_rng(3).standard_normal((2, 40, 4, 8)), jnp.float32)

    def objective(arrays, ids, weight):
        y, final = mamba2(**arrays, segment_ids=ids, chunk_size=16, return_final_state=True)
        return (y * weight).sum() + final.sum(), (y, final)

    run = jax.value_and_grad(objective, has_aux=True)
    (_, (y, final)), gradients = run(arrays, jnp.broadcast_to(jnp.asarray(ids), (2, 40)), weight)
    np.testing.assert_array_equal(y[:, ~real], 0)
    kept = {n: a[:, real] if n in ("x", "dt", "B", "C") else a for n, a in arrays.items()}
    (_, (short, last)), expected = run(
        kept, jnp.broadcast_to(jnp.asarray(ids[real]), (2, int(real.sum()))), weight[:, real]
    )
    np.testing.assert_allclose(y[:, real], short, rtol=5e-5, atol=5e-5)
    np.testing.assert_allclose(final, last, rtol=5e-5, atol=5e-5)
    for name, gradient in gradients.items():
        if name in ("x", "dt", "B", "C"):
            np.testing.assert_array_equal(gradient[:, ~real], 0)
            gradient = gradient[:, real]
        np.testing.assert_allclose(gradient, expected[name], rtol=5e-4, atol=5e-4)


@functools.cache
def of_200_tokens():
    """Arrays, and y and gradients of its squares by the definition."""
    arrays = base_arrays(seq=200)
    return arrays, y_and_gradients(arrays, implementation="reference")


def y_and_gradients(arrays, gradients=True, **options):
    def total(arrays):
        y = jax_ssd.mamba2(**arrays, **options)
        return (y**2).sum(), y

    if not gradients:
        return {"y": total(arrays)[1]}
    (_, y), found = jax.jit(jax.value_and_grad(total, has_aux=True))(arrays)
    return {"y": y, **found}


@pytest.mark.parametrize(
    "implementation, chunk_size",
    [("xla", chunk) for chunk in (1, 7, 16, 32, 40, 50, 64, 100, 128, 200, 256)]
    + [("cutile", chunk) for chunk in (16, 32, 64, 128)],
    indirect=["implementation"],
)
def test_results_do_not_depend_on_the_chunk(chunk_size, implementation):
    arrays, expected = of_200_tokens()
    gradients = implementation == "cutile" or chunk_size in (40, 50, 256)  # others cost a compilation more each
    options = {"chunk_size": chunk_size, "precision": "highest", "implementation": implementation}
    got = y_and_gradients(arrays, gradients, **options)
    np.testing.assert_allclose(got["y"], expected["y"], rtol=5e-5, atol=5e-5)
    for name, array in got.items():
        assert check.relative_error(np.asarray(array), np.asarray(expected[name])) < 1e-4, name


def test_the_future_does_not_move_the_past(mamba2):
    arrays = base_arrays()
    run = jax.jit(functools.partial(mamba2, chunk_size=16))
    y = run(**arrays)
    for name in ("x", "dt", "B", "C"):
        changed = run(**{**arrays, name: arrays[name].at[:, 21:].add(1.0)})
        np.testing.assert_array_equal(changed[:, :21], y[:, :21])


@pytest.mark.parametrize("name", ["x", "dt", "B", "C"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_poisoned_token_stays_in_its_row_and_future(name, poison, mamba2):
    arrays = base_arrays(groups=4)
    clean = np.asarray(mamba2(**arrays, chunk_size=16))
    where = (0, 20, 1) if arrays[name].ndim == 3 else (0, 20, 1, 3)
    y = np.asarray(mamba2(**{**arrays, name: arrays[name].at[where].set(poison)}, chunk_size=16))
    np.testing.assert_array_equal(y[1], clean[1])
    np.testing.assert_allclose(y[0, :20], clean[0, :20], rtol=1e-4, atol=1e-4)  # a poisoned chunk takes another path
    np.testing.assert_array_equal(np.delete(y[0], 1, axis=1), np.delete(clean[0], 1, axis=1))
    if np.isnan(poison):
        assert np.isnan(y[0, 20, 1]).any()
        if name != "C":
            assert np.isnan(y[0, -1, 1]).any()


def test_a_step_that_is_nan_is_not_clamped(mamba2):
    arrays = base_arrays()
    arrays["dt"] = arrays["dt"].at[0, 20, 1].set(jnp.nan)
    y, final = mamba2(**arrays, dt_limit=(0.01, 0.5), chunk_size=16, return_final_state=True)
    assert np.isnan(y[0, 20:, 1]).all() and np.isnan(final[0, 1]).all()
    assert np.isfinite(y[0, :20]).all() and np.isfinite(y[1]).all() and np.isfinite(y[0, :, [0, 2, 3]]).all()


def test_the_xla_implementation_is_linear_in_the_length():
    """No array has the number of chunks twice, none has groups expanded to heads, and no sum runs over the row."""
    seq, heads, state = 4096, 8, 64
    case = Case("", batch=1, seq=seq, heads=heads, head_dim=4, groups=1, state=state, chunk_size=16)
    arrays = jax.eval_shape(case.inputs)

    def total(arrays):
        y, final = jax_ssd.mamba2(**arrays, dt_softplus=True, chunk_size=16, return_final_state=True)
        return (y**2).sum() + final.sum()

    with jax.default_device(jax.devices("cpu")[0]):
        text = jax.jit(jax.grad(total)).trace(arrays).lower(lowering_platforms=("cpu",)).as_text()
    shapes = {
        tuple(int(n) for n in re.findall(r"\d+(?=x)", dims)) for dims in re.findall(r"tensor<([\dx]+x)\w+>", text)
    }
    chunks = seq // 16
    assert any(chunks in shape for shape in shapes)
    assert not [shape for shape in shapes if shape.count(chunks) > 1 or shape.count(seq) > 1]
    states = chunks * heads * 4 * state
    assert max(map(math.prod, shapes)) <= states < seq * heads * state
    assert "reduce_window" in text  # the sums of chunks
    sums = re.findall(r"reduce_window.*?-> tensor<([\dx]+)xf32>", text, flags=re.DOTALL)
    assert sums and not [dims for dims in sums if str(seq) in dims.split("x") or str(chunks) in dims.split("x")]


# Types, shapes of the call, derivatives.


SIX_ROWS = np.arange(6)[:, None] + np.where(np.arange(20) < 7, 0, 9)  # labels


@functools.cache
def six_rows():
    arrays = base_arrays(batch=6, seq=20)
    return jax_ssd.mamba2(
        **arrays, segment_ids=jnp.asarray(SIX_ROWS), return_final_state=True, implementation="reference"
    )


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 0)])
def test_any_number_of_leading_axes(lead, mamba2):
    arrays = base_arrays(batch=6, seq=20)
    per_row = ("x", "dt", "B", "C", "initial_state")
    shaped = {
        n: a[: int(np.prod(lead, dtype=int))].reshape(*lead, *a.shape[1:]) if n in per_row else a
        for n, a in arrays.items()
    }
    count = int(np.prod(lead, dtype=int))
    ids = jnp.asarray(SIX_ROWS[:count].reshape(*lead, 20))
    y, final = mamba2(**shaped, segment_ids=ids, chunk_size=16, return_final_state=True)
    assert y.shape == shaped["x"].shape
    assert final.shape == (*lead, 4, 8, 16)
    expected = six_rows()
    np.testing.assert_allclose(y, expected[0][:count].reshape(y.shape), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(final, expected[1][:count].reshape(final.shape), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_types_of_results_and_gradients(dtype, mamba2):
    arrays = Case("", seq=20, dtype=dtype, dt_dtype=dtype).inputs()
    arrays = {n: a.astype(dtype) if n in ("A", "D", "dt_bias", "initial_state") else a for n, a in arrays.items()}
    y, final = mamba2(**arrays, return_final_state=True)
    assert (y.dtype, final.dtype) == (jnp.dtype(dtype), jnp.float32)
    gradients = jax.grad(lambda arrays: mamba2(**arrays).astype(jnp.float32).sum())(arrays)
    assert {n: g.dtype for n, g in gradients.items()} == {n: a.dtype for n, a in arrays.items()}


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_types_in_float64(implementation, x64):
    case = BY_NAME["packed"]
    arrays = {n: a.astype("float64") if n in differentiable(case.inputs()) else a for n, a in case.inputs().items()}
    run = functools.partial(jax_ssd.mamba2, **case.options(), return_final_state=True, implementation=implementation)
    y, final = jax.eval_shape(lambda: run(**arrays))
    assert (y.dtype, final.dtype) == (jnp.float64, jnp.float64)


def test_inputs_of_32_bits_where_jax_has_64(implementation):
    """Labels may then be of 64 bits; everything else is as it was."""
    arrays = base_arrays(batch=1, seq=40, heads=2, groups=1)
    ids = np.repeat([3, -1, 3, 0], 10)[None]

    options: dict[str, Any] = {"return_final_state": True, "chunk_size": 16, "precision": "highest"}
    expected = jax_ssd.mamba2(**arrays, segment_ids=ids, **options, implementation="reference")
    with jax.enable_x64(True):
        given = {n: jnp.asarray(np.asarray(a)) for n, a in arrays.items()}
        labels = np.where(ids < 0, ids, ids + 2**40)

        def run(given):
            return jax_ssd.mamba2(**given, segment_ids=labels, **options, implementation=implementation)

        got = run(given)
        gradients = jax.eval_shape(jax.grad(lambda given: sum(a.sum() for a in run(given))), given)
    assert {array.dtype for array in (*got, *gradients.values())} == {jnp.dtype(jnp.float32)}
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_values_and_gradients_in_float64():
    for name, array in check.evaluate(BY_NAME["packed"], "xla", wide=True).items():
        assert check.relative_error(array, truth("packed")[name]) < 1e-12, name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1e-6, 1e-7])
def test_float16_keeps_small_steps(size, packed, mamba2):
    """Products of steps with x are far below what float16 holds, results are not."""
    arrays = float16_arrays(scale={"x": 30, "B": 30, "C": 10})
    arrays["dt"] = jnp.full((1, 40, 2), size, jnp.float32)
    check_float16(arrays, packed, mamba2)


@pytest.mark.parametrize("packed", [False, True])
def test_float16_keeps_large_states(packed, mamba2):
    arrays = float16_arrays(scale={"C": 1e-3})
    state = np.random.default_rng(1).standard_normal((1, 2, 8, 16)) * 1e6
    check_float16({**arrays, "initial_state": jnp.asarray(state, jnp.float32)}, packed, mamba2)


def float16_arrays(scale: dict[str, float]) -> dict[str, Any]:
    plain = {"gate": False, "bias": False, "softplus": False, "skip": None, "initial_state": False}
    arrays = Case("", batch=1, seq=40, heads=2, groups=1, head_dim=8, state=16, **plain).inputs()
    return {
        name: (array * scale.get(name, 1)).astype("float16") if name in ("x", "B", "C") else array
        for name, array in arrays.items()
    }


def check_float16(arrays: dict[str, Any], packed: bool, mamba2) -> None:
    if packed:
        arrays["segment_ids"] = jnp.asarray(np.repeat([0, -1, 0, 1], 10)[None])
    got = jax.jit(functools.partial(mamba2, chunk_size=16, return_final_state=True))(**arrays)
    with jax.enable_x64(True):
        exact: dict[str, Any] = {
            n: np.asarray(a, np.int32 if n == "segment_ids" else np.float64) for n, a in arrays.items()
        }
        wide = jax_ssd.mamba2(**exact, return_final_state=True, implementation="reference")
    for one, expected in zip(got, wide, strict=True):
        assert check.relative_error(np.asarray(one, np.float64), np.asarray(expected)) < 1e-3


def test_integer_arguments_take_no_cotangent(mamba2):
    arrays = BY_NAME["packed"].inputs()
    ids = arrays.pop("segment_ids")
    gradients = jax.grad(lambda arrays, ids: mamba2(**arrays, segment_ids=ids).sum(), argnums=(0, 1), allow_int=True)(
        arrays, ids
    )
    assert gradients[1].dtype == jax.dtypes.float0


def test_repeated_calls_give_the_same_bits(mamba2):
    arrays = base_arrays(groups=1)
    run = jax.jit(jax.value_and_grad(lambda arrays: (mamba2(**arrays, chunk_size=16) ** 2).sum()))
    first = run(arrays)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, run(arrays), first)


# Properties over random shapes.

SHAPES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "seq": st.integers(1, 40),
        "heads": st.sampled_from([1, 2, 3, 4, 6]),
        "head_dim": st.sampled_from([1, 3, 8]),
        "state": st.sampled_from([1, 5, 16]),
        "skip": st.sampled_from([None, "head", "channel"]),
        "gate": st.booleans(),
        "bias": st.booleans(),
        "packed": st.booleans(),
        "initial_state": st.booleans(),
    }
)
# An example compiles several programs, so there are few.
few = functools.partial(hypothesis.settings, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])


@against_the_reference
@few(max_examples=8)
@hypothesis.given(sizes=SHAPES, data=st.data())
@pytest.mark.slow
def test_random_calls_split_anywhere_agree_with_the_reference(implementation, sizes, data):
    groups = data.draw(st.sampled_from([g for g in (1, 2, 3, sizes["heads"]) if sizes["heads"] % g == 0]))
    split = data.draw(st.integers(0, sizes["seq"]))
    case = Case("", **sizes, groups=groups)
    arrays = case.inputs(data.draw(st.integers(0, 3)))
    options = {"dt_softplus": True, "dt_limit": (0.01, 2.0), "return_final_state": True}
    y, final = jax_ssd.mamba2(**arrays, **options, implementation="reference")
    run = functools.partial(
        jax_ssd.mamba2, **options, chunk_size=16, precision="highest", implementation=implementation
    )
    time = [n for n in arrays if n in ("x", "dt", "B", "C", "z", "segment_ids")]
    first, state = run(**{n: a[:, :split] if n in time else a for n, a in arrays.items()})
    cut = {n: a[:, split:] if n in time else a for n, a in arrays.items()} | {"initial_state": state}
    if "segment_ids" in arrays:  # a boundary at the cut belongs to the caller, who then hands over zeros
        labels = np.asarray(arrays["segment_ids"])
        hypothesis.assume(split in (0, sizes["seq"]) or (labels >= 0).all())
        if 0 < split < sizes["seq"]:
            new = labels[:, split] != labels[:, split - 1]
            cut["initial_state"] = jnp.where(jnp.asarray(new)[:, None, None, None], 0, state)
    second, last = run(**cut)
    np.testing.assert_allclose(np.concatenate([first, second], 1), y, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(last, final, rtol=1e-4, atol=1e-4)


@few(max_examples=3)
@hypothesis.given(sizes=SHAPES, data=st.data())
def test_random_futures_do_not_move_the_past(implementation, sizes, data):
    case = Case("", **{**sizes, "seq": 40, "packed": False}, groups=1)
    cut, name = data.draw(st.integers(1, 39)), data.draw(st.sampled_from(["x", "dt", "B", "C"]))
    arrays = case.inputs(data.draw(st.integers(0, 3)))
    run = jax.jit(
        functools.partial(
            jax_ssd.mamba2, dt_softplus=True, chunk_size=16, precision="highest", implementation=implementation
        )
    )
    other = case.inputs(7)[name][:, cut:]
    changed = run(**{**arrays, name: arrays[name].at[:, cut:].set(other)})
    np.testing.assert_array_equal(changed[:, :cut], run(**arrays)[:, :cut])
    assert not np.array_equal(changed[:, cut:], run(**arrays)[:, cut:])


MAPPABLE = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state", "segment_ids")


@functools.cache
def packed_value_and_gradients(implementation):
    run = functools.partial(jax_ssd.mamba2, chunk_size=16, precision="highest", implementation=implementation)

    def value_and_gradients(arrays):
        ids = arrays["segment_ids"]
        moving = {n: a for n, a in arrays.items() if n != "segment_ids"}
        return jax.value_and_grad(lambda moving: (run(**moving, segment_ids=ids) ** 2).sum())(moving)

    return jax.jit(value_and_gradients)


@few(max_examples=4)
@hypothesis.given(mapped=st.sets(st.sampled_from(MAPPABLE), min_size=1))
@pytest.mark.slow
def test_vmap_over_any_subset_of_arguments_equals_a_loop(implementation, mapped):
    arrays = base_arrays(batch=2, seq=36, heads=2, groups=1, gate=True, bias=True)
    arrays["segment_ids"] = jnp.asarray(np.repeat([[3, -1, 2, 2], [0, 1, 1, 5]], 9, axis=1))
    run = packed_value_and_gradients(implementation)

    def changed(name, i):
        return jnp.roll(arrays[name], 5 * i, 1) if name == "segment_ids" else arrays[name] * (1.0, 0.5, 1.5)[i]

    stacked = {n: jnp.stack([changed(n, i) for i in range(3)]) if n in mapped else a for n, a in arrays.items()}
    axes = {n: 0 if n in mapped else None for n in arrays}
    value, gradients = jax.jit(jax.vmap(run, in_axes=(axes,)))(stacked)
    for i in range(3):
        expected_value, expected = run({n: a[i] if n in mapped else a for n, a in stacked.items()})
        np.testing.assert_allclose(value[i], expected_value, rtol=1e-4)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient[i], expected[name], rtol=2e-3, atol=2e-3)
