"""Write a copy of the embedded configuration whose fleets take their templates from another folder.

python deploy/local/with_prompts.py PROMPTS OUT
"""

import sys
from pathlib import Path

import yaml

EMBEDDED = Path(__file__).with_name("warmfront.yaml")


def main(prompts: Path, out: Path) -> None:
    if not prompts.is_dir():
        sys.exit(f"PROMPTS={prompts}: there is no such directory. Name a folder of templates.")
    config, base = yaml.safe_load(EMBEDDED.read_text()), EMBEDDED.parent
    config["state"] = str((base / config["state"]).resolve())
    config["local"]["engine_python"] = str((base / config["local"]["engine_python"]).absolute())
    for fleet in config["fleets"]:
        fleet["model"]["source"] = str((base / fleet["model"]["source"]).absolute())
        fleet["prompts"] = {"directory": str(prompts.resolve())}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(yaml.safe_dump(config, sort_keys=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
