"""CUDA C++ into C++: inline PTX becomes calls, shared memory becomes memory of the block. Lines keep their numbers."""

from __future__ import annotations

import re
from pathlib import Path

# Headers that put their instructions together by macros, from which line on they are replaced by the file of the name.
_MACROS = {
    "wgmma.cuh": "template <typename T, int N>\nstruct Wgmma;",
    "wgmma_tf32.cuh": "template <int N>\nstruct WgmmaTf32;",
}
_TYPE = r"((?:(?:unsigned|signed|long|short|int|char)\s+)+|[\w:]+\s+)"
_ALIGN = r"(?:__align__\((\d+)\)\s*)?"
_DYNAMIC = re.compile(rf"\bextern\s+__shared__\s+{_ALIGN}{_TYPE}(\w+)\[\];")
_SHARED = re.compile(rf"\b__shared__\s+{_ALIGN}{_TYPE}([^;]+);")


def translated(name: str, text: str) -> str:
    """The text of a kernel source or header as C++."""
    if name in _MACROS:
        head, found, _ = text.partition(_MACROS[name])
        if not found:
            raise ValueError(f"{name} does not declare {_MACROS[name]!r}")
        text = head + Path(__file__).with_name(name).read_text()
    text = _DYNAMIC.sub(r"\2* const \3 = reinterpret_cast<\2*>(emulator::dynamic_shared());", text)
    text = _SHARED.sub(_static_shared, text)
    parts, end = [], 0
    for found in re.finditer(r"\basm\s*(?:volatile\s*)?\(", text):
        parts.append(text[end : found.start()])
        end = _closing(text, found.end() - 1) + 1
        statement = text[found.end() : end - 1]
        parts.append(_call(statement) + "\n" * statement.count("\n"))
    return "".join(parts) + text[end:]


def _static_shared(found: re.Match[str]) -> str:
    alignment, kind, declarators = found[1] or "4", found[2], found[3]
    names = [d.split("[")[0].strip() for d in _split(declarators, ",")]
    struct = f"Shared_{names[0]}"
    references = " ".join(f"auto& {name} = {names[0]}_shared.{name};" for name in names)
    members = " ".join(f"alignas({alignment}) alignas({kind}) {kind} {d.strip()};" for d in _split(declarators, ","))
    variables = f"{struct}& {names[0]}_shared = emulator::static_shared<{struct}>();"
    return f"struct {struct} {{ {members} }}; {variables} {references}"


def _call(statement: str) -> str:
    """`"mnemonic operands;" : outputs : inputs : clobbers` as a call."""
    template, *lists = _split(statement, ":")
    instruction = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template)).replace("\\n", "\n").strip()
    if not instruction:
        return "(void)0"
    expressions = [_expression(operand) for part in lists[:2] if part.strip() for operand in _split(part, ",")]
    waiting = re.search(r"(\w+):\s*(mbarrier\.try_wait[\w.:]*)\s+(\w+),\s*([^;]+);\s*@!\3\s+bra\s+\1;", instruction)
    if waiting:
        mnemonic, text = waiting[2], waiting[4]
    else:
        mnemonic, _, text = instruction.rstrip("; ").partition(" ")
        if ";" in text or not re.fullmatch(r"[a-z][\w.:]*", mnemonic):
            raise ValueError(f"inline PTX that the emulator does not read: {instruction}")
    arguments = []
    for operand in re.findall(r"%\d+|-?\b\d+\b|\b_\b|[A-Za-z]\w*", text):
        if operand == "_":
            continue  # a result that is not wanted
        if operand.startswith("%"):
            arguments.append(expressions[int(operand[1:])])
        elif operand.lstrip("-").isdigit():
            arguments.append(operand)
        else:
            raise ValueError(f"inline PTX that the emulator does not read: {instruction}")
    return f"emulator::ptx::{re.sub(r'[.:]+', '_', mnemonic)}({', '.join(arguments)})"


def _expression(operand: str) -> str:
    """Of `"r"(value)`."""
    return operand[operand.index("(") :].strip()


def _closing(text: str, opening: int) -> int:
    depth, quoted = 0, False
    for i in range(opening, len(text)):
        if text[i] == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (text[i] == "(") - (text[i] == ")")
            if depth == 0:
                return i
    raise ValueError("an asm statement without an end")


def _split(text: str, separator: str) -> list[str]:
    """At separators outside of strings and brackets; `::` in an expression's brackets or strings is none."""
    parts, depth, quoted = [""], 0, False
    for c in text:
        if c == '"':
            quoted = not quoted
        elif not quoted:
            depth += (c in "([{") - (c in ")]}")
        if c == separator and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += c
    return parts
