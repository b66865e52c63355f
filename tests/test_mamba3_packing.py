"""Packed sequences of Mamba-3: segment ids with padding anywhere, boundaries for each of several rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ssd
from jax_ssd import Mamba3State
from jax_ssd.mamba3 import cases, phase
from tests import mamba3_float64 as oracle
from tests.test_mamba3 import case, error, fill, part, state_error, wide
from tests.test_mamba3_transforms import SPECS
from tests.test_sharding import assert_close as assert_same
from tests.test_sharding import compiled, mesh, moved, place
from tests.test_transforms import launches, lowered, without_compiling

__all__ = ["without_compiling"]  # a fixture

IMPLEMENTATIONS = ["reference", "xla"]
TOKENS = ("q", "k", "v", "z", "angles", "adt", "dt", "trap")
# Padding in front, inside of a segment, between two, behind; labels that come back; a row without padding.
IDS = np.array([[-1, -1, 5, 5, -1, -3, 5, 2, 2, -1, -1, 7, 7, 7, 5, -1, 5, -1, -1], [1] * 6 + [2] + [3] * 12])


def row(arrays: dict, b: int) -> dict:
    """One row of a call, its axis kept."""
    one: dict[str, Any] = {n: a[b : b + 1] if n in TOKENS and a is not None else a for n, a in arrays.items()}
    if one.get("initial_state") is not None:
        one["initial_state"] = Mamba3State(*(a[b : b + 1] for a in one["initial_state"]))
    return one


def real_tokens(arrays: dict, ids) -> dict:
    """One row's call without its padding."""
    real = np.flatnonzero(ids >= 0)
    axes = {n: 2 if n in ("adt", "dt", "trap") else 1 for n in TOKENS}
    return {n: a.take(real, axes[n]) if n in TOKENS and a is not None else a for n, a in arrays.items()}


def apart(run, arrays: dict, ids):
    """y of each segment of one row run alone, zero at padding, and the state of the last."""
    arrays, labels = real_tokens(arrays, ids), ids[ids >= 0]
    cuts = [0, *(np.flatnonzero(np.diff(labels)) + 1), len(labels)]
    results = []
    for low, high in zip(cuts[:-1], cuts[1:], strict=True):
        own = part(arrays, low, high)
        results.append(run(**(own if low == 0 else {n: a for n, a in own.items() if n != "initial_state"})))
    y = jnp.concatenate([y for y, _ in results], axis=1)
    return jnp.zeros((1, len(ids), *y.shape[2:]), y.dtype).at[:, np.flatnonzero(ids >= 0)].set(y), results[-1][1]


def turned(state, angle, rotary) -> Mamba3State:
    """The same state, its angle counted from elsewhere."""
    by = jnp.asarray(angle) - jnp.asarray(state[0])
    k_by = by if state[2].ndim == 3 else by[..., None, :]
    ssm, k = phase.rotate(state[1], by[..., None, :], rotary), phase.rotate(state[2], k_by, rotary)
    return Mamba3State(angle, ssm, k, state[3])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rank, rotary, initial", [(2, "pairwise", True), (None, "half", False), (2, "half", True)])
def test_segments_are_separate_sequences(rank, rotary, initial, implementation):
    arrays = case(rank=rank, initial=initial)
    y, state = jax_ssd.mamba3(
        **arrays,
        segment_ids=IDS,
        rotary=rotary,
        return_final_state=True,
        chunk_size=5,
        precision="highest",
        implementation=implementation,
    )
    for b, ids in enumerate(IDS):
        expected, last = apart(lambda **given: oracle.run(**wide(given), rotary=rotary), row(arrays, b), ids)
        assert error(y[b : b + 1], expected) < 2.2e-6
        own = Mamba3State(*(a[b : b + 1] for a in state))
        assert state_error(turned(own, last[0], rotary), last) < 2.2e-6


