"""Trains a byte-level Mamba language model on the Python standard library's sources, then decodes from it.

    python examples/train_bytes.py                                      Mamba-2, a few minutes on two CPU cores
    python examples/train_bytes.py --mixer mamba3 --mimo-rank 4         Mamba-3, MIMO
    python examples/train_bytes.py --help                               sizes, steps, seed, implementation

Every machine that runs this has the text: the .py files of its own Python, split by file into a training and a held-out
part. The program reports bits per byte on the held-out part beside what byte counts, byte-pair counts and gzip reach on
the same bytes, continues a held-out file, and checks itself: decoding token by token equals the parallel pass, and the
scan on the trained model's activations equals the token-by-token definition, with gradients.

On a GPU the same program runs the kernels in bfloat16.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import math
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_ssd
from jax_ssd.models import (
    LanguageModel,
    LanguageModelConfig,
    TrainState,
    adamw,
    bits_per_token,
    decode,
    generate,
    make_train_step,
    prefill,
)

BOUNDARY = b"\0"  # before each file; it occurs in no Python source


# ---------------------------------------------------------------------------------------------------------------- data


def read_sources(limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out bytes, uint8; a file belongs to one of them by a checksum of its name.

    Args:
      limit: stop after about this many bytes.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if skipped.intersection(name.parts) or total >= limit:
            continue
        text = BOUNDARY + path.read_bytes()
        parts[zlib.crc32(name.as_posix().encode()) % 16 == 0].append(text)
        total += len(text)
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    if not train.size or not held_out.size:
        raise SystemExit(f"no Python sources to train on below {root}")
    return train, held_out


def batches(text: np.ndarray, batch: int, seq: int, seed: int) -> Iterator[np.ndarray]:
    """Endless int32 ``[batch, seq + 1]`` windows at random places."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - seq, size=(batch, 1))
        yield text[starts + np.arange(seq + 1)].astype(np.int32)


