"""Evaluator of a Terraform module: the resources that it plans for given variables, without Terraform.

Covers the expressions and functions that the module uses; anything else is an error. Names of variables, locals,
resources, data sources and attributes must be declared, as `terraform validate` demands it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import hcl2
from lark import Token, Tree

#: Resource type and attributes to the attributes that AWS computes.
Computed = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
Node = Tree[Token]
_META = {"count", "for_each", "depends_on", "lifecycle", "provider"}
_PUNCTUATION = {"new_line_or_comment"}


class HclError(ValueError):
    """The module is wrong, or uses something that the evaluator does not know."""


@dataclass(frozen=True, kw_only=True)
class HclBlock:
    kind: str
    labels: tuple[str, ...]
    attributes: Mapping[str, Node]
    blocks: Sequence[HclBlock]

    def of(self, kind: str) -> list[HclBlock]:
        return [each for each in self.blocks if each.kind == kind]


def _parts(node: Node) -> list[Node | Token]:
    return [each for each in node.children if not (isinstance(each, Tree) and each.data in _PUNCTUATION)]


def _trees(node: Node) -> list[Node]:
    return [each for each in _parts(node) if isinstance(each, Tree)]


def _text(node: Node) -> str:
    return "".join(str(each) for each in node.scan_values(lambda _: True))


@cache
def parse(text: str) -> HclBlock:
    return _block("", (), _trees(hcl2.parses_to_tree(text))[0])


def _block(kind: str, labels: tuple[str, ...], body: Node) -> HclBlock:
    attributes: dict[str, Node] = {}
    blocks = []
    for each in _trees(body):
        head, *rest = _trees(each)
        if each.data == "attribute":
            if _text(head) in attributes:
                raise HclError(f"{_text(head)} is set twice")
            attributes[_text(head)] = rest[0]
        else:
            *names, inner = rest
            blocks.append(_block(_text(head), tuple(_text(name).strip('"') for name in names), inner))
    return HclBlock(kind=kind, labels=labels, attributes=attributes, blocks=blocks)


# Values -------------------------------------------------------------------------------------------------------------


def as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:.15g}"
    if not isinstance(value, str):
        raise HclError(f"{value!r} is no text")
    return value


def _regex(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if not found:
        raise HclError(f"{text!r} does not match {pattern!r}")
    return found.group()


def _one(values: Sequence[Any]) -> Any:
    if len(values) > 1:
        raise HclError("one() got several values")
    return values[0] if values else None


def _flatten(values: Sequence[Any]) -> list[Any]:
    return [item for each in values for item in (_flatten(each) if isinstance(each, list) else [each])]


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "alltrue": all,
    "base64encode": lambda text: base64.b64encode(text.encode()).decode(),
    "concat": lambda *lists: [item for each in lists for item in each],
    "contains": lambda values, value: value in values,
    "flatten": _flatten,
    "join": lambda between, values: between.join(map(as_text, values)),
    "jsonencode": lambda value: json.dumps(value, separators=(",", ":")),
    "keys": sorted,
    "length": len,
    "lookup": lambda values, key, default: values.get(key, default),
    "merge": lambda *maps: {key: value for each in maps for key, value in each.items()},
    "one": _one,
    "regex": _regex,
    "replace": lambda text, old, new: text.replace(old, new),
    "tostring": as_text,
    "toset": lambda values: sorted(set(values)),
    "trimprefix": lambda text, start: text.removeprefix(start),
    "trimsuffix": lambda text, end: text.removesuffix(end),
}
_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    "&&": lambda left, right: left and right,
    "||": lambda left, right: left or right,
    ">": lambda left, right: left > right,
    "<": lambda left, right: left < right,
}
_ESCAPES = {"\\n": "\n", "\\t": "\t", '\\"': '"', "\\\\": "\\"}


# Module -------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class TerraformModule:
    folder: Path
    blocks: Sequence[HclBlock]

    @classmethod
    def load(cls, folder: Path) -> TerraformModule:
        files = sorted(folder.glob("*.tf"))
        return cls(folder=folder, blocks=[block for file in files for block in parse(file.read_text("utf-8")).blocks])

    def of(self, kind: str) -> list[HclBlock]:
        return [each for each in self.blocks if each.kind == kind]

    @cached_property
    def variables(self) -> dict[str, HclBlock]:
        return {each.labels[0]: each for each in self.of("variable")}

    @cached_property
    def local_values(self) -> dict[str, Node]:
        return {name: node for each in self.of("locals") for name, node in each.attributes.items()}

    @cached_property
    def resources(self) -> dict[tuple[str, str], HclBlock]:
        return {(each.labels[0], each.labels[1]): each for each in self.of("resource")}

    @cached_property
    def moved(self) -> dict[str, str]:
        """Old addresses to new ones."""
        blocks = [each.attributes for each in self.of("moved")]
        return {_text(each["from"]): _text(each["to"]) for each in blocks}

    def references(self) -> set[str]:
        """The names that expressions refer to: `var.x`, `local.x`, `aws_sqs_queue.x`, `data.aws_region.x`."""
        found: set[str] = set()

        def visit(block: HclBlock) -> None:
            for node in block.attributes.values():
                for term in node.iter_subtrees():
                    path = _path(term) if term.data == "get_attr_expr_term" else []
                    if len(path) >= (3 if path[:1] == ["data"] else 2):
                        found.add(".".join(path[:3]))
            for inner in block.blocks:
                visit(inner)

        for block in self.blocks:
            visit(block)
        return found


def _path(node: Node) -> list[str]:
    """The names of a chain of attributes, such as `aws_x.y.arn`. Empty for a chain with an index."""
    if node.data == "get_attr_expr_term":
        inner, attribute = _trees(node)
        head = _path(inner)
        return [*head, _text(attribute).lstrip(".")] if head else []
    if node.data == "expr_term":
        trees = _trees(node)
        return _path(trees[0]) if len(trees) == 1 and _parts(node) == trees else []
    return [_text(node)] if node.data == "identifier" else []


@dataclass(kw_only=True)
class TerraformPlan:
    """Values of the module for given variables. `data` has the attributes of data sources by `type.name`."""

    module: TerraformModule
    given: Mapping[str, Any]
    data: Mapping[str, Mapping[str, Any]]
    computed: Computed
    _values: dict[str, Any] = field(default_factory=dict)

    # Results --------------------------------------------------------------------------------------------------------

    @cached_property
    def refusals(self) -> list[str]:
        """The messages of the validations that fail."""
        unknown = self.given.keys() - self.module.variables.keys()
        if unknown:
            raise HclError(f"no such variables: {', '.join(sorted(unknown))}")
        return [
            str(self._evaluate(rule.attributes["error_message"], {}))
            for block in self.module.variables.values()
            for rule in block.of("validation")
            if not self._evaluate(rule.attributes["condition"], {})
        ]

    def instances(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Type and attributes of every resource that is created."""
        return ((kind, made) for _, kind, made in self.addresses())

    def addresses(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Address, type and attributes of every resource that is created."""
        for kind, name in self.module.resources:
            made = self._resource(kind, name)
            if "for_each" in self.module.resources[kind, name].attributes:
                for key, each in made.items():
                    yield f'{kind}.{name}["{key}"]', kind, each
            elif isinstance(made, list):
                for index, each in enumerate(made):
                    yield f"{kind}.{name}[{index}]", kind, each
            else:
                yield f"{kind}.{name}", kind, made

    @cached_property
    def outputs(self) -> dict[str, Any]:
        return {each.labels[0]: self._evaluate(each.attributes["value"], {}) for each in self.module.of("output")}

    # Names ----------------------------------------------------------------------------------------------------------

    def _once(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]

    def _variable(self, name: str) -> Any:
        block = self.module.variables.get(name)
        if block is None:
            raise HclError(f"var.{name} is not declared")
        value = self.given.get(name)
        is_optional = "nullable" not in block.attributes
        if name not in self.given or (value is None and not is_optional):
            value = self._evaluate(block.attributes["default"], {})
        kind = _text(block.attributes["type"])
        if kind.startswith("object(") and value is not None:
            # Attributes of other names are dropped, missing optional ones are null.
            names = re.findall(r"(\w+) *=", kind)
            value = {
                each: value.get(each) if f"{each}=optional(" in kind.replace(" ", "") else value[each] for each in names
            }
        return value

    def _local(self, name: str) -> Any:
        if name not in self.module.local_values:
            raise HclError(f"local.{name} is not declared")
        return self._evaluate(self.module.local_values[name], {})

    def _resource(self, kind: str, name: str) -> Any:
        return self._once(f"{kind}.{name}", lambda: self._make(kind, name))

    def _make(self, kind: str, name: str) -> Any:
        block = self.module.resources.get((kind, name))
        if block is None:
            raise HclError(f"{kind}.{name} is not declared")
        if "count" in block.attributes:
            number = self._evaluate(block.attributes["count"], {})
            return [self._instance(kind, block, {"count": {"index": index}}) for index in range(number)]
        if "for_each" not in block.attributes:
            return self._instance(kind, block, {})
        every = self._evaluate(block.attributes["for_each"], {})
        items = every if isinstance(every, dict) else {each: each for each in every}
        return {
            key: self._instance(kind, block, {"each": {"key": key, "value": value}})
            for key, value in sorted(items.items())
        }

    def _instance(self, kind: str, block: HclBlock, names: Mapping[str, Any]) -> dict[str, Any]:
        made = self._body(block, names)
        return {**made, **self.computed(kind, made)}

    def _body(self, block: HclBlock, names: Mapping[str, Any]) -> dict[str, Any]:
        made = {key: self._evaluate(node, names) for key, node in block.attributes.items() if key not in _META}
        for inner in block.blocks:
            if inner.kind == "dynamic":
                label, (content,) = inner.labels[0], inner.of("content")
                every = self._evaluate(inner.attributes["for_each"], names)
                items = every.items() if isinstance(every, dict) else enumerate(every)
                bodies = [self._body(content, {**names, label: {"key": key, "value": value}}) for key, value in items]
                made.setdefault(label, []).extend(bodies)
            elif inner.kind not in _META:
                made.setdefault(inner.kind, []).append(self._body(inner, names))
        return made

    # Expressions ----------------------------------------------------------------------------------------------------

    def _evaluate(self, node: Node, names: Mapping[str, Any]) -> Any:
        evaluate = getattr(self, f"_on_{node.data}", None)
        if evaluate is None:
            raise HclError(f"unknown expression {node.data}: {_text(node)}")
        return evaluate(node, names)

    def _on_expr_term(self, node: Node, names: Mapping[str, Any]) -> Any:
        (inner,) = _trees(node)
        return self._evaluate(inner, names)

    def _on_identifier(self, node: Node, names: Mapping[str, Any]) -> Any:
        if _text(node) not in names:
            raise HclError(f"unknown name {_text(node)}")
        return names[_text(node)]

    def _on_literal_value(self, node: Node, _: Mapping[str, Any]) -> Any:
        return {"true": True, "false": False, "null": None}[_text(node)]

    def _on_int_lit(self, node: Node, _: Mapping[str, Any]) -> int:
        return int(_text(node))

    def _on_string(self, node: Node, names: Mapping[str, Any]) -> Any:
        parts = [self._part(_parts(each)[0], names) for each in _trees(node)]
        return "".join(map(as_text, parts))

    def _part(self, part: Node | Token, names: Mapping[str, Any]) -> Any:
        if isinstance(part, Tree):
            return self._evaluate(_trees(part)[0], names)
        if part.type == "STRING_CHARS":
            return re.sub(r"\\.", lambda found: _ESCAPES[found.group()], part)
        return part[1:]  # an escaped ${ or %{

    def _on_tuple(self, node: Node, names: Mapping[str, Any]) -> list[Any]:
        return [self._evaluate(each, names) for each in _trees(node)]

    def _on_object(self, node: Node, names: Mapping[str, Any]) -> dict[str, Any]:
        made = {}
        for element in _trees(node):
            key, value = _trees(element)
            (inner,) = _trees(key)
            path = _path(inner)
            made[path[0] if len(path) == 1 else self._evaluate(inner, names)] = self._evaluate(value, names)
        return made

    def _on_conditional(self, node: Node, names: Mapping[str, Any]) -> Any:
        condition, yes, no = _trees(node)
        return self._evaluate(yes if self._evaluate(condition, names) else no, names)

    def _on_unary_op(self, node: Node, names: Mapping[str, Any]) -> Any:
        value = self._evaluate(_trees(node)[0], names)
        return not value if str(_parts(node)[0]) == "!" else -value

    def _on_binary_op(self, node: Node, names: Mapping[str, Any]) -> Any:
        left, term = _trees(node)
        operator, right = _trees(term)
        # Both sides are evaluated: before Terraform 1.12, `&&` and `||` do that, too.
        return _OPERATORS[_text(operator)](self._evaluate(left, names), self._evaluate(right, names))

    def _on_function_call(self, node: Node, names: Mapping[str, Any]) -> Any:
        head, *rest = _trees(node)
        name, arguments = _text(head), _trees(rest[0]) if rest else []
        if name == "can":
            try:
                self._evaluate(arguments[0], names)
            except HclError:
                return False
            return True
        values = [self._evaluate(each, names) for each in arguments]
        if name == "templatefile":
            return self._template(Path(values[0]).read_text("utf-8"), values[1])
        if name in {"filebase64sha256", "filesha256"}:
            return f"digest of {values[0]}"
        if name not in _FUNCTIONS:
            raise HclError(f"unknown function {name}")
        return _FUNCTIONS[name](*values)

    def _template(self, text: str, names: Mapping[str, Any]) -> str:
        def filled(found: re.Match[str]) -> str:
            if found.group().startswith("$$"):
                return found.group()[1:]
            return as_text(self._evaluate(parse(f"x = {found[1]}\n").attributes["x"], names))

        return re.sub(r"\$?\$\{([^}]*)\}", filled, text)

    def _on_get_attr_expr_term(self, node: Node, names: Mapping[str, Any]) -> Any:
        path = _path(node)
        if path and path[0] not in names:
            return self._global(node, path, names)
        inner, attribute = _trees(node)
        return self._attribute(self._evaluate(inner, names), _text(attribute).lstrip("."), _text(node))

    def _global(self, node: Node, path: Sequence[str], names: Mapping[str, Any]) -> Any:
        if path[0] == "path":
            return str(self.module.folder)
        known = {"var": (2, self._variable), "local": (2, self._local)}
        size, get = known.get(path[0], (3 if path[0] == "data" else 2, None))
        if len(path) > size:
            inner, attribute = _trees(node)
            return self._attribute(self._evaluate(inner, names), _text(attribute).lstrip("."), _text(node))
        if get is not None:
            return self._once(".".join(path), lambda: get(path[1]))
        if path[0] == "data":
            return self.data[".".join(path[1:])]
        return self._resource(path[0], path[1])

    def _attribute(self, value: Any, name: str, shown: str) -> Any:
        if not isinstance(value, Mapping) or name not in value:
            raise HclError(f"{shown}: no attribute {name}")
        return value[name]

    def _on_index_expr_term(self, node: Node, names: Mapping[str, Any]) -> Any:
        inner, index = _trees(node)
        try:
            return self._evaluate(inner, names)[self._evaluate(_trees(index)[0], names)]
        except (KeyError, IndexError, TypeError) as error:
            raise HclError(f"{_text(node)}: {error!r}") from error

    def _on_full_splat_expr_term(self, node: Node, names: Mapping[str, Any]) -> list[Any]:
        inner, splat = _trees(node)
        value = self._evaluate(inner, names)
        found = value if isinstance(value, list) else [] if value is None else [value]
        for each in _trees(splat):
            found = [self._attribute(item, _text(each).lstrip("."), _text(node)) for item in found]
        return found

    def _on_for_tuple_expr(self, node: Node, names: Mapping[str, Any]) -> list[Any]:
        intro, value, *condition = _trees(node)
        return [self._evaluate(value, inner) for inner in self._loop(intro, condition, names)]

    def _on_for_object_expr(self, node: Node, names: Mapping[str, Any]) -> dict[str, Any]:
        intro, key, value, *condition = _trees(node)
        return {
            self._evaluate(key, inner): self._evaluate(value, inner) for inner in self._loop(intro, condition, names)
        }

    def _loop(self, intro: Node, condition: Sequence[Node], names: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        *variables, source = _trees(intro)
        every = self._evaluate(source, names)
        pairs = sorted(every.items()) if isinstance(every, dict) else list(enumerate(every))
        for key, value in pairs:
            found = dict(zip(map(_text, variables), (key, value) if len(variables) == 2 else (value,), strict=True))
            inner = {**names, **found}
            if not condition or self._evaluate(_trees(condition[0])[0], inner):
                yield inner
