"""Environment of the demo: runs remuda commands and workflows, launches instances without records for scale-down, and
observes the local backend.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remuda import procfs
from remuda.adapters.local.folder import supervisor
from remuda.adapters.system.clock import SystemClock
from remuda.cli.demo.report import DemoProvision, DemoRelease, Histories, read_histories
from remuda.cli.local_backend import SWEEPER, BackgroundProcess
from remuda.cli.output import Output
from remuda.config.settings import Settings
from remuda.controlplane.context import Context, read_config
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.instance import Instance, State
from remuda.domain.resources import RunnerRequest, Tier, TypePatterns, UsageClass
from remuda.domain.scale_down.fleet import (
    GHR_APPLICATION,
    GHR_APPLICATION_TAG,
    GHR_ENVIRONMENT_TAG,
    GHR_ORPHAN_TAG,
    GHR_OWNER_TAG,
    GHR_RUNNER_ID_TAG,
    GHR_TYPE_TAG,
    REPO,
    YES,
)
from remuda.domain.text import sanitize
from remuda.fake_github import read_endpoint
from remuda.fake_github.client import FakeGitHubClient
from remuda.ports.compute import LaunchRequest
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import open_context
from remuda.wiring.local import layout

if TYPE_CHECKING:
    from rich.status import Status

#: Repository of the demo's workflows.
SCOPE = "remuda/demo"
#: Seconds that an instance takes to boot in the demo.
BOOT_S = 3.0
#: Long enough for the whole demo, even on a busy machine.
RELEASE_S = 120.0
#: Seconds to wait for an expected event, and between two checks.
WAIT_LIMIT_S = 120.0
POLL_S = 0.05
#: Seconds of history shown on the live page.
PAGE_SINCE_S = 3_600.0
_CHUNK_BYTES = 64 * 1024
#: Lines of a command's output that are shown after its failure.
SHOWN_AFTER_FAILURE = 30

_WORKFLOW = """\
name: {name}
on: push
jobs:
  provision:
    runs-on: ubuntu-latest
    steps:
      - run: remuda provision --instance-count {count} --json > "$DEMO_FOLDER/provision-$GITHUB_RUN_ID.json"
  test:
    needs: provision
    runs-on: ${{{{ github.run_id }}}}
    strategy:
      matrix:
        shard: [{shards}]
    steps:
      - name: check that the home directory is clean
        run: test ! -e "$HOME/left-behind" && touch "$HOME/left-behind"
      - name: test
        run: echo "shard ${{{{ matrix.shard }}}} of run $GITHUB_RUN_ID" && {work}
  release:
    needs: [provision, test]
    if: always()
    runs-on: ubuntu-latest
    steps:
      - run: remuda release --json > "$DEMO_FOLDER/release-$GITHUB_RUN_ID.json"
"""
_DEMAND_WORKFLOW = """\
name: {name}
on: push
jobs:
  test:
    runs-on: [self-hosted, remuda, demo]
    strategy:
      matrix:
        shard: [{shards}]
    steps:
      - name: check that the home directory is clean
        run: test ! -e "$HOME/left-behind" && touch "$HOME/left-behind"
      - name: test
        run: {step}
