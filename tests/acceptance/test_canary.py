"""Canary credentials through every path of a pool on AWS: found nowhere that they do not belong.

One story: credentials of every kind and given in every way, commands that succeed and fail, a machine that boots and
works, the dashboard, the action. All that was said, written, sent and shown meanwhile is searched in the end.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiobotocore.session import AioSession

from tests.support.aws_cloud import SCOPE, aws_cloud
from tests.support.canary import Canaries, Leak, key_pair, minted, watched_processes
from tests.support.cli import run_cli
from tests.support.ec2_machine.machine import NamespaceMachine, bake, why_not
from tests.support.ec2_region import LIMIT_S, POOL, Region

JOB_USER = "remuda-job"
APP_ID = "4242"
REGION_NAME = "eu-central-1"
BACKEND = ("--backend", "aws", "--pool", POOL)
#: All that a job can see of others, and of itself.
LOOKS = r"""
env
cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n'
cat ~/.[a-z]* ../../../runner/.env ../../../runner/.path 2>/dev/null || true
"""
#: Where something for a job could lie.
PLACES = (
    *("/etc", "/home", "/opt/remuda", "/var/lib/remuda", "/var/lib/remuda-jobs", "/var/log", "/run"),
    *("/tmp", "/var/tmp", "/dev/shm"),  # noqa: S108 - the machine's own
)
#: Its first file.
BOOTED = "/run/init.sock"
PLANTED = "/tmp/planted"  # noqa: S108 - the machine's own
#: What the listener registers with is its user's to read, and that is the user of jobs.
REGISTRATION = "/var/lib/remuda-jobs/runner/.credentials"
#: What a runner that is registered just in time is given.
PACKED = "JIT configuration"
#: As above, but for the listener, which has that from its start.
LOOKS_JUST_IN_TIME = LOOKS.replace(
    "/proc/[0-9]*/environ", "$(grep -La Listener /proc/[0-9]*/cmdline | sed s,cmdline$,environ,)"
)
TABLE_EVERY_S = 0.25
Item = dict[str, Any]


@dataclass(kw_only=True)
class Story:
    """What was seen, by place."""

    region: Region
    canaries: Canaries
    #: Of the operator.
    aws_secret: str
    seen: dict[str, str | bytes] = field(default_factory=dict)
    #: A record holds what a runner is registered with just in time.
    packed: asyncio.Event = field(default_factory=asyncio.Event)
    _clean: dict[str, tuple[Item, int]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def environment(self) -> dict[str, str]:
        without = {"REMUDA_GITHUB_TOKEN": ""}
        return {**self.region.cloud.environment, **without, "AWS_SECRET_ACCESS_KEY": self.aws_secret}

    async def remuda(self, *arguments: str, code: int = 0, **variables: str) -> str:
        command = (sys.executable, "-m", "remuda", *arguments, *BACKEND)
        return await self.run(self._place(arguments), command, code, variables)

    async def look(self, *arguments: str, code: int = 0, **variables: str) -> None:
        """A command that is asked for its words alone: no process that shows how it was started."""
        environment = {**self.environment, **variables}
        done = await asyncio.to_thread(run_cli, [*arguments, *BACKEND], environment=environment, timeout_s=LIMIT_S)
        self._heard(self._place(arguments), code, done.code, done.stdout, done.stderr)

    def _place(self, arguments: tuple[str, ...]) -> str:
        return f"remuda {' '.join(arguments)} ({next(self._numbers)})"

    def _heard(self, place: str, code: int, ended: int | None, out: str | bytes, told: str | bytes) -> None:
        self.seen[f"stdout of {place}"], self.seen[f"stderr of {place}"] = out, told
        assert ended == code, (place, out, told, self.region.consoles())

    async def run(self, place: str, command: tuple[str, ...], code: int, variables: Mapping[str, str]) -> str:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**self.environment, **variables},
        )
        async with asyncio.timeout(LIMIT_S):
            out, told = await process.communicate()
        self._heard(place, code, process.returncode, out, told)
        return out.decode()

    async def act(self, mode: str, folder: Path, **inputs: str) -> None:
        """A step of the action, after its installation."""
        files = {name: folder / f"{mode}-{name}" for name in ("OUTPUT", "ENV", "STEP_SUMMARY", "PATH")}
        for file in files.values():
            file.touch()
        variables = {
            **{f"GITHUB_{name}": str(file) for name, file in files.items()},
            **{f"INPUT_{name.upper()}": value for name, value in inputs.items()},
            "INPUT_MODE": mode,
            "INPUT_POOL": POOL,
            "INPUT_AWS_REGION": REGION_NAME,
            "REMUDA_CONFIG": "",
            "GITHUB_ACTIONS": "true",
            "GITHUB_REPOSITORY": SCOPE,
            "GITHUB_RUN_ID": "2",
            "GITHUB_RUN_ATTEMPT": "1",
        }
        place = f"action {mode}"
        log = await self.run(place, (sys.executable, "-I", "-m", "remuda.action"), 0, variables)
        # The command that hides a credential has to name it: the runner takes that line away.
        self.seen[f"stdout of {place}"] = "\n".join(
            line for line in log.splitlines() if not line.startswith("::add-mask::")
        )
        for name, file in files.items():
            self.seen[f"{name} of {place}"] = file.read_bytes()

    # Looks at what holds records

    async def stray(self, table: Any) -> list[Leak]:
        """Credentials in the table where the design has none."""
        items: list[Item] = (await table.scan(TableName=f"remuda-{POOL}", ConsistentRead=True))["Items"]
        return [leak for item in items for leak in self._stray_in(item)]

    @asynccontextmanager
    async def table(self) -> AsyncIterator[Any]:
        url = self.region.cloud.environment["AWS_ENDPOINT_URL_DYNAMODB"]
        async with AioSession().create_client(
            *("dynamodb", REGION_NAME), endpoint_url=url, aws_access_key_id="test", aws_secret_access_key="test"
        ) as client:
            yield client

    def _stray_in(self, item: Item) -> list[Leak]:
        """What was clean, and is as it was, is not looked at again: most of a table stands still."""
        key, state = f"{item['pk']['S']} {item['sk']['S']}", item.get("state", {}).get("S", "")
        if self._clean.get(key) == (item, len(self.canaries.secrets)):
            return []
        found: list[Leak] = []
        for path, text in leaves(item):
            if state == "created" and text and path == ["assignment", "jitConfig"]:
                self.canaries.adopt([(PACKED, text)])
                self.packed.set()
            elif not (key == "pool config" and "tokens" in path) and path != ["assignment", "credential", "token"]:
                found += self.canaries.find(text, f"item {key}: {'.'.join(path)}")
        if not found:
            self._clean[key] = (item, len(self.canaries.secrets))
        return found

    @asynccontextmanager
    async def watched_table(self) -> AsyncIterator[list[Leak]]:
        found: list[Leak] = []

        async def watch() -> None:
            async with self.table() as table:
                while True:
                    self.adopt_minted()
                    found.extend(await self.stray(table))
                    await asyncio.sleep(TABLE_EVERY_S)

        watching = asyncio.create_task(watch())
        try:
            yield found
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    def adopt_minted(self) -> None:
        """What GitHub has made out so far."""
        self.canaries.adopt(minted(self.region.folder / "github"))

    def adopt_roles(self) -> None:
        """What AWS gives the machines themselves."""
        for name, imds in self.region.metadata.items():
            for path, value in imds.values.items():
                if path.startswith("iam/security-credentials/") and isinstance(value, str) and value.startswith("{"):
                    given = json.loads(value)
                    for part in ("SecretAccessKey", "Token"):
                        self.canaries.add(f"{part} of {name}", given[part])

    # The dashboard

    async def show(self, token: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "remuda", "dashboard", *BACKEND, "--port", "0", "--json"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**self.environment, "REMUDA_DASHBOARD_TOKEN": token},
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._visit(json.loads(await _document(process)), token)
        finally:
            process.terminate()
            out, told = await process.communicate()
            self.seen["stdout of the dashboard"], self.seen["stderr of the dashboard"] = out, told

    async def _visit(self, document: Item, token: str) -> None:
        async with httpx.AsyncClient(base_url=document["url"], timeout=LIMIT_S) as client:
            bearer = {"Authorization": f"Bearer {token}"}
            answers = [
                *[await client.get(path, headers=bearer) for path in ("/", "/api/snapshot", "/metrics")],
                await client.get("/api/explanation", params={"subject": "2"}, headers=bearer),
                await client.get("/api/snapshot", headers={"Authorization": f"Bearer {token}x"}),
                await client.post("/login", data={"token": token}),
                await client.post("/login", data={"token": f"{token}x"}),
                await client.get(f"/{token}x"),
            ]
            assert [answer.status_code for answer in answers[:4]] == [200] * 4
            assert answers[4].status_code == 401
            for number, answer in enumerate(answers):
                self.seen[f"the dashboard's answer {number}"] = f"{answer.headers.raw} {answer.text}"
            async with client.stream("GET", "/api/events", headers=bearer) as events:
                lines: list[str] = []
                async for line in events.aiter_lines():
                    lines.append(line)
                    if line.startswith("data: "):
                        break
                self.seen["the dashboard's events"] = "\n".join(lines)


async def _document(process: asyncio.subprocess.Process) -> str:
    """The one that it writes when it listens."""
    assert process.stdout is not None
    text = ""
    while line := (await process.stdout.readline()).decode():
        text += line
        if line == "}\n":
            break
    return text


def leaves(value: Any, *path: str) -> Iterator[tuple[list[str], str]]:
    """Every text in an item of DynamoDB's, and the names that lead there."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, *path, *(() if len(name) == 1 and name.isupper() else (name,)))
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, *path)
    elif isinstance(value, str):
        yield list(path), value


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    bake(tmp_path / "image")
    with aws_cloud(tmp_path) as cloud:
        yield Region(folder=tmp_path, cloud=cloud)


async def put_secret(url: str, text: str) -> str:
    """Into Secrets Manager; its ARN."""
    async with AioSession().create_client(
        *("secretsmanager", REGION_NAME), endpoint_url=url, aws_access_key_id="test", aws_secret_access_key="test"
    ) as client:
        return str((await client.create_secret(Name=f"canary-{secrets.token_hex(4)}", SecretString=text))["ARN"])


def visible_for_jobs(machine: NamespaceMachine, canaries: Canaries, planted: str) -> list[str]:
    """Files that hold a canary and that the user of jobs can read, one that was put there among them. Only what was
    written since the boot can hold one; root names the files, for those in folders that jobs may enter and not list.
    """
    assert machine.run("sh", "-c", f"umask 022; cat >{PLANTED}", told=planted).returncode == 0
    files = machine.run("find", *PLACES, "-type", "f", "-cnewer", BOOTED).stdout.splitlines()
    lines = [line for secret in canaries.secrets.values() for line in secret.splitlines() if "-----" not in line]
    done = machine.run("grep", "-laFs", "-f", "-", "--", *files, user=JOB_USER, told="\n".join(lines) + "\n")
    return done.stdout.split()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.timeout(900)
async def test_no_credential_is_found_where_it_does_not_belong(region: Region, tmp_path: Path) -> None:
    private, public = key_pair()
    canaries = Canaries()
    story = Story(region=region, canaries=canaries, aws_secret=canaries.add("AWS secret", secrets.token_urlsafe(30)))
    admin = canaries.add("GitHub token", region.cloud.environment["REMUDA_GITHUB_TOKEN"])
    canaries.add("App key", private)
    refused = canaries.add("refused token", f"ghp_{secrets.token_hex(18)}")
    page = canaries.add("dashboard token", secrets.token_urlsafe(24))
    key_file = tmp_path / "app.pem"
    key_file.write_text(private)
    async with region.github() as github:
        await github.change_settings(app_id=APP_ID, app_key=public, app_owners=[SCOPE.partition("/")[0]])
        own = canaries.add("token of a run", await github.issue_token())
    scope = ("--github-scope", SCOPE)
    arn = await put_secret(region.cloud.environment["AWS_ENDPOINT_URL"], json.dumps({"token": admin}))

    with watched_processes() as processes:
        # Given in every way, told in both.
        refresh = ("refresh", *scope, *region.cloud.flags(), "--margin-sec", "0.5")
        await story.remuda(*refresh, REMUDA_GITHUB_APP_ID=APP_ID, REMUDA_GITHUB_APP_KEY=private)
        await story.remuda(*refresh, "--log-format", "json", "--json", REMUDA_GITHUB_TOKEN=arn)
        app = {"REMUDA_GITHUB_APP_ID": APP_ID, "REMUDA_GITHUB_APP_KEY": str(key_file)}
        settings = (sys.executable, "-m", "remuda", "config", "--json")
        await asyncio.gather(
            # The servers of this test have no group for it to look at.
            story.look("doctor", "--json", *scope, code=2, **app),
            story.run("remuda config", settings, 0, app | {"REMUDA_GITHUB_TOKEN": admin}),
            fail(story, scope, own=own, refused=refused, private=private),
        )
        async with region.booting(), story.watched_table() as stray:
            await story.remuda(
                *("provision", "--run-id", "1", *scope, "--provision-timeout-sec", "200", "--log-format", "json"),
                REMUDA_GITHUB_TOKEN=own,
            )
            (machine,) = region.machines.values()
            story.adopt_roles()
            job = await region.run_job("1", LOOKS)
            assert job.conclusion == "success", job.log
            story.seen["the job's log"] = job.log
            story.adopt_minted()
            visible = visible_for_jobs(machine, canaries, own)
            uid = int(machine.run("id", "-u", JOB_USER).stdout)
            await story.remuda("release", "--run-id", "1", "--json")
            packed, visible_then = await just_in_time(story, tmp_path, own=own, page=page)
            await story.act("release", tmp_path)
            await story.look("scale-down", "--dry-run", "--environment", POOL, REMUDA_GITHUB_TOKEN=admin)
    story.adopt_minted()

    await gather_cloud(story)
    story.seen["the machines' consoles"] = region.consoles()
    assert sum("token" in name.lower() for name in canaries.secrets) >= 8, "GitHub made out some, too"
    assert canaries.find_all(story.seen) == []
    assert stray == []
    assert sorted(visible) == [PLANTED, REGISTRATION], "what was put there, and nothing else"
    assert PLANTED in visible_then
    assert set(visible_then) <= {PLANTED, REGISTRATION}
    assert canaries.find_all(processes.argv()) == []
    of_jobs = canaries.find_all(processes.environ_of({uid}))
    assert {leak.name for leak in of_jobs} == {packed}
    assert all("Runner.Listener" in leak.place for leak in of_jobs), of_jobs
    # They were looked for where they are: in the environment of those that are given them.
    assert {leak.name for leak in canaries.find_all(processes.environ_of({0}))} >= {"token of a run", "AWS secret"}
    async with story.table() as table:
        assert await story.stray(table) == []


