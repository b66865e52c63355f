"""Kernel compilers and their cache: small kernels for every architecture, keys, errors, and life without a compiler."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jax_ssd import cache, config, cutile, elf, nvrtc, sources
from jax_ssd import compile as kernels
from jax_ssd.compile import ArraySpec, CompileError, ConstantSpec, CudaKernel, CuTileKernel, ScalarSpec
from jax_ssd.specs import row_major

KERNELS = """
import cuda.tile as ct
from dummy_helpers import scaled

@ct.kernel
def scale(x, out, T: ct.Constant[int], factor):
    tile = ct.load(x, index=(ct.bid(0), 0), shape=(1, T))
    ct.store(out, index=(ct.bid(0), 0), tile=scaled(tile, factor))

@ct.kernel(occupancy=2)
def whole_row(x, out):
    row = ct.load(x, index=(ct.bid(0), 0), shape=(1, x.shape[1]))
    ct.store(out, index=(ct.bid(0), 0), tile=row)

@ct.kernel
def too_large(x, out, T: ct.Constant[int]):
    ct.store(out, index=(0, 0), tile=ct.load(x, index=(0, 0), shape=(T, T)))

@ct.kernel
def in_place(state, out):
    ct.store(out, index=(0, 0), tile=ct.load(state, index=(0, 0), shape=(64, 128)) + 1.0)
"""
HELPERS = """
def scaled(tile, factor):
    return tile * factor
