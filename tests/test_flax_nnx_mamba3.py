"""The Mamba-3 layer: the block's definition, hand-over, steps, packing, initialisation, types, sharding."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ssd.flax.nnx import Mamba3, Mamba3State
from tests import mamba3_float64 as oracle

FEATURES = 16
SIZES: dict[str, Any] = {"state_dim": 8, "head_dim": 8, "num_groups": 2, "chunk_size": 4, "implementation": "xla"}
EVERY: dict[str, Any] = {"use_norm": True, "rope_fraction": 1.0, "A_map": "heavy_tailed", "rotary": "pairwise"}
VARIANTS: dict[str, dict[str, Any]] = {
    "siso": {},
    "mimo": {"mimo_rank": 2},
    "mimo, every option": {"mimo_rank": 3, "num_groups": 1, **EVERY},
    "siso, normalised, half": {"use_norm": True, "rotary": "half", "num_groups": 4},
    "no rotation": {"mimo_rank": 1, "rope_fraction": 0.1, "A_floor": 0.5},
}


def build(**changes) -> Mamba3:
    """A layer whose parameters are not those of the start, where many of them are ones."""
    layer = Mamba3(FEATURES, **{**SIZES, "precision": "highest", **changes}, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [a + 0.2 * jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)]
    return nnx.merge(graphdef, treedef.unflatten(moved))


def make(seed: int, *shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@partial(jax.jit, static_argnums=0)
def _run(graphdef, params, x, cu_seqlens, carry):
    return nnx.merge(graphdef, params)(x, cu_seqlens=cu_seqlens, initial_carry=carry, return_carry=True)


def run(layer: Mamba3, x, cu_seqlens=None, carry=None):
    return _run(*nnx.split(layer), x, cu_seqlens, carry)


@jax.jit
def filled(carry: Mamba3State) -> Mamba3State:
    return Mamba3State(*(jax.random.normal(jax.random.key(i), a.shape, a.dtype) for i, a in enumerate(carry)))


def assert_close(got, want, tolerance=2e-5):
    """Float32 sums of a few dozen terms of size one, in another order."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)


