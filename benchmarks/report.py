"""The result file: its schema, the ratios computed into it, and the table printed from it."""

from __future__ import annotations

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
