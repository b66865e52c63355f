"""The contract of Mamba-3, the same for every implementation, against numpy in float64 and closed forms."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import Mamba3State
from jax_ssd.mamba3 import phase
from tests import mamba3_float64 as oracle
from tests.emulation import kernels

IMPLEMENTATIONS = ["reference", "xla"]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.fixture
def mamba3(implementation):
    return functools.partial(jax_ssd.mamba3, implementation=implementation, precision="highest")


EIGHTS: dict[str, Any] = {"state": 16, "head_dim": 8, "pairs": 4}  # sizes that the kernels take as well


@pytest.fixture(params=[*IMPLEMENTATIONS, pytest.param("cuda", marks=pytest.mark.slow)])
def mamba3_everywhere(request, monkeypatch):
    """On the CUDA C++ kernels too, in the emulator where there is no GPU."""
    with kernels(monkeypatch) if request.param == "cuda" else contextlib.nullcontext():
        yield functools.partial(jax_ssd.mamba3, implementation=request.param, precision="highest")


def case(
    seed=0, *, batch=2, seq=19, rank: int | None = 2, groups=1, heads=2, state=8, head_dim=4, pairs=2, fold=True,
    gate=True, skip=True, norm=True, initial=False, sequences: int | None = None, dtype=np.float32
) -> dict:  # fmt: skip
    """Arguments of mamba3 over a wide range of trap and angles, as numpy arrays that float32 holds exactly."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0, shift=0.0):
        return (shift + scale * rng.standard_normal(shape)).astype(np.float32).astype(dtype)

    ranks = () if rank is None else (rank,)
    rows = batch if sequences is None else sequences
    arrays = {
        "q": normal(batch, seq, *ranks, groups, state),
        "k": normal(batch, seq, *ranks, groups, state),
        "v": normal(batch, seq, heads, head_dim),
        "q_bias": normal(heads, *ranks, state, scale=0.5, shift=1),
        "k_bias": normal(heads, *ranks, state, scale=0.5, shift=1),
        "mimo_v": None if rank is None else normal(heads, rank, head_dim, scale=0.3, shift=0.5),
        "mimo_o": normal(heads, rank, head_dim, scale=0.3, shift=0.5) if rank is not None and fold else None,
        "angles": normal(batch, seq, heads, pairs, scale=2),
        "adt": -np.exp(normal(batch, heads, seq, shift=-2)),
        "dt": np.exp(normal(batch, heads, seq, scale=0.7, shift=-1.5)),
        "trap": normal(batch, heads, seq, scale=3),
        "z": normal(batch, seq, heads, head_dim) if gate else None,
        "mimo_z": normal(heads, rank, head_dim, shift=1) if gate and rank is not None else None,
        "D": normal(heads) if skip else None,
        "norm_weight": normal(heads, head_dim, scale=0.3, shift=1) if norm else None,
    }
    if initial:
        pieces = ((pairs,), (head_dim, state), (*ranks, state), (head_dim,))
        arrays["initial_state"] = Mamba3State(*(normal(rows, heads, *shape) for shape in pieces))  # type: ignore[arg-type]
    return arrays


def wide(arrays: dict) -> dict:
    """Given arrays only, in float64."""
    return jax.tree.map(lambda a: np.asarray(a, np.float64), {n: a for n, a in arrays.items() if a is not None})


def error(actual, expected) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-30))


def state_error(actual, expected) -> float:
    """The worst of the pieces; angles are compared modulo a turn."""
    turn = 2 * np.pi
    angle = np.asarray(actual[0], np.float64) - np.asarray(expected[0], np.float64)
    assert angle.shape == expected[0].shape
    return max(
        float(np.abs(angle - turn * np.round(angle / turn)).max(initial=0)),
        *(error(a, b) for a, b in zip(actual[1:], expected[1:], strict=True)),
    )


# Golden numbers: inputs by formula, results from an independent program in float64.


def fill(shift, shape):
    return np.sin(shift + 0.37 * (np.arange(np.prod(shape)) + 1)).reshape(shape)


def golden_arrays(norm: bool) -> dict:
    B, S, H, G, R, N, P, Na = 1, 5, 2, 1, 2, 4, 3, 1
    arrays = {
        "q": fill(0.1, (B, S, R, G, N)),
        "k": fill(0.2, (B, S, R, G, N)),
        "v": fill(0.3, (B, S, H, P)),
        "z": fill(0.4, (B, S, H, P)),
        "angles": 2 * fill(0.5, (B, S, H, Na)),
        "trap": 2 * fill(0.6, (B, H, S)),
        "dt": 0.3 + 0.2 * fill(0.7, (B, H, S)),
        "adt": -0.4 + 0.3 * fill(0.8, (B, H, S)),
        "q_bias": 1 + 0.5 * fill(0.9, (H, R, N)),
        "k_bias": 1 + 0.5 * fill(1.0, (H, R, N)),
        "mimo_v": 0.5 + 0.3 * fill(1.1, (H, R, P)),
        "mimo_o": 0.5 + 0.3 * fill(1.2, (H, R, P)),
        "mimo_z": 1 + 0.3 * fill(1.3, (H, R, P)),
        "D": fill(1.4, (H,)),
    }
    return arrays | ({"norm_weight": 1 + 0.3 * fill(1.5, (H, P))} if norm else {})


GOLDEN_Y = {  # sum, sum of squares, y[0,0,1,2], y[0,1,1,2], y[0,4,0,0], y[0,4,1,2]
    ("pairwise", False): (
        *(25.300184462824, 163.108677007365),
        *(0.086077973134, 0.023816390124, 0.507227951879, 0.009867683853),
    ),
    ("pairwise", True): (
        *(6.124503026463, 6.049509081719),
        *(0.073811837749, 0.136705428753, 0.179797760034, 0.091985838755),
    ),
    ("half", False): (
        *(26.156182213471, 158.924731560550),
        *(0.086077973134, 0.026250032834, 0.487649896764, 0.010073168937),
    ),
    ("half", True): (
        *(6.277748774554, 6.179667598955),
        *(0.073811837749, 0.137694879703, 0.180401094875, 0.092184193510),
    ),
}
GOLDEN_LOSS = 0.950192019644
GOLDEN_GRADIENTS = {  # sum, first element, sum of squares
    "q": (-1.564171627595, 0.000641144644, 1.482071590901),
    "k": (-0.049888308575, -0.017193593308, 0.030278156675),
    "v": (0.932781655337, 0.034735731331, 1.898229984644),
    "z": (1.208975793521, 1.481380118298, 8.761932695835),
    "angles": (-0.227942205215, 0, 0.032449063156),
    "adt": (0.491273267081, 0, 0.164905816628),
    "dt": (-0.787539555834, 0.660359513119, 1.955766611809),
    "trap": (-0.010746270566, 0.050591690070, 0.008040180182),
    "q_bias": (-1.564171627595, 0.149568001884, 1.269366852384),
    "k_bias": (-0.049888308575, -0.135902747100, 0.035622037528),
    "mimo_v": (-0.286471737314, -0.238689136605, 0.929164907994),
    "mimo_z": (1.517571755743, -0.614398963828, 1.643348051010),
    "mimo_o": (1.418517909356, -0.790168106011, 3.315437397949),
    "D": (-0.117861127082, -0.029984589445, 0.008621361471),
    "norm_weight": (0.769300396402, -0.025419573957, 0.594904514160),
}


