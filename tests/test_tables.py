"""The shipped tables: every entry can be planned, and every choice in one computes the right thing in an emulator."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from importlib import resources
from typing import Any

import numpy as np
import pytest

from benchmarks import tables
from jax_ssd import config, tune
from jax_ssd.mamba2 import choices, plan_cuda, plan_cuda_backward
from jax_ssd.mamba2.problem import Problem
from jax_ssd.mamba3 import choices as mamba3_choices
from jax_ssd.mamba3.problem import Problem as Mamba3Problem
from jax_ssd.plans import Buffer
from tests import cuda_emulator, mamba3_calls, mamba3_steps, scan_float64, tile_emulator
from tests.gradients_float64 import gradients
from tests.scan_float64 import error, problem, random_operands
from tests.test_kernels_backward import operands_of
from tests.test_kernels_step import split

TUNABLES = {
    (t.op, t.implementation): t
    for t in (*vars(choices).values(), *vars(mamba3_choices).values())
    if isinstance(t, tune.Tunable)
}
TOLERANCE = {"float32 highest": 3e-6, "float32 default": 1.2e-3, "float16": 1e-3, "bfloat16": 8e-3}


def entries() -> Iterator[tuple[str, dict[str, Any], str]]:
    """(architecture, record, implementation) of every result that is shipped."""
    for arch in config.SUPPORTED_ARCHS:
        for record in tune.shipped(arch):
            for implementation in record["results"]:
                yield arch, record, implementation


def choice_of(tunable: tune.Tunable, p: Any, result: dict[str, Any]) -> Any:
    return dataclasses.replace(tunable.heuristic(p), **result["choice"])


def problem_of(op: str, told: dict[str, Any]) -> Any:
    """The problem that a record of an op describes."""
    if op == "mamba3_step":
        return mamba3_step_of(told)
    if op == "mamba3_forward":
        return mamba3_scan_of(told)
    return problem(**{name: value for name, value in told.items() if name != "dt_limit"})


def mamba3_step_of(told: dict[str, Any]) -> Any:
    """Records name the operands without their types; those of a state are the default ones."""
    names = told["operands"].split()
    sizes = ("batch", "heads", "head_dim", "groups", "state", "pairs", "dtype", "param_rows", "rotary")
    options: dict[str, Any] = {name: told[name] for name in sizes}
    options |= {"fold": "mimo_o" in names, "gate": "z" in names, "skip": "D" in names, "norm": "norm_weight" in names}
    p = mamba3_steps.step_problem(rank=told["rank"] if "mimo_v" in names else None, **options)
    same = {name: told[name] for name in ("norm_eps", "return_final_state", "chunk_size", "precision")}
    return dataclasses.replace(p, operands=tuple(p.given[name] for name in names), **same)


def mamba3_scan_of(told: dict[str, Any]) -> Mamba3Problem:
    """Records name the operands without their shapes and types."""
    b, s, h, g, d, n, r, a = (
        told[name] for name in ("batch", "seq", "heads", "groups", "head_dim", "state", "rank", "pairs")
    )
    shapes = {"q": (b, s, r, g, n), "k": (b, s, r, g, n), "v": (b, s, h, d), "z": (b, s, h, d), "angles": (b, s, h, a)}
    shapes |= dict.fromkeys(("adt", "dt", "trap"), (b, h, s)) | dict.fromkeys(("q_bias", "k_bias"), (1, h, r, n))
    shapes |= dict.fromkeys(("mimo_v", "mimo_o", "mimo_z"), (1, h, r, d)) | {"D": (1, h), "norm_weight": (1, h, d)}
    pieces = {"angle": (a,), "ssm": (d, n), "k": (r, n), "v": (d,)}
    shapes |= {f"state_{name}": (b, 1, h, *piece) for name, piece in pieces.items()}
    operands = tuple(
        Buffer(name, shapes[name], told["dtype"] if name in ("q", "k", "v", "z") else "float32")
        for name in told["operands"].split()
    )
    fields: dict[str, Any] = told | {"operands": operands}
    return Mamba3Problem(**fields)


def mamba3_call_of(told: dict[str, Any]) -> mamba3_calls.Call:
    """The call of a scan that a record, or a described problem, is about; rows are not packed."""
    names = told["operands"].split()
    letters = {"r": "mimo_v", "f": "mimo_o", "z": "z", "D": "D", "n": "norm_weight", "s": "state_ssm"}
    options = "".join(letter for letter, name in letters.items() if name in names)
    shared = ("batch", "seq", "heads", "groups", "head_dim", "state", "rank", "pairs", "dtype", "rotary", "precision")
    sizes = {name: told[name] for name in (*shared, "chunk_size")}
    return mamba3_calls.Call("of a record", options=options, **sizes)


def small(tunable: tune.Tunable, record: dict[str, Any], result: dict[str, Any]) -> tuple[Any, Any]:
    """A problem of few tokens and heads for the record's kernels, and the choice made at the record's own size."""
    with config.override(target_arch=record["arch"]):
        return _small(tunable, record, result)


def _small(tunable: tune.Tunable, record: dict[str, Any], result: dict[str, Any]) -> tuple[Any, Any]:
    choice = choice_of(tunable, problem_of(tunable.op, record["problem"]), result)
    for told, fewer in _sizes(tunable, choice, record["problem"]):
        p = problem_of(tunable.op, told)
        try:
            tunable.make(p, fewer)
        except (ValueError, NotImplementedError):
            continue
        return p, fewer
    raise AssertionError(f"no small problem for {choice}")


def _sizes(tunable: tune.Tunable, choice: Any, told: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Sizes worth trying, the best first, each with the choice.

    Pieces that work is cut into stay as many, but of segments a first, one between and a last one are enough.
    """
    short = told | {"batch": min(told["batch"], 5), "groups": 1}  # rows that share a chunk keep their length
    whole = told | {"batch": 1, "groups": 1, "return_final_state": True}
    if isinstance(choice, plan_cuda.Split) and choice.own_starts:
        choice = dataclasses.replace(choice, segments=min(choice.segments, 3), chunks_per_segment=2)
        sizes = [whole | {"seq": (2 * choice.segments - 2) * plan_cuda.CHUNK + 1}]
    elif isinstance(choice, plan_cuda.Split) and choice.segments > 1:
        least = plan_cuda.shortest_piece(problem_of(tunable.op, told))
        of_segment, segments = least // plan_cuda.CHUNK + 1, min(choice.segments, 3)
        choice = dataclasses.replace(choice, segments=segments, chunks_per_segment=of_segment)
        sizes = [whole | {"seq": (segments - 1) * of_segment * plan_cuda.CHUNK + least + 1}]
    elif isinstance(choice, plan_cuda_backward.BackwardBlocks) and told["seq"] > plan_cuda_backward.CHUNK:
        choice = dataclasses.replace(choice, segments=min(choice.segments, 3))
        seq = max(2, 2 * choice.segments - 1) * plan_cuda_backward.CHUNK + 1
        batch = choice.row_slices + 1 if choice.row_slices > 1 else 1  # the last turn has fewer rows
        yield whole | {"seq": seq, "batch": batch, "heads": 2 * choice.head_blocks - 1}, choice
        return
    elif tunable.op.endswith("step"):
        sizes = [told | {"batch": 1, "groups": 1}]
    else:
        chunk = getattr(choice, "chunk", 64)
        sizes = [whole | {"seq": n} for n in (2 * chunk + 1, 4 * chunk)]
    for size, heads in itertools.product([*sizes, short], (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)):
        yield size | {"heads": heads}, choice


