"""The command line. Every command takes --json and then prints one JSON document on stdout, nothing else.

Exit codes: 0 done; 1 failed or inconclusive; 2 findings or a bad argument; 130 interrupted.
"""

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.exceptions import TyperException

from pipelines.printing import print_capacity, print_explanation, print_plan, print_proof, print_retention, print_table
from warmers.errors import ConfigError, RequestError, WarmfrontError

if TYPE_CHECKING:
    from resources.settings import ModelSettings
    from resources.workspace import Workspace

app = typer.Typer(
    name="warmfront",
    help="Keeps a vLLM fleet's shared prompt prefixes warm in L2, and proves it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
FleetName = Annotated[str | None, typer.Option("--fleet", help="A fleet of warmfront.yaml; the only one by default.")]


INTERRUPTED = 130


class Depth(StrEnum):
    """How much a verification reads."""

    sizes = "sizes"
    sampled = "sampled"
    full = "full"


class Store(StrEnum):
    """Adapters whose key form is known."""

    valkey = "valkey"
    fs = "fs"
    s3 = "s3"


def main() -> None:
    """Entry point: errors become messages and exit codes."""
    as_json = "--json" in sys.argv
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # typer has taken the interrupt
            raise KeyboardInterrupt
        raise SystemExit(code)
    except TyperException as error:  # a bad argument
        _fail(error.format_message(), 2, as_json)
    except (ConfigError, RequestError) as error:
        _fail(str(error), 2, as_json)
    except WarmfrontError as error:
        _fail(str(error), 1, as_json)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted; what was finished is recorded", INTERRUPTED, as_json)


@app.command()
def keys(
    file: Annotated[str, typer.Argument(help="JSON list of token ids; - for standard input.")],
    model: Annotated[str, typer.Option(help="The --model string as the engine got it.")],
    chunk_tokens: Annotated[int, typer.Option(min=1)] = 256,
    world_size: Annotated[int, typer.Option(min=1, max=255, help="Tensor parallel size.")] = 1,
    salt: Annotated[str, typer.Option(help="cache_salt of the requests.")] = "",
    store: Annotated[Store, typer.Option(help="Whose key form.")] = Store.valkey,
    prefix: Annotated[str, typer.Option(help="key_prefix of the valkey adapter; a directory for fs.")] = "",
    as_json: Json = False,
) -> None:
    """Print the L2 keys of a prompt's full chunks, in order, all ranks, one a line."""
    from warmers.keys import KeyLayout, chunk_keys

    ids = _read_ids(file, as_json)
    try:
        layout = KeyLayout(model, chunk_tokens, world_size, store.value, prefix)
        names = list(chunk_keys(ids, layout, salt))
    except ValueError as error:
        _fail(str(error), 2, as_json)
    if as_json:
        _print({"keys": names, "tail_tokens": len(ids) % chunk_tokens})
    else:
        sys.stdout.writelines(f"{name}\n" for name in names)


@app.command()
def plan(fleet: FleetName = None, as_json: Json = False) -> None:
    """Show what warming would do: what is in L2, what would be prefilled. Changes nothing."""
    from resources.documents import plan_summary

    workspace = _workspace()
    settings = workspace.fleet(fleet)
    replica = workspace.running(settings)
    from resources.engine import NoEngine

    engine = replica.engine if replica else NoEngine(settings.name)
    found = workspace.find_prefixes(settings, workspace.templates(settings), engine)
    warm_plan = workspace.plan(settings, found)
    if as_json:
        problems = {
            "too_short": [{"label": p.label, "short_by": p.short_by} for p in found.too_short],
            "failed": [asdict(f) for f in found.failed],
            "unstable": [{"label": p.label, "varies": [str(v) for v in p.unstable]} for p in found.found if p.unstable],
        }
        _print(plan_summary(warm_plan) | problems)
    else:
        print_plan(warm_plan, found)


@app.command()
def why(
    request: Annotated[str, typer.Argument(help="JSON body of a chat or completion request; - for standard input.")],
    fleet: FleetName = None,
    as_json: Json = False,
) -> None:
    """Say why a captured request does not hit: where it leaves the warmed prefix, which chunks L2 has, what to do."""
    from resources.requests import read_request
    from warmers.why import explain

    workspace, body = _workspace(), read_request(request)
    settings = workspace.fleet(fleet)
    replica = workspace.running(settings)
    found = workspace.prefixes(settings)
    explanation = explain(
        body.captured(replica.engine if replica else None),
        found.found if found else (),
        workspace.templates(settings).by_label(),
        settings,
        workspace.store(settings.name),
        workspace.state.journal(settings.namespace).rows(),
        workspace.clock.now(),
        (replica.engine.identity(), replica.daemon_identity()) if replica else None,
    )
    if as_json:
        _print(asdict(explanation))
    else:
        print_explanation(explanation)
    if explanation.findings:
        raise typer.Exit(2)


@app.command()
def stage(
    fleet: FleetName = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Send nothing: compare the stage with its manifest. The next run sends what is damaged."
        ),
    ] = False,
    depth: Annotated[Depth | None, typer.Option(help="How much that reads; by default what model.verify says.")] = None,
    as_json: Json = False,
) -> None:
    """Copy a fleet's model into S3, where engines stream it from; send only what is not there."""
    from pipelines.runs import run_job

    workspace = _workspace()
    settings = workspace.fleet_settings(fleet)
    if verify:
        _verify(workspace, settings.model, depth or Depth(settings.model.verify), as_json)
        return
    workspace.source(settings.name)  # raises ConfigError before anything is started
    finished = run_job("stage_weights", settings.name, workspace)
    current = workspace.stages().current(settings.model.name) if finished.success else None
    if as_json:
        _print({"run_id": finished.run_id, "reasons": finished.reasons, "stage": current})
    else:
        for reason in finished.reasons:
            _say(reason)
        _say(f"{settings.name}: staged {current['digest'][:16]}" if current else f"{settings.name}: not staged")
    if not finished.success:
        raise typer.Exit(1)


