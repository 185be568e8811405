PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.baton-installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PROTOC = $(BIN)/python -m grpc_tools.protoc -I . --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) baton/protos/v1/*.proto

.PHONY: setup serve test soak check kernels proto proto-check bench
.DEFAULT_GOAL := serve

$(STAMP): pyproject.toml
	@echo "installing into .venv: 2 GB, a minute or two; once" && $(PYTHON) -m venv .venv && $(PIP) torch==2.13.0
	@$(PIP) -e '.[worker,ray,dev]' && $(PIP) --no-deps tritonclient==2.73.0 && touch $@  # its pins would turn protobuf back

setup: $(STAMP)

serve: $(STAMP)  ## make serve ARGS="--model PATH_OR_HF_ID --prefill 2 --decode 1"
	@exec $(BIN)/baton serve $(ARGS)

test: $(STAMP)
	@$(BIN)/pytest $(ARGS)

soak: $(STAMP)
	@$(BIN)/pytest -m soak --timeout 3600 $(ARGS)

check: $(STAMP) proto-check
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

kernels: $(STAMP)  ## build the native kernels ahead of first use, for every ISA
	@$(BIN)/python -m baton.kernels.abi.build

proto: $(STAMP)  ## write the protobuf code anew
	@$(call PROTOC,.)

proto-check: $(STAMP)
	@rm -rf build/proto && mkdir -p build/proto && $(call PROTOC,build/proto)
	@diff -r -x '*.proto' -x __init__.py -x __pycache__ build/proto/baton/protos/v1 baton/protos/v1 || (echo "run: make proto"; exit 1)

bench: $(STAMP)
	@$(BIN)/python -m bench $(ARGS)
