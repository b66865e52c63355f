"""mamba_ssm's Triton kernels. They tune themselves on first use, which costs more than measuring them does.

Tuning here is cut in two ways that change no kernel: the configurations of a kernel are compiled side by side in
threads before Triton times them, and "quick" tuning leaves only a few. With one configuration per kernel it is the one
that tuning chose before at the benchmarks' main cases, and nothing is tuned. The chosen ones are noted in the result
file.

Its TileLang kernels are compiled for each size here. The releases 2.3.2 and 2.3.2.post1 leave sizes to run time, which
costs them a factor of about 2.5 and which upstream took back after them (its #965 and #968): mamba_ssm:released.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.cases import Case
from benchmarks.peers.base import Options, Peer, Variant, version_of

RELEASED = "mamba_ssm:released"
_MODULES = ("ssd_bmm", "ssd_chunk_scan", "ssd_chunk_state", "ssd_combined", "ssd_state_passing")
_MAMBA3_MODULES = ("mamba3.angle_dt", "mamba3.mamba3_siso_fwd", "mamba3.mamba3_siso_bwd")
# Chosen on an H200 from five of each at (4,16384,1,8,128,64) and (8,4096,1,80,128,64), chunk size 128, bfloat16.
_TILE = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128}
_SQUARE, _NARROW = _TILE | {"BLOCK_SIZE_N": 64}, _TILE | {"BLOCK_SIZE_N": 32}
PINNED: dict[str, dict[str, int]] = {
    "ssd_bmm._bmm_chunk_fwd_kernel": {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32},
    "ssd_bmm._bmm_chunk_bwd_kernel": _TILE | {"BLOCK_SIZE_CS": 32},
    "ssd_chunk_scan._chunk_scan_fwd_kernel": _TILE | {"BLOCK_SIZE_K": 32},
    "ssd_chunk_scan._chunk_scan_bwd_dstates_kernel": _TILE | {"BLOCK_SIZE_K": 32},
    "ssd_chunk_scan._chunk_scan_bwd_dc_kernel": _TILE,
    "ssd_chunk_scan._chunk_scan_bwd_dcb_kernel": _SQUARE,
    "ssd_chunk_scan._chunk_scan_bwd_ddAcs_stable_kernel": _NARROW,
    "ssd_chunk_state._chunk_cumsum_fwd_kernel": {"BLOCK_SIZE_H": 4},
    "ssd_chunk_state._chunk_cumsum_bwd_kernel": {"BLOCK_SIZE_H": 8},
    "ssd_chunk_state._chunk_state_fwd_kernel": _TILE | {"BLOCK_SIZE_K": 32},
    "ssd_chunk_state._chunk_state_bwd_db_kernel": _TILE,
    "ssd_combined._chunk_scan_chunk_state_bwd_dx_kernel": _SQUARE | {"BLOCK_SIZE_K": 32},
    "ssd_state_passing._state_passing_fwd_kernel": {"BLOCK_SIZE": 256},
    "ssd_state_passing._state_passing_bwd_kernel": {"BLOCK_SIZE": 128},
}


class MambaSsm(Peer):
    framework = "torch"
    most_calls = 8

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        pinned = options.peer_autotune == "quick" and options.peer_configs == 1
        self.chunks = (64, 128, 256) if options.peer_autotune == "full" else (128,) if pinned else (128, 256)
        self.tuners = dict(_autotuners())
        self.spaces = {name: len(tuner.configs) for name, tuner in self.tuners.items()}
        for name, tuner in self.tuners.items():
            if options.peer_autotune == "quick":
                tuner.configs = _some(name, tuner.configs, options.peer_configs)
            tuner._do_bench = _short_bench
        _compile_side_by_side()
        self.mamba3_step: _Mamba3Step | None = None
        self.rehearsed: tuple[int, ...] | None = None  # batch, length, heads and groups for which only is compiled
        self.sized = False

    def refuses(self, case: Case, pass_name: str) -> str | None:
        if self.name == RELEASED and (case.rank < 2 or case.is_step):
            return "no other than mamba_ssm here"
        if pass_name == "decode":
            return "torch has no scan; see step"
        if case.rank == 1 and case.dtype != "bfloat16":
            return "casts its inputs to bfloat16"
        if case.packing:
            return "is given no packed sequences here"
        if case.step:
            return "takes one token a step"
        return None

    def variants(self, case: Case, pass_name: str) -> list[Variant]:
        if pass_name == "step":
            return [{}]
        if case.rank:
            return [{"chunk_size": 64 // case.rank}]
        # A chunk longer than the row only pads it.
        fitting = [size for size in self.chunks if size <= case.seq]
        return [{"chunk_size": size} for size in fitting or self.chunks[:1]]

    def forward(self, case: Case, variant: Variant) -> Callable[..., Any]:
        if case.rank:
            return _siso(variant) if case.rank == 1 else self._mimo(case, variant)
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        return lambda x, dt, A, B, C, D, dt_bias=None: mamba_chunk_scan_combined(
            x, dt, A, B, C, variant["chunk_size"], D=D, dt_bias=dt_bias, dt_softplus=case.softplus
        )

    def forward_backward(self, case: Case, variant: Variant) -> Callable[..., Any]:
        import torch

        forward = self.forward(case, variant)

        def both(operands: tuple[Any, ...], dy: Any) -> tuple[Any, tuple[Any, ...]]:
            leaves = [operand.detach().requires_grad_() for operand in operands]
            y = forward(*leaves)
            return y, torch.autograd.grad(y, leaves, dy)

        return both

    def step(self, case: Case, variant: Variant) -> Callable[..., Any]:
        if case.rank:
            self.mamba3_step = _Mamba3Step(case)
            return self.mamba3_step
        import torch
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update

        def call(state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any = None) -> tuple[Any, Any]:
            # Per-head values are given as views of stride 0, which is how the kernel knows that they are per head.
            wide = (case.heads, case.head_dim)
            dt = dt[..., None].expand(-1, -1, case.head_dim)
            a = A[:, None, None].expand(*wide, case.state)
            # The kernel's test for per-head values reads dt_bias too, so without one it is given zeros.
            bias = (torch.zeros_like(A) if dt_bias is None else dt_bias)[:, None].expand(wide)
            d = D[:, None].expand(wide)
            return state, selective_state_update(state, x, dt, a, B, C, D=d, dt_bias=bias, dt_softplus=case.softplus)

        return call

    def settle(self) -> None:
        if self.mamba3_step is not None:
            self.mamba3_step.settle()

    def _mimo(self, case: Case, variant: Variant) -> Callable[..., Any]:
        """Upstream's TileLang kernels; raises ImportError where tilelang is not installed."""
        import torch
        from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo, mamba3_mimo_bwd, mamba3_mimo_fwd

        if not self.sized and self.name != RELEASED:
            self._compile_for_sizes(mamba3_mimo_fwd, "mamba_mimo_fwd")
            self._compile_for_sizes(mamba3_mimo_bwd, "mamba_mimo_bwd_fwd")
            self._compile_for_sizes(mamba3_mimo_bwd, "mamba_mimo_bwd_bwd")
            self.sized = True

        def call(q: Any, k: Any, v: Any, q_bias: Any, k_bias: Any, angles: Any, *rest: Any) -> Any:
            adt, dt, trap, z, D, mimo_v, mimo_z, mimo_o = rest
            dtype = getattr(torch, case.dtype)
            # Its kernels want the trapezoid's weights in the type of the products: given another, they write nothing.
            arrays = (q, k, v, adt, dt, trap.to(dtype), q_bias, k_bias, mimo_v, mimo_z, mimo_o, angles, D, z)
            return mamba3_mimo.mamba3_mimo(*arrays, variant["chunk_size"], 4, dtype)

        return call

    def _compile_for_sizes(self, module: Any, name: str) -> None:
        """Puts a call's sizes where a kernel of the module is built for any: its caller has them as B, S, H and G."""
        build = getattr(module, name)

        def build_for_sizes(*arguments: Any, **named: Any) -> Any:
            caller = sys._getframe(1).f_locals
            sizes = self.rehearsed or tuple(caller[size] for size in "BSHG")
            kernel = build(*sizes, *arguments[4:], **named)
            return _do_nothing if self.rehearsed else kernel

        setattr(module, name, build_for_sizes)

    @contextlib.contextmanager
    def rehearsal(self, case: Case) -> Iterator[None]:
        self.rehearsed = (case.batch, case.seq, case.heads, case.groups)
        before = {name: set(tuner.cache) for name, tuner in self.tuners.items()}
        for tuner in self.tuners.values():
            tuner._do_bench = _run_once
        try:
            yield
        finally:
            self.rehearsed = None
            for name, tuner in self.tuners.items():
                tuner._do_bench = _short_bench
                for key in set(tuner.cache) - before[name]:
                    del tuner.cache[key]

    def notes(self) -> dict[str, Any]:
        chosen = {
            name: {str(key): str(config) for key, config in tuner.cache.items()}
            for name, tuner in self.tuners.items()
            if tuner.cache
        }
        tried = {name: f"{len(tuner.configs)} of {self.spaces[name]}" for name, tuner in self.tuners.items()}
        return {
            "mamba_ssm": version_of("mamba_ssm"),
            "triton": version_of("triton"),
            "torch": version_of("torch"),
            "configurations_tried": tried,
            "configurations_chosen": chosen,
        }


