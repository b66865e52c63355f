"""A small decoder-only language model: embedding, pre-norm residual Mamba blocks, final norm, tied head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_ssd import shapes
from jax_ssd.flax.nnx import Initializer, Mamba2, Mamba2Carry, Mamba3, Mamba3State
from jax_ssd.flax.nnx.parameters import batch_axes, float_type, positive, require_rngs

LayerCarry = Mamba2Carry | Mamba3State
Carry = tuple[LayerCarry, ...]
"""One carry per layer, first layer first."""


@dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes and types of a ``LanguageModel``.

    Attributes:
      vocab_size: number of token ids; 256 for bytes.
      features: width of the residual stream.
      layers: number of residual blocks.
      mixer: of every block, ``"mamba2"`` or ``"mamba3"``.
      state_dim, head_dim, expand, num_groups, chunk_size, precision, implementation: of every
        ``jax_ssd.flax.nnx.Mamba2`` or ``Mamba3`` layer.
      conv_width: of Mamba-2, which alone has a convolution.
      mimo_rank: of Mamba-3; None is SISO.
      dtype: compute dtype of the blocks and the head; the residual stream, norms and logits stay float32.
      param_dtype: storage dtype of projections, convolutions and the embedding.
      remat: recompute each block in the backward pass instead of keeping its intermediate values.
    """

    vocab_size: int = 256
    features: int = 128
    layers: int = 4
    mixer: Literal["mamba2", "mamba3"] = "mamba2"
    state_dim: int = 64
    head_dim: int = 32
    expand: int = 2
    num_groups: int = 1
    conv_width: int = 4
    mimo_rank: int | None = None
    chunk_size: int | None = None
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    precision: Literal["default", "highest"] | None = None
    implementation: str | tuple[str, ...] | None = None
    remat: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "features", "layers", "state_dim", "head_dim", "expand", "num_groups", "conv_width")
        positive("LanguageModelConfig", **{name: getattr(self, name) for name in sizes})
        shapes.require_choice("LanguageModelConfig", "mixer", self.mixer, ("mamba2", "mamba3"))
        if self.mixer == "mamba2" and self.mimo_rank is not None:
            raise ValueError(
                f"LanguageModelConfig: mimo_rank: expected None with mixer='mamba2', got {self.mimo_rank}; leave it "
                "out, or take 'mamba3'."
            )
        if self.dtype is not None:
            float_type("LanguageModelConfig", "dtype", self.dtype)
        float_type("LanguageModelConfig", "param_dtype", self.param_dtype)
        shapes.flag("LanguageModelConfig", "remat", self.remat)


class Block(nnx.Module):
    """``x + mixer(rms_norm(x))``; ``x [..., seq, features]`` float32."""

    def __init__(self, config: LanguageModelConfig, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(config.features, epsilon=1e-5, dtype=config.dtype, rngs=rngs)
        shared = ("state_dim", "head_dim", "expand", "num_groups", "chunk_size", "dtype", "param_dtype", "precision")
        options: dict[str, Any] = {name: getattr(config, name) for name in (*shared, "implementation")}
        options |= {"out_kernel_init": _residual_init(config.layers), "rngs": rngs}
        self.mixer: Mamba2 | Mamba3
        if config.mixer == "mamba2":
            self.mixer = Mamba2(config.features, conv_width=config.conv_width, **options)
        else:
            self.mixer = Mamba3(config.features, mimo_rank=config.mimo_rank, **options)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None, carry: LayerCarry | None
    ) -> tuple[jax.Array, LayerCarry]:
        mixer: Any = self.mixer  # both have this call
        y, after = mixer(self.norm(x), segment_ids=segment_ids, initial_carry=carry, return_carry=True)
        return x + y.astype(x.dtype), after

    def step(self, carry: Any, x: jax.Array) -> tuple[LayerCarry, jax.Array]:
        carry, y = self.mixer.step(carry, self.norm(x))
        return carry, x + y.astype(x.dtype)


