"""Models built from the Flax layers, with what training and decoding them takes. Needs `jax_ssd[models]`."""

import jax_ssd.flax  # noqa: F401  (names what is missing where flax is not installed)
from jax_ssd.models.decoding import Decoder, decode, generate, prefill
from jax_ssd.models.language_model import LanguageModel, LanguageModelConfig, bits_per_token
from jax_ssd.models.training import TrainState, adamw, decay_mask, make_train_step

__all__ = [
    "Decoder",
    "LanguageModel",
    "LanguageModelConfig",
    "TrainState",
    "adamw",
    "bits_per_token",
    "decay_mask",
    "decode",
    "generate",
    "make_train_step",
    "prefill",
]
