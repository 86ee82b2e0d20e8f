"""What an edit costs in renderings."""

from pathlib import Path

from benchmarks.fleets import FLEET, write_fleet, write_template, write_templates
from benchmarks.registry import benchmark
from fakes import DictStore, FakeEngine

from resources.prompts import Prompts
from resources.workspace import Workspace
from warmers.prefixes import find_prefix

TEMPLATES = 10_000


@benchmark("render_10k_calls_after_one_edit", "render_calls_of_one_template")
def render_10k(directory: Path) -> dict[str, float]:
    """Real template files, prefix sets through the real state store; an engine that counts, at the Protocol seam."""
    workspace = Workspace(write_fleet(directory), on_event=lambda _: None)
    files = write_templates(directory / "prompts", TEMPLATES)
    first = _rendered(workspace, workspace.templates(workspace.fleet(FLEET)))
    edited = files[TEMPLATES // 2]
    write_template(edited, "Another text.\n" + "    Be kind to whoever asks, and say so.\n" * 20)
    after = workspace.templates(workspace.fleet(FLEET))
    calls = _rendered(workspace, after)
    alone = FakeEngine(workspace.fleet(FLEET), DictStore())
    find_prefix(after.by_label()[edited.stem], alone, chunk_tokens=256, digest="")
    if first < TEMPLATES:
        raise AssertionError(f"{first} renderings of {TEMPLATES} new templates: something rendered without the engine")
    return {"render_10k_calls_after_one_edit": calls, "render_calls_of_one_template": alone.renders}


def _rendered(workspace: Workspace, prompts: Prompts) -> int:
    """What the asset `prompt_prefixes` does; how often it asked the engine to render."""
    fleet = workspace.fleet(FLEET)
    engine = FakeEngine(fleet, DictStore())
    found = workspace.find_prefixes(fleet, prompts, engine)
    if found.failed:
        raise AssertionError(f"{len(found.failed)} templates failed, the first: {found.failed[0].reason}")
    workspace.state.save_prefixes(FLEET, found, {})
    return engine.renders
