"""Runs one pass of one case on a JAX implementation: `build` compiles, what it returns measures."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ssd
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

Row = dict[str, Any]
Reference = dict[str, np.ndarray]
Drawn = dict[str, jax.Array]

DECODE_TOKENS = 64
MOST_SETS = 16  # of operands in a program
PROGRAM_BYTES = 1 << 30  # that a program should move at least, or the host is slower to submit it than it is to run


def build(
    peer: Peer, case: Case, pass_name: str, variant: Variant, effort: timing.Effort
) -> Callable[[Reference], Row]:
    """Compiles all that the row needs, which runs nothing; the result takes the reference and gives the row."""
    builder = {"forward": _sequence, "forward_backward": _sequence, "step": _step, "decode": _decode}[pass_name]
    return builder(peer, case, pass_name, variant, effort)


def custom_calls(compiled: Any) -> dict[str, int]:
    """How often the optimised program calls each custom-call target."""
    return dict(Counter(re.findall(r'custom_call_target="([^"]+)"', compiled.as_text())))


def _kernels(peer: Peer, counts: dict[str, int]) -> int:
    """How many of a program's custom calls are the implementation's own."""
    if peer.custom_call is None:
        return 0
    return sum(count for target, count in counts.items() if target.startswith(peer.custom_call))


def missing_calls(peer: Peer, compiled: Any, single: Any, calls: int, least: int = 1) -> list[str]:
    """A program without the kernels it is meant to time is a program that was measured for nothing.

    One call has `least` kernels or more where there must be any, and the program has those of one call as often as it
    calls.
    """
    each, found = (_kernels(peer, custom_calls(program)) for program in (single, compiled))
    expected = calls * max(least if peer.custom_call and peer.must_call else 0, each)
    return [] if found == expected else [f"{found} calls of {peer.custom_call} in the program, expected {expected}"]


def memory(compiled: Any) -> dict[str, int]:
    """Bytes of device memory one program needs, from the compiler's own plan."""
    plan = compiled.memory_analysis()
    if plan is None:
        return {}
    sizes = {kind: int(getattr(plan, f"{kind}_size_in_bytes")) for kind in ("argument", "output", "temp", "alias")}
    return sizes | {"peak": sizes["argument"] + sizes["output"] + sizes["temp"] - sizes["alias"]}


def _single(function: Callable[..., Any], arguments: tuple[Any, ...], donate: tuple[int, ...] = ()) -> Any:
    """One call compiled, for its memory and its kernels; None off the GPU, where every program is one call."""
    if jax.devices()[0].platform != "gpu":
        return None
    return timing.compile_program(function, arguments, donate, timing.GPU_OPTIONS)[0]


