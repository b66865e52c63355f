"""The Mamba-2 kernels on a GPU: accuracy, odd sizes, repeatability, decode."""

import dataclasses
import hashlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import compile as kernels
from jax_ssd import launch
from jax_ssd.cases import TABLE, Case, differentiable
from jax_ssd.mamba2 import plan
from jax_ssd.tools import check
from tests import scan_float64

# User-visible sizes that broke other kernels, a few at a time: (heads, groups, head_dim, state).
ODD = [
    (1, 1, 8, 8),
    (2, 1, 16, 16),
    (3, 3, 24, 17),
    (5, 1, 32, 32),
    (6, 2, 48, 64),
    (7, 7, 64, 96),
    (12, 4, 80, 128),
    (24, 8, 96, 64),
    (2, 2, 128, 128),
    (2, 1, 64, 256),
]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_agrees_with_float64(case):
    for result in check.compare(case, check.evaluate(case, "cutile"), check.evaluate(case, "reference", wide=True)):
        assert result.passed, result


@pytest.mark.parametrize("sizes", ODD, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_odd_sizes(sizes, dtype):
    heads, groups, head_dim, state = sizes
    case = Case("", heads=heads, groups=groups, head_dim=head_dim, state=state, dtype=dtype, seq=150, chunk_size=None)
    truth = check.evaluate(case, "reference", wide=True)
    for result in check.compare(case, check.evaluate(case, "cutile"), truth):
        if heads == 1 and result.quantity in ("dA", "ddt_bias"):
            continue  # one number, a sum in which nearly everything cancels: relative error says nothing
        assert result.passed, result


EVERY = {"has_D": True, "has_z": True, "has_dt_bias": True, "has_initial_state": True, "dt_softplus": True}
WIDE = {"heads": 2, "groups": 1, "head_dim": 64, "state": 128, "chunk_size": None, "has_D": True}
SWAPPED = [
    ({**WIDE, "seq": 1500, "dtype": "bfloat16"}, 6e-3),
    ({**WIDE, **EVERY, "seq": 1500, "dtype": "bfloat16", "has_runs": True}, 6e-3),
    ({**WIDE, **EVERY, "seq": 500, "dtype": "float16"}, 1e-3),
    ({**WIDE, **EVERY, "seq": 500, "precision": "default"}, 1e-3),
    ({**EVERY, "seq": 150, "chunk_size": None, "heads": 6, "head_dim": 24, "state": 17, "has_runs": True}, 2e-6),
    ({**EVERY, "seq": 150, "chunk_size": None, "head_dim": 80, "state": 64, "dtype": "bfloat16"}, 6e-3),
    ({"seq": 17, "head_dim": 8, "state": 8, "dtype": "bfloat16", "return_final_state": False}, 6e-3),
]


def swapped(changes):
    p = scan_float64.problem(**changes)
    return p, plan.forward(p, dataclasses.replace(plan.tiles(p), swap=True, store_latency=2))


@pytest.mark.parametrize(("changes", "bar"), SWAPPED, ids=str)
def test_operands_swapped(changes, bar):
    p, made = swapped(changes)
    operands = scan_float64.random_operands(p)
    inputs = (jnp.asarray(operands[buffer.name]) for buffer in made.operands)
    results = launch.call(made, kernels.target_arch(), *inputs)
    expected = scan_float64.scan(p, operands)
    for buffer, result in zip(made.results, results, strict=True):
        assert scan_float64.error(np.asarray(result), expected[buffer.name]) <= bar, buffer.name


MODEL = Case("", batch=2, seq=2048, heads=8, head_dim=64, groups=1, state=128, dtype="bfloat16", chunk_size=None)


def value_and_gradients(case: Case):
    """One compiled training step of the operator, and its arguments."""
    arrays = case.inputs()

    def objective(moving):
        y, final = jax_ssd.mamba2(**moving, **case.options(), return_final_state=True, implementation="cutile")
        return (y.astype(jnp.float32) ** 2).mean() + (final**2).mean(), (y, final)

    return jax.jit(jax.value_and_grad(objective, has_aux=True)), differentiable(arrays)


def test_float32_output_is_within_its_bars():
    for precision, bar in (("highest", 2e-6), ("default", 1e-3)):
        case = Case(
            "", seq=1024, head_dim=64, state=128, initial_state=False, gate=False, chunk_size=None, precision=precision
        )
        truth = check.evaluate(case, "reference", wide=True)
        assert check.relative_error(check.evaluate(case, "cutile")["y"], truth["y"]) <= bar


def test_bfloat16_output_is_within_its_bar():
    truth = check.evaluate(MODEL, "reference", wide=True)
    assert check.relative_error(check.evaluate(MODEL, "cutile")["y"], truth["y"]) <= 3e-3


def digest() -> str:
    """Of what the kernels write; sums over rows and of the objective are by XLA, which chooses its kernels by time."""
    step, arrays = value_and_gradients(MODEL)
    (_, outputs), gradients = step(arrays)
    results = hashlib.sha256()
    for leaf in (*outputs, *(gradients[name] for name in ("x", "dt", "B", "C", "z", "initial_state"))):
        results.update(np.asarray(leaf).tobytes())
    return results.hexdigest()


def test_twenty_calls_and_two_processes_give_the_same_bits():
    step, arrays = value_and_gradients(MODEL)
    first = jax.tree.map(np.asarray, step(arrays))
    for _ in range(19):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, step(arrays)), first)
    program = "from tests.gpu import test_mamba2 as t; print(t.digest())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.split()[-1] == digest()


