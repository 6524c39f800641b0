"""Runs the real sandboxes and listener of an agent on a `SandboxHost`, by requests: one line of JSON each."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from remuda import procfs
from remuda.adapters.system.clock import SystemClock
from remuda.agent import cache_volumes, mounts, sandbox, sandbox_root, system_call_filter
from remuda.agent.cache_volumes import CacheVolumes
from remuda.agent.job_hook import REFUSED, JobHook
from remuda.agent.listener import Listener
from remuda.agent.sandbox import Sandboxes, SandboxOptions
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment
from remuda.domain.resources import Tier

SOFTWARE = PurePosixPath("/opt/remuda")
#: The listener of the tests runs the shell script that is passed as a file.
LISTENER = "#!/bin/sh\nexec /bin/bash ./job.sh\n"
LIMIT_S = 60.0
POLL_S = 0.02
PAUSE_S = 0.2
MAX_OUTPUT = 100_000
#: Soft and hard limit of the agent, whose unit sets those of jobs.
OPEN_FILES = (4096, 8192)

#: What the main thread opens, lists or follows.
PATHS: set[str] = set()

#: Functions before or after which a driver can be killed.
POINTS: dict[str, tuple[Any, str]] = {
    "number": (Sandboxes, "_next_number"),
    "layer": (sandbox_root, "build_layer"),
    "clone": (mounts, "mount_idmapped"),
    "overlay": (mounts, "mount_overlay"),
    "unmount": (mounts, "unmount"),
    "container": (Sandboxes, "_start_container"),
    "connect": (Sandboxes, "_connect"),
    "save": (Sandboxes, "_save"),
    "archive": (sandbox, "_archive"),
    "forget": (Listener, "forget"),
    "popen": (subprocess, "Popen"),
    "kill": (Sandboxes, "_kill"),
    "cgroup": (sandbox, "_remove_cgroup"),
    "left": (Sandboxes, "_left_of"),
    "cache": (cache_volumes, "_mount"),
    "deletion": (Sandboxes, "_start_deletion"),
}


class Requests:
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._folder = Path(options["folder"])
        self._runner = Path(options.get("runner", self._folder / "runner"))
        self._storage = Path(options.get("storage", self._folder / "storage"))
        self._caches: CacheVolumes | None = None
        if "cache_paths" in options:
            paths, limit = tuple(options["cache_paths"]), options.get("cache_bytes", 10**9)
            self._caches = CacheVolumes(folder=self._folder / "caches", paths=paths, max_bytes=limit)
        self.events: list[tuple[str, str]] = []
        self._make()

    def _make(self) -> None:
        for name, value in self._options.get("limits", {}).items():
            setattr(sandbox, name, value)
        program = self._runner / "bin" / "Runner.Listener"
        if not program.exists():
            program.parent.mkdir(parents=True)
            program.write_text(LISTENER, encoding="utf-8")
            program.chmod(0o755)
        self.sandboxes = Sandboxes(
            SandboxOptions(
                storage=self._storage,
                runner=self._runner,
                software=SOFTWARE,
                root=Path(self._options.get("root", "/")),
                hidden=(str(self._folder),),
                caches=self._caches,
            ),
            record=self._record,
        )
        self._listener: Listener | None = None
        self.hook = JobHook(
            folder=SOFTWARE / "hook",
            pristine=self._runner,
            refused_file=sandbox_root.OUTBOX / REFUSED,
            refused_file_outside=self.sandboxes.outbox / REFUSED,
        )

    def _record(self, action: str, why: str, **_: object) -> None:
        self.events.append((action, why))

    @property
    def listener(self) -> Listener:
        if self._listener is None:
            log = self.sandboxes.log_folder / "runner.log"
            self._listener = Listener(host=self.sandboxes, folder=self._folder, log=log, clock=SystemClock())
        return self._listener

    async def open(self, *, prepare: bool = True) -> dict[str, Any]:
        """Do what a new agent does."""
        await self.sandboxes.close()
        self._make()
        await self.sandboxes.open(prepare=prepare)
        return await self.state()

    async def ready(self) -> dict[str, Any]:
        """Wait for the sandbox that is being prepared."""
        self.sandboxes.prepare()
        await self._preparation()
        return await self.state()

    async def _preparation(self) -> None:
        if self.sandboxes._preparation is not None:
            await self.sandboxes._preparation

    async def run_program(self, script: str) -> dict[str, Any]:
        """Run a script as the job user, by the way in which the listener is started."""
        program = SOFTWARE / "runner" / "program.sh"
        made = Assignment(url="https://github.com/o/r", runner_name="program", labels=())
        command = await self.sandboxes.prepare_start(made, {program: (script.encode(), 0o755)})
        process = await asyncio.create_subprocess_exec(
            *command.arguments[:-1],
            str(program),
            stdin=command.stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=sandbox_root.ENVIRONMENT,
        )
        output, _ = await process.communicate()
        return {"exit_code": process.returncode, "output": output.decode(errors="replace")[-MAX_OUTPUT:]}

    async def start(
        self,
        name: str,
        script: str,
        repository: str = "o/r",
        tier: str = Tier.UNTRUSTED,
        any_run: bool = False,  # noqa: FBT001, FBT002  # given by keyword in a request
        only_trusted: bool = False,  # noqa: FBT001, FBT002
    ) -> dict[str, Any]:
        files: dict[PurePath, tuple[bytes, int]] = {SOFTWARE / "runner" / "job.sh": (script.encode(), 0o644)}
        made = Assignment(
            url="https://github.com/o/r",
            runner_name=name,
            labels=(),
            repository=repository,
            tier=Tier(tier),
            any_run=any_run,
            only_trusted=only_trusted,
        )
        await self.listener.start(made, files, sandbox_root.ENVIRONMENT)
        return await self.state()

    async def wait(self, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Wait for the end of the listener."""
        await _until(lambda: not self.listener.is_running(), limit_s)
        return {**await self.state(), "exit_code": self.listener.exit_code(), "output": self._output()}

    async def run(self, **arguments: Any) -> dict[str, Any]:
        await self.start(**arguments)
        return await self.wait()

    async def wait_for(self, text: str) -> None:
        await _until(lambda: text in self._output())

    async def wait_without(self, text: str) -> None:
        await _until(lambda: text not in self._output())

    async def output(self) -> str:
        return self._output()

    def _output(self) -> str:
        """The end of the listener's log."""
        with (self.sandboxes.log_folder / "runner.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_OUTPUT))
            return file.read().decode(errors="replace")

    async def reset(self) -> dict[str, Any]:
        clock = SystemClock()
        started = clock.monotonic()
        result = await self.sandboxes.reset()
        return {"ok": result.ok, "detail": result.detail, "seconds": clock.monotonic() - started}

    async def state(self) -> dict[str, Any]:
        current = self.sandboxes._current
        return {
            "alive": self.sandboxes.is_alive(),
            "listening": self.listener.is_running(),
            "events": self.events,
            **({} if current is None else {**asdict(current), "first_id": current.first_id}),
        }

    async def left(self) -> dict[str, list[str]]:
        """Return all that exists of sandboxes on the host, without the help of the sandboxes."""
        trash = self._storage / "trash"
        await _until(lambda: not any(trash.iterdir()))
        return self._left()

    def _left(self) -> dict[str, list[str]]:
        found = {
            "mounts": [str(point) for point in mounts.mounts_below(self._storage) if point.name != "log"],
            "nspawn mounts": [str(point) for point in mounts.mounts_below(Path("/run/systemd/nspawn"))],
            "nspawn": [str(path) for path in Path("/run/systemd/nspawn").glob("*/remuda-*")],
            "cgroups": [str(path) for path in Path("/sys/fs/cgroup/remuda").glob("*/")],
            "interfaces": [path.name for path in Path("/sys/class/net").iterdir() if path.name != "lo"],
            "processes": [
                f"{pid} {Path(f'/proc/{pid}/comm').read_text()}"
                for pid in procfs.all_processes()
                if max(procfs.users(pid), default=0) >= sandbox.FIRST_ID
            ],
            "folders": [path.name for path in self._storage.iterdir() if path.name.isdecimal()],
        }
        return {name: values for name, values in found.items() if values}

    async def crash(self, point: str, request: str, **arguments: Any) -> bool:
        """Make the request in a copy of this process that is killed at a point. Return whether it was.

        `point` is a name, "before NAME", or either with the number of the call, such as "overlay 2".
        """
        pid = os.fork()
        if not pid:
            raise _InCopyError(point, request, arguments)
        _, status = os.waitpid(pid, 0)  # noqa: ASYNC222  # this process does nothing else
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL

    async def discard(self) -> str:
        await self._preparation()
        return await asyncio.to_thread(self.sandboxes._discard_all)

    async def make_cgroup(self, name: str) -> None:
        (self.sandboxes._cgroup / name).mkdir()

    async def inside(self, command: str) -> None:
        """Run a command as root in the sandbox."""
        current = self.sandboxes._current
        assert current is not None
        mounts.run("nsenter", f"--target={current.leader}", "--all", "--", "sh", "-c", command)

    async def filters(self) -> dict[str, list[str]]:
        """The system call filters of the sandbox's first process and of all processes of the listener inside."""
        current, wrapper = self.sandboxes._current, self.listener._wrapper
        assert current is not None
        assert wrapper is not None
        inside = [
            child for child in procfs.descendants(wrapper.pid) if min(procfs.users(child.pid)) >= sandbox.FIRST_ID
        ]
        return {
            str(pid): [program.hex() for program in system_call_filter.read(pid)]
            for pid in (current.leader, *(child.pid for child in inside))
        }

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def log_bytes(self) -> int:
        """Bytes that the logs take."""
        status = os.statvfs(self.sandboxes.log_folder)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    async def is_busy(self) -> bool:
        return self.listener.is_busy()

    async def looks(self) -> list[str]:
        """The paths that the agent's loop opens, lists or follows while it looks at the running jobs."""
        PATHS.clear()
        await self.state()
        self.listener.is_busy()
        self.hook.refused()
        return sorted(PATHS)

    async def guard_pid(self) -> int:
        assert self.sandboxes._guard is not None
        return self.sandboxes._guard._pid

    async def stop(self) -> None:
        await self.listener.stop()

    async def waits_for_log(self) -> bool:
        """Whether a wait for the log of a silent listener really waits."""
        clock = SystemClock()
        started = clock.monotonic()
        self.listener.is_busy()
        await self.listener.wait(PAUSE_S)
        return clock.monotonic() - started >= PAUSE_S

    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _note_paths() -> None:
    main_thread, read_link = threading.get_ident(), os.readlink

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in {"open", "os.listdir", "os.scandir"} and threading.get_ident() == main_thread:
            PATHS.add(str(arguments[0]))

    def follow(path: Any, **named: Any) -> Any:
        note("open", (path,))
        return read_link(path, **named)

    sys.addaudithook(note)
    # No event tells of it.
    os.readlink = follow


async def _until(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110  # the kernel and other processes change it
            await asyncio.sleep(POLL_S)


class _InCopyError(BaseException):
    """Leaves the event loop of the copied process."""


def _kill_at(point: str) -> None:
    words = point.split()
    after = words[0] != "before"
    call = int(words.pop()) if words[-1].isdecimal() else 1
    owner, name = POINTS[words[-1]]
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def killing(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **named)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, killing)


def _in_copy(options: dict[str, Any], arguments: tuple[Any, ...]) -> None:
    point, request, given = arguments
    _kill_at(point)

    async def work() -> None:
        requests = Requests(options)
        await requests.open(prepare=False)
        await getattr(requests, request)(**given)

    try:
        asyncio.run(work())
    except Unavailable:
        pass
    finally:
        os._exit(0)


def main() -> None:
    options = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, OPEN_FILES)
    _note_paths()
    requests = Requests(options)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for line in sys.stdin:
        request, arguments = json.loads(line)
        try:
            answer = ["result", loop.run_until_complete(getattr(requests, request)(**arguments))]
        except _InCopyError as copy:
            # A new loop: that of the original belongs to both processes.
            _in_copy(options, copy.args)
        except Exception:  # noqa: BLE001  # reported to the test
            answer = ["error", traceback.format_exc()]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    loop.run_until_complete(requests.sandboxes.close())


if __name__ == "__main__":
    main()
