"""The record of a smoke run: what ran where, and how long it took, without ids and names, to be published."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date

import remuda
from remuda.ports.clock import Clock

PASSED, FAILED, INTERRUPTED = "passed", "failed", "interrupted"
#: What a step answers that only a real account can tell: rows of docs/reference/verified.md.
ANSWERS = {
    "deploy": "the policy of a deployer is enough; CloudFormation, functions and broker work in a new pool",
    "doctor": "the broker's role passes its own dry runs and writes; quotas, keys and routes are read",
    "cold run": "EC2 launches with the broker's role and the conditions of its policy; stock Ubuntu boots and installs",
    "reuse": "reports of agents pass their policy; an instance is clean for a second run",
    "runner set": "the listener proves itself to its Auto Scaling group and its stack; a job starts by labels",
    "spot notice": "the notice of EC2 reaches the agent",
    "destroy": "nothing is left",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    name: str
    seconds: float
    result: str


@dataclass(kw_only=True)
class SmokeRecord:
    clock: Clock
    day: date
    region: str
    steps: list[RecordedStep] = field(default_factory=list)
    #: Seconds from launch to registration, as `remuda report` measured them; None if no instance has registered.
    boot_s: float | None = None

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Record the step, however it ends."""
        started, result = self.clock.monotonic(), INTERRUPTED
        try:
            yield
            result = PASSED
        except Exception:
            result = FAILED
            raise
        finally:
            seconds = self.clock.monotonic() - started
            self.steps.append(RecordedStep(name=name, seconds=seconds, result=result))

    def text(self, *, spent_usd: float) -> str:
        """The record as Markdown."""
        boot = f"{self.boot_s:.0f} s" if self.boot_s is not None else "not measured"
        return "\n".join(
            [
                f"Smoke run of Remuda {remuda.__version__} on {self.day}",
                "",
                f"- region {self.region}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
                f"- from launch to registration: {boot}",
                f"- at most {spent_usd:.2f} USD",
                "",
                "| step | result | seconds | shows |",
                "|---|---|---|---|",
                *(
                    f"| {each.name} | {each.result} | {each.seconds:.0f} | {ANSWERS.get(each.name, '')} |"
                    for each in self.steps
                ),
                "",
            ]
        )
