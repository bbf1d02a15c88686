#!/usr/bin/env bash
# The suites that need a GPU, with binaries that were built elsewhere:
#
#   tests/gpu/run.sh --suite contract|correctness|faults|adoption|speed
#       --bin DIR      flextensord, flextensorctl, device_contract (default: the release folder)
#       --module PATH  what holds the Python module: a wheel, a folder with one, a folder with the
#                      package flextensord, or with _native.abi3.so alone
#       --out DIR      results (default: .cache/gpu); a case with a result there is not run again
#       --fresh        run all cases again; --retry: those that failed
#       --only NAME    only cases whose name contains NAME; --list: names alone
#
# Needs an NVIDIA driver and a Python with torch (PYTHON=... names another one than python3).
# Prints a table and, last, `N passed, N failed, N skipped`; exits 1 if a case failed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
exec "${PYTHON:-python3}" "$here/suite.py" "$@"
