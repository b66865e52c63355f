"""Compiled kernels on disk and in memory.

One folder per kernel, named by the SHA-256 of everything that the kernel is made of except the compiler:

    <cache folder>/v2/3f/3f9a…/source.py           what was compiled, to explain the binary
                              /<compiler>.json      one per compiler and version: names the binary; digests of both
                              /<digest>.cubin       the binary

With a compiler at hand only that compiler's entry counts. Without one (a GPU machine to which the folder was carried)
any entry for the same key does: the key holds no path, no Python version and no JAX version.

A damaged entry is a miss with one warning and is written anew. A folder that cannot be read or written is no error:
one warning, and the kernels stay in memory. Files are written aside and renamed, so that parallel processes never see
half a file; whoever renames last wins, with equal content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 2


@dataclass(frozen=True)
class Entry:
    """data: the binary. details: what was written with it (JSON types only). compiler: who made it."""

    data: bytes
    details: Mapping[str, Any]
    compiler: str


def content_key(parts: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of `parts` (JSON types only) and the cache format. Equal parts in any order give equal keys."""
    text = json.dumps({"format": FORMAT, **parts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Cache:
    """The kernels of one folder (None: in memory only). Safe to use from several threads and processes.

    No method raises for the state of the folder.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder
        self._memory: dict[tuple[str, str | None], Entry] = {}

    def get(self, key: str, compiler: str | None) -> Entry | None:
        """The entry for `key` made by `compiler`, or by any compiler if that is None; None if there is none."""
        entry = self._memory.get((key, compiler)) or self._read(key, compiler)
        if entry is not None:
            self._memory[key, compiler] = entry
        return entry

    def put(self, key: str, entry: Entry, source: str, suffix: str) -> None:
        """Keeps an entry, with its source text in a file of that suffix (such as ".py")."""
        self._memory[key, entry.compiler] = entry
        folder = self.entry_folder(key)
        if folder is None:
            return
        digest = hashlib.sha256(entry.data).hexdigest()
        record = {"key": key, "compiler": entry.compiler, "digest": digest, "details": dict(entry.details)}
        record["seal"] = _seal(record)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The record comes last: it is what makes the other two an entry.
            write_aside(folder / f"source{suffix}", source.encode())
            write_aside(folder / f"{digest}.cubin", entry.data)
            write_aside(folder / f"{_file_name(entry.compiler)}.json", json.dumps(record, indent=1).encode())
        except OSError as error:
            _warn_once(
                ("write", str(self.folder)),
                f"jax_ssd cannot write its kernel cache {self.folder}: {error}. Kernels are compiled again in each "
                f"process. Make the folder writable or set JAX_SSD_CACHE_DIR to another one.",
            )

    def entry_folder(self, key: str) -> Path | None:
        """Where the files for `key` are."""
        return self.folder and self.folder / f"v{FORMAT}" / key[:2] / key

    def _read(self, key: str, compiler: str | None) -> Entry | None:
        folder = self.entry_folder(key)
        if folder is None:
            return None
        try:
            if compiler is None:
                records = sorted(folder.glob("*.json"), reverse=True)
            else:
                records = [folder / f"{_file_name(compiler)}.json"]
            for record in records:
                entry = self._read_record(record, key)
                if entry is not None:
                    return entry
        except OSError as error:
            _warn_once(
                ("read", str(self.folder)),
                f"jax_ssd cannot read its kernel cache {self.folder}: {error}. Kernels are compiled again. Make the "
                f"folder readable or set JAX_SSD_CACHE_DIR to another one.",
            )
        return None

    def _read_record(self, path: Path, key: str) -> Entry | None:
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            record = json.loads(text)
            if record.pop("seal") != _seal(record):
                raise ValueError("the record is not what was written")
            data = (path.parent / f"{record['digest']}.cubin").read_bytes()
            if record["key"] != key:
                raise ValueError("it is the record of another key")
            if hashlib.sha256(data).hexdigest() != record["digest"]:
                raise ValueError("the binary does not have the recorded digest")
            return Entry(data, record["details"], record["compiler"])
        except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError) as error:
            _warn_once(
                ("damaged", str(path)),
                f"jax_ssd ignores a damaged entry of its kernel cache, {path}: {type(error).__name__}: {error}. "
                f"It is compiled again and rewritten.",
            )
            return None


def open_cache(folder: Path | None) -> Cache:
    """The cache of a folder; one object per folder and process, so that what is in memory is shared."""
    with _lock:
        return _caches.setdefault(folder, Cache(folder))


_caches: dict[Path | None, Cache] = {}
_warned: set[tuple[str, str]] = set()
_lock = threading.Lock()


def _seal(record: Mapping[str, Any]) -> str:
    """The digest of a record, of which everything is used: a kernel's symbol as much as its binary."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _file_name(compiler: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", compiler)


def write_aside(path: Path, data: bytes) -> None:
    """Writes a file that readers see whole or not at all."""
    # Not tempfile: its files are for one user only, and a cache folder may be shared.
    aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.{secrets.token_hex(4)}")
    try:
        with open(aside, "xb") as file:
            file.write(data)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def _warn_once(what: tuple[str, str], message: str) -> None:
    with _lock:
        if what in _warned:
            return
        _warned.add(what)
    warnings.warn(message, RuntimeWarning, stacklevel=4)
