"""The evaluator itself: a lenient one would prove nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.iam import IamRequest, Value, allows

TABLE = "arn:aws:dynamodb:eu-central-1:123456789012:table/t"


def policy(*statements: dict[str, Any]) -> dict[str, Any]:
    filled = [{"Effect": "Allow", "Action": "dynamodb:GetItem", "Resource": TABLE, **each} for each in statements]
    return {"Version": "2012-10-17", "Statement": filled}


def asked(resource: str = TABLE, action: str = "dynamodb:GetItem", **context: Value) -> IamRequest:
    return IamRequest(
        action=action, resource=resource, context={key.replace("_", ":"): v for key, v in context.items()}
    )


def test_what_no_statement_allows_is_denied():
    assert allows(policy({}), asked())
    assert not allows(policy(), asked())
    assert not allows(policy({}), asked(action="dynamodb:PutItem"))
    assert not allows(policy({}), asked(TABLE + "/index/live"))


def test_a_deny_wins():
    assert not allows(policy({}, {"Effect": "Deny", "Action": "dynamodb:*"}), asked())


def test_of_several_policies_one_allows_and_one_denies_for_all():
    other, deny = policy({"Action": "sqs:SendMessage"}), policy({"Effect": "Deny"})
    assert allows([other, policy({})], asked())
    assert not allows([policy({}), deny], asked())


def test_not_action_and_not_resource_are_all_the_others():
    others = {"Effect": "Allow", "NotAction": ["dynamodb:Get*", "dynamodb:Scan"], "NotResource": f"{TABLE}/*"}
    document = {"Version": "2012-10-17", "Statement": others}
    assert allows(document, asked(action="dynamodb:Query"))
    assert not allows(document, asked(action="dynamodb:GetItem"))
    assert not allows(document, asked(f"{TABLE}/index/live", "dynamodb:Query"))


def test_a_wildcard_of_a_resource_stays_within_its_part_but_the_last():
    assert allows(policy({"Resource": "arn:aws:logs:*:*:log-group:/a:*"}), asked("arn:aws:logs:r:1:log-group:/a:s:1"))
    assert not allows(policy({"Resource": "arn:aws:dynamodb:*:table/t"}), asked())
    assert allows(policy({"Resource": "*"}), asked())


def test_actions_are_compared_without_case():
    assert allows(policy({"Action": "DynamoDB:get*"}), asked())


@pytest.mark.parametrize(
    ("operator", "wanted", "value", "holds"),
    [
        ("StringEquals", "a*", "ab", False),
        ("StringEquals", ["x", "ab"], "ab", True),
        ("StringLike", "a*", "ab", True),
        ("StringLike", "a?", "abc", False),
        ("Bool", "true", "true", True),
        ("Bool", "true", "false", False),
        ("StringNotEquals", ["x", "ab"], "ab", False),
        ("StringNotEquals", ["x", "y"], "ab", True),
        ("StringNotLike", "a*", "ab", False),
        ("StringEqualsIgnoreCase", "AB", "ab", True),
        ("StringEquals", "AB", "ab", False),
        ("ArnEquals", "arn:aws:ec2:*:*:instance/*", "arn:aws:ec2:r:1:instance/i-1", True),
        ("ArnNotLike", "arn:aws:ec2:*:*:instance/*", "arn:aws:ec2:r:1:instance/i-1", False),
        ("ArnLike", "arn:aws:ec2:*:*:instance/*", "arn:aws:ec2:r:1:instance/i-1", True),
        ("ArnLike", "arn:aws:ec2:*:instance/*", "arn:aws:ec2:r:1:instance/i-1", False),
    ],
)
def test_operators(operator, wanted, value, holds):
    assert allows(policy({"Condition": {operator: {"k": wanted}}}), asked(k=value)) is holds


@pytest.mark.parametrize(
    ("operator", "holds"),
    [
        ("StringEquals", False),
        ("StringLike", False),
        ("ArnLike", False),
        ("Bool", False),
        # What is not there does not equal anything: a Deny by these strikes whoever leaves the key out.
        ("StringNotEquals", True),
        ("ArnNotLike", True),
        ("StringEqualsIfExists", True),
        ("ArnLikeIfExists", True),
        ("BoolIfExists", True),
        ("ForAllValues:StringEquals", True),
        ("ForAnyValue:StringEquals", False),
        ("ForAnyValue:StringNotEquals", False),
        ("ForAnyValue:StringEqualsIfExists", True),
    ],
)
def test_a_key_that_is_missing(operator, holds):
    assert allows(policy({"Condition": {operator: {"k": "true"}}}), asked()) is holds


@pytest.mark.parametrize("operator", ["StringEqualsIfExists", "BoolIfExists"])
def test_if_exists_asks_of_a_key_that_is_there(operator):
    condition = {operator: {"k": "true"}}
    assert allows(policy({"Condition": condition}), asked(k="true"))
    assert not allows(policy({"Condition": condition}), asked(k="false"))


@pytest.mark.parametrize(
    ("operator", "values", "holds"),
    [
        ("ForAnyValue:StringEquals", ["a", "x"], True),
        ("ForAnyValue:StringEquals", ["x", "y"], False),
        ("ForAllValues:StringLike", ["a", "ab"], False),
        ("ForAllValues:StringNotEquals", ["x", "y"], True),
        ("ForAllValues:StringNotEquals", ["x", "a"], False),
        ("ForAnyValue:StringNotEquals", ["x", "a"], True),
        ("ForAnyValue:StringNotEquals", ["a"], False),
    ],
)
def test_keys_with_several_values(operator, values, holds):
    assert allows(policy({"Condition": {operator: {"k": ["a", "b"]}}}), asked(k=values)) is holds


def test_several_conditions_must_all_hold_and_several_values_need_not():
    both = policy({"Condition": {"StringEquals": {"k": ["a", "b"], "l": "c"}, "Bool": {"m": "true"}}})
    assert allows(both, asked(k="b", l="c", m="true"))
    for context in ({"k": "b", "l": "x", "m": "true"}, {"k": "b", "l": "c", "m": "false"}, {"k": "b", "l": "c"}):
        assert not allows(both, asked(**context))


def test_keys_are_compared_without_case_and_values_with():
    condition = policy({"Condition": {"StringEquals": {"AWS:RequestTag/Pool": "ci"}}})
    assert allows(
        condition, IamRequest(action="dynamodb:GetItem", resource=TABLE, context={"aws:requesttag/pool": "ci"})
    )
    assert not allows(
        condition, IamRequest(action="dynamodb:GetItem", resource=TABLE, context={"aws:RequestTag/Pool": "CI"})
    )


def test_for_all_values_holds_for_none_and_null_closes_that():
    condition = {"ForAllValues:StringEquals": {"k": ["a", "b"]}}
    both = {**condition, "Null": {"k": "false"}}
    for values, open_to, closed_to in (([], True, False), (["a"], True, True), (["a", "c"], False, False)):
        assert allows(policy({"Condition": condition}), asked(k=values)) is open_to
        assert allows(policy({"Condition": both}), asked(k=values)) is closed_to


def test_variables_are_filled_in_and_bring_no_wildcards():
    mine = policy({"Condition": {"StringLike": {"k": "x#${aws:userid}"}}})
    assert allows(mine, asked(k="x#me", aws_userid="me"))
    assert not allows(mine, asked(k="x#me", aws_userid="*"))
    assert not allows(mine, asked(k="x#me"))


def test_a_variable_in_a_resource_and_in_an_arn():
    own = policy({"Resource": "arn:aws:ec2:r:1:instance/${ec2:InstanceID}"})
    assert allows(own, asked("arn:aws:ec2:r:1:instance/i-1", ec2_InstanceID="i-1"))
    assert not allows(own, asked("arn:aws:ec2:r:1:instance/i-2", ec2_InstanceID="i-1"))
    itself = policy({"Condition": {"ArnLike": {"k": "arn:aws:ec2:r:1:instance/${ec2:InstanceID}"}}})
    assert allows(itself, asked(k="arn:aws:ec2:r:1:instance/i-1", ec2_InstanceID="i-1"))
    assert not allows(itself, asked(k="arn:aws:ec2:r:1:instance/i-1", ec2_InstanceID="*"))


def test_a_star_in_braces_is_a_star():
    star = policy({"Condition": {"StringLike": {"k": "a${*}"}}})
    assert allows(star, asked(k="a*"))
    assert not allows(star, asked(k="ab"))


@pytest.mark.parametrize(
    "statement",
    [
        {"NotAction": "a:b"},
        {"Principal": "*"},
        {"Effect": "allow"},
        {"Condition": {"NumericEquals": {"k": "1"}}},
        {"Condition": {"ForSomeValues:StringEquals": {"k": "1"}}},
        {"Condition": {"NullIfExists": {"k": "true"}}},
        {"Condition": {"StringEquals": {"k": "${aws:userid, 'nobody'}"}}},
    ],
)
def test_what_it_does_not_know_is_an_error(statement):
    with pytest.raises(NotImplementedError):
        allows(policy(statement), asked(k="1"))


def test_also_where_it_would_not_decide():
    with pytest.raises(NotImplementedError):
        allows(policy({}, {"Action": "sqs:SendMessage", "Condition": {"DateLessThan": {"k": "1"}}}), asked())


def test_one_value_is_compared_with_one():
    """IAM's answer hangs on how the key is defined: a policy that asks so is wrong."""
    with pytest.raises(NotImplementedError):
        allows(policy({"Condition": {"StringEquals": {"k": "a"}}}), asked(k=["a", "b"]))


def test_an_older_version_knows_no_variables():
    with pytest.raises(NotImplementedError):
        allows({"Version": "2008-10-17", "Statement": []}, asked())
