"""The benchmark harness, end to end at a tiny size. What it measures here is not looked at, only that it is sound."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import (
    cases,
    compare,
    floors,
    inputs,
    measure_jax,
    plot,
    profile,
    reference,
    report,
    rows,
    run,
    timing,
    worker,
)
from benchmarks.peers import base, mamba_ssm, own


@pytest.fixture(scope="module", autouse=True)
def _default_promotion():
    """The harness runs other people's code, so it runs under JAX's own promotion rules, not the suite's strict ones."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    words = (
        "tiny tiny_step tiny_mimo_step tiny_mimo_step_t3 --passes forward step --implementations plain_xla jla "
        "--repeats 2 --sample-ms 1 --in-process"
    )
    made = run.main([*words.split(), "--name", "test", "--output", str(folder)])
    (path,) = folder.iterdir()
    assert path.name.endswith("-test.json")
    assert json.loads(path.read_text()) == made
    return made


def test_result_keeps_the_schema(result):
    report.check(result)
    assert result["device"]["kind"]
    assert result["ceilings"]["copy_bytes_per_second"] > 0


def test_measured_rows_agree_with_float64(result):
    measured = [row for row in result["rows"] if row["implementation"] == "plain_xla"]
    assert {(row["case"], row["pass"]) for row in measured} == {
        ("tiny", "forward"),
        ("tiny_step", "step"),
        ("tiny_mimo_step", "step"),
        ("tiny_mimo_step_t3", "step"),
    }
    for row in measured:
        assert max(row["errors"].values()) < 2e-6
        assert row["memory"]["peak"] > 0


def test_a_peer_that_cannot_run_says_why(result):
    refused = [row for row in result["rows"] if row["implementation"] == "jla"]
    assert len(refused) == 4
    for row in refused:
        assert row["status"] == "unsupported"
        assert row["reason"]
        assert row["reason"][:40] in report.table(result)


def test_tables_for_the_documentation(result, capsys):
    (line,) = [line for line in report.markdown(result).splitlines() if line.startswith("| tiny (")]
    assert line.startswith("| tiny (2,100,1,4,16,8), float32 | forward | ") and "unsupported" in line
    report.main([str(COMMITTED)])
    said = capsys.readouterr().out
    assert "| first (4,16384,1,8,128,64) | forward | 188 | 415 (2.21x) | 241 (1.28x) | 4.7 |" in said


@pytest.mark.parametrize("field", ["errors", "timing", "floor"])
def test_schema_names_a_missing_field(result, field):
    broken = json.loads(json.dumps(result))
    measured = next(row for row in broken["rows"] if row["status"] == "ok")
    del measured[field]
    with pytest.raises(ValueError, match=f"'{field}' is missing"):
        report.check(broken)


@pytest.mark.slow
def test_forward_and_backward(tmp_path):
    words = "tiny_softplus --passes forward_backward --implementations plain_xla --repeats 2 --sample-ms 1 --in-process"
    (row,) = run.main([*words.split(), "--output", str(tmp_path)])["rows"]
    assert row["status"] == "ok"
    assert set(row["errors"]) == {"y", "dx", "ddt", "dA", "dB", "dC", "dD", "ddt_bias"}
    assert max(row["errors"].values()) < 2e-5


@pytest.mark.parametrize(("name", "found", "wrong"), [("cuda", 6, False), ("cuda", 4, True), ("cuda", 0, True)])
def test_a_program_has_the_kernels_of_one_call_as_often_as_it_calls(name, found, wrong):
    class Program:
        def __init__(self, calls):
            self.calls = calls

        def as_text(self):
            return 'x = custom-call(), custom_call_target="jax_ssd.launch"\n' * self.calls

    peer = own.load(f"jax_ssd:{name}", base.Options())
    assert bool(measure_jax.missing_calls(peer, Program(found), Program(2), 3)) == wrong
    anything = own.load("jax_ssd", base.Options())
    assert not measure_jax.missing_calls(anything, Program(0), Program(0), 3)
    assert measure_jax.missing_calls(peer, Program(0), Program(0), 3)


