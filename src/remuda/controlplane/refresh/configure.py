"""The pool's configuration: apply the desired settings, renew tokens, report what changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from remuda.controlplane.context import Context, map_concurrently
from remuda.controlplane.refresh.result import RefreshResult, combined, warned
from remuda.domain.errors import Conflict, RemudaError, Unavailable, UserError
from remuda.domain.pool_config import DEFAULT_GROUP_ID, RECORD_VERSION, PoolConfig, ScopeTokens, may_hold_secret
from remuda.domain.reporting.warnings import WarningKind
from remuda.domain.resources import ResourceClass, Reuse
from remuda.domain.runner_release import IMAGE, RunnerChoice, RunnerRelease, resolve_release
from remuda.domain.runner_set import FIELD as RUNNER_SETS
from remuda.domain.runner_set import RunnerSet, capacity_warnings, check_fits_pool
from remuda.domain.serialization import to_jsonable
from remuda.domain.thresholds import Lifetimes
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.github import GitHub

#: A token with fewer seconds left of its hour is replaced.
MIN_TOKEN_LIFE_S = 3_000.0
#: Attempts to write the configuration while other refreshes write it.
CONFIG_WRITE_ATTEMPTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredConfig:
    """The configuration from flags, environment and file."""

    pool: str
    classes: tuple[ResourceClass, ...]
    lifetimes: Lifetimes
    max_instances: int
    github_url: str
    scope: str
    #: Runner group of the organisation, or empty for its default group.
    runner_group: str = ""
    launch: Mapping[str, str] = field(default_factory=dict)
    reuse: Reuse = Reuse.SAME_TRUST
    runner_sets: tuple[RunnerSet, ...] = ()
    monthly_budget: float = 0.0
    #: What no one has set, so that the stored value stays: fields of this class, fields of `Lifetimes`, launch options.
    unset: frozenset[str] = frozenset()

    def over(self, stored: PoolConfig | None) -> DesiredConfig:
        """Return it with the stored values of what is unset."""
        if stored is None or not self.unset:
            return self
        tokens = stored.find_tokens(self.scope)
        values = {
            **{name: getattr(stored, name) for name in _STORED_FIELDS & self.unset},
            **({"runner_group": tokens.runner_group} if tokens and "runner_group" in self.unset else {}),
        }
        kept = {
            item.name: getattr(stored.lifetimes, item.name) for item in fields(Lifetimes) if item.name in self.unset
        }
        launch = {name: value for name, value in self.launch.items() if name not in self.unset}
        launch |= {name: value for name, value in stored.launch.items() if name in self.unset}
        return replace(self, **values, lifetimes=replace(self.lifetimes, **kept), launch=launch)


#: Fields of `DesiredConfig` that the stored configuration has under the same name.
_STORED_FIELDS = frozenset({"classes", "max_instances", "github_url", "reuse", "runner_sets", "monthly_budget"})


async def apply_configuration(context: Context, desired: DesiredConfig) -> tuple[PoolConfig, RefreshResult]:
    """Apply the desired configuration. Return the stored one and what has changed."""
    github = context.github
    if github is None:
        raise UserError("refresh needs a GitHub credential", field="github-token", fix="set REMUDA_GITHUB_TOKEN")
    # Check the store and the GitHub credential first, so that nothing else is created if one of them is rejected.
    prepared = await context.store.prepare()
    stored = await context.store.get_config()
    given = desired
    desired = _checked(given, stored)
    limits = capacity_warnings(desired.runner_sets, max_instances=desired.max_instances)
    tokens = await _mint_if_due(context, github, stored, desired)
    choice = RunnerChoice.parse(desired.launch)
    newest, problems = await _newest_runner(github, desired.scope, choice, stored)
    now = to_milliseconds(context.clock.now())
    runner = resolve_release(choice, newest, stored.runner if stored else None, now=now, github_url=desired.github_url)
    done = combined(
        [
            RefreshResult(applied=(*prepared, *await _prepare(context, desired, runner)), errors=problems),
            *(warned(WarningKind.RUNNER_SET, warning) for warning in limits),
        ]
    )
    for _ in range(CONFIG_WRITE_ATTEMPTS):
        config = PoolConfig(
            pool=desired.pool,
            classes=desired.classes,
            lifetimes=desired.lifetimes,
            max_instances=desired.max_instances,
            github_url=desired.github_url,
            launch=dict(desired.launch),
            reuse=desired.reuse,
            runner_sets=desired.runner_sets,
            monthly_budget=desired.monthly_budget,
            # Without a budget nobody counted, so the cost is outdated: it is measured anew.
            spending=stored.spending if stored and stored.monthly_budget else None,
            applied_at=to_milliseconds(context.clock.now()),
            record_version=RECORD_VERSION,
            revision=stored.revision + 1 if stored else 1,
            tokens=_with_tokens(stored.tokens if stored else (), tokens),
            runner=resolve_release(
                choice, newest, stored.runner if stored else None, now=now, github_url=desired.github_url
            ),
        )
        changed = config_changes(stored, config) if stored else {}
        applied = list(changed) if stored else [f"configuration of pool {config.pool}"]
        if tokens:
            group = f", runner group {desired.runner_group}" if desired.runner_group else ""
            applied.append(f"tokens for {desired.scope}{group}")
        if not applied and not _has_runner_news(stored, config):
            config, renewed = await renew_tokens(context, stored or config)
            return config, combined([done, renewed])
        try:
            await context.store.put_config(config)
        except Conflict:
            stored = await context.store.get_config()
            desired = _checked(given, stored)
            tokens = tokens or await _mint_if_due(context, github, stored, desired)
            continue
        changes = {name: values for name, values in changed.items() if values is not None}
        config, renewed = await renew_tokens(context, config)
        return config, combined([done, RefreshResult(applied=tuple(applied), changes=changes), renewed])
    raise Conflict("the pool's configuration keeps changing; check whether another refresh is running")


def _checked(given: DesiredConfig, stored: PoolConfig | None) -> DesiredConfig:
    """The configuration to apply. Raises `UserError` for sets that the rest of the configuration does not allow."""
    desired = given.over(stored)
    check_fits_pool(desired.runner_sets, classes=[item.name for item in desired.classes], reuse=desired.reuse)
    return desired


async def _prepare(context: Context, desired: DesiredConfig, runner: RunnerRelease | None) -> list[str]:
    """Prepare queues and launch resources concurrently. Both calls end before an error of one is raised."""
    applied: list[str] = []
    prepared = await asyncio.gather(
        context.pool.prepare([resource_class.name for resource_class in desired.classes]),
        context.compute.prepare({**desired.launch, **(runner.launch_options() if runner else {})}, desired.classes),
        return_exceptions=True,
    )
    for lines in prepared:
        if isinstance(lines, BaseException):
            raise lines
        applied.extend(lines)
    return applied


# Version of the actions runner --------------------------------------------------------------------------------------


async def _newest_runner(
    github: GitHub, scope: str, choice: RunnerChoice, stored: PoolConfig | None
) -> tuple[RunnerRelease | None, tuple[str, ...]]:
    """Ask GitHub for the newest release. None if it is not needed, or if there is no answer and a release is known.

    The second value has the error in the latter case.
    """
    if choice.version == IMAGE:
        return None, ()
    try:
        return await github.runner_downloads(scope), ()
    except RemudaError as error:
        known = choice.release or (stored.runner if stored else None)
        problem = f"the newest version of the actions runner: {error.message}"
        if known is None:
            error.args = (problem,)
            raise
        return None, (f"{problem}; new machines install {known.version}",)


def _has_runner_news(stored: PoolConfig | None, config: PoolConfig) -> bool:
    """Whether to store what refresh learned about newer versions. The time alone is stored with the next change."""
    before, after = stored.runner if stored else None, config.runner
    if before is None or after is None:
        return before is not after
    return replace(before, checked_at=after.checked_at) != after


# Tokens -------------------------------------------------------------------------------------------------------------


async def _mint_if_due(
    context: Context, github: GitHub, stored: PoolConfig | None, desired: DesiredConfig
) -> ScopeTokens | None:
    """New tokens for the desired scope. None if the stored ones are fresh, or if GitHub does not answer.

    The sweeps run without an answer of GitHub. `renew_tokens` tries again, and reports the failure.
    """
    known, scope, group = stored.tokens if stored else (), desired.scope, desired.runner_group
    if _are_fresh(context, known, scope, group):
        return None
    try:
        return await _mint(github, scope, group)
    except Unavailable:
        if not any(_is_for(item, scope, group) for item in known):
            raise
        return None


async def renew_tokens(context: Context, config: PoolConfig) -> tuple[PoolConfig, RefreshResult]:
    """Replace tokens that expire soon, for every scope of the pool."""
    github = context.github
    if github is None:
        return config, RefreshResult()
    due = [item for item in config.tokens if not _are_fresh(context, config.tokens, item.scope, item.runner_group)]
    # Concurrently: the sweeps wait for this, and GitHub may not answer.
    minted = await map_concurrently(due, lambda item: _mint(github, item.scope, item.runner_group))
    after, errors = config, []
    for old, new in zip(due, minted, strict=True):
        if isinstance(new, RemudaError):
            errors.append(f"tokens for {old.scope}: {new.message}")
        else:
            after = replace(after, tokens=_with_tokens(after.tokens, new))
    failed = RefreshResult(errors=tuple(errors))
    if after == config:
        return config, failed
    after = replace(after, revision=config.revision + 1, applied_at=to_milliseconds(context.clock.now()))
    try:
        await context.store.put_config(after)
    except Conflict as conflict:
        # Another refresh wrote first; its tokens are as fresh.
        return conflict.current if isinstance(conflict.current, PoolConfig) else config, failed
    except RemudaError as error:
        return config, combined([failed, RefreshResult(errors=(f"tokens: {error.message}",))])
    renewed = tuple(f"tokens for {item.scope}" for item in minted if not isinstance(item, RemudaError))
    return after, combined([failed, RefreshResult(applied=renewed)])


def _are_fresh(context: Context, tokens: tuple[ScopeTokens, ...], scope: str, group: str) -> bool:
    now = context.clock.now()
    return any(
        (_expires_at(item) - now).total_seconds() > MIN_TOKEN_LIFE_S for item in tokens if _is_for(item, scope, group)
    )


def _is_for(tokens: ScopeTokens, scope: str, group: str) -> bool:
    return tokens.scope.lower() == scope.lower() and tokens.runner_group == group


async def _mint(github: GitHub, scope: str, group: str) -> ScopeTokens:
    group_id = await github.runner_group_id(scope, group) if group else DEFAULT_GROUP_ID
    registration, removal = await asyncio.gather(github.registration_token(scope), github.removal_token(scope))
    return ScopeTokens(
        scope=scope, registration=registration, removal=removal, runner_group=group, runner_group_id=group_id
    )


def _with_tokens(tokens: tuple[ScopeTokens, ...], new: ScopeTokens | None) -> tuple[ScopeTokens, ...]:
    """Replace the tokens of a scope, unless another refresh has stored fresher ones since the new ones were made."""
    if new is None or any(_is_for(item, new.scope, new.runner_group) and _is_fresher(item, new) for item in tokens):
        return tokens
    return (*(item for item in tokens if item.scope.lower() != new.scope.lower()), new)


def _is_fresher(one: ScopeTokens, other: ScopeTokens) -> bool:
    return _expires_at(one) > _expires_at(other)


def _expires_at(tokens: ScopeTokens) -> datetime:
    return min(tokens.registration.expires_at, tokens.removal.expires_at)


# Changed settings ---------------------------------------------------------------------------------------------------

#: Fields that every refresh changes.
_BOOKKEEPING = frozenset({"applied_at", "revision", "tokens", "spending"})
_RUNNER = "runner"
#: Settings whose name or unit differs from the field's.
_CLASSES = "resource-class-config"
_RUNTIME = "max-runtime-min"

#: A setting's name with its previous and new value. The values are None if they may hold a secret: a script, or a
#: signed URL.
SettingChange = tuple[str, tuple[Any, Any] | None]


def config_changes(before: PoolConfig, after: PoolConfig) -> dict[str, tuple[Any, Any] | None]:
    """Changed settings by the names that users write, in the order of the record's fields."""
    found: dict[str, tuple[Any, Any] | None] = {}
    for item in fields(PoolConfig):
        old, new = getattr(before, item.name), getattr(after, item.name)
        if item.name not in _BOOKKEEPING and old != new:
            found.update(_field_changes(item.name, old, new))
    return found


