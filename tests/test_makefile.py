"""The environment of `make test` is made again when another Python or other extras are asked for."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def folder(tmp_path) -> Path:
    """The Makefile beside a Python that only makes an environment of itself."""
    shutil.copy(Path(__file__).parents[1] / "Makefile", tmp_path)
    for name in ("pyproject.toml", "CMakeLists.txt"):
        (tmp_path / name).touch()
    for name in ("one", "other"):
        fake = tmp_path / name
        fake.write_text('#!/bin/sh\n[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python"\nexit 0\n')
        fake.chmod(0o755)
    return tmp_path


def test_another_python_or_other_extras_make_another_environment(folder):
    def made(*settings: str) -> bool:
        command = ["make", "VENV=environment", "environment/installed", *settings]
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
        return "== setup" in said

    assert made("PYTHON=./one")
    assert not made("PYTHON=./one")
    assert made("PYTHON=./one", "EXTRAS=dev,cuda13")
    assert not made("PYTHON=./one", "EXTRAS=dev,cuda13")
    assert made("PYTHON=./other", "EXTRAS=dev,cuda13")
    assert not made("PYTHON=./other", "EXTRAS=dev,cuda13")
