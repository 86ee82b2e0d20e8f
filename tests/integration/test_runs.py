"""The job on an ephemeral Dagster instance: real Valkey, real state, a fake engine at the Protocol seam."""

import inspect
import json
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest
from fakes import CHUNK, FakedWorkspace

from pipelines.definitions import build_defs
from resources.leases import StateLease
from resources.workspace import Workspace
from warmers.errors import StoreUnavailable


@pytest.fixture
def run(workspace_file):
    workspace = FakedWorkspace(workspace_file, on_event=lambda _: None)

    def run(job="warm"):
        with dg.DagsterInstance.ephemeral() as instance:
            result = (
                build_defs(workspace)
                .resolve_job_def(job)
                .execute_in_process(partition_key="chat", instance=instance, raise_on_error=False)
            )
        return result

    run.workspace = workspace
    run.prompts = Path(workspace_file).parent / "prompts"
    return run


def checks(result):
    return {c.check_name: c for c in result.get_asset_check_evaluations()}


def metadata(result, asset):
    (event,) = result.asset_materializations_for_node(asset)
    return {key: value.value for key, value in event.metadata.items()}


def test_the_whole_story(run):
    result = run()
    assert result.success
    assert all(check.passed for check in checks(result).values())
    assert len(checks(result)) == 9
    computed = metadata(result, "warm_chunks")["computed_tokens"]
    assert computed == metadata(result, "warm_plan")["compute_tokens"] > 0
    proof = run.workspace.state.document("chat", "proof")
    assert (proof["verdict"], proof["hit_rate"]) == ("proven", 1.0)
    assert run.workspace.state.latest("chat", "warm")["tokens_per_s"] > 0
    rows = run.workspace.state.journal(run.workspace.fleet("chat").namespace).rows()
    assert len(rows) * CHUNK == computed
    assert (rows.proven_at > 0).all()

    again = run()
    assert again.success
    assert metadata(again, "warm_chunks")["computed_tokens"] == 0
    assert metadata(again, "warm_plan")["steps"] == 0


def test_editing_one_template_warms_only_the_chunks_that_changed(run):
    run()
    renders = run.workspace.engine.renders
    path = run.prompts / "support.md"
    path.write_text(path.read_text()[:-16] + "Do it well, now.")
    result = run()
    assert result.success
    assert 0 < metadata(result, "warm_chunks")["computed_tokens"] <= 3 * CHUNK
    its_own, tokens_check, chat_requests = 6, 3 * 2, 3
    assert run.workspace.engine.renders - renders == its_own + tokens_check + chat_requests


def test_a_bad_template_is_reported_and_harms_no_other(run):
    (run.prompts / "broken.yaml").write_text("a: [")
    result = run()
    assert result.success
    assert metadata(result, "prompt_prefixes")["failed"] == 1
    stable = checks(result)["prefix_is_stable"]
    assert not stable.passed
    assert "broken.yaml" in stable.description


def test_chunks_that_do_not_arrive_fail_the_step_and_say_why(run):
    run.workspace.engine.write_behind = True
    result = run()
    assert not result.success
    failure = result.failure_data_for_node("warm_chunks")
    assert "cannot write to L2" in failure.user_failure_data.description
    assert not result.asset_materializations_for_node("hit_rate")


def test_evicted_chunks_fail_the_blocking_check_before_the_proof(run, valkey):
    engine = run.workspace.engine
    run()
    names = [k.decode() for k in valkey.client.scan_iter(f"{run.workspace.fleet('chat').namespace}@*")]
    path = run.prompts / "sales.md"
    path.write_text(path.read_text() + "More words here. " * 3)
    engine.on_prefill = lambda _: valkey.delete(names)
    result = run()
    assert not result.success
    assert not checks(result)["every_chunk_present"].passed
    assert "Warm again" in checks(result)["every_chunk_present"].description
    assert not result.asset_materializations_for_node("hit_rate")


