"""The listener of a benchmark in its own process: counts its calls, its CPU time and its memory.

It is the real listener with the adapters of AWS and GitHub. Around its ports are gates, with which a benchmark holds
back its calls, and a count of jobs that the benchmark adds to GitHub's statistics.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO, cast

from benchmarks.idle_agent import FastClock, FastLoop
from benchmarks.json_lines import MAX_LINE, JsonProcess, json_process, respond
from remuda.adapters.github.scale_sets import SERVICE
from remuda.adapters.system.clock import SystemClock
from remuda.cli.output import record_line
from remuda.config.settings import time_zone
from remuda.config.sources import load
from remuda.controlplane.context import Context
from remuda.controlplane.demand import DemandContext, DemandListener
from remuda.domain.demand import DemandMessage, DemandStatistics, JobEventKind
from remuda.domain.runner_set import RunnerSet
from remuda.ports.calls import CallCounter
from remuda.ports.demand import DemandSession, DemandSource
from remuda.wiring import open_context
from remuda.wiring.github import open_demand_source

#: Operations of the store that the listener calls at intervals for all sets together: its lease, the configuration and
#: the search for records.
OWN = frozenset({"get_lease", "replace_lease", "get_config", "find"})
#: Prefix of the service under which their calls are counted.
OWN_PREFIX = "own "
_is_own: ContextVar[bool] = ContextVar("is_own", default=False)
#: Calls that a set makes without a job: polls. An acknowledgement belongs to a message.
POLL = "GET message"
ACKNOWLEDGEMENT = "DELETE message"


@dataclass(frozen=True, kw_only=True)
class ListenerOptions:
    pool: str
    #: Jobs by set that GitHub does not know: those of machines without agents.
    busy: Mapping[str, int] = field(default_factory=dict)
    #: Whether its clock and its timers are accelerated.
    fast: bool = False


class Gates:
    """Gates for all calls, and for polls only."""

    def __init__(self) -> None:
        self.calls = asyncio.Event()
        self.polls = asyncio.Event()
        self.calls.set()
        self.polls.set()


class AttributedCalls(CallCounter):
    """Counts the calls that the listener makes at intervals apart from those for sets and jobs."""

    def add(self, service: str, operation: str, count: int = 1) -> None:
        super().add(f"{OWN_PREFIX}{service}" if _is_own.get() else service, operation, count)

    def failures(self) -> int:
        return sum(self._failures.values())


class GatedPort:
    """A port whose calls wait until the gate is open."""

    def __init__(self, port: Any, gates: Gates) -> None:
        self._port = port
        self._gates = gates

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._port, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def gated(*given: Any, **named: Any) -> Any:
            await self._gates.calls.wait()
            before = _is_own.set(name in OWN)
            try:
                return await found(*given, **named)
            finally:
                _is_own.reset(before)

        return gated


class ObservedSession:
    """A session that notes when the assignments of jobs arrive."""

    def __init__(self, session: DemandSession, gates: Gates, busy: int, received: dict[str, float]) -> None:
        self._session = session
        self._gates = gates
        self._busy = busy
        self._received = received

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    @property
    def statistics(self) -> DemandStatistics | None:
        found = self._session.statistics
        return found and self._with_busy(found)

    async def receive(self, *, last_message_id: int, capacity: int) -> DemandMessage | None:
        await self._gates.polls.wait()
        message = await self._session.receive(last_message_id=last_message_id, capacity=capacity)
        now = SystemClock().monotonic()
        await self._gates.calls.wait()
        if message is None:
            return None
        for event in message.events:
            if event.kind is JobEventKind.ASSIGNED:
                self._received.setdefault(event.job_id, now)
        return replace(message, statistics=self._with_busy(message.statistics))

    def _with_busy(self, statistics: DemandStatistics) -> DemandStatistics:
        return replace(statistics, assigned=statistics.assigned + self._busy)


class ObservedSource(GatedPort):
    def __init__(self, source: DemandSource, gates: Gates, busy: Mapping[str, int]) -> None:
        super().__init__(source, gates)
        self._source = source
        self._busy = busy
        self.received: dict[str, float] = {}

    async def open_session(
        self, runner_set: RunnerSet, scale_set_id: int, *, owner: str, session_id: str = ""
    ) -> DemandSession:
        session = await self._source.open_session(runner_set, scale_set_id, owner=owner, session_id=session_id)
        return cast(
            "DemandSession", ObservedSession(session, self._gates, self._busy.get(runner_set.name, 0), self.received)
        )


class DiscardedLines:
    """Formats events as the command does, and writes them nowhere."""

    def __init__(self, output: TextIO) -> None:
        self._clock = SystemClock()
        self._output = output

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        self._output.write(record_line(self._clock.now(), action, why, facts) + "\n")
        self._output.flush()


class ListenerHost:
    def __init__(self, options: ListenerOptions, output: TextIO) -> None:
        self._options = options
        self._output = output
        self._gates = Gates()
        self._calls = AttributedCalls()
        self._source: ObservedSource | None = None

    async def run(self) -> None:
        options, gates = self._options, self._gates
        reader = asyncio.StreamReader(limit=MAX_LINE)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        settings = load({"backend": "aws", "pool": options.pool}, environ=dict(os.environ))
        async with AsyncExitStack() as stack:
            context = await stack.enter_async_context(
                open_context(settings, DiscardedLines(self._output), needs_github=True, calls=self._calls)
            )
            if options.fast:
                context = replace(context, clock=FastClock())
            inner = await stack.enter_async_context(open_demand_source(context))
            self._source = ObservedSource(inner, gates, options.busy)
            listening = asyncio.create_task(DemandListener(self._demand(context)).run())
            respond({})
            while line := await reader.readline():
                request = json.loads(line)
                if request["command"] == "stop":
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
                    respond({})
                    return
                respond(self._handle(request, is_running=not listening.done()))

    def _demand(self, context: Context) -> DemandContext:
        gated: dict[str, Any] = {
            name: GatedPort(getattr(context, name), self._gates) for name in ("store", "pool", "compute")
        }
        return DemandContext(
            context=replace(context, **gated),
            source=cast("DemandSource", self._source),
            store=gated["store"],
            zone_of=time_zone,
            owner=f"benchmark/{os.getpid()}",
        )

    def _handle(self, request: dict[str, Any], *, is_running: bool) -> dict[str, Any]:
        if request["command"] == "gate":
            for name, is_open in request["gates"].items():
                gate: asyncio.Event = getattr(self._gates, name)
                (gate.set if is_open else gate.clear)()
            return {}
        if self._source is None or not is_running:
            raise RuntimeError("the listener has ended")
        return {
            "calls": self._calls.by_service(),
            "failed": self._calls.failures(),
            "cpu_s": time.process_time(),
            "memory_mb": _memory_mb(),
            "received": self._source.received,
        }


def _memory_mb() -> float:
    """Maximum resident memory of this process; unlike ru_maxrss, without its parent's."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


