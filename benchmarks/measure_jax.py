"""Runs one pass of one case on a JAX implementation."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import mamba3, rows, timing
from benchmarks.cases import Case
from benchmarks.floors import necessary_bytes
from benchmarks.inputs import PARAMETERS, checked_row, dtypes, kept_tokens, operand_names, shapes
from benchmarks.peers.base import Peer, Variant

DECODE_TOKENS = 64

# As timing.GPU_OPTIONS, the loop over tokens captured too.
DECODE_OPTIONS: tuple[dict[str, str], ...] = (
    timing.GPU_OPTIONS[0] | {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,WHILE"},
    {},
)


def measure(
    peer: Peer, case: Case, pass_name: str, variant: Variant, reference: dict[str, np.ndarray], effort: timing.Effort
) -> dict[str, Any]:
    runner = {"forward": _sequence, "forward_backward": _sequence, "step": _step, "decode": _decode}[pass_name]
    return runner(peer, case, pass_name, variant, reference, effort)


def custom_calls(compiled: Any) -> dict[str, int]:
    """How often the optimised program calls each custom-call target."""
    return dict(Counter(re.findall(r'custom_call_target="([^"]+)"', compiled.as_text())))


def missing_calls(peer: Peer, counts: dict[str, int], expected: int) -> list[str]:
    """A program without the kernels it is meant to time is a program that was measured for nothing."""
    if peer.custom_call is None:
        return []
    found = sum(count for target, count in counts.items() if target.startswith(peer.custom_call))
    return [] if found >= expected else [f"{found} calls of {peer.custom_call} in the program, expected {expected}"]


def memory(compiled: Any) -> dict[str, int]:
    """Bytes of device memory one program needs, from the compiler's own plan."""
    plan = compiled.memory_analysis()
    if plan is None:
        return {}
    sizes = {kind: int(getattr(plan, f"{kind}_size_in_bytes")) for kind in ("argument", "output", "temp", "alias")}
    return sizes | {"peak": sizes["argument"] + sizes["output"] + sizes["temp"] - sizes["alias"]}


def _calls(peer: Peer, case: Case, pass_name: str) -> int:
    # Off the GPU there is no cold cache to insist on, and XLA's CPU compiler is slow: one call, compiled once.
    most = peer.most_calls if jax.devices()[0].platform == "gpu" else 1
    return timing.calls_per_program(necessary_bytes(case, pass_name), most)


# Inputs


def random_operands(case: Case, seed: int) -> dict[str, jax.Array]:
    """Every operand, dy and the step's state, drawn on the device from the distributions of the checked row."""
    return _generator(case)(jax.random.key(seed))


@functools.cache
def _generator(case: Case) -> Callable[[jax.Array], dict[str, jax.Array]]:
    size, kind = shapes(case), dtypes(case)

    @jax.jit
    def draw(key: jax.Array) -> dict[str, jax.Array]:
        keys = dict(zip(size, jax.random.split(key, len(size)), strict=True))
        drawn = {name: jax.random.normal(keys[name], size[name], jnp.dtype(kind[name])) for name in size}
        if case.rank:
            return {name: mamba3.distributed(case, name, value, jnp.exp) for name, value in drawn.items()}
        step = jnp.exp(jax.random.uniform(keys["dt"], size["dt"], jnp.float32, np.log(1e-3), np.log(1e-1)))
        drawn["dt"] = jnp.log(jnp.expm1(step)) if case.softplus else step
        drawn["A"] = -jax.random.uniform(keys["A"], size["A"], jnp.float32, 1.0, 16.0)
        drawn["dt_bias"] = 0.1 * drawn["dt_bias"]
        return drawn

    return draw


