"""The kernel cache: what is found again, what damage and unusable folders do, and several processes at once."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from jax_ssd import cache

KEY = cache.content_key({"kernel": "k"})
ENTRY = cache.Entry(b"\x7fELF binary", {"symbol": "k", "parameters": [[0, 8]]}, "compiler-1.2")


def put(folder, entry=ENTRY, key=KEY):
    cache.Cache(folder).put(key, entry, "def k(): ...\n", ".py")


def get(folder, compiler: str | None = ENTRY.compiler, key=KEY):
    return cache.Cache(folder).get(key, compiler)  # a new object: nothing in memory


def entry_file(folder, pattern) -> Path:
    (path,) = folder.glob(f"v*/*/*/{pattern}")
    return path


def test_found_again(tmp_path):
    assert get(tmp_path) is None
    put(tmp_path)
    assert get(tmp_path) == ENTRY


def test_source_lies_beside_the_binary(tmp_path):
    put(tmp_path)
    assert entry_file(tmp_path, "source.py").read_text() == "def k(): ...\n"
    assert entry_file(tmp_path, "*.cubin").read_bytes() == ENTRY.data
    assert json.loads(entry_file(tmp_path, "compiler-1.2.json").read_text())["details"] == ENTRY.details
    assert len(list(entry_file(tmp_path, "source.py").parent.iterdir())) == 3  # nothing left from writing aside


def test_memory_needs_no_folder(tmp_path):
    store = cache.Cache(None)
    store.put(KEY, ENTRY, "", ".py")
    assert store.get(KEY, ENTRY.compiler) == ENTRY
    assert store.get("0" * 64, ENTRY.compiler) is None


def test_memory_outlives_the_folder(tmp_path):
    store = cache.Cache(tmp_path)
    store.put(KEY, ENTRY, "", ".py")
    entry_file(tmp_path, "*.cubin").write_bytes(b"damaged")
    assert store.get(KEY, ENTRY.compiler) == ENTRY


def test_one_object_per_folder(tmp_path):
    assert cache.open_cache(tmp_path) is cache.open_cache(tmp_path)
    assert cache.open_cache(tmp_path) is not cache.open_cache(tmp_path / "other")


def test_compilers_do_not_share_entries(tmp_path):
    other = cache.Entry(b"other binary", {}, "compiler 2/0")
    put(tmp_path)
    put(tmp_path, other)
    assert get(tmp_path) == ENTRY
    assert get(tmp_path, other.compiler) == other
    assert get(tmp_path, "compiler-3") is None


def test_without_a_compiler_any_entry_serves(tmp_path):
    assert get(tmp_path, None) is None
    put(tmp_path)
    assert get(tmp_path, None) == ENTRY


def test_keys():
    assert cache.content_key({"a": 1, "b": [2]}) == cache.content_key({"b": [2], "a": 1})
    keys = {cache.content_key({"a": value}) for value in (1, 1.0, True, "1", [1], None)}
    assert len(keys) == 6


@pytest.mark.parametrize("pattern", ["*.cubin", "*.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "empty"])
def test_damage_is_a_miss_with_one_warning(tmp_path, pattern, damage):
    put(tmp_path)
    path = entry_file(tmp_path, pattern)
    data = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes({"truncate": data[:5], "flip": data[:3] + b"?" + data[4:], "empty": b""}[damage])
    if (pattern, damage) == ("*.json", "delete"):
        assert get(tmp_path) is None  # no record, so no entry: an ordinary miss
    else:
        with pytest.warns(RuntimeWarning, match="damaged entry") as seen:
            assert get(tmp_path) is None
        assert len(seen) == 1 and str(tmp_path) in str(seen[0].message)
        assert get(tmp_path) is None  # a second warning would be an error
    put(tmp_path)
    assert get(tmp_path) == ENTRY


def test_a_record_of_another_key_is_damage(tmp_path):
    put(tmp_path)
    path = entry_file(tmp_path, "*.json")
    other = path.parents[2] / ("0" * 2) / ("0" * 64) / path.name
    other.parent.mkdir(parents=True)
    other.write_bytes(path.read_bytes())
    (other.parent / entry_file(tmp_path, "*.cubin").name).write_bytes(ENTRY.data)
    with pytest.warns(RuntimeWarning, match="another key"):
        assert cache.Cache(tmp_path).get("0" * 64, ENTRY.compiler) is None


@pytest.mark.parametrize(
    "change",
    [
        {"details": {}},
        {"details": None},
        {"details": {"symbol": "other"}},
        {"compiler": "other"},
        {"seal": None},
        {"digest": 3},
    ],
)
def test_a_changed_record_is_damage(tmp_path, change):
    put(tmp_path)
    path = entry_file(tmp_path, "*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.warns(RuntimeWarning, match="damaged entry") as seen:
        assert get(tmp_path) is None
    assert len(seen) == 1
    put(tmp_path)
    assert get(tmp_path) == ENTRY


@pytest.mark.parametrize("text", ["null", "[]", "1", "{}", '"text"'])
def test_a_record_of_another_kind_is_damage(tmp_path, text):
    put(tmp_path)
    entry_file(tmp_path, "*.json").write_text(text)
    with pytest.warns(RuntimeWarning, match="damaged entry"):
        assert get(tmp_path) is None


def test_without_a_compiler_an_intact_entry_is_preferred_to_a_damaged_one(tmp_path):
    put(tmp_path)
    put(tmp_path, cache.Entry(b"later", {}, "compiler-9"))
    entry_file(tmp_path, "compiler-9.json").write_text("{")
    with pytest.warns(RuntimeWarning, match="damaged entry"):
        assert get(tmp_path, None) == ENTRY


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    store = cache.Cache(tmp_path / "file" / "cache")
    assert store.get(KEY, ENTRY.compiler) is None
    with pytest.warns(RuntimeWarning, match="JAX_SSD_CACHE_DIR") as seen:
        store.put(KEY, ENTRY, "", ".py")
    assert len(seen) == 1
    store.put(cache.content_key({}), ENTRY, "", ".py")
    assert store.get(KEY, ENTRY.compiler) == ENTRY


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(RuntimeWarning, match=error.strerror):
        put(tmp_path)
    monkeypatch.undo()
    assert get(tmp_path) is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_folder_that_cannot_be_read_is_no_error(tmp_path, monkeypatch):
    put(tmp_path)

    def fail(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.warns(RuntimeWarning, match="cannot read its kernel cache"):
        assert get(tmp_path) is None


_WRITER = """
import sys
from pathlib import Path
from jax_ssd import cache
for i in range(60):
    store = cache.Cache(Path(sys.argv[1]))
    entry = store.get("ab" * 32, "compiler")
    assert entry is None or len(entry.data) == 100_000, len(entry.data)
    store.put("ab" * 32, cache.Entry(bytes([int(sys.argv[2])]) * 100_000, {}, "compiler"), "source", ".py")
"""


def test_parallel_processes(tmp_path):
    """Every reader sees whole entries, though each process writes another binary under the same key."""
    arguments = [sys.executable, "-W", "error", "-c", _WRITER, str(tmp_path)]
    processes = [subprocess.Popen([*arguments, str(i)], stderr=subprocess.PIPE, text=True) for i in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry = get(tmp_path, "compiler", "ab" * 32)
    assert entry is not None and entry.data[0] < 3
    assert not list(tmp_path.rglob(".*"))
