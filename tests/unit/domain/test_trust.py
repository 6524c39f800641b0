"""Trust tier of a run, derived from its event."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.errors import UserError
from remuda.domain.resources import Tier, repository_of
from remuda.domain.trust import claimed_trust, decide_trust, trust_of

HOME, FORK = {"full_name": "octo/repo"}, {"full_name": "eve/repo"}


def pull_request(head: Any, **more: Any) -> dict[str, Any]:
    request = {"number": 12, "head": {"repo": head, "label": "eve:main"}, "base": {"repo": HOME}}
    return {"pull_request": request, "repository": HOME, **more}


def workflow_run(head: Any, event: Any = "push") -> dict[str, Any]:
    return {"workflow_run": {"head_repository": head, "repository": HOME, "event": event}, "repository": HOME}


UNTRUSTED: list[tuple[str, Any, str]] = [
    ("pull_request", pull_request(FORK), "pull request #12 from fork eve/repo"),
    ("pull_request_target", pull_request(FORK), "from fork eve/repo"),
    ("pull_request_review", pull_request(FORK), "from fork eve/repo"),
    ("pull_request_review_comment", pull_request(FORK), "from fork eve/repo"),
    ("pull_request_of_some_later_kind", pull_request(FORK), "from fork eve/repo"),
    (
        "pull_request",
        {"pull_request": {"head": {"repo": FORK}, "base": {"repo": FORK}}, "repository": HOME},
        "from fork",
    ),
    # A deleted fork.
    ("pull_request", pull_request(None), "unknown or deleted repository"),
    ("pull_request", pull_request({}), "unknown or deleted repository"),
    ("pull_request", pull_request({"full_name": 7}), "unknown or deleted repository"),
    ("pull_request", pull_request({"full_name": "octo/repo\n::set-output"}), "unknown or deleted repository"),
    ("pull_request", pull_request({"full_name": "octo"}), "unknown or deleted repository"),
    ("pull_request", {"pull_request": {"head": {"repo": HOME}}}, "unknown or deleted repository"),
    ("pull_request", {"pull_request": "octo/repo"}, "unknown or deleted repository"),
    ("pull_request", {}, "unknown or deleted repository"),
    ("pull_request", None, "cannot be read"),
    ("pull_request", [], "cannot be read"),
    ("workflow_run", workflow_run(FORK), "workflow run from fork eve/repo"),
    ("workflow_run", workflow_run(None), "unknown or deleted repository"),
    ("workflow_run", workflow_run(HOME, "issue_comment"), "does not say whose code"),
    ("workflow_run", workflow_run(HOME, "workflow_run"), "does not say whose code"),
    ("workflow_run", workflow_run(HOME, None), "does not say whose code"),
    ("workflow_run", workflow_run(FORK, "pull_request"), "workflow run from fork eve/repo"),
    ("workflow_run", None, "cannot be read"),
    ("Pull_Request", pull_request(HOME), "unknown whose code"),
    (" push", None, "unknown whose code"),
    ("of_tomorrow", None, "unknown whose code"),
    ("issue_comment", {"issue": {"pull_request": {"url": "u"}}}, "may come from a fork"),
    ("issue_comment", {"issue": {"pull_request": {}}}, "may come from a fork"),
    ("issue_comment", {"issue": None}, "without a readable issue"),
    ("issue_comment", {}, "without a readable issue"),
    ("issue_comment", None, "cannot be read"),
]
TRUSTED: list[tuple[str, Any, str]] = [
    ("pull_request", pull_request(HOME), "pull request #12 from octo/repo itself"),
    ("pull_request", pull_request({"full_name": "Octo/Repo"}), "itself"),
    ("pull_request_target", pull_request(HOME), "itself"),
    ("workflow_run", workflow_run(HOME), "itself"),
    ("issue_comment", {"issue": {"number": 3}}, "on an issue"),
    ("issue_comment", {"issue": {"number": 3, "pull_request": None}}, "on an issue"),
    ("push", None, "event push"),
    ("schedule", None, "event schedule"),
    ("workflow_dispatch", {}, "event workflow_dispatch"),
    ("merge_group", {}, "event merge_group"),
    ("release", {}, "event release"),
]


@pytest.mark.parametrize(("event", "payload", "why"), UNTRUSTED)
def test_foreign_code_is_untrusted(event: str, payload: Any, why: str) -> None:
    found = trust_of(event, payload)
    assert (found.tier, why in found.why) == (Tier.UNTRUSTED, True), found


@pytest.mark.parametrize(("event", "payload", "why"), TRUSTED)
def test_code_of_the_repository_is_trusted(event: str, payload: Any, why: str) -> None:
    found = trust_of(event, payload)
    assert (found.tier, why in found.why) == (Tier.TRUSTED, True), found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.sampled_from(["octo/repo", "eve/repo"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["pull_request", "head", "base", "repo", "repository", "full_name", "issue", "workflow_run", "number"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.sampled_from(["pull_request", "pull_request_target", "workflow_run", "issue_comment"]) | st.text(), JSON)
def test_any_payload_yields_a_one_line_reason(event: str, payload: Any) -> None:
    found = trust_of(event, payload)
    assert found.why.isprintable()
    assert len(found.why) < 300
    if event.startswith("pull_request") and found.tier is Tier.TRUSTED:
        head, base = payload["pull_request"]["head"]["repo"], payload["pull_request"].get("base")
        home = (base or {}).get("repo") if isinstance(base, dict) else None
        assert head["full_name"] in {(home or {}).get("full_name"), payload.get("repository", {}).get("full_name")}


def test_requested_tier_applies_without_an_event() -> None:
    assert (decide_trust("", None, None).tier, decide_trust("", None, Tier.TRUSTED).tier) == (
        Tier.TRUSTED,
        Tier.TRUSTED,
    )
    lowered = decide_trust("", None, Tier.UNTRUSTED)
    assert (lowered.tier, lowered.why) == (Tier.UNTRUSTED, "requested")


def test_requested_tier_may_be_lower_than_the_events() -> None:
    assert decide_trust("push", None, Tier.UNTRUSTED).tier is Tier.UNTRUSTED
    assert decide_trust("push", None, Tier.TRUSTED).tier is Tier.TRUSTED
    assert "fork" in decide_trust("pull_request", pull_request(FORK), Tier.UNTRUSTED).why


def test_requested_tier_must_not_be_higher_than_the_events() -> None:
    with pytest.raises(UserError, match=r"tier is trusted, but the event is untrusted: pull request #12") as error:
        decide_trust("pull_request", pull_request(FORK), Tier.TRUSTED)
    assert (error.value.field, "--tier" in error.value.fix) == ("tier", True)


def test_pull_requests_are_trusted_by_their_claims_only_if_the_pool_trusts_them() -> None:
    assert claimed_trust("pull_request", None, trusts_pull_requests=True).tier is Tier.TRUSTED
    assert claimed_trust("pull_request", None, trusts_pull_requests=False).tier is Tier.UNTRUSTED
    assert claimed_trust("pull_request_target", None, trusts_pull_requests=True).tier is Tier.UNTRUSTED


@pytest.mark.parametrize(
    ("scope", "given", "known"),
    [
        ("octo/repo", "", "octo/repo"),
        ("octo/repo", "eve/other", "octo/repo"),
        ("octo", "", ""),
        ("octo", "octo/repo", "octo/repo"),
        ("octo", "Octo/Repo", "Octo/Repo"),
    ],
)
def test_repository_of_a_run(scope: str, given: str, known: str) -> None:
    assert repository_of(scope, given) == known


def test_repository_outside_the_organisation_is_rejected() -> None:
    with pytest.raises(UserError, match="is not a repository of octo"):
        repository_of("octo", "octocat/repo")
