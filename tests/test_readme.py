"""What the README shows runs as it stands."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from jax_ssd import __main__ as command_line
from jax_ssd import config

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, str(README), "exec"), names)
    # Steps equal the sequence, up to the chunked form's products of bfloat16 numbers (2**-8 each).
    y, ys = (np.asarray(names[name], np.float32) for name in ("y", "ys"))
    final, last = (np.asarray(names[name]) for name in ("final", "last"))
    np.testing.assert_allclose(np.moveaxis(ys, 0, 1), y, rtol=0, atol=2**-6 * np.abs(y).max())
    np.testing.assert_allclose(last, final, rtol=0, atol=2**-7 * np.abs(final).max())


def test_the_targets_it_names_exist():
    makefile = README.with_name("Makefile").read_text()
    for target in set(re.findall(r"(?:`|    )make ([a-z]+)", README.read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_commands_it_names_exist(monkeypatch):
    """Up to where they would need a GPU or a compiler: the arguments are understood."""
    monkeypatch.setattr("jax_ssd.search.tuning_device", lambda: None)
    monkeypatch.setattr("jax_ssd.search.autotune", lambda *_, **__: [])
    commands = re.findall(r"`python -m jax_ssd ([^`]+)`", README.read_text())
    assert {"doctor", "check", "tune 2.7b", "compile 2.7b --arch sm_90"} <= set(commands)
    for command in commands:
        name, *arguments = shlex.split(command)
        assert name in command_line._COMMANDS
        if name == "tune":
            with config.override(target_arch="sm_90"):
                assert command_line.main([name, *arguments]) == 0
    for module in set(re.findall(r"`python -m (benchmarks\.[a-z]+)`", README.read_text())):
        assert importlib.util.find_spec(module) is not None, module


def test_compiling_ahead_of_time_reads_its_arguments(tmp_path, capsys):
    with config.override(cache_dir=tmp_path), pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax_ssd.tools.compile.compile_all", lambda jobs: print(sorted(jobs)) or 0)
        assert command_line.main(["compile", "2.7b", "--arch", "sm_90"]) == 0
    assert "['sm_90']" in capsys.readouterr().out
