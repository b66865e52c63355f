"""Named sizes of the operators: those of published models, the benchmarks' and the sweep of state against length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_ssd.mamba2.api import mamba2, mamba2_step
from jax_ssd.mamba3.api import MAX_RANK, Mamba3State, mamba3, mamba3_step


@dataclass(frozen=True)
class Size:
    """One size of an operator: Mamba-2, or with a rank Mamba-3 (1 is SISO, more is MIMO).

    x is [batch, seq, heads, head_dim], B and C [batch, seq, groups, state]; Mamba-3 calls them v, k and q. With
    `softplus` the call carries a dt_bias and applies softplus, as a model layer does; without it dt is the step itself.
    `seq` is 1 for the step cases, or with `step` the tokens of one call. A row of Mamba-3 may hold several `sequences`,
    all of one length, told apart by the argument that `packing` names: "segment_ids" or "cu_seqlens".
    """

    name: str
    batch: int
    seq: int
    groups: int
    heads: int
    state: int
    head_dim: int
    dtype: str = "bfloat16"
    softplus: bool = False
    source: str = ""
    rank: int = 0
    sequences: int = 1
    packing: str = ""
    step: bool = False

    def __post_init__(self) -> None:
        for field in ("batch", "seq", "groups", "heads", "state", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"size {self.name!r}: {field} must be at least 1, got {getattr(self, field)}")
        if self.heads % self.groups:
            raise ValueError(f"size {self.name!r}: heads={self.heads} must be a multiple of groups={self.groups}")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"size {self.name!r}: dtype must be bfloat16, float16 or float32, got {self.dtype!r}")
        if not 0 <= self.rank <= MAX_RANK:
            raise ValueError(f"size {self.name!r}: rank must be from 0 to {MAX_RANK}, got {self.rank}")
        if self.packing not in (("", "segment_ids", "cu_seqlens") if self.rank else ("",)):
            raise ValueError(
                f"size {self.name!r}: packing must be empty, or of Mamba-3 an argument, got {self.packing!r}"
            )
        if self.sequences < 1 or self.seq % self.sequences or (self.sequences > 1) != bool(self.packing):
            raise ValueError(
                f"size {self.name!r}: sequences must divide seq and be 1 without packing, got {self.sequences}"
            )

        if self.step and not self.rank:
            raise ValueError(f"size {self.name!r}: step is for Mamba-3, whose steps take several tokens, got rank 0")

    @property
    def is_step(self) -> bool:
        return self.step or self.seq == 1

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def boundaries(self) -> dict[str, jax.Array]:
        """The argument that packs the rows, none without packing; to the compiler it is no constant."""
        if not self.packing:
            return {}
        length = self.seq // self.sequences
        by_token = self.packing == "segment_ids"
        row = jnp.arange(self.seq) // length if by_token else length * jnp.arange(self.sequences + 1)
        return {self.packing: jax.lax.optimization_barrier(jnp.broadcast_to(row, (self.batch, *row.shape)))}


def _models() -> list[Size]:
    """Mixer sizes of published models (heads, head_dim, groups, state), two rows of 4096 tokens."""
    sizes = {
        "mamba2_130m": (24, 64, 1, 128, "state-spaces/mamba2-130m"),
        "mamba2_370m": (32, 64, 1, 128, "state-spaces/mamba2-370m"),
        "mamba2_780m": (48, 64, 1, 128, "state-spaces/mamba2-780m"),
        "mamba2_1.3b": (64, 64, 1, 128, "state-spaces/mamba2-1.3b"),
        "mamba2_2.7b": (80, 64, 1, 128, "state-spaces/mamba2-2.7b"),
        "codestral_7b": (128, 64, 8, 128, "mistralai/Mamba-Codestral-7B-v0.1"),
        "nemotron_h_8b": (128, 64, 8, 128, "nvidia/Nemotron-H-8B"),
        "bamba_9b": (128, 64, 1, 128, "ibm-ai-platform/Bamba-9B"),
        "zamba2_7b": (112, 64, 2, 64, "Zyphra/Zamba2-7B"),
        "falcon_h1_7b": (24, 128, 1, 256, "tiiuae/Falcon-H1-7B"),
    }
    return [
        Size(name, 2, 4096, groups, heads, state, head_dim, softplus=True, source=source)
        for name, (heads, head_dim, groups, state, source) in sizes.items()
    ]


def _mamba3() -> list[Size]:
    """The shapes that upstream's kernels are tuned for, and one long row against many of the same tokens."""
    sizes = {"first": (4, 2048, 32), "wide": (8, 4096, 32), "few": (4, 2048, 8), "long": (1, 131072, 32)}
    sizes |= {"rows": (8, 16384, 32)}
    kinds = {"siso": 1, "mimo": 4}
    return [
        Size(f"{kind}_{name}", batch, seq, 1, heads, 128, 64, rank=rank)
        for kind, rank in kinds.items()
        for name, (batch, seq, heads) in sizes.items()
    ] + [
        Size("mimo_first_f32", 4, 2048, 1, 32, 128, 64, dtype="float32", rank=4),
        Size("mimo_few_f32", 4, 2048, 1, 8, 128, 64, dtype="float32", rank=4),
        *(Size(f"mimo_step_b{batch}", batch, 1, 1, 64, 128, 64, rank=4) for batch in (1, 32, 64, 256, 1024)),
        *(Size(f"mimo_step_b64_t{n}", 64, n, 1, 64, 128, 64, rank=4, step=True) for n in (2, 4, 8)),
        Size("tiny_mimo_step", 2, 1, 2, 4, 16, 8, dtype="float32", rank=2),
        Size("tiny_mimo_step_t3", 2, 3, 2, 4, 16, 8, dtype="float32", rank=2, step=True),
        Size("tiny_siso", 2, 50, 1, 4, 16, 8, dtype="float32", rank=1),
        Size("tiny_mimo", 2, 50, 2, 4, 16, 8, dtype="float32", rank=2),
        *(
            Size(f"{kind}_{name}", 1, 16384, 1, 32, 128, 64, rank=rank, sequences=16, packing=packing)
            for kind, rank in kinds.items()
            for name, packing in (("segments", "segment_ids"), ("sequences", "cu_seqlens"))
        ),
        Size("tiny_segments", 2, 50, 2, 4, 16, 8, dtype="float32", rank=2, sequences=5, packing="segment_ids"),
        Size("tiny_sequences", 2, 50, 1, 4, 16, 8, dtype="float32", rank=1, sequences=5, packing="cu_seqlens"),
    ]


