"""Operands: pieces of one row that every framework gets bit for bit, and random fill for everything else.

The checked pieces are generated with numpy and planted in the last row of the batch (an address that overflows goes
wrong there first): the whole of a short row, the first and the last tokens of a long one. The token before the last
piece adds nothing to the state and lets all of it decay, so that float64 can take a piece by itself whatever lies
between. The rest only has to look like real data; each framework draws it on its own device.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks import mamba3
from benchmarks.cases import Case

Arrays = dict[str, np.ndarray]
PARAMETERS = ("A", "dt_bias", *mamba3.PARAMETERS)  # operands without a batch axis
PIECE = {"mamba2": 2048, "mamba3": 512}  # tokens of a piece; the reference of Mamba-3 goes token by token
RESET = 64.0  # the step or negative decay of the token that lets a state decay: nothing of it is left in float32


def operand_names(case: Case) -> tuple[str, ...]:
    """Names in call order: x, dt, A, B, C, D and, with softplus, dt_bias; Mamba-3's own."""
    if case.rank:
        return mamba3.operand_names(case)
    return ("x", "dt", "A", "B", "C", "D") + (("dt_bias",) if case.softplus else ())


def shapes(case: Case, batch: int | None = None) -> dict[str, tuple[int, ...]]:
    """Shape of every operand, of dy and of the step's state."""
    if case.rank:
        return mamba3.shapes(case, batch)
    rows = case.batch if batch is None else batch
    bc = (rows, case.seq, case.groups, case.state)
    wide = (rows, case.seq, case.heads, case.head_dim)
    per_head = (case.heads,)
    named = {"x": wide, "dt": wide[:3], "A": per_head, "B": bc, "C": bc, "D": per_head, "dt_bias": per_head, "dy": wide}
    return named | {"state_in": (rows, case.heads, case.head_dim, case.state)}


def dtypes(case: Case) -> dict[str, str]:
    if case.rank:
        return mamba3.dtypes(case)
    full = ("dt", "A", "D", "dt_bias", "state_in")
    return {name: "float32" if name in full else case.dtype for name in shapes(case)}


def numpy_dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def pieces(case: Case) -> list[slice]:
    """The tokens that are compared. Of a packed row they lie in its first and in its last sequence."""
    size = min(PIECE["mamba3" if case.rank else "mamba2"], case.seq // case.sequences)
    if case.seq <= 2 * size:
        return [slice(0, case.seq)]
    return [slice(0, size), slice(case.seq - size, case.seq)]


def token_axis(case: Case, name: str) -> int | None:
    """Where an operand, dy or y has its tokens, the batch being axis 0; None for what has none."""
    if name in PARAMETERS or name.startswith("state_"):
        return None
    return 2 if case.rank and name in mamba3.SCALARS else 1


def token(case: Case, arrays: dict[str, Any], index: int = 0) -> tuple[Any, ...]:
    """Operands of one step, in call order: a token of every row, or all of a step of several."""
    if case.step:
        return tuple(arrays[name] for name in operand_names(case))
    found = []
    for name in operand_names(case):
        axis = token_axis(case, name)
        found.append(arrays[name] if axis is None else arrays[name][(slice(None),) * axis + (index,)])
    return tuple(found)


def step_state(case: Case, arrays: dict[str, Any]) -> Any:
    """The state of a step: of Mamba-3 a tuple of four pieces."""
    return tuple(arrays[name] for name in mamba3.STATE) if case.rank else arrays["state_in"]


def main_state(case: Case, state: Any) -> Any:
    """The matrices in it."""
    return state[1] if case.rank else state


def checked(case: Case) -> Arrays:
    """The pieces along axis 0 and the parameters that are compared with float64; a seed per case name."""
    size = pieces(case)
    of_pieces = replace(case, batch=len(size), seq=size[0].stop - size[0].start, sequences=1, packing="")
    return mamba3.checked(of_pieces) if case.rank else _checked(of_pieces)


def resets(case: Case) -> dict[str, float]:
    """What the token before the last piece is given in place of its random values."""
    return {"v": 0.0, "adt": -RESET} if case.rank else {"x": 0.0, "dt": RESET}


def planted(case: Case, name: str, row: Any, given: Any, write: Any) -> Any:
    """One row of an operand that has rows, with the checked pieces in it. write(array, index, value) -> array.

    A cotangent is zero everywhere else: gradients of parameters are then the pieces' alone, so they can be compared.
    """
    axis, spans = token_axis(case, name), pieces(case)
    if axis is None:
        return write(row, ..., given[0])
    before = (slice(None),) * (axis - 1)
    if name == "dy":
        row = write(row, ..., 0.0)
    for span, piece in zip(spans, given, strict=True):
        row = write(row, (*before, span), piece)
    if len(spans) > 1 and name in resets(case):
        row = write(row, (*before, spans[-1].start - 1), resets(case)[name])
    return row


def compared(case: Case, name: str, row: Any) -> list[Any]:
    """The checked pieces of one row of y or of a gradient, named by its operand."""
    before = (slice(None),) * (token_axis(case, name) - 1)
    return [row[(*before, span)] for span in pieces(case)]


def _checked(case: Case) -> Arrays:
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    size, kind = shapes(case), dtypes(case)

    def normal(name: str) -> np.ndarray:
        return rng.standard_normal(size[name], dtype=np.float32).astype(numpy_dtype(kind[name]))

    row = {name: normal(name) for name in ("x", "B", "C", "dy")}
    row["state_in"] = normal("state_in")[:1]
    # Steps log-uniform in [1e-3, 1e-1] and decay rates in [1, 16], the ranges models are initialised in.
    step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), size["dt"])).astype(np.float32)
    row["dt"] = np.log(np.expm1(step)).astype(np.float32) if case.softplus else step
    row["A"] = -rng.uniform(1.0, 16.0, size["A"]).astype(np.float32)
    row["D"] = rng.standard_normal(size["D"], dtype=np.float32)
    if case.softplus:
        row["dt_bias"] = (0.1 * rng.standard_normal(size["dt_bias"])).astype(np.float32)
    return row
