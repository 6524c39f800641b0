"""Expressions of workflows: parser, evaluator and templates. Pure.

Semantics of "Evaluate expressions in workflows and actions" (https://docs.github.com/actions/reference/workflows-and-actions/expressions)
and of actions/runner, src/Sdk/DTExpressions2. Expressions are untrusted: they are parsed, never executed as code.
tests/conformance/test_expressions.py compares the results with those of another engine, act.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

#: As in actions/runner, ExpressionConstants.cs.
MAX_LENGTH = 21_000
MAX_DEPTH = 50
#: Maximum length of a text that a function or a template returns.
MAX_TEXT = 1024 * 1024
_SIGN_BIT, _MAX_UNSIGNED = 1 << 31, (1 << 32) - 1
OPEN, CLOSE = "${{", "}}"
STATUS_FUNCTIONS = frozenset({"success", "failure", "always", "cancelled"})

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>'(?:[^']|'')*')
    |(?P<number>(?:0x[0-9a-fA-F]+|0o[0-7]+|[-+]Infinity
        |[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)(?![\w.]))
    |(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<operator>&&|\|\||==|!=|<=|>=|[<>!()\[\],.*])
    )""",
    re.VERBOSE,
)
_CONSTANTS = {"true": True, "false": False, "null": None, "NaN": math.nan, "Infinity": math.inf}
#: Binary operators from the lowest precedence to the highest.
_PRECEDENCE = (("||",), ("&&",), ("==", "!="), ("<", "<=", ">", ">="))
_NUMBER = re.compile(r"[-+]?(?:Infinity|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)")
#: Hexadecimal and octal numbers, by their prefix.
_INTEGERS = {"0x": (re.compile("[0-9a-fA-F]+"), 16), "0o": (re.compile("[0-7]+"), 8)}
_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"
_FORMAT = re.compile(r"\{\{|\}\}|\{([0-9]{1,4})\}|[{}]")

#: None, bool, int, float, str, a sequence or a mapping.
Value = Any


class ExpressionError(ValueError):
    """The expression is invalid, or its evaluation failed."""


class CaseSensitive(dict[str, Value]):
    """A context whose names are case-sensitive: `env` on Linux. The names of all others are not."""


class _Filtered(list[Value]):
    """The result of `.*`: a following name or index applies to each element."""


class Node(NamedTuple):
    #: literal, context, call, index, filter, not, or a binary operator.
    kind: str
    value: Value = None
    #: `&&` and `||` have two or more.
    children: tuple["Node", ...] = ()
    #: Levels of nodes, this one included.
    depth: int = 1

    def walk(self) -> Iterator["Node"]:
        yield self
        for child in self.children:
            yield from child.walk()


class Scope(NamedTuple):
    """The values that an expression may use."""

    contexts: Mapping[str, Value]
    #: Functions without arguments: success, failure, always and cancelled.
    status: Mapping[str, Callable[[], bool]] = {}


# Parser -------------------------------------------------------------------------------------------------------------


def _node(kind: str, value: Value, children: tuple[Node, ...]) -> Node:
    depth = 1 + max((child.depth for child in children), default=0)
    if depth > MAX_DEPTH:
        raise ExpressionError(_TOO_DEEP)
    return Node(kind, value, children, depth)


def parse(text: str) -> Node:
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"it is longer than {MAX_LENGTH} characters")
    return _Parser(list(_tokens(text))).parse()


def parse_condition(text: str) -> Node:
    """Parse the value of an `if`. As on GitHub, success() is implied unless it calls a status function."""
    inner = text.strip()
    if inner.startswith(OPEN) and inner.find(CLOSE) == len(inner) - len(CLOSE):
        inner = inner[len(OPEN) : -len(CLOSE)].strip()
    elif OPEN in inner:
        raise ExpressionError(f"text around {OPEN} {CLOSE} makes the condition always true")
    succeeded = Node("call", "success")
    node = parse(inner) if inner else succeeded
    has_status = any(each.kind == "call" and each.value in STATUS_FUNCTIONS for each in node.walk())
    return node if has_status else Node("&&", None, (succeeded, node))


def parse_template(text: str) -> list[str | Node]:
    """Split a text into its literal parts and its parsed expressions."""
    parts: list[str | Node] = []
    rest = text
    while (start := rest.find(OPEN)) >= 0:
        end = _closing(rest, start + len(OPEN))
        parts += [rest[:start], parse(rest[start + len(OPEN) : end])]
        rest = rest[end + len(CLOSE) :]
    return [*parts, rest]