@pytest.mark.parametrize("rotary, norm", GOLDEN_Y)
def test_golden_values(rotary, norm, implementation, x64):
    y, state = jax_ssd.mamba3(
        **golden_arrays(norm), rotary=rotary, chunk_size=2, return_final_state=True, implementation=implementation
    )
    found = (y.sum(), (y**2).sum(), y[0, 0, 1, 2], y[0, 1, 1, 2], y[0, 4, 0, 0], y[0, 4, 1, 2])
    np.testing.assert_allclose(found, GOLDEN_Y[rotary, norm], atol=1e-11)
    np.testing.assert_allclose(state.angle[0, :, 0], [3.296612939066, 1.688662719330], atol=1e-11)
    squares = {"pairwise": 5.973900446712, "half": 6.036969671268}
    np.testing.assert_allclose((state.ssm**2).sum(), squares[rotary], atol=1e-11)
    if rotary == "pairwise":
        ssm = [-0.024720842549, 0.014844703251, 0.023857783165, 0.018270276746]
        np.testing.assert_allclose(state.ssm[0, 1, 2], ssm, atol=1e-11)
        k = [-0.751836254460, 0.294006623044, 1.082688302043, 1.442138588645]
        np.testing.assert_allclose(state.k[0, 1, 0], k, atol=1e-11)


def test_golden_gradients(implementation, x64):
    def objective(arrays):
        y = jax_ssd.mamba3(**arrays, chunk_size=2, implementation=implementation)
        return (y * fill(1.6, y.shape)).sum()

    value, gradients = jax.value_and_grad(objective)(golden_arrays(True))
    np.testing.assert_allclose(value, GOLDEN_LOSS, atol=1e-11)
    assert gradients.keys() == GOLDEN_GRADIENTS.keys()
    for name, g in gradients.items():
        found = (g.sum(), g.ravel()[0], (g**2).sum())
        np.testing.assert_allclose(found, GOLDEN_GRADIENTS[name], atol=1e-11, err_msg=name)


def test_golden_packed(implementation, x64):
    y = jax_ssd.mamba3(
        **golden_arrays(False), cu_seqlens=np.array([0, 2, 2, 5]), chunk_size=2, implementation=implementation
    )
    np.testing.assert_allclose(y.sum(), 27.974497363135, atol=1e-11)


# Against numpy.

CASES: dict[str, dict[str, Any]] = {
    "mimo": {},
    "siso": {"rank": None, "groups": 2, "heads": 4, "initial": True},
    "rank 1, odd head_dim": {"rank": 1, "head_dim": 5, "pairs": 4, "gate": False},
    "rank 4, groups": {"rank": 4, "heads": 4, "groups": 2, "pairs": 1, "norm": False, "initial": True},
    "a group per head": {"heads": 3, "groups": 3, "skip": False, "initial": True, "seq": 33},
    "no rotation, plain": {"pairs": 0, "gate": False, "skip": False, "norm": False, "seq": 1},
    "ranks kept": {"fold": False, "state": 2, "pairs": 1, "rank": 3, "head_dim": 1},
}
ROTARY: dict[str, Any] = {"rank 4, groups": "half", "a group per head": "half"}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_numpy_in_float64(name, implementation, x64):
    arrays = wide(case(**CASES[name]))
    rotary = ROTARY.get(name, "pairwise")
    expected, expected_state = oracle.run(**arrays, rotary=rotary)
    y, state = jax_ssd.mamba3(
        **{"mimo_v": None, "mimo_o": None, **arrays},
        rotary=rotary,
        chunk_size=7,
        return_final_state=True,
        implementation=implementation,
    )
    assert error(y, expected) < 1e-13
    assert state_error(state, expected_state) < 1e-13


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_numpy_in_float32(name, mamba3):
    arrays = case(**CASES[name])
    rotary = ROTARY.get(name, "pairwise")
    expected, expected_state = oracle.run(**wide(arrays), rotary=rotary)
    y, state = mamba3(**arrays, rotary=rotary, return_final_state=True)
    assert y.dtype == jnp.float32
    assert error(y, expected) < 2.2e-6
    assert state_error(state, expected_state) < 2.2e-6


@pytest.mark.parametrize("name", ["mimo", "siso", "rank 4, groups"])
def test_every_gradient_is_that_of_numpy(name, implementation, x64):
    sizes = CASES[name] | {"seq": 9, "initial": True}
    rotary = ROTARY.get(name, "pairwise")
    given = wide(case(**sizes))
    state = {f"state_{n}": a for n, a in given.pop("initial_state")._asdict().items()}
    flat = given | state
    weights = np.random.default_rng(3)
    weight = weights.standard_normal(given["v"].shape)
    weight_state = [weights.standard_normal(a.shape) for a in state.values()]

    def objective(scan, arrays):
        start = Mamba3State(*(arrays[n] for n in state))
        y, final = scan(**{n: a for n, a in arrays.items() if n not in state}, initial_state=start, rotary=rotary)
        return (y * weight).sum() + sum((a * w).sum() for a, w in zip(final, weight_state, strict=True))

    def library(**arrays):
        arrays = {"mimo_v": None, "mimo_o": None, **arrays}
        return jax_ssd.mamba3(**arrays, chunk_size=4, return_final_state=True, implementation=implementation)

    gradients = jax.jit(jax.grad(functools.partial(objective, library)))(flat)
    for seed, (argument, gradient) in enumerate(gradients.items()):
        direction = np.random.default_rng(seed).standard_normal(gradient.shape)
        along = oracle.derivative(
            lambda **arrays: objective(lambda **a: oracle.run(**a), arrays), flat, {argument: direction}
        )
        np.testing.assert_allclose((gradient * direction).sum(), along, rtol=1e-10, atol=1e-11, err_msg=argument)


