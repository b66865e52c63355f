"""The plan of the CUDA C++ forward: how rows are divided, scratch, refusals, and that its kernels compile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jax_ssd.mamba2 import choices, plan_cuda
from jax_ssd.mamba2.plan_cuda import Split
from jax_ssd.mamba2.problem import Problem
from jax_ssd.plans import MAX_SHARED_MEMORY, Plan, TensorMapArg
from tests.compilation import compile_plan
from tests.scan_float64 import problem

FIRST = {"batch": 4, "seq": 16384, "heads": 8}
WIDE = {"batch": 8, "seq": 4096, "heads": 80}
EVERY = dict.fromkeys(("has_D", "has_z", "has_dt_bias", "has_initial_state", "dt_softplus"), True)


def model(**changes: Any) -> Problem:
    """A problem that the kernels take."""
    sizes = {"dtype": "bfloat16", "seq": 200, "groups": 1, "head_dim": 64, "state": 128, "chunk_size": None}
    return problem(**{**sizes, **changes})


def made(p: Problem) -> Plan:
    """The plan, however small the call."""
    return plan_cuda.forward(p, plan_cuda.split(p))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32"}, "take bfloat16, got float32"),
        ({"dtype": "float16"}, "take bfloat16, got float16"),
        ({"dt_dtype": "float64"}, "dt in .* got float64"),
        ({"head_dim": 80}, "multiple of 64, got 80"),
        ({"state": 96}, "state size that is a multiple of 64, at most 512, got 96"),
        ({"state": 576}, "at most 512, got 576"),
        ({"seq": 47}, "48 tokens or more, got 47"),
        ({"dt_limit": (-1.0, 1.0)}, r"steps >= 0: .* got dt_limit=\(-1.0, 1.0\)"),
        ({"chunk_size": 128}, "chunk_size of 64, got 128"),
        ({"has_runs": True}, "no segment_ids"),
        ({"batch": 2}, "fill 32 thread blocks or more, got 8"),
    ],
)
def test_refusals_name_the_limit_and_the_figure(changes, said):
    with pytest.raises(NotImplementedError, match=said):
        plan_cuda.forward(model(**changes))


@pytest.mark.parametrize("seq", [16, 1024])
def test_calls_that_no_other_kernel_takes_are_planned_however_small(seq):
    plan_cuda.forward(model(batch=1, seq=seq, heads=1, state=512)).check("sm_90")


def test_other_architectures_are_refused():
    with pytest.raises(NotImplementedError, match="written for sm_90, not for sm_100"):
        made(model()).check("sm_100")


@pytest.mark.parametrize("name", ["warpgroups", "blocks", "segments", "chunks_per_segment"])
def test_splits_that_make_no_sense(name):
    with pytest.raises(ValueError, match=name):
        replace(Split(2, 2, 1, 4), **{name: 0})


@pytest.mark.parametrize(("warpgroups", "blocks"), [(3, 1), (2, 3), (1, 5)])
def test_splits_that_no_multiprocessor_holds(warpgroups, blocks):
    """Three warpgroups would ask for 92,160 registers of 65,536, and wait for them forever."""
    with pytest.raises(ValueError, match="registers" if warpgroups > 2 else "at most 4 in all"):
        Split(warpgroups, blocks, 1, 4)


@pytest.mark.parametrize(
    ("changes", "split", "said"),
    [
        ({}, Split(2, 2, 2, 1), "the 4 chunks of a row"),  # tokens are left
        ({}, Split(2, 2, 1, 3), "the 4 chunks of a row"),
        ({}, Split(2, 2, 3, 2), "the 4 chunks of a row"),  # a segment is empty
        ({}, Split(2, 2, 3, 2, own_starts=True), "the 4 chunks of a row"),  # two are enough
        ({}, Split(2, 2, 1, 4, own_starts=True), "a single segment: it starts with the row"),
        ({}, Split(1, 3, 1, 4), "does not divide 4 blocks of a group"),
        ({}, Split(1, 4, 1, 4), "more than 16384 elements of state"),
        ({"state": 256}, Split(2, 2, 1, 4), "more than 16384 elements of state"),
        ({"state": 320}, Split(1, 1, 1, 4), "with a state in 2 parts"),
        ({"seq": 450}, Split(2, 2, 2, 4), "has a segment of 194 tokens: its start state takes the room of 256 in y"),
    ],
    ids=str,
)
def test_splits_that_do_not_fit_the_problem(changes, split, said):
    with pytest.raises(ValueError, match=said):
        plan_cuda.forward(model(**{"heads": 4, "groups": 1, **changes}), split)


@pytest.mark.parametrize(
    ("sizes", "split", "grids"),
    [
        (FIRST, Split(2, 2, 16, 16), [120, 512, 128]),  # few rows: each in segments, to fill the multiprocessors
        (WIDE, Split(2, 2, 1, 64), [3, 132]),  # many rows: cut into equal ranges
        ({**FIRST, "state": 256}, Split(2, 1, 8, 32), [112, 1024, 128]),  # a state of 256 takes twice the registers
        ({**FIRST, "state": 512}, Split(2, 1, 4, 64), [96, 2048, 128]),  # and one of 512 two warpgroups
        ({"batch": 1, "seq": 131072, "heads": 128, "groups": 8}, Split(2, 2, 4, 512), [96, 2048, 128]),
        ({"batch": 4, "seq": 1024, "heads": 8}, Split(1, 1, 4, 4), [96, 512, 128]),  # short: single blocks
        # Short, with room in y for the start states of two segments or none: each finds its own.
        ({"batch": 4, "seq": 1024, "heads": 8, "state": 256}, Split(2, 1, 8, 4, own_starts=True), [128]),
        ({"batch": 4, "seq": 1024, "heads": 8, "state": 512}, Split(2, 1, 4, 6, own_starts=True), [128]),
        ({"batch": 4, "seq": 2048, "heads": 8, "state": 512}, Split(2, 1, 4, 12, own_starts=True), [128]),
        ({"batch": 4, "seq": 2048, "heads": 8, "state": 256}, Split(1, 1, 4, 8), [96, 1024, 128]),
        ({"batch": 1, "seq": 1000, "heads": 80}, Split(1, 1, 1, 16), [80]),  # of small states not timed
        ({"seq": 100}, Split(1, 1, 1, 2), [8]),  # too short to be cut
        ({"batch": 132, "heads": 6, "groups": 3}, Split(2, 1, 1, 4), [132]),  # groups of two heads
        ({"batch": 4096, "seq": 16, "heads": 24, "return_final_state": False}, Split(2, 2, 1, 1), [132]),
    ],
    ids=str,
)
def test_heuristic(sizes, split, grids):
    p = model(**sizes)
    assert plan_cuda.split(p) == split
    assert [one.grid[0] for one in made(p).launches] == grids


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [
        ({"batch": 34, "heads": 16, "seq": 400}, True),
        ({"batch": 34, "heads": 16, "seq": 255}, False),  # no part of a row has room for a state of 128 in its y
        ({"batch": 66, "heads": 8, "seq": 400}, False),  # as many rows as multiprocessors
    ],
    ids=str,
)
def test_rows_are_cut_where_a_state_has_room(sizes, cut):
    p = model(**sizes)
    chunks = -(-p.seq // plan_cuda.CHUNK)
    plan = plan_cuda.forward(p, Split(2, 2, 1, chunks))
    assert [buffer.name for buffer in plan.scratch] == (["flags"] if cut else [])
    assert [one.pdl for one in plan.launches] == ([False, True] if cut else [False])


@pytest.mark.parametrize(("chunks", "length"), [(2, 1), (16, 7), (16, 10), (63, 30), (4096, 2000)])
def test_segments_with_starts_of_their_own_are_done_at_once(chunks, length):
    starts = plan_cuda.own_starts(chunks, length)
    lengths = [end - start for start, end in zip(starts, [*starts[1:], chunks], strict=True)]
    assert min(lengths) > 0 and lengths[0] == length
    work = [start * plan_cuda.LEAD_PERCENT / 100 + count for start, count in zip(starts, lengths, strict=True)]
    assert all(length <= one < length + 1 for one in work[:-1]) and work[-1] < length + 1


def test_segments_with_starts_of_their_own_need_no_other_kernel():
    plan = plan_cuda.forward(model(seq=1024, state=512), Split(2, 1, 3, 8, own_starts=True))
    assert [one.grid[0] for one in plan.launches] == [3 * 2 * 4] and not plan.scratch


def test_a_length_decides_whether_a_choice_has_segments_with_starts_of_their_own():
    """So that a search gets from one segment to several and back by changing one field after the other."""

    def grids(problem, **changes):
        choice = replace(plan_cuda.split(problem), **changes)
        return [one.grid[0] for one in choices.CUDA_FORWARD.make(problem, choice).launches]

    several, single = model(batch=4, seq=1024, heads=8, state=512), model(batch=1, seq=512, heads=40)
    assert grids(several) == [4 * 32] and grids(several, chunks_per_segment=16) == [32]
    assert grids(several, chunks_per_segment=1) == [4 * 32]  # no more than run at once
    assert grids(single) == grids(single, own_starts=True) == [40]
    assert grids(single, own_starts=True, chunks_per_segment=5) == [2 * 40]
    full = model(batch=2, seq=512, heads=80)
    assert grids(full, own_starts=True, chunks_per_segment=5) == grids(full)  # no room for two of a row


@pytest.mark.parametrize("seq", [48, 64, 65, 1000, 4097, 70_000])
@pytest.mark.parametrize("rows", [1, 5, 33, 66])
def test_segments_cover_a_row_and_none_is_empty(seq, rows):
    chosen = plan_cuda.split(model(batch=rows, seq=seq))
    chunks = -(-seq // plan_cuda.CHUNK)
    if chosen.own_starts:
        assert chosen.segments == len(plan_cuda.own_starts(chunks, chosen.chunks_per_segment))
    else:
        assert (chosen.segments - 1) * chosen.chunks_per_segment < chunks <= chosen.segments * chosen.chunks_per_segment


@pytest.mark.parametrize("state", [64, 128, 192, 256, 320, 448, 512])
@pytest.mark.parametrize("sizes", [FIRST, WIDE], ids=["first", "wide"])
def test_thread_blocks_fit_a_multiprocessor(sizes, state):
    plan = plan_cuda.forward(model(**sizes, state=state, has_z=True))
    plan.check("sm_90")
    assert all(0 <= one.shared_memory <= MAX_SHARED_MEMORY["sm_90"] for one in plan.launches)
    assert sum(buffer.nbytes for buffer in plan.scratch) <= 64 * 1024


@pytest.mark.parametrize(("seq", "rows"), [(16, 4), (3, 4), (17, 2), (33, 1), (64, 1), (65, 1)])
def test_short_rows_without_states_share_a_chunk(seq, rows):
    p = model(seq=seq, batch=5, return_final_state=False)
    assert plan_cuda.together(p) == rows
    maps = [one for one in made(p).launches[-1].arguments if isinstance(one, TensorMapArg)]
    assert {one.box[:2] for one in maps} == {(rows, 64 // rows)}


def test_maps_end_where_a_row_ends():
    """A chunk that reaches past the last token of a row must read zeros, not the next row."""
    plan = made(model(has_z=True))
    maps = [one for one in plan.launches[-1].arguments if isinstance(one, TensorMapArg)]
    assert [one.buffer for one in maps] == ["x", "B", "C", "z", "y"]
    for one in maps:
        assert plan.view(one)[0][:2] == (2, 200) and one.box[:2] == (1, 64)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**EVERY, "dt_dtype": "bfloat16", "dt_limit": (0.01, 2.0)},
        {**EVERY, "seq": 5000, "param_rows": 2, "return_final_state": False},
        {"seq": 5000, "state": 64},
        {"state": 256, "head_dim": 128, "has_initial_state": True},
        {"state": 448, "seq": 5000, "has_initial_state": True},
    ],
    ids=str,
)
def test_compiles(changes):
    compile_plan(made(model(**changes)), "sm_90")
