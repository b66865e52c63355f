"""Training on a CPU: implementation "xla" against mamba2-jax, time of forward and backward and XLA's temporaries.

python -m benchmarks.cpu [options of benchmarks.run]
"""

from __future__ import annotations

import sys

from benchmarks import run

PAIR = ("plain_xla", "mamba2_jax")


def main(arguments: list[str]) -> None:
    fixed = ["cpu_train", "--passes", "forward_backward", "--implementations", *PAIR, "--name", "cpu-train"]
    result = run.main([*fixed, "--in-process", *arguments])
    found = {row["implementation"]: row for row in result["rows"]}
    if any(found[name]["status"] != "ok" for name in PAIR):
        raise SystemExit("one of the two was not measured, see its remark")
    ours, theirs = (found[name] for name in PAIR)
    for name, row in zip(PAIR, (ours, theirs), strict=True):
        print(f"{name}: {row['microseconds'] / 1e3:.1f} ms, {row['memory']['temp'] / 1e6:.1f} MB of temporaries")
    print(
        f"{theirs['microseconds'] / ours['microseconds']:.2f} times the speed, "
        f"{theirs['memory']['temp'] / ours['memory']['temp']:.2f} times less temporary memory"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
