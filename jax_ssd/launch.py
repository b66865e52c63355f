"""A launch plan as one XLA custom call: checked, compiled and encoded for the C++ handler.

plan = Plan("scale", (Buffer("x", (64, 128), "bfloat16"),), (Buffer("y", (64, 128), "bfloat16"),), (),
            (Launch(CuTileKernel("scale", "scale"), (64, 1, 1), (ArrayArg("x"), ArrayArg("y"), ConstantArg(128))),))
(y,) = call(plan, "sm_90", x)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jax_ssd import ffi_targets
from jax_ssd.plans import (
    L2_PROMOTIONS,
    MAX_SHARED_MEMORY,
    SWIZZLES,
    TENSOR_MAP_TYPES,
    XLA_TYPES,
    ArrayArg,
    Buffer,
    ConstantArg,
    Launch,
    Plan,
    Pointer,
    ScalarArg,
    TensorMapArg,
)
from jax_ssd.specs import CudaKernel, CuTileKernel, KernelSource

if TYPE_CHECKING:
    from jax_ssd.compile import Cubin

__all__ = [
    "ArrayArg",
    "Buffer",
    "ConstantArg",
    "CuTileKernel",
    "CudaKernel",
    "KernelSource",
    "Launch",
    "Plan",
    "ScalarArg",
    "TensorMapArg",
    "call",
    "encode",
    "runner",
]

_PLAN_VERSION = 1
_POINTER, _CONSTANT, _TENSOR_MAP = range(3)
RESERVED_SHARED_MEMORY = 1024  # bytes that compilers count as static from sm_90 on, beside what a block can get
_PROGRAMMATIC_DEPENDENT_LAUNCH = 1


def call(plan: Plan, arch: str | None, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Run `plan` on arrays of its operands' shapes and dtypes, inside or outside of jit; one custom call.

    arch: what to compile for, as in "sm_90"; None for that of the settings or of the GPUs here.
    Raises what `runner` raises.
    """
    return runner(plan, arch)(*operands)


def runner(plan: Plan, arch: str | None = None) -> Callable[..., tuple[jax.Array, ...]]:
    """Check and compile `plan` now, and return the function from its operands to its results.

    Raises:
      NotImplementedError: no architecture to compile for, no compiler, no extension, or a limit of the architecture.
      ValueError: the plan contradicts itself, or the compiled kernels do not take the arguments that it passes.
    """
    from jax_ssd import compile as kernels  # the cache and the compilers are needed from here on only

    arch = kernels.target_arch() if arch is None else arch
    plan.check(arch)
    ffi_targets.register()
    requests = [(launch.kernel, plan.compile_arguments(launch)) for launch in plan.launches]
    attributes = encode(plan, kernels.compile_launches(requests, arch))
    return lambda *operands: _custom_call(plan, attributes, operands)


def encode(plan: Plan, cubins: Sequence[Cubin]) -> dict[str, np.ndarray]:
    """The attributes of the custom call, from a checked plan and the cubin of each launch.

    Both are arrays of uint8, which XLA writes as hexadecimal digits where it would escape a string at greater length.
    The layout of "plan" is written down in ffi/plan.h; "cubins" holds each distinct cubin once.
    """
    _check_cubins(plan, cubins)
    distinct = {cubin.digest: cubin for cubin in cubins}
    numbers = {digest: number for number, digest in enumerate(distinct)}
    parts = [b"JSSD", _u32(_PLAN_VERSION), _string(plan.name)]
    for group in (plan.operands, (*plan.results, *plan.scratch)):
        parts += [_u32(len(group)), *map(_encode_buffer, group)]
    parts.append(_u32(len(distinct)))
    offset = 0
    for cubin in distinct.values():
        parts += [_string(cubin.digest), _u64(offset, len(cubin.data))]
        offset += len(cubin.data)
    parts.append(_u32(len(plan.launches)))
    for launch, cubin in zip(plan.launches, cubins, strict=True):
        parts += [
            _u32(numbers[cubin.digest]),
            _string(cubin.symbol),
            _u32(*launch.grid, *launch.block, *(launch.cluster or (0, 0, 0)), launch.shared_memory),
            _u32(_PROGRAMMATIC_DEPENDENT_LAUNCH if launch.pdl else 0),
        ]
        parameters = plan.parameters(launch)
        parts += [_u32(len(parameters)), *(_encode_parameter(plan, parameter) for parameter in parameters)]
    return {
        "plan": np.frombuffer(b"".join(parts), np.uint8),
        "cubins": np.frombuffer(b"".join(cubin.data for cubin in distinct.values()), np.uint8),
    }


