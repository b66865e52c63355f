"""What jax transforms make of the operator: derivatives, vmap, checkpoint, scan, lowering for other platforms, export.

Programs for NVIDIA GPUs are lowered here without one and read as text; nothing of them runs.
"""

import dataclasses
import functools
import math
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import compile, config, launch
from jax_ssd.cases import Case
from jax_ssd.tools import check
from tests import emulation

ARCH = "sm_90"
CHUNK = 16
CASE = Case("", batch=2, seq=48, heads=2, head_dim=16, groups=1, state=16, gate=False, dt_limit=(0.0, math.inf))
PER_TOKEN = ("x", "dt", "B", "C", "z")
OPS = tuple(f"{model}_{op}" for model in ("mamba2", "mamba3") for op in ("forward", "backward", "step"))


@functools.cache
def arrays() -> dict[str, jax.Array]:
    return CASE.inputs()


def run(moving, implementation=None, **options):
    return jax_ssd.mamba2(
        **moving, dt_softplus=True, chunk_size=CHUNK, precision="highest", implementation=implementation, **options
    )


def total(moving, implementation=None):
    return (run(moving, implementation) ** 2).sum()


def first_token(given) -> dict[str, jax.Array]:
    """Arguments of mamba2_step."""
    token = {name: array[:, 0] if name in PER_TOKEN else array for name, array in given.items()}
    return {**{n: a for n, a in token.items() if n != "initial_state"}, "state": given["initial_state"]}


def one_step(token, implementation=None, **options):
    return jax_ssd.mamba2_step(**token, dt_softplus=True, implementation=implementation, **options)


def decode(given, implementation=None, **options):
    """mamba2_step over all tokens: y [batch, seq, heads, head_dim] and the last state."""
    fixed = {name: array for name, array in given.items() if name not in (*PER_TOKEN, "initial_state")}

    def token(state, inputs):
        return one_step({"state": state, **fixed, **inputs}, implementation, **options)

    inputs = {name: jnp.moveaxis(given[name], 1, 0) for name in PER_TOKEN if name in given}
    state, y = jax.lax.scan(token, given["initial_state"], inputs)
    return jnp.moveaxis(y, 0, 1), state


def assert_close(got, want, bar=2e-5):
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = check.relative_error(np.asarray(one, np.float64), np.asarray(other, np.float64))
        assert error < bar, (jax.tree_util.keystr(path), error)


# Derivatives that only the reference has.


def tangents(moving):
    return jax.tree.map(jnp.ones_like, moving)


FORWARD_MODE = {
    "jvp": lambda f, moving: jax.jvp(f, (moving,), (tangents(moving),)),
    "linearize": lambda f, moving: jax.linearize(f, moving)[1](tangents(moving)),
    "jacfwd": lambda f, moving: jax.jacfwd(f)(moving),
    "hessian": lambda f, moving: jax.hessian(f)(moving),
    "grad of grad": lambda f, moving: jax.grad(lambda m: sum(g.sum() for g in jax.grad(f)(m).values()))(moving),
}


def called(call: str, implementation=None):
    if call == "mamba2":
        return functools.partial(total, implementation=implementation), arrays()
    return lambda token: (one_step(token, implementation)[1] ** 2).sum(), first_token(arrays())


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    "call, transform",
    # The backward of a step is plain JAX, which can be differentiated again.
    [("mamba2", name) for name in FORWARD_MODE] + [("mamba2_step", name) for name in FORWARD_MODE if "of" not in name],
)
def test_other_derivatives_are_refused_in_words(call, transform, jitted):
    function, moving = called(call)
    attempt = functools.partial(FORWARD_MODE[transform], function)
    with pytest.raises(NotImplementedError) as caught:
        jax.jit(attempt).trace(moving).lower() if jitted else attempt(moving)
    message = str(caught.value)
    assert message.startswith(f"{call} has a reverse-mode derivative of first order only"), message
    assert "implementation='reference' supports them all" in message


