"""Many ticks on an ephemeral instance: what people do to template files, and which runs come of it.

Real sensors, jobs, Valkey, state and S3 API; a fake engine at the Protocol seam, and a clock that the test moves.
"""

import json
import os
from pathlib import Path
from uuid import uuid4

import dagster as dg
import pytest
from days import Days
from fakes import FakedWorkspace, MovableClock

from assets.tags import FLEET_TAG, PROCESS_TAG, process_of
from pipelines import sensors
from pipelines.definitions import build_defs
from pipelines.look import CURSOR_VERSION, MAX_REPEATS, PATIENCE
from pipelines.runs import PAUSES_S, instance_directory, open_instance
from resources.local_objects import LocalObjects
from resources.proc import identity_of
from warmers.errors import EngineUnavailable, StateUnavailable

CHAT = "You help customers. " * 5
SQL = {"messages": [{"role": "system", "content": "You write queries. " * 4}], "adapter": "sql"}


@pytest.fixture
def workspace(workspace_file):
    """Fleets `chat` and `other`, each with a folder of its own."""
    settings = json.loads(workspace_file.read_text())
    (chat,) = settings["fleets"]
    settings["fleets"] = [chat, {**chat, "name": "other", "prompts": {"directory": "other"}}]
    workspace_file.write_text(json.dumps(settings))
    other = workspace_file.parent / "other"
    other.mkdir()
    (other / "only.md").write_text("Somebody else's prompt. " * 4)
    workspace = FakedWorkspace(workspace_file, on_event=lambda _: None)
    workspace.__dict__["clock"] = MovableClock()
    return workspace


@pytest.fixture
def days(workspace):
    with dg.DagsterInstance.ephemeral() as instance:
        yield Days(workspace, instance)


@pytest.fixture
def prompts(workspace_file):
    return workspace_file.parent / "prompts"


@pytest.fixture
def settled(days):
    """After the first runs of both fleets."""
    assert days.tick() == ["chat", "other"]
    assert days.tick() == []
    return days


def computed(result):
    (event,) = result.asset_materializations_for_node("warm_chunks")
    return event.metadata["computed_tokens"].value


def labels(workspace, fleet="chat"):
    return sorted(prefix.label for prefix in workspace.state.prefixes(fleet).found)


def test_the_first_look_warms_every_fleet_and_unchanged_ones_ask_for_nothing(settled, workspace):
    assert all(run.success for run in settled.finished)
    assert {workspace.state.document(f, "proof")["verdict"] for f in ("chat", "other")} == {"proven"}
    assert settled.tick() == []
    assert settled.said == "no template changed"
    assert settled.tick("clock_turned") == []


def test_a_burst_of_edits_is_one_run_of_its_fleet(settled, prompts, workspace):
    (prompts / "support.md").write_text(CHAT + "Be brief in all that you say.")
    (prompts / "short.md").unlink()
    for number in range(20):
        (prompts / f"new_{number:02}.md").write_text(f"Assistant number {number:02} is here to help. " * 3)
    assert settled.tick() == ["chat"]
    because = settled.requests[0].tags["warmfront/because"]
    assert "changed: support" in because
    assert "deleted: short" in because
    assert "new: new_00" in because
    assert "and 10 more" in because
    assert settled.tick() == []
    assert "short" not in labels(workspace)
    assert workspace.state.document("chat", "proof")["verdict"] == "proven"


def test_a_change_that_is_taken_back_is_warmed_each_time(settled, prompts, workspace):
    before = (prompts / "support.md").read_text()
    keys = set()
    for text in (before + "Version B stands here.", before):
        (prompts / "support.md").write_text(text)
        assert settled.tick() == ["chat"]
        keys.add(settled.requests[0].run_key)
        assert settled.tick() == []
        assert workspace.state.document("chat", "proof")["verdict"] == "proven"
    assert len(keys) == 2
    assert computed(settled.finished[-1]) == 0  # A's chunks were still in L2


def test_touching_a_file_without_changing_it_asks_for_nothing(settled, prompts):
    (prompts / "support.md").touch()
    (prompts / "notes.doc").write_text("no template")
    assert settled.tick() == []


