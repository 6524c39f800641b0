"""Expressions of workflows: GitHub's semantics, and limits for untrusted input."""

from __future__ import annotations

import math
from typing import Any

import pytest

from remuda.fake_github.fake_runner.expressions import (
    CaseSensitive,
    ExpressionError,
    Scope,
    evaluate,
    is_met,
    parse,
    parse_condition,
    render,
)

CONTEXTS = {
    "github": {"ref": "refs/heads/main", "run_id": "77", "event_name": "push"},
    "env": CaseSensitive({"NAME": "value", "EMPTY": ""}),
    "matrix": {"n": 3, "flag": True, "list": [1, "b", None], "rows": [{"a": 1}, {"a": None}, {}]},
    "needs": {
        "build": {"result": "success", "outputs": {"label": "77", "json": '{"a": [1, 2]}'}},
        "lint": {"result": "Failure", "outputs": {}},
    },
    "steps": {"one": {"outputs": {"x": "1"}, "outcome": "failure", "conclusion": "success"}},
}


def scope(status: str = "success") -> Scope:
    functions = {
        "always": lambda: True,
        "success": lambda: status == "success",
        "failure": lambda: status == "failure",
        "cancelled": lambda: status == "cancelled",
    }
    return Scope(CONTEXTS, functions)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # Literals
        ("null", None),
        ("true", True),
        ("711", 711),
        ("-9.2", -9.2),
        ("0xff", 255),
        ("0o17", 15),
        ("-2.99e-2", -0.0299),
        ("'It''s'", "It's"),
        ("''", ""),
        ("-Infinity", -math.inf),
        # As a signed integer of 32 bits
        ("0xffffffff", -1),
        ("0o37777777777", -1),
        # Contexts: names ignore case except those of env; what does not exist is null
        ("github.run_id", "77"),
        ("GitHub.RUN_ID", "77"),
        ("github['run_id']", "77"),
        ("env.NAME", "value"),
        ("env.name", None),
        ("github.nothing.more", None),
        ("matrix.list[1]", "b"),
        ("matrix.list[7]", None),
        ("needs.build.outputs.label", "77"),
        ("needs.*.result", ["success", "Failure"]),
        ("needs.*.outputs.label", ["77"]),
        ("matrix.rows.*.a", [1, None]),
        ("needs[matrix.list]", None),
        ("needs[format('{0}{1}', 'bu', 'ild')].result", "success"),
        # Operators return operands
        ("env.EMPTY || 'default'", "default"),
        ("env.NAME && 'yes' || 'no'", "yes"),
        ("false && 'yes' || 'no'", "no"),
        ("!env.EMPTY", True),
        ("!!'false'", True),
        ("1 == 1 && 2 > 1", True),
        ("true || false && false", True),
        ("(true || false) && false", False),
        ("!true == false", True),
        # Loose equality
        ("'ABC' == 'abc'", True),
        ("'abc' != 'abd'", True),
        ("'ß' == 'SS'", False),
        ("'Ü' == 'ü'", True),
        ("null == 0", True),
        ("null == ''", True),
        ("true == 1", True),
        ("true == '1'", True),
        ("'1' == 1", True),
        ("' 0x10 ' == 16", True),
        ("'' == 0", True),
        ("'x' == 0", False),
        ("'0x1_0' == 16", False),
        ("'0x100000000' == 0", False),
        ("'true' == true", False),
        ("matrix.n == '3'", True),
        ("matrix.list == matrix.list", True),
        ("matrix.list == needs", False),
        ("NaN == NaN", False),
        # Order
        ("'a' < 'B'", True),
        ("'b' >= 'B'", True),
        ("2 < '10'", True),
        ("'x' < 1", False),
        ("'x' > 1", False),
        # Functions
        ("contains('Hello', 'ELL')", True),
        ("contains(needs.*.result, 'failure')", True),
        ("contains(matrix.list, '1')", True),
        ("contains(fromJSON('[\"push\"]'), github.event_name)", True),
        ("startsWith(github.ref, 'REFS/')", True),
        ("endsWith(github.ref, 'main')", True),
        ("format('{0} {{x}} {1} {0}', 'a', 2)", "a {x} 2 a"),
        ("join(matrix.list, '-')", "1-b-"),
        ("join(matrix.list)", "1,b,"),
        ("join(matrix.list, needs)", "1,b,"),
        ("join(needs)", ""),
        # Arrays and objects have no text to search in
        ("contains('Array', matrix.list)", False),
        ("startsWith(matrix.list, 'A')", False),
        ("endsWith('Object', needs)", False),
        ("case(false, 1, true, 2, 3)", 2),
        ("case(false, 1, 3)", 3),
        # Only the chosen value is evaluated
        ("case(true, 'a', fromJSON('{'))", "a"),
        ("fromJSON(needs.build.outputs.json).a[1]", 2),
        (f"fromJSON('1{'0' * 400}') == Infinity", True),
        (f"format('{{0}}', fromJSON('-1{'0' * 400}'))", "-Infinity"),
        ("toJSON(matrix.list)", '[\n  1,\n  "b",\n  null\n]'),
        (
            'toJSON(fromJSON(\'{"a": [1.0, 1e20, {}], "b": []}\'))',
            '{\n  "a": [\n    1,\n    1E+20,\n    {}\n  ],\n  "b": []\n}',
        ),
        ("success() && !failure() && !cancelled() && always()", True),
    ],
)
def test_values(text: str, value: Any) -> None:
    found = evaluate(parse(text), scope())
    assert found == value
    assert isinstance(found, bool) == isinstance(value, bool)


