"""Measured choices: the nearest is found, a bad file or entry harms nothing, and a search can be interrupted."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import __main__ as command_line
from jax_ssd import compile as kernels
from jax_ssd import config, dispatch, launch, op, paths, search, sizes, timing, tune
from jax_ssd.mamba2 import choices, plan, plan_cuda
from jax_ssd.mamba3.problem import Problem as Mamba3Problem
from jax_ssd.plans import Buffer
from jax_ssd.tools import tune as tune_tool
from tests.scan_float64 import problem

ARCH = "sm_90"
PROBLEM = problem(dtype="bfloat16", batch=4, seq=1024, heads=8, groups=1, head_dim=64, state=128, chunk_size=None)


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    """A tuning file of our own, no shipped table, no warning spoken before."""
    monkeypatch.setattr(tune, "shipped", lambda arch: ())
    monkeypatch.setattr(tune, "_warned", set())
    monkeypatch.setattr(tune, "_session", [])
    path = tmp_path / "folder" / "tuning.json"
    with config.override(tuning_file=path, target_arch=ARCH, cache_dir="off"):
        yield path


def store(p: Any = PROBLEM, us: float = 10.0, implementation: str = "cutile", **changes: Any) -> None:
    made = {"cutile": choices.FORWARD, "cuda": choices.CUDA_FORWARD}[implementation].heuristic(p)
    measured_with = tune.digests({"cutile": plan, "cuda": plan_cuda}[implementation].forward(p, made))
    result = {"choice": changes, "us": us, "heuristic_us": us, "tried": [], "sources": measured_with}
    tune.store("mamba2_forward", ARCH, p, implementation, result)


def change_kernels(monkeypatch) -> None:
    """As if the sources of all kernels had been edited since."""
    monkeypatch.setattr(tune, "_digest", lambda name: "edited")


def chosen(**changes: Any) -> plan.Tiles:
    p = dataclasses.replace(PROBLEM, **changes)
    return choices.FORWARD.choice(p, ARCH)


def occupancy(made: Any) -> int | None:
    return made.launches[-1].kernel.occupancy


def test_nothing_measured_is_the_heuristic():
    assert chosen() is None
    assert choices.FORWARD(PROBLEM) == plan.forward(PROBLEM)


def test_a_measured_choice_is_planned(own_file):
    store(occupancy=3, latency=4)
    assert chosen() == dataclasses.replace(plan.tiles(PROBLEM), occupancy=3, latency=4)
    assert occupancy(choices.FORWARD(PROBLEM)) == 3
    assert json.loads(own_file.read_text())["schema"] == tune.SCHEMA
    with config.override(target_arch="sm_100"):
        assert choices.FORWARD(PROBLEM) == plan.forward(PROBLEM)


def test_the_nearest_size_decides():
    store(occupancy=3)
    store(dataclasses.replace(PROBLEM, seq=65536), occupancy=4)
    store(dataclasses.replace(PROBLEM, batch=64), occupancy=1)
    assert [chosen(seq=seq).occupancy for seq in (16, 900, 4096, 16384, 10**6)] == [3, 3, 3, 4, 4]
    assert [chosen(batch=batch).occupancy for batch in (1, 8, 32, 512)] == [3, 3, 1, 1]
    assert chosen(heads=48, batch=1, has_z=True, dt_limit=(0.1, 0.2)).occupancy == 3


@pytest.mark.parametrize(
    "changes", [{"dtype": "float16"}, {"state": 64}, {"head_dim": 32}, {"has_runs": True}, {"chunk_size": 32}], ids=str
)
def test_what_shapes_a_kernel_must_agree(changes):
    store(occupancy=3)
    assert chosen(**changes) is None


def test_far_away_the_sizes_decide_what_depends_on_them():
    store(segments=2, occupancy=3)
    assert chosen(seq=2048).segments == 2
    far = dataclasses.replace(PROBLEM, seq=1 << 18)
    assert chosen(seq=1 << 18) == dataclasses.replace(plan.tiles(far), occupancy=3)


def test_a_chunk_longer_than_the_row_is_cut():
    store(chunk=64)
    short = dataclasses.replace(PROBLEM, seq=16)
    assert choices.FORWARD(short).buffers["step"].shape == plan.forward(short).buffers["step"].shape


@pytest.mark.parametrize(
    "changes",
    [{"chunk": 24}, {"segments": 0}, {"occupancy": 2, "head_dim_block": 8}, {"chunk": 4096, "head_block": 4096}],
)
def test_a_choice_that_is_refused_gives_way_with_one_warning(changes, monkeypatch):
    monkeypatch.setattr(choices, "_fitting", lambda p, chunk: chunk)
    if changes.get("chunk") == 4096:
        monkeypatch.setattr(plan, "forward", refusing(plan.forward))
    store(**changes)
    with pytest.warns(RuntimeWarning, match="ignores a tuned choice of mamba2_forward"):
        made = choices.FORWARD(PROBLEM)
    assert made.launches == plan.forward(PROBLEM).launches
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choices.FORWARD(PROBLEM)


def test_a_call_that_no_choice_can_serve_is_refused_without_a_warning():
    store(implementation="cuda")
    store(dataclasses.replace(PROBLEM, seq=48), implementation="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NotImplementedError, match="48 tokens or more, got 16"):
            choices.CUDA_FORWARD(dataclasses.replace(PROBLEM, seq=16))


LARGE = dataclasses.replace(PROBLEM, batch=4, seq=16384)
SMALL = dataclasses.replace(PROBLEM, batch=1, seq=128)


def test_a_record_far_away_leaves_small_calls_to_other_implementations(monkeypatch):
    store(LARGE, implementation="cuda")
    with pytest.raises(NotImplementedError, match="fill 32 thread blocks or more, got 8"):
        choices.CUDA_FORWARD(SMALL)
    store(SMALL, implementation="cuda")
    assert choices.CUDA_FORWARD(SMALL).launches[-1].grid == (8, 1, 1)
    change_kernels(monkeypatch)
    with pytest.raises(NotImplementedError, match="fill 32 thread blocks or more, got 8"):
        choices.CUDA_FORWARD(SMALL)


def test_choices_outlive_an_edit_of_the_kernels_but_for_those_that_fit_a_size(monkeypatch):
    store(segments=2, occupancy=3)
    assert chosen().segments == 2
    change_kernels(monkeypatch)
    assert chosen() == dataclasses.replace(plan.tiles(PROBLEM), occupancy=3)
    assert occupancy(choices.FORWARD(PROBLEM)) == 3


def test_a_result_names_the_sources_that_it_was_measured_with():
    made = plan.forward(PROBLEM)
    found = tune.digests(made)
    assert "forward" in found and tune.is_fresh({"sources": found})
    assert not tune.is_fresh({}) and not tune.is_fresh({"sources": {"mamba2_forward.cu": "0"}})
    assert not tune.is_fresh({"sources": {"mamba1_forward.cu": "0"}})


def refusing(make):
    def forward(p, tiles=None):
        if tiles is not None and tiles.chunk == 4096:
            raise NotImplementedError("too large")
        return make(p, tiles)

    return forward


def test_where_nothing_beat_the_heuristic_it_decides_at_every_size():
    store()
    for seq in (64, 1024, 1 << 18):
        assert chosen(seq=seq) == plan.tiles(dataclasses.replace(PROBLEM, seq=seq))


def test_fields_of_another_version_are_left_out():
    store(occupancy=3, swizzle=7)
    assert chosen().occupancy == 3


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"schema": 99, "records": []}', '{"schema": 1, "records": [{"op": "x"}]}']
)
def test_a_damaged_file_is_ignored_with_one_warning_and_set_aside(own_file, text):
    own_file.parent.mkdir()
    own_file.write_text(text)
    with pytest.warns(RuntimeWarning, match="ignores its tuning file"):
        assert chosen() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() is None
        store(occupancy=3)
    assert chosen().occupancy == 3
    assert own_file.with_name("tuning.json.damaged").read_text() == text


def test_an_unwritable_file_holds_in_this_process(own_file):
    own_file.parent.write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match="cannot write its tuning file"):
        store(occupancy=3)
    assert chosen().occupancy == 3
    store(occupancy=4)
    assert chosen().occupancy == 4


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(own_file):
    own_file.parent.mkdir()
    own_file.parent.chmod(0o500)
    with pytest.warns(RuntimeWarning, match="cannot write its tuning file"):
        store(occupancy=3)
    assert chosen().occupancy == 3


def test_no_file_at_all():
    with config.override(tuning_file="off"):
        store(occupancy=3)
        assert chosen().occupancy == 3


def test_the_users_entry_comes_before_the_shipped(monkeypatch):
    store(occupancy=3)
    (record,) = tune.records(ARCH)
    other = json.loads(json.dumps(record))
    other["results"]["cutile"]["choice"]["occupancy"] = 1
    monkeypatch.setattr(tune, "shipped", lambda arch: (other,))
    assert chosen().occupancy == 3
    with config.override(tuning_file="off"):
        assert chosen().occupancy == 1


def test_results_of_two_implementations_share_a_record(own_file):
    store(us=10)
    store(us=12, implementation="cuda")
    store(us=9)
    (record,) = tune.records(ARCH)
    assert {name: result["us"] for name, result in record["results"].items()} == {"cutile": 9, "cuda": 12}
    assert tune.parse(own_file.read_text()) == [record]


STORING = """
import sys, time
from pathlib import Path
from jax_ssd import config, tune
from tests.scan_float64 import problem

