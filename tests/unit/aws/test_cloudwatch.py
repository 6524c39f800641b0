"""Metrics in CloudWatch: requests as botocore makes them."""

from __future__ import annotations

import json
from typing import Any

import botocore.session
import pytest
from botocore.exceptions import ClientError
from botocore.serialize import create_serializer

from remuda.adapters.aws.clients import PROTOCOLS
from remuda.adapters.aws.cloudwatch import CloudWatchMetrics
from remuda.domain.errors import UserError
from remuda.ports.calls import CallCounter
from tests.support.aws.contract import check_request


class RecordingClient:
    def __init__(self, error: Exception | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self._error = error

    async def put_metric_data(self, **parameters: Any) -> None:
        self.sent.append(parameters)
        if self._error:
            raise self._error


async def test_values_are_written_in_one_call():
    client, calls = RecordingClient(), CallCounter()
    metrics = CloudWatchMetrics(client=client, pool="ci", command="listen", calls=calls)
    await metrics.write({"Heartbeats": 1.0, "JobsWaiting": 3.0})
    (request,) = client.sent
    check_request("cloudwatch", "PutMetricData", request)
    assert request["Namespace"] == "Remuda"
    assert {item["MetricName"]: item["Value"] for item in request["MetricData"]} == {"Heartbeats": 1, "JobsWaiting": 3}
    dimensions = [{"Name": "Pool", "Value": "ci"}, {"Name": "Command", "Value": "listen"}]
    assert all(item["Dimensions"] == dimensions for item in request["MetricData"])
    assert calls.by_service() == {"cloudwatch": {"PutMetricData": 1}}


def test_request_equals_that_of_botocore():
    model = botocore.session.get_session().get_service_model("cloudwatch")
    assert "json" in model.metadata["protocols"]
    parameters = {"Namespace": "Remuda", "MetricData": [{"MetricName": "Heartbeats", "Value": 1.0}]}
    serializer = create_serializer("json", include_validation=False)
    expected = serializer.serialize_to_request(parameters, model.operation_model("PutMetricData"))
    headers, body = PROTOCOLS["cloudwatch"]().request("PutMetricData", parameters)
    assert json.loads(body) == json.loads(expected["body"])
    assert headers["x-amz-target"] == expected["headers"]["X-Amz-Target"]
    assert headers["content-type"] == expected["headers"]["Content-Type"]


async def test_missing_permission_is_named():
    denied: Any = {"Error": {"Code": "AccessDenied", "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    client = RecordingClient(ClientError(denied, "PutMetricData"))
    metrics = CloudWatchMetrics(client=client, pool="ci", command="listen", calls=CallCounter())
    with pytest.raises(UserError, match="CloudWatch"):
        await metrics.write({"Heartbeats": 1.0})
