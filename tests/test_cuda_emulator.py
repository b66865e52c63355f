"""The emulator of CUDA C++ kernels: every instruction against numpy, and mistakes that it must find."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jax_ssd import sources
from jax_ssd.plans import ArrayArg, Buffer, Launch, Plan, ScalarArg, TensorMapArg
from jax_ssd.specs import CudaKernel
from tests import cuda_emulator
from tests.cuda_emulator import EmulatorError
from tests.cuda_emulator.build import compiled
from tests.cuda_emulator.source import translated

pytestmark = pytest.mark.skipif(cuda_emulator.missing() is not None, reason=str(cuda_emulator.missing()))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PRODUCTS = {("__nv_bfloat16", 64): BFLOAT16, ("__half", 128): np.dtype(np.float16)}
FORMS = [
    ("rows", False),
    ("rows", True),
    ("columns", False),
    ("columns", True),
    ("registers", False),
    ("registers", True),
]
MISTAKES = ("NONE", "FULL_NOT_AWAITED", "EMPTY_NOT_AWAITED", "TOO_MANY_BYTES", "ARRIVES_TWICE", "NEVER_AWAITED")


def warpgroup_product(kind: str, size: int, a_form: str, columns_b: bool, wait: bool = True) -> str:
    flags = ", ".join(str(f).lower() for f in (a_form == "registers", a_form == "columns", columns_b, wait))
    return f"warpgroup_product<{kind}, {size}, {flags}>"


EXPRESSIONS = (
    *("collectives", "tiles", "warp_product<__nv_bfloat16>", "warp_product<__half>", "warp_product_tf32"),
    *(warpgroup_product(*product, *form) for product in PRODUCTS for form in FORMS),
    warpgroup_product("__nv_bfloat16", 64, "rows", False, wait=False),
    *(f"warpgroup_product_tf32<{size}, {form}>" for size in (64, 128) for form in ("true", "false")),
    *(
        "through_shared_memory<true>",
        "through_shared_memory<false>",
        "async_copies<true>",
        "async_copies<false>",
        "chain",
        "clear",
        "writes_its_operand",
    ),
    *(f"pipeline<{mistake}>" for mistake in MISTAKES),
    *(f"mistakes<{number}>" for number in range(13)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels beside the library's headers, as kernels include only what is beside them."""
    folder = tmp_path_factory.mktemp("kernels")
    for path in (
        *(sources.kernels_folder() / "cuda").glob("*.cuh"),
        Path(__file__).with_name("cuda_emulator_kernels.cu"),
    ):
        shutil.copy(path, folder)
    compiled([_kernel(folder, expression) for expression in EXPRESSIONS])  # at once: one by one takes minutes
    return folder


@pytest.fixture
def run(folder: Path):
    """Runs one kernel on operands, results and scalars in the order of its parameters.

    An array is an operand, (shape, dtype) a result; of both in maps (box by buffer) a tensor map is passed.
    """

    def run(
        expression: str,
        threads: int = 32,
        blocks: int = 1,
        cluster: int = 1,
        shared: int = 0,
        seed: int = 0,
        maps: Any = None,
        **given,
    ):
        operands = {n: v for n, v in given.items() if isinstance(v, np.ndarray)}
        arguments = []
        for name, value in given.items():
            if isinstance(value, int):
                arguments.append(ScalarArg(value, "int32"))
            elif maps and name in maps:
                arguments.append(TensorMapArg(name, maps[name], swizzle=128))
            else:
                arguments.append(ArrayArg(name))
        plan = Plan(
            "test",
            tuple(Buffer(n, v.shape, v.dtype.name) for n, v in operands.items()),
            tuple(Buffer(n, *v) for n, v in given.items() if isinstance(v, tuple)),
            (),
            (
                Launch(
                    _kernel(folder, expression),
                    (blocks, 1, 1),
                    tuple(arguments),
                    (threads, 1, 1),
                    shared,
                    (cluster, 1, 1) if cluster > 1 else None,
                ),
            ),
        )
        plan.check("sm_90")
        return cuda_emulator.run(plan, operands, seed)

    return run


def _kernel(folder: Path, expression: str) -> CudaKernel:
    return CudaKernel(str(folder / "cuda_emulator_kernels.cu"), expression)


