"""Public functions say in words what they take, give and refuse."""

import inspect
import re

import pytest

import jax_ssd

FUNCTIONS = [name for name in jax_ssd.__all__ if inspect.isfunction(getattr(jax_ssd, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_described(name):
    function = getattr(jax_ssd, name)
    text = inspect.getdoc(function) or ""
    arguments = text.partition("Args:")[2].partition("Returns:")[0]
    described = set(re.findall(r"\w+", " ".join(re.findall(r"^ +([*\w, ]+):", arguments, flags=re.MULTILINE))))
    assert set(inspect.signature(function).parameters) <= described
    assert "Returns:" in text and "Raises:" in text


@pytest.mark.parametrize("name", ["mamba2", "mamba2_step", "mamba3", "causal_conv1d", "rms_norm_gated"])
def test_what_is_computed_is_a_formula(name):
    text = inspect.getdoc(getattr(jax_ssd, name)) or ""
    assert re.search(r"(=|<-) .*[*+].*", text.partition("Args:")[0])
