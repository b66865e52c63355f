"""What this machine can do at best, measured in the run whose rows are compared with it."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing


def measure_ceilings(effort: timing.Effort) -> dict[str, float]:
    """Copy bandwidth (bytes read plus written per second) and bfloat16 matrix rate (flops per second), random data.

    The least times: whatever else the machine does makes a run slower.
    """
    on_gpu = jax.devices()[0].platform == "gpu"
    length, side = (1 << 28, 8192) if on_gpu else (1 << 22, 512)
    keys = jax.random.split(jax.random.key(0), 4)
    vectors = [jax.random.normal(key, (length,), jnp.float32) for key in keys[:2]]
    copy = jax.jit(lambda arrays: [array + 1 for array in arrays]).lower(vectors).compile()
    copied = timing.measure(lambda: copy(vectors), jax.block_until_ready, 2, effort)
    pairs = [
        tuple(jax.random.normal(key, (side, side), jnp.bfloat16) for key in jax.random.split(pair)) for pair in keys[2:]
    ]
    multiply = jax.jit(lambda pairs: [a @ b for a, b in pairs]).lower(pairs).compile()
    multiplied = timing.measure(lambda: multiply(pairs), jax.block_until_ready, 2, effort)
    return {
        "copy_bytes_per_second": 8 * length / copied.least,
        "matmul_flops_per_second": 2 * side**3 / multiplied.least,
        "copy_bytes": 8 * length,
        "matmul_side": side,
    }


def describe_device() -> dict[str, Any]:
    """The device JAX computes on and, on NVIDIA hardware, what the driver says about it."""
    device = jax.devices()[0]
    facts: dict[str, Any] = {
        "platform": device.platform,
        "kind": device.device_kind,
        "count": jax.device_count(),
        "host": platform.machine(),
    }
    if device.platform == "gpu":
        fields = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "power.limit")
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().split(", ")
        facts |= dict(zip(fields, answer, strict=False))
    return facts
