"""Local machines with real processes: supervisors, power loss, dead-man timers, resets, the fake runner."""

# The tests wait for other processes, and blocking calls are acceptable.
# ruff: noqa: ASYNC110, ASYNC220, ASYNC240

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from remuda import procfs
from remuda.adapters.local import folder as files
from remuda.adapters.local import launch
from remuda.adapters.local.compute import LocalCompute
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.errors import CapacityError, UserError
from remuda.domain.timestamps import from_text
from remuda.fake_github import install_runner
from remuda.fake_github.client import FakeGitHubClient, JobStep
from remuda.ports.calls import CallCounter
from remuda.ports.compute import LaunchResult, MachineState
from tests.support.aws.servers import ROOT, fake_github
from tests.support.records import launch_request

#: Generous limit in seconds: reached only if a test fails.
LONG_S = 90.0
#: First lifetime in seconds, longer than any test.
LIFE_S = 600.0
#: Time limit of a script in seconds.
SCRIPT_S = 60.0
#: Serves the agent's ports on a socket: one call per line; the response is the result.
AGENT = """
import asyncio, json, os, sys
from datetime import datetime, UTC
from functools import partial
from remuda import procfs
from remuda.adapters.local.machine import LocalMachine, job_environment, machine_folder, pristine_runner, supervisor_pid
from remuda.adapters.system.clock import SystemClock
from remuda.agent import processes
from remuda.agent.job_folders import JobFolders
from remuda.agent.job_hook import JobHook
from remuda.agent.runner import ActionsRunner
from remuda.domain.instance import Assignment, Credential
from remuda.ports.machine import AgentState, ScriptStatus
from remuda.ports.machine import RunnerState

async def main():
    folder, clock = machine_folder(os.environ), SystemClock()
    jobs = JobFolders(
        folder, pristine=pristine_runner(folder),
        processes=partial(procfs.descendants, supervisor_pid(folder)),
        kill=partial(processes.kill_descendants, supervisor_pid(folder), keep={os.getpid()}, clock=clock),
    )
    machine = LocalMachine(folder=folder, clock=clock, reset=jobs.reset)
    runner = ActionsRunner(
        host=jobs, config_folder=jobs.runner_folder, state_folder=folder / "logs", work=folder / "work",
        log=folder / "logs" / "listener.log", clock=clock, environment=job_environment(folder),
        hook=JobHook(
            folder=folder / "hook", pristine=pristine_runner(folder), refused_file=folder / "work" / "refused"
        ),
    )
    def assignment(url, name, token):
        return Assignment(url=url, runner_name=name, labels=("1", "label"),
                          credential=Credential(token=token, expires_at=clock.now()))
    calls = {
        "pid": lambda: os.getpid(),
        "environ": lambda: dict(os.environ),
        "identity": lambda: machine.identity(),
        "set_dead_man_timer": lambda at: machine.set_dead_man_timer(datetime.fromtimestamp(at, UTC)),
        "end": lambda why: machine.end(why),
        "notice": lambda: machine.spot_notice(),
        "script": lambda timeout_s: machine.run_script(timeout_s),
        "save": lambda text: machine.save(
            AgentState(script=ScriptStatus.OK, script_detail=text, threshold=clock.now())
        ),
        "load": lambda: machine.load().script_detail,
        "reset": lambda: machine.reset(),
        "state": lambda: runner.state(),
        "register": lambda *given: runner.register(assignment(*given)),
        "start": lambda: runner.start(assignment("http://github/o/r", "name", "token")),
        "remove": lambda *given: runner.remove(assignment(*given)),
        "stop": lambda: runner.stop(),
        "wait": lambda: runner.wait_for_change(runner.state(), 2),
    }
    async def serve(reader, writer):
        name, *given = json.loads(await reader.readline())
        result = calls[name](*given)
        if asyncio.iscoroutine(result):
            result = await result
        writer.write(json.dumps(result, default=repr).encode() + b"\\n")
        await writer.drain()
        writer.close()
    socket = folder / "agent.sock"
    socket.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(serve, f"{socket}.new")
    os.rename(f"{socket}.new", socket)
    await server.serve_forever()
asyncio.run(main())
"""


