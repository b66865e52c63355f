"""Measures one implementation on a list of cases. `run` starts processes for each implementation, so that a peer that
crashes, leaks memory or sets the device up its own way spoils only its own rows. They compile side by side and take
turns at the device, row by row.

    python -m benchmarks.worker job.json     reads a Job, appends one JSON line per finding to its `output`
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers, rows, timing
from benchmarks.cases import Case
from benchmarks.floors import necessary_bytes
from benchmarks.peers.base import Options, Peer, version_of

CEILINGS = "ceilings"  # the job that finds out what the machine can do
PREPARE = "prepare"  # a job that computes references
FAILED = ".failed"  # in place of a reference, why there is none
# Exit status of a worker that goes on in another process: after a failure, which may have left the device in no state
# to go on, and after a large case, since JAX gives no memory back before a process ends.
AGAIN = 75
LARGE_BYTES = 1 << 30  # that a forward and backward moves


@dataclass(frozen=True)
class Job:
    implementation: str
    cases: list[Case]
    passes: tuple[str, ...]
    folder: str  # holds the references, <case>.npz
    output: str
    options: Options = field(default_factory=Options)
    effort: timing.Effort = field(default_factory=timing.Effort)
    done: list[tuple[str, str]] = field(default_factory=list)  # case and pass, measured by a worker before this one
    parent: int = 0  # process without which there is no point in going on; 0 for none

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        given = json.loads(text)
        given["cases"] = [Case(**case) for case in given["cases"]]
        given["passes"], given["done"] = tuple(given["passes"]), [tuple(one) for one in given["done"]]
        given["options"], given["effort"] = Options(**given["options"]), timing.Effort(**given["effort"])
        return cls(**given)


def passes_of(case: Case, passes: tuple[str, ...]) -> list[str]:
    """A step case has steps and, of one token each, decodes; the others have sequences."""
    of_step = ("step",) if case.step else ("step", "decode")
    fitting = of_step if case.is_step else ("forward", "forward_backward")
    return [name for name in passes if name in fitting]


def execute(job: Job) -> None:
    """Runs a job, appending what it finds as it finds it."""

    def say(kind: str, value: Any) -> None:
        with Path(job.output).open("a") as stream:
            stream.write(json.dumps({"kind": kind, "value": value}) + "\n")

    runners = {CEILINGS: _measure_ceilings, PREPARE: _prepare}
    runners.get(job.implementation, _measure)(job, say)


def _measure_ceilings(job: Job, say: Any) -> None:
    from benchmarks import ceilings

    say("device", ceilings.describe_device())
    say("versions", {"python": sys.version.split()[0], "jax": version_of("jax"), "jaxlib": version_of("jaxlib")})
    with timing.alone():
        say("ceilings", ceilings.measure_ceilings(job.effort))


def _prepare(job: Job, say: Any) -> None:
    from benchmarks import reference

    for case in job.cases:
        _require_parent(job)
        start = time.perf_counter()
        path = Path(job.folder) / f"{case.name}.npz"
        try:
            results: dict[str, Any] = reference.compute(case, tuple(passes_of(case, job.passes)))
        except Exception as error:  # too little memory, say: it costs the rows of this case
            traceback.print_exc()
            path.with_suffix(FAILED).write_text(f"{type(error).__name__}: {error}"[:500])
            continue
        np.savez(path.with_suffix(".part.npz"), **results)
        path.with_suffix(".part.npz").rename(path)  # whole when it is there
        del results
        gc.collect()
        say("reference", {"case": case.name, "seconds": time.perf_counter() - start})


def _measure(job: Job, say: Any) -> None:
    wanted = [(case, name) for case in job.cases for name in passes_of(case, job.passes)]
    try:
        peer = peers.load(job.implementation, job.options)
    except Exception as error:  # whatever keeps a peer from loading is the reason its rows show
        for case, name in wanted:
            say("row", rows.failure(case, name, job.implementation, error))
        return
    for case in job.cases:
        for name in passes_of(case, job.passes):
            if (case.name, name) in job.done:
                continue
            _require_parent(job)
            start = time.perf_counter()
            found = _best(peer, case, name, job, say)
            gc.collect()
            say("row", found | {"wall_seconds": time.perf_counter() - start})
            large = peer.framework == "jax" and necessary_bytes(case, name) > LARGE_BYTES
            if job.parent and (found["status"] == "failed" or (large and found["status"] != "unsupported")):
                say("notes", {job.implementation: peer.notes()})
                raise SystemExit(AGAIN)
        say("notes", {job.implementation: peer.notes()})


def _require_parent(job: Job) -> None:
    if job.parent and os.getppid() != job.parent:
        raise SystemExit("the run that started this worker is gone")


def _best(peer: Peer, case: Case, pass_name: str, job: Job, say: Any) -> dict[str, Any]:
    """The fastest of the implementation's variants; the others' times are kept beside it."""
    reason = peer.refuses(case, pass_name)
    if reason is not None:
        return rows.row(case, pass_name, peer.name, "unsupported", reason=reason)
    if peer.framework == "torch":
        from benchmarks.measure_torch import build
    else:
        from benchmarks.measure_jax import build
    tried = []
    for variant in peer.variants(case, pass_name):
        try:
            run = build(peer, case, pass_name, variant, job.effort)
            reference = _reference(job, case)
            with timing.alone():
                say("at_device", True)
                start = time.perf_counter()
                try:
                    tried.append(run(reference) | {"device_seconds": time.perf_counter() - start})
                finally:
                    say("at_device", False)
        except Exception as error:  # one row's failure must not cost the others
            found = rows.failure(case, pass_name, peer.name, error)
            if found["status"] == "failed":
                traceback.print_exc()
            tried.append(found | {"variant": variant})
        run = None
        gc.collect()
    ranks = {"ok": 0, "wrong": 1, "unsupported": 2, "failed": 3}
    best = min(tried, key=lambda found: (ranks[found["status"]], found.get("microseconds", 0.0)))
    keys = ("variant", "status", "microseconds", "reason")
    return best | {"variants": [{key: found[key] for key in keys if key in found} for found in tried]}


def _reference(job: Job, case: Case) -> dict[str, np.ndarray]:
    """Waits for what `prepare` computes meanwhile."""
    path = Path(job.folder) / f"{case.name}.npz"
    while not path.exists():
        failure = path.with_suffix(FAILED)
        if failure.exists():
            raise RuntimeError(f"there is no reference: {failure.read_text()}")
        _require_parent(job)
        time.sleep(0.1)
    with np.load(path) as stored:
        return dict(stored)


def main() -> None:
    execute(Job.from_json(Path(sys.argv[1]).read_text()))


if __name__ == "__main__":
    main()
