"""The whole story with `backend = "aws"`, on servers of this machine, told as it happens and checked at its end.

    python -m tests.support.aws_demo [--short] [--json]

DynamoDB, SQS, EC2 and GitHub are servers on loopback; machines are namespaces that run the real user data and the real
agent; the commands are those that a person would type.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remuda.adapters.system.clock import SystemClock
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
from remuda.config.settings import load
from remuda.controlplane.context import Context
from remuda.domain.errors import RemudaError, Unavailable
from remuda.domain.instance import State
from remuda.domain.provision import ProvisionStatus
from remuda.fake_github.client import FakeGitHubClient, JobStep, JobView
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import open_context
from tests.support.aws_servers import AwsServers, aws_servers, remuda
from tests.support.ec2_machine.machine import why_not
from tests.support.ec2_machines import ALIVE, POWERED_OFF, Player, instances, player

SCOPE = "remuda/demo"
POOL = "demo"
CLASS, OTHER_CLASS = "large", "xlarge"
IDLE_S = 300.0
SHORT_IDLE_S = 3.0
OLD_S = 10.0
#: How long a provision that is killed half way may have taken.
KILLED_S = 12.0
#: How long the story waits for something that should happen.
LIMIT_S = 240.0
PAUSE_S = 0.2
#: The last word of a machine whose agent saw that its time was up, or was kept from it.
ENDED_ITSELF = ("threshold of state idle passed", POWERED_OFF)
#: How much of the machines' consoles is shown when something went wrong.
CONSOLE_LINES = 80
#: Short enough to see the ends of things.
TIMES = {
    "idle-time-sec": IDLE_S,
    "release-time-sec": 300,
    "provision-timeout-sec": 200,
    "margin-sec": 1,
    "unrecorded-grace-sec": 5,
    "ghost-grace-sec": 5,
    "gone-after-sec": 2,
}
#: A job leaves something behind, and fails where another one did.
STEPS = (
    JobStep(name="left from another run?", run='test ! -e "$HOME/left-behind" && touch "$HOME/left-behind"'),
    JobStep(name="test", run='echo "as $(id -un) on $HOSTNAME" && sleep 0.3'),
)


@dataclass(kw_only=True)
class Told:
    """What the story has gathered so far."""

    provisions: list[DemoProvision] = field(default_factory=list)
    releases: list[DemoRelease] = field(default_factory=list)
    claims: list[DemoCheck] = field(default_factory=list)
    retired: list[DemoRetirement] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def claim(self, text: str, *, holds: bool, detail: str = "") -> None:
        self.claims.append(DemoCheck(text=text, passed=holds, detail=detail))


class Story:
    def __init__(
        self,
        *,
        output: Output,
        cloud: AwsServers,
        environment: Mapping[str, str],
        context: Context,
        machines: Player,
        told: Told,
    ) -> None:
        self._output = output
        self._cloud = cloud
        self._environment = environment
        self._context = context
        self._player = machines
        self._told = told
        self._clock = SystemClock()
        self._first: set[str] = set()

    async def tell(self, *, short: bool) -> None:
        self._title("Refresh: table, queues, launch template and tokens")
        await self._remuda("refresh")
        await self._cold()
        await self._warm()
        if not short:
            await self._overlap()
            await self._kill()
            await self._spot()
        await self._self_termination()
        await self._last_look()

    # The chapters -----------------------------------------------------------------------------------------------

    async def _cold(self) -> None:
        self._title("A run with two jobs: the pool is empty, two machines are created")
        cold, jobs = await self._run("cold", "1001", 2)
        self._first = _machines(jobs)
        self._told.claim("the first run creates two runners", holds=(cold["reused"], cold["created"]) == (0, 2))
        self._told.claim("its two jobs succeed on two machines", holds=len(_machines(jobs)) == 2)

    async def _warm(self) -> None:
        self._title("The same again: the machines are warm")
        warm, jobs = await self._run("warm", "1002", 2)
        self._told.claim("a run on a warm pool creates nothing", holds=(warm["reused"], warm["created"]) == (2, 0))
        self._told.claim("it runs on the same machines", holds=_machines(jobs) == self._first)

    async def _overlap(self) -> None:
        self._title("Two runs at once, three jobs: two machines are reused, one is created")
        runs = {"left": ("1003", 1), "right": ("1004", 2)}
        provisioned = await asyncio.gather(*(self._provision(name, *wanted) for name, wanted in runs.items()))
        await asyncio.gather(*(self._work(name, *wanted) for name, wanted in runs.items()))
        await asyncio.gather(*(self._release(name, run_id) for name, (run_id, _) in runs.items()))
        reused = sum(item["reused"] for item in provisioned)
        created = sum(item["created"] for item in provisioned)
        self._told.claim("two overlapping runs reuse both and create one", holds=(reused, created) == (2, 1))
        names = [item["instance_id"] for document in provisioned for item in document["instances"]]
        self._told.claim("they share no machine", holds=len(set(names)) == len(names) == 3)

    async def _kill(self) -> None:
        self._title("A provision is killed half way (kill -9): the sweeps give back what it held")
        run_id = "1005"
        before = set(await self._live())
        # A class of its own: its machine must be made, which takes a moment.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "remuda", "provision", "--run-id", run_id, "--resource-class", OTHER_CLASS),
            *("--provision-timeout-sec", f"{KILLED_S:g}", "--quiet"),
            env=dict(self._environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            await self._until(lambda: self._held_by(run_id), "the provision to hold a machine")
        finally:
            process.kill()
            await process.wait()
        self._say("killed; the sweeps go on")
        async with self._sweeping():
            await self._until(lambda: self._is_given_back(run_id), "the sweeps to give back what it held")
        left = set(await self._live()) - before
        self._told.claim("a provision killed half way leaves no machine", holds=not left, detail=", ".join(left))

    async def _spot(self) -> None:
        self._title("The spot market wants a machine back while a run has it: its job ends, it is not pooled again")
        run_id = "1006"
        provisioned = await self._provision("spot", run_id, 1, "--usage-class", "spot")
        instance_id = str(provisioned["instances"][0]["instance_id"])
        async with self._cloud.sim() as sim:
            job = await sim.queue_job(
                repo=SCOPE, run_id=run_id, labels=[run_id], name="spot", steps=[JobStep(run="sleep 3")]
            )
            await self._until(lambda: _started(sim, job), "the job to start")
            self._player.notice(instance_id, action="terminate", at="2030-01-01T00:00:00Z")
            self._say(f"{instance_id} is told that it will be taken away")
            await self._until(lambda: self._has_noticed(instance_id), "the notice to arrive")
            done = await self._finish(sim, job)
        await self._release("spot", run_id)
        record = await self._context.store.get(instance_id)
        ended = record is not None and record.state in {State.TERMINATING, State.TERMINATED}
        self._told.claim("the job on a machine with a spot notice ends in peace", holds=done.conclusion == "success")
        self._told.claim("the machine is retired then", holds=ended and record is not None and "spot" in record.retire)

    async def _self_termination(self) -> None:
        self._title(f"No control plane at all: an idle machine whose {SHORT_IDLE_S:g} s are up ends itself")
        await self._remuda("refresh", "--idle-time-sec", f"{SHORT_IDLE_S:g}")
        await self._run("last", "1007", 1)
        instance_id = self._told.releases[-1].instance_ids[0]
        await self._until(lambda: self._is_gone(instance_id), "the machine to end itself")
        record = await self._context.store.get(instance_id)
        why = self._player.last_word(instance_id)
        self._told.claim(
            "an idle machine ends itself when its time is up, without any control plane",
            holds=record is not None and record.state is State.IDLE and why in ENDED_ITSELF,
            detail=why,
        )

    async def _last_look(self) -> None:
        self._title(f"A last look: what is older than {OLD_S:g} s is retired, and the sweeps confirm every end")
        await self._remuda("status", for_people=True)
        await self._remuda("refresh", "--max-age-sec", f"{OLD_S:g}")
        async with self._sweeping():
            await self._until(self._all_is_over, "the last machine to end")
        known = await read_histories(self._context.store)
        live = live_instances(known)
        on_ec2 = await self._live()
        hints = {name: await self._context.pool.depth(name) for name in (CLASS, OTHER_CLASS)}
        async with self._cloud.sim() as sim:
            registrations = [runner.name for runner in await sim.runners()]
            foreign = foreign_jobs(await sim.jobs(), known, pool=POOL)
        told = self._told
        told.claim("no job ran on another run's machine", holds=not foreign, detail=", ".join(foreign))
        told.claim("every job saw a clean machine", holds=not told.failed, detail=", ".join(told.failed))
        told.claim("no machine lives on EC2", holds=not on_ec2, detail=", ".join(on_ec2))
        told.claim("no record says that a machine lives", holds=not live, detail=", ".join(live))
        told.claim("no message is left in a queue", holds=not any(hints.values()), detail=str(hints))
        told.claim("no registration is left on GitHub", holds=not registrations, detail=", ".join(registrations))
        told.foreign += foreign
        told.retired += retirements(known, self._player.last_word)

    # Telling ----------------------------------------------------------------------------------------------------

    def _title(self, text: str) -> None:
        self._output.say(f"\n== {text}", style="bold")

    def _say(self, text: str) -> None:
        self._output.say(f"{self._clock.now():%H:%M:%S} {text}")

    # Acting -----------------------------------------------------------------------------------------------------

    async def _remuda(self, *arguments: str, for_people: bool = False) -> dict[str, Any]:
        self._output.say(f"$ remuda {' '.join(arguments)}", style="bold cyan")
        done = await remuda(
            *arguments,
            environment=self._environment,
            say=lambda line: self._output.say("  " + line),
            for_people=for_people,
        )
        if done.code != 0:
            raise Unavailable(f"remuda {arguments[0]} ended with exit code {done.code}: {done.document or done.told}")
        return done.document

    async def _run(self, name: str, run_id: str, count: int) -> tuple[dict[str, Any], list[JobView]]:
        """A workflow's run: provision, a job for each runner, release."""
        provisioned = await self._provision(name, run_id, count)
        jobs = await self._work(name, run_id, count)
        await self._release(name, run_id)
        return provisioned, jobs

    async def _provision(self, name: str, run_id: str, count: int, *more: str) -> dict[str, Any]:
        document = await self._remuda("provision", "--run-id", run_id, "--instance-count", str(count), *more)
        self._told.provisions.append(DemoProvision.parse(name, document))
        return document

    async def _work(self, name: str, run_id: str, count: int) -> list[JobView]:
        """A matrix of jobs, one for each runner."""
        async with self._cloud.sim() as sim:
            queued = [
                await sim.queue_job(
                    repo=SCOPE, run_id=run_id, labels=[run_id, CLASS], name=f"{name} {number + 1}", steps=STEPS
                )
                for number in range(count)
            ]
            jobs = await asyncio.gather(*(self._finish(sim, job) for job in queued))
        self._told.failed += [f"{job.name} of run {run_id}" for job in jobs if job.conclusion != "success"]
        return list(jobs)

    async def _release(self, name: str, run_id: str) -> None:
        self._told.releases.append(DemoRelease.parse(name, await self._remuda("release", "--run-id", run_id)))

    async def _finish(self, sim: FakeGitHubClient, job: JobView) -> JobView:
        try:
            async with asyncio.timeout(LIMIT_S):
                while job.status != "completed":
                    job = await sim.job(job.id, wait_s=5, since=job.status)
        except TimeoutError:
            raise Unavailable(f"job {job.name} of run {job.run_id} is {job.status} after {LIMIT_S:g} s") from None
        self._say(f"job {job.name}: {job.conclusion} on {job.runner_name}")
        if job.conclusion != "success":
            for line in job.log.splitlines()[-20:]:
                self._output.say(f"  | {line}")
        return job

    @asynccontextmanager
    async def _sweeping(self) -> AsyncIterator[None]:
        """`remuda refresh --sweep-only` again and again, as a schedule would have it, only more often."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "remuda", "refresh", "--sweep-only", "--every", "1", "--quiet"),
            env=dict(self._environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            await process.wait()

    # Looking ----------------------------------------------------------------------------------------------------

    async def _until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        until = self._clock.monotonic() + LIMIT_S
        while not await holds():
            if self._clock.monotonic() > until:
                raise Unavailable(f"waited {LIMIT_S:g} s for {what} in vain")
            await self._clock.sleep(PAUSE_S)

    async def _live(self) -> list[str]:
        async with self._cloud.ec2.client() as ec2:
            return [key for key, item in (await instances(ec2)).items() if item["State"]["Name"] in ALIVE]

    async def _is_gone(self, instance_id: str) -> bool:
        return instance_id not in await self._live()

    async def _held_by(self, run_id: str) -> bool:
        return any(item.run_id == run_id for item in await self._context.store.find({State.CREATED, State.CLAIMED}))

    async def _is_given_back(self, run_id: str) -> bool:
        """The run's provision is closed, and what it had made is over."""
        provisions = await self._context.store.provisions_of_run(run_id)
        if any(item.status is not ProvisionStatus.RELEASED for item in provisions):
            return False
        made = [await self._context.store.find_by_provision(item.provision_id) for item in provisions]
        return all(item.state is State.TERMINATED for part in made for item in part)

    async def _has_noticed(self, instance_id: str) -> bool:
        report = await self._context.store.get_report(instance_id)
        return report is not None and bool(report.notice)

    async def _all_is_over(self) -> bool:
        if live_instances(await read_histories(self._context.store)) or await self._live():
            return False
        return not any([await self._context.pool.depth(name) for name in (CLASS, OTHER_CLASS)])


