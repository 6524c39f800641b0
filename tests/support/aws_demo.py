"""A demo of the AWS backend on test servers, which checks its results at the end.

    python -m tests.support.aws_demo [--short] [--json]

DynamoDB, SQS, EC2 and GitHub are servers on loopback. Instances are namespace machines with the real user data and the
real agent. The commands are those that a user would type.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remuda.adapters.system.clock import SystemClock
from remuda.cli.demo.environment import SCOPE, DemoEnvironment
from remuda.cli.demo.report import (
    DemoCheck,
    DemoProvision,
    DemoRelease,
    DemoReport,
    DemoRetirement,
    foreign_jobs,
    live_instances,
    read_histories,
    retirements,
    show_report,
)
from remuda.cli.output import Output
from remuda.config.sources import load
from remuda.controlplane.context import Context
from remuda.domain.errors import RemudaError, Unavailable
from remuda.domain.instance import Instance, RetireReason, State
from remuda.domain.provision import ProvisionStatus
from remuda.domain.thresholds import expired
from remuda.fake_github.client import FakeGitHubClient, JobStep, JobView
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import open_context
from tests.support.aws.ec2 import describe_instances
from tests.support.aws.ec2_machines import LIVE, POWERED_OFF, Ec2MachineRunner, ec2_machines_in_new_folder
from tests.support.aws.stack import AwsStack, aws_stack
from tests.support.namespace_machine.network import server_address
from tests.support.namespace_machine.requirements import unsupported_reason

POOL = "demo"
CLASS, OTHER_CLASS = "large", "xlarge"
IDLE_S = 300.0
SHORT_IDLE_S = 3.0
MAX_AGE_S = 10.0
#: Timeout of the provision that is killed.
KILLED_PROVISION_TIMEOUT_S = 12.0
#: Seconds to wait for an expected event, and between two checks.
LIMIT_S = 240.0
POLL_S = 0.2
#: The end reasons of an idle machine that terminates itself: by its agent or by its dead-man timer.
SELF_TERMINATED = ("threshold of state idle passed", POWERED_OFF)
#: Lines of the consoles to show after a failure.
CONSOLE_LINES = 80
#: Times with which instances expire during the demo.
TIMES = {
    "idle-time-sec": IDLE_S,
    "release-time-sec": 300,
    "provision-timeout-sec": 200,
    "margin-sec": 1,
    "unrecorded-grace-sec": 5,
    "stale-registration-grace-sec": 5,
    "gone-after-sec": 2,
}
#: Each job leaves a file, and fails if it finds that of another job.
STEPS = (
    JobStep(name="check that home is clean", run='test ! -e "$HOME/left-behind" && touch "$HOME/left-behind"'),
    JobStep(name="test", run='echo "as $(id -un) on $HOSTNAME" && sleep 0.3'),
)


@dataclass(kw_only=True)
class DemoResults:
    provisions: list[DemoProvision] = field(default_factory=list)
    releases: list[DemoRelease] = field(default_factory=list)
    checks: list[DemoCheck] = field(default_factory=list)
    retired: list[DemoRetirement] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def check(self, text: str, *, passed: bool, detail: str = "") -> None:
        self.checks.append(DemoCheck(text=text, passed=passed, detail=detail))


class AwsDemoEnvironment(DemoEnvironment):
    """Runs commands with the settings of an AWS stack."""

    def __init__(self, output: Output, stack: AwsStack) -> None:
        super().__init__(output, stack.folder)
        self.stack = stack
        texts = {"backend": "aws", "pool": POOL, "github-scope": SCOPE, **stack.launch}
        lines = [
            *(f'{name} = "{value}"' for name, value in texts.items()),
            *(f"{key} = {it:g}" for key, it in TIMES.items()),
        ]
        file = stack.folder / "remuda.toml"
        file.write_text("\n".join(lines) + "\n")
        self.variables = stack.environment(REMUDA_CONFIG=str(file))

    def _variables(self) -> dict[str, str]:
        return self.variables


class AwsDemo:
    def __init__(
        self,
        *,
        environment: AwsDemoEnvironment,
        context: Context,
        machines: Ec2MachineRunner,
        results: DemoResults,
    ) -> None:
        self._environment = environment
        self._context = context
        self._machines = machines
        self._results = results
        self._first: set[str] = set()

    async def run(self, *, short: bool) -> None:
        self._environment.title("Refresh: table, queues, launch template and tokens")
        await self._environment.json("refresh")
        await self._cold()
        await self._warm()
        if not short:
            await self._overlap()
            await self._kill()
            await self._spot()
        await self._self_termination()
        await self._end()

    # Parts -----------------------------------------------------------------------------------------------------------

    async def _cold(self) -> None:
        self._environment.title("A run with two jobs: the pool is empty, so two instances are created")
        cold, jobs = await self._run("cold", "1001", 2)
        self._first = _instances(jobs)
        self._results.check("the first run creates two instances", passed=(cold["reused"], cold["created"]) == (0, 2))
        self._results.check("its two jobs succeed on two instances", passed=len(_instances(jobs)) == 2)

    async def _warm(self) -> None:
        self._environment.title("The same again: both instances are reused")
        warm, jobs = await self._run("warm", "1002", 2)
        self._results.check("a run on a warm pool creates nothing", passed=(warm["reused"], warm["created"]) == (2, 0))
        self._results.check("it runs on the same instances", passed=_instances(jobs) == self._first)

    async def _overlap(self) -> None:
        self._environment.title("Two runs at once with three jobs: two instances are reused, one is created")
        runs = {"left": ("1003", 1), "right": ("1004", 2)}
        provisioned = await asyncio.gather(*(self._provision(name, *request) for name, request in runs.items()))
        await asyncio.gather(*(self._run_jobs(name, *request) for name, request in runs.items()))
        await asyncio.gather(*(self._release(name, run_id) for name, (run_id, _) in runs.items()))
        reused = sum(item["reused"] for item in provisioned)
        created = sum(item["created"] for item in provisioned)
        self._results.check("two overlapping runs reuse both and create one", passed=(reused, created) == (2, 1))
        names = [item["instance_id"] for document in provisioned for item in document["instances"]]
        self._results.check("they share no instance", passed=len(set(names)) == len(names) == 3)

    async def _kill(self) -> None:
        self._environment.title("A provision is killed (kill -9): the sweeps terminate its instance")
        run_id = "1005"
        before = set(await self._live())
        # Another resource class, so that the provision must create an instance, which takes a moment.
        process = await self._start(
            *("provision", "--run-id", run_id, "--resource-class", OTHER_CLASS),
            *("--provision-timeout-sec", f"{KILLED_PROVISION_TIMEOUT_S:g}"),
        )
        try:
            await self._until(lambda: self._held_by(run_id), "the provision to create an instance")
        finally:
            process.kill()
            await process.wait()
        self._environment.log("killed; the sweeps continue")
        async with self._sweeping():
            await self._until(lambda: self._is_rolled_back(run_id), "the sweeps to terminate the instance")
        left = set(await self._live()) - before
        self._results.check("a killed provision leaves no instance", passed=not left, detail=", ".join(left))

    async def _spot(self) -> None:
        self._environment.title("A spot notice during a run: the job finishes, then the instance is terminated")
        run_id = "1006"
        provisioned = await self._provision("spot", run_id, 1, "--usage-class", "spot")
        instance_id = str(provisioned["instances"][0]["instance_id"])
        async with self._environment.stack.github_client() as github:
            job = await github.queue_job(
                repo=SCOPE, run_id=run_id, labels=[run_id], name="spot", steps=[JobStep(run="sleep 3")]
            )
            await self._until(lambda: _started(github, job), "the job to start")
            self._machines.metadata[instance_id].set_spot_notice("terminate", "2030-01-01T00:00:00Z")
            self._environment.log(f"{instance_id} gets a spot notice")
            await self._until(lambda: self._has_noticed(instance_id), "the agent to report the notice")
            done = await self._finish_job(github, job)
        await self._release("spot", run_id)
        record = await self._context.store.get(instance_id)
        self._results.check("a job finishes after a spot notice", passed=done.conclusion == "success")
        self._results.check("the instance is terminated after its job", passed=_is_retired_by_spot(record))

    async def _self_termination(self) -> None:
        self._environment.title(f"Without a control plane, an idle instance terminates itself after {SHORT_IDLE_S:g} s")
        await self._environment.json("refresh", "--idle-time-sec", f"{SHORT_IDLE_S:g}")
        await self._run("last", "1007", 1)
        instance_id = self._results.releases[-1].instance_ids[0]

        async def is_gone() -> bool:
            return instance_id not in await self._live()

        await self._until(is_gone, "the instance to terminate itself")
        record = await self._context.store.get(instance_id)
        # Empty if EC2 terminated the instance at the request of somebody else.
        reason = self._machines.end_reason(instance_id)
        is_expired = (
            record is not None
            and record.state is State.IDLE
            and expired(record.threshold, now=self._environment.clock.now(), margin_s=0.0)
        )
        self._results.check(
            "an idle instance terminates itself without a control plane",
            passed=is_expired and reason in SELF_TERMINATED,
            detail=reason,
        )

    async def _end(self) -> None:
        self._environment.title(f"The end: instances older than {MAX_AGE_S:g} s are terminated")
        for line in (await self._environment.remuda("status")).splitlines():
            self._environment.output.say(f"  {line}")
        await self._environment.json("refresh", "--max-age-sec", f"{MAX_AGE_S:g}")
        async with self._sweeping():
            await self._until(self._is_empty, "all instances to terminate")
        known = await read_histories(self._context.store)
        live = live_instances(known)
        on_ec2 = await self._live()
        messages = {name: await self._context.pool.depth(name) for name in (CLASS, OTHER_CLASS)}
        async with self._environment.stack.github_client() as github:
            registrations = [runner.name for runner in await github.runners()]
            foreign = foreign_jobs(await github.jobs(), known, pool=POOL)
        results = self._results
        results.check("no job ran on an instance of another run", passed=not foreign, detail=", ".join(foreign))
        results.check("every job found a clean instance", passed=not results.failed, detail=", ".join(results.failed))
        results.check("no instance is left on EC2", passed=not on_ec2, detail=", ".join(on_ec2))
        results.check("no record of a live instance is left", passed=not live, detail=", ".join(live))
        results.check("no message is left in a queue", passed=not any(messages.values()), detail=str(messages))
        results.check("no registration is left on GitHub", passed=not registrations, detail=", ".join(registrations))
        results.foreign += foreign
        results.retired += retirements(known, self._machines.end_reason)

    # Commands --------------------------------------------------------------------------------------------------------

    async def _start(self, *arguments: str) -> asyncio.subprocess.Process:
        """Start a command in the background, without output."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "remuda", *arguments, "--quiet"),
            env=self._environment.variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _run(self, name: str, run_id: str, count: int) -> tuple[dict[str, Any], list[JobView]]:
        """Provision, run one job per runner, and release, like a workflow."""
        provisioned = await self._provision(name, run_id, count)
        jobs = await self._run_jobs(name, run_id, count)
        await self._release(name, run_id)
        return provisioned, jobs

    async def _provision(self, name: str, run_id: str, count: int, *more: str) -> dict[str, Any]:
        document = await self._environment.json("provision", "--run-id", run_id, "--instance-count", str(count), *more)
        self._results.provisions.append(DemoProvision.parse(name, document))
        return document

    async def _run_jobs(self, name: str, run_id: str, count: int) -> list[JobView]:
        """Run a matrix of jobs, one per runner."""
        async with self._environment.stack.github_client() as github:

            async def all_listen() -> bool:
                listening = [each for each in await github.runners() if run_id in each.labels and each.online]
                return len(listening) >= count

            # A runner that listens first could take several of the short jobs.
            await self._until(all_listen, f"{count} runners of run {run_id} to listen")
            queued = [
                await github.queue_job(
                    repo=SCOPE, run_id=run_id, labels=[f"{run_id}/{CLASS}"], name=f"{name} {number + 1}", steps=STEPS
                )
                for number in range(count)
            ]
            jobs = await asyncio.gather(*(self._finish_job(github, job) for job in queued))
        self._results.failed += [f"{job.name} of run {run_id}" for job in jobs if job.conclusion != "success"]
        return list(jobs)

    async def _release(self, name: str, run_id: str) -> None:
        self._results.releases.append(
            DemoRelease.parse(name, await self._environment.json("release", "--run-id", run_id))
        )

    async def _finish_job(self, github: FakeGitHubClient, job: JobView) -> JobView:
        try:
            async with asyncio.timeout(LIMIT_S):
                while job.status != "completed":
                    job = await github.job(job.id, wait_s=5, since=job.status)
        except TimeoutError:
            raise Unavailable(f"job {job.name} of run {job.run_id} is {job.status} after {LIMIT_S:g} s") from None
        self._environment.log(f"job {job.name}: {job.conclusion} on {job.runner_name}")
        if job.conclusion != "success":
            for line in job.log.splitlines()[-20:]:
                self._environment.output.say(f"  | {line}")
        return job

    @asynccontextmanager
    async def _sweeping(self) -> AsyncIterator[None]:
        """Sweep in the background, more often than a schedule would."""
        process = await self._start("refresh", "--sweep-only", "--every", "1")
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            await process.wait()

    # Observations ----------------------------------------------------------------------------------------------------

    async def _until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        deadline = self._environment.clock.monotonic() + LIMIT_S
        while not await condition():
            if self._environment.clock.monotonic() > deadline:
                raise Unavailable(f"timed out after {LIMIT_S:g} s waiting for {what}")
            await self._environment.clock.sleep(POLL_S)

    async def _live(self) -> list[str]:
        async with self._environment.stack.ec2.client() as ec2:
            return [key for key, item in (await describe_instances(ec2)).items() if item["State"]["Name"] in LIVE]

    async def _held_by(self, run_id: str) -> bool:
        return any(item.run_id == run_id for item in await self._context.store.find({State.CREATED, State.CLAIMED}))

    async def _is_rolled_back(self, run_id: str) -> bool:
        """Whether the provision is closed and its instances are terminated."""
        provisions = await self._context.store.provisions_of_run(run_id)
        if any(item.status is not ProvisionStatus.RELEASED for item in provisions):
            return False
        made = [await self._context.store.find_by_provision(item.provision_id) for item in provisions]
        return all(item.state is State.TERMINATED for part in made for item in part)

    async def _has_noticed(self, instance_id: str) -> bool:
        report = await self._context.store.get_report(instance_id)
        return report is not None and bool(report.notice)

    async def _is_empty(self) -> bool:
        if live_instances(await read_histories(self._context.store)) or await self._live():
            return False
        return not any([await self._context.pool.depth(name) for name in (CLASS, OTHER_CLASS)])


