"""The Mamba-3 backward kernels on a GPU: accuracy with every option, repeatability, a NaN in one row."""

import functools

import numpy as np
import pytest

import jax_ssd
from jax_ssd.tools.check import relative_error
from tests.mamba3_gradients import BAR, CASES, KERNELS, arguments, exact_gradients, flat, gradients


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
        assert relative_error(actual[name], expected) <= BAR, name


MODEL = {"batch": 2, "seq": 512, "rank": 4, "heads": 8, "state": 128, "head_dim": 64, "pairs": 32, "norm": True}


def test_ten_calls_give_the_same_bits():
    arrays, cotangents, options = arguments(**MODEL)
    call = functools.partial(gradients, implementation=KERNELS, options=tuple(options.items()))
    first = flat(call(arrays, cotangents))
    for _ in range(9):
        for name, again in flat(call(arrays, cotangents)).items():
            np.testing.assert_array_equal(again, first[name], err_msg=name)


def test_a_nan_in_one_row_leaves_the_others_alone():
    arrays, cotangents, options = arguments(**{**MODEL, "norm": False, "seq": 100})
    call = functools.partial(gradients, implementation=KERNELS, options=tuple(options.items()))
    clean = call(arrays, cotangents)
    poisoned = {**arrays, "v": arrays["v"].copy()}
    poisoned["v"][1, 50] = np.nan
    dirty = call(poisoned, cotangents)
    for name in ("q", "k", "v", "z", "angles", "adt", "dt", "trap"):
        np.testing.assert_array_equal(dirty[name][0], clean[name][0], err_msg=name)
    assert np.isnan(np.asarray(dirty["q"][1, 50:], np.float32)).all()


def test_what_does_not_reach_the_output_has_no_gradient():
    arrays, cotangents, options = arguments(**CASES["mimo"])
    found = gradients(arrays, cotangents, implementation=KERNELS, options=tuple(options.items()))
    scale = np.abs(found["adt"]).max()
    assert np.abs(found["adt"][..., 0]).max() <= 1e-3 * scale  # token 0 decays a state of zeros
