"""Launch plans: what they refuse, what kernels are passed, and the one custom call that they become."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssd import compile as kernels
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
from jax_ssd.plans import Pointer
from jax_ssd.specs import ArraySpec, ConstantSpec, ScalarSpec

TILE = CuTileKernel("tile_kernels.scale", "scale")
CUDA = CudaKernel("step.cu", "step<64>")

# The base row of the refusals below: each changes one thing of it.
BASE = Plan(
    "base",
    operands=(Buffer("x", (4, 64), "bfloat16"), Buffer("state", (8,), "float32")),
    results=(Buffer("y", (4, 64), "bfloat16"), Buffer("new_state", (8,), "float32")),
    scratch=(Buffer("sums", (2, 32), "float32"),),
    launches=(
        Launch(TILE, (4, 1, 1), (ArrayArg("x"), ArrayArg("sums"), ConstantArg(64))),
        Launch(CUDA, (4, 2, 1), (ArrayArg("sums"), ArrayArg("y")), block=(128, 1, 1), shared_memory=4096),
    ),
    aliases={"state": "new_state"},
)


def with_launch(number: int = 1, **changes) -> Plan:
    launches = list(BASE.launches)
    launches[number] = dataclasses.replace(launches[number], **changes)
    return dataclasses.replace(BASE, launches=tuple(launches))


def with_argument(argument, number: int = 1) -> Plan:
    return with_launch(number, arguments=(argument,))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"])
def test_the_base_plan_is_sound_everywhere(arch):
    BASE.check(arch)


@pytest.mark.parametrize(
    ("plan", "arch", "words"),
    [
        (with_launch(grid=(2**31, 1, 1)), "sm_90", "grid axis x: 2,147,483,648 blocks, at most 2,147,483,647"),
        (with_launch(grid=(1, 65_536, 1)), "sm_90", "grid axis y: 65,536 blocks, at most 65,535"),
        (with_launch(grid=(1, 1, 65_536)), "sm_90", "grid axis z: 65,536 blocks, at most 65,535"),
        (with_launch(block=(1025, 1, 1)), "sm_90", "block axis x: 1,025 threads, at most 1,024"),
        (with_launch(block=(32, 1, 65)), "sm_90", "block axis z: 65 threads, at most 64"),
        (with_launch(block=(512, 4, 1)), "sm_90", "block: 2,048 threads, at most 1,024"),
        (with_launch(shared_memory=232_449), "sm_90", "shared memory on sm_90: 232,449 bytes, at most 232,448"),
        (with_launch(shared_memory=166_913), "sm_80", "shared memory on sm_80: 166,913 bytes, at most 166,912"),
        (with_launch(shared_memory=101_377), "sm_89", "shared memory on sm_89: 101,377 bytes, at most 101,376"),
        (with_launch(shared_memory=101_377), "sm_120", "shared memory on sm_120: 101,377 bytes, at most 101,376"),
        (with_launch(cluster=(4, 1, 1)), "sm_89", "sm_89 has neither clusters nor programmatic dependent launch"),
        (with_launch(pdl=True), "sm_80", "sm_80 has neither clusters nor programmatic dependent launch"),
        (with_launch(grid=(16, 1, 1), cluster=(16, 1, 1)), "sm_90", "cluster: 16 blocks, at most 8"),
        (with_launch(arguments=(ArrayArg("x"),) * 513), "sm_90", "parameters: 4,104 bytes, at most 4,096"),
    ],
)
def test_a_limit_of_the_architecture(plan, arch, words):
    """Valid elsewhere: NotImplementedError, so that another implementation may take the call."""
    with pytest.raises(NotImplementedError, match=f"plan base, kernel .*{re.escape(words)}"):
        plan.check(arch)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (with_launch(grid=(0, 1, 1)), "cannot be run"),
        (with_launch(grid=(3, 1, 1), cluster=(2, 1, 1)), "cluster (2, 1, 1) does not divide grid (3, 1, 1)"),
        (with_launch(0, shared_memory=1), "a cuTile kernel takes block (1, 1, 1)"),
        (with_launch(0, pdl=True), "no cluster and no pdl"),
        (with_argument(ArrayArg("z")), "argument 0 names 'z', the buffers are ['x', 'state', 'y'"),
        (with_argument(ArrayArg("x", (4, 65))), "reaches element 259 of buffer x: bfloat16[4,64], which has 256"),
        (with_argument(ArrayArg("x", (4,), (64,), 64)), "reaches element 256 of buffer x"),
        (with_argument(ArrayArg("x", (4,), (-1,))), "is no view: shape (4,), strides (-1,)"),
        (with_argument(ArrayArg("x", (4, 2), (1,))), "is no view"),
        (with_argument(ScalarArg(1, "int24")), "argument 0 has the unknown dtype 'int24'"),
        (with_argument(ConstantArg(1)), "those of a CUDA C++ kernel are template arguments"),
        (with_argument(TensorMapArg("x", (4, 64)), 0), "a cuTile kernel takes the array"),
        (with_argument(TensorMapArg("x", (64,))), "a box of as many dimensions"),
        (with_argument(TensorMapArg("x", (4, 16), (4, 16), (20, 1))), "are not multiples of 16 B"),
        (with_argument(TensorMapArg("x", (4, 512))), "is not within 1 to 256 a dimension"),
        (with_argument(TensorMapArg("x", (4, 64), swizzle=16)), "argument.swizzle=16"),
        (dataclasses.replace(BASE, launches=()), "it launches nothing"),
        (dataclasses.replace(BASE, scratch=(Buffer("x", (1,), "float32"),)), "more than one buffer is called x"),
        (dataclasses.replace(BASE, scratch=(Buffer("sums", (2, 0), "float32"),)), "sums: float32[2,0] is empty"),
        (dataclasses.replace(BASE, scratch=(Buffer("sums", (2, 9), "float24"),)), "has a dtype that is not one of"),
        (dataclasses.replace(BASE, aliases={"x": "new_state"}), "cannot share memory with new_state: float32[8]"),
        (dataclasses.replace(BASE, aliases={"y": "x"}), "aliases maps an operand to a result, got 'y' to 'x'"),
    ],
)
def test_a_contradiction(plan, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        plan.check("sm_90")


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="unknown architecture 'sm_70', expected one of"):
        BASE.check("sm_70")


def test_describe_names_every_buffer_and_launch():
    assert BASE.describe().splitlines() == [
        "plan base",
        "  operand x: bfloat16[4,64]",
        "  operand state: float32[8]",
        "  result y: bfloat16[4,64]",
        "  result new_state: float32[8]",
        "  scratch sums: float32[2,32]",
        "  result new_state is written in place of operand state",
        "  launch tile_kernels.scale.scale on grid 4 x 1 x 1",
        "    x[4,64]",
        "    sums[2,32]",
        "    constant 64",
        "  launch step<64> on grid 4 x 2 x 1, block 128 x 1 x 1, 4,096 bytes of shared memory",
        "    sums[2,32]",
        "    y[4,64]",
        "  scratch in total 256 bytes",
    ]


def test_parameters_of_a_cutile_kernel():
    """Per array the pointer, shape words and stride words; scalars in place; constants not at all."""
    arguments = (
        ArrayArg("x", (2, 32), (128, 2), 65),
        ScalarArg(1.5, "float32"),
        ConstantArg(7),
        ScalarArg(-1, "int64"),
    )
    plan = with_argument(arguments[0], 0)
    plan = dataclasses.replace(plan, launches=(dataclasses.replace(plan.launches[0], arguments=arguments),))
    words = [struct.pack("<i", word) for word in (2, 32, 128, 2)]
    expected = [Pointer("x", 130), *words, struct.pack("<f", 1.5), struct.pack("<q", -1)]
    assert plan.parameters(plan.launches[0]) == expected
    assert plan.parameter_sizes(plan.launches[0]) == [8, 4, 4, 4, 4, 4, 8]
    assert plan.compile_arguments(plan.launches[0]) == (
        ArraySpec("bfloat16", (2, 32), (128, 2), alias="x", alignment=2),
        ScalarSpec("float32"),
        ConstantSpec(7),
        ScalarSpec("int64"),
    )


@pytest.mark.parametrize(
    ("shape", "strides", "wide"),
    [((2**31 - 1,), (1,), False), ((2**31,), (1,), True), ((2, 2**30), (2**30, 1), True), ((2, 4), (2**31, 1), True)],
)
def test_indices_beyond_32_bits_take_64_bit_words(shape, strides, wide):
    plan = dataclasses.replace(
        BASE,
        scratch=(Buffer("sums", (2**33,), "float32"),),
        launches=(Launch(TILE, (1, 1, 1), (ArrayArg("sums", shape, strides),)),),
    )
    plan.check("sm_90")
    (spec,) = plan.compile_arguments(plan.launches[0])
    assert isinstance(spec, ArraySpec) and spec.index64 is wide
    assert plan.parameter_sizes(plan.launches[0])[1:] == [8 if wide else 4] * (2 * len(shape))


def test_arguments_in_the_same_memory_say_so():
    """Two views of one buffer, and an operand with the result that replaces it, may alias; others may not."""
    arguments = (ArrayArg("state", (4,)), ArrayArg("state", (4,), offset=4), ArrayArg("new_state"), ArrayArg("x"))
    plan = dataclasses.replace(BASE, launches=(Launch(TILE, (1, 1, 1), arguments),))
    specs = plan.compile_arguments(plan.launches[0])
    first, second, third, other = (spec.alias for spec in specs if isinstance(spec, ArraySpec))
    assert first == second == third != other


def test_only_what_aligns_is_promised_to_be_aligned():
    offsets = (0, 1, 2, 3, 4, 8)
    arguments = tuple(ArrayArg("x", (2,), offset=offset) for offset in offsets)
    plan = dataclasses.replace(BASE, launches=(Launch(TILE, (1, 1, 1), arguments),))
    specs = plan.compile_arguments(plan.launches[0])
    assert [spec.alignment for spec in specs if isinstance(spec, ArraySpec)] == [16, 2, 4, 2, 8, 16]


# ---- the custom call -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_compiler(monkeypatch):
    """Cubins out of thin air that take the parameters of BASE's two kernels."""

    def compile_launches(requests, arch):
        sizes = {TILE: [8, 4, 4, 4, 4, 8, 4, 4, 4, 4], CUDA: [8, 8]}
        return [
            kernels.Cubin(bytes([7, i]), f"kernel_{i}", str(i) * 64, 0, 32, arch, tuple((0, s) for s in sizes[source]))
            for i, (source, _) in enumerate(requests)
        ]

    monkeypatch.setattr(kernels, "compile_launches", compile_launches)