class LocalMachines:
    """Local machines whose agents execute calls of the test."""

    def __init__(self) -> None:
        # A short path, because socket paths are limited in length.
        self.folder = Path(tempfile.mkdtemp(prefix="remuda-"))
        self.root = self.folder / "m"
        self.source = self.folder / "runner"
        install_runner(self.source)
        (self.folder / "agent.py").write_text(AGENT)
        self.compute = LocalCompute(
            root=self.root,
            pool="pool",
            runner_source=self.source,
            agent_command=[sys.executable, str(self.folder / "agent.py")],
            clock=SystemClock(),
            ids=SystemIds(),
            calls=CallCounter(),
            environment={"PATH": os.environ["PATH"]},
        )

    async def launch(
        self, token: str = "token", *, count: int = 1, first_life_s: float = LIFE_S, **launch: str
    ) -> LaunchResult:
        options = {name.replace("_", "-"): value for name, value in launch.items()}
        await self.compute.prepare(options)
        return await self.compute.launch(launch_request(token, count=count, first_life_s=first_life_s, launch=options))

    async def one(self, **launch: Any) -> str:
        result = await self.launch(**launch)
        return result.instances[0].instance_id

    async def call(self, name: str, *line: Any) -> Any:
        """Call the machine's agent, as soon as it runs."""
        async with asyncio.timeout(LONG_S):
            while True:
                try:
                    return await self._call(str(self.root / name / "agent.sock"), line)
                except (ConnectionError, FileNotFoundError):
                    await asyncio.sleep(0.01)

    async def _call(self, socket: str, line: tuple[Any, ...]) -> Any:
        reader, writer = await asyncio.open_unix_connection(socket)
        try:
            writer.write(json.dumps(line).encode() + b"\n")
            answer = await reader.readline()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        if not answer and line[0] != "end":
            raise ConnectionResetError("the agent died before its answer")
        return json.loads(answer) if answer else None

    async def state(self, name: str) -> MachineState:
        return (await self.compute.describe([name]))[name].state

    async def reaches(self, name: str, state: MachineState) -> None:
        async with asyncio.timeout(LONG_S):
            while await self.state(name) is not state:
                await asyncio.sleep(0.01)

    async def terminate(self, *names: str) -> None:
        """Terminate the machines and wait until they have ended."""
        assert await self.compute.terminate(names) == {}
        for name in names:
            await self.reaches(name, MachineState.TERMINATED)

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Suspend the supervisor, so that it reads all lines of the agent afterwards at once."""
        supervisor = self.supervisor(name)
        os.kill(supervisor, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(supervisor, signal.SIGCONT)

    async def set_dead_man_timer(self, name: str, in_s: float) -> None:
        await self.call(name, "set_dead_man_timer", (SystemClock().now() + timedelta(seconds=in_s)).timestamp())

    def supervisor(self, name: str) -> int:
        known = files.supervisor(str(self.root / name))
        assert known is not None
        return known[0]

    def record(self, name: str) -> dict[str, Any]:
        document = files.read(str(self.root / name / files.RECORD))
        assert document is not None
        return document

    def processes(self) -> list[int]:
        """Return the pids of all processes with a machine's marker or in its folder."""
        names = [path.name for path in self.root.glob("i-*")]
        return [
            process.pid
            for name in names
            for process in procfs.machine_processes(name, str((self.root / name).resolve()), 0)
        ]

    async def close(self) -> None:
        await self.terminate(*[view.instance_id for view in await self.compute.list_pool()])
        assert {view.state for view in await self.compute.list_pool()} <= {MachineState.TERMINATED}
        assert self.processes() == []
        for path in self.root.glob("i-*"):
            assert {entry.name for entry in path.iterdir()} <= files.KEPT
        shutil.rmtree(self.folder)


