"""Static arguments: what is taken, what is refused, and what JAX's own settings mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import shapes


@pytest.mark.parametrize("limit", [[0, 1], (np.float32(0), 1), np.array([0.0, 1.0]), jnp.array([0.0, 1.0])])
def test_limits_become_a_pair_of_floats(limit):
    assert shapes.limits("op", limit) == (0.0, 1.0)


@pytest.mark.parametrize("limit", ["12", b"12", {0.0: 1, 1.0: 2}, {0.0, 1.0}, ("0", "1"), (False, True), iter((0, 1))])
def test_limits_of_another_kind(limit):
    with pytest.raises(TypeError, match="dt_limit: expected two numbers"):
        shapes.limits("op", limit)


def test_limits_beyond_every_float():
    with pytest.raises(TypeError, match="dt_limit: expected two numbers"):
        shapes.limits("op", (0, 10**400))
    with pytest.raises(TypeError, match="eps: expected a number"):
        shapes.number("op", "eps", 10**400)


@pytest.mark.parametrize("value", [np.array([0, 2**32]), np.array([2**31]), np.array([-(2**40)]), np.array([2**63])])
def test_integers_that_would_be_wrapped(value):
    with pytest.raises(ValueError, match="op: segment_ids: expected integers that u?int32 holds, got .*; number them"):
        shapes.labels("op", "segment_ids", value, ("seq",), {"seq": value.size})
    with pytest.raises(TypeError, match="op: segment_ids: expected an array, got list"):
        shapes.labels("op", "segment_ids", value.tolist(), ("seq",), {"seq": value.size})
    with jax.enable_x64(True):
        assert shapes.labels("op", "segment_ids", value, ("seq",), {"seq": value.size}).dtype.itemsize == 8


@pytest.mark.parametrize("value", [np.array([-(2**31), 2**31 - 1]), np.array([2**31 - 1], np.uint64), np.zeros(0, int)])
def test_integers_that_32_bits_hold(value):
    np.testing.assert_array_equal(shapes.labels("op", "segment_ids", value, ("seq",), {"seq": value.size}), value)


@pytest.mark.parametrize("limit", [(1e39, 1e40), (-1e40, -1e39)])
def test_limits_beyond_float32(limit):
    with pytest.raises(ValueError, match="dt_limit: expected low <= high"):
        shapes.limits("op", limit)


@pytest.mark.parametrize("value", ["1e-5", True, None, [1.0]])
def test_a_number_of_another_kind(value):
    with pytest.raises(TypeError, match="eps: expected a number"):
        shapes.number("op", "eps", value)


SETTINGS = {
    "default": "default",
    "bfloat16": "default",
    "tensorfloat32": "default",
    "BF16_BF16_F32": "default",
    "F16_F16_F16": "default",
    "ANY_F8_ANY_F8_F32": "default",
    "high": "highest",
    "highest": "highest",
    "float32": "highest",
    "BF16_BF16_F32_X3": "highest",
    "TF32_TF32_F32_X3": "highest",
    "F32_F32_F32": "highest",
}


@pytest.mark.parametrize("setting", [*SETTINGS, *list(jax.lax.DotAlgorithmPreset.__members__)[1:]])
def test_any_setting_of_jax_is_followed(setting):
    with jax.default_matmul_precision(setting):
        assert shapes.precision("op", None) == SETTINGS.get(setting, shapes.precision("op", None))
        assert shapes.precision("op", "highest") == "highest"


@pytest.mark.parametrize("setting", ["highest", "BF16_BF16_F32"])
def test_an_explicit_precision_is_not_that_of_the_setting(setting):
    one = jnp.ones((1, 4, 1, 2))
    with jax.default_matmul_precision(setting):
        program = str(
            jax.jit(lambda x: jax_ssd.mamba2(x, x[..., 0], -x[0, 0, :, 0], x, x, precision="default"))
            .lower(one)
            .as_text()
        )
    assert "dot_general" in program and "HIGHEST" not in program and "algorithm" not in program
