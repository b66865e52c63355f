"""What is wrong with a call is said in words: the argument, what was expected, what came, and the cure.

Every case is refused while tracing, the same way eagerly and inside jax.jit and jax.eval_shape.
"""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import config, cutile, ffi_targets, nvrtc
from jax_ssd.cases import Case

BATCH, SEQ, HEADS, HEAD_DIM, GROUPS, STATE = 2, 5, 4, 8, 2, 16
ARRAYS = Case(
    "", batch=BATCH, seq=SEQ, heads=HEADS, head_dim=HEAD_DIM, groups=GROUPS, state=STATE, dt_limit=(0.0, math.inf)
).inputs()
STEP_ARRAYS = {n: a[:, 0] if n in ("x", "dt", "B", "C", "z") else a for n, a in ARRAYS.items()}
STEP_ARRAYS["state"] = STEP_ARRAYS.pop("initial_state")
CALLS = {"mamba2": (jax_ssd.mamba2, ARRAYS), "mamba2_step": (jax_ssd.mamba2_step, STEP_ARRAYS)}

# A call of the size and type of a model, which every kernel takes.
_WIDE = Case("", batch=4, seq=64, heads=16, head_dim=64, groups=1, state=64, dtype="bfloat16", gate=False).inputs()
_WIDE_STEP = {n: a[:, 0] if n in ("x", "dt", "B", "C") else a for n, a in _WIDE.items() if n != "initial_state"}
MODEL = {"mamba2": _WIDE, "mamba2_step": _WIDE_STEP | {"state": _WIDE["initial_state"]}}

# Words that must all be in a message.
Words = tuple[str, ...]


def attempts(function, arguments, static):
    """The same call eagerly and traced in two ways. Only jax arrays are traced; the rest stays as it is."""
    traced = {n: a for n, a in arguments.items() if isinstance(a, jax.Array) and n not in static}
    fixed = {n: a for n, a in arguments.items() if n not in traced}
    yield lambda: function(**arguments)
    yield lambda: jax.eval_shape(functools.partial(function, **fixed), **traced)
    yield lambda: jax.jit(functools.partial(function, **fixed)).trace(**traced)


def check_refused(error, words: Words, function, arguments, static=()):
    for attempt in attempts(function, arguments, static):
        with pytest.raises(error) as caught:
            attempt()
        assert type(caught.value) is error
        for word in words:
            assert word in str(caught.value), caught.value


def normal(*shape, dtype="float32"):
    return jnp.ones(shape, dtype)


# Each argument with one axis too long, by the axes it should have.
SHAPES = {
    "mamba2": {
        "dt": "(..., seq, heads) = (2, 5, 4)",
        "A": "(heads) = (4,)",
        "B": "(..., seq, groups, state) = (2, 5, 2, 16)",
        "C": "(..., seq, groups, state) = (2, 5, 2, 16)",
        "D": "(heads, head_dim) = (4, 8)",
        "z": "(..., seq, heads, head_dim) = (2, 5, 4, 8)",
        "dt_bias": "(heads) = (4,)",
        "initial_state": "(..., heads, head_dim, state) = (2, 4, 8, 16)",
    },
    "mamba2_step": {
        "state": "(..., heads, head_dim, state) = (2, 4, 8, 16)",
        "dt": "(..., heads) = (2, 4)",
        "A": "(heads) = (4,)",
        "B": "(..., groups, state) = (2, 2, 16)",
        "C": "(..., groups, state) = (2, 2, 16)",
        "D": "(heads, head_dim) = (4, 8)",
        "z": "(..., heads, head_dim) = (2, 4, 8)",
        "dt_bias": "(heads) = (4,)",
    },
}


@pytest.mark.parametrize("call, argument", [(call, argument) for call, table in SHAPES.items() for argument in table])
def test_shapes_that_disagree(call, argument):
    function, arrays = CALLS[call]
    expected, right = SHAPES[call][argument], arrays[argument].shape
    for axis in range(len(right)):
        if argument == "B" and axis >= len(right) - 2:
            continue  # groups and state are what B says: the others disagree with it
        wrong = tuple(n + (i == axis) for i, n in enumerate(right))
        words = (f"{call}: {argument}: expected shape {expected}, got {wrong}", f"transpose {argument}")
        check_refused(ValueError, words, function, arrays | {argument: normal(*wrong)})