@pytest.fixture
async def world() -> AsyncIterator[LocalMachines]:
    made = LocalMachines()
    yield made
    await made.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    return procfs.read_process(pid) is not None


def names_below(pid: int) -> list[str]:
    return [process.name for process in procfs.descendants(pid)]


# The machine and its agent


async def test_terminated_machine_leaves_record_and_logs_only(world: LocalMachines) -> None:
    name = await world.one()
    environ = await world.call(name, "environ")
    folder = world.root.resolve() / name
    assert environ["HOME"] == str(folder / "home")
    assert environ["TMPDIR"] == str(folder / "tmp")
    assert environ["REMUDA_MACHINE"] == name
    assert set(environ) <= {
        *("PATH", "HOME", "TMPDIR", "REMUDA_MACHINE", "REMUDA_MACHINE_FOLDER", "REMUDA_MACHINE_FD", "LC_CTYPE"),
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    supervisor = world.supervisor(name)
    assert os.getsid(supervisor) == supervisor
    for number, place in enumerate((Path("/dev/null"), folder / "logs" / "machine.log")):
        assert Path(f"/proc/{supervisor}/fd/{number}").readlink() == place
    assert "Identity" in await world.call(name, "identity")


async def test_launch_of_six_machines(world: LocalMachines) -> None:
    result = await world.launch(count=6)
    names = [launched.instance_id for launched in result.instances]
    agents = await asyncio.gather(*(world.call(name, "pid") for name in names))
    assert len(set(agents)) == 6
    assert {await world.state(name) for name in names} == {MachineState.RUNNING}
    await world.terminate(*names)
    assert world.processes() == []


async def test_killed_agent_is_restarted(world: LocalMachines) -> None:
    name = await world.one()
    await world.call(name, "save", "before")
    first = await world.call(name, "pid")
    os.kill(first, signal.SIGKILL)
    await until(lambda: not alive(first))
    assert await world.call(name, "pid") != first
    assert await world.call(name, "load") == "before"
    (world.root / name / "agent-state.json").write_text("{")
    assert await world.call(name, "load") == ""


async def test_agent_ends_the_machine(world: LocalMachines) -> None:
    name = await world.one()
    await world.call(name, "end", "threshold\npassed")
    await world.reaches(name, MachineState.TERMINATED)
    assert world.record(name)["reason"] == "threshold passed"


async def test_dead_man_timer_ends_the_machine_without_the_agent(world: LocalMachines) -> None:
    name = await world.one()
    agent = await world.call(name, "pid")
    with world.frozen(name):
        await world.set_dead_man_timer(name, 0.5)
        os.kill(agent, signal.SIGSTOP)
    await world.reaches(name, MachineState.TERMINATED)
    assert world.record(name)["reason"] == "the dead-man timer expired"
    assert not alive(agent)


async def test_agent_moves_the_dead_man_timer(world: LocalMachines) -> None:
    name = await world.one()
    await world.call(name, "pid")
    descriptor = os.pidfd_open(world.supervisor(name))
    try:
        with world.frozen(name):
            await world.set_dead_man_timer(name, 0.5)
            await world.set_dead_man_timer(name, LIFE_S)
        assert not await asyncio.to_thread(procfs.wait_for, descriptor, 1.0)
        await world.set_dead_man_timer(name, -1)
        assert await asyncio.to_thread(procfs.wait_for, descriptor, LONG_S)
    finally:
        os.close(descriptor)
    assert await world.state(name) is MachineState.TERMINATED


async def test_notice_file_is_the_spot_notice(world: LocalMachines) -> None:
    name = await world.one()
    assert await world.call(name, "notice") == ""
    (world.root / name / "notice").write_text("taken away\nin 2 minutes\n")
    assert await world.call(name, "notice") == "taken away in 2 minutes"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo one; echo two >&2; exit 3", "StepResult(ok=False, detail='exit code 3: one | two', failure=None)"),
        (
            "#!/bin/bash\n[[ $HOME == */home ]] && echo fine",
            "StepResult(ok=True, detail='exit code 0: fine', failure=None)",
        ),
        ("", "StepResult(ok=True, detail='no pre-runner script', failure=None)"),
    ],
)
async def test_pre_runner_script(world: LocalMachines, script: str, expected: str) -> None:
    name = await world.one(pre_runner_script=script)
    assert await world.call(name, "script", SCRIPT_S) == expected


