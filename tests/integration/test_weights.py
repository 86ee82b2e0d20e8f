"""Weights from a source: staged by a job, watched by a sensor; another digest is another namespace, warmed anew.

Real sensors, jobs, Valkey and S3 API; a fake engine at the Protocol seam.
"""

import json
import subprocess
import sys
import threading

import dagster as dg
import pytest
from days import Days
from fakes import FakedWorkspace, MovableClock
from small_disks import mounted
from weight_files import write_model

from pipelines.definitions import build_defs
from pipelines.runs import PAUSES_S
from resources.s3 import s3_client
from warmers.errors import BucketUnavailable, NotStaged, StateUnavailable


@pytest.fixture
def workspace(workspace_file, s3_uri):
    """One fleet `chat` whose model is staged from a directory."""
    s3_client.cache_clear()
    model = write_model(workspace_file.parent / "source")
    settings = json.loads(workspace_file.read_text())
    settings["weights"] = f"{s3_uri}/weights"
    settings["fleets"][0]["model"] = {"name": "m", "source": "source", "verify": "full", "assets_cache": "/cache"}
    workspace_file.write_text(json.dumps(settings))
    workspace = FakedWorkspace(workspace_file, on_event=lambda _: None)
    workspace.__dict__["clock"] = MovableClock()
    workspace.__dict__["files"] = model
    yield workspace
    s3_client.cache_clear()


def fresh(workspace):
    """The same file, read by another process: engines are started for what is staged now."""
    again = FakedWorkspace(workspace.path, on_event=lambda _: None)
    again.__dict__["clock"] = workspace.clock
    return again


def staged(workspace):
    return ran(workspace, "stage_weights")


def ran(workspace, name, **config):
    with dg.DagsterInstance.ephemeral() as instance:
        job = build_defs(workspace).resolve_job_def(name)
        return job.execute_in_process(
            partition_key="chat", instance=instance, raise_on_error=False, run_config=config or None
        )


def change_a_weight(workspace, bits=1):
    shard = workspace.__dict__["files"] / "model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= bits
    shard.write_bytes(content)


def metadata(result, node="model_weights"):
    (event,) = result.asset_materializations_for_node(node)
    return {key: value.value for key, value in event.metadata.items()}


def test_a_stage_is_what_keys_and_namespace_are_made_of(workspace):
    with pytest.raises(NotStaged, match="Run warmfront stage"):
        workspace.fleet("chat")
    result = staged(workspace)
    assert result.success
    assert metadata(result)["sent_bytes"] == metadata(result)["bytes"] > 0
    before = workspace.fleet("chat")
    assert before.model.argument == metadata(result)["stage"]
    assert before.model.path.startswith("/cache/model_streamer/")
    assert before.model.weights_digest == metadata(result)["digest"]
    again = staged(workspace)
    assert metadata(again)["sent_bytes"] == 0
    assert workspace.fleet("chat") == before
    change_a_weight(workspace)
    shard = (workspace.__dict__["files"] / "model-00001-of-00002.safetensors").stat().st_size
    assert metadata(staged(workspace))["sent_bytes"] == shard
    after = workspace.fleet("chat")
    assert (after.namespace != before.namespace, after.model.path != before.model.path) == (True, True)
    assert after.model.tokenizer_digest == before.model.tokenizer_digest


def rot(stages, digest, name):
    """Damage an object as the disk below it would: nobody has written it."""
    key = stages._key("m", digest, name)
    body = bytearray(stages.client.get_object(Bucket=stages.bucket, Key=key)["Body"].read())
    body[-1] ^= 1
    etag = stages.client.put_object(Bucket=stages.bucket, Key=key, Body=bytes(body))["ETag"]
    (sha,) = [file.sha256 for file in stages.manifest("m", digest).files if file.name == name]
    note = json.dumps({"bytes": len(body), "etag": etag, "sha256": sha})
    stages.client.put_object(Bucket=stages.bucket, Key=stages._key("m", ".sent", digest, name), Body=note.encode())


def test_a_damaged_stage_fails_the_blocking_check_and_is_sent_anew(workspace):
    assert staged(workspace).success
    name = "model-00002-of-00002.safetensors"
    rot(workspace.stages(), workspace.fleet("chat").model.weights_digest, name)
    result = staged(workspace)
    assert not result.success
    checks = {check.check_name: check for check in result.get_asset_check_evaluations()}
    assert checks["streamed_tensors_match"].metadata["looked"].value.startswith("not looked at")
    check = checks["manifest_complete"]
    assert not check.passed
    assert f"{name} has other bytes than were staged" in check.description
    assert staged(workspace).success
    assert metadata(staged(workspace))["sent_bytes"] == 0


def test_another_revision_is_staged_and_then_warmed_anew(workspace):
    with dg.DagsterInstance.ephemeral() as instance:
        days = Days(workspace, instance)
        assert [days.tick() for _ in range(2)] == [[], []]
        assert "nobody has staged them yet" in days.said
        assert days.tick("model_revision_changed") == ["chat"]
        assert days.tick("model_revision_changed") == []
        assert days.tick() == ["chat"]
        assert all(run.success for run in days.finished)
        assert (days.tick(), days.tick("model_revision_changed")) == ([], [])
        proof = workspace.state.document("chat", "proof")
        change_a_weight(workspace)
        assert days.tick() == []  # the source is not what is served
        assert days.tick("model_revision_changed") == ["chat"]
        later = Days(fresh(workspace), instance)
        later.cursors, later.run_keys = days.cursors, days.run_keys
        assert later.tick() == ["chat"]
        assert later.requests[0].tags["warmfront/because"] == "weights, adapters or engine changed"
        assert later.finished[-1].success
        (event,) = later.finished[-1].asset_materializations_for_node("warm_chunks")
        assert event.metadata["computed_tokens"].value > 0
        renewed = later.workspace.state.document("chat", "proof")
        assert (renewed["verdict"], renewed["namespace"] != proof["namespace"]) == ("proven", True)
        assert (later.tick(), later.tick("model_revision_changed")) == ([], [])


