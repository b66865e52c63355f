"""Run the GPU kernels on the CPU: plans go to the emulators of cuTile and of CUDA C++ instead of a GPU."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jax_ssd import config, dispatch, op
from jax_ssd.specs import CudaKernel
from tests import cuda_emulator, tile_emulator


def _kernel_plan(definition, spec, name, platform, avals, devices=None):
    del platform, devices
    if name not in dispatch.KERNELS or op.is_empty(definition, spec, avals):
        return None
    return definition.plan(spec, name, op.padded_avals(definition, spec, name, avals))


def _kernel_runner(plan, devices):
    del devices
    shapes = tuple(jax.ShapeDtypeStruct(b.shape, jax.numpy.dtype(b.dtype)) for b in plan.results)

    def host(*operands):
        emulator = cuda_emulator if isinstance(plan.launches[0].kernel, CudaKernel) else tile_emulator
        results = emulator.run(plan, [np.array(x) for x in operands])
        return tuple(results[b.name] for b in plan.results)

    return lambda *operands: jax.pure_callback(host, shapes, *operands)


def emulate(monkeypatch) -> None:
    monkeypatch.setattr(op, "kernel_plan", _kernel_plan)
    monkeypatch.setattr(op, "kernel_runner", _kernel_runner)


@contextlib.contextmanager
def kernels(monkeypatch) -> Iterator[None]:
    """The CUDA C++ kernels of the GPU, or emulated ones where there is none."""
    if jax.default_backend() == "gpu":
        yield
        return
    if cuda_emulator.missing() is not None:
        pytest.skip(str(cuda_emulator.missing()))
    emulate(monkeypatch)
    with config.override(target_arch="sm_90"):
        yield