@pytest.mark.parametrize(
    "rank, implementation",
    [(2, "xla"), *(pytest.param(*one, marks=pytest.mark.slow) for one in [(None, "xla"), (2, "reference")])],
)
def test_gradients_of_segments_are_those_of_separate_sequences(rank, implementation, x64):
    """Of y, and of what the next token makes of the final state."""
    arrays = wide(case(rank=rank, initial=True))
    following = {n: a for n, a in wide(case(3, rank=rank, seq=1)).items() if n in TOKENS}
    following = {n: a[:, :, 0] if n in ("adt", "dt", "trap") else a[:, 0] for n, a in following.items()}
    absent: dict[str, Any] = {} if rank else {"mimo_v": None, "mimo_o": None}

    def loss(run, arrays):
        y, state = run(arrays)
        fixed = {n: a for n, a in arrays.items() if n not in (*TOKENS, "initial_state")}
        _, last = jax_ssd.mamba3_step(state, **absent, **fixed, **following, implementation="reference")
        return jnp.sin(y * fill(1.6, y.shape)).sum() + jnp.sin(3 * last).sum()

    def together(arrays):
        return jax_ssd.mamba3(
            **absent,
            **arrays,
            segment_ids=IDS,
            return_final_state=True,
            chunk_size=5,
            implementation=implementation,
        )

    def separately(arrays):
        alone = functools.partial(
            jax_ssd.mamba3, **absent, return_final_state=True, chunk_size=64, implementation="xla"
        )
        rows = [apart(alone, row(arrays, b), ids) for b, ids in enumerate(IDS)]
        return jax.tree.map(lambda *a: jnp.concatenate(a), *rows)

    found, expected = (jax.jit(jax.grad(functools.partial(loss, f)))(arrays) for f in (together, separately))
    for (path, g), e in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert error(g, e) < 1e-11, path


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_is_not_read(implementation):
    arrays = {n: a for n, a in case(initial=True).items() if a is not None}
    padding = IDS < 0

    def spoiled(name, array):
        where = padding[:, None] if name in ("adt", "dt", "trap") else padding[..., *[None] * (array.ndim - 2)]
        return np.where(where, np.float32(np.nan), array)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(arrays):
        y, state = jax_ssd.mamba3(
            **arrays, segment_ids=IDS, return_final_state=True, chunk_size=5, implementation=implementation
        )
        return (y**2).sum() + sum((a**2).sum() for a in state), (y, state)

    clean, spoilt = run(arrays), run({n: spoiled(n, a) if n in TOKENS else a for n, a in arrays.items()})
    jax.tree.map(np.testing.assert_array_equal, spoilt, clean)
    (_, (y, _)), gradients = clean
    assert (y[padding] == 0).all()
    for name in TOKENS:
        gradient = np.moveaxis(gradients[name], 2, 1) if name in ("adt", "dt", "trap") else np.asarray(gradients[name])
        assert (gradient[padding] == 0).all() and (np.abs(gradient[~padding]) > 0).any(), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("seq", [0, 5])
def test_a_row_of_padding_passes_its_state_through(seq, implementation):
    arrays = case(seq=seq, initial=True)
    arrays |= {n: np.full_like(arrays[n], np.nan) for n in TOKENS if arrays[n] is not None}

    def run(start):
        y, state = jax_ssd.mamba3(
            **arrays | {"initial_state": start},
            segment_ids=np.full((2, seq), -1),
            return_final_state=True,
            implementation=implementation,
        )
        return sum((a**2).sum() for a in state), (y, state)

    start = arrays["initial_state"]
    (_, (y, state)), gradients = jax.value_and_grad(run, has_aux=True)(jax.tree.map(jnp.asarray, start))
    assert not y.any()
    assert state_error(state, start) < 3e-7
    assert state_error(gradients, jax.tree.map(lambda a: 2 * a, state)) < 3e-7


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_has_no_norm_and_no_sign(implementation):
    """Its output is zero, which cannot be normalized without an eps; its decay may be of any sign."""
    arrays = {n: a for n, a in case().items() if a is not None}
    arrays["adt"] = np.where(IDS[:, None] < 0, 3.0, arrays["adt"]).astype(np.float32)

    def run(arrays):
        y = jax_ssd.mamba3(**arrays, segment_ids=IDS, norm_eps=0.0, chunk_size=5, implementation=implementation)
        return (y**2).sum()

    assert np.isfinite(run(arrays))
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(jax.grad(run)(arrays)))


@pytest.mark.parametrize("axis", [None, 0])
def test_other_segments_do_not_compile_again(axis):
    """Of one call for all rows, and of one for each under vmap."""
    arrays = case(rank=None, initial=True)

    def one(arrays, ids):
        return jax_ssd.mamba3(**arrays, segment_ids=ids, chunk_size=5, precision="highest")

    in_axes = {n: 0 if n in (*TOKENS, "initial_state") else None for n in arrays}
    scan = jax.jit(one if axis is None else jax.vmap(one, (in_axes, 0)))
    for ids in (IDS, IDS[::-1].copy(), np.zeros_like(IDS), np.arange(38).reshape(2, 19)):
        y = scan(arrays, ids)
        for b in range(2):
            assert error(y[b : b + 1], apart(lambda **a: oracle.run(**wide(a)), row(arrays, b), ids[b])[0]) < 2.2e-6
    assert scan._cache_size() == 1  # type: ignore[attr-defined]