@pytest.mark.parametrize("call", ["mamba2", "mamba2_step"])
@pytest.mark.slow
def test_the_reference_has_all_derivatives(call, x64):
    function, moving = called(call, "reference")
    moving = {name: jnp.asarray(np.asarray(array), "float64") for name, array in moving.items()}
    moving = {name: array[:, :5] if call == "mamba2" and name in PER_TOKEN else array for name, array in moving.items()}
    rng = np.random.default_rng(1)
    direction = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape)), moving)
    size = 1e-5

    def moved(scale):
        return jax.tree.map(lambda a, d: a + scale * d, moving, direction)

    _, tangent = jax.jvp(function, (moving,), (direction,))
    difference = (function(moved(size)) - function(moved(-size))) / (2 * size)
    np.testing.assert_allclose(tangent, difference, rtol=1e-6)
    np.testing.assert_allclose(jax.linearize(function, moving)[1](direction), tangent, rtol=1e-12)

    gradient = jax.jit(jax.grad(function))
    forward_over_reverse = jax.jvp(gradient, (moving,), (direction,))[1]

    def along(moving):
        return sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), gradient(moving), direction)))

    assert_close(jax.grad(along)(moving), forward_over_reverse, 1e-10)
    difference = jax.tree.map(lambda a, b: (a - b) / (2 * size), gradient(moved(size)), gradient(moved(-size)))
    assert_close(forward_over_reverse, difference, 1e-5)


# vmap.

PATTERNS = {
    "x": {"x": 0},
    "A": {"A": 0},
    "x and A": {"x": 0, "A": 0},
    "last axis": {"x": -1, "A": -1, "B": -1, "initial_state": -1},
}


@pytest.fixture(scope="module")
def one_example():
    return jax.jit(jax.value_and_grad(total))


def stack(name, axis, count):
    scales = [1.0 + 0.25 * i for i in range(count)]
    return jnp.stack([arrays()[name] * scale for scale in scales], axis)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_vmap_equals_a_loop(pattern, one_example):
    axes = {name: PATTERNS[pattern].get(name) for name in arrays()}
    given = {name: array if axes[name] is None else stack(name, axes[name], 3) for name, array in arrays().items()}
    got = jax.jit(jax.vmap(jax.value_and_grad(total), in_axes=(axes,)))(given)
    for i in range(3):
        one = {name: array if axes[name] is None else jnp.take(array, i, axes[name]) for name, array in given.items()}
        assert_close(jax.tree.map(lambda a, i=i: a[i], got), one_example(one))
    gradients = got[1]
    assert gradients["A"].shape == (3, 2)
    assert not np.array_equal(gradients["A"][0], gradients["A"][1])


def test_nested_vmap_equals_a_loop(one_example):
    """A differs along the inner axis, x along the outer one, B along both."""
    given = arrays() | {"A": stack("A", 0, 3), "x": stack("x", 0, 2)}
    given["B"] = jnp.stack([stack("B", 0, 3), -stack("B", 0, 3)])
    inner = {name: 0 if name in ("A", "B") else None for name in given}
    outer = {name: 0 if name in ("x", "B") else None for name in given}
    got = jax.jit(jax.vmap(jax.vmap(jax.value_and_grad(total), in_axes=(inner,)), in_axes=(outer,)))(given)
    for i in range(2):
        for j in range(3):
            one = given | {"x": given["x"][i], "A": given["A"][j], "B": given["B"][i, j]}
            assert_close(jax.tree.map(lambda a, i=i, j=j: a[i, j], got), one_example(one))


# One token at a time.


@pytest.fixture(params=["reference", "xla", "cutile"])
def implementation(request, monkeypatch):
    if request.param == "cutile" and jax.default_backend() != "gpu":
        emulation.emulate(monkeypatch)
    return request.param


STEP_CASES = {
    "skip per channel": {},
    "skip per head": {"skip": "head", "groups": 2},
    "clamp": {"dt_limit": (0.3, 0.9), "skip": None},
    "bfloat16": {"dtype": "bfloat16", "dt_dtype": "bfloat16"},
    "gate, without bias": {"gate": True, "bias": False},
    "one request": {"batch": 1},
}


