"""Runner sets: start of a job on a warm and on a hot machine, calls per job, cost and growth of the listener.

The listener is the real one, in its own process, with the adapters of AWS and GitHub. The machines that run the
jobs have real agents on fake machines; those that have a long job are records with heartbeats.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count

from benchmarks import floor as floors
from benchmarks.agents import AgentGroup
from benchmarks.demand_listener import (
    OWN_PREFIX,
    ListenerOptions,
    ListenerProcess,
    ListenerState,
    listener_process,
)
from benchmarks.environment import CLASS, SCOPE, BenchmarkEnvironment, BenchmarkPool, fresh_report, idle
from benchmarks.figures import Figure, FigureKind, ListenerPoint, Results, median, percentile, timed
from benchmarks.floor import Floor
from benchmarks.idle_agent import SPEED
from remuda.adapters.aws.dynamodb import items
from remuda.adapters.github.scale_sets import SERVICE
from remuda.adapters.system.clock import SystemClock
from remuda.controlplane.demand.lease import BEAT_S
from remuda.controlplane.demand.listener import CONFIG_S
from remuda.controlplane.demand.observer import IDLE_SEARCH_S
from remuda.domain.instance import Assignment, Instance, State
from remuda.domain.pool_config import runner_name
from remuda.domain.provision import Provision, ProvisionStatus
from remuda.domain.runner_set import MAX_RUNNERS
from remuda.domain.timestamps import to_milliseconds
from remuda.fake_github.client import FakeGitHubClient, JobView
from tests.support.records import set_holder

SECTION = "Runner sets"
START_LIMIT_S = 0.6
MAX_FLOORS = 3.0
#: Calls per job of the control plane, by service, for jobs at once and one at a time. Polls and acknowledgements
#: of messages are not counted, nor what the listener does at intervals for all sets together.
LIMITS = {"GitHub": 2.0, "DynamoDB": 12.0, "SQS": 2.0}
#: Fewer jobs, in a smoke test, share no calls of history, pool messages and reports: their limit is twice as high.
MANY = 10
CPU_LIMIT, MEMORY_LIMIT_MB = 0.5, 250.0
#: Machines for the jobs that are run one at a time: the next job starts while the machine of the last one is reset.
SPARE = 4
#: Seconds that a job takes under load.
JOB_S = 0.5
#: Seconds of a poll for messages: of GitHub, and where the next poll must begin soon.
GITHUB_POLL_S, SHORT_POLL_S = 50.0, 0.2
#: Seconds in which every wait of this benchmark must end. Generous: only a broken run reaches it.
TIMEOUT_S = 600.0
POLL_S = 0.02
#: The first machine that has no agent.
BUSY_NUMBER = 1_000_000
MINUTE_S = 60.0


async def run(environment: BenchmarkEnvironment, floor: Floor) -> Results:
    figures = [
        *await start_one_by_one(environment, floor),
        *await start_at_once(environment, floor),
        *await start_hot(environment),
        *await serve_many(environment),
        *await wait_idle(environment),
    ]
    return Results(figures=tuple(figures), listeners=tuple(await grow(environment)))


# Pools with sets ----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class DemandPool:
    pool: BenchmarkPool
    environment: BenchmarkEnvironment
    github: FakeGitHubClient
    listener: ListenerProcess
    sets: Sequence[str]
    #: Warm machines.
    machines: int
    runs: count[int] = field(default_factory=lambda: count(1))

    async def queue(self, number: int) -> list[JobView]:
        """Queue jobs for all sets in turn."""
        return list(await asyncio.gather(*(self._queue(next(self.runs)) for _ in range(number))))

    async def _queue(self, number: int) -> JobView:
        labels = [self.sets[number % len(self.sets)]]
        return await self.github.queue_job(repo=SCOPE, run_id=number, labels=labels, name=f"job {number}")

    async def completed(self, job: JobView) -> JobView:
        while job.status != "completed":
            job = await self.github.job(job.id, wait_s=TIMEOUT_S, since=job.status)
        return job

    async def until_idle(self, *, recorded: bool = True) -> None:
        """Wait until all machines are in the pool, and all calls for their jobs were made if that is `recorded`."""

        async def are_idle() -> bool:
            async with self.pool.context() as context:
                found = await context.store.find({State.IDLE})
            return sum(not recorded or item.announced_at is not None for item in found) == self.machines

        await until(are_idle, "all machines are in the pool")

    async def times(self) -> dict[str, dict[str, float]]:
        return await self.environment.agents.times()

    async def agent_calls(self) -> int:
        return sum((await self.environment.agents.calls()).get("dynamodb", {}).values())


@asynccontextmanager
async def demand_pool(
    environment: BenchmarkEnvironment,
    *,
    sets: int = 1,
    machines: int = 0,
    busy: int = 0,
    job_s: float = 0.0,
    hot: int = 0,
    maximum: int = MAX_RUNNERS,
    fast: bool = False,
) -> AsyncIterator[DemandPool]:
    """A pool with sets, warm machines that have agents, and machines that have a long job, and its listener."""
    made = environment.new_pool()
    names = [f"{made.name}-{number}" for number in range(sets)]
    windows = [{"hot": hot}] if hot else []
    document = [
        {"name": name, "labels": [name], "resource-class": CLASS, "max": maximum, "windows": windows} for name in names
    ]
    made.settings = environment.new_settings(made.name, runner_sets=json.dumps(document))
    await made.refresh()
    warm = [idle(number) for number in range(machines)]
    await made.write(warm, [fresh_report(record) for record in warm])
    await write_busy(made, names, busy)
    await start_agents(environment, made, [record.instance_id for record in warm], job_s)
    async with made.context() as context:
        await context.pool.send([record.message() for record in warm])
    options = ListenerOptions(pool=made.name, busy=dict(Counter(names[each % sets] for each in range(busy))), fast=fast)
    async with environment.servers.github_client() as github, listener_process(options) as listener:
        pool = DemandPool(
            pool=made, environment=environment, github=github, listener=listener, sets=names, machines=machines
        )
        await until(lambda: has_sessions(github, names), "the sessions are open")
        yield pool


@asynccontextmanager
async def message_polls(environment: BenchmarkEnvironment, seconds: float) -> AsyncIterator[None]:
    """Let polls for messages end without one after this time."""
    async with environment.servers.github_client() as github:
        await github.change_settings(message_poll_s=seconds)
        try:
            yield
        finally:
            await github.change_settings(message_poll_s=GITHUB_POLL_S)


async def has_sessions(github: FakeGitHubClient, names: Sequence[str]) -> bool:
    """Whether each set is polled."""
    found = {item.name for item in await github.scale_sets() if item.session_owner and item.capacity}
    return found >= set(names)


async def start_agents(
    environment: BenchmarkEnvironment, pool: BenchmarkPool, instance_ids: Sequence[str], job_s: float
) -> None:
    group = AgentGroup(
        pool=pool.name, prefix=pool.prefix, instance_ids=instance_ids, job_s=job_s, shared=len(instance_ids) > SPARE
    )
    await environment.agents.start(group)


async def write_busy(pool: BenchmarkPool, sets: Sequence[str], number: int) -> None:
    """Write machines that have a job, with their provisions, and start their heartbeats."""
    records = [busy_record(pool.name, BUSY_NUMBER + each, sets[each % len(sets)]) for each in range(number)]
    await pool.write(records, [replace(fresh_report(record), epoch=1, busy=True) for record in records])
    await pool.put([items.provision_item(busy_provision(record)) for record in records])
    if records:
        ids = [record.instance_id for record in records]
        await pool.environment.agents.beat(AgentGroup(pool=pool.name, prefix=pool.prefix, instance_ids=ids))


def busy_record(pool: str, number: int, runner_set: str) -> Instance:
    record = idle(number)
    name = runner_name(pool, 1, record.instance_id)
    return idle(
        number,
        state=State.RUNNING,
        holder=set_holder(runner_set, str(number), f"p-{number}"),
        claim=f"p-{number}/w-1",
        announced_at=None,
        assignment=Assignment(url="", runner_name=name, labels=(runner_set,), repository=SCOPE, runner_id=number),
    )


def busy_provision(record: Instance) -> Provision:
    return Provision(
        holder=set_holder(record.runner_set, provision_id=record.provision_id),
        resource_class=CLASS,
        count=1,
        created_at=record.created_at,
        deadline=to_milliseconds(record.threshold + timedelta(hours=1)),
        status=ProvisionStatus.COMMITTED,
        instance_ids=(record.instance_id,),
    )


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for a condition."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not await condition():
                await SystemClock().sleep(POLL_S)
    except TimeoutError:
        raise RuntimeError(f"not within {TIMEOUT_S:g} s: {what}") from None


# Starts -------------------------------------------------------------------------------------------------------------


async def start_one_by_one(environment: BenchmarkEnvironment, floor: Floor) -> list[Figure]:
    """Jobs one after the other, each on a warm machine."""
    jobs = environment.size.jobs
    await environment.clear()
    floor_s = await floor.seconds(floors.set_start(1))
    async with demand_pool(environment, machines=SPARE) as pool:
        before, agents_before = await pool.listener.state(), await pool.agent_calls()
        done = []
        for _ in range(jobs):
            done += [await pool.completed(job) for job in await pool.queue(1)]
        await pool.until_idle()
        used = (await pool.listener.state()).since(before)
        agents = await pool.agent_calls() - agents_before
        listening = (await pool.times())["listening"]
    samples = [listening[str(job.runner_name)] - used.received[job.message_job_id] for job in done]
    note = f"p50 {median(samples):.2f} s; registration and latency of GitHub are 0"
    return [
        timed(
            *("set, one job: message received → listener started, p95", percentile(samples, 0.95)),
            limit=START_LIMIT_S,
            floor=floor_s,
            wait_s=floors.poll_wait_s(1),
            samples=len(samples),
            note=note,
            section=SECTION,
        ),
        *calls_per_job("one job at a time", used, jobs, agents),
    ]


async def start_at_once(environment: BenchmarkEnvironment, floor: Floor) -> list[Figure]:
    """Many jobs in one message, on as many warm machines."""
    number = max(environment.size.counts)
    await environment.clear()
    floor_s = await floor.seconds(floors.set_start(number))
    samples, each_s = [], []
    async with message_polls(environment, SHORT_POLL_S), demand_pool(environment, machines=number) as pool:
        before, agents_before = await pool.listener.state(), await pool.agent_calls()
        rounds = min(3, environment.size.samples)
        for _ in range(rounds):
            # The present poll ends; the next one begins when all jobs are assigned.
            await pool.listener.gate(polls=False)
            await asyncio.sleep(2 * SHORT_POLL_S)
            jobs = await pool.queue(number)
            await pool.listener.gate(polls=True)
            done = await asyncio.gather(*(pool.completed(job) for job in jobs))
            await pool.until_idle(recorded=False)
            received, listening = (await pool.listener.state()).received, (await pool.times())["listening"]
            first = min(received[job.message_job_id] for job in done)
            started = [listening[str(job.runner_name)] - first for job in done]
            samples.append(max(started))
            each_s += started
        await pool.until_idle()
        used = (await pool.listener.state()).since(before)
        agents = await pool.agent_calls() - agents_before
    return [
        timed(
            *(f"set, {number} jobs at once: message received → all listeners started", samples),
            limit=MAX_FLOORS * floor_s,
            floor=floor_s,
            wait_s=floors.poll_wait_s(number),
            note=f"one listener: p50 {median(each_s):.2f} s, p95 {percentile(each_s, 0.95):.2f} s",
            section=SECTION,
        ),
        *calls_per_job(f"{number} jobs at once", used, number * rounds, agents),
    ]


def calls_per_job(name: str, used: ListenerState, jobs: int, agent_calls: int) -> list[Figure]:
    if used.of("ec2"):
        raise RuntimeError(f"machines were launched: {used.describe('ec2')}")
    messages = used.of(SERVICE) - (used.github - used.of("github"))
    own = used.of(f"{OWN_PREFIX}dynamodb")
    counted = {
        "GitHub": (used.github, f"and {messages / jobs:.1f} polls and acknowledgements"),
        "DynamoDB": (
            used.of("dynamodb"),
            f"{used.describe('dynamodb')}; {own} of the listener's own; of agents, {agent_calls / jobs:.1f} per job",
        ),
        # The address of the queue is read once.
        "SQS": (used.of("sqs", without=frozenset({"GetQueueUrl"})), used.describe("sqs")),
    }
    return [
        Figure(
            *(f"set, {name}: {service} calls per job", "calls", round(number / jobs, 1)),
            limit=LIMITS[service] * (1 if jobs >= MANY else 2),
            samples=jobs,
            note=f"{jobs} jobs: {note}",
            section=SECTION,
        )
        for service, (number, note) in counted.items()
    ]


async def start_hot(environment: BenchmarkEnvironment) -> list[Figure]:
    """Jobs start on a listening runner while all calls of the listener and of the agents are held back."""
    await environment.clear()
    needed, samples = 0, []
    async with demand_pool(environment, machines=1, hot=1, maximum=1) as pool:
        for _ in range(environment.size.samples):
            seconds, calls = await _start_without_calls(pool)
            samples.append(seconds)
            needed += calls
    return [
        Figure(
            *("set, hot machine: calls of Remuda before the job starts", "calls", needed),
            limit=0,
            samples=len(samples),
            note="all calls of the listener and the agent were held back until the job had started",
            section=SECTION,
        ),
        timed(
            *("set, hot machine: job queued → job started", samples),
            limit=START_LIMIT_S,
            floor=None,
            note="latency of GitHub is 0",
            section=SECTION,
        ),
    ]


async def _start_without_calls(pool: DemandPool) -> tuple[float, int]:
    """Seconds until a queued job starts, and the calls of Remuda that it needed for that."""
    agents = pool.environment.agents
    await until(lambda: _online(pool), "the runner listens")
    await pool.listener.gate(calls=False)
    await agents.gate(is_open=False)
    before, agents_before = await pool.listener.state(), await pool.agent_calls()
    needed, began = 0, SystemClock().monotonic()
    (job,) = await pool.queue(1)
    try:
        async with asyncio.timeout(TIMEOUT_S / 6):
            job = await pool.github.job(job.id, wait_s=TIMEOUT_S, since="queued")
    except TimeoutError:
        job = await pool.github.job(job.id)
    seconds = SystemClock().monotonic() - began
    await pool.listener.gate(calls=True)
    await agents.gate(is_open=True)
    if job.status == "queued":
        await pool.github.job(job.id, wait_s=TIMEOUT_S, since="queued")
        used = (await pool.listener.state()).since(before)
        needed = sum(used.of(service) for service in used.calls) + await pool.agent_calls() - agents_before
    await pool.completed(job)
    return seconds, needed


async def _online(pool: DemandPool) -> bool:
    return any(runner.state == "idle" for runner in await pool.github.runners())


# Load ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    #: From the first job until all machines are back in the pool.
    used: ListenerState
    #: Seconds in which the jobs were to be served. On a busy machine they take longer.
    seconds: float
    jobs: int
    #: Seconds from the queue to the job's start.
    waits: Sequence[float]

    @property
    def cpu_share(self) -> float:
        return self.used.cpu_s / self.seconds


async def apply_load(pool: DemandPool, *, rate: float, seconds: float) -> LoadResult:
    """Queue jobs at a fixed rate and measure the listener meanwhile."""
    clock = SystemClock()
    following: list[asyncio.Task[tuple[JobView, float]]] = []

    async def follow() -> tuple[JobView, float]:
        began = clock.monotonic()
        (job,) = await pool.queue(1)
        return await pool.completed(job), began

    before, began = await pool.listener.state(), clock.monotonic()
    number = int(rate * seconds)
    for each in range(number):
        await asyncio.sleep(max(0.0, began + each / rate - clock.monotonic()))
        following.append(asyncio.create_task(follow()))
    await asyncio.sleep(max(0.0, began + seconds - clock.monotonic()))
    async with asyncio.timeout(TIMEOUT_S):
        done = await asyncio.gather(*following)
    await pool.until_idle(recorded=False)
    used = (await pool.listener.state()).since(before)
    working = (await pool.times())["working"]
    if used.of("ec2"):
        raise RuntimeError(f"machines were launched: {used.describe('ec2')}")
    waits = [working[str(job.runner_name)] - queued for job, queued in done]
    return LoadResult(used=used, seconds=seconds, jobs=number, waits=waits)


async def serve_many(environment: BenchmarkEnvironment) -> list[Figure]:
    """The largest listener, while jobs come and go."""
    size = environment.size
    sets, machines = max(size.sets), max(size.set_machines)
    await environment.clear()
    # As many as jobs: on a slow computer, none returns in time, and a launched machine would never boot.
    warm = int(size.job_rate * size.load_s)
    async with demand_pool(environment, sets=sets, machines=warm, busy=machines - warm, job_s=JOB_S) as pool:
        load = await apply_load(pool, rate=size.job_rate, seconds=size.load_s)
    name = f"listener of {sets} sets, {machines:,} machines, {size.job_rate:g} jobs/s"
    used = load.used
    note = (
        f"over {load.seconds:.0f} s; {load.jobs} jobs waited {median(load.waits):.2f} s (p50) and "
        f"{percentile(load.waits, 0.95):.2f} s (p95) for their start; "
        f"{used.all_of('dynamodb') / load.jobs:.1f} DynamoDB calls per job, including reports and searches"
    )
    return [
        # CPU time depends on the machine, like a time.
        Figure(
            *(f"{name}: cores", "", round(load.cpu_share, 3)),
            limit=CPU_LIMIT,
            kind=FigureKind.TIME,
            note=note,
            section=SECTION,
        ),
        Figure(
            *(f"{name}: memory", "MB", round(used.memory_mb, 1)),
            limit=MEMORY_LIMIT_MB,
            kind=FigureKind.TIME,
            note="the maximum, from its start",
            section=SECTION,
        ),
    ]


async def grow(environment: BenchmarkEnvironment) -> list[ListenerPoint]:
    """Listeners of different sizes, one after the other: their machines' heartbeats would occupy the servers."""
    size = environment.size
    return [await grow_to(environment, sets, machines) for sets in size.sets for machines in size.set_machines]


