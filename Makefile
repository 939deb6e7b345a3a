# Everything that a person types. `make` alone lists the targets. A fresh machine needs Rust, Python >= 3.10 and a C compiler.
#
#   CARGO_TARGET_DIR   where cargo builds (default target/)
#   R3ROUTER_CACHE     folder for the virtual environments (default: inside the clone)
#   PYTHON             interpreter for them (default python3.11, else python3)
#   SEEDS              simulated fleets of `make test` (default 10000)
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
ROOT := $(CURDIR)
ifdef R3ROUTER_CACHE
VENV := $(R3ROUTER_CACHE)/venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PEERS := $(R3ROUTER_CACHE)/peers
TOOLS := $(R3ROUTER_CACHE)/deploy-tools
MOONCAKE := $(R3ROUTER_CACHE)/mooncake
else
VENV := $(ROOT)/.venv
PEERS := $(ROOT)/.venv-peers
TOOLS := $(ROOT)/.deploy-tools
MOONCAKE := $(ROOT)/.venv-mooncake
endif
BIN := $(VENV)/bin
TARGET := $(or $(CARGO_TARGET_DIR),$(ROOT)/target)
SEEDS ?= 10000
export SIM_SEEDS := $(SEEDS)
# The package of this clone, whichever clone an environment in R3ROUTER_CACHE was last built from.
export PYTHONPATH := $(ROOT)/python
# Where the tests of deploy/ find helm, kustomize and promtool.
export DEPLOY_TOOLS := $(TOOLS)/bin
# Where they find a Mooncake store's program and client.
export MOONCAKE_HOME := $(MOONCAKE)
HELM := helm.sh/helm/v3/cmd/helm@v3.20.2
KUSTOMIZE := sigs.k8s.io/kustomize/kustomize/v5@v5.7.1
# The peers that the demo and the benchmarks run beside ours; each gets an environment of its own, since two of them ship
# a script of the same name.
PEER_sglang-router := sglang-router==0.3.2
PEER_smg := smg
PEER_vllm-router := vllm-router

say = @printf '\n== %s\n' "$(1)"

.PHONY: help
help: ## List the targets.
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A stamp per list of packages: another list makes another stamp, so that a change in pyproject.toml installs again.
STAMP := $(VENV)/.r3router-$(shell cksum < pyproject.toml | cut -d' ' -f1)
$(STAMP):
	$(call say,Making the Python environment $(VENV))
	[ -x "$(BIN)/python" ] || $(PYTHON) -m venv "$(VENV)"
	sed -n '/^dev = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p; s/^dependencies = \["\(.*\)"\]/\1/p' pyproject.toml > "$(VENV)/wanted.txt"
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -r "$(VENV)/wanted.txt"
	@rm -f "$(VENV)"/.r3router-*; touch "$@"

.PHONY: build
build: $(STAMP) ## Build the native core (profile fast) and install the package into the environment.
	$(call say,Building the native core and installing r3router into $(VENV))
	VIRTUAL_ENV="$(VENV)" PATH="$(BIN):$$PATH" maturin develop --profile fast --quiet
	@"$(BIN)/python" -m r3router version

.PHONY: demo
demo: build ## Show the incident and its cure on an emulated fleet; writes target/demo.json.
	-@$(MAKE) --no-print-directory peer-sglang-router
	$(call say,Running the demo: the same fleet behind an unbounded router and behind r3router)
	"$(BIN)/python" -m r3router demo --out target/demo.json --peers "$(PEERS)"

.PHONY: test
test: build ## All tests, no GPU: cargo (SEEDS simulated fleets) and pytest.
	$(call say,Testing the Rust crates ($(SEEDS) simulated fleets))
	cargo test --workspace --profile fast --quiet
	@# Where it cannot be had, the test that wants it is skipped and says so.
	-@[ -e "$(MOONCAKE)/.done" ] || $(MAKE) --no-print-directory mooncake
	$(call say,Testing from Python)
	"$(BIN)/python" -m pytest --quiet -m alone
	@# Three at a time, since tests wait more than they reckon. They share the cores with whatever else runs: what fails is run once more by itself, and both results are printed.
	"$(BIN)/python" -m pytest --quiet -n 3 --dist worksteal -m "not alone" || { \
	    printf '\n== Once more, only what failed\n'; \
	    "$(BIN)/python" -m pytest --quiet -m "not alone" --last-failed --last-failed-no-failures none; }