def test_a_run_that_failed_while_the_bucket_was_away_is_asked_for_again(workspace, monkeypatch):
    def away(self, *_):
        raise BucketUnavailable("sending", seen="SlowDown", do="Run again: what was sent is found.")

    with dg.DagsterInstance.ephemeral() as instance:
        days = Days(workspace, instance)
        with monkeypatch.context() as patch:
            patch.setattr("resources.stages.BucketStages.publish", away)
            assert days.tick("model_revision_changed") == ["chat"]
            for pause in PAUSES_S:
                assert days.tick("model_revision_changed") == []
                workspace.clock.ahead += pause + 10
                assert days.tick("model_revision_changed") == ["chat"]
            workspace.clock.ahead += 86400
            assert days.tick("model_revision_changed") == []
        change_a_weight(workspace)
        assert days.tick("model_revision_changed") == ["chat"]
        assert days.finished[-1].success
        workspace.clock.ahead += 86400
        assert days.tick("model_revision_changed") == []


APPLY = {"weights_retention": {"config": {"apply": True}}}


def edit(workspace, **model):
    settings = json.loads(workspace.path.read_text())
    settings["fleets"][0]["model"] |= model
    workspace.path.write_text(json.dumps(settings))
    return fresh(workspace)


def test_superseded_stages_are_shown_and_removed_only_when_asked(workspace):
    digests = []
    for _ in range(3):
        assert staged(workspace).success
        digests.append(workspace.stages().current("m")["digest"])
        change_a_weight(workspace, bits=len(digests))
    workspace.state.point("chat", "proven", b"{}", ".json", {"weights": digests[0]})
    here = edit(workspace, keep_revisions=0, keep_days=0)
    shown = metadata(ran(here, "retain"), "weights_retention")
    assert (shown["removed"], len(here.stages().staged("m"))) == (0, 3)
    rows = {record.data["digest"]: (record.data["what"], record.data["why"]) for record in shown["stages"].records}
    assert rows[digests[0][:16]] == ("stays", "fleet chat was last proven with it")
    assert rows[digests[1][:16]][0] == "would be removed"
    assert rows[digests[2][:16]] == ("stays", "replicas that start load it")
    done = metadata(ran(here, "retain", ops=APPLY), "weights_retention")
    assert done["removed"] == 1
    assert {stage.digest for stage in here.stages().staged("m")} == {digests[0], digests[2]}
    assert metadata(ran(here, "retain", ops=APPLY), "weights_retention")["removed"] == 0


def test_a_stager_waits_while_stages_are_removed(workspace):
    waiting, results = threading.Event(), []
    patient = FakedWorkspace(workspace.path, on_event=lambda said: waiting.set() if "waiting" in said else None)
    run = threading.Thread(target=lambda: results.append(staged(patient)), daemon=True)
    with workspace.stage_lease("m"):
        run.start()
        assert waiting.wait(60)
        assert workspace.stages().staged("m") == []
    run.join(60)
    assert results[0].success


def test_a_mounted_stage_is_a_directory_to_engines_and_its_path_is_in_keys(workspace):
    here = edit(workspace, mount="/mnt/models/")
    assert staged(here).success
    model = here.fleet("chat").model
    assert model.argument == model.path == f"/mnt/models/models/m/{model.weights_digest}"
    assert edit(workspace, mount=None).fleet("chat").model.argument.startswith("s3://")


def test_a_full_disk_of_this_machine_is_said(workspace):
    assert staged(workspace).success
    full = workspace.local_directory / "stages"
    with mounted(full, "size=4k"):
        (full / "filler").write_bytes(b"x" * 4096)
        with pytest.raises(StateUnavailable, match=r"writing .*No space left on device"):
            workspace.fleet("chat")
    assert workspace.fleet("chat").model.weights_digest


def test_the_command_line_stages_and_verifies(workspace, tmp_path, monkeypatch):
    monkeypatch.setenv("WARMFRONT_CONFIG", str(workspace.path))
    argv = [sys.executable, "-m", "pipelines.cli", "stage"]

    def run(*more):
        done = subprocess.run([*argv, *more, "--json"], capture_output=True, text=True)
        return done.returncode, json.loads(done.stdout)

    code, said = run("--verify")
    assert (code, "nobody has staged" in said["error"]) == (2, True)
    code, said = run()
    assert (code, len(said["stage"]["digest"])) == (0, 64)
    code, said = run("--verify")
    assert (code, said["findings"]) == (0, [])
    stages = workspace.stages()
    rot(stages, said["digest"], "model-00001-of-00002.safetensors")
    code, said = run("--verify")
    assert (code, len(said["findings"])) == (2, 1)
    assert run()[0] == 0  # what was found is sent anew
    code, said = run("--verify")
    assert (code, said["findings"]) == (0, [])
    key = stages._key("m", said["digest"], "tokenizer.json")
    stages.client.delete_object(Bucket=stages.bucket, Key=key)
    code, said = run("--verify", "--depth", "sizes")
    assert (code, said["findings"]) == (2, ["tokenizer.json is missing"])
    (workspace.__dict__["files"] / "tokenizer.json").unlink()
    code, said = run()
    assert (code, said["stage"]) == (1, None)
    assert "there is no tokenizer" in said["reasons"][0]
