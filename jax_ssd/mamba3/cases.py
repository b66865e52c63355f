"""Named calls of Mamba-3 that tests and the check command share.

Each row of TABLE changes one thing about the row called "mimo", which has several chunks, a non-zero initial state and
every option that costs a kernel something.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ssd.mamba3.api import Mamba3State, mamba3, mamba3_step

PIECES = Mamba3State._fields
OF_TOKENS = {"q": 1, "k": 1, "v": 1, "angles": 1, "z": 1, "adt": 2, "dt": 2, "trap": 2}  # where they have their tokens


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options of one call of mamba3; arrays are drawn by `inputs`. rank 0 is SISO."""

    name: str
    batch: int = 2
    seq: int = 70
    heads: int = 4
    head_dim: int = 16
    groups: int = 2
    state: int = 32
    rank: int = 4
    pairs: int = 8
    dtype: str = "float32"
    rotary: str = "pairwise"
    skip: bool = True
    gate: bool = True
    norm: bool = True
    fold: bool = True  # sum the ranks with mimo_o
    initial_state: bool = True
    segmented: bool = False  # segment ids, padding among them
    cu_seqlens: tuple[int, ...] | None = None
    chunk_size: int | None = None
    precision: str = "highest"

    @property
    def steppable(self) -> bool:
        return self.cu_seqlens is None and not self.segmented  # a step knows no sequences

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        """Random arguments of mamba3 by name, all of them arrays, absent ones left out; the state in four pieces."""
        rng = np.random.default_rng(seed)
        ranks = (self.rank,) if self.rank else ()
        tokens, per_rank = (self.batch, self.seq), (self.heads, *ranks, self.head_dim)

        def normal(*shape, dtype="float32", scale=1.0, shift=0.0):
            return jnp.asarray(shift + scale * rng.standard_normal(shape), dtype)

        dt = np.log1p(np.exp(rng.standard_normal((self.batch, self.heads, self.seq)) - 1))
        arrays = {
            "q": normal(*tokens, *ranks, self.groups, self.state, dtype=self.dtype),
            "k": normal(*tokens, *ranks, self.groups, self.state, dtype=self.dtype),
            "v": normal(*tokens, self.heads, self.head_dim, dtype=self.dtype),
            "q_bias": normal(self.heads, *ranks, self.state, scale=0.5, shift=1),
            "k_bias": normal(self.heads, *ranks, self.state, scale=0.5, shift=1),
            "angles": normal(*tokens, self.heads, self.pairs, scale=2),
            "adt": jnp.asarray(-dt * np.geomspace(0.05, 4.0, self.heads)[:, None], jnp.float32),
            "dt": jnp.asarray(dt, jnp.float32),
            "trap": normal(self.batch, self.heads, self.seq, scale=2),
        }
        if self.rank:
            arrays["mimo_v"] = normal(*per_rank, scale=0.3, shift=0.5)
            if self.fold:
                arrays["mimo_o"] = normal(*per_rank, scale=0.3, shift=0.5)
        if self.gate:
            arrays["z"] = normal(*tokens, self.heads, self.head_dim, dtype=self.dtype)
            if self.rank:
                arrays["mimo_z"] = normal(*per_rank, scale=0.3, shift=1)
        if self.skip:
            arrays["D"] = normal(self.heads)
        if self.norm:
            arrays["norm_weight"] = normal(self.heads, self.head_dim, scale=0.3, shift=1)
        if self.initial_state:
            shapes = ((self.pairs,), (self.head_dim, self.state), (*ranks, self.state), (self.head_dim,))
            rows = len(self.cu_seqlens) - 1 if self.cu_seqlens else self.batch
            for piece, shape in zip(PIECES, shapes, strict=True):
                arrays[f"initial_{piece}"] = normal(rows, self.heads, *shape)
        if self.segmented:
            lengths = rng.integers(1, max(2, self.seq // 3), size=(self.batch, self.seq))
            labels = np.stack([np.repeat(rng.permutation(self.seq) - 1, row)[: self.seq] for row in lengths])
            labels[:, [0, self.seq // 2, -1]] = -1
            arrays["segment_ids"] = jnp.asarray(labels, jnp.int32)
        if self.cu_seqlens:
            arrays["cu_seqlens"] = jnp.asarray(self.cu_seqlens, jnp.int32)
        return arrays

    def scan(self, arrays: dict[str, Any], implementation: Any = None) -> dict[str, jax.Array]:
        """y and the final state for `inputs`."""
        given = {"mimo_v": None, "mimo_o": None} | {k: a for k, a in arrays.items() if not k.startswith("initial_")}
        options: dict[str, Any] = {"chunk_size": self.chunk_size, "precision": self.precision, "rotary": self.rotary}
        options |= {"initial_state": self._state(arrays), "implementation": implementation}
        y, state = mamba3(**given, **options, return_final_state=True)
        return {"y": y} | _told(state)

    def steps(self, arrays: dict[str, Any], implementation: Any = None) -> dict[str, jax.Array]:
        """The same token by token."""
        tokens = {name: jnp.moveaxis(arrays[name], axis, 0) for name, axis in OF_TOKENS.items() if name in arrays}
        fixed: dict[str, Any] = {"mimo_v": None, "mimo_o": None}
        fixed |= {k: a for k, a in arrays.items() if k not in OF_TOKENS and not k.startswith("initial_")}
        state = self._state(arrays)
        if state is None:
            ranks = (self.rank,) if self.rank else ()
            shapes = ((self.pairs,), (self.head_dim, self.state), (*ranks, self.state), (self.head_dim,))
            state = Mamba3State(*(jnp.zeros((self.batch, self.heads, *shape), jnp.float32) for shape in shapes))
        options: dict[str, Any] = {"rotary": self.rotary, "implementation": implementation}
        state, y = jax.lax.scan(lambda state, token: mamba3_step(state, **token, **fixed, **options), state, tokens)
        return {"y": jnp.moveaxis(y, 0, 1)} | _told(state)

    def _state(self, arrays: dict[str, Any]) -> Mamba3State | None:
        return Mamba3State(*(arrays[f"initial_{piece}"] for piece in PIECES)) if self.initial_state else None


def _told(state: Mamba3State) -> dict[str, jax.Array]:
    """The pieces of a state by name; an angle by its cosine and sine, since it is one modulo a turn."""
    turned = jnp.stack([jnp.cos(state.angle), jnp.sin(state.angle)])
    return {"final_angle": turned, "final_ssm": state.ssm, "final_k": state.k, "final_v": state.v}


BASE = Case("mimo")


def _row(name: str, **changes) -> Case:
    return dataclasses.replace(BASE, name=name, **changes)


_PLAIN: dict[str, Any] = {"skip": False, "gate": False, "norm": False, "initial_state": False}
TABLE = (
    BASE,
    _row("mimo_plain", **_PLAIN),
    _row("mimo_half", rotary="half", pairs=5),
    _row("mimo_ranks_kept", fold=False),
    _row("mimo_one_token", seq=1),
    _row("mimo_packed", batch=1, cu_seqlens=(0, 0, 20, 21, 53, 70)),
    _row("mimo_segments", segmented=True),
    _row("mimo_chunk_5", chunk_size=5),
    _row("mimo_rank_2", rank=2),
    _row("mimo_rank_3", rank=3),
    _row("mimo_rank_8", rank=8, seq=40),
    _row("mimo_model", head_dim=64, state=128, pairs=32, groups=1, heads=2, rotary="half"),
    _row("mimo_odd_sizes", head_dim=24, state=20, heads=3, groups=1, pairs=4),
    _row("mimo_default", precision="default"),
    _row("mimo_bfloat16", dtype="bfloat16"),
    _row("mimo_bfloat16_model", dtype="bfloat16", head_dim=64, state=128, pairs=32, groups=1, heads=2),
    _row("siso", rank=0),
    _row("siso_plain", rank=0, **_PLAIN),
    _row("siso_half", rank=0, rotary="half"),
    _row("siso_packed", rank=0, batch=1, cu_seqlens=(0, 17, 64, 70)),
    _row("siso_segments", rank=0, segmented=True),
    _row("siso_long", rank=0, seq=300, batch=1),
    _row("siso_bfloat16", rank=0, dtype="bfloat16"),
    _row("siso_bfloat16_model", rank=0, dtype="bfloat16", head_dim=64, state=128, pairs=32, groups=1, heads=2),
)
