import json
from dataclasses import replace
from hashlib import sha256
from re import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_files import CONFIG, safetensors, tensors, write_model

from resources.weight_sources import DirectorySource, open_source
from warmers.blocks import BLOCK_BYTES, blocks_of, joined
from warmers.errors import ConfigError, WeightsError
from warmers.safetensors import LENGTH_BYTES, header_bytes, parse_header
from warmers.stage import read_header, require_complete
from warmers.verification import verify
from warmers.weights import (
    Manifest,
    SourceFile,
    StagedFile,
    damage,
    digest_of,
    expected_parameters,
    needed,
    plan_stage,
    streamed_path,
)


def parsed(content):
    length = header_bytes(content, len(content))
    return parse_header(content[LENGTH_BYTES : LENGTH_BYTES + length], len(content))


def with_header(**entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


def tensor(start, end, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def test_a_header_says_what_is_in_a_file():
    header = parsed(safetensors(tensors()))
    assert header.parameters == expected_parameters(CONFIG)[0]
    assert header.dtypes == ("F32",)
    assert header.data_bytes == 4 * header.parameters


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "too short"),
        (b"\xff" * 8 + b"x" * 100, "cut off, or no safetensors"),
        (safetensors(tensors())[:-1], "its tensors take"),
        (safetensors(tensors()) + b"x", "its tensors take"),
        ((4).to_bytes(8, "little") + b"nope", "no JSON"),
        ((2).to_bytes(8, "little") + b"[]", "no JSON object"),
        (with_header(a=tensor(0, 16), b=tensor(8, 24)), "'b' overlaps the one before it"),
        (with_header(a=tensor(0, 16), b=tensor(24, 40)), "'b' leaves a hole of 8 bytes"),
        (with_header(a=tensor(0, 16, shape=(3,))), "16 bytes are not [3] numbers of F32"),
        (with_header(a=tensor(0, 16, dtype="F33")), "unknown dtype 'F33'"),
        (with_header(a=tensor(-16, 0)), "are no counts"),
        (with_header(a={"dtype": "F32"}), "has no dtype, shape and data_offsets"),
        (with_header(a=tensor(0, 16)), "its tensors take 16 bytes, and the file has 64"),
    ],
)
def test_a_damaged_file_is_named_for_what_it_is(content, says):
    with pytest.raises(ValueError, match=escape(says)):
        parsed(content)


def look_at(source):
    files = needed(source.files(), "m")
    headers = {file.name: header for file in files if (header := read_header(source, file))}
    require_complete(source, files, headers)


def edit(name, change):
    def damaged(directory):
        path = directory / name
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return damaged


def gone(*names):
    def damaged(directory):
        for name in names:
            (directory / name).unlink()

    return damaged


def without_one_tensor(index):
    index["weight_map"].popitem()
    return index


SHARD = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        (gone("config.json"), "there is no config.json"),
        (gone("generation_config.json"), "there is no generation_config.json"),
        (gone("tokenizer.json"), "there is no tokenizer"),
        (edit("tokenizer_config.json", lambda _: {}), "there is no chat template"),
        (gone(SHARD), f"names {SHARD}, which is not there"),
        (gone("model.safetensors.index.json"), "there are 2 shards and no model.safetensors.index.json"),
        (edit("model.safetensors.index.json", without_one_tensor), "does not name tensor"),
        (
            edit("model.safetensors.index.json", lambda i: i | {"metadata": {"total_size": 1}}),
            "says 1 bytes of tensors",
        ),
        (edit("model.safetensors.index.json", lambda _: {}), "has no weight_map"),
        (edit("config.json", lambda c: c | {"num_hidden_layers": 3}), "describes a model of"),
        (edit("config.json", lambda c: [c]), "config.json"),
        (lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes()[:-4]), f"reading {SHARD}"),
    ],
)
def test_what_an_engine_could_not_load_is_not_staged(tmp_path, damaged, says):
    source = DirectorySource(write_model(tmp_path / "m"))
    look_at(source)
    damaged(tmp_path / "m")
    with pytest.raises(WeightsError, match=escape(says)):
        look_at(source)


@pytest.mark.parametrize(
    "files", [["tokenizer.model"], ["vocab.json", "merges.txt"], ["tekken.json"]], ids=lambda files: files[0]
)
def test_a_tokenizer_comes_in_several_forms(tmp_path, files):
    source = DirectorySource(write_model(tmp_path / "m"))
    gone("tokenizer.json")(tmp_path / "m")
    for name in files:
        (tmp_path / "m" / name).write_text("{}")
    look_at(source)


