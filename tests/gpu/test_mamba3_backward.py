"""The Mamba-3 backward kernels on a GPU: accuracy with every option, repeatability, a NaN in one row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import Mamba3State
from jax_ssd.tools.check import relative_error
from tests.test_mamba3 import case, wide

KERNELS = ("cuda", "xla")  # the backward by its kernels, whatever the forward is

# Rounding of bfloat16 operands, through two products, of sums in float32.
BAR = 2e-2

CASES = {
    "siso": {"seq": 150, "rank": None, "heads": 4, "groups": 2},
    "mimo": {"seq": 70, "rank": 4, "heads": 4, "groups": 2},
    "group_per_head": {"seq": 40, "rank": 2, "heads": 3, "groups": 3},
    "states": {"seq": 45, "rank": 4, "initial": True, "final": True, "rotary": "half"},
    "siso_states": {"seq": 150, "rank": None, "initial": True, "final": True},
    "ranks_kept": {"seq": 40, "rank": 3, "fold": False, "skip": False},
    "no_gate": {"seq": 30, "rank": 8, "gate": False, "pairs": 32},
    "norm": {"seq": 45, "rank": 4, "norm": True, "initial": True, "final": True},
    "siso_norm": {"seq": 150, "rank": None, "norm": True, "skip": False},
    "ranks_kept_norm": {"seq": 40, "rank": 3, "norm": True, "fold": False, "gate": False},
    "one_token": {"seq": 1, "rank": 4, "initial": True},
    "odd_sizes": {"seq": 19, "rank": 5, "state": 24, "head_dim": 40, "pairs": 3},
    "short_chunks": {"seq": 40, "rank": 1, "state": 32, "head_dim": 24, "pairs": 5, "chunk_size": 8},
    "model": {"batch": 1, "seq": 100, "rank": 4, "state": 128, "head_dim": 64, "pairs": 32},
    "wide": {"batch": 1, "seq": 100, "rank": None, "state": 128, "head_dim": 128, "pairs": 64},
}


def arguments(*, final=False, rotary="pairwise", chunk_size=None, **sizes):
    """Arrays in bfloat16 where the kernels take it, a cotangent of everything returned, and options."""
    sizes = {"heads": 2, "state": 64, "head_dim": 32, "pairs": 16, "norm": False, **sizes}
    arrays = {name: a for name, a in case(**sizes).items() if a is not None}
    for name in ("q", "k", "v", "z"):
        if name in arrays:
            arrays[name] = np.asarray(jnp.asarray(arrays[name], jnp.bfloat16))
    rng = np.random.default_rng(7)
    batch, seq, heads, head_dim = arrays["v"].shape
    ranks = (sizes["rank"],) if sizes["rank"] is not None else ()
    kept = ranks if not sizes.get("fold", True) else ()
    dy = np.asarray(jnp.asarray(rng.standard_normal((batch, seq, *kept, heads, head_dim)), jnp.bfloat16))
    pieces = ((sizes["pairs"],), (head_dim, sizes["state"]), (*ranks, sizes["state"]), (head_dim,))
    state = [rng.standard_normal((batch, heads, *shape)).astype(np.float32) for shape in pieces]
    state[3] = np.asarray(jnp.asarray(state[3], jnp.bfloat16), np.float32)  # the final v is returned in v's type
    options = {"rotary": rotary, "chunk_size": chunk_size, "return_final_state": final, "precision": "highest"}
    return arrays, (dy, Mamba3State(*state)) if final else dy, options


@functools.partial(jax.jit, static_argnames=("implementation", "options"))
def gradients(arrays, cotangents, *, implementation, options):
    def function(arrays):
        given = {"mimo_v": None, "mimo_o": None, **arrays}
        return jax_ssd.mamba3(**given, **dict(options), implementation=implementation)

    results, pullback = jax.vjp(function, arrays)
    return pullback(jax.tree.map(lambda a, like: a.astype(like.dtype), cotangents, results))[0]


def flat(tree) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in leaves}


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
    with jax.enable_x64(True):
        exact = gradients(wide(arrays), wide_tree(cotangents), implementation="xla", options=options)
    for name, expected in flat(exact).items():
        assert relative_error(actual[name], expected) <= BAR, name


def wide_tree(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


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
