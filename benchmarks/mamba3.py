"""What a benchmark of the Mamba-3 operator needs to know: operands, floors and the truth.

Rank 1 is SISO: no rank axis, no rank weights, rotary pairs interleaved. Higher ranks are MIMO: rank weights, rotary
halves. Both carry the gate z and the skip D, as a model layer does; a quarter of the state's coordinates are pairs.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.cases import Case

ROWS = 64  # token-rank rows of a chunk
PARAMETERS = ("q_bias", "k_bias", "D", "mimo_v", "mimo_z", "mimo_o")
STATE = ("state_angle", "state_ssm", "state_k", "state_v")  # of a step, as in jax_ssd.Mamba3State
SCALARS = ("adt", "dt", "trap")  # [batch, heads, seq]
_FLOAT32 = ("q_bias", "k_bias", "angles", "adt", "dt", "trap", "D", "mimo_v", "mimo_z", "mimo_o")


def operand_names(case: Case) -> tuple[str, ...]:
    common = ("q", "k", "v", "q_bias", "k_bias", "angles", "adt", "dt", "trap", "z", "D")
    return common if case.rank == 1 else (*common, "mimo_v", "mimo_z", "mimo_o")


def shapes(case: Case, batch: int | None = None) -> dict[str, tuple[int, ...]]:
    rows = case.batch if batch is None else batch
    rank = () if case.rank == 1 else (case.rank,)
    key, value = (rows, case.seq, *rank, case.groups, case.state), (rows, case.seq, case.heads, case.head_dim)
    bias, weights = (case.heads, *rank, case.state), (case.heads, case.rank, case.head_dim)
    scalar = (rows, case.heads, case.seq)
    named = {"q": key, "k": key, "v": value, "q_bias": bias, "k_bias": bias}
    named |= {"angles": (*value[:3], case.state // 4), "adt": scalar, "dt": scalar, "trap": scalar, "z": value}
    named |= {"D": (case.heads,), "mimo_v": weights, "mimo_z": weights, "mimo_o": weights, "dy": value}
    wanted = {name: shape for name, shape in named.items() if name in (*operand_names(case), "dy")}
    if not case.is_step:
        return wanted
    pieces = ((case.state // 4,), (case.head_dim, case.state), (*rank, case.state), (case.head_dim,))
    return wanted | {name: (rows, case.heads, *piece) for name, piece in zip(STATE, pieces, strict=True)}


def dtypes(case: Case) -> dict[str, str]:
    return {name: "float32" if name in (*_FLOAT32, *STATE) else case.dtype for name in shapes(case)}


def distributed(case: Case, name: str, normal: Any, exp: Any) -> Any:
    """A standard normal array of any framework as an operand: its own distribution in a freshly initialised model."""
    if name == "dt":
        return exp(0.5 * normal - 4.0)
    if name == "adt":
        return -exp(normal - 2.5)
    if name in ("q_bias", "k_bias", "mimo_z"):
        return 1.0 + 0.1 * normal
    if name in ("mimo_v", "mimo_o"):
        return (1.0 + 0.1 * normal) / case.rank
    return normal


def checked(case: Case) -> dict[str, np.ndarray]:
    """Operands and dy of a case of as many rows as there are checked pieces."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    kind = dtypes(case)
    row = {}
    for name, shape in shapes(case).items():
        drawn = distributed(case, name, rng.standard_normal(shape, dtype=np.float32), np.exp)
        row[name] = drawn.astype(ml_dtypes.bfloat16 if kind[name] == "bfloat16" else kind[name])
    return row


def array_bytes(case: Case) -> tuple[int, int]:
    """Of all operands, and of y."""
    size = {name: int(np.prod(shape)) for name, shape in shapes(case).items()}
    item = {name: 4 if kind == "float32" else 2 for name, kind in dtypes(case).items()}
    return sum(size[name] * item[name] for name in operand_names(case)), size["dy"] * item["dy"]


def state_bytes(case: Case) -> int:
    """Of the state of a step."""
    return sum(4 * int(np.prod(shape)) for name, shape in shapes(case).items() if name in STATE)


def necessary_flops(case: Case, backward: bool) -> int:
    """Of chunks of ROWS token-rank rows, heads apart since each rotates its own keys; two flops per multiply-add."""
    rows = case.batch * case.seq * case.rank * case.heads
    kn, kp, np_ = ROWS * case.state, ROWS * case.head_dim, case.state * case.head_dim
    forward = kn + kp + 2 * np_
    # Again q k^T; dy v^T and what it gives to v; dq and dk; states, their adjoints, and what they give to q, k and v.
    return 2 * rows * (forward + (3 * kn + 2 * kp + 5 * np_ if backward else 0))


def call(case: Case, arrays: dict[str, Any], **options: Any) -> Any:
    """jax_ssd.mamba3 on operands by name."""
    import jax_ssd

    given = {name: arrays.get(name) for name in ("mimo_v", "mimo_o")} | arrays
    rotary: Any = "pairwise" if case.rank == 1 else "half"
    return jax_ssd.mamba3(**given, **case.boundaries(), rotary=rotary, **options)


def step(case: Case, state: Any, operands: tuple[Any, ...], **options: Any) -> tuple[Any, Any]:
    """jax_ssd.mamba3_step on the four pieces of a state and a step's operands in call order."""
    import jax_ssd

    given = {"mimo_v": None, "mimo_o": None} | dict(zip(operand_names(case), operands, strict=True))
    rotary: Any = "pairwise" if case.rank == 1 else "half"
    state, y = jax_ssd.mamba3_step(jax_ssd.Mamba3State(*state), **given, rotary=rotary, **options)
    return tuple(state), y


def define(case: Case, operands: list[Any]) -> Any:
    """The token-by-token definition on operands in call order. Tests compare it with one written apart from it.

    The operands are pieces of rows, each of one sequence.
    """
    return call(
        replace(case, sequences=1, packing=""),
        dict(zip(operand_names(case), operands, strict=True)),
        implementation="reference",
    )
