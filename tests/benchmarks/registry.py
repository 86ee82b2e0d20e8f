"""Which benchmarks there are: functions in `chapters/` that return figures by name.

To add one: a function in a module of `chapters/`, decorated with the names it returns, and a line for each name in
`goals.py`. It gets an empty directory of its own, or what its `on` yields, which is made once for all that share it
(`engine.warm_engine`). It raises when it cannot run here.
"""

import importlib
import pkgutil
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from resources.local_stack import LocalStack

Measure = Callable[[Any], dict[str, float]]
Ground = Callable[[Path], AbstractContextManager[Any]]
"""What a benchmark stands on, made in an empty directory."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A function, the names of the figures it returns, and what it stands on."""

    measure: Measure
    produces: tuple[str, ...]
    on: Ground = nullcontext
    """The default: an empty directory."""

    @property
    def chapter(self) -> str:
        """The module it is in."""
        return self.measure.__module__.rpartition(".")[2]

    @property
    def name(self) -> str:
        """`chapter.function`."""
        return f"{self.chapter}.{self.measure.__name__}"

    @property
    def place(self) -> str:
        """The directory it runs in; those with the same one share what they stand on."""
        return self.name if self.on is nullcontext else self.on.__name__

    def take(self, ground: Any) -> dict[str, float]:
        """Take the figures. Raises whatever kept them from being taken."""
        values = {name: float(value) for name, value in self.measure(ground).items()}
        if set(values) != set(self.produces):
            raise ValueError(f"it returned {sorted(values)} and is declared to return {sorted(self.produces)}")
        return values


_found: list[Benchmark] = []


def benchmark(*produces: str, on: Ground = nullcontext) -> Callable[[Measure], Measure]:
    """Declare a function of `chapters/` as one that returns these figures."""

    def declare(measure: Measure) -> Measure:
        _found.append(Benchmark(measure, produces, on))
        return measure

    return declare


def all_benchmarks() -> tuple[Benchmark, ...]:
    """Those of every chapter; those that share what they stand on follow each other."""
    from benchmarks import chapters

    for module in pkgutil.iter_modules(chapters.__path__):
        importlib.import_module(f"benchmarks.chapters.{module.name}")
    return tuple(sorted(_found, key=lambda one: (one.on is not nullcontext, one.place, one.name)))


def choose(benchmarks: Iterable[Benchmark], patterns: Sequence[str]) -> list[Benchmark]:
    """Those with a chapter, function or figure that matches one of the patterns; all where there are none."""

    def named(one: Benchmark) -> tuple[str, ...]:
        return (one.chapter, one.name, one.measure.__name__, *one.produces)

    return [one for one in benchmarks if not patterns or any(fnmatchcase(n, p) for n in named(one) for p in patterns)]


def emptied(directory: Path) -> Path:
    """An empty directory; what a killed run left behind in it is ended first."""
    if directory.exists():
        LocalStack(directory / "stack", on_event=lambda _: None).down()
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    return directory
