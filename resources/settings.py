"""The fields of warmfront.yaml. Reading the file, and what follows from it, belongs in `resources/config.py`."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    field_validator,
    model_validator,
)

from resources.capacity_settings import CapacitySettings
from resources.section import Section, known_timezone
from warmers.errors import ConfigError

DNS_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


class AdapterSettings(Section):
    """One entry of `model.adapters`: a LoRA adapter that the fleet serves beside the model."""

    name: str = Field(min_length=1, description='what clients put into "model"')
    directory: Path = Field(description="PEFT's files; every replica has them under this path")


class ModelSettings(Section):
    """`model`: what the fleet serves, from a directory as it is or from a stage of its source."""

    name: str = Field(min_length=1, description='--served-model-name: what clients put into "model"')
    directory: Path | None = Field(default=None, description="config.json, tokenizer and safetensors")
    source: str | None = Field(default=None, description="a directory, hf://org/name@revision or s3://bucket/prefix")
    assets_cache: str | None = Field(
        default=None,
        pattern="^/",
        description="VLLM_ASSETS_CACHE on every replica, which is in the KV keys; None: below local.directory",
    )
    mount: str | None = Field(
        default=None,
        pattern="^/",
        description="where every replica has `weights` mounted (Mountpoint for S3); None: replicas stream",
    )
    verify: Literal["sizes", "sampled", "full"] = "sampled"
    samples: PositiveInt = Field(default=16, description="blocks of 16 MiB that a sampled verification reads")
    keep_revisions: NonNegativeInt = Field(default=2, description="superseded stages that stay, the newest")
    keep_days: NonNegativeFloat = Field(default=30.0, description="for which a superseded stage stays in any case")
    adapters: tuple[AdapterSettings, ...] = ()

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.directory is None) == (self.source is None):
            raise ValueError("give either directory or source")
        if self.mount is not None and self.source is None:
            raise ValueError("mount is where stages are mounted: it needs source")
        return self

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        names = [self.name, *(adapter.name for adapter in self.adapters)]
        if len(set(names)) < len(names):
            raise ValueError("adapters: two of them have one name, or the model's")
        return self


class EngineSettings(Section):
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


class IamSettings(Section):
    """`l2.iam`: an ElastiCache user that authenticates with IAM; `l2.username` is its user id."""

    cache_name: str = Field(min_length=1, description="of the serverless cache, or the replication group's id")
    region: str = Field(min_length=1)
    serverless: bool = True


class _L2Section(Section):
    budget_bytes: PositiveInt | None = Field(default=None, description="for warmed chunks; the lightest prefixes go")
    grace_s: NonNegativeFloat = Field(default=3 * 86400.0, description="for which what no plan needs stays")


class ValkeySettings(_L2Section):
    """`l2` of type valkey: Valkey, Redis or ElastiCache."""

    type: Literal["valkey"] = "valkey"
    url: str | None = Field(default=None, description="redis(s)://host:port; None: the embedded stack's Valkey")
    cluster: bool = Field(default=False, description="the cluster protocol; ElastiCache Serverless speaks it")
    ca_file: Path | None = Field(default=None, description="of a private CA; None: those that the system trusts")
    username: str | None = None
    password_env: str | None = Field(default=None, description="name of the environment variable with the password")
    password_file: Path | None = Field(default=None, description="with the password; may change at any time")
    iam: IamSettings | None = None
    ttl_s: PositiveInt = 7 * 86400

    @field_validator("url")
    @classmethod
    def _no_secret(cls, url: str | None) -> str | None:
        if url is not None and "@" in url:
            raise ValueError("a URL with credentials ends up in logs: use username and password_env")
        if url is not None and not re.fullmatch(r"rediss?://[^/?#]+", url):
            raise ValueError("give redis://host:port, or rediss:// for TLS; LMCache's adapter knows database 0 alone")
        return url

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        secrets = [name for name in ("password_env", "password_file", "iam") if getattr(self, name) is not None]
        if len(secrets) > 1:
            raise ValueError(f"give one of {' and '.join(secrets)}")
        if self.iam is not None and self.username is None:
            raise ValueError("iam needs username, the ElastiCache user id")
        for needs in ("iam", "ca_file"):
            if getattr(self, needs) is not None and not (self.url or "").startswith("rediss://"):
                raise ValueError(f"{needs} needs TLS: give url as rediss://host:port")
        return self

    @property
    def authenticates(self) -> bool:
        """Whether it takes a password or a token; LMCache's own adapter would take one on its command line alone."""
        return any(secret is not None for secret in (self.password_env, self.password_file, self.iam))


