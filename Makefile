PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.baton-installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PROTOC = $(BIN)/python -m grpc_tools.protoc -I . --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) baton/protos/v1/*.proto

.PHONY: test-times drill new-seeds conformance dashboards helm-check images reference setup serve test soak thorough soak-ray identity rank-kills fuzz check kernels cuda-check proto proto-check bench bench-peers
.DEFAULT_GOAL := serve
unexport PYTHONDONTWRITEBYTECODE  # what runs here imports the same modules in hundreds of processes

$(STAMP): pyproject.toml
	@echo "installing into .venv: 2 GB, a minute or two; once" && $(PYTHON) -m venv .venv && $(PIP) torch==2.13.0
	@$(PIP) -e '.[worker,ray,dev]' && $(PIP) --no-deps tritonclient==2.73.0 && touch $@  # its pins would turn protobuf back

setup: $(STAMP)

serve: $(STAMP)  ## make serve ARGS="--model PATH_OR_HF_ID --prefill 2 --decode 1"
	@exec $(BIN)/baton serve $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m compileall -q -j 2 baton bench  # else each process of a fresh clone does it for itself
	@$(BIN)/pytest -n 6 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

test-times: $(STAMP)  ## the suite, then what CPU time each file of tests cost, its child processes included
	@$(MAKE) --no-print-directory test ARGS="--cpu-times $(ARGS)"

soak: $(STAMP)
	@$(BIN)/pytest -m soak --timeout 3600 $(ARGS)

thorough: $(STAMP)  ## every planted bug and form of the kernels, and what takes long beside the others
	@$(BIN)/pytest -m "thorough and not soak" --timeout 900 $(ARGS)

conformance: $(STAMP)  ## answers beside transformers', on each ISA of this CPU and on each dispatch of the BLAS under the references
	@$(BIN)/python -m tests.conformance.every_isa $(ARGS)

soak-ray: $(STAMP)  ## several Ray nodes on this machine: placement, gangs, a node's death, scaling under load
	@$(BIN)/pytest -m soak --timeout 3600 -s tests/e2e/test_ray_nodes.py tests/e2e/test_ray_pools.py tests/e2e/test_ray_rank_hosts.py $(ARGS)

check: $(STAMP) proto-check
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports && $(BIN)/python -m baton.dashboards --check
	@$(BIN)/python -m baton.kernels.cuda.table --check  # no nvcc: what is recorded is of these sources

drill: $(STAMP)  ## the planted bugs, then ARGS="--minutes 60" or "--seeds 100000" of new clusters
	@$(BIN)/pytest -m thorough --timeout 900 tests/drill && $(BIN)/baton drill $(if $(ARGS),$(ARGS),--minutes 10)

new-seeds: $(STAMP)  ## 40 simulated clusters that no run had before: seeds from the commit, FIRST=N for others; 45 s of CPU
	@commit=$$(git rev-parse --short=7 HEAD 2>/dev/null) && first=$$((0x$$commit)) || first=$$(date +%s); \
		set -x; $(BIN)/baton drill --first $${FIRST:-$$first} --seeds 40 --cores 2 $(ARGS)

identity: $(STAMP)  ## 10^4 answers of one engine and 10^4 of clusters with drafts, preempted and killed, against those without
	@BATON_IDENTITY=$${BATON_IDENTITY:-10000} $(BIN)/pytest -m soak --timeout 3600 -s tests/decode_worker/test_identity.py tests/e2e/test_speculation_identity.py $(ARGS)

rank-kills: $(STAMP)  ## 200 seeded kills of ranks under load (BATON_RANK_KILLS=N, BATON_RANK_KILLS_SEED=S)
	@$(BIN)/pytest -m soak --timeout 7200 -s tests/e2e/test_rank_kills.py $(ARGS)

fuzz: $(STAMP)  ## 10^5 odd inputs to a whole cluster beside clients that hang on every port; make soak sends 10^6
	@BATON_FUZZ=$${BATON_FUZZ:-100000} $(BIN)/pytest -m soak -s tests/e2e/test_fuzz.py $(ARGS)

kernels: $(STAMP)  ## build the native kernels ahead of first use, for every ISA
	@$(BIN)/python -m baton.kernels.abi.build

cuda-check: $(STAMP)  ## the CUDA kernels without a GPU: nvcc, ledger, disassembly, suites on the SIMT shim; ARGS=--write renews
	@$(BIN)/python -m baton.kernels.cuda.check $(ARGS)

proto: $(STAMP)  ## write the protobuf code anew
	@$(call PROTOC,.)

proto-check: $(STAMP)
	@rm -rf build/proto && mkdir -p build/proto && $(call PROTOC,build/proto)
	@diff -r -x '*.proto' -x __init__.py -x __pycache__ build/proto/baton/protos/v1 baton/protos/v1 || (echo "run: make proto"; exit 1)

bench: $(STAMP)
	@$(BIN)/python -m bench $(ARGS)

bench-peers: $(STAMP)  ## llama.cpp, OpenVINO GenAI and transformers beside our engine, vLLM beside our API; sets each up
	@$(BIN)/python -m bench.peers.environments && $(BIN)/python -m bench.peers --json bench/results/peers.json $(ARGS)
	@$(BIN)/python -m bench.peers.serving --json bench/results/peers.json

helm-check: $(STAMP)  ## the chart by the real Helm engine: every profile and Kubernetes version, its pods run here
	@$(BIN)/pytest -m "" --timeout 600 tests/deploy/helm $(ARGS)

dashboards: $(STAMP)  ## write what is generated from the metrics: Grafana, alert rules, docs/metrics.md
	@$(BIN)/python -m baton.dashboards

reference: $(STAMP)  ## write what is generated from the code: docs/configuration.md, docs/fields.md, the chart's schema
	@$(BIN)/python docs/configuration.py && $(BIN)/python docs/fields.py && $(BIN)/python deploy/helm/schema.py

images:  ## router and worker images by buildah, without Docker; needs root, buildah and debootstrap
	@bash deploy/docker/build.sh $(ARGS)
