"""The NNX layer: hand-over, steps, padding, packing, initialisation, sharding, what happens without flax."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ssd.flax.nnx import CausalConv1d, GatedRMSNorm, Mamba2, Mamba2Carry

FEATURES = 16
SIZES = {"state_dim": 8, "head_dim": 8, "num_groups": 2, "chunk_size": 4, "implementation": "xla"}


def build(**changes) -> Mamba2:
    return Mamba2(FEATURES, **{**SIZES, **changes}, rngs=nnx.Rngs(0))


def make(seed: int, *shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@partial(jax.jit, static_argnums=0)
def _run(graphdef, params, x, segment_ids, carry):
    return nnx.merge(graphdef, params)(x, segment_ids=segment_ids, initial_carry=carry, return_carry=True)


def run(layer: Mamba2, x, segment_ids=None, carry=None):
    return _run(*nnx.split(layer), x, segment_ids, carry)


@jax.jit
def _filled(carry: Mamba2Carry) -> Mamba2Carry:
    leaves, treedef = jax.tree.flatten(carry)
    return treedef.unflatten([jax.random.normal(jax.random.key(i), a.shape, a.dtype) for i, a in enumerate(leaves)])


def assert_close(got, want, tolerance=2e-5):
    """Float32 sums of a few dozen terms of size one, in another order."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)


