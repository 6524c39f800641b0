"""Runner machines as their tags tell of them. The tags are those of terraform-aws-github-runner."""

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
#: GitHub's ids fit into this many digits.
MAX_ID_DIGITS = 19

#: An organisation or a user (those of an enterprise have an underscore), and a repository of theirs.
_SCOPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}(/(?!\.{1,2}$)[A-Za-z0-9._-]{1,100})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetMachine:
    """A machine that runs or boots, as compute lists it."""

    instance_id: str
    #: None where compute does not say.
    launched_at: datetime | None
    tags: Mapping[str, str]
    os: Literal["linux", "windows"] = "linux"

    @property
    def owner(self) -> str:
        """As the tag has it, for people."""
        return self.tags.get(GHR_OWNER_TAG, "")

    @property
    def scope(self) -> str | None:
        """Where its runners are registered, or None where the tags do not say so beyond doubt."""
        kind = self.tags.get(GHR_TYPE_TAG)
        if kind not in {ORG, REPO} or ("/" in self.owner) is not (kind == REPO):
            return None
        return self.likely_scope

    @property
    def likely_scope(self) -> str | None:
        """Where to look for its runners, whatever its type says: enough to keep a machine, not to end one."""
        return self.owner if _SCOPE.fullmatch(self.owner) else None

    @property
    def is_orphan(self) -> bool:
        return self.tags.get(GHR_ORPHAN_TAG) == YES

    @property
    def is_bypassed(self) -> bool:
        return self.tags.get(GHR_BYPASS_TAG) == YES

    @property
    def runner_id_tag(self) -> str:
        """The id of its registration as the machine tagged itself with it, or empty."""
        return self.tags.get(GHR_RUNNER_ID_TAG, "").strip()

    @property
    def runner_id(self) -> int | None:
        """The same, where it can be one."""
        text = self.runner_id_tag
        usable = text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS
        return int(text) if usable else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """A runner as GitHub knows it."""

    runner_id: int
    name: str
    online: bool
    busy: bool

    def belongs_to(self, instance_id: str) -> bool:
        return self.name.endswith(instance_id)


#: The registrations of each machine that has one.
Registered = Mapping[str, tuple[Registration, ...]]


def match(instance_ids: Iterable[str], registrations: Sequence[Registration]) -> Registered:
    """Whose is whose: a runner belongs to the machine whose id its name ends with. A machine may have several."""
    wanted = set(instance_ids)
    lengths = {len(instance_id) for instance_id in wanted}
    found: dict[str, list[Registration]] = {}
    for registration in registrations:
        for length in lengths:
            suffix = registration.name[-length:]
            if suffix in wanted:
                found.setdefault(suffix, []).append(registration)
    return {instance_id: tuple(items) for instance_id, items in found.items()}
