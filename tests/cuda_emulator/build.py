"""Kernels as shared libraries, made by g++ and kept by what they are made of."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from jax_ssd import sources
from jax_ssd.specs import CudaKernel
from tests.cuda_emulator.source import translated

_FOLDER = Path(__file__).parent
_OPTIONS = (
    *("-std=c++20", "-O1", "-g1", "-w", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"),
    *("-fvisibility=hidden", "-fno-gnu-unique"),
    # Misaligned addresses and indices outside of arrays trap.
    *("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error"),
)
_SINCE_12 = ("-ftrivial-auto-var-init=pattern",)  # variables that have no value yet hold -2e38


class Library:
    """Kernels of one source file with the same options."""

    def __init__(self, path: Path, expressions: Sequence[str]):
        functions = ctypes.CDLL(str(path))
        self._kernels = {name: Kernel(path, functions[f"launch_{i}"]) for i, name in enumerate(expressions)}

    def has(self, expressions: Sequence[str]) -> bool:
        return self._kernels.keys() >= set(expressions)

    def kernel(self, expression: str) -> Kernel:
        return self._kernels[expression]


class Kernel:
    """A compiled kernel."""

    def __init__(self, path: Path, entry: Callable[..., int]):
        self._path, self._entry = path, entry

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_memory: int,
        cluster: int,
        parameters: Sequence[bytes],
        seed: int,
    ) -> str | None:
        """What went wrong, or None. parameters: their bytes."""
        # The strictest alignment of a parameter is 64 bytes: that of a tensor map.
        values = [_aligned(value) for value in parameters]
        description = _Launch(
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*block),
            shared_memory,
            cluster,
            seed,
            len(values),
            (ctypes.c_void_p * len(values))(*(address for _, address in values)),
            (ctypes.c_uint * len(values))(*map(len, parameters)),
        )
        error = ctypes.create_string_buffer(4096)
        where = ctypes.c_uint64()
        if not self._entry(ctypes.byref(description), error, len(error), ctypes.byref(where)):
            return None
        return error.value.decode() + (self._line(where.value) if where.value else "")

    def _line(self, offset: int) -> str:
        command = ["addr2line", "-i", "-e", str(self._path), hex(offset)]
        if shutil.which(command[0]) is None:
            return ""
        lines = subprocess.run(command, capture_output=True, text=True).stdout.split()
        return " at " + " < ".join(Path(line).name for line in lines)


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("cluster", ctypes.c_uint),
        ("seed", ctypes.c_uint),
        ("count", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
    )

    def __init__(self, grid, block, shared_memory, cluster, seed, count, arguments, sizes):
        self._kept = arguments, sizes
        addresses = ctypes.addressof(arguments), ctypes.addressof(sizes)
        super().__init__(grid, block, shared_memory, cluster, seed, count, *addresses)


def _aligned(value: bytes) -> tuple[ctypes.Array, int]:
    memory = ctypes.create_string_buffer(len(value) + 64)
    address = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64
    ctypes.memmove(address, value, len(value))
    return memory, address


def compiled(kernels: Sequence[CudaKernel]) -> list[Library]:
    """The library of each kernel; those of one file with the same options share one."""
    groups: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.file, kernel.options), {})[kernel.name_expression] = None
    jobs = [(file, options, tuple(expressions)) for (file, options), expressions in groups.items()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        libraries = dict(zip(groups, pool.map(lambda job: _library(*job), jobs), strict=True))
    return [libraries[kernel.file, kernel.options] for kernel in kernels]


def cache_folder() -> Path:
    """JAX_SSD_EMULATOR_CACHE_DIR, else a folder of the user's in the system's temporary folder."""
    named = os.environ.get("JAX_SSD_EMULATOR_CACHE_DIR")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"jax_ssd_cuda_emulator_{os.getuid()}"


_loaded: list[tuple[tuple[str, ...], Library]] = []  # with what they are made of


def _library(file: str, options: tuple[str, ...], expressions: tuple[str, ...]) -> Library:
    texts = {name: translated(Path(name).name, text) for name, text in sources.cuda_sources(file).items()}
    made_of = (*texts, *texts.values(), *options)
    for known, library in _loaded:
        if known == made_of and library.has(expressions):
            return library
    library = _built(texts, options, expressions)
    _loaded.append((made_of, library))
    return library


def _built(texts: dict[str, str], options: tuple[str, ...], expressions: tuple[str, ...]) -> Library:
    entries = (f"EMULATOR_ENTRY(launch_{i}, ({expression}))\n" for i, expression in enumerate(expressions))
    main = f'#include "launch.h"\n#include "{next(iter(texts))}"\n{"".join(entries)}'
    folder = _headers_folder() / hashlib.sha256(repr((texts, options, main)).encode()).hexdigest()[:24]
    if not (folder / "kernels.so").exists():
        folder.mkdir(exist_ok=True)
        for name, text in {**texts, "cuda_bf16.h": "", "cuda_fp16.h": "", "entries.cc": main}.items():
            _write(folder / name, text)
        command = (f"-I{folder.parent}", f"-I{folder}", *options, str(folder / "entries.cc"), "-shared")
        _compile(command, folder / "kernels.so", expressions)
    return Library(folder / "kernels.so", expressions)


@cache
def _headers_folder() -> Path:
    """The emulator's headers and what g++ makes of them, which every library begins with."""
    texts = {path.name: path.read_text() for path in sorted(_FOLDER.glob("*.h"))}
    folder = cache_folder() / hashlib.sha256(repr((texts, _options())).encode()).hexdigest()[:24]
    if not (folder / "launch.h.gch").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            _write(folder / name, text)
        _compile(("-x", "c++-header", str(folder / "launch.h")), folder / "launch.h.gch", ("the emulator",))
    return folder


@cache
def _options() -> tuple[str, ...]:
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True).stdout
    return (*_OPTIONS, *(_SINCE_12 if int(version.split(".")[0]) >= 12 else ()))


def _write(path: Path, text: str) -> None:
    made = _beside(path)
    made.write_text(text)
    made.replace(path)


def _beside(path: Path) -> Path:
    """Where a file is made, so that another process never sees half of it."""
    return path.with_name(f"{os.getpid()}.{threading.get_ident()}.{path.name}")


def _compile(arguments: Sequence[str], to: Path, what: Sequence[str]) -> None:
    made = _beside(to)
    done = subprocess.run(["g++", *_options(), *arguments, "-o", str(made)], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise RuntimeError("\n".join((f"g++ refused {', '.join(what)}:", *errors[:8])))
    made.replace(to)
