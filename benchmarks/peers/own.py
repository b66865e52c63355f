"""This library: jax_ssd (what a user gets), jax_ssd:cutile and so on (an order), plain_xla (implementation="xla").

A precision comes last: jax_ssd:cutile:highest, jax_ssd::default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import mamba3
from benchmarks.cases import Case
from benchmarks.peers.base import JaxPeer, Options, Peer, Variant, version_of

KERNELS = ("cutile", "cuda")


class Own(JaxPeer):
    def __init__(self, name: str, implementation: str | None, precision: str | None) -> None:
        self.name, self.implementation, self.precision = name, implementation, precision
        if implementation in (None, *KERNELS):
            self.custom_call, self.must_call = "jax_ssd.launch", implementation is not None
        else:
            self.most_calls = 2

    def refuses(self, case: Case, pass_name: str) -> str | None:
        return None

    def _settings(self, case: Case) -> dict[str, Any]:
        return {"implementation": self.implementation, "dt_softplus": case.softplus}

    def forward(self, case: Case, variant: Variant) -> Callable[..., Any]:
        import jax_ssd

        if case.rank:
            names, chosen = mamba3.operand_names(case), {"implementation": self.implementation}
            return lambda *operands: mamba3.call(
                case, dict(zip(names, operands, strict=True)), precision=self.precision, **chosen
            )
        settings: dict[str, Any] = self._settings(case) | {"precision": self.precision}
        return lambda x, dt, A, B, C, D, dt_bias=None: jax_ssd.mamba2(x, dt, A, B, C, D, dt_bias=dt_bias, **settings)

    def step(self, case: Case, variant: Variant) -> Callable[..., Any]:
        import jax_ssd

        if case.rank:
            return lambda state, *operands: mamba3.step(case, state, operands, implementation=self.implementation)
        settings = self._settings(case)
        return lambda state, x, dt, A, B, C, D, dt_bias=None: jax_ssd.mamba2_step(
            state, x, dt, A, B, C, D, dt_bias=dt_bias, **settings
        )

    def notes(self) -> dict[str, Any]:
        return {"jax_ssd": version_of("jax_ssd"), "cuda-tile": version_of("cuda-tile")}


def load(name: str, options: Options) -> Peer:
    import jax_ssd  # noqa: F401  (its absence is the reason the rows will show)

    if name == "plain_xla":
        return Own(name, "xla", None)
    words = name.split(":")[1:]
    return Own(name, words[0] or None if words else None, words[1] if len(words) > 1 else None)