folder, number = Path(sys.argv[1]), int(sys.argv[2])
(folder / f"ready{number}").touch()
while len(list(folder.glob("ready*"))) < 2:
    time.sleep(0.001)
with config.override(tuning_file=folder / "tuning.json"):
    for batch in range(1, 41):
        result = {"choice": {}, "us": 1.0, "heuristic_us": 1.0}
        tune.store(f"op{number}", "sm_90", problem(batch=batch), "cuda", result)
"""


def test_two_processes_lose_no_results(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", STORING, str(tmp_path), str(n)]) for n in (0, 1)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert len(tune.parse((tmp_path / "tuning.json").read_text())) == 80


def test_problems_of_other_ops_are_described_too():
    buffers = (Buffer("v", (2, 8, 4, 16), "bfloat16"), Buffer("z", (2, 8, 4, 16), "bfloat16"))
    sizes_of = {"batch": 2, "seq": 8, "heads": 4, "head_dim": 16, "groups": 1, "state": 16, "rank": 4, "pairs": 8}
    p = Mamba3Problem(
        **sizes_of, dtype="bfloat16", param_rows=1, rotary="half", norm_eps=1e-5, return_final_state=False,
        chunk_size=None, precision="default", operands=buffers,
    )  # fmt: skip
    told = tune.describe(p)
    assert told["operands"] == "v z" and json.loads(json.dumps(told)) == told
    assert tune.distance(told, told) == 0
    assert tune.distance(told, tune.describe(dataclasses.replace(p, operands=buffers[:1]))) == tune.DIFFERENCE
    assert tune.distance(told, tune.describe(dataclasses.replace(p, rank=1))) == math.inf


CALL = sizes.programs(sizes.Size("test", 4, 1024, 1, 8, 128, 64))


def equation(implementation: Any = None) -> Any:
    function, operands = CALL["forward"]

    def call(*given):
        x, dt, A, B, C, D = given
        return jax_ssd.mamba2(x, dt, A, B, C, D, implementation=implementation)

    (found,) = paths.calls(call if implementation else function, operands, {})
    return found


@pytest.mark.parametrize(("times", "first"), [((10, 12), "cutile"), ((12, 10), "cuda")])
def test_the_faster_implementation_comes_first_where_none_is_asked_for(times, first):
    def order(implementation=None):
        e = equation(implementation)
        avals = [variable.aval for variable in e.invars]
        return op.preferences(op.DEFINITIONS[e.primitive.name], e.params["spec"], "cuda", avals)

    assert order() == dispatch.DEFAULT
    (((_, p),),) = ([call for call in search.plans_of([equation()]) if call[0] is choices.FORWARD],)
    store(p, times[0])
    assert order() == dispatch.DEFAULT
    store(p, times[1], "cuda")
    assert order() == (first, *(name for name in ("cuda", "cutile") if name != first), "xla")
    assert order(("cuda", "xla")) == ("cuda", "xla")


@pytest.mark.parametrize("far", [{"batch": 16}, {"seq": 1 << 14}], ids=str)
def test_only_times_near_by_order_implementations(far):
    p = dataclasses.replace(PROBLEM, **far)
    store(us=10)
    store(us=12, implementation="cuda")
    assert tune.fastest_first(dispatch.DEFAULT, "mamba2_forward", PROBLEM)[0] == "cutile"
    assert tune.fastest_first(dispatch.DEFAULT, "mamba2_forward", p) == dispatch.DEFAULT


def test_times_of_other_kernels_order_nothing(monkeypatch):
    store(us=10)
    store(us=12, implementation="cuda")
    change_kernels(monkeypatch)
    assert tune.fastest_first(dispatch.DEFAULT, "mamba2_forward", PROBLEM) == dispatch.DEFAULT


class FakeBench:
    """Times that prefer occupancy 3 and latency 4, and a little noise; some choices fail."""

    timed: list[Any] = []
    interrupt_after = math.inf

    def __init__(self, device, arch, plan, problem):
        self.arch, self.failure, self.host_bound = arch, "no reason", False

    def load(self, plans, deadline):
        return {choice: choice for choice in plans if getattr(choice, "worker_warps", None) != 8}

    def time(self, choice, effort):
        if len(FakeBench.timed) >= FakeBench.interrupt_after:
            raise KeyboardInterrupt
        FakeBench.timed.append(choice)
        values = dataclasses.asdict(choice)
        if values.get("head_block") == 4:
            return math.inf
        return 100.0 - 10 * (values.get("occupancy") == 3) - 5 * (values.get("latency") == 4)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(search, "tuning_device", lambda: SimpleNamespace(compute_capability="9.0", device_kind="fake"))
    monkeypatch.setattr(search, "Bench", FakeBench)
    monkeypatch.setattr(FakeBench, "timed", [])
    monkeypatch.setattr(FakeBench, "interrupt_after", math.inf)
    return FakeBench


def test_autotune_finds_the_best_and_combines(bench, own_file, capsys):
    function, operands = CALL["backward"]
    found = jax_ssd.autotune(function, *operands)
    assert [(one.op, one.us, one.heuristic_us) for one in found if one.implementation == "cutile"] == [
        ("mamba2_forward", 85.0, 100.0),
        ("mamba2_backward", 95.0, 100.0),
    ]
    assert found[0].choice == {"occupancy": 3, "latency": 4}
    assert "85.0 us, heuristic 100.0 us" in capsys.readouterr().out
    for record in tune.parse(own_file.read_text()):
        for result in record["results"].values():
            assert (
                result["provenance"]["device"] == "fake" and result["provenance"]["versions"]["jax"] == jax.__version__
            )
            assert [{}, 100.0] in result["tried"]
    planned = jax_ssd.dispatch_paths(jax.jit(CALL["forward"][0]), *operands, platform="cuda")[0].plan
    assert planned is not None


def test_tracing_a_call_of_a_new_size_measures_nothing(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something was measured")

    monkeypatch.setattr(search, "Bench", refuse)
    monkeypatch.setattr(timing, "measure", refuse)
    monkeypatch.setattr(timing, "compile_program", refuse)
    monkeypatch.setattr(kernels, "compile_launches", lambda requests, arch: [])
    monkeypatch.setattr(launch, "encode", lambda plan, cubins: {"plan": np.frombuffer(plan.name.encode(), np.uint8)})

    def loss(x, dt, A, B, C):
        return jax_ssd.mamba2(x, dt, A, B, C, implementation="cuda").astype(jnp.float32).sum()

    shapes = {"x": (4, 4000, 8, 64), "dt": (4, 4000, 8), "A": (8,), "B": (4, 4000, 1, 128), "C": (4, 4000, 1, 128)}
    arrays = {n: jax.ShapeDtypeStruct(s, "float32" if n in ("dt", "A") else "bfloat16") for n, s in shapes.items()}
    with tune.recorded() as planned:
        jax.jit(jax.grad(loss)).trace(*arrays.values()).lower(lowering_platforms=("cuda",))
    assert planned


def test_a_quick_search_tries_the_likeliest_of_what_would_run(bench, capsys):
    function, operands = CALL["backward"]
    found = jax_ssd.autotune(function, *operands, quick=True)
    assert [one.op for one in found] == ["mamba2_forward", "mamba2_backward"]  # of one implementation each
    assert all(1 < one.tried <= search.LIKELY for one in found)
    assert len(bench.timed) <= 2 * (search.LIKELY + search.FINALISTS + 1)


def test_what_was_fastest_elsewhere_is_likely():
    store(chunk=32, occupancy=3)
    far = dataclasses.replace(PROBLEM, seq=1 << 18, batch=64)
    tried = search.likely(choices.FORWARD, far, ARCH)
    start = choices.FORWARD.heuristic(far)
    assert tried[0] == start and tried[1] == dataclasses.replace(start, chunk=32, occupancy=3)
    assert len(set(tried)) == len(tried) <= search.LIKELY
    other = dataclasses.replace(PROBLEM, state=64)
    assert dataclasses.replace(choices.FORWARD.heuristic(other), chunk=32, occupancy=3) not in search.likely(
        choices.FORWARD, other, ARCH
    )


def test_the_tune_command_foretells(capsys, own_file):
    words = ["sweep_n128_t1k", "--quick", "--dry-run", "--arch", "sm_90"]
    assert tune_tool.main(words) == 0
    quick = capsys.readouterr().out
    assert tune_tool.main([word for word in words if word != "--quick"]) == 0
    assert "plans" in quick and int(quick.split()[2]) < int(capsys.readouterr().out.split()[2])
    assert not own_file.exists()


def test_autotune_goes_on_where_it_was_interrupted(bench, monkeypatch):
    function, operands = CALL["backward"]
    jax_ssd.autotune(function, *operands, progress=False)
    whole = list(bench.timed)
    tune.shipped("sm_90")
    for record in tune.records(ARCH):
        assert record["results"]
    path = config.settings().tuning_file
    assert path is not None
    path.unlink()
    backward = next(i for i, choice in enumerate(whole) if hasattr(choice, "tokens_occupancy"))
    monkeypatch.setattr(bench, "interrupt_after", len(whole) + backward + 3)
    with pytest.raises(KeyboardInterrupt):
        jax_ssd.autotune(function, *operands, progress=False)
    bench.timed.clear()
    monkeypatch.setattr(bench, "interrupt_after", math.inf)
    again = jax_ssd.autotune(function, *operands, progress=False)
    assert again[0].tried == 0 and again[-1].tried > 0
    assert bench.timed[0] == whole[backward]
    bench.timed.clear()
    jax_ssd.autotune(function, *operands, progress=False)
    assert bench.timed == []
    jax_ssd.autotune(function, *operands, progress=False, force=True)
    assert bench.timed == whole


def test_autotune_measures_anew_what_edited_kernels_have_made_old(bench, monkeypatch):
    function, operands = CALL["forward"]
    jax_ssd.autotune(function, *operands, progress=False)
    assert not any(one.tried for one in jax_ssd.autotune(function, *operands, progress=False))
    change_kernels(monkeypatch)
    found = jax_ssd.autotune(function, *operands, progress=False)
    assert found and all(one.tried for one in found)
    assert not any(one.tried for one in jax_ssd.autotune(function, *operands, progress=False))


def test_no_choice_needs_more_memory_than_it_may(bench):
    function, operands = CALL["backward"]
    jax_ssd.autotune(function, *operands, progress=False)
    ((tunable, p),) = [
        call for call in search.plans_of(paths.calls(function, operands, {})) if call[0] is choices.BACKWARD
    ]
    start = tunable.make(p, tunable.heuristic(p))
    allowed = max(search._scratch(start), 0.5 * search._passed(start))
    backward = [choice for choice in bench.timed if hasattr(choice, "tokens_occupancy")]
    assert all(search._scratch(tunable.make(p, choice)) <= allowed for choice in backward)


def test_a_size_the_host_is_too_slow_for_keeps_the_heuristics_choice(bench, monkeypatch):
    class Slow(FakeBench):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.host_bound = True

    monkeypatch.setattr(search, "Bench", Slow)
    function, operands = CALL["forward"]
    assert jax_ssd.autotune(function, *operands, progress=False)[0].choice == {}
    assert all(result["host_bound"] for record in tune.records(ARCH) for result in record["results"].values())


def test_noise_does_not_move_a_choice(bench, monkeypatch):
    monkeypatch.setattr(bench, "time", lambda self, choice, effort: 100.0 - 1.5 * (getattr(choice, "latency", 0) == 4))
    function, operands = CALL["forward"]
    assert jax_ssd.autotune(function, *operands, progress=False)[0].choice == {}


def test_a_heuristics_choice_that_runs_only_once_is_no_result(bench, monkeypatch, own_file):
    def time(self, choice, effort):
        return math.inf if effort is search.CAREFUL else 100.0

    monkeypatch.setattr(bench, "time", time)
    function, operands = CALL["forward"]
    with pytest.raises(RuntimeError, match="but not a second time"):
        jax_ssd.autotune(function, *operands, progress=False)
    assert not own_file.exists()


def test_without_a_gpu_it_says_what_to_do():
    function, operands = CALL["forward"]
    with pytest.raises(NotImplementedError, match="JAX sees none.*JAX_SSD_TUNING_FILE"):
        jax_ssd.autotune(function, *operands)


@pytest.mark.parametrize("name", ["forward", "step"])
def test_the_bench_times_calls_on_operands_of_their_own(name, monkeypatch):
    """With XLA in the kernels' place; the state of a step is donated and carried."""
    small = sizes.programs(sizes.Size("small", 2, 32, 1, 4, 16, 8))
    function, operands = small[name]
    tunable, p = next(
        call for call in search.plans_of(paths.calls(function, operands, {})) if call[0].implementation == "cutile"
    )
    made = tunable.make(p, tunable.heuristic(p))
    scale = [1.0]

    def runner(plan, arch):
        def run(*operands):
            of = dict(zip([b.name for b in plan.operands], operands, strict=True))
            total = scale[0] * sum(jnp.sum(a.astype(jnp.float32)) for a in of.values())
            return tuple(jnp.full(b.shape, total, b.dtype) for b in plan.results)

        return run

    monkeypatch.setattr(launch, "runner", runner)
    monkeypatch.setattr(search, "MOST_SETS", 3)
    monkeypatch.setattr(search, "MOST_CALLS", 8)
    bench = search.Bench(jax.devices("cpu")[0], ARCH, made, p)
    assert len(bench.sets) == 3 and bench.turns == 2
    effort = timing.Effort(1e-4, 2)
    first = bench.load({"a": made}, math.inf)["a"]
    assert 0 < bench.time(first, effort) < 1e6
    assert 0 < bench.time(first, effort) < 1e6
    scale[0] = 2.0
    other = bench.load({"b": made}, math.inf)["b"]
    assert bench.time(other, effort) == math.inf  # its results are not the first one's
    monkeypatch.setattr(launch, "runner", refuse)
    assert bench.load({"c": made}, math.inf) == {} and bench.failure == "it does not compile"


