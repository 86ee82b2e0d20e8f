"""The life of chunks in a real Valkey, by the jobs, the schedule and the command line; a fake engine."""

import datetime
import json

import dagster as dg
import pytest
from days import Days
from fakes import FakedWorkspace, MovableClock
from typer.testing import CliRunner

from pipelines import cli
from pipelines.definitions import build_defs
from warmers.keys import KeyLayout

APPLY = {"l2_retention": {"config": {"apply": True}}, "weights_retention": {"config": {"apply": True}}}
HOUR_S = 3600
WEEK_S = 7 * 86_400


def opened(path, clock=None):
    """As another process reads the file."""
    workspace = FakedWorkspace(path, on_event=lambda _: None)
    workspace.__dict__["clock"] = clock or MovableClock()
    return workspace


@pytest.fixture
def workspace(workspace_file):
    workspace = opened(workspace_file)
    yield workspace
    assert not workspace.stack.down(), "a fleet with L2 and model of its own started something embedded"


def edit(workspace, **l2):
    settings = json.loads(workspace.path.read_text())
    settings["fleets"][0]["l2"] |= l2
    workspace.path.write_text(json.dumps(settings))
    return opened(workspace.path, workspace.clock)


def ran(workspace, job, ops=None):
    with dg.DagsterInstance.ephemeral() as instance:
        result = (
            build_defs(workspace)
            .resolve_job_def(job)
            .execute_in_process(partition_key="chat", instance=instance, run_config={"ops": ops or {}})
        )
    assert result.success
    return result


def metadata(result, asset):
    (event,) = result.asset_materializations_for_node(asset)
    return {key: value.value for key, value in event.metadata.items()}


def drifted(result):
    return next(c for c in result.get_asset_check_evaluations() if c.check_name == "hit_rate_drifted")


def needed(workspace):
    """Keys of all that the current templates need."""
    fleet = workspace.fleet("chat")
    layout = KeyLayout.of(fleet)
    return sorted(layout.name(digest.hex(), 0, salt) for salt, digest in workspace.holdings(fleet).needed())


def keys_in(workspace, namespace):
    return sorted(key.decode() for key in workspace.store("chat").client.scan_iter(f"{namespace}@*"))


def test_what_is_lost_is_seen_said_and_brought_back_alone(workspace):
    ran(workspace, "warm")
    seen = ran(workspace, "take_stock")
    stock = metadata(seen, "l2_inventory")
    assert (stock["hit_rate"], stock["missing"], stock["wrong_size"]) == (1.0, 0, 0)
    assert stock["present"] == stock["chunks"] == stock["needed"] > 3
    assert drifted(seen).passed
    client, keys = workspace.store("chat").client, needed(workspace)
    client.delete(keys[0])
    client.set(keys[1], b"half", keepttl=True)
    again = ran(workspace, "take_stock")
    stock = metadata(again, "l2_inventory")
    assert (stock["missing"], stock["wrong_size"]) == (1, 1)
    assert stock["hit_rate"] < 1.0
    assert not drifted(again).passed
    assert "warmed tokens are left" in drifted(again).description
    done = metadata(ran(workspace, "warm"), "warm_chunks")
    assert done["chunks_warmed"] == 2
    assert metadata(ran(workspace, "take_stock"), "l2_inventory")["hit_rate"] == 1.0


def test_a_drift_that_the_schedule_saw_asks_for_a_warm_once(workspace):
    with dg.DagsterInstance.ephemeral() as instance:
        days = Days(workspace, instance)
        assert days.tick() == ["chat"]
        assert days.tick() == []
        workspace.store("chat").client.delete(needed(workspace)[0])
        workspace.clock.ahead += 60
        ran(workspace, "take_stock")
        assert days.tick() == ["chat"]
        assert days.requests[0].tags["warmfront/because"] == "L2 has lost warmed chunks"
        assert workspace.store("chat").sizes(needed(workspace)).min() > 0
        assert days.tick() == []


def test_only_what_a_plan_needs_is_extended_before_half_of_its_life(workspace):
    ran(workspace, "warm")
    store, keys = workspace.store("chat"), needed(workspace)
    users = f"{keys[0].rpartition('@')[0]}@{'0' * 64}"
    store.client.set(users, b"somebody's own", ex=HOUR_S)
    for key in keys[:3]:
        store.client.expire(key, HOUR_S)
    result = metadata(ran(workspace, "take_stock"), "l2_retention")
    assert (result["extended"], result["removed"], result["would_remove"]) == (3, 0, 0)
    assert (store.lives(keys) > WEEK_S / 2).all()
    assert len(set(store.lives(keys[:3]).round().tolist())) > 1  # they do not lapse together
    assert store.lives([users])[0] <= HOUR_S


