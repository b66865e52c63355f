"""Operands: one row that every framework gets bit for bit, and random fill for the other rows.

The checked row is generated with numpy and planted as the last row of the batch (an address that overflows goes wrong
there first). The other rows only have to look like real data; each framework draws them on its own device.
"""

from __future__ import annotations

import zlib
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks import mamba3
from benchmarks.cases import Case

Arrays = dict[str, np.ndarray]
PARAMETERS = ("A", "dt_bias", *mamba3.PARAMETERS)  # operands without a batch axis


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


def checked_row(case: Case) -> Arrays:
    """The row (leading axis 1) and the parameters that are compared with float64; a seed per case name."""
    if case.rank:
        return mamba3.checked_row(case)
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    size, kind = shapes(case, batch=1), dtypes(case)

    def normal(name: str) -> np.ndarray:
        return rng.standard_normal(size[name], dtype=np.float32).astype(numpy_dtype(kind[name]))

    row = {name: normal(name) for name in ("x", "B", "C", "dy", "state_in")}
    # Steps log-uniform in [1e-3, 1e-1] and decay rates in [1, 16], the ranges models are initialised in.
    step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), size["dt"])).astype(np.float32)
    row["dt"] = np.log(np.expm1(step)).astype(np.float32) if case.softplus else step
    row["A"] = -rng.uniform(1.0, 16.0, size["A"]).astype(np.float32)
    row["D"] = rng.standard_normal(size["D"], dtype=np.float32)
    if case.softplus:
        row["dt_bias"] = (0.1 * rng.standard_normal(size["dt_bias"])).astype(np.float32)
    return row


def kept_tokens(seq: int, limit: int = 8192) -> np.ndarray:
    """Tokens compared: all of them, or for long rows the first and the last quarter of `limit`."""
    if seq <= limit:
        return np.arange(seq)
    part = limit // 4
    return np.concatenate([np.arange(part), np.arange(seq - part, seq)])
