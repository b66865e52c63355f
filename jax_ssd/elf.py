"""Reads from a cubin (an ELF file) what a launch needs to know about a kernel: shared memory, registers, parameters."""

from __future__ import annotations

import struct
from dataclasses import dataclass

# Attribute codes of the .nv.info sections, as in CUDA's `cuobjdump -elf`.
_FORMAT_SIZED = 4
_KERNEL_PARAMETER = 0x17
_KERNEL_PARAMETER_V2 = 0x45
_REGISTER_COUNT = 0x2F


@dataclass(frozen=True)
class KernelInfo:
    """shared_memory: static bytes per block. parameters: (offset, bytes) of each kernel parameter, in order."""

    shared_memory: int
    registers: int
    parameters: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Section:
    name: str
    data: bytes
    size: int
    info: int


def kernel_info(cubin: bytes, symbol: str) -> KernelInfo:
    """The figures of one kernel. Raises ValueError if `cubin` is not a cubin or has no kernel of that name."""
    try:
        sections = _sections(cubin)
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise ValueError(f"not a cubin: {error}") from error
    text = sections.get(f".text.{symbol}")
    if text is None:
        kernels = sorted(name.removeprefix(".text.") for name in sections if name.startswith(".text."))
        raise ValueError(f"no kernel {symbol!r} in the cubin; it has {', '.join(kernels) or 'none'}")
    shared = sections.get(f".nv.shared.{symbol}")
    return KernelInfo(
        shared_memory=shared.size if shared else 0,
        registers=_registers(sections, text),
        parameters=_parameters(sections.get(f".nv.info.{symbol}")),
    )


def _sections(elf: bytes) -> dict[str, _Section]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit little-endian ELF header")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    found = {}
    for name_offset, kind, _, _, offset, size, _, info, _, _ in headers:
        start = names + name_offset
        name = elf[start : elf.index(b"\0", start)].decode()
        without_data = kind == 8  # SHT_NOBITS: a size, but nothing in the file
        found[name] = _Section(name, b"" if without_data else elf[offset : offset + size], size, info)
    return found


def _attributes(section: _Section | None) -> list[tuple[int, bytes]]:
    data, attributes, at = section.data if section else b"", [], 0
    while at + 4 <= len(data):
        form, code, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _FORMAT_SIZED:
            attributes.append((code, data[at : at + value]))
            at += value
    return attributes


def _registers(sections: dict[str, _Section], text: _Section) -> int:
    symbol_index = text.info & 0xFFFFFF
    for code, value in _attributes(sections.get(".nv.info")):
        if code == _REGISTER_COUNT and len(value) == 8:
            index, count = struct.unpack("<II", value)
            if index == symbol_index:
                return count
    return text.info >> 24  # where older compilers keep it


def _parameters(section: _Section | None) -> tuple[tuple[int, int], ...]:
    found = {}
    for code, value in _attributes(section):
        if code in (_KERNEL_PARAMETER, _KERNEL_PARAMETER_V2) and len(value) == 12:
            _, ordinal, offset, size_and_flags = struct.unpack("<IHHI", value)
            size = size_and_flags >> 18 if code == _KERNEL_PARAMETER else size_and_flags & 0xFFFF
            found[ordinal] = (offset, size)
    return tuple(found[ordinal] for ordinal in sorted(found))
