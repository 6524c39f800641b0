"""The board: whoever follows it, however slowly, ends with what the snapshot says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remuda.web.dashboard import change_log as boards
from remuda.web.dashboard.change_log import Board

Kinds = dict[str, dict[str, Any]]

STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("123"), st.one_of(st.none(), st.integers(0, 3)), st.booleans()),
    max_size=40,
)


def kinds(text: str) -> Kinds:
    return {name: items for name, items in json.loads(text).items() if name not in {"version", "tag"}}


def follow(known: Kinds, text: str) -> None:
    for kind, items in kinds(text).items():
        for name, value in items.items():
            if value is None:
                known.get(kind, {}).pop(name, None)
            else:
                known.setdefault(kind, {})[name] = value


def without_empty(known: Kinds) -> Kinds:
    return {kind: items for kind, items in known.items() if items}


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, asks=st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_a_client_that_asks_seldom_sees_the_newest_of_everything(
    steps: list[tuple[str, str, int | None, bool]], asks: list[int]
) -> None:
    board = Board(life="x")
    known: Kinds = {}
    at = 0
    for number, (kind, name, value, commit) in enumerate(steps):
        if value is None:
            board.drop(kind, name)
        else:
            board.put(kind, name, str(value))
        if commit:
            board.commit()
        if commit and number % (asks[number % len(asks)] + 1) == 0:
            follow(known, board.changes(at))
            at = board.version
    board.commit()
    follow(known, board.changes(at))
    assert without_empty(known) == kinds(board.snapshot())


def test_what_does_not_change_makes_no_version() -> None:
    board = Board(life="x")
    board.put("a", "1", "5")
    assert board.commit()
    board.put("a", "1", "5")
    board.drop("a", "2")
    assert not board.commit()
    assert board.tag == "x-1"


@pytest.mark.parametrize("tag", ["", "x", "y-1", "x-2", "x--1", "x-1.0", "x-" + "9" * 40, "x-٣"])
def test_what_is_of_another_life_or_no_version_cannot_be_continued_from(tag: str) -> None:
    board = Board(life="x")
    board.put("a", "1", "5")
    board.commit()
    assert board.version_of(tag) is None
    assert board.version_of("x-1") == 1


def test_removals_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "TOMBSTONES", 4)
    board = Board(life="x")
    for number in range(12):
        board.put("a", str(number), "1")
        board.commit()
        board.drop("a", str(number))
        board.commit()
    assert board.version_of("x-1") is None
    recent = board.version_of(f"x-{board.version - 1}")
    assert recent is not None
    assert kinds(board.changes(recent)) == {"a": {"11": None}}


def test_names_from_outside_stay_in_their_quotes() -> None:
    board = Board(life="x")
    name = 'a"},"facts":{"trouble":"planted\n'
    board.put("instances", name, "1")
    board.commit()
    assert kinds(board.snapshot()) == {"instances": {name: 1}}
    assert "\n" not in board.snapshot()
