"""Calls to EC2: counted, retried if that is safe, errors translated; descriptions of instances and their tags."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from botocore import xform_name
from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import EC2, FAILURES, MAX_MESSAGE, code_of, fix_of_end, translate
from remuda.adapters.aws.clients import ClientConfig
from remuda.domain.errors import RemudaError, Throttled, TimedOut, Unavailable
from remuda.domain.resources import is_instance_id
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids, backoff_s, retry
from remuda.ports.compute import ENDED, MachineState, MachineView

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client

SERVICE = "ec2"
#: Attempts per call, and seconds before the first retry.
MAX_ATTEMPTS = 4
PAUSE_S = 0.5
CONNECT_TIMEOUT_S = 5.0
#: CreateFleet responds only after all instances were launched or have failed.
READ_TIMEOUT_S = 60.0
MAX_CONNECTIONS = 10
MAX_PAGES = 1_000
DESCRIBE_PAGE = 1_000
#: Tags with this prefix are set by AWS and cannot be changed.
RESERVED_PREFIX = "aws:"

#: Remuda never stops an instance. One that was stopped by hand counts as shutting down, so that it gets terminated.
_STATES = {
    "pending": MachineState.PENDING,
    "running": MachineState.RUNNING,
    "shutting-down": MachineState.SHUTTING_DOWN,
    "terminated": MachineState.TERMINATED,
    "stopping": MachineState.SHUTTING_DOWN,
    "stopped": MachineState.SHUTTING_DOWN,
}

Filters = list[dict[str, Any]]


def client_config(*, read_timeout_s: float = READ_TIMEOUT_S) -> ClientConfig:
    """Settings of the EC2 client, without its retries: `Ec2Calls` retries, and knows which calls are safe."""
    return ClientConfig(
        connect_timeout_s=CONNECT_TIMEOUT_S,
        read_timeout_s=read_timeout_s,
        connections=MAX_CONNECTIONS,
        attempts=1,
    )


class Ec2Calls:
    def __init__(
        self, *, client: EC2Client, clock: Clock, ids: Ids, calls: CallCounter, retry_timeouts: bool = True
    ) -> None:
        """`retry_timeouts=False` is for callers that run periodically and leave a timed-out call to the next run."""
        self._retry_timeouts = retry_timeouts
        self._client = client
        self._clock = clock
        self._ids = ids
        self._calls = calls

    async def call(
        self, operation: str, *, idempotent: bool = True, raw_codes: Collection[str] = (), **parameters: Any
    ) -> dict[str, Any]:
        """Call EC2 and retry temporary failures. Errors with a code in `raw_codes` are raised as `ClientError`."""

        def pause_s(error: RemudaError, attempt: int) -> float | None:
            # EC2 does not carry out a throttled call, so a retry is always safe.
            is_safe = isinstance(error, Throttled) or (idempotent and isinstance(error, Unavailable))
            if isinstance(error, TimedOut) and not self._retry_timeouts:
                is_safe = False
            return self.backoff_s(attempt) if is_safe else None

        async def call_once() -> dict[str, Any]:
            return await self._call_once(operation, raw_codes, parameters)

        return await retry(call_once, attempts=MAX_ATTEMPTS, pause_s=pause_s, clock=self._clock)

    async def pages(self, operation: str, **parameters: Any) -> AsyncIterator[dict[str, Any]]:
        for _ in range(MAX_PAGES):
            page = await self.call(operation, **parameters)
            yield page
            if not page.get("NextToken"):
                return
            parameters = {**parameters, "NextToken": page["NextToken"]}
        raise Unavailable(f"EC2 {operation}: more than {MAX_PAGES} pages")

    def new_token(self) -> str:
        """A client token: EC2 recognises a request that is sent again."""
        return self._ids.new("remuda-")

    def backoff_s(self, attempt: int) -> float:
        return backoff_s(attempt, first_s=PAUSE_S, ids=self._ids)

    async def pause(self, attempt: int) -> None:
        await self._clock.sleep(self.backoff_s(attempt))

    async def _call_once(
        self, operation: str, raw_codes: Collection[str], parameters: dict[str, Any]
    ) -> dict[str, Any]:
        self._calls.add(SERVICE, operation)
        try:
            answer: dict[str, Any] = await getattr(self._client, xform_name(operation))(**parameters)
        except FAILURES as error:
            if isinstance(error, ClientError) and code_of(error) in raw_codes:
                raise
            self._calls.fail(SERVICE, operation)
            raise translate(error, EC2, operation) from error
        return answer


def by_id(instance_ids: Sequence[str]) -> Filters:
    return [{"Name": "instance-id", "Values": list(instance_ids)}]


def by_tag(key: str, value: str) -> Filters:
    return [{"Name": f"tag:{key}", "Values": [value]}]


async def describe_instances(calls: Ec2Calls, filters: Filters) -> AsyncIterator[dict[str, Any]]:
    async for page in calls.pages("DescribeInstances", Filters=filters, MaxResults=DESCRIBE_PAGE):
        for reservation in page.get("Reservations", ()):
            for item in reservation.get("Instances", ()):
                yield item


async def describe_machines(calls: Ec2Calls, filters: Filters) -> list[MachineView]:
    """All matching instances, each once."""
    views = [machine_view(item) async for item in describe_instances(calls, filters)]
    return list({view.instance_id: view for view in views}.values())


async def tags_by_id(calls: Ec2Calls, key: str, instance_ids: Sequence[str]) -> dict[str, str]:
    """The value of one tag by instance id. Instances without the tag are missing."""
    filters: Filters = [{"Name": "resource-id", "Values": list(instance_ids)}, {"Name": "key", "Values": [key]}]
    wanted = set(instance_ids)
    found: dict[str, str] = {}
    async for page in calls.pages("DescribeTags", Filters=filters, MaxResults=DESCRIBE_PAGE):
        for item in page.get("Tags", ()):
            name = str(item.get("ResourceId", ""))
            if name in wanted and item.get("Key") == key:
                found[name] = str(item.get("Value", ""))
    return found


def instance_id_of(item: Mapping[str, Any]) -> str:
    """The instance id. A list with an invalid id is rejected as a whole: a skipped instance would count as gone."""
    name = str(item.get("InstanceId", ""))
    if not is_instance_id(name):
        raise Unavailable("EC2 returned an instance without a valid id")
    return name


def tags_of(item: Mapping[str, Any]) -> dict[str, str]:
    return {str(tag.get("Key", "")): str(tag.get("Value", "")) for tag in item.get("Tags") or ()}


def utc(at: datetime) -> datetime:
    try:
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except OverflowError:
        raise Unavailable("EC2 returned an instance with an invalid launch time") from None


def machine_view(item: Mapping[str, Any]) -> MachineView:
    state = str((item.get("State") or {}).get("Name", ""))
    launched_at = item.get("LaunchTime")
    # The grace period of instances without a record starts at the launch time, so it must be known.
    if launched_at is None:
        raise Unavailable("EC2 returned an instance without a launch time")
    # An unknown state counts as running, so that the instance is not taken for terminated.
    known = _STATES.get(state, MachineState.RUNNING)
    code, end_reason = _end_reason(item) if known in ENDED else ("", "")
    return MachineView(
        instance_id=instance_id_of(item),
        state=known,
        end_reason=end_reason,
        end_fix=fix_of_end(code),
        instance_type=str(item.get("InstanceType", "")),
        launched_at=to_milliseconds(utc(launched_at)),
        image=str(item.get("ImageId", "")),
        tags={key: value for key, value in tags_of(item).items() if not key.startswith(RESERVED_PREFIX)},
    )


def _end_reason(item: Mapping[str, Any]) -> tuple[str, str]:
    """The code of the `StateReason`, and it with its message, which often begins with the code."""
    reason = item.get("StateReason") or {}
    code, message = str(reason.get("Code") or ""), " ".join(str(reason.get("Message") or "").split())
    text = message if message.startswith(code) else f"{code}: {message}"
    return code, text.rstrip(": ")[:MAX_MESSAGE]
