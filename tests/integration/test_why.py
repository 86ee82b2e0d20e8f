"""`warmfront why` by its printed text, a row a case: real Valkey, state and templates, a fake engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from fakes import FakedWorkspace

import pipelines.cli
from pipelines.definitions import build_defs

RULES = "\n".join(f"Rule {n}: answer in at most {n} sentences." for n in range(1, 9))
TOOLS = [{"type": "function", "function": {"name": n, "description": f"To {n}."}} for n in ("find", "order", "refund")]


class Case:
    """A warmed fleet of two ranks, and the request that a client sends."""

    def __init__(self, workspace_file):
        settings = json.loads(workspace_file.read_text())
        settings["fleets"][0]["engine"]["tensor_parallel"] = 2
        workspace_file.write_text(json.dumps(settings))
        self.prompts = workspace_file.parent / "prompts"
        self.system = f"You help customers of a shop.\nToday is Monday, 30 November 2026.\n{RULES}"
        self.write("agent", self.system, tools=TOOLS)
        dated = f"{RULES}\nToday is {{{{ today }}}}.\n{RULES.replace('Rule', 'Law')}"
        self.write("dated", dated)
        self.write("tenant", "Each tenant has prompts of its own, and this is the one. " * 2, salt="tenant-7")
        question = {"messages": [{"role": "user", "content": "Q: {{ question }}"}]}
        (self.prompts / "short.json").write_text(json.dumps(question))
        self.workspace = FakedWorkspace(workspace_file, on_event=lambda _: None)
        self.request = self.asked(self.system, tools=TOOLS)
        self.engine_runs = True

    def write(self, name, system, **more):
        body = {"messages": [{"role": "system", "content": system}], **more}
        (self.prompts / f"{name}.json").write_text(json.dumps(body))

    def asked(self, system, **more):
        user = {"role": "user", "content": "Where is my parcel?"}
        return {"model": "m", "temperature": 0, "messages": [{"role": "system", "content": system}, user], **more}

    def warm(self):
        with dg.DagsterInstance.ephemeral() as instance:
            job = build_defs(self.workspace).resolve_job_def("warm")
            assert job.execute_in_process(partition_key="chat", instance=instance).success

    def names(self, label):
        fleet = self.workspace.fleet("chat")
        plan = self.workspace.plan(fleet, self.workspace.state.prefixes("chat"))
        (number,) = [n for n, prefix in enumerate(plan.prefixes) if prefix.label == label]
        return [name for chunk in plan.tree.paths[number] for name in plan.tree.names_of([chunk])]


@pytest.fixture(scope="module")
def case(workspace_of_module):
    case = Case(workspace_of_module)
    case.warm()
    return case


@pytest.fixture
def ask(case, monkeypatch, tmp_path, capsys):
    def ask(request, *more, engine=True):
        file = tmp_path / "request.json"
        file.write_text(request if isinstance(request, str) else json.dumps(request))
        monkeypatch.setattr(pipelines.cli, "_workspace", lambda: case.workspace)
        monkeypatch.setattr(sys, "argv", ["warmfront", "why", str(file), *more])
        running = type("Replicas", (), {"running": lambda self, fleet: case.workspace.engine if engine else None})()
        monkeypatch.setattr(FakedWorkspace, "replicas", lambda self, name: running)
        with pytest.raises(SystemExit) as ended:
            pipelines.cli.main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return ask


def swapped(case):
    return case.asked(case.system, tools=[TOOLS[0], TOOLS[2], TOOLS[1]])


def other_day(case):
    return case.asked(case.system.replace("Monday, 30 November", "Tuesday, 1 December"), tools=TOOLS)


def day_put_in(case):
    return case.asked(case.system.replace("Rule 3", "It is 2026-12-01.\nRule 3"), tools=TOOLS)


def reworded_tool(case):
    tools = json.loads(json.dumps(TOOLS))
    tools[1]["function"]["description"] = "To order more."
    return case.asked(case.system, tools=tools)


def without_salt(case):
    return case.asked("Each tenant has prompts of its own, and this is the one. " * 2)


def date_in_a_placeholder(case):
    return case.asked(f"{RULES}\nToday is Tuesday.\n{RULES.replace('Rule', 'Law')}")


def other_role(case):
    request = json.loads(json.dumps(case.request))
    request["messages"][0]["role"] = "developer"
    return request


def only_a_question(case):
    return {"model": "m", "messages": [{"role": "user", "content": "Q: Where is my parcel?"}]}


ROWS = [
    ("hits", lambda case: case.request, 0, ["nearest to agent", "keys are in L2"], ["- ", "missing"]),
    (
        "a date",
        other_day,
        2,
        ["message 1 (system), line 2", "Monday, 30 Nov", "Tuesday, 1 Dec", "looks like a date"],
        [],
    ),
    ("a date put in", day_put_in, 2, ["message 1 (system), line 5", "It is 2026-12-01.", "like a date"], []),
    ("tool order", swapped, 2, ["tool 2", "'order'", "'refund'", "Same tools, other order"], []),
    ("tool JSON", reworded_tool, 2, ["tool 2 (order)", "To order more", "JSON differs"], []),
    ("no tools", lambda case: case.asked(case.system), 2, ["tool 1", "(no tool)"], []),
    (
        "model",
        lambda case: {**case.request, "model": "m-v2"},
        2,
        ["hits 0 of", "model 'm-v2'", "serves 'm'", '"model": "m"'],
        [],
    ),
    ("no salt", without_salt, 2, ["no cache_salt", "'tenant-7'", "hits 0 of"], []),
    ("placeholder", date_in_a_placeholder, 2, ["nearest to dated", "Today is", "Move what varies"], []),
    ("too short", only_a_question, 2, ["nearest to short", "short of one chunk: it can never hit"], ["missing"]),
    (
        "wrong salt",
        lambda case: {**case.request, "cache_salt": "s"},
        2,
        ["hits 0 of", "cache_salt 's'", "warmed with no"],
        [],
    ),
    ("none", lambda case: case.asked("Translate this into Latin, please."), 2, ["starts like none of the"], []),
    ("role", other_role, 2, ["message 1 (system)", "'developer'", "Send the template's roles"], []),
]


@pytest.mark.parametrize("engine", [True, False], ids=["engine", "no-engine"])
@pytest.mark.parametrize(
    ("request_of", "code", "says", "not_said"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_it_says_where_and_what_to_do(case, ask, request_of, code, says, not_said, engine):
    got, out, err = ask(request_of(case), engine=engine)
    assert got == code, out + err
    for text in says:
        if engine or not text.startswith("hits"):
            assert text in out
    for text in not_said:
        assert text not in out
    assert ("token positions need an engine" in out) == (not engine and "nearest" in out)


def test_a_missing_rank_an_expired_and_a_truncated_chunk(case, ask, valkey):
    names = case.names("agent")
    kept = {name: valkey.client.get(name) for name in names}
    valkey.client.delete(names[3])
    code, out, _ = ask(case.request)
    assert code == 2
    assert "chunk 1 is missing in L2 on rank 1 of 2" in out
    assert f"rank 1: missing  {names[3]}" in out
    assert "evicted or deleted before its time" in out
    assert "hits 16 of" in out
    assert " UTC, 0.0 h ago" in out

    valkey.client.delete(*names)
    case.workspace.__dict__["clock"] = type("Later", (), {"now": lambda self: 4e9})()
    code, out, _ = ask(case.request)
    assert "chunk 0 has expired in L2; it was warmed" in out
    assert f"rank 0: expired  {names[0]}" in out
    assert f"and {len(names) - 4} more" in out
    assert "raise l2.ttl_s" in out
    del case.workspace.__dict__["clock"]

    for name, value in kept.items():
        valkey.client.set(name, value)
    valkey.client.set(names[0], b"truncated")
    code, out, _ = ask(case.request)
    assert "chunk 0 has a wrong size in L2 on rank 0 of 2" in out
    valkey.client.set(names[0], kept[names[0]])
    assert ask(case.request)[0] == 0


def test_an_engine_whose_model_string_is_another_is_named(case, ask, monkeypatch):
    identity = case.workspace.engine.daemon_identity()
    other = type(identity)(identity.lmcache, identity.chunk_tokens, "blake3", identity.namespaces, ("/models/copy",))
    monkeypatch.setattr(case.workspace.engine, "daemon_identity", lambda: other, raising=False)
    code, out, _ = ask(case.request)
    assert code == 2
    assert "no engine of this model has registered" in out
    assert "hits 0 of" in out


def test_json_is_one_document_and_bad_requests_are_named(case, ask):
    code, out, _ = ask(other_day(case), "--json")
    document = json.loads(out)
    assert code == 2
    assert document["label"] == "agent"
    assert document["divergence"]["where"] == "message 1 (system), line 2"
    assert {chunk["rank"] for chunk in document["chunks"]} == {0, 1}
    for bad, named in [
        ("{", "Expecting"),
        ("{}", "neither messages nor a prompt"),
        ('{"messages": [{}]}', "messages.0.role"),
        ('{"prompt": [1, -1]}', "prompt.list"),
        ('{"prompt": "Hi", "cache_salt": "a@b"}', "cache_salt: salt 'a@b'"),
    ]:
        code, _, err = ask(bad)
        assert code == 2
        assert named in err


def test_token_ids_and_completions_are_understood(case, ask):
    prefix = next(p for p in case.workspace.state.prefixes("chat").found if p.label == "agent")
    code, out, _ = ask({"model": "m", "prompt": [int(i) for i in prefix.rendered]}, engine=False)
    assert (code, "nearest to agent" in out) == (0, True)
    changed = [int(i) for i in prefix.rendered]
    changed[20] += 1
    code, out, _ = ask({"model": "m", "prompt": changed}, engine=False)
    assert code == 2
    assert "at token 20" in out
    assert "as the engine renders the template" in out
    text = {"model": "m", "prompt": "".join(map(chr, prefix.rendered))}
    code, out, _ = ask(text)
    assert (code, "all there is to hit" in out) == (0, True)
    code, out, _ = ask(text, engine=False)
    assert (code, "only an engine can tell its tokens" in out) == (2, True)


def test_a_template_that_nobody_warmed_yet(case, ask):
    case.write("fresh", "You translate letters from Latin, sentence by sentence.")
    for engine in (True, False):
        code, out, _ = ask(case.asked("You translate letters from Latin, sentence by sentence."), engine=engine)
        assert (code, "it is of template 'fresh', which has not been warmed" in out) == (2, True)
    (case.prompts / "fresh.json").unlink()


def test_content_in_parts_reaches_the_engine_as_it_was_sent(case, ask, monkeypatch):
    request, sent = json.loads(json.dumps(case.request)), []
    request["messages"][0]["content"] = [{"type": "text", "text": case.system}]
    ids = case.workspace.engine.tokenize("x")
    monkeypatch.setattr(case.workspace.engine, "render", lambda messages, _: sent.extend(messages) or ids)
    ask(request)
    assert sent == request["messages"]
    code, out, _ = ask(request, engine=False)
    assert (code, "nearest to agent by its text; nothing stands in the way" in out) == (0, True)


def test_why_imports_no_dagster(case, tmp_path):
    (tmp_path / "request.json").write_text(json.dumps(case.request))
    code = (
        "import sys; sys.argv = ['warmfront', 'why', 'request.json']\n"
        "import pipelines.cli\n"
        "try:\n    pipelines.cli.main()\n"
        "finally:\n    assert 'dagster' not in sys.modules\n"
    )
    environment = {**os.environ, "WARMFRONT_CONFIG": str(case.workspace.path), "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nearest to agent" in done.stdout
    assert "78 of 78 keys are in L2" in done.stdout


def test_a_fleet_whose_valkey_has_a_password_is_explained_too(case, valkey, tmp_path):
    valkey.client.execute_command("ACL", "SETUSER", "reader", "on", ">s3cret", "~*", "+@all")
    settings = json.loads(case.workspace.path.read_text())
    settings["fleets"][0]["l2"] |= {"username": "reader", "password_env": "WF_VALKEY_PASSWORD"}
    config = case.workspace.path.with_name("with_password.yaml")
    config.write_text(json.dumps(settings))
    (tmp_path / "request.json").write_text(json.dumps(case.request))
    environment = {**os.environ, "WARMFRONT_CONFIG": str(config), "WF_VALKEY_PASSWORD": "s3cret"}
    argv = [sys.executable, "-m", "pipelines.cli"]
    for command in (("why", str(tmp_path / "request.json")), ("plan",)):
        done = subprocess.run([*argv, *command], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "s3cret" not in done.stdout + done.stderr
