"""The handler on a GPU: every kind of argument and launch option, command buffers, cubins that do not fit."""

from __future__ import annotations

import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import launch
from jax_ssd.launch import (
    ArrayArg,
    Buffer,
    ConstantArg,
    CudaKernel,
    CuTileKernel,
    Launch,
    Plan,
    ScalarArg,
    TensorMapArg,
)

SOURCE = str(Path(__file__).with_name("launch_kernels.cu"))


def kernel(name: str) -> CudaKernel:
    return CudaKernel(SOURCE, name)


SIZE, PART = 4096 * 24, 24_576
SUM_BLOCKS = SIZE // PART


def scale_plan(factor: float = 3.0) -> Plan:
    arguments = (ArrayArg("x"), ArrayArg("y"), ScalarArg(factor, "float32"), ScalarArg(SIZE, "int64"))
    x, y = Buffer("x", (SIZE,), "float32"), Buffer("y", (SIZE,), "float32")
    return Plan("scale", (x,), (y,), (), (Launch(kernel("scale<128>"), (4, 8, 24), arguments, block=(128, 1, 1)),))


def accumulate_plan() -> Plan:
    """state += sum(x), through scratch: 96 KB of shared memory, then a programmatic dependent launch, in place."""
    x, state, new_state = Buffer("x", (SIZE,), "float32"), *(Buffer(n, (1,), "float32") for n in ("state", "new_state"))
    sums = (ArrayArg("x"), ArrayArg("sums"), ScalarArg(PART, "int32"))
    last = (ArrayArg("sums"), ArrayArg("new_state"), ScalarArg(SUM_BLOCKS, "int32"))
    launches = (
        Launch(kernel("block_sums<256>"), (SUM_BLOCKS, 1, 1), sums, block=(256, 1, 1), shared_memory=4 * PART),
        Launch(kernel("accumulate"), (1, 1, 1), last, pdl=True),
    )
    scratch = Buffer("sums", (SUM_BLOCKS,), "float32")
    return Plan("accumulate", (x, state), (new_state,), (scratch,), launches, {"state": "new_state"})


def ones() -> jax.Array:
    return jnp.ones((SIZE,), jnp.float32)


def test_pointers_and_scalars():
    (y,) = jax.jit(launch.runner(scale_plan()))(ones())
    np.testing.assert_array_equal(y, 3.0 + np.arange(SIZE, dtype=np.float32))


def test_scratch_shared_memory_alias_and_dependent_launch():
    run = jax.jit(launch.runner(accumulate_plan()))
    state = jnp.full((1,), 5.0, jnp.float32)
    assert run(ones(), state)[0].item() == SIZE + 5
    assert state.item() == 5  # not donated: XLA copies it first


@pytest.mark.parametrize("options", [{}, jax_ssd.LOOP_AS_GRAPH], ids=["launched", "captured"])
def test_a_loop_in_place(options):
    run = launch.runner(accumulate_plan())

    def loop(x, state):
        return jax.lax.scan(lambda carry, _: (run(x + carry * 0, carry)[0], carry), state, length=50)

    last, before = jax.jit(loop, compiler_options=options)(ones(), jnp.zeros((1,), jnp.float32))
    assert last.item() == 50 * SIZE
    np.testing.assert_array_equal(before[:, 0], np.arange(50, dtype=np.float32) * SIZE)


def test_captured_calls_are_replayed_on_new_buffers():
    run = launch.runner(scale_plan())
    twice = jax.jit(lambda x: run(run(x)[0] + 1.0)[0], compiler_options=jax_ssd.LOOP_AS_GRAPH)
    for value in range(4):
        y = twice(jnp.full((SIZE,), float(value), jnp.float32))
        steps = np.arange(SIZE, dtype=np.float32)
        np.testing.assert_array_equal(y, (np.float32(value) * 3 + steps + 1) * 3 + steps)


