"""The program beside a serving engine: keeps a gate, and answers readiness probes and Prometheus.

    warmfront-gate --hot-set s3://bucket/state/namespaces/<namespace>/hot_set.json --engine http://127.0.0.1:8000
                   --daemon http://127.0.0.1:8080 --l0-tokens 32768 [--opens-cold-after 600]

    GET /ready     200 when open, else 503; the status as JSON either way
    GET /metrics   for Prometheus
    GET /healthz   200: the program runs

Imports no Dagster, and needs no settings file: all that loading takes is in the hot set.
"""

import argparse
import json
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from warmers.gate import POLL_S, Gate, GateLimits, GateStatus

METRICS = {
    "open": ("gauge", "1 while the replica may take traffic"),
    "warm": ("gauge", "1 while the hot set is loaded"),
    "cold": ("gauge", "1 while it is open and has not been warm"),
    "cold_opens_total": ("counter", "times that it opened cold, after its deadline"),
    "loaded_tokens": ("gauge", "tokens of the hot set that are in L1"),
    "replayed_tokens": ("gauge", "tokens that were replayed into L0"),
    "computed_tokens_total": ("counter", "tokens that replays had to compute, since nothing was loaded for them"),
    "left_out_prefixes": ("gauge", "prefixes of the hot set that L1 has no room for"),
    "seconds_to_warm": ("gauge", "from its start until it was warm for the first time"),
}


def metrics(status: GateStatus) -> str:
    """The page for Prometheus; what is not known yet is not on it."""
    values: dict[str, float | None] = {
        "open": status.open,
        "warm": status.state == "warm",
        "cold": status.cold,
        "cold_opens_total": status.cold_opens,
        "loaded_tokens": status.loaded_tokens,
        "replayed_tokens": status.replayed_tokens,
        "computed_tokens_total": status.computed_tokens,
        "left_out_prefixes": status.left_out,
        "seconds_to_warm": status.seconds_to_warm,
    }
    lines = [
        line
        for name, value in values.items()
        if value is not None
        for kind, says in [METRICS[name]]
        for line in (
            f"# HELP warmfront_gate_{name} {says}",
            f"# TYPE warmfront_gate_{name} {kind}",
            f"warmfront_gate_{name} {float(value):g}",
        )
    ]
    return "\n".join(lines) + "\n"


def serve(host: str, port: int, status: Callable[[], GateStatus]) -> ThreadingHTTPServer:
    """Answer probes in the background; closed by whoever called."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            now = status()
            if self.path == "/ready":
                self._answer(200 if now.open else 503, "application/json", _document(now))
            elif self.path == "/metrics":
                self._answer(200, "text/plain; version=0.0.4", metrics(now))
            elif self.path == "/healthz":
                self._answer(200, "text/plain", "ok\n")
            else:
                self._answer(404, "text/plain", "there are /ready, /metrics and /healthz\n")

        def _answer(self, code: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass  # a probe each second

    server = ThreadingHTTPServer((host, port), Handler)
    threading.Thread(target=server.serve_forever, name="probes", daemon=True).start()
    return server


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="warmfront-gate", description="Keeps a replica out of traffic until it is warm."
    )
    parser.add_argument("--hot-set", required=True, help="path or s3:// URI of the namespace's hot set")
    parser.add_argument("--engine", required=True, help="address of the vLLM server beside it")
    parser.add_argument("--daemon", required=True, help="HTTP address of the LMCache daemon beside it")
    parser.add_argument("--model", required=True, help="--served-model-name of the engine")
    parser.add_argument("--host", default="0.0.0.0", help="to answer probes on")  # noqa: S104 - the kubelet's probes
    parser.add_argument("--port", type=int, default=8081)
    parser.add_argument("--l0-tokens", type=int, default=32_768, help="of the hottest prefixes to replay into L0")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one load or replay")
    parser.add_argument(
        "--opens-cold-after", type=float, help="seconds after which it opens cold; by default it never does"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Run until SIGTERM."""
    from resources.engine import VllmEngine
    from resources.hot_sets import HotSetFile
    from resources.lmcache import LmcacheDaemon
    from resources.system_clock import SystemClock

    given, stop = parse(sys.argv[1:]), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    engine = VllmEngine(given.engine, given.model, given.timeout)
    limits = GateLimits(given.l0_tokens, given.timeout, given.opens_cold_after)
    gate = Gate(engine, LmcacheDaemon(given.daemon), HotSetFile(given.hot_set), SystemClock(), limits, _tell)
    server = serve(given.host, given.port, lambda: gate.status)
    while not stop.wait(POLL_S):
        try:
            gate.step()
        except Exception as error:  # whatever it is, it does not take an open replica out of traffic
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
    server.shutdown()


def _document(status: GateStatus) -> str:
    return json.dumps(asdict(status) | {"cold": status.cold})


def _tell(status: GateStatus) -> None:
    sys.stderr.write(_document(status) + "\n")


if __name__ == "__main__":
    main()