class FileSystemSettings(_L2Section):
    """`l2` of type fs: a directory that every replica and this machine have mounted, read and write."""

    type: Literal["fs"] = "fs"
    directory: Path = Field(description="namespaces are directories below it")
    ttl_s: PositiveInt | None = Field(default=7 * 86400, description="for which an unused file lives")


class S3Settings(_L2Section):
    """`l2` of type s3: a bucket of its own, since LMCache's adapter has no prefix."""

    type: Literal["s3"] = "s3"
    bucket: str | None = Field(default=None, min_length=3, description="None: the embedded stack's")
    region: str = "us-east-1"
    host: str | None = Field(default=None, description="host[:port] of the bucket itself; None: AWS's")
    tls: bool = True
    ttl_days: PositiveInt | None = Field(default=7, description="what the bucket's lifecycle rule says")


def _tier(given: Any) -> str:
    kind = given.get("type", "valkey") if isinstance(given, dict) else getattr(given, "type", "valkey")
    return kind if isinstance(kind, str) else ""


L2Settings = Annotated[
    Annotated[ValkeySettings, Tag("valkey")]
    | Annotated[FileSystemSettings, Tag("fs")]
    | Annotated[S3Settings, Tag("s3")],
    Discriminator(
        _tier,
        custom_error_type="l2_type",
        custom_error_message="its type is none that is known: valkey, fs, s3",
    ),
]


class PromptSettings(Section):
    """`prompts`: where the fleet's templates are."""

    directory: str = Field(min_length=1, description="a directory, or s3://bucket/prefix")
    include: tuple[str, ...] = Field(default=("*",), description="file name patterns")
    timezone: str = Field(default="UTC", description="IANA name: whose day it is where a template has the date in it")

    _known_timezone = field_validator("timezone")(known_timezone)


class WarmSettings(Section):
    """`warm`: bounds on one run; see warmers.fleet.WarmLimits."""

    concurrency: PositiveInt = 2
    request_timeout_s: PositiveFloat = 300.0
    visible_deadline_s: PositiveFloat = 60.0
    unflushed_bytes: PositiveInt = 1 << 30
    max_tokens_per_run: PositiveInt | None = None


class ProofSettings(Section):
    """`proof`: floors and samples; see warmers.fleet.ProofFloors."""

    hit_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    ttft_speedup: PositiveFloat = 3.0
    samples: PositiveInt = 3
    controls: PositiveInt = 1
    max_prefixes: PositiveInt = 32
    output_tokens: PositiveInt = 8


class LocalSettings(Section):
    """`local`: the embedded stack, for fleets whose replicas are processes on this machine."""

    directory: Path | None = Field(default=None, description="its files; None: the state, where that is a directory")
    engine_python: Path = Path(".venv-engine/bin/python")
    l1_gb: PositiveFloat = 2.0
    kv_space_gb: PositiveInt = 2
    threads: PositiveInt = Field(default_factory=lambda: os.cpu_count() or 1)
    start_timeout_s: PositiveFloat = 300.0


class FleetSettings(Section):
    """One entry of `fleets`."""

    name: str = Field(pattern=DNS_LABEL)
    model: ModelSettings
    engine: EngineSettings
    prompts: PromptSettings
    l2: L2Settings = ValkeySettings()
    warm: WarmSettings = WarmSettings()
    proof: ProofSettings = ProofSettings()
    capacity: CapacitySettings | None = None

    @model_validator(mode="after")
    def _namespace_has_a_place(self) -> Self:
        if self.l2.type == "s3" and self.model.mount is not None:
            raise ValueError(
                "l2 of type s3 does not go with model.mount: LMCache's s3 adapter has no prefix, so the namespace is "
                "in the path that the model is loaded from, and a mount has one for all"
            )
        return self


class Settings(Section):
    """The whole file. Relative paths are relative to the file."""

    state: str = Field(description="fsspec URI or directory: plans, ledger, leases, proofs")
    weights: str | None = Field(
        default=None, pattern="^s3://[^/]", description="s3://bucket/prefix for stages; None: the embedded stack's"
    )
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
