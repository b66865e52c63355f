"""Settings: where each value comes from, and what is refused."""

import os
import threading
from pathlib import Path

import pytest

from jax_ssd import config


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in (*config.VARIABLES.values(), "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")


def test_defaults():
    assert config.settings() == config.Settings(
        cache_dir=Path("/home/someone/.cache/jax_ssd"),
        target_arch=(),
        compile_jobs=os.cpu_count() or 1,
        tuning_file=Path("/home/someone/.config/jax_ssd/tuning.json"),
        mamba3_scan="tensor",
    )


@pytest.mark.parametrize(
    ("folder", "expected"),
    [("/var/cache/someone", "/var/cache/someone/jax_ssd"), ("relative/is/ignored", "/home/someone/.cache/jax_ssd")],
)
def test_xdg_folder(monkeypatch, folder, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    assert config.settings().cache_dir == Path(expected)


def test_environment(monkeypatch):
    monkeypatch.setenv("JAX_SSD_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("JAX_SSD_TARGET_ARCH", "sm_100, 9.0")
    monkeypatch.setenv("JAX_SSD_COMPILE_JOBS", "3")
    monkeypatch.setenv("JAX_SSD_TUNING_FILE", "off")
    monkeypatch.setenv("JAX_SSD_MAMBA3_SCAN", "fma")
    assert config.settings() == config.Settings(Path("/home/someone/kernels"), ("sm_90", "sm_100"), 3, None, "fma")


def test_an_empty_variable_is_unset(monkeypatch):
    monkeypatch.setenv("JAX_SSD_CACHE_DIR", "")
    assert config.settings().cache_dir == Path("/home/someone/.cache/jax_ssd")


def test_precedence(monkeypatch):
    monkeypatch.setenv("JAX_SSD_TARGET_ARCH", "sm_80")
    config.update(target_arch="sm_89")
    try:
        assert config.settings().target_arch == ("sm_89",)
        with config.override(target_arch="sm_90") as inner:
            assert inner.target_arch == config.settings().target_arch == ("sm_90",)
        assert config.settings().target_arch == ("sm_89",)
    finally:
        config.update(target_arch=...)
    assert config.settings().target_arch == ("sm_80",)


def test_override_is_for_this_thread_only():
    seen = []
    with config.override(target_arch="sm_90"):
        thread = threading.Thread(target=lambda: seen.append(config.settings().target_arch))
        thread.start()
        thread.join()
    assert seen == [()]


def test_override_ends_with_an_error():
    with pytest.raises(RuntimeError), config.override(compile_jobs=7):
        raise RuntimeError
    assert config.settings().compile_jobs != 7


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("target_arch", "sm_75", ["target_arch", "JAX_SSD_TARGET_ARCH", "sm_90", "'sm_75'", "nvidia-smi"]),
        ("target_arch", "hopper", ["JAX_SSD_TARGET_ARCH", "'hopper'"]),
        ("target_arch", "sm_90a", ["JAX_SSD_TARGET_ARCH", "'sm_90a'"]),
        ("compile_jobs", "0", ["JAX_SSD_COMPILE_JOBS", "at least 1", "'0'"]),
        ("compile_jobs", "many", ["JAX_SSD_COMPILE_JOBS", "'many'"]),
        ("mamba3_scan", "dmma", ["JAX_SSD_MAMBA3_SCAN", "'tensor' or 'fma'", "'dmma'"]),
        ("cache_dir", "kernels", ["JAX_SSD_CACHE_DIR", "absolute", "'kernels'", str(Path.cwd() / "kernels")]),
    ],
)
def test_nonsense_is_refused_with_its_name(monkeypatch, field, value, words):
    monkeypatch.setenv(config.VARIABLES[field], value)
    with pytest.raises(ValueError) as error:
        config.settings()
    assert all(word in str(error.value) for word in words), str(error.value)
    monkeypatch.undo()
    with pytest.raises(ValueError), config.override(**{field: value}):
        pass
    with pytest.raises(ValueError):
        config.update(**{field: value})


def test_a_failed_update_changes_nothing():
    with pytest.raises(ValueError):
        config.update(compile_jobs=5, target_arch="sm_1")
    assert config.settings().compile_jobs != 5


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown setting 'arch': expected one of cache_dir"):
        config.update(arch="sm_90")
    with pytest.raises(ValueError, match="unknown setting 'arch'"), config.override(arch="sm_90"):
        pass


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("cache_dir", 3, TypeError),
        ("tuning_file", b"/x", TypeError),
        ("target_arch", None, TypeError),
        ("target_arch", 90, TypeError),
        ("target_arch", [90], TypeError),
        ("compile_jobs", None, ValueError),
        ("compile_jobs", 1.5, ValueError),
        ("mamba3_scan", None, ValueError),
    ],
)
def test_values_of_another_type_are_refused_with_their_name(field, value, error):
    with pytest.raises(error) as caught, config.override(**{field: value}):
        pass
    assert f"{config.VARIABLES[field]}): expected" in str(caught.value) and f"got {value!r}" in str(caught.value)


@pytest.mark.parametrize("spelling", ["sm_120", "120", "12.0", " SM_120 "])
def test_arch_spellings(spelling):
    assert config.parse_arch(spelling) == "sm_120"


def test_no_home_directory(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert config.settings().cache_dir is None