def _custom_call(
    plan: Plan, attributes: dict[str, np.ndarray], operands: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    _check_operands(plan, operands)
    outputs = [jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in (*plan.results, *plan.scratch)]
    operand_numbers, result_numbers = (
        {buffer.name: number for number, buffer in enumerate(group)} for group in (plan.operands, plan.results)
    )
    launch = jax.ffi.ffi_call(
        ffi_targets.LAUNCH,
        outputs,
        input_output_aliases={operand_numbers[name]: result_numbers[to] for name, to in plan.aliases.items()},
    )
    return tuple(launch(*operands, **attributes)[: len(plan.results)])


def _check_operands(plan: Plan, operands: tuple[jax.Array, ...]) -> None:
    expected = [(buffer.shape, buffer.dtype) for buffer in plan.operands]
    got = [(operand.shape, operand.dtype.name) for operand in operands]
    if got != expected:
        raise ValueError(f"plan {plan.name}: expected operands {expected}, got {got}")


def _check_cubins(plan: Plan, cubins: Sequence[Cubin]) -> None:
    """That each compiled kernel fits its architecture and takes exactly the parameters that the plan passes."""
    for launch, cubin in zip(plan.launches, cubins, strict=True):
        where = f"plan {plan.name}, kernel {launch.name}"
        reserved = RESERVED_SHARED_MEMORY if int(cubin.arch.removeprefix("sm_")) >= 90 else 0
        most, static = MAX_SHARED_MEMORY[cubin.arch], max(0, cubin.shared_memory - reserved)
        if launch.shared_memory + static > most:
            raise NotImplementedError(
                f"{where}: {launch.shared_memory:,} bytes of dynamic and {static:,} of static shared memory, at most "
                f"{most:,} are possible on {cubin.arch}"
            )
        passed = plan.parameter_sizes(launch)
        taken = [size for _, size in cubin.parameters]
        if passed != taken:
            raise ValueError(f"{where}: it takes parameters of {taken} bytes, the plan passes {passed}")


def _encode_parameter(plan: Plan, parameter: Pointer | bytes | TensorMapArg) -> bytes:
    if isinstance(parameter, bytes):
        return _u32(_CONSTANT) + _string(parameter)
    number = list(plan.buffers).index(parameter.buffer)
    if isinstance(parameter, Pointer):
        return _u32(_POINTER, number) + _u64(parameter.offset)
    offset = parameter.offset * plan.buffers[parameter.buffer].itemsize
    return _u32(_TENSOR_MAP, number) + _u64(offset) + _encode_tensor_map(plan, parameter)


def _encode_buffer(buffer: Buffer) -> bytes:
    header = _string(buffer.name) + _u32(XLA_TYPES[buffer.dtype], len(buffer.shape))
    return header + struct.pack(f"<{len(buffer.shape)}q", *buffer.shape)


def _encode_tensor_map(plan: Plan, argument: TensorMapArg) -> bytes:
    """CUDA counts dimensions from the innermost, which has no stride of its own."""
    buffer = plan.buffers[argument.buffer]
    shape, strides = plan.view(argument)
    byte_strides = [stride * buffer.itemsize for stride in strides[:-1]]
    return b"".join(
        [
            _u32(TENSOR_MAP_TYPES[buffer.dtype], len(shape)),
            _u64(*reversed(shape)),
            _u64(*reversed(byte_strides)),
            _u32(*reversed(argument.box)),
            _u32(*[1] * len(shape)),
            _u32(0, SWIZZLES[argument.swizzle], L2_PROMOTIONS[argument.l2_promotion], 0),
        ]
    )


def _u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def _u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def _string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return _u32(len(data)) + data
