# The menu. Everything that is missing is installed once; running a target again needs no network.

# As Cargo does it, so that the paths below are right in a shared target directory, too.
TARGET := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
VENV := .cache/venv
CONTRACT := .cache/contract
ARGS ?=

.PHONY: dev build test check bench bench-control bench-visibility openapi fmt install-dev install-test

# Everything in one process, with a database and a demo project. ARGS="--port 8000" and so on.
dev: install-dev
	cargo build --bin aura-realtime
	exec $(TARGET)/debug/aura-realtime dev $(ARGS)

# The four binaries.
build:
	cargo build --release --workspace --bins

# All tests, on real parts.
test: install-test
	cargo build --workspace --bins
	tests/scripts/run-tests.sh $(ARGS)

# What CI checks besides tests.
check:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	if command -v cargo-deny >/dev/null; then cargo deny check bans licenses sources; fi

# Latency and throughput beside PostgreSQL's own pg_recvlogical.
bench: install-test
	cargo build --release --workspace --bins
	cargo run --release --package aura-bench -- $(ARGS)

# What row security costs, and what others notice of a policy that fails. ARGS="--subscribers 100 --batches 1000".
bench-visibility: install-test
	cargo build --release --workspace --bins
	cargo run --release --package aura-bench -- visibility-check visibility-engine isolation $(ARGS)

# Toggles and lists with 10 000 projects of 10 tables. ARGS="--projects 1000".
bench-control: install-test
	cargo build --release --workspace --bins
	cargo run --release --package aura-bench -- control $(ARGS)

# Writes the API's document anew.
openapi:
	UPDATE=1 cargo test --package aura-api openapi

fmt:
	cargo fmt --all

install-dev:
	tests/scripts/install-dev.sh

install-test: install-dev $(VENV)/.installed tests/clients/js/node_modules/.installed \
              $(CONTRACT)/.installed tests/contract/node_modules/.installed

$(VENV)/.installed: tests/clients/python/requirements.txt
	tests/scripts/install-venv.sh $(VENV) $<
	touch $@

# What lints the API's document, makes clients from it, and tries it out.
$(CONTRACT)/.installed: tests/contract/requirements.txt
	tests/scripts/install-java.sh
	tests/scripts/install-venv.sh $(CONTRACT) $<
	touch $@

tests/contract/node_modules/.installed: tests/contract/package-lock.json
	cd tests/contract && npm ci --no-fund --no-audit --loglevel=error
	touch $@

tests/clients/js/node_modules/.installed: tests/clients/js/package-lock.json
	cd tests/clients/js && npm ci --no-fund --no-audit --loglevel=error
	touch $@
