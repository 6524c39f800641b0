"""The path of a new user: deploy, workflows through the broker and without it, jobs, an upgrade, and destroy.

Machines run the user data, the agent's bundle and the sandboxes of a real pool in namespaces of this computer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from remuda.fake_github.oidc import ISSUER_PATH
from tests.support.action_steps import REPOSITORY, ActionResult
from tests.support.aws.deployed_pool import ACCOUNT, DeployedPool, PastedWorkflow, deployed_pool, loopback_url
from tests.support.aws.deployment import MARK, EmptyAccount, empty_account
from tests.support.aws.ec2_machines import MachineStack, machine_bucket, until
from tests.support.aws.stack import SCOPE
from tests.support.bundle_builds import shared_bundles
from tests.support.fake_s3 import FakeS3
from tests.support.namespace_machine.requirements import unsupported_reason

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason()),
    # It may build the bundles first.
    pytest.mark.timeout(900),
]

POOL = "ci"
AGENT = f"remuda-{POOL}-agent"
#: A job step that lasts until somebody ends it.
STARTED, END = "/var/lib/started", "/var/lib/end"
WAIT = f"sudo touch {STARTED}; until [ -e {END} ]; do sleep 0.1; done; echo finished"


@pytest.fixture
def account(machine_stack: MachineStack) -> Iterator[EmptyAccount]:
    # A stock image, without an agent.
    (machine_stack.folder / "image" / "bin" / "remuda").unlink()
    with empty_account(machine_stack.stack) as made:
        yield made


@pytest.fixture
def bucket(machine_stack: MachineStack) -> Iterator[FakeS3]:
    with machine_bucket(machine_stack, AGENT) as made:
        yield made


@pytest.fixture
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_bundles(tmp_path_factory)


class NewUser:
    """The commands and workflows of the user."""

    def __init__(self, stack: MachineStack, account: EmptyAccount) -> None:
        self.stack = stack
        self.account = account

    async def remuda(self, *arguments: str) -> dict[str, Any]:
        command = partial(self.account.remuda_command, REMUDA_SOURCE_REPOSITORY=REPOSITORY)
        result = await asyncio.to_thread(command, *arguments, "--pool", POOL, "--yes", "--json")
        assert result.code == 0, f"{arguments} {result.stderr} {self.stack.consoles()}"
        document: dict[str, Any] = result.document
        return document

    async def step(self, run: PastedWorkflow, job: str, **inputs: str) -> ActionResult:
        """A job on a hosted runner that must succeed without warnings."""
        result = await asyncio.to_thread(run.run_hosted, job, **inputs)
        assert result.code == 0, f"{result.log} {self.stack.consoles()}"
        assert not result.annotations("error") + result.annotations("warning")
        return result

    async def registrations(self) -> list[str]:
        async with self.stack.github() as github:
            return [runner.name for runner in await github.runners()]

    async def machine_states(self) -> dict[str, str]:
        return await asyncio.to_thread(self.account.machines, POOL)

    def mark_of(self, instance_id: str) -> str:
        """The mark of the agent's bundle that the machine has installed."""
        return self.stack.machines[instance_id].run("cat", f"/opt/remuda/{MARK}").stdout


def ids(result: ActionResult) -> list[str]:
    found: list[str] = json.loads(result.outputs["instance-ids"])
    return found


async def test_new_user_deploys_runs_workflows_upgrades_and_destroys(
    release: Path, machine_stack: MachineStack, account: EmptyAccount, bucket: FakeS3
) -> None:
    with loopback_url(machine_stack.stack.github.url) as issuer_url:
        user = NewUser(machine_stack, account)
        deployed = await user.remuda(
            *("deploy", "--github-scope", SCOPE, "--ami", account.stack.launch["ami"]),
            *("--oidc-issuer", f"{issuer_url}{ISSUER_PATH}"),
            *("--dist", str(await asyncio.to_thread(account.bundles_of, release, "first"))),
        )
        assert {item["status"] for item in deployed["doctor"]} == {"ok"}, deployed["doctor"]
        with deployed_pool(account, POOL, issuer_url) as pool:
            await asyncio.to_thread(pool.load_broker)
            await asyncio.to_thread(pool.fill_bucket, bucket)
            role = {"sts_url": account.stack.store.url, "role": f"arn:aws:iam::{ACCOUNT}:role/{AGENT}"}
            async with machine_stack.booting(**role, AWS_ENDPOINT_URL_S3=bucket.url):
                await use_and_upgrade(user, pool, deployed, bucket, release)
                destroyed = await user.remuda("destroy")
    assert f"stack remuda-{POOL}" in destroyed["deleted"]
    assert await asyncio.to_thread(account.resources, POOL) == []
    assert await asyncio.to_thread(account.call, "iam", identities) == []
    assert set((await user.machine_states()).values()) == {"terminated"}
    assert await user.registrations() == []


