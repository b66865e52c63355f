"""The language model: loss, decoding against the parallel pass, weight decay mask, a training step that learns."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ssd.models import (
    LanguageModel,
    LanguageModelConfig,
    TrainState,
    adamw,
    bits_per_token,
    decay_mask,
    decode,
    generate,
    make_train_step,
    prefill,
)

CONFIG = LanguageModelConfig(
    vocab_size=17, features=16, layers=2, state_dim=8, head_dim=8, chunk_size=4, implementation="xla"
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 17, (2, 13)), jnp.int32)


def build(**changes) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(LanguageModel(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0)))


def logits_of(graphdef, params, tokens=TOKENS, **keywords) -> jax.Array:
    return jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens, **keywords))(params, tokens)


MIXERS = pytest.mark.parametrize(
    "mixer",
    [{}, {"mixer": "mamba3", "precision": "highest"}, {"mixer": "mamba3", "mimo_rank": 2, "precision": "highest"}],
    ids=["mamba2", "mamba3 siso", "mamba3 mimo"],
)


@MIXERS
def test_prefill_and_decode_equal_the_parallel_pass(mixer):
    graphdef, params = build(**mixer)
    want = logits_of(graphdef, params)
    assert want.shape == (2, 13, 17) and want.dtype == jnp.float32

    @jax.jit
    def by_steps(params):
        model = nnx.merge(graphdef, params)
        carry, last = prefill(model, TOKENS[:, :5])
        carry, rest = decode(model, carry, TOKENS[:, 5:])
        _, from_start = decode(model, model.initialize_carry((2,)), TOKENS)
        return last, rest, from_start

    last, rest, from_start = by_steps(params)
    for got, part in ((last, want[:, 4]), (rest, want[:, 5:]), (from_start, want)):
        np.testing.assert_allclose(got, part, rtol=1e-4, atol=1e-5)


@MIXERS
def test_left_padded_prompts_equal_prompts_alone(mixer):
    graphdef, params = build(**mixer)
    ids = jnp.asarray([[-1] * 4 + [0] * 9, [0] * 13], jnp.int32)
    _, got = jax.jit(lambda params: prefill(nnx.merge(graphdef, params), TOKENS, segment_ids=ids))(params)
    np.testing.assert_allclose(got[0], logits_of(graphdef, params, TOKENS[:1, 4:])[0, -1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1], logits_of(graphdef, params)[1, -1], rtol=1e-4, atol=1e-5)


@MIXERS
def test_greedy_generation_repeats_the_likeliest_token_of_the_full_pass(mixer):
    graphdef, params = build(**mixer)
    continuation = jax.jit(lambda params: generate(nnx.merge(graphdef, params), TOKENS, 4))(params)
    assert continuation.shape == (2, 4) and continuation.dtype == TOKENS.dtype
    logits = logits_of(graphdef, params, jnp.concatenate([TOKENS, continuation], axis=1))
    np.testing.assert_array_equal(continuation, jnp.argmax(logits[:, 12:-1], axis=-1))


def test_sampling_follows_the_key():
    graphdef, params = build()
    sample = jax.jit(lambda params, key: generate(nnx.merge(graphdef, params), TOKENS, 8, key=key))
    first, again, other = (np.asarray(sample(params, jax.random.key(seed))) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()


def test_a_traced_temperature():
    model, key = nnx.merge(*build(layers=1)), jax.random.key(1)
    got = jax.jit(lambda t: generate(model, TOKENS, 4, key=key, temperature=t))(0.5)
    np.testing.assert_array_equal(got, generate(model, TOKENS, 4, key=key, temperature=0.5))


def test_generation_names_mistakes():
    model = nnx.merge(*build())
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="generate: temperature"):
            generate(model, TOKENS, 1, temperature=temperature)
    with pytest.raises(TypeError, match="temperature: expected a number, got '1'"):
        generate(model, TOKENS, 1, temperature="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="length: expected at least 0, got -1"):
        generate(model, TOKENS, -1)
    with pytest.raises(TypeError, match="length: expected an integer, got 2.5"):
        generate(model, TOKENS, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt.*at least one"):
        generate(model, TOKENS[:, :0], 1)
    with pytest.raises(ValueError, match=r"prompt: expected \[..., seq\]"):
        generate(model, jnp.asarray(3), 1)
    with pytest.raises(TypeError, match="prompt: expected token ids, integers, got float32"):
        generate(model, jnp.ones((1, 2)), 1)
    assert generate(model, [1, 2], 1).shape == (1,)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layers.*0"):
        LanguageModelConfig(layers=0)
    with pytest.raises(ValueError, match="mixer: expected one of .'mamba2', 'mamba3'., got 'mamba4'"):
        LanguageModelConfig(mixer="mamba4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mimo_rank: expected None with mixer='mamba2', got 4"):
        LanguageModelConfig(mimo_rank=4)


@pytest.mark.parametrize("key", [0, "seed", jnp.ones(2), jax.random.split(jax.random.key(0))])
def test_what_is_no_key_is_named(key):
    with pytest.raises(TypeError, match=r"generate: key: expected one random key, got .*; pass jax.random.key"):
        generate(nnx.merge(*build()), TOKENS, 1, key=key)


def test_what_is_no_model_or_configuration_is_named():
    model: Any = LanguageModelConfig()
    said = "{}: model: expected a LanguageModel, got LanguageModelConfig; pass the model itself"
    with pytest.raises(TypeError, match=said.format("prefill")):
        prefill(model, TOKENS)
    with pytest.raises(TypeError, match=said.format("decode")):
        decode(model, (), TOKENS)
    with pytest.raises(TypeError, match=said.format("generate")):
        generate(model, TOKENS, 1)
    with pytest.raises(TypeError, match="LanguageModel: config: expected a LanguageModelConfig, got dict; pass"):
        LanguageModel({"layers": 2}, rngs=nnx.Rngs(0))  # type: ignore[arg-type]
    changes: dict[str, Any]
    for changes, error, said in (
        ({"layers": True}, TypeError, "layers: expected an integer, got True"),
        ({"vocab_size": 256.0}, TypeError, "vocab_size: expected an integer, got 256.0"),
        ({"dtype": "bf16"}, TypeError, "dtype: expected a floating type, got 'bf16'"),
        ({"remat": 1}, TypeError, "remat: expected True or False, got 1"),
    ):
        with pytest.raises(error, match=f"LanguageModelConfig: {said}"):
            LanguageModelConfig(**changes)


@MIXERS
def test_carries_that_do_not_fit_are_named(mixer):
    model = nnx.merge(*build(**mixer))
    carry = model.initialize_carry((2,))
    kind = type(carry[0]).__name__
    calls: dict[str, Any] = {
        "carry": (lambda carry: model.step(carry, TOKENS[:, 0]), lambda carry: decode(model, carry, TOKENS)),
        "initial_carry": (lambda carry: model(TOKENS, initial_carry=carry),),
    }
    for name, attempts in calls.items():
        for attempt in attempts:
            for wrong, error, said in (  # a carry of Mamba-3 is a tuple of four
                (
                    carry[0],
                    (TypeError, ValueError),
                    f"LanguageModel: {name}: expected a tuple of 2 carries, .*, got {kind}",
                ),
                (carry[:1], ValueError, f"LanguageModel: {name}: expected a tuple of 2 carries, .*, got tuple of 1"),
                ((carry[0], 3), TypeError, rf"Mamba.: {name}\[1\]: expected a {kind}, got int"),
                (model.initialize_carry((3,)), ValueError, rf"Mamba.: {name}\[0\].*: expected shape \(2, .* got \(3, "),
            ):
                with pytest.raises(error, match=said):
                    attempt(wrong)
    with pytest.raises(TypeError, match="LanguageModel: batch_shape: expected a tuple of sizes, got 2"):
        model.initialize_carry(2)
    with pytest.raises(TypeError, match="LanguageModel: return_carry: expected True or False, got 1"):
        model(TOKENS, return_carry=1)
    with pytest.raises(
        ValueError, match=r"LanguageModel: tokens: expected at least 1 axis \(..., seq\), got shape \(\)"
    ):
        model(3)
    tokens: Any = TOKENS.tolist()
    listed = decode(model, carry, tokens)[1]
    np.testing.assert_array_equal(listed, decode(model, carry, TOKENS)[1])


def test_parts_of_a_training_step_are_named():
    graphdef, params = build()
    optimizer = adamw(1e-3)
    with pytest.raises(TypeError, match="make_train_step: graphdef: expected an nnx.GraphDef, got LanguageModel; pass"):
        make_train_step(nnx.merge(graphdef, params), optimizer)
    with pytest.raises(TypeError, match="make_train_step: optimizer: expected an optax.Gradient.*, got float; pass"):
        make_train_step(graphdef, 1e-3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="make_train_step: state: expected a TrainState, got State; pass TrainState"):
        make_train_step(graphdef, optimizer)(params, TOKENS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="adamw: learning_rate: expected a number, got 'fast'"):
        adamw("fast")  # type: ignore[arg-type]


def test_bits():
    logits = jnp.zeros((2, 3, 8))
    targets = jnp.zeros((2, 3), jnp.int32)
    np.testing.assert_allclose(bits_per_token(logits, targets), 3.0, rtol=1e-6)
    sure = logits.at[:, 1, 0].set(100.0)
    np.testing.assert_allclose(bits_per_token(sure, targets), 2.0, rtol=1e-6)
    mask = jnp.asarray([[False, True, False]] * 2)
    np.testing.assert_allclose(bits_per_token(sure, targets, mask), 0.0, atol=1e-6)


def test_bits_of_targets_that_do_not_fit():
    logits, targets = jnp.zeros((2, 3, 8)), jnp.zeros((2, 3), jnp.int32)
    for wrong, mask, error in (
        (targets[:1], None, ValueError),
        (targets[:, :0], None, ValueError),
        (targets.astype(jnp.float32), None, TypeError),
        (targets, jnp.ones((3,), jnp.bool_), ValueError),
        (targets, targets, TypeError),
        ("text", None, TypeError),
    ):
        with pytest.raises(error, match="bits_per_token: "):
            bits_per_token(logits, wrong, mask)  # pyright: ignore[reportArgumentType]


def test_rows_of_one_token_predict_nothing():
    graphdef, _ = build()
    optimizer = adamw(1e-3)
    with pytest.raises(ValueError, match="at least two tokens a row"):
        make_train_step(graphdef, optimizer)(None, TOKENS[:, :1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="prefill: tokens: .* at least one token"):
        prefill(nnx.merge(*build()), TOKENS[:, :0])


def test_loss_starts_near_uniform():
    graphdef, params = build()
    bits = bits_per_token(logits_of(graphdef, params)[:, :-1], TOKENS[:, 1:])
    assert abs(float(bits) - math.log2(17)) < 0.3


def test_decay_leaves_out_what_it_would_harm():
    _, params = build()
    decayed, kept = set(), set()
    for path, wanted in jax.tree_util.tree_leaves_with_path(decay_mask(params)):
        name = ".".join(str(entry.key) for entry in path if hasattr(entry, "key"))
        (decayed if wanted else kept).add(name)
    roles = ("z_proj", "x_proj", "B_proj", "C_proj", "dt_proj", "x_conv", "B_conv", "C_conv", "out_proj")
    assert decayed == {"embedding.embedding"} | {f"blocks.{i}.mixer.{role}.kernel" for i in range(2) for role in roles}
    names = ("A_log", "dt_bias", "D", "norm.scale", "x_conv.bias", "B_conv.bias", "C_conv.bias")
    vectors = {f"blocks.{i}.mixer.{name}" for i in range(2) for name in names}
    assert kept == vectors | {f"blocks.{i}.norm.scale" for i in range(2)} | {"norm.scale"}


def test_decay_of_a_mamba3_model():
    _, params = build(mixer="mamba3", mimo_rank=2)
    wanted = {path[-2].key for path, wanted in jax.tree_util.tree_leaves_with_path(decay_mask(params)) if wanted}
    assert wanted == {"embedding", "kernel", "mimo_x", "mimo_z", "mimo_o"}


def test_weight_decay_moves_only_what_it_should():
    _, params = build(layers=1)
    optimizer = adamw(1.0, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):  # inside optax
        updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    moved = jax.tree.map(lambda update: bool((update != 0).any()), updates)
    assert moved == decay_mask(params)


@pytest.mark.parametrize("changes", [{}, {"remat": True}, {"mixer": "mamba3", "mimo_rank": 2, "remat": True}], ids=str)
def test_training_learns_a_repeating_sequence(changes):
    graphdef, params = build(**changes)
    tokens = jnp.tile(jnp.arange(4, dtype=jnp.int32), (2, 5))
    optimizer = adamw(0.01)
    step = jax.jit(make_train_step(graphdef, optimizer), donate_argnums=0)
    state = TrainState(params, optimizer.init(params))
    losses = []
    for _ in range(40):
        state, loss = step(state, tokens)
        losses.append(float(loss))
    assert losses[0] > 3.5 and losses[-1] < 0.7


def test_remat_changes_no_gradient():
    graphdef, params = build(layers=1)
    rematted, _ = build(layers=1, remat=True)

    def gradient(graphdef):
        def loss(params):
            return bits_per_token(nnx.merge(graphdef, params)(TOKENS[:, :-1]), TOKENS[:, 1:])

        return jax.jit(jax.grad(loss))(params)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient(rematted), gradient(graphdef)
    )


@functools.cache
def descent() -> tuple[nnx.GraphDef, optax.GradientTransformation, TrainState, TrainState, jax.Array]:
    """A model of one layer, an optimiser, and what one step makes of the two rows on one device."""
    graphdef, params = build(layers=1)
    optimizer = optax.sgd(1.0)
    state = TrainState(params, optimizer.init(params))
    return graphdef, optimizer, state, *jax.jit(make_train_step(graphdef, optimizer))(state, TOKENS)


def test_gradients_are_averaged_over_a_mapped_axis():
    graphdef, optimizer, state, want, want_loss = descent()
    mapped = jax.vmap(make_train_step(graphdef, optimizer, axis_name="data"), in_axes=(None, 0), axis_name="data")
    got, loss = jax.jit(mapped)(state, TOKENS[:, None])
    np.testing.assert_allclose(loss, jnp.full(2, want_loss), rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-4, atol=1e-5), got.params, want.params)


@pytest.mark.parametrize("kind", ["pmap", "shard_map", "shard_map without checks"])
def test_every_way_to_map_a_training_step_averages_gradients(kind):
    graphdef, optimizer, state, want, want_loss = descent()
    step = make_train_step(graphdef, optimizer, axis_name="data")
    if kind == "pmap":
        got, loss = jax.pmap(step, axis_name="data", in_axes=(None, 0), devices=jax.devices()[:2])(
            state, TOKENS[:, None]
        )
        got, loss = jax.tree.map(lambda a: a[0], (got, loss))
    else:
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=kind == "shard_map")
        got, loss = jax.jit(mapped)(state, TOKENS)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got.params, want.params)


@pytest.mark.parametrize("mixer", [{}, {"mixer": "mamba3", "mimo_rank": 2}], ids=["mamba2", "mamba3"])
@pytest.mark.slow
def test_on_a_mesh_with_explicit_axes(mixer):
    """Training and generation, sharded by batch as the tokens are."""
    graphdef, params = build(layers=1, **mixer)
    tokens = jnp.tile(TOKENS, (4, 1))
    optimizer = optax.sgd(1.0)

    @jax.jit
    def everything(state, tokens):
        trained = make_train_step(graphdef, optimizer)(state, tokens)
        return trained, generate(nnx.merge(graphdef, state.params), tokens[:, :5], 4)

    state = TrainState(params, optimizer.init(params))
    want = everything(state, tokens)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = jax.device_put((state, tokens), (NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))))
        got = everything(*placed)
    assert got[1].sharding.spec == P("data", None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_tokens_that_are_no_integers(dtype):
    model = nnx.merge(*build())
    for function in (model, model.embed):
        with pytest.raises(TypeError, match=f"LanguageModel: tokens: expected token ids, integers, got {dtype}"):
            function(TOKENS.astype(dtype))
