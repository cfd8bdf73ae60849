# make demo and make test each set everything up first; PYTHON chooses the interpreter (3.11 or later).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow bench lint clean

demo: $(VENV)/.ready
	$(BIN)/python -m dit_vca demo $(ARGS)

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-slow: $(VENV)/.ready-test
	$(BIN)/python -m pytest -m slow $(ARGS)

bench: $(VENV)/.ready-test
	$(BIN)/python -m benchmarks.train_step $(ARGS)

lint: $(VENV)/.ready-test
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m ruff check . && $(BIN)/python -m ruff format --check .

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/.venv:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) was not found: give a Python 3.11 or later with PYTHON=" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1), but 3.11 or later is needed: give one with PYTHON=" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) has no venv module: install it (on Debian: apt install python3-venv)" >&2; exit 2; }
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV) && touch $@

$(VENV)/.ready: $(VENV)/.venv pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@
