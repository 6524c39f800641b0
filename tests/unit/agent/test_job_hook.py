"""The job-started hook: the real script, and the files that the agent writes for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remuda.agent.job_hook import STARTED, JobHook
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment
from remuda.domain.trust import OWN_CODE

LIMIT_S = 60
ASSIGNMENT = Assignment(url="https://github.com/acme/widgets", runner_name="runner", labels=("123",))
SHELLS = [shell for shell in ("bash", "dash") if shutil.which(shell)]
#: Runs the hook like the runner's worker, then a step with `if: always()` unless it received SIGTERM. The signal may
#: arrive before the worker knows the pid of the hook.
WORKER = """#!/bin/bash
cd "$(dirname "$0")"
trap '{on_term}' TERM
{shell} -e "$1" >log 2>&1 &
child=$!
wait $child; wait $child
grep -q stopped trace || echo "always ran" >>trace
"""


class Hooked:
    def __init__(self, root: Path) -> None:
        self.runner, self.pristine = root / "runner", root / "pristine"
        for folder in (self.runner, self.pristine):
            folder.mkdir()
        self.notes = root / "notes"
        self.hook = JobHook(folder=root / "hook", pristine=self.pristine, refused_file=self.notes)
        self.script = root / "hook" / "job-started.sh"

    def put(
        self,
        label: str = "123",
        *,
        repository: str = "",
        url: str = "https://github.com/acme/widgets",
        environment: Mapping[str, str] | None = None,
        any_run: bool = False,
        only_trusted: bool = False,
    ) -> dict[str, str]:
        assignment = Assignment(
            url=url,
            runner_name="runner",
            labels=(label, f"{label}/large"),
            repository=repository,
            any_run=any_run,
            only_trusted=only_trusted,
        )
        files, variables = self.hook.files(assignment, runner=self.runner, environment=environment or {})
        for name in (".env", ".path"):
            (self.runner / name).unlink(missing_ok=True)
        for path, (content, mode) in files.items():
            target = Path(path)
            target.parent.mkdir(exist_ok=True)
            target.unlink(missing_ok=True)
            target.write_bytes(content)
            target.chmod(mode)
        return variables

    def run(self, shell: str = "bash", **job: str) -> subprocess.CompletedProcess[str]:
        """Run the hook for a job of this run and repository."""
        environment = {"PATH": os.environ["PATH"], **job}
        command = [shell, "-e", str(self.script)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=self.runner
        )


@pytest.fixture
def hooked(tmp_path: Path) -> Hooked:
    return Hooked(tmp_path)


@pytest.mark.parametrize(
    ("label", "run", "fits"),
    [
        ("123", "123", True),
        ("123.large", "123", True),
        ("123-1", "123", True),
        ("123_a", "123", True),
        ("1234", "123", False),
        ("123", "1234", False),
        ("123", "12", False),
        ("123", "", False),
        ("123", "*", False),
        ("123", "1??", False),
        ("", "123", False),
        ("", "", False),
    ],
)
def test_run_must_match_the_label(hooked: Hooked, label: str, run: str, *, fits: bool) -> None:
    hooked.put(label)
    done = hooked.run(GITHUB_RUN_ID=run, GITHUB_REPOSITORY="acme/widgets")
    assert (done.returncode == 0) == fits, done
    assert ("Remuda refused this job" in done.stdout) != fits


@pytest.mark.parametrize(
    ("url", "known", "repository", "fits"),
    [
        ("https://github.com/acme/widgets", "", "acme/widgets", True),
        ("https://github.com/Acme/Widgets", "", "aCME/wIDGETS", True),
        ("https://github.com/acme/widgets", "", "acme/gadgets", False),
        ("https://github.com/acme/widgets", "", "acme/widgets2", False),
        ("https://github.com/acme/widgets", "", "", False),
        ("https://github.com/acme", "", "acme/anything", True),
        ("https://github.com/acme", "", "acme2/widgets", False),
        ("https://github.com/acme", "", "acme/", False),
        ("https://github.com/acme", "acme/widgets", "acme/widgets", True),
        ("https://github.com/acme", "acme/widgets", "acme/gadgets", False),
        ("https://github.com/enterprises/big", "", "acme/widgets", True),
        ("https://github.com/enterprises/big", "", "", False),
        ("https://github.com/enterprises/big", "acme/widgets", "acme/gadgets", False),
    ],
)
def test_repository_must_match(hooked: Hooked, url: str, known: str, repository: str, *, fits: bool) -> None:
    hooked.put(url=url, repository=known)
    done = hooked.run(GITHUB_RUN_ID="123", GITHUB_REPOSITORY=repository)
    assert (done.returncode == 0) == fits, done


@pytest.mark.parametrize("shell", SHELLS)
def test_hook_runs_in_any_shell(hooked: Hooked, shell: str) -> None:
    hooked.put("123.large", url="https://github.com/Acme")
    assert hooked.run(shell, GITHUB_RUN_ID="123", GITHUB_REPOSITORY="acme/Widgets").returncode == 0
    assert hooked.run(shell, GITHUB_RUN_ID="12", GITHUB_REPOSITORY="acme/Widgets").returncode == 1


def test_job_without_run_or_repository_is_refused(hooked: Hooked) -> None:
    hooked.put()
    assert hooked.run().returncode == 1
    assert hooked.run(GITHUB_RUN_ID="123").returncode == 1
    assert hooked.run(GITHUB_REPOSITORY="acme/widgets").returncode == 1


def test_all_jobs_are_refused_without_the_assigned_file(hooked: Hooked) -> None:
    hooked.put()
    expected = hooked.script.with_name("assigned")
    for content in ("", "123\n", "123\nacme/widgets\n", "123\nacme/widgets\n/tmp/refused\n\n", " \n", " \n\n\n\n"):
        expected.chmod(0o644)
        expected.write_text(content)
        assert hooked.run(GITHUB_RUN_ID="123", GITHUB_REPOSITORY="acme/widgets").returncode == 1
    expected.unlink()
    assert hooked.run(GITHUB_RUN_ID="123", GITHUB_REPOSITORY="acme/widgets").returncode == 1


def test_refusal_names_both_runs_and_the_fix(hooked: Hooked) -> None:
    hooked.put(repository="acme/widgets")
    done = hooked.run(GITHUB_RUN_ID="9", GITHUB_REPOSITORY="evil/corp")
    assert done.stdout == (
        "::error::Remuda refused this job: it belongs to run 9 of evil/corp, and this machine is assigned to run 123 "
        "of acme/widgets. Let runs-on name the label of the job's own run, and provision runners for that run.\n"
    )
    assert hooked.hook.refused() == "refused 1 foreign job: run 9 of evil/corp"


@pytest.mark.parametrize(
    "text", ["$(touch hurt)", "`touch hurt`", '"; touch hurt; "', "'; touch hurt; '", "%s\\n", "-n"]
)
def test_values_are_not_executed(hooked: Hooked, text: str) -> None:
    hooked.put(text, repository=f"{text}/{text}", environment={})
    assert hooked.run(GITHUB_RUN_ID=text, GITHUB_REPOSITORY="acme/widgets").returncode == 1
    hooked.run(GITHUB_RUN_ID="1", GITHUB_REPOSITORY=text)
    assert hooked.run(GITHUB_RUN_ID=text, GITHUB_REPOSITORY=f"{text}/{text}").returncode == 0
    assert list(hooked.runner.iterdir()) == []


def test_multi_line_values_are_rejected(hooked: Hooked) -> None:
    with pytest.raises(Unavailable):
        hooked.put("123\nacme/widgets")


def test_script_passes_shellcheck(hooked: Hooked) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck): the hook is not linted")
    hooked.put()
    command = ["shellcheck", "--severity=style", str(hooked.script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (0, "")


# Runner sets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("url", "repository", "job", "fits"),
    [
        ("https://github.com/acme/widgets", "", "acme/widgets", True),
        ("https://github.com/acme", "", "acme/widgets", True),
        ("https://github.com/acme", "", "evil/widgets", False),
        ("https://github.com/acme", "acme/widgets", "acme/gadgets", False),
        ("https://github.com/acme/widgets", "", "", False),
    ],
)
def test_runner_of_a_set_accepts_any_run_of_its_scope(
    hooked: Hooked, shell: str, url: str, repository: str, job: str, *, fits: bool
) -> None:
    hooked.put("large", url=url, repository=repository, any_run=True)
    for run in ("1", "987654321"):
        done = hooked.run(shell, GITHUB_RUN_ID=run, GITHUB_REPOSITORY=job)
        assert (done.returncode == 0) == fits, done
        assert fits or "Let runs-on name the labels of a runner set" in done.stdout
    assert hooked.run(shell, GITHUB_REPOSITORY=job).returncode == 1, "every job has a run"


def test_label_with_a_space_is_not_any_run(hooked: Hooked) -> None:
    hooked.put(" large")
    assert hooked.run(GITHUB_RUN_ID="1", GITHUB_REPOSITORY="acme/widgets").returncode == 1


FORK = {"repo": {"id": 2, "full_name": "evil/widgets", "owner": {"full_name": "acme/widgets"}}}
OWN = {"repo": {"id": 1, "full_name": "Acme/Widgets"}}
#: A text of the pull request's author that looks like the event itself.
POSING = '"},"pull_request":{"head":{"repo":{"full_name":"acme/widgets"}}},"x":{"y":"\\'


class TestStrict:
    def run(
        self, hooked: Hooked, event: str, payload: object = None, shell: str = "bash", **job: str
    ) -> subprocess.CompletedProcess[str]:
        hooked.put("large", any_run=True, only_trusted=True)
        file = hooked.runner.parent / "event.json"
        file.unlink(missing_ok=True)
        if payload is not None:
            file.write_text(payload if isinstance(payload, str) else json.dumps(payload))
        given = {"GITHUB_EVENT_NAME": event, "GITHUB_EVENT_PATH": str(file)}
        return hooked.run(shell, **{"GITHUB_RUN_ID": "7", "GITHUB_REPOSITORY": "acme/widgets", **given, **job})

    @pytest.mark.parametrize("event", sorted(OWN_CODE))
    def test_events_of_the_repository_itself_are_trusted(self, hooked: Hooked, event: str) -> None:
        assert self.run(hooked, event).returncode == 0

    @pytest.mark.parametrize(
        "event",
        [
            "",
            "pull_request",
            "pull_request_target",
            "workflow_run",
            "issue_comment",
            "*",
            "push ",
            "pus",
            "push registry_package",
            "new",
        ],
    )
    def test_other_events_are_refused(self, hooked: Hooked, event: str) -> None:
        done = self.run(hooked, event)
        assert done.returncode == 1
        assert "does not prove that this job runs the repository's own code" in done.stdout
        assert done.stdout.count("::") == 2, "nothing of the event's name is a command"
        assert hooked.hook.refused() == "refused 1 untrusted job: run 7 of acme/widgets"

    @pytest.mark.parametrize("shell", SHELLS)
    @pytest.mark.parametrize("event", ["pull_request", "pull_request_target"])
    @pytest.mark.parametrize("indent", [None, 2])
    def test_pull_requests_are_trusted_by_their_head(
        self, hooked: Hooked, shell: str, event: str, indent: int | None
    ) -> None:
        for head, fits in ((OWN, True), (FORK, False), ({"repo": None}, False), ({}, False)):
            payload = {
                "action": "opened",
                "number": 3,
                "pull_request": {
                    "title": POSING,
                    "labels": [{"name": "x", "repo": {"full_name": "acme/widgets"}}],
                    "base": OWN,
                    "head": {"label": "main", **head, "sha": "0" * 40},
                    "body": f"a\\{POSING}",
                },
                "repository": {"full_name": "acme/widgets"},
            }
            done = self.run(hooked, event, json.dumps(payload, indent=indent), shell)
            assert (done.returncode == 0) == fits, (head, done)

    @pytest.mark.parametrize(
        "payload",
        [
            "",
            "[]",
            "null",
            '{"pull_request"',
            '{"pull_request": {"head": {"repo": {"full_name": "acme/widgets"',
            '{"pull_request": {"head": {"repo": {"full_name": "acme/widgets", "full_name": "evil/widgets"}}}}',
            '{"pull_request": {"head": {"repo": {"full_name": "evil/widgets", "full_name": "acme/widgets"}}}}',
            [{"pull_request": {"head": OWN}}],
            {"pull_request": [{"head": OWN}]},
            {"x": {"pull_request": {"head": OWN}}},
            {"pull_request": {"head": {"repo": {"full_name": ["acme/widgets"]}}}},
            {"pull_request": {"head": {"repo": "full_name", "x": "acme/widgets"}}},
            {"pull_request/head/repo/full_name": "acme/widgets"},
            {"pull_request": {"head": {"repo": {"x": {"full_name": "acme/widgets"}}}}},
        ],
    )
    def test_unclear_payloads_are_refused(self, hooked: Hooked, payload: object) -> None:
        assert self.run(hooked, "pull_request", payload).returncode == 1

    @given(text=st.text(max_size=40), key=st.text(max_size=12))
    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_texts_of_a_stranger_change_nothing(self, hooked: Hooked, text: str, key: str) -> None:
        for head, fits in ((OWN, True), (FORK, False)):
            request = {f"k{key}": text, "head": {"label": text, **head}, "body": text + POSING}
            payload = json.dumps({"a": [text, {f"k{key}": text}], "pull_request": request, "z": text})
            assert (self.run(hooked, "pull_request", payload).returncode == 0) == fits

    def test_a_machine_without_trusted_jobs_takes_any_job(self, hooked: Hooked) -> None:
        hooked.put("large", any_run=True)
        done = hooked.run(GITHUB_RUN_ID="7", GITHUB_REPOSITORY="acme/widgets", GITHUB_EVENT_NAME="pull_request")
        assert done.returncode == 0

    def test_scope_is_checked_as_well(self, hooked: Hooked) -> None:
        assert self.run(hooked, "push", GITHUB_REPOSITORY="evil/corp").returncode == 1

    def test_missing_awk_refuses_pull_requests(self, hooked: Hooked) -> None:
        hooked.put("large", any_run=True, only_trusted=True)
        text = hooked.script.read_text()
        assert "LC_ALL=C awk" in text
        hooked.script.unlink()
        hooked.script.write_text(text.replace("LC_ALL=C awk", "LC_ALL=C no-such-awk"))
        file = hooked.runner.parent / "event.json"
        file.write_text(json.dumps({"pull_request": {"head": OWN}}))
        job = {"GITHUB_RUN_ID": "7", "GITHUB_REPOSITORY": "acme/widgets", "GITHUB_EVENT_NAME": "pull_request"}
        assert hooked.run(**job, GITHUB_EVENT_PATH=str(file)).returncode == 1


class TestWorker:
    """The hook stops the worker, because a failing hook alone does not prevent all steps."""

    def work(self, hooked: Hooked, shell: str, on_term: str = "echo stopped >>trace; kill -TERM $!") -> str:
        worker = hooked.runner / "Runner.Worker"
        worker.write_text(WORKER.format(shell=shell, on_term=on_term))
        worker.chmod(0o755)
        subprocess.run(
            [str(worker), str(hooked.script)],
            env={"PATH": os.environ["PATH"], "GITHUB_RUN_ID": "9", "GITHUB_REPOSITORY": "acme/widgets"},
            check=False,
            timeout=LIMIT_S,
        )
        trace = hooked.runner / "trace"
        return trace.read_text() if trace.exists() else ""

    def wait_for(self, hooked: Hooked, command: str) -> None:
        """Replace the wait of ten seconds by this command."""
        text = hooked.script.read_text()
        assert "sleep 10 " in text
        hooked.script.unlink()
        hooked.script.write_text(text.replace("sleep 10 ", f"{command} "))

    @pytest.mark.parametrize("shell", SHELLS)
    def test_worker_receives_sigterm(self, hooked: Hooked, shell: str) -> None:
        hooked.put()
        # The test ends only because the hook stops waiting as soon as possible.
        self.wait_for(hooked, "sleep 1000")
        assert self.work(hooked, shell) == "stopped\n"

    @pytest.mark.parametrize("shell", SHELLS)
    def test_worker_that_ignores_sigterm_is_killed(self, hooked: Hooked, shell: str) -> None:
        hooked.put()
        self.wait_for(hooked, "sleep 0.2")
        assert self.work(hooked, shell, on_term=":") == ""


class TestImageHook:
    def image_hook(self, hooked: Hooked, code: int = 0) -> Path:
        path = hooked.pristine / "their hook.sh"
        path.write_text(f"echo theirs of run $GITHUB_RUN_ID with $PATH\nexit {code}\n")
        return path

    @pytest.mark.parametrize("code", [0, 7])
    def test_hook_in_the_environment_is_called_after_ours(self, hooked: Hooked, code: int) -> None:
        hooked.put(environment={STARTED: str(self.image_hook(hooked, code))})
        done = hooked.run(GITHUB_RUN_ID="123", GITHUB_REPOSITORY="acme/widgets")
        assert (done.returncode, done.stdout) == (code, f"theirs of run 123 with {os.environ['PATH']}\n")
        assert "theirs" not in hooked.run(GITHUB_RUN_ID="9", GITHUB_REPOSITORY="acme/widgets").stdout

    def test_hook_in_the_env_file_is_called_and_removed_from_the_file(self, hooked: Hooked) -> None:
        (hooked.pristine / ".env").write_text(f"LANG=C\n{STARTED}={self.image_hook(hooked)}\nLAST=1\n")
        assert hooked.put() == {STARTED: str(hooked.script)}
        assert (hooked.runner / ".env").read_text() == "LANG=C\nLAST=1\n"
        assert "theirs" in hooked.run(GITHUB_RUN_ID="123", GITHUB_REPOSITORY="acme/widgets").stdout

    def test_last_hook_in_the_env_file_is_the_one_that_is_called(self, hooked: Hooked) -> None:
        (hooked.pristine / ".env").write_text(f"{STARTED}=/missing\n{STARTED}={self.image_hook(hooked)}\n")
        hooked.put()
        assert "theirs" in hooked.run(GITHUB_RUN_ID="123", GITHUB_REPOSITORY="acme/widgets").stdout


def test_environment_files_come_from_the_unmodified_software(hooked: Hooked) -> None:
    (hooked.pristine / ".path").write_text("/usr/bin")
    (hooked.pristine / ".path").chmod(0o640)
    (hooked.runner / ".path").write_text("/home/shims")
    (hooked.runner / ".env").write_text("BASH_ENV=/tmp/x")
    files, _ = hooked.hook.files(ASSIGNMENT, runner=hooked.runner, environment={})
    assert files[hooked.runner / ".path"] == (b"/usr/bin", 0o640)
    assert hooked.runner / ".env" not in files


def test_path_of_the_image_is_that_of_the_listener(hooked: Hooked) -> None:
    environment = {"PATH": "/usr/bin:/bin"}
    (hooked.runner / ".path").write_text("/home/shims")
    assert "PATH" not in hooked.put(environment=environment)
    # As src/Misc/layoutroot/env.sh of actions/runner writes it.
    (hooked.pristine / ".path").write_text("/opt/tools/bin:/usr/bin\n")
    assert hooked.put(environment=environment)["PATH"] == "/opt/tools/bin:/usr/bin:/bin"
    (hooked.pristine / ".path").write_text("\n")
    assert "PATH" not in hooked.put(environment=environment)


def test_unreadable_environment_file_is_an_error(hooked: Hooked, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bytes:
        raise PermissionError("denied")

    (hooked.pristine / ".path").write_text("/usr/bin")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(Unavailable, match="environment files"):
        hooked.hook.files(ASSIGNMENT, runner=hooked.runner, environment={})


def test_hook_and_its_values_are_read_only(hooked: Hooked) -> None:
    files, _ = hooked.hook.files(ASSIGNMENT, runner=hooked.runner, environment={})
    assert {path.name: mode for path, (_, mode) in files.items()} == {"assigned": 0o444, "job-started.sh": 0o444}
    assert {path.parent for path in files} == {hooked.script.parent}


def test_refused_jobs_are_read_outside_the_sandbox(tmp_path: Path) -> None:
    outside = tmp_path / "outbox"
    hook = JobHook(
        folder=tmp_path / "hook",
        pristine=tmp_path,
        refused_file=PurePosixPath("/run/remuda/refused"),
        refused_file_outside=outside,
    )
    files, _ = hook.files(ASSIGNMENT, runner=tmp_path, environment={})
    assert b"\n/run/remuda/refused\n" in files[tmp_path / "hook" / "assigned"][0]
    outside.write_text("9 evil/corp\n")
    assert hook.refused() == "refused 1 foreign job: run 9 of evil/corp"


class TestRefusedJobs:
    def test_no_refused_job_gives_an_empty_summary(self, hooked: Hooked) -> None:
        assert hooked.hook.refused() == ""

    def test_summary_ignores_malformed_lines_and_is_limited(self, hooked: Hooked) -> None:
        lines = [
            *(f"{number} evil/corp" for number in range(5)),
            "0 evil/corp",
            "x" * 9_000,
            "\x1b[31m 1 a/b",
            "1 a/b c",
        ]
        hooked.notes.write_text("\n".join(lines))
        expected = "refused 6 foreign jobs: run 0 of evil/corp, run 1 of evil/corp, run 2 of evil/corp and 2 more"
        assert hooked.hook.refused() == expected

    def test_special_files_are_ignored(self, hooked: Hooked) -> None:
        os.mkfifo(hooked.notes)
        assert hooked.hook.refused() == ""
        hooked.notes.unlink()
        hooked.notes.mkdir()
        assert hooked.hook.refused() == ""
        hooked.notes.rmdir()
        hooked.notes.symlink_to("/etc/passwd")
        assert hooked.hook.refused() == ""
