"""The CUDA C++ backward of Mamba-3: its own source, run on the CPU by an emulator, against float64.

A compilation takes seconds, so there are few cases; tests/gpu/test_mamba3_backward.py has more.
"""

import numpy as np
import pytest

from jax_ssd import config
from jax_ssd.tools.check import relative_error
from tests import cuda_emulator, emulation
from tests.mamba3_gradients import BAR, CASES, KERNELS, arguments, exact_gradients, flat, gradients

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
}


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulation.emulate(monkeypatch)
    with config.override(target_arch="sm_90"):
        yield


@pytest.mark.parametrize("name", EMULATED)
def test_gradients_agree_with_float64(name):
    arrays, cotangents, options = arguments(**{**CASES[name], "batch": 1, **EMULATED[name]})
    options = tuple(options.items())
    actual = flat(gradients(arrays, cotangents, implementation=KERNELS, options=options))
    for gradient, expected in exact_gradients(arrays, cotangents, options).items():
        assert relative_error(actual[gradient], expected) <= BAR, gradient


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
