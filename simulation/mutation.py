"""Replacement of code in named functions: on syntax trees, and at import in a separate process.

Patterns are compared with the syntax tree of one function, so layout and comments do not matter. A pattern must match
exactly once. `...` matches any expression, `f(...)` a call with any arguments, and `...` as a body any statements.

`python -m simulation.mutation REPLACEMENTS MODULE [ARGUMENT...]` runs a module with replacements given as JSON. This
module imports only the standard library: what it imports cannot be replaced.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

#: Fields of syntax tree nodes that patterns ignore.
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_params"})


class MutationError(Exception):
    """The code to replace does not exist, exists more than once, or the new code does not fit in its place."""


class NodeKind(StrEnum):
    EXPRESSION = "expression"
    #: One or more statements that follow one another. Replaced by an empty text, they are removed.
    STATEMENTS = "statements"
    #: A keyword argument of a call, as `name=value`. Replaced by an empty text, it is removed.
    ARGUMENT = "argument"
    #: An entry of a dictionary display, as `key: value`.
    ENTRY = "entry"


@dataclass(frozen=True, slots=True)
class Replacement:
    kind: NodeKind
    module: str
    #: Qualified name of a function or method in the module, for example `WriteCondition.is_met_by`.
    function: str
    old: str
    new: str

    def apply(self, tree: ast.Module) -> None:
        """Replace the match in `tree`."""
        places = list(self.find(scope(tree, self)))
        if len(places) != 1:
            raise MutationError(f"{self.module}:{self.function}: {len(places)} matches for {self.old!r}, expected one")
        places[0].put(_parse(self.new, self.kind) if self.new else [])
        ast.fix_missing_locations(tree)

    def find(self, root: ast.AST) -> Iterator[NodePlace | _Entry]:
        """The matches in a function."""
        pattern = _parse(self.old, self.kind)
        for parent in ast.walk(root):
            for name, value in ast.iter_fields(parent):
                if isinstance(value, list):
                    for start in range(len(value) - len(pattern) + 1):
                        if all(_matches(*pair) for pair in zip(pattern, value[start:], strict=False)):
                            yield NodePlace(parent, name, slice(start, start + len(pattern)))
                elif isinstance(value, ast.AST) and len(pattern) == 1 and _matches(pattern[0], value):
                    yield NodePlace(parent, name, None)
            if self.kind is NodeKind.ENTRY and isinstance(parent, ast.Dict):
                for number, entry in enumerate(zip(parent.keys, parent.values, strict=True)):
                    if _matches(pattern, [*entry]):
                        yield _Entry(parent, number)


@dataclass(frozen=True, slots=True)
class NodePlace:
    """One field of a node, or a slice of it if the field is a list."""

    parent: ast.AST
    field: str
    part: slice | None

    def put(self, nodes: list[ast.AST]) -> None:
        if self.part is None:
            (node,) = nodes
            _copy_context(getattr(self.parent, self.field), node)
            setattr(self.parent, self.field, node)
            return
        values = getattr(self.parent, self.field)
        for old, new in zip(values[self.part], nodes, strict=False):
            _copy_context(old, new)
        values[self.part] = nodes
        if not values and self.field in {"body", "orelse", "finalbody"}:
            values.append(ast.Pass())


@dataclass(frozen=True, slots=True)
class _Entry:
    parent: ast.Dict
    number: int

    def put(self, nodes: list[ast.AST]) -> None:
        key, value = nodes
        assert isinstance(key, ast.expr)  # noqa: S101 - by construction
        assert isinstance(value, ast.expr)  # noqa: S101 - by construction
        self.parent.keys[self.number], self.parent.values[self.number] = key, value


def _copy_context(old: ast.AST, new: ast.AST) -> None:
    """Let the new node be assigned to if the old one was."""
    if hasattr(old, "ctx") and hasattr(new, "ctx"):
        new.ctx = old.ctx


def _parse(source: str, kind: NodeKind) -> list[ast.AST]:
    if kind is NodeKind.EXPRESSION:
        return [ast.parse(source, mode="eval").body]
    if kind is NodeKind.ARGUMENT:
        call = ast.parse(f"f({source})", mode="eval").body
        assert isinstance(call, ast.Call)  # noqa: S101 - by construction
        return [*call.keywords]
    if kind is NodeKind.ENTRY:
        display = ast.parse(f"{{{source}}}", mode="eval").body
        assert isinstance(display, ast.Dict)  # noqa: S101 - by construction
        return [*filter(None, display.keys), *display.values]
    # In a function, for `return` and `await`.
    (function,) = ast.parse("async def f():\n" + "".join(f"    {line}\n" for line in source.splitlines())).body
    assert isinstance(function, ast.AsyncFunctionDef)  # noqa: S101 - by construction
    return [*function.body]


def _matches(pattern: object, node: object) -> bool:
    if _is_wildcard(pattern) and isinstance(node, ast.expr):
        return True
    if isinstance(pattern, list):
        if len(pattern) == 1 and isinstance(pattern[0], ast.Expr) and _is_wildcard(pattern[0].value):
            return isinstance(node, list)
        return (
            isinstance(node, list)
            and len(pattern) == len(node)
            and all(_matches(*pair) for pair in zip(pattern, node, strict=True))
        )
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call) and [*map(_is_wildcard, pattern.args)] == [True]:
        return _matches(pattern.func, node.func)
    if isinstance(pattern, ast.AST):
        names = (name for name in pattern._fields if name not in _IGNORED_FIELDS)
        return all(_matches(getattr(pattern, name, None), getattr(node, name, None)) for name in names)
    return pattern == node


def _is_wildcard(node: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def scope(tree: ast.Module, wanted: Replacement) -> ast.AST:
    """The one function of this qualified name."""
    found = [node for name, node in definitions(tree) if name == wanted.function]
    if len(found) != 1:
        raise MutationError(f"{wanted.module} has {len(found)} functions {wanted.function}, expected one")
    return found[0]


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """All functions and methods with their qualified names."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
            name += "."
        yield from definitions(child, name)