def lowered(function, *operands) -> str:
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


OPERANDS = (jnp.zeros((4, 64), jnp.bfloat16), jnp.zeros((8,), jnp.float32))


@pytest.mark.usefixtures("no_compiler")
def test_one_custom_call_whatever_the_number_of_launches():
    text = lowered(lambda x, state: launch.call(BASE, "sm_90", x, state), *OPERANDS)
    assert text.count("stablehlo.custom_call") == 1
    (line,) = [line for line in text.splitlines() if "custom_call" in line]
    assert "@jax_ssd.launch(%arg0, %arg1)" in line
    # Scratch is the last of the results, and the state is written in place.
    assert "-> (tensor<4x64xbf16>, tensor<8xf32>, tensor<2x32xf32>)" in line
    assert re.search(r"output_operand_alias<output_tuple_indices = \[1\],\s*operand_index = 1", line)


@pytest.mark.usefixtures("no_compiler")
def test_results_are_those_of_the_plan():
    shapes = jax.eval_shape(lambda x, state: launch.call(BASE, "sm_90", x, state), *OPERANDS)
    assert [(r.shape, r.dtype.name) for r in shapes] == [((4, 64), "bfloat16"), ((8,), "float32")]


@pytest.mark.usefixtures("no_compiler")
def test_operands_that_are_not_the_plans_are_refused():
    with pytest.raises(
        ValueError, match=r"expected operands \[\(\(4, 64\), 'bfloat16'\).*got \[\(\(4, 64\), 'float32'\)"
    ):
        jax.eval_shape(lambda x, s: launch.call(BASE, "sm_90", x, s), OPERANDS[0].astype(jnp.float32), OPERANDS[1])