@pytest.mark.parametrize("name", STEP_CASES)
def test_steps_equal_the_sequence(name, implementation):
    changes = {"seq": 6, "dt_limit": (0.0, math.inf)} | STEP_CASES[name]
    given = dataclasses.replace(CASE, **changes).inputs()
    limit = changes["dt_limit"]
    y, state = jax.jit(functools.partial(decode, implementation=implementation, dt_limit=limit))(given)
    want = run(given, "reference", dt_limit=limit, return_final_state=True)
    assert (y.dtype, state.dtype) == (given["x"].dtype, jnp.float32)
    assert_close((y, state), want, 1e-2 if name == "bfloat16" else 2e-5)


def test_a_16_bit_state_stays_one(implementation):
    given = {name: a[:, :6] if name in PER_TOKEN else a for name, a in arrays().items()}
    narrow = given | {"initial_state": given["initial_state"].astype("bfloat16")}
    y, state = jax.jit(functools.partial(decode, implementation=implementation))(narrow)
    assert (y.dtype, state.dtype) == (jnp.float32, jnp.bfloat16)
    assert_close((y, state), run(given, "reference", return_final_state=True), 2e-2)


def test_steps_in_float64(x64):
    given = {name: jnp.asarray(np.asarray(a), "float64") for name, a in arrays().items()}
    y, state = jax.jit(functools.partial(decode, implementation="xla"))(given)
    assert (y.dtype, state.dtype) == (jnp.float64, jnp.float64)
    assert_close((y, state), run(given, "reference", return_final_state=True), 1e-12)


@pytest.mark.parametrize("lead", [(), (3, 2), (2, 0)])
def test_a_step_has_any_number_of_leading_axes(lead, implementation):
    token = first_token(dataclasses.replace(CASE, batch=6, seq=1, gate=True).inputs())
    count = math.prod(lead)
    flat = {name: a[:count] if name in (*PER_TOKEN, "state") else a for name, a in token.items()}
    shaped = {name: a.reshape(*lead, *a.shape[1:]) if name in (*PER_TOKEN, "state") else a for name, a in flat.items()}
    state, y = one_step(shaped, implementation)
    assert (state.shape, y.shape) == (shaped["state"].shape, shaped["x"].shape)
    want_state, want_y = one_step(flat, "reference")
    assert_close((state, y), (want_state.reshape(state.shape), want_y.reshape(y.shape)))


STEP_PATTERNS = {
    "parameters": {"A": 0, "D": 0, "dt_bias": 0},
    "last axis": {"state": -1, "x": -1, "B": -1, "z": -1},
}


@pytest.mark.parametrize("pattern", STEP_PATTERNS)
def test_vmap_of_a_step_equals_a_loop(pattern, implementation):
    token = first_token(dataclasses.replace(CASE, seq=1, gate=True).inputs())

    def objective(token):
        state, y = one_step(token, implementation)
        return (y**2).sum() + (state**2).sum(), (state, y)

    function = jax.value_and_grad(objective, has_aux=True)
    axes = {name: STEP_PATTERNS[pattern].get(name) for name in token}
    given = token | {
        name: jnp.stack([token[name] * scale for scale in (1.0, 0.5, 2.0)], axis)
        for name, axis in STEP_PATTERNS[pattern].items()
    }
    got = jax.jit(jax.vmap(function, in_axes=(axes,)))(given)
    alone = jax.jit(function)
    for i in range(3):
        one = {name: a if axes[name] is None else jnp.take(a, i, axes[name]) for name, a in given.items()}
        assert_close(jax.tree.map(lambda a, i=i: a[i], got), alone(one))


