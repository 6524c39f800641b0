"""The evaluator itself: a lenient one would prove nothing."""

from __future__ import annotations

from typing import Any

import pytest

from support.iam import Request, Value, allows

TABLE = "arn:aws:dynamodb:eu-central-1:123456789012:table/t"


def policy(*statements: dict[str, Any]) -> dict[str, Any]:
    filled = [{"Effect": "Allow", "Action": "dynamodb:GetItem", "Resource": TABLE, **each} for each in statements]
    return {"Version": "2012-10-17", "Statement": filled}


def asked(resource: str = TABLE, action: str = "dynamodb:GetItem", **context: Value) -> Request:
    return Request(action=action, resource=resource, context={key.replace("_", ":"): v for key, v in context.items()})


def test_what_no_statement_allows_is_denied():
    assert allows(policy({}), asked())
    assert not allows(policy(), asked())
    assert not allows(policy({}), asked(action="dynamodb:PutItem"))
    assert not allows(policy({}), asked(TABLE + "/index/live"))


def test_a_deny_wins():
    assert not allows(policy({}, {"Effect": "Deny", "Action": "dynamodb:*"}), asked())


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
        ("ArnLike", "arn:aws:ec2:*:*:instance/*", "arn:aws:ec2:r:1:instance/i-1", True),
        ("ArnLike", "arn:aws:ec2:*:instance/*", "arn:aws:ec2:r:1:instance/i-1", False),
    ],
)
def test_operators(operator, wanted, value, holds):
    assert allows(policy({"Condition": {operator: {"k": wanted}}}), asked(k=value)) is holds


@pytest.mark.parametrize("operator", ["StringEquals", "StringLike", "ArnLike", "Bool"])
def test_a_key_that_is_missing_matches_nothing(operator):
    assert not allows(policy({"Condition": {operator: {"k": "true"}}}), asked())


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


@pytest.mark.parametrize(
    "statement",
    [{"NotAction": "a:b"}, {"Principal": "*"}, {"Condition": {"NumericEquals": {"k": "1"}}}],
)
def test_what_it_does_not_know_is_an_error(statement):
    with pytest.raises(NotImplementedError):
        allows(policy(statement), asked(k="1"))
