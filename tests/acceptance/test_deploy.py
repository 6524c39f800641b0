"""`remuda deploy` and `remuda destroy` in an empty account on the test servers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remuda.adapters.aws.dynamodb.items import CONTROL_PREFIX
from remuda.cli.deploy import parse_stack_sets
from remuda.controlplane.demand.heartbeat import HEARTBEATS
from remuda.controlplane.demand.lease import STANDBY_POLL_S
from remuda.deployment.api import tags_of
from remuda.deployment.policies import FUNCTIONS
from remuda.deployment.template import logs_id, template
from remuda.domain.demand import LISTENER_LEASE
from remuda.domain.instance import State
from remuda.fake_github.oidc import number_of
from tests.smoke.recording import KEY_VARIABLE, NAMES_VARIABLE
from tests.smoke.workflow import ROOT
from tests.support.aws.deployment import EmptyAccount, empty_account
from tests.support.aws.servers import aws_client
from tests.support.aws.stack import SCOPE, AwsStack
from tests.support.cli import LIMIT_S, ForkedProcess, start_cli
from tests.support.upgrades import baseline_template


@pytest.fixture(scope="module")
def account(stack: AwsStack) -> Iterator[EmptyAccount]:
    with empty_account(stack) as made:
        yield made


def statuses(checks: list[dict[str, str]]) -> dict[str, str]:
    return {item["name"]: item["status"] for item in checks}


def changes(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(item["change"], item["resource"]) for item in document["changes"]}


def test_dry_run_lists_everything_and_leaves_nothing(account: EmptyAccount):
    before = account.resources("")
    result = account.deploy("--dry-run", pool="whole")
    assert result.code == 0, result.stderr
    assert {("add", "Table"), ("add", "RefreshFunction"), ("add", "WorkflowRole")} <= changes(result.document)
    assert set(result.document["outside"]) == {"bucket", "secret", "oidc provider", "spot role", "security group"}
    assert account.resources("") == before
    assert result.document["idle_cost"]["monthly"] > 5
    assert f"about {result.document['idle_cost']['monthly']:.2f} $ per month" in result.stderr
    # A new pool without a set is told what it lacks, with a value that can be pasted.
    (advice,) = re.findall(r"--runner-sets '(.*)'", result.stderr)
    assert [item.name for item in parse_stack_sets(advice, SCOPE) or ()] == ["whole-large"]


def test_deploy_creates_a_pool_that_doctor_finds_healthy_and_again_changes_nothing(account: EmptyAccount):
    planned = account.deploy("--dry-run", pool="whole").document
    result = account.deploy("--yes", pool="whole")
    assert result.code == 0, result.stderr
    document = result.document

    async def created(client: Any) -> set[tuple[str, str]]:
        found = await client.describe_stack_resources(StackName="remuda-whole")
        return {("add", item["LogicalResourceId"]) for item in found["StackResources"]}

    # The dry run evaluates the conditions of the template like CloudFormation.
    assert changes(planned) == account.call("cloudformation", created)
    assert statuses(document["doctor"]).keys() >= {"table", "launch template", "github access"}
    assert {status for name, status in statuses(document["doctor"]).items()} == {"ok"}, document["doctor"]
    assert f"tokens for {SCOPE}" in document["refresh"]["applied"]

    async def repositories(client: Any) -> list[str]:
        (found,) = (await client.describe_stacks(StackName="remuda-whole"))["Stacks"]
        return [item["ParameterValue"] for item in found["Parameters"] if item["ParameterKey"] == "Repositories"]

    owner, name = SCOPE.split("/")
    with_ids = f"{owner}@{number_of(owner)}/{name}@{number_of(SCOPE)}"
    assert account.call("cloudformation", repositories) == [f"{SCOPE},{with_ids}"]
    assert f"role-to-assume: {document['outputs']['WorkflowRoleArn']}" in document["workflow"]
    # Events of the stack are shown as they happen.
    assert "Table: create complete" in result.stderr
    assert account.stack.github.token not in result.stdout + result.stderr

    again = account.deploy("--yes", pool="whole")
    assert (again.code, again.document["changes"], again.document["done"]) == (0, [], []), again.stderr
    assert again.document["refresh"]["applied"] == []
    dry = account.deploy("--dry-run", pool="whole")
    assert (dry.code, dry.document["changes"], dry.document["outside"]) == (0, [], [])


def test_changed_settings_change_only_what_depends_on_them(account: EmptyAccount):
    result = account.deploy("--yes", "--max-uses", "7", "--environments", "prod,test", pool="whole")
    assert result.code == 0, result.stderr
    assert changes(result.document) == {("change", "Settings"), ("change", "WorkflowRole")}
    # Without it, the workflow could not assume the role.
    assert '    environment: "prod"\n' in result.document["workflow"]
    assert result.document["refresh"]["changes"] == {"max-uses": [50, 7]}
    # A change that is declined leaves nothing.
    arguments = account.arguments("--max-uses", "9", pool="whole")
    code, shown = account.run_on_terminal(arguments, {"change stack remuda-whole?": "n"})
    assert (code, "the stack was not changed" in shown) == (2, True), shown

    async def change_sets(client: Any) -> list[Any]:
        found: list[Any] = (await client.list_change_sets(StackName="remuda-whole"))["Summaries"]
        return [item for item in found if item["ExecutionStatus"] == "AVAILABLE"]

    assert account.call("cloudformation", change_sets) == []
    # Settings that are not given keep their values.
    again = account.deploy("--yes", pool="whole")
    assert (again.document["changes"], again.document["refresh"]["changes"]) == ([], {})


# Input and checks -----------------------------------------------------------------------------------------------------


def test_missing_values_are_named_together(account: EmptyAccount):
    dist = ("--dist", str(account.bundles()))
    result = account.remuda_command("deploy", "--pool", "none", *dist, "--yes", "--json", REMUDA_GITHUB_TOKEN="")
    assert result.code == 2, result.stderr
    message = result.document["error"]["message"]
    assert "--github-scope is missing" in message
    assert "no GitHub credential is given" in message
    assert account.resources("none") == []
    refused = account.deploy(pool="none")
    assert (refused.code, refused.document["error"]["field"]) == (2, "--yes")


def test_github_without_https_is_refused_because_of_its_oidc_tokens(account: EmptyAccount):
    result = account.deploy("--dry-run", pool="none", GITHUB_API_URL="http://github.example/api/v3")
    assert (result.code, result.document["error"]["field"]) == (2, "--github-api-url"), result.stderr


@pytest.mark.parametrize(
    ("fields", "why", "fix"),
    [
        (
            {"architecture": "arm64"},
            "class 'graviton' is for arm64, and its image {image} is for x86_64",
            "give the class an ami for arm64, or set its architecture to x86_64",
        ),
        (
            {"instance-types": "c7g.* m7g.*"},
            "the instance types c7g.* m7g.* of class 'graviton' are for arm64, and its image {image} is for x86_64",
            "give the class an ami for arm64, or instance-types for x86_64",
        ),
        (
            {"ami": "ami-00000000000000000"},
            "ami-00000000000000000 does not exist in this region, or is not shared",
            "give another ami of class 'graviton'",
        ),
    ],
)
def test_image_that_a_class_cannot_launch_is_refused(
    account: EmptyAccount, fields: dict[str, str], why: str, fix: str
) -> None:
    classes = json.dumps({"large": {"cpu": 2, "mmem": 4096}, "graviton": {"cpu": 2, "mmem": 4096, **fields}})
    result = account.deploy("--dry-run", "--resource-class-config", classes, pool="none")
    found = {item["name"]: item for item in result.document["checks"]}["image"]
    assert (result.code, found["status"]) == (2, "problem"), result.stderr
    assert found["message"] == why.format(image=account.stack.launch["ami"])
    assert found["fix"] == fix


def test_default_key_of_the_account_is_adopted_or_refused(account: EmptyAccount) -> None:
    async def create(kms: Any) -> str:
        return str((await kms.create_key())["KeyMetadata"]["Arn"])

    key = account.call("kms", create)

    def check(default: str) -> tuple[int, dict[str, str]]:
        account.stack.ec2.configure(default_key=default)
        try:
            result = account.deploy("--dry-run", pool="none")
        finally:
            account.stack.ec2.configure(default_key="")
        return result.code, {item["name"]: item for item in result.document["checks"]}["volume key"]

    code, found = check(key)
    assert (code, found["status"], found["message"].partition(": ")[0]) == (0, "ok", key)
    code, found = check(f"{key[:-1]}0" if key[-1] != "0" else f"{key[:-1]}1")
    assert (code, found["status"]) == (2, "problem")
    assert "does not exist in this region" in found["message"]


def test_security_group_of_another_vpc_is_refused(account: EmptyAccount) -> None:
    async def create(ec2: Any) -> tuple[str, str]:
        vpc = (await ec2.create_vpc(CidrBlock="10.9.0.0/16"))["Vpc"]["VpcId"]
        group = await ec2.create_security_group(GroupName="of-somebody", Description="-", VpcId=vpc)
        return vpc, group["GroupId"]

    vpc, group = account.call("ec2", create)
    result = account.deploy("--dry-run", "--security-group-ids", group, pool="none")
    found = {item["name"]: item for item in result.document["checks"]}["security group"]
    assert (result.code, found["status"]) == (2, "problem"), result.stderr
    assert found["message"].startswith(f"{group}: not all are in vpc-")
    assert vpc not in found["message"]
    assert found["fix"] == "give --security-group-ids and --subnet-ids of one VPC"


def test_values_are_asked_for_on_a_terminal(account: EmptyAccount):
    arguments = ["deploy", "--dry-run", "--dist", str(account.bundles()), "--ami", account.stack.launch["ami"]]
    answers = {"name of the pool": "asked", "organization or owner/repo": SCOPE, "GitHub token": "wrong-token"}
    answers["create a runner set"] = "n"
    code, shown = account.run_on_terminal(arguments, answers, REMUDA_GITHUB_TOKEN="")
    assert code == 2, shown
    # GitHub refuses the token, which was not shown.
    assert "github access" in shown
    assert "Bad credentials" in shown
    assert "wrong-token" not in shown
    answers["GitHub token"] = account.stack.github.token
    arguments += listener_place(account)
    for answer in ("n", "y"):
        answers["create a runner set"] = answer
        code, shown = account.run_on_terminal(arguments, answers, REMUDA_GITHUB_TOKEN="")
        assert (code, "nothing was changed" in shown) == (0, True), shown
        assert ("ListenerGroup" in shown) == (answer == "y")


def test_foreign_resources_and_missing_permissions_are_reported_before_any_change(account: EmptyAccount):
    async def create_bucket(s3: Any) -> None:
        name = "remuda-foreign-000000000000-eu-central-1"
        await s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
        await s3.put_object(Bucket=name, Key="of-somebody", Body=b"else")

    async def create_user(iam: Any) -> dict[str, str]:
        allowed = ["cloudformation:*", "s3:*", "dynamodb:*", "ec2:*", "iam:*", "secretsmanager:*", "sts:*"]
        statement = {"Effect": "Allow", "Action": allowed, "Resource": "*"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        await iam.create_user(UserName="limited")
        await iam.put_user_policy(UserName="limited", PolicyName="most", PolicyDocument=document)
        key = (await iam.create_access_key(UserName="limited"))["AccessKey"]
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    account.call("s3", create_bucket)
    before = account.resources("foreign")
    result = account.deploy("--yes", pool="foreign", **account.call("iam", create_user))
    found = {item["name"]: item for item in result.document["checks"]}
    assert (result.code, found["bucket"]["status"]) == (2, "problem"), result.stderr
    assert "not the tag remuda:pool=foreign" in found["bucket"]["message"]
    assert found["permissions"]["status"] == "warning"
    assert "user/limited seems to lack autoscaling:CreateAutoScalingGroup" in found["permissions"]["message"]
    assert "lambda:CreateFunction" in found["permissions"]["message"]
    assert "s3:PutObject" not in found["permissions"]["message"]
    assert account.resources("foreign") == before
    removed = account.destroy("--yes", pool="foreign")
    assert (removed.code, removed.document["deleted"]) == (0, []), removed.stderr
    assert "not the tag remuda:pool=foreign" in next(iter(removed.document["kept"].values()))
    assert account.resources("foreign") == before


def test_roles_and_tags_are_as_an_organization_requires_them(account: EmptyAccount):
    boundary = "arn:aws:iam::000000000000:policy/boundary"
    required = ("--tags", "team=ci,cost-center=42", "--permissions-boundary", boundary, "--role-path", "/ci/")
    result = account.deploy("--yes", *required, pool="owned")
    assert result.code == 0, result.stderr

    async def roles(client: Any) -> list[str]:
        return [item["RoleName"] for item in (await client.list_roles(PathPrefix="/ci/"))["Roles"]]

    assert {"remuda-owned-agent", "remuda-owned-workflow"} <= set(account.call("iam", roles))
    own = {"team": "ci", "cost-center": "42"}

    async def tags(client: Any) -> dict[str, dict[str, str]]:
        """Of the stack, and of what is outside it."""
        (stack,) = (await client.describe_stacks(StackName="remuda-owned"))["Stacks"]
        given = {item["ParameterKey"]: item["ParameterValue"] for item in stack["Parameters"]}
        # This server ignores the boundary of roles; the tests of the template check that each has it.
        assert given["PermissionsBoundary"] == boundary
        return {"stack": tags_of(stack["Tags"])}

    async def secret_tags(client: Any) -> dict[str, dict[str, str]]:
        return {"secret": tags_of((await client.describe_secret(SecretId="remuda/owned/github"))["Tags"])}

    async def ec2_tags(client: Any) -> dict[str, dict[str, str]]:
        names = ["remuda-owned"]
        groups = await client.describe_security_groups(Filters=[{"Name": "group-name", "Values": names}])
        templates = await client.describe_launch_templates(LaunchTemplateNames=names)
        versions = await client.describe_launch_template_versions(LaunchTemplateName=names[0], Versions=["$Default"])
        (version,) = versions["LaunchTemplateVersions"]
        return {
            "security group": tags_of(groups["SecurityGroups"][0]["Tags"]),
            "launch template": tags_of(templates["LaunchTemplates"][0]["Tags"]),
            "network interfaces": tags_of(version["LaunchTemplateData"]["TagSpecifications"][0]["Tags"]),
        }

    async def bucket_tags(client: Any) -> dict[str, dict[str, str]]:
        name = "remuda-owned-000000000000-eu-central-1"
        return {"bucket": tags_of((await client.get_bucket_tagging(Bucket=name))["TagSet"])}

    found = {
        **account.call("cloudformation", tags),
        **account.call("secretsmanager", secret_tags),
        **account.call("ec2", ec2_tags),
        **account.call("s3", bucket_tags),
    }
    assert {name: own.items() <= each.items() for name, each in found.items()} == dict.fromkeys(found, True)
    again = account.deploy("--yes", pool="owned")
    assert (again.code, again.document["changes"]) == (0, []), again.stderr
    moved = account.deploy("--yes", "--role-path", "/other/", pool="owned")
    assert (moved.code, moved.document["error"]["field"]) == (2, "--role-path")
    removed = account.destroy("--yes", pool="owned")
    assert removed.code == 0, removed.stderr


# Upgrade and removal --------------------------------------------------------------------------------------------------


def test_upgrade_replaces_idle_machines_and_lets_runs_finish(account: EmptyAccount):
    idle, busy = account.launch_machines("whole", State.IDLE, State.RUNNING)
    same = account.deploy("--yes", pool="whole")
    assert (same.document["drained"], account.machines("whole")[idle]) == ([], "running"), same.stderr
    result = account.deploy("--yes", pool="whole", agent="second")
    assert result.code == 0, result.stderr
    # The server also lists resources whose condition does not hold.
    assert {item for item in changes(result.document) if not item[1].startswith("Listener")} == {("change", "Settings")}
    assert [line for line in result.document["done"] if "remuda-agent" in line]
    assert sorted(result.document["drained"]) == sorted([idle, busy])
    states = account.machines("whole")
    assert (states[idle], states[busy]) == ("terminated", "running")
    # Nothing is drained twice.
    assert account.deploy("--yes", pool="whole", agent="second").document["drained"] == []


async def test_a_pool_of_the_last_release_is_upgraded_and_rolled_back_with_all_it_has(account: EmptyAccount):
    """Resources keep their physical names, and the table its records."""
    pool = "upgraded"
    topic = ("--parameter", "AlarmTopicArn=arn:aws:sns:eu-central-1:000000000000:alarms")
    first = await account.deploy_template(baseline_template(), *topic, "--yes", pool=pool)
    assert first.code == 0, first.stderr
    await asyncio.to_thread(account.launch_machines, pool, State.RUNNING, State.IDLE)
    before = await asyncio.to_thread(stack_state, account, pool)
    upgraded = await asyncio.to_thread(account.deploy, "--yes", pool=pool)
    assert upgraded.code == 0, upgraded.stderr
    assert changes(upgraded.document)
    # This server does not know which properties of an alarm may change, and calls each a possible replacement.
    assert "replace" not in {word for word, _ in changes(upgraded.document)}
    after = await asyncio.to_thread(stack_state, account, pool)
    assert before.items() <= after.items()
    back = await account.deploy_template(baseline_template(), "--yes", pool=pool)
    assert back.code == 0, back.stderr
    assert await asyncio.to_thread(stack_state, account, pool) == before
    removed = await asyncio.to_thread(account.destroy, "--yes", "--force", pool=pool)
    assert removed.code == 0, removed.stderr


def stack_state(account: EmptyAccount, pool: str) -> dict[str, str]:
    """The physical names of the resources of the stack, and the states of the records of instances."""

    async def names(client: Any) -> dict[str, str]:
        found = await client.describe_stack_resources(StackName=f"remuda-{pool}")
        return {item["LogicalResourceId"]: item["PhysicalResourceId"] for item in found["StackResources"]}

    async def records(client: Any) -> dict[str, str]:
        found = (await client.scan(TableName=f"remuda-{pool}"))["Items"]
        return {item["pk"]["S"]: item["state"]["S"] for item in found if item["pk"]["S"].startswith(CONTROL_PREFIX)}

    return {**account.call("cloudformation", names), **account.call("dynamodb", records)}


async def test_a_change_that_replaces_a_policy_is_refused_before_the_update(account: EmptyAccount):
    made = template()
    made["Resources"]["AgentPolicy"]["Properties"]["Description"] = "Better words."
    before = await asyncio.to_thread(stack_state, account, "whole")
    result = await account.deploy_template(made, "--yes", pool="whole")
    assert (result.code, result.document["error"]["field"]) == (2, "--allow-replacement"), result.stderr
    assert "would replace AgentPolicy" in result.document["error"]["message"]
    assert "remuda destroy --pool whole --keep-data" in result.document["error"]["fix"]
    assert await asyncio.to_thread(stack_state, account, "whole") == before
    # CloudFormation fails at what was refused.
    forced = await account.deploy_template(made, "--yes", "--allow-replacement", pool="whole")
    assert (forced.code, "UPDATE_ROLLBACK_COMPLETE" in forced.document["error"]["message"]) == (4, True), forced.stderr


async def test_destroy_waits_for_runs_and_can_be_interrupted(account: EmptyAccount):
    command = await account.start("destroy", "--pool", "whole", "--yes")
    async for line in command.stderr:
        if b"1 of them in use; --force terminates them now" in line:
            break
    command.send_signal(signal.SIGINT)
    result = await command.result()
    assert (result.code, "remuda destroy continues from there" in result.stderr) == (130, True), result.stderr
    assert "running" in (await asyncio.to_thread(account.machines, "whole")).values()


def test_destroy_leaves_nothing_and_can_be_repeated(account: EmptyAccount):
    typo = account.destroy("--yes", pool="whol")
    error = typo.document["error"]
    assert (typo.code, error["field"], "whole" in error["fix"]) == (2, "--pool", True), typo.stderr
    refused = account.destroy(pool="whole")
    assert (refused.code, refused.document["error"]["field"]) == (2, "--yes")
    before = account.resources("whole")
    dry = account.destroy("--dry-run", pool="whole")
    assert (dry.code, account.resources("whole")) == (0, before)
    assert "table remuda-whole" in dry.document["deleted"]
    result = account.destroy("--yes", "--force", pool="whole")
    assert result.code == 0, result.stderr
    assert account.resources("whole") == []
    assert set(account.machines("whole").values()) <= {"terminated"}
    again = account.destroy("--yes", pool="whole")
    assert (again.code, again.document["deleted"]) == (0, [])
    assert "nothing is left" in again.stderr


# Runner sets ----------------------------------------------------------------------------------------------------------

SETS = [{"name": "large", "labels": ["self-hosted", "remuda", "large"], "resource-class": "large", "max": 2}]


def listener_place(account: EmptyAccount) -> tuple[str, ...]:
    """Image and type that the test servers know."""
    image = f"ListenerAmi={account.stack.launch['ami']}"
    return ("--parameter", image, "--parameter", "ListenerInstanceType=m5.large")


def set_arguments(account: EmptyAccount, sets: list[dict[str, Any]], *more: str, pool: str = "sets") -> list[str]:
    given = ("--runner-sets", json.dumps(sets), *listener_place(account))
    return account.arguments("--json", *given, *more, pool=pool)


async def wait_for_line(process: ForkedProcess, text: bytes) -> list[bytes]:
    """The lines up to the one that contains the text."""
    lines = []
    async for line in process.stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(b"".join(lines).decode())


async def start_listener(account: EmptyAccount, pool: str) -> ForkedProcess:
    """The listener with the variables of its machine."""

    async def read_secret(client: Any) -> str:
        return str((await client.describe_secret(SecretId=f"remuda/{pool}/github"))["ARN"])

    environment = account.environment(
        REMUDA_BACKEND="aws",
        REMUDA_POOL=pool,
        REMUDA_GITHUB_TOKEN=await asyncio.to_thread(account.call, "secretsmanager", read_secret),
        REMUDA_SETTINGS_PARAMETER=f"/remuda/{pool}/settings",
    )
    del environment["GITHUB_API_URL"]
    return await start_cli(["listen"], environment=environment, cwd=account.stack.folder)


def test_runner_sets_are_checked_before_any_change(account: EmptyAccount):
    def listener_of(arguments: list[str]) -> dict[str, str]:
        result = account.remuda_command(*arguments, "--dry-run")
        assert result.code == 2, result.stderr
        (found,) = [item for item in result.document["checks"] if item["name"] == "listener"]
        assert found["status"] == "problem"
        return dict(found)

    unknown = listener_of(set_arguments(account, [{**SETS[0], "resource-class": "huge"}]))
    assert "resource-class of 'large' is 'huge'" in unknown["message"]
    arm = listener_of(set_arguments(account, SETS, "--parameter", "ListenerInstanceType=t4g.micro"))
    assert "t4g.micro cannot run" in arm["message"]
    assert account.resources("sets") == []


async def test_runner_sets_get_a_listener_and_are_removed_from_github_with_the_pool(account: EmptyAccount):
    deployment = await start_cli(
        set_arguments(account, SETS, "--yes"), environment=account.environment(), cwd=account.stack.folder
    )
    await wait_for_line(deployment, b"waiting for the listener")
    listener = await start_listener(account, "sets")
    try:
        result = await deployment.result()
        assert result.code == 0, result.stderr
        document = result.document
        assert {("add", "ListenerGroup"), ("add", "ListenerRole")} <= changes(document)
        assert document["listener"]
        assert statuses(document["doctor"])["runner sets"] == "ok", document["doctor"]
        assert document["workflow"].count("runs-on") == 1
        assert 'runs-on: ["self-hosted", "remuda", "large"]' in document["workflow"]
        async with account.stack.github_client() as github:
            assert [item.name for item in await github.scale_sets()] == ["large"]

        async def heartbeats(client: Any) -> list[Any]:
            found: list[Any] = (await client.list_metrics(Namespace="Remuda", MetricName=HEARTBEATS))["Metrics"]
            return found

        (metric,) = await asyncio.to_thread(account.call, "cloudwatch", heartbeats)
        assert {item["Name"]: item["Value"] for item in metric["Dimensions"]} == {"Pool": "sets", "Command": "listen"}

        removal = await account.start("destroy", "--pool", "sets", "--yes")
        await wait_for_line(removal, b"the listener removes its runner sets from GitHub: large")
        # It reads the configuration every minute, or now.
        listener.send_signal(signal.SIGHUP)
        await wait_for_line(listener, b"set-deleted")
        listener.terminate()
        removed = await removal.result()
        assert removed.code == 0, removed.stderr
        async with account.stack.github_client() as github:
            assert await github.scale_sets() == []
        assert await asyncio.to_thread(account.resources, "sets") == []
    finally:
        listener.kill()


class LeaseWatch:
    """The longest time in which no listener had the lease of a pool."""

    EVERY_S = 0.2

    def __init__(self, account: EmptyAccount, pool: str) -> None:
        self._account, self._pool = account, pool
        self.longest_s = 0.0
        self.owners: list[str] = []

    async def wait_for_owner(self, number: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.owners) < number:  # noqa: ASYNC110 - written by another process
                await asyncio.sleep(self.EVERY_S)

    async def run(self) -> None:
        last = time.monotonic()
        async with aws_client("dynamodb", self._account.stack.store.url) as client:
            store = self._account.stack.instance_store(client, self._pool)
            while True:
                lease = await store.get_lease(LISTENER_LEASE)
                if lease is not None and lease.owner:
                    last = time.monotonic()
                    if lease.owner not in self.owners:
                        self.owners.append(lease.owner)
                self.longest_s = max(self.longest_s, time.monotonic() - last)
                await asyncio.sleep(self.EVERY_S)


async def test_the_listener_serves_through_an_upgrade_and_a_rollback(account: EmptyAccount) -> None:
    """The group, of which this server has only the record, starts the new listener before it ends the old one."""
    pool = "served"
    given = ("--runner-sets", json.dumps(SETS), *listener_place(account), "--yes")
    first = await account.start_template(baseline_template(), *given, pool=pool)
    await wait_for_line(first, b"waiting for the listener")
    serving = await start_listener(account, pool)
    watch = LeaseWatch(account, pool)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch.run())
        result = await first.result()
        assert result.code == 0, result.stderr
        before = await asyncio.to_thread(stack_state, account, pool)
        async with account.stack.github_client() as github:
            (runner_set,) = [item for item in await github.scale_sets() if item.name == "large"]
        for made in (template(), baseline_template()):
            ended = await account.deploy_template(made, "--yes", pool=pool)
            assert ended.code == 0, ended.stderr
            assert "replace" not in {word for word, _ in changes(ended.document)}
            assert before.items() <= (await asyncio.to_thread(stack_state, account, pool)).items()
            following = await start_listener(account, pool)
            await wait_for_line(following, b"standby")
            serving.terminate()
            await serving.result()
            await watch.wait_for_owner(len(watch.owners) + 1)
            serving = following
        async with account.stack.github_client() as github:
            assert runner_set.id in {item.id for item in await github.scale_sets()}
        watching.cancel()
    assert len(watch.owners) == 3
    # A standby reads the lease every five seconds.
    assert watch.longest_s < STANDBY_POLL_S + 5
    removal = await account.start("destroy", "--pool", pool, "--yes")
    await wait_for_line(removal, b"the listener removes its runner sets")
    serving.send_signal(signal.SIGHUP)
    assert (await removal.result()).code == 0
    serving.terminate()
    await serving.result()


async def test_sets_without_a_listener_are_removed_by_destroy(account: EmptyAccount):
    arguments = set_arguments(account, SETS, "--listener", "none", "--yes", pool="elsewhere")
    result = await asyncio.to_thread(account.remuda_command, *arguments)
    # Doctor does not find the listener.
    assert (result.code, result.document["listener"]) == (2, ""), result.stderr
    assert "ListenerGroupName" not in result.document["outputs"]
    assert "docker run" in result.document["container"]
    listener = await start_listener(account, "elsewhere")
    async with account.stack.github_client() as github:
        version, found = await github.watch_scale_sets()
        while not found:
            version, found = await github.watch_scale_sets(since=version, wait_s=LIMIT_S)
        listener.kill()
        await listener.wait()
        removed = await asyncio.to_thread(account.destroy, "--yes", pool="elsewhere")
        assert removed.code == 0, removed.stderr
        assert "runner set large deleted on GitHub" in removed.stderr
        assert await github.scale_sets() == []


# Cuts -----------------------------------------------------------------------------------------------------------------

CREATIONS = (
    *("CreateBucket", "PutBucketPolicy", "CreateSecret", "CreateOpenIDConnectProvider", "CreateSecurityGroup"),
    *("PutObject", "CreateChangeSet", "ExecuteChangeSet", "Invoke"),
)
DELETIONS = (
    *("DeleteLaunchTemplate", "DeleteStack", "DeleteSecurityGroup", "DeleteObjects", "DeleteSecret"),
    "DeleteOpenIDConnectProvider",
)


async def test_deploy_and_destroy_continue_after_every_cut(account: EmptyAccount):
    pool = "cut"
    for operation in CREATIONS:
        result = await account.cut(account.arguments("--yes", pool=pool), operation)
        assert result.code == -signal.SIGKILL, (operation, result.stderr)
    interrupted = await account.cut(account.arguments("--yes", pool=pool), "Invoke", signal.SIGINT)
    assert interrupted.code == 130
    assert "interrupted; what was created stays, and the same command continues from there" in interrupted.stderr
    last = await asyncio.to_thread(account.deploy, "--yes", pool=pool)
    assert (last.code, last.document["changes"], last.document["done"]) == (0, [], []), last.stderr
    assert {item["status"] for item in last.document["doctor"]} == {"ok"}
    for operation in DELETIONS:
        result = await account.cut(["destroy", "--pool", pool, "--yes"], operation)
        assert result.code == -signal.SIGKILL, (operation, result.stderr)
    last = await asyncio.to_thread(account.destroy, "--yes", pool=pool)
    assert (last.code, last.document["deleted"]) == (0, []), last.stderr
    assert await asyncio.to_thread(account.resources, pool) == []


def test_failed_creation_is_explained_and_the_next_run_recovers(account: EmptyAccount):
    pool, name = "failed", "/remuda/failed/settings"

    async def create(ssm: Any) -> None:
        await ssm.put_parameter(Name=name, Value="of somebody else", Type="String")

    async def delete(ssm: Any) -> None:
        await ssm.delete_parameter(Name=name)

    account.call("ssm", create)
    result = account.deploy("--yes", pool=pool)
    assert result.code == 4, result.stderr
    assert "Settings (AWS::SSM::Parameter)" in result.document["error"]["message"]
    account.call("ssm", delete)
    again = account.deploy("--yes", pool=pool)
    assert (again.code, "ROLLBACK_COMPLETE; deleting it" in again.stderr) == (0, True), again.stderr


def test_replacement_of_the_table_is_refused(account: EmptyAccount):
    made = template()
    made["Resources"] = {"Table": made["Resources"]["Table"]}
    made["Outputs"] = {}
    table = made["Resources"]["Table"]["Properties"]
    table |= {
        "AttributeDefinitions": [{"AttributeName": "other", "AttributeType": "S"}],
        "KeySchema": [{"AttributeName": "other", "KeyType": "HASH"}],
    }
    del table["GlobalSecondaryIndexes"]

    async def create(client: Any) -> None:
        parameters = [{"ParameterKey": "Pool", "ParameterValue": "odd"}]
        await client.create_stack(StackName="remuda-odd", TemplateBody=json.dumps(made), Parameters=parameters)

    account.call("cloudformation", create)
    result = account.deploy("--yes", pool="odd")
    assert (result.code, result.document["error"]["field"]) == (2, "--allow-replacement"), result.stderr

    async def describe(client: Any) -> Any:
        await client.delete_stack(StackName="remuda-odd")
        return (await client.list_change_sets(StackName="remuda-odd"))["Summaries"]

    assert account.call("cloudformation", describe) == []


def test_kept_data_is_reused_by_the_next_deployment(account: EmptyAccount):
    pool = "failed"
    result = account.destroy("--yes", "--keep-data", pool=pool)
    assert result.code == 0, result.stderr
    kept = {
        "table remuda-failed",
        "secret remuda/failed/github",
        *(f"log group /remuda/failed/{who}" for who in FUNCTIONS),
    }
    assert set(result.document["kept"]) == kept
    assert {name.partition(" ")[0] for name in account.resources(pool)} == {"dynamodb", "logs", "secretsmanager"}
    planned = account.deploy("--dry-run", pool=pool)
    assert {name for word, name in changes(planned.document) if word == "import"} == {"Table", *map(logs_id, FUNCTIONS)}
    again = account.deploy("--yes", pool=pool)
    assert again.code == 0, again.stderr
    # The configuration of the pool is the one before, with a new security group.
    assert set(again.document["refresh"]["changes"]) == {"security-group-ids"}
    last = account.destroy("--yes", pool=pool)
    assert (last.code, kept <= set(last.document["deleted"])) == (0, True), last.stderr
    assert account.resources(pool) == []


def test_a_recording_of_a_deployment_contains_no_secret(account: EmptyAccount, tmp_path: Path):
    file = tmp_path / "deploy.json"
    environment = {
        **account.environment(),
        KEY_VARIABLE: "00" * 16,
        NAMES_VARIABLE: json.dumps({SCOPE: "octo/demo"}),
    }
    arguments = account.arguments("--dry-run", "--json", pool="recorded")
    command = [sys.executable, "-m", "tests.smoke.recording", str(file), *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = file.read_text(encoding="utf-8")
    exchanges = json.loads(text)
    assert {"ec2", "sts", "http"} <= {each["service"] for each in exchanges}
    operations = {each["operation"]: each for each in exchanges}
    # The form of answers is kept.
    vpcs = operations["DescribeVpcs"]["answer"]["Vpcs"]
    assert vpcs
    assert all(re.fullmatch(r"vpc-[0-9a-f]{8,17}", vpc["VpcId"]) for vpc in vpcs)
    for secret in (account.stack.github.token, SCOPE, "123456789012", environment["AWS_SECRET_ACCESS_KEY"]):
        assert secret not in text
