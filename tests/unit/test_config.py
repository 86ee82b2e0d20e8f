from pathlib import Path

import pytest
import yaml

from resources.config import config_path, fleet_names, load_settings, local_directory
from resources.model_files import read_model
from warmers.errors import ConfigError

FLEET = {
    "name": "chat",
    "model": {"name": "m", "directory": "model"},
    "engine": {"vllm": "0.32.0", "lmcache": "0.5.6", "dtype": "float32"},
    "prompts": {"directory": "prompts"},
}


@pytest.fixture
def write(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "a.txt").write_text("hello")

    def write(*fleets, **top) -> Path:
        path = tmp_path / "warmfront.yaml"
        path.write_text(yaml.safe_dump({"state": "state", "fleets": list(fleets)} | top))
        return path

    return write


def test_paths_are_relative_to_the_file(write, tmp_path, monkeypatch):
    path = write(FLEET)
    monkeypatch.chdir("/")
    settings = load_settings(path)
    assert settings.state == str(tmp_path / "state")
    assert settings.fleets[0].prompts.directory == str(tmp_path / "prompts")
    remote = write(FLEET, state="s3://bucket/wf", local={"directory": "here"})
    assert load_settings(remote).state == "s3://bucket/wf"
    assert local_directory(remote) == tmp_path / "here"
    with pytest.raises(ConfigError, match=r"local\.directory"):
        load_settings(write(FLEET, state="s3://bucket/wf"))


def test_the_stack_is_found_whatever_else_is_wrong(write, tmp_path):
    assert local_directory(write({**FLEET, "colour": 1, "model": {}})) == tmp_path / "state"


@pytest.mark.parametrize(
    ("fleets", "named"),
    [
        ([{**FLEET, "colour": 1}], r"fleets\.chat\.colour: Extra inputs"),
        ([{**FLEET, "engine": {**FLEET["engine"], "dtype": "int3"}}], r"fleets\.chat\.engine\.dtype"),
        ([{**FLEET, "engine": {**FLEET["engine"], "chunk_tokens": 200}}], r"fleets\.chat\.engine.*multiple of block"),
        ([{**FLEET, "name": "No_Label"}], r"fleets\.No_Label\.name"),
        ([{k: v for k, v in FLEET.items() if k != "prompts"}], r"fleets\.chat\.prompts: Field required"),
        ([FLEET, FLEET], "two fleets are named 'chat'"),
        ([{**FLEET, "prompts": {"directory": "p", "timezone": "Mars"}}], r"fleets\.chat\.prompts\.timezone: 'Mars'"),
        ([{**FLEET, "model": {"name": "m", "directory": "gone"}}], r"fleets\.chat\.model\.directory"),
        ([{**FLEET, "l2": {"url": "redis://u:secret@h:1"}}], r"fleets\.chat\.l2\.url.*password_env"),
        ([{**FLEET, "l2": {"url": "redis://h/3"}}], "database 0 alone"),
        ([{**FLEET, "l2": {"type": "tape"}}], r"fleets\.chat\.l2.*none that is known: valkey, fs"),
        (
            [{**FLEET, "l2": {"type": "fs", "directory": "nowhere"}}],
            r"fleets\.chat\.l2\.directory: there is no directory",
        ),
        (
            [{**FLEET, "model": {**FLEET["model"], "adapters": [{"name": "m", "directory": "prompts"}]}}],
            "two of them have one name, or the model's",
        ),
        ([], "fleets"),
    ],
)
def test_a_fault_names_file_and_field(write, fleets, named):
    path = write(*fleets)
    with pytest.raises(ConfigError, match=named) as error:
        load_settings(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["a: [", "- just a list", "\xff", "state: 2026-13-45"])
def test_a_broken_file_is_a_config_error_and_still_gives_a_partition(tmp_path, text):
    path = tmp_path / "warmfront.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=str(path)):
        load_settings(path)
    assert fleet_names(path) == ["unconfigured"]
    with pytest.raises(ConfigError, match="no such file"):
        load_settings(tmp_path / "gone.yaml")


def test_fleet_names_survive_a_broken_field(write):
    assert fleet_names(write({**FLEET, "colour": 1}, {"name": "other"}, {"name": "a...b"})) == ["chat", "other"]


def test_choosing_a_fleet(write):
    settings = load_settings(write(FLEET, {**FLEET, "name": "other"}))
    assert settings.fleet("other").name == "other"
    with pytest.raises(ConfigError, match=r"several fleets.*chat, other"):
        settings.fleet(None)
    with pytest.raises(ConfigError, match="no fleet 'x'"):
        settings.fleet("x")


def test_the_environment_names_the_file(monkeypatch, tmp_path):
    monkeypatch.setenv("WARMFRONT_CONFIG", str(tmp_path / "x.yaml"))
    assert config_path() == tmp_path / "x.yaml"
    monkeypatch.delenv("WARMFRONT_CONFIG")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "warmfront.yaml").touch()
    assert config_path() == tmp_path / "warmfront.yaml"


def test_a_model_without_weights_is_refused(write, tmp_path):
    (tmp_path / "model" / "config.json").write_text('{"num_hidden_layers": 1, "num_attention_heads": 1}')
    settings = load_settings(write(FLEET)).fleets[0]
    with pytest.raises(ConfigError, match="safetensors"):
        read_model(settings.model.directory, "m", tmp_path / "served")


def test_weights_come_from_a_directory_or_a_source_and_never_from_both(write, tmp_path):
    model = {"name": "m", "directory": "model"}
    settings = load_settings(write({**FLEET, "model": {"name": "m", "source": "hf://org/name@abc"}}))
    assert settings.fleets[0].model.source == "hf://org/name@abc"
    settings = load_settings(write({**FLEET, "model": {"name": "m", "source": "model"}}))
    assert settings.fleets[0].model.source == str(tmp_path / "model")
    for wrong in ({"name": "m"}, {**model, "source": "x"}):
        with pytest.raises(ConfigError, match="give either directory or source"):
            load_settings(write({**FLEET, "model": wrong}))