@app.command()
def retain(
    fleet: FleetName = None,
    apply: Annotated[bool, typer.Option("--apply", help="Remove them; without it nothing changes.")] = False,
    as_json: Json = False,
) -> None:
    """Show what nobody needs any more of a fleet's chunks, namespaces and stages of weights, and why the rest stays."""
    from pipelines.retaining import decide

    workspace = _workspace()
    name = workspace.fleet_settings(fleet).name
    decided, left, reasons = decide(workspace, name), None, tuple[str, ...]()
    if apply:
        from pipelines.runs import run_job

        config = {"apply": True}
        reasons = run_job("retain", name, workspace, {"weights_retention": config, "l2_retention": config}).reasons
        left = decide(workspace, name)
    if as_json:
        _print(decided.document(left) | {"reasons": reasons})
    else:
        for reason in reasons:
            _say(reason)
        print_retention(decided.document(left), applied=apply)
    if reasons:
        raise typer.Exit(1)


@app.command()
def warm(fleet: FleetName = None, as_json: Json = False) -> None:
    """Warm a fleet and prove it: render, plan, prefill what is missing, ask a cold replica."""
    _run("warm", fleet, as_json)


@app.command()
def prove(fleet: FleetName = None, as_json: Json = False) -> None:
    """Take the proof again: a cold replica has to hit what is warm now, and answer the same."""
    _run("prove", fleet, as_json)