# In the benchmark ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ListenerState:
    """Calls and resources that the process has used since it started."""

    calls: dict[str, dict[str, int]]
    #: Calls that failed, and may have been repeated.
    failed: int
    cpu_s: float
    memory_mb: float
    #: Monotonic time of each job's assignment.
    received: dict[str, float]

    def since(self, before: ListenerState) -> ListenerState:
        calls = {
            service: {
                name: count - before.calls.get(service, {}).get(name, 0)
                for name, count in operations.items()
                if count > before.calls.get(service, {}).get(name, 0)
            }
            for service, operations in self.calls.items()
        }
        return replace(self, calls=calls, failed=self.failed - before.failed, cpu_s=self.cpu_s - before.cpu_s)

    def of(self, service: str, *, without: frozenset[str] = frozenset()) -> int:
        return sum(count for name, count in self.calls.get(service, {}).items() if name not in without)

    def all_of(self, service: str) -> int:
        """Calls for sets and jobs, and those of the listener at intervals."""
        return self.of(service) + self.of(f"{OWN_PREFIX}{service}")

    @property
    def github(self) -> int:
        """Calls of GitHub besides polls and acknowledgements."""
        return self.of("github") + self.of(SERVICE, without=frozenset({POLL, ACKNOWLEDGEMENT}))

    def describe(self, service: str) -> str:
        """Return operations with counts, the most frequent first."""
        found = sorted(self.calls.get(service, {}).items(), key=lambda item: -item[1])
        return ", ".join(f"{count} {name}" for name, count in found)


class ListenerProcess:
    """Client of the listener's process."""

    def __init__(self, process: JsonProcess) -> None:
        self._process = process

    async def state(self) -> ListenerState:
        return ListenerState(**await self._process.request(command="state"))

    async def gate(self, **gates: bool) -> None:
        """Open or close the gates `calls` and `polls`."""
        await self._process.request(command="gate", gates=gates)

    async def stop(self) -> None:
        await self._process.request(command="stop")


@asynccontextmanager
async def listener_process(options: ListenerOptions) -> AsyncIterator[ListenerProcess]:
    async with json_process("benchmarks.demand_listener", json.dumps(asdict(options))) as process:
        listener = ListenerProcess(process)
        yield listener
        await listener.stop()


if __name__ == "__main__":
    given = ListenerOptions(**json.loads(sys.argv[1]))
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        asyncio.Runner(loop_factory=FastLoop if given.fast else None) as asyncio_runner,
    ):
        asyncio_runner.run(ListenerHost(given, nowhere).run())
