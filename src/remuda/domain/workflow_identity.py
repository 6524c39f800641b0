"""Identity of a workflow's job, from the claims that GitHub signs, and the rules about who may use a pool.

The claims are those of "OIDC token claims" in GitHub's documentation (docs.github.com/actions/reference/security/oidc).
All of them are texts, including ids and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remuda.domain.errors import UserError
from remuda.domain.resources import is_repository
from remuda.domain.text import quote

#: Characters of a claim that a message repeats.
MAX_CLAIM_SHOWN = 80
#: GitHub limits the name of an environment to 255 characters.
MAX_ENVIRONMENT_CHARS = 255
_ID = re.compile(r"[1-9][0-9]{0,18}")
_EVENT = re.compile(r"[a-z][a-z_]{0,63}")
_TOKEN_ID = re.compile(r"[!-~]{1,200}")
#: Names on GitHub. With immutable subject claims, the default of repositories created since July 2026, the token's
#: subject contains their ids: `repo:acme@1234/app@5678:ref:refs/heads/main`.
OWNER_FORM, NAME_FORM = "[A-Za-z0-9-]+(@[0-9]+)?", "[A-Za-z0-9_.-]+(@[0-9]+)?"
#: No wildcard except for all repositories of an owner, because the trust policy of AWS uses StringLike.
REPOSITORY_FORM = rf"{OWNER_FORM}/({NAME_FORM}|\*)"
_REPOSITORY = re.compile(REPOSITORY_FORM)


class TokenRejected(UserError):
    """The OIDC token proves nothing: it is invalid, expired, or for another service or run."""


class NotAllowed(UserError):
    """The OIDC token is valid, but its job may not do this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowIdentity:
    """A job of a workflow run, as GitHub describes it."""

    repository: str
    repository_id: str
    owner: str
    owner_id: str
    run_id: str
    run_attempt: int
    #: Name of the event that started the run.
    event: str
    #: GitHub environment of the job; empty if it has none.
    environment: str = ""
    #: Id of the token, for logs.
    token_id: str = ""


def parse_identity(claims: Mapping[str, Any]) -> WorkflowIdentity:
    """The identity in verified claims. Raises `TokenRejected` if a claim is missing or malformed."""
    repository, owner = _claim(claims, "repository"), _claim(claims, "repository_owner")
    if not is_repository(repository) or repository.partition("/")[0].lower() != owner.lower():
        raise _malformed("repository", repository)
    environment = _claim(claims, "environment") if "environment" in claims else ""
    if len(environment) > MAX_ENVIRONMENT_CHARS or not environment.isprintable():
        raise _malformed("environment", environment)
    return WorkflowIdentity(
        repository=repository,
        repository_id=_claim(claims, "repository_id", _ID),
        owner=owner,
        owner_id=_claim(claims, "repository_owner_id", _ID),
        run_id=_claim(claims, "run_id", _ID),
        run_attempt=int(_claim(claims, "run_attempt", _ID)),
        event=_claim(claims, "event_name", _EVENT),
        environment=environment,
        token_id=_claim(claims, "jti", _TOKEN_ID),
    )


def _claim(claims: Mapping[str, Any], name: str, form: re.Pattern[str] | None = None) -> str:
    value = claims.get(name)
    if value is None:
        raise TokenRejected(
            f"the OIDC token has no claim {name}", field="token", fix="use a token that GitHub issued to a workflow"
        )
    if not isinstance(value, str) or (form is not None and not form.fullmatch(value)):
        raise _malformed(name, value)
    return value


def _malformed(name: str, value: object) -> TokenRejected:
    return TokenRejected(
        f"the claim {name} of the OIDC token is {quote(value, MAX_CLAIM_SHOWN)}",
        field="token",
        fix="use a token that GitHub issued to a workflow",
    )


