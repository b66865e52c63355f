"""mamba2-jax: pure JAX, one group (B and C are repeated per head), softplus built in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.cases import Case
from benchmarks.peers.base import JaxPeer, Options, Peer, Variant, version_of


class Mamba2Jax(JaxPeer):
    name = "mamba2_jax"
    most_calls = 2

    def refuses(self, case: Case, pass_name: str) -> str | None:
        if case.rank:
            return "has no Mamba-3"
        if pass_name not in ("forward", "forward_backward"):
            return "has no step: a token costs a chunk"
        if not case.softplus:
            return "always applies softplus to dt"
        return None

    def variants(self, case: Case, pass_name: str) -> list[Variant]:
        return [{"chunk_size": size} for size in (64, 256) if size < case.seq] or [{"chunk_size": 64}]

    def forward(self, case: Case, variant: Variant) -> Callable[..., Any]:
        import jax.numpy as jnp
        from mamba2_jax import ssd_forward

        def call(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any) -> Any:
            repeats = case.heads // case.groups
            b, c = (jnp.repeat(array, repeats, axis=2) for array in (B, C))  # its layer broadcasts the same way
            y, _ = ssd_forward(x, dt, A, b, c, variant["chunk_size"], D, dt_bias, 0.0, float("inf"))
            return y.astype(x.dtype)

        return call

    def notes(self) -> dict[str, Any]:
        return {"mamba2-jax": version_of("mamba2-jax")}


def load(name: str, options: Options) -> Peer:
    import mamba2_jax  # noqa: F401  (its absence is the reason the rows will show)

    return Mamba2Jax()
