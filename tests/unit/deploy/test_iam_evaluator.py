"""The IAM policy evaluator of the tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.iam import IamRequest, Value, allows

TABLE = "arn:aws:dynamodb:eu-central-1:123456789012:table/t"


def policy(*statements: dict[str, Any]) -> dict[str, Any]:
    complete = [{"Effect": "Allow", "Action": "dynamodb:GetItem", "Resource": TABLE, **each} for each in statements]
    return {"Version": "2012-10-17", "Statement": complete}


def request(resource: str = TABLE, action: str = "dynamodb:GetItem", **context: Value) -> IamRequest:
    return IamRequest(
        action=action, resource=resource, context={key.replace("_", ":"): v for key, v in context.items()}
    )


def test_requests_are_denied_by_default():
    assert allows(policy({}), request())
    assert not allows(policy(), request())
    assert not allows(policy({}), request(action="dynamodb:PutItem"))
    assert not allows(policy({}), request(TABLE + "/index/live"))


def test_deny_overrides_allow():
    assert not allows(policy({}, {"Effect": "Deny", "Action": "dynamodb:*"}), request())


def test_several_policies_are_combined():
    other, deny = policy({"Action": "sqs:SendMessage"}), policy({"Effect": "Deny"})
    assert allows([other, policy({})], request())
    assert not allows([policy({}), deny], request())


def test_not_action_and_not_resource_match_everything_else():
    others = {"Effect": "Allow", "NotAction": ["dynamodb:Get*", "dynamodb:Scan"], "NotResource": f"{TABLE}/*"}
    document = {"Version": "2012-10-17", "Statement": others}
    assert allows(document, request(action="dynamodb:Query"))
    assert not allows(document, request(action="dynamodb:GetItem"))
    assert not allows(document, request(f"{TABLE}/index/live", "dynamodb:Query"))


def test_a_wildcard_matches_within_one_part_of_an_arn():
    assert allows(policy({"Resource": "arn:aws:logs:*:*:log-group:/a:*"}), request("arn:aws:logs:r:1:log-group:/a:s:1"))
    assert not allows(policy({"Resource": "arn:aws:dynamodb:*:table/t"}), request())
    assert allows(policy({"Resource": "*"}), request())


def test_actions_are_compared_without_case():
    assert allows(policy({"Action": "DynamoDB:get*"}), request())


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
    assert allows(policy({"Condition": {operator: {"k": wanted}}}), request(k=value)) is holds


@pytest.mark.parametrize(
    ("operator", "holds"),
    [
        ("StringEquals", False),
        ("StringLike", False),
        ("ArnLike", False),
        ("Bool", False),
        # A missing key does not equal any value, so a Deny with these operators applies if the key is missing.
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
def test_operators_with_a_missing_key(operator, holds):
    assert allows(policy({"Condition": {operator: {"k": "true"}}}), request()) is holds


@pytest.mark.parametrize("operator", ["StringEqualsIfExists", "BoolIfExists"])
def test_if_exists_checks_a_present_key(operator):
    condition = {operator: {"k": "true"}}
    assert allows(policy({"Condition": condition}), request(k="true"))
    assert not allows(policy({"Condition": condition}), request(k="false"))


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
    assert allows(policy({"Condition": {operator: {"k": ["a", "b"]}}}), request(k=values)) is holds


def test_conditions_are_anded_and_values_are_ored():
    both = policy({"Condition": {"StringEquals": {"k": ["a", "b"], "l": "c"}, "Bool": {"m": "true"}}})
    assert allows(both, request(k="b", l="c", m="true"))
    for context in ({"k": "b", "l": "x", "m": "true"}, {"k": "b", "l": "c", "m": "false"}, {"k": "b", "l": "c"}):
        assert not allows(both, request(**context))


def test_keys_are_compared_without_case_and_values_with():
    condition = policy({"Condition": {"StringEquals": {"AWS:RequestTag/Pool": "ci"}}})
    assert allows(condition, request(**{"aws:requesttag/pool": "ci"}))
    assert not allows(condition, request(**{"aws:RequestTag/Pool": "CI"}))


def test_for_all_values_is_true_without_values_unless_null_forbids_it():
    condition = {"ForAllValues:StringEquals": {"k": ["a", "b"]}}
    both = {**condition, "Null": {"k": "false"}}
    for values, open_to, closed_to in (([], True, False), (["a"], True, True), (["a", "c"], False, False)):
        assert allows(policy({"Condition": condition}), request(k=values)) is open_to
        assert allows(policy({"Condition": both}), request(k=values)) is closed_to


def test_values_of_variables_are_no_wildcards():
    mine = policy({"Condition": {"StringLike": {"k": "x#${aws:userid}"}}})
    assert allows(mine, request(k="x#me", aws_userid="me"))
    assert not allows(mine, request(k="x#me", aws_userid="*"))
    assert not allows(mine, request(k="x#me"))


def test_a_variable_in_a_resource_and_in_an_arn():
    own = policy({"Resource": "arn:aws:ec2:r:1:instance/${ec2:InstanceID}"})
    assert allows(own, request("arn:aws:ec2:r:1:instance/i-1", ec2_InstanceID="i-1"))
    assert not allows(own, request("arn:aws:ec2:r:1:instance/i-2", ec2_InstanceID="i-1"))
    itself = policy({"Condition": {"ArnLike": {"k": "arn:aws:ec2:r:1:instance/${ec2:InstanceID}"}}})
    assert allows(itself, request(k="arn:aws:ec2:r:1:instance/i-1", ec2_InstanceID="i-1"))
    assert not allows(itself, request(k="arn:aws:ec2:r:1:instance/i-1", ec2_InstanceID="*"))


def test_an_escaped_star_is_literal():
    star = policy({"Condition": {"StringLike": {"k": "a${*}"}}})
    assert allows(star, request(k="a*"))
    assert not allows(star, request(k="ab"))


@pytest.mark.parametrize(
    "statement",
    [
        {"NotAction": "a:b"},
        {"Principal": "*"},
        {"Effect": "allow"},
        {"Condition": {"NumericEquals": {"k": "1"}}},
        {"Condition": {"ForSomeValues:StringEquals": {"k": "1"}}},
        {"Condition": {"NullIfExists": {"k": "true"}}},
        {"Condition": {"StringEquals": {"k": "${aws:userid, 'default'}"}}},
    ],
)
def test_unsupported_elements_are_errors(statement):
    with pytest.raises(NotImplementedError):
        allows(policy(statement), request(k="1"))


def test_unsupported_elements_are_errors_in_irrelevant_statements():
    with pytest.raises(NotImplementedError):
        allows(policy({}, {"Action": "sqs:SendMessage", "Condition": {"DateLessThan": {"k": "1"}}}), request())


def test_several_values_for_a_single_valued_operator_are_an_error():
    """IAM's behaviour is undefined here, so such a policy is an error."""
    with pytest.raises(NotImplementedError):
        allows(policy({"Condition": {"StringEquals": {"k": "a"}}}), request(k=["a", "b"]))


def test_an_older_policy_version_is_an_error():
    with pytest.raises(NotImplementedError):
        allows({"Version": "2008-10-17", "Statement": []}, request())
