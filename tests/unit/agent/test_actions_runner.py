"""Control of actions/runner, tested with a runner made of shell scripts."""

# The tests wait for other processes.
# ruff: noqa: ASYNC110

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from remuda import procfs
from remuda.adapters.system.clock import SystemClock
from remuda.agent import processes
from remuda.agent import runner as agent_runner
from remuda.agent.job_folders import JobFolders
from remuda.agent.job_hook import STARTED, JobHook
from remuda.agent.processes import KillResult
from remuda.agent.runner import ActionsRunner
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment, Credential
from remuda.domain.signals import FailureKind
from remuda.ports.machine import RemovalStatus, RunnerState
from tests.support.records import LONG_S

#: Runs the script in the file `behave` next to it and records its input.
CONFIG = """#!/bin/sh
cd "$(dirname "$0")"
echo "$@" > arguments
env > environment
. ./behave
"""
#: Copies input from the pipe `say` to its output until it reads an exit command.
LISTENER = """#!/bin/bash
env > listener-environment
[ -n "$ACTIONS_RUNNER_INPUT_JITCONFIG" ] && echo '{"AgentName": "jit"}' > .runner
trap '[ -e stubborn ] || exit 0' TERM
exec 3<>say
while true; do
  read -t 0.1 -r line <&3 || continue
  case $line in
    exit*) exit ${line#exit } ;;
    work) "$PWD/bin/Runner.Worker" & ;;
    *) echo "$line" ;;
  esac
done
"""
REGISTER = """
printf '\\357\\273\\277{"agentName": "%s"}' "$ACTIONS_RUNNER_INPUT_NAME" > .runner
echo Connected with $ACTIONS_RUNNER_INPUT_TOKEN
"""
#: Asks the listener for exit code 7 if GitHub refuses its version.
DEPRECATED = "ACTIONS_RUNNER_RETURN_VERSION_DEPRECATED_EXIT_CODE"
ASSIGNMENT = Assignment(
    url="https://github.com/o/r",
    runner_name="remuda-p-1-i-1",
    labels=("123", "123/large"),
    credential=Credential(token="SECRET", expires_at=datetime(2030, 1, 1, tzinfo=UTC)),
)


class Folder:
    """Jobs run in the folder `runner`; registrations are made there, too, or in `config`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runner = root / "runner"
        (self.runner / "bin").mkdir(parents=True)
        self._program("config.sh", CONFIG)
        self._program("bin/Runner.Listener", LISTENER)
        self._program("bin/Runner.Worker", "#!/bin/sh\nexec 3>&-\nsleep 1000\n")
        os.mkfifo(self.runner / "say")
        # Kept open, so that lines written before the listener reads the pipe are not lost.
        self.pipe = os.open(self.runner / "say", os.O_RDWR)
        self.state = root / "state"
        self.log = root / "logs" / "listener.log"
        self.state.mkdir()
        self.log.parent.mkdir()
        nothing = KillResult(killed=(), survivors=())
        self.host = JobFolders(root, pristine=root / "pristine", processes=self.processes, kill=lambda: nothing)
        self.hook = JobHook(folder=root / "hook", pristine=root / "pristine", refused_file=root / "refused")
        self.behave(REGISTER)

    def open(self, config_folder: Path | None = None) -> ActionsRunner:
        return ActionsRunner(
            host=self.host,
            config_folder=config_folder or self.runner,
            state_folder=self.state,
            work=self.root / "work",
            log=self.log,
            clock=SystemClock(),
            environment={"PATH": os.environ["PATH"], "HOME": "/machine/home"},
            hook=self.hook,
        )

    def open_apart(self) -> ActionsRunner:
        """Make registrations in a copy of the software that jobs cannot access."""
        shutil.copytree(self.runner, self.config, ignore=shutil.ignore_patterns("say"), dirs_exist_ok=True)
        return self.open(self.config)

    @property
    def config(self) -> Path:
        return self.root / "config"

    async def configured(self, assignment: Assignment = ASSIGNMENT) -> ActionsRunner:
        runner = self.open()
        await runner.register(assignment)
        return runner

    async def started(self, *lines: str) -> ActionsRunner:
        """A runner without registration whose listener reads these lines."""
        runner = self.open()
        await runner.start(ASSIGNMENT)
        self.say(*lines)
        return runner

    def behave(self, script: str) -> None:
        (self.runner / "behave").write_text(script)

    def say(self, *lines: str) -> None:
        os.write(self.pipe, "".join(f"{line}\n" for line in lines).encode())

    async def listens(self, runner: ActionsRunner) -> None:
        """Wait until the listener has written this line."""
        self.say("Listening for Jobs")
        while "Listening" not in self.log.read_text():
            await runner.wait_for_change(runner.state(), 0.01)

    def read(self, name: str) -> str:
        return (self.runner / name).read_text()

    async def wrapper(self) -> int:
        """Return the pid of the process that waits for the listener, which writes it after its start."""
        async with asyncio.timeout(LONG_S):
            file = self.state / "listener.pid"
            while not file.exists() or not file.read_text():
                await asyncio.sleep(0.01)
        return int(file.read_text().split()[0])

    def processes(self) -> list[procfs.Process]:
        return [process for process in procfs.all_processes().values() if _place(process.pid) == str(self.runner)]

    def _program(self, name: str, text: str) -> None:
        (self.runner / name).write_text(text)
        (self.runner / name).chmod(0o755)


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Folder]:
    made = Folder(tmp_path)
    yield made
    while left := made.processes():
        processes.kill(left)
    _reap()
    os.close(made.pipe)
    assert made.processes() == []


def _place(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115  # the target may not exist
    except OSError:
        return ""


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


async def until(runner: ActionsRunner, **wanted: object) -> RunnerState:
    """Wait with the port's own method. Fails if the state is not reached."""
    state = runner.state()
    async with asyncio.timeout(LONG_S):
        while any(getattr(state, name) != value for name, value in wanted.items()):
            state = await runner.wait_for_change(state, LONG_S)
    return state


