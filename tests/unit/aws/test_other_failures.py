"""Calls to the other services of AWS with every class of their errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from remuda.adapters.aws.clients import MAX_ATTEMPTS, read_parameter, read_secret
from remuda.adapters.aws.cloudwatch import CloudWatchMetrics
from remuda.adapters.aws.dynamodb.keys import own_key_prefix, role_key_prefix
from remuda.adapters.aws.launch import GroupLaunch
from remuda.domain.errors import Throttled, Unavailable, UserError
from remuda.ports.calls import CallCounter
from tests.support.aws.failures import CONNECTION, connection_failures, deviations
from tests.support.aws.scripted_http import AwsScript, ScriptedClient, answer, refusal
from tests.support.failure_tables import Expected, Failing, Outcome
from tests.support.records import instance_id

FIRST = instance_id(1)
OPTIONS = {
    "ami": "ami-0123456789abcdef0",
    "subnet-ids": "subnet-0123456789abcdef0",
    "iam-instance-profile": "remuda-agent",
}
SECRET = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:remuda"
STACK = "arn:aws:cloudformation:eu-central-1:123456789012:stack/remuda-ci/0a1b"
HOOK_CALL = "CompleteLifecycleAction"
HOOK_DONE = answer("autoscaling", HOOK_CALL, "")


class OneClient:
    """Stands in for `AwsClients`: one service."""

    def __init__(self, client: ScriptedClient) -> None:
        self._client = client

    async def service(self, *_: Any) -> ScriptedClient:
        return self._client


def group_launch(http: AwsScript) -> GroupLaunch:
    """Of an instance in a stack, of which only the service of `http` is called."""
    client, none = ScriptedClient(http), ScriptedClient(AwsScript("autoscaling", {HOOK_CALL: [HOOK_DONE]}))
    is_hook = http.service == "autoscaling"
    return GroupLaunch(
        autoscaling=client if is_hook else none,
        cloudformation=client,
        group="g",
        instance_id=FIRST,
        stack="" if is_hook else STACK,
        calls=CallCounter(),
    )


def metrics(http: AwsScript) -> CloudWatchMetrics:
    return CloudWatchMetrics(client=ScriptedClient(http), pool="ci", command="listen", calls=CallCounter())


def needs_client(
    call: Callable[[Any], Awaitable[Any]], *, is_provider: bool = False
) -> Callable[[AwsScript], Awaitable[Any]]:
    return lambda http: call(OneClient(ScriptedClient(http)) if is_provider else ScriptedClient(http))


@pytest.mark.parametrize(
    ("service", "operation", "call", "missing"),
    [
        (
            "iam",
            "GetInstanceProfile",
            needs_client(lambda client: role_key_prefix(client, OPTIONS, CallCounter())),
            ("NoSuchEntity", Expected(UserError, 1)),
        ),
        ("sts", "GetCallerIdentity", needs_client(lambda client: own_key_prefix(client, FIRST)), None),
        (
            "secretsmanager",
            "GetSecretValue",
            needs_client(lambda clients: read_secret(clients, SECRET, key="token", field="f"), is_provider=True),
            ("ResourceNotFoundException", Expected(UserError, 1)),
        ),
        (
            "ssm",
            "GetParameters",
            needs_client(lambda clients: read_parameter(clients, "/image"), is_provider=True),
            None,
        ),
        # Gauges: a value that is written twice has the same average and maximum.
        ("cloudwatch", "PutMetricData", lambda http: metrics(http).write({"Heartbeats": 1.0}), None),
        # Nothing waits, or the answer to the first attempt was lost.
        (
            "autoscaling",
            "CompleteLifecycleAction",
            lambda http: group_launch(http).complete(),
            ("ValidationError", Expected(None, 1)),
        ),
        (
            "cloudformation",
            "SignalResource",
            lambda http: group_launch(http).complete(),
            ("ValidationError", Expected(None, 1)),
        ),
    ],
)
async def test_other_services(
    service: str,
    operation: str,
    call: Callable[[AwsScript], Awaitable[Any]],
    missing: tuple[str, Expected] | None,
) -> None:
    outcomes: dict[str, Outcome] = {
        **connection_failures(),
        "throttled": refusal(service, "Throttling"),
        "server": refusal(service, "ServiceFailure", 500),
        "denied": refusal(service, "AccessDenied", 403),
        "denied in JSON": refusal(service, "AccessDeniedException"),
        "expired": refusal(service, "ExpiredToken", 403),
        "unknown key": refusal(service, "InvalidClientTokenId", 403),
        "new": refusal(service, "SomethingNew"),
    }
    expected = {
        **CONNECTION,
        "throttled": Expected(Throttled, MAX_ATTEMPTS),
        "server": Expected(Unavailable, MAX_ATTEMPTS),
        **dict.fromkeys(("denied", "denied in JSON", "expired", "unknown key"), Expected(UserError, 1)),
        "new": Expected(Unavailable, 1),
    }
    if missing:
        outcomes["missing"], expected["missing"] = refusal(service, missing[0]), missing[1]

    async def use(http: AwsScript, _: Failing) -> None:
        await call(http)

    assert not await deviations(service, Failing(service, operation, call), outcomes, expected, use)
