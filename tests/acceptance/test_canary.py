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
import sqlite3
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
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from support.aws_cloud import SCOPE, aws_cloud
from support.canary import Canaries, Leak, watched_processes
from support.ec2_machine.machine import NamespaceMachine, bake, why_not
from support.ec2_region import LIMIT_S, POOL, Region

JOB_USER = "remuda-job"
APP_ID = "4242"
REGION_NAME = "eu-central-1"
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
TABLE_EVERY_S = 0.25
Item = dict[str, Any]


def key_pair() -> tuple[str, str]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return private, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@dataclass(kw_only=True)
class Story:
    """What was seen, by place."""

    region: Region
    canaries: Canaries
    #: Of the operator.
    aws_secret: str
    seen: dict[str, str | bytes] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def environment(self) -> dict[str, str]:
        without = {"REMUDA_GITHUB_TOKEN": ""}
        return {**self.region.cloud.environment, **without, "AWS_SECRET_ACCESS_KEY": self.aws_secret}

    async def remuda(self, *arguments: str, code: int = 0, **variables: str) -> str:
        command = (sys.executable, "-m", "remuda", *arguments, "--backend", "aws", "--pool", POOL)
        return await self.run(f"remuda {' '.join(arguments)} ({next(self._numbers)})", command, code, variables)

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
        self.seen[f"stdout of {place}"], self.seen[f"stderr of {place}"] = out, told
        assert process.returncode == code, (place, out, told, self.region.consoles())
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
        log = await self.run(place, (sys.executable, "-I", "-m", "remuda.entrypoints.action"), 0, variables)
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
        key = f"{item['pk']['S']} {item['sk']['S']}"
        return [
            leak
            for path, text in leaves(item)
            if not (key == "pool config" and "tokens" in path) and path[-3:] != ["assignment", "credential", "token"]
            for leak in self.canaries.find(text, f"item {key}: {'.'.join(path)}")
        ]

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
        """What GitHub has made out so far: registration, removal and installation tokens."""
        (path,) = (self.region.folder / "github").glob("*.db")
        database = sqlite3.connect(path, timeout=LIMIT_S)
        try:
            rows = database.execute("SELECT key, body FROM document WHERE kind = 'token'").fetchall()
        finally:
            database.close()
        for value, body in rows:
            if value not in self.canaries.secrets.values():
                self.canaries.add(f"{json.loads(body)['kind']} token {len(self.canaries.secrets)}", value)

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
            *(sys.executable, "-m", "remuda", "dashboard", "--backend", "aws", "--pool", POOL, "--port", "0", "--json"),
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
                await client.get("/api/story", params={"id": "1"}, headers=bearer),
                await client.get("/api/snapshot", headers={"Authorization": f"Bearer {token}x"}),
                await client.post("/login", data={"token": token}),
                await client.post("/login", data={"token": f"{token}x"}),
                await client.get(f"/{token}x"),
            ]
            assert [answer.status_code for answer in answers[:3]] == [200, 200, 200]
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


def visible_for_jobs(machine: NamespaceMachine, canaries: Canaries) -> list[str]:
    """Files that hold a canary and that the user of jobs can read."""
    lines = [line for secret in canaries.secrets.values() for line in secret.splitlines() if "-----" not in line]
    done = machine.run("grep", "-rlaFs", "-f", "-", *PLACES, user=JOB_USER, told="\n".join(lines) + "\n")
    return done.stdout.split()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.timeout(600)
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
            story.remuda("doctor", "--json", *scope, code=2, **app),
            story.run("remuda config", settings, 0, app | {"REMUDA_GITHUB_TOKEN": admin}),
            fail(story, scope, own=own, refused=refused, private=private),
        )
        async with region.booting(), story.watched_table() as stray:
            await story.remuda(
                *("provision", "--run-id", "1", *scope, "--provision-timeout-sec", "100", "--log-format", "json"),
                REMUDA_GITHUB_TOKEN=own,
            )
            (machine,) = region.machines.values()
            story.adopt_roles()
            job = await region.run_job("1", LOOKS)
            assert job.conclusion == "success", job.log
            story.seen["the job's log"] = job.log
            story.adopt_minted()
            planted = machine.run("sh", "-c", "umask 022; cat >/tmp/planted", told=own)
            assert planted.returncode == 0
            visible = visible_for_jobs(machine, canaries)
            uid = int(machine.run("id", "-u", JOB_USER).stdout)
            await asyncio.gather(
                *(story.remuda(*command) for command in (("status",), ("explain", "1", "--json"), ("report",)))
            )
            await story.show(page)
            await story.remuda("release", "--run-id", "1", "--json")
            await story.act("provision", tmp_path, github_token=own, github_scope=SCOPE, instance_count="1")
            await story.act("release", tmp_path)
            await story.remuda("scale-down", "--dry-run", "--environment", POOL, REMUDA_GITHUB_TOKEN=admin)
    story.adopt_minted()

    await gather_cloud(story)
    story.seen["the machines' consoles"] = region.consoles()
    assert sum("token" in name.lower() for name in canaries.secrets) >= 8, "GitHub made out some, too"
    assert canaries.find_all(story.seen) == []
    assert stray == []
    assert visible == ["/tmp/planted"], "what was put there, and nothing else"  # noqa: S108 - the machine's own
    assert canaries.find_all(processes.argv()) == []
    assert canaries.find_all(processes.environ_of({uid})) == []
    # They were looked for where they are: in the environment of those that are given them.
    assert {leak.name for leak in canaries.find_all(processes.environ_of({0}))} >= {"token of a run", "AWS secret"}
    async with story.table() as table:
        assert await story.stray(table) == []


async def fail(story: Story, scope: tuple[str, ...], *, own: str, refused: str, private: str) -> None:
    """Credentials that are refused, malformed or sent back in an error, and servers that are not there."""
    provision = ("provision", "--run-id", "9", *scope)
    broken = private.replace("PRIVATE", "BROKEN")
    nowhere = {"AWS_ENDPOINT_URL_DYNAMODB": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    await asyncio.gather(
        story.remuda(*provision, code=2, REMUDA_GITHUB_TOKEN=refused),
        story.remuda(*provision, "--json", code=2, REMUDA_GITHUB_TOKEN=f"{refused} {refused}"),
        story.remuda(*provision, code=2, REMUDA_GITHUB_APP_ID=APP_ID, REMUDA_GITHUB_APP_KEY=broken),
        story.remuda(*provision, code=4, REMUDA_GITHUB_TOKEN=own, **nowhere),
    )
    async with story.region.github() as github:
        echo = f"Bad request: Authorization: Bearer {own}; basic {base64.b64encode(own.encode()).decode()}"
        await github.set_fault("status", operation="registration-token", times=None, status=422, message=echo)
        await story.remuda(*provision, "--log-format", "json", code=2, REMUDA_GITHUB_TOKEN=own)
        await github.clear_faults()


async def gather_cloud(story: Story) -> None:
    """Launch requests, tags and user data, as EC2 has them."""
    ec2 = story.region.cloud.ec2
    async with ec2.client() as client, httpx.AsyncClient(base_url=ec2.url) as http:
        story.seen["requests to EC2"] = (await http.get("/_shim")).text
        story.seen["machines on EC2"] = str(await client.describe_instances())
        versions = await client.describe_launch_template_versions(
            LaunchTemplateName=f"remuda-{POOL}", Versions=["$Latest", "$Default"]
        )
    for number, version in enumerate(versions["LaunchTemplateVersions"]):
        data = version["LaunchTemplateData"]["UserData"]
        story.seen[f"launch template {number}"] = f"{version} {base64.b64decode(data).decode()}"
