"""All that a pool on AWS talks to, on this machine: DynamoDB, SQS, EC2 and a local GitHub; and commands on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from remuda.adapters.system.clock import SystemClock
from remuda.fake_github import Endpoint, read_endpoint
from remuda.fake_github.client import FakeGitHubClient
from tests.support.cli import run_cli
from tests.support.moto_server import MotoServer
from tests.support.servers import Ministack, ServerProblem, die_with_parent, ministack

#: Generous: nothing waits for it unless something is broken.
LIMIT_S = 240.0
CHUNK = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Done:
    code: int
    document: dict[str, Any]
    told: str


@dataclass(frozen=True, kw_only=True)
class AwsServers:
    """The servers, and the environment that leads a process there and nowhere else."""

    folder: Path
    store: Ministack
    ec2: MotoServer
    github: Endpoint
    #: What an operator would give `refresh`: image, subnets, group, profile.
    launch: dict[str, str]

    def environment(self, **changed: str) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.folder),
            **self.store.environment(),
            **self.ec2.environment(),
            "GITHUB_API_URL": self.github.url,
            "REMUDA_GITHUB_TOKEN": self.github.token,
            "REMUDA_CONFIG": os.devnull,
            "REMUDA_BACKEND": "aws",
            **changed,
        }

    def flags(self) -> list[str]:
        return [word for name, value in self.launch.items() for word in (f"--{name}", value)]

    def sim(self) -> FakeGitHubClient:
        return FakeGitHubClient(self.github.url, self.github.token)


async def remuda(
    *arguments: str,
    environment: Mapping[str, str],
    say: Callable[[str], None] | None = None,
    for_people: bool = False,
) -> Done:
    """A command, with its document or `for_people` what they see; interrupted, and waited for, when cancelled."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "remuda", *arguments, *(() if for_people else ("--json",))),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environment),
        # Interrupted below, and once.
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            out, told = await asyncio.gather(
                _lines(process.stdout, say if for_people else None), _lines(process.stderr, say)
            )
            code = await process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await process.wait()
        raise
    document = json.loads(out) if out.strip() and not for_people else {}
    return Done(code=code, document=document, told=told)


#: Their own threads: the loop's few are for those who must not wait for a command.
_COMMANDS = ThreadPoolExecutor(64)


async def forked(*arguments: str, environment: Mapping[str, str]) -> Done:
    """As `remuda`, for many commands: none of them imports AWS's libraries anew."""
    given = [*arguments, "--json"]
    work = partial(run_cli, given, environment=environment, timeout_s=LIMIT_S)
    done = await asyncio.get_running_loop().run_in_executor(_COMMANDS, work)
    document = json.loads(done.stdout) if done.stdout.strip() else {}
    return Done(code=done.code, document=document, told=done.stderr)


async def _lines(stream: asyncio.StreamReader | None, say: Callable[[str], None] | None) -> str:
    kept, rest = "", ""
    while stream is not None and (chunk := await stream.read(CHUNK)):
        text = chunk.decode(errors="replace")
        kept += text
        *lines, rest = (rest + text).split("\n")
        for line in lines if say else ():
            say(line.rstrip())  # type: ignore[misc]  # there are none without it
    return kept


@contextmanager
def _local_github(folder: Path) -> Iterator[Endpoint]:
    with subprocess.Popen(
        [sys.executable, "-m", "remuda.fake_github", "--dir", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - no threads yet
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        endpoint = read_endpoint(folder)
        try:
            if not said.startswith("http") or endpoint is None:
                raise ServerProblem("the local GitHub did not start")
            yield endpoint
        finally:
            process.terminate()


@contextmanager
def aws_servers(folder: Path) -> Iterator[AwsServers]:
    """Started before any event loop, gone after it."""
    folder.mkdir(parents=True, exist_ok=True)
    # Records expire by the servers' clock: it is the real one here.
    with ministack(folder, starts_at=SystemClock().now()) as store, _local_github(folder / "github") as github:
        ec2 = MotoServer()
        try:
            launch = asyncio.run(_launch_options(ec2))
            yield AwsServers(folder=folder, store=store, ec2=ec2, github=github, launch=launch)
        finally:
            ec2.stop()


async def _launch_options(ec2: MotoServer) -> dict[str, str]:
    async with ec2.client() as client:
        return await ec2.launch_options(client)


def settings_of(**seconds: float) -> Sequence[str]:
    """Flags of refresh: `margin_sec=0.5` and the like."""
    return [word for name, value in seconds.items() for word in (f"--{name.replace('_', '-')}", f"{value:g}")]
