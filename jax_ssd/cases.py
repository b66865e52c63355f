"""Named calls of Mamba-2 that tests and the check command share; those of Mamba-3 are in mamba3/cases.py.

Each row of TABLE changes one thing about the row called "base", which has several chunks, a non-zero initial state and
every option that costs a kernel something.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ssd.mamba2.api import mamba2, mamba2_step

INFINITY = float("inf")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options of one call of mamba2; arrays are drawn by `inputs`."""

    name: str
    batch: int = 2
    seq: int = 100
    heads: int = 4
    head_dim: int = 16
    groups: int = 2
    state: int = 32
    dtype: str = "float32"
    dt_dtype: str = "float32"
    skip: str | None = "channel"  # D: None, "head" or "channel"
    gate: bool = True
    bias: bool = True
    softplus: bool = True
    dt_limit: tuple[float, float] = (0.01, 2.0)
    initial_state: bool = True
    packed: bool = False
    chunk_size: int | None = 32
    precision: str = "highest"
    decay: tuple[float, float] = (0.1, 4.0)  # range of -A, which the heads cover evenly in the logarithm

    @property
    def steppable(self) -> bool:
        return not self.packed  # a step knows no segments

    def options(self) -> dict[str, Any]:
        return {
            "dt_softplus": self.softplus,
            "dt_limit": self.dt_limit,
            "chunk_size": self.chunk_size,
            "precision": self.precision,
        }

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        """Random arguments of mamba2 by name, all of them arrays, absent ones left out."""
        rng = np.random.default_rng(seed)
        lead = (self.batch, self.seq)

        def normal(*shape, dtype=self.dtype, scale=1.0):
            return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

        raw = rng.standard_normal((*lead, self.heads))
        arrays = {
            "x": normal(*lead, self.heads, self.head_dim),
            "dt": jnp.asarray(raw if self.softplus else np.log1p(np.exp(raw)), self.dt_dtype),
            "A": jnp.asarray(-rng.permutation(np.geomspace(*self.decay, self.heads)), jnp.float32),
            "B": normal(*lead, self.groups, self.state),
            "C": normal(*lead, self.groups, self.state),
        }
        if self.skip:
            shape = (self.heads, self.head_dim) if self.skip == "channel" else (self.heads,)
            arrays["D"] = normal(*shape, dtype=jnp.float32)
        if self.gate:
            arrays["z"] = normal(*lead, self.heads, self.head_dim)
        if self.bias:
            arrays["dt_bias"] = normal(self.heads, dtype=jnp.float32)
        if self.initial_state:
            arrays["initial_state"] = normal(self.batch, self.heads, self.head_dim, self.state, dtype=jnp.float32)
        if self.packed:
            lengths = rng.integers(1, max(2, self.seq // 3), size=(self.batch, self.seq))
            labels = np.stack([np.repeat(rng.permutation(self.seq) - 1, row)[: self.seq] for row in lengths])
            arrays["segment_ids"] = jnp.asarray(labels, jnp.int32)  # one label of -1: padding somewhere
        return arrays

    def scan(self, arrays: dict[str, Any], implementation: Any = None) -> dict[str, jax.Array]:
        """y and the final state for `inputs`."""
        options = self.options() | {"return_final_state": True, "implementation": implementation}
        y, final = mamba2(**arrays, **options)
        return {"y": y, "final_state": final}

    def steps(self, arrays: dict[str, Any], implementation: Any = None) -> dict[str, jax.Array]:
        """The same token by token."""
        state, fixed = arrays.get("initial_state"), {k: a for k, a in arrays.items() if k != "initial_state"}
        if state is None:
            state = jnp.zeros((self.batch, self.heads, self.head_dim, self.state), jnp.float32)
        tokens = {name: jnp.moveaxis(fixed.pop(name), 1, 0) for name in ("x", "dt", "B", "C", "z") if name in fixed}
        options = {"dt_softplus": self.softplus, "dt_limit": self.dt_limit, "implementation": implementation}
        final, y = jax.lax.scan(lambda state, token: mamba2_step(state, **token, **fixed, **options), state, tokens)
        return {"y": jnp.moveaxis(y, 0, 1), "final_state": final}


BASE = Case("base")


def _row(name: str, **changes) -> Case:
    return dataclasses.replace(BASE, name=name, **changes)


# Enough thread blocks for the CUDA C++ kernels to take it.
_MODEL: dict[str, Any] = {"seq": 130, "heads": 18, "groups": 3, "state": 128, "head_dim": 64, "dtype": "bfloat16"}
_MODEL |= {"gate": False, "chunk_size": None}
TABLE = (
    BASE,
    _row("plain", skip=None, gate=False, bias=False, softplus=False, dt_limit=(0.0, INFINITY), initial_state=False),
    _row("one_token", seq=1),
    _row("short", seq=15),
    _row("whole_chunks", seq=96),
    _row("packed", packed=True),
    _row("one_group", groups=1),
    _row("group_per_head", groups=4),
    _row("skip_per_head", skip="head"),
    _row("odd_sizes", head_dim=24, state=17, heads=3, groups=1, seq=77),
    _row("wide_state", state=128, head_dim=32, heads=2, groups=1),
    _row("fast_decay", decay=(1.0, 1e4), dt_limit=(0.0, INFINITY)),
    _row("no_clamp", dt_limit=(0.0, INFINITY)),
    _row("bfloat16", dtype="bfloat16"),
    _row("bfloat16_model", **_MODEL),
    _row("bfloat16_dt", dtype="bfloat16", dt_dtype="bfloat16", packed=True),
    _row("float16", dtype="float16"),
    _row("default_precision", precision="default"),
    _row("default_chunk", seq=200, chunk_size=None),
)
BY_NAME = {case.name: case for case in TABLE}


def differentiable(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: array for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)}
