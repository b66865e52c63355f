"""One training step on all local devices, with pmap and with jit over sharded arrays; both equal one device's step.

    python examples/train_pmap.py                                                      all GPUs of this machine, or
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/train_pmap.py   four virtual CPU devices

The model is that of train_bytes.py on random bytes. Parameters are replicated, the batch is cut over the devices, and
gradients are averaged: by `lax.pmean` under pmap, by the partitioner under jit.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ssd.models import LanguageModel, LanguageModelConfig, TrainState, make_train_step


def one_device(graphdef: Any, optimizer: Any, state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    """The whole batch on the first device."""
    return jax.jit(make_train_step(graphdef, optimizer))(state, tokens)


def with_pmap(graphdef: Any, optimizer: Any, state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    """A copy of the state on every device and an equal share of the batch each."""
    devices = jax.local_device_count()
    step = jax.pmap(make_train_step(graphdef, optimizer, axis_name="data"), axis_name="data")
    copies = jax.tree.map(lambda array: jnp.stack([array] * devices), state)
    state, loss = step(copies, tokens.reshape((devices, -1, *tokens.shape[1:])))
    return jax.tree.map(lambda array: array[0], state), loss[0]


def with_sharding(graphdef: Any, optimizer: Any, state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    """The one-device program on arrays that say where they live."""
    mesh = jax.make_mesh((jax.local_device_count(),), ("data",), (AxisType.Auto,), devices=jax.local_devices())
    state = jax.device_put(state, NamedSharding(mesh, P()))
    tokens = jax.device_put(tokens, NamedSharding(mesh, P("data")))
    step = jax.jit(make_train_step(graphdef, optimizer))
    program = step.lower(state, tokens).compile().as_text() or ""
    moved = sorted(set(re.findall(r"all-gather|all-to-all|collective-permute", program)))
    print(f"  collectives besides the all-reduce of gradients: {', '.join(moved) or 'none'}")
    return step(state, tokens)


def largest_difference(got: Any, want: Any) -> float:
    """Over all arrays, relative to the largest value of each."""

    def difference(a: jax.Array, b: jax.Array) -> float:
        exact = np.asarray(b, np.float64)
        return float(np.abs(np.asarray(a, np.float64) - exact).max() / max(np.abs(exact).max(), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(difference, got, want)))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the three steps and returns the differences it printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"features": 128, "layers": 2, "state-dim": 32, "head-dim": 32, "seq": 256, "rows": 2, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--implementation", default=None, help="of the scan: cutile, cuda, xla, reference; default best"
    )
    options = parser.parse_args(arguments)

    config = LanguageModelConfig(
        features=options.features,
        layers=options.layers,
        state_dim=options.state_dim,
        head_dim=options.head_dim,
        precision="highest",  # TF32 products would differ by more than the comparison below allows
        implementation=options.implementation,
    )
    graphdef, params = nnx.split(LanguageModel(config, rngs=nnx.Rngs(options.seed)))
    # Plain SGD, whose update is linear in the gradient: Adam would turn rounding noise in near-zero gradients into
    # full-size updates, and equal steps would look different.
    optimizer = optax.sgd(0.1)
    state = TrainState(params, optimizer.init(params))
    devices = jax.local_devices()
    shape = (len(devices) * options.rows, options.seq + 1)
    tokens = jax.random.randint(jax.random.key(options.seed), shape, 0, config.vocab_size)
    print(f"{len(devices)} x {devices[0].device_kind}, batch {shape[0]} x {options.seq} tokens")

    want_state, want_loss = one_device(graphdef, optimizer, state, tokens)
    print(f"  one device: {float(want_loss):.6f} bits per token")
    change = jax.tree.map(jnp.subtract, want_state.params, params)
    figures = {}
    for name, run in (("pmap", with_pmap), ("jit + NamedSharding", with_sharding)):
        got_state, loss = run(graphdef, optimizer, state, tokens)
        got_change = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), got_state.params, params)
        figures[name] = largest_difference((got_change, loss), (change, want_loss))
        print(f"  {name}: {float(loss):.6f} bits per token, largest relative difference {figures[name]:.1e}")
        # Means of a few thousand float32 terms in another order, and updates rounded to the parameters' own size.
        if not figures[name] <= 1e-3:
            raise SystemExit(f"{name}: the step differs from that of one device")
    return figures


if __name__ == "__main__":
    main()