def _sweep() -> list[Size]:
    """State size against length: four rows of eight heads."""
    return [
        Size(f"sweep_n{state}_t{seq >> 10}k", 4, seq, 1, 8, state, 64)
        for state in (64, 128, 256, 512)
        for seq in (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18)
    ]


SIZES: dict[str, Size] = {
    size.name: size
    for size in [
        Size("tiny", 2, 100, 1, 4, 16, 8, dtype="float32"),
        Size("tiny_softplus", 2, 100, 2, 4, 16, 8, dtype="float32", softplus=True),
        Size("tiny_step", 2, 1, 1, 4, 16, 8, dtype="float32"),
        Size("first", 4, 16384, 1, 8, 128, 64),
        Size("first_f32", 4, 16384, 1, 8, 128, 64, dtype="float32"),
        Size("wide", 8, 4096, 1, 80, 128, 64),
        Size("long_prompt", 1, 131072, 8, 128, 128, 64),
        Size("short_rows", 4096, 16, 1, 24, 128, 64),
        Size("step", 128, 1, 1, 80, 128, 64),
        Size("step_b1", 1, 1, 1, 80, 128, 64),
        Size("cpu_train", 2, 1024, 1, 16, 64, 32, dtype="float32", softplus=True),
        *_sweep(),
        *_models(),
        *_mamba3(),
    ]
}


def find(text: str) -> list[Size]:
    """Sizes for one word of the command line.

    A name or its end ("130m"), a prefix ending in "*", "models" for the published models, or
    name=B,T,G,H,N,P[,dtype][,rank=R], which is Mamba-3 where it has a rank (1 is SISO).

    Raises:
      ValueError: it means none.
    """
    if "=" in text:
        name, _, sizes = text.partition("=")
        *words, last = sizes.split(",")
        rank = last.strip().removeprefix("rank=") if last.strip().startswith("rank=") else None
        words += [last] if rank is None else []
        try:
            if len(words) not in (6, 7):
                raise ValueError(f"{len(words)} sizes")
            batch, seq, groups, heads, state, head_dim = (int(word) for word in words[:6])
            options: dict[str, Any] = {} if rank is None else {"rank": int(rank)}
        except ValueError as error:
            raise ValueError(
                f"size {text!r}: expected name=B,T,G,H,N,P with whole numbers, then perhaps a dtype, then perhaps "
                f"rank=R: {error}"
            ) from error
        options |= {"dtype": words[6].strip()} if len(words) == 7 else {}
        return [Size(name, batch, seq, groups, heads, state, head_dim, **options)]
    if text == "models":
        found = [size for size in SIZES.values() if size.source]
    elif text.endswith("*"):
        found = [size for name, size in SIZES.items() if name.startswith(text[:-1])]
    else:
        found = [SIZES[text]] if text in SIZES else [s for name, s in SIZES.items() if name.endswith("_" + text)]
    if not found:
        raise ValueError(f"no size called {text!r}; known: models, {', '.join(SIZES)}")
    return found