@functools.cache
def gradients_in_float64(initial: bool):
    with jax.enable_x64(True):
        return loss_gradients(wide(case(seq=40, initial=initial)), "reference")


@functools.cache
def gradient_function(implementation):
    def loss(arrays, weight):
        y = jax_ssd.mamba3(**arrays, implementation=implementation, precision="highest")
        return (y * weight).sum()

    return jax.jit(jax.grad(loss))


def loss_gradients(arrays, implementation):
    weight = np.random.default_rng(5).standard_normal(arrays["v"].shape).astype(np.float32)
    return gradient_function(implementation)(arrays, weight.astype(arrays["v"].dtype))


@pytest.mark.parametrize("initial", [False, True])
def test_gradients_in_float32(initial):
    expected = gradients_in_float64(initial)
    found = loss_gradients(case(seq=40, initial=initial), "xla")
    for (path, g), (_, e) in zip(
        jax.tree.flatten_with_path(found)[0], jax.tree.flatten_with_path(expected)[0], strict=True
    ):
        assert error(g, e) < 1e-5, (path, error(g, e))


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_chunks_change_rounding_only(chunk):
    arrays = case(seq=70, initial=True)
    expected, expected_state = oracle.run(**wide(arrays))
    y, state = jax_ssd.mamba3(**arrays, chunk_size=chunk, return_final_state=True, precision="highest")
    assert error(y, expected) < 2.2e-6
    assert state_error(state, expected_state) < 2.2e-6
    other = jax_ssd.mamba3(**arrays, chunk_size=23, return_final_state=True)[1]
    np.testing.assert_array_equal(state.angle, other.angle)  # the phase is exact
    np.testing.assert_array_equal(state.k, other.k)


def test_error_does_not_grow_with_the_length():
    arrays = case(batch=1, seq=4096, state=4, head_dim=2, pairs=2, norm=False)
    arrays["angles"] = np.abs(arrays["angles"])  # all of one sign: phases of a thousand radians
    expected, expected_state = oracle.run(**wide(arrays))
    assert expected_state[0].min() > 1000
    y, state = jax_ssd.mamba3(**arrays, precision="highest", return_final_state=True)
    assert error(y, expected) < 2.2e-6
    assert state_error(state, expected_state) < 1e-5  # angle: a random walk of roundings of the increments


def error_of_a_layers_scan(seq: int, implementation: str, dtype=np.float32) -> float:
    """With angles, steps and decays as a layer has them: at 32,768 tokens the phase reaches 3,400 radians."""
    arrays = case(batch=1, seq=seq, rank=4, state=64, head_dim=16, pairs=32)
    rng = np.random.default_rng(1)
    arrays["angles"] = rng.uniform(size=arrays["angles"].shape).astype(np.float32)
    arrays["dt"] = np.logaddexp(0, rng.standard_normal(arrays["dt"].shape) - 3).astype(np.float32)
    arrays["adt"] = (-np.exp(rng.standard_normal(arrays["adt"].shape)) * arrays["dt"]).astype(np.float32)
    arrays |= {name: arrays[name].astype(dtype) for name in ("q", "k", "v", "z")}
    y = jax_ssd.mamba3(**arrays, precision="highest", implementation=implementation)
    with jax.enable_x64(True):  # numpy's recurrence would take a minute
        return error(y, jax_ssd.mamba3(**{**dict.fromkeys(arrays), **wide(arrays)}, implementation="xla"))


@pytest.mark.slow
def test_error_is_the_same_at_2048_and_at_32768_tokens():
    short, long = (error_of_a_layers_scan(seq, "xla") for seq in (2048, 32768))
    assert short < 2.2e-6 and long < min(2.2e-6, 2 * short)


def test_the_phase_is_an_exact_sum():
    """Of increments in units of 2^-32 turns, at 2,048 tokens and at 32,768, in whatever pieces it is made."""
    rng = np.random.default_rng(0)
    angles, dt = (np.float32(scale * rng.uniform(size=(32768, 3))) for scale in (2, 0.2))
    steps = phase.increment(jnp.asarray(angles), jnp.asarray(dt))
    wrapped = np.cumsum(np.asarray(steps.turns, np.int64), 0).astype(np.int32)
    turns = np.cumsum(0.5 * np.tanh(np.float64(angles)) * dt, 0)
    assert turns[-1].min() > 300
    zero = phase.start(jnp.zeros(3))
    np.testing.assert_array_equal(phase.advance_all(zero, steps, 0).turns, wrapped)
    for size in (1000, 2048):
        now = zero
        for low in range(0, 32768, size):
            piece = phase.Phase(*(a[low : low + size] for a in steps))
            now = phase.Phase(*(a[-1] for a in phase.advance_all(now, piece, 0)))
            np.testing.assert_array_equal(now.turns, wrapped[min(low + size, 32768) - 1])
    for seq in (2048, 32768):
        off = wrapped[seq - 1] * 2.0**-32 - turns[seq - 1]
        assert np.abs(off - np.round(off)).max() < 5e-9 * turns[seq - 1].max()  # roundings of increments go either way


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("scale", [0.1, 1, 5])
def test_increments_have_no_systematic_error(scale):
    """Which would grow with the length, be the sum ever so exact."""
    rng = np.random.default_rng(0)
    angles, dt = (jnp.asarray(s * rng.uniform(size=100_000), jnp.float32) for s in (scale, 0.2))
    turns = np.asarray(phase.increment(angles, dt).turns, np.float64)
    exact = 0.5 * np.tanh(np.asarray(angles, np.float64)) * np.asarray(dt, np.float64) * 2.0**32
    assert abs((turns - exact).sum()) < 3e-9 * exact.sum()
    assert np.abs(turns - exact).max() < 2.5e-7 * exact.max()
    np.testing.assert_array_equal(phase.increment(-angles, dt).turns, -turns)
    limits = phase.increment(jnp.array([jnp.inf, -jnp.inf, 0.0]), jnp.float32(0.25)).turns
    np.testing.assert_array_equal(limits, [1 << 29, -1 << 29, 0])


