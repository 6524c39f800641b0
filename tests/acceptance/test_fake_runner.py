"""The fake GitHub and the fake runner as real processes."""

import asyncio
import base64
import json
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

import httpx
import pytest

from remuda.adapters.github.client import GitHubClient
from remuda.adapters.github.scale_sets import ScaleSetSource
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.demand import DemandMessage
from remuda.domain.runner_set import RunnerSet
from remuda.fake_github import Endpoint, install_runner, read_endpoint
from remuda.fake_github.client import FakeGitHubClient, FakeGitHubError, JobStep
from remuda.fake_github.fake_runner import VERSION
from remuda.fake_github.fake_runner.credentials import unpack
from remuda.ports.calls import CallCounter

T = TypeVar("T")

REPO = "acme/widgets"
RUNNERS = f"/repos/{REPO}/actions/runners"
#: Generous limit in seconds: reached only if a test fails.
LIMIT_S = 90.0


class FakeGitHubServer:
    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "remuda.fake_github", "--dir", str(self.folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline()
        self.http = httpx.Client(
            base_url=self.endpoint.url,
            headers={"authorization": f"Bearer {self.endpoint.token}"},
            timeout=LIMIT_S * 2,
            trust_env=False,
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process is None:
            return 0
        self.http.close()
        self.process.send_signal(number)
        code = self.process.wait(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return code

    @property
    def endpoint(self) -> Endpoint:
        found = read_endpoint(self.folder)
        assert found is not None
        return found

    def change(self, **settings: Any) -> None:
        self.http.patch("/_admin/settings", json=settings).raise_for_status()

    def token(self, kind: str) -> str:
        return str(self.http.post(f"{RUNNERS}/{kind}").json()["token"])

    def queue(self, *runs: str, labels: tuple[str, ...] = ("warm",), **more: Any) -> int:
        body = {"repo": REPO, "run_id": 7, "name": "build", "labels": labels, **more}
        answer = self.http.post("/_admin/jobs", json={**body, "steps": [{"run": run} for run in runs]})
        assert answer.status_code == 201, answer.text
        return int(answer.json()["id"])

    def job(self, job_id: int, *, since: str) -> dict[str, Any]:
        """Return the job after its status has changed from `since`."""
        query = {"since": since, "wait": str(LIMIT_S)}
        job: dict[str, Any] = self.http.get(f"/_admin/jobs/{job_id}", params=query).json()
        assert job["status"] != since
        return job

    def finished(self, job_id: int) -> dict[str, Any]:
        job = self.job(job_id, since="queued")
        return job if job["status"] == "completed" else self.job(job_id, since="in_progress")

    def running(self, job_id: int) -> None:
        assert self.job(job_id, since="queued")["status"] == "in_progress"

    def until(self, holds: Callable[[dict[str, Any]], bool], name: str = "one") -> dict[str, Any]:
        """Wait until the condition holds for the runner document, which is empty if there is no such runner."""
        query: dict[str, Any] = {"wait": str(LIMIT_S)}
        while True:
            answer = self.http.get("/_admin/runners", params=query).json()
            runner: dict[str, Any] = next((r for r in answer["runners"] if r["name"] == name), {})
            if holds(runner):
                return runner
            assert str(answer["version"]) != query.get("since"), "nothing happened for too long"
            query["since"] = str(answer["version"])

    def rest(self, name: str = "one") -> dict[str, Any] | None:
        runners = self.http.get(RUNNERS, params={"name": name}).json()["runners"]
        return runners[0] if runners else None


class RunnerFolder:
    def __init__(self, folder: pathlib.Path, server: FakeGitHubServer) -> None:
        install_runner(folder)
        self.folder = folder
        self.server = server
        self.home = folder.parent / "home"
        self.home.mkdir(exist_ok=True)
        self.listeners: list[subprocess.Popen[bytes]] = []

    def environment(self, **more: str) -> dict[str, str]:
        # Similar to the environment of the real agent, without a virtual environment.
        base = {"PATH": os.environ["PATH"], "HOME": str(self.home), "RUNNER_ALLOW_RUNASROOT": "1"}
        return {**base, **more}

    def config(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.folder / "config.sh"), *arguments],
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def register(self, *more: str, name: str = "one", labels: str = "warm") -> None:
        done = self.config(
            *("--unattended", "--url", f"{self.server.endpoint.url}/{REPO}", "--no-default-labels"),
            *("--disableupdate", "--name", name, "--labels", labels, *more),
            ACTIONS_RUNNER_INPUT_TOKEN=self.server.token("registration-token"),
        )
        assert done.returncode == 0, done.stdout
        assert "√ Settings Saved." in done.stdout

    def listen(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            listener = subprocess.Popen(
                [str(self.folder / "bin" / "Runner.Listener"), "run", *arguments],
                env=self.environment(**environment),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.listeners.append(listener)
        return listener

    def ready(self, **environment: str) -> subprocess.Popen[bytes]:
        listener = self.listen(**environment)
        self.server.until(lambda runner: bool(runner.get("online")))
        return listener

    @property
    def output(self) -> pathlib.Path:
        return self.folder.parent / "listener.out"

    def close(self) -> None:
        for listener in self.listeners:
            if listener.poll() is None:
                listener.terminate()
                listener.wait(LIMIT_S)


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[FakeGitHubServer]:
    server = FakeGitHubServer(tmp_path / "github")
    server.start()
    # A runner that is delayed on a busy computer keeps its session.
    server.change(liveness_s=LIMIT_S)
    yield server
    server.stop(signal.SIGKILL)


@pytest.fixture
def runner(tmp_path: pathlib.Path, server: FakeGitHubServer) -> Iterator[RunnerFolder]:
    folder = RunnerFolder(tmp_path / "runner", server)
    yield folder
    folder.close()


def test_runner_registers_runs_jobs_and_is_removed(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    runner.register()
    registered = server.rest()
    assert registered is not None
    assert (registered["status"], registered["version"]) == ("offline", None)
    for name in (".runner", ".credentials"):
        assert (runner.folder / name).stat().st_mode & 0o777 == 0o600
    listener = runner.ready()
    good = server.finished(
        server.queue(
            'echo "run $GITHUB_RUN_ID of $GITHUB_REPOSITORY in $PWD"; cat /proc/$PPID/comm',
            'echo "$COLOUR $RUNNER_TRACKING_ID"; touch residue; test -z "$(env | grep ACTIONS_RUNNER_INPUT)"',
            env={"COLOUR": "blue"},
        )
    )
    assert good["conclusion"] == "success"
    assert good["runner_name"] == "one"
    workspace = runner.folder / "_work" / "widgets" / "widgets"
    assert f"run 7 of {REPO} in {workspace}\nRunner.Worker\n" in good["log"]
    # With a predictable value, the worker of one server would kill steps of another.
    assert re.search(r"^blue github_[0-9a-f]{32}$", good["log"], re.MULTILINE)
    assert (workspace / "residue").exists()
    assert list((runner.folder / "_diag").iterdir())
    bad = server.finished(server.queue("echo before", "exit 3", "echo never"))
    assert bad["conclusion"] == "failure"
    assert [step["conclusion"] for step in bad["steps"]] == ["success", "failure", "skipped"]
    assert "exit code 3" in bad["log"]
    removed = runner.config("remove", ACTIONS_RUNNER_INPUT_TOKEN=server.token("remove-token"))
    assert removed.returncode == 0, removed.stdout
    assert server.rest() is None
    assert not (runner.folder / ".runner").exists()
    assert listener.wait(LIMIT_S) == 0
    output = runner.output.read_text()
    lines = ["√ Connected to GitHub", "Z: Listening for Jobs", "Z: Running job: build"]
    lines += ["Z: Job build completed with result: Succeeded", "Z: Job build completed with result: Failed"]
    positions = [output.index(line) for line in lines]
    assert positions == sorted(positions)
    assert "The runner no longer exists on the server." in output


def test_configuration_writes_environment_files(runner: RunnerFolder) -> None:
    (runner.folder / ".env").write_text("LANG=C\n")
    for _ in range(2):
        # actions/runner 2.336.0, src/Misc/layoutroot/env.sh: even if the configuration fails.
        runner.config("--unattended", LANG="de_DE.UTF-8", JAVA_HOME="/java", OTHER="x")
    assert (runner.folder / ".path").read_text() == f"{os.environ['PATH']}\n"
    assert (runner.folder / ".env").read_text() == "LANG=C\nJAVA_HOME=/java\n"


def test_too_old_runner_cannot_register(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    install_runner(runner.folder, version="2.328.0")
    refused = runner.config(
        *("--unattended", "--url", f"{server.endpoint.url}/{REPO}", "--name", "one"),
        ACTIONS_RUNNER_INPUT_TOKEN=server.token("registration-token"),
    )
    assert refused.returncode == 1
    assert "Http response code: NotFound from 'POST " in refused.stdout
    assert "Your runner version is out of date and can no longer register with GitHub." in refused.stdout
    assert "required to register with GitHub Actions is now 2.329.0." in refused.stdout
    assert server.rest() is None


@pytest.mark.parametrize(("opted_in", "code"), [("", 1), ("1", 7)])
def test_deprecated_runner_gets_no_jobs(
    server: FakeGitHubServer, runner: RunnerFolder, opted_in: str, code: int
) -> None:
    runner.register()
    job = server.queue("true")
    server.http.patch("/_admin/settings", json={"oldest_served_version": "2.337.0"}).raise_for_status()
    listener = runner.listen(ACTIONS_RUNNER_RETURN_VERSION_DEPRECATED_EXIT_CODE=opted_in)
    assert listener.wait(LIMIT_S) == code
    output = runner.output.read_text()
    message = "An error occurred: Runner version v2.336.0 is deprecated and cannot receive messages.\n"
    assert output.index("Listening for Jobs") < output.index(message)
    assert server.http.get(f"/_admin/jobs/{job}").json()["status"] == "queued"


def test_second_configuration_is_rejected(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    runner.register()
    again = runner.config("--unattended", "--url", f"{server.endpoint.url}/{REPO}", "--token", "x")
    assert again.returncode == 1
    assert "Cannot configure the runner because it is already configured." in again.stdout


def test_bad_tokens_root_and_existing_names_are_rejected(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    arguments = ("--unattended", "--url", f"{server.endpoint.url}/{REPO}", "--name", "one")
    wrong = runner.config(*arguments, "--token", "wrong")
    assert wrong.returncode == 1
    assert "NotFound" in wrong.stdout
    assert not (runner.folder / ".runner").exists()
    if os.geteuid() == 0:
        refused = runner.config(*arguments, "--token", "x", RUNNER_ALLOW_RUNASROOT="")
        assert (refused.returncode, refused.stdout) == (1, "Must not run with sudo\n")
    token = server.token("registration-token")
    assert runner.config(*arguments, "--token", token).returncode == 0
    (runner.folder / ".runner").unlink()
    taken = runner.config(*arguments, "--token", token)
    assert taken.returncode == 1
    assert "same name" in taken.stdout
    assert runner.config(*arguments, "--token", token, "--replace").returncode == 0
    labels = [label["name"] for label in (server.rest() or {})["labels"]]
    assert labels == ["self-hosted", "Linux", "X64"]


def test_runner_joins_the_group_that_it_names(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    server.change(runner_groups=["warm"])

    def config(group: str) -> subprocess.CompletedProcess[str]:
        token = server.http.post("/orgs/acme/actions/runners/registration-token").json()["token"]
        return runner.config(
            *("--unattended", "--url", f"{server.endpoint.url}/acme", "--name", "one", "--labels", "x"),
            ACTIONS_RUNNER_INPUT_TOKEN=token,
            ACTIONS_RUNNER_INPUT_RUNNERGROUP=group,
        )

    refused = config("cold")
    assert refused.returncode == 1
    assert 'Could not find any self-hosted runner group named "cold".' in refused.stdout
    assert config("Warm").returncode == 0
    (registered,) = server.http.get("/orgs/acme/actions/runners").json()["runners"]
    assert registered["runner_group_id"] == 2


def test_old_enterprise_servers_refuse_runners_without_updates(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    server.change(supports_disable_update=False)
    arguments = (
        "--unattended",
        "--url",
        f"{server.endpoint.url}/{REPO}",
        "--name",
        "one",
        "--labels",
        "x",
        "--replace",
    )
    token = server.token("registration-token")
    refused = runner.config(*arguments, "--disableupdate", ACTIONS_RUNNER_INPUT_TOKEN=token)
    assert refused.returncode == 1
    assert "does not support configuring a self-hosted runner with 'DisableUpdate' flag" in refused.stdout
    assert runner.config(*arguments, ACTIONS_RUNNER_INPUT_TOKEN=token).returncode == 0


def test_removal_without_runner_file_is_local_only(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    runner.register()
    (runner.folder / ".runner").unlink()
    assert runner.config("remove").returncode == 0
    assert not (runner.folder / ".credentials").exists()
    left = server.rest()
    assert left is not None
    runner.register(name="two")
    assert server.http.delete(f"{RUNNERS}/{(server.rest('two') or {})['id']}").status_code == 204
    gone = runner.config("remove", "--token", server.token("remove-token"))
    assert gone.returncode == 0, gone.stdout
    assert not (runner.folder / ".runner").exists()


@pytest.mark.parametrize(
    ("admin_flow", "code", "lines"),
    [
        (False, 0, ["Does not exist. Skipping Removing runner from the server", "√ Runner removed successfully"]),
        (
            True,
            1,
            [
                "Http response code: NotFound from 'Delete {url}/runners/{id}' (Request Id: )",
                "Failed: Removing runner from the server",
                "Response status code does not indicate success: 404 (Not Found).",
            ],
        ),
    ],
)
def test_removal_of_a_registration_that_is_gone(
    server: FakeGitHubServer, runner: RunnerFolder, *, admin_flow: bool, code: int, lines: list[str]
) -> None:
    server.change(use_runner_admin_flow=admin_flow)
    runner.register()
    number = (server.rest() or {})["id"]
    assert server.http.delete(f"{RUNNERS}/{number}").status_code == 204
    done = runner.config("remove", ACTIONS_RUNNER_INPUT_TOKEN=server.token("remove-token"))
    assert done.returncode == code, done.stdout
    url = f"{server.endpoint.url}/api/v3/repos/{REPO}/actions"
    expected = [line.format(url=url, id=number) for line in lines]
    assert [line for line in done.stdout.splitlines() if line in expected] == expected
    assert (runner.folder / ".runner").exists() == admin_flow


@pytest.mark.parametrize("admin_flow", [False, True])
def test_registration_is_removed_by_both_flows(
    server: FakeGitHubServer, runner: RunnerFolder, *, admin_flow: bool
) -> None:
    server.change(use_runner_admin_flow=admin_flow)
    runner.register()
    rejected = runner.config("remove", "--token", "wrong")
    assert rejected.returncode == 1
    assert ("from 'Delete " if admin_flow else "NotFound from 'POST ") in rejected.stdout
    # The runner keeps the flow of its registration.
    server.change(use_runner_admin_flow=not admin_flow)
    done = runner.config("remove", ACTIONS_RUNNER_INPUT_TOKEN=server.token("remove-token"))
    assert done.returncode == 0, done.stdout
    assert "√ Runner removed successfully" in done.stdout
    assert server.rest() is None
    assert not (runner.folder / ".runner").exists()


def test_removal_without_credentials_is_local_only(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    runner.register()
    (runner.folder / ".credentials").unlink()
    done = runner.config("remove", "--token", server.token("remove-token"))
    assert done.returncode == 0
    assert "Cannot connect to server, because config files are missing." in done.stdout
    assert server.rest() is not None


#: Runs a command without the capabilities by which root lists all folders.
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")


def unprivileged() -> tuple[str, ...]:
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed (package util-linux): root could list every folder")
    return UNPRIVILEGED


@pytest.mark.parametrize("command", ["configure", "remove", "run"])
@pytest.mark.parametrize("level", ["", ".."])
def test_unreadable_folder_stops_every_command(runner: RunnerFolder, command: str, level: str) -> None:
    """`IOUtil.ValidateExecutePermission`: a folder that can be entered but not listed is not enough."""
    closed = (runner.folder / level).resolve()
    closed.chmod(0o311)
    try:
        done = subprocess.run(
            [*unprivileged(), str(runner.folder / "bin" / "Runner.Listener"), command],
            env=runner.environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    finally:
        closed.chmod(0o755)
    assert done.returncode == 1
    assert done.stderr == (
        f"An error occurred: Permission to read the directory contents is required for '{runner.folder}' and each "
        f"directory up the hierarchy. Access to the path '{closed}' is denied.\n"
    )


def test_unreadable_work_folder_stops_the_listener(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    work = runner.folder.parent / "closed" / "work"
    work.mkdir(parents=True)
    runner.register("--work", str(work))
    work.parent.chmod(0o311)
    try:
        done = subprocess.run(
            [*unprivileged(), str(runner.folder / "bin" / "Runner.Listener"), "run"],
            env=runner.environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    finally:
        work.parent.chmod(0o755)
    assert (done.returncode, done.stderr) == (
        1,
        f"Fail to create and validate runner's work directory '{work}'.\n",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is refused")
def test_scripts_refuse_root_and_the_listener_does_not(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    runner.register()
    environment = runner.environment(RUNNER_ALLOW_RUNASROOT="")
    for script, code, text in (
        ("config.sh", 1, "Must not run with sudo\n"),
        # Its exit code is that of run.sh, which ends with 0 after any error that is not worth a retry.
        ("run.sh", 0, "Must not run interactively with sudo\nExiting runner...\n"),
    ):
        done = subprocess.run(
            [str(runner.folder / script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert (done.returncode, done.stdout) == (code, text)
    runner.ready(RUNNER_ALLOW_RUNASROOT="")


def test_run_script_ends_without_a_registration(runner: RunnerFolder) -> None:
    done = subprocess.run(
        [str(runner.folder / "run.sh")],
        env=runner.environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (
        0,
        "Runner listener exit with terminated error, stop the service, no retry needed.\nExiting runner...\n",
    )


def test_environment_file_applies_to_every_command(runner: RunnerFolder) -> None:
    """`Program.LoadAndSetEnv`: an empty value removes a variable."""
    (runner.folder / ".env").write_text("ACTIONS_RUNNER_INPUT_URL=http://127.0.0.1:1/o/r\nHOME=\n=x\n")
    done = runner.config("--unattended", "--token", "x")
    assert done.returncode == 1
    assert "Failed to connect." in done.stdout


def test_busy_runner_cannot_be_removed(server: FakeGitHubServer, runner: RunnerFolder, tmp_path: pathlib.Path) -> None:
    runner.register()
    runner.ready()
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job = server.queue(f"cat {gate}")
    server.running(job)
    busy = server.rest()
    assert busy is not None
    assert busy["busy"] is True
    assert server.http.delete(f"{RUNNERS}/{busy['id']}").status_code == 422
    refused = runner.config("remove", "--token", server.token("remove-token"))
    assert refused.returncode != 0
    assert "running a job" in refused.stdout
    assert (runner.folder / ".runner").exists()
    gate.write_text("open\n")
    assert server.finished(job)["conclusion"] == "success"
    server.until(lambda found: found["state"] == "idle")
    assert server.http.delete(f"{RUNNERS}/{busy['id']}").status_code == 204
    server.until(lambda found: found == {})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_job_as_failed(server: FakeGitHubServer, runner: RunnerFolder, number: signal.Signals) -> None:
    runner.register()
    listener = runner.ready()
    job = server.queue("sleep 600")
    server.running(job)
    listener.send_signal(number)
    assert listener.wait(LIMIT_S) == 0
    assert server.finished(job)["conclusion"] == "failure"
    assert not server.until(lambda found: not found["online"])["busy"]
    assert "completed with result: Failed" in runner.output.read_text()


def test_server_cancels_a_job(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    runner.register()
    runner.ready()
    job = server.queue("sleep 600")
    server.running(job)
    server.http.post(f"/_admin/jobs/{job}/cancel")
    assert server.finished(job)["conclusion"] == "cancelled"
    assert server.finished(server.queue("true"))["conclusion"] == "success"


def test_runner_of_a_killed_listener_is_offline_and_busy(
    server: FakeGitHubServer, runner: RunnerFolder, tmp_path: pathlib.Path
) -> None:
    runner.register()
    listener = runner.ready()
    died = tmp_path / "died"
    os.mkfifo(died)
    # The step holds the write end of the fifo, so the read ends when the step's process has ended.
    job = server.queue(f"exec 9> {died}; sleep 600")
    with died.open("rb") as watch:
        server.running(job)
        server.change(liveness_s=0.5)
        listener.kill()
        assert watch.read() == b""
    lost = server.until(lambda found: not found["online"])
    assert lost["busy"]
    found = server.rest()
    assert found is not None
    assert (found["status"], found["busy"]) == ("offline", True)
    assert server.http.delete(f"{RUNNERS}/{lost['id']}").status_code == 422
    server.change(lease_s=0)
    assert server.finished(job)["conclusion"] == "failure"
    assert server.http.delete(f"{RUNNERS}/{lost['id']}").status_code == 204


def test_job_completes_although_its_session_was_lost(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    runner.register()
    listener = runner.ready()
    job = server.queue("sleep 600")
    server.running(job)
    listener.send_signal(signal.SIGSTOP)
    # A runner that cancels a job does not poll, so its session is lost before the job ends.
    server.http.post(f"/_admin/jobs/{job}/cancel")
    server.change(liveness_s=0.1)
    server.until(lambda found: not found["online"])
    server.change(liveness_s=LIMIT_S)
    listener.send_signal(signal.SIGCONT)
    assert server.finished(job)["conclusion"] == "cancelled"
    assert server.finished(server.queue("true"))["conclusion"] == "success"


def test_second_listener_conflicts(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    runner.register()
    runner.ready()
    assert runner.listen(FAKE_RUNNER_SESSION_CONFLICT_S="0.1").wait(LIMIT_S) == 5


def test_jit_runner_runs_one_job(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    body = {"name": "one", "runner_group_id": 1, "labels": ["warm"]}
    jit = server.http.post(f"{RUNNERS}/generate-jitconfig", json=body).json()
    first, second = server.queue("echo first"), server.queue("echo second")
    listener = runner.listen(ACTIONS_RUNNER_INPUT_JITCONFIG=jit["encoded_jit_config"])
    assert server.finished(first)["conclusion"] == "success"
    assert listener.wait(LIMIT_S) == 0
    assert server.rest() is None
    assert server.http.get(f"/_admin/jobs/{second}").json()["status"] == "queued"
    assert not (runner.folder / ".runner").exists()


@pytest.mark.parametrize("is_ephemeral", [True, False])
def test_job_that_is_gone_at_its_acknowledgement_ends_only_an_ephemeral_runner(
    server: FakeGitHubServer, runner: RunnerFolder, *, is_ephemeral: bool
) -> None:
    """RunnerL0.cs and BrokerHttpClientL0.cs of actions/runner 2.336.0."""
    runner.register(*(["--ephemeral"] if is_ephemeral else []))
    listener = runner.ready()
    fault = {"kind": "delay", "operation": "runner.acknowledge", "seconds": LIMIT_S}
    server.http.post("/_admin/faults", json=fault).raise_for_status()
    gone = server.queue("true")
    while server.http.get("/_admin/faults").json()["faults"]:
        # Until the acknowledgement is on its way. It changes no runner, so this waits for the given time.
        since = server.http.get("/_admin/runners").json()["version"]
        server.http.get("/_admin/runners", params={"since": since, "wait": "0.05"})
    server.http.post(f"/_admin/jobs/{gone}/cancel").raise_for_status()
    next_job = server.queue("true")
    server.http.delete("/_admin/faults").raise_for_status()
    if is_ephemeral:
        assert listener.wait(LIMIT_S) == 0
        assert not (runner.folder / ".runner").exists()
        assert "Running job: " not in runner.output.read_text()
        assert server.until(lambda shown: not shown["online"]), "its registration stays, without a session"
    else:
        assert server.finished(next_job)["conclusion"] == "success"
    assert server.http.get(f"/_admin/jobs/{gone}").json()["conclusion"] == "cancelled"


@pytest.mark.parametrize("is_ephemeral", [True, False])
def test_registration_that_vanishes_while_listening_ends_the_runner_without_an_error(
    server: FakeGitHubServer, runner: RunnerFolder, *, is_ephemeral: bool
) -> None:
    """Runner.Listener/Runner.cs, RunAsync, of actions/runner 2.336.0."""
    runner.register(*(["--ephemeral"] if is_ephemeral else []))
    listener = runner.ready()
    server.http.delete(f"{RUNNERS}/{(server.rest() or {})['id']}").raise_for_status()
    assert listener.wait(LIMIT_S) == 0
    shown = runner.output.read_text()
    assert "The runner no longer exists on the server. Cleaning up local configuration.\n" in shown
    assert "√ Removed .runner" in shown
    for name in (".runner", ".credentials", ".credentials_rsaparams"):
        assert not (runner.folder / name).exists()
    assert runner.listen().wait(LIMIT_S) == 1, "it is not configured any more"


@pytest.mark.parametrize("work", ["_work", "../elsewhere/./work", "/absolute"])
def test_jobs_run_in_the_work_folder_of_the_settings(
    server: FakeGitHubServer, runner: RunnerFolder, tmp_path: pathlib.Path, work: str
) -> None:
    """Runner.Common/HostContext.cs, GetDirectory: relative to the runner's folder, unless it is absolute."""
    work = work.replace("/absolute", f"{tmp_path}/absolute")
    body = {"name": "one", "runner_group_id": 1, "labels": ["warm"], "work_folder": work}
    jit = server.http.post(f"{RUNNERS}/generate-jitconfig", json=body).json()
    runner.listen(ACTIONS_RUNNER_INPUT_JITCONFIG=jit["encoded_jit_config"])
    done = server.finished(server.queue("pwd; echo $RUNNER_WORKSPACE"))
    folder = os.path.normpath(runner.folder / work)
    assert done["conclusion"] == "success"
    assert f"{folder}/widgets/widgets\n" in done["log"]
    assert f"{folder}/widgets\n" in done["log"]


class ScaleSetWorld:
    """A scale set of the server, used by the real client."""

    def __init__(self, server: FakeGitHubServer) -> None:
        self._server = server
        self.runner_set = RunnerSet(name="warm", labels=("warm",), resource_class="x", scope=REPO, max=5)
        server.change(message_poll_s=0.05, message_session_s=LIMIT_S)
        self.number = self.run(lambda source: source.create_set(self.runner_set))
        self.session_id = ""
        self.poll()

    def run(self, use: Callable[[ScaleSetSource], Awaitable[T]]) -> T:
        async def connected() -> T:
            endpoint, clock, ids, calls = self._server.endpoint, SystemClock(), SystemIds(), CallCounter()
            github = GitHubClient(api_url=endpoint.url, token=endpoint.token, clock=clock, ids=ids, calls=calls)
            source = ScaleSetSource(github=github, clock=clock, ids=ids, calls=calls)
            try:
                return await use(source)
            finally:
                await source.close()
                await github.close()

        return asyncio.run(connected())

    def poll(self) -> DemandMessage | None:
        """The first message, in the session that the first call opened."""

        async def receive(source: ScaleSetSource) -> DemandMessage | None:
            session = await source.open_session(self.runner_set, self.number, owner="x", session_id=self.session_id)
            assert self.session_id in {"", session.session_id}
            self.session_id = session.session_id
            return await session.receive(last_message_id=0, capacity=5)

        return self.run(receive)

    def register(self, name: str = "one") -> str:
        return self.run(lambda source: source.register(self.runner_set, self.number, name=name)).config


@pytest.mark.parametrize("as_argument", [False, True])
def test_runner_of_a_scale_set_runs_one_job(
    server: FakeGitHubServer, runner: RunnerFolder, *, as_argument: bool
) -> None:
    scale_set = ScaleSetWorld(server)
    first, second = server.queue("echo first"), server.queue("echo second")
    config = scale_set.register()
    given = (("--jitconfig", config), {}) if as_argument else ((), {"ACTIONS_RUNNER_INPUT_JITCONFIG": config})
    listener = runner.listen(*given[0], **given[1])
    assert server.finished(first)["conclusion"] == "success"
    assert listener.wait(LIMIT_S) == 0
    assert server.rest() is None
    assert server.http.get(f"/_admin/jobs/{second}").json()["status"] == "queued"
    for name in (".runner", ".credentials", ".credentials_rsaparams"):
        assert not (runner.folder / name).exists()
    # The configuration is used up.
    assert runner.listen(ACTIONS_RUNNER_INPUT_JITCONFIG=config).wait(LIMIT_S) == 1
    assert "registration has been deleted" in runner.output.read_text()


def test_runner_refuses_a_bad_configuration(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    config = ScaleSetWorld(server).register()
    assert runner.listen("--jitconfig", "no base64!").wait(LIMIT_S) == 1
    assert runner.listen("--jitconfig", config[: len(config) // 4 * 2]).wait(LIMIT_S) == 1
    assert not (runner.folder / ".runner").exists()
    packed = json.loads(base64.b64decode(config))
    del packed[".credentials_rsaparams"]
    incomplete = base64.b64encode(json.dumps(packed).encode()).decode()
    assert runner.listen("--jitconfig", incomplete).wait(LIMIT_S) == 1
    assert "RSA key file" in runner.output.read_text()


def test_runner_refuses_files_that_the_real_one_refuses(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    packed = {name: json.loads(content) for name, content in unpack(ScaleSetWorld(server).register()).items()}
    credentials = packed[".credentials"]
    key = packed[".credentials_rsaparams"]
    no_address = "Value cannot be null. (Parameter 'authorizationUrl')"
    for name, content, text in (
        (".credentials", {**credentials, "Scheme": "Basic"}, "Invalid Credential Type"),
        (".credentials", {**credentials, "Data": {"ClientId": "x", "token": "x"}}, no_address),
        (".credentials_rsaparams", {"exponent": "AQAB", "modulus": "7"}, "Member 'd' was not found."),
        (".credentials_rsaparams", {**key, "d": "7"}, "The input is not a valid Base-64 string."),
        (".runner", {**packed[".runner"], "AgentId": "one"}, 'Error converting value "one" to type'),
        (".runner", {**packed[".runner"], "ServerUrlV2": None}, "ServerUrlV2 is not set"),
    ):
        files = {key: base64.b64encode(json.dumps(each).encode()).decode() for key, each in packed.items()}
        files[name] = base64.b64encode(json.dumps(content).encode()).decode()
        config = base64.b64encode(json.dumps(files).encode()).decode()
        assert runner.listen("--jitconfig", config).wait(LIMIT_S) == 1
        assert f"An error occurred: {text}" in runner.output.read_text()


def test_configuration_refuses_long_labels(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    url, labels = f"{server.endpoint.url}/{REPO}", "warm," + "x" * 257
    refused = runner.config("--unattended", "--url", url, "--token", "x", "--labels", labels)
    assert refused.returncode == 1
    assert "Invalid configuration provided for labels" in refused.stdout


def test_registration_just_in_time_is_not_removed_by_its_folder(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    """Its files name no address on GitHub."""
    for name, content in unpack(ScaleSetWorld(server).register()).items():
        (runner.folder / name).write_bytes(content)
    done = runner.config("remove", "--token", server.token("remove-token"))
    assert (done.returncode, "Failed: Removing runner from the server" in done.stdout) == (1, True)
    assert server.rest() is not None


def test_scale_set_survives_a_kill_of_the_server(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    scale_set = ScaleSetWorld(server)
    job = server.queue("echo done")
    before = scale_set.poll()
    assert before is not None
    config = scale_set.register()
    server.stop(signal.SIGKILL)
    server.start()
    assert scale_set.poll() == before
    runner.listen(ACTIONS_RUNNER_INPUT_JITCONFIG=config)
    assert server.finished(job)["conclusion"] == "success"


@pytest.mark.parametrize(("flags", "code"), [((), 3), (("--ephemeral",), 4)])
def test_runner_updates_itself(
    server: FakeGitHubServer, runner: RunnerFolder, flags: tuple[str, ...], code: int
) -> None:
    server.change(update_runners_to="2.999.0")
    token = server.token("registration-token")
    arguments = ("--unattended", "--url", f"{server.endpoint.url}/{REPO}", "--name", "one", "--labels", "warm", *flags)
    assert runner.config(*arguments, ACTIONS_RUNNER_INPUT_TOKEN=token).returncode == 0
    assert runner.listen().wait(LIMIT_S) == code
    finished = runner.folder / "update.finished"
    assert not finished.exists(), "the update begins when the listener has ended"
    subprocess.run(["sh", "-c", f"until [ -e {finished} ]; do sleep 0.05; done"], check=True, timeout=LIMIT_S)
    runner.listen()
    done = server.finished(server.queue("cat /proc/$PPID/cmdline"))
    assert (done["conclusion"], "/bin.2.999.0/Runner.Worker" in done["log"]) == ("success", True)
    lines = ["Runner update in progress, do not shutdown runner.", "Downloading 2.999.0 runner"]
    lines += ["Runner will exit shortly for update", "Current runner version: '2.999.0'"]
    positions = [runner.output.read_text().index(line) for line in lines]
    assert positions == sorted(positions)


def test_runner_without_updates_does_not_update_itself(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    server.change(update_runners_to="2.999.0")
    runner.register()
    runner.ready()
    assert server.finished(server.queue("true"))["conclusion"] == "success"
    assert (server.rest() or {})["version"] == VERSION


def test_unregistered_runner_does_not_listen(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    assert runner.listen().wait(LIMIT_S) == 1
    assert "Not configured" in runner.output.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_state_survives_a_restart(server: FakeGitHubServer, runner: RunnerFolder, number: signal.Signals) -> None:
    runner.register()
    listener = runner.ready()
    waiting = server.queue("true", labels=("unmatched",))
    before = server.endpoint
    code = server.stop(number)
    assert code == (0 if number is signal.SIGTERM else -number)
    server.start()
    assert (server.endpoint.url, server.endpoint.token) == (before.url, before.token)
    assert server.finished(server.queue("echo again"))["conclusion"] == "success"
    assert listener.poll() is None
    assert server.http.get(f"/_admin/jobs/{waiting}").json()["status"] == "queued"


def test_hooks_and_orphans(server: FakeGitHubServer, runner: RunnerFolder, tmp_path: pathlib.Path) -> None:
    hook = tmp_path / "started.sh"
    hook.write_text('echo "hook of run $GITHUB_RUN_ID.$GITHUB_RUN_ATTEMPT"\ntest ! -e refuse\n')
    runner.register()
    runner.ready(ACTIONS_RUNNER_HOOK_JOB_STARTED=str(hook))
    died = tmp_path / "died"
    os.mkfifo(died)
    watch = os.open(died, os.O_RDONLY | os.O_NONBLOCK)
    # Wait for the exec, during which the environment is empty.
    job = server.queue(
        f"(exec 9> {died}; exec sleep 600) &\n"
        "until tr '\\0' ' ' </proc/$!/cmdline | grep -q '^sleep '; do sleep 0.02; done; touch refuse"
    )
    good = server.finished(job)
    ended = select.poll()
    ended.register(watch, select.POLLHUP)
    assert ended.poll(LIMIT_S * 1000), "a process that a step left behind ends with the job"
    os.close(watch)
    assert good["conclusion"] == "success"
    assert "hook of run 7.1" in good["log"]
    bad = server.finished(server.queue("echo never"))
    assert bad["conclusion"] == "failure"
    assert [step["conclusion"] for step in bad["steps"]] == ["skipped"]
    # Like the real runner: `always()` steps run after a failed hook, unless the worker received SIGTERM.
    steps = [
        {"run": "echo never"},
        {"run": "kill $PPID; sleep 600", "if": "always()"},
        {"run": "true", "if": "always()"},
    ]
    body = {"repo": REPO, "run_id": 7, "labels": ["warm"], "steps": steps}
    always = server.finished(server.http.post("/_admin/jobs", json=body).json()["id"])
    assert always["conclusion"] == "cancelled"
    assert [step["conclusion"] for step in always["steps"]] == ["skipped", "cancelled", "skipped"]


def test_runner_repeats_requests_with_lost_responses(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    runner.register()
    runner.ready()
    for operation in ("runner.acknowledge", "runner.complete"):
        server.http.post("/_admin/faults", json={"kind": "lost_answer", "operation": operation})
    assert server.finished(server.queue("true"))["conclusion"] == "success"
    assert server.finished(server.queue("true"))["conclusion"] == "success"
    assert server.http.get("/_admin/faults").json() == {"faults": []}


async def test_admin_client(server: FakeGitHubServer, runner: RunnerFolder) -> None:
    runner.register()
    runner.ready()
    async with FakeGitHubClient(server.endpoint.url, server.endpoint.token) as client:
        step = JobStep(run='echo "$WORD"', env={"WORD": "hello"})
        queued = await client.queue_job(repo=REPO, run_id=8, labels=["warm"], steps=[step])
        job = queued
        while job.status != "completed":
            job = await client.job(job.id, wait_s=LIMIT_S, since=job.status)
        assert job.conclusion == "success"
        assert "hello" in job.log
        assert [found.id for found in await client.jobs(run_id=8)] == [job.id]
        assert await client.jobs(run_id=9) == []
        (found,) = await client.runners()
        assert (found.name, found.labels, found.online) == ("one", ("warm",), True)
        await client.set_fault("status", operation="list", status=500)
        assert [fault.kind for fault in await client.faults()] == ["status"]
        await client.clear_faults()
        assert await client.faults() == []
        await client.set_fault("delay", operation="list", seconds=600)
        listing = asyncio.create_task(asyncio.to_thread(server.rest))
        while await client.faults():  # noqa: ASYNC110 - the change happens in another process
            await asyncio.sleep(0.02)
        # A delay in progress ends, too.
        await client.clear_faults()
        assert await listing is not None
        with pytest.raises(FakeGitHubError, match="404"):
            await client.job(10_000)
        assert (await client.change_settings(lease_s=99))["lease_s"] == 99


def test_second_install_changes_nothing(runner: RunnerFolder) -> None:
    def modification_times() -> Mapping[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in runner.folder.rglob("*") if path.is_file()}

    before = modification_times()
    install_runner(runner.folder)
    assert modification_times() == before