def assert_same_state(got: Mamba3State, want: Mamba3State):
    turns = (np.asarray(got.angle) - np.asarray(want.angle)) / (2 * np.pi)
    np.testing.assert_allclose(turns, np.round(turns), atol=1e-5)
    assert_close(got[1:], want[1:], 5e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_block_in_numpy(variant):
    """The block as its definition has it, in float64."""
    layer, x = build(**VARIANTS[variant]), make(0, 2, 7, FEATURES)
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(layer)))
    batch, seq, ranks = 2, 7, () if layer.mimo_rank is None else (layer.mimo_rank,)
    roles = ("z", "x", "B", "C", "dt", "A", "trap", "angle")
    projected = {role: np.asarray(x, np.float64) @ p[f"{role}_proj"]["kernel"] for role in roles}

    def normalised(name):
        a = projected[name].reshape(batch, seq, *ranks, layer.num_groups, layer.state_dim)
        return a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-5) * p[f"{name}_norm"]["scale"]

    dt = np.log1p(np.exp(projected["dt"] + p["dt_bias"]))
    raw = projected["A"]
    act = np.log1p(np.exp(raw))
    if layer.A_map == "heavy_tailed":
        act = np.where(raw >= 0, 1 + raw, 1 / (1 - np.minimum(raw, 0)))
    adt = np.minimum(-act, -layer.A_floor) * dt
    per_head = (batch, seq, layer.heads, layer.head_dim)
    weights: dict[str, Any] = {"mimo_z": np.ones((layer.heads, 1, layer.head_dim))}
    if layer.mimo_rank is not None:
        weights = {"mimo_v": p["mimo_x"], "mimo_o": p["mimo_o"], "mimo_z": p["mimo_z"]}
    y, state = oracle.run(
        q=normalised("C"),
        k=normalised("B"),
        v=projected["x"].reshape(per_head),
        q_bias=p["C_bias"],
        k_bias=p["B_bias"],
        angles=np.repeat(projected["angle"][:, :, None], layer.heads, 2),
        adt=np.swapaxes(adt, 1, 2),
        dt=np.swapaxes(dt, 1, 2),
        trap=np.swapaxes(projected["trap"], 1, 2),
        z=projected["z"].reshape(per_head),
        D=p["D"],
        norm_weight=p["norm"]["scale"] if layer.norm is not None else None,
        rotary=layer.rotary,
        **weights,
    )
    want = y.reshape(batch, seq, -1) @ p["out_proj"]["kernel"]
    got, carry = run(layer, x)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(carry.ssm, state[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_pieces_and_steps_equal_the_whole(variant):
    layer = build(**VARIANTS[variant])
    x, start = make(0, 2, 14, FEATURES), filled(layer.initialize_carry((2, FEATURES)))
    want, final = run(layer, x, carry=start)
    assert want.shape == x.shape

    first, middle = run(layer, x[:, :7], carry=start)
    second, last = run(layer, x[:, 7:], carry=middle)
    assert_close(jnp.concatenate([first, second], axis=1), want)
    assert_same_state(last, final)

    graphdef, params = nnx.split(layer)
    decode = jax.jit(lambda params, carry, x: jax.lax.scan(nnx.merge(graphdef, params).step, carry, x))
    last, y = decode(params, middle, jnp.moveaxis(x[:, 7:], 1, 0))
    assert_close(jnp.moveaxis(y, 0, 1), want[:, 7:])
    assert_same_state(last, final)


def test_packed_sequences_equal_separate_runs():
    layer = build(mimo_rank=2)
    x, bounds = make(0, 1, 12, FEATURES), [0, 3, 3, 12]
    starts = filled(layer.initialize_carry((3, FEATURES)))
    got, carry = run(layer, x, jnp.asarray(bounds), starts)
    for j, (low, high) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        own = Mamba3State(*(a[j : j + 1] for a in starts))
        y, last = run(layer, x[:, low:high], carry=own)
        assert_close(got[:, low:high], y)
        assert_same_state(Mamba3State(*(a[j : j + 1] for a in carry)), last)


@pytest.mark.parametrize("variant", ["siso", pytest.param("mimo, every option", marks=pytest.mark.slow)])
def test_segments_equal_separate_runs(variant):
    """Of rows with padding anywhere, whose content is not seen; the carry goes on from the last segment."""
    layer = build(**VARIANTS[variant])
    x, start = make(0, 2, 13, FEATURES), filled(layer.initialize_carry((2, FEATURES)))
    ids = np.array([[-1, 4, 4, -1, 4, 2, 2, -1, 2, 7, 7, 7, -1], [0] * 3 + [1] * 3 + [5] * 3 + [8] * 3 + [-1]])
    x = jnp.where((ids >= 0)[..., None], x, jnp.nan)
    graphdef, params = nnx.split(layer)

    @partial(jax.jit, static_argnums=2)
    def packed(params, x, segmented, start):
        def loss(params):
            options: dict[str, Any] = {"segment_ids": ids} if segmented else {}
            y, carry = nnx.merge(graphdef, params)(x, **options, initial_carry=start, return_carry=True)
            return (y**2).sum(), (y, carry)

        return jax.grad(loss, has_aux=True)(params)

    gradients, (y, carry) = packed(params, x, True, start)
    assert (y[ids < 0] == 0).all()
    following, total = make(1, 2, 3, FEATURES), jax.tree.map(jnp.zeros_like, params)
    after = run(layer, following, carry=carry)[0]
    for b, row in enumerate(ids):
        own = Mamba3State(*(a[b : b + 1] for a in start))
        for label in dict.fromkeys(row[row >= 0]):
            gradient, (alone, last) = packed(params, x[b : b + 1, row == label], False, own)
            assert_close(y[b, row == label], alone[0])
            total, own = jax.tree.map(jnp.add, total, gradient), None
        assert_close(after[b], run(layer, following[b : b + 1], carry=last)[0][0], 5e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-4, atol=5e-4 * np.abs(b).max())


@pytest.mark.parametrize("variant", ["siso", "mimo, every option"])
def test_gradient_through_steps_equals_gradient_through_the_sequence(variant):
    layer = build(**VARIANTS[variant])
    graphdef, params = nnx.split(layer)
    x = make(0, 2, 7, FEATURES)

    def sequence(params):
        return (nnx.merge(graphdef, params)(x) ** 2).sum()

    def steps(params):
        layer = nnx.merge(graphdef, params)
        _, y = jax.lax.scan(layer.step, layer.initialize_carry((2, FEATURES)), jnp.moveaxis(x, 1, 0))
        return (y**2).sum()

    got, want = jax.jit(jax.grad(steps))(params), jax.jit(jax.grad(sequence))(params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(a).all() and np.abs(a).max() > 0
        np.testing.assert_allclose(a, b, rtol=5e-4, atol=5e-4 * np.abs(b).max())


def test_vmap_over_rows_and_over_parameters():
    layer = build(mimo_rank=2)
    graphdef, params = nnx.split(layer)
    x = make(0, 2, 9, FEATURES)
    want = run(layer, x)[0]

    def one(params, x):
        return nnx.merge(graphdef, params)(x)

    assert_close(jax.jit(jax.vmap(one, (None, 0)))(params, x), want)
    pair = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), params)
    other = run(nnx.merge(graphdef, jax.tree.map(lambda a: 2 * a, params)), x)[0]
    assert_close(jax.jit(jax.vmap(one, (0, None)))(pair, x), jnp.stack([want, other]), 5e-5)


def test_initialisation():
    layer = Mamba3(64, state_dim=16, head_dim=2, mimo_rank=4, use_norm=True, rngs=nnx.Rngs(3))
    dt = np.log1p(np.exp(np.asarray(layer.dt_bias[...], np.float64)))
    assert (dt > 0.99e-3).all() and (dt < 1.01e-1).all() and np.log10(dt).std() > 0.3
    assert layer.mimo_x is not None and layer.mimo_z is not None and layer.mimo_o is not None and layer.norm is not None
    ones = (layer.D, layer.B_bias, layer.C_bias, layer.mimo_z, layer.norm.scale, layer.B_norm.scale, layer.C_norm.scale)
    shapes = [(64,), (64, 4, 16), (64, 4, 16), (64, 4, 2), (128,), (16,), (16,)]
    for parameter, shape in zip(ones, shapes, strict=True):
        assert parameter[...].shape == shape and (np.asarray(parameter[...]) == 1).all()
    assert (np.asarray(layer.mimo_x[...]) == 0.25).all() and (np.asarray(layer.mimo_o[...]) == 0.25).all()
    widths = {"z": 128, "x": 128, "B": 64, "C": 64, "dt": 64, "A": 64, "trap": 64, "angle": 4}
    for name, width in widths.items():
        kernel = np.asarray(getattr(layer, f"{name}_proj").kernel[...])
        assert kernel.shape == (64, width) and 0.8 / 8 < np.abs(kernel).max() <= 1 / 8
    out = np.asarray(layer.out_proj.kernel[...])
    assert out.shape == (128, 64) and 0.8 * 128**-0.5 < np.abs(out).max() <= 128**-0.5
    assert layer.rotary == "half" and Mamba3(16, state_dim=8, head_dim=8, rngs=nnx.Rngs(0)).rotary == "pairwise"


def test_floor_of_dt():
    layer = Mamba3(FEATURES, **SIZES, dt_init=(1e-9, 1e-8, 1e-4), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(np.log1p(np.exp(np.asarray(layer.dt_bias[...], np.float64))), 1e-4, rtol=1e-3)


@pytest.mark.parametrize("rank", [None, 2])
def test_a_bfloat16_layer(rank):
    half: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    layer = Mamba3(FEATURES, **SIZES, **half, mimo_rank=rank, use_norm=True, key_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    kept = {n: a.dtype for n, a in nnx.to_pure_dict(nnx.state(layer)).items() if not isinstance(a, dict)}
    assert kept and set(kept.values()) == {jnp.dtype("float32")}
    assert layer.x_proj.kernel[...].dtype == layer.dt_proj.kernel[...].dtype == jnp.bfloat16
    x = make(0, 2, 9, FEATURES, dtype=jnp.bfloat16)
    y, carry = run(layer, x)
    empty = layer.initialize_carry((2, FEATURES))
    assert y.dtype == jnp.bfloat16
    assert jax.tree.map(lambda a: (a.shape, a.dtype), carry) == jax.tree.map(lambda a: (a.shape, a.dtype), empty)
    graphdef, params = nnx.split(layer)
    _, steps = jax.jit(lambda params, x: jax.lax.scan(nnx.merge(graphdef, params).step, empty, x))(
        params, jnp.moveaxis(x, 1, 0)
    )
    difference = np.asarray(jnp.moveaxis(steps, 0, 1), np.float32) - np.asarray(y, np.float32)
    assert np.abs(difference).max() < 3e-2 * np.abs(np.asarray(y, np.float32)).max()


@pytest.mark.parametrize("variant", ["siso", "mimo, every option"])
def test_heads_shard_over_a_mesh(variant):
    """Everything head-major cut over two devices, B, C and angles replicated: same numbers, split where asked."""
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices()[:2])
    x, sizes = make(0, 2, 13, FEATURES), {**SIZES, **VARIANTS[variant]}
    want = run(Mamba3(FEATURES, **sizes, rngs=nnx.Rngs(0)), x)
    with jax.set_mesh(mesh):
        layer = Mamba3(
            FEATURES,
            **sizes,
            kernel_metadata={"out_sharding": (None, "model")},
            group_kernel_metadata={"out_sharding": (None, None)},
            out_kernel_metadata={"out_sharding": ("model", None)},
            head_metadata={"out_sharding": ("model",)},
            rngs=nnx.Rngs(0),
        )
        for parameter, spec in (
            (layer.x_proj.kernel, P(None, "model")),
            (layer.trap_proj.kernel, P(None, "model")),
            (layer.out_proj.kernel, P("model", None)),
            (layer.C_bias, P("model")),
            (layer.dt_bias, P("model")),
        ):
            assert parameter[...].sharding == NamedSharding(mesh, spec)
        got = run(layer, x)
    assert_close(got[0], want[0])
    assert_same_state(got[1], want[1])


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("head_dim.*32", {"head_dim": 5}),
        ("num_groups.*4 heads", {"num_groups": 3}),
        ("mimo_rank.*1 to 8.*9", {"mimo_rank": 9}),
        ("state_dim.*even.*7", {"state_dim": 7}),
        ("rope_fraction.*0 to 1.*1.5", {"rope_fraction": 1.5}),
        ("A_map: expected one of .*'softplus', 'heavy_tailed'.*got 'relu'", {"A_map": "relu"}),
        ("rotary: expected one of .*'pairwise', 'half'.*got 'full'", {"rotary": "full"}),
        ("mimo_rank.*at least 1.*0", {"mimo_rank": 0}),
        ("A_floor: expected a finite number of at least 0, got -1", {"A_floor": -1.0}),
    ],
)
def test_sizes_that_cannot_be_are_named(words, changes):
    with pytest.raises(ValueError, match=words):
        build(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_norm": 1}, "use_norm: expected True or False, got 1"),
        ({"key_dtype": jnp.int32}, "key_dtype: expected a floating type, got .*int32"),
        ({"rngs": None}, "rngs: expected flax.nnx.Rngs, got NoneType"),
    ],
)
def test_options_of_another_type_are_named(changes, said):
    with pytest.raises(TypeError, match=f"Mamba3: {said}"):
        Mamba3(FEATURES, **({**SIZES, "rngs": nnx.Rngs(0)} | changes))


