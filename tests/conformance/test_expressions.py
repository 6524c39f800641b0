"""Expressions of workflows: `remuda run-workflow` against act, another engine for GitHub's workflows.

act evaluates all expressions in one run on this machine, without Docker and without network. Where the two differ, the
table says what GitHub does, with its source: a file of actions/runner (commit 258d6c8) below
src/Sdk/DTExpressions2/Expressions2, or GitHub's own tests of expressions in actions/languageservices (commit 4043eda)
below expressions/testdata.

Not compared: `hashFiles`, which `run-workflow` refuses, and formats with a lone `}` or a negative index, with which act
crashes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remuda.fake_github.fake_runner.expressions import (
    CaseSensitive,
    ExpressionError,
    Scope,
    is_met,
    parse_condition,
    render,
)

ACT = Path(sys.executable).with_name("act")
LIMIT_S = 60
DATA = {
    "n": 3,
    "half": 2.5,
    "flag": True,
    "nothing": None,
    "zero": 0,
    "_y": "under",
    "list": [1, "b", None],
    "object": {"1": "one", "a": "x", "deep": {"key": "v"}},
    "objects": [{"name": "one", "size": 1, "tags": ["t", "u"]}, {"name": "two", "tags": ["v"]}, 5],
}
OUTPUTS = {"label": "77", "json": '{"a": [1, 2]}'}
CONTEXTS = {
    "github": {"event_name": "push"},
    "env": CaseSensitive(NAME="value"),
    "matrix": {"data": DATA},
    "needs": {"build": {"result": "success", "outputs": OUTPUTS}},
    "steps": {"one": {"outputs": {"x": "1"}, "outcome": "failure", "conclusion": "success"}},
}
#: Expressions with the same value in both, one per line.
SAME = r"""
null
true
false
711
-9.2
0xff
-2.99e-2
-0
0.1
1e14
0.0001
1.50
100000
1000000
'It''s'
''
'ü'
env.NAME
ENV.NAME
env.MISSING
env['NAME']
env['na' ]
github.event_name
GitHub.EVENT_NAME
github['event_name']
github.nothing.more
matrix.data.n
matrix.DATA.N
matrix.data.half
matrix.data.flag
matrix.data.nothing
matrix.data.list
matrix.data.list[0]
matrix.data.list[1]
matrix.data.list[7]
matrix.data.object.a
matrix.data.object['A']
matrix.data.object.deep.key
matrix.data.object[matrix.data.list]
matrix.data.objects[0].tags.*
needs.build.outputs.label
needs.build.result
needs.*.result
needs.*.outputs.label
needs.build.outputs.missing
steps.one.outcome
steps.one.conclusion
steps.one.outputs.x
steps.missing.outputs.x
fromJSON(needs.build.outputs.json).a[1]
fromJSON('{"a": {"b": [10, 20]}}').a.b[1]
fromJSON('[1, 2.5, true, null, "x", {"k": []}]')
fromJSON('{}')
fromJSON('[]')
fromJSON('1')
fromJSON('-0.5')
fromJSON('1.0')
fromJSON('1e3')
fromJSON('true')
fromJSON('null')
fromJSON('"text"')
fromJSON(' 1 ')
fromJSON('{"a": 1, "a": 2}')
toJSON(1.5)
toJSON(1)
toJSON(0.1)
toJSON('a"b')
toJSON('ü€')
toJSON(null)
toJSON(matrix.data.list)
true && 'yes'
false && 'yes'
null && 'yes'
'' && 'yes'
0 && 'yes'
'0' && 'yes'
'a' && 'b' && 'c'
'a' && '' || 'c'
'' || 'default'
null || false
null || 0
0 || ''
false || null
'' || null || 'x'
matrix.data.object && 'object'
matrix.data.missing || 'none'
fromJSON('[]') && 'x'
fromJSON('{}') && 'x'
!true
!''
!'false'
!0
!null
!fromJSON('[]')
!!1
!true == false
! true
true || false && false
(true || false) && false
1 == 1 == true
false == !true && true
1 == 1
1 == 1.0
1 == '1'
1 == ' 1 '
1 == '1.0'
16 == '0x10'
1000 == '1e3'
1 == '1x'
-1 == '-1'
0 == ''
0 == null
0 == false
1 == true
2 == true
null == null
null == ''
null == 'null'
null == false
null == true
null == 'a'
true == 'true'
true == '1'
true == '1.0'
false == ''
false == 'false'
false == '0'
true == true
'a' == 'A'
'ABC' == 'abc'
'Ü' == 'ü'
'ß' == 'SS'
'a' == 'b'
'a' != 'A'
'a' != 'b'
16 == '0x1_0'
16 == '0X10'
16 == '-0x10'
1000 == '1_000'
fromJSON('[]') == ''
fromJSON('[]') == null
fromJSON('{}') == 0
fromJSON('[]') != null
fromJSON('[1]') == 1
1 < 2
2 < '10'
'2' < '10'
'10' < '9'
10 < 9
'a' < 'B'
'B' < 'a'
'b' >= 'B'
'x' < 1
'x' > 1
'x' >= 1
'x' <= 1
null < 1
null <= null
null >= null
null >= 0
null > -1
true > false
false < true
true >= true
true < 2
true > '0'
'' < 1
'' >= 0
fromJSON('[]') < 1
fromJSON('[1]') > 0
contains('Hello', 'ELL')
contains('Hello', '')
contains('', '')
contains('Hello', 'x')
contains(null, '')
contains('123', 2)
contains(123, '2')
contains(true, 'RU')
contains('a true b', true)
contains('x', null)
contains(matrix.data.list, 'B')
contains(matrix.data.list, '1')
contains(matrix.data.list, 1)
contains(matrix.data.list, null)
contains(matrix.data.list, '')
contains(matrix.data.list, true)
contains(matrix.data.list, 'x')
contains(fromJSON('["push", "pull_request"]'), github.event_name)
contains(fromJSON('["1"]'), 1)
contains(fromJSON('[true]'), 'true')
contains(fromJSON('[]'), null)
contains(fromJSON('[null]'), '')
contains(needs.*.result, 'SUCCESS')
contains(needs.*.result, 'failure')
contains(matrix.data.objects.*.name, 'One')
contains(matrix.data.object, 'a')
contains(fromJSON('{"a": "b"}'), 'b')
contains('ß', 'SS')
startsWith('Hello', 'HE')
startsWith('Hello', '')
startsWith('Hello', 'lo')
startsWith(123, 12)
startsWith(123, '12')
startsWith(true, 'tr')
startsWith(null, '')
startsWith('', null)
endsWith('Hello', 'LO')
endsWith('Hello', '')
endsWith(123, 23)
endsWith(false, 'SE')
endsWith(null, '')
format('a')
format('{0}', 'x')
format('{0} {1} {0}', 'a', 2)
format('{{0}}')
format('{{{0}}}', 'x')
format('{{ {0} }}', 'x')
format('{{x}}')
format('{0}{1}{2}', null, true, 1.5)
format('{0}', fromJSON('[1]'))
format('{0}', fromJSON('{}'))
format('{0}', 1e20)
format('{0}', -0)
format('{0}', 0.1)
format('{1}', 'a', 'b')
format('{00}', 'a')
format('{0}', '{0}')
format('{0}', '{1}', 'x')
format('}}{{')
format(1)
format(null)
format(matrix.data.list)
FORMAT('{0}', 1)
join(matrix.data.list, '-')
join(matrix.data.list)
join(fromJSON('[1, 2.5, true, null, "x"]'), ', ')
join(fromJSON('["a"]'), '-')
join(fromJSON('[]'), '-')
join('abc', '-')
join(12, '-')
join(null, '-')
join(true)
join(fromJSON('[[1], {}]'), '-')
join(fromJSON('[1, 2]'), 0)
join(fromJSON('[1, 2]'), null)
join(fromJSON('[1, 2]'), true)
join(needs.*.result, ',')
'a'.b
fromJSON('[1]')[0]
(matrix.data.list)[1]
('a')
((1))
1==1
1>=1&&2<=2
'a'=='A'
!true&&!false
github . event_name
github.event_name[0]
matrix.data['object']['a']
matrix['data'].list[0]
matrix.data.objects[0]['tags'][0]
matrix.data.objects[matrix.data.zero].name
env[format('NA{0}', 'ME')]
startsWith( 'a' , 'A' )
matrix.data-x
matrix.data._y
matrix.data.list.*
'{'
'}'
'}}'
'$'
1e-400
-1.5e3
"""
#: Expressions that both refuse.
REFUSED = r"""
0.1 + 0
fromJSON('')
fromJSON('{')
fromJSON(null)
fromJSON('[1,]')
fromJSON('1 2')
format('{1}', 'a')
format('{', 'a')
format('{0', 'a')
format('{x}', 'a')
format('{}', 'a')
format('{0:x}', 'a')
format('{0 }', 'a')
success()
always()
cancelled()
failure()
success() && 'ok' || 'bad'
contains('a')
contains('a', 'b', 'c')
startsWith('a')
join()
format()
toJSON()
toJSON(1, 2)
nothing('x')
nothing
unknown.name
a b
1 +
(1
1)
"double"
'open
github.
github[
[1]
1abc
1 = 1
1 === 1
a.b c
true true
TRUE
True
NULL
nan
infinity
1 && && 2
,1
0x
0xg
0o8
1.2.3
--1
+-1
1e
.e2
- 1
"""


class Deviation(NamedTuple):
    #: What act does instead of GitHub, and where GitHub's behaviour is written.
    reason: str
    source: str
    #: By expression: its value as JSON in `run-workflow` and in act, None for a refusal.
    values: Mapping[str, tuple[str | None, str | None]]


DEVIATIONS = (
    Deviation(
        "its parser knows neither NaN nor Infinity",
        "Tokens/LexicalAnalyzer.cs, ReadKeywordToken",
        {
            "NaN": ("NaN", None),
            "Infinity": ("Infinity", None),
            "-Infinity": ("-Infinity", None),
            "NaN || 'x'": ('"x"', None),
            "NaN && 'x'": ("NaN", None),
            "!NaN": ("true", None),
            "NaN == NaN": ("false", None),
            "NaN != NaN": ("true", None),
            "NaN == 'NaN'": ("false", None),
            "NaN == 'x'": ("false", None),
            "Infinity == Infinity": ("true", None),
            "Infinity == 'Infinity'": ("true", None),
            "Infinity > 1e300": ("true", None),
            "-Infinity == '-Infinity'": ("true", None),
            "NaN < 1": ("false", None),
            "NaN >= NaN": ("false", None),
            "NaN <= NaN": ("false", None),
            "format('{0}', NaN)": ('"NaN"', None),
            "1e400": ("Infinity", None),
        },
    ),
    Deviation(
        "its parser refuses these numbers",
        "Sdk/ExpressionUtility.cs, ParseNumber; number.json",
        {
            "+7": ("7", None),
            ".5": ("0.5", None),
            "5.": ("5", None),
            "0xffffffff": ("-1", None),
            "0o17": ("15", None),
            "123456789012345678": ("1.23456789012346E+17", None),
            "4294967295 == '0xffffffff'": ("false", None),
            "9007199254740993": ("9.00719925474099E+15", None),
            "00012": ("12", None),
            "1.e2": ("100", None),
        },
    ),
    Deviation(
        "toJSON formats numbers as Go does, not with 15 digits and an exponent",
        "Sdk/Functions/ToJson.cs, WriteValue",
        {
            "1e20": ("1E+20", "100000000000000000000"),
            "1e21": ("1E+21", "1e+21"),
            "1e15": ("1E+15", "1000000000000000"),
            "0.00001": ("1E-05", "0.00001"),
            "3.14159265358979312": ("3.14159265358979", "3.141592653589793"),
            "fromJSON('[1.0, 1e3, 1e20, 0.00001]')": ("[1,1000,1E+20,1E-05]", "[1,1000,100000000000000000000,0.00001]"),
        },
    ),
    Deviation(
        "the names of env ignore case",
        "Runner.Worker/ExecutionContext.cs, CaseSensitiveDictionaryContextData",
        {
            "env.name": ("null", '"value"'),
        },
    ),
    Deviation(
        "an index is not converted to a number, or for an object to a text",
        "Sdk/Operators/Index.cs, IndexHelper; op_idx.json",
        {
            "matrix.data.list['1']": ('"b"', "[null,null,null]"),
            "matrix.data.list[1.9]": ('"b"', "null"),
            "matrix.data.list[true]": ('"b"', "null"),
            "matrix.data.list[null]": ("1", "null"),
            "matrix.data.list['x']": ("null", "[null,null,null]"),
            "matrix.data.list.x": ("null", "[null,null,null]"),
            "matrix.data.object[1]": ('"one"', "null"),
        },
    ),
    Deviation(
        "`*` keeps elements without the property and does not take the values of objects and inner arrays",
        "Sdk/Operators/Index.cs, HandleFilteredArray; op_idx_star.json",
        {
            "matrix.data.objects.*.name": ('["one","two"]', '["one","two",null]'),
            "matrix.data.objects.*.size": ("[1]", "[1,null,null]"),
            "matrix.data.objects.*.tags.*": ('["t","u","v"]', '[["t","u"],["v"],null]'),
            "matrix.data.objects.*.tags[0]": ('["t","v"]', '["t","u"]'),
            "matrix.data.objects.*.missing": ("[]", "[null,null,null]"),
            "matrix.data.object.*": ('["one","x",{"key": "v"}]', '{"1": "one","a": "x","deep": {"key": "v"}}'),
            "matrix.data.n.*": ("[]", "3"),
            "matrix.data.nothing.*": ("[]", "null"),
            "join(matrix.data.objects.*.name, '+')": ('"one+two"', '"one+two+"'),
        },
    ),
    Deviation(
        "its parser refuses [*]",
        "Tokens/LexicalAnalyzer.cs, TokenKind.Wildcard; op_idx_star.json",
        {
            "matrix.data.objects[*].name": ('["one","two"]', None),
            "matrix.data.list[*]": ('[1,"b",null]', None),
        },
    ),
    Deviation(
        "fromJSON converts nothing to a text, and refuses NaN",
        "Sdk/Functions/FromJson.cs",
        {
            "fromJSON('NaN')": ("NaN", None),
            "fromJSON(true)": ("true", None),
            "fromJSON(12)": ("12", None),
        },
    ),
    Deviation(
        "objects are sorted by name",
        "Sdk/Functions/ToJson.cs; tojson.json",
        {
            'fromJSON(\'{"b": 1, "a": 2}\')': ('{"b": 1,"a": 2}', '{"a": 2,"b": 1}'),
        },
    ),
    Deviation(
        "toJSON escapes the signs of HTML",
        "Sdk/Functions/ToJson.cs, WriteValue",
        {
            "toJSON('<&>''')": ('"\\"<&>\'\\""', '"\\"\\\\u003c\\\\u0026\\\\u003e\'\\""'),
        },
    ),
    Deviation(
        "comparisons are evaluated from right to left, and == before <",
        "operators_precedence.json",
        {
            "1 < 2 == true": ("true", "false"),
            "3 > 2 > 1": ("false", "true"),
        },
    ),
    Deviation(
        "a text with 0o, with more than 31 bits or of spaces only is no number",
        "Sdk/ExpressionUtility.cs, ParseNumber; coerce_number.json",
        {
            "8 == '0o10'": ("true", "false"),
            "0 == ' '": ("true", "false"),
            "-1 == '0xffffffff'": ("true", "false"),
        },
    ),
    Deviation(
        "arrays and objects are not compared; on GitHub, each is equal to itself only",
        "EvaluationResult.cs, AbstractEqual; op_eq.json",
        {
            "matrix.data.list == matrix.data.list": ("true", None),
            "matrix.data.object == matrix.data.object": ("true", None),
            "fromJSON('[]') == fromJSON('[]')": ("false", None),
            "fromJSON('{}') == fromJSON('{}')": ("false", None),
            "fromJSON('[]') >= fromJSON('[]')": ("false", None),
            "matrix.data.list <= matrix.data.list": ("false", None),
            "contains(fromJSON('[[]]'), fromJSON('[]'))": ("false", None),
        },
    ),
    Deviation(
        "texts are compared in lower case; on GitHub, `_` and `[` come after the letters",
        "EvaluationResult.cs, AbstractLessThan; operators_case_insensitive.json",
        {
            "'_' < 'a'": ("false", "true"),
            "'[' < 'a'": ("false", "true"),
        },
    ),
    Deviation(
        "null is less than null",
        "EvaluationResult.cs, AbstractLessThan",
        {
            "null < null": ("false", "true"),
        },
    ),
    Deviation(
        "an array or object counts as the text Array or Object",
        "Sdk/Functions/Contains.cs, StartsWith.cs, EndsWith.cs and Join.cs; join.json",
        {
            "contains('Array', fromJSON('[]'))": ("false", "true"),
            "contains('Object', fromJSON('{}'))": ("false", "true"),
            "startsWith('Array', fromJSON('[]'))": ("false", "true"),
            "startsWith(fromJSON('[]'), 'A')": ("false", "true"),
            "startsWith(matrix.data.object, 'Obj')": ("false", "true"),
            "endsWith('Object', fromJSON('{}'))": ("false", "true"),
            "endsWith(fromJSON('[]'), 'y')": ("false", "true"),
            "join(fromJSON('{\"a\": 1}'), '-')": ('""', '"Object"'),
            "join(fromJSON('[1, 2]'), fromJSON('[]'))": ('"1,2"', '"1Array2"'),
        },
    ),
    Deviation(
        "it has no case()",
        "Sdk/Functions/Case.cs; case.json",
        {
            "case(true, 'a', 'b')": ('"a"', None),
            "case(false, 'a', true, 'b', 'c')": ('"b"', None),
            "case(false, 'a', 'b')": ('"b"', None),
        },
    ),
)
#: Conditions of steps, evaluated while the job is successful and after a step failed.
CONDITIONS = (
    "success()",
    "failure()",
    "always()",
    "cancelled()",
    "!cancelled()",
    "${{ always() }}",
    "${{ success() || failure() }}",
    "failure() && steps.one.outcome == 'failure'",
    "always() && steps.one.conclusion == 'failure'",
    "github.event_name == 'PUSH'",
    "${{ github.event_name == 'pull_request' }}",
    "contains(needs.*.result, 'failure')",
    "always() && contains(needs.*.result, 'success')",
    "matrix.data.flag",
    "matrix.data.nothing",
    "matrix.data.zero",
    "'false'",
    "''",
)


@dataclass
class Act:
    """What act makes of the expressions of a workflow."""

    folder: Path
    #: Values by expression. Of those with an error, none.
    values: dict[str, str] = field(default_factory=dict)

    def run(self, expressions: list[str]) -> None:
        invalid = self._invalid(expressions)
        valid = [each for each in expressions if each not in invalid]
        result = self._act(valid)
        assert result.returncode == 1, result.stderr[-2_000:]
        messages = {json.loads(line)["msg"] for line in result.stdout.splitlines() if '"level":"error"' in line}
        failed = {message[: message.rindex("': ")] for message in messages if message.startswith(_FAILED)}
        found = json.loads((self.folder / "values").read_text(encoding="utf-8"))
        for number, expression in enumerate(valid):
            if f"{_FAILED}{expression})" not in failed:
                self.values[expression] = found[f"V{number}"]

    def conditions_met(self, phase: str) -> set[str]:
        return {CONDITIONS[int(file.name)] for file in (self.folder / phase).iterdir()}

    def _invalid(self, expressions: list[str]) -> set[str]:
        """Those that act refuses before it starts. Its message names their lines."""
        result = self._act(expressions, "--validate")
        lines = self._workflow.read_text(encoding="utf-8").splitlines()
        named = {lines[int(number) - 1].rstrip(",") for number in re.findall(r"Line: (\d+) ", result.stderr)}
        return {each for number, each in enumerate(expressions) if _variable(number, each) in named}

    def _act(self, expressions: list[str], *options: str) -> subprocess.CompletedProcess[str]:
        self._workflow.write_text(self._document(expressions), encoding="utf-8")
        quiet = ("--no-cache-server", "--container-daemon-socket", "-", "--json")
        return subprocess.run(
            [str(ACT), "push", "--workflows", str(self._workflow), "--platform", "self=-self-hosted", *quiet, *options],
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder), "ACT_DISABLE_VERSION_CHECK": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    @property
    def _workflow(self) -> Path:
        return self.folder / "workflow.yml"

    def _document(self, expressions: list[str]) -> str:
        """The workflow, with each expression on a line of its own."""
        dump = f"import json, os; open({str(self.folder / 'values')!r}, 'w').write(json.dumps(dict(os.environ)))"
        steps: list[dict[str, Any]] = [
            {"id": "one", "run": "echo x=1 >> $GITHUB_OUTPUT; exit 1", "continue-on-error": True},
            {"run": f'{sys.executable} -c "{dump}"', "env": _VARIABLES},
            *self._conditions("success"),
            {"run": "exit 1"},
            *self._conditions("failure"),
        ]
        document = {
            "on": "push",
            "env": {"NAME": "value"},
            "jobs": {
                "build": {"runs-on": "self", "outputs": OUTPUTS, "steps": [{"run": "true"}]},
                "expressions": {
                    "needs": "build",
                    "runs-on": "self",
                    "strategy": {"matrix": {"data": [DATA]}},
                    "steps": steps,
                },
            },
        }
        lines = ",\n".join(_variable(number, each) for number, each in enumerate(expressions))
        return json.dumps(document).replace(json.dumps(_VARIABLES), f"{{\n{lines}\n}}")

    def _conditions(self, phase: str) -> list[dict[str, Any]]:
        (self.folder / phase).mkdir(exist_ok=True)
        steps = enumerate(CONDITIONS)
        return [{"run": f"touch {self.folder / phase / str(number)}", "if": condition} for number, condition in steps]


#: Stands for the variables of the step with the expressions.
_VARIABLES = {"variables": "of the step"}
#: Begins act's message about an expression whose evaluation failed.
_FAILED = "Unable to interpolate expression 'format('{0}', "


def _variable(number: int, expression: str) -> str:
    return f'"V{number}": {json.dumps(f"${{{{ {expression} }}}}")}'


def ours(expression: str) -> str | None:
    try:
        return render(f"${{{{ {expression} }}}}", Scope(CONTEXTS))
    except ExpressionError:
        return None


def to_json(expression: str) -> str:
    return f"toJSON({expression})"


def compact(value: str | None) -> str | None:
    return re.sub(r"\n *", "", value) if value else value


@pytest.fixture(scope="module")
def act(tmp_path_factory: pytest.TempPathFactory) -> Act:
    deviating = [each for deviation in DEVIATIONS for each in deviation.values]
    expressions = [*SAME.strip("\n").splitlines(), *REFUSED.strip("\n").splitlines(), *deviating]
    found = Act(tmp_path_factory.mktemp("act"))
    found.run([*expressions, *map(to_json, expressions)])
    return found


def test_values_are_the_same(act: Act) -> None:
    expressions = SAME.strip("\n").splitlines()
    values = {each: (ours(each), ours(to_json(each))) for each in expressions}
    assert values == {each: (act.values.get(each), act.values.get(to_json(each))) for each in expressions}
    assert None not in {text for pair in values.values() for text in pair}


def test_errors_are_the_same(act: Act) -> None:
    expressions = REFUSED.strip("\n").splitlines()
    assert [each for each in expressions if ours(each) is not None or each in act.values] == []


@pytest.mark.parametrize("deviation", DEVIATIONS, ids=lambda deviation: deviation.reason.split(",")[0])
def test_deviations_are_those_of_act(act: Act, deviation: Deviation) -> None:
    found = {each: (compact(ours(to_json(each))), compact(act.values.get(to_json(each)))) for each in deviation.values}
    assert found == deviation.values
    assert all(own != other for own, other in found.values())


@pytest.mark.parametrize("phase", ["success", "failure"])
def test_the_same_conditions_are_met(act: Act, phase: str) -> None:
    status = {
        "success": lambda: phase == "success",
        "failure": lambda: phase == "failure",
        "always": lambda: True,
        "cancelled": lambda: False,
    }
    scope = Scope(CONTEXTS, status)
    assert {each for each in CONDITIONS if is_met(parse_condition(each), scope)} == act.conditions_met(phase)
