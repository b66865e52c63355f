"""Calls of the Mamba-3 scan as its kernels get them: canonical operands, and what float64 makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ssd.mamba3.problem import Problem
from jax_ssd.plans import Buffer
from tests import mamba3_float64 as oracle

_PARAMETERS = ("q_bias", "k_bias", "mimo_v", "mimo_o", "mimo_z", "D", "norm_weight")
_PIECES = ("angle", "ssm", "k", "v")
# Of max|y - truth| / max|truth|.
BARS = {("bfloat16", "highest"): 5.1e-3, ("float32", "highest"): 2.2e-6, ("float32", "default"): 1e-3}


@dataclasses.dataclass(frozen=True)
class Call:
    """Sizes and options. options: letters of what is given: mimo_v, mimo_o (r, f), z, D, norm_weight (n), state (s).

    cu_seqlens: packed sequences. segments, pieces, portable: the plan is made so. poison: an operand, and where it is
    NaN.
    """

    name: str
    batch: int = 2
    seq: int = 100
    heads: int = 4
    groups: int = 2
    head_dim: int = 16
    state: int = 32
    rank: int = 4
    pairs: int = 8
    dtype: str = "bfloat16"
    rotary: str = "pairwise"
    options: str = "rfzDns"
    precision: str = "highest"
    chunk_size: int | None = None
    cu_seqlens: tuple[int, ...] | None = None
    segments: int | None = None
    pieces: int = 1
    portable: bool = False
    poison: tuple[str, tuple[int, ...]] | None = None

    @property
    def bar(self) -> float:
        return BARS[self.dtype, self.precision]

    def operands(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Wide-ranging trap and angles; steps and decays of a few tokens to a few hundred."""
        c, rng = self, np.random.default_rng(seed)
        tokens, rows = (c.batch, c.seq), (c.batch, len(c.cu_seqlens or (0, 0)) - 1, c.heads)

        def normal(*shape, scale=1.0, shift=0.0, dtype: str = "float32"):
            return np.asarray(shift + scale * rng.standard_normal(shape)).astype(jnp.dtype(dtype))

        dt = np.log1p(np.exp(normal(c.batch, c.heads, c.seq, shift=-1)))
        ranked = (1, c.heads, c.rank, c.head_dim)
        arrays = {
            "q": normal(*tokens, c.rank, c.groups, c.state, dtype=c.dtype),
            "k": normal(*tokens, c.rank, c.groups, c.state, dtype=c.dtype),
            "v": normal(*tokens, c.heads, c.head_dim, dtype=c.dtype),
            "q_bias": normal(1, c.heads, c.rank, c.state, scale=0.5, shift=1),
            "k_bias": normal(1, c.heads, c.rank, c.state, scale=0.5, shift=1),
            "angles": normal(*tokens, c.heads, c.pairs, scale=2),
            "adt": -dt * np.exp(rng.uniform(-3, 1.5, (1, c.heads, 1))).astype(np.float32),
            "dt": dt,
            "trap": normal(c.batch, c.heads, c.seq, scale=2),
            "mimo_v": normal(*ranked, scale=0.3, shift=0.5),
            "mimo_o": normal(*ranked, scale=0.3, shift=0.5),
            "z": normal(*tokens, c.heads, c.head_dim, dtype=c.dtype),
            "mimo_z": normal(*ranked, scale=0.3, shift=1),
            "D": normal(1, c.heads),
            "norm_weight": normal(1, c.heads, c.head_dim, scale=0.3, shift=1),
            "state_angle": normal(*rows, c.pairs, scale=3),
            "state_ssm": normal(*rows, c.head_dim, c.state),
            "state_k": normal(*rows, c.rank, c.state),
            "state_v": normal(*rows, c.head_dim),
        }
        absent = {name for letter, name in zip("rfzDn", ("mimo_v", "mimo_o", "z", "D", "norm_weight"), strict=True)
                  if letter not in c.options}  # fmt: skip
        absent |= {"mimo_z"} if {"mimo_v", "z"} & absent else set()
        absent |= set() if "s" in c.options else {f"state_{piece}" for piece in _PIECES}
        arrays = {name: array for name, array in arrays.items() if name not in absent}
        if c.cu_seqlens:
            arrays["cu_seqlens"] = np.asarray([c.cu_seqlens], np.int32)
        if c.poison:
            arrays[c.poison[0]][c.poison[1]] = np.nan
        return arrays

    def problem(self) -> Problem:
        """What a plan is made from; the final state is asked for."""
        c = self
        buffers = tuple(Buffer(name, array.shape, array.dtype.name) for name, array in self.operands().items())
        return Problem(
            batch=c.batch, seq=c.seq, heads=c.heads, head_dim=c.head_dim, groups=c.groups, state=c.state, rank=c.rank,
            pairs=c.pairs, dtype=c.dtype, param_rows=1, rotary=c.rotary, norm_eps=1e-5, return_final_state=True,
            chunk_size=c.chunk_size, precision=c.precision, operands=buffers,
        )  # fmt: skip

    def truth(self) -> list[np.ndarray]:
        """y and the four pieces of the final state in float64, in the shapes of the op's results."""
        arrays: dict[str, Any] = {
            name: np.asarray(a, np.float64) for name, a in self.operands().items() if name != "cu_seqlens"
        }
        arrays |= {name: arrays[name][0] for name in _PARAMETERS if name in arrays}
        given = "state_ssm" in arrays
        state = tuple(arrays.pop(f"state_{piece}") for piece in _PIECES) if given else None
        if "mimo_v" not in arrays:
            arrays |= {n: arrays[n][:, :, 0] for n in ("q", "k")} | {n: arrays[n][:, 0] for n in ("q_bias", "k_bias")}
            state = None if state is None else (*state[:2], state[2][..., 0, :], state[3])
        if self.cu_seqlens:
            state = None if state is None else tuple(piece[0] for piece in state)
            y, end = oracle.packed(self.cu_seqlens, initial_state=state, rotary=self.rotary, **arrays)
            end = tuple(piece[None] for piece in end)
        else:
            state = None if state is None else tuple(piece[:, 0] for piece in state)
            y, end = oracle.run(initial_state=state, rotary=self.rotary, **arrays)
            end = tuple(piece[:, None] for piece in end)
        if "mimo_v" not in arrays:
            end = (*end[:2], end[2][..., None, :], end[3])
        return [y, *end]


