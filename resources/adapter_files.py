"""A LoRA adapter's directory, in PEFT's format: its rank, and the digest that tells one revision from another."""

import json
from pathlib import Path

from resources.model_files import digest_files
from warmers.errors import ConfigError
from warmers.salts import Adapter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def read_adapter(name: str, directory: Path) -> Adapter:
    """Read it. Raises ConfigError for what vLLM could not load, and for pickled weights."""
    config, weights = directory / CONFIG, directory / WEIGHTS
    for file in (config, weights):
        if not file.is_file():
            do = "Give the directory that PEFT saved, with safetensors; pickled weights are refused."
            raise ConfigError(f"reading LoRA adapter {name!r}", seen=f"there is no {file}", do=do)
    try:
        rank, digest = json.loads(config.read_text())["r"], digest_files([config, weights])
    except OSError as error:
        raise ConfigError(f"reading LoRA adapter {name!r}", seen=str(error), do="Make it readable.") from error
    except (ValueError, KeyError, TypeError) as error:
        seen = f"{CONFIG}: {type(error).__name__}: {error}"
        raise ConfigError(f"reading LoRA adapter {name!r}", seen=seen, do="It has to say its rank, `r`.") from None
    if type(rank) is not int or rank < 1:
        seen = f"{CONFIG}: r is {rank!r}"
        raise ConfigError(f"reading LoRA adapter {name!r}", seen=seen, do="It has to be a positive number.")
    return Adapter(name, str(directory), digest, rank)
