"""What is installed, what would run here and why, and how to get what is missing. Plain text; always succeeds."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata

import jax

from jax_ssd import compile, config, cutile, dispatch_paths, ffi_targets, nvrtc, sizes, tune
from jax_ssd.paths import Path

# By the extra that brings them, with what they are for.
_PACKAGES = {
    ("", "jax_ssd itself"): ("jax_ssd", "jax", "jaxlib"),
    ("cuda13", "kernels on NVIDIA GPUs"): (
        "jax-cuda13-plugin",
        "cuda-tile",
        "nvidia-cuda-tileiras",
        "nvidia-cuda-nvcc",
        "nvidia-nvvm",
        "cuda-bindings",
        "nvidia-cuda-nvrtc",
    ),
    ("flax", "jax_ssd.flax and jax_ssd.models"): ("flax", "optax"),
}
_OLDEST_DRIVER = 580
_INSTALL = config.install("cuda13")


def main(arguments: Sequence[str]) -> int:
    """Prints the report."""
    argparse.ArgumentParser(prog="python -m jax_ssd doctor", description=__doc__).parse_args(arguments)
    print(report())
    return 0


def report() -> str:
    """The whole report. A section that fails says so and does not keep the others from being written."""
    sections: dict[str, Callable[[], Iterator[str]]] = {
        "versions": _versions,
        "GPUs": _gpus,
        "kernel compilers": _compilers,
        "extension": _extension,
        "settings": _settings,
        "kernel cache": _cache,
        "tuned choices": _tuned,
        "what implementation=None chooses": _choices,
    }
    lines = []
    for title, section in sections.items():
        lines += ["", title] if lines else [title]
        try:
            lines += [f"  {line}" for line in section()]
        except Exception as error:  # a report on a broken installation must survive what is broken
            lines.append(f"  failed: {type(error).__name__}: {error}")
    return "\n".join(lines)


def _versions() -> Iterator[str]:
    yield f"python {platform.python_version()} at {sys.executable}, {platform.platform()}"
    for (extra, purpose), names in _PACKAGES.items():
        yield from (f"{name} {_version(name) or 'not installed'}" for name in names)
        if not all(map(_version, names)):
            yield f"-> for {purpose}: {config.install(*filter(None, [extra]))}"


def _gpus() -> Iterator[str]:
    found = list(_nvidia_smi())
    yield from found or ["none found by nvidia-smi"]
    if not found:
        yield f"-> if there is an NVIDIA GPU here: install its driver, r{_OLDEST_DRIVER} or later (nvidia.com/drivers)"
    devices, reason = _cuda_devices()
    names = [f"{device} (compute capability {device.compute_capability})" for device in devices]
    yield f"JAX sees {', '.join(names) or 'no CUDA device'}"
    if found and not devices:
        yield f"-> {reason}"
        yield (
            f"-> {_INSTALL}" if not _version("jax-cuda13-plugin") else "-> check JAX_PLATFORMS and CUDA_VISIBLE_DEVICES"
        )


def _nvidia_smi() -> Iterator[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    query = [program, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield f"nvidia-smi failed: {error}"
        return
    for line in result.stdout.splitlines():
        name, capability, driver = (part.strip() for part in line.split(","))
        yield f"{name}, compute capability {capability}, driver {driver}"
        if driver.partition(".")[0].isdigit() and int(driver.partition(".")[0]) < _OLDEST_DRIVER:
            yield f"-> the driver is too old for CUDA 13: install r{_OLDEST_DRIVER} or later"


def _compilers() -> Iterator[str]:
    for what, module in (("cuTile", cutile), ("CUDA C++", nvrtc)):
        lacking = module.missing()
        if lacking is None:
            yield f"{what}: {module.version()}"
        else:
            yield f"{what}: {lacking}; cached kernels can still be used"
            yield f"-> {_INSTALL}"
    if cutile.find_tileiras():
        yield f"tileiras at {cutile.find_tileiras()}"
    if nvrtc.cuda_headers():
        yield f"CUDA headers at {nvrtc.cuda_headers()}"


def _extension() -> Iterator[str]:
    reason = ffi_targets.missing()
    yield "jax_ssd._ffi is built and loads" if reason is None else f"-> {reason}"


def _settings() -> Iterator[str]:
    try:
        now = config.settings()
    except ValueError as error:
        yield f"-> {error}"
        return
    values = {
        "cache_dir": now.cache_dir or "off",
        "target_arch": ",".join(now.target_arch) or "that of the GPUs JAX sees",
        "compile_jobs": now.compile_jobs,
        "tuning_file": now.tuning_file or "off",
        "mamba3_scan": now.mamba3_scan,
    }
    for name, value in values.items():
        variable = config.VARIABLES[name]
        yield f"{variable} {'is set' if os.environ.get(variable) else 'not set'}: {value}"


def _cache() -> Iterator[str]:
    folder = config.settings().cache_dir
    if folder is None:
        yield "off: kernels are kept in memory only"
        return
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    cubins = list(folder.glob("v*/*/*/*.cubin"))
    yield f"{folder}: {len(cubins)} kernels, {sum(path.stat().st_size for path in cubins) / 1e6:.1f} MB"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield f"-> {existing} cannot be written: kernels are compiled again in each process"
        yield "-> make it writable, or set JAX_SSD_CACHE_DIR to another folder"
    elif existing == folder:
        free = shutil.disk_usage(folder).free
        yield f"writable, {free / 1e9:.1f} GB free"
    else:
        yield f"it will be made on first use (below {existing})"


def _tuned() -> Iterator[str]:
    """What the tables hold; how many of them are the user's own."""
    path = config.settings().tuning_file
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for arch in config.SUPPORTED_ARCHS:
            shipped, all_of_them = tune.shipped(arch), tune.records(arch)
            if all_of_them:
                yield f"{arch}: {len(shipped)} sizes shipped, {len(all_of_them) - len(shipped)} tuned here"
    yield f"tuned here is what {path or 'no file'} holds; `python -m jax_ssd tune` adds to it"
    yield from (f"-> {warning.message}" for warning in said)