"""
#: A class that the other chapters do not use, so that the first jobs of the set find no idle machine.
SET_CLASS = "xlarge"
#: Instances without records: name of the fleet, registered instances, lifetime in seconds.
FLEET = "demo-fleet"
REGISTERED = 3
FLEET_LIFETIME_S = 180.0


class DemoEnvironment:
    """Runs commands. Unless it is verbose, their output is one live line on a terminal, and not shown in a log."""

    def __init__(self, output: Output, root: Path, *, verbose: bool = True) -> None:
        self.output = output
        self.verbose = verbose
        self._live: Status | None = None
        self.settings = Settings(dir=root / "state", github_scope=SCOPE)
        self.clock = SystemClock()
        self.page_url = ""
        self._root = root
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"--dir {root} cannot be used: {error.strerror}"
            raise UserError(message, field="--dir", fix="name a directory that you can write to") from None

    def title(self, text: str) -> None:
        """Begin a chapter."""
        self.output.say(*("", f"== {text}") if self.verbose else (text,), style="bold")

    def outcome(self, text: str) -> None:
        """Say what the chapter has shown."""
        self.output.say(f"  {text}")

    def log(self, text: str) -> None:
        self._detail(f"{self.clock.now():%H:%M:%S} {text}")

    def _detail(self, line: str, style: str | None = None) -> None:
        """A line of progress: kept if verbose, else shown until the next one on a terminal."""
        if self.verbose:
            self.output.say(line, style=style)
        elif self._live is not None:
            from rich.text import Text  # noqa: PLC0415 - slow to import

            self._live.update(Text(sanitize(line.strip()), style="dim", no_wrap=True, overflow="ellipsis"))

    @contextmanager
    def live_progress(self) -> Iterator[None]:
        """Show progress in place while the block runs, on a terminal."""
        if self.verbose or self.output.is_quiet or self.output.logs_json or not sys.stderr.isatty():
            yield
            return
        with self.output.console.status("") as self._live:
            yield
        self._live = None

    # Commands ---------------------------------------------------------------------------------------------------

    async def remuda(self, *arguments: str, ok: Sequence[int] | set[int] = (0,)) -> str:
        """Run a command as a user would type it. Show its progress and return its standard output."""
        self._detail(f"$ remuda {' '.join(arguments)}", style="bold cyan")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "remuda", *arguments, "--dir", str(self.settings.dir)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._variables(),
        )
        try:
            stdout, lines = await asyncio.gather(_read(process.stdout), self._echo(process.stderr))
            code = await process.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            await process.wait()
            raise
        if code not in ok:
            if not self.verbose:
                self.output.say(*lines)
            raise Unavailable(f"remuda {arguments[0]} failed with exit code {code}")
        return stdout

    def _variables(self) -> dict[str, str]:
        """Environment variables without the user's settings, which belong to other pools."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("REMUDA_", "GITHUB_"))}
        return {
            **inherited,
            "REMUDA_CONFIG": os.devnull,
            "REMUDA_BOOT_DELAY_SEC": f"{BOOT_S:g}",
            "DEMO_FOLDER": str(self._root),
            "GITHUB_REPOSITORY": SCOPE,
        }

    async def json(self, *arguments: str, ok: Sequence[int] | set[int] = (0,)) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(await self.remuda(*arguments, "--json", ok=ok))
        return document

    async def _echo(self, stream: asyncio.StreamReader | None) -> Sequence[str]:
        """Show the lines as they come. Return the last ones."""
        last: deque[str] = deque(maxlen=SHOWN_AFTER_FAILURE)
        if stream is not None:
            text = ""
            while chunk := await stream.read(_CHUNK_BYTES):
                *lines, text = (text + chunk.decode(errors="replace")).split("\n")
                for line in lines:
                    last.append("  " + line.rstrip())
                    self._detail(last[-1])
        return last

    async def refresh(self, *, idle_s: float, runner_sets: Sequence[Mapping[str, Any]] = ()) -> None:
        await self.remuda(
            *("refresh", "--github-scope", SCOPE),
            *("--idle-time-sec", f"{idle_s:g}", "--release-time-sec", f"{RELEASE_S:g}"),
            *(("--runner-sets", json.dumps(runner_sets)) if runner_sets else ()),
        )

    async def workflow(
        self, name: str, *, run_id: str, count: int, at_once_with: Sequence[str] = ()
    ) -> tuple[DemoProvision, DemoRelease, list[dict[str, Any]]]:
        """Run a workflow with `count` test jobs. Return its provision, its release and the test jobs.

        The jobs keep their machines until the provisions of the runs `at_once_with` are done.
        """
        file = self._root / f"{name}.yml"
        shards = ", ".join(str(number + 1) for number in range(count))
        others = (shlex.quote(str(self._root / f"provision-{other}.json")) for other in at_once_with)
        work = " && ".join((*(f"until test -s {other}; do sleep 0.1; done" for other in others), "sleep 0.5"))
        file.write_text(_WORKFLOW.format(name=name, count=count, shards=shards, work=work))
        result = await self.json("run-workflow", str(file), "--run-id", run_id, ok={0, 1})
        jobs: list[dict[str, Any]] = [job for job in result["jobs"] if job["name"].startswith("test")]
        provisioned = json.loads((self._root / f"provision-{run_id}.json").read_text())
        released = json.loads((self._root / f"release-{run_id}.json").read_text())
        provision = DemoProvision.parse(name, provisioned, jobs_ok=result["conclusion"] == "success")
        return provision, DemoRelease.parse(name, released), jobs

    def set_workflow(self, name: str, *, count: int, step: str) -> str:
        """Write a workflow with `count` jobs for the runner set. Return its path."""
        file = self._root / f"{name}.yml"
        shards = ", ".join(str(number + 1) for number in range(count))
        file.write_text(_DEMAND_WORKFLOW.format(name=name, shards=shards, step=step))
        return str(file)

    async def stop_sweeper(self) -> None:
        await BackgroundProcess(layout(self.settings), SWEEPER).stop(self.clock)

    def kill_instance(self, instance_id: str) -> None:
        """Kill the instance's supervisor, like a power failure."""
        known = supervisor(str(layout(self.settings).instances / instance_id))
        if known is not None:
            procfs.send_signal(*known, signal.SIGKILL)
        self.log(f"{instance_id} was killed (kill -9)")

    @asynccontextmanager
    async def live_page(self) -> AsyncIterator[None]:
        """Serve the dashboard on the loopback interface while the block runs."""
        from remuda.web.dashboard import server  # noqa: PLC0415 - slow to import

        address = server.parse_listen_address("127.0.0.1", 0, None, {})
        listener = server.listen(address)
        self.page_url = server.page_url(address, listener)
        self.output.say(f"dashboard: {self.page_url}", style="bold")
        async with server.serving(
            self.settings, address, listener, interval_s=None, since_s=PAGE_SINCE_S, list_registrations=False
        ):
            yield

    async def keep_page_open(self) -> None:
        """Wait for Ctrl-C, which is a normal end."""
        self.output.say(f"the dashboard stays open until Ctrl-C: {self.page_url}", style="bold")
        task = asyncio.current_task()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if task is not None:
                task.uncancel()

    # Observations -----------------------------------------------------------------------------------------------

    async def wait_until(self, condition: Callable[[], Awaitable[bool]], description: str) -> None:
        deadline = self.clock.monotonic() + WAIT_LIMIT_S
        while not await condition():
            if self.clock.monotonic() > deadline:
                raise Unavailable(f"timed out after {WAIT_LIMIT_S:g} s waiting for {description}")
            await self.clock.sleep(POLL_S)

    def github(self) -> FakeGitHubClient:
        endpoint = read_endpoint(layout(self.settings).github)
        if endpoint is None:
            raise Unavailable("the local GitHub is not running")
        return FakeGitHubClient(endpoint.url, endpoint.token)

    def _open(self) -> AbstractAsyncContextManager[Context]:
        return open_context(self.settings, SilentEventLog(), needs_github=False, require_local_github=False)

    async def record(self, instance_id: str) -> Instance | None:
        async with self._open() as context:
            return await context.store.get(instance_id)

    async def is_in_state(self, instance_id: str, state: State) -> bool:
        record = await self.record(instance_id)
        return record is not None and record.state is state

    async def is_stopped(self, instance_id: str) -> bool:
        return bool(self.stop_reason(instance_id))

    def stop_reason(self, instance_id: str) -> str:
        """Why the instance stopped, as its supervisor recorded it; empty while it runs."""
        try:
            document = json.loads((layout(self.settings).instances / instance_id / "instance.json").read_text())
        except (OSError, ValueError):
            return ""
        return str(document.get("reason") or "")

    async def histories(self) -> Histories:
        async with self._open() as context:
            return await read_histories(context.store)

    def leaked_processes(self) -> list[int]:
        folders = layout(self.settings).instances.glob("i-*")
        return sorted(
            {item.pid for folder in folders for item in procfs.machine_processes(folder.name, str(folder.resolve()), 0)}
        )


