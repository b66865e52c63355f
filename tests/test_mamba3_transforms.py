"""What jax transforms make of Mamba-3: vmap, checkpoint, scan, sharding, lowering for GPUs, dispatch_paths, export.

Programs for NVIDIA GPUs are lowered here without one and read as text; nothing of them runs.
"""

import dataclasses
import functools
import math
import re
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ssd
from jax_ssd import Mamba3State
from jax_ssd.mamba3 import cases
from tests.test_sharding import assert_close as assert_same
from tests.test_sharding import compiled, mesh, moved, place
from tests.test_transforms import assert_close, launches, lowered, paths, without_compiling

__all__ = ["without_compiling"]  # a fixture

PLAIN = dataclasses.replace(cases.BASE, heads=2, groups=1, seq=20, chunk_size=8, state=16)
CASE = dataclasses.replace(PLAIN, dtype="bfloat16")  # for the kernels
STATE = ("initial_angle", "initial_ssm", "initial_k", "initial_v")


@functools.cache
def arrays(case=CASE):
    return case.inputs()


def run(given, case=CASE, implementation=None):
    return case.scan(given, implementation)["y"]


def total(given, case=CASE, implementation=None):
    return (run(given, case, implementation).astype("float32") ** 2).sum()


def decode(given, case=CASE, implementation=None):
    return case.steps(given, implementation)


def one_step(given, case=CASE):
    """Of the first token."""
    return decode(
        {n: a.take(jnp.array([0]), cases.OF_TOKENS[n]) if n in cases.OF_TOKENS else a for n, a in given.items()}, case
    )


# vmap.

PATTERNS = {
    "v": {"v": 0},
    "a bias and the decay": {"q_bias": 0, "adt": 0},
    "rank weights": {"mimo_o": 0, "mimo_v": 0},
    "last axis": {"k": -1, "D": -1, "angles": -1, "initial_ssm": -1, "initial_angle": -1},
}


def stack(name, axis, count, case=PLAIN):
    return jnp.stack([arrays(case)[name] * (1.0 + 0.25 * i) for i in range(count)], axis).astype(
        arrays(case)[name].dtype
    )


def mapped(pattern, case):
    axes = {name: PATTERNS[pattern].get(name) for name in arrays(case)}
    given = {n: a if axes[n] is None else stack(n, axes[n], 2, case) for n, a in arrays(case).items()}
    return axes, given


@pytest.fixture(scope="module")
def one_example():
    return jax.jit(jax.value_and_grad(functools.partial(total, case=PLAIN)))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.slow
def test_vmap_equals_a_loop(pattern, one_example):
    axes, given = mapped(pattern, PLAIN)
    function = jax.value_and_grad(functools.partial(total, case=PLAIN))
    got = jax.jit(jax.vmap(function, in_axes=(axes,)))(given)
    for i in range(2):
        one = {name: a if axes[name] is None else jnp.take(a, i, axes[name]) for name, a in given.items()}
        assert_close(jax.tree.map(lambda a, i=i: a[i], got), one_example(one))


def test_nested_vmap_equals_a_loop(one_example):
    """The decay differs along the inner axis, v along the outer one, a bias along both."""
    given = arrays(PLAIN) | {"adt": stack("adt", 0, 2), "v": stack("v", 0, 2)}
    given["k_bias"] = jnp.stack([stack("k_bias", 0, 2), -stack("k_bias", 0, 2)])
    inner = {name: 0 if name in ("adt", "k_bias") else None for name in given}
    outer = {name: 0 if name in ("v", "k_bias") else None for name in given}
    function = jax.value_and_grad(functools.partial(total, case=PLAIN))
    got = jax.jit(jax.vmap(jax.vmap(function, in_axes=(inner,)), in_axes=(outer,)))(given)
    for i in range(2):
        for j in range(2):
            one = given | {"v": given["v"][i], "adt": given["adt"][j], "k_bias": given["k_bias"][i, j]}
            assert_close(jax.tree.map(lambda a, i=i, j=j: a[i, j], got), one_example(one))


@pytest.mark.slow
def test_packs_are_mapped_with_boundaries_and_states_of_their_own():
    case = dataclasses.replace(PLAIN, batch=1, cu_seqlens=(0, 3, 3, 20))
    packs = [case.inputs(seed) for seed in range(2)]
    packs[1]["cu_seqlens"] = jnp.array([0, 7, 12, 20], jnp.int32)
    scan = jax.jit(case.scan)
    together = jax.jit(jax.vmap(case.scan))(jax.tree.map(lambda *a: jnp.stack(a), *packs))
    for i, pack in enumerate(packs):
        assert_close(jax.tree.map(lambda a, i=i: a[i], together), scan(pack))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_custom_call_under_vmap(pattern, without_compiling):
    axes, given = mapped(pattern, CASE)
    text = lowered(jax.vmap(jax.value_and_grad(total), in_axes=(axes,)), given)
    assert launches(text) == ["mamba3_forward", "mamba3_backward"]
    assert "stablehlo.while" not in text


# One token at a time.


