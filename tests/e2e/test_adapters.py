"""LoRA adapters on a real engine: they answer from one another's KV; under the middleware never. Warmed apart, too."""

import json
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from hashlib import sha256

import pytest
from engine_environment import PYTHON, fleet, needs_engine, sentences, write_config

from resources.engine import VllmEngine
from resources.replica_commands import engine_argv
from resources.workspace import Workspace
from warmers.errors import EngineMismatch, EngineRefused
from warmers.identity import require_match
from warmers.ledger import Rows
from warmers.observation import observe
from warmers.proof import choose, judge
from warmers.warm import warm

pytestmark = needs_engine

CHUNKS = 4
WHOLE = CHUNKS * 256
"""Tokens that a hit can bring."""
TOKENS = 16
VISIBLE_S = 20.0
BASE = "tiny"
MIDDLEWARE = ("--middleware", "warmfront_engine.salts.CacheSalts")


@pytest.fixture
def adapters(tiny_model, tmp_path):
    """Two adapters of the model, by name."""
    made = {"a": tmp_path / "a", "b": tmp_path / "b"}
    for seed, out in enumerate(made.values()):
        argv = [PYTHON, "deploy/local/make_adapter.py", tiny_model, out, "--seed", str(seed)]
        subprocess.run(argv, check=True, capture_output=True)
    return made


@pytest.fixture
def put_table(tmp_path, monkeypatch):
    """Replace the table of the engine that is started after this; its digest. There is none at first."""
    path = tmp_path / "salts.json"
    monkeypatch.setenv("WARMFRONT_SALTS", str(path))

    def put_table(table):
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps(table))
        scratch.replace(path)
        return sha256(path.read_bytes()).hexdigest()[:12]

    return put_table


@pytest.fixture
def workspace(tiny_model, adapters, put_table, host, tmp_path, monkeypatch):
    """One whose engine serves the adapters too; without a table at first."""
    host.stack.down()  # two cores carry one engine
    modules = [f"{name}={path}" for name, path in adapters.items()]
    lora = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *modules)
    monkeypatch.setattr("resources.replicas.engine_argv", lambda *given: [*engine_argv(*given), *lora, *MIDDLEWARE])
    workspace = Workspace(write_config(tmp_path, [fleet("adapters", tiny_model)]), on_event=print)
    yield workspace
    workspace.stack.down()


class Served:
    """The replica, by the names of what it serves."""

    def __init__(self, replica, store):
        self.replica, self.store = replica, store
        self.engines = {name: VllmEngine(replica.engine.url, name) for name in (BASE, "a", "b")}
        self.texts = 0

    def close(self):
        for engine in self.engines.values():
            engine.close()

    def prompt(self):
        """Ids of a prompt nobody has seen, a few tokens longer than CHUNKS chunks."""
        self.texts += 1
        return self.replica.engine.tokenize(sentences(f"ledger{self.texts}", 120))[: CHUNKS * 256 + 10]

    def ask(self, name, ids, salt=None):
        """What it says, and how many of the prompt's tokens were cached; returns when its KV is in L2."""
        answer = self.engines[name].generate(ids, max_tokens=TOKENS, salt=salt)
        self.settle()
        return answer.output, answer.cached_tokens

    def settle(self):
        """Wait for LMCache's writes."""
        deadline, last = time.monotonic() + VISIBLE_S, None
        while (now := self.replica.stores()) != last or now.submitted != now.completed:
            assert time.monotonic() < deadline, now
            last = now
            time.sleep(1.0)

    def chunks(self, salt):
        """How many chunks L2 holds under a salt."""
        return sum(1 for key in self.store.client.scan_iter("*") if key.decode().endswith(f"@{salt}"))

    def table(self):
        """Which table the engine says is in force."""
        return self.replica.engine.http.call("GET", "/health").headers["x-warmfront-salts"]

    def invoke(self, ids, adapter=None, **fields):
        """POST /invocations; its status, what it says, and how many tokens were cached."""
        headers = {"x-amzn-sagemaker-adapter-identifier": adapter} if adapter else {}
        body = {"prompt": ids.tolist(), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **fields}
        http = self.replica.engine.http.client
        answer = http.post("/invocations", json=body | {"return_token_ids": True}, headers=headers)
        self.settle()
        if not answer.is_success:
            return answer.status_code, None, None
        document = answer.json()
        details = document["usage"]["prompt_tokens_details"] or {}
        return 200, tuple(document["choices"][0]["token_ids"]), details.get("cached_tokens") or 0


def without_a_table_they_hit_one_another(served):
    assert served.table() == "none"
    for first, second in ((BASE, "a"), ("a", BASE), ("a", "b")):
        ids = served.prompt()
        own, cached = served.ask(second, ids, "control")
        assert cached == 0
        assert served.ask(first, ids)[1] == 0
        wrong, cached = served.ask(second, ids)
        assert cached == WHOLE, f"{second} after {first}"
        assert wrong != own, f"{second} after {first}"


