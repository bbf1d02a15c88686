#!/usr/bin/env bash
# Figures of this machine: JSON lines in the results folder, a table on the terminal. Needs the
# release binaries (make release). `--quick` leaves out the minute of idleness.
set -euo pipefail
cd "$(dirname "$0")/../.."
release=${CARGO_TARGET_DIR:-target}/release
results=${BENCH_RESULTS:-.cache/bench}
mkdir -p "$results"
exec "$release/bench" --daemon "$release/flextensord" --results "$results/host.jsonl" "$@"
