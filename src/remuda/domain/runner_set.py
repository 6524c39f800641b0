"""Runner sets: the runners that serve all jobs with certain labels, without a provision in the workflow."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, tzinfo
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar

from remuda.domain.errors import UserError
from remuda.domain.resources import MAX_SHOWN, Reuse, Tier, TypePatterns, UsageClass, check_scope
from remuda.domain.scale_down.idle_config import Cron, parse_cron
from remuda.domain.text import quote, suggest

E = TypeVar("E", bound=StrEnum)

FIELD = "runner-sets"
EXAMPLE = '[{"name": "large", "labels": ["self-hosted", "remuda", "large"], "resource-class": "large", "max": 20}]'
FIX = f"give a list such as {EXAMPLE}"

MAX_SETS = 50
MAX_LABELS = 20
MAX_LABEL = 256
MAX_RUNNERS = 1_000
MAX_CAPACITY_WINDOWS = 20
MAX_GROUP = 64
#: Maximum of a set that an error suggests.
SUGGESTED_MAX = 5

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
# GitHub's labels may contain any printable text; commas separate them in runner settings.
_LABEL = re.compile(r"[^\s,](?:[^,\n\r\t]*[^\s,])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityWindow:
    """Runners to keep ready while a cron expression matches."""

    cron: str = "* * * * *"
    time_zone: str = "UTC"
    #: Runners that listen for jobs although none is assigned.
    hot: int = 0
    #: Idle machines in the pool.
    warm: int = 0

    def document(self) -> dict[str, Any]:
        return _written(self)

    def check(self) -> None:
        _cron(self.cron)
        if self.hot < 0 or self.warm < 0:
            raise ValueError("hot and warm must not be negative")

    def describe(self) -> str:
        return f"{self.cron!r} {self.time_zone}: {self.hot} hot, {self.warm} warm"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSet:
    """One runner scale set of GitHub."""

    name: str
    #: A job is served if all labels of its `runs-on` are among these.
    labels: tuple[str, ...]
    resource_class: str
    usage_class: UsageClass = UsageClass.ON_DEMAND
    #: Patterns of instance types.
    allowed_instance_types: str = "*"
    #: Organisation or repository that the set belongs to.
    scope: str
    #: Empty for the default group.
    runner_group: str = ""
    #: Maximum number of runners, sent to GitHub as the set's capacity.
    max: int
    #: Trust in the set's jobs. A machine of a trusted set that served an untrusted job is retired.
    trust: Tier = Tier.TRUSTED
    #: Whether instances of a trusted set refuse untrusted jobs, whatever they have served before. The author of a pull
    #: request decides which labels its jobs ask for, so a set cannot rely on its labels. An untrusted set ignores it.
    strict: bool = True
    #: Whether a job that was lost to a spot interruption is run again, once.
    rerun_on_interruption: bool = False
    #: The first open window applies.
    windows: tuple[CapacityWindow, ...] = ()

    def check(self) -> None:
        """Raise `ValueError` for a stored set that no configuration can produce."""
        if not _NAME.fullmatch(self.name) or not self.labels or not 1 <= self.max <= MAX_RUNNERS:
            raise ValueError("its name, labels or maximum are invalid")

    @property
    def patterns(self) -> TypePatterns:
        return _patterns(self.allowed_instance_types)

    def serves(self, labels: Sequence[str]) -> bool:
        """Whether GitHub may assign a job with these labels to the set (facts: matching by superset, ignoring case)."""
        return bool(labels) and {label.lower() for label in labels} <= {label.lower() for label in self.labels}

    def covers(self, repository: str) -> bool:
        """Whether jobs of a repository (owner/name) may get runners of the set's scope."""
        return self.scope.lower() in {repository.lower(), repository.lower().partition("/")[0]}

    def document(self) -> dict[str, Any]:
        """The set as users write it, without what is left to its default."""
        written = _written(self) | {"labels": list(self.labels)}
        return written | ({"windows": [item.document() for item in self.windows]} if self.windows else {})

    def describe(self) -> str:
        """The set in words, without its name."""
        usage = "" if self.usage_class is UsageClass.ON_DEMAND else f" {self.usage_class}"
        types = "" if self.allowed_instance_types == "*" else f" of {self.allowed_instance_types}"
        group = f" in group {self.runner_group}" if self.runner_group else ""
        parts = [f"labels {' '.join(self.labels)}", f"up to {self.max}{usage} {self.resource_class}{types}"]
        parts += [f"for {self.scope}{group}", str(self.trust)]
        parts += [] if self.strict or self.trust is Tier.UNTRUSTED else ["not strict"]
        parts += ["re-runs interrupted jobs"] if self.rerun_on_interruption else []
        parts += [f"window {window.describe()}" for window in self.windows]
        return ", ".join(parts)

    def capacity_at(self, now: datetime, *, zone_of: Callable[[str], tzinfo]) -> CapacityWindow:
        """Return the first open window; one without runners if none is open."""
        for window in self.windows:
            if _cron(window.cron).is_open(now, zone_of(window.time_zone)):
                return window
        return CapacityWindow()