def test_outputs_that_are_alike_or_no_numbers_are_problems():
    assert measure_jax.distinct_and_finite([1.0, 2.0, 3.5]) == []
    assert measure_jax.distinct_and_finite([1.0, 2.0, 1.0]) == ["two calls on different inputs gave the same output"]
    for broken in (0.0, np.nan, np.inf):
        assert measure_jax.distinct_and_finite([1.0, broken]) == ["an output is zero or not finite"]


@pytest.mark.parametrize(
    ("implementation", "error", "seconds", "reason"),
    [
        ("jax_ssd", 4e-2, 1e-4, None),
        ("jax_ssd", 6e-2, 1e-4, "dx is off by 0.06"),
        ("mamba_ssm", 6e-2, 1e-4, None),
        ("mamba_ssm", 0.3, 1e-4, "dx is off by 0.3"),
        ("jax_ssd", np.nan, 1e-4, "dx is off by nan"),
        ("jax_ssd", 1e-3, 0.0, "the time is not positive"),
        ("jax_ssd", 1e-3, np.nan, "the time is not positive"),
    ],
)
def test_a_row_whose_numbers_are_wrong_says_so(implementation, error, seconds, reason):
    found = timing.Timing(seconds, seconds, seconds, seconds, 3, 1, 1, 0.0, False)
    errors = {"y": 1e-3, "dx": error}
    row = rows.measured(cases.CASES["first"], "forward_backward", implementation, found, errors, [])
    assert (row["status"], row.get("reason")) == ("ok" if reason is None else "wrong", reason)