def _siso(variant: Variant) -> Callable[..., Any]:
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

    def call(q: Any, k: Any, v: Any, q_bias: Any, k_bias: Any, angles: Any, *rest: Any) -> Any:
        adt, dt, trap, z, D = rest
        chunk = variant["chunk_size"]
        return mamba3_siso_combined(q, k, v, adt, dt, trap, q_bias, k_bias, angles, D=D, Z=z, chunk_size=chunk)

    return call


def _do_nothing(*_: Any) -> None:
    """In place of a kernel that is only to be compiled."""


class _Mamba3Step:
    """A step of its Mamba-3: a Triton kernel rotates, one in the CuTe DSL does the rest.

    They take some operands as other arrays than the harness has: decay rate and step for their product, the
    trapezoid's weight for its logit, rank weights with the rank in front. These are made outside of what is timed.
    Raises ImportError where nvidia-cutlass-dsl or quack-kernels is not installed.
    """

    def __init__(self, case: Case) -> None:
        from mamba_ssm.ops.cute.mamba3.mamba3_step_fn import mamba3_step_fn
        from mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step import apply_rotary_qk_inference_fwd

        self.rotate, self.recur = apply_rotary_qk_inference_fwd, mamba3_step_fn
        self.pairwise = case.rank == 1
        self.made: dict[tuple[int, ...], tuple[tuple[Any, ...], tuple[Any, ...]]] = {}

    def __call__(self, state: Any, *operands: Any) -> tuple[Any, Any]:
        import torch

        given = (*state, *operands)
        key = tuple(array.data_ptr() for array in given)
        if key not in self.made:
            self.made[key] = given, self._converted(given)
        angle, ssm = state[:2]
        q, k, v, _, _, angles, _, dt, _, z, D = operands[:11]
        k_before, v_before, rate, weight, q_bias, k_bias, mimo_v, mimo_z, mimo_o = self.made[key][1]
        q, k = (a.reshape(a.shape[0], -1, *a.shape[-2:]).expand(-1, -1, v.shape[1], -1) for a in (q, k))
        q, k, _ = self.rotate(
            q=q, k=k, angle_state=angle, angle_proj=angles, dt=dt, bias_q=q_bias, bias_k=k_bias,
            conjugate=False, inplace=False, rotate_pairwise=self.pairwise,
        )  # fmt: skip
        y = torch.empty_like(v)
        self.recur(
            ssm, k_before, v_before, rate, k, q, D, v, dt, weight, mimo_v,
            outproj=mimo_o, state_out=None, out=y, z=z, zproj=mimo_z, tile_D=64, num_warps=4,
        )  # fmt: skip
        return state, y

    def settle(self) -> None:
        for given, converted in self.made.values():
            for old, new in zip(converted, self._converted(given), strict=True):
                old.copy_(new)

    @staticmethod
    def _converted(given: tuple[Any, ...]) -> tuple[Any, ...]:
        import torch

        _, _, k_before, v_before, _, _, v, q_bias, k_bias, _, adt, dt, trap, _, _, *weights = given
        if not weights:
            k_before, q_bias, k_bias = k_before.unsqueeze(2), q_bias.unsqueeze(1), k_bias.unsqueeze(1)
            weights = [torch.ones_like(v[0].float()).unsqueeze(1)] * 3
        kept = (k_before.transpose(1, 2).to(v.dtype), v_before.to(v.dtype), adt / dt, torch.sigmoid(trap))
        return tuple(a.contiguous() for a in (*kept, *(a.transpose(0, 1) for a in (q_bias, k_bias, *weights))))