@pytest.mark.parametrize("call, argument", [(call, argument) for call, table in SHAPES.items() for argument in table])
def test_a_rank_that_disagrees(call, argument):
    function, arrays = CALLS[call]
    right = arrays[argument].shape
    for wrong in (right[1:], (1, *right)):
        if argument == "D" and len(wrong) == 1:
            continue  # D may be [heads]; of another length it is among the layouts below
        words = [f"{call}: {argument}: expected", str(wrong)]
        if argument == "D":
            words = [f"{call}: D: expected shape (heads) = (4,), got {wrong}"]
        check_refused(ValueError, tuple(words), function, arrays | {argument: normal(*wrong)})


@pytest.mark.parametrize(
    "call, argument, shape, words",
    [
        ("mamba2", "x", (4, 8), "x: expected at least 3 axes (..., seq, heads, head_dim), got shape (4, 8)"),
        ("mamba2", "B", (2, 16), "B: expected at least 3 axes (..., seq, groups, state), got shape (2, 16)"),
        ("mamba2_step", "x", (8,), "x: expected at least 2 axes (..., heads, head_dim), got shape (8,)"),
        ("mamba2_step", "B", (16,), "B: expected at least 2 axes (..., groups, state), got shape (16,)"),
    ],
)
def test_too_few_axes(call, argument, shape, words):
    function, arrays = CALLS[call]
    check_refused(ValueError, (words, "add the missing axes"), function, arrays | {argument: normal(*shape)})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("groups", [0, 3, 8])
def test_heads_that_are_no_multiple_of_the_groups(call, groups):
    function, arrays = CALLS[call]
    B = normal(*arrays["B"].shape[:-2], groups, STATE)
    words = (
        f"{call}: B: expected a number of groups that divides the 4 heads of x, got {groups} groups",
        "heads / groups neighbouring heads",
    )
    check_refused(ValueError, words, function, arrays | {"B": B, "C": B})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("argument", ["A", "D", "dt_bias"])
@pytest.mark.parametrize("shape", [(), (1,), (1, HEADS), (HEADS, 1), (1, 1), (HEAD_DIM,)])
def test_parameters_that_would_be_broadcast(call, argument, shape):
    function, arrays = CALLS[call]
    expected = "(heads, head_dim) = (4, 8)" if argument == "D" and len(shape) == 2 else "(heads) = (4,)"
    words = (f"{call}: {argument}: expected shape {expected}, got {shape}", "reshape, broadcast or transpose")
    check_refused(ValueError, words, function, arrays | {argument: normal(*shape)})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn"])
def test_types_that_are_not_floating(call, dtype):
    function, arrays = CALLS[call]
    for argument, array in arrays.items():
        words = (f"{call}: {argument}: expected a floating type out of ('bfloat16',", f"got {dtype}", ".astype")
        check_refused(TypeError, words, function, arrays | {argument: normal(*array.shape, dtype=dtype)})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("argument", ["B", "C", "z"])
def test_types_that_differ_from_that_of_x(call, argument):
    function, arrays = CALLS[call]
    words = (f"{call}: {argument}: expected float32 (the type of x), got bfloat16", ".astype('float32')")
    check_refused(TypeError, words, function, arrays | {argument: arrays[argument].astype("bfloat16")})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "x, dt, expected",
    [("float32", "bfloat16", "float32"), ("bfloat16", "float16", "bfloat16 or float32")],
)
def test_types_of_dt(call, x, dt, expected):
    function, arrays = CALLS[call]
    cast = {n: a.astype(x) for n, a in arrays.items() if n in ("x", "B", "C", "z")}
    words = (f"{call}: dt: expected {expected} (the type of x, or its accumulator's), got {dt}", ".astype(")
    check_refused(TypeError, words, function, {**arrays, **cast, "dt": arrays["dt"].astype(dt)})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", ["text", object()])
def test_what_is_no_array(call, value):
    function, arrays = CALLS[call]
    for argument in arrays:
        words = (f"{call}: {argument}: expected an array, got {type(value).__name__}", "pass a jax or numpy array")
        check_refused(TypeError, words, function, arrays | {argument: value})


