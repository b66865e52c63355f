"""`python -m jax_ssd check`: every implementation present against the sequential scans of Mamba-2 and 3 in float64.

Compares y, the final state and each gradient over a table of shapes, and what steps give, token by token; the exit
status says pass or fail. What an implementation refuses is listed with its reason, and is no failure unless that
implementation was asked for and takes nothing.
"""

import argparse
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_ssd import cases as mamba2_cases
from jax_ssd import dispatch
from jax_ssd.cases import differentiable
from jax_ssd.mamba3 import cases as mamba3_cases

Case = mamba2_cases.Case | mamba3_cases.Case
TABLES: dict[str, tuple[Case, ...]] = {"mamba2": mamba2_cases.TABLE, "mamba3": mamba3_cases.TABLE}
BY_NAME: dict[str, Case] = {case.name: case for table in TABLES.values() for case in table}

# Allowed ||out - ref|| / ||ref|| against float64 on the same rounded inputs. float32 sums a few hundred rounded terms;
# TF32 and bfloat16 keep 10 and 8 bits of each factor, float16 11. Gradients pass through two such products, and that of
# A is a long sum of differences.
BARS = {
    ("float32", "highest"): (2e-6, 5e-5),
    ("float32", "default"): (1e-3, 3e-3),
    ("float16", "highest"): (1e-3, 4e-3),
    ("bfloat16", "highest"): (6e-3, 2e-2),
}


# An angle is a sum of as many rounded increments as there are tokens, whatever sums them.
ANGLE_BAR = 5e-6


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One quantity of one case: its relative error and the most that is allowed."""

    quantity: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # NaN fails


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line per case and implementation; 0 if all are inside their bars, else 1."""
    parser = argparse.ArgumentParser(prog="python -m jax_ssd check", description=__doc__)
    parser.add_argument(
        "--implementation",
        action="append",
        choices=dispatch.IMPLEMENTATIONS,
        help="check only this one; may be repeated",
    )
    parser.add_argument("--op", action="append", choices=sorted(TABLES), help="check only this one; may be repeated")
    parser.add_argument(
        "--case", action="append", choices=sorted(BY_NAME), help="check only this case; may be repeated"
    )
    options = parser.parse_args(arguments)
    names = options.implementation or available()
    cases = [
        case for op in options.op or TABLES for case in TABLES[op] if not options.case or case.name in options.case
    ]
    if not cases:
        parser.error(f"--op {' '.join(options.op)} has no case {' '.join(options.case)}; leave one of them out")
    print(f"Checking {', '.join(names)} on {jax.default_backend()} against the sequential scan in float64.")
    failures, served = 0, set()
    for case in cases:
        truth = evaluate(case, "reference", wide=True)
        for name in names:
            for kind, run in (("", evaluate), (" steps", evaluate_steps)):
                if run is evaluate_steps and not case.steppable:
                    continue
                row = f"{case.name:19s} {name + kind:16s}"
                try:
                    got = run(case, name)
                except NotImplementedError as refusal:
                    print(f"  --   {row} {refusal}", flush=True)
                    continue
                served.add(name)
                failures += _print_row(row, compare(case, got, {key: truth[key] for key in got}))
    idle = [name for name in options.implementation or () if name not in served]
    if idle:
        print(f"{', '.join(idle)}: every case was refused.")
    print("All passed." if not failures else f"{failures} quantities are outside their bars.")
    return 1 if failures or idle else 0


def _print_row(row: str, results: list[Comparison]) -> int:
    """One line; the number of quantities that failed."""
    worst = max(results, key=lambda r: r.error / r.allowed if r.error == r.error else np.inf)
    failed = [r for r in results if not r.passed]
    words = f"worst {worst.quantity} {worst.error:.1e} of {worst.allowed:.0e} allowed"
    print(f"  {'FAIL' if failed else 'ok  '} {row} {words}", flush=True)
    return len(failed)


def available() -> list[str]:
    """The implementations that this machine can run."""
    names = ["reference", "xla"]
    try:
        jax.devices("cuda")
    except RuntimeError:
        return names
    return [*names, *dispatch.KERNELS]


def evaluate(case: Case, implementation: str, *, wide: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """y, the final state and every gradient, as float64 numpy arrays; `wide` computes in float64."""
    arrays = case.inputs(seed)
    rng = np.random.default_rng(seed + 1)
    with jax.enable_x64(wide):
        dtype = jnp.float64 if wide else jnp.float32
        moving = {name: np.asarray(a) for name, a in differentiable(arrays).items()}
        fixed = {name: jnp.asarray(np.asarray(a)) for name, a in arrays.items() if name not in moving}
        if wide:
            moving = {name: a.astype(np.float64) for name, a in moving.items()}
        given = {name: jnp.asarray(a) for name, a in moving.items()}
        shapes = jax.eval_shape(lambda moving: case.scan(moving | fixed, "xla"), given)
        weights = {name: jnp.asarray(rng.standard_normal(shapes[name].shape), dtype) for name in _outputs(shapes)}

        def objective(moving):
            results = case.scan(moving | fixed, implementation)
            return sum((value.astype(dtype) * weights[name]).sum() for name, value in results.items()), results

        (_, results), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(given)
        results |= {f"d{name}": gradient for name, gradient in gradients.items()}
        return {name: np.asarray(value, np.float64) for name, value in results.items()}


def _outputs(names) -> list[str]:
    return sorted(names, key=lambda name: name != "y")  # y has the first of the random weights


def evaluate_steps(case: Case, implementation: str, *, seed: int = 0) -> dict[str, np.ndarray]:
    """y and the final state of a scan of steps over the tokens of `evaluate`'s arrays, as float64 numpy arrays."""
    results = jax.jit(lambda arrays: case.steps(arrays, implementation))(case.inputs(seed))
    return {name: np.asarray(value, np.float64) for name, value in results.items()}


def compare(case: Case, results: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> list[Comparison]:
    forward, backward = BARS[case.dtype, "highest" if case.dtype != "float32" else case.precision]
    bars = {"final_angle": max(forward, ANGLE_BAR)}
    return [
        Comparison(
            name, relative_error(results[name], expected), bars.get(name, backward if name.startswith("d") else forward)
        )
        for name, expected in truth.items()
    ]


def relative_error(value: np.ndarray, expected: np.ndarray) -> float:
    """||value - expected|| / ||expected||; where nothing is expected, ||value||."""
    size = float(np.linalg.norm(expected.ravel()))
    return float(np.linalg.norm((value - expected).ravel())) / (size or 1.0)
