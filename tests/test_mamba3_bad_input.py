"""What is wrong with a call of Mamba-3 is said in words, for every argument: expected, received and the cure.

Every case is refused while tracing, the same way eagerly and inside jax.jit and jax.eval_shape.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import Mamba3State
from tests.test_bad_input import check_refused
from tests.test_mamba3 import case, token

SIZES: dict[str, Any] = {
    "batch": 2,
    "seq": 5,
    "heads": 4,
    "groups": 2,
    "rank": 3,
    "state": 16,
    "head_dim": 8,
    "pairs": 4,
}
PIECES = Mamba3State._fields
OPTIONAL = ("mimo_v", "mimo_o", "z", "mimo_z", "D", "norm_weight")


def flat(arrays: dict[str, Any], state_name: str) -> dict[str, jax.Array]:
    """The arguments by the names that messages give them."""
    state = arrays.pop("initial_state")
    named = {f"{state_name}.{piece}": value for piece, value in zip(PIECES, state, strict=True)}
    return {name: jnp.asarray(value) for name, value in {**arrays, **named}.items()}


def whole(function, state_name: str, **given):
    """The call itself, of arguments by those names."""
    pieces = [given.pop(f"{state_name}.{piece}") for piece in PIECES]
    return function(**given, **{state_name: Mamba3State(*pieces)})


def step(state, **given):
    return jax_ssd.mamba3_step(state, **given)


ALL = case(**SIZES, initial=True)
CALLS = {
    "mamba3": (functools.partial(whole, jax_ssd.mamba3, "initial_state"), flat(dict(ALL), "initial_state")),
    "mamba3_step": (functools.partial(whole, step, "state"), flat(token(ALL, 0), "state")),
}
CALLS["mamba3_step"][1].pop("initial_state", None)
# Each argument's axes. q says what its last three are, angles what its last is, and v all of its own.
TOKENS = {
    "q": "rank, groups, state",
    "k": "rank, groups, state",
    "z": "heads, head_dim",
    "angles": "heads, pairs",
}
PARAMETERS = {
    "q_bias": "heads, rank, state",
    "k_bias": "heads, rank, state",
    "mimo_v": "heads, rank, head_dim",
    "mimo_o": "heads, rank, head_dim",
    "mimo_z": "heads, rank, head_dim",
    "D": "heads",
    "norm_weight": "heads, head_dim",
}
STATES = {
    "angle": "..., heads, pairs",
    "ssm": "..., heads, head_dim, state",
    "k": "..., heads, rank, state",
    "v": "..., heads, head_dim",
}
SHAPES = {
    "mamba3": {
        **{name: f"..., seq, {axes}" for name, axes in TOKENS.items()},
        **dict.fromkeys(("adt", "dt", "trap"), "..., heads, seq"),
        **PARAMETERS,
        **{f"initial_state.{name}": axes for name, axes in STATES.items()},
    },
    "mamba3_step": {
        **{name: f"..., {axes}" for name, axes in TOKENS.items()},
        **dict.fromkeys(("adt", "dt", "trap"), "..., heads"),
        **PARAMETERS,
        **{f"state.{name}": axes for name, axes in STATES.items()},
    },
}
SAID_BY_ITSELF = {"q": ("rank", "groups", "state"), "angles": ("pairs",)}


@pytest.mark.parametrize("call, argument", [(call, argument) for call, table in SHAPES.items() for argument in table])
def test_shapes_that_disagree(call, argument):
    function, arrays = CALLS[call]
    axes, right = SHAPES[call][argument], arrays[argument].shape
    names = axes.split(", ")
    for axis, name in enumerate(names):
        if name in SAID_BY_ITSELF.get(argument, ()):
            continue
        wrong = tuple(n + (i == axis) for i, n in enumerate(right))
        words = (f"{call}: {argument}: expected shape ({axes}) = {right}, got {wrong}", f"transpose {argument}")
        check_refused(ValueError, words, function, arrays | {argument: jnp.ones(wrong)})


def test_tokens_and_state_that_disagree_on_axes():
    function, one = CALLS["mamba3_step"]
    several = flat(dict(ALL), "state")
    for arrays, words in (
        (one | {"q": several["q"]}, ("mamba3_step: q: expected no seq axis, as v of ", str(several["q"].shape))),
        (several | {"q": one["q"]}, ("mamba3_step: q: expected a seq axis, as v of ", str(one["q"].shape))),
        (
            several | {"state.v": several["state.v"][0]},
            ("mamba3_step: v: expected (..., heads, head_dim) or, for several",),
        ),
        (one | {"state.v": jnp.ones(3)}, ("mamba3_step: state.v: expected",)),
    ):
        check_refused(ValueError, words, function, arrays)


@pytest.mark.parametrize("argument", ["k", "z", "angles", "adt", "dt", "trap"])
def test_a_step_of_as_many_tokens_as_v(argument):
    function, arrays = CALLS["mamba3_step"][0], flat(dict(ALL), "state")
    right, axis = arrays[argument].shape, 2 if argument in ("adt", "dt", "trap") else 1
    wrong = tuple(n + (i == axis) for i, n in enumerate(right))
    axes = SHAPES["mamba3"][argument]
    words = (f"mamba3_step: {argument}: expected shape ({axes}) = {right}, got {wrong}",)
    check_refused(ValueError, words, function, arrays | {argument: jnp.ones(wrong)})
    one = CALLS["mamba3_step"][1][argument]
    check_refused(ValueError, (f"mamba3_step: {argument}: ", str(one.shape)), function, arrays | {argument: one})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("argument", ["q", "v", "angles", "adt", "D", "norm_weight"])
def test_an_axis_too_few_or_too_many(call, argument):
    function, arrays = CALLS[call]
    right = arrays[argument].shape
    for wrong in (right[1:], (1, *right)):
        if argument == "v" and len(wrong) > len(right):
            continue  # another leading axis: then the others disagree
        check_refused(ValueError, (f"{call}: ", str(wrong)), function, arrays | {argument: jnp.ones(wrong)})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "argument, shape, words",
    [
        ("q", (3, 3, 16), "q: expected a number of groups that divides the 4 heads of v, got 3 groups"),
        ("q", (3, 0, 16), "q: expected a number of groups that divides the 4 heads of v, got 0 groups"),
        ("q", (3, 2, 15), "q: expected an even state size, as coordinates rotate in pairs, got 15"),
        ("q", (9, 2, 16), "q: expected a rank from 1 to 8, got 9"),
        ("angles", (4, 9), "angles: expected at most state / 2 = 8 rotated pairs, got 9"),
    ],
)
def test_sizes_out_of_range(call, argument, shape, words):
    function, arrays = CALLS[call]
    lead = (2, 5) if call == "mamba3" else (2,)
    check_refused(ValueError, (f"{call}: {words}",), function, arrays | {argument: jnp.ones((*lead, *shape))})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_types_that_are_not_floating(call, dtype):
    function, arrays = CALLS[call]
    for argument, array in arrays.items():
        words = (f"{call}: {argument}: expected a floating type out of ('bfloat16',", f"got {dtype}", ".astype")
        check_refused(TypeError, words, function, arrays | {argument: jnp.ones(array.shape, dtype)})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("argument", ["k", "v", "z"])
def test_types_that_differ_from_that_of_q(call, argument):
    function, arrays = CALLS[call]
    words = (f"{call}: {argument}: expected float32 (the type of q), got bfloat16", ".astype('float32')")
    check_refused(TypeError, words, function, arrays | {argument: arrays[argument].astype("bfloat16")})


@pytest.mark.parametrize("call", CALLS)
def test_only_optional_arguments_may_be_none(call):
    function, arrays = CALLS[call]
    for argument in arrays:
        if argument in OPTIONAL:
            continue
        words = (f"{call}: {argument}: expected an array, got NoneType", "pass a jax or numpy array")
        check_refused(TypeError, words, function, arrays | {argument: None})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "argument, words",
    [
        ("mimo_v", "q: expected"),  # then q has an axis too many
        ("mimo_z", "mimo_z: expected an array beside z and mimo_v, got None; pass ones"),
        ("z", "mimo_z: expected None without z, got an array; pass z, or None"),
    ],
)
def test_what_goes_together(call, argument, words):
    function, arrays = CALLS[call]
    check_refused(ValueError, (f"{call}: {words}",), function, arrays | {argument: None})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", [0.5, 1e-30])
def test_growth_is_refused_where_it_can_be_seen(call, value):
    function, arrays = CALLS[call]
    grown = arrays | {"adt": arrays["adt"].at[-1, -1].set(value)}
    words = f"{call}: adt: expected the log of a decay, at most 0, got values up to {value:g}; pass A \\* dt"
    with pytest.raises(ValueError, match=words):
        function(**grown)
    with pytest.raises(ValueError, match=words):  # not an argument of the traced function, so known
        jax.jit(lambda v: function(**{**grown, "v": v}))(arrays["v"])
    jax.eval_shape(function, **grown)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "name, value, error, words",
    [
        ("rotary", "interleaved", ValueError, "rotary: expected one of ('pairwise', 'half'), got 'interleaved'"),
        ("rotary", None, ValueError, "rotary: expected one of ('pairwise', 'half'), got None"),
        ("norm_eps", -1.0, ValueError, "norm_eps: expected a finite number of at least 0, got -1.0"),
        ("norm_eps", float("nan"), ValueError, "norm_eps: expected a finite number of at least 0, got nan"),
        ("norm_eps", "1e-5", TypeError, "norm_eps: expected a number, got '1e-5'"),
        ("implementation", "triton", ValueError, "implementation: expected names out of"),
    ],
)
def test_options(call, name, value, error, words):
    function, arrays = CALLS[call]
    check_refused(error, (words,), function, arrays | {name: value})


@pytest.mark.parametrize(
    "name, value, error, words",
    [
        ("chunk_size", 0, ValueError, "mamba3: chunk_size: expected at least 1 token, got 0"),
        ("chunk_size", 1.5, TypeError, "mamba3: chunk_size: expected an integer or None, got 1.5"),
        ("precision", "exact", ValueError, "mamba3: precision: expected one of"),
        ("return_final_state", 1, TypeError, "mamba3: return_final_state: expected True or False, got 1"),
    ],
)
def test_options_of_the_scan(name, value, error, words):
    function, arrays = CALLS["mamba3"]
    check_refused(error, (words,), function, arrays | {name: value})


STATE = ALL["initial_state"]


@pytest.mark.parametrize(
    ("state", "got"),
    [
        (3.0, "float"),
        ((np.zeros(2),) * 3, "tuple of 3"),
        ("zero", "str"),
        (STATE._asdict(), "dict"),
        (np.zeros((4, 2, 2, 2, 2)), "ndarray"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_state(state, got):
    for call, given in ((jax_ssd.mamba3, {"initial_state": state}), (jax_ssd.mamba3_step, {"state": state})):
        arrays = dict(ALL) if call is jax_ssd.mamba3 else token(ALL, 0)
        arrays.pop("initial_state")
        if call is jax_ssd.mamba3 and state is None:
            continue  # zeros
        with pytest.raises(TypeError, match=f"state: expected a Mamba3State of four arrays, got {got}; pass") as caught:
            call(**{**arrays, **given})
        assert "zeros before the first token, jnp.zeros([..., heads, pairs])" in str(caught.value)


def test_states_are_named_by_their_axes():
    arrays, lead = {**ALL, "initial_state": None}, {"two rows": (2,), "one row": (1,)}
    for rows, bounds, words in (
        ("two rows", [[0, 2, 5]] * 2, "expected shape (..., sequences, heads, pairs) = (2, 2, 4, 4), got (2, 4, 4)"),
        ("one row", [0, 2, 5], "expected shape (sequences, heads, pairs) = (2, 4, 4), got (1, 4, 4)"),
    ):
        given = {n: a[:1] if n in ("q", "k", "v", "z", "angles", "adt", "dt", "trap") else a for n, a in arrays.items()}
        given = arrays if rows == "two rows" else given
        state = jax.tree.map(lambda a, n=lead[rows][0]: a[:n], STATE)
        with pytest.raises(ValueError) as caught:
            jax_ssd.mamba3(**{**given, "initial_state": state, "cu_seqlens": jnp.array(bounds)})
        assert f"mamba3: initial_state.angle: {words} beside" in str(caught.value), caught.value


def test_a_batch_of_tokens_beside_a_state_without_batch():
    arrays, one = token(ALL, 0), jax.tree.map(lambda a: a[0], STATE)
    arrays.pop("initial_state", None)
    words = r"mamba3_step: state.v: expected the shape \(2, 4, 8\) of v, .* got \(4, 8\); give the state the batch axes"
    with pytest.raises(ValueError, match=words):
        jax_ssd.mamba3_step(**{**arrays, "state": one})


# The schedule.

SCHEDULE = {
    "dd_dt": (2, 5, 3),
    "dd_A": (2, 5, 3),
    "trap": (2, 5, 3),
    "angles": (2, 5, 4),
    "dt_bias": (3,),
}


def schedule(**changes) -> Any:
    given: dict[str, Any] = {name: jnp.ones(shape) for name, shape in SCHEDULE.items()}
    return jax_ssd.mamba3_schedule(**(given | changes))


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"dd_A": jnp.ones((2, 5, 4))}, ValueError, "dd_A: expected shape (..., seq, heads) = (2, 5, 3), got"),
        ({"trap": jnp.ones((2, 3, 5))}, ValueError, "trap: expected shape (..., seq, heads) = (2, 5, 3), got"),
        ({"angles": jnp.ones((2, 6, 4))}, ValueError, "angles: expected shape (..., seq, pairs) = (2, 5, 4), got"),
        ({"angles": jnp.ones((2, 5, 2, 4))}, ValueError, "angles: expected shape (..., seq, heads, pairs) = (2, 5, 3"),
        ({"dt_bias": jnp.ones(4)}, ValueError, "dt_bias: expected shape (heads) = (3,), got (4,)"),
        ({"dd_dt": jnp.ones(3)}, ValueError, "dd_dt: expected at least 2 axes (..., seq, heads), got shape (3,)"),
        ({"dd_dt": jnp.ones((2, 5, 3), jnp.int32)}, TypeError, "dd_dt: expected a floating type"),
        ({"dd_A": None}, TypeError, "dd_A: expected an array, got NoneType"),
        ({"A_map": "relu"}, ValueError, "A_map: expected one of ('softplus', 'heavy_tailed'), got 'relu'"),
        ({"A_floor": -1.0}, ValueError, "A_floor: expected a finite number of at least 0, got -1.0"),
    ],
)  # fmt: skip
def test_schedules(changes, error, words):
    with pytest.raises(error) as caught:
        schedule(**changes)
    assert str(caught.value).startswith(f"mamba3_schedule: {words}"), caught.value
