"""The GitHub Action without the broker, run like on a runner against DynamoDB, SQS, EC2 and GitHub servers."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from remuda.ports.machine import StepResult
from tests.support.action_steps import LIMIT_S, REPOSITORY, ActionJob, ActionResult, copy_action
from tests.support.aws.in_process_agents import ThreadedAgents, agents_in_thread
from tests.support.aws.stack import SCOPE, AwsStack
from tests.support.bundle_builds import shared_bundles
from tests.support.tls_server import TlsFileServer

POOL = "actions"
AWS_SECRET = "aws-s3cret-for-this-test"
#: Seconds until a runner sends the next signal to a cancelled step, and an allowance for a busy machine.
SIGTERM_AFTER_S = 7.5
BUSY_MACHINE_S = 15.0

#: The first test may build the bundles.
pytestmark = pytest.mark.timeout(600)


@dataclass(kw_only=True)
class ActionRunner:
    """A runner whose workflows use the action."""

    action: Path
    folder: Path
    environment: dict[str, str]
    token: str
    launch: dict[str, str]
    agents: ThreadedAgents
    bundle: Path

    def __post_init__(self) -> None:
        self._numbers = count(1)

    @property
    def direct(self) -> dict[str, str]:
        """The inputs of a step that uses the bundle."""
        digest = hashlib.sha256(self.bundle.read_bytes()).hexdigest()
        step = {"direct": "true", "direct_bundle": str(self.bundle), "direct_bundle_sha256": digest}
        return {**step, "pool": POOL, "aws_region": "eu-central-1"}

    def job(self, run_id: str = "4711", **changed: str) -> ActionJob:
        return ActionJob(
            action=self.action,
            folder=self.folder / f"job-{next(self._numbers)}",
            tools=self.folder / "tools",
            environment={**self.environment, "GITHUB_RUN_ID": run_id, "GITHUB_RUN_ATTEMPT": "1", **changed},
        )

    def use(self, mode: str, *, run_id: str = "4711", **inputs: str) -> ActionResult:
        return self.job(run_id).run(**{"mode": mode, **self.direct, **inputs})

    def refresh(self, job: ActionJob | None = None) -> ActionResult:
        launch = {name.replace("-", "_"): value for name, value in self.launch.items()}
        job = job or self.job()
        return job.run(mode="refresh", **self.direct, github_token=self.token, **launch)

    def hostile_job(self, run_id: str) -> ActionJob:
        """A job whose workspace contains hostile modules and settings."""
        job = self.job(run_id, PYTHONPATH=".")
        for name in ("remuda", "json", "sitecustomize"):
            (job.workspace / f"{name}.py").write_text("raise SystemExit('hacked')\n")
        (job.workspace / "remuda.toml").write_text("not toml")
        return job


@pytest.fixture(scope="module")
def github(stack: AwsStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActionRunner]:
    variables = {
        **stack.environment(),
        # The credential is passed as an input.
        "REMUDA_GITHUB_TOKEN": "",
        "REMUDA_CONFIG": "",
        # The region is passed as an input.
        "AWS_REGION": "",
        "AWS_DEFAULT_REGION": "",
        "AWS_SECRET_ACCESS_KEY": AWS_SECRET,
        "GITHUB_REPOSITORY": SCOPE,
    }
    (bundle,) = shared_bundles(tmp_path_factory).glob("remuda-direct-*.tar.gz")
    with agents_in_thread(stack, POOL) as agents:
        yield ActionRunner(
            action=copy_action(stack.folder / "remuda"),
            folder=stack.folder,
            environment=variables,
            token=stack.github.token,
            launch=stack.launch,
            agents=agents,
            bundle=bundle,
        )


@pytest.fixture(autouse=True)
def agents_run(github: ActionRunner) -> None:
    github.agents.resume()
    github.agents.pool_agents.registration = StepResult(ok=True)


@pytest.fixture(scope="module")
def refreshed(github: ActionRunner) -> ActionResult:
    """The first use on a runner: unpacks the bundle and configures the pool, in a hostile workspace."""
    return github.refresh(github.hostile_job("4711"))


def check_secrets(github: ActionRunner, done: ActionResult) -> None:
    """Secrets are masked before any other output and never shown."""
    assert done.log[0].startswith("::add-mask::")
    for secret in done.masks:
        assert secret not in done.visible_text()


def test_refresh_unpacks_the_bundle_and_configures_the_pool(github: ActionRunner, refreshed: ActionResult):
    assert refreshed.code == 0, refreshed.log
    assert refreshed.log.count("::endgroup::") == 1
    assert len(list(github.folder.joinpath("tools", "remuda").iterdir())) == 1
    assert {github.token, AWS_SECRET} < refreshed.masks
    # Including the two tokens that GitHub created for the pool.
    assert len(refreshed.masks) == 4
    check_secrets(github, refreshed)
    assert refreshed.summary.startswith("### remuda refresh: ")
    assert f"| configuration | tokens for {SCOPE} |" in refreshed.summary
    assert refreshed.outputs == {"label": "", "instance-ids": "", "reused": "", "created": ""}
    assert not refreshed.annotations("error") + refreshed.annotations("warning")


def test_provision_and_release(github: ActionRunner, refreshed: ActionResult):
    first = github.use("provision", run_id="100", instance_count="2", max_runtime_min="5")
    assert first.code == 0, first.log
    ids = json.loads(first.outputs["instance-ids"])
    assert first.outputs == {
        "label": "100",
        "instance-ids": json.dumps(ids),
        "reused": "0",
        "created": "2",
    }
    assert {github.agents.states()[name] for name in ids} == {"running"}
    assert refreshed.masks - {github.token} <= first.masks, "the pool's tokens"
    assert "### remuda provision: 2 runners for run 100" in first.summary
    for name in ids:
        assert f"| {name} | " in first.summary
    assert "| created | " in first.summary
    assert "| intent | " in first.summary
    check_secrets(github, first)

    back = github.use("release", run_id="100")
    assert back.code == 0, back.log
    assert {github.agents.states()[name] for name in ids} == {"idle"}
    assert back.summary.startswith("### remuda release: run 100\n\n2 released, in ")
    check_secrets(github, back)

    again = github.use("provision", run_id="101", instance_count="2", github_token=github.token)
    assert (again.outputs["reused"], again.outputs["created"]) == ("2", "0"), again.log
    assert sorted(json.loads(again.outputs["instance-ids"])) == sorted(ids)
    # The step's credential and the tokens created with it.
    assert github.token in again.masks
    check_secrets(github, again)
    assert github.use("release", run_id="101").code == 0


def test_pull_request_from_a_fork_gets_untrusted_instances(
    github: ActionRunner, refreshed: ActionResult, tmp_path: Path
):
    event = tmp_path / "event.json"
    request = {"number": 12, "head": {"repo": {"full_name": "eve/repo"}}, "base": {"repo": {"full_name": SCOPE}}}
    event.write_text(json.dumps({"pull_request": request, "repository": {"full_name": SCOPE}}))
    event_variables = {"GITHUB_EVENT_NAME": "pull_request_target", "GITHUB_EVENT_PATH": str(event)}
    step = {"mode": "provision", **github.direct}
    refused = github.job("150", **event_variables).run(**step, tier="trusted")
    assert refused.code == 2, refused.log
    (error,) = refused.annotations("error")
    assert error.data.startswith("tier is trusted, but the event is untrusted: pull request #12 from fork eve/repo;")
    assert "omit tier" in error.data

    done = github.job("150", **event_variables).run(**step, ephemeral="true", github_token=github.token)
    assert done.code == 0, done.log
    assert "Tier untrusted: pull request &#35;12 from fork eve/repo<br>They end at " in done.summary
    assert "<br>Ephemeral: each instance" in done.summary
    (name,) = json.loads(done.outputs["instance-ids"])
    # The JIT configuration is masked like a token.
    assert any(len(mask) > 100 for mask in done.masks)
    check_secrets(github, done)
    back = github.use("release", run_id="150", github_token=github.token)
    assert back.code == 0, back.log
    assert "ephemeral" in back.summary
    assert github.agents.states()[name] == "terminating"


def test_cancelled_provision_rolls_back_its_instances(github: ActionRunner, refreshed: ActionResult):
    """One instance from the pool and one new instance do not respond, and the workflow is cancelled."""
    warm = github.use("provision", run_id="200", instance_count="1", resource_class="xlarge")
    assert warm.code == 0, warm.log
    assert github.use("release", run_id="200").code == 0
    (pooled,) = json.loads(warm.outputs["instance-ids"])
    github.agents.pause()
    before = github.agents.states()

    job = github.job("201")
    step = job.start_last(
        mode="provision",
        **github.direct,
        instance_count="2",
        resource_class="xlarge",
        github_token=github.token,
    )
    pid = step.process.pid
    # Both instances are acquired now.
    step.read_until(" claim-won ", " create ")
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    assert arguments[1].startswith("-IS"), "the step's process is Remuda itself"
    assert github.token not in " ".join(arguments)

    os.kill(pid, signal.SIGINT)
    try:
        code = step.finish(SIGTERM_AFTER_S + BUSY_MACHINE_S)
    except subprocess.TimeoutExpired:
        os.kill(pid, signal.SIGKILL)
        code = step.finish(LIMIT_S)
    done = job.end_last(step, code)
    assert done.code == 130, done.log
    states = github.agents.states()
    (created,) = [name for name, state in states.items() if state == "terminating" and name not in before]
    assert states[pooled] == "releasing"
    assert github.agents.provisions("201") == ["released"]

    assert done.summary.startswith("### remuda provision: cancelled\n")
    assert f"| {pooled} | claimed | releasing |" in done.summary
    assert f"| {created} | created | terminating |" in done.summary
    assert done.outputs["label"] == ""
    assert [item.data for item in done.annotations("notice")] == ["interrupted; acquired instances were given back"]
    assert not done.annotations("error")
    check_secrets(github, done)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"instance_count": "1; touch hacked"},
            "instance-count must be an integer from 1 to 1000, got '1; touch hacked'",
        ),
        ({"run_id": "1\n::set-output name=label::evil"}, "run-id is '1\\n::set-output name=label::evil'"),
        (
            {"resource_class": "a,b:c%0A\r\n::add-path::/evil"},
            "resource-class 'a,b:c%0A\\r\\n::add-path::/evil' is not",
        ),
    ],
    ids=["shell", "newline", "escapes"],
)
def test_invalid_input_is_one_annotation_with_the_fix(
    github: ActionRunner, refreshed: ActionResult, inputs: dict[str, str], message: str
):
    job = github.job("300")
    done = job.run(**{"mode": "provision", **github.direct, **inputs})
    assert done.code == 2, done.log
    (error,) = done.annotations("error")
    assert error.data.startswith(message)
    assert {item.name for item in done.commands} <= {"add-mask", "group", "endgroup", "error"}
    assert done.outputs["label"] == ""
    assert "failed" in done.summary
    assert not list(job.workspace.iterdir())
    assert not github.agents.provisions("300")


def test_text_from_an_instance_is_not_executed_as_a_command(github: ActionRunner, refreshed: ActionResult):
    hostile = "no\n::set-output name=label::evil\n  ::add-mask::a\n##[add-path]/evil\r::error::<script>|`x`"
    github.agents.pool_agents.registration = StepResult(ok=False, detail=hostile)
    done = github.use("provision", run_id="400", instance_count="1", resource_class="2xlarge")
    assert done.code == 4, done.log
    (error,) = done.annotations("error")
    assert "/evil" in error.data, "the text is shown"
    assert {item.name for item in done.commands} == {"add-mask", "group", "endgroup", "error"}
    assert "a" not in done.masks
    assert "<script>" not in done.summary
    assert "|`x`" not in done.summary


def test_workspace_files_are_not_executed_or_read(github: ActionRunner, refreshed: ActionResult):
    """A checkout may contain untrusted modules and settings."""
    assert refreshed.code == 0, refreshed.log
    done = github.hostile_job("500").run(mode="release", **github.direct)
    assert done.code == 0, done.log
    assert "nothing to release" in done.summary


def test_unused_input_is_a_warning(github: ActionRunner, refreshed: ActionResult):
    done = github.use("release", run_id="600", idle_time_sec="60")
    assert done.code == 0, done.log
    (warning,) = done.annotations("warning")
    assert warning.data.startswith("mode release does not use idle-time-sec")


def test_missing_python_is_explained(github: ActionRunner):
    done = github.use("release", python="/bin/false")
    assert done.code == 2
    assert "but this bundle needs CPython 3.11" in done.log[-1]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"direct_bundle_sha256": "0" * 64}, "the digest of the bundle is not direct-bundle-sha256"),
        ({"direct_bundle_sha256": ""}, "direct-bundle-sha256 must be the SHA-256 digest"),
        ({"direct_bundle": "/no/such.tar.gz", "direct_bundle_sha256": "1" * 64}, "direct-bundle does not exist"),
        ({"direct_bundle": "http://localhost/b.tar.gz", "direct_bundle_sha256": "1" * 64}, "direct-bundle must be a"),
        ({"direct_bundle": "", "direct_bundle_sha256": ""}, "this version of the action has no bundle"),
        ({"direct": "yes"}, "direct must be true or false"),
        ({"mode": "provison"}, "mode must be provision, release, refresh or scale-down"),
    ],
)
def test_bundle_without_matching_digest_is_not_executed(github: ActionRunner, inputs: dict[str, str], message: str):
    done = github.use(**{"mode": "refresh", **inputs})
    assert done.code == 2, done.log
    (error,) = done.annotations("error")
    assert error.data.startswith(message)
    assert not list((github.folder / "tools" / "remuda").glob("draft*"))


def test_bundle_of_the_release_is_downloaded(github: ActionRunner, refreshed: ActionResult, tmp_path: Path):
    action = copy_action(tmp_path / "action")
    digest = github.direct["direct_bundle_sha256"]
    (action / "deploy" / "action" / "SHA256SUMS").write_text(f"{digest}  {github.bundle.name}\n{'0' * 64}  other\n")
    version = github.bundle.name.split("-")[2]
    path = f"/{REPOSITORY}/releases/download/v{version}/{github.bundle.name}"
    with TlsFileServer(tmp_path, {path: github.bundle}) as server:
        job = ActionJob(
            action=action,
            folder=tmp_path / "job",
            tools=tmp_path / "tools",
            environment={**github.environment, "GITHUB_SERVER_URL": server.url, "CURL_CA_BUNDLE": str(server.ca)},
        )
        done = job.run(mode="release", direct="true", pool=POOL, run_id="700", aws_region="eu-central-1")
    assert done.code == 0, done.log
    assert "nothing to release" in done.summary
    assert [file.name for file in (tmp_path / "tools" / "remuda").iterdir()] == [digest]
