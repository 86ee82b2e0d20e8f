"""Warm the prompts of the embedded fleet on real engines, prove it, print the result, stop what was started.

The result is also written to `demo.json` in the state directory.
"""

import json
import sys
from typing import Any

from pipelines.printing import print_proof, print_table, size
from pipelines.runs import run_job
from resources.local_stack import STOP_ORDER
from resources.state import StateStore
from resources.workspace import Workspace
from warmers.errors import ConfigError, WarmfrontError


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> int:
    workspace = Workspace.from_environment(say)
    settings = workspace.fleet_settings()
    result_file = workspace.local_directory / "demo.json"
    result_file.unlink(missing_ok=True)
    processes = workspace.stack.processes
    ran_before = any(processes.running(name) for name in STOP_ORDER)  # what `make config` starts is no part of it
    try:
        if settings.model.source is not None and not staged(workspace, settings.name):
            return 1
        fleet = workspace.fleet()
        with workspace.replicas(fleet.name).warmer(fleet):
            say("the stack is up: rendering, planning, warming")
        started = workspace.clock.now()
        finished = run_job("warm", fleet.name, workspace)
        for reason in finished.reasons:
            say(reason)
        result = collect(workspace.state, fleet.name, started)
    finally:
        if not ran_before:
            say("stopping the stack; its state stays")
            workspace.stack.down()
    if result is None:
        say("the run ended before there was a proof")
        return 1
    result_file.write_text(json.dumps(result, indent=2) + "\n")
    show(result)
    fast = result["proof"]["speedup"] >= fleet.floors.ttft_speedup
    if not fast:
        say(f"warm TTFT is less than {fleet.floors.ttft_speedup:g} times shorter than cold TTFT")
    return 0 if finished.success and result["verdict"] == "proven" and fast else 1


def staged(workspace: Workspace, fleet: str) -> bool:
    """Stage the fleet's weights; whether that succeeded."""
    finished = run_job("stage_weights", fleet, workspace)
    for reason in finished.reasons:
        say(reason)
    return finished.success


def collect(state: StateStore, fleet: str, started: float) -> dict[str, Any] | None:
    """What the run left in the state store; None if it did not come to a proof."""
    warm, proof, found = state.document(fleet, "warm"), state.document(fleet, "proof"), state.prefixes(fleet)
    if warm is None or proof is None or found is None or proof["at"] < started:
        return None
    left_out = [{"label": p.label, "why": f"{p.short_by} tokens short of a chunk"} for p in found.too_short]
    left_out += [{"label": f.template, "why": f.reason} for f in found.failed]
    return {
        "verdict": proof["verdict"],
        "computed_tokens": warm["computed_tokens"],
        "expected_hit_tokens": proof["expected_tokens"],
        "hit_tokens": proof["hit_tokens"],
        "ttft_cold_s": proof["ttft_cold_s"],
        "ttft_warm_s": proof["ttft_warm_s"],
        "output_unchanged": proof["output_unchanged"],
        "prefixes": [
            {
                "label": row["label"],
                "tokens": row["tokens"],
                "chunks": row["chunks"],
                "already_there": row["present"],
                "warmed": row["missing"],
                "bytes": row["bytes"],
            }
            for row in warm["plan"]["prefixes"]
        ],
        "left_out": left_out,
        "proof": proof,
    }


def show(result: dict[str, Any]) -> None:
    rows = [
        [p["label"], f"{p['tokens']:,}", str(p["chunks"]), str(p["already_there"]), str(p["warmed"]), size(p["bytes"])]
        for p in result["prefixes"]
    ]
    print_table(["prefix", "tokens", "chunks", "already there", "warmed", "bytes"], rows)
    for p in result["left_out"]:
        print(f"{p['label']}: {p['why']}")
    print(f"{result['computed_tokens']:,} tokens computed while warming\n")
    print_proof(result["proof"])
    print(f"verdict: {result['verdict']}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WarmfrontError as error:
        say(f"warmfront: {error}")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
