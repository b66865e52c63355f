"""Named shapes, shared by every benchmark and test that wants a real size."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    """One size of an operator: Mamba-2, or with a rank Mamba-3 (1 is SISO, more is MIMO).

    x is [batch, seq, heads, head_dim], B and C [batch, seq, groups, state]; Mamba-3 calls them v, k and q. With
    `softplus` the call carries a dt_bias and applies softplus, as a model layer does; without it dt is the step itself.
    `seq` is 1 for the step cases.
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

    def __post_init__(self) -> None:
        for field in ("batch", "seq", "groups", "heads", "state", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"case {self.name!r}: {field} must be at least 1, got {getattr(self, field)}")
        if self.heads % self.groups:
            raise ValueError(f"case {self.name!r}: heads={self.heads} must be a multiple of groups={self.groups}")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"case {self.name!r}: dtype must be bfloat16, float16 or float32, got {self.dtype!r}")

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _models() -> list[Case]:
    """Mixer sizes of published models (heads, head_dim, groups, state), two rows of 4096 tokens."""
    sizes = {
        "mamba2_130m": (24, 64, 1, 128, "state-spaces/mamba2-130m"),
        "mamba2_780m": (48, 64, 1, 128, "state-spaces/mamba2-780m"),
        "mamba2_2.7b": (80, 64, 1, 128, "state-spaces/mamba2-2.7b"),
        "codestral_7b": (128, 64, 8, 128, "mistralai/Mamba-Codestral-7B-v0.1"),
        "nemotron_h_8b": (128, 64, 8, 128, "nvidia/Nemotron-H-8B"),
        "bamba_9b": (128, 64, 1, 128, "ibm-ai-platform/Bamba-9B"),
        "zamba2_7b": (112, 64, 2, 64, "Zyphra/Zamba2-7B"),
        "falcon_h1_7b": (24, 128, 1, 256, "tiiuae/Falcon-H1-7B"),
    }
    return [
        Case(name, 2, 4096, groups, heads, state, head_dim, softplus=True, source=source)
        for name, (heads, head_dim, groups, state, source) in sizes.items()
    ]


def _mamba3() -> list[Case]:
    """The shapes that upstream's kernels are tuned for, and one long row against many of the same tokens."""
    sizes = {"first": (4, 2048, 32), "wide": (8, 4096, 32), "few": (4, 2048, 8), "long": (1, 131072, 32)}
    sizes |= {"rows": (8, 16384, 32)}
    kinds = {"siso": 1, "mimo": 4}
    return [
        Case(f"{kind}_{name}", batch, seq, 1, heads, 128, 64, rank=rank)
        for kind, rank in kinds.items()
        for name, (batch, seq, heads) in sizes.items()
    ] + [
        Case("mimo_first_f32", 4, 2048, 1, 32, 128, 64, dtype="float32", rank=4),
        Case("mimo_few_f32", 4, 2048, 1, 8, 128, 64, dtype="float32", rank=4),
        Case("tiny_siso", 2, 50, 1, 4, 16, 8, dtype="float32", rank=1),
        Case("tiny_mimo", 2, 50, 2, 4, 16, 8, dtype="float32", rank=2),
    ]


def _sweep() -> list[Case]:
    """State size against length: four rows of eight heads."""
    return [
        Case(f"sweep_n{state}_t{seq >> 10}k", 4, seq, 1, 8, state, 64)
        for state in (64, 128, 256, 512)
        for seq in (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18)
    ]


CASES: dict[str, Case] = {
    case.name: case
    for case in [
        Case("tiny", 2, 100, 1, 4, 16, 8, dtype="float32"),
        Case("tiny_softplus", 2, 100, 2, 4, 16, 8, dtype="float32", softplus=True),
        Case("tiny_step", 2, 1, 1, 4, 16, 8, dtype="float32"),
        Case("first", 4, 16384, 1, 8, 128, 64),
        Case("first_f32", 4, 16384, 1, 8, 128, 64, dtype="float32"),
        Case("wide", 8, 4096, 1, 80, 128, 64),
        Case("long_prompt", 1, 131072, 8, 128, 128, 64),
        Case("short_rows", 4096, 16, 1, 24, 128, 64),
        Case("step", 128, 1, 1, 80, 128, 64),
        Case("step_b1", 1, 1, 1, 80, 128, 64),
        Case("cpu_train", 2, 1024, 1, 16, 64, 32, dtype="float32", softplus=True),
        *_sweep(),
        *_models(),
        *_mamba3(),
    ]
}


def find(text: str) -> list[Case]:
    """Cases for one word of the command line: a name, a prefix ending in '*', or name=B,T,G,H,N,P[,dtype]."""
    if "=" in text:
        name, _, sizes = text.partition("=")
        words = sizes.split(",")
        if len(words) not in (6, 7):
            raise ValueError(f"case {text!r}: expected name=B,T,G,H,N,P or name=B,T,G,H,N,P,dtype")
        batch, seq, groups, heads, state, head_dim = (int(word) for word in words[:6])
        case = Case(name, batch, seq, groups, heads, state, head_dim)
        return [replace(case, dtype=words[6])] if len(words) == 7 else [case]
    if text.endswith("*"):
        found = [case for name, case in CASES.items() if name.startswith(text[:-1])]
    else:
        found = [CASES[text]] if text in CASES else []
    if not found:
        raise ValueError(f"no case called {text!r}; known: {', '.join(CASES)}")
    return found
