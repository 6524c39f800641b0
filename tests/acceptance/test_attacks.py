"""Attacks of one run on the next on the same machine: each is removed, refused, or ends the machine.

The table in the docs lists the outcomes of this test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import attacks
from tests.support.attacks import KEPT, LOG, LOOSE, REFUSED, REMOVABLE, RETIRED, SPOOL, Attack, AttackOutcome
from tests.support.aws.ec2_machines import LIMIT_S, MachineStack
from tests.support.aws.stack import aws_stack
from tests.support.namespace_machine.machine import NamespaceMachine, bake_image, unsupported_reason
from tests.support.virtual_time import until

pytestmark = [
    pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason()),
    pytest.mark.timeout(900),
    pytest.mark.namespaces,
]

JOB_USER = "remuda-job"
TABLE = Path(__file__).parents[2] / "docs" / "reference" / "attacks.md"
BEGIN, END = "<!-- generated: attacks -->", "<!-- end of attacks -->"
#: Set by `make attacks`: write the outcomes to the docs instead of comparing them.
WRITE = "REMUDA_WRITE_ATTACKS"
#: Folders in which setuid programs of cron, at, systemd and mail write for a user. The programs are not installed, so
#: the folders are writable for all.
OPEN_FOLDERS = ("var/spool/cron/crontabs", "var/spool/cron/atjobs", "var/lib/systemd/linger", "var/mail")


#: Words that the explanation of a release must contain: some of what the reset removed.
REMOVED_THINGS = ("processes", "crontab", "at job", "lasting login", "message queue", "kernel keys", "IPC objects")


def bake_open_image(image: Path) -> None:
    """Create an image with a job user, and with files and folders that all users may write to."""
    bake_image(image)
    # Kernel keys are not part of a namespace, so the user id must be unique among parallel tests.
    uid = 1_000_000 + int.from_bytes(os.urandom(3))
    (image / "etc").mkdir()
    for name, line in (
        ("passwd", f"{JOB_USER}:x:{uid}:{uid}::/home/{JOB_USER}:/bin/bash"),
        ("group", f"{JOB_USER}:x:{uid}:"),
    ):
        (image / "etc" / name).write_text(f"{Path('/etc', name).read_text()}{line}\n")
    modes = {**dict.fromkeys(OPEN_FOLDERS, 0o1777), SPOOL.lstrip("/"): 0o1777, LOOSE.lstrip("/"): 0o777}
    for name in modes:
        (image / name).mkdir(parents=True)
    for path in (image, *image.rglob("*")):
        if path.is_dir():
            path.chmod(modes.get(str(path.relative_to(image)), 0o755))
    (image / LOOSE.lstrip("/") / KEPT).write_text("as it was\n")
    (image / LOG.lstrip("/")).write_text("as it was\n")
    (image / LOG.lstrip("/")).chmod(0o666)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[MachineStack]:
    bake_open_image(tmp_path / "image")
    with aws_stack(tmp_path) as started:
        yield MachineStack(started)


async def exit_codes(stack: MachineStack, machine: NamespaceMachine, run_id: str, step: str) -> dict[str, int]:
    """Run a job and return the exit code that its step wrote per attack."""
    job = await stack.run_job(run_id, step)
    assert job.conclusion == "success", f"{job} {machine.console}"
    return attacks.parse_exit_codes(machine.run("cat", attacks.EXIT_CODES).stdout)


def names(codes: Mapping[str, int], among: tuple[Attack, ...], *, succeeded: bool) -> list[str]:
    return [attack.name for attack in among if attack.name in codes and (codes[attack.name] == 0) == succeeded]


async def test_next_run_sees_no_attack_or_gets_another_machine(stack: MachineStack) -> None:
    await stack.refresh(REMUDA_MARGIN_SEC="0.5")
    async with stack.booting():
        assert (await stack.provision("1"))["created"] == 1
        ((name, machine),) = stack.machines.items()
        plant_codes = await exit_codes(stack, machine, "1", attacks.plant_step((*REFUSED, *REMOVABLE)))
        assert names(plant_codes, REMOVABLE, succeeded=False) == [], "this computer does not support these"
        assert names(plant_codes, REFUSED, succeeded=True) == [], "jobs can do these"

        # Without a reset, the checks find all of them.
        seen = await exit_codes(stack, machine, "1", attacks.look_step(REMOVABLE))
        supported = tuple(attack for attack in REMOVABLE if attack.name in plant_codes)
        assert names(seen, supported, succeeded=False) == [], "the checks do not find these"

        assert (await stack.remuda("release", "--run-id", "1"))["released"] == [name], machine.console
        async with stack.github() as github:
            assert await github.runners() == []
        explanation = str(await stack.remuda("explain", name))
        assert [part for part in REMOVED_THINGS if part not in explanation] == [], explanation

        assert (await stack.provision("2"))["reused"] == 1
        seen = await exit_codes(stack, machine, "2", attacks.look_step(REMOVABLE))
        assert len(seen) == len(REMOVABLE)
        assert names(seen, REMOVABLE, succeeded=True) == [], "the next run sees these"

        # No reset can undo these: the machine must end.
        retiring = await exit_codes(stack, machine, "2", f"rm {attacks.EXIT_CODES}\n{attacks.plant_step(RETIRED)}")
        assert names(retiring, RETIRED, succeeded=False) == [], "this computer does not support these"
        released = await stack.remuda("release", "--run-id", "2")
        assert released["released"] == [], machine.console
        explanation = str(await stack.remuda("explain", name))
        assert "UD_REMOVE_REG_REMOVE_RUN_FAILED" in explanation
        assert [attack.look for attack in RETIRED if attack.look not in explanation] == [], explanation
        # The agent reads that its record is terminating, and terminates the instance.
        await until(lambda: stack.stack.ec2.requests().get("TerminateInstances", 0) >= 1, within_s=LIMIT_S)
    defended = {attack: bool(seen[attack.name]) for attack in supported}
    defended |= {attack: bool(plant_codes[attack.name]) for attack in REFUSED}
    defended |= {attack: attack.look in explanation for attack in RETIRED}
    compare_with_docs({key.name: key.outcome if held else AttackOutcome.SEEN for key, held in defended.items()})


def compare_with_docs(outcomes: Mapping[str, AttackOutcome]) -> None:
    """Attacks that this computer does not support keep their row in the docs."""
    every = {attack.name: attack.outcome for group in attacks.GROUPS.values() for attack in group}
    rows = attacks.table({**every, **outcomes})
    text = TABLE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    fresh = f"{head}{BEGIN}\n\n{rows}\n\n{END}{tail}"
    if os.environ.get(WRITE):
        TABLE.write_text(fresh, encoding="utf-8")
    assert TABLE.read_text(encoding="utf-8") == fresh, "the docs differ; run make attacks"
