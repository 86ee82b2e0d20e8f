import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from resources.local_objects import LocalObjects
from resources.prompts import NOTHING, PromptSource
from warmers.variations import varying_lines

SAMPLES = Path("deploy/local/prompts")
CHAT = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "{{ question }}"}]}


@pytest.fixture
def read(tmp_path):
    def read(before=NOTHING, **files):
        for name, content in files.items():
            path = tmp_path / name.replace("__", ".")
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return PromptSource(LocalObjects(tmp_path)).read(before)

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
        ("e__json", json.dumps({**CHAT, "adapter": ""}), "adapter: String should have at least 1 character"),
        ("e__json", json.dumps({**CHAT, "name": "good"}), "its name 'good' is that of"),
        ("e__json", json.dumps({**CHAT, "name": "a/b"}), "name: 'a/b' has a / in it"),
        ("e__json", json.dumps({**CHAT, "name": "good@now"}), "ends in .candidate or @now"),
        ("e__json", json.dumps({**CHAT, "name": "good.candidate"}), "ends in .candidate or @now"),
        ("e__json", json.dumps({**CHAT, "contexts": [{"name": "c", "documents": [{"url": "x"}]}]}), "a document with"),
        # What Python says of these is nobody's concern; that other files are read is.
        ("e__json", r'{"messages": [{"role": "user", "content": "\ud83d"}]}', "UnicodeEncodeError"),
        ("e__yaml", f"messages: {CHAT['messages']}\nprobes: {{2026-01-01: x}}", "probes"),
        ("e__yaml", f"messages: {CHAT['messages']}\nprobes: {{a: {{2026-01-01: x}}}}", "TypeError"),
        ("e__yaml", f"messages: {CHAT['messages']}\ntools: [{{day: 2026-01-01}}]", "tools: not what JSON can say"),
        ("e__yaml", f"messages: {CHAT['messages']}\ntools: [{{price: .nan}}]", "tools: not what JSON can say"),
        ("e__yaml", f"messages: {CHAT['messages']}\nprobes: {{a: &x [*x]}}", "ValueError"),
        (
            "e__json",
            json.dumps({"messages": [{"role": "user", "content": "{{ " + "(" * 400 + "x" + ")" * 400 + " }}"}]}),
            "nested too deeply",
        ),
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


def test_a_name_stays_with_the_file_that_had_it(read, tmp_path):
    before = read(z_old__json=json.dumps({**CHAT, "name": "support"})).listing
    both = read(before, a_new__json=json.dumps({**CHAT, "name": "support", "salt": "s"}))
    assert [(t.source, t.salt) for t in both.templates] == [("z_old.json", "")]
    assert [f.source for f in both.failed] == ["a_new.json"]
    assert "is that of z_old.json" in both.failed[0].reason
    broken = read(both.listing, z_old__json="{")  # its last good version is in force, and so is its name
    assert [f.source for f in broken.failed] == ["a_new.json", "z_old.json"]
    renamed = read(both.listing, z_old__json=json.dumps({**CHAT, "name": "sales"}))
    assert sorted((t.name, t.source) for t in renamed.templates) == [("sales", "z_old.json"), ("support", "a_new.json")]


def test_a_look_reads_what_changed_and_agrees_with_reading_everything(tmp_path):
    class Counting(LocalObjects):
        def read(self, path):
            reads.append(path)
            return super().read(path)

    def look():
        nonlocal before
        reads.clear()
        files = source.stamps()
        changed = source.changed(before, files)
        if changed:
            before = source.look(before, files, changed)
        assert before.templates.keys() == source.read(before).listing.templates.keys() | kept
        read = sorted(reads[: len(reads) - everything])
        return sorted(changed), read

    reads, before, kept = [], NOTHING, set()
    source = PromptSource(Counting(tmp_path))
    rag = {"messages": [{"role": "user", "content": "{{ context }} {{ question }}"}]}
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "one.txt").write_text("ONE")
    (tmp_path / "rag.json").write_text(json.dumps({**rag, "contexts": [{"name": "one", "file": "docs/one.txt"}]}))
    (tmp_path / "plain.md").write_text("Hello.")
    everything = 3
    assert look() == (["plain.md", "rag.json"], ["docs/one.txt", "plain.md", "rag.json"])
    assert look() == ([], [])
    (tmp_path / "docs" / "one.txt").write_text("ONE and more")
    (tmp_path / "docs" / "other.txt").write_text("nobody names it")
    digest = before.digest
    assert look() == (["rag.json"], ["docs/one.txt", "rag.json"])
    assert before.digest != digest
    (tmp_path / "docs" / "one.txt").unlink()
    everything, kept = 2, {"rag", "rag/one"}
    assert look() == (["rag.json"], ["rag.json"])
    assert "no file docs/one.txt" in before.broken["rag.json"]
    assert look() == ([], [])
    (tmp_path / "docs" / "one.txt").write_text("ONE")
    everything, kept = 3, set()
    assert look() == (["rag.json"], ["docs/one.txt", "rag.json"])
    assert not before.broken
    (tmp_path / "plain.md").unlink()
    everything = 2
    assert look() == (["plain.md"], [])
    assert set(before.templates) == {"rag", "rag/one"}


def test_what_changes_while_it_is_read_is_not_taken_half_written(tmp_path):
    class Written(LocalObjects):
        def read(self, path):
            found = super().read(path)
            if path == "a.md":
                (tmp_path / "a.md").write_text(found[0].decode() + " and more")
            return found

    (tmp_path / "a.md").write_text("Half")
    (tmp_path / "b.md").write_text("Whole.")
    source, files = PromptSource(Written(tmp_path)), PromptSource(LocalObjects(tmp_path)).stamps()
    seen = source.look(NOTHING, files, source.changed(NOTHING, files))
    assert set(seen.templates) == {"b"}
    assert not seen.broken
    assert set(source.changed(seen, source.stamps())) == {"a.md"}
    read = source.read(seen)
    assert [t.name for t in read.templates] == ["b"]
    assert "while it was read" in read.failed[0].reason


def test_a_circle_of_links_and_a_folder_that_goes_away_cost_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "a.md").write_text("Whole.")
    (tmp_path / "circle.md").symlink_to("circle.md")
    (tmp_path / "linked.md").symlink_to("a.md")
    (tmp_path / "out.md").symlink_to("/etc/hostname")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "one.txt").write_text("ONE")
    source = PromptSource(LocalObjects(tmp_path))
    assert set(source.stamps()) == {"a.md", "linked.md", "docs/one.txt"}
    real = os.scandir

    def scandir(path):
        if str(path).endswith("docs"):
            shutil.rmtree(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert set(source.stamps()) == {"a.md", "linked.md"}