def test_gradients_through_steps_equal_those_of_the_scan(implementation):
    weights = jnp.asarray(np.random.default_rng(5).standard_normal(arrays()["x"].shape), jnp.float32)

    def objective(function, given):
        y, state = function(given)
        return (y * weights).sum() + (state**2).sum()

    steps = functools.partial(decode, implementation=implementation)
    by_steps = jax.jit(jax.grad(functools.partial(objective, steps)))(arrays())
    whole = functools.partial(run, return_final_state=True)
    assert_close(by_steps, jax.jit(jax.grad(functools.partial(objective, whole)))(arrays()), 5e-5)


def test_a_step_leaves_its_inputs_as_they_were(implementation):
    token = first_token(arrays())
    before = jax.tree.map(np.array, token)
    one_step(token, implementation)
    assert not any(array.is_deleted() for array in token.values())
    jax.tree.map(np.testing.assert_array_equal, token, before)


def test_a_step_computes_nothing_larger_than_the_state():
    """Above all no chunk of tokens, padded from one."""
    token = first_token(arrays())
    text = jax.jit(one_step).lower(token).as_text()
    sizes = [math.prod(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<((?:\d+x)+)\w+>", text + "x")]
    assert sizes and max(sizes) == token["state"].size
    products = re.findall(r"dot_general.*-> tensor<([\dx]+)xf32>", text)
    assert set(products) == {"2x2x16"}  # batch x heads x head_dim: the state times C


def test_a_decode_loop_does_not_copy_its_state():
    """Beyond the one copy, before the loop, that keeps the caller's array intact."""
    text = jax.jit(decode).lower(arrays()).compile().as_text() or ""
    dims = ",".join(map(str, arrays()["initial_state"].shape))
    computations = re.split(r"\n(?=\S)", text)
    copying = [c.split("(")[0] for c in computations if re.search(rf"= f32\[{dims}\]\S* copy\(", c)]
    assert all(name.startswith("ENTRY") for name in copying), copying


# Programs for NVIDIA GPUs.


@pytest.fixture
def without_compiling(monkeypatch):
    """The custom call is the true one but for its cubins, which take seconds; each lowering says so in its plan."""
    monkeypatch.setattr(compile, "compile_launches", lambda requests, arch: [])
    monkeypatch.setattr(launch, "encode", lambda plan, cubins: {"plan": np.frombuffer(plan.name.encode(), np.uint8)})
    with config.override(target_arch=ARCH):
        yield


def lowered(function, *arguments, platforms=("cuda",)) -> str:
    """The program's text. JAX keeps what it has lowered, so a new function each time."""
    return jax.jit(lambda *a: function(*a)).trace(*arguments).lower(lowering_platforms=platforms).as_text()


def launches(text: str) -> list[str]:
    """The plan of every custom call, in order."""
    names = []
    for line in text.splitlines():
        if "@jax_ssd.launch" in line:
            words = re.search(r'plan = dense<(?:"0x([0-9A-F]+)"|\[([\d, ]+)\])>', line)
            assert words is not None, line[:500]
            data = bytes.fromhex(words[1]) if words[1] else bytes(int(n) for n in words[2].split(","))
            names.append(next(name for name in OPS if name.encode() in data))
    return names


@pytest.mark.slow
def test_one_custom_call_with_real_kernels(tmp_path_factory):
    with config.override(target_arch=ARCH, cache_dir=tmp_path_factory.mktemp("kernels")):
        text = lowered(jax.value_and_grad(total), arrays())
        assert launches(text) == ["mamba2_forward", "mamba2_backward"]
        assert launches(lowered(one_step, first_token(arrays()))) == ["mamba2_step"]


def test_one_custom_call_per_op(without_compiling):
    assert launches(lowered(run, arrays())) == ["mamba2_forward"]
    assert launches(lowered(jax.value_and_grad(total), arrays())) == ["mamba2_forward", "mamba2_backward"]
    assert launches(lowered(one_step, first_token(arrays()))) == ["mamba2_step"]


@pytest.mark.parametrize("axis", ["batch", "seq", "heads", "head_dim", "state"])
def test_an_empty_call_launches_nothing(axis, without_compiling):
    empty = dataclasses.replace(CASE, **{axis: 0, **({"groups": 0} if axis == "heads" else {})}).inputs()
    assert launches(lowered(jax.value_and_grad(lambda given: total(given, "cutile")), empty)) == []
    if axis != "seq":
        assert launches(lowered(functools.partial(one_step, implementation="cutile"), first_token(empty))) == []


@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_custom_call_under_vmap(pattern, without_compiling):
    axes = {name: PATTERNS[pattern].get(name) for name in arrays()}
    given = {name: array if axes[name] is None else stack(name, axes[name], 3) for name, array in arrays().items()}
    text = lowered(jax.vmap(jax.value_and_grad(total), in_axes=(axes,)), given)
    assert launches(text) == ["mamba2_forward", "mamba2_backward"]
    assert "stablehlo.while" not in text


def test_one_custom_call_under_nested_vmap(without_compiling):
    given = arrays() | {"A": stack("A", 0, 3), "x": stack("x", 0, 2)}
    inner = {name: 0 if name == "A" else None for name in given}
    outer = {name: 0 if name == "x" else None for name in given}
    nested = jax.vmap(jax.vmap(jax.value_and_grad(total), in_axes=(inner,)), in_axes=(outer,))
    assert launches(lowered(nested, given)) == ["mamba2_forward", "mamba2_backward"]
    token = first_token(arrays())
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), token)
    assert launches(lowered(jax.vmap(one_step), stacked)) == ["mamba2_step"]


