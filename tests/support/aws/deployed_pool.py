"""A pool that `remuda deploy` created, as its workflows and machines use it.

The Lambda server runs the code and the configuration of the deployed functions, credentials have the policies of the
deployed roles, and machines download what their role may read of the deployed bucket. Nothing is copied from the
source code of the template, so a mistake in it is not hidden.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import secrets
import zipfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jwt
import yaml
from anyio.from_thread import start_blocking_portal

from remuda import __version__
from remuda.deployment.resources import AUDIENCE
from remuda.deployment.workflow import CONFIGURE_CREDENTIALS
from remuda.fake_github.client import FakeGitHubClient
from remuda.fake_github.oidc import ISSUER_PATH
from tests.support.action_steps import REPOSITORY, ActionJob, ActionResult, copy_action
from tests.support.aws.deployment import EmptyAccount
from tests.support.aws.lambda_server import AssumedRole, AwsError, LambdaFunction, LambdaServer, lambda_server
from tests.support.aws.servers import LOOPBACK, REGION
from tests.support.aws.stack import SCOPE
from tests.support.broker import program_folder
from tests.support.fake_s3 import FakeS3
from tests.support.iam import IamRequest, allows

#: The account of ministack's resources.
ACCOUNT = "000000000000"
_OUTPUT = re.compile(r"\$\{\{ ((?:steps|needs)\.[\w-]+)\.outputs\.([\w-]+) \}\}")


@asynccontextmanager
async def _forwarder(url: str) -> AsyncIterator[str]:
    target = urlsplit(url)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        others = await asyncio.open_connection(target.hostname, target.port)
        await asyncio.gather(copy(reader, others[1]), copy(others[0], writer))

    async with await asyncio.start_server(connect, LOOPBACK, 0) as server:
        yield f"http://{LOOPBACK}:{server.sockets[0].getsockname()[1]}"


@contextmanager
def loopback_url(url: str) -> Iterator[str]:
    """Another URL of a server: an issuer of tokens must be at loopback, or use TLS, which the local GitHub has not."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(_forwarder(url)) as made:
        yield made


