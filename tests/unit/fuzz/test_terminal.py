"""Hostile text in every field that a command shows: no escape sequence, no link, no forged line on the terminal."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from remuda.adapters.system.clock import SystemClock
from remuda.cli.agent import LineEventLog
from remuda.cli.output import ConsoleEventLog, Output
from remuda.cli.read import StatusLines, check_lines, check_table
from remuda.cli.rendering.report import report_tables
from remuda.cli.rendering.results import config_table, scale_down_table
from remuda.cli.rendering.status import explanation_lines, headline, status_tables
from remuda.cli.terminal import PlainConsole
from remuda.config.settings import Settings
from remuda.controlplane.read.status import PoolLevel, Status
from remuda.controlplane.scale_down.result import ScaleDownOutcome, ScaleDownResult
from remuda.domain.errors import Unavailable
from remuda.domain.instance import RetireReason, State
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
from tests.support.mutations import ESCAPES, fuzzed
from tests.support.records import at, entry, in_state, instance, instance_id, job_record, pool_config, provision, report

FORGED = "FORGED"
LINK = "[link=https://evil.example]m5.large[/link]"
TEXTS = (LINK, f"x\n{FORGED} line", f"\x1b]8;;https://evil.example\x1b\\x\r\n{FORGED}", ":warning:", "[/]", ESCAPES)
#: Sequences that rich writes for styles.
STYLE = re.compile(r"\x1b\[[0-9;]*m")

texts = st.sampled_from(TEXTS) | st.text(alphabet="ab[]/=:\\\n\r\x1b\x07\u202e\x9b\u2028", max_size=12)


def poisoned(value: Any, text: str) -> Any:
    """The value with this text in place of each text in it, past every check."""
    if type(value) is str:
        return f"{value}{text}" if value else text
    if isinstance(value, Mapping):
        return {poisoned(key, text): poisoned(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(poisoned(item, text) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for item in fields(value):
            object.__setattr__(made, item.name, poisoned(getattr(value, item.name), text))
        return made
    return value


def sample_status() -> Status:
    instances = [in_state(state) for state in State]
    retired = instance(9, state=State.IDLE, retire_reason=RetireReason.DRAINED, retire_detail="x")
    runner_set = RunnerSet(name="big", labels=("big",), resource_class="large", scope="octo/repo", max=2)
    counts: dict[str, Any] = dict.fromkeys(("waiting", "assigned", "running", "hot", "warm", "launching"), 1)
    item = RunnerSetStatus(
        name="big",
        runner_set=runner_set,
        max=2,
        at=at(0),
        session=SessionState.FAILING,
        **counts,
        reason=WaitReason.LAUNCH_FAILED,
        detail="no capacity",
        oldest_queued_at=at(-5),
    )
    return Status(
        at=at(0),
        pool="test",
        config=pool_config(),
        instances=[*instances, retired],
        reports={item.instance_id: report(detail="x") for item in instances},
        pools={"large": PoolLevel(idle=1, messages=1)},
        runs=[provision(1), provision(2, status=ProvisionStatus.COMMITTED, why="x")],
        lost={"p-2": ("i-1",)},
        demand=DemandStatus(sets=(item,), jobs=(job_record(),)),
        warnings=(PoolWarning(kind=next(iter(WarningKind)), subject="i-1", text="x"),),
        unreadable=("a record",),
    )


def usage_tables(text: str) -> list[Any]:
    """The report of records with this text, and a report with it in each field."""
    record = instance(state=State.TERMINATED, created_at=at(0), threshold=at(900), instance_type="m5.large")
    history = [
        entry("create", at=at(0), source=None, target=State.CREATED, run_id="1"),
        entry("end-running", at=at(900), source=State.RUNNING, target=State.TERMINATING, run_id="1", why="x"),
    ]
    runner = AcquiredRunner(instance_id=instance_id(1), source=RunnerSource.CREATED, seconds=60)
    outcome = ProvisionOutcome(ended_at=at(60), seconds=60.0, created=1, acquired=(runner,), error="x")
    known, records, histories = poisoned(([provision(1, outcome=outcome)], [record], [history]), text)
    prices = PriceTable(region="us-east-1", dated="2026-10", on_demand={"c6i.large": 0.085})
    usage = usage_report(
        known, records, {records[0].instance_id: histories[0]}, prices, since=at(-3_600), until=at(3_600)
    )
    usage = replace(usage, notes=tuple(f"no price is known for {name}" for name in usage.costs.unpriced_hours))
    assert usage.notes
    return [*report_tables(usage, pool="test"), *report_tables(poisoned(usage, text), pool=text)]


def explanation(text: str) -> list[Any]:
    event = ExplainedEvent(at=at(0), instance_id="i-1", what="x", why="x", severity=Severity.BAD)
    found = poisoned(Explanation(kind="", subject="1", title="x", events=(event,), next_steps=("x",)), text)
    return [
        line
        for kind, wide in (("run", True), ("instance", False))
        for line in explanation_lines(replace(found, kind=kind), wide=wide)
    ]


def scale_down(text: str) -> list[Any]:
    decision = Decision(
        instance_id="i-1", owner="octo/repo", action=Action.TERMINATE, reason="x", phase=next(iter(ScaleDownPhase))
    )
    outcome = ScaleDownOutcome(decision=decision, done=False)
    result = ScaleDownResult(
        environment="test", dry_run=False, quota=Quota(), outcomes=(outcome,), errors=("x",), seconds=1.0
    )
    return [scale_down_table(poisoned(result, text))]


def checks(text: str) -> dict[str, CheckResult]:
    return {"check" + text: CheckResult(status=next(iter(CheckStatus)), message=text, fix=text)}


#: What each command shows, given a text.
SHOWN: dict[str, Callable[[str], list[Any]]] = {
    "status": lambda text: status_tables(poisoned(sample_status(), text)),
    "status-narrow": lambda text: status_tables(poisoned(sample_status(), text), limit=1),
    "headline": lambda text: [headline(poisoned(sample_status(), text))],
    "explain": explanation,
    "report": usage_tables,
    "doctor": lambda text: [check_table(checks(text))],
    "scale-down": scale_down,
    "text": lambda text: [text],
}


class WideOutput(Output):
    width = 20_000


def check_terminal(shown: str, *, forged: bool = False) -> None:
    """`forged`: whether lines may begin with the text, because it is shown with its own line breaks."""
    rest = STYLE.sub("", shown)
    assert "\x1b" not in rest, ascii(shown)
    for line in rest.split("\n"):
        assert line.isprintable(), ascii(line)
        assert forged or not line.strip().startswith(FORGED), rest


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard streams that rich takes for terminals with links and colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize("command", SHOWN)
@fuzzed(15)
@given(text=texts)
@example(text=LINK)
@example(text=f"x\n{FORGED} line")
@example(text=f"\x1b]8;;https://evil.example\x1b\\x\r\n{FORGED}")
def test_results(terminal: None, capsys: pytest.CaptureFixture[str], command: str, text: str) -> None:
    WideOutput(as_json=False).answer(*SHOWN[command](text))
    shown = capsys.readouterr().out
    check_terminal(shown)
    if text == LINK:
        assert LINK in STYLE.sub("", shown)


@fuzzed(15)
@given(text=texts)
@example(text=LINK)
def test_settings(terminal: None, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Values keep their line breaks: a script has many lines."""
    settings = Settings(github_scope="octo/repo")
    for name in ("pool", "github_scope", "pre_runner_script"):
        object.__setattr__(settings, name, text)
    WideOutput(as_json=False).answer(config_table(settings))
    check_terminal(capsys.readouterr().out, forged=True)


@fuzzed(15)
@given(text=texts)
@example(text=LINK)
@example(text=f"x\n{FORGED} line")
@pytest.mark.parametrize("colours", [True, False], ids=["terminal", "log"])
def test_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, colours: bool, text: str
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if colours:
        monkeypatch.setenv("FORCE_COLOR", "1")
    output = WideOutput(as_json=False)
    output.say(text, f"x{text}", style="bold yellow")
    output.say_errors([text])
    output.error(Unavailable(text, fix=text))
    for log in (ConsoleEventLog(output, SystemClock()), LineEventLog(SystemClock())):
        log.record(text, text, instance_id=text, source=text)
    StatusLines(output).show(poisoned(sample_status(), text))
    output.say(*check_lines(checks(text)))
    captured = capsys.readouterr()
    check_terminal(captured.err)
    check_terminal(captured.out)


def test_texts_of_the_program_have_styles() -> None:
    """The console shows styles that code sets, so that the tests above prove something."""
    shown = io.StringIO()
    PlainConsole(file=shown, force_terminal=True, color_system="standard").print("x", style="bold")
    assert "\x1b[1m" in shown.getvalue()
