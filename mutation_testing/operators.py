"""Mutation operators: the changes that are tried at each expression and statement of a module.

Texts for people, logs, assertions, annotations and docstrings are not changed. Default values and decorators are not
changed either.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mutation_testing.recording import ROOT, SOURCES
from simulation.mutation import MutationError, NodeKind, NodePlace, Replacement, scope

_BOUNDARIES: Mapping[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
}
_NEGATIONS: Mapping[type[ast.cmpop], ast.cmpop] = {
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
    ast.Lt: ast.GtE(),
    ast.LtE: ast.Gt(),
    ast.Gt: ast.LtE(),
    ast.GtE: ast.Lt(),
}
_ARITHMETIC: Mapping[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.Div(),
    ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(),
}
_OTHER_FUNCTION = {"min": "max", "max": "min", "any": "all", "all": "any"}
#: Functions whose code is not changed: texts for people.
_TEXT_FUNCTIONS = frozenset({"__repr__", "__str__", "__rich__"})
#: Names of loggers, of their methods, and of calls whose arguments serve people or type checkers only.
_TEXT_CALLS = frozenset({"debug", "info", "warning", "error", "exception", "log", "cast", "TypeVar", "warn", "_log"})
#: Fields of nodes that hold types, names and parameters.
_SKIPPED_FIELDS = frozenset({"annotation", "returns", "decorator_list", "bases", "type_params"})

#: Modules of the agent that only run as root in their own processes, with real mounts and namespaces. Their tests
#: take seconds each, in other processes, which mutants do not reach.
_MACHINE_ONLY = frozenset({"sandbox.py", "enter_sandbox.py", "mounts.py"})


@dataclass(frozen=True, kw_only=True)
class GeneratedMutant:
    operator: str
    #: `number` is not yet set; see `located`.
    replacement: Replacement
    file: Path
    #: Lines of the changed code.
    first_line: int
    last_line: int
    #: Number among mutants that are otherwise equal.
    ordinal: int = 0

    @property
    def package(self) -> str:
        return self.replacement.module.split(".")[1]

    @cached_property
    def id(self) -> str:
        """Stable as long as function and changed code stay as they are."""
        found = self.replacement
        parts = (found.module, found.function, self.operator, found.old, found.new, str(self.ordinal))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]

    @property
    def is_in_function(self) -> bool:
        return bool(self.replacement.function)

    @property
    def place(self) -> str:
        return f"{self.file.relative_to(ROOT) if self.file.is_relative_to(ROOT) else self.file}:{self.first_line}"

    def mentions(self) -> Iterator[tuple[Path, range]]:
        """Lines of all modules with the name of the changed constant or field, which is outside functions."""
        tree = ast.parse(self.file.read_text(encoding="utf-8"))
        names: set[str] = set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            if node.lineno <= self.first_line <= (node.end_lineno or 0) or (node in tree.body and used & names):
                # The constant, or a later one that is computed from it.
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if not names:
            return
        pattern = re.compile(rf"\b({'|'.join(names)})\b")
        for file in (path for folder in SOURCES for path in folder.rglob("*.py")):
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
                if pattern.search(line):
                    yield file, range(number, number + 1)

    def located(self) -> Replacement:
        """The replacement of exactly this place, if its code occurs more than once in the function."""
        tree = ast.parse(self.file.read_text(encoding="utf-8"))
        matches = [
            place for place in self.replacement.find(scope(tree, self.replacement)) if isinstance(place, NodePlace)
        ]
        found = [number for number, place in enumerate(matches) if _line(place) == self.first_line]
        if not found:
            raise MutationError(f"{self.place}: {self.replacement.old!r} was not found again")
        # Equal code on one line: any of them, but each ordinal another one.
        return replace(self.replacement, number=found[self.ordinal % len(found)])


def _line(place: NodePlace) -> int:
    value = getattr(place.parent, place.field)
    node = value if place.part is None else value[place.part][0]
    return int(node.lineno)


@dataclass(frozen=True, slots=True)
class _Change:
    operator: str
    kind: NodeKind
    node: ast.expr | ast.stmt | ast.keyword
    new: ast.AST | None


def mutants_of(file: Path, signatures: Signatures, source: Path = ROOT / "src") -> list[GeneratedMutant]:
    """All mutants of a module in the folder `source`."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    module = ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
    counts = Counter[tuple[str, str, str, str]]()
    found = []
    for function, change in _changes(tree, "", signatures):
        old = ast.unparse(change.node)
        new = ast.unparse(change.new) if change.new is not None else ""
        if old == new:
            continue
        key = (function, change.operator, old, new)
        found.append(
            GeneratedMutant(
                operator=change.operator,
                replacement=Replacement(change.kind, module, function, old, new),
                file=file,
                first_line=change.node.lineno,
                last_line=change.node.end_lineno or change.node.lineno,
                ordinal=counts[key],
            )
        )
        counts[key] += 1
    return found


