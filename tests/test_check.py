"""`python -m jax_ssd check`."""

import pytest

from jax_ssd.tools import check


def test_scan_and_steps_of_every_implementation_here(capsys):
    assert check.main(["--case", "short", "--case", "packed", "--implementation", "xla"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:-1]] == [["ok", "short"], ["ok", "short"], ["ok", "packed"]]
    assert " steps " in lines[2] and lines[-1] == "All passed."


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
