"""Real servers, started here: Valkey by the embedded stack, an S3 API by moto."""

import json
import sys
from contextlib import contextmanager
from uuid import uuid4

import pytest
from valkey_servers import Certificates, server

from resources.local_stack import LocalStack
from resources.processes import Processes, free_port
from resources.valkey_store import ValkeyStore


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    stack = LocalStack(tmp_path_factory.mktemp("stack"), on_event=lambda _: None)
    with stack.processes.locked():
        stack.ensure()
    yield stack
    stack.down()


@pytest.fixture
def valkey(stack):
    return ValkeyStore.at(stack.valkey_url())


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """Of a private CA."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(tmp_path_factory, certificates):
    """A server with TLS, for tests that add users to it."""
    with server(tmp_path_factory.mktemp("secure"), certificates) as started:
        yield started


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory):
    import httpx

    processes, port = Processes(tmp_path_factory.mktemp("moto")), free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

    def answers():
        try:
            return httpx.get(f"{url}/moto-api/").is_success
        except httpx.HTTPError:
            return False

    with processes.locked():
        processes.start("moto", argv, url=url, spec="")
        processes.wait("moto", answers, 60, lambda _: None)
    yield url
    processes.stop("moto")


@pytest.fixture
def s3_uri(s3_endpoint, monkeypatch):
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"wf-{uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/state"


@pytest.fixture
def s3_away(s3_uri, monkeypatch):
    """While the block lasts, nobody answers where the S3 API was."""
    from s3fs import S3FileSystem

    @contextmanager
    def away():
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
            S3FileSystem.clear_instance_cache()
            yield
        S3FileSystem.clear_instance_cache()

    return away


@pytest.fixture
def workspace_file(tmp_path, stack):
    """A complete warmfront.yaml with a fleet `chat` on the real Valkey, its templates and a tiny model directory."""
    return write_workspace(tmp_path, stack)


@pytest.fixture(scope="module")
def workspace_of_module(tmp_path_factory, stack):
    """The same, for tests that change nothing."""
    return write_workspace(tmp_path_factory.mktemp("workspace"), stack)


def write_workspace(directory, stack):
    model, prompts = directory / "model", directory / "prompts"
    model.mkdir()
    prompts.mkdir()
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2}
    (model / "config.json").write_text(json.dumps(shape))
    (model / "model.safetensors").write_bytes(uuid4().bytes)
    (model / "tokenizer.json").write_text("{}")
    (prompts / "support.md").write_text("You help customers. " * 5)
    (prompts / "sales.md").write_text("You help customers. " * 3 + "You sell things to them. " * 4)
    (prompts / "short.md").write_text("Hi")
    settings = {
        "state": "state",
        "fleets": [
            {
                "name": "chat",
                "model": {"name": "m", "directory": "model"},
                "engine": {
                    "vllm": "0.32.0", "lmcache": "0.5.6", "dtype": "float32", "block_tokens": 8, "chunk_tokens": 16,
                },
                "l2": {"url": stack.valkey_url()},
                "prompts": {"directory": "prompts"},
                "warm": {"visible_deadline_s": 1.0},
            }
        ],
    }  # fmt: skip
    path = directory / "warmfront.yaml"
    path.write_text(json.dumps(settings))
    return path
