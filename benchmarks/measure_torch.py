"""Runs one pass of one case on a torch implementation, captured in a CUDA graph (called directly without a GPU).

Kernels of torch libraries are compiled when they are called, so `build` calls the implementation at a size that takes
the device no time but has the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks import mamba3, rows, timing
from benchmarks.cases import Case
from benchmarks.floors import necessary_bytes
from benchmarks.inputs import (
    PARAMETERS,
    checked,
    compared,
    dtypes,
    main_state,
    operand_names,
    planted,
    shapes,
    step_state,
    token,
)
from benchmarks.peers.base import Peer, Variant

Tensors = dict[str, torch.Tensor]
PROGRAM_BYTES = 1 << 30  # a call that moves more is far beyond the cache by itself


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize(_: Any = None) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def build(
    peer: Peer, case: Case, pass_name: str, variant: Variant, effort: timing.Effort
) -> Callable[[dict[str, np.ndarray]], dict[str, Any]]:
    """Compiles; the result takes the reference and gives the row."""
    nbytes = necessary_bytes(case, pass_name)
    count = 1 if nbytes > PROGRAM_BYTES else timing.calls_per_program(nbytes, peer.most_calls)
    given = checked(case)
    little = _small(case)
    with peer.rehearsal(case):
        _call(peer, little, pass_name, variant)(random_operands(little, 0))
        synchronize()

    def measured(reference: dict[str, np.ndarray]) -> dict[str, Any]:
        sets = [random_operands(case, seed) for seed in range(count)]
        call = _call(peer, case, pass_name, variant)
        _peak_memory(lambda: call(sets[0]))  # the first call also tunes
        used = _peak_memory(lambda: call(sets[0]))
        execute, outputs = _capture(lambda: [call(one) for one in sets])

        saved = {name: tensor.clone() for name, tensor in sets[0].items()}
        _plant(case, sets[0], given)
        peer.settle()
        outputs = execute() or outputs
        synchronize()
        errors = _errors(case, pass_name, outputs[0], sets[0], reference)
        problems = _distinct_and_finite([output[0] for output in outputs])
        with torch.no_grad():
            for name, tensor in sets[0].items():
                tensor.copy_(saved[name])  # a cotangent of zeros would make the timed call cheaper than a real one
        peer.settle()
        del saved

        time = timing.measure(execute, synchronize, count, effort)
        return rows.measured(
            case, pass_name, peer.name, time, errors, problems,
            variant=variant, memory={"argument": _passed(case, pass_name), "peak": _passed(case, pass_name) + used},
            rotation_bytes=count * necessary_bytes(case, pass_name),
        )  # fmt: skip

    def run(reference: dict[str, np.ndarray]) -> dict[str, Any]:
        try:
            return measured(reference)
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # other processes measure here too

    return run


def _small(case: Case) -> Case:
    """The same kernels with less to do: compilers care about multiples of 16 and about ones."""
    batch = 16 if case.batch % 16 == 0 else min(case.batch, 2)
    return replace(case, batch=batch, seq=min(case.seq, 4096))


def _passed(case: Case, pass_name: str) -> int:
    """Bytes of what a call is given."""
    size, kind = shapes(case), dtypes(case)
    states = {name for name in size if name.startswith("state_")}
    names = {*operand_names(case)} | {"forward_backward": {"dy"}, "step": states}.get(pass_name, set())
    return sum(int(np.prod(size[name])) * (4 if kind[name] == "float32" else 2) for name in names)


def random_operands(case: Case, seed: int) -> Tensors:
    """As the JAX side draws them: every operand, dy and the step's state."""
    size, kind = shapes(case), dtypes(case)
    generator = torch.Generator(device()).manual_seed(seed)

    def uniform(name: str, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(size[name], generator=generator, device=device())

    drawn = {
        name: torch.randn(size[name], generator=generator, device=device(), dtype=getattr(torch, kind[name]))
        for name in size
    }
    if case.rank:
        return {name: mamba3.distributed(case, name, value, torch.exp) for name, value in drawn.items()}
    step = torch.exp(uniform("dt", float(np.log(1e-3)), float(np.log(1e-1))))
    drawn["dt"] = torch.log(torch.expm1(step)) if case.softplus else step
    drawn["A"] = -uniform("A", 1.0, 16.0)
    drawn["dt_bias"] *= 0.1
    return drawn


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device())
    return torch.from_numpy(array).to(device())


