"""The Terraform module against the CloudFormation template: same resources, conditions, refusals and outputs.

Both are evaluated for the same parameters. Every property of every resource is compared, so that a change of one
without the other fails.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import build
import terraform_module
from remuda.deployment.policies import policies
from remuda.deployment.template import STACK_SETTINGS, template
from remuda.domain.resources import parse_classes
from tests.support.iam import IamRequest, allows
from tests.support.terraform import HclError, TerraformModule, TerraformPlan, parse
from tests.support.terraform_twins import (
    ACCOUNT,
    CASES,
    CODE,
    FUNCTIONS,
    LISTENER,
    OBJECTS,
    REGION,
    SECRET,
    Resources,
    computed,
    stack_of,
    stacked,
    twins,
    variable_name,
    variables_of,
)

FOLDER = Path(terraform_module.MODULE)
MODULE = TerraformModule.load(FOLDER)
EXAMPLE = TerraformModule.load(FOLDER / "examples" / "complete")
DATA = {
    "aws_caller_identity.current": {"account_id": ACCOUNT},
    "aws_partition.current": {"partition": "aws"},
    "aws_region.current": {"region": REGION},
}


def plan_of(parameters: Mapping[str, str]) -> TerraformPlan:
    return TerraformPlan(module=MODULE, given=variables_of(MODULE, parameters), data=DATA, computed=computed)


def planned(parameters: Mapping[str, str]) -> Resources:
    return twins(plan_of(parameters).instances())


@pytest.mark.parametrize("case", CASES)
def test_the_module_creates_the_resources_of_the_template(case):
    stack, plan = stack_of(CASES[case]), plan_of(CASES[case])
    assert not stack.is_refused()
    assert plan.refusals == []
    expected, found = stacked(stack), twins(plan.instances())
    assert sorted(found) == sorted(expected)
    for key, properties in expected.items():
        assert found[key] == properties, key


@pytest.mark.parametrize("case", ["functions", "refresh role", "workflow role with a key", "everything"])
def test_the_module_for_many_classes_creates_the_resources_of_their_template(case, tmp_path):
    """As `build.py --classes` makes it: the queues of further classes have policies of their own."""
    classes = parse_classes({f"class-{number}": {"cpu": 2, "mmem": 4096} for number in range(30)})
    folder = tmp_path / "module"
    shutil.copytree(FOLDER, folder)
    for file, text in terraform_module.files(policies(classes), classes).items():
        (folder / file.relative_to(FOLDER)).write_text(text, encoding="utf-8")
    module = TerraformModule.load(folder)
    given = variables_of(module, CASES[case])
    found = twins(TerraformPlan(module=module, given=given, data=DATA, computed=computed).instances())
    assert found == stacked(stack_of(CASES[case], classes))
    assert ("AWS::IAM::ManagedPolicy", f"remuda-{given.get('pool', 'default')}-refresh-queues") in found


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_the_template(case):
    stack, plan = stack_of(CASES[case]), plan_of(CASES[case])
    names = {variable_name(each): each for each in stack.template["Outputs"]}
    assert plan.outputs == {name: stack.outputs.get(output) for name, output in names.items()}


def test_the_cases_have_every_resource_of_the_template():
    made = {name for parameters in CASES.values() for name in stack_of(parameters).resources}
    assert made == set(template()["Resources"])


def test_every_parameter_of_the_template_has_a_variable():
    assert {variable_name(each) for each in template()["Parameters"]} == set(MODULE.variables)


def test_variables_have_the_defaults_of_the_parameters():
    given = {"CodeBucket": "b", **{name: each["Default"] for name, each in template()["Parameters"].items()}}
    shown = {name: value for name, value in given.items() if value != "" and name not in CODE}
    assert planned(shown) == planned({})


def test_every_setting_of_the_stack_reaches_the_functions():
    for declared in STACK_SETTINGS:
        if declared.parameter in {*OBJECTS, "GithubScope"}:
            continue
        value = "team=ci" if declared.name == "tags" else (declared.kind.choices or ("7",))[0]
        parameters = {**FUNCTIONS, declared.parameter: value}
        (parameter,) = plan_of(parameters)._resource("aws_ssm_parameter", "settings")
        assert f"REMUDA_{declared.name.upper()}={value}" in parameter["value"].splitlines()


def test_own_tags_are_those_of_every_resource_that_has_tags():
    # In the template they are tags of the stack, which CloudFormation gives to its resources.
    plan = plan_of({**CASES["everything"], "Tags": "team=ci,cost-center=42"})
    tagged = [found["tags"] for _, found in plan.instances() if "tags" in found]
    assert len(tagged) > 10
    own = {"team": "ci", "cost-center": "42"}
    assert all(tags == {**own, "remuda:pool": "ci"} for tags in tagged)


@pytest.mark.parametrize(
    "bad",
    [
        {"Pool": "CI"},
        {"RolePath": "ci/"},
        {"RolePath": "/c i/"},
        {"PermissionsBoundary": "boundary"},
        {"Pool": ""},
        {"Pool": "a" * 21},
        {"Repositories": "acme"},
        {"Repositories": "acme/app,*/*"},
        {"Repositories": "acme/a*"},
        {"Environments": "ci,pro*"},
        {"RefreshRepository": "acme/*"},
        {"Branch": "*"},
        {"Branch": ""},
        {"Architecture": "arm"},
        {"Runtime": "python3.10"},
        {"GithubSecretArn": "token"},
        {"Reuse": "sometimes"},
        {"BrokerConcurrency": "0"},
        {"BrokerConcurrency": "1.5"},
        {"LogFormat": "xml"},
        {"CodeBucket": "acme", "CodeKey": "k"},
        {"CodeBucket": "acme", "CodeKey": "k", "GithubScope": "acme"},
        {"CodeBucket": "acme", "CodeKey": "k", "GithubSecretArn": SECRET},
        {"Ami": "ami-1"},
        {"Listener": "container"},
        {"ListenerInstanceType": "large"},
        {"ListenerAmi": "ubuntu"},
        *(
            {key: value for key, value in LISTENER.items() if key != name}
            for name in ("AgentUrl", "AgentSha256", "SubnetIds", "SecurityGroupIds")
        ),
    ],
    ids=str,
)
def test_both_refuse_the_same_values(bad):
    assert stack_of(bad).is_refused()
    assert len(plan_of(bad).refusals) == 1


def test_code_is_a_file_or_an_object_in_s3():
    rest = {"github_secret_arn": SECRET, "github_scope": "acme/app"}

    def plan(**code: str) -> TerraformPlan:
        return TerraformPlan(module=MODULE, given={**rest, "code": code}, data=DATA, computed=computed)

    made = plan(filename="remuda-lambda.zip")
    assert made.refusals == []
    functions = [found for kind, found in made.instances() if kind == "aws_lambda_function"]
    assert {each["source_code_hash"] for each in functions} == {"digest of remuda-lambda.zip"}
    for bad in ({"filename": "a.zip", "s3_bucket": "b", "s3_key": "k"}, {"s3_bucket": "b"}, {"s3_key": "k"}, {}):
        assert len(plan(**bad).refusals) == 1, bad


@pytest.mark.parametrize("module", [MODULE, EXAMPLE], ids=["module", "example"])
def test_every_name_is_declared_and_used(module):
    used = module.references()
    declared = {
        *(f"var.{each}" for each in module.variables),
        *(f"local.{each}" for each in module.local_values),
        *(f"{'.'.join(each)}" for each in module.resources),
        *(f"data.{'.'.join(each.labels)}" for each in module.of("data")),
        *(f"module.{each.labels[0]}" for each in module.of("module")),
    }
    roots = {each.split(".")[0] for each in declared} | {"data", "var", "local"}
    for name in used:
        parts = name.split(".")
        if parts[0] in roots:
            assert ".".join(parts[: 3 if parts[0] == "data" else 2]) in declared, name
    for name in declared:
        if name.split(".")[0] in {"var", "local", "data"}:
            assert any(each == name or each.startswith(f"{name}.") for each in used), f"{name} is not used"


def test_the_example_gives_only_variables_of_the_module():
    (call,) = EXAMPLE.of("module")
    assert call.attributes.keys() - {"source"} <= MODULE.variables.keys()


def test_machines_may_read_the_agent_of_the_example():
    def bucket(kind: str, found: Mapping[str, Any]) -> dict[str, str]:
        return {"id": found["bucket"]} if kind == "aws_s3_bucket" else {}

    given = {"dist": "dist", "release": "1.0.0"}
    agent = TerraformPlan(module=EXAMPLE, given=given, data=DATA, computed=bucket)._resource("aws_s3_object", "agent")
    policy = planned({"Pool": "ci"})["AWS::IAM::ManagedPolicy", "remuda-ci-agent"]["PolicyDocument"]
    request = IamRequest(action="s3:GetObject", resource=f"arn:aws:s3:::{agent['bucket']}/{agent['key']}")
    assert allows(policy, request)


def test_alarms_reach_the_topic_of_the_example() -> None:
    """The policy of the key `alias/aws/sns` does not permit CloudWatch its use, and nobody can change the policy.

    SNS Developer Guide, "Enable compatibility between event sources from AWS services and encrypted topics".
    """
    given = {"dist": "dist", "release": "1.0.0"}
    plan = TerraformPlan(module=EXAMPLE, given=given, data=DATA, computed=lambda *_: {})
    assert "kms_master_key_id" not in plan._resource("aws_sns_topic", "alarms")


def test_the_guide_names_only_variables_and_settings_that_exist():
    page = (build.PAGE.parent.parent / "howto" / "from-terraform-aws-github-runner.md").read_text("utf-8")
    table = page.partition("### With a counterpart")[2].partition("### ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)\b[^`]*`", row[2]) if "_" in name}
    terraform_names = {"aws_ami", "aws_iam_service_linked_role", "default_tags"}
    assert named - terraform_names <= MODULE.variables.keys()
    assert len(named) > 20


def test_policies_of_the_module_have_no_open_placeholders():
    for file in (FOLDER / "policies").iterdir():
        assert not re.search(r"<[a-z-]+>", file.read_text("utf-8")), file.name


def test_generated_files_are_the_only_ones_in_their_folder():
    written = {path for path in build.files() if path.is_relative_to(FOLDER)}
    assert {FOLDER / "policies" / each.name for each in (FOLDER / "policies").iterdir()} <= written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("locals {\n  x = var.y\n}\n", "var.y is not declared"),
        ("locals {\n  x = local.y\n}\n", "local.y is not declared"),
        ("locals {\n  x = aws_sqs_queue.y.arn\n}\n", "aws_sqs_queue.y is not declared"),
        ("locals {\n  x = each.key\n}\n", "each.key is not declared"),
        ("locals {\n  x = base64gzip(1)\n}\n", "unknown function base64gzip"),
    ],
)
def test_the_evaluator_refuses_unknown_names(text, message):
    module = TerraformModule(folder=FOLDER, blocks=parse(text).blocks)
    with pytest.raises(HclError, match=re.escape(message)):
        TerraformPlan(module=module, given={}, data=DATA, computed=computed)._local("x")