@pytest.mark.parametrize("broken", [b"\xff\xfe", b"", b"   \n", b"messages: [", b"name: x\n"])
def test_a_broken_file_is_reported_harms_no_other_and_stays_warm_as_it_was(settled, prompts, workspace, broken):
    path = prompts / "terms.yaml"
    whole = b"messages: [{role: system, content: 'You sell things to customers who want them.'}]"
    path.write_bytes(whole)
    assert settled.tick() == ["chat"]
    path.write_bytes(broken)
    assert settled.tick() == []
    assert settled.looks == ["chat"]
    assert not settled.readable("chat").passed
    assert "terms.yaml" in settled.readable("chat").description
    assert settled.readable("other") is None or settled.readable("other").passed
    (prompts / "support.md").write_text(CHAT + "Somebody goes on editing.")
    assert settled.tick() == ["chat"]
    assert settled.requests[0].tags["warmfront/because"] == "changed: support"
    assert settled.finished[-1].success
    assert "terms" in labels(workspace)
    path.write_bytes(whole)
    assert settled.tick() == []
    assert settled.readable("chat").passed


def test_a_file_that_is_being_written_is_left_to_the_next_tick(settled, prompts, workspace):
    workspace.clock.ahead = 0.0
    (prompts / "support.md").write_text(CHAT + "Half a sen")
    assert settled.tick() == []
    assert "being written" in settled.said
    (prompts / "support.md").write_text(CHAT + "Half a sentence no more.")
    workspace.clock.ahead = 10.0
    assert settled.tick() == ["chat"]
    assert settled.tick() == []


def test_a_file_that_is_always_being_written_holds_its_fleet_up_for_a_while_and_another_kind_not_at_all(
    settled, prompts, workspace
):
    workspace.clock.ahead = 0.0
    (prompts / "support.md").write_text(CHAT + "It was edited.")
    os.utime(prompts / "support.md", (1, 1))
    (prompts / "server.log").write_text("no template")
    assert settled.tick() == ["chat"]
    (prompts / "sales.md").write_text(CHAT + "It was edited too.")
    os.utime(prompts / "sales.md", (1, 1))
    for number in range(PATIENCE):
        (prompts / "restless.md").write_text(f"Number {number} is written now. " * 4)
        assert settled.tick() == []
        assert "restless.md is being written" in settled.said
    (prompts / "restless.md").write_text("And now. " * 8)
    assert settled.tick() == ["chat"]
    assert settled.requests[0].tags["warmfront/because"] == "changed: sales"
    workspace.clock.ahead = 60.0
    assert settled.tick() == []  # the run has read it
    assert "restless" in labels(workspace)


@pytest.mark.parametrize("interrupted", [False, True], ids=["engine away", "service restarted"])
def test_a_run_that_failed_for_a_reason_that_may_pass_is_asked_for_again_a_few_times(
    settled, prompts, workspace, interrupted
):
    def away(number):
        if interrupted:
            raise dg.DagsterExecutionInterruptedError
        raise EngineUnavailable("prefilling", seen="HTTP 503", do="Look at its log.")

    workspace.engine.on_prefill = away
    (prompts / "support.md").write_text(CHAT + "The engine is away for a while.")
    assert settled.tick() == ["chat"]
    for pause in PAUSES_S:
        assert settled.tick() == []
        workspace.clock.ahead += pause + 10
        assert settled.tick() == ["chat"]
        assert "may have passed" in settled.requests[0].tags["warmfront/because"]
    workspace.clock.ahead += 86400
    assert settled.tick() == []
    workspace.clock.ahead = 10.0  # runs end in real time
    (prompts / "support.md").write_text(CHAT + "Somebody edits it.")
    assert settled.tick() == ["chat"]
    assert settled.tick() == []
    workspace.clock.ahead += PAUSES_S[0] + 10
    assert settled.tick() == ["chat"]  # a run that was asked for otherwise is repeated like the first
    workspace.engine.on_prefill = lambda _: None
    settled.execute(settled.requests[0])
    assert settled.tick() == []
    workspace.engine.on_prefill = away  # another night, another outage: the count begins anew
    (prompts / "support.md").write_text(CHAT + "It is away once more.")
    assert settled.tick() == ["chat"]
    workspace.clock.ahead += PAUSES_S[0] + 10
    assert settled.tick() == ["chat"]


