"""Packed sequences of Mamba-3 on a GPU: segment ids and boundaries of several rows, against float64 and against XLA."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_ssd
from jax_ssd import Mamba3State
from tests import mamba3_float64 as oracle
from tests.test_mamba3 import case, error, state_error, wide
from tests.test_mamba3_packing import TOKENS, apart, row, turned

MODEL: dict[str, Any] = {"state": 128, "head_dim": 64, "pairs": 32, "heads": 4, "groups": 1}
BARS = {"float32": 2.2e-6, "bfloat16": 5.1e-3}


def labels(seq: int) -> np.ndarray:
    """Padding on both sides and inside, a chunk of many short segments; a row of few."""
    ids = np.full((2, seq), -1)
    ids[0, 9:200] = 1
    ids[0, 70:80] = -1
    ids[0, 200:260] = np.arange(60) // 2
    ids[0, 270 : seq - 20] = 7
    ids[1] = np.arange(seq) // 150
    return ids


def arguments(rank, dtype, **options) -> dict:
    arrays = case(rank=rank, batch=2, seq=400, norm=False, **MODEL, **options)
    return arrays | {name: arrays[name].astype(dtype) for name in ("q", "k", "v", "z")}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rank", [4, None])
def test_segments_are_separate_sequences(rank, dtype):
    arrays, ids = arguments(rank, dtype, initial=True), labels(400)
    bar = BARS[np.dtype(dtype).name]
    y, state = jax_ssd.mamba3(
        **arrays, segment_ids=ids, return_final_state=True, precision="highest", implementation="cuda"
    )
    assert (np.asarray(y)[ids < 0] == 0).all()
    for b in range(2):
        expected, last = apart(lambda **given: oracle.run(**wide(given)), row(arrays, b), ids[b])
        assert error(y[b : b + 1], expected) <= bar
        own = Mamba3State(*(a[b : b + 1].astype(jnp.float32) for a in state))
        assert state_error(turned(own, last[0], "pairwise"), last) <= 2 * bar


def gradients(arrays: dict, implementation: str, **packing: Any):
    weights = np.random.default_rng(5).standard_normal(arrays["v"].shape).astype(ml_dtypes.bfloat16)

    def loss(arrays):
        y = jax_ssd.mamba3(**arrays, **packing, precision="highest", implementation=implementation)
        return (y.astype("float32") * weights.astype("float32")).sum()

    given = {n: jnp.asarray(a, "float32" if implementation == "xla" else None) for n, a in arrays.items()}
    return jax.jit(jax.grad(loss))(given)


@pytest.mark.parametrize("dtype, bar", [(np.float32, 2e-5), (ml_dtypes.bfloat16, 2e-2)])
@pytest.mark.parametrize("rank", [4, None])
@pytest.mark.parametrize("packing", ["segment_ids", "cu_seqlens"])
def test_gradients(packing, rank, dtype, bar):
    """Of the kernels of unpacked rows, and of those that read boundaries; relative to the root mean square."""
    arrays = {n: a for n, a in arguments(rank, dtype).items() if a is not None}
    absent: dict[str, Any] = {} if rank else {"mimo_v": None, "mimo_o": None}
    bounds = np.array([[0, 9, 70, 200, 380, 400], [0, 150, 300, 300, 399, 400]])
    value = labels(400) if packing == "segment_ids" else bounds
    found, expected = (gradients(arrays, name, **absent, **{packing: value}) for name in ("cuda", "xla"))
    for name, want in expected.items():
        got, want = np.asarray(found[name], np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) <= bar * np.linalg.norm(want), name
        if packing == "segment_ids" and name in TOKENS:
            by_token = np.moveaxis(got, 2, 1) if name in ("adt", "dt", "trap") else got
            assert (by_token[labels(400) < 0] == 0).all(), name
