"""Repository patterns, and the claims of a workflow's identity."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.workflow_identity import (
    NotAllowed,
    RepositoryPattern,
    TokenRejected,
    WorkflowIdentity,
    authorize,
    parse_identity,
)

IDENTITY = WorkflowIdentity(
    repository="Acme/App",
    repository_id="34",
    owner="Acme",
    owner_id="12",
    run_id="1",
    run_attempt=1,
    event="push",
)
CLAIMS = {
    "repository": "acme/app",
    "repository_id": "34",
    "repository_owner": "acme",
    "repository_owner_id": "12",
    "run_id": "1",
    "run_attempt": "1",
    "event_name": "push",
    "jti": "x",
}


@pytest.mark.parametrize(
    "pattern", ["acme/app", "ACME/APP", "acme/*", "acme@12/app@34", "acme@12/*", "acme/app@34", "acme@12/app"]
)
def test_patterns_that_match(pattern: str) -> None:
    assert RepositoryPattern.parse(pattern).matches(IDENTITY)
    assert str(RepositoryPattern.parse(pattern)) == pattern


@pytest.mark.parametrize(
    "pattern",
    [
        *("acme/ap", "acme/app2", "acm/app", "acme2/*", "eve/app", "eve/*"),
        *("acme@13/app@34", "acme@12/app@35", "acme@1/*", "acme@123/*", "acme/app@3", "acme@34/app@12"),
    ],
)
def test_patterns_that_do_not_match(pattern: str) -> None:
    assert not RepositoryPattern.parse(pattern).matches(IDENTITY)


@pytest.mark.parametrize(
    "text", ["", "acme", "*", "*/app", "acme/ap*", "acme/*/x", "acme/app@*", "a@/b", "a b/c", "a/b\n"]
)
def test_texts_that_are_no_patterns(text: str) -> None:
    with pytest.raises(ValueError, match="not a repository"):
        RepositoryPattern.parse(text)


@given(st.text(), st.text())
def test_a_pattern_of_one_repository_matches_no_other(owner: str, name: str) -> None:
    other = replace(IDENTITY, repository=f"{owner}/{name}")
    matches = RepositoryPattern.parse("acme/app").matches(other)
    assert matches is (other.repository.lower() == "acme/app")


@pytest.mark.parametrize(
    ("listed", "strangers"),
    [
        # As `deploy` lists an organization and a repository.
        ("acme/* acme@12/*", {"owner_id": "13"}),
        ("acme/app acme@12/app@34", {"owner_id": "13"}),
        ("acme/app acme@12/app@34", {"repository_id": "35"}),
        ("acme/app acme@12/lib@99", {"owner_id": "13"}),
    ],
)
def test_an_id_applies_to_every_pattern_with_its_name(listed: str, strangers: dict[str, str]) -> None:
    """A renamed or deleted owner's name can be registered by someone else."""
    patterns = tuple(map(RepositoryPattern.parse, listed.split()))
    authorize(IDENTITY, pool="ci", scope="acme", repositories=patterns, environments=())
    with pytest.raises(NotAllowed, match="owner id"):
        authorize(
            replace(IDENTITY, **strangers),  # type: ignore[arg-type]
            pool="ci",
            scope="acme",
            repositories=patterns,
            environments=(),
        )


def test_an_organization_serves_only_its_own_repositories() -> None:
    anyone = tuple(map(RepositoryPattern.parse, ("acme/*", "eve/*")))
    authorize(IDENTITY, pool="ci", scope="acme", repositories=anyone, environments=())
    eve = replace(IDENTITY, repository="eve/app", owner="eve")
    with pytest.raises(NotAllowed, match="register in acme and cannot serve eve/app"):
        authorize(eve, pool="ci", scope="acme", repositories=anyone, environments=())


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_is_required_and_a_text(name: str) -> None:
    assert parse_identity(CLAIMS).owner == "acme"
    for changed in (
        {**CLAIMS, name: None},
        {**CLAIMS, name: 7},
        {**CLAIMS, name: [CLAIMS[name]]},
        {**CLAIMS, name: ""},
    ):
        with pytest.raises(TokenRejected, match=name.partition("_")[0]):
            parse_identity(changed)
    with pytest.raises(TokenRejected, match=f"no claim {name}"):
        parse_identity({key: value for key, value in CLAIMS.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repository", "eve/app"),
        ("repository", "acme"),
        ("repository", "acme/app/x"),
        ("repository", "acme/.."),
        ("run_id", "1e3"),
        ("run_id", "0"),
        ("run_id", "٣"),
        ("run_attempt", "-1"),
        ("event_name", "push\n::error::x"),
        ("environment", "a\nb"),
        ("environment", "x" * 256),
        ("jti", "a b"),
    ],
)
def test_malformed_claims_are_rejected(name: str, value: str) -> None:
    with pytest.raises(TokenRejected) as raised:
        parse_identity({**CLAIMS, name: value})
    assert raised.value.message.startswith(f"the claim {name} of the OIDC token is ")
    assert raised.value.message.isprintable()
