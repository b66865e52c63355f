"""Draws result files as PNG and SVG into docs/plots: python -m benchmarks.plot results/<file>.json... Needs matplotlib.

For each file <name>-<pass>: bars of time over floor per case, one colour per implementation; 1 is as fast as the
machine allows. Sweep cases are not among them: of those in all files together, of equal rows the last,
sweep-<pass>-length and sweep-<pass>-state, time, and time of the fastest peer over ours, against length for each state
size, and against state size for each length.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from benchmarks import peers, report

PLOTS = Path(__file__).parents[1] / "docs" / "plots"
SWEEP = re.compile(r"sweep_n(\d+)_t(\d+)k")
Row = dict[str, Any]


def draw(result: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """The bars of one file, a figure for each pass."""
    pyplot = _pyplot()
    measured = [row for row in result["rows"] if row["status"] == "ok"]
    if not measured:
        raise ValueError("the result has no measured row")
    rows = [row for row in measured if not SWEEP.fullmatch(row["case"])]
    written = []
    for kind in dict.fromkeys(row["pass"] for row in rows):
        figure, panel = pyplot.subplots(figsize=(10, 3.6))
        _bars(panel, [row for row in rows if row["pass"] == kind])
        panel.set_title(
            f"{kind} on {result['device']['kind']}, {result['date'][:10]} (labels: microseconds)", fontsize=9
        )
        written += _save(figure, folder, f"{name}-{kind}")
    return written


def draw_sweep(results: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Time and ratio of the sweep cases, against length and against state size. Nothing without such cases."""
    last = {
        (row["case"], row["pass"], row["implementation"]): row | {"state": int(found[1]), "length": int(found[2]) << 10}
        for result in results
        for row in result["rows"]
        if row["status"] == "ok" and (found := SWEEP.fullmatch(row["case"]))
    }
    rows = list(last.values())
    written = []
    for kind in dict.fromkeys(row["pass"] for row in rows):
        of_pass = [row for row in rows if row["pass"] == kind]
        written += _curves(of_pass, folder, kind, "length", "state", ("tokens per row", "state size"))
        written += _curves(of_pass, folder, kind, "state", "length", ("state size", "tokens per row"))
    return written


def _curves(rows: list[Row], folder: Path, kind: str, x: str, panel_by: str, words: tuple[str, str]) -> list[Path]:
    """A column for each value of `panel_by`: time above, ratio below, both against `x`."""
    columns = sorted({row[panel_by] for row in rows})
    figure, panels = _pyplot().subplots(
        2, len(columns), figsize=(3 * len(columns) + 1, 5.5), squeeze=False, sharex=True, sharey="row"
    )
    implementations = list(dict.fromkeys(row["implementation"] for row in rows))
    for (upper, lower), value in zip(panels.T, columns, strict=True):
        for index, implementation in enumerate(implementations):
            own = [row for row in rows if row[panel_by] == value and row["implementation"] == implementation]
            own.sort(key=lambda row: row[x])
            upper.plot([row[x] for row in own], [row["microseconds"] for row in own], "o-", c=f"C{index}", ms=3,
                       label=implementation)  # fmt: skip
            rated = [row for row in own if "peer_ratio" in row and peers.is_own(implementation)]
            lower.plot([row[x] for row in rated], [row["peer_ratio"] for row in rated], "o-", c=f"C{index}", ms=3)
        floors = sorted({(row[x], row["floor"]["us"]) for row in rows if row[panel_by] == value})
        upper.plot([place for place, _ in floors], [us for _, us in floors], "k:", label="floor")
        upper.set_title(f"{words[1]} {value:,}", fontsize=9)
        upper.set_xscale("log", base=2)
        upper.set_yscale("log")
        lower.axhline(1, color="k", lw=0.6)
        lower.set_xlabel(words[0], fontsize=8)
    panels[0, 0].set_ylabel("microseconds")
    panels[1, 0].set_ylabel("fastest peer / ours")
    panels[0, 0].legend(fontsize=7)
    figure.suptitle(f"{kind}, 4 rows of 8 heads x 64", fontsize=9)
    return _save(figure, folder, f"sweep-{kind}-{x}")


def _bars(panel: Any, rows: list[Row]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    implementations = list(dict.fromkeys(row["implementation"] for row in rows))
    width = 0.8 / len(implementations)
    for index, implementation in enumerate(implementations):
        own = [row for row in rows if row["implementation"] == implementation]
        places = [cases.index(row["case"]) + (index - (len(implementations) - 1) / 2) * width for row in own]
        bars = panel.bar(places, [row["times_floor"] for row in own], width, label=implementation)
        panel.bar_label(bars, [f"{row['microseconds']:.0f}" for row in own], fontsize=6)
    panel.set_yscale("log")
    panel.set_ylim(1, 1.3 * max(row["times_floor"] for row in rows))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("{x:g}")
    panel.tick_params(axis="y", which="both", labelsize=7)
    panel.set_xticks(range(len(cases)), cases, rotation=20, ha="right", fontsize=8)
    panel.set_ylabel("time / floor")
    panel.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jax_ssd"  # the same file from the same figures
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, folder: Path, name: str) -> list[Path]:
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    _pyplot().close(figure)
    return paths


def main(arguments: list[str] | None = None) -> None:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("results", nargs="+", type=Path)
    made.add_argument("--output", type=Path, default=PLOTS, help="folder of the plots (default docs/plots)")
    parsed = made.parse_args(arguments)
    results = [report.load(path, made) for path in parsed.results]
    for path, result in zip(parsed.results, results, strict=True):
        written = draw(result, parsed.output, path.stem)
        print(*written, sep="\n")
    print(*draw_sweep(results, parsed.output), sep="\n")


if __name__ == "__main__":
    main()
