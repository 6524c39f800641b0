"""The user that jobs run as: who it is, and the end of all that it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from remuda import procfs
from remuda.adapters.system.clock import SystemClock
from remuda.agent import job_user, processes
from remuda.agent.job_user import JobUser
from remuda.domain.errors import UserError
from tests.support.other_user import ROOT_ONLY, SUBORDINATE, UID, other_user

LONG_S = 60.0
#: Says that it is there, then waits.
SLEEPER = "echo ready; exec sleep 1000"
#: Is another process every moment: gone before a look at all processes comes to it.
CHANGELING = '$| = 1; print "ready\\n"; while (1) { exit if fork; $n++; }'


class Crowd:
    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: str, uid: int = UID) -> int:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd="/", env={}, user=uid, group=uid, extra_groups=[]
        )
        self._started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    def wait_until_silent(self) -> None:
        """Until nobody is left who could say anything: not the first one, nor its children's children."""
        self._started.pop().communicate(timeout=LONG_S)

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    made = Crowd()
    yield made
    processes.kill_user(other_user(Path("/")), clock=SystemClock(), limit_s=LONG_S)
    made.close()


def of(uid: int) -> list[procfs.Process]:
    return [process for process in procfs.all_processes().values() if uid in procfs.users(process.pid)]


@ROOT_ONLY
def test_all_that_a_user_runs_ends_and_nobody_else(crowd: Crowd, tmp_path: Path) -> None:
    first, _ = SUBORDINATE
    bystander = crowd.start("sh", "-c", SLEEPER, uid=UID + 1)
    crowd.start("sh", "-c", SLEEPER)
    crowd.start("setsid", "sh", "-c", f"({SLEEPER} &)")
    crowd.start("sh", "-c", SLEEPER, uid=first)
    killing = processes.kill_user(other_user(tmp_path), clock=SystemClock(), limit_s=LONG_S)
    assert killing.survivors == ()
    # Any of them may still be the shell.
    assert len(killing.killed) >= 3
    assert set(killing.killed) <= {"sh", "sleep", "setsid"}
    assert of(UID) == []
    assert procfs.read_process(bystander) is not None


@ROOT_ONLY
def test_a_process_that_is_another_one_every_moment_ends_too(crowd: Crowd, tmp_path: Path) -> None:
    if shutil.which("perl", path=os.defpath) is None:
        pytest.skip("it takes a quick language: there is no perl")
    crowd.start("perl", "-e", CHANGELING)
    assert processes.kill_user(other_user(tmp_path), clock=SystemClock(), limit_s=LONG_S).survivors == ()
    crowd.wait_until_silent()


def test_the_agent_itself_is_no_user_for_jobs() -> None:
    with pytest.raises(UserError, match="no user 'remuda-nobody'"):
        JobUser.find("remuda-nobody")
    with pytest.raises(UserError, match="the agent itself"):
        JobUser.find("root")


def test_ids_for_its_containers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subids = tmp_path / "subuid"
    subids.write_text("games:1:2\ndaemon:100000:65536\nbroken\ndaemon:x:y\n")
    monkeypatch.setattr(job_user, "SUBORDINATE", (subids, tmp_path / "missing"))
    user = JobUser.find("daemon")
    assert user.subordinate == ((100_000, 65_536),)
    assert user.owns_uid(user.uid)
    assert user.owns_uid(165_535)
    assert not user.owns_uid(165_536)
    assert user.gid in user.groups()
