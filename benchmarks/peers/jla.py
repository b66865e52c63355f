"""jax-linear-attention (package jla): Pallas Mosaic GPU kernels for sm_90. Softplus and dt * x stay outside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.cases import Case
from benchmarks.peers.base import JaxPeer, Options, Peer, Variant, version_of


class Jla(JaxPeer):
    name = "jla"
    most_calls = 8
    custom_call = "mosaic_gpu"

    def refuses(self, case: Case, pass_name: str) -> str | None:
        if pass_name not in ("forward", "forward_backward"):
            return "has no decode kernel"
        if case.dtype == "float32":
            return "takes 16-bit inputs only"
        if case.head_dim not in (64, 128) or case.state not in (64, 128):
            return f"needs head_dim and state of 64 or 128, got {case.head_dim} and {case.state}"
        return None

    def variants(self, case: Case, pass_name: str) -> list[Variant]:
        grouped = [{"grouped_key_grads": flag} for flag in (True, False)]
        if pass_name == "forward":
            return [{"folded": True}, grouped[1]]  # dt * x inside the forward kernel, or outside
        return grouped

    def forward(self, case: Case, variant: Variant) -> Callable[..., Any]:
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


def load(name: str, options: Options) -> Peer:
    import jla.layers.mamba2_fused
    import jla.ops.mosaic_gpu  # noqa: F401  (registers its kernels)

    return Jla()
