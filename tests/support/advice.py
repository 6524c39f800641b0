"""The commands that the product advises: in the texts of its source, and in what it prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

import remuda
from remuda.cli.main import app

SOURCE = Path(remuda.__file__).parent
#: Programs of their own, which no user starts.
_NOT_COMMANDS = frozenset({"agent"})
#: Words of prose after the name of the project.
_PROSE = frozenset({"dashboard session"})
_COMMAND = re.compile(r"(?<![\w=./-])remuda ([a-z][a-z-]*)(?![\w.-])")
_WORD = re.compile(r"""\s+('[^']*'|"[^"]*"|[^\s'"]+)""")
#: An argument of a command, as opposed to the next word of the sentence.
_VALUE = re.compile(r".*[0-9./{].*")


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each command in a text, without the program. Raises `click.UsageError` if there is no such command.

    A command ends before the first word that is neither an option nor a value of it: `run remuda refresh, and …`.
    """
    for found in _COMMAND.finditer(text):
        name = found[1]
        if name in _NOT_COMMANDS or any(text[found.start(1) :].startswith(prose) for prose in _PROSE):
            continue
        if name not in app.commands:
            raise click.UsageError(f"there is no command {name}, as in {text[found.start() :][:80]!r}")
        command = app.commands[name]
        yield [name, *_arguments(command, text[found.end() :])]


def _arguments(command: click.Command, rest: str) -> Iterator[str]:
    params = {option: param for param in command.params for option in param.opts}
    free = sum(isinstance(param, click.Argument) for param in command.params)
    takes_value = False
    while word := _WORD.match(rest):
        is_quoted = word[1][0] in "'\""
        bare = word[1][1:-1] if is_quoted else word[1].rstrip(";,:.)")
        rest = rest[word.end() :]
        if takes_value:
            takes_value = False
        elif bare.startswith("--"):
            option = params.get(bare)
            if option is None and bare != "--help":
                raise click.UsageError(f"{command.name} has no option {bare}")
            takes_value = isinstance(option, click.Option) and not option.is_flag
        elif free and _VALUE.fullmatch(bare):
            free -= 1
        else:
            return
        yield bare
        if rest[:1] in {"'", '"'} or (bare != word[1] and not is_quoted):
            return


def advised_in_source() -> dict[str, list[str]]:
    """The commands in the texts of the source, by the place of the text. Values in braces are expressions."""
    return {
        f"{path.relative_to(SOURCE)}:{node.lineno} {' '.join(words)}": words
        for path in sorted(SOURCE.rglob("*.py"))
        for node in _texts(ast.parse(path.read_text(encoding="utf-8")))
        for words in _commands_of(node)
    }


def _commands_of(node: ast.expr) -> Iterator[list[str]]:
    if isinstance(node, ast.Call):
        words = [f"{{{_source_of(each)}}}" if not isinstance(each, ast.Constant) else each.value for each in node.args]
        # The first argument is the settings. A command that is computed is that of another text.
        if not str(words[1]).startswith("{"):
            yield from commands_in(f"remuda {' '.join(map(str, words[1:]))}")
    else:
        yield from commands_in(_text_of(node))


def _texts(tree: ast.Module) -> Iterator[ast.expr]:
    """Texts that are no docstrings, and calls of `command_line`."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            skipped |= {each for each in ast.walk(node) if isinstance(each, ast.Constant | ast.JoinedStr)} - {node}
            yield node
        elif isinstance(node, ast.expr) and (_is_text(node) or _is_command_line(node)):
            yield node


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_command_line(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "command_line"


def _text_of(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text_of, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{_source_of(node.value)}}}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _source_of(node: ast.expr) -> str:
    """An expression as one word without quotation marks."""
    return re.sub(r"[\s'\"]", "", ast.unparse(node))
