"""Change log: a client that applies the changes, however seldom, ends with the contents of the snapshot."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remuda.web.dashboard import serialize
from remuda.web.dashboard.serialize import ChangeLog

Kinds = dict[str, dict[str, Any]]

STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("123"), st.one_of(st.none(), st.integers(0, 3)), st.booleans()),
    max_size=40,
)


def kinds(text: str) -> Kinds:
    return {name: items for name, items in json.loads(text).items() if name not in {"version", "tag"}}


def apply_changes(known: Kinds, text: str) -> None:
    for kind, items in kinds(text).items():
        for name, value in items.items():
            if value is None:
                known.get(kind, {}).pop(name, None)
            else:
                known.setdefault(kind, {})[name] = value


def without_empty(known: Kinds) -> Kinds:
    return {kind: items for kind, items in known.items() if items}


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, intervals=st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_a_slow_client_gets_the_newest_text_of_every_item(
    steps: list[tuple[str, str, int | None, bool]], intervals: list[int]
) -> None:
    log = ChangeLog(process_id="x")
    known: Kinds = {}
    at = 0
    for number, (kind, name, value, commit) in enumerate(steps):
        if value is None:
            log.drop(kind, name)
        else:
            log.put(kind, name, str(value))
        if commit:
            log.commit()
        if commit and number % (intervals[number % len(intervals)] + 1) == 0:
            apply_changes(known, log.changes(at))
            at = log.version
    log.commit()
    apply_changes(known, log.changes(at))
    assert without_empty(known) == kinds(log.snapshot())


def test_unchanged_items_do_not_make_a_version() -> None:
    log = ChangeLog(process_id="x")
    log.put("a", "1", "5")
    assert log.commit()
    log.put("a", "1", "5")
    log.drop("a", "2")
    assert not log.commit()
    assert log.tag == "x-1"


@pytest.mark.parametrize("tag", ["", "x", "y-1", "x-2", "x--1", "x-1.0", "x-" + "9" * 40, "x-٣"])
def test_unknown_tags_have_no_version(tag: str) -> None:
    log = ChangeLog(process_id="x")
    log.put("a", "1", "5")
    log.commit()
    assert log.version_of(tag) is None
    assert log.version_of("x-1") == 1


def test_old_removals_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialize, "MAX_TOMBSTONES", 4)
    log = ChangeLog(process_id="x")
    for number in range(12):
        log.put("a", str(number), "1")
        log.commit()
        log.drop("a", str(number))
        log.commit()
    assert log.version_of("x-1") is None
    recent = log.version_of(f"x-{log.version - 1}")
    assert recent is not None
    assert kinds(log.changes(recent)) == {"a": {"11": None}}


def test_names_are_escaped() -> None:
    log = ChangeLog(process_id="x")
    name = 'a"},"facts":{"error":"injected\n'
    log.put("instances", name, "1")
    log.commit()
    assert kinds(log.snapshot()) == {"instances": {name: 1}}
    assert "\n" not in log.snapshot()