def test_pickles_links_and_escapes_are_refused(tmp_path):
    files = [SourceFile("pytorch_model.bin", 1, ""), SourceFile("config.json", 1, "")]
    with pytest.raises(WeightsError, match="pickles"):
        needed(files, "m")
    both = needed([*files, SourceFile("model.safetensors", 1, ""), SourceFile("README.md", 1, "")], "m")
    assert [file.name for file in both] == ["config.json", "model.safetensors"]
    with pytest.raises(WeightsError, match=escape("'../config.json'")):
        needed([SourceFile("../config.json", 1, "")], "m")
    (write_model(tmp_path / "m") / "link.json").symlink_to("config.json")
    with pytest.raises(WeightsError, match=escape("link.json is a symbolic link")):
        DirectorySource(tmp_path / "m").files()


@pytest.mark.parametrize("text", ["hf://name", "ftp://x/y", "s3://", "hf://a/b/c"])
def test_a_source_that_nobody_knows(text):
    with pytest.raises(ConfigError, match=escape(text)):
        open_source(text)


def staged(name, content, **more):
    return StagedFile(name, len(content), sha256(content.encode()).hexdigest(), **more)


def test_the_digest_is_of_names_and_contents_alone():
    one, two = staged("a", "1"), staged("b", "2")
    assert digest_of([one, two]) == digest_of([replace(two, version="x"), one])
    assert digest_of([one]) != digest_of([one, two]) != digest_of([one, staged("b", "3")])
    assert digest_of([staged("a", "2"), staged("b", "1")]) != digest_of([one, two])


def test_a_plan_keeps_copies_and_sends():
    one, two, three = staged("a", "1"), staged("b", "22"), staged("c", "333")
    steps = plan_stage([one, two, three], {"a": (1, one.sha256), "b": (2, "another")}, {two.sha256: "d" * 64})
    assert [(s.file.name, s.how, s.copied_from) for s in steps] == [
        ("c", "send", ""), ("b", "copy", "d" * 64), ("a", "keep", ""),
    ]  # fmt: skip


def test_a_manifest_comes_back_and_says_what_a_listing_lacks():
    files = (staged("a", "1", dtypes=("F32",), blocks=("7",)), staged("b", "22"), staged("c", "333"))
    manifest = Manifest("m", digest_of(files), "here", "", files)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert damage(manifest, {"a": 1, "b": 2, "c": 3}) == ()
    assert damage(manifest, {"a": 1, "b": 1, "x": 9}) == (
        "b has 1 bytes, not 2", "c is missing", "x does not belong to it",
    )  # fmt: skip
    with pytest.raises(WeightsError, match="Stage the model again"):
        Manifest.from_json(b'{"format": 99}')


def test_the_model_string_of_a_stage_is_the_one_that_vllm_makes():
    uri = "s3://models/models/m/" + "a" * 64
    assert streamed_path(uri, "/cache/") == "/cache/model_streamer/" + sha256(uri.encode()).hexdigest()[:8]
    assert streamed_path(uri + "/", "/cache") != streamed_path(uri, "/cache")


@given(st.lists(st.binary(max_size=40)), st.integers(1, 16))
def test_joined_pieces_are_the_same_bytes(pieces, size):
    found = list(joined(iter(pieces), size))
    assert b"".join(found) == b"".join(pieces)
    assert all(len(piece) == size for piece in found[:-1])
    assert all(0 < len(piece) <= size for piece in found)


@pytest.mark.parametrize("left", [0, 5, BLOCK_BYTES, BLOCK_BYTES + 5])
def test_an_object_that_became_shorter_since_it_was_listed_is_damaged(left):
    content = bytes(BLOCK_BYTES + 9)
    file = StagedFile("a", len(content), "0" * 64, blocks=tuple(blocks_of(content)))

    class Shrunk:
        def sizes(self, model, digest):
            return {"a": file.bytes}

        def read(self, model, digest, name, start=0, end=None):
            yield content[:left][start:end]

    seen = verify(Manifest("m", "d", "s", "", (file,)), Shrunk(), "full")
    assert seen.damaged == ("a",)
    assert f"between {left // BLOCK_BYTES * BLOCK_BYTES:,}" in seen.findings[0]
