import json

import pytest

from resources.adapter_files import read_adapter
from resources.replica_commands import adapter_argv
from warmers.errors import ConfigError
from warmers.salts import Adapter


@pytest.fixture
def write(tmp_path):
    def write(config='{"r": 8}', weights=b"weights"):
        (tmp_path / "adapter_config.json").write_text(config)
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        return tmp_path

    return write


def test_another_revision_is_another_salt_and_what_else_lies_there_none(write):
    one = read_adapter("org/sql", write())
    assert one.salt.startswith("org-sql-")
    (write() / "README.md").write_text("Trained on Tuesday.")
    assert read_adapter("org/sql", write()) == one
    others = [
        read_adapter("org-sql", write()),
        read_adapter("org/sql", write('{"r": 16}')),
        read_adapter("org/sql", write(weights=b"others")),
    ]
    assert len({one.salt, *(other.salt for other in others)}) == 4


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"r": "8"}', '{"r": 0}', '{"r": true}'])
def test_a_config_without_a_rank_is_refused(write, config):
    with pytest.raises(ConfigError, match=r"LoRA adapter 'sql'.*adapter_config\.json"):
        read_adapter("sql", write(config))


def test_what_cannot_be_read_is_said(write, monkeypatch):
    def stale(*_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("resources.adapter_files.digest_files", stale)
    with pytest.raises(ConfigError, match=r"LoRA adapter 'sql'.*Stale file handle"):
        read_adapter("sql", write())


def test_pickled_weights_are_refused(write, tmp_path):
    (write() / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigError, match="pickled weights are refused"):
        read_adapter("sql", tmp_path)


def test_the_engine_has_room_for_all_of_them_at_once():
    adapters = [Adapter("a", "/a", "1", 8), Adapter("b=c", "/b", "2", 20)]
    argv = adapter_argv(adapters)
    assert argv[argv.index("--max-loras") + 1] == "2"
    assert argv[argv.index("--max-lora-rank") + 1] == "32"
    assert json.loads(argv[argv.index("--lora-modules") + 2]) == {"name": "b=c", "path": "/b"}
    with pytest.raises(ConfigError, match=r"'c'.*513.*512 at most"):
        adapter_argv([*adapters, Adapter("c", "/c", "3", 513)])
