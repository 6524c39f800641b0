"""The whole AWS backend for the installed command: DynamoDB, SQS, EC2 and GitHub servers on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cli import run_cli
from tests.support.moto_server import MotoServer
from tests.support.servers import ministack

#: Generous: nothing waits for it unless something is broken.
LIMIT_S = 240
SCOPE = "octo/repo"


@dataclass(frozen=True)
class Cloud:
    environment: dict[str, str]
    launch: dict[str, str]
    ec2: MotoServer

    def remuda(self, *arguments: str, pool: str = "test", **changed: str) -> tuple[int, Any]:
        done = run_cli(
            [*arguments, "--backend", "aws", "--pool", pool, "--json"],
            environment={**self.environment, **changed},
            timeout_s=LIMIT_S,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.code, json.loads(done.stdout)

    def flags(self) -> list[str]:
        return [word for name, value in self.launch.items() for word in (f"--{name}", value)]

    def refresh(self, *more: str, **changed: str) -> tuple[int, Any]:
        times = ("--provision-timeout-sec", "6", "--margin-sec", "0.5", "--gone-after-sec", "1")
        return self.remuda("refresh", "--github-scope", SCOPE, *self.flags(), *times, *more, **changed)


@contextmanager
def aws_cloud(folder: Path) -> Iterator[Cloud]:
    github = [sys.executable, "-m", "remuda.fake_github", "--dir", str(folder / "github")]
    with ministack(folder) as server, subprocess.Popen(github, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http")
        endpoint = json.loads((folder / "github" / "endpoint.json").read_text())
        ec2 = MotoServer()
        try:
            yield Cloud(
                environment={
                    "PATH": os.environ["PATH"],
                    "HOME": str(folder),
                    **server.environment(),
                    **ec2.environment(),
                    "GITHUB_API_URL": endpoint["url"],
                    "REMUDA_GITHUB_TOKEN": endpoint["token"],
                    "REMUDA_CONFIG": os.devnull,
                },
                launch=asyncio.run(_options(ec2)),
                ec2=ec2,
            )
        finally:
            ec2.stop()
            process.terminate()


async def _options(ec2: MotoServer) -> dict[str, str]:
    async with ec2.client() as client:
        return await ec2.launch_options(client)