def test_a_kernel_that_takes_other_parameters_is_refused():
    sizes = ((0, 8), (8, 8))
    cubins = [
        kernels.Cubin(b"1", "k", "d", 0, 32, "sm_90", sizes),
        kernels.Cubin(b"2", "k", "e", 0, 32, "sm_90", sizes),
    ]
    with pytest.raises(ValueError, match=r"scale: it takes parameters of \[8, 8\] bytes, the plan passes \[8, 4,"):
        launch.encode(BASE, cubins)


def test_static_shared_memory_counts():
    plan = dataclasses.replace(BASE, launches=BASE.launches[1:])
    cubin = kernels.Cubin(b"1", "k", "d", 100_000, 32, "sm_120", ((0, 8), (8, 8)))
    with pytest.raises(NotImplementedError, match=r"4,096 bytes of dynamic and 98,976 of static .* at most 101,376"):
        launch.encode(plan, [cubin])


def test_what_cuda_reserves_does_not_count():
    plan = dataclasses.replace(BASE, launches=(dataclasses.replace(BASE.launches[1], shared_memory=232_448),))
    launch.encode(plan, [kernels.Cubin(b"1", "k", "d", 1024, 32, "sm_90", ((0, 8), (8, 8)))])


def test_equal_cubins_are_stored_once():
    plan = dataclasses.replace(BASE, launches=(BASE.launches[1],) * 3)
    cubin = kernels.Cubin(b"\x00" * 1000, "k", "d", 0, 32, "sm_90", ((0, 8), (8, 8)))
    attributes = launch.encode(plan, [cubin] * 3)
    assert attributes["cubins"].size == 1000
    assert all(value.dtype == np.uint8 for value in attributes.values())


