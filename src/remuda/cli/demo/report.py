"""Report of the demo: its figures and checks as tables and as a JSON document, and how they follow from the records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from remuda.cli.output import Output
from remuda.cli.rendering.table import SHORTEN, FittedTable
from remuda.cli.run import plural
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.pool_config import parse_runner_name
from remuda.fake_github.client import JobView
from remuda.ports.store import InstanceStore

#: Transition that assigns an instance of a runner set to the run of its job.
BIND = "bind"
#: Kinds of provisions that are compared.
KINDS = ("cold", "warm")
#: Goal for the seconds spent in addition to the runner's own registration or deregistration.
GOAL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoProvision:
    name: str
    run_id: str
    reused: int
    created: int
    seconds: float
    #: Duration of the slowest runner's registration with GitHub.
    registration_seconds: float
    jobs_ok: bool

    @classmethod
    def parse(cls, name: str, document: Mapping[str, Any], *, jobs_ok: bool = True) -> DemoProvision:
        registered = [float(item["registration_seconds"] or 0.0) for item in document["instances"]]
        return cls(
            name=name,
            run_id=str(document["run_id"]),
            reused=int(document["reused"]),
            created=int(document["created"]),
            seconds=float(document["seconds"]),
            registration_seconds=max(registered, default=0.0),
            jobs_ok=jobs_ok,
        )

    @property
    def kind(self) -> str:
        if not self.created:
            return "warm"
        return "cold" if not self.reused else "mixed"

    @property
    def overhead_seconds(self) -> float:
        return round(self.seconds - self.registration_seconds, 3)

    def describe(self) -> str:
        jobs = "its jobs passed" if self.jobs_ok else "a job FAILED"
        return (
            f"run {self.run_id}: {self.reused} reused, {self.created} created, ready after {self.seconds:.2f} s; {jobs}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRelease:
    name: str
    run_id: str
    instance_ids: tuple[str, ...]
    seconds: float
    deregistration_seconds: float

    @classmethod
    def parse(cls, name: str, document: Mapping[str, Any]) -> DemoRelease:
        durations = [float(seconds) for seconds in document["deregistration_seconds"].values()]
        return cls(
            name=name,
            run_id=str(document["run_id"]),
            instance_ids=tuple(str(item) for item in document["released"]),
            seconds=float(document["seconds"]),
            deregistration_seconds=max(durations, default=0.0),
        )

    @property
    def overhead_seconds(self) -> float:
        return round(self.seconds - self.deregistration_seconds, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSetRun:
    """Jobs of a runner set that started under the same conditions."""

    #: cold, warm or hot.
    kind: str
    run_id: str
    #: Seconds that each job waited for a runner.
    waits: tuple[float, ...]

    @classmethod
    def parse(cls, kind: str, run_id: str, jobs: Iterable[Mapping[str, Any]]) -> DemoSetRun:
        return cls(
            kind=kind, run_id=run_id, waits=tuple(float(job["wait_seconds"]) for job in jobs if job["wait_seconds"])
        )

    def describe(self) -> str:
        waits = ", ".join(f"{wait:.2f} s" for wait in self.waits)
        return f"run {self.run_id}: queued jobs waited {waits} for a runner"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRetirement:
    instance_id: str
    #: State before the termination.
    state: str
    reason: str
    #: The reason that the instance itself recorded when it stopped.
    stop_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoCheck:
    text: str
    passed: bool
    detail: str = ""

    @property
    def line(self) -> str:
        detail = f" ({self.detail})" if self.detail and not self.passed else ""
        return f"{'passed' if self.passed else 'FAILED'}  {self.text}{detail}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    provisions: tuple[DemoProvision, ...]
    releases: tuple[DemoRelease, ...]
    retired: tuple[DemoRetirement, ...]
    checks: tuple[DemoCheck, ...]
    leaked_processes: int
    foreign_jobs: int
    seconds: float
    #: Jobs without a provision.
    set_runs: tuple[DemoSetRun, ...] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def reuse_rate(self) -> float:
        reused = sum(item.reused for item in self.provisions)
        total = reused + sum(item.created for item in self.provisions)
        return round(reused / total, 3) if total else 0.0

    def median_s(self, kind: str) -> float | None:
        values = [item.seconds for item in self.provisions if item.kind == kind]
        return round(median(values), 3) if values else None

    def overheads(self) -> dict[str, float]:
        warm = [item.overhead_seconds for item in self.provisions if item.kind == "warm"]
        released = [item.overhead_seconds for item in self.releases]
        return {"warm_provision": max(warm, default=0.0), "release": max(released, default=0.0)}

    def document(self) -> dict[str, Any]:
        return {
            "ok": self.passed,
            "cold_seconds": self.median_s("cold"),
            "warm_seconds": self.median_s("warm"),
            "reuse_rate": self.reuse_rate,
            "overhead_seconds": self.overheads(),
            "provisions": [
                {**asdict(item), "kind": item.kind, "overhead_seconds": item.overhead_seconds}
                for item in self.provisions
            ],
            "releases": [{**asdict(item), "overhead_seconds": item.overhead_seconds} for item in self.releases],
            "runner_set_runs": [asdict(item) for item in self.set_runs],
            "retired": [asdict(item) for item in self.retired],
            "checks": [asdict(item) for item in self.checks],
            "leaked_processes": self.leaked_processes,
            "foreign_jobs": self.foreign_jobs,
            "seconds": self.seconds,
        }


def show_report(output: Output, report: DemoReport, *, verbose: bool = True) -> None:
    """Show the figures. The verbose form has a table per kind of result, and every check."""
    if verbose:
        _show_tables(output, report)
    else:
        output.say("")
        output.show(_closing_table(report))
    cold, warm = (f"{seconds:.2f} s" if seconds is not None else "none" for seconds in map(report.median_s, KINDS))
    output.say("", f"provision cold {cold}, warm {warm}; {report.reuse_rate:.0%} of the runners reused")
    if verbose:
        for operation, seconds in report.overheads().items():
            verdict = "met" if seconds < GOAL_S else "missed; is this computer busy?"
            name = operation.replace("_", " ")
            output.say(f"{name}: at most {seconds:.2f} s of overhead (goal {GOAL_S} s: {verdict})")
        output.say("")
        for check in report.checks:
            output.say(check.line, style=None if check.passed else "bold red")
    failed = sum(not check.passed for check in report.checks)
    summary = f"{failed} checks FAILED" if failed else "all checks passed"
    output.say(
        f"{summary} ({len(report.checks)} in {report.seconds:.0f} s)",
        style="bold green" if report.passed else "bold red",
    )


def _closing_table(report: DemoReport) -> FittedTable:
    """Each run with the seconds that it waited for runners."""
    columns = ("run", "scenario", "start", "reused", "created", "seconds")
    rows = [
        (item.run_id, f"runner set, {plural(len(item.waits), 'job')}", item.kind, "", "", f"{median(item.waits):.2f}")
        for item in report.set_runs
        if item.waits
    ]
    rows += [
        (item.run_id, item.name, item.kind, str(item.reused), str(item.created), f"{item.seconds:.2f}")
        for item in report.provisions
    ]
    return FittedTable("Seconds until runners are ready", columns, rows, numeric=frozenset(columns[3:]))


def _show_tables(output: Output, report: DemoReport) -> None:
    numbers = ("reused", "created", "seconds", "registration", "overhead")
    provisions = [
        (
            *(f"{item.run_id} ({item.name})", item.kind, str(item.reused), str(item.created)),
            *(f"{item.seconds:.2f}", f"{item.registration_seconds:.2f}"),
            f"{item.overhead_seconds:.2f}" if item.kind == "warm" else "",
        )
        for item in report.provisions
    ]
    output.say("")
    output.show(FittedTable("Provisions", ("run", "kind", *numbers), provisions, numeric=frozenset(numbers)))
    if report.set_runs:
        columns = ("jobs", "median wait", "longest wait")
        waits = [
            (item.run_id, item.kind, str(len(item.waits)), f"{median(item.waits):.2f}", f"{max(item.waits):.2f}")
            for item in report.set_runs
            if item.waits
        ]
        output.say("")
        output.show(FittedTable("Jobs without provision", ("run", "kind", *columns), waits, numeric=frozenset(columns)))
    retired = [(item.instance_id, item.state, item.reason, item.stop_reason) for item in report.retired]
    output.say("")
    output.show(
        FittedTable(
            "Retired",
            ("instance", "state", "reason", "recorded by the instance"),
            retired,
            no_wrap=frozenset({"instance", "state"}),
            ids=frozenset({"instance"}),
            reductions=[SHORTEN],
        )
    )


# Records ----------------------------------------------------------------------------------------------------------

#: Each known instance with its history, by id.
Histories = Mapping[str, tuple[Instance, Sequence[HistoryEntry]]]


async def read_histories(store: InstanceStore) -> Histories:
    instances = await store.find(frozenset(State))
    return {item.instance_id: (item, await store.history(item.instance_id)) for item in instances}


def foreign_jobs(jobs: Iterable[JobView], histories: Histories, *, pool: str) -> list[str]:
    """Jobs whose instance was assigned to another run at the epoch in the runner's name.

    An instance of a runner set is assigned to the run of its job when the job starts.
    """
    return [f"{job.name} of run {job.run_id}" for job in jobs if _is_foreign(job, histories, pool)]


def _is_foreign(job: JobView, histories: Histories, pool: str) -> bool:
    parsed = parse_runner_name(pool, job.runner_name or "")
    if parsed is None:
        return job.runner_name is not None
    epoch, instance_id = parsed
    if instance_id not in histories:
        return True
    return not any(
        entry.epoch == epoch
        and entry.holder is not None
        and entry.holder.run_id == job.run_id
        and (entry.target in {State.CREATED, State.CLAIMED} or entry.transition == BIND)
        for entry in histories[instance_id][1]
    )


def live_instances(histories: Histories) -> list[str]:
    return [key for key, (instance, _) in histories.items() if instance.state is not State.TERMINATED]


def retirements(histories: Histories, stop_reason: Callable[[str], str]) -> list[DemoRetirement]:
    """All terminations. `stop_reason` returns the reason that an instance recorded itself."""
    return [
        DemoRetirement(
            instance_id=key,
            state=entry.source.value if entry.source else "",
            reason=entry.why,
            stop_reason=stop_reason(key),
        )
        for key, (_, entries) in histories.items()
        for entry in entries
        if entry.is_end
    ]
