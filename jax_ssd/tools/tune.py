"""Measures tile choices on this GPU for named sizes and keeps the fastest in the user's tuning file.

    python -m jax_ssd tune 130m 2.7b            what these models run, forward, backward and step
    python -m jax_ssd tune models 'sweep_n128*' every published model, a part of the sweep
    python -m jax_ssd tune mine=2,8192,1,48,128,64
    python -m jax_ssd tune siso_first           of Mamba-3 the step; its scan and backward have no choices yet

Interrupt it at any time: what was measured is kept, and the next run goes on from there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jax_ssd import config, dispatch, search, sizes


def main(arguments: Sequence[str]) -> int:
    """Tunes what is named; 0, or 1 if something could not be tuned."""
    made = argparse.ArgumentParser(
        prog="python -m jax_ssd tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_sizes(made)
    made.add_argument("--force", action="store_true", help="measure anew what was tuned before")
    made.add_argument("--seconds", type=float, default=100.0, help="after which nothing new is tried for one plan")
    made.add_argument("--output", type=Path, help="file of results (default: JAX_SSD_TUNING_FILE)")
    options = made.parse_args(arguments)
    output = {} if options.output is None else {"tuning_file": options.output.absolute()}
    programs, failed = named_programs(options), 0
    with config.override(**output):
        try:
            search.tuning_device()
            for label, (function, operands) in programs:
                try:
                    found = search.autotune(function, *operands, force=options.force, seconds=options.seconds)
                    if not found:
                        print(f"{label}: nothing to tune, what it runs has no choices yet")
                except (NotImplementedError, RuntimeError) as error:
                    print(f"{label}: {error}")
                    failed += 1
        except NotImplementedError as error:
            print(f"jax_ssd tune: {error}")
            return 1
        except KeyboardInterrupt:
            print("Interrupted; what was measured is kept.")
            return 130
        print(f"Results are in {config.settings().tuning_file or 'no file (JAX_SSD_TUNING_FILE=off)'}.")
    return 1 if failed else 0


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The arguments that `named_programs` reads."""
    parser.add_argument(
        "sizes", nargs="+", help="a name (jax_ssd/sizes.py) or its end, PREFIX*, models, or n=B,T,G,H,N,P"
    )
    parser.add_argument("--passes", nargs="+", choices=("forward", "backward", "step"), help="only these")
    parser.add_argument(
        "--implementation", choices=dispatch.KERNELS, help="only this one (default: those None chooses)"
    )


def named_programs(options: argparse.Namespace) -> list[tuple[str, tuple]]:
    """(label, (function, arguments)) of each program that was asked for. Leaves the process for a name that is none."""
    try:
        named = [size for word in options.sizes for size in sizes.find(word)]
        return [
            (f"{size.name} {label}", program)
            for size in named
            for label, program in sizes.programs(size, options.implementation).items()
            if options.passes is None or label in options.passes
        ]
    except ValueError as error:
        raise SystemExit(f"jax_ssd: {error}") from error
