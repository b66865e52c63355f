"""The Mamba-3 backward kernels on a GPU: accuracy with every option, repeatability, a NaN in one row."""

import functools

import jax
import numpy as np
import pytest

import jax_ssd
from jax_ssd.tools.check import relative_error
from tests.mamba3_gradients import CASES, KERNELS, arguments, bar, exact_gradients, flat, gradients


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_the_backward_is_by_kernels(changes):
    arrays, cotangents, options = arguments(**changes)
    call = functools.partial(gradients, implementation=KERNELS, options=tuple(options.items()))
    paths = jax_ssd.dispatch_paths(call, arrays, cotangents, platform="cuda")
    assert [path.implementation for path in paths if path.op == "mamba3_backward"] == ["cuda"]


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_gradients_agree_with_float64(changes):
    arrays, cotangents, options = arguments(**changes)
    options = tuple(options.items())
    actual = flat(gradients(arrays, cotangents, implementation=KERNELS, options=options))
    for name, expected in exact_gradients(arrays, cotangents, options).items():
        assert relative_error(actual[name], expected) <= bar(changes), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_boundaries_that_move_need_no_other_program(dtype):
    changes = {**CASES["packed"], "dtype": dtype}
    arrays, cotangents, options = arguments(**changes)
    options, traces = tuple(options.items()), []

    @jax.jit
    def call(arrays):
        traces.append(arrays)
        return gradients(arrays, cotangents, implementation=KERNELS, options=options)

    before = flat(call(arrays))
    moved = {**arrays, "cu_seqlens": np.asarray((0, 1, 1, 66, 67, 129, 130), np.int32)}
    after = flat(call(moved))
    assert len(traces) == 1
    for name, expected in exact_gradients(moved, cotangents, options).items():
        assert relative_error(after[name], expected) <= bar(changes), name
        assert not np.array_equal(after[name], before[name]), name


@pytest.mark.parametrize("kind", ["siso_model", "model", "siso"])
def test_errors_of_the_angles_do_not_grow_with_the_length(kind):
    changes = {**CASES[kind], "batch": 1, "heads": 2, "groups": 1, "seq": 3000}
    arrays, cotangents, options = arguments(**changes)
    options = tuple(options.items())
    actual = flat(gradients(arrays, cotangents, implementation=KERNELS, options=options))
    expected = exact_gradients(arrays, cotangents, options)
    assert relative_error(actual["['angles']"], expected["['angles']"]) <= 1e-2


MODEL = {"batch": 2, "seq": 512, "rank": 4, "heads": 8, "state": 128, "head_dim": 64, "pairs": 32, "norm": True}


@pytest.mark.parametrize("changes", [MODEL, {**MODEL, "dtype": "float32"}, CASES["packed_model"]], ids=str)
def test_ten_calls_give_the_same_bits(changes):
    arrays, cotangents, options = arguments(**changes)
    call = functools.partial(gradients, implementation=KERNELS, options=tuple(options.items()))
    first = flat(call(arrays, cotangents))
    for _ in range(9):
        for name, again in flat(call(arrays, cotangents)).items():
            np.testing.assert_array_equal(again, first[name], err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_nan_in_one_row_leaves_the_others_alone(dtype):
    arrays, cotangents, options = arguments(**{**MODEL, "norm": False, "seq": 100, "dtype": dtype})
    call = functools.partial(gradients, implementation=KERNELS, options=tuple(options.items()))
    clean = call(arrays, cotangents)
    poisoned = {**arrays, "v": arrays["v"].copy()}
    poisoned["v"][1, 50] = np.nan
    dirty = call(poisoned, cotangents)
    for name in ("q", "k", "v", "z", "angles", "adt", "dt", "trap"):
        np.testing.assert_array_equal(dirty[name][0], clean[name][0], err_msg=name)
    assert np.isnan(np.asarray(dirty["q"][1, 50:], np.float32)).all()


def test_a_nan_in_one_packed_sequence_leaves_the_others_alone():
    arrays, cotangents, options = arguments(**CASES["packed"])
    call = functools.partial(gradients, implementation=KERNELS, options=tuple(options.items()))
    clean = call(arrays, cotangents)
    poisoned = {**arrays, "v": arrays["v"].copy()}
    poisoned["v"][0, 20] = np.nan  # of tokens 18 to 33
    dirty = call(poisoned, cotangents)
    for name in ("q", "k", "v", "z", "angles"):
        for kept in (slice(0, 18), slice(34, None)):
            np.testing.assert_array_equal(dirty[name][:, kept], clean[name][:, kept], err_msg=name)
    for piece, before in zip(dirty["initial_state"], clean["initial_state"], strict=True):
        np.testing.assert_array_equal(np.delete(piece, 3, axis=0), np.delete(before, 3, axis=0))
    assert np.isnan(np.asarray(dirty["q"][0, 20:34], np.float32)).all()


def test_what_does_not_reach_the_output_has_no_gradient():
    arrays, cotangents, options = arguments(**CASES["mimo"])
    found = gradients(arrays, cotangents, implementation=KERNELS, options=tuple(options.items()))
    scale = np.abs(found["adt"]).max()
    assert np.abs(found["adt"][..., 0]).max() <= 1e-3 * scale  # token 0 decays a state of zeros