def _written(record: RunnerSet | CapacityWindow) -> dict[str, Any]:
    """The fields that are not at their defaults, by the names that users write."""
    values = {item.name: getattr(record, item.name) for item in fields(record)}
    defaults = {item.name: item.default for item in fields(record)}
    return {name.replace("_", "-"): value for name, value in values.items() if value != defaults[name]}


def with_set_for(
    labels: Sequence[str], sets: Sequence[RunnerSet], *, classes: Sequence[str], scope: str
) -> tuple[RunnerSet, ...] | None:
    """The sets and a new one that serves jobs with these labels; None if that is not possible.

    Example: for `[self-hosted, gpu]` and no sets, a set `gpu` of the class `large`. The other sets stay as they are,
    because GitHub does not change labels. So there is none for `[self-hosted, large, gpu]` beside a set
    `[self-hosted, large]`: the new set would compete for its jobs.
    """
    taken = {item.name for item in sets}
    named = [re.sub(r"[^a-z0-9_-]+", "-", label.lower()).strip("-")[:40] for label in labels]
    name = next((each for each in reversed(named) if _NAME.fullmatch(each) and each not in taken), "")
    own_class = next((each for each in classes if each.lower() in named), "")
    default = "large" if "large" in classes else next(iter(classes), "")
    added = RunnerSet(
        name=name, labels=tuple(labels), resource_class=own_class or default, scope=scope, max=SUGGESTED_MAX
    )
    try:
        return parse_runner_sets([item.document() for item in (*sets, added)], default_scope=scope, zone_of=_any_zone)
    except UserError:
        return None


def _any_zone(_name: str) -> tzinfo:
    """For sets whose time zones were checked before."""
    return UTC


def is_set_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


@lru_cache(maxsize=256)
def _patterns(text: str) -> TypePatterns:
    return TypePatterns.parse(text)


@lru_cache(maxsize=256)
def _cron(text: str) -> Cron:
    return parse_cron(text)


# Configuration ------------------------------------------------------------------------------------------------------


def parse_runner_sets(document: Any, *, default_scope: str, zone_of: Callable[[str], tzinfo]) -> tuple[RunnerSet, ...]:
    """Parse a document from JSON or TOML. `zone_of` raises `ValueError` for an unknown time zone.

    If `default_scope` is empty, sets without a scope keep an empty one until `in_scope`.
    """
    if not isinstance(document, list) or len(document) > MAX_SETS:
        got = f"a list of {len(document)}" if isinstance(document, list) else quote(document, MAX_SHOWN)
        if isinstance(document, Mapping) and "name" in document:
            raise UserError(f"{FIELD} is one set, not a list: {got}", field=FIELD, fix="put it into brackets: [{…}]")
        raise UserError(f"{FIELD} must be a list of up to {MAX_SETS} sets, got {got}", field=FIELD, fix=FIX)
    sets = tuple(_SetParser(f"{FIELD}[{number}]", body, zone_of).parse() for number, body in enumerate(document))
    return in_scope(sets, default_scope)


def in_scope(sets: Sequence[RunnerSet], default_scope: str) -> tuple[RunnerSet, ...]:
    """Return the sets with the scope for those that have none. Raises `UserError` if they contradict each other."""
    scoped = tuple(item if item.scope else replace(item, scope=default_scope) for item in sets)
    _check_distinct(scoped)
    for item in scoped:
        if item.runner_group and "/" in item.scope:
            raise UserError(
                f"{FIELD}: runner-group of {item.name!r} is {item.runner_group!r}, "
                f"but {item.scope} is a repository without groups",
                field=FIELD,
                fix="set scope to the organization, or remove runner-group",
            )
    return scoped


