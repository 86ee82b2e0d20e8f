"""warmfront.yaml: its fields, and the domain's fleets built from it."""

import os
import re
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import yaml
from pydantic import ValidationError

from resources.adapter_files import read_adapter
from resources.capacity_settings import DAYS, CapacitySettings
from resources.settings import (
    DNS_LABEL,
    FileSystemSettings,
    FleetSettings,
    L2Settings,
    ModelSettings,
    S3Settings,
    Settings,
    ValkeySettings,
)
from warmers.errors import ConfigError
from warmers.fleet import EngineSpec, Fleet, Model, ProofFloors, WarmLimits
from warmers.windows import Lead, OffPeak

DEFAULT_PATH = Path("deploy/local/warmfront.yaml")


def config_path() -> Path:
    """WARMFRONT_CONFIG, else ./warmfront.yaml, else the embedded default."""
    named = os.environ.get("WARMFRONT_CONFIG")
    if named:
        return Path(named).absolute()
    here = Path("warmfront.yaml").absolute()
    return here if here.exists() else DEFAULT_PATH.absolute()


def load_settings(path: Path) -> Settings:
    """Read and check the file; every path in the result is absolute. Raises ConfigError naming file and field."""
    raw = _read_yaml(path)
    try:
        settings = Settings.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(
            f"reading {path}",
            seen="; ".join(
                f"{_field(raw, e['loc'])}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()
            ),
            do="Correct the file.",
        ) from None
    return _anchor(settings, path)


def fleet_names(path: Path) -> list[str]:
    """Fleet names for the partitions, read leniently; never none, so that a broken file can show as a failed check."""
    try:
        fleets = _read_yaml(path).get("fleets") or []
        named = (str(fleet["name"]) for fleet in fleets if isinstance(fleet, dict) and "name" in fleet)
        names = [name for name in named if re.fullmatch(DNS_LABEL, name)]
    except (ConfigError, TypeError):
        names = []
    return list(dict.fromkeys(names)) or ["unconfigured"]


def local_directory(path: Path) -> Path:
    """Where the embedded stack keeps its files, read leniently: it has to be stopped whatever else is wrong."""
    raw = _read_yaml(path)
    local = raw.get("local")
    named = (local.get("directory") if isinstance(local, dict) else None) or raw.get("state")
    if not isinstance(named, str) or "://" in named:
        raise ConfigError(
            f"reading {path}", seen="local.directory: missing, and state is no directory", do="Name a directory."
        )
    return Path(os.path.normpath(path.absolute().parent / Path(named).expanduser()))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"reading {path}", seen="there is no such file", do="Write it, or name another in WARMFRONT_CONFIG."
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"reading {path}", seen=str(error), do="Correct the file.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"reading {path}", seen="it is no mapping", do="See deploy/local/warmfront.yaml for one.")
    return raw


def _field(raw: Any, location: tuple[int | str, ...]) -> str:
    """`fleets.chat.engine.dtype`: the entry of a list by its name where it has one; which tier was read is left out."""
    words, here = [], raw
    for number, part in enumerate(location, 1):
        if isinstance(here, dict) and part not in here and number < len(location):
            continue
        here = _inside(here, part)
        name = here.get("name") if isinstance(part, int) and isinstance(here, dict) else None
        words.append(str(name or part))
    return ".".join(words)


def _inside(container: Any, part: int | str) -> Any:
    if isinstance(container, dict):
        return container.get(part)
    return container[part] if isinstance(container, list) and isinstance(part, int) and part < len(container) else None


def _anchor(settings: Settings, path: Path) -> Settings:
    """Resolve paths against the file's directory, and check that what they name is there."""
    base = path.absolute().parent

    def there(field: str, target: Path) -> Path:
        resolved = Path(os.path.normpath(base / target.expanduser()))
        if not resolved.is_dir():
            raise ConfigError(f"reading {path}", seen=f"{field}: there is no directory {resolved}", do="Correct it.")
        return resolved

    def model(fleet: FleetSettings) -> ModelSettings:
        # Whether an adapter is there is that fleet's trouble alone: it is read with the fleet.
        adapters = tuple(
            adapter.model_copy(update={"directory": Path(_located(str(adapter.directory), base))})
            for adapter in fleet.model.adapters
        )
        update: dict[str, Any] = {"adapters": adapters}
        if fleet.model.directory is not None:
            update["directory"] = there(f"fleets.{fleet.name}.model.directory", fleet.model.directory)
        else:
            update["source"] = _located(fleet.model.source or "", base)
        return fleet.model.model_copy(update=update)

    def l2(fleet: FleetSettings) -> ValkeySettings | FileSystemSettings | S3Settings:
        if fleet.l2.type == "s3":
            return fleet.l2
        if fleet.l2.type == "fs":
            directory = there(f"fleets.{fleet.name}.l2.directory", fleet.l2.directory)
            return fleet.l2.model_copy(update={"directory": directory})
        files = {name: getattr(fleet.l2, name) for name in ("ca_file", "password_file")}
        located = {name: Path(_located(str(file), base)) for name, file in files.items() if file is not None}
        return fleet.l2.model_copy(update=located)

    fleets = [
        fleet.model_copy(
            update={
                "model": model(fleet),
                "l2": l2(fleet),
                "prompts": fleet.prompts.model_copy(update={"directory": _located(fleet.prompts.directory, base)}),
            }
        )
        for fleet in settings.fleets
    ]
    state = _located(settings.state, base)
    python = Path(os.path.normpath(base / settings.local.engine_python.expanduser()))
    local = settings.local.model_copy(update={"engine_python": python, "directory": local_directory(path)})
    return settings.model_copy(update={"state": state, "fleets": tuple(fleets), "local": local})


def _located(place: str, base: Path) -> str:
    """A URI as it is, a path from `base`."""
    return place if "://" in place else os.path.normpath(base / Path(place).expanduser())


def _ttl_s(l2: L2Settings) -> int | None:
    if l2.type == "s3":
        return l2.ttl_days * 86_400 if l2.ttl_days else None
    return l2.ttl_s


def lead_of(capacity: CapacitySettings) -> Lead:
    """What a roll-out takes."""
    return Lead(capacity.provision_s, capacity.load_s, capacity.warm_s, capacity.margin_s)


def off_peak_of(capacity: CapacitySettings) -> list[OffPeak]:
    """Hours in which one may begin."""

    def clock(text: str) -> tuple[int, int]:
        hour, minute = text.split(":")
        return int(hour), int(minute)

    return [
        OffPeak(frozenset(map(DAYS.index, each.days)), clock(each.since), clock(each.until), ZoneInfo(each.timezone))
        for each in capacity.off_peak
    ]


def build_fleet(settings: FleetSettings, model: Model, tokens_per_s: float | None) -> Fleet:
    """The domain's fleet. Raises ConfigError for an adapter that cannot be read."""
    return Fleet(
        name=settings.name,
        model=model,
        engine=EngineSpec(**settings.engine.model_dump()),
        store=settings.l2.type,
        ttl_s=_ttl_s(settings.l2),
        budget_bytes=settings.l2.budget_bytes,
        limits=WarmLimits(**settings.warm.model_dump()),
        adapters=tuple(read_adapter(adapter.name, adapter.directory) for adapter in settings.model.adapters),
        floors=ProofFloors(**settings.proof.model_dump()),
        prefill_tokens_per_s=tokens_per_s,
    )
