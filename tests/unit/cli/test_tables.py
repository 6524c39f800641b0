"""Tables of the commands on terminals of several sizes: long ids and names, many machines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest

from remuda.cli.demo.report import DemoCheck, DemoProvision, DemoReport, DemoRetirement, DemoSetRun, show_report
from remuda.cli.deploy import _show_changes
from remuda.cli.output import Output
from remuda.cli.read import check_lines, check_table, problems_first
from remuda.cli.rendering.report import report_tables
from remuda.cli.rendering.results import config_table, pool_config_rows, pool_config_table, scale_down_table
from remuda.cli.rendering.status import explanation_lines, status_screen, status_tables
from remuda.cli.rendering.table import SHORTEN, FittedTable, shorten_ids
from remuda.cli.terminal import PlainConsole
from remuda.config.settings import Settings
from remuda.controlplane.read.status import PoolLevel, Status
from remuda.controlplane.scale_down.result import ScaleDownOutcome, ScaleDownResult
from remuda.deployment.stack import StackChange
from remuda.domain.instance import Instance, RetireReason, State
from remuda.domain.provision import AcquiredRunner, ProvisionOutcome, ProvisionStatus, RunnerSource
from remuda.domain.reporting.demand import DemandStatus, RunnerSetStatus, SessionState, WaitReason
from remuda.domain.reporting.explanation import ExplainedEvent, Explanation, Severity
from remuda.domain.reporting.prices import PriceTable
from remuda.domain.reporting.usage import usage_report
from remuda.domain.reporting.warnings import PoolWarning, WarningKind
from remuda.domain.runner_set import RunnerSet
from remuda.domain.scale_down.decisions import Action, Decision, ScaleDownPhase
from remuda.domain.scale_down.idle_config import Quota
from remuda.ports.doctor import CheckResult, CheckStatus
from tests.support.records import at, entry, instance, job_record, pool_config, provision, report

WIDTHS = (80, 100, 120, 200)
#: Columns with --wide.
UNLIMITED = 10_000
RUN = "19283746501"
REPOSITORY = "a-rather-long-organization-name/the-repository-of-the-whole-company"
CLASS = "gpu-xlarge"
STATES = (State.RUNNING, State.IDLE, State.IDLE, State.CREATED, State.RELEASING, State.CLAIMED)
IDS = tuple(f"i-0{hashlib.sha256(bytes([number])).hexdigest()[:16]}" for number in range(200))


def machine(number: int) -> Instance:
    state = STATES[number % len(STATES)]
    run: dict[str, Any] = {"run_id": f"{int(RUN) + number}"}
    retired: dict[str, Any] = (
        {"retire_reason": RetireReason.DRAINED, "retire_detail": "old image"} if number % 7 == 0 else {}
    )
    return instance(
        instance_id=IDS[number],
        state=state,
        resource_class=CLASS,
        instance_type="c6id.12xlarge",
        threshold=at(-700 if number % 11 == 5 else 4_000),
        uses=number,
        **run,
        **retired,
    )


def runner_set(number: int) -> RunnerSetStatus:
    name = f"linux-large-{number}"
    return RunnerSetStatus(
        name=name,
        runner_set=RunnerSet(name=name, labels=(name,), resource_class=CLASS, scope=REPOSITORY, max=1_000),
        max=1_000,
        at=at(0),
        session=SessionState.OPEN,
        waiting=1_120,
        assigned=980,
        running=777,
        hot=10,
        warm=20,
        launching=100,
        reason=WaitReason.LAUNCH_FAILED,
        detail="EC2 has no capacity for c6id.12xlarge in eu-central-1a",
        oldest_queued_at=at(-500),
    )


def pool_status(machines: int = 30, sets: int = 2, warnings: int = 4) -> Status:
    instances = [machine(number) for number in range(machines)]
    runs = [
        provision(
            number, run_id=f"{int(RUN) + number}", resource_class=CLASS, status=ProvisionStatus.COMMITTED, why="all"
        )
        for number in range(2, 40)
    ]
    return Status(
        at=at(0),
        pool="production-eu-central-1",
        config=pool_config(),
        instances=instances,
        reports={item.instance_id: report(busy=True, beat_at=at(-3)) for item in instances},
        pools={CLASS: PoolLevel(idle=10, messages=9), "large": PoolLevel(idle=1, messages=1)},
        runs=[provision(1, run_id=RUN, count=12), *runs],
        demand=DemandStatus(sets=tuple(map(runner_set, range(sets))), jobs=(job_record(repository=REPOSITORY),)),
        warnings=tuple(
            PoolWarning(
                kind=kind, subject=IDS[number], text=f"its agent has been silent for {number} minutes in {REPOSITORY}"
            )
            for number, kind in enumerate([*WarningKind][:warnings])
        ),
    )


def usage_parts() -> list[Any]:
    record = instance(state=State.TERMINATED, created_at=at(0), threshold=at(900), instance_type="m5.large")
    history = [
        entry("create", at=at(0), source=None, target=State.CREATED, run_id=RUN),
        entry(
            "end-running", at=at(900), source=State.RUNNING, target=State.TERMINATING, run_id=RUN, why=REPOSITORY * 2
        ),
    ]
    runner = AcquiredRunner(instance_id=record.instance_id, source=RunnerSource.CREATED, seconds=60)
    outcome = ProvisionOutcome(ended_at=at(60), seconds=60.0, created=1, acquired=(runner,), error=REPOSITORY)
    job = job_record(
        repository=REPOSITORY,
        queued_at=at(1),
        started_at=at(5),
        completed_at=at(90),
        result="succeeded",
        runner_set=CLASS,
    )
    usage = usage_report(
        [provision(1, run_id=RUN, outcome=outcome)],
        [record],
        {record.instance_id: history},
        PriceTable(region="us-east-1", dated="2026-10", on_demand={"m5.large": 0.085}),
        jobs=[job],
        since=at(-3_600),
        until=at(3_600),
    )
    return report_tables(replace(usage, notes=(f"no price is known for {REPOSITORY}",)), pool="production")


def explained(kind: str = "run") -> list[Any]:
    events = tuple(
        ExplainedEvent(
            at=at(second), instance_id=IDS[second], what="claimed from the pool", why=REPOSITORY, severity=Severity.GOOD
        )
        for second in range(3)
    )
    explanation = Explanation(
        kind=kind, subject=RUN, title=f"Run {RUN}: committed", events=events, next_steps=("x " * 60,)
    )
    return explanation_lines(explanation, wide=False)


def scale_down() -> list[Any]:
    decisions = [
        Decision(
            instance_id=IDS[number],
            owner=REPOSITORY,
            action=Action.TERMINATE,
            reason="idle for 43 minutes, and the quota of 2 is used by newer instances",
            phase=next(iter(ScaleDownPhase)),
        )
        for number in range(3)
    ]
    outcomes = tuple(ScaleDownOutcome(decision=decision, done=False) for decision in decisions)
    result = ScaleDownResult(
        environment="production", dry_run=False, quota=Quota(), outcomes=outcomes, errors=(), seconds=1.0
    )
    return [scale_down_table(result)]


def checks() -> list[Any]:
    result = CheckResult(
        status=CheckStatus.PROBLEM, message=f"{REPOSITORY} refuses: 403", fix="give the token more rights"
    )
    return [check_table({"launch permission": result, "github": result})]


def configuration() -> list[Any]:
    sets = (RunnerSet(name="big", labels=("self-hosted", "big"), resource_class=CLASS, scope=REPOSITORY, max=2),)
    settings = Settings(github_scope=REPOSITORY, runner_sets=sets)
    stored = replace(pool_config(), runner_sets=sets)
    return [config_table(settings), pool_config_table(stored, pool_config_rows(stored, settings))]


class ShownParts(Output):
    """An output that collects the shown tables instead of printing them."""

    def __init__(self) -> None:
        super().__init__(as_json=False)
        self.parts: list[Any] = []

    def show(self, renderable: Any) -> None:
        self.parts.append(renderable)

    def say(self, *lines: str, style: str | None = None) -> None:
        pass


def stack_changes() -> list[Any]:
    output = ShownParts()
    change = StackChange(
        action="Modify",
        logical_id="ListenerInstanceRoleDefaultPolicy",
        resource_type="AWS::CloudFormation::WaitConditionHandle",
        replacement="Conditional",
    )
    _show_changes(output, [change] * 3)
    return output.parts


def demo_report() -> list[Any]:
    output = ShownParts()
    report = DemoReport(
        provisions=(
            DemoProvision(
                name="right", run_id="1001", reused=1, created=2, seconds=3.9, registration_seconds=0.3, jobs_ok=True
            ),
        ),
        releases=(),
        retired=(
            DemoRetirement(
                instance_id=IDS[0],
                state="releasing",
                reason="gone from EC2: its threshold passed",
                stop_reason="lost power",
            ),
        ),
        checks=(DemoCheck(text="x", passed=True),),
        leaked_processes=0,
        foreign_jobs=0,
        seconds=60,
        set_runs=(DemoSetRun(kind="cold", run_id="1011", waits=(3.0, 4.0)),),
    )
    show_report(output, report)
    return output.parts


#: The tables of each command, and the column names and values that every width must show.
COMMANDS: dict[str, tuple[Sequence[Any], tuple[str, ...]]] = {
    "status": (
        status_tables(pool_status()),
        (
            *("warning", "subject", "meaning", "instance", "state", "run", "time left", "remark", "status", "reason"),
            *("set", "waiting", "assigned", "hot", "launching", "machines", "runners"),
            *(RUN, f"({int(RUN) + 1})", "12 min late"),
        ),
    ),
    "report": (usage_parts(), ("figure", "cost", "p50", "p95", "share", "count", RUN)),
    "explain run": (explained(), ("+1.00 s", "claimed from the pool")),
    "explain instance": (explained("instance"), ("+1.00 s", "claimed from the pool")),
    "scale-down": (scale_down(), ("instance", "owner", "action", "reason", "terminate")),
    "doctor": (checks(), ("check", "status", "message", "fix", "launch permission", "problem")),
    "config": (configuration(), ("setting", "value", "from", "pool", "here", "resource-class-config")),
    "deploy": (stack_changes(), ("change", "resource", "type")),
    "demo": (demo_report(), ("run", "kind", "reused", "created", "seconds", "instance", "reason")),
}


def rendered(parts: Sequence[Any], width: int) -> list[str]:
    console = PlainConsole(file=StringIO(), width=width)
    for part in parts:
        console.print(part)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_tables_fit_the_terminal_and_keep_their_important_columns(command: str, width: int) -> None:
    parts, important = COMMANDS[command]
    lines = rendered(parts, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert [name for name in important if name not in text] == []


@pytest.mark.parametrize("parts", [status_tables(pool_status(warnings=0)), scale_down()], ids=["status", "scale-down"])
def test_ids_are_shortened_only_if_the_terminal_is_narrow(parts: list[Any]) -> None:
    narrow, wide = "\n".join(rendered(parts, 80)), "\n".join(rendered(parts, UNLIMITED))
    assert IDS[1] not in narrow
    assert IDS[1][:10] in narrow
    assert IDS[1] in wide
    assert "…" not in wide


def test_a_wide_status_has_every_column() -> None:
    lines = rendered(status_tables(pool_status()), UNLIMITED)
    (header,) = (line for line in lines if line.startswith("instance"))
    for column in ("state", "run", "time left", "heartbeat", "class", "type", "usage", "tier", "uses", "remark"):
        assert column in header
    assert len([line for line in lines if line.startswith("i-0")]) == 30


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("machines", "sets", "warnings"), [(200, 0, 0), (200, 2, 4), (30, 1, 1), (3, 0, 0)])
def test_status_of_a_pool_fits_24_lines(width: int, machines: int, sets: int, warnings: int) -> None:
    lines = rendered(status_screen(pool_status(machines, sets, warnings), width=width, height=22), width)
    assert len(lines) <= 22
    text = "\n".join(lines)
    assert f"{machines} live" in text
    assert RUN in text
    assert len([line for line in lines if line.startswith("i-0")]) >= (1 if sets and warnings else min(machines, 8))
    assert bool(sets) == ("linux-large-0" in text)
    assert bool(warnings) == any(line.startswith("warning") for line in lines)


def test_a_limited_status_shows_machines_with_problems_first() -> None:
    status = replace(pool_status(machines=40, warnings=1), warnings=())
    warned = replace(status, warnings=(PoolWarning(kind=next(iter(WarningKind)), subject=IDS[31], text="dead"),))
    first = [line.split()[0] for line in rendered(status_tables(warned, limit=5), UNLIMITED) if line.startswith("i-0")]
    late = {IDS[number] for number in (5, 16, 27, 38)}
    assert (first[0], set(first[1:])) == (IDS[31], late)


def test_many_long_classes_do_not_break_the_width() -> None:
    long = FittedTable(
        "", ("instance", "class"), [("i-" + "a" * 40, "c" * 90)], no_wrap=frozenset({"instance", "class"})
    )
    assert max(map(len, rendered([long], 80))) <= 80


def test_shortened_ids_stay_different() -> None:
    same = ["i-0000000000000000a", "i-0000000000000000b"]
    assert shorten_ids(same) == same
    assert shorten_ids(["i-0123456789abcdef0", "i-0123456788abcdef0"]) == ["i-0123456789…", "i-0123456788…"]
    assert shorten_ids(["i-0123456789abcdef0", "remuda"]) == ["i-01234567…", "remuda"]


def test_columns_are_dropped_in_order_and_only_as_needed() -> None:
    made = FittedTable(
        "",
        ("id", "one", "two"),
        [("i-0123456789abcdef0", "1" * 30, "2" * 30)],
        no_wrap=frozenset({"id", "one", "two"}),
        ids=frozenset({"id"}),
        reductions=("one", SHORTEN, "two"),
    )
    headers = {width: rendered([made], width)[0].split() for width in (90, 60, 45, 20)}
    assert headers == {90: ["id", "one", "two"], 60: ["id", "two"], 45: ["id", "two"], 20: ["id"]}
    assert [("…" in rendered([made], width)[1]) for width in (60, 45)] == [False, True]


def test_doctor_shows_problems_first() -> None:
    found = {
        status.value: CheckResult(status=status, message="x", fix="")
        for status in (CheckStatus.OK, CheckStatus.WARNING, CheckStatus.PROBLEM)
    }
    assert [line.split()[0] for line in check_lines(problems_first(found))] == ["problem", "warning", "ok"]
