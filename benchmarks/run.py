"""Measures implementations on named cases, side by side in one run.

    python -m benchmarks.run first wide step --implementations jax_ssd:cutile plain_xla mamba_ssm --name first

prints a table and writes benchmarks/results/<date>-<name>.json. Cases: benchmarks/cases.py, `sweep*` for a prefix, or
name=B,T,G,H,N,P[,dtype]. How times are taken: benchmarks/timing.py. What a floor counts: benchmarks/floors.py. An
implementation that is not installed, refuses or fails gives rows that say why.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import cases, floors, peers, report, rows, timing, worker
from benchmarks.peers.base import Options

RESULTS = Path(__file__).parent / "results"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("cases", nargs="+", help="named cases, prefixes ending in *, or name=B,T,G,H,N,P[,dtype]")
    made.add_argument("--implementations", nargs="+", default=["jax_ssd", "plain_xla"], metavar="NAME")
    made.add_argument("--passes", nargs="+", choices=floors.PASSES, default=list(floors.PASSES))
    made.add_argument("--name", default="run", help="last part of the result file's name")
    made.add_argument("--output", type=Path, help=f"folder for the result file (default {RESULTS.name}/ here)")
    made.add_argument("--peer-autotune", choices=("quick", "full"), default="quick")
    made.add_argument("--peer-configs", type=int, default=5, help="configurations per kernel of a quick peer tuning")
    made.add_argument("--repeats", type=int, default=9)
    made.add_argument("--sample-ms", type=float, default=20.0, help="device time aimed at per sample")
    made.add_argument("--budget", type=float, default=float("inf"), help="seconds after which nothing new is started")
    made.add_argument("--in-process", action="store_true", help="no process per implementation (tests, debugging)")
    return made


class Run:
    """Collects what the workers report into one result, written after each of them so that nothing is lost."""

    def __init__(self, arguments: argparse.Namespace, command: str) -> None:
        self.arguments = arguments
        self.started = time.monotonic()
        self.cases = [case for word in arguments.cases for case in cases.find(word)]
        self.options = Options(arguments.peer_autotune, arguments.peer_configs)
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
            "options": asdict(self.options) | asdict(self.effort) | {"cold_bytes": timing.COLD_BYTES},
            "cases": {case.name: case.to_json() for case in self.cases},
            "notes": {},
            "rows": [],
        }

    def all(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            for implementation in [worker.PREPARE, *self.arguments.implementations]:
                self._one(implementation, folder)
                report.add_ratios(self.result)
                self._write()
        report.check(self.result)
        return self.result

    def _one(self, implementation: str, folder: str) -> None:
        output = Path(folder) / f"{len(self.result['notes'])}-{implementation.replace(':', '-')}.jsonl"
        output.touch()
        job = worker.Job(
            implementation, self.cases, tuple(self.arguments.passes), folder, str(output), self.options, self.effort
        )
        left = self.arguments.budget - (time.monotonic() - self.started)
        ended = "the budget was spent before it started" if left <= 0 else self._execute(job, left)
        self._collect(output)
        if implementation == worker.PREPARE:
            if ended:
                raise RuntimeError(f"references and ceilings could not be measured: {ended}")
            return
        done = {(row["case"], row["pass"]) for row in self.result["rows"] if row["implementation"] == implementation}
        for case in self.cases:
            for name in worker.passes_of(case, job.passes):
                if (case.name, name) not in done:
                    lost = rows.row(case, name, implementation, "failed", reason=ended or "the worker said nothing")
                    self.result["rows"].append(lost)

    def _execute(self, job: worker.Job, left: float) -> str:
        """Runs the job; how it ended when it did not end well, else nothing."""
        if self.arguments.in_process:
            worker.execute(job)
            return ""
        path = Path(job.folder) / "job.json"
        path.write_text(job.to_json())
        command = [sys.executable, "-m", "benchmarks.worker", str(path)]
        try:
            limit = None if left == float("inf") else left
            code = subprocess.run(command, check=False, timeout=limit, cwd=Path(__file__).parents[1]).returncode
        except subprocess.TimeoutExpired:
            return "the budget was spent while it ran"
        return f"its process ended with code {code}" if code else ""

    def _collect(self, output: Path) -> None:
        for line in output.read_text().splitlines():
            found = json.loads(line)
            kind, value = found["kind"], found["value"]
            if kind == "row":
                self.result["rows"].append(value)
            elif kind == "reference":
                self.result["notes"].setdefault("reference_seconds", {})[value["case"]] = value["seconds"]
            else:
                self.result[kind] |= value

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        order = {case.name: index for index, case in enumerate(self.cases)}
        self.result["rows"].sort(key=lambda row: (order[row["case"]], floors.PASSES.index(row["pass"])))
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")


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
