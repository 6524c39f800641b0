"""Arbitrary AWS responses through the clients: an unreadable response is an error, never an empty result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError
from hypothesis import example, given
from hypothesis import strategies as st

from remuda.adapters.aws.calls import EC2, translate
from remuda.adapters.aws.clients import MAX_ATTEMPTS, PROTOCOLS, _value
from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.keys import own_key_prefix
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.ec2.compute import Ec2Compute, Ec2SpotPrices, _point
from remuda.adapters.aws.ec2.create_fleet import launch_failure, parse_fleet
from remuda.adapters.aws.ec2.tagged_fleet import Ec2Fleet
from remuda.adapters.aws.service import ServiceClient
from remuda.adapters.aws.signature import AwsCredentials
from remuda.adapters.aws.sqs import SqsResourcePool
from remuda.domain.errors import RemudaError
from remuda.domain.instance import Instance
from remuda.domain.resources import DEFAULT_CLASSES, RunnerRequest, Tier, TypePatterns, UsageClass
from remuda.http import ClientResponse
from remuda.ports.calls import CallCounter
from remuda.ports.compute import MachineView
from remuda.ports.pool import Delivery
from simulation.loop import SeededIds, VirtualClock, new_loop
from tests.support.mutations import ESCAPES, TEXTS, check_shown, check_told, extremes, fuzzed, mutated, spoiled_text
from tests.support.records import NOW, instance, instance_id

ONE = instance_id(1)
CONTROL = dict(items.document_item(items.key(f"control#{ONE}", "control"), instance()))
JSON: dict[str, dict[str, Any]] = {
    "GetItem": {"Item": CONTROL},
    "BatchGetItem": {"Responses": {"t": [CONTROL]}, "UnprocessedKeys": {}},
    "Query": {"Items": [CONTROL], "Count": 1},
    "ReceiveMessage": {"Messages": [{"MessageId": "1", "ReceiptHandle": "r", "Body": json.dumps({"id": ONE})}]},
    "GetQueueUrl": {"QueueUrl": "http://127.0.0.1/q"},
    "GetQueueAttributes": {"Attributes": {"ApproximateNumberOfMessages": "3"}},
    "refusal": {"__type": "com.amazonaws#ThrottlingException", "message": "slow down", "Item": CONTROL},
}
MACHINES = (
    "<DescribeInstancesResponse><requestId>r</requestId><reservationSet><item><instancesSet><item>"
    f"<instanceId>{ONE}</instanceId><instanceState><name>running</name></instanceState><instanceType>c6i.large"
    "</instanceType><launchTime>2025-05-31T12:00:00.000Z</launchTime><tagSet><item><key>remuda:pool</key><value>p"
    "</value></item><item><key>ghr:environment</key><value>e</value></item></tagSet></item></instancesSet></item>"
    "</reservationSet></DescribeInstancesResponse>"
)
MARKS = [
    *("", "x", "<", "</item>", "<item/>", "9" * 400, "&a;", "0001-01-01T00:00:00+23:59", "running", ESCAPES),
    "\ufffe",
]


class _FakeHttp:
    """Replaces the connections of a client: one response for everything except the named operations."""

    url, host, path = "http://127.0.0.1", "127.0.0.1", "/"

    def __init__(self) -> None:
        self.status, self.body, self.headers = 200, b"", {"x-amzn-requestid": "r"}
        self.fixed: dict[str, bytes] = {}

    async def request(self, method: str, target: str, *, headers: Mapping[str, str], body: bytes) -> ClientResponse:  # noqa: ARG002 - as in the protocol
        name = headers.get("x-amz-target", "").rpartition(".")[2]
        if name in self.fixed:
            return ClientResponse(200, {"x-amzn-requestid": "r"}, self.fixed[name])
        return ClientResponse(self.status, self.headers, self.body)

    async def close(self) -> None:
        """Nothing to close."""


async def _credentials() -> AwsCredentials:
    return AwsCredentials(access_key="a", secret_key="b")


class FuzzedAws:
    """Real clients on the fake connections. They keep no state."""

    def __init__(self) -> None:
        self.http = _FakeHttp()
        self.loop = new_loop()
        self.ports = self._open()

    def _client(self, name: str) -> Any:
        return ServiceClient(
            name=name,
            protocol=PROTOCOLS[name](),
            http=self.http,
            region="eu-central-1",
            credentials=_credentials,
            attempts=1 if name == "ec2" else MAX_ATTEMPTS,
        )

    def _open(self) -> dict[str, Any]:
        own: dict[str, Any] = {"clock": VirtualClock(), "ids": SeededIds(), "calls": CallCounter()}
        ec2 = self._client("ec2")
        return {
            "store": DynamoInstanceStore(client=self._client("dynamodb"), table="t", **own),
            "pool": SqsResourcePool(client=self._client("sqs"), prefix="p", **own),
            "compute": Ec2Compute(client=ec2, pool="p", read_parameter=_read_parameter, **own),
            "fleet": Ec2Fleet(client=ec2, environment="e", **own),
            "prices": Ec2SpotPrices(client=ec2, **own),
            "sts": self._client("sts"),
        }

    def call(self, work: Callable[[dict[str, Any]], Awaitable[Any]]) -> Any:
        """The result, or the `RemudaError`. Virtual time bounds every wait."""

        async def bounded() -> Any:
            async with asyncio.timeout(7_200):
                return await work(self.ports)

        self.ports["pool"]._urls.clear()
        try:
            return self.loop.run_until_complete(bounded())
        except RemudaError as error:
            check_told(error)
            return error


@pytest.fixture(scope="module")
def aws() -> Iterator[FuzzedAws]:
    opened = FuzzedAws()
    yield opened
    opened.loop.close()


statuses = st.sampled_from([200, 200, 200, 200, 204, 301, 400, 403, 404, 500, 503])
METHODS: dict[str, tuple[str, Callable[[dict[str, Any]], Awaitable[Any]]]] = {
    "get": ("GetItem", lambda ports: ports["store"].get(ONE)),
    "get_many": ("BatchGetItem", lambda ports: ports["store"].get_many([ONE, instance_id(2)])),
    "find": ("Query", lambda ports: ports["store"].find_by_provision("p-1")),
    "count": ("Query", lambda ports: ports["store"].count_live()),
    "receive": ("ReceiveMessage", lambda ports: ports["pool"].receive("large", visibility_s=1.0)),
    "url": ("GetQueueUrl", lambda ports: ports["pool"].depth("large")),
    "depth": ("GetQueueAttributes", lambda ports: ports["pool"].depth("large")),
}


@pytest.mark.parametrize("method", METHODS)
@fuzzed()
@given(data=st.data())
def test_json_response(aws: FuzzedAws, method: str, data: st.DataObject) -> None:
    operation, work = METHODS[method]
    kind = data.draw(st.sampled_from([operation, operation, operation, "refusal"]))
    aws.http.status = data.draw(statuses)
    aws.http.body = data.draw(spoiled_text(JSON[kind]))
    aws.http.headers = data.draw(st.sampled_from([{"x-amzn-requestid": "r"}, {}, {"content-type": "text/html"}]))
    aws.http.fixed = {} if operation == "GetQueueUrl" else {"GetQueueUrl": json.dumps(JSON["GetQueueUrl"]).encode()}
    result = aws.call(work)
    if isinstance(result, RemudaError):
        return
    match result:
        case Instance():
            assert result.instance_id == ONE
        case list() | dict():
            assert all(isinstance(each, Instance | Delivery | str) for each in result)
        case _:
            assert result is None or isinstance(result, int)


NULLS = (b'{"Items":[null]}', b'{"Items":[{"pk":null}]}', b'{"Responses":{"t":[null]}}')


@pytest.mark.parametrize("body", [*NULLS, b"", b"<html>sign in</html>", b"null", b"[]", b'{"Item":null}', b"{}"])
def test_html_page_is_not_taken_for_an_empty_table(aws: FuzzedAws, body: bytes) -> None:
    """Otherwise all instances would look as if they had no record, and would be terminated."""
    aws.http.status, aws.http.body, aws.http.headers, aws.http.fixed = 200, body, {"content-type": "text/html"}, {}
    for method in ("get", "get_many", "find", "count"):
        assert isinstance(aws.call(METHODS[method][1]), RemudaError), method


async def _read_parameter(name: str) -> str:
    return name


async def _machines(ports: dict[str, Any]) -> Any:
    return [*await ports["compute"].list_pool(), *await ports["fleet"].list_machines()]


@fuzzed(80)
@given(
    cut=st.integers(0, len(MACHINES)),
    length=st.integers(0, 60),
    mark=st.sampled_from(MARKS),
    status=statuses,
    again=st.booleans(),
)
@example(cut=MACHINES.index("2025"), length=24, mark="yesterday", status=200, again=False)
@example(cut=MACHINES.index("2025"), length=24, mark="2025-05-31T19999999999999999999:0", status=200, again=False)
@example(cut=MACHINES.index("2025"), length=24, mark="0001-01-01T00:00:00+23:59", status=200, again=False)
@example(cut=MACHINES.index("<launchTime>"), length=49, mark="", status=200, again=False)
@example(cut=MACHINES.index("<instanceId>"), length=44, mark="", status=200, again=False)
@example(cut=MACHINES.index("<key>"), length=22, mark="", status=200, again=False)
def test_list_of_instances(aws: FuzzedAws, cut: int, length: int, mark: str, status: int, again: bool) -> None:  # noqa: FBT001
    text = MACHINES[:cut] + mark + MACHINES[cut + length :]
    aws.http.status, aws.http.fixed = status, {}
    aws.http.body = (text + text if again else text).encode()
    found = aws.call(_machines)
    for view in found if isinstance(found, list) else ():
        assert view.instance_id.startswith("i-")
        if isinstance(view, MachineView):
            assert NOW - view.launched_at < timedelta(days=1_000_000)
            assert NOW - view.launched_at + timedelta(days=1) is not None


REQUEST = RunnerRequest(
    resource_class=DEFAULT_CLASSES[0], usage_class=UsageClass.SPOT, patterns=TypePatterns(("*",)), tier=Tier.TRUSTED
)
OVERRIDES = {"Overrides": {"SubnetId": "subnet-1", "AvailabilityZone": "a"}}
CODES = ("InsufficientInstanceCapacity", "UnauthorizedOperation", "InvalidParameter")
texts = st.sampled_from([*TEXTS, *CODES]) | st.text()


@fuzzed()
@given(st.lists(st.tuples(texts, texts, texts), max_size=4))
def test_failed_launch(refused: list[tuple[str, str, str]]) -> None:
    errors = [
        {"LaunchTemplateAndOverrides": OVERRIDES, "ErrorCode": code, "ErrorMessage": message, "Lifecycle": usage}
        for code, message, usage in refused
    ]
    parsed = parse_fleet({"Instances": [{"InstanceIds": [ONE]}, {}], "Errors": errors}, UsageClass.SPOT)
    check_told(launch_failure(REQUEST, 1, parsed.errors))
    assert [launched.instance_id for launched in parsed.instances] == [ONE]


@fuzzed()
@given(code=texts, message=texts, status=st.sampled_from([0, 200, 400, 403, 500, 503]))
def test_error_response(code: str, message: str, status: int) -> None:
    response: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    check_told(translate(ClientError(response, "DescribeInstances"), EC2, "DescribeInstances"))


@fuzzed()
@given(mutated({"SpotPrice": "0.04", "Timestamp": NOW, "InstanceType": "c6i.large", "AvailabilityZone": "a"}))
def test_spot_price(item: Any) -> None:
    if isinstance(item, dict):
        point = _point(item)
        assert point is None or point.at.tzinfo is not None


@fuzzed()
@given(spoiled_text({"token": "ghp_secret"}))
@example(b'{"token":' * 5_000)
@example(b'{"token": 7}')
def test_secret(text: bytes) -> None:
    try:
        found = _value(text.decode(errors="replace"), "arn:x", "token", "REMUDA_GITHUB_TOKEN")
    except RemudaError as error:
        check_told(error)
        assert "ghp_secret" not in error.message  # noqa: PT017 - it may also pass
    else:
        assert found


@fuzzed()
@given(extremes)
def test_machine_identity(aws: FuzzedAws, user: Any) -> None:
    aws.http.status, aws.http.fixed = 200, {}
    shown = str(user) if not isinstance(user, int) or abs(user) < 10**99 else "9"
    aws.http.body = (
        "<GetCallerIdentityResponse><GetCallerIdentityResult><UserId>"
        f"{shown}</UserId></GetCallerIdentityResult></GetCallerIdentityResponse>"
    ).encode(errors="replace")
    found = aws.call(lambda ports: own_key_prefix(ports["sts"], ONE))
    assert isinstance(found, RemudaError), "another identity is never accepted"


def test_queue_message_without_a_body(aws: FuzzedAws) -> None:
    aws.http.status, aws.http.headers = 200, {}
    aws.http.fixed = {"GetQueueUrl": json.dumps(JSON["GetQueueUrl"]).encode()}
    bad = [{"ReceiptHandle": "r", "Body": 7}, {"ReceiptHandle": "s"}, {"Body": "{}"}]
    aws.http.body = json.dumps({"Messages": bad}).encode()
    found = aws.call(METHODS["receive"][1])
    assert [delivery.receipt for delivery in found] == ["r", "s"]
    for delivery in found:
        assert delivery.message is None
        check_shown(delivery.malformed, 200)


def test_error_code_that_is_not_text(aws: FuzzedAws) -> None:
    aws.http.status, aws.http.body, aws.http.headers, aws.http.fixed = 400, b'{"__type":{"a":null}}', {}, {}
    assert isinstance(aws.call(METHODS["get"][1]), RemudaError)
