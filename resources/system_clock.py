"""Real time."""

import time


class SystemClock:
    """Satisfies warmers.replica.Clock."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
