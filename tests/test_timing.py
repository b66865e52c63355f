"""Turns at the device. What is measured by `timing.measure` is seen with the benchmarks and the tuner."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time

import pytest

from jax_ssd import timing

OTHER = """
import time
from jax_ssd import timing
with timing.alone():
    print(time.monotonic(), flush=True)
"""


def test_other_threads_wait_for_their_turn():
    inside, most = 0, 0

    def work():
        nonlocal inside, most
        for _ in range(20):
            with timing.alone(), timing.alone():  # one inside another is the same turn
                inside += 1
                most = max(most, inside)
                time.sleep(0.0005)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_other_processes_wait_for_their_turn():
    with timing.alone():
        other = subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True)
        time.sleep(3)
        left = time.monotonic()
    said, _ = other.communicate(timeout=120)
    assert float(said) >= left and other.returncode == 0


def test_long_programs_are_repeated_less():
    effort = timing.Effort(sample_seconds=0.001, repeats=9, most_programs=1, enough_seconds=0.05)
    found = timing.measure(lambda: time.sleep(0.01), lambda _: None, 1, effort)
    assert timing.FEWEST <= found.repeats < 9


def test_samples_that_scatter_are_followed_by_more(monkeypatch):
    now = 0.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)

    def repeats(durations):
        def execute():
            nonlocal now
            now += next(durations)

        effort = timing.Effort(sample_seconds=0.001, repeats=6, most_programs=1, enough_seconds=60)
        return timing.measure(execute, lambda _: None, 1, effort).repeats

    assert repeats(itertools.repeat(0.01)) == 6
    assert repeats(itertools.cycle([0.01, 0.01, 0.01, 0.05, 0.01])) == timing.MOST_ROUNDS * 6


def test_the_least_time_is_no_shorter_for_a_disturbed_short_run(monkeypatch):
    now = 0.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    # Each sample is a run of one program and a run of two; before them are four. The third sample's short run is late.
    durations = itertools.chain([0.01] * 4, [0.01] * 6, [0.017, 0.01, 0.01], itertools.repeat(0.01))

    def execute():
        nonlocal now
        now += next(durations)

    effort = timing.Effort(sample_seconds=0.001, repeats=9, most_programs=1, enough_seconds=60)
    found = timing.measure(execute, lambda _: None, 1, effort)
    assert found.low == pytest.approx(0.003)
    assert found.least == pytest.approx(found.seconds) == pytest.approx(0.01)
