"""Calls of the Mamba-3 step on canonical operands, and what they give in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ssd.mamba3.problem import Problem
from jax_ssd.plans import Buffer
from tests import mamba3_float64 as oracle

# Of max|y - truth| / max|truth|: a sum of rank * state products in float32, and the rounding of what is stored.
BARS = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 5e-3}

TOKENS = {"q": 1, "k": 1, "v": 1, "z": 1, "angles": 1, "adt": 2, "dt": 2, "trap": 2}  # where operands have their tokens

MODEL: dict[str, Any] = {"heads": 64, "head_dim": 64, "groups": 1, "state": 128, "pairs": 32, "dtype": "bfloat16"}

SHAPES: dict[str, dict[str, Any]] = {
    "mimo": {**MODEL, "rank": 4},
    "siso": {**MODEL, "rank": None, "rotary": "pairwise", "pairs": 64, "norm": False, "skip": False, "gate": False},
    "rank 8": {**MODEL, "rank": 8, "dtype": "float16", "k": "bfloat16", "fold": False},
    "odd": {"heads": 3, "groups": 3, "head_dim": 5, "state": 6, "pairs": 2, "rank": 3, "param_rows": 2},
    "wide": {**MODEL, "state": 256, "head_dim": 128, "rank": 8, "dtype": "float32"},
}

CHANGES: dict[str, dict[str, Any]] = {
    **SHAPES,
    "every option": {},
    "pairwise": {"rotary": "pairwise", "pairs": 16, "dtype": "bfloat16", "k": "bfloat16"},
    "rows of parameters": {"param_rows": 2, "rank": 5, "dtype": "float16"},
    "plain": {"gate": False, "skip": False, "norm": False, "rank": 1, "pairs": 1},
    "siso with everything": {"rank": None, "rotary": "pairwise", "heads": 6, "groups": 3},
    "ranks kept": {"rank": 3, "fold": False, "gate": False, "head_dim": 9},
    "coarse matrix": {"ssm": "bfloat16", "state": 48, "head_dim": 20, "dtype": "bfloat16", "rank": 4},
    "turns": {"heads": 2, "groups": 1, "head_dim": 200, "state": 20, "rank": 2},
    "large batch": {**MODEL, "rank": 4, "batch": 40},
}


def step_problem(
    *, batch=2, seq=1, heads=4, head_dim=16, groups=2, state=32, rank: int | None = 2, pairs=8, dtype="float32",
    param_rows=1, rotary="half", fold=True, gate=True, skip=True, norm=True, **types: str
) -> Problem:  # fmt: skip
    """A step with every option, unless told otherwise. rank None is SISO; types: of parts of the state."""
    R, lead, value = rank or 1, (batch, heads), (batch, seq, heads)
    parts = {"angle": (pairs,), "ssm": (head_dim, state), "k": (R, state), "v": (head_dim,)}
    defaults = {"angle": "float32", "ssm": "float32", "k": "float32", "v": dtype}
    per_rank = (param_rows, heads, R, head_dim)
    arrays: list[tuple[str, tuple[int, ...], str, bool]] = [
        ("q", (batch, seq, R, groups, state), dtype, True),
        ("k", (batch, seq, R, groups, state), dtype, True),
        ("v", (*value, head_dim), dtype, True),
        ("q_bias", (param_rows, heads, R, state), "float32", True),
        ("k_bias", (param_rows, heads, R, state), "float32", True),
        ("angles", (*value, pairs), "float32", True),
        *((name, (*lead, seq), "float32", True) for name in ("adt", "dt", "trap")),
        *((f"state_{part}", (*lead, *shape), types.get(part, defaults[part]), True) for part, shape in parts.items()),
        ("mimo_v", per_rank, "float32", rank is not None),
        ("mimo_o", per_rank, "float32", rank is not None and fold),
        ("z", (*value, head_dim), dtype, gate),
        ("mimo_z", per_rank, "float32", rank is not None and gate),
        ("D", (param_rows, heads), "float32", skip),
        ("norm_weight", (param_rows, heads, head_dim), "float32", norm),
    ]
    return Problem(
        batch=batch,
        seq=seq,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state=state,
        rank=R,
        pairs=pairs,
        dtype=dtype,
        param_rows=param_rows,
        rotary=rotary,
        norm_eps=1e-5,
        return_final_state=True,
        chunk_size=None,
        precision="default",
        operands=tuple(Buffer(name, shape, type_) for name, shape, type_, given in arrays if given),
    )


def random_operands(p: Problem, seed: int = 0) -> dict[str, np.ndarray]:
    """Operands of a step by name, over a wide range of trap and angles; rounded to their types."""
    rng = np.random.default_rng(seed)
    made = {b.name: rng.standard_normal(b.shape) for b in p.operands}
    made["adt"] = -np.exp(made["adt"] - 2)
    made["dt"] = np.exp(0.7 * made["dt"] - 1.5)
    made |= {"angles": 2 * made["angles"], "trap": 3 * made["trap"], "state_angle": 4 * made["state_angle"]}
    types = {b.name: jnp.dtype(b.dtype) for b in p.operands}
    return {name: array.astype(np.float32).astype(types[name]) for name, array in made.items()}


def truth(p: Problem, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same in float64, row by row, since every row may have parameters of its own."""
    wide = {name: np.asarray(array, np.float64) for name, array in operands.items()}
    parts = ("angle", "ssm", "k", "v")
    rows = []
    for b in range(p.batch):
        one = {
            name: a[b % a.shape[0]] if name in ("q_bias", "k_bias", "mimo_v", "mimo_o", "mimo_z", "D", "norm_weight")
            else a[b : b + 1]
            for name, a in wide.items()
            if not name.startswith("state_")
        }  # fmt: skip
        state = tuple(wide[f"state_{part}"][b : b + 1] for part in parts)
        if "mimo_v" not in one:
            one |= {n: one[n][:, :, 0] for n in ("q", "k")} | {n: one[n][:, 0] for n in ("q_bias", "k_bias")}
            state = (*state[:2], state[2][:, :, 0], state[3])
        y, new = oracle.run(**one, rotary=p.rotary, norm_eps=p.norm_eps, initial_state=state)
        if "mimo_v" not in one:
            new = (*new[:2], new[2][:, :, None], new[3])
        rows.append((*new, y))
    names = (*(f"new_state_{part}" for part in parts), "y")
    return {name: np.concatenate(arrays) for name, arrays in zip(names, zip(*rows, strict=True), strict=True)}


