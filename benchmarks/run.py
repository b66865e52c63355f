"""Measures implementations on named cases, side by side in one run.

    python -m benchmarks.run first wide step --implementations jax_ssd:cutile plain_xla mamba_ssm --name first

prints a table and writes benchmarks/results/<date>-<name>.json. Cases: benchmarks/cases.py, `sweep*` for a prefix, or
name=B,T,G,H,N,P[,dtype][,rank=R]. How times are taken: benchmarks/timing.py. What a floor counts: benchmarks/floors.py.
An implementation that is not installed, refuses or fails gives rows that say why. Processes compile side by side and
take turns at the device. The file is written anew with every row, so an interrupted run leaves what it had.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import cases, floors, peers, report, rows, timing, worker
from benchmarks.peers.base import Options
from jax_ssd.progress import Progress

RESULTS = Path(__file__).parent / "results"
LONGEST_TURN = 60.0  # seconds at the device after which a worker is taken to hang there, which keeps all others waiting


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "cases", nargs="+", help="named cases, prefixes ending in *, or name=B,T,G,H,N,P[,dtype][,rank=R]"
    )
    made.add_argument("--implementations", nargs="+", default=["jax_ssd", "plain_xla"], metavar="NAME")
    made.add_argument("--passes", nargs="+", choices=floors.PASSES, default=list(floors.PASSES))
    made.add_argument("--name", default="run", help="last part of the result file's name")
    made.add_argument("--output", type=Path, help=f"folder for the result file (default {RESULTS.name}/ here)")
    made.add_argument("--peer-autotune", choices=("quick", "full"), default="quick")
    made.add_argument(
        "--peer-configs",
        nargs="+",
        type=_count,
        default=[("", 5)],
        metavar="[NAME=]N",
        help="configurations per kernel of a quick peer tuning, of all peers or the one named",
    )
    made.add_argument("--repeats", type=int, default=9, help="of a time; fewer where they take long")
    made.add_argument("--sample-ms", type=float, default=20.0, help="device time aimed at per sample")
    made.add_argument("--budget", type=float, default=float("inf"), help="seconds after which all is stopped")
    made.add_argument(
        "--processes",
        nargs="+",
        type=_count,
        default=[("", 1)],
        metavar="[NAME=]N",
        help="for each implementation, or the one named: they share its cases",
    )
    made.add_argument("--in-process", action="store_true", help="no process per implementation (tests, debugging)")
    return made


def _count(word: str) -> tuple[str, int]:
    name, _, count = word.rpartition("=")
    return name, max(1, int(count))


def _asked(counts: list[tuple[str, int]], implementation: str, default: int) -> int:
    given = dict(counts)
    return given.get(implementation, given.get("", default))


class Run:
    """Collects what the workers report into one result, written after each of them so that nothing is lost."""

    def __init__(self, arguments: argparse.Namespace, command: str) -> None:
        self.arguments = arguments
        self.started = time.monotonic()
        self.turns: dict[str, float] = {}  # by the output of a worker, since when it is at the device, or inf
        self.ended = ""  # what kept the run from measuring all it was asked for
        try:
            self.cases = [case for word in arguments.cases for case in cases.find(word)]
        except ValueError as error:  # a name that is none
            raise SystemExit(f"benchmarks: {error}") from error
        self.options = Options(arguments.peer_autotune)
        self.effort = timing.Effort(arguments.sample_ms / 1e3, arguments.repeats)
        now = datetime.datetime.now(datetime.UTC)
        self.path = (arguments.output or RESULTS) / f"{now:%Y-%m-%d}-{arguments.name}.json"
        self.result: dict[str, Any] = {
            "schema": report.SCHEMA,
            "name": arguments.name,
            "date": now.isoformat(timespec="seconds"),
            "command": command,
            "device": {"platform": "unknown", "host": platform.machine()},
            "versions": {},
            "ceilings": {},
            "options": {
                "peer_autotune": arguments.peer_autotune,
                "peer_configs": dict(arguments.peer_configs),
                "cold_bytes": timing.COLD_BYTES,
                **asdict(self.effort),
            },
            "cases": {case.name: case.to_json() for case in self.cases},
            "notes": {},
            "rows": [],
        }

    def all(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            jobs = [self._job(folder, worker.CEILINGS, [], 0)]
            for name in (worker.PREPARE, *self.arguments.implementations):
                jobs += [self._job(folder, name, some, at) for at, some in enumerate(self._shares(name))]
            total = sum(len(self._wanted(job)) for job in jobs)
            with Progress("measuring", total) as shown:
                if self.arguments.in_process:
                    for job in jobs:
                        worker.execute(job)
                        self._collect(job.output, 0, shown)
                else:
                    self._side_by_side(jobs, shown)
            self._account_for(jobs)
        self._write()
        if not self.result["ceilings"]:
            raise RuntimeError(f"the machine's ceilings could not be measured: {self.ended}")
        report.check(self.result)
        return self.result

    def _shares(self, implementation: str) -> list[list[cases.Case]]:
        """The cases in runs of neighbours, which have the most kernels in common."""
        count = min(_asked(self.arguments.processes, implementation, 1), len(self.cases))
        bounds = [len(self.cases) * at // count for at in range(count + 1)]
        return [self.cases[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]

    def _job(self, folder: str, implementation: str, some: list[cases.Case], number: int) -> worker.Job:
        output = Path(folder) / f"{implementation.replace(':', '-')}-{number}.jsonl"
        output.touch()
        passes, parent = tuple(self.arguments.passes), 0 if self.arguments.in_process else os.getpid()
        options = replace(self.options, peer_configs=_asked(self.arguments.peer_configs, implementation, 5))
        return worker.Job(implementation, some, passes, folder, str(output), options, self.effort, parent=parent)

    @staticmethod
    def _wanted(job: worker.Job) -> list[tuple[cases.Case, str]]:
        if job.implementation in (worker.PREPARE, worker.CEILINGS):
            return []
        return [(case, name) for case in job.cases for name in worker.passes_of(case, job.passes)]

    def _side_by_side(self, jobs: list[worker.Job], shown: Progress) -> None:
        """Runs the jobs in processes of their own and collects what they say; stops them when the budget is spent."""
        running, seen, started = {}, *(dict.fromkeys(range(len(jobs)), 0) for _ in range(2))
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
        try:
            for number, job in enumerate(jobs):
                running[number] = self._start(job)
            while running:
                time.sleep(0.2)
                if time.monotonic() - self.started > self.arguments.budget:
                    self.ended = "the budget was spent"
                    break
                for number, process in list(running.items()):
                    hangs = time.monotonic() - self.turns.get(jobs[number].output, math.inf) > LONGEST_TURN
                    if hangs:
                        process.kill()
                        process.wait()
                    code = process.poll()  # before its last words are read
                    seen[number] = self._collect(jobs[number].output, seen[number], shown)
                    if code is None:
                        continue
                    del running[number]
                    if code not in (0, worker.AGAIN):
                        how = f"was stopped after {LONGEST_TURN:.0f} s" if hangs else f"ended with code {code}"
                        self._died(jobs[number], f"its process {how}")
                        self.turns.pop(jobs[number].output, None)
                    more = self._rest(jobs[number])
                    if code and more.cases and seen[number] > started[number]:
                        started[number] = seen[number]
                        running[number] = self._start(more)
        finally:
            signal.signal(signal.SIGTERM, before)
            for process in running.values():
                process.kill()
            for number, process in running.items():
                process.wait()
                self._collect(jobs[number].output, seen[number], shown)

    @staticmethod
    def _start(job: worker.Job) -> subprocess.Popen[bytes]:
        path = Path(job.output).with_suffix(".json")
        path.write_text(job.to_json())
        command = [sys.executable, "-m", "benchmarks.worker", str(path)]
        # The processes share the device's memory, of which JAX would else take three quarters for the first.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
        if job.implementation == worker.PREPARE:  # XLA would try kernels at the device beside what is timed there
            environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
        return subprocess.Popen(command, cwd=Path(__file__).parents[1], env=environment)

    def _died(self, job: worker.Job, how: str) -> None:
        """Accounts for the pass that a process died of."""
        if job.implementation == worker.PREPARE:
            for case in job.cases:
                if not (Path(job.folder) / f"{case.name}.npz").exists():
                    (Path(job.folder) / f"{case.name}{worker.FAILED}").write_text(how)
        if job.implementation == worker.CEILINGS:
            self.ended = how
        for case, name in self._missing(job)[:1]:
            self.result["rows"].append(rows.row(case, name, job.implementation, "failed", reason=how))

    def _rest(self, job: worker.Job) -> worker.Job:
        """What a job has left to do."""
        missing = self._missing(job)
        heard = [(case.name, name) for case, name in self._wanted(job) if (case, name) not in missing]
        left = [case for case in job.cases if any(case == other for other, _ in missing)]
        return replace(job, cases=left, done=heard)

    def _missing(self, job: worker.Job) -> list[tuple[cases.Case, str]]:
        heard = {(row["case"], row["pass"], row["implementation"]) for row in self.result["rows"]}
        return [(c, name) for c, name in self._wanted(job) if (c.name, name, job.implementation) not in heard]

    def _collect(self, output: str, seen: int, shown: Progress) -> int:
        """Takes the lines after the first `seen` ones into the result; how many there are now."""
        lines = [line for line in Path(output).read_text().splitlines(keepends=True) if line.endswith("\n")]
        for line in lines[seen:]:
            found = json.loads(line)
            kind, value = found["kind"], found["value"]
            if kind == "at_device":
                self.turns[output] = time.monotonic() if value else math.inf
            elif kind == "row":
                self.result["rows"].append(value)
                time_or_reason = f"{value['microseconds']:.1f} us" if "microseconds" in value else value["status"]
                shown.done(f"{value['case']} {value['pass']} {value['implementation']}: {time_or_reason}")
            elif kind == "reference":
                self.result["notes"].setdefault("reference_seconds", {})[value["case"]] = value["seconds"]
            else:
                _merge(self.result[kind], value)
        if len(lines) > seen:
            self._write()
        return len(lines)

    def _account_for(self, jobs: list[worker.Job]) -> None:
        """Adds a row for everything that was wanted and not heard of."""
        for job in jobs:
            for case, name in self._missing(job):
                reason = self.ended or "the worker said nothing"
                self.result["rows"].append(rows.row(case, name, job.implementation, "failed", reason=reason))

    def _write(self) -> None:
        report.add_ratios(self.result)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        order = {case.name: index for index, case in enumerate(self.cases)}
        self.result["rows"].sort(key=lambda row: (order[row["case"]], floors.PASSES.index(row["pass"])))
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.result, indent=1) + "\n")
        part.rename(self.path)


def _merge(into: dict[str, Any], found: dict[str, Any]) -> None:
    """Adds what another process of the same implementation found."""
    for name, value in found.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    given = sys.argv[1:] if arguments is None else arguments
    parsed = parser().parse_args(given)
    for name in parsed.implementations:
        peers.module_name(name)  # a misspelt name stops here, not after the first quarter of an hour
    run = Run(parsed, shlex.join(["python", "-m", "benchmarks.run", *given]))
    result = run.all()
    device, ceilings = result["device"], result["ceilings"]
    print(f"{device['kind']}, driver {device.get('driver_version', 'none')}, {result['versions']}")
    copy, matmul = ceilings["copy_bytes_per_second"], ceilings["matmul_flops_per_second"]
    print(f"copy {copy / 1e9:.0f} GB/s, bfloat16 matmul {matmul / 1e9:.0f} GFLOP/s; times are medians of one call")
    print(report.table(result))
    print(f"written to {run.path}")
    return result


if __name__ == "__main__":
    main()