async def _started(sim: FakeGitHubClient, job: JobView) -> bool:
    return (await sim.job(job.id)).status != "queued"


def _machines(jobs: Sequence[JobView]) -> set[str]:
    """Those on which jobs succeeded: a runner's name ends with its machine's."""
    return {str(job.runner_name).rpartition("-i-")[2] for job in jobs if job.conclusion == "success"}


# The stage ------------------------------------------------------------------------------------------------------


def _configure(cloud: AwsServers) -> Path:
    """As an operator would."""
    texts = {"backend": "aws", "pool": POOL, "github-scope": SCOPE, **cloud.launch}
    lines = [
        *(f'{name} = "{value}"' for name, value in texts.items()),
        *(f"{key} = {it:g}" for key, it in TIMES.items()),
    ]
    file = cloud.folder / "remuda.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


async def _perform(output: Output, cloud: AwsServers, told: Told, *, short: bool) -> None:
    environment = cloud.environment(REMUDA_CONFIG=str(_configure(cloud)))
    # What this process itself looks at is the same cloud.
    os.environ.update({name: value for name, value in environment.items() if name.startswith("AWS_")})
    settings = load({}, environ=environment).settings
    async with (
        player(
            ec2_url=cloud.ec2.url, folder=cloud.folder / "machines", say=lambda line: output.say(f"    {line}")
        ) as on,
        open_context(settings, SilentEventLog(), credentialed=False) as context,
    ):
        story = Story(output=output, cloud=cloud, environment=environment, context=context, machines=on, told=told)
        try:
            await story.tell(short=short)
        except RemudaError:
            for line in on.consoles().splitlines()[-CONSOLE_LINES:]:
                output.say(f"    | {line}")
            raise


