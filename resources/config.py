"""warmfront.yaml: its fields, and the domain's fleets built from it."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from warmers.errors import ConfigError
from warmers.fleet import EngineSpec, Fleet, ProofFloors, WarmLimits

DEFAULT_PATH = Path("deploy/local/warmfront.yaml")
DNS_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(_Section):
    """`model`: what the fleet serves."""

    name: str = Field(min_length=1, description='--served-model-name: what clients put into "model"')
    directory: Path = Field(description="config.json, tokenizer and safetensors")


class EngineSettings(_Section):
    """`engine`: how the replicas run; every field is part of the namespace."""

    vllm: str = Field(description="vLLM's version, as /version says it")
    lmcache: str = Field(description="LMCache's version, as the daemon says it")
    dtype: Literal["float32", "bfloat16", "float16"]
    tensor_parallel: PositiveInt = 1
    block_tokens: PositiveInt = 128
    chunk_tokens: PositiveInt = 256
    max_model_len: PositiveInt = 8192
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"

    @model_validator(mode="after")
    def _chunks_are_blocks(self) -> Self:
        if self.chunk_tokens % self.block_tokens:
            raise ValueError(f"chunk_tokens {self.chunk_tokens} must be a multiple of block_tokens {self.block_tokens}")
        return self


class ValkeySettings(_Section):
    """`l2`: the shared tier."""

    type: Literal["valkey"] = "valkey"
    url: str | None = Field(default=None, description="redis://host:port; None: the embedded stack's Valkey")
    username: str | None = None
    password_env: str | None = Field(default=None, description="name of the environment variable with the password")
    ttl_s: PositiveInt = 7 * 86400

    @field_validator("url")
    @classmethod
    def _no_secret(cls, url: str | None) -> str | None:
        if url is not None and "@" in url:
            raise ValueError("a URL with credentials ends up in logs: use username and password_env")
        if url is not None and not re.fullmatch(r"redis://[^/?#]+", url):
            raise ValueError("give redis://host:port; LMCache's adapter knows database 0 alone")
        return url


class PromptSettings(_Section):
    """`prompts`: where the fleet's templates are."""

    directory: str = Field(min_length=1, description="a directory, or s3://bucket/prefix")
    include: tuple[str, ...] = Field(default=("*",), description="file name patterns")
    timezone: str = Field(default="UTC", description="IANA name: whose day it is where a template has the date in it")

    @field_validator("timezone")
    @classmethod
    def _known(cls, timezone: str) -> str:
        try:
            ZoneInfo(timezone)
        except (ZoneInfoNotFoundError, ValueError):
            raise ValueError(f"{timezone!r} is no time zone of the IANA database") from None
        return timezone


class WarmSettings(_Section):
    """`warm`: bounds on one run; see warmers.fleet.WarmLimits."""

    concurrency: PositiveInt = 2
    request_timeout_s: PositiveFloat = 300.0
    visible_deadline_s: PositiveFloat = 60.0
    unflushed_bytes: PositiveInt = 1 << 30
    max_tokens_per_run: PositiveInt | None = None


class ProofSettings(_Section):
    """`proof`: floors and samples; see warmers.fleet.ProofFloors."""

    hit_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    ttft_speedup: PositiveFloat = 3.0
    samples: PositiveInt = 3
    controls: PositiveInt = 1
    max_prefixes: PositiveInt = 32
    output_tokens: PositiveInt = 8


class LocalSettings(_Section):
    """`local`: the embedded stack, for fleets whose replicas are processes on this machine."""

    directory: Path | None = Field(default=None, description="its files; None: the state, where that is a directory")
    engine_python: Path = Path(".venv-engine/bin/python")
    l1_gb: PositiveFloat = 2.0
    kv_space_gb: PositiveInt = 2
    threads: PositiveInt = Field(default_factory=lambda: os.cpu_count() or 1)
    start_timeout_s: PositiveFloat = 300.0


class FleetSettings(_Section):
    """One entry of `fleets`."""

    name: str = Field(pattern=DNS_LABEL)
    model: ModelSettings
    engine: EngineSettings
    prompts: PromptSettings
    l2: ValkeySettings = ValkeySettings()
    warm: WarmSettings = WarmSettings()
    proof: ProofSettings = ProofSettings()


class Settings(_Section):
    """The whole file. Relative paths are relative to the file."""

    state: str = Field(description="fsspec URI or directory: plans, ledger, leases, proofs")
    fleets: tuple[FleetSettings, ...] = Field(min_length=1)
    local: LocalSettings = LocalSettings()

    @field_validator("fleets")
    @classmethod
    def _distinct(cls, fleets: tuple[FleetSettings, ...]) -> tuple[FleetSettings, ...]:
        names = [fleet.name for fleet in fleets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two fleets are named {twice[0]!r}")
        return fleets

    def fleet(self, name: str | None) -> FleetSettings:
        """The fleet of that name; None: the only one there is. Raises ConfigError."""
        names = [fleet.name for fleet in self.fleets]
        if name is None and len(names) == 1:
            return self.fleets[0]
        for fleet in self.fleets:
            if fleet.name == name:
                return fleet
        seen = f"there is no fleet {name!r}" if name else "it holds several fleets"
        raise ConfigError("choosing a fleet", seen=seen, do=f"Give one of: {', '.join(names)}.")


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
    """`fleets.chat.engine.dtype`: the entry of a list by its name where it has one."""
    words, here = [], raw
    for part in location:
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

    fleets = []
    for fleet in settings.fleets:
        model = there(f"fleets.{fleet.name}.model.directory", fleet.model.directory)
        fleets.append(
            fleet.model_copy(
                update={
                    "model": fleet.model.model_copy(update={"directory": model}),
                    "prompts": fleet.prompts.model_copy(update={"directory": _located(fleet.prompts.directory, base)}),
                }
            )
        )
    state = _located(settings.state, base)
    python = Path(os.path.normpath(base / settings.local.engine_python.expanduser()))
    local = settings.local.model_copy(update={"engine_python": python, "directory": local_directory(path)})
    return settings.model_copy(update={"state": state, "fleets": tuple(fleets), "local": local})


def _located(place: str, base: Path) -> str:
    """A URI as it is, a path from `base`."""
    return place if "://" in place else os.path.normpath(base / Path(place).expanduser())


def build_fleet(settings: FleetSettings, served_directory: Path, tokens_per_s: float | None) -> Fleet:
    """The domain's fleet. `served_directory`: where local replicas find models by digest."""
    from resources.model_files import read_model

    return Fleet(
        name=settings.name,
        model=read_model(settings.model.directory, settings.model.name, served_directory),
        engine=EngineSpec(**settings.engine.model_dump()),
        store=settings.l2.type,
        ttl_s=settings.l2.ttl_s,
        limits=WarmLimits(**settings.warm.model_dump()),
        floors=ProofFloors(**settings.proof.model_dump()),
        prefill_tokens_per_s=tokens_per_s,
    )