def test_small_problems_keep_the_pieces_of_a_choice():
    found = set()
    for arch, record, implementation in entries():
        tunable, result = TUNABLES[record["op"], implementation], record["results"][implementation]
        with config.override(target_arch=arch):
            full = choice_of(tunable, problem_of(record["op"], record["problem"]), result)
            p, choice = small(tunable, record, result)
        for name, value in dataclasses.asdict(full).items():
            if name != "chunks_per_segment":
                assert getattr(choice, name) == (min(value, 3) if name == "segments" else value), (record, name)
        if isinstance(choice, plan_cuda_backward.BackwardBlocks):
            most = plan_cuda_backward.most_pieces(p)
            assert all(getattr(choice, name) <= most[name] for name in most), (record, choice)
            found |= {("head_blocks", choice.head_blocks), ("row_slices", choice.row_slices)}
        elif isinstance(choice, plan_cuda.Split):
            assert (choice.segments - 1) * choice.chunks_per_segment * plan_cuda.CHUNK < p.seq
            found.add(("segments", choice.segments))
    assert {("head_blocks", 3), ("row_slices", 2), ("segments", 3)} <= found


def test_there_is_a_table_and_it_says_where_it_comes_from():
    assert list(tune.shipped("sm_90"))
    for arch in config.SUPPORTED_ARCHS:
        file = resources.files("jax_ssd").joinpath("tables", f"{arch}.json")
        if file.is_file():
            assert tune.dump(tune.parse(file.read_text())) == file.read_text()
    for arch, record, implementation in entries():
        assert record["arch"] == arch
        result = record["results"][implementation]
        assert result["us"] <= result["heuristic_us"]
        assert {"date", "device", "driver", "versions", "command"} <= set(result["provenance"])
        assert "/" not in result["provenance"]["command"]
        assert result["sources"]