def test_clusters():
    ranks = Buffer("ranks", (8,), "int32")
    plan = Plan(
        "ranks",
        (),
        (ranks,),
        (),
        (Launch(kernel("cluster_ranks"), (8, 1, 1), (ArrayArg("ranks"),), cluster=(4, 1, 1)),),
    )
    (got,) = jax.jit(launch.runner(plan))()
    assert got.tolist() == [0, 1, 2, 3] * 2


def test_tensor_maps():
    x, y = Buffer("x", (32, 64), "float32"), Buffer("y", (8, 32), "float32")
    arguments = (TensorMapArg("x", box=(8, 32)), ArrayArg("y"))
    plan = Plan("tile", (x,), (y,), (), (Launch(kernel("copy_tile"), (1, 1, 1), arguments, block=(256, 1, 1)),))
    values = np.arange(32 * 64, dtype=np.float32).reshape(32, 64)
    (got,) = jax.jit(launch.runner(plan))(values)
    np.testing.assert_array_equal(got, values[8:16, 32:])


def test_a_cubin_for_another_architecture_is_an_error_with_the_drivers_words():
    other = "sm_80" if jax.devices()[0].compute_capability.startswith("1") else "sm_120"
    run = jax.jit(launch.runner(scale_plan(), other))
    with pytest.raises(Exception, match=r"plan scale, kernel '.*scale.*CUDA_ERROR_NO_BINARY_FOR_GPU"):
        jax.block_until_ready(run(ones()))


def test_every_device():
    devices = jax.devices()
    run = jax.jit(launch.runner(scale_plan()))
    results = [run(jax.device_put(ones(), device))[0] for device in devices for _ in range(2)]
    for y in results:
        np.testing.assert_array_equal(y, 3.0 + np.arange(SIZE, dtype=np.float32))


def test_cubins_go_with_their_programs():
    from jax_ssd import _ffi

    jax.clear_caches()
    gc.collect()
    before = _ffi.live_cubins()
    run = jax.jit(launch.runner(scale_plan(7.0))).lower(ones()).compile()
    jax.block_until_ready(run(ones()))
    assert _ffi.live_cubins() == before + 1
    del run
    jax.clear_caches()
    gc.collect()
    assert _ffi.live_cubins() == before


TILE_KERNEL = """
import cuda.tile as ct

@ct.kernel
def scale(x, y, factor, TILE: ct.Constant):
    i = ct.bid(0)
    ct.store(y, (i, 0), (ct.load(x, (i, 0), (1, TILE)) * factor).astype(y.dtype))
"""


def tile_plan(folder: Path, rows: int) -> Plan:
    """y = x * 2.5 for rows of 64, by a cuTile kernel that this writes below `folder`."""
    (folder / "gpu_tile_kernels").mkdir()
    (folder / "gpu_tile_kernels/__init__.py").touch()
    (folder / "gpu_tile_kernels/scale.py").write_text(TILE_KERNEL)
    x, y = Buffer("x", (rows, 64), "bfloat16"), Buffer("y", (rows, 64), "bfloat16")
    arguments = (ArrayArg("x"), ArrayArg("y"), ScalarArg(2.5, "float32"), ConstantArg(64))
    tile_kernel = CuTileKernel("gpu_tile_kernels.scale", "scale")
    return Plan("tiles", (x,), (y,), (), (Launch(tile_kernel, (rows, 1, 1), arguments),))


@pytest.mark.parametrize("rows", [100, 2**26], ids=["int32", "int64"])
def test_a_cutile_kernel(tmp_path, monkeypatch, rows):
    """Also with more elements than 32 bits count: then the shape and stride words are 64 bits wide."""
    monkeypatch.syspath_prepend(tmp_path)
    run = jax.jit(launch.runner(tile_plan(tmp_path, rows)))
    (y,) = run(jnp.ones((rows, 64), jnp.bfloat16))
    assert y[-1, -1].item() == 2.5 and (y == 2.5).all().item()