@pytest.mark.parametrize("step", ["warm_plan", "warm_chunks_every_chunk_present"])
def test_a_step_that_fails_for_a_moment_is_tried_once_more(run, step, monkeypatch):
    plan, failed = FakedWorkspace.plan, []

    def failing(self, fleet, prefixes):
        callers = {frame.function for frame in inspect.stack()}
        if step.removeprefix("warm_chunks_") in callers and not failed:
            failed.append(step)
            raise StoreUnavailable("asking Valkey", seen="no answer", do="Try again.")
        return plan(self, fleet, prefixes)

    monkeypatch.setattr(FakedWorkspace, "plan", failing)
    result = run()
    assert failed
    assert result.success
    assert [event.step_key for event in result.all_events if event.event_type_value == "STEP_RESTARTED"] == [step]


def test_a_cap_leaves_the_rest_to_the_next_run_and_proves_nothing_that_is_not_whole(run, workspace_file):
    settings = json.loads(workspace_file.read_text())
    settings["fleets"][0]["warm"]["max_tokens_per_run"] = 4 * CHUNK
    workspace_file.write_text(json.dumps(settings))
    verdicts, computed = [], []
    for _ in range(6):
        result = run()
        verdicts.append(run.workspace.state.document("chat", "proof")["verdict"])
        computed.append(metadata(result, "warm_chunks")["computed_tokens"])
    assert checks(result)["every_chunk_present"].passed
    assert max(computed) <= 4 * CHUNK
    assert verdicts[0] == "inconclusive"
    assert (verdicts[-1], computed[-1]) == ("proven", 0)


def test_a_tokenizer_that_changed_is_found_and_rendered_anew_by_the_next_run(run):
    run()
    engine = run.workspace.engine
    tokenize = engine.tokenize
    engine.tokenize = lambda text: tokenize(text) + 1
    result = run()
    assert not checks(result)["tokens_match_engine"].passed
    assert not result.asset_materializations_for_node("warm_plan")
    assert run().success


def test_an_engine_of_another_namespace_is_refused_before_anything_is_sent(run):
    run.workspace.engine.fleet = run.workspace.engine.fleet.__class__(
        **{
            name: getattr(run.workspace.engine.fleet, name)
            for name in ("model", "engine", "store", "ttl_s", "limits", "floors", "prefill_tokens_per_s")
        },
        name="other",
    )
    result = run()
    assert not result.success
    assert "key prefix" in result.failure_data_for_node("warm_chunks").user_failure_data.description
    assert run.workspace.engine.prefills == []


def test_answers_from_other_weights_fail_the_proof(run, valkey):
    run()
    fleet = run.workspace.fleet("chat")
    for key in valkey.client.scan_iter(f"{fleet.namespace}@*"):
        valkey.client.set(key, b"\1" * fleet.chunk_bytes)
    result = run("prove")
    assert not checks(result)["output_unchanged"].passed
    assert "Do not roll out" in checks(result)["output_unchanged"].description
    assert run.workspace.state.document("chat", "proof")["verdict"] == "failed"


def test_a_second_writer_is_told_who_holds_the_namespace(run):
    workspace = run.workspace
    namespace = workspace.fleet("chat").namespace
    with StateLease(workspace.state.objects, workspace.clock).hold(namespace, 3):
        result = run()
    description = result.failure_data_for_node("warm_chunks").user_failure_data.description
    assert "holds it for" in description


def test_a_broken_configuration_is_a_failed_check_that_names_the_field(run, workspace_file):
    settings = json.loads(workspace_file.read_text())
    settings["fleets"][0]["engine"]["dtype"] = "int3"
    workspace_file.write_text(json.dumps(settings))
    broken = Workspace(workspace_file, on_event=lambda _: None)
    with dg.DagsterInstance.ephemeral() as instance:
        result = (
            build_defs(broken)
            .resolve_job_def("warm")
            .execute_in_process(partition_key="chat", instance=instance, raise_on_error=False)
        )
    check = checks(result)["configuration_is_valid"]
    assert not check.passed
    assert "fleets.chat.engine.dtype" in check.description


def test_the_nightly_schedule_asks_for_one_run_a_fleet_and_night():
    from pipelines.schedules import nightly_warm

    context = dg.build_schedule_context(scheduled_execution_time=datetime(2026, 1, 2, 3, tzinfo=UTC))
    requests = list(nightly_warm(context))
    assert [request.partition_key for request in requests] == ["chat", "other"]
    assert len({request.run_key for request in requests}) == 2
