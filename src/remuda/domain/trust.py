"""How far a run's code is trusted, seen from the event that started it.

A payload is what GitHub wrote about the event, and parts of it are what strangers wrote. So each part is looked at
before it is used, and what cannot be told is not trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remuda.domain.errors import UserError
from remuda.domain.resources import Tier, is_repository

#: How much of an event's name a reason repeats.
MAX_EVENT = 40
#: Events whose workflows run what is in the repository itself, whoever caused them.
_OWN_CODE = frozenset(
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
class Unread:
    """Stands for a payload that could not be read."""

    #: The file, as it may be shown, or empty where none was named.
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
    """`payload` is `Unread` where the event's file cannot be read."""
    told = payload if isinstance(payload, Mapping) else None
    if told is None and _needs_payload(event):
        why = f": {payload}" if isinstance(payload, Unread) else ""
        return Trust(tier=Tier.UNTRUSTED, why=f"event {_word(event)}, and what it is about cannot be read{why}")
    if event.startswith("pull_request"):
        return _pull_request(told or {})
    if event == "workflow_run":
        return _workflow_run(told or {})
    if event == "issue_comment":
        return _issue_comment(told or {})
    if event not in _OWN_CODE:
        return Trust(tier=Tier.UNTRUSTED, why=f"event {_word(event)}: it is not known whose code that runs")
    return Trust(tier=Tier.TRUSTED, why=f"event {event}")


def decide(event: str, payload: object, asked: Tier | None) -> Trust:
    """The tier of a run. Who asks may lower what the event says, never raise it."""
    if not event:
        return Trust(tier=asked or Tier.TRUSTED, why="asked for" if asked else "by default: no event started it")
    found = trust_of(event, payload)
    if asked is None or asked is found.tier:
        return found
    if asked is Tier.UNTRUSTED:
        return Trust(tier=asked, why="asked for")
    fix = "leave --tier out: code of strangers runs on machines of its own"
    if isinstance(payload, Unread) and _needs_payload(event):
        named = f"{payload.file} is not it" if payload.file else "nothing does"
        fix = f"let --event-path or GITHUB_EVENT_PATH name the event's file ({named}), or {fix}"
    raise UserError(f"tier is {asked}, but the event says {found}", field="tier", fix=fix)


def _needs_payload(event: str) -> bool:
    """Whether its name alone does not tell."""
    return event.startswith("pull_request") or event in {"workflow_run", "issue_comment"}


def _pull_request(payload: Mapping[str, Any]) -> Trust:
    request = _part(payload, "pull_request")
    number = request.get("number")
    name = f"pull request #{number}" if isinstance(number, int) and not isinstance(number, bool) else "pull request"
    # Where the workflow runs, not what the request says of itself.
    home = _repository(payload, "repository") or _repository(_part(request, "base"))
    return _compared(name, _repository(_part(request, "head")), home)


def _workflow_run(payload: Mapping[str, Any]) -> Trust:
    run = _part(payload, "workflow_run")
    cause = run.get("event")
    if not isinstance(cause, str) or not (cause in _OWN_CODE or cause.startswith("pull_request")):
        # Of a comment, or of a run after a run, it does not say whose code was at the beginning.
        return Trust(tier=Tier.UNTRUSTED, why="workflow run after an event that does not say whose code it ran")
    home = _repository(payload, "repository") or _repository(run, "repository")
    return _compared("workflow run", _repository(run, "head_repository"), home)


def _issue_comment(payload: Mapping[str, Any]) -> Trust:
    issue = payload.get("issue")
    if not isinstance(issue, Mapping):
        return Trust(tier=Tier.UNTRUSTED, why="event issue_comment, and which issue cannot be read")
    if issue.get("pull_request") is not None:
        return Trust(tier=Tier.UNTRUSTED, why="comment on a pull request: it does not say whose code that is")
    return Trust(tier=Tier.TRUSTED, why="event issue_comment, on an issue")


def _compared(name: str, head: str, home: str) -> Trust:
    if not head or not home:
        return Trust(tier=Tier.UNTRUSTED, why=f"{name} from a repository that is not told, or is gone")
    if head.lower() != home.lower():
        return Trust(tier=Tier.UNTRUSTED, why=f"{name} from fork {head}")
    return Trust(tier=Tier.TRUSTED, why=f"{name} from {home} itself")


def _repository(parent: Mapping[str, Any], name: str = "repo") -> str:
    """Its full name, or empty where there is none, or none that can be one."""
    full_name = _part(parent, name).get("full_name")
    return full_name if isinstance(full_name, str) and is_repository(full_name) else ""


def _part(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = parent.get(name)
    return found if isinstance(found, Mapping) else {}


def _word(event: str) -> str:
    return event[:MAX_EVENT] if event.replace("_", "").isalnum() and event.isascii() else "of an unknown name"
