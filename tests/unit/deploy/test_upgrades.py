"""Upgrades of pools that the last release has deployed: nothing with a name or with records is replaced or removed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import terraform_module
from remuda.deployment.deploy import check_replacements
from remuda.deployment.policies import DESCRIPTIONS, policies
from remuda.deployment.stack import StackChange
from remuda.deployment.template import NAMES, _managed, template
from remuda.domain.errors import UserError
from tests.support.terraform import TerraformModule, parse
from tests.support.terraform_twins import CASES, EVERYTHING, TWINS
from tests.support.upgrades import (
    CREATE_ONLY,
    FORCE_NEW,
    baseline_template,
    module_resources,
    module_upgrade,
    stored_module,
    upgrade,
)

MOVED = TerraformModule.load(terraform_module.MODULE).moved


# From the last release ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_stack_of_the_last_release_can_be_updated(case: str) -> None:
    assert upgrade(baseline_template(), template(), CASES[case]) == []


@pytest.mark.parametrize("case", CASES)
def test_a_rollback_replaces_nothing_that_the_last_release_has(case: str) -> None:
    before, after = template(), baseline_template()
    before["Resources"] = {name: each for name, each in before["Resources"].items() if name in after["Resources"]}
    before["Outputs"] = {}
    assert upgrade(before, after, CASES[case]) == []


def test_the_module_of_the_last_release_can_be_applied_again() -> None:
    assert module_upgrade(stored_module(), module_resources(terraform_module.MODULE), MOVED) == []


# Texts ----------------------------------------------------------------------------------------------------------------


def test_documentation_of_a_policy_is_not_in_the_stack() -> None:
    for policy in policies():
        assert _managed(replace(policy, holder="somebody else")) == _managed(policy)
        changed = terraform_module.module_text([replace(policy, holder="somebody else")], ())
        assert changed == terraform_module.module_text([policy], ())


def test_a_new_policy_has_no_description() -> None:
    new = replace(policies()[0], name="new")
    assert "Description" not in _managed(new)["Properties"]
    assert '"new" = null' in terraform_module.module_text([new], ())


def test_the_only_text_that_cannot_change_is_the_description_of_a_policy() -> None:
    """Every other property that the template cannot change is a name, a path, a reference or a choice."""
    fixed = {
        (each["Type"], name)
        for each in template()["Resources"].values()
        for name in each["Properties"]
        if name in CREATE_ONLY[each["Type"]] and name != NAMES.get(each["Type"])
    }
    described = ("AWS::IAM::ManagedPolicy", "Description")
    assert fixed == {
        described,
        ("AWS::AutoScaling::LifecycleHook", "AutoScalingGroupName"),
        ("AWS::DynamoDB::Table", "KeySchema"),
        ("AWS::IAM::Role", "Path"),
        *(("AWS::Lambda::EventInvokeConfig", name) for name in ("FunctionName", "Qualifier")),
        *(("AWS::Lambda::Permission", name) for name in ("Action", "FunctionName", "FunctionUrlAuthType", "Principal")),
        *(("AWS::Lambda::Permission", name) for name in ("InvokedViaFunctionUrl", "SourceArn")),
        ("AWS::Lambda::Url", "TargetFunctionArn"),
    }
    assert set(DESCRIPTIONS) <= {policy.name for policy in policies()}


def test_every_type_is_known() -> None:
    types = {each["Type"] for each in template()["Resources"].values()}
    assert types == set(CREATE_ONLY)
    assert set(NAMES) == {kind for kind, names in CREATE_ONLY.items() if kind in NAMES and NAMES[kind] in names}
    assert {TWINS[kind][0] for kind in FORCE_NEW} == set(NAMES)


# What is found --------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


def _rename(resources: dict[str, Any], old: str, new: str) -> None:
    resources[new] = resources.pop(old)


def _add_index(resources: dict[str, Any], *names: str) -> None:
    table = resources["Table"]["Properties"]
    first = table["GlobalSecondaryIndexes"][0]
    table["GlobalSecondaryIndexes"] += [{**first, "IndexName": name} for name in names]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda each: each["AgentPolicy"]["Properties"].update(Description="Better."),
            "AgentPolicy would be replaced: D",
        ),
        (
            lambda each: each["AgentPolicy"]["Properties"].pop("Description"),
            "AgentPolicy would be replaced: Description",
        ),
        (lambda each: each["AgentRole"]["Properties"].update(Path="/ci/"), "AgentRole would be replaced: Path"),
        (
            lambda each: each["QueueLarge"]["Properties"].update(QueueName="q"),
            "QueueLarge would be replaced: QueueName",
        ),
        (lambda each: _rename(each, "QueueLarge", "LargeQueue"), "QueueLarge (AWS::SQS::Queue) would be removed"),
        (lambda each: each.pop("RefreshAlarm"), "RefreshAlarm (AWS::CloudWatch::Alarm) would be removed"),
        (lambda each: each["Table"]["Properties"]["KeySchema"].pop(), "Table would be replaced: KeySchema"),
        (
            lambda each: each["Table"]["Properties"]["AttributeDefinitions"][0].update(AttributeType="N"),
            "Table would be replaced: the type of pk",
        ),
        (lambda each: _add_index(each, "one", "two"), "Table would change more than one index: one, two"),
        (
            lambda each: each["Table"]["Properties"]["GlobalSecondaryIndexes"][0].update(Projection={}),
            "Table would change more than one index: live, live",
        ),
    ],
)
def test_a_change_that_replaces_or_removes_is_found(change: Change, message: str) -> None:
    made = copy.deepcopy(template())
    made["Outputs"] = {}
    change(made["Resources"])
    (found,) = upgrade(template(), made, EVERYTHING)
    assert found.startswith(message)


def test_one_new_index_is_accepted() -> None:
    made = copy.deepcopy(template())
    _add_index(made["Resources"], "new")
    assert upgrade(template(), made, EVERYTHING) == []


def test_changes_of_the_module_that_replace_or_remove_are_found() -> None:
    before = dict(stored_module())
    policy, queue = 'aws_iam_policy.this["agent"]', 'aws_sqs_queue.class["large"]'
    described = {**before, policy: (before[policy][0], {**before[policy][1], "description": "Better."})}
    (found,) = module_upgrade(before, described, {})
    assert found.startswith(f"{policy} would be replaced: description")
    renamed = {address.replace("aws_sqs_queue.class", "aws_sqs_queue.pool"): each for address, each in before.items()}
    assert f"{queue} (aws_sqs_queue) would be removed" in module_upgrade(before, renamed, {})
    text = "moved {\n  from = aws_sqs_queue.class\n  to   = aws_sqs_queue.pool\n}\n"
    moved = TerraformModule(folder=terraform_module.MODULE, blocks=parse(text).blocks).moved
    assert module_upgrade(before, renamed, moved) == []


# Refusal --------------------------------------------------------------------------------------------------------------


def change(logical_id: str, kind: str, replacement: str = "", action: str = "Modify") -> StackChange:
    return StackChange(action=action, logical_id=logical_id, resource_type=kind, replacement=replacement)


@pytest.mark.parametrize(
    ("refused", "message", "fix"),
    [
        (
            change("AgentPolicy", "AWS::IAM::ManagedPolicy", "True"),
            "the change would replace AgentPolicy, and CloudFormation replaces nothing that keeps its name",
            (
                "deploy the pool anew: remuda destroy --pool ci --keep-data, then remuda deploy with all its settings "
                "(docs/howto/upgrades.md)"
            ),
        ),
        (
            change("Table", "AWS::DynamoDB::Table", "Conditional"),
            "the change would replace or remove the table (Table), with the records of all instances",
            (
                "deploy the pool anew: remuda destroy --pool ci, then remuda deploy with all its settings "
                "(docs/howto/upgrades.md)"
            ),
        ),
    ],
)
def test_changes_that_fail_or_lose_records_are_refused(refused: StackChange, message: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        check_replacements("ci", [change("Settings", "AWS::SSM::Parameter", "False"), refused])
    assert (caught.value.message, caught.value.fix, caught.value.field) == (message, fix, "--allow-replacement")


@pytest.mark.parametrize(
    "accepted",
    [
        change("AgentPolicy", "AWS::IAM::ManagedPolicy", "False"),
        # A function without a fixed name, and a class or an alarm that is no longer wanted.
        change("RefreshPermission", "AWS::Lambda::Permission", "True"),
        change("QueueLarge", "AWS::SQS::Queue", action="Remove"),
        # Of every new launch template.
        change("ListenerGroup", "AWS::AutoScaling::AutoScalingGroup", "Conditional"),
    ],
)
def test_other_changes_are_accepted(accepted: StackChange) -> None:
    check_replacements("ci", [accepted])
