"""The op between a Mamba-2 layer's projections: plain JAX and the kernel's source against float64; its plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssd import config
from jax_ssd.mamba2 import mixer, plan_cuda_mixer
from tests import cuda_emulator
from tests.compilation import compile_plan
from tests.mixer_steps import CHANGES, MODEL, check, mixer_problem, random_operands

emulated = pytest.mark.skipif(cuda_emulator.missing() is not None, reason=str(cuda_emulator.missing()))


def run_xla(spec: mixer.Spec, operands: dict[str, np.ndarray]) -> dict[str, Any]:
    chosen = dataclasses.replace(spec, implementation=("xla",))
    given = mixer.Operands(**{name: jnp.asarray(array) for name, array in operands.items()})
    results = jax.jit(lambda given: mixer.step(chosen, given))(given)
    return dict(zip(("new_state", "new_window_x", "new_window_bc", "y"), results, strict=True))


@pytest.mark.parametrize("changes", CHANGES)
def test_plain_jax_equals_float64(changes):
    p, spec = mixer_problem(**CHANGES[changes])
    operands = random_operands(p, CHANGES[changes].get("first_head", 0))
    check(p, operands, run_xla(spec, operands))


@emulated
@pytest.mark.parametrize("changes", CHANGES)
def test_the_kernel_equals_float64(changes):
    p, _ = mixer_problem(**CHANGES[changes])
    operands = random_operands(p, CHANGES[changes].get("first_head", 0))
    check(p, operands, cuda_emulator.run(plan_cuda_mixer.step(p), operands))


@pytest.mark.parametrize("arch", config.SUPPORTED_ARCHS)
def test_compiles(arch):
    for changes in ({"batch": 64}, {"batch": 1}, {"window": "float32", "state_dtype": "float16", "groups": 4}):
        p, _ = mixer_problem(**{**MODEL, **changes})
        (cubin,) = compile_plan(plan_cuda_mixer.step(p), arch)
        assert cubin.registers <= 128


def test_one_launch_replaces_what_is_carried():
    p, _ = mixer_problem(**MODEL, batch=64)
    made = plan_cuda_mixer.step(p)
    assert len(made.launches) == 1 and made.scratch == ()
    assert made.aliases == {name: f"new_{name}" for name in plan_cuda_mixer.CARRIED}
    assert "on grid 1536 x 1 x 1, block 256 x 1 x 1" in made.describe()


def test_rows_fill_the_gpu():
    def rows(**changes: Any) -> int:
        return plan_cuda_mixer.rows(mixer_problem(**{**MODEL, **changes})[0])

    assert rows(batch=64) == 8
    assert rows(batch=1) == 1
    assert rows(batch=64, state=512) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float64"}, "takes y in bfloat16, float16, float32, got float64"),
        ({"window": "float64"}, "takes window_x in .*, got float64"),
        ({"state_dtype": "float64"}, "takes state in .*, got float64"),
        ({"state": 1028}, "up to 256 loads of 16 bytes .* a size of 1028 in float32, 257 loads"),
        ({"state": 257}, "got a size of 257 in float32, 257 loads"),
        ({"width": 9}, "up to 8 taps, got 9"),
        ({"batch": 2**30, "heads": 24}, "up to 2,147,483,647 blocks"),
    ],
)
def test_refusals_name_the_limit_and_the_figure(changes, said):
    with pytest.raises(NotImplementedError, match=said):
        plan_cuda_mixer.step(mixer_problem(**{**MODEL, **changes})[0])


def test_windows_of_two_types_are_refused():
    p, _ = mixer_problem(**MODEL)
    operands = tuple(dataclasses.replace(b, dtype="float32") if b.name == "window_bc" else b for b in p.operands)
    assert p.given["window_x"].dtype == "bfloat16"
    with pytest.raises(NotImplementedError, match="of one type, got bfloat16 and float32; use implementation='xla'"):
        plan_cuda_mixer.step(dataclasses.replace(p, operands=operands))


@pytest.mark.slow
def test_gradients_are_those_of_plain_jax():
    p, spec = mixer_problem(batch=1, heads=2, groups=1, head_dim=4, state=4)
    operands = random_operands(p)
    chosen = dataclasses.replace(spec, implementation=("xla",))

    def loss(projected, step):
        given = mixer.Operands(**{name: jnp.asarray(a) for name, a in operands.items()})
        return step(chosen, given._replace(projected=projected))[3].sum()

    projected = jnp.asarray(operands["projected"])
    wanted = jax.grad(lambda x: loss(x, mixer._plain))(projected)
    np.testing.assert_allclose(jax.grad(lambda x: loss(x, mixer.step))(projected), wanted, rtol=1e-5, atol=1e-6)


def test_vmap_is_one_larger_batch():
    p, spec = mixer_problem(batch=3)
    operands = random_operands(p)
    given = {name: jnp.asarray(a) for name, a in operands.items()}
    chosen = dataclasses.replace(spec, implementation=("xla",))
    mapped = {name: array[:, None] for name, array in given.items() if name in ("state", "window_x", "window_bc")}
    mapped["projected"] = given["projected"][:, None]

    def one(mapped):
        return mixer.step(chosen, mixer.Operands(**{**given, **mapped}))

    whole = mixer.step(chosen, mixer.Operands(**given))
    for got, wanted in zip(jax.vmap(one)(mapped), whole, strict=True):
        np.testing.assert_allclose(got[:, 0], wanted, rtol=1e-6, atol=1e-6)
