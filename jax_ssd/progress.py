"""Shows how far a long command is: a bar where rich is installed and the output is a terminal, else a line per item."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """Counts items of known number. Use it as a context manager.

    >>> with Progress("tuning", total=2) as progress:
    ...     progress.note("candidate 3 of 20")  # seen in a bar only
    ...     progress.done("mamba2_forward: 187 us")
    """

    def __init__(self, title: str, total: int, show: bool = True):
        self.title, self.total, self.show = title, total, show
        self.count, self.started = 0, time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self.show and sys.stdout.isatty():
            try:
                from rich.progress import Progress as Bar
            except ImportError:
                return self
            self._bar = Bar(transient=True).__enter__()
            self._task = self._bar.add_task(self.title, total=self.total)
        return self

    def __exit__(self, *details: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*details)

    def note(self, text: str) -> None:
        """What is going on within an item."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self.title}: {text}")

    def done(self, text: str) -> None:
        """An item is finished; its line stays."""
        self.count += 1
        seconds = time.monotonic() - self.started
        line = f"[{self.count}/{self.total}, {seconds:.0f} s] {text}"
        if self._bar is not None:
            self._bar.update(self._task, advance=1)
            self._bar.print(line, highlight=False, markup=False, soft_wrap=True)
        elif self.show:
            print(line, flush=True)
