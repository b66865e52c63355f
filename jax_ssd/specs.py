"""What is to be compiled: a kernel and the arguments it is specialised for. Plain values, hashable and printable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Addresses that every array argument may be assumed to be a multiple of, in bytes. XLA's own buffers are aligned to
#: 128, but it also passes on the buffers that a program is called with, for which it promises 16.
ALIGNMENT = 16


class CompileError(RuntimeError):
    """A kernel that should compile did not: the message has the kernel, its sizes and the compiler's words."""


@dataclass(frozen=True)
class CuTileKernel:
    """A cuTile kernel: a function of a module below kernels/cutile (or, with a dot in its name, of any module).

    occupancy, num_ctas, num_worker_warps: as in `cuda.tile.kernel`; None keeps what the kernel's decorator says.
    """

    module: str
    function: str
    occupancy: int | None = None
    num_ctas: int | None = None
    opt_level: int = 3
    num_worker_warps: int | None = None


@dataclass(frozen=True)
class CudaKernel:
    """A CUDA C++ kernel: a file below kernels/cuda and a name expression, such as "step<float, 64>".

    options: further NVRTC options, such as "-DTILE=64". arch_specific: compile for the features of this very
    architecture (sm_90a for sm_90: wgmma, setmaxnreg), which no later one has. archs: those it is written for, as in
    ("sm_90",); empty for all.
    """

    file: str
    name_expression: str
    options: tuple[str, ...] = ()
    arch_specific: bool = False
    archs: tuple[str, ...] = ()


KernelSource = CuTileKernel | CudaKernel


@dataclass(frozen=True)
class ArraySpec:
    """An array argument. shape, strides: in elements. index64: shapes and strides are passed as 64-bit words.

    alias: arguments of one launch that may share memory carry the same name; None promises that this one shares none.
    alignment: what the array's address is a multiple of, in bytes (less than the default for a view with an offset).
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    index64: bool = False
    alias: str | None = None
    alignment: int = ALIGNMENT

    def __str__(self) -> str:
        contiguous = row_major(self.shape)
        view = "" if self.strides == contiguous else f" strides {self.strides}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{view}"


@dataclass(frozen=True)
class ScalarSpec:
    """A scalar that is passed at launch."""

    dtype: str

    def __str__(self) -> str:
        return self.dtype


@dataclass(frozen=True)
class ConstantSpec:
    """A value that is compiled in: bool, int, float, str, None or a tuple of them."""

    value: Any

    def __str__(self) -> str:
        return repr(self.value)


CompileArg = ArraySpec | ScalarSpec | ConstantSpec


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
