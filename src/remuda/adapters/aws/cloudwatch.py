"""Metrics in CloudWatch, for processes whose log is not in CloudWatch. Functions write theirs in their log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remuda.adapters.aws.calls import translated
from remuda.ports.calls import CallCounter

CLOUDWATCH = "CloudWatch"
SERVICE = "cloudwatch"
NAMESPACE = "Remuda"
SECONDS_ENDING = "Seconds"


class CloudWatchMetrics:
    def __init__(self, *, client: Any, pool: str, command: str, calls: CallCounter) -> None:
        """CloudWatch charges per metric and combination of dimensions, so these are pool and command only."""
        self._client = client
        self._dimensions = [{"Name": "Pool", "Value": pool}, {"Name": "Command", "Value": command}]
        self._calls = calls

    async def write(self, values: Mapping[str, float]) -> None:
        """One call, which has no time: CloudWatch takes its own. A call may have 1,000 metrics."""
        data = [
            {
                "MetricName": name,
                "Dimensions": self._dimensions,
                "Value": value,
                "Unit": "Seconds" if name.endswith(SECONDS_ENDING) else "Count",
            }
            for name, value in values.items()
        ]
        with self._calls.counted(SERVICE, "PutMetricData"), translated(CLOUDWATCH, "PutMetricData"):
            await self._client.put_metric_data(Namespace=NAMESPACE, MetricData=data)
