"""An HTTP service to ask: retries, and errors that say what was attempted. What it serves is not known here."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from warmers.errors import EngineLost, EngineRefused, EngineUnavailable

if TYPE_CHECKING:
    import httpx

TRIES = 3
RETRY_AFTER_S = (0.2, 1.0)
CONNECT_TIMEOUT_S = 5.0
ASK_TO_WAIT = (408, 425, 429, 503)


@dataclass(frozen=True)
class HttpService:
    """One HTTP service with errors that say what was attempted; every call here may be repeated."""

    url: str
    what: str
    timeout_s: float = 30.0

    @cached_property
    def client(self) -> "httpx.Client":
        import httpx

        return httpx.Client(
            base_url=self.url, timeout=httpx.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S), trust_env=False
        )

    def close(self) -> None:
        """Close its connections; it may be used again."""
        client = self.__dict__.pop("client", None)
        if client is not None:
            client.close()

    def json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The decoded answer. Retries what did not reach it. Raises EngineRefused, EngineUnavailable, EngineLost."""
        return self.call(method, path, body).json()

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> "httpx.Response":
        """The answer to one request, if it is a success."""
        import httpx

        for attempt in range(TRIES):
            try:
                answer = self.client.request(method, path, json=body)
            except httpx.ConnectError as error:
                if attempt + 1 < TRIES:
                    time.sleep(RETRY_AFTER_S[attempt])
                    continue
                raise self.lost(method, path, error) from error
            except httpx.HTTPError as error:
                raise self.lost(method, path, error) from error
            if answer.status_code in ASK_TO_WAIT and attempt + 1 < TRIES:
                time.sleep(RETRY_AFTER_S[attempt])
                continue
            break
        self.require_success(answer, method, path)
        return answer

    def require_success(self, answer: "httpx.Response", method: str, path: str) -> None:
        """Raise unless the status is 2xx: 4xx are permanent, but for those that only ask to wait."""
        if answer.is_success:
            return
        attempted = f"{method} {self.url}{path} of {self.what}"
        seen = f"HTTP {answer.status_code}: {_message(answer)}"
        if answer.status_code >= 500 or answer.status_code in ASK_TO_WAIT:
            raise EngineUnavailable(attempted, seen=seen, do="Look at its log; try again.")
        raise EngineRefused(attempted, seen=seen, do="The request is at fault: a retry would see the same.")

    def lost(self, method: str, path: str, error: Exception) -> EngineLost:
        """The error for a service that cannot be reached or does not answer."""
        seen = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        do = f"Check that it runs and answers (waited {self.timeout_s:g} s); for the local stack: warmfront status."
        return EngineLost(f"{method} {self.url}{path} of {self.what}", seen=seen, do=do)


def _message(answer: "httpx.Response") -> str:
    try:
        body = answer.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    except ValueError:
        return answer.text[:500]
