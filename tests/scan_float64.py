"""The Mamba-2 scan one token at a time in float64 numpy, on canonical arrays: what the kernels are compared with."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jax_ssd.mamba2.problem import Problem


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def problem(**changes: Any) -> Problem:
    """A small problem in float32 with every option off, and what changes."""
    base = {
        **dict.fromkeys(("has_D", "has_z", "has_dt_bias", "has_initial_state", "has_runs", "dt_softplus"), False),
        "batch": 2,
        "seq": 33,
        "heads": 4,
        "head_dim": 16,
        "groups": 2,
        "state": 16,
        "chunk_size": 16,
        "dtype": "float32",
        "dt_dtype": "float32",
        "precision": "highest",
        "param_rows": 1,
        "dt_limit": (0.0, float("inf")),
        "return_final_state": True,
    }
    return Problem(**{**base, **changes})


def random_operands(p: Problem, seed: int = 0) -> dict[str, np.ndarray]:
    """Plausible values: slow and fast decays, D different in every channel, runs of odd lengths with padding inside."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    tokens, group = (p.batch, p.seq, p.heads, p.head_dim), (p.batch, p.seq, p.groups, p.state)
    per_head = (p.param_rows, p.heads)
    dtype = dtype_of(p.dtype)
    raw = normal(tokens[:3]) if p.dt_softplus else rng.uniform(0.0, 0.3, tokens[:3])
    arrays = {
        "x": normal(tokens).astype(dtype),
        "dt": raw.astype(dtype_of(p.dt_dtype)),
        "A": -rng.uniform(0.1, 4.0, per_head).astype(np.float32),
        "B": normal(group).astype(dtype),
        "C": (normal(group) / np.sqrt(p.state)).astype(dtype),
        "D": normal((*per_head, p.head_dim)).astype(np.float32),
        "z": normal(tokens).astype(dtype),
        "dt_bias": (0.3 * normal(per_head)).astype(np.float32),
        "initial_state": normal((p.batch, p.heads, p.head_dim, p.state)).astype(np.float32),
        "runs": random_runs(p, rng),
    }
    present = {
        "D": p.has_D,
        "z": p.has_z,
        "dt_bias": p.has_dt_bias,
        "initial_state": p.has_initial_state,
        "runs": p.has_runs,
    }
    return {name: array for name, array in arrays.items() if present.get(name, True)}


def random_runs(p: Problem, rng: np.random.Generator) -> np.ndarray:
    """[batch, seq] run numbers; about one token in ten starts a run, one in eight is padding."""
    starts = rng.random((p.batch, p.seq)) < 0.1
    starts[:, 0] = False
    number = np.cumsum(starts, axis=1).astype(np.int32)
    padding = rng.random((p.batch, p.seq)) < 0.125
    return np.where(padding & ~starts, ~number, number).astype(np.int32)


def step_size(p: Problem, dt: np.ndarray, dt_bias: np.ndarray | None) -> np.ndarray:
    """dt [batch, ..., heads] as the recurrence uses it."""
    value = dt.astype(np.float64)
    if dt_bias is not None:
        bias = dt_bias.astype(np.float64)
        value = value + (bias[:, None] if value.ndim == 3 else bias)
    if p.dt_softplus:
        value = np.where(value > 0, value, 0) + np.log1p(np.exp(-np.abs(value))) + 0 * value
    return np.clip(value, *p.dt_limit)


def scan(p: Problem, o: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """y and final_state in float64, of the operands as they are rounded."""
    x, A, B, C = (o[name].astype(np.float64) for name in ("x", "A", "B", "C"))
    B, C = (np.repeat(a, p.heads // p.groups, axis=2) for a in (B, C))
    step = step_size(p, o["dt"], o.get("dt_bias"))
    D = o["D"].astype(np.float64) if p.has_D else None
    runs = o["runs"] if p.has_runs else np.zeros((p.batch, p.seq), np.int32)
    initial = o.get("initial_state", np.zeros((p.batch, p.heads, p.head_dim, p.state)))
    h, y = initial.astype(np.float64), np.zeros(x.shape)
    number = np.zeros(p.batch, np.int64)
    with np.errstate(all="ignore"):
        for t in range(p.seq):
            real = runs[:, t] >= 0
            now = np.where(real, runs[:, t], ~runs[:, t])
            h = np.where((now == number)[:, None, None, None], h, 0.0)
            number = now
            entered = (step[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
            after = np.exp(step[:, t] * A)[..., None, None] * h + entered
            h = np.where(real[:, None, None, None], after, h)
            out = np.einsum("bhpn,bhn->bhp", h, C[:, t])
            if D is not None:
                out = out + D * x[:, t]
            if p.has_z:
                z = o["z"][:, t].astype(np.float64)
                out = out * z / (1 + np.exp(-z))
            y[:, t] = np.where(real[:, None, None], out, 0.0)
    return {"y": y, "final_state": h}


def error(got: np.ndarray, expected: np.ndarray) -> float:
    """||got - expected|| / ||expected||; both must be NaN and infinite at the same places."""
    got = got.astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
    finite = np.isfinite(expected)
    scale = np.linalg.norm(expected[finite])
    return float(np.linalg.norm(got[finite] - expected[finite]) / (scale if scale else 1.0))
