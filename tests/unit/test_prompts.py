import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from resources.objects import LocalObjects
from resources.prompts import PromptSource
from warmers.prefixes import varying_lines

SAMPLES = Path("deploy/local/prompts")
CHAT = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "{{ question }}"}]}


@pytest.fixture
def read(tmp_path):
    def read(**files):
        for name, content in files.items():
            path = tmp_path / name.replace("__", ".")
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return PromptSource(LocalObjects(tmp_path)).read()

    return read


def contents(template, rendering=0):
    return [message["content"] for message in template.renderings[rendering]]


def test_a_text_file_is_a_system_prompt_and_its_braces_are_text(read):
    prompts = read(hello__md='Say {{ this }} and {% endraw %} to the "letter".\n')
    assert contents(prompts.templates[0])[0] == 'Say {{ this }} and {% endraw %} to the "letter".\n'
    users = [contents(prompts.templates[0], i)[1] for i in range(6)]
    assert len({user[:1] for user in users}) == 6


def test_yaml_and_json_with_the_same_keys_are_the_same(read):
    text = json.dumps({"name": "same", **CHAT})
    one = read(a__json=text).templates[0]
    (other,) = read(a__json="", b__yaml=yaml.safe_dump(json.loads(text), sort_keys=False)).templates
    assert (one.digest, one.name) == (other.digest, other.name)


def test_contexts_make_prefixes_of_their_own(read, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "one.txt").write_text("ONE")
    (tmp_path / "docs" / "two.txt").write_text("TWO")
    body = {
        "messages": [{"role": "user", "content": "Read {{ context }} and answer {{ question }}"}],
        "contexts": [
            {"name": "f", "file": "docs/one.txt"},
            {"name": "t", "text": "TEXT"},
            {"name": "d", "documents": ["docs/two.txt", {"text": "three"}, {"file": "docs/one.txt"}]},
        ],
    }
    templates = read(rag__json=json.dumps(body)).by_label()
    assert list(templates) == ["rag", "rag/f", "rag/t", "rag/d"]
    assert contents(templates["rag/d"])[0].startswith("Read TWO\n\nthree\n\nONE and answer ")
    assert len({contents(templates["rag"], i)[0] for i in range(6)}) == 6


def test_every_placeholder_varies_whatever_its_probes(read):
    system = "{{ tone }}|{{ today }}|{{ request_id }}|{{ ticket.title }}|{{ knowledge }}|{{ strftime_now('%Y') }}"
    body = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "{{ question }}"}],
        "probes": {"tone": "calm", "question": [f"q{n}" for n in range(7)]},
    }
    (template,) = read(t__json=json.dumps(body)).templates
    assert len(template.renderings) == 8
    columns = list(zip(*(contents(template, i)[0].split("|") for i in range(8)), strict=True))
    assert all(len(set(column)) > 1 for column in columns)
    assert "calm" in columns[0]
    assert "object at" not in "".join(columns[3])
    assert len({value[:1] for value in columns[4]}) > 2


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("e__yaml", "", "it is empty"),
        ("e__txt", b"\xff\xfe", "not UTF-8"),
        ("e__yaml", "a: [", "while parsing"),
        ("e__json", "[1]", "no mapping"),
        ("e__json", json.dumps({**CHAT, "color": 1}), "color: Extra inputs"),
        ("e__json", json.dumps({"messages": [{"role": "user"}]}), "message 1 needs a role and a content"),
        ("e__json", json.dumps({"messages": [{"role": "user", "content": "{{ x"}]}), "Jinja, line 1"),
        ("e__json", json.dumps({"messages": [{"role": "user", "content": "{{ 1 / 0 }}"}]}), "ZeroDivisionError"),
        ("e__json", json.dumps({**CHAT, "contexts": [{"name": "c", "file": "gone.txt"}]}), "there is no file"),
        (
            "e__json",
            json.dumps({**CHAT, "contexts": [{"name": "c", "file": "../x"}]}),
            "no file ../x below its directory",
        ),
        ("e__json", json.dumps({**CHAT, "contexts": [{"name": "c"}]}), "exactly one of file, text, documents"),
        ("e__json", json.dumps({**CHAT, "salt": "a@b"}), "salt"),
        ("e__json", json.dumps({**CHAT, "adapter": "legal"}), "LoRA adapters cannot be warmed yet"),
        ("e__json", json.dumps({**CHAT, "name": "good"}), "its name 'good' is that of"),
    ],
)
def test_a_bad_file_is_reported_and_harms_no_other(read, name, content, named):
    prompts = read(a_good__json=json.dumps({**CHAT, "name": "good"}), **{name: content})
    assert [t.name for t in prompts.templates] == ["good"]
    assert len(prompts.failed) == 1
    assert named in prompts.failed[0].reason
    assert "e." in prompts.failed[0].template


def test_the_digest_follows_content_names_and_deletions(read, tmp_path):
    one = read(a__json=json.dumps(CHAT)).digest
    assert read(a__json=json.dumps(CHAT)).digest == one
    assert read(a__json=json.dumps({**CHAT, "salt": "s"})).digest != one
    assert read(a__json=json.dumps(CHAT), b__md="x").digest != one
    (tmp_path / "b.md").unlink()
    assert read(a__json=json.dumps(CHAT)).digest == one


def test_the_samples_are_what_the_readme_says():
    subprocess.run([sys.executable, "deploy/local/make_topics.py", str(SAMPLES / "topics")], check=True)
    prompts = PromptSource(LocalObjects(SAMPLES)).read()
    assert prompts.failed == ()
    by_label = prompts.by_label()
    assert sum(label.startswith("rag_assistant/") for label in by_label) == 8
    assert len(by_label["operations_agent"].options.tools) >= 12
    one, two = contents(by_label["release_notes"])[0], contents(by_label["review_summary"])[0]
    assert one == two
    assert any("Today is" in v.values[0] for v in varying_lines(by_label["dated_assistant"].renderings))