VARIANTS = {
    "plain": {},
    "gate inside": {"use_norm": False, "per_channel_D": True, "use_bias": True, "use_conv_bias": False},
    "gate after norm": {"norm_before_gate": True, "conv_width": 1, "dt_limit": (0.01, 0.05)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_pieces_and_steps_equal_the_whole(variant):
    layer = build(**VARIANTS[variant])
    x, start = make(0, 2, 14, FEATURES), _filled(layer.initialize_carry((2, FEATURES)))
    want, final = run(layer, x, carry=start)
    assert want.shape == x.shape

    first, middle = run(layer, x[:, :7], carry=start)
    second, last = run(layer, x[:, 7:], carry=middle)
    assert_close(jnp.concatenate([first, second], axis=1), want)
    assert_close(last, final)

    graphdef, params = nnx.split(layer)
    decode = jax.jit(lambda params, carry, x: jax.lax.scan(nnx.merge(graphdef, params).step, carry, x))
    before = jax.tree.map(np.array, start)
    last, y = decode(params, start, jnp.moveaxis(x, 1, 0))
    assert_close(jnp.moveaxis(y, 0, 1), want)
    assert_close(last, final)
    jax.tree.map(np.testing.assert_array_equal, start, before)


def test_padded_prompts_equal_prompts_alone():
    layer = build(use_bias=True)
    # silu(bias) != 0 must not leak from the padding, nor the bias of the output show in it.
    for bias in (layer.x_conv.bias, layer.out_proj.bias):
        assert bias is not None
        bias[...] = jnp.ones_like(bias[...])
    x = make(0, 11, FEATURES)
    ids = jnp.asarray([-1, -1, -1, 0, 0, 0, -1, 0, 0, 0, -1])
    real = np.asarray(ids) >= 0
    want, carry = run(layer, x[real])
    got, padded_carry = run(layer, jnp.where((ids < 0)[:, None], jnp.nan, x), ids)
    assert_close(got[real], want)
    np.testing.assert_array_equal(got[~real], 0.0)
    assert_close(padded_carry, carry)


def test_packed_segments_equal_separate_runs():
    layer = build()
    x = make(0, 12, FEATURES)
    ids = jnp.asarray([4] * 3 + [1] * 8 + [4])
    start = _filled(layer.initialize_carry((FEATURES,)))
    got, carry = run(layer, x, ids, start)
    parts = [run(layer, x[:3], carry=start)[0], run(layer, x[3:11])[0], run(layer, x[11:])[0]]
    assert_close(got, jnp.concatenate(parts))
    assert_close(carry, run(layer, x[11:])[1])


def test_gradient_through_steps_equals_gradient_through_the_sequence():
    layer = build()
    graphdef, params = nnx.split(layer)
    x = make(0, 2, 7, FEATURES)

    def sequence(params):
        return (nnx.merge(graphdef, params)(x) ** 2).sum()

    def steps(params):
        layer = nnx.merge(graphdef, params)
        _, y = jax.lax.scan(layer.step, layer.initialize_carry((2, FEATURES)), jnp.moveaxis(x, 1, 0))
        return (y**2).sum()

    assert_close(jax.jit(jax.grad(steps))(params), jax.jit(jax.grad(sequence))(params), 1e-4)


def test_equals_the_definition():
    layer = build()
    graphdef, params = nnx.split(layer)
    reference = nnx.merge(nnx.graphdef(build(implementation="reference")), params)
    x = make(0, 2, 13, FEATURES)
    assert_close(run(layer, x), run(reference, x))


def test_initialisation():
    layer = Mamba2(64, state_dim=16, head_dim=2, implementation="xla", rngs=nnx.Rngs(3))
    A = np.exp(layer.A_log[...])
    assert A.shape == (64,) and (A >= 1).all() and (A <= 16).all() and A.std() > 2
    dt = np.log1p(np.exp(np.asarray(layer.dt_bias[...], np.float64)))
    assert (dt > 0.99e-3).all() and (dt < 1.01e-1).all() and np.log10(dt).std() > 0.3
    assert layer.norm is not None and layer.B_conv.bias is not None
    assert (np.asarray(layer.D[...]) == 1).all() and (np.asarray(layer.norm.scale[...]) == 1).all()
    for kernel, bound in (
        (layer.z_proj.kernel, 64**-0.5),
        (layer.dt_proj.kernel, 64**-0.5),
        (layer.out_proj.kernel, 128**-0.5),
        (layer.x_conv.kernel, 0.5),
        (layer.B_conv.bias, 0.5),
    ):
        largest = np.abs(kernel[...]).max()
        assert 0.8 * bound < largest <= bound


def test_floor_of_dt():
    layer = build(dt_init=(1e-9, 1e-8, 1e-4))
    np.testing.assert_allclose(np.log1p(np.exp(np.asarray(layer.dt_bias[...], np.float64))), 1e-4, rtol=1e-3)


def test_parameters_of_a_bfloat16_layer():
    layer = build(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, state_dtype=jnp.bfloat16)
    assert layer.norm is not None
    for parameter in (layer.A_log, layer.dt_bias, layer.D, layer.norm.scale):
        assert parameter[...].dtype == jnp.float32
    for parameter in (layer.x_proj.kernel, layer.dt_proj.kernel, layer.x_conv.kernel, layer.out_proj.kernel):
        assert parameter[...].dtype == jnp.bfloat16
    x = make(0, 2, 9, FEATURES, dtype=jnp.bfloat16)
    y, carry = run(layer, x)
    empty = layer.initialize_carry((2, FEATURES))
    assert y.dtype == jnp.bfloat16
    assert jax.tree.map(lambda a: (a.shape, a.dtype), carry) == jax.tree.map(lambda a: (a.shape, a.dtype), empty)


def test_heads_shard_over_a_mesh():
    """Everything head-major cut over two devices, B and C replicated: same numbers, split where it was asked."""
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices()[:2])
    x = make(0, 2, 13, FEATURES)
    want = run(build(), x)
    with jax.set_mesh(mesh):
        layer = build(
            kernel_metadata={"out_sharding": (None, "model")},
            conv_metadata={"out_sharding": ("model", None)},
            out_kernel_metadata={"out_sharding": ("model", None)},
            head_metadata={"out_sharding": ("model",)},
        )
        for parameter, spec in ((layer.x_proj.kernel, P(None, "model")), (layer.A_log, P("model"))):
            assert parameter[...].sharding == NamedSharding(mesh, spec)
        got = run(layer, x)
    assert_close(got, want)


@pytest.mark.parametrize(
    ("words", "changes"), [("head_dim.*32", {"head_dim": 5}), ("num_groups.*4 heads", {"num_groups": 3})]
)
def test_sizes_that_do_not_divide_are_named(words, changes):
    with pytest.raises(ValueError, match=words):
        build(**changes)


def test_wrong_features_are_named():
    layer = build()
    with pytest.raises(ValueError, match="in_features = 16"):
        layer(jnp.zeros((2, 3, 8)))
    with pytest.raises(ValueError, match=r"\(\.\.\., 16\)"):
        layer.initialize_carry((2, 3))


def test_without_flax_the_package_imports_and_the_layer_names_the_extra():
    program = (
        "import sys; sys.modules['flax'] = None\n"
        "import jax_ssd\n"
        "for name in ('jax_ssd.flax.nnx', 'jax_ssd.models'):\n"
        "    try:\n"
        "        __import__(name)\n"
        "    except ImportError as error:\n"
        "        assert \"pip install '.[flax]' in a checkout\" in str(error), error\n"
        "    else:\n"
        "        raise SystemExit('imported without flax')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"head_dim": 0}, ValueError, "head_dim: expected at least 1, got 0"),
        ({"num_groups": 0}, ValueError, "num_groups: expected at least 1, got 0"),
        ({"conv_width": 0}, ValueError, "conv_width: expected at least 1, got 0"),
        ({"state_dim": 8.0}, TypeError, "state_dim: expected an integer, got 8.0"),
        ({"dt_init": (1e-3, 1e-1)}, TypeError, "dt_init: expected .min, max, floor., got"),
        ({"dt_init": (0.0, 1e-1, 1e-4)}, ValueError, "dt_init: expected 0 < min <= max"),
        ({"dt_init": (1e-1, 1e-3, 1e-4)}, ValueError, "dt_init: expected 0 < min <= max"),
        ({"A_init_range": (0.0, 16.0)}, ValueError, "A_init_range: expected 0 < low <= high"),
        ({"A_init_range": (16.0, 1.0)}, ValueError, "A_init_range: expected 0 < low <= high"),
        ({"dt_limit": (2, 1)}, ValueError, "dt_limit: expected low <= high"),
        ({"implementation": "foo"}, ValueError, "implementation: expected names out of"),
        ({"precision": "exact"}, ValueError, "Mamba2: precision: expected one of"),
        ({"chunk_size": 0}, ValueError, "chunk_size: expected at least 1 token"),
        ({"norm_epsilon": -1.0}, ValueError, "epsilon: expected a finite number"),
        ({"use_norm": "no"}, TypeError, "Mamba2: use_norm: expected True or False, got 'no'"),
        ({"use_bias": 1}, TypeError, "Mamba2: use_bias: expected True or False, got 1"),
        ({"state_dtype": jnp.int32}, TypeError, "Mamba2: state_dtype: expected a floating type, got .*int32"),
        ({"dtype": "bf16"}, TypeError, "Mamba2: dtype: expected a floating type, got 'bf16'; pass"),
        ({"param_dtype": None}, TypeError, "Mamba2: param_dtype: expected a floating type, got None; pass"),
        ({"in_features": None}, TypeError, "Mamba2: in_features: expected an integer, got None"),
        (
            {"head_dim": 64},
            ValueError,
            "Mamba2: head_dim: expected a divisor of expand . in_features = .* = 32, got 64",
        ),
        ({"num_groups": 3}, ValueError, "Mamba2: num_groups: expected a divisor of the 4 heads, got 3"),
        ({"norm_epsilon": -1}, ValueError, "Mamba2: norm_epsilon: expected a finite number"),
        ({"rngs": 0}, TypeError, "Mamba2: rngs: expected flax.nnx.Rngs, got int; pass for instance"),
        ({"kernel_init": "zeros"}, TypeError, "Mamba2: kernel_init: expected an initialiser, got 'zeros'; pass"),
        ({"head_metadata": None}, TypeError, "Mamba2: head_metadata: expected a mapping, got None; leave it out"),
    ],
)
def test_slips_are_named_at_construction(changes, error, said):
    with pytest.raises(error, match=said):
        Mamba2(**({"in_features": 16, "state_dim": 8, "head_dim": 8, "rngs": nnx.Rngs(0)} | changes))


