"""One row of a result file: what was run, how it ended, and the figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.cases import Case
from benchmarks.timing import Timing

# A row whose error against float64 is above this computed something else. It is a guard against measuring nonsense,
# not an accuracy bar: that one is in the tests.
WRONG_ABOVE = {"float32": 1e-2, "bfloat16": 5e-2, "float16": 2e-2}
PEERS_MAY = 4  # times as much: how a peer rounds is its own affair, and its error stands beside its time


def row(case: Case, pass_name: str, implementation: str, status: str, **fields: Any) -> dict[str, Any]:
    """`status` is ok, unsupported (with the reason), failed (with the error) or wrong (not to be believed)."""
    head = {"case": case.name, "pass": pass_name, "implementation": implementation, "status": status}
    return head | fields


def failure(case: Case, pass_name: str, implementation: str, error: BaseException) -> dict[str, Any]:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    status = "unsupported" if isinstance(error, NotImplementedError | ImportError) else "failed"
    return row(case, pass_name, implementation, status, reason=text[:500])


def measured(
    case: Case,
    pass_name: str,
    implementation: str,
    timing: Timing,
    errors: dict[str, float],
    problems: list[str],
    **fields: Any,
) -> dict[str, Any]:
    limit = WRONG_ABOVE[case.dtype] * (1 if peers.is_own(implementation) else PEERS_MAY)
    wrong = [f"{name} is off by {error:.2g}" for name, error in errors.items() if not error <= limit]
    if not math.isfinite(timing.seconds) or timing.seconds <= 0:
        wrong.append("the time is not positive")
    problems = [*problems, *wrong]
    return row(
        case,
        pass_name,
        implementation,
        "wrong" if problems else "ok",
        microseconds=1e6 * timing.seconds,
        timing=timing.to_json(),
        errors=errors,
        **({"reason": "; ".join(problems)} if problems else {}),
        **fields,
    )


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """||got - wanted|| / ||wanted||; NaN in `got` comes out as NaN, which no bound accepts."""
    difference = np.asarray(got, np.float64) - np.asarray(wanted, np.float64)
    return float(np.linalg.norm(difference) / max(float(np.linalg.norm(np.asarray(wanted, np.float64))), 1e-30))
