"""Resource classes, usage classes, type patterns and pool messages, and whether a message matches a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from remuda.domain.errors import UserError
from remuda.domain.text import quote

MAX_PATTERN_TEXT = 1_000
MAX_PATTERN = 64
MAX_CLASSES = 50
#: Maximum characters of a rejected value in an error message.
MAX_SHOWN = 80
MAX_CPU = 1_024
MAX_MEMORY_MIB = 32 * 1024 * 1024

_CLASS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_PATTERN = re.compile(r"[A-Za-z0-9.*-]+")
_INSTANCE_TYPE = re.compile(r"[A-Za-z0-9.-]{1,64}")
_INSTANCE_ID = re.compile(r"i-[0-9a-f]{8,17}")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SCOPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,38}(/(?!\.{1,2}$)[A-Za-z0-9._-]{1,100})?")

#: Labels that GitHub adds to runners by default. As a run id they would attract jobs of other workflows.
_GENERIC_LABELS = frozenset({"self-hosted", "linux", "windows", "macos", "x64", "arm", "arm64"})


class UsageClass(StrEnum):
    ON_DEMAND = "on-demand"
    SPOT = "spot"


class Tier(StrEnum):
    """Trust in the code of a run. An instance's tier may fall, never rise."""

    TRUSTED = "trusted"
    UNTRUSTED = "untrusted"


class Reuse(StrEnum):
    """Reuse policy: which instances a run may claim."""

    #: Instances of at least the run's tier.
    ALWAYS = "always"
    #: Instances of the run's tier that served only the run's repository.
    SAME_REPO = "same-repo"
    #: Instances of the run's tier.
    SAME_TRUST = "same-trust"
    #: None: each instance serves one run.
    NEVER = "never"

    def tiers(self, tier: Tier) -> tuple[Tier, ...]:
        """Return the tiers of instances that a run of `tier` may claim: never a lower one."""
        if self is Reuse.NEVER:
            return ()
        if self is Reuse.ALWAYS and tier is Tier.UNTRUSTED:
            return (Tier.TRUSTED, Tier.UNTRUSTED)
        return (tier,)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceClass:
    name: str
    #: Minimum vCPUs.
    cpu: int
    #: Minimum memory.
    memory_mib: int


DEFAULT_CLASSES: tuple[ResourceClass, ...] = tuple(
    ResourceClass(name=name, cpu=cpu, memory_mib=memory_mib)
    for name, cpu, memory_mib in (
        ("large", 2, 4_096),
        ("xlarge", 4, 8_192),
        ("2xlarge", 8, 16_384),
        ("4xlarge", 16, 32_768),
        ("8xlarge", 32, 65_536),
        ("12xlarge", 48, 98_304),
        ("16xlarge", 64, 131_072),
    )
)


def parse_classes(document: Any, *, field: str = "resource-class-config") -> tuple[ResourceClass, ...]:
    """Parse custom classes: `{"large": {"cpu": 2, "mmem": 4096}, …}`. They replace the defaults."""
    fix = 'give an object such as {"large": {"cpu": 2, "mmem": 4096}}'
    if not isinstance(document, Mapping) or not document:
        raise UserError(f"{field} must be a non-empty object of classes", field=field, fix=fix)
    if len(document) > MAX_CLASSES:
        raise UserError(f"{field} has {len(document)} classes, more than {MAX_CLASSES}", field=field, fix=fix)
    classes = []
    for name, body in document.items():
        if not isinstance(name, str) or not _CLASS_NAME.fullmatch(name) or name.lower() in _GENERIC_LABELS:
            raise UserError(
                f"{field}: {quote(name, MAX_SHOWN)} is not a valid class name",
                field=field,
                fix="use up to 40 letters, digits, - and _, and not a default runner label",
            )
        if not isinstance(body, Mapping):
            raise UserError(f"{field}: class {name!r} must be an object", field=field, fix=fix)
        classes.append(
            ResourceClass(
                name=name,
                cpu=_integer(body.get("cpu"), f"{field}: cpu of {name!r}", MAX_CPU, field),
                memory_mib=_integer(body.get("mmem"), f"{field}: mmem of {name!r}", MAX_MEMORY_MIB, field),
            )
        )
    return tuple(classes)


def _integer(value: Any, what: str, most: int, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UserError(f"{what} is {quote(value, MAX_SHOWN)}", field=field, fix=f"give an integer from 1 to {most}")
    return value


@dataclass(frozen=True, slots=True)
class TypePatterns:
    """Patterns of instance types, literal except for `*`: `c* m6i.large`. A type must match one of them."""

    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, *, field: str = "allowed-instance-types") -> TypePatterns:
        fix = "give patterns such as 'c* m6i.large', literal except for *"
        if len(text) > MAX_PATTERN_TEXT:
            raise UserError(
                f"{field} is {len(text)} characters long, more than {MAX_PATTERN_TEXT}", field=field, fix=fix
            )
        words = tuple(dict.fromkeys(text.replace(",", " ").split()))
        if not words:
            raise UserError(f"{field} is empty", field=field, fix=fix)
        for word in words:
            if len(word) > MAX_PATTERN or not _PATTERN.fullmatch(word):
                raise UserError(f"{field}: {word[:MAX_PATTERN]!r} is not a type pattern", field=field, fix=fix)
        return cls(words)

    def matches(self, instance_type: str) -> bool:
        return any(_matches(word, instance_type) for word in self.words)

    def __str__(self) -> str:
        return " ".join(self.words)


