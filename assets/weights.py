"""Chapter nought: the model's weights, staged once where every replica can stream them from."""

import time
from typing import TYPE_CHECKING

import dagster as dg

from assets.partitions import fleets
from assets.reporting import ONCE_MORE, OWNERS, Retaining, failures, listed, place, table, telling
from resources.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmers.retention import Decision
    from warmers.stage import StageProgress
    from warmers.weights import Manifest

TELL_EVERY_S = 5.0


@dg.asset(
    partitions_def=fleets,
    group_name="weights",
    owners=OWNERS,
    kinds={"s3", "huggingface"},
    retry_policy=ONCE_MORE,
)
def model_weights(
    context: dg.AssetExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.MaterializeResult[None]:
    """A complete, content-addressed copy of the model in S3, which engines stream instead of pulling from a hub.

    What did not change is not sent again, and what was sent before a kill is found. The pointer moves only when every
    file is in its place. Another digest means another namespace: the next `warm` warms anew.
    """
    from warmers.stage import stage

    told = 0.0

    def tell(progress: "StageProgress") -> None:
        nonlocal told
        now = time.monotonic()
        if now - told > TELL_EVERY_S or progress.bytes == progress.total_bytes:
            told = now
            left = f", {progress.seconds_left:.0f} s left" if progress.seconds_left else ""
            here.on_event(
                f"staged {progress.files} of {progress.total_files} files, {progress.bytes:,} of "
                f"{progress.total_bytes:,} bytes, {progress.bytes_per_s / 1e6:,.0f} MB/s{left}"
            )

    with failures():
        here = telling(workspace, context)
        settings = here.fleet_settings(context.partition_key)
        source, stages, model = here.source(settings.name), here.open_stages(), settings.model.name
        with here.stage_lease(model) as fence:
            done = stage(source, model, stages, fence, here.clock.now, here.on_event, tell)
        stages.abort_stale(model, here.clock.now())
    manifest = done.manifest
    return dg.MaterializeResult(
        data_version=dg.DataVersion(manifest.digest),
        metadata={
            "files": len(manifest.files),
            "bytes": manifest.total_bytes,
            "parameters": manifest.parameters,
            "sent_bytes": done.sent_bytes,
            "bytes_per_s": round(done.sent_bytes / done.seconds) if done.seconds else 0,
            "digest": manifest.digest,
            "source": manifest.source,
            "revision": manifest.revision or "none",
            "stage": place(done.uri),
            "shards": table(_rows(manifest)),
        },
    )


@dg.asset_check(asset=model_weights, partitions_def=fleets, blocking=True, retry_policy=ONCE_MORE)
def manifest_complete(
    context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.AssetCheckResult:
    """Everything that the manifest names is in the bucket with its size, and the bytes that were looked at are right.

    Blocks: an engine that loads a damaged stage answers wrongly, or dies. How much is read is `model.verify`.
    """
    from warmers.verification import verify

    with failures():
        here = telling(workspace, context)
        model, stages = here.fleet_settings(context.partition_key).model, here.open_stages()
        manifest = stages.current_manifest(model.name)
        verified = verify(manifest, stages, model.verify, samples=model.samples)
        stages.distrust(model.name, manifest.digest, verified.damaged)
    said = f"{listed(verified.findings)}\n\nStage again: what is damaged is sent anew." if verified.findings else None
    return dg.AssetCheckResult(
        passed=not verified.findings,
        description=said,
        metadata={"digest": manifest.digest, "depth": model.verify, "read_bytes": verified.read_bytes},
    )


@dg.asset_check(asset=model_weights, partitions_def=fleets, retry_policy=ONCE_MORE)
def streamed_tensors_match(
    context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.AssetCheckResult:
    """The tensors that the engines' own streamer gives are the bytes that were staged.

    Looked at on this machine, where it has the engine's environment: the smallest shard, every one where `model.verify`
    is `full`, none where it is `sizes`.
    """
    from warmers.verification import verify_streamed

    with failures():
        here = telling(workspace, context)
        model, stages = here.fleet_settings(context.partition_key).model, here.open_stages()
        manifest, streamer = stages.current_manifest(model.name), here.streamer(context.partition_key)
        uri = stages.uri(model.name, manifest.digest)
        found = verify_streamed(manifest, uri, stages, streamer, model.verify) if streamer else ()
    looked = "with the engine's environment" if streamer else "not looked at: no engine environment, or no streaming"
    return dg.AssetCheckResult(
        passed=not found,
        description=f"{listed(found)}\n\nVerify in full, and stage again." if found else None,
        metadata={"digest": manifest.digest, "looked": looked, "depth": model.verify},
    )


@dg.asset(
    deps=[model_weights],
    partitions_def=fleets,
    group_name="lifecycle",
    owners=OWNERS,
    kinds={"s3"},
)
def weights_retention(
    context: dg.AssetExecutionContext, config: Retaining, workspace: dg.ResourceParam[Workspace]
) -> dg.MaterializeResult[None]:
    """What happens to the model's stages: who needs which, and which are removed.

    Removes nothing unless it is launched with `apply: true`; `stages` says what it would. What engines load, what a
    fleet was last proven with, and what was superseded lately stays (`model.keep_revisions`, `model.keep_days`).
    """
    from warmers.retention import carry_out

    with failures():
        here, name = telling(workspace, context), context.partition_key
        model = here.fleet_settings(name).model.name
        decided: tuple[Decision, ...] = ()
        removed: tuple[Decision, ...] = ()
        if here.keeps_stages(name):
            stages = here.open_stages()
            with here.stage_lease(model) as fence:
                decided = here.decide_weights(name)
                removed = carry_out(decided, model, stages, fence, here.on_event) if config.apply else ()
    return dg.MaterializeResult(
        metadata={
            "removed": len(removed),
            "removed_bytes": sum(decision.bytes for decision in removed),
            "kept_bytes": sum(decision.bytes for decision in decided) - sum(decision.bytes for decision in removed),
            "stages": table(_decided(decided, applied=config.apply)),
        }
    )


def _decided(decisions: "Sequence[Decision]", *, applied: bool) -> list[dict[str, str | int]]:
    gone = "removed" if applied else "would be removed"
    return [
        {"digest": d.digest[:16], "bytes": d.bytes, "what": gone if d.remove else "stays", "why": d.why}
        for d in decisions
    ]


def _rows(manifest: "Manifest") -> list[dict[str, str | int]]:
    return [
        {
            "file": file.name,
            "bytes": file.bytes,
            "sha256": file.sha256[:16],
            "tensors": file.tensors,
            "parameters": file.parameters,
            "dtypes": ", ".join(file.dtypes),
        }
        for file in sorted(manifest.files, key=lambda file: -file.bytes)
    ]
