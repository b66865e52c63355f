"""The least time a pass could take: bytes that must move and matrix flops that must be done.

Bytes count each input read once and each output written once. Flops count the chunked form at 64 tokens per chunk with
C B^T shared by a group's heads, whole chunk tiles (a matrix unit cannot skip half of one), two flops per multiply-add.
"""

from __future__ import annotations

import math

from benchmarks import mamba3
from benchmarks.cases import Case

CHUNK = 64
PASSES = ("forward", "forward_backward", "step", "decode")
# What a pass may take of device memory, as a multiple of its inputs and outputs (dy and the gradients among them).
MEMORY_ALLOWED = {"forward": 1.05, "forward_backward": 1.5}


def array_bytes(case: Case) -> dict[str, int]:
    """Bytes of every array of one call; `state` is float32 and belongs to the step."""
    tokens = case.batch * case.seq
    return {
        "x": tokens * case.heads * case.head_dim * case.itemsize,
        "dt": tokens * case.heads * 4,
        "BC": 2 * tokens * case.groups * case.state * case.itemsize,
        "parameters": (3 if case.softplus else 2) * case.heads * 4,
        "state": case.batch * case.heads * case.head_dim * case.state * 4,
    }


def necessary_bytes(case: Case, pass_name: str) -> int:
    if case.rank:
        inputs, y = mamba3.array_bytes(case)
        if pass_name == "forward_backward":
            return 3 * inputs + 2 * y
        return inputs + y + (2 * mamba3.state_bytes(case) if pass_name in ("step", "decode") else 0)
    size = array_bytes(case)
    inputs = size["x"] + size["dt"] + size["BC"] + size["parameters"]
    forward = inputs + size["x"]
    if pass_name == "forward":
        return forward
    if pass_name == "forward_backward":
        return forward + inputs + size["x"] + inputs  # the backward reads inputs and dy, writes a gradient per input
    return forward + 2 * size["state"]


def memory_limit(case: Case, pass_name: str) -> int | None:
    """Bytes that a pass should not exceed, None where there is no such limit."""
    if pass_name not in MEMORY_ALLOWED:
        return None
    arrays = necessary_bytes(case, "forward") * (2 if pass_name == "forward_backward" else 1)
    return int(MEMORY_ALLOWED[pass_name] * arrays)


def chunk_kernel_memory(case: Case, pass_name: str) -> int | None:
    """Bytes that Mamba-3 takes where every chunk is a block of its own and its float32 states lie in memory.

    The simplest chunked kernels do so: the states of all chunks in the forward, twice more in the backward (computed
    again, and their gradients), and the gradient of every rank's output.
    """
    if not case.rank or pass_name not in MEMORY_ALLOWED:
        return None
    passed, heads = necessary_bytes(case, "forward"), case.batch * case.heads
    states = heads * math.ceil(case.seq * case.rank / mamba3.ROWS) * case.state * case.head_dim * 4
    if pass_name == "forward":
        return passed + states
    return 2 * passed + 3 * states + heads * case.seq * case.rank * case.head_dim * 4


def necessary_flops(case: Case, pass_name: str) -> int:
    if case.rank and not case.is_step:
        return mamba3.necessary_flops(case, pass_name == "forward_backward")
    tokens, heads, groups = case.batch * case.seq, case.heads, case.groups
    qn, qp, np = CHUNK * case.state, CHUNK * case.head_dim, case.state * case.head_dim
    forward = groups * qn + heads * (qp + 2 * np)
    # Again C B^T; its gradient dy x^T and dx = (..)^T dy; dB and dC per group; states, their adjoints, and what
    # they give to dx, dB and dC.
    backward = 3 * groups * qn + 2 * heads * qp + 5 * heads * np
    per_token = {"forward": forward, "forward_backward": forward + backward}.get(pass_name, 0)
    return 2 * tokens * per_token


def floor(case: Case, pass_name: str, copy_rate: float, matmul_rate: float) -> dict[str, float]:
    """Microseconds by bytes and by flops, and the larger: `copy_rate` in bytes/s, `matmul_rate` in flops/s."""
    moved, flops = necessary_bytes(case, pass_name), necessary_flops(case, pass_name)
    by_bytes, by_flops = 1e6 * moved / copy_rate, 1e6 * flops / matmul_rate
    return {
        "bytes": moved,
        "flops": flops,
        "bytes_us": by_bytes,
        "flops_us": by_flops,
        "us": max(by_bytes, by_flops),
    }