def test_every_entry_is_planned_for_its_own_problem():
    for arch, record, implementation in entries():
        with config.override(tuning_file="off", target_arch=arch):
            tunable = TUNABLES[record["op"], implementation]
            p = problem_of(record["op"], record["problem"])
            chosen, result = tunable.choice(p, arch), record["results"][implementation]
            measured, usual = choice_of(tunable, p, result), tunable.heuristic(p)
            if not tune.is_fresh(result):  # of earlier kernels only what fits sizes far away is taken
                measured = dataclasses.replace(measured, **{name: getattr(usual, name) for name in tunable.local})
            assert chosen == measured
            tunable.make(p, chosen).check(arch)


def distinct() -> list[Any]:
    """One entry for each plan that the tables can select, at the size that it is tested at.

    Choices that differ in nothing but how long segments are come to the same plan there.
    """
    found: dict[str, Any] = {}
    for arch, record, implementation in entries():
        tunable, result = TUNABLES[record["op"], implementation], record["results"][implementation]
        p, choice = small(tunable, record, result)
        with config.override(target_arch=arch):
            plan = tunable.make(p, choice)
        key = f"{arch} {tunable.op} {implementation} {tune.describe(p)} {plan.describe()}"
        found.setdefault(key, (record, result, implementation))
    return [pytest.param(*entry, id=f"{entry[0]['op']}-{number}") for number, entry in enumerate(found.values())]


def marked() -> list[Any]:
    """Those, of which the heuristic's own take their time."""
    mark = pytest.mark.slow
    return [one if one.values[1]["choice"] else pytest.param(*one.values, id=one.id, marks=mark) for one in distinct()]


def operands_for(p: Any, op: str) -> dict[str, np.ndarray]:
    """Random operands of a kernel's plan by name."""
    if op == "mamba3_forward":
        return mamba3_call_of(tune.describe(p)).operands()
    if op == "mamba3_step":
        return mamba3_steps.random_operands(p)
    if op == "mamba2_step":
        return split(p, random_operands(dataclasses.replace(p, has_initial_state=True)))
    return operands_of(p) if op == "mamba2_backward" else random_operands(p)


