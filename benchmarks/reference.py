"""The recurrence in float64, piece by piece.

That of Mamba-2 is written apart from the library, so that both can be wrong only alone. That of Mamba-3 is the
library's own definition, which its tests hold against numpy.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import mamba3, timing
from benchmarks.cases import Case
from benchmarks.inputs import PARAMETERS, checked, main_state, operand_names, pieces, step_state, token

CHUNK = 64
_programs: dict[tuple[Case, tuple[str, ...]], list[Any]] = {}


def scan_row(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any = None) -> jax.Array:
    """y [seq, heads, head_dim] of one row: x [seq, heads, head_dim], dt [seq, heads], B and C [seq, groups, state]."""
    seq, heads, head_dim = x.shape
    repeats = heads // B.shape[1]
    step = dt if dt_bias is None else jax.nn.softplus(dt + dt_bias)
    padding = -seq % CHUNK

    def chunks(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1))
        return padded.reshape(-1, CHUNK, *array.shape[1:])

    causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))[:, :, None]

    @jax.checkpoint
    def body(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        xc, dtc, bc, cc = chunk
        decay = jnp.cumsum(dtc * A, axis=0)
        bc, cc = jnp.repeat(bc, repeats, axis=1), jnp.repeat(cc, repeats, axis=1)
        kept = jnp.exp(jnp.where(causal, decay[:, None] - decay[None, :], -jnp.inf))
        weights = jnp.einsum("ihn,jhn->ijh", cc, bc) * kept * dtc
        y = jnp.einsum("ijh,jhp->ihp", weights, xc)
        y = y + jnp.exp(decay)[..., None] * jnp.einsum("ihn,hpn->ihp", cc, state)
        gain = dtc * jnp.exp(decay[-1] - decay)
        state = jnp.exp(decay[-1])[:, None, None] * state + jnp.einsum("jh,jhp,jhn->hpn", gain, xc, bc)
        return state, y

    start = jnp.zeros((heads, head_dim, B.shape[2]), x.dtype)
    _, y = jax.lax.scan(body, start, (chunks(x), chunks(step), chunks(B), chunks(C)))
    return y.reshape(-1, heads, head_dim)[:seq] + D[:, None] * x


def _scan(names: tuple[str, ...], operands: list[Any]) -> jax.Array:
    """`scan_row` of every piece."""
    return jax.vmap(scan_row, [None if name in PARAMETERS else 0 for name in names])(*operands)


def step_row(state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any = None) -> tuple[Any, Any]:
    """One token: state [heads, head_dim, n], x [heads, head_dim], dt [heads], B and C [groups, n] -> (state, y)."""
    repeats = x.shape[0] // B.shape[0]
    step = dt if dt_bias is None else jax.nn.softplus(dt + dt_bias)
    b, c = jnp.repeat(B, repeats, axis=0), jnp.repeat(C, repeats, axis=0)
    state = jnp.exp(step * A)[:, None, None] * state + (step[:, None] * x)[..., None] * b[:, None, :]
    return state, jnp.einsum("hpn,hn->hp", state, c) + D[:, None] * x


def compute(case: Case, passes: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Float64 results for the checked pieces, stored as float32.

    Keys: `y` and, where a backward is asked for, `dx`, `ddt`, `dB`, `dC`, `dA`, `dD`, `ddt_bias`; the step's are
    `step_y` and `step_state`.
    """
    names = operand_names(case)
    with jax.enable_x64(True):
        given = {name: jnp.asarray(np.asarray(value, np.float64)) for name, value in checked(case).items()}
        operands = [given[name] for name in names]
        parts: list[tuple[Any, tuple[Any, ...]]] = []  # functions that give results by name, with their arguments
        backward = "forward_backward" in passes
        if backward or "forward" in passes:
            scan = functools.partial(mamba3.define, case) if case.rank else functools.partial(_scan, names)
            parts.append((functools.partial(_with_gradients, scan, names, backward), (operands, given["dy"])))
        if "step" in passes or "decode" in passes:
            step = functools.partial(_mamba3_step, case) if case.rank else _step
            parts.append((step, (step_state(case, given), token(case, given))))
        size = {"batch": len(pieces(case)), "seq": pieces(case)[0].stop, "sequences": 1, "packing": ""}
        key = replace(case, name="", source="", dtype="float32", **size)
        compiled = _programs.get((key, passes))
        if compiled is None:  # cases that differ in their length only share one
            compiled = [jax.jit(function).lower(*arguments).compile() for function, arguments in parts]
            _programs[key, passes] = compiled
        with timing.alone():
            found = [run(*arguments) for run, (_, arguments) in zip(compiled, parts, strict=True)]
            return {name: np.asarray(value, np.float32) for one in found for name, value in one.items()}


def _with_gradients(scan: Any, names: tuple[str, ...], backward: bool, operands: list[Any], dy: Any) -> dict[str, Any]:
    if not backward:
        return {"y": scan(operands)}
    y, pull = jax.vjp(scan, operands)
    (gradients,) = pull(dy)
    return {"y": y} | {f"d{name}": value for name, value in zip(names, gradients, strict=True)}


def _step(state: Any, operands: tuple[Any, ...]) -> dict[str, Any]:
    """Of the only row."""
    x, dt, A, B, C, D, *bias = operands
    state, y = step_row(state[0], x[0], dt[0], A, B[0], C[0], D, *bias)
    return {"step_state": state, "step_y": y}


def _mamba3_step(case: Case, state: Any, operands: tuple[Any, ...]) -> dict[str, Any]:
    state, y = mamba3.step(case, state, operands, implementation="reference")
    return {"step_state": main_state(case, state)[0], "step_y": y[0]}
