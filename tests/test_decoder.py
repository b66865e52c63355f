"""Layers and models laid out for decoding: the same numbers as their own steps, for every option that changes them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ssd.flax.nnx import Mamba2, Mamba3
from jax_ssd.flax.nnx.decoder import Mamba2Decoder, Mamba3Decoder, _OneOp
from jax_ssd.models import Decoder, LanguageModel, LanguageModelConfig, decode
from tests import cuda_emulator, emulation

TOKENS = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3, 16)), jnp.float32)


def states(layer: Mamba2 | Mamba3, x: jax.Array) -> dict[str, Any]:
    """Carry and outputs after the same tokens, by the layer's own steps and by its decoder's."""
    carry: Any = layer.initialize_carry(x.shape[1:])
    step: Any = layer.step
    decoder: Any = Mamba2Decoder(layer) if isinstance(layer, Mamba2) else Mamba3Decoder(layer)
    packed, fast = jax.lax.scan(decoder.step, decoder.pack(carry), x)
    return {"own": jax.lax.scan(step, carry, x), "decoder": (decoder.unpack(packed), fast)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_groups": 2, "per_channel_D": True, "use_bias": True},
        {"use_norm": False, "use_conv_bias": False, "dt_limit": (0.01, 0.05)},
        {"norm_before_gate": True, "conv_width": 2},
        {"conv_width": 1},
        {"dtype": jnp.bfloat16},
        {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "state_dtype": jnp.bfloat16, "use_bias": True},
        {"param_dtype": jnp.bfloat16},
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", [None, "xla"], ids=["one op", "xla"])
def test_decoder_equals_steps(changes, implementation):
    check(Mamba2(16, state_dim=8, head_dim=8, implementation=implementation, rngs=nnx.Rngs(0), **changes), changes)


def test_float16_takes_what_its_layer_takes():
    layer = Mamba2(16, state_dim=8, head_dim=8, dtype=jnp.float16, rngs=nnx.Rngs(0))
    decoder, carry = Mamba2Decoder(layer), layer.initialize_carry((3, 16))
    _, wanted = layer.step(carry, 60 * TOKENS[0])
    _, found = decoder.step(decoder.pack(carry), 60 * TOKENS[0])
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-2 * np.abs(wanted).max())


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_no_row_is_decoded_as_well(implementation):
    layer = Mamba2(16, state_dim=8, head_dim=8, implementation=implementation, rngs=nnx.Rngs(0))
    decoder = Mamba2Decoder(layer)
    carry, y = decoder.step(decoder.pack(layer.initialize_carry((0, 16))), jnp.zeros((0, 16)))
    assert y.shape == (0, 16) and decoder.unpack(carry).ssm.shape[0] == 0


@pytest.mark.parametrize(
    ("changes", "one_op"), [({}, True), ({"conv_width": 9}, False), ({"state_dim": 257}, False)], ids=str
)
def test_sizes_beyond_the_kernel_keep_the_recurrences_own(changes, one_op):
    layer = Mamba2(16, **{"state_dim": 8, "head_dim": 8, **changes}, implementation="cuda", rngs=nnx.Rngs(0))
    assert isinstance(Mamba2Decoder(layer).between, _OneOp) == one_op


@pytest.mark.skipif(cuda_emulator.missing() is not None, reason=str(cuda_emulator.missing()))
def test_decoder_through_the_kernel_equals_steps(monkeypatch):
    emulation.emulate(monkeypatch)
    layer = Mamba2(16, state_dim=8, head_dim=8, num_groups=2, implementation="cuda", rngs=nnx.Rngs(0))
    check(layer, {})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mimo_rank": 2, "num_groups": 2, "use_norm": True, "A_map": "heavy_tailed"},
        {"mimo_rank": 3, "dtype": jnp.bfloat16},
        {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "key_dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16},
    ],
    ids=str,
)
def test_mamba3_decoder_equals_steps(changes):
    check(Mamba3(16, state_dim=8, head_dim=8, implementation="xla", rngs=nnx.Rngs(0), **changes), changes)


def check(layer: Mamba2 | Mamba3, changes: dict[str, Any]) -> None:
    # Flax's own projections add a 16-bit bias to float32 sums, and promote 16-bit weights, only where that is allowed.
    with jax.numpy_dtype_promotion("standard" if "param_dtype" in changes else "strict"):
        got = jax.jit(lambda x: states(layer, x))(TOKENS)
    low = jnp.bfloat16 in changes.values()
    for own, fast in zip(jax.tree.leaves(got["own"]), jax.tree.leaves(got["decoder"]), strict=True):
        assert own.dtype == fast.dtype and own.shape == fast.shape
        own, fast = np.asarray(own, np.float64), np.asarray(fast, np.float64)
        assert np.linalg.norm(fast - own) <= (1e-2 if low else 1e-5) * np.linalg.norm(own)


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("mixer", "implementation"), [("mamba2", None), ("mamba2", "xla"), ("mamba3", "xla")], ids=str)
def test_model_decodes_as_it_steps(mixer, implementation, param_dtype):
    sizes: dict[str, Any] = {"vocab_size": 17, "features": 16, "layers": 2, "state_dim": 8, "head_dim": 8}
    config = LanguageModelConfig(**sizes, mixer=mixer, implementation=implementation, param_dtype=param_dtype)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    for block in model.blocks:  # weights that are not all one
        norms: list[Any] = [block.norm, *([block.mixer.norm] if mixer == "mamba2" else [])]
        for scale in (norm.scale for norm in norms):
            scale[...] = jnp.linspace(0.5, 2.0, scale.size, dtype=scale.dtype)
    tokens = jnp.arange(6)[None] % 5

    @jax.jit
    def both(tokens):
        carry = model.initialize_carry((1,))
        return decode(model, carry, tokens), jax.lax.scan(model.step, carry, tokens.T)

    (carry, logits), (wanted_carry, wanted) = both(tokens)
    np.testing.assert_allclose(logits[0], wanted[:, 0], rtol=1e-4, atol=1e-5)
    assert jax.tree.structure(carry) == jax.tree.structure(wanted_carry)


def test_weights_are_arranged_outside_of_the_loop():
    """A loop's body neither transposes nor joins nor converts a matrix of weights."""
    config = LanguageModelConfig(
        vocab_size=64, features=16, layers=1, state_dim=8, head_dim=8, implementation="xla", dtype=jnp.bfloat16
    )
    model = LanguageModel(config, rngs=nnx.Rngs(0))

    def run(tokens):
        decoder = Decoder(model)
        return jax.lax.scan(decoder.step, decoder.pack(model.initialize_carry((1,))), tokens)

    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote
        equations = jax.make_jaxpr(run)(jnp.zeros((4, 1), jnp.int32)).eqns
    (loop,) = (equation for equation in equations if equation.primitive.name == "scan")
    size = 32 * 16  # of the smallest matrix, the output projection
    for equation in loop.params["jaxpr"].eqns:
        large = [v.aval for v in equation.invars if getattr(v.aval, "size", 0) >= size and len(v.aval.shape) == 2]
        assert not large or equation.primitive.name in ("dot_general", "pjit", "jit", "gather"), equation
