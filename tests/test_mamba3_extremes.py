"""Decays of many sizes on the backward kernels of Mamba-3, run on the CPU by an emulator, against float64."""

from __future__ import annotations

import pytest

from jax_ssd import config
from jax_ssd.tools.check import relative_error
from tests import cuda_emulator, emulation
from tests.mamba3_gradients import BAR, CASES, KERNELS, arguments, exact_gradients, flat, gradients
from tests.test_mamba3 import mixed_decays

pytestmark = pytest.mark.skipif(cuda_emulator.missing() is not None, reason=str(cuda_emulator.missing()))


@pytest.mark.parametrize(("name", "heads"), [("group_per_head", 3), ("siso_model", 1)])
def test_gradients_agree_with_float64(name, heads, monkeypatch):
    """Exponents of pairs that do not count are never formed: they would be infinite, and gradients NaN."""
    arrays, cotangents, options = arguments(**{**CASES[name], "batch": 1, "heads": heads})
    arrays["adt"] = mixed_decays(arrays["adt"].shape)
    options = tuple(options.items())
    emulation.emulate(monkeypatch)
    with config.override(target_arch="sm_90"):
        actual = flat(gradients(arrays, cotangents, implementation=KERNELS, options=options))
    for gradient, expected in exact_gradients(arrays, cotangents, options).items():
        assert relative_error(actual[gradient], expected) <= BAR, gradient
