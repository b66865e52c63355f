"""Every gradient of the Mamba-2 scan in float64 numpy, token by token: what the backward kernels are compared with."""

from __future__ import annotations

import numpy as np

from jax_ssd.mamba2.problem import Problem
from tests.scan_float64 import step_size


def gradients(p: Problem, o: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of every operand but runs, named "d" + its name; those of A, D and dt_bias per batch row. o holds dy too."""
    x, A, B, C, dy = (o[name].astype(np.float64) for name in ("x", "A", "B", "C", "dy"))
    B, C = (np.repeat(a, p.heads // p.groups, axis=2) for a in (B, C))
    step = step_size(p, o["dt"], o.get("dt_bias"))
    D = o["D"].astype(np.float64) if p.has_D else np.zeros((1, p.heads, p.head_dim))
    runs = o["runs"] if p.has_runs else np.zeros((p.batch, p.seq), np.int32)
    shape = (p.batch, p.heads, p.head_dim, p.state)
    number = np.where(runs < 0, ~runs, runs)
    before = np.pad(number[:, :-1], ((0, 0), (1, 0)))

    def where(flag, a):
        return np.where(flag.reshape(flag.shape + (1,) * (a.ndim - 1)), a, 0.0)

    entered, states = [], []  # what of the state enters a token, and what leaves it
    state = o.get("initial_state", np.zeros(shape)).astype(np.float64)
    for t in range(p.seq):
        state = where(number[:, t] == before[:, t], state)
        entered.append(state)
        after = np.exp(step[:, t] * A)[..., None, None] * state
        after = after + (step[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        state = np.where((runs[:, t] >= 0)[:, None, None, None], after, state)
        states.append(state)
    out = {name: np.zeros(a.shape) for name, a in (("dx", x), ("dz", x), ("dB", B), ("dC", C), ("dstep", step))}
    out |= {"dA": np.zeros((p.batch, p.heads)), "dD": np.zeros((p.batch, p.heads, p.head_dim))}
    adjoint = o.get("dfinal", np.zeros(shape)).astype(np.float64)
    for t in reversed(range(p.seq)):
        real = runs[:, t] >= 0
        dyt = where(real, dy[:, t])
        if p.has_z:
            z = o["z"][:, t].astype(np.float64)
            sigmoid = 1 / (1 + np.exp(-z))
            y = np.einsum("bhpn,bhn->bhp", states[t], C[:, t]) + D * x[:, t]
            out["dz"][:, t] = dyt * y * sigmoid * (1 + z * (1 - sigmoid))
            dyt = dyt * z * sigmoid
        out["dC"][:, t] = np.einsum("bhpn,bhp->bhn", states[t], dyt)
        out["dD"] += dyt * x[:, t]
        total = adjoint + dyt[..., None] * C[:, t, :, None, :]
        inner = np.einsum("bhpn,bhn->bhp", total, B[:, t])
        size, decay = step[:, t], np.exp(step[:, t] * A)
        dlog = decay * np.einsum("bhpn,bhpn->bh", total, entered[t])
        out["dx"][:, t] = where(real, size[..., None] * inner + D * dyt)
        out["dB"][:, t] = where(real, size[..., None] * np.einsum("bhpn,bhp->bhn", total, x[:, t]))
        out["dstep"][:, t] = where(real, np.einsum("bhp,bhp->bh", inner, x[:, t]) + A * dlog)
        out["dA"] += where(real, size * dlog)
        adjoint = np.where(real[:, None, None, None], decay[..., None, None] * total, total)
        adjoint = where(number[:, t] == before[:, t], adjoint)
    for name in ("dB", "dC"):
        per_group = out[name].reshape(p.batch, p.seq, p.groups, -1, p.state)
        out[name] = per_group.sum(axis=3)
    out["ddt"] = out.pop("dstep") * step_slope(p, o["dt"], o.get("dt_bias"))
    out |= {"ddt_bias": out["ddt"].sum(axis=1), "dinitial_state": adjoint}
    return {"d" + name: out["d" + name] for name in o if name not in ("runs", "dy", "dfinal")}


def step_slope(p: Problem, dt: np.ndarray, dt_bias: np.ndarray | None) -> np.ndarray:
    """The derivative of step_size: that of softplus, where the value is within the limits, ends included."""
    value = dt.astype(np.float64)
    if dt_bias is not None:
        value = value + dt_bias.astype(np.float64)[:, None]
    slope = np.ones_like(value)
    if p.dt_softplus:
        slope = 1 / (1 + np.exp(-value))
        value = np.logaddexp(value, 0.0)
    low, high = p.dt_limit
    return np.where((value >= low) & (value <= high), slope, 0.0)
