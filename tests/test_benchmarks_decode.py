"""The decode benchmark, end to end at a tiny size. What it measures here is not looked at, only that it is sound."""

import json

import jax
import pytest

from benchmarks import decode


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    words = "--layers 1 --features 64 --vocab 32 --batches 1 2 --tokens 4 --implementations cuda xla --captures default"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        made = decode.main([*words.split(), "--repeats", "2", "--sample-ms", "1", "--output", str(folder)])
    (path,) = folder.iterdir()
    assert json.loads(path.read_text()) == made
    return made


def test_rows_are_measured_and_checked(result):
    measured = [row for row in result["rows"] if row["implementation"] == "xla"]
    assert [(row["batch"], row["status"]) for row in measured] == [(1, "ok"), (2, "ok")]
    for row in measured:
        assert row["tokens_per_second"] == pytest.approx(1e6 * row["batch"] / row["microseconds"])
        assert row["error"] == 0.0
        assert row["kernels_per_token"] == sum(row["kernels"].values()) > 0


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_an_implementation_that_cannot_run_says_why(result):
    refused = [row for row in result["rows"] if row["implementation"] == "cuda"]
    assert len(refused) == 2
    for row in refused:
        assert row["status"] == "unsupported" and "no CUDA device" in row["reason"]
        assert row["reason"][:40] in decode.table(result)


def test_kernels_of_a_loop_are_counted():
    text = """HloModule m

%body.1 (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[], /*index=1*/f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%arg), index=1
  %one = f32[4]{0} fusion(%x), kind=kLoop, calls=%f
  %call = (f32[4]{0}, f32[4]{0}) custom-call(%one), custom_call_target="jax_ssd.launch"
  %start = ((f32[4]{0}), f32[4]{0}, u32[]) fusion-start(%one), kind=kLoop, calls=%g
  %done = f32[4]{0} fusion-done(%start)
  ROOT %both = (s32[], f32[4]{0}) tuple(%i, %done)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]{0}) while(%init), condition=%cond.1, body=%body.1
}
"""
    assert decode.kernels_in_loop(text) == {"fusion": 1, "custom-call": 1, "fusion-start": 1}
    assert decode.kernels_in_loop("ENTRY %main (p: f32[4]) -> f32[4] {\n}\n") == {}