async def test_pre_runner_script_is_killed_at_the_time_limit(world: LocalMachines) -> None:
    name = await world.one(pre_runner_script="echo begun; sleep 1000 & wait")
    outcome = await world.call(name, "script", 1)
    said = (world.root / name / "logs" / "pre-runner.log").read_text().strip()
    assert outcome == f"StepResult(ok=False, detail='killed after 1 s: {said}', failure=None)"
    assert said in {"begun", ""}, "on a busy computer its time may be up before it says anything"


# Power


async def test_power_loss_ends_all_processes(world: LocalMachines) -> None:
    name = await world.one(pre_runner_script="setsid sleep 1000 >/dev/null 2>&1 &")
    agent = await world.call(name, "pid")
    await world.call(name, "script", SCRIPT_S)
    os.kill(world.supervisor(name), signal.SIGKILL)
    await until(lambda: not alive(agent))
    assert world.processes(), "the script's daemon outlives its supervisor"

    await world.reaches(name, MachineState.TERMINATED)
    assert world.processes() == []
    assert world.record(name)["reason"] == "lost power"
    assert not (world.root / name / "work").exists()


async def test_remaining_process_without_marker_is_found_by_its_folder(world: LocalMachines) -> None:
    name = await world.one(pre_runner_script="cd ../work && env -i setsid sleep 1000 >/dev/null 2>&1 &")
    await world.call(name, "script", SCRIPT_S)
    bystander = subprocess.Popen(
        ["sleep", "1000"], env={"REMUDA_MACHINE": "i-11111111111111111"}, cwd=world.root / name
    )
    try:
        os.kill(world.supervisor(name), signal.SIGKILL)
        await world.reaches(name, MachineState.TERMINATED)
        assert world.processes() == []
        assert bystander.poll() is None, "another machine's process is not touched"
    finally:
        bystander.kill()
        bystander.wait()


async def test_remaining_process_without_its_first_thread_is_found(world: LocalMachines) -> None:
    without_first_thread = (
        "import ctypes, platform, threading; threading.Thread(target=threading.Event().wait).start(); "
        "ctypes.CDLL(None).syscall(dict(x86_64=60, aarch64=93)[platform.machine()], 0)"
    )
    name = await world.one(pre_runner_script=f"{sys.executable} -c '{without_first_thread}' >/dev/null 2>&1 & echo $!")
    await world.call(name, "script", SCRIPT_S)
    pid = int((world.root / name / "logs" / "pre-runner.log").read_text())
    await until(lambda: "(zombie)" in Path(f"/proc/{pid}/status").read_text())
    os.kill(world.supervisor(name), signal.SIGKILL)
    await world.reaches(name, MachineState.TERMINATED)
    assert not alive(pid)


async def test_hanging_supervisor_is_killed(world: LocalMachines) -> None:
    name = await world.one()
    await world.call(name, "pid")
    os.kill(world.supervisor(name), signal.SIGSTOP)
    await world.terminate(name)
    assert world.processes() == []


async def test_reused_pid_is_not_signalled(world: LocalMachines) -> None:
    name = await world.one()
    await world.call(name, "pid")
    power = world.root / name / files.POWER
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        real = power.read_text()
        with power.open("r+") as file:
            file.write(f"{bystander.pid} 1\n")
            file.truncate()
        await world.compute.terminate([name])
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
        power.write_text(real)