"""
CUDA = r"""
#include "dummy.cuh"
#include <cuda_bf16.h>
namespace dummy {
template <typename T, int N>
__global__ void add(const T* x, T* y, long long n) {
  __shared__ float tile[N];
  tile[threadIdx.x % N] = twice(static_cast<float>(x[threadIdx.x]));
  __syncthreads();
  if (threadIdx.x < n) y[threadIdx.x] = static_cast<T>(tile[0]);
}
}  // namespace dummy
#ifdef HOPPER
extern "C" __global__ void hopper() { asm volatile("setmaxnreg.inc.sync.aligned.u32 128;"); }
#endif
"""
HEADER = "__device__ inline float twice(float x) { return 2 * x; }\n"

needs_cutile = pytest.mark.skipif(cutile.missing() is not None, reason=str(cutile.missing()))
needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder of kernels, importable as dummy_kernels.* would be, with a kernel cache of its own."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name, text in {
        "dummy_kernels/__init__.py": "",
        "dummy_kernels/scale.py": KERNELS.replace("from dummy_helpers", "from .helpers"),
        "dummy_kernels/helpers.py": HELPERS,
        "dummy.cu": CUDA,
        "dummy.cuh": HEADER,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    with config.override(cache_dir=tmp_path / "cache"):
        yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "dummy_kernels"]:
        del sys.modules[name]


def array(dtype: str, *shape: int) -> ArraySpec:
    return ArraySpec(dtype, shape, row_major(shape))


X = array("float32", 64, 128)
SCALE = CuTileKernel("dummy_kernels.scale", "scale")
SCALE_ARGUMENTS = (X, X, ConstantSpec(128), ScalarSpec("float32"))
WHOLE_ROW = CuTileKernel("dummy_kernels.scale", "whole_row")


def cutile_request(**changes):
    return replace(SCALE, **changes), SCALE_ARGUMENTS


def cuda_request(project, name="dummy::add<__nv_bfloat16, 64>", **changes: Any):
    return CudaKernel(str(project / "dummy.cu"), name, **changes), ()


def compiled_without_cache(requests, arch="sm_90"):
    """The cubins as another process on the same cache folder would get them."""
    cache.open_cache(config.settings().cache_dir)._memory.clear()
    return kernels.compile_launches(requests, arch)


def key(request: kernels.Request, arch="sm_90") -> str:
    source, arguments = request
    return kernels._Job.of(source, arguments, arch).key


@needs_cutile
@pytest.mark.parametrize("arch", config.SUPPORTED_ARCHS)
def test_cutile_compiles_for_every_architecture(project, arch):
    (cubin,) = kernels.compile_launches([cutile_request()], arch)
    assert cubin.arch == arch and cubin.data[:4] == b"\x7fELF"
    assert cubin.symbol.startswith("scale_") and cubin.symbol.encode() in cubin.data
    assert 0 < cubin.registers <= 255


@needs_cutile
def test_cutile_parameters(project):
    """Per array the pointer, shape words and stride words; the scalar in place; constants left out."""
    (cubin,) = kernels.compile_launches([cutile_request()], "sm_90")
    assert [size for _, size in cubin.parameters] == [8, 4, 4, 4, 4] * 2 + [4]
    wide = replace(X, index64=True)
    (cubin,) = kernels.compile_launches([(SCALE, (wide, X, *SCALE_ARGUMENTS[2:]))], "sm_90")
    assert [size for _, size in cubin.parameters] == [8, 8, 8, 8, 8] + [8, 4, 4, 4, 4] + [4]


@needs_cutile
def test_sizes_are_constants_in_kernels(project):
    kernels.compile_launches([(WHOLE_ROW, (X, X))], "sm_90")


@needs_cutile
@pytest.mark.parametrize(
    "view",
    [
        ArraySpec("bfloat16", (64, 128), (512, 1)),
        ArraySpec("bfloat16", (64, 128), (0, 1)),
        ArraySpec("bfloat16", (64, 128), (1, 64), alignment=2),
        ArraySpec("float16", (1, 128), (2**33, 1), index64=True),
        ArraySpec("int32", (2**31, 128), (128, 1), index64=True),
    ],
)
def test_views_and_dtypes(project, view):
    kernels.compile_launches([(WHOLE_ROW, (view, array(view.dtype, *view.shape[:1], 128)))], "sm_90")


@needs_cutile
def test_options_override_the_decorator(project):
    plain, same, other = (
        kernels.compile_launches([(replace(WHOLE_ROW, occupancy=n), (X, X))], "sm_90")[0] for n in (None, 2, 1)
    )
    occupancies = [
        cutile._specialized(
            sources.import_module("dummy_kernels.scale").whole_row, replace(WHOLE_ROW, occupancy=n), (X, X)
        )._compiler_options.occupancy
        for n in (None, 2, 1)
    ]
    assert occupancies == [2, 2, 1]
    assert len({plain.key, same.key, other.key}) == 3


@needs_cutile
def test_arrays_that_share_memory(project):
    shared = replace(X, alias="state")
    kernel = CuTileKernel("dummy_kernels.scale", "in_place")
    cubins = [kernels.compile_launches([(kernel, pair)], "sm_90")[0] for pair in [(shared, shared), (X, X)]]
    assert cubins[0].key != cubins[1].key
    # Sharing with nobody is no sharing.
    assert key((kernel, (shared, X))) == key((kernel, (X, X)))


@needs_cutile
def test_from_the_cache_without_compiling(project, monkeypatch):
    requests = [cutile_request(), (WHOLE_ROW, (X, X)), cutile_request()]
    first = kernels.compile_launches(requests, "sm_90")
    assert first[0] is first[2] and first[0] != first[1]

    def fail(*_):
        raise AssertionError("it should have been in the cache")

    monkeypatch.setattr(cutile, "compile_kernel", fail)
    start = time.perf_counter()
    assert compiled_without_cache(requests) == first
    assert time.perf_counter() - start < 0.5


@needs_cutile
def test_a_damaged_entry_is_compiled_again(project):
    (first,) = kernels.compile_launches([cutile_request()], "sm_90")
    folder = cache.open_cache(config.settings().cache_dir).entry_folder(first.key)
    assert folder is not None
    path = folder / f"{first.digest}.cubin"
    path.write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="damaged entry"):
        assert compiled_without_cache([cutile_request()])[0].symbol == first.symbol
    (record,) = folder.glob("*.json")
    assert compiled_without_cache([cutile_request()])[0].digest in record.read_text()


@needs_cutile
def test_the_source_is_kept(project):
    (cubin,) = kernels.compile_launches([cutile_request()], "sm_90")
    folder = cache.open_cache(config.settings().cache_dir).entry_folder(cubin.key)
    assert folder is not None
    text = (folder / "source.py").read_text()
    assert "def scale(x, out" in text and "def scaled(tile" in text
    assert "x: float32[64,128]" in text and "sm_90" in text


@needs_cutile
def test_threads_compile_one_kernel_once(project, monkeypatch):
    calls = []
    compile_kernel = cutile.compile_kernel
    monkeypatch.setattr(cutile, "compile_kernel", lambda *a: calls.append(a) or compile_kernel(*a))
    folder = config.settings().cache_dir

    def work():
        with config.override(cache_dir=folder):  # overrides belong to a thread
            kernels.compile_launches([cutile_request()], "sm_90")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


@needs_cutile
def test_a_foreign_toolkit_in_the_environment_does_no_harm(project, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "older"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "older"))
    kernels.compile_launches([cutile_request()], "sm_90")
    assert os.environ["CUDA_HOME"] == str(tmp_path / "older")


@needs_cutile
def test_refusal_of_the_python_side(project):
    request = (WHOLE_ROW, (array("float32", 64, 100), X))  # a tile side that is no power of two
    with pytest.raises(CompileError) as error:
        kernels.compile_launches([request], "sm_90")
    for words in ("cuda.tile refused", "power of two", "dummy_kernels.scale.whole_row", "sm_90", "float32[64,100]"):
        assert words in str(error.value), str(error.value)


@needs_cutile
@pytest.mark.parametrize(
    "said, cure",
    [("", "doctor"), ("error: Invalid use-def chain in LoopSchedule\n", "could not compile this kernel")],
)
def test_failure_of_tileiras(project, monkeypatch, said, cure):
    def fail(arguments):
        return subprocess.CompletedProcess(arguments, 5, "", f"{said}error: failed to compile Tile IR program")

    cutile._bytecode_version()
    monkeypatch.setattr(cutile, "run_tileiras", fail)
    with pytest.raises(CompileError) as error:
        kernels.compile_launches([cutile_request()], "sm_90")
    for words in ("return code 5", "failed to compile Tile IR", "scale.scale", "sm_90", "x: float32[64,128]", cure):
        assert words in str(error.value), str(error.value)


@needs_cutile
def test_a_compiler_that_does_not_end(project, monkeypatch, tmp_path):
    cutile._bytecode_version()
    slow = tmp_path / "tileiras"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setattr(cutile, "find_tileiras", lambda: slow)
    monkeypatch.setattr(cutile, "_PATIENCE", 0.2)
    monkeypatch.setattr(cutile, "version", lambda: "slow")
    with pytest.raises(CompileError, match="tileiras had not ended after 0 s and was stopped. Smaller tiles"):
        kernels.compile_launches([cutile_request()], "sm_90")


@needs_cutile
def test_wrong_requests(project):
    with pytest.raises(CompileError, match=r"takes 2 arguments \(x, out\), got 1"):
        kernels.compile_launches([(WHOLE_ROW, (X,))], "sm_90")
    with pytest.raises(CompileError, match="has no kernel 'missing'"):
        kernels.compile_launches([(replace(SCALE, function="missing"), SCALE_ARGUMENTS)], "sm_90")
    with pytest.raises(FileNotFoundError, match=r"dummy_kernels\.missing"):
        kernels.compile_launches([(replace(SCALE, module="dummy_kernels.missing"), ())], "sm_90")
    with pytest.raises(ValueError, match="sm_90"):
        kernels.compile_launches([cutile_request()], "sm_75")
    with pytest.raises(ValueError, match=r"ConstantSpec: .* got list"):
        kernels.compile_launches([(SCALE, (X, X, ConstantSpec([1]), ScalarSpec("float32")))], "sm_90")


def test_keys_hold_everything_that_matters(project):
    (kernel, arguments) = base = cutile_request()
    x, out, constant, scalar = arguments
    keys = {
        key(base),
        key(base, "sm_100"),
        *(key((replace(kernel, **{name: 1}), arguments)) for name in ("occupancy", "num_ctas", "opt_level")),
        key((replace(kernel, function="whole_row"), arguments)),
        key((kernel, (x, out, ConstantSpec(64), scalar))),
        key((kernel, (x, out, ConstantSpec(128.0), scalar))),
        key((kernel, (x, out, constant, ScalarSpec("int32")))),
        key((kernel, (array("bfloat16", 64, 128), out, constant, scalar))),
        key((kernel, (array("float32", 128, 64), out, constant, scalar))),
        key((kernel, (replace(x, strides=(256, 1)), out, constant, scalar))),
        key((kernel, (replace(x, index64=True), out, constant, scalar))),
        key((kernel, (replace(x, alignment=4), out, constant, scalar))),
    }
    assert len(keys) == 14
    assert key(base) in keys
    assert key((kernel, (x, out, ConstantSpec(True), scalar))) != key((kernel, (x, out, ConstantSpec(1), scalar)))


@pytest.mark.parametrize("file", ["dummy_kernels/scale.py", "dummy_kernels/helpers.py"])
def test_keys_follow_imported_modules(project, file):
    before = key(cutile_request())
    (project / file).write_text((project / file).read_text() + "# changed\n")
    assert key(cutile_request()) != before


@pytest.mark.parametrize("file", ["dummy.cu", "dummy.cuh"])
def test_keys_follow_included_headers(project, file):
    before = key(cuda_request(project))
    (project / file).write_text((project / file).read_text() + "// changed\n")
    assert key(cuda_request(project)) != before


def test_keys_do_not_follow_the_machine(project, tmp_path, monkeypatch):
    before = key(cutile_request()), key(cuda_request(project))
    moved = project.rename(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(moved)
    assert (key(cutile_request()), key(cuda_request(moved))) == before


@needs_cutile
@needs_nvrtc
def test_cached_kernels_need_no_compiler(project, monkeypatch):
    requests = [cutile_request(), cuda_request(project)]
    cubins = kernels.compile_launches(requests, "sm_90")
    for module in (cutile, nvrtc):
        monkeypatch.setattr(module, "missing", lambda: "it is not installed")
    for name in [name for name in sys.modules if name.startswith("dummy_kernels")]:
        del sys.modules[name]
    assert compiled_without_cache(requests) == cubins
    assert "dummy_kernels.scale" not in sys.modules
    for request in (cutile_request(occupancy=1), cuda_request(project, options=("-DOTHER",))):
        with pytest.raises(NotImplementedError, match=r"pip install '\.\[cuda13\]'"):
            kernels.compile_launches([request], "sm_90")


def test_a_carried_cache_in_another_process(project, tmp_path):
    """What was put in under any compiler is found by a process that has none, and imports nothing to find it."""
    request = cutile_request()
    details = {"symbol": "scale_x", "shared_memory": 0, "registers": 8, "parameters": [[0, 8]]}
    entry = cache.Entry(b"the binary", details, "compiler-of-another-machine")
    cache.Cache(tmp_path / "carried").put(key(request), entry, "", ".py")
    script = """
        import sys
        from jax_ssd import compile as kernels, config, cutile
        from jax_ssd.compile import *
        cutile.missing = lambda: "not installed"
        array = ArraySpec("float32", (64, 128), (128, 1))
        request = CuTileKernel("dummy_kernels.scale", "scale"), (array, array, ConstantSpec(128), ScalarSpec("float32"))
        (cubin,) = kernels.compile_launches([request], "sm_90")
        assert cubin.data == b"the binary" and cubin.symbol == "scale_x" and cubin.parameters == ((0, 8),)
        assert "cuda.tile" not in sys.modules and "dummy_kernels.scale" not in sys.modules
    """
    paths = os.pathsep.join([str(project), *filter(None, sys.path)])
    environment = {**os.environ, "JAX_SSD_CACHE_DIR": str(tmp_path / "carried"), "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment)


@needs_nvrtc
@pytest.mark.parametrize("arch", config.SUPPORTED_ARCHS)
def test_cuda_compiles_for_every_architecture(project, arch):
    (cubin,) = kernels.compile_launches([cuda_request(project)], arch)
    assert cubin.arch == arch and cubin.symbol.startswith("_ZN5dummy3add")
    assert cubin.shared_memory % 1024 == 256  # 64 floats; from sm_90 on, CUDA reserves 1024 bytes more
    assert [size for _, size in cubin.parameters] == [8, 8, 8]


@needs_nvrtc
def test_architecture_specific_features(project):
    request = cuda_request(project, "hopper", options=("-DHOPPER",), arch_specific=True)
    (cubin,) = kernels.compile_launches([request], "sm_90")
    assert (cubin.symbol, cubin.arch) == ("hopper", "sm_90")
    with pytest.raises(CompileError, match="setmaxnreg"):
        kernels.compile_launches([cuda_request(project, "hopper", options=("-DHOPPER",))], "sm_90")


@needs_nvrtc
def test_refusal_of_nvrtc(project):
    (project / "dummy.cuh").write_text("this is no header\n")
    with pytest.raises(CompileError) as error:
        kernels.compile_launches([cuda_request(project)], "sm_90")
    for words in ("dummy.cuh", "error", "dummy::add<__nv_bfloat16, 64>", "sm_90", "nvrtc-"):
        assert words in str(error.value), str(error.value)


def device(capability):
    return SimpleNamespace(compute_capability=capability)


def test_target_arch_of_devices():
    assert kernels.target_arch(device("9.0")) == "sm_90"
    assert kernels.target_arch(device("12.1")) == "sm_120"
    assert kernels.target_arch(device("8.7")) == "sm_86"
    assert kernels.target_archs([device("10.0"), device("8.9"), device("10.0")]) == ("sm_89", "sm_100")


@pytest.mark.parametrize("capability", ["7.5", "11.0", "13.0", ""])
def test_unsupported_devices(capability):
    with pytest.raises(NotImplementedError, match="there are kernels for sm_80"):
        kernels.target_arch(device(capability))


def test_the_setting_wins_over_the_devices():
    with config.override(target_arch="sm_100,sm_90"):
        assert kernels.target_archs([device("8.0")]) == ("sm_90", "sm_100")
        assert kernels.target_arch() == "sm_90"


def test_no_device_to_compile_for(monkeypatch):
    monkeypatch.delenv("JAX_SSD_TARGET_ARCH", raising=False)
    with pytest.raises(NotImplementedError, match=r"JAX_SSD_TARGET_ARCH .* sm_90"):
        kernels.target_archs([])


def test_elf_errors():
    with pytest.raises(ValueError, match="not a cubin"):
        elf.kernel_info(b"nothing of the kind", "k")
    with pytest.raises(ValueError, match="not a cubin"):
        elf.kernel_info(b"\x7fELF\x02\x01" + b"\xff" * 100, "k")


@needs_nvrtc
def test_elf_unknown_symbol(project):
    (cubin,) = kernels.compile_launches([cuda_request(project)], "sm_90")
    with pytest.raises(ValueError, match=f"no kernel 'other' in the cubin; it has {cubin.symbol}"):
        elf.kernel_info(cubin.data, "other")


def test_our_kernels_are_found_by_name():
    folder = sources.kernels_folder()
    assert (folder / "cutile").is_dir()
    for path in (folder / "cutile").glob("[!_]*.py"):
        assert next(iter(sources.module_sources(path.stem))) == f"jax_ssd.kernels.cutile.{path.stem}"
