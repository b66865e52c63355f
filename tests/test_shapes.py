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
    for rows in ([value], (value, value), [[value[-1:]]]):  # numpy's rows in a list
        with pytest.raises(ValueError, match="op: x: expected integers that u?int32 holds, got .*; number them anew"):
            shapes.as_array("op", "x", rows)
    words = f"op: segment_ids: expected integers that int32 holds, got one of {int(abs(value).max()).bit_length()} bits"
    with pytest.raises(ValueError, match=words):
        shapes.labels("op", "segment_ids", value.tolist(), ("seq",), {"seq": value.size})
    with jax.enable_x64(True):
        assert shapes.labels("op", "segment_ids", value, ("seq",), {"seq": value.size}).dtype.itemsize == 8


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        ([[1.0, 2.0], [3.0]], ValueError, "an array, got a nested list whose rows differ in shape; pad them"),
        (([1.0], 2.0), ValueError, "an array, got a nested tuple whose rows differ in shape; pad them"),
        ([jnp.ones(2), jnp.ones(3)], ValueError, "an array, got a nested list whose rows differ in shape; pad them"),
        ([1, 2**40], ValueError, "integers that int32 holds, got one of 41 bits; pass floats if it is no label"),
        ([0.5, 10**400], ValueError, "integers that int32 holds, got one of 1329 bits; pass floats"),
        ([10**5000], ValueError, "integers that int32 holds, got one of 16610 bits; pass floats"),
        ([1.0, None], TypeError, "an array, got a list that holds NoneType; pass a jax or numpy array"),
        ([[1.0], ["2"]], TypeError, "an array, got a list that holds str; pass a jax or numpy array"),
        ([np.str_("text")], TypeError, "an array, got a list that holds str_; pass a jax or numpy array"),
        ([np.longdouble(1)], TypeError, "an array, got a list that holds longdouble; pass a jax or numpy array"),
        (np.longdouble(1), TypeError, "an array, got longdouble; pass a jax or numpy array"),
        ([[np.int8(1)], [jnp.float32(1), 2.0]], ValueError, "an array, got a nested list whose rows differ in shape"),
        ({"a": 1}, TypeError, "an array, got dict; pass a jax or numpy array"),
        (np.array([1, None]), TypeError, "an array of a type that JAX has, got a numpy array of object; convert it"),
        (np.array(["a"]), TypeError, "an array of a type that JAX has, got a numpy array of <U1; convert it"),
        (np.ones(2, np.longdouble), TypeError, "an array of a type that JAX has, got a numpy array of float128; conv"),
    ],
)
def test_what_is_no_array(value, error, said):
    for attempt in (
        lambda: shapes.as_array("op", "A", value),
        lambda: jax.eval_shape(lambda x: x + shapes.as_array("op", "A", value), 1.0),
    ):
        with pytest.raises(error, match=f"op: A: expected {said}"):
            attempt()


def test_a_nested_list_of_traced_arrays():
    stacked = jax.eval_shape(lambda x: shapes.as_array("op", "A", [x, [1.0, 2.0]]), jnp.ones(2))
    assert stacked.shape == (2, 2)
    with pytest.raises(ValueError, match="op: A: expected an array, got a nested list whose rows differ in shape"):
        jax.eval_shape(lambda x: shapes.as_array("op", "A", [x, [1.0]]), jnp.ones(2))


def test_sizes_that_another_argument_says():
    x, B = jnp.ones((2, 4, 8)), jnp.ones((2, 16))
    origins = shapes.origin("x", x, ("...", "heads")) | shapes.origin("B", B, ("state",))
    sizes = {"...": (2,), "heads": 4, "state": 16}
    for name, letters, beside in (
        ("C", ("...", "state"), r" beside x of \(2, 4, 8\) and B of \(2, 16\); reshape"),
        ("A", ("heads",), r" beside x of \(2, 4, 8\); reshape"),
        ("B", ("...", "state"), r" beside x of \(2, 4, 8\); reshape"),
        ("x", ("...", "heads"), "; reshape"),
    ):
        with pytest.raises(ValueError, match=rf"op: {name}: expected shape .* got \(9,\){beside}"):
            shapes.require_shape("op", name, jnp.ones(9), letters, sizes, origins)


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