class LanguageModel(nnx.Module):
    """Next-token logits for sequences of token ids.

    Calling it on ``tokens [..., seq]`` (integers) gives ``logits [..., seq, vocab_size]`` in float32; position t sees
    tokens up to and including t. ``step`` does the same for one token at a time.
    """

    def __init__(self, config: LanguageModelConfig, *, rngs: nnx.Rngs):
        if not isinstance(config, LanguageModelConfig):
            raise TypeError(
                f"LanguageModel: config: expected a LanguageModelConfig, got {type(config).__name__}; pass for "
                "instance LanguageModelConfig(features=128)."
            )
        require_rngs("LanguageModel", rngs)
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.features,
            dtype=jnp.float32,
            param_dtype=config.param_dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.features, epsilon=1e-5, dtype=config.dtype, rngs=rngs)

    @overload
    def __call__(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        initial_carry: Carry | None = None,
        return_carry: Literal[False] = False,
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        initial_carry: Carry | None = None,
        return_carry: Literal[True],
    ) -> tuple[jax.Array, Carry]: ...

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        initial_carry: Carry | None = None,
        return_carry: bool = False,
    ) -> jax.Array | tuple[jax.Array, Carry]:
        """Logits for a whole sequence; the keywords are those of ``jax_ssd.flax.nnx.Mamba2``.

        Ids outside of the vocabulary are not noticed: as in every lookup of JAX, the nearest row is taken, or one that
        is counted from the end.
        """
        run_block = nnx.remat(Block.__call__) if self.config.remat else Block.__call__
        tokens = shapes.as_array("LanguageModel", "tokens", tokens)
        shapes.require_rank("LanguageModel", "tokens", tokens, 1, "(..., seq)")
        return_carry = shapes.flag("LanguageModel", "return_carry", return_carry)
        if initial_carry is not None:
            self.check_carry("initial_carry", initial_carry, tokens.shape[:-1])
        x = _rows(self.embedding.embedding[...].astype(jnp.float32), tokens)
        carries = []
        for index, block in enumerate(self.blocks):
            x, carry = run_block(block, x, segment_ids, None if initial_carry is None else initial_carry[index])
            carries.append(carry)
        logits = self.head(x, self.head_kernel())
        return (logits, tuple(carries)) if return_carry else logits

    def step(self, carry: Carry, token: jax.Array) -> tuple[Carry, jax.Array]:
        """``token [...]`` -> ``(carry, logits [..., vocab_size])``; the body of a ``lax.scan``."""
        x = self.embed(token)
        self.check_carry("carry", carry, x.shape[:-1])
        carries = []
        for block, state in zip(self.blocks, carry, strict=True):
            state, x = block.step(state, x)
            carries.append(state)
        return tuple(carries), self.head(x, self.head_kernel())

    def initialize_carry(self, batch_shape: Sequence[int]) -> Carry:
        """The carry before the first token of ``batch_shape`` sequences."""
        axes = batch_axes("LanguageModel", "batch_shape", batch_shape)
        return tuple(block.mixer.initialize_carry((*axes, self.config.features)) for block in self.blocks)

    def check_carry(self, name: str, carry: Any, batch: tuple[int, ...]) -> None:
        """Raises TypeError or ValueError, in which the carry has this name, unless it is one of these batch axes."""
        if not isinstance(carry, (tuple, list)) or len(carry) != len(self.blocks):
            count = f" of {len(carry)}" if isinstance(carry, (tuple, list)) else ""
            raise (ValueError if count else TypeError)(
                f"LanguageModel: {name}: expected a tuple of {len(self.blocks)} carries, one for each layer, got "
                f"{type(carry).__name__}{count}; pass what return_carry=True, step or initialize_carry gave."
            )
        for index, (block, one) in enumerate(zip(self.blocks, carry, strict=True)):
            block.mixer.check_carry(f"{name}[{index}]", one, batch)

    def embed(self, token: jax.Array) -> jax.Array:
        """``token [...]`` -> ``[..., features]`` float32, of one token: here the rows are converted, not the table."""
        return _rows(self.embedding.embedding[...], token).astype(jnp.float32)

    def head_kernel(self) -> jax.Array:
        """``[vocab_size, features]`` in the compute dtype; a loop of steps computes it once."""
        return self.embedding.embedding[...].astype(self.config.dtype)

    def head(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """``x [..., features]``, ``kernel`` from ``head_kernel`` -> logits ``[..., vocab_size]``."""
        x = self.norm(x)
        return jax.lax.dot_general(
            x,
            kernel,
            (((x.ndim - 1,), (1,)), ((), ())),
            precision=self.config.precision,
            preferred_element_type=jnp.float32,
        )


def bits_per_token(logits: jax.Array, targets: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean cross entropy in bits, a float32 scalar.

    Args:
      logits: ``[..., seq, vocab_size]``.
      targets: ``[..., seq]`` integers, the token that each position should have predicted.
      mask: ``[..., seq]`` bool, positions that count; None counts all. At least one must count.

    Ids are not compared with the vocabulary: a target outside of it gives NaN.

    Raises:
      ValueError: targets or mask are not of the logits' shape, or there is no position.
      TypeError: targets are not integers, or the mask is not bool.
    """
    name = "bits_per_token"
    logits, targets = shapes.as_array(name, "logits", logits), shapes.as_array(name, "targets", targets)
    mask = None if mask is None else shapes.as_array(name, "mask", mask)
    shapes.require_float(name, "logits", logits)
    shapes.require_rank(name, "logits", logits, 1, "(..., seq, vocab_size)")
    positions = logits.shape[:-1]
    if targets.shape != positions or targets.size == 0:
        raise ValueError(
            f"bits_per_token: targets: expected one for each position of the logits {positions} and at least one, got "
            f"shape {targets.shape}; leave out the positions that have none."
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(
            f"bits_per_token: targets: expected token ids, integers, got {targets.dtype.name}; use .astype."
        )
    if mask is not None and mask.shape != positions:
        raise ValueError(
            f"bits_per_token: mask: expected the shape of the targets {positions}, got {mask.shape}; broadcast it."
        )
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(f"bits_per_token: mask: expected bool, got {mask.dtype.name}; pass mask != 0.")
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    bits = -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0] / jnp.float32(math.log(2))
    return jnp.mean(bits, where=mask)


def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """``table [vocab_size, features]`` -> ``[..., features]``; on a mesh with explicit axes sharded as tokens are."""
    tokens = shapes.as_array("LanguageModel", "tokens", tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"LanguageModel: tokens: expected token ids, integers, got {tokens.dtype.name}; use .astype.")
    sharding = jax.typeof(tokens).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return table.at[tokens].get(out_sharding=P(*sharding.spec, None) if explicit else None)


def _residual_init(layers: int) -> Initializer:
    """Uniform in +-1/sqrt(fan_in), divided by sqrt(layers) so that the residual sum does not grow with depth."""
    return nnx.initializers.variance_scaling(1 / (3 * layers), "fan_in", "uniform")
