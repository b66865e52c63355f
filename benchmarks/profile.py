"""What the kernels of a call keep busy: tensor cores, the unit of exponentials, memory, by Nsight Compute.

    python -m benchmarks.profile first wide mimo_first --name profile

runs forward + backward of each case (`--passes forward` that alone) once under ncu, prints a line for each kernel and
writes benchmarks/results/<date>-<name>.json. ncu runs a kernel several times, apart from its neighbours and from an
empty cache, so its times are longer than those of a whole call; clocks are left alone.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import cases
from benchmarks.run import RESULTS

# Column of the result, its metric and the factor that takes ncu's base unit to that of the column.
METRICS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "tensor_percent": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "exponential_percent": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", 1),
    "issue_percent": ("sm__issue_active.avg.pct_of_peak_sustained_elapsed", 1),
    "l1_percent": ("l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed", 1),
    "l2_percent": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "read_mb": ("dram__bytes_read.sum", 1e-6),
    "written_mb": ("dram__bytes_write.sum", 1e-6),
}
SHORTEST = 5.0  # us of a kernel that is worth a line


def main(arguments: list[str] | None = None) -> None:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("cases", nargs="+", help="as of benchmarks.run")
    made.add_argument("--passes", nargs="+", choices=("forward", "forward_backward"), default=["forward_backward"])
    made.add_argument("--implementation", default="jax_ssd", help="of this library, as of benchmarks.run")
    made.add_argument("--name", default="profile", help="last part of the result file's name")
    made.add_argument("--output", type=Path, default=RESULTS, help="folder for the result file")
    made.add_argument("--call", action="store_true", help="make the call itself, for a profiler around this process")
    given = sys.argv[1:] if arguments is None else arguments
    parsed = made.parse_args(given)
    found = [case for word in parsed.cases for case in cases.find(word)]
    if parsed.call:
        call(found[0], parsed.passes[0], parsed.implementation)
        return
    now = datetime.datetime.now(datetime.UTC)
    path = parsed.output / f"{now:%Y-%m-%d}-{parsed.name}.json"
    result: dict[str, Any] = {
        "name": parsed.name,
        "date": now.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.profile", *given]),
        "metrics": {column: metric for column, (metric, _) in METRICS.items()},
        "cases": {case.name: case.to_json() for case in found},
        "kernels": [],
    }
    print(f"{'':34}" + "".join(f"{column:>21}" for column in METRICS))
    for case in found:
        for pass_name in parsed.passes:
            machine, kernels = profile(case, pass_name, parsed.implementation)
            result |= machine
            result["kernels"] += [{"case": case.name, "pass": pass_name, **kernel} for kernel in kernels]
            for kernel in kernels:
                figures = "".join(f"{kernel[column]:21.1f}" for column in METRICS)
                print(f"{case.name:12}{kernel['kernel']:22}{figures}", flush=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")


def call(case: cases.Case, pass_name: str, implementation: str) -> None:
    """One call inside the range that profilers record, after one that is not recorded."""
    import jax
    from cuda.bindings import driver

    from benchmarks import ceilings, measure_jax, peers
    from benchmarks.inputs import operand_names
    from benchmarks.peers.base import Options

    peer = peers.load(implementation, Options())
    drawn = measure_jax.draw(case, jax.random.key(0))
    operands = tuple(drawn[name] for name in operand_names(case))
    if pass_name == "forward":
        compiled, given = jax.jit(peer.forward(case, {})), operands
    else:
        compiled, given = jax.jit(peer.forward_backward(case, {})), (operands, drawn["dy"])
    jax.block_until_ready(compiled(*given))
    driver.cuProfilerStart()
    jax.block_until_ready(compiled(*given))
    driver.cuProfilerStop()
    print(json.dumps({"device": ceilings.describe_device(), "versions": {"jax": jax.__version__}}))


def profile(case: cases.Case, pass_name: str, implementation: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Device and versions, and the kernels of a call in order."""
    metrics = ",".join(metric for metric, _ in METRICS.values())
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--print-units", "base"]
    command += ["--csv", "--page", "raw", "--metrics", metrics, sys.executable, "-m", "benchmarks.profile", case.name]
    command += ["--passes", pass_name, "--implementation", implementation, "--call"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise SystemExit(f"benchmarks: ncu failed on {case.name}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    machine = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return json.loads(machine), parse(done.stdout)


def parse(text: str) -> list[dict[str, Any]]:
    """The kernels in ncu's table of raw figures, without the shortest; its second line holds the units."""
    table = list(csv.DictReader(line for line in text.splitlines() if line.startswith('"')))
    kernels = []
    for row in table[1:]:
        name = re.sub(r"^void |[<(].*", "", row["Kernel Name"])
        figures = {
            column: round(float(row[metric].replace(",", "")) * factor, 3)
            for column, (metric, factor) in METRICS.items()
        }
        kernels.append({"kernel": name, "grid": row["Grid Size"], "block": row["Block Size"], **figures})
    return [kernel for kernel in kernels if kernel["us"] >= SHORTEST]


if __name__ == "__main__":
    main()
