"""The Mamba-3 recurrence in numpy, token by token and rank by rank: what every implementation is compared with.

Every function in it is analytic, so it also runs on complex numbers: a derivative in a direction is the imaginary part
of the result at a tiny imaginary step, exact to the last digits (see `derivative`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

State = tuple[np.ndarray, ...]  # angle, ssm, k, v
STEP = 1e-30


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rotated(x: np.ndarray, phase: np.ndarray, rotary: str) -> np.ndarray:
    """x [..., n], phase [..., pairs]."""
    width, out = x.shape[-1], x.astype(np.result_type(x, phase))
    for i in range(phase.shape[-1]):
        a, b = (2 * i, 2 * i + 1) if rotary == "pairwise" else (i, i + width // 2)
        cos, sin = np.cos(phase[..., i]), np.sin(phase[..., i])
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., a] * sin + x[..., b] * cos
    return out


def run(
    *, q, k, v, q_bias, k_bias, angles, adt, dt, trap, mimo_v=None, mimo_o=None, z=None, mimo_z=None, D=None,
    norm_weight=None, norm_eps=1e-5, rotary="pairwise", initial_state: State | None = None
) -> tuple[np.ndarray, State]:  # fmt: skip
    """y and the final state of arrays with one batch axis, in mamba3's shapes."""
    siso = mimo_v is None
    if mimo_v is None:
        q, k, q_bias, k_bias = q[:, :, None], k[:, :, None], q_bias[:, None], k_bias[:, None]
        mimo_v = mimo_z = np.ones((v.shape[2], 1, v.shape[3]))
    batch, seq, rank, groups, width = q.shape
    heads, head_dim = v.shape[2:]
    type_ = np.result_type(*(a for a in (q, k, v, q_bias, k_bias, angles, adt, dt, trap, mimo_v) if a is not None))
    start = initial_state
    if start is None:
        shapes = ((angles.shape[-1],), (head_dim, width), (rank, width), (head_dim,))
        start = tuple(np.zeros((batch, heads, *s), type_) for s in shapes)
    elif siso:
        start = (*start[:2], start[2][:, :, None], start[3])
    phase, ssm, key, value = start
    group = np.arange(heads) // max(heads // groups, 1)
    outputs = []
    for t in range(seq):
        step, mix, decay = dt[:, :, t], sigmoid(trap[:, :, t]), np.exp(adt[:, :, t])
        phase = phase + np.pi * np.tanh(angles[:, t]) * step[..., None]
        kt = np.moveaxis(k[:, t][:, :, group], 2, 1) + k_bias
        qt = np.moveaxis(q[:, t][:, :, group], 2, 1) + q_bias
        kt, qt = (rotated(a, phase[:, :, None], rotary) for a in (kt, qt))
        ssm = decay[..., None, None] * ssm
        outs = np.zeros((batch, rank, heads, head_dim), np.result_type(type_, ssm))
        for r in range(rank):
            before = (decay * (1 - mix) * step)[..., None, None] * (mimo_v[:, r] * value)[..., None]
            now = (mix * step)[..., None, None] * (mimo_v[:, r] * v[:, t])[..., None]
            ssm = ssm + before * key[:, :, r, None, :] + now * kt[:, :, r, None, :]
        for r in range(rank):
            out = (ssm * qt[:, :, r, None, :]).sum(-1)
            if D is not None:
                out = out + D[:, None] * mimo_v[:, r] * v[:, t]
            if norm_weight is not None:
                out = out / np.sqrt((out * out).mean(-1, keepdims=True) + norm_eps)
                out = out * norm_weight.reshape(heads, head_dim)
            if z is not None and mimo_z is not None:
                gate = mimo_z[:, r] * z[:, t]
                out = out * gate * sigmoid(gate)
            if outs.dtype != out.dtype:
                outs = outs.astype(out.dtype)
            outs[:, r] = out
        key, value = kt, v[:, t]
        outputs.append(outs)
    y = np.stack(outputs, 1) if outputs else np.zeros((batch, 0, rank, heads, head_dim))
    if siso:
        y, key = y[:, :, 0], key[:, :, 0]
    elif mimo_o is not None:
        y = (y * np.moveaxis(mimo_o, 1, 0)).sum(2)
    return y, (phase, ssm, key, value)


def packed(cu_seqlens, initial_state: State | None = None, **arrays) -> tuple[np.ndarray, State]:
    """Each sequence alone; arrays have a batch axis of size 1."""
    ys, states = [], []
    for j, (low, high) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        part = {n: a[:, low:high] if n in ("q", "k", "v", "angles", "z") else a for n, a in arrays.items()}
        part |= {n: a[:, :, low:high] if n in ("adt", "dt", "trap") else a for n, a in part.items()}
        state = None if initial_state is None else tuple(a[j : j + 1] for a in initial_state)
        y, state = run(**part, initial_state=state)
        ys.append(y)
        states.append(state)
    return np.concatenate(ys, 1), tuple(np.concatenate(pieces) for pieces in zip(*states, strict=True))


def derivative(function: Callable[..., np.ndarray], arrays: dict, directions: dict) -> float:
    """The derivative of a scalar function of keyword arrays in a direction given for some of them."""
    moved = {n: a + 1j * STEP * directions[n] if n in directions else a for n, a in arrays.items()}
    return float(np.imag(function(**moved)) / STEP)