@pytest.mark.parametrize("call", CALLS)
def test_only_optional_arguments_may_be_none(call):
    function, arrays = CALLS[call]
    for argument in arrays:
        call_of = functools.partial(function, **(arrays | {argument: None}))
        if argument in ("D", "z", "dt_bias", "initial_state"):
            jax.eval_shape(call_of)
            continue
        words = (f"{call}: {argument}: expected an array, got NoneType", "pass a jax or numpy array")
        check_refused(TypeError, words, function, arrays | {argument: None})


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "limit, error",
    [
        ((0.5, 0.1), ValueError),
        ((0.0, NAN), ValueError),
        ((NAN, 1.0), ValueError),
        ((INFINITY, INFINITY), ValueError),
        ((-INFINITY, -INFINITY), ValueError),
        (0.5, TypeError),
        ((0.1,), TypeError),
        ((0.0, 0.1, 0.2), TypeError),
        (("low", "high"), TypeError),
        (None, TypeError),
    ],
)
def test_dt_limit(call, limit, error):
    function, arrays = CALLS[call]
    expected = "low <= high" if error is ValueError else "two numbers (low, high)"
    words = (f"{call}: dt_limit: expected {expected}", f"got {limit!r}", "pass for instance (0.0, float('inf'))")
    check_refused(error, words, function, arrays | {"dt_limit": limit})


@pytest.mark.parametrize("call", CALLS)
def test_a_traced_dt_limit(call):
    function, arrays = CALLS[call]
    with pytest.raises(TypeError, match="dt_limit: expected two numbers"):
        jax.eval_shape(lambda high: function(**arrays, dt_limit=(0.0, high)), 1.0)


@pytest.mark.parametrize(
    "call, name", [("mamba2", "dt_softplus"), ("mamba2", "return_final_state"), ("mamba2_step", "dt_softplus")]
)
@pytest.mark.parametrize("value", [0, 1, None, "yes", jnp.array(True)])
def test_flags(call, name, value):
    function, arrays = CALLS[call]
    words = (f"{call}: {name}: expected True or False, got {value!r}", "pass a Python bool")
    check_refused(TypeError, words, function, arrays | {name: value}, static=(name,))


@pytest.mark.parametrize("value, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_chunk_size(value, error):
    expected = "at least 1 token" if error is ValueError else "an integer or None"
    words = (f"mamba2: chunk_size: expected {expected}, got {value!r}", "pass for instance 64")
    check_refused(error, words, jax_ssd.mamba2, ARRAYS | {"chunk_size": value})


@pytest.mark.parametrize("value", ["exact", "", 3, [], jax.lax.DotAlgorithmPreset.F16_F16_F16])
def test_precision(value):
    words = ("mamba2: precision: expected one of ('default',", f"got {value!r}", "pass 'highest'")
    check_refused(ValueError, words, jax_ssd.mamba2, ARRAYS | {"precision": value})


@pytest.mark.parametrize("shape", [(SEQ,), (BATCH, SEQ + 1), (BATCH, SEQ, 1), (1, SEQ)])
def test_segment_ids_of_another_shape(shape):
    words = (f"mamba2: segment_ids: expected shape (..., seq) = (2, 5), got {shape}", "transpose segment_ids")
    check_refused(ValueError, words, jax_ssd.mamba2, ARRAYS | {"segment_ids": normal(*shape, dtype="int32")})


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_segment_ids_that_are_not_integers(dtype):
    words = (f"mamba2: segment_ids: expected an integer type, got {dtype}", "convert it to int32")
    ids = normal(BATCH, SEQ, dtype=dtype)
    check_refused(TypeError, words, jax_ssd.mamba2, ARRAYS | {"segment_ids": ids})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "value, error, expected, cure",
    [
        ("triton", ValueError, "names out of ('cutile', 'cuda', 'xla', 'reference')", "correct the name"),
        ("", ValueError, "names out of ('cutile', 'cuda', 'xla', 'reference')", "pass None"),
        (("xla", "triton"), ValueError, "names out of ('cutile', 'cuda', 'xla', 'reference')", "correct the name"),
        ([], ValueError, "names out of ('cutile', 'cuda', 'xla', 'reference')", "pass None"),
        (3, TypeError, "a name, a sequence of names or None", "pass for instance 'xla'"),
        (["xla", 3], TypeError, "a name, a sequence of names or None", "pass for instance 'xla'"),
        ({"xla"}, TypeError, "a name, a sequence of names or None", "pass for instance 'xla'"),
    ],
)
def test_implementation(call, value, error, expected, cure):
    function, arrays = CALLS[call]
    words = (f"implementation: expected {expected}, got {value!r}", cure)
    check_refused(error, words, function, arrays | {"implementation": value})


