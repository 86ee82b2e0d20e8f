"""What a run of benchmarks found: a table for people, a flat JSON object for machines."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.goals import GOALS
from benchmarks.registry import Benchmark, emptied

from pipelines.printing import print_table


@dataclass(slots=True)
class Report:
    """Figures by name, and why others could not be taken."""

    values: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """By benchmark."""

    def add(self, one: Benchmark, ground: Any) -> None:
        """Take one benchmark's figures."""
        try:
            self.values |= one.take(ground)
        except Exception as error:
            self.failures[one.name] = _reason(error)

    def show(self) -> None:
        """Figure, goal and whether it is met; missed goals and failures are shown like the rest."""
        words = {True: "yes", False: "NO", None: "-"}
        rows = [
            [name, f"{value:,.4g}", str(goal := GOALS[name]), words[goal.met(value, self.values)], goal.what]
            for name, value in self.values.items()
        ]
        print_table(["figure", "value", "goal", "met", "what it is"], rows)
        for name, reason in self.failures.items():
            print(f"{name} could not be measured: {reason}")

    def write(self, path: Path) -> None:
        """Names and numbers, flat."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.values, indent=2) + "\n")

    @property
    def exit_code(self) -> int:
        """0 when everything could be measured, whether or not it met its goal."""
        return 1 if self.failures else 0


def take(benchmarks: Iterable[Benchmark], directory: Path, say: Callable[[str], None]) -> Report:
    """Run one after the other; one that cannot run harms no other, unless it is what they stand on that fails."""
    report = Report()
    for place, those in groupby(benchmarks, key=lambda one: one.place):
        group = list(those)
        try:
            with group[0].on(emptied(directory / place)) as ground:
                for one in group:
                    say(f"{one.name} ...")
                    report.add(one, ground)
        except Exception as error:
            tried = {*report.values, *report.failures}
            left = [one.name for one in group if tried.isdisjoint((one.name, *one.produces))]
            report.failures[", ".join(left) or place] = _reason(error)
    return report


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