def test_a_run_that_read_a_version_between_is_followed_by_one_for_what_is_there(settled, prompts, workspace):
    first, path = CHAT + "This is version B of it.", prompts / "support.md"
    path.write_text(first)
    stamp = (1e9, 1e9)
    os.utime(path, stamp)
    assert settled.tick(execute=False) == ["chat"]
    waiting = settled.requests[0]
    path.write_text(CHAT + "And this is version C.")
    settled.execute(waiting)
    path.write_text(first)
    os.utime(path, stamp)
    assert settled.tick() == ["chat"]
    assert [settled.tick() for _ in range(2)] == [[], []]
    assert workspace.state.document("chat", "proof")["verdict"] == "proven"
    assert workspace.state.latest("chat", "prefixes")["templates"] == workspace.state.listing("chat").digest
    for _ in range(MAX_REPEATS + 2):  # something is wrong with how a run reads: that ends, too
        workspace.state.save_prefixes("chat", workspace.state.prefixes("chat"), {"templates": "other"})
        settled.tick(execute=False)
    assert settled.tick(execute=False) == []


def test_a_version_that_broke_before_the_run_could_read_it_is_warmed_when_it_is_back(settled, prompts, workspace):
    path, version = prompts / "support.md", CHAT + "This is version B of it."
    path.write_text(version)
    assert settled.tick(execute=False) == ["chat"]
    waiting = settled.requests[0]
    path.write_bytes(b"\xff")
    settled.execute(waiting)
    settled.tick()
    path.write_text(version)
    assert settled.tick() == ["chat"]
    found = {prefix.label: prefix for prefix in workspace.state.prefixes("chat").found}
    assert "version B" in "".join(map(chr, found["support"].rendered))
    assert settled.tick() == []


def test_what_cannot_be_read_and_is_then_deleted_is_gone(settled, prompts, workspace, monkeypatch):
    read = LocalObjects.read

    def refused(self, path):
        if path == "support.md":
            raise StateUnavailable("reading", seen="403: denied", do="")
        return read(self, path)

    monkeypatch.setattr(LocalObjects, "read", refused)
    (prompts / "support.md").write_text(CHAT + "Nobody can read this.")
    assert (settled.tick(), settled.looks) == ([], ["chat"])
    monkeypatch.undo()
    (prompts / "support.md").unlink()
    assert settled.tick() == ["chat"]
    assert "support" not in labels(workspace)
    assert settled.readable("chat").passed


def test_what_a_run_reads_is_what_the_sensor_saw_though_a_file_is_broken(settled, prompts, workspace):
    (prompts / "sales.md").write_bytes(b"\xff")
    (prompts / "support.md").write_text(CHAT + "This was edited.")
    assert settled.tick() == ["chat"]
    assert workspace.state.latest("chat", "prefixes")["templates"] == workspace.state.listing("chat").digest
    settled.cursors.clear()
    assert settled.tick() == []


def test_an_error_that_nobody_thought_of_stops_no_other_fleet(settled, prompts, workspace, monkeypatch):
    look = type(workspace).prompts

    def prompts_of(self, name):
        if name == "chat":
            raise ZeroDivisionError("of chat")
        return look(self, name)

    latest = type(workspace.state).latest
    monkeypatch.setattr(type(workspace), "prompts", prompts_of)
    (prompts.parent / "other" / "only.md").write_text("Another prompt for them. " * 4)
    assert settled.tick() == ["other"]
    monkeypatch.undo()
    (prompts / "support.md").write_text(CHAT + "Seen once that is over.")
    assert settled.tick() == ["chat"]

    def latest_of(self, fleet, kind):
        if fleet == "chat":
            raise ZeroDivisionError("of chat")
        return latest(self, fleet, kind)

    monkeypatch.setattr(type(workspace.state), "latest", latest_of)
    assert settled.tick("clock_turned") == []


def test_a_tick_whose_time_is_up_goes_on_with_the_next(settled, prompts, monkeypatch):
    monkeypatch.setattr(sensors, "BUDGET_S", 0.0)
    for path in (prompts / "support.md", prompts.parent / "other" / "only.md"):
        path.write_text(CHAT + "Both fleets were edited.")
    assert settled.tick() == ["chat"]
    (prompts / "support.md").write_text(CHAT + "And this one all the time.")
    assert settled.tick() == ["other"]
    assert settled.tick() == ["chat"]


def test_nothing_is_read_while_a_run_is_under_way(settled, prompts, workspace, monkeypatch):
    settled.instance.create_run_for_job(
        settled.definitions.resolve_job_def("warm"), tags={FLEET_TAG: "chat", "dagster/partition": "chat"}
    )
    (prompts / "support.md").write_text(CHAT + "It waits.")
    monkeypatch.setattr(type(workspace.prompts("chat")), "look", lambda *_: 1 / 0)
    assert settled.tick() == []
    assert "still waiting or under way" in settled.said


