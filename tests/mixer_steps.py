"""Calls of the op between a Mamba-2 layer's projections, and what they give in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ssd.mamba2.mixer import Operands, Spec
from jax_ssd.mamba2.plan_cuda_mixer import MixerProblem
from jax_ssd.plans import Buffer

# Of max|y - truth| / max|truth|, for the type of the result.
BARS = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1e-2}

MODEL: dict[str, Any] = {"heads": 24, "head_dim": 64, "groups": 1, "state": 128, "dtype": "bfloat16"}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16", "window": "bfloat16", "state": 128, "head_dim": 64, "groups": 1},
    "ungated, no bias": {"gates": False, "bias": False, "width": 2},
    "after a norm": {"norm": True, "head_dim": 10},
    "one tap": {"width": 1, "heads": 3, "groups": 3},
    "some heads": {"heads": 2, "all_heads": 6, "groups": 3, "first_head": 3},
    "rows of parameters": {"param_rows": 2, "width": 3, "limit": (0.1, 0.9)},
    "odd": {"heads": 3, "groups": 3, "head_dim": 7, "state": 17, "dtype": "float16", "window": "float32"},
    "coarse state": {"state_dtype": "bfloat16", "state": 40, "head_dim": 20, "dtype": "bfloat16"},
    "wide state": {"state": 520, "head_dim": 9, "heads": 2, "groups": 1},
}


def mixer_problem(
    *, batch=2, heads=6, all_heads: int | None = None, first_head=0, head_dim=16, groups=2, state=32, width=4,
    dtype="float32", window: str | None = None, state_dtype="float32", param_rows=1, gates=True, bias=True,
    norm=False, limit=(0.0, float("inf")),
) -> tuple[MixerProblem, Spec]:  # fmt: skip
    del first_head
    everyone, grouped, kept = all_heads or heads, 2 * groups * state, window or dtype
    r = param_rows
    shapes = {
        "state": ((batch, heads, head_dim, state), state_dtype),
        "window_x": ((batch, width, heads, head_dim), kept),
        "window_bc": ((batch, width, grouped), kept),
        "projected": ((batch, 2 * everyone * head_dim + grouped + everyone), "float32"),
        "position": ((r,), "int32"),
        "head": ((r, heads), "int32"),
        "filter_x": ((r, width, heads, head_dim), "float32"),
        "filter_bc": ((r, width, grouped), "float32"),
        "A": ((r, heads), "float32"),
        "D": ((r, heads, head_dim), "float32"),
        "dt_bias": ((r, heads), "float32"),
    }
    if bias:
        shapes |= {"bias_x": ((r, heads, head_dim), "float32"), "bias_bc": ((r, grouped), "float32")}
    if norm:
        shapes["squares"] = ((batch,), "float32")
    share = (0.25, 0.1)
    assert list(shapes) == [name for name in Operands._fields if name in shapes]
    problem = MixerProblem(
        batch=batch, heads=heads, all_heads=everyone, head_dim=head_dim, groups=groups, state=state, width=width,
        dtype=dtype, param_rows=r, dt_limit=limit, gates=gates, norm=share,
        operands=tuple(Buffer(name, *kind) for name, kind in shapes.items()),
    )  # fmt: skip
    return problem, Spec(tuple(shapes), everyone, groups, limit, gates, dtype, ("cuda",), share)


def random_operands(p: MixerProblem, first_head: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {b.name: rng.standard_normal(b.shape) for b in p.operands}
    made |= {"A": -np.exp(made["A"]), "head": np.broadcast_to(first_head + np.arange(p.heads), made["head"].shape)}
    made["position"] = np.arange(5, 5 + p.param_rows) if p.param_rows > 1 else np.array([5])
    made["projected"] = made["projected"].astype(jnp.dtype(p.dtype)).astype(np.float64)  # the kernel rounds x, B and C
    if "squares" in made:
        made["squares"] = made["squares"] ** 2
        # Multiplied by the norm's factor, they are to be numbers that need no rounding either.
        made["projected"] /= factor(p, made["squares"].astype(np.float32).astype(np.float64))
    kinds = {b.name: jnp.dtype(b.dtype) for b in p.operands}
    return {
        name: array.astype(np.float32).astype(kinds[name]) if kinds[name].kind not in "iu" else array.astype(np.int32)
        for name, array in made.items()
    }


def factor(p: MixerProblem, squares: np.ndarray) -> np.ndarray:
    """Of the norm that is made up for."""
    return 1 / np.sqrt(p.norm[0] * squares + p.norm[1])[:, None]


def silu(v: np.ndarray) -> np.ndarray:
    return v / (1 + np.exp(-v))


def truth(p: MixerProblem, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same in float64, head by head."""
    o = {name: np.asarray(a, np.float64 if np.asarray(a).dtype.kind != "i" else None) for name, a in operands.items()}
    P, N, everyone = p.head_dim, p.state, p.all_heads
    new = {f"new_{name}": o[name].copy() for name in ("state", "window_x", "window_bc")}
    y = np.zeros((p.batch, p.heads, P))
    projected = o["projected"] * (factor(p, o["squares"]) if "squares" in o else 1)
    for b in range(p.batch):
        r = b % p.param_rows
        z, x, bc, dt = np.split(projected[b], np.cumsum([everyone * P, everyone * P, 2 * p.groups * N]))
        z, x, head = z.reshape(everyone, P), x.reshape(everyone, P), operands["head"][r]
        place = int(operands["position"][r]) % p.width
        new["new_window_x"][b, place], new["new_window_bc"][b, place] = x[head], bc
        filtered = {}
        for name in ("x", "bc"):
            total = np.zeros(o[f"filter_{name}"].shape[2:]) + (o[f"bias_{name}"][r] if f"bias_{name}" in o else 0)
            for tap in range(p.width):
                total = total + o[f"filter_{name}"][r, tap] * new[f"new_window_{name}"][b, (place + 1 + tap) % p.width]
            filtered[name] = silu(total)
        B, C = filtered["bc"].reshape(2, p.groups, N)
        for h in range(p.heads):
            group = head[h] // (everyone // p.groups)
            step = np.clip(np.logaddexp(0, dt[head[h]] + o["dt_bias"][r, h]), *p.dt_limit)
            into = new["new_state"][b, h]
            into[:] = np.exp(step * o["A"][r, h]) * into + step * np.outer(filtered["x"][h], B[group])
            y[b, h] = into @ C[group] + o["D"][r, h] * filtered["x"][h]
            if p.gates:
                y[b, h] *= silu(z[head[h]])
    return new | {"y": y}


def check(p: MixerProblem, operands: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
    for name, expected in truth(p, operands).items():
        array = np.asarray(got[name], np.float64)
        bar = BARS[np.asarray(got[name]).dtype.name]
        assert np.max(np.abs(array - expected)) <= bar * np.max(np.abs(expected)), name
