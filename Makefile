# The one entry point: CI runs the same targets. Each target installs what it needs into
# .cache (ignored by git), through cargo, pip and, as root, apt.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

CARGO ?= cargo
CACHE := $(CURDIR)/.cache
VENV := $(CACHE)/venv
DENY_VERSION := 0.20.2
# one that is installed serves, if it is the same version
DENY := $(shell cargo-deny --version 2>/dev/null | grep -qx 'cargo-deny $(DENY_VERSION)' \
	&& command -v cargo-deny || echo $(CACHE)/tools/bin/cargo-deny)
PYTHON_TESTS := $(wildcard tests/python/test_*.py)

# CI: HISTORY='--seconds 600'
HISTORY ?= --seconds 60

.PHONY: help demo test test-faults lint bench soak gpu-kit build release fmt clean linker

help: ## what there is to do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: release ## load a real model once, share it between processes, kill one of them
	tests/demo/run.sh

test: linker $(if $(PYTHON_TESTS),$(VENV)/ready) ## all tests
	$(CARGO) build --workspace --locked
	$(CARGO) test --workspace --locked
ifneq ($(PYTHON_TESTS),)
	$(VENV)/bin/pytest -ra tests/python
endif

test-faults: linker ## each fail point killed and failing, and random histories checked
	$(CARGO) build --workspace --bins --locked --features flextensord-tests/failpoints
	target/debug/faults $(FAULTS)
	target/debug/history $(HISTORY)

lint: linker $(DENY) ## format, clippy, licences, documentation, style
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(DENY) --locked check licenses bans sources
	RUSTDOCFLAGS=-Dwarnings $(CARGO) doc --workspace --no-deps --locked
	tests/style.sh

bench: release ## figures of this machine
	@test -x tests/bench/run.sh || { echo 'there are no benchmarks yet' >&2; exit 1; }
	tests/bench/run.sh

SOAK ?= --seconds 600 --crashes 3
soak: release ## 64 managers under random kills of them and of the daemon, for ten minutes or as SOAK says
	target/release/soak $(SOAK)

# a GPU machine may have neither Rust nor a network: what its suites need goes into one folder
gpu-kit: linker ## binaries for tests/gpu/run.sh, in .gpu
	$(CARGO) build --release --locked -p flextensord -p flextensord-client --bins
	PYO3_BUILD_EXTENSION_MODULE=1 $(CARGO) build --release --locked -p flextensord-py
	mkdir -p .gpu
	cp target/release/flextensord target/release/flextensorctl .gpu/
	cp target/release/lib_native.so .gpu/_native.abi3.so
	cp "$$($(CARGO) test --locked -p flextensord-device --features fake --test device_contract --no-run \
		--message-format=json | sed -n 's/.*"name":"device_contract".*"executable":"\([^"]*\)".*/\1/p' | tail -1)" \
		.gpu/device_contract
	strip .gpu/*

build: linker ## everything, for development
	$(CARGO) build --workspace --all-targets --locked

release: linker ## the binaries, optimised
	$(CARGO) build --release --workspace --bins --locked

fmt: ## format the sources
	$(CARGO) fmt --all

clean: ## remove what was built and fetched
	$(CARGO) clean
	rm -rf $(CACHE)

# a Rust toolchain brings no linker of its own
linker:
	@tests/need.sh 'command -v cc' gcc libc6-dev

$(CACHE)/tools/bin/cargo-deny: | linker
	$(CARGO) install --locked --root $(CACHE)/tools --version $(DENY_VERSION) cargo-deny

# Debian ships Python without ensurepip unless python3-venv is installed
$(VENV)/ready: tests/python/requirements.txt
	@tests/need.sh 'python3 -c "import ensurepip"' python3-venv
	rm -rf $(VENV)
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@
