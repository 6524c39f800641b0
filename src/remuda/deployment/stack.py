"""The CloudFormation stack: change sets, progress by events, and deletion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remuda.deployment.api import AwsApi, tags_of
from remuda.deployment.template import NAMES
from remuda.domain.errors import Partial, Unavailable, UserError
from remuda.ports.clock import Clock

CHANGE_SET = "remuda-deploy"
#: Tag with the pool of a stack. Not that of machines: CloudFormation gives all instances of a stack its tags ("Resource
#: tags" in its template reference), and refresh would take the listener for a machine of the pool.
STACK_TAG = "remuda:stack"
TABLE_TYPE = "AWS::DynamoDB::Table"
#: A stack that exists only as the place of a change set.
REVIEW = "REVIEW_IN_PROGRESS"
#: States after a failed creation: such a stack can only be deleted.
FAILED_CREATION = frozenset({"ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED"})
#: Seconds between two reads of the stack: the first, and the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 3.0
#: Seconds within which CloudFormation must start an operation.
START_TIMEOUT_S = 120.0
_NO_STACK = frozenset({"ValidationError"})
_CHANGE_SET_GONE = frozenset({"ChangeSetNotFound", "ChangeSetNotFoundException"})
_NO_CHANGE_SET = _CHANGE_SET_GONE | _NO_STACK
#: Words of the reason of a change set that failed because there is nothing to change. CloudFormation has no code for it
#: (the AWS CLI's deploy command compares the same two texts).
_NO_CHANGES = ("didn't contain changes", "No updates are to be performed")
#: Reason of resources that CloudFormation stopped because another one failed.
_CANCELLED = "cancelled"

#: Gets one line per event of the stack.
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StackState:
    status: str
    reason: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        return self.status.endswith("_IN_PROGRESS") and self.status != REVIEW

    @property
    def exists(self) -> bool:
        """Whether it has resources."""
        return self.status != REVIEW and self.status not in FAILED_CREATION

    @property
    def pool(self) -> str:
        """The pool that it belongs to; empty if it is a stack of something else. A stack made by hand has no tag."""
        return self.tags.get(STACK_TAG, self.parameters.get("Pool", ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class StackChange:
    action: str
    logical_id: str
    resource_type: str
    #: Whether the resource is replaced: True, False or Conditional in the words of CloudFormation; empty if it is new.
    replacement: str = ""

    @property
    def is_replaced(self) -> bool:
        return self.replacement in {"True", "Conditional"}

    @property
    def word(self) -> str:
        words = {"Add": "add", "Modify": "change", "Remove": "remove", "Import": "import"}
        if self.action == "Modify" and self.is_replaced:
            return "replace" if self.replacement == "True" else "change or replace"
        return words.get(self.action, self.action.lower())

    @property
    def loses_data(self) -> bool:
        return self.resource_type == TABLE_TYPE and (self.is_replaced or self.action == "Remove")

    @property
    def fails(self) -> bool:
        """Whether CloudFormation would refuse it in the middle of the update: it cannot replace what keeps its name.

        A conditional replacement is none here: every change of its launch template is one for an Auto Scaling group.
        """
        return self.resource_type in NAMES and self.replacement == "True"


def stored_parameters(stack: StackState | None) -> Mapping[str, str]:
    """The parameters of an existing stack; empty if none exists."""
    return stack.parameters if stack and stack.exists else {}


class Stack:
    def __init__(self, api: AwsApi, name: str, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self.name = name
        #: The change set that `plan` has created: another deployment at the same time uses the same name.
        self.change_set = CHANGE_SET

    async def describe(self) -> StackState | None:
        answer = await self._api.find("cloudformation", "DescribeStacks", _NO_STACK, StackName=self.name)
        for stack in (answer or {}).get("Stacks", ()):
            if stack["StackStatus"] == "DELETE_COMPLETE":
                return None
            return StackState(
                status=str(stack["StackStatus"]),
                reason=str(stack.get("StackStatusReason") or ""),
                parameters={
                    str(item["ParameterKey"]): str(item.get("ParameterValue", ""))
                    for item in stack.get("Parameters") or ()
                },
                outputs={str(item["OutputKey"]): str(item["OutputValue"]) for item in stack.get("Outputs") or ()},
                tags=tags_of(stack.get("Tags")),
            )
        return None

    # Changes --------------------------------------------------------------------------------------------------

    async def plan(
        self,
        *,
        template_url: str,
        parameters: Mapping[str, str],
        kept: Sequence[str],
        tags: Mapping[str, str],
        is_new: bool,
        adopts: bool = False,
    ) -> tuple[StackChange, ...]:
        """Create the change set and return its changes; none if the stack is up to date.

        `kept` are the parameters that keep their values. With `adopts`, existing resources with the names in the
        template become part of the stack.
        """
        await self.discard_plan()
        given: list[dict[str, Any]] = [
            {"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()
        ]
        given += [{"ParameterKey": key, "UsePreviousValue": True} for key in kept]
        made = await self._api.call(
            "cloudformation",
            "CreateChangeSet",
            StackName=self.name,
            ChangeSetName=CHANGE_SET,
            ClientToken=self._api.new_token(),
            ChangeSetType="CREATE" if is_new else "UPDATE",
            TemplateURL=template_url,
            Parameters=given,
            Tags=[{"Key": key, "Value": value} for key, value in tags.items()],
            Capabilities=["CAPABILITY_NAMED_IAM"],
            ImportExistingResources=adopts,
        )
        self.change_set = str(made["Id"])
        pause_s = FIRST_PAUSE_S
        while True:
            answer = await self._describe_change_set()
            status, reason = str(answer["Status"]), str(answer.get("StatusReason") or "")
            if status == "FAILED":
                await self.discard_plan()
                if any(text in reason for text in _NO_CHANGES):
                    return ()
                raise UserError(f"CloudFormation refuses the change set: {reason}", fix="correct what it names")
            if status == "CREATE_COMPLETE":
                return tuple(_change(item) for item in answer["Changes"])
            pause_s = await self._pause(pause_s)

    async def _describe_change_set(self) -> dict[str, Any]:
        changes: list[Any] = []
        token: dict[str, str] = {}
        while True:
            page = await self._api.call(
                "cloudformation", "DescribeChangeSet", StackName=self.name, ChangeSetName=self.change_set, **token
            )
            changes += page.get("Changes") or ()
            if not page.get("NextToken"):
                return {**page, "Changes": changes}
            token = {"NextToken": str(page["NextToken"])}

    async def discard_plan(self) -> None:
        """Delete the change set, and the stack if it exists only for the change set."""
        await self._api.find(
            "cloudformation", "DeleteChangeSet", _NO_CHANGE_SET, StackName=self.name, ChangeSetName=CHANGE_SET
        )
        state = await self.describe()
        if state is not None and state.status == REVIEW:
            await self.delete(lambda _: None)

    async def apply(self, report: Report) -> None:
        """Execute the change set and wait for the end."""
        before = await self._newest_event()
        started = await self._api.find(
            "cloudformation",
            "ExecuteChangeSet",
            _CHANGE_SET_GONE,
            StackName=self.name,
            ChangeSetName=self.change_set,
            ClientRequestToken=self._api.new_token(),
        )
        if started is None:
            raise UserError(
                f"the change set of stack {self.name} is gone: another deployment has replaced it",
                fix="run the same command again, and only one at a time",
            )
        await self.settle(report, after=before)

    # Progress -------------------------------------------------------------------------------------------------

    async def settle(self, report: Report, *, after: str | None = None) -> StackState | None:
        """Wait until no operation is in progress, and raise if it failed. None if the stack is gone.

        `after` is the last event before the operation; without it, only events from now on are reported.
        """
        seen = {await self._newest_event() if after is None else after}
        # Right after a call, CloudFormation may still answer with the state before it: the first event is the start.
        has_started = after is None
        started_at = self._clock.monotonic()
        pause_s = FIRST_PAUSE_S
        failures: list[str] = []
        while True:
            state = await self.describe()
            for event in await self._events(seen):
                has_started = True
                line = _event_line(event)
                report(line)
                reason = str(event.get("ResourceStatusReason") or "")
                if str(event["ResourceStatus"]).endswith("_FAILED") and _CANCELLED not in reason:
                    failures.append(f"{event['LogicalResourceId']} ({event['ResourceType']}): {reason or 'no reason'}")
            if state is None:
                return None
            if has_started and not state.is_busy:
                break
            if not has_started and self._clock.monotonic() - started_at > START_TIMEOUT_S:
                raise Unavailable(
                    f"stack {self.name} stays {state.status}: CloudFormation does not start the operation"
                )
            pause_s = await self._pause(pause_s)
        if "ROLLBACK" in state.status or state.status.endswith("_FAILED"):
            cause = failures[0] if failures else state.reason or "CloudFormation gives no reason"
            raise Partial(
                f"stack {self.name} is {state.status}: {cause}", fix="remove the cause, and run the same command again"
            )
        return state

    async def _newest_event(self) -> str:
        answer = await self._api.find("cloudformation", "DescribeStackEvents", _NO_STACK, StackName=self.name)
        events = (answer or {}).get("StackEvents") or ()
        return str(events[0]["EventId"]) if events else ""

    async def _events(self, seen: set[str]) -> list[dict[str, Any]]:
        """The events after those seen, oldest first. CloudFormation lists the newest first."""
        found: list[dict[str, Any]] = []
        token: dict[str, str] = {}
        while True:
            page = await self._api.find(
                "cloudformation", "DescribeStackEvents", _NO_STACK, StackName=self.name, **token
            )
            for event in (page or {}).get("StackEvents") or ():
                if event["EventId"] in seen:
                    seen.update(str(item["EventId"]) for item in found)
                    return found[::-1]
                found.append(event)
            if not page or not page.get("NextToken"):
                seen.update(str(item["EventId"]) for item in found)
                return found[::-1]
            token = {"NextToken": str(page["NextToken"])}

    async def _pause(self, pause_s: float) -> float:
        await self._clock.sleep(pause_s)
        return min(pause_s * 1.5, LONGEST_PAUSE_S)

    # Deletion -------------------------------------------------------------------------------------------------

    async def delete(self, report: Report) -> None:
        """Delete the stack and wait until it is gone."""
        state = await self.describe()
        if state is None:
            return
        before = await self._newest_event()
        if state.status != "DELETE_IN_PROGRESS":
            await self._api.call("cloudformation", "DeleteStack", StackName=self.name)
        try:
            left = await self.settle(report, after=before)
        except Partial as error:
            # The state before the deletion may contain ROLLBACK.
            if (await self.describe()) is None:
                return
            raise Unavailable(error.message, fix="remove the cause, and run the same command again") from None
        if left is not None:
            raise Unavailable(f"stack {self.name} is {left.status} after its deletion")


def _change(item: Mapping[str, Any]) -> StackChange:
    found = item["ResourceChange"]
    return StackChange(
        action=str(found["Action"]),
        logical_id=str(found["LogicalResourceId"]),
        resource_type=str(found["ResourceType"]),
        replacement=str(found.get("Replacement") or ""),
    )


def _event_line(event: Mapping[str, Any]) -> str:
    reason = str(event.get("ResourceStatusReason") or "")
    status = str(event["ResourceStatus"]).replace("_", " ").lower()
    return f"{event['LogicalResourceId']}: {status}{f' ({reason})' if reason else ''}"


# A new stack without CloudFormation ---------------------------------------------------------------------------------


def new_resources(
    template: Mapping[str, Any], parameters: Mapping[str, str], adopted: Collection[str] = ()
) -> tuple[StackChange, ...]:
    """The resources that a new stack would have, for a dry run: a change set would create an empty stack."""
    values = {
        name: parameters.get(name, str(declared.get("Default", "")))
        for name, declared in template["Parameters"].items()
    }
    conditions = template["Conditions"]

    def holds(expression: Any) -> bool:
        (name, argument), *_ = expression.items()
        match name:
            case "Condition":
                return holds(conditions[argument])
            case "Fn::Not":
                return not holds(argument[0])
            case "Fn::And":
                return all(map(holds, argument))
            case "Fn::Or":
                return any(map(holds, argument))
            case "Fn::Equals":
                return text(argument[0]) == text(argument[1])
        raise ValueError(name)

    def text(expression: Any) -> str:
        if isinstance(expression, str):
            return expression
        (name, argument), *_ = expression.items()
        if name == "Ref":
            return values[argument]
        if name == "Fn::Join":
            separator, listed = argument
            return str(separator).join(text(listed).split(","))
        raise ValueError(name)

    return tuple(
        StackChange(action="Import" if name in adopted else "Add", logical_id=name, resource_type=resource["Type"])
        for name, resource in template["Resources"].items()
        if "Condition" not in resource or holds(conditions[resource["Condition"]])
    )
