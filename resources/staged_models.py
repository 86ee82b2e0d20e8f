"""A staged model as a fleet serves it: its small files, fetched once, and the string that is in its KV keys."""

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from resources.model_files import describe
from resources.objects import unavailable
from resources.stages import BucketStages
from warmers.errors import NotStaged, WeightsError
from warmers.fleet import Model
from warmers.weights import WEIGHTS, Manifest, stage_path, streamed_path


@dataclass(frozen=True, slots=True)
class Loading:
    """How replicas get at a stage: each way makes another model string, which is in every KV key."""

    assets_cache: str
    """VLLM_ASSETS_CACHE, where they stream."""
    mount: str | None = None
    """Where they have the root of all stages mounted, if they do."""


def read_stage(stages: BucketStages, name: str, directory: Path, loading: Loading) -> Model:
    """The current stage of a model. `directory`: for its small files. Raises NotStaged before there is one."""
    manifest = stages.current_manifest(name)
    _fetch(stages, manifest, directory / manifest.digest)
    last = {"digest": manifest.digest, "uri": stages.uri(name, manifest.digest)}
    _write(directory / f"{name}.json", json.dumps(last).encode())
    return _model(name, last, directory, loading)


def last_stage(name: str, directory: Path, loading: Loading) -> Model:
    """The same as it was last read, while the embedded store does not run and nobody can move its pointer."""
    try:
        last = json.loads((directory / f"{name}.json").read_bytes())
    except FileNotFoundError:
        raise NotStaged(
            f"looking for the weights of {name}", seen="nobody has staged them yet", do="Run warmfront stage."
        ) from None
    return _model(name, last, directory, loading)


def _model(name: str, last: dict[str, str], directory: Path, loading: Loading) -> Model:
    here, digest = directory / last["digest"], last["digest"]
    if loading.mount is not None:
        return describe(here, name, f"{loading.mount.rstrip('/')}/{stage_path(name, digest)}", digest)
    return describe(here, name, streamed_path(last["uri"], loading.assets_cache), digest, last["uri"])


def _fetch(stages: BucketStages, manifest: Manifest, directory: Path) -> None:
    """Everything but the weights, on this machine; each file appears whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in (file for file in manifest.files if not file.name.endswith(WEIGHTS)):
        target = directory / file.name
        if target.exists() and target.stat().st_size == file.bytes:
            continue
        content = b"".join(stages.read(manifest.model, manifest.digest, file.name))
        if sha256(content).hexdigest() != file.sha256:
            raise WeightsError(
                f"reading {file.name} of {stages.uri(manifest.model, manifest.digest)}",
                seen="it has other bytes than were staged",
                do="Run warmfront stage --verify full, and stage again.",
            )
        _write(target, content)


def _write(target: Path, content: bytes) -> None:
    scratch = target.with_name(f".{target.name}.{uuid4().hex}")
    try:
        scratch.write_bytes(content)
        scratch.replace(target)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise unavailable("writing", target, error) from error
