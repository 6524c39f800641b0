"""Expressions of workflows: parser, evaluator and templates. Pure.

Semantics of "Evaluate expressions in workflows and actions" (https://docs.github.com/actions/reference/workflows-and-actions/expressions)
and of actions/runner, src/Sdk/DTExpressions2. Expressions are untrusted: they are parsed, never executed as code.
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
OPEN, CLOSE = "${{", "}}"
STATUS_FUNCTIONS = frozenset({"success", "failure", "always", "cancelled"})

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>'(?:[^']|'')*')
    |(?P<number>[-+]?(?:0x[0-9a-fA-F]+|0o[0-7]+|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)(?![\w.]))
    |(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<operator>&&|\|\||==|!=|<=|>=|[<>!()\[\],.*])
    )""",
    re.VERBOSE,
)
_CONSTANTS = {"true": True, "false": False, "null": None, "NaN": math.nan, "Infinity": math.inf}
#: Binary operators from the lowest precedence to the highest.
_PRECEDENCE = (("||",), ("&&",), ("==", "!="), ("<", "<=", ">", ">="))
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
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
    children: tuple["Node", ...] = ()

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
            node = Node(operator, None, (node, self._binary(level + 1)))
        return node

    def _unary(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(f"it is nested deeper than {MAX_DEPTH} levels")
        if self._peek() == "!":
            self._at += 1
            node = Node("not", None, (self._unary(),))
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
                return Node("call", text.lower(), self._arguments(text))
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
                node = Node("filter", None, (node,))
            elif operator == ".":
                kind, name = self._take()
                if kind != "name":
                    raise ExpressionError(f"expected a name after '.' instead of {name!r}")
                node = Node("index", None, (node, Node("literal", name)))
            else:
                node = Node("index", None, (node, self._binary(0)))
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
    left = evaluate(node.children[0], scope)
    if node.kind == "&&":
        return evaluate(node.children[1], scope) if is_true(left) else left
    if node.kind == "||":
        return left if is_true(left) else evaluate(node.children[1], scope)
    return _compare(node.kind, left, evaluate(node.children[1], scope))


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
    return isinstance(value, list | dict) or bool(value)


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
    if text[:2] in {"0x", "0o"}:
        try:
            return float(int(text, 0))
        except (ValueError, OverflowError):
            return math.nan
    if text in {"Infinity", "-Infinity"}:
        return math.inf if text == "Infinity" else -math.inf
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
        left, right = left.upper(), right.upper()
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
        return left.upper() == right.upper()
    if isinstance(left, list | dict) or isinstance(right, list | dict):
        return left is right
    return to_number(left) == to_number(right)


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
        found = [_member(item, key) for item in value]
        return _Filtered(item for item in found if item is not None)
    return _member(value, key)


def _member(value: Value, key: Value) -> Value:
    """A value by its name or number; null if none exists."""
    if isinstance(value, Mapping):
        name = to_text(key)
        if name in value or isinstance(value, CaseSensitive):
            return value.get(name)
        return next((item for other, item in value.items() if str(other).upper() == name.upper()), None)
    if isinstance(value, list):
        number = to_number(key)
        if number >= 0 and number < len(value):
            return value[int(number)]
    return None


# Functions ----------------------------------------------------------------------------------------------------------


def _call(node: Node, scope: Scope) -> Value:
    name = str(node.value)
    if name in STATUS_FUNCTIONS:
        if name not in scope.status:
            raise ExpressionError(f"{name}() is not available here")
        return scope.status[name]()
    result = _FUNCTIONS[name](*(evaluate(child, scope) for child in node.children))
    return _limited(result) if isinstance(result, str) else result


def _limited(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise ExpressionError(f"its value is longer than {MAX_TEXT} characters")
    return text


def _contains(where: Value, item: Value) -> bool:
    if isinstance(where, list):
        return any(is_equal(each, item) for each in where)
    if isinstance(where, Mapping):
        return False
    return to_text(item).upper() in to_text(where).upper()


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
        return to_text(separator).join(to_text(item) for item in values)
    return to_text(values)


def _from_json(value: Value) -> Value:
    try:
        return json.loads(to_text(value))
    except (ValueError, RecursionError) as error:
        raise ExpressionError(f"fromJSON(): {error}") from None


def _to_json(value: Value) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, indent=2, ensure_ascii=False)


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "contains": _contains,
    "startswith": lambda text, start: to_text(text).upper().startswith(to_text(start).upper()),
    "endswith": lambda text, end: to_text(text).upper().endswith(to_text(end).upper()),
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
    "format": (1, 255),
    "join": (1, 2),
}
