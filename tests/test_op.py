"""What every op of the library does, whatever it computes."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import compile, ffi_targets, op
from jax_ssd.cases import Case
from jax_ssd.mamba2 import ops

CASE = Case("", batch=2, seq=5, heads=2, head_dim=4, groups=1, state=8, gate=False)


def scan(arrays, **options):
    return jax_ssd.mamba2(**arrays, dt_softplus=True, chunk_size=4, **options)


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
@pytest.mark.slow
def test_without_jit(implementation):
    arrays = CASE.inputs()

    def total(arrays):
        return (scan(arrays, implementation=implementation) ** 2).sum()

    expected = jax.grad(total)(arrays)
    with jax.disable_jit():
        got = jax.grad(total)(arrays)
        state, _ = jax_ssd.mamba2_step(
            arrays["initial_state"],
            *(arrays[name][:, 0] if name != "A" else arrays[name] for name in ("x", "dt", "A", "B", "C")),
        )
    assert state.shape == arrays["initial_state"].shape
    for name, gradient in got.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mapped", [("x", "dt", "B", "C", "initial_state"), ("A",), ("x", "A")])
def test_vmap_over_nothing(mapped):
    arrays = CASE.inputs()
    given = {name: jnp.zeros((0, *a.shape)) if name in mapped else a for name, a in arrays.items()}
    axes: dict[str, Any] = {name: 0 if name in mapped else None for name in given}

    def both(arrays):
        return scan(arrays, return_final_state=True), jax.grad(lambda arrays: scan(arrays).sum())(arrays)

    (y, final), gradients = jax.vmap(both, in_axes=(axes,))(given)
    assert y.shape == (0, *arrays["x"].shape)
    assert final.shape == (0, *arrays["initial_state"].shape)
    assert {name: g.shape for name, g in gradients.items()} == {name: (0, *a.shape) for name, a in arrays.items()}


def gpu(capability: str):
    return types.SimpleNamespace(platform="gpu", compute_capability=capability)


def planned(monkeypatch, here, devices):
    """The plan of a call in a process that sees the GPUs `here`, for a program on `devices`."""
    monkeypatch.delenv("JAX_SSD_TARGET_ARCH", raising=False)
    monkeypatch.setattr(compile, "_cuda_devices", lambda: here)
    monkeypatch.setattr(ffi_targets, "missing", lambda: None)
    arrays = {name: array for name, array in CASE.inputs().items() if name in ("x", "dt", "A", "B", "C")}
    spec = ops.Spec(tuple(arrays), False, (0.0, float("inf")), False, None, "default", ("cutile",))
    avals = [jax.typeof(a[None] if name == "A" else a) for name, a in arrays.items()]
    return op.kernel_plan(ops.FORWARD, spec, "cutile", "cuda", avals, devices)


def test_another_gpu_of_the_host_does_not_matter(monkeypatch):
    old, new = gpu("7.0"), gpu("9.0")
    assert planned(monkeypatch, [old, new], [new]) is not None
    assert planned(monkeypatch, [old, new], None) is not None
    with pytest.raises(NotImplementedError, match=r"compute capability 7\.0"):
        planned(monkeypatch, [old, new], [old])
    with pytest.raises(NotImplementedError, match=r"compute capability 7\.0"):
        planned(monkeypatch, [old, old], None)


def test_one_gpu_that_takes_the_plan_is_enough_in_tracing(monkeypatch):
    def check(self, arch):
        if arch == "sm_80":
            raise NotImplementedError("too little shared memory on sm_80")

    monkeypatch.setattr(op.Plan, "check", check)
    here = [gpu("8.0"), gpu("9.0")]
    assert planned(monkeypatch, here, None) is not None
    assert planned(monkeypatch, here, here[1:]) is not None
    with pytest.raises(NotImplementedError, match="too little shared memory"):
        planned(monkeypatch, here, here[:1])
