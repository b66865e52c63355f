"""Strict settings for every test: eight virtual CPU devices, no silent dtype or rank promotion, visible GPU skips."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_SSD_TUNING_FILE"] = "off"  # what somebody measured here must not change what is tested

import hypothesis
import jax
import pytest

# Set to 1 where a GPU must be there (the GPU test machine): then tests/gpu fails instead of being skipped.
GPU_REQUIRED = os.environ.get("JAX_SSD_TEST_REQUIRE_GPU", "") == "1"
GPU_FOLDER = Path(__file__).parent / "gpu"
# Set to 1 where all compilers must be there (CI): then a run without them ends instead of skipping what needs them.
COMPILERS_REQUIRED = os.environ.get("JAX_SSD_TEST_REQUIRE_COMPILERS", "") == "1"

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if jax.default_backend() == "cpu" and "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    # Most of the time goes into compilation. .ci/run tests once more with programs compiled as they are for users.
    jax.config.update("jax_disable_most_optimizations", True)

# The same examples in every run, and no limit on the time of one: the first call of a shape compiles.
hypothesis.settings.register_profile("jax_ssd", derandomize=True, deadline=None, max_examples=25, database=None)
hypothesis.settings.load_profile("jax_ssd")


def _gpu_missing() -> str | None:
    """Why no GPU test can run here, or None when one can."""
    try:
        return None if jax.devices("gpu") else "JAX lists no GPU"
    except RuntimeError as error:
        return f"no GPU for JAX: {str(error).splitlines()[0]}"


def pytest_sessionstart() -> None:
    """Ends a run under JAX_SSD_TEST_REQUIRE_COMPILERS=1 whose kernels would go untested."""
    if COMPILERS_REQUIRED:
        from jax_ssd import cutile, nvrtc
        from tests import cuda_emulator

        lacking = [reason for reason in (cutile.missing(), nvrtc.missing(), cuda_emulator.missing()) if reason]
        if lacking:
            pytest.exit(f"JAX_SSD_TEST_REQUIRE_COMPILERS=1, but {'; '.join(lacking)}", returncode=2)


def pytest_collection_finish() -> None:
    """Looks for garbage rarely, and not in what is there by now: it took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything below tests/gpu."""
    for item in items:
        if GPU_FOLDER in Path(item.path).parents:
            item.add_marker("gpu")


@pytest.fixture(autouse=True)
def _gpu_or_skip(request: pytest.FixtureRequest) -> None:
    """Skip a `gpu` test where there is no GPU, or fail it under JAX_SSD_TEST_REQUIRE_GPU=1."""
    if request.node.get_closest_marker("gpu") is None:
        return
    missing = _gpu_missing()
    if missing is None:
        return
    if GPU_REQUIRED:
        pytest.fail(f"JAX_SSD_TEST_REQUIRE_GPU=1, but {missing}", pytrace=False)
    pytest.skip(missing)


@pytest.fixture
def optimized() -> Iterator[None]:
    """Programs compiled as they are for users: for tests of bits, and of accuracy close to its bar."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.clear_caches()  # which do not know of this setting
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
        jax.clear_caches()


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types for the one test that asks for them."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)
