"""`python -m jax_ssd COMMAND ...`: one module of jax_ssd.tools per command, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {
    "doctor": "what is installed, what would run here, and how to get what is missing",
    "check": "compare the implementations on this machine",
    "compile": "fill the kernel cache ahead of time, with or without a GPU",
    "tune": "measure tile choices on this GPU and keep the fastest",
    "bench": "measure against other libraries (from a checkout)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in _COMMANDS:
        return importlib.import_module(f"jax_ssd.tools.{arguments[0]}").main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m jax_ssd",
        description="Tools of jax_ssd.",
        epilog="\n".join(f"  {name:<8} {text}" for name, text in _COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=list(_COMMANDS), help="`COMMAND --help` tells more")
    parser.parse_args(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
