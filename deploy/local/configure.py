"""Write a copy of the embedded configuration with another folder of templates, or on another L2.

python deploy/local/configure.py OUT [--prompts DIRECTORY] [--l2 valkey|valkey-tls|fs|s3|plugin]

Another L2 has a state and a stack of its own, in the directory that OUT names without its suffix. `valkey-tls` is read
and written by LMCache's own adapter, `plugin` by warmfront's, as a user whose password is in a file.
"""

import argparse
from pathlib import Path
from typing import Any

import yaml

EMBEDDED = Path(__file__).with_name("warmfront.yaml")
L2 = ("valkey", "valkey-tls", "fs", "s3", "plugin")


def configure(out: Path, prompts: Path | None, l2: str | None) -> dict[str, Any]:
    config, base = yaml.safe_load(EMBEDDED.read_text()), EMBEDDED.parent
    state = (base / config["state"]).resolve() if l2 is None else out.with_suffix("").resolve()
    config["state"] = str(state)
    config["local"]["engine_python"] = str((base / config["local"]["engine_python"]).absolute())
    for fleet in config["fleets"]:
        fleet["model"]["source"] = str((base / fleet["model"]["source"]).absolute())
        fleet["prompts"] = {"directory": str(prompts.resolve() if prompts else base / fleet["prompts"]["directory"])}
        if l2 is not None:
            fleet["l2"] = tier(l2, state)
    return config


def tier(l2: str, state: Path) -> dict[str, Any]:
    """What `l2` of warmfront.yaml says; servers that are no part of the stack are started."""
    if l2 in ("valkey", "s3"):
        return {"type": l2}
    if l2 == "fs":
        directory = state / "kv"
        directory.mkdir(parents=True, exist_ok=True)
        return {"type": "fs", "directory": str(directory)}
    from secure_valkey import USER, ensure

    server = ensure(state / "stack")
    user = {"username": USER, "password_file": str(server.password_file)} if l2 == "plugin" else {}
    return {"type": "valkey", "url": server.url, "ca_file": str(server.ca_file), **user}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--l2", choices=L2)
    given = parser.parse_args()
    if given.prompts is not None and not given.prompts.is_dir():
        parser.error(f"PROMPTS={given.prompts}: there is no such directory. Name a folder of templates.")
    config = configure(given.out, given.prompts, given.l2)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(yaml.safe_dump(config, sort_keys=False))


if __name__ == "__main__":
    main()
