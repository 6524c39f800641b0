"""The compute and fleet ports for local machines, which are process trees. Linux only: it needs /proc and pidfds.

A machine is a folder and a supervisor process that outlives the process that launched it. All machines run as the user
who launches them; the kernel does not isolate them from each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from remuda import procfs
from remuda.adapters.local import folder as files
from remuda.adapters.local.launch import DRAFT, ROOT_LOCK, LocalLauncher, is_on
from remuda.adapters.local.machine import MachineRecord, read_record
from remuda.adapters.local.options import LocalOptions
from remuda.disk import FULL, full_disk
from remuda.domain import timestamps
from remuda.domain.errors import NotFound, RemudaError, Unavailable, UserError
from remuda.domain.resources import ResourceClass, is_instance_id
from remuda.domain.scale_down.fleet import (
    GHR_APPLICATION,
    GHR_APPLICATION_TAG,
    GHR_ENVIRONMENT_TAG,
    GHR_ORPHAN_TAG,
    YES,
    FleetMachine,
)
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids
from remuda.ports.compute import ENDED, POOL_TAG, Compute, LaunchRequest, LaunchResult, MachineState, MachineView

T = TypeVar("T")

SERVICE = "compute"
#: Seconds that a supervisor may take to end after SIGTERM, and after SIGKILL.
END_LIMIT_S = 5.0
KILLED_LIMIT_S = 10.0
#: Attempts to kill the remaining processes of a machine without power, and seconds to wait for each process.
KILL_ATTEMPTS = 40
KILL_PAUSE_S = 0.1
#: Finished machines whose records and logs are kept.
MAX_FINISHED = 50
_ALIVE = frozenset({MachineState.PENDING, MachineState.RUNNING})


class LocalCompute:
    def __init__(
        self,
        *,
        root: Path,
        pool: str,
        runner_source: Path,
        agent_command: Sequence[str],
        clock: Clock,
        ids: Ids,
        calls: CallCounter,
        environment: Mapping[str, str],
    ) -> None:
        # Resolved, because the kernel reports resolved paths of processes.
        self._root = root.resolve()
        self._pool = pool
        self._runner_source = runner_source.resolve()
        self._clock = clock
        self._calls = calls
        self._launcher = LocalLauncher(
            root=self._root,
            pool=pool,
            runner_source=self._runner_source,
            agent_command=agent_command,
            environment=environment,
            clock=clock,
            ids=ids,
        )

    async def prepare(
        self,
        launch: Mapping[str, str],
        classes: Sequence[ResourceClass] = (),  # noqa: ARG002 - local machines have no images
    ) -> Sequence[str]:
        self._calls.add(SERVICE, "prepare")
        LocalOptions.parse(launch)
        if not self._runner_source.is_dir():
            raise UserError(
                f"no runner software in {self._runner_source}",
                field="runner-source",
                fix="unpack actions/runner there, or run `remuda up`",
            )
        return await self._in_thread(self._launcher.prepare)

    async def close(self) -> None:
        self._launcher.reap()

    async def launch(self, request: LaunchRequest) -> LaunchResult:
        def launch() -> LaunchResult:
            result = self._launcher.launch(request)
            self._forget_finished()
            return result

        with self._calls.counted(SERVICE, "launch"):
            return await self._in_thread(launch)

    async def describe(self, instance_ids: Collection[str]) -> Mapping[str, MachineView]:
        def read() -> dict[str, MachineView]:
            views = (self._view(self._root / name) for name in instance_ids if is_instance_id(name))
            return {view.instance_id: view for view in views if view is not None}

        with self._calls.counted(SERVICE, "describe"):
            return await self._in_thread(read)

    async def list_pool(self) -> Sequence[MachineView]:
        def read() -> list[MachineView]:
            views = [self._view(folder) for folder in self._folders()]
            return [view for view in views if view is not None and view.tags.get(POOL_TAG) == self._pool]

        with self._calls.counted(SERVICE, "list_pool"):
            return await self._in_thread(read)

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        wanted = list(dict.fromkeys(instance_ids))
        with self._calls.counted(SERVICE, "terminate"):
            errors = await asyncio.gather(*(self._terminate(name) for name in wanted))
        self._launcher.reap()
        return {name: error for name, error in zip(wanted, errors, strict=True) if error}

    async def tag(self, instance_ids: Collection[str], tags: Mapping[str, str]) -> None:
        with self._calls.counted(SERVICE, "tag"):
            await self._change_tags(instance_ids, lambda present: {**present, **tags})

    async def untag(self, instance_ids: Collection[str], keys: Collection[str]) -> None:
        with self._calls.counted(SERVICE, "untag"):
            await self._change_tags(
                instance_ids, lambda present: {key: value for key, value in present.items() if key not in keys}
            )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run file operations in a thread, because a slow disk would block the event loop."""
        try:
            return await asyncio.to_thread(work)
        except OSError as problem:
            if problem.errno in FULL:
                raise full_disk(self._root) from problem
            raise Unavailable(f"cannot use the machines' folder: {problem}") from problem

    def _folders(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        return sorted(path for path in self._root.iterdir() if is_instance_id(path.name))

    # State

    def _view(self, folder: Path) -> MachineView | None:
        on = is_on(folder)
        if not on:
            self._launcher.reap()
            on = not self._finish(folder, "lost power")
        record = read_record(folder)
        if record is None:
            return None
        state = _state(record, on=on)
        return MachineView(
            instance_id=record.instance_id,
            state=state,
            end_reason=record.reason if state in ENDED else "",
            instance_type=record.instance_type,
            launched_at=record.launched_at,
            tags=record.tags,
        )

    def _finish(self, folder: Path, reason: str) -> bool:
        """Kill the remaining processes of a machine without power and strip its folder. Return whether none is left."""
        record = read_record(folder)
        if record is None or record.finished:
            return True
        with files.locked(str(folder / files.LOCK)):
            record = read_record(folder)
            if record is None or record.finished:
                return True
            if not self._kill_remaining(folder):
                return False
            files.strip(str(folder))
            document = files.read(str(folder / files.RECORD)) or {}
            document |= {"finished": True, "reason": record.reason or reason}
            document["endedAt"] = document.get("endedAt") or timestamps.to_text(self._clock.now())
            files.write(str(folder / files.RECORD), files.encode(document))
        return True

    def _kill_remaining(self, folder: Path) -> bool:
        """Kill processes that survived the supervisor, found by their marker or folder. Return whether none is left."""
        known = files.supervisor(str(folder))
        since = known[1] if known is not None else 0
        for _ in range(KILL_ATTEMPTS):
            found = procfs.machine_processes(folder.name, str(folder), since)
            if not found:
                return True
            procfs.kill(found, KILL_PAUSE_S)
        return False

    def _forget_finished(self) -> None:
        """Delete the folders of finished machines, except the newest, and the drafts of interrupted launches."""
        with files.locked(str(self._root / ROOT_LOCK)):
            finished: list[tuple[datetime, Path]] = []
            drafts = (path for path in self._root.iterdir() if path.name.startswith(DRAFT))
            abandoned = [path for path in drafts if not files.has_power(str(path))]
            for folder in self._folders():
                record = read_record(folder)
                if is_on(folder):
                    continue
                if record is None and self._kill_remaining(folder):
                    abandoned.append(folder)
                elif record is not None and record.finished and record.ended_at is not None:
                    finished.append((record.ended_at, folder))
            finished.sort(reverse=True)
            abandoned += [folder for _, folder in finished[MAX_FINISHED:]]
            files.erase(str(folder) for folder in abandoned)

    # Changes

    async def _terminate(self, name: str) -> str:
        """Terminate one machine. Return an error, or an empty string."""
        folder = self._root / name
        if not is_instance_id(name):
            return f"{name[:40]!r} is not an instance id"
        if not folder.is_dir():
            return ""
        record = read_record(folder)
        if record is None:
            return "cannot read its record"
        if record.tags.get(POOL_TAG) != self._pool:
            return f"it does not have the tag {POOL_TAG}={self._pool}"
        try:
            return await self._end(folder)
        except Unavailable as problem:
            return problem.message

    async def _end(self, folder: Path) -> str:
        if is_on(folder):
            known = files.supervisor(str(folder))
            if known is None:
                return "its launch is still in progress"
            with contextlib.suppress(Unavailable):  # terminate it even if the disk is full
                await self._in_thread(lambda: self._mark_ending(folder))
            if not await _signal_and_wait(*known, signal.SIGTERM, END_LIMIT_S):
                await _signal_and_wait(*known, signal.SIGKILL, KILLED_LIMIT_S)
        self._launcher.reap()
        # Every later `describe` tries again to kill processes that are still left.
        await self._in_thread(lambda: not is_on(folder) and self._finish(folder, "terminated"))
        return ""

    def _mark_ending(self, folder: Path) -> None:
        files.change(str(folder), {"endingAt": timestamps.to_text(self._clock.now()), "reason": "terminated"})

    async def _change_tags(
        self, instance_ids: Collection[str], change: Callable[[dict[str, str]], Mapping[str, str]]
    ) -> None:
        def write() -> list[str]:
            return [name for name in instance_ids if not self._change_tags_of(name, change)]

        unknown = await self._in_thread(write)
        if unknown:
            raise NotFound(f"no such machine: {', '.join(unknown)}")

    def _change_tags_of(self, name: str, change: Callable[[dict[str, str]], Mapping[str, str]]) -> bool:
        folder = self._root / name
        if not is_instance_id(name) or not folder.is_dir():
            return False
        with files.locked(str(folder / files.LOCK)):
            record = read_record(folder)
            document: dict[str, Any] | None = files.read(str(folder / files.RECORD))
            if record is None or document is None:
                return False
            document["tags"] = dict(change(dict(record.tags)))
            files.write(str(folder / files.RECORD), files.encode(document))
        return True


def _state(record: MachineRecord, *, on: bool) -> MachineState:
    if not on:
        return MachineState.TERMINATED
    if record.ending_at is not None or record.finished:
        return MachineState.SHUTTING_DOWN
    return MachineState.PENDING if record.booted_at is None else MachineState.RUNNING


async def _signal_and_wait(pid: int, started: int, number: signal.Signals, timeout_s: float) -> bool:
    """Signal exactly this process and wait for its end. Return whether it has ended."""
    descriptor = procfs.send_signal(pid, started, number)
    if descriptor is None:
        return True
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return True


class LocalFleet:
    """Lists the pool's machines and marks orphans by tags."""

    def __init__(self, *, compute: Compute, pool: str, environment: str) -> None:
        """Local machines without an environment tag belong to the environment with the pool's name."""
        self._compute = compute
        self._environment = environment
        self._default_tags = {GHR_ENVIRONMENT_TAG: pool, GHR_APPLICATION_TAG: GHR_APPLICATION}
        self._listed: set[str] = set()

    async def close(self) -> None:
        """Do nothing: the caller closes `compute`."""

    async def list_machines(self, *, orphans: bool = False) -> Sequence[FleetMachine]:
        machines = [
            FleetMachine(
                instance_id=view.instance_id, launched_at=view.launched_at, tags={**self._default_tags, **view.tags}
            )
            for view in await self._compute.list_pool()
            if view.state in _ALIVE
        ]
        found = [machine for machine in machines if self._is_ours(machine) and (machine.is_orphan or not orphans)]
        self._listed.update(machine.instance_id for machine in found)
        return found

    async def mark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        return await self._change(instance_ids, lambda name: self._compute.tag([name], {GHR_ORPHAN_TAG: YES}))

    async def unmark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        return await self._change(instance_ids, lambda name: self._compute.untag([name], [GHR_ORPHAN_TAG]))

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        unknown = self._not_listed(instance_ids)
        failed = await self._compute.terminate([name for name in instance_ids if name not in unknown])
        return {**unknown, **failed}

    def _is_ours(self, machine: FleetMachine) -> bool:
        return (
            machine.tags.get(GHR_ENVIRONMENT_TAG) == self._environment
            and machine.tags.get(GHR_APPLICATION_TAG) == GHR_APPLICATION
        )

    def _not_listed(self, instance_ids: Collection[str]) -> dict[str, str]:
        return {name: "not in this fleet" for name in instance_ids if name not in self._listed}

    async def _change(
        self, instance_ids: Collection[str], change: Callable[[str], Awaitable[None]]
    ) -> Mapping[str, str]:
        failures = self._not_listed(instance_ids)
        for name in instance_ids:
            if name in failures:
                continue
            try:
                await change(name)
            except NotFound:
                continue  # a terminated machine needs no mark
            except RemudaError as error:
                failures[name] = error.message
        return failures
