"""Kernel sources to cubins, for one GPU architecture, in parallel and through the cache.

    compile_launches([(CuTileKernel("ssd", "main"), (ArraySpec("bfloat16", (4, 64), (64, 1)), ...))], "sm_90")

None of this needs a GPU. Which compiler makes a cubin is up to `cutile.py` (tileiras) and `nvrtc.py` (CUDA C++).
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from jax_ssd import cache, config, cutile, elf, nvrtc, sources
from jax_ssd.specs import (
    ArraySpec,
    CompileArg,
    CompileError,
    ConstantSpec,
    CudaKernel,
    CuTileKernel,
    KernelSource,
    ScalarSpec,
)

__all__ = [
    "ArraySpec",
    "CompileArg",
    "CompileError",
    "ConstantSpec",
    "CuTileKernel",
    "Cubin",
    "CudaKernel",
    "KernelSource",
    "ScalarSpec",
    "compile_launches",
    "compiler_version",
    "target_arch",
    "target_archs",
]


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    data: the ELF file. symbol: the kernel's name in it. digest: SHA-256 of data, in hex. shared_memory: static bytes
    per block. registers: per thread. parameters: (offset, bytes) of each kernel parameter. key: its cache key.
    """

    data: bytes = field(repr=False)
    symbol: str
    digest: str
    shared_memory: int
    registers: int
    arch: str
    parameters: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    key: str = field(default="", repr=False)


Request = tuple[KernelSource, tuple[CompileArg, ...]]


def compile_launches(requests: Sequence[Request], arch: str) -> list[Cubin]:
    """One cubin per request, in their order; equal requests share one.

    CudaKernel takes no compile-time arguments (template arguments are in the name expression); they are ignored.

    Raises:
      NotImplementedError: the kernel is not cached and its compiler is not installed here.
      CompileError: the compiler refused it.
      ValueError: `arch` is not supported, or an argument does not fit the kernel.
    """
    arch = config.parse_arch(arch, "arch")
    settings = config.settings()
    store = cache.open_cache(settings.cache_dir)
    jobs = [_Job.of(source, arguments, arch) for source, arguments in requests]
    unique = {job.key: job for job in jobs}
    done = {key: cubin for key, job in unique.items() if (cubin := _cached(job, store)) is not None}
    missing = [job for key, job in unique.items() if key not in done]
    if missing:
        # The compilers work outside the interpreter lock (tileiras is a process), so threads are enough.
        with ThreadPoolExecutor(min(settings.compile_jobs, len(missing)), "jax_ssd-compile") as pool:
            done |= zip([job.key for job in missing], pool.map(lambda job: _compile(job, store), missing), strict=True)
    return [done[job.key] for job in jobs]


def target_archs(devices: Iterable[Any] | None = None) -> tuple[str, ...]:
    """The architectures to compile for, oldest first: those of the settings, else those of `devices`.

    devices: JAX devices; None means every CUDA device that JAX sees and that is supported.
    Raises NotImplementedError if the settings name none and there is no device, or one of `devices` is not supported.
    """
    chosen = config.settings().target_arch
    if chosen:
        return chosen
    found: set[str] = set()
    refusal = None
    for device in _cuda_devices() if devices is None else devices:
        try:
            found.add(_device_arch(device))
        except NotImplementedError as error:
            if devices is not None:
                raise
            refusal = refusal or error  # of a GPU that is perhaps not used
    if refusal is not None and not found:
        raise refusal
    if not found:
        raise NotImplementedError(f"no CUDA device to compile for. {_ARCH_CURE}")
    return tuple(arch for arch in config.SUPPORTED_ARCHS if arch in found)


def target_arch(device: Any = None) -> str:
    """The one architecture to compile for (see target_archs); of several, the oldest."""
    return target_archs(None if device is None else [device])[0]


def compiler_version(source: KernelSource) -> str | None:
    """Name and version of the compiler that a kernel needs, or None if it is not installed."""
    return cutile.version() if isinstance(source, CuTileKernel) else nvrtc.version()


_ARCH_CURE = (
    f"Set JAX_SSD_TARGET_ARCH (or jax_ssd.config.override(target_arch=...)) to one of "
    f"{', '.join(config.SUPPORTED_ARCHS)} to compile without a GPU."
)


@dataclass(frozen=True)
class _Job:
    """A request with everything that identifies it."""

    source: KernelSource
    arguments: tuple[CompileArg, ...]
    arch: str
    texts: dict[str, str]
    key: str

    @classmethod
    def of(cls, source: KernelSource, arguments: tuple[CompileArg, ...], arch: str) -> _Job:
        if isinstance(source, CuTileKernel):
            arguments, texts = _without_lone_aliases(arguments), sources.module_sources(source.module)
            what = {**asdict(source), "module": sources.module_name(source.module)}
        else:
            arguments, texts = (), sources.cuda_sources(source.file)
            what = {**asdict(source), "file": next(iter(texts))}
        key = cache.content_key(
            {
                "kind": type(source).__name__,
                "kernel": what,
                "arguments": [_canonical(argument) for argument in arguments],
                "arch": arch,
                "sources": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
            }
        )
        return cls(source, arguments, arch, texts, key)

    def __str__(self) -> str:
        if isinstance(self.source, CudaKernel):
            return f"CUDA C++ kernel {self.source.name_expression} of {self.source.file} for {self.arch}"
        names = sources.parameter_names(next(iter(self.texts.values())), self.source.function)
        names += [f"#{i}" for i in range(len(names), len(self.arguments))]
        arguments = ", ".join(f"{name}: {spec}" for name, spec in zip(names, self.arguments, strict=False))
        return f"cuTile kernel {self.source.module}.{self.source.function} for {self.arch} with ({arguments})"


