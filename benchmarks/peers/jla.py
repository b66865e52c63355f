"""jax-linear-attention (package jla): Pallas Mosaic GPU kernels for sm_90. Softplus and dt * x stay outside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.cases import Case
from benchmarks.peers.base import JaxPeer, Options, Peer, Variant, version_of


class Jla(JaxPeer):
    name = "jla"
    most_calls = 16
    custom_call = "mosaic_gpu"

    def __init__(self, options: Options) -> None:
        self.full = options.peer_autotune == "full"

    def refuses(self, case: Case, pass_name: str) -> str | None:
        if pass_name not in ("forward", "forward_backward"):
            return "has no decode kernel"
        if case.dtype == "float32":
            return "takes 16-bit inputs only"
        if case.packing:
            return "takes no packed sequences"
        if case.head_dim not in (64, 128) or case.state not in (64, 128):
            return f"needs head_dim and state of 64 or 128, got {case.head_dim} and {case.state}"
        return None

    def variants(self, case: Case, pass_name: str) -> list[Variant]:
        """The first was the faster one at the benchmarks' main cases, or level: quick tuning takes it."""
        if case.rank:
            return [{}]
        grouped: list[Variant] = [{"grouped_key_grads": flag} for flag in (True, False)]
        # dt * x inside the forward kernel, or outside.
        found = [{"folded": True}, grouped[1]] if pass_name == "forward" else grouped
        return found if self.full else found[:1]

    def forward(self, case: Case, variant: Variant) -> Callable[..., Any]:
        if case.rank:
            return _mamba3(case)

        import jax
        import jax.numpy as jnp
        from jla.layers.mamba2_fused import ssd_core
        from jla.layers.ssm import mamba2_ssd

        def folded(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any) -> Any:
            v = (x.astype(jnp.float32) * dt[..., None]).astype(x.dtype)
            y = ssd_core(
                v,
                dt * A,
                B,
                C,
                segment_ids=None,
                impl="mosaic_gpu",
                chunk_size=64,
                grouped_key_grads=True,
                v_parts=(x, dt),
            )
            return (y.astype(jnp.float32) + D[:, None] * x.astype(jnp.float32)).astype(x.dtype)

        def plain(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any) -> Any:
            flag = variant["grouped_key_grads"]
            return mamba2_ssd(x, dt, A, B, C, d=D, impl="mosaic_gpu", grouped_key_grads=flag)[0]

        core = folded if variant.get("folded") else plain

        def call(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any = None) -> Any:
            return core(x, dt if dt_bias is None else jax.nn.softplus(dt + dt_bias), A, B, C, D)

        return call

    def notes(self) -> dict[str, Any]:
        return {"jax-linear-attention": version_of("jax-linear-attention"), "equinox": version_of("equinox")}


def _mamba3(case: Case) -> Callable[..., Any]:
    """Scalars go in as [batch, seq, heads], which for this peer is a transposition outside its kernels."""
    import jax.numpy as jnp
    from jla.layers.mamba3_mimo import mamba3_mimo
    from jla.layers.ssm import mamba3_siso

    def siso(q: Any, k: Any, v: Any, q_bias: Any, k_bias: Any, angles: Any, *rest: Any) -> Any:
        *scalars, z, D = rest
        adt, dt, trap = (jnp.swapaxes(scalar, 1, 2) for scalar in scalars)
        return mamba3_siso(q, k, v, adt, dt, trap, q_bias, k_bias, angles, d=D, z=z, impl="mosaic_gpu")[0]

    def mimo(q: Any, k: Any, v: Any, q_bias: Any, k_bias: Any, angles: Any, *rest: Any) -> Any:
        *scalars, z, D, mimo_v, mimo_z, mimo_o = rest
        adt, dt, trap = (jnp.swapaxes(scalar, 1, 2) for scalar in scalars)
        options: dict[str, Any] = {"d": D, "z": z, "mimo_z": mimo_z, "mimo_o": mimo_o, "chunk_size": 64 // case.rank}
        return mamba3_mimo(q, k, v, adt, dt, trap, q_bias, k_bias, angles, mimo_v, impl="mosaic_gpu", **options)[0]

    return siso if case.rank == 1 else mimo


def load(name: str, options: Options) -> Peer:
    import jla.layers.mamba2_fused
    import jla.ops.mosaic_gpu  # noqa: F401  (registers its kernels)

    return Jla(options)
