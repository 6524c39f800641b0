"""What cannot work on AWS, for each command: one clear sentence, the right exit code, and nothing half done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.aws_cloud import LIMIT_S, SCOPE, Cloud, aws_cloud
from tests.support.servers import ENVIRONMENT, LOOPBACK, held_port
from tests.support.wire import ANY, JSON, Fault, Wire, answers, wire_in_a_thread

USER, UNAVAILABLE = 2, 4
POOL = "test"
#: It fails at once, and not because its time is up.
IN_TIME = ("--provision-timeout-sec", "100")
TABLE = f"remuda-{POOL}"
QUEUE = f"{TABLE}-large"
PROVISION = ("provision", "--run-id", "77", "--github-scope", SCOPE, "--resource-class", "large", *IN_TIME)
RELEASE = ("release", "--run-id", "77")
STATUS = ("status",)


@dataclass(frozen=True)
class Clouds:
    cloud: Cloud
    dynamodb: Wire
    sqs: Wire

    def environment(self) -> dict[str, str]:
        return {"AWS_ENDPOINT_URL_DYNAMODB": self.dynamodb.url, "AWS_ENDPOINT_URL_SQS": self.sqs.url}

    def run(self, command: str, **changed: str) -> tuple[int, Any]:
        environment = {**self.environment(), **changed}
        if command == "refresh":
            return self.cloud.refresh(**environment)
        arguments = {"provision": PROVISION, "release": RELEASE, "status": STATUS}[command]
        return self.cloud.remuda(*arguments, **environment)

    def call(self, service: str, operation: str, **parameters: Any) -> Any:
        """As somebody with another tool, past all proxies."""
        target = {"dynamodb": "DynamoDB_20120810", "sqs": "AmazonSQS"}[service]
        region = ENVIRONMENT["AWS_REGION"]
        answer = httpx.post(
            self.cloud.environment["AWS_ENDPOINT_URL"],
            headers={
                "content-type": JSON,
                "x-amz-target": f"{target}.{operation}",
                "authorization": f"AWS4-HMAC-SHA256 Credential=test/20250101/{region}/{service}/aws4_request",
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
def clouds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clouds]:
    with aws_cloud(tmp_path_factory.mktemp("aws")) as cloud:
        url = cloud.environment["AWS_ENDPOINT_URL"]
        with wire_in_a_thread(url) as dynamodb, wire_in_a_thread(url) as sqs:
            made = Clouds(cloud, dynamodb, sqs)
            code, answer = made.run("refresh")
            assert code == 0, answer
            yield made


Changed = Mapping[str, str]
Trouble = Callable[[Clouds], AbstractContextManager[Changed]]


def down(service: str) -> Trouble:
    @contextmanager
    def trouble(clouds: Clouds) -> Iterator[Changed]:
        with held_port() as port:
            yield {f"AWS_ENDPOINT_URL_{service}": f"http://{LOOPBACK}:{port}"}

    return trouble


def refused(service: str, status: int, kind: str, said: str, *, query: str = "") -> Trouble:
    """As the service itself words it."""
    headers = {"x-amzn-query-error": f"{query};Sender"} if query else {}
    fault: Fault = answers(
        {"__type": f"com.amazon.coral.service#{kind}", "message": said}, status=status, headers=headers
    )

    @contextmanager
    def trouble(clouds: Clouds) -> Iterator[Changed]:
        wire: Wire = getattr(clouds, service)
        wire.always[ANY] = fault
        try:
            yield {}
        finally:
            wire.always.clear()

    return trouble


def ec2_refuses(action: str, status: int, code: str, said: str) -> Trouble:
    @contextmanager
    def trouble(clouds: Clouds) -> Iterator[Changed]:
        fault = {"action": action, "code": code, "status": status, "message": said, "times": 99}
        clouds.cloud.ec2.plan(faults=[fault])
        try:
            yield {}
        finally:
            clouds.cloud.ec2.plan(faults=[])

    return trouble


@contextmanager
def no_table(clouds: Clouds) -> Iterator[Changed]:
    clouds.call("dynamodb", "DeleteTable", TableName=TABLE)
    try:
        yield {}
    finally:
        assert clouds.run("refresh")[0] == 0


@contextmanager
def other_table(clouds: Clouds) -> Iterator[Changed]:
    """Somebody else's, under our name."""
    clouds.call("dynamodb", "DeleteTable", TableName=TABLE)
    clouds.call(
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
        clouds.call("dynamodb", "DeleteTable", TableName=TABLE)
        assert clouds.run("refresh")[0] == 0


@contextmanager
def no_queue(clouds: Clouds) -> Iterator[Changed]:
    url = clouds.call("sqs", "GetQueueUrl", QueueName=QUEUE)["QueueUrl"]
    clouds.call("sqs", "DeleteQueue", QueueUrl=url)
    try:
        yield {}
    finally:
        assert clouds.run("refresh")[0] == 0


INVALID = "The security token included in the request is invalid."
EXPIRED = "The security token included in the request is expired"
DENIED = "User: arn:aws:sts::1:assumed-role/ci/x is not authorized to perform: {} on resource: {}"
BAD_KEY = refused("dynamodb", 400, "UnrecognizedClientException", INVALID)
OLD_KEY = refused("dynamodb", 400, "ExpiredTokenException", EXPIRED)
NO_RIGHT = refused("dynamodb", 400, "AccessDeniedException", DENIED.format("dynamodb:GetItem", TABLE))
SQS_BAD_KEY = refused("sqs", 403, "UnrecognizedClientException", INVALID, query="InvalidClientTokenId")
SQS_NO_RIGHT = refused("sqs", 403, "AccessDeniedException", DENIED.format("sqs:x", QUEUE), query="AccessDenied")
EC2_BAD_KEY = ec2_refuses(
    "DescribeSubnets", 401, "AuthFailure", "AWS was not able to validate the provided access credentials"
)
EC2_NO_RIGHT = ec2_refuses(
    "CreateFleet", 403, "UnauthorizedOperation", "You are not authorized to perform this operation."
)
EC2_OLD_KEY = ec2_refuses("CreateFleet", 400, "RequestExpired", "Request has expired.")

CASES: dict[str, tuple[Trouble, dict[str, tuple[int, str]]]] = {
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
            (USER, f"DynamoDB refuses the AWS credentials ({TABLE}): UnrecognizedClientException: {INVALID}"),
        ),
    ),
    "key has expired": (OLD_KEY, {"provision": (USER, EXPIRED)}),
    "no right on DynamoDB": (NO_RIGHT, {"release": (USER, "not authorized to perform: dynamodb:GetItem")}),
    "wrong key for SQS": (
        SQS_BAD_KEY,
        dict.fromkeys(("refresh", "provision", "status"), (USER, "SQS refuses the AWS credentials")),
    ),
    "no right on SQS": (SQS_NO_RIGHT, {"provision": (USER, "not authorized to perform: sqs:")}),
    "wrong key for EC2": (EC2_BAD_KEY, {"refresh": (USER, "EC2 refuses the AWS credentials (DescribeSubnets)")}),
    "no right to launch": (EC2_NO_RIGHT, {"provision": (USER, "UnauthorizedOperation: You are not authorized")}),
    "key has expired at the launch": (EC2_OLD_KEY, {"provision": (USER, "RequestExpired")}),
    "missing table": (
        no_table,
        dict.fromkeys(("provision", "release", "status"), (USER, f"no table {TABLE} in DynamoDB")),
    ),
    "table with other keys": (
        other_table,
        {
            "refresh": (USER, f"table {TABLE} is not a Remuda store: its keys are id (S, HASH), not pk (S, HASH)"),
            **dict.fromkeys(("provision", "release", "status"), (USER, f"table {TABLE} does not work as")),
        },
    ),
    "queue deleted by hand": (no_queue, {"provision": (USER, f"no queue {QUEUE} in SQS")}),
}


