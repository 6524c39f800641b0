"""A local backend in one folder, driven through the command line, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from remuda import procfs
from remuda.adapters.system.clock import SystemClock
from remuda.config.declaration import variable
from remuda.fake_github import read_endpoint
from remuda.fake_github.client import FakeGitHubClient, JobView, RunnerView
from tests.support.cli import CLI, CommandResult, ForkedProcess, run_cli, start_cli

#: Seconds to wait for an expected state. Generous: only a broken backend reaches it.
LIMIT_S = 120.0
POLL_S = 0.05
REPO = "remuda/demo"
CRASH_LAUNCHER = "tests.support.crash_launcher"
#: Settings with which instances expire within a test.
SHORT_LIFETIMES: dict[str, Any] = {
    "release_time_sec": 8,
    "unrecorded_grace_sec": 3,
    "gone_after_sec": 1,
    "stale_registration_grace_sec": 3,
    "republish_sec": 5,
    "margin_sec": 1,
}
#: Settings with which no instance expires during a test, even on a busy computer.
LONG_LIFETIMES: dict[str, Any] = {
    "idle_time_sec": 600,
    "release_time_sec": 90,
    "unrecorded_grace_sec": 90,
    "stale_registration_grace_sec": 90,
    "republish_sec": 600,
}


def run_local(folder: Path, *arguments: str, environment: Mapping[str, str] = os.environ) -> CommandResult:
    """Run one command on the backend in this folder."""
    return run_cli([*arguments, "--dir", str(folder), "--json"], environment=environment, cwd=folder.parent)


async def wait_for_job(github: FakeGitHubClient, job: JobView, *, status: str = "completed") -> JobView:
    """Wait until the job has this status or has completed."""
    while job.status not in {status, "completed"}:
        before = job.status
        job = await github.job(job.id, wait_s=LIMIT_S, since=before)
        assert job.status != before, f"job {job.id} stays {before}"
    return job


class LocalBackend:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {name: os.environ[name] for name in ("PATH", "LANG", "HOME") if name in os.environ}
        #: The flags by which a command finds the backend.
        self.flags: tuple[str, ...] = ("--dir", str(folder))
        self._started: list[ForkedProcess] = []

    # Commands

    async def start(
        self,
        *arguments: str,
        crash: str = "",
        agent_crash: str = "",
        once: Path | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> ForkedProcess:
        """Start a command. `settings` are given as environment variables."""
        variables = {variable(name): str(value) for name, value in (settings or {}).items()}
        words = [arguments[0], *self.flags, *arguments[1:]]
        program = CLI
        if crash or agent_crash:
            words = ["--crash", crash, "--agent-crash", agent_crash, "--once", str(once or ""), "--", *words]
            program = CRASH_LAUNCHER
        process = await start_cli(
            words, environment={**self.environment, **variables}, cwd=self.folder.parent, program=program
        )
        self._started.append(process)
        return process

    async def run(self, *arguments: str, code: int | None = 0, **crash: Any) -> CommandResult:
        """Run a command and check its exit code, unless `code` is None."""
        process = await self.start(*arguments, "--json", **crash)
        result = await process.result(LIMIT_S)
        assert code is None or result.code == code, f"{arguments} ended with {result}"
        return result

    async def refresh(self, **settings: object) -> CommandResult:
        return await self.run("refresh", settings=settings)

    async def up(self, *, sweeper: bool = False, **settings: object) -> None:
        await self.run("up")
        if not sweeper:
            self.kill_sweeper()
        await self.refresh(**{**SHORT_LIFETIMES, **settings})

    async def provision(self, run_id: str, count: int = 1, *more: str, **crash: Any) -> CommandResult:
        timeout = () if "--provision-timeout-sec" in more else ("--provision-timeout-sec", "100")
        return await self.run("provision", "--run-id", run_id, "--instance-count", str(count), *timeout, *more, **crash)

    async def release(self, run_id: str, *more: str, **crash: Any) -> CommandResult:
        return await self.run("release", "--run-id", run_id, *more, **crash)

    async def sweep(self, **crash: Any) -> CommandResult:
        return await self.run("refresh", "--sweep-only", **crash)

    @contextlib.asynccontextmanager
    async def sweeping(self, every_s: float = 0.5) -> AsyncIterator[None]:
        """Sweep in the background like the sweeper of `remuda up`, but more often."""
        process = await self.start("refresh", "--sweep-only", "--every", str(every_s), "--quiet")
        output = asyncio.create_task(process.communicate())
        try:
            yield
        finally:
            process.terminate()
            await output

    async def down(self) -> None:
        """Stop the backend, check that no process is left, and remove the folder."""
        for process in self._started:
            if process.returncode is None:
                process.kill()
                await process.wait()
        await self.run("down")
        await self.until(lambda: not self.processes(), "no process is left")
        shutil.rmtree(self.folder)

    # State

    def rows(self, query: str, *values: Any) -> list[Any]:
        connection = sqlite3.connect(self.folder / "remuda.db", timeout=LIMIT_S)
        try:
            return connection.execute(query, values).fetchall()
        finally:
            connection.close()

    def records(self, resource_class: str | None = None) -> dict[str, dict[str, Any]]:
        documents = [json.loads(row[0]) for row in self.rows("SELECT doc FROM instances")]
        return {item["instanceId"]: item for item in documents if resource_class in {None, item["resourceClass"]}}

    def states(self, resource_class: str | None = None) -> list[str]:
        return sorted(item["state"] for item in self.records(resource_class).values())

    def pool_messages(self) -> list[dict[str, Any]]:
        return [json.loads(row[0]) for row in self.rows("SELECT body FROM messages")]

    def hidden_pool_messages(self) -> list[str]:
        """Messages that are delayed, or received but neither deleted nor returned."""
        now = SystemClock().now().timestamp()
        return [row[0] for row in self.rows("SELECT body FROM messages WHERE visible_at > ?", now)]

    def reports(self) -> dict[str, dict[str, Any]]:
        documents = [json.loads(row[0]) for row in self.rows("SELECT doc FROM reports")]
        return {item["instanceId"]: item for item in documents}

    def provisions(self, run_id: str) -> list[dict[str, Any]]:
        return [json.loads(row[0]) for row in self.rows("SELECT doc FROM provisions WHERE holder = ?", run_id)]

    def machines(self) -> list[str]:
        """Ids of the machines that have not finished."""
        found = []
        for path in sorted((self.folder / "instances").glob("i-*")):
            with contextlib.suppress(OSError, ValueError):
                if not json.loads((path / "instance.json").read_text()).get("finished"):
                    found.append(path.name)
        return found

    def processes(self, instance_id: str | None = None) -> list[int]:
        """Pids of the processes of one machine, or of all machines."""
        folders = [self.folder / "instances" / instance_id] if instance_id else self.folder.glob("instances/i-*")
        return sorted(
            process.pid for path in folders for process in procfs.machine_processes(path.name, str(path.resolve()), 0)
        )

    def agent(self, instance_id: str) -> int | None:
        return self._process_with(instance_id, b"agent")

    def supervisor(self, instance_id: str) -> int | None:
        return self._process_with(instance_id, b"remuda.adapters.local.supervisor")

    def _process_with(self, instance_id: str, word: bytes) -> int | None:
        for pid in self.processes(instance_id):
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    return pid
        return None

    def background(self, name: str) -> int | None:
        document = json.loads((self.folder / f"{name}.json").read_text())
        pid, started = int(document["pid"]), int(document["started"])
        return pid if procfs.is_alive(pid, started) else None

    def kill_sweeper(self) -> None:
        pid = self.background("sweeper")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    # GitHub

    def github(self) -> FakeGitHubClient:
        endpoint = read_endpoint(self.folder / "github")
        assert endpoint is not None
        return FakeGitHubClient(endpoint.url, endpoint.token)

    async def registrations(self) -> list[RunnerView]:
        async with self.github() as client:
            return await client.runners()

    async def until(self, condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        limit = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < limit, f"{what}: not within {limit_s} s; {self.summary()}"
            await asyncio.sleep(POLL_S)

    async def until_settled(self, *, states: Sequence[str] = ("terminated",), limit_s: float = LIMIT_S) -> None:
        """Wait until every record is in one of the states and ended machines have no process or registration."""
        await self.until(lambda: set(self.states()) <= set(states), f"all records in {states}", limit_s)
        live = {key for key, item in self.records().items() if item["state"] != "terminated"}
        await self.until(lambda: set(self.machines()) <= live, f"only the machines {live}", limit_s)
        limit = time.monotonic() + limit_s
        while unexpected := [item.name for item in await self.registrations() if self._is_unexpected(item.name)]:
            assert time.monotonic() < limit, f"registrations are left: {unexpected}; {self.summary()}"
            await asyncio.sleep(POLL_S)
        over = [path.name for path in self.folder.glob("instances/i-*") if path.name not in live]
        # A supervisor marks its machine as finished before it exits.
        await self.until(lambda: not any(self.processes(name) for name in over), f"no process of {over}", limit_s)

    def _is_unexpected(self, name: str) -> bool:
        """Whether a registration belongs to no instance that is assigned to a run."""
        record = self.records().get("i-" + name.rpartition("-i-")[2])
        return record is None or record["state"] not in {"created", "claimed", "running", "releasing"}

    def summary(self) -> str:
        shown = ("instanceId", "state", "epoch", "holder", "lastHolder", "threshold", "retireReason", "resourceClass")
        return "\n".join(str({key: item[key] for key in shown}) for item in self.records().values())
