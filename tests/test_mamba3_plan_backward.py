"""Plans of the Mamba-3 backward, without a GPU: results, refusals, and kernels that compile for every architecture."""

import dataclasses

import pytest

from jax_ssd import config
from jax_ssd.mamba3 import plan_backward
from jax_ssd.mamba3.plan_backward import BackwardConfig, backward, heuristic, ranks
from jax_ssd.mamba3.problem import Problem
from jax_ssd.plans import Buffer
from tests.compilation import compile_plan


def problem(
    *, batch=2, seq=300, heads=4, groups=1, rank: int | None = 4, state=128, head_dim=64, pairs=32, dtype="bfloat16",
    rotary="pairwise", gate=True, skip=True, norm=False, fold=True, initial=False, final=False, chunk_size=None,
    sequences: int | None = None, precision="highest"
) -> Problem:  # fmt: skip
    """A backward's problem as `mamba3` makes it."""
    mimo, r = rank is not None, rank or 1
    tokens, steps = (batch, seq, heads, head_dim), (batch, heads, seq)
    per_rank = (1, heads, r, head_dim)
    pieces = {"angle": (pairs,), "ssm": (head_dim, state), "k": (r, state), "v": (head_dim,)}
    states = {name: (batch, sequences or 1, heads, *shape) for name, shape in pieces.items()}
    values = {"q": (batch, seq, r, groups, state), "k": (batch, seq, r, groups, state), "v": tokens}
    floats = {"q_bias": (1, heads, r, state), "k_bias": (1, heads, r, state), "angles": (batch, seq, heads, pairs)}
    floats |= dict.fromkeys(("adt", "dt", "trap"), steps)
    floats |= {"mimo_v": per_rank} if mimo else {}
    floats |= {"mimo_o": per_rank} if mimo and fold else {}
    values |= {"z": tokens} if gate else {}
    floats |= {"mimo_z": per_rank} if gate and mimo else {}
    floats |= {"D": (1, heads)} if skip else {}
    floats |= {"norm_weight": (1, heads, head_dim)} if norm else {}
    floats |= {f"state_{name}": shape for name, shape in states.items()} if initial else {}
    values["dy"] = (batch, seq, r, heads, head_dim) if mimo and not fold else tokens
    floats |= {f"d_state_{name}": shape for name, shape in states.items()} if final else {}
    operands = [
        *(Buffer(n, s, dtype) for n, s in values.items()),
        *(Buffer(n, s, "float32") for n, s in floats.items()),
    ]
    if sequences is not None:
        operands.append(Buffer("cu_seqlens", (batch, sequences + 1), "int32"))
    return Problem(
        batch, seq, heads, head_dim, groups, state, r, pairs, dtype, 1, rotary, 1e-5, final, chunk_size, precision,
        tuple(operands),
    )  # fmt: skip


