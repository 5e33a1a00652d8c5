#!/bin/sh
# All tests of the workspace; arguments go to the runner.
set -eu

# The interleavings of the machines: a build of its own, since loom replaces their atomics. A minute at most.
timeout 300 cargo test --package aura-flow --features loom --test loom --no-run
timeout 60 cargo test --package aura-flow --features loom --test loom

if command -v cargo-nextest >/dev/null; then
    exec cargo nextest run --workspace "$@"
fi
exec cargo test --workspace "$@"