def _check_names(replacement: Replacement, mutated: ast.Module, package_words: frozenset[str]) -> None:
    """New code may use only names of its module and attributes of the package: a wrong one would raise an error, and
    that is another bug than the intended one.
    """
    names, attributes = set(dir(builtins)), set[str]()
    for node in ast.walk(mutated):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.alias(name=name, asname=renamed):
                names.add(renamed or name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case _:
                pass
    used = set[str]()
    for root in _parse(replacement.new, replacement.kind) if replacement.new else []:
        for node in ast.walk(root):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    used.add(name)
                case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                    attributes.add(name)
                case _:
                    pass
    if unknown := (used - names) | (attributes - package_words):
        raise MutationError(f"{replacement.module}: unknown {', '.join(sorted(unknown))} in {replacement.new!r}")


@cache
def _words_of_package(name: str) -> frozenset[str]:
    spec = find_spec(name)
    folders = (spec.submodule_search_locations if spec else None) or []
    files = (path for folder in folders for path in Path(folder).rglob("*.py"))
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))


def mutated_tree(source: str, replacements: Sequence[Replacement]) -> ast.Module:
    tree = ast.parse(source)
    for replacement in replacements:
        replacement.apply(tree)
    return tree


def check(replacements: Sequence[Replacement]) -> None:
    """Raise `MutationError` if the code to replace does not exist or the new code uses unknown names."""
    for module in dict.fromkeys(item.module for item in replacements):
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise MutationError(f"there is no module {module}")
        source = Path(spec.origin).read_text(encoding="utf-8")
        ours = [item for item in replacements if item.module == module]
        tree = mutated_tree(source, ours)
        for item in ours:
            _check_names(item, tree, _words_of_package(module.partition(".")[0]))
        compile(tree, spec.origin, "exec")


class _MutatingLoader(SourceFileLoader):
    """Compiles a module with its replacements, without the bytecode cache."""

    replacements: Sequence[Replacement] = ()

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - of the base class
        source = self.get_data(self.path).decode()
        code: CodeType = compile(mutated_tree(source, self.replacements), self.path, "exec", dont_inherit=True)
        return code


class _MutatingFinder(MetaPathFinder):
    def __init__(self, replacements: Sequence[Replacement]) -> None:
        self._replacements = replacements
        self.pending = {item.module for item in replacements}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.pending:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        loader = _MutatingLoader(fullname, spec.origin)
        loader.replacements = [item for item in self._replacements if item.module == fullname]
        spec.loader = loader
        self.pending.discard(fullname)
        return spec


def command(replacements: Sequence[Replacement], module: str, *arguments: str) -> list[str]:
    """The command line of a process that runs `module` with these replacements."""
    document = json.dumps([asdict(item) for item in replacements])
    return [sys.executable, "-m", "simulation.mutation", document, module, *arguments]


def main(arguments: Sequence[str]) -> None:
    document, module, *rest = arguments
    fields: list[dict[str, Any]] = json.loads(document)
    finder = _MutatingFinder([Replacement(**{**item, "kind": NodeKind(item["kind"])}) for item in fields])
    if loaded := finder.pending & set(sys.modules):
        raise MutationError(f"imported before they could be changed: {', '.join(sorted(loaded))}")
    sys.meta_path.insert(0, finder)
    sys.argv = [module, *rest]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        if finder.pending:
            raise MutationError(f"never imported: {', '.join(sorted(finder.pending))}")


if __name__ == "__main__":
    main(sys.argv[1:])
