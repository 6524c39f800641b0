"""An empty account on the test servers, in which `remuda deploy` creates pools.

EC2 is moto's. All other services are ministack's, whose CloudFormation creates functions that it runs. Service Quotas
is a separate server, because ministack has none.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import aiobotocore

import remuda
from remuda.adapters.system.clock import SystemClock
from remuda.cli.main import main as run_remuda
from remuda.deployment.api import AwsApi
from remuda.deployment.bundles import SUMS, BundleUse, bundle_name
from remuda.deployment.template import GITHUB
from remuda.domain.instance import State
from remuda.ports.compute import POOL_TAG
from tests.support.aws.servers import aws_client
from tests.support.aws.stack import SCOPE, AwsStack
from tests.support.cli import CommandResult, ForkedProcess, run_cli, start_cli
from tests.support.records import birth, instance

T = TypeVar("T")

PACKAGE = Path(remuda.__file__).parent
#: Where the functions find the libraries that a real bundle contains.
LIBRARIES = Path(aiobotocore.__file__).parents[1]
ARCHITECTURE = "x86_64"
#: File in marked bundles.
MARK = "mark"
#: Lists of everything that a pool has: service, operation, list, and the name of an element.
RESOURCES = (
    ("cloudformation", "describe_stacks", "Stacks", "StackName"),
    ("dynamodb", "list_tables", "TableNames", ""),
    ("ec2", "describe_launch_templates", "LaunchTemplates", "LaunchTemplateName"),
    ("ec2", "describe_security_groups", "SecurityGroups", "GroupName"),
    ("events", "list_rules", "Rules", "Name"),
    ("iam", "list_instance_profiles", "InstanceProfiles", "InstanceProfileName"),
    ("iam", "list_roles", "Roles", "RoleName"),
    ("lambda", "list_functions", "Functions", "FunctionName"),
    ("logs", "describe_log_groups", "logGroups", "logGroupName"),
    ("s3", "list_buckets", "Buckets", "Name"),
    ("secretsmanager", "list_secrets", "SecretList", "Name"),
    ("sqs", "list_queues", "QueueUrls", ""),
    ("ssm", "describe_parameters", "Parameters", "Name"),
)


#: Variable with an operation of AWS and a signal: the process gets the signal when it has called the operation.
CUT_AFTER = "REMUDA_TEST_CUT_AFTER"


#: Variable with a file: the command deploys this template.
TEMPLATE_FILE = "REMUDA_TEST_TEMPLATE"


def main(arguments: list[str]) -> int:
    """The `remuda` command, cut after an operation, or with another template. For `start_cli`."""
    if file := os.environ.pop(TEMPLATE_FILE, ""):
        text = Path(file).read_text("utf-8")
        with patch("remuda.deployment.deploy.template", lambda _, issuer: json.loads(text.replace(GITHUB, issuer))):
            return run_remuda(arguments)
    operation, _, number = os.environ.pop(CUT_AFTER).partition(":")
    original = AwsApi._call

    async def call(self: AwsApi, service: str, called: str, parameters: dict[str, Any]) -> dict[str, Any]:
        answer = await original(self, service, called, parameters)
        if called == operation:
            os.kill(os.getpid(), int(number))
        return answer

    with patch.object(AwsApi, "_call", call):
        return run_remuda(arguments)


@dataclass(frozen=True, kw_only=True)
class EmptyAccount:
    stack: AwsStack

    def environment(self, **changed: str) -> dict[str, str]:
        """Variables of a person who deploys, with the services that the functions of the stack use, too."""
        given = self.stack.environment()
        for name in ("AWS_ENDPOINT_URL_IAM", "AWS_ENDPOINT_URL_SSM", "AWS_ENDPOINT_URL_STS", "REMUDA_BACKEND"):
            given.pop(name)
        return {**given, **changed}

    def bundles(self, agent: str = "first") -> Path:
        """Bundles with these functions, and an agent with this content."""
        folder = self.stack.folder / f"bundles-{agent}"
        if not folder.exists():
            folder.mkdir()
            names = {use: folder / bundle_name(use, ARCHITECTURE) for use in BundleUse}
            names[BundleUse.LAMBDA].write_bytes(function_code(self._function_environment()))
            names[BundleUse.AGENT].write_text(agent, encoding="utf-8")
            lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in names.values()]
            (folder / SUMS).write_text("".join(lines), encoding="utf-8")
        return folder

    def bundles_of(self, release: Path, mark: str = "") -> Path:
        """Bundles of a release, whose functions use these servers. `mark` is a text that makes them another version."""
        folder = self.stack.folder / f"bundles-of-{release.name}{mark}"
        folder.mkdir()
        lines = []
        for file in (file for use in BundleUse for file in release.glob(f"remuda-{use}-*")):
            if file.suffix == ".zip":
                with zipfile.ZipFile(file) as archive:
                    files = {item.filename: archive.read(item) for item in archive.infolist()}
                content = zipped({**files, MARK: mark.encode()}, self._function_environment())
            else:
                content = marked_archive(file.read_bytes(), mark)
            (folder / file.name).write_bytes(content)
            lines.append(f"{hashlib.sha256(content).hexdigest()}  {file.name}\n")
        (folder / SUMS).write_text("".join(lines), encoding="utf-8")
        return folder

    def _function_environment(self) -> dict[str, str]:
        """Endpoints that the functions cannot know: ministack gives them its own for every service."""
        known = self.environment()
        return {name: known[name] for name in known if name.startswith("AWS_ENDPOINT_URL")}

    def arguments(self, *more: str, pool: str, agent: str = "first") -> list[str]:
        flags = ("--dist", str(self.bundles(agent)), "--ami", self.stack.launch["ami"], "--github-scope", SCOPE)
        return ["deploy", "--pool", pool, *flags, *more]

    def deploy(self, *more: str, pool: str, agent: str = "first", **variables: str) -> CommandResult:
        arguments = self.arguments("--json", *more, pool=pool, agent=agent)
        return self._run(arguments, variables)

    def destroy(self, *more: str, pool: str, **variables: str) -> CommandResult:
        return self._run(["destroy", "--pool", pool, "--json", *more], variables)

    async def cut(self, arguments: list[str], operation: str, number: int = signal.SIGKILL) -> CommandResult:
        """Run a command that gets this signal once AWS has carried out an operation."""
        environment = self.environment(**{CUT_AFTER: f"{operation}:{number}"})
        command = await start_cli(arguments, environment=environment, cwd=self.stack.folder, program=__name__)
        return await command.result()

    async def deploy_template(self, template: Mapping[str, Any], *more: str, pool: str) -> CommandResult:
        """Deploy another template than that of this version."""
        return await (await self.start_template(template, *more, pool=pool)).result()

    async def start_template(self, template: Mapping[str, Any], *more: str, pool: str) -> ForkedProcess:
        file = self.stack.folder / f"template-{pool}.json"
        file.write_text(json.dumps(template), encoding="utf-8")
        environment = self.environment(**{TEMPLATE_FILE: str(file)})
        arguments = self.arguments("--json", *more, pool=pool)
        return await start_cli(arguments, environment=environment, cwd=self.stack.folder, program=__name__)

    async def start(self, *arguments: str) -> ForkedProcess:
        return await start_cli(arguments, environment=self.environment(), cwd=self.stack.folder)

    def remuda(self, *arguments: str, pool: str, **variables: str) -> CommandResult:
        return self._run([*arguments, "--backend", "aws", "--pool", pool, "--json"], variables)

    def remuda_command(self, *arguments: str, **variables: str) -> CommandResult:
        return self._run(list(arguments), variables)

    def run_on_terminal(self, arguments: list[str], answers: Mapping[str, str], **variables: str) -> tuple[int, str]:
        """Run a command whose input and messages are a terminal, and answer its questions, which begin like this."""
        controller, terminal = os.openpty()
        shown = ""
        with subprocess.Popen(
            [sys.executable, "-m", "remuda", *arguments],
            env=self.environment(**variables),
            stdin=terminal,
            stdout=subprocess.DEVNULL,
            stderr=terminal,
            start_new_session=True,
        ) as process:
            os.close(terminal)
            waiting = dict(answers)
            # A terminal without writers answers with an error.
            with suppress(OSError):
                while text := os.read(controller, 65_536).decode(errors="replace"):
                    shown += text
                    for question in [each for each in waiting if each in shown]:
                        os.write(controller, f"{waiting.pop(question)}\n".encode())
        os.close(controller)
        assert not waiting, shown
        return process.returncode, shown

    def _run(self, arguments: list[str], variables: Mapping[str, str]) -> CommandResult:
        result = run_cli(arguments, environment=self.environment(**variables))
        assert "Traceback" not in result.stderr, result.stderr
        return result

    def call(self, service: str, work: Callable[[Any], Awaitable[T]]) -> T:
        """Call a service directly, from a test without an event loop."""

        async def call() -> T:
            async with aws_client(service, self.stack.ec2.url if service == "ec2" else self.stack.store.url) as client:
                return await work(client)

        return asyncio.run(call())

    def resources(self, pool: str) -> list[str]:
        """Everything in the account with the name of the pool."""

        async def list_all() -> list[str]:
            return [name async for name in self._names() if f"remuda-{pool}" in name or f"remuda/{pool}" in name]

        return asyncio.run(list_all())

    def launch_machines(self, pool: str, *states: State) -> list[str]:
        """Machines with the tag of the pool, and with records in these states."""

        async def launch(ec2: Any) -> list[str]:
            count = len(states)
            answer = await ec2.run_instances(ImageId=self.stack.launch["ami"], MinCount=count, MaxCount=count)
            names = [item["InstanceId"] for item in answer["Instances"]]
            await ec2.create_tags(Resources=names, Tags=[{"Key": POOL_TAG, "Value": pool}])
            return names

        names = self.call("ec2", launch)
        now = SystemClock().now()
        records = [
            instance(
                instance_id=name,
                state=state,
                run_id="" if state is State.IDLE else "77",
                threshold=now + timedelta(seconds=600),
                created_at=now,
            )
            for name, state in zip(names, states, strict=True)
        ]

        async def put(client: Any) -> None:
            store = self.stack.instance_store(client, pool)
            for record in records:
                await store.apply(birth(record))
            await store.close()

        self.call("dynamodb", put)
        return names

    def machines(self, pool: str) -> dict[str, str]:
        """The states of the pool's machines on EC2."""

        async def describe(ec2: Any) -> dict[str, str]:
            filters = [{"Name": f"tag:{POOL_TAG}", "Values": [pool]}]
            pages = ec2.get_paginator("describe_instances").paginate(Filters=filters)
            return {
                item["InstanceId"]: item["State"]["Name"]
                async for page in pages
                for reservation in page["Reservations"]
                for item in reservation["Instances"]
            }

        return self.call("ec2", describe)

    async def _names(self) -> AsyncIterator[str]:
        for service, operation, key, name in RESOURCES:
            url = self.stack.ec2.url if service == "ec2" else self.stack.store.url
            async with aws_client(service, url) as client:
                answer = await getattr(client, operation)()
            for item in answer.get(key) or ():
                yield f"{service} {item[name] if name else item}"


