"""Runs launch plans of CUDA C++ kernels on the CPU: the kernels' own source, compiled by the C++ compiler.

Inline PTX becomes calls of an interpreter of the instructions that are used (cuda_emulator.h); threads of a block are
fibers that run in a random order between barriers. It shows what a kernel computes, and a missing barrier with some
luck. It cannot see what a compiler or a GPU does.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jax_ssd import sources
from jax_ssd.plans import Launch, Plan, Pointer
from jax_ssd.specs import CudaKernel

_HEADER, _WGMMA = (Path(__file__).with_name(name) for name in ("cuda_emulator.h", "cuda_emulator_wgmma.h"))


def missing() -> str | None:
    """What keeps kernels from being emulated here, or None."""
    return "no g++" if shutil.which("g++") is None else None


def run(plan: Plan, operands: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The results of a plan. Results and scratch start as bytes of ones, but those written in place of an operand."""
    memory = {}
    for buffer in plan.operands:
        array = np.ascontiguousarray(operands[buffer.name])
        assert (array.shape, array.dtype.name) == (buffer.shape, buffer.dtype), buffer
        memory[buffer.name] = _aligned(array)
    for buffer in (*plan.results, *plan.scratch):
        ones = np.frombuffer(b"\xff" * buffer.nbytes, np.uint8).view(jnp.dtype(buffer.dtype))
        memory[buffer.name] = _aligned(ones.reshape(buffer.shape))
    for operand, result in plan.aliases.items():
        memory[result] = memory[operand]
    for launch in plan.launches:
        assert isinstance(launch.kernel, CudaKernel)
        _start(plan, launch, _library(launch.kernel), memory)
    return [memory[buffer.name] for buffer in plan.results]


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy whose address is a multiple of 128."""
    raw = np.empty(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _start(plan: Plan, launch: Launch, library: ctypes.CDLL, memory: Mapping[str, np.ndarray]) -> None:
    values = []
    for parameter in plan.parameters(launch):
        if isinstance(parameter, Pointer):
            values.append(ctypes.c_uint64(memory[parameter.buffer].ctypes.data + parameter.offset))
        else:
            assert isinstance(parameter, bytes), "no tensor maps"
            values.append(ctypes.create_string_buffer(parameter, len(parameter)))
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    assert launch.block[1:] == (1, 1)
    threads, memory_bytes, seed = map(ctypes.c_uint, (launch.block[0], launch.shared_memory, 1))
    library.start((ctypes.c_uint * 3)(*launch.grid), threads, memory_bytes, pointers, seed)


@functools.cache
def _library(kernel: CudaKernel) -> ctypes.CDLL:
    # The emulator has types and warpgroup products of its own.
    texts = {"cuda_bf16.h": "", "cuda_fp16.h": "", "wgmma.cuh": _WGMMA.read_text()}
    texts |= {n: without_ptx(text) for n, text in sources.cuda_sources(kernel.file).items() if n not in texts}
    folder = Path(tempfile.mkdtemp(prefix="cuda_emulator_"))
    for name, text in texts.items():
        (folder / name).write_text(text)
    entry = f"""#include "{_HEADER}"
#include "{kernel.file}"
extern "C" void start(const unsigned* grid, unsigned threads, unsigned bytes, void** arguments, unsigned seed) {{
  emulator::launch({kernel.name_expression}, grid, threads, bytes, arguments, seed);
}}
"""
    (folder / "entry.cc").write_text(entry)
    library = folder / f"{hashlib.sha256(entry.encode()).hexdigest()[:16]}.so"
    command = ["g++", "-std=c++20", "-O2", "-w", "-shared", "-fPIC", f"-I{folder}", *kernel.options]
    done = subprocess.run([*command, "-o", str(library), str(folder / "entry.cc")], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[:6000])
    return ctypes.CDLL(str(library))


def without_ptx(text: str) -> str:
    """A source in which each `asm` statement is a call of the interpreter."""
    text = text.replace("#pragma unroll", "//")
    text = re.sub(r"(?<!extern )__shared__", "static", text)  # fibers share what a thread of the machine has
    result, position = [], 0
    for found in re.finditer(r"\basm(?:\s+volatile)?\s*\(", text):
        if found.start() < position:
            continue
        end = _closing(text, found.end() - 1)
        result += [text[position : found.start()], _call(text[found.end() : end])]
        position = end + 1
    return "".join((*result, text[position:]))


def _call(statement: str) -> str:
    sections = _split(statement, ":")
    template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', sections[0]))
    outputs, inputs = (_split(s, ",") if s.strip() else [] for s in (*sections[1:3], "", "")[:2])
    if not outputs and not inputs:
        inputs = ['"n"(0)']
    operands = [f"emulator::out{_expression(o)}" for o in outputs] + [f"emulator::in{_expression(i)}" for i in inputs]
    return (
        f'{{ static const emulator::Opcode code_ = emulator::opcode("{template}"); '
        f"const emulator::Operand operands_[] = {{{', '.join(operands)}}}; "
        f"emulator::execute<{len(outputs)}>(code_, operands_); }}"
    )


def _expression(operand: str) -> str:
    return operand[operand.index("(", operand.index('"', operand.index('"') + 1)) :]


def _closing(text: str, opening: int) -> int:
    depth, in_string = 0, False
    for i in range(opening, len(text)):
        if text[i] == '"' and text[i - 1] != "\\":
            in_string = not in_string
        elif not in_string:
            depth += (text[i] == "(") - (text[i] == ")")
            if depth == 0:
                return i
    raise ValueError("an asm statement without an end")


def _split(text: str, separator: str) -> list[str]:
    parts, depth, in_string = [""], 0, False
    for c in text:
        if c == '"':
            in_string = not in_string
        depth += 0 if in_string else (c == "(") - (c == ")")
        if c == separator and depth == 0 and not in_string:
            parts.append("")
        else:
            parts[-1] += c
    return parts