def _calls(peer: Peer, case: Case, pass_name: str, single: Any) -> tuple[int, int]:
    """Sets of operands in a program, and how often each is used so that the program outlasts its dispatch.

    More than once only where kernels can be counted in the program: equal calls could be made one.
    """
    if single is None:  # off the GPU there is no cold cache to insist on, and XLA's compiler for CPUs is slow
        return 1, 1
    nbytes = necessary_bytes(case, pass_name)
    if nbytes > PROGRAM_BYTES:  # far beyond the cache by itself
        return 1, 1
    sets = timing.calls_per_program(nbytes, min(peer.most_calls, MOST_SETS))
    countable = _kernels(peer, custom_calls(single)) > 0
    return sets, max(1, min(peer.most_calls, PROGRAM_BYTES // nbytes) // sets) if countable else 1


def _compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(function).lower(*arguments).compile()


# Inputs


def draw(case: Case, key: jax.Array) -> Drawn:
    """Every operand, dy and the step's state, drawn on the device from the distributions of the checked pieces."""
    size, kind = shapes(case), dtypes(case)
    keys = dict(zip(size, jax.random.split(key, len(size)), strict=True))
    drawn = {name: jax.random.normal(keys[name], size[name], jnp.dtype(kind[name])) for name in size}
    if case.rank:
        return {name: mamba3.distributed(case, name, value, jnp.exp) for name, value in drawn.items()}
    step = jnp.exp(jax.random.uniform(keys["dt"], size["dt"], jnp.float32, np.log(1e-3), np.log(1e-1)))
    drawn["dt"] = jnp.log(jnp.expm1(step)) if case.softplus else step
    drawn["A"] = -jax.random.uniform(keys["A"], size["A"], jnp.float32, 1.0, 16.0)
    drawn["dt_bias"] = 0.1 * drawn["dt_bias"]
    return drawn


def plant(case: Case, drawn: Drawn, given: dict[str, Any]) -> Drawn:
    """`drawn` with the checked pieces in its last row, their parameters, and a cotangent that is zero elsewhere."""
    made = dict(drawn)
    for name, value in given.items():
        if name in PARAMETERS:
            made[name] = value
            continue
        base = jnp.zeros_like(drawn[name]) if name == "dy" else drawn[name]
        row = planted(case, name, base[-1], value, lambda array, index, part: array.at[index].set(part))
        made[name] = base.at[-1].set(row)
    return made


class _Inputs:
    """Draws operands and plants the pieces, both compiled."""

    def __init__(self, case: Case) -> None:
        self.checked = checked(case)
        self.shapes = jax.eval_shape(functools.partial(draw, case), jax.random.key(0))
        self._draw = _compiled(functools.partial(draw, case), jax.random.key(0))
        self._plant = _compiled(functools.partial(plant, case), self.shapes, self.checked)

    def draw(self, seed: int) -> Drawn:
        return self._draw(jax.random.key(seed))

    def planted(self, seed: int) -> Drawn:
        return self._plant(self.draw(seed), self.checked)


# What came out


def _relative(got: Any, wanted: Any) -> jax.Array:
    """As rows.relative_error, where the arrays are."""
    difference = jnp.linalg.norm(jnp.ravel(got.astype(jnp.float32) - wanted))
    return difference / jnp.maximum(jnp.linalg.norm(jnp.ravel(wanted)), 1e-30)


def _sums(ys: list[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(jnp.abs(y), dtype=jnp.float32) for y in ys]


def distinct_and_finite(sums: list[Any]) -> list[str]:
    """Every call must have produced its own numbers: no two outputs of different inputs are alike, none is NaN."""
    found = [float(value) for value in sums]
    problems = []
    if not np.all(np.isfinite(found)) or 0.0 in found:
        problems.append("an output is zero or not finite")
    if len(set(found)) != len(found):
        problems.append("two calls on different inputs gave the same output")
    return problems


def _sequence_errors(case: Case, output: Any, reference: Any, backward: bool) -> dict[str, jax.Array]:
    got = {"y": output[0] if backward else output}
    if backward:
        got |= {f"d{name}": value for name, value in zip(operand_names(case), output[1], strict=True)}
    errors = {}
    for name, value in got.items():
        operand = "dy" if name == "y" else name[1:]
        kept = value if operand in PARAMETERS else jnp.stack(compared(case, operand, value[-1]))
        errors[name] = _relative(kept, reference[name])
    return errors


def _expected(case: Case, inputs: _Inputs, names: list[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """The reference's arrays by name, as benchmarks.reference.compute gives them."""
    seq = (case.seq,) if case.step else ()
    of_step = {"step_y": (*seq, case.heads, case.head_dim), "step_state": (case.heads, case.head_dim, case.state)}
    shaped = {"y": inputs.checked["dy"].shape} | of_step
    shaped |= {f"d{name}": value.shape for name, value in inputs.checked.items()}
    return {name: jax.ShapeDtypeStruct(shaped[name], jnp.float32) for name in names}


def _floats(errors: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in errors.items()}


# Passes


def _sequence(
    peer: Peer, case: Case, pass_name: str, variant: Variant, effort: timing.Effort
) -> Callable[[Reference], Row]:
    names = operand_names(case)
    backward = pass_name == "forward_backward"
    # Jitted by itself, so that it is lowered once however many calls there are.
    call = jax.jit(peer.forward_backward(case, variant) if backward else peer.forward(case, variant))

    def pick(drawn: Drawn) -> tuple[Any, ...]:
        operands = tuple(drawn[name] for name in names)
        return (operands, drawn["dy"]) if backward else operands

    def program(sets: list[Any]) -> list[Any]:
        outputs: list[Any] = []
        for turn in range(turns):
            for one in sets:
                if turn:  # all of it waits for the call before: equal calls would be made one
                    one, outputs[-1] = jax.lax.optimization_barrier((one, outputs[-1]))
                outputs.append(call(*one))
        return outputs

    inputs = _Inputs(case)
    single = _single(call, pick(inputs.shapes))
    count, turns = _calls(peer, case, pass_name, single)
    calls, shaped = count * turns, [pick(inputs.shapes)] * count
    compiled, options = timing.compile_program(program, (shaped,), (), timing.GPU_OPTIONS)
    single = single or compiled
    problems = missing_calls(peer, compiled, single, calls, 2 if backward else 1)

    def look(outputs: list[Any], reference: Any) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        ys = [output[0] if backward else output for output in outputs[:count]]
        return _sequence_errors(case, outputs[0], reference, backward), _sums(ys)

    wanted = ["y", *(f"d{name}" for name in names)] if backward else ["y"]
    looker = _compiled(look, jax.eval_shape(program, shaped), _expected(case, inputs, wanted))

    def run(reference: Reference) -> Row:
        outputs = compiled([pick(inputs.planted(0)), *(pick(inputs.draw(seed)) for seed in range(1, count))])
        errors, sums = looker(outputs, {name: reference[name] for name in wanted})
        found = [*problems, *distinct_and_finite(sums)]
        del outputs
        sets = [pick(inputs.draw(seed)) for seed in range(count)]
        time = timing.measure(lambda: compiled(sets), jax.block_until_ready, calls, effort)
        return rows.measured(
            case, pass_name, peer.name, time, _floats(errors), found,
            variant=variant, memory=memory(single), custom_calls=custom_calls(compiled), compiler_options=options,
            rotation_bytes=count * necessary_bytes(case, pass_name),
        )  # fmt: skip

    return run


def _step(
    peer: Peer, case: Case, pass_name: str, variant: Variant, effort: timing.Effort
) -> Callable[[Reference], Row]:
    """n independent states, advanced by tokens of their own; a program's states are the next one's."""
    step = jax.jit(peer.step(case, variant))

    def program(states: list[Any], tokens: list[Any]) -> tuple[list[Any], list[Any]]:
        states, ys = list(states), []
        for _ in range(turns):
            for index, one in enumerate(tokens):
                states[index], y = step(states[index], *one)
                ys.append(y)
        return states, ys

    def pick(drawn: Drawn) -> tuple[Any, tuple[Any, ...]]:
        return step_state(case, drawn), token(case, drawn)

    def look(states: list[Any], ys: list[Any], reference: Any) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        errors = {"y": _relative(ys[0][-1], reference["step_y"])}
        if turns == 1:
            errors["state"] = _relative(main_state(case, states[0])[-1], reference["step_state"])
        return errors, _sums(ys[:count])

    inputs = _Inputs(case)
    state, operands = jax.eval_shape(pick, inputs.shapes)
    single = _single(step, (state, *operands), (0,))
    count, turns = _calls(peer, case, pass_name, single)
    calls, shaped = count * turns, ([state] * count, [operands] * count)
    compiled, options = timing.compile_program(program, shaped, (0,), timing.GPU_OPTIONS)
    single = single or compiled
    problems = missing_calls(peer, compiled, single, calls)
    wanted = ["step_y", "step_state"]
    picker = _compiled(pick, inputs.shapes)
    looker = _compiled(look, *jax.eval_shape(program, *shaped), _expected(case, inputs, wanted))

    def run(reference: Reference) -> Row:
        states, tokens = map(list, zip(*(picker(inputs.draw(seed)) for seed in range(count)), strict=True))
        first = picker(inputs.planted(0))
        fresh = [first[0], *(jax.tree.map(jnp.copy, one) for one in states[1:])]
        stepped, ys = compiled(fresh, [first[1], *tokens[1:]])
        errors, sums = looker(stepped, ys, {name: reference[name] for name in wanted})
        if turns > 1:  # those states are several tokens on
            once, _ = single(picker(inputs.planted(0))[0], *first[1])
            errors |= {"state": _relative(main_state(case, once)[-1], reference["step_state"])}
            del once
        found = [*problems, *distinct_and_finite(sums)]
        del first, fresh, stepped, ys
        carried = [states]

        def execute() -> Any:
            carried[0], ys = compiled(carried[0], tokens)
            return carried[0], ys

        time = timing.measure(execute, jax.block_until_ready, calls, effort)
        return rows.measured(
            case, pass_name, peer.name, time, _floats(errors), found,
            variant=variant, memory=memory(single), custom_calls=custom_calls(compiled), compiler_options=options,
            rotation_bytes=count * necessary_bytes(case, pass_name),
        )  # fmt: skip

    return run


def _decode(
    peer: Peer, case: Case, pass_name: str, variant: Variant, effort: timing.Effort
) -> Callable[[Reference], Row]:
    """lax.scan over the step, as a server decodes: time per token, the loop's own cost included.

    On a GPU the row is of the loop captured whole, and `default` holds the time of the loop as JAX runs it unasked.
    """
    step = peer.step(case, variant)
    names = operand_names(case)

    def program(state: Any, tokens: dict[str, Any], parameters: dict[str, Any]) -> tuple[Any, Any]:
        def body(state: Any, of_token: dict[str, Any]) -> tuple[Any, Any]:
            given = of_token | parameters
            return step(state, *(given[name] for name in names))

        return jax.lax.scan(body, state, tokens)

    def pick(first: Drawn, later: list[Drawn]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        every = [token(case, first), *(token(case, later[i % 3]) for i in range(DECODE_TOKENS - 1))]
        parameters = {name: first[name] for name in names if name in PARAMETERS}
        tokens = {
            name: jnp.stack(column)
            for name, column in zip(names, zip(*every, strict=True), strict=True)
            if name not in PARAMETERS
        }
        return step_state(case, first), tokens, parameters

    def look(ys: jax.Array, reference: Any) -> tuple[dict[str, jax.Array], jax.Array]:
        return {"y": _relative(ys[0, -1], reference["step_y"])}, jnp.all(jnp.isfinite(ys))

    inputs = _Inputs(case)
    picker = _compiled(pick, inputs.shapes, [inputs.shapes] * 3)
    shaped = jax.eval_shape(pick, inputs.shapes, [inputs.shapes] * 3)
    compiled, options = timing.compile_program(program, shaped, (0,), (jax_ssd.LOOP_AS_GRAPH, {}))
    unasked = timing.compile_program(program, shaped, (0,), ({},))[0] if options else None
    problems = missing_calls(peer, compiled, compiled, 1)
    looker = _compiled(look, jax.eval_shape(program, *shaped)[1], _expected(case, inputs, ["step_y"]))

    def run(reference: Reference) -> Row:
        state, tokens, parameters = picker(inputs.planted(0), [inputs.draw(seed) for seed in range(1, 4)])
        carried, ys = compiled(state, tokens, parameters)
        errors, finite = looker(ys, {"step_y": reference["step_y"]})
        found = [*problems, *([] if finite else ["an output is not finite"])]
        holder = [carried]
        del carried, ys

        def timed(loop: Any) -> timing.Timing:
            def execute() -> Any:
                holder[0], ys = loop(holder[0], tokens, parameters)
                return holder[0], ys

            return timing.measure(execute, jax.block_until_ready, DECODE_TOKENS, effort)

        time = timed(compiled)
        default = {"default": timed(unasked).to_json()} if unasked else {}
        return rows.measured(
            case, pass_name, peer.name, time, _floats(errors), found,
            variant=variant, memory=memory(compiled), custom_calls=custom_calls(compiled), compiler_options=options,
            rotation_bytes=necessary_bytes(case, "step"), **default,
        )  # fmt: skip

    return run
