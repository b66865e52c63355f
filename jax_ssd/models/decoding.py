"""Running a trained language model forward: prefill with the parallel scan, then one token at a time in `lax.scan`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ssd.models.language_model import Carry, LanguageModel


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
    """
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
    """
    carry, logits = jax.lax.scan(model.step, carry, jnp.moveaxis(tokens, -1, 0))
    return carry, jnp.moveaxis(logits, 0, -2)


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
      length: number of tokens to add, static.
      key: random key for sampling; None takes the likeliest token each time.
      temperature: divides the logits before sampling; > 0.

    Returns:
      The continuation ``[..., length]`` in the prompt's dtype, without the prompt.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}; leave key out to take the likeliest token.")
    if prompt.shape[-1] == 0:
        raise ValueError(f"prompt must hold at least one token, got shape {prompt.shape}.")

    def choose(logits: jax.Array, step: jax.Array) -> jax.Array:
        if key is None:
            return jnp.argmax(logits, axis=-1).astype(prompt.dtype)
        sampled = jax.random.categorical(jax.random.fold_in(key, step), logits / jnp.float32(temperature))
        return sampled.astype(prompt.dtype)

    def body(state: tuple[Carry, jax.Array], step: jax.Array) -> tuple[tuple[Carry, jax.Array], jax.Array]:
        carry, logits = state
        token = choose(logits, step)
        return model.step(carry, token), token

    _, tokens = jax.lax.scan(body, prefill(model, prompt), jnp.arange(length))
    return jnp.moveaxis(tokens, 0, -1)
