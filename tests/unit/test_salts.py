"""The engine's middleware, loaded by its path and driven as an ASGI server drives it."""

import asyncio
import json
import os
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from warmfront_engine import salts

from warmers import salts as domain

SOURCE = Path("deploy/engine/extensions/warmfront_engine/salts.py")
TABLE = {"base": ["llama"], "salts": {"sql": "sql-1", "chat": "chat-1"}}
CHAT = "/v1/chat/completions"


table = salts.Table.parse(json.dumps(TABLE).encode())


class Engine:
    """Answers with what it was sent, in two parts, and waits for its client to go."""

    def __init__(self):
        self.scope = self.body = self.last = None

    async def __call__(self, scope, receive, send):
        self.scope, self.body, more = scope, b"", True
        while more:
            message = await receive()
            self.body += message["body"]
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        for part in (b"one", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": part == b"one"})
        self.last = await receive()


class Answer:
    def __init__(self, messages):
        start, *rest = messages
        self.status, self.headers = start["status"], dict(start["headers"])
        self.parts = [message["body"] for message in rest]
        self.table = self.headers.get(b"x-warmfront-salts", b"").decode()

    @property
    def error(self):
        return json.loads(b"".join(self.parts))["error"]


def parts_of(body, size):
    cut = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    return [{"type": "http.request", "body": part, "more_body": n < len(cut)} for n, part in enumerate(cut, 1)]


def send(app, body, path=CHAT, *, method="POST", headers=(), size=1 << 20, **scope):
    """One request through the middleware; the answer, None when there was none."""
    kind = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    incoming = iter([*parts_of(body, size), {"type": "http.disconnect"}])
    sent = []

    async def receive():
        return next(incoming)

    async def collect(message):
        sent.append(message)

    request = {"type": "http", "method": method, "path": path, "headers": [*headers, *kind], **scope}
    asyncio.run(app(request, receive, collect))
    return Answer(sent) if sent else None


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Write the table as a careful writer does, by rename."""
    path = tmp_path / "salts.json"
    monkeypatch.setenv("WARMFRONT_SALTS", str(path))

    def put(text):
        scratch = tmp_path / "scratch"
        scratch.write_text(text if isinstance(text, str) else json.dumps(text))
        scratch.replace(path)

    return put


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def app(put, engine):
    put(TABLE)
    return salts.CacheSalts(engine)


def ask(app, engine, path=CHAT, **fields):
    """The salt that the engine was asked with."""
    answer = send(app, json.dumps(fields).encode(), path)
    assert answer.status == 200, answer.error
    return json.loads(engine.body).get("cache_salt")


@pytest.mark.parametrize("path", sorted(salts.SALTED))
def test_an_adapter_is_asked_with_its_salt(app, engine, path):
    assert ask(app, engine, path, model="sql", messages=[]) == "sql-1"
    assert ask(app, engine, path, model="chat", cache_salt=None) == "chat-1"
    assert ask(app, engine, path, model="sql", cache_salt="tenant") == "sql-1.tenant"
    assert ask(app, engine, path, model="sql", cache_salt="sql-1") == "sql-1"
    assert dict(engine.scope["headers"])[b"content-length"] == b"%d" % len(engine.body)


def test_the_base_model_named_or_not_keeps_what_it_asked(app, engine):
    for fields in ({"model": "llama"}, {}, {"model": None}, {"model": ""}, {"model": ["sql"]}):
        assert ask(app, engine, **fields) is None
        assert ask(app, engine, **fields, cache_salt="tenant") == "tenant"


@pytest.mark.parametrize("name", ["other", "sql ", "SQL", "llama-2"])
def test_a_model_that_the_table_does_not_know_is_refused(app, engine, name):
    answer = send(app, json.dumps({"model": name}).encode())
    assert (answer.status, answer.error["param"], engine.scope) == (400, "model", None)
    assert f"`{name}`" in answer.error["message"]
    assert "WARMFRONT_SALTS" in answer.error["message"]
    assert answer.table == table.digest


@pytest.mark.parametrize("own", ["sql-1", "sql-1.tenant", "chat-1."])
def test_the_base_model_gets_no_adapters_salt(app, engine, own):
    answer = send(app, json.dumps({"model": "llama", "cache_salt": own}).encode())
    assert (answer.status, answer.error["param"], engine.scope) == (400, "cache_salt", None)


@pytest.mark.parametrize("path", ["/v2/embed", "/cohere/v2/chat", "/v1/audio/transcriptions", "/of/a/plugin"])
def test_where_no_salt_is_taken_adapters_are_refused(app, engine, path):
    answer = send(app, b'{"model": "sql"}', path)
    assert (answer.status, engine.scope) == (400, None)
    assert "no cache_salt" in answer.error["message"]
    assert send(app, b'{"model": "llama"}', path).status == 200


@pytest.mark.parametrize("path", sorted(salts.WITHOUT_KV))
def test_where_nothing_is_computed_everybody_passes(app, engine, path):
    for name in ("sql", "other"):
        body = json.dumps({"model": name, "cache_salt": "t"}).encode()
        assert send(app, body, path).status == 200
        assert engine.body == body


def form(*names, field=b'name="model"'):
    parts = [b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n\x00\xff\r\n']
    parts += [
        b"--b\r\nContent-Disposition: form-data; %s\r\nContent-Type: text/plain\r\n\r\n%s\r\n" % (field, name)
        for name in names
    ]
    return b"".join(parts) + b"--b--\r\n"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (form(b"llama"), 200),
        (form(), 200),
        (form(b""), 200),
        (form(b"sql"), 400),
        (form(b"other"), 400),
        (form(b"llama", b"sql"), 400),
        (form(b"sql", field=b"name=model"), 400),
        (form(b"sql", field=b'name="model_id"'), 200),
    ],
)
@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", CHAT])
def test_a_form_cannot_be_salted(app, engine, body, status, path):
    kind = [(b"content-type", b"multipart/form-data; boundary=b")]
    assert send(app, body, path, headers=kind).status == status
    assert engine.body in (None, body)


def test_an_invocation_is_for_the_adapter_in_its_header(app, engine):
    def invoke(body, *adapters):
        headers = [(b"x-amzn-sagemaker-adapter-identifier", name) for name in adapters]
        engine.body = None
        answer = send(app, body, "/invocations", headers=headers)
        return answer.status, engine.body and json.loads(engine.body).get("cache_salt")

    assert invoke(b'{"model": "llama"}', b"sql") == (200, "sql-1")
    assert invoke(b'{"model": "chat"}', b"sql", b"other") == (200, "sql-1")
    assert invoke(b'{"model": "sql"}', b"other") == (400, None)
    assert invoke(b'{"model": "sql"}', b"") == (200, None)
    assert invoke(b'{"model": "sql"}') == (400, None)
    assert invoke(b'{"model": "llama"}') == (200, None)
    headers = [(b"x-amzn-sagemaker-adapter-identifier", b"sql")]
    assert send(app, b'{"model": "llama"}', headers=headers).status == 200
    assert b"cache_salt" not in engine.body


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"null", b"[]", b'"sql"', b"[" * 100_000, b'{"model": "sql"', b'{"model": "sql"} x'),
        *(b'{"model": "sql", "n": ' + b"1" * 5000 + b"}", b'{"model": "sql\xff"}', b"model=sql"),
        *(b'{"model": "sql", "cache_salt": ""}', b'{"model": "sql", "cache_salt": 7}'),
        b'{"model": "sql", "model": "llama"}',
    ],
)
def test_what_the_engine_refuses_itself_passes(app, engine, body):
    assert send(app, body).status == 200
    assert engine.body == body


def test_of_two_members_with_one_name_the_last_counts_as_it_does_for_the_engine(app, engine):
    assert send(app, b'{"model": "llama", "model": "sql", "cache_salt": "a", "cache_salt": "b"}').status == 200
    assert json.loads(engine.body) == {"model": "sql", "cache_salt": "sql-1.b"}
    assert send(app, b'{"model": "sql", "model": "other"}').status == 400
    assert send(app, b'{"\\u006dodel": "sq\\u006c"}\n').status == 200
    assert json.loads(engine.body) == {"model": "sql", "cache_salt": "sql-1"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_every_encoding_that_the_engine_reads_is_read(app, engine, encoding):
    body = json.dumps({"prompt": "überall €", "model": "sql"}, ensure_ascii=False).encode(encoding)
    assert send(app, body).status == 200
    assert json.loads(engine.body) == {"prompt": "überall €", "model": "sql", "cache_salt": "sql-1"}


def test_a_body_in_parts_arrives_whole_and_the_disconnect_after_it(app, engine):
    body = json.dumps({"prompt": "x" * 1000, "model": "sql"}).encode()
    chunked = [(b"transfer-encoding", b"chunked")]
    answer = send(app, body, size=7, headers=chunked)
    assert json.loads(engine.body) == json.loads(body) | {"cache_salt": "sql-1"}
    headers = [name for name, _ in engine.scope["headers"]]
    assert (headers.count(b"content-length"), headers.count(b"transfer-encoding")) == (1, 0)
    assert engine.last == {"type": "http.disconnect"}
    assert answer.parts == [b"one", b"two"]
    assert answer.headers[b"content-type"] == b"text/plain"


def test_a_client_that_leaves_before_the_end_of_its_body_is_answered_nothing(app, engine):
    incoming = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive():
        return next(incoming)

    request = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    asyncio.run(app(request, receive, None))
    assert engine.scope is None


def test_a_body_beyond_the_limit_is_refused(put, engine, monkeypatch):
    put(TABLE)
    monkeypatch.setenv("WARMFRONT_SALTS_BODY_BYTES", "100")
    app = salts.CacheSalts(engine)
    answer = send(app, b'{"model": "sql", "prompt": "%s"}' % (b"x" * 100), size=10)
    assert (answer.status, answer.error["code"], engine.scope) == (413, 413, None)
    assert send(app, b'{"model": "sql"}').status == 200


@pytest.mark.parametrize(
    ("root", "path"), [("/api", "/api" + CHAT), ("/api", CHAT), ("/v", CHAT), ("/v1", "/v1" + CHAT), ("", CHAT)]
)
def test_a_root_path_is_taken_off_as_the_router_takes_it(app, engine, root, path):
    assert send(app, b'{"model": "sql"}', path, root_path=root).status == 200
    assert json.loads(engine.body)["cache_salt"] == "sql-1"


def test_everything_but_a_post_passes(app, engine):
    answer = send(app, b'{"model": "other"}', method="GET")
    assert (answer.status, answer.table, engine.body) == (200, table.digest, b'{"model": "other"}')
    seen = []

    async def other(*arguments):
        seen.append(arguments)

    app.app = other
    for kind in ("websocket", "lifespan"):
        arguments = ({"type": kind, "path": CHAT}, object(), object())
        asyncio.run(app(*arguments))
        assert seen.pop() == arguments


def test_a_request_is_salted_once_however_often_the_middleware_is_named(app, engine):
    assert ask(salts.CacheSalts(app), engine, model="sql", cache_salt="t") == "sql-1.t"
    answer = send(salts.CacheSalts(app), b"{}")
    assert list(answer.headers).count(b"x-warmfront-salts") == 1


def test_without_a_table_everything_passes_and_says_so_once(put, engine, monkeypatch, caplog):
    for variable in ("a file that is not there", None):
        if variable is None:
            monkeypatch.delenv("WARMFRONT_SALTS")
        caplog.clear()
        app = salts.CacheSalts(engine)
        for _ in range(3):
            answer = send(app, b'{"model": "sql"}')
            assert (answer.status, answer.table, engine.body) == (200, "none", b'{"model": "sql"}')
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "every request passes unsalted" in caplog.text


def test_the_table_changes_under_a_running_engine(put, engine, caplog):
    app = salts.CacheSalts(engine)
    assert send(app, b'{"model": "new"}').table == "none"
    put(TABLE)
    assert send(app, b'{"model": "new"}').status == 400
    changed = {**TABLE, "salts": {**TABLE["salts"], "new": "new-1"}}
    put(changed)
    answer = send(app, b'{"model": "new"}')
    assert (answer.status, json.loads(engine.body)["cache_salt"]) == (200, "new-1")
    assert answer.table == sha256(json.dumps(changed).encode()).hexdigest()[:12]
    caplog.clear()
    for broken in (json.dumps(TABLE)[:-5], '{"salts": {"new": "other"}}'):
        put(broken)
        for _ in range(3):
            assert send(app, b'{"model": "new"}').table == answer.table
    Path(os.environ["WARMFRONT_SALTS"]).unlink()
    assert send(app, b'{"model": "new"}').table == answer.table
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    put(TABLE)
    assert send(app, b'{"model": "new"}').status == 400


def test_another_file_of_the_same_size_and_time_is_read(put, engine):
    app = salts.CacheSalts(engine)
    for name in ("one", "two"):
        put({"base": [], "salts": {name: "salt"}})
        os.utime(os.environ["WARMFRONT_SALTS"], (1e9, 1e9))
        assert ask(app, engine, model=name) == "salt"


def test_a_name_keeps_its_salt_as_long_as_the_process_and_its_weights_live(put, engine, caplog):
    app = salts.CacheSalts(engine)
    put(TABLE)
    first = send(app, b'{"model": "sql"}').table
    without = {**TABLE, "salts": {"chat": "chat-1"}}
    put({**TABLE, "salts": {**TABLE["salts"], "sql": "sql-2"}})
    assert (send(app, b'{"model": "sql"}').table, json.loads(engine.body)["cache_salt"]) == (first, "sql-1")
    assert "another salt for sql, whose weights are loaded: start a new process" in caplog.text
    put(without)  # and not by way of a table that has forgotten it
    assert send(app, b'{"model": "sql"}').status == 400
    put({**TABLE, "salts": {**without["salts"], "sql": "sql-2"}})
    assert send(app, b'{"model": "sql"}').status == 400
    put(TABLE)
    assert ask(app, engine, model="sql") == "sql-1"


def test_a_table_that_was_never_whole_refuses_every_named_model(put, engine):
    put('{"base": ["lla')
    app = salts.CacheSalts(engine)
    answer = send(app, b'{"model": "llama"}')
    assert (answer.status, answer.table) == (400, "unreadable")
    assert send(app, b"{}").status == 200
    put(TABLE)
    assert send(app, b'{"model": "llama"}').status == 200


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (["sql"], "it is not"),
        ({"salts": {}}, "it is not"),
        ({"base": []}, "it is not"),
        ({"base": "llama", "salts": {}}, "it is not"),
        ({"base": [1], "salts": {}}, "it is not"),
        ({"base": [], "salts": {"a": ""}}, "salt of 'a'"),
        ({"base": [], "salts": {"a": "x" * 64}}, "salt of 'a'"),
        ({"base": [], "salts": {"a": "v1.2"}}, "salt of 'a'"),
        ({"base": [], "salts": {"a": "x@y"}}, "salt of 'a'"),
        ({"base": [], "salts": {"a": "x\n"}, "": 0}, None),
        ({"base": [], "salts": {"a": "x", "b": "x"}}, "the same salt"),
        ({"base": ["a"], "salts": {"a": "x"}}, "both in base and in salts"),
        ({"base": [], "salts": {}}, None),
    ],
)
def test_a_table_is_checked(document, problem):
    raw = json.dumps(document).encode()
    if problem is None:
        salts.Table.parse(raw)
    else:
        with pytest.raises(ValueError, match=problem):
            salts.Table.parse(raw)


def test_a_forbidden_character_is_left_for_the_engine(app, engine):
    for own in ("a@b", "a/b", "a\\b", "a\0b", "@" + "x" * 200, "x" * 200 + "@"):
        assert ask(app, engine, model="sql", cache_salt=own) == f"sql-1.{own}"


def test_it_imports_nothing_but_the_standard_library():
    imported = {line.split()[1] for line in SOURCE.read_text().splitlines() if line.startswith(("import ", "from "))}
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names


few = st.characters(codec="utf-8", exclude_characters="@/\\\0") | st.sampled_from(".-a")
adapter_salts = st.from_regex(r"[a-c-]{1,63}", fullmatch=True) | st.text(few, min_size=1, max_size=63).filter(
    salts.SALT.fullmatch
)
own_salts = st.none() | st.text(few, min_size=1, max_size=200) | st.text("a.", min_size=1, max_size=4)
pairs = st.tuples(adapter_salts, own_salts)


@given(pairs)
def test_a_salt_is_one_that_the_engine_takes(pair):
    salt = salts.combined(*pair)
    assert 0 < len(salt) <= 128
    assert not salts.FORBIDDEN & set(salt)
    assert salt.split(".")[0] == pair[0]


@given(pairs, pairs)
def test_two_clients_of_two_adapters_never_share_a_salt(one, other):
    bare = [(salt, None if own == salt else own) for salt, own in (one, other)]
    assert (salts.combined(*one) == salts.combined(*other)) == (bare[0] == bare[1])


@given(adapter_salts, st.text("ab", min_size=60, max_size=200))
def test_a_shortened_salt_and_no_other_has_128_characters_so_that_nobody_can_ask_for_it(salt, own):
    short = salts.combined(salt, own)
    assert (len(short) == 128) == (short != f"{salt}.{own}") == (len(f"{salt}.{own}") >= 128)
    if len(short) == 128:
        assert salts.combined(salt, short.removeprefix(f"{salt}.")) != short


@given(adapter_salts, own_salts)
def test_the_control_plane_knows_every_salt_that_the_middleware_sets(salt, own):
    assert domain.combined(salt, own or "") == salts.combined(salt, own)


@given(st.lists(st.tuples(st.text(min_size=1), st.sampled_from("ab")), unique_by=lambda one: one[0], max_size=8))
def test_the_table_of_any_adapters_is_one_that_the_middleware_reads(named):
    adapters = [domain.Adapter(name, "/adapter", digest, 8) for name, digest in named]
    raw = domain.salt_table("", adapters)  # no adapter is named so
    table = salts.Table.parse(raw)
    assert table.digest == domain.table_digest(raw)
    assert table.salts == {adapter.name: adapter.salt for adapter in adapters}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
documents = st.dictionaries(st.text() | st.just("prompt"), values)


@given(documents | values, st.none() | st.just("llama"), st.booleans(), st.sampled_from([None, 1]))
def test_the_base_models_body_is_the_very_same(document, model, ascii_only, indent):
    if isinstance(document, dict):
        document = {**document, "model": model}
    try:
        body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode()
    except UnicodeEncodeError:
        return  # a lone surrogate
    assert salts.salted(table, CHAT, {}, body) is body


@given(
    documents, st.sampled_from(sorted(TABLE["salts"])), own_salts, st.booleans(), st.sampled_from(["utf-8", "utf-16"])
)
def test_an_adapters_body_has_its_salt_and_is_otherwise_equal(document, model, own, ascii_only, encoding):
    document = {**document, "model": model, "cache_salt": own}
    body = json.dumps(document, ensure_ascii=ascii_only).encode(encoding, "surrogatepass")
    new = salts.salted(table, CHAT, {}, body)
    assert json.loads(new) == document | {"cache_salt": salts.combined(TABLE["salts"][model], own)}
