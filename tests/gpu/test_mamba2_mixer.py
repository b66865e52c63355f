"""The kernel between a Mamba-2 layer's projections on a GPU: equal to float64, repeatable; a model decodes with it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_ssd
from jax_ssd import launch
from jax_ssd.mamba2 import plan_cuda_mixer
from jax_ssd.models import LanguageModel, LanguageModelConfig, decode
from tests.mixer_steps import CHANGES, MODEL, check, mixer_problem, random_operands


@pytest.mark.parametrize("changes", CHANGES)
def test_equals_float64(changes):
    p, _ = mixer_problem(**CHANGES[changes])
    operands = random_operands(p, CHANGES[changes].get("first_head", 0))
    made = plan_cuda_mixer.step(p)
    results = launch.call(made, None, *(jnp.asarray(operands[b.name]) for b in made.operands))
    check(p, operands, {b.name: np.asarray(a) for b, a in zip(made.results, results, strict=True)})


def test_fifty_calls_give_the_same_bits():
    p, _ = mixer_problem(**MODEL, batch=16, norm=True)
    made, given = plan_cuda_mixer.step(p), random_operands(p)
    operands = [jnp.asarray(given[b.name]) for b in made.operands]
    run = jax.jit(lambda *operands: launch.call(made, None, *operands))
    first = [np.asarray(a) for a in run(*operands)]
    for _ in range(49):
        for got, wanted in zip(run(*operands), first, strict=True):
            np.testing.assert_array_equal(np.asarray(got), wanted)


def test_a_loop_captured_whole_decodes_as_the_parallel_pass():
    sizes: dict[str, Any] = {"vocab_size": 31, "features": 64, "layers": 2, "state_dim": 32, "head_dim": 16}
    config = LanguageModelConfig(**sizes, implementation=("cuda", "xla"))
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 12)), jnp.int32)

    def run(tokens):
        return decode(model, model.initialize_carry((2,)), tokens)[1]

    with jax.numpy_dtype_promotion("standard"):
        plain = jax.jit(run)(tokens)
        captured = jax.jit(run, compiler_options=jax_ssd.LOOP_AS_GRAPH)(tokens)
        whole = model(tokens)
    for got in (plain, captured):  # products are TF32's, of whichever kernel XLA took
        assert np.linalg.norm(got - whole) < 1e-2 * np.linalg.norm(whole)