def test_the_phase_of_a_packed_sequence_is_that_of_the_sequence_alone(mamba3):
    """Whatever comes before: as a difference of sums from the start of the pack it would lose digits."""
    bounds = [0, 50, 51, 80]
    arrays = case(batch=1, seq=80, gate=False, norm=False, skip=False)
    arrays["angles"] = np.abs(arrays["angles"])
    arrays["dt"][..., :50] *= 100  # thousands of radians
    _, state = mamba3(**arrays, cu_seqlens=np.array(bounds), return_final_state=True)
    for j in (1, 2):
        _, alone = oracle.run(**wide(part(arrays, *bounds[j : j + 2])))
        assert state_error(jax.tree.map(lambda a, j=j: a[j : j + 1], state), alone) < 2.2e-6


# Identities.


def part(arrays: dict, low: int, high: int | None) -> dict:
    axes = dict.fromkeys(("q", "k", "v", "z", "angles"), 1) | dict.fromkeys(("adt", "dt", "trap"), 2)

    def one(name, array):
        if name not in axes or array is None:
            return array
        return array[:, low:high] if axes[name] == 1 else array[:, :, low:high]

    return {name: one(name, array) for name, array in arrays.items()}


@pytest.mark.parametrize("cut", [0, 1, 13])
def test_split_is_whole(cut, mamba3_everywhere):
    arrays = case(initial=True, **EIGHTS)
    whole, end = mamba3_everywhere(**arrays, return_final_state=True, chunk_size=5)
    first, state = mamba3_everywhere(**part(arrays, 0, cut), return_final_state=True, chunk_size=5)
    rest = part(arrays, cut, None) | {"initial_state": state}
    second, end_again = mamba3_everywhere(**rest, return_final_state=True, chunk_size=5)
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, rtol=1e-5, atol=2e-6)
    assert state_error(end_again, end) < 2e-6


BOUNDS = np.array([0, 0, 7, 7, 8, 18, 23, 23])


@pytest.mark.parametrize("initial", [False, True])
def test_packed_is_separate(initial, mamba3):
    arrays = case(batch=1, seq=23, initial=initial, sequences=len(BOUNDS) - 1)
    y, state = mamba3(**arrays, cu_seqlens=BOUNDS, return_final_state=True, chunk_size=5)
    expected, expected_state = oracle.packed(BOUNDS, **wide(arrays))
    assert error(y, expected) < 2.2e-6
    assert state_error(state, expected_state) < 2.2e-6
    if initial:
        for j in (0, 2, 6):  # empty ones
            for a, b in zip(state[1:], arrays["initial_state"][1:], strict=True):
                np.testing.assert_array_equal(a[j], b[j])


def test_gradients_of_packed_sequences_are_those_of_separate_ones(x64):
    arrays = wide(case(batch=1, seq=23, initial=True, sequences=len(BOUNDS) - 1))
    start = arrays.pop("initial_state")

    def gradients(implementation):
        def loss(arrays, start):
            y, state = jax_ssd.mamba3(
                **arrays,
                initial_state=start,
                cu_seqlens=BOUNDS,
                return_final_state=True,
                chunk_size=5,
                implementation=implementation,
            )
            return jnp.sin(y * fill(1.6, y.shape)).sum() + sum((a * fill(0.2, a.shape)).sum() for a in state)

        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(arrays, start))

    for a, b in zip(gradients("xla"), gradients("reference"), strict=True):
        assert error(a, b) < 1e-12


def test_other_boundaries_do_not_compile_again():
    arrays = case(batch=1, seq=12)
    scan = jax.jit(lambda bounds: jax_ssd.mamba3(**arrays, cu_seqlens=bounds, chunk_size=4))
    for bounds in ([0, 3, 12], [0, 0, 12], [0, 11, 12]):
        expected, _ = oracle.packed(bounds, **wide(arrays))
        assert error(scan(jnp.array(bounds)), expected) < 2.2e-6
    assert scan._cache_size() == 1  # type: ignore[attr-defined]


BEYOND_INT32 = np.array([0, 5, 2**31 + 5, 19], np.uint32)


@pytest.mark.parametrize("bounds", [(0, 7, 12, 15), (2, 7, 12, 40), (0, 12, 7, 19), (5, -3, 30, 0), BEYOND_INT32])
def test_traced_boundaries_that_are_not_sound(bounds, mamba3):
    """Nobody can refuse them; they are cut to what a sound call may have."""
    arrays = case(batch=1, initial=True, sequences=3)
    sound = np.array([0, *np.maximum.accumulate(np.clip(bounds[1:-1], 0, 19)), 19])
    y, state = jax.jit(lambda b: mamba3(**arrays, cu_seqlens=b, return_final_state=True))(np.array(bounds))
    expected, expected_state = oracle.packed(sound, **wide(arrays))
    assert error(y, expected) < 1e-5
    assert state_error(state, expected_state) < 1e-5


def token(arrays: dict, t: int) -> dict:
    def squeezed(name, array):
        if array is None or name not in ("q", "k", "v", "z", "angles", "adt", "dt", "trap"):
            return array
        return array[:, :, t] if name in ("adt", "dt", "trap") else array[:, t]

    return {name: squeezed(name, array) for name, array in arrays.items()}


@pytest.mark.parametrize("sizes", [{}, {"rank": None, "norm": False}])
def test_steps_are_the_sequence_after_a_prefill(sizes, implementation):
    arrays = case(**sizes, seq=17, initial=True)
    options = {"implementation": implementation, "precision": "highest"}
    whole, end = jax_ssd.mamba3(**arrays, return_final_state=True, **options)
    first, state = jax_ssd.mamba3(**part(arrays, 0, 9), return_final_state=True, chunk_size=4, **options)
    moving = ("q", "k", "v", "z", "angles", "adt", "dt", "trap")
    tokens = [token(arrays, t) for t in range(9, 17)]
    stacked = {n: np.stack([t[n] for t in tokens]) for n in moving}
    fixed = {n: a for n, a in arrays.items() if n not in (*moving, "initial_state")}

    @jax.jit
    def decode(state, tokens):
        return jax.lax.scan(
            lambda state, t: jax_ssd.mamba3_step(state, **t, **fixed, implementation=implementation), state, tokens
        )

    last, y = decode(state, stacked)
    np.testing.assert_allclose(np.moveaxis(y, 0, 1), whole[:, 9:], rtol=2e-5, atol=3e-6)
    np.testing.assert_allclose(first, whole[:, :9], rtol=2e-5, atol=3e-6)
    assert state_error(last, end) < 3e-6


