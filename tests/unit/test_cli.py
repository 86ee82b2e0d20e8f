import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.printing import size

FIRST = "m@01000100@0@084547b6c40ed5b05ba8cd0305db5bf74d5617673948d9ed193ab7d6cbc484d4"


def warmfront(*arguments, text=None, **env):
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *arguments],
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )


def test_keys_from_a_file_and_from_standard_input(tmp_path):
    ids = json.dumps(list(range(300)))
    (tmp_path / "ids.json").write_text(ids)
    plain = warmfront("keys", "--model", "m", str(tmp_path / "ids.json"))
    assert (plain.returncode, plain.stdout) == (0, f"{FIRST}\n")
    both = warmfront("keys", "--model", "m", "--world-size", "2", "--json", "-", text=ids)
    document = json.loads(both.stdout)
    assert [key[:10] for key in document["keys"]] == ["m@02000200", "m@02010201"]
    assert document["tail_tokens"] == 44


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "m", "gone.json"], None),
        (["--model", "m", "-"], "no json"),
        (["--model", "m", "-"], '{"a": 1}'),
        (["--model", "m", "-"], "[1, -2]"),
        (["--model", "m", "--salt", "a@b", "-"], "[1]"),
        (["--model", "m", "--store", "s3", "--prefix", "p", "-"], "[1]"),
        (["--model", "m", "--chunk-tokens", "0", "-"], "[1]"),
        (["-"], "[1]"),
    ],
)
def test_bad_arguments_exit_2_and_leave_stdout_empty(arguments, text):
    done = warmfront("keys", *arguments, text=text)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


def test_errors_are_one_json_document_too(tmp_path):
    done = warmfront("plan", "--json", WARMFRONT_CONFIG=str(tmp_path / "gone.yaml"))
    assert done.returncode == 2
    assert "gone.yaml" in json.loads(done.stdout)["error"]


def test_a_usage_error_is_one_json_document_too():
    done = warmfront("keys", "--json", "-")
    assert done.returncode == 2
    assert "--model" in json.loads(done.stdout)["error"]


def test_the_lock_is_renewed_with_pips_own_arguments(tmp_path):
    """`make lock` hands them through; a requirement that does not exist shows how far they came."""
    done = subprocess.run(
        [sys.executable, "deploy/make_env.py", "--renew", str(tmp_path / "x.lock"), "-r", str(tmp_path / "gone.in")],
        capture_output=True,
        text=True,
    )
    assert "gone.in" in done.stderr
    assert "unrecognized arguments" not in done.stderr


@pytest.mark.parametrize("arguments", [["keys", "--model", "m", "-"], ["plan"]])
def test_light_commands_do_not_import_dagster(arguments, tmp_path):
    code = (
        "import sys; from pipelines import cli\n"
        f"sys.argv = ['warmfront', *{arguments!r}]\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "print([m for m in ('dagster', 'pandas', 'boto3', 'torch') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="[1]",
        capture_output=True,
        text=True,
        env={**os.environ, "WARMFRONT_CONFIG": str(tmp_path / "gone.yaml")},
    )
    assert done.stderr.strip().endswith("[]")


def test_the_commands_of_the_readme_exist():
    listed = warmfront("--help").stdout
    for command in ("keys", "plan", "warm", "prove", "up", "down", "status"):
        assert f" {command} " in listed
        assert f"warmfront {command}" in Path("README.md").read_text()


def test_sizes_for_people():
    assert [size(n) for n in (12, 6_291_456, 5.348e8, 2e12)] == ["12 B", "6.3 MB", "534.8 MB", "2.0 TB"]