def check_fits_pool(sets: Sequence[RunnerSet], *, classes: Collection[str], reuse: Reuse) -> None:
    """Raise `UserError` for a set that the other settings of the pool do not allow."""
    for item in sets:
        if item.resource_class not in classes:
            raise UserError(
                f"{FIELD}: resource-class of {item.name!r} is {quote(item.resource_class, MAX_SHOWN)}, "
                "which is not a class of this pool",
                field=FIELD,
                fix=f"use one of {', '.join(classes)}, or add it to resource-class-config",
            )
        if reuse is Reuse.SAME_REPO and "/" not in item.scope:
            raise UserError(
                f"{FIELD}: scope of {item.name!r} is the organization {item.scope!r}, but reuse is {reuse}",
                field=FIELD,
                fix="give the set the scope of one repository, or change reuse: any job of its scope may get a runner",
            )


def capacity_warnings(sets: Sequence[RunnerSet], *, max_instances: int) -> list[str]:
    """Sentences about sets that cannot reach their maximum."""
    return [
        f"{FIELD}: max of {item.name!r} is {item.max}, but max-instances is {max_instances}: raise max-instances, "
        "or jobs above it wait"
        for item in sets
        if item.max > max_instances
    ]


def _check_distinct(sets: Sequence[RunnerSet]) -> None:
    for number, one in enumerate(sets):
        for other in sets[:number]:
            if one.name.lower() == other.name.lower():
                raise UserError(f"{FIELD}: two sets are named {one.name!r}", field=FIELD, fix="rename one of them")
            if _may_share_jobs(one.scope, other.scope) and (one.serves(other.labels) or other.serves(one.labels)):
                wide, narrow = (one, other) if one.serves(other.labels) else (other, one)
                raise UserError(
                    f"{FIELD}: the labels of {wide.name!r} include those of {narrow.name!r}, "
                    f"so that GitHub may assign a job of {narrow.name!r} to either",
                    field=FIELD,
                    fix="give each set a label that the other has not",
                )


def _may_share_jobs(one: str, other: str) -> bool:
    """Whether a repository may be served by runners of both scopes."""
    one, other = one.lower(), other.lower()
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


