"""The forward plan of Mamba-3: sizes, refusals with their figures, and the compiler, none of which needs a GPU."""

import dataclasses
import warnings
from typing import Any

import pytest

from jax_ssd import config
from jax_ssd.mamba3 import plan
from jax_ssd.mamba3.problem import Problem
from jax_ssd.plans import MAX_SHARED_MEMORY, Buffer, ScalarArg
from jax_ssd.specs import CudaKernel
from tests.compilation import compile_plan

ALL = ("mimo_v", "mimo_o", "z", "mimo_z", "D", "norm_weight")
TF32: dict[str, Any] = {"dtype": "float32", "precision": "default"}


def problem(
    *, batch=2, seq=100, heads=4, groups=2, head_dim=64, state=128, rank=4, pairs=32, dtype="bfloat16", given=ALL,
    states=False, sequences=0, final=False, rotary="pairwise", chunk=None, precision="highest"
) -> Problem:  # fmt: skip
    """A call as the op describes it; `sequences`: packed ones."""
    ranked, per_state = (1, heads, rank, head_dim), (batch, max(sequences, 1), heads)
    shapes = {
        **dict.fromkeys(("q", "k"), (batch, seq, rank, groups, state)),
        "v": (batch, seq, heads, head_dim),
        **dict.fromkeys(("q_bias", "k_bias"), (1, heads, rank, state)),
        "angles": (batch, seq, heads, pairs),
        **dict.fromkeys(("adt", "dt", "trap"), (batch, heads, seq)),
        **dict.fromkeys(("mimo_v", "mimo_o"), ranked),
        "z": (batch, seq, heads, head_dim),
        "mimo_z": ranked,
        "D": (1, heads),
        "norm_weight": (1, heads, head_dim),
        "state_angle": (*per_state, pairs),
        "state_ssm": (*per_state, head_dim, state),
        "state_k": (*per_state, rank, state),
        "state_v": (*per_state, head_dim),
        "cu_seqlens": (batch, sequences + 1),
    }
    optional = {*ALL, *(n for n in shapes if n.startswith("state_")), "cu_seqlens"}
    wanted = {*given, *(n for n in shapes if n.startswith("state_") and states)}
    wanted |= {"cu_seqlens"} if sequences else set()
    types = {**dict.fromkeys(("q", "k", "v", "z"), dtype), "cu_seqlens": "int32"}
    operands = tuple(
        Buffer(name, shape, types.get(name, "float32"))
        for name, shape in shapes.items()
        if name not in optional or name in wanted
    )
    return Problem(
        batch, seq, heads, head_dim, groups, state, rank, pairs, dtype, 1, rotary, 1e-5, final, chunk, precision,
        operands,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("archs", "changes", "kernels", "segments"),
    [
        (["sm_90"], {"heads": 8}, ("mamba3_pipeline", "mamba3_pipeline"), 4),
        (["sm_90", "sm_100"], {"heads": 32}, ("mamba3_segment_ends", "mamba3_forward"), 3),
        (["sm_90"], {"heads": 8, **TF32}, ("mamba3_tf32", "mamba3_tf32"), 4),
        (["sm_90", "sm_100"], {"heads": 8, **TF32}, ("mamba3_segment_ends", "mamba3_forward"), 4),
    ],
)
def test_sizes_of_the_plan(archs, changes, kernels, segments):
    made = plan.forward(problem(batch=4, seq=2048, groups=1, final=True, **changes), archs=archs)
    heads = changes["heads"]
    made.check("sm_90")
    assert [launch.name.split("<")[0] for launch in made.launches] == [f"jax_ssd::{kernel}" for kernel in kernels]
    ends, forward = made.launches
    assert (ends.grid[0], forward.grid[0]) == (4 * heads * (segments - 1), 4 * heads * segments)
    assert isinstance(forward.kernel, CudaKernel)
    assert forward.kernel.archs == (("sm_90",) if archs == ["sm_90"] else ())
    shapes = {buffer.name: buffer.shape for buffer in (*made.results, *made.scratch)}
    assert shapes["y"] == (4, 2048, heads, 64)
    assert shapes["final_ssm"] == (4, 1, heads, 64, 128)
    assert shapes["ends"] == (4, heads, segments - 1, 64, 128)
    assert shapes["phases"] == (4, heads, segments - 1, 2, 32)


@pytest.mark.parametrize(
    "changes", [{"precision": "highest"}, {"rank": 2}, {"state": 64}, {"head_dim": 72}, {"chunk": 8}]
)
def test_what_the_tf32_kernel_does_not_serve(changes):
    made = plan.forward(problem(**TF32 | changes), archs=["sm_90"])
    assert [launch.name.split("<")[0] for launch in made.launches] == ["jax_ssd::mamba3_forward"]


def test_a_full_grid_is_one_launch():
    made = plan.forward(problem(batch=16, seq=2048, heads=32), archs=["sm_90"])
    assert len(made.launches) == 1
    assert not made.scratch


