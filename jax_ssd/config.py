"""Every setting of the library: environment variables, their defaults, and overrides inside the process.

    JAX_SSD_CACHE_DIR     folder of compiled kernels; "off" keeps them in memory only
                          (default: $XDG_CACHE_HOME/jax_ssd, or ~/.cache/jax_ssd)
    JAX_SSD_TARGET_ARCH   GPU architectures to compile for, such as "sm_90" or "sm_90,sm_100"
                          (default: those of the GPUs that JAX sees)
    JAX_SSD_COMPILE_JOBS  how many kernels are compiled at once (default: the number of processors)
    JAX_SSD_TUNING_FILE   what `jax_ssd.autotune` and `python -m jax_ssd tune` measured here; "off" for none
                          (default: $XDG_CONFIG_HOME/jax_ssd/tuning.json, or ~/.config/jax_ssd/tuning.json)
    JAX_SSD_MAMBA3_SCAN   "fma" keeps float32 scans of Mamba-3 off the tensor cores, to compare with: their kernels
                          decline, and XLA serves with full float32 products (default: "tensor")

`settings()` is what holds now: an enclosing `override(...)` first, then `update(...)`, then the environment, then the
default. Nothing is read when the module is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

#: Dynamic and static shared memory that one block may use, in bytes, by what kernels can be compiled for, oldest first.
MAX_SHARED_MEMORY = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_103": 227 * 1024,
    "sm_120": 99 * 1024,
}
SUPPORTED_ARCHS = tuple(MAX_SHARED_MEMORY)

VARIABLES: Mapping[str, str] = {
    "cache_dir": "JAX_SSD_CACHE_DIR",
    "target_arch": "JAX_SSD_TARGET_ARCH",
    "compile_jobs": "JAX_SSD_COMPILE_JOBS",
    "tuning_file": "JAX_SSD_TUNING_FILE",
    "mamba3_scan": "JAX_SSD_MAMBA3_SCAN",
}


@dataclass(frozen=True)
class Settings:
    """One consistent set of settings. Strings are accepted for every field and converted; nonsense is refused.

    cache_dir: Path, or None for no folder.
    target_arch: tuple of names from SUPPORTED_ARCHS; empty means the architectures of the GPUs that JAX sees.
    compile_jobs: at least 1.
    tuning_file: Path, or None for no file.
    mamba3_scan: "tensor" or "fma".
    """

    cache_dir: Path | None = None
    target_arch: tuple[str, ...] = ()
    compile_jobs: int = 1
    tuning_file: Path | None = None
    mamba3_scan: str = "tensor"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_dir", _path("cache_dir", self.cache_dir))
        object.__setattr__(self, "target_arch", _archs(self.target_arch))
        object.__setattr__(self, "compile_jobs", _jobs(self.compile_jobs))
        object.__setattr__(self, "tuning_file", _path("tuning_file", self.tuning_file))
        object.__setattr__(self, "mamba3_scan", _scan(self.mamba3_scan))


def settings() -> Settings:
    """The settings that hold here and now. Raises ValueError naming the variable whose value is nonsense."""
    values = _defaults()
    values |= {name: os.environ[variable] for name, variable in VARIABLES.items() if os.environ.get(variable)}
    return Settings(**(values | _process | dict(_local.get())))


def update(**values: Any) -> None:
    """Sets settings for the whole process; a value of `...` returns that setting to the environment's."""
    _check_names(values)
    Settings(**{name: value for name, value in values.items() if value is not ...})
    for name, value in values.items():
        if value is ...:
            _process.pop(name, None)
        else:
            _process[name] = value


@contextmanager
def override(**values: Any) -> Iterator[Settings]:
    """Settings for the body of a `with` statement, in this thread only: `with override(target_arch="sm_90"): ...`

    Limitation: JAX keeps lowered programs by function and argument types. A function that was already lowered is not
    lowered again because the target architecture changed; call `jax.clear_caches()` or lower a new function.
    """
    _check_names(values)
    token = _local.set({**_local.get(), **values})
    try:
        yield settings()
    finally:
        _local.reset(token)


def parse_arch(value: str, name: str = "target_arch") -> str:
    """ "sm_90", "90" or "9.0" as "sm_90". Raises ValueError for anything but the supported architectures."""
    match = re.fullmatch(r"(?:sm_)?(\d+)(?:\.(\d))?", value.strip().lower())
    arch = f"sm_{match[1]}{match[2] or ''}" if match else ""
    if arch not in SUPPORTED_ARCHS:
        raise ValueError(
            f"{_spell(name)}: expected one of {', '.join(SUPPORTED_ARCHS)}, got {value!r}. "
            f"Name the compute capability of the GPU that the kernels are for (`nvidia-smi --query-gpu=compute_cap`)."
        )
    return arch


def install(*extras: str) -> str:
    """The command that installs the library with these extras, for messages about what is missing."""
    return f"pip install '.[{','.join(extras)}]' in a checkout of jax_ssd" if extras else "pip install . in a checkout"


_process: dict[str, Any] = {}
_local: ContextVar[Mapping[str, Any]] = ContextVar("jax_ssd_settings", default={})  # noqa: B039 (never mutated)


def _defaults() -> dict[str, Any]:
    cache, own = _home("XDG_CACHE_HOME", ".cache"), _home("XDG_CONFIG_HOME", ".config")
    return {
        "cache_dir": cache and cache / "jax_ssd",
        "compile_jobs": os.cpu_count() or 1,
        "tuning_file": own and own / "jax_ssd" / "tuning.json",
    }


def _home(variable: str, folder: str) -> Path | None:
    # The XDG specification says to ignore a relative path. A process without a home directory has no folder.
    given = Path(os.environ.get(variable, ""))
    if given.is_absolute():
        return given
    try:
        return Path.home() / folder
    except RuntimeError:
        return None


def _check_names(values: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(Settings)]
    for name in values:
        if name not in known:
            raise ValueError(f"unknown setting {name!r}: expected one of {', '.join(known)}")


def _spell(name: str) -> str:
    return f"{name} ({VARIABLES[name]})" if name in VARIABLES else name


def _path(name: str, value: str | os.PathLike[str] | None) -> Path | None:
    if value is None or str(value).lower() == "off":
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f'{_spell(name)}: expected an absolute path or "off", got {value!r}. Pass a string or a Path.')
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise ValueError(
            f'{_spell(name)}: expected an absolute path or "off", got {str(value)!r}. A relative path would mean '
            f"another place in each working directory; write {str(Path.cwd() / path)!r}."
        )
    return path


def _archs(value: str | tuple[str, ...]) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{_spell('target_arch')}: expected a name such as 'sm_90' or a tuple of them, got {value!r}. An empty "
            "tuple takes the GPUs that JAX sees."
        )
    chosen = {parse_arch(name) for name in names}
    return tuple(arch for arch in SUPPORTED_ARCHS if arch in chosen)


def _jobs(value: str | int) -> int:
    jobs = int(value) if isinstance(value, int) or str(value).strip().isdecimal() else 0
    if jobs < 1:
        raise ValueError(
            f"{_spell('compile_jobs')}: expected a whole number of at least 1, got {value!r}. "
            f"Leave it unset to use every processor ({os.cpu_count()} here)."
        )
    return jobs


def _scan(value: str) -> str:
    if value not in ("tensor", "fma"):
        raise ValueError(
            f"{_spell('mamba3_scan')}: expected 'tensor' or 'fma', got {value!r}. Leave it unset but to compare."
        )
    return value
