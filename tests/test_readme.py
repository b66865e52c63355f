"""What the README shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, str(README), "exec"), names)
    # Steps equal the sequence, up to the chunked form's products of bfloat16 numbers (2**-8 each).
    y, ys = (np.asarray(names[name], np.float32) for name in ("y", "ys"))
    final, last = (np.asarray(names[name]) for name in ("final", "last"))
    np.testing.assert_allclose(np.moveaxis(ys, 0, 1), y, rtol=0, atol=2**-6 * np.abs(y).max())
    np.testing.assert_allclose(last, final, rtol=0, atol=2**-7 * np.abs(final).max())


def test_the_targets_it_names_exist():
    makefile = README.with_name("Makefile").read_text()
    for target in set(re.findall(r"(?:`|    )make ([a-z]+)", README.read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