def _cached(job: _Job, store: cache.Cache) -> Cubin | None:
    compiler = compiler_version(job.source)
    entry = store.get(job.key, compiler)
    return None if entry is None else _cubin(job, entry)


def _compile(job: _Job, store: cache.Cache) -> Cubin:
    with _key_lock(job.key):
        # Another thread may have compiled it while this one waited.
        cubin = _cached(job, store)
        if cubin is not None:
            return cubin
        compiler = compiler_version(job.source)
        try:
            if isinstance(job.source, CuTileKernel):
                symbol = f"{job.source.function}_{job.key[:16]}"
                data = cutile.compile_kernel(job.source, job.arguments, job.arch, symbol)
            else:
                data, symbol = nvrtc.compile_kernel(job.source, job.texts, job.arch)
        except NotImplementedError as error:
            raise NotImplementedError(f"{error} Wanted for the {job}, which is not in the kernel cache.") from error
        except CompileError as error:
            raise CompileError(f"{error}\nThis was the {job}, compiled by {compiler}.") from error
        info = elf.kernel_info(data, symbol)
        details = {
            "symbol": symbol,
            "arch": job.arch,
            "what": str(job),
            "shared_memory": info.shared_memory,
            "registers": info.registers,
            "parameters": info.parameters,
        }
        comment, suffix = ("#", ".py") if isinstance(job.source, CuTileKernel) else ("//", ".cu")
        entry = cache.Entry(data, details, compiler or "unknown")
        store.put(job.key, entry, f"{comment} {job}\n{sources.joined(job.texts, comment)}", suffix)
        return _cubin(job, entry)


def _cubin(job: _Job, entry: cache.Entry) -> Cubin:
    details = entry.details
    return Cubin(
        data=entry.data,
        symbol=details["symbol"],
        digest=hashlib.sha256(entry.data).hexdigest(),
        shared_memory=details["shared_memory"],
        registers=details["registers"],
        arch=job.arch,
        parameters=tuple((offset, size) for offset, size in details["parameters"]),
        key=job.key,
    )


def _canonical(argument: CompileArg) -> list[Any]:
    """An argument as JSON in which 1, 1.0 and True differ."""
    if isinstance(argument, ConstantSpec):
        return ["constant", _canonical_value(argument.value)]
    return [type(argument).__name__, *(getattr(argument, item.name) for item in fields(argument))]


def _canonical_value(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return ["tuple", [_canonical_value(item) for item in value]]
    if isinstance(value, float):
        return ["float", value.hex()]
    if value is None or isinstance(value, bool | int | str):
        return [type(value).__name__, value]
    raise ValueError(
        f"ConstantSpec: expected bool, int, float, str, None or a tuple of them, got {type(value).__name__} {value!r}. "
        f"Convert it first (a numpy scalar: its .item())."
    )


def _without_lone_aliases(arguments: tuple[CompileArg, ...]) -> tuple[CompileArg, ...]:
    """Drops the alias name of an array that shares it with no other: it promises nothing, and cuTile refuses it."""
    names = [argument.alias for argument in arguments if isinstance(argument, ArraySpec)]
    return tuple(
        ArraySpec(a.dtype, a.shape, a.strides, a.index64, a.alias if names.count(a.alias) > 1 else None, a.alignment)
        if isinstance(a, ArraySpec)
        else a
        for a in arguments
    )


def _cuda_devices() -> list[Any]:
    import jax

    try:
        return jax.devices("cuda")
    except RuntimeError as error:
        raise NotImplementedError(f"JAX sees no CUDA device ({str(error).splitlines()[0]}). {_ARCH_CURE}") from error


def _device_arch(device: Any) -> str:
    """A cubin for sm_XY runs on every sm_XZ with Z >= Y, so the nearest older of the same generation serves."""
    capability = str(getattr(device, "compute_capability", ""))
    match = re.fullmatch(r"(\d+)\.(\d)", capability)
    major, minor = (int(match[1]), int(match[2])) if match else (0, 0)
    for arch in reversed(config.SUPPORTED_ARCHS):
        have_major, have_minor = divmod(int(arch.removeprefix("sm_")), 10)
        if have_major == major and have_minor <= minor:
            return arch
    raise NotImplementedError(
        f"device {device} has compute capability {capability or 'unknown'}; there are kernels for "
        f"{', '.join(config.SUPPORTED_ARCHS)}. Use implementation='xla' on it."
    )


_key_locks: dict[str, threading.Lock] = {}
_key_locks_guard = threading.Lock()


def _key_lock(key: str) -> threading.Lock:
    with _key_locks_guard:
        return _key_locks.setdefault(key, threading.Lock())
