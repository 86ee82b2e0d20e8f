"""A fleet's L2 by its settings: the store that warmfront looks into, and what LMCache needs to write there.

What each store can do belongs in `resources/{valkey,file,s3}_store.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from resources.local_stack import EMBEDDED_BUCKET, LocalStack
from resources.s3 import EMBEDDED_CREDENTIALS
from resources.settings import FileSystemSettings, S3Settings, ValkeySettings
from warmers.fleet import Fleet

if TYPE_CHECKING:
    from resources.valkey_access import Who
    from warmers.presence import KVStore

PLUGIN = {"type": "plugin", "module_path": "warmfront_engine.valkey_l2", "class_name": "ValkeyL2Adapter"}
"""See deploy/engine/extensions."""
WORKERS = 4
TIMEOUT_S = 2.0
"""For one key; LMCache counts what takes longer as a miss."""


def open_tier(settings: ValkeySettings | FileSystemSettings | S3Settings, stack: LocalStack) -> "Tier":
    """The tier that a fleet's `l2` names."""
    if isinstance(settings, ValkeySettings):
        return ValkeyTier(settings, stack)
    return FileTier(settings) if isinstance(settings, FileSystemSettings) else S3Tier(settings, stack)


@dataclass(frozen=True)
class ValkeyTier:
    """Valkey, Redis or ElastiCache."""

    settings: ValkeySettings
    stack: LocalStack

    def address(self) -> str:
        """redis(s)://host:port. Raises StoreUnavailable where it is embedded and does not run."""
        return self.settings.url or self.stack.valkey_url()

    def ensure(self) -> str:
        """The same; where it is embedded it is started. Call under `processes.locked`."""
        return self.settings.url or self.stack.ensure()

    @property
    def place(self) -> str:
        """For people, and to tell one L2 from another."""
        return f"Valkey at {self.settings.url or 'the embedded stack'}"

    def store(self) -> "KVStore":
        """Connects when it is first asked."""
        from resources.valkey_access import ValkeyAccess
        from resources.valkey_store import ValkeyStore

        return ValkeyStore(ValkeyAccess(self.address(), self._who(), self.settings.ca_file, self.settings.cluster))

    def _who(self) -> "Who | None":
        from resources.valkey_credentials import ElastiCacheToken, EnvironmentPassword, PasswordFile

        given = self.settings
        if given.iam is not None:
            iam = given.iam
            return ElastiCacheToken(given.username or "", iam.cache_name, iam.region, iam.serverless)
        if given.password_file is not None:
            return PasswordFile(given.username, given.password_file)
        return EnvironmentPassword(given.username, given.password_env) if given.password_env else None

    def adapter(self, fleet: Fleet, address: str) -> dict[str, Any]:
        """LMCache's own; the plugin where there are credentials, which would be on a command line otherwise."""
        where, given = urlsplit(address), self.settings
        tls, named = where.scheme == "rediss", {"key_prefix": fleet.namespace, "ttl_seconds": fleet.ttl_s}
        if not given.authenticates:
            nodes = f"{where.hostname}:{where.port or 6379}"
            patience = {"num_workers": WORKERS, "request_timeout": TIMEOUT_S, "connection_timeout": TIMEOUT_S}
            reached = {"startup_nodes": nodes, "cluster_mode": given.cluster, "tls_enable": tls}
            return {"type": "valkey", **reached, **named, **patience}
        files = {name: str(path) if (path := getattr(given, name)) else None for name in ("ca_file", "password_file")}
        iam = given.iam.model_dump() if given.iam else None
        who = {"username": given.username, "password_env": given.password_env, "iam": iam}
        reached = {"host": where.hostname, "port": where.port or 6379, "tls": tls, "cluster": given.cluster}
        patience = {"num_workers": WORKERS, "timeout_s": TIMEOUT_S}
        return {**PLUGIN, "adapter_params": {**reached, **named, **who, **files, **patience}}

    def environment(self) -> dict[str, str]:
        """LMCache's own adapter has no option for a CA."""
        return {"SSL_CERT_FILE": str(self.settings.ca_file)} if self.settings.ca_file else {}


@dataclass(frozen=True)
class FileTier:
    """A shared file system."""

    settings: FileSystemSettings

    def address(self) -> str:
        """The directory of all namespaces."""
        return str(self.settings.directory)

    ensure = address

    @property
    def place(self) -> str:
        """For people, and to tell one L2 from another."""
        return f"the directory {self.address()}"

    def store(self) -> "KVStore":
        """On this machine's mount."""
        from resources.file_store import FileStore

        return FileStore(Path(self.address()), self.settings.ttl_s)

    def adapter(self, fleet: Fleet, address: str) -> dict[str, Any]:
        """LMCache's `fs`."""
        return {"type": "fs", "base_path": f"{address.rstrip('/')}/{fleet.namespace}"}

    def environment(self) -> dict[str, str]:
        """None."""
        return {}


@dataclass(frozen=True)
class S3Tier:
    """A bucket."""

    settings: S3Settings
    stack: LocalStack

    def address(self) -> str:
        """host[:port] of the bucket itself. Raises StoreUnavailable where it is embedded and does not run."""
        return self._host() or urlsplit(self.stack.bucket_url()).netloc

    def ensure(self) -> str:
        """The same; where it is embedded it is started. Call under `processes.locked`."""
        return self._host() or urlsplit(self.stack.ensure_bucket()).netloc

    @property
    def place(self) -> str:
        """For people, and to tell one L2 from another."""
        return f"the bucket {self.settings.bucket or EMBEDDED_BUCKET}"

    def _host(self) -> str | None:
        given = self.settings
        if given.host is not None or given.bucket is None:
            return given.host
        from resources.s3_store import EXPRESS

        zone = EXPRESS.search(given.bucket)
        service = f"s3express-{zone['zone']}" if zone else "s3"
        return f"{given.bucket}.{service}.{given.region}.amazonaws.com"

    def store(self) -> "KVStore":
        """Through boto3, as the environment says; the embedded one by its address."""
        from resources.s3_store import S3Store

        given = self.settings
        if given.bucket is None:
            return S3Store(EMBEDDED_BUCKET, given.ttl_days, self.stack.bucket_url())
        return S3Store(given.bucket, given.ttl_days)

    def adapter(self, fleet: Fleet, address: str) -> dict[str, Any]:
        """LMCache's `s3`; it finds credentials as boto3 does."""
        given = self.settings
        encrypted = given.tls and given.bucket is not None
        how = {"disable_tls": not encrypted, "s3_prefer_http2": encrypted, "s3_num_io_threads": WORKERS}
        express = given.bucket is not None and given.bucket.endswith("--x-s3")
        return {"type": "s3", "s3_endpoint": address, "s3_region": given.region, "s3_enable_s3express": express, **how}

    def environment(self) -> dict[str, str]:
        """The embedded server checks no credentials, and is given none of ours."""
        return {} if self.settings.bucket else {name.upper(): value for name, value in EMBEDDED_CREDENTIALS.items()}


Tier = ValkeyTier | FileTier | S3Tier