def refuse(plan, arch):
    raise kernels.CompileError("it does not compile")


def test_commands(capsys, own_file, bench):
    assert command_line.main(["tune", "first", "--passes", "step", "--output", str(own_file)]) == 0
    said = capsys.readouterr().out
    assert "mamba2_step cutile" in said and str(own_file) in said
    assert command_line.main(["tune", "first", "--passes", "step"]) == 0
    assert "tuned before" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no size called 'frist'"):
        command_line.main(["tune", "frist"])


@pytest.mark.parametrize("command", ["tune", "compile"])
def test_a_pass_that_no_size_has(command):
    with pytest.raises(SystemExit, match="jax_ssd: step step_b1 has no forward; leave --passes out"):
        command_line.main([command, "step", "step_b1", "--passes", "forward"])


def test_nonsense_for_the_tune_command(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        command_line.main(["tune", "first", "--dry-run", "--arch", "sm_90,hopper"])
    assert "--arch: expected one of sm_80" in capsys.readouterr().err
    monkeypatch.setattr(config, "settings", lambda: config.Settings(target_arch="hopper"))  # type: ignore[arg-type]
    assert command_line.main(["tune", "first", "--dry-run"]) == 1
    assert "JAX_SSD_TARGET_ARCH" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "options", "error", "said"),
    [
        ((None,), {}, TypeError, "function: expected a function of JAX arrays, got NoneType; pass the function itself"),
        ((jnp.ones(2),), {}, TypeError, "function: expected a function of JAX arrays, got "),
        ((jnp.sin, 1.0), {"seconds": "long"}, TypeError, "autotune: seconds: expected a number, got 'long'"),
        ((jnp.sin, 1.0), {"seconds": -1}, ValueError, "autotune: seconds: expected a finite number of at least 0"),
        ((jnp.sin, 1.0), {"quick": 1}, TypeError, "autotune: quick: expected True or False, got 1"),
    ],
)
def test_autotune_of_what_is_none(arguments, options, error, said):
    with pytest.raises(error, match=said):
        jax_ssd.autotune(*arguments, **options)
    if not options:
        with pytest.raises(error, match=said):
            jax_ssd.dispatch_paths(*arguments)


