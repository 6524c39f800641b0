"""Commands that cannot work on AWS: a one-line error, the right exit code, and no partial changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.aws.fault_proxy import ANY, JSON, Fault, FaultProxy, fault_proxy_in_thread, respond
from tests.support.aws.servers import LOOPBACK, REGION, unused_port
from tests.support.aws.stack import POOL, SCOPE, SHORT_TIMES, AwsStack

USER_ERROR, UNAVAILABLE = 2, 4
LIMIT_S = 240.0
#: So long that no command fails because of its timeout.
LONG_TIMEOUT = ("--provision-timeout-sec", "100")
TABLE = f"remuda-{POOL}"
QUEUE = f"{TABLE}_large"
PROVISION = ("provision", "--run-id", "77", "--github-scope", SCOPE, "--resource-class", "large", *LONG_TIMEOUT)
RELEASE = ("release", "--run-id", "77")
STATUS = ("status",)


@dataclass(frozen=True)
class ProxiedStack:
    """An AWS stack with proxies in front of DynamoDB and SQS."""

    stack: AwsStack
    dynamodb: FaultProxy
    sqs: FaultProxy

    def environment(self) -> dict[str, str]:
        return {"AWS_ENDPOINT_URL_DYNAMODB": self.dynamodb.url, "AWS_ENDPOINT_URL_SQS": self.sqs.url}

    def run(self, command: str, **changed: str) -> tuple[int, Any]:
        environment = {**self.environment(), **changed}
        if command == "refresh":
            return self.stack.refresh(**SHORT_TIMES, **environment)
        arguments = {"provision": PROVISION, "release": RELEASE, "status": STATUS}[command]
        return self.stack.remuda(*arguments, **environment)

    def call(self, service: str, operation: str, **parameters: Any) -> Any:
        """Call a service directly, without proxy and client library."""
        target = {"dynamodb": "DynamoDB_20120810", "sqs": "AmazonSQS"}[service]
        answer = httpx.post(
            self.stack.store.url,
            headers={
                "content-type": JSON,
                "x-amz-target": f"{target}.{operation}",
                "authorization": f"AWS4-HMAC-SHA256 Credential=test/20250101/{REGION}/{service}/aws4_request",
            },
            content=json.dumps(parameters),
            timeout=LIMIT_S,
            trust_env=False,
        )
        return answer.raise_for_status().json()

    def items(self) -> list[Any]:
        found: list[Any] = self.call("dynamodb", "Scan", TableName=TABLE)["Items"]
        return found


@pytest.fixture(scope="module")
def proxied(stack: AwsStack) -> Iterator[ProxiedStack]:
    with (
        fault_proxy_in_thread(stack.store.url) as dynamodb,
        fault_proxy_in_thread(stack.store.url) as sqs,
    ):
        proxied = ProxiedStack(stack, dynamodb, sqs)
        code, answer = proxied.run("refresh")
        assert code == 0, answer
        yield proxied


Variables = Mapping[str, str]
#: Causes a problem on the stack; returns the environment variables of the commands.
Problem = Callable[[ProxiedStack], AbstractContextManager[Variables]]


def down(service: str) -> Problem:
    @contextmanager
    def problem(proxied: ProxiedStack) -> Iterator[Variables]:
        with unused_port() as port:
            yield {f"AWS_ENDPOINT_URL_{service}": f"http://{LOOPBACK}:{port}"}

    return problem


def service_fails(service: str, status: int, kind: str, message: str, *, query: str = "") -> Problem:
    headers = {"x-amzn-query-error": f"{query};Sender"} if query else {}
    fault: Fault = respond(
        {"__type": f"com.amazon.coral.service#{kind}", "message": message}, status=status, headers=headers
    )

    @contextmanager
    def problem(proxied: ProxiedStack) -> Iterator[Variables]:
        proxy: FaultProxy = getattr(proxied, service)
        proxy.always[ANY] = fault
        try:
            yield {}
        finally:
            proxy.always.clear()

    return problem


def ec2_fails(action: str, status: int, code: str, message: str) -> Problem:
    @contextmanager
    def problem(proxied: ProxiedStack) -> Iterator[Variables]:
        fault = {"action": action, "code": code, "status": status, "message": message, "times": 99}
        proxied.stack.ec2.configure(faults=[fault])
        try:
            yield {}
        finally:
            proxied.stack.ec2.configure(faults=[])

    return problem


@contextmanager
def no_table(proxied: ProxiedStack) -> Iterator[Variables]:
    proxied.call("dynamodb", "DeleteTable", TableName=TABLE)
    try:
        yield {}
    finally:
        assert proxied.run("refresh")[0] == 0


@contextmanager
def other_table(proxied: ProxiedStack) -> Iterator[Variables]:
    """A foreign table with the name of the pool's table."""
    proxied.call("dynamodb", "DeleteTable", TableName=TABLE)
    proxied.call(
        "dynamodb",
        "CreateTable",
        TableName=TABLE,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
    )
    try:
        yield {}
    finally:
        proxied.call("dynamodb", "DeleteTable", TableName=TABLE)
        assert proxied.run("refresh")[0] == 0