def check_run(identity: WorkflowIdentity, *, run_id: str, run_attempt: str) -> None:
    """Reject a token of another run or attempt than the step that sends it."""
    fix = "request the token in the step that uses it"
    if run_id != identity.run_id:
        raise TokenRejected(
            f"the token is of run {identity.run_id}, this step is of run {quote(run_id, MAX_CLAIM_SHOWN)}",
            field="run-id",
            fix=fix,
        )
    if run_attempt != str(identity.run_attempt):
        raise TokenRejected(
            f"the token is of attempt {identity.run_attempt} of run {run_id}, this step is of attempt "
            f"{quote(run_attempt, MAX_CLAIM_SHOWN)}",
            field="run-attempt",
            fix=fix,
        )


# Who may use a pool -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RepositoryPattern:
    """A repository, or all repositories of an owner. A given id must equal the one in the token, too."""

    owner: str
    #: `*` for all repositories of the owner.
    name: str
    owner_id: str = ""
    name_id: str = ""

    @classmethod
    def parse(cls, text: str) -> RepositoryPattern:
        """Parse `acme/app`, `acme/*`, `acme@1234/app@5678` or `acme@1234/*`. Raises ValueError."""
        if not _REPOSITORY.fullmatch(text):
            raise ValueError(f"not a repository: {text!r}")
        (owner, _, owner_id), (name, _, name_id) = (part.partition("@") for part in text.split("/"))
        return cls(owner=owner, name=name, owner_id=owner_id, name_id=name_id)

    def names_owner(self, identity: WorkflowIdentity) -> bool:
        """GitHub ignores the case of names."""
        return self.owner.lower() == identity.repository.lower().partition("/")[0]

    def names(self, identity: WorkflowIdentity) -> bool:
        name = identity.repository.lower().partition("/")[2]
        return self.names_owner(identity) and self.name.lower() in {"*", name}

    def matches(self, identity: WorkflowIdentity) -> bool:
        """Whether it is the identity's repository."""
        return (
            self.names(identity)
            and self.owner_id in {"", identity.owner_id}
            and self.name_id in {"", identity.repository_id}
        )

    def __str__(self) -> str:
        parts = ((self.owner, self.owner_id), (self.name, self.name_id))
        return "/".join(f"{name}@{number}" if number else name for name, number in parts)


def is_listed(identity: WorkflowIdentity, repositories: Sequence[RepositoryPattern]) -> bool:
    """Whether a pattern matches, and the ids in all patterns with these names allow it.

    `deploy` lists `acme/*` and `acme@1234/*`, because the subjects of tokens have either form. The ids apply to both:
    the name of a deleted or renamed owner or repository can be registered by someone else.
    """
    owner_ids = {item.owner_id for item in repositories if item.owner_id and item.names_owner(identity)}
    name_ids = {item.name_id for item in repositories if item.name_id and item.names(identity)}
    return (
        any(pattern.matches(identity) for pattern in repositories)
        and identity.owner_id in (owner_ids or {identity.owner_id})
        and identity.repository_id in (name_ids or {identity.repository_id})
    )


def authorize(
    identity: WorkflowIdentity,
    *,
    pool: str,
    scope: str,
    repositories: Sequence[RepositoryPattern],
    environments: Sequence[str],
) -> None:
    """Raise `NotAllowed` unless the job may use the pool, whose runners register in `scope`."""
    if not is_listed(identity, repositories):
        known = f"repository {identity.repository} (id {identity.repository_id}, owner id {identity.owner_id})"
        raise NotAllowed(
            f"{known} may not use pool {pool}",
            field="repository",
            fix="add it to Repositories of the pool's stack",
        )
    if environments and identity.environment not in environments:
        has = f"has the environment {identity.environment!r}" if identity.environment else "has no environment"
        raise NotAllowed(
            f"pool {pool} is for jobs of the environments {', '.join(environments)}; this job {has}",
            field="environment",
            fix="set environment in the workflow's job, or add it to Environments of the pool's stack",
        )
    # A runner of a repository serves only that one, and a runner of an organization only its repositories.
    served = identity.repository if "/" in scope else identity.owner
    if served.lower() != scope.lower():
        raise NotAllowed(
            f"the runners of pool {pool} register in {scope} and cannot serve {identity.repository}",
            field="repository",
            fix="use another pool, or set GithubScope of the pool's stack to an organization",
        )
