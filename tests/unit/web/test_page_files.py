"""Page files: complete, self-contained, and without ways to turn a name into markup."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from remuda.domain.instance import State
from remuda.domain.reporting.timeline import MachinePhase
from remuda.web.dashboard.serialize import PHASES

PAGE = files("remuda.web.dashboard").joinpath("page")
TEXTS = {item.name: item.read_text() for item in PAGE.iterdir()}
SCRIPTS = sorted(name for name in TEXTS if name.endswith(".js"))
PAGES = sorted(name for name in TEXTS if name.endswith(".html"))
#: Functions and attributes that turn text into markup or code.
UNSAFE = (
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "createContextualFragment", "DOMParser"),
    *("eval(", "new Function", "setHTML", "srcdoc", 'setAttribute("style"', "javascript:"),
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_insert_names_as_text_only(script: str) -> None:
    assert [name for name in UNSAFE if name in TEXTS[script]] == []


@pytest.mark.parametrize("name", PAGES)
def test_pages_have_no_inline_script_or_style(name: str) -> None:
    text = TEXTS[name]
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", text) == []
    assert all(body.strip() == "" for body in re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL))
    assert text.startswith('<!doctype html>\n<html lang="en">')


def test_pages_use_no_external_resources() -> None:
    for name, text in TEXTS.items():
        found = [url for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", text) if "www.w3.org" not in url]
        assert found == [], name
    wanted = {path for text in TEXTS.values() for path in re.findall(r'(?:src|href)="/([\w.]+)"', text)}
    wanted |= {path for text in TEXTS.values() for path in re.findall(r'from "\./([\w.]+)"', text)}
    assert wanted <= set(TEXTS)
    assert set(TEXTS) - wanted == {"index.html", "login.html"}


def test_phases_of_page_and_domain_are_equal() -> None:
    (listed,) = re.findall(r"export const PHASES = \[(.*?)\]", TEXTS["model.js"])
    assert (
        re.findall(r'"(\w+)"', listed) == [phase.value for phase in PHASES] == [phase.value for phase in MachinePhase]
    )
    (renamed,) = re.findall(r"const PHASE_OF = \{(.*?)\}", TEXTS["model.js"])
    words = {*re.findall(r"(\w+):", renamed), *(phase.value for phase in MachinePhase)}
    assert {state.value for state in State} <= words


def test_every_element_used_by_scripts_exists() -> None:
    used = {name for script in SCRIPTS for name in re.findall(r'find\("([\w-]+)"\)', TEXTS[script])}
    existing = set(re.findall(r'\sid="([\w-]+)"', TEXTS["index.html"]))
    assert used <= existing


def test_docs_show_every_picture_and_none_is_large() -> None:
    docs = Path(__file__).parents[3] / "docs"
    shown = set(re.findall(r"\.\./pictures/([\w.-]+)", (docs / "howto" / "dashboard.md").read_text()))
    sizes = {file.name: file.stat().st_size for file in (docs / "pictures").iterdir()}
    assert shown == set(sizes)
    assert all(size < 200_000 for size in sizes.values())
