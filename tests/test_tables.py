"""The shipped tables: every entry can be planned, and every choice in one computes the right thing in an emulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib import resources
from typing import Any

import numpy as np
import pytest

from jax_ssd import config, tune
from jax_ssd.mamba2 import choices
from jax_ssd.mamba2.problem import Problem
from tests import cuda_emulator, scan_float64, tile_emulator
from tests.gradients_float64 import gradients
from tests.scan_float64 import error, problem, random_operands
from tests.test_kernels_backward import operands_of
from tests.test_kernels_step import split

TUNABLES = {(t.op, t.implementation): t for t in vars(choices).values() if isinstance(t, tune.Tunable)}
TOLERANCE = {"float32 highest": 3e-6, "float32 default": 1.2e-3, "float16": 1e-3, "bfloat16": 8e-3}


def entries() -> Iterator[tuple[str, dict[str, Any], str]]:
    """(architecture, record, implementation) of every result that is shipped."""
    for arch in config.SUPPORTED_ARCHS:
        for record in tune.shipped(arch):
            for implementation in record["results"]:
                yield arch, record, implementation


def choice_of(tunable: tune.Tunable, p: Problem, result: dict[str, Any]) -> Any:
    return dataclasses.replace(tunable.heuristic(p), **result["choice"])


def problem_of(record: dict[str, Any], **changes: Any) -> Problem:
    told = {name: value for name, value in record["problem"].items() if name != "dt_limit"}
    return problem(**told, **changes)


def small(tunable: tune.Tunable, record: dict[str, Any], result: dict[str, Any]) -> tuple[Problem, Any]:
    """A problem of few tokens and heads for the record's kernels, and the choice made at the record's own size."""
    choice = choice_of(tunable, problem_of(record), result)
    seq = 1 if tunable.op.endswith("step") else 2 * getattr(choice, "chunk", 64) + 1
    for heads in (1, 2, 4, 8, 16, 32):
        told = record["problem"] | {"batch": 1, "seq": seq, "heads": heads, "groups": 1, "return_final_state": True}
        p = problem_of({"problem": told})
        try:
            tunable.make(p, choice)
        except (ValueError, NotImplementedError):
            continue
        return p, choice
    raise AssertionError(f"no small problem for {choice}")


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


def test_every_entry_is_planned_for_its_own_problem():
    with config.override(tuning_file="off"):
        for arch, record, implementation in entries():
            tunable = TUNABLES[record["op"], implementation]
            p = problem_of(record)
            chosen = tunable.choice(p, arch)
            assert chosen == choice_of(tunable, p, record["results"][implementation])
            tunable.make(p, chosen).check(arch)


def distinct() -> list[Any]:
    """One entry for each kernel and choice that the tables can select."""
    found: dict[str, Any] = {}
    for _, record, implementation in entries():
        result = record["results"][implementation]
        shared = [record["problem"].get(name) for name in tune.SHARED]
        choice = choice_of(TUNABLES[record["op"], implementation], problem_of(record), result)
        found.setdefault(str((record["op"], shared, choice)), (record, result, implementation))
    return [pytest.param(*entry, id=f"{entry[0]['op']}-{number}") for number, entry in enumerate(found.values())]


def operands_and_expected(p: Problem, op: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Random operands of a kernel's plan by name, and its results in float64."""
    if op.endswith("step"):
        whole = dataclasses.replace(p, has_initial_state=True)
        operands = random_operands(whole)
        scanned = scan_float64.scan(whole, operands)
        return split(p, operands), {"y": scanned["y"][:, 0], "new_state": scanned["final_state"]}
    if op.endswith("backward"):
        operands = operands_of(p)
        return operands, gradients(p, operands)
    operands = random_operands(p)
    return operands, scan_float64.scan(p, operands)


def check(p: Problem, got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    kind = f"float32 {p.precision}" if p.dtype == "float32" else p.dtype
    for name, value in got.items():
        assert error(value, expected[name]) < TOLERANCE[kind], name


@pytest.mark.parametrize(("record", "result", "implementation"), distinct())
def test_every_choice_is_right(record, result, implementation):
    emulator = {"cutile": tile_emulator, "cuda": cuda_emulator}[implementation]
    if emulator is cuda_emulator and cuda_emulator.missing():
        pytest.skip(str(cuda_emulator.missing()))
    tunable = TUNABLES[record["op"], implementation]
    p, choice = small(tunable, record, result)
    operands, expected = operands_and_expected(p, record["op"])
    check(p, emulator.run(tunable.make(p, choice), operands), expected)