@pytest.mark.parametrize("sizes", [{}, {"rank": None}, {"fold": False}], ids=str)
def test_several_tokens_of_a_step_are_a_call_each(sizes, implementation):
    """Also with a key that is rounded from token to token. (To the bit but for what XLA makes of a loop.)"""
    arrays = case(**sizes, seq=5, initial=True)
    state = arrays.pop("initial_state")
    state = state._replace(k=jnp.asarray(state.k, jnp.bfloat16))
    last, y = jax_ssd.mamba3_step(state, **arrays, implementation=implementation)
    for t in range(5):
        state, one = jax_ssd.mamba3_step(state, **token(arrays, t), implementation=implementation)
        assert error(y[:, t], one) < 1e-6
    for a, b in zip(last, state, strict=True):
        assert a.dtype == b.dtype and error(a, b) < 1e-6


def test_no_token_leaves_the_state(implementation):
    arrays = case(seq=0, initial=True)
    state = arrays.pop("initial_state")
    last, y = jax_ssd.mamba3_step(state, **arrays, implementation=implementation)
    assert y.shape == (2, 0, 2, 4)
    jax.tree.map(np.testing.assert_array_equal, last, state)


def test_vmap_of_a_step_of_several_tokens(implementation):
    members = [case(seed, seq=3, initial=True) for seed in range(2)]
    step = functools.partial(jax_ssd.mamba3_step, implementation=implementation)
    names = ("k", "adt", "q_bias", "initial_state")
    stacked = {n: jax.tree.map(lambda *a: np.stack(a), *(m[n] for m in members)) for n in names}
    axes = {n: 0 if n in names else None for n in members[0]}

    def run(arrays):
        return step(arrays["initial_state"], **{n: a for n, a in arrays.items() if n != "initial_state"})

    found = jax.vmap(run, in_axes=(axes,))(members[0] | stacked)
    for i, member in enumerate(members):
        expected = run(members[0] | {n: member[n] for n in names})
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert error(a[i], b) < 1e-6


@pytest.mark.parametrize("seq", [1, 4])
def test_gradient_of_a_step(seq):
    arrays = case(seq=seq, initial=True)
    arrays["initial_state"] = jax.tree.map(jnp.asarray, arrays["initial_state"])

    def through_step(arrays):
        one = token(arrays, 0) if seq == 1 else dict(arrays)
        state, y = jax_ssd.mamba3_step(one.pop("initial_state"), **one)
        return (y**2).sum() + sum((a**2).sum() for a in state[1:])

    def through_scan(arrays):
        y, state = jax_ssd.mamba3(**arrays, return_final_state=True)
        return (y**2).sum() + sum((a**2).sum() for a in state[1:])

    found, expected = (jax.jit(jax.grad(f))(arrays) for f in (through_step, through_scan))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert error(a, b) < 1e-5


def test_half_is_permuted_pairwise(mamba3_everywhere):
    arrays = case(state=16, head_dim=8, pairs=3)
    order = np.arange(16).reshape(2, 8).T.ravel()
    permuted = {n: a[..., order] if n in ("q", "k", "q_bias", "k_bias") else a for n, a in arrays.items()}
    np.testing.assert_allclose(
        mamba3_everywhere(**arrays, rotary="half"), mamba3_everywhere(**permuted), rtol=1e-5, atol=2e-6
    )


def test_without_a_second_half_it_is_mamba2():
    arrays = case(rank=None, norm=False, pairs=0, groups=2, heads=4)
    arrays["trap"] = np.full_like(arrays["trap"], 200.0)  # lambda = 1
    arrays["q_bias"], arrays["k_bias"] = np.zeros_like(arrays["q_bias"]), np.zeros_like(arrays["k_bias"])
    # mamba2's decay is exp(A dt), so equal decays and step sizes need adt to be a multiple of dt.
    A = -np.arange(1, 5, dtype=np.float32)
    arrays["adt"] = A[:, None] * arrays["dt"]
    expected = jax_ssd.mamba2(
        *(arrays["v"], np.moveaxis(arrays["dt"], 1, 2), A, arrays["k"], arrays["q"], arrays["D"], arrays["z"]),
        implementation="reference",
    )
    np.testing.assert_allclose(jax_ssd.mamba3(**arrays), expected, rtol=1e-5, atol=2e-6)


def test_whole_turns_of_the_state_change_nothing(mamba3_everywhere):
    arrays = case(initial=True, **EIGHTS)
    turned = arrays["initial_state"]._replace(angle=(arrays["initial_state"].angle + 6 * np.pi).astype(np.float32))
    y = mamba3_everywhere(**{**arrays, "initial_state": turned})
    np.testing.assert_allclose(y, mamba3_everywhere(**arrays), rtol=1e-4, atol=3e-5)  # float32 of an angle near 20


def test_equal_ranks_are_one_rank(mamba3_everywhere):
    rank, arrays = 4, case(rank=1, norm=False, gate=False, **EIGHTS)
    many = {n: np.repeat(a, rank, 2) if n in ("q", "k") else a for n, a in arrays.items()}
    for n in ("q_bias", "k_bias", "mimo_v", "mimo_o"):
        many[n] = np.repeat(many[n], rank, 1) / (rank if n in ("mimo_v", "mimo_o") else 1)
    arrays["D"] = arrays["D"] / rank
    np.testing.assert_allclose(mamba3_everywhere(**many), mamba3_everywhere(**arrays), rtol=1e-5, atol=2e-6)


def test_the_first_token_has_no_decay_and_no_phase():
    gradients = loss_gradients(case(seq=40), "xla")
    np.testing.assert_array_equal(gradients["adt"][:, :, 0], 0)
    assert np.abs(gradients["angles"][:, 0]).max() < 1e-5 * np.abs(gradients["angles"]).max()


def test_a_turn_of_all_phases_changes_nothing(implementation):
    """So the angle of a state that is zero otherwise has no gradient: it is the sum of those of all phases."""
    arrays = case(initial=True)
    zeros = jax.tree.map(np.zeros_like, arrays["initial_state"])
    arrays["initial_state"] = zeros._replace(angle=arrays["initial_state"].angle)
    gradients = loss_gradients(arrays, implementation)
    each = np.abs(gradients["angles"]).max()
    assert np.abs(gradients["initial_state"].angle).max() < 1e-5 * each
    gradients = loss_gradients(case(initial=True), implementation)
    assert np.abs(gradients["initial_state"].angle).max() > 1e-2 * each


