"""`remuda doctor` on AWS servers: a healthy pool has no findings, and each problem is reported with its fix."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from remuda.adapters.aws.functions import BROKER_CHECK
from remuda.adapters.system.clock import SystemClock
from remuda.aws_lambda.broker import BrokerFunction
from remuda.cli.read import check_document
from remuda.config.settings import Settings
from remuda.config.sources import load
from remuda.controlplane.doctor import exit_code, run_checks
from remuda.ports.doctor import CheckResult
from remuda.wiring.doctor import open_doctor
from tests.support.aws.ec2 import ARM_AMI, LINUX_AMI, WINDOWS_AMI
from tests.support.aws.stack import SCOPE, AwsStack
from tests.support.broker import start_broker, workflow_role
from tests.support.cli import run_cli
from tests.support.local_backend import run_local
from tests.support.user_data import serve

POOL = "well"
NOBODY = "subnet-0123456789abcdef0"
NO_SECRET = "arn:aws:secretsmanager:eu-central-1:000000000000:secret:none-AbCdEf"
Lines = dict[str, dict[str, Any]]
REFUSAL = """<ErrorResponse><Error><Type>Sender</Type><Code>InvalidClientTokenId</Code>
<Message>The security token included in the request is invalid.</Message></Error></ErrorResponse>"""


class Patient:
    """AWS servers with one healthy pool."""

    def __init__(self, servers: AwsStack) -> None:
        self.servers = servers

    def doctor(self, *, pool: str = POOL, flags: dict[str, str] | None = None, **changed: str) -> tuple[int, Lines]:
        """As the command does it, in this process: a new one for each of these would take the most of their time."""
        with patch.dict(os.environ, {**self.servers.environment(), **changed}, clear=True):
            given = {name.replace("-", "_"): value for name, value in (flags or {}).items()}
            settings = load({"backend": "aws", "pool": pool, **given}, environ=os.environ)
            results = asyncio.run(_run_checks(settings))
        return exit_code(results.values()), self.judged(
            [check_document(name, result) for name, result in results.items()]
        )

    def judged(self, lines: list[dict[str, Any]]) -> Lines:
        for line in lines:
            assert list(line) == ["name", "status", "message", "fix"]
            assert (line["fix"] is None) == (line["status"] == "ok"), line
            assert self.servers.github.token not in json.dumps(line)
        return {line["name"]: line for line in lines}


async def _run_checks(settings: Settings) -> Mapping[str, CheckResult]:
    async with open_doctor(settings, {}) as checks:
        return await run_checks(checks)


def problems(lines: Lines) -> set[str]:
    return {name for name, line in lines.items() if line["status"] == "problem"}


async def _launch(client: Any) -> None:
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "remuda:pool", "Value": POOL}]}]
    await client.run_instances(ImageId=LINUX_AMI, MinCount=1, MaxCount=1, TagSpecifications=tags)


@pytest.fixture(scope="module")
def patient(stack: AwsStack) -> Patient:
    code, answer = stack.refresh(pool=POOL)
    assert code == 0, answer
    stack.call("ec2", _launch)
    return Patient(stack)


def test_a_healthy_pool_has_no_findings_and_is_not_changed(patient: Patient):
    before = patient.servers.ec2.requests()
    code, document = patient.servers.remuda("doctor", pool=POOL)
    assert list(document) == ["checks"]
    lines = patient.judged(document["checks"])
    assert {name: line["status"] for name, line in lines.items()} == dict.fromkeys(lines, "ok"), lines
    assert code == 0
    assert {"aws credentials", "table", "queues", "image", "tokens", "github access"} <= set(lines)
    assert "dry run" in lines["launch permission"]["message"]
    assert "dry run" in lines["terminate permission"]["message"]
    asked = {name for name, count in patient.servers.ec2.requests().items() if count > before.get(name, 0)}
    dry = {"CreateFleet", "RunInstances", "TerminateInstances"}
    assert asked >= dry
    assert all(name.startswith(("Describe", "Get")) for name in asked - dry)
    assert all(patient.servers.ec2.last(name)["DryRun"] == "true" for name in dry)
    assert patient.servers.remuda("refresh", "--sweep-only", pool=POOL)[1]["applied"] == []


def test_text_output_has_one_line_per_check(patient: Patient):
    done = run_cli(
        ["doctor", "--backend", "aws", "--pool", POOL, "--ami", "ami-00000000"],
        environment={**patient.servers.environment(), "COLUMNS": "40"},
    )
    assert done.code == 2
    lines = done.stdout.splitlines()
    assert all(line.split()[0] in {"ok", "warning", "problem"} for line in lines), lines
    order = [line.split()[0] for line in lines]
    assert order == sorted(order, key=["problem", "warning", "ok"].index)
    (image,) = [line for line in lines if " image: " in line]
    assert image.startswith("problem")
    assert " -> " in image


@pytest.mark.parametrize(
    ("flags", "changed", "expected"),
    [
        (
            {
                "subnet-ids": NOBODY,
                "security-group-ids": "sg-0123456789abcdef0",
                "ami": "ami-0123456789abcdef0",
                "iam-instance-profile": "unknown",
                "github-scope": "octo/other",
            },
            {"REMUDA_GITHUB_TOKEN": "no"},
            {
                "subnets": (NOBODY, "subnet-ids"),
                "security groups": ("sg-0123456789abcdef0", "security-group-ids"),
                "image": ("ami-0123456789abcdef0", "set another ami"),
                "instance profile": ("instance profile 'unknown' does not exist", "create it"),
                "github access": ("refuses the credential", "REMUDA_GITHUB_TOKEN"),
                "tokens": ("none for octo/other", "refresh --github-scope octo/other"),
            },
        ),
        (
            {"ami": "nothing"},
            {"REMUDA_GITHUB_TOKEN": NO_SECRET},
            {
                "launch options": ("ami is invalid: 'nothing'", "set an image"),
                "github credential": ("does not exist", "ARN"),
            },
        ),
        (
            {},
            {"AWS_REGION": "", "AWS_DEFAULT_REGION": "", "REMUDA_GITHUB_TOKEN": ""},
            {
                "aws region": ("no AWS region", "AWS_REGION"),
                "github credential": ("no GitHub credential", "REMUDA_GITHUB_TOKEN"),
                # The stored configuration cannot be read then.
                "launch options": ("ami is missing", "set an image"),
            },
        ),
        (
            {},
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            {
                "aws credentials": ("needs AWS credentials", "credentials"),
                "launch options": ("ami is missing", "set an image"),
                "github access": ("no scope is configured", "--github-scope"),
            },
        ),
    ],
    ids=["nothing of it exists", "bad input", "no region", "no credentials"],
)
def test_each_problem_is_reported_once_with_its_fix(
    patient: Patient, flags: dict[str, str], changed: dict[str, str], expected: dict[str, tuple[str, str]]
):
    code, lines = patient.doctor(flags=flags, **changed)
    assert code == 2
    # Consequences of a problem are not reported again.
    assert problems(lines) == set(expected), lines
    for name, (found, fix) in expected.items():
        assert found in lines[name]["message"]
        assert fix in lines[name]["fix"]


def test_credentials_that_aws_rejects(patient: Patient):
    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(403)
            self.send_header("Content-Type", "text/xml")
            self.end_headers()
            self.wfile.write(REFUSAL.encode())

        def log_message(self, *_: Any) -> None:
            """Tests read no access log."""

    with serve(Refuses) as url:
        code, lines = patient.doctor(AWS_ENDPOINT_URL_STS=url)
    assert (code, problems(lines)) == (2, {"aws credentials"}), lines
    assert "refuses the AWS credentials" in lines["aws credentials"]["message"]
    assert lines["table"]["message"] == "not checked: aws credentials has a problem"


def test_a_pool_that_was_never_refreshed(patient: Patient):
    code, lines = patient.doctor(flags={**patient.servers.launch, "github-scope": SCOPE}, pool="unknown")
    assert code == 2
    for name in ("table", "queues", "launch template", "configuration"):
        assert lines[name]["status"] == "problem", lines
        assert "run remuda refresh" in lines[name]["fix"]
    # The prerequisites of the first refresh exist.
    for name in ("image", "subnets", "security groups", "instance profile", "github access"):
        assert lines[name]["status"] == "ok", lines


def test_a_queue_deleted_by_hand(patient: Patient):
    assert patient.servers.refresh(pool="gap")[0] == 0

    async def delete(client: Any) -> None:
        url = (await client.get_queue_url(QueueName="remuda-gap_xlarge"))["QueueUrl"]
        await client.delete_queue(QueueUrl=url)
        url = (await client.get_queue_url(QueueName="remuda-gap_large"))["QueueUrl"]
        await client.set_queue_attributes(QueueUrl=url, Attributes={"VisibilityTimeout": "5"})

    patient.servers.call("sqs", delete)
    code, lines = patient.doctor(pool="gap")
    assert (code, problems(lines)) == (2, {"queues"}), lines
    assert "remuda-gap_xlarge is missing" in lines["queues"]["message"]
    assert "remuda-gap_large has wrong values of VisibilityTimeout" in lines["queues"]["message"]
    assert "remuda refresh" in lines["queues"]["fix"]


def test_a_table_with_other_keys(patient: Patient):
    async def create(client: Any) -> None:
        await client.create_table(
            TableName="remuda-other",
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        )

    patient.servers.call("dynamodb", create)
    code, lines = patient.doctor(pool="other")
    assert (code, lines["table"]["status"]) == (2, "problem"), lines
    assert "is not a Remuda store" in lines["table"]["message"]
    assert "choose another pool name" in lines["table"]["fix"]


def test_a_service_that_is_down_is_exit_code_4_and_the_others_are_checked(patient: Patient):
    flags = {**patient.servers.launch, "github-scope": SCOPE}
    code, lines = patient.doctor(flags=flags, AWS_ENDPOINT_URL_DYNAMODB="http://127.0.0.1:9")
    assert code == 4, lines
    assert problems(lines) == {"table", "configuration", "tokens", "runner version", "runner sets", "releases"}, lines
    assert "cannot be reached" in lines["table"]["message"]
    assert lines["queues"]["status"] == "ok"


def broker_check(patient: Patient, **changed: str) -> dict[str, str]:
    """The answer of the broker to a direct invocation: a message per check, empty for those that are ok."""
    environment = {**patient.servers.environment(), "REMUDA_POOL": POOL, "REMUDA_GITHUB_SCOPE": SCOPE, **changed}

    async def check() -> Any:
        function = BrokerFunction(environment, clock=SystemClock())
        try:
            return await function.respond(BROKER_CHECK, DirectInvocation())
        finally:
            await function.close()

    with patch.dict(os.environ, environment, clear=True):
        document = json.loads(json.dumps(asyncio.run(check())))
    assert patient.servers.github.token not in json.dumps(document)
    return {item["name"]: "" if item["status"] == "ok" else item["message"] for item in document["checks"]}


class DirectInvocation:
    aws_request_id = "r-1"

    def get_remaining_time_in_millis(self) -> int:
        return 60_000


def test_the_broker_tries_what_its_role_permits_and_changes_nothing(patient: Patient):
    async def scan(client: Any) -> Any:
        return (await client.scan(TableName=f"remuda-{POOL}"))["Items"]

    items, before = patient.servers.call("dynamodb", scan), patient.servers.ec2.requests()
    # The policy `provision` does not permit it.
    unreadable = {"action": "DescribeImages", "code": "UnauthorizedOperation", "status": 403, "message": "no"}
    patient.servers.ec2.configure(faults=[unreadable])
    names = ("table reads", "table writes", "queues", "launch permission", "terminate permission")
    assert broker_check(patient) == dict.fromkeys(names, "")
    assert patient.servers.call("dynamodb", scan) == items
    asked = {name for name, count in patient.servers.ec2.requests().items() if count > before.get(name, 0)}
    dry = {"CreateFleet", "RunInstances", "TerminateInstances"}
    assert dry <= asked
    assert all(patient.servers.ec2.last(name)["DryRun"] == "true" for name in dry)
    assert all(name.startswith("Describe") for name in asked - dry)


def test_the_broker_names_every_call_that_its_role_may_not_make(patient: Patient):
    def denied(action: str) -> dict[str, Any]:
        message = f"User: arn:aws:sts::1:assumed-role/x is not authorized to perform: ec2:{action}"
        return {"action": action, "code": "UnauthorizedOperation", "status": 403, "message": message}

    patient.servers.ec2.configure(faults=[denied("CreateFleet"), denied("RunInstances")])
    found = broker_check(patient)
    assert [name for name, message in found.items() if message] == ["launch permission"]
    for action in ("CreateFleet", "RunInstances"):
        assert f"not authorized to perform: ec2:{action}" in found["launch permission"]


def test_doctor_asks_the_broker_and_judges_the_limit_of_lambda(patient: Patient):
    with start_broker(patient.servers, POOL) as broker:
        permitted = {
            "Version": "2012-10-17",
            "Statement": [
                {"Effect": "Allow", "Action": ["lambda:InvokeFunction", "lambda:GetAccountSettings"], "Resource": "*"}
            ],
        }
        person = broker.server.assume(replace(workflow_role(POOL, "ASIAPERSON"), policy=permitted))
        reached = {"AWS_ENDPOINT_URL_LAMBDA": broker.server.url}
        _, lines = patient.doctor(flags=None, **reached, **person.environment())
        assert lines["broker"]["status"] == "ok", lines
        assert "5 checks under its own role" in lines["broker"]["message"]
        assert lines["concurrency"]["status"] == "ok", lines
        broker.server.concurrency = 10
        refused = {"code": "UnauthorizedOperation", "status": 403, "message": "not authorized: ec2:CreateFleet"}
        # Once for doctor's own dry run.
        patient.servers.ec2.configure(faults=[{"action": "CreateFleet", **refused}] * 2)
        code, lines = patient.doctor(flags=None, **reached, **person.environment())
        assert (code, lines["broker"]["status"]) == (2, "problem"), lines
        assert "ec2:CreateFleet" in lines["broker"]["message"]
        assert lines["concurrency"]["status"] == "warning"
        assert "5 workflows can wait" in lines["concurrency"]["message"]
        assert "aws service-quotas request-service-quota-increase" in lines["concurrency"]["fix"]
        # A workflow may invoke the broker, and not read the account.
        _, lines = patient.doctor(flags=None, **reached, **broker.role.environment())
        assert lines["concurrency"]["fix"] == "grant lambda:GetAccountSettings"
        nobody = broker.server.assume(replace(person, key="ASIANOBODY", policy={**permitted, "Statement": []}))
        code, lines = patient.doctor(flags=None, **reached, **nobody.environment())
        assert (lines["broker"]["status"], lines["concurrency"]["status"]) == ("warning", "warning"), lines
        assert "lambda:InvokeFunction" in lines["broker"]["fix"]


def test_a_missing_launch_permission_is_a_warning_and_a_missing_terminate_permission_a_problem(patient: Patient):
    refused = {"code": "UnauthorizedOperation", "status": 403, "message": "You are not authorized."}
    patient.servers.ec2.configure(
        faults=[{"action": "RunInstances", **refused}, {"action": "TerminateInstances", **refused}]
    )
    code, lines = patient.doctor()
    assert (code, problems(lines)) == (2, {"terminate permission"}), lines
    assert lines["launch permission"]["status"] == "warning"
    assert "provision.json" in lines["launch permission"]["fix"]


def test_without_permission_to_read_tags_instances_cannot_be_terminated(patient: Patient):
    refused = {"code": "UnauthorizedOperation", "status": 403, "message": "You are not authorized."}
    patient.servers.ec2.configure(faults=[{"action": "DescribeTags", **refused}])
    code, lines = patient.doctor()
    assert (code, problems(lines)) == (2, {"terminate permission"}), lines
    assert "refresh.json" in lines["terminate permission"]["fix"]


def test_options_that_differ_from_the_launch_template_are_reported(patient: Patient):
    subnets = patient.servers.launch["subnet-ids"].split(",")[0]
    code, lines = patient.doctor(flags={"subnet-ids": subnets})
    assert (code, lines["launch template"]["status"]) == (0, "ok"), lines
    code, lines = patient.doctor(REMUDA_KEY_NAME="people")
    assert (code, lines["launch template"]["status"]) == (0, "warning"), lines


def test_the_architecture_of_the_image_must_fit(patient: Patient):
    code, lines = patient.doctor(flags={"ami": WINDOWS_AMI})
    assert (code, problems(lines)) == (2, {"image"}), lines
    assert "Windows" in lines["image"]["message"]

    digest = "0" * 64
    agent = {
        "REMUDA_AGENT_URL": "https://example.org/remuda-agent-0.1.0-x86_64.tar.gz",
        "REMUDA_AGENT_SHA256": digest,
    }
    code, lines = patient.doctor(flags={"ami": ARM_AMI}, **agent)
    assert (code, problems(lines)) == (2, {"image"}), lines
    assert "is for arm64, agent-url for x86_64" in lines["image"]["message"]
    code, lines = patient.doctor(
        flags={"ami": ARM_AMI}, **{**agent, "REMUDA_AGENT_URL": f"x86_64={agent['REMUDA_AGENT_URL']}"}
    )
    assert (code, problems(lines)) == (2, {"image"}), lines
    assert "agent-url has no value for it" in lines["image"]["message"]

    job_image = {"REMUDA_JOB_IMAGE_URL": "s3://bucket/jobs-amd64.tar", "REMUDA_JOB_IMAGE_SHA256": digest}
    code, lines = patient.doctor(flags={"ami": ARM_AMI}, **job_image)
    assert (code, problems(lines)) == (2, {"image"}), lines
    assert "is for arm64, job-image-url for amd64" in lines["image"]["message"]


def test_an_image_with_an_old_kernel_is_a_warning(patient: Patient):
    _, lines = patient.doctor(flags={"ami": ARM_AMI})
    assert lines["image"]["status"] == "warning", lines
    assert "kernel-5.15" in lines["image"]["message"]
    assert "set ami" in lines["image"]["fix"]


def test_of_two_subnets_in_one_zone_one_is_used(patient: Patient):
    first, second = patient.servers.launch["subnet-ids"].split(",")

    async def create(client: Any) -> str:
        (known,) = (await client.describe_subnets(SubnetIds=[first]))["Subnets"]
        place = {"VpcId": known["VpcId"], "AvailabilityZone": known["AvailabilityZone"]}
        return str((await client.create_subnet(CidrBlock="172.31.192.0/28", **place))["Subnet"]["SubnetId"])

    small = patient.servers.call("ec2", create)
    code, lines = patient.doctor(flags={"subnet-ids": f"{small},{first},{second}"})
    assert (code, problems(lines)) == (0, set()), lines
    assert f"not used now: {small} (a launch uses one subnet per zone" in lines["subnets"]["message"]
    # A dry run with all three would fail: EC2 rejects such a fleet.
    assert "dry run" in lines["launch permission"]["message"]


def test_an_image_in_a_parameter_is_checked(patient: Patient):
    async def put(client: Any) -> None:
        await client.put_parameter(Name="/remuda/well/image", Value=WINDOWS_AMI, Type="String")

    patient.servers.call("ssm", put)
    code, lines = patient.doctor(flags={"ami": "resolve:ssm:/remuda/well/image"})
    assert (code, problems(lines)) == (2, {"image"}), lines
    assert "Windows" in lines["image"]["message"]
    code, lines = patient.doctor(flags={"ami": "resolve:ssm:/remuda/well/nothing"})
    assert (code, problems(lines)) == (2, {"image"}), lines
    assert "/remuda/well/nothing does not exist" in lines["image"]["message"]


def test_the_local_backend(tmp_path: Path):
    def remuda(*arguments: str) -> tuple[int, dict[str, Any]]:
        result = run_local(tmp_path / "state", *arguments)
        return result.code, {line["name"]: line for line in result.document.get("checks", ())}

    code, lines = remuda("doctor")
    assert (code, problems(lines)) == (2, {"local backend"})
    assert "remuda up" in lines["local backend"]["fix"]
    assert not (tmp_path / "state").exists()
    try:
        assert remuda("up")[0] == 0
        code, lines = remuda("doctor")
        assert (code, {line["status"] for line in lines.values()}) == (0, {"ok"}), lines
        (tmp_path / "state" / "runner" / "run.sh").unlink()
        code, lines = remuda("doctor")
        assert (code, problems(lines)) == (2, {"runner software"}), lines
    finally:
        assert remuda("down")[0] == 0
