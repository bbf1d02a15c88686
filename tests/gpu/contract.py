"""The contract of the device trait: the tests of a prebuilt binary, on the real driver."""

from __future__ import annotations

import pathlib
import subprocess

from bench import Bench, Case, Suite
from report import Skip

SUITE = Suite()
BINARY = "device_contract"
LIMIT = 90


def find(binaries: pathlib.Path) -> None:
    """Makes a case of each test of the binary."""
    binary = binaries / BINARY
    if not binary.exists():
        SUITE.cases = {"binary": Case("binary", missing, 10)}
        return
    command = [str(binary), "--list", "--format", "terse"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = answer.stdout.splitlines()
    names = [line.removesuffix(": test") for line in lines if line.endswith(": test")]
    SUITE.cases = {
        name: Case(name, run, LIMIT) for name in (each.replace("::", ".") for each in names)
    }


def missing(bench: Bench) -> None:
    raise FileNotFoundError(f"{bench.binaries / BINARY}: give the folder with --bin")


def run(bench: Bench) -> None:
    """Runs the test whose name the case has."""
    test = bench.result.case.replace(".", "::")
    command = [str(bench.binaries / BINARY), test, "--exact", "--include-ignored", "--nocapture"]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT - 10, check=False
    )
    output = answer.stdout + answer.stderr
    bench.result.notes["output"] = output[-4000:]
    if answer.returncode:
        lines = [line for line in output.splitlines() if "panicked" in line or "rror" in line]
        reason = lines[0] if lines else output.strip()[-300:]
        bench.result.fail(f"exit {answer.returncode}: {reason}")
    elif "1 passed" not in output:
        raise Skip("the binary did not run it")