@dataclass(kw_only=True)
class DeployedPool:
    account: EmptyAccount
    #: The local GitHub as the issuer of tokens.
    issuer_url: str
    pool: str
    server: LambdaServer
    action: Path
    folder: Path
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def broker_name(self) -> str:
        return f"remuda-{self.pool}-broker"

    def new_folder(self, name: str) -> Path:
        return self.folder / f"{name}-{next(self._numbers)}"

    def broker_environment(self) -> dict[str, str]:
        """A hosted runner that reaches nothing of AWS but Lambda."""
        return {"PATH": str(program_folder(self.folder / "programs")), "AWS_ENDPOINT_URL_LAMBDA": self.server.url}

    def direct_environment(self) -> dict[str, str]:
        """A hosted runner that reaches all services, without credentials."""
        given = self.account.environment()
        secret = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "REMUDA_GITHUB_TOKEN")
        return {name: value for name, value in given.items() if name not in secret}

    # Functions

    def load_broker(self) -> LambdaFunction:
        """Run the broker's current code and configuration on the Lambda server."""

        async def describe(client: Any) -> Any:
            return await client.get_function(FunctionName=self.broker_name)

        found = self.account.call("lambda", describe)
        configuration = found["Configuration"]
        task = self.new_folder("task")
        # The server assumes that it is at localhost.
        path = urlsplit(found["Code"]["Location"])._replace(scheme="", netloc="").geturl()
        code = httpx.get(f"{self.account.stack.store.url}{path}", trust_env=False).raise_for_status().content
        zipfile.ZipFile(io.BytesIO(code)).extractall(task)
        return self.server.add(
            LambdaFunction(
                name=configuration["FunctionName"],
                handler=configuration["Handler"],
                # Lambda sets the credentials of the function's role and the region. The code sets the endpoints.
                environment={
                    **configuration["Environment"]["Variables"],
                    "AWS_ACCESS_KEY_ID": "test",
                    "AWS_SECRET_ACCESS_KEY": "test",
                    "AWS_REGION": REGION,
                },
                folder=str(task),
                timeout_s=configuration["Timeout"],
            )
        )

    # Roles

    def policies_of(self, role: str) -> list[Mapping[str, Any]]:
        """The documents of the policies that are attached to a role."""

        async def read(iam: Any) -> list[Mapping[str, Any]]:
            attached = (await iam.list_attached_role_policies(RoleName=role))["AttachedPolicies"]
            documents = []
            for each in attached:
                arn = each["PolicyArn"]
                version = (await iam.get_policy(PolicyArn=arn))["Policy"]["DefaultVersionId"]
                found = await iam.get_policy_version(PolicyArn=arn, VersionId=version)
                documents.append(found["PolicyVersion"]["Document"])
            return documents

        return self.account.call("iam", read)

    def create_role(self, name: str, *, like: str, policy: str) -> str:
        """A role of the user's with the trust policy of another one and this policy. Returns its ARN."""

        async def create(iam: Any) -> str:
            trust = (await iam.get_role(RoleName=like))["Role"]["AssumeRolePolicyDocument"]
            role = await iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(trust))
            await iam.attach_role_policy(RoleName=name, PolicyArn=policy)
            return str(role["Role"]["Arn"])

        return self.account.call("iam", create)

    def delete_role(self, name: str, *, policy: str) -> None:
        async def delete(iam: Any) -> None:
            await iam.detach_role_policy(RoleName=name, PolicyArn=policy)
            await iam.delete_role(RoleName=name)

        self.account.call("iam", delete)

    def assume_role(self, arn: str, token: str) -> AssumedRole:
        """Like STS' AssumeRoleWithWebIdentity: the provider must know the token, and the role trust its claims."""
        name = arn.rpartition("/")[2]

        async def read(iam: Any) -> tuple[Any, Any]:
            role = (await iam.get_role(RoleName=name))["Role"]
            (statement,) = role["AssumeRolePolicyDocument"]["Statement"]
            federated = statement["Principal"]["Federated"]
            return role, await iam.get_open_id_connect_provider(OpenIDConnectProviderArn=federated)

        role, provider = self.account.call("iam", read)
        claims = self._verified(token, provider["Url"], provider["ClientIDList"])
        (statement,) = role["AssumeRolePolicyDocument"]["Statement"]
        trust = {key: value for key, value in statement.items() if key != "Principal"}
        policy = {"Version": role["AssumeRolePolicyDocument"]["Version"], "Statement": [{**trust, "Resource": "*"}]}
        # Condition keys have no scheme.
        host = provider["Url"].partition("://")[2]
        context = {f"{host}:{key}": claims[key] for key in ("aud", "sub")}
        request = IamRequest(action="sts:AssumeRoleWithWebIdentity", resource=arn, context=context)
        if role["Arn"] != arn or not allows(policy, request):
            raise AwsError(403, "AccessDenied", f"{arn} does not trust {context}")
        return self.server.assume(
            AssumedRole(
                key=f"ASIA{secrets.token_hex(8).upper()}",
                secret=secrets.token_urlsafe(30),
                session_token=secrets.token_urlsafe(300),
                policy=self.policies_of(name),
            )
        )

    @staticmethod
    def request_token(environment: Mapping[str, str]) -> str:
        """The OIDC token for AWS of a job with these variables."""
        answer = httpx.get(
            environment["ACTIONS_ID_TOKEN_REQUEST_URL"] + f"&audience={AUDIENCE}",
            headers={"Authorization": f"Bearer {environment['ACTIONS_ID_TOKEN_REQUEST_TOKEN']}"},
            trust_env=False,
        )
        return str(answer.raise_for_status().json()["value"])

    def _verified(self, token: str, issuer: str, audiences: list[str]) -> dict[str, Any]:
        url = f"{self.issuer_url}{ISSUER_PATH}"
        assert issuer == url
        keys = jwt.PyJWKSet.from_dict(httpx.get(f"{url}/.well-known/jwks", trust_env=False).json())
        key = keys[jwt.get_unverified_header(token)["kid"]]
        claims: dict[str, Any] = jwt.decode(token, key, algorithms=["RS256"], audience=audiences, issuer=url)
        return claims

    # Bucket

    def fill_bucket(self, s3: FakeS3) -> None:
        """Offer the objects of the deployed bucket that the role of the machines may read."""
        policies = self.policies_of(f"remuda-{self.pool}-agent")

        async def read(client: Any) -> None:
            bucket = f"remuda-{self.pool}-{ACCOUNT}-{REGION}"
            for item in (await client.list_objects_v2(Bucket=bucket))["Contents"]:
                key = item["Key"]
                request = IamRequest(action="s3:GetObject", resource=f"arn:aws:s3:::{bucket}/{key}")
                path = f"/{bucket}/{key}"
                if allows(policies, request) and path not in s3.objects:
                    s3.objects[path] = await (await client.get_object(Bucket=bucket, Key=key))["Body"].read()

        self.account.call("s3", read)


