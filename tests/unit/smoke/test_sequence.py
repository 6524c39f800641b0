"""The steps of a smoke run and its clean-up, in virtual time with fakes of AWS, GitHub and the command."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import pytest
import yaml

import remuda
from remuda.adapters.system.prices import shipped_prices
from remuda.config.settings import time_zone
from remuda.deployment.workflow import set_workflow_text, workflow_text
from remuda.domain.errors import RemudaError
from remuda.domain.runner_set import parse_runner_sets
from simulation.loop import VirtualClock
from tests.smoke.budget import RUN_HOURS, BudgetExceeded, Meter
from tests.smoke.record import SmokeRecord
from tests.smoke.repository import PushedRun
from tests.smoke.sequence import SmokeFailure, SmokeRun, is_held_by
from tests.smoke.workflow import JOB, branch_files, smoke_workflow
from tests.support.virtual_time import run_virtual

POOL = "smoke-12345678"
BRANCH = f"remuda-smoke-{POOL}"
PASTED = workflow_text(pool=POOL, region="us-east-1", role="arn:aws:iam::123456789012:role/remuda-workflow")
#: Seconds that a workflow run takes.
RUN_S = 200.0


class InjectedError(RemudaError):
    """A failure that a test asked for."""


@dataclass
class FakeWorld:
    """An account, a repository and the command. They refuse what does not exist, as the originals do."""

    #: The call that fails, or at which the run is cancelled: name and number.
    fails_at: tuple[str, int] = ("", 0)
    cancels: bool = False
    #: Machines: pool, state of the record, uses, usage class, run.
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    pools: set[str] = field(default_factory=set)
    fis_roles: set[str] = field(default_factory=set)
    branches: dict[str, str] = field(default_factory=dict)
    runs: dict[int, dict[str, Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    job_fails: bool = False
    reuses: bool = True
    extra_machines: int = 0

    def _call(self, name: str) -> None:
        self.calls.append(name)
        wanted, number = self.fails_at
        if name == wanted and self.calls.count(name) == number:
            if self.cancels:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            else:
                raise InjectedError(f"{name} failed")

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # The command ----------------------------------------------------------------------------------------------------

    async def __call__(self, step: str, *arguments: str) -> Mapping[str, Any]:
        command = arguments[0]
        pool = arguments[arguments.index("--pool") + 1]
        if command == "deploy":
            # A failed deployment leaves what it created.
            self.pools.add(pool)
        if step != "clean-up":
            self._call(command)
        await asyncio.sleep(1)
        if command == "deploy":
            assert "--yes" in arguments
            if "--runner-sets" not in arguments:
                return {"workflow": PASTED}
            (found,) = parse_runner_sets(
                json.loads(arguments[arguments.index("--runner-sets") + 1]),
                default_scope="octo/demo",
                zone_of=time_zone,
            )
            return {"workflow": set_workflow_text(found)}
        if command == "report":
            return {"savings": {"boot_seconds": 41.6}}
        if command == "doctor":
            return {"checks": [{"name": "table", "status": "ok"}]}
        if command == "status":
            self._advance()
            return {"instances": [each for each in self.machines.values() if each["pool"] == pool]}
        assert command == "destroy"
        assert {"--force", "--yes"} <= set(arguments)
        self.machines = {key: each for key, each in self.machines.items() if each["pool"] != pool}
        self.pools.discard(pool)
        return {}

    # Account --------------------------------------------------------------------------------------------------------

    async def machines_of(self, pool: str) -> list[str]:
        return [key for key, each in self.machines.items() if each["pool"] == pool]

    async def terminate(self, machines: list[str]) -> None:
        for each in machines:
            del self.machines[each]

    async def create_fis_role(self, pool: str) -> str:
        self._call("create_fis_role")
        assert pool not in self.fis_roles
        self.fis_roles.add(pool)
        return f"arn:aws:iam::123456789012:role/remuda-{pool}-fis"

    async def send_spot_notice(self, pool: str, instance_id: str, *, role_arn: str) -> str:
        self._call("send_spot_notice")
        assert role_arn.endswith(f"remuda-{pool}-fis")
        assert self.machines[instance_id]["usage_class"] == "spot"
        self.machines[instance_id]["notice_at"] = self._now + 20
        return "EXP1"

    async def experiment_state(self, experiment_id: str) -> tuple[str, str]:
        self._call("experiment_state")
        assert experiment_id == "EXP1"
        return "running", ""

    async def remove_experiments(self, pool: str) -> None:
        self.fis_roles.discard(pool)

    async def all_pools(self) -> set[str]:
        return self.pools | self.fis_roles | {each["pool"] for each in self.machines.values()}

    # Repository -----------------------------------------------------------------------------------------------------

    async def identity(self) -> str:
        return "octo@1/demo@2"

    async def push(self, branch: str, files: Mapping[str, str]) -> str:
        self._call("push")
        workflow = yaml.safe_load(files[".github/workflows/smoke.yml"])
        number = len(self.runs) + 1
        self.branches[branch] = f"sha{number}"
        with_inputs = workflow["jobs"].get("provision", {"steps": [{"with": {}}]})["steps"][-1]["with"]
        self.runs[number] = {
            "sha": f"sha{number}",
            "branch": branch,
            "started": self._now,
            "usage": with_inputs.get("usage-class", "on-demand"),
            "long": "sleep" in str(workflow["jobs"]["test"]["steps"]),
            "status": "queued",
            "conclusion": None,
        }
        return f"sha{number}"

    async def list_branches(self, prefix: str = "") -> list[str]:
        return [each for each in self.branches if each.startswith(prefix)]

    async def delete_branch(self, branch: str) -> None:
        self.branches.pop(branch, None)

    def _advance(self) -> None:
        for number, run in self.runs.items():
            age = self._now - run["started"]
            if age > 30 and run["status"] == "queued":
                run["status"] = "in_progress"
                self._provision(number, run)
            ends = age > RUN_S and not run["long"]
            if run["status"] == "in_progress" and (ends or run.get("cancelled")):
                run["status"] = "completed"
                run["conclusion"] = "cancelled" if run.get("cancelled") else "failure" if self.job_fails else "success"
                for each in self.machines.values():
                    if is_held_by(each, number):
                        each |= {"state": "idle", "holder": None}
        for each in self.machines.values():
            if each.get("notice_at", self._now) < self._now:
                each["report"] = {"notice": "spot interruption"}

    def _provision(self, number: int, run: dict[str, Any]) -> None:
        idle = [each for each in self.machines.values() if each["state"] == "idle" and self.reuses]
        idle = [each for each in idle if each["usage_class"] == run["usage"]]
        if not idle:
            for _ in range(1 + self.extra_machines):
                name = f"i-{len(self.machines):017x}"
                self.machines[name] = {"instance_id": name, "pool": POOL, "uses": 0, "usage_class": run["usage"]}
                self.machines[name] |= {"state": "created", "holder": None}
            idle = [self.machines[name]]
        idle[0] |= {"state": "running", "holder": {"run_id": str(number)}, "uses": idle[0]["uses"] + 1}

    def _seen(self, number: int) -> PushedRun:
        self._advance()
        run = self.runs[number]
        return PushedRun(run_id=number, status=run["status"], conclusion=run["conclusion"])

    async def run_of(self, commit: str) -> PushedRun | None:
        self._call("run_of")
        for number, run in self.runs.items():
            if run["sha"] == commit and self._now - run["started"] > 5:
                return self._seen(number)
        return None

    async def run(self, run_id: int) -> PushedRun:
        self._call("run")
        return self._seen(run_id)

    async def jobs(self, run_id: int) -> dict[str, tuple[str, str | None]]:
        self._call("jobs")
        run = self._seen(run_id)
        return {"test": (run.status, run.conclusion)}

    async def open_runs(self, branch: str) -> list[PushedRun]:
        seen = [self._seen(number) for number, run in self.runs.items() if run["branch"] == branch]
        return [run for run in seen if not run.is_done]

    async def cancel(self, run_id: int) -> None:
        self.runs[run_id]["cancelled"] = True


class FakeAccount:
    """The account of the world, whose method names differ from those of the repository."""

    def __init__(self, world: FakeWorld) -> None:
        self._world = world
        self.machines, self.terminate = world.machines_of, world.terminate
        self.create_fis_role, self.send_spot_notice = world.create_fis_role, world.send_spot_notice
        self.experiment_state, self.remove_experiments = world.experiment_state, world.remove_experiments
        self.pools = world.all_pools


class FakeRepository:
    def __init__(self, world: FakeWorld) -> None:
        self.identity, self.push, self.branches = world.identity, world.push, world.list_branches
        self.delete_branch, self.run_of, self.run = world.delete_branch, world.run_of, world.run
        self.jobs, self.open_runs, self.cancel = world.jobs, world.open_runs, world.cancel


def smoke_run(world: FakeWorld, *, budget_usd: float = 5.0) -> SmokeRun:
    return SmokeRun(
        pool=POOL,
        scope="octo/demo",
        bundles="dist",
        remuda=world,
        account=FakeAccount(world),
        repository=FakeRepository(world),
        clock=VirtualClock(),
        meter=Meter(limit_usd=budget_usd, prices=shipped_prices()),
        say=lambda _: None,
        record=SmokeRecord(clock=VirtualClock(), day=date(2026, 11, 19), region="us-east-1"),
    )


def nothing_is_left(world: FakeWorld) -> bool:
    open_runs = [run for run in world.runs.values() if run["status"] != "completed" and not run.get("cancelled")]
    return not (world.machines or world.pools or world.fis_roles or world.branches or open_runs)


def test_all_steps_pass_and_nothing_is_left():
    world = FakeWorld()
    ended: list[str] = []
    run = smoke_run(world)
    run.on_step_end = ended.append
    run_virtual(run.run())
    assert ended == ["deploy", "doctor", "cold run", "reuse", "runner set", "spot notice", "destroy", "clean-up"]
    assert len(world.runs) == 4
    assert nothing_is_left(world)
    check_record(run, ended)


#: Ids and names of the account, the repository and the pool.
IDS = re.compile(r"\d{12}|arn:|\b(?:i|ami|sg|subnet|vpc)-[0-9a-f]+|smoke-[0-9a-f]|\bocto\b|demo|sha\d")


def check_record(run: SmokeRun, steps: list[str], last: str = "passed") -> None:
    """The record can be published."""
    text = run.record.text(spent_usd=run.meter.spent_usd)
    assert not IDS.search(text)
    row = r"^\| ([a-z -]+) \| (passed|failed|interrupted) \| \d+ \| (.*) \|$"
    found = re.findall(row, text, re.MULTILINE)
    results = {name: result for name, result, _ in found}
    assert list(results) == steps
    assert set(results.values()) <= {"passed", last}
    assert f"Remuda {remuda.__version__} on" in text
    assert all(shows for name, _, shows in found if name != "clean-up")


def test_the_record_has_the_time_to_registration_and_the_step_that_failed():
    world = FakeWorld(fails_at=("push", 2))
    run = smoke_run(world)
    with pytest.raises(InjectedError):
        run_virtual(run.run())
    check_record(run, ["deploy", "doctor", "cold run", "reuse", "clean-up"], "failed")
    assert [each.result for each in run.record.steps] == ["passed", "passed", "passed", "failed", "passed"]
    assert "from launch to registration: 42 s" in run.record.text(spent_usd=1.0)
    # A run takes its time.
    assert next(each.seconds for each in run.record.steps if each.name == "cold run") > RUN_S


#: Every call of a whole run, once.
CALLS = [
    ("create_fis_role", 1),
    ("deploy", 1),
    ("doctor", 1),
    ("push", 1),
    ("run_of", 1),
    ("run", 3),
    ("status", 1),
    ("push", 2),
    ("status", 2),
    ("deploy", 2),
    ("push", 3),
    ("push", 4),
    ("jobs", 1),
    ("send_spot_notice", 1),
    ("experiment_state", 1),
    ("destroy", 1),
]


@pytest.mark.parametrize("cancels", [False, True], ids=["fails", "interrupted"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]} {call[1]}")
def test_a_run_that_ends_anywhere_leaves_nothing(call, cancels):
    world = FakeWorld(fails_at=call, cancels=cancels)
    with pytest.raises(asyncio.CancelledError if cancels else InjectedError):
        run_virtual(smoke_run(world).run())
    assert world.calls.count(call[0]) >= call[1]
    assert nothing_is_left(world)


def test_a_second_run_removes_what_a_killed_one_left():
    world = FakeWorld()
    world.pools = {"smoke-00000001"}
    world.machines["i-1"] = {"instance_id": "i-1", "pool": "smoke-00000002", "state": "idle", "holder": None, "uses": 0}
    world.machines["i-1"]["usage_class"] = "on-demand"
    world.fis_roles = {"smoke-00000003"}
    world.branches = {"remuda-smoke-smoke-00000004": "sha", "main": "sha"}
    run_virtual(smoke_run(world).run())
    assert world.branches == {"main": "sha"}
    assert nothing_is_left(FakeWorld(machines=world.machines, pools=world.pools, fis_roles=world.fis_roles))


def test_every_part_of_the_clean_up_is_tried_and_failures_are_reported():
    world = FakeWorld()
    run = smoke_run(world)

    async def refuse(*_: Any, **__: Any) -> Any:
        raise InjectedError("refused")

    async def start() -> None:
        await run.deploy()
        await run.cold_run()
        run.remuda = refuse
        run.repository.open_runs = refuse  # type: ignore[method-assign]
        failures = await run.clean_up(POOL)
        assert [failure.split(":")[0] for failure in failures] == ["cancel the runs", "remuda destroy"]

    run_virtual(start())
    # The stack remains, but nothing that costs money by the hour.
    assert not world.machines
    assert not world.fis_roles
    assert not world.branches


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"job_fails": True}, "ended with failure"),
        ({"reuses": False}, "did not happen within"),
        ({"extra_machines": 3}, "more than its limit of 2"),
    ],
    ids=str,
)
def test_a_step_that_shows_something_else_fails(changes, sentence):
    world = FakeWorld(**changes)
    with pytest.raises(RemudaError, match=sentence):
        run_virtual(smoke_run(world).run())
    assert nothing_is_left(world)


def test_a_doctor_with_problems_stops_the_run():
    world = FakeWorld()
    run = smoke_run(world)

    async def remuda(step: str, *arguments: str) -> Mapping[str, Any]:
        if arguments[0] == "doctor":
            return {"checks": [{"name": "github access", "status": "problem"}]}
        return await world(step, *arguments)

    run.remuda = remuda
    with pytest.raises(SmokeFailure, match="github access"):
        run_virtual(run.run())
    assert not world.runs
    assert nothing_is_left(world)


def test_a_run_that_takes_too_long_is_stopped_and_cleaned_up(monkeypatch):
    monkeypatch.setattr("tests.smoke.sequence.RUN_TAKES_S", 1e9)
    world = FakeWorld()
    run = smoke_run(world, budget_usd=50.0)

    async def never_done(run_id: int) -> PushedRun:
        return PushedRun(run_id=run_id, status="in_progress", conclusion=None)

    run.repository.run = never_done  # type: ignore[method-assign]

    async def measure() -> float:
        started = asyncio.get_running_loop().time()
        with pytest.raises(BudgetExceeded, match="hours"):
            await run.run()
        return asyncio.get_running_loop().time() - started

    assert run_virtual(measure()) < RUN_HOURS * 3_600 + 400
    assert nothing_is_left(world)


def test_the_workflow_is_that_of_deploy_with_the_action_of_the_branch():
    text = smoke_workflow(PASTED, job=JOB, spot=True)
    workflow = yaml.safe_load(text)
    provision = workflow["jobs"]["provision"]
    assert [step["uses"].split("@")[0] for step in provision["steps"]] == [
        "actions/checkout",
        "aws-actions/configure-aws-credentials",
        "./",
    ]
    assert provision["steps"][-1]["with"]["usage-class"] == "spot"
    assert provision["permissions"] == {"id-token": "write", "contents": "read"}
    assert workflow["jobs"]["release"]["if"] == "always()"
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"]]
    assert any("sudo" in each for each in commands)
    assert any("docker build" in each for each in commands)
    assert {"action.yml", "deploy/action/broker.sh", ".github/workflows/smoke.yml"} <= branch_files(text).keys()


def test_a_workflow_of_another_form_is_refused():
    with pytest.raises(RemudaError, match="another form"):
        smoke_workflow(PASTED.replace("remuda@v", "remuda@main-"), job=JOB)