def _normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_shuffles_votes_and_barriers(run):
    out = run("collectives", threads=64, out=((7, 64), "int32"))["out"]
    thread = np.arange(64)
    lane, warp = thread % 32, thread // 32 * 32
    np.testing.assert_array_equal(out[0], np.where(lane >= 3, thread - 3, thread))
    np.testing.assert_array_equal(out[1], np.where(lane < 29, thread + 3, thread))
    np.testing.assert_array_equal(out[2], thread ^ 5)
    np.testing.assert_array_equal(out[3], thread // 8 * 8 + lane // 8)
    np.testing.assert_array_equal(out[4], warp + np.where(lane < 16, 7, 20))
    np.testing.assert_array_equal(out[5], np.where(thread < 32, 2, 3))
    np.testing.assert_array_equal(out[6], 1000 + 63 - thread)


def test_tiles(run):
    matrix = np.arange(256, dtype=np.uint16).reshape(16, 16)
    got = run("tiles", matrix=matrix, registers=((3, 32, 4), "uint32"), stored=((2, 16, 16), "uint16"))
    # Of tile i, rows 0-7 or 8-15 and columns 0-7 or 8-15 in turn.
    parts = [matrix[i % 2 * 8 :, i // 2 * 8 :][:8, :8] for i in range(4)]
    for kind, tiles in enumerate((parts, [p.T for p in parts], [p.T for p in parts])):
        pairs = np.stack([np.ascontiguousarray(tile).reshape(32, 2) for tile in tiles], 1).astype(np.uint32)
        np.testing.assert_array_equal(got["registers"][kind], pairs[..., 0] | pairs[..., 1] << 16)
    np.testing.assert_array_equal(got["stored"][0], matrix)
    across = np.block([[parts[0].T, parts[2].T], [parts[1].T, parts[3].T]])
    np.testing.assert_array_equal(got["stored"][1], across)


@pytest.mark.parametrize(("kind", "dtype"), [("__nv_bfloat16", BFLOAT16), ("__half", np.float16)])
def test_products_of_a_warp(run, kind, dtype):
    a, b = _normal(16, 16, dtype=dtype), _normal(8, 16, dtype=dtype, seed=1)
    d = run(f"warp_product<{kind}>", a=a, b=b, d=((16, 8), "float32"))["d"]
    np.testing.assert_allclose(d, a.astype(np.float64) @ b.T.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_products_in_tf32_drop_13_bits(run):
    a, b = _normal(16, 8), _normal(8, 8, seed=1)
    d = run("warp_product_tf32", a=a.view(np.uint32), b=b.view(np.uint32), d=((16, 8), "float32"))["d"]
    a, b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) for x in (a, b))
    np.testing.assert_allclose(d, a @ b.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("a_form", "columns_b"), FORMS)
@pytest.mark.parametrize(("kind", "size"), PRODUCTS)
def test_products_of_a_warpgroup(run, kind, size, a_form, columns_b):
    dtype = PRODUCTS[kind, size]
    a, b = _normal(64, 64, dtype=dtype), _normal(64, size, dtype=dtype, seed=1)
    given_a = np.ascontiguousarray(a.T) if a_form == "columns" else a
    given_b = b if columns_b else np.ascontiguousarray(b.T)
    d = run(
        warpgroup_product(kind, size, a_form, columns_b),
        threads=128,
        shared=64 * 128 * 3,
        maps={"a": (1, 1, 64, 64), "b": (1, 1, 64, 64)},
        a=given_a[None, None],
        b=given_b[None, None],
        a_memory=given_a,
        d=((64, size), "float32"),
    )["d"]
    a, b = a.astype(np.float64), b.astype(np.float64)
    np.testing.assert_allclose(d, a @ b + a[:, :16] @ b[:16], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_registers", ["true", "false"])
@pytest.mark.parametrize("size", [64, 128])
def test_products_of_a_warpgroup_in_tf32(run, size, in_registers):
    a, b = _normal(64, 32), _normal(size, 32, seed=1)
    expression = f"warpgroup_product_tf32<{size}, {in_registers}>"
    d = run(expression, threads=128, a=a, b=b, d=((64, size), "float32"))["d"]
    a, b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) for x in (a, b))
    np.testing.assert_allclose(d, a @ b.T, rtol=1e-5, atol=1e-5)


def test_a_product_that_is_not_awaited_is_nan(run):
    a = _normal(64, 64, dtype=BFLOAT16)
    with pytest.raises(EmulatorError, match="accumulator|NaN"):
        d = run(
            warpgroup_product("__nv_bfloat16", 64, "rows", False, wait=False),
            threads=128,
            shared=64 * 128 * 2,
            maps={"a": (1, 1, 64, 64), "b": (1, 1, 64, 64)},
            a=a[None, None],
            b=a[None, None],
            a_memory=a,
            d=((64, 64), "float32"),
        )["d"]
        if np.isnan(d).all():
            raise EmulatorError("NaN")


@pytest.mark.parametrize("fence", [True, False])
@pytest.mark.parametrize("token", [0, 4, -2])
def test_copies_by_tensor_maps_stop_at_the_edge(run, token, fence):
    x = _normal(2, 6, 2, 64, dtype=BFLOAT16)
    got = run(
        f"through_shared_memory<{str(fence).lower()}>",
        shared=1024,
        maps={"x": (1, 4, 1, 64), "y": (1, 4, 1, 64)},
        x=x,
        y=(x.shape, "bfloat16"),
        token=token,
        seen=((4, 64), "bfloat16"),
    )
    expected, seen = np.full(x.shape, np.nan, np.float32), np.zeros((4, 64), np.float32)
    for i in (i for i in range(4) if 0 <= token + i < 6):
        seen[i] = x[1, token + i, 1]
        expected[1, token + i, 1] = (seen[i] + fence).astype(BFLOAT16)
    np.testing.assert_array_equal(got["seen"].astype(np.float32), seen)
    np.testing.assert_array_equal(got["y"].astype(np.float32), expected)


@pytest.mark.parametrize("seed", range(3))
def test_a_pipeline(run, seed):
    rows = _normal(7, 32)
    out = run("pipeline<NONE>", threads=64, seed=seed, rows=rows, out=((32,), "float32"), count=7)["out"]
    np.testing.assert_allclose(out, rows.sum(0), rtol=1e-5, atol=1e-6)


def test_a_pipeline_that_does_not_wait_for_copies(run):
    with pytest.raises(EmulatorError, match="before copies|more arrivals"):
        run("pipeline<FULL_NOT_AWAITED>", threads=64, rows=_normal(7, 32), out=((32,), "float32"), count=2)


def test_a_pipeline_that_ends_too_early(run):
    with pytest.raises(EmulatorError, match="before copies for the mbarrier"):
        run("pipeline<NEVER_AWAITED>", threads=64, rows=_normal(7, 32), out=((32,), "float32"), count=2)


def test_a_pipeline_that_overwrites_what_is_still_read(run):
    rows = _normal(7, 32)
    try:
        got = run("pipeline<EMPTY_NOT_AWAITED>", threads=64, rows=rows, out=((32,), "float32"), count=7)["out"]
    except EmulatorError:
        return
    assert not np.allclose(got, rows.sum(0), rtol=1e-3)


def test_a_deadlock_says_who_waits_for_what(run):
    with pytest.raises(EmulatorError, match="threads 32-63: an mbarrier.* expects 256 bytes and has 128"):
        run("pipeline<TOO_MANY_BYTES>", threads=64, rows=_normal(7, 32), out=((32,), "float32"), count=7)


def test_arriving_twice(run):
    with pytest.raises(EmulatorError, match="more arrivals"):
        run("pipeline<ARRIVES_TWICE>", threads=64, rows=_normal(7, 32), out=((32,), "float32"), count=1)


def test_copies_by_threads(run):
    x = _normal(128)
    y = run("async_copies<true>", x=x, y=((128,), "float32"), count=100)["y"]
    np.testing.assert_array_equal(y, np.where(np.arange(128) < 100, x, 0))
    assert np.isnan(run("async_copies<false>", x=x, y=((128,), "float32"), count=100)["y"]).any()


def test_blocks_wait_for_later_ones(folder):
    plan = Plan(
        "chain",
        (),
        (Buffer("sums", (9,), "int32"),),
        (Buffer("flags", (9,), "int32"),),
        (
            Launch(_kernel(folder, "clear"), (1, 1, 1), (ArrayArg("flags"),), (9, 1, 1)),
            Launch(_kernel(folder, "chain"), (9, 1, 1), (ArrayArg("flags"), ArrayArg("sums")), (32, 1, 1)),
        ),
    )
    np.testing.assert_array_equal(cuda_emulator.run(plan, {})["sums"], 9 - np.arange(9))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "deadlock.*threads 0-63: bar.sync 3"),
        (1, "deadlock.*threads 0-31: bar.sync 1, threads 32-63: ended"),
        (2, "different instructions"),
        (3, "outside of every buffer"),
        (4, "outside of every buffer|wrote before or after"),
        (5, "index outside of its array"),
        (6, "misaligned"),
        (7, "outside of its shared memory"),
        (8, "shared address .* is outside"),
        (9, "is not in its own mask"),
        (10, "was not initialised"),
        (11, "which is not in the mask"),
    ],
)
def test_mistakes_are_found(run, number, words):
    with pytest.raises(EmulatorError, match=words):
        run(f"mistakes<{number}>", threads=64, shared=64, out=((64,), "float32"))