def test_every_run_says_which_process_executes_it(settled):
    runs = settled.instance.get_runs()
    assert {run.job_name for run in runs} == {"warm"}
    assert {process_of(run) for run in runs} == {identity_of(os.getpid())}
    settled.execute(dg.RunRequest(job_name="read_templates", tags={"dagster/partition": "chat"}))
    assert process_of(settled.instance.get_runs(limit=1)[0]) == identity_of(os.getpid())


def test_changes_gather_while_a_run_is_under_way(settled, prompts):
    (prompts / "support.md").write_text(CHAT + "One thing.")
    assert settled.tick(execute=False) == ["chat"]
    waiting = settled.requests[0]
    run = settled.instance.create_run_for_job(
        settled.definitions.resolve_job_def("warm"), tags={**waiting.tags, "dagster/partition": "chat"}
    )
    for text in ("Another thing.", "A third thing."):
        (prompts / "support.md").write_text(CHAT + text)
        assert settled.tick() == []
    assert "still waiting or under way" in settled.said
    settled.instance.report_run_canceled(run)
    assert settled.tick() == ["chat"]
    assert settled.tick() == []


def test_a_run_whose_process_was_killed_holds_nothing_up(settled, prompts):
    run_id = str(uuid4())
    gone = {FLEET_TAG: "chat", "dagster/partition": "chat"}
    run = settled.instance.create_run_for_job(
        settled.definitions.resolve_job_def("warm"),
        run_id=run_id,
        tags={**gone, PROCESS_TAG: f"{run_id}@{os.uname().nodename}:4194305:1"},
        status=dg.DagsterRunStatus.STARTED,
    )
    again = settled.instance.create_run_for_job(  # executed again from the UI: with its parent's tags
        settled.definitions.resolve_job_def("warm"), tags=run.tags, status=dg.DagsterRunStatus.STARTED
    )
    assert settled.tick() == []
    assert settled.instance.get_run_by_id(again.run_id).status == dg.DagsterRunStatus.STARTED
    settled.instance.report_run_canceled(again)
    (prompts / "support.md").write_text(CHAT + "After the kill.")
    assert settled.tick() == ["chat"]
    assert settled.instance.get_run_by_id(run.run_id).status == dg.DagsterRunStatus.FAILURE


def test_a_killed_look_at_the_files_is_repeated(settled, prompts, workspace):
    (prompts / "broken.yaml").write_text("messages: [")
    assert (settled.tick(execute=False), settled.looks) == ([], ["chat"])
    run_id = str(uuid4())
    settled.instance.create_run_for_job(
        settled.definitions.resolve_job_def("read_templates"),
        run_id=run_id,
        tags={**settled.requests[0].tags, PROCESS_TAG: f"{run_id}@{os.uname().nodename}:4194305:1"},
        status=dg.DagsterRunStatus.STARTED,
    )
    assert (settled.tick(), settled.looks) == ([], [])
    workspace.clock.ahead += PAUSES_S[0] + 10
    assert (settled.tick(), settled.looks) == ([], ["chat"])
    assert not settled.readable("chat").passed
    workspace.clock.ahead += 86400
    assert (settled.tick(), settled.looks) == ([], [])


def test_a_candidate_is_warmed_and_proven_beside_the_live_one_and_then_promoted(settled, prompts, workspace):
    candidate = prompts / "support.candidate.md"
    candidate.write_text(CHAT + "The next version says this as well, and more than one chunk of it.")
    assert settled.tick() == ["chat"]
    assert settled.requests[0].tags["warmfront/because"] == "new: support.candidate"
    assert {"support", "support.candidate"} <= set(labels(workspace))
    proof = workspace.state.document("chat", "proof")
    assert proof["verdict"] == "proven"
    assert "support.candidate" in {p["label"] for p in proof["prefixes"]}
    renders = workspace.engine.renders
    candidate.rename(prompts / "support.md")
    assert settled.tick() == ["chat"]
    assert settled.requests[0].tags["warmfront/because"] == "promoted: support"
    assert computed(settled.finished[-1]) == 0
    checks = 2 * len(labels(workspace)) + len(workspace.state.document("chat", "proof")["prefixes"])
    assert workspace.engine.renders - renders == checks
    assert "support.candidate" not in labels(workspace)


