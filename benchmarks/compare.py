"""Finds what has become slower between two result files.

    python -m benchmarks.compare OLD.json NEW.json [--tolerance 0.1]

Machines and days differ, so no times are compared but the ratios within each file: to the fastest peer, to the floor,
and of the memory to its limit. Only rows of this library count. The exit status is 1 if a ratio is worse by more than
the tolerance or a row that was measured no longer is; a row that the new run did not try is told and does not count.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import peers, report

# Name in a row, what it is called, and whether more of it is better.
RATIOS = (
    ("peer_ratio", "peer/this", True),
    ("times_floor", "x floor", False),
    ("times_limit", "x memory limit", False),
)

Rows = dict[tuple[str, str, str], dict[str, Any]]


def compare(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> tuple[list[str], int]:
    """A line for each of this library's rows in `old`, and how many of them became worse."""
    lines, worse = [], 0
    before, after = _own(old), _own(new)
    tried = {(row["case"], row["pass"]) for row in new["rows"]}
    for key, row in before.items():
        if row["status"] != "ok":
            continue
        verdicts = []
        if key in after and after[key]["status"] == "ok":
            verdicts = list(_verdicts(row, after[key], tolerance))
        elif key[:2] in tried:
            verdicts = [(True, f"is {after[key]['status'] if key in after else 'missing'}")]
        worse += any(bad for bad, _ in verdicts)
        mark = "WORSE" if any(bad for bad, _ in verdicts) else "ok" if verdicts else "-"
        lines.append(f"{mark:5s}  {' '.join(key)}: {', '.join(text for _, text in verdicts) or 'not in the new run'}")
    return lines, worse


def _verdicts(row: dict[str, Any], other: dict[str, Any], tolerance: float):
    for name, words, more_is_better in RATIOS:
        if name in row and name in other:
            change = other[name] / row[name]
            bad = (1 / change if more_is_better else change) > 1 + tolerance
            yield bad, f"{words} {row[name]:.2f} -> {other[name]:.2f}{' !' if bad else ''}"


def _own(result: dict[str, Any]) -> Rows:
    return {
        (row["case"], row["pass"], row["implementation"]): row
        for row in result["rows"]
        if peers.is_own(row["implementation"])
    }


def main(arguments: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("old", type=Path)
    made.add_argument("new", type=Path)
    made.add_argument("--tolerance", type=float, default=0.1, help="part by which a ratio may be worse (default 0.1)")
    parsed = made.parse_args(arguments)
    lines, worse = compare(report.load(parsed.old, made), report.load(parsed.new, made), parsed.tolerance)
    print("\n".join(lines) or "the old file has no measured row of this library")
    print(f"{worse} of {len(lines)} rows are worse by more than {parsed.tolerance:.0%}.")
    return 1 if worse or not lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
