"""The C++ handler as far as it can be tested without a GPU: its launcher on a recording driver, its plan decoder, and
its instantiate stage inside XLA."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ssd import ffi_targets, launch
from jax_ssd.compile import Cubin
from jax_ssd.launch import ArrayArg, Buffer, CudaKernel, Launch, Plan, ScalarArg, TensorMapArg

_ffi = pytest.importorskip("jax_ssd._ffi")

ROOT = Path(__file__).parents[1]
SOURCES = [
    ROOT / "tests/ffi/launcher_test.cc",
    *(ROOT / "ffi" / f"{n}.cc" for n in ("launcher", "plan", "cuda_driver")),
]


def sample(cubin_bytes: int = 64) -> tuple[Plan, list[Cubin]]:
    """A plan with two launches of one kernel, and a cubin of the given size that only looks like one."""
    kernel = CudaKernel("sample.cu", "sample<64>")
    arguments = (ArrayArg("x", offset=8), ScalarArg(3, "int32"), TensorMapArg("y", box=(8, 64), swizzle=128))
    first = Launch(kernel, (70_000, 1, 1), arguments, block=(128, 1, 1), shared_memory=100_000)
    second = Launch(kernel, (4, 2, 1), arguments, block=(64, 1, 1), cluster=(2, 1, 1), pdl=True)
    x, y, scratch = Buffer("x", (16,), "bfloat16"), Buffer("y", (32, 64), "bfloat16"), Buffer("s", (2**33,), "float32")
    plan = Plan("sample", (x,), (y,), (scratch,), (first, second))
    data = np.random.default_rng(0).bytes(cubin_bytes)
    cubin = Cubin(data, "sample_64", "d" * 64, 1024, 32, "sm_90", parameters=((0, 8), (8, 4), (64, 128)))
    return plan, [cubin, cubin]


def encoded() -> tuple[bytes, int]:
    plan, cubins = sample()
    attributes = launch.encode(plan, cubins)
    return attributes["plan"].tobytes(), attributes["cubins"].size


STRICT = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'ffi'}"]


def cxx() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "building jax_ssd takes a C++ compiler"
    return compiler


@pytest.mark.parametrize("name", ["handler", "module"])
def test_what_needs_the_headers_of_xla_compiles_without_a_warning(name):
    """The other sources are part of the program below. Here the headers are those of the jaxlib that is installed."""
    nanobind = pytest.importorskip("nanobind")
    headers = (jax.ffi.include_dir(), nanobind.include_dir(), sysconfig.get_paths()["include"])
    others = [word for folder in headers for word in ("-isystem", folder)]
    done = subprocess.run(
        [cxx(), *STRICT, *others, "-fsyntax-only", str(ROOT / "ffi" / f"{name}.cc")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_launcher_on_a_recording_driver(tmp_path):
    """Arguments, sharing and loading of cubins, checks and error texts, under the address and undefined sanitizers."""
    program = tmp_path / "launcher_test"
    flags = [*STRICT, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    build = [cxx(), *flags, *map(str, SOURCES), "-o", str(program)]
    subprocess.run([*build, "-ldl", "-lpthread"], check=True)
    # LD_PRELOAD would put another library ahead of the sanitizer's.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run([str(program)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "checks passed" in done.stdout


def test_registrations_have_every_stage():
    (stages,) = _ffi.registrations().values()
    assert list(_ffi.registrations()) == [ffi_targets.LAUNCH]
    assert set(stages) == {"instantiate", "initialize", "execute"}
    assert all(set(type_) == {"type_id", "type_info"} for type_ in _ffi.types().values())


def test_registering_twice_does_nothing(monkeypatch):
    """Twice, from several threads, is once: a second registration could differ and break every program."""
    from concurrent.futures import ThreadPoolExecutor

    calls = []
    monkeypatch.setattr(ffi_targets, "_registered", False)
    monkeypatch.setattr(jax.ffi, "register_ffi_type", lambda name, *_, **kwargs: calls.append((name, kwargs)))
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *_, **kwargs: calls.append((name, kwargs)))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: ffi_targets.register(), range(16)))
    assert calls == [
        ("jax_ssd.launch_state", {"platform": "CUDA"}),
        ("jax_ssd.launch", {"platform": "CUDA", "api_version": 1}),
    ]


def test_a_missing_extension_is_named_when_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_ssd._ffi", None)
    monkeypatch.delattr("jax_ssd._ffi")
    monkeypatch.setattr(ffi_targets, "_registered", False)
    with pytest.raises(NotImplementedError, match=r"jax_ssd\._ffi cannot be imported .* `pip install -e \.` builds it"):
        ffi_targets.register()
    assert "cannot be imported" in str(ffi_targets.missing())


def test_the_handler_reads_what_python_writes():
    text = _ffi.describe_plan(*encoded())
    assert text.splitlines() == [
        "plan sample",
        "operand x bf16[16]",
        "result y bf16[32,64]",
        f"result s f32[{2**33}]",
        f"cubin {'d' * 64} 64 bytes",
        "launch sample_64 grid (70000, 1, 1) block (128, 1, 1) shared memory 100000 "
        "arguments (x+16, 0x00000003, tensor map of y)",
        "launch sample_64 grid (4, 2, 1) block (64, 1, 1) cluster (2, 1, 1) programmatic "
        "arguments (x+16, 0x00000003, tensor map of y)",
    ]
    assert _ffi.PLAN_VERSION == 1


def test_the_extension_is_built_against_old_headers():
    """XLA refuses handlers that are newer than itself; 0.3 is JAX 0.10's. A local build may be as new as its jaxlib."""
    major, minor = _ffi.XLA_FFI_VERSION
    assert (major, minor) >= (0, 3)