def spread_sample(text: np.ndarray, pieces: int, seq: int) -> np.ndarray:
    """An eighth of the text, for the reports on the way: pieces of whole windows, evenly spread."""
    length = max(seq, len(text) // (8 * pieces) // seq * seq)
    starts = np.linspace(0, max(0, len(text) - length), pieces).astype(int)
    return np.concatenate([text[start : start + length] for start in starts])


# ----------------------------------------------------------------------------------------------------------- baselines


def unigram_bits(train: np.ndarray, text: np.ndarray) -> float:
    """Bits per byte of ``text`` under byte frequencies of ``train``, every count raised by one."""
    return float(-np.log2(_frequencies(train))[text].mean())


def bigram_bits(train: np.ndarray, text: np.ndarray) -> float:
    """The same under frequencies of byte pairs, each row smoothed by one count spread as the single bytes are."""
    pairs = np.bincount(train[:-1].astype(np.int64) * 256 + train[1:], minlength=1 << 16).reshape(256, 256)
    smoothed = (pairs + _frequencies(train)) / (pairs.sum(axis=1, keepdims=True) + 1)
    before = np.concatenate([np.frombuffer(BOUNDARY, np.uint8), text[:-1]])
    return float(-np.log2(smoothed[before, text]).mean())


def gzip_bits(text: np.ndarray) -> float:
    """Bits per byte of ``text`` compressed on its own at gzip's best level."""
    return 8 * len(gzip.compress(text.tobytes(), compresslevel=9)) / len(text)


def _frequencies(text: np.ndarray) -> np.ndarray:
    counts = np.bincount(text, minlength=256) + 1
    return counts / counts.sum()


# ---------------------------------------------------------------------------------------------------------- evaluation


def make_evaluator(graphdef: Any, text: np.ndarray, seq: int, rows: int) -> Callable[[Any], float]:
    """Bits per byte of all of ``text``: ``rows`` streams read window after window, each handing its state to the next.

    Every byte is predicted once; the first of a row from the boundary byte alone.
    """
    windows = max(1, math.ceil(len(text) / (rows * seq)))
    targets = np.zeros(rows * windows * seq, np.int32)
    targets[: len(text)] = text
    counted = np.arange(targets.size) < len(text)
    targets, counted = (a.reshape(rows, windows, seq).swapaxes(0, 1) for a in (targets, counted))
    flat = targets.swapaxes(0, 1).reshape(rows, windows * seq)
    inputs = np.concatenate([np.zeros((rows, 1), np.int32), flat[:, :-1]], axis=1)
    inputs = inputs.reshape(rows, windows, seq).swapaxes(0, 1)

    @jax.jit
    def evaluate(params: Any, inputs: jax.Array, targets: jax.Array, counted: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)

        def window(carry: Any, arrays: Any) -> tuple[Any, jax.Array]:
            tokens, wanted, mask = arrays
            logits, carry = model(tokens, initial_carry=carry, return_carry=True)
            bits = bits_per_token(logits, wanted, mask) * jnp.sum(mask, dtype=jnp.float32)
            return carry, jnp.where(mask.any(), bits, 0.0)

        _, bits = jax.lax.scan(window, model.initialize_carry((rows,)), (inputs, targets, counted))
        return bits.sum()

    arrays = jax.device_put((inputs, targets, counted))
    return lambda params: float(evaluate(params, *arrays)) / len(text)


def say_what_runs(graphdef: Any, params: Any, batch: int, seq: int) -> None:
    """Prints which implementation serves each op of a training step and of decoding, once each."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return bits_per_token(nnx.merge(graphdef, params)(tokens[:, :-1]), tokens[:, 1:])

    def token(params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        return model.step(model.initialize_carry(tokens.shape[:1]), tokens[:, 0])[1]

    tokens = jax.ShapeDtypeStruct((batch, seq + 1), jnp.int32)
    paths = jax_ssd.dispatch_paths(jax.grad(loss), params, tokens) + jax_ssd.dispatch_paths(token, params, tokens)
    print(", ".join(dict.fromkeys(f"{path.op} runs on {path.implementation}" for path in paths)))
    for line in dict.fromkeys(f"  not {name}: {why}" for path in paths for name, why in path.refusals.items()):
        print(line)


# ------------------------------------------------------------------------------------------------------------ training


def train(
    graphdef: Any, params: Any, text: np.ndarray, options: argparse.Namespace, evaluate: Callable[[Any], float]
) -> Any:
    """Runs the optimiser, printing held-out bits per byte on the way; returns the trained parameters."""
    warmup = max(1, min(50, options.steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, warmup, max(options.steps, warmup + 1), options.learning_rate / 20
    )
    optimizer = adamw(schedule, weight_decay=options.weight_decay)
    step = jax.jit(make_train_step(graphdef, optimizer), donate_argnums=0)
    state = TrainState(params, jax.jit(optimizer.init)(params))
    data = batches(text, options.batch, options.seq, options.seed)
    every = max(1, options.steps // options.reports)
    start = time.perf_counter()
    with progress_bar(options.steps, options.progress) as (advance, say):
        for number in range(1, options.steps + 1):
            state, loss = step(state, next(data))
            advance()
            late = time.perf_counter() - start > options.seconds
            if number == 1 or number % every == 0 or number == options.steps or late:
                say(
                    f"step {number:5d}/{options.steps}  train {float(loss):6.3f}  "
                    f"held-out {evaluate(state.params):6.3f} bits/byte  {time.perf_counter() - start:6.1f} s"
                )
            if late:
                say(f"stopped after {options.seconds:.0f} s of training (--seconds); a faster machine does all steps")
                break
    return state.params


@contextmanager
def progress_bar(steps: int, wanted: bool) -> Iterator[tuple[Callable[[], None], Callable[[str], None]]]:
    """``(advance, say)``: a rich bar on a terminal where rich is installed, plain lines anywhere else."""
    try:
        from rich.progress import Progress
    except ModuleNotFoundError:
        wanted = False
    if not (wanted and sys.stdout.isatty()):
        yield (lambda: None), lambda line: print(line, flush=True)
        return
    with Progress() as progress:
        task = progress.add_task("training", total=steps)
        yield (lambda: progress.advance(task)), lambda line: progress.console.print(line, highlight=False)


# -------------------------------------------------------------------------------------------------------------- checks


def check_decode(model: LanguageModel, tokens: jax.Array, tolerance: float) -> float:
    """Largest difference between the logits of one parallel pass and of prefill plus one token at a time."""
    graphdef, params = nnx.split(model)
    half = tokens.shape[-1] // 2

    @jax.jit
    def both(params: Any) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, params)
        carry, _ = prefill(model, tokens[:, :half])
        return model(tokens)[:, half:], decode(model, carry, tokens[:, half:])[1]

    whole, steps = both(params)
    return _require_close("decode", steps, whole, tolerance)


def check_scan(model: LanguageModel, tokens: jax.Array, implementation: Any, tolerance: float) -> float:
    """Largest error of the scan and its gradients against the token-by-token definition, relative to the largest value.

    Each layer's scan is run on what the trained model feeds it.
    """
    graphdef, params = nnx.split(model)
    operator = getattr(jax_ssd, model.config.mixer)

    def arguments(mixer: Any, x: jax.Array) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        given = {name: value for name, value in mixer.scan_operands(x).items() if value is not None}
        arrays = {name: value for name, value in given.items() if isinstance(value, jax.Array)}
        return arrays, {name: value for name, value in given.items() if name not in arrays}

    _, settings = arguments(model.blocks[0].mixer, jnp.zeros((1, 1, model.config.features)))  # the same in every layer

    @jax.jit
    def activations(params: Any) -> list[dict[str, jax.Array]]:
        model = nnx.merge(graphdef, params)
        x, operands = model.embedding(tokens), []
        for block in model.blocks:
            operands.append(arguments(block.mixer, block.norm(x))[0])
            x, _ = block(x, None, None)
        return operands

    def run(arrays: dict[str, jax.Array], chosen: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        def scan(arrays: dict[str, jax.Array]) -> jax.Array:
            return operator(**arrays, **settings, precision="highest", implementation=chosen)

        y, pullback = jax.vjp(scan, arrays)
        cotangent = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).astype(y.dtype).reshape(y.shape)
        return y, pullback(cotangent)[0]

    fast = jax.jit(lambda arrays: run(arrays, implementation))
    definition = jax.jit(lambda arrays: run(arrays, "reference"))
    errors = [
        _require_close("scan", got, want, tolerance)
        for arrays in activations(params)
        for got, want in zip(jax.tree.leaves(fast(arrays)), jax.tree.leaves(definition(arrays)), strict=True)
    ]
    return max(errors)


def _require_close(name: str, got: jax.Array, want: jax.Array, tolerance: float) -> float:
    exact = np.asarray(want, np.float64)
    error = float(np.abs(np.asarray(got, np.float64) - exact).max() / np.abs(exact).max())
    if not error <= tolerance:
        raise SystemExit(f"{name}: relative difference {error:.1e} is above {tolerance:.0e}")
    return error


# ---------------------------------------------------------------------------------------------------------------- main


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixer", choices=("mamba2", "mamba3"), default="mamba2", help="default mamba2")
    parser.add_argument("--mimo-rank", type=int, help="of Mamba-3; default SISO")
    sizes = {"features": 192, "layers": 2, "state-dim": 32, "head-dim": 64, "seq": 256, "batch": 4, "steps": 1000}
    sizes |= {"seed": 0, "reports": 10, "eval-bytes": 1 << 17, "data-bytes": 1 << 26, "generate": 200}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="default 4e-3")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="default 0.1")
    parser.add_argument("--seconds", type=float, default=200, help="training stops after this time, default 200")
    parser.add_argument(
        "--implementation", default=None, help="of the scan: cutile, cuda, xla, reference; default best"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default bfloat16 on a GPU, else float32")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="plain lines on a terminal too")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs everything and returns the figures it printed."""
    begin = time.perf_counter()
    options = parse(arguments)
    on_gpu = jax.default_backend() == "gpu"
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    config = LanguageModelConfig(
        features=options.features,
        layers=options.layers,
        mixer=options.mixer,
        mimo_rank=options.mimo_rank,
        state_dim=options.state_dim,
        head_dim=options.head_dim,
        # On a CPU short chunks spend less on the pairs inside a chunk; pairs are of tokens and ranks.
        chunk_size=None if on_gpu else max(1, 32 // (options.mimo_rank or 1)),
        dtype=jnp.dtype(dtype),
        implementation=options.implementation,
    )
    model = LanguageModel(config, rngs=nnx.Rngs(options.seed))
    graphdef, params = nnx.split(model)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; {parameters:,} parameters, {dtype}")

    say_what_runs(graphdef, params, options.batch, options.seq)

    text, held_out = read_sources(options.data_bytes)
    held_out = held_out[: options.eval_bytes]
    print(f"data: {len(text):,} bytes of Python to train on, {len(held_out):,} held-out bytes to measure")
    baselines = {
        "unigram": unigram_bits(text, held_out),
        "bigram": bigram_bits(text, held_out),
        "gzip": gzip_bits(held_out),
    }
    print("held-out bits/byte: " + ", ".join(f"{name} {bits:.3f}" for name, bits in baselines.items()))

    brief = make_evaluator(graphdef, spread_sample(held_out, 8, options.seq), options.seq, rows=8)
    params = train(graphdef, params, text, options, brief)
    bits = make_evaluator(graphdef, held_out, options.seq, rows=16)(params)
    print("\nheld-out bits/byte, all models on the same bytes")
    for name, value in {**baselines, options.mixer: bits}.items():
        print(f"  {name:8s} {value:6.3f}  {'#' * round(value * 8)}")

    model = nnx.merge(graphdef, params)
    prompt = held_out[: options.seq].astype(np.int32)
    sample = jax.jit(
        lambda params, prompt, key: generate(
            nnx.merge(graphdef, params), prompt, options.generate, key=key, temperature=0.7
        )
    )(params, prompt, jax.random.key(options.seed))
    print(f"\na held-out file, then {options.generate} bytes decoded after '>>>>'")
    print(_printable(prompt[-160:]) + ">>>>" + _printable(np.asarray(sample)))

    # Checked in float32 with full products whatever the training ran in. The two sides order their sums differently and
    # take exponentials of sums of up to about a hundred, exact to 6e-8 of their size: 1e-4 leaves a factor of ten.
    exact = LanguageModel(
        dataclasses.replace(config, dtype=jnp.dtype("float32"), precision="highest"), rngs=nnx.Rngs(0)
    )
    exact = nnx.merge(nnx.graphdef(exact), params)
    tokens = jnp.asarray(held_out[: 2 * options.seq // 2 * 2].astype(np.int32).reshape(2, -1))
    figures = {
        "decode": check_decode(exact, tokens, 1e-4),
        "scan": check_scan(exact, tokens, options.implementation, 1e-4),
    }
    print("\nchecks, largest relative difference")
    print(f"  prefill + lax.scan decode against the parallel pass      {figures['decode']:.1e}  ok")
    print(f"  scan and gradients against the sequential definition     {figures['scan']:.1e}  ok")
    seconds = time.perf_counter() - begin
    below = baselines["bigram"] - bits
    print(f"\n{options.mixer} {bits:.3f} bits/byte, {below:.3f} below bigram; {seconds:.0f} s in total")
    return {**baselines, options.mixer: bits, **figures, "seconds": seconds}


def _printable(tokens: np.ndarray) -> str:
    return bytes(tokens.astype(np.uint8)).decode("utf-8", errors="replace").replace("\0", "\n")


if __name__ == "__main__":
    main()