async def identities(iam: Any) -> list[str]:
    """Policies and identity providers of the account."""
    policies = (await iam.list_policies(Scope="Local"))["Policies"]
    providers = (await iam.list_open_id_connect_providers())["OpenIDConnectProviderList"]
    return [item["Arn"] for item in (*policies, *providers)]


async def use_and_upgrade(
    user: NewUser, pool: DeployedPool, deployed: dict[str, Any], bucket: FakeS3, release: Path
) -> None:
    account, stack = user.account, user.stack
    # The workflow as `deploy` prints it, with a second machine.
    workflow = deployed["workflow"].replace('instance-count: "1"', 'instance-count: "2"')
    run = PastedWorkflow(pool, workflow, "101", pool.broker_environment())
    created = await user.step(run, "provision")
    assert (created.outputs["created"], created.outputs["reused"]) == ("2", "0")
    machines = ids(created)
    assert {user.mark_of(each) for each in machines} == {"first"}
    job = await stack.run_job("101", *run.commands("test"), label=run.label("test"))
    assert (job.conclusion, "Hello from" in job.log) == ("success", True), job.log
    await user.step(run, "release")
    assert await user.registrations() == []

    # Without the broker, with a role of the user's.
    policy = deployed["outputs"]["ProvisionPolicyArn"]
    own_role = await asyncio.to_thread(pool.create_role, "own", like=f"remuda-{POOL}-workflow", policy=policy)
    workflow = deployed["workflow"].replace(deployed["outputs"]["WorkflowRoleArn"], own_role)
    direct = direct_inputs(release)
    run = PastedWorkflow(pool, workflow, "102", pool.direct_environment())
    reused = await user.step(run, "provision", **direct)
    assert (reused.outputs["created"], reused.outputs["reused"]) == ("0", "1")
    (busy,) = ids(reused)
    (idle,) = set(machines) - {busy}
    running = asyncio.create_task(stack.run_job("102", WAIT, label=run.label("test")))
    await until(lambda: is_started(stack, busy), "the job runs")

    # Another version, and another setting.
    upgraded = await user.remuda(
        *("deploy", "--max-uses", "7"),
        *("--dist", str(await asyncio.to_thread(account.bundles_of, release, "second"))),
    )
    changed = {item["resource"] for item in upgraded["changes"] if item["change"] == "change"}
    assert changed == {"Settings", "BrokerFunction", "RefreshFunction", "ScaleDownFunction"}, upgraded["changes"]
    assert upgraded["refresh"]["changes"]["max-uses"] == [50, 7]
    assert sorted(upgraded["drained"]) == sorted(machines)
    states = await user.machine_states()
    assert (states[idle], states[busy]) == ("terminated", "running")
    stack.machines[busy].run_in_sandbox("touch", END)
    job = await running
    assert (job.conclusion, "finished" in job.log) == ("success", True), job.log
    await user.step(run, "release", **direct)
    await asyncio.to_thread(pool.delete_role, "own", policy=policy)

    # The new version of everything.
    await asyncio.to_thread(pool.load_broker)
    await asyncio.to_thread(pool.fill_bucket, bucket)
    run = PastedWorkflow(pool, upgraded["workflow"], "103", pool.broker_environment())
    created = await user.step(run, "provision")
    assert (created.outputs["created"], created.outputs["reused"]) == ("1", "0")
    assert {user.mark_of(each) for each in ids(created)} == {"second"}
    job = await stack.run_job("103", *run.commands("test"), label=run.label("test"))
    assert job.conclusion == "success", job.log
    await user.step(run, "release")


def direct_inputs(release: Path) -> dict[str, str]:
    (bundle,) = release.glob("remuda-direct-*.tar.gz")
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
    return {"direct": "true", "direct_bundle": str(bundle), "direct_bundle_sha256": digest}


def is_started(stack: MachineStack, instance_id: str) -> bool:
    machine = stack.machines[instance_id]
    return machine.has_sandbox and machine.run_in_sandbox("test", "-e", STARTED).returncode == 0