def test_the_tune_command_can_be_interrupted(capsys, own_file, bench, monkeypatch):
    words = ["tune", "first", "--passes", "forward", "--output", str(own_file)]
    assert command_line.main(words) == 0
    whole = len(bench.timed)
    kept = own_file.read_text()
    own_file.unlink()
    bench.timed.clear()
    monkeypatch.setattr(bench, "interrupt_after", whole - 1)
    assert command_line.main(words) == 130
    assert "Interrupted; what was measured is kept." in capsys.readouterr().out
    first = tune.parse(own_file.read_text())
    assert first and first != tune.parse(kept)
    monkeypatch.setattr(bench, "interrupt_after", math.inf)
    assert command_line.main(words) == 0
    said = capsys.readouterr().out
    assert "(tuned before)" in said and " tried)" in said
    assert len(tune.parse(own_file.read_text())[0]["results"]) == 2


def test_the_tune_command_without_a_gpu(capsys):
    assert command_line.main(["tune", "first"]) == 1
    assert "JAX sees none" in capsys.readouterr().out


def test_the_compile_command(capsys, monkeypatch):
    def compiled(requests, arch):
        if "backward" in str(requests):
            raise kernels.CompileError("too hard")
        return [SimpleNamespace(registers=32, data=b"elf")]

    monkeypatch.setattr(kernels, "compile_launches", compiled)
    assert (
        command_line.main(["compile", "130m", "sweep_n512_t1k", "--arch", "9.0", "sm_80", "--passes", "forward"]) == 0
    )
    said = capsys.readouterr().out
    assert "sm_80 mamba2_forward" in said and "sm_90 mamba2_forward" in said and "memory only" in said
    assert "sweep_n512_t1k forward: mamba2_forward runs 'xla'" in said and "state size up to 256, got 512" in said
    monkeypatch.setattr(kernels, "compile_launches", refuse)
    assert command_line.main(["compile", "130m", "--passes", "step"]) == 1
    assert "FAILED: it does not compile" in capsys.readouterr().out
    assert command_line.main(["compile", "130m", "--arch", "sm_42"]) == 1
    with config.override(target_arch=()):
        assert command_line.main(["compile", "130m"]) == 1
        assert "JAX_SSD_TARGET_ARCH" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["siso_first", "mimo_first", "mine=2,512,1,8,64,64,rank=2"])
