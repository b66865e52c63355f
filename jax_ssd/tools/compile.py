"""Fills the kernel cache ahead of time for named sizes. Needs no GPU: carry the cache folder to where there is one.

    python -m jax_ssd compile 130m --arch sm_90
    python -m jax_ssd compile models --arch sm_90 sm_100 --passes forward step
    python -m jax_ssd compile siso_first mimo_first --arch sm_90

Kernels are compiled for exactly these sizes, so name those that will run; NAME=B,T,G,H,N,P[,DTYPE][,rank=R] is one of
your own, of Mamba-3 if it has a rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context

from jax_ssd import compile, config, dispatch_paths
from jax_ssd.progress import Progress
from jax_ssd.tools.tune import add_sizes, named_programs


def main(arguments: Sequence[str]) -> int:
    """Compiles what is named; 0, or 1 if a kernel does not compile or there is no compiler."""
    made = argparse.ArgumentParser(
        prog="python -m jax_ssd compile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_sizes(made)
    made.add_argument("--arch", nargs="+", help="such as sm_90 (default: the GPUs here, or JAX_SSD_TARGET_ARCH)")
    options = made.parse_args(arguments)
    programs = named_programs(options)
    try:
        archs = options.arch or compile.target_archs()
        jobs = {arch: requests(programs, arch) for arch in (config.parse_arch(arch, "--arch") for arch in archs)}
    except (NotImplementedError, ValueError) as error:
        print(f"jax_ssd compile: {error}")
        return 1
    return 1 if compile_all(jobs) else 0


def requests(programs: Sequence[tuple], arch: str) -> dict[compile.Request, str]:
    """Each distinct kernel with its name; programs that run no kernels are told."""
    found: dict[compile.Request, str] = {}
    with config.override(target_arch=arch):
        for label, (function, operands) in programs:
            try:
                paths = dispatch_paths(function, *operands, platform="cuda")
            except NotImplementedError as refusal:  # of the implementation that was asked for
                print(f"{label}: {refusal}")
                continue
            for path in paths:
                if path.plan is None:
                    print(f"{label}: {path.op} runs {path.implementation!r}, which has nothing to compile")
                    for name, reason in path.refusals.items():
                        print(f"  not {name}: {reason}")
                    continue
                for launch in path.plan.launches:
                    found.setdefault((launch.kernel, path.plan.compile_arguments(launch)), f"{path.op} {launch.name}")
    return found


def compile_all(jobs: dict[str, dict[compile.Request, str]]) -> int:
    """Compiles all, a line for each kernel; how many failed."""
    started, failed = time.monotonic(), 0
    total = sum(map(len, jobs.values()))

    def one(request: compile.Request, arch: str) -> tuple[float, compile.Cubin]:
        start = time.monotonic()
        (cubin,) = compile.compile_launches([request], arch)
        return time.monotonic() - start, cubin

    with Progress("compiling", total) as shown, ThreadPoolExecutor(config.settings().compile_jobs) as pool:
        tasks = {
            pool.submit(copy_context().run, one, request, arch): f"{arch} {name}"
            for arch, wanted in jobs.items()
            for request, name in wanted.items()
        }
        for task in as_completed(tasks):
            try:
                seconds, cubin = task.result()
                shown.done(f"{tasks[task]}: {seconds:.1f} s, {cubin.registers} registers, {len(cubin.data):,} bytes")
            except (compile.CompileError, NotImplementedError) as error:
                failed += 1
                shown.done(f"{tasks[task]}: FAILED: {error}")
    folder = config.settings().cache_dir or "memory only (JAX_SSD_CACHE_DIR=off)"
    print(f"{total - failed} of {total} kernels in {time.monotonic() - started:.1f} s, cached in {folder}.")
    return failed
