"""Choices that were measured: looked up when a call is planned, and never timed then.

A *choice* is one value of a frozen dataclass that a plan function takes, such as tiles. Measured ones are records in
JSON files: one shipped for each architecture (tables/sm_90.json), over it the user's own (JAX_SSD_TUNING_FILE), which
`jax_ssd.autotune` and `python -m jax_ssd tune` write. A record holds one problem and, by implementation, in what the
fastest choice for it differs from the heuristic's, its time and where that comes from.

A lookup takes the record that is nearest in size among those that agree in everything else that shapes a kernel, so a
new length or batch size never calls for new measurements. With no such record, or if the plan refuses what it says,
the plan's heuristic decides. What a plan computes depends on a choice in rounding only.

Times mean less than choices: only where they were measured near the call, with the kernels as they are now, do they
order implementations or have kernels take a call that the heuristic leaves to another implementation.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jax_ssd import compile, config, sources
from jax_ssd.cache import write_aside
from jax_ssd.plans import Plan
from jax_ssd.specs import CudaKernel

SCHEMA = 1
SIZES = ("batch", "seq", "heads", "groups")
# What two problems must share to share a choice, where they have it. The rest only makes a record less near.
SHARED = ("dtype", "state", "head_dim", "rank", "rotary", "precision", "chunk_size", "has_runs", "state_dtype")
DIFFERENCE = 0.25  # what another group count or option costs, in doublings of the size
NEAR_ROWS, NEAR_SEQ = 1, 2  # doublings within which a choice is taken whole: of batch x heads, and of the length

Record = dict[str, Any]


@dataclass(frozen=True)
class Tunable:
    """A plan function with choices: called with a problem, it plans with the measured choice or the heuristic's.

    Attributes:
      op: as in op.Definition.name.
      implementation: "cutile" or "cuda".
      make: (problem, choice, or None for the heuristic's) -> the plan.
      heuristic: problem -> a choice, an instance of a frozen dataclass whose fields are plain values.
      values: problem -> the values worth trying of each field; what `make` refuses is left out.
      local: fields that fit only sizes near the measured one, and only the kernels they were measured with; else they
        are the heuristic's.
      scratch: how much scratch memory a choice may take, as a part of the operands and results, if that is more than
        the heuristic's takes.
    """

    op: str
    implementation: str
    make: Callable[[Any, Any], Plan]
    heuristic: Callable[[Any], Any]
    values: Callable[[Any], Mapping[str, Sequence[Any]]]
    local: tuple[str, ...] = ()
    scratch: float = 0.05

    def __call__(self, problem: Any) -> Plan:
        recorder = _recorder.get()
        if recorder is not None:
            recorder.append((self, problem))
        arch = _arch()
        found = None if arch is None else lookup(self.op, arch, problem, (self.implementation,))
        if arch is None or found is None:
            return self.make(problem, None)
        record, near = found
        if not (near and is_fresh(record["results"][self.implementation])):
            self.make(problem, None)  # raises for what the heuristic leaves to another implementation
        try:
            plan = self.make(problem, self.choice(problem, arch))
            plan.check(arch)
            return plan
        except (NotImplementedError, ValueError) as refusal:
            plan = self.make(problem, None)
            plan.check(arch)  # what no choice can serve is refused without a word about choices
            _warn_once(
                f"jax_ssd ignores a tuned choice of {self.op} for {arch}: {refusal}. The heuristic decides; "
                f"`python -m jax_ssd tune` measures anew."
            )
            return plan

    def choice(self, problem: Any, arch: str) -> Any:
        """The heuristic's choice with the changes of the nearest record; None if there is no record.

        Raises ValueError if that is no choice.
        """
        found = lookup(self.op, arch, problem, (self.implementation,))
        if found is None:
            return None
        record, near = found
        start, result = self.heuristic(problem), record["results"][self.implementation]
        known = {field.name for field in fields(start)} - (set() if near and is_fresh(result) else set(self.local))
        changes = result["choice"]
        return replace(start, **{name: value for name, value in changes.items() if name in known})


def choices_elsewhere(tunable: Tunable, problem: Any, arch: str) -> list[Any]:
    """What was fastest at other sizes that can share a choice with this one, the nearest first, each once."""
    wanted, start, found = describe(problem), tunable.heuristic(problem), {}
    for record in records(arch):
        result = record["results"].get(tunable.implementation)
        if record["op"] == tunable.op and result is not None:
            away = distance(wanted, record["problem"])
            known = {name: value for name, value in result["choice"].items() if hasattr(start, name)}
            if away < math.inf:
                with contextlib.suppress(ValueError):
                    choice = replace(start, **known)
                    found[choice] = min(away, found.get(choice, math.inf))
    return sorted(found, key=found.__getitem__)


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Tunable, Any]]]:
    """Collects what is planned in the body of the `with`: each tunable plan function and its problem."""
    calls: list[tuple[Tunable, Any]] = []
    token = _recorder.set(calls)
    try:
        yield calls
    finally:
        _recorder.reset(token)


def lookup(op: str, arch: str, problem: Any, implementations: Sequence[str]) -> tuple[Record, bool] | None:
    """The nearest record that has measured all these implementations, and whether it is near in size; None without."""
    wanted = describe(problem)
    best, least = None, math.inf
    for record in records(arch):
        if record["op"] == op and all(name in record["results"] for name in implementations):
            away = distance(wanted, record["problem"])
            if away < least:  # of equally near ones the first, so the user's before the shipped
                best, least = record, away
    return None if best is None else (best, is_near(wanted, best["problem"]))


def fastest_first(names: tuple[str, ...], op: str, problem: Any) -> tuple[str, ...]:
    """Names of implementations with "cuda" and "cutile" in the measured order, where both were measured near by."""
    arch = _arch()
    pair = tuple(name for name in names if name in ("cuda", "cutile"))
    found = lookup(op, arch, problem, pair) if arch is not None and len(pair) == 2 else None
    if found is None or not found[1]:
        return names
    results = found[0]["results"]
    if not all(is_fresh(results[name]) for name in pair):
        return names
    by_time = iter(sorted(pair, key=lambda name: results[name]["us"]))
    return tuple(next(by_time) if name in pair else name for name in names)


def describe(problem: Any) -> dict[str, Any]:
    """The fields of a problem as JSON has them; a tuple becomes text, one of buffers their names."""

    def plain(value: Any) -> Any:
        return " ".join(str(getattr(v, "name", v)) for v in value) if isinstance(value, tuple) else value

    return {field.name: plain(getattr(problem, field.name)) for field in fields(problem)}


def distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Between two described problems, in doublings; infinite if they cannot share a choice."""
    if any(a.get(name) != b.get(name) for name in SHARED):
        return math.inf
    rows = abs(math.log2(a["batch"] * a["heads"] / (b["batch"] * b["heads"])))
    others = {*a, *b} - {"batch", "seq", *SHARED}
    return rows + abs(math.log2(a["seq"] / b["seq"])) + DIFFERENCE * sum(a.get(x) != b.get(x) for x in others)


def is_near(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    rows = abs(math.log2(a["batch"] * a["heads"] / (b["batch"] * b["heads"])))
    return rows <= NEAR_ROWS and abs(math.log2(a["seq"] / b["seq"])) <= NEAR_SEQ


def digests(plan: Plan) -> dict[str, str]:
    """Of the sources of a plan's kernels, by file or module: what its times were measured with."""
    kernels = [launch.kernel for launch in plan.launches]
    names = {kernel.file if isinstance(kernel, CudaKernel) else kernel.module for kernel in kernels}
    return {name: _digest(name) for name in sorted(names)}


def is_fresh(result: Mapping[str, Any]) -> bool:
    """Whether a result was measured with the kernels as they are now."""
    measured_with = result.get("sources")
    return bool(measured_with) and all(_digest(name) == digest for name, digest in measured_with.items())


def records(arch: str) -> list[Record]:
    """Every record for an architecture, the user's first."""
    own = [*_session, *_read(config.settings().tuning_file)]
    return [record for record in (*own, *shipped(arch)) if record["arch"] == arch]


@cache
def shipped(arch: str) -> tuple[Record, ...]:
    """The table in the package."""
    table = resources.files("jax_ssd").joinpath("tables", f"{arch}.json")
    return tuple(parse(table.read_text())) if table.is_file() else ()


def measured(op: str, arch: str, problem: Any) -> Record | None:
    """The user's own record of exactly this problem."""
    own = (*_session, *_read(config.settings().tuning_file))
    return next((r for r in own if _identity(r) == (op, arch, describe(problem))), None)


def store(op: str, arch: str, problem: Any, implementation: str, result: dict[str, Any]) -> None:
    """Adds a result to the user's file; one for the same problem and implementation is replaced.

    Never raises for the state of the file: one warning, and the result holds in this process only.
    """
    path = config.settings().tuning_file
    with _lock, _locked(path):
        kept = list(_read(path))
        record = {"op": op, "arch": arch, "problem": describe(problem), "results": {}}
        same = [r for r in (*_session, *kept) if _identity(r) == _identity(record)]
        for old in same[:1]:
            record["results"] |= old["results"]
        record["results"][implementation] = result
        if path is not None:
            text = dump([r for r in kept if r not in same] + [record])
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if path in _damaged:
                    os.replace(path, path.with_name(path.name + ".damaged"))
                    _damaged.discard(path)
                write_aside(path, text.encode())
                return
            except OSError as error:
                _warn_once(
                    f"jax_ssd cannot write its tuning file {path}: {error}. Results hold in this process only. Make it "
                    f"writable or set JAX_SSD_TUNING_FILE to another one."
                )
        _session[:] = [r for r in _session if r not in same] + [record]


def parse(text: str) -> list[Record]:
    """The records of a table. Raises ValueError if it is none."""
    try:
        table = json.loads(text)
        if table["schema"] != SCHEMA:
            raise ValueError(f"schema: expected {SCHEMA}, got {table['schema']!r}")
        for record in table["records"]:
            if not (isinstance(record["op"], str) and isinstance(record["arch"], str)):
                raise ValueError(f"record {record} names no op or no architecture")
            if not all(record["problem"][name] >= 1 for name in SIZES):
                raise ValueError(f"problem {record['problem']} has a size below 1")
            for result in record["results"].values():
                if not (isinstance(result["choice"], dict) and result["us"] > 0):
                    raise ValueError(f"result {result} has no choice or no time")
                if not isinstance(result.get("sources", {}), dict):
                    raise ValueError(f"result {result} has sources that are no digests by name")
        return table["records"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def dump(table: Sequence[Record]) -> str:
    """The text of a table: a line for each result, so that differences can be read."""
    entries = []
    for record in table:
        head = json.dumps({name: value for name, value in record.items() if name != "results"})
        results = [f"   {json.dumps(name)}: {json.dumps(result)}" for name, result in record["results"].items()]
        entries.append(f'  {head[:-1]}, "results": {{\n' + ",\n".join(results) + "}}")
    return f'{{"schema": {SCHEMA}, "records": [\n' + ",\n".join(entries) + "\n]}\n"


_recorder: ContextVar[list | None] = ContextVar("jax_ssd_planned", default=None)
_session: list[Record] = []  # results that no file could be found for
_files: dict[Path, tuple[Any, list[Record]]] = {}
_damaged: set[Path] = set()
_warned: set[str] = set()
_lock = threading.RLock()


def _identity(record: Record) -> tuple[str, str, dict[str, Any]]:
    return record["op"], record["arch"], record["problem"]


@contextlib.contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    """Keeps other processes from writing between our reading and writing; without a lock where none can be had."""
    with contextlib.ExitStack() as stack:
        if path is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(open(path.with_name(f"{path.name}.lock"), "a"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def _digest(name: str) -> str:
    """Of the sources of a kernel, of which CUDA C++ is named by file; empty if there are none."""
    try:
        texts = sources.cuda_sources(name) if name.endswith(".cu") else sources.module_sources(name)
    except FileNotFoundError:
        return ""
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:16]


def _arch() -> str | None:
    """What plans are made for, if that is one architecture."""
    try:
        archs = compile.target_archs()
    except NotImplementedError:
        return None
    return archs[0] if len(archs) == 1 else None


def _read(path: Path | None) -> list[Record]:
    """The user's records; read again when the file has changed."""
    if path is None:
        return []
    with _lock:
        try:
            status = path.stat()
            state = status.st_mtime_ns, status.st_size, status.st_ino
            if path not in _files or _files[path][0] != state:
                _files[path] = state, parse(path.read_text())
                _damaged.discard(path)
            return _files[path][1]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError):
                _damaged.add(path)
            _warn_once(f"jax_ssd ignores its tuning file {path}: {error}. `python -m jax_ssd tune` writes it anew.")
            return []


def _warn_once(message: str) -> None:
    with _lock:
        if message in _warned:
            return
        _warned.add(message)
    warnings.warn(message, RuntimeWarning, stacklevel=3)