def plant(case: Case, drawn: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`drawn` with the checked row as its last row, its parameters, and a cotangent that is zero in every other row.

    With that cotangent the parameters' gradients are the checked row's alone, so they can be compared as well.
    """
    row = checked_row(case)
    planted = dict(drawn)
    for name, value in row.items():
        if name in PARAMETERS:
            planted[name] = jnp.asarray(value)
        else:
            base = jnp.zeros_like(drawn[name]) if name == "dy" else drawn[name]
            planted[name] = base.at[-1].set(jnp.asarray(value[0]))
    return planted


def _token(case: Case, drawn: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Operands of one step: the only token of every row."""
    return tuple(drawn[name] if name in PARAMETERS else drawn[name][:, 0] for name in operand_names(case))


# Passes


def _sequence(
    peer: Peer, case: Case, pass_name: str, variant: Variant, reference: dict[str, np.ndarray], effort: timing.Effort
) -> dict[str, Any]:
    names = operand_names(case)
    backward = pass_name == "forward_backward"
    if backward:
        both = peer.forward_backward(case, variant)
    else:
        forward = peer.forward(case, variant)

    def pick(drawn: dict[str, jax.Array]) -> tuple[Any, ...]:
        operands = tuple(drawn[name] for name in names)
        return (operands, drawn["dy"]) if backward else operands

    def program(sets: list[Any]) -> list[Any]:
        return [both(*one) if backward else forward(*one) for one in sets]

    calls = _calls(peer, case, pass_name)
    sets = [pick(random_operands(case, seed)) for seed in range(calls)]
    compiled, options = timing.compile_program(program, (sets,), (), timing.GPU_OPTIONS)
    single = compiled if calls == 1 else timing.compile_program(program, (sets[:1],), (), timing.GPU_OPTIONS)[0]
    counts = custom_calls(compiled)
    problems = missing_calls(peer, counts, calls * (2 if backward and peer.custom_call == "jax_ssd.launch" else 1))

    outputs = compiled([pick(plant(case, random_operands(case, 0))), *sets[1:]])
    errors = _sequence_errors(case, outputs[0], reference, backward)
    ys = [output[0] if backward else output for output in outputs]
    problems += distinct_and_finite(ys)
    del outputs, ys

    time = timing.measure(lambda: compiled(sets), jax.block_until_ready, calls, effort)
    moved = calls * necessary_bytes(case, pass_name)
    return rows.measured(
        case, pass_name, peer.name, time, errors, problems,
        variant=variant, memory=memory(single), custom_calls=counts, compiler_options=options, rotation_bytes=moved,
    )  # fmt: skip


def _sequence_errors(case: Case, output: Any, reference: dict[str, np.ndarray], backward: bool) -> dict[str, float]:
    # Mamba-3's scalars have their tokens last, so all of them are compared.
    kept = slice(None) if case.rank else jnp.asarray(kept_tokens(case.seq))
    got = {"y": output[0] if backward else output}
    if backward:
        got |= {f"d{name}": value for name, value in zip(operand_names(case), output[1], strict=True)}
    errors = {}
    for name, value in got.items():
        value = value if name[1:] in PARAMETERS else value[-1][kept]
        errors[name] = rows.relative_error(np.asarray(value.astype(jnp.float32)), reference[name])
    return errors


def distinct_and_finite(ys: list[jax.Array]) -> list[str]:
    """Every call must have produced its own numbers: no two outputs of different inputs are alike, none is NaN."""
    sums = np.asarray([jnp.sum(jnp.abs(y), dtype=jnp.float32) for y in ys], np.float64)
    problems = []
    if not np.all(np.isfinite(sums)) or np.any(sums == 0):
        problems.append("an output is zero or not finite")
    if len(set(sums.tolist())) != len(sums):
        problems.append("two calls on different inputs gave the same output")
    return problems


def _step(
    peer: Peer, case: Case, pass_name: str, variant: Variant, reference: dict[str, np.ndarray], effort: timing.Effort
) -> dict[str, Any]:
    """n independent states, each advanced by one token per program; a program's states are the next one's."""
    step = peer.step(case, variant)

    def program(states: list[Any], tokens: list[Any]) -> tuple[list[Any], list[Any]]:
        results = [step(state, *token) for state, token in zip(states, tokens, strict=True)]
        return [state for state, _ in results], [y for _, y in results]

    calls = _calls(peer, case, pass_name)
    drawn = [random_operands(case, seed) for seed in range(calls)]
    states, tokens = [one["state_in"] for one in drawn], [_token(case, one) for one in drawn]
    compiled, options = timing.compile_program(program, (states, tokens), (0,), timing.GPU_OPTIONS)
    single = (
        compiled
        if calls == 1
        else timing.compile_program(program, (states[:1], tokens[:1]), (0,), timing.GPU_OPTIONS)[0]
    )
    counts = custom_calls(compiled)
    problems = missing_calls(peer, counts, calls)

    planted = plant(case, drawn[0])
    fresh = [jnp.copy(planted["state_in"]), *(jnp.copy(state) for state in states[1:])]
    stepped, ys = compiled(fresh, [_token(case, planted), *tokens[1:]])
    errors = {
        "y": rows.relative_error(np.asarray(ys[0][-1].astype(jnp.float32)), reference["step_y"]),
        "state": rows.relative_error(np.asarray(stepped[0][-1].astype(jnp.float32)), reference["step_state"]),
    }
    problems += distinct_and_finite(ys)
    del planted, fresh, stepped, ys, drawn
    carried = [states]

    def execute() -> Any:
        carried[0], ys = compiled(carried[0], tokens)
        return carried[0], ys

    time = timing.measure(execute, jax.block_until_ready, calls, effort)
    moved = calls * necessary_bytes(case, pass_name)
    return rows.measured(
        case, pass_name, peer.name, time, errors, problems,
        variant=variant, memory=memory(single), custom_calls=counts, compiler_options=options, rotation_bytes=moved,
    )  # fmt: skip


def _decode(
    peer: Peer, case: Case, pass_name: str, variant: Variant, reference: dict[str, np.ndarray], effort: timing.Effort
) -> dict[str, Any]:
    """lax.scan over the step, as a server decodes: time per token, the loop's own cost included."""
    step = peer.step(case, variant)
    names = operand_names(case)

    def program(state: Any, tokens: dict[str, Any], parameters: dict[str, Any]) -> tuple[Any, Any]:
        def body(state: Any, token: dict[str, Any]) -> tuple[Any, Any]:
            given = token | parameters
            return step(state, *(given[name] for name in names))

        return jax.lax.scan(body, state, tokens)

    drawn = plant(case, random_operands(case, 0))
    state = drawn["state_in"]
    first = {name: drawn[name][:, 0] for name in names if name not in PARAMETERS}
    later = [random_operands(case, seed) for seed in range(1, 4)]
    tokens = {
        name: jnp.stack([value] + [later[i % 3][name][:, 0] for i in range(DECODE_TOKENS - 1)])
        for name, value in first.items()
    }
    parameters = {name: drawn[name] for name in names if name in PARAMETERS}
    compiled, options = timing.compile_program(program, (state, tokens, parameters), (0,), DECODE_OPTIONS)
    counts = custom_calls(compiled)
    problems = missing_calls(peer, counts, 1)
    carried, ys = compiled(jnp.copy(state), tokens, parameters)
    errors = {"y": rows.relative_error(np.asarray(ys[0, -1].astype(jnp.float32)), reference["step_y"])}
    if not bool(jnp.all(jnp.isfinite(ys))):
        problems.append("an output is not finite")
    holder = [carried]

    def execute() -> Any:
        holder[0], ys = compiled(holder[0], tokens, parameters)
        return holder[0], ys

    time = timing.measure(execute, jax.block_until_ready, DECODE_TOKENS, effort)
    return rows.measured(
        case, pass_name, peer.name, time, errors, problems,
        variant=variant, memory=memory(compiled), custom_calls=counts, compiler_options=options,
        rotation_bytes=necessary_bytes(case, "step"),
    )  # fmt: skip