@pytest.mark.parametrize(
    ("build_part", "error", "said"),
    [
        (lambda: GatedRMSNorm(8.0), TypeError, "GatedRMSNorm: features: expected an integer, got 8.0"),  # type: ignore
        (lambda: GatedRMSNorm(8, group_size=3), ValueError, "GatedRMSNorm: group_size: expected a divisor of the 8"),
        (lambda: CausalConv1d(8, 0, rngs=nnx.Rngs(0)), ValueError, "CausalConv1d: width: expected at least 1, got 0"),
        (lambda: CausalConv1d(8, 4, rngs=0), TypeError, "CausalConv1d: rngs: expected flax.nnx.Rngs"),  # type: ignore
    ],
)
def test_slips_in_parts_are_named(build_part, error, said):
    with pytest.raises(error, match=said):
        build_part()


@cache
def some_layer() -> Mamba2:
    return build()


@pytest.mark.parametrize(
    ("keywords", "error", "said"),
    [
        ({"x": "text"}, TypeError, "Mamba2: x: expected an array, got str; pass a jax or numpy array"),
        (
            {"x": np.ones(16, np.float32)},
            ValueError,
            r"Mamba2: x: expected at least 2 axes \(.*in_features\), got",
        ),
        (
            {"segment_ids": np.zeros(5, int)},
            ValueError,
            r"Mamba2: segment_ids: .* = \(2, 5\), got \(5,\); reshape",
        ),
        ({"segment_ids": np.zeros((2, 4), int)}, ValueError, r"Mamba2: segment_ids: .* got \(2, 4\); reshape"),
        (
            {"segment_ids": np.zeros((2, 5))},
            TypeError,
            "Mamba2: segment_ids: expected an integer type, got float32; ",
        ),
        ({"initial_carry": (1, 2, 3, 4)}, TypeError, "Mamba2: initial_carry: expected a Mamba2Carry, got tuple; pass"),
        ({"initial_carry": np.ones(3)}, TypeError, "Mamba2: initial_carry: expected a Mamba2Carry, got ndarray; pass"),
        ({"return_carry": 1}, TypeError, "Mamba2: return_carry: expected True or False, got 1; it is static"),
    ],
)
def test_slips_are_named_at_the_call(keywords, error, said):
    with pytest.raises(error, match=said):
        some_layer()(**{"x": np.ones((2, 5, FEATURES), np.float32), **keywords})


