"""Staging weights into a real S3 API: complete or not at all, sent once, gone on with after a kill, and verified."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import pytest
from fakes import FreeFence
from hub_server import Hub, serve
from s3_proxy import OTHER_REGION, between
from small_disks import mounted
from weight_files import write_model

from resources.processes import Processes, free_port
from resources.s3 import s3_client
from resources.stages import BucketStages
from resources.weight_sources import BucketSource, DirectorySource, HubSource
from warmers.blocks import BLOCK_BYTES
from warmers.errors import BucketRefused, BucketUnavailable, SourceChanged, SourceUnavailable, WeightsError
from warmers.stage import stage
from warmers.verification import verify

MANY_BLOCKS = 3 * BLOCK_BYTES + 12


@pytest.fixture
def stages(s3_uri):
    s3_client.cache_clear()
    yield BucketStages.at(f"{s3_uri}/weights")
    s3_client.cache_clear()


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def put(stages, directory, **more):
    return stage(DirectorySource(directory), "m", stages, FreeFence(), time.time, **more)


def objects(stages):
    found = s3_client().list_objects_v2(Bucket=stages.bucket).get("Contents", ())
    return {o["Key"].rpartition("/models/m/")[2]: o["Size"] for o in found}


def test_a_stage_is_whole_and_again_sends_nothing(stages, model):
    told = []
    done = put(stages, model, on_progress=told.append)
    assert (len(done.sent), done.kept, done.copied) == (7, (), ())
    assert told[-1].bytes == told[-1].total_bytes == done.manifest.total_bytes
    assert (told[-1].files, told[-1].seconds_left, told[-1].bytes_per_s > 0) == (7, 0, True)
    assert stages.current("m")["digest"] == done.manifest.digest
    assert verify(done.manifest, stages, "full").findings == ()
    assert verify(done.manifest, stages, "sampled").findings == ()
    shard = next(file for file in done.manifest.files if file.name.endswith("2.safetensors"))
    assert (shard.dtypes, shard.tensors > 5) == (("F32",), True)
    reads = []

    class Reading(DirectorySource):
        def read(self, file, start=0):
            reads.append(file.name)
            return super().read(file, start)

    again = stage(Reading(model), "m", stages, FreeFence(), time.time)
    assert (again.sent_bytes, len(again.kept)) == (0, 7)
    assert again.manifest.digest == done.manifest.digest
    assert reads.count("model-00001-of-00002.safetensors") == 1  # its header alone


def test_one_changed_weight_sends_one_shard_and_the_rest_is_copied(stages, model):
    first = put(stages, model)
    shard = model / "model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    second = put(stages, model)
    assert second.sent == (shard.name,)
    assert len(second.copied) == 6
    assert second.manifest.digest != first.manifest.digest
    assert stages.current("m")["digest"] == second.manifest.digest
    for done in (first, second):
        assert verify(done.manifest, stages, "full").findings == ()


KILLED = """
import sys, time
from fakes import FreeFence
from resources.stages import BucketStages
from resources.weight_sources import DirectorySource
from warmers.stage import stage

class Slow(DirectorySource):
    def read(self, file, start=0):
        for piece in super().read(file, start):
            for at in range(0, len(piece), 1 << 20):
                yield piece[at : at + (1 << 20)]
                time.sleep(0.01)

