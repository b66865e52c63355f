"""A numpy interpreter of the cuTile kernels, so that a CPU test runs the very code that a GPU runs.

`run(plan, operands)` executes every launch of a plan, block by block, against a stand-in for `cuda.tile` whose tiles
are numpy arrays. It is stricter than a GPU where that finds mistakes:

- tile dimensions are powers of two, shapes broadcast as in cuTile, dtypes promote as in cuTile or raise;
- an element outside an array is the padding value if one is asked for and garbage (NaN) otherwise; a tile that lies
  wholly outside raises unless it is a load with a padding value, and so does a negative index;
- results and scratch start as "never written": reading such an element raises, and so does a result with elements left;
- two blocks of one launch that store the same element, or one that loads what another stored, raise (a race);
- an operand is never stored to unless the plan aliases it.

Blocks run in a shuffled order given a seed. What it does not check: that loop-carried variables keep their type, and
that constants are constant. Compiling does.
"""

from __future__ import annotations

import importlib
import inspect
import math
import random
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin

import ml_dtypes
import numpy as np

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
NEVER, BEFORE = -2, -1  # who wrote an element: nobody, an earlier launch (or the caller), or else a block's number


class TileError(Exception):
    """The kernel does something that cuTile refuses, or that is undefined on a GPU."""


# ---------------------------------------------------------------------------------------------------------- dtypes


@dataclass(frozen=True)
class DType:
    name: str
    numpy: Any
    kind: str  # "bool", "int", "uint", "float", "restricted"
    bits: int

    def __call__(self, value: Any) -> Tile:
        return full((), value, self)

    def __str__(self) -> str:
        return self.name


bool_ = DType("bool_", np.dtype(bool), "bool", 1)
int8, int16, int32, int64 = (DType(f"int{n}", np.dtype(f"int{n}"), "int", n) for n in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (DType(f"uint{n}", np.dtype(f"uint{n}"), "uint", n) for n in (8, 16, 32, 64))
float16 = DType("float16", np.dtype(np.float16), "float", 16)
bfloat16 = DType("bfloat16", np.dtype(ml_dtypes.bfloat16), "float", 16)
float32 = DType("float32", np.dtype(np.float32), "float", 32)
float64 = DType("float64", np.dtype(np.float64), "float", 64)
tfloat32 = DType("tfloat32", np.dtype(np.float32), "restricted", 32)  # held as float32 rounded to 10 fraction bits
DTYPES = (bool_, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float16, bfloat16, float32, float64)
BY_NUMPY = {d.numpy: d for d in DTYPES}
MMA_ACCUMULATORS = {
    float16: (float16, float32),
    bfloat16: (float32,),
    float32: (float32,),
    tfloat32: (float32,),
    float64: (float64,),
    int8: (int32,),
    uint8: (int32,),
}


def promote(a: DType, b: DType) -> DType:
    """The common type of two strictly typed tiles, or TileError: cuTile's table."""
    if a == b:
        return a
    refused = TileError(f"implicit promotion of {a} and {b} is not supported")
    if "restricted" in (a.kind, b.kind):
        raise refused
    if a.kind == "float" and b.kind == "float":
        if a.bits == b.bits:
            raise refused
        return a if a.bits > b.bits else b
    for x, y in ((a, b), (b, a)):
        if y.kind == "bool" or (x.kind == "float" and y.kind != "float"):
            return x
    if a.kind != b.kind:
        raise refused
    return a if a.bits > b.bits else b


def round_to_tfloat32(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x).astype(np.float32)


# ----------------------------------------------------------------------------------------------------------- tiles


def check_shape(shape: Any) -> tuple[int, ...]:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    for n in shape:
        if not isinstance(n, (int, np.integer)) or n < 1 or n & (n - 1):
            raise TileError(f"tile shape {shape}: every dimension is a positive power of two")
    return tuple(int(n) for n in shape)


def is_scalar(x: Any) -> bool:
    return isinstance(x, (bool, int, float, np.integer, np.bool_))


class Tile:
    """An immutable tile: a numpy array and its cuTile dtype."""

    __array_ufunc__ = None  # numpy scalars defer to our operators

    def __init__(self, data: np.ndarray, dtype: DType):
        self.data, self.dtype = np.asarray(data, dtype.numpy), dtype
        check_shape(self.data.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    def astype(self, dtype: DType, *, rounding_mode: Any = None) -> Tile:
        if dtype is tfloat32:
            return Tile(round_to_tfloat32(self.data.astype(np.float32)), dtype)
        return Tile(self.data.astype(dtype.numpy), dtype)

    def item(self) -> Tile:
        if self.data.size != 1:
            raise TileError(f"item() of a tile of shape {self.shape}")
        return Tile(self.data.reshape(()), self.dtype)

    def reshape(self, shape: Any) -> Tile:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if math.prod(n for n in shape if n != -1) != self.data.size and -1 not in shape:
            raise TileError(f"reshape of {self.shape} to {shape}")
        return Tile(self.data.reshape(shape), self.dtype)

    def permute(self, axes: Sequence[int]) -> Tile:
        return Tile(self.data.transpose(axes), self.dtype)

    def transpose(self, axis0: int | None = None, axis1: int | None = None) -> Tile:
        if axis0 is None and self.ndim != 2:
            raise TileError("transpose without axes is for two-dimensional tiles")
        return Tile(np.swapaxes(self.data, 0 if axis0 is None else axis0, 1 if axis1 is None else axis1), self.dtype)

    def extract(self, index: Any, shape: Any) -> Tile:
        return extract(self, index, shape)

    def insert(self, index: Any, value: Tile) -> Tile:
        return insert(self, index, value)

    def __getitem__(self, index: Any) -> Tile:
        index = index if isinstance(index, tuple) else (index,)
        if any(i is not None and i is not Ellipsis and i != slice(None) for i in index):
            raise TileError("only ':' and None index a tile")
        if Ellipsis not in index and sum(i is not None for i in index) != self.ndim:
            raise TileError(f"{len(index)} indices for a tile of shape {self.shape}")
        return Tile(self.data[index], self.dtype)

    def __bool__(self) -> bool:
        if self.ndim:
            raise TileError(f"the truth of a tile of shape {self.shape}; only a 0-d tile has one")
        return bool(self.data)

    def __index__(self) -> int:
        if self.ndim or self.dtype.kind not in ("int", "uint"):
            raise TileError(f"a {self.dtype} tile of shape {self.shape} is no index")
        return int(self.data)

    def __neg__(self) -> Tile:
        return Tile(-self.data, self.dtype)

    def __invert__(self) -> Tile:
        if self.dtype.kind not in ("int", "uint", "bool"):
            raise TileError(f"~ of {self.dtype}")
        return Tile(~self.data, self.dtype)

    def __truediv__(self, other: Any) -> Tile:
        return divide(self, other)

    def __rtruediv__(self, other: Any) -> Tile:
        return divide(other, self)

    def __matmul__(self, other: Tile) -> Tile:
        return matmul(self, other)

    def __hash__(self) -> int:
        raise TileError("a tile is not hashable")


def common(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray, DType]:
    """Both operands of a binary operation in their common dtype; plain numbers adapt to the tile's."""
    if not isinstance(a, Tile) and not isinstance(b, Tile):
        raise TileError("one operand must be a tile")
    for x in (a, b):
        if not isinstance(x, Tile) and not is_scalar(x):
            raise TileError(f"a tile and a {type(x).__name__}")
    if isinstance(a, Tile) and isinstance(b, Tile):
        dtype = promote(a.dtype, b.dtype)
    else:
        tile, number = (a, b) if isinstance(a, Tile) else (b, a)
        dtype = tile.dtype
        if isinstance(number, float) and dtype.kind != "float":
            if dtype.kind == "restricted":
                raise TileError(f"{dtype} and a Python number")
            dtype = float32
        elif isinstance(number, int) and not isinstance(number, bool) and dtype.kind == "bool":
            dtype = int32
    arrays = [np.asarray(x.data if isinstance(x, Tile) else x).astype(dtype.numpy) for x in (a, b)]
    try:
        np.broadcast_shapes(arrays[0].shape, arrays[1].shape)
    except ValueError as e:
        raise TileError(str(e)) from None
    return arrays[0], arrays[1], dtype


def arithmetic(function: Any, a: Any, b: Any) -> Tile:
    x, y, dtype = common(a, b)
    if dtype.kind == "restricted":
        raise TileError(f"arithmetic on {dtype}")
    return Tile(function(x, y).astype(dtype.numpy), dtype)


def comparison(function: Any, a: Any, b: Any) -> Tile:
    x, y, _ = common(a, b)
    return Tile(function(x, y), bool_)


def bitwise(function: Any, a: Any, b: Any) -> Tile:
    x, y, dtype = common(a, b)
    if dtype.kind not in ("int", "uint", "bool"):
        raise TileError(f"bitwise operation on {dtype}")
    return Tile(function(x, y), dtype)


def divide(a: Any, b: Any) -> Tile:
    x, y, dtype = common(a, b)
    dtype = dtype if dtype.kind == "float" else float32
    return Tile(np.divide(x.astype(dtype.numpy), y.astype(dtype.numpy)), dtype)


def _operators() -> None:
    tables = (
        (
            arithmetic,
            {
                "add": np.add,
                "sub": np.subtract,
                "mul": np.multiply,
                "floordiv": np.floor_divide,
                "mod": np.mod,
                "pow": np.power,
            },
        ),
        (
            bitwise,
            {
                "and": np.bitwise_and,
                "or": np.bitwise_or,
                "xor": np.bitwise_xor,
                "lshift": np.left_shift,
                "rshift": np.right_shift,
            },
        ),
    )
    for apply, table in tables:
        for name, function in table.items():
            setattr(Tile, f"__{name}__", lambda a, b, f=function, g=apply: g(f, a, b))
            setattr(Tile, f"__r{name}__", lambda a, b, f=function, g=apply: g(f, b, a))
    for name, function in {
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "eq": np.equal,
        "ne": np.not_equal,
    }.items():
        setattr(Tile, f"__{name}__", lambda a, b, f=function: comparison(f, a, b))


_operators()


# ---------------------------------------------------------------------------------------------------------- arrays


@dataclass
class Memory:
    """One buffer: its elements, and who wrote each."""

    name: str
    data: np.ndarray  # flat
    owner: np.ndarray  # flat int64
    writable: bool

    @classmethod
    def operand(cls, name: str, value: np.ndarray, writable: bool = False) -> Memory:
        flat = np.array(value).reshape(-1)
        return cls(name, flat, np.full(flat.shape, BEFORE), writable)

    @classmethod
    def poisoned(cls, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Memory:
        return cls(name, np.full(math.prod(shape), garbage(dtype), dtype), np.full(math.prod(shape), NEVER), True)


def garbage(dtype: np.dtype) -> Any:
    return np.iinfo(dtype).min if dtype.kind in "iu" else False if dtype.kind == "b" else float("nan")


class Array:
    """A strided view of a Memory: what a kernel gets for an array parameter."""

    def __init__(self, memory: Memory, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0):
        self.memory, self.shape = memory, tuple(int(n) for n in shape)
        if strides is None:
            strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        self.strides, self.ndim = tuple(int(s) for s in strides), len(self.shape)
        last = offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if offset < 0 or (math.prod(self.shape) and last >= memory.data.size):
            raise TileError(f"view {self.shape} of {memory.name} reaches element {last} of {memory.data.size}")
        self.values, self.owner = self._view(memory.data, offset), self._view(memory.owner, offset)
        self.dtype = BY_NUMPY[memory.data.dtype]

    def _view(self, flat: np.ndarray, offset: int) -> np.ndarray:
        strides = [s * flat.itemsize for s in self.strides]
        return np.lib.stride_tricks.as_strided(flat[offset:], self.shape, strides)

    def permuted(self, order: Any) -> tuple[np.ndarray, np.ndarray]:
        if order == "C":
            return self.values, self.owner
        axes = tuple(range(self.ndim))[::-1] if order == "F" else tuple(order)
        return self.values.transpose(axes), self.owner.transpose(axes)

    def check_read(self, owner: np.ndarray) -> None:
        if (owner == NEVER).any():
            raise TileError(f"{self.memory.name}: an element that nobody has written is read")
        if ((owner >= 0) & (owner != GRID.block)).any():
            raise TileError(f"{self.memory.name}: an element that another block of this launch writes is read")

    def check_write(self, owner: np.ndarray) -> None:
        if not self.memory.writable:
            raise TileError(f"{self.memory.name}: an operand is written")
        if ((owner >= 0) & (owner != GRID.block)).any():
            raise TileError(f"{self.memory.name}: two blocks write one element")


class PaddingMode(Enum):
    UNDETERMINED = 0
    ZERO = 1
    NEG_ZERO = 2
    NAN = 3
    POS_INF = 4
    NEG_INF = 5


PADDING = {
    PaddingMode.ZERO: 0,
    PaddingMode.NEG_ZERO: -0.0,
    PaddingMode.NAN: math.nan,
    PaddingMode.POS_INF: math.inf,
    PaddingMode.NEG_INF: -math.inf,
}


def window(array: Array, index: Any, shape: tuple[int, ...], limits: tuple[int, ...]) -> tuple[list[slice], bool]:
    """The part of a tile that lies inside the array, as one slice per axis, and whether all of it does."""
    index = tuple(index) if isinstance(index, (tuple, list)) else (index,)
    index = tuple(i.__index__() for i in index)
    if not len(index) == len(shape) == len(limits):
        raise TileError(f"{array.memory.name}: rank {len(limits)}, index {index}, tile {shape}")
    if min(index, default=0) < 0:
        raise TileError(f"{array.memory.name}: negative tile index {index}")
    starts = [i * n for i, n in zip(index, shape, strict=True)]
    if max(starts, default=0) >= 2**31:
        raise TileError(f"{array.memory.name}: tile start {starts} passes 32 bits")
    stops = [min(s + n, limit) for s, n, limit in zip(starts, shape, limits, strict=True)]
    whole = all(b - a == n for a, b, n in zip(starts, stops, shape, strict=True))
    return [slice(min(a, limit), max(a, b)) for a, b, limit in zip(starts, stops, limits, strict=True)], whole


def load(
    array: Array,
    /,
    index: Any,
    shape: Any,
    *,
    order: Any = "C",
    padding_mode: Any = PaddingMode.UNDETERMINED,
    check_bounds: bool = True,
    latency: Any = None,
    allow_tma: Any = None,
    **_: Any,
) -> Tile:
    check_latency(latency)
    shape = check_shape(shape)
    values, owner = array.permuted(order)
    part, whole = window(array, index, shape, values.shape)
    inside = values[tuple(part)]
    if not whole and not check_bounds:
        raise TileError(f"{array.memory.name}: tile {index} of {shape} passes {values.shape} unchecked")
    if inside.size == 0 and padding_mode is PaddingMode.UNDETERMINED:
        raise TileError(f"{array.memory.name}: tile {index} of {shape} lies outside {values.shape}")
    array.check_read(owner[tuple(part)])
    out = np.full(shape, PADDING.get(padding_mode, garbage(values.dtype)), values.dtype)
    out[tuple(slice(0, n) for n in inside.shape)] = inside
    return Tile(out, array.dtype)


def as_stored(array: Array, tile: Any) -> Tile:
    tile = tile if isinstance(tile, Tile) else full((), tile, array.dtype)
    if promote(tile.dtype, array.dtype) != array.dtype:
        raise TileError(f"{array.memory.name}: a {tile.dtype} tile is stored in a {array.dtype} array without astype")
    return tile.astype(array.dtype)


def store(
    array: Array,
    /,
    index: Any,
    tile: Any,
    *,
    order: Any = "C",
    check_bounds: bool = True,
    latency: Any = None,
    allow_tma: Any = None,
    **_: Any,
) -> None:
    check_latency(latency)
    tile = as_stored(array, tile)
    values, owner = array.permuted(order)
    data = tile.data.reshape((1,) * array.ndim) if tile.ndim == 0 else tile.data
    part, whole = window(array, index, data.shape, values.shape)
    if not whole and not check_bounds:
        raise TileError(f"{array.memory.name}: tile {index} of {data.shape} passes {values.shape} unchecked")
    target = values[tuple(part)]
    if target.size == 0:
        raise TileError(f"{array.memory.name}: stored tile {index} of {data.shape} lies outside {values.shape}")
    array.check_write(owner[tuple(part)])
    target[...] = data[tuple(slice(0, n) for n in target.shape)]
    owner[tuple(part)] = GRID.block


def element_indices(array: Array, indices: Any, mask: Any, check_bounds: bool) -> tuple[list[np.ndarray], np.ndarray]:
    indices = indices if isinstance(indices, tuple) else (indices,)
    if len(indices) != array.ndim:
        raise TileError(f"{array.memory.name}: {len(indices)} indices for rank {array.ndim}")
    arrays = np.broadcast_arrays(*[i.data if isinstance(i, Tile) else np.asarray(i) for i in indices])
    if any(a.dtype.kind not in "iu" for a in arrays):
        raise TileError("gather and scatter indices are integers")
    inside = np.ones(arrays[0].shape, bool)
    if mask is not None:
        inside = inside & np.broadcast_to(mask.data if isinstance(mask, Tile) else mask, inside.shape)
    bounds = np.logical_and.reduce([(a >= 0) & (a < n) for a, n in zip(arrays, array.shape, strict=True)])
    if not check_bounds and (inside & ~bounds).any():
        raise TileError(f"{array.memory.name}: unchecked index out of bounds")
    inside = inside & bounds
    return [np.where(inside, a, 0) for a in arrays], inside


def gather(
    array: Array,
    indices: Any,
    /,
    *,
    mask: Any = None,
    padding_value: Any = 0,
    check_bounds: bool = True,
    latency: Any = None,
) -> Tile:
    where_, inside = element_indices(array, indices, mask, check_bounds)
    array.check_read(array.owner[tuple(where_)][inside])
    padding = padding_value.data if isinstance(padding_value, Tile) else padding_value
    values = np.where(inside, array.values[tuple(where_)], np.asarray(padding).astype(array.dtype.numpy))
    return Tile(values, array.dtype)


def scatter(
    array: Array, indices: Any, value: Any, /, *, mask: Any = None, check_bounds: bool = True, latency: Any = None
) -> None:
    where_, inside = element_indices(array, indices, mask, check_bounds)
    chosen = tuple(a[inside] for a in where_)
    array.check_write(array.owner[chosen])
    array.values[chosen] = np.broadcast_to(as_stored(array, value).data, inside.shape)[inside]
    array.owner[chosen] = GRID.block


def check_latency(latency: Any) -> None:
    if latency is not None and not 1 <= latency <= 10:
        raise TileError(f"latency {latency} is not in 1..10")


def num_tiles(array: Array, /, axis: int, shape: Any, order: Any = "C") -> int:
    return cdiv(array.permuted(order)[0].shape[axis], check_shape(shape)[axis])


# ------------------------------------------------------------------------------------------------------ operations


def ensure(x: Any) -> Tile:
    if isinstance(x, Tile):
        return x
    return full((), x, bool_ if isinstance(x, bool) else float32 if isinstance(x, float) else int32)


def full(shape: Any, fill_value: Any, dtype: DType) -> Tile:
    value = fill_value.data if isinstance(fill_value, Tile) else fill_value
    if np.ndim(value):
        raise TileError("full takes a scalar")
    return Tile(np.full(check_shape(shape), value, dtype.numpy), dtype)


def zeros(shape: Any, dtype: DType) -> Tile:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: DType) -> Tile:
    return full(shape, 1, dtype)


def arange(size: int, /, *, dtype: DType, start: int = 0, step: int = 1) -> Tile:
    return Tile(np.arange(*check_shape(size)) * step + start, dtype)


def mma(x: Tile, y: Tile, /, acc: Tile, *, use_fast_acc: bool = False) -> Tile:
    if x.dtype != y.dtype or acc.dtype not in MMA_ACCUMULATORS.get(x.dtype, ()):
        raise TileError(f"mma of {x.dtype}, {y.dtype} into {acc.dtype}")
    if min(x.ndim, y.ndim) < 2 or x.shape[-1] != y.shape[-2]:
        raise TileError(f"mma of {x.shape} and {y.shape}")
    product = np.matmul(x.data.astype(acc.dtype.numpy), y.data.astype(acc.dtype.numpy))
    if product.shape != acc.shape:
        raise TileError(f"mma: accumulator {acc.shape}, product {product.shape}")
    return Tile(product + acc.data, acc.dtype)


def matmul(x: Tile, y: Tile, /) -> Tile:
    dtype = promote(x.dtype, y.dtype)
    acc = MMA_ACCUMULATORS[dtype][0]
    shape = np.matmul(np.empty(x.shape), np.empty(y.shape)).shape
    return mma(x.astype(dtype), y.astype(dtype), zeros(shape, acc)).astype(dtype)


def expand_dims(x: Tile, /, axis: int) -> Tile:
    return Tile(np.expand_dims(x.data, axis), x.dtype)


def cat(tiles: Sequence[Tile], /, axis: int) -> Tile:
    a, b = tiles
    if a.shape != b.shape or a.dtype != b.dtype:
        raise TileError(f"cat of {a.dtype}{a.shape} and {b.dtype}{b.shape}")
    return Tile(np.concatenate([a.data, b.data], axis), a.dtype)


def broadcast_to(x: Tile, /, shape: Any) -> Tile:
    return Tile(np.broadcast_to(x.data, check_shape(shape)), x.dtype)


def where(cond: Any, x: Any, y: Any, /) -> Tile:
    cond, tiles = ensure(cond), (x, y)
    if isinstance(x, Tile) or isinstance(y, Tile):
        a, b, dtype = common(x, y)
    else:
        a, b = (ensure(t).data for t in tiles)
        dtype = promote(ensure(x).dtype, ensure(y).dtype)
    return Tile(np.where(cond.data.astype(bool), a, b).astype(dtype.numpy), dtype)


def subtile(x: Tile, index: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    index = tuple(i.__index__() for i in (index if isinstance(index, (tuple, list)) else (index,)))
    if len(index) != x.ndim or len(shape) != x.ndim or any(n % m for n, m in zip(x.shape, shape, strict=True)):
        raise TileError(f"subtile {shape} at {index} of a tile of shape {x.shape}")
    if any(not 0 <= i < n // m for i, n, m in zip(index, x.shape, shape, strict=True)):
        raise TileError(f"subtile index {index} outside a tile of shape {x.shape} cut by {shape}")
    return tuple(slice(i * m, (i + 1) * m) for i, m in zip(index, shape, strict=True))


def extract(x: Tile, /, index: Any, shape: Any) -> Tile:
    return Tile(x.data[subtile(x, index, check_shape(shape))], x.dtype)


def insert(x: Tile, /, index: Any, value: Tile) -> Tile:
    data = x.data.copy()
    data[subtile(x, index, value.shape)] = value.data
    return Tile(data, x.dtype)


def bitcast(x: Any, /, dtype: DType) -> Tile:
    return Tile(np.ascontiguousarray(ensure(x).data).view(dtype.numpy), dtype)


def float_function(function: Any) -> Any:
    def apply(x: Any, /, **_: Any) -> Tile:
        x = ensure(x)
        if x.dtype.kind != "float":
            raise TileError(f"{function.__name__} of {x.dtype}")
        return Tile(function(x.data).astype(x.dtype.numpy), x.dtype)

    return apply


def reduction(function: Any, nan_function: Any = None) -> Any:
    def apply(x: Tile, /, axis: Any = None, *, keepdims: bool = False, propagate_nan: bool = False, **_: Any) -> Tile:
        if x.dtype.kind == "bool":
            x = x.astype(int32)
        used = nan_function if nan_function is not None and not propagate_nan else function
        return Tile(np.asarray(used.reduce(x.data, axis=axis, keepdims=keepdims)).astype(x.dtype.numpy), x.dtype)

    return apply


def cumulation(function: Any) -> Any:
    def apply(x: Tile, /, axis: int = 0, *, reverse: bool = False, **_: Any) -> Tile:
        data = np.flip(x.data, axis) if reverse else x.data
        out = function.accumulate(data, axis=axis)
        return Tile((np.flip(out, axis) if reverse else out).astype(x.dtype.numpy), x.dtype)

    return apply


def extremum(function: Any, nan_function: Any) -> Any:
    def apply(x: Any, y: Any, /, *, propagate_nan: bool = False, **_: Any) -> Any:
        used = function if propagate_nan else nan_function
        if is_scalar(x) and is_scalar(y):
            return used(x, y).item()
        return arithmetic(used, x, y)

    return apply


def cdiv(x: Any, y: Any, /) -> Any:
    return -((-x) // y)


def bid(axis: int) -> int:
    return GRID.index[axis]


def num_blocks(axis: int) -> int:
    return GRID.size[axis]


def nothing(*_: Any, **__: Any) -> None:
    return None


def identity(x: Any, *_: Any) -> Any:
    return x


def static_assert(condition: bool, message: Any = None, /) -> None:
    if not condition:
        raise TileError(f"static assertion failed: {message}")


class ConstantAnnotation:
    pass


@dataclass(frozen=True, kw_only=True)
class ArrayAnnotation:
    index_dtype: DType = int32
    static_shape_dims: tuple[int, ...] = ()
    static_stride_dims: tuple[int, ...] = ()


class Kernel:
    """What the kernel decorator gives."""

    def __init__(self, function: Any, **hints: Any):
        self.function, self.hints, self.__name__ = function, hints, function.__name__
        self.parameters = inspect.signature(function, eval_str=True).parameters

    def replace_hints(self, **hints: Any) -> Kernel:
        return Kernel(self.function, **{**self.hints, **hints})

    def is_constant(self, name: str) -> bool:
        annotation = self.parameters[name].annotation
        return get_origin(annotation) is Annotated and any(
            isinstance(m, ConstantAnnotation) for m in annotation.__metadata__
        )


def decorator(make: Any) -> Any:
    def decorate(function: Any = None, /, **hints: Any) -> Any:
        return make(function, **hints) if function is not None else lambda f: make(f, **hints)

    return decorate


T = TypeVar("T")
Constant = Annotated[T, ConstantAnnotation()]
IndexedWithInt64 = Annotated[T, ArrayAnnotation(index_dtype=int64)]
ScalarInt64 = Annotated[T, "int64"]


def stand_in() -> types.ModuleType:
    """The module that the kernels import as cuda.tile."""
    names = (
        "load",
        "store",
        "gather",
        "scatter",
        "num_tiles",
        "full",
        "zeros",
        "ones",
        "arange",
        "mma",
        "matmul",
        "expand_dims",
        "cat",
        "broadcast_to",
        "where",
        "extract",
        "insert",
        "bitcast",
        "cdiv",
        "bid",
        "num_blocks",
        "static_assert",
        "Tile",
        "Array",
        "DType",
        "PaddingMode",
        "ArrayAnnotation",
        "Constant",
        "IndexedWithInt64",
        "ScalarInt64",
        *(dtype.name for dtype in (*DTYPES, tfloat32)),
    )
    table: dict[str, Any] = {name: globals()[name] for name in names}
    for name in ("exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "tan", "tanh", "floor", "ceil"):
        table[name] = float_function(getattr(np, name))
    for name in ("reshape", "permute", "transpose", "astype"):
        table[name] = lambda x, *args, _name=name, **kwargs: getattr(x, _name)(*args, **kwargs)
    for name in ("static_eval", "static_iter", "ensure_constant", "assume_divisible_by"):
        table[name] = identity
    for name in ("grid_dependency_control_wait", "grid_dependency_control_launch_dependents"):
        table[name] = nothing
    table |= {
        "rsqrt": float_function(lambda x: 1 / np.sqrt(x)),
        "abs": lambda x: Tile(np.abs(x.data), x.dtype),
        "negative": lambda x: -x,
        "isnan": lambda x: Tile(np.isnan(x.data), bool_),
        "sum": reduction(np.add),
        "prod": reduction(np.multiply),
        "max": reduction(np.maximum, np.fmax),
        "min": reduction(np.minimum, np.fmin),
        "maximum": extremum(np.maximum, np.fmax),
        "minimum": extremum(np.minimum, np.fmin),
        "cumsum": cumulation(np.add),
        "cumprod": cumulation(np.multiply),
        "kernel": decorator(Kernel),
        "function": decorator(lambda f, **_: f),
    }
    ct = types.ModuleType("cuda.tile")
    ct.__dict__.update(table)
    return ct


# ----------------------------------------------------------------------------------------------------- running


@dataclass
class Grid:
    """The launch that runs now."""

    size: tuple[int, int, int] = (1, 1, 1)
    index: tuple[int, int, int] = (0, 0, 0)
    block: int = 0


GRID = Grid()


@dataclass
class _Package:
    name: str = "emulated_kernels"
    modules: dict[str, types.ModuleType] = field(default_factory=dict)


_PACKAGE = _Package()


@contextmanager
def _cuda_tile_is(ct: types.ModuleType) -> Any:
    names = ("cuda", "cuda.tile")
    saved = {name: sys.modules.get(name) for name in names}
    cuda = types.ModuleType("cuda")
    cuda.__dict__["tile"] = ct
    sys.modules.update({"cuda": cuda, "cuda.tile": ct})
    try:
        yield
    finally:
        for name, module in saved.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def load_module(name: str) -> types.ModuleType:
    """A kernel module by name (forward, or jax_ssd.kernels.cutile.forward), loaded over the stand-in."""
    tail = name.split("kernels.")[-1] if "." in name else f"cutile.{name}"
    if tail not in _PACKAGE.modules:
        if _PACKAGE.name not in sys.modules:
            root = types.ModuleType(_PACKAGE.name)
            root.__path__ = [str(KERNELS)]
            sys.modules[_PACKAGE.name] = root
        with _cuda_tile_is(stand_in()) if not _PACKAGE.modules else _cuda_tile_is(_PACKAGE.modules["ct"]):
            _PACKAGE.modules.setdefault("ct", sys.modules["cuda.tile"])
            _PACKAGE.modules[tail] = importlib.import_module(f"{_PACKAGE.name}.{tail}")
    return _PACKAGE.modules[tail]


def launch(kernel: Kernel, grid: Sequence[int], arguments: Sequence[Any], seed: int | None = None) -> None:
    """Runs every block of one launch: in order, or shuffled by seed."""
    if len(arguments) != len(kernel.parameters):
        raise TileError(f"{kernel.__name__}: {len(kernel.parameters)} parameters, {len(arguments)} arguments")
    for argument in arguments:
        if isinstance(argument, Array):
            owner = argument.memory.owner
            owner[owner >= 0] = BEFORE
    x, y, z = (*grid, 1, 1)[:3]
    if y > 65535 or z > 65535:
        raise TileError(f"{kernel.__name__}: grid {grid} passes 65,535 on y or z")
    blocks = list(range(x * y * z))
    if seed is not None:
        random.Random(seed).shuffle(blocks)
    GRID.size = (x, y, z)
    with np.errstate(all="ignore"):
        for block in blocks:
            GRID.block, GRID.index = block, (block % x, block // x % y, block // (x * y))
            kernel.function(*arguments)


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _memories(plan: Any, operands: Mapping[str, np.ndarray]) -> dict[str, Memory]:
    memories: dict[str, Memory] = {}
    if set(operands) != {b.name for b in plan.operands}:
        raise TileError(f"{plan.name}: operands {sorted(b.name for b in plan.operands)}, given {sorted(operands)}")
    for buffer in plan.operands:
        value = np.asarray(operands[buffer.name])
        if value.shape != tuple(buffer.shape) or value.dtype != numpy_dtype(buffer.dtype):
            raise TileError(
                f"{plan.name}: {buffer.name} is {buffer.dtype}{tuple(buffer.shape)}, given {value.dtype}{value.shape}"
            )
        memories[buffer.name] = Memory.operand(buffer.name, value)
    for operand, result in plan.aliases.items():
        shared = Memory.operand(result, operands[operand], writable=True)
        memories[operand] = memories[result] = shared
    for buffer in (*plan.results, *plan.scratch):
        if buffer.name not in memories:
            memories[buffer.name] = Memory.poisoned(buffer.name, tuple(buffer.shape), numpy_dtype(buffer.dtype))
    return memories


def _argument(kernel: Kernel, parameter: str, argument: Any, plan: Any, memories: Mapping[str, Memory]) -> Any:
    constant = not hasattr(argument, "buffer") and not hasattr(argument, "dtype")
    if constant != kernel.is_constant(parameter):
        raise TileError(f"{kernel.__name__}: {parameter} and {argument} disagree on being constant")
    if hasattr(argument, "buffer"):
        memory = memories[argument.buffer]
        buffers = {b.name: b for b in (*plan.operands, *plan.results, *plan.scratch)}
        shape = buffers[argument.buffer].shape if argument.shape is None else argument.shape
        return Array(memory, shape, argument.strides, argument.offset or 0)
    if not constant and numpy_dtype(argument.dtype).kind == "f":
        return full((), argument.value, BY_NUMPY[numpy_dtype(argument.dtype)])
    return argument.value


def run(
    plan: Any, operands: Mapping[str, np.ndarray] | Sequence[np.ndarray], seed: int | None = 0
) -> dict[str, np.ndarray]:
    """Executes a plan on numpy operands; the results by name."""
    if not isinstance(operands, Mapping):
        operands = {b.name: v for b, v in zip(plan.operands, operands, strict=True)}
    memories = _memories(plan, operands)
    for step in plan.launches:
        kernel = getattr(load_module(step.kernel.module), step.kernel.function)
        if len(step.arguments) != len(kernel.parameters):
            raise TileError(f"{kernel.__name__}: parameters {list(kernel.parameters)}, {len(step.arguments)} arguments")
        arguments = [
            _argument(kernel, p, a, plan, memories) for p, a in zip(kernel.parameters, step.arguments, strict=True)
        ]
        launch(kernel, step.grid, arguments, seed)
    for buffer in plan.results:
        missing = int((memories[buffer.name].owner == NEVER).sum())
        if missing:
            raise TileError(f"{plan.name}: {missing} elements of {buffer.name} are never written")
    return {b.name: memories[b.name].data.reshape(b.shape) for b in plan.results}