def test_a_step_without_a_carry_is_named():
    with pytest.raises(TypeError, match="Mamba2: carry: expected a Mamba2Carry, got NoneType; pass what initialize_ca"):
        some_layer().step(None, np.ones((2, FEATURES), np.float32))  # type: ignore[arg-type]


def test_a_carry_of_another_batch_is_named():
    layer, x = some_layer(), np.ones((2, 5, FEATURES), np.float32)
    carry = layer.initialize_carry((2, FEATURES))
    said = r"Mamba2: {}.conv_x: expected shape \({}, .* got \({}, .* give the carry .* the batch axes of x"
    with pytest.raises(ValueError, match=said.format("carry", "2, 5", 2)):
        layer.step(carry, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said.format("initial_carry", 3, 2)):
        layer(jnp.ones((3, 5, FEATURES)), initial_carry=carry)
    with pytest.raises(ValueError, match=r"Mamba2: x: expected at least 2 axes"):
        layer.scan_operands(x[0, 0])  # type: ignore[arg-type]


def test_a_carry_of_another_type_is_named():
    layer = some_layer()
    carry = layer.initialize_carry((FEATURES,))
    for ssm, error, said in (
        (carry.ssm.astype(int), TypeError, "expected a floating type out of .*, got int32"),
        ([[1.0], [1.0, 2.0]], ValueError, "expected an array, got a nested list whose rows differ in shape"),
    ):
        with pytest.raises(error, match=f"Mamba2: carry.ssm: {said}"):
            layer.step(dataclasses.replace(carry, ssm=ssm), np.ones(FEATURES, np.float32))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "error", "said"),
    [
        (2, TypeError, "expected a tuple of sizes, got 2"),
        (None, TypeError, "expected a tuple of sizes, got None"),
        ("ab", TypeError, "expected a tuple of sizes, got 'ab'"),
        ((2.0, FEATURES), TypeError, "expected an integer, got 2.0"),
        ((-2, FEATURES), ValueError, "expected at least 0, got -2"),
        ((), ValueError, "expected that of one token, "),
        ((2,), ValueError, "expected that of one token, "),
    ],
)
def test_a_carry_of_no_shape_is_named(shape, error, said):
    with pytest.raises(error, match=f"Mamba2: input_shape: {said}"):
        some_layer().initialize_carry(shape)


def test_lists_are_taken_as_arrays():
    layer, x, ids = some_layer(), np.zeros((2, 5, FEATURES), np.float32), [[0, 0, 1, 1, -1]] * 2
    y = jax.eval_shape(lambda: layer(x.tolist(), segment_ids=ids))  # type: ignore[arg-type]
    assert (y.shape, y.dtype) == (x.shape, jnp.float32)


def test_a_list_of_limits_is_a_tuple():
    assert Mamba2(16, state_dim=8, head_dim=8, dt_limit=[0, 1], rngs=nnx.Rngs(0)).dt_limit == (0.0, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_of_a_layer_with_bfloat16_parameters_are_its_sequence(dtype):
    """Windows hold what the projections give, which is float32 for float32 inputs."""
    layer = Mamba2(16, state_dim=8, head_dim=8, param_dtype=jnp.bfloat16, implementation="xla", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 9, 16), dtype)
    with jax.numpy_dtype_promotion("standard"):
        _check_steps(layer, x, 1e-5 if dtype == "float32" else 2e-2)


def _check_steps(layer, x, bar):
    whole, carry = run(layer, x)
    started = layer.initialize_carry((2, 16))
    assert started.conv_x.dtype == jnp.float32
    last, steps = jax.jit(lambda carry, x: jax.lax.scan(layer.step, carry, x))(started, jnp.moveaxis(x, 1, 0))
    np.testing.assert_allclose(
        jnp.moveaxis(steps, 0, 1).astype(jnp.float32), whole.astype(jnp.float32), rtol=bar, atol=bar
    )
    np.testing.assert_allclose(last.conv_x, carry.conv_x.astype(jnp.float32), rtol=bar, atol=bar)


def test_what_padding_holds_has_no_gradient():
    layer = Mamba2(16, state_dim=8, head_dim=8, chunk_size=4, implementation="xla", use_bias=True, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    ids = jnp.asarray([-1, 0, 0, -1, 0, 1, 1, -1])
    x = jax.random.normal(jax.random.key(0), (8, 16))

    @jax.jit
    def gradients(x):
        return jax.grad(lambda params, x: (nnx.merge(graphdef, params)(x, segment_ids=ids) ** 2).sum(), (0, 1))(
            params, x
        )

    dirty = gradients(jnp.where((ids < 0)[:, None], jnp.nan, x))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), dirty, gradients(x))
