"""Tokens per second of a whole language model that decodes, for each implementation of its recurrence.

    python -m benchmarks.decode --implementations cuda cutile xla jla --name decode

builds the library's language model at the size of mamba2-130m with random weights (bfloat16, float32 state) and
decodes in one jitted lax.scan, once for each batch size and each way of capturing the loop. The tokens are given, so
that all implementations see the same; the likeliest next one is computed as it would be. Prints a table and writes
benchmarks/results/<date>-<name>.json. Times: benchmarks/timing.py; one program is one scan, the arrangement of the
weights that a scan begins with included.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_ssd
from benchmarks import ceilings, rows, timing
from benchmarks.peers.base import version_of
from jax_ssd.models import Decoder, LanguageModel, LanguageModelConfig

RESULTS = Path(__file__).parent / "results"
SCHEMA = 1
# How a GPU is told to run the loop: kernel by kernel, as JAX does unasked (a token at a time is captured), or whole.
CAPTURES: dict[str, dict[str, Any]] = {
    "off": {"xla_gpu_enable_command_buffer": ""},
    "default": {},
    "loop": jax_ssd.LOOP_AS_GRAPH,
}
# bfloat16 activations after that many layers: how far two right implementations were seen apart, with room.
WRONG_ABOVE = 5e-2

Recurrence = Callable[..., tuple[jax.Array, jax.Array]]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--implementations", nargs="+", default=["cuda", "cutile", "xla", "jla"], metavar="NAME")
    made.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    made.add_argument("--captures", nargs="+", choices=tuple(CAPTURES), default=list(CAPTURES))
    made.add_argument("--tokens", type=int, default=128, help="per scan")
    made.add_argument("--layers", type=int, default=24)
    made.add_argument("--features", type=int, default=768)
    made.add_argument("--vocab", type=int, default=50288)
    made.add_argument("--name", default="decode", help="last part of the result file's name")
    made.add_argument("--output", type=Path, help=f"folder for the result file (default {RESULTS.name}/ here)")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--sample-ms", type=float, default=100.0, help="device time aimed at per sample")
    return made


class Model:
    """The model's weights and the program that decodes with them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.config = LanguageModelConfig(
            vocab_size=arguments.vocab,
            features=arguments.features,
            layers=arguments.layers,
            state_dim=128,
            head_dim=64,
            dtype=jnp.bfloat16,
            param_dtype=jnp.bfloat16,
        )
        self.weights = nnx.split(LanguageModel(self.config, rngs=nnx.Rngs(0)))[1]
        tokens = np.random.default_rng(0).integers(0, arguments.vocab, (arguments.tokens, max(arguments.batches)))
        self.tokens = jnp.asarray(tokens, jnp.int32)

    def program(self, implementation: str) -> Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]:
        """(weights, tokens [seq, batch]) -> logits of the last token, and the likeliest token after each."""
        recurrence = jla_recurrence() if implementation == "jla" else None
        own = "xla" if implementation == "jla" else implementation
        config = replace(self.config, implementation=own)
        graph, _ = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))

        def decode(weights: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            model = nnx.merge(graph, weights)
            decoder = Decoder(model, recurrence)
            batch = tokens.shape[1:]
            carry = decoder.pack(model.initialize_carry(batch))
            if implementation == "jla":  # keeps its state the other way round
                position, layers = carry
                carry = position, tuple((window, jnp.swapaxes(state, -1, -2)) for window, state in layers)

            def token(state: Any, given: jax.Array) -> tuple[Any, jax.Array]:
                carry, logits = decoder.step(state[0], given)
                return (carry, logits), jnp.argmax(logits, axis=-1).astype(jnp.int32)

            empty = jnp.zeros((*batch, self.config.vocab_size), jnp.float32)
            (_, logits), likeliest = jax.lax.scan(token, (carry, empty), tokens)
            return logits, likeliest

        return decode

    def bytes_per_token(self, batch: int) -> int:
        """What a token of every row moves at least: the weights once, the states in and out."""
        heads = self.config.expand * self.config.features // self.config.head_dim
        states = 2 * 4 * batch * self.config.layers * heads * self.config.head_dim * self.config.state_dim
        return states + sum(leaf.nbytes for leaf in jax.tree.leaves(self.weights))


def jla_recurrence() -> Recurrence:
    """One token as that package's own layer decodes it, its sequential XLA scan of length one; state [b, h, n, p].

    Raises ImportError where the package, or what it needs, is not installed.
    """
    from jla.layers.ssm import mamba2_ssd

    def step(
        state: jax.Array, x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, D: jax.Array, **options
    ) -> tuple[jax.Array, jax.Array]:
        sizes = jax.nn.softplus(dt + options["dt_bias"])
        x, sizes, B, C = (array[:, None] for array in (x, sizes, B, C))
        y, state = mamba2_ssd(
            x, sizes, A, B, C, d=D[:, 0], initial_state=state, output_final_state=True, impl="reference"
        )
        return state, y[:, 0].astype(x.dtype)

    return step


def kernels_in_loop(text: str) -> dict[str, int]:
    """What the body of an optimised program's loop launches, by kind; nothing if it has no loop, or several."""
    bodies = re.findall(r"\bwhile\(.*?body=%?([\w.\-]+)", text)
    if len(bodies) != 1:
        return {}
    (body,) = re.findall(rf"^%?{re.escape(bodies[0])} [^\n]*\{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL)
    silent = {"parameter", "get-tuple-element", "tuple", "constant", "bitcast", "fusion-done", "copy-done"}
    kinds = re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?[\]\})] ([a-z][a-z\-]*)\(", body, re.MULTILINE)
    return dict(Counter(kind for kind in kinds if kind not in silent))


def measure(model: Model, implementation: str, batch: int, captures: list[str], effort: timing.Effort, copy: float):
    """Rows of one implementation at one batch size, and the logits it gave (None if it could not run)."""
    head = {"implementation": implementation, "batch": batch}
    tokens = model.tokens[:, :batch]
    made, logits = [], None
    try:
        with jax.numpy_dtype_promotion("standard"):
            lowered = jax.jit(model.program(implementation)).lower(model.weights, tokens)
    except Exception as error:  # whatever keeps an implementation from running is what its row says
        return [_failure(head | {"capture": name}, error) for name in captures], None
    compiled = _side_by_side([lambda name=name: _compile(lowered, name) for name in captures])
    for name, program in zip(captures, compiled, strict=True):
        row = head | {"capture": name}
        if isinstance(program, Exception):  # an option that this version does not have
            made.append(_failure(row, program))
            continue
        try:
            with timing.alone():
                logits = np.asarray(program(model.weights, tokens)[0], np.float64)
                time = timing.measure(
                    lambda run=program: run(model.weights, tokens), jax.block_until_ready, len(tokens), effort
                )
        except Exception as error:  # memory
            made.append(_failure(row, error))
            continue
        floor = 1e6 * model.bytes_per_token(batch) / copy
        kernels = kernels_in_loop(program.as_text() or "")
        made.append(
            row
            | {
                "status": "ok",
                "microseconds": 1e6 * time.seconds,
                "tokens_per_second": batch / time.seconds,
                "floor_microseconds": floor,
                "times_floor": 1e6 * time.seconds / floor,
                "kernels_per_token": sum(kernels.values()),
                "kernels": kernels,
                "timing": time.to_json(),
            }
        )
    return made, logits


def _compile(lowered: Any, capture: str) -> Any:
    return lowered.compile(compiler_options=dict(CAPTURES[capture]) if _on_gpu() else None)


def _side_by_side(functions: list[Callable[[], Any]]) -> list[Any]:
    """What each returned, or raised."""

    def caught(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(caught, functions))


def _on_gpu() -> bool:
    return jax.devices()[0].platform == "gpu"


def _failure(row: dict[str, Any], error: Exception) -> dict[str, Any]:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    status = "unsupported" if isinstance(error, NotImplementedError | ImportError) else "failed"
    return row | {"status": status, "reason": text[:500]}


def check(row: dict[str, Any], logits: np.ndarray, reference: np.ndarray) -> None:
    """Adds how far the logits are from the reference's; a row that is too far, or not finite, is wrong."""
    row["error"] = rows.relative_error(logits, reference)
    if not row["error"] <= WRONG_ABOVE:
        row |= {"status": "wrong", "reason": f"logits are off by {row['error']:.2g}"}


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{'batch':>5}  {'implementation':14}  {'capture':8}  {'us/token':>9}  {'tokens/s':>9}  x floor  kernels  error"
    ]
    for row in result["rows"]:
        start = f"{row['batch']:5}  {row['implementation']:14}  {row['capture']:8}"
        if "microseconds" in row:
            lines.append(
                f"{start}  {row['microseconds']:9.1f}  {row['tokens_per_second']:9.0f}  {row['times_floor']:7.2f}  "
                f"{row['kernels_per_token']:7}  {row['error']:.1e}  {row.get('reason', '')}".rstrip()
            )
        else:
            lines.append(f"{start}  {row['status']}: {row['reason'][:90]}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    given = sys.argv[1:] if arguments is None else arguments
    parsed = parser().parse_args(given)
    effort = timing.Effort(parsed.sample_ms / 1e3, parsed.repeats)
    model, now = Model(parsed), datetime.datetime.now(datetime.UTC)
    with timing.alone():
        rates = ceilings.measure_ceilings(effort)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "name": parsed.name,
        "date": now.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.decode", *given]),
        "device": ceilings.describe_device(),
        "versions": {name: version_of(name) for name in ("jax", "jaxlib", "flax", "jax_ssd", "jax-linear-attention")},
        "ceilings": rates,
        "options": asdict(effort) | {"captures": CAPTURES, "tokens": parsed.tokens},
        "model": {name: str(value) for name, value in asdict(model.config).items()},
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights)),
        "rows": [],
    }
    path = (parsed.output or RESULTS) / f"{now:%Y-%m-%d}-{parsed.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for batch in parsed.batches:
        reference = None
        # XLA first: the others' logits are compared with its.
        for name in sorted(parsed.implementations, key=lambda name: name != "xla"):
            found, logits = measure(model, name, batch, parsed.captures, effort, rates["copy_bytes_per_second"])
            reference = logits if reference is None else reference
            for row in found:
                if row["status"] == "ok":
                    check(row, logits, reference)
            result["rows"] += found
            path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['device']['kind']}, copy {rates['copy_bytes_per_second'] / 1e9:.0f} GB/s, {result['versions']}")
    print(table(result))
    print(f"written to {path}")
    return result


if __name__ == "__main__":
    main()