def test_registers_that_nobody_gives_up(run):
    run("takes_registers<16>", threads=384, out=((384,), "float32"))
    with pytest.raises(EmulatorError, match="setmaxnreg waits forever"):
        run("takes_registers<8>", threads=384, out=((384,), "float32"))


def test_blocks_of_a_cluster_read_each_other(run):
    out = run("cluster_sums", threads=64, blocks=8, cluster=4, out=((8, 4), "float32"))["out"]
    values = np.arange(32, dtype=np.float32).reshape(2, 4, 4).sum(1)
    np.testing.assert_array_equal(out, values.repeat(4, 0))


def test_blocks_of_a_cluster_send_each_other_words(run):
    out = run("cluster_sends<16>", threads=64, blocks=8, cluster=4, out=((8, 4), "int32"))["out"]
    blocks = np.arange(8)
    np.testing.assert_array_equal(out, (blocks // 4 * 4)[:, None] * 10 + np.arange(4) * 10 + blocks[:, None] % 4)
    with pytest.raises(EmulatorError, match="expects 20 bytes and has 16"):
        run("cluster_sends<20>", threads=64, blocks=4, cluster=4, out=((4, 4), "int32"))


def test_a_block_that_has_ended_is_not_read(run):
    with pytest.raises(EmulatorError, match="does not run"):
        run("cluster_ends", threads=64, blocks=2, cluster=2, out=((64,), "float32"))


def test_the_order_of_threads_is_random(run):
    """A missing barrier shows: some thread reads what another has not written."""
    assert np.isnan(run("mistakes<12>", threads=64, shared=64, out=((64,), "float32"))["out"]).any()


def test_a_written_operand(run):
    with pytest.raises(EmulatorError, match="the operand x was written"):
        run("writes_its_operand", x=_normal(32), out=((32,), "float32"))


def test_guards_take_any_shape():
    for shape in ((), (1,), (5, 3), (1024,), (4097,)):
        memory = cuda_emulator.Guarded(shape, np.dtype(np.uint8))
        assert memory.array.shape == shape and memory.address % 16 == 0 and memory.intact()
        assert math.prod(shape) == memory.array.size


def test_unknown_instructions_are_named(folder):
    text = 'void f(unsigned& a) { asm volatile("no.such.thing %0, 3;" : "=r"(a)); }'
    assert translated("f.cu", text) == "void f(unsigned& a) { emulator::ptx::no_such_thing((a), 3); }"
    with pytest.raises(ValueError, match="does not read: one; two"):
        translated("f.cu", 'asm("one; two;");')
    (folder / "unknown.cu").write_text(f"__global__ void g(int*) {{}}\n{text}")
    kernel = CudaKernel(str(folder / "unknown.cu"), "g")
    with pytest.raises(RuntimeError, match="no_such_thing"):
        cuda_emulator.run(
            Plan("p", (), (Buffer("o", (1,), "int32"),), (), (Launch(kernel, (1, 1, 1), (ArrayArg("o"),)),)), {}
        )
