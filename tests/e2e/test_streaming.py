"""The staged copy, loaded by the streamer that engines load it with."""

import time

from engine_environment import PYTHON, needs_engine
from fakes import FreeFence

from resources.replica_commands import LocalWeights
from resources.stages import BucketStages
from resources.streamer import RunaiStreamer
from resources.weight_sources import DirectorySource
from warmers.stage import stage
from warmers.verification import verify_streamed

pytestmark = needs_engine


def test_the_tensors_that_engines_stream_are_those_that_were_staged(host, tiny_model):
    with host.stack.processes.locked():
        host.stack.ensure()
    url = host.stack.s3_url()
    stages = BucketStages.at("s3://streamed/weights", url)
    stages.make_bucket()
    done = stage(DirectorySource(tiny_model), "tiny", stages, FreeFence(), time.time)
    streamer = RunaiStreamer(PYTHON, LocalWeights(embedded=True).environment(url, "/cache"))
    assert streamer.installed
    for depth in ("sampled", "full"):
        assert verify_streamed(done.manifest, done.uri, stages, streamer, depth) == ()
    (name,) = [file.name for file in done.manifest.files if file.tensors]
    key = stages._key("tiny", done.manifest.digest, name)
    body = bytearray(stages.client.get_object(Bucket=stages.bucket, Key=key)["Body"].read())
    body[-1] ^= 1
    stages.client.put_object(Bucket=stages.bucket, Key=key, Body=bytes(body))
    (finding,) = verify_streamed(done.manifest, done.uri, stages, streamer, "sampled")
    assert finding.startswith(f"{name}: the tensors that engines stream are not those")
