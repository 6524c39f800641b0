"""What the demo shows at its end: the table for people, the same as data for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from remuda.cli.output import Output

#: What may be spent beyond the runner's own registration or deregistration.
GOAL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Provisioning:
    name: str
    run_id: str
    reused: int
    created: int
    seconds: float
    #: The slowest runner's own registration.
    registration_seconds: float
    jobs_ok: bool

    @classmethod
    def parse(cls, name: str, document: Mapping[str, Any], *, jobs_ok: bool = True) -> Provisioning:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Releasing:
    name: str
    run_id: str
    instance_ids: tuple[str, ...]
    seconds: float
    deregistration_seconds: float

    @classmethod
    def parse(cls, name: str, document: Mapping[str, Any]) -> Releasing:
        took = [float(seconds) for seconds in document["deregistration_seconds"].values()]
        return cls(
            name=name,
            run_id=str(document["run_id"]),
            instance_ids=tuple(str(item) for item in document["released"]),
            seconds=float(document["seconds"]),
            deregistration_seconds=max(took, default=0.0),
        )

    @property
    def overhead_seconds(self) -> float:
        return round(self.seconds - self.deregistration_seconds, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retired:
    instance_id: str
    #: What it was doing.
    state: str
    why: str
    #: The machine's own last word.
    machine_said: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    text: str
    holds: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    provisions: tuple[Provisioning, ...]
    releases: tuple[Releasing, ...]
    retired: tuple[Retired, ...]
    claims: tuple[Claim, ...]
    leaked_processes: int
    foreign_jobs: int
    seconds: float

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)

    @property
    def reuse_rate(self) -> float:
        reused = sum(item.reused for item in self.provisions)
        every = reused + sum(item.created for item in self.provisions)
        return round(reused / every, 3) if every else 0.0

    def median_s(self, kind: str) -> float | None:
        values = [item.seconds for item in self.provisions if item.kind == kind]
        return round(median(values), 3) if values else None

    def overheads(self) -> dict[str, float]:
        warm = [item.overhead_seconds for item in self.provisions if item.kind == "warm"]
        released = [item.overhead_seconds for item in self.releases]
        return {"warm_provision": max(warm, default=0.0), "release": max(released, default=0.0)}

    def document(self) -> dict[str, Any]:
        return {
            "ok": self.holds,
            "cold_seconds": self.median_s("cold"),
            "warm_seconds": self.median_s("warm"),
            "reuse_rate": self.reuse_rate,
            "overhead_seconds": self.overheads(),
            "provisions": [
                {**asdict(item), "kind": item.kind, "overhead_seconds": item.overhead_seconds}
                for item in self.provisions
            ],
            "releases": [{**asdict(item), "overhead_seconds": item.overhead_seconds} for item in self.releases],
            "retired": [asdict(item) for item in self.retired],
            "claims": [asdict(item) for item in self.claims],
            "leaked_processes": self.leaked_processes,
            "foreign_jobs": self.foreign_jobs,
            "seconds": self.seconds,
        }


def show(output: Output, report: DemoReport) -> None:
    from rich import box  # noqa: PLC0415 - only where a table is shown
    from rich.table import Table  # noqa: PLC0415

    def table(title: str, columns: Sequence[str], numbers: frozenset[str] = frozenset()) -> Table:
        made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for column in columns:
            made.add_column(column, justify="right" if column in numbers else "left")
        return made

    numeric = frozenset({"reused", "created", "seconds", "own registration", "beyond it"})
    runs = table("Provisions", ("run", "kind", *sorted(numeric, key=_ORDER.index)), numeric)
    for item in report.provisions:
        runs.add_row(
            f"{item.run_id} ({item.name})",
            item.kind,
            str(item.reused),
            str(item.created),
            f"{item.seconds:.2f}",
            f"{item.registration_seconds:.2f}",
            f"{item.overhead_seconds:.2f}" if item.kind == "warm" else "",
        )
    output.show(runs)
    retired = table("Retired", ("instance", "was", "why", "the machine's last word"))
    for end in report.retired:
        retired.add_row(end.instance_id, end.state, end.why, end.machine_said)
    output.show(retired)
    output.say(f"cold {report.median_s('cold')} s, warm {report.median_s('warm')} s; {report.reuse_rate:.0%} reused")
    for what, seconds in report.overheads().items():
        verdict = "met" if seconds < GOAL_S else "missed: is this machine busy?"
        output.say(
            f"{what.replace('_', ' ')}: at most {seconds:.2f} s beyond the runner's own (goal {GOAL_S}: {verdict})"
        )
    output.say("")
    for claim in report.claims:
        detail = f" ({claim.detail})" if claim.detail and not claim.holds else ""
        output.say(
            f"{'holds' if claim.holds else 'FAILS'}  {claim.text}{detail}", style=None if claim.holds else "bold red"
        )
    word = "every claim holds" if report.holds else "a claim does not hold"
    output.say(f"\n{word}; {report.seconds:.0f} s", style="bold green" if report.holds else "bold red")


_ORDER = ("reused", "created", "seconds", "own registration", "beyond it")
