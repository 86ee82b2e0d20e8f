"""Hot sets as files: written after a proof and only then, read by version, on disk and in S3."""

import os
from pathlib import Path

import dagster as dg
import pytest
from fakes import FakedWorkspace, make_fleet, make_prefix, words

from pipelines.definitions import build_defs
from resources.hot_sets import HotSetFile, encode, hot_set_path
from resources.objects import open_objects
from resources.s3 import s3_client
from warmers.errors import StateUnavailable
from warmers.hot_set import HotSet

FLEET = make_fleet()


def hot(*texts):
    return HotSet.of(FLEET, [make_prefix(words(text), text) for text in texts])


@pytest.fixture(params=["disk", "s3"])
def root(request, tmp_path):
    s3_client.cache_clear()
    yield str(tmp_path) if request.param == "disk" else request.getfixturevalue("s3_uri")
    s3_client.cache_clear()


def test_it_is_read_when_it_is_another_than_before(root):
    objects, path = open_objects(root), hot_set_path(FLEET.namespace)
    file = HotSetFile(f"{root}/{path}")
    assert file.read(None) is None
    objects.write(path, encode(hot("ab")))
    first, version = file.read(None)
    assert [prefix.label for prefix in first.prefixes] == ["ab"]
    assert file.read(version) is None
    objects.write(path, encode(hot("ab", "cd")))
    second, newer = file.read(version)
    assert (len(second.prefixes), newer != version) == (2, True)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 0}', encode(hot("ab"))[:-9], b'{"format": 1}'])
def test_what_is_none_says_so(tmp_path, content):
    (tmp_path / "hot_set.json").write_bytes(content)
    with pytest.raises(StateUnavailable, match=r"reading the hot set .*hot_set.json.*Prove once more"):
        HotSetFile(str(tmp_path / "hot_set.json")).read(None)


def test_a_bucket_that_is_away_says_so(s3_uri, s3_away):
    file = HotSetFile(f"{s3_uri}/x")
    with s3_away():
        s3_client.cache_clear()
        with pytest.raises(StateUnavailable, match=f"reading the hot set {s3_uri}/x"):
            file.read(None)
    s3_client.cache_clear()


@pytest.fixture
def workspace(workspace_file):
    return FakedWorkspace(workspace_file, on_event=lambda _: None)


def run(workspace, job="warm"):
    with dg.DagsterInstance.ephemeral() as instance:
        found = build_defs(workspace).resolve_job_def(job)
        return found.execute_in_process(partition_key="chat", instance=instance, raise_on_error=False)


def current(workspace):
    fleet = workspace.fleet("chat")
    found = HotSetFile(workspace.state.uri_of(hot_set_path(fleet.namespace))).read(None)
    return None if found is None else sorted(prefix.label for prefix in found[0].prefixes)


def test_it_is_written_after_a_proof_and_a_candidate_comes_in_when_it_is_promoted(workspace):
    prompts = workspace.path.parent / "prompts"
    (prompts / "support.candidate.md").write_text((prompts / "support.md").read_text() + "You never guess. " * 3)
    assert run(workspace).success
    assert current(workspace) == ["sales", "short", "support"]
    Path(prompts / "sales.md").unlink()
    os.replace(prompts / "support.candidate.md", prompts / "support.md")
    (event,) = run(workspace).asset_materializations_for_node("hot_set")
    assert (current(workspace), event.metadata["prefixes"].value) == (["short", "support"], 2)


def test_what_was_not_proven_leaves_the_last_one_in_force(workspace):
    assert run(workspace).success
    prompts = workspace.path.parent / "prompts"
    (prompts / "new.md").write_text("You are new here, and learn what there is to learn. " * 3)
    workspace.engine.lie_found = 1  # the two counts do not agree
    done = run(workspace)
    assert not done.success
    assert done.asset_materializations_for_node("hot_set") == []
    assert current(workspace) == ["sales", "short", "support"]
