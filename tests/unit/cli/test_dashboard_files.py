"""The page's files: all there, none fetched from elsewhere, and no way for a name to become markup."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from remuda.domain.instance import State
from remuda.domain.reporting.timeline import Phase
from remuda.web.dashboard.serialize import PHASES

PAGE = files("remuda.web.dashboard").joinpath("page")
TEXTS = {item.name: item.read_text() for item in PAGE.iterdir()}
SCRIPTS = sorted(name for name in TEXTS if name.endswith(".js"))
PAGES = sorted(name for name in TEXTS if name.endswith(".html"))
#: Where text could become markup, or code.
DOORS = (
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "createContextualFragment", "DOMParser"),
    *("eval(", "new Function", "setHTML", "srcdoc", 'setAttribute("style"', "javascript:"),
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_put_names_in_as_text_alone(name: str) -> None:
    assert [door for door in DOORS if door in TEXTS[name]] == []


@pytest.mark.parametrize("name", PAGES)
def test_pages_hold_no_script_and_no_style_of_their_own(name: str) -> None:
    text = TEXTS[name]
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", text) == []
    assert all(body.strip() == "" for body in re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL))
    assert text.startswith('<!doctype html>\n<html lang="en">')


def test_nothing_comes_from_elsewhere() -> None:
    for name, text in TEXTS.items():
        found = [url for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", text) if "www.w3.org" not in url]
        assert found == [], name
    wanted = {path for text in TEXTS.values() for path in re.findall(r'(?:src|href)="/([\w.]+)"', text)}
    wanted |= {path for text in TEXTS.values() for path in re.findall(r'from "\./([\w.]+)"', text)}
    assert wanted <= set(TEXTS)
    assert set(TEXTS) - wanted == {"index.html", "login.html"}


def test_the_page_and_the_records_have_the_same_words() -> None:
    (listed,) = re.findall(r"export const PHASES = \[(.*?)\]", TEXTS["model.js"])
    assert re.findall(r'"(\w+)"', listed) == [phase.value for phase in PHASES] == [phase.value for phase in Phase]
    (renamed,) = re.findall(r"const PHASE_OF = \{(.*?)\}", TEXTS["model.js"])
    words = {*re.findall(r"(\w+):", renamed), *(phase.value for phase in Phase)}
    assert {state.value for state in State} <= words


def test_every_element_that_scripts_ask_for_is_there() -> None:
    asked = {name for script in SCRIPTS for name in re.findall(r'find\("([\w-]+)"\)', TEXTS[script])}
    there = set(re.findall(r'\sid="([\w-]+)"', TEXTS["index.html"]))
    assert asked <= there


def test_the_docs_show_every_picture_and_none_is_large() -> None:
    docs = Path(__file__).parents[3] / "docs"
    shown = set(re.findall(r"\.\./pictures/([\w.-]+)", (docs / "howto" / "dashboard.md").read_text()))
    there = {file.name: file.stat().st_size for file in (docs / "pictures").iterdir()}
    assert shown == set(there)
    assert all(size < 200_000 for size in there.values())
