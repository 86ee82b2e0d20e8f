"""What an operator sees, in a real browser, of runs that real engines made.

The README's screenshots are taken here: `make screenshots`.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from engine_environment import needs_engine

from resources.processes import free_port
from resources.workspace import Workspace

CHROMIUM = shutil.which("chromium")
pytestmark = [
    needs_engine,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ASSETS = ("prompt_templates", "prompt_prefixes", "warm_plan", "warm_chunks", "hit_rate")

LOOK_AT_CHUNKS = """
import dagster as dg
from assets.cache import every_chunk_present
from pipelines.definitions import build_defs
from pipelines.runs import open_instance
from resources.workspace import Workspace
workspace = Workspace.from_environment(lambda _: None)
look = dg.define_asset_job("look", selection=dg.AssetSelection.checks(every_chunk_present))
jobs = dg.Definitions.merge(build_defs(workspace), dg.Definitions(jobs=[look]))
with open_instance(workspace) as instance:
    tags = {"dagster/partition": "chat"}
    jobs.resolve_job_def("look").execute_in_process(tags=tags, instance=instance, raise_on_error=False)
"""


@pytest.fixture(scope="module")
def seen(own_folder, demo):
    """A state with a proven run, and with a check that failed since: somebody has evicted a chunk."""
    workspace = Workspace(own_folder, on_event=print)
    if workspace.state.latest("chat", "proof") is None:
        demo(own_folder)
    with workspace.stack.processes.locked():
        workspace.stack.ensure()
    plan = workspace.plan(workspace.fleet("chat"), workspace.state.prefixes("chat"))
    (steady,) = [n for n, prefix in enumerate(plan.prefixes) if prefix.label == "steady"]
    lost = list(plan.tree.names_of([plan.tree.paths[steady][-1]]))
    workspace.store("chat").delete(lost)
    assert workspace.store("chat").sizes(lost).tolist() == [-1]
    env = {**os.environ, "WARMFRONT_CONFIG": str(own_folder)}
    subprocess.run([sys.executable, "-c", LOOK_AT_CHUNKS], check=True, env=env, capture_output=True)
    yield workspace
    workspace.stack.down()


@pytest.fixture(scope="module")
def server(seen, tmp_path_factory):
    """Dagster's web server on that state; its address."""
    url = f"http://127.0.0.1:{free_port()}"
    home = seen.local_directory / "dagster"
    env = {**os.environ, "WARMFRONT_CONFIG": str(seen.path), "DAGSTER_HOME": str(home)}
    argv = [sys.executable, "-m", "dagster_webserver", "-w", "workspace.yaml", "-h", "127.0.0.1", "-p", url[17:]]
    with (tmp_path_factory.mktemp("web") / "web.log").open("wb") as log:
        web = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = seen.clock.now() + 90
            while not _answers(url):
                assert web.poll() is None
                assert seen.clock.now() < deadline
                seen.clock.sleep(0.25)
            yield url
        finally:
            os.killpg(web.pid, signal.SIGTERM)
            web.wait(30)


def _answers(url):
    try:
        return httpx.get(f"{url}/server_info", trust_env=False).is_success
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server, tmp_path):
    page = browser.new_page(viewport={"width": 1500, "height": 820}, base_url=server)
    page.set_default_timeout(60_000)
    pictures = Path(os.environ.get("WARMFRONT_SCREENSHOTS", tmp_path))
    pictures.mkdir(parents=True, exist_ok=True)
    page.shot = lambda name: page.screenshot(path=pictures / f"{name}.png", animations="disabled")
    yield page
    page.close()


def shows(page, text):
    from playwright.sync_api import expect

    expect(page.get_by_text(text, exact=False).first).to_be_visible(timeout=60_000)


def test_the_graph_tells_the_story(page):
    page.set_viewport_size({"width": 2700, "height": 820})  # what is out of sight is not drawn
    page.goto("/assets/hit_rate?view=lineage&lineageScope=upstream")
    page.get_by_role("button", name="All", exact=True).click()
    for asset in ASSETS:
        shows(page, asset)
    page.goto("/asset-groups")
    for group in ("prompts", "cache"):
        shows(page, group)


def test_a_run_shows_its_steps_and_what_they_did(page, seen):
    from pipelines.runs import open_instance

    with open_instance(seen) as instance:
        run = next(run for run in instance.get_runs() if run.job_name == "warm" and run.is_success)
    page.goto(f"/runs/{run.run_id}")
    for text in ("Success", "partition: chat", *ASSETS[1:]):
        shows(page, text)


def test_the_proof_has_its_numbers_its_table_and_its_picture(page, seen):
    proof = seen.state.document("chat", "proof")
    page.goto("/assets/hit_rate")
    for text in ("The proof:", "inference-platform", "ttft_cold_s", "hit_tokens", str(proof["hit_tokens"])):
        shows(page, text)
    for link in ("plan_document", "proof_document", "ledger"):
        shows(page, link)
    shows(page, "same_output")
    page.get_by_text("[Show Markdown]").first.click()
    picture = page.get_by_alt_text("TTFT cold and warm, by prefix")
    picture.wait_for()
    assert picture.evaluate("image => image.complete && image.naturalWidth") == 760
    page.shot("proof")


def test_a_failed_check_names_the_prefix_and_the_next_step(page):
    page.goto("/assets/warm_chunks?view=checks&checkDetail=every_chunk_present")
    for text in ("every_chunk_present", "Failed", "1 chunk is missing: steady (1 of", "Warm again"):
        shows(page, text)
    page.shot("failed_check")


def test_what_starts_runs_says_so(page):
    page.goto("/automation")
    for name in ("prompt_templates_changed", "clock_turned", "nightly_warm"):
        shows(page, name)