async def test_machine_outlives_its_launcher(world: LocalMachines) -> None:
    """The end, the terminal and the signals of the launching process do not affect the machine."""
    script = f"""
import asyncio, os, signal
from pathlib import Path
import test_local_machine as tests
world = object.__new__(tests.LocalMachines)
from remuda.adapters.local.compute import LocalCompute
world.compute = LocalCompute(root=Path({str(world.root)!r}), pool="pool", runner_source=Path({str(world.source)!r}),
    agent_command={[sys.executable, str(world.folder / "agent.py")]!r}, clock=tests.SystemClock(),
    ids=tests.SystemIds(), calls=tests.CallCounter(), environment={{"PATH": os.environ["PATH"]}})
print(asyncio.run(world.one()), flush=True)
os.killpg(0, signal.SIGINT)
os.killpg(0, signal.SIGHUP)
os.killpg(0, signal.SIGKILL)
"""
    launcher = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{ROOT}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    # The output ends, because the machine does not hold it open.
    output, _ = await asyncio.wait_for(launcher.communicate(), LONG_S)
    name = output.decode().strip()
    assert isinstance(await world.call(name, "pid"), int)
    assert await world.state(name) is MachineState.RUNNING


async def test_interrupted_launch_is_completed_with_the_same_token(world: LocalMachines) -> None:
    first = await world.launch(count=3)
    names = [launched.instance_id for launched in first.instances]
    await asyncio.gather(*(world.call(name, "pid") for name in names))
    # State after a launcher died before it created the last machine.
    (plan,) = [path for path in (world.root / ".launches").iterdir() if not path.suffix]
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"complete": False}))
    await world.terminate(names[2])
    shutil.rmtree(world.root / names[2])
    (world.root / f".new-{names[2]}" / "home").mkdir(parents=True)

    again = await world.launch(count=3)

    assert again == first
    assert isinstance(await world.call(names[2], "pid"), int)
    assert len(await world.compute.list_pool()) == 3


# Capacity and faults


async def test_boot_delay(world: LocalMachines) -> None:
    name = await world.one(boot_delay_s="600")
    assert await world.state(name) is MachineState.PENDING
    name = await world.one(token="sooner", boot_delay_s="0.5")
    await world.call(name, "pid")
    assert await world.state(name) is MachineState.RUNNING
    record = world.record(name)
    assert from_text(record["bootedAt"]) - from_text(record["launchedAt"]) >= timedelta(seconds=0.5)


async def test_fault_never_boots(world: LocalMachines) -> None:
    names = [
        await world.one(token="keeps running", fault="never-boots"),
        await world.one(token="ends", fault="never-boots", first_life_s=1.0),
    ]
    await world.reaches(names[0], MachineState.RUNNING)
    await world.reaches(names[1], MachineState.TERMINATED)
    assert world.record(names[1])["reason"] == "the dead-man timer expired"
    for name in names:
        assert not (world.root / name / "logs" / "agent.log").exists()


async def test_fault_dies_after(world: LocalMachines) -> None:
    name = await world.one(fault="dies-after-s=0.2")
    await world.reaches(name, MachineState.TERMINATED)
    assert world.record(name)["reason"] == "lost power"


async def test_capacity_limits(world: LocalMachines) -> None:
    with pytest.raises(CapacityError, match="no capacity"):
        await world.launch(fault="no-capacity")
    partial = await world.launch("partial", count=3, fault="partial=1")
    assert len(partial.instances) == 1
    assert "capacity for 1 only" in partial.errors[0]
    full = await world.launch("full", count=3, capacity="2")
    assert len(full.instances) == 1
    assert "1 of 2 machines are free, 3 requested" in full.errors[0]
    with pytest.raises(CapacityError, match="0 of 2 machines"):
        await world.launch("more", capacity="2")
    await world.terminate(full.instances[0].instance_id)
    assert len((await world.launch("more", capacity="2")).instances) == 1


async def test_capacity_holds_for_concurrent_launches(world: LocalMachines) -> None:
    results = await asyncio.gather(
        *(world.launch(f"token-{number}", count=2, capacity="3") for number in range(4)), return_exceptions=True
    )
    assert sum(len(result.instances) for result in results if isinstance(result, LaunchResult)) == 3


