"""Many ticks of sensors on an ephemeral instance."""

import dagster as dg

from assets.tags import FLEET_TAG
from pipelines.definitions import build_defs


class Days:
    """Stands in for Dagster's daemon: ticks a sensor, keeps cursor and run keys, executes what is asked for."""

    def __init__(self, workspace, instance):
        self.workspace, self.instance = workspace, instance
        self.definitions = build_defs(workspace)
        self.cursors, self.run_keys, self.finished = {}, set(), []
        self.said = ""

    def tick(self, sensor="prompt_templates_changed", execute=True):
        """The fleets that were warmed; those whose files alone were looked at are in `looks`."""
        definition = self.definitions.get_repository_def().get_sensor_def(sensor)
        context = dg.build_sensor_context(
            self.instance,
            self.cursors.get(sensor),
            sensor_name=sensor,
            repository_def=self.definitions.get_repository_def(),
            resources={"workspace": self.workspace},
        )
        with context:
            data = definition.evaluate_tick(context)
        self.cursors[sensor] = data.cursor
        self.said = data.skip_message or ""
        for event in data.asset_events:
            self.instance.report_runless_asset_event(event)
        new = [r for r in data.run_requests if r.run_key not in self.run_keys]
        self.run_keys |= {r.run_key for r in new}
        self.requests = new
        if execute:
            default = "stage_weights" if sensor == "model_revision_changed" else "warm"
            self.finished += [self.execute(request, default) for request in new]
        self.looks = [request.tags[FLEET_TAG] for request in new if request.job_name == "read_templates"]
        return [request.tags[FLEET_TAG] for request in new if request.job_name != "read_templates"]

    def execute(self, request, default="warm"):
        job = self.definitions.resolve_job_def(request.job_name or default)
        return job.execute_in_process(
            partition_key=request.partition_key, tags=request.tags, instance=self.instance, raise_on_error=False
        )

    def readable(self, fleet):
        """The latest verdict on the fleet's files; None before the first."""
        key = dg.AssetCheckKey(dg.AssetKey("prompt_templates"), "templates_are_readable")
        records = self.instance.event_log_storage.get_asset_check_execution_history(key, limit=50)
        evaluations = [record.event.asset_check_evaluation for record in records]
        return next((e for e in evaluations if e.partition == fleet), None)