@pytest.mark.parametrize("text", ["false", "0", "-0", "''", "null", "NaN", "env.nothing"])
def test_false_values(text: str) -> None:
    assert is_met(parse_condition(text), scope()) is False


@pytest.mark.parametrize("text", ["true", "1", "'false'", "' '", "needs", "matrix.list", "Infinity"])
def test_true_values(text: str) -> None:
    assert is_met(parse_condition(text), scope()) is True


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("a ${{ matrix.n }}-${{matrix.flag}} b", "a 3-true b"),
        ("${{ null }}|${{ 1.50 }}|${{ 1e20 }}|${{ -0 }}|${{ needs }}|${{ matrix.list }}", "|1.5|1E+20|0|Object|Array"),
        ("${{ '}}' }}", "}}"),
        ("no expression", "no expression"),
        # A value is not evaluated again.
        ("${{ format('${0}', '{{ github.run_id }}') }}", "${{ github.run_id }}"),
    ],
)
def test_templates(text: str, rendered: str) -> None:
    assert render(text, scope()) == rendered


@pytest.mark.parametrize(
    ("text", "after_success", "after_failure", "after_cancellation"),
    [
        ("", True, False, False),
        ("success()", True, False, False),
        ("always()", True, True, True),
        ("${{ always() }}", True, True, True),
        ("failure()", False, True, False),
        ("cancelled()", False, False, True),
        ("!cancelled()", True, True, False),
        ("github.ref == 'refs/heads/main'", True, False, False),
        ("${{ github.ref == 'x' }}", False, False, False),
        ("failure() && steps.one.outcome == 'failure'", False, True, False),
    ],
)
def test_conditions_imply_success_without_a_status_function(
    text: str,
    after_success: bool,  # noqa: FBT001
    after_failure: bool,  # noqa: FBT001
    after_cancellation: bool,  # noqa: FBT001
) -> None:
    met = [is_met(parse_condition(text), scope(status)) for status in ("success", "failure", "cancelled")]
    assert met == [after_success, after_failure, after_cancellation]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "1 +",
        "(1",
        "github.",
        "github[",
        '"double"',
        "'open",
        "1 == ",
        "hashFiles('x')",
        "contains('a')",
        "success(1)",
        "secrets.X",
        "format('{1}', 'a')",
        "format('{', 'a')",
        "fromJSON('{')",
        "__import__('os')",
        "1abc",
        "!" * 60 + "true",
        "(" * 60 + "1" + ")" * 60,
        "[1]",
        "-0xff",
        "case(true, 1)",
        "case(true, 1, false, 2)",
        "case('true', 1, 2)",
        "github" + ".x" * 60,
        "1" + " == 1" * 60,
        f"toJSON(fromJSON('{'[' * 900}{']' * 900}'))",
    ],
)
def test_invalid_expressions_are_errors(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(parse(text), scope())


@pytest.mark.parametrize("text", ["${{ github.run_id", "a ${{ 'x }} b"])
def test_open_templates_are_errors(text: str) -> None:
    with pytest.raises(ExpressionError):
        render(text, scope())


def test_text_around_a_condition_is_an_error() -> None:
    with pytest.raises(ExpressionError, match="always true"):
        parse_condition("${{ github.ref }} == 'x'")


def test_long_results_are_errors() -> None:
    text = "'" + "x" * 1000 + "'"
    for _ in range(2):
        text = f"format('{'{0}' * 100}', {text})"
    with pytest.raises(ExpressionError, match="longer than"):
        evaluate(parse(text), scope())
    with pytest.raises(ExpressionError, match="longer than"):
        parse("'" + "x" * 30_000 + "'")


def test_long_chains_of_and_and_or_are_one_level() -> None:
    assert is_met(parse("true" + " && true" * 2_000), scope())
    assert not is_met(parse("false" + " || false" * 2_000), scope())


def test_nan_is_a_number() -> None:
    assert math.isnan(evaluate(parse("NaN"), scope()))
