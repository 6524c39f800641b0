"""Ports between a process and the services in memory: calls take time, and faults are injected.

The services are the memory adapters. Answers get lost, late, old or partial here.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from remuda.domain.demand import JobRecord
from remuda.domain.errors import CapacityError, NotFound, RemudaError, Throttled, TimedOut, Unavailable, UserError
from remuda.domain.instance import Instance, State
from remuda.domain.provision import Provision
from remuda.domain.resources import PoolMessage
from remuda.domain.signals import Report, Signal
from remuda.domain.transitions import Change
from remuda.ports.compute import LaunchRequest, LaunchResult, MachineView
from remuda.ports.github import Deletion, GitHubRun, GitHubRunner
from remuda.ports.pool import BATCH, Delivery
from simulation.faults import GITHUB_TIMEOUT_S, MAX_DESCRIBE_LAG_S, MAX_INDEX_LAG_S, MAX_LIST_LAG_S, Fault
from simulation.invariants import parse_runner

if TYPE_CHECKING:
    from simulation.world import SimulatedProcess, World

T = TypeVar("T")
Call = Callable[..., Awaitable[Any]]

#: Whether an operation of a port is a coroutine function. Cached, because it is needed for every new port.
_IS_CALL: dict[tuple[type, str], bool] = {}

#: Probabilities of a fault per call.
RARE, SOME, OFTEN = 0.01, 0.04, 0.15
#: Maximum seconds of a call in one direction, of a slow call, and of a period of throttling.
LATENCY_S = 0.06
SLOW_S = 25.0
BURST_S = 20.0
#: Fraction of heartbeats that are subject to faults.
BEATS_AT_RISK = 0.08
#: Maximum visibility timeout in seconds of a message that reappears too early.
EARLY_S = 0.6
#: Fraction of the writes with a lost answer that are applied with a delay, and its maximum in seconds.
LATE, LATE_S = 0.3, 15.0
#: Seconds of a wait in which one of its polls may fail.
POLLS_S = 90.0
#: Maximum seconds between the two parts of a batch.
SPLIT_S = 3.0


class FaultyPort:
    """Base of the ports with faults. Subclasses define some calls of their port and wrap the others with `_wrap`."""

    def __init__(self, port: Any, world: World, process: SimulatedProcess) -> None:
        self._port = port
        self._world = world
        self._process = process
        self._faults = world.faults
        self._enabled = world.faults.enabled
        self._rng = world.faults.rng

    def __getattr__(self, operation: str) -> Any:
        inner = getattr(self._port, operation)
        kind = (type(self._port), operation)
        if kind not in _IS_CALL:
            _IS_CALL[kind] = inspect.iscoroutinefunction(inner)
        if not _IS_CALL[kind]:
            return inner
        call = self._wrap(operation, inner)
        self.__dict__[operation] = call
        return call

    def _wrap(self, operation: str, inner: Call) -> Call:
        raise NotImplementedError

    async def _transfer(self, subjects: Iterable[str] = ()) -> None:
        """Wait for a request or an answer in transit."""
        if self._inject(Fault.SLOW_CALL, RARE, subjects):
            await self._world.loop.sleep(self._rng.uniform(0.5, SLOW_S))
        else:
            await self._world.loop.sleep(self._rng.random() * LATENCY_S)

    def _inject(self, fault: Fault, probability: float, subjects: Iterable[str] = ()) -> bool:
        if fault not in self._enabled or not self._faults.inject(fault, probability, subjects):
            return False
        self._process.faults.append(fault)
        self._process.previous_fault_at = self._process.last_fault_at
        self._process.last_fault_at = self._world.loop.time()
        return True

    def _trace(self, operation: str, subjects: Sequence[str] = ()) -> None:
        self._process.subjects = subjects
        self._world.trace.add(self._process.name, f"{operation} {' '.join(subjects)}")


_JOB_SEARCHES = frozenset({"jobs_of_run", "recent_jobs"})
_SEARCHES = _JOB_SEARCHES | {
    "find", "find_by_provision", "count_live", "unsettled_provisions", "recent_provisions", "troubled_reports",
}  # fmt: skip
_WRITES = frozenset(
    {
        "apply",
        "apply_all",
        "put_provision",
        "replace_provision",
        "put_config",
        "put_sweep_record",
        "forget",
        "prepare",
    }
    | {"put_demand", "delete_demand", "replace_lease"}
)


class FaultyStore(FaultyPort):
    def _wrap(self, operation: str, inner: Call) -> Call:
        if operation in _SEARCHES:
            return self._search(operation, inner)
        return self._write(operation, inner) if operation in _WRITES else self._read(operation, inner)

    def _write(self, operation: str, inner: Call) -> Call:
        async def call(*given: Any, **named: Any) -> Any:
            subjects = self._subjects(given)
            await self._transfer(subjects)
            self._throttle(subjects)
            self._trace(operation, subjects)
            if self._inject(Fault.WRITE_LOST, SOME, subjects):
                raise Unavailable(f"the store did not answer {operation}")
            if self._inject(Fault.WRITE_UNSURE, SOME, subjects):
                if self._rng.random() < LATE:
                    self._later(inner, given, named)
                else:
                    await inner(*given, **named)
                raise Unavailable(f"the store's answer to {operation} was lost")
            answer = await inner(*given, **named)
            await self._world.called(self._process, operation)
            if self._rng.random() < 0.5:
                await self._transfer(subjects)
            return answer

        return call

    async def beat(self, instance_id: str, **named: Any) -> None:
        """Most heartbeats have no faults: there are so many that the usual rate would disturb every agent."""
        self._world.safety.heartbeat_sent(instance_id, named)
        if self._rng.random() < BEATS_AT_RISK or self._world.loop.time() < self._world.throttled_until:
            await self._write("beat", self._port.beat)(instance_id, **named)
            return
        await self._port.beat(instance_id, **named)
        self._process.subjects = (instance_id,)
        self._world.trace.add(self._process.name, "beat")

    async def write_signal(self, instance_id: str, *, epoch: int, signal: Signal, **named: Any) -> None:
        """Check a signal when it is sent: the write may be applied much later."""
        self._world.safety.signal_sent(instance_id, epoch, signal, duration_s=named.get("duration_s"))
        write = self._write("write_signal", self._port.write_signal)
        await write(instance_id, epoch=epoch, signal=signal, **named)

    async def get_many(self, instance_ids: Collection[str]) -> Mapping[str, Instance]:
        return await self._in_parts("get_many", instance_ids)

    async def get_reports(self, instance_ids: Collection[str]) -> Mapping[str, Report]:
        return await self._in_parts("get_reports", instance_ids)

    async def _in_parts(self, operation: str, instance_ids: Collection[str]) -> dict[str, Any]:
        """A batch read is not atomic: its second part may be read later."""
        read = self._read(operation, getattr(self._port, operation))
        first, second = self._halves(sorted(instance_ids))
        if not second:
            return {**await read(instance_ids)}
        found = {**await read(first)}
        await self._world.loop.sleep(self._rng.random() * SPLIT_S)
        return {**found, **await read(second)}

    async def apply_all(self, changes: Sequence[Change]) -> Sequence[RemudaError | None]:
        """The second part of a batch may be written later, or not at all."""
        write = self._write("apply_all", self._port.apply_all)
        first, second = self._halves(changes)
        if not second:
            return [*await write(changes)]
        results = [*await write(first)]
        await self._world.loop.sleep(self._rng.random() * SPLIT_S)
        if self._rng.random() < 0.5:
            return [*results, *(Unavailable("the store did not process all items") for _ in second)]
        return [*results, *await write(second)]

    def _halves(self, items: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        is_split = len(items) > 1 and self._inject(Fault.BATCH_SPLIT, OFTEN)
        return (items[: len(items) // 2], items[len(items) // 2 :]) if is_split else (items, ())

    async def put_jobs(self, jobs: Collection[JobRecord]) -> None:
        """A batch is not atomic: some of its items may be written before it fails."""
        if len(jobs) > 1 and self._inject(Fault.WRITE_UNSURE, SOME):
            await self._port.put_jobs(list(jobs)[: self._rng.randint(1, len(jobs) - 1)])
            raise Unavailable("the store did not write all jobs")
        await self._write("put_jobs", self._port.put_jobs)(jobs)

    def _later(self, inner: Call, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Apply a request after its caller has given up on it."""

        async def apply() -> None:
            await self._world.loop.sleep(self._rng.random() * LATE_S)
            self._world.delayed_writer = self._process
            try:
                await inner(*given, **named)
            except RemudaError:
                self._trace("delayed write rejected")
            finally:
                self._world.delayed_writer = None

        loop = self._world.loop
        loop.keep_task(loop.create_task(apply(), context=loop.outside))

    def _read(self, operation: str, inner: Call) -> Call:
        async def call(*given: Any, **named: Any) -> Any:
            self._world.safety.patience.reads(self._process)
            subjects = self._subjects(given)
            # The delay is either before the read or after it; then the answer is old when it arrives.
            delays_answer = self._rng.random() < 0.3
            if not delays_answer:
                await self._transfer(subjects)
            self._throttle(subjects)
            self._trace(operation, subjects)
            if self._inject(Fault.READ_FAILED, RARE, subjects):
                raise Unavailable(f"the store did not answer {operation}")
            answer = await inner(*given, **named)
            if delays_answer:
                await self._transfer(subjects)
            return answer

        return call

    async def wait_for_control(self, instance_id: str, since: Any, timeout_s: float, **named: Any) -> Any:
        has_waited = self._world.safety.patience.begins_to_wait(self._process)
        self._world.safety.pauses.waits(self._process, since, timeout_s)
        self._fail_wait(instance_id)
        quiet_s = 0.0 if named.get("urgent", True) else self._rng.random() * self._world.plan.quiet_poll_s
        if quiet_s:
            # The store is polled less often.
            await self._world.loop.sleep(min(quiet_s, timeout_s))
            timeout_s = max(0.0, timeout_s - quiet_s)
        if self._world.plan.polls and Fault.READ_FAILED in self._enabled and self._faults.active:
            # Each poll is a read.
            part_s = self._rng.random() * min(timeout_s, POLLS_S)
            found = await self._port.wait_for_control(instance_id, since, part_s, **named)
            if found != since:
                self._world.safety.patience.waited(self._process)
                return found
            self._fail_poll(instance_id, has_waited=has_waited)
            timeout_s -= part_s
        found = await self._port.wait_for_control(instance_id, since, timeout_s, **named)
        self._world.safety.patience.waited(self._process)
        return found

    async def wait_for_report(self, instance_id: str, since: Any, timeout_s: float) -> Any:
        self._fail_wait(instance_id)
        return await self._port.wait_for_report(instance_id, since, timeout_s)

    def _fail_wait(self, instance_id: str) -> None:
        self._throttle([instance_id])
        if self._inject(Fault.READ_FAILED, RARE / 2, [instance_id]):
            raise Unavailable("the store did not answer a read")

    def _fail_poll(self, instance_id: str, *, has_waited: bool) -> None:
        if self._inject(Fault.READ_FAILED, OFTEN, [instance_id]):
            self._world.safety.patience.read_failed(self._process, has_waited=has_waited)
            raise Unavailable("the store did not answer a poll")

    def _search(self, operation: str, inner: Call) -> Call:
        async def call(*given: Any, **named: Any) -> Any:
            await self._transfer()
            self._throttle(())
            self._trace(operation)
            if self._inject(Fault.READ_FAILED, RARE):
                raise Unavailable(f"the store did not answer {operation}")
            if operation == "find" and self._inject(Fault.STALE_INDEX, OFTEN):
                return self._stale_records(lambda item: item.state in given[0], named.get("threshold_before"))
            if operation == "find_by_provision" and self._inject(Fault.STALE_INDEX, OFTEN):
                return self._stale_records(lambda item: item.provision_id == given[0])
            answer = await inner(*given, **named)
            if operation in _JOB_SEARCHES and answer and self._inject(Fault.STALE_INDEX, OFTEN):
                newest = max(answer, key=lambda job: job.seen_at)
                return [job for job in answer if job is not newest]
            if operation == "find" and len(answer) > 1 and self._inject(Fault.SHORT_PAGES, OFTEN):
                return await self._in_pages(answer, given[0])
            return answer

        return call

    def _stale_records(
        self, wanted: Callable[[Instance], bool], threshold_before: datetime | None = None
    ) -> list[Instance]:
        """Each record as it was some seconds ago. The lag differs per item, as in a real index."""
        found = []
        for versions in self._world.versions.values():
            at = self._world.loop.time() - self._rng.random() * MAX_INDEX_LAG_S
            seen = next((record for written_at, record in reversed(versions) if written_at <= at), None)
            if seen is not None and wanted(seen) and (threshold_before is None or seen.threshold <= threshold_before):
                found.append(seen)
        return found

    async def _in_pages(self, answer: Sequence[Instance], states: Collection[State]) -> list[Instance]:
        """Read the records page by page, with time between the pages."""
        found: list[Instance] = []
        left = [item.instance_id for item in answer]
        while left:
            size = self._rng.randint(1, 5)
            page, left = left[:size], left[size:]
            for instance_id in page:
                record = self._world.database.instances.get(instance_id)
                if record is not None and record.state in states:
                    found.append(record)
            await self._world.loop.sleep(self._rng.random() * LATENCY_S)
        return found

    def _throttle(self, subjects: Iterable[str]) -> None:
        now = self._world.loop.time()
        if now >= self._world.throttled_until and self._inject(Fault.THROTTLED, RARE / 10, subjects):
            self._world.throttled_until = now + self._rng.uniform(1.0, BURST_S)
        if now < self._world.throttled_until and self._faults.active and self._rng.random() < 0.7:
            self._process.faults.append(Fault.THROTTLED)
            self._process.last_fault_at = now
            raise Throttled("the store throttles", retry_after_s=1.0)

    def _subjects(self, given: tuple[Any, ...]) -> list[str]:
        """Instances that a call is about."""
        first: Any = given[0] if given else None
        if isinstance(first, str):
            return [first] if first.startswith("i-") else []
        if isinstance(first, Provision):
            return [
                item.instance_id
                for item in self._world.database.instances.values()
                if item.provision_id == first.provision_id
            ]
        if isinstance(first, Change):
            return [first.instance_id]
        kind: Any = type(first)
        if _is_collection(kind):
            ids = (item.instance_id if isinstance(item, Change | JobRecord) else item for item in first)
            return sorted(item for item in ids if item.startswith("i-"))
        return []


