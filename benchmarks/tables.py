"""Merges tuning files into the tables that are shipped with the package (jax_ssd/tables of this checkout).

    python -m benchmarks.tables tuning.json...

A result replaces the shipped one for the same problem and implementation. Left out is what was measured with other
kernels than this checkout's, and what was bound by the host.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jax_ssd import tune

TABLES = Path(__file__).parents[1] / "jax_ssd" / "tables"


def merged(shipped: list[tune.Record], found: list[tune.Record]) -> tuple[list[tune.Record], int]:
    """The records of both, ordered, and how many results were taken from `found`."""
    records = {_key(record): record | {"results": dict(record["results"])} for record in shipped}
    taken = 0
    for record in found:
        for implementation, result in record["results"].items():
            if not tune.is_fresh(result) or result.get("host_bound"):
                continue
            taken += 1
            kept = records.setdefault(_key(record), record | {"results": {}})
            kept["results"][implementation] = result | {"provenance": _without_paths(result["provenance"])}
    return [records[key] for key in sorted(records)], taken


def _key(record: tune.Record) -> tuple[Any, ...]:
    p = record["problem"]
    return record["op"], p["state"], p["head_dim"], p["heads"], p["batch"], p["seq"], str(p)


def _without_paths(provenance: dict[str, Any]) -> dict[str, Any]:
    words = [word.rpartition("/")[2] for word in provenance["command"].split()]
    return provenance | {"command": " ".join(words)}


def main(arguments: list[str] | None = None) -> None:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("files", nargs="+", type=Path)
    found = [record for path in made.parse_args(arguments).files for record in tune.parse(path.read_text())]
    for arch in sorted({record["arch"] for record in found}):
        table = TABLES / f"{arch}.json"
        shipped = tune.parse(table.read_text()) if table.is_file() else []
        records, taken = merged(shipped, [record for record in found if record["arch"] == arch])
        table.write_text(tune.dump(records))
        print(f"{table.name}: {len(records)} records, {taken} results taken")


if __name__ == "__main__":
    main()
