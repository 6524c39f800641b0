"""The launch of a listener's instance: calls to its Auto Scaling group and to its stack."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from remuda.adapters.aws.launch import GROUP_RESOURCE, GROUP_VARIABLE, HOOK, INSTANCE_VARIABLE, GroupLaunch
from remuda.config.sources import load
from remuda.domain.errors import Unavailable, UserError
from remuda.ports.calls import CallCounter
from remuda.wiring.aws import open_launch
from tests.support.aws.contract import check_request

GROUP, INSTANCE = "remuda-ci-listener", "i-0123456789abcdef0"
STACK = "arn:aws:cloudformation:eu-central-1:123456789012:stack/remuda-ci/0a1b"


def refusal(operation: str, code: str, message: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)


class FakeLaunchServices:
    """Auto Scaling and CloudFormation. Each refuses a second call, and calls for which nothing waits."""

    def __init__(self, *, waiting: bool = True, updating: bool = True, error: ClientError | None = None) -> None:
        self.waiting, self.updating, self.error = waiting, updating, error
        self.calls: list[str] = []

    async def complete_lifecycle_action(self, **request: Any) -> None:
        check_request("autoscaling", "CompleteLifecycleAction", request)
        self.calls.append("hook")
        if self.error:
            raise self.error
        assert (request["AutoScalingGroupName"], request["LifecycleHookName"]) == (GROUP, HOOK)
        assert (request["InstanceId"], request["LifecycleActionResult"]) == (INSTANCE, "CONTINUE")
        if not self.waiting:
            message = f"No active Lifecycle Action found with instance ID {INSTANCE}"
            raise refusal("CompleteLifecycleAction", "ValidationError", message)
        self.waiting = False

    async def signal_resource(self, **request: Any) -> None:
        check_request("cloudformation", "SignalResource", request)
        self.calls.append("signal")
        assert (request["StackName"], request["LogicalResourceId"]) == (STACK, GROUP_RESOURCE)
        assert (request["UniqueId"], request["Status"]) == (INSTANCE, "SUCCESS")
        if not self.updating:
            raise refusal("SignalResource", "ValidationError", f"Stack {STACK} is in UPDATE_COMPLETE state")
        self.updating = False


def launch(account: FakeLaunchServices, stack: str = STACK) -> GroupLaunch:
    return GroupLaunch(
        autoscaling=account,
        cloudformation=account,
        group=GROUP,
        instance_id=INSTANCE,
        stack=stack,
        calls=CallCounter(),
    )


async def test_group_is_told_before_the_stack():
    account = FakeLaunchServices()
    assert await launch(account).complete()
    assert account.calls == ["hook", "signal"]


@pytest.mark.parametrize(("waiting", "updating"), [(True, False), (False, True), (False, False)])
async def test_listener_that_was_started_again_has_nothing_to_complete(*, waiting: bool, updating: bool):
    account = FakeLaunchServices(waiting=waiting, updating=updating)
    assert await launch(account).complete() is (waiting or updating)
    assert await launch(account).complete() is False


async def test_group_without_a_stack_gets_no_signal():
    account = FakeLaunchServices()
    assert await launch(account, stack="").complete()
    assert account.calls == ["hook"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [("AccessDenied", UserError), ("ResourceContention", Unavailable), ("Throttling", Unavailable)],
)
async def test_other_errors_are_raised_and_the_stack_is_not_told(code: str, expected: type[Exception]):
    account = FakeLaunchServices(error=refusal("CompleteLifecycleAction", code, "no"))
    with pytest.raises(expected):
        await launch(account).complete()
    assert account.calls == ["hook"]


@pytest.mark.parametrize("known", [{}, {GROUP_VARIABLE: GROUP}, {GROUP_VARIABLE: GROUP, INSTANCE_VARIABLE: INSTANCE}])
async def test_only_an_instance_of_the_group_has_a_launch(monkeypatch: pytest.MonkeyPatch, known: dict[str, str]):
    """A listener in a container or on a server calls neither service."""
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    for name in (GROUP_VARIABLE, INSTANCE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    settings = load({"backend": "aws", "pool": "ci"}, environ={"REMUDA_CONFIG": "/dev/null"})
    async with open_launch(settings, CallCounter()) as found:
        assert (found is not None) is (len(known) == 2)
