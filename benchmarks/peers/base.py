"""What the harness asks of an implementation."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.cases import Case

Variant = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """`peer_autotune`: "quick" tries a few configurations of a peer's kernels, "full" its whole space."""

    peer_autotune: str = "quick"
    peer_configs: int = 5

    def __post_init__(self) -> None:
        if self.peer_autotune not in ("quick", "full"):
            raise ValueError(f'peer_autotune must be "quick" or "full", got {self.peer_autotune!r}')


class Peer:
    """One implementation. Passes it does not override are reported as unsupported.

    `variants` lists the settings worth trying for a pass (a chunk size, say); the harness measures each and keeps the
    fastest, so that nobody is shown at a bad setting. Operands arrive in call order: x, dt, A, B, C, D[, dt_bias].
    """

    name: str = ""
    framework: str = "jax"  # or "torch"
    most_calls: int = 48  # calls unrolled in one program; fewer where the compiler is slow on them
    custom_call: str | None = None  # target of its kernels in the compiled program
    must_call: bool = True  # whether a program without them is no program of this implementation

    def refuses(self, case: Case, pass_name: str) -> str | None:
        """Why this pass of this case cannot run, or None."""
        raise NotImplementedError

    def variants(self, case: Case, pass_name: str) -> list[Variant]:
        return [{}]

    def forward(self, case: Case, variant: Variant) -> Callable[..., Any]:
        """(*operands) -> y."""
        raise NotImplementedError

    def forward_backward(self, case: Case, variant: Variant) -> Callable[..., Any]:
        """(operands, dy) -> (y, gradients in the operands' order)."""
        raise NotImplementedError

    def step(self, case: Case, variant: Variant) -> Callable[..., Any]:
        """(state, *operands of one token) -> (state, y); torch peers update the state in place."""
        raise NotImplementedError

    def rehearsal(self, case: Case) -> contextlib.AbstractContextManager[None]:
        """Around a smaller call that only serves to compile what `case` runs: what is tuned meanwhile does not stay."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """After operands were written over: what a peer makes of them once, outside of what is timed."""

    def notes(self) -> dict[str, Any]:
        """Facts for the result file: versions, tuned configurations."""
        return {}


class JaxPeer(Peer):
    """A JAX implementation: its backward is whatever jax.vjp gives."""

    def forward_backward(self, case: Case, variant: Variant) -> Callable[..., Any]:
        import jax

        forward = self.forward(case, variant)

        def both(operands: tuple[Any, ...], dy: Any) -> tuple[Any, tuple[Any, ...]]:
            # y is returned too: were it dropped, XLA would drop the forward kernel with it.
            y, pull = jax.vjp(forward, *operands)
            return y, pull(dy)

        return both


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