async def just_in_time(story: Story, folder: Path, *, own: str, page: str) -> tuple[str, list[str]]:
    """A machine for one job. All that shows records is looked at while its record holds what it is registered with.

    Returns the name of that canary, and what the machine lets jobs read.
    """
    region, canaries = story.region, story.canaries
    region.power = False
    before = set(region.machines)
    async with asyncio.TaskGroup() as group:
        step = {"github_token": own, "github_scope": SCOPE, "instance_count": "1", "ephemeral": "true"}
        group.create_task(story.act("provision", folder, **step))
        await asyncio.wait_for(story.packed.wait(), LIMIT_S)
        shown = (("status", "--json"), ("explain", "2", "--json"), ("report",))
        await asyncio.gather(*(story.look(*command) for command in shown))
        await story.show(page)
        region.power = True
    (name,) = set(region.machines) - before
    (packed,) = (name for name in canaries.secrets if name.startswith(PACKED))
    visible = visible_for_jobs(region.machines[name], canaries, canaries.secrets[packed])
    job = await region.run_job("2", LOOKS_JUST_IN_TIME)
    assert job.conclusion == "success", job.log
    story.seen["the log of a job on its own machine"] = job.log
    return packed, visible


async def fail(story: Story, scope: tuple[str, ...], *, own: str, refused: str, private: str) -> None:
    """Credentials that are refused, malformed or sent back in an error, and servers that are not there."""
    provision = ("provision", "--run-id", "9", *scope)
    broken = private.replace("PRIVATE", "BROKEN")
    nowhere = {"AWS_ENDPOINT_URL_DYNAMODB": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    await asyncio.gather(
        story.look(*provision, code=2, REMUDA_GITHUB_TOKEN=refused),
        story.look(*provision, "--json", code=2, REMUDA_GITHUB_TOKEN=f"{refused} {refused}"),
        story.look(*provision, code=2, REMUDA_GITHUB_APP_ID=APP_ID, REMUDA_GITHUB_APP_KEY=broken),
        story.look(*provision, code=4, REMUDA_GITHUB_TOKEN=own, **nowhere),
    )
    async with story.region.github() as github:
        echo = f"Bad request: Authorization: Bearer {own}; basic {base64.b64encode(own.encode()).decode()}"
        await github.set_fault("status", operation="registration-token", times=None, status=422, message=echo)
        await story.look(*provision, "--log-format", "json", code=2, REMUDA_GITHUB_TOKEN=own)
        await github.clear_faults()


async def gather_cloud(story: Story) -> None:
    """Launch requests, tags and user data, as EC2 has them."""
    ec2 = story.region.cloud.ec2
    async with ec2.client() as client, httpx.AsyncClient(base_url=ec2.url, timeout=LIMIT_S) as http:
        story.seen["requests to EC2"] = (await http.get("/_shim")).text
        story.seen["machines on EC2"] = str(await client.describe_instances())
        versions = await client.describe_launch_template_versions(
            LaunchTemplateName=f"remuda-{POOL}", Versions=["$Latest", "$Default"]
        )
    for number, version in enumerate(versions["LaunchTemplateVersions"]):
        data = version["LaunchTemplateData"]["UserData"]
        story.seen[f"launch template {number}"] = f"{version} {base64.b64decode(data).decode()}"