def test_a_source_that_is_away_is_reported_once_and_stops_no_other_fleet(settled, prompts, workspace_file):
    away = prompts.with_name("away")
    prompts.rename(away)
    (workspace_file.parent / "other" / "only.md").write_text("Another prompt for them. " * 4)
    assert settled.tick() == ["other"]
    assert not settled.readable("chat").passed
    assert "prompts.directory" in settled.readable("chat").description
    first = settled.readable("chat")
    assert settled.tick() == []
    assert settled.readable("chat") == first
    away.rename(prompts)
    assert settled.tick() == []
    assert settled.readable("chat").passed


def test_a_state_store_that_is_away_costs_a_tick_and_no_change(settled, prompts, workspace):
    (prompts / "support.md").write_text(CHAT + "Seen once the state is back.")
    state = Path(workspace.state.uri)
    away = state.rename(state.with_name("state-away"))
    state.write_text("no directory")
    assert settled.tick() == settled.tick("clock_turned") == []
    assert settled.looks == []
    state.unlink()
    away.rename(state)
    assert settled.tick() == ["chat"]


@pytest.mark.parametrize("cursor", [None, "", "{", "[]", '{"version": 99, "fleets": {}}', '{"version": 1}'])
def test_a_cursor_that_cannot_be_read_costs_no_run_and_no_later_change(settled, prompts, cursor):
    used = set(settled.run_keys)
    settled.cursors["prompt_templates_changed"] = cursor
    assert settled.tick() == []
    assert json.loads(settled.cursors["prompt_templates_changed"])["version"] == CURSOR_VERSION
    (prompts / "support.md").write_text(CHAT + "A change after the cursor was lost.")
    settled.workspace.clock.ahead += 60
    assert settled.tick() == ["chat"]
    assert not used & {request.run_key for request in settled.requests}


def test_new_weights_of_an_adapter_ask_for_its_prefixes_alone(settled, prompts, workspace, workspace_file):
    adapter = workspace_file.parent / "sql"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    (prompts / "for_sql.json").write_text(json.dumps(SQL))
    assert settled.tick() == ["chat"]
    (failed,) = workspace.state.prefixes("chat").failed
    assert "names the adapter 'sql', and the fleet's model.adapters has none" in failed.reason
    settings = json.loads(workspace_file.read_text())
    settings["fleets"][0]["model"]["adapters"] = [{"name": "sql", "directory": "sql"}]
    workspace_file.write_text(json.dumps(settings))
    for weights in (b"one", b"other"):
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        workspace.__dict__.pop("settings", None)
        workspace.engines.clear()  # as `LocalReplicas` does: another table, another engine
        assert settled.tick() == ["chat"]
        assert settled.requests[0].tags["warmfront/because"] == "weights, adapters or engine changed"
        prefix = next(p for p in workspace.state.prefixes("chat").found if p.template == "for_sql")
        assert prefix.key_salt == workspace.fleet("chat").adapters[0].salt
        assert computed(settled.finished[-1]) == prefix.full_tokens
        assert workspace.state.document("chat", "proof")["verdict"] == "proven"
        assert settled.tick() == []


def test_a_tick_that_dies_before_its_cursor_is_kept_asks_for_the_same_run_again(settled, prompts):
    kept = settled.cursors["prompt_templates_changed"]
    (prompts / "support.md").write_text(CHAT + "The daemon dies after this.")
    assert settled.tick(execute=False) == ["chat"]
    settled.cursors["prompt_templates_changed"] = kept
    assert settled.tick() == []  # its run key is known


def test_a_run_that_fails_for_good_is_asked_for_once(settled, prompts, workspace):
    workspace.engine.connector = ""
    (prompts / "support.md").write_text(CHAT + "The engine lost its connector.")
    assert settled.tick() == ["chat"]
    assert not settled.finished[-1].success
    assert [settled.tick() for _ in range(3)] == [[], [], []]


def test_what_the_command_line_warmed_is_not_warmed_again(settled, prompts):
    (prompts / "support.md").write_text(CHAT + "Warmed by hand.")
    settled.execute(dg.RunRequest(partition_key="chat", tags={}))
    assert settled.tick() == []


