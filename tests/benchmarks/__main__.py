"""Take every figure, or those that match the patterns given: `make bench`, `make bench ONLY=presence`.

Exit codes: 0 everything was measured, 1 something could not be, 2 nothing matches, 130 interrupted.
"""

import sys
from pathlib import Path

from benchmarks.registry import all_benchmarks, choose
from benchmarks.report import take

DIRECTORY = Path(".warmfront/bench").absolute()


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main(patterns: list[str]) -> int:
    benchmarks = all_benchmarks()
    chosen = choose(benchmarks, patterns)
    if not chosen:
        say(f"nothing matches {' '.join(patterns)}; there are: {', '.join(one.name for one in benchmarks)}")
        return 2
    report = take(chosen, DIRECTORY, say)
    report.show()
    report.write(DIRECTORY.with_suffix(".json"))
    return report.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main(" ".join(sys.argv[1:]).replace(",", " ").split()))
    except KeyboardInterrupt:
        sys.exit(130)