class TestConfigure:
    async def test_registration_fails_if_jobs_cannot_start(
        self, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def ready(_: JobFolders) -> None:
            raise Unavailable("no sandbox")

        monkeypatch.setattr(JobFolders, "ready", ready)
        outcome = await folder.open().register(ASSIGNMENT)
        assert (outcome.ok, outcome.detail) == (False, "no sandbox")

    async def test_registers_with_the_token_in_the_environment_only(self, folder: Folder) -> None:
        runner = folder.open()
        assert runner.state() == RunnerState()

        outcome = await runner.register(ASSIGNMENT)

        assert outcome.ok
        assert outcome.detail == "exit code 0: Connected with ***"
        assert runner.state() == RunnerState(registered_as="remuda-p-1-i-1")
        work = folder.runner.parent / "work"
        flags = f"--unattended --no-default-labels --disableupdate --replace --work {work}\n"
        assert folder.read("arguments") == flags
        environment = folder.read("environment").splitlines()
        for line in (
            "ACTIONS_RUNNER_INPUT_URL=https://github.com/o/r",
            "ACTIONS_RUNNER_INPUT_TOKEN=SECRET",
            "ACTIONS_RUNNER_INPUT_NAME=remuda-p-1-i-1",
            "ACTIONS_RUNNER_INPUT_LABELS=123,123/large",
            "HOME=/machine/home",
        ):
            assert line in environment

    @pytest.mark.parametrize(
        ("url", "disables_updates"),
        [
            ("https://acme.ghe.com/o/r", True),
            ("https://github.example.com/o/r", False),
            ("http://127.0.0.1:3000/o/r", False),
        ],
    )
    async def test_updates_are_not_disabled_on_enterprise_servers(
        self,
        folder: Folder,
        url: str,
        disables_updates: bool,  # noqa: FBT001
    ) -> None:
        """Older ones reject the flag."""
        assert (await folder.open().register(replace(ASSIGNMENT, url=url))).ok
        assert ("--disableupdate" in folder.read("arguments")) is disables_updates

    async def test_runner_group_is_passed_in_the_environment(self, folder: Folder) -> None:
        await folder.open().register(replace(ASSIGNMENT, runner_group="warm ones"))
        assert "ACTIONS_RUNNER_INPUT_RUNNERGROUP=warm ones" in folder.read("environment").splitlines()
        await folder.open().register(ASSIGNMENT)
        assert "RUNNERGROUP" not in folder.read("environment")

    async def test_incomplete_registration_is_replaced(self, folder: Folder) -> None:
        folder.behave("[ -e .runner ] && exit 1;" + REGISTER)
        (folder.runner / ".runner").write_text('{"agentName": "old"}')
        runner = folder.open()
        assert (await runner.register(ASSIGNMENT)).ok

    @pytest.mark.parametrize(
        "script", ["echo refused SECRET; exit 1", "echo refused SECRET", "echo refused; kill -9 $$"]
    )
    async def test_failure_detail_contains_the_output(self, folder: Folder, script: str) -> None:
        runner = folder.open()
        folder.behave(script)
        outcome = await runner.register(ASSIGNMENT)
        assert not outcome.ok
        assert "refused" in outcome.detail
        assert "SECRET" not in outcome.detail

    async def test_refused_version_is_not_taken_for_a_refused_credential(self, folder: Folder) -> None:
        runner = folder.open()
        folder.behave(
            """echo "Http response code: NotFound from 'POST https://api.github.com/actions/runner-registration'"
            echo "ERROR: Your runner version is out of date and can no longer register with GitHub."
            echo "The minimum runner version required to register with GitHub Actions is now 2.329.0."; exit 1"""
        )
        outcome = await runner.register(ASSIGNMENT)
        assert (outcome.ok, outcome.failure) == (False, FailureKind.VERSION_REFUSED)
        assert outcome.detail == "its version is too old, GitHub registers runners from 2.329.0 on"

    async def test_configuration_that_hangs_is_killed(self, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.behave("echo hangs; sleep 1000")
        detail, limit_s = "killed at the time limit: ", 0.1
        while detail == "killed at the time limit: ":
            # Increase the limit until the script has time for its first output.
            limit_s *= 2
            monkeypatch.setattr(agent_runner, "CONFIGURE_LIMIT_S", limit_s)
            outcome = await folder.open().register(ASSIGNMENT)
            assert not outcome.ok
            detail = outcome.detail
        assert detail == "killed at the time limit: hangs"

    async def test_configuration_requires_token_and_software(self, folder: Folder) -> None:
        runner = folder.open()
        bare = Assignment(url="u", runner_name="n", labels=())
        assert not (await runner.register(bare)).ok
        (folder.runner / "config.sh").unlink()
        assert not (await runner.register(ASSIGNMENT)).ok

    async def test_configuration_fails_while_a_listener_runs(self, folder: Folder) -> None:
        runner = await folder.started()
        assert not (await runner.register(ASSIGNMENT)).ok
        await runner.stop()


class TestListener:
    async def test_listener_does_not_inherit_the_agents_environment(
        self, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("REMUDA_MACHINE_FD", "7")
        runner = await folder.configured()
        await runner.start(ASSIGNMENT)
        assert runner.state() == RunnerState(registered_as="remuda-p-1-i-1", listening=True)
        folder.say("Listening for Jobs", "Running job: x")
        await until(runner, busy=True)
        names = {line.partition("=")[0] for line in folder.read("listener-environment").splitlines()}
        assert names <= {
            "PATH",
            "LANG",
            "HOME",
            "RUNNER_ALLOW_RUNASROOT",
            "PWD",
            "SHLVL",
            "_",
            "OLDPWD",
            STARTED,
            DEPRECATED,
        }
        assert os.getsid(await folder.wrapper()) == await folder.wrapper()
        await runner.stop()
        assert runner.state() == RunnerState(registered_as="remuda-p-1-i-1")

    async def test_listener_has_the_path_of_the_image(self, folder: Folder) -> None:
        (folder.root / "pristine").mkdir()
        (folder.root / "pristine" / ".path").write_text("/opt/tools/bin\n")
        runner = await folder.started("Running job: x")
        await until(runner, busy=True)
        assert "\nPATH=/opt/tools/bin:" in folder.read("listener-environment")
        assert folder.read(".path") == "/opt/tools/bin\n"
        await runner.stop()

    async def test_second_start_does_nothing(self, folder: Folder) -> None:
        runner = await folder.started()
        first = await folder.wrapper()
        await runner.start(ASSIGNMENT)
        assert await folder.wrapper() == first
        assert len([found for found in folder.processes() if found.ppid == first]) <= 1
        await runner.stop()

    async def test_busy_follows_the_last_line_about_a_job(self, folder: Folder) -> None:
        runner = await folder.started("2026-01-01 00:00:00Z: Running job: Job a completed with result: Succeeded")
        await until(runner, busy=True)
        folder.say("2026-01-01 00:00:01Z: Job a completed with result: Succeeded")
        await until(runner, busy=False)
        folder.say("2026-01-01 00:00:01Z: Job a completed with result: Succeeded", "Running job: b")
        await until(runner, busy=True)
        await runner.stop()
        assert not runner.state().busy

    async def test_worker_process_counts_as_a_running_job(self, folder: Folder) -> None:
        runner = await folder.started("work")
        await until(runner, busy=True)
        await runner.stop()

    async def test_output_of_an_earlier_listener_is_ignored(self, folder: Folder) -> None:
        runner = await folder.started("Running job: a")
        await until(runner, busy=True)
        folder.say("exit 2")
        assert await until(runner, listening=False) == RunnerState(exit_code=2)
        await runner.start(ASSIGNMENT)
        assert runner.state() == RunnerState(listening=True)
        await runner.stop()

    async def test_error_of_the_listener_is_reported(self, folder: Folder) -> None:
        error = "Runner version v2.330.0 is deprecated and cannot receive messages."
        runner = await folder.started("An error occurred: first", f"An error occurred: {error}", "exit 7")
        state = await until(runner, listening=False)
        assert (state.exit_code, state.exit_detail) == (7, error)
        assert folder.open().state() == state

    @pytest.mark.parametrize("code", [0, 1, 5])
    async def test_exit_code_is_reported(self, folder: Folder, code: int) -> None:
        runner = await folder.started(f"exit {code}")
        assert (await until(runner, listening=False)).exit_code == code

    async def test_restarted_agent_finds_the_listener(self, folder: Folder) -> None:
        first = await folder.started("Running job: a")
        await until(first, busy=True)

        second = folder.open()
        assert second.state() == RunnerState(listening=True, busy=True)
        folder.say("exit 2")
        assert await until(second, listening=False) == RunnerState(exit_code=2)
        assert folder.open().state() == RunnerState(exit_code=2)

    async def test_wait_without_listener_ends_at_the_timeout(self, folder: Folder) -> None:
        runner = folder.open()
        assert await runner.wait_for_change(RunnerState(), 0.05) == RunnerState()
        assert await runner.wait_for_change(RunnerState(busy=True), LONG_S) == RunnerState()

    async def test_manipulated_settings_file_is_ignored(self, folder: Folder) -> None:
        runner = folder.open()
        settings = folder.runner / ".runner"
        for content in (b"", b"[]", b"\xff", b'{"agentName": 3}', b"[" * 100_000):
            settings.write_bytes(content)
            assert runner.state() == RunnerState()
        settings.unlink()
        os.mkfifo(settings)
        assert runner.state() == RunnerState()


JUST_IN_TIME = Assignment(url="u", runner_name="jit", labels=(), jit_config="PACKED", runner_id=7)


def packed(document: object, prefix: bytes = b"") -> str:
    return base64.b64encode(prefix + json.dumps(document).encode()).decode()


def unpacked(text: str) -> dict[str, str]:
    return dict(json.loads(base64.b64decode(text)))


class TestJustInTime:
    async def test_jit_configuration_is_passed_at_the_start(self, folder: Folder) -> None:
        assignment = JUST_IN_TIME
        assert (await folder.open().register(assignment)).ok
        # A restarted agent knows the same.
        runner = folder.open()
        assert runner.state() == RunnerState(registered_as="jit")
        assert "PACKED" not in repr(runner.state())
        removal, _ = await runner.remove(JUST_IN_TIME)
        assert removal is RemovalStatus.FAILED
        await runner.start(ASSIGNMENT)
        folder.say("Running job: a")
        await until(runner, busy=True, registered_as="jit")
        assert "ACTIONS_RUNNER_INPUT_JITCONFIG=PACKED" in folder.read("listener-environment")
        assert b"PACKED" not in b"".join(path.read_bytes() for path in folder.log.parent.iterdir())
        await runner.stop()

    async def test_jit_runner_needs_no_removal_after_its_job(self, folder: Folder) -> None:
        runner = await folder.configured(JUST_IN_TIME)
        assert not runner.state().spent
        await runner.start(ASSIGNMENT)
        assert not runner.state().spent
        folder.say("exit 0")
        await until(runner, listening=False)
        (folder.runner / ".runner").unlink()  # as the real runner does
        assert runner.state().spent
        assert (await runner.remove(JUST_IN_TIME))[0] is RemovalStatus.REMOVED
        assert runner.state() == RunnerState(exit_code=0)

    async def test_restarted_agent_knows_that_the_only_job_has_ended(self, folder: Folder) -> None:
        runner = await folder.configured(JUST_IN_TIME)
        await runner.start(ASSIGNMENT)
        folder.say("exit 0")
        await until(runner, listening=False)
        assert folder.open().state().spent

    async def test_agent_reads_the_names_of_githubs_configuration(self, folder: Folder) -> None:
        """They begin with capital letters, unlike those of `config.sh`. Nothing else says it after a torn write."""
        runner = await folder.configured(JUST_IN_TIME)
        await runner.start(ASSIGNMENT)
        while not (folder.runner / ".runner").exists():
            await runner.wait_for_change(runner.state(), 0.01)
        (folder.state / "jit.json").write_text("{")
        await until(folder.open(), registered_as="jit")
        await runner.stop()

    @pytest.mark.parametrize("code", [1, 2])
    async def test_failed_jit_listener_is_not_spent(self, folder: Folder, code: int) -> None:
        runner = await folder.configured(JUST_IN_TIME)
        await runner.start(ASSIGNMENT)
        folder.say(f"exit {code}")
        state = await until(runner, listening=False)
        assert (state.exit_code, state.spent) == (code, False)

    @pytest.mark.parametrize("name", ["workFolder", "WorkFolder"])
    async def test_work_folder_is_the_one_of_other_registrations(self, folder: Folder, name: str) -> None:
        settings = {"AgentName": "jit", name: "_work", "Ephemeral": "True"}
        credentials = packed({"scheme": "OAuth"})
        config = packed({".runner": packed(settings, b"\xef\xbb\xbf"), ".credentials": credentials})
        runner = await folder.configured(replace(JUST_IN_TIME, jit_config=config))
        await runner.start(ASSIGNMENT)
        await folder.listens(runner)
        (given,) = re.findall(
            r"^ACTIONS_RUNNER_INPUT_JITCONFIG=(.*)$", folder.read("listener-environment"), re.MULTILINE
        )
        files = unpacked(given)
        work = str(folder.root / "work")
        assert unpacked(files.pop(".runner")) == {"AgentName": "jit", "Ephemeral": "True", "workFolder": work}
        assert files == {".credentials": credentials}
        await runner.stop()

    @pytest.mark.parametrize(
        "content", ["[]", "{}", '{".runner": 1}', '{".runner": "!"}', '{".runner": "W10="}', "nonsense"]
    )
    async def test_configuration_of_an_unknown_form_is_left_to_the_listener(self, folder: Folder, content: str) -> None:
        config = base64.b64encode(content.encode()).decode()
        runner = await folder.configured(replace(JUST_IN_TIME, jit_config=config))
        await runner.start(ASSIGNMENT)
        await folder.listens(runner)
        assert f"ACTIONS_RUNNER_INPUT_JITCONFIG={config}\n" in folder.read("listener-environment")
        await runner.stop()

    async def test_registration_of_a_listener_in_the_same_folder_must_be_removed_through_the_api(
        self, folder: Folder
    ) -> None:
        """Its `.runner` names no address on GitHub, so `config.sh remove` cannot remove it."""
        runner = await folder.configured(JUST_IN_TIME)
        await runner.start(ASSIGNMENT)
        while not (folder.runner / ".runner").exists():
            await runner.wait_for_change(runner.state(), 0.01)
        folder.behave("rm .runner")
        given = replace(JUST_IN_TIME, jit_config="", credential=ASSIGNMENT.credential)
        removal, detail = await runner.remove(given)
        assert (removal, "through the API" in detail) == (RemovalStatus.FAILED, True)
        assert not (folder.runner / "arguments").exists(), "config.sh did not run"
        assert (runner.state().listening, runner.state().registered_as) == (True, "jit")
        await runner.stop()

    async def test_registration_that_github_removed_needs_no_token(self, folder: Folder) -> None:
        """Applies before the start and while the listener runs, which is stopped next."""
        runner = await folder.configured(JUST_IN_TIME)
        gone = replace(JUST_IN_TIME, jit_config="", runner_id=0)
        assert (await runner.remove(gone))[0] is RemovalStatus.REMOVED
        assert runner.state() == RunnerState()
        await runner.register(JUST_IN_TIME)
        await runner.start(ASSIGNMENT)
        while not (folder.runner / ".runner").exists():
            await runner.wait_for_change(runner.state(), 0.01)
        assert (await runner.remove(gone))[0] is RemovalStatus.REMOVED
        assert (runner.state().listening, runner.state().registered_as) == (True, "")
        await runner.stop()


#: BrokerMessageListener.cs of actions/runner, CreateSessionAsync.
DELETED = (
    "Failed to create a session. The runner registration has been deleted from the server, please re-configure. Runner "
    "registrations are automatically deleted for runners that have not connected to the service recently."
)
IN_SET = replace(JUST_IN_TIME, any_run=True)


class TestRunnerSet:
    """One job per registration, with evidence that no job can forge."""

    async def started(self, folder: Folder, *lines: str) -> ActionsRunner:
        runner = await folder.configured(IN_SET)
        await runner.start(IN_SET)
        folder.say(*lines)
        return runner

    async def test_listener_that_ends_after_its_job_is_spent(self, folder: Folder) -> None:
        runner = await self.started(folder, "Running job: a")
        await until(runner, busy=True, had_job=True)
        folder.say("Job a completed with result: Succeeded", "exit 0")
        state = await until(runner, listening=False)
        assert (state.spent, state.had_job, state.saw_job, state.unused) == (True, True, True, False)
        state = folder.open().state()
        assert (state.spent, state.had_job, state.saw_job, state.unused) == (True, True, True, False)

    @pytest.mark.parametrize(("lines", "code"), [((), 0), ((DELETED,), 1)], ids=["revoked", "deleted"])
    async def test_listener_that_ends_without_a_job_because_github_removed_it_is_unused(
        self, folder: Folder, lines: tuple[str, ...], code: int
    ) -> None:
        runner = await self.started(folder, "Listening for Jobs", *lines, f"exit {code}")
        state = await until(runner, listening=False)
        assert (state.unused, state.had_job, state.exit_code) == (True, False, code)

    @pytest.mark.parametrize("line", ["An error occurred: Invalid jit config.", "Failed to create session. Forbidden"])
    async def test_refused_configuration_is_not_an_unused_registration(self, folder: Folder, line: str) -> None:
        runner = await self.started(folder, line, "exit 1")
        state = await until(runner, listening=False)
        assert (state.unused, state.spent, state.exit_code) == (False, False, 1)

    @pytest.mark.parametrize("code", [0, 1, 2])
    async def test_job_cannot_pass_for_an_unused_registration(self, folder: Folder, code: int) -> None:
        """The log can be truncated by anyone who has it open, and can contain anything."""
        runner = await self.started(folder, "Running job: a")
        await until(runner, busy=True)
        folder.log.write_text(f"{DELETED}\n")
        folder.say(f"exit {code}")
        for state in (await until(runner, listening=False), folder.open().state()):
            assert (state.had_job, state.unused) == (True, False)

    async def test_truncated_log_counts_as_a_job(self, folder: Folder) -> None:
        runner = await self.started(folder, "Listening for Jobs", "more")
        async with asyncio.timeout(LONG_S):
            while "more" not in folder.log.read_text():
                await asyncio.sleep(0.01)
        assert not runner.state().had_job
        os.truncate(folder.log, 0)
        assert runner.state().had_job
        await runner.stop()
        assert not runner.state().had_job

    async def test_clean_end_that_nobody_watched_may_have_had_a_job(self, folder: Folder) -> None:
        runner = await self.started(folder, "exit 0")
        await until(runner, listening=False)
        state = folder.open().state()
        assert (state.spent, state.had_job, state.saw_job, state.unused) == (True, True, False, False)

    async def test_failed_start_is_repeated_with_the_configuration_of_the_record(self, folder: Folder) -> None:
        """The configuration is dropped from the disk first: it must not be there while a job runs."""
        runner = await folder.configured(IN_SET)
        aside = folder.root / "aside"
        folder.log.parent.rename(aside)
        with pytest.raises(Unavailable):
            await runner.start(IN_SET)
        aside.rename(folder.log.parent)
        restarted = folder.open()
        await restarted.start(IN_SET)
        await folder.listens(restarted)
        assert "ACTIONS_RUNNER_INPUT_JITCONFIG=PACKED" in folder.read("listener-environment")
        await restarted.stop()

    async def test_restarted_listener_gets_no_configuration(self, folder: Folder) -> None:
        runner = await self.started(folder, "exit 2")
        await until(runner, listening=False)
        await runner.start(IN_SET)
        await folder.listens(runner)
        assert "JITCONFIG" not in folder.read("listener-environment")
        await runner.stop()

    async def test_configuration_is_on_no_disk_after_the_start(self, folder: Folder) -> None:
        runner = await self.started(folder, "Running job: a")
        await until(runner, busy=True)
        # The listener's own file stands for its environment.
        kept = [path for path in folder.root.rglob("*") if path.is_file() and path.name != "listener-environment"]
        assert [path for path in kept if b"PACKED" in path.read_bytes()] == []
        assert not any("PACKED" in " ".join(procfs.command(each.pid)) for each in folder.processes())
        await runner.stop()

    async def test_second_registration_after_a_reset(self, folder: Folder) -> None:
        runner = await self.started(folder, "Running job: a")
        await until(runner, busy=True)
        folder.say("Job a completed with result: Failed", "exit 0")
        await until(runner, listening=False)
        (folder.runner / ".runner").unlink()  # as the real runner does
        released = replace(IN_SET, jit_config="", runner_id=0)
        assert (await runner.remove(released))[0] is RemovalStatus.REMOVED
        again = replace(IN_SET, runner_name="jit", jit_config="SECOND", runner_id=8)
        assert (await runner.register(again)).ok
        assert runner.state() == RunnerState(registered_as="jit")
        await runner.start(again)
        await folder.listens(runner)
        assert "ACTIONS_RUNNER_INPUT_JITCONFIG=SECOND" in folder.read("listener-environment")
        assert not runner.state().had_job
        await runner.stop()


#: Output of `config.sh remove` of actions/runner 2.336.0 (ConfigurationManager.UnconfigureAsync, RunnerDotcomServer).
NO_LONGER_REGISTERED = """
echo Does not exist. Skipping Removing runner from the server
echo √ Runner removed successfully
rm .runner
"""
DELETE_FAILED = """
echo "Http response code: {status} from 'Delete https://api.github.com/repos/o/r/actions/runners/7' (Request Id: 1)" >&2
echo '{{"message": "{message}"}}' >&2
echo Failed: Removing runner from the server >&2
echo 'Response status code does not indicate success: {code}.' >&2
exit 1
"""
FILES_MISSING = """
echo Cannot connect to server, because config files are missing. Skipping removing runner from the server.
rm .runner
"""


class TestRemove:
    async def test_registration_is_removed_with_the_token_in_the_environment_only(self, folder: Folder) -> None:
        runner = await folder.configured()
        folder.behave("rm .runner; echo removed with $ACTIONS_RUNNER_INPUT_TOKEN")
        assert await runner.remove(ASSIGNMENT) == (RemovalStatus.REMOVED, "exit code 0: removed with ***")
        assert folder.read("arguments") == "remove\n"

    async def test_removal_without_registration_succeeds(self, folder: Folder) -> None:
        assert (await folder.open().remove(ASSIGNMENT))[0] is RemovalStatus.REMOVED
        assert not (folder.runner / "arguments").exists()

    @pytest.mark.parametrize(
        ("script", "expected"),
        [
            (NO_LONGER_REGISTERED, RemovalStatus.REMOVED),
            (DELETE_FAILED.format(status="NotFound", message="Not Found", code=404), RemovalStatus.REMOVED),
            (DELETE_FAILED.format(status="Unauthorized", message="Bad credentials", code=401), RemovalStatus.FAILED),
            (
                DELETE_FAILED.format(status="UnprocessableEntity", message="It is running a job.", code=422),
                RemovalStatus.BUSY,
            ),
            (DELETE_FAILED.format(status="BadGateway", message="", code=502), RemovalStatus.UNREACHABLE),
            ("echo \"Http response code: NotFound from 'POST https://api.github.com'\"; exit 1", RemovalStatus.FAILED),
            ("echo 'Runner \"x\" is currently running a job and cannot be deleted.'; exit 1", RemovalStatus.BUSY),
            ('echo \'Runner "x" is still running a job"\'; exit 1', RemovalStatus.BUSY),
            ("echo done, but the file stays", RemovalStatus.FAILED),
            ("rm .runner; exit 1", RemovalStatus.FAILED),
            (FILES_MISSING, RemovalStatus.FAILED),
        ],
    )
    async def test_status_follows_the_output(self, folder: Folder, script: str, expected: RemovalStatus) -> None:
        runner = await folder.configured()
        folder.behave(script)
        assert (await runner.remove(ASSIGNMENT))[0] is expected

    async def test_files_of_a_removed_registration_are_dropped(self, folder: Folder) -> None:
        """`config.sh` keeps them if GitHub no longer knew the registration."""
        runner = await folder.configured()
        (folder.runner / ".credentials").touch()
        folder.behave(DELETE_FAILED.format(status="NotFound", message="Not Found", code=404))
        await runner.remove(ASSIGNMENT)
        assert runner.state() == RunnerState()
        assert not (folder.runner / ".credentials").exists()

    async def test_removal_requires_a_token(self, folder: Folder) -> None:
        runner = await folder.configured()
        bare = Assignment(url="u", runner_name="n", labels=())
        assert (await runner.remove(bare))[0] is RemovalStatus.FAILED

    async def test_folder_in_place_of_the_registration_is_an_error(self, folder: Folder) -> None:
        (folder.runner / ".runner" / "file").mkdir(parents=True)
        with pytest.raises(Unavailable, match="registration"):
            await folder.open().register(ASSIGNMENT)
        assert (folder.runner / ".runner" / "file").exists()


class TestOwnConfigFolder:
    """A job's changes to its copy of the runner do not affect registrations."""

    async def test_listener_gets_a_copy_of_the_registration(self, folder: Folder) -> None:
        runner = folder.open_apart()
        assert (await runner.register(ASSIGNMENT)).ok
        assert not (folder.runner / ".runner").exists()
        assert not (folder.runner / "environment").exists()
        environment = (folder.config / "environment").read_text()
        assert "ACTIONS_RUNNER_INPUT_TOKEN=SECRET" in environment
        # The home of the listener's environment exists in the sandbox only.
        assert f"HOME={folder.config}\n" in environment
        await runner.start(ASSIGNMENT)
        assert (folder.runner / ".runner").read_bytes() == (folder.config / ".runner").read_bytes()
        assert (folder.runner / ".runner").stat().st_mode & 0o777 == 0o600
        assert runner.state() == RunnerState(registered_as="remuda-p-1-i-1", listening=True)
        await runner.stop()

    async def test_unreadable_registration_is_an_error(self, folder: Folder) -> None:
        runner = folder.open_apart()
        (folder.config / ".credentials").mkdir()
        with pytest.raises(Unavailable, match="cannot read the registration"):
            await runner.start(ASSIGNMENT)
        assert not runner.state().listening

    async def test_registration_is_not_written_through_a_link(self, folder: Folder) -> None:
        runner = folder.open_apart()
        precious = folder.root / "precious"
        precious.write_text("as it was")
        (folder.runner / ".runner").symlink_to(precious)
        assert (await runner.register(ASSIGNMENT)).ok
        await runner.start(ASSIGNMENT)
        assert precious.read_text() == "as it was"
        assert not (folder.runner / ".runner").is_symlink()
        await runner.stop()

    async def test_removal_does_not_run_software_that_jobs_can_change(self, folder: Folder) -> None:
        runner = folder.open_apart()
        await runner.register(ASSIGNMENT)
        (folder.runner / "config.sh").write_text("#!/bin/sh\nenv >stolen\n")
        (folder.runner / ".runner").write_text('{"agentName": "x", "gitHubUrl": "https://evil.example.com"}')
        assert runner.state().registered_as == "remuda-p-1-i-1"
        (folder.config / "behave").write_text("cat .runner >removed; rm .runner")
        removal, _ = await runner.remove(ASSIGNMENT)
        assert removal is RemovalStatus.REMOVED
        assert not (folder.runner / "stolen").exists()
        assert "evil" not in (folder.config / "removed").read_text()
        assert runner.state() == RunnerState()

    async def test_jit_registration_must_be_removed_through_the_api(self, folder: Folder) -> None:
        runner = folder.open_apart()
        given = replace(ASSIGNMENT, credential=None, jit_config="config", runner_name="jit", runner_id=7)
        await runner.register(given)
        await runner.start(ASSIGNMENT)
        await folder.listens(runner)
        removal, detail = await runner.remove(given)
        assert (removal, "through the API" in detail) == (RemovalStatus.FAILED, True)
        assert not (folder.config / "arguments").exists()
        await runner.stop()