def test_a_decode_loop_overwrites_its_state(without_compiling):
    text = lowered(decode, arrays())
    assert launches(text) == ["mamba2_step"]
    (line,) = [line for line in text.splitlines() if "@jax_ssd.launch" in line]
    alias = "output_operand_alias<output_tuple_indices = [0], operand_index = 0, operand_tuple_indices = []>"
    assert alias in line


@pytest.mark.parametrize(
    "policy, forwards",
    [(jax.checkpoint_policies.save_only_these_names("mamba2_y"), 1), (None, 2)],
    ids=["saves y", "full"],
)
def test_checkpoint(policy, forwards, without_compiling):
    """What follows the scan inside the checkpoint needs y in the backward again: kept by name, or computed again."""

    def layer(given):
        return jnp.tanh(run(given))

    def objective(given):
        return (jax.checkpoint(layer, policy=policy)(given) ** 2).sum()

    names = launches(lowered(jax.value_and_grad(objective), arrays()))
    assert sorted(names) == ["mamba2_backward"] + ["mamba2_forward"] * forwards


def test_checkpoint_changes_no_gradient():
    layer = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names("mamba2_y"))
    kept = jax.jit(jax.grad(lambda given: (layer(given) ** 2).sum()))(arrays())
    assert_close(kept, jax.jit(jax.grad(total))(arrays()), 1e-6)


def test_one_trace_serves_both_platforms(without_compiling):
    text = lowered(run, arrays(), platforms=("cpu", "cuda"))
    assert launches(text) == ["mamba2_forward"]
    assert "stablehlo.while" in text  # the chunks of "xla", in the branch for the CPU
    traced = jax.jit(lambda given: run(given)).trace(arrays())
    assert launches(traced.lower(lowering_platforms=("cpu",)).as_text()) == []
    assert launches(traced.lower(lowering_platforms=("cuda",)).as_text()) == ["mamba2_forward"]


# What would run.


def paths(function, *arguments, **keywords):
    with config.override(target_arch=ARCH):
        return jax_ssd.dispatch_paths(function, *arguments, **keywords)


def test_paths_on_the_cpu():
    (path,) = paths(jax_ssd.mamba2, **arrays(), chunk_size=CHUNK, platform="cpu")
    assert (path.op, path.implementation, path.plan) == ("mamba2_forward", "xla", None)
    assert "this program is compiled for 'cpu'" in path.refusals["cutile"]
    assert str(path).splitlines()[0].startswith("mamba2_forward: xla   (float32[2,48,2,16], float32[2,48,2], ")
    assert "\n  not cutile: its kernels run on NVIDIA GPUs" in str(path)