def errors(results, truth) -> dict[str, float]:
    """Of y and each piece of the state: max|difference| / max|truth|; of angles the difference, modulo a turn."""
    found = {}
    for name, got, expected in zip(("y", *_PIECES), results, truth, strict=True):
        got = np.asarray(got, np.float64)
        assert got.shape == expected.shape, name
        if name == "angle":
            turns = (got - expected) / (2 * np.pi)
            found[name] = float(np.abs(turns - np.round(turns)).max() * 2 * np.pi)
        else:
            found[name] = float(np.abs(got - expected).max() / np.abs(expected).max())
    return found


_MODEL: dict[str, Any] = {"head_dim": 64, "state": 128, "pairs": 32, "groups": 1}
_ALL_PAIRS: dict[str, Any] = _MODEL | {"pairs": 64}
_NARROW: dict[str, Any] = _MODEL | {"head_dim": 40, "pairs": 5}
_TF32: dict[str, Any] = _MODEL | {"dtype": "float32", "precision": "default"}
CALLS = (
    Call("all options"),
    Call("half, odd pairs", rotary="half", pairs=5),
    Call("wgmma", **_MODEL),
    Call("wgmma, half, ranks kept", rotary="half", options="rzDn", **_MODEL),
    Call("wgmma, whole chunks", seq=128, options="rfzs", **_MODEL),
    Call("portable", portable=True, **_MODEL),
    Call("portable, half", portable=True, rotary="half", **_MODEL),
    Call("siso", rank=1, options="zD", **_MODEL),
    Call("siso, portable, all pairs", rank=1, options="zDns", portable=True, **_ALL_PAIRS),
    Call("siso, nothing else", rank=1, options="", **_MODEL),
    Call("rank 8, two teams", rank=8, state=64, head_dim=128, pairs=16),
    Call("rank 8, padded", rank=8, state=72, head_dim=104, pairs=16, portable=True, options="rfzDn"),
    Call("rank 2, small", rank=2, state=16, head_dim=8),
    Call("state 256", state=256, head_dim=64, pairs=64, groups=1),
    Call("state 256, head_dim 128", state=256, head_dim=128, rank=2, pairs=64, groups=1),
    Call("segments", seq=300, segments=2, **_MODEL),
    Call("segments, half", seq=300, segments=4, rotary="half", **_MODEL),
    Call("segments, siso", seq=500, segments=3, rank=1, options="zDs", **_MODEL),
    Call("segments in pieces", seq=300, segments=2, pieces=3, **_MODEL),
    Call("segments in pieces, siso", seq=500, segments=2, pieces=2, rank=1, options="zDs", **_MODEL),
    Call("packed", batch=1, cu_seqlens=(0, 0, 30, 31, 31, 90, 100, 100)),
    Call("packed, no state", batch=1, cu_seqlens=(0, 17, 64, 100), options="rfzD"),
    Call("packed, segments", batch=1, seq=300, segments=5, cu_seqlens=(0, 0, 30, 31, 31, 128, 192, 290, 300, 300),
         **_MODEL),
    Call("packed, segments in pieces", batch=1, seq=300, segments=3, pieces=2,
         cu_seqlens=(0, 0, 30, 31, 31, 128, 192, 290, 300, 300), **_MODEL),
    Call("packed, segments, half", batch=1, seq=300, segments=5, cu_seqlens=(0, 100, 288, 300), options="rfzD",
         rotary="half", **_MODEL),
    Call("float32", dtype="float32"),
    Call("float32, model", dtype="float32", **_MODEL),
    Call("float32, siso, segments", dtype="float32", rank=1, options="zDs", seq=500, segments=3, rotary="half",
         **_MODEL),
    Call("float32, default", dtype="float32", precision="default"),
    Call("float32, default, portable", portable=True, **_TF32),
    Call("tf32", **_TF32),
    Call("tf32, half, ranks kept", rotary="half", options="rzDn", seq=101, **_TF32),
    Call("tf32, head_dim 40", options="rfDs", seq=37, **_TF32 | _NARROW),
    Call("tf32, no options", options="rf", seq=129, **_TF32),
    Call("tf32, one token", seq=1, **_TF32),
    Call("tf32, segments", seq=300, segments=4, rotary="half", **_TF32 | _ALL_PAIRS),
    Call("tf32, packed", batch=1, seq=300, segments=3, pieces=2, cu_seqlens=(0, 0, 30, 31, 31, 128, 192, 290, 300, 300),
         **_TF32),
    Call("float32, state 256", dtype="float32", state=256, head_dim=64, pairs=64, groups=1),
    Call("wgmma, rank 8", rank=8, **_MODEL),
    Call("wgmma, rank 16, ranks kept", rank=16, options="rzD", **_MODEL),
    Call("wgmma, rank 2", rank=2, options="rfzDn", rotary="half", **_MODEL),
    Call("wgmma, head_dim 40", rank=1, options="zDns", **_NARROW),
    Call("chunk 5", chunk_size=5, **_MODEL),
    Call("one token", seq=1, **_MODEL),
)  # fmt: skip
POISONED = (
    Call("k", poison=("k", (0, 50, 1, 0, 3)), **_MODEL),
    Call("v, portable", poison=("v", (0, 50, 1, 3)), portable=True, **_MODEL),
    Call("angles", poison=("angles", (0, 50, 1, 2)), **_MODEL),
    Call("q", poison=("q", (0, 50, 1, 0, 3)), **_MODEL),
    Call("dt", poison=("dt", (0, 1, 50)), **_MODEL),
    Call("adt, segments", seq=300, segments=3, poison=("adt", (0, 1, 50)), **_MODEL),
    Call("trap, siso", rank=1, options="D", poison=("trap", (0, 1, 50)), **_MODEL),
    Call("k, tf32", poison=("k", (0, 50, 1, 0, 3)), **_TF32),
    Call("v, tf32", poison=("v", (0, 50, 1, 3)), **_TF32),
    Call("angles, tf32", poison=("angles", (0, 50, 1, 2)), **_TF32),
    Call("q, tf32", poison=("q", (0, 50, 1, 0, 3)), **_TF32),
    Call("adt, tf32, segments", seq=300, segments=3, poison=("adt", (0, 1, 50)), **_TF32),
)
