"""The plan of the CUDA C++ backward: pieces, scratch, refusals, and that its kernels compile."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jax_ssd.mamba2 import choices, plan_cuda_backward
from jax_ssd.mamba2.plan_cuda_backward import BackwardBlocks
from jax_ssd.mamba2.problem import Problem
from tests.compilation import compile_plan
from tests.scan_float64 import problem

EVERY = dict.fromkeys(("has_D", "has_dt_bias", "has_initial_state", "has_dfinal", "dt_softplus"), True)
FIRST = {"batch": 4, "seq": 16384, "heads": 8, "groups": 1}
WIDE = {"batch": 8, "seq": 4096, "heads": 80, "groups": 1}
LONG = {"batch": 1, "seq": 131072, "heads": 128, "groups": 8}
SWEEP = [{**FIRST, "state": state, "seq": seq << 10} for state in (64, 128, 256, 512) for seq in (1, 4, 16, 64, 256)]


def model(**changes: Any) -> Problem:
    """A problem that the kernels take."""
    return problem(**{"dtype": "bfloat16", "seq": 200, "head_dim": 64, "state": 128, "chunk_size": None, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32"}, "x in bfloat16, got float32"),
        ({"dtype": "float16"}, "x in bfloat16, got float16"),
        ({"dt_dtype": "float64"}, "dt in .* got float64"),
        ({"head_dim": 80}, "multiple of 64, got 80"),
        ({"state": 96}, "multiple of 64 up to 512, got 96"),
        ({"state": 576}, "multiple of 64 up to 512, got 576"),
        ({"seq": 63}, "64 tokens or more, or of 16, 32, 64 without states, got 63"),
        ({"seq": 16, "has_initial_state": True}, "without states, got 16"),
        ({"chunk_size": 64}, "chunk_size of 128, got 64"),
        ({"has_z": True}, "no z"),
        ({"has_runs": True}, "no segment_ids"),
        ({"batch": 1, "seq": 128, "heads": 1, "groups": 1}, "fill 66 thread blocks or more, got 1"),
    ],
)
def test_refusals_name_the_limit_and_the_figure(changes, said):
    with pytest.raises(NotImplementedError, match=said):
        plan_cuda_backward.backward(model(**changes))


def test_other_architectures_are_refused():
    with pytest.raises(NotImplementedError, match="sm_90"):
        plan_cuda_backward.backward(model(), BackwardBlocks()).check("sm_100")


def test_small_calls_are_planned_where_the_blocks_are_given():
    p = model(batch=1, seq=128, heads=1, groups=1)
    plan_cuda_backward.backward(p, BackwardBlocks()).check("sm_90")


@pytest.mark.parametrize("sizes", [{"state": 512}, {"seq": 20, "state": 512}, {"head_dim": 320}], ids=str)
def test_small_calls_that_no_other_kernel_takes_are_planned(sizes):
    plan_cuda_backward.backward(model(**{"batch": 1, "seq": 128, "heads": 1, "groups": 1, **sizes})).check("sm_90")


def test_a_grid_that_no_gpu_takes_is_refused():
    p = model(batch=1 << 26, seq=128, heads=64, groups=64)
    with pytest.raises(NotImplementedError, match="grid axis x"):
        plan_cuda_backward.backward(p, BackwardBlocks()).check("sm_90")


@pytest.mark.parametrize("changes", [{"segments": 3}, {"row_slices": 3}, {"head_blocks": 3}], ids=str)
def test_no_more_pieces_than_there_are(changes):
    p = model(batch=2, seq=200, heads=4, groups=2)
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be at most 2 here, got 3"):
        plan_cuda_backward.backward(p, BackwardBlocks(**changes))
    choices.CUDA_BACKWARD.make(p, BackwardBlocks(**changes)).check("sm_90")  # a record of a larger call


@pytest.mark.parametrize("changes", [{"segments": 0}, {"row_slices": 0}, {"head_blocks": 0}, {"segments": 65}])
def test_blocks_that_make_no_sense(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        BackwardBlocks(**changes)


@pytest.mark.parametrize("sizes", [*SWEEP, WIDE, LONG], ids=str)
def test_memory_is_at_most_half_more_than_the_arrays_of_a_training_step(sizes):
    made = plan_cuda_backward.backward(model(**sizes))
    arrays, scratch = (sum(b.nbytes for b in some) for some in ((*made.operands, *made.results), made.scratch))
    y = next(b.nbytes for b in made.operands if b.name == "x")  # which the forward has written
    assert arrays + scratch <= 1.5 * (arrays + y)
    assert scratch <= max(0.5 * (arrays + y), 64 << 20)


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        (FIRST, BackwardBlocks(8, 1, 1)),
        (WIDE, BackwardBlocks(1, 2, 1)),
        ({"batch": 1, "seq": 64, "heads": 1, "groups": 1}, BackwardBlocks(1, 1, 1)),
        (LONG, BackwardBlocks(1, 1, 1)),
        ({"batch": 4096, "seq": 64, "heads": 24, "groups": 1}, BackwardBlocks(1, 1, 1)),
        ({"batch": 4096, "seq": 16, "heads": 24, "groups": 1}, BackwardBlocks(1, 1, 1)),
        ({"batch": 4, "seq": 1024, "heads": 8, "groups": 1, "state": 512}, BackwardBlocks(1, 2, 4)),
        ({"batch": 4, "seq": 1024, "heads": 8, "groups": 1, "state": 256}, BackwardBlocks(1, 2, 4)),
    ],
    ids=str,
)
def test_heuristic(sizes, blocks):
    assert plan_cuda_backward.backward_blocks(model(**sizes)) == blocks


@pytest.mark.parametrize(("state", "blocks"), [(192, 3), (256, 2), (512, 4)])
def test_large_states_are_walked_and_accumulated_in_blocks_of_columns(state, blocks):
    made = plan_cuda_backward.backward(model(batch=2, seq=1000, heads=4, groups=1, state=state), BackwardBlocks(2))
    grids = {one.name.split("<")[0]: one.grid[0] for one in made.launches}
    assert "chunk_gradients" not in grids
    assert grids["pair_gradients"] == 2 * 8
    assert grids["state_gradients"] == 2 * 8 * blocks
    assert grids["walk"] == 2 * 2 * 2 * 2 * blocks
    assert {b.name: b.shape[0] for b in made.scratch}["decay_gradient"] == 1 + blocks


@pytest.mark.parametrize("heads", [1, 3, 24, 80])
@pytest.mark.parametrize("row_slices", [1, 2, 3])
def test_every_row_and_head_has_its_block(heads, row_slices):
    p = model(batch=5, seq=1000, heads=heads, groups=1)
    parts = min(2, heads)
    made = plan_cuda_backward.backward(p, BackwardBlocks(segments=3, row_slices=row_slices, head_blocks=parts))
    grids = [one.grid[0] for one in made.launches if one.name.startswith("chunk_gradients")]
    chunks = math.ceil(p.seq / 128)
    assert len(grids) == row_slices and sum(grids) == p.batch * chunks * parts
    stores = [one for one in made.launches if one.name.startswith("walk") and "true" in one.name]
    assert sum(one.grid[0] * one.block[0] for one in stores) == 2 * 3 * p.batch * heads * 128


def test_rows_that_share_chunks_have_no_states():
    made = plan_cuda_backward.backward(model(batch=4096, seq=16, heads=24, groups=1, has_D=True))
    assert [one.name.split("<")[0] for one in made.launches] == ["step_sizes", "chunk_gradients", "step_gradients"]
    assert made.launches[1].grid[0] == 4096 * 16 // 128
    assert {b.name for b in made.scratch} == {"step", "decay", "step_gradient", "decay_gradient"}


@pytest.mark.parametrize("changes", [{"has_dfinal": True}, {"param_rows": 9}, {"seq": 128}, {"state": 192}], ids=str)
def test_others_share_no_chunk(changes):
    assert plan_cuda_backward.shared_row(model(**{"batch": 9, "seq": 64, **changes})) == plan_cuda_backward.CHUNK


@pytest.mark.parametrize(("rows", "walked"), [(8, 5), (4, 5), (3, 2)])
def test_five_walk_together_if_that_saves_a_turn(rows, walked):
    made = plan_cuda_backward.backward(model(**{**WIDE, "batch": rows}), BackwardBlocks(1, 1, 1))
    assert next(one.block[0] for one in made.launches if one.name.startswith("walk")) == walked * 128


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        (FIRST, BackwardBlocks(16, 2, 1)),
        (WIDE, BackwardBlocks(1, 2, 2)),
        ({**EVERY, "seq": 900, "heads": 3, "groups": 1, "dt_dtype": "float16"}, BackwardBlocks(2)),
        ({**EVERY, "seq": 900, "state": 64, "head_dim": 128, "param_rows": 2}, BackwardBlocks(2)),
        ({**EVERY, "seq": 900, "state": 512, "heads": 4, "groups": 1}, BackwardBlocks(2, 1, 2)),
        ({"seq": 900, "state": 192}, BackwardBlocks(2)),
        ({"batch": 9, "seq": 16, "has_D": True, "has_dt_bias": True, "dt_softplus": True}, BackwardBlocks()),
    ],
    ids=str,
)
def test_compiles(changes, blocks):
    compile_plan(plan_cuda_backward.backward(model(**changes), blocks), "sm_90")
