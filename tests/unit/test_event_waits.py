"""No wake-up is lost: an event is cleared before what it announces is looked at, never after.

A task that clears an event after its work forgets what was announced during the work, and sleeps although something is
due. Two forms are safe: `await event.wait()` directly followed by `event.clear()`, and a loop that begins with
`event.clear()`, or clears it before its first await, and looks at everything each time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "remuda"
#: Where a lost wake-up lets a job wait.
FOLDERS = ("controlplane", "agent")
_LOOPS = (ast.While, ast.For, ast.AsyncFor)
_AWAITS = (ast.Await, ast.AsyncWith, ast.AsyncFor)


def _cleared(statement: ast.stmt) -> str:
    """The object of a statement `x.clear()`, or an empty text."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Attribute):
        return ""
    return ast.unparse(call.func.value) if call.func.attr == "clear" else ""


def _waits_for(node: ast.AST) -> set[str]:
    """The objects of all calls `x.wait()` in a node, and those that are handed to a helper which waits."""
    found = set()
    for call in (item for item in ast.walk(node) if isinstance(item, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "wait" and not call.args:
            found.add(ast.unparse(call.func.value))
        elif isinstance(call.func, ast.Attribute) and "wait" in call.func.attr:
            found |= {ast.unparse(item) for item in call.args}
    return found


def _has_await(nodes: list[ast.stmt]) -> bool:
    return any(isinstance(item, _AWAITS) for node in nodes for item in ast.walk(node))


def _blocks(tree: ast.AST) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """Blocks of asynchronous functions, with their owners. In other functions nothing can happen in between."""
    functions = (item for item in ast.walk(tree) if isinstance(item, ast.AsyncFunctionDef))
    for node in (item for function in functions for item in ast.walk(function)):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield node, block


def lost_wake_ups(source: str) -> list[str]:
    """Events that are cleared too late, with the line."""
    tree = ast.parse(source)
    waited = {name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef) for name in _waits_for(node)}
    found = []
    for owner, block in _blocks(tree):
        for at, statement in enumerate(block):
            name = _cleared(statement)
            if name not in waited:
                continue
            before = block[:at]
            waits = [number for number, item in enumerate(before) if name in _waits_for(item)]
            since = before[waits[-1] + 1 :] if waits else before
            begins = bool(waits) or isinstance(owner, _LOOPS)
            if not begins or _has_await(since):
                found.append(f"line {statement.lineno}: {name}")
    return found


def test_no_event_is_cleared_after_the_work_that_it_announces():
    files = [file for folder in FOLDERS for file in sorted((SOURCE / folder).rglob("*.py"))]
    lost = {str(file.relative_to(SOURCE)): found for file in files if (found := lost_wake_ups(file.read_text("utf-8")))}
    assert not lost
    cleared = [name for file in files for name in _safe_clears(file.read_text("utf-8"))]
    assert len(cleared) >= 7


def _safe_clears(source: str) -> list[str]:
    tree = ast.parse(source)
    waited = {name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef) for name in _waits_for(node)}
    return [name for _, block in _blocks(tree) for item in block if (name := _cleared(item)) in waited]


@pytest.mark.parametrize(
    ("loop", "is_safe"),
    [
        ("await due.wait()\n  due.clear()\n  await work()", True),
        ("due.clear()\n  await work()\n  await due.wait()", True),
        ("await due.wait()\n  await work()\n  due.clear()", False),
        ("await work()\n  due.clear()\n  await due.wait()", False),
        ("await due.wait()\n  async with lock:\n    due.clear()", False),
        ("try:\n    await due.wait()\n  finally:\n    due.clear()", False),
    ],
)
def test_a_clear_after_the_work_is_found(loop: str, *, is_safe: bool):
    source = f"async def run(due):\n while True:\n  {loop}\n"
    assert (not lost_wake_ups(source)) is is_safe