async def _read(stream: asyncio.StreamReader | None) -> str:
    return (await stream.read()).decode() if stream is not None else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoFleet:
    #: Runs, but never registers with GitHub.
    unregistered: str
    #: Registered, but tagged as an orphan.
    mistagged: str
    #: All registered instances, oldest first.
    registered: tuple[str, ...]

    @property
    def all_ids(self) -> set[str]:
        return {self.unregistered, *self.registered}


async def launch_fleet(settings: Settings, scope: str) -> DemoFleet:
    async with open_context(settings, SilentEventLog(), needs_github=True) as context:
        names = await _launch(context, scope)
        unregistered, *registered = names
        if context.github is None:
            raise Unavailable("there is no credential for the local GitHub")
        for name in registered:
            runner = await context.github.jit_config(scope, name=f"{FLEET}-{name}", labels=[FLEET])
            await context.compute.tag([name], {GHR_RUNNER_ID_TAG: str(runner.runner_id)})
        # The newest one, which the quota keeps.
        mistagged = registered[-1]
        await context.compute.tag([mistagged], {GHR_ORPHAN_TAG: YES})
        return DemoFleet(unregistered=unregistered, mistagged=mistagged, registered=tuple(registered))


async def _launch(context: Context, scope: str) -> list[str]:
    """Launch one instance after the other, so that their ages differ. Return the ids, oldest first."""
    config = await read_config(context)
    request = RunnerRequest(
        resource_class=config.classes[0],
        usage_class=UsageClass.ON_DEMAND,
        patterns=TypePatterns(("*",)),
        tier=Tier.TRUSTED,
    )
    tags = {
        GHR_ENVIRONMENT_TAG: context.pool_name,
        GHR_APPLICATION_TAG: GHR_APPLICATION,
        GHR_OWNER_TAG: scope,
        GHR_TYPE_TAG: REPO,
    }
    names: list[str] = []
    for number in range(REGISTERED + 1):
        launched = await context.compute.launch(
            LaunchRequest(
                provision_id=FLEET,
                client_token=f"{FLEET}-{number}",
                count=1,
                request=request,
                scope=scope,
                launch=config.launch,
                first_life_s=FLEET_LIFETIME_S,
                margin_s=config.lifetimes.margin_s,
                tags=tags,
            )
        )
        names += [item.instance_id for item in launched.instances]
    return names


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleDownDecisions:
    """Actions and reasons of one scale-down cycle, by instance."""

    actions: Mapping[str, tuple[str, ...]]
    reasons: Mapping[str, str]

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> ScaleDownDecisions:
        actions: dict[str, tuple[str, ...]] = {}
        reasons: dict[str, str] = {}
        for item in document["decisions"]:
            name = str(item["instance_id"])
            actions[name] = (*actions.get(name, ()), str(item["action"]))
            reasons[name] = str(item["reason"])
        return cls(actions=actions, reasons=reasons)

    def final_actions(self, names: Sequence[str]) -> list[str]:
        """Return the last action for each instance."""
        return [self.actions.get(name, ("",))[-1] for name in names]
