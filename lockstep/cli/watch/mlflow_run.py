"""A run in MLflow: its own variables say where (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.cli.watch.follow import Point

_MOST_METRICS, _MOST_PARAMS, _MOST_LETTERS = 1000, 100, 6000  # that MLflow takes in one call, and in a value
_REFUSED = re.compile(r"[^\w\-./ ]")  # in the name of a metric
_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}  # else FAILED


class MlflowRun:
    """A tracker of one run, in the process that follows it."""

    def open(self, folder: Path, told: Mapping[str, Any], known: str) -> tuple[str, str]:
        """Begin a run, or go on with the `known` one; gives its id, and where to look at it."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._make_metric = MlflowClient(), Metric
        if known:
            self._client.update_run(known, status="RUNNING")
            self._id = known
        else:
            self._id = self._client.create_run(self._find_experiment(), run_name=told["name"]).info.run_id
            params = [Param(key, str(value)[:_MOST_LETTERS]) for key, value in told["settings"].items()]
            for first in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self._id, params=params[first : first + _MOST_PARAMS])
        return self._id, f"{self._client.tracking_uri}, run {self._id}"

    def _find_experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not name:
            return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def log(self, points: list[Point]) -> None:
        """Take measurements, many in one call."""
        now = int(time.time() * 1000)
        rows = [
            self._make_metric(_REFUSED.sub("_", name), value, now, step)
            for step, values in points
            for name, value in values.items()
        ]
        for first in range(0, len(rows), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=rows[first : first + _MOST_METRICS])

    def close(self, state: str, summary: Mapping[str, Any]) -> None:
        """End the run; what its summary has is there as tags, beside the metrics."""
        for name, value in {**summary, "state": state}.items():
            self._client.set_tag(self._id, name, str(value))
        self._client.set_terminated(self._id, _STATUS.get(state, "FAILED"))