def test_gradients_through_steps_equal_those_of_the_scan():
    weights = {
        name: np.random.default_rng(5).standard_normal(a.shape).astype("float32")
        for name, a in jax.eval_shape(PLAIN.scan, arrays(PLAIN)).items()
    }

    def objective(function, given):
        return sum((value * weights[name]).sum() for name, value in function(given).items())

    by_steps, whole = (
        jax.jit(jax.grad(functools.partial(objective, f)))(arrays(PLAIN)) for f in (PLAIN.steps, PLAIN.scan)
    )
    assert_close(by_steps, whole, 5e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_step_leaves_its_inputs_as_they_were(implementation):
    given = dict(arrays(dataclasses.replace(PLAIN, seq=1)))
    before = jax.tree.map(np.array, given)
    decode(given, PLAIN, implementation)
    assert not any(array.is_deleted() for array in given.values())
    jax.tree.map(np.testing.assert_array_equal, given, before)


def test_a_step_computes_nothing_larger_than_the_state():
    """Above all no chunk of tokens, padded from one."""
    given = arrays(dataclasses.replace(PLAIN, seq=1, rank=2))
    text = jax.jit(PLAIN.steps).lower(given).as_text()
    sizes = [math.prod(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<((?:\d+x)+)\w+>", text)]
    assert sizes and max(sizes) == given["initial_ssm"].size


def test_a_decode_loop_overwrites_its_state(without_compiling):
    text = lowered(decode, arrays())
    assert launches(text) == ["mamba3_step"]
    (line,) = [line for line in text.splitlines() if "@jax_ssd.launch" in line]
    pairs = re.findall(r"output_operand_alias<output_tuple_indices = \[(\d+)\], operand_index = (\d+)", line)
    assert [int(result) for result, _ in pairs] == [0, 1, 2, 3]  # all that a state is made of


def several_tokens(given, case=CASE):
    """One step of all of them."""
    state = Mamba3State(*(given[name] for name in STATE))
    options: dict[str, Any] = {"rotary": case.rotary}
    return jax_ssd.mamba3_step(state, **{n: a for n, a in given.items() if n not in STATE}, **options)


def test_several_tokens_are_one_custom_call(without_compiling):
    text = lowered(several_tokens, arrays())
    assert launches(text) == ["mamba3_step"] and "stablehlo.while" not in text


# On a mesh of 2 x 4 virtual CPU devices.

SPECS = {
    **dict.fromkeys(("v", "z", "angles"), ("data", None, "model", None)),
    **dict.fromkeys(("adt", "dt", "trap"), ("data", "model", None)),
    **dict.fromkeys(("q_bias", "k_bias", "mimo_v", "mimo_o", "mimo_z", "norm_weight"), ("model", None, None)),
    "D": ("model",),
    "initial_angle": ("data", "model", None),
    "initial_ssm": ("data", "model", None, None),
    "initial_k": ("data", "model", None, None),
    "initial_v": ("data", "model", None),
}


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
@pytest.mark.parametrize("groups", [8, 2], ids=["whole groups", "fewer groups than shards"])
@pytest.mark.parametrize("layout", ["batch and heads", "batch only"])
def test_shards_move_no_activation(groups, layout):
    """Forward and backward, with every option and a state: gradients of parameters are added up, and those of q and k
    where head shards cut through groups."""
    case = cases.Case("", batch=2, seq=12, heads=8, head_dim=4, groups=groups, state=8, rank=2, pairs=2,
                             chunk_size=4)  # fmt: skip
    given = case.inputs()
    by_heads = layout == "batch and heads"
    of_groups = ("data", None, None, "model" if groups == 8 else None, None)

    def spec(name):
        axes = of_groups if name in ("q", "k") else SPECS[name][: given[name].ndim]
        return P(*(axis if by_heads or axis != "model" else None for axis in axes))

    def loss(given):
        return sum((value**2).sum() for value in case.scan(given).values())

    function = jax.value_and_grad(loss)
    want = jax.tree.map(np.asarray, compiled(function, given)(given))
    specs = {name: spec(name) for name in given}
    placed = place(given, specs)
    outs = (NamedSharding(mesh(), P()), {name: NamedSharding(mesh(), specs[name]) for name in given})
    program = compiled(function, placed, out_shardings=outs)
    collectives = moved(program)
    assert set(collectives) == {"all-reduce"}, collectives
    parameters = case.heads * case.rank * max(case.head_dim, case.state)
    large = [size for size in collectives["all-reduce"] if size > parameters]
    assert all(size <= given["q"].size for size in large), collectives
    assert len(large) == (2 if by_heads and groups == 2 else 0), collectives  # the gradients of q and k
    assert_same(program(placed), want)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
def test_shards_of_a_step_move_nothing():
    case = cases.Case("", batch=2, seq=3, heads=8, head_dim=4, groups=8, state=8, rank=2, pairs=2)
    given = case.inputs()
    of_groups = ("data", None, None, "model", None)
    specs = {n: P(*(of_groups if n in ("q", "k") else SPECS[n][: a.ndim])) for n, a in given.items()}
    want = jax.tree.map(np.asarray, compiled(several_tokens, given)(given))
    placed = place(given, specs)
    program = compiled(several_tokens, placed)
    assert not moved(program)
    assert_same(program(placed), want)


# Programs for NVIDIA GPUs.


def test_one_custom_call_per_op(without_compiling):
    assert launches(lowered(run, arrays())) == ["mamba3_forward"]
    assert launches(lowered(jax.value_and_grad(total), arrays())) == ["mamba3_forward", "mamba3_backward"]


@pytest.mark.parametrize(
    "policy, forwards",
    [(jax.checkpoint_policies.save_only_these_names("mamba3_y"), 1), (None, 2)],
    ids=["saves y", "full"],
)
def test_checkpoint(policy, forwards, without_compiling):
    """What follows the scan inside the checkpoint needs y in the backward again: kept by name, or computed again."""

    def objective(given):
        return (jax.checkpoint(lambda given: jnp.tanh(run(given)), policy=policy)(given) ** 2).sum()

    names = launches(lowered(jax.value_and_grad(objective), arrays()))
    assert sorted(names) == ["mamba3_backward"] + ["mamba3_forward"] * forwards


def test_one_trace_serves_both_platforms(without_compiling):
    traced = jax.jit(lambda given: run(given)).trace(arrays())
    assert launches(traced.lower(lowering_platforms=("cpu",)).as_text()) == []
    assert launches(traced.lower(lowering_platforms=("cuda",)).as_text()) == ["mamba3_forward"]


def test_paths_of_a_call_whose_state_is_a_keyword():
    structures = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays())
    state = Mamba3State(*(structures.pop(name) for name in STATE))
    found = paths(jax_ssd.mamba3, **structures, initial_state=state, return_final_state=True, platform="cuda")
    assert [(path.op, path.implementation) for path in found] == [("mamba3_forward", "cuda")]


def test_a_setting_keeps_float32_off_the_tensor_cores(monkeypatch, without_compiling):
    """Within one process and without clearing anything: whoever calls again gets another program."""

    def found(case):
        function = functools.partial(run, case=dataclasses.replace(case, precision="default"))
        (path,) = paths(function, arrays(case), platform="cuda")
        text = jax.jit(lambda given: function(given)).lower(arrays(case)).as_text()
        return path.implementation, path.refusals.get("cuda", ""), "precision = [HIGHEST, HIGHEST]" in text

    assert found(PLAIN)[0] == "cuda"
    monkeypatch.setenv("JAX_SSD_MAMBA3_SCAN", "fma")
    implementation, refusal, full = found(PLAIN)
    assert implementation == "xla" and "which JAX_SSD_MAMBA3_SCAN=fma keeps them off" in refusal
    assert full
    assert found(CASE)[0] == "cuda"  # bfloat16 is left alone
    with pytest.raises(NotImplementedError, match="JAX_SSD_MAMBA3_SCAN=fma"):
        run(arrays(PLAIN), PLAIN, "cuda")
    same = run(arrays(PLAIN), PLAIN, "xla")
    monkeypatch.delenv("JAX_SSD_MAMBA3_SCAN")
    np.testing.assert_array_equal(same, run(arrays(PLAIN), PLAIN, "xla"))


@pytest.mark.parametrize("transform", ["jvp", "linearize", "grad of grad"])
def test_other_derivatives_are_refused_in_words(transform):
    given = arrays(dataclasses.replace(PLAIN, seq=3))
    ones = jax.tree.map(jnp.ones_like, given)
    function = functools.partial(total, case=PLAIN)
    attempts = {
        "jvp": lambda: jax.jvp(function, (given,), (ones,)),
        "linearize": lambda: jax.linearize(function, given)[1](ones),
        "grad of grad": lambda: jax.grad(lambda m: sum(g.sum() for g in jax.grad(function)(m).values()))(given),
    }
    with pytest.raises(NotImplementedError, match="mamba3 has a reverse-mode derivative of first order only"):
        attempts[transform]()


LOAD = """
    import sys
    import jax
    import numpy as np

    folder = sys.argv[1]
    exported = jax.export.deserialize(bytearray(open(f"{folder}/program", "rb").read()))
    results = exported.call(dict(np.load(f"{folder}/arrays.npz")))
    np.savez(f"{folder}/results.npz", **results)
    assert "jax_ssd" not in sys.modules
"""


@pytest.mark.usefixtures("optimized")
def test_export_runs_in_another_process(tmp_path):
    exported = jax.export.export(jax.jit(PLAIN.scan), platforms=("cpu",))(arrays(PLAIN))
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "arrays.npz", **jax.tree.map(np.asarray, arrays(PLAIN)))
    subprocess.run([sys.executable, "-c", textwrap.dedent(LOAD), str(tmp_path)], check=True, timeout=120)
    with np.load(tmp_path / "results.npz") as results:
        for name, want in jax.jit(PLAIN.scan)(arrays(PLAIN)).items():
            np.testing.assert_array_equal(results[name], want)
