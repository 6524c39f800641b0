"""The programs that an agent runs on its host, as far as their effects matter: each by its command line.

A command that is not known here fails the test: whoever adds one to the product adds what it does.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from remuda.adapters.aws.imds import AT_ONCE, POWER_OFF
from remuda.agent import cache_volumes, enter_sandbox
from tests.support.effects.host import INTERFACE_S, INTERFACES, HostProcess, ModelHost

#: Seconds of the host's programs.
BOOT_S, NETWORK_S = 0.1, 0.02
#: Until config.sh has called GitHub, and until it has written or removed its files. Longer than an agent is down.
CONFIG_CALL_S, CONFIG_FILES_S = 1.5, 3.0
#: Until the wrapper has noted its pid, has entered the sandbox, and its listener is connected to GitHub.
WRAPPER_S, ENTER_S, CONNECT_S = 0.001, 0.005, 0.05
JOB_S = 1.5
#: Longer than an agent is down.
SCRIPT_S = 3.0
DELETION_S, MEASUREMENT_S = 0.5, 0.05
#: Until a listener notices that its registration was removed.
POLL_S = 50.0
LISTENER = "/opt/remuda/runner/bin/Runner.Listener"
WORKER = "/opt/remuda/runner/bin/Runner.Worker"
#: Exit code of a listener after an error that may pass (Runner.Common/Constants.cs, ReturnCode.RetryableError).
RETRYABLE_EXIT = 2
REGISTRATION_FILES = (".runner", ".credentials", ".credentials_rsaparams")


@dataclass(eq=False)
class Sandbox:
    number: int
    manager: HostProcess
    root: str
    first_id: int
    leader: HostProcess | None = None
    network: set[str] = field(default_factory=set)
    #: Folders of the host that are mounted in it as cache volumes.
    volumes: list[str] = field(default_factory=list)
    #: Names of the runners that listened in it.
    runners: set[str] = field(default_factory=set)

    @property
    def alive(self) -> bool:
        return self.manager.alive


@dataclass(eq=False)
class Job:
    #: Repository and tier that it belongs to.
    holder: str
    process: HostProcess | None = None
    ended: bool = False
    #: Whether it changes the kernel, which a flaw may let it do.
    damages: bool = False


@dataclass(eq=False)
class ModelRegistration:
    name: str
    just_in_time: bool
    listener: HostProcess | None = None

    @property
    def online(self) -> bool:
        return self.listener is not None and self.listener.alive


class ModelGitHub:
    """Registrations by runner name, and jobs that wait."""

    def __init__(self) -> None:
        self.registrations: dict[str, ModelRegistration] = {}
        self.waiting: list[Job] = []
        self.jobs: list[Job] = []
        #: Names of runners whose listeners end with an error when they connect.
        self.refused: set[str] = set()

    def queue(self, holder: str, *, damages: bool = False) -> Job:
        job = Job(holder, damages=damages)
        self.waiting.append(job)
        self.jobs.append(job)
        return job


class Programs:
    def __init__(self, host: ModelHost, github: ModelGitHub, terminate: Callable[[str], None]) -> None:
        self._host = host
        self._github = github
        self._power_off = terminate
        self.sandboxes: list[Sandbox] = []
        host.programs = self

    # Entry points of the seam

    def popen(self, words: tuple[str, ...], given: Mapping[str, Any]) -> HostProcess:
        """A process that the agent does not wait for."""
        call = self._popen
        return self._host.loop.outside.copy().run(call, words, given)

    def run(self, words: tuple[str, ...]) -> tuple[int, str, str]:
        """A program that the agent waits for. Return its exit code, output and errors."""
        return self._host.loop.outside.copy().run(self._run, words)

    def child(self, words: tuple[str, ...], given: Mapping[str, Any]) -> _Child:
        """A process that the agent waits for without blocking."""
        return self._host.loop.outside.copy().run(self._start_child, words, given)

    def _popen(self, words: tuple[str, ...], given: Mapping[str, Any]) -> HostProcess:
        if "systemd-nspawn" in words:
            return self._start_container(words, given)
        if any("listener.pid" in word for word in words):
            return self._start_listener(words, given)
        raise self._unknown(words)

    def _start_idle(self, words: tuple[str, ...]) -> None:
        """A process that nobody waits for."""
        process = self._host.spawn(words, "idle")

        def delete() -> None:
            for path in words[words.index("--") + 1 :]:
                self._host.delete(path)

        def measure() -> None:
            used_at, _, file = words[-3:]
            self._host.put(file, f"{used_at} 4096 1\n")

        def finish() -> None:
            if process.alive:
                work()
                self._host.end(process, 0)

        if "rm" in words:
            work, seconds = delete, DELETION_S
        elif cache_volumes._MEASURE in words:
            work, seconds = measure, MEASUREMENT_S
        else:
            raise self._unknown(words)
        self._host.later(seconds, finish)

    def _run(self, words: tuple[str, ...]) -> tuple[int, str, str]:  # noqa: C901, PLR0912  # one case per program
        problem = ""
        match words:
            case ("setsid", "--fork", *command):
                self._start_idle(tuple(command))
            case ("mount", "-t", "tmpfs", "-o", _, _, target):
                self._host.mount(target, "tmpfs")
            case ("setpriv", "--bounding-set=-sys_resource", "mount", "-t", "overlay", "-o", options, _, target):
                problem = self._mount_overlay(options, target)
            case ("umount", target):
                problem = self._host.unmount(target)
            case ("rm", "-rf", "--", *paths):
                for path in paths:
                    self._host.delete(path)
            case ("ip", what, *_) if "ve-remuda-" in " ".join(words):
                name = next(word for word in words if word.startswith("ve-remuda-"))
                problem = self._configure_network(name.removeprefix("ve-remuda-"), f"host {what}")
            case ("nsenter", leader, "--net", "ip", what, *_):
                found = self._by_leader(leader.removeprefix("--target="))
                problem = "no such process" if found is None else ""
                if found is not None:
                    found.network.add(f"inside {what}")
            case ("nsenter", _, "--all", "--", "systemctl", "--quiet", "stop" | "start", *_):
                pass
            case (_, "-IS", "-c", cache_volumes._MOUNT_INSIDE, leader, tree, _path, _owner):
                problem = self._mount_volume(leader, int(tree))
            case ("systemd-run", "--quiet", unit, active, _, *command):
                return self._set_timer(unit, active, command), "", ""
            case ("systemctl", "stop", unit):
                return (0 if self._host.timers.pop(unit.removesuffix(".timer"), None) is not None else 5), "", ""
            case ("systemctl", "poweroff", "--force"):
                self._power_off("systemctl poweroff")
            case _:
                raise self._unknown(words)
        return (1 if problem else 0), "", problem

    def _unknown(self, words: tuple[str, ...]) -> AssertionError:
        text = f"tests/support/effects/programs.py does not know what this command does: {words}"
        # Also if the agent catches the exception.
        self._host.judge.violate(text)
        return AssertionError(text)

    # Timers

    def _set_timer(self, unit: str, active: str, command: list[str]) -> int:
        name = unit.removeprefix("--unit=")
        assert command == [*AT_ONCE, *POWER_OFF]
        if name in self._host.timers:
            return 1
        self._host.timers[name] = self._host.now() + float(active.removeprefix("--on-active="))
        return 0

    # Sandboxes

    def _mount_overlay(self, options: str, target: str) -> str:
        given = dict(each.split("=", 1) for each in options.split(",") if "=" in each)
        missing = [given[name] for name in ("upperdir", "workdir") if not self._host.exists(given[name])]
        lower = given["lowerdir"]
        if not self._host.exists(lower) or missing:
            return f"a folder does not exist: {missing or lower}"
        self._host.mount(target, "overlay", source=lower)
        return ""

    def _start_container(self, words: tuple[str, ...], given: Mapping[str, Any]) -> HostProcess:
        host = self._host
        options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
        number = int(options["machine"].removeprefix("remuda-"))
        first_id = int(options["private-users"].split(":")[0])
        cgroup = words[3].rpartition("/")[0]
        manager = host.spawn(words, "systemd-nspawn", cgroup=cgroup)
        made = Sandbox(number, manager, options["directory"], first_id)
        self.sandboxes.append(made)
        host.judge.container_starts(made)
        if not (host.is_mount(made.root) and host.is_mount(f"{made.root}/opt/remuda/runner")):
            host.end(manager, 1)
            return manager
        messages = host.sockets.get(given["env"]["NOTIFY_SOCKET"])
        interface = Path(host.real(INTERFACES), f"ve-remuda-{number}")

        def network() -> None:
            if manager.alive:
                for part in ("propagate", "unix-export"):
                    Path(host.real(f"/run/systemd/nspawn/{part}/remuda-{number}")).mkdir(parents=True, exist_ok=True)
                Path(host.real(f"{cgroup}/payload")).mkdir()
                host.made_folder(f"{cgroup}/payload")
                made.leader = host.spawn(
                    ("/sbin/init",), "systemd", parent=manager.pid, user=first_id, cgroup=f"{cgroup}/payload"
                )
                interface.mkdir()
                manager.watchers.append(lambda: host.later(INTERFACE_S, interface.rmdir))
                if messages is not None:
                    messages.put_nowait(b"X_NSPAWN_LEADER_PID=1")

        def ready() -> None:
            if manager.alive and messages is not None:
                messages.put_nowait(b"STATUS=up\nREADY=1")

        host.later(NETWORK_S, network)
        host.later(BOOT_S, ready)
        return manager

    def _configure_network(self, number: str, what: str) -> str:
        found = [each for each in self.sandboxes if str(each.number) == number and each.alive and each.leader]
        if not found:
            return "Cannot find device"
        found[-1].network.add(what)
        return ""

    def _by_leader(self, pid: str) -> Sandbox | None:
        return next(
            (each for each in self.sandboxes if each.leader and each.alive and str(each.leader.pid) == pid), None
        )

    def _mount_volume(self, leader: str, tree: int) -> str:
        found, source = self._by_leader(leader), self._host.trees[tree]
        if found is None:
            return "no such process"
        found.volumes.append(source)
        self._host.judge.volume_mounted(found)
        return ""

    # The listener

    def _start_listener(self, words: tuple[str, ...], given: Mapping[str, Any]) -> HostProcess:
        """What the wrapper of `remuda.agent.listener` does, and what it runs."""
        host = self._host
        _, _, _, _, folder, cgroup, *command = words
        stdin: IO[bytes] = given["stdin"]
        files = _read_archive(stdin)
        log = next(path for descriptor, path in host.descriptors.items() if descriptor == given["stdout"].fileno())
        wrapper = host.spawn(words, "sh", environment=dict(given["env"]))

        def note() -> None:
            stat = (wrapper.pid, "(sh) S", wrapper.ppid, *([0] * 17), wrapper.started)
            host.put(f"{folder}/listener.pid", f"{' '.join(map(str, stat))}\n")
            if not host.exists(cgroup):
                self._end_wrapper(wrapper, folder, 125)
                return
            host.join(wrapper, cgroup.rpartition("/")[0])

        def enter() -> None:
            script, leader, filters = command[2], command[3], command[4]
            assert script == enter_sandbox.__file__
            found = self._by_leader(leader)
            if found is None or not host.exists(filters) or not Path(host.real(filters)).read_text():
                self._end_wrapper(wrapper, folder, enter_sandbox.CANNOT_START)
                return
            self._listen(wrapper, found, files, folder, log)

        def guarded(step: Callable[[], None]) -> Callable[[], None]:
            return lambda: step() if wrapper.alive else None

        host.later(WRAPPER_S, guarded(note))
        host.later(ENTER_S, guarded(enter))
        return wrapper

    def _end_wrapper(self, wrapper: HostProcess, folder: str, code: int) -> None:
        if wrapper.alive:
            self._host.put(f"{folder}/exit-code", f"{code}\n")
            self._host.end(wrapper, code)

    def _listen(
        self, wrapper: HostProcess, sandbox: Sandbox, files: Mapping[str, bytes], folder: str, log: str
    ) -> None:
        host = self._host
        config = wrapper.environment.get("ACTIONS_RUNNER_INPUT_JITCONFIG", "")
        settings = files.get("/opt/remuda/runner/.runner")
        if not config and settings is None:
            host.append(log, "An error occurred: Not configured\n")
            self._end_wrapper(wrapper, folder, 1)
            return
        name = config.removeprefix("configuration of ") or json.loads(settings or "")["agentName"]
        listener = host.spawn(
            (LISTENER, "run"), "Runner.Listener", parent=wrapper.pid, user=sandbox.first_id, cgroup=wrapper.cgroup
        )
        listener.watchers.append(lambda: self._end_wrapper(wrapper, folder, listener.exit_code or 0))
        host.judge.listener_starts(sandbox, name)
        sandbox.runners.add(name)

        def connect() -> None:
            if not listener.alive:
                return
            found = self._github.registrations.get(name)
            if found is None:
                host.append(log, "An error occurred: The runner registration has been deleted from the server\n")
                host.end(listener, 1)
                return
            if name in self._github.refused:
                host.append(log, "An error occurred: the connection was closed\n")
                host.end(listener, RETRYABLE_EXIT)
                return
            if found.online:
                host.judge.violate(f"two listeners of {name} at once")
            found.listener = listener
            host.append(log, "Listening for Jobs\n")
            self._take_job(found, sandbox, listener, log)

        host.later(CONNECT_S, connect)

    def _take_job(self, registration: ModelRegistration, sandbox: Sandbox, listener: HostProcess, log: str) -> None:
        host = self._host

        def take() -> None:
            if not listener.alive:
                return
            if registration.name not in self._github.registrations:
                host.later(POLL_S, lambda: host.end(listener, 0))
            elif self._github.waiting:
                start(self._github.waiting.pop(0))
            else:
                host.later(0.1, take)

        def start(job: Job) -> None:
            host.append(log, "2025-01-01 00:00:00Z: Running job: build\n")
            job.process = host.spawn(
                (WORKER,), "Runner.Worker", parent=listener.pid, user=sandbox.first_id, cgroup=listener.cgroup
            )
            host.judge.job_starts(job, sandbox)
            worker = job.process
            worker.watchers.append(lambda: None if job.ended else host.judge.job_killed(job))
            host.later(JOB_S, lambda: finish(job, worker))

        def finish(job: Job, worker: HostProcess) -> None:
            if not worker.alive:
                return
            job.ended = True
            if job.damages:
                host.kernel["fs/file-max"] = "2"
            host.end(worker, 0)
            host.append(log, "2025-01-01 00:00:02Z: Job build completed with result: Succeeded\n")
            if registration.just_in_time:
                self._github.registrations.pop(registration.name, None)
                host.judge.spent.add(registration.name)
                host.end(listener, 0)
            else:
                host.later(0.1, take)

        host.later(0.1, take)

    def terminate(self, process: HostProcess) -> None:
        """SIGTERM."""
        self._host.later(0.02, lambda: self._host.end(process, 0))

    # config.sh and the pre-runner script

    def _start_child(self, words: tuple[str, ...], given: Mapping[str, Any]) -> _Child:
        environment = dict(given["env"])
        # The end of its output is read by the agent, through its own descriptor.
        descriptor = os.dup(given["stdout"].fileno())
        if words[0].endswith("/config.sh"):
            process = self._host.spawn(words, "config.sh", environment=environment)
            work = self._unregister if words[1] == "remove" else self._register
            work(process, words[0].rpartition("/")[0], environment, descriptor)
        elif words[-1].endswith("pre-runner.sh"):
            process = self._host.spawn(words, "pre-runner.sh", environment=environment)
            self._host.judge.script_starts()

            def finish() -> None:
                if process.alive:
                    self._host.judge.script_ends()
                    self._host.end(process, 0)

            self._host.later(SCRIPT_S, finish)
        else:
            raise self._unknown(words)
        process.watchers.append(lambda: os.close(descriptor))
        return _Child(process)

    def _config_ends(self, process: HostProcess, descriptor: int, code: int, text: str) -> None:
        if process.alive:
            os.write(descriptor, text.encode())
            self._host.end(process, code)

    def _register(self, process: HostProcess, folder: str, environment: Mapping[str, str], descriptor: int) -> None:
        host = self._host
        name = environment["ACTIONS_RUNNER_INPUT_NAME"]
        if not host.is_mount(folder):
            host.later(0.01, lambda: self._config_ends(process, descriptor, 127, "not found"))
            return
        if any(host.exists(f"{folder}/{each}") for each in REGISTRATION_FILES):
            refusal = "Cannot configure the runner because it is already configured."
            host.later(0.1, lambda: self._config_ends(process, descriptor, 1, refusal))
            return

        def call() -> None:
            if process.alive:
                host.judge.registers(name, environment["ACTIONS_RUNNER_INPUT_TOKEN"])
                self._github.registrations[name] = ModelRegistration(name, just_in_time=False)

        def write(file: str, text: str) -> None:
            if process.alive:
                host.put(f"{folder}/{file}", text)
                if file == ".runner":
                    host.judge.complete.add(name)

        host.later(CONFIG_CALL_S, call)
        host.later(CONFIG_FILES_S - 0.2, lambda: write(".credentials_rsaparams", f"private key of {name}"))
        host.later(CONFIG_FILES_S - 0.1, lambda: write(".credentials", f"private credential of {name}"))
        host.later(CONFIG_FILES_S - 0.05, lambda: write(".runner", json.dumps({"agentName": name})))
        host.later(CONFIG_FILES_S, lambda: self._config_ends(process, descriptor, 0, "Runner successfully added"))

    def _unregister(self, process: HostProcess, folder: str, environment: Mapping[str, str], descriptor: int) -> None:
        host = self._host
        if not host.is_mount(folder) or not host.exists(f"{folder}/.runner"):
            text = "Skipping removing runner from the server"
            host.later(0.1, lambda: self._config_ends(process, descriptor, 0, text))
            return
        name = json.loads(Path(host.real(f"{folder}/.runner")).read_text())["agentName"]
        #: The newer flow of config.sh: it calls `DELETE …/actions/runners/ID`, and keeps its files if there is none.
        refusal = "Http response code: NotFound from 'DELETE https://api.github.com/actions/runners/1'"

        def call() -> None:
            if process.alive:
                host.judge.unregisters(name, environment["ACTIONS_RUNNER_INPUT_TOKEN"])
                if self._github.registrations.pop(name, None) is None:
                    self._config_ends(process, descriptor, 1, refusal)

        def delete(file: str) -> None:
            if process.alive:
                Path(host.real(f"{folder}/{file}")).unlink(missing_ok=True)

        host.later(CONFIG_CALL_S, call)
        # UnconfigureAsync: the credentials first, the settings last.
        host.later(CONFIG_FILES_S - 0.2, lambda: delete(".credentials_rsaparams"))
        host.later(CONFIG_FILES_S - 0.1, lambda: delete(".credentials"))
        host.later(CONFIG_FILES_S - 0.05, lambda: delete(".runner"))
        host.later(CONFIG_FILES_S, lambda: self._config_ends(process, descriptor, 0, "Runner removed successfully"))


class _Child:
    """The part of `asyncio.subprocess.Process` that the agent uses."""

    def __init__(self, process: HostProcess) -> None:
        self._process = process
        self.pid = process.pid
        self._ended = asyncio.Event()
        process.watchers.append(self._ended.set)

    @property
    def returncode(self) -> int | None:
        return self._process.exit_code

    async def wait(self) -> int:
        await self._ended.wait()
        return self._process.exit_code or 0


def _read_archive(stdin: IO[bytes]) -> dict[str, bytes]:
    found = {}
    with tarfile.open(fileobj=io.BytesIO(stdin.read())) as tar:
        for entry in tar.getmembers():
            file = tar.extractfile(entry)
            found[f"/{entry.name}"] = b"" if file is None else file.read()
    return found
