"""On a mesh of 2 x 4 virtual CPU devices: right numbers from any layout, and no activation moved for a good one.

What moved is read off the compiled program. A batch- or head-sharded call adds up gradients of parameters, and those of
B and C where head shards cut through groups, and does nothing else between devices.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ssd
from jax_ssd import dispatch, op
from jax_ssd.mamba2 import mixer
from tests.mixer_steps import mixer_problem, random_operands

BATCH, SEQ, HEAD_DIM, STATE, CHUNK = 4, 48, 8, 16, 16
NAMES = ("x", "dt", "A", "B", "C", "D", "dt_bias", "initial_state")
PARAMETERS = ("A", "D", "dt_bias")
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter", "all-reduce")

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which mesh axes shard the batch and the heads; groups follow the heads where they can."""

    groups: int
    heads: int
    batch_axes: str | tuple[str, ...] | None
    head_axes: str | tuple[str, ...] | None

    @property
    def follows(self) -> bool:
        """Whether every head shard holds whole groups."""
        axes = () if self.head_axes is None else self.head_axes
        names = (axes,) if isinstance(axes, str) else axes
        return self.groups % math.prod(mesh().shape[name] for name in names) == 0

    def specs(self) -> dict[str, P]:
        b, h, g = self.batch_axes, self.head_axes, self.head_axes if self.follows else None
        return {
            "x": P(b, None, h, None),
            "dt": P(b, None, h),
            "A": P(h),
            "B": P(b, None, g, None),
            "C": P(b, None, g, None),
            "D": P(h, None),
            "dt_bias": P(h),
            "initial_state": P(b, h, None, None),
            "segment_ids": P(b, None),
        }


@functools.cache
def arrays(groups: int, heads: int, seq: int = SEQ) -> dict[str, jax.Array]:
    rng = np.random.default_rng(groups)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

    return {
        "x": normal(BATCH, seq, heads, HEAD_DIM),
        "dt": normal(BATCH, seq, heads),
        "A": -jnp.exp(normal(heads)),
        "B": normal(BATCH, seq, groups, STATE),
        "C": normal(BATCH, seq, groups, STATE),
        "D": normal(heads, HEAD_DIM),
        "dt_bias": normal(heads),
        "initial_state": normal(BATCH, heads, HEAD_DIM, STATE),
    }


def objective(moving, segment_ids=None, implementation="xla"):
    """A scalar that every result, and through it every gradient, depends on."""
    y, final = jax_ssd.mamba2(
        **moving,
        segment_ids=segment_ids,
        dt_softplus=True,
        chunk_size=CHUNK,
        precision="highest",
        return_final_state=True,
        implementation=implementation,
    )
    return (y**2).mean() + (final**2).mean()


value_and_gradients = jax.value_and_grad(objective)


@functools.cache
def expected(groups: int, heads: int, packed: bool = False):
    """On one device."""
    given = jax.tree.map(np.asarray, arrays(groups, heads))
    arguments = (given, ids()) if packed else (given,)
    return jax.tree.map(np.asarray, compiled(value_and_gradients, *arguments)(*arguments))


def ids() -> np.ndarray:
    return np.repeat(
        [[5, 5, 2, 8, 8, 8], [1, 1, 1, 1, 3, 1], [0, -1, 0, 4, 4, -1], [7, 6, 6, 6, -1, 2]], 8, axis=1
    ).astype(np.int32)


def place(tree, specs):
    return {name: jax.device_put(array, NamedSharding(mesh(), specs[name])) for name, array in tree.items()}


def compiled(function, *arguments, **options):
    """For the devices that the arguments are on."""
    return jax.jit(function, **options).lower(*arguments).compile()


