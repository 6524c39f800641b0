"""The steps of a smoke run, and its clean-up."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from remuda.domain.errors import RemudaError, TimedOut
from remuda.ports.clock import Clock
from tests.smoke.budget import MACHINES, TYPES, Meter
from tests.smoke.record import SmokeRecord
from tests.smoke.repository import PREFIX as BRANCH_PREFIX
from tests.smoke.repository import PushedRun
from tests.smoke.workflow import JOB, LONG_JOB, branch_files, set_workflow, smoke_workflow

T = TypeVar("T")

POLL_S = 10.0
RUN_STARTS_WITHIN_S = 120.0
#: A cold run: launch, boot, package installation, job, release.
RUN_TAKES_S = 1_500.0
IDLE_WITHIN_S = 420.0
NOTICE_WITHIN_S = 420.0
MACHINES_GONE_WITHIN_S = 300.0
#: Minutes that a run may keep its machines: a limit of costs that holds without this process.
MAX_RUNTIME_MIN = 25
IDLE_TIME_S = 900
CLASSES = f'{{"large": {{"cpu": 2, "mmem": 4096, "max-cpu": 2, "instance-types": "{" ".join(TYPES)}"}}}}'


class SmokeFailure(RemudaError):
    """A step did not show what it must show."""


class RemudaCommand(Protocol):
    async def __call__(self, step: str, *arguments: str) -> Mapping[str, Any]:
        """Run the command and return its JSON document. Raises if its exit code is not 0."""
        ...


class AccountCalls(Protocol):
    async def machines(self, pool: str) -> list[str]: ...

    async def terminate(self, machines: list[str]) -> None: ...

    async def create_fis_role(self, pool: str) -> str: ...

    async def send_spot_notice(self, pool: str, instance_id: str, *, role_arn: str) -> str: ...

    async def experiment_state(self, experiment_id: str) -> tuple[str, str]: ...

    async def remove_experiments(self, pool: str) -> None: ...

    async def pools(self) -> set[str]: ...


class RepositoryCalls(Protocol):
    async def identity(self) -> str: ...

    async def push(self, branch: str, files: Mapping[str, str]) -> str: ...

    async def branches(self, prefix: str = ...) -> list[str]: ...

    async def delete_branch(self, branch: str) -> None: ...

    async def run_of(self, commit: str) -> PushedRun | None: ...

    async def run(self, run_id: int) -> PushedRun: ...

    async def jobs(self, run_id: int) -> dict[str, tuple[str, str | None]]: ...

    async def open_runs(self, branch: str) -> list[PushedRun]: ...

    async def cancel(self, run_id: int) -> None: ...


@dataclass(kw_only=True)
class SmokeRun:
    pool: str
    #: owner/name.
    scope: str
    bundles: str
    remuda: RemudaCommand
    account: AccountCalls
    repository: RepositoryCalls
    clock: Clock
    meter: Meter
    say: Callable[[str], None]
    record: SmokeRecord
    #: Called after each step, with its name.
    on_step_end: Callable[[str], None] = lambda _: None
    _workflow: str = ""
    _role_arn: str = ""
    _machine: str = ""
    _uses: int = 0
    _counted_s: float = 0.0

    @property
    def branch(self) -> str:
        return BRANCH_PREFIX + self.pool

    # Run ------------------------------------------------------------------------------------------------------------

    def steps(self) -> Sequence[tuple[str, Callable[[], Awaitable[None]]]]:
        return (
            ("deploy", self.deploy),
            ("doctor", self.doctor),
            ("cold run", self.cold_run),
            ("reuse", self.reuse),
            ("runner set", self.runner_set),
            ("spot notice", self.spot_notice),
            ("destroy", self.destroy),
        )

    async def run(self) -> None:
        """All steps, and the clean-up whatever happens. Raises the first failure."""
        await self.clean_up_earlier()
        try:
            for name, step in self.steps():
                self.meter.check()
                self.say(f"{name} (at most {self.meter.spent_usd:.2f} USD so far)")
                try:
                    with self.record.step(name):
                        await self._metered(step())
                finally:
                    self.on_step_end(name)
        finally:
            left: list[str] = []
            with suppress(SmokeFailure), self.record.step("clean-up"):
                left = await self.clean_up(self.pool)
                _check_clean(left)
            self.on_step_end("clean-up")
        _check_clean(left)

    async def _metered(self, work: Awaitable[None]) -> None:
        """Count the time of a step that did not count it itself."""
        started, counted = self.clock.monotonic(), self._counted_s
        await work
        rest = self.clock.monotonic() - started - (self._counted_s - counted)
        self._count(machines=MACHINES, seconds=max(rest, 0.0))

    def _count(self, *, machines: int, seconds: float) -> None:
        self.meter.add(machines=machines, seconds=seconds)
        self._counted_s += seconds

    async def until(self, what: str, look: Callable[[], Awaitable[T | None]], *, within_s: float) -> T:
        """Poll until there is a result. Counts machines and stops the run if the budget is used up."""
        deadline = self.clock.monotonic() + within_s
        while True:
            before = self.clock.monotonic()
            found = await look()
            if found is not None:
                return found
            if self.clock.monotonic() >= deadline:
                raise TimedOut(f"{what} did not happen within {within_s:g} seconds")
            machines = len(await self.account.machines(self.pool))
            if machines > MACHINES:
                raise SmokeFailure(f"the pool has {machines} machines, more than its limit of {MACHINES}")
            await self.clock.sleep(POLL_S)
            self._count(machines=machines, seconds=self.clock.monotonic() - before)
            self.meter.check()

    # Steps ----------------------------------------------------------------------------------------------------------

    async def deploy(self) -> None:
        # Early, because a new role is not known everywhere at once.
        self._role_arn = await self.account.create_fis_role(self.pool)
        # New repositories have immutable subject claims, older ones do not.
        repositories = f"{self.scope},{await self.repository.identity()}"
        self._workflow = await self._deployed_workflow(
            "deploy",
            *("--github-scope", self.scope, "--repositories", repositories),
            *("--max-instances", str(MACHINES), "--max-runtime-min", str(MAX_RUNTIME_MIN)),
            *("--idle-time-sec", str(IDLE_TIME_S), "--resource-class-config", CLASSES),
        )

    async def _deployed_workflow(self, step: str, *settings: str) -> str:
        """Deploy with these settings. Return the workflow that the command prints."""
        document = await self.remuda(step, *("deploy", "--pool", self.pool, "--dist", self.bundles, "--yes"), *settings)
        if not document["workflow"]:
            raise SmokeFailure("remuda deploy printed no workflow")
        return str(document["workflow"])

    async def doctor(self) -> None:
        document = await self.remuda("doctor", "doctor", "--backend", "aws", "--pool", self.pool)
        problems = [item["name"] for item in document["checks"] if item["status"] == "problem"]
        if problems:
            raise SmokeFailure(f"remuda doctor found problems: {', '.join(problems)}")

    async def cold_run(self) -> None:
        """A run with the role of the workflow, through the broker: launch, a job with sudo and docker, release."""
        await self._successful_run("cold run")
        (machine,) = await self._idle_machines("cold run")
        self._machine, self._uses = machine["instance_id"], int(machine["uses"])
        report = await self.remuda("cold run", "report", "--backend", "aws", "--pool", self.pool)
        self.record.boot_s = report["savings"]["boot_seconds"]

    async def reuse(self) -> None:
        await self._successful_run("reuse")
        (machine,) = await self._idle_machines("reuse")
        if (machine["instance_id"], machine["uses"]) != (self._machine, self._uses + 1):
            raise SmokeFailure(f"the second run did not reuse {self._machine}, but used {machine['instance_id']}")

    async def runner_set(self) -> None:
        """A job without provision gets the idle machine by its labels; deploy waits for the listener."""
        (resource_class,) = json.loads(CLASSES)
        sets = [{"name": self.pool, "labels": [self.pool], "resource-class": resource_class, "max": 1}]
        pasted = await self._deployed_workflow("runner set", "--runner-sets", json.dumps(sets))
        await self._run_workflow(set_workflow(pasted, job=JOB))
        (machine,) = await self._idle_machines("runner set")
        if machine["instance_id"] != self._machine:
            raise SmokeFailure(f"the runner set did not reuse {self._machine}, but used {machine['instance_id']}")

    async def spot_notice(self) -> None:
        run = await self._start(smoke_workflow(self._workflow, job=LONG_JOB, spot=True))

        async def job_runs() -> bool | None:
            await self._not_done(run.run_id)
            jobs = await self.repository.jobs(run.run_id)
            return True if jobs.get("test", ("", None))[0] == "in_progress" else None

        await self.until("the job on a spot machine", job_runs, within_s=RUN_TAKES_S)
        (machine,) = [each for each in await self._machines("spot notice") if is_held_by(each, run.run_id)]
        if machine["usage_class"] != "spot":
            raise SmokeFailure(f"{machine['instance_id']} is {machine['usage_class']}, not spot")
        experiment = await self.account.send_spot_notice(self.pool, machine["instance_id"], role_arn=self._role_arn)

        async def is_reported() -> bool | None:
            state, reason = await self.account.experiment_state(experiment)
            if state in {"failed", "stopped", "cancelled"}:
                raise SmokeFailure(f"FIS did not send the notice: {state}: {reason}")
            for each in await self._machines("spot notice"):
                report = each.get("report") or {}
                is_same = each["instance_id"] == machine["instance_id"]
                if is_same and (report.get("notice") or each.get("retire_reason") == "spot-notice"):
                    return True
            return None

        await self.until("the agent's report of the spot notice", is_reported, within_s=NOTICE_WITHIN_S)
        await self.repository.cancel(run.run_id)
        await self.until("the end of the cancelled run", lambda: self._end(run.run_id), within_s=RUN_TAKES_S)

    async def destroy(self) -> None:
        await self.remuda("destroy", "destroy", "--pool", self.pool, "--force", "--yes")
        left = await self.account.machines(self.pool)
        if left:
            raise SmokeFailure(f"remuda destroy left {', '.join(left)}")

    # Workflow runs --------------------------------------------------------------------------------------------------

    async def _start(self, workflow: str) -> PushedRun:
        commit = await self.repository.push(self.branch, branch_files(workflow))
        return await self.until(
            "the start of the workflow", lambda: self.repository.run_of(commit), within_s=RUN_STARTS_WITHIN_S
        )

    async def _end(self, run_id: int) -> PushedRun | None:
        run = await self.repository.run(run_id)
        return run if run.is_done else None

    async def _not_done(self, run_id: int) -> None:
        run = await self._end(run_id)
        if run is not None:
            raise SmokeFailure(f"workflow run {run_id} ended early: {run.conclusion}")

    async def _successful_run(self, name: str) -> None:
        # The comment makes the commits of two runs differ.
        await self._run_workflow(f"# {name}\n{smoke_workflow(self._workflow, job=JOB)}")

    async def _run_workflow(self, text: str) -> None:
        run = await self._start(text)
        ended = await self.until("the end of the workflow", lambda: self._end(run.run_id), within_s=RUN_TAKES_S)
        if ended.conclusion != "success":
            jobs = await self.repository.jobs(run.run_id)
            failed = ", ".join(f"{job}: {end}" for job, (_, end) in jobs.items() if end != "success")
            raise SmokeFailure(f"workflow run {run.run_id} ended with {ended.conclusion} ({failed})")

    async def _machines(self, step: str) -> list[Mapping[str, Any]]:
        document = await self.remuda(step, "status", "--backend", "aws", "--pool", self.pool)
        found: list[Mapping[str, Any]] = document["instances"]
        return found

    async def _idle_machines(self, step: str) -> list[Mapping[str, Any]]:
        """The machines after the release. It answers before they are clean."""

        async def look() -> list[Mapping[str, Any]] | None:
            found = await self._machines(step)
            return found if len(found) == 1 and found[0]["state"] == "idle" else None

        return await self.until("the return of the machine to the pool", look, within_s=IDLE_WITHIN_S)

    # Clean-up -------------------------------------------------------------------------------------------------------

    async def clean_up_earlier(self) -> None:
        """Remove what earlier runs left, such as one that was killed."""
        pools = await self.account.pools()
        pools |= {branch.removeprefix(BRANCH_PREFIX) for branch in await self.repository.branches(BRANCH_PREFIX)}
        for pool in sorted(pools - {self.pool}):
            self.say(f"removing what the smoke run of pool {pool} left")
            left = await self.clean_up(pool)
            if left:
                raise SmokeFailure(f"pool {pool} of an earlier smoke run cannot be removed: " + "; ".join(left))

    async def clean_up(self, pool: str) -> list[str]:
        """Remove everything of the pool. Every part is tried, whatever becomes of the others; returns the failures."""
        branch = BRANCH_PREFIX + pool
        failures: list[str] = []

        async def attempt(what: str, work: Callable[[], Awaitable[object]]) -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - the other parts must be removed
                failures.append(f"{what}: {error}")

        async def cancel_runs() -> None:
            for run in await self.repository.open_runs(branch):
                await self.repository.cancel(run.run_id)

        async def terminate() -> None:
            await self.account.terminate(await self.account.machines(pool))

        self.say(f"cleaning up pool {pool}")
        # Runs first: their release would need the pool, their provision would launch machines.
        await attempt("cancel the runs", cancel_runs)
        await attempt("remuda destroy", lambda: self.remuda("clean-up", "destroy", "--pool", pool, "--force", "--yes"))
        await attempt("terminate the machines", terminate)
        await attempt("remove the experiment", lambda: self.account.remove_experiments(pool))
        await attempt("delete the branch", lambda: self.repository.delete_branch(branch))
        await attempt("wait for the machines", lambda: self._no_machines(pool))
        return failures

    async def _no_machines(self, pool: str) -> None:
        deadline = self.clock.monotonic() + MACHINES_GONE_WITHIN_S
        while left := await self.account.machines(pool):
            if self.clock.monotonic() >= deadline:
                raise TimedOut(f"{', '.join(left)} still exist: terminate them by hand")
            await self.clock.sleep(POLL_S)


def is_held_by(machine: Mapping[str, Any], run_id: int) -> bool:
    """Whether a machine in the document of `status` has this run."""
    return bool(machine["holder"]) and machine["holder"].get("run_id") == str(run_id)


def _check_clean(left: Sequence[str]) -> None:
    if left:
        raise SmokeFailure("the clean-up failed: " + "; ".join(left))
