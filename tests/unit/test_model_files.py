import json

import pytest

from resources.model_files import clock_texts, read_model
from warmers.errors import ConfigError, TemplateError
from warmers.templates import RenderOptions

CONFIG = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
MESSAGES = [{"role": "system", "content": "hi"}]


@pytest.fixture
def model(tmp_path):
    def write(template="{{ messages[0].content }}", weights=b"w", **config):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
        (tmp_path / "model.safetensors").write_bytes(weights)
        (tmp_path / "tokenizer.json").write_text("{}")
        config = {"chat_template": template, "bos_token": {"content": "<|begin|>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return read_model(tmp_path, "m", tmp_path / "served")

    return write


def test_shape_and_digests(model):
    one = model()
    assert (one.shape.layers, one.shape.kv_heads, one.shape.head_dim) == (3, 2, 8)
    assert one.path.endswith(one.weights_digest[:16])
    other = model(weights=b"x")
    assert one.weights_digest != other.weights_digest
    assert one.tokenizer_digest == other.tokenizer_digest
    assert model(head_dim=99, num_key_value_heads=None).shape.kv_heads == 8


def test_a_chat_template_that_reads_the_clock_is_rendered_with_two(model):
    clocked = "{% set d = strftime_now('%d %B') %}{{ bos_token }}{{ messages[0].content }} on {{ d }}"
    first, second = clock_texts(model(clocked), MESSAGES, RenderOptions())
    assert (first, second) == ("<|begin|>hi on 15 January", "<|begin|>hi on 28 December")
    assert clock_texts(model(), MESSAGES, RenderOptions()) is None
    unused = "{% if false %}{{ strftime_now('%d') }}{% endif %}x"
    assert clock_texts(model(unused), MESSAGES, RenderOptions()) is None


def test_every_file_that_may_shape_tokens_is_in_the_tokenizer_digest(model, tmp_path):
    before = model()
    (tmp_path / "added_tokens.json").write_text("{}")
    after = model()
    assert (before.weights_digest, before.tokenizer_digest != after.tokenizer_digest) == (after.weights_digest, True)


def test_several_chat_templates_of_which_one_reads_the_clock_are_refused(model):
    plain = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}]
    assert model(plain).chat_template == "x"
    plain[1]["template"] = "{{ strftime_now('%d') }}"
    with pytest.raises(ConfigError, match="default, tool_use"):
        model(plain)


def test_a_clock_that_cannot_be_rendered_here_is_an_error(model):
    with pytest.raises(TemplateError, match="reads the clock"):
        clock_texts(model("{{ strftime_now('%d') }}{{ nobody.knows.this }}"), MESSAGES, RenderOptions())


def test_a_directory_that_is_no_model(tmp_path):
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file"):
        read_model(tmp_path, "m", tmp_path)