async def test_renamed_draft_is_counted(world: LocalMachines, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted, counting = threading.Event(), threading.Event()
    fill, is_on = launch.LocalLauncher._fill, launch.is_on

    def fill_slowly(*given: Any) -> None:
        drafted.set()
        counting.wait(LONG_S)
        fill(*given)

    def count_slowly(folder: Path) -> bool:
        if folder.name.startswith(launch.DRAFT):
            counting.set()
            # Long enough for the draft to be renamed if no lock prevents it.
            limit = time.monotonic() + 0.5
            while folder.exists() and time.monotonic() < limit:
                threading.Event().wait(0.01)
        return is_on(folder)

    monkeypatch.setattr(launch.LocalLauncher, "_fill", fill_slowly)
    monkeypatch.setattr(launch, "is_on", count_slowly)
    first = asyncio.create_task(world.launch("first", capacity="1"))
    assert await asyncio.to_thread(drafted.wait, LONG_S)
    with pytest.raises(CapacityError, match="0 of 1 machines"):
        await world.launch("second", capacity="1")
    assert len((await first).instances) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("boot-delay-s", "soon"),
        ("boot-delay-s", "nan"),
        ("boot-delay-s", "-1"),
        ("capacity", "1.5"),
        ("capacity", "99999999999"),
        ("fault", "explodes"),
        ("fault", "never-boots=3"),
        ("fault", "dies-after-s"),
        ("fault", "partial=x"),
        ("pre-runner-script", "\0"),
        ("boot-dela-s", "1"),
    ],
)
async def test_invalid_options_are_rejected(world: LocalMachines, option: str, value: str) -> None:
    with pytest.raises(UserError) as caught:
        await world.compute.prepare({option: value})
    assert caught.value.field == option
    assert caught.value.fix


async def test_missing_runner_software_is_an_error(world: LocalMachines) -> None:
    shutil.rmtree(world.source)
    with pytest.raises(UserError, match="no runner software"):
        await world.compute.prepare({})
    world.root.mkdir(exist_ok=True)


