"""What a run of benchmarks found: a table for people, a flat JSON object for machines."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.goals import GOALS
from benchmarks.registry import Benchmark

from pipelines.printing import print_table


@dataclass(slots=True)
class Report:
    """Figures by name, and why others could not be taken."""

    values: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """By benchmark."""

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
    """Run one after the other; one that cannot run harms no other."""
    report = Report()
    for one in benchmarks:
        say(f"{one.name} ...")
        try:
            report.values |= one.run(directory)
        except Exception as error:
            report.failures[one.name] = f"{type(error).__name__}: {error}"
    return report
