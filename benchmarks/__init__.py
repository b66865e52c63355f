"""The benchmark harness: `python -m benchmarks.run` measures, `python -m benchmarks.plot` draws what was measured."""