class _SetParser:
    def __init__(self, where: str, body: Any, zone_of: Callable[[str], tzinfo]) -> None:
        self._where = where
        self._zone_of = zone_of
        if not isinstance(body, Mapping):
            raise self._invalid("", body, FIX)
        self._body = body

    def parse(self) -> RunnerSet:
        known = (
            "name", "labels", "resource-class", "usage-class", "allowed-instance-types", "scope", "runner-group",
            "max", "trust", "strict", "rerun-on-interruption", "windows",
        )  # fmt: skip
        _check_keys(self._where, self._body, known)
        name = self._text("name")
        if not _NAME.fullmatch(name):
            raise self._invalid("name", name, "use up to 40 letters, digits, '_' or '-'")
        scope, types = self._text("scope", ""), self._text("allowed-instance-types", "*")
        try:
            if scope:
                check_scope(scope, field=f"{self._where}: scope")
            types = str(TypePatterns.parse(types, field=f"{self._where}: allowed-instance-types"))
        except UserError as error:
            raise UserError(error.message, field=FIELD, fix=error.fix) from None
        group = self._text("runner-group", "")
        if len(group) > MAX_GROUP or not group.isprintable():
            raise self._invalid("runner-group", group, "give the name of a runner group of the organisation")
        return RunnerSet(
            # GitHub ignores the case of names: in another case, it is the same set.
            name=name.lower(),
            labels=self._labels(),
            resource_class=self._text("resource-class", name),
            usage_class=self._choice("usage-class", UsageClass, UsageClass.ON_DEMAND),
            allowed_instance_types=types,
            scope=scope,
            runner_group=group,
            max=self._number("max", least=1, most=MAX_RUNNERS),
            trust=self._choice("trust", Tier, Tier.TRUSTED),
            strict=self._flag("strict", default=True),
            rerun_on_interruption=self._flag("rerun-on-interruption", default=False),
            windows=self._windows(),
        )

    def _invalid(self, key: str, value: Any, fix: str) -> UserError:
        name = f"{self._where}: {key}" if key else self._where
        return UserError(f"{name} {_state(value)}", field=FIELD, fix=fix)

    def _text(self, key: str, default: str | None = None) -> str:
        value = self._body.get(key, default)
        if not isinstance(value, str) or (default is None and not value):
            raise self._invalid(key, value, "give a text")
        return value

    def _number(self, key: str, *, least: int, most: int) -> int:
        return _integer(self._where, key, self._body.get(key), least, most)

    def _flag(self, key: str, *, default: bool) -> bool:
        value = self._body.get(key, default)
        if not isinstance(value, bool):
            raise self._invalid(key, value, "give true or false")
        return value

    def _choice(self, key: str, choices: type[E], default: E) -> E:
        value = self._body.get(key, default)
        try:
            return choices(value)
        except ValueError:
            raise self._invalid(key, value, f"use one of {', '.join(choices)}") from None

    def _labels(self) -> tuple[str, ...]:
        value = self._body.get("labels")
        fix = f"give a list of 1 to {MAX_LABELS} labels, as in runs-on"
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_LABELS:
            raise self._invalid("labels", value, fix)
        for number, label in enumerate(value):
            valid = isinstance(label, str) and label.isprintable() and len(label) <= MAX_LABEL
            if not valid or not _LABEL.fullmatch(label):
                label_fix = f"give 1 to {MAX_LABEL} printable characters, without commas or spaces at the ends"
                raise self._invalid(f"labels[{number}]", label, label_fix)
        distinct = {label.lower(): label for label in reversed(value)}
        return tuple(distinct.values())[::-1]

    def _windows(self) -> tuple[CapacityWindow, ...]:
        value = self._body.get("windows", ())
        if not isinstance(value, list | tuple) or len(value) > MAX_CAPACITY_WINDOWS:
            raise self._invalid("windows", value, f"give a list of up to {MAX_CAPACITY_WINDOWS} windows")
        return tuple(self._window(f"{self._where}: windows[{number}]", body) for number, body in enumerate(value))

    def _window(self, where: str, body: Any) -> CapacityWindow:
        example = 'give a window such as {"cron": "* 9-17 * * 1-5", "time-zone": "Europe/Berlin", "hot": 1, "warm": 2}'
        if not isinstance(body, Mapping):
            raise UserError(f"{where} is {quote(body, MAX_SHOWN)}", field=FIELD, fix=example)
        _check_keys(where, body, ("cron", "time-zone", "hot", "warm"))
        cron, zone = body.get("cron", "* * * * *"), body.get("time-zone", "UTC")
        try:
            parse_cron(cron if isinstance(cron, str) else "")
        except ValueError as error:
            raise UserError(
                f"{where}: cron is {quote(cron, MAX_SHOWN)}: {error}", field=FIELD, fix="give five or six fields"
            ) from None
        try:
            if not isinstance(zone, str):
                raise ValueError("not a text")  # noqa: TRY301 - handled like an unknown zone
            self._zone_of(zone)
        except ValueError:
            raise UserError(
                f"{where}: time-zone is {quote(zone, MAX_SHOWN)}", field=FIELD, fix="name a zone such as Europe/Berlin"
            ) from None
        # More hot runners than the set may have would never exist.
        hot = _integer(where, "hot", body.get("hot", 0), 0, self._number("max", least=1, most=MAX_RUNNERS))
        warm = _integer(where, "warm", body.get("warm", 0), 0, MAX_RUNNERS)
        return CapacityWindow(cron=cron, time_zone=zone, hot=hot, warm=warm)


def _check_keys(where: str, body: Mapping[Any, Any], known: Sequence[str]) -> None:
    for key in body:
        if key not in known:
            raise UserError(
                f"{where} has an unknown key {quote(key, MAX_SHOWN)}", field=FIELD, fix=suggest(str(key), known)
            )


def _integer(where: str, key: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(f"{where}: {key} {_state(value)}", field=FIELD, fix=f"give an integer from {least} to {most}")
    return value


def _state(value: Any) -> str:
    """Completes a sentence about a field with an invalid value."""
    return "is missing" if value is None else f"is {quote(value, MAX_SHOWN)}"