def _autotuners() -> list[tuple[str, Any]]:
    from triton.runtime.autotuner import Autotuner

    found = []
    for module in (*_MODULES, *_MAMBA3_MODULES):
        for name, value in vars(importlib.import_module(f"mamba_ssm.ops.triton.{module}")).items():
            if isinstance(value, Autotuner) and value.base_fn.__module__.endswith(module):
                found.append((f"{module}.{name}", value))
    return found


def _some(name: str, configs: list[Any], count: int) -> list[Any]:
    """The most likely ones first; those that are few and compile in no time stay all, unless one is wanted."""
    if count == 1 and name in PINNED:
        # Of several that differ in warps or stages only, the plainest.
        return sorted((one for one in configs if one.kwargs == PINNED[name]), key=_plainness)[:1] or configs[:1]
    if all(_is_tile(config) for config in configs):
        return sorted(configs, key=_distance)[:count]
    if count == 1 or name.startswith("mamba3"):
        return sorted(configs, key=_plainness)[:count]
    return configs


def _is_tile(config: Any) -> bool:
    """A matrix kernel's configuration; the others' are few and compile in no time."""
    return {"BLOCK_SIZE_M", "BLOCK_SIZE_N"} <= set(config.kwargs)


def _plainness(config: Any) -> float:
    """For kernels whose configurations differ in stages, warps and registers only."""
    return abs(config.num_stages - 2) + abs(math.log2(config.num_warps) - 2) + (config.maxnreg is not None)


