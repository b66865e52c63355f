"""The benchmark harness, end to end at a tiny size. What it measures here is not looked at, only that it is sound."""

import json

import jax
import numpy as np
import pytest

from benchmarks import cases, floors, inputs, reference, report, rows, run


@pytest.fixture(scope="module", autouse=True)
def _default_promotion():
    """The harness runs other people's code, so it runs under JAX's own promotion rules, not the suite's strict ones."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    words = (
        "tiny tiny_step --passes forward step --implementations plain_xla jla --repeats 2 --sample-ms 1 --in-process"
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
    assert {(row["case"], row["pass"]) for row in measured} == {("tiny", "forward"), ("tiny_step", "step")}
    for row in measured:
        assert max(row["errors"].values()) < 2e-6
        assert row["memory"]["peak"] > 0


def test_a_peer_that_cannot_run_says_why(result):
    refused = [row for row in result["rows"] if row["implementation"] == "jla"]
    assert len(refused) == 2
    for row in refused:
        assert row["status"] == "unsupported"
        assert row["reason"]
        assert row["reason"][:40] in report.table(result)


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


@pytest.mark.parametrize("case", ["tiny_siso", "tiny_mimo"])
def test_mamba3(case, tmp_path):
    words = f"{case} --passes forward_backward --implementations plain_xla --repeats 2 --sample-ms 1 --in-process"
    (row,) = run.main([*words.split(), "--output", str(tmp_path)])["rows"]
    assert row["status"] == "ok"
    assert {"y", "dq", "dangles", "dtrap", "dz"} <= set(row["errors"])
    assert max(row["errors"].values()) < 5e-6


def test_reference_is_the_recurrence():
    case = cases.CASES["tiny_softplus"]
    row = inputs.checked_row(case)
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


def test_floor_of_the_first_case():
    case = cases.CASES["first"]
    found = floors.floor(case, "forward", copy_rate=4.23e12, matmul_rate=7.0e14)
    assert found["bytes_us"] == pytest.approx(40, rel=0.02)
    assert found["us"] == max(found["bytes_us"], found["flops_us"])
    backward = floors.floor(case, "forward_backward", copy_rate=4.23e12, matmul_rate=7.0e14)
    assert backward["bytes"] > 2 * found["bytes"]


def test_cases_are_found_by_name_prefix_and_size():
    assert [case.name for case in cases.find("first")] == ["first"]
    assert len(cases.find("sweep*")) == 20
    (made,) = cases.find("mine=1,128,2,4,16,8,float32")
    assert (made.batch, made.seq, made.groups, made.heads, made.state, made.head_dim) == (1, 128, 2, 4, 16, 8)
    with pytest.raises(ValueError, match="no size called 'frist'"):
        cases.find("frist")
    with pytest.raises(ValueError, match="multiple of groups"):
        cases.find("mine=1,128,3,4,16,8")