@app.command()
def prefetch(
    labels: Annotated[list[str] | None, typer.Argument(help="Prefixes; by default all that were found.")] = None,
    fleet: FleetName = None,
    daemon: Annotated[
        str | None,
        typer.Option(help="HTTP address of the replica's LMCache daemon; by default the one that runs here."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Load warmed prefixes from L2 into a replica's L1, the heaviest first. Exit code 1 unless all are in it then."""
    from pipelines.prefetching import prefetch_into

    workspace = _workspace()
    done = prefetch_into(workspace, workspace.fleet(fleet), daemon, labels or (), _say)
    if as_json:
        _print(asdict(done))
    else:
        for label in done.left_out:
            _say(f"{label}: L1 has no room for it")
        print_table(["prefix", "in L1", "keys"], [[one.label, str(one.in_l1), str(one.keys)] for one in done.loaded])
    if not done.whole:
        raise typer.Exit(1)


@app.command()
def salts(fleet: FleetName = None, as_json: Json = False) -> None:
    """Print the salts of a fleet's LoRA adapters, for the file that its engines' middleware reads (WARMFRONT_SALTS)."""
    served = _workspace().fleet(fleet)
    if as_json:
        _print({"digest": served.salt_table_digest, "table": json.loads(served.salt_table)})
    else:
        sys.stdout.write(served.salt_table.decode())


@app.command()
def windows(
    fleet: FleetName = None,
    offerings: Annotated[
        bool, typer.Option("--offerings", help="Also what could be bought, with the command.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a fleet's reserved capacity, and when a roll-out may begin. Buys nothing. Exit code 2: never, as it is."""
    workspace = _workspace()
    name = workspace.fleet_settings(fleet).name
    capacity = workspace.capacity(name, offerings=offerings)
    if capacity is None:
        do = "Give it capacity.region and capacity.instance_types."
        raise ConfigError(f"looking at the capacity of fleet {name!r}", seen="it names none", do=do)
    if as_json:
        _print(capacity.document())
    else:
        print_capacity(capacity.document())
    if capacity.admission is None:
        raise typer.Exit(2)


@app.command()
def up(fleet: FleetName = None, as_json: Json = False) -> None:
    """Start the embedded stack: Valkey, an S3 server, an LMCache daemon and one vLLM engine."""
    workspace = _workspace()
    settings = workspace.fleet(fleet)
    with workspace.replicas(settings.name).warmer(settings):
        pass
    _show_status(workspace, as_json)


@app.command()
def down(as_json: Json = False) -> None:
    """Stop the embedded stack with everything that belongs to it. Valkey's and S3's data stay."""
    stopped = _workspace().stack.down()
    if as_json:
        _print({"stopped": stopped})
    else:
        _say(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")


@app.command()
def status(as_json: Json = False) -> None:
    """Show the embedded stack's processes. Exit code 1 unless all of them run."""
    if not _show_status(_workspace(), as_json):
        raise typer.Exit(1)


def _run(job: str, fleet: str | None, as_json: bool) -> None:
    """Run a job; the exit code is the verdict in the state store."""
    from pipelines.runs import run_job

    workspace = _workspace()
    name = workspace.fleet(fleet).name
    started = workspace.clock.now()
    finished = run_job(job, name, workspace)
    proof = workspace.state.document(name, "proof")
    current = proof is not None and proof["at"] >= started
    verdict = proof["verdict"] if proof is not None and current else "failed"
    if as_json:
        result = {"run_id": finished.run_id, "verdict": verdict, "reasons": finished.reasons}
        warmed = workspace.state.document(name, "warm") if job == "warm" else None
        _print(result | {"warm": warmed, "proof": proof if current else None})
    else:
        for reason in finished.reasons:
            _say(reason)
        if proof is not None and current:
            print_proof(proof)
        _say(f"{name}: {verdict}")
    if verdict != "proven" or not finished.success:
        raise typer.Exit(1)


def _verify(workspace: "Workspace", model: "ModelSettings", depth: "Depth", as_json: bool) -> None:
    """Print what a verification of the current stage finds; exit code 2 where that is anything."""
    from warmers.verification import verify

    stages = workspace.open_stages()
    manifest = stages.current_manifest(model.name)
    verified = verify(manifest, stages, depth.value, samples=model.samples)
    stages.distrust(model.name, manifest.digest, verified.damaged)
    if as_json:
        _print({"digest": manifest.digest, "findings": verified.findings, "read_bytes": verified.read_bytes})
    else:
        for finding in verified.findings:
            _say(finding)
        said = f"{len(verified.findings)} findings, {verified.read_bytes:,} bytes read"
        _say(f"{model.name} {manifest.digest[:16]}: {said}")
    if verified.findings:
        raise typer.Exit(2)


def _show_status(workspace: "Workspace", as_json: bool) -> bool:
    found = workspace.stack.status()
    if as_json:
        _print({"processes": [asdict(s) | {"log": str(s.log)} for s in found]})
    else:
        rows = [[s.name, s.state, s.url or "", str(s.pid or ""), str(s.log)] for s in found]
        print_table(["process", "state", "address", "pid", "log"], rows)
    return all(s.state == "running" for s in found)


def _workspace() -> "Workspace":
    from resources.workspace import Workspace

    return Workspace.from_environment(_say)


def _read_ids(file: str, as_json: bool) -> Any:
    import numpy as np

    try:
        ids = json.loads(sys.stdin.read() if file == "-" else Path(file).read_text())
    except (OSError, ValueError) as error:
        _fail(f"reading token ids from {file}: {error}. Give a JSON list of numbers.", 2, as_json)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**32 for i in ids):
        _fail(f"reading token ids from {file}: it is no JSON list of token ids. Give numbers from 0 on.", 2, as_json)
    return np.array(ids, np.uint32)


def _print(document: Any) -> None:
    print(json.dumps(document))


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _fail(message: str, code: int, as_json: bool) -> NoReturn:
    _say(f"warmfront: {message}")
    if as_json:
        _print({"error": message, "exit_code": code})
    raise SystemExit(code)


if __name__ == "__main__":
    main()
