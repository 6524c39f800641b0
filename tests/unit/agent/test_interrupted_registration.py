"""An agent on a local machine killed at each file that it deletes or replaces for a registration.

The runner and its registration share a folder there, so files that are left would be taken for those of the next
registration. On EC2 they are apart; `test_crash_points.py` cuts that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remuda.agent.job_folders import JobFolders
from remuda.agent.job_hook import JobHook
from remuda.agent.processes import KillResult
from remuda.agent.runner import ActionsRunner
from remuda.domain.instance import Assignment
from remuda.ports.machine import RemovalStatus
from tests.support.virtual_time import FixedClock, Killed

#: More than any step has.
MAX_EFFECTS = 20
#: A set's assignment, whose registration GitHub may still have.
SPENT = Assignment(
    url="https://github.com/o/r", runner_name="remuda-p-1-i-1", labels=("large",), jit_config="x", runner_id=7
)
NEXT = replace(SPENT, runner_name="remuda-p-2-i-1", jit_config="y", runner_id=8)
#: A process that has ended, as the wrapper of the listener has noted it.
ENDED = " ".join(["999999999", "(sh)", "S", "1", *["0"] * 17, "1"])


def open_runner(root: Path) -> ActionsRunner:
    nothing = KillResult(killed=(), survivors=())
    pristine = root / "pristine"
    return ActionsRunner(
        host=JobFolders(root, pristine=pristine, processes=list, kill=lambda: nothing),
        config_folder=root / "runner",
        state_folder=root / "state",
        work=root / "work",
        log=root / "listener.log",
        clock=FixedClock(),
        environment={},
        hook=JobHook(folder=root / "hook", pristine=pristine, refused_file=root / "refused"),
    )


def furnish(root: Path) -> None:
    """A just-in-time runner has listened here, and has ended: its files and the agent's."""
    for name in ("runner", "state"):
        (root / name).mkdir(parents=True)
    (root / "runner" / ".runner").write_text(json.dumps({"AgentName": SPENT.runner_name}))
    for name in (".credentials", ".credentials_rsaparams"):
        (root / "runner" / name).write_text("secret")
    (root / "state" / "jit.json").write_text(json.dumps({"runnerName": SPENT.runner_name}))
    (root / "state" / "listener.pid").write_text(f"{ENDED}\n")
    (root / "state" / "exit-code").write_text("0\n")
    (root / "state" / "job-seen").touch()


async def remove(root: Path, assignment: Assignment) -> None:
    """As the agent does while a record is in release: only if the machine has a registration."""
    runner = open_runner(root)
    if runner.state().registered_as:
        status, detail = await runner.remove(assignment)
        assert status is RemovalStatus.REMOVED, detail


async def stop(root: Path) -> None:
    await open_runner(root).stop()


async def register(root: Path) -> None:
    """As the agent does while a record of a set runs: only if the machine is not registered for it."""
    runner = open_runner(root)
    if runner.state().registered_as != NEXT.runner_name:
        assert (await runner._register(NEXT)).ok


STEPS: dict[str, Callable[[Path], Awaitable[None]]] = {
    "removed by its agent": lambda root: remove(root, SPENT),
    "removed through the API": lambda root: remove(root, replace(SPENT, runner_id=0)),
    "stopped": stop,
    "registered for the next assignment": register,
}


def files(root: Path) -> dict[str, str]:
    """What the next agent finds. It ignores drafts."""
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    return {name: path.read_text() for name, path in sorted(found.items()) if not name.endswith(".new")}


@pytest.mark.parametrize("name", STEPS)
async def test_a_step_killed_at_each_effect_is_completed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = STEPS[name]
    furnish(tmp_path / "uncut")
    await step(tmp_path / "uncut")
    for at in range(1, MAX_EFFECTS):
        root = tmp_path / str(at)
        furnish(root)
        effects: list[str] = []
        with monkeypatch.context() as patched:
            for effect in ("unlink", "replace", "rename"):
                patched.setattr(os, effect, _killing(getattr(os, effect), effects, at))
            try:
                await step(root)
            except Killed:
                pass
            else:
                assert at > len(effects) > 0
                return
        await step(root)
        assert files(root) == files(tmp_path / "uncut"), f"killed before {effects[-1]}"
    pytest.fail("there are more effects than MAX_EFFECTS")


def _killing(real: Callable[..., Any], effects: list[str], at: int) -> Callable[..., Any]:
    def call(path: Any, *given: Any, **named: Any) -> Any:
        effects.append(str(path))
        if len(effects) == at:
            raise Killed
        return real(path, *given, **named)

    return call
