"""Running a trained language model forward: prefill with the parallel scan, then one token at a time in `lax.scan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jax_ssd import shapes
from jax_ssd.flax.nnx import Mamba2
from jax_ssd.flax.nnx.decoder import Mamba2Decoder, Mamba3Decoder
from jax_ssd.models.language_model import Carry, LanguageModel

ModelCarry = tuple[jax.Array, tuple[Any, ...]]
"""The number of the next token, and one carry per layer as the layers' decoders have it."""


class Decoder:
    """``model.step`` in fewer operations and without copies of the weights.

    To be made inside the compiled function that decodes, outside of its loop; ``decode`` and ``generate`` do it. See
    ``jax_ssd.flax.nnx.decoder``.

    Args:
      model: the model.
      recurrence: in place of that of the layers, with the arguments of ``jax_ssd.mamba2_step`` or ``mamba3_step``.
    """

    def __init__(self, model: LanguageModel, recurrence: Callable[..., tuple[Any, jax.Array]] | None = None) -> None:
        self.model = _model("Decoder", model)
        self.layers: list[Any] = [
            Mamba2Decoder(block.mixer, recurrence, block.norm)
            if isinstance(block.mixer, Mamba2)
            else Mamba3Decoder(block.mixer, recurrence, block.norm)
            for block in model.blocks
        ]
        self.head = model.head_kernel()

    def pack(self, carry: Carry) -> ModelCarry:
        """The model's carry as ``step`` takes it."""
        layers = zip(self.layers, carry, strict=True)
        return jnp.zeros((), jnp.int32), tuple(layer.arranged(one) for layer, one in layers)

    def unpack(self, carry: ModelCarry) -> Carry:
        """What ``step`` gave as the model's carry."""
        position, packed = carry
        return tuple(layer.restored(position, one) for layer, one in zip(self.layers, packed, strict=True))

    def step(self, carry: ModelCarry, token: jax.Array) -> tuple[ModelCarry, jax.Array]:
        """``token [...]`` -> ``(carry, logits [..., vocab_size])``; the body of a ``lax.scan``."""
        position, packed = carry
        x = self.model.embed(token)
        carries = []
        for layer, one in zip(self.layers, packed, strict=True):
            one, y = layer.token(position, one, x)
            x = x + y.astype(x.dtype)
            carries.append(one)
        return (position + 1, tuple(carries)), self.model.head(x, self.head)


def _model(function: str, model: Any) -> LanguageModel:
    if not isinstance(model, LanguageModel):
        raise TypeError(
            f"{function}: model: expected a LanguageModel, got {type(model).__name__}; pass the model itself."
        )
    return model


def _require_key(function: str, key: Any) -> None:
    """Raises TypeError for what JAX does not take for one random key."""
    try:
        jax.eval_shape(lambda: jax.random.fold_in(key, 0))
    except (TypeError, ValueError) as cause:
        got = f"shape {key.shape}, {key.dtype}" if hasattr(key, "shape") else repr(key)
        raise TypeError(f"{function}: key: expected one random key, got {got}; pass jax.random.key(0).") from cause


def prefill(
    model: LanguageModel, tokens: jax.Array, *, segment_ids: jax.Array | None = None
) -> tuple[Carry, jax.Array]:
    """Reads a prompt in one parallel pass.

    Args:
      model: the model.
      tokens: ``[..., seq]``; pad prompts of unequal length on the left, with negative ``segment_ids``.
      segment_ids: ``[..., seq]``, negative for padding; None means no padding.

    Returns:
      The carry after the prompt and the logits ``[..., vocab_size]`` for the token that follows it.

    Raises:
      ValueError: ``tokens`` has no token.
    """
    model = _model("prefill", model)
    tokens = shapes.as_array("prefill", "tokens", tokens)
    if tokens.ndim == 0 or tokens.shape[-1] == 0:
        raise ValueError(
            f"prefill: tokens: expected [..., seq] with at least one token, got shape {tokens.shape}; "
            "model.initialize_carry gives the carry before the first token."
        )
    logits, carry = model(tokens, segment_ids=segment_ids, return_carry=True)
    return carry, logits[..., -1, :]


def decode(model: LanguageModel, carry: Carry, tokens: jax.Array) -> tuple[Carry, jax.Array]:
    """Feeds given tokens one at a time through a ``lax.scan`` of steps.

    Args:
      model: the model.
      carry: from ``prefill`` or ``model.initialize_carry``.
      tokens: ``[..., seq]``.

    Returns:
      The carry after the last token and logits ``[..., seq, vocab_size]``, equal to those of a full pass.

    Raises:
      ValueError, TypeError: ``carry`` is none of the model for as many sequences, or ``tokens`` no array of token ids.
    """
    model = _model("decode", model)
    tokens = shapes.as_array("decode", "tokens", tokens)
    shapes.require_rank("decode", "tokens", tokens, 1, "(..., seq)")
    model.check_carry("carry", carry, tokens.shape[:-1])
    decoder = Decoder(model)
    packed, logits = jax.lax.scan(decoder.step, decoder.pack(carry), jnp.moveaxis(tokens, -1, 0))
    return decoder.unpack(packed), jnp.moveaxis(logits, 0, -2)


def generate(
    model: LanguageModel,
    prompt: jax.Array,
    length: int,
    *,
    key: jax.Array | None = None,
    temperature: float = 1.0,
) -> jax.Array:
    """Continues a prompt: prefill, then ``length`` sampled tokens in one ``lax.scan``.

    Args:
      model: the model.
      prompt: ``[..., seq]`` with at least one token.
      length: number of tokens to add, static, at least 0.
      key: random key for sampling; None takes the likeliest token each time.
      temperature: divides the logits before sampling, a number > 0; it may be traced, and is not checked then.

    Returns:
      The continuation ``[..., length]`` in the prompt's dtype, without the prompt.

    Raises:
      ValueError: an argument is out of range.
      TypeError: ``prompt`` holds no integers, ``length`` is none, ``temperature`` no number, or ``key`` no key.
    """
    length = shapes.integer("generate", "length", length, least=0)
    if not isinstance(temperature, Tracer):
        temperature = shapes.number("generate", "temperature", temperature)
        if temperature == 0:
            raise ValueError(
                "generate: temperature: expected a number above 0, got 0.0; leave key out to take the likeliest token."
            )
    model = _model("generate", model)
    if key is not None:
        _require_key("generate", key)
    prompt = shapes.as_array("generate", "prompt", prompt)
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise TypeError(f"generate: prompt: expected token ids, integers, got {prompt.dtype.name}; use .astype.")
    if prompt.ndim == 0 or prompt.shape[-1] == 0:
        raise ValueError(
            f"generate: prompt: expected [..., seq] with at least one token, got shape {prompt.shape}; start with a "
            "token that begins a text."
        )

    def choose(logits: jax.Array, step: jax.Array) -> jax.Array:
        if key is None:
            return jnp.argmax(logits, axis=-1).astype(prompt.dtype)
        sampled = jax.random.categorical(jax.random.fold_in(key, step), logits / jnp.asarray(temperature, jnp.float32))
        return sampled.astype(prompt.dtype)

    decoder = Decoder(model)
    carry, logits = prefill(model, prompt)

    def body(state: tuple[ModelCarry, jax.Array], step: jax.Array):
        packed, logits = state
        token = choose(logits, step)
        return decoder.step(packed, token), token

    _, tokens = jax.lax.scan(body, (decoder.pack(carry), logits), jnp.arange(length))
    return jnp.moveaxis(tokens, 0, -1)
