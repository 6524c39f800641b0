"""The example of docs/howto/public-repositories.md: its sets are valid, and its expression chooses the right one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml

from remuda.domain.resources import Tier
from remuda.domain.runner_set import RunnerSet, parse_runner_sets
from remuda.domain.trust import trust_of
from remuda.fake_github.fake_runner.expressions import Scope, render

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "public-repositories.md"
REPOSITORY = "acme/app"


def example(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


def sets() -> dict[str, RunnerSet]:
    documents = tomllib.loads(example("toml"))["runner-sets"]
    return {item.name: item for item in parse_runner_sets(documents, default_scope=REPOSITORY, zone_of=ZoneInfo)}


def pull_request(head: str | None) -> dict[str, Any]:
    repo = {"full_name": head} if head else None
    return {"repository": {"full_name": REPOSITORY}, "pull_request": {"number": 7, "head": {"repo": repo}}}


PAYLOADS = {
    "push": ("push", {}, "large"),
    "schedule": ("schedule", {}, "large"),
    "own branch": ("pull_request", pull_request(REPOSITORY), "large"),
    "own branch, other case": ("pull_request", pull_request("Acme/App"), "large"),
    "fork": ("pull_request", pull_request("stranger/app"), "forks"),
    "deleted fork": ("pull_request", pull_request(None), "forks"),
}


@pytest.mark.parametrize(("event", "payload", "expected"), PAYLOADS.values(), ids=PAYLOADS)
def test_the_expression_leads_each_event_to_the_set_that_may_serve_it(
    event: str, payload: dict[str, Any], expected: str
) -> None:
    workflow = yaml.safe_load(example("yaml"))
    github = {"event_name": event, "event": payload, "repository": REPOSITORY}
    label = render(workflow["jobs"]["test"]["runs-on"], Scope({"github": github}))
    assert [item.name for item in sets().values() if {label} <= set(item.labels)] == [expected]
    trust = trust_of(event, payload).tier
    assert sets()[expected].trust is trust


def test_a_fork_that_asks_for_the_trusted_set_is_refused() -> None:
    trusted, untrusted = sets()["large"], sets()["forks"]
    assert trusted.trust is Tier.TRUSTED
    assert trusted.strict
    assert untrusted.trust is Tier.UNTRUSTED
