"""Calls of the gradient of mamba3, for the tests of its backward kernels on a GPU and in the emulator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_ssd
from jax_ssd import Mamba3State
from tests.test_mamba3 import case, wide

KERNELS = ("cuda", "xla")  # the backward by its kernels, whatever the forward is

# Rounding of bfloat16 operands, through two products, of sums in float32. TF32 has three bits more; at highest
# precision it is float32's own rounding, of decays and products of sums.
BARS = {("bfloat16", "highest"): 2e-2, ("float32", "default"): 3e-3, ("float32", "highest"): 1e-5}
BAR = BARS["bfloat16", "highest"]

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
    "model_one_rank": {"batch": 1, "seq": 80, "rank": 1, "state": 128, "head_dim": 64, "pairs": 32},
    "siso_model": {"batch": 1, "seq": 140, "rank": None, "state": 128, "head_dim": 64, "pairs": 32},
    "model_states": {
        "batch": 1,
        "seq": 50,
        "rank": 4,
        "heads": 4,
        "groups": 2,
        "state": 128,
        "head_dim": 64,
        "pairs": 64,
        "initial": True,
        "final": True,
        "rotary": "half",
    },
    "siso_model_states": {
        "batch": 1,
        "seq": 150,
        "rank": None,
        "heads": 3,
        "state": 128,
        "head_dim": 64,
        "pairs": 32,
        "initial": True,
        "final": True,
        "gate": False,
    },
    "model_segments": {
        "batch": 1,
        "seq": 300,
        "rank": 4,
        "heads": 1,
        "state": 128,
        "head_dim": 64,
        "pairs": 32,
        "initial": True,
        "final": True,
    },
    "model_bare": {
        "batch": 2,
        "seq": 70,
        "rank": 2,
        "state": 128,
        "head_dim": 64,
        "pairs": 16,
        "gate": False,
        "skip": False,
    },
    # Turned numbers of a row that are no multiple of those of a warp's lanes.
    "model_pairs": {"batch": 1, "seq": 50, "rank": 4, "state": 128, "head_dim": 64, "pairs": 12},
    "siso_model_pairs": {"batch": 1, "seq": 100, "rank": None, "state": 128, "head_dim": 64, "pairs": 12},
    "siso_model_odd_pairs": {"batch": 1, "seq": 100, "rank": None, "state": 128, "head_dim": 64, "pairs": 20},
    "siso_model_most_pairs": {"batch": 1, "seq": 70, "rank": None, "state": 128, "head_dim": 64, "pairs": 60},
    "model_odd_pairs": {"batch": 1, "seq": 50, "rank": 2, "state": 128, "head_dim": 64, "pairs": 40, "final": True},
    # Pairs that are half a row apart.
    "model_half": {"batch": 1, "seq": 70, "rank": 2, "state": 128, "head_dim": 64, "pairs": 24, "rotary": "half"},
    "siso_model_half": {
        "batch": 1,
        "seq": 100,
        "rank": None,
        "state": 128,
        "head_dim": 64,
        "pairs": 32,
        "rotary": "half",
    },
    # With 70 tokens the gradients of D would nearly vanish, and rounding alone would be a tenth of them.
    "model_bare_pairs": {"batch": 1, "seq": 90, "rank": 2, "state": 128, "head_dim": 64, "pairs": 12, "gate": False},
    "wide": {"batch": 1, "seq": 100, "rank": None, "state": 128, "head_dim": 128, "pairs": 64},
    "large_state": {"seq": 45, "rank": 4, "state": 256, "head_dim": 64, "pairs": 64, "initial": True, "final": True},
    "long": {"batch": 1, "seq": 1300, "rank": 4, "initial": True, "final": True},
    "model_long": {"batch": 1, "seq": 1300, "rank": None, "state": 128, "head_dim": 64, "pairs": 32, "initial": True},
    # Sequences of no token, of one, of whole chunks, of several spans.
    "packed": {"seq": 130, "rank": 4, "cu_seqlens": (0, 0, 17, 18, 34, 130, 130), "initial": True, "final": True},
    "packed_siso": {"seq": 500, "rank": None, "cu_seqlens": (0, 128, 129, 450, 500), "heads": 4, "groups": 2},
    "packed_norm": {"seq": 60, "rank": 3, "cu_seqlens": (0, 5, 37, 60), "norm": True, "final": True, "rotary": "half"},
    "packed_model": {
        "seq": 300,
        "rank": 4,
        "cu_seqlens": (0, 100, 260, 300),
        "heads": 4,
        "groups": 2,
        "state": 128,
        "head_dim": 64,
        "pairs": 32,
        "initial": True,
        "final": True,
    },
}
for _name in ("siso", "states", "norm", "ranks_kept_norm", "no_gate", "odd_sizes", "model_states", "wide", "packed",
              "packed_siso", "packed_norm"):  # fmt: skip
    CASES[f"{_name}_float32"] = {**CASES[_name], "dtype": "float32"}
for _name in ("states", "packed_model"):
    CASES[f"{_name}_tf32"] = {**CASES[_name], "dtype": "float32", "precision": "default"}


def bar(changes: dict) -> float:
    """What the errors of a case may be, of max|gradient|."""
    return BARS[changes.get("dtype", "bfloat16"), changes.get("precision", "highest")]


def arguments(
    *, final=False, rotary="pairwise", chunk_size=None, cu_seqlens=None, dtype="bfloat16", precision="highest", **sizes
):
    """Arrays, q, k, v and z in `dtype`, a cotangent of everything returned, and options."""
    sizes = {"heads": 2, "state": 64, "head_dim": 32, "pairs": 16, "norm": False, **sizes}
    if cu_seqlens is not None:
        sizes |= {"batch": 1, "sequences": len(cu_seqlens) - 1}
    arrays = {name: a for name, a in case(**sizes).items() if a is not None}
    for name in ("q", "k", "v", "z"):
        if name in arrays:
            arrays[name] = np.asarray(jnp.asarray(arrays[name], dtype))
    if cu_seqlens is not None:
        arrays["cu_seqlens"] = np.asarray(cu_seqlens, np.int32)
    rng = np.random.default_rng(7)
    batch, seq, heads, head_dim = arrays["v"].shape
    ranks = (sizes["rank"],) if sizes["rank"] is not None else ()
    kept = ranks if not sizes.get("fold", True) else ()
    dy = np.asarray(jnp.asarray(rng.standard_normal((batch, seq, *kept, heads, head_dim)), dtype))
    rows = sizes.get("sequences", batch)
    pieces = ((sizes["pairs"],), (head_dim, sizes["state"]), (*ranks, sizes["state"]), (head_dim,))
    state = [rng.standard_normal((rows, heads, *shape)).astype(np.float32) for shape in pieces]
    state[3] = np.asarray(jnp.asarray(state[3], dtype), np.float32)  # the final v is returned in v's type
    options = {"rotary": rotary, "chunk_size": chunk_size, "return_final_state": final, "precision": precision}
    return arrays, (dy, Mamba3State(*map(jnp.asarray, state))) if final else dy, options


@functools.partial(jax.jit, static_argnames=("implementation", "options"))
def gradients(arrays, cotangents, *, implementation, options):
    bounds = arrays.get("cu_seqlens")

    def function(moving):
        given = {"mimo_v": None, "mimo_o": None, "cu_seqlens": bounds, **moving}
        return jax_ssd.mamba3(**given, **dict(options), implementation=implementation)

    results, pullback = jax.vjp(function, {name: a for name, a in arrays.items() if name != "cu_seqlens"})
    return pullback(jax.tree.map(lambda a, like: a.astype(like.dtype), cotangents, results))[0]


def flat(tree) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in leaves}


def exact_gradients(arrays, cotangents, options) -> dict[str, np.ndarray]:
    """In float64, by the XLA implementation."""
    fixed = {name: a for name, a in arrays.items() if name == "cu_seqlens"}
    with jax.enable_x64(True):
        found = gradients(wide(arrays) | fixed, wide_tree(cotangents), implementation="xla", options=options)
    return flat(found)


def wide_tree(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)