def error(got: np.ndarray, expected: np.ndarray) -> float:
    """NaN must be where it is expected."""
    got = np.asarray(got, np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    return float(np.nanmax(np.abs(got - expected)) / np.nanmax(np.abs(expected)))


def check(p: Problem, operands: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
    """That results by name are those of the recurrence."""
    expected = truth(p, operands)
    turns = (np.asarray(got["new_state_angle"], np.float64) - expected["new_state_angle"]) / (2 * np.pi)
    assert np.nanmax(np.abs(turns - np.round(turns))) < 5e-7
    # Between two tokens a state takes its types, and what comes of it is no better than they are.
    between = max(BARS[p.given[f"state_{part}"].dtype] for part in ("ssm", "k")) if p.seq > 1 else 0
    for name in ("new_state_ssm", "new_state_k", "new_state_v", "y"):
        bar = max(BARS[got[name].dtype.name], between)
        assert error(got[name], expected[name]) < bar, name


def check_nan(step: Callable, name: str) -> None:
    """That a NaN in the second of three tokens, or in a state, shows from there on, in its own row and head only."""
    p = step_problem(batch=3, groups=4, seq=3)
    operands = random_operands(p)
    operands[name][(1, 2) if name.startswith("state_") else _place(name, 1, 1, 2)] = np.nan
    got = step(p, operands)
    y = np.moveaxis(np.isnan(got.pop("y").astype(np.float64)).any(-1), 1, 2)  # [batch, heads, seq]
    others = np.ones((3, 4), bool)
    others[1, 2] = False
    assert not y[others].any() and not any(np.isnan(array.astype(np.float64))[others].any() for array in got.values())
    assert y[1, 2].tolist() == [name.startswith("state_"), True, name not in ("q", "z")]  # which no state remembers


def _place(name: str, row: int, token: int, head: int) -> tuple[int, ...]:
    """Where a token's operand has a head's first numbers, groups being as many as heads."""
    return (row, head, token) if TOKENS[name] == 2 else (row, token, 0, head) if name in "qk" else (row, token, head)


def one_by_one(p: Problem, operands: dict[str, np.ndarray], step: Callable) -> dict[str, np.ndarray]:
    """The results of a call for each token, as of one call for all; step: (problem, operands) -> results by name."""
    state = {name: array for name, array in operands.items() if name.startswith("state_")}
    ys = []
    for t in range(p.seq):
        tokens = {n: a for n, a in operands.items() if n in TOKENS}
        tokens = {n: np.take(a, [t], TOKENS[n]) for n, a in tokens.items()}
        one = operands | tokens | state
        buffers = tuple(Buffer(b.name, one[b.name].shape, b.dtype) for b in p.operands)
        new = step(dataclasses.replace(p, seq=1, operands=buffers), one)
        ys.append(new.pop("y"))
        state = {name.removeprefix("new_"): array for name, array in new.items()}
    return {f"new_{name}": array for name, array in state.items()} | {"y": np.concatenate(ys, 1)}