def _plant(case: Case, drawn: Tensors, given: dict[str, np.ndarray]) -> None:
    """Writes the checked pieces into `drawn`, which a captured graph reads: see measure_jax.plant."""

    def write(row: torch.Tensor, index: Any, part: Any) -> torch.Tensor:
        row[index] = part
        return row

    with torch.no_grad():
        for name, value in given.items():
            if name in PARAMETERS:
                drawn[name].copy_(_tensor(value))
                continue
            if name == "dy":
                drawn[name].zero_()
            planted(case, name, drawn[name][-1], _tensor(value), write)


def _call(peer: Peer, case: Case, pass_name: str, variant: Variant) -> Callable[[Tensors], tuple[torch.Tensor, Any]]:
    """(inputs) -> (y, gradients or None). The step updates `state_in` in place."""
    names = operand_names(case)
    if pass_name == "forward":
        forward = peer.forward(case, variant)

        def run_forward(drawn: Tensors) -> tuple[torch.Tensor, Any]:
            with torch.no_grad():
                return forward(*(drawn[name] for name in names)), None

        return run_forward
    if pass_name == "forward_backward":
        both = peer.forward_backward(case, variant)
        return lambda drawn: both(tuple(drawn[name] for name in names), drawn["dy"])
    step = peer.step(case, variant)

    def run_step(drawn: Tensors) -> tuple[torch.Tensor, Any]:
        with torch.no_grad():
            return step(step_state(case, drawn), *token(case, drawn))[1], None

    return run_step


def _peak_memory(run: Callable[[], Any]) -> int:
    """Bytes allocated beyond what was there, at the worst moment of one call (its outputs included)."""
    if not torch.cuda.is_available():
        run()
        return 0
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def _capture(run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """A function that runs the program once more, and the program's outputs (which a graph writes in place)."""
    if not torch.cuda.is_available():
        return run, run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()

    def execute() -> None:
        graph.replay()

    return execute, outputs


def _errors(
    case: Case, pass_name: str, output: tuple[torch.Tensor, Any], drawn: Tensors, reference: dict[str, np.ndarray]
) -> dict[str, float]:
    y, gradients = output
    if pass_name == "step":
        got = {"y": (y[-1], "step_y"), "state": (main_state(case, step_state(case, drawn))[-1], "step_state")}
    else:
        got = {"y": (torch.stack(compared(case, "dy", y[-1])), "y")}
        for name, value in zip(operand_names(case), gradients or (), strict=False):
            got[f"d{name}"] = (
                value if name in PARAMETERS else torch.stack(compared(case, name, value[-1])),
                f"d{name}",
            )
    return {name: _relative(value.detach(), _tensor(reference[key])) for name, (value, key) in got.items()}


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """As rows.relative_error, on the device."""
    difference = torch.linalg.vector_norm(got.float() - wanted)
    return float(difference / torch.clamp(torch.linalg.vector_norm(wanted), min=1e-30))


def _distinct_and_finite(ys: list[torch.Tensor]) -> list[str]:
    sums = [float(y.detach().abs().sum(dtype=torch.float32)) for y in ys]
    problems = []
    if not all(np.isfinite(sums)) or 0.0 in sums:
        problems.append("an output is zero or not finite")
    if len(set(sums)) != len(sums):
        problems.append("two calls on different inputs gave the same output")
    return problems
