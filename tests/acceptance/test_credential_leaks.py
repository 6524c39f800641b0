"""Credentials on all paths of a pool on AWS do not leak.

One test passes credentials of every kind in every supported way to commands that succeed and fail, a machine that boots
and runs a job, the dashboard and the action. Afterwards it scans all output, files, requests, records and processes.
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

from remuda.agent import mounts, sandbox, sandbox_root
from tests.support.aws.ec2_machines import LIMIT_S, MachineStack
from tests.support.aws.servers import REGION, aws_client
from tests.support.aws.stack import POOL, SCOPE
from tests.support.cli import run_cli
from tests.support.leak_scanner import (
    Leak,
    LeakScanner,
    ObservedProcesses,
    issued_credentials,
    key_pair,
    observe_processes,
)
from tests.support.namespace_machine.machine import NamespaceMachine
from tests.support.namespace_machine.requirements import unsupported_reason
from tests.support.user_data import decode_user_data
from tests.support.virtual_time import until

APP_ID = "4242"
OF_POOL = ("--pool", POOL)
#: A job step that prints everything that root can read of itself and of other processes in its sandbox.
PRINT_ALL = r"""
env
sudo sh -c 'cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline' 2>/dev/null | tr '\0' '\n'
cat ~/.[a-z]* /opt/remuda/runner/.env /opt/remuda/runner/.path 2>/dev/null || true
"""
#: Folders of a sandbox that may contain files with credentials.
FOLDERS = (
    *("/etc", "/home", "/opt/remuda", "/root", "/var/lib/remuda", "/var/log", "/run"),
    *("/tmp", "/var/tmp", "/dev/shm"),  # noqa: S108 - of the machine
)
READABLE_FILE = "/tmp/test-credential"  # noqa: S108 - of the sandbox
#: The credentials of the listener, which runs as the user of jobs and must read them.
REGISTRATION = "/opt/remuda/runner/.credentials_rsaparams"
#: Kind of the credential of a just-in-time runner.
JIT = "JIT configuration"
#: Without the environment of the listener, which contains the configuration of a just-in-time runner.
PRINT_ALL_BUT_LISTENER = PRINT_ALL.replace(
    "/proc/[0-9]*/environ", "$(grep -La Listener /proc/[0-9]*/cmdline | sed s,cmdline$,environ,)"
)
#: A job step that waits until the test has read the processes of the running job.
JOB_STARTED, PROCESSES_READ = "/tmp/job-started", "/tmp/processes-read"  # noqa: S108 - of the sandbox
WAIT_FOR_READING = f"touch {JOB_STARTED}; until [ -e {PROCESSES_READ} ]; do sleep 0.1; done"
TABLE_POLL_S = 0.25
Item = dict[str, Any]


@dataclass(kw_only=True)
class LeakTest:
    """Commands with credentials, and everything that they wrote."""

    stack: MachineStack
    scanner: LeakScanner
    #: The secret key of the operator.
    aws_secret: str
    #: Contents to scan, by place.
    seen: dict[str, str | bytes] = field(default_factory=dict)
    #: Set when a record contains a just-in-time configuration.
    jit_recorded: asyncio.Event = field(default_factory=asyncio.Event)
    _clean: dict[str, tuple[Item, int]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def environment(self) -> dict[str, str]:
        return self.stack.stack.environment(REMUDA_GITHUB_TOKEN="", AWS_SECRET_ACCESS_KEY=self.aws_secret)

    async def remuda(self, *arguments: str, code: int = 0, **variables: str) -> str:
        command = (sys.executable, "-m", "remuda", *arguments, *OF_POOL)
        return await self.run(self._place(arguments), command, code, variables)

    async def remuda_forked(self, *arguments: str, code: int = 0, **variables: str) -> None:
        """Run a command whose command line and environment are not scanned, because a fork does not show them."""
        environment = {**self.environment, **variables}
        result = await asyncio.to_thread(run_cli, [*arguments, *OF_POOL], environment=environment)
        self._record(self._place(arguments), code, result.code, result.stdout, result.stderr)

    def _place(self, arguments: tuple[str, ...]) -> str:
        return f"remuda {' '.join(arguments)} ({next(self._numbers)})"

    def _record(self, place: str, expected: int, code: int | None, stdout: str | bytes, stderr: str | bytes) -> None:
        self.seen[f"stdout of {place}"], self.seen[f"stderr of {place}"] = stdout, stderr
        assert code == expected, (place, stdout, stderr, self.stack.consoles())

    async def run(self, place: str, command: tuple[str, ...], code: int, variables: Mapping[str, str]) -> str:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**self.environment, **variables},
        )
        async with asyncio.timeout(LIMIT_S):
            stdout, stderr = await process.communicate()
        self._record(place, code, process.returncode, stdout, stderr)
        return stdout.decode()

    async def run_action(self, mode: str, folder: Path, **inputs: str) -> None:
        """Run a step of the action, without its installation."""
        files = {name: folder / f"{mode}-{name}" for name in ("OUTPUT", "ENV", "STEP_SUMMARY", "PATH")}
        for file in files.values():
            file.touch()
        variables = {
            **{f"GITHUB_{name}": str(file) for name, file in files.items()},
            **{f"INPUT_{name.upper()}": value for name, value in inputs.items()},
            "INPUT_MODE": mode,
            "INPUT_POOL": POOL,
            "INPUT_AWS_REGION": REGION,
            "REMUDA_CONFIG": "",
            "GITHUB_ACTIONS": "true",
            "GITHUB_REPOSITORY": SCOPE,
            "GITHUB_RUN_ID": "2",
            "GITHUB_RUN_ATTEMPT": "1",
        }
        place = f"action {mode}"
        log = await self.run(place, (sys.executable, "-I", "-m", "remuda.action"), 0, variables)
        # The workflow command that masks a credential contains it. The runner does not show it.
        self.seen[f"stdout of {place}"] = "\n".join(
            line for line in log.splitlines() if not line.startswith("::add-mask::")
        )
        for name, file in files.items():
            self.seen[f"{name} of {place}"] = file.read_bytes()

    # The table

    async def table_leaks(self, table: Any) -> list[Leak]:
        """Credentials in the table outside the attributes that hold them by design."""
        items: list[Item] = (await table.scan(TableName=f"remuda-{POOL}", ConsistentRead=True))["Items"]
        return [leak for item in items for leak in self._item_leaks(item)]

    @asynccontextmanager
    async def table(self) -> AsyncIterator[Any]:
        async with aws_client("dynamodb", self.environment["AWS_ENDPOINT_URL_DYNAMODB"]) as client:
            yield client

    def _item_leaks(self, item: Item) -> list[Leak]:
        """Scan an item, unless it is unchanged since a scan that found nothing."""
        key, state = f"{item['pk']['S']} {item['sk']['S']}", item.get("state", {}).get("S", "")
        if self._clean.get(key) == (item, len(self.scanner.secrets)):
            return []
        found: list[Leak] = []
        for path, text in leaves(item):
            if state == "created" and text and path == ["assignment", "jitConfig"]:
                self.scanner.add_new([(JIT, text)])
                self.jit_recorded.set()
            elif not (key == "pool config" and "tokens" in path) and path != ["assignment", "credential", "token"]:
                found += self.scanner.find(text, f"item {key}: {'.'.join(path)}")
        if not found:
            self._clean[key] = (item, len(self.scanner.secrets))
        return found

    @asynccontextmanager
    async def watched_table(self) -> AsyncIterator[list[Leak]]:
        found: list[Leak] = []

        async def poll() -> None:
            async with self.table() as table:
                while True:
                    self.add_issued_credentials()
                    found.extend(await self.table_leaks(table))
                    await asyncio.sleep(TABLE_POLL_S)

        polling = asyncio.create_task(poll())
        try:
            yield found
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling

    def add_issued_credentials(self) -> None:
        """Add the credentials that GitHub has issued so far."""
        self.scanner.add_new(issued_credentials(self.stack.folder / "github"))

    def add_role_credentials(self) -> None:
        """Add the credentials of the machines' role."""
        for name, imds in self.stack.runner.metadata.items():
            for path, value in imds.values.items():
                if path.startswith("iam/security-credentials/") and value.startswith("{"):
                    given = json.loads(value)
                    for part in ("SecretAccessKey", "Token"):
                        self.scanner.add(f"{part} of {name}", given[part])

    # The dashboard

    async def visit_dashboard(self, token: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "remuda", "dashboard", *OF_POOL, "--port", "0", "--json"),
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
            stdout, stderr = await process.communicate()
            self.seen["stdout of the dashboard"], self.seen["stderr of the dashboard"] = stdout, stderr

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
                self.seen[f"response {number} of the dashboard"] = f"{answer.headers.raw} {answer.text}"
            async with client.stream("GET", "/api/events", headers=bearer) as events:
                lines: list[str] = []
                async for line in events.aiter_lines():
                    lines.append(line)
                    if line.startswith("data: "):
                        break
                self.seen["events of the dashboard"] = "\n".join(lines)