def all_mutants() -> list[GeneratedMutant]:
    files = [file for folder in SOURCES for file in sorted(folder.rglob("*.py")) if file.name not in _MACHINE_ONLY]
    signatures = read_signatures(files)
    return [mutant for file in files for mutant in mutants_of(file, signatures)]


def sample(mutants: Sequence[GeneratedMutant], size: int, seed: int) -> list[GeneratedMutant]:
    """A random sample with the same number of each package. It changes little when the code changes little."""
    packages = sorted({mutant.package for mutant in mutants})
    chosen: list[GeneratedMutant] = []
    for package in packages:
        ours = [mutant for mutant in mutants if mutant.package == package]
        ours.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.id}".encode()).digest())
        chosen += ours[: -(-size // len(packages))]
    return chosen


@dataclass(frozen=True, slots=True)
class Signatures:
    """Properties of functions and classes by name; only those that all with the same name have in common."""

    #: Parameters or fields with a default.
    defaults: Mapping[str, frozenset[str]]
    #: Functions whose first two positional parameters have the same type.
    swappable: frozenset[str]


def read_signatures(files: Sequence[Path]) -> Signatures:
    defaults: dict[str, frozenset[str]] = {}
    swappable: dict[str, bool] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: frozenset[str]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                positional = [*arguments.posonlyargs, *arguments.args]
                with_default = positional[len(positional) - len(arguments.defaults) :]
                pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                names = frozenset(item.arg for item in [*with_default, *(item for item, value in pairs if value)])
                types = [ast.unparse(item.annotation) for item in positional if item.annotation]
                swappable[node.name] = swappable.get(node.name, True) and len(types) > 1 and types[0] == types[1]
            elif isinstance(node, ast.ClassDef):
                fields = (item for item in node.body if isinstance(item, ast.AnnAssign) and item.value is not None)
                names = frozenset(item.target.id for item in fields if isinstance(item.target, ast.Name))
            else:
                continue
            defaults[node.name] = defaults.get(node.name, names) & names
    return Signatures(defaults, frozenset(name for name, same in swappable.items() if same))


def _changes(node: ast.AST, function: str, signatures: Signatures, prefix: str = "") -> Iterator[tuple[str, _Change]]:
    """Changes below `node`, each with the outermost function that it is in."""
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED_FIELDS:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_skipped(child, node):
                continue
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not function:
                inside = f"{prefix}{child.name}"
                is_class = isinstance(child, ast.ClassDef)
                for part in child.body:
                    wrapper = ast.Module(body=[part], type_ignores=[])
                    yield from _changes(wrapper, "" if is_class else inside, signatures, f"{inside}.")
                continue
            for change in _changes_of(child, node, name, signatures):
                yield function, change
            yield from _changes(child, function, signatures, prefix)


def _is_skipped(node: ast.AST, parent: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.arguments() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name in _TEXT_FUNCTIONS:
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in _TEXT_CALLS:
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))) if name in _TEXT_CALLS:
            return True
        case ast.Call() if isinstance(parent, ast.Raise):
            return True
        case _:
            return False


