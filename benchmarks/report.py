"""The result file: its schema, the ratios computed into it, and the tables printed from it.

python -m benchmarks.report FILE.json...     a Markdown table of each, as docs/performance.md has them
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.cases import Case
from benchmarks.floors import chunk_kernel_memory, floor, memory_limit

SCHEMA = 1

_TOP: dict[str, type] = {
    "schema": int,
    "name": str,
    "date": str,
    "command": str,
    "device": dict,
    "versions": dict,
    "ceilings": dict,
    "options": dict,
    "cases": dict,
    "notes": dict,
    "rows": list,
}
_ROW: dict[str, type] = {"case": str, "pass": str, "implementation": str, "status": str}
_MEASURED: dict[str, type | tuple[type, ...]] = {
    "microseconds": float,
    "timing": dict,
    "errors": dict,
    "memory": dict,
    "rotation_bytes": int,
    "variant": dict,
    "floor": dict,
    "times_floor": float,
}
STATUSES = ("ok", "unsupported", "failed", "wrong")


def check(result: dict[str, Any]) -> None:
    """Raises ValueError naming the first field that is missing or of another type."""
    _check_fields("the result", result, _TOP)
    if result["schema"] != SCHEMA:
        raise ValueError(f"schema: expected {SCHEMA}, got {result['schema']}")
    for index, row in enumerate(result["rows"]):
        where = f"row {index}"
        _check_fields(where, row, _ROW)
        if row["status"] not in STATUSES:
            raise ValueError(f"{where}: status must be one of {', '.join(STATUSES)}, got {row['status']!r}")
        if row["case"] not in result["cases"]:
            raise ValueError(f"{where}: case {row['case']!r} is not described under cases")
        if row["status"] == "ok":
            _check_fields(where, row, _MEASURED)
        elif not row.get("reason"):
            raise ValueError(f"{where}: a row that is {row['status']} must say why in `reason`")


def load(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """A result file; what is none ends the program, with the parser's usage."""
    try:
        result = json.loads(path.read_text())
        check(result)
    except (OSError, ValueError) as error:
        parser.error(f"{path}: expected a result of benchmarks.run: {error}")
    return result