async def grow_to(environment: BenchmarkEnvironment, sets: int, machines: int) -> ListenerPoint:
    size = environment.size
    await environment.clear()
    warm = int(size.grow_rate * size.grow_s)
    async with demand_pool(environment, sets=sets, machines=warm, busy=machines - warm) as pool:
        load = await apply_load(pool, rate=size.grow_rate, seconds=size.grow_s)

    def per_minute(calls: int) -> int:
        return round(calls / load.seconds * MINUTE_S)

    return ListenerPoint(
        sets=sets,
        machines=machines,
        cpu_share=round(load.cpu_share, 4),
        memory_mb=round(load.used.memory_mb, 1),
        jobs_per_s=size.grow_rate,
        calls={
            "dynamodb": per_minute(load.used.all_of("dynamodb")),
            "sqs": per_minute(load.used.of("sqs")),
            "github": per_minute(load.used.of(SERVICE) + load.used.of("github")),
        },
    )


# Idle ---------------------------------------------------------------------------------------------------------------


async def wait_idle(environment: BenchmarkEnvironment) -> list[Figure]:
    """Calls of a listener with several sets, all without jobs, by an accelerated clock.

    The measurement may begin just before a call that is made at intervals, so each may come once more than its interval
    fits into the time.
    """
    sets, polls = 11, environment.size.idle_polls
    seconds = polls * GITHUB_POLL_S
    await environment.clear()
    async with (
        message_polls(environment, GITHUB_POLL_S / SPEED),
        demand_pool(environment, sets=sets, fast=True) as pool,
    ):
        before = await pool.listener.state()
        await asyncio.sleep(seconds / SPEED)
        used = (await pool.listener.state()).since(before)
    others = ("dynamodb", "sqs", "ec2")
    shared = OWN_PREFIX + "dynamodb"
    most = {BEAT_S: 1, CONFIG_S: 1, IDLE_SEARCH_S: items.SHARDS}
    most_shared = sum((int(seconds / interval_s) + 1) * calls for interval_s, calls in most.items())
    # A call that failed is repeated: the timeouts are accelerated, too.
    github, own = used.of(SERVICE) + used.of("github") - used.failed, used.of(shared) - used.failed
    return [
        Figure(
            *("idle set: GitHub calls per 50 s", "calls", round(max(0, github) / sets / polls, 2)),
            limit=round((polls + 1) / polls, 2),
            samples=sets,
            note=f"{seconds:g} s of {sets} sets; {used.describe(SERVICE)}",
            section=SECTION,
        ),
        Figure(
            *("idle set: other calls", "calls", sum(used.of(service) for service in others)),
            limit=0,
            samples=sets,
            note="calls to AWS besides those that the listener makes at intervals, for all sets together",
            section=SECTION,
        ),
        Figure(
            *("idle listener: calls to AWS per minute", "calls", round(max(0, own) / seconds * MINUTE_S, 2)),
            limit=round(most_shared / seconds * MINUTE_S, 2),
            note=f"for all sets together: lease every {BEAT_S:g} s, configuration every {CONFIG_S:g} s, search every "
            f"{IDLE_SEARCH_S:g} s: {used.describe(shared)}",
            section=SECTION,
        ),
    ]
