"""The guard as a process: while an agent replaces it, the sandbox is never without, whatever fails or ends it."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from remuda import procfs
from remuda.agent import guard
from remuda.agent.guard_process import GuardProcess, Reserves
from remuda.procfs import Process
from tests.support.virtual_time import Killed

RESERVES = Reserves(memory=1, kernel=1, disk=1, files=1, log=1)
#: More effects than a start has.
MAX_EFFECTS = 30


@dataclass(kw_only=True)
class FakeGuard:
    pid: int
    started: int
    #: The other end of the pipe that the agent reads; -1 when it is closed.
    pipe: int
    works: bool = False

    def say(self, text: bytes) -> None:
        os.write(self.pipe, text)


@dataclass(kw_only=True)
class FakeHost:
    """Processes of guards, and each effect that an agent has on them. Nothing else happens between two effects."""

    page: Path
    #: The number of the effect at which the agent is killed, or that fails, and how.
    at: int = 0
    error: Callable[[], BaseException] = Killed
    #: Whether new guards work, are silent, or end at once.
    new: str = "works"
    guards: dict[int, FakeGuard] = field(default_factory=dict)
    effects: list[str] = field(default_factory=list)
    is_armed: bool = False
    #: Effects after which no guard worked.
    unguarded: list[str] = field(default_factory=list)
    pids: int = 100

    def effect(self, name: str) -> None:
        """Called before the effect."""
        if self.is_armed:
            self.effects.append(name)
            if len(self.effects) == self.at:
                raise self.error()

    def judge(self, name: str) -> None:
        if self.is_armed and not any(found.works for found in self.guards.values()):
            self.unguarded.append(name)

    def spawn(self, _arguments: Any, **_: Any) -> Any:
        self.effect("start a process")
        reading, writing = os.pipe()
        self.pids += 1
        made = self.guards[self.pids] = FakeGuard(pid=self.pids, started=self.pids * 7, pipe=writing)
        if self.new == "works":
            made.works = True
            page = guard.open_page(str(self.page))
            guard.NUMBER.pack_into(page, guard.STARTED, made.started)
            guard.NUMBER.pack_into(page, guard.PID, made.pid)
            page.close()
            made.say(guard.READY)
        elif self.new == "ends":
            self._end(made.pid)
        self.judge("start a process")
        return _Popen(made.pid, os.fdopen(reading, "rb", buffering=0))

    def read_process(self, pid: int) -> Process | None:
        self.effect("look at a process")
        found = self.guards.get(pid)
        return Process(pid=pid, ppid=1, started=found.started) if found is not None else None

    def kill(self, pid: int, _signal: int = 9) -> None:
        self.effect("kill")
        if pid not in self.guards:
            raise ProcessLookupError
        self._end(pid)
        self.judge("kill")

    def kill_all(self, found: list[Process], _limit_s: float) -> None:
        for process in found:
            self.kill(process.pid)

    def wait(self, pid: int, _flags: int) -> tuple[int, int]:
        self.effect("reap")
        if pid in self.guards and not self.guards[pid].works:
            raise AssertionError(f"the agent waits for {pid}, which does not end")
        return pid, 0

    def select(self, reading: list[int], *_: Any) -> Any:
        self.effect("wait for the guard")
        return _READY(reading, [], [], 0)

    def _end(self, pid: int) -> None:
        os.close(self.guards.pop(pid).pipe)

    def close(self) -> None:
        for pid in [*self.guards]:
            self._end(pid)


@dataclass
class _Popen:
    pid: int
    stdout: Any
    returncode: int | None = None


_READY = select.select


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHost]:
    made = FakeHost(page=tmp_path / "guard")
    monkeypatch.setattr(subprocess, "Popen", made.spawn)
    monkeypatch.setattr(select, "select", made.select)
    monkeypatch.setattr(os, "kill", made.kill)
    monkeypatch.setattr(os, "waitpid", made.wait)
    monkeypatch.setattr(procfs, "read_process", made.read_process)
    monkeypatch.setattr(procfs, "kill", made.kill_all)
    yield made
    monkeypatch.undo()
    made.close()


def start(host: FakeHost) -> GuardProcess:
    """Start the guard as a new agent does."""
    folder = host.page.parent
    process = GuardProcess(cgroup=folder, storage=folder, log=folder, reserves=RESERVES, record=lambda *_: None)
    process.start()
    return process


@pytest.mark.parametrize("error", [Killed, lambda: OSError("no memory")], ids=["killed", "fails"])
def test_a_running_sandbox_is_guarded_at_every_effect_of_a_start(host: FakeHost, error: Any) -> None:
    for at in range(1, MAX_EFFECTS):
        host.is_armed = False
        start(host)
        host.at, host.error, host.effects, host.is_armed = at, error, [], True
        with suppress(Killed, OSError):
            start(host)
        is_cut = len(host.effects) >= at
        host.judge("the end")
        assert not host.unguarded, f"after {host.effects}"
        # The next agent replaces whatever guard is there.
        host.is_armed = False
        start(host)
        if not is_cut:
            assert at > 4
            return
    raise AssertionError("a start has more effects than expected")


@pytest.mark.parametrize("new", ["is silent", "ends"])
def test_a_guard_that_does_not_start_leaves_the_former_one(host: FakeHost, new: str) -> None:
    start(host)
    (former,) = host.guards
    host.new, host.is_armed = new, True
    with pytest.raises(OSError, match="does not start"):
        start(host)
    assert not host.unguarded
    assert [*host.guards] == [former]


def test_a_guard_that_works_replaces_the_former_one(host: FakeHost) -> None:
    start(host)
    (former,) = host.guards
    start(host)
    assert len(host.guards) == 1
    assert former not in host.guards