SMALL: dict[str, Any] = {"heads": 2, "groups": 1, "seq": 20, "chunk_size": 8, "state": 16, "dtype": "bfloat16"}


@pytest.mark.parametrize("packing", ["segment_ids", "cu_seqlens"])
def test_one_custom_call_under_vmap(packing, without_compiling):
    case = cases.Case("", **SMALL)
    packed = {"segment_ids": np.zeros((3, 2, 20), np.int32), "cu_seqlens": np.tile(np.array([0, 7, 20]), (3, 2, 1))}
    given = {n: a for n, a in case.inputs().items() if not n.startswith("initial_")}

    def total(given, value):
        own = {"mimo_v": None, "mimo_o": None, **given, packing: value}
        return (jax_ssd.mamba3(**own, chunk_size=8).astype("float32") ** 2).sum()

    text = lowered(jax.vmap(jax.value_and_grad(total), in_axes=(None, 0)), given, packed[packing])
    assert launches(text) == ["mamba3_forward", "mamba3_backward"]
    assert "stablehlo.while" not in text


def test_without_padding_nothing_but_the_decay_is_touched(without_compiling):
    """An unsigned id is not negative, which is known without looking at it."""
    case = cases.Case("", **{**SMALL, "dtype": "float32"})
    given = case.inputs()

    def grown(ids):
        function = jax.value_and_grad(lambda given, ids: (case.scan({**given, "segment_ids": ids})["y"] ** 2).sum())
        plain = lowered(jax.value_and_grad(lambda given: (case.scan(given)["y"] ** 2).sum()), given)
        wide = "x20x2x16xf32>"  # of v, z and y
        texts = (lowered(function, given, ids), plain)
        found, before = (sum(wide in line for line in t.splitlines() if "stablehlo.select" in line) for t in texts)
        return found - before

    ids = np.where(IDS < 0, 0, IDS)[:, [*range(19), 0]]
    assert grown(ids.astype(np.uint8)) == 0 < grown(ids)
    y, padded = (case.scan({**given, "segment_ids": i}) for i in (ids.astype(np.uint8), ids))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), y, padded)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
@pytest.mark.parametrize("packing", ["segment_ids", pytest.param("cu_seqlens", marks=pytest.mark.slow)])
def test_shards_move_no_activation(packing):
    """On a mesh of 2 x 4, rows and heads cut."""
    case = cases.Case("", batch=2, seq=12, heads=8, head_dim=4, groups=8, state=8, rank=2, pairs=2, chunk_size=4)
    packed = {"segment_ids": np.array([[1] * 5 + [-1] + [2] * 6, [3] * 12]), "cu_seqlens": np.array([[0, 5, 12]] * 2)}
    given = case.inputs()
    if packing == "cu_seqlens":
        given |= {n: jnp.stack([a, 2 * a], 1) for n, a in given.items() if n.startswith("initial_")}

    def spec(name):
        if name in ("q", "k"):
            return P("data", None, None, "model", None)
        axes = SPECS[name][: given[name].ndim]
        return P("data", None, *axes[1:]) if packing == "cu_seqlens" and name.startswith("initial_") else P(*axes)

    def loss(given, value):
        return sum((a**2).sum() for a in case.scan({**given, packing: value}).values())

    function = jax.value_and_grad(loss)
    want = jax.tree.map(np.asarray, compiled(function, given, packed[packing])(given, packed[packing]))
    specs = {name: spec(name) for name in given}
    placed = place(given, specs)
    value = jax.device_put(packed[packing], NamedSharding(mesh(), P("data", None)))
    outs = (NamedSharding(mesh(), P()), {name: NamedSharding(mesh(), specs[name]) for name in given})
    program = compiled(function, placed, value, out_shardings=outs)
    collectives = moved(program)
    assert set(collectives) == {"all-reduce"}, collectives
    assert max(collectives["all-reduce"]) <= case.heads * case.rank * case.state, collectives  # of parameters
    assert_same(program(placed, value), want)


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices")
@pytest.mark.parametrize("how", ["explicit", "shard_map"])
def test_on_manual_and_on_explicit_axes(how):
    case = cases.Case("", batch=2, seq=8, heads=4, head_dim=4, groups=4, state=8, rank=2, pairs=2, chunk_size=4)
    given, ids = case.inputs(), jnp.array([[1] * 3 + [-1] + [2] * 4, [3] * 7 + [-1]])

    def loss(given, ids):
        return sum((a**2).sum() for a in case.scan({**given, "segment_ids": ids}).values())

    def spec(name):
        if name in ("q", "k"):
            return P("data", None, None, "model")
        return P(*SPECS[name][: given[name].ndim])

    want = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(given, ids))
    specs, kind = {name: spec(name) for name in given}, AxisType.Explicit if how == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in given.items()}
        labels = jax.device_put(ids, NamedSharding(mesh, P("data")))
        function = loss
        if how == "shard_map":
            function = jax.shard_map(
                lambda given, ids: jax.lax.psum(loss(given, ids), ("data", "model")),
                in_specs=(specs, P("data")),
                out_specs=P(),
            )
        got = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(function))(placed, labels))
    assert_same(got, want)


