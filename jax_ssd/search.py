"""jax_ssd.autotune: measures what the kernels of a function can choose, and keeps the fastest for later calls.

From the heuristic's choice one field after the other is changed; the changes that helped are tried together, and then
once more around the best. A quick search tries the likeliest few instead: what was fastest at other sizes, and one step
up and down from the heuristic's. The fastest are measured again side by side before one of them is believed.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import datetime
import math
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from jax_ssd import compile, config, dispatch, launch, op, paths, shapes, timing, tune
from jax_ssd.plans import Buffer, Plan
from jax_ssd.progress import Progress
from jax_ssd.tune import Tunable

ROUNDS = 2
FINALISTS = 3
LIKELY = 8  # choices that a quick search tries, the heuristic's among them
MARGIN = 0.02  # by which a choice must beat the heuristic's to be preferred: less is noise
QUICK, CAREFUL = timing.Effort(0.004, 3), timing.Effort(0.02, 7)
MOST_SETS = 32  # of operands in one timed program
# Calls in one timed program, where they move that little: the host needs as long for a program as some dozen of them.
MOST_CALLS, PROGRAM_BYTES = 256, 1 << 30
# Two choices differ in rounding; what differs by more than this computes something else and is not taken.
AGREEMENT = 5e-2
# Values that keep a recurrence in range. Other operands are standard normal.
RANGES = {"dt": (1e-3, 1e-1), "A": (-1.0, -0.1), "adt": (-0.1, -1e-3)}


@dataclass(frozen=True)
class Tuned:
    """What was found for one plan.

    us, heuristic_us: microseconds of one call. choice: the fields that differ from the heuristic's. tried: how many
    choices were timed; 0 if the result was there already.
    """

    op: str
    implementation: str
    problem: Any
    us: float
    heuristic_us: float
    choice: dict[str, Any]
    tried: int

    def __str__(self) -> str:
        p = self.problem
        sizes = f"batch {p.batch}, seq {p.seq}, heads {p.heads}, head_dim {p.head_dim}, state {p.state}, {p.dtype}"
        chosen = ", ".join(f"{name}={value}" for name, value in self.choice.items()) or "the heuristic's choice"
        how = f"{self.tried} tried" if self.tried else "tuned before"
        return (
            f"{self.op} {self.implementation} ({sizes}): {self.us:.1f} us, heuristic {self.heuristic_us:.1f} us, "
            f"{chosen} ({how})"
        )


def autotune(
    function: Callable,
    *args: Any,
    force: bool = False,
    progress: bool = True,
    seconds: float = 100.0,
    quick: bool = False,
    **kwargs: Any,
) -> list[Tuned]:
    """Measures the choices of every kernel that `function(*args, **kwargs)` would run, and keeps the fastest.

    The function is traced, not run, so arrays may be jax.ShapeDtypeStruct; kernels are timed on buffers of random
    numbers. With derivatives in it (pass jax.grad(f)) the backward is tuned too. Each result is written to the user's
    tuning file (JAX_SSD_TUNING_FILE) as it comes, so an interrupted run goes on where it stopped, and holds for nearby
    sizes as well. Sizes are those of the whole arrays: for a sharded program give the shapes of one shard.

    Programs that JAX has compiled keep the choices that they were compiled with; `jax.clear_caches()` drops them.

    Args:
      function: any function of JAX arrays, e.g. `jax_ssd.mamba2` itself, a model's call or a training step.
      *args: its arguments.
      force: measure anew what has a result already.
      progress: show how far it is.
      seconds: after which nothing new is tried for one plan.
      quick: try the likeliest few choices only, and only those of the implementation that implementation=None takes: a
        second or two for a plan.
      **kwargs: its keyword arguments. Those that are neither arrays nor trees of them are taken as static.

    Returns:
      One Tuned per distinct plan, in program order. Empty if the function calls no kernel of this library.

    Raises:
      ValueError, TypeError: `function` is none, or an option out of range.
      NotImplementedError: JAX sees no NVIDIA GPU.
      RuntimeError: a plan does not run with the heuristic's choice either.
    """
    seconds = shapes.number("autotune", "seconds", seconds)
    for name, value in {"force": force, "progress": progress, "quick": quick}.items():
        shapes.flag("autotune", name, value)
    equations = paths.calls(function, args, kwargs)
    device = tuning_device()
    arch = compile.target_arch(device)
    calls = plans_of(equations, first=quick)
    found = []
    with Progress("tuning", len(calls), progress) as shown:
        for tunable, problem in calls:
            result = None if force else _before(tunable, arch, problem)
            tried = 0
            if result is None:
                plan = tunable.make(problem, tunable.heuristic(problem))
                bench = Bench(device, arch, plan, problem)
                result = search(tunable, problem, bench, shown.note, seconds, quick)
                result["sources"] = tune.digests(plan)
                result["provenance"] = provenance(device, plan)
                tried = len(result["tried"])
                tune.store(tunable.op, arch, problem, tunable.implementation, result)
            found.append(_tuned(tunable, problem, result, tried))
            shown.done(str(found[-1]))
    return found


def plans_of(equations: Iterable[Any], first: bool = False) -> list[tuple[Tunable, Any]]:
    """Each distinct tunable plan function with its problem that the equations' implementations can run.

    first: only of the implementation that each would run, rather than of all that could.
    """
    found: list[tuple[Tunable, Any]] = []
    for equation in equations:
        definition = op.DEFINITIONS.get(equation.primitive.name)
        spec, avals = equation.params.get("spec"), [variable.aval for variable in equation.invars]
        if definition is None:
            continue
        order = op.preferences(definition, spec, "cuda", avals) if first else dispatch.KERNELS
        for name in order:
            if name not in dispatch.KERNELS or name not in spec.implementation:
                continue
            try:
                with tune.recorded() as calls:
                    op.kernel_plan(definition, spec, name, "cuda", avals)
            except NotImplementedError:
                continue
            found += [call for call in calls if call not in found]
            if first:
                break
    return found


def likely(tunable: Tunable, problem: Any, arch: str) -> list[Any]:
    """The choices that a quick search tries: the heuristic's, the fastest at other sizes, and the heuristic's changed.

    Fields that depend on the size are changed first, each to the next smaller and the next larger of its values.
    """
    start = tunable.heuristic(problem)
    found = [start, *tune.choices_elsewhere(tunable, problem, arch)]
    values = tunable.values(problem)
    for name in sorted(values, key=lambda name: name not in tunable.local):
        now = getattr(start, name)
        others = [value for value in values[name] if value != now]
        if all(isinstance(value, int) for value in (now, *others)):
            others = [*[v for v in others if v < now][-1:], *[v for v in others if v > now][:1]]
        found += _changed(start, name, others)
    return list(dict.fromkeys(found))[:LIKELY]


def search(
    tunable: Tunable, problem: Any, bench: Bench, note: Callable[[str], None], seconds: float, quick: bool = False
) -> dict[str, Any]:
    """The fastest choice, its time and the heuristic's, and what was tried; as a record of tune.py holds it."""
    start = tunable.heuristic(problem)
    base = tunable.make(problem, start)
    values = tunable.values(problem)
    programs: dict[Any, Any] = {}
    times: dict[Any, float] = {}
    deadline = math.inf  # the heuristic's choice is measured in any case

    def attempt(choices: Iterable[Any]) -> None:
        plans = {choice: plan for choice in choices if choice not in times and (plan := _plan(choice)) is not None}
        note(f"{tunable.op} {tunable.implementation}: compiling {len(plans)}")
        now = time.monotonic()
        loaded = bench.load(plans, now + (deadline - now) / 2)  # the other half is for timing
        for choice in plans:
            times[choice] = math.inf
            if choice in loaded and time.monotonic() < deadline:
                times[choice] = bench.time(loaded[choice], QUICK)
                programs[choice] = loaded[choice]
                note(
                    f"{tunable.op} {tunable.implementation}: {times[choice]:.1f} us, best {min(times.values()):.1f} us"
                )

    def _plan(choice: Any) -> Plan | None:
        try:
            plan = tunable.make(problem, choice)
            plan.check(bench.arch)
        except (NotImplementedError, ValueError):
            return None
        return plan if _scratch(plan) <= max(_scratch(base), tunable.scratch * _passed(plan)) else None

    attempt(likely(tunable, problem, bench.arch) if quick else [start])
    if not math.isfinite(times.get(start, math.inf)):
        raise RuntimeError(
            f"{tunable.op} {tunable.implementation} does not run here with its heuristic's choice, {start}: "
            f"{bench.failure}"
        )
    best, deadline = start, time.monotonic() + seconds
    for _ in range(0 if quick else ROUNDS):
        around = {name: list(_changed(best, name, some)) for name, some in values.items()}
        attempt(choice for choices in around.values() for choice in choices)
        attempt([_combined(best, around, times)])
        if min(times, key=times.__getitem__) == best:
            break
        best = min(times, key=times.__getitem__)
    # In the order of their times, the heuristic's among them: a difference within the noise must not move the choice.
    finalists = sorted(times, key=times.__getitem__)[:FINALISTS]
    for choice in dict.fromkeys([start, *finalists]):
        if math.isfinite(times[choice]):
            times[choice] = bench.time(programs[choice], CAREFUL)
    best = min(dict.fromkeys([start, *finalists]), key=times.__getitem__)
    if not math.isfinite(times[start]):
        raise RuntimeError(
            f"{tunable.op} {tunable.implementation} ran with its heuristic's choice, {start}, but not a second time "
            f"with the same results: {bench.failure or 'they differ'}"
        )
    if bench.host_bound or times[best] > (1 - MARGIN) * times[start]:
        best = start  # no lead, or the host is slower than the kernels, so that nothing was seen of them
    tried = [[_difference(choice, start), round(us, 2)] for choice, us in times.items() if math.isfinite(us)]
    return {
        "choice": _difference(best, start),
        "us": round(times[best], 2),
        "heuristic_us": round(times[start], 2),
        "host_bound": bench.host_bound,
        "tried": tried,
    }