async def _started(github: FakeGitHubClient, job: JobView) -> bool:
    return (await github.job(job.id)).status != "queued"


def _is_retired_by_spot(record: Instance | None) -> bool:
    if record is None or record.state not in {State.TERMINATING, State.TERMINATED}:
        return False
    return record.retire_reason is RetireReason.SPOT_NOTICE


def _instances(jobs: Sequence[JobView]) -> set[str]:
    """Ids of the instances on which jobs succeeded, from the names of the runners."""
    return {str(job.runner_name).rpartition("-i-")[2] for job in jobs if job.conclusion == "success"}


# Setup ---------------------------------------------------------------------------------------------------------------


async def _run_demo(output: Output, stack: AwsStack, results: DemoResults, *, short: bool) -> None:
    environment = AwsDemoEnvironment(output, stack)
    # This process uses the same servers as the commands.
    os.environ.update({name: value for name, value in environment.variables.items() if name.startswith("AWS_")})
    settings = load({}, environ=environment.variables)
    async with (
        ec2_machines_in_new_folder(
            ec2_url=stack.ec2.url, folder=stack.folder / "machines", log=lambda line: output.say(f"    {line}")
        ) as machines,
        open_context(settings, SilentEventLog(), needs_github=False) as context,
    ):
        demo = AwsDemo(environment=environment, context=context, machines=machines, results=results)
        try:
            await demo.run(short=short)
        except RemudaError:
            for line in machines.consoles().splitlines()[-CONSOLE_LINES:]:
                output.say(f"    | {line}")
            raise


