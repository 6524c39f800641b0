"""Instances without records for the demo of scale-down, and the decisions that it takes."""

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
LIFETIME_S = 180.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoFleet:
    #: Runs, but never registers with GitHub.
    unregistered: str
    #: Registered, but tagged as an orphan.
    mistagged: str
    #: All registered instances, oldest first.
    registered: tuple[str, ...]

    @property
    def all_ids(self) -> set[str]:
        return {self.unregistered, *self.registered}


async def launch_fleet(settings: Settings, scope: str) -> DemoFleet:
    async with open_context(settings, SilentEventLog(), needs_github=True) as context:
        names = await _launch(context, scope)
        unregistered, *registered = names
        if context.github is None:
            raise Unavailable("there is no credential for the local GitHub")
        for name in registered:
            runner = await context.github.jit_config(scope, name=f"{NAME}-{name}", labels=[NAME])
            await context.compute.tag([name], {GHR_RUNNER_ID_TAG: str(runner.runner_id)})
        # The newest one, which the quota keeps.
        mistagged = registered[-1]
        await context.compute.tag([mistagged], {GHR_ORPHAN_TAG: YES})
        return DemoFleet(unregistered=unregistered, mistagged=mistagged, registered=tuple(registered))


async def _launch(context: Context, scope: str) -> list[str]:
    """Launch one instance after the other, so that their ages differ. Return the ids, oldest first."""
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
                first_life_s=LIFETIME_S,
                margin_s=config.lifetimes.margin_s,
                tags=tags,
            )
        )
        names += [item.instance_id for item in launched.instances]
    return names


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleDownDecisions:
    """Actions and reasons of one scale-down cycle, by instance."""

    actions: Mapping[str, tuple[str, ...]]
    reasons: Mapping[str, str]

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> ScaleDownDecisions:
        actions: dict[str, tuple[str, ...]] = {}
        reasons: dict[str, str] = {}
        for item in document["decisions"]:
            name = str(item["instance_id"])
            actions[name] = (*actions.get(name, ()), str(item["action"]))
            reasons[name] = str(item["reason"])
        return cls(actions=actions, reasons=reasons)

    def final_actions(self, names: Sequence[str]) -> list[str]:
        """Return the last action for each instance."""
        return [self.actions.get(name, ("",))[-1] for name in names]
