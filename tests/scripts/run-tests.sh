#!/bin/sh
# All tests of the workspace; arguments go to the runner.
set -eu

if command -v cargo-nextest >/dev/null; then
    exec cargo nextest run --workspace "$@"
fi
exec cargo test --workspace "$@"