@given(st.data())
def test_damaged_plans_are_refused_or_harmless(data):
    plan, cubin_bytes = encoded()
    damaged = bytearray(plan[: data.draw(st.integers(0, len(plan)))])
    for _ in range(data.draw(st.integers(0, 4)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert _ffi.describe_plan(bytes(damaged), cubin_bytes)
    except (ValueError, UnicodeDecodeError) as error:
        assert isinstance(error, UnicodeDecodeError) or str(error).startswith("malformed launch plan: ")


# Registered for the CPU in a process of its own, XLA instantiates the handler from the attributes of a real program.
INSTANTIATE = """
import gc, sys
import jax, jax.numpy as jnp, numpy as np
from jax_ssd import _ffi, launch
sys.path.insert(0, "tests")
from test_ffi import sample

jax.devices()  # the CPU client, when it starts, takes waiting targets before waiting types
for name, capsules in _ffi.types().items():
    jax.ffi.register_ffi_type(name, capsules, platform="cpu")
for name, stages in _ffi.registrations().items():
    jax.ffi.register_ffi_target(name, stages, platform="cpu", api_version=1)

plan, cubins = sample(cubin_bytes=200_000)
attributes = launch.encode(plan, cubins)

def compiled(**changes):
    call = jax.ffi.ffi_call("jax_ssd.launch", [jax.ShapeDtypeStruct((2,), np.float32)])
    return jax.jit(lambda x: call(x, **(attributes | changes))).lower(jnp.zeros(2)).compile()

one, two = compiled(), compiled()
assert _ffi.live_cubins() == 1, _ffi.live_cubins()
broken = attributes["cubins"].copy()
broken[100_000] ^= 1
for changes, words in [
    ({"plan": attributes["plan"][:-1]}, "malformed launch plan"),
    ({"cubins": attributes["cubins"][:-1]}, "lies at [0, +200000) of 199999 bytes"),
    ({"cubins": broken}, "two different cubins carry the digest"),
]:
    try:
        compiled(**changes)
    except Exception as error:
        assert words in str(error) and "INVALID_ARGUMENT" in str(error), error
    else:
        raise AssertionError(words)
del one, two
jax.clear_caches()
gc.collect()
assert _ffi.live_cubins() == 0, _ffi.live_cubins()
print("instantiated")
"""


def test_xla_instantiates_the_handler_from_the_attributes():
    """200 KB of cubins arrive byte for byte, are held once, and are dropped with their executables."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(INSTANTIATE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "instantiated", done.stderr