@pytest.mark.parametrize("name", CASES)
def test_one_clear_sentence_and_nothing_half_done(clouds: Clouds, name: str):
    trouble, expected = CASES[name]
    launches = clouds.cloud.ec2.asked().get("CreateFleet", 0)
    with trouble(clouds) as changed:
        # Side by side: most of their time is spent in pauses before they give up.
        with ThreadPoolExecutor(max_workers=4) as at_once:
            ran = dict(
                zip(expected, at_once.map(lambda command: clouds.run(command, **changed), expected), strict=True)
            )
        for command, (code, says) in expected.items():
            found, answer = ran[command]
            assert (found, says in answer["error"]["message"]) == (code, True), (command, answer)
            assert "\n" not in answer["error"]["message"], command
            assert code != USER or answer["error"]["fix"], command
    if clouds.cloud.ec2.asked().get("CreateFleet", 0) > launches:
        assert name in {"no right to launch", "key has expired at the launch"}
    kinds = [item["pk"]["S"].partition("#")[0] for item in clouds.items()]
    assert "control" not in kinds, "no machine is recorded, none is claimed"
    statuses = {item["status"]["S"] for item in clouds.items() if item["pk"]["S"].startswith("run#")}
    assert statuses <= {"released"}, "no intent is left open"


def test_what_does_not_need_a_service_works_without_it(clouds: Clouds):
    with down("EC2")(clouds) as changed:
        assert clouds.run("release", **changed)[0] == 0
        assert clouds.run("status", **changed)[0] == 0
    with down("SQS")(clouds) as changed:
        assert clouds.run("release", **changed)[0] == 0