def test_a_wrong_row_is_nobodys_yardstick():
    result = json.loads(COMMITTED.read_text())
    report.add_ratios(result)
    own_row = result["rows"][0]
    before = own_row["fastest_peer"], own_row["peer_ratio"]
    for row in result["rows"]:
        if (row["case"], row["pass"], row["implementation"]) == ("first", "forward", before[0]):
            row |= {"status": "wrong", "reason": "y is off by 1", "microseconds": 1.0}
    report.add_ratios(result)
    assert own_row["fastest_peer"] != before[0] and own_row["peer_ratio"] > before[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_mimo", "tiny_segments", "tiny_sequences"])
def test_mamba3(name, tmp_path):
    words = f"{name} --passes forward_backward --implementations plain_xla --repeats 2 --sample-ms 1 --in-process"
    (row,) = run.main([*words.split(), "--output", str(tmp_path)])["rows"]
    assert row["status"] == "ok"
    assert {"y", "dq", "dangles", "dtrap", "dz"} <= set(row["errors"])
    assert max(row["errors"].values()) < 5e-6


def test_reference_is_the_recurrence():
    case = cases.CASES["tiny_softplus"]
    row = inputs.checked(case)
    with jax.enable_x64(True):
        given = {name: np.asarray(value, np.float64) for name, value in row.items()}
        per_token = [given[name][0] for name in ("x", "dt", "B", "C")]
        a, d, bias = (given[name] for name in ("A", "D", "dt_bias"))

        def body(state, token):
            x, dt, b, c = token
            return reference.step_row(state, x, dt, a, b, c, d, bias)

        start = np.zeros((case.heads, case.head_dim, case.state))
        _, wanted = jax.lax.scan(body, start, tuple(per_token))
        x, dt, b, c = per_token
        got = reference.scan_row(x, dt, a, b, c, d, bias)
        assert rows.relative_error(np.asarray(got), np.asarray(wanted)) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize(("case", "passes"), [("tiny_softplus", "forward"), ("tiny_siso", "forward_backward")])
def test_of_a_long_row_both_ends_are_compared(case, passes, tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "PIECE", {"mamba2": 32, "mamba3": 16})
    assert len(inputs.pieces(cases.CASES[case])) == 2
    words = f"{case} --passes {passes} --implementations plain_xla --repeats 2 --sample-ms 1 --in-process"
    (row,) = run.main([*words.split(), "--output", str(tmp_path)])["rows"]
    assert row["status"] == "ok"
    assert max(row["errors"].values()) < 5e-5  # a sum of decays within a chunk goes through the reset


def test_shares_are_runs_of_neighbours():
    words = ["sweep*", "--processes", "4", "mamba_ssm=1"]
    made = run.Run(run.parser().parse_args(words), "")
    assert [{case.state for case in share} for share in made._shares("jla")] == [{64}, {128}, {256}, {512}]
    assert [len(share) for share in made._shares("mamba_ssm")] == [20]


def test_what_a_worker_left_is_done_by_another_without_what_it_died_of(tmp_path):
    made = run.Run(run.parser().parse_args(["tiny", "tiny_step", "--output", str(tmp_path)]), "")
    job = made._job(str(tmp_path), "plain_xla", made.cases, 0)
    made.result["rows"].append({"case": "tiny", "pass": "forward", "implementation": "plain_xla", "status": "ok"})
    made._died(job, "its process ended with code -11")
    assert made.result["rows"][-1]["reason"].endswith("code -11")
    rest = worker.Job.from_json(made._rest(job).to_json())
    assert [case.name for case in rest.cases] == ["tiny_step"]
    assert rest.done == [("tiny", "forward"), ("tiny", "forward_backward")]
    made._died(job, "again")
    assert made._rest(job).cases == rest.cases and made._rest(job).done[-1] == ("tiny_step", "step")


@pytest.mark.slow
def test_processes_share_the_cases_and_a_spent_budget_leaves_what_there_is(tmp_path):
    words = "tiny_step tiny_siso --passes step --implementations plain_xla jla --repeats 2 --sample-ms 1"
    made = run.main([*words.split(), "--processes", "2", "--output", str(tmp_path)])
    assert {(row["implementation"], row["status"]) for row in made["rows"]} == {
        ("plain_xla", "ok"),
        ("jla", "unsupported"),
    }
    with pytest.raises(RuntimeError, match="the budget was spent"):
        run.main([*words.split(), "--budget", "1", "--output", str(tmp_path), "--name", "short"])
    (path,) = tmp_path.glob("*-short.json")
    assert {row["reason"] for row in json.loads(path.read_text())["rows"]} == {"the budget was spent"}


def test_floor_of_the_first_case():
    case = cases.CASES["first"]
    found = floors.floor(case, "forward", copy_rate=4.23e12, matmul_rate=7.0e14)
    assert found["bytes_us"] == pytest.approx(40, rel=0.02)
    assert found["us"] == max(found["bytes_us"], found["flops_us"])
    backward = floors.floor(case, "forward_backward", copy_rate=4.23e12, matmul_rate=7.0e14)
    assert backward["bytes"] > 2 * found["bytes"]


def test_floor_of_a_step_of_mamba3_is_its_state_in_and_out():
    case = cases.CASES["mimo_step_b64"]
    state = 4 * 64 * 64 * (64 * 128 + 32 + 4 * 128 + 64)
    found = floors.floor(case, "step", copy_rate=4.23e12, matmul_rate=7.0e14)
    assert found["flops"] == 0 and 2 * state < found["bytes"] < 2.1 * state
    assert floors.memory_limit(case, "step") is None
    four = floors.floor(cases.CASES["mimo_step_b64_t4"], "step", copy_rate=4.23e12, matmul_rate=7.0e14)
    assert found["bytes"] < four["bytes"] < 1.1 * found["bytes"]


def test_cases_are_found_by_name_prefix_and_size():
    assert [case.name for case in cases.find("first")] == ["first"]
    assert len(cases.find("sweep*")) == 20
    (made,) = cases.find("mine=1,128,2,4,16,8,float32")
    assert (made.batch, made.seq, made.groups, made.heads, made.state, made.head_dim) == (1, 128, 2, 4, 16, 8)
    (made,) = cases.find("mine=1,128,2,4,16,8,float32,rank=3")
    assert (made.state, made.head_dim, made.dtype, made.rank) == (16, 8, "float32", 3)
    (made,) = cases.find("mine=1,128,2,4,16,8,rank=1")
    assert (made.dtype, made.rank) == ("bfloat16", 1)
    for text in ("mine=1,128,2,4,16", "mine=1,128,2,4,16,x", "mine=1,128,2,4,16,8,rank=", "mine=1,1,1,1,1,1,a,b"):
        with pytest.raises(ValueError, match="expected name=B,T,G,H,N,P with whole numbers"):
            cases.find(text)
    with pytest.raises(ValueError, match="rank must be from 0 to 8, got 9"):
        cases.find("mine=1,128,2,4,16,8,rank=9")
    with pytest.raises(ValueError, match="no size called 'frist'"):
        cases.find("frist")
    with pytest.raises(SystemExit, match="benchmarks: no size called 'frist'"):
        run.main(["frist", "--implementations", "plain_xla"])
    with pytest.raises(ValueError, match="multiple of groups"):
        cases.find("mine=1,128,3,4,16,8")


COMMITTED = run.RESULTS / "2026-11-30-first.json"


def test_memory_is_held_against_the_limit_and_the_peers():
    result = json.loads(COMMITTED.read_text())
    report.add_ratios(result)
    row = result["rows"][0]
    assert (row["case"], row["pass"], row["implementation"]) == ("first", "forward", "jax_ssd:cutile")
    passed = row["memory"]["argument"] + row["memory"]["output"]
    assert row["memory_limit"] == pytest.approx(1.05 * passed, rel=1e-4)
    assert row["peer_memory_ratio"] == pytest.approx(173015040 / 181406912)
    assert "times the memory limit" in report.table(result)
    assert "memory_limit" not in next(row for row in result["rows"] if row["pass"] == "step")


def test_memory_of_mamba3_stands_beside_that_of_a_kernel_per_chunk():
    case = cases.CASES["mimo_first"]
    states, rows_of_rank = 4 * 32 * (2048 // 16) * 128 * 64 * 4, 4 * 32 * 2048 * 4 * 64 * 4
    passed = floors.necessary_bytes(case, "forward")
    assert floors.chunk_kernel_memory(case, "forward") == passed + states
    assert floors.chunk_kernel_memory(case, "forward_backward") == 2 * passed + 3 * states + rows_of_rank
    assert floors.chunk_kernel_memory(cases.CASES["first"], "forward") is None


@pytest.fixture
def files(tmp_path):
    """The committed result twice; the second to be changed."""
    result = json.loads(COMMITTED.read_text())
    (tmp_path / "old.json").write_text(json.dumps(result))

    def write(change) -> list[str]:
        change(result["rows"][0])
        (tmp_path / "new.json").write_text(json.dumps(result))
        return [str(tmp_path / name) for name in ("old.json", "new.json")]

    return write


def slower(factor):
    return lambda row: row.update(peer_ratio=row["peer_ratio"] / factor, times_floor=row["times_floor"] * factor)


@pytest.mark.parametrize(
    ("change", "options", "status"),
    [
        (slower(1.0), (), 0),
        (slower(1.05), (), 0),
        (slower(1.2), (), 1),
        (slower(1.2), ("--tolerance", "0.3"), 0),
        (slower(0.5), (), 0),
        (lambda row: row.update(microseconds=10 * row["microseconds"]), (), 0),  # another machine, the same ratios
        (lambda row: row.update(status="failed", reason="lost"), (), 1),
        (lambda row: row.update({"case": "wide", "pass": "decode"}), (), 1),  # its case and pass were tried by others
    ],
)
def test_comparing_finds_what_became_worse(files, capsys, change, options, status):
    assert compare.main([*files(change), *options]) == status
    assert ("WORSE  first forward jax_ssd:cutile" in capsys.readouterr().out) == bool(status)


def test_the_sweep_and_the_other_sizes_are_named():
    sweep = {(case.state, case.seq) for case in cases.find("sweep*")}
    assert sweep == {(n, t << 10) for n in (64, 128, 256, 512) for t in (1, 4, 16, 64, 256)}
    assert all((case.batch, case.heads, case.head_dim) == (4, 8, 64) for case in cases.find("sweep*"))
    sizes = [(c.batch, c.seq, c.groups, c.heads, c.state, c.head_dim, c.dtype) for c in cases.CASES.values()]
    assert (1, 131072, 8, 128, 128, 64, "bfloat16") in sizes
    assert (4096, 16, 1, 24, 128, 64, "bfloat16") in sizes
    assert (4, 16384, 1, 8, 128, 64, "float32") in sizes


@pytest.mark.parametrize("given", [None, "true"])
def test_processes_that_share_a_device_leave_its_memory_to_each_other(tmp_path, monkeypatch, given):
    name, started = "XLA_PYTHON_CLIENT_PREALLOCATE", []
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(run.subprocess, "Popen", lambda command, env, **_: started.append(env))
    run.Run._start(worker.Job("jax_ssd", [], (), str(tmp_path), str(tmp_path / "rows.jsonl")))
    assert started[0][name] == (given or "false")


def test_a_profile_has_the_kernels_that_take_time_in_the_units_of_its_columns():
    metrics = [metric for metric, _ in profile.METRICS.values()]
    header = ",".join(f'"{name}"' for name in ("Kernel Name", "Grid Size", "Block Size", *metrics))
    units = ",".join('""' for _ in range(3 + len(metrics)))
    long = '"void walk<float, Sizes<4, 8>>(int)","(1, 2, 1)","(256, 1, 1)","88,736","22.5","1.5","27","41","80"'
    long += ',"2,000,000","0"'
    short = long.replace("88,736", "900").replace("walk", "join")
    (kernel,) = profile.parse("\n".join(["==PROF== 2 passes", header, units, short, long, '{"device": 1}']))
    assert (kernel["kernel"], kernel["us"], kernel["l2_percent"], kernel["read_mb"]) == ("walk", 88.736, 80.0, 2.0)


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    result = json.loads(COMMITTED.read_text())
    for index, row in enumerate(row for row in result["rows"] if row["status"] == "ok" and row["case"] == "first"):
        row["case"] = f"sweep_n{64 << index % 2}_t{1 << index}k"
    result["cases"] |= {row["case"]: result["cases"]["first"] for row in result["rows"]}
    (tmp_path / "some.json").write_text(json.dumps(result))
    plot.main([str(tmp_path / "some.json"), "--output", str(tmp_path / "plots")])
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {"some-forward.png", "some-step.svg", "sweep-forward-length.svg", "sweep-forward-state.png"} <= names


def test_mamba_ssm_compiles_for_the_sizes_of_a_call_or_of_the_case_that_is_rehearsed():
    peer = object.__new__(mamba_ssm.MambaSsm)
    peer.rehearsed = None
    module = SimpleNamespace(build=lambda *arguments, threads=128: (*arguments, threads))
    peer._compile_for_sizes(module, "build")

    def call(B=4, S=2048, H=32, G=1):
        return module.build("B", "S", "H", "G", 128, threads=256)

    assert call() == (4, 2048, 32, 1, 128, 256)
    peer.rehearsed = (8, 16384, 32, 1)
    assert call()(None) is None


def test_mamba_ssm_as_released_is_asked_for_sequences_of_rank_4_only():
    peer = object.__new__(mamba_ssm.MambaSsm)
    peer.name = mamba_ssm.RELEASED
    assert peer.refuses(cases.CASES["mimo_first"], "forward") is None
    for other, pass_name in (("first", "forward"), ("siso_first", "forward"), ("mimo_step_b64", "step")):
        assert peer.refuses(cases.CASES[other], pass_name) == "no other than mamba_ssm here"
