"""Launch plans as plain values: which kernels run, in which order, on which grid and with which arguments.

A plan is made from static sizes alone, so it can be built, printed and checked on any machine, for any architecture.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ssd.config import MAX_SHARED_MEMORY
from jax_ssd.specs import (
    ALIGNMENT,
    ArraySpec,
    CompileArg,
    ConstantSpec,
    CudaKernel,
    CuTileKernel,
    KernelSource,
    ScalarSpec,
    row_major,
)

MAX_GRID = (2**31 - 1, 65_535, 65_535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_CLUSTER = 8  # blocks; what every architecture with clusters grants without opting in
MAX_PARAMETER_BYTES = 4096
MULTIPROCESSORS = 132  # of an H100 or H200, for which the heuristics of CUDA C++ divide work

_INT32_MAX = 2**31 - 1
_WITHOUT_CLUSTERS = ("sm_80", "sm_86", "sm_89")

#: Values of XLA_FFI_DataType.
XLA_TYPES = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "bfloat16": 16,
}

#: Values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion.
TENSOR_MAP_TYPES = {
    "uint8": 0,
    "uint16": 1,
    "uint32": 2,
    "int32": 3,
    "uint64": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}


@dataclass(frozen=True)
class Buffer:
    """A contiguous row-major array in device memory. dtype: a numpy-style name, "bfloat16" included."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class ArrayArg:
    """A buffer, or a view of one; all of shape, strides and offset count elements.

    shape: None for the buffer's own. strides: None for those of a contiguous array of that shape. offset: of the first
    element. A cuTile kernel gets an array, a CUDA C++ kernel a pointer.
    """

    buffer: str
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    offset: int = 0


@dataclass(frozen=True)
class TensorMapArg:
    """A TMA descriptor (CUtensorMap) of a buffer or a view of it, for CUDA C++ kernels. Outermost dimension first.

    shape, strides, offset: as in ArrayArg, with a last stride of 1. box: elements per dimension that one copy moves.
    swizzle: 0, 32, 64 or 128 bytes. l2_promotion: 0, 64, 128 or 256 bytes. Elements out of bounds read as zero.
    """

    buffer: str
    box: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    offset: int = 0
    swizzle: int = 0
    l2_promotion: int = 0


@dataclass(frozen=True)
class ScalarArg:
    """A value passed at launch, as `dtype`."""

    value: bool | int | float
    dtype: str


@dataclass(frozen=True)
class ConstantArg:
    """A value compiled into a cuTile kernel, and therefore not passed."""

    value: Any


Argument = ArrayArg | TensorMapArg | ScalarArg | ConstantArg


@dataclass(frozen=True)
class Pointer:
    """A kernel parameter: an address, in bytes from the start of a buffer."""

    buffer: str
    offset: int


#: What a kernel is passed: an address, the bytes of a value, or a tensor map.
Parameter = Pointer | bytes | TensorMapArg


@dataclass(frozen=True)
class Launch:
    """One kernel on one grid.

    block, shared_memory (dynamic, in bytes), cluster and pdl are for CUDA C++ kernels: cuTile's compiler fixes its own.
    pdl: programmatic dependent launch, the kernel may begin before the one ahead of it in the stream has ended, and
    must wait for it (griddepcontrol.wait) before it touches memory.
    """

    kernel: KernelSource
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    block: tuple[int, int, int] = (1, 1, 1)
    shared_memory: int = 0
    cluster: tuple[int, int, int] | None = None
    pdl: bool = False

    @property
    def name(self) -> str:
        if isinstance(self.kernel, CuTileKernel):
            return f"{self.kernel.module}.{self.kernel.function}"
        return self.kernel.name_expression


