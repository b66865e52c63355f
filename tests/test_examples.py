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
    environment.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # as in conftest.py
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "training"),
    [
        ("mamba2", "--layers 2 --steps 120 --reports 2"),
        ("mamba3 --mimo-rank 2", "--layers 1 --steps 120 --reports 2"),
        ("mamba2", "--layers 1 --seconds 0"),
    ],
    ids=["mamba2", "mamba3", "stops in time"],
)
def test_train_bytes(mixer, training):
    sizes = (
        f"--mixer {mixer} --features 32 --state-dim 16 --head-dim 16 --seq 64 --batch 4 {training} "
        "--data-bytes 400000 --eval-bytes 8192 --generate 20"
    )
    out = run("train_bytes.py", *sizes.split())
    reports = [float(bits) for bits in re.findall(r"held-out +([0-9.]+) bits/byte", out)]
    table = {name: float(bits) for name, bits in re.findall(r"^  (\w+) +([0-9.]+)  #", out, flags=re.MULTILINE)}
    name = mixer.split()[0]
    assert set(table) == {"unigram", "bigram", "gzip", name}
    if "--seconds 0" in training:
        assert "stopped after 0 s" in out and len(reports) == 1, out
    else:
        assert len(reports) == 3 and reports[0] > reports[1] > reports[2], out
        assert table[name] < table["unigram"], out
    assert out.count("  ok") == 2, out
    assert f"{name}_step runs on xla" in out, out


@pytest.mark.slow
def test_train_pmap():
    sizes = "--features 32 --layers 1 --state-dim 8 --head-dim 8 --seq 32"
    out = run("train_pmap.py", *sizes.split(), devices=2)
    assert "2 x cpu" in out and out.count("largest relative difference") == 2
    assert "collectives besides the all-reduce of gradients: none" in out