def test_paths_on_a_gpu():
    (path,) = paths(jax_ssd.mamba2, **arrays(), chunk_size=CHUNK, platform="cuda")
    assert (path.op, path.implementation) == ("mamba2_forward", "cutile")
    assert path.plan is not None and path.plan.name == "mamba2_forward"
    assert "  launch" in str(path).replace("    ", "  ") and "grid" in str(path)


def test_paths_without_an_architecture(monkeypatch):
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    monkeypatch.delenv("JAX_SSD_TARGET_ARCH", raising=False)
    (path,) = jax_ssd.dispatch_paths(run, arrays(), platform="cuda")
    assert path.implementation == "xla"
    assert "JAX sees no CUDA device" in path.refusals["cutile"]
    assert "float32" in path.refusals["cuda"]


def test_paths_of_a_gradient():
    names = [(path.op, path.implementation) for path in paths(jax.grad(total), arrays(), platform="cuda")]
    assert ("mamba2_backward", "cutile") in names
    assert names == [("mamba2_forward", "cutile"), ("mamba2_backward", "cutile")]


def test_paths_of_a_whole_function():
    """Jitted, with a loop and a checkpoint in it, and no array at hand."""

    @jax.jit
    def model(given):
        y = jax.checkpoint(run)(given)
        tokens, _ = decode(given)
        return y + tokens + run(given, "reference")

    structures = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays())
    for platform, scan, step in (("cpu", "xla", "xla"), ("cuda", "cutile", "cuda")):
        found = [(path.op, path.implementation) for path in paths(model, structures, platform=platform)]
        assert found == [("mamba2_forward", scan), ("mamba2_step", step), ("mamba2", "reference")]


def test_paths_name_what_was_refused():
    given = CASE.inputs() | {"initial_state": jnp.ones((2, 2, 16, 300))}
    given |= {name: jnp.ones((2, 48, 1, 300)) for name in ("B", "C")}
    (path,) = paths(run, given, platform="cuda")
    assert path.implementation == "xla"
    assert "up to 256, got 300" in path.refusals["cutile"]
    assert "\n  not cutile: " in str(path)


def test_paths_of_an_order_that_this_platform_cannot_follow():
    (path,) = paths(functools.partial(run, implementation="cutile"), arrays(), platform="cpu")
    assert (path.implementation, path.plan, list(path.refusals)) == ("none", None, ["cutile"])


@pytest.mark.parametrize("platform", ["gpu", "tpu", "rocm", ""])
def test_paths_of_an_unknown_platform(platform):
    with pytest.raises(ValueError, match=f"platform: expected 'cpu' or 'cuda', got '{platform}'"):
        jax_ssd.dispatch_paths(run, arrays(), platform=platform)


# Export.

LOAD = """
    import sys
    import jax
    import numpy as np

    folder = sys.argv[1]
    exported = jax.export.deserialize(bytearray(open(f"{folder}/program", "rb").read()))
    results = exported.call(dict(np.load(f"{folder}/arrays.npz")))
    np.savez(f"{folder}/results.npz", *results)
    assert "jax_ssd" not in sys.modules
"""


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda")])
def test_export_runs_in_another_process(platforms, tmp_path, without_compiling):
    checks = [jax.export.DisabledSafetyCheck.custom_call("jax_ssd.launch")] if "cuda" in platforms else []
    function = jax.jit(lambda given: run(given, return_final_state=True))
    exported = jax.export.export(function, platforms=platforms, disabled_checks=checks)(arrays())
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "arrays.npz", **jax.tree.map(np.asarray, arrays()))
    command = [sys.executable, "-c", textwrap.dedent(LOAD), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    with np.load(tmp_path / "results.npz") as results:
        for got, want in zip(results.values(), function(arrays()), strict=True):
            np.testing.assert_array_equal(got, want)
