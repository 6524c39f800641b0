"""Trust tier of a run, derived from the event that started it.

Strangers can influence parts of an event's payload. Each part is validated before use, and an event whose origin is
unclear is untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remuda.domain.errors import UserError
from remuda.domain.resources import Tier, is_repository

#: Maximum characters of an event's name in a reason.
MAX_EVENT = 40
#: Events whose workflows run code of the repository itself, regardless of the user who caused them.
OWN_CODE = frozenset(
    {
        "branch_protection_rule",
        "check_run",
        "check_suite",
        "create",
        "delete",
        "deployment",
        "deployment_status",
        "discussion",
        "discussion_comment",
        "dynamic",
        "fork",
        "gollum",
        "image_version",
        "issues",
        "label",
        "merge_group",
        "milestone",
        "page_build",
        "public",
        "push",
        "registry_package",
        "release",
        "repository_dispatch",
        "schedule",
        "status",
        "watch",
        "workflow_call",
        "workflow_dispatch",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadablePayload:
    #: The file for messages, or empty if none was given.
    file: str
    why: str

    def __str__(self) -> str:
        return f"{self.file}: {self.why}" if self.file else self.why


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    tier: Tier
    why: str

    def __str__(self) -> str:
        return f"{self.tier}: {self.why}"


def trust_of(event: str, payload: object) -> Trust:
    """Return the trust in an event. `payload` is `UnreadablePayload` if the event's file cannot be read."""
    content = payload if isinstance(payload, Mapping) else None
    if content is None and needs_payload(event):
        why = f": {payload}" if isinstance(payload, UnreadablePayload) else ""
        return Trust(tier=Tier.UNTRUSTED, why=f"event {_shown(event)}, whose payload cannot be read{why}")
    if event.startswith("pull_request"):
        return _pull_request(content or {})
    if event == "workflow_run":
        return _workflow_run(content or {})
    if event == "issue_comment":
        return _issue_comment(content or {})
    if event not in OWN_CODE:
        return Trust(tier=Tier.UNTRUSTED, why=f"event {_shown(event)}: it is unknown whose code it runs")
    return Trust(tier=Tier.TRUSTED, why=f"event {event}")


def claimed_trust(event: str, requested: Tier | None, *, trusts_pull_requests: bool) -> Trust:
    """Return the tier of a run of which only the event's name is proven, by the claims of its OIDC token.

    No claim names the fork of a pull request. Workflows of forks get such a token only if a repository sends write
    tokens to them, which is a setting of private repositories; `trusts_pull_requests` says that none does.
    For `pull_request_target` they always get one.
    """
    if event == "pull_request" and trusts_pull_requests:
        found = Trust(tier=Tier.TRUSTED, why="event pull_request, which the pool trusts")
    elif event == "pull_request":
        why = "event pull_request: its token does not say whether it comes from a fork (stack: TrustPullRequests)"
        found = Trust(tier=Tier.UNTRUSTED, why=why)
    elif needs_payload(event):
        found = Trust(tier=Tier.UNTRUSTED, why=f"event {_shown(event)}: its token does not say whose code it runs")
    else:
        found = trust_of(event, None)
    return _lowered(found, requested, fix="omit tier: untrusted code runs on separate instances")


def decide_trust(event: str, payload: object, requested: Tier | None) -> Trust:
    """Return the tier of a run. A requested tier may be lower than the event's, never higher."""
    if not event:
        why = "requested" if requested else "default: no event started the run"
        return Trust(tier=requested or Tier.TRUSTED, why=why)
    fix = "omit --tier: untrusted code runs on separate instances"
    if isinstance(payload, UnreadablePayload) and needs_payload(event):
        given = f"{payload.file} is not readable" if payload.file else "none is given"
        fix = f"set GITHUB_EVENT_PATH to the event's file ({given}), or {fix}"
    return _lowered(trust_of(event, payload), requested, fix=fix)


def _lowered(found: Trust, requested: Tier | None, *, fix: str) -> Trust:
    if requested is None or requested is found.tier:
        return found
    if requested is Tier.UNTRUSTED:
        return Trust(tier=requested, why="requested")
    raise UserError(f"tier is {requested}, but the event is {found}", field="tier", fix=fix)


def names_head(event: str) -> bool:
    """Whether the run of this event, as GitHub's API shows it, names the repository of the code that it runs.

    The run of `pull_request_target`, of a comment or after another run belongs to the base repository, although its
    jobs may use code of a fork.
    """
    return event.startswith("pull_request") and event != "pull_request_target"


def trust_of_run(event: str, head_repository: str, repository: str) -> Trust:
    """Return the trust in a run, by the event's name and the repositories that GitHub's API names."""
    if names_head(event):
        return _compare("pull request", head_repository, repository)
    if needs_payload(event):
        return Trust(tier=Tier.UNTRUSTED, why=f"event {_shown(event)}: its run does not say whose code it runs")
    return trust_of(event, None)


def needs_payload(event: str) -> bool:
    """Whether the event's name alone does not decide the tier."""
    return event.startswith("pull_request") or event in {"workflow_run", "issue_comment"}


def _pull_request(payload: Mapping[str, Any]) -> Trust:
    request = _part(payload, "pull_request")
    number = request.get("number")
    name = f"pull request #{number}" if isinstance(number, int) and not isinstance(number, bool) else "pull request"
    # The repository that the workflow runs in, not the one that the request claims.
    home = _repository(payload, "repository") or _repository(_part(request, "base"))
    return _compare(name, _repository(_part(request, "head")), home)


def _workflow_run(payload: Mapping[str, Any]) -> Trust:
    run = _part(payload, "workflow_run")
    cause = run.get("event")
    if not isinstance(cause, str) or not (cause in OWN_CODE or cause.startswith("pull_request")):
        # For comments and nested workflow runs, the payload does not name the original code.
        return Trust(tier=Tier.UNTRUSTED, why="workflow run after an event that does not say whose code it runs")
    home = _repository(payload, "repository") or _repository(run, "repository")
    return _compare("workflow run", _repository(run, "head_repository"), home)


def _issue_comment(payload: Mapping[str, Any]) -> Trust:
    issue = payload.get("issue")
    if not isinstance(issue, Mapping):
        return Trust(tier=Tier.UNTRUSTED, why="event issue_comment without a readable issue")
    if issue.get("pull_request") is not None:
        return Trust(tier=Tier.UNTRUSTED, why="comment on a pull request: its code may come from a fork")
    return Trust(tier=Tier.TRUSTED, why="event issue_comment, on an issue")


def _compare(name: str, head: str, home: str) -> Trust:
    if not head or not home:
        return Trust(tier=Tier.UNTRUSTED, why=f"{name} from an unknown or deleted repository")
    if head.lower() != home.lower():
        return Trust(tier=Tier.UNTRUSTED, why=f"{name} from fork {head}")
    return Trust(tier=Tier.TRUSTED, why=f"{name} from {home} itself")


def _repository(parent: Mapping[str, Any], name: str = "repo") -> str:
    """Return the full name, or empty if it is missing or invalid."""
    full_name = _part(parent, name).get("full_name")
    return full_name if isinstance(full_name, str) and is_repository(full_name) else ""


def _part(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = parent.get(name)
    return found if isinstance(found, Mapping) else {}


def _shown(event: str) -> str:
    return event[:MAX_EVENT] if event.replace("_", "").isalnum() and event.isascii() else "with an invalid name"