def _changed(choice: Any, name: str, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        try:
            if value != getattr(choice, name):
                yield replace(choice, **{name: value})
        except ValueError:  # the choice refuses the value
            continue


def _combined(best: Any, around: dict[str, list[Any]], times: dict[Any, float]) -> Any:
    """All single changes that helped, at once."""
    changes = {}
    for name, choices in around.items():
        fastest = min(choices, key=lambda choice: times.get(choice, math.inf), default=best)
        if times.get(fastest, math.inf) < times[best]:
            changes[name] = getattr(fastest, name)
    try:
        return replace(best, **changes)
    except ValueError:
        return best


@dataclass
class Program:
    """An executable of several calls of one plan on several sets of operands; some of them written in place."""

    run: Callable[..., Any]
    moving: tuple[int, ...]


@dataclass
class Bench:
    """Compiles and times the plans of one problem on one GPU. All take the same operands."""

    device: Any
    arch: str
    plan: Plan
    problem: Any
    sets: list[list[jax.Array]] = field(init=False)
    turns: int = field(init=False)  # so often a program uses each set
    expected: list[jax.Array] | None = None
    failure: str = ""  # the last one
    host_bound: bool = False  # whether the last program waited for the host

    def __post_init__(self) -> None:
        passed = _passed(self.plan)
        calls = timing.calls_per_program(passed, MOST_SETS)
        self.turns = max(1, min(MOST_CALLS, PROGRAM_BYTES // passed) // calls)
        with jax.default_device(self.device):
            draw = jax.jit(partial(_operands, self.plan.operands, self.problem)).lower(0).compile()
            with timing.alone():
                self.sets = [draw(seed) for seed in range(calls)]

    def load(self, plans: dict[Any, Plan], deadline: float) -> dict[Any, Program]:
        """Those that compile before the deadline, in parallel. What does not compile is no candidate."""
        pool = concurrent.futures.ThreadPoolExecutor(config.settings().compile_jobs, "jax_ssd-tune")
        try:
            # In a copy of this context, where settings may be overridden.
            jobs = {
                pool.submit(contextvars.copy_context().run, self._load, plan): choice for choice, plan in plans.items()
            }
            done, _ = concurrent.futures.wait(
                jobs, timeout=None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            )
            failed = [job.exception() for job in done if job.exception() is not None]
            self.failure = next(map(str, failed), self.failure)
            return {jobs[job]: job.result() for job in done if job.exception() is None}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, plan: Plan) -> Program:
        kernels = launch.runner(plan, self.arch)
        names = [buffer.name for buffer in plan.operands]
        moving = tuple(names.index(name) for name in plan.aliases)
        results = [buffer.name for buffer in plan.results]
        carried = [results.index(result) for result in plan.aliases.values()]

        def program(moved, fixed):
            moved, others = list(moved), []
            for turn in range(self.turns):
                for index in range(len(moved)):
                    operands = list(fixed[index % len(fixed)])
                    for position, value in zip(moving, moved[index], strict=True):
                        operands[position] = value
                    if turn and not moving:  # all of it waits for the call before: equal calls would be made one
                        operands, others[-1] = jax.lax.optimization_barrier((operands, others[-1]))
                    returned = kernels(*operands)
                    # Each result once: to return one twice XLA would copy it.
                    moved[index] = [returned[i] for i in carried]
                    rest = [value for i, value in enumerate(returned) if i not in carried]
                    if turn and moving:  # what is carried keeps the call before; each array costs the host time
                        others[index] = rest
                    else:
                        others.append(rest)
            return moved, others

        with jax.default_device(self.device):
            run, _ = timing.compile_program(program, (self._moved(moving), self._fixed(moving)), (0,))
        return Program(run, moving)

    def time(self, program: Program, effort: timing.Effort) -> float:
        """Microseconds of one call; infinite if it fails or its results are not those of the first program timed."""
        with timing.alone():
            return self._time(program, effort)

    def _time(self, program: Program, effort: timing.Effort) -> float:
        try:
            fixed = self._fixed(program.moving)
            state, outputs = program.run(self._moved(program.moving), fixed)
            results = [jnp.copy(result) for result in (*state[0], *outputs[0])]
            if self.expected is None:
                self.expected = results
            elif not _agree(results, self.expected):
                return math.inf
            carried = [state]
            del outputs

            def execute() -> Any:
                carried[0], outputs = program.run(carried[0], fixed)
                return outputs

            measured = timing.measure(execute, jax.block_until_ready, len(self.sets) * self.turns, effort)
            self.host_bound = measured.host_bound
            return 1e6 * measured.seconds
        except Exception as error:  # a launch that the driver refuses, too little memory: no candidate
            self.failure = f"{type(error).__name__}: {error}"
            return math.inf

    def _moved(self, moving: tuple[int, ...]) -> list[list[jax.Array]]:
        return [[jnp.copy(operands[position]) for position in moving] for operands in self.sets]

    def _fixed(self, moving: tuple[int, ...]) -> list[list[Any]]:
        """Those of every set, but of a step, whose state is nearly all that it moves, one token for all."""
        sets = self.sets[:1] if moving else self.sets
        return [[None if i in moving else array for i, array in enumerate(operands)] for operands in sets]


def _operands(buffers: Iterable[Buffer], problem: Any, seed: jax.typing.ArrayLike) -> list[jax.Array]:
    arrays = []
    for key, buffer in zip(jax.random.split(jax.random.key(seed), len(tuple(buffers))), buffers, strict=True):
        dtype = jnp.dtype(buffer.dtype)
        if buffer.name == "cu_seqlens":  # equal lengths
            ends = jnp.linspace(0, problem.seq, buffer.shape[-1]).astype(dtype)
            arrays.append(jnp.broadcast_to(ends, buffer.shape))
        elif not jnp.issubdtype(dtype, jnp.floating):  # run numbers: one run
            arrays.append(jnp.zeros(buffer.shape, dtype))
        elif buffer.name in RANGES:
            low, high = RANGES[buffer.name]
            arrays.append(jax.random.uniform(key, buffer.shape, jnp.float32, low, high).astype(dtype))
        else:
            arrays.append(jax.random.normal(key, buffer.shape, dtype))
    return arrays


@jax.jit
def _deviation(got: list[jax.Array], expected: list[jax.Array]) -> jax.Array:
    """The largest relative error of the results."""
    pairs = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in zip(got, expected, strict=True)]
    errors = [jnp.linalg.norm(jnp.ravel(a - b)) / jnp.maximum(jnp.linalg.norm(jnp.ravel(b)), 1e-20) for a, b in pairs]
    return jnp.max(jnp.stack(errors))


def _agree(got: list[jax.Array], expected: list[jax.Array]) -> bool:
    return bool(_deviation(got, expected) <= AGREEMENT)  # NaN does not


def _scratch(plan: Plan) -> int:
    return sum(buffer.nbytes for buffer in plan.scratch)


def _passed(plan: Plan) -> int:
    return sum(buffer.nbytes for buffer in (*plan.operands, *plan.results))


def _difference(choice: Any, start: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(choice).items() if value != getattr(start, name)}


def _before(tunable: Tunable, arch: str, problem: Any) -> dict[str, Any] | None:
    record = tune.measured(tunable.op, arch, problem)
    result = None if record is None else record["results"].get(tunable.implementation)
    return result if result is not None and tune.is_fresh(result) else None


def _tuned(tunable: Tunable, problem: Any, result: dict[str, Any], tried: int) -> Tuned:
    times = result["us"], result["heuristic_us"]
    return Tuned(tunable.op, tunable.implementation, problem, *times, result["choice"], tried)


def tuning_device() -> Any:
    try:
        return jax.devices("cuda")[0]
    except RuntimeError as error:
        raise NotImplementedError(
            f"tuning times kernels on an NVIDIA GPU, and JAX sees none ({str(error).splitlines()[0]}). Run it where "
            f"the program will run; without any tuning the heuristics choose, and a tuning file that was written "
            f"elsewhere can be carried here (JAX_SSD_TUNING_FILE). `python -m jax_ssd compile` needs no GPU."
        ) from error


def provenance(device: Any, plan: Plan) -> dict[str, Any]:
    """Where a result comes from: date, device, driver, versions and command."""
    compilers = {compile.compiler_version(one.kernel) for one in plan.launches}
    versions = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "jax_ssd"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "driver": _driver(),
        "versions": versions | {"compiler": ", ".join(sorted(str(one) for one in compilers))},
        "command": shlex.join(["python", *sys.orig_argv[1:]])[:300],
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
