"""Measures tile choices on this GPU for named sizes and keeps the fastest in the user's tuning file.

    python -m jax_ssd tune 130m 2.7b            what these models run, forward, backward and step
    python -m jax_ssd tune models 'sweep_n128*' every published model, a part of the sweep
    python -m jax_ssd tune mine=2,8192,1,48,128,64
    python -m jax_ssd tune siso_first           of Mamba-3 what has choices
    python -m jax_ssd tune models --quick --dry-run  how much a quick search would do

Interrupt it at any time: what was measured is kept, and the next run goes on from there. Several at once compile side
by side and take turns at the GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jax_ssd import compile, config, dispatch, paths, search, sizes

# Of a plan and of each choice, compilation included: a rough guess from an H200 with 16 processor cores.
SECONDS, QUICK_SECONDS = (4.0, 0.6), (2.5, 0.3)


def main(arguments: Sequence[str]) -> int:
    """Tunes what is named; 0, or 1 if something could not be tuned."""
    made = argparse.ArgumentParser(
        prog="python -m jax_ssd tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_sizes(made)
    made.add_argument("--force", action="store_true", help="measure anew what was tuned before")
    made.add_argument("--quick", action="store_true", help="the likeliest few choices of what None takes")
    made.add_argument("--dry-run", action="store_true", help="only say what would be tried; needs no GPU, see --arch")
    made.add_argument("--arch", help="for --dry-run, such as sm_90 (default: the GPUs here, or JAX_SSD_TARGET_ARCH)")
    made.add_argument("--seconds", type=float, default=100.0, help="after which nothing new is tried for one plan")
    made.add_argument("--output", type=Path, help="file of results (default: JAX_SSD_TUNING_FILE)")
    options = made.parse_args(arguments)
    if options.arch is not None and not options.dry_run:
        made.error("--arch is for --dry-run: what is measured is measured on the GPU here")
    if options.arch is not None:
        try:
            for one in options.arch.split(","):
                config.parse_arch(one, "--arch")
        except ValueError as error:
            made.error(str(error))
    output = {} if options.output is None else {"tuning_file": options.output.absolute()}
    programs = named_programs(options)
    target = {} if options.arch is None else {"target_arch": options.arch}
    try:
        config.settings()
    except ValueError as error:  # a variable of the environment
        print(f"jax_ssd tune: {error}")
        return 1
    try:
        with config.override(**output, **target):
            return _tuned(programs, options)
    except NotImplementedError as error:  # no GPU
        print(f"jax_ssd tune: {error}")
        return 1
    except KeyboardInterrupt:
        print("Interrupted; what was measured is kept.")
        return 130


def _tuned(programs: Sequence[tuple], options: argparse.Namespace) -> int:
    """The exit status, with the settings in place."""
    failed = 0
    if not options.dry_run:
        search.tuning_device()
    print(forecast(programs, options.quick), flush=True)
    if options.dry_run:
        return 0
    for label, (function, operands) in programs:
        try:
            found = search.autotune(
                function, *operands, force=options.force, seconds=options.seconds, quick=options.quick
            )
            if not found:
                print(f"{label}: nothing to tune, what it runs has no choices yet")
        except (NotImplementedError, RuntimeError) as error:
            print(f"{label}: {error}")
            failed += 1
    print(f"Results are in {config.settings().tuning_file or 'no file (JAX_SSD_TUNING_FILE=off)'}.")
    return 1 if failed else 0


def forecast(programs: Sequence[tuple], quick: bool) -> str:
    """How many plans have choices, how many would be tried at most, and for about how long."""
    plans: list[tuple] = []
    for _, (function, operands) in programs:
        plans += [
            call for call in search.plans_of(paths.calls(function, operands, {}), first=quick) if call not in plans
        ]
    (arch,) = compile.target_archs()[:1]
    if quick:
        tried = sum(len(search.likely(tunable, problem, arch)) for tunable, problem in plans)
    else:
        tried = sum(1 + sum(map(len, tunable.values(problem).values())) for tunable, problem in plans)
    each, choice = QUICK_SECONDS if quick else SECONDS
    seconds = each * len(plans) + choice * tried
    return f"{len(plans)} plans, {tried} choices, about {seconds:.0f} s on an H200 if nothing was tuned before."


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The arguments that `named_programs` reads."""
    parser.add_argument(
        "sizes",
        nargs="+",
        help="a name (jax_ssd/sizes.py) or its end, PREFIX*, models, or n=B,T,G,H,N,P[,dtype][,rank=R]",
    )
    parser.add_argument("--passes", nargs="+", choices=("forward", "backward", "step"), help="only these")
    parser.add_argument(
        "--implementation", choices=dispatch.KERNELS, help="only this one (default: those None chooses)"
    )


def named_programs(options: argparse.Namespace) -> list[tuple[str, tuple]]:
    """(label, (function, arguments)) of each program that was asked for. Leaves the process for a name that is none."""
    try:
        named = [size for word in options.sizes for size in sizes.find(word)]
        found = [
            (f"{size.name} {label}", program)
            for size in named
            for label, program in sizes.programs(size, options.implementation).items()
            if options.passes is None or label in options.passes
        ]
        if not found:
            raise ValueError(
                f"{' '.join(options.sizes)} has no {' or '.join(options.passes or ())}; leave --passes out."
            )
        return found
    except ValueError as error:
        raise SystemExit(f"jax_ssd: {error}") from error
