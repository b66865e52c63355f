"""Measures against other libraries: `python -m jax_ssd bench ARGUMENTS` is `python -m benchmarks.run ARGUMENTS`.

The harness, its peers and its results belong to a checkout of the project and are not installed with the package.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    """Runs the harness of the checkout in the working directory; 1 if there is none."""
    folder = Path.cwd()
    if not (folder / "benchmarks" / "run.py").is_file():
        print(
            f"jax_ssd bench: the benchmarks are not installed with the package, and {folder} is no checkout of it. "
            f"Clone the repository and run this command there; `python -m jax_ssd check` works anywhere."
        )
        return 1
    if importlib.util.find_spec("benchmarks") is None:
        sys.path.insert(0, str(folder))
    from benchmarks import run

    run.main(list(arguments))
    return 0