@contextmanager
def no_queue(proxied: ProxiedStack) -> Iterator[Variables]:
    url = proxied.call("sqs", "GetQueueUrl", QueueName=QUEUE)["QueueUrl"]
    proxied.call("sqs", "DeleteQueue", QueueUrl=url)
    try:
        yield {}
    finally:
        assert proxied.run("refresh")[0] == 0


INVALID = "The security token included in the request is invalid."
EXPIRED = "The security token included in the request is expired"
DENIED = "User: arn:aws:sts::1:assumed-role/ci/x is not authorized to perform: {} on resource: {}"
BAD_KEY = service_fails("dynamodb", 400, "UnrecognizedClientException", INVALID)
EXPIRED_KEY = service_fails("dynamodb", 400, "ExpiredTokenException", EXPIRED)
NO_PERMISSION = service_fails("dynamodb", 400, "AccessDeniedException", DENIED.format("dynamodb:GetItem", TABLE))
SQS_BAD_KEY = service_fails("sqs", 403, "UnrecognizedClientException", INVALID, query="InvalidClientTokenId")
SQS_NO_PERMISSION = service_fails(
    "sqs", 403, "AccessDeniedException", DENIED.format("sqs:x", QUEUE), query="AccessDenied"
)
EC2_BAD_KEY = ec2_fails(
    "DescribeSubnets", 401, "AuthFailure", "AWS was not able to validate the provided access credentials"
)
EC2_NO_PERMISSION = ec2_fails(
    "CreateFleet", 403, "UnauthorizedOperation", "You are not authorized to perform this operation."
)
EC2_EXPIRED_KEY = ec2_fails("CreateFleet", 400, "RequestExpired", "Request has expired.")

CASES: dict[str, tuple[Problem, dict[str, tuple[int, str]]]] = {
    "DynamoDB is down": (
        down("DYNAMODB"),
        dict.fromkeys(("refresh", "provision", "release", "status"), (UNAVAILABLE, "DynamoDB at http://127.0.0.1:")),
    ),
    "SQS is down": (
        down("SQS"),
        dict.fromkeys(("refresh", "provision", "status"), (UNAVAILABLE, "SQS at http://127.0.0.1:")),
    ),
    "EC2 is down": (down("EC2"), dict.fromkeys(("refresh", "provision"), (UNAVAILABLE, "EC2 at http://127.0.0.1:"))),
    "wrong key": (
        BAD_KEY,
        dict.fromkeys(
            ("refresh", "provision", "release", "status"),
            (USER_ERROR, f"DynamoDB refuses the AWS credentials ({TABLE}): UnrecognizedClientException: {INVALID}"),
        ),
    ),
    "key has expired": (EXPIRED_KEY, {"provision": (USER_ERROR, EXPIRED)}),
    "no permission on DynamoDB": (
        NO_PERMISSION,
        {"release": (USER_ERROR, "not authorized to perform: dynamodb:GetItem")},
    ),
    "wrong key for SQS": (
        SQS_BAD_KEY,
        dict.fromkeys(("refresh", "provision", "status"), (USER_ERROR, "SQS refuses the AWS credentials")),
    ),
    "no permission on SQS": (SQS_NO_PERMISSION, {"provision": (USER_ERROR, "not authorized to perform: sqs:")}),
    "wrong key for EC2": (EC2_BAD_KEY, {"refresh": (USER_ERROR, "EC2 refuses the AWS credentials (DescribeSubnets)")}),
    "no permission to launch": (
        EC2_NO_PERMISSION,
        {"provision": (USER_ERROR, "UnauthorizedOperation: You are not authorized")},
    ),
    "key has expired at the launch": (EC2_EXPIRED_KEY, {"provision": (USER_ERROR, "RequestExpired")}),
    "missing table": (
        no_table,
        dict.fromkeys(("provision", "release", "status"), (USER_ERROR, f"no table {TABLE} in DynamoDB")),
    ),
    "table with other keys": (
        other_table,
        {
            "refresh": (
                USER_ERROR,
                f"table {TABLE} is not a Remuda store: its keys are id (S, HASH), not pk (S, HASH)",
            ),
            **dict.fromkeys(("provision", "release", "status"), (USER_ERROR, f"table {TABLE} is not usable as")),
        },
    ),
    "queue deleted by hand": (no_queue, {"provision": (USER_ERROR, f"no queue {QUEUE} in SQS")}),
}