@cache
def _is_collection(kind: type) -> bool:
    """Cached, because checks of abstract classes are slow."""
    return issubclass(kind, Collection) and not issubclass(kind, Mapping)


class FaultyPool(FaultyPort):
    def _wrap(self, operation: str, inner: Call) -> Call:
        async def call(*given: Any, **named: Any) -> Any:
            await self._transfer()
            self._trace(operation)
            if operation == "depth" and self._inject(Fault.POOL_FAILED, SOME):
                raise Unavailable(f"the queue did not answer {operation}")
            return await inner(*given, **named)

        return call

    async def send(self, messages: Collection[PoolMessage], *, delay_s: float = 0.0) -> None:
        ids = [message.id for message in messages]
        await self._transfer(ids)
        self._trace("send", ids)
        self._world.safety.messages_sent(messages, self._process)
        self._process.sent.update((message.id, message.epoch) for message in messages)
        fails = self._inject(Fault.POOL_FAILED, SOME, ids)
        for number, message in enumerate(messages):
            if fails and number >= len(ids) // 2:
                break
            await self._put(message, delay_s)
        await self._world.called(self._process, "send")
        if fails:
            raise Unavailable("the queue did not take all messages")

    async def _put(self, message: PoolMessage, delay_s: float) -> None:
        subjects = [message.id]
        if self._inject(Fault.MESSAGE_LOST, OFTEN, subjects):
            return
        if self._inject(Fault.MESSAGE_LATE, OFTEN, subjects):
            delay_s += self._rng.uniform(1.0, 60.0)
        await self._port.send([message], delay_s=delay_s)
        if self._inject(Fault.MESSAGE_TWICE, OFTEN, subjects):
            await self._port.send([message], delay_s=delay_s + self._rng.uniform(0.0, 90.0))

    async def receive(
        self, resource_class: str, *, limit: int = BATCH, visibility_s: float, wait_s: float = 0.0
    ) -> Sequence[Delivery]:
        await self._transfer()
        if self._inject(Fault.MESSAGE_MALFORMED, RARE):
            self._world.queues.put(resource_class, None, shuffle=self._rng.random(), malformed="not JSON")
        if self._inject(Fault.POOL_FAILED, RARE):
            raise Unavailable("the queue did not answer a receive")
        if self._inject(Fault.RECEIVE_SHORT, OFTEN):
            limit = self._rng.randint(0, limit)
            if not limit:
                return []
        # Sometimes a message reappears although it is being processed.
        again = self._rng.random() < 0.1 and self._inject(Fault.MESSAGE_TWICE, 1.0)
        early_s = self._rng.random() * EARLY_S
        taken: Sequence[Delivery] = await self._port.receive(
            resource_class, limit=limit, visibility_s=early_s if again else visibility_s, wait_s=wait_s
        )
        ids = [item.message.id for item in taken if item.message]
        self._trace("receive", ids)
        for instance_id in ids if again else ():
            self._process.received_early.add(instance_id)
        if len(taken) > 1 and self._inject(Fault.MESSAGE_REORDERED, OFTEN, ids):
            taken = taken[: len(taken) // 2]
        await self._world.called(self._process, "receive")
        if self._rng.random() < 0.5:
            await self._transfer(ids)
        self._process.receipts.update(item.receipt for item in taken)
        return taken

    async def delete(self, resource_class: str, receipts: Collection[str]) -> None:
        await self._settle("delete", resource_class, receipts)

    async def make_visible(self, resource_class: str, receipts: Collection[str]) -> None:
        await self._settle("make_visible", resource_class, receipts)

    async def _settle(self, operation: str, resource_class: str, receipts: Collection[str]) -> None:
        queue = self._world.queues.named(resource_class)
        held = [item.message for item in queue.messages if item.receipt in receipts and item.message is not None]
        ids = [message.id for message in held]
        await self._transfer(ids)
        self._trace(operation, ids)
        if self._inject(Fault.POOL_FAILED, RARE, ids):
            raise Unavailable(f"the queue did not answer {operation}")
        if operation == "delete" and self._inject(Fault.DELETE_LOST, OFTEN, ids):
            return
        await getattr(self._port, operation)(resource_class, receipts)
        if operation == "delete":
            # Like SQS: an expired receipt is valid until the message is received again.
            queue.messages[:] = [item for item in queue.messages if item.receipt not in receipts]
            self._world.safety.messages_deleted(resource_class, held)
            await self._world.called(self._process, operation)


class FaultyCompute(FaultyPort):
    def _wrap(self, operation: str, inner: Call) -> Call:
        if operation in {"describe", "list_pool"}:
            return self._describe(operation, inner)

        async def call(*given: Any, **named: Any) -> Any:
            await self._transfer()
            return await inner(*given, **named)

        return call

    async def launch(self, request: LaunchRequest) -> LaunchResult:
        await self._transfer()
        self._trace("launch")
        self._world.safety.launch_requested(request, self._process)
        if self._inject(Fault.NO_CAPACITY, 2 * OFTEN if self._process.kind == "listener" else SOME):
            self._world.safety.demand.launch_failed(request)
            raise CapacityError("m6i.large in eu-west-1a: no capacity")
        short = request.count > 1 and self._inject(Fault.FLEET_PARTIAL, 2 * OFTEN)
        limited = replace(request, count=self._rng.randint(1, request.count - 1)) if short else request
        result: LaunchResult = await self._port.launch(limited)
        ids = [item.instance_id for item in result.instances]
        if short:
            result = replace(result, errors=(*result.errors, "eu-west-1a: no capacity for more"))
        await self._world.called(self._process, "launch")
        if self._inject(Fault.LAUNCH_UNSURE, OFTEN, ids):
            raise Unavailable("EC2's answer to CreateFleet was lost")
        await self._transfer(ids)
        return result

    def _describe(self, operation: str, inner: Call) -> Call:
        async def describe(*given: Any) -> Any:
            await self._transfer()
            self._trace(operation)
            if self._inject(Fault.COMPUTE_FAILED, SOME):
                raise Unavailable(f"EC2 did not answer {operation}")
            if self._inject(Fault.DESCRIBE_PARTIAL, 2 * OFTEN):
                return self._some_of(await inner(*given))
            lags = self._inject(Fault.DESCRIBE_LAGS, 2 * OFTEN)
            lag_s = self._rng.random() * MAX_DESCRIBE_LAG_S if lags else 0.0
            if not lags:
                return await inner(*given)
            with self._world.cloud_as_it_was(lag_s):
                views = await inner(*given)
            since = self._world.clock.now() - timedelta(seconds=lag_s)
            return self._launched_before(views, since)

        return describe

    def _some_of(self, views: Any) -> Any:
        """The views without some of the new machines: each appears after a random delay."""
        now = self._world.clock.now()

        def is_shown(view: MachineView) -> bool:
            age_s = (now - view.launched_at).total_seconds()
            return age_s >= self._rng.random() * MAX_DESCRIBE_LAG_S

        if isinstance(views, Mapping):
            return {key: view for key, view in views.items() if is_shown(view)}
        return [view for view in views if is_shown(view)]

    @staticmethod
    def _launched_before(views: Any, since: datetime) -> Any:
        if isinstance(views, Mapping):
            return {key: view for key, view in views.items() if view.launched_at <= since}
        return [view for view in views if view.launched_at <= since]

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        ids = sorted(instance_ids)
        await self._transfer(ids)
        self._trace("terminate", ids)
        self._world.safety.termination_requested(ids)
        fails = self._inject(Fault.COMPUTE_FAILED, SOME, ids)
        if fails and self._rng.random() < 0.5:
            raise Unavailable("EC2 did not answer TerminateInstances")
        answer: Mapping[str, str] = await self._port.terminate(ids)
        await self._world.called(self._process, "terminate")
        if fails:
            raise Unavailable("EC2's answer to TerminateInstances was lost")
        return answer


_GITHUB_ERRORS = (Fault.GITHUB_401, Fault.GITHUB_403, Fault.GITHUB_429, Fault.GITHUB_5XX)


class FaultyGitHub(FaultyPort):
    def _wrap(self, operation: str, inner: Call) -> Call:
        async def call(*given: Any, **named: Any) -> Any:
            await self._transfer()
            self._trace(operation)
            return await self._answer(inner, *given, **named)

        return call

    async def _answer(self, inner: Call, *given: Any, subjects: Sequence[str] = (), **named: Any) -> Any:
        """The answer to a request, unless a fault occurs."""
        await self._hang(subjects)
        self._raise_error(subjects)
        if self._inject(Fault.GITHUB_404, RARE, subjects):
            raise UserError("GitHub does not find the scope: 404", field="github-scope")
        if self._inject(Fault.GITHUB_422, RARE, subjects):
            raise Unavailable("GitHub answered 422")
        found = await inner(*given, **named)
        if self._inject(Fault.GITHUB_UNSURE, RARE, subjects):
            raise Unavailable("GitHub's answer was lost")
        return found

    async def _hang(self, subjects: Sequence[str] = ()) -> None:
        if self._world.github_hangs(subjects):
            self._process.faults.append(Fault.GITHUB_HANGS)
            self._process.last_fault_at = self._world.loop.time()
            await self._world.loop.sleep(GITHUB_TIMEOUT_S)
            raise TimedOut(f"GitHub did not respond within {GITHUB_TIMEOUT_S:g} s")

    def _raise_error(self, subjects: Iterable[str] = ()) -> None:
        for fault in _GITHUB_ERRORS:
            if self._inject(fault, RARE, subjects):
                number = fault.value.removeprefix("github-")
                if fault is Fault.GITHUB_429:
                    raise Throttled("GitHub limits the rate: 429", retry_after_s=30.0)
                if fault is Fault.GITHUB_5XX:
                    raise Unavailable("GitHub answered 502")
                raise UserError(f"GitHub rejects the credential: {number}", field="github-token")

    async def list_runners(self, scope: str) -> Sequence[GitHubRunner]:
        await self._transfer()
        self._trace("list_runners")
        found: Sequence[GitHubRunner] = await self._answer(self._port.list_runners, scope, subjects=self._registered)
        if self._inject(Fault.LIST_OLD, 2 * OFTEN):
            found = self._earlier_list()
        if len(found) > 1 and self._inject(Fault.LIST_MOVES, OFTEN):
            moved = self._rng.randrange(len(found))
            found = [*found[:moved], *found[moved + 1 :]]
        if found and self._inject(Fault.BUSY_WRONG, OFTEN):
            found = [replace(runner, busy=self._rng.random() < 0.5) for runner in found]
        await self._transfer()
        return found

    @property
    def _registered(self) -> list[str]:
        """Instances whose runners GitHub lists."""
        found = (parse_runner(runner.name) for runner in self._world.github.runners.values())
        return [parsed[1] for parsed in found if parsed is not None]

    def _earlier_list(self) -> Sequence[GitHubRunner]:
        at = self._world.loop.time() - self._rng.random() * MAX_LIST_LAG_S
        return next((views for written_at, views in reversed(self._world.github.snapshots) if written_at <= at), ())

    async def get_run(self, scope: str, repository: str, run_id: int, *, etag: str = "") -> GitHubRun | None:
        if self._process.kind == "refresh" and not self._world.github.knows_runs:
            raise NotFound(f"{repository} has no run {run_id}")
        await self._transfer()
        self._trace("get_run")
        run: GitHubRun | None = await self._answer(self._port.get_run, scope, repository, run_id, etag=etag)
        if run is not None and run.has_ended:
            self._world.safety.demand.read_end(self._process, run_id)
            self._world.safety.run_read(self._process, run)
        return run

    async def rerun_failed_jobs(self, scope: str, repository: str, run_id: int) -> None:
        async def request() -> None:
            run = self._world.github.runs.get((repository.lower(), run_id))
            has_ended = run is not None and run.status == "completed"
            self._world.safety.demand.rerun_requested(self._process, run_id, has_ended=has_ended)
            await self._port.rerun_failed_jobs(scope, repository, run_id)
            await self._world.called(self._process, "rerun_failed_jobs")

        await self._transfer()
        self._trace("rerun_failed_jobs")
        await self._answer(request)

    async def delete_runner(self, scope: str, runner_id: int) -> Deletion:
        runner = self._world.github.runners.get(runner_id)
        parsed = parse_runner(runner.name) if runner else None
        ids = [parsed[1]] if parsed else []
        await self._transfer(ids)
        self._trace("delete_runner", ids)
        await self._hang(ids)
        self._raise_error(ids)
        if self._inject(Fault.GITHUB_404, SOME, ids):
            return Deletion.GONE
        if self._inject(Fault.GITHUB_422, SOME, ids):
            return Deletion.BUSY
        self._world.safety.removal_requested(runner_id)
        deletion: Deletion = await self._port.delete_runner(scope, runner_id)
        await self._world.called(self._process, "delete_runner")
        if self._inject(Fault.GITHUB_UNSURE, SOME, ids):
            raise Unavailable("GitHub's answer was lost")
        return deletion
