"""Training a language model: optimiser, which parameters decay, and one step that runs alone or data-parallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jax_ssd import config

try:
    import optax
except ModuleNotFoundError as error:
    raise ImportError(f"jax_ssd.models needs optax, which is not installed: {config.install('models')}") from error

from flax import nnx

from jax_ssd import manual_axes, shapes
from jax_ssd.models.language_model import bits_per_token

NO_DECAY = frozenset({"A_log", "dt_bias", "D", "B_bias", "C_bias", "scale", "bias"})
"""Names of parameters that weight decay would harm: decay rates, step sizes, skips, norms and biases."""


@partial(jax.tree_util.register_dataclass, data_fields=("params", "opt_state"), meta_fields=())
@dataclass(frozen=True)
class TrainState:
    """Everything a training step updates: parameters and the optimiser's state, both pytrees of arrays."""

    params: Any
    opt_state: Any


def decay_mask(params: Any) -> Any:
    """True for the parameters that take weight decay: all but ``A_log``, ``D``, norm scales and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not (NO_DECAY & _names(path)), params)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.95,
    max_norm: float = 1.0,
) -> optax.GradientTransformation:
    """AdamW behind a clip of the global gradient norm, with ``decay_mask``."""
    if not callable(learning_rate) and not isinstance(learning_rate, jax.Array):
        shapes.number("adamw", "learning_rate", learning_rate)
    return optax.chain(
        optax.clip_by_global_norm(max_norm),
        optax.adamw(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decay_mask),
    )


def make_train_step(
    graphdef: Any, optimizer: optax.GradientTransformation, *, axis_name: str | None = None
) -> Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]:
    """One step of next-token training, to be wrapped in jit, pmap or shard_map.

    Args:
      graphdef: of the model, from ``graphdef, params = nnx.split(model)``.
      optimizer: e.g. ``adamw(1e-3)``.
      axis_name: mapped axis over which gradients and loss are averaged (pmap, shard_map with and without its checks);
        None under jit, also with sharded arrays.

    Returns:
      ``step(state, tokens [batch, seq + 1]) -> (state, loss)`` with the loss in bits per token before the update. It
      raises ValueError for rows of fewer than two tokens.
    """

    if not isinstance(graphdef, nnx.GraphDef):
        raise TypeError(
            f"make_train_step: graphdef: expected an nnx.GraphDef, got {type(graphdef).__name__}; pass the first of "
            "nnx.split(model)."
        )
    if not callable(getattr(optimizer, "update", None)):
        raise TypeError(
            f"make_train_step: optimizer: expected an optax.GradientTransformation, got {type(optimizer).__name__}; "
            "pass for instance adamw(1e-3)."
        )

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        return bits_per_token(model(tokens[:, :-1]), tokens[:, 1:])

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        tokens = shapes.as_array("make_train_step", "tokens", tokens)
        if tokens.ndim < 2 or tokens.shape[-1] < 2:
            raise ValueError(
                "make_train_step: tokens: expected [batch, seq + 1] with at least two tokens a row, the last of which "
                f"is only a target, got {tokens.shape}; add an axis of rows, or leave shorter rows out."
            )
        if not isinstance(state, TrainState):
            raise TypeError(
                f"make_train_step: state: expected a TrainState, got {type(state).__name__}; pass TrainState(params, "
                "optimizer.init(params))."
            )
        params = state.params
        if axis_name is not None and axis_name in manual_axes.varying(tokens):
            # Else shard_map, where its checks are on, adds the gradients of replicated parameters up over the shards.
            params = manual_axes.cast(params, frozenset({axis_name}))
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        if axis_name is not None:
            loss, grads = jax.lax.pmean((loss, grads), axis_name)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on promotion, also where the caller forbids it
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), loss

    return step


def _names(path: tuple[Any, ...]) -> set[str]:
    return {str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path}
