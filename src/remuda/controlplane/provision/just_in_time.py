"""Registrations for one job each, made just in time: one call for each instance, with a credential of our own.

GitHub has such a registration from the moment of the call on, whether its machine ever starts or not. So each one that
was made is known here until the commit, and goes with a provision that fails; what a crash leaves, the sweep for ghost
registrations finds by its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from remuda.controlplane.context import Context, each
from remuda.controlplane.provision.selection import ProvisionPlan
from remuda.domain.errors import Conflict, RemudaError, Unavailable
from remuda.domain.instance import Instance
from remuda.ports.github import GitHub

#: How long a failed provision may take to remove what it registered: after that, sweeps do it.
UNDO_LIMIT_S = 10.0


class JustInTime:
    def __init__(self, context: Context, github: GitHub, terms: ProvisionPlan) -> None:
        self._context = context
        self._github = github
        self._terms = terms
        self._made: dict[str, int] = {}

    async def register(self, newborn: Sequence[Instance]) -> list[Instance]:
        """Each with its registration. All calls are answered before one that failed is raised: then it is known which
        registrations there are.
        """
        registered: list[Instance] = []
        failures: list[RemudaError] = []
        for result in await each(newborn, self._register):
            if isinstance(result, RemudaError):
                failures.append(result)
            else:
                registered.append(result)
        if failures:
            raise failures[0]
        return registered

    async def _register(self, instance: Instance) -> Instance:
        assignment = self._terms.assignment(instance.instance_id, instance.epoch)
        name = assignment.runner_name
        try:
            runner = await self._github.jit_config(self._terms.scope, name=name, labels=assignment.labels)
        except Conflict as conflict:
            # Names are never used twice: another registered it in our name.
            raise Unavailable(
                f"GitHub has a runner {name} already: {conflict.message}", fix="run remuda refresh, and try again"
            ) from conflict
        self._made[name] = runner.runner_id
        self._context.event_log.record(
            "registered", "just in time, for one job", instance_id=instance.instance_id, run_id=instance.run_id
        )
        return replace(instance, assignment=replace(assignment, jit_config=runner.config, runner_id=runner.runner_id))

    async def undo(self) -> None:
        """Remove what was registered: its machines will not use it."""
        try:
            async with asyncio.timeout(UNDO_LIMIT_S):
                results = await each(self._made.values(), self._remove)
        except TimeoutError:
            self._context.event_log.record("rollback-incomplete", "sweeps will remove the registrations (time is up)")
            return
        for result in results:
            if isinstance(result, RemudaError):
                self._context.event_log.record("rollback-incomplete", f"a registration is left: {result.message}")

    async def _remove(self, runner_id: int) -> None:
        await self._github.delete_runner(self._terms.scope, runner_id)
