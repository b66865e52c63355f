"""CUDA C++ kernels to cubins through NVRTC, which needs no GPU and no nvcc.

The bindings are called as they are: `cuda.core.Program`, built on them, takes its options as named fields and would
have to be taught every `-D` of ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from jax_ssd import config, sources
from jax_ssd.specs import CompileError, CudaKernel

_CURE = f"To install them: {config.install('cuda13')}."
_STANDARD_OPTIONS = ("--std=c++17", "--generate-line-info")


def version() -> str | None:
    """Such as "nvrtc-13.4.92+headers-13040", or None unless NVRTC and the CUDA headers are there."""
    return None if missing() else _version()


def missing() -> str | None:
    """What keeps CUDA C++ kernels from being compiled here, or None."""
    if not _bindings_installed():
        return "the package cuda-bindings is not installed"
    try:
        _release()
    except (ImportError, RuntimeError, OSError) as error:
        return f"NVRTC (package nvidia-cuda-nvrtc) does not load: {error}"
    if cuda_headers() is None:
        return "the CUDA headers (package nvidia-cuda-runtime, or a CUDA 13 toolkit) are not installed"
    return None


@cache
def cuda_headers() -> Path | None:
    """The folder of cuda_bf16.h: of the package nvidia-cuda-runtime, else of a CUDA toolkit."""
    folders = []
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folders.append(Path(location) / "cu13" / "include")
    folders += [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders.append(Path("/usr/local/cuda/include"))
    return next((folder for folder in folders if (folder / "cuda_bf16.h").is_file()), None)


def compile_kernel(kernel: CudaKernel, texts: Mapping[str, str], arch: str) -> tuple[bytes, str]:
    """The cubin of one kernel and its (mangled) symbol. `texts`: the file, first, and its headers, by name.

    Raises NotImplementedError if NVRTC is missing, CompileError if it refuses the kernel.
    """
    lacking = missing()
    if lacking:
        raise NotImplementedError(f"CUDA C++ kernels cannot be compiled here: {lacking}. {_CURE}")
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")

    name, text = next(iter(texts.items()))
    program = _call(nvrtc.nvrtcCreateProgram, text.encode(), name.encode(), 0, [], [])
    try:
        _call(nvrtc.nvrtcAddNameExpression, program, kernel.name_expression.encode())
        options = [option.encode() for option in _options(kernel, arch)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC refused the kernel ({status.name}).\nIt said: {_log(program)}")
        symbol = _call(nvrtc.nvrtcGetLoweredName, program, kernel.name_expression.encode()).decode()
        cubin = bytearray(_call(nvrtc.nvrtcGetCUBINSize, program))
        _call(nvrtc.nvrtcGetCUBIN, program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), symbol


def _options(kernel: CudaKernel, arch: str) -> list[str]:
    headers = cuda_headers()
    return [
        f"--gpu-architecture={arch}{'a' if kernel.arch_specific else ''}",
        *_STANDARD_OPTIONS,
        f"--include-path={sources.cuda_folder(kernel.file)}",
        f"--include-path={headers}",
        f"--include-path={headers}/cccl",
        *kernel.options,
    ]


def _call(function: Any, *arguments: Any) -> Any:
    status, *results = function(*arguments)
    if status.value != 0:
        raise CompileError(f"{function.__name__} failed with {status.name}")
    return results[0] if results else None


def _log(program: Any) -> str:
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")

    log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize, program))
    _call(nvrtc.nvrtcGetProgramLog, program, log)
    return bytes(log).rstrip(b"\0").decode(errors="replace").strip()[:4000]  # the first error explains the others


@cache
def _bindings_installed() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # no package `cuda` at all
        return False


@cache
def _release() -> str:
    """ "13.4": the library's own word. Raises if it cannot be loaded."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")

    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(status.name)
    return f"{major}.{minor}"


@cache
def _version() -> str:
    try:
        patch = metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        patch = ""
    # The package's version says more than the library's, if it is the package's library that was loaded.
    release = patch if patch.startswith(f"{_release()}.") else _release()
    text = (cuda_headers() or Path()).joinpath("cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return f"nvrtc-{release}+headers-{found[1] if found else 'unknown'}"