def function_code(environment: Mapping[str, str]) -> bytes:
    """A bundle of the functions with this source code and these variables, without libraries."""
    return zipped(_source(), environment, f"import sys\nsys.path.append({str(LIBRARIES)!r})\n")


def zipped(files: Mapping[str, bytes], environment: Mapping[str, str], more: str = "") -> bytes:
    """An archive of these files. Its package sets the variables when it is imported."""
    start = f"\n{more}import os\nos.environ.update({dict(environment)!r})\n".encode()
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, code in files.items():
            archive.writestr(zipfile.ZipInfo(name), code + (start if name == "remuda/__init__.py" else b""))
    return content.getvalue()


def marked_archive(content: bytes, mark: str) -> bytes:
    """The agent's archive with one more file. With an empty mark it is unchanged."""
    if not mark:
        return content
    files = io.BytesIO(gzip.decompress(content))
    with tarfile.open(fileobj=files, mode="a") as archive:
        entry = tarfile.TarInfo(MARK)
        entry.size = len(mark.encode())
        archive.addfile(entry, io.BytesIO(mark.encode()))
    return gzip.compress(files.getvalue(), compresslevel=1, mtime=0)


@cache
def _source() -> dict[str, bytes]:
    files = sorted(file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {str(file.relative_to(PACKAGE.parent)): file.read_bytes() for file in files}


@contextmanager
def empty_account(stack: AwsStack) -> Iterator[EmptyAccount]:
    # Instance profiles are those of CloudFormation's server.
    stack.ec2.configure(has_iam=False)
    yield EmptyAccount(stack=stack)
