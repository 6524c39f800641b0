"""The demo's chapter on scale-down: a fleet that the pool has no records of, known by its tags alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remuda.config.settings import Settings
from remuda.controlplane.context import Context, read_config
from remuda.domain.errors import Unavailable
from remuda.domain.resources import RunnerRequest, Tier, TypePatterns, UsageClass
from remuda.domain.scale_down.fleet import (
    GHR_APPLICATION,
    GHR_APPLICATION_TAG,
    GHR_ENVIRONMENT_TAG,
    GHR_ORPHAN_TAG,
    GHR_OWNER_TAG,
    GHR_RUNNER_ID_TAG,
    GHR_TYPE_TAG,
    REPO,
    YES,
)
from remuda.ports.compute import LaunchRequest
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import open_context

NAME = "demo-fleet"
REGISTERED = 3
LIFE_S = 180.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoFleet:
    #: Runs, and never shows up on GitHub.
    silent: str
    #: On GitHub, and tagged as an orphan by mistake.
    mistaken: str
    #: On GitHub, the mistaken one among them.
    registered: tuple[str, ...]

    @property
    def everyone(self) -> set[str]:
        return {self.silent, *self.registered}


async def launch_fleet(settings: Settings, scope: str) -> DemoFleet:
    async with open_context(settings, SilentEventLog(), credentialed=True) as context:
        names = await _launch(context, scope)
        silent, *registered = names
        if context.github is None:
            raise Unavailable("the demo has no credential for the local GitHub")
        for name in registered:
            runner = await context.github.jit_config(scope, name=f"{NAME}-{name}", labels=[NAME])
            await context.compute.tag([name], {GHR_RUNNER_ID_TAG: str(runner.runner_id)})
        # The newest: the quota keeps it.
        mistaken = registered[-1]
        await context.compute.tag([mistaken], {GHR_ORPHAN_TAG: YES})
        return DemoFleet(silent=silent, mistaken=mistaken, registered=tuple(registered))


async def _launch(context: Context, scope: str) -> list[str]:
    """Oldest first. One after the other: of those that are launched together, none is the oldest."""
    config = await read_config(context)
    request = RunnerRequest(
        resource_class=config.classes[0],
        usage_class=UsageClass.ON_DEMAND,
        patterns=TypePatterns(("*",)),
        tier=Tier.TRUSTED,
    )
    tags = {
        GHR_ENVIRONMENT_TAG: context.pool_name,
        GHR_APPLICATION_TAG: GHR_APPLICATION,
        GHR_OWNER_TAG: scope,
        GHR_TYPE_TAG: REPO,
    }
    names: list[str] = []
    for number in range(REGISTERED + 1):
        launched = await context.compute.launch(
            LaunchRequest(
                provision_id=NAME,
                client_token=f"{NAME}-{number}",
                count=1,
                request=request,
                scope=scope,
                launch=config.launch,
                first_life_s=LIFE_S,
                margin_s=config.lifetimes.margin_s,
                tags=tags,
            )
        )
        names += [item.instance_id for item in launched.instances]
    return names


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """What a cycle decided, by machine."""

    actions: Mapping[str, tuple[str, ...]]
    reasons: Mapping[str, str]

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Decided:
        actions: dict[str, tuple[str, ...]] = {}
        reasons: dict[str, str] = {}
        for item in document["decisions"]:
            name = str(item["instance_id"])
            actions[name] = (*actions.get(name, ()), str(item["action"]))
            reasons[name] = str(item["reason"])
        return cls(actions=actions, reasons=reasons)

    def last(self, names: Sequence[str]) -> list[str]:
        """The last word on each."""
        return [self.actions.get(name, ("",))[-1] for name in names]