# Valid calls that the kernels asked for by name cannot serve.


def no_gpu_here() -> bool:
    return jax.default_backend() != "gpu"


@pytest.mark.skipif(not no_gpu_here(), reason="there is a GPU")
@pytest.mark.parametrize("implementation", ["cutile", "cuda"])
@pytest.mark.parametrize("call, op", [("mamba2", "mamba2_forward"), ("mamba2_step", "mamba2_step")])
def test_kernels_without_a_gpu(call, op, implementation, monkeypatch):
    monkeypatch.delenv("JAX_SSD_TARGET_ARCH", raising=False)
    function, arrays = CALLS[call][0], MODEL[call]
    words = (
        f"{op}: implementation '{implementation}': JAX sees no CUDA device",
        "Set JAX_SSD_TARGET_ARCH",
        "sm_90",
        "to compile without a GPU",
        "'xla' takes every call",
    )
    check_refused(NotImplementedError, words, function, arrays | {"implementation": implementation})


def test_kernels_of_another_type():
    function, arrays = CALLS["mamba2"]
    words = (
        "mamba2_forward: implementation 'cuda': the CUDA C++ kernels take bfloat16, got float32",
        "'xla' takes every call, and None chooses",
    )
    check_refused(NotImplementedError, words, function, arrays | {"implementation": "cuda"})


def test_every_reason_is_listed_when_all_decline():
    with config.override(target_arch="sm_90"):
        words = (
            "implementation 'cutile': the cuTile kernels take a chunk_size",
            "implementation 'cuda': the CUDA C++ kernels take bfloat16",
        )
        arguments = ARRAYS | {"implementation": ("cutile", "cuda"), "chunk_size": 50}
        check_refused(NotImplementedError, words, jax_ssd.mamba2, arguments)


@pytest.mark.parametrize("call", CALLS)
def test_kernels_in_a_program_for_the_cpu(call):
    """Only lowering knows the platform: the trace is fine, for a GPU elsewhere."""
    function, arrays = CALLS[call]
    with config.override(target_arch="sm_90"):
        run = functools.partial(function, implementation="cutile")
        traced = jax.jit(run).trace(**arrays)
        with pytest.raises(NotImplementedError) as caught:
            traced.lower(lowering_platforms=("cpu",))
    for word in (
        "implementation 'cutile': its kernels run on NVIDIA GPUs, and this program is compiled for 'cpu'",
        "run it on a GPU, or choose 'xla'",
    ):
        assert word in str(caught.value)