def test_no_tokens_pass_the_state_through(mamba3):
    arrays = case(seq=0, initial=True)
    y, state = mamba3(**arrays, return_final_state=True)
    assert y.shape == arrays["v"].shape
    assert state_error(state, arrays["initial_state"]) < 1e-6
    packed = case(batch=1, seq=0, initial=True, sequences=3)
    _, state = mamba3(**packed, cu_seqlens=np.zeros(4, np.int32), return_final_state=True)
    assert state_error(state, packed["initial_state"]) < 1e-6


# Types and extremes.


@pytest.mark.parametrize("dtype, bar", [("bfloat16", 5.1e-3), ("float16", 1e-3)])
def test_16_bit_values(dtype, bar, mamba3):
    arrays = case(seq=70, initial=True)
    low = {n: jnp.asarray(a, dtype) if n in ("q", "k", "v", "z") else a for n, a in arrays.items()}
    expected, expected_state = oracle.run(**wide(low))
    y, state = mamba3(**low, return_final_state=True)
    assert y.dtype == dtype
    assert error(y, expected) < bar
    # Neither angles nor steps nor weights are rounded with the values: the state is as exact as in float32.
    assert state_error(state, expected_state) < 2.2e-6
    assert [a.dtype.name for a in state] == ["float32"] * 4
    low.pop("initial_state")
    state = mamba3(**low, return_final_state=True)[1]
    assert [a.dtype.name for a in state] == ["float32", "float32", "float32", dtype]


def test_gradients_have_the_types_of_their_arguments():
    """All fifteen and the four of the state, each argument having a type of its own."""
    arrays: dict[str, Any] = case(initial=True)
    moving = ("q", "k", "v", "z")
    others = [n for n in arrays if n not in moving]
    types = dict.fromkeys(moving, "bfloat16") | dict(zip(others, ("float32", "bfloat16", "float16") * 5, strict=False))
    state = arrays["initial_state"]
    low: dict[str, Any] = {n: jnp.asarray(a, types[n]) for n, a in arrays.items() if n != "initial_state"}
    low["initial_state"] = Mamba3State(
        *(jnp.asarray(a, t) for a, t in zip(state, ("float32", "bfloat16", "float16", "bfloat16"), strict=True))
    )
    gradients = jax.eval_shape(lambda a: loss_gradients(a, "xla"), low)
    assert len(jax.tree.leaves(gradients)) == 19
    for (path, g), a in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(low), strict=True):
        assert (g.shape, g.dtype) == (a.shape, a.dtype), path


@pytest.mark.parametrize("adt", [-1e5, -80.0, 0.0])
def test_extreme_decays_have_finite_gradients(adt):
    arrays = case(seq=40)
    arrays["adt"] = np.full_like(arrays["adt"], adt)
    arrays["adt"][:, :, ::3] = -0.01
    expected, _ = oracle.run(**wide(arrays))
    assert error(jax_ssd.mamba3(**arrays, precision="highest"), expected) < 2.2e-6
    for gradient in jax.tree.leaves(loss_gradients(arrays, "xla")):
        assert np.isfinite(gradient).all()


def mixed_decays(shape: tuple[int, ...]) -> np.ndarray:
    """Decays of many sizes side by side."""
    return np.resize(np.array([-1, -10, -1e-3, -1e2, -1e-2, -1e3, -1e-4, -1e4, 0], np.float32), shape)


def test_decays_of_many_sizes_in_one_chunk_have_the_gradients_of_float64():
    arrays = case(seq=40, initial=True)
    arrays["adt"] = mixed_decays(arrays["adt"].shape)
    with jax.enable_x64(True):
        expected = loss_gradients(wide(arrays), "reference")
    found = loss_gradients(arrays, "xla")
    for (path, g), e in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert error(g, e) < 1e-5, (path, error(g, e))


@pytest.mark.parametrize("scale", [1e-2, 1e-4])
def test_the_norm_of_tiny_outputs(scale, mamba3_everywhere):
    """There norm_eps counts, inside the root and on the mean."""
    arrays = case(skip=False, **EIGHTS)
    arrays["v"] = arrays["v"] * np.float32(scale)
    expected, _ = oracle.run(**wide(arrays))
    plain, _ = oracle.run(**wide(arrays), norm_eps=1e-30)
    assert error(plain, expected) > 1e-3  # so that it is seen
    assert error(mamba3_everywhere(**arrays), expected) < 2.2e-6


def test_a_token_whose_own_weight_is_next_to_nothing(mamba3_everywhere):
    """As a difference of two weights it would be rounding, which the norm then blows up."""
    arrays = case(seq=40, skip=False, **EIGHTS)
    arrays["trap"] = np.where(np.arange(40) % 3 == 0, -14, arrays["trap"]).astype(np.float32)
    arrays["adt"] = np.where(np.arange(40) % 3 == 0, -30, arrays["adt"]).astype(np.float32)
    expected, _ = oracle.run(**wide(arrays))
    assert error(mamba3_everywhere(**arrays), expected) < 2.2e-6


@pytest.mark.parametrize("name", ["q", "k", "v", "z", "angles", "adt", "dt", "trap"])
def test_nan_stays_at_its_token_and_after(name, implementation):
    arrays = case(seq=12, norm=False)
    at = (0, 0, 5) if name in ("adt", "dt", "trap") else (0, 5)
    arrays[name][at] = np.nan
    y = np.isnan(nan_scan(implementation)(arrays)).any((2, 3))
    expected = np.zeros((2, 12), bool)
    expected[0, 5 : 6 if name in ("q", "z") else None] = True
    np.testing.assert_array_equal(y, expected)


@functools.cache
def nan_scan(implementation):
    return jax.jit(lambda arrays: jax_ssd.mamba3(**arrays, chunk_size=8, implementation=implementation))


# Transforms.


