"""The demo as a user runs it, on a folder of their own, with a small model: three times.

With a template edited in between, and then a weight. The engine streams what was staged.
"""

from engine_environment import needs_engine

from resources.workspace import Workspace

pytestmark = needs_engine


def test_a_folder_of_ones_own_is_warmed_proven_and_warmed_again_after_an_edit(own_folder, demo):
    folder = own_folder
    done, result = demo(folder)
    assert result["verdict"] == "proven"
    assert result["hit_tokens"] == result["expected_hit_tokens"] > 0
    assert result["output_unchanged"] is True
    assert result["computed_tokens"] > 0
    assert done.returncode == 0
    assert min(result["ttft_cold_s"], result["ttft_warm_s"]) > 0
    assert result["proof"]["fresh"]
    left_out = {row["label"]: row["why"] for row in result["left_out"]}
    assert set(left_out) == {"short", "broken.yaml"}
    assert "verdict: proven" in done.stdout
    chunks = {row["label"]: row["chunks"] for row in result["prefixes"]}

    edited = folder.parent / "prompts" / "edited.md"
    edited.write_text(edited.read_text().replace("Rule 50:", "Rule fifty:"))
    _, again = demo(folder)
    rows = {row["label"]: row for row in again["prefixes"]}
    assert again["verdict"] == "proven"
    assert rows["steady"]["warmed"] == 0
    assert rows["steady"]["already_there"] == chunks["steady"]
    assert 1 <= rows["edited"]["warmed"] < chunks["edited"]
    assert again["computed_tokens"] == rows["edited"]["warmed"] * 256
    stack = folder.parent / "state" / "stack"
    assert not list(stack.glob("*.json"))
    assert "s3://warmfront/models/tiny/" in (stack / "engine.log").read_text()

    before = Workspace(folder, on_event=print).fleet()
    weights = folder.parent / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done, other = demo(folder)
    assert other["verdict"] == "proven"
    assert {row["already_there"] for row in other["prefixes"]} == {0}  # the KV of the old weights is never hit
    assert {row["label"]: row["chunks"] for row in other["prefixes"]} == chunks
    workspace = Workspace(folder, on_event=print)
    after = workspace.fleet()
    assert (after.namespace == before.namespace, after.model.path == before.model.path) == (False, False)
    assert after.model.argument in (stack / "engine.log").read_text()
    with workspace.stack.processes.locked():
        workspace.stack.ensure()
    names = workspace.store("chat").client.scan_iter(f"{after.namespace}@*")
    assert {name.decode().split("@")[1] for name in names} == {after.model.path}
    workspace.stack.down()