def with_a_table_they_never_do(served):
    for first, second in ((BASE, "a"), ("a", BASE)):
        ids = served.prompt()
        own, cached = served.ask(second, ids, "control")
        assert cached == 0
        assert served.ask(first, ids)[1] == 0
        assert served.ask(second, ids) == (own, 0), f"{second} after {first}"
        assert served.ask(second, ids) == (own, WHOLE)
        served.replica.forget()
        assert served.ask(second, ids) == (own, WHOLE), "from L2"


def keys_end_with_the_salt(served):
    ids, before = served.prompt(), served.chunks("salt-a")
    served.ask("a", ids)
    served.ask("a", ids, "tenant")
    assert served.chunks("salt-a") - before == CHUNKS
    assert served.chunks("salt-a.tenant") == CHUNKS
    assert served.ask("a", ids, "tenant")[1] == WHOLE


def what_would_be_wrong_is_refused(served):
    ids = served.prompt()
    with pytest.raises(EngineRefused, match="neither in `base` nor in `salts`"):
        served.ask("b", ids)
    with pytest.raises(EngineRefused, match="belongs to an adapter"):
        served.ask(BASE, ids, "salt-a")
    with pytest.raises(EngineRefused, match="must not contain '@'"):
        served.ask("a", ids, "x@y")


def invocations_are_for_the_adapter_in_the_header(served):
    ids = served.prompt()
    own, base = served.ask("a", ids)[0], served.ask(BASE, ids)[0]
    assert own != base
    assert served.invoke(ids, "a", model=BASE) == (200, own, WHOLE)
    assert served.invoke(ids, model=BASE) == (200, base, WHOLE)
    assert served.invoke(ids, model="a") == (400, None, None)


def test_adapters_answer_from_one_anothers_kv_and_under_the_middleware_never(workspace, put_table):
    replicas, fleet = workspace.replicas("adapters"), workspace.fleet("adapters")
    with replicas.warmer(fleet) as replica, closing(Served(replica, workspace.store("adapters"))) as served:
        without_a_table_they_hit_one_another(served)
        ids = served.prompt()
        base = served.ask(BASE, ids)[0]
        assert served.invoke(ids, model="a") == (200, base, WHOLE), "/invocations drops the body's model"
        digest = put_table({"base": [BASE], "salts": {"a": "salt-a"}})
        assert served.table() == digest
        with_a_table_they_never_do(served)
        keys_end_with_the_salt(served)
        what_would_be_wrong_is_refused(served)
        invocations_are_for_the_adapter_in_the_header(served)
        put_table({"base": [BASE], "salts": {"a": "salt-a", "b": "salt-b"}})
        assert [served.ask(name, ids)[1] for name in ("a", "b", "b")] == [0, 0, WHOLE]
    log = replicas.processes.log("engine").read_text(errors="replace")
    assert log.count("every request passes unsalted") == 1
    assert f"table {digest} of 1 adapters is in force" in log


@pytest.fixture
def declared(tiny_model, adapters, host, tmp_path):
    """A workspace that knows the adapters by its settings, and one text for each of them, the base and a tenant."""
    host.stack.down()
    (tmp_path / "prompts").mkdir()
    asked = {
        "base": {},
        "for_a": {"adapter": "a"},
        "tenant": {"adapter": "a", "salt": "acme"},
        "for_b": {"adapter": "b"},
    }
    for name, fields in asked.items():
        template = {"messages": [{"role": "system", "content": sentences("ledger", 40)}], **fields}
        (tmp_path / "prompts" / f"{name}.json").write_text(json.dumps(template))
    settings = fleet("declared", tiny_model)
    named = [{"name": name, "directory": str(path)} for name, path in adapters.items()]
    settings["model"]["adapters"] = named
    workspace = Workspace(write_config(tmp_path, [settings]), on_event=print)
    yield workspace
    workspace.stack.down()


def test_adapters_of_a_fleet_are_warmed_and_proven_apart(declared):
    served = declared.fleet("declared")
    templates = declared.templates(served)
    with declared.replicas("declared").warmer(served) as replica, declared.lease(served.namespace) as fence:
        require_match(served, replica.engine.identity(), replica.daemon_identity())
        with pytest.raises(EngineMismatch, match="serves the LoRA adapter a, b, which is not in"):
            require_match(replace(served, adapters=()), replica.engine.identity(), replica.daemon_identity())
        found = declared.find_prefixes(served, templates, replica.engine)
        plan, store = declared.plan(served, found), declared.store("declared")
        assert len({prefix.ids.tobytes() for prefix in plan.prefixes}) == 1
        journal = declared.state.journal(served.namespace)
        result = warm(plan, replica, store, journal, fence, declared.clock)
        assert result.computed_tokens == plan.compute_tokens == 4 * plan.prefixes[0].full_tokens
        assert (store.sizes(plan.tree.names) == served.chunk_bytes).all()
        whole = declared.plan(served, found)
        by_label = templates.by_label()
        seen = observe(whole, choose(whole, Rows.empty(), by_label), by_label, replica, store, declared.clock)
        proof = judge(replace(seen, fresh=True), served.floors)
        assert (proof.verdict, proof.reasons, len(proof.prefixes)) == ("proven", (), 4)
        assert len({one.hits[0].answer.output for one in seen.prefixes}) == 3, "a tenant is answered as its adapter is"
        assert set(store.client.scan_iter("*")) == {name.encode() for name in plan.tree.names}
