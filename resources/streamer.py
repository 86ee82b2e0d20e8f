"""The Run:ai streamer, as engines use it: in a process of the engine's environment, which this one does not import.

What its answer is compared with does not belong here (`warmers/verification.py`).
"""

import base64
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from warmers.errors import BucketUnavailable

SCRIPT = Path(__file__).parents[1] / "deploy" / "engine" / "stream_digests.py"
LAST_LINES = 5
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class RunaiStreamer:
    """Satisfies warmers.verification.Streamer."""

    python: Path
    """Of the engine's environment."""
    environment: Mapping[str, str]
    """What an engine gets to find the bucket."""

    @property
    def installed(self) -> bool:
        """Whether there is an engine environment on this machine."""
        return self.python.exists() and SCRIPT.exists()

    def digests(self, files: Sequence[tuple[str, bytes]]) -> Sequence[str]:
        """SHA-256 of files by URI and header, as the tensors that it gives make it. Raises BucketUnavailable."""
        asked = [{"uri": uri, "header": base64.b64encode(header).decode()} for uri, header in files]
        doing = f"streaming {len(files)} staged files as an engine does"
        try:
            done = subprocess.run(
                [str(self.python), str(SCRIPT)],
                input=json.dumps(asked),
                env={**os.environ, **self.environment},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BucketUnavailable(doing, seen=f"no end after {TIMEOUT_S:.0f} s", do="Run again.") from None
        if done.returncode:
            said = "\n".join(done.stderr.strip().splitlines()[-LAST_LINES:])
            raise BucketUnavailable(doing, seen=said, do="Check the endpoint and the engine environment; run again.")
        found: list[str] = json.loads(done.stdout.splitlines()[-1])
        return found
