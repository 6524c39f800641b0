"""Runner machines described by their tags, which are those of terraform-aws-github-runner, and their registrations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

GHR_ENVIRONMENT_TAG = "ghr:environment"
GHR_APPLICATION_TAG = "ghr:Application"
GHR_OWNER_TAG = "ghr:Owner"
GHR_TYPE_TAG = "ghr:Type"
GHR_ORPHAN_TAG = "ghr:orphan"
GHR_RUNNER_ID_TAG = "ghr:github_runner_id"
GHR_BYPASS_TAG = "ghr:bypass-removal"

GHR_APPLICATION = "github-action-runner"
ORG, REPO = "Org", "Repo"
YES = "true"
#: Maximum digits of GitHub's ids.
MAX_ID_DIGITS = 19

#: Organisation or user (enterprise users contain an underscore), optionally with a repository.
_SCOPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}(/(?!\.{1,2}$)[A-Za-z0-9._-]{1,100})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetMachine:
    """A running or pending machine, as EC2 lists it."""

    instance_id: str
    #: None if unknown.
    launched_at: datetime | None
    tags: Mapping[str, str]
    os: Literal["linux", "windows"] = "linux"

    @property
    def owner(self) -> str:
        """Value of the tag, for people."""
        return self.tags.get(GHR_OWNER_TAG, "")

    @property
    def scope(self) -> str | None:
        """Scope of its registrations, or None if the tags contradict each other."""
        kind = self.tags.get(GHR_TYPE_TAG)
        if kind not in {ORG, REPO} or ("/" in self.owner) is not (kind == REPO):
            return None
        return self.likely_scope

    @property
    def likely_scope(self) -> str | None:
        """Scope by the owner tag alone: sufficient to keep a machine, not to terminate one."""
        return self.owner if _SCOPE.fullmatch(self.owner) else None

    @property
    def is_orphan(self) -> bool:
        return self.tags.get(GHR_ORPHAN_TAG) == YES

    @property
    def is_bypassed(self) -> bool:
        return self.tags.get(GHR_BYPASS_TAG) == YES

    @property
    def runner_id_tag(self) -> str:
        """Value of the tag with its registration's id, or empty."""
        return self.tags.get(GHR_RUNNER_ID_TAG, "").strip()

    @property
    def runner_id(self) -> int | None:
        """The tagged id of its registration, or None if it is not valid."""
        text = self.runner_id_tag
        valid = text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS
        return int(text) if valid else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """A runner on GitHub."""

    runner_id: int
    name: str
    online: bool
    busy: bool

    def belongs_to(self, instance_id: str) -> bool:
        return self.name.endswith(instance_id)


#: Registrations by instance id.
Registrations = Mapping[str, tuple[Registration, ...]]


def match_registrations(instance_ids: Iterable[str], registrations: Sequence[Registration]) -> Registrations:
    """Assign registrations to machines: a runner's name ends with the instance id. A machine may have several."""
    wanted = set(instance_ids)
    lengths = {len(instance_id) for instance_id in wanted}
    found: dict[str, list[Registration]] = {}
    for registration in registrations:
        for length in lengths:
            suffix = registration.name[-length:]
            if suffix in wanted:
                found.setdefault(suffix, []).append(registration)
    return {instance_id: tuple(items) for instance_id, items in found.items()}
