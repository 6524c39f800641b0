"""The listener's process: exit code, restart of the agent, stop, log."""

# The tests wait for other processes, and blocking calls are acceptable.
# ruff: noqa: ASYNC110, ASYNC220, ASYNC240

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from remuda import inotify, procfs
from remuda.adapters.system.clock import SystemClock
from remuda.agent import listener as agent_listener
from remuda.agent import processes
from remuda.agent.listener import (
    ERROR_BYTES,
    KILLED,
    LISTENER,
    REGISTRATION_DELETED,
    UPDATE_LIMIT_S,
    UPDATING,
    WAIT_FOR_UPDATE,
    Files,
    Listener,
    StartCommand,
)
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment
from tests.support.records import LONG_S

#: Says that it runs, and on SIGTERM that it ends.
PROGRAM = """#!/bin/bash
trap 'echo stopping; [ -e stubborn ] || exit 0' TERM
[ ! -e input ] || cat
echo running
while [ ! -e exit ]; do sleep 0.02; done
exit $(cat exit)
"""
ASSIGNMENT = Assignment(url="https://github.com/acme/widgets", runner_name="runner", labels=("123",))
WORKER = "#!/bin/sh\nread forever\n"


class Host:
    """Runs the listener in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.runner_folder = folder / "runner"
        self.command = StartCommand(
            arguments=("/bin/sh", "-c", 'cd "$0" && exec "$0/bin/Runner.Listener" run', str(self.runner_folder))
        )

    async def ready(self) -> None:
        pass

    async def prepare_start(self, assignment: Assignment, files: Files) -> StartCommand:  # noqa: ARG002  # the port's
        return self.command

    def processes(self) -> list[procfs.Process]:
        """All of the test, also those whose parent has ended."""
        present = procfs.all_processes()
        return [found for found in present.values() if _place(found.pid) == str(self.runner_folder)]


class Fixture:
    def __init__(self, folder: Path) -> None:
        self.host = Host(folder)
        self.runner = self.host.runner_folder
        (self.runner / "bin").mkdir(parents=True)
        self.state, self.log = folder / "state", folder / "runner.log"
        self.state.mkdir()
        for name, text in (("Runner.Listener", PROGRAM), ("Runner.Worker", WORKER)):
            (self.runner / "bin" / name).write_text(text)
            (self.runner / "bin" / name).chmod(0o755)

    def open(self, stop_limit_s: float = LONG_S) -> Listener:
        """Open the listener as an agent does after its start."""
        return Listener(host=self.host, folder=self.state, log=self.log, clock=SystemClock(), stop_limit_s=stop_limit_s)

    async def started(self, stop_limit_s: float = LONG_S) -> Listener:
        """Start the listener, and wait for its first line."""
        listener = self.open(stop_limit_s)
        await self.start(listener)
        return listener

    async def start(self, listener: Listener) -> None:
        await listener.start(ASSIGNMENT, {}, {"PATH": os.environ["PATH"]})
        async with asyncio.timeout(LONG_S):
            while "running" not in self.log.read_text():
                await asyncio.sleep(0.01)

    def wrapper(self) -> procfs.Process:
        found = procfs.parse_stat((self.state / "listener.pid").read_bytes())
        assert found is not None
        return found

    def program(self) -> procfs.Process:
        # The nearest: a child has the same name until its exec.
        return next(found for found in procfs.descendants(self.wrapper().pid) if found.name == LISTENER)

    async def end(self, listener: Listener, code: int) -> None:
        (self.runner / "exit").write_text(str(code))
        assert await listener.wait(LONG_S, for_log=False)

    def processes(self) -> list[procfs.Process]:
        return self.host.processes()


def _place(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115  # the target may not exist
    except OSError:
        return ""


@pytest.fixture
async def fixture(tmp_path: Path) -> AsyncIterator[Fixture]:
    made = Fixture(tmp_path)
    yield made
    while left := made.processes():
        processes.kill(left)


class TestExitCode:
    async def test_no_exit_code_before_the_first_start_and_while_it_runs(self, fixture: Fixture) -> None:
        assert fixture.open().exit_code() is None
        listener = await fixture.started()
        assert (listener.is_running(), listener.exit_code()) == (True, None)

    @pytest.mark.parametrize("code", [0, 1, 5])
    async def test_exit_code_is_kept_for_the_next_agent(self, fixture: Fixture, code: int) -> None:
        listener = await fixture.started()
        await fixture.end(listener, code)
        assert (listener.is_running(), listener.exit_code()) == (False, code)
        assert fixture.open().exit_code() == code

    async def test_wait_without_a_listener_ends_at_once(self, fixture: Fixture) -> None:
        assert await fixture.open().wait(LONG_S)

    async def test_wait_leaves_no_file_open(self, fixture: Fixture) -> None:
        listener = await fixture.started()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            assert not await listener.wait(0.01, for_log=False)
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    async def test_listener_that_ends_under_the_next_agent(self, fixture: Fixture) -> None:
        await fixture.started()
        successor = fixture.open()
        assert successor.is_running()
        await fixture.end(successor, 2)
        assert (successor.is_running(), successor.exit_code()) == (False, 2)

    async def test_killed_listener_has_the_code_of_the_signal(self, fixture: Fixture) -> None:
        listener = await fixture.started()
        os.kill(fixture.program().pid, signal.SIGKILL)
        assert await listener.wait(LONG_S, for_log=False)
        assert listener.exit_code() == 128 + signal.SIGKILL

    async def test_killed_wrapper_leaves_no_exit_code(self, fixture: Fixture) -> None:
        listener = await fixture.started()
        os.kill(fixture.wrapper().pid, signal.SIGKILL)
        assert await listener.wait(LONG_S, for_log=False)
        assert (listener.is_running(), listener.exit_code()) == (False, KILLED)
        assert fixture.open().exit_code() == KILLED

    async def test_malformed_files_count_as_killed(self, fixture: Fixture) -> None:
        (fixture.state / "listener.pid").write_text("x")
        (fixture.state / "exit-code").write_text("y")
        assert (fixture.open().is_running(), fixture.open().exit_code()) == (False, KILLED)

    async def test_next_start_forgets_the_exit_code(self, fixture: Fixture) -> None:
        listener = await fixture.started()
        await fixture.end(listener, 2)
        (fixture.runner / "exit").unlink()
        await fixture.start(listener)
        assert listener.exit_code() is None

    async def test_reused_pid_is_not_taken_for_the_listener(self, fixture: Fixture) -> None:
        with subprocess.Popen(["sleep", "1000"]) as other:
            text = Path(f"/proc/{other.pid}/stat").read_text()
            started = text.split()[21]
            # The listener had the same pid, and began earlier.
            (fixture.state / "listener.pid").write_text(text.replace(f" {started} ", f" {int(started) - 1} "))
            listener = fixture.open()
            assert (listener.is_running(), listener.exit_code()) == (False, KILLED)
            await listener.stop()
            assert other.poll() is None
            other.kill()


class TestStart:
    async def test_listener_leads_its_own_session_and_gets_no_other_variables(self, fixture: Fixture) -> None:
        await fixture.started()
        wrapper, program = fixture.wrapper(), fixture.program()
        assert os.getsid(program.pid) == wrapper.pid
        variables = Path(f"/proc/{wrapper.pid}/environ").read_bytes().split(b"\0")
        assert {variable.partition(b"=")[0] for variable in variables if variable} == {b"PATH"}

    async def test_input_reaches_the_listener(self, fixture: Fixture, tmp_path: Path) -> None:
        (tmp_path / "archive").write_text("archive\n")
        (fixture.runner / "input").touch()
        stdin = (tmp_path / "archive").open("rb")
        fixture.host.command = StartCommand(arguments=fixture.host.command.arguments, stdin=stdin)
        await fixture.started()
        assert fixture.log.read_text() == "archive\nrunning\n"
        assert stdin.closed

    async def test_wrapper_joins_the_cgroup_before_the_listener_starts(self, fixture: Fixture, tmp_path: Path) -> None:
        cgroup = tmp_path / "cgroup.procs"
        cgroup.touch()
        fixture.host.command = StartCommand(arguments=fixture.host.command.arguments, cgroup=cgroup)
        await fixture.started()
        assert int(cgroup.read_text()) == fixture.wrapper().pid

    async def test_listener_does_not_start_outside_its_cgroup(self, fixture: Fixture, tmp_path: Path) -> None:
        missing = tmp_path / "missing" / "cgroup.procs"
        fixture.host.command = StartCommand(arguments=fixture.host.command.arguments, cgroup=missing)
        listener = fixture.open()
        await listener.start(ASSIGNMENT, {}, {"PATH": os.environ["PATH"]})
        assert await listener.wait(LONG_S, for_log=False)
        assert listener.exit_code() not in {None, 0}
        assert "running" not in fixture.log.read_text()

    async def test_last_error_is_found_at_the_end_of_a_long_log(self, fixture: Fixture) -> None:
        fixture.log.write_text(f"An error occurred: old\n{'x' * ERROR_BYTES}\nAn error occurred: new\n")
        assert fixture.open().last_error() == "new"

    async def test_registration_is_not_lost_while_the_listener_runs(self, fixture: Fixture) -> None:
        listener = await fixture.started()
        with fixture.log.open("a") as log:
            log.write(f"{REGISTRATION_DELETED}\n")
        assert not listener.lost_registration()
        await fixture.end(listener, 1)
        assert listener.lost_registration()

    async def test_log_that_cannot_be_opened_is_an_error(self, fixture: Fixture) -> None:
        fixture.log = fixture.log.parent / "missing" / "runner.log"
        listener = fixture.open()
        with pytest.raises(Unavailable, match="cannot start the listener"):
            await listener.start(ASSIGNMENT, {}, {})
        assert not listener.is_running()


class TestSelfUpdate:
    """Exit codes 3 and 4 of actions/runner 2.336.0, as src/Misc/layoutroot/run-helper.sh.template treats them."""

    @pytest.mark.parametrize("code", [3, 4])
    async def test_listener_is_started_again_with_the_same_input(
        self, fixture: Fixture, tmp_path: Path, code: int
    ) -> None:
        (tmp_path / "archive").write_text("archive\n")
        script = f'cat; echo "start $1"; [ "$1" ] || exit {code}; exit 6'
        stdin = (tmp_path / "archive").open("rb")
        fixture.host.command = StartCommand(arguments=("/bin/sh", "-c", script, "sh"), stdin=stdin)
        listener = fixture.open()
        await listener.start(ASSIGNMENT, {}, {"PATH": os.environ["PATH"]})
        assert await listener.wait(LONG_S, for_log=False)
        assert listener.exit_code() == 6
        assert fixture.log.read_text() == f"archive\nstart \narchive\nstart {UPDATING}\n"

    @pytest.mark.parametrize("finished", [True, False])
    def test_wait_ends_with_the_update_or_at_the_limit(self, tmp_path: Path, *, finished: bool) -> None:
        (tmp_path / "sleep").write_text("#!/bin/sh\necho second >>seconds\n[ ! -e late ] || touch update.finished\n")
        (tmp_path / "sleep").chmod(0o755)
        if finished:
            (tmp_path / "late").touch()
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run(["/bin/sh", "-ec", WAIT_FOR_UPDATE], cwd=tmp_path, env=environment, check=True)
        assert len((tmp_path / "seconds").read_text().splitlines()) == (1 if finished else UPDATE_LIMIT_S)
        assert not (tmp_path / "update.finished").exists()


class TestStop:
    async def test_listener_is_asked_to_end(self, fixture: Fixture) -> None:
        listener = await fixture.started()
        await listener.stop()
        assert fixture.log.read_text().endswith("stopping\n")
        assert (listener.is_running(), listener.exit_code()) == (False, None)
        assert fixture.processes() == []

    async def test_listener_that_has_not_begun_is_killed_at_once(
        self, fixture: Fixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(processes, "KILL_PAUSE_S", LONG_S)
        read, write = os.pipe()
        fixture.host.command = StartCommand(
            arguments=("/bin/sh", "-c", 'cd "$0" && read forever', str(fixture.runner)), stdin=os.fdopen(read, "rb")
        )
        listener = fixture.open(stop_limit_s=LONG_S)
        await listener.start(ASSIGNMENT, {}, {"PATH": os.environ["PATH"]})
        async with asyncio.timeout(LONG_S / 2):
            while not listener.was_started:
                await asyncio.sleep(0.01)
            wrapper = fixture.wrapper()
            await listener.stop()
        assert not procfs.is_alive(wrapper.pid, wrapper.started)
        os.close(write)
        assert not listener.is_running()

    async def test_next_agent_can_stop_it(self, fixture: Fixture) -> None:
        await fixture.started()
        await fixture.open().stop()
        assert fixture.log.read_text().endswith("stopping\n")
        assert fixture.processes() == []

    async def test_listener_that_ignores_sigterm_is_killed(
        self, fixture: Fixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(processes, "KILL_PAUSE_S", LONG_S)
        (fixture.runner / "stubborn").touch()
        listener = await fixture.started(stop_limit_s=0.2)
        program = fixture.program()
        await listener.stop()
        assert not procfs.is_alive(program.pid, program.started)
        assert (listener.is_running(), listener.exit_code()) == (False, None)


class TestBusy:
    async def test_worker_outlives_a_killed_listener(self, fixture: Fixture) -> None:
        listener = await fixture.started()
        with fixture.log.open("a") as log:
            log.write("2026-01-01 00:00:00Z: Running job: a\n")
        # The path of the worker after a self-update.
        (fixture.runner / "bin").rename(fixture.runner / "bin.2.337.0")
        command = [str(fixture.runner / "bin.2.337.0" / "Runner.Worker")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=fixture.runner) as worker:
            await fixture.end(listener, 1)
            async with asyncio.timeout(LONG_S):
                # The kernel shows the command line as soon as the program is loaded.
                while not listener.is_busy():
                    await asyncio.sleep(0.01)
            worker.kill()
        assert not listener.is_busy(), "the log alone proves nothing"


class TestLog:
    async def test_log_begins_anew_and_the_end_of_the_last_one_is_kept(
        self, fixture: Fixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(agent_listener, "KEPT_LOG_BYTES", 10)
        fixture.log.write_text("the beginning is long, the end")
        await fixture.started()
        assert fixture.log.read_text() == "running\n"
        assert fixture.log.with_name("runner.log.1").read_text() == "g, the end"

    @pytest.mark.parametrize("reported", [True, False])
    async def test_wait_ends_with_a_new_line(
        self, fixture: Fixture, monkeypatch: pytest.MonkeyPatch, *, reported: bool
    ) -> None:
        if reported:
            monkeypatch.setattr(agent_listener, "LOG_POLL_S", 2 * LONG_S)
        else:
            monkeypatch.setattr(inotify, "watch", lambda *_: contextlib.nullcontext(enter_result=False))
        listener = await fixture.started()
        assert not listener.is_busy()
        assert not await listener.wait(0.05)
        waiting = asyncio.create_task(listener.wait(LONG_S))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        with fixture.log.open("a") as log:
            log.write("Running job: a\n")
        async with asyncio.timeout(LONG_S / 2):
            assert not await waiting
        assert listener.is_busy()