def _matches(pattern: str, text: str) -> bool:
    """Match greedily in linear time: no pattern can make it slow."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == text
    *middle, last = rest
    if not text.startswith(first) or len(text) < len(first) + len(last) or not text.endswith(last):
        return False
    at, end = len(first), len(text) - len(last)
    for part in middle:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolMessage:
    """Message that an instance was idle at an epoch. It may be stale: only the record proves it."""

    id: str
    epoch: int
    resource_class: str
    instance_type: str
    usage_class: UsageClass
    cpu: int
    #: The message carries it as `mmem`.
    memory_mib: int = field(metadata={"key": "mmem"})
    tier: Tier = Tier.TRUSTED
    #: See `Instance.repository`.
    repository: str = ""

    def __post_init__(self) -> None:
        if not is_instance_id(self.id):
            raise ValueError("its id is not an instance id")
        if self.epoch < 1:
            raise ValueError("its epoch is below 1")
        if not _CLASS_NAME.fullmatch(self.resource_class):
            raise ValueError("its class is not a valid class name")
        if not _INSTANCE_TYPE.fullmatch(self.instance_type):
            raise ValueError("its instance type is not a valid type name")
        if self.repository and not is_repository(self.repository):
            raise ValueError("its repository is not of the form owner/name")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerRequest:
    """Requirements of a run for each of its instances."""

    resource_class: ResourceClass
    usage_class: UsageClass
    patterns: TypePatterns
    tier: Tier
    reuse: Reuse = Reuse.SAME_TRUST
    #: The run's repository in lower case, or empty if unknown.
    repository: str = ""


def mismatch(message: PoolMessage, request: RunnerRequest) -> str | None:
    """Return why a message does not match a request, for people. None if it matches."""
    wanted = request.resource_class
    if message.resource_class != wanted.name:
        return f"class {message.resource_class}, not {wanted.name}"
    if message.usage_class is not request.usage_class:
        return f"{message.usage_class}, not {request.usage_class}"
    if not request.patterns.matches(message.instance_type):
        return f"type {message.instance_type} is not among {request.patterns}"
    if message.cpu < wanted.cpu:
        return f"{message.cpu} cpu, {wanted.cpu} wanted"
    if message.memory_mib < wanted.memory_mib:
        return f"{message.memory_mib} MiB, {wanted.memory_mib} wanted"
    if message.tier not in request.reuse.tiers(request.tier):
        return f"tier {message.tier}, not {request.tier}"
    if request.reuse is Reuse.SAME_REPO and message.repository != request.repository:
        return f"served {message.repository or 'more than one repository'}, not {request.repository} alone"
    return None


def is_instance_id(text: str) -> bool:
    return _INSTANCE_ID.fullmatch(text) is not None


def check_run_id(text: str, *, field: str = "run-id") -> str:
    """Check a run id. It becomes a label, so it must be one word that attracts no jobs of other workflows."""
    if not _RUN_ID.fullmatch(text):
        raise UserError(
            f"{field} is {text[:80]!r}",
            field=field,
            fix="give the workflow's run id (github.run_id): up to 64 letters, digits, '.', '_' or '-'",
        )
    if text.lower() in _GENERIC_LABELS:
        raise UserError(
            f"{field} is {text!r}, a default label of self-hosted runners",
            field=field,
            fix="give the workflow's run id (github.run_id)",
        )
    return text


def check_scope(text: str, *, field: str = "github-scope") -> str:
    if not _SCOPE.fullmatch(text):
        raise UserError(
            f"{field} is {text[:80]!r}",
            field=field,
            fix="give an organisation ('owner') or a repository ('owner/repo')",
        )
    return text


def is_repository(text: str) -> bool:
    return "/" in text and _SCOPE.fullmatch(text) is not None


def check_repository(text: str, *, field: str = "repository") -> str:
    if not is_repository(text):
        raise UserError(f"{field} is {text[:80]!r}", field=field, fix="give the run's repository as owner/name")
    return text


def normalize_repository(repository: str) -> str:
    """Return the name in lower case, as records store it: GitHub ignores case."""
    return repository.lower()


def repository_of(scope: str, repository: str, *, field: str = "repository") -> str:
    """Return the repository of a run whose runners register in `scope`, or empty if unknown.

    Runners of an organisation serve only its own repositories.
    """
    owner, _, name = scope.partition("/")
    if name:
        return scope
    if repository and repository.partition("/")[0].lower() != owner.lower():
        raise UserError(
            f"{field} is {repository!r}, which is not a repository of {scope}",
            field=field,
            fix=f"give a repository of {scope}, or change the scope",
        )
    return repository
