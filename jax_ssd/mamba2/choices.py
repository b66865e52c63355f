"""What of the kernels' plans can be tuned: each plan function with its heuristic and the values worth trying."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax_ssd.mamba2 import plan, plan_backward, plan_cuda, plan_cuda_backward, plan_cuda_step
from jax_ssd.mamba2.plan import SMALLEST_CHUNK, SMALLEST_STATE_TILE, Tiles, power_of_two
from jax_ssd.mamba2.plan_backward import BackwardConfig
from jax_ssd.mamba2.problem import Problem
from jax_ssd.plans import Plan
from jax_ssd.tune import Tunable

Values = Mapping[str, Sequence[Any]]
OCCUPANCIES = (1, 2, 3, 4)
LATENCIES = (1, 2, 4, 6)


def _forward(p: Problem, tiles: Tiles | None) -> Plan:
    return plan.forward(p, tiles and replace(tiles, chunk=_fitting(p, tiles.chunk)))


def _forward_values(p: Problem) -> Values:
    start = plan.tiles(p)
    return {
        "chunk": _chunks(p, 128),
        "segments": _around(start.segments, math.ceil(p.seq / start.chunk)),
        "occupancy": OCCUPANCIES,
        "segment_occupancy": OCCUPANCIES if start.segments > 1 else (),
        "latency": LATENCIES,
        "head_dim_block": [n for n in (32, 64, 128) if n <= power_of_two(p.head_dim, 32)],
        "worker_warps": (None, 4, 8),
        "head_block": () if p.has_runs else [n for n in (4, 8, 16, 32) if n <= power_of_two(p.heads)],
        "store_latency": (0, *LATENCIES),
        "swap": (False, True),
    }


def _backward(p: Problem, config: BackwardConfig | None) -> Plan:
    return plan_backward.backward(p, config and replace(config, chunk=_fitting(p, config.chunk)))


def _backward_values(p: Problem) -> Values:
    start = plan_backward.heuristic(p)
    parts = power_of_two(p.state, SMALLEST_STATE_TILE) // SMALLEST_STATE_TILE
    return {
        "chunk": _chunks(p, plan_backward.LARGEST_CHUNK),
        "head_slices": [n for n in range(1, 17) if p.heads % n == 0],
        "segments": _around(start.segments, math.ceil(p.seq / start.chunk)),
        "tokens_occupancy": OCCUPANCIES,
        "states_occupancy": OCCUPANCIES,
        "groups_occupancy": OCCUPANCIES,
        "latency": LATENCIES,
        "head_blocks": (1, 2, 4),
        "p_blocks": (1, 2),
        "n_blocks": [n for n in (1, 2, 4) if n <= parts],
    }


def _step_values(p: Problem) -> Values:
    per_group = p.heads // p.groups
    most = power_of_two(p.heads) if per_group == 1 else per_group & -per_group
    state, width = power_of_two(p.state), power_of_two(p.head_dim)
    return {
        "head_block": [n for n in (1, 2, 4, 8, 16) if n <= most],
        "head_dim_block": [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= width and n * state <= plan.STEP_TILE],
    }


def _cuda_forward(p: Problem, split: plan_cuda.Split | None) -> Plan:
    """The number of segments follows from their length. Those that find their start states themselves run at once."""
    if split is not None:
        chunks, length = math.ceil(p.seq / plan_cuda.CHUNK), split.chunks_per_segment
        if split.own_starts:
            length = max(length, plan_cuda.shortest_first(p, split.warpgroups, split.blocks))
        length = min(length, chunks)
        segments = len(plan_cuda.own_starts(chunks, length)) if split.own_starts else math.ceil(chunks / length)
        own = split.own_starts and segments > 1
        split = replace(split, segments=segments, chunks_per_segment=length, own_starts=own)
    return plan_cuda.forward(p, split)


def _cuda_forward_values(p: Problem) -> Values:
    chunks, start = math.ceil(p.seq / plan_cuda.CHUNK), plan_cuda.split(p)
    lengths = {math.ceil(chunks / n) for n in _around(start.segments, chunks)}
    if start.own_starts:  # shorter ones would be lengthened to the heuristic's
        lengths |= {n for n in range(start.chunks_per_segment, start.chunks_per_segment + 4) if n < chunks}
    room = start.own_starts or plan_cuda.shortest_first(p, start.warpgroups, start.blocks) < chunks
    return {
        "warpgroups": (1, 2),
        "blocks": (1, 2),
        "chunks_per_segment": sorted(lengths, reverse=True),
        "own_starts": (False, True) if room else (False,),
    }


def _cuda_backward(p: Problem, blocks: plan_cuda_backward.BackwardBlocks | None) -> Plan:
    """A choice that was measured at a larger size may have more pieces than there are."""
    if blocks is not None:
        most = plan_cuda_backward.most_pieces(p)
        blocks = replace(blocks, **{name: min(getattr(blocks, name), most[name]) for name in most})
    return plan_cuda_backward.backward(p, blocks)


def _cuda_backward_values(p: Problem) -> Values:
    start = plan_cuda_backward.backward_blocks(p)
    return {
        "segments": _around(start.segments, math.ceil(p.seq / plan_cuda_backward.CHUNK)),
        "head_blocks": range(1, 9),
        "row_slices": [n for n in range(1, 17) if p.batch % n == 0],
    }


def _cuda_step_values(p: Problem) -> Values:
    return {"rows": [n for n in (1, 2, 4, 8, 16) if p.head_dim % n == 0], "threads": (64, 128, 256, 512)}


def _fitting(p: Problem, chunk: int) -> int:
    """A measured chunk may be longer than the row."""
    return p.chunk_size or min(chunk, power_of_two(p.seq, SMALLEST_CHUNK))


def _chunks(p: Problem, largest: int) -> list[int]:
    """The largest whose tiles fit, see plan.CHUNK_BYTES: the compiler takes minutes over larger ones."""
    if p.chunk_size is not None:
        return []
    row = plan.row_bytes(p)
    return [n for n in (16, 32, 64, 128) if n <= largest and n * row <= plan.CHUNK_BYTES][-3:]


def _around(segments: int, chunks: int) -> list[int]:
    """Half, one and a half times and twice as many as the heuristic's, and next to it."""
    some = {1, segments // 2, segments * 3 // 4, segments, segments * 3 // 2, segments * 2, segments * 4}
    return sorted(n for n in some if 1 <= n <= max(1, chunks // 2))


FORWARD = Tunable("mamba2_forward", "cutile", _forward, plan.tiles, _forward_values, local=("segments",))
BACKWARD = Tunable(
    "mamba2_backward",
    "cutile",
    _backward,
    plan_backward.heuristic,
    _backward_values,
    local=("segments", "head_slices"),
    scratch=0.5,
)
STEP = Tunable(
    "mamba2_step", "cutile", plan.step, plan.step_tiles, _step_values, local=("head_block", "head_dim_block")
)
CUDA_FORWARD = Tunable(
    "mamba2_forward",
    "cuda",
    _cuda_forward,
    plan_cuda.split,
    _cuda_forward_values,
    local=("warpgroups", "blocks", "segments", "chunks_per_segment", "own_starts"),
)
CUDA_BACKWARD = Tunable(
    "mamba2_backward",
    "cuda",
    _cuda_backward,
    plan_cuda_backward.backward_blocks,
    _cuda_backward_values,
    local=("segments", "head_blocks", "row_slices"),
    scratch=0.5,
)
CUDA_STEP = Tunable(
    "mamba2_step", "cuda", plan_cuda_step.step, plan_cuda_step.step_blocks, _cuda_step_values, local=("rows", "threads")
)