def expected_of(p: Problem, op: str, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results of a kernel of Mamba-2 in float64."""
    if op == "mamba2_step":
        whole = dataclasses.replace(p, has_initial_state=True)
        scanned = scan_float64.scan(whole, random_operands(whole))
        return {"y": scanned["y"][:, 0], "new_state": scanned["final_state"]}
    return gradients(p, operands) if op == "mamba2_backward" else scan_float64.scan(p, operands)


def check(p: Any, op: str, operands: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
    """That results by name are those of the op."""
    if op == "mamba3_step":
        mamba3_steps.check(p, operands, got)
        return
    if op == "mamba3_forward":
        call = mamba3_call_of(tune.describe(p))
        names = [name for name in got if name == "y" or name.startswith("final_")]
        found = mamba3_calls.errors([got[name] for name in names], call.truth())
        assert max(found.values()) < call.bar, found
        return
    kind = f"float32 {p.precision}" if p.dtype == "float32" else p.dtype
    expected = expected_of(p, op, operands)
    for name, value in got.items():
        cancels = kind == "bfloat16" and name in ("dA", "ddt_bias")  # few numbers, long sums in which much cancels
        assert error(value, expected[name]) < (2e-2 if cancels else TOLERANCE[kind]), name


def emulate(record: dict[str, Any], result: dict[str, Any], implementation: str) -> None:
    """Runs a choice at a small size in an emulator and checks what comes out."""
    emulator = {"cutile": tile_emulator, "cuda": cuda_emulator}[implementation]
    if emulator is cuda_emulator and cuda_emulator.missing():
        pytest.skip(str(cuda_emulator.missing()))
    tunable = TUNABLES[record["op"], implementation]
    p, choice = small(tunable, record, result)
    operands = operands_for(p, record["op"])
    with config.override(target_arch=record["arch"]):
        plan = tunable.make(p, choice)
    check(p, record["op"], operands, emulator.run(plan, operands))


@pytest.mark.parametrize(("record", "result", "implementation"), marked())
def test_every_choice_is_right(record, result, implementation):
    emulate(record, result, implementation)


def test_scans_of_mamba3_are_described_whole():
    for call in mamba3_calls.CALLS:
        if not call.cu_seqlens:
            p = call.problem()
            assert mamba3_scan_of(tune.describe(p)) == p, call.name


# One of each op that can be tuned, whether the shipped tables hold it or not.
EXAMPLES = [
    (mamba3_steps.step_problem(**{**mamba3_steps.MODEL, "rank": 4}), "mamba3_step", "cuda", {"rows": 2}),
    (mamba3_steps.step_problem(**mamba3_steps.SHAPES["siso"]), "mamba3_step", "cuda", {"threads": 64}),
    (problem(dtype="bfloat16", seq=1000, state=32), "mamba2_forward", "cutile", {"chunk": 32, "occupancy": 3}),
    (problem(dtype="bfloat16", seq=1000, state=32), "mamba2_backward", "cutile", {"chunk": 32, "segments": 2}),
    (problem(dtype="bfloat16", seq=1, state=32, heads=8), "mamba2_step", "cutile", {"head_block": 1}),
    (mamba3_calls.Call("", seq=300, groups=1).problem(), "mamba3_forward", "cuda", {"segments": 2}),
]


@pytest.mark.parametrize(
    ("p", "op", "implementation", "choice"), EXAMPLES, ids=[f"{op}-{c}" for _, op, _, c in EXAMPLES]
)
def test_every_tunable_op_can_have_a_record(p, op, implementation, choice, monkeypatch):
    with config.override(tuning_file="off", target_arch="sm_90"):
        digests = tune.digests(TUNABLES[op, implementation].make(p, None))
    result = {"choice": choice, "us": 1.0, "heuristic_us": 1.0, "sources": digests}
    record = {"op": op, "arch": "sm_90", "problem": tune.describe(p), "results": {implementation: result}}
    (record,) = tune.parse(tune.dump([record]))
    assert problem_of(op, record["problem"]) == p
    monkeypatch.setattr(tune, "shipped", lambda arch: (record,) if arch == "sm_90" else ())
    test_every_entry_is_planned_for_its_own_problem()
    emulate(record, result, implementation)


def test_merging_takes_what_is_measured_with_these_kernels(tmp_path, monkeypatch, capsys):
    shipped = list(tune.shipped("sm_90"))
    old = next(record for record in shipped if record["op"] == "mamba2_forward")
    (name, result), *_ = old["results"].items()
    digests = tune.digests(TUNABLES[old["op"], name].make(problem_of(old["op"], old["problem"]), None))
    fresh = result | {"us": 1.0, "sources": digests}
    fresh["provenance"] = result["provenance"] | {"command": "python /home/me/.venv/bin/tune step --output /tmp/a.json"}
    stale, bound = result | {"us": 2.0, "sources": {"gone.cu": "0"}}, fresh | {"us": 3.0, "host_bound": True}
    found = [old | {"results": {name: fresh}}]
    found += [
        old | {"problem": old["problem"] | {"batch": n}, "results": {name: r}} for n, r in ((3, stale), (5, bound))
    ]
    (tmp_path / "found.json").write_text(tune.dump(found))
    (tmp_path / "sm_90.json").write_text(tune.dump(shipped))
    monkeypatch.setattr(tables, "TABLES", tmp_path)
    tables.main([str(tmp_path / "found.json")])
    assert "1 results taken" in capsys.readouterr().out
    merged = tune.parse((tmp_path / "sm_90.json").read_text())
    assert len(merged) == len(shipped)
    (new,) = [record for record in merged if record["problem"] == old["problem"] and record["op"] == old["op"]]
    assert new["results"][name]["us"] == 1.0
    assert new["results"][name]["provenance"]["command"] == "python tune step --output a.json"
