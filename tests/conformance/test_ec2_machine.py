"""The EC2 machine of an agent, with a fake instance metadata service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from remuda.adapters.aws import imds as metadata
from remuda.adapters.aws.imds import DEFAULT_ENDPOINT, TOKEN_TTL_S, Ec2Machine, Imds, imds_endpoint
from remuda.adapters.aws.user_data import MachineLayout
from remuda.domain.errors import Unavailable, UserError
from remuda.ports.machine import AgentState, Identity, Machine, ScriptStatus, StepResult
from tests.support.records import LONG_S
from tests.support.user_data import INSTANCE_ID, FakeImds, fake_imds
from tests.support.virtual_time import FixedClock

START = datetime(2026, 1, 1, tzinfo=UTC)
OFF = ["systemctl", "poweroff", "--force"]


class Commands:
    """Records commands instead of running them, and the timers that they would leave."""

    def __init__(self) -> None:
        self.run: list[list[str]] = []
        self.timers: dict[str, str] = {"remuda-dead-man-boot": "1800", "remuda-dead-man-reboot": "1800"}
        self.failing: set[str] = set()

    def __call__(self, command: Sequence[str]) -> int:
        self.run.append(list(command))
        if command[0] in self.failing:
            return 1
        if command[0] == "systemd-run":
            assert command[-3:] == OFF
            flags = dict(part.removeprefix("--").split("=", 1) for part in command if part.count("=") == 1)
            self.timers[flags["unit"]] = flags["on-active"]
        if command[:2] == ["systemctl", "stop"]:
            return 0 if self.timers.pop(command[2].removesuffix(".timer"), None) else 5
        return 0


@pytest.fixture
def imds(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeImds]:
    """Long timeouts, so that a slow test machine does not fail."""
    for limit in ("TIMEOUT_S", "RESPONSE_TIMEOUT_S"):
        monkeypatch.setattr(metadata, limit, LONG_S)
    with fake_imds() as server:
        yield server


@pytest.fixture
def clock() -> FixedClock:
    return FixedClock(START)


@pytest.fixture
def commands() -> Commands:
    return Commands()


def as_port(machine: Ec2Machine) -> Machine:
    """Lets the type checker verify that the class implements the port."""
    return machine


async def clean() -> StepResult:
    return StepResult(ok=True, detail="clean")


@pytest.fixture
async def machine(imds: FakeImds, clock: FixedClock, commands: Commands, tmp_path: Path) -> AsyncIterator[Ec2Machine]:
    (tmp_path / "dead-man").write_text("remuda-dead-man-boot\n")
    made = Ec2Machine(
        imds=Imds(endpoint=imds_endpoint({"AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.url}), clock=clock),
        clock=clock,
        reset=clean,
        layout=MachineLayout(state=str(tmp_path)),
        run=commands,
    )
    yield made
    await made.close()


def test_endpoint_defaults_to_the_standard_address() -> None:
    assert imds_endpoint({}) == DEFAULT_ENDPOINT


async def test_identity_comes_from_metadata_and_tags(machine: Ec2Machine, imds: FakeImds) -> None:
    assert await machine.identity() == Identity(instance_id=INSTANCE_ID, pool="pool", margin_s=60.0)
    assert imds.requests[0] == "PUT /latest/api/token"
    assert len(imds.tokens) == 1


async def test_unreadable_tags_are_reported(machine: Ec2Machine, imds: FakeImds) -> None:
    del imds.values["tags/instance/remuda:pool"]
    with pytest.raises(UserError, match="remuda:pool"):
        await machine.identity()
    imds.values["tags/instance/remuda:margin-s"] = "much"
    with pytest.raises(UserError, match="much"):
        await machine.identity()
    imds.status = 503
    with pytest.raises(Unavailable):
        await machine.identity()


async def test_token_is_renewed_before_expiry_and_after_rejection(
    machine: Ec2Machine, imds: FakeImds, clock: FixedClock
) -> None:
    await machine.identity()
    clock.passed_s = TOKEN_TTL_S - 30
    await machine.identity()
    assert len(imds.tokens) == 2
    imds.tokens.append("another")  # invalidates the machine's token
    await machine.identity()
    assert len(imds.tokens) == 4


async def test_state_file_is_readable_by_root_only(machine: Ec2Machine, tmp_path: Path) -> None:
    assert machine.load() == AgentState()
    memory = AgentState(script=ScriptStatus.OK, script_detail="fine", threshold=START)
    machine.save(memory)
    assert machine.load() == memory
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o600
    (tmp_path / "state.json").write_text("{")
    assert machine.load() == AgentState()


async def test_new_timer_is_set_before_the_old_one_stops(
    machine: Ec2Machine, clock: FixedClock, commands: Commands
) -> None:
    machine.set_dead_man_timer(START + timedelta(seconds=90.5))
    assert [command[0] for command in commands.run] == ["systemd-run", "systemctl", "systemctl"]
    assert commands.run[-1] == ["systemctl", "stop", "remuda-dead-man-reboot.timer"]
    assert list(commands.timers.values()) == ["91"]
    clock.passed_s = 10
    machine.set_dead_man_timer(START + timedelta(seconds=200))
    assert list(commands.timers.values()) == ["190"]
    machine.set_dead_man_timer(START)  # already due, at the same time
    assert list(commands.timers.values()) == ["1"]


async def test_failed_timer_leaves_the_old_one(machine: Ec2Machine, commands: Commands) -> None:
    commands.failing = {"systemd-run"}
    with pytest.raises(Unavailable):
        machine.set_dead_man_timer(START + timedelta(seconds=90))
    assert list(commands.timers) == ["remuda-dead-man-boot", "remuda-dead-man-reboot"]


async def test_timer_that_did_not_stop_is_an_error_and_is_stopped_next_time(
    machine: Ec2Machine, clock: FixedClock, commands: Commands, tmp_path: Path
) -> None:
    commands.failing = {"systemctl"}
    with pytest.raises(Unavailable, match="2 former dead-man timers"):
        machine.set_dead_man_timer(START + timedelta(seconds=90))
    assert len(commands.timers) == 3
    commands.failing = set()
    clock.passed_s = 1
    machine.set_dead_man_timer(START + timedelta(seconds=100))
    assert list(commands.timers.values()) == ["99"]
    assert (tmp_path / "dead-man").read_text().split() == list(commands.timers)


async def test_timer_that_does_not_exist_any_more_is_forgotten(
    machine: Ec2Machine, commands: Commands, tmp_path: Path
) -> None:
    del commands.timers["remuda-dead-man-boot"]
    machine.set_dead_man_timer(START + timedelta(seconds=90))
    assert (tmp_path / "dead-man").read_text().split() == list(commands.timers)


async def test_on_demand_instances_have_no_notice(machine: Ec2Machine, imds: FakeImds) -> None:
    imds.values["spot/instance-action"] = "{}"
    assert await machine.spot_notice() == ""


async def test_spot_notices(machine: Ec2Machine, imds: FakeImds) -> None:
    imds.values["instance-life-cycle"] = "spot"
    assert await machine.spot_notice() == ""
    imds.values["events/recommendations/rebalance"] = '{"noticeTime": "2026-01-01T00:00:00Z"}'
    assert await machine.spot_notice() == "spot: rebalance recommended at 2026-01-01T00:00:00Z"
    imds.values["spot/instance-action"] = '{"action": "terminate", "time": "2026-01-01T00:02:00Z"}'
    assert await machine.spot_notice() == "spot: terminate at 2026-01-01T00:02:00Z"
    imds.status = 500
    assert await machine.spot_notice() == "spot: terminate at 2026-01-01T00:02:00Z"


async def test_notice_with_invalid_json_still_counts(machine: Ec2Machine, imds: FakeImds) -> None:
    imds.values["instance-life-cycle"] = "spot"
    imds.values["spot/instance-action"] = "soon"
    assert await machine.spot_notice() == "spot: end at an unknown time"


async def test_pre_runner_script_result(machine: Ec2Machine, tmp_path: Path) -> None:
    assert (await machine.run_script(LONG_S)).ok
    script = tmp_path / "pre-runner.sh"
    script.write_text("echo prepared; exit 3\n")
    assert await machine.run_script(LONG_S) == StepResult(ok=False, detail="exit code 3: prepared")
    script.write_text("#!/bin/bash\n[[ -z ${AWS_SECRET_ACCESS_KEY:-} ]] && echo done\n")
    script.chmod(0o700)
    assert await machine.run_script(LONG_S) == StepResult(ok=True, detail="exit code 0: done")
    script.write_text("#!/bin/bash\necho $PATH\n")
    assert "/usr/local/bin:/usr/sbin:" in (await machine.run_script(LONG_S)).detail, "the system path includes sbin"
    assert await machine.reset() == StepResult(ok=True, detail="clean")


async def test_end_terminates_or_powers_off(imds: FakeImds, clock: FixedClock, commands: Commands) -> None:
    asked: list[str] = []

    async def terminate(instance_id: str) -> None:
        asked.append(instance_id)
        if len(asked) > 1:
            raise Unavailable("no")

    service = Imds(endpoint=imds.url, clock=clock)
    made = Ec2Machine(imds=service, clock=clock, reset=clean, run=commands, terminate=terminate)
    await made.end("done")
    assert (asked, commands.run) == ([INSTANCE_ID], [])
    await made.end("done")
    assert commands.run == [OFF]
    await made.close()


async def test_failed_power_off_is_reported(machine: Ec2Machine, commands: Commands) -> None:
    commands.failing = {"systemctl"}
    with pytest.raises(Unavailable):
        await machine.end("done")