def test_a_deleted_queue_is_no_reason_to_hide_the_fleet_and_refresh_makes_it_anew(clouds: Clouds):
    with no_queue(clouds):
        code, answer = clouds.run("status")
        assert (code, answer["pools"]["large"]) == (0, {"idle": 0, "messages": 0})
        code, answer = clouds.run("refresh")
        assert (code, f"queue {QUEUE}" in answer["applied"]) == (0, True), answer


def test_a_record_that_somebody_spoiled_is_named_and_hides_nothing(clouds: Clouds):
    name = "i-0123456789abcdef0"
    where = {"pk": {"S": f"control#{name}"}, "sk": {"S": "control"}}
    index = {"gsi1pk": {"S": "live#0"}, "gsi1sk": {"S": "2025-05-31T12:00:00.000Z"}}
    item = {**where, **index, "instanceId": {"S": name}, "state": {"S": "idle"}, "epoch": {"S": "one"}}
    clouds.call("dynamodb", "PutItem", TableName=TABLE, Item=item)
    try:
        code, answer = clouds.run("status")
        assert (code, answer["instances"]) == (0, [])
        (told,) = answer["unreadable"]
        assert name in told
        assert "Instance.epoch" in told
        code, answer = clouds.run("refresh")
        assert code == UNAVAILABLE
        (told,) = answer["errors"]
        assert name in told
    finally:
        clouds.call("dynamodb", "DeleteItem", TableName=TABLE, Key=where)
    assert clouds.run("refresh")[0] == 0


@pytest.mark.parametrize(
    ("changed", "says"),
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
def test_a_refresh_that_cannot_work_makes_nothing(clouds: Clouds, changed: dict[str, str], says: str):
    """On a pool of its own: what it made would be seen."""
    flags = [word for pair in clouds.cloud.launch.items() for word in (f"--{pair[0]}", pair[1])]
    if "REMUDA_SUBNET_IDS" in changed:
        at = flags.index("--subnet-ids")
        del flags[at : at + 2]
    code, answer = clouds.cloud.remuda(
        "refresh", "--github-scope", "octo/new", *flags, pool="fresh", **{**clouds.environment(), **changed}
    )
    assert (code, says in answer["error"]["message"]) == (USER, True), answer
    assert "\n" not in answer["error"]["message"]
    assert answer["error"]["fix"]
    assert not clouds.call("sqs", "ListQueues", QueueNamePrefix="remuda-fresh").get("QueueUrls")
