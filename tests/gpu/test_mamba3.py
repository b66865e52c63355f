"""The Mamba-3 forward kernels on a GPU: accuracy at every option, NaNs, repeatability, the public function."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_ssd
from jax_ssd import launch
from tests import mamba3_float64 as oracle
from tests.mamba3_calls import CALLS, POISONED, Call, errors
from tests.test_mamba3 import case, error, error_of_a_layers_scan, mixed_decays, state_error, wide
from tests.test_mamba3_cuda import planned


def results(call: Call) -> list[np.ndarray]:
    plan = planned(call)
    operands = call.operands()
    run = jax.jit(launch.runner(plan))
    return [np.asarray(a) for a in run(*(jnp.asarray(operands[buffer.name]) for buffer in plan.operands))]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_agrees_with_float64(call):
    found = errors(results(call), call.truth())
    assert found["y"] <= call.bar
    assert found["ssm"] <= 2 * call.bar
    assert max(found["angle"], found["k"], found["v"]) <= 1e-5


@pytest.mark.parametrize("call", POISONED, ids=lambda call: call.name)
def test_a_nan_stays_with_its_head_and_the_tokens_after_it(call):
    y = np.asarray(results(call)[0], np.float64)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(call.truth()[0]))


@pytest.mark.parametrize("name", ["wgmma", "packed, segments", "float32", "tf32, packed"])
def test_calls_give_the_same_bits(name):
    (call,) = (call for call in CALLS if call.name == name)
    first = results(call)
    for _ in range(5):
        for again, before in zip(results(call), first, strict=True):
            np.testing.assert_array_equal(again, before)


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("rotary", ["pairwise", "half"])
def test_the_public_function(rank, rotary):
    arrays = case(rank=rank, seq=150, state=32, head_dim=16, pairs=8, heads=4, groups=2, initial=True)
    y, state = jax_ssd.mamba3(
        **arrays, rotary=rotary, precision="highest", return_final_state=True, implementation="cuda"
    )
    expected_y, expected_state = oracle.run(**wide(arrays), rotary=rotary)
    assert error(y, expected_y) <= 2.2e-6
    assert state_error(state, expected_state) <= 1e-5


def test_mapped_parameters_have_a_row_each():
    arrays = {name: a for name, a in case(batch=3, seq=40, state=16, head_dim=16).items() if a is not None}
    mapped = {name: arrays[name] for name in ("q_bias", "k_bias", "D")}
    mapped = {name: np.stack([a, 2 * a]) for name, a in mapped.items()}
    rest = {name: a for name, a in arrays.items() if name not in mapped}

    def call(mapped):
        return jax_ssd.mamba3(**rest, **mapped, precision="highest", implementation="cuda")

    for row, y in enumerate(jax.vmap(call)(mapped)):
        assert error(y, call({name: a[row] for name, a in mapped.items()})) <= 2.2e-6


@pytest.mark.parametrize(("dtype", "bar"), [(np.float32, 2.2e-6), (ml_dtypes.bfloat16, 5.1e-3)])
def test_the_error_is_the_same_at_2048_and_at_32768_tokens(dtype, bar):
    short, long = (error_of_a_layers_scan(seq, "cuda", dtype) for seq in (2048, 32768))
    assert short < bar and long < min(bar, 2 * short)


@pytest.mark.parametrize(("dtype", "bar"), [(np.float32, 2.2e-6), (ml_dtypes.bfloat16, 5.1e-3)])
@pytest.mark.parametrize("rank", [None, 4])
def test_decays_of_many_sizes_in_one_chunk(rank, dtype, bar):
    arrays = case(rank=rank, batch=1, seq=100, state=128, head_dim=64, pairs=32, initial=True)
    arrays["adt"] = mixed_decays(arrays["adt"].shape)
    arrays |= {name: arrays[name].astype(dtype) for name in ("q", "k", "v", "z")}
    expected, _ = oracle.run(**wide(arrays))
    y = jax_ssd.mamba3(**arrays, precision="highest", implementation="cuda")
    assert error(y, expected) <= bar


@functools.partial(jax.jit, static_argnums=1)
def drawn(key, seq):
    """A call of SISO whose v has more than 2^31 elements at 131,072 tokens."""
    heads, head_dim, state, pairs = 132, 128, 64, 8
    keys = iter(jax.random.split(key, 8))

    def normal(*shape, dtype="bfloat16"):
        return jax.random.normal(next(keys), shape, dtype)

    dt = jnp.exp(0.5 * normal(1, heads, seq, dtype="float32") - 3)
    return {
        "q": normal(1, seq, 1, state),
        "k": normal(1, seq, 1, state),
        "v": normal(1, seq, heads, head_dim),
        "q_bias": jnp.ones((heads, state), "float32"),
        "k_bias": jnp.ones((heads, state), "float32"),
        "angles": normal(1, seq, heads, pairs, dtype="float32"),
        "adt": -dt,
        "dt": dt,
        "trap": normal(1, heads, seq, dtype="float32"),
    }


def test_more_than_2_to_the_31_elements():
    """The last tokens of the whole are those of a run that goes on from the state before them."""
    seq, last = 131_072, 256
    arrays = drawn(jax.random.key(0), seq)
    assert arrays["v"].size > 2**31
    scan = functools.partial(jax_ssd.mamba3, mimo_v=None, mimo_o=None, implementation="cuda")

    def tokens(low, high):
        cut = {n: arrays[n][:, low:high] for n in ("q", "k", "v", "angles")}
        return {**arrays, **cut, **{n: arrays[n][:, :, low:high] for n in ("adt", "dt", "trap")}}

    _, state = scan(**tokens(0, seq - last), return_final_state=True)
    expected = scan(**tokens(seq - last, seq), initial_state=state)
    y = scan(**arrays)[:, -last:]
    assert error(y, np.asarray(expected, np.float64)) <= 1e-2  # both are rounded to bfloat16
