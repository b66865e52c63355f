"""`python -m jax_ssd check`."""

import jax
import pytest

from jax_ssd import config, dispatch_paths
from jax_ssd.mamba3 import cases
from jax_ssd.tools import check


def test_scan_and_steps_of_every_implementation_here(capsys):
    assert check.main(["--case", "short", "--case", "packed", "--implementation", "xla"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:-1]] == [["ok", "short"], ["ok", "short"], ["ok", "packed"]]
    assert " steps " in lines[2] and lines[-1] == "All passed."


def test_mamba3_is_checked_in_the_same_form(capsys):
    assert check.main(["--op", "mamba3", "--case", "mimo_one_token", "--implementation", "xla"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:-1]] == [["ok", "mimo_one_token", "xla"]] * 2
    assert " steps " in lines[2] and lines[-1] == "All passed."


def test_the_cases_of_mamba3_cover_what_its_kernels_are_written_for():
    table = cases.TABLE
    assert {case.rank for case in table} == {0, 2, 3, 4, 8}
    assert {case.rotary for case in table} == {"pairwise", "half"}
    assert {bool(case.rank) for case in table if case.cu_seqlens} == {False, True}
    assert {(case.dtype, case.precision) for case in table} == set(check.BARS) - {("float16", "highest")}
    for case in table:
        arrays = case.inputs()
        assert ("mimo_v" in arrays) == bool(case.rank) and ("initial_ssm" in arrays) == case.initial_state
    assert len(check.BY_NAME) == sum(map(len, check.TABLES.values()))  # no name twice


@pytest.mark.parametrize("name", ["bfloat16_model", "mimo_bfloat16_model", "siso_bfloat16_model"])
def test_a_case_is_for_the_kernels_that_models_run(name):
    case = check.BY_NAME[name]

    def total(arrays):
        return sum(value.astype("float32").sum() for value in case.scan(arrays, "cuda").values())

    with config.override(target_arch="sm_90"):
        paths = dispatch_paths(jax.grad(total), check.differentiable(case.inputs()), platform="cuda")
    assert [path.implementation for path in paths] == ["cuda", "cuda"]


def test_a_failure_is_an_exit_status(capsys, monkeypatch):
    monkeypatch.setitem(check.BARS, ("float32", "highest"), (1e-30, 1e-30))
    assert check.main(["--case", "one_token", "--implementation", "xla"]) == 1
    assert "FAIL one_token" in capsys.readouterr().out


def test_an_unknown_implementation(capsys):
    with pytest.raises(SystemExit):
        check.main(["--implementation", "foo"])
    assert "invalid choice: 'foo'" in capsys.readouterr().err


def test_kernels_without_a_gpu(capsys, monkeypatch):
    monkeypatch.delenv("JAX_SSD_TARGET_ARCH", raising=False)
    assert check.main(["--case", "short", "--implementation", "cutile"]) == 1
    said = capsys.readouterr().out
    assert "--   short" in said and "JAX sees no CUDA device" in said and "cutile: every case was refused." in said
