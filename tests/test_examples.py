"""Every example runs at a small size, as a user would start it: a fresh interpreter, warnings as errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str, devices: int = 1) -> str:
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["mamba2", "mamba3 --mimo-rank 2"])
def test_train_bytes(mixer):
    sizes = (
        f"--mixer {mixer} --features 32 --layers 2 --state-dim 16 --head-dim 16 --seq 64 --batch 4 --steps 120 "
        "--reports 2 --data-bytes 400000 --eval-bytes 8192 --generate 20"
    )
    out = run("train_bytes.py", *sizes.split())
    reports = [float(bits) for bits in re.findall(r"held-out +([0-9.]+) bits/byte", out)]
    assert len(reports) == 3 and reports[0] > reports[1] > reports[2], out
    table = {name: float(bits) for name, bits in re.findall(r"^  (\w+) +([0-9.]+)  #", out, flags=re.MULTILINE)}
    name = mixer.split()[0]
    assert set(table) == {"unigram", "bigram", "gzip", name}
    assert table[name] < table["unigram"], out
    assert out.count("  ok") == 2, out
    assert f"{name}_step runs on xla" in out, out


@pytest.mark.slow
def test_train_bytes_stops_in_time():
    sizes = (
        "--features 16 --layers 1 --state-dim 8 --head-dim 8 --seq 32 --batch 1 --steps 1000 --seconds 0 "
        "--data-bytes 400000 --eval-bytes 512 --generate 4"
    )
    out = run("train_bytes.py", *sizes.split())
    assert "stopped after 0 s" in out


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_train_pmap(devices):
    sizes = "--features 32 --layers 1 --state-dim 8 --head-dim 8 --seq 32"
    out = run("train_pmap.py", *sizes.split(), devices=devices)
    assert f"{devices} x cpu" in out and out.count("largest relative difference") == 2
    assert "collectives besides the all-reduce of gradients: none" in out
