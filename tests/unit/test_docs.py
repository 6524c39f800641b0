"""The documentation names only what exists: files, headings, commands, flags, variables, parameters and alarms."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from remuda.cli.main import app
from remuda.config.declaration import variable
from remuda.config.settings import SETTINGS
from remuda.deployment.template import template

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")])
#: Pages that users follow. Changelog and records of decisions may name what exists no more.
GUIDES = [page for page in PAGES if page.parent.name in {"howto", "tutorial", "reference"} or page.name == "README.md"]
#: Files that define variables and names: programs, stack, examples, and the tests that the guides describe.
SOURCES = (
    *("src/**/*.py", "src/**/*.sh", "deploy/**/*.sh", "deploy/*.yml", "deploy/workflows/*.yml"),
    *("tests/smoke/*.py", "tests/support/**/*.py", "Makefile"),
)

_FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
#: A command up to the end of the shell's command or of its comment.
_COMMAND = re.compile(r"(?:^|[`$(= ])remuda ((?!\|)[a-z][a-z-]*)((?:[^`|&;#>\n]|\\\n)*)", re.MULTILINE)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"REMUDA_[A-Z0-9_]*[A-Z0-9]")
_PARAMETER = re.compile(r"(?:--parameter |`)([A-Z][a-z][A-Za-z0-9]+)=")
#: A name such as `AlarmTopicArn`: of a parameter, an output, a metric, a call of AWS or a message of GitHub. Not the
#: action of a policy, such as `tag:GetResources`.
_NAME = re.compile(r"(?<!:)\b[A-Z][a-z]+(?:[A-Z][a-z0-9]+)+\b")
#: Metrics whose names the functions make from states and reasons.
_MADE_NAMES = ("Instances", "Refused", "Retired")
#: A dimension of metrics, not a parameter.
_COMMAND_DIMENSION = "Command"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Ids of the headings, as GitHub makes them."""
    text = prose(page)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "") for title in _HEADING.findall(text)]
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), link


def test_pictures_of_the_readme_exist() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert pictures == ["docs/overview.svg"]
    assert (ROOT / pictures[0]).is_file()


def test_metadata_of_the_package_is_complete() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # The build adds the addresses, if it knows the repository.
    assert "urls" not in project
    least = project["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {least}" in project["classifiers"]
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(project["classifiers"])
    assert {"github-actions", "ec2"} <= set(project["keywords"])


def test_readme_is_short_and_answers_the_questions_of_a_new_user() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == [
        "Two modes",
        "Try it",
        "How long a job waits",
        "When not to use it",
        "On AWS",
        "Documentation",
        "Limits",
    ]
    assert len(text.splitlines()) < 120
    assert len(re.search(r"## Try it.*?```sh\n(.*?)```", text, re.DOTALL)[1].splitlines()) == 2  # type: ignore[index]
    assert len(re.search(r"## On AWS.*?```sh\n(.*?)```", text, re.DOTALL)[1].splitlines()) == 2  # type: ignore[index]


def test_readme_leads_to_every_guide() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in _LINK.findall(prose(ROOT / "README.md"))}
    assert not {name_of(page) for page in ROOT.glob("docs/howto/*.md") if page not in linked}


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Commands and their flags: lines of code blocks, and inline code."""
    text = page.read_text(encoding="utf-8")
    shell = [block.partition("\n")[2].rpartition("\n")[0] for block in _FENCE.findall(text)]
    found = []
    for code in (*shell, *_CODE.findall(prose(page))):
        for name, rest in _COMMAND.findall(code):
            found.append((name, _FLAG.findall(re.sub(r"'[^']*'", "''", rest))))
    return found


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_commands_and_flags_exist(page: Path) -> None:
    for name, flags in commands(page):
        if name == "agent":  # machines start it, with its own parser
            continue
        assert name in app.commands, f"remuda {name}"
        known = {option for parameter in app.commands[name].params for option in parameter.opts}
        assert set(flags) <= {*known, "--help"}, f"remuda {name}"


def test_commands_are_found_in_blocks_and_in_text() -> None:
    found = commands(ROOT / "docs" / "howto" / "quarantine.md")
    assert ("quarantine", ["--backend", "--pool", "--for", "--reason"]) in found
    assert ("destroy", []) in found


@cache
def found_in_sources(pattern: re.Pattern[str]) -> frozenset[str]:
    files = (file for name in SOURCES for file in ROOT.glob(name))
    return frozenset(found for file in files for found in pattern.findall(file.read_text(encoding="utf-8")))


@cache
def parameters() -> frozenset[str]:
    return frozenset(template()["Parameters"])


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_variables_exist(page: Path) -> None:
    known = {*found_in_sources(_VARIABLE), *(variable(name) for name in SETTINGS)}
    assert set(_VARIABLE.findall(page.read_text(encoding="utf-8"))) <= known


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_parameters_of_the_stack_exist(page: Path) -> None:
    assert set(_PARAMETER.findall(page.read_text(encoding="utf-8"))) <= {*parameters(), _COMMAND_DIMENSION}


@pytest.mark.parametrize("page", [page for page in GUIDES if page.parent.name == "howto"], ids=name_of)
def test_names_in_guides_occur_in_the_sources(page: Path) -> None:
    found = {name for code in _CODE.findall(prose(page)) for name in _NAME.findall(code)}
    assert {name for name in found if not name.startswith(_MADE_NAMES)} <= found_in_sources(_NAME)


def test_every_alarm_of_the_stack_is_documented() -> None:
    resources = template()["Resources"].values()
    alarms = [item["Properties"]["AlarmName"] for item in resources if item["Type"] == "AWS::CloudWatch::Alarm"]
    names = {name["Fn::Sub"].removeprefix("remuda-${Pool}-") for name in alarms}
    page = (ROOT / "docs" / "howto" / "alarms-and-budget.md").read_text(encoding="utf-8")
    section = page.partition("## Alarms of the stack")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)) == names


def test_walks_of_the_architecture_name_functions_that_exist() -> None:
    """Each hop names a file and, right after it, a function or method in it."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walks = text[text.index("## Three walks") : text.index("## Agent")]
    hops = re.findall(r"`([a-z_/]+\.py)` `(\w+)`", walks)
    assert len(hops) >= walks.count("\n1.") + 20
    missing = [
        f"{path} {name}"
        for path, name in hops
        if not re.search(rf"def {name}\b", (ROOT / "src" / "remuda" / path).read_text(encoding="utf-8"))
    ]
    assert not missing