async def test_newest_finished_machines_are_kept(world: LocalMachines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remuda.adapters.local.compute.MAX_FINISHED", 2)
    names = [await world.one(token=f"token-{number}", fault="never-boots") for number in range(4)]
    for name in names:
        await world.terminate(name)
    last = await world.one(token="last")
    assert {view.instance_id for view in await world.compute.list_pool()} == {*names[2:], last}


# The runner


class LocalGitHub(FakeGitHubClient):
    @property
    def repository(self) -> str:
        return str(self._http.base_url.join("/o/r"))

    async def token(self, kind: str) -> str:
        answer = await self._http.post(f"/repos/o/r/actions/runners/{kind}-token")
        return str(answer.raise_for_status().json()["token"])

    async def unregister(self, runner_id: int) -> None:
        (await self._http.delete(f"/repos/o/r/actions/runners/{runner_id}")).raise_for_status()

    async def queue(self, *commands: str) -> None:
        await self.queue_job(repo="o/r", run_id="1", labels=["label"], steps=[JobStep(run=each) for each in commands])


@pytest.fixture
async def github(tmp_path: Path) -> AsyncIterator[LocalGitHub]:
    with fake_github(tmp_path / "github") as endpoint:
        async with LocalGitHub(endpoint.url, endpoint.token) as client:
            yield client


async def state_of(world: LocalMachines, name: str, *words: str) -> None:
    async with asyncio.timeout(LONG_S):
        state = await world.call(name, "state")
        while any(word not in state for word in words):
            state = await world.call(name, "wait")


async def test_job_and_reset(world: LocalMachines, github: LocalGitHub) -> None:
    name = await world.one()
    url = github.repository
    configured = await world.call(name, "register", url, "first", await github.token("registration"))
    assert "ok=True" in configured, configured
    assert [runner.online for runner in await github.runners()] == [False]
    await world.call(name, "start")
    await state_of(world, name, "registered_as='first'", "listening=True")

    await github.queue(
        "env > $HOME/environment; touch $TMPDIR/x; cp /bin/sleep $HOME/sleep",
        "env -i setsid sh -c 'cd /; (sleep 1000 &) ; exec sleep 1000' </dev/null >/dev/null 2>&1 &",
        f"echo evil > {world.root}/{name}/runner/config.sh; mkfifo go; read x < go",
    )
    # These have happened when the job waits.
    go = world.root / name / "work" / "r" / "r" / "go"
    await until(go.exists)
    await until(lambda: names_below(world.supervisor(name)).count("sleep") == 2)
    await state_of(world, name, "busy=True")
    # The restarted agent finds the listener, and the job continues.
    os.kill(await world.call(name, "pid"), signal.SIGKILL)
    await state_of(world, name, "listening=True", "busy=True")
    shutil.copy2(world.source / "config.sh", world.root / name / "runner" / "config.sh")
    refused = await world.call(name, "remove", url, "first", await github.token("remove"))
    assert "BUSY" in refused[0], refused
    await asyncio.to_thread(go.write_text, "on\n")
    await state_of(world, name, "busy=False")

    environment = (world.root / name / "home" / "environment").read_text()
    assert "REMUDA_MACHINE_FD" not in environment
    removed = await world.call(name, "remove", url, "first", await github.token("remove"))
    assert "REMOVED" in removed[0], removed
    assert await github.runners() == []
    await world.call(name, "stop")
    outcome = await world.call(name, "reset")

    assert "ok=True" in outcome, outcome
    supervisor, agent = world.supervisor(name), await world.call(name, "pid")
    assert [process.pid for process in procfs.descendants(supervisor)] == [agent]
    assert list((world.root / name / "home").iterdir()) == []
    again = await world.call(name, "register", url, "second", await github.token("registration"))
    assert "ok=True" in again, again


@pytest.mark.parametrize("admin_flow", [False, True])
async def test_registration_that_github_removed_counts_as_removed(
    world: LocalMachines, github: LocalGitHub, *, admin_flow: bool
) -> None:
    await github.change_settings(use_runner_admin_flow=admin_flow)
    name, url = await world.one(), github.repository
    await world.call(name, "register", url, "first", await github.token("registration"))
    (runner,) = await github.runners()
    await github.unregister(runner.id)
    removed = await world.call(name, "remove", url, "first", await github.token("remove"))
    assert "REMOVED" in removed[0], removed
    assert ("NotFound from 'Delete" in removed[1]) == admin_flow
    again = await world.call(name, "register", url, "second", await github.token("registration"))
    assert "ok=True" in again, again


async def test_runner_updates_itself_before_its_job(world: LocalMachines, github: LocalGitHub) -> None:
    await github.change_settings(update_runners_to="2.999.0")
    name, url = await world.one(), github.repository
    await world.call(name, "register", url, "first", await github.token("registration"))
    await world.call(name, "start")
    async with asyncio.timeout(LONG_S):
        while [runner.version for runner in await github.runners() if runner.online] != ["2.999.0"]:
            await asyncio.sleep(0.05)
    await github.queue("mkfifo go; read x < go")
    await state_of(world, name, "busy=True")
    go = world.root / name / "work" / "r" / "r" / "go"
    await until(go.exists)
    await asyncio.to_thread(go.write_text, "on\n")
    await state_of(world, name, "busy=False", "listening=True", "exit_code=None")


async def test_job_ends_with_its_machine(world: LocalMachines, github: LocalGitHub) -> None:
    name = await world.one()
    await world.call(name, "register", github.repository, "first", await github.token("registration"))
    await world.call(name, "start")
    await github.queue("sleep 1000")
    await state_of(world, name, "busy=True")
    await world.call(name, "end", "no more")
    await world.reaches(name, MachineState.TERMINATED)
    assert world.processes() == []
