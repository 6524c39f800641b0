"""Decisions of `remuda deploy`: bundles, checks, parameters of the stack, credentials."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from botocore.exceptions import ClientError

from build import DEPLOY
from remuda import __version__
from remuda.adapters.aws.ec2.routes import outbound_route
from remuda.adapters.github.responses import parse_immutable_name
from remuda.cli.deploy import (
    _check_role_path,
    check_launch_options,
    given_parameters,
    parse_parameters,
    parse_stack_sets,
    read_credential,
)
from remuda.config.settings import GITHUB_ISSUER
from remuda.config.sources import load
from remuda.deployment.api import AwsAccount
from remuda.deployment.bundles import (
    SUMS,
    Bundle,
    BundleSource,
    BundleUse,
    bundle_name,
    check_location,
    parse_sums,
)
from remuda.deployment.deploy import (
    Deployment,
    DeployRequest,
    DeployResult,
    choose_code,
    per_architecture,
    plan_stack,
)
from remuda.deployment.deployer import ACTIONS
from remuda.deployment.images import GIVEN, UBUNTU, ChosenImage, choose_image
from remuda.deployment.preflight import (
    DEFAULT_IMAGE,
    DeployFacts,
    DeployTarget,
    Preflight,
)
from remuda.deployment.resources import Bucket, issuer_of
from remuda.deployment.stack import Stack, StackChange, StackState, new_resources
from remuda.deployment.template import template
from remuda.deployment.workflow import CONFIGURE_CREDENTIALS, set_workflow_text, workflow_text
from remuda.domain.errors import Partial, Unavailable, UserError
from remuda.domain.resources import parse_classes
from remuda.ports.doctor import CheckStatus
from tests.support.aws.scripted_api import ScriptedApi
from tests.support.virtual_time import AdjustableClock

ACCOUNT = AwsAccount(account_id="123456789012", partition="aws", region="eu-central-1", caller="arn:aws:iam::1:user/x")
SECRET = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:remuda/ci/github-AbCdEf"
TEMPLATE_URL = "https://s3.eu-central-1.amazonaws.com/remuda-ci/template/0"
CHANGE_SET_ARN = "arn:aws:cloudformation:eu-central-1:123456789012:changeSet/remuda-deploy/1"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nkey\n-----END RSA PRIVATE KEY-----"


# Bundles --------------------------------------------------------------------------------------------------------------


def make_bundles(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text(name, encoding="utf-8")
    lines = [f"{hashlib.sha256(name.encode()).hexdigest()}  {name}" for name in names]
    (folder / SUMS).write_text("\n".join(lines) + "\n", encoding="utf-8")


NAMES = [bundle_name(use, each) for use in BundleUse for each in ("x86_64", "arm64")]


async def test_bundles_of_this_version_are_found_with_their_digests(tmp_path: Path) -> None:
    make_bundles(tmp_path, *NAMES, "remuda-agent-9.9.9-x86_64.tar.gz", "sbom.cdx.json")
    source = BundleSource(str(tmp_path))
    found = await source.list()
    assert [bundle.name for bundle in found] == NAMES
    for bundle in found:
        assert (await source.read(bundle)).decode() == bundle.name
        assert bundle.sha256 in bundle.key


async def test_bundle_with_another_digest_is_refused(tmp_path: Path) -> None:
    make_bundles(tmp_path, *NAMES)
    source = BundleSource(str(tmp_path))
    bundle = (await source.list())[0]
    (tmp_path / bundle.name).write_text("changed", encoding="utf-8")
    with pytest.raises(UserError, match=f"lists {bundle.sha256}"):
        await source.read(bundle)


async def test_missing_bundles_are_named(tmp_path: Path) -> None:
    make_bundles(tmp_path, bundle_name(BundleUse.LAMBDA, "x86_64"))
    with pytest.raises(UserError, match="lists no remuda-agent-"):
        await BundleSource(str(tmp_path)).list()
    with pytest.raises(UserError, match="SHA256SUMS cannot be read: No such file"):
        await BundleSource(str(tmp_path / "none")).list()


async def test_redirect_to_an_insecure_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = "".join(f"{'a' * 64}  {name}\n" for name in NAMES)
    targets = {"https://one.example/SHA256SUMS": "http://two.example/", "http://two.example/": "https://three.example/"}

    def answer(request: httpx.Request) -> httpx.Response:
        target = targets.get(str(request.url))
        return httpx.Response(302, headers={"location": target}) if target else httpx.Response(200, text=sums)

    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(answer)))
    assert len(await BundleSource("https://three.example").list()) == len(NAMES)
    with pytest.raises(UserError, match=r"redirects to http://two.example/, not to https://"):
        await BundleSource("https://one.example").list()


def test_bundles_come_from_dist_only_if_it_has_this_version(tmp_path: Path) -> None:
    repository = "https://github.com/acme/remuda"
    release = f"{repository}/releases/download/v{__version__}"
    assert BundleSource.default(repository, tmp_path).location == release
    make_bundles(tmp_path, "remuda-agent-9.9.9-x86_64.tar.gz")
    assert BundleSource.default(repository, tmp_path).location == release
    with pytest.raises(UserError, match="the repository with the release is not known") as caught:
        BundleSource.default("", tmp_path)
    assert caught.value.fix.startswith("run make dist")
    make_bundles(tmp_path, *NAMES)
    for known in (repository, ""):
        assert BundleSource.default(known, tmp_path).location == str(tmp_path)


@pytest.mark.parametrize("text", ["http://example.org/x", "nowhere", "ftp://example.org"])
def test_location_is_a_folder_or_a_secure_address(text: str) -> None:
    with pytest.raises(UserError, match="must be a folder or an https:// address"):
        check_location(text)


def test_sums_ignore_other_lines() -> None:
    digest = "a" * 64
    assert parse_sums(f"{digest}  one\n{digest} *two\nnot a line\n{digest}  ../three\n") == {
        "one": digest,
        "two": digest,
    }


# Checks ---------------------------------------------------------------------------------------------------------------


def test_every_type_of_the_template_has_its_actions() -> None:
    assert {item["Type"] for item in template()["Resources"].values()} <= set(ACTIONS)


def route_table(target: dict[str, str], *subnets: str) -> dict[str, Any]:
    associations: list[dict[str, Any]] = [{"SubnetId": name} for name in subnets] or [{"Main": True}]
    return {"Associations": associations, "Routes": [{"DestinationCidrBlock": "0.0.0.0/0", **target}]}


MAIN, PRIVATE = route_table({"GatewayId": "igw-1"}), route_table({"NatGatewayId": "nat-1"}, "subnet-2")


@pytest.mark.parametrize(
    ("subnet", "tables", "route"),
    [
        ({"SubnetId": "subnet-1", "MapPublicIpOnLaunch": True}, [MAIN, PRIVATE], "public"),
        ({"SubnetId": "subnet-1", "MapPublicIpOnLaunch": False}, [MAIN, PRIVATE], "none"),
        ({"SubnetId": "subnet-2"}, [MAIN, PRIVATE], "nat"),
        ({"SubnetId": "subnet-2"}, [route_table({"GatewayId": "igw-1", "State": "blackhole"})], "none"),
        ({"SubnetId": "subnet-1"}, [], "none"),
    ],
)
def test_route_of_a_subnet(subnet: dict[str, Any], tables: list[dict[str, Any]], route: str) -> None:
    assert outbound_route(subnet, tables) == route


@pytest.mark.parametrize(
    ("api_url", "issuer"),
    [
        ("", GITHUB_ISSUER),
        ("https://api.github.com", GITHUB_ISSUER),
        ("https://api.acme.ghe.com", "https://token.actions.acme.ghe.com"),
        ("https://github.acme.org/api/v3", "https://github.acme.org/_services/token"),
    ],
)
def test_issuer_follows_from_the_api(api_url: str, issuer: str) -> None:
    assert issuer_of(api_url) == issuer


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"name": "app", "id": 2, "owner": {"login": "acme", "id": 1}}, "acme@1/app@2"),
        ({"login": "acme", "id": 1}, "acme@1/*"),
    ],
)
def test_name_with_ids_of_a_repository_and_of_an_organization(body: dict[str, Any], name: str) -> None:
    assert parse_immutable_name(body) == name


@pytest.mark.parametrize("body", [{}, {"login": "acme"}, {"owner": {"login": "acme", "id": 1}}, {"owner": 1, "id": 2}])
def test_answer_without_ids_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(Unavailable):
        parse_immutable_name(body)


# Parameters of the stack ----------------------------------------------------------------------------------------------


def facts(**changed: Any) -> DeployFacts:
    bundles = tuple(
        Bundle(use=use, architecture=each, sha256=f"{use}{each}".encode().hex().ljust(64, "0")[:64])
        for use in BundleUse
        for each in ("x86_64", "arm64")
    )
    values: dict[str, Any] = {"account": ACCOUNT, "bundles": bundles, "subnets": ("subnet-1",)}
    values["images"] = {"Ami": ChosenImage("ami-1", UBUNTU)}
    return DeployFacts(**{**values, **changed})


def request(parameters: dict[str, str] | None = None, **changed: Any) -> DeployRequest:
    wanted: dict[str, Any] = {
        "pool": "ci",
        "scope": "acme/app",
        "vpc": "",
        "subnets": (),
        "security_groups": "",
        "image": "",
        "classes": None,
        "max_instances": 100,
        "issuer": GITHUB_ISSUER,
        "has_credential": False,
        "has_own_secret": False,
        "resource_types": frozenset(),
    }
    values: dict[str, Any] = {
        "repositories": "acme/app",
        "credential": None,
        "own_secret": "",
        "app_id": "",
        "api_url": "",
        "bundles": BundleSource("dist"),
    }
    given = {name: changed.pop(name) for name in list(changed) if name in wanted}
    return DeployRequest(
        wanted=DeployTarget(**{**wanted, **given}), parameters=parameters or {}, **{**values, **changed}
    )


def test_parameters_of_a_new_stack() -> None:
    plan = plan_stack(request(), facts(), secret=SECRET, groups="sg-1")
    bucket = "remuda-ci-123456789012-eu-central-1"
    assert plan.kept == ()
    assert dict(plan.parameters) | {"AgentUrl": "", "AgentSha256": "", "CodeKey": ""} == {
        "Pool": "ci",
        "CodeBucket": bucket,
        "CodeKey": "",
        "Architecture": "x86_64",
        "GithubSecretArn": SECRET,
        "OidcProviderArn": "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com",
        "OidcIssuer": GITHUB_ISSUER,
        "AgentUrl": "",
        "AgentSha256": "",
        "GithubScope": "acme/app",
        "Repositories": "acme/app",
        "Ami": "ami-1",
        "SubnetIds": "subnet-1",
        "SecurityGroupIds": "sg-1",
    }
    code, *_, agent = facts().bundles
    assert plan.parameters["CodeKey"] == f"lambda/{code.sha256}/{code.name}"
    assert plan.parameters["AgentUrl"].endswith(f",arm64=s3://{bucket}/{agent.key}")
    assert plan.parameters["AgentSha256"].endswith(f",arm64={agent.sha256}")


def test_existing_stack_keeps_what_is_not_given() -> None:
    stored = {
        "Pool": "ci",
        "GithubScope": "acme",
        "Repositories": "acme/*",
        "Ami": "ami-2",
        "SubnetIds": "subnet-2",
        "SecurityGroupIds": "sg-2",
        "GithubAppId": "7",
        "MaxUses": "9",
        "Architecture": "arm64",
        "Removed": "x",
    }
    known = facts(
        stack=StackState(status="CREATE_COMPLETE", parameters=stored), images={"Ami": ChosenImage("ami-2", GIVEN)}
    )
    plan = plan_stack(request({"MaxAgeSec": "60"}), known, secret=SECRET, groups="")
    assert {"GithubScope", "Repositories", "Ami", "SubnetIds", "SecurityGroupIds", "GithubAppId", "MaxUses"} == set(
        plan.kept
    )
    assert (plan.parameters["MaxAgeSec"], plan.parameters["Architecture"]) == ("60", "arm64")
    assert "-arm64.zip" in plan.parameters["CodeKey"]
    assert plan.value("GithubAppId", known) == "7"
    # A new credential replaces the App.
    token = plan_stack(request({"GithubAppId": "7"}, own_secret=SECRET), known, secret=SECRET, groups="")
    assert token.parameters["GithubAppId"] == ""
    # Another VPC replaces the subnets.
    moved = plan_stack(request(vpc="vpc-1"), known, secret=SECRET, groups="")
    assert moved.parameters["SubnetIds"] == "subnet-1"


# Images ---------------------------------------------------------------------------------------------------------------

DEFAULT_NAME = DEFAULT_IMAGE.removeprefix("resolve:ssm:")
ARM = f"{UBUNTU}arm64/hvm/ebs-gp3/ami-id"
NEWEST = {DEFAULT_NAME: "ami-11", ARM: "ami-22"}


@pytest.mark.parametrize(
    ("given", "stored", "stored_source", "expected"),
    [
        # A new stack, and a later deployment, which reads the parameter again.
        ("", "", "", ("ami-11", DEFAULT_NAME)),
        ("", "ami-10", DEFAULT_NAME, ("ami-11", DEFAULT_NAME)),
        # The default of an earlier version.
        ("", DEFAULT_IMAGE, "", ("ami-11", DEFAULT_NAME)),
        ("", f"resolve:ssm:{ARM}", "", ("ami-22", ARM)),
        # What the user has given stays as it is, now and later.
        ("ami-7", "ami-10", DEFAULT_NAME, ("ami-7", GIVEN)),
        ("", "ami-7", GIVEN, ("ami-7", GIVEN)),
        ("", "ami-7", "", ("ami-7", GIVEN)),
        (DEFAULT_IMAGE, "", "", (DEFAULT_IMAGE, GIVEN)),
        ("", DEFAULT_IMAGE, GIVEN, (DEFAULT_IMAGE, GIVEN)),
        ("", "resolve:ssm:/remuda/ci/ami", "", ("resolve:ssm:/remuda/ci/ami", GIVEN)),
    ],
)
async def test_only_an_image_that_nobody_gave_is_pinned(
    given: str, stored: str, stored_source: str, expected: tuple[str, str]
) -> None:
    async def read(name: str) -> str:
        return NEWEST[name]

    chosen = await choose_image(
        given=given, stored=stored, stored_source=stored_source, default=DEFAULT_IMAGE, read=read
    )
    assert chosen == expected


def test_stack_has_the_ids_of_images_and_their_sources() -> None:
    images = {"Ami": ChosenImage("ami-11", DEFAULT_NAME), "ListenerAmi": ChosenImage("ami-7", GIVEN)}
    plan = plan_stack(request(), facts(images=images), secret=SECRET, groups="sg-1")
    assert (plan.parameters["Ami"], plan.parameters["ListenerAmi"]) == ("ami-11", "ami-7")
    outputs = plan.template["Outputs"]
    assert (outputs["AmiSource"]["Value"], outputs["ListenerAmiSource"]["Value"]) == (DEFAULT_NAME, GIVEN)


def test_unknown_parameter_is_refused() -> None:
    with pytest.raises(UserError, match="the stack has no parameter 'Colour'"):
        plan_stack(request({"Colour": "red"}), facts(), secret=SECRET, groups="")


def test_template_has_the_classes_and_the_issuer() -> None:
    classes = parse_classes({"tiny": {"cpu": 1, "mmem": 512}})
    made = plan_stack(
        request(issuer="https://github.acme.org/_services/token"), facts(classes=classes), secret=SECRET, groups=""
    ).template
    assert [name for name in made["Resources"] if name.startswith("Queue")] == ["QueueTiny"]
    trust = made["Resources"]["WorkflowRole"]["Properties"]["AssumeRolePolicyDocument"]["Statement"][0]
    assert trust["Condition"]["StringEquals"] == {"github.acme.org/_services/token:aud": "sts.amazonaws.com"}


def test_code_for_an_architecture_without_a_bundle_is_refused() -> None:
    (code, *_) = facts().bundles
    with pytest.raises(UserError, match="no bundle of the functions for arm64, only for x86_64"):
        choose_code((code,), "arm64")


def test_values_per_architecture() -> None:
    assert per_architecture({"x86_64": "a"}) == "x86_64=a"
    assert per_architecture({"x86_64": "a", "arm64": "b"}) == "x86_64=a,arm64=b"


def test_conditions_decide_the_resources_of_a_new_stack() -> None:
    made = template()
    bare = {change.logical_id for change in new_resources(made, {"Pool": "ci"})}
    assert {"Table", "AgentRole"} <= bare
    assert not bare & {"RefreshFunction", "WorkflowRole", "VolumeKeyPolicy", "RefreshAlarm"}
    functions = {"CodeBucket": "b", "CodeKey": "k", "AlarmTopicArn": "arn:aws:sns:x", "FunctionUrl": "true"}
    full = {change.logical_id for change in new_resources(made, functions)}
    assert {"RefreshFunction", "RefreshAlarm", "BrokerUrl"} <= full
    assert full < set(made["Resources"])


@pytest.mark.parametrize(
    ("action", "replacement", "word", "loses"),
    [
        ("Add", "", "add", False),
        ("Modify", "False", "change", False),
        ("Modify", "True", "replace", True),
        ("Modify", "Conditional", "change or replace", True),
        ("Remove", "", "remove", True),
    ],
)
def test_changes_in_words(action: str, replacement: str, word: str, *, loses: bool) -> None:
    change = StackChange(
        action=action, logical_id="Table", resource_type="AWS::DynamoDB::Table", replacement=replacement
    )
    assert (change.word, change.loses_data) == (word, loses)


# Input ----------------------------------------------------------------------------------------------------------------


def test_given_settings_are_parameters_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "remuda.toml"
    text = 'max-uses = 9\nrepositories = ["acme/app", "acme/lib"]\n[resource-class-config.tiny]\ncpu = 1\nmmem = 512\n'
    file.write_text(text, encoding="utf-8")
    environ = {"REMUDA_IDLE_TIME_SEC": "60", "GITHUB_REPOSITORY": "acme/other", "REMUDA_GITHUB_TOKEN": "t"}
    settings = load({"trust_pull_requests": True}, environ=environ, file=file)
    assert given_parameters(settings) == {
        "MaxUses": "9",
        "Repositories": "acme/app,acme/lib",
        "ResourceClassConfig": json.dumps({"tiny": {"cpu": 1, "mmem": 512}}),
        "IdleTimeSec": "60",
        "TrustPullRequests": "true",
    }


@pytest.mark.parametrize("value", ["AlarmTopicArn", "=x", "A b=c"])
def test_parameter_needs_a_name_and_a_value(value: str) -> None:
    with pytest.raises(UserError, match="--parameter must be NAME=VALUE"):
        parse_parameters([value])


@pytest.mark.parametrize(
    ("name", "fix"), [("MaxUses", "--max-uses"), ("Repositories", "--repositories"), ("Pool", "it")]
)
def test_parameters_that_have_a_flag_or_follow_from_the_deployment_are_refused(name: str, fix: str) -> None:
    with pytest.raises(UserError, match=f"--parameter {name} cannot be given") as caught:
        parse_parameters([f"{name}=1"])
    assert fix in caught.value.fix


def test_role_path_of_a_pool_cannot_be_changed() -> None:
    _check_role_path("ci", {"RolePath": "/other/"}, {})
    _check_role_path("ci", {"RolePath": "/ci/"}, {"RolePath": "/ci/"})
    with pytest.raises(UserError) as refused:
        _check_role_path("ci", {"RolePath": "/other/"}, {"RolePath": "/ci/"})
    assert "but the roles of pool ci have the path /ci/" in refused.value.message


def test_launch_options_are_checked_before_any_call() -> None:
    with pytest.raises(UserError, match="volume-type is invalid: 'floppy'"):
        check_launch_options(load({"backend": "aws", "volume_type": "floppy"}, environ={}))


def test_credential_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file, key = tmp_path / "token", tmp_path / "key.pem"
    file.write_text("ghp_1\n", encoding="utf-8")
    key.write_text(PEM, encoding="utf-8")
    token = {"REMUDA_GITHUB_TOKEN": "ghp_2"}
    app = {"REMUDA_GITHUB_APP_ID": "7"}

    def read(environ: dict[str, str], token: str = "", app_key: str = "") -> Any:
        return read_credential(load({}, environ=environ), token, app_key)

    assert not read({}).is_given
    assert read(token).credential.text == "ghp_2"
    assert read(token, f"@{file}").credential.text == "ghp_1"
    assert (read({"REMUDA_GITHUB_TOKEN": SECRET}).secret_arn, read({"REMUDA_GITHUB_TOKEN": SECRET}).credential) == (
        SECRET,
        None,
    )
    from_key = read(app, app_key=f"@{key}")
    assert (from_key.credential.text, from_key.app_id) == (PEM, "7")
    assert read({**app, "REMUDA_GITHUB_APP_KEY": SECRET}).secret_arn == SECRET
    assert read({**app, "REMUDA_GITHUB_APP_KEY": SECRET, **token}).credential.text == "ghp_2"
    for values, message in (
        ({"token": "ghp_3"}, "--github-token must be @FILE"),
        ({"token": f"@{tmp_path}/none"}, "cannot be read: No such file"),
        ({"app_key": f"@{key}"}, "--github-app-key needs --github-app-id"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            read({}, **values)
        assert "ghp_3" not in str(caught.value)


def test_workflow_is_valid_and_names_the_pool() -> None:
    text = workflow_text(pool="ci", region="eu-central-1", role="arn:aws:iam::1:role/remuda-ci-workflow")
    jobs = yaml.safe_load(text)["jobs"]
    assert CONFIGURE_CREDENTIALS in (DEPLOY / "workflows" / "matrix.yml").read_text(encoding="utf-8")
    assert set(jobs) == {"provision", "test", "release"}
    # No account on GitHub can have this name, so a workflow without an address runs nobody's code.
    assert text.count("uses: YOUR_ORG/remuda@v") == 2
    named = workflow_text(pool="ci", region="eu-central-1", role="arn:aws:iam::1:role/r", repository="acme/remuda")
    assert named.count("uses: acme/remuda@v") == 2
    assert jobs["release"]["needs"] == ["provision", "test"]
    assert "environment" not in text
    for name in ("provision", "release"):
        configure, step = jobs[name]["steps"]
        assert configure["with"]["role-to-assume"] == "arn:aws:iam::1:role/remuda-ci-workflow"
        assert (step["with"]["mode"], step["with"]["pool"]) == (name, "ci")


def test_workflow_of_a_pool_for_environments_runs_in_one() -> None:
    text = workflow_text(pool="ci", region="eu-central-1", role="arn:aws:iam::1:role/r", environment="it's: prod")
    jobs = yaml.safe_load(text)["jobs"]
    # Jobs on the pool's runners need no credentials.
    assert {name: job.get("environment") for name, job in jobs.items()} == {
        "provision": "it's: prod",
        "test": None,
        "release": "it's: prod",
    }


def test_workflow_of_a_runner_set_has_its_labels_and_nothing_else() -> None:
    (runner_set,) = parse_stack_sets(SETS, "acme/app") or ()
    workflow = yaml.safe_load(set_workflow_text(runner_set))
    assert workflow["jobs"].keys() == {"test"}
    assert workflow["jobs"]["test"]["runs-on"] == ["self-hosted", 'la"rge']
    assert "id-token" not in str(workflow)


SETS = '[{"name": "large", "labels": ["self-hosted", "la\\"rge"], "resource-class": "large", "max": 20}]'


def test_sets_of_the_stack_have_its_scope_and_may_be_none() -> None:
    (found,) = parse_stack_sets(SETS, "acme/app") or ()
    assert (found.name, found.scope) == ("large", "acme/app")
    assert parse_stack_sets("[]", "acme") == ()
    assert parse_stack_sets("", "acme") is None
    with pytest.raises(UserError) as caught:
        parse_stack_sets('[{"name": "large"}]', "acme")
    assert caught.value.field == "--runner-sets"


def test_lists_of_ids_reach_the_template_with_commas() -> None:
    known = facts(
        stack=StackState(status="CREATE_COMPLETE", parameters={"Pool": "ci", "SecurityGroupIds": "sg-1 sg-2"})
    )
    plan = plan_stack(request({"SubnetIds": "subnet-1, subnet-2"}), known, secret=SECRET, groups="")
    assert plan.parameters["SubnetIds"] == "subnet-1,subnet-2"
    assert plan.parameters["SecurityGroupIds"] == "sg-1,sg-2"
    assert "SecurityGroupIds" not in plan.kept


# AWS ------------------------------------------------------------------------------------------------------------------


def stack_answer(status: str) -> dict[str, Any]:
    return {"Stacks": [{"StackStatus": status}]}


def event(number: int, status: str, resource: str = "Table", reason: str = "") -> dict[str, Any]:
    return {
        "EventId": str(number),
        "LogicalResourceId": resource,
        "ResourceType": "AWS::DynamoDB::Table",
        "ResourceStatus": status,
        "ResourceStatusReason": reason,
    }


def events(*listed: dict[str, Any]) -> dict[str, Any]:
    return {"StackEvents": list(listed)[::-1]}


def scripted_stack(**answers: list[Any]) -> Stack:
    api: Any = ScriptedApi(**answers)
    stack = Stack(api, "remuda-ci", AdjustableClock(longest_sleep_s=10.0))
    stack.change_set = CHANGE_SET_ARN
    return stack


async def test_operation_ends_after_its_first_event_and_the_cleanup() -> None:
    old, start, end = event(1, "CREATE_COMPLETE"), event(2, "UPDATE_IN_PROGRESS"), event(3, "UPDATE_COMPLETE")
    stack = scripted_stack(
        # The first answer is the state before the operation.
        DescribeStacks=[
            *map(stack_answer, ("CREATE_COMPLETE", "UPDATE_IN_PROGRESS", "UPDATE_COMPLETE_CLEANUP_IN_PROGRESS")),
            stack_answer("UPDATE_COMPLETE"),
        ],
        DescribeStackEvents=[events(old), events(old), events(old, start), events(old, start, end)],
        ExecuteChangeSet=[{}],
    )
    lines: list[str] = []
    await stack.apply(lines.append)
    assert lines == ["Table: update in progress", "Table: update complete"]


async def test_failed_operation_is_explained_by_its_first_failure() -> None:
    cancelled = event(2, "CREATE_FAILED", "Settings", "Resource creation cancelled")
    failed = event(3, "CREATE_FAILED", "AgentRole", "the role exists")
    later = event(4, "CREATE_FAILED", "Table", "the table exists")
    stack = scripted_stack(
        DescribeStacks=[stack_answer("ROLLBACK_COMPLETE")],
        DescribeStackEvents=[events(), events(cancelled, failed, later)],
        ExecuteChangeSet=[{}],
    )
    with pytest.raises(Partial, match=r"ROLLBACK_COMPLETE: AgentRole \(AWS::DynamoDB::Table\): the role exists"):
        await stack.apply(lambda _: None)


async def test_change_set_without_changes_is_deleted() -> None:
    reason = "The submitted information didn't contain changes. Submit different information to create a change set."
    stack = scripted_stack(
        DeleteChangeSet=[{}],
        CreateChangeSet=[{"Id": CHANGE_SET_ARN}],
        DescribeStacks=[stack_answer("CREATE_COMPLETE")],
        DescribeChangeSet=[{"Status": "CREATE_PENDING"}, {"Status": "FAILED", "StatusReason": reason}],
    )
    assert await stack.plan(template_url=TEMPLATE_URL, parameters={}, kept=(), tags={}, is_new=False) == ()


async def test_change_set_has_the_changes_of_all_pages() -> None:
    def page(name: str, **more: str) -> dict[str, Any]:
        change = {"Action": "Modify", "LogicalResourceId": name, "ResourceType": "X", "Replacement": "True"}
        return {"Status": "CREATE_COMPLETE", "Changes": [{"ResourceChange": change}], **more}

    stack = scripted_stack(
        DeleteChangeSet=[{}],
        CreateChangeSet=[{"Id": CHANGE_SET_ARN}],
        DescribeStacks=[stack_answer("CREATE_COMPLETE")],
        DescribeChangeSet=[page("One", NextToken="2"), page("Two")],
    )
    changes = await stack.plan(template_url=TEMPLATE_URL, parameters={}, kept=(), tags={}, is_new=False)
    assert [(item.logical_id, item.is_replaced) for item in changes] == [("One", True), ("Two", True)]


async def test_only_the_planned_change_set_is_executed() -> None:
    """Another deployment at the same time may have replaced the one of the same name."""
    change = {"Action": "Modify", "LogicalResourceId": "One", "ResourceType": "X"}
    api: Any = ScriptedApi(
        DeleteChangeSet=[{}],
        CreateChangeSet=[{"Id": CHANGE_SET_ARN}],
        DescribeStacks=[stack_answer("CREATE_COMPLETE")],
        DescribeStackEvents=[events()],
        DescribeChangeSet=[{"Status": "CREATE_COMPLETE", "Changes": [{"ResourceChange": change}]}],
        # It does not exist any more.
        ExecuteChangeSet=[None],
    )
    stack = Stack(api, "remuda-ci", AdjustableClock(longest_sleep_s=10.0))
    await stack.plan(template_url=TEMPLATE_URL, parameters={}, kept=(), tags={}, is_new=False)
    with pytest.raises(UserError, match="another deployment has replaced it"):
        await stack.apply(lambda _: None)
    assert {
        name: given["ChangeSetName"] for name, given in api.calls if name in {"DescribeChangeSet", "ExecuteChangeSet"}
    } == {
        "DescribeChangeSet": CHANGE_SET_ARN,
        "ExecuteChangeSet": CHANGE_SET_ARN,
    }


@pytest.mark.parametrize("status", ["CREATE_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED"])
async def test_stack_of_something_else_is_a_problem(status: str) -> None:
    api: Any = ScriptedApi(DescribeStacks=[stack_answer(status)])
    preflight = Preflight(
        api=api,
        wanted=request().wanted,
        bundles=BundleSource("dist"),
        github=None,
        clock=AdjustableClock(longest_sleep_s=1.0),
    )
    (check,) = [check for check in preflight.checks() if check.name == "stack"]
    assert (await check.run()).message == "stack remuda-ci exists, but is not a stack of this pool"


def lambda_limit(total: int, free: int) -> dict[str, Any]:
    return {"AccountLimit": {"ConcurrentExecutions": total, "UnreservedConcurrentExecutions": free}}


@pytest.mark.parametrize(
    ("free", "given", "stored", "status", "reserves"),
    [
        (1_000, {}, {}, CheckStatus.OK, True),
        (102, {}, {}, CheckStatus.OK, True),
        (101, {}, {}, CheckStatus.OK, False),
        (10, {}, {}, CheckStatus.WARNING, False),
        # Lambda refuses what would leave fewer than 100, and the stack would be rolled back.
        (101, {"ReserveConcurrency": "true"}, {}, CheckStatus.PROBLEM, False),
        (120, {"BrokerConcurrency": "30"}, {}, CheckStatus.PROBLEM, True),
        (120, {"BrokerConcurrency": "30"}, {"BrokerConcurrency": "20"}, CheckStatus.OK, True),
        (100, {"ReserveConcurrency": "true"}, {"ReserveConcurrency": "true"}, CheckStatus.OK, False),
    ],
)
async def test_executions_are_reserved_only_where_lambda_permits_it(
    free: int, given: dict[str, str], stored: dict[str, str], status: CheckStatus, *, reserves: bool
) -> None:
    api: Any = ScriptedApi(GetAccountSettings=[lambda_limit(1_000, free)])
    wanted = request(given).wanted
    preflight = Preflight(
        api=api,
        wanted=replace(wanted, parameters=given),
        bundles=BundleSource("dist"),
        github=None,
        clock=AdjustableClock(longest_sleep_s=1.0),
    )
    preflight.facts = facts(stack=StackState(status="UPDATE_COMPLETE", parameters=stored)) if stored else facts()
    (check,) = [check for check in preflight.checks() if check.name == "concurrency"]
    result = await check.run()
    assert (result.status, preflight.facts.may_reserve) == (status, reserves), result
    if status is not CheckStatus.OK:
        assert "--service-code lambda --quota-code L-B99A9384" in result.fix
    plan = plan_stack(request(given), preflight.facts, secret=SECRET, groups="sg-1")
    if not given:
        assert plan.parameters.get("ReserveConcurrency", "false") == str(reserves).lower()


FUNCTION_NETWORK: dict[str, Any] = {
    "DescribeSubnets": [
        {
            "Subnets": [
                {"SubnetId": "subnet-1", "VpcId": "vpc-1", "MapPublicIpOnLaunch": True},
                {"SubnetId": "subnet-2", "VpcId": "vpc-1"},
                {"SubnetId": "subnet-3", "VpcId": "vpc-2"},
            ]
        }
    ],
    "DescribeRouteTables": [
        {
            "RouteTables": [
                {
                    "Associations": [{"SubnetId": "subnet-1"}],
                    "Routes": [{"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": "igw-1"}],
                },
                {
                    "Associations": [{"Main": True}],
                    "Routes": [{"DestinationCidrBlock": "0.0.0.0/0", "NatGatewayId": "nat-1"}],
                },
            ]
        }
    ],
}


class NetworkApi(ScriptedApi):
    """Returns only the subnets that a filter names."""

    async def call(self, service: str, operation: str, **parameters: Any) -> Any:
        answer = await super().call(service, operation, **parameters)
        if operation != "DescribeSubnets":
            return answer
        (names,) = (each["Values"] for each in parameters["Filters"])
        return {"Subnets": [each for each in answer["Subnets"] if each["SubnetId"] in names]}


@pytest.mark.parametrize(
    ("given", "stored", "status", "words"),
    [
        ("", "", CheckStatus.OK, "outside of any VPC"),
        ("subnet-2", "", CheckStatus.OK, "subnet-2"),
        ("subnet-1,subnet-2", "", CheckStatus.PROBLEM, "subnet-1: functions have no public addresses"),
        (None, "subnet-1", CheckStatus.PROBLEM, "subnet-1: functions have no public addresses"),
        ("subnet-3", "", CheckStatus.PROBLEM, "not all are in vpc-1"),
        ("subnet-4", "", CheckStatus.PROBLEM, "subnet-4 not found"),
        # Functions that leave their subnets.
        ("", "subnet-1", CheckStatus.OK, "outside of any VPC"),
    ],
)
async def test_subnets_of_functions_must_reach_github_without_public_addresses(
    given: str | None, stored: str, status: CheckStatus, words: str
) -> None:
    parameters = {} if given is None else {"FunctionSubnetIds": given}
    api: Any = NetworkApi(**FUNCTION_NETWORK)
    preflight = Preflight(
        api=api,
        wanted=replace(request().wanted, parameters=parameters),
        bundles=BundleSource("dist"),
        github=None,
        clock=AdjustableClock(longest_sleep_s=1.0),
    )
    state = StackState(status="UPDATE_COMPLETE", parameters={"FunctionSubnetIds": stored})
    preflight.facts = facts(stack=state, vpc="vpc-1")
    (check,) = [check for check in preflight.checks() if check.name == "function subnets"]
    result = await check.run()
    assert (result.status, words in result.message) == (status, True), result


def test_functions_in_subnets_have_the_security_groups_of_the_pool() -> None:
    made = template()["Resources"]["RefreshFunction"]["Properties"]["VpcConfig"]
    assert made["Fn::If"][0] == "HasFunctionNetwork"
    assert made["Fn::If"][1]["SecurityGroupIds"] == {"Fn::Split": [",", {"Ref": "SecurityGroupIds"}]}
    plan = plan_stack(request({"FunctionSubnetIds": "subnet-1, subnet-2"}), facts(), secret=SECRET, groups="sg-1")
    assert plan.parameters["FunctionSubnetIds"] == "subnet-1,subnet-2"


class Payload:
    def __init__(self, document: Any) -> None:
        self._content = json.dumps(document).encode()

    async def read(self) -> bytes:
        return self._content


class Steps:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, text: str) -> None:
        self.lines.append(text)

    detail = step


async def test_a_refresh_that_the_schedule_occupies_is_awaited() -> None:
    """With a reserved execution, Lambda refuses a second one until the first has ended."""
    busy = ClientError({"Error": {"Code": "TooManyRequestsException", "Message": "Rate Exceeded."}}, "Invoke")
    api: Any = ScriptedApi(Invoke=[busy, busy, {"Payload": Payload({"applied": []})}])
    clock, progress = AdjustableClock(longest_sleep_s=60.0), Steps()
    deployment = Deployment(
        api=api, request=request(), facts=facts(), clock=clock, progress=progress, result=DeployResult()
    )
    assert await deployment._refresh({"command": "refresh"}) == {"applied": []}
    assert [line for line in progress.lines if line.endswith("again in 20 s")] == progress.lines
    assert len(progress.lines) == 2


async def test_calls_name_the_owner_of_the_bucket() -> None:
    versions = {"Versions": [{"Key": "agent/x", "VersionId": "null"}]}
    api: Any = ScriptedApi(
        HeadBucket=[None, {}],
        GetBucketTagging=[None],
        ListObjectsV2=[{}],
        HeadObject=[None],
        ListObjectVersions=[versions],
        **{name: [{}] for name in ("CreateBucket", "PutPublicAccessBlock", "PutBucketEncryption", "PutBucketPolicy")},
        **{name: [{}] for name in ("PutBucketTagging", "PutObject", "DeleteObject", "DeleteObjects", "DeleteBucket")},
    )
    bucket = Bucket(api, "ci", ACCOUNT)
    await bucket.ensure({})
    await bucket.find()
    await bucket.upload("agent/x", b"content")
    await bucket.remove("agent/x")
    await bucket.delete()
    without = {name for name, given in api.calls if given.get("ExpectedBucketOwner") != ACCOUNT.account_id}
    # It has no such parameter, and fails if the name is taken.
    assert without == {"CreateBucket"}


async def test_bucket_of_another_account_is_a_problem() -> None:
    # HeadBucket has no body: its code is the status.
    denied = ClientError({"Error": {"Code": "403", "Message": "Forbidden"}}, "HeadBucket")
    api: Any = ScriptedApi(HeadBucket=[denied])
    found = await Bucket(api, "ci", ACCOUNT).find()
    assert found is not None
    assert "belongs to another account" in found.problem