KERNEL = """
import cuda.tile as ct

@ct.kernel
def scale(x, y, factor, TILE: ct.Constant):
    i = ct.bid(0)
    ct.store(y, (i, 0), (ct.load(x, (i, 0), (1, TILE)) * factor).astype(y.dtype))
"""


@pytest.mark.parametrize("rows", [4, 2**26], ids=["int32", "int64"])
def test_a_compiled_cutile_kernel_takes_what_the_plan_passes(tmp_path: Path, monkeypatch, rows):
    """From source to program text with the real compiler; encode compares the kernel's own list of parameters."""
    pytest.importorskip("cuda.tile")
    (tmp_path / "tile_kernels").mkdir()
    (tmp_path / "tile_kernels/__init__.py").touch()
    (tmp_path / "tile_kernels/scale.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JAX_SSD_CACHE_DIR", str(tmp_path / "cache"))
    shape = (rows, 64)
    arguments = (ArrayArg("x"), ArrayArg("y"), ScalarArg(2.0, "float32"), ConstantArg(64))
    plan = Plan(
        "scale",
        (Buffer("x", shape, "float32"),),
        (Buffer("y", shape, "float32"),),
        (),
        (Launch(TILE, (4, 1, 1), arguments),),
    )
    text = lowered(lambda x: launch.call(plan, "sm_90", x), jax.ShapeDtypeStruct(shape, jnp.float32))
    assert text.count("@jax_ssd.launch") == 1
