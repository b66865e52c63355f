"""The doctor: every section is there, what is missing comes with its cure, and nothing makes it fail."""

import subprocess
import sys

import pytest

from jax_ssd import __main__ as command_line
from jax_ssd import compile as kernels
from jax_ssd import config, cutile, ffi_targets, nvrtc
from jax_ssd.tools import doctor

SECTIONS = [
    "versions",
    "GPUs",
    "kernel compilers",
    "extension",
    "settings",
    "kernel cache",
    "tuned choices",
    "what implementation=None chooses",
]


@pytest.fixture(autouse=True)
def own_folders(tmp_path):
    with config.override(cache_dir=tmp_path / "cache"):
        yield


def section(title: str) -> str:
    return doctor.report().split(f"{title}\n", 1)[1].split("\n\n", 1)[0]


def test_all_sections(capsys):
    assert command_line.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line and not line.startswith(" ")] == SECTIONS
    assert not [line for line in lines if line.strip().startswith("failed:")]


def test_as_a_program():
    done = subprocess.run([sys.executable, "-m", "jax_ssd", "doctor"], capture_output=True, text=True, check=True)
    assert "implementation=None" in done.stdout


def test_unknown_commands_are_refused(capsys):
    with pytest.raises(SystemExit) as status:
        command_line.main(["operate"])
    assert status.value.code == 2 and "doctor" in capsys.readouterr().err
    with pytest.raises(SystemExit) as status:
        command_line.main(["--help"])
    assert status.value.code == 0 and "how to get what is missing" in capsys.readouterr().out


def test_missing_parts_come_with_their_cure(monkeypatch):
    monkeypatch.setattr(cutile, "missing", lambda: "the package cuda-tile is not installed")
    monkeypatch.setattr(nvrtc, "missing", lambda: "the package cuda-bindings is not installed")
    monkeypatch.setattr(ffi_targets, "missing", lambda: "the extension is missing; `pip install -e .` builds it")
    compilers = section("kernel compilers")
    assert "cuda-tile is not installed" in compilers and "cuda-bindings is not installed" in compilers
    assert compilers.count("-> pip install '.[cuda13]' in a checkout of jax_ssd") == 2
    assert "-> the extension is missing; `pip install -e .` builds it" in section("extension")
    with config.override(target_arch="sm_90"):
        choice = section("what implementation=None chooses")
    assert "cuda: xla, because" in choice and "not cutile: the extension is missing" in choice


def test_each_missing_package_comes_with_its_command(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("jax_ssd", "cuda-tile", "optax") else "1.0")
    lines = section("versions").splitlines()
    assert [line.strip() for line in lines if "->" in line] == [
        "-> for jax_ssd itself: pip install . in a checkout",
        "-> for kernels on NVIDIA GPUs: pip install '.[cuda13]' in a checkout of jax_ssd",
        "-> for jax_ssd.flax and jax_ssd.models: pip install '.[flax]' in a checkout of jax_ssd",
    ]
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0")
    assert "->" not in section("versions")


def test_a_machine_without_a_driver(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "-> if there is an NVIDIA GPU here: install its driver, r580 or later" in section("GPUs")


def test_choice_without_an_architecture_or_a_compiler(monkeypatch):
    monkeypatch.setattr(cutile, "missing", lambda: "the package cuda-tile is not installed")
    monkeypatch.setattr(ffi_targets, "missing", lambda: None)
    with config.override(target_arch="sm_90"):
        assert "only kernels that are in the cache, because the package" in section("what implementation=None chooses")
    with config.override(target_arch=()):
        monkeypatch.setattr(doctor.jax, "devices", no_devices)
        choice = section("what implementation=None chooses")
    assert "cuda: xla, because" in choice and "JAX_SSD_TARGET_ARCH" in choice


def no_devices(platform):
    raise RuntimeError(f"no {platform} here")


def test_choice_where_everything_is_there(monkeypatch):
    monkeypatch.setattr(cutile, "missing", lambda: None)
    monkeypatch.setattr(ffi_targets, "missing", lambda: None)
    with config.override(target_arch="sm_90"):
        choice = section("what implementation=None chooses")
    by_cuda, by_cutile = choice.split("cuda: cuda, compiled for sm_90")
    assert "mamba2_forward: bfloat16" in by_cuda and "mamba2_step: bfloat16, float32" in by_cuda
    assert "mamba2_forward: float32" in by_cutile and "cuda: cutile, compiled for sm_90" in by_cutile


def test_nonsense_in_the_environment_is_reported(monkeypatch):
    monkeypatch.setenv("JAX_SSD_TARGET_ARCH", "hopper")
    assert "JAX_SSD_TARGET_ARCH" in section("settings") and "'hopper'" in section("settings")
    assert doctor.main([]) == 0


def test_cache_folder(tmp_path):
    assert "0 kernels" in section("kernel cache") and "made on first use" in section("kernel cache")
    entry = tmp_path / "cache" / "v1" / "ab" / "abcd"
    entry.mkdir(parents=True)
    (entry / "0123.cubin").write_bytes(b"x" * 2_000_000)
    assert "1 kernels, 2.0 MB" in section("kernel cache") and "writable" in section("kernel cache")
    with config.override(cache_dir="off"):
        assert "in memory only" in section("kernel cache")
    (tmp_path / "file").touch()
    with config.override(cache_dir=tmp_path / "file" / "cache"):
        assert "cannot be written" in section("kernel cache") and "JAX_SSD_CACHE_DIR" in section("kernel cache")


def test_tuned_choices(tmp_path):
    with config.override(tuning_file=tmp_path / "tuning.json"):
        (tmp_path / "tuning.json").write_text("{")
        said = section("tuned choices")
    assert "sm_90: " in said and "0 tuned here" in said and f"-> jax_ssd ignores its tuning file {tmp_path}" in said


def test_a_failing_section_does_not_hide_the_others(monkeypatch):
    def fail():
        raise OSError("no such disk")

    monkeypatch.setattr(doctor, "_cache", fail)
    assert "failed: OSError: no such disk" in section("kernel cache")
    assert "cpu: xla" in section("what implementation=None chooses")


def test_an_old_driver_is_told(monkeypatch):
    said = "NVIDIA H200, 9.0, 550.54.15\n"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, said, ""))
    monkeypatch.setattr(kernels, "target_archs", lambda: ("sm_90",))
    lines = list(doctor._nvidia_smi())
    assert lines[0] == "NVIDIA H200, compute capability 9.0, driver 550.54.15"
    assert lines[1].startswith("-> the driver is too old") and "580" in lines[1]