def _changes_of(node: ast.AST, parent: ast.AST, field: str, signatures: Signatures) -> Iterator[_Change]:
    if isinstance(node, ast.expr):
        if isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            for operator, new in _expressions(node, signatures):
                yield _Change(operator, NodeKind.EXPRESSION, node, new)
            if field in {"test", "ifs"} and not isinstance(node, ast.Compare | ast.UnaryOp):
                yield _Change("negate condition", NodeKind.EXPRESSION, node, ast.UnaryOp(ast.Not(), node))
    elif isinstance(node, ast.stmt):
        yield from _statements(node)
    elif (
        isinstance(node, ast.keyword)
        and isinstance(parent, ast.Call)
        and node.arg in signatures.defaults.get(_name(parent.func), ())
    ):
        yield _Change("remove argument", NodeKind.ARGUMENT, node, None)


def _expressions(node: ast.expr, signatures: Signatures) -> Iterator[tuple[str, ast.expr]]:  # noqa: C901, PLR0912 - one case per operator
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            if changed := _BOUNDARIES.get(type(operator)):
                yield "boundary", ast.Compare(left, [changed], [right])
            yield "negate comparison", ast.Compare(left, [_NEGATIONS[type(operator)]], [right])
        case ast.Compare(left=left, ops=operators, comparators=others):
            for number, operator in enumerate(operators):
                if changed := _BOUNDARIES.get(type(operator)):
                    ops = [*operators[:number], changed, *operators[number + 1 :]]
                    yield "boundary", ast.Compare(left, ops, others)
        case ast.BoolOp(op=operator, values=values):
            yield "and/or", ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
            for number in range(len(values)):
                rest = [*values[:number], *values[number + 1 :]]
                yield "remove operand", rest[0] if len(rest) == 1 else ast.BoolOp(operator, rest)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "remove not", operand
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
            texts = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
            if not any(isinstance(side, texts) or _is_text(side) for side in (left, right)):
                yield "arithmetic", ast.BinOp(left, _ARITHMETIC[type(operator)], right)
        case ast.Constant(value=bool(value)):
            yield "boolean", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant + 1", ast.Constant(value + 1)
            if value:
                yield "constant - 1", ast.Constant(value - 1)
        case ast.List(elts=[_, *_]):
            yield "empty collection", ast.List([], ast.Load())
        case ast.Tuple(elts=[_, *_]):
            yield "empty collection", ast.Tuple([], ast.Load())
        case ast.Set():
            yield "empty collection", ast.Call(ast.Name("set", ast.Load()), [], [])
        case ast.Dict(values=[_, *_]):
            yield "empty collection", ast.Dict([], [])
        case ast.ListComp():
            yield "empty collection", ast.List([], ast.Load())
        case ast.DictComp():
            yield "empty collection", ast.Dict([], [])
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if name in _OTHER_FUNCTION:
            yield "other function", ast.Call(ast.Name(_OTHER_FUNCTION[name], ast.Load()), arguments, keywords)
        case ast.Call(func=function, args=[ast.expr() as one, ast.expr() as two, *rest]) if (
            _name(function) in signatures.swappable
        ):
            yield "swap arguments", ast.Call(function, [two, one, *rest], node.keywords)
        case _:
            return


def _name(function: ast.expr) -> str:
    """The last part of a function's name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _statements(node: ast.stmt) -> Iterator[_Change]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield _Change("remove statement", NodeKind.STATEMENTS, node, None)
        case (
            ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
            | ast.AnnAssign(target=ast.Attribute(), value=ast.expr())
        ):
            yield _Change("remove statement", NodeKind.STATEMENTS, node, None)
        case ast.Return(value=ast.expr() as value) if not (
            isinstance(value, ast.Constant) and value.value in {None, False}
        ):
            # False is as false as None; it becomes True by another operator.
            yield _Change("return None", NodeKind.STATEMENTS, node, ast.Return(ast.Constant(None)))
        case _:
            return