done = stage(Slow(__import__("pathlib").Path(sys.argv[1])), "m", BucketStages.at(sys.argv[2]), FreeFence(), time.time)
print(done.sent_bytes)
"""


def test_killed_at_random_moments_it_converges_and_the_pointer_never_names_what_is_not_whole(stages, tmp_path):
    model = write_model(tmp_path / "model", padding=MANY_BLOCKS)
    random, kills = Random(7), 0  # noqa: S311
    argv = [sys.executable, "-c", KILLED, str(model), f"s3://{stages.bucket}/{stages.prefix}"]
    while True:
        run = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": f"{Path.cwd()}:{Path.cwd()}/tests"})
        try:
            run.wait(0.8 + 1.5 * random.random() + 0.1 * kills)  # a slow machine gets there as well
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
            kills += 1
        current = stages.current("m")
        if current is not None:
            manifest = stages.manifest("m", current["digest"])
            assert verify(manifest, stages, "full").findings == ()
            break
        assert kills < 60
    assert kills >= 2


def test_parts_that_were_sent_are_not_sent_again(stages, tmp_path, monkeypatch):
    model = write_model(tmp_path / "model", padding=MANY_BLOCKS)
    client, sent = stages.client, []
    upload = client.upload_part

    def failing(**arguments):
        if len(sent) == 2:
            raise ConnectionResetError("the network went away")
        sent.append((arguments["Key"], arguments["PartNumber"]))
        return upload(**arguments)

    monkeypatch.setattr(client, "upload_part", failing)
    with pytest.raises(BucketUnavailable, match="what was sent is found"):
        put(stages, model)
    monkeypatch.setattr(client, "upload_part", lambda **a: sent.append((a["Key"], a["PartNumber"])) or upload(**a))
    assert stages.current("m") is None
    done = put(stages, model)
    assert len(sent) == len(set(sent)) == 8
    assert verify(done.manifest, stages, "full").findings == ()
    assert all(len(f.blocks) == 4 for f in done.manifest.files if f.name.endswith("safetensors"))


def test_two_stagers_at_once_make_one_stage(stages, tmp_path):
    model = write_model(tmp_path / "model", padding=MANY_BLOCKS)
    done, failed = [], []

    def run():
        try:
            done.append(put(stages, model))
        except BucketUnavailable as error:  # a part of ours went with the other's upload: it says to run again
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done
    assert verify(done[0].manifest, stages, "full").findings == ()
    assert put(stages, model).sent_bytes == 0


def corrupt(stages, digest, name, change):
    key = stages._key("m", digest, name)
    body = bytearray(s3_client().get_object(Bucket=stages.bucket, Key=key)["Body"].read())
    change(body)
    s3_client().put_object(Bucket=stages.bucket, Key=key, Body=bytes(body))


def flip(body):
    body[len(body) // 2] ^= 1


@pytest.mark.parametrize("depth", ["sizes", "sampled", "full"])
def test_what_was_damaged_is_found_and_named(stages, model, depth):
    digest = put(stages, model).manifest.digest
    manifest = stages.manifest("m", digest)
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    corrupt(stages, digest, shards[0], flip)
    corrupt(stages, digest, "tokenizer.json", lambda body: body.append(1))
    s3_client().delete_object(Bucket=stages.bucket, Key=stages._key("m", digest, shards[1]))
    s3_client().put_object(Bucket=stages.bucket, Key=stages._key("m", digest, "extra.bin"), Body=b"x")
    found = verify(manifest, stages, depth).findings
    assert f"{shards[1]} is missing" in found
    assert "tokenizer.json has 3 bytes, not 2" in found
    assert "extra.bin does not belong to it" in found
    assert any(finding.startswith(f"{shards[0]} has other bytes") for finding in found) == (depth != "sizes")
    # What was replaced has another ETag than was noted, and so is sent again; what is extra stays, and stays named.
    again = put(stages, model)
    assert set(again.sent) == {*shards, "tokenizer.json"}
    assert verify(manifest, stages, "full").findings == ("extra.bin does not belong to it",)


def test_a_file_that_changes_while_it_is_staged_is_not_taken(stages, tmp_path):
    model = write_model(tmp_path / "model", padding=MANY_BLOCKS)
    shard = model / "model-00001-of-00002.safetensors"

    class Changing(DirectorySource):
        def read(self, file, start=0):
            for number, piece in enumerate(super().read(file, start)):
                if number == 2:
                    with shard.open("r+b") as stream:
                        stream.seek(-1, os.SEEK_END)
                        stream.write(bytes([file.bytes % 251]))
                yield piece

    with pytest.raises(SourceUnavailable, match="changed while it was read"):
        stage(Changing(model), "m", stages, FreeFence(), time.time)
    assert stages.current("m") is None


def test_from_another_bucket(stages, model, s3_uri):
    for path in model.iterdir():
        s3_client().put_object(Bucket=stages.bucket, Key=f"elsewhere/{path.name}", Body=path.read_bytes())
    done = stage(BucketSource(stages.bucket, "elsewhere"), "m", stages, FreeFence(), time.time)
    assert done.manifest.digest == put(stages, model).manifest.digest
    s3_client().put_object(Bucket=stages.bucket, Key="pickled/pytorch_model.bin", Body=b"x")
    with pytest.raises(WeightsError, match="pickles"):
        stage(BucketSource(stages.bucket, "pickled"), "m", stages, FreeFence(), time.time)
    with pytest.raises(BucketRefused, match=r"NoSuchBucket.*Correct the bucket's name"):
        stage(BucketSource("no-such-bucket-here", "x"), "m", stages, FreeFence(), time.time)


def test_a_source_that_is_missing_or_empty(stages, tmp_path):
    with pytest.raises(SourceUnavailable, match="there is no"):
        put(stages, tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match=r"there is no config\.json"):
        put(stages, tmp_path / "empty")
    assert objects(stages) == {}


def test_uploads_that_nobody_goes_on_with_are_aborted_and_stages_removed_whole(stages, model):
    done = put(stages, model)
    key = stages._key("m", "d" * 64, "model.safetensors")
    s3_client().create_multipart_upload(Bucket=stages.bucket, Key=key)
    begun = s3_client().list_multipart_uploads(Bucket=stages.bucket)["Uploads"][0]["Initiated"]
    assert stages.abort_stale("m", begun.timestamp() + 3600) == []
    assert stages.abort_stale("m", begun.timestamp() + 2 * 86400) == [key]
    (stage,) = stages.staged("m")
    assert stage.staged_at == stage.written_at == pytest.approx(time.time(), abs=60)
    assert stage.bytes > done.manifest.total_bytes
    assert stages.staged("m/nested") == []
    stages.remove("m", done.manifest.digest)
    assert stages.staged("m") == []
    assert set(objects(stages)) == {"current.json"}


def test_what_a_killed_removal_left_is_incomplete_and_removed_by_the_next(stages, model):
    digest = put(stages, model).manifest.digest
    stages.client.delete_object(Bucket=stages.bucket, Key=stages._key("m", digest, "manifest.json"))
    (left,) = stages.staged("m")
    assert (left.digest, left.staged_at) == (digest, None)
    for name in stages.sizes("m", digest):
        stages.client.delete_object(Bucket=stages.bucket, Key=stages._key("m", digest, name))
    (notes,) = stages.staged("m")
    assert notes.staged_at is None
    stages.remove("m", digest)
    assert stages.staged("m") == []


def test_a_pointer_is_moved_by_whoever_reads_it_last(stages, model):
    first = put(stages, model)
    client, put_object = stages.client, stages.client.put_object
    stolen = []

    def interfering(**arguments):
        if arguments["Key"].endswith("current.json") and not stolen:
            stolen.append(True)
            put_object(Bucket=stages.bucket, Key=arguments["Key"], Body=b'{"digest": "other"}')
        return put_object(**arguments)

    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    client.put_object = interfering
    second = put(stages, model)
    client.put_object = put_object
    assert stolen
    assert stages.current("m")["digest"] == second.manifest.digest != first.manifest.digest


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    with serve(hub) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield hub


def from_hub(stages, revision="main"):
    return stage(HubSource("org/name", revision), "m", stages, FreeFence(), time.time)


def test_from_a_hub_a_branch_is_resolved_and_large_files_are_read_once(stages, model, hub):
    hub.push("org/name", "main", "a" * 40, model)
    (model / "README.md").write_text("not staged")
    done = from_hub(stages)
    assert (done.manifest.source, done.manifest.revision) == ("hf://org/name@main", "a" * 40)
    whole = [path for path, span in hub.asked if path.endswith("1-of-00002.safetensors") and not span]
    assert len(whole) == 2  # for its header, behind which reading ends, and to send it
    assert not any("README" in path or "/resolve/main" in path for path, _ in hub.asked)
    assert verify(done.manifest, stages, "full").findings == ()
    assert from_hub(stages, "a" * 40).sent_bytes == 0


def test_a_hub_that_breaks_off_is_asked_for_the_rest(stages, tmp_path, hub):
    model = write_model(tmp_path / "model", shards=1, padding=MANY_BLOCKS)
    hub.push("org/name", "main", "a" * 40, model)
    hub.cut_after = 2 * BLOCK_BYTES + 5
    with pytest.raises(SourceUnavailable, match=r"reading model-00001-of-00001\.safetensors"):
        from_hub(stages)
    assert stages.current("m") is None
    hub.cut_after, hub.asked = None, []
    done = from_hub(stages)
    assert ("bytes=" + str(2 * BLOCK_BYTES) + "-") in [span for _, span in hub.asked]
    assert verify(done.manifest, stages, "full").findings == ()


def test_what_rotted_behind_a_killed_run_is_sent_anew(stages, model, hub, monkeypatch):
    hub.push("org/name", "main", "a" * 40, model)
    with monkeypatch.context() as patch:
        patch.setattr(stages.client, "put_object", refusing(stages.client.put_object, "manifest.json"))
        with pytest.raises(BucketUnavailable):  # everything is sent, nothing published
            from_hub(stages)
    shard, (half,) = "model-00001-of-00002.safetensors", stages.staged("m")
    key, note = (stages._key("m", *folder, half.digest, shard) for folder in ((), (".sent",)))
    body = bytearray(stages.client.get_object(Bucket=stages.bucket, Key=key)["Body"].read())
    body[-1] ^= 1
    etag = stages.client.put_object(Bucket=stages.bucket, Key=key, Body=bytes(body))["ETag"]
    noted = json.loads(stages.client.get_object(Bucket=stages.bucket, Key=note)["Body"].read())
    stages.client.put_object(Bucket=stages.bucket, Key=note, Body=json.dumps(noted | {"etag": etag}).encode())
    with pytest.raises(SourceChanged, match=shard):
        from_hub(stages)
    done = from_hub(stages)
    assert done.sent == (shard,)
    assert verify(done.manifest, stages, "full").findings == ()


def refusing(put_object, name):
    def put(**arguments):
        if arguments["Key"].endswith(name):
            raise ConnectionResetError("the network went away")
        return put_object(**arguments)

    return put


def test_a_private_repository_needs_a_token(stages, model, hub, monkeypatch):
    hub.push("org/name", "main", "a" * 40, model)
    hub.token = "hf_secret"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(WeightsError, match="HF_TOKEN"):
        from_hub(stages)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    done = from_hub(stages)
    assert "hf_secret" not in repr(done) + done.manifest.to_json().decode()
    with pytest.raises(WeightsError, match="Correct repository and revision"):
        stage(HubSource("org/other", "main"), "m", stages, FreeFence(), time.time)


@contextmanager
def broken(stages, s3_endpoint, monkeypatch, fault):
    """The same stages, while S3 has this fault."""
    with between(s3_endpoint, fault) as url, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", url)
        s3_client.cache_clear()
        yield BucketStages(stages.bucket, stages.prefix)
    s3_client.cache_clear()


@pytest.mark.parametrize("code", ["SlowDown", "InternalError", "reset"])
def test_what_passes_by_itself_is_waited_for(stages, model, s3_endpoint, monkeypatch, code):
    def fault(request):
        return code if request.number % 4 == 1 else None

    with broken(stages, s3_endpoint, monkeypatch, fault) as shaky:
        done = put(shaky, model)
    assert verify(done.manifest, BucketStages(stages.bucket, stages.prefix), "full").findings == ()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("ExpiredToken", "Renew the credentials and run again: what was sent is found"),
        ("AccessDenied", "permissions that the README lists"),
        ("RequestTimeTooSkewed", "Set this machine's clock"),
    ],
)
def test_what_somebody_has_to_change_is_said_and_the_next_run_sends_the_rest(
    stages, tmp_path, s3_endpoint, monkeypatch, code, says
):
    model, sent = write_model(tmp_path / "model", padding=MANY_BLOCKS), []

    def fault(request):
        if request.sends_a_part:
            sent.append(request.path)
        return code if len(sent) > 3 else None

    with broken(stages, s3_endpoint, monkeypatch, fault) as expiring, pytest.raises(BucketRefused, match=says):
        put(expiring, model)
    again = BucketStages(stages.bucket, stages.prefix)
    assert again.current("m") is None
    done = put(again, model)
    assert verify(done.manifest, again, "full").findings == ()


def test_a_pointer_that_may_not_be_moved_stays(stages, model, s3_endpoint, monkeypatch):
    first = put(stages, model)
    (model / "config.json").write_text((model / "config.json").read_text() + " ")

    def fault(request):
        return "AccessDenied" if request.method == "PUT" and request.path.endswith("current.json") else None

    refused = pytest.raises(BucketRefused, match="moving the pointer")
    with broken(stages, s3_endpoint, monkeypatch, fault) as guarded, refused:
        put(guarded, model)
    after = BucketStages(stages.bucket, stages.prefix)
    assert after.current("m")["digest"] == first.manifest.digest
    assert put(after, model).sent_bytes == 0


def test_a_part_that_the_bucket_lost_is_sent_again_by_the_next_run(stages, tmp_path, s3_endpoint, monkeypatch):
    model, lost = write_model(tmp_path / "model", padding=MANY_BLOCKS), []

    def fault(request):
        if request.sends_a_part and not lost:
            lost.append(request.path)
            return "lost"
        return None

    forgetful = broken(stages, s3_endpoint, monkeypatch, fault)
    with forgetful as bucket, pytest.raises(BucketUnavailable, match=r"InvalidPart.*Run again"):
        put(bucket, model)
    again = BucketStages(stages.bucket, stages.prefix)
    assert again.current("m") is None
    done = put(again, model)
    assert verify(done.manifest, again, "full").findings == ()


def test_a_bucket_in_another_region_is_found_there(stages, model, s3_endpoint, monkeypatch):
    regions = []

    def fault(request):
        regions.append(request.signed_for)
        return None if request.signed_for == OTHER_REGION else "elsewhere"

    with broken(stages, s3_endpoint, monkeypatch, fault) as far:
        done = put(far, model)
    assert set(regions) == {"us-east-1", OTHER_REGION}
    assert verify(done.manifest, BucketStages(stages.bucket, stages.prefix), "full").findings == ()


@pytest.fixture
def small_disk(tmp_path):
    """A directory on a file system of 40 MB."""
    with mounted(tmp_path / "small", "size=40m") as directory:
        yield directory


def answers(url):
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False


def test_a_bucket_whose_disk_is_full_keeps_what_was_current(tmp_path, small_disk):
    processes, port = Processes(tmp_path / "processes"), free_port()
    url, data = f"http://127.0.0.1:{port}", str(small_disk)
    argv = [sys.executable, "-m", "localbucket", "--host", "127.0.0.1", "--port", str(port), data]
    with processes.locked():
        processes.start("s3", argv, url=url, spec="")
        processes.wait("s3", lambda: answers(url), 30, print)
    try:
        stages = BucketStages.at("s3://full", url)
        stages.make_bucket()
        small = put(stages, write_model(tmp_path / "small_model"))
        with pytest.raises(BucketUnavailable, match="sending model-0000"):
            put(stages, write_model(tmp_path / "large_model", padding=MANY_BLOCKS))
        assert stages.current("m")["digest"] == small.manifest.digest
        assert verify(small.manifest, stages, "full").findings == ()
    finally:
        with processes.locked():
            processes.stop("s3")