@pytest.mark.parametrize("implementation", ["cutile", "cuda"])
@pytest.mark.parametrize("call, op", [("mamba2", "mamba2_forward"), ("mamba2_step", "mamba2_step")])
def test_kernels_without_the_extension(call, op, implementation, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_ssd._ffi", None)
    monkeypatch.delattr("jax_ssd._ffi", raising=False)
    assert ffi_targets.missing() is not None
    function, arrays = CALLS[call][0], MODEL[call]
    reason = f"{op}: implementation '{implementation}': the extension jax_ssd._ffi cannot be imported"
    with config.override(target_arch="sm_90"):
        words = (reason, "`pip install -e .`")
        check_refused(NotImplementedError, words, function, arrays | {"implementation": implementation})


@pytest.mark.parametrize("implementation, package", [("cutile", "cuda-tile"), ("cuda", "cuda-bindings")])
@pytest.mark.parametrize("call", CALLS)
def test_kernels_without_their_compiler(call, implementation, package, monkeypatch, tmp_path):
    """Only compiling needs it, so what is in the cache runs without."""
    monkeypatch.setattr(cutile, "_cuda_tile_installed", lambda: False)
    monkeypatch.setattr(nvrtc, "_bindings_installed", lambda: False)
    function, arrays = CALLS[call][0], MODEL[call]
    with config.override(target_arch="sm_90", cache_dir=tmp_path):
        run = functools.partial(function, implementation=implementation)
        with pytest.raises(NotImplementedError, match=f"implementation '{implementation}': .*{package}") as caught:
            jax.jit(run).trace(**arrays).lower(lowering_platforms=("cuda",))
    assert "pip install" in str(caught.value)


def refused_sizes():
    wide = {"initial_state": normal(2, 4, 8, 300), "B": normal(2, 5, 2, 300), "C": normal(2, 5, 2, 300)}
    step_wide = {"state": normal(2, 4, 8, 300), "B": normal(2, 2, 300), "C": normal(2, 2, 300)}
    negative = {"dt_limit": (-1.0, 1.0)}
    return [
        ("mamba2", wide, ("a state size up to 256, got 300",)),
        ("mamba2_step", step_wide, ("a state size up to 256, got 300",)),
        *(
            ("mamba2", {"chunk_size": chunk}, ("a chunk_size of 16, 32, 64, 128", f"got {chunk}", "leave it out"))
            for chunk in (1, 40, 50, 100, 200, 256)
        ),
        ("mamba2", negative, ("steps >= 0: dt_limit from 0 on, or dt_softplus", "got dt_limit=(-1.0, 1.0)")),
        ("mamba2_step", negative, ("steps >= 0: dt_limit from 0 on, or dt_softplus", "got dt_limit=(-1.0, 1.0)")),
    ]


@pytest.mark.parametrize("call, changes, words", refused_sizes())
def test_sizes_that_the_kernels_refuse(call, changes, words):
    function, arrays = CALLS[call]
    words = ("implementation 'cutile': the cuTile kernels take", *words, "use implementation='xla'")
    with config.override(target_arch="sm_90"):
        check_refused(NotImplementedError, words, function, arrays | changes | {"implementation": "cutile"})


def test_a_backward_that_the_kernels_refuse():
    """Refused by the trace of the gradient, before anything has run; the forward alone would be served."""
    wide = Case("", batch=1, seq=SEQ, heads=1, head_dim=300, groups=1, state=STATE).inputs()

    def forward(**arrays):
        return jax_ssd.mamba2(**arrays, implementation="cutile").sum()

    def gradient(**arrays):
        return jax.grad(lambda arrays: forward(**arrays))(arrays)

    words = ("mamba2_backward: implementation 'cutile'", "a head_dim up to 256, got 300", "use implementation='xla'")
    with config.override(target_arch="sm_90"):
        jax.eval_shape(forward, **wide)
        for traced in (jax.eval_shape, lambda f, **arrays: jax.jit(f).trace(**arrays)):
            with pytest.raises(NotImplementedError) as caught:
                traced(gradient, **wide)
            assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("call", CALLS)
def test_float64_is_refused_by_the_kernels(call, x64):
    function, arrays = CALLS[call]
    wide = {n: jnp.asarray(np.asarray(a), "float64") for n, a in arrays.items()}
    words = ("the cuTile kernels take bfloat16, float16, float32, got float64", "use implementation='xla'")
    with config.override(target_arch="sm_90"):
        check_refused(NotImplementedError, words, function, wide | {"implementation": "cutile"})


@pytest.mark.parametrize("call, changes, words", refused_sizes())
def test_the_default_takes_what_the_kernels_refuse(call, changes, words):
    function, arrays = CALLS[call]
    with config.override(target_arch="sm_90"):
        (path,) = jax_ssd.dispatch_paths(function, **{**arrays, **changes}, platform="cuda")
    if call == "mamba2_step":  # whose CUDA C++ kernel takes them, and is asked first
        assert path.implementation == "cuda" and not path.refusals
    else:
        assert path.implementation == "xla" and set(path.refusals) == {"cuda", "cutile"}
        assert all(word in path.refusals["cutile"] for word in words)