def _choices() -> Iterator[str]:
    """What a model's calls of the operators would run in a program for each platform; those that run alike together."""
    for target in ("cpu", "cuda"):
        alike: dict[str, dict[str, list[str]]] = {}
        for label, (function, operands) in _calls():
            for path in dispatch_paths(function, *operands, platform=target):
                alike.setdefault("\n".join(_chosen(path, target)), {}).setdefault(path.op, []).append(label)
        for lines, ops in alike.items():
            yield from (f"{op}: {', '.join(labels)}" for op, labels in ops.items())
            yield from (f"  {line}" for line in lines.splitlines())


def _chosen(path: Path, target: str) -> Iterator[str]:
    if path.plan is None:
        yield f"{target}: {path.implementation}, because"
        for reason in dict.fromkeys(path.refusals.values()):
            names = [name for name, refusal in path.refusals.items() if refusal == reason]
            yield f"not {', '.join(names)}: {reason}"
        return
    archs = ", ".join(compile.target_archs())
    yield f"{target}: {path.implementation}, compiled for {archs}; xla where the kernels decline a call"
    lacking = {"cutile": cutile, "cuda": nvrtc}[path.implementation].missing()
    if lacking is not None:
        yield f"-> but only kernels that are in the cache, because {lacking}; {_INSTALL}"


def _calls() -> Iterator[tuple[str, tuple]]:
    """Training and a step, of sizes that every implementation of their operator takes in one type at least."""
    for label, rank in (("", 0), ("SISO ", 1), ("rank 4 ", 4)):
        for dtype in ("bfloat16", "float32"):
            calls = sizes.programs(sizes.Size(label, 4, 2048, 1, 24, 64, 64, dtype=dtype, rank=rank))
            yield f"{label}{dtype}", calls["backward"]
            yield f"{label}{dtype}", calls["step"]


def _cuda_devices():
    try:
        return jax.devices("cuda"), ""
    except RuntimeError as error:
        return [], str(error).splitlines()[0]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