@contextmanager
def deployed_pool(account: EmptyAccount, pool: str, issuer_url: str) -> Iterator[DeployedPool]:
    folder = account.stack.folder / f"pool-{pool}"
    with lambda_server(folder, ACCOUNT) as server:
        yield DeployedPool(
            account=account,
            issuer_url=issuer_url,
            pool=pool,
            server=server,
            action=copy_action(folder / "action"),
            folder=folder,
        )


class PastedWorkflow:
    """One run of a workflow: its jobs on hosted runners, and what the others are."""

    def __init__(self, pool: DeployedPool, workflow: str, run_id: str, environment: Mapping[str, str]) -> None:
        """`environment` is that of a hosted runner: search path and endpoints."""
        self.run_id = run_id
        self._pool = pool
        self._jobs: dict[str, Any] = yaml.safe_load(workflow)["jobs"]
        self._environment = environment
        self._outputs: dict[str, Mapping[str, str]] = {}

    def run_hosted(self, name: str, **inputs: str) -> ActionResult:
        """Run a job on a hosted runner. `inputs` are added to those of the action."""
        job = self._jobs[name]
        assert job["runs-on"] == "ubuntu-latest"
        environment = {
            **self._environment,
            "GITHUB_REPOSITORY": SCOPE,
            "GITHUB_EVENT_NAME": "push",
            "GITHUB_RUN_ID": self.run_id,
            "GITHUB_RUN_ATTEMPT": "1",
        }
        if job["permissions"].get("id-token") == "write":
            environment |= self._token_variables()
        configure, action = job["steps"]
        assert configure["uses"] == CONFIGURE_CREDENTIALS.partition(" #")[0]
        token = self._pool.request_token(environment)
        role = self._pool.assume_role(configure["with"]["role-to-assume"], token)
        environment |= {"AWS_REGION": configure["with"]["aws-region"], **role.environment()}
        assert action["uses"] == f"{REPOSITORY}@v{__version__}"
        step = ActionJob(
            action=self._pool.action,
            folder=self._pool.new_folder("job"),
            tools=self._pool.folder / "tools",
            environment=environment,
        )
        result = step.run(**action["with"], **inputs)
        self._outputs[f"steps.{action.get('id')}"] = result.outputs
        outputs = {key: self._substituted(value) for key, value in job.get("outputs", {}).items()}
        self._outputs[f"needs.{name}"] = outputs
        return result

    def label(self, name: str) -> str:
        """The label of a job that a runner of the pool takes."""
        return self._substituted(self._jobs[name]["runs-on"])

    def commands(self, name: str) -> list[str]:
        return [step["run"] for step in self._jobs[name]["steps"]]

    def _substituted(self, text: str) -> str:
        return _OUTPUT.sub(lambda found: self._outputs[found[1]][found[2]], text)

    def _token_variables(self) -> dict[str, str]:
        async def permit() -> dict[str, str]:
            token = self._pool.account.stack.github.token
            async with FakeGitHubClient(self._pool.issuer_url, token) as github:
                return await github.permit_id_tokens(repository=SCOPE, run_id=self.run_id, event_name="push")

        return asyncio.run(permit())
