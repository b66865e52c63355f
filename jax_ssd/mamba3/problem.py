"""The static description of one Mamba-3 call: sizes, types and which options are present.

Everything a plan or a refusal depends on, and nothing else: two calls with equal problems run the same kernels. Sizes
are those of one device's shard, since problems are made after partitioning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from jax.core import ShapedArray

from jax_ssd.plans import Buffer

if TYPE_CHECKING:
    from jax_ssd.mamba3.ops import Spec


@dataclass(frozen=True)
class Problem:
    """One call of the scan, its backward, or a step. SISO has rank 1 and no mimo_v."""

    batch: int  # product of all leading axes
    seq: int
    heads: int
    head_dim: int
    groups: int
    state: int
    rank: int
    pairs: int  # of rotated coordinates
    dtype: str  # of q, k, v, z and y
    param_rows: int  # leading axis of parameters: 1, or batch after vmap over parameters
    rotary: str  # "pairwise" or "half"
    norm_eps: float
    return_final_state: bool
    chunk_size: int | None  # None: the implementation chooses
    precision: str  # "default" (TF32 for float32) or "highest" (full float32); no effect on 16-bit inputs
    operands: tuple[Buffer, ...]  # the canonical arrays that are given, in the order in which they are passed

    @cached_property
    def given(self) -> dict[str, Buffer]:
        """The operands by name; `"z" in problem.given` says whether there is a gate."""
        return {buffer.name: buffer for buffer in self.operands}

    @property
    def keeps_rank(self) -> bool:
        """Whether y has a rank axis."""
        return "mimo_v" in self.given and "mimo_o" not in self.given

    @property
    def sequences(self) -> int:
        """Packed sequences, which states have an axis of; 1 without packing."""
        return self.given["cu_seqlens"].shape[1] - 1 if "cu_seqlens" in self.given else 1

    @property
    def y(self) -> Buffer:
        """The output of the scan."""
        ranks = (self.rank,) if self.keeps_rank else ()
        return Buffer("y", (self.batch, self.seq, *ranks, self.heads, self.head_dim), self.dtype)


def of_call(spec: Spec, avals: Sequence[ShapedArray]) -> Problem:
    """The sizes and types of a call of forward, backward or step."""
    shapes = dict(zip(spec.operands, (aval.shape for aval in avals), strict=True))
    batch, seq, heads, head_dim = shapes["v"]
    rank, groups, state = shapes["q"][2:]
    return Problem(
        batch=batch,
        seq=seq,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state=state,
        rank=rank,
        pairs=shapes["angles"][-1],
        dtype=avals[spec.operands.index("v")].dtype.name,
        param_rows=shapes["q_bias"][0],
        rotary=spec.rotary,
        norm_eps=spec.norm_eps,
        return_final_state=spec.return_final_state,
        chunk_size=spec.chunk_size,
        precision=spec.precision,
        operands=tuple(
            Buffer(name, tuple(aval.shape), aval.dtype.name) for name, aval in zip(spec.operands, avals, strict=True)
        ),
    )