def leftovers(folder: Path) -> list[str]:
    """Mounts and processes that mention this folder."""
    name = str(folder)
    found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if name in line]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if name.encode() in words:
                found.append(words.replace(b"\0", b" ").decode(errors="replace")[:200])
    return found


def run(output: Output, folder: Path, *, short: bool) -> int:
    clock = SystemClock()
    started_at = clock.monotonic()
    results = DemoResults()
    output.say("starting the servers: DynamoDB and SQS, EC2, GitHub")
    with server_address() as address, aws_stack(folder, address) as stack:
        asyncio.run(_run_demo(output, stack, results, short=short))
    left = leftovers(folder / "machines")
    results.check("no process or mount is left", passed=not left, detail=", ".join(left))
    report = DemoReport(
        provisions=tuple(sorted(results.provisions, key=lambda item: item.run_id)),
        releases=tuple(sorted(results.releases, key=lambda item: item.run_id)),
        retired=tuple(results.retired),
        checks=tuple(results.checks),
        leaked_processes=len(left),
        foreign_jobs=len(results.foreign),
        seconds=round(clock.monotonic() - started_at, 1),
    )
    show_report(output, report)
    output.result(report.document())
    return 0 if report.passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.aws_demo", description=__doc__)
    parser.add_argument("--short", action="store_true", help="skip the long parts")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    given = parser.parse_args()
    output = Output(as_json=given.json)
    if reason := unsupported_reason():
        output.say(f"the demo cannot run here: {reason}")
        return 2
    # Both signals raise KeyboardInterrupt, also in a background job, which ignores Ctrl-C by default.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="remuda-demo-aws-"))
    try:
        return run(output, folder, short=given.short)
    except KeyboardInterrupt:
        output.say("interrupted; all servers and machines were stopped")
        return 130
    except RemudaError as error:
        output.error(error)
        return error.exit_code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