@pytest.mark.parametrize("lead", [(), (1,), (2, 2), (2, 1, 2), (0, 3)], ids=str)
def test_leading_axes_are_batch(lead, mamba3):
    arrays = case(batch=int(np.prod(lead)), seq=6, initial=True)
    rows = {"q", "k", "v", "z", "angles", "adt", "dt", "trap", "initial_state"}

    def shaped(a):
        return a.reshape(*lead, *a.shape[1:])

    stacked = {n: jax.tree.map(shaped, a) if n in rows else a for n, a in arrays.items()}
    y, state = mamba3(**stacked, return_final_state=True)
    expected, end = mamba3(**arrays, return_final_state=True)
    assert y.shape == stacked["v"].shape
    for a, b in zip((y, *state), (expected, *end), strict=True):
        np.testing.assert_array_equal(a, shaped(b))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("lead", [(), (2, 2), (0,)], ids=str)
def test_leading_axes_of_a_step(lead, several, implementation):
    one = case(batch=int(np.prod(lead)), seq=3, initial=True)
    one = one if several else token(one, 0)
    rows = {"q", "k", "v", "z", "angles", "adt", "dt", "trap", "initial_state"}

    def shaped(a):
        return a.reshape(*lead, *a.shape[1:])

    stacked = {n: jax.tree.map(shaped, a) if n in rows else a for n, a in one.items()}
    expected = jax_ssd.mamba3_step(one.pop("initial_state"), **one, implementation=implementation)
    found = jax_ssd.mamba3_step(stacked.pop("initial_state"), **stacked, implementation=implementation)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, shaped(b))


@pytest.mark.parametrize("mapped", ["parameters", "tokens"])
def test_vmap_is_a_loop(mapped):
    members = [case(seed, seq=9, heads=1) for seed in range(2)]
    names = ("q_bias", "mimo_o", "D", "norm_weight") if mapped == "parameters" else ("q", "k", "v", "adt", "z", "dt")
    stacked = {n: np.stack([m[n] for m in members]) for n in names}
    fixed = {n: a for n, a in members[0].items() if n not in names}

    def loss(mapped, fixed):
        return (jax_ssd.mamba3(**mapped, **fixed, chunk_size=4) ** 2).sum()

    function = jax.value_and_grad(loss, (0, 1))
    both, one = jax.jit(jax.vmap(function, (0, None)))(stacked, fixed), jax.jit(function)
    for i in range(2):
        alone = one({n: a[i] for n, a in stacked.items()}, fixed)
        for a, b in zip(jax.tree.leaves(both), jax.tree.leaves(alone), strict=True):
            assert error(a[i], b) < 1e-5


@pytest.mark.parametrize("groups", [2, 8])
def test_sharded_by_batch_and_heads(groups):
    arrays = case(batch=2, heads=8, groups=groups, seq=9)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    specs = {
        **dict.fromkeys(("v", "z", "angles"), spec("data", None, "model")),
        **dict.fromkeys(("adt", "dt", "trap"), spec("data", "model")),
        **dict.fromkeys(("q", "k"), spec("data")),
    }

    def loss(arrays):
        y = jax_ssd.mamba3(**arrays, chunk_size=4)
        return (y**2).sum(), y

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    expected, y_expected = gradient(arrays)
    placed = {
        n: jax.device_put(a, jax.sharding.NamedSharding(mesh, specs.get(n, spec("model")))) for n, a in arrays.items()
    }
    found, y = gradient(placed)
    assert error(y, y_expected) < 1e-6
    assert not y.sharding.is_fully_replicated
    for name, g in found.items():
        assert error(g, expected[name]) < 1e-5, name


def test_shard_map():
    arrays = case(seq=9)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = ("q", "k", "v", "z", "angles", "adt", "dt", "trap")
    specs = {n: jax.sharding.PartitionSpec(*(("data",) if n in rows else ())) for n in arrays}

    def gradient(arrays):
        return jax.grad(lambda arrays: (jax_ssd.mamba3(**arrays, chunk_size=4) ** 2).sum())(arrays)

    found = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(specs,), out_specs=specs))(arrays)
    for name, expected in jax.jit(gradient)(arrays).items():
        assert error(found[name], expected) < 1e-5, name


def test_reference_has_second_derivatives():
    arrays = case(batch=1, seq=4, rank=None, norm=False)

    def gradient(arrays, dt):
        def loss(dt):
            return (jax_ssd.mamba3(**{**arrays, "dt": dt}, implementation="reference") ** 2).sum()

        return jax.grad(loss)(dt)

    @jax.jit
    def second(arrays):
        return jax.jvp(lambda dt: gradient(arrays, dt), (arrays["dt"],), (jnp.ones_like(arrays["dt"]),))[1]

    found = second(arrays)  # in float32 the derivative of the phase is that of another sum
    with jax.enable_x64(True):
        exact: dict[str, Any] = {n: None if a is None else np.asarray(a, np.float64) for n, a in arrays.items()}
        expected = second(exact)
        up, down = (np.asarray(jax.jit(gradient)(exact, exact["dt"] + h)) for h in (1e-5, -1e-5))
    assert error(found, expected) < 1e-5
    assert error((up - down) / 2e-5, expected) < 1e-7


def test_forward_mode_is_refused_in_words():
    arrays = case(seq=4)
    dt = jnp.asarray(arrays["dt"])
    with pytest.raises(NotImplementedError, match="mamba3 has a reverse-mode derivative"):
        jax.jvp(lambda dt: jax_ssd.mamba3(**{**arrays, "dt": dt}), (dt,), (dt,))


@pytest.mark.parametrize("name, reason", [("cutile", "this op has no cuTile kernels"), ("cuda", "multiple of 8")])
def test_kernels_are_refused(name, reason):
    with pytest.raises(NotImplementedError, match=f"implementation '{name}': .*{reason}"):
        jax_ssd.mamba3(**case(), implementation=name)


def test_dispatch_paths_shows_it():
    (path,) = jax_ssd.dispatch_paths(lambda: jax_ssd.mamba3(**case()), platform="cuda")
    assert (path.op, path.implementation) == ("mamba3_forward", "xla")
    assert "this op has no cuTile kernels" in path.refusals["cutile"]


def test_no_rotated_pairs_are_a_call_like_others():
    arrays = case(rank=None, pairs=0, head_dim=16, state=16, initial=True)
    first = {name: array for name, array in token(arrays, 0).items() if name != "initial_state"}

    def call(implementation=None):
        return jax_ssd.mamba3(**arrays, return_final_state=True, implementation=implementation)

    def one(implementation=None):
        return jax_ssd.mamba3_step(arrays["initial_state"], **first, implementation=implementation)

    for run, op in ((call, "mamba3_forward"), (one, "mamba3_step")):
        with pytest.raises(NotImplementedError, match="at least one rotated pair, got none"):
            run("cuda")
        (path,) = jax_ssd.dispatch_paths(run, platform="cuda")
        assert (path.op, path.implementation) == (op, "xla")
        assert "at least one rotated pair, got none" in path.refusals["cuda"]
        assert jax.tree.all(jax.tree.map(lambda a: np.isfinite(a).all(), run()))


