# Two commands: `make demo` and `make test`. Both set up a virtual environment first.
#   PYTHON=python3.12   the interpreter that the environment is made from
#   VENV=.venv          where it is kept
#   EXTRAS=dev,cuda13   what is installed with the package
#   ARGS="-k launch"    more arguments for pytest or the demo
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
ARGS ?=
JOBS ?= 2

.PHONY: help demo test slow lint format clean
help:
	@sed -n 's/^#   /  /p; s/^## //p' $(firstword $(MAKEFILE_LIST))

## make demo    train a small byte-level language model on the CPU
demo: $(VENV)/installed
	@echo "== demo: examples/train_bytes.py, a small Mamba-2 language model on this machine's JAX devices"
	$(VENV)/bin/python examples/train_bytes.py $(ARGS)

## make test    run the test suite, but for the tests marked slow
test: $(VENV)/installed
	@echo "== test: pytest with $(JOBS) workers"
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

## make slow    run the tests marked slow
slow: $(VENV)/installed
	@echo "== slow: pytest with $(JOBS) workers"
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal -m slow $(ARGS)

## make lint    formatters, linters and the type checker, without changing a file
lint: $(VENV)/installed
	@echo "== lint: ruff, clang-format, pyright"
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(shell git ls-files '*.cc' '*.h' '*.cu' '*.cuh')
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

## make format  rewrite the sources as the formatters want them
format: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(shell git ls-files '*.cc' '*.h' '*.cu' '*.cuh')

## make clean   remove the environment and everything built
clean:
	rm -rf $(VENV) build

# Rebuilt when what it is made of changes, which includes PYTHON and EXTRAS; Python sources are used in place.
$(VENV)/installed: pyproject.toml CMakeLists.txt $(wildcard ffi/*.cc ffi/*.h) $(VENV)/settings
	@echo "== setup: $(VENV) from $(PYTHON), then jax_ssd in it (editable, with [$(EXTRAS)]); a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

# What the environment was made from; where that is no longer what is asked for, another one is made.
$(VENV)/settings: FORCE
	@echo '$(PYTHON) [$(EXTRAS)]' | cmp -s - $@ || { rm -rf $(VENV); mkdir -p $(VENV); echo '$(PYTHON) [$(EXTRAS)]' > $@; }
FORCE:
