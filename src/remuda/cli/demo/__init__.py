"""`remuda demo`: the whole story on this machine, told as it happens, with its claims checked at the end.

It drives the same commands that a person would type, against the same backend that `remuda up` starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remuda import procfs
from remuda.adapters.local.folder import supervisor
from remuda.adapters.system.clock import SystemClock
from remuda.cli.demo.checks import Histories, foreign_jobs, histories, living, retirements
from remuda.cli.demo.fleet import Decided, launch_fleet
from remuda.cli.demo.report import Claim, DemoReport, Provisioning, Releasing, Retired, show
from remuda.cli.local_backend import SWEEPER, BackgroundProcess
from remuda.cli.output import Output
from remuda.cli.run import run_async
from remuda.config.settings import Settings
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.instance import Instance, State
from remuda.fake_github import read_endpoint
from remuda.fake_github.client import FakeGitHubClient, JobStep
from remuda.fake_github.model import FakeGitHubSettings
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import open_context
from remuda.wiring.local import check_local, layout

SCOPE = "remuda/demo"
#: A machine boots this long in the demo: what a warm one saves.
BOOT_S = 3.0
#: Both outlast the story, also on a machine that is busy with other things.
IDLE_S = 900.0
RELEASE_S = 120.0
SHORT_IDLE_S = 2.0
LEASE_S = 3.0
#: How long the story waits for something that should happen.
LIMIT_S = 120.0
PAUSE_S = 0.05
#: How a machine says that it ended itself: its agent saw that its time was up, or was kept from it, and the timer did.
ENDED_ITSELF = ("time in idle is up", "the dead-man timer ran out")
CHUNK = 64 * 1024
#: How far back its live page goes.
PAGE_SHOWS_S = 3_600.0

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
      - name: left from another run?
        run: test ! -e "$HOME/left-behind" && touch "$HOME/left-behind"
      - name: test
        run: echo "shard ${{{{ matrix.shard }}}} of run $GITHUB_RUN_ID" && sleep {work_s}
  release:
    needs: [provision, test]
    if: always()
    runs-on: ubuntu-latest
    steps:
      - run: remuda release --json > "$DEMO_FOLDER/release-$GITHUB_RUN_ID.json"
"""


@dataclass(kw_only=True)
class _Told:
    """What the story has gathered so far."""

    provisions: list[Provisioning] = field(default_factory=list)
    releases: list[Releasing] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def claim(self, text: str, *, holds: bool, detail: str = "") -> None:
        self.claims.append(Claim(text=text, holds=holds, detail=detail))


def run_demo(settings: Settings, output: Output, *, dashboard: bool, keep: bool) -> int:
    if keep and not dashboard:
        raise UserError("--keep requires --dashboard", field="--keep", fix="add --dashboard, or omit --keep")
    check_local(settings)
    folder = settings.dir if settings.given("dir") else None
    return run_async(lambda: run_demo_story(output, folder, dashboard=dashboard, keep=keep))


async def run_demo_story(output: Output, folder: Path | None, *, dashboard: bool = False, keep: bool = False) -> int:
    root = folder or Path(tempfile.mkdtemp(prefix="remuda-demo-"))
    story = Story(output, root)
    try:
        async with story.shown_live() if dashboard else contextlib.nullcontext():
            try:
                report = await story.tell()
                page = await story.write_page(_page(folder))
            finally:
                await asyncio.shield(story.clean_up())
            show(output, report)
            output.say(f"the report of it all: {page}", style="bold")
            output.result({**report.document(), "report_page": str(page)})
            if dashboard and (keep or (sys.stdin.isatty() and sys.stdout.isatty())):
                await story.stay()
    finally:
        if folder is None:
            shutil.rmtree(root, ignore_errors=True)
    return 0 if report.holds else 1


def _page(folder: Path | None) -> Path:
    """Where it stays after everything else is cleaned up."""
    if folder is not None:
        return folder / "report.html"
    handle, name = tempfile.mkstemp(prefix="remuda-report-", suffix=".html")
    os.close(handle)
    return Path(name)


class Story:
    def __init__(self, output: Output, root: Path) -> None:
        self._output = output
        self._settings = Settings(dir=root / "state", github_scope=SCOPE)
        self._root = root
        self._clock = SystemClock()
        self._began = self._clock.monotonic()
        self._told = _Told()
        self._cleaned = False
        self._page_url = ""

    async def tell(self) -> DemoReport:
        self._root.mkdir(parents=True, exist_ok=True)
        self._title("Up: a local GitHub and the sweeps, in the background")
        await self._remuda("up")
        self._title(f"Refresh: the pool's configuration (machines boot for {BOOT_S:g} s here)")
        await self._refresh(idle_s=IDLE_S)
        await self._cold()
        await self._warm()
        await self._scale_down()
        await self._crash()
        await self._self_termination()
        return await self._last_look()

    @contextlib.asynccontextmanager
    async def shown_live(self) -> AsyncIterator[None]:
        """On a page of this machine alone, from before the beginning."""
        from remuda.web.dashboard import server  # noqa: PLC0415 - a web server only where there is a page

        place = server.parse_listen_address("127.0.0.1", 0, None, {})
        listener = server.listen(place)
        self._page_url = server.page_url(place, listener)
        self._output.say(f"live on {self._page_url}", style="bold")
        async with server.serving(
            self._settings, place, listener, interval_s=None, since_s=PAGE_SHOWS_S, list_registrations=False
        ):
            yield

    async def stay(self) -> None:
        """Until Ctrl-C, which is how it ends and no failure."""
        self._output.say(f"the page stays open until Ctrl-C: {self._page_url}", style="bold")
        task = asyncio.current_task()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if task is not None:
                task.uncancel()

    async def write_page(self, page: Path) -> Path:
        self._title("The report: reuse, waiting times, machine hours, cost")
        await self._remuda("report", "--html", str(page))
        return page

    async def clean_up(self) -> None:
        """Also after Ctrl-C: nothing stays behind."""
        if not self._cleaned:
            self._cleaned = True
            with contextlib.suppress(Unavailable):
                await self._remuda("down")

    async def _cold(self) -> None:
        self._title("A workflow with a matrix of three: the pool is empty, three runners are created")
        jobs = await self._workflow("cold", run_id="1001", count=3)
        cold = self._told.provisions[-1]
        self._told.claim("the first run creates three runners", holds=(cold.reused, cold.created) == (0, 3))
        self._told.claim("its three jobs succeed on three machines", holds=_spread(jobs) == 3)

    async def _warm(self) -> None:
        self._title("Two workflows at once, five runners: three are reused, two are created")
        await asyncio.gather(
            self._workflow("left", run_id="1002", count=2), self._workflow("right", run_id="1003", count=3)
        )
        reused = sum(item.reused for item in self._told.provisions[-2:])
        created = sum(item.created for item in self._told.provisions[-2:])
        self._told.claim("two overlapping runs reuse all three and create two", holds=(reused, created) == (3, 2))
        self._title("A workflow on a warm pool: nothing to wait for")
        await self._workflow("warm", run_id="1004", count=3)
        warm = self._told.provisions[-1]
        self._told.claim("a run on a warm pool creates nothing", holds=(warm.reused, warm.created) == (3, 0))

    async def _scale_down(self) -> None:
        self._title("Scale-down: four machines that the pool has no records of, known by their tags alone")
        fleet = await launch_fleet(self._settings, SCOPE)
        self._say(f"{fleet.silent} never registers; {fleet.mistaken} is tagged as an orphan by mistake")
        limits = ("--minimum-running-time-in-minutes", "0", "--runner-boot-time-in-minutes", "0.01")
        keep_two = ("--idle-config", json.dumps([{"cron": "* * * * *", "idleCount": 2}]))
        self._output.say(await self._remuda("scale-down", "--dry-run", *limits, *keep_two))
        first = Decided.parse(await self._json("scale-down", *limits, *keep_two))
        second = Decided.parse(await self._json("scale-down", *limits, *keep_two))
        told = self._told
        told.claim(
            "a machine that never registers is marked as an orphan, and ended a cycle later",
            holds=(first.last([fleet.silent]), second.last([fleet.silent])) == (["mark-orphan"], ["terminate"]),
        )
        told.claim(
            "a false positive loses its orphan tag and stays",
            holds=first.actions.get(fleet.mistaken) == ("unmark-orphan", "keep"),
            detail=first.reasons.get(fleet.mistaken, ""),
        )
        told.claim(
            "an idle quota of two keeps two of three, and the oldest goes",
            holds=first.last(fleet.registered) == ["terminate", "keep", "keep"],
            detail=", ".join(first.last(fleet.registered)),
        )
        pool = set(first.actions) - fleet.everyone
        told.claim(
            "the pool's own machines are left to their records",
            holds=bool(pool) and all(first.actions[name] == ("keep",) for name in pool),
        )
        await self._json("scale-down", *limits)
        over = [await self._machine_over(name) for name in fleet.everyone]
        told.claim("without a quota the rest of that fleet goes too", holds=all(over))

    async def _crash(self) -> None:
        self._title("A machine loses its power during release: it is retired, never pooled")
        run_id = "1005"
        provisioned = await self._json("provision", "--run-id", run_id, "--instance-count", "1")
        self._told.provisions.append(Provisioning.parse("crash", provisioned))
        instance_id = str(provisioned["instances"][0]["instance_id"])
        async with self._sim() as sim:
            slow = JobStep(run="sleep 600")
            job = await sim.queue_job(repo=SCOPE, run_id=run_id, labels=[run_id], name="slow", steps=[slow])
            await self._until(lambda: self._job_started(sim, job.id), "a job to start")
        releasing = asyncio.create_task(self._json("release", "--run-id", run_id, ok={0, 4}))
        await self._until(lambda: self._in_state(instance_id, State.RELEASING), "the release to begin")
        self._pull_the_plug(instance_id)
        async with self._sim() as sim:
            # GitHub keeps a lost runner busy for ten minutes; the local one need not. The next jobs have their time.
            await sim.change_settings(lease_s=LEASE_S)
            await self._until(lambda: self._job_over(sim, job.id), "GitHub to give up the job")
            await sim.change_settings(lease_s=FakeGitHubSettings().lease_s)
        await self._until(lambda: self._in_state(instance_id, State.TERMINATED), "the sweeps to retire it")
        released = await releasing
        await self._json("refresh", "--sweep-only")
        self._told.claim(
            "a machine that crashes during release is retired, not pooled",
            holds=not released["released"] and await self._in_state(instance_id, State.TERMINATED),
        )

    async def _self_termination(self) -> None:
        self._title(f"No control plane at all: an idle machine whose {SHORT_IDLE_S:g} s are up ends itself")
        await self._refresh(idle_s=SHORT_IDLE_S)
        await BackgroundProcess(layout(self._settings), SWEEPER).stop(self._clock)
        self._say("the sweeps are stopped")
        await self._workflow("last", run_id="1006", count=1)
        instance_id = self._told.releases[-1].instance_ids[0]
        await self._until(lambda: self._machine_over(instance_id), "the machine to end itself")
        why = self._end_of(instance_id)
        self._say(f"{instance_id} ended: {why}")
        record = await self._record(instance_id)
        self._told.claim(
            "an idle machine ends itself when its time is up, without any control plane",
            holds=record is not None and record.state is State.IDLE and any(word in why for word in ENDED_ITSELF),
            detail=why,
        )

    async def _last_look(self) -> DemoReport:
        self._title("A last look: refresh confirms what happened; then everything is taken down")
        await self._refresh(idle_s=SHORT_IDLE_S)
        for line in (await self._remuda("status")).splitlines():
            self._output.say("  " + line)
        foreign = await self._foreign_jobs()
        _, retired = await self._retirements()
        async with self._sim() as sim:
            registrations = [runner.name for runner in await sim.runners()]
        down = await self._json("down")
        self._cleaned = True
        live, _ = await self._retirements()
        left = self._leaked()
        told = self._told
        told.claim("no job ran on another run's machine", holds=not foreign, detail=", ".join(foreign))
        told.claim("every job saw a clean machine", holds=all(item.jobs_ok for item in told.provisions))
        told.claim("no process is left", holds=not left and not down["left"], detail=", ".join(map(str, left)))
        told.claim("no record says that a machine lives", holds=not live, detail=", ".join(live))
        told.claim("no registration is left on GitHub", holds=not registrations, detail=", ".join(registrations))
        return DemoReport(
            provisions=tuple(sorted(told.provisions, key=lambda item: item.run_id)),
            releases=tuple(sorted(told.releases, key=lambda item: item.run_id)),
            retired=tuple(retired),
            claims=tuple(told.claims),
            leaked_processes=len(left),
            foreign_jobs=len(foreign),
            seconds=round(self._clock.monotonic() - self._began, 1),
        )

    # Telling ----------------------------------------------------------------------------------------------------

    def _title(self, text: str) -> None:
        self._output.say(f"\n== {text}", style="bold")

    def _say(self, text: str) -> None:
        self._output.say(f"{self._clock.now():%H:%M:%S} {text}")

    # Acting -----------------------------------------------------------------------------------------------------

    async def _remuda(self, *arguments: str, ok: Sequence[int] | set[int] = (0,)) -> str:
        """The command as a person would type it; its progress is shown, its document returned."""
        self._output.say(f"$ remuda {' '.join(arguments)}", style="bold cyan")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "remuda", *arguments, "--dir", str(self._settings.dir)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment(),
        )
        try:
            answer, _ = await asyncio.gather(_read(process.stdout), self._echo(process.stderr))
            code = await process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            await process.wait()
            raise
        if code not in ok:
            raise Unavailable(f"remuda {arguments[0]} ended with exit code {code}")
        return answer

    def _environment(self) -> dict[str, str]:
        """The caller's settings are for the caller's pools."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("REMUDA_", "GITHUB_"))}
        return {
            **kept,
            "REMUDA_CONFIG": os.devnull,
            "DEMO_FOLDER": str(self._root),
            "GITHUB_REPOSITORY": SCOPE,
        }

    async def _json(self, *arguments: str, ok: Sequence[int] | set[int] = (0,)) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(await self._remuda(*arguments, "--json", ok=ok))
        return document

    async def _echo(self, stream: asyncio.StreamReader | None) -> None:
        if stream is not None:
            text = ""
            while chunk := await stream.read(CHUNK):
                *lines, text = (text + chunk.decode(errors="replace")).split("\n")
                for line in lines:
                    self._output.say("  " + line.rstrip())

    async def _refresh(self, *, idle_s: float) -> None:
        await self._remuda(
            *("refresh", "--github-scope", SCOPE, "--boot-delay-sec", f"{BOOT_S:g}"),
            *("--idle-time-sec", f"{idle_s:g}", "--release-time-sec", f"{RELEASE_S:g}"),
        )

    async def _workflow(self, name: str, *, run_id: str, count: int) -> list[dict[str, Any]]:
        file = self._root / f"{name}.yml"
        shards = ", ".join(str(number + 1) for number in range(count))
        file.write_text(_WORKFLOW.format(name=name, count=count, shards=shards, work_s="0.5"))
        result = await self._json("run-workflow", str(file), "--run-id", run_id, ok={0, 1})
        jobs: list[dict[str, Any]] = [job for job in result["jobs"] if job["name"].startswith("test")]
        provisioned = json.loads((self._root / f"provision-{run_id}.json").read_text())
        released = json.loads((self._root / f"release-{run_id}.json").read_text())
        ok = result["conclusion"] == "success"
        self._told.provisions.append(Provisioning.parse(name, provisioned, jobs_ok=ok))
        self._told.releases.append(Releasing.parse(name, released))
        return jobs

    def _pull_the_plug(self, instance_id: str) -> None:
        known = supervisor(str(layout(self._settings).instances / instance_id))
        if known is not None:
            procfs.send_signal(*known, signal.SIGKILL)
        self._say(f"{instance_id} lost its power (kill -9)")

    # Looking ----------------------------------------------------------------------------------------------------

    async def _until(self, holds: Any, what: str) -> None:
        until = self._clock.monotonic() + LIMIT_S
        while not await holds():
            if self._clock.monotonic() > until:
                raise Unavailable(f"waited {LIMIT_S:g} s for {what} in vain")
            await self._clock.sleep(PAUSE_S)

    def _sim(self) -> FakeGitHubClient:
        endpoint = read_endpoint(layout(self._settings).github)
        if endpoint is None:
            raise Unavailable("the local GitHub is not up")
        return FakeGitHubClient(endpoint.url, endpoint.token)

    @staticmethod
    async def _job_started(sim: FakeGitHubClient, job_id: int) -> bool:
        return (await sim.job(job_id)).status != "queued"

    @staticmethod
    async def _job_over(sim: FakeGitHubClient, job_id: int) -> bool:
        return (await sim.job(job_id)).status == "completed"

    async def _record(self, instance_id: str) -> Instance | None:
        async with open_context(
            self._settings, SilentEventLog(), needs_github=False, require_local_github=False
        ) as context:
            return await context.store.get(instance_id)

    async def _in_state(self, instance_id: str, state: State) -> bool:
        record = await self._record(instance_id)
        return record is not None and record.state is state

    async def _machine_over(self, instance_id: str) -> bool:
        return bool(self._end_of(instance_id))

    def _end_of(self, instance_id: str) -> str:
        try:
            document = json.loads((layout(self._settings).instances / instance_id / "instance.json").read_text())
        except (OSError, ValueError):
            return ""
        return str(document.get("reason") or "")

    async def _histories(self) -> Histories:
        async with open_context(
            self._settings, SilentEventLog(), needs_github=False, require_local_github=False
        ) as context:
            return await histories(context.store)

    async def _foreign_jobs(self) -> list[str]:
        async with self._sim() as sim:
            return foreign_jobs(await sim.jobs(), await self._histories(), pool=self._settings.pool)

    async def _retirements(self) -> tuple[list[str], list[Retired]]:
        known = await self._histories()
        return living(known), retirements(known, self._end_of)

    def _leaked(self) -> list[int]:
        folders = layout(self._settings).instances.glob("i-*")
        return sorted(
            {item.pid for folder in folders for item in procfs.machine_processes(folder.name, str(folder.resolve()), 0)}
        )


def _spread(jobs: list[dict[str, Any]]) -> int:
    return len({job["instance_id"] for job in jobs if job["conclusion"] == "success"})


async def _read(stream: asyncio.StreamReader | None) -> str:
    return (await stream.read()).decode() if stream is not None else ""
