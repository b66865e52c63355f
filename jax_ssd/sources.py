"""Finds kernel sources and everything they are made of, without importing them.

A cached kernel must be found on a machine that has no kernel compiler, where importing its module would fail: so
sources are found by path and their imports and includes are read from the text.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

_PACKAGE = "jax_ssd.kernels"

one_tree_at_a_time = threading.Lock()
"""Held wherever syntax trees are built: Python 3.11 loses count of its recursion when two threads do so at once ("AST
constructor recursion depth mismatch")."""


@cache
def kernels_folder() -> Path:
    """The folder of device code: `jax_ssd/kernels` as installed, `kernels` beside the package in a source checkout.

    In the second case it is also made importable as `jax_ssd.kernels`; this is the only place that knows of it.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    for location in locations:
        if (Path(location) / "cutile").is_dir() or (Path(location) / "cuda").is_dir():
            return Path(location)
    folder = Path(__file__).parent.parent / "kernels"
    if not folder.is_dir():
        raise FileNotFoundError(f"no kernel sources: expected {_PACKAGE} or {folder}. Reinstall jax_ssd.")
    if spec is None:
        package = ModuleType(_PACKAGE, "Device code, taken from the source checkout.")
        package.__path__ = [str(folder)]
        package.__spec__ = importlib.util.spec_from_loader(_PACKAGE, None, is_package=True)
        sys.modules[_PACKAGE] = package
    return folder


def module_name(name: str) -> str:
    """A kernel module's import name: a bare name is one of ours, a dotted one is taken as it is."""
    return name if "." in name else f"{_PACKAGE}.cutile.{name}"


def import_module(name: str) -> ModuleType:
    """The kernel module of that name, imported."""
    kernels_folder()
    return importlib.import_module(module_name(name))


def module_sources(name: str) -> dict[str, str]:
    """The text of a kernel module, first, and of every project module that it imports, by import name.

    Raises FileNotFoundError if there is no such module.
    """
    name = module_name(name)
    path = _module_path(name)
    if path is None:
        raise FileNotFoundError(f"no kernel module {name!r} (looked below {kernels_folder()} and on sys.path)")
    found: dict[str, str] = {}
    _collect_modules(name, path, found)
    return found


def cuda_sources(file: str) -> dict[str, str]:
    """The text of a CUDA C++ file, first, and of every project header that it includes, by name below kernels/cuda.

    An absolute `file` is taken as it is, its own folder standing for kernels/cuda.
    """
    folder = cuda_folder(file)
    name = Path(file).name if Path(file).is_absolute() else file
    if not (folder / name).is_file():
        raise FileNotFoundError(f"no kernel source {name!r} in {folder}")
    found: dict[str, str] = {}
    _collect_includes(folder, Path(name), found)
    return found


def cuda_folder(file: str) -> Path:
    """Where a CUDA C++ file and its headers are."""
    return Path(file).parent if Path(file).is_absolute() else kernels_folder() / "cuda"


def parameter_names(text: str, function: str) -> list[str]:
    """The parameter names of a function in Python source; empty if it is not there."""
    for node in ast.walk(_tree(text)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return []


def joined(sources: Mapping[str, str], comment: str) -> str:
    """All sources in one text to keep beside a binary; `comment` starts a line comment of the language."""
    return "\n".join(f"{comment} ==== {name}\n{text}" for name, text in sources.items())


def _tree(text: str) -> ast.Module:
    with one_tree_at_a_time:
        return ast.parse(text)


def _collect_modules(name: str, path: Path, found: dict[str, str]) -> None:
    found[name] = path.read_text(encoding="utf-8")
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for imported in _imports(found[name], package):
        imported_path = _module_path(imported)
        ours = imported.partition(".")[0] == name.partition(".")[0] or (
            imported_path is not None and imported_path.parent == path.parent
        )
        if ours and imported_path is not None and imported not in found:
            _collect_modules(imported, imported_path, found)


@cache
def _imports(text: str, package: str) -> tuple[str, ...]:
    """Every name that may be an imported module: of `from a import b`, both a and a.b."""
    found: list[str] = []
    for node in ast.walk(_tree(text)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*base, node.module] if node.module else base)
            found += [source, *(f"{source}.{alias.name}" for alias in node.names)]
    return tuple(dict.fromkeys(found))


def _module_path(name: str) -> Path | None:
    if name == _PACKAGE or name.startswith(f"{_PACKAGE}."):
        bases, rest = [kernels_folder()], name.split(".")[2:]
    else:
        top, *rest = name.split(".")
        spec = importlib.util.find_spec(top) if top else None  # a top-level name: finding it runs nothing
        if spec is None:
            return None
        if not spec.submodule_search_locations:
            return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") and not rest else None
        bases = [Path(location) for location in spec.submodule_search_locations]
    targets = [base.joinpath(*rest) for base in bases]
    for target in targets:
        for path in (target.with_name(target.name + ".py"), target / "__init__.py"):
            if path.is_file():
                return path
    return None


def _collect_includes(folder: Path, name: Path, found: dict[str, str]) -> None:
    key = name.as_posix()
    found[key] = (folder / name).read_text(encoding="utf-8")
    for included in re.findall(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^">]+)[">]', found[key], re.MULTILINE):
        for candidate in (name.parent / included, Path(included)):
            if (folder / candidate).is_file():
                if candidate.as_posix() not in found:
                    _collect_includes(folder, candidate, found)
                break
