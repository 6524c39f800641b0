"""Upgrades between two versions of the stack, or of the Terraform module: what the change would replace or remove.

The baseline in tests/data/baseline is what the last release creates: its template, and of its module the attributes
that Terraform cannot change. Store that of this version after a release, or, with the reason in the commit, when pools
of the last release are to be deployed anew (docs/howto/upgrades.md):

    PYTHONPATH=.:deploy .venv/bin/python -m tests.support.upgrades
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import terraform_module
from remuda.deployment.stack import TABLE_TYPE
from remuda.deployment.template import NAMES, template
from tests.support.cloudformation import EvaluatedStack
from tests.support.terraform import TerraformModule, TerraformPlan
from tests.support.terraform_twins import ACCOUNT, EVERYTHING, REGION, attributes, computed, pseudo_of, variables_of

FOLDER = Path(__file__).parents[1] / "data" / "baseline"
TEMPLATE, MODULE = FOLDER / "cloudformation.json", FOLDER / "terraform.json"
DATA = {
    "aws_caller_identity.current": {"account_id": ACCOUNT},
    "aws_partition.current": {"partition": "aws"},
    "aws_region.current": {"region": REGION},
}
#: Properties that CloudFormation changes only by a replacement: `createOnlyProperties` of the schemas in its registry
#: (as in cfn-lint 1.58.0), and the key schema of tables, which is among the `conditionalCreateOnlyProperties`.
CREATE_ONLY = {
    "AWS::AutoScaling::AutoScalingGroup": ("AutoScalingGroupName", "InstanceId"),
    "AWS::AutoScaling::LifecycleHook": ("AutoScalingGroupName", "LifecycleHookName"),
    "AWS::CloudWatch::Alarm": ("AlarmName",),
    "AWS::DynamoDB::Table": ("ImportSourceSpecification", "KeySchema", "TableName"),
    "AWS::EC2::LaunchTemplate": ("LaunchTemplateName",),
    "AWS::Events::Rule": ("Name",),
    "AWS::IAM::InstanceProfile": ("InstanceProfileName", "Path"),
    "AWS::IAM::ManagedPolicy": ("Description", "ManagedPolicyName", "Path"),
    "AWS::IAM::Role": ("Path", "RoleName"),
    "AWS::Lambda::EventInvokeConfig": ("FunctionName", "Qualifier"),
    "AWS::Lambda::Function": ("FunctionName", "PackageType", "TenancyConfig"),
    "AWS::Lambda::Permission": (
        *("Action", "EventSourceToken", "FunctionName", "FunctionUrlAuthType", "InvokedViaFunctionUrl", "Principal"),
        *("PrincipalOrgID", "SourceAccount", "SourceArn"),
    ),
    "AWS::Lambda::Url": ("Qualifier", "TargetFunctionArn"),
    "AWS::Logs::LogGroup": ("LogGroupName",),
    "AWS::SQS::Queue": ("FifoQueue", "QueueName"),
    "AWS::SSM::Parameter": ("Name",),
}
#: The same in Terraform's provider for AWS: `ForceNew` in the schemas of internal/service.
FORCE_NEW = {
    "aws_autoscaling_group": ("name", "name_prefix"),
    "aws_autoscaling_lifecycle_hook": ("autoscaling_group_name", "name"),
    "aws_cloudwatch_event_rule": ("event_bus_name", "name", "name_prefix"),
    "aws_cloudwatch_log_group": ("log_group_class", "name", "name_prefix"),
    "aws_cloudwatch_metric_alarm": ("alarm_name",),
    "aws_dynamodb_table": ("hash_key", "local_secondary_index", "name", "range_key"),
    "aws_iam_instance_profile": ("name", "name_prefix", "path"),
    "aws_iam_policy": ("description", "name", "name_prefix", "path"),
    "aws_iam_role": ("name", "name_prefix", "path"),
    "aws_lambda_function": ("function_name", "package_type"),
    "aws_launch_template": ("name", "name_prefix"),
    "aws_sqs_queue": ("fifo_queue", "name", "name_prefix"),
    "aws_ssm_parameter": ("name",),
}
#: Values of the provider for attributes that are not set.
DEFAULTS = {"path": "/"}
Resources = Mapping[str, tuple[str, Mapping[str, Any]]]


def baseline_template() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(TEMPLATE.read_text("utf-8"))
    return made


def upgrade(before: Mapping[str, Any], after: Mapping[str, Any], parameters: Mapping[str, str]) -> list[str]:
    """What an update of a stack from one template to another would replace or remove.

    As `remuda deploy` does it: the stack keeps its parameters, and new ones have their defaults.
    """
    known = before["Parameters"].keys() & after["Parameters"].keys()
    shared = {key: value for key, value in parameters.items() if key in known}
    old, new = (
        EvaluatedStack(template=each, parameters=shared, pseudo=pseudo_of(shared), attributes=attributes).resources
        for each in (before, after)
    )
    fixed = {kind: CREATE_ONLY[kind] for kind in NAMES}
    return [*_losses(old, new, fixed), *_table_changes(old, new)]


def module_upgrade(before: Resources, after: Resources, moved: Mapping[str, str]) -> list[str]:
    """The same for the resources of the module by address. `moved` are old addresses to new ones."""
    renamed = {_moved(address, moved): each for address, each in before.items()}
    return list(_losses(renamed, after, FORCE_NEW))


def _moved(address: str, moved: Mapping[str, str]) -> str:
    """The address after the `moved` blocks: of one instance, or of all instances of a resource."""
    if address in moved:
        return moved[address]
    resource, bracket, key = address.partition("[")
    return moved.get(resource, resource) + bracket + key


def _losses(before: Resources, after: Resources, fixed: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for name, (kind, old) in before.items():
        if kind not in fixed:
            continue
        new_kind, new = after.get(name, ("", {}))
        if new_kind != kind:
            yield f"{name} ({kind}) would be removed"
            continue
        for key in fixed[kind]:
            if old.get(key) != new.get(key):
                yield f"{name} would be replaced: {key} changes from {old.get(key)!r} to {new.get(key)!r}"


def _table_changes(before: Resources, after: Resources) -> Iterator[str]:
    """DynamoDB creates or deletes one index per update (UpdateTable in its API reference), CloudFormation as well."""
    for name, (kind, old) in before.items():
        if kind != TABLE_TYPE or name not in after:
            continue
        new = after[name][1]
        # A changed index is deleted and created again.
        changed = sorted(index for index, _ in _indexes(old) ^ _indexes(new))
        if len(changed) > 1:
            yield f"{name} would change more than one index: {', '.join(changed)}"
        # "Replacement if you edit an existing AttributeDefinition" (template reference).
        types, new_types = _types(old), _types(new)
        for key in sorted(types.keys() & new_types.keys()):
            if types[key] != new_types[key]:
                yield f"{name} would be replaced: the type of {key} changes"


def _indexes(table: Mapping[str, Any]) -> set[tuple[str, str]]:
    found = table["GlobalSecondaryIndexes"]
    return {(each["IndexName"], json.dumps([each["KeySchema"], each["Projection"]])) for each in found}


def _types(table: Mapping[str, Any]) -> dict[str, str]:
    return {each["AttributeName"]: each["AttributeType"] for each in table["AttributeDefinitions"]}


def module_resources(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """The resources of the module with every option of the baseline, by address, with the attributes that are fixed."""
    module = TerraformModule.load(folder)
    known = baseline_template()["Parameters"]
    given = variables_of(module, {name: value for name, value in EVERYTHING.items() if name in known})
    plan = TerraformPlan(module=module, given=given, data=DATA, computed=computed)
    return {
        address: (kind, {key: made[key] for key in FORCE_NEW[kind] if made.get(key) not in {None, DEFAULTS.get(key)}})
        for address, kind, made in plan.addresses()
        if kind in FORCE_NEW
    }


def stored_module() -> Resources:
    return {address: (kind, made) for address, (kind, made) in json.loads(MODULE.read_text("utf-8")).items()}


def main() -> None:
    # The parameters of the template decide which resources of the module are stored.
    TEMPLATE.write_text(json.dumps(template(), indent=1) + "\n", "utf-8")
    MODULE.write_text(json.dumps(module_resources(terraform_module.MODULE), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