# The schedule.


@pytest.mark.parametrize("A_map", ["softplus", "heavy_tailed"])
def test_schedule(A_map):
    rng = np.random.default_rng(0)
    dd_dt, dd_A, trap = (rng.standard_normal((2, 5, 3)).astype(np.float32) * 3 for _ in range(3))
    angles, bias = rng.standard_normal((2, 5, 4)).astype(np.float32), np.linspace(-3, 1, 3, dtype=np.float32)
    dd_A[0, 0] = -2e4
    found = jax_ssd.mamba3_schedule(dd_dt, dd_A, trap, angles, bias, A_map=A_map)
    dt = np.log1p(np.exp(np.float64(dd_dt) + bias))
    x = np.float64(dd_A)
    act = np.logaddexp(0, x) if A_map == "softplus" else np.where(x >= 0, 1 + x, 1 / (1 + np.abs(x)))
    adt = np.minimum(-act, -1e-4) * dt
    np.testing.assert_allclose(found.dt, np.moveaxis(dt, 1, 2), rtol=1e-6)
    np.testing.assert_allclose(found.adt, np.moveaxis(adt, 1, 2), rtol=2e-6)
    np.testing.assert_array_equal(found.trap, np.moveaxis(trap, 1, 2))
    np.testing.assert_array_equal(found.angles, np.repeat(angles[:, :, None], 3, 2))
    slope = jax.grad(lambda a: jax_ssd.mamba3_schedule(dd_dt, a, trap, angles, bias, A_map=A_map).adt.sum())(dd_A)
    assert np.isfinite(slope).all()


def test_a_schedule_whose_heads_have_angles_of_their_own():
    rng = np.random.default_rng(0)
    low = jnp.bfloat16
    dd_dt, dd_A, trap = (jnp.asarray(rng.standard_normal((5, 3)), low) for _ in range(3))
    angles, bias = jnp.asarray(rng.standard_normal((5, 3, 4)), low), np.linspace(-3, 1, 3, dtype=np.float32)
    found = jax_ssd.mamba3_schedule(dd_dt, dd_A, trap, angles, bias)
    assert {a.dtype.name for a in found} == {"float32"}
    np.testing.assert_array_equal(found.angles, np.asarray(angles, np.float32))
    # Sums and exponentials in float32 however the projections are stored.
    np.testing.assert_allclose(found.dt, np.log1p(np.exp(np.asarray(dd_dt, np.float64) + bias)).T, rtol=1e-6)


# What is wrong with a call is said in words.


def without(arrays, name):
    return {**arrays, name: None}


BAD: dict[str, dict[str, Any]] = {
    "q: expected an even state size, as coordinates rotate in pairs, got 7": {"state": 7},
    "angles: expected at most state / 2 = 4 rotated pairs, got 5": {"pairs": 5},
    "q: expected a rank from 1 to 8, got 9": {"rank": 9},
    "q: expected a number of groups that divides the 2 heads of v, got 3 groups": {"groups": 3},
}


@pytest.mark.parametrize("words", BAD)
def test_sizes_out_of_range(words):
    with pytest.raises(ValueError) as caught:
        jax_ssd.mamba3(**case(**BAD[words]))
    assert words in str(caught.value)


CHANGES = {
    "adt: expected the log of a decay, at most 0, got values up to 0.5": {"adt": np.full((2, 2, 19), 0.5, np.float32)},
    "adt: expected shape (..., heads, seq) = (2, 2, 19), got (2, 19, 2)": {"adt": np.zeros((2, 19, 2), np.float32)},
    "rotary: expected one of ('pairwise', 'half'), got 'interleaved'": {"rotary": "interleaved"},
    "norm_eps: expected a finite number of at least 0, got -1.0": {"norm_eps": -1.0},
    "mimo_z: expected an array beside z and mimo_v, got None": {"mimo_z": None},
    "mimo_z: expected None without z": {"z": None},
    "q: expected 4 axes (..., seq, groups, state)": {"mimo_v": None},
    "q_bias: expected shape (heads, rank, state) = (2, 2, 8)": {"q_bias": np.zeros((2, 8), np.float32)},
    "norm_weight: expected shape (heads * head_dim) = (8,)": {"norm_weight": np.zeros(4, np.float32)},
    "cu_seqlens: expected shape (..., sequences + 1)": {"cu_seqlens": np.array(3)},
    "initial_state.ssm: expected shape (..., heads, head_dim, state)": {
        "initial_state": (np.zeros((2, 2, 2), np.float32), *(np.zeros(3, np.float32),) * 3)
    },
}


@pytest.mark.parametrize("words", CHANGES)
def test_slips_are_named(words):
    with pytest.raises(ValueError) as caught:
        jax_ssd.mamba3(**{**case(), **CHANGES[words]})
    assert words in str(caught.value)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "uint32"])
@pytest.mark.parametrize("bounds", [[0, 5], [1, 19], [0, 12, 7, 19]])
def test_boundaries_must_cover_the_tokens(bounds, dtype):
    with pytest.raises(ValueError, match="cu_seqlens: expected values from 0 to seq = 19 that never decrease"):
        jax_ssd.mamba3(**case(batch=1), cu_seqlens=np.array(bounds, dtype))


def test_types_are_named():
    arrays = case()
    with pytest.raises(TypeError, match="k: expected float32 .the type of q., got bfloat16"):
        jax_ssd.mamba3(**{**arrays, "k": jnp.asarray(arrays["k"], jnp.bfloat16)})
    with pytest.raises(TypeError, match="q: expected an array, got NoneType"):
        jax_ssd.mamba3(**without(arrays, "q"))
    with pytest.raises(TypeError, match="cu_seqlens: expected an integer type"):
        jax_ssd.mamba3(**arrays, cu_seqlens=np.zeros(2, np.float32))
    with pytest.raises(TypeError, match="state: expected a Mamba3State of four arrays"):
        jax_ssd.mamba3_step(None, **token(arrays, 0))  # type: ignore[arg-type]