def test_what_no_plan_needs_is_removed_after_its_grace_and_only_when_asked(workspace):
    ran(workspace, "warm")
    before = needed(workspace)
    (workspace.path.parent / "prompts" / "sales.md").unlink()
    ran(workspace, "warm")
    left, store = needed(workspace), workspace.store("chat")
    gone = sorted(set(before) - set(left))
    assert len(gone) > 1
    assert metadata(ran(workspace, "retain", APPLY), "l2_retention")["removed"] == 0  # in its grace
    workspace.clock.ahead += 4 * 86_400
    shown = metadata(ran(workspace, "retain"), "l2_retention")
    assert (shown["removed"], shown["would_remove"]) == (0, len(gone))
    assert [row.data["template"] for row in shown["templates"].records] == ["sales"]
    assert store.sizes(before).min() > 0
    assert metadata(ran(workspace, "retain", APPLY), "l2_retention")["removed"] == len(gone)
    assert (store.sizes(gone) == -1).all()
    assert store.sizes(left).min() > 0
    assert metadata(ran(workspace, "warm"), "warm_chunks")["computed_tokens"] == 0


def test_a_superseded_namespace_goes_whole_and_no_other(workspace):
    ran(workspace, "warm")
    old = workspace.fleet("chat").namespace
    workspace.store("chat").client.set(f"{old}@users@own", b"x")
    (workspace.path.parent / "model" / "model.safetensors").write_bytes(b"other weights")
    here = opened(workspace.path, workspace.clock)
    new = here.fleet("chat").namespace
    ran(here, "warm")
    assert new != old
    ran(here, "retain", APPLY)  # the grace begins
    here.clock.ahead += 4 * 86_400
    kept = keys_in(here, new)
    rows = {
        r.data["namespace"]: r.data["what"] for r in metadata(ran(here, "retain"), "l2_retention")["namespaces"].records
    }
    assert rows == {old: "would be removed", new: "stays"}
    assert keys_in(here, old)
    ran(here, "retain", APPLY)
    assert (keys_in(here, old), keys_in(here, new)) == ([], kept)
    assert [d.record.name for d in here.holdings(here.fleet("chat")).namespaces()] == [new]


def test_over_its_budget_a_fleet_warms_what_weighs_most(workspace):
    fleet = workspace.fleet("chat")
    small = edit(workspace, budget_bytes=3 * fleet.chunk_bytes)
    done = metadata(ran(small, "warm"), "warm_chunks")
    assert 0 < done["chunks_warmed"] <= 3


def test_the_command_line_shows_and_then_removes(workspace, monkeypatch):
    monkeypatch.setenv("WARMFRONT_CONFIG", str(workspace.path))
    monkeypatch.setenv("DAGSTER_HOME", str(workspace.path.parent / "dagster"))
    workspace.clock.ahead = 0.0  # as the command line's
    ran(workspace, "warm")
    (workspace.path.parent / "prompts" / "sales.md").unlink()
    here = edit(workspace, grace_s=0)
    ran(here, "warm")
    left = needed(here)
    monkeypatch.setattr("resources.workspace.Workspace", FakedWorkspace)

    def retain(*more):
        answer = CliRunner().invoke(cli.app, ["retain", *more])
        assert answer.exit_code == 0, answer.output
        return answer.stdout

    assert "to be removed of template" in retain()
    shown = json.loads(retain("--json"))
    assert shown["chunks"]["removed"] == 0
    assert shown["chunks"]["by_template"][0]["template"] == "sales"
    assert shown["namespaces"] == [
        {"name": here.fleet("chat").namespace, "remove": False, "why": "the fleet is warmed in it", "removed": False}
    ]
    done = json.loads(retain("--apply", "--json"))
    assert done["reasons"] == []
    assert done["chunks"]["removed"] == done["chunks"]["remove"] == shown["chunks"]["remove"] > 0
    assert json.loads(retain("--json"))["chunks"]["remove"] == 0
    assert here.store("chat").sizes(left).min() > 0


def test_the_schedule_looks_where_something_was_warmed_and_l2_is_there(workspace):
    def asked(here):
        at = datetime.datetime(2026, 12, 1, 9, 20, tzinfo=datetime.UTC)
        defs = build_defs(here)
        repository = defs.get_repository_def()
        context = dg.build_schedule_context(
            scheduled_execution_time=at, resources={"workspace": here}, repository_def=repository
        )
        tick = defs.resolve_schedule_def("hourly_stock").evaluate_tick(context)
        return [request.partition_key for request in tick.run_requests]

    assert asked(workspace) == []
    ran(workspace, "warm")
    assert asked(workspace) == ["chat"]
    assert asked(edit(workspace, url=None)) == []  # the embedded one, which does not run
