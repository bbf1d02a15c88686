"""Results: what a case found, and tables and files of it."""

from __future__ import annotations

import json
import pathlib
from dataclasses import asdict, dataclass, field
from typing import Any


class Skip(Exception):
    """Says why a case cannot be run here."""


@dataclass
class Check:
    """A figure, and the limit that it is judged by, if any."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def passed(self) -> bool:
        low = self.at_least is None or self.value >= self.at_least
        high = self.at_most is None or self.value <= self.at_most
        # a figure that is no number passes nothing
        return low and high and self.value == self.value

    def limit(self) -> str:
        if self.at_least is not None and self.at_least == self.at_most:
            return f"= {self.at_least:g}"
        sides = []
        if self.at_least is not None:
            sides.append(f">= {self.at_least:g}")
        if self.at_most is not None:
            sides.append(f"<= {self.at_most:g}")
        return " ".join(sides)


@dataclass
class Result:
    """What came of a case."""

    suite: str
    case: str
    outcome: str = "passed"
    seconds: float = 0.0
    reason: str = ""
    checks: list[Check] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    daemon_log: str = ""

    def check(
        self,
        name: str,
        value: float,
        unit: str = "",
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> bool:
        """Notes a figure; one that misses its limit fails the case."""
        made = Check(name, float(value), unit, at_least, at_most)
        self.checks.append(made)
        if not made.passed:
            self.fail(f"{name} is {made.value:g} {unit}, not {made.limit()}")
        return made.passed

    def fail(self, reason: str) -> None:
        self.outcome = "failed"
        self.reason = f"{self.reason}; {reason}" if self.reason else reason

    def write(self, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = asdict(self)
        for check, each in zip(document["checks"], self.checks, strict=True):
            check["passed"] = each.passed
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
        unfinished.rename(path)

    @classmethod
    def read(cls, path: pathlib.Path) -> Result:
        document = json.loads(path.read_text())
        checks = []
        for check in document.pop("checks"):
            check.pop("passed")
            checks.append(Check(**check))
        return cls(checks=checks, **document)


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """The table: a line a case, and one for each figure under it."""
    table: list[tuple[str, ...]] = []
    for result in results:
        reason = result.reason.splitlines()[0][:100] if result.reason else ""
        table.append((result.case, f"{result.seconds:.1f} s", result.outcome, reason))
        for check in result.checks:
            verdict = "" if check.passed else "missed"
            value = f"{check.value:.4g} {check.unit}".strip()
            table.append((f"  {check.name}", value, check.limit(), verdict))
    return table


def table(results: list[Result]) -> str:
    """The table as text."""
    lines = rows(results)
    widths = [max((len(line[at]) for line in lines), default=0) for at in range(3)]
    text = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        text.append("  ".join([*cells, line[3]]).rstrip())
    return "\n".join(text)


def last_line(results: list[Result]) -> str:
    """How many there were of each."""
    count = {name: 0 for name in ("passed", "failed", "skipped")}
    for result in results:
        count[result.outcome] += 1
    return ", ".join(f"{number} {name}" for name, number in count.items())


def write_suite(path: pathlib.Path, machine: dict[str, str], results: list[Result]) -> None:
    """All results of a suite in one document."""
    cases = []
    for result in results:
        document = asdict(result)
        for check, each in zip(document["checks"], result.checks, strict=True):
            check["passed"] = each.passed
        cases.append(document)
    document = {"machine": machine, "summary": last_line(results), "cases": cases}
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.rename(path)