def _check_fields(where: str, given: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, kind in wanted.items():
        if name not in given:
            raise ValueError(f"{where}: field {name!r} is missing")
        if not isinstance(given[name], kind):
            raise ValueError(f"{where}: field {name!r} must be {kind}, got {type(given[name])}")


def add_ratios(result: dict[str, Any]) -> None:
    """Adds to every measured row its floor and memory limit, the ratios to them, and those to the best peer.

    `times_floor` reads "this many times the floor"; `peer_ratio` is the fastest other peer's time over this row's, so
    above 1 this row is the faster one; `peer_memory_ratio` is the same of the leanest peer's memory. `times_limit`
    above 1 is more memory than a pass should take; `chunk_kernel_memory`: see benchmarks/floors.py. Wrong rows
    are nobody's yardstick.
    """
    cases = {name: Case(**case) for name, case in result["cases"].items()}
    ceilings = result["ceilings"]
    for row in result["rows"]:
        if "microseconds" in row and ceilings:
            rates = ceilings["copy_bytes_per_second"], ceilings["matmul_flops_per_second"]
            row["floor"] = floor(cases[row["case"]], row["pass"], *rates)
            row["times_floor"] = row["microseconds"] / row["floor"]["us"]
            rivals = _peers(result["rows"], row)
            if rivals:
                best = min(rivals, key=lambda one: one["microseconds"])
                row["fastest_peer"] = best["implementation"]
                row["peer_ratio"] = best["microseconds"] / row["microseconds"]
            peak, limit = row["memory"].get("peak"), memory_limit(cases[row["case"]], row["pass"])
            if peak and limit:
                row["memory_limit"], row["times_limit"] = limit, peak / limit
                per_chunk = chunk_kernel_memory(cases[row["case"]], row["pass"])
                if per_chunk:
                    row["chunk_kernel_memory"] = per_chunk
                peaks = [one["memory"]["peak"] for one in rivals if one["memory"].get("peak")]
                if peaks:
                    row["peer_memory_ratio"] = min(peaks) / peak


def _peers(rows: list[dict[str, Any]], like: dict[str, Any]) -> list[dict[str, Any]]:
    """The other libraries' sound rows of the same case and pass."""
    return [
        row
        for row in rows
        if row["status"] == "ok"
        and (row["case"], row["pass"]) == (like["case"], like["pass"])
        and row["implementation"] != like["implementation"]
        and not peers.is_own(row["implementation"])
    ]


def table(result: dict[str, Any]) -> str:
    """One line per row: time, spread, ratios, errors against float64, memory with its limit and ratio to the peers'."""
    head = ["case", "pass", "implementation", "us", "+-%", "x floor", "peer/this", "err y", "err grads"]
    head += ["MB", "limit MB", "peer/this", "by chunk MB", "remark"]
    lines = [head, *(_line(row) for row in result["rows"])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    left = {0, 1, 2, len(head) - 1}
    text = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def _line(row: dict[str, Any]) -> list[str]:
    cells = [row["case"], row["pass"], row["implementation"]]
    if "microseconds" not in row:
        return cells + [""] * 10 + [f"{row['status']}: {row['reason'][:70]}"]
    time, errors = row["timing"], row["errors"]
    spread = 50 * (time["high"] - time["low"]) / time["seconds"] if time["seconds"] > 0 else float("nan")
    gradients = [error for name, error in errors.items() if name != "y"]
    remarks = [_variant(row["variant"])] + (["host bound"] if time["host_bound"] else [])
    if "default" in row:
        remarks.append(f"{1e6 * row['default']['seconds']:.1f} us as JAX runs a loop unasked")
    if row.get("times_limit", 0) > 1:
        remarks.append(f"{row['times_limit']:.2f} times the memory limit")
    if row["status"] != "ok":
        remarks.insert(0, f"{row['status'].upper()}: {row['reason'][:70]}")
    return cells + [
        f"{row['microseconds']:.1f}",
        f"{spread:.1f}",
        f"{row['times_floor']:.2f}" if "times_floor" in row else "",
        f"{row['peer_ratio']:.2f}" if "peer_ratio" in row else "",
        f"{errors['y']:.1e}",
        f"{max(gradients):.1e}" if gradients else "",
        f"{row['memory'].get('peak', 0) / 1e6:.0f}",
        f"{row['memory_limit'] / 1e6:.0f}" if "memory_limit" in row else "",
        f"{row['peer_memory_ratio']:.2f}" if "peer_memory_ratio" in row else "",
        f"{row['chunk_kernel_memory'] / 1e6:.0f}" if "chunk_kernel_memory" in row else "",
        ", ".join(remark for remark in remarks if remark),
    ]


def _variant(variant: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in variant.items())


def markdown(result: dict[str, Any]) -> str:
    """A line for each case and pass: times, those of peers also as multiples of our fastest, and what it needs."""
    names = list(dict.fromkeys(row["implementation"] for row in result["rows"]))
    names.sort(key=lambda name: not peers.is_own(name))
    lines = [["case (B,T,G,H,N,P)", "pass", *(f"{name} us" for name in names), "x floor", "error y, gradients", "MB"]]
    lines.append(["---"] * len(lines[0]))
    for case, kind in dict.fromkeys((row["case"], row["pass"]) for row in result["rows"]):
        rows = {row["implementation"]: row for row in result["rows"] if (row["case"], row["pass"]) == (case, kind)}
        ours = [rows[name] for name in names if peers.is_own(name) and rows.get(name, {}).get("status") == "ok"]
        best = min(ours, key=lambda row: row["microseconds"], default=None)
        cells = [_cell(rows.get(name), best) for name in names]
        lines.append([_sizes(result["cases"][case]), kind.replace("_", " + "), *cells, *_of_ours(best)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sizes(case: dict[str, Any]) -> str:
    sizes = [case[name] for name in ("batch", "seq", "groups", "heads", "state", "head_dim")]
    rank = f", rank {case['rank']}" if case.get("rank") else ""  # files from before Mamba-3 name none
    dtype = "" if case["dtype"] == "bfloat16" else f", {case['dtype']}"
    packing = f", {case['sequences']} by {case['packing']}" if case.get("packing") else ""
    return f"{case['name']} ({','.join(map(str, sizes))}){rank}{packing}{dtype}"


def _cell(row: dict[str, Any] | None, best: dict[str, Any] | None) -> str:
    if row is None or row["status"] != "ok":
        return "" if row is None else row["status"]
    time = f"{row['microseconds']:.{0 if row['microseconds'] >= 100 else 1}f}"
    time += " (host bound)" if row["timing"]["host_bound"] else ""
    if peers.is_own(row["implementation"]) or best is None:
        return time
    return f"{time} ({row['microseconds'] / best['microseconds']:.2f}x)"


def _of_ours(best: dict[str, Any] | None) -> list[str]:
    if best is None:
        return [""] * 3
    errors = [error for name, error in best["errors"].items() if name != "y"]
    told = f"{best['errors']['y']:.1e}" + (f", {max(errors):.1e}" if errors else "")
    memory = f"{best['memory'].get('peak', 0) / 1e6:.0f}"
    memory += f" (limit {best['memory_limit'] / 1e6:.0f})" if "memory_limit" in best else ""
    return [f"{best['times_floor']:.1f}", told, memory]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    for path in parser.parse_args(arguments).results:
        print(f"\n{path.name}\n\n{markdown(load(path, parser))}")


if __name__ == "__main__":
    main()
