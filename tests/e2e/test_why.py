"""`warmfront why` with the token ids of a real engine and the keys of a real daemon."""

import json
import os
import re
import subprocess
import sys

import pytest
from engine_environment import needs_engine, sentences

from warmers.prefixes import PrefixSet
from warmers.warm import warm

pytestmark = [needs_engine, pytest.mark.fleet("chat")]

SYSTEM = sentences("crate", 12) + "Today is Monday, 30 November 2026.\n" + sentences("label", 12)
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": sentences(name, 6), "parameters": {"type": "object"}},
    }
    for name in ("find", "order", "refund")
]


def body(system=SYSTEM, tools=TOOLS):
    user = {"role": "user", "content": "Where is my crate?"}
    return {"model": "tiny", "messages": [{"role": "system", "content": system}, user], "tools": tools}


@pytest.fixture(scope="module")
def names(host):
    """Warms the template that the requests are about; the keys of its chunks, first to last."""
    fleet, path = host.fleet("chat"), host.path.parent / "prompts" / "why.json"
    path.write_text(json.dumps({"messages": body()["messages"][:1], "tools": TOOLS}))
    with host.replicas("chat").warmer(fleet) as replica:
        found = host.find_prefixes(fleet, host.templates(fleet), replica.engine)
        mine = PrefixSet(tuple(p for p in found.prefixes if p.label == "why"))
        host.state.save_prefixes("chat", mine, {})
        plan = host.plan(fleet, mine)
        with host.lease(fleet.namespace) as fence:
            journal = host.state.journal(fleet.namespace)
            warm(plan, replica, host.store("chat"), journal, fence, host.clock)
        yield plan.tree.names
    path.unlink()


def ask(host, request):
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.cli", "why", "-", "--fleet", "chat"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={**os.environ, "WARMFRONT_CONFIG": str(host.path)},
    )
    assert done.returncode in (0, 2), done.stderr
    return done.returncode, done.stdout


def test_a_request_of_the_template_hits_all_there_is(host, names):
    code, said = ask(host, body())
    assert code == 0, said
    assert f"it hits {len(names) * 256:,} of {len(names) * 256:,} warmed tokens" in said
    assert "all there is to hit" in said


def test_a_date_in_the_system_prompt_is_named_by_its_line(host, names):
    code, said = ask(host, body(SYSTEM.replace("Monday, 30", "Tuesday, 31")))
    assert code == 2
    assert re.search(r"message 1 \(system\), line 13, token \d+ of", said)
    assert "'Today is Monday, 30 November 2026.'" in said
    assert "'Today is Tuesday, 31 November 2026.'" in said
    assert "looks like a date" in said


def test_another_order_of_tools_is_named(host, names):
    code, said = ask(host, body(tools=[TOOLS[1], TOOLS[0], TOOLS[2]]))
    assert code == 2
    assert "tool 1" in said
    assert "Same tools, other order" in said


def test_a_chunk_that_went_away_is_named_by_its_key(host, names):
    host.store("chat").delete([names[1]])
    code, said = ask(host, body())
    assert code == 2
    assert f"it hits 256 of {len(names) * 256:,} warmed tokens" in said
    assert names[1] in said
    assert "evicted or deleted before its time" in said