.PHONY: test-dropin
test-dropin: build peer-sglang-router ## The same calls against sglang-router 0.3.2 and r3router: equal but for the listed differences.
	$(call say,Comparing with sglang-router 0.3.2)
	R3ROUTER_PEERS="$(PEERS)" "$(BIN)/python" -m pytest --quiet tests/dropin tests/python/test_launch_router.py

.PHONY: test-sglang
test-sglang: build ## Tests against real SGLang engines on the CPU; builds their environment (about 5 GB) when it is missing.
	$(call say,Testing against real SGLang engines)
	@# Two cores run three engines: what fails is run once more by itself, and both results are printed.
	"$(BIN)/python" -m pytest --quiet tests/sglang || { \
	    printf '\n== Once more, only what failed\n'; \
	    "$(BIN)/python" -m pytest --quiet tests/sglang --last-failed --last-failed-no-failures none; }

.PHONY: test-page
test-page: build ## The status page in headless Chromium; gets Debian's package when it is missing. PICTURES=DIR keeps its picture.
	$(call say,Testing the status page in a browser)
	command -v chromium >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends chromium fonts-dejavu-core; }
	TEST_BROWSER_REQUIRED=1 $(if $(PICTURES),TEST_PICTURES="$(abspath $(PICTURES))") "$(BIN)/python" -m pytest --quiet tests/proxy/test_page.py

.PHONY: deploy-tools
deploy-tools: $(STAMP) $(TOOLS)/bin/helm $(TOOLS)/bin/kustomize $(TOOLS)/bin/promtool ## Get helm and kustomize (Go), promtool (Debian) and the schemas (PyPI).
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check "kubernetes-validate>=1.30" "pyyaml>=6"

# Minutes each, once: what a cluster's tools are built of is large.
$(TOOLS)/bin/helm:
	$(call say,Building $(HELM))
	GOBIN="$(TOOLS)/bin" go install -ldflags "-s -w" "$(HELM)"

$(TOOLS)/bin/kustomize:
	$(call say,Building $(KUSTOMIZE))
	GOBIN="$(TOOLS)/bin" go install -ldflags "-s -w" "$(KUSTOMIZE)"

# Taken out of Debian's package; nothing is installed.
$(TOOLS)/bin/promtool:
	$(call say,Getting promtool)
	mkdir -p "$(TOOLS)/bin" "$(TOOLS)/prometheus"
	cd "$(TOOLS)/prometheus" && { apt-get download prometheus || { apt-get update && apt-get download prometheus; }; } \
		&& dpkg --fsys-tarfile prometheus_*.deb | tar --extract --to-stdout ./usr/bin/promtool > promtool
	install -m 0755 "$(TOOLS)/prometheus/promtool" "$@"
	rm -r "$(TOOLS)/prometheus"

.PHONY: mooncake
mooncake: $(MOONCAKE)/.done ## Get Mooncake's package (PyPI) and libibverbs (Debian), for the tests of `r3router sink`.

# An environment of its own, since the package brings much; Debian's libraries are taken out of their packages, nothing is installed.
$(MOONCAKE)/.done:
	$(call say,Getting Mooncake)
	$(PYTHON) -m venv "$(MOONCAKE)"
	"$(MOONCAKE)/bin/python" -m pip install --quiet --disable-pip-version-check mooncake-transfer-engine-non-cuda numpy aiohttp orjson click
	mkdir -p "$(MOONCAKE)/debian"
	cd "$(MOONCAKE)/debian" && { apt-get download libibverbs1 libnl-3-200 libnl-route-3-200 \
		|| { apt-get update && apt-get download libibverbs1 libnl-3-200 libnl-route-3-200; }; } \
		&& for package in *.deb; do dpkg --extract "$$package" .; done && rm ./*.deb
	chmod +x "$(MOONCAKE)"/lib/python3*/site-packages/mooncake/mooncake_master
	touch "$@"

.PHONY: deploy-check
deploy-check: build deploy-tools ## Chart, kustomizations, examples, rules and image, all of them: nothing is skipped.
	$(call say,Checking deploy/)
	DEPLOY_REQUIRED=1 "$(BIN)/python" -m pytest --quiet -n 2 tests/deploy

.PHONY: test-k8s
test-k8s: deploy-check ## Kubernetes: all that deploy-check does, and discovery against an API server of our own.
	$(call say,Discovery: what lists and watches change; the router with pods that come and go)
	cargo test --profile fast --quiet -p r3router-discovery
	"$(BIN)/python" -m pytest --quiet tests/k8s