@dataclass(frozen=True)
class Plan:
    """The launches of one custom call, in stream order, over its operands, results and scratch.

    aliases: operand name -> name of the result that is written in its place.
    """

    name: str
    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    scratch: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    aliases: dict[str, str] = field(default_factory=dict)

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """By name, in the order in which the handler counts them."""
        return {buffer.name: buffer for buffer in (*self.operands, *self.results, *self.scratch)}

    def describe(self) -> str:
        """The plan for a reader: a line for each buffer and each launch."""
        lines = [f"plan {self.name}"]
        for kind in ("operands", "results", "scratch"):
            lines += [f"  {kind.removesuffix('s')} {buffer}" for buffer in getattr(self, kind)]
        lines += [f"  result {result} is written in place of operand {name}" for name, result in self.aliases.items()]
        for launch in self.launches:
            lines.append(f"  launch {launch.name} on grid {_times(launch.grid)}{_launch_options(launch)}")
            lines += [f"    {self._argument_text(argument)}" for argument in launch.arguments]
        lines.append(f"  scratch in total {sum(buffer.nbytes for buffer in self.scratch):,} bytes")
        return "\n".join(lines)

    def check(self, arch: str) -> None:
        """Check that the plan is sound and fits `arch` ("sm_90"); needs neither a GPU nor a compiler.

        Raises:
          ValueError: the plan contradicts itself (unknown buffer, a view outside its buffer, ...).
          NotImplementedError: the plan is sound, but exceeds a limit of the architecture; the text has both figures.
        """
        if arch not in MAX_SHARED_MEMORY:
            raise ValueError(
                f"plan {self.name}: unknown architecture {arch!r}, expected one of {list(MAX_SHARED_MEMORY)}"
            )
        self._check_buffers()
        if not self.launches:
            raise ValueError(f"plan {self.name}: it launches nothing")
        for launch in self.launches:
            try:
                _check_geometry(launch, arch)
                for position, argument in enumerate(launch.arguments):
                    self._check_argument(launch, position, argument)
                _limit("parameters", sum(self.parameter_sizes(launch)), MAX_PARAMETER_BYTES, "bytes")
            except (ValueError, NotImplementedError) as error:
                raise type(error)(f"plan {self.name}, kernel {launch.name}: {error}") from None

    def compile_arguments(self, launch: Launch) -> tuple[CompileArg, ...]:
        """What the kernel of `launch` is specialised for."""
        if not isinstance(launch.kernel, CuTileKernel):
            return ()
        return tuple(self._compile_argument(argument) for argument in launch.arguments)

    def view(self, argument: ArrayArg | TensorMapArg) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of an array argument, in elements."""
        shape = self.buffers[argument.buffer].shape if argument.shape is None else argument.shape
        return shape, row_major(shape) if argument.strides is None else argument.strides

    def parameters(self, launch: Launch) -> list[Parameter]:
        """What the kernel of `launch` is passed, one entry for each of its parameters."""
        found: list[Parameter] = []
        for argument in launch.arguments:
            if isinstance(argument, ArrayArg):
                found.append(Pointer(argument.buffer, argument.offset * self.buffers[argument.buffer].itemsize))
                if isinstance(launch.kernel, CuTileKernel):
                    # cuTile's calling convention: shape words, then stride words, even those it knows at compile time.
                    shape, strides = self.view(argument)
                    form = "<q" if _needs_64_bits(shape, strides) else "<i"
                    found += [struct.pack(form, word) for word in (*shape, *strides)]
            elif isinstance(argument, TensorMapArg):
                found.append(argument)
            elif isinstance(argument, ScalarArg):
                found.append(np.asarray(argument.value).astype(jnp.dtype(argument.dtype)).tobytes())
        return found

    def parameter_sizes(self, launch: Launch) -> list[int]:
        """Bytes of each parameter of the kernel of `launch`."""
        sizes = {Pointer: 8, TensorMapArg: 128}
        return [len(p) if isinstance(p, bytes) else sizes[type(p)] for p in self.parameters(launch)]

    def _compile_argument(self, argument: Argument) -> CompileArg:
        if isinstance(argument, ConstantArg):
            return ConstantSpec(argument.value)
        if isinstance(argument, ScalarArg):
            return ScalarSpec(argument.dtype)
        assert isinstance(argument, ArrayArg), argument
        buffer = self.buffers[argument.buffer]
        shape, strides = self.view(argument)
        return ArraySpec(
            buffer.dtype,
            shape,
            strides,
            index64=_needs_64_bits(shape, strides),
            # A result written in place of an operand shares the operand's memory, whatever it is called.
            alias=self.aliases.get(argument.buffer, argument.buffer),
            alignment=math.gcd(ALIGNMENT, argument.offset * buffer.itemsize),
        )

    def _check_buffers(self) -> None:
        everything = (*self.operands, *self.results, *self.scratch)
        repeated = [name for name, count in Counter(buffer.name for buffer in everything).items() if count > 1]
        if repeated:
            raise ValueError(f"plan {self.name}: more than one buffer is called {', '.join(repeated)}")
        for buffer in everything:
            if buffer.dtype not in XLA_TYPES:
                raise ValueError(f"plan {self.name}: buffer {buffer} has a dtype that is not one of {list(XLA_TYPES)}")
            if min(buffer.shape, default=1) < 1:
                raise ValueError(f"plan {self.name}: buffer {buffer} is empty; an empty call launches nothing")
        operands, results = ({buffer.name: buffer for buffer in group} for group in (self.operands, self.results))
        for name, result in self.aliases.items():
            if name not in operands or result not in results:
                raise ValueError(f"plan {self.name}: aliases maps an operand to a result, got {name!r} to {result!r}")
            if (operands[name].shape, operands[name].dtype) != (results[result].shape, results[result].dtype):
                raise ValueError(f"plan {self.name}: {operands[name]} cannot share memory with {results[result]}")
        if len(set(self.aliases.values())) != len(self.aliases):
            raise ValueError(f"plan {self.name}: two operands share one result in aliases, got {self.aliases}")

    def _check_argument(self, launch: Launch, position: int, argument: Argument) -> None:
        is_cutile = isinstance(launch.kernel, CuTileKernel)
        if isinstance(argument, ScalarArg) and argument.dtype not in XLA_TYPES:
            raise ValueError(f"argument {position} has the unknown dtype {argument.dtype!r}")
        if isinstance(argument, ConstantArg) and not is_cutile:
            raise ValueError(f"argument {position} is a constant; those of a CUDA C++ kernel are template arguments")
        if isinstance(argument, TensorMapArg):
            if is_cutile:
                raise ValueError(f"argument {position} is a tensor map; a cuTile kernel takes the array")
            self._check_tensor_map(position, argument)
        if isinstance(argument, ArrayArg | TensorMapArg):
            self._check_view(position, argument)

    def _check_view(self, position: int, argument: ArrayArg | TensorMapArg) -> None:
        if argument.buffer not in self.buffers:
            raise ValueError(f"argument {position} names {argument.buffer!r}, the buffers are {list(self.buffers)}")
        buffer = self.buffers[argument.buffer]
        shape, strides = self.view(argument)
        if (
            len(strides) != len(shape)
            or min(shape, default=1) < 1
            or min(strides, default=0) < 0
            or argument.offset < 0
        ):
            raise ValueError(
                f"argument {position} is no view: shape {shape}, strides {strides}, offset {argument.offset}"
            )
        last = argument.offset + _extent(shape, strides) - 1
        if last >= buffer.size:
            raise ValueError(
                f"argument {position} reaches element {last:,} of buffer {buffer}, which has {buffer.size:,}: "
                f"shape {shape}, strides {strides}, offset {argument.offset:,}"
            )

    def _check_tensor_map(self, position: int, argument: TensorMapArg) -> None:
        self._check_view(position, argument)
        shape, strides = self.view(argument)
        buffer = self.buffers[argument.buffer]
        if buffer.dtype not in TENSOR_MAP_TYPES:
            raise ValueError(f"argument {position}: no tensor map of {buffer.dtype}")
        if not 1 <= len(shape) <= 5 or strides[-1] != 1 or len(argument.box) != len(shape):
            raise ValueError(
                f"argument {position}: a tensor map has 1 to 5 dimensions, a last stride of 1 and a box of as many "
                f"dimensions, got shape {shape}, strides {strides}, box {argument.box}"
            )
        if any(stride * buffer.itemsize % 16 for stride in (*strides[:-1], argument.offset)):
            raise ValueError(
                f"argument {position}: strides {strides} and offset {argument.offset} are not multiples of 16 B"
            )
        if max(argument.box) > 256 or min(argument.box) < 1:
            raise ValueError(f"argument {position}: the box {argument.box} is not within 1 to 256 a dimension")
        if argument.swizzle not in SWIZZLES or argument.l2_promotion not in L2_PROMOTIONS:
            raise ValueError(f"argument {position}: {argument.swizzle=}, {argument.l2_promotion=}")

    def _argument_text(self, argument: Argument) -> str:
        if isinstance(argument, ConstantArg):
            return f"constant {argument.value!r}"
        if isinstance(argument, ScalarArg):
            return f"{argument.dtype} {argument.value!r}"
        shape, strides = self.view(argument)
        text = f"{argument.buffer}[{','.join(map(str, shape))}]"
        text += "" if strides == row_major(shape) else f" strides {strides}"
        text += f" from element {argument.offset:,}" if argument.offset else ""
        return text if isinstance(argument, ArrayArg) else f"tensor map of {text}, box {argument.box}"


def _check_geometry(launch: Launch, arch: str) -> None:
    if isinstance(launch.kernel, CudaKernel) and launch.kernel.archs and arch not in launch.kernel.archs:
        raise NotImplementedError(f"it is written for {', '.join(launch.kernel.archs)}, not for {arch}")
    if min(launch.grid) < 1 or min(launch.block) < 1 or launch.shared_memory < 0:
        raise ValueError(
            f"grid {launch.grid}, block {launch.block}, shared memory {launch.shared_memory} B cannot be run"
        )
    if isinstance(launch.kernel, CuTileKernel) and (
        launch.block != (1, 1, 1) or launch.shared_memory or launch.cluster or launch.pdl
    ):
        raise ValueError("a cuTile kernel takes block (1, 1, 1), no dynamic shared memory, no cluster and no pdl")
    for axis, figure, most in zip("xyz", launch.grid, MAX_GRID, strict=True):
        _limit(f"grid axis {axis}", figure, most, "blocks")
    for axis, figure, most in zip("xyz", launch.block, MAX_BLOCK, strict=True):
        _limit(f"block axis {axis}", figure, most, "threads")
    _limit("block", math.prod(launch.block), MAX_THREADS, "threads")
    _limit(f"shared memory on {arch}", launch.shared_memory, MAX_SHARED_MEMORY[arch], "bytes")
    if (launch.cluster or launch.pdl) and arch in _WITHOUT_CLUSTERS:
        raise NotImplementedError(
            f"{arch} has neither clusters nor programmatic dependent launch; sm_90 and later have"
        )
    if launch.cluster:
        _limit("cluster", math.prod(launch.cluster), MAX_CLUSTER, "blocks")
        if any(size < 1 or of % size for size, of in zip(launch.cluster, launch.grid, strict=True)):
            raise ValueError(f"cluster {launch.cluster} does not divide grid {launch.grid}")


def _limit(what: str, figure: int, most: int, unit: str) -> None:
    if figure > most:
        raise NotImplementedError(f"{what}: {figure:,} {unit}, at most {most:,} are possible")


def _needs_64_bits(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether an index into the view, or one of its words, can exceed 32 bits."""
    return max(_extent(shape, strides), *shape, *strides, 0) > _INT32_MAX


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first of a view to its last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _times(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


def _launch_options(launch: Launch) -> str:
    text = "" if launch.block == (1, 1, 1) else f", block {_times(launch.block)}"
    text += f", {launch.shared_memory:,} bytes of shared memory" if launch.shared_memory else ""
    text += f", cluster {_times(launch.cluster)}" if launch.cluster else ""
    return text + (", programmatic dependent launch" if launch.pdl else "")
