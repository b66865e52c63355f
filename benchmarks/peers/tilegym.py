"""TileGym's cuTile Mamba-2 kernels: a forward and a backward function, no softplus, bias, decode or autograd.

Its tuner compiles every configuration of its six kernels, hundreds in all; "quick" tuning tries a few, spread evenly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from benchmarks.cases import Case
from benchmarks.peers.base import Options, Peer, Variant, version_of


class TileGym(Peer):
    name = "tilegym"
    framework = "torch"
    most_calls = 8
    chunk = 64

    def __init__(self, options: Options) -> None:
        from tilegym.ops.cutile import mamba2

        self.kernels = mamba2
        self.configurations: dict[str, str] = {}
        self.rehearsing = False
        search = mamba2.exhaustive_search
        quick, count = options.peer_autotune == "quick", options.peer_configs

        def search_some(configs: list[Any], stream: Any, grid: Any, kernel: Any, args: Any, hints: Any) -> Any:
            some = configs[:: max(1, len(configs) // count)][:count] if quick else configs
            if self.rehearsing:
                return _chosen(_that_run(some, stream, grid, kernel, args, hints)[0])
            if len(some) == 1:  # nothing to time
                self.configurations[getattr(kernel, "__name__", str(kernel))] = f"{some[0]}, of {len(configs)}"
                return _chosen(some[0])
            result = search(some, stream, grid, kernel, args, hints)
            chosen = f"{result.best.config}, of {len(some)} tried of {len(configs)}"
            self.configurations[getattr(kernel, "__name__", str(kernel))] = chosen
            return result

        mamba2.exhaustive_search = search_some

    @contextlib.contextmanager
    def rehearsal(self, case: Case) -> Iterator[None]:
        """Compiles each configuration, into the compiler's cache on disk, without timing any."""
        caches = [value for name, value in vars(self.kernels).items() if name.endswith("_tune_cache")]
        before = [set(cache) for cache in caches]
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing = False
            for cache, known in zip(caches, before, strict=True):
                for key in set(cache) - known:
                    del cache[key]

    def refuses(self, case: Case, pass_name: str) -> str | None:
        if case.rank:
            return "has no Mamba-3"
        if pass_name not in ("forward", "forward_backward"):
            return "has no decode"
        if case.softplus:
            return "has no softplus and no dt_bias"
        if case.seq % self.chunk:
            return f"needs a length that is a multiple of {self.chunk}, got {case.seq}"
        if case.heads % 4:
            return f"needs a multiple of 4 heads, got {case.heads}"
        return None

    def forward(self, case: Case, variant: Variant) -> Callable[..., Any]:
        return lambda x, dt, A, B, C, D: self.kernels.mamba2_chunk_forward(
            x, A, B, C, D, dt, self._zero_state(case, x), chunk_size=self.chunk
        )[0]

    def forward_backward(self, case: Case, variant: Variant) -> Callable[..., Any]:
        import torch

        def both(operands: tuple[Any, ...], dy: Any) -> tuple[Any, tuple[Any, ...]]:
            x, dt, A, B, C, D = operands
            state = self._zero_state(case, x)
            with torch.no_grad():
                y, _ = self.kernels.mamba2_chunk_forward(x, A, B, C, D, dt, state, chunk_size=self.chunk)
                dx, da, db, dc, dd, ddt, _ = self.kernels.mamba2_chunk_backward(
                    x, A, B, C, D, dt, state, dy, torch.zeros_like(state), chunk_size=self.chunk
                )
            return y, (dx, ddt, da, db, dc, dd)

        return both

    @staticmethod
    def _zero_state(case: Case, x: Any) -> Any:
        return x.new_zeros((case.batch, case.heads, case.head_dim, case.state), dtype=x.new_empty(0).float().dtype)

    def notes(self) -> dict[str, Any]:
        names = ("tilegym", "cuda-tile", "torch")
        return {name: version_of(name) for name in names} | {"configurations_chosen": self.configurations}


def _chosen(config: Any) -> Any:
    return SimpleNamespace(best=SimpleNamespace(config=config))


def _that_run(configs: list[Any], stream: Any, grid: Any, kernel: Any, args: Any, hints: Any) -> list[Any]:
    import cuda.tile as ct

    found = []
    for config in configs:
        with contextlib.suppress(Exception):  # a search leaves it out too
            ct.launch(stream, grid(config), kernel.replace_hints(**hints(config)), args(config))
            found.append(config)
    return found


def load(name: str, options: Options) -> Peer:
    import torch

    if not torch.cuda.is_available():
        raise NotImplementedError("its kernels need a GPU that torch can see")
    return TileGym(options)