def _left(folder: Path) -> list[str]:
    """Processes and mounts of machines."""
    name = str(folder)
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if name in line]
    return [*mounts, *(f"process {pid}" for pid in _processes(name))]


def _processes(name: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and name.encode() in (entry / "cmdline").read_bytes():
                yield int(entry.name)


def run(output: Output, folder: Path, *, short: bool) -> int:
    clock = SystemClock()
    began = clock.monotonic()
    told = Told()
    output.say("starting the servers: DynamoDB and SQS, EC2, GitHub")
    with aws_servers(folder) as cloud:
        asyncio.run(_perform(output, cloud, told, short=short))
    left = _left(folder / "machines")
    told.claim("no process and no mount is left", holds=not left, detail=", ".join(left))
    report = DemoReport(
        provisions=tuple(sorted(told.provisions, key=lambda item: item.run_id)),
        releases=tuple(sorted(told.releases, key=lambda item: item.run_id)),
        retired=tuple(told.retired),
        checks=tuple(told.claims),
        leaked_processes=len(left),
        foreign_jobs=len(told.foreign),
        seconds=round(clock.monotonic() - began, 1),
    )
    show_report(output, report)
    output.result(report.document())
    return 0 if report.passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.aws_demo", description=__doc__)
    parser.add_argument("--short", action="store_true", help="leave out what takes long")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    given = parser.parse_args()
    output = Output(as_json=given.json)
    if reason := why_not():
        output.say(f"not here: {reason}")
        return 2
    # Whoever ends it gets it taken down, too; also where it was started in the background, with Ctrl-C turned off.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="remuda-demo-aws-"))
    try:
        return run(output, folder, short=given.short)
    except KeyboardInterrupt:
        output.say("interrupted; everything is taken down")
        return 130
    except RemudaError as error:
        output.error(error)
        return error.exit_code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
