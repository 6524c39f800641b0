"""The broker of a pool on the Lambda test server, and workflow jobs that use it through the action."""

from __future__ import annotations

import asyncio
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from remuda.deployment.policies import workflow
from remuda.deployment.statements import fill_placeholders
from tests.support.action_steps import ActionJob, copy_action
from tests.support.aws.lambda_server import AssumedRole, LambdaFunction, LambdaServer, lambda_server
from tests.support.aws.servers import REGION
from tests.support.aws.stack import SCOPE, AwsStack
from tests.support.iam import ACCOUNT

HANDLER = "remuda.aws_lambda.broker.handler"
#: Programs besides the shell that the step uses: curl and coreutils.
PROGRAMS = ("bash", "base64", "cat", "curl", "mktemp", "rm", "sleep", "tr")


@dataclass(kw_only=True)
class BrokerStack:
    """A pool whose workflows provision through its broker."""

    stack: AwsStack
    pool: str
    action: Path
    folder: Path
    server: LambdaServer
    function: LambdaFunction
    #: May invoke the broker and nothing else.
    role: AssumedRole

    def __post_init__(self) -> None:
        self._numbers = count(1)

    def token_variables(self, run_id: str, **claims: str) -> dict[str, str]:
        """The variables of a job with the permission `id-token: write`."""

        async def permit() -> dict[str, str]:
            async with self.stack.github_client() as github:
                return await github.permit_id_tokens(**{"repository": SCOPE, "run_id": run_id, **claims})

        return asyncio.run(permit())

    def job(self, run_id: str, *, head_repository: str = "", **variables: str) -> ActionJob:
        """A job on a hosted runner, with the credentials of the workflow role. Only the broker's server is known."""
        environment = {
            "PATH": str(program_folder(self.folder / "programs")),
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL_LAMBDA": self.server.url,
            **self.role.environment(),
            "GITHUB_REPOSITORY": SCOPE,
            "GITHUB_EVENT_NAME": "push",
            "GITHUB_RUN_ID": run_id,
            "GITHUB_RUN_ATTEMPT": "1",
            **variables,
        }
        folder = self.folder / f"job-{next(self._numbers)}"
        # A step that is not given a token gets none.
        return ActionJob(
            action=self.action,
            folder=folder,
            tools=self.folder / "tools",
            environment={name: value for name, value in environment.items() if value},
            head_repository=head_repository,
        )

    def add_function(self, pool: str, **changed: str) -> LambdaFunction:
        """Another function of this package."""
        function = LambdaFunction(
            name=f"remuda-{pool}-broker",
            handler=HANDLER,
            environment={**self.function.environment, **changed},
            folder=self.function.folder,
        )
        return self.server.add(function)


def program_folder(folder: Path) -> Path:
    """A search path with the programs that the step requires, and no others."""
    if not folder.exists():
        folder.mkdir()
        for name in PROGRAMS:
            found = shutil.which(name)
            assert found, f"{name} is not installed"
            (folder / name).symlink_to(found)
    return folder


def workflow_role(pool: str, key: str = "ASIAWORKFLOW") -> AssumedRole:
    policy = fill_placeholders(workflow(), pool=pool, account=ACCOUNT, region=REGION)
    return AssumedRole(
        key=key,
        secret=f"{key}-secret/" * 3,
        # As long as real ones, with the characters of base64.
        session_token="FwoGZXIvYXdzE" + f"{key}+/" * 40 + "==",
        policy=policy,
    )


@contextmanager
def broker_stack(stack: AwsStack, pool: str, package: Path) -> Iterator[BrokerStack]:
    """Configure the pool and start its broker from the bundle of the Lambda functions."""
    code, refreshed = stack.refresh(pool=pool)
    assert code == 0, refreshed
    task = stack.folder / f"broker-{pool}" / "task"
    with zipfile.ZipFile(package) as archive:
        archive.extractall(task)
    with start_broker(stack, pool, task=str(task)) as started:
        yield started


@contextmanager
def start_broker(stack: AwsStack, pool: str, *, scope: str = SCOPE, task: str = "") -> Iterator[BrokerStack]:
    """Start the broker of a configured pool from the folder `task`, or with the packages of this Python."""
    folder = stack.folder / f"broker-{pool}"
    with lambda_server(folder) as server:
        function = server.add(
            LambdaFunction(
                name=f"remuda-{pool}-broker",
                handler=HANDLER,
                environment={
                    **stack.environment(REMUDA_GITHUB_TOKEN=""),
                    "REMUDA_POOL": pool,
                    "REMUDA_GITHUB_SCOPE": scope,
                    "REMUDA_REPOSITORIES": scope,
                    "REMUDA_OIDC_ISSUER": f"{stack.github.url}/_services/token",
                },
                folder=task,
                timeout_s=60.0,
                has_url=True,
            )
        )
        yield BrokerStack(
            stack=stack,
            pool=pool,
            action=copy_action(folder / "action"),
            folder=folder,
            server=server,
            function=function,
            role=server.assume(workflow_role(pool)),
        )