def moved(program) -> dict[str, list[int]]:
    """Elements of every array that a collective of a compiled program gives, by kind."""
    found: dict[str, list[int]] = {}
    for shapes, kind in re.findall(rf"= (.+?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", program.as_text()):
        sizes = [math.prod(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\w\[([\d,]*)\]", shapes)]
        found.setdefault(kind, []).extend(sizes)
    return found


def assert_close(got, want):
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        scale = max(float(np.abs(other).max()), 1e-30)
        error = float(np.abs(np.asarray(one) - other).max()) / scale
        assert error < 2e-5, (jax.tree_util.keystr(path), error)


GOOD = {
    "fewer groups than shards": Layout(2, 8, "data", "model"),
    "as many groups as shards": Layout(4, 8, "data", "model"),
    "a group per head": Layout(8, 8, "data", "model"),
    "shards cut through groups": Layout(3, 12, "data", "model"),
    "batch only": Layout(2, 8, "data", None),
    "heads only": Layout(2, 8, None, "model"),
}


def compiled_gradients(layout: Layout, segment_ids=None):
    specs = layout.specs()
    given = place(arrays(layout.groups, layout.heads), specs)
    results = (NamedSharding(mesh(), P()), {name: NamedSharding(mesh(), specs[name]) for name in NAMES})
    arguments = (given,) if segment_ids is None else (given, place({"segment_ids": segment_ids}, specs)["segment_ids"])
    return compiled(value_and_gradients, *arguments, out_shardings=results), arguments


@pytest.mark.parametrize("name", GOOD)
def test_forward_and_backward_move_no_activation(name):
    layout = GOOD[name]
    program, arguments = compiled_gradients(layout)
    collectives = moved(program)
    assert set(collectives) == {"all-reduce"}, collectives
    parameters = layout.heads * HEAD_DIM
    of_groups = BATCH * SEQ * layout.groups * STATE
    large = [size for size in collectives["all-reduce"] if size > parameters]
    assert all(size <= of_groups for size in large)
    assert len(large) == (0 if layout.follows else 2), collectives  # dB and dC
    assert_close(program(*arguments), expected(layout.groups, layout.heads))


def test_several_leading_axes_move_no_activation():
    """Sharded from the first one on, as merging them into one batch leaves every shard where it is."""
    given, specs = {}, {}
    for name, array in arrays(2, 8).items():
        per_row = name not in PARAMETERS
        given[name] = jnp.stack([array, 2 * array]) if per_row else array
        specs[name] = P("data", "model") if per_row else P()
    given = place(given, specs)
    results = (NamedSharding(mesh(), P()), {name: NamedSharding(mesh(), specs[name]) for name in NAMES})
    program = compiled(value_and_gradients, given, out_shardings=results)
    assert set(moved(program)) == {"all-reduce"}
    assert max(moved(program)["all-reduce"]) <= 8 * HEAD_DIM
    alone = jax.tree.map(np.asarray, given)
    assert_close(program(given), jax.tree.map(np.asarray, compiled(value_and_gradients, alone)(alone)))


def test_packed_sequences_move_no_activation():
    program, arguments = compiled_gradients(GOOD["batch only"], ids())
    collectives = moved(program)
    assert set(collectives) == {"all-reduce"}
    assert max(collectives["all-reduce"]) <= 8 * HEAD_DIM
    assert_close(program(*arguments), expected(2, 8, packed=True))


def test_a_forward_alone_moves_nothing():
    given = place(arrays(4, 8), GOOD["as many groups as shards"].specs())
    program = compiled(lambda moving: jax_ssd.mamba2(**moving, chunk_size=CHUNK, return_final_state=True), given)
    assert moved(program) == {}
    y, final = program(given)
    assert y.sharding.is_equivalent_to(given["x"].sharding, 4)
    assert final.sharding.is_equivalent_to(given["initial_state"].sharding, 4)


BAD = {
    "sequence, head_dim and state": {
        "x": P(None, "data", None, "model"),
        "dt": P(None, ("data", "model")),
        "B": P(None, "model", None, "data"),
        "C": P("model", None, None, "data"),
        "initial_state": P(None, None, "model", "data"),
    },
    "batch and heads swapped": {
        "x": P("data", None, "model"),
        "dt": P("model", None, "data"),
        "A": P("data"),
        "initial_state": P("model", "data"),
    },
    "one argument only": {"x": P("data", None, "model")},
}


@pytest.mark.parametrize("name", BAD)
def test_other_layouts_stay_right(name):
    specs = {argument: BAD[name].get(argument, P()) for argument in NAMES}
    given = place(arrays(2, 8), specs)
    assert_close(compiled(value_and_gradients, given)(given), expected(2, 8))


def test_an_eager_call_on_sharded_arrays():
    layout = GOOD["as many groups as shards"]
    given = place(arrays(4, 8), layout.specs())
    assert_close(value_and_gradients(given), expected(4, 8))
    y = y_of(given)
    assert y.sharding.is_equivalent_to(given["x"].sharding, 4)


def step_arguments(groups: int) -> dict[str, jax.Array]:
    given = arrays(groups, 8)
    token = {name: given[name][:, 0] for name in ("x", "dt", "B", "C")}
    return {"state": given["initial_state"], **token, **{name: given[name] for name in ("A", "D", "dt_bias")}}


def step_specs(groups: int) -> dict[str, P]:
    specs = Layout(groups, 8, "data", "model").specs()
    specs |= {name: P(specs[name][0], *specs[name][2:]) for name in ("x", "dt", "B", "C")}
    specs["state"] = specs["initial_state"]
    return {name: specs[name] for name in step_arguments(groups)}


@pytest.mark.parametrize("groups", [2, 4])
def test_a_step_moves_nothing(groups):
    specs, given = step_specs(groups), step_arguments(groups)

    def step(moving):
        return jax_ssd.mamba2_step(**moving, dt_softplus=True)

    sharded = place(given, specs)
    program = compiled(step, sharded)
    assert moved(program) == {}
    results = program(sharded)
    assert results[0].sharding.is_equivalent_to(NamedSharding(mesh(), specs["state"]), 4)
    assert_close(results, jax.tree.map(np.asarray, compiled(step, given)(given)))


@pytest.mark.parametrize("groups", [2, 8])
def test_the_op_between_projections_is_sharded_by_rows_and_heads(groups):
    """Each shard is given the whole projection and does its own heads, also where their group is another's as well."""
    p, spec = mixer_problem(batch=4, heads=8, groups=groups, head_dim=4, state=8)
    spec = dataclasses.replace(spec, implementation=("xla",))
    arrays = {name: jnp.asarray(array) for name, array in random_operands(p).items()}
    axes = {"b": "data", "h": "model"}
    specs = {name: P(*map(axes.get, mixer.LETTERS[name])) for name in arrays}
    given = mixer.Operands(**arrays)
    sharded = mixer.Operands(
        **{name: jax.device_put(array, NamedSharding(mesh(), specs[name])) for name, array in arrays.items()}
    )
    program = jax.jit(lambda operands: mixer.step(spec, operands)).lower(sharded).compile()
    assert moved(program) == {}
    results = program(sharded)
    for result, name in zip(results, ("state", "window_x", "window_bc"), strict=False):
        assert result.sharding.is_equivalent_to(NamedSharding(mesh(), specs[name]), result.ndim)
    assert_close(results, jax.tree.map(np.asarray, mixer.step(spec, given)))


def test_kernels_are_planned_for_their_shard(monkeypatch):
    """Which sizes the kernels would run at; pure JAX stands in for them."""
    planned = {}

    def record(definition, spec, name, platform, avals, devices=None):
        del devices
        if name not in dispatch.KERNELS:
            return None
        plan = definition.plan(spec, name, avals)
        if platform == "cpu":  # lowered; a refusal while tracing is asked for "cuda", at the sizes of the whole
            planned[definition.name] = {buffer.name: buffer.shape for buffer in plan.operands}

    monkeypatch.setattr(op, "kernel_plan", record)
    layout = GOOD["shards cut through groups"]
    given = place(arrays(3, 12), layout.specs())
    program = compiled(functools.partial(value_and_gradients, implementation="cutile"), given)
    assert_close(program(given), expected(3, 12))
    for operands in (planned["mamba2_forward"], planned["mamba2_backward"]):
        assert operands["x"] == (2, SEQ, 3, HEAD_DIM)
        assert operands["B"] == operands["C"] == (2, SEQ, 3, STATE)  # shard 1 reads its heads 3, 4 and 5 from 0, 1, 1
        assert operands["A"] == (1, 3)
        assert operands["initial_state"] == (2, 3, HEAD_DIM, STATE)


# Mapped by hand.


def y_of(moving):
    return jax_ssd.mamba2(**moving, dt_softplus=True, chunk_size=CHUNK, precision="highest", implementation="xla")


def total(moving):
    return (y_of(moving) ** 2).sum()


@functools.cache
def expected_total():
    given = jax.tree.map(np.asarray, arrays(4, 8))
    return jax.tree.map(np.asarray, compiled(jax.grad(total), given)(given))


BY_HAND = {
    "replicated parameters": Layout(4, 8, "data", None),
    "parameters sharded over heads": Layout(4, 8, "data", "model"),
}


def by_hand(name: str) -> dict[str, P]:
    return {argument: spec for argument, spec in BY_HAND[name].specs().items() if argument in NAMES}


@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_taken_inside_shard_map(name):
    """With the checks of shard_map on, the gradient of what is replicated is the sum over shards, once."""
    specs = by_hand(name)
    inside = jax.shard_map(jax.grad(total), mesh=mesh(), in_specs=(specs,), out_specs=specs)
    given = place(arrays(4, 8), specs)
    program = compiled(inside, given)
    assert set(moved(program)) == {"all-reduce"}
    assert_close(program(given), expected_total())


@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_taken_outside_shard_map(name):
    specs = by_hand(name)
    mapped = jax.shard_map(y_of, mesh=mesh(), in_specs=(specs,), out_specs=specs["x"])
    outside = jax.grad(lambda moving: (mapped(moving) ** 2).sum())
    given = place(arrays(4, 8), specs)
    assert_close(compiled(outside, given)(given), expected_total())


ALONE: dict[str, tuple[str, ...]] = {
    "no initial state": ("x", "dt", "A", "B", "C"),
    "packed": ("x", "dt", "A", "B", "C", "segment_ids"),
    "every argument": ("x", "dt", "A", "B", "C", "D", "z", "initial_state", "segment_ids"),
}


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("name", ALONE)
def test_values_and_gradients_inside_shard_map(name, implementation):
    """Also where nothing but the tokens varies over the mesh: the state that a scan carries does from the beginning."""
    given = {**arrays(4, 8), "z": arrays(4, 8)["x"] + 1, "segment_ids": jnp.asarray(ids())}
    given = {key: given[key] for key in ALONE[name]}
    specs = {**Layout(4, 8, "data", None).specs(), "z": P("data")}
    specs = {key: specs[key] for key in given}

    def both(given):
        labels = {key: given[key] for key in given if key == "segment_ids"}
        moving = {key: array for key, array in given.items() if key not in labels}

        def objective(moving):
            options = {"dt_softplus": True, "chunk_size": CHUNK, "precision": "highest"}
            y, final = jax_ssd.mamba2(
                **moving, **labels, **options, return_final_state=True, implementation=implementation
            )
            return (y**2).sum() + (final**2).sum(), (y, final)

        gradients, results = jax.grad(objective, has_aux=True)(moving)
        return results, gradients

    outs = (P("data"), P("data")), {key: spec for key, spec in specs.items() if key != "segment_ids"}
    inside = jax.shard_map(both, mesh=mesh(), in_specs=(specs,), out_specs=outs)
    assert_close(compiled(inside, given)(given), jax.tree.map(np.asarray, compiled(both, given)(given)))


@pytest.mark.parametrize(
    "kind, implementation",
    [("shard_map", "xla"), ("shard_map", "reference"), ("explicit", "xla"), ("explicit", "reference")],
)
def test_mamba3_by_batch(kind, implementation):
    """Without an initial state, with all its checks, values and gradients."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 12, 2, 8), "k": (2, 12, 2, 8), "v": (2, 12, 4, 4), "q_bias": (4, 8), "k_bias": (4, 8)}
    shapes |= {"angles": (2, 12, 4, 2), "adt": (2, 4, 12), "dt": (2, 4, 12), "trap": (2, 4, 12)}
    shapes |= {"D": (4,), "z": (2, 12, 4, 4)}
    given = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    given["adt"] = -jnp.abs(given["adt"])
    specs = {name: P() if name in ("q_bias", "k_bias", "D") else P("data") for name in given}

    def both(given):
        def objective(given):
            y, state = jax_ssd.mamba3(
                **given,
                mimo_v=None,
                mimo_o=None,
                return_final_state=True,
                chunk_size=5,
                precision="highest",
                implementation=implementation,
            )
            return (y**2).sum() + sum((a**2).sum() for a in state), (y, state)

        gradients, results = jax.grad(objective, has_aux=True)(given)
        return results, gradients

    expected = jax.tree.map(np.asarray, compiled(both, given)(given))
    if kind == "shard_map":
        inside = jax.shard_map(both, mesh=mesh(), in_specs=(specs,), out_specs=(P("data"), specs))
        assert_close(compiled(inside, given)(given), expected)
        return
    explicit = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        placed = {key: jax.device_put(array, NamedSharding(explicit, specs[key])) for key, array in given.items()}
        results, gradients = jax.jit(both)(placed)
    assert_close((results, gradients), expected)
    assert jax.typeof(results[1].ssm).sharding.spec == P("data", None, None, None)


# Meshes whose axes are part of the types.


@pytest.mark.parametrize(
    "name, packed, implementation",
    [
        ("fewer groups than shards", True, "xla"),
        ("as many groups as shards", False, "xla"),
        ("as many groups as shards", True, "xla"),
        ("as many groups as shards", True, "reference"),
    ],
)
def test_explicit_axes(name, packed, implementation):
    layout = GOOD[name]
    explicit = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    specs = layout.specs()
    given = arrays(layout.groups, layout.heads)
    with jax.set_mesh(explicit):
        moving = {key: jax.device_put(array, NamedSharding(explicit, specs[key])) for key, array in given.items()}
        arguments = (moving,)
        if packed:
            arguments = (moving, jax.device_put(ids(), NamedSharding(explicit, specs["segment_ids"])))
        value, gradients = jax.jit(functools.partial(value_and_gradients, implementation=implementation))(*arguments)
        y, final = jax.jit(functools.partial(jax_ssd.mamba2, return_final_state=True, implementation=implementation))(
            **moving
        )
        assert_close((value, gradients), expected(layout.groups, layout.heads, packed))
    assert {key: jax.typeof(one).sharding.spec for key, one in gradients.items()} == {
        key: jax.typeof(moving[key]).sharding.spec for key in gradients
    }
    assert jax.typeof(y).sharding.spec == P("data", None, "model", None)
    assert jax.typeof(final).sharding.spec == P("data", "model", None, None)


def test_a_step_on_explicit_axes():
    explicit = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    specs, given = step_specs(4), step_arguments(4)
    with jax.set_mesh(explicit):
        placed = {key: jax.device_put(array, NamedSharding(explicit, specs[key])) for key, array in given.items()}
        state, y = jax.jit(lambda moving: jax_ssd.mamba2_step(**moving, dt_softplus=True))(placed)
    assert jax.typeof(state).sharding.spec == P("data", "model", None, None)
    assert_close(
        (state, y), jax.tree.map(np.asarray, jax.jit(lambda m: jax_ssd.mamba2_step(**m, dt_softplus=True))(given))
    )


def test_gradients_of_a_step_taken_inside_shard_map():
    def objective(moving):
        state, y = jax_ssd.mamba2_step(**moving, dt_softplus=True)
        return (state**2).sum() + (y**2).sum()

    specs, given = step_specs(4), step_arguments(4)
    inside = jax.shard_map(jax.grad(objective), mesh=mesh(), in_specs=(specs,), out_specs=specs)
    assert_close(compiled(inside, given)(given), jax.tree.map(np.asarray, compiled(jax.grad(objective), given)(given)))


def test_gradients_where_only_the_batch_is_mapped_by_hand():
    """The heads are sharded by the compiler, inside."""
    given = place(arrays(4, 8), by_hand("parameters sharded over heads"))
    specs = by_hand("replicated parameters")
    inside = jax.shard_map(jax.grad(total), mesh=mesh(), in_specs=(specs,), out_specs=specs, axis_names={"data"})
    assert_close(compiled(inside, given)(given), expected_total())


@pytest.mark.parametrize("shared", [True, False])
def test_pmap(shared):
    """Two devices, each with half of the batch; parameters shared by them, or each with its own."""
    given = arrays(4, 8)
    axes = {name: None if shared and name in PARAMETERS else 0 for name in NAMES}

    def stack(name, array):
        if name not in PARAMETERS:
            return array.reshape(2, BATCH // 2, *array.shape[1:])
        return array if shared else jnp.stack([array, 2 * array])

    stacked = {name: stack(name, array) for name, array in given.items()}
    got = jax.pmap(jax.grad(total), in_axes=(axes,), devices=jax.devices()[:2])(stacked)
    for i in range(2):
        one = {name: np.asarray(array if axes[name] is None else array[i]) for name, array in stacked.items()}
        want = jax.tree.map(np.asarray, gradients_of_a_half()(one))
        assert_close(jax.tree.map(lambda a, i=i: a[i], got), want)


@functools.cache
def gradients_of_a_half():
    example = {n: np.asarray(a if n in PARAMETERS else a[: BATCH // 2]) for n, a in arrays(4, 8).items()}
    return compiled(jax.grad(total), example)