def _closing(text: str, start: int) -> int:
    """Find the end of an expression. Its strings may contain closing braces."""
    in_string = False
    for index in range(start, len(text)):
        if text[index] == "'":
            in_string = not in_string
        elif not in_string and text.startswith(CLOSE, index):
            return index
    raise ExpressionError(f"{OPEN} without {CLOSE}")


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at, end = 0, len(text.rstrip())
    while at < end:
        found = _TOKEN.match(text, at)
        if found is None:
            shown = text[at:].strip()[:20]
            hint = "; use single quotes for texts" if shown.startswith('"') else ""
            raise ExpressionError(f"unexpected {shown!r}{hint}")
        at = found.end()
        yield str(found.lastgroup), found[str(found.lastgroup)]


class _Parser:
    """A recursive-descent parser."""

    def __init__(self, tokens: Sequence[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def parse(self) -> Node:
        node = self._binary(0)
        if self._at < len(self._tokens):
            raise ExpressionError(f"unexpected {self._tokens[self._at][1]!r}")
        return node

    def _peek(self) -> str:
        """The next operator, or an empty text."""
        kind, text = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        return text if kind == "operator" else ""

    def _take(self) -> tuple[str, str]:
        if self._at == len(self._tokens):
            raise ExpressionError("it ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, operator: str) -> None:
        kind, text = self._take()
        if (kind, text) != ("operator", operator):
            raise ExpressionError(f"expected {operator!r} instead of {text!r}")

    def _binary(self, level: int) -> Node:
        if level == len(_PRECEDENCE):
            return self._unary()
        node = self._binary(level + 1)
        while (operator := self._peek()) in _PRECEDENCE[level]:
            self._at += 1
            # GitHub counts a && b && c as one level.
            left = node.children if operator in {"&&", "||"} and node.kind == operator else (node,)
            node = _node(operator, None, (*left, self._binary(level + 1)))
        return node

    def _unary(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(_TOO_DEEP)
        if self._peek() == "!":
            self._at += 1
            node = _node("not", None, (self._unary(),))
        else:
            node = self._postfix(self._primary())
        self._depth -= 1
        return node

    def _primary(self) -> Node:
        kind, text = self._take()
        match kind:
            case "string":
                return Node("literal", text[1:-1].replace("''", "'"))
            case "number":
                return Node("literal", to_number(text))
            case "name" if self._peek() == "(":
                return _node("call", text.lower(), self._arguments(text))
            case "name":
                return Node("literal", _CONSTANTS[text]) if text in _CONSTANTS else Node("context", text.lower())
        if text != "(":
            raise ExpressionError(f"unexpected {text!r}")
        node = self._binary(0)
        self._expect(")")
        return node

    def _arguments(self, name: str) -> tuple[Node, ...]:
        self._expect("(")
        arguments: list[Node] = []
        while self._peek() != ")":
            if arguments:
                self._expect(",")
            arguments.append(self._binary(0))
        self._expect(")")
        check_call(name, len(arguments))
        return tuple(arguments)

    def _postfix(self, node: Node) -> Node:
        while (operator := self._peek()) in {".", "["}:
            self._at += 1
            if self._peek() == "*":
                self._at += 1
                node = _node("filter", None, (node,))
            elif operator == ".":
                kind, name = self._take()
                if kind != "name":
                    raise ExpressionError(f"expected a name after '.' instead of {name!r}")
                node = _node("index", None, (node, Node("literal", name)))
            else:
                node = _node("index", None, (node, self._binary(0)))
            if operator == "[":
                self._expect("]")
        return node


def check_call(name: str, arguments: int) -> None:
    """Check that the function exists and takes so many arguments."""
    least, most = _ARGUMENTS.get(name.lower(), (-1, -1))
    if least < 0:
        raise ExpressionError(f"{name}() is not supported; functions are {', '.join(sorted(_ARGUMENTS))}")
    if not least <= arguments <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise ExpressionError(f"{name}() takes {wanted} arguments, not {arguments}")
    if name.lower() == "case" and arguments % 2 == 0:
        raise ExpressionError(f"{name}() takes an odd number of arguments, not {arguments}")


# Evaluator ----------------------------------------------------------------------------------------------------------


def evaluate(node: Node, scope: Scope) -> Value:
    match node.kind:
        case "literal":
            return node.value
        case "context":
            if node.value not in scope.contexts:
                raise ExpressionError(f"{node.value} is not available here")
            return scope.contexts[node.value]
        case "call":
            return _call(node, scope)
        case "not":
            return not is_true(evaluate(node.children[0], scope))
        case "filter":
            return _elements(evaluate(node.children[0], scope))
        case "index":
            return _index(*(evaluate(child, scope) for child in node.children))
        case "&&" | "||":
            return _first(node.children, scope, is_truth=node.kind == "||")
    left, right = (evaluate(child, scope) for child in node.children)
    return _compare(node.kind, left, right)


def _first(operands: Sequence[Node], scope: Scope, *, is_truth: bool) -> Value:
    """The value of the first operand that decides `||` (a true one) or `&&` (a false one), or else of the last."""
    for operand in operands[:-1]:
        value = evaluate(operand, scope)
        if is_true(value) == is_truth:
            return value
    return evaluate(operands[-1], scope)


def is_met(condition: Node, scope: Scope) -> bool:
    return is_true(evaluate(condition, scope))


def render(text: str, scope: Scope) -> str:
    """Replace the expressions of a text by their values, which are not evaluated again."""
    rendered = "".join(
        part if isinstance(part, str) else to_text(evaluate(part, scope)) for part in parse_template(text)
    )
    return _limited(rendered)


def is_true(value: Value) -> bool:
    if isinstance(value, float) and math.isnan(value):
        return False
    return not is_primitive(value) or bool(value)


def is_primitive(value: Value) -> bool:
    return not isinstance(value, list | dict)


def to_number(value: Value) -> float:
    match value:
        case None:
            return 0.0
        case int() | float():
            return _to_float(value)
        case str():
            return _parse_number(value.strip())
    return math.nan


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        # An integer of JSON may have any size.
        return math.inf if value > 0 else -math.inf


def _parse_number(text: str) -> float:
    if not text:
        return 0.0
    if text[:2] in _INTEGERS:
        digits, base = _INTEGERS[text[:2]]
        number = int(text[2:], base) if digits.fullmatch(text[2:]) else _MAX_UNSIGNED + 1
        # GitHub reads the bits of a signed integer of 32 bits: 0xffffffff is -1 (ExpressionUtility.ParseNumber).
        return math.nan if number > _MAX_UNSIGNED else float((number ^ _SIGN_BIT) - _SIGN_BIT)
    return float(text) if _NUMBER.fullmatch(text) else math.nan


def to_text(value: Value) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case int() | float():
            return _number_text(_to_float(value))
        case list():
            return "Array"
    return "Object"


def _number_text(number: float) -> str:
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    # .NET's G15, without a sign for zero.
    return f"{number or 0.0:.15g}".upper()


def _compare(operator: str, left: Value, right: Value) -> bool:
    match operator:
        case "==":
            return is_equal(left, right)
        case "!=":
            return not is_equal(left, right)
    if isinstance(left, str) and isinstance(right, str):
        left, right = _fold(left), _fold(right)
    else:
        # A comparison with NaN is false.
        left, right = to_number(left), to_number(right)
    return bool(_COMPARISONS[operator](left, right))


_COMPARISONS: dict[str, Callable[[Value, Value], bool]] = {
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
}


def is_equal(left: Value, right: Value) -> bool:
    """GitHub's loose equality: texts ignore case, other types are compared as numbers."""
    if isinstance(left, str) and isinstance(right, str):
        return _fold(left) == _fold(right)
    if is_primitive(left) and is_primitive(right):
        return to_number(left) == to_number(right)
    return left is right


def _fold(text: str) -> str:
    """The text for comparisons that ignore case, as .NET does in OrdinalIgnoreCase: 'ß' is not 'SS'."""
    if text.isascii():
        return text.upper()
    pairs = ((each, each.upper()) for each in text)
    return "".join(upper if len(upper) == 1 and upper.isascii() == each.isascii() else each for each, upper in pairs)


def _elements(value: Value) -> _Filtered:
    """The result of `.*`. On the result of another, it applies to each element."""
    if isinstance(value, _Filtered):
        return _Filtered(inner for item in value for inner in _members(item))
    return _Filtered(_members(value))


def _members(value: Value) -> list[Value]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def _index(value: Value, key: Value) -> Value:
    if isinstance(value, _Filtered):
        return _Filtered(found for item in value for found in _member(item, key))
    return next(iter(_member(value, key)), None)


def _member(value: Value, key: Value) -> list[Value]:
    """The value with this name or number, in a list that is empty if none exists."""
    if isinstance(value, Mapping) and is_primitive(key):
        name = to_text(key)
        if name in value or isinstance(value, CaseSensitive):
            return [value[name]] if name in value else []
        return [item for other, item in value.items() if _fold(str(other)) == _fold(name)][:1]
    if isinstance(value, list):
        number = to_number(key)
        return [value[int(number)]] if 0 <= number < len(value) else []
    return []


# Functions ----------------------------------------------------------------------------------------------------------


def _call(node: Node, scope: Scope) -> Value:
    name = str(node.value)
    if name in STATUS_FUNCTIONS:
        if name not in scope.status:
            raise ExpressionError(f"{name}() is not available here")
        return scope.status[name]()
    if name == "case":
        return _case(node.children, scope)
    result = _FUNCTIONS[name](*(evaluate(child, scope) for child in node.children))
    return _limited(result) if isinstance(result, str) else result


def _limited(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise ExpressionError(f"its value is longer than {MAX_TEXT} characters")
    return text


def _case(arguments: Sequence[Node], scope: Scope) -> Value:
    """The value after the first condition that is true, or else the last argument. Others are not evaluated."""
    for condition, value in zip(arguments[:-1:2], arguments[1::2], strict=True):
        met = evaluate(condition, scope)
        if not isinstance(met, bool):
            raise ExpressionError(f"a condition of case() is {to_text(met) or 'empty'!r} instead of true or false")
        if met:
            return evaluate(value, scope)
    return evaluate(arguments[-1], scope)


def _contains(where: Value, item: Value) -> bool:
    if isinstance(where, list):
        return any(is_equal(each, item) for each in where)
    return _compare_texts(lambda text, part: part in text, where, item)


def _compare_texts(compare: Callable[[str, str], bool], *values: Value) -> bool:
    """Compare the texts of two values, ignoring case. Arrays and objects have none, so the result is false."""
    first, second = (_fold(to_text(value)) for value in values)
    return all(map(is_primitive, values)) and compare(first, second)


def _format(template: Value, *values: Value) -> str:
    length = 0

    def replaced(found: re.Match[str]) -> str:
        nonlocal length
        if found[0] in {"{{", "}}"}:
            return found[0][0]
        if found[1] is None or int(found[1]) >= len(values):
            raise ExpressionError(f"format() has no value for {found[0]!r}")
        text = to_text(values[int(found[1])])
        length += len(text)
        if length > MAX_TEXT:
            raise ExpressionError(f"the result of format() is longer than {MAX_TEXT} characters")
        return text

    return _FORMAT.sub(replaced, to_text(template))


def _join(values: Value, separator: Value = ",") -> str:
    if isinstance(values, list):
        return (to_text(separator) if is_primitive(separator) else ",").join(to_text(item) for item in values)
    return to_text(values) if is_primitive(values) else ""


def _from_json(value: Value) -> Value:
    try:
        return json.loads(to_text(value))
    except (ValueError, RecursionError) as error:
        raise ExpressionError(f"fromJSON(): {error}") from None


def _to_json(value: Value) -> str:
    try:
        return _json_text(value, "\n")
    except RecursionError as error:
        raise ExpressionError(f"toJSON(): {error}") from None


def _json_text(value: Value, line: str) -> str:
    """The value as JSON with GitHub's numbers, `1E+20` for example. `line` begins a line of the value's parent."""
    inner = f"{line}  "
    if value and isinstance(value, list):
        return f"[{','.join(f'{inner}{_json_text(item, inner)}' for item in value)}{line}]"
    if value and isinstance(value, Mapping):
        items = ((json.dumps(str(name), ensure_ascii=False), item) for name, item in value.items())
        return f"{{{','.join(f'{inner}{name}: {_json_text(item, inner)}' for name, item in items)}{line}}}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return to_text(value)
    return json.dumps(value, ensure_ascii=False)


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "contains": _contains,
    "startswith": lambda text, start: _compare_texts(str.startswith, text, start),
    "endswith": lambda text, end: _compare_texts(str.endswith, text, end),
    "format": _format,
    "join": _join,
    "tojson": _to_json,
    "fromjson": _from_json,
}
#: Minimum and maximum number of arguments.
_ARGUMENTS = {
    **dict.fromkeys(("contains", "startswith", "endswith"), (2, 2)),
    **dict.fromkeys(("tojson", "fromjson"), (1, 1)),
    **dict.fromkeys(STATUS_FUNCTIONS, (0, 0)),
    "case": (3, 255),
    "format": (1, 255),
    "join": (1, 2),
}