VARIANTS = {
    "mimo": {},
    "siso": {"rank": None},
    "states": {"initial": True, "final": True, "rotary": "half"},
    "ranks": {"fold": False, "rank": 3, "skip": False},
    "bare": {"gate": False, "skip": False, "rank": 8, "pairs": 64},
    "norm": {"norm": True, "initial": True},
    "small": {"state": 16, "head_dim": 8, "pairs": 3, "rank": 2, "seq": 5, "heads": 2},
    "wide": {"head_dim": 128, "rank": None, "pairs": 64},
    "large_state": {"state": 256, "pairs": 64},
    "packed": {"batch": 1, "sequences": 5, "initial": True, "final": True},
    "float32": {"dtype": "float32"},
    "float32_default": {"dtype": "float32", "precision": "default", "rank": None, "initial": True},
    "float32_packed": {"dtype": "float32", "batch": 1, "sequences": 5, "norm": True, "final": True, "rotary": "half"},
    "float32_wide": {"dtype": "float32", "head_dim": 128, "rank": None, "pairs": 64},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_plan_is_sound_and_returns_every_gradient(changes):
    p = problem(**changes)
    plan = backward(p, archs=["sm_90"])
    plan.check("sm_90")
    moving = [b for b in p.operands if b.name not in ("dy", "cu_seqlens") and not b.name.startswith("d_")]
    assert [(b.name, b.dtype) for b in plan.results] == [(f"grad_{b.name}", b.dtype) for b in moving]
    for before, after in zip(moving, plan.results, strict=True):
        rows = p.batch if before.name in plan_backward.PARAMETERS else before.shape[0]
        assert after.shape == (rows, *before.shape[1:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", config.SUPPORTED_ARCHS)
def test_kernels_compile_for_every_architecture(arch, dtype):
    sizes = {"state": 64, "head_dim": 32, "pairs": 16, "dtype": dtype}
    compile_plan(backward(problem(norm=True, initial=True, final=True, **sizes), archs=[arch]), arch)


@pytest.mark.parametrize("archs", [["sm_90"], ["sm_80", "sm_90"]], ids=len)
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_kernels_compile_with_every_option(changes, archs):
    compile_plan(backward(problem(**changes), archs=archs), "sm_90")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float16"}, "take bfloat16 and float32, got float16"),
        ({"sequences": 40_000}, "up to 32,767 packed sequences, got 40,000"),
        ({"state": 36}, "multiples of 8 up to 256 as state, got 36"),
        ({"state": 264}, "up to 256 as state, got 264"),
        ({"head_dim": 136}, "up to 128 as head_dim, got 136"),
        ({"pairs": 0}, "at least one rotated pair"),
        ({"batch": 40_000}, "up to 65,535 heads in a batch, got 160,000"),
    ],
)
def test_what_the_kernels_do_not_do_is_refused_with_limit_and_figure(changes, words):
    with pytest.raises(NotImplementedError, match=words):
        backward(problem(**changes))


def test_tiles_are_as_large_as_the_shared_memory_allows():
    def tile(arch, **changes):
        plan = backward(problem(**changes), archs=[arch])
        plan.check(arch)
        found = heuristic(problem(**changes), [arch])
        return found.rows, found.tokens

    assert tile("sm_80") == (64, 16)
    assert tile("sm_86") == (32, 8)
    assert tile("sm_90", state=256) == (32, 8)
    assert tile("sm_90", dtype="float32") == (64, 16)
    assert tile("sm_90", dtype="float32", rank=None) == (64, 64)
    assert tile("sm_90", dtype="float32", rank=None, pairs=64) == (32, 32)
    assert tile("sm_90", dtype="float32", rank=None, pairs=64, head_dim=128) == (32, 16)
    assert tile("sm_80", dtype="float32") == (32, 8)


def test_a_device_with_less_shared_memory_refuses_with_both_figures():
    plan = backward(problem(dtype="float32"), archs=["sm_86"])
    with pytest.raises(NotImplementedError, match=r"shared memory on sm_86: [\d,]+ bytes, at most 101,376"):
        plan.check("sm_86")


def test_a_tile_has_at_most_64_rows_whatever_the_rank_and_the_chunk():
    for rank in range(1, 9):
        for chunk_size in (None, 1, 7, 64, 256):
            p = problem(rank=rank, chunk_size=chunk_size)
            assert rank <= ranks(p) < 2 * rank
            assert heuristic(p, ["sm_90"]).tokens * ranks(p) <= 64
    with pytest.raises(NotImplementedError, match="a tile has 64"):
        backward(problem(), BackwardConfig(tokens=32))
    with pytest.raises(NotImplementedError, match="take a state up to 128, got 256"):
        backward(problem(state=256), BackwardConfig(tokens=16))
    with pytest.raises(NotImplementedError, match="a tile has 32"):
        backward(problem(), BackwardConfig(tokens=16, rows=32))
    with pytest.raises(ValueError, match="rows must be 32 or 64"):
        BackwardConfig(tokens=16, rows=48)


def test_few_chunks_share_the_heads_of_a_group_among_blocks():
    assert heuristic(problem(batch=1, seq=256, heads=32), ["sm_90"]).parts > 1
    assert heuristic(problem(groups=4), ["sm_90"]).parts == 1
    assert heuristic(problem(batch=8, seq=16_384, heads=32), ["sm_90"]).parts == 1  # sums of parts cost more
    with pytest.raises(ValueError, match="at least 1"):
        dataclasses.replace(heuristic(problem(), ["sm_90"]), parts=0)


@pytest.mark.parametrize(
    ("changes", "archs"),
    [
        ({}, ["sm_80", "sm_90"]),
        ({"norm": True}, ["sm_90"]),
        ({"rank": 3}, ["sm_90"]),
        ({"rank": 1}, ["sm_90"]),  # with weights of ranks: too much shared memory
        ({"fold": False}, ["sm_90"]),
        ({"state": 64}, ["sm_90"]),
        ({"head_dim": 128}, ["sm_90"]),
        ({"pairs": 30}, ["sm_90"]),
        ({"pairs": 12}, ["sm_90"]),  # of four ranks
        ({"chunk_size": 8}, ["sm_90"]),
        ({"dtype": "float32"}, ["sm_90"]),
        ({"batch": 1, "sequences": 2}, ["sm_90"]),
        ({"batch": 1, "seq": 2**23}, ["sm_90"]),  # a head's states are more than 2**31 numbers
    ],
)
def test_warpgroups_serve_the_sizes_of_models_on_sm_90_alone(changes, archs):
    assert heuristic(problem(), ["sm_90"]).warpgroups
    assert not heuristic(problem(**changes), archs).warpgroups


def test_slices_of_a_large_batch_share_scratch():
    assert heuristic(problem(batch=4, seq=2048, heads=32), ["sm_90"]).slices == 1
    assert heuristic(problem(batch=8, seq=2048, heads=32, rank=None), ["sm_90"]).slices == 1
    large = problem(batch=8, seq=2048, heads=32, initial=True)
    config = heuristic(large, ["sm_90"])
    assert config.slices == 2
    sliced, whole = (backward(large, dataclasses.replace(config, slices=slices)) for slices in (2, 1))
    sliced.check("sm_90")
    assert sliced.results == whole.results
    assert sum(b.nbytes for b in sliced.scratch) == sum(b.nbytes for b in whole.scratch) // 2
    assert len(sliced.launches) == 2 * len(whole.launches)
    with pytest.raises(ValueError, match="must divide the batch"):
        backward(large, dataclasses.replace(config, slices=3))


def test_few_heads_walk_a_row_in_segments():
    assert heuristic(problem(batch=4, seq=2048, heads=32), ["sm_90"]).segments == 1
    config = heuristic(problem(batch=1, seq=131_072, heads=32), ["sm_90"])
    assert config.segments == 4
    plan = backward(problem(batch=1, seq=131_072, heads=32), config)
    names = ("schedule", "walk", "walk", "chunk")
    assert [launch.name.split("<")[0] for launch in plan.launches[:4]] == [
        f"jax_ssd::mamba3_backward_{n}" for n in names
    ]
    with pytest.raises(ValueError, match="at least 1"):
        dataclasses.replace(config, segments=0)
