"""What takes more than one process or device: exported programs, and training steps over all GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_ssd
from jax_ssd.cases import Case

ROOT = Path(__file__).parents[2]

LOAD = """
    import sys
    import jax
    import numpy as np
    from jax_ssd import ffi_targets

    ffi_targets.register()
    folder = sys.argv[1]
    exported = jax.export.deserialize(bytearray(open(f"{folder}/program", "rb").read()))
    results = jax.jit(exported.call)(dict(np.load(f"{folder}/arrays.npz")))
    np.savez(f"{folder}/results.npz", *map(np.asarray, results))
"""


def forward_and_gradients(given):
    """In bfloat16 inside; float32 outside, which numpy writes."""

    def objective(given):
        given = {name: a.astype("bfloat16") if name in ("x", "B", "C") else a for name, a in given.items()}
        y, final = jax_ssd.mamba2(**given, dt_softplus=True, return_final_state=True)
        return (y.astype("float32") ** 2).sum() + (final**2).sum(), y.astype("float32")

    (_, y), gradients = jax.value_and_grad(objective, has_aux=True)(given)
    return y, *(gradients[name] for name in sorted(gradients))


def test_an_exported_program_runs_in_a_process_of_its_own(tmp_path):
    given = Case("", batch=4, seq=300, heads=16, head_dim=64, groups=1, state=128, gate=False).inputs()
    paths = jax_ssd.dispatch_paths(forward_and_gradients, given, platform="cuda")
    assert {path.implementation for path in paths} == {"cuda"}
    function = jax.jit(forward_and_gradients)
    exported = jax.export.export(function, platforms=("cuda",), disabled_checks=list(jax_ssd.EXPORT_DISABLED_CHECKS))(
        given
    )
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "arrays.npz", **jax.tree.map(np.asarray, given))
    # Two processes share the GPU; by default JAX would take most of its memory for one.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-c", textwrap.dedent(LOAD), str(tmp_path)]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=300)
    names = ("y", *sorted(given))
    with np.load(tmp_path / "results.npz") as results:
        for name, got, want in zip(names, results.values(), function(given), strict=True):
            if name in ("A", "D", "dt_bias"):  # summed over rows by XLA, which chooses among its kernels by time
                np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max(), err_msg=name)
            else:
                np.testing.assert_array_equal(got, want, err_msg=name)


def test_training_steps_over_all_gpus_equal_that_of_one():
    pytest.importorskip("flax")
    if jax.local_device_count() < 2:
        pytest.skip("there is one GPU")
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, str(ROOT / "examples/train_pmap.py")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert f"{jax.local_device_count()} x NVIDIA" in done.stdout
    assert done.stdout.count("largest relative difference") == 2
    assert "collectives besides the all-reduce of gradients: none" in done.stdout
