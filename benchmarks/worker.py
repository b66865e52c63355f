"""Measures one implementation on a list of cases. `run` starts one process per implementation, so that a peer that
crashes, leaks memory or sets the device up its own way spoils only its own rows.

    python -m benchmarks.worker job.json     reads a Job, appends one JSON line per finding to its `output`
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers, rows, timing
from benchmarks.cases import Case
from benchmarks.peers.base import Options, Peer, version_of

PREPARE = "prepare"  # the job that computes references and ceilings


@dataclass(frozen=True)
class Job:
    implementation: str
    cases: list[Case]
    passes: tuple[str, ...]
    folder: str  # holds the references, <case>.npz
    output: str
    options: Options = field(default_factory=Options)
    effort: timing.Effort = field(default_factory=timing.Effort)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        given = json.loads(text)
        given["cases"] = [Case(**case) for case in given["cases"]]
        given["passes"] = tuple(given["passes"])
        given["options"], given["effort"] = Options(**given["options"]), timing.Effort(**given["effort"])
        return cls(**given)


def passes_of(case: Case, passes: tuple[str, ...]) -> list[str]:
    """A case of one token is a step case: it has steps and decodes; the others have sequences."""
    fitting = ("step", "decode") if case.seq == 1 else ("forward", "forward_backward")
    return [name for name in passes if name in fitting]


def execute(job: Job) -> None:
    """Runs a job, appending what it finds as it finds it."""

    def say(kind: str, value: Any) -> None:
        with Path(job.output).open("a") as stream:
            stream.write(json.dumps({"kind": kind, "value": value}) + "\n")

    if job.implementation == PREPARE:
        _prepare(job, say)
    else:
        _measure(job, say)


def _prepare(job: Job, say: Any) -> None:
    from benchmarks import ceilings, reference

    say("device", ceilings.describe_device())
    say("versions", {"python": sys.version.split()[0], "jax": version_of("jax"), "jaxlib": version_of("jaxlib")})
    say("ceilings", ceilings.measure_ceilings(job.effort))
    for case in job.cases:
        start = time.perf_counter()
        results: dict[str, Any] = reference.compute(case, tuple(passes_of(case, job.passes)))
        np.savez(Path(job.folder) / f"{case.name}.npz", **results)
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
    for case, name in wanted:
        start = time.perf_counter()
        found = _best(peer, case, name, job)
        gc.collect()
        say("row", found | {"wall_seconds": time.perf_counter() - start})
    say("notes", {job.implementation: peer.notes()})


def _best(peer: Peer, case: Case, pass_name: str, job: Job) -> dict[str, Any]:
    """The fastest of the implementation's variants; the others' times are kept beside it."""
    reason = peer.refuses(case, pass_name)
    if reason is not None:
        return rows.row(case, pass_name, peer.name, "unsupported", reason=reason)
    if peer.framework == "torch":
        from benchmarks.measure_torch import measure
    else:
        from benchmarks.measure_jax import measure
    with np.load(Path(job.folder) / f"{case.name}.npz") as stored:
        reference = dict(stored)
    tried = []
    for variant in peer.variants(case, pass_name):
        try:
            tried.append(measure(peer, case, pass_name, variant, reference, job.effort))
        except Exception as error:  # one row's failure must not cost the others
            found = rows.failure(case, pass_name, peer.name, error)
            if found["status"] == "failed":
                traceback.print_exc()
            tried.append(found | {"variant": variant})
        gc.collect()
    ranks = {"ok": 0, "wrong": 1, "unsupported": 2, "failed": 3}
    best = min(tried, key=lambda found: (ranks[found["status"]], found.get("microseconds", 0.0)))
    keys = ("variant", "status", "microseconds", "reason")
    return best | {"variants": [{key: found[key] for key in keys if key in found} for found in tried]}


def main() -> None:
    execute(Job.from_json(Path(sys.argv[1]).read_text()))


if __name__ == "__main__":
    main()