@pytest.mark.parametrize("name", CASES)
def test_error_is_one_line_and_nothing_is_left(proxied: ProxiedStack, name: str):
    problem, expected = CASES[name]
    launches = proxied.stack.ec2.requests().get("CreateFleet", 0)
    with problem(proxied) as changed:
        # In parallel: most of the time passes in pauses between retries.
        with ThreadPoolExecutor(max_workers=4) as executor:
            ran = dict(
                zip(expected, executor.map(lambda command: proxied.run(command, **changed), expected), strict=True)
            )
        for command, (code, text) in expected.items():
            found, answer = ran[command]
            assert (found, text in answer["error"]["message"]) == (code, True), (command, answer)
            assert "\n" not in answer["error"]["message"], command
            assert code != USER_ERROR or answer["error"]["fix"], command
    if proxied.stack.ec2.requests().get("CreateFleet", 0) > launches:
        assert name in {"no permission to launch", "key has expired at the launch"}
    kinds = [item["pk"]["S"].partition("#")[0] for item in proxied.items()]
    assert "control" not in kinds, "no instance is recorded or claimed"
    statuses = {item["status"]["S"] for item in proxied.items() if item["pk"]["S"].startswith("run#")}
    assert statuses <= {"released"}, "no provision is left open"


def test_commands_work_without_services_that_they_do_not_need(proxied: ProxiedStack):
    with down("EC2")(proxied) as changed:
        assert proxied.run("release", **changed)[0] == 0
        assert proxied.run("status", **changed)[0] == 0
    with down("SQS")(proxied) as changed:
        assert proxied.run("release", **changed)[0] == 0


def test_status_works_with_a_deleted_queue_and_refresh_recreates_it(proxied: ProxiedStack):
    with no_queue(proxied):
        code, answer = proxied.run("status")
        assert (code, answer["pools"]["large"]) == (0, {"idle": 0, "messages": 0})
        code, answer = proxied.run("refresh")
        assert (code, f"queue {QUEUE}" in answer["applied"]) == (0, True), answer


def test_malformed_record_is_named_and_hides_no_other_record(proxied: ProxiedStack):
    name = "i-0123456789abcdef0"
    where = {"pk": {"S": f"control#{name}"}, "sk": {"S": "control"}}
    index = {"gsi1pk": {"S": "live#0"}, "gsi1sk": {"S": "2025-05-31T12:00:00.000Z"}}
    item = {**where, **index, "instanceId": {"S": name}, "state": {"S": "idle"}, "epoch": {"S": "one"}}
    proxied.call("dynamodb", "PutItem", TableName=TABLE, Item=item)
    try:
        code, answer = proxied.run("status")
        assert (code, answer["instances"]) == (0, [])
        (message,) = answer["unreadable"]
        assert name in message
        assert "Instance.epoch" in message
        code, answer = proxied.run("refresh")
        assert code == UNAVAILABLE
        (message,) = answer["errors"]
        assert name in message
    finally:
        proxied.call("dynamodb", "DeleteItem", TableName=TABLE, Key=where)
    assert proxied.run("refresh")[0] == 0


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"AWS_REGION": "", "AWS_DEFAULT_REGION": ""}, "region"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "AWS credentials"),
        ({"AWS_PROFILE": "nobody"}, "nobody"),
        ({"AWS_ENDPOINT_URL_DYNAMODB": "nonsense"}, "nonsense"),
        ({"REMUDA_GITHUB_TOKEN": ""}, "GitHub"),
        ({"REMUDA_GITHUB_TOKEN": "no"}, "GitHub refuses the credential"),
        ({"REMUDA_SUBNET_IDS": "subnet-nonsense"}, "subnet-nonsense"),
    ],
    ids=["no region", "no credentials", "no profile", "no address", "no token", "refused token", "bad subnet"],
)
def test_failed_refresh_creates_nothing(proxied: ProxiedStack, changed: dict[str, str], expected: str):
    """Uses a new pool, so that anything it creates is visible."""
    flags = proxied.stack.flags()
    if "REMUDA_SUBNET_IDS" in changed:
        at = flags.index("--subnet-ids")
        del flags[at : at + 2]
    code, answer = proxied.stack.remuda(
        "refresh", "--github-scope", "octo/new", *flags, pool="fresh", **{**proxied.environment(), **changed}
    )
    assert (code, expected in answer["error"]["message"]) == (USER_ERROR, True), answer
    assert "\n" not in answer["error"]["message"]
    assert answer["error"]["fix"]
    assert not proxied.call("sqs", "ListQueues", QueueNamePrefix="remuda-fresh").get("QueueUrls")