def test_ranks_are_kept_without_their_fold():
    made = plan.forward(problem(given=("mimo_v",)), archs=["sm_90"])
    assert made.results[0].shape == (2, 100, 4, 4, 64)


@pytest.mark.parametrize("pieces", [1, 3])
def test_segments_and_their_pieces_cover_the_row(pieces):
    p = problem(batch=1, heads=4, seq=100_003)
    config_ = plan.tiles(p, ["sm_90"])
    made = plan.forward(p, dataclasses.replace(config_, segments=7, pieces=pieces), ["sm_90"])
    scalars = [argument for argument in made.launches[-1].arguments if isinstance(argument, ScalarArg)]
    assert len(scalars) == 7
    seq, segments, segment_tokens, ends, piece_tokens = (int(argument.value) for argument in scalars[:5])
    assert seq == 100_003
    assert segment_tokens == pieces * piece_tokens and piece_tokens % config_.tokens == 0
    assert (segments - 1) * segment_tokens < seq <= segments * segment_tokens
    assert ends == pieces * (segments - 1)
    assert [launch.grid[0] for launch in made.launches] == [4 * ends, 4 * segments]


def test_pieces_fill_the_multiprocessors():
    long_row = plan.tiles(problem(batch=1, seq=131072, heads=32), ["sm_90"])
    assert (long_row.segments, long_row.pieces) == (4, 4)
    assert plan.tiles(problem(batch=8, seq=16384, heads=32), ["sm_90"]).segments == 1


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dtype": "float16"}, "bfloat16 and float32, got float16"),
        ({"head_dim": 20}, "multiple of 8, up to 128, got 20"),
        ({"head_dim": 192}, "multiple of 8, up to 128, got 192"),
        ({"state": 4, "pairs": 2}, "multiple of 8, up to 256, got 4"),
        ({"state": 512}, "multiple of 8, up to 256, got 512"),
        ({"pairs": 0}, "at least one rotated pair, got none"),
    ],
)
def test_refusals_name_limit_and_figure(changes, words):
    with pytest.raises(NotImplementedError, match=words):
        plan.forward(problem(**changes), archs=["sm_90"])


def test_shared_memory_is_refused_with_both_figures():
    p = problem(dtype="float32", head_dim=128, state=256, pairs=128)
    least = plan.forward_memory(p, 16, 4)
    assert least > MAX_SHARED_MEMORY["sm_86"]
    with pytest.raises(NotImplementedError, match=f"{least:,} bytes of shared memory, at most 101,376 .* sm_86"):
        plan.forward(p, archs=["sm_86"])
    plan.forward(p, archs=["sm_90"]).check("sm_90")


def test_rows_follow_the_smallest_shared_memory():
    p = problem(dtype="float32")
    assert plan.tiles(p, ["sm_90"]).rows == 64
    assert plan.tiles(p, ["sm_86", "sm_90"]).rows < 64


def test_a_chunk_size_is_a_limit():
    assert plan.tiles(problem(chunk=5), ["sm_90"]).tokens == 5
    assert plan.tiles(problem(chunk=500), ["sm_90"]).tokens == 16


def test_tiles_that_contradict_themselves():
    with pytest.raises(ValueError, match="rows must be 16, 32 or 64"):
        plan.Tiles(48, 8, 1, 1, 1, False)
    with pytest.raises(ValueError, match="teams must be 1 or 2"):
        plan.Tiles(64, 16, 1, 1, 4, False)
    with pytest.raises(ValueError, match="one block and 4 or 5 teams"):
        plan.Tiles(64, 16, 1, 2, 4, True)
    with pytest.raises(ValueError, match="1 without the pipeline"):
        plan.Tiles(64, 16, 2, 1, 1, False, pieces=2)
    with pytest.raises(ValueError, match="does not serve"):
        plan.forward(problem(dtype="float32"), plan.Tiles(64, 16, 1, 1, 4, True), ["sm_90"])
    with pytest.raises(ValueError, match="does not serve"):
        plan.forward(problem(**TF32), plan.Tiles(64, 16, 1, 1, 5, True), ["sm_90"])
    with pytest.raises(ValueError, match="more than 16 rows"):
        plan.forward(problem(), plan.Tiles(16, 8, 1, 1, 1, False), ["sm_90"])


COMPILED = {
    "portable": ("sm_80", {}),
    "wgmma": ("sm_90", {"states": True, "final": True}),
    "tf32": ("sm_90", {**TF32, "states": True, "final": True}),
    "float32": ("sm_90", {"dtype": "float32", "rotary": "half", "head_dim": 16, "state": 24, "pairs": 5}),
    "siso, packed": ("sm_120", {"rank": 1, "given": ("D", "z"), "sequences": 3, "states": True, "final": True}),
    "rank 8": ("sm_100", {"head_dim": 128, "state": 64, "rank": 8, "given": ("mimo_v", "norm_weight")}),
}


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile(name, tmp_path):
    arch, changes = COMPILED[name]
    made = plan.forward(problem(seq=1000, **changes), archs=[arch])
    assert len(made.launches) == 2
    with config.override(cache_dir=str(tmp_path)), warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_plan(made, arch)
