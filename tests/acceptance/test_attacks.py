"""What a job plants, the next run on the same machine does not see; or the machine was ended. The table in the docs is
what came out here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import attacks
from tests.support.attacks import KEPT, LOG, LOOSE, PLANTED, REFUSED, RETIRED, SPOOL, Attack, Outcome
from tests.support.aws_cloud import aws_cloud
from tests.support.clock import until
from tests.support.ec2_machine.machine import NamespaceMachine, bake, why_not
from tests.support.ec2_region import LIMIT_S, Region

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(900)]

JOB_USER = "remuda-job"
TABLE = Path(__file__).parents[2] / "docs" / "reference" / "attacks.md"
BEGIN, END = "<!-- generated: attacks -->", "<!-- end of attacks -->"
#: Set by `make attacks`: what came out is written to the docs, not compared with them.
WRITE = "REMUDA_WRITE_ATTACKS"
#: Folders in which cron, at, systemd and mail would write for a user. Their programs are not here: so they stand open.
PLAYED = ("var/spool/cron/crontabs", "var/spool/cron/atjobs", "var/lib/systemd/linger", "var/mail")


#: Some of what the reset must have told.
TOLD = ("processes", "crontab", "at job", "lasting login", "message queue", "kernel keys", "IPC objects")


def furnish(image: Path) -> None:
    """More of what images have: a job user, folders and files that everybody may write to."""
    bake(image)
    # Keys are the kernel's, whatever the namespace: a user that no other test has.
    uid = 1_000_000 + int.from_bytes(os.urandom(3))
    (image / "etc").mkdir()
    for name, line in (
        ("passwd", f"{JOB_USER}:x:{uid}:{uid}::/home/{JOB_USER}:/bin/bash"),
        ("group", f"{JOB_USER}:x:{uid}:"),
    ):
        (image / "etc" / name).write_text(f"{Path('/etc', name).read_text()}{line}\n")
    modes = {**dict.fromkeys(PLAYED, 0o1777), SPOOL.lstrip("/"): 0o1777, LOOSE.lstrip("/"): 0o777}
    for name in modes:
        (image / name).mkdir(parents=True)
    for path in (image, *image.rglob("*")):
        if path.is_dir():
            path.chmod(modes.get(str(path.relative_to(image)), 0o755))
    (image / LOOSE.lstrip("/") / KEPT).write_text("as it was\n")
    (image / LOG.lstrip("/")).write_text("as it was\n")
    (image / LOG.lstrip("/")).chmod(0o666)


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    furnish(tmp_path / "image")
    with aws_cloud(tmp_path) as cloud:
        yield Region(folder=tmp_path, cloud=cloud)


async def told(region: Region, machine: NamespaceMachine, run_id: str, step: str) -> dict[str, int]:
    """What a job of this run noted about each attack."""
    job = await region.run_job(run_id, step)
    assert job.conclusion == "success", f"{job} {machine.console}"
    return attacks.told(machine.run("cat", f"{attacks.HOME}/told").stdout)


def names(attacked: Mapping[str, int], among: tuple[Attack, ...], *, worked: bool) -> list[str]:
    return [attack.name for attack in among if attack.name in attacked and (attacked[attack.name] == 0) == worked]


async def test_the_next_run_sees_none_of_it_or_gets_another_machine(region: Region) -> None:
    await region.refresh(REMUDA_MARGIN_SEC="0.5")
    async with region.booting():
        assert (await region.provision("1"))["created"] == 1
        ((name, machine),) = region.machines.items()
        planted = await told(region, machine, "1", attacks.planting((*REFUSED, *PLANTED)))
        assert names(planted, PLANTED, worked=False) == [], "the computer cannot play these"
        assert names(planted, REFUSED, worked=True) == [], "a job may do these"

        # Without a reset: whoever looks does find them.
        seen = await told(region, machine, "1", attacks.looking(PLANTED))
        played = tuple(attack for attack in PLANTED if attack.name in planted)
        assert names(seen, played, worked=False) == [], "these would not be seen, were they there"

        assert (await region.remuda("release", "--run-id", "1"))["released"] == [name], machine.console
        async with region.github() as github:
            assert await github.runners() == []
        story = str(await region.remuda("explain", name))
        assert [part for part in TOLD if part not in story] == [], story

        assert (await region.provision("2"))["reused"] == 1
        seen = await told(region, machine, "2", attacks.looking(PLANTED))
        assert len(seen) == len(PLANTED)
        assert names(seen, PLANTED, worked=True) == [], "the next run sees these"

        # Nothing that is done after these proves the machine clean: nobody gets it any more.
        hopeless = await told(region, machine, "2", f"rm {attacks.HOME}/told\n{attacks.planting(RETIRED)}")
        assert names(hopeless, RETIRED, worked=False) == [], "the computer cannot play these"
        released = await region.remuda("release", "--run-id", "2")
        assert released["released"] == [], machine.console
        story = str(await region.remuda("explain", name))
        assert "UD_REMOVE_REG_REMOVE_RUN_FAILED" in story
        assert [attack.look for attack in RETIRED if attack.look not in story] == [], story
        # The agent sees its record's end, and asks for its own.
        await until(lambda: region.cloud.ec2.asked().get("TerminateInstances", 0) >= 1, within_s=LIMIT_S)
    outcomes = {attack.name: Outcome.REMOVED if seen[attack.name] else Outcome.SEEN for attack in played}
    outcomes |= {attack.name: Outcome.REFUSED if planted[attack.name] else Outcome.SEEN for attack in REFUSED}
    outcomes |= {attack.name: Outcome.RETIRED if attack.look in story else Outcome.SEEN for attack in RETIRED}
    compare_with_docs(outcomes)


def compare_with_docs(outcomes: Mapping[str, Outcome]) -> None:
    """What this computer cannot play stays as one that could has written it."""
    every = {attack.name: attack.outcome for group in attacks.GROUPS.values() for attack in group}
    rows = attacks.table({**every, **outcomes})
    text = TABLE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    fresh = f"{head}{BEGIN}\n\n{rows}\n\n{END}{tail}"
    if os.environ.get(WRITE):
        TABLE.write_text(fresh, encoding="utf-8")
    assert TABLE.read_text(encoding="utf-8") == fresh, "the docs tell otherwise: run make attacks"