def test_the_compile_command_knows_mamba3(name, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "compile_launches", lambda *_: [SimpleNamespace(registers=32, data=b"elf")])
    assert command_line.main(["compile", name, "--arch", "sm_90", "--implementation", "cuda"]) == 0
    said = capsys.readouterr().out
    assert all(f"sm_90 mamba3_{one} " in said for one in ("forward", "backward", "step")), said


def test_the_tune_command_knows_mamba3(capsys, own_file, bench):
    assert command_line.main(["tune", "siso_first", "--output", str(own_file)]) == 0
    said = capsys.readouterr().out
    assert "mamba3_forward cuda" in said and "mamba3_step cuda" in said
    assert [record["op"] for record in tune.parse(own_file.read_text())] == ["mamba3_forward", "mamba3_step"]


def test_the_tune_command_says_what_has_no_choices(capsys, own_file, bench, monkeypatch):
    monkeypatch.setattr(search, "autotune", lambda *_, **__: [])
    assert command_line.main(["tune", "siso_first", "--output", str(own_file)]) == 0
    assert "siso_first forward: nothing to tune" in capsys.readouterr().out


def test_the_bench_command_outside_a_checkout(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert command_line.main(["bench", "first"]) == 1
    assert "no checkout" in capsys.readouterr().out
