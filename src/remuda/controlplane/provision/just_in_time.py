"""Just-in-time registrations: one GitHub call per new instance, each for one job.

GitHub keeps such a registration from the call on, whether or not its machine starts. A provision that fails removes
those that it made; after a crash, the sweep for stale registrations finds them by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from remuda.controlplane.context import Context, map_concurrently
from remuda.controlplane.provision.plan import ProvisionPlan
from remuda.domain.errors import Conflict, RemudaError, Unavailable
from remuda.domain.instance import Instance
from remuda.ports.github import GitHub

#: Seconds that a failed provision may spend on removing its registrations. Sweeps remove the rest.
REMOVAL_TIMEOUT_S = 10.0


class JustInTimeRegistrations:
    def __init__(self, context: Context, github: GitHub, plan: ProvisionPlan) -> None:
        self._context = context
        self._github = github
        self._plan = plan
        self._runner_ids: dict[str, int] = {}

    async def register(self, instances: Sequence[Instance]) -> list[Instance]:
        """Return the instances with their registrations.

        An error is raised only after all calls have returned, so that every registration that was made is known.
        """
        registered: list[Instance] = []
        failures: list[RemudaError] = []
        for result in await map_concurrently(instances, self._register):
            if isinstance(result, RemudaError):
                failures.append(result)
            else:
                registered.append(result)
        if failures:
            raise failures[0]
        return registered

    async def _register(self, instance: Instance) -> Instance:
        assignment = self._plan.assignment(instance.instance_id, instance.epoch)
        name = assignment.runner_name
        try:
            runner = await self._github.jit_config(self._plan.scope, name=name, labels=assignment.labels)
        except Conflict as conflict:
            # Runner names never recur, so this registration is not ours.
            raise Unavailable(
                f"GitHub already has a runner named {name}: {conflict.message}", fix="run remuda refresh and try again"
            ) from conflict
        self._runner_ids[name] = runner.runner_id
        self._context.event_log.record(
            "registered", "just in time, for one job", instance_id=instance.instance_id, run_id=instance.run_id
        )
        return replace(instance, assignment=replace(assignment, jit_config=runner.config, runner_id=runner.runner_id))

    async def remove_all(self) -> None:
        """Remove the registrations of a failed provision."""
        try:
            async with asyncio.timeout(REMOVAL_TIMEOUT_S):
                results = await map_concurrently(self._runner_ids.values(), self._remove)
        except TimeoutError:
            self._context.event_log.record("rollback-incomplete", "timeout; sweeps will remove the registrations")
            return
        for result in results:
            if isinstance(result, RemudaError):
                self._context.event_log.record("rollback-incomplete", f"a registration is left: {result.message}")

    async def _remove(self, runner_id: int) -> None:
        await self._github.delete_runner(self._plan.scope, runner_id)
