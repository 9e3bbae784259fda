SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
# One name a line as pip comes to it, so that one sees it move.
SHOW_PACKAGES := sed -un 's/^Collecting \([^ ]*\).*/  \1/p; s/^Installing.*/  installing (takes a while)/p'
PROTOS := $(wildcard protos/orca/v1/*.proto)
PB     := services/common/pb

.PHONY: setup protos run test test-golden check-exact lint types imports check bench-pipeline bench-disconnect clean

setup: $(VENV)/.ready protos

# torch is named here so that pip settles its build before anything else asks for a range of it.
$(VENV)/.ready: pyproject.toml
	@echo "orca: making $(VENV) and installing packages (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==2.13.0 | $(SHOW_PACKAGES)
	@$(PIP) -e '.[worker,simulator,protos,dev]' | $(SHOW_PACKAGES)
	@touch $@

protos: $(PB)/.ready

# Generated imports are rewritten to the package that the code lives in.
$(PB)/.ready: $(PROTOS) $(VENV)/.ready
	@rm -rf $(PB) && mkdir -p $(PB)
	@$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=$(PB) --pyi_out=$(PB) $(PROTOS)
	@find $(PB) -name '*.py*' -exec sed -i 's/^from orca\.v1 import/from services.common.pb.orca.v1 import/' {} +
	@touch $(PB)/__init__.py $(PB)/orca/__init__.py $(PB)/orca/v1/__init__.py $@

run: setup
	@exec $(BIN)/orca up $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(ARGS)

test-golden: setup
	@ORCA_GOLDEN=full $(BIN)/python -m pytest tests/golden $(ARGS)

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	@$(BIN)/mypy

imports: setup
	@$(BIN)/lint-imports

check: lint types imports

check-exact: setup
	@$(BIN)/python -m loadtest.exactness $(ARGS)

bench-pipeline: setup
	@$(BIN)/python -m loadtest.pipeline $(ARGS)

bench-disconnect: setup
	@$(BIN)/python -m loadtest.disconnect $(ARGS)

clean:
	rm -rf $(VENV) $(PB) *.egg-info