def programs(
    size: Size, implementation: str | None = None
) -> dict[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]]:
    """What a program at this size calls, with arguments to trace it with: forward and backward, and a step."""
    scan, of_scan, step, of_step = _mamba3_calls(size) if size.rank else _mamba2_calls(size)

    def structs(shapes: Shapes) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(s, size.dtype if n in NARROW else "float32") for n, s in shapes.items())

    def forward(*operands: jax.Array) -> jax.Array:
        given = dict(zip(of_scan, operands, strict=True))
        return scan(**given, **size.boundaries(), implementation=implementation)

    def loss(*operands: jax.Array) -> jax.Array:
        return forward(*operands).astype("float32").sum()

    def token(*operands: jax.Array) -> Any:
        return step(**dict(zip(of_step, operands, strict=True)), implementation=implementation)

    made: dict[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]] = {"step": (token, structs(of_step))}
    if size.is_step:
        return made
    gradient = jax.grad(loss, argnums=tuple(range(len(of_scan))))
    return {"forward": (forward, structs(of_scan)), "backward": (gradient, structs(of_scan)), **made}


Shapes = dict[str, tuple[int, ...]]
Calls = tuple[Callable[..., Any], Shapes, Callable[..., Any], Shapes]  # of the scan and of a step
NARROW = ("x", "B", "C", "q", "k", "v", "z", "last_v")  # in the size's type; everything else is float32


def _mamba2_calls(size: Size) -> Calls:
    tokens, group = (size.batch, size.seq, size.heads, size.head_dim), (size.batch, size.seq, size.groups, size.state)
    per_head = (size.heads,)
    of_scan: Shapes = {"x": tokens, "dt": tokens[:3], "A": per_head, "B": group, "C": group, "D": per_head}
    of_scan |= {"dt_bias": per_head} if size.softplus else {}
    of_step: Shapes = {"state": (size.batch, *tokens[2:], size.state)}
    of_step |= {name: shape if len(shape) == 1 else (shape[0], *shape[2:]) for name, shape in of_scan.items()}
    softplus = {"dt_softplus": size.softplus}
    return partial(mamba2, **softplus), of_scan, partial(mamba2_step, **softplus), of_step


def _mamba3_calls(size: Size) -> Calls:
    """A gate and a skip; half of a head's coordinates are rotated."""
    ranks = (size.rank,) if size.rank > 1 else ()
    per_rank, bias = (size.heads, size.rank, size.head_dim), (size.heads, *ranks, size.state)
    value, pairs = (size.heads, size.head_dim), size.state // 4
    of_token: Shapes = {"q": (*ranks, size.groups, size.state), "k": (*ranks, size.groups, size.state), "v": value}
    of_token |= {"angles": (size.heads, pairs), "z": value}
    schedule = ("adt", "dt", "trap")
    weights: Shapes = {"q_bias": bias, "k_bias": bias, "D": (size.heads,)}
    weights |= dict.fromkeys(("mimo_v", "mimo_o", "mimo_z"), per_rank) if ranks else {}
    of_scan = {name: (size.batch, size.seq, *shape) for name, shape in of_token.items()}
    of_scan |= dict.fromkeys(schedule, (size.batch, size.heads, size.seq)) | weights
    of_state: Shapes = {"angle": (pairs,), "ssm": (size.head_dim, size.state), "last_k": (*ranks, size.state)}
    of_state |= {"last_v": (size.head_dim,)}
    of_step = {name: (size.batch, size.heads, *shape) for name, shape in of_state.items()}
    tokens = (size.seq,) if size.step else ()
    of_step |= {name: (size.batch, *tokens, *shape) for name, shape in of_token.items()}
    of_step |= dict.fromkeys(schedule, (size.batch, size.heads, *tokens)) | weights
    options: dict[str, Any] = {"rotary": "half"} if ranks else {"rotary": "pairwise", "mimo_v": None, "mimo_o": None}

    def step(angle, ssm, last_k, last_v, **given: Any) -> Any:
        return mamba3_step(Mamba3State(angle, ssm, last_k, last_v), **given, **options)

    return partial(mamba3, **options), of_scan, step, of_step