async def _document(process: asyncio.subprocess.Process) -> str:
    """The document that the dashboard writes when it listens."""
    assert process.stdout is not None
    text = ""
    while line := (await process.stdout.readline()).decode():
        text += line
        if line == "}\n":
            break
    return text


def leaves(value: Any, *path: str) -> Iterator[tuple[list[str], str]]:
    """Each string in an item of DynamoDB with the names of its path."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, *path, *(() if len(name) == 1 and name.isupper() else (name,)))
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, *path)
    elif isinstance(value, str):
        yield list(path), value


def readable_for_jobs(machine: NamespaceMachine, scanner: LeakScanner, credential: str) -> list[str]:
    """Files with a credential that root of the sandbox can read, including one that this function creates.

    Only files of the last hours are considered.
    """
    assert machine.run_in_sandbox("sh", "-c", f"cat >{READABLE_FILE}", stdin=credential).returncode == 0
    files = machine.run_in_sandbox("find", *FOLDERS, "-type", "f", "-cmin", "-300").stdout.splitlines()
    lines = [line for secret in scanner.secrets.values() for line in secret.splitlines() if "-----" not in line]
    # As a whole in base64, too: so is the key of a runner.
    lines += [base64.b64encode(line.encode()).decode().rstrip("=")[:-1] for line in lines]
    done = machine.run_in_sandbox("grep", "-laFs", "-f", "-", "--", *files, stdin="\n".join(lines) + "\n")
    return done.stdout.split()


def users_of_sandboxes() -> set[int]:
    """Root and the user of jobs in the first sandboxes of a machine, by ids of the machine."""
    ids = (0, sandbox_root.JOB_USER_ID)
    return {sandbox.FIRST_ID + number * mounts.ID_COUNT + user for number in range(1, 5) for user in ids}


@pytest.mark.namespaces
@pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())
@pytest.mark.timeout(900)
async def test_no_credential_leaks(machine_stack: MachineStack, tmp_path: Path) -> None:
    private, public = key_pair()
    scanner = LeakScanner()
    leak_test = LeakTest(
        stack=machine_stack, scanner=scanner, aws_secret=scanner.add("AWS secret", secrets.token_urlsafe(30))
    )
    admin = scanner.add("GitHub token", machine_stack.stack.github.token)
    scanner.add("App key", private)
    refused = scanner.add("refused token", f"ghp_{secrets.token_hex(18)}")
    page = scanner.add("dashboard token", secrets.token_urlsafe(24))
    key_file = tmp_path / "app.pem"
    key_file.write_text(private)
    async with machine_stack.github() as github:
        await github.change_settings(app_id=APP_ID, app_key=public, app_owners=[SCOPE.partition("/")[0]])
        own = scanner.add("token of a run", await github.issue_token())
    scope = ("--github-scope", SCOPE)
    arn = await asyncio.to_thread(machine_stack.stack.put_secret, "canary", json.dumps({"token": admin}))

    with observe_processes() as processes:
        # In every supported way, with both log formats.
        refresh = ("refresh", *scope, *machine_stack.stack.flags())
        await leak_test.remuda(
            *refresh, REMUDA_MARGIN_SEC="0.5", REMUDA_GITHUB_APP_ID=APP_ID, REMUDA_GITHUB_APP_KEY=private
        )
        await leak_test.remuda(
            *refresh, "--log-format", "json", "--json", REMUDA_MARGIN_SEC="0.5", REMUDA_GITHUB_TOKEN=arn
        )
        app = {"REMUDA_GITHUB_APP_ID": APP_ID, "REMUDA_GITHUB_APP_KEY": str(key_file)}
        settings = (sys.executable, "-m", "remuda", "config", "--json")
        await asyncio.gather(
            leak_test.remuda_forked("doctor", "--json", *scope, code=0, **app),
            leak_test.run("remuda config", settings, 0, app | {"REMUDA_GITHUB_TOKEN": admin}),
            run_failing_commands(leak_test, scope, own=own, refused=refused, private=private),
        )
        async with machine_stack.booting(), leak_test.watched_table() as table_leaks:
            await leak_test.remuda(
                *("provision", "--run-id", "1", *scope, "--provision-timeout-sec", "200", "--log-format", "json"),
                REMUDA_GITHUB_TOKEN=own,
            )
            (machine,) = machine_stack.machines.values()
            leak_test.add_role_credentials()
            job = await machine_stack.run_job("1", PRINT_ALL)
            assert job.conclusion == "success", job.log
            leak_test.seen["the log of the job"] = job.log
            leak_test.add_issued_credentials()
            readable = readable_for_jobs(machine, scanner, own)
            await leak_test.remuda("release", "--run-id", "1", "--json")
            jit, readable_then = await run_jit_runner(leak_test, processes, tmp_path, own=own, page=page)
            await leak_test.run_action("release", tmp_path)
            await leak_test.remuda_forked("scale-down", "--dry-run", "--environment", POOL, REMUDA_GITHUB_TOKEN=admin)
        await read_process_with_credentials(leak_test, processes, own)
    leak_test.add_issued_credentials()

    await add_ec2_state(leak_test)
    leak_test.seen["consoles of the machines"] = machine_stack.consoles()
    assert sum("token" in name.lower() for name in scanner.secrets) >= 8, "GitHub issued some"
    assert scanner.find_all(leak_test.seen) == []
    assert table_leaks == []
    assert sorted(readable) == sorted([READABLE_FILE, REGISTRATION]), "the file of this test and nothing unexpected"
    assert READABLE_FILE in readable_then
    assert set(readable_then) <= {READABLE_FILE, REGISTRATION}
    assert scanner.find_all(processes.argv()) == []
    of_jobs = scanner.find_all(processes.environ_of(users_of_sandboxes()))
    assert {leak.name for leak in of_jobs} == {jit}
    # enter_sandbox.py becomes the listener.
    places = [leak.place for leak in of_jobs]
    assert [place for place in places if "Runner.Listener" not in place and "enter_sandbox.py" not in place] == []
    assert {leak.name for leak in scanner.find_all(processes.environ_of({0}))} >= {"token of a run", "AWS secret"}
    async with leak_test.table() as table:
        assert await leak_test.table_leaks(table) == []


async def read_process_with_credentials(leak_test: LeakTest, processes: ObservedProcesses, own: str) -> None:
    """Read a process that has credentials in its environment, as commands have: the scan must find them."""
    environment = {**leak_test.environment, "REMUDA_GITHUB_TOKEN": own}
    process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE, env=environment)
    await asyncio.to_thread(processes.poll)
    await process.communicate(b"")


async def read_processes_of_job(machine: NamespaceMachine, processes: ObservedProcesses) -> None:
    """Read the processes while a job with WAIT_FOR_READING runs."""
    await until(
        lambda: machine.has_sandbox and not machine.run_in_sandbox("test", "-e", JOB_STARTED).returncode,
        within_s=LIMIT_S,
        every_s=0.2,
    )
    await asyncio.to_thread(processes.poll)
    assert machine.run_in_sandbox("touch", PROCESSES_READ).returncode == 0


async def run_jit_runner(
    leak_test: LeakTest, processes: ObservedProcesses, folder: Path, *, own: str, page: str
) -> tuple[str, list[str]]:
    """Run a machine for a single job. All commands that show records run while its record contains its credential.

    Return the name of that credential and the files with credentials that jobs can read.
    """
    stack, scanner = leak_test.stack, leak_test.scanner
    stack.runner.paused = True
    before = set(stack.machines)
    async with asyncio.TaskGroup() as group:
        step = {"github_token": own, "github_scope": SCOPE, "instance_count": "1", "ephemeral": "true"}
        group.create_task(leak_test.run_action("provision", folder, **step))
        await asyncio.wait_for(leak_test.jit_recorded.wait(), LIMIT_S)
        shown = (("status", "--json"), ("explain", "2", "--json"), ("report",))
        await asyncio.gather(*(leak_test.remuda_forked(*command) for command in shown))
        await leak_test.visit_dashboard(page)
        stack.runner.paused = False
    (name,) = set(stack.machines) - before
    (jit,) = (name for name in scanner.secrets if name.startswith(JIT))
    await until(lambda: stack.machines[name].has_sandbox, within_s=LIMIT_S)
    readable = readable_for_jobs(stack.machines[name], scanner, scanner.secrets[jit])
    job, _ = await asyncio.gather(
        stack.run_job("2", WAIT_FOR_READING, PRINT_ALL_BUT_LISTENER),
        read_processes_of_job(stack.machines[name], processes),
    )
    assert job.conclusion == "success", job.log
    leak_test.seen["the log of a job on its own machine"] = job.log
    return jit, readable


async def run_failing_commands(
    leak_test: LeakTest, scope: tuple[str, ...], *, own: str, refused: str, private: str
) -> None:
    """Credentials that are rejected, malformed or part of an error message, and servers that are down."""
    provision = ("provision", "--run-id", "9", *scope)
    broken = private.replace("PRIVATE", "BROKEN")
    unreachable = {"AWS_ENDPOINT_URL_DYNAMODB": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    await asyncio.gather(
        leak_test.remuda_forked(*provision, code=2, REMUDA_GITHUB_TOKEN=refused),
        leak_test.remuda_forked(*provision, "--json", code=2, REMUDA_GITHUB_TOKEN=f"{refused} {refused}"),
        leak_test.remuda_forked(*provision, code=2, REMUDA_GITHUB_APP_ID=APP_ID, REMUDA_GITHUB_APP_KEY=broken),
        leak_test.remuda_forked(*provision, code=4, REMUDA_GITHUB_TOKEN=own, **unreachable),
    )
    async with leak_test.stack.github() as github:
        echo = f"Bad request: Authorization: Bearer {own}; basic {base64.b64encode(own.encode()).decode()}"
        await github.set_fault("status", operation="registration-token", times=None, status=422, message=echo)
        await leak_test.remuda_forked(*provision, "--log-format", "json", code=2, REMUDA_GITHUB_TOKEN=own)
        await github.clear_faults()


async def add_ec2_state(leak_test: LeakTest) -> None:
    """Add launch requests, tags and user data from EC2."""
    ec2 = leak_test.stack.stack.ec2
    async with ec2.client() as client, httpx.AsyncClient(base_url=ec2.url, timeout=LIMIT_S) as http:
        leak_test.seen["requests to EC2"] = (await http.get("/_shim")).text
        leak_test.seen["machines on EC2"] = str(await client.describe_instances())
        versions = await client.describe_launch_template_versions(
            LaunchTemplateName=f"remuda-{POOL}", Versions=["$Latest", "$Default"]
        )
    for number, version in enumerate(versions["LaunchTemplateVersions"]):
        data = version["LaunchTemplateData"]["UserData"]
        leak_test.seen[f"launch template {number}"] = f"{version} {decode_user_data(data)}"
