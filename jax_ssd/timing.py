"""Device time of one call, the same way for the tuner and for every framework of the benchmarks.

A *program* holds n calls, each on its own set of inputs: an XLA executable for JAX, a CUDA graph for torch. Executing
it m times and 2m times, each followed by one wait, and taking the difference cancels dispatch, the wait and everything
else that happens once, so what is left is m programs back to back on the device. The median over repeats of

    (time(2m) - time(m)) / (m n)

is the time of one call. What disturbs the run of m makes such a difference too short, so the least time, `least`, is
not the least of these but the difference of the fastest run of 2m and the fastest of m.

Sets are rotated because a program touches all of its n sets before it meets one again: with more than the L2 cache's
60 MB in them, every call finds its inputs in memory. Nothing is timed by a profiler. If the host needs about as long to
submit a program as the device to run it, the figure is the host's: `host_bound` says so.

Processes that compile and time side by side take turns at the device: see `alone`.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

COLD_BYTES = 128 << 20  # twice an H200's L2

# Captured in command buffers, in program order: independent calls must not overlap, or the time of one would be a
# guess. Options that a JAX version does not know are left out by trying the next entry.
_CAPTURE = {"xla_gpu_graph_min_graph_size": "1", "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
GPU_OPTIONS: tuple[dict[str, str], ...] = (
    {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL"} | _CAPTURE,
    {},
)


@dataclass(frozen=True)
class Timing:
    """Seconds per call and how they were found."""

    seconds: float
    low: float
    high: float
    least: float
    repeats: int
    calls_per_program: int
    programs: int
    dispatch_seconds: float
    host_bound: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds of device time aimed at per sample, and samples.

    Where a program is so long that the samples take more than `enough_seconds`, `FEWEST` of them will do. Where the
    middle half of the samples is further apart than SETTLED of their median, as on a busy host, up to MOST_ROUNDS times
    as many are taken.
    """

    sample_seconds: float = 0.02
    repeats: int = 9
    most_programs: int = 16  # more in flight and the runtime makes the host wait
    enough_seconds: float = 2.0


FEWEST = 3
SETTLED = 0.1
MOST_ROUNDS = 4
_turn = threading.RLock()
_depth = 0


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """The body runs while no other process or thread of this user is in such a body on this machine.

    So programs can be compiled side by side, which takes most of the time, and still be timed one by one. The thread
    asks for precedence on its processor too, which not every user is given.
    """
    global _depth
    with _turn, contextlib.ExitStack() as stack:
        if _depth == 0:
            path = Path(tempfile.gettempdir()) / f"jax_ssd-timing-{os.getuid()}.lock"
            fcntl.flock(stack.enter_context(path.open("a")), fcntl.LOCK_EX)
            thread = threading.get_native_id()
            stack.callback(_set_niceness, thread, os.getpriority(os.PRIO_PROCESS, thread))
            _set_niceness(thread, -10)
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1


def _set_niceness(thread: int, value: int) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, value)


def calls_per_program(bytes_per_call: int, most: int) -> int:
    """Enough input sets to outgrow the cache, at least two where `most` allows, at most `most`."""
    return min(most, max(2, math.ceil(COLD_BYTES / max(bytes_per_call, 1))))


def compile_program(
    program: Callable[..., Any],
    arguments: tuple[Any, ...],
    donate: tuple[int, ...] = (),
    options: Sequence[dict[str, Any]] = GPU_OPTIONS,
) -> tuple[Any, dict[str, Any]]:
    """The executable and the compiler options it took; on a GPU the first of `options` that compiles."""
    lowered = jax.jit(program, donate_argnums=donate).lower(*arguments)
    if jax.devices()[0].platform != "gpu":
        return lowered.compile(), {}
    for chosen in options[:-1]:
        try:
            return lowered.compile(compiler_options=dict(chosen)), chosen
        except Exception as error:  # an option this version does not have; the class differs between versions
            if "xla_gpu" not in str(error):
                raise
    return lowered.compile(), {}


def _middle_half(samples: Sequence[float]) -> float:
    """How far apart the quartiles are."""
    ordered = sorted(samples)
    quarter = len(ordered) // 4
    return ordered[-1 - quarter] - ordered[quarter]


def _slope(short: float, long: float) -> float:
    """What `long` took beyond `short`; half of `long` where it seems to have taken no longer, as on a busy host."""
    return long - short if long > short else long / 2


def measure(execute: Callable[[], Any], wait: Callable[[Any], None], calls: int, effort: Effort) -> Timing:
    """Times `execute`, which submits one program of `calls` calls and returns something to `wait` for."""

    def run(times: int) -> tuple[float, float]:
        result = None
        start = time.perf_counter()
        for _ in range(times):
            result = None  # the memory is used again: for other addresses XLA would update its captured graphs
            result = execute()
        submitted = time.perf_counter() - start
        wait(result)
        return time.perf_counter() - start, submitted

    run(1)
    once = min(run(1)[0] for _ in range(2))
    programs = max(1, min(effort.most_programs, int(effort.sample_seconds / max(once, 1e-7))))
    run(programs)
    shorts, longs, slopes, dispatch = [], [], [], []
    started = time.perf_counter()
    for repeat in range(MOST_ROUNDS * effort.repeats):
        if repeat >= FEWEST and time.perf_counter() - started > effort.enough_seconds:
            break
        if repeat >= effort.repeats and _middle_half(slopes) <= SETTLED * statistics.median(slopes):
            break
        short, _ = run(programs)
        long, submitted = run(2 * programs)
        shorts.append(short)
        longs.append(long)
        slopes.append(_slope(short, long) / programs)
        dispatch.append(submitted / (2 * programs))
    slopes.sort()
    seconds, submit = statistics.median(slopes), statistics.median(dispatch)
    tenth = len(slopes) // 10
    return Timing(
        seconds / calls,
        slopes[tenth] / calls,
        slopes[-1 - tenth] / calls,
        _slope(min(shorts), min(longs)) / programs / calls,
        len(slopes),
        calls,
        programs,
        submit / calls,
        submit > 0.8 * seconds,
    )