def test_carries_that_do_not_fit_are_named():
    layer, x = build(), jnp.zeros((2, FEATURES))
    carry = layer.initialize_carry((2, FEATURES))
    with pytest.raises(TypeError, match="Mamba3: carry: expected a Mamba3State, got NoneType; pass what initialize"):
        layer.step(None, x)  # type: ignore[arg-type]
    # A carry without the batch: of as many sequences as heads mamba3_step alone could not tell.
    tokens = jnp.zeros((layer.heads, FEATURES))
    with pytest.raises(ValueError, match=r"Mamba3: carry.angle: expected shape \(4, 4, .* got \(4, "):
        layer.step(layer.initialize_carry((FEATURES,)), tokens)
    with pytest.raises(ValueError, match=r"Mamba3: carry.angle: expected shape \(2, 5, 4, "):
        layer.step(carry, jnp.zeros((2, 5, FEATURES)))
    with pytest.raises(ValueError, match=r"Mamba3: initial_carry.angle: expected shape \(3, "):
        layer(jnp.zeros((3, 5, FEATURES)), initial_carry=carry)
    with pytest.raises(TypeError, match="Mamba3: return_carry: expected True or False, got 1"):
        layer(jnp.zeros((2, 5, FEATURES)), return_carry=1)  # type: ignore[call-overload]


def test_wrong_features_are_named():
    layer = build()
    for call in (layer, layer.scan_operands, lambda x: layer.step(layer.initialize_carry((2, FEATURES)), x)):
        with pytest.raises(ValueError, match="in_features = 16"):
            call(jnp.zeros((2, 3, 8)))
    with pytest.raises(ValueError, match=r"Mamba3: x: .*\(\.\.\., seq, in_features\)"):
        layer(jnp.zeros(FEATURES), segment_ids=jnp.zeros(3, int))
    with pytest.raises(ValueError, match=r"\(\.\.\., 16\)"):
        layer.initialize_carry((2, 3))
