"""The launch of an instance by an Auto Scaling group: a lifecycle hook of the group, and an update of its stack.

A group keeps the old instance until the hook of the new one is completed, whatever the reason of the replacement: a
health check, the maximum age, an instance refresh. An update by CloudFormation waits for a signal instead, which it
gets, too. Without them within their time limits, the new instance is terminated and the update is rolled back.
"""

from __future__ import annotations

from typing import Any

from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import code_of, translated
from remuda.ports.calls import CallCounter

AUTO_SCALING, CLOUDFORMATION = "Auto Scaling", "CloudFormation"
#: Variables of the listener: name of its group, id of its instance, and ARN of its stack if it has one.
GROUP_VARIABLE = "REMUDA_LISTENER_GROUP"
INSTANCE_VARIABLE = "REMUDA_LISTENER_INSTANCE"
STACK_VARIABLE = "REMUDA_LISTENER_STACK"
#: Name of the hook.
HOOK = "listener-ready"
#: Logical id of the group in the stack.
GROUP_RESOURCE = "ListenerGroup"
#: Code of both services if nothing waits: "No active Lifecycle Action found with instance ID …", or a stack that is not
#: being updated.
NOT_WAITING = "ValidationError"


class GroupLaunch:
    def __init__(
        self, *, autoscaling: Any, cloudformation: Any, group: str, instance_id: str, stack: str, calls: CallCounter
    ) -> None:
        """`stack` is empty if the group is not part of a stack."""
        self._autoscaling = autoscaling
        self._cloudformation = cloudformation
        self._group = group
        self._instance_id = instance_id
        self._stack = stack
        self._calls = calls

    async def complete(self) -> bool:
        # The hook first: the signal lets CloudFormation end the old instance.
        hook = await self._complete_hook()
        return await self._signal_stack() or hook if self._stack else hook

    async def _complete_hook(self) -> bool:
        with self._calls.counted("autoscaling", "CompleteLifecycleAction"), translated(AUTO_SCALING, self._group):
            try:
                await self._autoscaling.complete_lifecycle_action(
                    AutoScalingGroupName=self._group,
                    LifecycleHookName=HOOK,
                    InstanceId=self._instance_id,
                    LifecycleActionResult="CONTINUE",
                )
            except ClientError as error:
                if code_of(error) != NOT_WAITING:
                    raise
                return False
        return True

    async def _signal_stack(self) -> bool:
        with self._calls.counted("cloudformation", "SignalResource"), translated(CLOUDFORMATION, self._stack):
            try:
                await self._cloudformation.signal_resource(
                    StackName=self._stack,
                    LogicalResourceId=GROUP_RESOURCE,
                    UniqueId=self._instance_id,
                    Status="SUCCESS",
                )
            except ClientError as error:
                if code_of(error) != NOT_WAITING:
                    raise
                return False
        return True