def test_a_clock_is_warmed_as_it_reads_now_and_again_after_it_turned(settled, prompts, workspace):
    text = (
        "You answer the readers of a newspaper. Today is {{ strftime_now('%d %B %Y') }}. " + "Quote its articles. " * 4
    )
    (prompts / "dated.yaml").write_text(json.dumps({"messages": [{"role": "system", "content": text}]}))
    assert settled.tick() == ["chat"]
    found = {prefix.label: prefix for prefix in workspace.state.prefixes("chat").found}
    assert found["dated@now"].shared > found["dated"].shared + len("Quote its articles. ") * 4
    assert workspace.state.document("chat", "proof")["verdict"] == "proven"
    turns_at = found["dated@now"].turns_at
    assert turns_at % 86400 == 0  # a midnight, UTC
    assert 0 < turns_at - workspace.clock.now() <= 86400
    assert settled.tick("clock_turned") == []

    workspace.clock.ahead += turns_at - workspace.clock.now() + 1
    assert settled.tick("clock_turned") == ["chat"]
    assert settled.finished[-1].success
    assert computed(settled.finished[-1]) > 0
    renewed = {prefix.label: prefix for prefix in workspace.state.prefixes("chat").found}
    assert renewed["dated@now"].turns_at == turns_at + 86400
    assert settled.tick("clock_turned") == []
    assert settled.tick() == []


def test_templates_in_a_bucket(settled, workspace_file, s3_uri, s3_away):
    import boto3

    bucket = s3_uri.removeprefix("s3://").partition("/")[0]
    s3 = boto3.client("s3")

    def put(key, text):
        s3.put_object(Bucket=bucket, Key=f"prompts/{key}", Body=text.encode())

    body = {
        "messages": [{"role": "user", "content": "Read {{ context }} and answer {{ question }}"}],
        "contexts": [{"name": "manual", "file": "docs/manual.txt"}],
    }
    put("rag.json", json.dumps(body))
    put("docs/manual.txt", "Turn it off and on again. " * 4)
    put("plain.md", CHAT)
    settings = json.loads(workspace_file.read_text())
    settings["fleets"][0]["prompts"] = {"directory": f"s3://{bucket}/prompts"}
    workspace_file.write_text(json.dumps(settings))
    workspace = FakedWorkspace(workspace_file, on_event=lambda _: None)
    workspace.__dict__["clock"] = MovableClock()
    days = Days(workspace, settled.instance)
    days.cursors, days.run_keys = settled.cursors, settled.run_keys

    assert days.tick() == ["chat"]
    assert labels(workspace) == ["plain", "rag", "rag/manual"]
    assert days.tick() == []
    put("docs/manual.txt", "Turn it off and on again, twice. " * 4)
    assert days.tick() == ["chat"]
    assert days.requests[0].tags["warmfront/because"] == "changed: rag/manual"
    (workspace_file.parent / "other" / "only.md").write_text("Another prompt for them. " * 4)
    with s3_away():
        assert days.tick() == ["other"]  # and what is in the bucket is away, not gone
        assert "listing the templates in s3://" in days.readable("chat").description
    assert days.tick() == []
    put("rag.json", "{")
    assert days.tick() == []
    assert "rag.json" in days.readable("chat").description
    s3.delete_object(Bucket=bucket, Key="prompts/plain.md")
    assert days.tick() == ["chat"]
    assert labels(workspace) == ["rag", "rag/manual"]
    assert workspace.state.document("chat", "proof")["verdict"] != "proven"  # nothing that can be read is left


def test_a_folder_that_became_empty_is_said_once(settled, prompts):
    for path in prompts.iterdir():
        path.unlink()
    assert settled.tick() == ["chat"]
    assert "There is no template in" in settled.readable("chat").description
    assert not settled.finished[-1].success
    assert settled.tick() == []


def test_what_is_shipped_limits_runs_by_fleet_and_retries_none(workspace, monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    with open_instance(workspace) as instance:
        limits = instance.get_concurrency_config().run_queue_config.tag_concurrency_limits
        assert [(limit["key"], limit["limit"]) for limit in limits] == [("dagster/partition", 1)]
        assert instance.run_monitoring_enabled
        assert not instance.run_retries_enabled
        assert not instance.telemetry_enabled
    home = instance_directory(workspace)
    own = "telemetry:\n  enabled: false\n"
    (home / "dagster.yaml").write_text(own)
    assert (instance_directory(workspace) / "dagster.yaml").read_text() == own
    definitions = build_defs(workspace)
    for job in ("warm", "prove", "read_templates"):
        assert definitions.resolve_job_def(job).tags["dagster/max_retries"] == "0"
    repository = definitions.get_repository_def()
    assert {s.default_status for s in repository.sensor_defs} == {dg.DefaultSensorStatus.RUNNING}
    assert {s.default_status for s in repository.schedule_defs} == {dg.DefaultScheduleStatus.RUNNING}
