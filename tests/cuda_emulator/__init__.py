"""Runs the CUDA C++ kernels of a launch plan on the CPU, so that a CPU test runs the very code that a GPU runs.

`run(plan, operands)` compiles the kernels' own source with g++ and runs every launch of the plan, block by block, with
threads as fibers. Inline PTX becomes calls of functions that do what the instruction does (instructions.h), matrix
descriptors, swizzles and tensor maps are decoded bit by bit. It is stricter than a GPU where that finds mistakes:

- results, scratch and shared memory start as NaNs; memory before and after each buffer cannot be touched, and what
  lies outside of a block's shared memory must not be written;
- a copy or a product that runs beside the threads (TMA, cp.async, wgmma) happens when it is waited for, and what it is
  to bring is NaN from its issue on; it sees of shared memory what was written before a proxy fence (of any thread);
- threads run in a random order between the points where they wait for each other;
- a deadlock, lanes of a warp that meet in different instructions, addresses that are not aligned, too many arrivals at
  a barrier, and threads or blocks that end before their copies have, all raise.

What it does not see: other missing fences, what a compiler does, how long anything takes. Blocks start in order and
stay resident, as many as there are.
"""

from __future__ import annotations

import platform
import shutil
import struct
import threading
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jax_ssd.plans import Launch, Plan, Pointer, TensorMapArg
from jax_ssd.specs import CudaKernel
from tests.cuda_emulator.build import Kernel, compiled
from tests.cuda_emulator.memory import Guarded

_MAP_MAGIC = 0x7A6D6170
_one_at_a_time = threading.Lock()


class EmulatorError(Exception):
    """The kernel does something that is undefined, or does not end, on a GPU."""


def missing() -> str | None:
    """What keeps kernels from being emulated here, or None."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"fibers.h switches stacks of x86-64, this is {platform.machine()}"
    return None if shutil.which("g++") else "g++ is not installed"


def run(plan: Plan, operands: Mapping[str, np.ndarray] | Sequence[np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """Executes a plan of CUDA C++ kernels on numpy operands; the results by name."""
    if not isinstance(operands, Mapping):
        operands = {b.name: v for b, v in zip(plan.operands, operands, strict=True)}
    kernels = [launch.kernel for launch in plan.launches if isinstance(launch.kernel, CudaKernel)]
    assert len(kernels) == len(plan.launches), "cuTile kernels are for tests/tile_emulator.py"
    libraries = compiled(kernels)
    with _one_at_a_time:
        memories = {}
        for buffer in (*plan.results, *plan.scratch):
            memories[buffer.name] = Guarded(buffer.shape, jnp.dtype(buffer.dtype))
        for buffer in plan.operands:
            value = np.asarray(operands[buffer.name])
            assert (value.shape, value.dtype.name) == (buffer.shape, buffer.dtype), (buffer, value.shape, value.dtype)
            if buffer.name in plan.aliases:
                memories[buffer.name] = memories[plan.aliases[buffer.name]]
            else:
                memories[buffer.name] = Guarded(buffer.shape, jnp.dtype(buffer.dtype))
            memories[buffer.name].array[...] = value
        before = {b.name: memories[b.name].array.copy() for b in plan.operands if b.name not in plan.aliases}
        for launch, kernel, library in zip(plan.launches, kernels, libraries, strict=True):
            _run(plan, launch, library.kernel(kernel.name_expression), memories, seed)
        for name, value in before.items():
            if value.tobytes() != memories[name].array.tobytes():
                raise EmulatorError(f"plan {plan.name}: the operand {name} was written")
        return {b.name: memories[b.name].array.copy() for b in plan.results}


def _run(plan: Plan, launch: Launch, kernel: Kernel, memories: Mapping[str, Guarded], seed: int) -> None:
    parameters = []
    for parameter in plan.parameters(launch):
        if isinstance(parameter, Pointer):
            parameters.append(struct.pack("<Q", memories[parameter.buffer].address + parameter.offset))
        elif isinstance(parameter, TensorMapArg):
            parameters.append(_tensor_map(plan, parameter, memories[parameter.buffer].address))
        else:
            parameters.append(parameter)
    cluster, *others = launch.cluster or (1, 1, 1)
    if others != [1, 1]:
        raise EmulatorError(f"kernel {launch.name}: clusters along x only, got {launch.cluster}")
    error = kernel.launch(launch.grid, launch.block, launch.shared_memory, cluster, parameters, seed)
    if error:
        raise EmulatorError(f"plan {plan.name}, kernel {launch.name}: {error}")
    for name, memory in memories.items():
        if not memory.intact():
            raise EmulatorError(f"plan {plan.name}, kernel {launch.name}: it wrote before or after the buffer {name}")


def _tensor_map(plan: Plan, argument: TensorMapArg, address: int) -> bytes:
    """`Map` of copies.h: innermost dimension first."""
    shape, strides = plan.view(argument)
    itemsize = plan.buffers[argument.buffer].itemsize
    rank = len(shape)
    fill = [0] * (5 - rank)
    if argument.swizzle and argument.box[-1] * itemsize > argument.swizzle:
        raise EmulatorError(
            f"a box of {argument.box[-1]} elements is wider than its swizzle of {argument.swizzle} bytes"
        )
    return struct.pack(
        "<QIBBH5Q5I5H",
        address + argument.offset * itemsize,
        _MAP_MAGIC,
        rank,
        itemsize,
        argument.swizzle,
        *(stride * itemsize for stride in reversed(strides)),
        *fill,
        *reversed(shape),
        *fill,
        *reversed(argument.box),
        *fill,
    ).ljust(128, b"\0")