def _field_changes(name: str, old: Any, new: Any) -> Iterator[SettingChange]:
    if isinstance(old, Lifetimes):
        yield from _lifetime_changes(old, new)
    elif isinstance(old, Mapping):
        yield from _launch_changes(old, new)
    elif name == _RUNNER:
        before, after = (release.version if release else None for release in (old, new))
        if before != after:
            yield "actions runner", (before, after)
    elif name == "classes":
        before, after = ({item.name: item.describe() for item in classes} for classes in (old, new))
        yield _CLASSES, (_without(before, after), _without(after, before))
    elif name == "runner_sets":
        before, after = ({item.name: item.describe() for item in sets} for sets in (old, new))
        yield RUNNER_SETS, (_without(before, after), _without(after, before))
    else:
        yield _setting_name(name), (to_jsonable(old), to_jsonable(new))


def _lifetime_changes(before: Lifetimes, after: Lifetimes) -> Iterator[SettingChange]:
    for item in fields(Lifetimes):
        old, new = getattr(before, item.name), getattr(after, item.name)
        if old == new:
            continue
        if item.name == "max_runtime_s":
            yield _RUNTIME, (old / 60, new / 60)
        else:
            yield _setting_name(item.name), (old, new)


def _launch_changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[SettingChange]:
    for name in sorted({**before, **after}):
        old, new = before.get(name), after.get(name)
        if old != new:
            yield _setting_name(name), None if may_hold_secret(name) else (old, new)


def _setting_name(name: str) -> str:
    """The user's name for a field: `idle_time_s` is `idle-time-sec`."""
    known = name.replace("_", "-")
    return f"{known}ec" if known.endswith("-s") else known


def _without(classes: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    return {name: size for name, size in classes.items() if others.get(name) != size}
