"""cuTile kernels to cubins: `cuda.tile` turns Python into TileIR bytecode, the program `tileiras` that into a cubin.

`cuda.tile.compilation.export_kernel` can run tileiras itself, but holds a lock over the whole process meanwhile, so
that kernels compile one after another, and passes on CUDA_HOME, with which a tileiras found on PATH loads the libnvvm
of another toolkit and fails with "Return code 5". Here bytecode is exported and tileiras started by us.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import subprocess
import tempfile
import types
import typing
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from jax_ssd import config, sources
from jax_ssd.specs import ArraySpec, CompileArg, CompileError, ConstantSpec, CuTileKernel, ScalarSpec

_CURE = f"To install them: {config.install('cuda13')}."
_SMALLER = "Smaller tiles or another chunk_size may compile; implementation='xla' needs no compiler."

# What makes a cubin besides cuda-tile: tileiras calls ptxas (in nvcc) and libnvvm.
_COMPILER_PACKAGES = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")


def version() -> str | None:
    """Such as "cuda-tile-1.7.0+tileiras-13.4.92", or None unless both are installed."""
    return None if missing() else _version()


def missing() -> str | None:
    """What keeps cuTile kernels from being compiled here, or None."""
    if not _cuda_tile_installed():
        return "the package cuda-tile is not installed"
    if find_tileiras() is None:
        return "the program tileiras is not installed (package nvidia-cuda-tileiras, or a CUDA 13 toolkit on PATH)"
    return None


@cache
def find_tileiras() -> Path | None:
    """tileiras of the package nvidia-cuda-tileiras, else on PATH, in CUDA_HOME or CUDA_PATH, in /usr/local/cuda."""
    folders = []
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folders.append(Path(location) / "cu13" / "bin")
    folders += map(Path, filter(None, os.environ.get("PATH", "").split(os.pathsep)))
    folders += [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders.append(Path("/usr/local/cuda/bin"))
    for folder in folders:
        found = shutil.which("tileiras", path=str(folder))
        if found:
            return Path(found)
    return None


def compile_kernel(kernel: CuTileKernel, arguments: Sequence[CompileArg], arch: str, symbol: str) -> bytes:
    """The cubin of one kernel for exactly these arguments, its symbol as given.

    Raises NotImplementedError if a compiler is missing, CompileError if one refuses the kernel.
    """
    lacking = missing()
    if lacking:
        raise NotImplementedError(f"cuTile kernels cannot be compiled here: {lacking}. {_CURE}")
    try:
        bytecode = _export(kernel, arguments, arch, symbol)
    except (NotImplementedError, ImportError):
        raise
    except Exception as error:  # cuda.tile raises its own exceptions and plain TypeErrors alike
        raise CompileError(f"cuda.tile refused the kernel: {type(error).__name__}: {error}") from error
    return _assemble(bytecode, arch, kernel.opt_level)


_PATIENCE = 600.0  # seconds; a kernel takes up to a minute, and what takes ten has not been seen to end


def run_tileiras(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs tileiras. Its environment lacks CUDA_HOME and CUDA_PATH: it finds its own ptxas and libnvvm beside it.

    Raises CompileError when it does not end.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CUDA_PATH")}
    tileiras = find_tileiras()
    if tileiras is None:
        raise NotImplementedError(f"tileiras is not installed. {_CURE}")
    command = [str(tileiras), *arguments]
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"tileiras had not ended after {_PATIENCE:.0f} s and was stopped. {_SMALLER}") from error


@cache
def _cuda_tile_installed() -> bool:
    try:
        return importlib.util.find_spec("cuda.tile") is not None
    except ModuleNotFoundError:  # no package `cuda` at all
        return False


@cache
def _version() -> str:
    tileiras, own = find_tileiras(), _package_version("cuda-tile") or "unknown"
    packages = [_package_version(name) for name in _COMPILER_PACKAGES]
    if tileiras is not None and tileiras.parts[-4:-1] == ("nvidia", "cu13", "bin") and None not in packages:
        return f"cuda-tile-{own}+tileiras-{'-'.join(dict.fromkeys(map(str, packages)))}"
    return f"cuda-tile-{own}+tileiras-{'.'.join(_tileiras_release())}"


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def _tileiras_release() -> tuple[str, ...]:
    """("13", "4", "92"), from what tileiras says of itself."""
    result = run_tileiras(["--version"])
    match = re.search(r"V(\d+)\.(\d+)\.(\d+)", result.stdout)
    if match is None:
        raise NotImplementedError(
            f"{find_tileiras()} does not run here (`--version`: {(result.stderr or result.stdout).strip()!r}). {_CURE}"
        )
    return match.groups()


def _export(kernel: CuTileKernel, arguments: Sequence[CompileArg], arch: str, symbol: str) -> bytes:
    from cuda.tile.compilation import CallingConvention, KernelSignature, export_kernel

    function = getattr(sources.import_module(kernel.module), kernel.function, None)
    if function is None:
        raise AttributeError(f"module {kernel.module} has no kernel {kernel.function!r}")
    parameters = [_constraint(argument) for argument in arguments]
    # Version 2 is the first with constant shapes.
    signature = KernelSignature(parameters, CallingConvention.cutile_python_v2(), symbol)
    output = io.BytesIO()
    with sources.one_tree_at_a_time:  # cuda.tile makes one of the kernel; tileiras, the long part, runs in parallel
        export_kernel(
            _specialized(function, kernel, arguments),
            [signature],
            output,
            gpu_code=arch,
            output_format="tileir_bytecode",
            bytecode_version=_bytecode_version(),
        )
    return output.getvalue()


def _assemble(bytecode: bytes, arch: str, opt_level: int) -> bytes:
    with tempfile.TemporaryDirectory(prefix="jax_ssd-") as folder:
        source, target = Path(folder, "kernel.tileirbc"), Path(folder, "kernel.cubin")
        source.write_bytes(bytecode)
        result = run_tileiras(
            [str(source), "-o", str(target), "--gpu-name", arch, f"-O{opt_level}", "--lineinfo"],
        )
        if result.returncode == 0 and target.is_file():
            return target.read_bytes()
    said = (result.stderr.strip() or result.stdout.strip())[:4000]
    raise CompileError(
        f"tileiras failed with return code {result.returncode}. {_failure_cure(result.returncode, said)}\n"
        f"It said: {said or 'nothing'}"
    )


def _failure_cure(code: int, said: str) -> str:
    if code == 5 and "error:" not in said.replace("error: failed to compile Tile IR program", ""):
        return (
            "This code without a diagnostic mostly means that ptxas or libnvvm beside it is missing or of another "
            "version: install nvidia-cuda-tileiras, nvidia-cuda-nvcc and nvidia-nvvm of one version (`python -m "
            f"jax_ssd doctor`). {_SMALLER}"
        )
    return f"It could not compile this kernel. {_SMALLER}"


@cache
def _bytecode_version() -> str:
    """The newest bytecode that both sides know. Asking cuda.tile would make it run tileiras in our environment."""
    from cuda.tile._compile import parse_bytecode_version  # the only place that lists what it can write

    major, newest = (int(part) for part in _tileiras_release()[:2])
    for minor in range(newest, 0, -1):
        try:
            parse_bytecode_version(f"{major}.{minor}")
        except ValueError:
            continue
        return f"{major}.{minor}"
    raise NotImplementedError(f"cuda-tile writes no bytecode that tileiras {major}.{newest} reads. {_CURE}")


def _constraint(argument: CompileArg) -> Any:
    from cuda.tile.compilation import ConstantConstraint, ScalarConstraint, TupleConstraint

    if isinstance(argument, ArraySpec):
        return _array_constraint(argument)
    if isinstance(argument, ScalarSpec):
        return ScalarConstraint(_dtype(argument.dtype))
    if isinstance(argument.value, tuple):
        return TupleConstraint([_constraint(ConstantSpec(value)) for value in argument.value])
    return ConstantConstraint(argument.value)


def _array_constraint(array: ArraySpec) -> Any:
    import cuda.tile as ct
    from cuda.tile.compilation import ArrayConstraint

    return ArrayConstraint(
        _dtype(array.dtype),
        len(array.shape),
        index_dtype=ct.int64 if array.index64 else ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=() if array.alias is None else (array.alias,),
        may_alias_internally=_overlaps_itself(array),
        stride_constant=array.strides,
        shape_constant=array.shape,
        base_addr_divisible_by=array.alignment,
    )


def _overlaps_itself(array: ArraySpec) -> bool:
    """Whether two indices may mean one element: some stride is less than what the smaller strides reach."""
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in zip(array.strides, array.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += stride * (size - 1) if size > 1 else 0
    return False


def _dtype(name: str) -> Any:
    import cuda.tile as ct

    return getattr(ct, "bool_" if name == "bool" else name)


def _specialized(function: Any, kernel: CuTileKernel, arguments: Sequence[CompileArg]) -> Any:
    """The kernel with our options, and every array's sizes known to its code.

    Sizes reach the code as compile-time constants only for parameters annotated so; annotating a copy of the function
    here keeps the kernels' own signatures plain and makes `x.shape[1]` usable as a tile shape in them.
    """
    import cuda.tile as ct

    options = {}
    if isinstance(function, ct.kernel):
        decorated = function._compiler_options
        options = {name: getattr(decorated, name) for name in ("num_ctas", "occupancy", "num_worker_warps")}
        function = function._pyfunc
    for name in ("num_ctas", "occupancy", "num_worker_warps"):
        if getattr(kernel, name) is not None:
            options[name] = getattr(kernel, name)
    names = list(function.__code__.co_varnames[: function.__code__.co_argcount])
    if len(names) != len(arguments):
        raise TypeError(f"the kernel takes {len(names)} arguments ({', '.join(names)}), got {len(arguments)}")
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    copy.__annotations__ = dict(function.__annotations__)
    for name, argument in zip(names, arguments, strict=True):
        if isinstance(argument, ArraySpec):
            axes = tuple(range(len(argument.shape)))
            annotation = ct.ArrayAnnotation(
                index_dtype=ct.int64 if argument.index64 else ct.int32,
                static_shape_dims=axes,
                static_stride_dims=axes,
            )
            copy.__annotations__[name] = typing.Annotated[ct.Array, annotation]
    return ct.kernel(copy, opt_level=kernel.opt_level, **options)
