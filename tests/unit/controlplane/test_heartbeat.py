"""The heartbeat of the listener as a metric, and its settings on AWS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from remuda.cli import listen
from remuda.cli.listen import ListenerInputs, read_inputs
from remuda.config.sources import load
from remuda.controlplane.demand.heartbeat import HEARTBEATS, INTERVAL_S, pool_counts, write_heartbeats
from remuda.controlplane.demand.machines import MachineTable
from remuda.controlplane.demand.sets import SetState, new_state
from remuda.domain.demand import QueuedJob, RepositoryQueue
from remuda.domain.errors import UserError
from remuda.domain.instance import State
from remuda.domain.reporting.job_queue import COUNTS_OLD_S
from remuda.domain.runner_set import RunnerSet
from remuda.domain.signals import Report
from remuda.wiring.github import GithubCredential
from tests.support.records import NOW, instance, job_record
from tests.support.virtual_time import FixedClock


class StoppingClock:
    """Records the pauses, and lets the third one last."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def now(self) -> Any:
        return NOW

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == 3:
            raise asyncio.CancelledError


class FailingMetrics:
    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.written: list[Mapping[str, float]] = []

    async def write(self, values: Mapping[str, float]) -> None:
        self.written.append(values)
        if answer := self.answers.pop(0):
            raise answer


def fake_context() -> tuple[Any, list[str]]:
    events: list[str] = []
    log = SimpleNamespace(record=lambda action, why="", **_: events.append(f"{action}: {why}"))
    context = SimpleNamespace(clock=StoppingClock(), event_log=log)
    context.with_true_time = lambda: context
    return context, events


async def test_heartbeat_goes_on_after_failed_writes_which_are_logged_once():
    context, events = fake_context()
    metrics = FailingMetrics(UserError("denied"), UserError("denied"), None)
    with pytest.raises(asyncio.CancelledError):
        await write_heartbeats(context, metrics, lambda: {"JobsWaiting": 2.0})
    assert metrics.written == [{HEARTBEATS: 1.0, "JobsWaiting": 2.0}] * 3
    assert context.clock.pauses == [INTERVAL_S] * 3
    assert events == ["metrics-failed: denied"]


def test_counts_are_those_of_all_sets():
    context, _ = fake_context()
    runner_set = RunnerSet(name="large", labels=("large",), resource_class="large", scope="acme", max=5)
    state: SetState = new_state(context, runner_set, None)
    state.note_jobs({"job-1": job_record(1, seen_at=NOW), "job-2": job_record(2, seen_at=NOW, started_at=NOW)})
    state.shortage = "no capacity"
    table = MachineTable(FixedClock(NOW))
    for number, (busy, epoch) in enumerate(((True, 1), (False, 1), (True, 0))):
        machine = table.put(instance(instance_id=f"i-{number}", state=State.RUNNING, runner_set="large", epoch=1))
        assert machine is not None
        report = Report(instance_id=f"i-{number}", epoch=epoch, busy=busy, listening=not busy)
        machine.observe(report, now=NOW, monotonic=0.0)
    booting = instance(instance_id="i-9", state=State.RUNNING, runner_set="large", epoch=1)
    assert table.put(booting) is not None
    # The report of the third machine is about an earlier use; the last one has not reported yet.
    assert pool_counts(context, [state], table) == {
        "JobsWaiting": 1.0,
        "RunnersListening": 1.0,
        "RunnersBusy": 1.0,
        "SetsFailing": 1.0,
    }


def test_jobs_that_only_github_s_queue_shows_wait_for_the_metric_as_for_the_status():
    context, _ = fake_context()
    labels = ("large",)
    state = new_state(context, RunnerSet(name="large", labels=labels, resource_class="l", scope="octo", max=4), None)
    jobs = tuple(
        QueuedJob(
            job_id=str(number),
            run_id="7",
            repository="octo/app",
            name=f"test {number}",
            labels=labels,
            queued_at=NOW - timedelta(seconds=60),
        )
        for number in range(3)
    )
    for age_s, count in ((0.0, 3.0), (COUNTS_OLD_S + 1, 0.0)):
        queue = RepositoryQueue(repository="octo/app", read_at=NOW - timedelta(seconds=age_s), jobs=jobs)
        state.record = replace(state.record, queues=(queue,))
        assert pool_counts(context, [state], MachineTable(FixedClock(NOW)))["JobsWaiting"] == count


async def test_local_listener_reads_nothing_else():
    settings = load({}, environ={"REMUDA_CONFIG": "/dev/null"})
    assert await read_inputs(settings) == ListenerInputs(settings)


async def test_changed_inputs_end_the_listener_before_the_next_one_starts(monkeypatch: pytest.MonkeyPatch):
    old, new = (
        ListenerInputs(load({}, environ={"REMUDA_CONFIG": "/dev/null"}), GithubCredential(text=text))
        for text in ("old", "new")
    )
    done: list[str] = []
    answers: list[Any] = [old, UserError("denied"), new]

    class FakeListener:
        def __init__(self, _demand: Any) -> None:
            done.append("started")

        def reload(self) -> None:
            """Nothing to reload."""

        async def run(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                done.append("ended")

    @asynccontextmanager
    async def open_demand(_settings: Any, _event_log: Any) -> AsyncIterator[None]:
        yield
        done.append("closed")

    async def read(_given: Any) -> ListenerInputs:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    class QuickClock(StoppingClock):
        async def sleep(self, seconds: float) -> None:
            self.pauses.append(seconds)
            await asyncio.sleep(0)

    # The virtual loop of these tests has no signals.
    monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", lambda *_: None)
    monkeypatch.setattr("remuda.controlplane.demand.DemandListener", FakeListener)
    monkeypatch.setattr(listen, "open_demand", open_demand)
    monkeypatch.setattr(listen, "read_inputs", read)
    context, events = fake_context()
    clock: Any = QuickClock()
    assert await listen._serve_until_changed(old.settings, old, context.event_log, clock) == new
    assert done == ["started", "ended", "closed"]
    assert events == ["read-failed: denied", "restart: the settings or the GitHub credential have changed"]
    assert clock.pauses == [listen.INPUTS_S] * 3


async def test_settings_of_the_stack_apply_unless_given(monkeypatch: pytest.MonkeyPatch):
    given = {"REMUDA_BACKEND": "aws", "REMUDA_CONFIG": "/dev/null", "REMUDA_SETTINGS_PARAMETER": "/remuda/ci/settings"}
    stored = {"REMUDA_GITHUB_SCOPE": "acme/app", "REMUDA_POOL": "other", "REMUDA_MAX_USES": "7"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    async def read_environment(environ: Mapping[str, str], _: Any) -> Mapping[str, str]:
        return {**stored, **environ}

    async def credential(settings: Any, _: Any, *, required: bool) -> GithubCredential:
        assert required
        return GithubCredential(text=f"token for {settings.github_scope}")

    monkeypatch.setattr("remuda.aws_lambda.runtime.read_environment", read_environment)
    monkeypatch.setattr(listen, "github_credential", credential)
    first = await read_inputs(load({"pool": "ci"}, environ=given))
    assert (first.settings.pool, first.settings.github_scope, first.settings.max_uses) == ("ci", "acme/app", 7)
    assert first == await read_inputs(load({"pool": "ci"}, environ=given))
    stored["REMUDA_MAX_USES"] = "8"
    assert first != await read_inputs(load({"pool": "ci"}, environ=given))