.PHONY: deploy-golden
deploy-golden: build deploy-tools ## Write tests/deploy/golden from what is rendered now.
	DEPLOY_REQUIRED=1 DEPLOY_WRITE=1 "$(BIN)/python" -m pytest --quiet tests/deploy -k renders_as_before

.PHONY: lint
lint: build ## Formatting, clippy, rustdoc, ruff, mypy, stubs.
	$(call say,rustfmt)
	cargo fmt --all --check
	$(call say,clippy)
	cargo clippy --workspace --all-targets --profile fast --quiet -- -D warnings
	$(call say,rustdoc)
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	$(call say,ruff)
	"$(BIN)/ruff" check . && "$(BIN)/ruff" format --check .
	$(call say,mypy)
	"$(BIN)/mypy"
	$(call say,stubs against the native core)
	"$(BIN)/python" -m mypy.stubtest r3router._core --mypy-config-file pyproject.toml
	@echo "lint: clean"

.PHONY: bench
bench: build ## Core and end-to-end benchmarks, ours and sglang-router in turn; writes benches/results/bench.md.
	-@$(MAKE) --no-print-directory peer-sglang-router
	$(call say,Benchmarks: the core and end to end)
	cargo bench --no-run --quiet --profile fast -p r3router-core --bench admission
	R3ROUTER_PEERS="$(PEERS)" "$(BIN)/python" benches/run.py --write

# Beside the environment, not in it: the tests run without them. NIXL comes without torch and works without a GPU; where it cannot be
# installed its rows say so.
R3CLIENTS := $(VENV)/r3-clients
.PHONY: bench-r3
bench-r3: build ## R3 in the reply against R3 by reference, clients and router; writes benches/results/r3.md.
	$(call say,Benchmark: R3 in the reply and by reference)
	[ -e "$(R3CLIENTS)/.done" ] || { "$(BIN)/python" -m pip install --quiet --disable-pip-version-check --upgrade \
		--target "$(R3CLIENTS)" httpx pybase64 uvloop && touch "$(R3CLIENTS)/.done"; }
	-[ -e "$(R3CLIENTS)/nixl_cu12" ] || "$(BIN)/python" -m pip install --quiet --disable-pip-version-check --no-deps \
		--target "$(R3CLIENTS)" 'nixl-cu12>=1.0'
	PYTHONPATH="$(PYTHONPATH):$(R3CLIENTS)" "$(BIN)/python" benches/r3.py --warm --write

.PHONY: bench-policies
bench-policies: build ## cache_aware beside sglang-router's on the same conversations, memory and time of prefixes; writes benches/results/policies.md.
	-@$(MAKE) --no-print-directory peer-sglang-router
	$(call say,Benchmark: policies)
	cargo bench --no-run --quiet --profile fast -p r3router-core --bench policies
	R3ROUTER_PEERS="$(PEERS)" "$(BIN)/python" benches/policies.py --write

.PHONY: bench-window
bench-window: build ## Hold the computed window to its targets over the scenarios; writes benches/results/window.md.
	$(call say,Sweeping the scenarios in virtual time)
	"$(BIN)/python" -m r3router simulate --sweep tests/sim/scenarios --write benches/results/window.md

.PHONY: docs
docs: build ## Write what is made from the code (settings, errors, metrics, the chart's schema, alerts, dashboard).
	$(call say,Writing the reference pages)
	"$(BIN)/python" -m r3router.reference --write

.PHONY: readme-table
readme-table: build ## Put the incident table of target/demo.json into README.md.
	"$(BIN)/python" -m r3router.reference --demo-table target/demo.json

.PHONY: wheel
wheel: $(STAMP) ## Build the abi3 wheel (release profile) into dist/.
	$(call say,Building the wheel)
	PATH="$(BIN):$$PATH" maturin build --release --out dist

# `make peer-smg` and so on. Fails when the wheel cannot be had; demo and bench then go on without it and say so.
.PHONY: peers
peers: peer-sglang-router peer-smg peer-vllm-router ## Install the peers' wheels, each into an environment of its own.

peer-%:
	@if [ -x "$(PEERS)/$*/bin/python" ] && [ -e "$(PEERS)/$*/.done" ]; then exit 0; fi; \
	printf '\n== Installing the peer %s\n' '$(PEER_$*)'; mkdir -p "$(PEERS)"; \
	{ $(PYTHON) -m venv "$(PEERS)/$*" && "$(PEERS)/$*/bin/python" -m pip install --quiet --disable-pip-version-check '$(PEER_$*)' \
		&& touch "$(PEERS)/$*/.done"; } || { echo "The peer $* cannot be installed here; going on without it."; exit 1; }