# Boundaries for each row.

BOUNDS = np.array([[0, 0, 7, 7, 19], [0, 5, 6, 19, 19]])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("lead", [(2,), (2, 1), ()])
def test_boundaries_have_the_leading_axes_of_v(lead, implementation):
    rows = 2 if lead else 1
    arrays = case(batch=rows)
    start = case(initial=True, batch=1, sequences=4 * rows)["initial_state"]
    start = Mamba3State(*(a.reshape(rows, 4, *a.shape[1:]) for a in start))

    def led(array):
        return array.reshape(*lead, *array.shape[1:])

    given: dict[str, Any] = {n: led(a) if n in TOKENS and a is not None else a for n, a in arrays.items()}
    y, state = jax_ssd.mamba3(
        **given,
        cu_seqlens=led(BOUNDS[:rows]),
        initial_state=Mamba3State(*map(led, start)),
        return_final_state=True,
        chunk_size=5,
        precision="highest",
        implementation=implementation,
    )
    for b, bounds in enumerate(BOUNDS[:rows]):
        one = row(arrays, b) | {"initial_state": Mamba3State(*(a[b] for a in start))}
        expected, last = oracle.packed(bounds, **wide(one))
        assert error(y.reshape(-1, *y.shape[-3:])[b : b + 1], expected) < 2.2e-6
        own = (a.reshape(-1, *a.shape[len(lead) :])[b] for a in state)
        assert state_error(tuple(own), last) < 2.2e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_traced_boundaries_of_rows_that_are_not_sound(implementation):
    arrays = case()
    scan = jax.jit(
        lambda bounds: jax_ssd.mamba3(**arrays, cu_seqlens=bounds, chunk_size=5, implementation=implementation)
    )
    sound = np.array([[0, 7, 12, 19], [0, 19, 19, 19]])
    np.testing.assert_array_equal(scan(np.array([[0, 7, 12, 15], [5, 30, -3, 0]])), scan(sound))
    assert scan._cache_size() == 1  # type: ignore[attr-defined]


SLIPS: dict[str, dict[str, Any]] = {
    "cu_seqlens: expected the leading axes (2,) of v and then sequences + 1, got shape (2,)": {"cu_seqlens": [0, 19]},
    "cu_seqlens: expected the leading axes (2,) of v and then sequences + 1, got shape (1, 2)": {
        "cu_seqlens": [[0, 19]]
    },
    "cu_seqlens: expected shape (..., sequences + 1) with at least one sequence, got (2, 1)": {
        "cu_seqlens": [[0], [0]]
    },
    "cu_seqlens: expected values from 0 to seq = 19": {"cu_seqlens": [[0, 3, 19], [0, 20, 19]]},
    "segment_ids: expected shape (..., seq) = (2, 19), got (19,)": {"segment_ids": IDS[0]},
    "segment_ids: expected None beside cu_seqlens": {"segment_ids": IDS, "cu_seqlens": BOUNDS},
}


@pytest.mark.parametrize("words", SLIPS)
def test_slips_are_named(words):
    packing: Any = {name: np.array(value) for name, value in SLIPS[words].items()}
    with pytest.raises(ValueError) as caught:
        jax_ssd.mamba3(**case(), **packing)
    assert words in str(caught.value)


def test_labels_are_integers():
    with pytest.raises(TypeError, match="segment_ids: expected an integer type, got float32"):
        jax_ssd.mamba3(**case(), segment_ids=IDS.astype(np.float32))
