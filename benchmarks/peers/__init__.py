"""What is measured: this library's implementations and the others a user could pick. All of them are optional imports.

A peer module defines `load(name, options)`, which raises ImportError (or NotImplementedError) with the reason when the
peer cannot be used here; the harness turns that into rows that say so.
"""

from __future__ import annotations

import importlib

from benchmarks.peers.base import Options, Peer

_MODULES = {
    "jax_ssd": "own",
    "plain_xla": "own",
    "jla": "jla",
    "mamba2_jax": "mamba2_jax",
    "mamba_ssm": "mamba_ssm",
    "tilegym": "tilegym",
}


def module_name(name: str) -> str:
    """The module that serves an implementation's name, e.g. jax_ssd:cutile -> benchmarks.peers.own."""
    head = name.partition(":")[0]
    if head not in _MODULES:
        raise ValueError(f"no implementation called {name!r}; known: {', '.join(_MODULES)} (jax_ssd:NAME orders one)")
    return f"benchmarks.peers.{_MODULES[head]}"


def load(name: str, options: Options) -> Peer:
    return importlib.import_module(module_name(name)).load(name, options)


def is_own(name: str) -> bool:
    return name.partition(":")[0] == "jax_ssd"
