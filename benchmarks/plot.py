"""Draws result files: python -m benchmarks.plot results/<file>.json... writes <file>.png beside each. Needs matplotlib.

One panel per pass. Bars of time over floor per case, one colour per implementation; 1 is as fast as the machine allows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import report


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if row["status"] == "ok"]
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    if not passes:
        raise ValueError("the result has no measured row")
    figure, panels = pyplot.subplots(len(passes), 1, figsize=(10, 3.2 * len(passes)), squeeze=False)
    for panel, name in zip(panels[:, 0], passes, strict=True):
        _bars(panel, name, [row for row in rows if row["pass"] == name])
    figure.suptitle(f"{result['device']['kind']}, {result['date'][:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(panel: Any, name: str, rows: list[dict[str, Any]]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    implementations = list(dict.fromkeys(row["implementation"] for row in rows))
    width = 0.8 / len(implementations)
    for index, implementation in enumerate(implementations):
        own = [row for row in rows if row["implementation"] == implementation]
        places = [cases.index(row["case"]) + (index - (len(implementations) - 1) / 2) * width for row in own]
        bars = panel.bar(places, [row["times_floor"] for row in own], width, label=implementation)
        panel.bar_label(bars, [f"{row['microseconds']:.0f}" for row in own], fontsize=6)
    panel.set_yscale("log")
    panel.set_xticks(range(len(cases)), cases, rotation=20, ha="right", fontsize=8)
    panel.set_ylabel("time / floor")
    panel.set_title(f"{name} (labels: microseconds)", fontsize=9)
    panel.legend(fontsize=7)


def main(arguments: list[str]) -> None:
    if not arguments:
        raise SystemExit(__doc__)
    for word in arguments:
        path = Path(word)
        result = json.loads(path.read_text())
        report.check(result)
        draw(result, path.with_suffix(".png"))
        print(f"written to {path.with_suffix('.png')}")


if __name__ == "__main__":
    main(sys.argv[1:])