@pytest.mark.parametrize("row", [0, 2])
def test_a_poisoned_row_leaves_its_neighbours_alone(row):
    case = Case("", batch=3, seq=300, head_dim=64, state=128, dtype="bfloat16", chunk_size=None)
    step, arrays = value_and_gradients(case)
    (_, (clean, _)), _ = step(arrays)
    (_, (y, _)), gradients = step({**arrays, "x": arrays["x"].at[row].set(jnp.nan)})
    others = [i for i in range(3) if i != row]
    np.testing.assert_array_equal(np.asarray(y)[others], np.asarray(clean)[others])
    assert np.isfinite(np.asarray(gradients["x"], np.float32)[others]).all()
    assert np.isnan(np.asarray(y, np.float32)[row]).all()


def tokens(case: Case):
    arrays = case.inputs()
    time_first = {name: jnp.moveaxis(arrays[name], 1, 0) for name in ("x", "dt", "B", "C")}
    return arrays, time_first


def decode(arrays, implementation, options=None):
    """A compiled scan of steps: (state, tokens) -> (state, y)."""

    def token(state, inputs):
        return jax_ssd.mamba2_step(
            state, **inputs, A=arrays["A"], D=arrays["D"], dt_softplus=True, implementation=implementation
        )

    return jax.jit(lambda state, inputs: jax.lax.scan(token, state, inputs), compiler_options=options)


STEPS = pytest.mark.parametrize("implementation", ["cutile", "cuda"])


@STEPS
def test_a_captured_decode_equals_an_uncaptured_one_and_the_sequence(implementation):
    case = Case(
        "", batch=4, seq=48, heads=8, head_dim=64, groups=2, state=128, dtype="bfloat16", gate=False, bias=False
    )
    arrays, inputs = tokens(case)
    state = arrays["initial_state"]
    kept = np.asarray(state)
    last, y = decode(arrays, implementation)(state, inputs)
    captured_last, captured_y = decode(arrays, implementation, jax_ssd.LOOP_AS_GRAPH)(state, inputs)
    np.testing.assert_array_equal(captured_y, y)
    np.testing.assert_array_equal(captured_last, last)
    np.testing.assert_array_equal(state, kept)  # not donated, so untouched
    whole, final = jax_ssd.mamba2(
        **{name: arrays[name] for name in ("x", "dt", "A", "B", "C", "D", "initial_state")},
        dt_softplus=True,
        return_final_state=True,
        implementation="reference",
    )
    assert check.relative_error(np.asarray(last, float), np.asarray(final, float)) < 1e-5
    steps = np.moveaxis(np.asarray(y, float), 0, 1)
    assert check.relative_error(steps, np.asarray(whole, float)) < 5e-3


