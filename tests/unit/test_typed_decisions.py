"""Texts for people decide nothing: the domain and the control plane never match, compare or take apart such a text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import remuda

SOURCE = Path(remuda.__file__).parent
FILES = sorted(file for part in ("domain", "controlplane") for file in (SOURCE / part).rglob("*.py"))
#: Names of variables, attributes, parameters and keys that hold a text for people.
TEXT_NAMES = frozenset(
    {
        *("detail", "error_message", "explanation", "reason", "retire_detail", "retire_reason", "retire_text"),
        *("script_detail", "stop_reason", "text", "what", "why"),
    }
)
#: Names that also hold something else: a text only as an attribute (`error.message`), a parsed input as a variable.
INPUT_NAMES = frozenset({"text", "what"})
TEXT_SUFFIXES = ("_detail", "_reason", "_why", "_text")
STRING_METHODS = frozenset(
    {
        *("count", "endswith", "find", "index", "partition", "removeprefix", "removesuffix", "replace", "rfind"),
        *("rpartition", "rsplit", "split", "splitlines", "startswith"),
    }
)
PATTERN_METHODS = frozenset({"findall", "finditer", "fullmatch", "match", "search", "split", "sub", "subn"})


def is_text(node: ast.expr) -> bool:
    """Whether an expression is a text for people, judged by its name. Slices and variants of one are texts, too."""
    match node:
        case ast.Name(id=name):
            return name not in INPUT_NAMES and (name in TEXT_NAMES or name.endswith(TEXT_SUFFIXES))
        case ast.Attribute(attr="message", value=ast.Name(id=owner)):
            return owner in {"error", "failure", "conflict"}
        case ast.Attribute(attr=name):
            return name in TEXT_NAMES or name.endswith(TEXT_SUFFIXES)
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key in TEXT_NAMES or key.endswith(TEXT_SUFFIXES)
        case ast.Subscript(value=inner, slice=ast.Slice()):
            return is_text(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="lower" | "upper" | "strip" | "casefold")):
            return is_text(inner)
        case ast.Call(func=ast.Name(id="str"), args=[inner]):
            return is_text(inner)
        case ast.NamedExpr(value=inner):
            return is_text(inner)
        case ast.BoolOp(values=values):
            return any(map(is_text, values))
        case ast.IfExp(body=body, orelse=orelse):
            return is_text(body) or is_text(orelse)
    return False


def is_nonempty_literal(node: ast.expr) -> bool:
    """Whether an expression is a non-empty text or a constant: a comparison with it reads the text."""
    match node:
        case ast.Constant(value=str(text)):
            return bool(text)
        case ast.JoinedStr():
            return True
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            return any(map(is_nonempty_literal, items))
        case ast.Attribute(attr="value"):
            return True
        case ast.Name(id=name):
            return name.isupper()
    return False


def findings(tree: ast.AST) -> Iterator[int]:
    """Yield the lines on which a text for people is matched, compared or taken apart."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for op, a, b in zip(ops, [left, *comparators], comparators, strict=False):
                    contains = isinstance(op, ast.In | ast.NotIn)
                    equals = isinstance(op, ast.Eq | ast.NotEq)
                    if (
                        (contains and is_text(b))
                        or (contains and is_text(a) and is_nonempty_literal(b) and not isinstance(b, ast.Name))
                        or (equals and is_text(a) and is_nonempty_literal(b))
                        or (equals and is_text(b) and is_nonempty_literal(a))
                    ):
                        yield node.lineno
            case ast.Call(func=ast.Attribute(value=target, attr=method), args=args):
                if (method in STRING_METHODS and is_text(target)) or (
                    method in PATTERN_METHODS and any(map(is_text, args))
                ):
                    yield node.lineno
            case ast.Call(func=ast.Name(id="float" | "int"), args=[argument]) if is_text(argument):
                yield node.lineno
            case ast.Match(subject=subject) if is_text(subject):
                yield node.lineno


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_decision_reads_a_text(file: Path) -> None:
    lines = [f"{file}:{line}" for line in findings(ast.parse(file.read_text(encoding="utf-8")))]
    assert not lines, "use an enum or a field for the decision; texts are for people"


def test_the_sources_are_found() -> None:
    assert {"instance.py", "apply.py", "selection.py", "records.py"} <= {file.name for file in FILES}


@pytest.mark.parametrize(
    "code",
    [
        "'credential refused' in report.detail",
        "REFUSED in report.detail",
        "reason.startswith('used ')",
        "reason.split(':')[0]",
        "next(kind for begin, kind in KINDS.items() if reason.startswith(begin))",
        "record.retire_reason == 'expired'",
        "record.retire_reason == Cause.EXPIRED.value",
        "record.retire_reason == NEVER_REUSED",
        "why != f'{status} it'",
        "why in ('drained', 'expired')",
        "_DURATION.match(detail)",
        "re.search('took (.*) s', report.detail)",
        "_DURATION.sub('', detail[:100])",
        "entry.why.removeprefix('released ')",
        "str(event.reason).lower() == 'too old'",
        "document['detail'].endswith('gone')",
        "error.message.startswith('no route')",
        "float(detail)",
        "(report.detail if report else '').partition(';')",
        "outcome.detail not in outcome.why",
    ],
)
def test_reading_a_text_is_found(code: str) -> None:
    assert list(findings(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "record.retire_reason is RetireReason.EXPIRED",
        "event.reason in RETIREMENTS",
        "event.reason not in row.reasons",
        "if why:\n    raise ValueError(why)",
        "why == ''",
        "detail[:100]",
        "'; '.join(reasons)",
        "_SCOPE.fullmatch(scope)",
        "name.startswith(prefix)",
    ],
)
def test_other_uses_are_allowed(code: str) -> None:
    assert not list(findings(ast.parse(code)))
