"""Registers the C++ handlers with JAX: once in a process, when the first program that launches kernels is lowered."""

from __future__ import annotations

import threading

import jax

LAUNCH = "jax_ssd.launch"
#: For jax.export.export(..., disabled_checks=...): JAX exports no custom call that it does not know. A process that
#: loads and runs the program calls `jax_ssd.ffi_targets.register()` first, and has a GPU of the architecture that the
#: program was exported for.
EXPORT_DISABLED_CHECKS = (jax.export.DisabledSafetyCheck.custom_call(LAUNCH),)
#: For jax.jit(..., compiler_options=...): a GPU runs a whole lax.scan of steps, all of its tokens, as one CUDA graph.
#: Unasked, JAX captures at most the body of a loop, and leaves one of fewer than five kernels to the host. Slices of
#: a scan's inputs become part of the kernels that read them; those can only be captured where the loop is unrolled.
LOOP_AS_GRAPH: dict[str, str | bool] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE",
    "xla_gpu_graph_min_graph_size": "1",
    "xla_gpu_command_buffer_unroll_loops": True,
}

_lock = threading.Lock()
_registered = False


def register() -> None:
    """Make the FFI targets known to JAX's CUDA platform; later calls do nothing.

    Without a GPU the registration waits inside JAX, so that lowering for CUDA works on any machine. The trait that lets
    XLA capture the handler into command buffers is part of the handler itself: XLA refuses every program of a process
    in which one target was registered with two different traits.

    Raises:
      NotImplementedError: the extension `jax_ssd._ffi` is missing, as in a source checkout that was never built.
    """
    global _registered
    with _lock:
        if _registered:
            return
        ffi = _extension()
        # The state's type first: its id is part of what the target is registered with.
        for name, capsules in ffi.types().items():
            jax.ffi.register_ffi_type(name, capsules, platform="CUDA")
        for name, stages in ffi.registrations().items():
            jax.ffi.register_ffi_target(name, stages, platform="CUDA", api_version=1)
        _registered = True


def missing() -> str | None:
    """Why kernels cannot be launched from this installation, or None if they can (a GPU aside)."""
    try:
        _extension()
    except NotImplementedError as error:
        return str(error)
    return None


def _extension():
    try:
        from jax_ssd import _ffi
    except ImportError as error:
        raise NotImplementedError(
            f"the extension jax_ssd._ffi cannot be imported ({error}); `pip install -e .` builds it"
        ) from error
    return _ffi