@STEPS
def test_the_decode_loop_does_not_copy_the_state(implementation):
    case = Case(
        "", batch=4, seq=16, heads=8, head_dim=64, groups=2, state=128, dtype="bfloat16", gate=False, bias=False
    )
    arrays, inputs = tokens(case)
    text = decode(arrays, implementation).lower(arrays["initial_state"], inputs).compile().as_text() or ""
    state = "f32[4,8,64,128]"
    computations = [part for part in text.split("\n\n") if "ENTRY" not in part]
    assert any("jax_ssd.launch" in part for part in computations), "the step runs in the loop's body"
    # Copies may stand in the body itself or in a fusion that it calls; before the loop the entry makes one.
    copies = [line for part in computations for line in part.splitlines() if f"= {state}" in line and "copy" in line]
    assert not copies, copies


@STEPS
def test_a_16_bit_state_is_kept_in_its_type(implementation):
    case = Case("", seq=8, heads=4, head_dim=64, state=64, dtype="bfloat16", gate=False, bias=False)
    arrays, inputs = tokens(case)
    last, _ = decode(arrays, implementation)(arrays["initial_state"].astype(jnp.bfloat16), inputs)
    reference, _ = decode(arrays, implementation)(arrays["initial_state"], inputs)
    assert last.dtype == jnp.bfloat16
    assert check.relative_error(np.asarray(last, float), np.asarray(reference, float)) < 2e-2


def test_more_than_65535_rows_and_heads():
    case = Case("", batch=70_000, seq=3, heads=1, head_dim=16, groups=1, state=16, dtype="bfloat16", chunk_size=None)
    arrays = {n: a for n, a in case.inputs().items() if n != "initial_state"}
    y = jax_ssd.mamba2(**arrays, **case.options(), implementation="cutile")
    expected = jax_ssd.mamba2(**arrays, **case.options(), implementation="xla")
    assert check.relative_error(np.asarray(y[-9:], float), np.asarray(expected[-9:], float)) < 1e-2


def test_more_than_two_to_the_31_elements():
    """The last tokens of a long row against a run restarted from the state before them."""
    batch, seq, heads, head_dim, state = 1, 262_144 + 64, 128, 64, 16
    key = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(key[0], (batch, seq, heads, head_dim), jnp.bfloat16)
    dt = jnp.full((batch, seq, heads), 0.05, jnp.bfloat16)
    B, C = (jax.random.normal(k, (batch, seq, 1, state), jnp.bfloat16) for k in key[1:3])
    A = -jnp.linspace(0.5, 2.0, heads)
    run = jax.jit(
        lambda x, dt, B, C, state: jax_ssd.mamba2(
            x, dt, A, B, C, initial_state=state, return_final_state=True, implementation="cutile"
        )
    )
    zero = jnp.zeros((batch, heads, head_dim, state))
    assert x.size > 2**31
    y, final = run(x, dt, B, C, zero)
    cut = seq - 256
    _, before = run(x[:, :cut], dt[:, :cut], B[:, :cut], C[:, :cut], zero)
    rest, last = run(x[:, cut:], dt[:, cut:], B[:, cut:], C[:, cut:], before)
    assert check.relative_error(np.asarray(y[:, cut:], float), np.asarray(rest, float)) < 1e-3
    assert check.relative_error(np.asarray(final), np.asarray(last)) < 1e-3