def _distance(config: Any) -> float:
    """Quick tuning tries the middle of the space first: tiles of about 64 x 64 and 64 x 128."""
    return abs(math.log2(config.kwargs["BLOCK_SIZE_M"] * config.kwargs["BLOCK_SIZE_N"]) - 12.5)


def _short_bench(call: Callable[[], Any], quantiles: Any) -> Any:
    import triton.testing

    return triton.testing.do_bench(call, warmup=3, rep=15, quantiles=quantiles)


def _run_once(call: Callable[[], Any], quantiles: Any) -> Any:
    """Compiles and takes the device no time."""
    call()
    return [1.0] * len(quantiles)


def _compile_side_by_side() -> None:
    """Makes Triton's tuner compile a kernel's configurations in threads before it times them one by one."""
    from triton.runtime import autotuner

    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:
        return
    tune = autotuner.Autotuner.run
    seen: set[Any] = set()

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        key = (id(self), *(str(named.get(name)) for name in self.keys))
        if key not in seen and len(self.configs) > 1:
            seen.add(key)
            given = {name: value for name, value in kwargs.items() if name != "warmup"}
            # Only a head start: whatever goes wrong here goes wrong again, and is reported, when it is tuned.
            with (
                contextlib.suppress(Exception),
                concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
                AsyncCompileMode(pool, ignore_errors=True),
            ):
                self.warmup(*args, **given)
            self.nargs = None
        return tune(self, *args, **kwargs)

    autotuner.Autotuner.run = run


def load(name: str, options: Options) -> Peer:
    import mamba_ssm.ops.triton.ssd_combined  # noqa: F401  (its absence is the reason the rows will show)
    import torch

    if name not in ("mamba_ssm", RELEASED):
        raise NotImplementedError(f"there is no {name}, but mamba_ssm and {RELEASED}")
    if not torch.cuda.is_available():
        raise NotImplementedError("Triton kernels need a GPU that torch can see")
    return MambaSsm(name, options)
